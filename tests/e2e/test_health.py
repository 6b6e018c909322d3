"""What a server says when it cannot serve: still loading, stuck, or too much asked of it."""

import contextlib
import fcntl
import os
import signal
import socket
import threading
from pathlib import Path

import httpx
import pytest

from serving import Server, wait_until

MAX_CHOICES = 64  # of one request
MAX_WAITING = 512  # sequences of one key
MAX_BATCH = 64
N_CROWDS = (MAX_WAITING + MAX_BATCH) // MAX_CHOICES


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model


def workers_of(server):
    pid = server.process.pid
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@contextlib.contextmanager
def stopped(server):
    """The workers stand still within."""
    pids = workers_of(server)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def get(url, path="/health"):
    return httpx.get(url + path, timeout=120, trust_env=False)


def complete(url, key=None, **kwargs):
    body = {"prompt": "Once", "max_tokens": 4, "temperature": 0, "ignore_eos": True, **kwargs}
    headers = {"Authorization": "Bearer " + key} if key else {}
    url += "/v1/completions"
    return httpx.post(url, json=body, headers=headers, timeout=60, trust_env=False)


def check_refusal(response, status):
    assert response.status_code == status, response.text
    assert int(response.headers["Retry-After"]) >= 1
    assert response.json()["error"]["message"]


@contextlib.contextmanager
def loading(tandem_bin, model, *options):
    """A server that waits for its weights, and its address: opening a shard takes until the lease
    on it is given back, which calling the third does."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)  # how the kernel asks for it
    shard = os.open(next(model.glob("*.safetensors")), os.O_RDWR)
    server = None
    try:
        try:
            fcntl.fcntl(shard, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        except OSError as error:
            pytest.skip(f"this file system knows no leases: {error}")
        server = Server(tandem_bin, model, "--port", str(port), *options, wait=False)
        wait_until(lambda: is_listening(port))
        release = lambda: fcntl.fcntl(shard, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        yield server, f"http://127.0.0.1:{port}", release
    finally:
        os.close(shard)  # ends the lease, too
        signal.signal(signal.SIGIO, before)
        if server:
            server.close()


def is_listening(port):
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize("where", ["mmap", "resident"])
def test_503_while_loading(tandem_bin, model, where):
    with loading(tandem_bin, model, "--weights", where) as (server, url, release):
        response = get(url)
        assert response.status_code == 503
        assert response.json()["status"] == "loading"
        assert "Retry-After" in response.headers
        check_refusal(complete(url), 503)
        assert get(url, "/v1/models").status_code == 200
        assert get(url, "/metrics").status_code == 200
        release()
        wait_until(lambda: get(url).status_code == 200)
        assert complete(url).status_code == 200


def test_ended_while_loading(tandem_bin, model):
    with loading(tandem_bin, model, "--weights", "resident") as (server, url, release):
        server.signal()
        wait_until(lambda: not is_listening(server_port(url)))
        release()
        assert server.wait() == 0
        assert "are in memory" not in server.log()


def server_port(url):
    return int(url.rsplit(":", 1)[1])


def test_503_while_stuck(tandem_bin, model):
    server = Server(tandem_bin, model, "--worker-timeout", "2")
    try:
        assert get(server.url).json()["status"] == "ok"
        with stopped(server):
            wait_until(lambda: get(server.url).status_code == 503)
            response = get(server.url)
            assert response.json()["status"] == "stuck"
            assert "Retry-After" in response.headers
            assert "silent" in server.log()
        wait_until(lambda: get(server.url).status_code == 200)
        assert complete(server.url).status_code == 200
    finally:
        server.close()


def test_a_worker_that_hangs_is_replaced(tandem_bin, model):
    server = Server(tandem_bin, model, "--worker-timeout", "1")
    try:
        before = workers_of(server)
        for pid in before:
            os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: not set(before) & set(workers_of(server)))
        wait_until(lambda: get(server.url).status_code == 200)
        assert "killing it" in server.log()
        assert complete(server.url).status_code == 200
    finally:
        server.close()


def test_429_when_too_many_wait(tandem_bin, model, tmp_path):
    (tmp_path / "keys").write_text("one\nanother\n")
    (tmp_path / "keys").chmod(0o600)
    options = ("--max-batch", str(MAX_BATCH), "--ctx-size", "256", "--api-keys", tmp_path / "keys")
    server = Server(tandem_bin, model, *options)
    found = []

    def crowd():
        prompts = [[i + 1] for i in range(MAX_CHOICES)]
        found.append(complete(server.url, key="one", prompt=prompts, max_tokens=1))

    try:
        with stopped(server):
            threads = [threading.Thread(target=crowd) for _ in range(N_CROWDS)]
            for thread in threads:
                thread.start()
            wait_until(lambda: get(server.url).json()["waiting"] == MAX_WAITING)
            complete_one = lambda: complete(server.url, key="one", prompt=[[1], [2], [3]], max_tokens=1)
            check_refusal(complete_one(), 429)
            check_refusal(complete_one(), 429)
            other = lambda: found.append(complete(server.url, key="another", max_tokens=1))
            threads.append(threading.Thread(target=other))
            threads[-1].start()
            wait_until(lambda: get(server.url).json()["waiting"] == MAX_WAITING + 1)
        for thread in threads:
            thread.join()
        assert [r.status_code for r in found] == [200] * len(threads)
        assert complete_one().status_code == 200
        assert get(server.url).json()["waiting"] == 0
    finally:
        server.close()
