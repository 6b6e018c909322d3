"""The tokenizer against the `tokenizers` library: the same ids and the same text back."""

import json
import os
import random
import struct
import subprocess

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

import text_gen
import tokenizer_models

N_STRINGS = int(os.environ.get("TANDEM_STRINGS", 4000))  # of a kind, at most
ADD_SPECIAL, PARSE_SPECIAL = 1, 2


class Driver:
    """The C tokenizer on one tokenizer.json."""

    def __init__(self, program, folder, tok):
        self.program, self.folder = program, folder
        (folder / "tokenizer.json").write_text(tok if isinstance(tok, str) else tok.to_str())

    def _run(self, mode, option, records):
        data = b"".join(struct.pack("=I", len(r)) + r for r in records)
        done = subprocess.run(
            [self.program, self.folder, mode, str(option)], input=data, capture_output=True
        )
        assert done.returncode == 0, done.stderr.decode()
        out, pos = [], 0
        while pos < len(done.stdout):
            (n,) = struct.unpack_from("=I", done.stdout, pos)
            out.append(done.stdout[pos + 4 : pos + 4 + n])
            pos += 4 + n
        assert len(out) == len(records)
        return out

    def encode(self, texts, flags=PARSE_SPECIAL):
        records = [t if isinstance(t, bytes) else t.encode() for t in texts]
        return [list(struct.unpack(f"={len(r) // 4}i", r)) for r in self._run("encode", flags, records)]

    def decode(self, lists, skip_special=False, mode="decode"):
        records = [struct.pack(f"={len(ids)}i", *ids) for ids in lists]
        return [r.decode() for r in self._run(mode, int(skip_special), records)]


@pytest.fixture(scope="module")
def corpus():
    texts = text_gen.strings(min(8000, 4 * N_STRINGS), 1, tokenizer_models.PLAIN_TOKENS)
    return [text[:200] for text in texts]


@pytest.fixture(scope="module", params=tokenizer_models.MODELS)
def pair(request, corpus, tok_driver, tmp_path_factory):
    """A tokenizer of the library and ours on the same file."""
    tok = tokenizer_models.MODELS[request.param](corpus)
    return tok, Driver(tok_driver, tmp_path_factory.mktemp(request.param), tok)


def strings(n, seed, control):
    return text_gen.strings(min(n, N_STRINGS), seed, control)


def same(texts, ours, theirs):
    """Fails with the first and shortest difference."""
    wrong = [(len(t), t, o, w) for t, o, w in zip(texts, ours, theirs) if o != w]
    if wrong:
        _, text, got, want = min(wrong, key=lambda row: row[0])
        pytest.fail(f"{len(wrong)} of {len(texts)} differ, such as {text!r}:\n{got!r}, not\n{want!r}")


CONTROL = tokenizer_models.CONTROL_TOKENS + tokenizer_models.PLAIN_TOKENS


def library_ids(tok, texts, add_special):
    return [e.ids for e in tok.encode_batch(texts, add_special_tokens=add_special)]


def test_same_ids(pair):
    tok, driver = pair
    texts = strings(N_STRINGS, 2, CONTROL + ["<s>", "[gMASK]", "<0x41>"])
    same(texts, driver.encode(texts), library_ids(tok, texts, False))
    few = texts[:500]
    same(few, driver.encode(few, PARSE_SPECIAL | ADD_SPECIAL), library_ids(tok, few, True))


def test_same_text_back(pair):
    tok, driver = pair
    r = random.Random(3)
    size = tok.get_vocab_size()
    lists = [e.ids for e in tok.encode_batch(strings(5000, 4, CONTROL))]
    lists += [[r.randrange(size) for _ in range(r.randint(0, 20))] for _ in range(min(5000, N_STRINGS))]
    for skip in (False, True):
        want = [tok.decode(ids, skip_special_tokens=skip) for ids in lists]
        same(lists, driver.decode(lists, skip), want)
        same(lists, driver.decode(lists, skip, "stream"), want)


def test_invalid_utf8_is_replaced(pair):
    tok, driver = pair
    texts = text_gen.invalid_utf8(min(2000, N_STRINGS), 5)
    want = library_ids(tok, [t.decode(errors="replace") for t in texts], False)
    same(texts, driver.encode(texts), want)


