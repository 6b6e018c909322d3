#!/usr/bin/env python3
"""Writes the Unicode tables of src/text/unicode, each from what it must agree with.

unicode_tables.inc: what PCRE2 does not give the tokenizer. The `tokenizers` library is the reference,
so it is asked what it knows: its normalizers stand at an older Unicode than Python's unicodedata, its
regular expressions (Oniguruma) at a newer one than the oldest PCRE2 we build with. Canonical data is
stable between versions, so what the library does not know is left out and everything else comes from
unicodedata.

python_chars_tables.inc: the character properties behind Python's str methods. The reference for chat
templates is Python's jinja2, so the tables are what Python itself returns.

usage: make_unicode_tables.py [FOLDER]      (needs the package `tokenizers` and Python 3.11)
"""

import sys
import unicodedata
from bisect import bisect
from pathlib import Path

import tokenizers
from tokenizers import Regex, normalizers, pre_tokenizers

# General categories of PCRE2 10.42, Debian 12's; newer ones must not be taken for granted.
BASE_UNICODE = "14.0.0"
SCALARS = [c for c in range(0x110000) if not 0xD800 <= c <= 0xDFFF]
CATEGORIES = "Lu Ll Lt Lm Lo Mn Mc Me Nd Nl No Pc Pd Ps Pe Pi Pf Po Sm Sc Sk So Zs Cf".split()
SCRIPTS = (
    "Arabic Armenian Bengali Common Cyrillic Devanagari Ethiopic Georgian Greek Gujarati Gurmukhi Han "
    "Hangul Hebrew Hiragana Inherited Kannada Katakana Khmer Lao Latin Malayalam Mongolian Myanmar Oriya "
    "Sinhala Tamil Telugu Thai Tibetan"
).split()
# CJK compatibility ideographs, each of which has one other as its decomposition, or none.
IDEOGRAPHS = [*range(0xF900, 0xFADA), *range(0x2F800, 0x2FA1E)]

# ---- for the tokenizer, by the `tokenizers` library -------------------------------------------------

nfd = normalizers.NFD().normalize_str


def matching(prop):
    """Code points that the reference matches with \\p{prop}."""
    split = pre_tokenizers.Split(Regex(r"\p{%s}" % prop), "removed", invert=True)
    found = set()
    for i in range(0, len(SCALARS), 4096):
        for piece, _ in split.pre_tokenize_str("".join(map(chr, SCALARS[i : i + 4096]))):
            found.update(map(ord, piece))
    return found


def decompositions():
    """(code point, first, second or 0, composes) for every canonical decomposition in one step."""
    rows = []
    for c in SCALARS:
        text = unicodedata.decomposition(chr(c))
        if not text or text.startswith("<") or nfd(chr(c)) == chr(c):
            continue
        parts = [int(part, 16) for part in text.split()] + [0]
        composes = parts[1] and unicodedata.normalize("NFC", chr(parts[0]) + chr(parts[1])) == chr(c)
        rows.append((c, parts[0], parts[1], bool(composes)))
    return rows


def orders_as_known(c):
    """Whether the reference's canonical ordering knows the class of c."""
    for other in "\u0334\u0301\u0345":
        for text in ("a" + chr(c) + other, "a" + other + chr(c)):
            if nfd(text) != unicodedata.normalize("NFD", text):
                return False
    return True


def combining_classes():
    """(first, last, class) by rising code point."""
    runs = []
    for c in SCALARS:
        ccc = unicodedata.combining(chr(c))
        if not ccc or not orders_as_known(c):
            continue
        if runs and runs[-1][1] == c - 1 and runs[-1][2] == ccc:
            runs[-1][1] = c
        else:
            runs.append([c, c, ccc])
    return runs


def stand_ins():
    """(first, last, stand-in): newer code points, and the nearest older one that has the same
    category, UTF-8 length and script, or where there is none, one of no script in SCRIPTS."""
    category, script = {}, {}
    for name in CATEGORIES:
        category.update(dict.fromkeys(matching(name), name))
    for name in SCRIPTS:
        script.update(dict.fromkeys(matching(name), name))
    older, newer = {}, []
    for c in SCALARS:
        traits = (category.get(c), len(chr(c).encode()), script.get(c))
        if traits[0] in (None, unicodedata.category(chr(c))):
            older.setdefault(traits, []).append(c)
        else:
            newer.append((c, traits))
    runs = []
    for c, traits in newer:
        tries = (traits[:2] + (script,) for script in (traits[2], None, "Common", "Inherited"))
        alike = next(older[traits] for traits in tries if traits in older)
        near = alike[max(0, bisect(alike, c) - 1)]
        if runs and runs[-1][1] == c - 1 and runs[-1][2] == near:
            runs[-1][1] = c
        else:
            runs.append([c, c, near])
    return runs


# ---- for templates, by Python ------------------------------------------------------------------------


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


def emit(out, head, rows):
    write_cells(out, head, ("{" + ", ".join(row) + "}" for row in rows))


