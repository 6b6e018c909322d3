"""Downloads from a hub that breaks off, redirects, throttles and lies. The network is loopback."""

import contextlib
import fcntl
import hashlib
import http.server
import json
import os
import re
import random
import shutil
import signal
import subprocess
import threading

import httpx
import pytest

from serving import Server
from terminal import Terminal

COMMIT = "0123456789abcdef0123456789abcdef01234567"
BIG = random.Random(7).randbytes(3 << 20)
FILES = {
    "config.json": b'{"a": 1}',
    "model.safetensors": BIG,
    "sub dir/tokenizer.json": b"{}",
    "README.md": b"",
    "encoding/encoding_dsv4.py": b"REASONING_EFFORT_PROMPTS",
    "modeling.py": b"import os",
    "original/consolidated.00.pth": b"twice",
    "pytorch_model.bin": b"twice, too",
}
READ = ["README.md", "config.json", "encoding/encoding_dsv4.py", "model.safetensors", "sub dir/tokenizer.json"]


def git_hash(data):
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class Hub:
    """files by path. plan[path]: what to do for the requests of a file, one after the other, then
    as one should: a status, or "break N" bytes, "whole" in spite of a Range, "redirect", "pause" in the
    middle until resume is set."""

    def __init__(self, files=FILES, lfs=("model.safetensors",), key=None):
        self.files, self.lfs, self.key = dict(files), lfs, key
        self.plan, self.sizes, self.hashes = {}, {}, {}
        self.listing_status = []  # of its next requests
        self.requests = []  # (path, range, authorization, host)
        self.sent = 0
        self.gate = None  # called with the path before a file is sent
        self.resume = threading.Event()
        hub = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                hub.answer(self)

            def log_message(self, *args):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.port = self.server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()

    def listing(self):
        out = []
        for path, data in self.files.items():
            size = self.sizes.get(path, len(data))
            item = {"rfilename": path, "size": size, "blobId": git_hash(data)}
            if path in self.lfs:
                sha = self.hashes.get(path, hashlib.sha256(data).hexdigest())
                item["lfs"] = {"sha256": sha, "size": size, "pointerSize": 130}
            out.append(item)
        return json.dumps({"sha": COMMIT, "siblings": out}).encode()

    def answer(self, request):
        path = httpx.URL("http://x" + request.path).path
        given = request.headers.get("Authorization")
        self.requests.append((path, request.headers.get("Range"), given, request.headers["Host"]))
        if path.startswith("/cdn/"):
            return self.send_file(request, path[len("/cdn/") :])
        if self.key and given != f"Bearer {self.key}":
            return self.send(request, 401, b"no")
        if path == "/api/models/org/name/revision/main" or path.endswith("/revision/v/1"):
            status = self.listing_status.pop(0) if self.listing_status else 200
            return self.send(request, status, self.listing())
        head = f"/org/name/resolve/{COMMIT}/"
        if not path.startswith(head) or path[len(head) :] not in self.files:
            return self.send(request, 404, b"no")
        self.send_file(request, path[len(head) :])

    def send(self, request, status, body, headers=()):
        request.send_response(status)
        for name, value in headers:
            request.send_header(name, value)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)

    def send_file(self, request, path):
        if self.gate:
            self.gate(path)
        data = self.files[path]
        todo = self.plan.get(path, [])
        what = todo.pop(0) if todo else ""
        if isinstance(what, int):
            return self.send(request, what, b"later", [("Retry-After", "1")])
        if what == "endless":  # the page of an error
            request.send_response(404)
            request.end_headers()
            return self.pour(request, b"x" * 65536, 0)
        if what == "silent":  # headers, and never a body
            request.wfile.write(b"HTTP/1.1 200 OK\r\n")
            return self.pour(request, b"X: y\r\n", 0.2)
        if what == "redirect":
            to = f"http://localhost:{self.port}/cdn/{path}"
            return self.send(request, 302, b"", [("Location", to)])
        begin = 0
        given = request.headers.get("Range")
        if given and what != "whole":
            begin = int(given.removeprefix("bytes=").removesuffix("-"))
            request.send_response(206)
            request.send_header("Content-Range", f"bytes {begin}-{len(data) - 1}/{len(data)}")
        else:
            request.send_response(200)
        body = data[begin:]
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        if what.startswith("break"):
            body = body[: int(what.split()[1])]
            request.close_connection = True
        if what == "drip":
            return self.pour(request, b"x", 0.2)
        try:
            if what == "pause":
                half = len(body) // 2
                request.wfile.write(body[:half])
                self.resume.wait(120)
                body = body[half:]
            request.wfile.write(body)
            self.sent += len(body)
        except ConnectionError:
            pass


    def pour(self, request, piece, pause):
        """The same without end, until the other side has enough."""
        request.close_connection = True
        with contextlib.suppress(ConnectionError):
            while not self.resume.wait(pause):
                request.wfile.write(piece)


