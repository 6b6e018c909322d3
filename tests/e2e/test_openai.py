"""The HTTP API through the openai client, against a checkpoint of random weights."""

import concurrent.futures
import json
import math
import os
import random
import signal
import threading
import time
from pathlib import Path

import httpx
import openai
import pytest

from serving import SANITIZED, Server, make_model, wait_until

HELLO = [{"role": "user", "content": "Hello, who are you?"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def server(tandem_bin, model):
    running = Server(tandem_bin, model, "--max-batch", "16")
    yield running
    running.close()


def chat(client, messages=HELLO, **kwargs):
    kwargs.setdefault("max_tokens", 24)
    extra = {"ignore_eos": True, **kwargs.pop("extra_body", {})}
    return client.chat.completions.create(
        model="tiny", messages=messages, extra_body=extra, **kwargs
    )


def joined(stream, index=0):
    text, reasons = "", []
    for chunk in stream:
        for choice in chunk.choices:
            if choice.index == index:
                text += choice.delta.content or ""
                if choice.finish_reason:
                    reasons.append(choice.finish_reason)
    assert len(reasons) == 1
    return text, reasons[0]


def health(server):
    return httpx.get(server.url + "/health", trust_env=False).json()


# -- answers ---------------------------------------------------------------------------------


def test_answers(client):
    answer = chat(client, temperature=0)
    assert answer.object == "chat.completion"
    assert answer.model == "tiny"
    assert answer.id.startswith("chatcmpl-")
    assert abs(answer.created - time.time()) < 60
    (choice,) = answer.choices
    assert choice.index == 0 and choice.message.role == "assistant"
    assert choice.finish_reason == "length"
    assert choice.message.content and not choice.message.tool_calls
    assert answer.usage.completion_tokens == 24
    assert answer.usage.prompt_tokens > 3
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 24
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_streams_the_same(client):
    whole = chat(client, temperature=0, max_tokens=64).choices[0]
    text, reason = joined(chat(client, temperature=0, max_tokens=64, stream=True))
    assert text == whole.message.content
    assert reason == whole.finish_reason


def test_usage_in_streams(client):
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 24
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert all(chunk.usage is None for chunk in chat(client, stream=True))


def test_progress_of_a_prompt(server):
    """As llama-server's clients know it: tokens of the prompt so far, before the first of the answer."""
    text = "".join(random.Random(5).choices("abcdefghij", k=1500))
    for path, body in (("chat/completions", {"messages": [{"role": "user", "content": text}]}),
                       ("completions", {"prompt": text})):
        body |= {"stream": True, "return_progress": True, "max_tokens": 2, "ignore_eos": True, "temperature": 0}
        with httpx.stream("POST", f"{server.url}/v1/{path}", json=body, timeout=300, trust_env=False) as answer:
            data = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
        told = [chunk["prompt_progress"] for chunk in data if "prompt_progress" in chunk]
        done = [p["processed"] for p in told]
        total = told[0]["total"]
        assert total > 1000 and done == sorted(done) and done[-1] == total and len(done) > 1
        assert all(p["total"] == total and p["cache"] < done[0] and p["time_ms"] >= 0 for p in told)
        assert "prompt_progress" in data[len(told) - 1] and len(data) > len(told)
        body["return_progress"] = False
        quiet = httpx.post(f"{server.url}/v1/{path}", json=body, timeout=300, trust_env=False).text
        assert "prompt_progress" not in quiet


def test_usage_with_every_token(client):
    """Tokens of half a character have no text yet, and are told all the same. Should the last be
    one, what there is of it follows it."""
    asked = {"include_usage": True, "continuous_usage_stats": True}
    kwargs = {"temperature": 2, "seed": 3, "max_tokens": 200, "stream": True}
    chunks = list(chat(client, stream_options=asked, **kwargs))
    told = [chunk for chunk in chunks if chunk.choices and chunk.usage]
    counts = [chunk.usage.completion_tokens for chunk in told]
    if counts[198:] == [199, 200, 200]:
        assert told[-2].choices[0].delta.content is None and told[-1].choices[0].delta.content
        counts.pop()
    assert counts == list(range(1, 201))
    texts = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
    assert texts.count(None) > 2  # the last chunk is one
    assert joined(chunks) == joined(chat(client, **kwargs))
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 200
    del asked["include_usage"]
    chunks = chat(client, stream_options=asked, **kwargs)
    assert all(chunk.usage is None for chunk in chunks)


@pytest.mark.parametrize("end", [{"logit_bias": {"300": 100}}, {"logit_bias": {"996": 100}}, {}])
def test_usage_of_chunks_counts_all_tokens(client, end):
    """Of each choice the last that is told is what the whole has, a token that is a stop string included."""
    asked = {"include_usage": True, "continuous_usage_stats": True}
    if "300" in end.get("logit_bias", {}):
        end = end | {"stop": [chat(client, max_tokens=1, **end).choices[0].message.content]}
    for seed in range(2):
        last = {}
        for chunk in chat(client, stream=True, stream_options=asked, temperature=1.5, seed=seed, n=2, **end):
            for choice in chunk.choices:
                if chunk.usage:
                    last[choice.index] = chunk.usage.completion_tokens
        assert sum(last.values()) == chunk.usage.completion_tokens and not chunk.choices


def test_stops_at_end_of_sequence(client):
    """Biased towards it, the end comes first; it counts as a token and shows no text."""
    answer = client.chat.completions.create(
        model="tiny", messages=HELLO, temperature=0, logit_bias={"996": 100}, max_tokens=5
    )
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.content == ""
    assert answer.usage.completion_tokens == 1


def test_max_tokens_default_and_both_names(client):
    answer = chat(client, max_tokens=openai.NOT_GIVEN, max_completion_tokens=3)
    assert answer.usage.completion_tokens == 3
    completion = client.completions.create(
        model="tiny", prompt="a", extra_body={"ignore_eos": True}
    )
    assert completion.usage.completion_tokens == 16


def test_completions(client):
    def create(**kwargs):
        return client.completions.create(
            model="tiny", max_tokens=12, temperature=0, extra_body={"ignore_eos": True}, **kwargs
        )

    one = create(prompt="Once upon a time")
    assert one.object == "text_completion" and one.id.startswith("cmpl-")
    assert one.choices[0].finish_reason == "length"
    both = create(prompt=["Once upon a time", "The end"])
    assert [c.index for c in both.choices] == [0, 1]
    assert both.choices[0].text == one.choices[0].text
    assert both.usage.completion_tokens == 24
    streamed = "".join(
        c.text for chunk in create(prompt="Once upon a time", stream=True) for c in chunk.choices
    )
    assert streamed == one.choices[0].text


def test_token_prompts(client, server):
    text = "Once upon a time"
    ids = httpx.post(server.url + "/tokenize", json={"prompt": text}).json()["tokens"]
    kwargs = {"model": "tiny", "max_tokens": 12, "temperature": 0}
    by_text = client.completions.create(prompt=text, **kwargs)
    by_ids = client.completions.create(prompt=ids, **kwargs)
    assert by_ids.choices[0].text == by_text.choices[0].text
    assert by_ids.usage.prompt_tokens == len(ids) == by_text.usage.prompt_tokens


def test_several_choices(client):
    answer = chat(client, n=3, seed=5, temperature=1.5)
    assert [c.index for c in answer.choices] == [0, 1, 2]
    assert len({c.message.content for c in answer.choices}) == 3
    assert answer.usage.completion_tokens == 72
    again = list(chat(client, n=3, seed=5, temperature=1.5, stream=True))
    for i in range(3):
        assert joined(again, i)[0] == answer.choices[i].message.content


def test_as_many_choices_as_others_give(client):
    answer = chat(client, n=128, max_tokens=1, temperature=1.5)
    assert [c.index for c in answer.choices] == list(range(128))
    assert answer.usage.completion_tokens == 128


# -- stop strings ----------------------------------------------------------------------------


def test_stop_strings(client):
    text = chat(client, temperature=0, max_tokens=60).choices[0].message.content
    assert len(text) > 20
    for begin in range(3, 15, 2):
        for length in (1, 2, 5):
            stop = text[begin : begin + length]
            wanted = text[: text.index(stop)]
            answer = chat(client, temperature=0, max_tokens=60, stop=stop)
            assert answer.choices[0].message.content == wanted
            assert answer.choices[0].finish_reason == "stop"
            assert answer.usage.completion_tokens < 60
            streamed = joined(chat(client, temperature=0, max_tokens=60, stop=[stop], stream=True))
            assert streamed == (wanted, "stop")


def test_stop_that_does_not_come(client):
    text = chat(client, temperature=0).choices[0].message.content
    begun = text[-4:] + "\N{SNOWMAN}"
    assert joined(chat(client, temperature=0, stop=["\N{SNOWMAN}", begun], stream=True)) == (
        text,
        "length",
    )


# -- sampling --------------------------------------------------------------------------------


def test_seeds(client):
    def say(seed):
        return chat(client, temperature=1, seed=seed).choices[0].message.content

    assert say(7) == say(7)
    assert say(-(2**63)) == say(-(2**63))
    assert len({say(seed) for seed in (1, 2, 3, 2**53, 2**53 + 1, 2**63 - 1)}) == 6


def test_without_a_seed_answers_differ(client):
    assert len({chat(client, temperature=2).choices[0].message.content for _ in range(4)}) > 1


def test_greedy_ignores_the_seed(client):
    said = {chat(client, temperature=0, seed=s).choices[0].message.content for s in (1, 2)}
    assert len(said) == 1


def test_logit_bias(client):
    answer = chat(client, temperature=0, logit_bias={"100": 100}, max_tokens=4)
    again = chat(client, temperature=1, top_p=0, logit_bias={"100": 100}, max_tokens=4)
    assert answer.choices[0].message.content == again.choices[0].message.content
    assert len(set(answer.choices[0].message.content)) <= 4


def test_dry(server):
    """A text of four tokens repeats itself; with a large penalty nothing of more than two tokens comes again."""
    few = (5, 9, 17, 23)
    texts = [httpx.post(server.url + "/detokenize", json={"tokens": [t]}, trust_env=False).json()["content"] for t in few]
    prompt = list(few) * 5
    body = {"prompt": prompt, "temperature": 0, "n_predict": 40, "ignore_eos": True, "return_tokens": True,
            "logit_bias": {str(t): 60 for t in few}}

    def tokens(path="/completion", **more):
        reply = httpx.post(server.url + path, json={**body, **more}, timeout=60, trust_env=False)
        assert reply.status_code == 200, reply.text
        return reply.json()["tokens"]

    def n_repeated(answer):
        all_, seen, n = prompt + answer, set(), 0
        for i in range(2, len(all_)):
            n += i >= len(prompt) and tuple(all_[i - 2 : i + 1]) in seen
            seen.add(tuple(all_[i - 2 : i + 1]))
        return n

    plain = tokens()
    dry = {"dry_multiplier": 100, "dry_sequence_breakers": []}
    assert n_repeated(plain) > 20
    assert n_repeated(tokens(**dry)) == 0
    assert n_repeated(tokens(**{**dry, "dry_sequence_breakers": "[]"})) == 0
    assert n_repeated(tokens(**{**dry, "dry_penalty_last_n": 12})) > 0
    assert tokens(**{**dry, "dry_sequence_breakers": texts}) == plain  # each token breaks
    assert tokens(**{**dry, "dry_penalty_last_n": 0}) == plain
    for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses", "/completion"):
        asked = {"prompt": "a"} if path == "/completion" else {"messages": HELLO, "input": HELLO, "max_tokens": 5}
        reply = httpx.post(server.url + path, json={**asked, "dry_base": 0.5}, timeout=60, trust_env=False)
        assert reply.status_code == 400 and "dry_base must be between 1 and 100" in reply.text


@pytest.mark.parametrize("sampler", [{"dry_multiplier": 100, "dry_sequence_breakers": []},
                                     {"xtc_probability": 1, "xtc_threshold": 0}])
def test_ollamas_options_are_llamas(server, sampler):
    prompt = "abc abc abc abc abc abc"
    bias = {"logit_bias": {"5": 60, "9": 60, "17": 60, "23": 60}}

    def both(**sampler):
        usual = {"seed": 1, "temperature": 1, "top_k": 3, **sampler}
        theirs = {"prompt": prompt, "n_predict": 40, "ignore_eos": True, **bias, **usual}
        own = {"prompt": prompt, "raw": True, "stream": False, "ignore_eos": True, **bias,
               "options": {"num_predict": 40, **usual}}
        said = [httpx.post(server.url + path, json=body, timeout=60, trust_env=False).json()[field] for path, body, field
                in (("/completion", theirs, "content"), ("/api/generate", own, "response"))]
        assert said[0] == said[1]
        return said[0]

    assert both(**sampler) != both()


def test_logprobs(client):
    answer = chat(client, temperature=0, logprobs=True, top_logprobs=5, max_tokens=40)
    content = answer.choices[0].logprobs.content
    assert len(content) == 40
    assert "".join(t.token for t in content) == answer.choices[0].message.content
    for token in content:
        assert -9999 <= token.logprob <= 0
        assert len(token.top_logprobs) == 5
        assert token.logprob == token.top_logprobs[0].logprob  # greedy
        assert sum(math.exp(t.logprob) for t in token.top_logprobs) <= 1.0001
        assert [t.logprob for t in token.top_logprobs] == sorted(
            (t.logprob for t in token.top_logprobs), reverse=True
        )
        assert all(0 <= b < 256 for b in token.bytes)


def test_logprobs_in_streams(client):
    whole = chat(client, temperature=0, logprobs=True, top_logprobs=2, max_tokens=40).choices[0]
    tokens, text = [], ""
    for chunk in chat(
        client, temperature=0, logprobs=True, top_logprobs=2, max_tokens=40, stream=True
    ):
        for choice in chunk.choices:
            piece = choice.delta.content or ""
            text += piece
            if choice.logprobs:
                assert "".join(t.token for t in choice.logprobs.content) == piece
                tokens += choice.logprobs.content
    assert text == whole.message.content
    assert [t.model_dump() for t in tokens] == [t.model_dump() for t in whole.logprobs.content]


def test_logprobs_stop_with_the_text(client):
    text = chat(client, temperature=0, max_tokens=60).choices[0].message.content
    answer = chat(client, temperature=0, max_tokens=60, stop=text[10:13], logprobs=True)
    tokens = answer.choices[0].logprobs.content
    assert "".join(t.token for t in tokens) == answer.choices[0].message.content


def test_legacy_logprobs(client):
    answer = client.completions.create(
        model="tiny", prompt="a", max_tokens=8, logprobs=3, extra_body={"ignore_eos": True}
    )
    lp = answer.choices[0].logprobs
    assert "".join(lp.tokens) == answer.choices[0].text
    assert len(lp.tokens) == len(lp.token_logprobs) == len(lp.top_logprobs) == 8
    assert all(len(top) == 3 for top in lp.top_logprobs)
    assert lp.text_offset == [len("".join(lp.tokens[:i])) for i in range(8)]


# -- input -----------------------------------------------------------------------------------


def test_unicode(client, server):
    text = "Grüße 世界 🌍 \u0301 \U0010ffff مرحبا"
    answer = chat(client, [{"role": "user", "content": text}], max_tokens=200, temperature=1.5)
    answer.choices[0].message.content.encode("utf-8")
    rendered = httpx.post(
        server.url + "/apply-template", json={"messages": [{"role": "user", "content": text}]}
    )
    assert text in rendered.json()["prompt"]
    tokens = httpx.post(server.url + "/tokenize", json={"content": text}).json()["tokens"]
    back = httpx.post(server.url + "/detokenize", json={"tokens": tokens}).json()["prompt"]
    assert text in back


def test_rendered_prompts(client, server):
    def render(path, body):
        return httpx.post(f"{server.url}/v1/{path}/render", json=body)

    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    chat_body = {"model": "tiny", "messages": messages, "max_tokens": 5, "top_k": 7}
    rendered = render("chat/completions", chat_body | {"cache_salt": "s", "stream": True}).json()
    shown = httpx.post(server.url + "/tokenize", json={"messages": messages}).json()["tokens"]
    assert rendered["token_ids"] == shown and rendered["features"] is None
    assert rendered["request_id"].startswith("chatcmpl-") and rendered["model"] == "tiny"
    assert rendered["cache_salt"] == "s" and rendered["stream"]
    sampling = rendered["sampling_params"]
    assert (sampling["max_tokens"], sampling["top_k"], sampling["n"]) == (5, 7, 1)
    answer = client.completions.create(model="tiny", prompt=shown, max_tokens=5, temperature=0)
    same = chat(client, messages, max_tokens=5, temperature=0)
    assert same.usage.prompt_tokens == len(shown)
    assert answer.choices[0].text == same.choices[0].message.content
    texts = render("completions", {"prompt": ["one", "two words"], "max_tokens": 10**6}).json()
    room = httpx.post(server.url + "/tokenize", json={"prompt": "one"}).json()["max_model_len"]
    for text, one in zip(["one", "two words"], texts, strict=True):
        ids = httpx.post(server.url + "/tokenize", json={"prompt": text}).json()["tokens"]
        assert one["token_ids"] == ids and one["request_id"].startswith("cmpl-")
        assert one["sampling_params"]["max_tokens"] == room - len(ids)
    assert render("completions", {"prompt": [3, 4, 5]}).json()[0]["token_ids"] == [3, 4, 5]
    for body, param in [({"messages": []}, "messages"), (chat_body | {"top_k": "x"}, "top_k")]:
        wrong = render("chat/completions", body)
        assert wrong.status_code == 400 and wrong.json()["error"]["param"] == param
    long = render("completions", {"prompt": [3] * (room + 1)})
    assert long.status_code == 400 and long.json()["error"]["code"] == "context_length_exceeded"
    assert render("completions", {"model": "another", "prompt": "a"}).status_code == 404


def test_what_users_type_is_no_control_token(client, server):
    def tokens(content):
        body = {"messages": [{"role": "user", "content": content}]}
        return httpx.post(server.url + "/tokenize", json=body).json()["tokens"]

    end = "<｜end▁of▁sentence｜>"
    assert 996 not in tokens(end)
    assert 996 not in tokens([{"type": "text", "text": end}])
    wrong = httpx.post(server.url + "/tokenize", json={"prompt": "a", "model": {}})
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "model"
    bare = {"prompt": "a", "add_special_tokens": False}
    with_bos = httpx.post(server.url + "/tokenize", json={"prompt": "a"}).json()["tokens"]
    assert httpx.post(server.url + "/tokenize", json=bare).json()["tokens"] == with_bos[1:]
    # A prompt made by hand holds control tokens.
    plain = httpx.post(server.url + "/tokenize", json={"prompt": f"a{end}b"}).json()["tokens"]
    assert plain.count(996) == 1
    ids = client.completions.create(model="tiny", prompt=plain, max_tokens=8, temperature=0)
    text = client.completions.create(model="tiny", prompt=f"a{end}b", max_tokens=8, temperature=0)
    assert text.usage.prompt_tokens == len(plain) and text.choices[0].text == ids.choices[0].text


def test_roles_and_parts(client):
    parts = [{"type": "text", "text": "Hello,"}, {"type": "text", "text": "you"}]
    by_parts = chat(client, [{"role": "developer", "content": parts}], temperature=0)
    by_text = chat(client, [{"role": "system", "content": "Hello,\nyou"}], temperature=0)
    assert by_parts.choices[0].message.content == by_text.choices[0].message.content
    assert by_parts.usage == by_text.usage


def test_history_with_tools_and_reasoning(client):
    messages = [
        {"role": "user", "content": "What is 6 x 7?"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "I had better ask.",
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "multiply", "arguments": '{"a": 6, "b": 7}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "42"},
    ]
    tool = {"type": "function", "function": {"name": "multiply", "parameters": {"type": "object"}}}
    answer = chat(client, messages, tools=[tool], tool_choice="auto", parallel_tool_calls=False)
    assert answer.usage.completion_tokens == 24


def test_unknown_members_and_nulls_pass(client):
    answer = chat(
        client,
        extra_body={"frobnicate": {"x": 1}, "stop": None, "seed": None, "tools": None},
        user="me",
        metadata={"a": "b"},
        response_format={"type": "text"},
    )
    assert answer.usage.completion_tokens == 24


# -- errors ----------------------------------------------------------------------------------


def test_error_classes(client):
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, temperature=-1)
    assert caught.value.param == "temperature"
    assert "temperature" in caught.value.message
    with pytest.raises(openai.BadRequestError):
        chat(client, messages=[])
    with pytest.raises(openai.BadRequestError):
        chat(client, stream=True, top_logprobs=3)
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, functions=[{"name": "f"}])
    assert caught.value.code == "unsupported_parameter"
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-4", messages=HELLO)
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")
    with pytest.raises(openai.BadRequestError, match="embeddings"):
        client.embeddings.create(model="tiny", input="x")


def test_prompt_beyond_the_context(client, server):
    n_ctx = client.models.retrieve("tiny").max_model_len
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, [{"role": "user", "content": "x y z " * n_ctx}], stream=True)
    assert caught.value.code == "context_length_exceeded"
    assert f"maximum context length is {n_ctx} tokens" in caught.value.message
    assert caught.value.body["n_ctx"] == n_ctx
    assert caught.value.body["n_prompt_tokens"] > n_ctx


