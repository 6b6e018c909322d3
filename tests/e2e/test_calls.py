"""Tool calls and ends of answers over HTTP, of a model that says what it is told to."""

import json
import subprocess
from pathlib import Path

import httpx
import openai
import pytest

from scripted_model import SAY, Vocabulary, write_model
from serving import Server

KIMI = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.list_it:0<|tool_call_argument_begin|>"
    '<|tool_call_end|><|tool_call_begin|>functions.drop_it:1<|tool_call_argument_begin|>{"table": '
    '"users"}<|tool_call_end|><|tool_calls_section_end|>'
)
SCRIPTS = {
    "write": 'I write it.\n<tool_call>\n{"name": "write_file", "arguments": {"path": "a.txt", '
    '"content": "one\ntwo and some more text"}}\n</tool_call>',
    "kimi": KIMI,
    "two": '<tool_call>\n{"name": "alpha", "arguments": {"x": 1}}\n</tool_call> and then '
    '<tool_call>\n{"name": "beta"}\n</tool_call>',
    "nul": ["a NUL: ", b"x\0y", " end"],
    "turns": ["before ", "<|eot|>", " after"],
    "short": "A short answer.",
    "elements": "<tool_call>\n<function=save>\n<parameter=text>\n12\n</parameter>\n<parameter=lines>"
    "\n[1, 2]\n</parameter>\n</function>\n</tool_call>",
    "surrogate": '<tool_call>{"name": "say", "arguments": {"text": "cut \\ud83d"}}</tool_call>',
}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
LINES = {"type": "array", "items": {"type": "integer"}}
SAVE = {"type": "object", "properties": {"text": {"type": "string"}, "lines": LINES}}


@pytest.fixture(scope="module")
def server(tandem_bin, tmp_path_factory):
    out = tmp_path_factory.mktemp("models") / "scripted"
    control = ("<|eot|>", "<|eod|>", "<|eog|>")
    write_model(out, SCRIPTS, control, eos=["<|eod|>"], generation_eos=["<|eog|>"])
    running = Server(tandem_bin, out)
    yield running
    running.close()


def ask(client, script, **kwargs):
    kwargs.setdefault("tools", TOOLS)
    messages = [{"role": "user", "content": script}]
    return client.chat.completions.create(model="", messages=messages, temperature=0, **kwargs)


def calls_of(choice):
    return [(c.function.name, c.function.arguments) for c in choice.message.tool_calls or []]


def gathered(stream):
    """Content, calls and finish reason, as a client puts the pieces together."""
    content, calls, reasons, n_pieces = "", [], [], 0
    for chunk in stream:
        for choice in chunk.choices:
            content += choice.delta.content or ""
            for piece in choice.delta.tool_calls or []:
                if piece.index == len(calls):
                    assert piece.id and piece.type == "function"
                    calls.append((piece.function.name, ""))
                else:
                    assert piece.id is None and piece.type is None and piece.function.name is None
                name, arguments = calls[piece.index]
                calls[piece.index] = (name, arguments + piece.function.arguments)
                n_pieces += 1
            if choice.finish_reason:
                reasons.append(choice.finish_reason)
    (reason,) = reasons
    return content, calls, reason, n_pieces


@pytest.mark.parametrize("script", SCRIPTS)
def test_streams_give_the_same_calls(client, script):
    choice = ask(client, script).choices[0]
    content, calls, reason, _ = gathered(ask(client, script, stream=True))
    assert content == (choice.message.content or "") and calls == calls_of(choice)
    assert reason == choice.finish_reason


def test_arguments_come_in_pieces(client):
    content, calls, reason, n_pieces = gathered(ask(client, "write", stream=True))
    assert content == "I write it." and reason == "tool_calls"
    ((name, arguments),) = calls
    wanted = {"path": "a.txt", "content": "one\ntwo and some more text"}
    assert name == "write_file" and json.loads(arguments) == wanted
    assert n_pieces > 10


def test_a_call_without_arguments_leaves_the_next_ones(client):
    choice = ask(client, "kimi").choices[0]
    assert calls_of(choice) == [("list_it", "{}"), ("drop_it", '{"table": "users"}')]
    assert [c.id for c in choice.message.tool_calls] == ["functions.list_it:0", "functions.drop_it:1"]


CUT = [{"max_tokens": 28}, {"stop": ["two and"]}]


