"""Images in conversations, through every API: what the model is shown, and whose pages it reads."""

import base64
import concurrent.futures
import os
from pathlib import Path

import anthropic
import httpx
import ollama
import openai
import pytest

from images import N_TOKENS, SIDE, encoded, part, png, user
from serving import Server, cached, make_model, metric, wait_until

PAGE = 64


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("models") / "seeing", "tiny-qwen3-vl")


def start(tandem_bin, model):
    running = Server(tandem_bin, model, "--max-batch", "8", "--ctx-size", "4096", "--cache-output")
    yield running
    running.close()


@pytest.fixture(scope="module")
def server(tandem_bin, model):
    yield from start(tandem_bin, model)


@pytest.fixture(scope="module")
def recurrent(tandem_bin, tmp_path_factory):
    """Of a model with recurrent states, whose cache keeps pages that are not full."""
    model = make_model(tmp_path_factory.mktemp("models") / "recurrent", "tiny-qwen3.5-vl")
    yield from start(tandem_bin, model)


def chat(server, messages, status=200, **fields):
    body = {"messages": messages, "temperature": 0, "max_tokens": 24, "ignore_eos": True, "logprobs": True}
    reply = httpx.post(server.url + "/v1/chat/completions", json=body | fields, timeout=400, trust_env=False)
    assert reply.status_code == status, reply.text
    return reply.json()


def said(answer):
    """What was answered, and how sure the model was, to the last bit."""
    (choice,) = answer["choices"]
    return choice["message"]["content"], [t["logprob"] for t in choice["logprobs"]["content"]]


def test_what_is_seen_counts_and_matters(server):
    question = "What is this?"
    blank = chat(server, [user(question)])
    one, other = (chat(server, [user(part(seed), question)]) for seed in (1, 2))
    tokens = blank["usage"]["prompt_tokens"] + N_TOKENS + 2  # <|vision_start|>, <|vision_end|>
    assert one["usage"]["prompt_tokens"] == other["usage"]["prompt_tokens"] == tokens
    assert said(one) != said(other)
    assert said(one) == said(chat(server, [user(part(1), question)], cache_salt="apart"))
    # The place of an image among the texts is the client's.
    assert said(chat(server, [user(question, part(1))])) != said(one)
    for n, parts in enumerate(([], [part(1)], [part(1), part(2)])):
        body = {"messages": [user(*parts, question)]}
        count = httpx.post(server.url + "/tokenize", json=body).json()["count"]
        assert count == blank["usage"]["prompt_tokens"] + n * (N_TOKENS + 2)


def test_clients_bound_the_pixels(server):
    """What is resized differently is another image: its tokens, its pages, and its turns."""

    def bounded(url=(), **of_part):
        image = part(1)
        image["image_url"] |= dict(url)
        return [user(image | of_part, "What is this?")]

    (whole,) = {said(chat(server, bounded(url)))[0] for url in ({}, {"detail": "low"}, {"detail": "auto"})}
    n = chat(server, bounded())["usage"]["prompt_tokens"]
    small = chat(server, bounded(max_pixels=96 * 96))
    assert n - N_TOKENS + 9 == small["usage"]["prompt_tokens"] and cached(small) < PAGE
    assert said(small) == said(chat(server, bounded({"max_pixels": 96 * 96})))
    for most in (256, 400):  # the model's most is 256 * 256
        assert chat(server, bounded(min_pixels=most * most))["usage"]["prompt_tokens"] == n - N_TOKENS + 64
    assert said(small)[0] != whole
    for wrong in ({"max_pixels": 0}, {"max_pixels": "many"}, {"min_pixels": 9, "max_pixels": 8}):
        error = chat(server, bounded(**wrong), status=400)["error"]
        assert "_pixels" in error["message"] and error["param"].startswith("messages[0].content[0]")


def test_no_page_is_shared_by_images(server):
    """Prompts whose token ids are equal, and images that are not: at every place in a page."""
    for lead in range(0, 70, 3):
        texts = ["a " * lead, " and then " * 40]
        fresh = chat(server, [user(texts[0], part(3), texts[1])], cache_salt=f"fresh {lead}")
        assert cached(fresh) == 0
        n = fresh["usage"]["prompt_tokens"]
        first = chat(server, [user(texts[0], part(4), texts[1])])
        second = chat(server, [user(texts[0], part(3), texts[1])])
        assert first["usage"]["prompt_tokens"] == second["usage"]["prompt_tokens"] == n
        assert cached(second) <= lead + 8  # what is in front of the image
        assert said(second) == said(fresh) != said(first)
        third = chat(server, [user(texts[0], part(3), texts[1])])
        assert cached(third) == (n - 1) // PAGE * PAGE and said(third) == said(fresh)


