"""Quantized weights in the layouts of compressed-tensors, AutoAWQ and AutoGPTQ.

A format quantizes one matrix: float32 [rows][cols] -> (its tensors as published, the float32 values
they stand for), and knows the quantization_config it is published with. Needs numpy only.
"""

import numpy as np

import checkpoint
from checkpoint import Entry

E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # which of eight rows each code of a word belongs to


def pack_words(codes, axis, order=tuple(range(8))):
    """4-bit codes -> int32, eight along axis to a word, padded with zeros; the first lowest."""
    codes = np.moveaxis(codes.astype(np.uint32), axis, -1)
    padding = [(0, 0)] * (codes.ndim - 1) + [(0, -codes.shape[-1] % 8)]
    grouped = np.pad(codes, padding).reshape(*codes.shape[:-1], -1, 8)
    words = sum(grouped[..., row] << (4 * place) for place, row in enumerate(order))
    return np.moveaxis(words.astype(np.uint32), -1, axis).view(np.int32)


def grouped(w, size):
    """[rows][cols] -> [rows][groups][size]."""
    return w.reshape(w.shape[0], -1, size)


def ungrouped(g):
    return g.reshape(g.shape[0], -1)


def bf16(x):
    return checkpoint.from_bf16(checkpoint.to_bf16(x))


def symmetric4(w, size):
    """Codes 0 .. 15 that stand for -8 .. 7, and a BF16 scale a group."""
    g = grouped(w, size)
    scale = bf16(np.abs(g).max(-1) / 7.5)
    codes = np.clip(np.rint(g / scale[..., None]) + 8, 0, 15)
    return codes.astype(np.uint8), scale, ungrouped((codes - 8).astype(np.float32) * scale[..., None])


def asymmetric4(w, size, round_scale, min_zero=0):
    """Codes 0 .. 15, and scale and zero point a group: value = (code - zero) * scale."""
    g = grouped(w, size)
    low, high = np.minimum(g.min(-1), 0), np.maximum(g.max(-1), 0)
    scale = round_scale((high - low) / 15)
    zero = np.clip(np.rint(-low / scale), min_zero, 15)
    codes = np.clip(np.rint(g / scale[..., None]) + zero[..., None], 0, 15)
    values = (codes - zero[..., None]).astype(np.float32) * scale[..., None]
    return codes.astype(np.uint8), scale, zero.astype(np.uint8), ungrouped(values)


def to_e2m1(x):
    """float32 -> E2M1 codes, nearest, ties to the even code."""
    middles = (E2M1_VALUES[1:] + E2M1_VALUES[:-1]) / 2
    magnitude = np.abs(x)
    code = np.searchsorted(middles, magnitude, side="left")
    code += (middles[np.minimum(code, 6)] == magnitude) & (code % 2 == 1) & (code < 7)
    return (code | np.where(np.signbit(x), 8, 0)).astype(np.uint8)


def from_e2m1(codes):
    return np.where(codes & 8, -1, 1).astype(np.float32) * E2M1_VALUES[codes & 7]


def pack_pairs(codes):
    return (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8)


def f16(x):
    return x.astype(np.float16).astype(np.float32)


class Int4:
    """compressed-tensors pack-quantized."""

    def __init__(self, size, symmetric=True):
        self.size, self.symmetric = size, symmetric

    def quantize(self, module, w):
        zeros = []
        if self.symmetric:
            codes, scale, values = symmetric4(w, self.size)
        else:
            codes, scale, zero, values = asymmetric4(w, self.size, bf16)
            packed = pack_words(zero, 0)
            zeros = [Entry.of_array(f"{module}.weight_zero_point", packed, "I32")]
        shape = np.array(w.shape, np.int64)
        return [
            Entry.of_array(f"{module}.weight_packed", pack_words(ungrouped(codes), 1), "I32"),
            Entry.of_array(f"{module}.weight_scale", checkpoint.to_bf16(scale), "BF16"),
            Entry.of_array(f"{module}.weight_shape", shape, "I64"),
        ] + zeros, values

    def config(self, ignore):
        weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": self.size}
        return compressed_tensors("pack-quantized", weights, self.symmetric, ignore)


class MxFp4:
    """compressed-tensors mxfp4-pack-quantized: a power of two for 32 weights."""

    def quantize(self, module, w):
        g = grouped(w, 32)
        exponent = np.floor(np.log2(np.abs(g).max(-1))) - 2  # 4 .. 8 before rounding
        scale = np.exp2(exponent).astype(np.float32)
        codes = to_e2m1(g / scale[..., None])
        stored = (exponent + 127).astype(np.uint8)
        return [
            Entry.of_array(f"{module}.weight_packed", pack_pairs(ungrouped(codes)), "U8"),
            Entry.of_array(f"{module}.weight_scale", stored, "U8"),
        ], ungrouped(from_e2m1(codes) * scale[..., None])

    def config(self, ignore):
        weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
        weights["scale_dtype"] = "torch.uint8"
        return compressed_tensors("mxfp4-pack-quantized", weights, True, ignore)


