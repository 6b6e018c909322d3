"""GGUF files as llama.cpp's converter writes them: blocks, metadata and names of tensors.

A format makes random blocks of one matrix, which are as good as quantized ones, and knows the
float32 values that they stand for. Needs numpy only.
"""

import pathlib
import random
import re
import struct

import numpy as np

U8, U32, I32, F32, BOOL, STR, ARRAY = 0, 4, 5, 6, 7, 8, 9
ALIGNMENT = 32
TYPES = {"F32": 0, "F16": 1, "BF16": 30, "I8": 24}
IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
FP4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)


SCATTERED = "scattered"  # where IQ1_M has its half: in the upper four bits of its last four words
NIBBLES = np.array([0, 4, 8, 12], np.uint16)


def halves_of(blocks, at, n):
    """[blocks][n] words of 16 bits."""
    return blocks[:, at : at + 2 * n].copy().view(np.uint16)


def half(blocks, at):
    if at == SCATTERED:
        word = (halves_of(blocks, 48, 4) >> 12 << NIBBLES).sum(1, keepdims=True, dtype=np.uint16)
    else:
        word = halves_of(blocks, at, 1)
    return word.view(np.float16).astype(np.float32)


def put_half(blocks, at, values):
    word = values.astype(np.float16).reshape(-1, 1).view(np.uint16)
    if at == SCATTERED:
        words = halves_of(blocks, 48, 4) & 0xFFF | (word >> NIBBLES & 15) << 12
        blocks[:, 48:56] = words.view(np.uint8)
    else:
        blocks[:, at : at + 2] = word.view(np.uint8)


def nibbles(codes):
    """[n][k] bytes -> [n][2 k]: all low halves, then all high ones."""
    return np.concatenate([codes & 15, codes >> 4], 1)


def bits(data):
    """[n][k] bytes -> [n][8 k] bits, the lowest of a byte first."""
    return (data[:, :, None] >> np.arange(8, dtype=np.uint8) & 1).reshape(len(data), -1)


