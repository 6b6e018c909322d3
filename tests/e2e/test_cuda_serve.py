"""Serving from a GPU: one worker, whose KV pages are in the GPU's memory and die with it.

TANDEM_CUDA_LIB names the library, the emulator of the build by default."""

import concurrent.futures
import contextlib
import glob
import json
import os
import random
import re
import signal
import subprocess
import threading
from pathlib import Path

import httpx
import pytest

from serving import Server, cached, make_model, metric, wait_until, widen

# Whole models on the emulator take minutes under a sanitizer; unit tests show the kernels to those.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        "ASAN_OPTIONS" in os.environ or "TSAN_OPTIONS" in os.environ, reason="slow under a sanitizer"
    ),
]


@pytest.fixture(autouse=True)
def library(build_dir, monkeypatch):
    path = os.environ.get("TANDEM_CUDA_LIB", str(build_dir / "bin" / "libtandem_cuda_emu.so"))
    if not os.path.exists(path):
        pytest.skip(f"no {path}: the emulator needs a C++ compiler")
    monkeypatch.setenv("TANDEM_CUDA_LIB", path)
    return path


# The second selects one group of four keys, from the eighth position on; the third two of them, from the twelfth on,
# and has n-grams, of which ids of tokens are in pages too.
POOLED = (pytest.param("tiny-deepseek-v4", marks=pytest.mark.no_asan), "mini-glm5-next",
          pytest.param("mini-qwen4-exp", marks=pytest.mark.no_asan))


def post(server, path, **body):
    reply = httpx.post(server.url + path, json=body, timeout=120, trust_env=False)
    assert reply.status_code == 200, reply.text
    return reply.json()


def least_streamed(server):
    """The prompt tokens from which experts stream."""
    least = re.search(r"streaming experts for prefill steps of (\d+) tokens or more", server.log())
    assert least, server.log()
    if int(least[1]) > 600:
        server.close()
        pytest.skip(f"streaming does not pay for so short prompts here: {least[0]}")
    return int(least[1])


def complete(server, prompt, n):
    body = post(server, "/v1/completions", prompt=prompt, max_tokens=n, temperature=0, ignore_eos=True)
    assert body["usage"]["completion_tokens"] == n
    return body["choices"][0]["text"]


