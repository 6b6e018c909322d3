"""Random weights of golden models: what a checkpoint stores, the values it stands for, and writing it."""

import hashlib
import json
import os

import numpy as np

import architectures
import checkpoint
import quant_formats
from make_model import deviation


def random_values(tensor, config, rng):
    if tensor.role == "router_bias":
        return rng.normal(0, 0.2, tensor.shape).astype(np.float32)
    if tensor.role == "table":
        rows = [rng.permutation(config["n_routed_experts"]) for _ in range(tensor.shape[0])]
        return np.array(rows, np.int64)[:, : tensor.shape[1]]
    if tensor.role == "ids":
        return np.array(tensor.ids, np.int64)
    if len(tensor.shape) == 1 or tensor.role == "decay":
        known = {"router_scale": (8, 2), "hyper_base": (0, 0.5), "hyper_scale": (0.7, 0.1), "bias": (0, 0.3), "qk_norm": (1.3, 0.2), "sinks": (0, 1.5), "norm1": (0.1, 0.3),
                 "decay": (-2.5, 1), "bounded_decay": (0, 0.5), "bounded_bias": (-2, 1.5)}
        mean, std = known.get(tensor.role, (1, 0.2))
        return rng.normal(mean, std, tensor.shape).astype(np.float32)
    if tensor.role == "bias":  # of each expert
        return rng.normal(0, 0.3, tensor.shape).astype(np.float32)
    text = architectures.text_config(config)
    std = deviation(tensor, text)
    if tensor.role in ("o", "down"):  # few layers: each may speak up
        std *= 2 * text["num_hidden_layers"] ** 0.5
    return rng.normal(0, std, tensor.shape).astype(np.float32)