def test_control_tokens_stay_text_unless_asked_for(pair):
    tok, driver = pair
    spec = json.loads(tok.to_str())
    spec["added_tokens"] = []
    spec["post_processor"] = None
    plain = Tokenizer.from_str(json.dumps(spec))
    texts = strings(3000, 6, CONTROL)
    same(texts, driver.encode(texts, 0), library_ids(plain, texts, False))
    special = {i for i, t in tok.get_added_tokens_decoder().items() if t.special} - {0}
    assert not special & {i for ids in driver.encode(texts, 0) for i in ids}


@pytest.mark.no_asan
def test_long_runs_take_linear_time(pair):
    tok, driver = pair
    for unit in ("a", " ", "\n", "A", "中", "1", "!", "e\u0301", " a", "\r\n", "\u0327\u0301"):
        text = unit * (400_000 // len(unit))
        ids = driver.encode([text])[0]  # quadratic time would not end
        small = unit * 4000
        same([small], driver.encode([small]), library_ids(tok, [small], False))
        assert ids


# ---- single features


def check(tok, driver_path, folder, texts):
    driver = Driver(driver_path, folder, tok)
    same(texts, driver.encode(texts), library_ids(tok, texts, False))
    lists = library_ids(tok, texts, False)
    same(lists, driver.decode(lists), [tok.decode(ids, skip_special_tokens=False) for ids in lists])


@pytest.fixture(scope="module")
def bytes_model(corpus):
    return tokenizer_models.byte_level_model(corpus[:2000], None, size=1500).to_str()


PATTERNS = [
    r"\p{L}+", r"\P{L}+", r"\p{^Lu}+", r"[^\p{L}\p{N}\s]+", r"\w+", r"\W+", r"[\w.]+", r"\d+", r"\D+",
    r"\s+", r"\S+", r"\h+", r"[^\h]+", r"[[a-z]&&[^aeiou]]+", r"[^a&&b]+", r"[a-z&&[^\p{Lu}x]]+",
    r"[\p{L}_&&[^\p{Han}]]+", r"[\p{L}&&\p{Ll}]+", r"[a-c[x-z]d]+", r"[]a]+", r"[\]\[^]+", r"[a\-z]+",
    r"\p{N}{1,3}+", r"\p{N}{2}?", r"a{,2}", r"a{2", r"a{2}{3}", r"a++b?", r"(a|b)+?c", r"a?+", r"(?:ab)*+c?",
    r"^b|c$", r"\Aa|b\z|\n\Z", r"\b", r"\Bx|\bw", r"(?i)q|(?-i:Z)x", r"a(?i)b|c", r"(?m:.)+?x", r".+",
    r"(?<=a)b|(?<!a)c", r"(?=a).|(?!b)e", r"(?>a+)b|(?<name>x)|(?#comment)y", r"\x{4e00}|\u4e8c|\x41",
    r"\R+", r"[[:alpha:]]+|[[:^digit:]]", r"[[:punct:]]+", r"\p{Punct}[[:word:]]?", r"\p{Upper}", r"\p{Letter}+",
    r"\p{Han}+|\p{Hiragana}|\p{katakana}+", r"\p{Greek}+|\p{Thai}+|\p{arabic}", r"\p{Lowercase_Letter}+",
    r"\t|\e|\a|\v|\f", r"a*", r"", r"\-\/\#\ ", r"[\u4e00-\u9fff\p{N}]+", r"\p{Emoji}+", r"\p{LC}+",
    tokenizer_models.QWEN, tokenizer_models.KIMI, tokenizer_models.DEEPSEEK_WORDS,
]  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS)
def test_pattern(pattern, bytes_model, tok_driver, tmp_path):
    """What matches is taken out, so that ids show exactly what that was."""
    tok = Tokenizer.from_str(bytes_model)
    tok.pre_tokenizer = tokenizer_models.byte_level(
        pre_tokenizers.Split(Regex(pattern), "removed")
    )
    check(tok, tok_driver, tmp_path, strings(800, 7, CONTROL))


