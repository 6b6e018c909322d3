"""Models that are not always loaded: --sleep-after, and several models behind one port."""

import json
import os
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path

import httpx
import pytest

from serving import Server, make_model, wait_until

SLEEP_AFTER_S = 0.3
WAIT_S = 600  # a machine with other work takes long for everything


def get(server, path="/health"):
    return httpx.get(server.url + path, timeout=WAIT_S, trust_env=False)


def state(server, model=None):
    found = get(server).json()
    return found["status"] if model is None else {m["id"]: m["status"] for m in found["models"]}[model]


def complete(server, **kwargs):
    body = {"prompt": "Once", "max_tokens": 4, "temperature": 0, "ignore_eos": True, **kwargs}
    url = server.url + "/v1/completions"
    return httpx.post(url, json=body, timeout=WAIT_S, trust_env=False)


def metrics(server):
    """Values by name and labels, as they are written."""
    lines = [line for line in get(server, "/metrics").text.splitlines() if line[0] != "#"]
    return {key: float(value) for key, value in (line.rsplit(" ", 1) for line in lines)}


def n_loads(server, model="tiny"):
    return metrics(server)[f'tandem_model_loads_total{{model_name="{model}"}}']


def text_of(response):
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


def background(function):
    """Runs it in a thread; the list is its result, once it has one."""
    found = []
    thread = threading.Thread(target=lambda: found.append(function()), daemon=True)
    thread.start()
    return found


# ---- --sleep-after


@pytest.fixture(scope="module")
def sleeper(tandem_bin, tiny_model, tmp_path_factory):
    kv_dir = tmp_path_factory.mktemp("kv")
    options = ["--sleep-after", str(SLEEP_AFTER_S), "--kv-dir", kv_dir, "--ctx-size", "512"]
    server = Server(tandem_bin, tiny_model, *options)
    server.kv_dir = kv_dir
    yield server
    server.close()


def ollama(server, **body):
    body = {"prompt": "Once", "stream": False, "options": {"num_predict": 2}, **body}
    reply = httpx.post(server.url + "/api/generate", json=body, timeout=WAIT_S, trust_env=False)
    assert reply.status_code == 200, reply.text
    return reply.json()


def asleep(server):
    wait_until(lambda: state(server) == "sleeping", WAIT_S)


def test_sleeps_and_wakes(sleeper):
    prompt = list(range(1, 200))
    asleep(sleeper)
    assert sleeper.workers() == {}
    assert not [link for link in open_files(sleeper) if "memfd" in link]  # weights, KV pool, rings
    assert get(sleeper).status_code == 200
    assert get(sleeper, "/v1/models").json()["data"][0]["status"] == "sleeping"
    assert metrics(sleeper)['tandem_model_state{model_name="tiny",state="sleeping"}'] == 1
    before = n_loads(sleeper)
    first = text_of(complete(sleeper, prompt=prompt))
    assert n_loads(sleeper) == before + 1
    asleep(sleeper)
    assert list(sleeper.kv_dir.iterdir())
    again = complete(sleeper, prompt=prompt)
    assert text_of(again) == first
    cached = again.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached > 0  # from the disk
    assert "unloading" in sleeper.log()


def open_files(server):
    found = []
    for link in Path(f"/proc/{server.process.pid}/fd").iterdir():
        try:
            found.append(os.readlink(link))
        except FileNotFoundError:
            pass
    return found


def test_what_needs_no_worker_does_not_wake(sleeper):
    asleep(sleeper)
    loads = n_loads(sleeper)
    url = sleeper.url + "/tokenize"
    assert httpx.post(url, json={"content": "one two"}, trust_env=False).json()["tokens"]
    assert get(sleeper, "/tokenizer_info").status_code == 200
    told = get(sleeper, "/api/tags").json()["models"][0]
    assert told["status"] == "sleeping" and told["details"]["quantization_level"] == "BF16"
    assert n_loads(sleeper) == loads


@pytest.mark.tsan
def test_many_wake_it_once(sleeper):
    asleep(sleeper)
    loads = n_loads(sleeper)
    found = [background(lambda: complete(sleeper, stream=i % 2 == 1)) for i in range(6)]
    wait_until(lambda: all(found), WAIT_S)
    assert [f[0].status_code for f in found] == [200] * 6
    assert n_loads(sleeper) == loads + 1


