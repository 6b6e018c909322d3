"""The protocols beside OpenAI's, through their own clients, Messages and Ollama; and what is alike in all."""

import hashlib
import json
import os
import signal

import anthropic
import httpx
import ollama
import pytest

from dialects import KEYED, MODEL, SEEN, claude, llama, post, prompt_tokens, server  # some are fixtures
from serving import Wire

# -- Messages --------------------------------------------------------------------------------

TOOLS = [{"name": name, "input_schema": {"type": "object"}} for name in ("write_file", "alpha", "beta")]


GREEDY = {"extra_body": {"temperature": 0}}  # the client has no name for it


def say(claude, script, **kwargs):
    kwargs = {"max_tokens": 200, **GREEDY, **kwargs}
    return claude.messages.create(
        model=MODEL, messages=[{"role": "user", "content": script}], **kwargs
    )


def test_message(claude):
    answer = say(claude, "short", system=[{"type": "text", "text": "Be brief."}],
                 extra_headers={"anthropic-beta": "a-2025-01-01,b"})
    assert answer.type == "message" and answer.stop_reason == "end_turn"
    assert [(b.type, b.text) for b in answer.content] == [("text", "A short answer.")]
    assert answer.usage.output_tokens and answer.id.startswith("msg_")
    answer = say(claude, "short", max_tokens=1)
    assert answer.stop_reason == "max_tokens"
    answer = say(claude, "short", stop_sequences=["answer"])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "answer")
    assert answer.content[0].text == "A short "


def test_message_blocks(claude):
    answer = say(claude, "think")
    assert [b.type for b in answer.content] == ["thinking", "text"]
    assert answer.content[0].thinking == "Let me see." and answer.content[1].text == "It is 4."
    answer = say(claude, "write", tools=TOOLS)
    assert answer.stop_reason == "tool_use"
    assert [b.type for b in answer.content] == ["text", "tool_use"]
    assert answer.content[1].input == {"path": "a.txt", "text": "one\ntwo"}


@pytest.mark.parametrize("script", ["short", "think", "write", "two"])
def test_message_stream(claude, script):
    whole = say(claude, script, tools=TOOLS)
    with claude.messages.stream(
        model=MODEL, max_tokens=200, tools=TOOLS, **GREEDY,
        messages=[{"role": "user", "content": script}],
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"

    def shape(message):
        return [(b.type, getattr(b, "text", None), getattr(b, "thinking", None),
                 getattr(b, "input", None)) for b in message.content]

    assert shape(final) == shape(whole) and final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_message_history_and_count(claude, server):
    messages = [
        {"role": "user", "content": "write"},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": ""},
            {"type": "tool_use", "id": "t1", "name": "write_file", "input": {"path": "a"}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "ok"}]},
            {"type": "text", "text": "short"}]},
    ]
    system = [{"type": "text", "text": "x-anthropic-billing-header: cch=1f3; v=2"},
              {"type": "text", "text": "Be brief."}]
    count = claude.messages.count_tokens(model=MODEL, messages=messages, system=system, tools=TOOLS)
    rendered = "system:Be brief.|user:write|[write_file]assistant:hm|tool:ok|user:short|"
    plain = post(server, "/tokenize", {"prompt": rendered}).json()["count"]
    assert count.input_tokens == plain + 1
    answer = claude.messages.create(
        model=MODEL, max_tokens=50, messages=messages, system=system, tools=TOOLS, **GREEDY
    )
    usage = answer.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == count.input_tokens
    assert answer.content[0].text == "A short answer."


def test_message_choice(claude):
    choice = {"type": "tool", "name": "beta", "disable_parallel_tool_use": True}
    answer = say(claude, "two", tools=TOOLS, tool_choice=choice)
    assert answer.stop_reason == "max_tokens" or answer.content[0].name == "beta"


