#!/usr/bin/env python3
"""Writes src/text/unicode/python_chars_tables.inc: the character properties behind Python's str methods.

    python3 scripts/make_jinja_unicode.py > src/text/unicode/python_chars_tables.inc

The reference for chat templates is Python's jinja2, so the tables are what Python itself answers;
the Unicode version stands in the head of the file.
"""

import unicodedata

MAX = 0x110000
SCALARS = [c for c in range(MAX) if not 0xD800 <= c <= 0xDFFF]


def strided(points):
    """Greedy runs (first, last, step) with step 1 or 2: alternating cases are one run."""
    runs = []
    i = 0
    while i < len(points):
        best = (1, 1)
        for step in (1, 2):
            n = 1
            while i + n < len(points) and points[i + n] == points[i] + n * step:
                n += 1
            if n > best[0]:
                best = (n, step)
        runs.append((points[i], points[i] + (best[0] - 1) * best[1], best[1]))
        i += best[0]
    return runs


def emit(head, rows, tail="};"):
    print(head)
    line = "   "
    for row in rows:
        cell = " {" + ", ".join(row) + "},"
        if len(line) + len(cell) > 100:
            print(line)
            line = "   "
        line += cell
    print(line)
    print(tail)


def emit_set(name, test):
    runs = strided([c for c in SCALARS if test(chr(c))])
    emit(f"static const run {name}[] = {{", [(hex(a), hex(b), str(s)) for a, b, s in runs])


def emit_map(name, method):
    """Single-character results, as runs of equal difference."""
    pairs = [(c, ord(method(chr(c))) - c) for c in SCALARS
             if len(method(chr(c))) == 1 and method(chr(c)) != chr(c)]
    rows = []
    for delta in sorted({d for _, d in pairs}):
        for a, b, s in strided([c for c, d in pairs if d == delta]):
            rows.append((a, b, s, delta))
    rows.sort()
    # Interleaved strides would break the binary search: fall back to single steps there.
    flat = []
    for a, b, s, d in rows:
        if flat and a <= flat[-1][1]:
            prev = flat.pop()
            flat += [(c, c, 1, prev[3]) for c in range(prev[0], prev[1] + 1, prev[2])]
            flat += [(c, c, 1, d) for c in range(a, b + 1, s)]
            flat.sort()
        else:
            flat.append((a, b, s, d))
    assert all(x[1] < y[0] for x, y in zip(flat, flat[1:]))
    emit(f"static const shift {name}[] = {{",
         [(hex(a), hex(b), str(s), str(d)) for a, b, s, d in flat])


def emit_special(name, method, usual):
    rows = []
    for c in SCALARS:
        text = method(chr(c))
        if text != usual(chr(c)):
            out = [hex(ord(x)) for x in text] + ["0"] * (3 - len(text))
            rows.append([hex(c)] + ["{" + ", ".join(out) + "}"])
    emit(f"static const special {name}[] = {{", rows)


def single(method):
    return lambda c: method(c) if len(method(c)) == 1 else c


def ignorable(c):
    """Case_Ignorable, behind the rule for a final sigma: ask Python's own lower()."""
    return ("A" + c + "\u03a3").lower()[-1] == "\u03c2" and not (
        c.isupper() or c.islower() or c.istitle())


print(f"// Unicode {unicodedata.unidata_version}, written by scripts/make_jinja_unicode.py.")
print("// clang-format off")
emit_set("alpha", str.isalpha)
emit_set("decimal", str.isdecimal)
emit_set("digit", str.isdigit)
emit_set("numeric", str.isnumeric)
emit_set("upper", str.isupper)
emit_set("lower", str.islower)
emit_set("title", lambda c: c.istitle() and not c.isupper())
emit_set("unprintable", lambda c: not c.isprintable())
emit_set("case_ignorable", ignorable)
emit_map("to_lower", str.lower)
emit_map("to_upper", str.upper)
emit_special("lower_special", str.lower, single(str.lower))
emit_special("upper_special", str.upper, single(str.upper))
emit_special("title_special", str.title, str.upper)
print("// clang-format on")
