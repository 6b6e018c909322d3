#!/usr/bin/env python3
"""Writes what must agree with llama.cpp's own Python package `gguf`.

kernels/grids.inc: the grids of IQ1, IQ2 and IQ3, packed. tests/golden/gguf_blocks.json: for every
format in blocks, the digest of the float32 values of gguf_files.sample_blocks.

usage: make_gguf_grids.py      (needs the package `gguf`)
"""

import hashlib
import importlib.metadata
import json
import pathlib

import gguf
import numpy as np
from gguf import quants

import gguf_files

ROOT = pathlib.Path(__file__).resolve().parents[1]
HEAD = """\
// kernels/grids.inc - the grids of GGUF's formats IQ1, IQ2 and IQ3; made by scripts/make_gguf_grids.py.
// The columns of these formats, eight or (IQ3) four at a time, are an entry of a grid. A number is
// an entry: its first column in the lowest two (IQ3: four) bits, as the place of a value among
//   IQ1        -1, 0, 1
//   IQ2        8, 25, 43
//   IQ3_XXS    4, 12, 20, 28, 36, 44, 52, 62
//   IQ3_S      1, 3, 5, 7, 9, 11, 13, 15
// GGUF_.._GRID(F) is F(entry) for every entry; IQ1_S and IQ1_M share a grid.
#define GRID_ROW(F, a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p) \\
  F(0x##a) F(0x##b) F(0x##c) F(0x##d) F(0x##e) F(0x##f) F(0x##g) F(0x##h) \\
  F(0x##i) F(0x##j) F(0x##k) F(0x##l) F(0x##m) F(0x##n) F(0x##o) F(0x##p)
"""


def grid(name, cls):
    # Two bytes an entry, the lower one first, in the digits of the package.
    entries = np.frombuffer(bytes.fromhex(cls.grid_hex.decode()), np.uint16)
    assert len(entries) == cls.grid_shape[0], name
    rows = [",".join(f"{e:04x}" for e in entries[i : i + 16]) for i in range(0, len(entries), 16)]
    lines = [f"#define GGUF_{name}_GRID(F)", *(f"  GRID_ROW(F,{row})" for row in rows)]
    return " \\\n".join(lines) + "\n"


def digest(name):
    kind = gguf.GGMLQuantizationType[name]
    values = quants.dequantize(gguf_files.sample_blocks(name), kind)
    return hashlib.sha256((values.astype(np.float32) + np.float32(0)).tobytes()).hexdigest()


def main():
    grids = {n: getattr(quants, n) for n in ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")}
    text = HEAD + "".join(grid(n, c) for n, c in (grids | {"IQ1": quants.IQ1_S}).items())
    (ROOT / "kernels/grids.inc").write_text(text)
    out = {"gguf": importlib.metadata.version("gguf")} | {n: digest(n) for n in gguf_files.BLOCKS}
    (ROOT / "tests/golden/gguf_blocks.json").write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