def test_message_errors(claude, server):
    with pytest.raises(anthropic.BadRequestError) as caught:
        say(claude, [{"type": "image", "source": {}}])
    assert caught.value.body["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(model="claude", max_tokens=5, messages=[{"role": "user", "content": "short"}])
    with anthropic.Anthropic(base_url=server.url, api_key="wrong", max_retries=0) as other:
        with pytest.raises(anthropic.AuthenticationError):
            say(other, "short")
    missing = post(server, "/v1/messages", {"model": MODEL, "messages": [{"role": "user", "content": "short"}]})
    assert missing.status_code == 400 and missing.json()["type"] == "error"


# -- Ollama ----------------------------------------------------------------------------------


def chat(llama, script, **kwargs):
    options = {"temperature": 0, **kwargs.pop("options", {})}
    messages = [{"role": "user", "content": script}]
    return llama.chat(model=MODEL + ":latest", messages=messages, options=options, **kwargs)


OLLAMA_TOOLS = [{"type": "function", "function": {"name": t["name"], "parameters": {"type": "object"}}} for t in TOOLS]


@pytest.mark.parametrize("thread", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}])
def test_messages_threads(server, thread):
    """Refused in the form on which Anthropic's tool runner sends whole conversations, rather than let
    pass, which would lose what the conversation began with."""
    body = {"model": MODEL, "max_tokens": 9, "messages": [{"role": "user", "content": "short"}]}
    refused = post(server, "/v1/messages", {**body, "thread": thread})
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["type"] == "invalid_request_error" and "thread" in error["message"]
    assert error["details"] == {"error_code": "thread_unsupported_request", "unsupported": []}
    assert "details" not in post(server, "/v1/messages", {**body, "max_tokens": 0}).json()["error"]


def test_ollama_chat(llama):
    answer = chat(llama, "short")
    assert answer.message.content == "A short answer." and answer.done_reason == "stop"
    assert answer.eval_count and answer.prompt_eval_count
    assert chat(llama, "short", options={"num_predict": 1}).done_reason == "length"
    answer = chat(llama, "think")
    assert (answer.message.thinking, answer.message.content) == ("Let me see.", "It is 4.")
    answer = chat(llama, "two", tools=OLLAMA_TOOLS)
    assert [(c.function.name, dict(c.function.arguments)) for c in answer.message.tool_calls] == [
        ("alpha", {"x": 1}), ("beta", {})]


@pytest.mark.parametrize("script", ["short", "think", "write", "two"])
def test_ollama_stream(llama, script):
    whole = chat(llama, script, tools=OLLAMA_TOOLS)
    parts = list(chat(llama, script, tools=OLLAMA_TOOLS, stream=True))
    assert [p.done for p in parts] == [False] * (len(parts) - 1) + [True]
    assert "".join(p.message.content or "" for p in parts) == whole.message.content
    assert "".join(p.message.thinking or "" for p in parts) == (whole.message.thinking or "")
    assert [c for p in parts for c in p.message.tool_calls or []] == (whole.message.tool_calls or [])


def test_ollama_generate(llama):
    answer = llama.generate(model=MODEL, prompt="short", options={"temperature": 0})
    assert answer.response == "A short answer." and answer.done
    parts = list(llama.generate(model=MODEL, prompt="short", stream=True, options={"temperature": 0}))
    assert "".join(p.response for p in parts) == "A short answer."


def test_ollama_format(llama):
    answer = chat(llama, "object", format={"const": {"n": 12}})
    assert json.loads(answer.message.content) == {"n": 12}


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_ollama_types(server, path):
    """What is translated is checked like what is passed on."""
    whole = {"messages": [{"role": "user", "content": "a"}], "prompt": "a", "stream": False}
    for wrong in ({"options": [1]}, {"stream": "yes"}, {"format": 1}, {"think": 1}, {"messages": {}}, {"system": {}}):
        headers = {"Authorization": "Bearer secret"}
        reply = httpx.post(server.url + path, json={**whole, **wrong}, headers=headers, trust_env=False)
        assert reply.status_code == 400, (wrong, reply.text)
        assert next(iter(wrong)) in reply.json()["error"]


