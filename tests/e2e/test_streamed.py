"""Experts that come from the drive: the texts of a model in memory, from less of it."""

import os
import re
import shutil
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from serving import Server, Wire, make_model, wait_until

OPTIONS = ["--device", "cpu", "--threads", "2", "--ctx-size", "512"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("streamed") / "m", "tiny-qwen3", "bf16")


def ask(server, prompt, n=24):
    body = {"prompt": prompt, "max_tokens": n, "temperature": 0, "ignore_eos": True}
    return httpx.post(server.url + "/v1/completions", json=body, timeout=120, trust_env=False)


def text_of(response):
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


PROMPTS = [" ".join(str(7 * k + i) for i in range(20 + 9 * k)) for k in range(6)]


def metric(server, name):
    text = httpx.get(server.url + "/metrics", trust_env=False).text
    return sum(float(v) for v in re.findall(rf"^tandem_{name}{{[^}}]*}} (\S+)$", text, re.M))


def workers(server):
    return Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()


def texts(server):
    with ThreadPoolExecutor(4) as pool:
        return [text_of(r) for r in pool.map(lambda p: ask(server, p), PROMPTS)]


def test_texts_of_less_memory(tandem_bin, model):
    said = {}
    for where in ["resident", "stream", "stream=0.0003", "stream=0.001"]:
        server = Server(tandem_bin, model, "--weights", where, *OPTIONS)
        said[where] = texts(server)
        if where == "stream=0.0003":
            wait_until(lambda: metric(server, "streamed_expert_misses_total") > 0)
            wait_until(lambda: metric(server, "streamed_expert_read_bytes_total") > 0)
            assert 0 < metric(server, "streamed_expert_slots") < 16
            top = subprocess.run([tandem_bin, "top", "--server", server.url], capture_output=True, text=True)
            assert re.search(r"^drive     memory for \d+ experts", top.stdout, re.M), top.stdout + top.stderr
        assert ("experts are read from the drive" in server.log()) == (where != "resident")
        server.close()
    assert all(one == said["resident"] for one in said.values())


@pytest.mark.no_asan
@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_the_layer_that_drafts(tandem_bin, build_dir, monkeypatch, tmp_path, device):
    """Its experts are where others' are: it makes the same guesses, and texts are those of a model in memory."""
    model = make_model(tmp_path / "m", options=["--mtp"])
    more, prompts, n_drafted = OPTIONS, PROMPTS, {}
    if device == "gpu":
        monkeypatch.setenv("TANDEM_CUDA_LIB", str(build_dir / "bin" / "libtandem_cuda_emu.so"))
        more = ["--device", "cuda", "--expert-device", "cpu", "--stream-from", "60", "--expert-cache", "off", *OPTIONS[2:]]
        prompts = PROMPTS[1::3]

    def texts_of(where, draft):
        server = Server(tandem_bin, model, "--weights", where, "--draft", draft, "--max-batch", "1", *more)
        said = [text_of(ask(server, prompt, 12)) for prompt in prompts]
        n_drafted[where] = metric(server, "spec_decode_num_draft_tokens_total")
        server.close()
        return said

    said = texts_of("resident", "off")
    for where in ["resident", "stream=0.0006"]:
        assert texts_of(where, "3") == said
    assert n_drafted["stream=0.0006"] == n_drafted["resident"] > 16 * len(prompts)


