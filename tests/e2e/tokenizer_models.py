"""Small tokenizers with the patterns of well-known models, trained on the spot."""

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
LOWER = r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


def cased_words(upper, lower):
    """Words as o200k cuts them, with a change of case as a border."""
    head = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{head}[{upper}]*[{lower}]+{CONTRACTIONS}?|{head}[{upper}]+[{lower}]*{CONTRACTIONS}?"
    )


DEEPSEEK_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{TAIL}"
)
QWEN = (
    rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{TAIL}"
)
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
GLM = QWEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
KIMI = (
    r"[\p{Han}]+|"
    + cased_words(UPPER + r"&&[^\p{Han}]", LOWER + r"&&[^\p{Han}]")
    + rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{TAIL}"
)
O200K = (
    cased_words(UPPER, LOWER)
    + rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{TAIL}"
)

CONTROL_TOKENS = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<｜User｜>", "<｜begin▁of▁sentence｜>"]
PLAIN_TOKENS = ["<think>", "</think>", "<tool_call>", "<｜tool▁sep｜>"]


def byte_alphabet():
    """The character that stands for each byte in byte-level vocabularies."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    other = [b for b in range(256) if b not in plain]
    return {b: chr(b) for b in plain} | {b: chr(0x100 + i) for i, b in enumerate(other)}


def split(pattern):
    return pre_tokenizers.Split(Regex(pattern), "isolated")


def byte_level(*steps):
    tail = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*steps, tail])


def train(tok, corpus, size, alphabet):
    """Merges reach over the borders of words, so that a border in the wrong place shows."""
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=alphabet, show_progress=False, max_token_length=24
    )
    tok.train_from_iterator(corpus, trainer)


def byte_level_model(corpus, pre_tokenizer, normalizer=None, ignore_merges=False, size=6000):
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    train(tok, corpus, size, pre_tokenizers.ByteLevel.alphabet())
    tok.pre_tokenizer = pre_tokenizer
    tok.decoder = decoders.ByteLevel()
    tok.model.ignore_merges = ignore_merges
    if normalizer:
        tok.normalizer = normalizer
    return tok


def add_tokens(tok, normalized):
    tok.add_special_tokens(
        [AddedToken(t, special=True, normalized=normalized) for t in CONTROL_TOKENS]
    )
    tok.add_tokens([AddedToken(t, special=False, normalized=normalized) for t in PLAIN_TOKENS])


def deepseek(corpus):
    tok = byte_level_model(
        corpus,
        byte_level(split(r"\p{N}{1,3}"), split("[一-龥぀-ゟ゠-ヿ]+"), split(DEEPSEEK_WORDS)),
        normalizers.Sequence([]),
    )
    add_tokens(tok, normalized=True)
    return tok


def qwen(corpus):
    tok = byte_level_model(corpus, byte_level(split(QWEN)), normalizers.NFC())
    add_tokens(tok, normalized=False)
    return tok


def glm(corpus):
    tok = byte_level_model(corpus, byte_level(split(GLM)))
    add_tokens(tok, normalized=False)
    # GLM's [gMASK]<sop>, by way of a template behind ByteLevel.
    tok.add_special_tokens(["[gMASK]", "<sop>"])
    template = processors.TemplateProcessing(
        single="[gMASK] <sop> $A",
        pair="[gMASK] <sop> $A $B",
        special_tokens=[(t, tok.token_to_id(t)) for t in ("[gMASK]", "<sop>")],
    )
    tok.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return tok


def kimi(corpus):
    tok = byte_level_model(corpus, byte_level(split(KIMI)))
    add_tokens(tok, normalized=False)
    return tok


def o200k(corpus):
    tok = byte_level_model(corpus, byte_level(split(O200K)), ignore_merges=True)
    add_tokens(tok, normalized=False)
    return tok


def gpt2(corpus):
    tok = byte_level_model(
        corpus, pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=True)
    )
    tok.post_processor = processors.ByteLevel(trim_offsets=False)
    tok.add_special_tokens([AddedToken(CONTROL_TOKENS[0], lstrip=True, rstrip=True)])
    tok.add_tokens([AddedToken("word", single_word=True), AddedToken("don", rstrip=True)])
    return tok


def llama(corpus, fuse_unk=True, byte_fallback=True, size=4000):
    """Sentencepiece BPE as Llama 2 and Mixtral have it, without a pre-tokenizer."""
    base = [f"<0x{b:02X}>" for b in range(256)] if byte_fallback else []
    tok = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=fuse_unk, byte_fallback=byte_fallback))
    tok.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<unk>", "<s>", "</s>", *base],
        limit_alphabet=400,
        show_progress=False,
        max_token_length=16,
    )
    tok.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tok.train_from_iterator(corpus, trainer)
    tok.pre_tokenizer = None
    tok.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tok.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", tok.token_to_id("<s>"))]
    )
    # The byte tokens were special for the trainer only.
    return with_special(tok, {"<unk>", "<s>", "</s>"})


def with_special(tok, keep):
    import json

    spec = json.loads(tok.to_str())
    spec["added_tokens"] = [t for t in spec["added_tokens"] if t["content"] in keep]
    return Tokenizer.from_str(json.dumps(spec))


MODELS = {
    "deepseek": deepseek,
    "qwen": qwen,
    "glm": glm,
    "kimi": kimi,
    "o200k": o200k,
    "gpt2": gpt2,
    "llama": llama,
}
