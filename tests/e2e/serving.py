"""A running `tandem serve` for the tests of its HTTP API, and raw sockets to it."""

import fcntl
import hashlib
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import numpy as np

ROOT = Path(__file__).resolve().parent.parent.parent
# A request waits as long as its test may take, not httpx's 5 seconds, where it says nothing else.
httpx._config.DEFAULT_TIMEOUT_CONFIG.read = None
# A sanitizer watches: everything takes several times as long, so that tests repeat less.
SANITIZED = "ASAN_OPTIONS" in os.environ or "TSAN_OPTIONS" in os.environ


def make_model(out, shape="tiny", dtype="bf16", seed=1, options=()):
    """A checkpoint of random weights: what it says is noise, but always the same noise. Made once a build folder, which
    takes a second, and copied."""
    asked = ["--shape", shape, "--dtype", dtype, "--seed", str(seed), *map(str, options)]
    sources = [path.read_bytes() for path in sorted((ROOT / "scripts").glob("*.py"))]
    key = hashlib.sha256(b"".join(sources)).hexdigest()
    folder = ROOT / os.environ.get("TANDEM_BUILD", "build") / "models"
    folder.mkdir(parents=True, exist_ok=True)
    made = folder / key / "_".join(asked).replace("--", "")
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            for other in folder.glob("*/"):  # what other sources, or a killed test, have left
                if other.name != key:
                    shutil.rmtree(other)
            command = [sys.executable, ROOT / "scripts/make_model.py", *asked, "--out", folder / "new"]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            made.parent.mkdir(exist_ok=True)
            (folder / "new").rename(made)
    return Path(shutil.copytree(made, out, copy_function=shutil.copy, dirs_exist_ok=True))


def widen(model):
    """Its BF16 weights in F32, which a GPU multiplies with one kernel, however many tokens a step has."""
    for file in model.glob("*.safetensors"):
        raw = file.read_bytes()
        begin = 8 + int.from_bytes(raw[:8], "little")
        head, data = json.loads(raw[8:begin]), b""
        for name, tensor in head.items():
            if name == "__metadata__":
                continue
            first, end = (begin + offset for offset in tensor["data_offsets"])
            values = raw[first:end]
            if tensor["dtype"] == "BF16":
                tensor["dtype"] = "F32"
                values = (np.frombuffer(values, np.uint16).astype(np.uint32) << 16).tobytes()
            tensor["data_offsets"] = [len(data), len(data) + len(values)]
            data += values
        text = json.dumps(head).encode()
        text += b" " * (-len(text) % 8)
        file.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return model


class Server:
    """Started with a free port; ready once the constructor returns."""

    def __init__(self, binary, model, *options, wait=True, descriptors=None):
        limits = (descriptors, descriptors)
        if "--device" not in options:
            options = ("--device", "cpu", *options)
        self.process = subprocess.Popen(
            [binary, "serve", *(["--model", model] if model else []), "--port", "0", "--threads", "2", *options],
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            preexec_fn=descriptors and (lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limits)),
        )
        self.lines = []
        self.url = None
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if wait and not self._ready.wait(120):
            self.process.kill()
            raise RuntimeError("the server did not start:\n" + self.log())

    def _read(self):
        for line in self.process.stderr:
            self.lines.append(line)
            found = re.search(r"listening on (\S+?),", line)
            if found:
                self.url = found.group(1)
                self._ready.set()
        self._ready.set()

    def log(self):
        return "".join(self.lines)

    def await_line(self, part):
        """A worker's lines come through a pipe: perhaps after what they tell of."""
        wait_until(lambda: part in self.log())

    @property
    def port(self):
        return int(self.url.rsplit(":", 1)[1])

    def cpu_seconds(self):
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def workers(self):
        """Process ids of the workers that live, by role: worker, or prefill and decode."""
        front = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        found = {}
        for pid in front.read_text().split():
            try:
                words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            except (FileNotFoundError, ProcessLookupError):
                continue
            role = [word[len("role=") :] for word in words if word.startswith("role=")]
            if role:  # a dead one has no arguments any more
                found[("worker", "prefill", "decode")[int(role[0])]] = int(pid)
        return found

    def decoder(self):
        """The process id of the worker that writes answers, or None between two lives."""
        workers = self.workers()
        return workers.get("decode", workers.get("worker"))

    def kill_worker(self):
        os.kill(self.decoder(), signal.SIGKILL)

    def signal(self, number=signal.SIGTERM):
        os.kill(self.process.pid, number)

    def wait(self, seconds=120):
        status = self.process.wait(seconds)
        self._reader.join(5)
        return status

    def close(self):
        """Ends the server; a crash or a sanitizer's report on the way fails the caller."""
        if self.process.poll() is None:
            self.signal()
        try:
            status = self.wait()
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        assert status == 0, self.log()


