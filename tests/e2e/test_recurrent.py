"""Models with gated delta nets, windows or pooled keys: states are kept, handed over and restored as KV pages are."""

import concurrent.futures
import json
import random
import shutil
import subprocess

import httpx
import pytest
from serving import Server, cached, make_model, metric, wait_until

PAGE = 64
THINK = 1000  # the first id without a token
PROMPT = random.Random(1).choices(range(3, 900), k=400)
OPTIONS = ("--ctx-size", "1024", "--prefill-chunk", "100")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("models") / "hybrid", "tiny-qwen3-next")


# States with a decay for each channel, beside latents.
@pytest.fixture(scope="module")
def latent(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("models") / "latent", "tiny-kimi-linear")


# And latents beside pooled keys and an open one.
@pytest.fixture(scope="module")
def grouped(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("models") / "grouped", "tiny-glm5-next")


# Keys and values beside mean keys and an open one; n-grams' tokens and inputs beside the states of delta nets.
@pytest.fixture(scope="module")
def ngrams(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("models") / "ngrams", "tiny-qwen4-exp")


@pytest.fixture(scope="module")
def pooled(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("models") / "pooled", "tiny-deepseek-v4")


@pytest.fixture(scope="module")
def windowed(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("models") / "windowed", "tiny-gpt-oss")


def body(prompt, max_tokens=24, **fields):
    fields = {"temperature": 0.9, "seed": 7, "ignore_eos": True, "logprobs": 2} | fields
    return {"prompt": prompt, "max_tokens": max_tokens, **fields}


def complete(server, prompt, max_tokens=24, **fields):
    asked = body(prompt, max_tokens, **fields)
    reply = httpx.post(server.url + "/v1/completions", json=asked, timeout=120, trust_env=False)
    assert reply.status_code == 200, reply.text
    return reply.json()


def streamed_past_crashes(server, prompt, max_tokens):
    """The text of a stream, during which a worker dies twice."""
    text, n_chunks = "", 0
    asked = body(prompt, max_tokens, stream=True)
    with httpx.stream(
        "POST", server.url + "/v1/completions", json=asked, timeout=60, trust_env=False
    ) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                text += json.loads(line[len("data: ") :])["choices"][0]["text"]
                n_chunks += 1
                if n_chunks in (3, 90):
                    server.kill_worker()
    server.await_line("starting it again")
    return text


@pytest.mark.parametrize("workers", [pytest.param("on", marks=pytest.mark.no_asan), "off"])
@pytest.mark.parametrize("kind", ["model", "latent", "grouped", "ngrams"])
def test_prefixes_are_reused(tandem_bin, kind, workers, request):
    model = request.getfixturevalue(kind)
    server = Server(tandem_bin, model, *OPTIONS, "--disaggregate", workers)
    fresh = complete(server, PROMPT)
    assert cached(fresh) == 0
    again = complete(server, PROMPT)
    assert cached(again) == 400 // PAGE * PAGE
    assert again["choices"] == fresh["choices"]  # to the last bit
    longer = PROMPT + list(range(5, 80))
    turn = complete(server, longer)
    assert cached(turn) == 400  # the state at the end of the first prompt was kept
    other = PROMPT[:200] + [3] + PROMPT[201:]
    branch = complete(server, other)
    assert cached(branch) == 200 // PAGE * PAGE
    server.close()
    server = Server(tandem_bin, model, "--ctx-size", "1024", "--disaggregate", "off")
    for prompt, answer in ((longer, turn), (other, branch)):
        assert complete(server, prompt)["choices"] == answer["choices"]
    server.close()