def test_a_client_that_leaves_while_it_wakes(sleeper):
    asleep(sleeper)
    with pytest.raises(httpx.TimeoutException):
        url = sleeper.url + "/v1/completions"
        httpx.post(url, json={"prompt": "Once"}, timeout=0.001, trust_env=False)
    assert text_of(complete(sleeper))


def test_a_request_keeps_it_awake(sleeper):
    text_of(complete(sleeper))
    found = background(lambda: complete(sleeper, max_tokens=400))
    wait_until(lambda: found or get(sleeper).json()["running"], WAIT_S)
    loads, pids = n_loads(sleeper), sleeper.workers().values()
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(3 * SLEEP_AFTER_S)
    awake = state(sleeper)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: found, WAIT_S)
    assert found[0].json()["usage"]["completion_tokens"] == 400
    assert awake == "ok" and n_loads(sleeper) == loads


def loaded(server):
    return {m["name"]: m["expires_at"] for m in get(server, "/api/ps").json()["models"]}


def test_keep_alive(sleeper):
    """Ollama's way to load a model, to keep it and to let it go."""
    asleep(sleeper)
    assert loaded(sleeper) == {}
    assert ollama(sleeper, prompt="", keep_alive=-1)["done_reason"] == "load"
    loads = n_loads(sleeper)
    time.sleep(3 * SLEEP_AFTER_S)
    assert loaded(sleeper)["tiny"].startswith("2318") and state(sleeper) == "ok"
    assert ollama(sleeper, prompt="", keep_alive=0)["done_reason"] == "unload"
    asleep(sleeper)
    assert ollama(sleeper, prompt="", keep_alive="0s")["done_reason"] == "unload"  # it wakes nothing
    assert n_loads(sleeper) == loads and loaded(sleeper) == {}
    assert ollama(sleeper, raw=True, keep_alive="1h")["eval_count"] == 2
    time.sleep(3 * SLEEP_AFTER_S)
    assert state(sleeper) == "ok" and not loaded(sleeper)["tiny"].startswith("2318")
    assert ollama(sleeper, raw=True)["eval_count"] == 2  # as --sleep-after says again
    asleep(sleeper)


def test_a_model_that_cannot_be_loaded_again(tandem_bin, tiny_model, tmp_path):
    model = shutil.copytree(tiny_model, tmp_path / "m")
    server = Server(tandem_bin, model, "--sleep-after", "0.2", "--weights", "mmap")
    try:
        asleep(server)
        config = (model / "config.json").read_text()
        (model / "config.json").write_text("{")
        response = complete(server)
        assert response.status_code == 503
        assert "could not be loaded" in response.json()["error"]["message"]
        assert str(tmp_path) not in response.text
        assert get(server).status_code == 503
        assert state(server) == "failed"
        (model / "config.json").write_text(config)
        assert text_of(complete(server))
        asleep(server)
    finally:
        server.close()


def test_ends_while_asleep_and_while_waking(tandem_bin, tiny_model):
    server = Server(tandem_bin, tiny_model, "--sleep-after", "0.2")
    asleep(server)
    found = background(lambda: complete(server))
    wait_until(lambda: state(server) != "sleeping" or found, WAIT_S)
    server.close()  # drains: the request is served first
    wait_until(lambda: found)
    assert found[0].status_code == 200
    server = Server(tandem_bin, tiny_model, "--sleep-after", "0.2")
    asleep(server)
    server.close()


# ---- --models


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    parent = tmp_path_factory.mktemp("models")
    for i, name in enumerate(("alpha", "beta", "gamma")):
        make_model(parent / name, seed=i + 1)
    (parent / "broken").mkdir()
    (parent / "broken" / "config.json").write_text("{}")
    (parent / "notes").mkdir()
    (parent / "README").write_text("not a model")
    return parent


class Models(Server):
    def __init__(self, binary, folder, *options):
        super().__init__(binary, None, "--models", folder, *options)


@pytest.fixture(scope="module")
def several(tandem_bin, folder):
    server = Models(tandem_bin, folder, "--ctx-size", "512")
    yield server
    server.close()


