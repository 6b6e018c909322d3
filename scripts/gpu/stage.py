"""Runs one stage of what needs a GPU, on a machine with a driver, Python, pytest and numpy alone.

usage: [LIMIT=SECONDS] [OUT=FOLDER] scripts/gpu/stage.sh first|second|tests|measure|sanitize

  first     is it right: what the machine is, programs whose kernels could hang each by itself (what
            hangs is left out from there on), then tests and, in the time that is left, sanitize
  second    how fast is it: operators that no GPU has run or that decide a design, steps of a whole
            model, and some of both with the code for GPUs without wgmma
  tests     what the machine is, the unit programs and the golden models side by side, operators, and
            what of these depends on kernels with the code for GPUs without wgmma
  measure   second, then copies, pinning and all operators
  sanitize  compute-sanitizer's memcheck over unit tests, what no GPU has run first

first and second are for a machine that is lent for minutes: each ends by itself in less than ten.

The programs come from .gpu.tar.xz (scripts/gpu/pack.sh), or from TANDEM_BUILD where that names an
unpacked one or a build folder. Each stage has LIMIT seconds (LIMITS). Every step appends
one JSON line to FOLDER/<stage>.jsonl (default: bench/results) as soon as it ends, whatever its end:

  {"stage", "name", "status", "exit_code", "seconds", "at", "result", "log", "skipped"}

status is passed, failed, "timed out", "not started" or skipped; result is what the step printed, as JSON
where it is JSON lines; log is the end of its stderr; skipped names the tests of a program that were
skipped, and where all were, that is its status. The last line, and the last words printed, are a
summary. The exit status is 0 when every step passed or was skipped for a reason it names.
"""

import concurrent.futures
import glob
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
LIMITS = {"first": 570, "second": 570, "tests": 300, "measure": 590, "sanitize": 120}  # seconds
# The emulator shows that a bundle is whole, by one quick test of each program; all of them run in CTest.
EMULATED_TESTS = {
    "a8": "*gpu_without_f8",
    "f16": "*codes",
    "select": "*layernorm",
    "pool": "*bad_arguments",
    "delta_chunks": "*decode_follows_a_prompt",
    "ngrams": "*gates",
    "longer": "*",
    "device": "*names_and_memory",
    "graphs": "*keys*",
    "weights": "*splits",
    "rows": "*embed*",
    "router": "*ties*",
    "linear": "*without_blas",
    "moe": "*none",
    "moe_pairs": "*pairs",
    "attn_gqa": "*old_pages*",
    "attn_mla": "*bad_batches",
    "delta": "*errors",
    "engine": "*failure_is_not_waited_for",
    "comm": "*host",
}
EMULATED_GOLDEN = "test_logits and qwen3_int8"
# Programs that the code for GPUs without wgmma must pass as well.
OLDER_TESTS = ["device", "weights", "rows", "router", "linear", "a8", "moe", "moe_pairs", "attn_gqa", "attn_mla", "delta",
               "delta_chunks", "select", "pool", "ngrams"]