def test_no_state_is_shared_by_images(recurrent):
    for lead in range(0, 70, 9):
        texts = ["a " * lead, " and then " * 40]
        fresh = chat(recurrent, [user(texts[0], part(3), texts[1])], cache_salt=f"fresh {lead}")
        first, second, third = (chat(recurrent, [user(texts[0], part(i), texts[1])]) for i in (4, 3, 3))
        assert cached(second) <= lead + 8 and said(second) == said(fresh) != said(first)
        assert cached(third) > lead + 100 and said(third) == said(fresh)
        # The next turn begins with the page that the prompt has left half full.
        answer = {"role": "assistant", "content": "Yes."}
        turns = [[user(texts[0], part(i), texts[1]), answer, user("Why?", part(5))] for i in (3, 4, 6)]
        wanted = [said(chat(recurrent, turn, cache_salt=f"turn {lead}")) for turn in turns]
        found = [chat(recurrent, turn) for turn in turns]
        assert [said(answer) for answer in found] == wanted
        n = fresh["usage"]["prompt_tokens"]
        assert [cached(answer) >= n - 8 for answer in found] == [True, True, False]


def test_a_conversation_goes_on(server):
    messages = [user("Look at this.", part(5))]
    letters = {"max_tokens": 70, "guided_regex": "[a-z]*"}
    for turn in range(4):
        answer = chat(server, messages, **letters)
        n = answer["usage"]["prompt_tokens"]
        if turn:  # all that was computed before is found again
            assert cached(answer) >= (n_before + 69) // PAGE * PAGE
        else:
            assert said(answer) == said(chat(server, messages, **letters, cache_salt="apart"))
        n_before = n
        messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
        messages.append(user("And this?", part(6 + turn)))
    # The same words about another image are another conversation.
    messages[0] = user("Look at this.", part(9))
    assert cached(chat(server, messages)) < PAGE


def test_every_api_shows_the_same(server):
    question, data = "What do you see?", encoded(1)
    image = chat(server, [user(part(1), question)])
    n, text = image["usage"]["prompt_tokens"], image["choices"][0]["message"]["content"]
    common = {"temperature": 0, "max_tokens": 24}

    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    content = [part(1), {"type": "text", "text": question}]
    answer = client.chat.completions.create(model="", messages=[{"role": "user", "content": content}], **common,
                                            extra_body={"ignore_eos": True})
    assert (answer.usage.prompt_tokens, answer.choices[0].message.content) == (n, text)
    items = [{"type": "input_image", "image_url": "data:image/png;base64," + data, "detail": "auto"},
             {"type": "input_text", "text": question}]
    answer = client.responses.create(model="", input=[{"role": "user", "content": items}], temperature=0,
                                     max_output_tokens=24, extra_body={"ignore_eos": True})
    assert (answer.usage.input_tokens, answer.output_text) == (n, text)
    body = {"model": "", "input": "And?", "previous_response_id": answer.id, "max_output_tokens": 1}
    again = httpx.post(server.url + "/v1/responses", json=body).json()
    assert again["usage"]["input_tokens"] > n + 24

    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    name = httpx.get(server.url + "/v1/models").json()["data"][0]["id"]
    source = {"type": "base64", "media_type": "image/png", "data": data}
    content = [{"type": "image", "source": source}, {"type": "text", "text": question}]
    answer = client.messages.create(model=name, messages=[{"role": "user", "content": content}], max_tokens=24,
                                    extra_body={"ignore_eos": True, "temperature": 0})
    assert (answer.usage.input_tokens + answer.usage.cache_read_input_tokens, answer.content[0].text) == (n, text)
    count = client.messages.count_tokens(model=name, messages=[{"role": "user", "content": content}])
    assert count.input_tokens == n

    client = ollama.Client(server.url)
    options = {"temperature": 0, "num_predict": 24, "ignore_eos": True}
    message = {"role": "user", "content": question, "images": [png(1)]}
    answer = client.chat(name, [message], options=options)
    assert (answer.prompt_eval_count, text.startswith(answer.message.content)) == (n, True)
    answer = client.generate(name, question, images=[data], options=options)
    assert (answer.prompt_eval_count, text.startswith(answer.response)) == (n, True)