@pytest.mark.parametrize("limit", CUT, ids=["length", "stop"])
def test_a_call_cut_off_looks_like_one(client, limit):
    reason = "length" if "max_tokens" in limit else "stop"
    choice = ask(client, "write", **limit).choices[0]
    content, calls, ended, _ = gathered(ask(client, "write", stream=True, **limit))
    assert (content, ended) == ("I write it.", reason)
    assert (choice.message.content, choice.finish_reason, calls_of(choice)) == (content, reason, calls)
    ((name, arguments),) = calls
    assert name == "write_file" and arguments.startswith('{"path": "a')
    with pytest.raises(ValueError):
        json.loads(arguments)


@pytest.mark.parametrize("limit", CUT, ids=["length", "stop"])
def test_a_call_cut_off_in_every_protocol(server, limit):
    def post(path, **body):
        answer = httpx.post(server.url + path, json={"model": "", **body}, timeout=60)
        assert answer.status_code == 200
        lines = [line.removeprefix("data: ") for line in answer.text.split("\n")]
        return [json.loads(line) for line in lines if line.startswith("{")]

    is_long = "max_tokens" in limit
    messages = [{"role": "user", "content": "write"}]
    function = {"type": "function", "name": "f", "parameters": {}}
    for stream in (False, True):
        body = {"input": "write", "tools": [function], "stream": stream, "stop": limit.get("stop")}
        body |= {"max_output_tokens": 28} if is_long else {}
        last = post("/v1/responses", **body)[-1]
        response = last["response"] if stream else last
        assert response["status"] == "incomplete" and last.get("type") in (None, "response.incomplete")
        assert response["incomplete_details"]["reason"] == ("max_output_tokens" if is_long else "stop")
        assert [item["status"] for item in response["output"]] == ["completed", "incomplete"]
        tools = [{"name": "f", "input_schema": {}}]
        body = {"max_tokens": limit.get("max_tokens", 99), "stop_sequences": limit.get("stop")}
        events = post("/v1/messages", messages=messages, tools=tools, stream=stream, **body)
        end = events[-2]["delta"] if stream else events[0]
        assert end["stop_reason"] == ("max_tokens" if is_long else "stop_sequence")
        if not stream:  # half an input cannot be told from a whole one
            assert [b["type"] for b in end["content"]] == ["text"]
        options = {"num_predict": 28} if is_long else limit
        lines = post("/api/chat", messages=messages, tools=TOOLS, stream=stream, options=options)
        assert "".join(line["message"]["content"] for line in lines) == "I write it."
        assert not any("tool_calls" in line["message"] for line in lines)
        assert lines[-1]["done_reason"] == ("length" if is_long else "stop")


def test_elements_are_what_the_schema_says(client):
    tools = [{"type": "function", "function": {"name": "save", "parameters": SAVE}}]
    choice = ask(client, "elements", tools=tools).choices[0]
    ((name, arguments),) = calls_of(choice)
    assert name == "save" and json.loads(arguments) == {"text": "12", "lines": [1, 2]}
    _, calls, reason, n_pieces = gathered(ask(client, "elements", tools=tools, stream=True))
    assert calls == [(name, arguments)] and reason == "tool_calls" and n_pieces > 2


# The names of the scripts are in the template, which makes it one of Mistral's.
MISTRAL = {
    "[ARGS]": ["[TOOL_CALLS]", "look", "[ARGS]", '{"a": 1}'],
    "[THINK]": ["[THINK]", "So it is.", "[/THINK]", "Yes, it is."],
}


def test_control_tokens_that_mark_calls(tandem_bin, tmp_path):
    write_model(tmp_path, MISTRAL, ("[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"))
    server = Server(tandem_bin, tmp_path)
    tools = [{"type": "function", "function": {"name": "look"}}]
    try:
        with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
            free = ask(client, "[ARGS]", tools=tools)
            forced = ask(client, "[ARGS]", tools=tools, tool_choice="required")
            thought = ask(client, "[THINK]").choices[0].message
    finally:
        server.close()
    for answer in free, forced:
        assert calls_of(answer.choices[0]) == [("look", '{"a": 1}')]
    # Under the grammar the markers are the control tokens, too, and not spelled out.
    assert free.usage.completion_tokens == forced.usage.completion_tokens
    assert thought.reasoning_content == "So it is." and thought.content == "Yes, it is."


