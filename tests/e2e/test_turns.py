"""Conversations that come back with the server's own messages: they tokenize to what was generated,
although the model's tokens are not those of the text, so that the prefix cache is hit."""

import json

import httpx
import openai
import pytest

from scripted_model import write_model
from serving import Server

PAGE = 64
TEXT = "".join(chr(33 + (7 * i) % 90) for i in range(300)).replace('"', "").replace("\\", "")
CALL = '<tool_call>\n{"arguments":  {"text": "%s", "n":1},\n "name": "work"}\n</tool_call>' % TEXT
SCRIPTS = {
    "go": "I begin.\n\n" + CALL.replace(TEXT, TEXT[::-1]),
    "more": "<think>\nSo I go on.\n</think>\n\n" + CALL,
    "enough": "It is done, and that took ten turns.",
}
# Earlier reasoning is forgotten when the user speaks again.
TEMPLATE = """
{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\\n' -}}
{%- set later = messages[loop.index0:] | selectattr('role', 'equalto', 'user') | list -%}
{%- if m.reasoning_content and not later -%}
{{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' -}}
{%- endif -%}
{{- m.content or '' -}}
{%- for call in m.tool_calls or [] -%}
{{- '\\n<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- begin[messages[-1].content] -}}{%- endif -%}
"""
SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}, "n": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "work", "parameters": SCHEMA}}]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    out = tmp_path_factory.mktemp("models") / "scripted"
    write_model(out, SCRIPTS, ("<|im_start|>",), template=TEMPLATE)
    return out


@pytest.fixture(scope="module")
def server(tandem_bin, model):
    running = Server(tandem_bin, model, "--cache-output", "--ctx-size", "4096")
    yield running
    running.close()


class Loop:
    """The usage of each turn; what follows a turn begins with all of its tokens."""

    def __init__(self, shares_output=True):
        self.shares_output = shares_output
        self.turns = []
        self.tails = []

    def add(self, n_prompt, n_cached, n_output):
        if self.turns:
            before, output = self.turns[-1]
            known = before + output - 1  # the end token is not computed
            assert n_cached == (known if self.shares_output else before) // PAGE * PAGE
            self.tails.append(n_prompt - known)
        self.turns.append((n_prompt, n_output))


def chat_loop(server, loop, keeps_reasoning, stream):
    messages = [{"role": "user", "content": "go"}]
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        for i in range(11):
            kwargs = {"model": "", "messages": messages, "tools": TOOLS, "temperature": 0}
            if stream:
                usage, message = streamed(client, kwargs)
            else:
                answer = client.chat.completions.create(**kwargs)
                usage = answer.usage
                message = answer.choices[0].message.model_dump(exclude_none=True)
            details = usage.prompt_tokens_details
            loop.add(usage.prompt_tokens, details.cached_tokens, usage.completion_tokens)
            if not keeps_reasoning:
                message.pop("reasoning_content", None)
            messages.append(message)
            if i == 10:
                assert message["content"] == SCRIPTS["enough"]
                return messages
            (call,) = message["tool_calls"]
            assert json.loads(call["function"]["arguments"])["n"] == 1
            # As clients do that keep arguments as objects.
            call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]))
            content = "enough" if i == 9 else "more"
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})


def streamed(client, kwargs):
    message, usage = {"role": "assistant", "content": "", "tool_calls": []}, None
    options = {"include_usage": True}
    for chunk in client.chat.completions.create(**kwargs, stream=True, stream_options=options):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            message["content"] += choice.delta.content or ""
            for piece in choice.delta.tool_calls or []:
                if piece.index == len(message["tool_calls"]):
                    call = {"id": piece.id, "type": "function"}
                    call["function"] = {"name": piece.function.name, "arguments": ""}
                    message["tool_calls"].append(call)
                message["tool_calls"][piece.index]["function"]["arguments"] += piece.function.arguments
    return usage, message


@pytest.mark.parametrize("how", ["whole", "stream", "reasoning"])
def test_ten_turns_of_chat(tandem_bin, model, how):
    server = Server(tandem_bin, model, "--cache-output", "--ctx-size", "4096")
    loop = Loop()
    try:
        messages = chat_loop(server, loop, how == "reasoning", how == "stream")
        # Of each turn the prompt gains what was generated, and the same few tokens.
        assert len(set(loop.tails[:-1])) == 1 and len(loop.turns) == 11
        if how != "reasoning":
            return
        # When the user speaks again, this template forgets the reasoning: nothing is put back.
        body = {"messages": messages + [{"role": "user", "content": "enough"}], "tools": TOOLS}
        answer = httpx.post(server.url + "/v1/chat/completions", json=body | {"temperature": 0}).json()
        shown = httpx.post(server.url + "/apply-template", json=body).json()["prompt"]
        tokens = httpx.post(server.url + "/tokenize", json=body).json()["count"]
        assert "So I go on" not in shown and answer["usage"]["prompt_tokens"] == tokens
    finally:
        server.close()