def emit_set(out, name, test):
    """Where the property begins, ends, begins again, and so on."""
    bounds, inside = [], False
    for c in range(0x110001):
        if inside != (c < 0x110000 and not 0xD800 <= c <= 0xDFFF and test(chr(c))):
            bounds.append(hex(c))
            inside = not inside
    write_cells(out, f"static const uint32_t {name}[] = {{", bounds)


def emit_map(out, name, method, usual):
    """Single-character results that are not the usual one, as runs of equal difference."""
    pairs = [
        (c, ord(method(chr(c))) - c)
        for c in SCALARS
        if len(method(chr(c))) == 1 and method(chr(c)) != usual(chr(c))
    ]
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
    rows = [(hex(a), hex(b), str(s), str(d)) for a, b, s, d in flat]
    emit(out, f"static const shift {name}[] = {{", rows)


def emit_special(out, name, method, usual):
    rows = []
    for c in SCALARS:
        text = method(chr(c))
        if len(text) > 1 and text != usual(chr(c)):
            points = [hex(ord(x)) for x in text] + ["0"] * (3 - len(text))
            rows.append([hex(c)] + ["{" + ", ".join(points) + "}"])
    emit(out, f"static const special {name}[] = {{", rows)


def ignorable(c):
    """Case_Ignorable, of the rule for a final sigma, by Python's own lower()."""
    return ("A" + c + "\u03a3").lower()[-1] == "\u03c2" and not (c.isupper() or c.islower() or c.istitle())


# ---- writing C --------------------------------------------------------------------------------------


def write_cells(out, head, cells):
    """An array, its cells filled into lines of at most 100 columns."""
    out.append(head)
    line = "   "
    for cell in cells:
        if len(line) + len(cell) + 2 > 100:
            out.append(line)
            line = "   "
        line += f" {cell},"
    out += [line, "};"]


def write_table(out, name, comment, rows):
    head = f"// {comment}\nstatic const unicode_triple {name}[] = {{"
    write_cells(out, head, ("{" + ", ".join(f"0x{v:X}" for v in row) + "}" for row in rows))
    out[-1] += "\n"


def write_list(out, name, comment, values, kind="uint32_t"):
    write_cells(out, f"// {comment}\nstatic const {kind} {name}[] = {{", (f"0x{v:X}" for v in values))
    out[-1] += "\n"


def tokenizer_tables():
    steps = decompositions()
    ideographs = {c: a for c, a, _, _ in steps if c in IDEOGRAPHS}
    steps = [step for step in steps if step[0] not in ideographs]
    pairs = sorted((a, b, i) for i, (_, a, b, composes) in enumerate(steps) if composes)
    out = [
        f"// Made by scripts/make_unicode_tables.py from unicodedata {unicodedata.unidata_version} and "
        f"tokenizers {tokenizers.__version__}. Do not edit.\n"
    ]
    write_table(out, "decompositions", "One canonical step: code point, first, second or 0.",
                [(c, a, b) for c, a, b, _ in steps])
    write_list(out, "ideographs", "What the CJK compatibility ideographs decompose to, or 0: U+F900 to U+FAD9, then "
               "U+2F800 to U+2FA1D.", [ideographs.get(c, 0) for c in IDEOGRAPHS])
    write_list(out, "compositions", "Places in decompositions of what composes, by first and second; Hangul is "
               "arithmetic.", [i for *_, i in pairs], "uint16_t")
    write_table(out, "combining_classes", "First, last, canonical combining class where not 0.",
                combining_classes())
    write_table(out, "stand_ins", "First, last, an older code point that patterns treat alike.",
                stand_ins())
    return "\n".join(out)


def python_tables():
    out = [
        "// Made by scripts/make_unicode_tables.py from Python's str, Unicode "
        f"{unicodedata.unidata_version}. Do not edit.",
        "// clang-format off",
    ]
    emit_set(out, "digit", str.isdigit)
    emit_set(out, "cased", lambda c: c.isupper() or c.islower() or c.istitle())
    emit_set(out, "unprintable", lambda c: not c.isprintable())
    emit_set(out, "case_ignorable", ignorable)
    emit_map(out, "to_lower", str.lower, str)
    emit_map(out, "to_upper", str.upper, str)
    emit_map(out, "to_title", str.title, str.upper)
    emit_special(out, "lower_special", str.lower, str)
    emit_special(out, "upper_special", str.upper, str)
    emit_special(out, "title_special", str.title, str.upper)
    out.append("// clang-format on\n")
    return "\n".join(out)


def main():
    if unicodedata.unidata_version != BASE_UNICODE:
        sys.exit(f"unicodedata is {unicodedata.unidata_version}, not {BASE_UNICODE}: use Python 3.11")
    default = Path(__file__).resolve().parent.parent / "src/text/unicode"
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else default
    (folder / "unicode_tables.inc").write_text(tokenizer_tables())
    (folder / "python_chars_tables.inc").write_text(python_tables())


if __name__ == "__main__":
    main()