@pytest.fixture
def hub():
    made = Hub()
    yield made
    made.close()


@pytest.fixture
def pull(tandem_bin, hub, tmp_path):
    """Runs `tandem pull`; returns exit status, standard output and error."""

    def run(*args, command=("pull", "org/name"), wait=True, **more):
        env = dict(os.environ, HF_ENDPOINT=hub.url, HF_HOME=str(tmp_path), TANDEM_HUB_BACKOFF_MS="1")
        for name in "HF_HUB_CACHE", "HF_TOKEN", "HF_TOKEN_PATH", "HF_HUB_OFFLINE", "http_proxy":
            env.pop(name, None)
        env |= more
        process = subprocess.Popen(
            [tandem_bin, *command, *args], env=env, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        if not wait:
            return process
        out, errors = process.communicate()
        return process.returncode, out, errors

    run.cache = tmp_path / "hub" / "models--org--name"
    return run


def check_whole(pull, hub, paths=READ):
    snapshot = pull.cache / "snapshots" / COMMIT
    found = sorted(str(p.relative_to(snapshot)) for p in snapshot.rglob("*") if not p.is_dir())
    assert found == sorted(paths)
    for path in paths:
        link = snapshot / path
        data = hub.files[path]
        name = hashlib.sha256(data).hexdigest() if path in hub.lfs else git_hash(data)
        assert link.read_bytes() == data and link.is_symlink()
        assert os.readlink(link) == "../" * (2 + path.count("/")) + "blobs/" + name
    assert not list(pull.cache.glob("blobs/*.incomplete"))


def test_the_layout_of_the_cache(pull, hub):
    status, out, errors = pull()
    assert status == 0, errors
    assert out == f"{pull.cache}/snapshots/{COMMIT}\n"
    assert (pull.cache / "refs" / "main").read_text() == COMMIT
    check_whole(pull, hub)
    assert "model.safetensors: 0.003 GB" in errors and "\r" not in errors
    fits = errors.index("0.00 GB of weights fit into this machine's")
    assert fits < errors.index("are to be downloaded")  # before it begins
    n = len(hub.requests)
    assert pull()[0] == 0 and len(hub.requests) == n + 1  # the list alone


def test_weights_that_do_not_fit_into_memory(pull, hub):
    hub.sizes = {"model.safetensors": 10**15}  # no machine has so much; the disk is asked first
    status, _, errors = pull()
    assert status == 1
    assert "1000000.00 GB of weights do not fit" in errors and "tandem recommend" in errors
    assert len(hub.requests) == 1


def test_what_is_wanted(pull, hub, tmp_path):
    other = tmp_path / "elsewhere"
    args = ("--include", "*.bin,config.*", "--revision", "v/1")
    status, out, errors = pull(*args, HF_HUB_CACHE=str(other))
    assert status == 0, errors
    folder = other / "models--org--name"
    assert sorted(os.listdir(folder / "snapshots" / COMMIT)) == ["config.json", "pytorch_model.bin"]
    assert (folder / "refs" / "v" / "1").read_text() == COMMIT
    status, _, errors = pull("--include", "*.none")
    assert status == 1 and "--include matches none of its 8 files" in errors


@pytest.mark.parametrize("plan", [["break 100000"] * 7, ["break 1", "break 0", 503, 429, "break 5"]])
def test_a_broken_download_goes_on(pull, hub, plan):
    hub.plan["model.safetensors"] = list(plan)
    status, _, errors = pull()
    assert status == 0, errors
    check_whole(pull, hub)
    ranges = [r for path, r, *_ in hub.requests if path.endswith("model.safetensors")]
    assert len(ranges) == len(plan) + 1 and ranges[0] is None
    assert ranges[-1] == f"bytes={700000 if len(plan) == 7 else 6}-"


def test_a_hub_that_gives_too_little(pull, hub):
    """Or too much: an answer that never begins, a body of a few bytes a second, an error without end."""
    hub.plan["model.safetensors"] = ["silent", "drip"]
    status, _, errors = pull(TANDEM_HUB_STALLED_S="2")
    assert status == 0, errors
    check_whole(pull, hub)
    assert len([path for path, *_ in hub.requests if path.endswith("model.safetensors")]) >= 3
    shutil.rmtree(pull.cache)
    hub.plan["model.safetensors"] = ["endless"]
    status, _, errors = pull()
    assert status == 1 and "model.safetensors" in errors and "404" in errors
    # A byte each time is no progress.
    hub.plan["model.safetensors"] = ["break 1"] * 20
    status, _, errors = pull()
    assert status == 1 and "model.safetensors" in errors
    assert len(hub.plan["model.safetensors"]) == 14


def test_files_with_the_same_content(pull, hub):
    """They are one blob, which one of them brings."""
    for n in 1, 2 << 20:
        hub.files = {"config.json": b"{}", "a.json": b"{}", "model.safetensors": BIG[:n]}
        hub.files |= {f"{i}/model.safetensors": BIG[:n] for i in range(9)}
        hub.lfs = [path for path in hub.files if "safetensors" in path]
        hub.requests.clear()
        status, _, errors = pull()
        assert status == 0, errors
        check_whole(pull, hub, list(hub.files))
        assert len(hub.requests) <= 3
    hub.sizes["0/model.safetensors"] = 7
    status, _, errors = pull()
    assert status == 1 and "two sizes for one hash" in errors


def test_a_begun_file_that_is_none(pull, hub, tmp_path):
    (pull.cache / "blobs").mkdir(parents=True)
    begun = pull.cache / "blobs" / (hashlib.sha256(BIG).hexdigest() + ".incomplete")
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    for plant in (
        lambda: begun.symlink_to(victim),
        lambda: begun.symlink_to(tmp_path / "absent"),
        lambda: begun.hardlink_to(victim),
        lambda: os.mkfifo(begun),
    ):
        plant()
        status, _, errors = pull()
        assert status == 2 and "remove it" in errors
        begun.unlink()
    assert victim.read_bytes() == b"precious" and not (tmp_path / "absent").exists()
    assert pull()[0] == 0
    check_whole(pull, hub)


def test_a_server_without_ranges(pull, hub):
    hub.plan["model.safetensors"] = ["break 1000000", "whole"]
    assert pull()[0] == 0
    check_whole(pull, hub)


def test_a_redirect_does_not_get_the_key(pull, hub, tmp_path):
    hub.key = "secret"
    (tmp_path / "token").write_text(" secret \n")
    hub.plan["model.safetensors"] = ["redirect"]
    status, _, errors = pull()
    assert status == 0, errors
    check_whole(pull, hub)
    for path, _, given, host in hub.requests:
        assert given == (None if path.startswith("/cdn/") else "Bearer secret")
        assert host.startswith("localhost") == path.startswith("/cdn/")


def test_keys_and_names_that_are_wrong(pull, hub):
    hub.key = "secret"
    status, _, errors = pull(HF_TOKEN="other")
    assert status == 2 and "gated" in errors and "HF_TOKEN" in errors
    assert pull(HF_TOKEN="secret")[0] == 0
    hub.key = None
    status, _, errors = pull(command=("pull", "org/other"))
    assert status == 1 and "has no such model" in errors
    status, _, errors = pull("--revision", "gone")
    assert status == 1 and "no such model or revision gone" in errors
    for name in "name", "a/b/c", "../name", "org/..":
        status, _, errors = pull(command=("pull", name))
        assert status == 2 and "ORG/NAME" in errors
    status, _, errors = pull(HF_HUB_OFFLINE="1")
    assert status == 2 and "HF_HUB_OFFLINE" in errors


def test_the_list_is_asked_for_again(pull, hub):
    hub.listing_status = [503, 429]
    assert pull()[0] == 0
    hub.listing_status = [500, 500, 500]
    status, _, errors = pull()
    assert status == 1 and "500" in errors


def test_a_file_that_stays_away(pull, hub):
    hub.plan["model.safetensors"] = [503] * 20
    status, _, errors = pull()
    assert status == 1 and "model.safetensors" in errors and "503" in errors
    assert len(hub.plan["model.safetensors"]) == 14
    assert not (pull.cache / "snapshots").exists()  # nothing looks whole
    hub.plan["model.safetensors"] = [403]
    status, _, errors = pull()
    assert status == 2 and "accept the model's terms" in errors


def test_lies_about_size_and_content(pull, hub):
    hub.sizes["model.safetensors"] = len(BIG) - 1
    status, _, errors = pull()
    assert status == 1 and "larger than the 3145727 bytes the hub lists" in errors
    hub.sizes["model.safetensors"] = len(BIG) + 1
    status, _, errors = pull()
    assert status == 1 and ("416" in errors or "3145728 of 3145729 bytes" in errors)
    hub.sizes.clear()
    hub.hashes["model.safetensors"] = "0" * 64
    status, _, errors = pull()
    assert status == 1 and "model.safetensors: hash mismatch" in errors
    assert not (pull.cache / "snapshots").exists()
    # What a mismatch left is not kept, and the truth is taken.
    hub.hashes.clear()
    assert pull()[0] == 0
    check_whole(pull, hub)


def test_a_begun_file_that_is_wrong(pull, hub):
    sha = hashlib.sha256(BIG).hexdigest()
    (pull.cache / "blobs").mkdir(parents=True)
    begun = pull.cache / "blobs" / f"{sha}.incomplete"
    begun.write_bytes(b"x" * 1000)  # not its beginning
    assert pull()[0] == 0
    check_whole(pull, hub)
    (pull.cache / "blobs" / sha).unlink()
    begun.write_bytes(BIG + b"more")
    assert pull()[0] == 0
    check_whole(pull, hub)


def test_files_come_side_by_side(pull, hub):
    both = threading.Barrier(2)
    paths = "config.json", "model.safetensors"
    hub.gate = lambda path: both.wait() if path in paths else None
    assert pull()[0] == 0


def test_interrupted(pull, hub):
    reached, go = threading.Event(), threading.Event()

    def gate(path):
        if path == "model.safetensors" and len(hub.plan[path]) == 0:
            reached.set()
            go.wait()

    hub.plan["model.safetensors"] = ["break 2000000"]
    hub.gate = gate
    process = pull(wait=False)
    reached.wait()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate()
    go.set()
    assert process.returncode == 130 and "kept for the next run" in errors
    (begun,) = pull.cache.glob("blobs/*.incomplete")
    assert begun.stat().st_size == 2000000
    hub.gate = None
    hub.sent = 0
    assert pull()[0] == 0 and hub.sent <= len(BIG) - 2000000 + 100
    check_whole(pull, hub)


def test_progress_on_a_terminal(tandem_bin, hub, tmp_path, monkeypatch):
    hub.plan = {"model.safetensors": ["pause"]}
    for name in "HF_HUB_CACHE", "HF_TOKEN", "HF_TOKEN_PATH", "HF_HUB_OFFLINE", "http_proxy":
        monkeypatch.delenv(name, raising=False)
    env = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path)}
    terminal = Terminal(tandem_bin, "pull", "org/name", env=env)
    terminal.wait_for(b"\r[##########          ] 0.00 of 0.00 GB  ")
    terminal.wait_for(b" left \x1b[K")
    hub.resume.set()
    assert terminal.end() == 0
    # The bar is erased, and no line a file beside it.
    last = terminal.seen.rsplit(b"\r\x1b[K", 1)[1]
    assert COMMIT.encode() in last and b"[#" not in last and b"files" not in terminal.seen