PROPERTIES = (
    "L Lu Ll Lt Lm Lo M Mn Mc Me N Nd Nl No P Pc Pd Ps Pe Pi Pf Po S Sm Sc Sk So Z Zs Zl Zp C Cc Cf "
    "Han Hiragana Katakana Hangul"
).split()


@pytest.mark.no_asan
@pytest.mark.slow
def test_every_code_point(bytes_model, tok_driver, tmp_path):
    """Each property matches exactly the code points that it matches in the library."""
    planes = [*range(0xD800), *range(0xE000, 0x40000), *range(0xE0000, 0xE1000)]
    chars = [chr(c) for c in [*planes, 0xFFFFD, 0x10FFFF]]
    texts = ["".join(chars[i : i + 4096]) for i in range(0, len(chars), 4096)]
    for prop in [rf"\p{{{p}}}" for p in PROPERTIES] + [r"\s", r"\d", r"\S", "[^\\s\\p{L}\\p{N}]"]:
        tok = Tokenizer.from_str(bytes_model)
        tok.pre_tokenizer = tokenizer_models.byte_level(
            pre_tokenizers.Split(Regex(prop), "removed")
        )
        driver = Driver(tok_driver, tmp_path, tok)
        ours = driver.decode(driver.encode(texts))
        theirs = ["".join(p for p, _ in tok.pre_tokenizer.pre_tokenize_str(t)) for t in texts]
        theirs = [tok.decoder.decode([t]) if t else "" for t in theirs]
        wrong = sorted({c for o, t in zip(ours, theirs) for c in set(o) ^ set(t)})
        assert not wrong, f"{prop}: {[hex(ord(c)) for c in wrong[:40]]}"


@pytest.mark.no_asan
@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_normal_forms(form, bytes_model, tok_driver, tmp_path):
    tok = Tokenizer.from_str(bytes_model)
    tok.pre_tokenizer = tokenizer_models.byte_level()
    tok.normalizer = getattr(normalizers, form)()
    chars = [chr(c) for c in range(0x110000) if not 0xD800 <= c <= 0xDFFF]
    texts = ["|".join(chars[i : i + 1024]) for i in range(0, len(chars), 1024)]
    r = random.Random(8)
    marks = [c for c in chars if normalizers.NFD().normalize_str("\u0f71" + c) != "\u0f71" + c]
    letters = [c for c in chars if len(normalizers.NFD().normalize_str(c)) > 1]
    parts = marks + letters + list(text_gen.MARKS + text_gen.HANGUL + "aeou")
    texts += ["".join(r.choices(parts, k=r.randint(2, 8))) for _ in range(N_STRINGS)]
    driver = Driver(tok_driver, tmp_path, tok)
    same(texts, driver.decode(driver.encode(texts)), [tok.normalizer.normalize_str(t) for t in texts])


BEHAVIORS = ["isolated", "removed", "merged_with_previous", "merged_with_next", "contiguous"]


@pytest.mark.parametrize("behavior", BEHAVIORS)
@pytest.mark.parametrize("invert", [False, True])
def test_split_behavior(behavior, invert, corpus, bytes_model, tok_driver, tmp_path):
    tok = Tokenizer.from_str(bytes_model)
    for pattern in (Regex(r"[aeio ]"), Regex(r"\p{L}+"), "o", Regex("x*")):
        tok.pre_tokenizer = tokenizer_models.byte_level(
            pre_tokenizers.Split(pattern, behavior, invert)
        )
        check(tok, tok_driver, tmp_path, strings(1000, 9, CONTROL))


PRE_TOKENIZERS = {
    "digits": pre_tokenizers.Digits(individual_digits=False),
    "single digits": pre_tokenizers.Digits(individual_digits=True),
    "punctuation": pre_tokenizers.Punctuation("merged_with_previous"),
    "whitespace": pre_tokenizers.Whitespace(),
    "whitespace split": pre_tokenizers.WhitespaceSplit(),
}


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_pre_tokenizer(name, bytes_model, tok_driver, tmp_path):
    tok = Tokenizer.from_str(bytes_model)
    tok.pre_tokenizer = tokenizer_models.byte_level(PRE_TOKENIZERS[name])
    check(tok, tok_driver, tmp_path, strings(2000, 10, CONTROL))


