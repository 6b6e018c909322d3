"""GGUF models from the outside: token ids, chats, folders of them, downloads."""

import contextlib
import json
import pathlib
import random
import re
import subprocess
import sys

import httpx
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers

import text_gen
import tokenizer_models
from serving import Server
from test_tokenizer import CONTROL, Driver, corpus, library_ids, same  # noqa: F401

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import checkpoint
import gguf_files
from gguf_files import Tensor

NANO = ROOT / "configs/models/tandem-nano"
NORMAL, UNKNOWN, CONTROL_TYPE, USER_DEFINED, UNUSED, BYTE = range(1, 7)
# Pre-tokenizers by their names in GGUF: the tokenizer, and a pattern of its own.
PRES = {
    "qwen2": ("qwen", None),
    "qwen35": ("qwen", tokenizer_models.QWEN.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(
        r"[^\s\p{L}\p{N}]+[\r\n]", r"[^\s\p{L}\p{M}\p{N}]+[\r\n]")),
    "deepseek-v3": ("deepseek", None),
    "glm4": ("glm", None),
    "kimi-k2": ("kimi", None),
    "gpt-4o": ("o200k", None),
    "tekken": ("o200k", tokenizer_models.O200K.replace(tokenizer_models.CONTRACTIONS + "?", "").replace(
        r"\p{N}{1,3}", r"\p{N}")),
    "gigachat": ("kimi", tokenizer_models.GPT2),
    "solar-open": ("kimi", tokenizer_models.QWEN),
    "kanana2": ("kimi", tokenizer_models.O200K),
}


def vocabulary_of(spec, pre, n=0):
    """Metadata of a tokenizer.json."""
    added = {t["id"]: t for t in spec["added_tokens"]}
    tokens = {i: t for t, i in spec["model"]["vocab"].items()} | {i: t["content"] for i, t in added.items()}
    size = max(n, max(tokens) + 1)
    types = [UNUSED if i not in tokens else NORMAL if i not in added
             else CONTROL_TYPE if added[i]["special"] else USER_DEFINED for i in range(size)]
    merges = [m if isinstance(m, str) else " ".join(m) for m in spec["model"]["merges"]]
    names = [tokens.get(i, f"[PAD{i}]") for i in range(size)]
    return gguf_files.vocabulary(names, types, merges=merges, model="gpt2", pre=pre)


@pytest.mark.no_asan
@pytest.mark.parametrize("pre", PRES)
def test_token_ids(pre, corpus, tok_driver, tmp_path):  # noqa: F811
    name, pattern = PRES[pre]
    tok = tokenizer_models.MODELS[name](corpus)
    if pattern:
        tok.pre_tokenizer = tokenizer_models.byte_level(tokenizer_models.split(pattern))
    driver = Driver(tok_driver, tmp_path, tok)
    metadata = {"general.architecture": "qwen3moe"} | vocabulary_of(json.loads(tok.to_str()), pre)
    driver.folder = tmp_path / "vocabulary.gguf"
    gguf_files.write(driver.folder, metadata, [])
    texts = text_gen.strings(2000, 2, CONTROL)
    ids = library_ids(tok, texts, False)
    same(texts, driver.encode(texts), ids)
    for skip in (False, True):
        want = [tok.decode(i, skip_special_tokens=skip) for i in ids]
        same(ids, driver.decode(ids, skip), want)


def test_types_of_tokens(tok_driver, tmp_path):
    """Markers of thoughts and calls are text, and what looks like a control token is one, whatever the
    file says."""
    marks = ["<think>", "</think:opensource>", "<mm:think>", "<tool_call>", "</tool_calls:opensource>",
             "<|tool_calls_section_begin|>", "<|tool_call_argument_begin|>", "<｜tool▁sep｜>", "<tool_sep>",
             "<arg_key>", "</arg_value>", "<minimax:tool_call>", "]<]minimax[>[", "｜DSML｜"]
    tokens = ["a", *marks, "<|im_end|>", "<|x"]
    metadata = gguf_files.vocabulary(tokens, [NORMAL, *[CONTROL_TYPE] * len(marks), NORMAL, NORMAL], merges=["a a"],
                                     model="gpt2", pre="qwen2")
    metadata["tokenizer.ggml.tokens"].append("aa")
    metadata["tokenizer.ggml.token_type"].append(NORMAL)
    gguf_files.write(tmp_path / "v.gguf", {"general.architecture": "qwen3moe"} | metadata, [])

    driver = Driver.__new__(Driver)
    driver.program, driver.folder = tok_driver, tmp_path / "v.gguf"
    ids = list(range(len(tokens)))
    assert driver.decode([ids], True) == ["a" + "".join(marks) + "<|xaa"]
    assert driver.decode([ids]) == ["".join(tokens)]