# The names of the scripts are in the template, as above.
GEMMA = {
    "<|tool_call>": ["<|tool_call>", "call:look", "{a:", '<|"|>', 'b "c"<|"|>}', "<tool_call|>"],
    "<channel|>": ["<|channel>", "thought\n", "So it is.", "<channel|>", "Yes, it is."],
}


def test_control_tokens_in_calls(tandem_bin, tmp_path):
    control = ("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>")
    write_model(tmp_path, GEMMA, control)
    server = Server(tandem_bin, tmp_path)
    tools = [{"type": "function", "function": {"name": "look"}}]
    try:
        with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
            free = ask(client, "<|tool_call>", tools=tools).choices[0]
            pieces = gathered(ask(client, "<|tool_call>", tools=tools, stream=True))
            thought = ask(client, "<channel|>").choices[0].message
    finally:
        server.close()
    assert calls_of(free) == pieces[1] == [("look", '{"a":"b \\"c\\""}')]
    assert free.finish_reason == "tool_calls" and not free.message.content
    assert thought.reasoning_content == "So it is." and thought.content == "Yes, it is."


@pytest.mark.parametrize("suffix", ["", ":opensource"], ids=["preview", "release"])
def test_calls_of_hy3(tandem_bin, tmp_path, suffix):
    """The name of the script is in the template, which makes it one of Hy3's."""
    call = "<tool_calls>\n<tool_call>save<tool_sep>\n<arg_key>text</arg_key>\n<arg_value>12"
    call += "</arg_value>\n</tool_call>\n</tool_calls>"
    say = "<think>So it is.</think>" + call
    write_model(tmp_path, {f"<tool_sep{suffix}></think{suffix}>": say.replace(">", suffix + ">")})
    server = Server(tandem_bin, tmp_path)
    tools = [{"type": "function", "function": {"name": "save", "parameters": SAVE}}]
    try:
        with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
            for choice in ("auto", "required"):
                script = f"<tool_sep{suffix}></think{suffix}>"
                said = ask(client, script, tools=tools, tool_choice=choice).choices[0]
                assert calls_of(said) == [("save", '{"text": "12"}')]
                assert said.message.reasoning_content == "So it is." and not said.message.content
                pieces = gathered(ask(client, script, tools=tools, tool_choice=choice, stream=True))
                assert pieces[:3] == ("", [("save", '{"text": "12"}')], "tool_calls")
    finally:
        server.close()


def test_calls_of_deepseek_v32(tandem_bin, tmp_path):
    """In DSML, where a template mentions it: the tags of arguments say which are strings."""
    elements = '<｜DSML｜parameter name="text" string="true">12 <b></｜DSML｜parameter>\n'
    elements += '<｜DSML｜parameter name="lines" string="false">[1, 2]</｜DSML｜parameter>\n'
    call = '<｜DSML｜function_calls>\n<｜DSML｜invoke name="save">\n' + elements + "</｜DSML｜invoke>\n"
    say = "So it is.</think>\n\n" + call + "</｜DSML｜function_calls>"
    write_model(tmp_path, {"go": "<think>" + say}, template=SAY + "{# ｜DSML｜ </think> #}")
    server = Server(tandem_bin, tmp_path)
    tools = [{"type": "function", "function": {"name": "save", "parameters": SAVE}}]
    try:
        with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
            for choice in ("auto", "required"):
                said = ask(client, "go", tools=tools, tool_choice=choice).choices[0]
                ((name, arguments),) = calls_of(said)
                assert name == "save" and json.loads(arguments) == {"text": "12 <b>", "lines": [1, 2]}
                assert said.message.reasoning_content == "So it is." and not said.message.content
                pieces = gathered(ask(client, "go", tools=tools, tool_choice=choice, stream=True))
                assert pieces[1:3] == ([(name, arguments)], "tool_calls")
    finally:
        server.close()


DSML_SAVE = (
    '<｜DSML｜invoke name="save">\n<｜DSML｜parameter name="text" string="true">12 <b></｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="lines" string="false">[1, 2]</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
)
SAVED = {"text": "12 <b>", "lines": [1, 2]}


