"""tiktoken.model against the `tiktoken` library (scripts/make_tiktoken_golden.py)."""

import json
import shutil
import struct
import subprocess

import pytest
from tokenizers import Tokenizer, models

from test_tokenizer import PARSE_SPECIAL, Driver


@pytest.fixture(scope="module")
def golden(request):
    return request.config.rootpath / "tests/golden/tiktoken"


@pytest.fixture(scope="module")
def cases(golden):
    return json.loads((golden / "cases.json").read_text())["cases"]


class Published(Driver):
    """The C tokenizer on a directory as it is."""

    def __init__(self, program, folder):
        self.program, self.folder = program, folder


def test_ids_and_text(golden, cases, tok_driver):
    driver = Published(tok_driver, golden)
    texts = [text for text, _, _ in cases]
    assert driver.encode(texts, PARSE_SPECIAL) == [ids for _, ids, _ in cases]
    assert driver.encode(texts, 0) == [ids for _, _, ids in cases]
    assert driver.decode([ids for _, ids, _ in cases]) == texts


def test_control_tokens(golden, tok_driver):
    driver = Published(tok_driver, golden)
    n_ranks = len((golden / "tiktoken.model").read_text().splitlines())
    [ids] = driver.encode([f"[BOS]<think><|reserved_token_{n_ranks + 257}|>"])
    assert ids == [n_ranks, n_ranks + 5, n_ranks + 257]
    assert driver.decode([ids], skip_special=True) == ["<think>"]


def drop_byte(text):
    return "\n".join(line for line in text.split("\n") if not line.startswith("gA== "))


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda t: t.replace(" 7\n", " x7\n"), "line 8: must be a token in base64"),
        (lambda t: t.replace(" 7\n", " -7\n"), "line 8: must be a token in base64"),
        (lambda t: "?" + t[1:], "line 1: must be a token in base64"),
        (lambda t: t + "=AAA 9999\n", "must be a token in base64"),
        (lambda t: t + "\n".join(t.split("\n")[:1]), "is listed twice"),
        (lambda t: t.replace(" 7\n", " 6\n"), "id 6 stands for both"),
        (drop_byte, "byte 0x80 has no token"),
        (lambda t: t + "QUFB" * 400 + " 9999\n", "a token of 1200 bytes"),
        (lambda t: "version https://git-lfs.github.com/spec/v1\noid", "git lfs pull"),
        (lambda t: "", "is empty"),
    ],
)
def test_broken_files(change, message, golden, tok_driver, tmp_path):
    (tmp_path / "tiktoken.model").write_text(change((golden / "tiktoken.model").read_text()))
    done = subprocess.run(
        [tok_driver, tmp_path, "encode", "0"], input=struct.pack("=I", 0), capture_output=True
    )
    assert done.returncode == 1
    assert message in done.stderr.decode()
    assert "tiktoken.model" in done.stderr.decode()


def test_tokenizer_json_goes_first(golden, tok_driver, tmp_path):
    shutil.copy(golden / "tiktoken.model", tmp_path)
    tok = Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    assert Driver(tok_driver, tmp_path, tok).encode(["abba"]) == [[0, 1, 1, 0]]
