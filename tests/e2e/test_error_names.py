"""Errors name the client's own members, whatever they were translated to."""

import copy
import json
import re

import httpx
import pytest

from dialects import KEYED, post, server  # a fixture

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}}
# What no grammar can express.
HARD = {"type": "object", "properties": {"n": {"type": "array", "minItems": -1}}}
ABSENT = object()
SAMPLING = {"temperature": 1, "top_p": 0.5, "top_k": 5, "min_p": 0.1, "seed": 3, "presence_penalty": 0,
            "frequency_penalty": 0}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}}

# Of each API a request with all members that are translated; the model is asked for last.
BODIES = {
    "/v1/chat/completions": {
        "max_tokens": 9, "stop": ["a", "b"], "tools": [TOOL], "tool_choice": "auto", "stream": False,
        "reasoning_effort": "low", "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
        "messages": [
            {"role": "system", "content": "a"},
            {"role": "user", "content": [{"type": "text", "text": "b"}]},
            {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "c", "content": "d"},
            {"role": "user", "content": "e"}], **SAMPLING},
    "/v1/messages": {
        "max_tokens": 9, "system": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        "stop_sequences": ["a", "b"], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "tools": [{"type": "web_search_20250305", "name": "web_search"},
                  {"name": "late", "defer_loading": True, "input_schema": SCHEMA},
                  {"name": "f", "description": "d", "input_schema": SCHEMA}],
        "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}},
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "c"}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "d"},
                {"type": "tool_use", "id": "t1", "name": "f", "input": {"n": 1}},
                {"type": "tool_use", "id": "t2", "name": "late", "input": {"n": 2}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "e"}]},
                {"type": "tool_result", "tool_use_id": "t2", "content": "f"},
                {"type": "text", "text": "g"}]},
            {"role": "assistant", "content": "h"},
            {"role": "user", "content": [{"type": "text", "text": "i"}]}], **SAMPLING},
    "/v1/responses": {
        "max_output_tokens": 9, "instructions": "a", "tool_choice": "auto", "store": False, "top_logprobs": 2,
        "tools": [{"type": "web_search"}, {"type": "function", "name": "f", "parameters": SCHEMA},
                  {"type": "namespace", "name": "s", "tools": [
                      {"type": "function", "name": "g", "parameters": SCHEMA}]},
                  {"type": "custom", "name": "h", "description": "d"}],
        "reasoning": {"effort": "low"}, "include": ["message.output_text.logprobs"],
        "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
        "input": [
            {"role": "user", "content": "b"},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"role": "assistant", "content": [{"type": "output_text", "text": "c"}]},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
            {"type": "custom_tool_call", "call_id": "c2", "name": "h", "input": "x"},
            {"type": "function_call", "call_id": "c3", "name": "g", "namespace": "s", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "d"},
            {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "e"}]},
            {"type": "additional_tools", "tools": [{"type": "function", "name": "k", "parameters": SCHEMA}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "f"}]}],
        "temperature": 1, "top_p": 0.5, "parallel_tool_calls": True},
    "/api/chat": {
        "format": SCHEMA, "think": "low", "stream": False, "tools": [TOOL], "logprobs": True, "top_logprobs": 2,
        "options": {**SAMPLING, "num_predict": 9, "stop": ["a", "b"], "repeat_penalty": 1.1},
        "messages": [
            {"role": "system", "content": "a"},
            {"role": "user", "content": "b", "images": ["AA=="]},
            {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": [
                {"function": {"name": "f", "arguments": {"n": 1}}}]},
            {"role": "tool", "tool_name": "f", "content": "c"},
            {"role": "user", "content": "d"}]},
    "/api/generate": {
        "prompt": "a", "system": "b", "format": "json", "stream": False, "top_logprobs": 2,
        "options": {**SAMPLING, "num_predict": 9, "stop": ["a", "b"], "repeat_penalty": 1.1}},
    "/completion": {
        "prompt": ["a"], "n_predict": 9, "n_probs": 2, "repeat_penalty": 1.1, "stop": ["a", "b"],
        "json_schema": SCHEMA, "logit_bias": [[1, 0.5], [2, False]], "stream": False, "min_tokens": 1, **SAMPLING,
        "response_fields": ["content"], "t_max_predict_ms": 0, "return_tokens": False},
}
BODIES["/v1/messages/count_tokens"] = BODIES["/v1/messages"]