@pytest.fixture(scope="module")
def deepseek_v4(tandem_bin, tmp_path_factory):
    """With the template that such models get, whose call its history shows to the parser."""
    template = Path(__file__).resolve().parents[2] / "src/text/templates/deepseek_v4.jinja"
    calls = f"\n\n<｜DSML｜tool_calls>\n{DSML_SAVE}</｜DSML｜tool_calls>"
    scripts = {
        "go": "<think>So it is.</think>" + calls,
        "hasty": "<think>So it is." + calls.replace("12 <b>", "34 <b>"),
        "object": '<think>Well.</think>{"n": 13}',
    }
    out = tmp_path_factory.mktemp("models") / "deepseek"
    write_model(out, scripts, template=template.read_text() + SAY)
    running = Server(tandem_bin, out)
    yield running
    running.close()


def said_in(api, events):
    """Thoughts, text and calls of an answer, whole or streamed."""
    thought, text, calls = "", "", []
    for event in events:
        if api == "/v1/chat/completions":
            part = event["choices"][0].get("message") or event["choices"][0].get("delta")
            thought, text = (a + (part.get(k) or "") for a, k in ((thought, "reasoning_content"), (text, "content")))
            for call in part.get("tool_calls") or []:
                calls += [[call["function"]["name"], ""]] if call["function"].get("name") else []
                calls[-1][1] += call["function"]["arguments"]
        elif api == "/api/chat":
            thought += event["message"].get("thinking") or ""
            text += event["message"].get("content") or ""
            calls += [[c["function"]["name"], json.dumps(c["function"]["arguments"])]
                      for c in event["message"].get("tool_calls") or []]
        elif api == "/v1/responses":
            for item in event.get("response", event).get("output") or []:
                parts = item.get("content") or []
                if event.get("type", "response.completed") != "response.completed":
                    continue
                calls += [[item["name"], item["arguments"]]] if item["type"] == "function_call" else []
                thought += "".join(p["text"] for p in parts if item["type"] == "reasoning")
                text += "".join(p["text"] for p in parts if item["type"] == "message")
        else:
            for block in event.get("content") or [event.get("content_block"), event.get("delta")]:
                block = block or {}
                thought, text = thought + block.get("thinking", ""), text + block.get("text", "")
                if block.get("type") == "tool_use":
                    calls.append([block["name"], json.dumps(block["input"]) if block["input"] else ""])
                if block.get("type") == "input_json_delta":
                    calls[-1][1] += block["partial_json"]
    return thought, text, [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("api", ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"])
def test_calls_of_deepseek_v4(deepseek_v4, api, choice):
    """In every protocol, whole and streamed; the tags of arguments say which are strings."""
    function = {"name": "save", "parameters": SAVE}
    tools = [{"type": "function", "function": function}]
    if api == "/v1/responses":
        tools = [{"type": "function", **function}]
    if api == "/v1/messages":
        tools = [{"name": "save", "input_schema": SAVE}]
        choice = {"type": "any" if choice == "required" else choice}
    for script, answer in (("go", SAVED), ("hasty", SAVED | {"text": "34 <b>"})):
        if script == "hasty" and choice not in ("auto", {"type": "auto"}):
            continue  # what must call cannot leave its thoughts so
        for stream in (False, True):
            body = {"model": "", "tools": tools, "tool_choice": choice, "temperature": 0, "stream": stream}
            body |= {"max_tokens": 500, "options": {"temperature": 0}}
            body |= {"input" if api == "/v1/responses" else "messages": [{"role": "user", "content": script}]}
            reply = httpx.post(deepseek_v4.url + api, json=body, timeout=60)
            assert reply.status_code == 200, reply.text
            lines = [line.removeprefix("data: ") for line in reply.text.split("\n")]
            events = [json.loads(line) for line in lines if line.startswith("{")]
            assert said_in(api, events) == ("So it is.", "", [("save", answer)])


def test_formats_behind_thoughts_of_minimax_m3(tandem_bin, tmp_path):
    """Their markers are those that the template mentions."""
    write_model(tmp_path, {"go": '<mm:think>Well </think>.</mm:think>{"n": 13}'}, template=SAY + "{# </mm:think> #}")
    server = Server(tandem_bin, tmp_path)
    body = {"messages": [{"role": "user", "content": "go"}], "temperature": 0}
    body |= {"response_format": {"type": "json_object"}}
    try:
        said = httpx.post(server.url + "/v1/chat/completions", json=body).json()["choices"][0]["message"]
    finally:
        server.close()
    assert said["reasoning_content"] == "Well </think>." and said["content"] == '{"n": 13}'


def test_calls_of_minimax_m3(tandem_bin, tmp_path):
    """In elements, each tag behind a token of its own; a list may be of elements, too."""
    call = '<tool_call>\n#<invoke name="save">#<text>12 <b>#</text>#<lines>{}#</lines>#</invoke>\n#</tool_call>'
    lines = {"nested": "#<item>1#</item>#<item>2#</item>", "json": "[1, 2]"}
    calls = {k: ("#" + call.format(v)).replace("#", "]<]minimax[>[") for k, v in lines.items()}
    scripts = {k: f"<mm:think>So it is.</mm:think>{v}" for k, v in calls.items()}
    write_model(tmp_path, scripts, template=SAY + "{# ]<]minimax[>[ </mm:think> #}")
    server = Server(tandem_bin, tmp_path)
    tools = [{"type": "function", "function": {"name": "save", "parameters": SAVE}}]
    try:
        with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
            for script, choice in (("nested", "auto"), ("json", "auto"), ("json", "required")):
                said = ask(client, script, tools=tools, tool_choice=choice).choices[0]
                ((name, arguments),) = calls_of(said)
                assert name == "save" and json.loads(arguments) == SAVED
                assert said.message.reasoning_content == "So it is." and not said.message.content
                pieces = gathered(ask(client, script, tools=tools, tool_choice=choice, stream=True))
                assert pieces[:3] == ("", [(name, arguments)], "tool_calls")
    finally:
        server.close()


def test_formats_of_deepseek_v4(deepseek_v4):
    """The model is shown the schema, and obeys it behind its thoughts."""
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    body = {"messages": [{"role": "user", "content": "object"}], "response_format": form, "temperature": 0}
    said = httpx.post(deepseek_v4.url + "/v1/chat/completions", json=body).json()["choices"][0]["message"]
    assert said["reasoning_content"] == "Well." and said["content"] == '{"n": 13}'
    prompt = httpx.post(deepseek_v4.url + "/apply-template", json=body).json()["prompt"]
    assert "## Response Format:" in prompt and json.dumps(schema) in prompt


@pytest.mark.parametrize("stream", [False, True])
def test_no_parallel_calls(client, stream):
    answer = ask(client, "two", parallel_tool_calls=False, stream=stream)
    if stream:
        content, calls, reason, _ = gathered(answer)
    else:
        (choice,) = answer.choices
        content, calls, reason = choice.message.content or "", calls_of(choice), choice.finish_reason
        whole = ask(client, "two")
        assert len(whole.choices[0].message.tool_calls) == 2
        assert answer.usage.completion_tokens < whole.usage.completion_tokens
    assert (content, calls, reason) == ("", [("alpha", '{"x": 1}')], "tool_calls")


def test_what_was_said_can_be_sent_back(client):
    said = ask(client, "nul").choices[0].message.content
    assert said == "a NUL: x\ufffdy end"
    call = ask(client, "surrogate").choices[0].message
    assert json.loads(call.tool_calls[0].function.arguments) == {"text": "cut \ufffd"}
    history = [
        {"role": "assistant", "content": said},
        call.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.tool_calls[0].id, "content": None},
        {"role": "user", "content": "nul"},
    ]
    again = client.chat.completions.create(model="", messages=history, temperature=0)
    assert again.choices[0].message.content == said


def test_control_tokens_of_a_prompt(client, server):
    answer = client.completions.create(model="", prompt="<|nul|>", temperature=0, max_tokens=64)
    assert answer.choices[0].text == "a NUL: x\ufffdy end" and answer.usage.prompt_tokens == 1
    tokens = httpx.post(server.url + "/tokenize", json={"prompt": "<|nul|>"}).json()
    assert tokens["count"] == 1


def test_filling_in(tandem_bin, server, tmp_path):
    write_model(tmp_path, {"fim_middle": "filled in"}, ("<|fim_prefix|>", "<|fim_suffix|>"))
    body = {"prompt": ["ab", "c"], "suffix": "d", "temperature": 0}
    filling = Server(tandem_bin, tmp_path)
    try:
        answer = httpx.post(filling.url + "/v1/completions", json=body).json()
    finally:
        filling.close()
    assert [c["text"] for c in answer["choices"]] == ["filled in"] * 2
    assert answer["usage"]["prompt_tokens"] == 6 + 5  # each with three control tokens
    refused = httpx.post(server.url + "/v1/completions", json=body)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "suffix"
    assert "tokens for filling in" in refused.json()["error"]["message"]


# -- ends of answers ---------------------------------------------------------------------------


def test_the_end_tokens_of_all_three_files_count(client, server):
    # What config.json and generation_config.json name is not <|im_end|>, which the tokenizer names.
    choice = ask(client, "short").choices[0]
    assert choice.message.content == "A short answer." and choice.finish_reason == "stop"
    for token in "<|eod|>", "<|eog|>":
        tokens = httpx.post(server.url + "/tokenize", json={"prompt": token}).json()["tokens"]
        bias = {str(tokens[0]): 100}
        answer = ask(client, "short", logit_bias=bias, max_tokens=5)
        assert answer.choices[0].finish_reason == "stop" and answer.usage.completion_tokens == 1


def test_control_tokens_that_end_answers_everywhere(tandem_bin, tmp_path):
    ends = ["<|call|>", "<|eot_id|>", "<|endoftext|>"]
    scripts = {f"say{i}": [f"{i}: said", token, f" {i} and more."] for i, token in enumerate(ends)}
    write_model(tmp_path, scripts, ends[:2], generation_eos=["<|im_end|>"])
    server = Server(tandem_bin, tmp_path)
    try:
        for i, name in enumerate(scripts):
            body = {"messages": [{"role": "user", "content": name}], "max_tokens": 20}
            choice = httpx.post(server.url + "/v1/chat/completions", json=body).json()["choices"][0]
            assert choice["message"]["content"] == f"{i}: said" and choice["finish_reason"] == "stop"
            body["ignore_eos"] = True
            choice = httpx.post(server.url + "/v1/chat/completions", json=body).json()["choices"][0]
            assert choice["message"]["content"].startswith(f"{i}: said {i} and more.")
    finally:
        server.close()


def test_stops_at_a_control_token(client, server):
    def said(**kwargs):
        choice = ask(client, "turns", extra_body=kwargs).choices[0]
        return choice.message.content, choice.finish_reason

    (eot,) = httpx.post(server.url + "/tokenize", json={"prompt": "<|eot|>"}).json()["tokens"]
    assert said() == ("before  after", "stop")
    assert said(skip_special_tokens=False) == ("before <|eot|> after", "stop")
    assert said(stop=["<|eot|>"]) == ("before ", "stop")
    assert said(stop_token_ids=[eot]) == ("before ", "stop")
    assert said(stop_token_ids=[eot], ignore_eos=True) == ("before ", "stop")
    assert said(stop=[f"no{i}" for i in range(31)] + ["fter"]) == ("before  a", "stop")


def test_min_tokens(client, server):
    answer = ask(client, "short", extra_body={"min_tokens": 20}, max_tokens=40)
    assert answer.usage.completion_tokens >= 20
    assert answer.choices[0].message.content.startswith("A short answer.")
    # Until then no stop string counts, and none of stop_token_ids is drawn.
    stop = {"min_tokens": 4, "stop": ["sho"]}
    assert ask(client, "short", extra_body=stop).choices[0].message.content == "A short answer."
    (eot,) = httpx.post(server.url + "/tokenize", json={"prompt": "<|eot|>"}).json()["tokens"]
    held = {"min_tokens": 8, "stop_token_ids": [eot]}
    assert ask(client, "turns", extra_body=held, max_tokens=40).usage.completion_tokens >= 8


def test_run_ends_where_the_tokenizer_says(tandem_bin, tmp_path):
    write_model(tmp_path, {"short": "A short answer."}, ("<|eod|>",), eos=["<|eod|>"])
    args = [tandem_bin, "run", "--model", tmp_path, "-p", "short", "-n", "30", "--temperature", "0"]
    done = subprocess.run(args, capture_output=True, text=True, check=True)
    assert done.stdout == "A short answer.\n"


def test_thoughts_are_blocks_for_mistral(tandem_bin, tmp_path):
    """With the conversion that its template has for them; other messages stay strings."""
    block = "{% if block['type'] == 'thinking' %}[THINK]{{ block['thinking'] }}[/THINK]"
    blocks = "{% for block in m.content %}" + block + "{% else %}{{ block['text'] }}{% endif %}{% endfor %}"
    shows = "{% if m.content is string %}{{ m.content }}{% else %}" + blocks + "{% endif %}|"
    write_model(tmp_path, {"a": "b"}, template="{% for m in messages %}" + shows + "{% endfor %}")
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "Yes.", "reasoning_content": "So it is."},
        {"role": "assistant", "content": "", "reasoning_content": "Hm."},
        {"role": "assistant", "content": "No."},
    ]
    server = Server(tandem_bin, tmp_path)
    try:
        shown = httpx.post(server.url + "/apply-template", json={"messages": messages}).json()
        ending = {"messages": messages[:2], "continue_final_message": True, "add_generation_prompt": False}
        continued = httpx.post(server.url + "/apply-template", json=ending).json()
    finally:
        server.close()
    assert shown["prompt"] == "a|[THINK]So it is.[/THINK]Yes.|[THINK]Hm.[/THINK]|No.|"
    assert continued["prompt"] == "a|Yes."


