"""What scripts/gpu packs is whole: the emulator's bundle runs in a root that has libc, a shell and
Python with pytest and numpy, and nothing else."""

import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ["pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments", "numpy", "numpy.libs"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        "ASAN_OPTIONS" in os.environ or "TSAN_OPTIONS" in os.environ, reason="a sanitizer's runtime is no part of it"
    ),
]


@pytest.fixture(scope="module")
def namespace():
    """How to run a command with mounts of its own."""
    for how in (["unshare", "-rm"], ["unshare", "-m"]):
        if shutil.which("unshare") and subprocess.run([*how, "mount", "--bind", "/tmp", "/tmp"]).returncode == 0:
            return how
    pytest.skip("no namespace of mounts can be made here (unshare -rm fails)")


@pytest.fixture(scope="module")
def bundle(build_dir, tmp_path_factory):
    if not (build_dir / "bin" / "libtandem_cuda_emu.so").exists():
        pytest.skip("the emulator needs a C++ compiler")
    path = tmp_path_factory.mktemp("bundle") / "gpu.tar.xz"
    pack = ["scripts/gpu/pack.sh", "-o", path, "--emulator", build_dir]
    subprocess.run(pack, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return path


def test_code_for_a_gpu_fits(build_dir, tmp_path):
    """What scripts/gpu/pack.sh makes without arguments, but for PTX, which has room."""
    most, ptx = 20_000_000, 4_500_000
    if not (build_dir / "bin" / "libtandem_cuda.so").exists():
        pytest.skip("the kernels' library needs nvcc")
    path = tmp_path / "gpu.tar.xz"
    done = subprocess.run(["scripts/gpu/pack.sh", "-o", path, "--built", build_dir], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert path.stat().st_size < most - ptx
    script = (ROOT / "scripts" / "gpu" / "pack.sh").read_text()
    assert f"most_bytes={most}" in script


def libraries_of(*programs):
    """What the loader finds for them here, itself included."""
    done = subprocess.run(["ldd", *programs], capture_output=True, text=True)
    words = done.stdout.replace("=>", " ").split()
    return {Path(w) for w in words if w.startswith("/") and not w.endswith(":")}


class BareRoot:
    """A folder to be the root of what runs in it: mounts are made as it starts."""

    def __init__(self, path):
        self.path = path
        self.mounts = []
        for folder in ["bin", "tmp", "project"]:
            (path / folder).mkdir(parents=True)
        for name in ["dev", "proc"]:
            self.mount(Path("/") / name, f"/{name}")
        stdlib, packages = Path(sysconfig.get_path("stdlib")), Path(sysconfig.get_path("purelib"))
        python = Path(sys.executable).resolve()
        self.mount(stdlib, stdlib)
        for name in PACKAGES:
            if (packages / name).exists():
                self.mount(packages / name, f"/packages/{name}")
        if (packages / "py.py").exists():
            self.copy(packages / "py.py", "/packages/py.py")
        self.copy("/bin/sh", "/bin/sh")
        self.copy(python, python)
        modules = [*stdlib.glob("lib-dynload/*.so"), *(packages / "numpy").rglob("*.so")]
        for path in libraries_of("/bin/sh", python, *modules):
            if not path.is_relative_to(packages):
                self.copy(path, path)
        self.python = python

    def inside(self, path):
        return self.path / str(path).lstrip("/")

    def copy(self, source, path):
        self.inside(path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, self.inside(path))

    def mount(self, source, path):
        self.inside(path).mkdir(parents=True, exist_ok=True)
        self.mounts.append((source, self.inside(path)))

    def run(self, namespace, *command, **env):
        script = "".join(f"mount --rbind '{source}' '{to}'\n" for source, to in self.mounts)
        words = [f"{name}={value}" for name, value in env.items()]
        script += "exec env -i " + " ".join(f"'{w}'" for w in words) + f" {shutil.which('chroot')} '{self.path}' \"$@\""
        return subprocess.run(
            [*namespace, "sh", "-ec", script, "sh", *command], capture_output=True, text=True, cwd="/"
        )


@pytest.fixture(scope="module")
def bare_root(bundle, tmp_path_factory):
    root = BareRoot(tmp_path_factory.mktemp("root"))
    for folder in ["scripts", "tests"]:
        root.mount(ROOT / folder, f"/project/{folder}")
    shutil.copy(bundle, root.path / "project" / ".gpu.tar.xz")
    return root


def stage(bare_root, namespace, name, limit=100_000):
    done = bare_root.run(
        namespace, "/bin/sh", "/project/scripts/gpu/stage.sh", name,
        PATH="/bin", PYTHONPATH="/packages", TANDEM_PYTHON=bare_root.python, OUT="/project/out", LIMIT=limit,
    )  # fmt: skip
    lines = (bare_root.path / "project" / "out" / f"{name}.jsonl").read_text().splitlines()
    return done, {entry["name"]: entry for entry in map(json.loads, lines)}


def test_a_bare_machine(bundle, bare_root, namespace):
    assert bundle.stat().st_size < 20_000_000
    assert not [p for p in bare_root.path.rglob("lib*.so*") if p.name.startswith(("libuv", "libcmocka", "libnettle"))]
    done, steps = stage(bare_root, namespace, "first")
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(steps)[1:3] == ["alone test_cuda_linear", "alone test_cuda_a8"]
    units = [path.name for path in (bare_root.path / "project" / ".gpu" / "gpu" / "bin").glob("test_cuda_*")]
    assert units
    older = [name for name in steps if name.startswith("older ")]
    assert {"older test_cuda_linear", "older test_cuda_attn_mla", "older golden models"} < set(older)
    for name in ["facts", *units, "golden models", "operators", *older]:
        assert steps[name]["status"] == "passed"
    for name in units:
        assert "PASSED  ]" in steps[name]["log"]
    assert steps["facts"]["result"]["library"] == "libtandem_cuda_emu.so"
    assert "1 passed" in " ".join(steps["golden models"]["result"])
    head, *cases = steps["operators"]["result"]
    assert head["bf16_peak_by"] == "cuBLAS" and head["shrunk_by"] > 1 and head["machine"]["cpu"]
    assert [c["op"] for c in cases] == ["shared_expert", "linear", "node"] and all(c["us"] > 0 for c in cases)
    assert steps["a server"]["status"] == "skipped" and "httpx" in steps["a server"]["result"]
    assert steps["memcheck"]["status"] == "skipped"
    assert done.stdout.splitlines()[-1].startswith("first: ")


def test_a_failure_is_told_and_gone_past(bare_root, namespace):
    """A program that fails, one that is not there, and time that is over."""
    inside = bare_root.path / "project" / ".gpu" / "gpu" / "bin"
    (inside / "test_cuda_rows").write_text("#!/bin/sh\necho 1 test failed >&2\nexit 3\n")
    (inside / "test_cuda_attn_mla").unlink()
    done, steps = stage(bare_root, namespace, "tests")
    assert done.returncode == 1
    assert steps["test_cuda_rows"]["exit_code"] == 3 and "1 test failed" in steps["test_cuda_rows"]["log"]
    assert steps["test_cuda_attn_mla"]["status"] == "failed"
    assert steps["test_cuda_engine"]["status"] == steps["golden models"]["status"] == "passed"
    assert "4 failed: test_cuda_" in done.stdout.splitlines()[-1]
    wrong = ["test_cuda_attn_mla", "test_cuda_rows"]
    assert sorted(steps["summary"]["failed"]) == [f"older {name}" for name in wrong] + wrong
    done, steps = stage(bare_root, namespace, "tests", limit=0.01)
    assert done.returncode == 1
    assert "facts" in steps["summary"]["unfinished"]


class FakeStage:
    """Runs nothing: `ends` says how steps end that do not pass."""

    def __init__(self, name, bundle, ends):
        self.name, self.bundle, self.ends, self.env_of = name, bundle, ends, {}

    def step(self, name, command, most, **env):
        self.env_of[name] = {**self.bundle.env, **env}
        return self.ends.get(name, "passed")

    def side_by_side(self, steps):
        for args, env in steps:
            self.step(*args, **env)

    def skip(self, name, why):
        pass


def test_a_kernel_that_hangs_takes_no_other_program_with_it(tmp_path, monkeypatch):
    sys.path.insert(0, str(ROOT / "scripts" / "gpu"))
    import stage as module

    (tmp_path / "gpu_tests.txt").write_text("test_cuda_linear\n")
    bundle = SimpleNamespace(path=tmp_path, program=str, about={}, blas=None, env={}, is_emulator=True, older={"OLDER": "1"})
    monkeypatch.setattr(module, "find_sanitizer", lambda: "compute-sanitizer")
    for ends, without in (({}, None), ({"alone test_cuda_a8": "timed out", "alone test_cuda_moe": "timed out"}, "a8,wgmma")):
        bundle.env = {}
        fake = FakeStage("first", bundle, ends)
        module.first(fake)
        later = [env for name, env in fake.env_of.items() if name.startswith("memcheck") or name in ("test_cuda_linear", "golden models")]
        assert len(later) == len(module.SANITIZED) + 2
        assert all(env.get("TANDEM_CUDA_WITHOUT") == without for env in later)
        assert ("test_cuda_a8 without a8" in fake.env_of) == bool(without)


def test_what_is_skipped_is_not_passed():
    sys.path.insert(0, str(ROOT / "scripts" / "gpu"))
    from stage import skipped_tests

    one = "[  SKIPPED ] test_nccl\n[  PASSED  ] {} test(s).\n[  SKIPPED ] 1 test(s), listed below:\n[  SKIPPED ] test_nccl\n"
    assert skipped_tests("", one.format(0)) == (["test_nccl"], True)
    assert skipped_tests("", one.format(3)) == (["test_nccl"], False)
    assert skipped_tests("", "[  PASSED  ] 3 test(s).\n") == ([], False)
    assert skipped_tests("ss\n2 skipped in 0.10s\n", "") == (2, True)
    assert skipped_tests("s.\n1 passed, 1 skipped in 0.10s\n", "") == (1, False)


def test_every_operator_of_a_stage_has_cases(build_dir):
    sys.path.insert(0, str(ROOT / "scripts" / "gpu"))
    from stage import EMULATED_OPERATORS, F16_OPERATORS, FEW_OPERATORS, OLDER_OPERATORS, OPERATORS

    only = ",".join([*OPERATORS, *F16_OPERATORS, *FEW_OPERATORS, *OLDER_OPERATORS, *EMULATED_OPERATORS])
    bench = [build_dir / "bin" / "tandem", "bench", "gpu", "--list", "--only"]
    done = subprocess.run([*bench, only], capture_output=True, text=True)
    assert done.returncode == 0 and "no case is called" not in done.stderr, done.stderr
    assert "no case is called rops" in subprocess.run([*bench, "rope v3,rops"], capture_output=True, text=True).stderr


@pytest.fixture
def emulated(build_dir):
    """Runs a program of the build on the emulator."""

    def run(name, *args, **env):
        env = {**os.environ, "TANDEM_CUDA_LIB": str(build_dir / "bin" / "libtandem_cuda_emu.so"), **env}
        return subprocess.run([build_dir / "bin" / name, *args], capture_output=True, text=True, env=env)

    return run


def test_a_filter_that_means_no_test_fails(bundle, build_dir, emulated):
    for name in (build_dir / "gpu_tests.txt").read_text().split():
        done = emulated(name, "*nothing*")
        assert done.returncode == 2 and "no test is called *nothing*" in done.stderr, name


def test_a_device_that_does_not_open_fails(build_dir, emulated):
    """A program that skips instead would look as if it had tested the device."""
    for name in (build_dir / "gpu_tests.txt").read_text().split():
        assert emulated(name, TANDEM_CUDA_LIB="/not/there.so").returncode > 0, name


def test_facts_are_of_this_gpu():
    sys.path.insert(0, str(ROOT / "scripts" / "gpu"))
    from facts import fault_of

    h100 = {"compute_capability_major": 9, "compute_capability_minor": 0}
    assert fault_of(h100, "80;90a") is None and fault_of(h100, "") is None
    assert "pack.sh 90a" in fault_of(h100, "80") and "sm_90" in fault_of(h100, "80")
    assert "no GPU" in fault_of("libcuda.so.1: cannot open shared object file", "90a")


def test_the_bench_needs_cublas(bundle, emulated):
    some = ["--shrink", "1024", "--only", "rope qwen3"]
    done = emulated("tandem", "bench", "gpu", *some, TANDEM_EMU_BLAS="0")
    assert done.returncode == 1 and "cuBLAS cannot be used: install it" in done.stderr and not done.stdout
    done = emulated("tandem", "bench", "gpu", "--without-cublas", *some, TANDEM_EMU_BLAS="0")
    head, *cases = map(json.loads, done.stdout.splitlines())
    assert head["bf16_peak_by"] == "tandem: cuBLAS is not installed"
    assert {c["op"] for c in cases} == {"rope"}


@pytest.mark.parametrize(("op", "shrink"), [("linear_a8", "128"), ("experts_a8", "64")])
def test_the_bench_of_wgmma(bundle, emulated, op, shrink):
    some = ["--shrink", shrink, "--without-cublas", "--only", f"{op} v3"]
    done = emulated("tandem", "bench", "gpu", *some, TANDEM_EMU_CAPABILITY="90")
    head, *cases = map(json.loads, done.stdout.splitlines())
    assert head["has_wgmma"] and head["wgmma_peak_tflops"] > 0 and cases
    for c in cases:
        peak = head["wgmma_int8_peak_tops" if c["format"] == "int8" else "wgmma_fp8_peak_tflops"]
        assert c[f"share_of_{c['format']}_peak"] == pytest.approx(c["tflops"] / peak)
    assert {c["format"] for c in cases} == {"fp8", "int8"}


def test_measure(bare_root, namespace):
    """Shrunk, on the emulator: every path gives its cases, and the driver's calls that are not there are named."""
    done, steps = stage(bare_root, namespace, "measure")
    assert done.returncode == 0, done.stdout + done.stderr
    order = [name for name in steps if name != "summary"]
    of_operators = ["operators", "older operators", "all operators"]
    assert order[:3] == ["facts", "operators", "cache"] and order[-1] == "all operators"
    results = {name: steps[name]["result"] for name in order}
    for name in of_operators:
        head, *cases = results.pop(name)
        assert head["mma_sync_peak_tflops"] > 0 and head["has_wgmma"] is False
        for c in cases:
            if "tflops" in c:
                assert c["share_of_mma_sync_peak"] == pytest.approx(c["tflops"] / head["mma_sync_peak_tflops"])
    ops = [c["op"] for c in steps["operators"]["result"][1:]]
    assert ops[:2] == ["node", "experts_drawn"] and ops[-1] == "decode"
    older = results.pop("older stream")
    assert [c["tokens"] for c in older[1:]] == [c["tokens"] for c in results["stream"][1:]]
    for name in list(results)[1:]:
        head, *cases = results[name]
        assert head["pinned_gbps"] > 0 and head["machine"]["cpu"] and cases
        assert {c["path"] for c in cases} == {name}
    copies = [c for c in results["copies"][1:] if "gbps" in c]
    assert {(c["case"], c["host_offset"]) for c in copies} == {
        (way, offset) for way in ("host to device", "device to host") for offset in (0, 8)
    }
    for c in copies:
        assert c["share_of_pinned_bandwidth"] == pytest.approx(c["gbps"] / results["copies"][0]["pinned_gbps"])
    assert "small up, large up in parts of 4 MB" in {c["case"] for c in results["copies"][1:]}
    for c in results["register"][1:]:
        assert "unavailable" in c or (c["whole_register_s"] > 0 and c["parts_of_1_gib_unregister_s"] > 0)
    assert any(c.get("waits") for c in results["signals"][1:])
    for c in results["signals"][1:]:
        if c["case"] == "cuBLAS beside a spinning kernel":
            # The emulator's waits where a shape is new; few tokens take a kernel of ours.
            assert c["first_us"] > 0 and c["waits"] is (c["first_us"] >= 5e6)
        else:
            assert c["round_trip_us"] > 0 if c["case"] == "spinning kernel" else "unavailable" in c
    assert results["interference"][0]["kv_dtype"] == "BF16"  # as a server's on a GPU; the others run on CPUs
    check_steps(results)


def test_sanitizers_run_over_some_tests(bare_root, namespace):
    """Every pattern means a test; a finding fails the stage."""
    steps = stage(bare_root, namespace, "sanitize")[1]
    assert steps["compute-sanitizer"]["status"] == "failed"
    fake = bare_root.path / "bin" / "compute-sanitizer"
    fake.write_text('#!/bin/sh\necho "$@"\ncase "$*" in *"test_cuda_moe "*) exit 99 ;; esac\n')
    fake.chmod(0o755)
    done, steps = stage(bare_root, namespace, "sanitize")
    fake.unlink()
    runs = [s["result"][0].split() for name, s in steps.items() if name.startswith("memcheck")]
    assert {Path(program).name for *_, program, _ in runs} > {"test_cuda_a8", "test_cuda_pool", "test_cuda_graphs"}
    for *_, program, pattern in runs:
        source = (ROOT / "tests" / "unit" / f"{Path(program).name}.c").read_text()
        assert fnmatch.filter(re.findall(r"^(?:TEST|FORMS)\((\w+)", source, re.M), pattern)
    assert done.returncode == 1
    (failed,) = steps["summary"]["failed"]
    assert failed.startswith("memcheck moe *moe*") and steps[failed]["exit_code"] == 99


def check_steps(results):
    """Steps of as many layers as are asked for, which share one layer's memory."""
    for name in ("stream", "decode", "cache", "interference"):
        head = results[name][0]
        assert head["aliased_layers"] is True and head["layers"] == results[name][1]["layers"]
        assert head["layer_expert_bytes"] < head["weight_bytes_in_memory"]
    n_moe = results["stream"][0]["layers"] - 3
    assert n_moe > 1
    for c in results["stream"][1:]:
        assert c["streamed_bytes"] == pytest.approx(n_moe * results["stream"][0]["layer_expert_bytes"], rel=0.01)
        n_bytes = c["streamed_bytes"] + c["streamed_dense_bytes"]
        assert c["gbps"] == pytest.approx(n_bytes / c["seconds"] * 1e-9)
        assert c["tokens_per_s"] == pytest.approx(c["tokens"] / c["seconds"])
    assert [c["streamed_dense_bytes"] > 0 for c in results["stream"][1:]] == [False, False, False, True]
    (drafted,) = [c for c in results["decode"][1:] if c["drafted"]]
    assert (drafted["batch"], drafted["drafted"], drafted["microbatches"]) == (1, 2, 1)
    decode = [c for c in results["decode"][1:] if not c["drafted"]]
    assert {(c["batch"], c["microbatches"], c["cpu_threads"]) for c in decode} == {
        (batch, parts, threads) for batch in (1, 4, 8, 16) for parts in (1, 2) for threads in (1, 2) if batch >= parts
    }
    for c in decode:
        of_one = n_moe * results["decode"][0]["layer_expert_bytes"] * 8 / 16
        assert c["expert_bytes"] == pytest.approx(of_one) if c["batch"] == 1 else c["expert_bytes"] > 1.2 * of_one
    *cached, e4m3 = results["cache"][1:]
    n = n_moe * 8
    assert (e4m3["kv_dtype"], e4m3["cached"]) == ("F8_E4M3", n)
    assert {c["kv_dtype"] for c in cached} == {"F32"}  # two CPU devices
    assert [(c["cached"], c["experts_of_token"]) for c in cached] == [(k, n) for k in (0, 1, n // 4, n // 2, n)]
    for c in cached:
        assert c["hit_rate"] == pytest.approx(c["cached"] / n) and c["itl_ms"] > 0
    for c in results["interference"][1:]:
        assert c["itl_alone_ms"] > 0 and c["prompt_tokens_a_step"] > 0 and c["prompt_tokens_per_s"] > 0
        assert c["decode_steps"] == 0 or c["itl_max_ms"] >= c["itl_ms"] > 0
    assert [c.get("slowdown_limit") for c in results["interference"][1:]] == 2 * [None, None, 0.15]
    assert all(c["is_confined"] in (False, True) for c in results["interference"][1:])