class NvFp4:
    """compressed-tensors nvfp4-pack-quantized: an E4M3 scale for 16 weights, a divisor for all."""

    def quantize(self, module, w):
        g = grouped(w, 16)
        divisor = np.float32(448 * 6 / np.abs(w).max())
        stored = checkpoint.to_e4m3(np.abs(g).max(-1) / 6 * divisor)
        scale = (checkpoint.from_e4m3(stored) / divisor).astype(np.float32)
        codes = to_e2m1(g / np.where(scale == 0, 1, scale)[..., None])
        return [
            Entry.of_array(f"{module}.weight_packed", pack_pairs(ungrouped(codes)), "U8"),
            Entry.of_array(f"{module}.weight_scale", stored, "F8_E4M3"),
            Entry.of_array(f"{module}.weight_global_scale", np.array([divisor]), "F32"),
        ], ungrouped(from_e2m1(codes) * scale[..., None])

    def config(self, ignore):
        weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
        return compressed_tensors("nvfp4-pack-quantized", weights, True, ignore)


class Rows:
    """compressed-tensors int-quantized and float-quantized: a scale a row."""

    def __init__(self, dtype):
        self.dtype = dtype

    def quantize(self, module, w):
        largest = 127 if self.dtype == "I8" else checkpoint.E4M3_MAX
        scale = bf16(np.abs(w).max(-1, keepdims=True) / largest)
        if self.dtype == "I8":
            stored = np.clip(np.rint(w / scale), -128, 127).astype(np.int8)
            values = stored.astype(np.float32) * scale
        else:
            stored = checkpoint.to_e4m3(w / scale)
            values = checkpoint.from_e4m3(stored) * scale
        return [
            Entry.of_array(f"{module}.weight", stored, self.dtype),
            Entry.of_array(f"{module}.weight_scale", checkpoint.to_bf16(scale), "BF16"),
        ], values

    def config(self, ignore):
        name, kind = ("int-quantized", "int") if self.dtype == "I8" else ("float-quantized", "float")
        weights = {"num_bits": 8, "type": kind, "strategy": "channel", "group_size": None}
        return compressed_tensors(name, weights, True, ignore)


class Awq:
    """AutoAWQ, version GEMM: words of eight rows."""

    def __init__(self, size):
        self.size = size

    def quantize(self, module, w):
        codes, scale, zero, values = asymmetric4(w, self.size, f16)
        words = pack_words(ungrouped(codes).T, 1, AWQ_ORDER)
        return [
            Entry.of_array(f"{module}.qweight", words, "I32"),
            Entry.of_array(f"{module}.qzeros", pack_words(zero.T, 1, AWQ_ORDER), "I32"),
            Entry.of_array(f"{module}.scales", scale.T.astype(np.float16), "F16"),
        ], values

    def config(self, ignore):
        kept = [n for n in ignore if n != "lm_head"]
        return {"quant_method": "awq", "bits": 4, "group_size": self.size, "version": "gemm",
                "zero_point": True, "modules_to_not_convert": kept}


class Gptq:
    """AutoGPTQ, its first format: words of eight columns, zero points stored one too small."""

    def __init__(self, size):
        self.size = size

    def quantize(self, module, w):
        codes, scale, zero, values = asymmetric4(w, self.size, f16, min_zero=1)
        group_of = (np.arange(w.shape[1]) // self.size).astype(np.int32)
        return [
            Entry.of_array(f"{module}.qweight", pack_words(ungrouped(codes).T, 0), "I32"),
            Entry.of_array(f"{module}.qzeros", pack_words(zero.T - 1, 1), "I32"),
            Entry.of_array(f"{module}.scales", scale.T.astype(np.float16), "F16"),
            Entry.of_array(f"{module}.g_idx", group_of, "I32"),
        ], values

    def config(self, ignore):
        return {"quant_method": "gptq", "bits": 4, "group_size": self.size, "desc_act": False,
                "sym": False, "checkpoint_format": "gptq", "lm_head": False}


def compressed_tensors(format_name, weights, symmetric, ignore):
    common = {"symmetric": symmetric, "dynamic": False, "actorder": None, "block_structure": None,
              "observer": "minmax", "observer_kwargs": {}}
    group = {"targets": ["Linear"], "weights": weights | common, "input_activations": None,
             "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": format_name,
        "config_groups": {"group_0": group},
        "ignore": ignore,
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


FORMATS = {
    "awq": Awq(32),
    "fp8-rows": Rows("F8_E4M3"),
    "gptq": Gptq(32),
    "int4-g32": Int4(32),
    "int4-g64-zeros": Int4(64, symmetric=False),
    "int8": Rows("I8"),
    "mxfp4": MxFp4(),
    "nvfp4": NvFp4(),
}
EXPERTS_ONLY = {"int4-g32"}  # as Kimi K2 is published
KIMI_IGNORE = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.gate$",
               "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"]
