"""A server of scripted answers, and what speaks to it: what the tests of the protocols share."""

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
    "object": '{"n": 13}',
    "patch": '<tool_call>\n{"name": "apply_patch", "arguments": {"input": "*** Begin\\n+\\"q\\" é"}}\n</tool_call>',
    "find": '<tool_call>\n{"name": "tool_search", "arguments": {"query": "q"}}\n</tool_call>',
    "log": '<tool_call>\n{"name": "mcp__git__log", "arguments": {"n": 2}}\n</tool_call>',
}
MODEL = "scripted"
KEYED = {"Authorization": "Bearer secret"}
SEEN = ["later", "never_yet"]  # tools that the template shows, each as often as its place says


@pytest.fixture(scope="module")
def server(tandem_bin, tmp_path_factory):
    out = tmp_path_factory.mktemp("models") / MODEL
    write_model(out, SCRIPTS)
    config = out / "tokenizer_config.json"
    lines = "{%- for m in messages %}{%- if m.role == 'system' and not loop.first -%}"
    lines += "{{ raise_exception('System message must be at the beginning.') }}{%- endif -%}"
    lines += "{%- if m.tool_calls %}[{{ m.tool_calls[0].function.name }}]"
    lines += "{%- endif %}{{- m.role ~ ':' ~ (m.content or '') ~ (m.reasoning_content or '') ~ '|' -}}"
    lines += "{%- endfor -%}"
    lines += "{%- if reasoning_effort|default('low') not in ['no_think', 'low', 'high'] -%}"
    lines += "{{ raise_exception('reasoning_effort') }}{%- endif -%}"
    lines += "{%- if messages[-1].content == 'switch' -%}{{ '<|think|>' if thinking is defined and "
    lines += "thinking and reasoning_effort|default('low') != 'no_think' else '<|short|>' }}{%- endif -%}"
    lines += "{%- for t in tools or [] if t.function.name in SEEN %}{% for _ in range(loop.index) -%}"
    lines += "+{{ t.function.name }}{% endfor %}{% endfor -%}"
    lines = lines.replace("SEEN", str(SEEN))
    text = json.loads(config.read_text())
    # The last message that is a script's name says which; before it stands what was said.
    text["chat_template"] = lines + text["chat_template"] + "{#- </think> -#}"
    config.write_text(json.dumps(text))
    keys = out.parent / "keys"
    keys.write_text("other\n")
    keys.chmod(0o600)
    running = Server(tandem_bin, out, "--api-key", "secret", "--api-keys", keys)
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


def prompt_tokens(server, path, body):
    """How long the prompt is that an API makes of a request."""
    reply = post(server, path, {"model": MODEL, **body})
    assert reply.status_code == 200, reply.text
    said = reply.json()
    usage = said.get("usage", said)
    read = usage.get("cache_read_input_tokens", 0)
    return read + next(usage[k] for k in ("prompt_tokens", "input_tokens", "prompt_eval_count") if k in usage)