@pytest.mark.parametrize("experts", ["gpu", "cpu"])
def test_chat(tandem_bin, tiny_model, experts):
    device = ["--device", "cuda", "--expert-device", experts]
    server = Server(tandem_bin, tiny_model, *device)
    assert list(server.workers()) == ["worker"]  # auto is one here
    server.await_line("cuda, ")
    for words in ["computes the experts of", "streaming experts for"]:
        assert (words in server.log()) == (experts == "cpu")
    # A GPU that has all weights needs no other copy; experts stream from memory.
    assert ("of weights are in memory" in server.log()) == (experts == "cpu")
    messages = [{"role": "user", "content": "Hello!"}]
    body = post(server, "/v1/chat/completions", messages=messages, max_tokens=3, ignore_eos=True)
    assert body["usage"]["completion_tokens"] == 3
    said = subprocess.run(
        [tandem_bin, "run", "--model", tiny_model, "--raw", "-p", "Once upon a time", "-n", "4"]
        + ["--temperature", "0", "--ignore-eos", "--json", *device],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert complete(server, "Once upon a time", 4) == json.loads(said.stdout)["text"]
    assert ("of weights are in memory" in said.stderr) == (experts == "cpu")
    check_draws(server)
    server.close()


def check_draws(server):
    """The best that the GPU ranks say what all logits say, which a bias of nothing asks for."""
    body = {"prompt": "Once", "max_tokens": 2, "seed": 4, "logprobs": 5, "ignore_eos": True}
    for sampling in [{"temperature": 0}, {"temperature": 0.8, "top_k": 20, "top_p": 0.9}]:
        ranked = post(server, "/v1/completions", **body, **sampling)["choices"][0]["logprobs"]
        whole = post(server, "/v1/completions", **body, **sampling, logit_bias={"9": 0})
        whole = whole["choices"][0]["logprobs"]
        assert ranked["tokens"] == whole["tokens"]
        assert ranked["token_logprobs"] == pytest.approx(whole["token_logprobs"], abs=1e-4)
        for ours, theirs in zip(ranked["top_logprobs"], whole["top_logprobs"], strict=True):
            assert ours == pytest.approx(theirs, abs=1e-4)
    forced = post(server, "/v1/completions", **body, logit_bias={"9": 100})
    assert len(set(forced["choices"][0]["logprobs"]["tokens"])) == 1


@pytest.mark.parametrize("experts", ["gpu", "cpu"])
def test_a_killed_worker_comes_back(tandem_bin, tiny_model, library, experts):
    options = ["--prefill-chunk", "32", "--weights", "resident", "--log-level", "debug"]
    options += ["--expert-device", experts]
    server = Server(tandem_bin, tiny_model, "--device", "cuda", *options)
    prompt = list(range(3, 73))
    before = complete(server, prompt, 2)
    killed = server.decoder()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        answer = pool.submit(complete, server, prompt, 12 if "_emu" in library else 4000)
        wait_until(lambda: health(server)["running"] == 1)
        server.kill_worker()
        assert answer.result().startswith(before)
    assert server.decoder() != killed
    assert complete(server, prompt, 2) == before
    n_registered = 2 if experts == "cpu" else 0  # once a worker that streams from them
    wait_until(lambda: len(re.findall("of weights were registered", server.log())) == n_registered)
    server.close()


def test_texts_do_not_depend_on_times(tandem_bin, tiny_model, library, monkeypatch):
    """Servers to whom every measured time is a random one say the same, to the last bit,
    and so does a worker that comes back."""
    if "_emu" not in library:
        pytest.skip("a measured GPU's own times differ enough")
    options = ["--device", "cuda", "--expert-device", "cpu", "--weights", "resident", "--prefill-chunk", "48"]
    said = []
    for seed in range(1, 4):
        monkeypatch.setenv("TANDEM_TIMES", str(seed))
        server = Server(tandem_bin, tiny_model, *options)
        for life in range(2 if seed < 3 else 1):
            if life:
                killed = server.decoder()
                server.kill_worker()
                wait_until(lambda: server.decoder() not in (None, killed))
            ask = {"max_tokens": 4, "temperature": 0, "ignore_eos": True, "logprobs": 2}
            bodies = [post(server, "/v1/completions", prompt=list(range(3, 3 + n)), **ask) for n in (31, 40, 100)]
            choices = health(server)["models"][0]["choices"]
            said.append([choices, *[(b["choices"], b["system_fingerprint"]) for b in bodies]])
        server.close()
    assert choices["stream_from"] in range(32, 49)  # so that some of the steps stream, and some do not
    assert all(each == said[0] for each in said), said


def test_stream_from_is_as_given(tandem_bin, tiny_model, library):
    options = ["--device", "cuda", "--expert-device", "cpu", "--weights", "resident", "--stream-from", "77"]
    server = Server(tandem_bin, tiny_model, *options)
    server.await_line("streaming experts for prefill steps of 77 tokens or more")
    model = health(server)["models"][0]
    assert model["choices"]["stream_from"] == 77
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    with httpx.stream("POST", server.url + "/v1/chat/completions", json={**body, "stream": True}) as reply:
        chunks = [json.loads(line[6:]) for line in reply.iter_lines() if line.startswith("data: {")]
    prints = {chunk["system_fingerprint"] for chunk in chunks}
    prints.add(post(server, "/v1/chat/completions", **body)["system_fingerprint"])
    assert prints == {model["system_fingerprint"]}
    assert re.fullmatch("fp_[0-9a-f]{10}", model["system_fingerprint"])
    server.close()


def test_experts_that_do_not_fit_are_the_cpus(tandem_bin, library, monkeypatch):
    if "_emu" not in library:
        pytest.skip("a GPU's memory cannot be chosen")
    monkeypatch.setenv("TANDEM_EMU_MEMORY_MB", "1550")  # of which operators may need 1536
    nano = Path(__file__).parents[2] / "configs" / "models" / "tandem-nano"
    server = Server(tandem_bin, nano, "--device", "cuda", "--ctx-size", "256")
    server.await_line("computes the experts of 3 layers")  # a layer's room is for streaming
    server.await_line("of weights are in memory")  # without being asked for
    complete(server, "Once", 2)
    server.close()


@pytest.mark.parametrize("n_gpus", [1, 2])
def test_experts_are_cached_for_decode(tandem_bin, tiny_model, library, monkeypatch, n_gpus):
    """The GPU computes what it holds; steps go on while experts move, and whatever is decoded, some are found.
    Two GPUs hold twice as many."""
    options = ["--expert-device", "cpu", "--expert-cache", "0.25", "--weights", "resident"]
    if n_gpus == 2:
        need_two_gpus(library, monkeypatch)
        options += ["--devices", "0,1", "--expert-parallel", "on", "--disaggregate", "off"]
    server = Server(tandem_bin, tiny_model, "--device", "cuda", *options)
    wait_until(lambda: re.search(r"a cache of \d+ of \d+ experts", server.log()))
    with concurrent.futures.ThreadPoolExecutor() as pool:
        for said in [pool.submit(complete, server, [5 + i, 6, 7], 8) for i in range(3)]:
            said.result()
    wait_until(lambda: metric(server, "expert_cache_hits_total") > 0)
    assert metric(server, "expert_cache_misses_total") > 0 and metric(server, "expert_cache_moves_total") > 0
    assert 0 < metric(server, "expert_cache_experts") <= metric(server, "expert_cache_slots")
    assert 0 < metric(server, "gpu_memory_free_bytes") < metric(server, "gpu_memory_bytes")
    assert ("compute experts of decode together" in server.log()) == (n_gpus == 2)
    server.close()


def test_a_long_prompt_streams_beside_decode(tandem_bin, tiny_model, library, monkeypatch):
    """Neither changes what the other says; whoever goes away in the middle leaves nothing behind. Prefill has a
    share of the SMs beside decode, and all of them alone."""
    monkeypatch.setenv("TANDEM_EMU_SMS", "16")
    options = ["--expert-device", "cpu", "--weights", "resident", "--log-level", "debug", "--decode-slowdown", "30"]
    server = Server(tandem_bin, tiny_model, "--device", "cuda", *options)
    least = least_streamed(server)
    prompt = [3 + i % 200 for i in range(least + 40)]
    n = 24 if "_emu" in library else 2000
    answer, said = complete(server, [5, 6, 7], n), complete(server, prompt, 2)
    assert beside(server) == [0] and shares(server) == [0]
    other = [9, *prompt[1:]]  # which no prefix cache holds
    with concurrent.futures.ThreadPoolExecutor() as pool:
        running = pool.submit(complete, server, [5, 6, 7], n)
        wait_until(lambda: health(server)["running"] == 1)
        with contextlib.suppress(httpx.ReadTimeout):  # hardware may be quicker
            httpx.post(server.url + "/v1/completions", json={"prompt": other, "max_tokens": 2}, timeout=0.05)
        wait_until(lambda: health(server)["running"] == 1)
        between = complete(server, [8, *prompt[1:]], 2)
        assert running.result() == answer
    assert beside(server)[-1] > 0
    if re.search(r"prefill beside decode runs on \d+ of \d+ SMs", server.log()):
        assert shares(server)[-1] > 0
    else:
        assert "_emu" not in library
    wait_until(lambda: health(server)["running"] == 0)
    assert complete(server, [8, *prompt[1:]], 2) == between
    assert complete(server, prompt, 2) == said
    server.close()


def test_long_prompts_have_the_memory_of_dense_weights(tandem_bin, tiny_model, library, monkeypatch):
    """A long prompt is one step instead of several while nothing decodes, and else is not; answers before, beside and
    behind it are the same. A request that arrives meanwhile waits; a prompt that goes away leaves nothing behind."""
    if "_emu" not in library:
        pytest.skip("it does not pay for a model as small as this one")
    options = ["--device", "cuda", "--expert-device", "cpu", "--weights", "resident", "--log-level", "debug"]
    options += ["--prefill-chunk", "48", "--stream-from", "32", "--ctx-size", "512"]
    prompts = [[first, *(3 + i % 200 for i in range(95))] for first in (5, 6, 7, 8)]
    run = [tandem_bin, "run", "--model", tiny_model, "--raw", "-p", "Once upon a time " * 24, "-n", "4"]
    run += ["--temperature", "0", "--ignore-eos", "--json", *options]
    said, alone = [], []
    for longer in None, "192", "100000000":
        if longer:
            monkeypatch.setenv("TANDEM_LONGER", longer)
        server = Server(tandem_bin, tiny_model, *options)
        assert (f"long prompts have steps of {longer} tokens instead of 48" in server.log()) == bool(longer)
        short = complete(server, [5, 6, 7], 8)
        texts = [complete(server, prompts[0], 4), complete(server, [5, 6, 7], 8)]
        assert texts[1] == short  # weights are back, and graphs are made anew
        with concurrent.futures.ThreadPoolExecutor() as pool:
            pair = [pool.submit(complete, server, prompts[1], 4), pool.submit(complete, server, [9, 8, 7], 8)]
            texts += [each.result() for each in pair]
        with contextlib.suppress(httpx.ReadTimeout):
            httpx.post(server.url + "/v1/completions", json={"prompt": prompts[2], "max_tokens": 2}, timeout=0.05)
        texts.append(complete(server, prompts[3], 4))
        steps = [int(n) for n in re.findall(r"prefill of (\d+) tokens with streamed experts", server.log())]
        assert steps[0] == (96 if longer == "192" else 48) and (96 in steps[1:]) == (longer == "192"), steps
        assert len(re.findall("long prompts take several steps: ", server.log())) == (longer == "100000000")
        server.close()
        said.append(texts)
        if longer != "100000000":
            done = subprocess.run(run, capture_output=True, text=True, timeout=120, check=True)
            assert ("in the memory of dense weights" in done.stderr) == (longer == "192")
            alone.append(json.loads(done.stdout)["text"])
    assert said[0] == said[1] == said[2] and alone[0] == alone[1]


def test_recurrent_states_are_reused(tandem_bin, library, tmp_path):
    """They are in a sequence's pages: a prompt goes on behind the last full one that it shares."""
    model, page = widen(make_model(tmp_path / "hybrid", "mini-qwen3-next")), 64
    prompt = random.Random(1).choices(range(3, 900), k=page + 12)
    other = prompt[: page + 5] + [3] + prompt[page + 6 :]
    ask = {"max_tokens": 3, "temperature": 0, "ignore_eos": True, "logprobs": 1}
    server = Server(tandem_bin, model, "--device", "cuda", "--ctx-size", "256")
    fresh = post(server, "/v1/completions", prompt=prompt, **ask)
    again = post(server, "/v1/completions", prompt=prompt, **ask)
    assert cached(fresh) == 0 and cached(again) == page
    assert again["choices"] == fresh["choices"]
    branch = post(server, "/v1/completions", prompt=other, **ask)
    assert cached(branch) == page
    longer = prompt + other[:6]
    turn = post(server, "/v1/completions", prompt=longer, **ask)
    assert cached(turn) == len(prompt)  # in a copy of its last page
    server.close()
    server = Server(tandem_bin, model, "--device", "cpu", "--ctx-size", "256")
    for tokens, answer in ((prompt, fresh), (other, branch), (longer, turn)):
        alone = post(server, "/v1/completions", prompt=tokens, **ask)
        first, wanted = (a["choices"][0]["logprobs"]["tokens"][0] for a in (answer, alone))
        assert first == wanted  # later ones nearly tie, which BF16 may decide otherwise
    server.close()


@pytest.mark.parametrize("shape", POOLED)
def test_pooled_keys_are_reused(tandem_bin, library, shape, tmp_path):
    """A turn goes on from the state of the page that the last one filled in part, with the bits of a prompt that is
    computed whole."""
    model = widen(make_model(tmp_path / "pooled", shape))
    prompt = random.Random(1).choices(range(3, 900), k=27)  # which cuts a group
    ask = {"max_tokens": 2, "temperature": 0, "ignore_eos": True, "logprobs": 1}
    options = ("--device", "cuda", "--expert-device", "gpu", "--ctx-size", "512", "--prefill-chunk")
    server = Server(tandem_bin, model, *options, "16")
    fresh = post(server, "/v1/completions", prompt=prompt, **ask)
    longer = prompt + [5, 6, 7]
    turn = post(server, "/v1/completions", prompt=longer, **ask)
    assert (cached(fresh), cached(turn)) == (0, len(prompt))
    server.close()
    server = Server(tandem_bin, model, *options, "32")
    alone = post(server, "/v1/completions", prompt=longer, **ask)
    assert cached(alone) == 0 and alone["choices"] == turn["choices"]
    server.close()


def test_gated_streams_in_microbatches(tandem_bin, library, tmp_path):
    """Choices of one request decode together, in one microbatch and in two by turns, with the bits that one has alone."""
    model = widen(make_model(tmp_path / "gated", "mini-qwen4-exp"))
    options = ("--expert-device", "cpu", "--weights", "resident", "--ctx-size", "512", "--prefill-chunk", "16")
    server = Server(tandem_bin, model, "--device", "cuda", *options)
    ask = {"prompt": list(range(3, 12)), "max_tokens": 8, "temperature": 0, "ignore_eos": True, "logprobs": 1}
    alone = post(server, "/v1/completions", **ask)["choices"][0]["logprobs"]
    together = post(server, "/v1/completions", n=3, **ask)["choices"]
    assert len(together) == 3 and all(choice["logprobs"] == alone for choice in together)
    server.close()


def need_two_gpus(library, monkeypatch):
    monkeypatch.setenv("TANDEM_EMU_DEVICES", "2")
    if "_emu" in library:
        monkeypatch.setenv("TANDEM_NCCL_LIB", library)
    elif len(glob.glob("/proc/driver/nvidia/gpus/*")) < 2:
        pytest.skip("needs two GPUs")


def test_two_gpus(tandem_bin, tiny_model, library, monkeypatch):
    """Both compute a long prompt, by NCCL, unless something decodes: then it streams to the first."""
    need_two_gpus(library, monkeypatch)
    options = ["--expert-device", "cpu", "--weights", "resident", "--log-level", "debug", "--devices", "0,1"]
    options += ["--disaggregate", "off"]
    server = Server(tandem_bin, tiny_model, "--device", "cuda", *options)
    server.await_line("expert parallelism on 2 devices, exchange by nccl")
    least = least_streamed(server)
    prompt = [3 + i % 200 for i in range(least + 70)]
    said = complete(server, prompt, 3)
    server.await_line(f"prefill of {len(prompt)} tokens on 2 devices")
    with concurrent.futures.ThreadPoolExecutor() as pool:
        running = pool.submit(complete, server, [5, 6, 7], 24)
        wait_until(lambda: health(server)["running"] == 1)
        complete(server, [9, *prompt[1:]], 2)
        running.result()
    server.kill_worker()
    assert complete(server, prompt, 3) == said
    wait_until(lambda: server.log().count("exchange by nccl") == 2)
    server.close()


def test_an_exchange_that_fails(tandem_bin, tiny_model, library, monkeypatch):
    """It ends run, and a server whose model was never loaded; both say why."""
    if "_emu" not in library:
        pytest.skip("NCCL does not fail on demand")
    need_two_gpus(library, monkeypatch)
    monkeypatch.setenv("TANDEM_EMU_NCCL_FAILS", "1")
    options = ["--device", "cuda", "--devices", "0,1", "--expert-parallel", "on"]
    why = "expert parallelism: NCCL on rank 1: unhandled system error: the fake says so"
    done = subprocess.run(
        [tandem_bin, "run", "--model", tiny_model, "--raw", "-p", "Once", "-n", "1", *options],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "") and why in done.stderr
    server = Server(tandem_bin, tiny_model, *options, wait=False)  # whose workers compute before they serve
    assert server.wait() == 1 and why in server.log()


def logprobs(server, prompt, n):
    """What was generated, with all that is known about it, and how much of the prompt was cached."""
    body = post(server, "/v1/completions", prompt=prompt, max_tokens=n, temperature=0, ignore_eos=True, logprobs=5)
    return body["choices"][0]["logprobs"], body["usage"]["prompt_tokens_details"]["cached_tokens"]


def spoken(server, prompt, n, event=None, n_more=0):
    """n generated tokens, with all that is known about them, and the usage then. event: after so many tokens, a
    call. n_more: so many could follow when the client goes away."""
    said, usage = [], None
    body = {"prompt": prompt, "max_tokens": n + n_more, "temperature": 0, "ignore_eos": True, "logprobs": 3}
    body |= {"logit_bias": {"77": 100}, "stream": True}
    body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=120, trust_env=False) as reply:
        for line in reply.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[len("data: ") :])
            usage = chunk.get("usage") or usage
            if not chunk["choices"] or not chunk["choices"][0]["logprobs"]:
                continue
            said.append(chunk["choices"][0]["logprobs"])
            if event and len(said) == event[0]:
                event[1]()
            if n_more and len(said) == n:
                break
    usage.pop("completion_tokens_details")  # what is drafted depends on which tokens come in a step
    return [*said, usage]


