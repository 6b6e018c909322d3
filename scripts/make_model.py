#!/usr/bin/env python3
"""Writes a checkpoint of random weights in the exact published format.

Activations neither die nor explode, so it runs like the real model and costs the same; what it says
is noise. The same arguments give the same bytes. Values come from one pool of normal numbers for
each scale, read at random offsets, so that large shapes are written at the speed of the disk.
"""

import argparse
import os
import sys
import time
import zlib

import numpy as np

import architectures
import checkpoint
import shapes

POOL = 1 << 24  # elements
# Of models that see; for images of 4 to 64 tokens.
PROCESSOR = {
    "image_mean": [0.5, 0.5, 0.5],
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "image_std": [0.5, 0.5, 0.5],
    "merge_size": 2,
    "patch_size": 16,
    "size": {"longest_edge": 65536, "shortest_edge": 4096},
    "temporal_patch_size": 2,
}
SIGMA_PEAK = 4.5  # E4M3 codes of unit-normal values are scaled so that 4.5 sigma is 448

E2M1_RMS = 2.92  # of 0, 0.5, 1, 1.5, 2, 3, 4 and 6

# Standard deviation times sqrt(fan_in). Queries are a little large so that attention is not
# uniform; logits get a standard deviation of about three.
GAIN = {"q": 2.0, "router": 1.5, "head": 3.0, "mix_down": 5.0, "mix_up": 3.0, "inject": 3.0}


def deviation(tensor, config):
    """Standard deviation of a matrix: unit variance in, unit variance out, times its gain."""
    if tensor.role == "embed":
        return tensor.fan_in**-0.5 if config["tie_word_embeddings"] else 1.0
    if tensor.role == "ngram":
        return 1.0
    std = GAIN.get(tensor.role, 1.0) * tensor.fan_in**-0.5
    if tensor.role in ("o", "down"):  # what enters the residual stream, twice a layer
        std *= (2 * config["num_hidden_layers"]) ** -0.5
    return std


def vector(tensor, rng):
    """float32 values of the one-dimensional tensors."""
    if tensor.role == "router_bias":
        return rng.normal(0, 0.1, tensor.shape).astype(np.float32)
    mean = {"hyper_base": 0.0, "bias": 0.0, "qk_norm": 1.2, "norm1": 0.0, "decay": -3.0, "bounded_decay": 0.0, "bounded_bias": -4.0}.get(tensor.role, 1.0)
    return rng.normal(mean, 0.1, tensor.shape).astype(np.float32)


