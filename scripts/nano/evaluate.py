"""Greedy answers of a Nano model to a suite, many questions at once with a KV cache."""

import json

import torch

from .model import on_device, row_inputs
from .text import BOS, END, Template


class Cache:
    """Keys and values of every layer, grown along the time axis."""

    def __init__(self):
        self.kv = {}

    def append(self, layer, k, v):
        if layer in self.kv:
            k0, v0 = self.kv[layer]
            k, v = torch.cat((k0, k), 2), torch.cat((v0, v), 2)
        self.kv[layer] = (k, v)
        return k, v


@torch.no_grad()
def generate(model, prompts, limit=120):
    """Greedy continuations of lists of token ids; prompts are padded on the left."""
    b, longest = len(prompts), max(map(len, prompts))
    ids = torch.zeros(b, longest, dtype=torch.long)
    valid = torch.zeros(b, longest, dtype=torch.bool)
    for i, p in enumerate(prompts):
        ids[i, longest - len(p):] = torch.tensor(p)
        valid[i, longest - len(p):] = True
    pos = (valid.cumsum(1) - 1).clamp_min(0)
    allowed = (valid.unsqueeze(1) & torch.ones(longest, longest, dtype=torch.bool).tril())
    bias = torch.zeros(b, 1, longest, longest).masked_fill_(~allowed.unsqueeze(1), -1e30)
    cache, out, done = Cache(), [[] for _ in range(b)], torch.zeros(b, dtype=torch.bool)
    state = model.trunk(ids, pos, bias, cache)[:, -1]
    pos = pos[:, -1]
    for _ in range(limit):
        token = model.lm_head(state).argmax(-1)
        for i in torch.nonzero(~done).flatten().tolist():
            if int(token[i]) in (END, BOS, 0):
                done[i] = True
            else:
                out[i].append(int(token[i]))
        if done.all():
            break
        pos = pos + 1
        valid = torch.cat((valid, torch.ones(b, 1, dtype=torch.bool)), 1)
        bias = torch.zeros(b, 1, 1, valid.shape[1]).masked_fill_(~valid[:, None, None], -1e30)
        state = model.trunk(token.unsqueeze(1), pos.unsqueeze(1), bias, cache)[:, -1]
    return out


def right(answer: str, match: str, expect) -> bool:
    expected = [expect] if isinstance(expect, str) else expect
    if match == "exact":
        return answer.strip() in expected
    return any(e in answer for e in expected)


def run_suite(model, tok, template: Template, path, thinking=False):
    """Returns {kind: [right, asked]} and the wrong answers."""
    was = model.training
    model.eval()
    rows = sorted((json.loads(line) for line in open(path)), key=lambda r: len(json.dumps(r)))
    score, wrong = {}, []
    for at in range(0, len(rows), 50):
        part = rows[at: at + 50]
        prompts = [tok.encode(template(r["messages"], r.get("tools"), add_generation_prompt=True,
                                       enable_thinking=thinking)).ids for r in part]
        for r, ids in zip(part, generate(model, prompts)):
            answer = tok.decode(ids, skip_special_tokens=True)
            ok = right(answer, r["match"], r["expect"])
            n = score.setdefault(r["kind"], [0, 0])
            n[0] += ok
            n[1] += 1
            if not ok:
                wrong.append((r["id"], (r["messages"][-1].get("content") or ""), answer, r["expect"]))
    model.train(was)
    return score, wrong


@torch.no_grad()
def losses(model, sets):
    """Mean loss per counted token of each validation set, and the expert loads over all of them."""
    was = model.training
    model.eval()
    for m in model.moes():
        m.load.zero_()
    result = {}
    for name, (ids, doc, weight) in sets.items():
        total = count = 0
        for at in range(0, len(ids), 16):
            i, d, w = (on_device(a[at: at + 16]) for a in (ids, doc, weight))
            pos, bias = row_inputs(d[:, :-1])
            h = model.trunk(i[:, :-1], pos, bias)[w[:, 1:] > 0]
            loss = torch.nn.functional.cross_entropy(model.lm_head(h), i[:, 1:][w[:, 1:] > 0], reduction="sum")
            total, count = total + float(loss), count + h.shape[0]
        result[name] = total / count
    load = [(m.load / m.load.mean().clamp_min(1e-9)) for m in model.moes()[:-1]]
    for m in model.moes():
        m.load.zero_()
    model.train(was)
    return result, [(round(float(x.min()), 2), round(float(x.max()), 2)) for x in load]