def cached_of(said):
    return said[-1]["prompt_tokens_details"]["cached_tokens"]


def without(server, role, prompt, n):
    """The same for a request whose worker is killed."""
    with concurrent.futures.ThreadPoolExecutor() as pool:
        answer = pool.submit(logprobs, server, prompt, n)
        wait_until(lambda: [w["running"] for w in health(server)["workers"] if w["role"] == role] == [1])
        os.kill(server.workers()[role], signal.SIGKILL)
        return answer.result()


def test_a_gpu_for_prefill_and_one_for_decode(tandem_bin, tiny_model, library, tmp_path, monkeypatch):
    """As from one worker, bit for bit, whoever dies; KV pages outlive both workers and the server."""
    need_two_gpus(library, monkeypatch)
    options = ["--device", "cuda", "--expert-device", "gpu", "--ctx-size", "128", "--max-batch", "4"]
    prompts = [[3 + (k + 7 * i) % 200 for i in range(70)] for k in range(2)]
    one = Server(tandem_bin, tiny_model, *options)
    want = [logprobs(one, prompt, 4)[0] for prompt in prompts]
    one.close()
    options += ["--devices", "0,1", "--disaggregate", "on", "--kv-dir", str(tmp_path)]
    server = Server(tandem_bin, tiny_model, *options)
    assert sorted(server.workers()) == ["decode", "prefill"]
    assert logprobs(server, prompts[0], 4) == (want[0], 0)
    assert logprobs(server, prompts[0], 4) == (want[0], 64)
    killed = server.workers()
    if "_emu" not in library:  # which is too fast for a worker to be killed in time
        server.close()
        return
    assert without(server, "prefill", prompts[1], 4) == (want[1], 0)
    assert logprobs(server, prompts[0], 4) == (want[0], 64)
    assert without(server, "decode", prompts[0], 4) == (want[0], 64)
    assert logprobs(server, prompts[1], 4) == (want[1], 64)
    pids = [*killed.values(), *server.workers().values()]
    assert len(set(pids)) == 4
    server.close()
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
    server = Server(tandem_bin, tiny_model, *options)
    assert logprobs(server, prompts[1], 4) == (want[1], 64)
    server.close()