def test_models(client):
    (listed,) = client.models.list().data
    assert listed.id == "tiny" and listed.object == "model" and listed.owned_by
    assert listed.max_model_len > 100
    assert client.models.retrieve("tiny") == listed


def test_names_of_a_model(tandem_bin, model, tmp_path):
    snapshot = tmp_path / "hub" / "models--org--name--x" / "snapshots" / "0123abcd"
    snapshot.parent.mkdir(parents=True)
    snapshot.mkdir()
    for file in model.iterdir():
        (snapshot / file.name).symlink_to(file)
    for options, names in (
        ([], ["org/name/x"]),
        (["--served-model-name", "a", "b/c", "--max-batch", "1"], ["a", "b/c"]),
    ):
        server = Server(tandem_bin, snapshot, *options)
        try:
            with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
                assert [m.id for m in client.models.list().data] == names
                for name in [*names, str(snapshot), ""]:
                    client.completions.create(model=name, prompt="x", max_tokens=1)
                assert client.models.retrieve(names[-1]).id == names[-1]
                with pytest.raises(openai.NotFoundError):
                    client.completions.create(model="other", prompt="x")
        finally:
            server.close()


def test_api_keys(tandem_bin, model, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("# theirs\nmellon 3\n")
    options = ["--api-key", "sesame", "--api-keys", keys, "--served-model-name", "org/name"]
    server = Server(tandem_bin, model, *options)
    try:
        for key in ("mellon", "sesame"):
            good = openai.OpenAI(base_url=server.url + "/v1", api_key=key, max_retries=0)
            good.chat.completions.create(model="org/name", messages=HELLO, max_tokens=2)
        assert good.models.list().data[0].id == "org/name"
        assert good.models.retrieve("org/name").id == "org/name"
        for key in ("Sesame", "sesam", "sesamee", "x", "mellon 3"):
            bad = openai.OpenAI(base_url=server.url + "/v1", api_key=key, max_retries=0)
            with pytest.raises(openai.AuthenticationError):
                bad.models.list()
            with pytest.raises(openai.AuthenticationError):
                bad.chat.completions.create(model="org/name", messages=HELLO)
        assert httpx.get(server.url + "/health").status_code == 200
        # With a key, Host may be anything: the key is what protects.
        response = httpx.get(
            server.url + "/v1/models", headers={"Host": "a.b", "Authorization": "Bearer sesame"}
        )
        assert response.status_code == 200
    finally:
        server.close()


@pytest.mark.parametrize("how", ["option", "equals", "file", "environment"])
def test_a_key_stands_in_no_process_list(tandem_bin, model, tmp_path, monkeypatch, how):
    (tmp_path / "key").write_text("sesame\n")
    (tmp_path / "key").chmod(0o640)
    if how == "environment":
        monkeypatch.setenv("TANDEM_API_KEY", "sesame")
    given = {"option": ["--api-key", "sesame"], "equals": ["--api-key=sesame"], "file": ["--api-key-file", tmp_path / "key"]}
    server = Server(tandem_bin, model, *given.get(how, []))
    try:
        ask = lambda key: httpx.get(server.url + "/v1/models", headers={"Authorization": f"Bearer {key}"}, trust_env=False)
        assert ask("sesame").status_code == 200 and ask("xxxxxx").status_code == 401
        family = [server.process.pid, *server.workers().values()]
        assert not any(b"sesame" in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in family)
        assert not any(b"sesame" in Path(f"/proc/{pid}/environ").read_bytes() for pid in family)
        assert ("chmod 600" in server.log()) == (how == "file")
    finally:
        server.close()


def test_a_changing_token_gains_nothing(tandem_bin, model):
    """Without keys all requests of one address share its part of the queue."""
    server = Server(tandem_bin, model, "--max-batch", "1", "--ctx-size", "256")
    pids = list(server.workers().values())
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    statuses = []

    def flood(token):
        body = {"prompt": [[1]] * 64, "max_tokens": 1}
        headers = {"Authorization": f"Bearer {token}"}
        reply = httpx.post(server.url + "/v1/completions", json=body, headers=headers, timeout=60, trust_env=False)
        statuses.append(reply.status_code)

    threads = [threading.Thread(target=flood, args=(i,)) for i in range(12)]
    try:
        for thread in threads:
            thread.start()
        wait_until(lambda: len(statuses) >= 4)  # of 768 sequences 512 may wait
        waiting = httpx.get(server.url + "/health", trust_env=False).json()["waiting"]
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    for thread in threads:
        thread.join()
    server.close()
    assert waiting <= 512 and sorted(set(statuses)) == [200, 429]


def test_pages_of_other_origins(tandem_bin, model, server):
    """CORS is off; with --cors the one origin may ask, and its preflight is answered."""
    headers = {"Origin": "https://chat.example", "Access-Control-Request-Method": "POST",
               "Access-Control-Request-Headers": "authorization, content-type"}
    path = "/v1/chat/completions"
    off = httpx.options(server.url + path, headers=headers, trust_env=False)
    assert off.status_code == 405 and not [h for h in off.headers if h.startswith("access-control")]
    running = Server(tandem_bin, model, "--cors", "https://chat.example", "--api-key", "sesame")
    try:
        asked = httpx.options(running.url + path, headers=headers, trust_env=False)
        assert asked.status_code == 200  # without the key, which browsers do not send with it
        assert asked.headers["access-control-allow-origin"] == "https://chat.example"
        assert asked.headers["access-control-allow-methods"] == "POST"
        assert asked.headers["access-control-allow-headers"] == "authorization, content-type"
        key = {"Authorization": "Bearer sesame"}
        for origin, allowed in (("https://chat.example", True), ("https://evil.example", False)):
            body = {"messages": HELLO, "max_tokens": 2, "stream": True}
            reply = httpx.post(running.url + path, json=body, headers={"Origin": origin, **key}, trust_env=False)
            assert reply.status_code == 200
            assert ("access-control-allow-origin" in reply.headers) == allowed
            assert not allowed or reply.headers["vary"] == "Origin"
        foreign = httpx.options(running.url + path, headers={**headers, "Origin": "null"}, trust_env=False)
        assert foreign.status_code == 405
    finally:
        running.close()


def test_a_foreign_host_is_told_what_to_do(server):
    reply = httpx.get(server.url + "/v1/models", headers={"Host": "llm.example"}, trust_env=False)
    assert reply.status_code == 403
    message = reply.json()["error"]["message"]
    assert "Host: localhost" in message and "--api-key" in message and "--host 0.0.0.0" in message


# -- many at once ----------------------------------------------------------------------------


@pytest.mark.tsan
def test_sixteen_at_once_say_what_each_says_alone(client):
    def ask(i):
        words = " ".join(f"word{j}" for j in range(i * 7 % 40 + 1))
        sampling = {"temperature": 0} if i % 2 else {"temperature": 0.9, "seed": i}
        answer = chat(
            client, [{"role": "user", "content": words}], max_tokens=16 + i * 3, **sampling
        )
        return answer.choices[0].message.content

    n = 8 if SANITIZED else 16
    alone = [ask(i) for i in range(n)]
    for _ in range(1 if SANITIZED else 2):
        with concurrent.futures.ThreadPoolExecutor(n) as pool:
            assert list(pool.map(ask, range(n))) == alone


def test_client_that_leaves_frees_its_place(client, server):
    for stream in (True, False):
        with pytest.raises(openai.APITimeoutError):
            answer = client.with_options(timeout=0.5).chat.completions.create(
                model="tiny", messages=HELLO, extra_body={"ignore_eos": True}, stream=stream
            )
            started = time.monotonic()
            for _ in answer:
                if time.monotonic() > started + 0.5:
                    answer.close()
                    raise openai.APITimeoutError(request=None)
        wait_until(lambda: health(server)["running"] == 0)
    assert chat(client).usage.completion_tokens == 24


# -- the end ---------------------------------------------------------------------------------


@pytest.mark.tsan
def test_sigterm_drains(tandem_bin, model):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as by nohup
    server = Server(tandem_bin, model, "--drain-timeout", "300")
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    server.signal(signal.SIGHUP)
    with openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0) as client:
        idle = httpx.Client()
        idle.get(server.url + "/health")
        stream = chat(client, stream=True, max_tokens=300, temperature=0)
        first = next(iter(stream))
        assert first.choices[0].delta.role == "assistant"
        server.signal(signal.SIGTERM)
        text, reason = joined(stream)
        assert reason == "length" and text
        assert server.wait() == 0, server.log()
        with pytest.raises(httpx.ConnectError):
            httpx.get(server.url + "/health")
        idle.close()


