"""`tandem run` without a prompt, as a person at a terminal meets it: editing, commands, reasoning."""

import json
import re
import subprocess

import pytest
from scripted_model import write_model
from terminal import Terminal

# A message is the name of a script, and perhaps more words. Earlier messages are rendered too, so
# that they fill the context; reasoning that came back as content would be an error.
TEMPLATE = """
{%- for m in messages -%}
  {%- if 'think' in m.content and m.role == 'assistant' -%}{{ raise_exception('reasoning came back') }}{%- endif -%}
  {{- m.content -}}
{%- endfor -%}
{%- set begin = BEGIN -%}{{- begin[messages[-1].content.split()[0]] -}}
"""

SCRIPTS = {
    "hello": "Good morning to you.",
    "ponder": "<think>It depends, I should think.</think>\n\nYes indeed.",
    "evil": "<think>\x1b]0;owned\x07 a plan</think>Nothing.",
    "count": "one two three four five six seven eight nine ten",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    out = tmp_path_factory.mktemp("chat") / "scripted"
    write_model(out, SCRIPTS)
    path = out / "tokenizer_config.json"
    config = json.loads(path.read_text())
    begin = "{" + ", ".join(f"'{name}': '<|{name}|>'" for name in SCRIPTS) + "}"
    config["chat_template"] = TEMPLATE.replace("BEGIN", begin)
    path.write_text(json.dumps(config))
    return out


PROMPT = re.compile(rb"\r\n(\x1b\[\?2004h)?> $")


class Chat(Terminal):
    def __init__(self, binary, model, *options, env=None):
        super().__init__(binary, "run", "--model", model, "--temperature", "0", "--threads", "1",
                         *options, env=env)
        self.wait_for(b"/help")
        self.wait_for(b"> ")

    def ask(self, text, end="\r"):
        """Types a line; returns what is shown until the next prompt."""
        self.send((text + end).encode())
        self.wait_for(b"\r\n")
        self.read_until(lambda: PROMPT.search(self.seen), "the prompt")
        shown, self.seen = self.seen, b""
        return PROMPT.sub(b"", shown).decode()

    def leave(self):
        self.send(b"\x04")
        assert self.end() == 0


@pytest.fixture
def chat(tandem_bin, model):
    opened = Chat(tandem_bin, model)
    yield opened
    opened.leave()


def saved(chat, path):
    chat.ask(f"/save {path}")
    return json.loads(path.read_text())["messages"]


def test_reasoning_is_dimmed_and_not_part_of_the_answer(chat, tmp_path):
    shown = chat.ask("ponder")
    assert re.search(r"\x1b\[2mIt depends, I should think\.\x1b\[0m\s+Yes indeed\.\r\n", shown), shown
    assert "<think>" not in shown
    assert "Good morning to you." in chat.ask("hello")  # the template accepted the history
    first, second, third, _ = saved(chat, tmp_path / "chat.json")
    assert first == {"role": "user", "content": "ponder"}
    assert second == {"role": "assistant", "content": "Yes indeed.",
                      "reasoning_content": "It depends, I should think."}
    assert third == {"role": "user", "content": "hello"}


def test_reasoning_cannot_drive_the_terminal(chat):
    shown = chat.ask("evil")
    assert "\\x1b]0;owned\\x07 a plan" in shown and "\x1b]" not in shown and "\x07" not in shown


@pytest.mark.parametrize("env", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_without_colors_reasoning_is_marked(tandem_bin, model, env):
    chat = Chat(tandem_bin, model, env=env)
    shown = chat.ask("ponder")
    assert "thinking: It depends" in shown and "\x1b[2m" not in shown
    chat.leave()


def test_lines_can_be_edited_and_come_back(chat):
    assert "Good morning" in chat.ask("hellx\x7fo")  # backspace
    assert "Good morning" in chat.ask("ello\x01h")  # Ctrl-A
    assert "one two three" in chat.ask("count")
    assert "Good morning" in chat.ask("\x1b[A\x1b[A")  # two lines up
    assert "Good morning" in chat.ask("hello gr\u00fc\u00dfe \u65e5\u672c")


def test_messages_of_several_lines(chat, tmp_path):
    chat.send(b"hello \\\r")
    chat.wait_for(b". ")
    assert "Good morning" in chat.ask("world")
    chat.send(b'"""hello\r')
    chat.wait_for(b". ")
    chat.send(b"\r")
    chat.wait_for(b". ")
    assert "Good morning" in chat.ask('and more"""')
    chat.send(b"\x1b[200~hello\rpasted\ttext\r\x1b[201~")  # no line break of it sends it
    assert "Good morning" in chat.ask("end")
    asked = [m["content"] for m in saved(chat, tmp_path / "chat.json") if m["role"] == "user"]
    assert asked == ["hello \nworld", "hello\n\nand more", "hello\npasted\ttext\nend"]


def test_commands(chat, tmp_path):
    for name in ("/clear", "/retry", "/system TEXT", "/save FILE", "/help", "/exit"):
        assert name in chat.ask("/help")
    assert "no response yet" in chat.ask("/retry")
    assert "There is no command /nothing" in chat.ask("/nothing")
    assert "is set" in chat.ask("/system Be brief.")
    chat.ask("hello")
    assert "Good morning" in chat.ask("/retry")
    messages = saved(chat, tmp_path / "a.json")
    assert messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"},
                        {"role": "assistant", "content": SCRIPTS["hello"]}]
    assert "Name a file" in chat.ask("/save")
    assert "nowhere" in chat.ask("/save /nowhere/at/all")
    chat.ask("/clear")
    assert [m["role"] for m in saved(chat, tmp_path / "b.json")] == ["system"]
    chat.ask("/system")
    assert saved(chat, tmp_path / "c.json") == []


def test_exit_ends(tandem_bin, model):
    chat = Chat(tandem_bin, model)
    chat.send(b"/exit\r")
    assert chat.end() == 0


def test_a_full_context_slides(tandem_bin, model, tmp_path):
    chat = Chat(tandem_bin, model, "--ctx-size", "256", "-n", "64")
    message = "hello " + "x" * 60
    shown = [chat.ask(message) for _ in range(4)]
    assert all("Good morning to you." in s for s in shown)
    assert "is full" not in shown[0] and any("oldest messages are no longer part" in s for s in shown)
    too_long = chat.ask("hello " + "y" * 300)
    assert "oldest" not in too_long
    assert "307" in too_long and "256" in too_long and "--ctx-size" in too_long
    assert "Good morning" in chat.ask("hello")
    messages = saved(chat, tmp_path / "chat.json")
    assert len(messages) == 10 and not any("y" * 300 in m["content"] for m in messages)
    chat.leave()


def test_one_prompt_prints_only_the_answer(tandem_bin, model):
    done = subprocess.run([tandem_bin, "run", "--model", model, "--temperature", "0"],
                          input=b"ponder\n", capture_output=True, check=True)
    assert done.stdout == b"Yes indeed.\n"
    assert b"\r" not in done.stderr and b"It depends" not in done.stderr
    done = subprocess.run([tandem_bin, "run", "--model", model, "-p", "ponder", "-n", "3", "--temperature", "0"],
                          capture_output=True, check=True)
    assert done.stdout == b"\n" and b"ended the reasoning" in done.stderr
