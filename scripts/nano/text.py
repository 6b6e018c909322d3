"""The tokenizer, the chat template, and the packing of documents into rows."""

import json
import random
from pathlib import Path

import jinja2
import numpy as np
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

CONTROL = ["<|endoftext|>", "<|bos|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
MARKUP = ["<think>", "</think>", "<tool_call>", "</tool_call>"]  # visible in decoded text
PAD, BOS, END, SYSTEM, USER, ASSISTANT, TOOL = range(7)
VOCAB = 4096
CONTEXT = 32768  # tokens, after lengthen.py
# Words, single digits, punctuation, white space (the Qwen2 pattern).
PATTERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
           r"|\s*[\r\n]+|\s+(?!\S)|\s+")


def train_tokenizer(texts) -> Tokenizer:
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(PATTERN), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=CONTROL + MARKUP, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tok.train_from_iterator(texts, trainer)
    data = json.loads(tok.to_str())
    for token in data["added_tokens"]:
        token["special"] = token["content"] in CONTROL
    return Tokenizer.from_str(json.dumps(data))


def tokenizer_config() -> dict:
    added = {str(i): {"content": t, "lstrip": False, "normalized": False, "rstrip": False,
                      "single_word": False, "special": t in CONTROL}
             for i, t in enumerate(CONTROL + MARKUP)}
    return {"added_tokens_decoder": added, "add_bos_token": False, "add_eos_token": False,
            "bos_token": "<|bos|>", "eos_token": "<|end|>", "pad_token": "<|endoftext|>",
            "clean_up_tokenization_spaces": False, "model_max_length": CONTEXT,
            "tokenizer_class": "PreTrainedTokenizerFast"}


class Template:
    """The chat template, in the sandbox and with the settings that transformers uses."""

    def __init__(self, path: Path):
        env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                            extensions=["jinja2.ext.loopcontrols"])
        env.filters["tojson"] = lambda x: json.dumps(x, ensure_ascii=False)
        env.globals["raise_exception"] = self.fail
        self.template = env.from_string(path.read_text())

    @staticmethod
    def fail(message):
        raise jinja2.exceptions.TemplateError(message)

    def __call__(self, messages, tools=None, add_generation_prompt=False, **variables):
        return self.template.render(messages=messages, tools=tools, bos_token="<|bos|>", eos_token="<|end|>",
                                    add_generation_prompt=add_generation_prompt, **variables)


def answer_mask(ids: np.ndarray) -> np.ndarray:
    """True where the token is one the model writes: after <|assistant|></think>, <|end|> included."""
    start = ids == ASSISTANT
    stop = (ids == USER) | (ids == TOOL) | (ids == SYSTEM) | (ids == BOS)
    state = np.zeros(len(ids), np.int8)
    inside = False
    for i in np.flatnonzero(start | stop):
        inside = bool(start[i])
        state[i:] = inside
    state[start] = 0
    state[1:][start[:-1]] = 0  # <think> or </think>: the prompt decides
    return state.astype(bool)


class Packer:
    """First-fit packing of (ids, weights) documents into rows of `length` tokens."""

    def __init__(self, length: int, open_rows: int = 24):
        self.length, self.limit = length, open_rows
        self.open, self.rows = [], []

    def add(self, ids, weight):
        ids, weight = ids[: self.length], weight[: self.length]
        for row in self.open:
            if row[0] + len(ids) <= self.length:
                break
        else:
            if len(self.open) >= self.limit:
                self.open.sort(key=lambda r: -r[0])
                self.rows.append(self.open.pop(0)[1])
            row = [0, []]
            self.open.append(row)
        row[0] += len(ids)
        row[1].append((ids, weight))

    def arrays(self):
        """ids u16, document number u8 (0 is padding), weight u8: each [rows][length]."""
        rows = self.rows + [r[1] for r in self.open]
        shape = (len(rows), self.length)
        ids, doc, weight = np.zeros(shape, np.uint16), np.zeros(shape, np.uint8), np.zeros(shape, np.uint8)
        for i, row in enumerate(rows):
            at = 0
            for n, (d, w) in enumerate(row):
                end = at + len(d)
                ids[i, at:end], doc[i, at:end], weight[i, at:end] = d, n + 1, w
                at = end
        return ids, doc, weight


def shuffled(arrays, seed):
    order = np.random.default_rng(seed).permutation(len(arrays[0]))
    return [a[order] for a in arrays]


def sampled_weights(ids, r: random.Random, user_share: float):
    """1 on the model's own tokens, and on a random share of the rest."""
    mask = answer_mask(ids)
    mask |= np.frombuffer(r.randbytes(len(ids)), np.uint8) < user_share * 256
    mask[0] = False  # nothing predicts the first token
    return mask.astype(np.uint8)
