"""Structured output: a model of random weights, whose every answer must match what was asked."""

import concurrent.futures
import json
import re

import httpx
import jsonschema
import openai
import pytest

from scripted_model import write_model
from serving import Server

HELLO = [{"role": "user", "content": "Hello, who are you?"}]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server(tandem_bin, tiny_model):
    running = Server(tandem_bin, tiny_model, "--max-batch", "8")
    yield running
    running.close()


def ask(client, **kwargs):
    kwargs.setdefault("max_tokens", 400)
    answer = client.chat.completions.create(model="", messages=HELLO, **kwargs)
    assert answer.choices[0].finish_reason == "stop", answer
    return answer.choices[0].message.content


def check_person(text):
    person = json.loads(text)
    assert list(person) == ["name", "age", "tags"]
    assert len(person["name"]) <= 8 and 0 <= person["age"] <= 150
    assert len(person["tags"]) <= 3 and set(person["tags"]) <= {"a", "b"}


def schema(value, strict=True):
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": value, "strict": strict}}


SAMPLINGS = [
    {"temperature": 0},
    {"temperature": 2, "seed": 1},
    {"temperature": 1, "top_p": 0.9, "seed": 2},
    {"temperature": 1, "extra_body": {"top_k": 20}, "seed": 3},
    {"temperature": 1, "frequency_penalty": 1.5, "seed": 4, "logprobs": True, "top_logprobs": 2},
]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_json_schema(client, sampling):
    check_person(ask(client, response_format=schema(PERSON), **sampling))


@pytest.mark.parametrize("seed", range(3))
def test_open_objects_are_closed_and_compact(client, seed):
    """A schema that allows more, of a model that likes white space."""
    person = {k: v for k, v in PERSON.items() if k != "additionalProperties"}
    spaces = {str(b): 8 for b in (10, 32, 198, 220)}
    text = ask(client, response_format=schema(person, strict=False), temperature=2, seed=seed,
               logit_bias=spaces)
    check_person(text)
    skeleton = re.sub(r'"(\\.|[^"\\])*"', '""', text)
    for line in skeleton.split("\n"):
        assert not re.search(r"(?<!^)\s{2}|,(?=\S)|:(?=\S)|\s[,:}\]]", line.strip()), skeleton
        assert (len(line) - len(line.lstrip())) % 2 == 0


def test_json_object_of_noise(client):
    # Strings without end are what a random model likes: the choices differ in where they stop.
    answer = client.chat.completions.create(
        model="", messages=HELLO, n=8, max_tokens=300, temperature=2, seed=5,
        response_format={"type": "json_object"},
    )
    for choice in answer.choices:
        assert choice.message.content.startswith("{")
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(choice.message.content), dict)


def test_streamed_and_whole_are_the_same(client):
    request = {"response_format": schema(PERSON), "temperature": 1, "seed": 7}
    whole = ask(client, **request)
    stream = client.chat.completions.create(
        model="", messages=HELLO, max_tokens=400, stream=True, **request
    )
    assert "".join(c.choices[0].delta.content or "" for c in stream if c.choices) == whole