def test_two_gpus_hand_recurrent_states_over(tandem_bin, library, tmp_path, monkeypatch):
    """From prefill to decode, to a decode worker that follows one that died, and to disk and back."""
    need_two_gpus(library, monkeypatch)
    model = widen(make_model(tmp_path / "hybrid", "mini-qwen3-next"))
    options = ["--device", "cuda", "--expert-device", "gpu", "--ctx-size", "128", "--max-batch", "4"]
    options += ["--cache-output"]
    prompts = [[3 + (k + 7 * i) % 200 for i in range(62)] for k in range(2)]
    turn = prompts[0] + [77] * 6 + prompts[1][:5]
    one = Server(tandem_bin, model, *options)
    want = [spoken(one, prompt, 6) for prompt in [*prompts, turn]]
    one.close()
    assert [cached_of(said) for said in want] == [0, 0, 62 + 5]
    options += ["--devices", "0,1", "--disaggregate", "on", "--kv-dir", str(tmp_path / "kv")]
    monkeypatch.setenv("TANDEM_JITTER", "3")
    server = Server(tandem_bin, model, *options)
    assert sorted(server.workers()) == ["decode", "prefill"]
    assert spoken(server, prompts[0], 6) == want[0]
    # What the first worker has left is in host memory: a state in the middle of a page and full pages.
    killed = server.decoder()
    server.kill_worker()
    assert spoken(server, turn, 6) == want[2]
    # The second dies behind the first full page, whose last token it computed.
    assert spoken(server, prompts[1], 6, (4, server.kill_worker)) == want[1]
    assert server.decoder() != killed
    server.close()
    server = Server(tandem_bin, model, *options)
    again = spoken(server, turn, 6)
    assert again[:-1] == want[2][:-1] and cached_of(again) == 64
    server.close()