SAMPLERS = {"typical_p": 1.1, "top_n_sigma": -2, "xtc_probability": 2, "xtc_threshold": -1, "dry_multiplier": -1,
            "dry_base": 0.5, "dry_allowed_length": 0, "dry_penalty_last_n": -2, "dry_sequence_breakers": {}}


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
@pytest.mark.parametrize("name", SAMPLERS)
def test_ollama_samplers_are_checked(server, path, name):
    reply = post(server, path, {"model": MODEL, "messages": [{"role": "user", "content": "short"}], "prompt": "short",
                                "options": {name: SAMPLERS[name]}})
    assert reply.status_code == 400 and f"options.{name}" in reply.json()["error"]


def test_models_for_anthropic(claude):
    (listed,) = claude.models.list().data
    assert (listed.type, listed.id, listed.display_name) == ("model", MODEL, MODEL)
    assert listed.created_at.year > 2025
    assert claude.models.retrieve(MODEL) == listed
    with pytest.raises(anthropic.NotFoundError) as failed:
        claude.models.retrieve("other")
    assert failed.value.body["type"] == "error"


def test_ollama_models(llama, server):
    (listed,) = llama.list().models
    assert listed.model == MODEL
    files = [p for p in server.model.iterdir() if p.is_file()]
    assert listed.size == sum(p.stat().st_size for p in files)
    assert int(listed.modified_at.timestamp()) == max(int(p.stat().st_mtime) for p in files)
    digest = hashlib.sha256((server.model / "config.json").read_bytes())
    size = (server.model / "model.safetensors").stat().st_size
    digest.update(b"model.safetensors\0" + size.to_bytes(8, "little"))
    assert listed.digest == digest.hexdigest()
    (loaded,) = llama.ps().models
    assert loaded.model == MODEL and loaded.size == listed.size
    assert llama.generate(MODEL, keep_alive=0).done_reason == "unload"
    shown = llama.show(MODEL)
    assert "completion" in shown.capabilities and "thinking" in shown.capabilities
    with pytest.raises(ollama.ResponseError) as caught:
        llama.show("other")
    assert caught.value.status_code == 404
    with pytest.raises(ollama.ResponseError):
        llama.chat(model="other", messages=[{"role": "user", "content": "short"}])
    assert shown.modelinfo["qwen3_moe.context_length"] == 4096 and shown.details.family == "qwen3_moe"
    assert shown.modelinfo["general.architecture"] == "qwen3_moe" and shown.parameters == "num_ctx 4096"
    (loaded,) = llama.ps().models
    assert loaded.model == MODEL and loaded.expires_at.year > 2300 and loaded.context_length == 4096
    version = httpx.get(server.url + "/api/version", headers=KEYED, trust_env=False).json()["version"]
    assert tuple(int(n) for n in version.split(".")) >= (0, 6, 4)  # what Copilot asks for


def test_ollama_loads(llama, server):
    """Requests without a prompt; the model stays, since the server has no other and does not sleep."""
    for keep, how in ((None, "load"), ("10m", "load"), (-1, "load"), ("1h30m", "load"), (0, "unload"), ("0s", "unload")):
        for answer in (
            llama.generate(model=MODEL, keep_alive=keep),
            llama.generate(model=MODEL, prompt="", keep_alive=keep, stream=False),
            llama.chat(model=MODEL, messages=[], keep_alive=keep),
        ):
            assert answer.done and answer.done_reason == how, (keep, answer)
    assert chat(llama, "short", keep_alive=0).message.content == "A short answer."
    for path, body in (("/api/generate", {"prompt": "short"}), ("/api/chat", {"messages": []})):
        for keep in ("soon", "5x", [], {}, True):
            refused = post(server, path, {**body, "keep_alive": keep})
            assert refused.status_code == 400 and "keep_alive" in refused.json()["error"], keep
        assert post(server, path, {**body, "model": "other"}).status_code == 404


