"""What stands on stderr: --log json is one object a line, of every process."""

import contextlib
import json
import os
import signal
import socket
import subprocess
from datetime import datetime
from pathlib import Path

import httpx
import pytest

from serving import Server, wait_until

pytestmark = pytest.mark.tsan


def is_ready(server):
    return httpx.get(server.url + "/health", trust_env=False).status_code == 200


def children(server):
    pid = server.process.pid
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def entries_of(server):
    return [json.loads(line) for line in list(server.lines)]


def workers_in(entries):
    return {e["pid"] for e in entries if e["role"] != "front" and e["level"] == "debug"}


def test_every_line_is_an_object(tandem_bin, tiny_model):
    server = Server(tandem_bin, tiny_model, "--log", "json", "--log-level", "debug")
    try:
        before = children(server)
        os.kill(before[0], signal.SIGKILL)
        # The worker that was killed, and the next.
        wait_until(lambda: set(before) < workers_in(entries_of(server)) and is_ready(server))
    finally:
        server.close()
    entries = entries_of(server)
    for entry in entries:
        assert set(entry) == {"ts", "level", "msg", "pid", "role"}
        datetime.fromisoformat(entry["ts"].replace("Z", "+00:00"))
        assert (entry["pid"] == server.process.pid) == (entry["role"] == "front")
    assert any(e["level"] == "error" and "signal 9" in e["msg"] for e in entries)


def test_a_stderr_that_nobody_reads(tandem_bin, tiny_model):
    """It is full before the first line: the server starts, answers and restarts its worker all the same."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    n_filled = 0
    for size in (4096, 1):
        with contextlib.suppress(BlockingIOError):
            while True:
                n_filled += os.write(writing, b"x" * size)
    os.set_blocking(writing, True)
    command = [tandem_bin, "serve", "--model", tiny_model, "--port", str(port), "--log-level", "debug"]
    process = subprocess.Popen(command, stderr=writing)
    os.close(writing)
    get = lambda: httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).status_code

    def is_up():
        with contextlib.suppress(httpx.TransportError):
            return get() == 200
        return process.poll() is not None

    try:
        wait_until(is_up, seconds=60)
        front = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        before = front.read_text().split()
        for pid in before:
            os.kill(int(pid), signal.SIGKILL)
        wait_until(lambda: not set(before) & set(front.read_text().split()) and is_up(), seconds=60)
        body = {"prompt": "Once", "max_tokens": 4}
        url = f"http://127.0.0.1:{port}/v1/completions"
        assert httpx.post(url, json=body, timeout=60, trust_env=False).status_code == 200
        with open(reading, "rb", closefd=False) as pipe:
            assert pipe.read(n_filled) == b"x" * n_filled
            assert b"lines of the log were dropped" in pipe.readline()
    finally:
        process.terminate()
        os.close(reading)
        assert process.wait(30) == 0


@pytest.mark.parametrize("wrong", [["--nope"], ["--port", "99999"], ["word"], ["--weights", "disk"]])
def test_what_is_wrong_with_the_options(tandem_bin, tiny_model, wrong):
    command = [tandem_bin, "serve", "--model", tiny_model, *wrong, "--log", "json"]
    answer = subprocess.run(command, capture_output=True, text=True)
    (entry,) = [json.loads(line) for line in answer.stderr.splitlines()]
    assert answer.returncode == 2
    assert entry["level"] == "error" and wrong[0] in entry["msg"]


def test_bad_format_is_refused(tandem_bin):
    answer = subprocess.run([tandem_bin, "serve", "--log", "xml"], capture_output=True, text=True)
    assert answer.returncode == 2
    assert "--log xml: give text or json" in answer.stderr
