"""Sessions of coding agents, Claude Code and Codex, with a model that says what it is told to: it calls
their tools as a good one would, so that every request of a real session is sent.

Run by try_clients.py. With the argument `mcp` it is an MCP server with one tool, for Codex.
"""

import asyncio
import base64
import contextlib
import json
import os
import re
import struct
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

# A template that refuses system messages anywhere but in front, as Qwen's do. The last task that a
# user's message names says which script each message of the assistant's is.
TEMPLATE = """
{%- set ns = namespace(n=0, name='other') -%}
{%- if messages[0].role == 'system' or tools -%}
system
{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}
{% for t in tools or [] %}{{ t | tojson }}
{% endfor %}<|im_end|>
{% endif -%}
{%- for m in messages -%}
{%- if m.role == 'system' -%}
{%- if not loop.first %}{{ raise_exception('System message must be at the beginning.') }}{% endif -%}
{%- elif m.role == 'assistant' -%}
{{ begin[ns.name ~ ns.n] or begin.other0 }}{{ m.content }}{% for c in m.tool_calls or [] -%}
{%- if m.content or not loop.first %}
{% endif %}<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% set ns.n = ns.n + 1 -%}
{%- else -%}
{%- if m.role == 'user' -%}
{%- for name in names if name in m.content %}{% set ns.name = name %}{% set ns.n = 0 %}{% endfor -%}
{%- endif -%}
{{ m.role }}
{{ m.content }}<|im_end|>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ begin[ns.name ~ ns.n] or begin.other0 }}{% endif -%}
"""


def call(name, **arguments):
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"


def picture():
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = b"".join(b"\0" + bytes(3 * 64) for _ in range(64))
    head = struct.pack(">IIBBBBB", 64, 64, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


CONTEXT = ("--ctx-size", "262144", "--kv-cache-tokens", "524288")


@contextlib.contextmanager
def session(tasks, *options):
    """A server that knows the tasks, and a folder for the agent: {} in a script is the folder's path."""
    from scripted_model import write_model
    from serving import Server

    with tempfile.TemporaryDirectory() as home:
        home = Path(home)
        folder = home / "work"
        folder.mkdir()
        (folder / "a.txt").write_text("apple\n")
        (folder / "b.txt").write_text("banana\n")
        (folder / "pic.png").write_bytes(picture())
        scripts = {"other0": "Understood."}
        for name, texts in tasks.items():
            scripts |= {f"{name}{i}": text.replace("{}", str(folder)) for i, text in enumerate(texts)}
        names = "{%- set names = " + json.dumps(list(tasks)) + " -%}"
        write_model(home / "model", scripts, template=names + TEMPLATE, generation_eos=("<|im_end|>",))
        config = home / "model/config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 262144}))
        server = Server(os.environ["TANDEM_BIN"], home / "model", *CONTEXT, *options)
        try:
            yield server, home
        finally:
            server.close()


def refused(server):
    """How many requests were not answered, but for those that the client gave up."""
    statuses = re.findall(r"info: chat (\d+):", server.log())
    assert statuses
    return sum(status not in ("200", "499") for status in statuses)


# ---- Claude Code

CLAUDE = {
    "task-hello": ["Hello, I am a scripted model."],
    "task-look": ["I look.\n" + call("Read", file_path="{}/pic.png"), "I have seen it."],
    "task-shell": [call("Bash", command="ls {}", description="list"), call("Bash", command="false"), "Listed."],
    "task-two": [call("Read", file_path="{}/a.txt") + "\n" + call("Read", file_path="{}/b.txt"), "Both read."],
    "task-edit": [
        call("Read", file_path="{}/a.txt"),
        call("Edit", file_path="{}/a.txt", old_string="apple", new_string="pear"),
        "Edited.",
    ],
    "task-add": [call("mcp__calc__add", a=2, b=3), "Five."],
    "task-search": [call("ToolSearch", query="select:WebFetch", max_results=3), "Searched."],
    "task-wrong": [call("NoSuchTool", x=1), call("Read", file="no"), "Neither worked."],
    "task-think": ["<think>Two and two.</think>Four."],
    "task-long": [" ".join(f"word{i}" for i in range(9000))],
    "summary of the conversation": ["<summary>\nSeveral tasks were done.\n</summary>"],
}


def last_text(name):
    return re.sub("<think>.*</think>", "", CLAUDE[name][-1])


async def claude_session(server, home):
    import claude_agent_sdk as sdk

    os.environ |= {"ANTHROPIC_BASE_URL": server.url, "ANTHROPIC_AUTH_TOKEN": "none", "HOME": str(home)}
    os.environ |= {"CLAUDE_CONFIG_DIR": str(home / "claude"), "ANTHROPIC_MODEL": "model", "IS_SANDBOX": "1"}
    os.environ |= {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "ENABLE_TOOL_SEARCH": "true"}
    image = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(picture()).decode()}
    shown = [{"type": "text", "text": "task-hello: what is this?"}, {"type": "image", "source": image}]

    @sdk.tool("add", "Add two numbers", {"a": int, "b": int})
    async def add(arguments):
        return {"content": [{"type": "text", "text": str(arguments["a"] + arguments["b"])}]}

    async def ask(client, said, interrupts=False):
        async def content():
            yield {"type": "user", "message": {"role": "user", "content": said}, "parent_tool_use_id": None}

        await client.query(said if isinstance(said, str) else content())
        if interrupts:
            await asyncio.sleep(2)
            await client.interrupt()
        async for message in client.receive_response():
            if isinstance(message, sdk.ResultMessage):
                return message

    def options(**more):
        calc = sdk.create_sdk_mcp_server(name="calc", version="1", tools=[add])
        servers = {"calc": calc}
        return sdk.ClaudeAgentOptions(
            mcp_servers=servers, permission_mode="bypassPermissions", cwd=home / "work", stderr=lambda line: None, **more
        )

    async with sdk.ClaudeSDKClient(options()) as client:
        for name in [name for name in CLAUDE if name.startswith("task-") and name != "task-long"]:
            end = await ask(client, f"Please do {name}.")
            assert end.result == last_text(name) and not end.is_error, (name, end)
            if name in ("task-shell", "task-two", "task-add"):  # what was said before comes from the cache
                assert end.usage["input_tokens"] < 4000, end.usage
        assert (home / "work/a.txt").read_text() == "pear\n"
        assert refused(server) == 0, server.log()
        end = await ask(client, shown)  # refused; the client takes the image out and asks again
        assert end.result == last_text("task-hello") and refused(server) == 1, end
        await ask(client, "Please do task-long.", interrupts=True)
        await ask(client, "/compact")
        end = await ask(client, "Please do task-look.")
        assert end.result == last_text("task-look"), end
    async with sdk.ClaudeSDKClient(options(resume=end.session_id)) as client:
        for name in ("task-hello", "task-add"):
            end = await ask(client, f"Please do {name}.")
            assert end.result == last_text(name), end
    assert refused(server) == 1, server.log()


