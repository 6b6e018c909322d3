"""The worker process from outside: killed at bad moments, left idle, orphaned, loaded."""

import concurrent.futures
import json
import os
import signal
import time

import httpx
import pytest

from serving import SANITIZED, Server, make_model, wait_until


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("models") / "tiny")


# Code and threads of both are the same: a sanitizer sees one.
@pytest.fixture(params=[pytest.param("on", marks=[pytest.mark.tsan, pytest.mark.no_asan]), "off"])
def server(tandem_bin, model, request):
    running = Server(tandem_bin, model, "--max-batch", "8", "--disaggregate", request.param)
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


def health(server):
    return httpx.get(server.url + "/health", trust_env=False).json()


def body(prompt="Once upon a time", **kwargs):
    return {"prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True, **kwargs}


def complete(server, **kwargs):
    return httpx.post(
        server.url + "/v1/completions", json=body(**kwargs), timeout=400, trust_env=False
    )


def text_of(response):
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


def kill_worker(server, role=None):
    """SIGKILL; returns when another worker serves."""
    old = server.workers()
    pid = old[role] if role else server.decoder()
    os.kill(pid, signal.SIGKILL)
    wait_until(
        lambda: len(server.workers()) == len(old)
        and pid not in server.workers().values()
        and health(server)["status"] == "ok"
    )


def test_killed_in_mid_stream(server):
    """What was computed lies in the shared pool: the answer goes on, and is the same."""
    n_tokens = 100 if SANITIZED else 300
    whole = text_of(complete(server, max_tokens=n_tokens))
    text, n_chunks = "", 0
    with httpx.stream(
        "POST",
        server.url + "/v1/completions",
        json=body(max_tokens=n_tokens, stream=True),
        timeout=60,
        trust_env=False,
    ) as stream:
        assert stream.status_code == 200
        for line in stream.iter_lines():
            if not line.startswith("data: {"):
                continue
            text += json.loads(line[len("data: ") :])["choices"][0]["text"]
            n_chunks += 1
            if n_chunks == 3:
                server.kill_worker()
    server.await_line("starting it again")
    assert text == whole


def test_killed_before_the_first_token(server):
    """Nothing has been sent yet, so the client never learns of it."""
    with concurrent.futures.ThreadPoolExecutor() as pool:
        role = "prefill" if "prefill" in server.workers() else "worker"
        os.kill(server.workers()[role], signal.SIGSTOP)
        answer = pool.submit(complete, server)
        wait_until(lambda: health(server)["running"] == 1)
        kill_worker(server, role)
        replayed = text_of(answer.result())
    server.await_line("starting it again")
    assert replayed == text_of(complete(server))


@pytest.mark.no_asan
@pytest.mark.parametrize("workers", ["on", "off"])
def test_killed_in_the_middle_of_a_prompt(tandem_bin, model, workers):
    """It goes on behind the pages that are whole, and so does the time that it took."""
    server = Server(tandem_bin, model, "--disaggregate", workers, "--prefill-chunk", "64")
    asked = body([3 + i % 500 for i in range(4000)], stream=True, return_progress=True)
    told, before, timings = [], None, None
    with httpx.stream("POST", server.url + "/v1/completions", json=asked, timeout=300, trust_env=False) as answer:
        for line in answer.iter_lines():
            event = json.loads(line[6:]) if line.startswith("data: {") else {}
            told += [event["prompt_progress"]] if "prompt_progress" in event else []
            if before is None and told and told[-1]["processed"] > 1500:
                before = told[-1]["time_ms"]
                os.kill(server.workers()["prefill" if workers == "on" else "worker"], signal.SIGKILL)
            timings = event.get("timings", timings)
    done, times = [p["processed"] for p in told], [p["time_ms"] for p in told]
    assert done == sorted(set(done)) and done[-1] == 4000 and times == sorted(times)
    assert timings["prompt_n"] == 4000 and timings["prompt_ms"] > before
    server.close()
    assert server.log().count("signal 9") == 1


@pytest.mark.no_asan
def test_the_answer_is_that_of_one_process(tandem_bin, model):
    """Greedy, seeded, with penalties and log-probabilities: to the bit, alone and among many."""
    fields = [
        {"temperature": 0},
        {"temperature": 1.3, "seed": 5, "top_p": 0.9},
        {"temperature": 0.8, "seed": 6, "presence_penalty": 1.5, "frequency_penalty": 0.7},
        {"temperature": 1, "seed": 7, "repetition_penalty": 1.4, "logprobs": 3},
    ]
    asked = [{"prompt": [3 + i] * (1 + 83 * i % 300), **fields[i % 4]} for i in range(8 if SANITIZED else 16)]
    told = {}
    for how in ("off", "on"):
        server = Server(tandem_bin, model, "--disaggregate", how, "--prefill-chunk", "100")
        alone = [complete(server, **fields).json()["choices"] for fields in asked[:4]]
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            answers = pool.map(lambda fields: complete(server, **fields), asked)
            told[how] = [answer.json()["choices"] for answer in answers]
        assert told[how][:4] == alone
        server.close()
    assert told["off"] == told["on"]


def test_one_death_is_not_the_others(tandem_bin, model):
    server = Server(tandem_bin, model, "--max-batch", "8")
    workers = server.workers()
    n_tokens = 200 if SANITIZED else 600
    before = text_of(complete(server, max_tokens=n_tokens))
    with concurrent.futures.ThreadPoolExecutor() as pool:
        answer = pool.submit(complete, server, max_tokens=n_tokens)
        wait_until(lambda: health(server)["workers"][1]["running"] == 1)
        kill_worker(server, "prefill")
        assert text_of(answer.result()) == before
    assert server.workers()["decode"] == workers["decode"]
    assert [w["restarts"] for w in health(server)["workers"]] == [1, 0]
    server.close()


def test_requests_wait_while_a_worker_returns(server):
    before = text_of(complete(server))
    for pid in server.workers().values():
        os.kill(pid, signal.SIGKILL)
    assert text_of(complete(server)) == before


def test_many_deaths(server):
    before = text_of(complete(server))
    for role in list(server.workers()) * 2:
        kill_worker(server, role)
        assert text_of(complete(server)) == before


def test_signals_to_the_group_are_for_the_front(server):
    workers = server.workers()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        for pid in workers.values():
            os.kill(pid, number)
    assert text_of(complete(server))
    assert server.workers() == workers


def test_dies_with_the_front(tandem_bin, model):
    server = Server(tandem_bin, model)
    workers = server.workers()
    assert set(workers) == {"prefill", "decode"}
    for pid in workers.values():
        with open(f"/proc/{pid}/maps") as maps:
            text = maps.read()
        assert "tandem-rings" in text and "tandem-kv" in text
    shared = set(os.listdir("/dev/shm"))
    server.process.kill()
    server.process.wait()
    wait_until(lambda: not any(is_alive(pid) for pid in workers.values()))
    assert set(os.listdir("/dev/shm")) <= shared


def test_idle_takes_no_time(server):
    text_of(complete(server))
    workers = server.workers()
    time.sleep(0.5)

    def ticks():  # user and system, in hundredths of a second
        return sum(int(stat(pid)[11]) + int(stat(pid)[12]) for pid in workers.values())

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
    assert server.wait() == 2
    assert "the model's longest context is" in server.log()