def test_run_tells_thoughts_apart(tandem_bin, tmp_path):
    write_model(tmp_path, MISTRAL, ("[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"))
    args = [tandem_bin, "run", "--model", tmp_path, "-p", "[THINK]", "-n", "30", "--temperature", "0"]
    done = subprocess.run(args, capture_output=True, text=True, check=True)
    assert done.stdout == "Yes, it is.\n"


HARMONY = {
    "channel": [
        *("<|start|>", "assistant<|channel|>analysis", "<|message|>", "So it is."),
        '<|end|><|start|>assistant to=functions.f<|channel|>commentary<|message|>{"a": 1}',
    ],
    # The thought's marker is missing, the call's header is doubled and has no marker either.
    "garbled": [
        *("<|channel|>", "analysis", " So it is.", "<|end|>", "<|channel|>commentary to=functions.f"),
        *("<|channel|>commentary to=functions.functions.f ", "<|constrain|>", "json", '{"a": 1}'),
    ],
}


THOUGHTS = {  # how they are written, and what the template mentions
    "think": (["<think>", "So it is.", "</think>"], ["\n\nYes, it is."], "</think>"),
    "minimax": (["<mm:think>", "So it is.", "</mm:think>"], ["Yes, it is."], "</mm:think>"),
    "mistral": (["[THINK]", "So it is.", "[/THINK]"], ["Yes, it is."], "[THINK]"),
    "gemma": (["<|channel>", "thought\n", "So it is.", "<channel|>"], ["Yes, it is."], "<channel|>"),
    "harmony": (
        ["<|channel|>", "analysis", "<|message|>", "So it is.", "<|end|>"],
        ["<|start|>", "assistant", "<|channel|>", "final", "<|message|>", "Yes, it is."],
        "<|channel|>",
    ),
}


