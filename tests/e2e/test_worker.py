"""The worker process from outside: killed at bad moments, left idle, orphaned, loaded."""

import concurrent.futures
import json
import os
import signal
import time

import httpx
import pytest

from serving import Server, make_model, wait_until


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def server(tandem_bin, model):
    running = Server(tandem_bin, model, "--max-batch", "8")
    yield running
    running.close()


def stat(pid):
    """Fields of /proc/PID/stat from the state on (man proc: field 3 is [0]); None: no such process."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def is_alive(pid):
    fields = stat(pid)
    return fields is not None and fields[0] != "Z"


def worker_of(server):
    """The one child of the server that lives."""
    found = []
    for name in os.listdir("/proc"):
        fields = stat(name) if name.isdigit() else None
        if fields and int(fields[1]) == server.process.pid and fields[0] != "Z":
            found.append(int(name))
    assert len(found) <= 1
    return found[0] if found else None


def health(server):
    return httpx.get(server.url + "/health", trust_env=False).json()


def body(prompt="Once upon a time", **kwargs):
    return {"prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True, **kwargs}


def complete(server, **kwargs):
    return httpx.post(
        server.url + "/v1/completions", json=body(**kwargs), timeout=120, trust_env=False
    )


def text_of(response):
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


def kill_worker(server):
    """SIGKILL; returns when another worker serves."""
    pid = worker_of(server)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: worker_of(server) not in (None, pid) and health(server)["status"] == "ok")


def test_killed_in_mid_stream(server):
    before = text_of(complete(server))
    events = []
    with httpx.stream(
        "POST",
        server.url + "/v1/completions",
        json=body(max_tokens=100000, stream=True),
        timeout=60,
        trust_env=False,
    ) as stream:
        assert stream.status_code == 200
        for line in stream.iter_lines():
            if not line.startswith("data: "):
                continue
            events.append(line[len("data: ") :])
            if len(events) == 3:
                os.kill(worker_of(server), signal.SIGKILL)
    error = json.loads(events[-1])["error"]
    assert "the worker process died (signal 9" in error["message"]
    assert "try again" in error["message"]
    assert not any("error" in json.loads(event) for event in events[:-1])
    wait_until(lambda: health(server)["status"] == "ok", seconds=10)
    assert text_of(complete(server)) == before


def test_killed_before_the_first_token(server):
    """Nothing has been sent yet, so the client never learns of it."""
    with concurrent.futures.ThreadPoolExecutor() as pool:
        os.kill(worker_of(server), signal.SIGSTOP)
        answer = pool.submit(complete, server)
        wait_until(lambda: health(server)["running"] == 1)
        kill_worker(server)
        replayed = text_of(answer.result())
    assert "starting it again" in server.log()
    assert replayed == text_of(complete(server))


def test_many_deaths(server):
    before = text_of(complete(server))
    for _ in range(4):
        kill_worker(server)
        assert text_of(complete(server)) == before


def test_signals_to_the_group_are_for_the_front(server):
    pid = worker_of(server)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(pid, number)
    assert text_of(complete(server))
    assert worker_of(server) == pid


def test_dies_with_the_front(tandem_bin, model):
    server = Server(tandem_bin, model)
    pid = worker_of(server)
    with open(f"/proc/{pid}/maps") as maps:
        assert "tandem-rings" in maps.read()
    shared = set(os.listdir("/dev/shm"))
    server.process.kill()
    server.process.wait()
    wait_until(lambda: not is_alive(pid), seconds=5)
    assert set(os.listdir("/dev/shm")) <= shared


def test_idle_takes_no_time(server):
    text_of(complete(server))
    pid = worker_of(server)
    time.sleep(0.5)

    def ticks():
        fields = stat(pid)
        return int(fields[11]) + int(fields[12])  # user and system, in hundredths of a second

    before = ticks()
    time.sleep(2)
    assert ticks() - before <= 4


def test_a_hundred_at_once(server):
    prompts = [f"Chapter {i % 10} begins" for i in range(100)]
    alone = {p: text_of(complete(server, prompt=p, max_tokens=6)) for p in set(prompts)}
    with concurrent.futures.ThreadPoolExecutor(100) as pool:
        together = pool.map(lambda p: text_of(complete(server, prompt=p, max_tokens=6)), prompts)
        for prompt, text in zip(prompts, together):
            assert text == alone[prompt]
    assert health(server)["running"] == 0


def test_clients_that_leave_free_their_slots(server):
    for _ in range(12):  # more than there are slots
        with httpx.stream(
            "POST",
            server.url + "/v1/completions",
            json=body(max_tokens=100000, stream=True),
            timeout=60,
            trust_env=False,
        ) as stream:
            for line in stream.iter_lines():
                if line.startswith("data: "):
                    break
    wait_until(lambda: health(server)["running"] == 0)
    assert text_of(complete(server))


def test_a_model_that_cannot_be_loaded(tandem_bin, model, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in model.iterdir():
        data = path.read_bytes()
        cut = path.suffix == ".safetensors"
        (broken / path.name).write_bytes(data[: len(data) // 2] if cut else data)
    server = Server(tandem_bin, broken, wait=False)
    assert server.wait() == 1
    assert ".safetensors" in server.log()


def test_a_context_beyond_the_model(tandem_bin, model):
    server = Server(tandem_bin, model, "--ctx-size", "16000000", wait=False)
    assert server.wait() == 1
    assert "the model's longest is" in server.log()