def pairs_k(codes):
    """Two bits each of 128 columns in 32 bytes."""
    parts = codes.reshape(len(codes), -1, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    return parts.reshape(len(codes), -1)


def nibbles_k(codes):
    """Four bits each of 64 columns in 32 bytes."""
    parts = codes.reshape(len(codes), -1, 1, 32) >> np.array([0, 4], np.uint8)[:, None] & 15
    return parts.reshape(len(codes), -1)


def planes_k(high):
    """[n][32] bytes -> [n][256]: bit s of each byte belongs to part s of 32 columns."""
    return (high[:, None, :] >> np.arange(8, dtype=np.uint8)[:, None] & 1).reshape(len(high), -1)


def scales_k4(b):
    """The 6-bit scales and offsets of eight parts, from bytes 4 to 16."""
    q = b[:, 4:16].astype(np.float32), b[:, 4:16]
    raw = q[1]
    scale = np.concatenate([raw[:, :4] & 63, raw[:, 8:] & 15 | raw[:, :4] >> 6 << 4], 1)
    low = np.concatenate([raw[:, 4:8] & 63, raw[:, 8:] >> 4 | raw[:, 4:8] >> 6 << 4], 1)
    each = lambda d, s: np.repeat(d * s.astype(np.float32), 32, 1)  # noqa: E731
    return each(half(b, 0), scale), each(half(b, 2), low)


def q3_scales(b):
    raw = b[:, 96:108]
    low = np.concatenate([raw[:, :8] & 15, raw[:, :8] >> 4], 1)
    high = np.concatenate([raw[:, 8:] >> s & 3 for s in (0, 2, 4, 6)], 1)
    return half(b, 108) * ((low | high << 4).astype(np.float32) - 32)


def q4_k(b):
    scale, low = scales_k4(b)
    return scale * nibbles_k(b[:, 16:]) - low


def q5_k(b):
    scale, low = scales_k4(b)
    return scale * (nibbles_k(b[:, 48:]) | planes_k(b[:, 16:48]) << 4) - low


def q6_k(b):
    low = b[:, :128].reshape(-1, 2, 1, 64) >> np.array([0, 4], np.uint8)[:, None] & 15
    codes = low.reshape(-1, 256) | pairs_k(b[:, 128:192]) << 4
    scale = half(b, 208) * b[:, 192:208].view(np.int8)
    return np.repeat(scale, 16, 1) * (codes.astype(np.float32) - 32)


def q2_k(b):
    scale, low = half(b, 80) * (b[:, :16] & 15), half(b, 82) * (b[:, :16] >> 4)
    return np.repeat(scale, 16, 1) * pairs_k(b[:, 16:80]) - np.repeat(low, 16, 1)


def q3_k(b):
    codes = pairs_k(b[:, 32:96]).astype(np.float32) - 4 * (1 - planes_k(b[:, :32]).astype(np.float32))
    return np.repeat(q3_scales(b), 16, 1) * codes


def iq4_xs(b):
    high = b[:, 2:4].copy().view(np.uint16)
    low = (b[:, 4:8, None] >> np.array([0, 4], np.uint8) & 15).reshape(-1, 8)
    scale = low | (high >> np.arange(0, 16, 2, dtype=np.uint16) & 3).astype(np.uint8) << 4
    codes = np.concatenate([nibbles(b[:, 8 + 16 * s : 24 + 16 * s]) for s in range(8)], 1)
    return np.repeat(half(b, 0) * (scale.astype(np.float32) - 32), 32, 1) * IQ4[codes]


def five(b, at):
    return (nibbles(b[:, at + 4 :]) | bits(b[:, at : at + 4]) << 4).astype(np.float32)


def mxfp4(b):
    return np.ldexp(FP4[nibbles(b[:, 1:])], b[:, :1].astype(int) - 128).astype(np.float32)


def trits(codes, n):
    """The first n digits of bytes that are fractions of 256 in base 3, less 1."""
    powers = np.array([1, 3, 9, 27, 81][:n], np.uint8)[:, None]
    digits = (codes[:, None, :] * powers).astype(np.int32) * 3 >> 8
    return digits.reshape(len(codes), -1) - 1


def tq1_0(b):
    digits = np.concatenate([trits(b[:, :32], 5), trits(b[:, 32:48], 5), trits(b[:, 48:52], 4)], 1)
    return half(b, 52) * digits


def grids():
    """The grids of kernels/grids.inc, [entries] each."""
    text = (pathlib.Path(__file__).parents[1] / "kernels/grids.inc").read_text()
    parts = re.findall(r"#define GGUF_(\w+)_GRID\(F\)((?: \\\n  GRID_ROW[^ \n]*)+)", text)
    return {name: np.array([int(e, 16) for e in re.findall(r"\b[0-9a-f]{4}\b", rows)]) for name, rows in parts}


GRIDS = grids()
FOURS = {"IQ3_XXS": np.array([4, 12, 20, 28, 36, 44, 52, 62]), "IQ3_S": np.arange(1, 17, 2)}


def on_grid(name, idx):
    """The columns of entries [n][k]."""
    if name in FOURS:
        return FOURS[name][GRIDS[name][idx][:, :, None] >> np.arange(0, 16, 4) & 7].reshape(len(idx), -1)
    values = np.array([-1, 0, 1] if name == "IQ1" else [8, 25, 43])
    return values[GRIDS[name][idx][:, :, None] >> np.arange(0, 16, 2) & 3].reshape(len(idx), -1)


def fields(words, shifts, mask):
    """[n][k] words -> [n][k * shifts] fields of theirs."""
    return (words[:, :, None] >> np.array(shifts, words.dtype) & mask).reshape(len(words), -1)


def even(seven):
    """Signs of eight columns: seven bits, and one that makes the number of ones even."""
    seven = seven.astype(np.uint8)
    return seven | (bits(seven).reshape(*seven.shape, 8).sum(2) % 2).astype(np.uint8) << 7


def scaled(b, scales, unit, codes, signs):
    each = half(b, 0) * (2 * scales.astype(np.float32) + 1) * np.float32(unit)
    return np.repeat(each, 256 // scales.shape[1], 1) * codes * (1 - 2 * bits(signs).astype(np.float32))


def iq2_xxs(b):
    words = b[:, 2:].copy().view(np.uint32)[:, 1::2]
    idx = b[:, 2:].reshape(-1, 8, 8)[:, :, :4].reshape(-1, 32)
    signs = even(fields(words, [0, 7, 14, 21], 127))
    return scaled(b, words >> 28, 0.125, on_grid("IQ2_XXS", idx), signs)


def iq2_xs(b):
    q = halves_of(b, 2, 32)
    return scaled(b, fields(b[:, 66:], [0, 4], 15), 0.125, on_grid("IQ2_XS", q & 511), even(q >> 9))


def iq2_s(b):
    idx = b[:, 2:34] + fields(b[:, 66:74], [0, 2, 4, 6], 3).astype(int) * 256
    return scaled(b, fields(b[:, 74:], [0, 4], 15), 0.125, on_grid("IQ2_S", idx), b[:, 34:66])


def iq3_xxs(b):
    words = b[:, 66:].copy().view(np.uint32)
    signs = even(fields(words, [0, 7, 14, 21], 127))
    return scaled(b, words >> 28, 0.25, on_grid("IQ3_XXS", b[:, 2:66]), signs)


def iq3_s(b):
    idx = b[:, 2:66] + bits(b[:, 66:74]).astype(int) * 256
    return scaled(b, fields(b[:, 106:], [0, 4], 15), 1, on_grid("IQ3_S", idx), b[:, 74:106])


def iq1_s(b):
    q = halves_of(b, 34, 8)
    idx = b[:, 2:34] + fields(q, [0, 3, 6, 9], 7).astype(int) * 256
    scale = np.repeat(half(b, 0) * (2 * (q >> 12 & 7).astype(np.float32) + 1), 32, 1)
    return scale * (on_grid("IQ1", idx) + np.repeat(np.where(q >> 15, -0.125, 0.125), 32, 1))


def iq1_m(b):
    q = fields(b[:, 32:48], [0, 4], 15)
    idx = b[:, :32] + (q & 7).astype(int) * 256
    scales = fields(halves_of(b, 48, 4), [0, 3, 6, 9], 7).astype(np.float32)
    scale = np.repeat(half(b, SCATTERED) * (2 * scales + 1), 16, 1)
    return scale * (on_grid("IQ1", idx) + np.repeat(np.where(q >> 3, -0.125, 0.125), 8, 1))


# Name: number, columns and bytes of a block, where its halves are, values of blocks.
BLOCKS = {
    "Q4_0": (2, 32, 18, [0], lambda b: half(b, 0) * (nibbles(b[:, 2:]).astype(np.float32) - 8)),
    "Q4_1": (3, 32, 20, [0, 2], lambda b: half(b, 0) * nibbles(b[:, 4:]) + half(b, 2)),
    "Q5_0": (6, 32, 22, [0], lambda b: half(b, 0) * (five(b, 2) - 16)),
    "Q5_1": (7, 32, 24, [0, 2], lambda b: half(b, 0) * five(b, 4) + half(b, 2)),
    "Q8_0": (8, 32, 34, [0], lambda b: half(b, 0) * b[:, 2:].view(np.int8)),
    "Q2_K": (10, 256, 84, [80, 82], q2_k),
    "Q3_K": (11, 256, 110, [108], q3_k),
    "Q4_K": (12, 256, 144, [0, 2], q4_k),
    "Q5_K": (13, 256, 176, [0, 2], q5_k),
    "Q6_K": (14, 256, 210, [208], q6_k),
    "IQ4_NL": (20, 32, 18, [0], lambda b: half(b, 0) * IQ4[nibbles(b[:, 2:])]),
    "IQ4_XS": (23, 256, 136, [0], iq4_xs),
    "IQ2_XXS": (16, 256, 66, [0], iq2_xxs),
    "IQ2_XS": (17, 256, 74, [0], iq2_xs),
    "IQ3_XXS": (18, 256, 98, [0], iq3_xxs),
    "IQ1_S": (19, 256, 50, [0], iq1_s),
    "IQ3_S": (21, 256, 110, [0], iq3_s),
    "IQ2_S": (22, 256, 82, [0], iq2_s),
    "IQ1_M": (29, 256, 56, [SCATTERED], iq1_m),
    "TQ1_0": (34, 256, 54, [52], tq1_0),
    "TQ2_0": (35, 256, 66, [64], lambda b: half(b, 64) * (pairs_k(b[:, :64]).astype(np.float32) - 1)),
    "MXFP4": (39, 32, 17, [], mxfp4),
}
TYPES |= {"NVFP4": 40} | {name: row[0] for name, row in BLOCKS.items()}


def random_blocks(name, shape, deviation, rng):
    """Random blocks [rows][bytes] and the values that they stand for, of about this deviation."""
    _, cols, n_bytes, halves, values = BLOCKS[name]
    n = int(np.prod(shape)) // cols
    blocks = rng.integers(0, 256, (n, n_bytes), dtype=np.uint8)
    for at in halves:
        put_half(blocks, at, rng.uniform(0.9, 1.1, n))
    if not halves:
        blocks[:, 0] = rng.integers(126, 130, n)
    factor = deviation / values(blocks).std()
    for i, at in enumerate(halves):  # offsets pull the mean to about zero
        sign = -1 if name in ("Q4_1", "Q5_1") and i else 1
        put_half(blocks, at, half(blocks, at)[:, 0] * factor * sign * (4 if sign < 0 else 1))
    if not halves:
        blocks[:, 0] = (blocks[:, 0].astype(int) + round(np.log2(factor))).astype(np.uint8)
    return blocks.reshape(-1), values(blocks).astype(np.float32).reshape(shape)


def sample_blocks(name, n=600):
    """Blocks [n][bytes] that are the same everywhere and have every entry of a grid."""
    _, _, n_bytes, halves, _ = BLOCKS[name]
    data = random.Random(name).randbytes(n * n_bytes)
    blocks = np.frombuffer(data, np.uint8).reshape(n, n_bytes).copy()
    for i, at in enumerate(halves):
        put_half(blocks, at, np.linspace(-1 - i, 2, n))
    return blocks


class Tensor:
    """A tensor by llama.cpp's name; data are bytes of the type."""

    def __init__(self, name, shape, dtype, data):
        self.name, self.shape, self.dtype, self.data = name, tuple(shape), dtype, data

    @staticmethod
    def of_values(name, values):
        return Tensor(name, values.shape, "F32", np.ascontiguousarray(values, np.float32))


def text(value):
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def packed(value):
    """A metadata value: its type, and the bytes."""
    if isinstance(value, bool):
        return BOOL, struct.pack("<B", value)
    if isinstance(value, int):
        return U32, struct.pack("<I", value)
    if isinstance(value, float):
        return F32, struct.pack("<f", value)
    if isinstance(value, str):
        return STR, text(value)
    kind = STR if value and isinstance(value[0], str) else F32 if value and isinstance(value[0], float) else I32
    items = b"".join(text(v) if kind == STR else struct.pack("<f" if kind == F32 else "<i", v) for v in value)
    return ARRAY, struct.pack("<IQ", kind, len(value)) + items


def header(metadata, tensors):
    out = [struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(metadata))]
    for key, value in metadata.items():
        kind, data = packed(value)
        out.append(text(key) + struct.pack("<I", kind) + data)
    offset = 0
    for t in tensors:
        out.append(text(t.name) + struct.pack("<I", len(t.shape)))
        out.append(struct.pack(f"<{len(t.shape)}Q", *reversed(t.shape)))
        out.append(struct.pack("<IQ", TYPES[t.dtype], offset))
        offset += -(-t.data.nbytes // ALIGNMENT) * ALIGNMENT
    data = b"".join(out)
    return data + bytes(-len(data) % ALIGNMENT)


def write(path, metadata, tensors):
    with open(path, "wb") as f:
        f.write(header(metadata, tensors))
        for t in tensors:
            f.write(t.data.tobytes())
            f.write(bytes(-t.data.nbytes % ALIGNMENT))


def write_parts(stem, metadata, tensors, n):
    """stem-00001-of-0000n.gguf and so on; the first has the metadata. Returns its path."""
    paths = [f"{stem}-{i + 1:05}-of-{n:05}.gguf" for i in range(n)]
    for i, path in enumerate(paths):
        split = {"split.no": i, "split.count": n, "split.tensors.count": len(tensors)}
        write(path, (metadata if i == 0 else {}) | split, tensors[i::n])
    return paths[0]


# ---- models as convert_hf_to_gguf.py writes them ------------------------------------------------

ARCHS = {
    "qwen3_moe": "qwen3moe",
    "qwen3_vl_moe_text": "qwen3vlmoe",
    "olmoe": "olmoe",
    "mixtral": "llama",
    "dots1": "dots1",
    "ernie4_5_moe": "ernie4_5-moe",
    "glm4_moe": "glm4moe",
    "minimax_m2": "minimax-m2",
    "gpt_oss": "gpt-oss",
    "gemma4_text": "gemma4",
    "deepseek_v3": "deepseek2",
    "kimi_k2": "deepseek2",
    "glm4_moe_lite": "deepseek2",
    "mistral4": "mistral4",
    "qwen3_next": "qwen3next",
    "qwen3_5_moe_text": "qwen35moe",
    "hy_v3": "hy_v3",
    "deepseek_v32": "deepseek32",
    "glm_moe_dsa": "glm-dsa",
}
# Architectures whose second norm of a layer stands behind attention.
POST_NORM = {"glm4moe", "gemma4", "gpt-oss", "qwen3next", "qwen35moe"}
PARTS = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_a_layernorm.weight": "attn_q_a_norm.weight",
    "self_attn.kv_a_layernorm.weight": "attn_kv_a_norm.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "self_attn.sinks": "attn_sinks.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.router.weight": "ffn_gate_inp.weight",
    "mlp.router.bias": "ffn_gate_inp.bias",
    "block_sparse_moe.gate.weight": "ffn_gate_inp.weight",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "block_sparse_moe.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.moe_statics.e_score_correction_bias": "exp_probs_b.bias",
    "self_attn.indexer.wq_b.weight": "indexer.attn_q_b.weight",
    "self_attn.indexer.wk.weight": "indexer.attn_k.weight",
    "self_attn.indexer.k_norm.weight": "indexer.k_norm.weight",
    "self_attn.indexer.k_norm.bias": "indexer.k_norm.bias",
    "self_attn.indexer.weights_proj.weight": "indexer.proj.weight",
    "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
    "linear_attn.in_proj_z.weight": "attn_gate.weight",
    "linear_attn.in_proj_b.weight": "ssm_beta.weight",
    "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
    "linear_attn.in_proj_ba.weight": "ssm_ba.weight",
    "linear_attn.norm.weight": "ssm_norm.weight",
    "linear_attn.out_proj.weight": "ssm_out.weight",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.conv1d.weight": "ssm_conv1d.weight",
    "mlp.shared_expert_gate.weight": "ffn_gate_inp_shexp.weight",
    "pre_feedforward_layernorm.weight": "ffn_norm.weight",
    "pre_feedforward_layernorm_2.weight": "pre_ffw_norm_2.weight",
    "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
    "post_feedforward_layernorm_1.weight": "post_ffw_norm_1.weight",
    "post_feedforward_layernorm_2.weight": "post_ffw_norm_2.weight",
    "layer_scalar": "layer_output_scale.weight",
    "router.proj.weight": "ffn_gate_inp.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
}
PROJECTIONS = {
    "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output",
    "q_a_proj": "attn_q_a", "q_b_proj": "attn_q_b", "kv_a_proj_with_mqa": "attn_kv_a_mqa",
}
EXPERTS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}