# Where the error is about another member than the one that is wrong, or about more of its path.
ROWS = [
    # path, what is sent at which member, the member that the error names
    ("/v1/chat/completions", "response_format.json_schema.schema", HARD,
     "response_format.json_schema.schema.properties.n"),
    ("/v1/chat/completions", "response_format.json_schema.schema", {"anyOf": [SCHEMA, {"items": HARD}]},
     "response_format.json_schema.schema.anyOf[1].items.properties.n"),
    ("/v1/chat/completions", "tools[0].function", {"name": "f", "parameters": HARD, "strict": True},
     "tools[0].function.parameters.properties.n"),
    ("/v1/messages", "max_tokens", ABSENT, "max_tokens"),
    ("/v1/messages", "max_tokens", "9", "max_tokens"),
    ("/v1/messages", "max_tokens", 0, "max_tokens"),
    ("/v1/messages", "messages", [], "messages"),
    ("/v1/messages", "messages[0].role", "nobody", "messages[0].role"),
    ("/v1/messages", "messages[2].role", "nobody", "messages[2].role"),
    ("/v1/messages", "messages[3].content", {}, "messages[3].content"),
    ("/v1/messages", "messages[1].content[3].name", ABSENT, "messages[1].content[3].name"),
    ("/v1/messages", "messages[1].content[3].input", 5, "messages[1].content[3].input"),
    ("/v1/messages", "messages[1].content[2].id", 5, "messages[1].content[2].id"),
    ("/v1/messages", "messages[2].content[1].tool_use_id", 5, "messages[2].content[1].tool_use_id"),
    ("/v1/messages", "messages[4].content[0].text", ABSENT, "messages[4].content[0].text"),
    ("/v1/messages", "messages[4].content[0]", {"type": "image", "source": {}}, "messages[4].content[0].type"),
    ("/v1/messages", "messages[4].content[0]", {"type": "document", "source": {}}, "messages[4].content[0].type"),
    ("/v1/messages", "tools[2].name", ABSENT, "tools[2].name"),
    ("/v1/messages", "tools[2].input_schema", 5, "tools[2].input_schema"),
    ("/v1/messages", "tools[1].input_schema", 5, "tools[1].input_schema"),  # it is deferred: chat's last
    ("/v1/messages", "tools[2]", {"name": "f", "input_schema": HARD, "strict": True},
     "tools[2].input_schema.properties.n"),
    ("/v1/messages", "tools[2]", {"type": "function", "function": {"name": "f"}}, "tools[2].type"),
    ("/v1/messages", "messages[4].content[0]", "i", "messages[4].content[0]"),
    ("/v1/messages", "tool_choice", {"type": "tool", "name": "x"}, "tool_choice.name"),
    ("/v1/messages", "tool_choice", {"type": "tool"}, "tool_choice.name"),
    ("/v1/messages", "tool_choice.type", "some", "tool_choice.type"),
    ("/v1/messages", "stop_sequences[1]", "", "stop_sequences[1]"),
    ("/v1/messages", "stop_sequences", {}, "stop_sequences"),
    ("/v1/messages", "output_config.format.type", "xml", "output_config.format.type"),
    ("/v1/messages", "output_config.format.schema", HARD, "output_config.format.schema.properties.n"),
    ("/v1/messages", "output_config.format.schema", ABSENT, "output_config.format.schema"),
    ("/v1/messages", "add_generation_prompt", 1, "add_generation_prompt"),
    ("/v1/responses", "max_output_tokens", 0, "max_output_tokens"),
    ("/v1/responses", "min_tokens", 10, "min_tokens"),
    ("/v1/responses", "input", [], "input"),
    ("/v1/responses", "input", ABSENT, "input"),
    ("/v1/responses", "input[0].role", "nobody", "input[0].role"),
    ("/v1/responses", "input[3].name", ABSENT, "input[3].name"),
    ("/v1/responses", "input[5].arguments", 5, "input[5].arguments"),
    ("/v1/responses", "input[9].content[0]", {"type": "input_image"}, "input[9].content[0].type"),
    ("/v1/responses", "input[0]", {"type": "item_reference", "id": "msg_1"}, "input[0].id"),
    ("/v1/responses", "previous_response_id", "resp_1", "previous_response_id"),
    ("/v1/responses", "prompt", {"id": "p"}, "prompt"),
    ("/v1/responses", "tools[1].name", ABSENT, "tools[1].name"),
    ("/v1/responses", "tools[2].tools[0].name", ABSENT, "tools[2].tools[0].name"),
    ("/v1/responses", "tools[2].tools[0].parameters", [], "tools[2].tools[0].parameters"),
    ("/v1/responses", "tools[1]", {"type": "function", "name": "f", "parameters": HARD, "strict": True},
     "tools[1].parameters.properties.n"),
    ("/v1/responses", "input[8].tools[0].parameters", 5, "input[8].tools[0].parameters"),
    ("/v1/responses", "tool_choice", {"type": "function", "name": "x"}, "tool_choice.name"),
    ("/v1/responses", "tool_choice", {"type": "function"}, "tool_choice.name"),
    ("/v1/responses", "tool_choice", "some", "tool_choice"),
    ("/v1/responses", "tool_choice", {"type": "allowed_tools", "tools": [{"type": "function", "name": "f"}]},
     "tool_choice.mode"),
    ("/v1/responses", "tool_choice",
     {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "x"}]},
     "tool_choice.tools[0].name"),
    ("/v1/responses", "text.format.type", "xml", "text.format.type"),
    ("/v1/responses", "text.format.schema", HARD, "text.format.schema.properties.n"),
    ("/v1/responses", "text.format.schema", ABSENT, "text.format.schema"),
    ("/v1/responses", "reasoning.effort", 5, "reasoning.effort"),
    ("/api/chat", "options.num_predict", "9", "options.num_predict"),
    ("/api/chat", "min_tokens", 10, "min_tokens"),
    ("/api/chat", "options.repeat_penalty", 1000, "options.repeat_penalty"),
    ("/api/chat", "options.temperature", -1, "options.temperature"),
    ("/api/chat", "options.stop[1]", 5, "options.stop[1]"),
    ("/api/chat", "format", "yaml", "format"),
    ("/api/chat", "format", HARD, "format.properties.n"),
    ("/api/chat", "messages[1].role", "nobody", "messages[1].role"),
    ("/api/chat", "messages[2].thinking", 5, "messages[2].thinking"),
    ("/api/chat", "messages[3].tool_name", 5, "messages[3].tool_name"),
    ("/api/chat", "messages[4].images", ["AA=="], "messages[4].images"),
    ("/api/chat", "messages[2].tool_calls[0].function.arguments", 5, "messages[2].tool_calls[0].function.arguments"),
    ("/api/chat", "tools[0].function.name", ABSENT, "tools[0].function.name"),
    ("/api/generate", "options.top_k", 0.5, "options.top_k"),
    ("/api/generate", "images", ["AA=="], "images"),
    ("/api/generate", "prompt", ABSENT, None),  # only loads the model
    ("/api/generate", "template", "{{ range }}", "template"),
    ("/completion", "prompt", ABSENT, "prompt"),
    ("/completion", "prompt", [{"text": "a"}], "prompt[0].prompt_string"),
    ("/completion", "prompt", {"prompt_string": 5}, "prompt.prompt_string"),
    ("/completion", "prompt", {"prompt_string": "a", "multimodal_data": ["YQ=="]}, "prompt.multimodal_data"),
    ("/completion", "repeat_penalty", 1000, "repeat_penalty"),
    ("/completion", "min_tokens", 10, "min_tokens"),
    ("/completion", "n_probs", -1, "n_probs"),
    ("/completion", "json_schema", HARD, "json_schema.properties.n"),
    ("/completion", "logit_bias[1]", [2], "logit_bias[1]"),
]


