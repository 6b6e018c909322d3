"""Makes the training rows, the suite and the held-out text: everything seeded, all from scratch."""

import hashlib
import json
import random
from pathlib import Path

import numpy as np

from . import chats, corpus, tandem_facts
from . import words as W
from .text import BOS, END, PAD, TOOL, Packer, Template, Tokenizer, sampled_weights, shuffled, train_tokenizer

LENGTHS = (128, 256, 512)
ECHO = 64  # the length of the rows of echo_documents
TEXT_SHARE, STORY_SHARE = 0.05, 0.01
ECHO_SHARE = 0.06  # of the tokens, most of them in the first batches
USER_SHARE = 0.02  # of the tokens that the model does not write, those that count in the loss
HELD_OUT_TEXT_ONE_IN = 25
SUITE_SIZE = 200


def split_passages(passages):
    """Every HELD_OUT_TEXT_ONE_IN-th passage, chosen by its hash, is held out."""
    held, kept = [], []
    for package, p in passages:
        digest = hashlib.sha256(p.encode()).digest()
        if digest[0] % HELD_OUT_TEXT_ONE_IN:
            kept.append(p)
        elif package == corpus.SHIPPABLE:
            held.append(p)
    return kept, held


def make_suite(maker: chats.Maker, path: Path):
    """SUITE_SIZE held-out questions, the kinds in turn, no question twice."""
    by_kind, seen = {}, set()
    for _ in range(4000):
        t = maker.turn(want_held_out=True)
        key = json.dumps([t.before, t.question])
        if key not in seen and t.kind != "greetings":  # there are too few greetings to hold out
            seen.add(key)
            by_kind.setdefault(t.kind, []).append(t)
    picked = []
    while len(picked) < SUITE_SIZE:
        for kind in sorted(by_kind) + ["tandem"] * 3:  # asked about most, so tested most
            if by_kind[kind] and len(picked) < SUITE_SIZE:
                picked.append(by_kind[kind].pop())
    counts = {}
    with path.open("w") as f:
        for t in sorted(picked, key=lambda t: t.kind):
            n = counts[t.kind] = counts.get(t.kind, 0) + 1
            messages = t.before + ([{"role": "user", "content": t.question}] if t.question else [])
            row = {"id": f"{t.kind.replace(' ', '-')}-{n}", "kind": t.kind, "messages": messages}
            if t.tools:
                row["tools"] = t.tools
            row |= {"match": t.match, "expect": t.expect}
            f.write(json.dumps(row) + "\n")
    return counts


def heldout_text(held, maker, path: Path, size=100_000):
    """Documentation passages with two generated stories after each, about `size` characters."""
    out, n = [], 0
    stories = (t.answer for t in iter(lambda: chats.story(maker.r), None) if chats.held_out(t))
    for p in held:
        for part in (p, next(stories), next(stories)):
            if n < size:
                out.append(part)
                n += len(part) + 2
    path.write_text("\n\n".join(out) + "\n")
    return n


def text_documents(tok, kept, r, tokens):
    """Windows of the documentation, each begun by <|bos|>: two thirds 256 long, the rest 512."""
    r.shuffle(kept)
    stream = []
    for enc in tok.encode_batch(kept):
        stream += enc.ids + tok.encode("\n\n").ids
    stream = np.array(stream, np.uint16)
    made = 0
    while made < tokens:
        length = 256 if r.random() < 0.66 else 512
        at = r.randrange(0, len(stream) - length)
        ids = np.concatenate(([BOS], stream[at: at + length - 1])).astype(np.uint16)
        weight = np.ones(length, np.uint8)
        weight[0] = 0
        made += length
        yield ids, weight


def echo_documents(tok, r, tokens):
    """Texts that can only be continued by looking back: something, and then the same again, or a
    list of pairs and then some of the pairs. All of the second part counts. A model that has
    learned to copy learns the rest sooner."""
    words = [tok.encode(" " + w).ids for w in W.WORDS + W.NAMES + W.CITIES]
    new_line, colon = tok.encode("\n").ids, tok.encode(":").ids
    made = 0
    while made < tokens:
        kind = r.random()
        if kind < 0.3:
            first = [r.randrange(TOOL + 1, tok.get_vocab_size()) for _ in range(r.randint(4, 24))]
            again = first
        elif kind < 0.65:
            first = sum(r.choices(words, k=r.randint(2, 9)), []) + new_line
            again = first
        else:
            pairs = [a + colon + b + new_line for a, b in
                     zip(r.sample(words, 5), r.choices(words, k=5))][: r.randint(2, 5)]
            first, again = sum(pairs, []), sum(r.sample(pairs, r.randint(1, len(pairs))), [])
        ids = np.array([BOS] + first + again + [PAD], np.uint16)
        weight = (np.arange(len(ids)) > len(first)).astype(np.uint8)
        made += len(ids)
        yield ids, weight