# Programs with kernels that wait for each other, where a hang would be, and those kernels
# (src/device/cuda/cuda.h: td_cuda_kernels).
CANARIES = {"linear": "wgmma,wide", "a8": "a8", "moe": "wgmma", "attn_mla": "latents,prefill"}
# What sanitizers slow down a hundredfold must be small; what no GPU has run comes first.
SANITIZED = [("attn_mla", "*latents*"), ("linear", "*wide*")]
SANITIZED += [(unit, "*") for unit in ("a8", "delta_chunks", "pool", "select", "ngrams", "graphs")]
SANITIZED += [(unit, "*") for unit in ("attn_gqa", "attn_mla", "delta", "moe_pairs")]
SANITIZED += [("moe", "*moe*"), ("linear", "*linear*")]
# Operators of `second`, in the order in which they run.
OPERATORS = [
    "node graph", "mla_decode v3", "experts v3 fp8", "_drawn v3 fp8", "linear v3 fp8",
    "shared_expert v3 fp8", "experts_a8 v3 fp8", "linear_a8 v3 fp8", "delta_rule", "delta_conv", "mla_prefill v3",
    "select_keys", "mla_selected", "pool v4", "select_blocks", "hyper_", "ngram_", "router v3", "top_logits v3",
    "experts v3 int4-g32", "linear v3 mxfp4", "linear v3 q4_k", "experts v3 q4_k", "decode qwen3-30b", "experts qwen3-30b bf16",
]  # fmt: skip
OLDER_OPERATORS = ["mla_prefill v3", "experts v3 fp8", "experts_a8 v3 fp8"]
F16_OPERATORS = ["mla_prefill v3", "experts v3 fp8", "linear v3 fp8"]  # which GeForce has by sums in F16
FEW_OPERATORS = ["shared_expert v3 fp8", "linear v3 q4_k", "node graph"]  # of `tests`
# Those that the emulator takes seconds for, shrunk; it has tested all.
EMULATED_OPERATORS = [
    "node graph", "experts_drawn v3 fp8", "linear v3 fp8", "delta_conv", "select_keys", "pool v4", "select_blocks",
    "hyper_", "ngram_", "linear v3 q4_k", "decode qwen3-30b e4m3",
]  # fmt: skip
LOG_CHARS, RESULT_CHARS = 4000, 400_000