def keys_of(path):
    return [int(k) if k.isdigit() else k for k in re.findall(r"[^.\[\]]+", path)]


def put(body, path, value):
    """Puts a value where a path says."""
    *parents, last = keys_of(path)
    at = body
    for key in parents:
        at = at[key]
    if value is ABSENT:
        del at[last]
    else:
        at[last] = value


def paths_of(value, where=""):
    """The paths of all members and items."""
    if isinstance(value, dict):
        children = [(f"{where}.{k}" if where else k, v) for k, v in value.items()]
    else:
        children = [(f"{where}[{i}]", v) for i, v in enumerate(value)] if isinstance(value, list) else []
    for path, child in children:
        yield path
        if not path.endswith(("schema", "parameters", "format", "arguments", "input")) or isinstance(child, list):
            yield from paths_of(child, path)
        elif path.endswith("format"):
            yield from (p for p in paths_of(child, path) if p.count(".") == path.count(".") + 1)


def names_in(value):
    """All names of members, and words, in a body."""
    if isinstance(value, dict):
        return set(value).union(*map(names_in, value.values())) if value else set()
    if isinstance(value, list):
        return set().union(*map(names_in, value))
    return {value} if isinstance(value, str) else set()


def of_error(reply):
    """An error's message, and the member that it says is wrong: the first one in it, or `param`."""
    error = reply.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    named = re.match(r"[a-z_]+(?:\.[A-Za-z_]+|\[\d+\])*(?=[ :]|$)", message)
    named = named[0] if named else None
    if isinstance(error, dict) and error.get("param"):
        assert named in (error["param"], None) or " " not in message or named in ("a", "the"), error
        named = error["param"]
    return message, named


VALUES = {"json_schema", "json_object", "allowed_tools", "json_schema.schema"}  # values, not members