@pytest.mark.parametrize("shape", POOLED)
def test_two_gpus_hand_pooled_keys_over(tandem_bin, library, shape, tmp_path, monkeypatch):
    """As from one worker: to decode, to a decode worker that follows one that died, and to the next turn."""
    need_two_gpus(library, monkeypatch)
    model = widen(make_model(tmp_path / "pooled", shape))
    options = ["--device", "cuda", "--expert-device", "gpu", "--ctx-size", "512", "--max-batch", "2", "--cache-output"]
    options += ["--prefill-chunk", "16"]  # fewer tokens to warm up with
    prompt = random.Random(1).choices(range(3, 900), k=11)
    turn = prompt + [77] * 3 + [5]
    one = Server(tandem_bin, model, *options)
    want = [spoken(one, asked, 3) for asked in (prompt, turn)]
    assert [cached_of(said) for said in want] == [0, len(prompt) + 2]
    one.close()
    server = Server(tandem_bin, model, *options, "--devices", "0,1", "--disaggregate", "on")
    assert sorted(server.workers()) == ["decode", "prefill"]
    assert spoken(server, prompt, 3, (2, server.kill_worker)) == want[0]
    assert spoken(server, turn, 3) == want[1]
    server.close()


def test_states_of_preempted_requests(tandem_bin, library, tmp_path, monkeypatch):
    """In a pool of five pages for two requests of three, the later one is preempted and goes on with the same
    bits; with a GPU for decode also when its worker dies meanwhile, with which the last page's state would be lost.
    The first prompt fills its page, so that no copy of it is kept in place of the other's pages."""
    model = widen(make_model(tmp_path / "hybrid", "mini-qwen3-next"))
    options = ["--device", "cuda", "--expert-device", "gpu", "--ctx-size", "192", "--max-batch", "2"]
    prompts = [[3 + (k + 7 * i) % 200 for i in range(n)] for k, n in enumerate([64, 95])]
    one = Server(tandem_bin, model, *options)
    want = [spoken(one, prompt, 40, n_more=40) for prompt in prompts]
    assert metric(one, "num_preemptions_total") == 0
    one.close()
    options += ["--kv-cache-tokens", "320"]
    server = Server(tandem_bin, model, *options)
    assert preempted(server, prompts, 40) == want
    server.close()
    need_two_gpus(library, monkeypatch)
    server = Server(tandem_bin, model, *options, "--devices", "0,1", "--disaggregate", "on")
    assert preempted(server, prompts, 40, server.kill_worker) == want
    server.close()


