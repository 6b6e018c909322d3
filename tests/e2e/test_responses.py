"""The Responses protocol, through OpenAI's client and as Codex speaks it."""

import json

import openai
import pytest

from dialects import MODEL, client, post, prompt_tokens, server  # some are fixtures

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


def test_input_tokens(server, client):
    """As many as the response then says, whatever the input refers to."""
    first = client.responses.create(model=MODEL, input="short", temperature=0)
    body = {"model": MODEL, "input": "think", "instructions": "Be brief.", "previous_response_id": first.id,
            "tools": FUNCTIONS}
    counted = post(server, "/v1/responses/input_tokens", body)
    assert counted.json()["object"] == "response.input_tokens"
    again = client.responses.create(**body, temperature=0)
    assert counted.json()["input_tokens"] == again.usage.input_tokens > first.usage.input_tokens
    assert post(server, "/v1/responses/input_tokens", {"input": 7}).status_code == 400
    assert post(server, "/v1/responses/compact", {"input": "x"}).status_code == 404


def test_too_long_an_input(server):
    """As an error, or where it streams as a response that failed: agents then shorten the conversation."""
    body = {"model": MODEL, "input": "too long " * 20000}
    refused = post(server, "/v1/responses", body)
    error = refused.json()["error"]
    assert refused.status_code == 400 and error["code"] == "context_length_exceeded"
    streamed = post(server, "/v1/responses", body | {"stream": True})
    assert streamed.status_code == 200 and streamed.text.startswith("event: response.failed\ndata: {")
    failed = json.loads(streamed.text.split("data: ", 1)[1])
    assert failed["type"] == "response.failed" and failed["response"]["status"] == "failed"
    assert failed["response"]["error"] == {"code": error["code"], "message": error["message"]}


def test_truncation(server, client):
    """As few of the first turns are left out as let the rest and an answer fit; instructions stay."""
    n_ctx = client.models.retrieve(MODEL).model_dump()["max_model_len"]

    def count(messages):
        body = {"model": MODEL, "input": messages, "instructions": "Be brief."}
        return post(server, "/v1/responses/input_tokens", body).json()["input_tokens"]

    turns = []
    while count(turns + [{"role": "user", "content": "short"}]) < 2 * n_ctx:
        turns += [{"role": "user", "content": f"question {len(turns)} " * (1 + len(turns) % 7)}]
        turns += [{"role": "assistant", "content": "an answer " * (len(turns) % 5)}]
    turns += [{"role": "user", "content": "short"}]
    body = {"model": MODEL, "input": turns, "instructions": "Be brief.", "max_output_tokens": 20}
    with pytest.raises(openai.BadRequestError, match="context length"):
        client.responses.create(**body)
    answer = client.responses.create(**body, truncation="auto", temperature=0)
    assert answer.status == "completed" and answer.truncation == "auto"
    kept = [count(turns[i:]) for i in range(2, len(turns), 2)]
    assert answer.usage.input_tokens == max(n for n in kept if n <= n_ctx - 21)
    body["input"] = [*turns, {"role": "user", "content": "much " * n_ctx}]
    with pytest.raises(openai.BadRequestError, match="context length"):
        client.responses.create(**body, truncation="auto")


def test_logit_bias_of_texts(server):
    body = {"prompt": "short", "n_predict": 1, "temperature": 0}
    tokens = post(server, "/tokenize", {"content": "zebra"}).json()["tokens"]
    for bias in ([["zebra", 100]], {"zebra": 100}, [[tokens[0], 100]]):
        answer = post(server, "/completion", {**body, "logit_bias": bias, "return_tokens": True})
        assert answer.status_code == 200 and answer.json()["tokens"][0] in tokens


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
        with pytest.raises(openai.NotFoundError) as refused:
            client.responses.create(model=MODEL, input="think", previous_response_id=id)
        assert refused.value.code == "previous_response_not_found"


