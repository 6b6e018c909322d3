"""GGUF models from the outside: token ids, chats, folders of them, downloads."""

import contextlib
import json
import pathlib
import subprocess
import sys

import httpx
import pytest

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
NORMAL, CONTROL_TYPE, USER_DEFINED, UNUSED = 1, 3, 4, 5
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
    return gguf_files.vocabulary(names, types, merges, model="gpt2", pre=pre)


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


@pytest.fixture(scope="module")
def nano(tmp_path_factory):
    """The default model as a GGUF file."""
    config = json.loads((NANO / "config.json").read_text()) | {"num_nextn_predict_layers": 0}
    spec = json.loads((NANO / "tokenizer.json").read_text())
    metadata = gguf_files.metadata_of(config) | vocabulary_of(spec, "qwen2", config["vocab_size"])
    metadata["tokenizer.chat_template"] = (NANO / "chat_template.jinja").read_text()
    tensors = [Tensor.of_values(n, v) for n, v in gguf_files.named(config, nano_values())]
    path = tmp_path_factory.mktemp("nano") / "nano-F32.gguf"
    gguf_files.write(path, metadata, tensors)
    return path


def answer(tandem_bin, model, prompt):
    args = [tandem_bin, "run", "--model", model, "-p", prompt, "--temperature", "0", "--device", "cpu"]
    return subprocess.run(args, capture_output=True, text=True, check=True).stdout


def test_it_answers_as_its_publisher_s(tandem_bin, nano):
    for prompt in ("How do I start the server?", "What is 3 + 4?"):
        assert answer(tandem_bin, nano, prompt) == answer(tandem_bin, NANO, prompt)


TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}, "ok": {"type": "boolean"}},
          "required": ["n", "ok"], "additionalProperties": False}


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