class Values:
    """Random contents of every tensor: a function of seed and name alone."""

    def __init__(self, config, dtype, seed, n_used_tokens):
        self.config, self.dtype, self.seed = architectures.text_config(config), dtype, seed
        self.n_used_tokens = n_used_tokens
        largest = max(int(np.prod(t.shape)) for t in architectures.tensors(config))
        self.pool = np.random.default_rng(seed).standard_normal(min(POOL, 2 * largest), np.float32)
        self.prepared = {}

    def rng(self, name):
        return np.random.default_rng([self.seed, zlib.crc32(name.encode())])

    def _bits(self, std):
        """The pool as BF16 of the given deviation, or as E4M3 codes where std is None."""
        if std not in self.prepared:
            if std is None:
                bits = checkpoint.to_e4m3(self.pool * np.float32(checkpoint.E4M3_MAX / SIGMA_PEAK))
            else:
                bits = checkpoint.to_bf16(self.pool * np.float32(std))
            self.prepared[std] = bits
        return self.prepared[std]

    def _chunks(self, name, n, std):
        rng, bits = self.rng(name), self._bits(std)
        longest = len(bits) // 2
        while n > 0:
            length = min(n, longest)
            start = int(rng.integers(0, len(bits) - length + 1))
            yield bits[start : start + length]
            n -= length

    def _head(self, tensor, std):
        """Rows behind the tokenizer's last token are zero: greedy answers stay inside it."""
        rows, cols = tensor.shape
        used = min(rows, self.n_used_tokens)
        yield from self._chunks(tensor.name, used * cols, std)
        for start in range(used, rows, 4096):
            yield np.zeros((min(4096, rows - start), cols), np.uint16)

    def _scales(self, tensor, std):
        shape = checkpoint.scale_shape(tensor.shape)
        jitter = self.rng(tensor.name + "_scale_inv").uniform(0.9, 1.1, shape)
        return (jitter * std * SIGMA_PEAK / checkpoint.E4M3_MAX).astype(np.float32)

    def _codes(self, name, n):
        """Bytes of two E2M1 codes each, all equally likely."""
        rng = self.rng(name)
        while n > 0:
            length = min(n, POOL)
            yield rng.integers(0, 256, length, dtype=np.uint8)
            n -= length

    def _mxfp4(self, tensor, std):
        """Experts in blocks of 32, whose exponents make the values' deviation that of std."""
        n, rows, cols = tensor.shape
        shape, exponent = (n, rows, cols // 32), round(np.log2(std / E2M1_RMS)) + 127
        scales = np.full(shape, exponent, np.uint8)
        blocks, entry = tensor.name + "_blocks", checkpoint.Entry
        n_bytes = n * rows * cols // 2
        return [
            entry(blocks, (*shape, 16), "U8", lambda: self._codes(blocks, n_bytes)),
            entry.of_array(tensor.name + "_scales", scales, "U8"),
        ]

    def _powers(self, tensor, std):
        """DeepSeek-V4's: experts in E2M1, the rest in E4M3, both with scales that are powers of two."""
        (rows, cols), entry, name = tensor.shape, checkpoint.Entry, tensor.name
        if tensor.expert:
            weights = entry(name, (rows, cols // 2), "I8", lambda: self._codes(name, rows * cols // 2))
            shape, largest = (rows, cols // 32), E2M1_RMS
        else:
            weights = entry(name, (rows, cols), "F8_E4M3", lambda: self._chunks(name, rows * cols, None))
            shape, largest = checkpoint.scale_shape(tensor.shape), checkpoint.E4M3_MAX / SIGMA_PEAK
        scales = np.full(shape, round(np.log2(std / largest)) + 127, np.uint8)
        return [weights, entry.of_array(name.removesuffix(".weight") + ".scale", scales, "F8_E8M0")]

    def entries(self, tensor):
        name, shape = tensor.name, tensor.shape
        if tensor.role == "table":
            rng, n = self.rng(name), self.config["n_routed_experts"]
            table = np.array([rng.permutation(n)[: shape[1]] for _ in range(shape[0])], np.int32)
            return [checkpoint.Entry.of_array(name, table, "I32")]
        if tensor.role == "ids":
            return [checkpoint.Entry.of_array(name, np.array(tensor.ids, np.int64), "I64")]
        if tensor.role in ("ape", "hyper"):
            values = self.rng(name).normal(0, deviation(tensor, self.config), shape)
            return [checkpoint.Entry.of_array(name, values.astype(np.float32), "F32")]
        if len(shape) == 1 or tensor.role == "decay":
            values = vector(tensor, self.rng(name))
            if tensor.role in architectures.PRECISE:
                return [checkpoint.Entry.of_array(name, values, "F32")]
            return [checkpoint.Entry.of_array(name, checkpoint.to_bf16(values), "BF16")]
        n, std = int(np.prod(shape, dtype=np.int64)), deviation(tensor, self.config)
        if tensor.expert and architectures.family(self.config).mxfp4:
            return self._mxfp4(tensor, std)
        if self.dtype == "deepseek-v4" and tensor.role in architectures.LINEAR:
            return self._powers(tensor, std)
        if tensor.role == "head":
            return [checkpoint.Entry(name, shape, "BF16", lambda: self._head(tensor, std))]
        if not architectures.is_fp8(tensor, self.dtype):
            return [checkpoint.Entry(name, shape, "BF16", lambda: self._chunks(name, n, std))]
        codes = checkpoint.Entry(name, shape, "F8_E4M3", lambda: self._chunks(name, n, None))
        scales, kind = self._scales(tensor, std), "F32"
        if self.config["model_type"] == "qwen3_moe":  # published with BF16 scales
            scales, kind = checkpoint.to_bf16(scales), "BF16"
        return [codes, checkpoint.Entry.of_array(name + "_scale_inv", scales, kind)]


def generation_config(config, deepseek):
    common = {"bos_token_id": config["bos_token_id"], "do_sample": True}
    common |= {"eos_token_id": config["eos_token_id"], "transformers_version": "4.51.0"}
    if deepseek:
        return common | {"temperature": 0.6, "top_p": 0.95}
    eos = [config["eos_token_id"], config["bos_token_id"]]
    return common | {"eos_token_id": eos, "temperature": 0.6, "top_k": 20, "top_p": 0.95}


def make_model(args):
    config = shapes.config_of(args.shape, args.layers)
    text = architectures.text_config(config)
    deepseek = text["model_type"] in ("deepseek_v3", "kimi_k2")
    if args.mtp:
        apart = architectures.family(text).recurrent  # published in tensors of its own, not as one more layer
        text["mtp_num_hidden_layers" if apart else "num_nextn_predict_layers"] = 1
    os.makedirs(args.out, exist_ok=True)
    if os.path.exists(os.path.join(args.out, "config.json")):
        raise SystemExit(f"{args.out} already holds a checkpoint: choose another --out")
    from tokenizer_maker import write_tokenizer  # needs tokenizers, as nothing else here does

    sees = bool(config.get("vision_config", {}).get("depth"))
    ids = write_tokenizer(args.out, deepseek, shapes.SHAPES[args.shape][1], sees)
    text |= {"bos_token_id": ids["bos"], "eos_token_id": ids["eos"]}
    if sees:
        config["image_token_id"] = ids["image"]
        checkpoint.write_json(os.path.join(args.out, "preprocessor_config.json"), PROCESSOR)
    config = architectures.quantize_config(config, args.dtype)

    values = Values(config, args.dtype, args.seed, ids["n_tokens"])
    entries = [e for t in architectures.tensors(config) for e in values.entries(t)]
    total = sum(e.n_bytes for e in entries)
    # Small models are cut in two as well, so that every checkpoint has an index worth reading.
    shard_bytes = min(int(args.shard_gb * 1e9), total // 2 + 1)

    def progress(i, n):
        print(f"\rshard {i}/{n}", end="", file=sys.stderr, flush=True)

    start = time.monotonic()
    checkpoint.write_shards(args.out, entries, shard_bytes, progress)
    checkpoint.write_json(
        os.path.join(args.out, "generation_config.json"), generation_config(text, deepseek)
    )
    # Last: a directory with a config.json is whole.
    checkpoint.write_json(os.path.join(args.out, "config.json"), config)
    seconds = time.monotonic() - start
    summary = f"{len(entries)} tensors, {total / 1e9:.3f} GB in {seconds:.1f} s"
    print(f"\r{args.out}: {summary}", file=sys.stderr)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", required=True, choices=sorted(shapes.SHAPES))
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "fp8", "mixed", "deepseek-v4"])
    parser.add_argument("--layers", type=int, help="number of layers (default: the shape's)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", required=True, help="directory to write")
    parser.add_argument("--shard-gb", type=float, default=4.0, help="largest shard, in GB")
    parser.add_argument("--mtp", action="store_true", help="add a multi-token-prediction layer")
    args = parser.parse_args()
    if args.layers is not None and args.layers < 1:
        parser.error("--layers: at least 1")
    if args.seed < 0:
        parser.error("--seed: 0 or more")
    make_model(args)


if __name__ == "__main__":
    main()