def mxfp4_blocks(name, values):
    """Experts as gpt-oss is published; the reference has them transposed."""
    n, rows, cols = values.shape
    (codes, scales), used = quant_formats.FORMATS["mxfp4"].quantize(
        name, values.reshape(n * rows, cols)
    )
    bits = [np.concatenate([np.asarray(c).ravel() for c in e.chunks()]) for e in (codes, scales)]
    entry = checkpoint.Entry.of_array
    return [
        entry(name + "_blocks", bits[0].reshape(n, rows, cols // 32, 16), "U8"),
        entry(name + "_scales", bits[1].reshape(n, rows, cols // 32), "U8"),
    ], np.ascontiguousarray(used.reshape(n, rows, cols).transpose(0, 2, 1), np.float32)


def v4_formats(tensor, values):
    """FP8 blocks and FP4 experts as DeepSeek-V4 is published, scales as exponents (E8M0)."""
    entry, module = checkpoint.Entry.of_array, tensor.name.removesuffix(".weight")
    if tensor.expert:
        stored, used = quant_formats.FORMATS["mxfp4"].quantize(module, values)
        codes, scales = [
            np.concatenate([np.asarray(c).ravel() for c in e.chunks()]).view(np.uint8) for e in stored
        ]
        rows, cols = values.shape
        return [entry(tensor.name, codes.reshape(rows, cols // 2), "I8"),
                entry(module + ".scale", scales.reshape(rows, cols // 32), "F8_E8M0")], used
    codes, scales = checkpoint.quantize_blocks(values, powers=True)
    exponents = (np.log2(scales) + 127).astype(np.uint8)
    return [entry(tensor.name, codes, "F8_E4M3"),
            entry(module + ".scale", exponents, "F8_E8M0")], checkpoint.dequantize_blocks(codes, scales)


def static_fp8(tensor, values, config):
    """One scale a matrix, beside scales of activations that are not used."""
    entry, name, module = checkpoint.Entry.of_array, tensor.name, tensor.name.removesuffix(".weight")
    scales = np.abs(values).max(axis=(-2, -1), keepdims=True) / np.float32(checkpoint.E4M3_MAX)
    half = np.full((), 0.5, np.float32)
    if architectures.is_published_hy3(config):
        bits = checkpoint.to_bf16(scales)
        scales = checkpoint.from_bf16(bits)
        more = [entry(module + ".weight_scale", bits.reshape(()), "BF16"),
                entry(module + ".input_scale", half, "F32")]
        if tensor.role == "k":
            more.append(entry(module.removesuffix("k_proj") + "k_cache.scale", half, "F32"))
    elif values.ndim == 3:
        more = [entry(name + "_scale_inv", scales, "F32"),
                entry(name + "_activation_scale", scales[:, 0, 0], "F32")]
    else:
        more = [entry(name + "_scale_inv", scales.reshape(()), "F32"),
                entry(module + ".activation_scale", half, "F32")]
    codes = checkpoint.to_e4m3(values / scales)
    return [entry(name, codes, "F8_E4M3"), *more], checkpoint.from_e4m3(codes) * scales


def stored_and_used(tensor, values, config, dtype):
    """(entries as published, the float32 values that they stand for)."""
    entry = checkpoint.Entry.of_array
    if tensor.role in architectures.PRECISE:
        return [entry(tensor.name, values, "F32")], values
    if tensor.role in ("table", "ids"):
        return [entry(tensor.name, values, "I64")], values
    if dtype == "deepseek-v4" and tensor.role in architectures.LINEAR:
        return v4_formats(tensor, values)
    if architectures.family(config).mxfp4 and tensor.expert:
        return mxfp4_blocks(tensor.name, values)
    if architectures.is_quantized(tensor, dtype):
        module = tensor.name.removesuffix(".weight")
        return quant_formats.FORMATS[dtype].quantize(module, values)
    if dtype == "fp8-static" and tensor.role in architectures.LINEAR:
        return static_fp8(tensor, values, config)
    if dtype == "awq":  # the checkpoints of that time are in F16
        half = values.astype(np.float16)
        return [entry(tensor.name, half, "F16")], half.astype(np.float32)
    if not architectures.is_fp8(tensor, dtype):
        bits = checkpoint.to_bf16(values)
        return [entry(tensor.name, bits, "BF16")], checkpoint.from_bf16(bits)
    bf16_scales = config["model_type"] == "qwen3_moe"
    codes, scales = checkpoint.quantize_blocks(values, bf16_scales)
    stored = checkpoint.to_bf16(scales) if bf16_scales else scales
    entries = [
        entry(tensor.name, codes, "F8_E4M3"),
        entry(tensor.name + "_scale_inv", stored, "BF16" if bf16_scales else "F32"),
    ]
    return entries, checkpoint.dequantize_blocks(codes, scales)


def weights(config, dtype, seed):
    rng = np.random.default_rng(seed)
    stored, used = [], {}
    for tensor in architectures.tensors(config):
        entries, values = stored_and_used(tensor, random_values(tensor, config, rng), config, dtype)
        stored += entries
        used[tensor.name] = values
    return stored, used


def _write_tokenizer(directory, n_vocab):
    """A token for each byte, or for the n_vocab - 2 first ones in the order of their characters; no merges."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    alphabet = [chr(c) for c in printable + [256 + i for i in range(256 - len(printable))]]
    special = ["<bos>", "<eos>"] + [f"<reserved_{i}>" for i in range(n_vocab - 258)]
    vocab = {t: i for i, t in enumerate((special + alphabet)[:n_vocab])}
    added = [
        {"id": i, "content": t, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": True}
        for i, t in enumerate(special)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                  "use_regex": True}
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
        "normalizer": None, "pre_tokenizer": byte_level, "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "dropout": None, "unk_token": None,
                  "continuing_subword_prefix": None, "end_of_word_suffix": None,
                  "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": vocab, "merges": []},
    }
    checkpoint.write_json(os.path.join(directory, "tokenizer.json"), tokenizer)
    config = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": None}
    checkpoint.write_json(os.path.join(directory, "tokenizer_config.json"), config)


def write_checkpoint(directory, config, stored, n_vocab=None):
    os.makedirs(directory, exist_ok=True)
    total = sum(e.n_bytes for e in stored)
    checkpoint.write_shards(directory, stored, total // 2 + 1)
    checkpoint.write_json(os.path.join(directory, "config.json"), config)
    _write_tokenizer(directory, n_vocab or architectures.text_config(config)["vocab_size"])


def digest(config, stored):
    """Of everything that the results depend on."""
    h = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for entry in stored:
        h.update(f"{entry.name} {entry.shape} {entry.dtype}".encode())
        for chunk in entry.chunks():
            h.update(memoryview(chunk).cast("B"))
    return h.hexdigest()


def make(config, dtype, directory, seed):
    """Writes a checkpoint; returns its digest."""
    stored, _ = weights(config, dtype, seed)
    write_checkpoint(directory, config, stored)
    return digest(config, stored)