@pytest.mark.parametrize("family", THOUGHTS)
def test_thoughts_are_known_everywhere(tandem_bin, tmp_path, family):
    """Their tokens are counted, and Ollama's clients are told that the model thinks."""
    thought, answer, mentioned = THOUGHTS[family]
    control = [text for text in thought if text[0] == "[" or text in ("<|channel>", "<channel|>")]
    n_thought, n_all = (len(Vocabulary({"go": s}, control).successor) - 1 for s in (thought, thought + answer))
    model = tmp_path / "scripted"
    write_model(model, {"go": thought + answer}, control, template=SAY + "{# " + mentioned + " #}")
    server = Server(tandem_bin, model)
    try:
        for stream in (False, True):
            body = {"input": "go", "temperature": 0, "stream": stream}
            text = httpx.post(server.url + "/v1/responses", json=body, timeout=60).text
            whole = json.loads(text.strip().split("data: ")[-1])["response"] if stream else json.loads(text)
            assert [o["content"][0]["text"] for o in whole["output"]] == ["So it is.", "Yes, it is."]
            usage = whole["usage"]
            assert usage["output_tokens"] == n_all + 1  # the end token
            assert usage["output_tokens_details"]["reasoning_tokens"] == n_thought
        shown = httpx.post(server.url + "/api/show", json={"model": "scripted"}).json()
        assert "thinking" in shown["capabilities"]
    finally:
        server.close()


