"""Takes a trained Nano from rows of 512 tokens to a context of 32,768.

Most of a long context is text that the answer does not need: instructions, what was read before. A row here is one conversation behind such text, and its positions are stretched: gaps
between tokens put the end of the row anywhere up to the context's length (positional skip-wise training,
arXiv 2309.10400), so that every rotation is seen though a row holds 2,048 or 4,096 tokens. Every other
step has rows as in training, which keeps short answers as they are.
"""

import random

import numpy as np
import torch
from safetensors.torch import load_file

from . import chats, corpus, tandem_facts
from .data import USER_SHARE, split_passages
from .export import published_name
from .model import Nano
from .quant import dequantize
from .text import ASSISTANT, CONTEXT, USER, Packer, sampled_weights


@torch.no_grad()
def load_export(model: Nano, path):
    """Sets the model's parameters from an export of export.py, in FP8 or BF16."""
    stored = load_file(path / "model.safetensors")

    def tensor(name):
        scale = stored.get(name + "_scale_inv")
        return stored[name].float() if scale is None else dequantize(stored[name], scale)

    for name, p in model.state_dict().items():
        if ".experts." in name and "shared" not in name:
            base = published_name(name.rsplit(".experts.", 1)[0], model.c.layers) + ".experts"
            for e in range(model.c.experts):
                parts = ("gate", "up") if name.endswith("gate_up") else ("down",)
                p[e].copy_(torch.cat([tensor(f"{base}.{e}.{part}_proj.weight") for part in parts]))
        else:
            p.copy_(tensor(published_name(name, model.c.layers)))


@torch.no_grad()
def average(model: Nano, path, share=0.75):
    """Takes a quarter of what the model began with, which keeps what short rows have taught (the averaging of
    arXiv 2109.01903): 182 of 200 short answers instead of 177, where it began with 183."""
    begun = Nano(model.c)
    load_export(begun, path)
    for p, q in zip(model.state_dict().values(), begun.state_dict().values()):
        p.lerp_(q, 1 - share)


def stretched(ids, r: random.Random):
    """Positions of one row: consecutive but for up to four gaps before its last question; the last
    position is spread evenly over the context."""
    n = len(ids)
    pos = np.arange(n)
    asked = np.flatnonzero((ids == USER) | (ids == ASSISTANT))
    free = r.randint(0, CONTEXT - n - 1)
    places = sorted(r.randint(1, int(asked[-1]) if len(asked) else n - 1) for _ in range(r.randint(1, 4)))
    cuts = sorted(r.randint(0, free) for _ in places[1:])
    for at, width in zip(places, np.diff([0, *cuts, free])):
        pos[at:] += int(width)
    return pos


class Rows:
    """Batches (ids, document, weight, positions or None), made as they are asked for."""

    def __init__(self, root, work, tok, template, seed):
        self.tok, self.template, self.r = tok, template, random.Random(seed + 11)
        self.kept, _ = split_passages(corpus.load(work))
        facts = tandem_facts.FACTS + list(tandem_facts.option_facts(root))
        self.maker = chats.Maker(facts, tandem_facts.FRAMES, seed + 12)

    def filler(self, tokens):
        """Documentation of about that many tokens."""
        text, n = [], 0
        while n < tokens:
            part = self.r.choice(self.kept)
            text.append(part)
            n += len(part) // 3
        return "\n\n".join(text)

    def conversation(self, tokens):
        """The ids of a conversation behind `tokens` tokens of instructions or of a first turn."""
        chat = self.maker.conversation(4)
        body = len(self.tok.encode(self.template(**chat)).ids)
        filler = self.filler(max(0, tokens - body))
        if self.r.random() < 0.7 or chat["messages"][0]["role"] != "user":
            chat["messages"].insert(0, {"role": "system", "content": filler})
        else:
            chat["messages"][:0] = [{"role": "user", "content": filler + "\n\nRead this."},
                                    {"role": "assistant", "content": "I have read it."}]
        return np.array(self.tok.encode(self.template(**chat)).ids)

    def long(self, length, count):
        ids, weight, pos = (np.zeros((count, length), np.int64) for _ in range(3))
        for i in range(count):
            row = self.conversation(self.r.randint(length // 4, length - 64))[-length:]
            ids[i, : len(row)], pos[i, : len(row)] = row, stretched(row, self.r)
            weight[i, : len(row)] = sampled_weights(row, self.r, USER_SHARE)
        return ids, (ids > 0).astype(np.int64), weight, pos

    def short(self, tokens):
        length = self.r.choice((256, 512))
        packer = Packer(length)
        made = 0
        while made < tokens * 1.2:
            ids = np.array(self.tok.encode(self.template(**self.maker.conversation(3))).ids, np.uint16)
            packer.add(ids, sampled_weights(ids, self.r, USER_SHARE))
            made += len(ids)
        return *(a[: tokens // length].astype(np.int64) for a in packer.arrays()), None

    def batch(self, step):
        if step % 2:
            return self.short(4096)
        return self.long(4096, 1) if step % 8 == 0 else self.long(2048, 2)