def test_models_on_demand(several):
    names = [m["id"] for m in get(several, "/v1/models").json()["data"]]
    assert names == ["alpha", "beta", "gamma"]
    assert "broken is not served" in several.log()
    texts = {name: text_of(complete(several, model=name, max_tokens=16)) for name in names}
    assert len(set(texts.values())) == 3  # three models of their own
    assert state(several, "gamma") == "ok"
    assert [state(several, name) for name in ("alpha", "beta")] == ["sleeping"] * 2
    loads = n_loads(several, "gamma")
    again = text_of(complete(several, model="gamma", max_tokens=16))
    assert again == texts["gamma"]
    assert n_loads(several, "gamma") == loads
    assert [w["model"] for w in get(several).json()["workers"]] == ["gamma"] * len(several.workers())


def test_keep_alive_of_one_of_several(several):
    ollama(several, model="alpha", prompt="", keep_alive="5m")
    assert list(loaded(several)) == ["alpha"]
    assert ollama(several, model="alpha", raw=True, keep_alive=0)["eval_count"] == 2
    wait_until(lambda: loaded(several) == {}, WAIT_S)


def test_unknown_and_missing_names(several):
    for path, extra in (("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
                        ("/v1/completions", {"prompt": "a"}), ("/tokenize", {"content": "a"})):
        for name, status in (("delta", 404), (None, 400)):
            body = {**extra, **({"model": name} if name else {})}
            response = httpx.post(several.url + path, json=body, timeout=WAIT_S, trust_env=False)
            assert response.status_code == status, response.text
            assert "alpha, beta, gamma" in response.json()["error"]["message"]
    assert get(several, "/v1/models/delta").status_code == 404
    assert get(several, "/v1/models/beta").json()["id"] == "beta"
    for query, status in (("model=beta", 200), ("b=1&model=%62eta", 200), ("b=1&model=delt%61", 404)):
        response = get(several, "/tokenizer_info?" + query)
        assert response.status_code == status and ("'delta'" in response.text) == (status == 404)
    response = httpx.post(several.url + "/v1/completions", content="{", trust_env=False)
    assert response.status_code == 400


def test_errors_do_not_say_where_models_are(tandem_bin, folder, tmp_path):
    """A model whose tokenizer is broken: clients read its name, not the folder's path."""
    shutil.copytree(folder / "alpha", tmp_path / "several" / "alpha")
    (tmp_path / "several" / "alpha" / "tokenizer.json").write_text("{")
    server = Models(tandem_bin, tmp_path / "several", "--ctx-size", "512")
    post = lambda path, **body: httpx.post(server.url + path, json=body, timeout=WAIT_S, trust_env=False)
    replies = [
        post("/v1/completions", model="alpha", prompt="a"),
        post("/v1/chat/completions", model="alpha", messages=[{"role": "user", "content": "a"}]),
        post("/tokenize", model="alpha", content="a"),
        post("/api/show", model="alpha"),
    ]
    server.close()
    for reply in replies:
        assert str(tmp_path) not in reply.text, reply.text
    assert replies[2].status_code >= 400 and "alpha/tokenizer.json" in replies[2].text


def test_other_protocols_choose_too(several):
    post = lambda path, **body: httpx.post(several.url + path, json=body, timeout=WAIT_S, trust_env=False)
    message = [{"role": "user", "content": "a"}]
    reply = post("/api/chat", model="alpha:latest", messages=message, stream=False, options={"num_predict": 3})
    assert reply.status_code == 200, reply.text
    reply = post("/v1/messages", model="beta", messages=message, max_tokens=3)
    assert reply.status_code == 200, reply.text
    assert reply.json()["model"] == "beta"
    assert post("/api/show", model="gamma").status_code == 200
    assert post("/v1/messages/count_tokens", model="alpha", messages=message).json()["input_tokens"]
    status = {m["name"]: m["status"] for m in get(several, "/api/tags").json()["models"]}
    assert status == {"alpha": "sleeping", "beta": "ok", "gamma": "sleeping"}


def test_running_requests_end_first(several):
    text_of(complete(several, model="alpha"))
    long = background(lambda: complete(several, model="alpha", max_tokens=300))
    wait_until(lambda: long or get(several).json()["running"], WAIT_S)
    other = background(lambda: complete(several, model="beta"))
    late = background(lambda: complete(several, model="alpha"))
    wait_until(lambda: long and other and late, WAIT_S)
    assert long[0].json()["usage"]["completion_tokens"] == 300
    assert text_of(other[0]) and text_of(late[0])


@pytest.mark.tsan
def test_turns_between_models(several):
    """Whoever waits is served, however many others ask for the model that is loaded."""
    names = ("alpha", "beta", "gamma") * 4
    found = [background(lambda name=name: complete(several, model=name)) for name in names]
    wait_until(lambda: all(found), WAIT_S)
    assert [f[0].status_code for f in found] == [200] * len(names)
    texts = {name: {text_of(f[0]) for n, f in zip(names, found) if n == name} for name in names}
    assert all(len(t) == 1 for t in texts.values())


def test_a_model_that_fails_leaves_the_others(tandem_bin, folder, tmp_path):
    parent = tmp_path / "models"
    shutil.copytree(folder, parent)
    shard = next((parent / "beta").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:1000])
    server = Models(tandem_bin, parent)
    try:
        assert text_of(complete(server, model="alpha"))
        response = complete(server, model="beta")
        assert response.status_code == 503, response.text
        assert state(server, "beta") == "failed"
        assert get(server).status_code == 200
        assert text_of(complete(server, model="alpha"))
    finally:
        server.close()


