"""Chat templates against Python's jinja2: the same text, and failure where it fails."""

import json
import subprocess
from pathlib import Path

import pytest

import conversations
import jinja_cases
import jinja_random
import jinja_reference

# Python compiles what jinja2 makes of a template, and has opinions about it.
pytestmark = pytest.mark.filterwarnings("ignore::SyntaxWarning", "ignore::DeprecationWarning")

ROOT = Path(__file__).resolve().parents[2]
OWN = sorted((ROOT / "src/text/templates").glob("*.jinja"))
NOW_US = int(jinja_reference.NOW.timestamp() * 1e6)


def render_all(template_driver, cases):
    """The driver's answers to (template, variables) pairs."""
    requests = "".join(
        json.dumps({"template": template, "vars": variables, "now_us": NOW_US}) + "\n"
        for template, variables in cases)
    done = subprocess.run([template_driver], input=requests.encode(), capture_output=True, timeout=600)
    assert done.returncode == 0, done.stderr.decode()
    answers = [json.loads(line) for line in done.stdout.decode().split("\n") if line]
    assert len(answers) == len(cases)
    return answers


def difference(template, variables, answer):
    """What is wrong with an answer, or None."""
    # Through JSON, as the driver sees them: tuples become lists.
    text, error = jinja_reference.render(template, json.loads(json.dumps(variables)))
    if text is None:
        return f"jinja2 fails ({error}), not: {answer['text']!r}" if "text" in answer else None
    if answer.get("text") != text:
        return f"jinja2: {text!r}\n  tandem: {answer.get('text', answer.get('error'))!r}"
    return None


def check(template_driver, cases, excused=lambda answer, text: False):
    wrong = []
    for (template, variables), answer in zip(cases, render_all(template_driver, cases)):
        what = difference(template, variables, answer)
        if what and not excused(answer, what):
            wrong.append(f"{template!r}\n  {what}")
    assert not wrong, f"{len(wrong)} of {len(cases)} differ:\n" + "\n".join(wrong[:10])


def test_expressions(template_driver):
    check(template_driver, [("{{ %s }}" % e, jinja_cases.VARIABLES) for e in jinja_cases.EXPRESSIONS])


def test_statements(template_driver):
    check(template_driver, [(t, jinja_cases.VARIABLES) for t in jinja_cases.TEMPLATES])


@pytest.mark.parametrize("seed", range(2))
def test_random_templates(template_driver, seed):
    generator = jinja_random.Generator(seed, list(jinja_cases.VARIABLES))
    cases = [(generator.template(i), jinja_cases.VARIABLES) for i in range(800)]
    check(template_driver, cases, jinja_random.excused)


def model_templates(shared_dir):
    return OWN + sorted((shared_dir / "data" / "chat-templates").glob("*.jinja"))


def test_model_templates(template_driver, shared_dir):
    for path in model_templates(shared_dir):
        template = path.read_text()
        cases = [(template, variables) for _, variables in conversations.matrix()]
        check(template_driver, cases)


def test_typed_text_is_told_apart(template_driver, shared_dir):
    """Each byte the user wrote lies in a span, no byte the template wrote does."""
    marked = str.maketrans({c: chr(0xE000 + ord(c)) for c in map(chr, range(0x21, 0x7F))})

    def mark(value, key=None):
        if isinstance(value, str):
            return value if key in ("role", "type") else value.translate(marked)
        if isinstance(value, list):
            return [mark(v) for v in value]
        if isinstance(value, dict):
            return {k: mark(v, k) for k, v in value.items()}
        return value

    files = model_templates(shared_dir)
    chosen = ("one", "turns", "hostile", "reasoning", "call", "two calls", "inline think")
    cases = [(path.read_text(), {"messages": mark(conversations.CONVERSATIONS[name]),
                                 "tools": [conversations.PLAIN], "bos_token": "<s>",
                                 "add_generation_prompt": True})
             for path in files for name in chosen]
    n_typed = 0
    for (_, variables), answer in zip(cases, render_all(template_driver, cases)):
        if "error" in answer:
            continue
        text = answer["text"].encode()
        inside = bytearray(len(text))
        for begin, end in answer["typed"]:
            assert 0 <= begin < end <= len(text)
            inside[begin:end] = b"\1" * (end - begin)
        position = 0
        for character in answer["text"]:
            n = len(character.encode())
            typed = inside[position]
            assert set(inside[position:position + n]) == {typed}, "a span cuts a character"
            if 0xE000 <= ord(character) < 0xF000:
                assert typed, f"{character!r} at {position} was typed"
                n_typed += 1
            position += n
        if b"<|im_start|>" in text:
            at = text.index(b"<|im_start|>")
            assert not any(inside[at:at + len(b"<|im_start|>")])
    assert n_typed > 1000


def test_prompts_of_published_encoders(template_driver):
    """Of models whose prompts a program describes: scripts/make_prompt_golden.py."""
    cases = json.loads((ROOT / "tests/golden/prompts.json").read_text())
    sources = {path.stem: path.read_text() for path in OWN}
    assert {case["template"] for case in cases} == set(sources)
    answers = render_all(template_driver, [(sources[c["template"]], c["vars"]) for c in cases])
    for case, answer in zip(cases, answers):
        assert answer.get("text") == case["prompt"], (case, answer)


def test_errors_name_the_line(template_driver):
    cases = [("a\n\n{{ 1/0 }}", {}), ("{% if x %}\n{{ y.z.w }}\n{% endif %}", {"x": 1}),
             ("\n{% endif %}", {}), ("\n\n{# x", {}), ("{{ 'a'\n ~ \n raise_exception('no') }}", {})]
    lines = [3, 2, 2, 3, 3]
    for answer, line in zip(render_all(template_driver, cases), lines):
        assert f"line {line}: " in answer["error"], answer


def test_refusals_keep_the_words_of_the_template(template_driver):
    [answer] = render_all(template_driver, [("{{ raise_exception('roles must alternate') }}", {})])
    assert answer["error"].endswith("roles must alternate")
    assert answer["status"] == -1