INSPECTED = {  # what the template mentions, and the line
    "tools </think>": "by a template, thoughts behind <think>, tool calls behind <tool_call>",
    "tools <|channel|>": "by a template, thoughts behind <|channel|>analysis, tool calls behind <|channel|>commentary",
    "[TOOL_CALLS]": "by a template",
}


@pytest.mark.parametrize("mentioned", INSPECTED)
def test_inspect_says_how_to_talk(tandem_bin, tmp_path, mentioned):
    write_model(tmp_path, {"go": ["a"]}, template=SAY + "{# " + mentioned + " #}")
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6, "top_p": 0.95, "top_k": 20}')
    (tmp_path / "LICENSE").write_text("Free.")
    args = [tandem_bin, "inspect", "--model", tmp_path]
    text = subprocess.run(args, capture_output=True, text=True, check=True).stdout
    assert f"\nchat          {INSPECTED[mentioned]}\n" in text
    assert "\nsampling      temperature 0.6, top_p 0.95, top_k 20, unless" in text
    assert "\nlicence       LICENSE\n" in text
    found = json.loads(subprocess.run([*args, "--json"], capture_output=True, check=True).stdout)
    assert found["has_chat_template"] and found["licence"] == "LICENSE" and found["top_k_sampling"] == 20
    assert found.get("calls_begin", "") == INSPECTED[mentioned].partition("tool calls behind ")[2]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("script", HARMONY)