def test_second_signal_ends(tandem_bin, model):
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGHUP})  # inherited
    server = Server(tandem_bin, model)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    with openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0) as client:
        stream = chat(client, stream=True, max_tokens=7000, temperature=0)
        next(iter(stream))
        server.signal(signal.SIGHUP)
        server.await_line("a second signal")
        server.signal(signal.SIGTERM)
        assert server.wait(10) == 128 + signal.SIGTERM
        with pytest.raises((httpx.HTTPError, openai.APIError)):
            list(stream)


def test_drain_has_a_deadline(tandem_bin, model):
    server = Server(tandem_bin, model, "--drain-timeout", "1")
    with openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0) as client:
        stream = chat(client, stream=True, max_tokens=8000, temperature=0, logprobs=True)
        next(iter(stream))
        with concurrent.futures.ThreadPoolExecutor() as pool:
            body = {"prompt": "Once", "max_tokens": 8000, "ignore_eos": True}
            url = server.url + "/v1/completions"
            whole = pool.submit(httpx.post, url, json=body, timeout=60, trust_env=False)
            wait_until(lambda: httpx.get(server.url + "/health").json()["running"] == 2)
            server.signal(signal.SIGTERM)
            assert server.wait(15) == 0
            assert whole.result().status_code == 503 and whole.result().headers["retry-after"]
        with pytest.raises(openai.APIError, match="shutting down"):
            list(stream)
        assert "still running" in server.log()


def test_bad_model_is_told_at_once(tandem_bin, tmp_path):
    server = Server(tandem_bin, tmp_path / "absent", wait=False)
    assert server.wait() != 0
    assert "absent" in server.log()