@pytest.mark.tsan
def test_batched_are_the_same(client):
    """What a request is computed beside changes neither its grammar nor its text."""
    formats = [schema(PERSON), schema({"enum": ["x", "yy"]}), None, schema({"type": "integer"})]

    def run(i):
        given = {"response_format": formats[i % 4]} if formats[i % 4] else {}
        answer = client.chat.completions.create(
            model="", messages=HELLO, max_tokens=120, temperature=1, seed=i, **given
        )
        return answer.choices[0].message.content

    alone = [run(i) for i in range(8)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert list(pool.map(run, range(8))) == alone


OTHERS = [
    ({"guided_choice": ["red", "green", "bl\u00fce"]}, r"red|green|bl\u00fce"),
    ({"guided_regex": "[a-c]{3}-\\d{2,4}"}, r"[a-c]{3}-\d{2,4}"),
    ({"structured_outputs": {"regex": "(ab|cd){2}"}}, r"(ab|cd){2}"),
    ({"structured_outputs": {"choice": ["one", "two"]}}, r"one|two"),
    ({"structured_outputs": {"json": {"type": "boolean"}}}, r"true|false"),
    ({"guided_json": '{"type": "null"}'}, r"null"),
    ({"grammar": 'root ::= "<" [a-z]{1,4} ">"'}, r"<[a-z]{1,4}>"),
    ({"guided_grammar": 'root ::= "x" y\ny ::= "\u20ac"{2}'}, "x\u20ac\u20ac"),
    ({"response_format": {"type": "json_object", "schema": {"const": 7}}}, r"7"),
    ({"json_schema": {"const": "q"}}, r'"q"'),
]


@pytest.mark.parametrize("body, pattern", OTHERS)
def test_other_names(client, body, pattern):
    assert re.fullmatch(pattern, ask(client, extra_body=body, temperature=1.5, seed=1))
    answer = client.completions.create(
        model="", prompt="It is", max_tokens=60, temperature=1.5, seed=2, extra_body=body
    )
    assert re.fullmatch(pattern, answer.choices[0].text)


LEFT_OUT = {
    "not": {"type": "integer", "minimum": 0, "maximum": 9, "not": {"const": 5}},
    "if": {"type": "integer", "minimum": 0, "maximum": 99, "if": {"minimum": 3}, "then": {"maximum": 9}},
    "multipleOf": {"type": "integer", "minimum": 0, "maximum": 9000, "multipleOf": 7},
    "uniqueItems": {"type": "array", "items": {"enum": list(range(9))}, "uniqueItems": True, "maxItems": 2},
    "contains": {"type": "array", "items": {"type": "null"}, "contains": {"const": None}, "maxItems": 2},
    "patternProperties": {"type": "object", "patternProperties": {"^x": True, "^y": True}, "additionalProperties": False},
    "minProperties": {"type": "object", "properties": {"a": {"const": 1}, "b": {"const": 2}, "c": {"const": 3}},
                      "minProperties": 2, "additionalProperties": False},
    "minLength": {"type": "string", "pattern": "^[ab]{0,3}$", "minLength": 2},
    "pattern": {"type": "string", "pattern": "^(?=a)b*$", "maxLength": 4},
    "oneOf": {"oneOf": [{"type": "integer", "minimum": 0, "maximum": 93}, {"type": "integer", "minimum": 90, "maximum": 95}]},
}


@pytest.mark.parametrize("keyword", LEFT_OUT)
def test_what_a_grammar_cannot_say_is_left_out_alone(server, client, keyword):
    """Unless the schema is strict. The rest of it counts, and the log names what does not."""
    value = {"type": "object", "properties": {"v": LEFT_OUT[keyword], "n": {"enum": ["x", "y"]}},
             "required": ["v", "n"], "additionalProperties": False}
    with pytest.raises(openai.BadRequestError, match=re.escape(keyword) + ".* not supported"):
        ask(client, response_format=schema(value))
    said = json.loads(ask(client, response_format=schema(value, strict=False), seed=1, temperature=1))
    ask(client, response_format=schema(value, strict=False), seed=2)
    assert said["n"] in ("x", "y") and list(said) == ["v", "n"]
    rest = {k: v for k, v in LEFT_OUT[keyword].items() if k not in (keyword, "then")}
    jsonschema.validate(said["v"], rest if keyword != "oneOf" else {"type": "integer", "minimum": 0, "maximum": 95})
    left_out = rf"properties\.v: {re.escape(keyword)}\b.* is not supported: answers may disregard it"
    assert len(re.findall(left_out, server.log())) == 1


def test_an_enum_of_many_values(client):
    values = [f"v{i}" for i in range(20000)]
    answer = client.chat.completions.create(
        model="", messages=HELLO, response_format=schema({"enum": values}), max_tokens=30)
    assert json.loads(answer.choices[0].message.content) in values


def test_a_schema_of_another_document_allows_anything(server, client):
    elsewhere = {"$ref": "https://example.com/other.json"}
    value = {"type": "object", "properties": {"n": {"enum": ["x", "y"]}, "v": elsewhere}, "required": ["n"]}
    for _ in range(2):
        answer = client.chat.completions.create(
            model="", messages=HELLO, response_format=schema(value, strict=False), max_tokens=60)
        assert answer.choices[0].message.content.startswith('{"n": "')
    assert "properties.v: $ref: other than a pointer" in server.log()


REFUSED = [
    ({"response_format": schema({"enum": ["a" * i for i in range(1, 5001)]})}, "too large or nested too deep"),
    ({"response_format": schema({"type": "array", "uniqueItems": True})}, "uniqueItems"),
    ({"response_format": schema({"properties": {"a": {"not": {"type": "null"}}}})}, "not"),
    ({"response_format": schema({"type": "strng"})}, "type"),
    ({"response_format": schema({"enum": []})}, "response_format: no text"),
    ({"guided_grammar": 'root ::= "a" root'}, "guided_grammar: no text"),
    ({"guided_regex": "(a{900}){900}"}, "guided_regex: too large"),
    ({"guided_regex": "a{60000}", "n": 100}, "n: too many answers"),
    ({"guided_regex": "(?=a)"}, "look-around"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "only one"),
    ({"guided_choice": []}, "guided_choice"),
    ({"grammar": 'root ::= root "a" | "b"'}, "left recursion"),
    ({"grammar": "nonsense"}, "grammar"),
    ({"guided_json": "{"}, "guided_json"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structural_tag"),
    ({"grammar": 'root ::= ("a"{9999}){9999}'}, "too large"),
]


@pytest.mark.parametrize("body, message", REFUSED)
def test_refused(client, body, message):
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            ask(client, stream=stream, extra_body=body)
        assert message in caught.value.message
        assert caught.value.param.split(".")[0] in body


def chain(n):
    return "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1}\n" for i in range(n)) + f'r{n} ::= "a"'


DEAR = [
    ({"response_format": schema({"additionalProperties": True, "properties": {"a" * 100000: {}}})}, None),
    ({"grammar": 'root ::= (((""){1048576}){1048576}){1048576}'}, None),
    ({"guided_regex": "^(((){65536}){65536}){65536}$"}, None),
    ({"grammar": chain(9000)}, None),
    (
        {
            "response_format": schema(
                {
                    "anyOf": [{"type": "object", "required": [f"a{i}"]} for i in range(512)],
                    "properties": {f"p{i}": {} for i in range(20000)},
                }
            )
        },
        "too large",
    ),
    ({"grammar": chain(60000)}, "ambiguous"),
    ({"response_format": schema({"type": "object", "properties": {f"p{i}": {} for i in range(200000)}})}, "too large"),
]


@pytest.mark.parametrize("body, message", DEAR)
def test_a_short_request_for_much_work(client, body, message):
    """Each is answered or refused within its budget, and the server goes on."""
    few = {"model": "", "messages": HELLO, "max_tokens": 2}
    if message is None:
        client.chat.completions.create(**few, extra_body=body)
    else:
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(**few, extra_body=body)
        assert message in caught.value.message
    client.chat.completions.create(**few)


def test_the_longest_enum(client):
    values = {"enum": [f"value {i}" for i in range(4096)]}
    body = schema({"type": "object", "properties": {"a": values}, "required": ["a"]})
    reply = ask(client, response_format=body, max_tokens=100)
    assert re.fullmatch(r'\s*\{\s*"a"\s*:\s*"value \d+"\s*\}\s*', reply)


def test_too_ambiguous_fails_alone(server, client):
    rules = [f'x{i} ::= "a" x{i + 1} "b" | "a" x{i + 1} "c"' for i in range(20)]
    text = "\n".join(["root ::= x0", *rules, 'x20 ::= "d"'])
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, temperature=0, extra_body={"grammar": text})
    assert "grammar: the grammar is too ambiguous" in caught.value.message and caught.value.param == "grammar"
    check_person(ask(client, response_format=schema(PERSON)))
    assert httpx.get(server.url + "/health", trust_env=False).status_code == 200