@pytest.mark.parametrize("tokens, merge, said", [
    (["a", "b", "ab"], "a x", 'metadata tokenizer.ggml.merges[0]: "x" is not in tokenizer.ggml.tokens'),
    (["a", "a", "ab"], "a b", 'metadata tokenizer.ggml.tokens: "a" is listed twice'),
])
def test_what_is_wrong_about_a_vocabulary_is_named(tokens, merge, said, tok_driver, tmp_path):
    metadata = gguf_files.vocabulary(tokens, [NORMAL] * 3, merges=[merge], model="gpt2", pre="qwen2")
    path = tmp_path / "vocabulary.gguf"
    gguf_files.write(path, {"general.architecture": "qwen3moe"} | metadata, [])
    done = subprocess.run([tok_driver, path, "encode", "0"], input="", capture_output=True, text=True)
    assert f"{path}: {said}" in done.stderr


# ---- SentencePiece's vocabularies -----------------------------------------------------------------

SPECIAL = {"<unk>": UNKNOWN, "<s>": CONTROL_TYPE, "</s>": CONTROL_TYPE, "<tool>": USER_DEFINED}
SPACES = {"usual": {}, "none in front": {"add_space_prefix": False},
          "squeezed": {"remove_extra_whitespaces": True}}


class Scored:
    """A vocabulary with scores, and the rule: the adjacent pair whose token has the best score first,
    the leftmost among equals; a character without a token becomes its bytes."""

    def __init__(self, corpus, order, **spaces):
        spec = json.loads(tokenizer_models.llama(corpus).to_str())
        size, r = len(spec["model"]["vocab"]), random.Random(8)
        self.vocab = spec["model"]["vocab"] | {"<tool>": size}
        self.tokens = sorted(self.vocab, key=self.vocab.get)
        self.types = [SPECIAL.get(t, BYTE if re.fullmatch("<0x..>", t) else NORMAL) for t in self.tokens]
        self.scores = [0.0 if k != NORMAL else -float(i) if order == "by id" else float(r.randrange(-99, 9))
                       for i, k in enumerate(self.types)]
        self.spaces = spaces
        self.mergeable = {t: s for t, s, k in zip(self.tokens, self.scores, self.types) if k == NORMAL}

    def metadata(self, **more):
        more |= {"model": "llama", "pre": "default", "scores": self.scores} | self.spaces
        return {"general.architecture": "qwen3moe"} | gguf_files.vocabulary(self.tokens, self.types, **more)

    def word_ids(self, word):
        parts = list(word)
        while True:
            pairs = [(-self.mergeable[a + b], i) for i, (a, b) in enumerate(zip(parts, parts[1:]))
                     if a + b in self.mergeable]
            if not pairs:
                break
            i = min(pairs)[1]
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        for part in parts:
            yield from ([self.vocab[part]] if part in self.mergeable else
                        [self.vocab[f"<0x{b:02X}>"] for b in part.encode()])

    def ids(self, text):
        out = []
        for part in re.split("(" + "|".join(SPECIAL) + ")", text):
            if part in SPECIAL:
                out.append(self.vocab[part])
                continue
            if self.spaces.get("remove_extra_whitespaces"):
                part = re.sub(" {2,}", " ", part.strip(" "))
            if part and self.spaces.get("add_space_prefix", True):
                part = " " + part
            out += self.word_ids(part.replace(" ", "▁"))
        return out

    def decoder(self):
        """The library's: bytes make characters, and a text loses the space in front."""
        tok = Tokenizer(models.BPE(self.vocab, [], byte_fallback=True, unk_token="<unk>"))
        tok.add_special_tokens([t for t, k in SPECIAL.items() if k != USER_DEFINED])
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        has_space = self.spaces.get("add_space_prefix", True)
        tok.decoder = decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] * has_space)
        return tok