def check_known(message, body):
    """An error holds no name that its request does not."""
    known = names_in(body) | VALUES | {"previous_response_id"}  # what to send instead
    for path in re.findall(r"(?<![\w\"])[a-z]+(?:_[a-z]+|\.[a-z_]+|\[\d+\])+", message):
        missing = [k for k in keys_of(path) if isinstance(k, str) and k not in known]
        assert len(missing) <= message.endswith(("is missing", "not a string", "not an object")), (message, missing)


@pytest.mark.parametrize("path, at, value, named", ROWS, ids=[f"{r[0]}-{r[1]}-{i}" for i, r in enumerate(ROWS)])
def test_a_wrong_member_is_named(server, path, at, value, named):
    body = copy.deepcopy(BODIES[path])
    put(body, at, value)
    reply = post(server, path, body)
    if named is None:
        assert reply.status_code == 200
        return
    assert reply.status_code in (400, 404), reply.text
    message, said = of_error(reply)
    assert named in message and said == named, message
    put(body, at, {at.split(".")[-1]: value} if value is not ABSENT else {})
    check_known(message.replace(named, ""), body)


def test_a_stream_names_it_too(server):
    """What is found when the answer has begun."""
    rules = [f'x{i} ::= "a" x{i + 1} "b" | "a" x{i + 1} "c"' for i in range(20)]
    text = "\n".join(["root ::= x0", *rules, 'x20 ::= "d"'])  # too ambiguous
    reply = post(server, "/v1/responses", {"input": "a", "stream": True, "temperature": 0, "grammar": text})
    error = json.loads(reply.text.split("event: error\ndata: ")[1])
    assert error["param"] == "grammar" and error["message"].startswith("grammar: "), error


LONG = "x" * 5000


@pytest.mark.parametrize("path, body, named", [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}, "messages"),
    ("/v1/completions", {"prompt": LONG}, "prompt"),
    ("/v1/responses", {"input": LONG}, "input"),
    ("/v1/responses", {"input": [{"role": "user", "content": LONG}]}, "input"),
    ("/api/chat", {"messages": [{"role": "user", "content": LONG}]}, "messages"),
    ("/api/generate", {"prompt": LONG}, "prompt"),
    ("/api/generate", {"prompt": LONG, "raw": True}, "prompt"),
    ("/completion", {"prompt": [LONG]}, "prompt[0]"),
])
def test_what_is_too_long_is_named(server, path, body, named):
    reply = post(server, path, body)
    message, said = of_error(reply)
    assert reply.status_code == 400 and f"shorten the {named}," in message and said in (named, None), message


@pytest.mark.parametrize("path, sent, advice", [
    ("/v1/chat/completions", {"prompt": "a"}, "; prompt is what /v1/completions takes"),
    ("/v1/chat/completions", {"functions": [{"name": "f"}]}, "; use tools"),
    ("/v1/completions", {"messages": BODIES["/api/chat"]["messages"]},
     "; messages are what /v1/chat/completions takes"),
    ("/v1/responses", {"messages": []}, "; messages are what /v1/chat/completions takes"),
    ("/completion", {"messages": []}, "; messages are what /v1/chat/completions takes"),
])
def test_what_belongs_elsewhere(server, path, sent, advice):
    reply = post(server, path, sent)
    assert reply.status_code == 400 and of_error(reply)[0].endswith(advice), reply.text


def test_what_cannot_be_continued_is_no_member_of_chat(server):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": [{"type": "text", "text": " "}]}]
    message, _ = of_error(post(server, "/v1/messages", {"max_tokens": 5, "messages": messages}))
    assert message == "the last message has no content to continue"


@pytest.mark.parametrize("path", BODIES)
def test_every_member_is_named(server, path):
    """Whatever is wrong about any member, the error names it, or what it is in, or something in it."""
    n_refused = 0
    # What is wrong after all others, so that nothing is computed. Ollama's look for the model first.
    late = {"chat_template_kwargs": 5} if path.startswith("/api") else {"model": "nobody"}
    with httpx.Client(base_url=server.url, headers=KEYED, trust_env=False) as http:
        for at in paths_of(BODIES[path]):
            for wrong in (5, "x", True, {}, {"a": [1]}, [], [5], -1e9):
                body = copy.deepcopy(BODIES[path])
                put(body, at, wrong)
                reply = http.post(path, json={**body, **late})
                message, named = of_error(reply) if reply.status_code != 200 else ("", None)
                if named in ("model", *late) or message.startswith(("chat template", "the model")) or not message:
                    continue
                n_refused += 1
                if (at, named) == ("tools", "tool_choice"):
                    continue  # which then has nothing to choose from
                there = named and (named.startswith(at) or at.startswith(named))
                assert there, (at, wrong, message)
                check_known(message.replace(named, ""), body)
    assert n_refused > 20