def test_what_was_cut_and_what_others_said(server):
    """An answer that ended at max_tokens is remembered, too, and is found behind others' answers."""
    url = server.url + "/v1/chat/completions"
    messages = [{"role": "system", "content": "x" * 100}, {"role": "user", "content": "go"}]
    body = {"messages": messages, "temperature": 0}
    first = httpx.post(url, json=body | {"max_tokens": 40}).json()
    assert first["choices"][0]["finish_reason"] == "length"
    messages.append(first["choices"][0]["message"])
    for i in range(6):
        messages.append({"role": "user", "content": f"{i}?"})
        messages.append({"role": "assistant", "content": f"{i}."})
    messages.append({"role": "user", "content": "enough"})
    again = httpx.post(url, json=body).json()
    known = first["usage"]["prompt_tokens"] + 40 - 1  # the last token is not computed
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == known // PAGE * PAGE
    shown = httpx.post(server.url + "/tokenize", json=body).json()["count"]
    assert again["usage"]["prompt_tokens"] < shown
    rendered = httpx.post(url + "/render", json=body).json()["token_ids"]
    assert len(rendered) == again["usage"]["prompt_tokens"]
    salted = httpx.post(url + "/render", json=body | {"cache_salt": "x"}).json()["token_ids"]
    assert len(salted) == shown  # what was generated for others is not told


def reads_reasoning(server, client, reader):
    """Whether the prompt of reader's conversation holds reasoning that only client's tokens had. Both
    are an address and members of the body; a key goes with each address."""

    def ask(who, messages, **more):
        address, members = who
        transport = httpx.HTTPTransport(local_address=address)
        headers = {"Authorization": f"Bearer {address}"}
        with httpx.Client(transport=transport, headers=headers) as http:
            body = {"messages": messages, "tools": TOOLS, "temperature": 0} | members | more
            return http.post(server.url + "/v1/chat/completions", json=body).json()["choices"][0]

    messages = [{"role": "system", "content": f"{client} and {reader}"}, {"role": "user", "content": "go"}]
    for content in "more", "enough":
        message = ask(client, messages)["message"]
        message.pop("reasoning_content", None)
        (call,) = message["tool_calls"]
        messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": content}]
    prompt = ask(reader, messages, max_tokens=1, prompt_logprobs=0)["prompt_logprobs"][1:]
    return "So I go on" in "".join(token["decoded_token"] for row in prompt for token in row.values())


@pytest.mark.parametrize("option", ["--cache-per-key", "--api-keys"])
def test_turns_of_another_are_not_found(tandem_bin, model, tmp_path, option):
    keys = tmp_path / "keys"
    keys.write_text("127.0.0.1\n127.0.0.2\n")
    keys.chmod(0o600)
    value = [str(keys)] if option == "--api-keys" else []
    server = Server(tandem_bin, model, "--ctx-size", "4096", option, *value)
    first, second = ("127.0.0.1", {}), ("127.0.0.2", {})
    try:
        assert reads_reasoning(server, first, first)
        assert not reads_reasoning(server, first, second)
    finally:
        server.close()


def test_turns_of_another_salt_are_not_found(server):
    first, second, none = (("127.0.0.1", salt) for salt in ({"cache_salt": "a"}, {"cache_salt": "b"}, {}))
    assert reads_reasoning(server, first, first)
    assert not reads_reasoning(server, first, second)
    assert not reads_reasoning(server, first, none)
    assert not reads_reasoning(server, none, first)


def test_prompts_alone_are_shared_by_default(tandem_bin, model):
    server = Server(tandem_bin, model, "--ctx-size", "4096")
    loop = Loop(shares_output=False)
    try:
        chat_loop(server, loop, True, False)
    finally:
        server.close()
    assert len(set(loop.tails[:-1])) == 1


@pytest.mark.parametrize("previous", [False, True])
def test_ten_turns_of_responses(server, previous):
    tools = [{"type": "function", "name": "work", "parameters": SCHEMA}]
    loop, items, last = Loop(), [{"role": "user", "content": "go"}], None
    system = f"Responses, {previous}."
    for i in range(11):
        body = {"input": items, "tools": tools, "temperature": 0, "instructions": system}
        if previous and last:
            body |= {"previous_response_id": last, "input": items[-1:]}
        answer = httpx.post(server.url + "/v1/responses", json=body, timeout=60).json()
        usage = answer["usage"]
        cached = usage["input_tokens_details"]["cached_tokens"]
        loop.add(usage["input_tokens"], cached, usage["output_tokens"])
        last = answer["id"]
        items += answer["output"]
        calls = [item for item in answer["output"] if item["type"] == "function_call"]
        assert len(calls) == (i < 10)
        if calls:
            output = "enough" if i == 9 else "more"
            done = {"type": "function_call_output", "call_id": calls[0]["call_id"], "output": output}
            items.append(done)
    assert len(set(loop.tails[:-1])) == 1


def test_ten_turns_of_messages(server):
    tools = [{"name": "work", "input_schema": SCHEMA}]
    loop, messages = Loop(), [{"role": "user", "content": "go"}]
    for i in range(11):
        body = {"messages": messages, "tools": tools, "temperature": 0, "max_tokens": 1000}
        body["system"] = "Messages."
        answer = httpx.post(server.url + "/v1/messages", json=body, timeout=60).json()
        usage = answer["usage"]
        cached = usage["cache_read_input_tokens"]
        loop.add(usage["input_tokens"] + cached, cached, usage["output_tokens"])
        messages.append({"role": "assistant", "content": answer["content"]})
        calls = [block for block in answer["content"] if block["type"] == "tool_use"]
        assert len(calls) == (i < 10)
        if calls:
            text = "enough" if i == 9 else "more"
            done = {"type": "tool_result", "tool_use_id": calls[0]["id"], "content": text}
            messages.append({"role": "user", "content": [done]})
    assert len(set(loop.tails[:-1])) == 1
