#!/usr/bin/env python3
"""Writes tests/golden/tiktoken: a small vocabulary as Kimi K2 and Moonlight are published with, and
the ids that the `tiktoken` library gives for texts that are hard on it.

usage: make_tiktoken_golden.py      (needs the packages `tiktoken` and `tokenizers`)
"""

import base64
import json
import sys
from pathlib import Path

import tiktoken
import tokenizers
from tokenizers import Tokenizer, models, trainers

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests/e2e"))

import text_gen  # noqa: E402
import tokenizer_models  # noqa: E402

N_VOCAB = 700
N_CONTROL = 258  # the publishers' code: 256 reserved ones and two
N_TEXTS = 400
NAMED = {0: ("[BOS]", True), 1: ("[EOS]", True), 2: ("<|im_end|>", True), 5: ("<think>", False)}


def train():
    """Tokens as bytes, by rank."""
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = tokenizer_models.byte_level(
        tokenizer_models.split(tokenizer_models.KIMI)
    )
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    corpus = text_gen.strings(4000, 1, ["<|im_end|>"])
    trainer = trainers.BpeTrainer(
        vocab_size=N_VOCAB, initial_alphabet=alphabet, show_progress=False
    )
    tok.train_from_iterator(corpus, trainer)
    whole = {c: bytes([b]) for b, c in tokenizer_models.byte_alphabet().items()}
    vocab = sorted(tok.get_vocab().items(), key=lambda item: item[1])
    return [b"".join(whole[c] for c in text) for text, _ in vocab]


def main():
    tokens = train()
    control = {
        len(tokens) + i: NAMED.get(i, (f"<|reserved_token_{len(tokens) + i}|>", True))
        for i in range(N_CONTROL)
    }
    reference = tiktoken.Encoding(
        "kimi",
        pat_str=tokenizer_models.KIMI,
        mergeable_ranks={token: rank for rank, token in enumerate(tokens)},
        special_tokens={content: rank for rank, (content, _) in control.items()},
    )
    texts = text_gen.strings(N_TEXTS, 2, [content for content, _ in control.values()])
    cases = [
        [t, reference.encode(t, allowed_special="all"), reference.encode_ordinary(t)] for t in texts
    ]
    out = ROOT / "tests/golden/tiktoken"
    out.mkdir(exist_ok=True)
    lines = [f"{base64.b64encode(t).decode()} {rank}\n" for rank, t in enumerate(tokens)]
    (out / "tiktoken.model").write_text("".join(lines))
    named = {
        str(len(tokens) + i): {"content": content, "special": special, "normalized": False}
        for i, (content, special) in NAMED.items()
    }
    config = {"added_tokens_decoder": named, "bos_token": "[BOS]", "eos_token": "[EOS]",
              "tokenizer_class": "TikTokenTokenizer"}
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
    golden = {"versions": {"tiktoken": tiktoken.__version__, "tokenizers": tokenizers.__version__},
              "cases": cases}
    (out / "cases.json").write_text(json.dumps(golden, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