@pytest.mark.parametrize("stream", [False, True])
def test_stored_responses(server, client, stream):
    """A response that is kept is what was answered, with what was asked; to other keys it is not there."""
    items = [{"role": "user", "content": "hm"}, {"type": "message", "id": "msg_own", "role": "user",
             "content": [{"type": "input_text", "text": "short"}]}]
    if stream:
        *_, last = client.responses.create(model=MODEL, input=items, temperature=0, stream=True)
        made = last.response
    else:
        made = client.responses.create(model=MODEL, input=items, temperature=0)
    assert client.responses.retrieve(made.id).to_dict() == made.to_dict()
    listed = client.responses.input_items.list(made.id, order="asc")
    assert [i.content[0].text for i in listed.data] == ["hm", "short"]
    assert listed.data[1].id == "msg_own" and listed.data[0].id and not listed.has_more
    page = client.responses.input_items.list(made.id, limit=1)
    assert [i.id for i in page.data] == ["msg_own"] and page.has_more
    assert [i.id for i in page] == ["msg_own", listed.data[0].id]
    with openai.OpenAI(base_url=server.url + "/v1", api_key="other", max_retries=0) as other:
        for ask in (
            lambda: other.responses.retrieve(made.id),
            lambda: other.responses.delete(made.id),
            lambda: other.responses.input_items.list(made.id),
            lambda: other.responses.create(model=MODEL, input="x", previous_response_id=made.id),
        ):
            with pytest.raises(openai.NotFoundError):
                ask()
    again = client.responses.create(model=MODEL, input="short", previous_response_id=made.id)
    assert again.output_text == "A short answer."
    client.responses.delete(made.id)
    for ask in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
        with pytest.raises(openai.NotFoundError):
            ask(made.id)


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


CODEX = [
    {"type": "namespace", "name": "mcp__git__", "description": "Git.", "tools": [
        {"type": "function", "name": "log", "strict": False, "parameters": {"type": "object"}}]},
    {"type": "custom", "name": "apply_patch", "description": "Patches.",
     "format": {"type": "grammar", "syntax": "lark", "definition": "start: /x/"}},
    {"type": "web_search"},
    {"type": "tool_search", "execution": "client", "parameters": {"type": "object"}},
]


def codex_output(server, script, stream, **more):
    """The items of an answer, whole or as the events of its stream tell them."""
    body = {"model": MODEL, "input": script, "tools": CODEX, "temperature": 0, "stream": stream, **more}
    reply = post(server, "/v1/responses", body)
    assert reply.status_code == 200, reply.text
    if not stream:
        return reply.json()["output"], reply.json()["id"]
    events = [json.loads(line[5:]) for line in reply.text.splitlines() if line.startswith("data:")]
    done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]
    told = {}
    for e in events:
        if e["type"].endswith(".delta"):
            told[e["output_index"]] = told.get(e["output_index"], "") + e["delta"]
    for i, item in enumerate(done):
        assert told.get(i) == (None if "execution" in item else item.get("input", item.get("arguments")))
    return done, events[-1]["response"]["id"]