def claude_code():
    with session(CLAUDE) as (server, home):
        asyncio.run(claude_session(server, home))


# ---- Codex

PATCH = '*** Begin Patch\n*** Add File: new.txt\n+"hello" \\ there\n*** End Patch\n'
CODEX = {
    "task-hello": ["Hello, I am a scripted model."],
    "task-look": ["I look.\n" + call("view_image", path="{}/pic.png"), "I have seen it."],
    "task-shell": [call("exec_command", cmd="cat a.txt"), call("exec_command", cmd="false"), "Read."],
    "task-two": [call("exec_command", cmd="echo 1") + "\n" + call("exec_command", cmd="echo 2"), "Both run."],
    "task-patch": [call("apply_patch", input=PATCH), "Patched."],
    "task-add": [  # the MCP server may still be starting
        call("exec_command", cmd="sleep 4"),
        call("tool_search", query="add two numbers"),
        call("mcp__calc__add", a=4, b=5),
        "Nine.",
    ],
    "task-wrong": [call("no_such_tool", x=1), "It did not work."],
    "task-think": ["<think>Two and two.</think>Four."],
    "task-code": [call("functions__exec", input="text((await tools.exec_command({cmd: 'cat a.txt'})).output)"), "Ran."],
}
CONFIG = """
model_provider = "tandem"
approval_policy = "never"
sandbox_mode = "danger-full-access"
[model_providers.tandem]
name = "tandem"
base_url = "%s/v1"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
[mcp_servers.calc]
command = "%s"
args = ["%s", "mcp"]
default_tools_approval_mode = "approve"
"""


def codex():
    import codex_cli_bin

    binary = Path(codex_cli_bin.__file__).parent / "bin/codex"
    # Under one name it keeps MCP's tools back until they are searched for, under the other it sends all
    # tools as an item of the input.
    with session(CODEX, "--served-model-name", "gpt-5.5,gpt-6-sol") as (server, home):
        settings = home / "codex"
        settings.mkdir()
        (settings / "config.toml").write_text(CONFIG % (server.url, sys.executable, Path(__file__).resolve()))

        def run(task, *words, model="gpt-5.5"):
            done = subprocess.run(
                [binary, "exec", *words, "-m", model, "--json", "--skip-git-repo-check", f"Please do {task}."],
                env=os.environ | {"CODEX_HOME": str(settings), "HOME": str(home)},
                cwd=home / "work",
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
            )
            events = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
            items = [event["item"] for event in events if event["type"] == "item.completed"]
            assert items and items[-1].get("text") == re.sub("<think>.*</think>", "", CODEX[task][-1]), (task, events)
            return items

        run("task-hello")
        for task in [task for task in CODEX if task not in ("task-hello", "task-code")]:
            items = run(task, "resume", "--last")
            if task == "task-add":
                assert items[-2]["result"]["structured_content"] == {"result": 9}, items
        assert (home / "work/new.txt").read_text() == '"hello" \\ there\n'
        items = run("task-code", model="gpt-6-sol")
        assert items[0]["aggregated_output"] == "apple\n", items
        assert refused(server) == 0, server.log()


def mcp_server():
    schema = {"type": "object", "properties": {n: {"type": "integer"} for n in "ab"}, "required": ["a", "b"]}
    for line in sys.stdin:
        asked = json.loads(line)
        result, given = {}, asked.get("params") or {}
        if asked["method"] == "initialize":
            result = {"protocolVersion": given["protocolVersion"], "capabilities": {"tools": {}}}
            result["serverInfo"] = {"name": "calc", "version": "1"}
        elif asked["method"] == "tools/list":
            result = {"tools": [{"name": "add", "description": "Add two numbers", "inputSchema": schema}]}
        elif asked["method"] == "tools/call":
            total = sum(given["arguments"].values())
            result = {"content": [{"type": "text", "text": str(total)}], "structuredContent": {"result": total}}
        if "id" in asked:
            print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}), flush=True)


if __name__ == "__main__":
    mcp_server()