def test_commands_for_a_running_server(tandem_bin, several, sleeper):
    def tandem(*args, server=several, status=0):
        done = subprocess.run([tandem_bin, *args, "--server", server.url], capture_output=True, text=True)
        assert done.returncode == status, done.stderr
        return done.stdout or done.stderr

    text_of(complete(several, model="alpha"))
    rows = [line.split() for line in tandem("list").splitlines()]
    assert rows[0] == ["NAME", "SIZE", "STATUS"]
    states = {row[0]: row[-1] for row in rows[1:]}
    assert states["alpha"] == "ok" and len(states) == len(get(several, "/v1/models").json()["data"])
    header, row = (line.split() for line in tandem("ps").splitlines())
    assert header[-3:] == ["RUNNING", "WAITING", "CONTEXT"] and row[0] == "alpha" and row[-3:-1] == ["0", "0"]
    (loaded,) = json.loads(tandem("ps", "--json"))["models"]
    assert loaded["name"] == "alpha" and loaded["context_length"] == int(row[-1])
    assert tandem("stop") == ""  # the only one
    wait_until(lambda: state(several, "alpha") == "sleeping", WAIT_S)
    assert len(tandem("ps").splitlines()) == 1
    assert "nothing to stop" in tandem("stop", status=2)
    assert "other" in tandem("stop", "other", status=1)
    asleep(sleeper)
    assert tandem("stop", "tiny", server=sleeper) == ""  # it sleeps already


def test_a_model_is_unloaded_after_its_requests(several):
    text_of(complete(several, model="alpha"))  # what loads is not running yet
    busy = 'tandem_num_requests_running{model_name="alpha"}'
    for _ in range(10):  # a request may be over before it was seen
        running = background(lambda: complete(several, model="alpha", max_tokens=450))
        wait_until(lambda: running or metrics(several)[busy] == 1, WAIT_S)
        if not running:
            break
    assert not running
    asked = httpx.post(several.url + "/api/generate", json={"model": "alpha", "keep_alive": 0}, timeout=WAIT_S, trust_env=False)
    assert asked.json()["done_reason"] == "unload"
    wait_until(lambda: state(several, "alpha") == "sleeping", WAIT_S)
    wait_until(lambda: running, WAIT_S)
    assert text_of(running[0])


def test_two_at_once(tandem_bin, folder):
    server = Models(tandem_bin, folder, "--max-models", "2", "--sleep-after", "1000")
    try:
        for name in ("alpha", "beta"):
            text_of(complete(server, model=name))
        assert [state(server, name) for name in ("alpha", "beta")] == ["ok"] * 2
        text_of(complete(server, model="alpha"))
        text_of(complete(server, model="gamma"))  # beta is the least recently used
        found = {name: state(server, name) for name in ("alpha", "beta", "gamma")}
        assert found == {"alpha": "ok", "beta": "sleeping", "gamma": "ok"}
    finally:
        server.close()


def test_options_that_exclude_each_other(tandem_bin, folder, tiny_model):
    run = lambda *words: subprocess.run([tandem_bin, "serve", *words], capture_output=True, text=True)
    both = run("--models", folder, "--model", tiny_model)
    assert both.returncode == 2 and "leave out --model" in both.stderr
    assert "--models" in run().stderr
    assert "holds a model that can be served" in run("--models", folder / "notes").stderr
