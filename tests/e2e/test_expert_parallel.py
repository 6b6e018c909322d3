"""Prompts on several CPU devices: by tandem eval, and by a server whose requests decode in between."""

import concurrent.futures
import re
import subprocess

import httpx
import numpy as np
import pytest
from golden_models import made
from serving import Server, make_model, metric, wait_until

pytestmark = [pytest.mark.tsan, pytest.mark.no_asan, pytest.mark.slow]

IDS = ",".join(str(3 + 7 * i % 200) for i in range(150))


def logits(tandem_bin, out, *options):
    args = ["eval", "logits", "--model", made() / "deepseek_fp8", "--token-ids", IDS, "--out", out, *options]
    done = subprocess.run([tandem_bin, *args], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return np.load(out), done.stderr


def test_logits(tandem_bin, tmp_path):
    one, _ = logits(tandem_bin, tmp_path / "one.npy")
    off, log = logits(tandem_bin, tmp_path / "off.npy", "--devices", "0,1", "--expert-parallel", "off")
    assert np.array_equal(one, off) and "expert parallelism" not in log
    parallel = ["--devices", "0,1,2", "--expert-parallel", "on", "--chunk-tokens", "64"]
    first, log = logits(tandem_bin, tmp_path / "first.npy", *parallel)
    assert "expert parallelism on 3 devices, exchange by host" in log
    again, _ = logits(tandem_bin, tmp_path / "again.npy", *parallel)
    assert np.array_equal(first, again)
    off_by = np.abs(first - one).max(axis=1)
    assert 0 < np.median(off_by) < 0.005 * np.abs(one).max()  # experts' sums are rounded to BF16


@pytest.fixture(scope="module")
def server(tandem_bin, tmp_path_factory):
    model = make_model(tmp_path_factory.mktemp("model"))
    options = ["--devices", "0,1", "--expert-parallel", "on", "--disaggregate", "off"]
    options += ["--served-model-name", "m", "--log-level", "debug"]
    server = Server(tandem_bin, model, *options)
    yield server
    server.close()


def complete(server, text, n):
    body = {"model": "m", "prompt": text, "max_tokens": n, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == n
    return answer.json()["choices"][0]["text"]


def test_server(server):
    texts = ["one two three " * 20, "four five " * 3, "six " * 90, "x"]
    alone = [complete(server, text, 8) for text in texts]
    server.await_line("expert parallelism on 2 devices")
    assert alone == [complete(server, text, 8) for text in texts]  # cached in part
    with concurrent.futures.ThreadPoolExecutor() as pool:
        list(pool.map(lambda text: complete(server, text, 8), texts * 3))
    assert "expert parallelism ends" not in server.log()


def test_who_prefills(server):
    """Both devices while nothing is decoded, the first one while something is."""

    def n_on_both():
        """Of the long prompts here. A worker's lines come through a pipe, so perhaps late."""
        return len(re.findall(r"a step of \d\d\d tokens on 2 devices", server.log()))

    def takes_both(text):
        before = n_on_both()
        wait_until(lambda: metric(server, "num_requests_running") == 0)
        complete(server, text * 80, 1)
        wait_until(lambda: n_on_both() > before)

    takes_both("seven ")
    before = n_on_both()
    body = {"model": "m", "prompt": "y", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=120) as answer:
        lines = answer.iter_lines()
        while "text" not in next(lines):
            pass
        complete(server, "eight " * 80, 1)
        assert metric(server, "num_requests_running")
    takes_both("nine ")  # its line comes after those of all before it
    assert n_on_both() == before + 1