@pytest.mark.no_asan
@pytest.mark.parametrize("order", ["by id", "with equals"])
@pytest.mark.parametrize("spaces", SPACES)
def test_token_ids_by_scores(order, spaces, corpus, tok_driver, tmp_path):  # noqa: F811
    vocabulary = Scored(corpus[:2000], order, **SPACES[spaces])
    driver = Driver(tok_driver, tmp_path, "")
    driver.folder = tmp_path / "vocabulary.gguf"
    gguf_files.write(driver.folder, vocabulary.metadata(), [])
    texts = text_gen.strings(1000, 2, [*SPECIAL, "<0x41>", "  ", "▁a"])
    ids = [vocabulary.ids(t) for t in texts]
    same(texts, driver.encode(texts), ids)
    r, size, tok = random.Random(3), len(vocabulary.tokens), vocabulary.decoder()
    ids += [[r.randrange(size) for _ in range(r.randint(0, 9))] for _ in range(500)]
    ids += [[vocabulary.vocab[f"<0x{b:02X}>"] for b in "é中😀".encode()[: r.randint(1, 9)]] for _ in range(20)]
    for skip in (False, True):
        want = [tok.decode(i, skip_special_tokens=skip) for i in ids]
        same(ids, driver.decode(ids, skip), want)
        same(ids, driver.decode(ids, skip, "stream"), want)


# As Gemma 4's: merges, and a space is a letter.
@pytest.mark.no_asan
def test_token_ids_with_merges(corpus, tok_driver, tmp_path):  # noqa: F811
    tok = tokenizer_models.llama(corpus)
    tok.normalizer = normalizers.Replace(" ", "▁")
    tok.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    metadata = vocabulary_of(json.loads(tok.to_str()), "gemma4") | {
        "general.architecture": "gemma4", "tokenizer.ggml.model": "gemma4", "tokenizer.ggml.add_space_prefix": False}
    types = metadata["tokenizer.ggml.token_type"]
    for i, token in enumerate(metadata["tokenizer.ggml.tokens"]):
        types[i] = BYTE if token.startswith("<0x") else UNKNOWN if token == "<unk>" else types[i]
    driver = Driver(tok_driver, tmp_path, "")
    driver.folder = tmp_path / "vocabulary.gguf"
    gguf_files.write(driver.folder, metadata, [])
    texts = text_gen.strings(1000, 2, ["<s>", "<unk>", "<0x41>", "  ", "▁a"])
    ids = library_ids(tok, texts, False)
    same(texts, driver.encode(texts), ids)
    for skip in (False, True):
        want = [tok.decode(i, skip_special_tokens=skip) for i in ids]
        same(ids, driver.decode(ids, skip), want)


def test_ends_of_a_text_with_scores(corpus, tok_driver, tmp_path):  # noqa: F811
    vocabulary = Scored(corpus[:200], "by id")
    driver = Driver(tok_driver, tmp_path, "")
    driver.folder = tmp_path / "vocabulary.gguf"
    plain = vocabulary.ids("a text")
    for adds in (False, True):
        gguf_files.write(driver.folder, vocabulary.metadata(add_eos_token=adds), [])
        assert driver.encode(["a text"], flags=3) == [plain + [vocabulary.vocab["</s>"]] * adds]


def nano_values():
    """The default model's tensors in float32, without its prediction layer."""
    stored, out = checkpoint.read_shard(NANO / "model.safetensors"), {}
    for name, (dtype, values) in stored.items():
        if name.endswith("_scale_inv") or ".layers.4." in name:
            continue
        if dtype == "F8_E4M3":
            values = checkpoint.dequantize_blocks(values, stored[name + "_scale_inv"][1])
        out[name] = checkpoint.from_bf16(values) if dtype == "BF16" else values
    return out


def write_nano(path, stored=lambda tensor: tensor):
    """The default model as a GGUF file, of tensors as `stored` gives them."""
    config = json.loads((NANO / "config.json").read_text()) | {"num_nextn_predict_layers": 0}
    spec = json.loads((NANO / "tokenizer.json").read_text())
    metadata = gguf_files.metadata_of(config) | vocabulary_of(spec, "qwen2", config["vocab_size"])
    metadata["tokenizer.chat_template"] = (NANO / "chat_template.jinja").read_text()
    tensors = [Tensor.of_values(n, v) for n, v in gguf_files.named(config, nano_values())]
    gguf_files.write(path, metadata, [stored(t) for t in tensors])
    return path


@pytest.fixture(scope="module")
def nano(tmp_path_factory):
    return write_nano(tmp_path_factory.mktemp("nano") / "nano-F32.gguf")


def answer(tandem_bin, model, prompt, *more):
    args = [tandem_bin, "run", "--model", model, "-p", prompt, "--temperature", "0", "--device", "cpu", *more]
    return subprocess.run(args, capture_output=True, text=True, check=True).stdout


def test_it_answers_as_its_publisher_s(tandem_bin, nano):
    for prompt in ("How do I start the server?", "What is 3 + 4?"):
        assert answer(tandem_bin, nano, prompt) == answer(tandem_bin, NANO, prompt)