def test_channels_of_harmony(tandem_bin, tmp_path, script, stream):
    said = {script: HARMONY[script]}
    write_model(tmp_path / "scripted", said, ("<|start|>", "<|message|>"), template=SAY + "{# <|channel|> #}")
    server = Server(tandem_bin, tmp_path / "scripted")
    body = {"messages": [{"role": "user", "content": script}], "temperature": 0, "tools": TOOLS}
    try:
        answer = httpx.post(server.url + "/v1/chat/completions", json=body | {"stream": stream})
    finally:
        server.close()
    if stream:
        lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
        parts = [json.loads(line)["choices"][0]["delta"] for line in lines]
    else:
        parts = [answer.json()["choices"][0]["message"]]
    assert "".join(p.get("reasoning_content") or "" for p in parts) == "So it is."
    assert "".join(p.get("content") or "" for p in parts) == ""
    calls = [c["function"] for p in parts for c in p.get("tool_calls") or []]
    assert calls[0]["name"] == "f" and "".join(c["arguments"] for c in calls) == '{"a": 1}'


def test_forced_calls_of_harmony(tandem_bin, tmp_path):
    said = ["<|channel|>", "commentary to=functions.f <|constrain|>json", "<|message|>", '{"a": 1}']
    control = ("<|channel|>", "<|message|>")
    write_model(tmp_path, {"go": said}, control, template=SAY + "{# <|channel|> #}")
    server = Server(tandem_bin, tmp_path)
    try:
        with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
            free, forced = (ask(client, "go", tool_choice=c) for c in ("auto", "required"))
    finally:
        server.close()
    for answer in free, forced:
        assert calls_of(answer.choices[0]) == [("f", '{"a": 1}')]
    # Under the grammar the markers are the control tokens, too; it ends without an end token.
    assert free.usage.completion_tokens == forced.usage.completion_tokens + 1


# What templates of published models do with a content of null: fail, write it, ask for it.
HISTORY = {
    "contained": ("{% if 'x' in message.content %}{% endif %}", "[]"),
    "written": ("", "[]"),
    "asked": ("{% if message.content is none %}none{% endif %}", "none[None]"),
}


@pytest.mark.parametrize("how", HISTORY)
def test_calls_without_content_are_sent_back(tandem_bin, tmp_path, how):
    """With the reasoning before the call, under either of the names that templates have for it."""
    asks, wanted = HISTORY[how]
    shows = "[{{ message.content }}]{{ message.thinking }}{{ message.reasoning_content }}"
    template = "{% for message in messages if message.tool_calls %}" + asks + shows + "{% endfor %}"
    write_model(tmp_path, {"a": "b"}, template=template)
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "reasoning_content": "So.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "done"},
    ]
    server = Server(tandem_bin, tmp_path)
    try:
        shown = httpx.post(server.url + "/apply-template", json={"messages": messages}).json()
    finally:
        server.close()
    assert shown["prompt"] == wanted + "So.So."
