"""Strings that are hard on tokenizers, the same ones for the same seed."""

import random

SCRIPTS = [
    (0x20, 0x7E), (0x20, 0x7E), (0xA0, 0xFF), (0x100, 0x24F), (0x250, 0x2AF), (0x2B0, 0x2FF),
    (0x370, 0x3FF), (0x400, 0x52F), (0x530, 0x58F), (0x590, 0x5FF), (0x600, 0x6FF), (0x700, 0x74F),
    (0x780, 0x7BF), (0x800, 0x8FF), (0x900, 0x97F), (0x980, 0x9FF), (0xA00, 0xA7F), (0xA80, 0xAFF),
    (0xB00, 0xB7F), (0xB80, 0xBFF), (0xC00, 0xC7F), (0xC80, 0xCFF), (0xD00, 0xD7F), (0xD80, 0xDFF),
    (0xE00, 0xE7F), (0xE80, 0xEFF), (0xF00, 0xFFF), (0x1000, 0x109F), (0x10A0, 0x10FF),
    (0x1100, 0x11FF), (0x1200, 0x139F), (0x13A0, 0x13FF), (0x1400, 0x167F), (0x1680, 0x16FF),
    (0x1780, 0x17FF), (0x1800, 0x18AF), (0x1A00, 0x1AFF), (0x1B00, 0x1CFF), (0x1D00, 0x1DFF),
    (0x1E00, 0x1FFF), (0x2000, 0x206F), (0x2070, 0x20CF), (0x20D0, 0x218F), (0x2190, 0x23FF),
    (0x2400, 0x27BF), (0x27C0, 0x2BFF), (0x2C00, 0x2DFF), (0x2E00, 0x2FFF), (0x3000, 0x303F),
    (0x3040, 0x309F), (0x30A0, 0x30FF), (0x3100, 0x31FF), (0x3200, 0x33FF), (0x3400, 0x4DBF),
    (0x4E00, 0x9FFF), (0x4E00, 0x9FFF), (0xA000, 0xA4CF), (0xA4D0, 0xA7FF), (0xA800, 0xABFF),
    (0xAC00, 0xD7FF), (0xE000, 0xF8FF), (0xF900, 0xFAFF), (0xFB00, 0xFDFF), (0xFE00, 0xFEFF),
    (0xFF00, 0xFFFF), (0x10000, 0x10FFF), (0x11000, 0x11FFF), (0x12000, 0x143FF),
    (0x16000, 0x18FFF), (0x1B000, 0x1BCAF), (0x1D000, 0x1D7FF), (0x1D400, 0x1D7FF),
    (0x1E000, 0x1EFFF), (0x1F000, 0x1FBFF), (0x20000, 0x323AF), (0xE0000, 0xE01EF),
    (0x80, 0x10FFFF),
]
SPACES = "\t\n\v\f\r \x1c\x1d\x1e\x1f\x85\xa0\u1680\u180e" + "".join(
    map(chr, range(0x2000, 0x2010))
) + "\u2028\u2029\u202f\u205f\u2060\u3000\ufeff"
DIGITS = "0123456789٣४৫๓²³¹½ⅣⅫ①⒈〇㈠𝟘𝟙𝟚᠐"
MARKS = "\u0300\u0301\u0302\u0303\u0307\u0308\u030a\u0323\u0327\u0328\u0331\u0338\u0345\u05b0\u064b\u093c\u094d\u0e38\u3099\u309a"
EMOJI = ["😀", "👨‍👩‍👧‍👦", "👍🏽", "🇩🇪", "🏳️‍🌈", "❤️", "1️⃣", "🧑🏿‍🚀", "☃", "🫨", "🪿"]
CONTRACTIONS = ["'s", "'S", "'t", "'Re", "'VE", "'m", "'LL", "'d", "'ſ", "’s", "'ll've", "'x", "''s"]
ENGLISH = (
    "the quick brown fox jumps over a lazy dog I'm sure they've been there don't you think "
    "Internationalization HTTPServer camelCaseWord snake_case_word e.g. U.S.A. 3.14 1,000,000 "
    "re-entrant naïve café Zürich coöperate O'Neill's word words sword"
).split(" ")
CODE = [
    "for (int i = 0; i < n; ++i) {\n    a[i] += b[i];\n}", "def f(x):\n\treturn x ** 2\n\n\n",
    "SELECT * FROM t WHERE id=42;--", "<div class=\"a b\">&nbsp;</div>", "#include <stdio.h>\r\n",
    "\\u0041\\n\\\\", "https://example.com/a?b=c&d=%20#x", "{\"k\": [1, 2.5e-3, null]}", "/* … */ // x",
]
HANGUL = "\u1100\u1161\u11a8\uac00\uac01\u1112\u1175\u11c2"
MIXED = [
    "中文English混排123字", "日本語のテキストです。カタカナ", "한국어 문장", "Привет, мир!", "مرحبا بالعالم",
    "नमस्ते दुनिया", "สวัสดีชาวโลก", "ΑΒΓ αβγ ΐ", "ǅungla ǈ ʰʷ ª º", "e\u0301te\u0301 A\u030a Å Å ﬁ",
]