@pytest.mark.parametrize("outputs", [[], ["--cache-output"]], ids=["prompts", "outputs"])
@pytest.mark.parametrize("workers", [pytest.param("on", marks=pytest.mark.no_asan), "off"])
def test_turns_go_on_from_where_the_last_one_ended(tandem_bin, model, workers, outputs):
    """Also those of a conversation that does not fill a page."""
    server = Server(tandem_bin, model, *OPTIONS, "--disaggregate", workers, *outputs)
    turns, prompt, found = [], PROMPT[:20], 0
    for _ in range(4):
        turn = complete(server, prompt, 24, logit_bias={"77": 100})
        turns.append((prompt, turn))
        assert cached(turn) == found
        # All but the last of the generated tokens were computed.
        found = len(prompt) + (23 if outputs else 0)
        prompt = prompt + [77] * 24 + PROMPT[:12]
    # An earlier turn with another continuation, from the copy that is still there.
    other = turns[1][0] + [5, 6, 7]
    branch = complete(server, other)
    assert cached(branch) == len(turns[1][0])
    server.close()
    if outputs:
        return  # generated tokens, computed by decode, round differently from a prompt's
    server = Server(tandem_bin, model, "--ctx-size", "1024", "--disaggregate", "off")
    assert complete(server, other)["choices"] == branch["choices"]
    for asked, turn in reversed(turns):
        again = complete(server, asked, 24, logit_bias={"77": 100})
        assert cached(again) % PAGE == 0  # full pages alone
        assert again["choices"] == turn["choices"]
    server.close()


def test_thoughts_that_the_next_turn_forgets(tandem_bin, model, tmp_path):
    """The prompt opens a reasoning block, of which the next turn's has nothing."""
    thinking = tmp_path / "thinking"
    shutil.copytree(model, thinking)
    tokenizer = json.loads((thinking / "tokenizer.json").read_text())
    mark = dict(tokenizer["added_tokens"][-1], id=THINK, content="<think>", special=False)
    tokenizer["added_tokens"].append(mark)
    (thinking / "tokenizer.json").write_text(json.dumps(tokenizer))
    template = (thinking / "chat_template.jinja").read_text()
    begin = "'<|im_start|>assistant\\n"
    assert template.count(begin) == 1
    (thinking / "chat_template.jinja").write_text(template.replace(begin, begin + "<think>\\n"))
    server = Server(tandem_bin, thinking, *OPTIONS)
    messages = [{"role": "user", "content": "Say something good."}]
    usages = []
    for _ in range(3):
        asked = {"messages": messages, "max_tokens": 5, "logit_bias": {"77": 100}}
        reply = httpx.post(server.url + "/v1/chat/completions", json=asked, timeout=60, trust_env=False)
        assert reply.status_code == 200, reply.text
        usages.append(reply.json()["usage"])
        messages += [{"role": "assistant", "content": "I say."}, {"role": "user", "content": "More."}]
    server.close()
    assert [u["prompt_tokens_details"]["cached_tokens"] for u in usages] == [
        0,
        usages[0]["prompt_tokens"] - 2,
        usages[1]["prompt_tokens"] - 2,
    ]


@pytest.mark.parametrize("workers", [pytest.param("on", marks=pytest.mark.no_asan), "off"])
def test_states_outlive_the_server_on_disk(tandem_bin, model, tmp_path, workers):
    options = (*OPTIONS, "--kv-dir", tmp_path / "kv")
    server = Server(tandem_bin, model, *options)
    before = complete(server, PROMPT)
    server.close()
    assert len(list((tmp_path / "kv").glob("*.kv"))) == 400 // PAGE
    server = Server(tandem_bin, model, *options, "--disaggregate", workers)
    again = complete(server, PROMPT)
    assert cached(again) == 400 // PAGE * PAGE
    assert again["choices"] == before["choices"]
    server.close()


@pytest.mark.parametrize(("kind", "workers"), [("model", "on"), ("model", "off"), ("pooled", "off")])
def test_a_worker_killed_in_mid_stream(tandem_bin, kind, workers, request):
    """The last page's state may be behind more tokens than were reported: the answer is the same."""
    server = Server(tandem_bin, request.getfixturevalue(kind), *OPTIONS, "--disaggregate", workers)
    whole = complete(server, PROMPT, 300)["choices"][0]["text"]
    assert streamed_past_crashes(server, PROMPT, 300) == whole
    server.close()


def test_a_turn_after_a_sleep(tandem_bin, pooled, tmp_path):
    """Without what was cached, and with the full pages that the disk has: the answer is the same."""
    prompt = random.Random(3).choices(range(3, 900), k=600)
    longer = prompt + [77] * 24 + prompt[:9]
    server = Server(tandem_bin, pooled, *OPTIONS)
    told = [complete(server, asked)["choices"] for asked in (prompt, longer)]
    server.close()
    for n_kept, options in ((0, []), (512, ["--kv-dir", tmp_path / "kv"])):
        server = Server(tandem_bin, pooled, *OPTIONS, "--sleep-after", "0.3", *options)
        assert complete(server, prompt)["choices"] == told[0]
        n_sleeps = server.log().count("unloading")
        wait_until(lambda: server.log().count("unloading") > n_sleeps)
        turn = complete(server, longer)
        assert cached(turn) == n_kept and turn["choices"] == told[1]
        server.close()


