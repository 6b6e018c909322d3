"""Where weights live: once for all processes, whether in memory or mapped from files."""

import contextlib
import json
import math
import os
import re
import resource
import shutil
import signal
import struct
import subprocess
from pathlib import Path

import httpx
import pytest

from serving import Server, make_model, wait_until

MODES = ["resident", "mmap"]


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model


@pytest.fixture(params=MODES)
def server(tandem_bin, model, request):
    running = Server(tandem_bin, model, "--weights", request.param, "--ctx-size", "512")
    running.mode = request.param
    yield running
    running.close()


def family(pid):
    """The process and all that descend from it."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid] + [p for child in children for p in family(int(child))]


def weight_mappings(pid):
    """(inode, Rss, Pss) in bytes of each mapping that holds weights."""
    found, mapping = [], None
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        head = re.match(r"[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ (\d+)\s*(.*)", line)
        if head:
            is_weights = "tandem-weights" in head[2] or head[2].endswith(".safetensors")
            mapping = {"inode": int(head[1])} if is_weights else None
            if is_weights:
                found.append(mapping)
        elif mapping is not None:
            field = re.match(r"(Rss|Pss):\s+(\d+) kB", line)
            if field:
                mapping[field[1]] = int(field[2]) * 1024
    return [(m["inode"], m["Rss"], m["Pss"]) for m in found]


def ask(server, prompt="Once upon a time", n=8):
    body = {"prompt": prompt, "max_tokens": n, "temperature": 0, "ignore_eos": True}
    response = httpx.post(
        server.url + "/v1/completions", json=body, timeout=120, trust_env=False
    )
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


def test_weights_are_in_memory_once(server, model):
    ask(server, prompt=" ".join(str(i) for i in range(150)), n=32)  # goes through most experts
    n_bytes = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    most = 1.02 * n_bytes
    if "2 MB pages)" in server.log():
        most += 2 << 20  # the last one is not full
    found = [m for pid in family(server.process.pid) for m in weight_mappings(pid)]
    assert found
    assert sum(pss for _, _, pss in found) <= most
    if server.mode == "resident":
        assert "weights are in memory after" in server.log()
        (inode,) = {inode for inode, _, _ in found}  # every process maps the same
        memory = os.stat(f"/proc/{server.process.pid}/fd/{descriptor_of(server, inode)}")
        assert 0.98 * n_bytes <= memory.st_blocks * 512 <= most


def descriptor_of(server, inode):
    for fd in os.listdir(f"/proc/{server.process.pid}/fd"):
        if os.stat(f"/proc/{server.process.pid}/fd/{fd}").st_ino == inode:
            return fd
    raise AssertionError("the front does not hold the weights")


def test_a_new_worker_finds_the_weights(server):
    before = ask(server)
    workers = family(server.process.pid)[1:]
    inodes = {inode for pid in workers for inode, _, _ in weight_mappings(pid)}
    for pid in workers:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: is_ready(server) and not set(workers) & set(family(server.process.pid)))
    assert ask(server) == before
    workers = family(server.process.pid)[1:]
    assert inodes == {inode for pid in workers for inode, _, _ in weight_mappings(pid)}


def is_ready(server):
    return httpx.get(server.url + "/health", trust_env=False).status_code == 200


def run(tandem_bin, model, *options):
    return subprocess.run(
        [tandem_bin, "run", "--model", model, "--token-ids", "1,2,3", "-n", "8", "--threads", "2"]
        + ["--temperature", "0", *options],
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_run_says_the_same(tandem_bin, model):
    answers = [run(tandem_bin, model, "--weights", mode) for mode in [*MODES, "auto"]]
    assert [a.returncode for a in answers] == [0, 0, 0]
    assert len({a.stdout for a in answers}) == 1
    assert "weights are in memory after" in answers[0].stderr
    assert "weights are in memory after" not in answers[1].stderr


def test_an_unknown_place(tandem_bin, model):
    answer = run(tandem_bin, model, "--weights", "disk")
    assert answer.returncode == 2
    assert "--weights disk: give mmap, resident, auto or stream" in answer.stderr


def test_rows_are_placed_by_node(tandem_bin, model, monkeypatch):
    """One node that passes for several: each has its part, and to the last bit the same tokens."""
    said = {}
    for n in ("1", "2", "3"):
        monkeypatch.setenv("TANDEM_FAKE_NODES", n)
        said[n] = run(tandem_bin, model, "--weights", "resident", "-n", "40", "--threads", n, "--ignore-eos")
        assert said[n].returncode == 0 and said[n].stdout == said["1"].stdout
    assert said["1"].stdout and "NUMA" not in said["1"].stderr
    parts = [float(part) for part in re.search(r"on 2 NUMA nodes: (\S+) \+ (\S+) MiB", said["2"].stderr).groups()]
    large_pages = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    if not large_pages.exists() or "[never]" in large_pages.read_text():  # else larger than the matrices
        assert 0.5 < parts[0] / parts[1] < 2  # matrices of few pages are cut coarsely
    assert re.search(r"on 3 NUMA nodes: \S+ \+ \S+ \+ \S+ MiB", said["3"].stderr)


def test_no_shared_memory_for_weights(tandem_bin, model):
    """The error names the cure, and nothing is left behind."""
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    command = [tandem_bin, "serve", "--model", model, "--port", "0", "--weights", "resident"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, preexec_fn=limit)
    assert ended.returncode == 1
    (line,) = [line for line in ended.stderr.splitlines() if "error" in line]
    assert "shared memory for the weights" in line and "--weights mmap" in line


def ask_for(server, **fields):
    body = {"prompt": "Once", "max_tokens": 4, "temperature": 0, **fields}
    return httpx.post(server.url + "/v1/completions", json=body, timeout=60, trust_env=False)


def test_a_new_worker_needs_no_files(tandem_bin, model, tmp_path):
    """With weights in memory, the model's directory may be gone."""
    folder = shutil.copytree(model, tmp_path / "model")
    server = Server(tandem_bin, folder, "--weights", "resident")
    before = ask_for(server).json()["choices"]
    shutil.rmtree(folder)
    for _ in range(2):
        old = server.decoder()
        server.kill_worker()
        wait_until(lambda: server.decoder() not in (None, old))
        assert ask_for(server).json()["choices"] == before
    server.close()