@pytest.mark.no_asan  # test_states_of_preempted_requests
def test_pooled_keys_of_preempted_requests(tandem_bin, library, tmp_path):
    """A request has a second page of 512 tokens from its 256th token on. In a pool of three pages the later of two
    requests, which needs its one first, gives one to the first and says the same afterwards."""
    model = widen(make_model(tmp_path / "pooled", "mini-deepseek-v4"))
    options = ["--device", "cuda", "--expert-device", "gpu", "--ctx-size", "1024", "--max-batch", "2"]
    prompts = [[3 + (k + 7 * i) % 200 for i in range(n)] for k, n in enumerate([226, 255])]
    one = Server(tandem_bin, model, *options)
    want = [spoken(one, prompt, 40, n_more=300) for prompt in prompts]
    assert metric(one, "num_preemptions_total") == 0
    one.close()
    server = Server(tandem_bin, model, *options, "--kv-cache-tokens", "1536")
    assert preempted(server, prompts, 40, n_more=300) == want
    server.close()


def preempted(server, prompts, n, meanwhile=lambda: None, n_more=40):
    """What two requests say that decode from the same step on, until the second, which needs another page first,
    gives one to the first."""
    began, has_second = threading.Event(), threading.Event()

    def stop():
        os.kill(server.decoder(), signal.SIGSTOP)
        began.set()

    with concurrent.futures.ThreadPoolExecutor() as pool:
        first = pool.submit(spoken, server, prompts[0], n, (1, stop), n_more=n_more)
        began.wait()
        second = pool.submit(spoken, server, prompts[1], n, (1, has_second.set), n_more=n_more)
        wait_until(lambda: health(server)["running"] == 2)
        if "prefill" in server.workers():
            has_second.wait()
        os.kill(server.decoder(), signal.SIGCONT)
        wait_until(lambda: metric(server, "num_preemptions_total") > 0)
        meanwhile()
        return [first.result(), second.result()]