@pytest.mark.parametrize("scheme", ["always", "first", "never"])
@pytest.mark.parametrize("cut", [False, True])
def test_metaspace(scheme, cut, corpus, tok_driver, tmp_path):
    tok = tokenizer_models.llama(corpus[:2000], size=1500)
    tok.normalizer = None
    tok.pre_tokenizer = pre_tokenizers.Metaspace("▁", scheme, cut)
    tok.decoder = decoders.Metaspace("▁", scheme)
    check(tok, tok_driver, tmp_path, strings(2000, 11, ["<s>", "▁<s>"]))


@pytest.mark.parametrize("fuse_unk", [False, True])
@pytest.mark.parametrize("affixes", [False, True])
def test_unknown_characters(fuse_unk, affixes, tok_driver, tmp_path):
    """Without byte fallback; with the affixes of words that some BPE models have."""
    vocab = {t: i for i, t in enumerate(["<unk>", "a", "b", "##a", "##b", "a</w>", "##b</w>", "ab"])}
    vocab |= {"ab</w>": 8, " ": 9, "<0xC3>": 10, "<0xA9>": 11, "ba": 12}
    merges = [("a", "##b"), ("a", "##b</w>")] if affixes else [("a", "b"), ("b", "a")]
    extra = {"continuing_subword_prefix": "##", "end_of_word_suffix": "</w>"} if affixes else {}
    r = random.Random(12)
    texts = ["".join(r.choices("abéx ü", k=r.randint(0, 9))) for _ in range(2000)]
    for fallback in (False, True):
        tok = Tokenizer(
            models.BPE(
                vocab, merges, unk_token="<unk>", fuse_unk=fuse_unk, byte_fallback=fallback, **extra
            )
        )
        if not affixes:
            tok.decoder = decoders.ByteFallback()
        check(tok, tok_driver, tmp_path, texts)


def test_normalized_added_tokens(corpus, tok_driver, tmp_path):
    """Tokens that are found, and decoded, in their normalized spelling."""
    tok = tokenizer_models.llama(corpus[:2000], size=1500)
    tok.add_tokens(["a b", "cafe\u0301", " x"])
    tok.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Strip(), normalizers.Replace(Regex(r"\s+"), "▁")]
    )
    tok = Tokenizer.from_str(tok.to_str())
    texts = strings(3000, 13, ["a b", "café", "cafe\u0301", " x", "a \t b"])
    check(tok, tok_driver, tmp_path, texts)


def ids_unless_it_panics(tok, text):
    """Where a token reaches back behind another's end, the library gives up on the text."""
    try:
        return tok.encode(text, add_special_tokens=False).ids
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        return None


def test_white_space_tokens_within_anothers_reach(corpus, tok_driver, tmp_path):
    """Tokens of white space beside tokens that take the white space beside them along."""
    r = random.Random(15)
    base = tokenizer_models.gpt2(corpus[:200]).to_str()
    for _ in range(25):
        tok = Tokenizer.from_str(base)
        flags = ("lstrip", "rstrip", "normalized")
        some = [t for t in ("\n", "\n\n", "\t", " \n", "  ", "<a>", "<b>") if r.random() < 0.7]
        tok.add_tokens([AddedToken(t, **{f: r.random() < 0.5 for f in flags}) for t in some])
        letters = ["\n", " ", "\t", "<a>", "<b>", "a"]
        texts = ["".join(r.choices(letters, k=r.randint(1, 9))) for _ in range(200)]
        want = [ids_unless_it_panics(tok, text) for text in texts]
        got = Driver(tok_driver, tmp_path, tok).encode(texts)
        same(texts, [g if w is not None else None for g, w in zip(got, want)], want)


def test_merges_as_strings(corpus, tok_driver, tmp_path):
    """The older form of merges, "a b"."""
    tok = tokenizer_models.gpt2(corpus[:2000])
    spec = json.loads(tok.to_str())
    spec["model"]["merges"] = [" ".join(pair) for pair in spec["model"]["merges"]]
    texts = strings(1000, 14, CONTROL)
    driver = Driver(tok_driver, tmp_path, json.dumps(spec))
    same(texts, driver.encode(texts), library_ids(tok, texts, False))