def test_survives_the_worker(tandem_bin, tiny_model):
    """After a crash the grammar goes on behind the last token, with the same text."""
    items = {"type": "array", "items": {"type": "integer"}, "minItems": 60, "maxItems": 60}
    request = {"temperature": 1, "seed": 3, "max_tokens": 1500, "response_format": schema(items)}
    server = Server(tandem_bin, tiny_model)
    try:
        with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
            undisturbed = ask(client, **request)
            assert len(json.loads(undisturbed)) == 60
            stream = client.chat.completions.create(
                model="", messages=HELLO, stream=True, **request
            )
            text = ""
            for i, chunk in enumerate(stream):
                text += chunk.choices[0].delta.content or ""
                if i == 40:
                    server.kill_worker()
            assert text == undisturbed
    finally:
        server.close()


# -- tools -----------------------------------------------------------------------------------

TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": {
        "type": "object", "properties": {"unit": {"enum": ["C", "F"]}}, "required": ["unit"],
        "additionalProperties": False}}},
    {"type": "function", "function": {"name": "stop_all"}},
    {"type": "function", "function": {"name": "add", "strict": True, "parameters": {
        "type": "object", "properties": {"n": {"type": "integer", "maximum": 9, "minimum": 0}},
        "required": ["n"]}}},
]