def test_no_space(pull, hub):
    hub.sizes["model.safetensors"] = 10**14
    status, _, errors = pull()
    assert status == 1 and "100000.0 GB are to be downloaded" in errors and "HF_HUB_CACHE" in errors
    assert len(hub.requests) == 1


def test_paths_that_leave_the_folder(pull, hub):
    for path in "../config.json", "/config.json", "a//b.json", "a/../b.json":
        hub.files = {path: b"{}"}
        status, _, errors = pull()
        assert status == 1 and "not a path inside a model" in errors


def test_two_at_once(pull, hub):
    (pull.cache / "blobs").mkdir(parents=True)
    begun = pull.cache / "blobs" / (hashlib.sha256(BIG).hexdigest() + ".incomplete")
    with open(begun, "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        status, _, errors = pull()
    assert status == 1 and "another process is downloading it" in errors


@pytest.fixture
def model_hub(hub, tiny_model):
    files = {p.name: p.read_bytes() for p in tiny_model.iterdir()}
    hub.files, hub.lfs = files, [name for name in files if name.endswith(".safetensors")]
    return hub


def test_a_model_by_its_name(pull, model_hub):
    inspect = ("inspect", "--model", "org/name")
    status, out, errors = pull(command=inspect)
    assert status == 0 and "downloading it" in errors and out
    n = len(model_hub.requests)
    status, again, errors = pull(command=inspect)
    assert (status, again) == (0, out) and len(model_hub.requests) == n
    # Without one of its files it is not whole.
    snapshot = pull.cache / "snapshots" / COMMIT
    weights = sorted(snapshot.glob("*.safetensors"))[-1]
    weights.unlink()
    status, _, errors = pull(command=inspect, HF_HUB_OFFLINE="1")
    assert status == 2 and "nor complete" in errors
    assert pull(command=inspect)[0] == 0 and weights.exists()


def test_short_names(pull, tandem_bin, hub, tiny_model, tmp_path):
    hub.files = {p.name: p.read_bytes() for p in tiny_model.iterdir()}
    for name in "qwen3-30b-a3b", "Qwen3-30B-A3B-FP8", "qwen3-30b-a3b:Q4_K_M", "moonlight-16b-a3b":
        repo = "moonshotai/Moonlight-16B-A3B-Instruct" if "moon" in name else "Qwen/Qwen3-30B-A3B-FP8"
        hub.requests.clear()
        pull(command=("pull", name))
        assert any(repo in path for path, *_ in hub.requests), (name, hub.requests)
    for command in "inspect", "run", "pull", "serve":
        status, _, errors = pull(command=(command, "qwen3-30b-a3d:Q8_0"))
        assert status == 2 and "did you mean Qwen3-30B-A3B:Q8_0?" in errors
    status, _, errors = pull(command=("inspect", "gpt-oss-20b"), HF_HUB_OFFLINE="1")
    assert status == 2 and "openai/gpt-oss-20b" in errors
    shutil.copytree(tiny_model, tmp_path / "gpt-oss-20b")
    here = subprocess.run([tandem_bin, "inspect", "gpt-oss-20b"], cwd=tmp_path, capture_output=True)
    assert here.returncode == 0, here.stderr


def test_a_server_offers_the_name(tandem_bin, model_hub, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", model_hub.url)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    server = Server(tandem_bin, "org/name")
    try:
        models = httpx.get(server.url + "/v1/models").json()["data"]
        assert [m["id"] for m in models] == ["org/name"]
    finally:
        server.close()


def test_a_quantization(pull, hub):
    """One of the GGUF files, of several that end so the one with the shortest name, with its parts."""
    few = {f"M-{q}.gguf": q.encode() for q in ("Q8_0", "Q4_K_M", "UD-Q4_K_M")}
    parts = {f"big/M-BF16-0000{i}-of-00002.gguf": b"part %d" % i for i in (1, 2)}
    hub.files = few | parts | {"README.md": b"", "mmproj-BF16.gguf": b"vision"}
    snapshot = pull.cache / "snapshots" / COMMIT
    for quant, wanted in (("q4_k_m", ["M-Q4_K_M.gguf"]), ("BF16", sorted(parts))):
        before = {p for p in snapshot.rglob("*.gguf")}
        status, out, errors = pull(command=("pull", f"org/name:{quant}"))
        assert status == 0, errors
        assert out.strip() == str(snapshot / wanted[0])
        new = {p for p in snapshot.rglob("*.gguf")} - before
        assert {str(p.relative_to(snapshot)) for p in new} == set(wanted)
    status, _, errors = pull(command=("pull", "org/name:Q2_K"))
    assert status == 1 and "no GGUF files of quantization Q2_K, but of Q8_0, Q4_K_M, BF16" in errors
    # Without weights of its own a repository is none to run: one quantization has to be chosen.
    hub.files["config.json"] = b"{}"
    status, _, errors = pull(command=("pull", "org/name"))
    assert status == 1 and "of Q8_0, Q4_K_M, BF16: give one quantization, as org/name:Q8_0" in errors
    status, _, errors = pull(command=("inspect", "--model", "org/name"), HF_HUB_OFFLINE="1")
    assert status == 2 and re.search(r"GGUF files of [\w, ]+: give one quantization, as org/name:(Q4_K_M|BF16)$", errors.strip())
    hub.files = {"config.json": b"{}", "pytorch_model.bin": b"x"}
    status, _, errors = pull(command=("pull", "org/name"))
    assert status == 1 and "it has no safetensors and no GGUF files" in errors
    hub.files = few | {"IQ1_S/M-1.gguf": b"by its folder"}
    status, out, errors = pull(command=("pull", "org/name:iq1_s"))
    assert status == 0 and out.strip() == str(snapshot / "IQ1_S/M-1.gguf")
    status, _, errors = pull("--model", "org/name:BF16", command=("inspect",))
    assert status == 1 and "not a GGUF file" in errors  # found in the cache


# ---- list, rm


def cached(cache, repo, files, commit="c0ffee"):
    """A model as programs of the hub leave it: blobs, and links to them."""
    folder = cache / ("models--" + repo.replace("/", "--"))
    for path, n_bytes in files.items():
        blob = folder / "blobs" / f"{len(list(folder.glob('blobs/*'))):x}"
        link = folder / "snapshots" / commit / path
        for parent in (blob.parent, link.parent, folder / "refs"):
            parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(bytes(n_bytes))
        link.symlink_to(os.path.relpath(blob, link.parent))
    (folder / "refs/main").write_text(commit)
    return folder


def test_models_on_disk(tandem_bin, tmp_path):
    def tandem(*words, status=0):
        done = subprocess.run([tandem_bin, *words], env={**os.environ, "HF_HUB_CACHE": str(tmp_path)},
                              capture_output=True, text=True)
        assert done.returncode == status, done.stderr
        return done.stdout if status == 0 and words[0] == "list" else done.stderr

    assert tandem("list").split() == ["NAME", "SIZE", "HOLDS"]
    whole = cached(tmp_path, "org/Whole-1B", {"config.json": 10, "model.safetensors": 5 << 20})
    gguf = cached(tmp_path, "other/Model-GGUF", {"Model-Q4_K_M.gguf": 3 << 20, "Q8_0/Model-Q8_0.gguf": 7 << 20})
    partial = cached(tmp_path, "org/Partial", {"config.json": 10})
    (partial / "blobs/abc.incomplete").write_bytes(bytes(1 << 20))
    (tmp_path / "datasets--org--data").mkdir()
    rows = {line.split()[0]: line for line in tandem("list").splitlines()[1:]}
    assert sorted(rows) == ["org/Partial", "org/Whole-1B", "other/Model-GGUF"]
    assert "5.00 MiB  safetensors" in rows["org/Whole-1B"] and "incomplete" in rows["org/Partial"]
    assert "10.00 MiB" in rows["other/Model-GGUF"]
    assert "Q4_K_M" in rows["other/Model-GGUF"] and "Q8_0" in rows["other/Model-GGUF"]
    listed = {m["name"]: m for m in json.loads(tandem("list", "--json"))["models"]}
    assert listed["org/Whole-1B"] == {"name": "org/Whole-1B", "size": (5 << 20) + 10, "safetensors": True,
                                      "quantizations": "", "incomplete": False}
    assert "7.00 MiB freed" in tandem("rm", "other/Model-GGUF:Q8_0")
    assert (gguf / "snapshots/c0ffee/Model-Q4_K_M.gguf").stat().st_size == 3 << 20
    assert [blob.stat().st_size for blob in (gguf / "blobs").iterdir()] == [3 << 20]
    assert "no GGUF files of Q8_0" in tandem("rm", "other/Model-GGUF:Q8_0", status=1)
    assert "5.00 MiB freed" in tandem("rm", "org/Whole-1B") and not whole.exists() and partial.exists()
    assert "not in the hub's cache" in tandem("rm", "org/Whole-1B", status=1)
    for wrong in ([], [str(partial)], ["../escape"], ["org/..:Q8_0"]):
        assert "tandem rm" in tandem("rm", *wrong, status=2)
    assert partial.exists()
