"""Quantized weights in the layouts of compressed-tensors, AutoAWQ, GPTQModel, auto-round and ModelOpt.

A format quantizes one matrix: float32 [rows][cols] -> (its tensors as published, the float32 values
they stand for), and knows the quantization_config it is published with. Needs numpy only.
"""

import numpy as np

import checkpoint
from checkpoint import Entry

E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # which of eight rows each code of a word belongs to


def pack_words(codes, axis, order=None, bits=4):
    """Codes -> int32, as many along axis as fit a word, padded with zeros; the first lowest."""
    each = 32 // bits
    codes = np.moveaxis(codes.astype(np.uint32), axis, -1)
    padding = [(0, 0)] * (codes.ndim - 1) + [(0, -codes.shape[-1] % each)]
    grouped = np.pad(codes, padding).reshape(*codes.shape[:-1], -1, each)
    words = sum(grouped[..., row] << (bits * place) for place, row in enumerate(order or range(each)))
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


def symmetric_codes(w, bits, groups, scale_rows, round_scale):
    """Signed codes and scales, [rows][groups] or one for all; and the values they stand for."""
    rows, half = w.shape[0], 2 ** (bits - 1)
    g = w.reshape(rows, groups, -1)
    largest = np.abs(g).max(-1)
    if not scale_rows:
        largest = np.full((rows, 1), largest.max())
    scale = round_scale(largest / (half - 0.5))
    codes = np.clip(np.rint(g / scale[..., None]), -half, half - 1)
    values = codes.astype(np.float32) * scale[..., None]
    return codes.astype(np.int8).reshape(rows, -1), scale, ungrouped(values.astype(np.float32))


class Packed8:
    """compressed-tensors pack-quantized with 8 bits, and with 4 and one scale for all."""

    def __init__(self, strategy, bits=8, size=None, symmetric=True, reorders=False):
        self.strategy, self.bits, self.size = strategy, bits, size
        self.symmetric, self.reorders = symmetric, reorders

    def quantize(self, module, w):
        groups = w.shape[1] // self.size if self.size else 1
        half = 2 ** (self.bits - 1)
        order = np.random.default_rng(w.shape[1]).permutation(w.shape[1])
        inner = w[:, order] if self.reorders else w
        extra = []
        if self.symmetric:
            codes, scale, values = symmetric_codes(
                inner, self.bits, groups, self.strategy != "tensor", bf16
            )
            codes = codes.astype(np.int32) + half
        else:
            codes, scale, zero, values = asymmetric(inner, self.bits, groups, bf16)
            values = bf16(values)
            packed = pack_words(zero, 0, bits=self.bits)
            extra.append(Entry.of_array(f"{module}.weight_zero_point", packed, "I32"))
        if self.reorders:
            back = np.argsort(order)
            codes, values = codes[:, back], bf16(values[:, back])
            group_of = (back // self.size).astype(np.int32)
            extra.append(Entry.of_array(f"{module}.weight_g_idx", group_of, "I32"))
        if self.strategy == "tensor":
            scale = scale[0]
        packed = pack_words(codes, 1, bits=self.bits)
        return [
            Entry.of_array(f"{module}.weight_packed", packed, "I32"),
            Entry.of_array(f"{module}.weight_scale", checkpoint.to_bf16(scale), "BF16"),
            Entry.of_array(f"{module}.weight_shape", np.array(w.shape, np.int64), "I64"),
        ] + extra, values

    def config(self, ignore):
        weights = {"num_bits": self.bits, "type": "int", "strategy": self.strategy,
                   "group_size": self.size}
        config = compressed_tensors("pack-quantized", weights, self.symmetric, ignore)
        if self.reorders:
            config["config_groups"]["group_0"]["weights"]["actorder"] = "group"
        return config


def asymmetric(w, bits, groups, round_scale, min_zero=0):
    """Codes, scale and zero point a group: value = (code - zero) * scale."""
    largest = 2**bits - 1
    g = w.reshape(w.shape[0], groups, -1)
    low, high = np.minimum(g.min(-1), 0), np.maximum(g.max(-1), 0)
    scale = round_scale((high - low) / largest)
    zero = np.clip(np.rint(-low / scale), min_zero, largest)
    codes = np.clip(np.rint(g / scale[..., None]) + zero[..., None], 0, largest)
    values = (codes - zero[..., None]).astype(np.float32) * scale[..., None]
    return ungrouped(codes).astype(np.uint8), scale, zero.astype(np.uint8), ungrouped(values)


class Int4Bytes:
    """compressed-tensors int-quantized with 4 bits: a byte a code."""

    def quantize(self, module, w):
        codes, scale, values = symmetric_codes(w, 4, 1, True, bf16)
        return [
            Entry.of_array(f"{module}.weight", codes, "I8"),
            Entry.of_array(f"{module}.weight_scale", checkpoint.to_bf16(scale), "BF16"),
        ], values

    def config(self, ignore):
        weights = {"num_bits": 4, "type": "int", "strategy": "channel", "group_size": None}
        return compressed_tensors("int-quantized", weights, True, ignore)


class MxFp8:
    """E4M3 and an exponent for 32 weights, as compressed-tensors and ModelOpt write them."""

    def __init__(self, modelopt=False):
        self.modelopt = modelopt

    def quantize(self, module, w):
        g = grouped(w, 32)
        exponent = np.floor(np.log2(np.abs(g).max(-1))) - 8
        scale = np.exp2(exponent).astype(np.float32)
        codes = checkpoint.to_e4m3(np.clip(g / scale[..., None], -448, 448))
        stored = (exponent + 127).astype(np.uint8)
        return [
            Entry.of_array(f"{module}.weight", ungrouped(codes), "F8_E4M3"),
            Entry.of_array(f"{module}.weight_scale", stored, "U8"),
        ], ungrouped((checkpoint.from_e4m3(codes) * scale[..., None]).astype(np.float32))

    def config(self, ignore):
        if self.modelopt:
            return modelopt("MXFP8", ignore)
        weights = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32}
        weights["scale_dtype"] = "torch.uint8"
        return compressed_tensors("mxfp8-quantized", weights, True, ignore)