def test_short_prompts_stay_with_decode(tandem_bin, tiny_model, library, monkeypatch):
    """Experts stream to the first GPU; what is too short for that does not need it."""
    need_two_gpus(library, monkeypatch)
    options = ["--device", "cuda", "--expert-device", "cpu", "--weights", "resident", "--log-level", "debug"]
    server = Server(tandem_bin, tiny_model, *options, "--devices", "0,1", "--ctx-size", "1024")
    assert sorted(server.workers()) == ["decode", "prefill"]  # auto, since experts stream
    least = least_streamed(server)
    os.kill(server.workers()["prefill"], signal.SIGSTOP)
    complete(server, [5, 6, 7], 2)
    os.kill(server.workers()["prefill"], signal.SIGCONT)
    prompt = [3 + i % 200 for i in range(least + 70)]
    complete(server, prompt, 3)
    server.await_line(f"prefill of {len(prompt)} tokens with streamed experts")
    server.close()


def test_dense_weights_stream_where_a_ring_is_short(tandem_bin, library, monkeypatch):
    """A GPU that prefills only keeps no dense weights if experts have little room; the text is the same."""
    need_two_gpus(library, monkeypatch)
    if "_emu" not in library:
        pytest.skip("a GPU's memory cannot be chosen")
    nano = Path(__file__).parents[2] / "configs" / "models" / "tandem-nano"
    options = ["--device", "cuda", "--expert-device", "cpu", "--weights", "resident", "--ctx-size", "256"]
    said = []
    for mib in ["4096", "1556"]:  # of which operators may need 1536
        monkeypatch.setenv("TANDEM_EMU_MEMORY_MB", mib)
        server = Server(tandem_bin, nano, *options, "--devices", "0,1", "--disaggregate", "on")
        assert ("dense weights of the last" in server.log()) == (mib == "1556"), server.log()
        said.append(complete(server, "What is tandem? " * 8, 8))
        server.close()
    assert said[0] == said[1]