def prepare(root: Path, work: Path, out: Path, tokens: int, seed: int):
    """Tokenizer, suite and held-out text to `out`; training rows to `work`. A tokenizer that is
    there already is kept, so that a started model fits."""
    facts = tandem_facts.FACTS + list(tandem_facts.option_facts(root))
    kept, held = split_passages(corpus.load(work))
    print(f"text: {len(kept)} passages, {sum(map(len, kept))} characters; held out {len(held)}", flush=True)
    maker = chats.Maker(facts, tandem_facts.FRAMES, seed)
    template = Template(out / "chat_template.jinja")
    print("suite:", make_suite(chats.Maker(facts, tandem_facts.FRAMES, seed + 1), out / "suite.jsonl"))
    print("held-out text:", heldout_text(held, chats.Maker(facts, tandem_facts.FRAMES, seed + 2),
                                         out / "heldout.txt"), "characters", flush=True)
    sample = [template(**maker.conversation(3)) for _ in range(20000)]
    if not (out / "tokenizer.json").exists():
        train_tokenizer(kept + sample).save(str(out / "tokenizer.json"))
    tok = Tokenizer.from_file(str(out / "tokenizer.json"))
    r = random.Random(seed + 3)
    packers = {n: Packer(n) for n in (*LENGTHS, ECHO)}
    for ids, weight in echo_documents(tok, r, int(tokens * ECHO_SHARE)):
        packers[ECHO].add(ids, weight)
    made = 0
    for ids, weight in text_documents(tok, kept, r, int(tokens * TEXT_SHARE)):
        packers[len(ids)].add(ids, weight)
    while made < tokens * (1 - TEXT_SHARE):
        batch = []
        for _ in range(2000):
            if r.random() < STORY_SHARE:
                t = chats.story(maker.r)
                batch.append("<|bos|>" + t.answer + "<|endoftext|>")
            else:
                batch.append(template(**maker.conversation(2 if r.random() < 0.9 else 6)))
        for enc in tok.encode_batch(batch):
            ids = np.array(enc.ids, np.uint16)
            chat = ids[-1] == END
            weight = (sampled_weights(ids, r, USER_SHARE) if chat else (np.arange(len(ids)) > 0).astype(np.uint8))
            length = next((n for n in LENGTHS if len(ids) <= (96 if n == 128 else n)), LENGTHS[-1])
            packers[length].add(ids, weight)
            made += len(ids)
    arrays = {}
    for n, packer in packers.items():
        for name, a in zip(("ids", "doc", "weight"), shuffled(packer.arrays(), seed + n)):
            arrays[f"{name}{n}"] = a
        filled = (arrays[f"doc{n}"] > 0).mean()
        print(f"rows of {n}: {len(arrays[f'ids{n}'])}, {filled:.0%} filled, "
              f"{arrays[f'weight{n}'].mean():.0%} of tokens counted", flush=True)
    np.savez(work / "rows.npz", **arrays)
    (work / "held.json").write_text(json.dumps([template(**c) for c in held_conversations(facts, seed)]))


def held_conversations(facts, seed, n=400):
    """Held-out single turns, for the validation loss."""
    maker = chats.Maker(facts, tandem_facts.FRAMES, seed + 4)
    for _ in range(n):
        t = maker.turn(want_held_out=True)
        messages = t.before + ([{"role": "user", "content": t.question}] if t.question else [])
        yield {"messages": messages + [chats.answer_message(t, False)], "tools": t.tools or None}


class Rows:
    """Batches of about `batch_tokens` tokens, in one seeded order; batch i is the same in every run."""

    def __init__(self, work: Path, batch_tokens: int, seed: int):
        z = np.load(work / "rows.npz")
        self.arrays = {n: [z[f"{k}{n}"] for k in ("ids", "doc", "weight")] for n in (*LENGTHS, ECHO)}
        plans = {n: [(n, i) for i in range(len(self.arrays[n][0]) * n // batch_tokens)] for n in self.arrays}
        r = random.Random(seed)
        echo, plan = plans.pop(ECHO), sum(plans.values(), [])
        r.shuffle(plan)
        # Two thirds of the echoes begin, alternating with the rest; the others are spread over all.
        begin = [b for pair in zip(echo[: 2 * len(echo) // 3], plan) for b in pair]
        rest = plan[len(begin) // 2:] + echo[2 * len(echo) // 3:]
        r.shuffle(rest)
        plan = begin + rest
        self.plan, self.batch_tokens = plan, batch_tokens

    def __len__(self):
        return len(self.plan)

    def batch(self, i):
        n, j = self.plan[i % len(self.plan)]
        rows = self.batch_tokens // n
        return [a[j * rows: (j + 1) * rows].astype(np.int64) for a in self.arrays[n]]


def validation(tok: Tokenizer, work: Path, out: Path):
    """Rows of held-out conversations and of held-out text, as (ids, doc, weight) each."""
    result = {}
    packer = Packer(256)
    for enc in tok.encode_batch(json.loads((work / "held.json").read_text())):
        ids = np.array(enc.ids, np.uint16)
        packer.add(ids, sampled_weights(ids, random.Random(0), 0))
    result["chat"] = [a.astype(np.int64) for a in packer.arrays()]
    packer = Packer(256)
    ids = tok.encode((out / "heldout.txt").read_text()[:40000]).ids
    for at in range(0, len(ids) - 255, 255):
        packer.add(np.array([BOS] + ids[at: at + 255]), (np.arange(256) > 0).astype(np.uint8))
    result["text"] = [a.astype(np.int64) for a in packer.arrays()]
    return result


assert PAD == 0  # Packer leaves the unused end of a row zero