def layer_part(arch, part):
    """llama.cpp's name of a part of a layer."""
    if part == "post_attention_layernorm.weight":
        return "post_attention_norm.weight" if arch in POST_NORM else "ffn_norm.weight"
    if part in PARTS:
        return PARTS[part]
    if not part.startswith(("self_attn.", "mlp.", "block_sparse_moe.")):  # multi-token prediction
        return "nextn." + part.replace("shared_head.", "shared_head_")
    owner, _, end = part.partition(".")
    module, _, kind = end.rpartition(".")
    if owner == "self_attn":
        return f"{PROJECTIONS[module]}.{kind}"
    shared = module.removeprefix("shared_experts.").removeprefix("shared_expert.")
    return f"ffn_{EXPERTS[shared]}{'_shexp' if shared != module else ''}.{kind}"


def delta_value(name, v):
    """What llama.cpp's converter makes of Qwen3-Next's vectors."""
    if name.endswith(".A_log"):
        return -np.exp(v)
    if "conv1d" in name or "shared_expert_gate" in name:
        return v.squeeze()
    if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        return v + 1
    return v


def tiled(config, name, v):
    """Qwen3.5's value heads, sorted so that those of one key head are far apart."""
    groups, dim = config["linear_num_key_heads"], config["linear_value_head_dim"]
    heads, keys = config["linear_num_value_heads"], 2 * groups * config["linear_key_head_dim"]
    part = name.rpartition("linear_attn.")[2]
    if part == name or part == "norm.weight":
        return v

    def swap(x):
        return x.reshape(groups, heads // groups, -1).swapaxes(0, 1).reshape(x.shape)

    if part == "out_proj.weight":
        return v.reshape(-1, groups, heads // groups, dim).swapaxes(1, 2).reshape(v.shape)
    if part in ("in_proj_qkv.weight", "conv1d.weight"):
        return np.concatenate([v[:keys], swap(v[keys:])])
    return swap(v)


def named(config, values):
    """(llama.cpp's name, values) of every tensor, experts merged and kv_b split."""
    arch, merged = ARCHS[config["model_type"]], {}
    if arch in ("qwen3next", "qwen35moe"):
        values = {n: delta_value(n, v) for n, v in values.items() if not n.startswith("mtp.")}
    if arch == "qwen35moe":
        values = {n: tiled(config, n, v) for n, v in values.items()}
    for name, v in values.items():
        if arch == "qwen3vlmoe" and v.ndim == 3:
            v = v.transpose(0, 2, 1)
        if arch == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = v.reshape(-1, 2, config["head_dim"] // 2, v.shape[1])
            v = heads.swapaxes(1, 2).reshape(v.shape)
        if name.endswith("moe_statics.e_score_correction_bias"):
            v = v.squeeze()
        if not name.startswith("model.layers."):
            names = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight":
                     "output_norm.weight", "lm_head.weight": "output.weight"}
            yield names[name], v
            continue
        layer, part = name.removeprefix("model.layers.").split(".", 1)
        p = f"blk.{layer}"
        if part == "linear_attn.in_proj_qkvz.weight":
            groups = config["linear_num_key_heads"]
            k, heads = config["linear_key_head_dim"], config["linear_num_value_heads"] // groups
            wide = heads * config["linear_value_head_dim"]
            parts = np.split(v.reshape(groups, -1, v.shape[1]), [k, 2 * k, 2 * k + wide], 1)
            flat = [x.reshape(-1, v.shape[1]) for x in parts]
            yield f"{p}.attn_qkv.weight", np.concatenate(flat[:3])
            yield f"{p}.attn_gate.weight", flat[3]
        elif part.endswith(("experts.gate_up_proj", "experts.down_proj")) and arch in ("gemma4", "mistral4"):
            yield f"{p}.ffn_{'down' if 'down' in part else 'gate_up'}_exps.weight", v
        elif part.endswith("experts.gate_up_proj") and arch != "gpt-oss":
            yield f"{p}.ffn_gate_exps.weight", v[:, : v.shape[1] // 2]
            yield f"{p}.ffn_up_exps.weight", v[:, v.shape[1] // 2 :]
        elif part.endswith("experts.down_proj") and arch != "gpt-oss":
            yield f"{p}.ffn_down_exps.weight", v
        elif ".experts.gate_up_proj" in part:  # of gpt-oss: rows alternate, matrices are transposed
            kind = "bias" if part.endswith("bias") else "weight"
            rows = v if kind == "bias" else v.transpose(0, 2, 1)
            yield f"{p}.ffn_gate_exps.{kind}", rows[:, 0::2]
            yield f"{p}.ffn_up_exps.{kind}", rows[:, 1::2]
        elif ".experts.down_proj" in part and v.ndim + part.endswith("bias") == 3:
            kind = "bias" if part.endswith("bias") else "weight"
            yield f"{p}.ffn_down_exps.{kind}", v if kind == "bias" else v.transpose(0, 2, 1)
        elif ".experts." in part:
            expert, module = part.split(".")[-3:-1]
            merged.setdefault(f"{p}.ffn_{EXPERTS[module]}_exps.weight", {})[int(expert)] = v
        elif part == "self_attn.kv_b_proj.weight":
            nope, n = config["qk_nope_head_dim"], config["num_attention_heads"]
            heads = v.reshape(n, -1, v.shape[1])
            yield f"{p}.attn_k_b.weight", heads[:, :nope].transpose(0, 2, 1)
            yield f"{p}.attn_v_b.weight", heads[:, nope:]
        else:
            yield f"{p}.{layer_part(arch, part)}", v
    if arch == "gemma4" and len(values) > 1:
        n = config["global_head_dim"] // 2
        turning = config["rope_parameters"]["full_attention"].get("partial_rotary_factor", 1) * n
        yield "rope_freqs.weight", np.where(np.arange(n) < int(turning), 1, 1e30).astype(np.float32)
    for name, parts in merged.items():
        yield name, np.stack([parts[e] for e in sorted(parts)])


def metadata_of(config):
    """The architecture's metadata, without a tokenizer."""
    arch, c = ARCHS[config["model_type"]], config
    out, has_mla = {"context_length": c["max_position_embeddings"]}, "kv_lora_rank" in c
    out |= {"embedding_length": c["hidden_size"], "attention.head_count": c["num_attention_heads"]}
    out["block_count"] = c["num_hidden_layers"] + c.get("num_nextn_predict_layers", 0)
    out["attention.layer_norm_rms_epsilon"] = float(c.get("rms_norm_eps", 1e-6))
    width = c.get("intermediate_size", c.get("moe_intermediate_size"))
    out["feed_forward_length"] = width
    kinds = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
    experts = next(c[k] for k in kinds if k in c)
    out |= {"expert_count": experts, "expert_used_count": c.get("num_experts_per_tok", c.get("moe_k", c.get("top_k_experts")))}
    out["expert_feed_forward_length"] = c.get("moe_intermediate_size", width)
    rope = (c.get("rope_parameters") or {}) | (c.get("rope_scaling") or {})
    out["rope.freq_base"] = float(rope.get("rope_theta", c.get("rope_theta", 10000.0)))
    if rope.get("type", rope.get("rope_type", "default")) == "yarn":
        out |= {"rope.scaling.type": "yarn", "rope.scaling.factor": float(rope["factor"]),
                "rope.scaling.original_context_length": rope["original_max_position_embeddings"]}
        if "mscale_all_dim" in rope and has_mla:
            out["rope.scaling.yarn_log_multiplier"] = 0.1 * rope["mscale_all_dim"]
    if "llama_4_scaling_beta" in rope:
        out["attention.temperature_scale"] = float(rope["llama_4_scaling_beta"])
    if has_mla:
        rotary, latent = c["qk_rope_head_dim"], c["kv_lora_rank"]
        out |= {"attention.head_count_kv": 1, "attention.key_length": latent + rotary,
                "attention.value_length": latent, "attention.kv_lora_rank": latent,
                "attention.key_length_mla": c["qk_nope_head_dim"] + rotary,
                "attention.value_length_mla": c["v_head_dim"], "rope.dimension_count": rotary}
        if c["q_lora_rank"] is not None:
            out["attention.q_lora_rank"] = c["q_lora_rank"]
    else:
        out |= {"attention.head_count_kv": c["num_key_value_heads"],
                "attention.key_length": c["head_dim"], "attention.value_length": c["head_dim"]}
        part = c.get("rotary_dim", c["head_dim"]) / c["head_dim"]
        part = rope.get("partial_rotary_factor", c.get("partial_rotary_factor", part))
        out["rope.dimension_count"] = int(c["head_dim"] * part)
    if "linear_num_key_heads" in c:
        n = c["linear_num_value_heads"]
        out |= {"ssm.conv_kernel": c["linear_conv_kernel_dim"], "ssm.time_step_rank": n,
                "ssm.state_size": c["linear_key_head_dim"], "ssm.group_count": c["linear_num_key_heads"],
                "ssm.inner_size": n * c["linear_value_head_dim"],
                "expert_shared_feed_forward_length": c["shared_expert_intermediate_size"]}
    if "sliding_window" in c and c["sliding_window"]:
        out["attention.sliding_window"] = c["sliding_window"]
    if "n_routed_experts" in c:
        kind = 1 if arch == "mistral4" else 2  # softmax, sigmoid
        out |= {"expert_shared_count": c["n_shared_experts"], "expert_gating_func": kind,
                "leading_dense_block_count": c.get("first_k_dense_replace", 0),
                "expert_weights_scale": float(c["routed_scaling_factor"]),
                "expert_weights_norm": c["norm_topk_prob"], "expert_group_count": c["n_group"],
                "expert_group_used_count": c["topk_group"],
                "nextn_predict_layers": c.get("num_nextn_predict_layers", 0)}
    if "index_topk" in c:
        out |= {"attention.indexer.head_count": c["index_n_heads"], "attention.indexer.top_k": c["index_topk"],
                "attention.indexer.key_length": c["index_head_dim"]}
        if "indexer_types" in c:
            out["attention.indexer.types"] = [t == "full" for t in c["indexer_types"]]
    if arch == "ernie4_5-moe":
        out |= {"leading_dense_block_count": c["moe_layer_start_index"],
                "interleave_moe_layer_step": c["moe_layer_interval"],
                "expert_shared_count": c["moe_num_shared_experts"]}
    if arch == "gemma4":
        last, ropes = c["num_hidden_layers"] - 1, c["rope_parameters"]
        kinds = c.get("layer_types") or [(i + 1) % 6 and "sliding_attention" for i in range(last + 1)]
        windows = [t == "sliding_attention" for t in kinds]
        heads = c["num_global_key_value_heads"] if c["attention_k_eq_v"] else c["num_key_value_heads"]
        out |= {"attention.sliding_window_pattern": windows, "attention.key_length": c["global_head_dim"],
                "attention.head_count_kv": [c["num_key_value_heads"] if w and i < last else heads for i, w in enumerate(windows)],
                "attention.key_length_swa": c["head_dim"], "rope.freq_base": ropes["full_attention"]["rope_theta"],
                "rope.freq_base_swa": ropes["sliding_attention"]["rope_theta"], "rope.dimension_count": c["global_head_dim"],
                "rope.dimension_count_swa": c["head_dim"], "embedding_length_per_layer_input": 0,
                "attention.shared_kv_layers": 0}
        if c["final_logit_softcapping"]:
            out["final_logit_softcapping"] = c["final_logit_softcapping"]
    if arch == "hy_v3":
        out |= {"expert_weights_scale": float(c.get("router_scaling_factor", 1)), "expert_gating_func": 2,
                "expert_shared_feed_forward_length": c["moe_intermediate_size"] * c.get("num_shared_experts", 1)}
    if c.get("scoring_func") == "sigmoid":
        out["expert_gating_func"] = 2
    pre = {"glm4_moe_lite": "glm4"}.get(c["model_type"], "qwen2")
    return {"general.architecture": arch} | {f"{arch}.{k}": v for k, v in out.items()} | {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.bos_token_id": c["bos_token_id"],
        "tokenizer.ggml.eos_token_id": c["eos_token_id"],
    }


def vocabulary(tokens, types, **more):
    """Metadata of a tokenizer; more has its merges or scores."""
    out = {"tokens": tokens, "token_type": types} | more
    return {f"tokenizer.ggml.{k}": v for k, v in out.items()}