def in_q8_0(tensor):
    """A matrix in blocks of 32 with an F16 scale each."""
    if len(tensor.shape) < 2 or tensor.shape[-1] % 32 or "ffn_gate_inp" in tensor.name:
        return tensor
    blocks = tensor.data.reshape(-1, 32)
    scale = (np.abs(blocks).max(axis=1, keepdims=True) / 127).astype(np.float16)
    codes = np.rint(blocks / np.maximum(scale.astype(np.float32), 1e-8)).clip(-127, 127).astype(np.int8)
    return Tensor(tensor.name, tensor.shape, "Q8_0", np.concatenate([scale.view(np.uint8), codes.view(np.uint8)], 1))


def test_int8_activations(tandem_bin, tmp_path):
    """They change the logits of a prompt a little, and not what the model says."""
    path, said, logits = write_nano(tmp_path / "nano-Q8_0.gguf", in_q8_0), {}, {}
    for kind in ("f32", "int8"):
        more = ("--activations", kind)
        said[kind] = [answer(tandem_bin, path, p, *more) for p in ("How do I start the server?", "What is 3 + 4?")]
        ids, out = ",".join(str(i * 7 % 900) for i in range(24)), tmp_path / f"{kind}.npy"
        args = [tandem_bin, "eval", "logits", "--model", path, "--token-ids", ids, "--out", out, *more]
        subprocess.run(args, check=True)
        logits[kind] = np.load(out)
    assert said["f32"] == said["int8"]
    assert 0 < np.abs(logits["f32"] - logits["int8"]).mean() < 0.03 * logits["f32"].std()


TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}, "ok": {"type": "boolean"}},
          "required": ["n", "ok"], "additionalProperties": False}


def test_files_without_an_ending_and_in_folders(tandem_bin, nano, tmp_path):
    """A file that begins as GGUF is one, and a folder with one is it; each of a folder of models has a name."""
    alone, blob, two = tmp_path / "alone", tmp_path / "blob", tmp_path / "two"
    for folder, names in (alone, ["nano-Q8_0.gguf", "mmproj-F16.gguf"]), (two, ["a.gguf", "b.gguf"]):
        folder.mkdir()
        for name in names:
            (folder / name).symlink_to(nano)
    blob.symlink_to(nano)
    (tmp_path / "alone.gguf").symlink_to(nano)
    (tmp_path / "text").write_text("GGU")
    expected = answer(tandem_bin, nano, "Hello!")
    assert answer(tandem_bin, alone, "Hello!") == answer(tandem_bin, blob, "Hello!") == expected
    wrong = subprocess.run([tandem_bin, "run", "-m", two, "-p", "x"], capture_output=True, text=True)
    assert wrong.returncode != 0 and "several models are in it" in wrong.stderr
    with contextlib.closing(Server(tandem_bin, None, "--models", tmp_path)) as server:
        models = httpx.get(server.url + "/api/tags").json()["models"]
        names = ["alone", "alone.gguf", "blob"]
        assert [(m["name"], m["details"]["format"]) for m in models] == [(name, "gguf") for name in names]
        for name in names:
            body = {"model": name, "messages": [{"role": "user", "content": "Hello!"}], "temperature": 0}
            reply = httpx.post(server.url + "/v1/chat/completions", json=body, timeout=60).json()
            assert reply["model"] == name and reply["choices"][0]["message"]["content"] == expected.strip()


def test_session_with_a_folder_of_models(tandem_bin, nano):
    with contextlib.closing(Server(tandem_bin, None, "--models", nano.parent)) as server:
        models = httpx.get(server.url + "/v1/models").json()["data"]
        assert [m["id"] for m in models] == ["nano-F32"]

        def ask(prompt, **more):
            body = {"model": "nano-F32", "messages": [{"role": "user", "content": prompt}], "temperature": 0,
                    "max_tokens": 100} | more
            reply = httpx.post(server.url + "/v1/chat/completions", json=body, timeout=60)
            return reply.json()["choices"][0]

        assert ask("Hello!")["message"]["content"].startswith("Hello!")
        called = ask("What is the weather in Paris?", tools=[TOOL])
        function = called["message"]["tool_calls"][0]["function"]
        assert function["name"] == "get_weather" and json.loads(function["arguments"]) == {"city": "Paris"}
        form = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
        reply = ask("What is 3 + 4?", response_format=form, reasoning_effort="none")
        assert set(json.loads(reply["message"]["content"])) == {"n", "ok"}