def _scripted(r):
    low, high = r.choice(SCRIPTS)
    chars = [r.randint(low, high) for _ in range(r.randint(1, 12))]
    return "".join(chr(c) for c in chars if not 0xD800 <= c <= 0xDFFF)


def _marked(r):
    text = ""
    for _ in range(r.randint(1, 5)):
        text += r.choice("aeioucnÅéがはかहक1 \n") + "".join(r.choices(MARKS, k=r.randint(0, 4)))
    return text


def _run(r):
    return r.choice(["a", "A", " ", "\n", "1", "é", "中", "!", "😀", "ab", "\r\n", "=", "\t", "▁"]) * (
        r.choice([2, 3, 7, 30, 200])
    )


def _parts(control):
    return [
        (8, _scripted),
        (3, lambda r: "".join(r.choices(SPACES, k=r.randint(1, 5)))),
        (3, lambda r: "".join(r.choices(DIGITS[:10], k=r.randint(1, 9)))),
        (2, lambda r: "".join(r.choices(DIGITS, k=r.randint(1, 5)))),
        (3, _marked),
        (2, lambda r: r.choice(EMOJI)),
        (3, lambda r: r.choice(ENGLISH) + r.choice(["", "", *CONTRACTIONS])),
        (6, lambda r: " ".join(r.choices(ENGLISH, k=r.randint(1, 6)))),
        (2, lambda r: r.choice(CODE)),
        (1, lambda r: "".join(r.choices(HANGUL, k=r.randint(1, 6)))),
        (3, lambda r: r.choice(MIXED)),
        (2, lambda r: r.choice(control)[: r.choice([None, None, None, -1, 3])]),
        (1, _run),
        (2, lambda r: "".join(r.choices("!?.,;:-_/\\'\"()[]{}<>|&^%$#@~`+*=", k=r.randint(1, 5)))),
        (6, lambda r: " "),
        (2, lambda r: "\n"),
    ]


def strings(n, seed, control):
    """n strings, "" among them; control are tokens that some of them contain."""
    r = random.Random(seed)
    weights, makers = zip(*_parts(control))
    out = [""]
    while len(out) < n:
        parts = r.choices(makers, weights, k=r.choice([1, 1, 2, 3, 5, 8, 13]))
        out.append("".join(make(r) for make in parts))
    return out


def invalid_utf8(n, seed):
    """n byte strings, most of them not UTF-8."""
    r = random.Random(seed)
    out = [b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"a\xe2\x82", b"\xf0\x9f\x98"]
    for text in strings(n - len(out), seed, ["<|im_end|>"]):
        data = bytearray(text.encode())
        for _ in range(r.randint(1, 4)):
            at = r.randint(0, len(data))
            kind = r.randrange(3)
            if kind == 0 and at < len(data):
                del data[at]
            elif kind == 1:
                data.insert(at, r.randint(0x80, 0xFF))
            elif at < len(data):
                data[at] = r.randrange(256)
        out.append(bytes(data))
    return out
