#!/usr/bin/env python3
"""Writes src/text/unicode/unicode_tables.inc: the Unicode data that PCRE2 does not give the tokenizer.

The `tokenizers` library is the reference, so it is asked what it knows: its normalizers stand at
an older Unicode than Python's unicodedata, its regular expressions (Oniguruma) at a newer one than
the oldest PCRE2 we build with. Canonical data is stable between versions, so what the library does
not know is left out and everything else comes from unicodedata.

usage: gen_unicode.py [OUTPUT]      (needs the package `tokenizers` and Python 3.11 or newer)
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

nfd = normalizers.NFD().normalize_str
nfkd = normalizers.NFKD().normalize_str


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


def compatibility():
    """(code point, begin, length) into the list of code points, of every one whose compatibility
    decomposition is another than the canonical one; and the list. Decompositions are whole."""
    rows, parts, known = [], [], {}
    for c in SCALARS:
        text = nfkd(chr(c))
        if text == nfd(chr(c)):
            continue
        if text not in known:
            known[text] = len(parts)
            parts += map(ord, text)
        rows.append((c, known[text], len(text)))
    return rows, parts


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


def write_table(out, name, comment, columns, rows):
    out.append(f"// {comment}\nstatic const {columns} {name}[] = {{")
    line = "   "
    for row in rows:
        cell = " {" + ", ".join(f"0x{v:X}" if isinstance(v, int) else v for v in row) + "},"
        if len(line) + len(cell) > 100:
            out.append(line)
            line = "   "
        line += cell
    out += [line, "};\n"]


def write_list(out, name, comment, values):
    out.append(f"// {comment}\nstatic const uint32_t {name}[] = {{")
    line = "   "
    for value in values:
        cell = f" 0x{value:X},"
        if len(line) + len(cell) > 100:
            out.append(line)
            line = "   "
        line += cell
    out += [line, "};\n"]


def main():
    if unicodedata.unidata_version != BASE_UNICODE:
        sys.exit(f"unicodedata is {unicodedata.unidata_version}, not {BASE_UNICODE}: use Python 3.11")
    steps = decompositions()
    pairs = sorted((a, b, c) for c, a, b, composes in steps if composes)
    out = [
        f"// Made by scripts/gen_unicode.py from unicodedata {unicodedata.unidata_version} and "
        f"tokenizers {tokenizers.__version__}. Do not edit.\n"
    ]
    write_table(out, "decompositions", "One canonical step: code point, first, second or 0.",
                "unicode_triple", [(c, a, b) for c, a, b, _ in steps])
    write_table(out, "compositions", "First, second, what they compose to; Hangul is arithmetic.",
                "unicode_triple", pairs)
    wholes, parts = compatibility()
    write_table(out, "compat_decompositions",
                "Whole compatibility decompositions: code point, begin in compat_parts, length.",
                "unicode_triple", wholes)
    write_list(out, "compat_parts", "What compat_decompositions point to.", parts)
    write_table(out, "combining_classes", "First, last, canonical combining class where not 0.",
                "unicode_triple", combining_classes())
    write_table(out, "stand_ins", "First, last, an older code point that patterns treat alike.",
                "unicode_triple", stand_ins())
    default = Path(__file__).resolve().parent.parent / "src/text/unicode/unicode_tables.inc"
    Path(sys.argv[1] if len(sys.argv) > 1 else default).write_text("\n".join(out))


if __name__ == "__main__":
    main()