def test_a_mirror(tandem_bin, model, tmp_path):
    """The same texts from two drives, and from the one that is left."""
    first, second = tmp_path / "m", tmp_path / "mirror"
    shutil.copytree(model, first)
    shutil.copytree(model, second)
    server = Server(tandem_bin, first, "--weights", "stream=0.0003", "--mirror", str(second), *OPTIONS)
    said = texts(server)
    files = [os.readlink(fd) for fd in Path(f"/proc/{workers(server)[0]}/fd").iterdir()]
    assert {Path(name).parent for name in files if name.endswith(".safetensors")} == {first, second}
    for path in first.glob("*.safetensors"):
        os.truncate(path, path.stat().st_size // 8)
    assert texts(server) == said
    for path in second.glob("*.safetensors"):
        os.truncate(path, path.stat().st_size // 8)
    assert ask(server, "1 2 3 something else").status_code == 500
    server.close()
    for folder, said in [(first, "it is not the file that the model has"), (tmp_path, "No such file or directory")]:
        refused = subprocess.run([tandem_bin, "run", "-m", model, "-p", "x", "--weights", "stream", "--mirror", folder,
                                  *OPTIONS], capture_output=True, text=True)
        assert refused.returncode == 2 and f"--mirror {folder}: model" in refused.stderr and said in refused.stderr


@pytest.mark.no_asan
def test_through_a_gpu(tandem_bin, model, build_dir, monkeypatch, tmp_path):
    """Prompts through its ring, decode beside on the CPU; a worker that dies; a file that is cut."""
    copy = tmp_path / "m"
    shutil.copytree(model, copy)
    monkeypatch.setenv("TANDEM_CUDA_LIB", str(build_dir / "bin" / "libtandem_cuda_emu.so"))
    gpu = ["--device", "cuda", "--expert-device", "cpu", "--stream-from", "60", *OPTIONS[2:]]

    def some_texts(server):
        with ThreadPoolExecutor(2) as pool:
            return [text_of(r) for r in pool.map(lambda p: ask(server, p, 6), PROMPTS[::3])]

    server = Server(tandem_bin, copy, "--weights", "resident", *gpu)
    said = some_texts(server)
    server.close()
    server = Server(tandem_bin, copy, "--weights", "stream=0.0006", *gpu)
    assert some_texts(server) == said
    assert 0 < metric(server, "streamed_expert_slots") < 16
    os.kill(int(workers(server)[0]), signal.SIGKILL)
    wait_until(lambda: httpx.get(server.url + "/health", trust_env=False).status_code == 200)
    assert some_texts(server) == said
    pids = workers(server)
    for path in copy.glob("*.safetensors"):
        os.truncate(path, path.stat().st_size // 8)
    failed = ask(server, PROMPTS[5])
    assert failed.status_code == 500
    assert "cannot be read" in failed.json()["error"]["message"]
    assert workers(server) == pids
    server.close()


@pytest.mark.no_asan
@pytest.mark.parametrize("device", ["cpu", "gpus"])
def test_a_client_that_leaves_during_a_step(tandem_bin, model, build_dir, monkeypatch, tmp_path, device):
    """It frees the worker while the drive gives nothing; who waits behind it has the text as ever. With two GPUs its
    recurrent states are handed over from one to the other."""
    held = tmp_path / "held"
    more = ["--disaggregate", "off", *OPTIONS]
    if device == "gpus":
        model = make_model(tmp_path / "m", "tiny-qwen3-next")
        monkeypatch.setenv("TANDEM_CUDA_LIB", str(build_dir / "bin" / "libtandem_cuda_emu.so"))
        monkeypatch.setenv("TANDEM_EMU_DEVICES", "2")
        more = ["--device", "cuda", "--devices", "0,1", "--disaggregate", "on", "--expert-device", "cpu", *OPTIONS[2:]]
        more += ["--stream-from", "16777216", "--max-batch", "2"]
    monkeypatch.setenv("LD_PRELOAD", str(build_dir / "bin" / "libheld_reads.so"))
    monkeypatch.setenv("TANDEM_HELD_READS", str(held))
    server = Server(tandem_bin, model, "--weights", "stream=0.0006" if device == "gpus" else "stream=0.0003", *more)
    before = texts(server)

    def running():
        health = httpx.get(server.url + "/health", trust_env=False).json()
        return health["workers"][0]["running"]

    held.touch()
    with Wire(server) as leaving, ThreadPoolExecutor(1) as pool:
        leaving.post("/v1/completions", {"prompt": "7 8 9 " + PROMPTS[5], "max_tokens": 4})
        wait_until(lambda: held.stat().st_size > 0)
        other = pool.submit(ask, server, PROMPTS[4])
        try:
            wait_until(lambda: running() == 2)
            leaving.socket.close()
            wait_until(lambda: running() == 1)  # no read has ended
        finally:
            held.unlink()
        assert text_of(other.result()) == before[4]
    assert texts(server) == before
    server.close()


def test_workers_that_are_killed(tandem_bin, model):
    server = Server(tandem_bin, model, "--weights", "stream=0.001", *OPTIONS)
    before = texts(server)
    with ThreadPoolExecutor(1) as pool:
        for round in range(3):
            again = pool.submit(texts, server)
            pids = workers(server)
            os.kill(int(pids[round % len(pids)]), signal.SIGKILL)
            assert again.result() == before
            wait_until(lambda: httpx.get(server.url + "/health", trust_env=False).status_code == 200)
    assert metric(server, "worker_restarts_total") >= 1
    server.close()


def test_a_file_that_was_cut_short(tandem_bin, model, tmp_path):
    """Requests that need its experts say so; workers go on."""
    copy = tmp_path / "m"
    shutil.copytree(model, copy)
    server = Server(tandem_bin, copy, "--weights", "stream=0.0003", *OPTIONS)
    assert ask(server, PROMPTS[0]).status_code == 200
    pids = workers(server)
    for path in copy.glob("*.safetensors"):
        os.truncate(path, path.stat().st_size // 8)
    failed = ask(server, PROMPTS[3])
    assert failed.status_code == 500
    message = failed.json()["error"]["message"]
    assert re.search(r"model\S*\.safetensors: expert \d+ of layer \d+ cannot be read, \d+ bytes at \d+: ", message)
    assert workers(server) == pids
    server.close()


