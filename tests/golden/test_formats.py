"""Every quantized format against the float32 values that it stands for: the same logits from both.

Two checkpoints of one random model are made on the spot, one in the format as its tool publishes it
(scripts/quant_formats.py), one with the values themselves in F32.
"""

import json
import pathlib
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "scripts"), str(ROOT / "tests/e2e")]

import checkpoint
import golden_families
import golden_weights
import quant_formats
import shapes
from checkpoint import Entry
from make_model import deviation

# The values are the same; sums may be taken in another order.
TOLERANCE = 1e-5
PROMPT = list(range(2, 22))
CONFIG = shapes.QWEN3_BASE | {
    "bos_token_id": 0, "eos_token_id": 1, "head_dim": 32, "hidden_size": 128,
    "intermediate_size": 96, "max_position_embeddings": 512, "max_window_layers": 2,
    "moe_intermediate_size": 64, "num_attention_heads": 4, "num_experts": 4,
    "num_experts_per_tok": 2, "num_hidden_layers": 2, "num_key_value_heads": 2, "vocab_size": 264,
}
FORMATS = quant_formats.FORMATS | quant_formats.MORE_FORMATS
# What a line of the log says of formats without a kernel.
CONVERTED = {
    "int8-packed-channel": "I8", "int8-packed-g32": "I8", "int8-packed-tensor": "I8",
    "int8-packed-zeros": "BF16", "int4-packed-tensor": "I8", "int4-packed-order": "BF16",
    "gptq-order": "F16", "gptq8": "I8", "gptq8-v2": "I8", "gptq8-zeros": "F16",
    "gptq8-order": "F16", "auto-round-8": "F16",
}


def random_values(tensor, rng):
    if len(tensor.shape) == 1:
        return rng.normal(1, 0.2, tensor.shape).astype(np.float32)
    return rng.normal(0, deviation(tensor, CONFIG), tensor.shape).astype(np.float32)


def write(directory, config, entries):
    directory.mkdir()
    checkpoint.write_shards(str(directory), entries, 1 << 30)
    checkpoint.write_json(str(directory / "config.json"), config)


def make(tmp_path, name):
    """The two checkpoints."""
    rng = np.random.default_rng(11)
    stored, used = [], []
    for t in shapes.tensors(CONFIG):
        values = random_values(t, rng)
        if t.role in shapes.LINEAR:
            entries, values = FORMATS[name].quantize(t.name.removesuffix(".weight"), values)
            stored += entries
        else:
            stored.append(Entry.of_array(t.name, values, "F32"))
        used.append(Entry.of_array(t.name, values.astype(np.float32), "F32"))
    kept = [t.name.removesuffix(".weight") for t in shapes.tensors(CONFIG)
            if len(t.shape) == 2 and t.role not in shapes.LINEAR and t.role != "embed"]
    quant = FORMATS[name].config(kept)
    write(tmp_path / "stored", CONFIG | {"quantization_config": quant}, stored)
    write(tmp_path / "used", CONFIG, used)
    return tmp_path / "stored", tmp_path / "used"


def logits(tandem_bin, model, *options):
    out = model / "logits.npy"
    args = ["eval", "logits", "--model", model, "--token-ids", ",".join(map(str, PROMPT))]
    done = subprocess.run(
        [tandem_bin, *args, "--activations", "f32", "--out", out, *options],
        capture_output=True, text=True,
    )
    assert done.returncode == 0, done.stderr
    return np.load(out).astype(np.float64), done.stderr


@pytest.mark.parametrize("name", FORMATS)
def test_values(name, tandem_bin, tmp_path):
    stored, used = make(tmp_path, name)
    want, _ = logits(tandem_bin, used)
    ours, log = logits(tandem_bin, stored)
    errors = np.linalg.norm(ours - want, axis=1) / np.linalg.norm(want, axis=1)
    assert (errors < TOLERANCE).all(), f"{errors.max():.1e}"
    # An order of columns needs no conversion where there is one group alone.
    says = [line for line in log.splitlines() if "are converted to" in line]
    assert len(says) == (name in CONVERTED), log
    if says:
        assert f"matrices are converted to {CONVERTED[name]} while loading" in says[0]


@pytest.mark.parametrize("weights", ["mmap", "resident"])
def test_where_converted_weights_lie(weights, tandem_bin, tmp_path):
    stored, used = make(tmp_path, "gptq8-zeros")
    want, _ = logits(tandem_bin, used)
    ours, _ = logits(tandem_bin, stored, "--weights", weights)
    assert np.abs(ours - want).max() < TOLERANCE * np.abs(want).max()


