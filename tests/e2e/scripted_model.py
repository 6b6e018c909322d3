"""A tiny qwen3_moe checkpoint that says what it is told to, so that a test knows the answer.

Every token has one successor: attention and experts add nothing, and the row of lm_head of a token
points at the embeddings of those in front of it. A user message of one script's name begins it.
"""

import json
import struct
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from checkpoint import to_bf16

DIM = 1024


def byte_letters():
    """The letter by which byte-level vocabularies spell each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(others)}


LETTERS = byte_letters()


def spell(data):
    return "".join(LETTERS[b] for b in data)


def cut(text, taken):
    """Pieces of whole characters that no script has had: each is a token of its own."""
    pieces, piece = [], b""
    for letter in text:
        piece += letter.encode() if isinstance(letter, str) else bytes([letter])
        if len(piece) > 2 and spell(piece) not in taken:
            pieces.append(piece)
            taken.add(spell(piece))
            piece = b""
    while pieces and piece and (spell(piece) in taken or len(piece) < 3):
        before = pieces.pop()
        taken.discard(spell(before))
        piece = before + piece
    if piece:
        taken.add(spell(piece))
        pieces.append(piece)
    return pieces


class Vocabulary:
    def __init__(self, scripts, control):
        self.ids = {LETTERS[b]: b for b in range(256)}
        self.added = {}
        self.successor = {}
        for name in ["<|endoftext|>", "<|im_end|>", *control, *(f"<|{n}|>" for n in scripts)]:
            self.added[name] = 256 + len(self.added)
        self.size = 256 + len(self.added)
        taken = set(self.ids)
        for name, parts in scripts.items():
            chain = [self.added[f"<|{name}|>"]]
            for part in [parts] if isinstance(parts, (str, bytes)) else parts:
                if part in self.added:
                    chain.append(self.added[part])
                    continue
                for piece in cut(part, taken):
                    self.ids[spell(piece)] = self.size
                    chain.append(self.size)
                    self.size += 1
            for a, b in zip(chain, [*chain[1:], self.added["<|im_end|>"]]):
                self.successor[a] = b


def write_safetensors(path, tensors):
    head, at = {}, 0
    for name, bits in tensors.items():
        head[name] = {"dtype": "BF16", "shape": bits.shape, "data_offsets": [at, at + bits.nbytes]}
        at += bits.nbytes
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for bits in tensors.values():
            file.write(bits.tobytes())


def tensors(vocabulary):
    rng = np.random.default_rng(7)
    embed = rng.choice([-1.0, 1.0], size=(vocabulary.size, DIM)).astype(np.float32)
    head = np.zeros_like(embed)
    for token, following in vocabulary.successor.items():
        head[following] += embed[token] * 0.06

    def noise(*shape):
        return rng.normal(0, DIM**-0.5, shape)

    layer = {
        "input_layernorm": np.ones(DIM),
        "post_attention_layernorm": np.ones(DIM),
        "self_attn.q_proj": noise(64, DIM),
        "self_attn.k_proj": noise(32, DIM),
        "self_attn.v_proj": noise(32, DIM),
        "self_attn.o_proj": np.zeros((DIM, 64)),
        "self_attn.q_norm": np.ones(32),
        "self_attn.k_norm": np.ones(32),
        "mlp.gate": noise(4, DIM),
    }
    for e in range(4):
        layer[f"mlp.experts.{e}.gate_proj"] = noise(64, DIM)
        layer[f"mlp.experts.{e}.up_proj"] = noise(64, DIM)
        layer[f"mlp.experts.{e}.down_proj"] = np.zeros((DIM, 64))
    top = {"model.embed_tokens": embed, "lm_head": head, "model.norm": np.ones(DIM)}
    every = top | {f"model.layers.0.{name}": values for name, values in layer.items()}
    return {f"{name}.weight": to_bf16(values) for name, values in every.items()}


def added_token(name, id):
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": id, "content": name, "special": True, **flags}


def byte_level(**more):
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


SAY = "{{- begin[messages[-1].content] -}}"


def write_model(
    out, scripts, control=(), eos=("<|im_end|>",), generation_eos=None, template=SAY
):
    """scripts: what to say, by name; a text, or a list of texts, bytes and control tokens. eos and
    generation_eos: the end tokens of config.json and of generation_config.json, where it is there.
    template: what follows the definition of begin, the control token that begins each script.
    The tokenizer's end token is always <|im_end|>. Returns the ids of the control tokens."""
    out.mkdir(parents=True, exist_ok=True)
    vocabulary = Vocabulary(scripts, control)
    names = vocabulary.added
    tokenizer = {
        "version": "1.0",
        "added_tokens": [added_token(name, id) for name, id in names.items()],
        "normalizer": None,
        "pre_tokenizer": byte_level(),
        "post_processor": None,
        "decoder": byte_level(),
        "model": {"type": "BPE", "vocab": vocabulary.ids, "merges": []},
    }
    answers = ", ".join(f"'{name}': '<|{name}|>'" for name in scripts)
    template = "{%- set begin = {" + answers + "} -%}" + template
    config = {
        "model_type": "qwen3_moe",
        "vocab_size": vocabulary.size,
        "hidden_size": DIM,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "intermediate_size": 64,
        "max_position_embeddings": 4096,
        "eos_token_id": [names[name] for name in eos],
    }
    files = {
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": {"eos_token": "<|im_end|>", "chat_template": template},
        "config.json": config,
    }
    if generation_eos is not None:
        ids = [names[name] for name in generation_eos]
        files["generation_config.json"] = {"eos_token_id": ids, "temperature": 0}
    for name, value in files.items():
        (out / name).write_text(json.dumps(value))
    write_safetensors(out / "model.safetensors", tensors(vocabulary))
    return names