class ModelOptFp8:
    """NVIDIA ModelOpt FP8: a scale a matrix, and one for activations, which is not used."""

    def quantize(self, module, w):
        scale = np.float32(np.abs(w).max() / checkpoint.E4M3_MAX)
        codes = checkpoint.to_e4m3(w / scale)
        one = np.array(0.25, np.float32)
        return [
            Entry.of_array(f"{module}.weight", codes, "F8_E4M3"),
            Entry.of_array(f"{module}.weight_scale", np.array(scale, np.float32), "F32"),
            Entry.of_array(f"{module}.input_scale", one, "F32"),
        ], (checkpoint.from_e4m3(codes) * scale).astype(np.float32)

    def config(self, ignore):
        return modelopt("FP8", ignore)


class GptqAny:
    """GPTQModel: 4 or 8 bits, zero points or all the same, columns in an order of their own."""

    def __init__(self, bits, size, sym, reorders=False, v2=False, config=None):
        self.bits, self.size, self.sym = bits, size, sym
        self.reorders, self.v2, self.extra = reorders, v2, config or {}

    def quantize(self, module, w):
        cols, half = w.shape[1], 2 ** (self.bits - 1)
        groups = cols // self.size
        order = np.random.default_rng(cols).permutation(cols) if self.reorders else np.arange(cols)
        inner = w[:, order]
        if self.sym:
            codes, scale, values = symmetric_codes(inner, self.bits, groups, True, f16)
            codes, zero = codes.astype(np.int32) + half, np.full(scale.shape, half)
        else:
            codes, scale, zero, values = asymmetric(inner, self.bits, groups, f16, min_zero=1)
        back = np.argsort(order)
        codes, values = codes[:, back], values[:, back]
        if self.reorders or not self.sym and self.bits == 8:
            values = f16(values)
        stored = zero if self.v2 else zero.astype(np.int32) - 1
        return [
            Entry.of_array(f"{module}.qweight", pack_words(codes.T, 0, bits=self.bits), "I32"),
            Entry.of_array(f"{module}.qzeros", pack_words(stored.T, 1, bits=self.bits), "I32"),
            Entry.of_array(f"{module}.scales", scale.T.astype(np.float16), "F16"),
            Entry.of_array(f"{module}.g_idx", (back // self.size).astype(np.int32), "I32"),
        ], values

    def config(self, ignore):
        return {"quant_method": "gptq", "bits": self.bits, "group_size": self.size,
                "desc_act": self.reorders, "sym": self.sym, "lm_head": False,
                "checkpoint_format": "gptq_v2" if self.v2 else "gptq"} | self.extra


class AutoRound:
    """Another format under the quantization_config that auto-round writes."""

    def __init__(self, inner, packing, bits=4):
        self.inner, self.packing, self.bits = inner, packing, bits

    def quantize(self, module, w):
        entries, values = self.inner.quantize(module, w)
        return [e for e in entries if not e.name.endswith(".g_idx")], values

    def config(self, ignore):
        extra = {name: {"bits": 16, "data_type": "float"} for name in ignore if name != "lm_head"}
        return {"quant_method": "auto-round", "packing_format": self.packing, "bits": self.bits,
                "group_size": self.inner.size, "sym": getattr(self.inner, "sym", False),
                "data_type": "int", "autoround_version": "0.9.0", "extra_config": extra,
                "block_name_to_quantize": "model.layers"}


class AwqSymmetric(Awq):
    """auto-round's AWQ with "sym", published with zero_point false: zero points are all 8."""

    def __init__(self, size, has_zeros):
        super().__init__(size)
        self.has_zeros, self.sym = has_zeros, True

    def quantize(self, module, w):
        codes, scale, values = symmetric_codes(w, 4, w.shape[1] // self.size, True, f16)
        words = pack_words((codes + 8).T, 1, AWQ_ORDER)
        zeros = pack_words(np.full(scale.shape, 8).T, 1, AWQ_ORDER)
        entries = [
            Entry.of_array(f"{module}.qweight", words, "I32"),
            Entry.of_array(f"{module}.scales", scale.T.astype(np.float16), "F16"),
        ]
        if self.has_zeros:
            entries.append(Entry.of_array(f"{module}.qzeros", zeros, "I32"))
        return entries, values

    def config(self, ignore):
        return super().config(ignore) | {"zero_point": False}


def modelopt(algo, ignore):
    return {"quant_method": "modelopt", "quant_algo": algo, "ignore": ignore,
            "kv_cache_quant_algo": None, "producer": {"name": "modelopt", "version": "0.40.0"}}


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


class Quark:
    """Another format under the quantization_config that AMD's Quark writes."""

    def __init__(self, inner, **weight):
        self.inner, self.weight = inner, {"is_dynamic": False, "symmetric": None} | weight

    def quantize(self, module, w):
        entries, values = self.inner.quantize(module, w)
        for e in entries:
            e.name = e.name.replace(".weight_packed", ".weight")
        return entries, values

    def config(self, ignore):
        names = [name if name.isidentifier() else f"*{name.removeprefix('model.')}" for name in ignore]
        own = {"weight": self.weight, "bias": None, "input_tensors": None}
        return {"quant_method": "quark", "quant_mode": "eager_mode", "global_quant_config": own,
                "layer_quant_config": {}, "layer_type_quant_config": {}, "exclude": names,
                "export": {"pack_method": "reorder", "weight_format": "real_quantized"}}


# Those that no golden model has: tests/golden/test_formats.py holds them against their values.
MORE_FORMATS = {
    "int8-packed-channel": Packed8("channel"),
    "int8-packed-g32": Packed8("group", size=32),
    "int8-packed-tensor": Packed8("tensor"),
    "int8-packed-zeros": Packed8("group", size=32, symmetric=False),
    "int4-packed-tensor": Packed8("tensor", bits=4),
    "int4-packed-order": Packed8("group", bits=4, size=32, reorders=True),
    "int4-bytes": Int4Bytes(),
    "mxfp8": MxFp8(),
    "modelopt-mxfp8": MxFp8(modelopt=True),
    "modelopt-fp8": ModelOptFp8(),
    "gptq-sym": GptqAny(4, 32, True, config={"dynamic": {"-:.*mlp\\.gate$": {}, "-:.*lm_head": {}}}),
    "gptq-order": GptqAny(4, 32, False, reorders=True),
    "gptq8": GptqAny(8, 32, True),
    "gptq8-v2": GptqAny(8, 32, True, v2=True),
    "gptq8-zeros": GptqAny(8, 32, False),
    "gptq8-order": GptqAny(8, 32, True, reorders=True),
    "auto-round-gptq": AutoRound(GptqAny(4, 32, True), "auto_round:auto_gptq"),
    "auto-round-own": AutoRound(GptqAny(4, 32, False, v2=True), "auto_round"),
    "auto-round-8": AutoRound(GptqAny(8, 32, False, v2=True), "auto_round:exllamav2", bits=8),
    "auto-round-awq": AutoRound(Awq(32), "auto_round:auto_awq"),
    "awq-sym": AwqSymmetric(32, has_zeros=True),
    "awq-no-zeros": AwqSymmetric(32, has_zeros=False),
    "quark-mxfp4": Quark(MxFp4(), dtype="fp4", qscheme="per_group", group_size=32, scale_format="e8m0"),
    "quark-fp8": Quark(ModelOptFp8(), dtype="fp8_e4m3", qscheme="per_tensor", group_size=None),
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
