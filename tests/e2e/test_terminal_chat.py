"""`tandem run` without a prompt, as a person at a terminal meets it: editing, commands, reasoning."""

import fcntl
import json
import re
import shutil
import struct
import subprocess
import termios

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
{%- if enable_thinking is defined -%}{{ 'thinking ' }}{{ 'on' if enable_thinking else 'off' }}{%- endif -%}
{%- if reasoning_effort is defined -%}{{ 'effort ' ~ reasoning_effort }}{%- endif -%}
{%- set begin = BEGIN -%}{{- begin[messages[-1].content.split()[0]] -}}
"""

SCRIPTS = {
    "hello": "Good morning to you.",
    "ponder": "<think>It depends, I should think.</think>\n\nYes indeed.",
    "evil": "<think>\x1b]0;owned\x07 a plan</think>Nothing.",
    "count": "one two three four five six seven eight nine ten",
    "code": "```\nthis line of code is wider than the terminal\n```\n\u8a9e\u8a9e\u8a9e\u8a9e and unbreakable-" + "x" * 40,
    "long": "la " * 400,
    "marks": "# Head\n- some **bold** words\n\n`co de` \x1b[5m*x*",
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
    def __init__(self, binary, model, *options, env=None, columns=0):
        models = ("--model", model) if model else ()
        super().__init__(binary, "run", *models, "--temperature", "0", "--threads", "1", *options,
                         env=env)
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
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
    for name in ("/clear", "/retry", "/image FILE", "/system TEXT", "/set NAME VALUE", "/model NAME", "/save FILE",
                 "/load FILE", "/help", "/exit"):
        assert name in chat.ask("/help")
    assert "No response yet" in chat.ask("/retry")
    assert "Unknown command /nothing; /help lists them." in chat.ask("/nothing")
    assert "did you mean /set temperature?" in chat.ask("/temperature 0")
    assert "did you mean /system?" in chat.ask("/sytem x")
    chat.ask("/reset")
    assert "System message set" in chat.ask("/system Be brief.")
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


def test_alt_enter_begins_another_line(chat, tmp_path):
    chat.send(b"hello\x1b\rworld")  # as terminals send it
    assert "Good morning" in chat.ask("")
    assert saved(chat, tmp_path / "chat.json")[0]["content"] == "hello\nworld"


def test_messages_come_back_in_the_next_chat(tandem_bin, model, tmp_path):
    env = {"XDG_STATE_HOME": str(tmp_path)}
    first = Chat(tandem_bin, model, env=env)
    first.ask("hello gr\u00fc\u00dfe")
    first.send(b"count\x1b\rtwice")
    first.ask("")
    second = Chat(tandem_bin, model, env=env)  # beside the first
    second.ask("hello again")
    first.leave()
    second.leave()
    assert (tmp_path / "tandem" / "history").stat().st_mode & 0o777 == 0o600
    third = Chat(tandem_bin, model, env=env)
    for n_up in (1, 2, 4):
        third.ask("\x1b[A" * n_up)
    asked = [m["content"] for m in saved(third, tmp_path / "chat.json")[::2]]
    third.leave()
    assert asked == ["hello again", "count\ntwice", "hello gr\u00fc\u00dfe"]


def test_answers_break_between_words(tandem_bin, model):
    chat = Chat(tandem_bin, model, columns=20)
    lines = chat.ask("count").removeprefix("\x1b[?2004l").split("\r\n")
    assert lines[:3] == ["one two three four", "five six seven eight", "nine ten"]
    lines = re.sub(r"\x1b\[0(;\d+)*m", "", chat.ask("code")).split("\r\n")
    assert lines[1] == "this line of code is wider than the terminal"
    assert lines[3:5] == ["\u8a9e" * 4 + " and", "unbreakable-" + "x" * 40]
    chat.leave()


def test_markdown_becomes_colors(tandem_bin, model):
    chat = Chat(tandem_bin, model, columns=12)
    shown = chat.ask("marks").removeprefix("\x1b[?2004l")
    assert shown.startswith("\x1b[0;1;35mHead\x1b[0m\r\n\x1b[0;2m\u2022\x1b[0m some \x1b[0;1mbold\x1b[0m\r\nwords\r\n\r\n"
                            "\x1b[0;36mco de\x1b[0m\r\n\\x1b[5m"), shown
    chat.leave()
    for env, options in ({"NO_COLOR": "1"}, ()), ({"TERM": "dumb"}, ()), ({}, ("--json",)):
        once = Terminal(tandem_bin, "run", "-m", model, "-p", "marks", "--temperature", "0", *options, env=env)
        assert once.end() == 0
        assert b"# Head" in once.seen and b"**bold**" in once.seen and b"\x1b[0;1" not in once.seen
    once = Terminal(tandem_bin, "run", "-m", model, "-p", "marks", "--temperature", "0")
    assert once.end() == 0 and b"\x1b[0;1mbold\x1b[0m words" in once.seen
    piped = subprocess.run([tandem_bin, "run", "-m", model, "-p", "marks", "--temperature", "0"], capture_output=True)
    assert piped.stdout.decode() == SCRIPTS["marks"] + "\n"


def test_what_is_typed_during_an_answer_waits(chat):
    chat.send(b"long\r")
    chat.wait_for(b"la la la")
    chat.send(b"hello typed ahead\r")
    assert b"typed" not in chat.wait_for(b"tokens/s")
    chat.wait_for(b"hello typed ahead\r\n")
    chat.wait_for(b"Good morning")


def test_ctrl_c_is_not_echoed_into_an_answer(tandem_bin, model, tmp_path):
    endless = shutil.copytree(model, tmp_path / "endless")
    config = json.loads((endless / "config.json").read_text())
    (endless / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1 << 20}))
    chat = Chat(tandem_bin, endless, "-n", "1000000", "--ignore-eos")
    chat.send(b"long\r")
    chat.wait_for(b"la la la")
    chat.send(b"\x03")
    assert b"^C" not in chat.wait_for(b"tokens/s")
    chat.leave()


def test_tab_completes_commands(chat, tmp_path):
    assert "No response yet" in chat.ask("/re\t")
    shown = chat.ask("/s\t\x15/help")  # several: they are listed
    assert all(f"  /{name}" in shown for name in ("set", "save", "system"))
    assert "temperature        0.5" in chat.ask("/set te\t0.5")
    (tmp_path / "a chat.json").write_text('{"messages": []}')
    assert "0 messages loaded" in chat.ask(f"/load {tmp_path}/a\t")
    assert "Good morning" in chat.ask("hello\t")


def test_a_saved_conversation_is_loaded(chat, tmp_path):
    chat.ask("/system Be brief.")
    chat.ask("ponder")
    before = saved(chat, tmp_path / "a.json")
    chat.ask("/clear")
    assert "2 messages loaded" in chat.ask(f"/load {tmp_path}/a.json")
    assert saved(chat, tmp_path / "b.json") == before
    exported = [{"title": "t", "messages": [{"role": "user", "content": "hello"}]}]
    (tmp_path / "page.json").write_text(json.dumps(exported))
    chat.ask(f"/load {tmp_path}/page.json")
    assert "Good morning" in chat.ask("/retry")  # the message that has no answer
    for text, words in (("{}", "no list of messages"), ("[", "a.json"),
                        ('{"messages": [{"role": "tool", "content": "x"}]}', "message 0: its role")):
        (tmp_path / "a.json").write_text(text)
        assert words in chat.ask(f"/load {tmp_path}/a.json")
    assert "/nowhere" in chat.ask("/load /nowhere") and "Name a file" in chat.ask("/load")
    assert len(saved(chat, tmp_path / "c.json")) == 2  # what was there stays


def test_settings(chat):
    shown = chat.ask("/set")
    assert re.search(r"temperature +0\r\n", shown) and re.search(r"top-k +\d+ \(the model's\)", shown)
    assert "temperature        0.25" in chat.ask("/set temperature 0.25")
    assert "(the model's)" in chat.ask("/set temperature")
    assert "top-p              0.5" in chat.ask("/set top_p 0.5")
    assert "from 0 to 1" in chat.ask("/set top-p 2")
    assert "Unknown setting nothing" in chat.ask("/set nothing 1")
    assert "n-predict          3" in chat.ask("/set n-predict 3")
    assert "limit of 3 tokens" in chat.ask("hello")
    assert "thinking           on" in chat.ask("/set thinking on")
    assert "effort             low" in chat.ask("/set effort low")
    assert "System message set" in chat.ask("/set system Be brief.")


def test_thinking_and_effort_reach_the_template(tandem_bin, model):
    def prompt_tokens(*options):
        done = subprocess.run([tandem_bin, "run", "--model", model, "-p", "hello", "--json", *options],
                              capture_output=True, check=True)
        return json.loads(done.stdout)["n_prompt"]

    plain, on, off = prompt_tokens(), prompt_tokens("--thinking", "on"), prompt_tokens("--thinking", "off")
    assert on == plain + len("thinking on") and off >= plain + len("thinking off")
    assert prompt_tokens("--effort", "none") == off  # however the template is told
    assert prompt_tokens("--effort", "medium") - prompt_tokens("--effort", "low") == len("medium") - len("low")


def test_models_change_within_a_chat(tandem_bin, model, tmp_path):
    for name in ("alpha", "beta"):
        shutil.copytree(model, tmp_path / name)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{}")
    chat = Chat(tandem_bin, None, "--models", tmp_path)
    chat.ask("hello")
    shown = chat.ask("/model")
    assert all(f"  {name}\r\n" in shown for name in ("alpha", "beta", "broken"))
    assert "Unknown model gamma" in chat.ask("/model gamma")
    assert re.search(r"beta, \d+ tokens of context", chat.ask("/model be\t"))
    assert "Good morning" in chat.ask("/retry")  # the conversation is still there
    shown = chat.ask("/model broken")
    assert "config.json" in shown
    assert "Good morning" in chat.ask("hello")  # by beta again
    chat.leave()


def test_one_model_does_not_change(chat):
    assert "--models DIR" in chat.ask("/model")


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