class Bundle:
    """The programs, and the environment in which they find their libraries and cuBLAS."""

    def __init__(self):
        self.path = Path(os.environ.get("TANDEM_BUILD") or unpacked()).resolve()
        about = self.path / "bundle.json"
        self.about = json.loads(about.read_text()) if about.exists() else {}
        self.is_emulator = bool(self.about.get("emulator"))
        self.library = self.path / "bin" / self.about.get("library", "libtandem_cuda.so")
        for needed in [self.path / "bin" / "tandem", self.library]:
            if not needed.exists():
                sys.exit(f"stage: {needed} is not there: pack the bundle again (scripts/gpu/pack.sh)")
        # Makes the programs run the code for GPUs without wgmma; None where the bundle has none.
        self.older = {"TANDEM_EMU_CAPABILITY": "89"} if self.is_emulator else None
        ptx = self.path / "bin" / "libtandem_cuda_ptx.so"
        if ptx.exists():
            self.older = {"TANDEM_CUDA_LIB": str(ptx)}
        self.blas = None if self.is_emulator else find_blas()
        folders = [self.path / "lib", self.blas, os.environ.get("LD_LIBRARY_PATH")]
        if not has_cxx():
            folders.append(self.path / "lib" / "cxx")
        self.env = {
            **os.environ,
            "TANDEM_BUILD": str(self.path),
            "TANDEM_CUDA_LIB": str(self.library),
            "LD_LIBRARY_PATH": ":".join(str(f) for f in folders if f),
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    def program(self, name):
        return str(self.path / "bin" / name)


def unpacked():
    """Where .gpu.tar.xz is unpacked, after that."""
    archive, folder = ROOT / ".gpu.tar.xz", ROOT / ".gpu"
    about = folder / "gpu" / "bundle.json"
    if archive.exists() and not (about.exists() and about.stat().st_mtime >= archive.stat().st_mtime):
        try:
            with tarfile.open(archive) as tar:
                tar.extractall(folder, filter="data") if hasattr(tarfile, "data_filter") else tar.extractall(folder)
        except tarfile.ReadError as error:
            sys.exit(f"stage: this Python does not read {archive} ({error}): mkdir {folder} && tar -xJf {archive} -C {folder}")
        os.utime(about)
    if not about.exists():
        sys.exit(f"stage: neither {archive} nor {folder} is there: scripts/gpu/pack.sh makes the first")
    return folder / "gpu"


def find_blas():
    """The folder of cuBLAS: the toolkit's, or the one that a package of Python brought."""
    places = ["/usr/local/cuda/lib64", *sorted(glob.glob("/usr/local/cuda-*/lib64"), reverse=True)]
    for path in sys.path:
        places += [f"{path}/nvidia/cu13/lib", f"{path}/nvidia/cublas/lib"]
    places += ["/usr/lib/x86_64-linux-gnu", "/usr/lib64"]
    for major in (13, 12):
        for place in places:
            if os.path.exists(f"{place}/libcublas.so.{major}"):
                return place
    return None


def has_cxx():
    """Whether the machine has a C++ runtime of its own, which then is to be used."""
    probe = "import ctypes; ctypes.CDLL('libstdc++.so.6')"
    return subprocess.run([sys.executable, "-c", probe], stderr=subprocess.DEVNULL).returncode == 0


def result_of(text):
    """JSON lines as a list, one that is cut left out; else lines of text."""
    if not text.startswith(("{", "[")):
        return text[-RESULT_CHARS:].splitlines()
    found = []
    for line in text.splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found[0] if len(found) == 1 else found


def log_of(text):
    """Its lines with errors, and its end."""
    head, end = text[:-LOG_CHARS], text[-LOG_CHARS:]
    wrong = [line for line in head.splitlines() if re.search(r"ERROR|FAILED|error:|LINE  |Sanitizer", line)]
    return "\n".join(wrong)[:LOG_CHARS] + ("\n...\n" if wrong else "") + end


class Stage:
    def __init__(self, name, bundle):
        self.name, self.bundle = name, bundle
        self.limit = float(os.environ.get("LIMIT") or LIMITS[name])
        self.started = time.monotonic()
        folder = Path(os.environ.get("OUT") or ROOT / "bench" / "results")
        folder.mkdir(parents=True, exist_ok=True)
        self.file = open(folder / f"{name}.jsonl", "a")  # noqa: SIM115
        self.lock = threading.Lock()
        self.running, self.ends = set(), {}
        signal.signal(signal.SIGTERM, self.on_term)

    def on_term(self, *_):
        for process in list(self.running):
            kill(process)
        sys.exit(143)

    def left(self):
        return self.started + self.limit - time.monotonic()

    def record(self, name, status, **more):
        commit = {"commit": self.bundle.about["commit"]} if self.bundle.about else {}
        entry = {"stage": self.name, "name": name, "status": status, **more, **commit, "at": time.time()}
        with self.lock:
            self.ends[name] = status
            self.file.write(json.dumps(entry) + "\n")
            self.file.flush()
            os.fsync(self.file.fileno())
            print(f"{name}: {status}" + (f" after {more['seconds']:.1f} s" if "seconds" in more else ""), flush=True)
            if status in ("failed", "timed out"):
                print(*(f"  | {line}" for line in tail_of(more)), sep="\n", flush=True)

    def skip(self, name, why):
        self.record(name, "skipped", result=why)
        print(f"  {why}", flush=True)

    def step(self, name, command, most, **env):
        """Runs a command for at most so many seconds, more where LIMIT is, and no more than are left."""
        most = min(most * max(1, self.limit / LIMITS[self.name]), self.left())
        if most <= 0:
            return self.record(name, "not started", seconds=0.0, result=f"the stage's {self.limit:.0f} s are over")
        begin = time.monotonic()
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as log:
            try:
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=out, stderr=log, cwd=ROOT,
                    env={**self.bundle.env, **env}, start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                return self.record(name, "failed", seconds=0.0, result=str(error))
            self.running.add(process)
            code = wait_or_kill(process, most)
            self.running.discard(process)
            texts = [read_back(f) for f in (out, log)]
        skipped, is_all = skipped_tests(*texts)
        status = "timed out" if code is None else "failed" if code else "skipped" if is_all else "passed"
        self.record(
            name, status, exit_code=code, seconds=round(time.monotonic() - begin, 3), result=result_of(texts[0]),
            log=log_of(texts[1]), **({"skipped": skipped} if skipped else {}),
        )  # fmt: skip
        return status

    def side_by_side(self, steps):
        with concurrent.futures.ThreadPoolExecutor(len(steps)) as pool:
            for step in [pool.submit(self.step, *args, **env) for args, env in steps]:
                step.result()

    def close(self):
        bad = {status: [n for n, s in self.ends.items() if s == status] for status in set(self.ends.values())}
        failed = bad.get("failed", [])
        unfinished = bad.get("timed out", []) + bad.get("not started", [])
        words = [f"{len(bad.get('passed', []))} passed"]
        words += [f"{len(names)} {what}: {', '.join(names)}" for what, names in
                  [("failed", failed), ("not finished", unfinished), ("skipped", bad.get("skipped", []))] if names]  # fmt: skip
        status = "failed" if failed or unfinished or not bad.get("passed") else "passed"
        self.record("summary", status, seconds=round(time.monotonic() - self.started, 3),
                    failed=failed, unfinished=unfinished, skipped=bad.get("skipped", []))  # fmt: skip
        print(f"{self.name}: {'; '.join(words)}; {self.file.name}", flush=True)
        return 0 if status == "passed" else 1


def skipped_tests(out, log):
    """The tests that cmocka or pytest skipped, by name or as a number, and whether they are all."""
    names = [n for n in re.findall(r"^\[  SKIPPED \] (.+)$", log, re.M) if not n.endswith("listed below:")]
    if names:
        return sorted(set(names)), "[  PASSED  ] 0 test(s)." in log
    ends = re.findall(r"^.*\b(?:passed|skipped)\b.* in [\d.]+s.*$", out, re.M)
    found = re.search(r"(\d+) skipped", ends[-1]) if ends else None
    return (int(found[1]), "passed" not in ends[-1]) if found else ([], False)


def read_back(file):
    file.seek(0)
    return file.read().decode(errors="replace")


def tail_of(more):
    result = more.get("result")
    lines = result[-25:] if isinstance(result, list) and all(isinstance(x, str) for x in result) else []
    return lines + more.get("log", "").splitlines()[-15:]


def kill(process):
    """The step with all it has started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def wait_or_kill(process, seconds):
    """The exit status; None where time ran out."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        kill(process)
    try:  # a process in the middle of a call to the driver may outlive its death for a while
        process.wait(5)
    except subprocess.TimeoutExpired:
        pass
    return None


def pytest(*args):
    workers = ["-n", "6"] if importlib.util.find_spec("xdist") else []
    return [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *workers, *args]


def bench(bundle, *args):
    shrink = ["--shrink", "1024"] if bundle.is_emulator else []
    return [bundle.program("tandem"), "bench", "gpu", *args, *shrink]


def facts(stage):
    archs = stage.bundle.about.get("archs", "")
    stage.step("facts", [sys.executable, ROOT / "scripts/gpu/facts.py", stage.bundle.blas or "", archs], 25)


def unit_step(bundle, test, name="{}", **env):
    command = [bundle.program(test)]
    if bundle.is_emulator:
        command.append(EMULATED_TESTS[test.removeprefix("test_cuda_")])
    return (name.format(test), command, 110), env


def golden_step(bundle, name, **env):
    only = ["-k", EMULATED_GOLDEN] if bundle.is_emulator else []
    return (name, pytest("tests/golden/test_golden_cuda.py", *only), 150), env


def tests(stage):
    bundle = stage.bundle
    if stage.name == "tests":
        facts(stage)
    units = (bundle.path / "gpu_tests.txt").read_text().split()
    stage.step("checkpoints", [sys.executable, ROOT / "scripts/golden_models.py", bundle.path], 60)
    steps = [unit_step(bundle, test) for test in units] + [golden_step(bundle, "golden models")]
    lacking = [m for m in ("httpx", "tokenizers") if not importlib.util.find_spec(m)]
    if lacking:
        stage.skip("a server", f"this Python has no {' and no '.join(lacking)}")
    elif not bundle.is_emulator:
        steps.append((("a server", pytest("tests/e2e/test_cuda_serve.py"), 150), {}))
    stage.side_by_side(steps)
    stage.step("operators", bench(bundle, "--only", ",".join(FEW_OPERATORS)), 40)
    if not bundle.older:
        return stage.skip("older", "the bundle has no code for GPUs without wgmma")
    # The first to run has the driver translate PTX, which it keeps.
    first, *rest = [unit_step(bundle, f"test_cuda_{t}", "older {}", **bundle.older) for t in OLDER_TESTS]
    stage.step(*first[0], **first[1])
    stage.side_by_side([*rest, golden_step(bundle, "older golden models", **bundle.older)])


def first(stage):
    bundle = stage.bundle
    facts(stage)
    without = []
    for unit, kernels in CANARIES.items():
        (name, command, _), _ = unit_step(bundle, f"test_cuda_{unit}")
        if stage.step(f"alone {name}", command, 25) == "timed out":
            without.append(kernels)
            bundle.env["TANDEM_CUDA_WITHOUT"] = ",".join(without)
            stage.step(f"{name} without {kernels}", command, 25)
    if without:
        print(f"kernels hang: the rest runs without {', '.join(without)}", flush=True)
    tests(stage)
    if find_sanitizer():
        memcheck(stage)
    else:
        stage.skip("memcheck", "compute-sanitizer is neither in PATH nor in /usr/local/cuda")


PATHS = {"copies": 30, "register": 60, "signals": 15, "stream": 70, "decode": 100, "cache": 45, "interference": 75}  # seconds
# Of these the emulator takes one, two CPU devices the others.
EMULATED_PATHS = {
    "stream": ["--layers", "8", "--threads", "2", "--device", "cpu"],
    "decode": ["--layers", "8", "--threads", "2", "--device", "cpu"],
    "cache": ["--layers", "8", "--threads", "2", "--device", "cpu"],
    "interference": ["--layers", "2", "--threads", "1"],
}


def measure_path(stage, path, name="{}", **env):
    args = EMULATED_PATHS.get(path, []) if stage.bundle.is_emulator else []
    stage.step(name.format(path), bench(stage.bundle, "--path", path, *args), PATHS[path], **env)


def measure_operators(stage, name, operators, most, **env):
    chosen = operators
    if stage.bundle.is_emulator:
        chosen = EMULATED_OPERATORS if operators is OPERATORS else ["linear v3 fp8"]
    stage.step(name, bench(stage.bundle, *(["--only", ",".join(chosen)] if chosen else [])), most, **env)


def gpu_names():
    try:
        return subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def second(stage):
    older = stage.bundle.older
    if stage.name == "second":
        facts(stage)
    measure_operators(stage, "operators", OPERATORS, 200)
    if "GeForce" in gpu_names():
        measure_operators(stage, "operators without F16", F16_OPERATORS, 60, TANDEM_CUDA_WITHOUT="f16")
    for path in ("cache", "decode", "stream", "interference", "signals"):
        measure_path(stage, path)
    if older:  # the first process has the driver translate PTX
        measure_operators(stage, "older operators", OLDER_OPERATORS, 120, **older)
        measure_path(stage, "stream", "older {}", **older)


def measure(stage):
    facts(stage)
    second(stage)
    for path in ("copies", "register"):
        measure_path(stage, path)
    measure_operators(stage, "all operators", [], stage.left())


def sanitize(stage):
    if not find_sanitizer():
        return stage.record("compute-sanitizer", "failed", result="it is neither in PATH nor in /usr/local/cuda")
    facts(stage)
    memcheck(stage)


def memcheck(stage):
    command = [find_sanitizer(), "--tool", "memcheck", "--error-exitcode", "99", "--print-limit", "5"]
    for unit, pattern in SANITIZED:
        stage.step(f"memcheck {unit} {pattern}", [*command, stage.bundle.program(f"test_cuda_{unit}"), pattern], 120)


def find_sanitizer():
    folders = [*os.environ.get("PATH", "").split(":"), "/usr/local/cuda/bin", *glob.glob("/usr/local/cuda-*/bin")]
    for folder in folders + ["/usr/local/cuda/compute-sanitizer"]:
        path = os.path.join(folder, "compute-sanitizer")
        if os.access(path, os.X_OK):
            return path
    return None


def main():
    if len(sys.argv) != 2 or sys.argv[1] not in LIMITS:
        sys.exit(__doc__.split("\n\n")[1])
    stage = Stage(sys.argv[1], Bundle())
    {"first": first, "second": second, "tests": tests, "measure": measure, "sanitize": sanitize}[stage.name](stage)
    sys.exit(stage.close())


if __name__ == "__main__":
    main()
