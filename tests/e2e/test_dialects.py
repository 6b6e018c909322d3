"""The protocols beside OpenAI's chat, through their own clients: Responses, Messages, Ollama."""

import hashlib
import json

import anthropic
import httpx
import ollama
import openai
import pytest

from scripted_model import write_model
from serving import Server

SCRIPTS = {
    "short": "A short answer.",
    "think": "<think>Let me see.</think>\n\nIt is 4.",
    "write": 'I write it.\n<tool_call>\n{"name": "write_file", "arguments": {"path": "a.txt", '
    '"text": "one\\ntwo"}}\n</tool_call>',
    "two": '<tool_call>\n{"name": "alpha", "arguments": {"x": 1}}\n</tool_call>\n'
    '<tool_call>\n{"name": "beta", "arguments": {}}\n</tool_call>',
    "object": 'no object: {"n": 12}',
}
MODEL = "scripted"


@pytest.fixture(scope="module")
def server(tandem_bin, tmp_path_factory):
    out = tmp_path_factory.mktemp("models") / MODEL
    write_model(out, SCRIPTS)
    config = out / "tokenizer_config.json"
    lines = "{%- for m in messages %}{%- if m.tool_calls %}[{{ m.tool_calls[0].function.name }}]"
    lines += "{%- endif %}{{- m.role ~ ':' ~ (m.content or '') ~ (m.reasoning_content or '') ~ '|' -}}"
    lines += "{%- endfor -%}"
    text = json.loads(config.read_text())
    # The last message that is a script's name says which; before it stands what was said.
    text["chat_template"] = lines + text["chat_template"] + "{#- </think> -#}"
    config.write_text(json.dumps(text))
    running = Server(tandem_bin, out, "--api-key", "secret")
    running.model = out
    yield running
    running.close()


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="secret", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def claude(server):
    with anthropic.Anthropic(base_url=server.url, api_key="secret", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def llama(server):
    return ollama.Client(host=server.url, headers={"Authorization": "Bearer secret"})


def post(server, path, body, key="secret", **headers):
    headers["Authorization"] = f"Bearer {key}"
    return httpx.post(server.url + path, json=body, headers=headers, trust_env=False)


# -- Responses -------------------------------------------------------------------------------

FUNCTIONS = [
    {"type": "function", "name": name, "parameters": {"type": "object"}}
    for name in ("write_file", "alpha", "beta")
]


def test_response(client):
    answer = client.responses.create(model=MODEL, input="short", temperature=0)
    assert answer.object == "response" and answer.status == "completed"
    assert answer.id.startswith("resp_") and answer.output_text == "A short answer."
    usage = answer.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens and usage.output_tokens
    answer = client.responses.create(model=MODEL, input="short", temperature=0, max_output_tokens=1)
    assert answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"


def test_response_reasoning_and_calls(client):
    answer = client.responses.create(model=MODEL, input="think", temperature=0)
    assert [item.type for item in answer.output] == ["reasoning", "message"]
    assert answer.output[0].content[0].text == "Let me see."
    assert answer.output_text == "It is 4."
    details, total = answer.usage.output_tokens_details, answer.usage.output_tokens
    assert 0 < details.reasoning_tokens < total
    cut = client.responses.create(
        model=MODEL, input="think", temperature=0, max_output_tokens=details.reasoning_tokens
    )
    assert [item.type for item in cut.output][0] == "reasoning"
    assert cut.usage.output_tokens_details.reasoning_tokens == cut.usage.output_tokens
    plain = client.responses.create(model=MODEL, input="short", temperature=0)
    assert plain.usage.output_tokens_details.reasoning_tokens == 0
    answer = client.responses.create(model=MODEL, input="two", tools=FUNCTIONS, temperature=0)
    calls = [(item.type, item.name, json.loads(item.arguments)) for item in answer.output]
    assert calls == [("function_call", "alpha", {"x": 1}), ("function_call", "beta", {})]
    assert len({item.call_id for item in answer.output}) == 2


@pytest.mark.parametrize("script", ["short", "think", "write", "two"])
def test_response_stream(client, script):
    request = {"model": MODEL, "input": script, "tools": FUNCTIONS, "temperature": 0}
    whole = client.responses.create(**request)
    events = list(client.responses.create(**request, stream=True))
    assert [e.sequence_number for e in events] == list(range(len(events)))
    assert [e.type for e in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == "response.completed"

    def shape(response):
        return [
            (item.type, getattr(item, "name", None), getattr(item, "arguments", None),
             [c.text for c in getattr(item, "content", None) or []])
            for item in response.output
        ]

    assert shape(events[-1].response) == shape(whole)
    done = [e.item for e in events if e.type == "response.output_item.done"]
    assert [i.id for i in done] == [i.id for i in events[-1].response.output]
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == whole.output_text
    for kind in ("arguments", "text"):
        for e in events:
            if e.type.endswith(".done") and hasattr(e, kind):
                pieces = [d.delta for d in events
                          if d.type == e.type[:-4] + "delta" and d.item_id == e.item_id]
                assert "".join(pieces) == getattr(e, kind)


def test_response_stream_helper(client):
    """The client's own accumulator is strict about the order of events."""
    with client.responses.stream(model=MODEL, input="write", tools=FUNCTIONS, temperature=0) as s:
        final = s.get_final_response()
    assert final.output[-1].name == "write_file"


def test_previous_response(server, client):
    first = client.responses.create(
        model=MODEL, input="short", instructions="Be brief.", temperature=0
    )
    # With an option that no other test gives, so that none of its turns is remembered.
    again = client.responses.create(
        model=MODEL, input="think", previous_response_id=first.id, temperature=0,
        reasoning={"effort": "low"},
    )
    assert again.output_text == "It is 4." and again.previous_response_id == first.id
    # user:short|assistant:A short answer.|user:think| without the instructions
    messages = [
        {"role": "user", "content": "short"},
        {"role": "assistant", "content": "A short answer."},
        {"role": "user", "content": "think"},
    ]
    count = post(server, "/tokenize", {"messages": messages}).json()["count"]
    assert again.usage.input_tokens == count
    unstored = client.responses.create(model=MODEL, input="short", store=False)
    for id in (unstored.id, "resp_none"):
        with pytest.raises(openai.NotFoundError):
            client.responses.create(model=MODEL, input="think", previous_response_id=id)


def test_response_history(server, client):
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {"type": "message", "role": "user", "content": "write"},
        {"type": "reasoning", "id": "rs_1", "summary": [],
         "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c1", "name": "write_file", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "done"},
        {"role": "user", "content": "short"},
    ]
    answer = client.responses.create(model=MODEL, input=items, tools=FUNCTIONS, temperature=0)
    assert answer.output_text == "A short answer."
    rendered = "system:Be brief.|user:write|[write_file]assistant:hm|tool:done|user:short|"
    plain = post(server, "/tokenize", {"prompt": rendered}).json()["count"]
    assert answer.usage.input_tokens == plain + 1  # and the script's token


def test_response_format(client):
    text = {"format": {"type": "json_schema", "name": "x", "strict": True, "schema": {
        "type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"],
        "additionalProperties": False}}}
    answer = client.responses.create(model=MODEL, input="object", text=text, max_output_tokens=200)
    if answer.status == "completed":
        assert isinstance(json.loads(answer.output_text)["n"], int)
    forced = client.responses.create(
        model=MODEL, input="short", tools=FUNCTIONS, max_output_tokens=300, temperature=0,
        tool_choice={"type": "function", "name": "beta"}, parallel_tool_calls=False,
    )
    assert forced.status == "incomplete" or forced.output[-1].name == "beta"


def test_response_errors(client):
    for wrong in ({"input": []}, {"input": [{"type": "computer_call"}]}, {"input": 5},
                  {"input": "short", "conversation": "c"},
                  {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}):
        with pytest.raises(openai.BadRequestError):
            client.responses.create(model=MODEL, **wrong)


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
    shown = llama.show(MODEL)
    assert "completion" in shown.capabilities and "thinking" in shown.capabilities
    with pytest.raises(ollama.ResponseError) as caught:
        llama.show("other")
    assert caught.value.status_code == 404
    with pytest.raises(ollama.ResponseError):
        llama.chat(model="other", messages=[{"role": "user", "content": "short"}])
    version = httpx.get(server.url + "/api/version", headers={"Authorization": "Bearer secret"}, trust_env=False)
    assert version.json()["version"]


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