@pytest.mark.parametrize("stream", [True, False])
def test_ollama_logprobs(llama, server, stream):
    asked = {"logprobs": True, "top_logprobs": 2, "stream": stream, "options": {"temperature": 0}}
    bodies = {
        "/api/chat": {"messages": [{"role": "user", "content": "short"}]},
        "/api/generate": {"prompt": "short"},
    }
    raw = {"prompt": "<|short|>", "raw": True}
    for path, body in [*bodies.items(), ("/api/generate", raw)]:
        text = post(server, path, {**asked, **body}).text
        tokens = [t for line in text.splitlines() for t in json.loads(line).get("logprobs", [])]
        assert "".join(t["token"] for t in tokens) == "A short answer."
        assert all(len(t["top_logprobs"]) == 2 and t["logprob"] <= 0 for t in tokens)
        plain = post(server, path, {**asked, **body, "logprobs": False, "top_logprobs": 0}).text
        assert '"logprobs"' not in plain


def test_ollama_without_the_chat_template(llama, server):
    def generate(**body):
        reply = post(server, "/api/generate", {"stream": False, "options": {"temperature": 0}, **body})
        return reply.json()

    raw = generate(prompt="<|short|>", raw=True)
    assert raw["response"] == "A short answer." and raw["prompt_eval_count"] == 1
    assert generate(prompt="<|short|>", raw=True, options={"num_predict": 2})["done_reason"] == "length"
    parts = list(llama.generate(model=MODEL, prompt="<|short|>", raw=True, stream=True))
    assert "".join(p.response for p in parts) == "A short answer." and parts[-1].done
    template = "{{- if .System }}[{{ .System }}]{{ else }}!{{ end -}}\n <|{{ .Prompt }}|>{{ .Response }} after"
    answer = generate(prompt="short", template=template)
    assert answer["response"] == "A short answer." and answer["prompt_eval_count"] == 2
    assert generate(prompt="short", template=template, system="ab")["prompt_eval_count"] == 5
    for wrong in ("{{ range .Messages }}", "{{ if .Prompt }}", "{{ .Prompt", "{{ .Other }}"):
        refused = generate(prompt="short", template=wrong)
        assert "template" in refused["error"], refused


# -- a message that is continued --------------------------------------------------------------


def test_continued(server, claude):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "e, B, \n"}]
    rendered = "user:hi|assistant:e, B, \n"
    body = {"messages": messages, "continue_final_message": True}
    prompt = post(server, "/apply-template", body)
    assert prompt.json() == {"prompt": rendered}, prompt.text
    plain = post(server, "/tokenize", {"prompt": rendered}).json()
    assert post(server, "/tokenize", body).json()["tokens"] == plain["tokens"]
    chat = post(server, "/v1/chat/completions", {**body, "max_tokens": 3}).json()
    assert chat["usage"]["prompt_tokens"] == plain["count"]
    answer = claude.messages.create(model=MODEL, max_tokens=3, messages=messages)
    usage = answer.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == plain["count"]
    for wrong in (
        {"messages": messages[:1]},
        {"add_generation_prompt": True},
        {"messages": [messages[0], {"role": "assistant", "content": " "}]},
        {"continue_final_message": 1},
    ):
        refused = post(server, "/v1/chat/completions", {**body, **wrong})
        assert refused.status_code == 400, refused.text


# -- what is no text ------------------------------------------------------------------------------