def test_converted_rows_are_spread_over_nodes(tandem_bin, tmp_path, monkeypatch):
    stored, used = make(tmp_path, "gptq8-zeros")
    want, _ = logits(tandem_bin, used)
    monkeypatch.setenv("TANDEM_FAKE_NODES", "2")
    ours, log = logits(tandem_bin, stored, "--weights", "resident")
    assert np.abs(ours - want).max() < TOLERANCE * np.abs(want).max()
    [mib] = re.findall(r"rows of matrices are on 2 NUMA nodes: (\S+) \+ (\S+) MiB", log)
    # Embedding and output matrix are 0.26 MiB in all; the rest is converted.
    assert sum(map(float, mib)) > 0.5


@pytest.mark.parametrize("weights, n_conversions", [("resident", 1), ("mmap", None)])
def test_served(weights, n_conversions, tandem_bin, tmp_path):
    """Workers share what is converted with the resident weights; else each makes its own."""
    httpx = pytest.importorskip("httpx")  # the module is also imported where there is none
    from serving import Server

    stored, used = make(tmp_path, "gptq8-zeros")
    for model in (stored, used):
        shutil.copy(ROOT / "tests/golden/data/qwen3_moe/tokenizer.json", model)
    body = {"prompt": PROMPT, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    texts = []
    for model in (stored, used):
        server = Server(tandem_bin, model, "--weights", weights, "--ctx-size", "512")
        try:
            answer = httpx.post(
                server.url + "/v1/completions", json=body, timeout=120, trust_env=False
            )
            assert answer.status_code == 200, answer.text
            texts.append(answer.json()["choices"][0]["text"])
        finally:
            server.close()
        n = server.log().count("are converted to F16 while loading")
        assert n == (n_conversions or n) * (model == stored)
    assert texts[0] == texts[1]


def test_inspect_converts_nothing(tandem_bin, tmp_path):
    stored, _ = make(tmp_path, "gptq8")
    done = subprocess.run(
        [tandem_bin, "inspect", "--model", stored, "--json"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "converted" not in done.stderr
    json.loads(done.stdout)


def test_config_of_modelopt_in_a_file_of_its_own(tandem_bin, tmp_path):
    stored, used = make(tmp_path, "modelopt-fp8")
    checkpoint.write_json(str(stored / "config.json"), CONFIG)
    checkpoint.write_json(
        str(stored / "hf_quant_config.json"),
        {"producer": {"name": "modelopt"},
         "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8",
                          "exclude_modules": ["lm_head", "model.layers.*.mlp.gate"]}},
    )
    want, _ = logits(tandem_bin, used)
    ours, _ = logits(tandem_bin, stored)
    assert np.abs(ours - want).max() < TOLERANCE * np.abs(want).max()


# Formats in which the hubs have the families of test_families.py, whose names and shapes they meet here.
WIDE = {"full_attention_interval": 2, "hidden_size": 128, "intermediate_size": 64,
        "moe_intermediate_size": 32, "num_hidden_layers": 2, "shared_expert_intermediate_size": 32}
PUBLISHED = [
    ("glm4_moe_norms", "fp8-rows", {"num_nextn_predict_layers": 1}),
    ("glm4_moe_bias", "awq", {}),
    ("glm4_moe_lite", "awq", {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_nope_head_dim": 16, "v_head_dim": 32}),
    ("glm4_moe_lite", "nvfp4", {"kv_lora_rank": 32, "q_lora_rank": 32}),
    ("minimax_m2", "awq", {"intermediate_size": 32}),
    ("minimax_m2", "int4-g32", {"intermediate_size": 32}),
    ("hy_v3_published", "nvfp4", {"expert_hidden_dim": 32}),
    ("mistral4", "nvfp4", {"kv_lora_rank": 32, "q_lora_rank": 32}),
    ("qwen3_next", "int4-g32", {}),
    ("qwen3_next", "awq", {}),
    ("qwen3_5_moe", "gptq", {}),
    ("qwen3_5_moe", "nvfp4", {}),
]


def widened(case, changes):
    config = golden_families.CASES[case][0]
    text = shapes.text_config(config)
    more = WIDE | changes
    more = {k: v for k, v in more.items() if k in text or k.startswith("num_nextn")}
    if text is config:
        return text | more
    return config | {"text_config": text | more}


@pytest.mark.parametrize(("case", "name", "changes"), PUBLISHED)
def test_published_families(case, name, changes, tandem_bin, tmp_path):
    plain = widened(case, changes)
    config = shapes.quantize_config(plain, name)
    entries, values = golden_weights.weights(config, name, seed=3)
    assert sum(e.dtype in ("I32", "U8", "F8_E4M3") for e in entries) > 10
    write(tmp_path / "stored", config, entries)
    write(tmp_path / "used", plain, [Entry.of_array(n, np.float32(v), "F32") for n, v in values.items()])
    want, _ = logits(tandem_bin, tmp_path / "used")
    ours, _ = logits(tandem_bin, tmp_path / "stored")
    errors = np.linalg.norm(ours - want, axis=1) / np.linalg.norm(want, axis=1)
    assert (errors < TOLERANCE).all(), f"{errors.max():.1e}"
