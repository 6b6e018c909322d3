"""A small byte-level BPE tokenizer, trained on the spot, in the files a hub publishes."""

import os
import random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from checkpoint import write_json

# The published splitting patterns of the two families.
QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK_PATTERN = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

DEEPSEEK_TOKENS = {
    "bos": "<｜begin▁of▁sentence｜>",
    "eos": "<｜end▁of▁sentence｜>",
    "pad": "<｜▁pad▁｜>",
    "other": ["<｜User｜>", "<｜Assistant｜>"],
}
QWEN_TOKENS = {
    "bos": "<|endoftext|>",
    "eos": "<|im_end|>",
    "pad": "<|endoftext|>",
    "other": ["<|im_start|>"],
}

DEEPSEEK_TEMPLATE = """\
{%- if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif -%}
{{- bos_token }}
{%- for message in messages %}
  {%- if message['role'] == 'system' %}{{ message['content'] }}
  {%- elif message['role'] == 'user' %}{{ '<｜User｜>' + message['content'] }}
  {%- elif message['role'] == 'assistant' -%}
    {{ '<｜Assistant｜>' + (message['content'] or '') + eos_token }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}
"""
QWEN_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

# With images, as Qwen's show them.
VISION_TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
VISION_TEMPLATE = """\
{%- macro said(content) %}
    {%- if content is string %}{{- content }}
    {%- else %}
        {%- for item in content or [] %}
            {%- if item.type == 'image' or 'image' in item %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
            {%- elif 'text' in item %}{{- item.text }}{% endif %}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}
""" + QWEN_TEMPLATE.replace("(message.content or '')", "said(message.content)")

_WORDS = """the of and to in is that it was for on are as with his they at be this have from or had
by hot but some what there we can out other were all your when up use word how said an
each she which do their time if will way about many then them would write like so these
her long make thing see him two has look more day could go come did my sound no most
number who over know water than call first people may down side been now find any new
work part take get place made live where after back little only round man year came show
every good me give our under name very through just form much great think say help low
line before turn cause same mean differ move right boy old too does tell sentence set
three want air well also play small end put home read hand port large spell add even
land here must big high such follow act why ask men change went light kind off need
house picture try us again animal point mother world near build self earth father head
stand own page should country found answer school grow study still learn plant cover
food sun four thought let keep eye never last door between city tree cross since hard
start might story saw far sea draw left late run while press close night real life few
stop open seem together next white children begin got walk example ease paper often
always music those both mark book letter until mile river car feet care second group
carry took rain eat room friend began idea fish mountain north once base hear horse cut
sure watch color face wood main enough plain girl usual young ready above ever red list
though feel talk bird soon body dog family direct pose leave song measure state product
black short numeral class wind question happen complete ship area half rock order fire
south problem piece told knew pass farm top whole king size heard best hour better true
during hundred remember step early hold west ground interest reach fast five sing listen
six table travel less morning ten simple several vowel toward war lay against pattern
slow center love person money serve appear road map science rule govern pull cold notice
voice fall power town fine certain fly unit lead cry dark machine note wait plan figure
star box noun field rest correct able pound done beauty drive stood contain front teach
week final gave green quick develop sleep warm free minute strong special mind behind
clear tail produce fact street inch lot nothing course stay wheel full force blue object
decide surface deep moon island foot yet busy test record boat common gold possible
plane age dry wonder laugh thousand ago ran check game shape yes hot miss brought heat
snow bed bring sit perhaps fill east weight language among model token expert layer
memory cache""".split()

_CODE = [
    "def {a}({b}, {c}):\n    return {b} + {c}\n",
    "for (int {a} = 0; {a} < {n}; {a}++) {{\n  {b}[{a}] = {c};\n}}\n",
    "if {a} is not None and len({b}) > {n}:\n    print('{c}')\n",
    "static int {a}(const char *{b}) {{ return strlen({b}) == {n}; }}\n",
    '{{"{a}": "{b}", "{c}": {n}}}\n',
]
_OTHER = [
    "Größe, Straße, über, schön, für, natürlich. ",
    "où, déjà, être, français, garçon, très. ",
    "привет мир, как дела, хорошо, спасибо. ",
    "你好世界，今天天气很好，我们学习语言模型。",
    "こんにちは、世界。ありがとう。日本語です。",
    "مرحبا بالعالم ",
    "안녕하세요 세계 ",
    "नमस्ते दुनिया ",
    "🙂🚀✨👍 ",
]


def _sentence(rng):
    words = rng.choices(_WORDS, k=rng.randint(4, 16))
    return " ".join(words).capitalize() + rng.choice([". ", "? ", "! ", ", ", ".\n", ".\n\n"])


def corpus(n_lines=20000):
    """Sentences, numbers, code and a little of other scripts; the same ones every time."""
    rng = random.Random(20)
    for _ in range(n_lines):
        kind = rng.random()
        if kind < 0.8:
            yield _sentence(rng)
        elif kind < 0.95:
            names = dict(zip("abc", rng.choices(_WORDS, k=3)))
            yield rng.choice(_CODE).format(n=rng.randint(0, 9999), **names)
        else:
            yield rng.choice(_OTHER)


def _pre_tokenizer(deepseek):
    split = pre_tokenizers.Split
    tail = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if not deepseek:
        return pre_tokenizers.Sequence([split(Regex(QWEN_PATTERN), "isolated"), tail])
    patterns = [r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+", DEEPSEEK_PATTERN]
    return pre_tokenizers.Sequence([split(Regex(p), "isolated") for p in patterns] + [tail])


def _write_config(directory, special):
    def token(content):
        return {
            "__type": "AddedToken",
            "content": content,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
        }

    config = {
        "add_bos_token": special is DEEPSEEK_TOKENS,
        "add_eos_token": False,
        "bos_token": token(special["bos"]) if special is DEEPSEEK_TOKENS else None,
        "clean_up_tokenization_spaces": False,
        "eos_token": token(special["eos"]),
        "model_max_length": 131072,
        "pad_token": token(special["pad"]),
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }
    write_json(os.path.join(directory, "tokenizer_config.json"), config)


def write_tokenizer(directory, deepseek, n_tokens, sees=False):
    """Writes tokenizer.json, tokenizer_config.json and chat_template.jinja.

    At most n_tokens tokens, special ones included. Returns {"bos": id, "eos": id, "n_tokens": n}
    and if the model sees "image".
    """
    special = DEEPSEEK_TOKENS if deepseek else QWEN_TOKENS
    extra = list(dict.fromkeys([special["bos"], special["eos"], special["pad"], *special["other"], *(VISION_TOKENS if sees else [])]))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = _pre_tokenizer(deepseek)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=n_tokens - len(extra),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in extra])
    tokenizer.save(os.path.join(directory, "tokenizer.json"))
    _write_config(directory, special)
    template = DEEPSEEK_TEMPLATE if deepseek else VISION_TEMPLATE if sees else QWEN_TEMPLATE
    with open(os.path.join(directory, "chat_template.jinja"), "w", encoding="utf-8") as f:
        f.write(template)
    return {
        "bos": tokenizer.token_to_id(special["bos"]),
        "eos": tokenizer.token_to_id(special["eos"]),
        "n_tokens": tokenizer.get_vocab_size(),
        "image": tokenizer.token_to_id("<|image_pad|>"),
    }
