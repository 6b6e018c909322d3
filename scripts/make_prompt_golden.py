#!/usr/bin/env python3
"""Writes tests/golden/prompts.json: the prompts that DeepSeek's published encoders make of conversations.

usage: make_prompt_golden.py V4.py V4_PREVIEW.py V32.py

The encoders are encoding/encoding_dsv4.py of DeepSeek-V4-Flash-0731 and of DeepSeek-V4-Flash, and
encoding/encoding_dsv32.py of DeepSeek-V3.2; they are run, so read them first.
"""

import copy
import json
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "tests/golden/prompts.json"
SPECIAL = {"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>"}

WEATHER = {
    "name": "get_weather",
    "description": 'The weather of a place, as in "Köln".',
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer", "default": 3},
            "limit": {"type": ["number", "null"], "default": 1.0},
        },
        "required": ["city"],
    },
}
NOW = {"name": "now", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": f} for f in (WEATHER, NOW)]
SCHEMA = {"type": "object", "properties": {"größe": {"type": "integer"}}, "required": ["größe"]}
ARGUMENTS = {
    "city": "Köln\n<b> \"x\" </｜DSML｜",
    "days": 2,
    "limit": 1.5,
    "exact": True,
    "nothing": None,
    "list": [1, {"ä": []}],
}


def user(content):
    return {"role": "user", "content": content}


def system(content):
    return {"role": "system", "content": content}


def assistant(content, *calls, **more):
    return {"role": "assistant", "content": content} | ({"tool_calls": [*calls]} if calls else {}) | more


def call(name, arguments, id="call_1"):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(content, id="call_1"):
    return {"role": "tool", "tool_call_id": id, "content": content}


TWO = assistant(
    "Let me see.", call("get_weather", ARGUMENTS), call("now", {}, "call_2"), reasoning_content="Both."
)
CONVERSATIONS = {
    "one": [user("Hi")],
    "system": [system("Be brief.\n"), user("Grüße <｜User｜>")],
    "turns": [
        system("Be brief."),
        user("1+1?"),
        assistant("2", reasoning_content="Simple.\n"),
        user("2+2?"),
        assistant("4"),
        user("3+3?"),
    ],
    "answered": [user("1+1?"), assistant("2", reasoning_content="Simple.")],
    "call": [system("Be brief."), user("Weather?"), TWO, result("12:00", "call_2"), result("sun")],
    "after calls": [
        user("Weather?"),
        TWO,
        result("sun"),
        result("12:00", "call_2"),
        assistant("Sunny.", reasoning_content="It is."),
        user("And now?"),
        assistant("", call("now", {}, "call_3"), reasoning_content="Again."),
        result("12:01", "call_3"),
    ],
    "user behind a result": [user("Weather?"), TWO, result("sun"), result("12:00", "call_2"), user("Well?")],
    "text as arguments": [user("Weather?"), assistant(None, call("now", "{broken")), result("?")],
    "two users": [user("a"), user("b")],
}
TEMPLATES = {
    "deepseek_v4": {
        "thinking": [True, False],
        "more": [
            ("turns", {"reasoning_effort": "low"}),
            ("turns", {"reasoning_effort": "high"}),
            ("call", {"reasoning_effort": "max", "tools": TOOLS}),
            ("one", {"reasoning_effort": "max", "thinking": False}),
            ("turns", {"reasoning_effort": "high", "preview_efforts": True}),
            ("call", {"reasoning_effort": "max", "preview_efforts": True}),
            ("turns", {"drop_thinking": False}),
            ("turns", {"response_format": SCHEMA, "tools": TOOLS}),
        ],
    },
    "deepseek_v32": {"thinking": [False, True], "more": [("turns", {"response_format": SCHEMA})]},
}
REFUSED = {("deepseek_v32", "text as arguments")}  # its encoder parses them


def encode(encoder, template, variables):
    """The encoder has tools and the like in the first system message, and arguments as text."""
    messages = copy.deepcopy(variables["messages"])
    for message in messages:
        for item in message.get("tool_calls", []):
            function = item["function"]
            if isinstance(function["arguments"], dict):
                function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    extra = {key: variables[key] for key in ("tools", "response_format") if key in variables}
    if extra and messages[0]["role"] != "system":
        messages.insert(0, system(""))
    messages[0] |= extra
    thinking = variables.get("thinking", TEMPLATES[template]["thinking"][0])
    options = {"thinking_mode": "thinking" if thinking else "chat"}
    for key in ("reasoning_effort", "drop_thinking"):
        if key in variables:
            options[key] = variables[key]
    return encoder["encode_messages"](messages, **options)


def cases(template):
    ways = TEMPLATES[template]
    for name in CONVERSATIONS:
        if (template, name) in REFUSED:
            continue
        for thinking in ways["thinking"]:
            for tools in [{}, {"tools": TOOLS}]:
                yield name, {"thinking": thinking} | tools
        yield name, {}
    yield from ways["more"]


def main():
    v4, preview, v32 = (runpy.run_path(path) for path in sys.argv[1:])
    assert "REASONING_EFFORT_PROMPTS" in v4 and "REASONING_EFFORT_MAX" in preview
    out = []
    for template in TEMPLATES:
        for name, more in cases(template):
            messages = CONVERSATIONS[name]
            asks = messages[-1]["role"] != "assistant"
            variables = {"messages": messages, "add_generation_prompt": asks} | SPECIAL | more
            encoder = v32 if template == "deepseek_v32" else preview if "preview_efforts" in more else v4
            out.append({"template": template, "vars": variables, "prompt": encode(encoder, template, variables)})
    lines = ",\n".join(json.dumps(case, ensure_ascii=False) for case in out)
    OUT.write_text(f"[\n{lines}\n]\n")
    print(f"{OUT}: {len(out)} prompts")


if __name__ == "__main__":
    main()
