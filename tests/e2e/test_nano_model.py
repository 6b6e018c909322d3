"""tandem-nano as shipped: its files agree with each other, with the option table and with the hub."""

import json
import re
import struct
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "configs/models/tandem-nano"
sys.path.insert(0, str(ROOT / "scripts"))

from nano import chats, tandem_facts, words  # noqa: E402


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


@pytest.fixture(scope="module")
def suite():
    return [json.loads(line) for line in (MODEL / "suite.jsonl").read_text().splitlines()]


def test_suite_has_200_well_formed_questions(suite):
    assert len(suite) == 200
    assert len({q["id"] for q in suite}) == 200
    assert len({json.dumps([q["messages"], q.get("tools")]) for q in suite}) == 200
    for q in suite:
        assert q["match"] in ("exact", "contains")
        assert q["expect"] and isinstance(q["expect"], str)
        assert q["messages"][-1]["role"] in ("user", "tool")


def test_suite_is_held_out(suite):
    """No question of the suite passes the rule that lets a question into the training rows."""
    for q in suite:
        asked = q["messages"][-1]
        before = q["messages"][:-1] if asked["role"] == "user" else q["messages"]
        question = asked["content"] if asked["role"] == "user" else ""
        assert chats.held_out(chats.Turn(q["kind"], question, "", "", before=before)), q["id"]


def test_generated_answers_hold_what_is_expected():
    """What is trained is what is asked for: every generated answer passes its own check."""
    facts = tandem_facts.FACTS + list(tandem_facts.option_facts(ROOT))
    maker = chats.Maker(facts, tandem_facts.FRAMES, seed=7)
    for _ in range(3000):
        t = maker.turn()
        written = json.dumps(t.call) if t.call else t.answer
        assert t.expect in written and (t.match != "exact" or t.expect == written), t


def test_arithmetic_working_is_right():
    for a in range(100):
        for b in range(100):
            for steps in (chats.add_steps(a, b), chats.sub_steps(max(a, b), min(a, b))):
                for left, right in re.findall(r"([0-9 +-]+) = (\d+)", steps):
                    assert eval(left) == int(right), steps  # noqa: S307 (digits and signs only)


def test_every_option_and_command_named_exists():
    names = {name for name, _, _ in tandem_facts.options(ROOT)}
    # An option may have a row for each command that means something else by it.
    table = (ROOT / "src/options/table.c").read_text()
    rows = re.findall(r"^    \{GROUP_[A-Z]+, \"([a-z-]+)\", (?:0|'.'), OPT_", table, re.M)
    assert names == set(rows)
    commands = set(re.findall(r'X\([A-Z_]+, "([a-z ]+)"', (ROOT / "src/options/options.h").read_text()))
    for _, answer, questions in tandem_facts.FACTS:
        for text in [answer, *questions]:
            assert set(re.findall(r"--([a-z-]+)", text)) <= names, text
    for _, answer, _ in tandem_facts.FACTS:
        if used := re.search(r"(?:Use|of) tandem ([a-z]+(?: tokens| template| perplexity| logits| chat)?)", answer):
            assert used[1] in commands, answer


def test_capitals_and_plurals_are_whole():
    assert len(words.CAPITALS) > 50 and all(k and v for k, v in words.CAPITALS.items())
    assert len(words.PLURALS) > 50


def test_tokenizer(tokenizer):
    config = json.loads((MODEL / "tokenizer_config.json").read_text())
    for number, token in config["added_tokens_decoder"].items():
        assert tokenizer.token_to_id(token["content"]) == int(number)
    assert 4000 <= tokenizer.get_vocab_size() <= 8000
    assert tokenizer.encode("1234").tokens == ["1", "2", "3", "4"]
    text = "Grüße, 東京! 🦊\n\tx = {'a': 10}"
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def header():
    if not (MODEL / "model.safetensors").exists():
        pytest.skip("the weights of tandem-nano are not in this checkout")
    with open(MODEL / "model.safetensors", "rb") as f:
        (length,) = struct.unpack("<Q", f.read(8))
        return json.loads(f.read(length))


def test_weights_are_published_fp8_blocks():
    tensors = header()
    tensors.pop("__metadata__")
    config = json.loads((MODEL / "config.json").read_text())
    assert config["n_routed_experts"] >= 32 and config["num_experts_per_tok"] == 4
    assert 16e6 <= (MODEL / "model.safetensors").stat().st_size <= 32e6
    n_fp8 = 0
    for name, t in tensors.items():
        if t["dtype"] == "F8_E4M3":
            n_fp8 += 1
            rows, columns = t["shape"]
            assert rows % 128 == 0 and columns % 128 == 0, name
            scale = tensors[name + "_scale_inv"]
            assert scale == scale | {"dtype": "F32", "shape": [rows // 128, columns // 128]}, name
    experts = 3 * config["n_routed_experts"] * (config["num_hidden_layers"] + 1 - config["first_k_dense_replace"])
    assert n_fp8 > experts
    index = json.loads((MODEL / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(index) == set(tensors)
    last = f"model.layers.{config['num_hidden_layers']}."
    for part in ("enorm", "hnorm", "eh_proj", "embed_tokens", "shared_head.norm", "shared_head.head"):
        assert f"{last}{part}.weight" in tensors