class Wire:
    """A TCP connection on which requests are written byte by byte as a test likes."""

    def __init__(self, server, timeout=120, source=""):
        self.server = server
        self.socket = socket.create_connection(("127.0.0.1", server.port), timeout, (source, 0))
        self.buffer = b""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()

    def send(self, data):
        self.socket.sendall(data if isinstance(data, bytes) else data.encode())

    def post(self, path, body, *headers, version="1.1"):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        lines = [
            f"POST {path} HTTP/{version}",
            f"Host: 127.0.0.1:{self.server.port}",
            "Content-Type: application/json",
            f"Content-Length: {len(data)}",
            *headers,
        ]
        self.send("\r\n".join(lines).encode() + b"\r\n\r\n" + data)

    def _more(self):
        data = self.socket.recv(65536)
        self.buffer += data
        return data

    def until(self, mark):
        while mark not in self.buffer:
            if not self._more():
                raise AssertionError(f"closed before {mark!r}: {self.buffer!r}")
        head, _, self.buffer = self.buffer.partition(mark)
        return head + mark

    def exactly(self, n):
        while len(self.buffer) < n:
            if not self._more():
                raise AssertionError(f"closed within {n} bytes: {self.buffer!r}")
        data, self.buffer = self.buffer[:n], self.buffer[n:]
        return data

    def rest(self):
        while self._more():
            pass
        data, self.buffer = self.buffer, b""
        return data

    def head(self):
        """Status and headers (names in lower case) of the next response."""
        lines = self.until(b"\r\n\r\n").decode("latin-1").split("\r\n")
        assert lines[0].startswith("HTTP/1.1 ")
        headers = {}
        for line in lines[1:-2]:
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        return int(lines[0].split()[1]), headers

    def response(self):
        """Status, headers and body of the next response, of either framing."""
        status, headers = self.head()
        if "content-length" in headers:
            return status, headers, self.exactly(int(headers["content-length"]))
        assert headers.get("transfer-encoding") == "chunked"
        body = b""
        while size := int(self.until(b"\r\n"), 16):
            body += self.exactly(size)
            assert self.exactly(2) == b"\r\n"
        assert self.exactly(2) == b"\r\n"
        return status, headers, body


def events(body):
    """The data of each event of a stream; comments are left out."""
    text = body.decode("utf-8")  # strict: only UTF-8 may leave the server
    found = []
    assert text.endswith("\n\n")
    for block in text[:-2].split("\n\n"):
        if block.startswith(":"):
            continue
        assert block.startswith("data: ") and "\n" not in block, block
        found.append(block[len("data: ") :])
    return found


def metric(server, name):
    """The value of tandem_NAME in /metrics, of the only model."""
    text = httpx.get(server.url + "/metrics", timeout=60, trust_env=False).text
    (line,) = [line for line in text.splitlines() if line.startswith(f"tandem_{name}{{")]
    return float(line.rsplit(" ", 1)[1])


def cached(answer):
    """How many tokens of an answer's prompt the prefix cache had."""
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def wait_until(condition, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.02)