def call(client, **kwargs):
    kwargs = {"tools": TOOLS, "temperature": 1, "max_tokens": 400, **kwargs}
    answer = client.chat.completions.create(model="", messages=HELLO, **kwargs)
    return answer.choices[0]


def check_calls(calls, names):
    for c in calls:
        arguments = json.loads(c.function.arguments)
        assert c.function.name in names
        if c.function.name == "get_weather":
            assert arguments in ({"unit": "C"}, {"unit": "F"})
        if c.function.name == "add":
            assert list(arguments) == ["n"] and 0 <= arguments["n"] <= 9


def named(name):
    return {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize("seed", range(4))
def test_required(client, seed):
    tools = [TOOLS[0], TOOLS[2]]
    choice = call(client, tools=tools, tool_choice="required", parallel_tool_calls=False, seed=seed)
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    assert len(choice.message.tool_calls) == 1
    check_calls(choice.message.tool_calls, ["get_weather", "add"])


def test_named(client):
    one = {"parallel_tool_calls": False}
    choice = call(client, tool_choice=named("get_weather"), **one)
    check_calls(choice.message.tool_calls, ["get_weather"])
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named("add")]}}
    choice = call(client, tool_choice=allowed, **one)
    assert len(choice.message.tool_calls) == 1
    check_calls(choice.message.tool_calls, ["add"])


def test_refused_choices(client):
    wrong = [
        (named("nothing"), ".function.name"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named("none")]}},
         ".allowed_tools.tools[0].function.name"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "never", "tools": [named("add")]}},
         ".allowed_tools.mode"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}, ".allowed_tools.tools"),
        ("always", ""),
    ]
    for tool_choice, where in wrong:
        with pytest.raises(openai.BadRequestError) as caught:
            call(client, tool_choice=tool_choice)
        assert caught.value.param == "tool_choice" + where
    strict = {"name": "f", "strict": True, "parameters": {"type": "object", "not": {"const": 1}}}
    with pytest.raises(openai.BadRequestError) as caught:
        call(client, tools=[{"type": "function", "function": strict}])
    assert caught.value.param == "tools[0].function.parameters" and "not" in caught.value.message


# -- after reasoning, and in the middle of characters ----------------------------------------

# What the model wants to say; the grammar lets through what matches.
SCRIPTS = {
    "think": "<think>Let me see: {not json}</think>\n\n[1, 2]",
    "call": '<tool_call>\n{"name": "beta", "arguments": {"x": 12}}\n</tool_call> and more',
    "split": ["\u20ac", b"\xe2", b"\x82", b"\xac", "!"],
}


@pytest.fixture(scope="module")
def scripted(tandem_bin, tmp_path_factory):
    out = tmp_path_factory.mktemp("models") / "scripted"
    write_model(out, SCRIPTS)
    config = out / "tokenizer_config.json"  # the template of a model that reasons
    config.write_text(config.read_text().replace("{%- set", "{#- </think> -#}{%- set"))
    running = Server(tandem_bin, out)
    with openai.OpenAI(base_url=running.url + "/v1", api_key="none", max_retries=0) as made:
        yield made
    running.close()


def say(client, script, **kwargs):
    messages = [{"role": "user", "content": script}]
    return client.chat.completions.create(model="", messages=messages, temperature=0, **kwargs)


def test_reasoning_is_free(scripted):
    answer = say(scripted, "think", response_format=schema({"type": "array", "items": {"type": "integer"}}))
    message = answer.choices[0].message
    assert message.reasoning_content == "Let me see: {not json}"
    assert json.loads(message.content) == [1, 2]


def test_split_characters(scripted):
    answer = say(scripted, "split", extra_body={"guided_regex": "\u20ac{2}!"})
    assert answer.choices[0].message.content == "\u20ac\u20ac!"


def test_checked_calls(scripted):
    def tool(name, of_x):
        parameters = {"type": "object", "properties": {"x": of_x}, "required": ["x"]}
        return {"type": "function", "function": {"name": name, "strict": True, "parameters": parameters}}

    one = {"parallel_tool_calls": False}
    tools = [tool("beta", {"type": "integer"})]
    choice = say(scripted, "call", tools=tools, **one).choices[0]
    (made,) = choice.message.tool_calls
    assert (made.function.name, json.loads(made.function.arguments)) == ("beta", {"x": 12})
    # The arguments it wants to give are outside the schema.
    choice = say(scripted, "call", tools=[tool("beta", {"const": 13})], **one).choices[0]
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {"x": 13}