PIXEL = {"type": "base64", "media_type": "image/png", "data": "aWk="}
# How each API spells an image: shown by the user, and as a tool's result; the text around and behind it.
PICTURES = {
    "/v1/chat/completions": lambda image, result, last: {"messages": [
        {"role": "user", "content": [image, {"type": "text", "text": "look"}]},
        {"role": "assistant", "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "alpha", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "c1", "content": [result]}, *last]},
    "/v1/responses": lambda image, result, last: {"input": [
        {"role": "user", "content": [image, {"type": "input_text", "text": "look"}]},
        {"type": "function_call", "call_id": "c1", "name": "alpha", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": [result]}, *last]},
    "/v1/messages": lambda image, result, last: {"max_tokens": 60, "messages": [
        {"role": "user", "content": [image, {"type": "text", "text": "look"}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "alpha", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": [result]}]}, *last]},
}
IMAGES = {
    "/v1/chat/completions": {"type": "image_url", "image_url": {"url": "data:image/png;base64,aWk="}},
    "/v1/responses": {"type": "input_image", "image_url": "data:image/png;base64,aWk="},
    "/v1/messages": {"type": "image", "source": PIXEL},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [*PICTURES, "/api/chat"])
def test_images_stay_in_the_history(server, path, stream):
    """An image that a tool returned, or of an earlier turn, ends no session; one just sent is refused."""
    if path == "/api/chat":
        def body(last):
            return {"messages": [
                {"role": "user", "content": "look", "images": ["aWk="]},
                {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "alpha", "arguments": {}}}]},
                {"role": "tool", "content": "", "images": ["aWk="]}, *last]}
        shown = [{"role": "user", "content": "short", "images": ["aWk="]}]
    else:
        def body(last):
            return PICTURES[path](IMAGES[path], IMAGES[path], last)
        shown = [{"role": "user", "content": [IMAGES[path]]}]
    last = [{"role": "user", "content": "short"}]
    reply = post(server, path, {"model": MODEL, "temperature": 0, "stream": stream, **body(last)})
    assert reply.status_code == 200, reply.text
    reply = post(server, path, {"model": MODEL, "temperature": 0, "stream": stream, **body(shown)})
    assert reply.status_code == 400 and "image" in reply.text, reply.text


def test_blocks_of_anthropic_tools(server):
    """Deferred tools are offered once they are referred to, and text documents are read."""
    deferred = [{"name": n, "input_schema": {"type": "object"}, "defer_loading": True} for n in SEEN]

    def count(content, **more):
        body = {"model": MODEL, "messages": [{"role": "user", "content": content}], **more}
        return post(server, "/v1/messages/count_tokens", body).json()["input_tokens"]

    def plain(rendered):
        return post(server, "/tokenize", {"prompt": rendered}).json()["count"]
    read = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "all of it"}}
    assert count([read]) == plain("user:all of it|")
    found = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "tool_reference", "tool_name": "later"}]}
    offered = "[the tool later can be called now]|"
    assert count([found], tools=deferred) == plain("tool:" + offered + "+later")
    found["content"] = [{"type": "tool_reference", "tool_name": n} for n in ("never_yet", "later", "never_yet")]
    offered = "[the tool never_yet can be called now]\n[the tool later can be called now]\n"
    offered += "[the tool never_yet can be called now]|+never_yet+later+later"
    assert count([found], tools=deferred) == plain("tool:" + offered)  # in the order of the references
    assert count("hm", tools=deferred, tool_choice={"type": "auto"}) == plain("user:hm|")


ROLES = {  # what is said, and the prompt of a template that takes a system message in front alone
    "two in front": ("system a, system b, user hm", "system:a\n\nb|user:hm|"),
    "both kinds in front": ("system a, developer b, user hm", "system:a\n\nb|user:hm|"),
    "in the middle": ("user hm, assistant ok, system a, user hm", "user:hm|assistant:ok|user:a\n\nhm|"),
    "at the end": ("system a, user hm, system b", "system:a|user:hm\n\nb|"),
    "all": ("system a, developer b, user hm, assistant ok, developer c, user hm, system d",
            "system:a\n\nb|user:hm|assistant:ok|user:c\n\nhm\n\nd|"),
}


@pytest.mark.parametrize("said, shown", ROLES.values(), ids=ROLES)
def test_orders_of_roles(server, said, shown):
    """No order of roles is refused, whichever API is spoken and whatever the template refuses."""
    messages = [dict(zip(("role", "content"), part.split())) for part in said.split(", ")]
    reply = post(server, "/apply-template", {"messages": messages})
    assert reply.json()["prompt"] == shown, reply.text
    n = len(shown)  # each byte is a token
    short = {"max_tokens": 1}
    assert prompt_tokens(server, "/v1/chat/completions", {"messages": messages, **short}) == n
    assert prompt_tokens(server, "/api/chat", {"messages": messages, "stream": False, "options": {"num_predict": 1}}) == n
    assert prompt_tokens(server, "/v1/responses", {"input": messages, "max_output_tokens": 1}) == n
    assert prompt_tokens(server, "/v1/messages", {"messages": messages, **short}) == n
    if messages[0]["role"] == "system":  # where the API has a place of its own for the first
        first, rest = messages[0]["content"], messages[1:]
        asked = {"instructions": first, "input": rest, "max_output_tokens": 1}
        assert prompt_tokens(server, "/v1/responses", asked) == n
        assert prompt_tokens(server, "/v1/messages", {"system": first, "messages": rest, **short}) == n


# -- thinking -------------------------------------------------------------------------------------

THINKING = [
    *(("/v1/chat/completions", {"reasoning_effort": level}, level != "none") for level in ("none", "minimal", "medium", "xhigh")),
    ("/v1/chat/completions", {"enable_thinking": True}, True),
    ("/v1/chat/completions", {"chat_template_kwargs": {"enable_thinking": True}}, True),
    *(("/v1/responses", {"reasoning": {"effort": level}}, level != "none") for level in ("none", "medium")),
    *(("/v1/messages", {"thinking": {"type": kind}}, kind != "disabled") for kind in ("disabled", "adaptive")),
    ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": 4096}}, True),
    ("/v1/messages", {"output_config": {"effort": "max"}}, True),
    *(("/api/chat", {"think": think}, bool(think)) for think in (False, True, "medium")),
]


@pytest.mark.parametrize("path, said, thinks", THINKING)
def test_thinking(server, path, said, thinks):
    """Every spelling reaches a template whose switch is `thinking`, off unless set, and whose levels are
    no_think, low and high, anything else being refused."""
    asked = [{"role": "user", "content": "switch"}]
    body = {"input": asked} if path == "/v1/responses" else {"messages": asked}
    if path == "/v1/messages":
        body["max_tokens"] = 60
    reply = post(server, path, {"model": MODEL, "temperature": 0, "stream": False, **body, **said})
    assert reply.status_code == 200, reply.text
    assert ("It is 4." if thinks else "A short answer.") in reply.text, reply.text


# -- errors ----------------------------------------------------------------------------------

SPOKEN = {
    "openai": ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/nothing", "/nothing"],
    "anthropic": ["/v1/messages", "/v1/messages/count_tokens", "/v1/messages/batches"],
    "ollama": ["/api/chat", "/api/generate", "/api/show", "/api/nothing"],
}


def in_form_of(api, reply):
    """Whether an error has the form of that API, and the headers with the request's id."""
    body = reply.json()
    assert reply.headers["request-id"] == reply.headers["x-request-id"]
    if api == "anthropic":
        assert set(body) == {"type", "error", "request_id"} and body["type"] == "error"
        assert set(body["error"]) == {"type", "message"}
        return body["request_id"] == reply.headers["request-id"]
    if api == "ollama":
        return set(body) == {"error"} and isinstance(body["error"], str)
    return set(body) == {"error"} and {"message", "type", "param", "code"} <= set(body["error"])


@pytest.mark.parametrize("api", SPOKEN)
def test_errors_are_in_the_form_of_what_was_addressed(server, api):
    """Whoever notices them: the parser, the check of keys or types, or the protocol itself."""
    json_type = {"Content-Type": "application/json"}
    with httpx.Client(base_url=server.url, trust_env=False, timeout=60) as http:
        for path in SPOKEN[api]:
            exists = "nothing" not in path and "batches" not in path
            tries = [(404 if not exists else 405, "PUT", {"headers": KEYED})]
            if exists:
                tries += [
                    (401, "POST", {"json": {}}),
                    (401, "POST", {"json": {}, "headers": {"x-api-key": "wrong"}}),
                    (401, "POST", {"json": {}, "headers": {"api-key": "wrong"}}),
                    (400, "POST", {"content": b"{", "headers": json_type | {"api-key": "secret"}}),
                    (400, "POST", {"content": b"{", "headers": KEYED | json_type}),
                    (400, "POST", {"content": b"a=b", "headers": KEYED | {"Content-Type": "text/html"}}),
                    (415, "POST", {"json": {}, "headers": KEYED | {"Content-Encoding": "gzip"}}),
                ]
            for status, method, request in tries:
                reply = http.request(method, path, **request)
                assert reply.status_code == status, (path, method, request, reply.text)
                assert in_form_of(api, reply), reply.text


@pytest.mark.parametrize("api", SPOKEN)
def test_errors_of_framing_are_too(server, api):
    def send(length):
        with Wire(server) as wire:
            head = f"POST {SPOKEN[api][0]} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer secret\r\n"
            wire.send(head + length + "\r\n")
            status, headers, body = wire.response()
            return httpx.Response(status, headers=headers, content=body)

    for status, length in ((413, "Content-Length: 999999999999\r\n"), (411, "")):
        reply = send(length)
        assert reply.status_code == status and in_form_of(api, reply), reply.text


def test_errors_name_a_prompt_too_long(server):
    text = "x" * 5000
    messages = [{"role": "user", "content": text}]
    limit = f"{len(text) + len('user:|')} tokens > 4095 maximum"
    told = post(server, "/v1/messages", {"messages": messages, "max_tokens": 5})
    assert told.status_code == 400 and told.json()["error"]["message"] == f"prompt is too long: {limit}"
    told = post(server, "/v1/chat/completions", {"messages": messages}).json()["error"]
    assert (told["code"], told["n_prompt_tokens"]) == ("context_length_exceeded", len(text) + 6)
    told = post(server, "/api/chat", {"messages": messages})
    assert told.status_code == 400 and f"{len(text) + 6} tokens" in told.json()["error"]


def test_ollama_streams_are_kept_alive(server):
    """Lines without text while nothing comes, which clients read as they do all others."""
    body = {"messages": [{"role": "user", "content": "short"}]}
    worker = server.decoder()
    os.kill(worker, signal.SIGSTOP)
    try:
        with httpx.stream("POST", server.url + "/api/chat", json=body, headers=KEYED, trust_env=False) as reply:
            lines = reply.iter_lines()
            first, idle = json.loads(next(lines)), json.loads(next(lines))
            os.kill(worker, signal.SIGCONT)
            rest = [json.loads(line) for line in lines]
    finally:
        os.kill(worker, signal.SIGCONT)
    assert idle["message"] == {"role": "assistant", "content": ""} and not idle["done"]
    assert "".join(line["message"]["content"] for line in [first, *rest]) == "A short answer."


# -- the server ------------------------------------------------------------------------------


def test_request_id(server):
    given = post(server, "/tokenize", {"prompt": "x"}, **{"x-request-id": "abc-1.2"})
    assert given.headers["x-request-id"] == "abc-1.2"
    fresh = [post(server, "/tokenize", {"prompt": "x"}).headers["x-request-id"] for _ in range(2)]
    assert fresh[0] != fresh[1] and all(id.startswith("req_") for id in fresh)
    odd = post(server, "/tokenize", {"prompt": "x"}, **{"x-request-id": "a b"})
    assert odd.headers["x-request-id"].startswith("req_")


def test_what_describes_the_server(server):
    headers = {"Authorization": "Bearer secret"}
    info = httpx.get(server.url + "/tokenizer_info", headers=headers, trust_env=False).json()
    assert info["eos_token"] == "<|im_end|>" and info["vocab_size"] > 256
    api = httpx.get(server.url + "/openapi.json", headers=headers, trust_env=False).json()
    assert "post" in api["paths"]["/v1/chat/completions"]
    for path, operations in api["paths"].items():
        if "get" in operations and "{" not in path:
            answer = httpx.get(server.url + path, headers=headers, trust_env=False)
            assert answer.status_code == 200, path