@pytest.mark.slow
@pytest.mark.no_asan
@pytest.mark.parametrize(
    ("kind", "n", "n_prompt", "n_output", "pool"),
    [("model", 4, 130, 160, (320, 512)), ("pooled", 2, 505, 1100, (2048, 2560))],
)
def test_preempted_requests_go_on(tandem_bin, kind, n, n_prompt, n_output, pool, request):
    def ask(number):
        prompt = random.Random(number % 2).choices(range(3, 900), k=n_prompt) + [3 + number]
        return complete(server, prompt, n_output, seed=number)

    model = request.getfixturevalue(kind)
    server = Server(tandem_bin, model, "--ctx-size", "2048", "--prefill-chunk", "100", "--disaggregate", "off")
    alone = [ask(number) for number in range(n)]
    server.close()
    pool_of_two = ("--ctx-size", pool[0], "--kv-cache-tokens", pool[1], "--max-batch", "4")
    server = Server(tandem_bin, model, *map(str, pool_of_two), "--disaggregate", "on")
    for _ in range(5):  # until they have met at the wrong moment
        with concurrent.futures.ThreadPoolExecutor(n) as threads:
            together = list(threads.map(ask, range(n)))
        assert [a["choices"] for a in together] == [a["choices"] for a in alone]
        if metric(server, "num_preemptions_total") > 0:
            break
    assert metric(server, "num_preemptions_total") > 0
    server.close()


@pytest.mark.parametrize("kind", ["windowed", "pooled"])
def test_windows_go_on_where_a_prompt_is_known(tandem_bin, kind, request, tmp_path):
    """Keys before a window have left the cache: reuse, turns, another worker and the disk do without."""
    windowed = request.getfixturevalue(kind)
    page, prompt = 512, random.Random(2).choices(range(3, 900), k=1100)
    options = ("--ctx-size", "2048", "--prefill-chunk", "300", "--kv-dir", tmp_path / "kv")
    server = Server(tandem_bin, windowed, *options, "--disaggregate", "on")
    fresh, again = complete(server, prompt, 100), complete(server, prompt, 100)
    assert (cached(fresh), cached(again)) == (0, 2 * page)
    assert again["choices"] == fresh["choices"]
    longer, other = prompt + [77] * 100, prompt[:700] + [3] + prompt[701:]
    turn, branch = complete(server, longer), complete(server, other)
    assert (cached(turn), cached(branch)) == (len(prompt), page)
    assert streamed_past_crashes(server, prompt, 100) == fresh["choices"][0]["text"]
    server.close()
    server = Server(tandem_bin, windowed, *options, "--disaggregate", "off")
    for asked, said, n_cached in ((prompt, fresh, 2 * page), (longer, turn, 1100), (other, branch, 2 * page)):
        answer = complete(server, asked, len(said["choices"][0]["logprobs"]["tokens"]))
        assert cached(answer) == n_cached
        assert answer["choices"] == said["choices"]
    server.close()


def test_a_session_goes_on_from_a_full_page(model, build_dir):
    """Its own second request begins as the first, whose state is behind more tokens by then."""
    messages = json.dumps({"messages": [{"role": "user", "content": "Once upon a time " * 20}]})
    driver = build_dir / "bin" / "embed_driver"
    done = subprocess.run([driver, model, "30", messages, "0"], capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()
    lines = done.stdout.split(b"\n")
    half = len(lines) // 2
    first, second = lines[:half], lines[half : 2 * half]
    n_prompt, n_reused, *rest = map(int, first[-1].split())
    assert n_prompt > 2 * PAGE and n_reused == 0
    assert second[:-1] == first[:-1]
    assert list(map(int, second[-1].split())) == [n_prompt, (n_prompt - 1) // PAGE * PAGE, *rest]