def beside(server):
    """For each prefill with streamed experts, the decode steps beside it."""
    return [int(n) for n in re.findall(r"with streamed experts: .* beside (\d+) decode", server.log())]


def shares(server):
    """For each, how much of it was confined to a share of the SMs, in percent."""
    return [int(n) for n in re.findall(r"with streamed experts: .* (\d+) % of it on a share", server.log())]


def health(server):
    return httpx.get(server.url + "/health", trust_env=False).json()


def test_auto_without_a_gpu(tandem_bin, tiny_model, tmp_path, monkeypatch):
    """It is cpu in every respect: two workers, prompts on disk, the same choice of weights."""
    monkeypatch.setenv("TANDEM_CUDA_LIB", "/nonexistent/libtandem_cuda.so")
    said = []
    for device in ["auto", "cpu"]:
        options = ["--threads", "2", "--kv-dir", str(tmp_path / device), "--log-level", "debug"]
        server = Server(tandem_bin, tiny_model, "--device", device, *options)
        assert sorted(server.workers()) == ["decode", "prefill"]
        complete(server, "Once", 2)
        said.append(re.findall(r"of weights are \w+ \w+", server.log()))
        why = "no usable GPU (CUDA: /nonexistent/libtandem_cuda.so"
        assert server.log().count(why) == (device == "auto")
        server.close()
    assert said[0] == said[1] and len(said[0]) == 1


def test_without_the_gpu_that_is_asked_for(tandem_bin, tiny_model, monkeypatch):
    """It is missed before weights are loaded."""
    monkeypatch.setenv("TANDEM_CUDA_LIB", "/nonexistent/libtandem_cuda.so")
    options = ["--device", "cuda", "--weights", "resident"]
    server = Server(tandem_bin, tiny_model, *options, wait=False)
    assert server.wait() == 1
    assert "CUDA: /nonexistent/libtandem_cuda.so" in server.log()
    assert "are in memory" not in server.log()


def test_what_cannot_be(tandem_bin, tiny_model, library, tmp_path, monkeypatch):
    for wish in [["--disaggregate", "on"], ["--kv-dir", str(tmp_path), "--disaggregate", "off"]]:
        server = Server(tandem_bin, tiny_model, "--device", "cuda", *wish, wait=False)
        assert server.wait() == 2
        assert " ".join(wish[:1]) in server.log() and "--device cpu" in server.log()
    for wish, says in [
        (["--device", "gpu"], "--device gpu: give cpu, cuda or auto"),
        (["--device", "cpu", "--expert-device", "gpu"], "--expert-device gpu needs --device cuda"),
        (["--ctx-size", "16000000"], "the model's longest context is"),
    ]:
        server = Server(tandem_bin, tiny_model, "--weights", "resident", *wish, wait=False)
        assert server.wait() == 2
        assert says in server.log() and "are in memory" not in server.log()
    if "_emu" not in library:
        return
    monkeypatch.setenv("TANDEM_EMU_DEVICES", "2")
    monkeypatch.setenv("TANDEM_EMU_PIN", "0")  # no GPU reaches memory that is not its own
    options = ["--device", "cuda", "--devices", "0,1", "--disaggregate", "on"]
    server = Server(tandem_bin, tiny_model, *options, "--expert-parallel", "on", wait=False)
    assert server.wait() == 2 and "give one of the two" in server.log()
    server = Server(tandem_bin, tiny_model, *options, wait=False)
    assert server.wait() == 1
    assert "--disaggregate off does without" in server.log()
    monkeypatch.setenv("TANDEM_EMU_MEMORY_MB", "1")  # less than the weights
    server = Server(tandem_bin, tiny_model, "--device", "cuda", wait=False)
    assert server.wait() == 1
    assert "the weights take" in server.log() and "--device cpu" in server.log()
