#!/usr/bin/env python3
"""Draws src/architecture.svg from src/architecture.txt, or what is named instead.

usage: scripts/draw.py [TEXT [SVG]]

A line of the text is one thing, measured in steps of 10 pixels; # begins a remark:

  size WIDTH HEIGHT
  box KIND X Y WIDTH HEIGHT TITLE | LINE | LINE...     KIND: process, memory or group
  arrow X1 Y1 X2 Y2 TEXT                               two heads where TEXT begins with <>
"""

import sys
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parent.parent
STEP = 10
STYLE = """
  text { font: 13px sans-serif; fill: #1f2328 } .title { font-weight: bold }
  .process { fill: #ddf4ff; stroke: #0969da } .memory { fill: #fff8c5; stroke: #9a6700 }
  .group { fill: none; stroke: #8c959f; stroke-dasharray: 5 4 }
  line { stroke: #57606a; stroke-width: 1.5 } .note { font-size: 12px; fill: #57606a }
"""


def text(x, y, words, kind="", anchor="start"):
    return f'<text x="{x}" y="{y}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'


def box(kind, x, y, width, height, words):
    x, y, width, height = (int(v) * STEP for v in (x, y, width, height))
    title, *lines = [w.strip() for w in words.split("|")]
    yield f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="6"/>'
    yield text(x + 10, y + 20, title, "title")
    for i, line in enumerate(lines):
        yield text(x + 10, y + 40 + 18 * i, line)


def arrow(x1, y1, x2, y2, words=""):
    x1, y1, x2, y2 = (int(v) * STEP for v in (x1, y1, x2, y2))
    both = words.startswith("<>")
    start = ' marker-start="url(#head)"' if both else ""
    yield f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" marker-end="url(#head)"{start}/>'
    words = words.removeprefix("<>").strip()
    if x1 == x2:
        yield text(x1 + 8, (y1 + y2) // 2 + 4, words, "note")
    else:
        yield text((x1 + x2) // 2, min(y1, y2) - 7, words, "note", "middle")


def draw(source):
    out, size = [], (0, 0)
    for line in source.splitlines():
        kind, _, rest = line.partition(" ")
        if kind == "size":
            size = [int(v) * STEP for v in rest.split()]
        elif kind == "box":
            out += box(*rest.split(maxsplit=5))
        elif kind == "arrow":
            out += arrow(*rest.split(maxsplit=4))
        elif line.strip() and not line.startswith("#"):
            sys.exit(f"draw: cannot read: {line}")
    width, height = size
    head = (
        '<marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
        'orient="auto-start-reverse"><path d="M0 0L10 5L0 10z" fill="#57606a"/></marker>'
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
            f"<style>{STYLE}</style><defs>{head}</defs>",
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
            *out,
            "</svg>\n",
        ]
    )


def main():
    source = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "src/architecture.txt"
    target = Path(sys.argv[2]) if len(sys.argv) > 2 else source.with_suffix(".svg")
    target.write_text(draw(source.read_text()))


if __name__ == "__main__":
    main()
