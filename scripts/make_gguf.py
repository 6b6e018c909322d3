#!/usr/bin/env python3
"""Writes a GGUF file of random blocks at a published shape, for benchmarks against llama.cpp.

Formats are chosen a tensor as llama-quantize does for Q4_K_M and IQ4_XS; other names are the format of
all matrices. What the model says is noise; its vocabulary has the published size and no words.
"""

import argparse

import numpy as np

import architectures
import gguf_files
import shapes
from gguf_files import Tensor

MIXES = {"Q4_K_M": "Q4_K", "IQ4_XS": "IQ4_XS"}
POOL = 1 << 20  # columns of blocks, which matrices repeat


def gets_more_bits(layer, n):
    """Layers whose values and down projections llama-quantize gives more bits in a mix."""
    return layer < n // 8 or layer >= 7 * n // 8 or (layer - n // 8) % 3 == 2


def format_of(quant, name, n_layers):
    if quant not in MIXES:
        return quant
    base = MIXES[quant]
    if name == "output.weight":
        return "Q6_K"
    layer = int(name.split(".")[1]) if name.startswith("blk.") else 0
    if quant == "IQ4_XS":
        return "Q5_K" if name.endswith("attn_v.weight") else base
    if name.endswith(("attn_v.weight", "ffn_down_exps.weight")) and gets_more_bits(layer, n_layers):
        return "Q6_K"
    return base


class Blocks:
    def __init__(self):
        self.rng, self.pools = np.random.default_rng(7), {}

    def tensor(self, name, shape, dtype):
        if dtype not in self.pools:
            self.pools[dtype] = gguf_files.random_blocks(dtype, (1, POOL), 1.0, self.rng)[0]
        _, cols, n_bytes, halves, _ = gguf_files.BLOCKS[dtype]
        n = int(np.prod(shape)) // cols
        data = np.resize(self.pools[dtype], n * n_bytes).reshape(n, n_bytes)
        for at in halves:
            gguf_files.put_half(data, at, gguf_files.half(data, at)[:, 0] * shape[-1] ** -0.5)
        return Tensor(name, shape, dtype, data.reshape(-1))


def tensors(config, quant):
    blocks, rng = Blocks(), np.random.default_rng(8)
    empty = {t.name: np.broadcast_to(np.int8(0), t.shape) for t in architectures.tensors(config)}
    for name, v in gguf_files.named(config, empty):
        if v.ndim < 2:
            yield Tensor.of_values(name, rng.normal(1, 0.1, v.shape))
        elif "gate_inp" in name:
            yield Tensor.of_values(name, rng.normal(0, v.shape[-1] ** -0.5, v.shape))
        else:
            yield blocks.tensor(name, v.shape, format_of(quant, name, config["num_hidden_layers"]))


def vocabulary(size):
    """Bytes, and tokens that no text becomes."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = [chr(b) for b in plain] + [chr(0x100 + i) for i in range(256 - len(plain))]
    tokens = letters + ["Ġt"] + [f"[PAD{i}]" for i in range(size - 257)]
    return gguf_files.vocabulary(tokens, [1] * 257 + [5] * (size - 257), merges=["Ġ t"])


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--shape", default="qwen3-30b-a3b", choices=[s for s in shapes.SHAPES if architectures.text_config(
        shapes.SHAPES[s][0])["model_type"] in gguf_files.ARCHS])
    p.add_argument("--quant", default="Q4_K_M", choices=sorted({*MIXES, *gguf_files.BLOCKS}))
    p.add_argument("--layers", type=int, required=True)
    p.add_argument("--out", required=True)
    args = p.parse_args()
    config = shapes.config_of(args.shape, args.layers)
    metadata = gguf_files.metadata_of(config) | vocabulary(config["vocab_size"])
    gguf_files.write(args.out, metadata, list(tensors(config, args.quant)))


if __name__ == "__main__":
    main()