@pytest.mark.parametrize("stream", [False, True])
def test_codex(server, stream):
    """Tools of MCP servers come in namespaces and patches as free text; their calls are answered as such."""
    (call,), made = codex_output(server, "patch", stream)
    assert call["type"] == "custom_tool_call" and call["name"] == "apply_patch"
    assert call["input"] == '*** Begin\n+"q" é' and call["call_id"] and "arguments" not in call
    (log,), _ = codex_output(server, "log", stream)
    assert (log["type"], log["namespace"], log["name"]) == ("function_call", "mcp__git__", "log")
    assert json.loads(log["arguments"]) == {"n": 2}
    history = [
        {"role": "user", "content": "go"}, {"type": "item_reference", "id": call["id"]},
        {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "patched"}, log,
        {"type": "function_call_output", "call_id": log["call_id"], "output": "logged"},
        {"type": "local_shell_call", "call_id": "s1", "status": "completed",
         "action": {"type": "exec", "command": ["ls"], "env": {}}},
        {"type": "local_shell_call_output", "call_id": "s1", "output": "a.txt"},
        {"type": "web_search_call", "id": "ws", "status": "completed", "action": {"type": "search", "query": "q"}},
        {"role": "user", "content": "short"},
    ]
    body = {"model": MODEL, "input": history, "tools": CODEX, "temperature": 0, "stream": False}
    reply = post(server, "/v1/responses", body).json()
    assert reply["output"][0]["content"][0]["text"] == "A short answer.", reply
    rendered = "user:go|[apply_patch]assistant:|tool:patched|[mcp__git__log]assistant:|tool:logged|"
    rendered += "[local_shell]assistant:|tool:a.txt|"
    rendered += 'assistant:[web_search_call {"type":"search","query":"q"}]|user:short|'
    assert reply["usage"]["input_tokens"] == post(server, "/tokenize", {"prompt": rendered}).json()["count"] + 1
    followed = post(server, "/v1/responses", {
        "model": MODEL, "previous_response_id": made, "temperature": 0,
        "input": [{"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "short"}]})
    assert followed.json()["output"][0]["content"][0]["text"] == "A short answer.", followed.text
    missing = post(server, "/v1/responses", {**body, "input": [{"type": "item_reference", "id": "msg_0_0"}]})
    assert missing.status_code == 404


@pytest.mark.parametrize("stream", [False, True])
def test_tools_that_the_input_brings(server, stream):
    """The client's search for tools is called as such; what it finds is offered, once, and so is what an
    item of the input adds."""
    (search,), _ = codex_output(server, "find", stream)
    assert (search["type"], search["execution"], search["arguments"]) == ("tool_search_call", "client", {"query": "q"})
    found = [{"type": "namespace", "name": "git", "tools": CODEX[0]["tools"]}, {"type": "function", "name": "later"}]
    result = {"type": "tool_search_output", "call_id": search["call_id"], "execution": "client", "tools": found}
    more = {"type": "additional_tools", "role": "developer", "tools": [{"type": "function", "name": "never_yet"}]}
    history = [more, {"role": "user", "content": "go"}, search, result, search, result]
    body = {"model": MODEL, "temperature": 0, "input": [*history, {"role": "user", "content": "log"}]}
    rendered = "user:go|" + 2 * ("[tool_search]assistant:|tool:[the tool git__log can be called now]\n"
                                 "[the tool later can be called now]|")
    rendered += "user:log|+never_yet+later+later"
    n = post(server, "/tokenize", {"prompt": rendered}).json()["count"]
    assert prompt_tokens(server, "/v1/responses", {**body, "max_output_tokens": 1}) == n + 1
    body["input"] = [*history, {"role": "user", "content": "two"}]
    body["tool_choice"] = {"type": "function", "name": "log"}
    (call,) = post(server, "/v1/responses", {**body, "max_output_tokens": 100}).json()["output"]
    assert (call["namespace"], call["name"]) == ("git", "log")


@pytest.mark.parametrize("stream", [False, True])
def test_response_logprobs(server, stream):
    body = {"model": MODEL, "input": "think", "temperature": 0, "stream": stream, "top_logprobs": 2}
    reply = post(server, "/v1/responses", body)
    assert reply.status_code == 200, reply.text
    if stream:
        events = [json.loads(line[5:]) for line in reply.text.splitlines() if line.startswith("data:")]
        assert any(e.get("logprobs") for e in events if e["type"] == "response.output_text.delta")
        response = events[-1]["response"]
    else:
        response = reply.json()
    (part,) = response["output"][-1]["content"]
    assert "".join(p["token"] for p in part["logprobs"]).strip() == part["text"] == "It is 4."
    assert all(len(p["top_logprobs"]) == 2 and p["logprob"] <= 0 for p in part["logprobs"])
    plain = post(server, "/v1/responses", {**body, "top_logprobs": 0, "stream": False}).json()
    assert plain["output"][-1]["content"][0]["logprobs"] == []


def test_tools_left_out(server):
    """A choice is no error where all tools were left out, but for one that asks for a call."""
    body = {"model": MODEL, "input": "short", "tools": [{"type": "web_search"}], "temperature": 0}
    for choice, status in (("auto", 200), ("none", 200), ("required", 400)):
        assert post(server, "/v1/responses", {**body, "tool_choice": choice}).status_code == status


def test_custom_tools_are_forced(server):
    """A regular expression of a tool that takes text is obeyed."""
    tools = [{"type": "custom", "name": "digits", "format": {"type": "grammar", "syntax": "regex", "definition": "1{3}"}}]
    choice = {"type": "custom", "name": "digits"}
    (*_, call), _ = codex_output(
        server, "short", False, tools=tools, tool_choice=choice, parallel_tool_calls=False, max_output_tokens=400
    )
    assert (call["type"], call["name"], call["input"]) == ("custom_tool_call", "digits", "111")


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
    for wrong in ({"input": []}, {"input": 5},
                  {"input": "short", "conversation": "c"},
                  {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}):
        with pytest.raises(openai.BadRequestError):
            client.responses.create(model=MODEL, **wrong)