def test_what_tools_return_is_seen(server):
    call = {"id": "c1", "type": "function", "function": {"name": "shot", "arguments": "{}"}}
    asked = [user("Take a picture."), {"role": "assistant", "content": None, "tool_calls": [call]}]
    plain = chat(server, [*asked, {"role": "tool", "tool_call_id": "c1", "content": "Done:"}])
    result = {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "Done:"}, part(1)]}
    seen = chat(server, [*asked, result])
    assert seen["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"] + N_TOKENS + 2
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    source = {"type": "base64", "media_type": "image/png", "data": encoded(1)}
    content = [{"type": "text", "text": "Done:"}, {"type": "image", "source": source}]
    messages = [
        {"role": "user", "content": "Take a picture."},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "shot", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": content}]},
    ]
    count = client.messages.count_tokens(model="", messages=messages)
    assert count.input_tokens == seen["usage"]["prompt_tokens"]


BROKEN = {
    "an address": ("https://example.com/cat.png", "images are not fetched"),
    "no base64": ("data:image/png;base64,!!!", "not base64"),
    "no image": ("data:image/png;base64,aGVsbG8gd29ybGQ=", "Could not process image"),
    "cut off": ("data:image/png;base64," + base64.b64encode(png(1)[:200]).decode(), "Could not process image"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_what_cannot_be_seen(server, kind):
    url, why = BROKEN[kind]
    image = {"type": "image_url", "image_url": {"url": url}}
    error = chat(server, [user("Hi"), {"role": "assistant", "content": "Hi"}, user("Look:", image)], 400)["error"]
    assert why in error["message"] and "messages[2].content[1]" in error["message"], error
    assert error["param"] == "messages[2].content[1]"
    if "," in url:
        body = {"model": "", "messages": [{"role": "user", "content": "Hi", "images": [url.split(",")[1]]}]}
        reply = httpx.post(server.url + "/api/chat", json=body)
        assert reply.status_code == 400 and "messages[0].images[0]" in reply.text, reply.text
    if "," in url:
        source = {"type": "base64", "media_type": "image/png", "data": url.split(",")[1]}
        image = {"type": "image", "source": source}
        texts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        use = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "1", "content": "c"}
        within = {**result, "content": [*texts, image]}
        for content, place in (([result, *texts, image], "3"), ([within], "0].content[2")):
            messages = [user("Hi"), {"role": "assistant", "content": [use]}, {"role": "user", "content": content}]
            body = {"model": "", "max_tokens": 1, "messages": messages}
            reply = httpx.post(server.url + "/v1/messages", json=body)
            assert reply.status_code == 400 and f"messages[2].content[{place}]" in reply.text, reply.text
        items = [{"type": "input_text", "text": "a"}] * 2 + [{"type": "input_image", "image_url": url}]
        body = {"model": "", "input": [{"role": "user", "content": items}]}
        reply = httpx.post(server.url + "/v1/responses", json=body)
        assert reply.status_code == 400 and "input[0].content[2]" in reply.text, reply.text
    many = [user("Look:", *[part(1)] * 65)]
    assert "64 images" in chat(server, many, 400)["error"]["message"]


def test_what_is_left_out(server):
    """truncation: auto leaves the first turns out, with their images."""
    old = [m for i in range(40) for m in (user(part(i % 8), "word " * 60), {"role": "assistant", "content": "yes"})]
    last = user(part(20), "And this?")
    assert chat(server, [*old, last], 400)["error"]["code"] == "context_length_exceeded"
    cut = chat(server, [*old, last], truncation="auto")
    assert 2000 < cut["usage"]["prompt_tokens"] < 4096
    n_left = next(n for n in range(2, 80, 2) if chat_tokens(server, [*old[n:], last]) == cut["usage"]["prompt_tokens"])
    assert said(chat(server, [*old[n_left:], last])) == said(cut)


def chat_tokens(server, messages):
    return httpx.post(server.url + "/tokenize", json={"messages": messages}).json()["count"]


LONG = [user("Compare", part(1), "with", part(2), "word " * 100)]


@pytest.mark.parametrize("workers", ["off", "on"])
def test_a_worker_dies(tandem_bin, model, workers):
    server = Server(tandem_bin, model, "--disaggregate", workers, "--ctx-size", "4096")
    try:
        whole = said(chat(server, LONG, max_tokens=600))
        body = {"messages": LONG, "temperature": 0, "max_tokens": 600, "ignore_eos": True, "stream": True}
        text, n = "", 0
        with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
            extra = {"ignore_eos": True, "cache_salt": "killed"}
            stream = client.chat.completions.create(model="", messages=LONG, temperature=0, max_tokens=600,
                                                    stream=True, logprobs=True, extra_body=extra)
            logprobs = []
            for chunk in stream:
                for choice in chunk.choices:
                    text += choice.delta.content or ""
                    logprobs += [t.logprob for t in choice.logprobs.content] if choice.logprobs else []
                n += 1
                if n == 5:
                    server.kill_worker()
        assert (text, logprobs) == whole
    finally:
        server.close()


def test_preempted(tandem_bin, model):
    """Answers that make room for others see the same images when they go on."""
    options = ["--disaggregate", "off", "--max-batch", "6", "--prefill-chunk", "64", "--ctx-size", "512"]
    prompts = [[user(part(i), "Tell me", part(i + 1), str(i))] for i in range(6)]
    server = Server(tandem_bin, model, *options)
    alone = [said(chat(server, p, max_tokens=200)) for p in prompts]
    server.close()
    server = Server(tandem_bin, model, *options, "--kv-cache-tokens", "1024")
    try:
        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            together = list(pool.map(lambda p: said(chat(server, p, max_tokens=200)), prompts))
        assert together == alone
        assert metric(server, "num_preemptions_total") > 0
    finally:
        server.close()


def test_pages_on_disk(tandem_bin, model, tmp_path):
    options = ["--kv-dir", tmp_path / "kv", "--disaggregate", "off", "--ctx-size", "4096"]
    server = Server(tandem_bin, model, *options)
    first = chat(server, LONG)
    server.close()
    server = Server(tandem_bin, model, *options)
    try:
        other = chat(server, [user("Compare", part(1), "with", part(3), "word " * 100)])
        assert cached(other) <= PAGE and said(other) != said(first)
        again = chat(server, LONG)
        assert cached(again) == (again["usage"]["prompt_tokens"] - 1) // PAGE * PAGE
        assert said(again) == said(first)
    finally:
        server.close()


def n_held(server):
    """Bytes of pixels that the server holds."""
    for fd in Path(f"/proc/{server.process.pid}/fd").iterdir():
        if "tandem-images" in os.readlink(fd):
            return fd.stat().st_blocks * 512
    raise AssertionError("the server has no memory for images")


def test_pixels_are_given_back(server):
    """When answers end, and when their clients leave."""
    chat(server, [user(part(1), part(2))], n=3)
    wait_until(lambda: n_held(server) == 0)
    with httpx.stream("POST", server.url + "/v1/chat/completions", timeout=400, trust_env=False,
                      json={"messages": LONG, "stream": True, "max_tokens": 3000, "ignore_eos": True}) as reply:
        for n, _ in enumerate(reply.iter_lines()):
            if n == 3:
                assert n_held(server) > 2 * 3 * SIDE**2
                break
    wait_until(lambda: n_held(server) == 0)
    chat(server, [user(part(1), part(2), {"type": "image_url", "image_url": {"url": "data:,"}})], 400)
    assert n_held(server) == 0


def test_what_the_model_can_do_is_told(server):
    assert httpx.get(server.url + "/props").json()["modalities"]["vision"] is True
    name = httpx.get(server.url + "/v1/models").json()["data"][0]["id"]
    shown = httpx.post(server.url + "/api/show", json={"model": name}).json()
    assert "vision" in shown["capabilities"]


def test_a_model_that_cannot_see(tandem_bin, tiny_model):
    server = Server(tandem_bin, tiny_model)
    try:
        error = chat(server, [user("Look:", part(1))], 400)["error"]
        assert "Could not process image" in error["message"]
        old = [user("Look:", part(1)), {"role": "assistant", "content": "Yes."}, user("Well?")]
        assert chat(server, old)["usage"]["prompt_tokens"] < N_TOKENS
    finally:
        server.close()
