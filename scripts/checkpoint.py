"""Checkpoints as the hubs publish them: safetensors shards with their index, BF16 and FP8 blocks.

Needs numpy only. Everything here is about bytes on disk; what the tensors are called and how large
they are is architectures.py's business.
"""

import json
import os
import struct

import numpy as np

BLOCK = 128  # rows and columns that share one FP8 scale
E4M3_MAX = 448.0
ITEM_BYTES = {"I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "U8": 1}


def _e4m3_values():
    """The 127 finite values of E4M3 without sign, by code: 0 .. 448."""
    code = np.arange(127)
    exponent, mantissa = code >> 3, code & 7
    normal = np.ldexp(8.0 + mantissa, exponent - 10)
    return np.where(exponent == 0, np.ldexp(mantissa.astype(float), -9), normal)


E4M3_VALUES = _e4m3_values()
_E4M3_MIDPOINTS = ((E4M3_VALUES[1:] + E4M3_VALUES[:-1]) / 2).astype(np.float32)


def to_bf16(x):
    """float32 -> BF16 bits (uint16), round to nearest even. Finite input only."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_e4m3(x):
    """float32 -> E4M3 codes (uint8), round to nearest even, saturating at 448."""
    magnitude = np.abs(x).astype(np.float32)
    code = np.searchsorted(_E4M3_MIDPOINTS, magnitude, side="left")
    tie = code < len(_E4M3_MIDPOINTS)
    tie &= _E4M3_MIDPOINTS[np.minimum(code, len(_E4M3_MIDPOINTS) - 1)] == magnitude
    code += tie & (code & 1 == 1)
    return (code | np.where(np.signbit(x), 0x80, 0)).astype(np.uint8)


def from_e4m3(codes):
    values = E4M3_VALUES.astype(np.float32)[np.minimum(codes & 0x7F, 126)]
    return np.where(codes & 0x80, -values, values)


def _blocks(n):
    return (n + BLOCK - 1) // BLOCK


def scale_shape(shape):
    return tuple(_blocks(n) for n in shape)


def expand_scales(scales, shape):
    """One scale a block -> one scale an element; the last blocks may be cut short."""
    return np.repeat(np.repeat(scales, BLOCK, 0), BLOCK, 1)[: shape[0], : shape[1]]


def quantize_blocks(w, bf16_scales=False, powers=False):
    """float32 [rows][cols] -> (E4M3 codes, float32 scale of each 128x128 block).

    Scales are those that a checkpoint calls weight_scale_inv: weight = code * scale. bf16_scales
    rounds them to BF16 first, as the Qwen FP8 checkpoints store them; powers, up to one of two.
    """
    rows, cols = w.shape
    padded = np.zeros((_blocks(rows) * BLOCK, _blocks(cols) * BLOCK), np.float32)
    padded[:rows, :cols] = np.abs(w)
    peak = padded.reshape(_blocks(rows), BLOCK, _blocks(cols), BLOCK).max(axis=(1, 3))
    scales = (np.maximum(peak, 1e-12) / E4M3_MAX).astype(np.float32)
    if powers:
        scales = np.exp2(np.ceil(np.log2(scales))).astype(np.float32)
    if bf16_scales:
        scales = from_bf16(to_bf16(scales))
    return to_e4m3(w / expand_scales(scales, w.shape)), scales


def dequantize_blocks(codes, scales):
    return from_e4m3(codes) * expand_scales(scales, codes.shape)


def tensor_bytes(shape, dtype):
    return int(np.prod(shape, dtype=np.int64)) * ITEM_BYTES[dtype]


class Entry:
    """One tensor of a checkpoint. chunks() yields its bytes, in order, as numpy arrays."""

    def __init__(self, name, shape, dtype, chunks):
        self.name, self.shape, self.dtype, self.chunks = name, tuple(shape), dtype, chunks

    @property
    def n_bytes(self):
        return tensor_bytes(self.shape, self.dtype)

    @staticmethod
    def of_array(name, array, dtype):
        """array holds the stored bits: uint8 for F8_E4M3, uint16 for BF16, else the dtype itself."""
        assert array.dtype.itemsize == ITEM_BYTES[dtype]
        return Entry(name, array.shape, dtype, lambda: [np.ascontiguousarray(array)])


def write_shard(path, entries):
    """Widest dtype first, so that every tensor stays aligned to its elements."""
    entries = sorted(entries, key=lambda e: (-ITEM_BYTES[e.dtype], e.name))
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for e in entries:
        header[e.name] = {
            "dtype": e.dtype,
            "shape": list(e.shape),
            "data_offsets": [offset, offset + e.n_bytes],
        }
        offset += e.n_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb", buffering=0) as f:
        _write_all(f, struct.pack("<Q", len(text)) + text)
        for e in entries:
            for chunk in e.chunks():
                _write_all(f, memoryview(chunk).cast("B"))
        if f.tell() != 8 + len(text) + offset:
            raise ValueError(f"{path}: a tensor did not yield the bytes its shape promises")


def _write_all(f, data):
    view = memoryview(data)
    while view:
        view = view[f.write(view) :]


def write_shards(directory, entries, shard_bytes, progress=None):
    """Fills shards in the order given; writes model-0000i-of-0000n.safetensors and the index."""
    shards, filled = [[]], 0
    for e in entries:
        if shards[-1] and filled + e.n_bytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(e)
        filled += e.n_bytes
    weight_map = {}
    for i, shard in enumerate(shards):
        name = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        write_shard(os.path.join(directory, name), shard)
        weight_map.update({e.name: name for e in shard})
        if progress:
            progress(i + 1, len(shards))
    total = sum(e.n_bytes for shard in shards for e in shard)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(os.path.join(directory, "model.safetensors.index.json"), index)
    return total


def write_json(path, value):
    with open(path, "w", encoding="utf-8") as f:
        json.dump(value, f, indent=2, ensure_ascii=False)
        f.write("\n")


def read_shard(path):
    """name -> (dtype, array of the stored bits), for tools and tests on small files."""
    kinds = {"I64": np.int64, "F32": np.float32, "I32": np.int32, "BF16": np.uint16}
    kinds |= {"F16": np.float16, "F8_E4M3": np.uint8, "I8": np.int8, "U8": np.uint8}
    data = np.fromfile(path, np.uint8)
    (n,) = struct.unpack("<Q", data[:8].tobytes())
    header = json.loads(data[8 : 8 + n].tobytes())
    header.pop("__metadata__", None)
    body, tensors = data[8 + n :], {}
    for name, info in header.items():
        begin, end = info["data_offsets"]
        array = body[begin:end].view(kinds[info["dtype"]]).reshape(info["shape"])
        tensors[name] = (info["dtype"], array)
    return tensors