@pytest.mark.parametrize("how", ["cut", "gone"])
def test_a_model_that_vanishes_while_serving(tandem_bin, model, tmp_path, how):
    """Mapped from its files: the server ends, and says which; clients get errors without paths."""
    folder = shutil.copytree(model, tmp_path / "model")
    server = Server(tandem_bin, folder, "--weights", "mmap")
    assert ask_for(server).status_code == 200
    for shard in folder.glob("*.safetensors"):
        os.truncate(shard, 4096) if how == "cut" else shard.unlink()
    if how == "gone":
        server.kill_worker()
    with contextlib.suppress(httpx.TransportError):  # the server may be gone first
        for _ in range(100):
            reply = ask_for(server, max_tokens=64, ignore_eos=True)
            if reply.status_code != 200:
                assert reply.status_code == 503 and str(tmp_path) not in reply.text
    assert server.wait(60) == 1
    assert str(folder) in server.log().splitlines()[-1]
    if how == "cut":
        assert "it was cut short or its disk fails" in server.log()


def test_a_damaged_shard_ends_the_server(tandem_bin, model, tmp_path):
    copy = shutil.copytree(model, tmp_path / "tiny")
    shard = next(copy.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    server = Server(tandem_bin, copy, "--weights", "resident", wait=False)
    assert server.wait() == 1
    assert shard.name in server.log()


def test_weights_that_are_not_numbers(tandem_bin, tmp_path):
    """A damaged scale makes every logit NaN: an error, and not the token that NaN happens to choose."""
    model = make_model(tmp_path / "tiny", dtype="fp8")
    for shard in model.glob("*.safetensors"):
        data = bytearray(shard.read_bytes())
        (n_header,) = struct.unpack_from("<Q", data)
        found = json.loads(data[8 : 8 + n_header]).get("model.layers.1.self_attn.o_proj.weight_scale_inv")
        if found:
            struct.pack_into("<f", data, 8 + n_header + found["data_offsets"][0], math.nan)
            shard.write_bytes(data)
    (tmp_path / "text").write_text("Once upon a time")
    words = "logits that are not numbers"
    for command in (["run", "-p", "Hello", "-n", "4"], ["eval", "perplexity", "-f", tmp_path / "text"]):
        done = subprocess.run([tandem_bin, *command, "--model", model], capture_output=True, text=True)
        assert done.returncode == 1 and words in done.stderr, done.stderr
    server = Server(tandem_bin, model)
    # A draw from everything, of the best, with log-probabilities, within a grammar, of the prompt alone.
    fields = [{}, {"temperature": 0}, {"logprobs": 1}, {"guided_regex": "[a-z]{3}"}]
    for more in (*fields, {"max_tokens": 0, "echo": True, "logprobs": 1}):
        body = {"prompt": "Once upon a time", "max_tokens": 4} | more
        reply = httpx.post(server.url + "/v1/completions", json=body, timeout=120, trust_env=False)
        assert reply.status_code == 500 and words in reply.json()["error"]["message"], (more, reply.text)
    body = {"prompt": "Once upon a time", "stream": True}
    reply = httpx.post(server.url + "/v1/completions", json=body, timeout=120, trust_env=False)
    *_, last = [line for line in reply.text.split("\n") if line.startswith("data: {")]
    assert words in json.loads(last[len("data: ") :])["error"]["message"]
    assert httpx.get(server.url + "/health", trust_env=False).status_code == 200
    server.close()
