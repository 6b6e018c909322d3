"""What the grammars of JSON schemas let through, judged by two others: jsonschema and llguidance."""

import json
import random
import subprocess

import jsonschema
import llguidance
import pytest

pytestmark = pytest.mark.no_asan  # fuzz_grammar does the same there


def thing(required=None, closed=False, **properties):
    schema = {"type": "object", "properties": properties}
    schema["required"] = list(properties) if required is None else required
    return schema | ({"additionalProperties": False} if closed else {})


TEXT, NUMBER, COUNT, FLAG = ({"type": t} for t in ("string", "number", "integer", "boolean"))
TREE = {"$ref": "#/$defs/tree"}
LEAVES = {"leaf": TEXT, "children": {"type": "array", "items": TREE, "maxItems": 3}}

# A schema, and values of it that a grammar lets through.
SCHEMAS = [
    (True, [None, {"a": [1, "b"]}, -1.5, "x", []]),
    ({}, [{"a": {}}, True]),
    ({"type": "null"}, [None]),
    (FLAG, [True, False]),
    (COUNT, [0, -1, 1234567890123456]),
    (NUMBER, [0, -1, 0.5, -12.25, 1e30]),
    (TEXT, ["", "a", "é\n\"\\ \u2028", "\U0001f600", "\x01\x7f"]),
    ({"type": "object"}, [{}, {"a": 1, "b": {"c": []}}]),
    ({"type": "array"}, [[], [1, "a", None, [{}]]]),
    ({"type": ["string", "null", "integer"]}, ["a", None, 7]),
    ({"const": 5}, [5]),
    ({"const": {"a": [1, None, "é"]}}, [{"a": [1, None, "é"]}]),
    ({"enum": ["a", "ab", 1, None, [2], {"b": 3}]}, ["a", "ab", 1, None, [2], {"b": 3}]),
    ({"type": "string", "enum": ["a", 1]}, ["a"]),
    ({"type": "integer", "minimum": -7, "maximum": 123}, [-7, 0, 99, 123]),
    ({"type": "integer", "exclusiveMinimum": 9, "exclusiveMaximum": 11}, [10]),
    ({"type": "integer", "minimum": 1000}, [1000, 9999, 123456]),
    ({"type": "integer", "maximum": -5}, [-5, -99]),
    ({"type": "number", "minimum": 0, "maximum": 1}, [0, 0.5, 1]),
    ({"type": "number", "minimum": -2, "maximum": 250}, [-2, -0.5, 17.25, 250]),
    ({"type": "string", "minLength": 2, "maxLength": 4}, ["ab", "éé\U0001f600a"]),
    ({"type": "string", "minLength": 3}, ["abc", "abcdefgh"]),
    ({"type": "string", "maxLength": 1}, ["", "\""]),
    ({"type": "string", "pattern": "^[a-c]{2,3}x?$"}, ["ab", "abcx"]),
    ({"type": "string", "pattern": "^(foo|ba[rz])+\\d*$"}, ["foo", "barbaz12"]),
    ({"type": "string", "pattern": "^[^\\s\"]{1,5}$"}, ["abc", "a-b\\"]),
    ({"type": "string", "format": "date"}, ["2024-02-28", "1999-12-31"]),
    ({"type": "string", "format": "date-time"}, ["2024-02-28T23:59:59Z"]),
    ({"type": "string", "format": "time"}, ["12:30:00Z"]),
    ({"type": "string", "format": "uuid"}, ["123e4567-e89b-12d3-a456-426614174000"]),
    ({"type": "string", "format": "ipv4"}, ["127.0.0.1", "255.255.255.255"]),
    ({"type": "string", "format": "email"}, ["a@example.com"]),
    ({"type": "array", "items": COUNT}, [[], [1], [1, 2, 3]]),
    ({"type": "array", "items": TEXT, "minItems": 1, "maxItems": 3}, [["a"], ["a", "b", "c"]]),
    ({"type": "array", "items": FLAG, "minItems": 2}, [[True, False], [True, True, True]]),
    ({"type": "array", "items": COUNT, "maxItems": 0}, [[]]),
    ({"type": "array", "prefixItems": [COUNT, TEXT], "items": False, "minItems": 2}, [[1, "a"]]),
    ({"type": "array", "prefixItems": [COUNT, TEXT], "items": FLAG, "minItems": 2}, [[1, "a"], [1, "a", True]]),
    ({"type": "array", "items": {"type": "array", "items": NUMBER, "maxItems": 2}}, [[[1, 2], []]]),
    (thing(), [{}]),
    (thing(a=COUNT), [{"a": 1}]),
    (thing(a=COUNT, b=TEXT, closed=True), [{"a": 1, "b": "x"}]),
    (thing([], a=COUNT, b=TEXT, c=FLAG, closed=True), [{}, {"b": "x"}, {"a": 1, "c": True}]),
    (thing(["b"], a=COUNT, b=TEXT, c=FLAG), [{"b": "x"}, {"a": 1, "b": "x", "c": False}]),
    (thing(["a"], **{"a": COUNT, "a\"b": TEXT, "é": FLAG}), [{"a": 1, "a\"b": "", "é": True}]),
    (thing(p=thing(q=thing(r={"type": "array", "items": thing(s=TEXT)}))), [{"p": {"q": {"r": [{"s": "x"}]}}}]),
    ({"type": "object", "additionalProperties": COUNT}, [{}, {"x": 1, "yy": 2}]),
    ({"type": "object", "additionalProperties": thing(a=TEXT, closed=True)}, [{"k": {"a": "b"}}]),
    (thing(a=COUNT) | {"additionalProperties": TEXT}, [{"a": 1}, {"a": 1, "b": "x"}]),
    (thing(["a"], ab=COUNT, a=COUNT) | {"additionalProperties": FLAG}, [{"a": 1, "abc": True, "b": False}]),
    ({"anyOf": [COUNT, TEXT]}, [1, "a"]),
    ({"anyOf": [thing(a=COUNT, closed=True), thing(b=TEXT, closed=True)]}, [{"a": 1}, {"b": "x"}]),
    ({"oneOf": [{"type": "null"}, {"type": "array", "items": COUNT}]}, [None, [1]]),
    ({"oneOf": [thing(k={"const": 1}, a=TEXT), thing(k={"const": 2}, b=COUNT)]}, [{"k": 1, "a": ""}, {"k": 2, "b": 0}]),
    ({"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]}, [3, 5]),
    ({"allOf": [thing(a=COUNT), thing(b=TEXT)]}, [{"a": 1, "b": "x"}]),
    ({"allOf": [{"enum": [1, 2, 3]}, {"enum": [2, 3, 4]}]}, [2, 3]),
    ({"type": "integer", "anyOf": [{"minimum": 10}, {"maximum": 0}]}, [10, 0]),
    ({"$defs": {"n": COUNT}, "type": "array", "items": {"$ref": "#/$defs/n"}}, [[1, 2]]),
    ({"$defs": {"tree": thing(["leaf"], closed=True, **LEAVES)}} | TREE, [{"leaf": "a", "children": [{"leaf": ""}]}]),
    (thing(["v"], v=TEXT, next={"anyOf": [{"$ref": "#"}, {"type": "null"}]}), [{"v": "a", "next": {"v": "b", "next": None}}]),
    ({"type": "integer", "multipleOf": 15, "minimum": -30, "maximum": 400}, [-30, 0, 15, 390]),
    ({"type": "integer", "multipleOf": 360}, [0, -360, 7200]),
    ({"type": "number", "multipleOf": 0.5}, [0, -2.5, 7]),
    ({"type": "array", "items": {"enum": ["x", "y", "z"]}, "uniqueItems": True}, [[], ["z", "x"], ["x", "y", "z"]]),
    ({"type": "object", "propertyNames": {"pattern": "^[a-z]+$"}, "additionalProperties": COUNT}, [{}, {"ab": 1}]),
    ({"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": FLAG}, [{"b": True, "a": False}]),
    (thing(["l", "r"]) | {"propertyNames": {"enum": ["l", "r"]}, "additionalProperties": FLAG}, [{"l": True, "r": False}]),
    (thing(["r"], l=COUNT, x=COUNT) | {"propertyNames": {"enum": ["l", "r", "m"]}}, [{"r": 1}, {"l": 1, "r": 2}]),
    ({"type": "object", "patternProperties": {"^n_": NUMBER}, "additionalProperties": False}, [{"n_": 1, "n_x": -0.5}]),
]  # fmt: skip

# Schemas drawn beside these, and random texts of each.
N_DRAWN, N_WALKS = 40, 12


def draw_schema(rng, depth=0):
    """A schema and a value of it."""
    kind = rng.randrange(8 if depth < 3 else 3)
    if kind < 3:
        schema, values = rng.choice(SCHEMAS[2:38])
        return schema, rng.choice(values)
    if kind == 3:
        schema, value = draw_schema(rng, depth + 1)
        n = rng.randrange(3)
        return {"type": "array", "items": schema, "minItems": n, "maxItems": n + 1}, [value] * n
    if kind == 4:
        drawn = [draw_schema(rng, depth + 1) for _ in range(rng.randint(1, 3))]
        return {"anyOf": [s for s, _ in drawn]}, rng.choice(drawn)[1]
    if kind == 5:
        schema, value = draw_schema(rng, depth + 1)
        return {"type": "object", "additionalProperties": schema}, {"key": value}
    drawn = {f"k{i}": draw_schema(rng, depth + 1) for i in range(rng.randrange(4))}
    required = [k for k in drawn if rng.random() < 0.5]
    value = {k: v for k, (_, v) in drawn.items() if k in required or rng.random() < 0.5}
    return thing(required, closed=True, **{k: s for k, (s, _) in drawn.items()}), value


def cases():
    rng = random.Random(7)
    return SCHEMAS + [(schema, [value]) for schema, value in (draw_schema(rng) for _ in range(N_DRAWN))]


def ask(grammar_driver, requests):
    lines = "".join(json.dumps(r) + "\n" for r in requests)
    done = subprocess.run([grammar_driver], input=lines, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def is_valid(schema, value):
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    return jsonschema.Draft202012Validator(schema, format_checker=checker).is_valid(value)


@pytest.fixture(scope="module")
def other():
    """Whether llguidance lets values of a schema through; None: it does not know the schema."""
    tokenizer = llguidance.LLTokenizer("byte")

    def judge(schema, values):
        options = {"whitespace_flexible": True, "coerce_one_of": True}
        known = {} if schema is True else schema
        matcher = llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_json_schema(known, options))
        return None if matcher.is_error() else [is_let(matcher, value) for value in values]

    def is_let(matcher, value):
        # It takes few escapes, and no DEL within a string.
        data = list(json.dumps(value, ensure_ascii=False).replace("\x7f", "x").encode())
        matcher.reset()
        return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()

    return judge


@pytest.mark.parametrize("is_free", [False, True])
def test_values_are_let_through(grammar_driver, is_free):
    """A schema's values, and of all others' none that it does not allow."""
    every = [value for _, values in SCHEMAS for value in values]
    asked = []
    for schema, values in cases():
        texts = [json.dumps(value, ensure_ascii=False) for value in values + every]
        asked.append({"schema": schema, "is_free": is_free, "texts": texts})
    for request, (schema, values), answer in zip(asked, cases(), ask(grammar_driver, asked), strict=True):
        assert "error" not in answer, (schema, answer)
        assert all(answer["lets"][: len(values)]), (schema, values, answer["lets"][: len(values)])
        for value, is_let in zip(values + every, answer["lets"], strict=True):
            assert not is_let or is_valid(schema, value), (schema, value)


@pytest.mark.parametrize("is_free", [False, True])
def test_texts_are_valid(grammar_driver, other, is_free):
    asked = [{"schema": s, "is_free": is_free, "walks": N_WALKS} for s, _ in cases()]
    n_texts = n_judged = 0
    for (schema, _), answer in zip(cases(), ask(grammar_driver, asked), strict=True):
        assert "error" not in answer, (schema, answer)
        values = [json.loads(text) for text in answer["walks"]]
        judged = other(schema, values)
        for i, value in enumerate(values):
            assert is_valid(schema, value), (schema, answer["walks"][i])
            assert judged is None or judged[i], (schema, answer["walks"][i])
        n_texts += len(values)
        n_judged += len(judged or [])
    n_unknown = sum("uniqueItems" in s or "propertyNames" in s for s, _ in SCHEMAS if isinstance(s, dict))
    assert n_texts > 8 * len(asked) and n_judged == n_texts - n_unknown * N_WALKS  # llguidance has neither