def test_costly_expressions_change_nothing_for_others(server):
    """Expressions without a small automaton, side by side: every text is what it is alone."""
    texts = ["q1|(.*[a-m].{30}){8}", "([^x]*[a-m].{40}){12}", "(.*[a-m ].{9}){2}z"]

    def generate(kwargs):
        body = {"prompt": "Once", "max_tokens": 24, "temperature": 1.5, "seed": 5} | kwargs
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=400, trust_env=False)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]

    requests = [{"guided_regex": text, "seed": seed} for text in texts for seed in (1, 2)]
    requests += [{"seed": 7}, {"guided_regex": "[a-z ]{200}"}]
    alone = [generate(request) for request in requests]
    with concurrent.futures.ThreadPoolExecutor(len(requests)) as pool:
        for _ in range(2):
            assert list(pool.map(generate, requests)) == alone


# How templates write calls of the history, and the start of a call that a model makes of its own.
WRITTEN = {
    "tight": ('<tool_call>{"name": "NAME", "arguments": ARGS}</tool_call>', "<tool_call>{"),
    "loose": ('<tool_call>\n{"name": "NAME", "arguments": ARGS}\n</tool_call>\n', "<tool_call>\n{"),
    "elements": ("<tool_call>\n<function=NAME>EACH\n</function>\n</tool_call>", "<tool_call>\n<function="),
    "inline": ("<tool_call><function=NAME>EACH</function></tool_call>", "<tool_call><function="),
    "keys": ("<tool_call>NAMEKEYS</tool_call>", "<tool_call>beta<arg_key>x</arg_key>"),
}
PARTS = {
    "NAME": "{{ f.name }}",
    "ARGS": "{{ f.arguments | tojson }}",
    "EACH": "{% for k, v in f.arguments.items() %}\n<parameter={{ k }}>\n{{ v }}\n</parameter>{% endfor %}",
    "KEYS": "{% for k, v in f.arguments.items() %}<arg_key>{{ k }}</arg_key><arg_value>{{ v }}</arg_value>{% endfor %}",
}


@pytest.mark.parametrize("form", WRITTEN)
def test_calls_are_written_as_the_template_does(tandem_bin, tmp_path, form):
    written, start = WRITTEN[form]
    pattern = written
    for part, jinja in PARTS.items():
        written = written.replace(part, jinja)
    written = written.replace("\n", "{{ '\\n' }}")
    template = (
        "{%- for m in messages -%}{%- if m.role == 'user' -%}{{- begin[m.content] or m.content -}}"
        "{%- elif m.tool_calls -%}{%- for c in m.tool_calls -%}{%- set f = c.function -%}"
        + written + "{%- endfor -%}<|im_end|>{%- else -%}{{- m.content -}}<|im_end|>{%- endif -%}{%- endfor -%}"
    )
    write_model(tmp_path, {"go": "Well. " + start + ' whatever it is "gamma"'}, template=template)
    running = Server(tandem_bin, tmp_path)
    try:
        with openai.OpenAI(base_url=running.url + "/v1", api_key="none", max_retries=0) as client:
            for strict, choice in ((False, "required"), (True, "auto")):
                number = {"type": "object", "properties": {"x": {"enum": [7]}}, "required": ["x"]}
                function = {"name": "beta", "strict": strict, "parameters": number}
                tools = [{"type": "function", "function": function}]
                answer = say(client, "go", tools=tools, tool_choice=choice, logprobs=True,
                             parallel_tool_calls=False, max_tokens=200)
                assert answer.choices[0].message.tool_calls, answer
                (made,) = answer.choices[0].message.tool_calls
                assert (made.function.name, json.loads(made.function.arguments)) == ("beta", {"x": 7})
                text = "".join(t.token for t in answer.choices[0].logprobs.content)
                wanted = pattern.replace("NAME", "beta").replace("ARGS", '{"x": 7}')
                wanted = wanted.replace("EACH", "\n<parameter=x>\n7\n</parameter>")
                wanted = wanted.replace("KEYS", "<arg_key>x</arg_key><arg_value>7</arg_value>")
                assert text.endswith(wanted.strip()), text
    finally:
        running.close()
