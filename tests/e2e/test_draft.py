"""Drafted tokens: a text is the same with them and without, whatever is asked of it, and however
many are accepted."""

import concurrent.futures
import json
import random
import threading
from pathlib import Path

import httpx
import pytest
from golden_models import CASES, made
from serving import SANITIZED, Server, cached, make_model, metric, wait_until

NANO = Path(__file__).resolve().parents[2] / "configs/models/tandem-nano"
needs_nano = pytest.param(
    NANO, marks=pytest.mark.skipif(not (NANO / "model.safetensors").exists(), reason="tandem-nano's weights are missing")
)
N_AT_ONCE = 8


def prompts():
    """Texts that repeat themselves, from exact copies to noise: drafts are right and wrong."""
    rng = random.Random(5)
    for i in range(3 if SANITIZED else 6):
        phrase = rng.choices(range(3, 200), k=4 + 5 * i)
        text = [t if rng.random() > 0.03 * i else rng.randrange(3, 200) for t in phrase * (1 + 90 // len(phrase))]
        yield text[: 20 + 15 * i]


# Every kind of draw. The biases leave few tokens, so that the text repeats itself, but not always.
FEW = {str(t): 60 for t in (5, 9, 17, 23)}
DRAWS = [
    {"temperature": 0},
    {"temperature": 0, "logit_bias": FEW, "repetition_penalty": 1.05, "logprobs": 3},
    {"temperature": 1, "logit_bias": FEW, "logprobs": 1},
    {"temperature": 0.8, "top_p": 0.9, "logit_bias": FEW, "frequency_penalty": 0.1},
    {"temperature": 1.3, "top_k": 3, "min_p": 0.05, "presence_penalty": 0.3},
    {"temperature": 0.7, "logit_bias": FEW, "min_tokens": 20, "n": 2},
    {"temperature": 0, "logit_bias": FEW, "dry_multiplier": 3, "dry_allowed_length": 6, "dry_penalty_last_n": 60},
    {"temperature": 0.7, "logit_bias": FEW, "dry_multiplier": 0.5, "dry_allowed_length": 4, "n": 2},
    {"temperature": 1, "logit_bias": FEW, "dry_multiplier": 1, "dry_sequence_breakers": ["e", "th"], "logprobs": 1},
]


def bodies():
    for i, prompt in enumerate(prompts()):
        for k, draw in enumerate(DRAWS):
            ends = {} if k == 5 else {"ignore_eos": True}
            yield {"prompt": prompt, "max_tokens": 24 + 7 * (i % 5), "seed": 10 * i + k, **draw, **ends}


def ask(server, body):
    reply = httpx.post(server.url + "/v1/completions", json=body, timeout=300, trust_env=False)
    if reply.status_code == 503:
        return None
    assert reply.status_code == 200, reply.text
    return reply.json()


def ask_all(server, asked, n_at_once=N_AT_ONCE):
    with concurrent.futures.ThreadPoolExecutor(n_at_once) as pool:
        return list(pool.map(lambda body: ask(server, body), asked))


def details(answer):
    d = answer["usage"]["completion_tokens_details"]
    return d["accepted_prediction_tokens"], d["rejected_prediction_tokens"]


def choices(answers):
    return [answer["choices"] for answer in answers]


RECURRENT = {"recurrent": "tiny-qwen3-next", "by_channel": "tiny-kimi-linear", "pooled": "tiny-deepseek-v4",
             "grouped": "tiny-glm5-next", "ngrams": "tiny-qwen4-exp"}


@pytest.fixture(scope="session")
def recurrent_models(tmp_path_factory):
    models = tmp_path_factory.mktemp("models")
    return {name: make_model(models / name, shape=shape) for name, shape in RECURRENT.items()}


def watched(names, tsan, asan):
    """Of names, with the marks of sanitizers: threads are alike with each model, and so is most memory."""
    marks = lambda name: [pytest.mark.tsan] * (name in tsan) + [pytest.mark.no_asan] * (name not in asan)
    return [pytest.param(name, marks=marks(name)) for name in names]


# The first has a layer that drafts, the last five recurrent states, which go back behind what is rejected.
ALIKE = ["deepseek_yarn_mscale", "qwen3_moe", *RECURRENT]


@pytest.mark.parametrize("name", watched(ALIKE, tsan=["recurrent"], asan=["recurrent", "pooled", "ngrams"]))
def test_texts_are_the_same(tandem_bin, recurrent_models, name):
    # Under a sanitizer each draw once, a third of them with each prompt.
    asked = [body for i, body in enumerate(bodies()) if not SANITIZED or (i // len(DRAWS) + i) % 3 == 0]
    model = recurrent_models.get(name) or made() / name
    options = ["--max-batch", str(N_AT_ONCE), "--prefill-chunk", "64"]
    server = Server(tandem_bin, model, *options, "--draft", "off")
    expected = ask_all(server, asked)
    assert {details(answer) for answer in expected} == {(0, 0)}
    server.close()
    for depth, workers in [("8", "off"), ("auto", "on")]:
        server = Server(tandem_bin, model, *options, "--draft", depth, "--disaggregate", workers)
        for n_at_once in [N_AT_ONCE, 1]:
            if n_at_once == 1 and (depth == "auto" or SANITIZED):
                continue
            every = 1 if n_at_once > 1 else 5
            answers = ask_all(server, asked[::every], n_at_once)
            assert choices(answers) == choices(expected[::every])  # to the last bit of a log-probability
            if every == 1:
                accepted, rejected = map(sum, zip(*map(details, answers)))
        if depth == "8":
            assert min(accepted, rejected) > (10 if SANITIZED else 30)
            assert metric(server, "spec_decode_num_accepted_tokens_total") >= accepted
            assert metric(server, "spec_decode_num_draft_tokens_total") >= accepted + rejected
        server.close()


@pytest.mark.tsan
@pytest.mark.no_asan
@pytest.mark.parametrize("model", [needs_nano])
def test_requests_that_end_beside_others(tandem_bin, model):
    """The model's layer computes a prompt whose request has ended with the step, while others' guesses are rejected."""
    rng = random.Random(3)
    asked = [
        {"prompt": rng.choices(range(3, 900), k=rng.randint(3, 60)), "max_tokens": rng.randint(1, 8), "seed": i}
        for i in range(24 if SANITIZED else 60)
    ]
    answers = {}
    for depth in ["off", "2"]:
        server = Server(tandem_bin, model, "--device", "cpu", "--draft", depth, "--disaggregate", "off")
        answers[depth] = ask_all(server, asked)
        server.close()
    assert choices(answers["2"]) == choices(answers["off"])


@pytest.mark.slow
@pytest.mark.no_asan
@pytest.mark.parametrize("case", sorted(CASES))
def test_every_format(tandem_bin, case):
    asked = list(bodies())[-len(DRAWS) :]
    answers = {}
    for depth in ["off", "8"]:
        server = Server(tandem_bin, made() / case, "--ctx-size", "512", "--draft", depth, "--disaggregate", "off")
        answers[depth] = ask_all(server, asked)
        server.close()
    assert choices(answers["8"]) == choices(answers["off"])
    assert sum(details(answer)[0] for answer in answers["8"]) > 0


@pytest.mark.parametrize("name", watched(["deepseek_v3", "deepseek_yarn_mscale", "recurrent"], tsan=["recurrent"], asan=["recurrent"]))
def test_preempted_and_killed(tandem_bin, recurrent_models, name):
    """Where the pool holds few of them and their worker dies: what goes on does so with its own tokens."""
    model = recurrent_models.get(name) or made() / name
    asked = [{**body, "max_tokens": 120} for body in bodies() if "n" not in body][::2]
    server = Server(tandem_bin, model, "--max-batch", "4", "--draft", "off")
    expected = ask_all(server, asked)
    server.close()
    options = ["--max-batch", "4", "--ctx-size", "256", "--kv-cache-tokens", "320", "--disaggregate", "on"]
    server = Server(tandem_bin, model, *options, "--draft", "8")
    is_over, rng, n_kills = threading.Event(), random.Random(3), 0

    def kill():
        nonlocal n_kills
        while not is_over.is_set() and n_kills < (2 if SANITIZED else 5):
            at = metric(server, "generation_tokens_total") + rng.randrange(90)
            wait_until(lambda: is_over.is_set() or metric(server, "generation_tokens_total") > at)
            if not is_over.is_set():
                server.kill_worker()
                n_kills += 1
                wait_until(lambda: server.decoder() is not None)

    n_whole = n_accepted = 0
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        killing = pool.submit(kill)
        for _ in range(8):  # once may be over before it was killed twice; and who was there twice ends
            for answer, other in zip(ask_all(server, asked), expected):
                assert answer is None or answer["choices"] == other["choices"]
                n_whole += answer is not None
                n_accepted += details(answer)[0] if answer else 0
            n_preempted = metric(server, "num_preemptions_total")
            if n_kills > 1 and n_whole > len(asked) // 2 and n_accepted > 30 and n_preempted > 0:
                break
        is_over.set()
        killing.result()
    assert n_whole > len(asked) // 2 and n_accepted > 30 and n_preempted > 0
    server.close()
    assert server.log().count("signal 9") > 1


@pytest.mark.parametrize(("name", "least_accepted"), [("recurrent", 30), ("pooled", 10)])
def test_turns_behind_drafts_that_were_not_of_the_text(tandem_bin, recurrent_models, name, least_accepted):
    """A text ends where more was drafted; its states, from which the next turn goes on, end there, too."""
    recurrent_model = recurrent_models[name]
    end = json.loads((recurrent_model / "config.json").read_text())["eos_token_id"]
    asked = [
        {"prompt": prompt, "max_tokens": 60, "seed": seed, "logprobs": 1, "logit_bias": FEW | {str(end): 60}}
        for seed, prompt in enumerate(list(prompts()) * (1 if SANITIZED else 2))
    ]
    turns, n_ended = {}, 0
    for draft in ["off", "8"]:
        server = Server(tandem_bin, recurrent_model, "--cache-output", "--disaggregate", "off", "--draft", draft)
        sure = [{"prompt": [3], "max_tokens": 1, "logit_bias": {t: 100}} for t in FEW]
        ids = {ask(server, body)["choices"][0]["text"]: int(t) for t, body in zip(FEW, sure)}
        assert len(ids) == len(FEW)
        turns[draft] = []
        for body in asked:
            (first,) = ask(server, body)["choices"]
            said = [ids[t] for t in first["logprobs"]["tokens"] if t in ids]
            more = ask(server, body | {"prompt": body["prompt"] + said + [7]})
            turns[draft].append((first, more["choices"], cached(more)))
            n_ended += draft == "8" and first["finish_reason"] == "stop" and len(said) > 5
        n_accepted = metric(server, "spec_decode_num_accepted_tokens_total")
        server.close()
    for turn, other in zip(turns["8"], turns["off"]):
        assert turn == other
    assert n_accepted > least_accepted // (2 if SANITIZED else 1) and n_ended > (0 if SANITIZED else 1)


def test_drafts_over_the_end_of_a_page(tandem_bin, recurrent_models):
    """What is rejected there has written to the next page, too."""
    page, answers = 512, {}
    asked = [
        {"prompt": (random.Random(seed).choices(list(map(int, FEW)), k=7) * page)[: page - 20 + 3 * seed], "seed": seed,
         "max_tokens": 50, "temperature": 0.3, "logit_bias": FEW, "logprobs": 2, "ignore_eos": True}  # fmt: skip
        for seed in range(4)
    ]
    for draft in ["off", "8"]:
        server = Server(tandem_bin, recurrent_models["pooled"], "--disaggregate", "off", "--draft", draft)
        answers[draft] = ask_all(server, asked)
        server.close()
    assert choices(answers["8"]) == choices(answers["off"])
    assert min(sum(counts) for counts in zip(*map(details, answers["8"]))) > 10


SCHEMA = {
    "type": "object",
    "properties": {
        "names": {"type": "array", "items": {"enum": ["alpha", "beta"]}, "minItems": 6, "maxItems": 9},
        "more": {"type": "string", "maxLength": 12},
    },
    "required": ["names", "more"],
}


@pytest.mark.tsan
def test_under_a_schema_and_up_to_a_stop_string(tandem_bin, tiny_model):
    """A grammar's masks follow the drawn tokens one by one, and a stop string cuts what was drafted."""
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
    asked = []
    for seed in range(4 if SANITIZED else 16):
        body = {"messages": [{"role": "user", "content": "names " * 9}], "seed": seed, "temperature": seed % 3}
        asked.append({**body, "max_tokens": 120, "response_format": form, "logprobs": True, "top_logprobs": 2})
        asked.append({**body, "max_tokens": 60, "ignore_eos": True, "logit_bias": FEW, "stop": ["\u0000", "e", "9"]})

    def answers_of(*options):
        server = Server(tandem_bin, tiny_model, "--ctx-size", "1024", *options)
        url = server.url + "/v1/chat/completions"
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            replies = list(pool.map(lambda b: httpx.post(url, json=b, timeout=300, trust_env=False).json(), asked))
        server.close()
        return replies

    expected, answers = answers_of("--draft", "off"), answers_of("--draft", "8")
    assert choices(answers) == choices(expected)
    assert sum(details(answer)[0] for answer in answers) > 20


def chats():
    suite = [json.loads(line) for line in (NANO / "suite.jsonl").read_text().splitlines()]
    for i, question in enumerate(suite[: 5 if SANITIZED else 24]):
        draw = {"temperature": i % 3 / 2, "seed": i, "max_tokens": 48, "logprobs": True, "top_logprobs": 2}
        form = {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}}
        more = [{}, {"presence_penalty": 0.4}, {"stop": [" is", "a"]}, {"n": 2}, form][i % 5]
        yield {"messages": question["messages"], **draw, **more}


@pytest.mark.parametrize("model", [needs_nano], ids=lambda model: model.name)
@pytest.mark.parametrize("workers", watched(["off", "on"], tsan=["on"], asan=["off"]))
def test_the_layer_that_a_model_has_for_it(tandem_bin, model, workers):
    """tandem-nano predicts the token after the next: most are accepted, and none changes a text."""
    asked = list(chats())

    def answers_of(draft):
        options = ["--ctx-size", "1024", "--max-batch", "6", "--prefill-chunk", "64", "--disaggregate", workers]
        server = Server(tandem_bin, model, *options, "--draft", draft)
        url = server.url + "/v1/chat/completions"
        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            replies = list(pool.map(lambda b: httpx.post(url, json=b, timeout=300, trust_env=False).json(), asked))
        server.close()
        return replies

    expected = answers_of("off")
    for draft in ["auto", "3"] if workers == "on" else ["1", "8"]:
        if SANITIZED and draft in ["3", "8"]:
            continue
        answers = answers_of(draft)
        for answer, other in zip(answers, expected):
            for choice, same in zip(answer["choices"], other["choices"]):
                assert choice["message"] == same["message"] and choice["logprobs"] == same["logprobs"]
        free = [details(answer) for body, answer in zip(asked, answers) if "response_format" not in body]
        accepted, rejected = map(sum, zip(*free))
        if draft == "1":
            assert accepted > 4 * rejected
