"""Every quantized format against the float32 values that it stands for: the same logits from both.

Two checkpoints of one random model are made on the spot, one in the format as its tool publishes it
(scripts/quant_formats.py), one with the values themselves in F32.
"""

import itertools
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

import architectures
import checkpoint
import golden_families
import golden_models
import golden_weights
import published
import quant_formats
from checkpoint import Entry
from make_model import deviation

# The values are the same; sums may be taken in another order.
TOLERANCE = 1e-5
PROMPT = list(range(2, 22))
CONFIG = published.QWEN3_BASE | {
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
    for t in architectures.tensors(CONFIG):
        values = random_values(t, rng)
        if t.role in architectures.LINEAR:
            entries, values = FORMATS[name].quantize(t.name.removesuffix(".weight"), values)
            stored += entries
        else:
            stored.append(Entry.of_array(t.name, values, "F32"))
        used.append(Entry.of_array(t.name, values.astype(np.float32), "F32"))
    kept = [t.name.removesuffix(".weight") for t in architectures.tensors(CONFIG)
            if len(t.shape) == 2 and t.role not in architectures.LINEAR and t.role != "embed"]
    quant = FORMATS[name].config(kept)
    write(tmp_path / "stored", CONFIG | {"quantization_config": quant}, stored)
    write(tmp_path / "used", CONFIG, used)
    return tmp_path / "stored", tmp_path / "used"


def logits(tandem_bin, model, *options):
    out = model / "logits.npy"
    args = ["eval", "logits", "--model", model, "--token-ids", ",".join(map(str, PROMPT))]
    done = subprocess.run(
        [tandem_bin, *args, "--activations", "f32", "--device", "cpu", "--out", out, *options],
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
    [mib] = re.findall(r"weights are on 2 NUMA nodes: (\S+) \+ (\S+) MiB", log)
    # Embedding and output matrix are 0.26 MiB in all; the rest is converted.
    assert sum(map(float, mib)) > 0.5 and min(map(float, mib)) > 0


@pytest.mark.parametrize("weights, n_conversions", [("resident", 1), ("mmap", None)])
def test_served(weights, n_conversions, tandem_bin, tmp_path):
    """Workers share what is converted with the resident weights; else each makes its own."""
    httpx = pytest.importorskip("httpx")  # the module is also imported where there is none
    from serving import Server

    stored, used = make(tmp_path, "gptq8-zeros")
    for model in (stored, used):
        shutil.copy(golden_models.made() / "qwen3_moe/tokenizer.json", model)
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
    text = architectures.text_config(config)
    more = WIDE | changes
    more = {k: v for k, v in more.items() if k in text or k.startswith("num_nextn")}
    if text is config:
        return text | more
    return config | {"text_config": text | more}


@pytest.mark.parametrize(("case", "name", "changes"), PUBLISHED)
def test_published_families(case, name, changes, tandem_bin, tmp_path):
    plain = widened(case, changes)
    config = architectures.quantize_config(plain, name)
    entries, values = golden_weights.weights(config, name, seed=3)
    assert sum(e.dtype in ("I32", "U8", "F8_E4M3") for e in entries) > 10
    write(tmp_path / "stored", config, entries)
    write(tmp_path / "used", plain, [Entry.of_array(n, np.float32(v), "F32") for n, v in values.items()])
    want, _ = logits(tandem_bin, tmp_path / "used")
    ours, _ = logits(tandem_bin, tmp_path / "stored")
    errors = np.linalg.norm(ours - want, axis=1) / np.linalg.norm(want, axis=1)
    assert (errors < TOLERANCE).all(), f"{errors.max():.1e}"


# A checkpoint and what it stands for, which config.json or names alone tell apart.
def agree(tandem_bin, one, other):
    want, _ = logits(tandem_bin, one)
    ours, log = logits(tandem_bin, other)
    errors = np.linalg.norm(ours - want, axis=1) / np.linalg.norm(want, axis=1)
    assert (errors < TOLERANCE).all(), f"{errors.max():.1e}"
    return log


@pytest.mark.parametrize("case", ["minimax_m2", "hy_v3", "gpt_oss", "qwen3_5_moe"])
def test_ignores_a_key_that_the_reference_does_not_have(case, tandem_bin, tmp_path):
    config = golden_families.CASES[case][0]
    entries, _ = golden_weights.weights(config, "bf16", seed=3)
    write(tmp_path / "plain", config, entries)
    shutil.copytree(tmp_path / "plain", tmp_path / "other")
    text = architectures.text_config(config) | {"norm_topk_prob": False}
    other = text if architectures.text_config(config) is config else config | {"text_config": text}
    checkpoint.write_json(str(tmp_path / "other/config.json"), other)
    log = agree(tandem_bin, tmp_path / "plain", tmp_path / "other")
    assert log.count("norm_topk_prob is ignored") == 1


@pytest.mark.parametrize("case", ["kimi_k25_bf16", "mistral4_wrapped"])
def test_wrapped_model_is_tied_by_default(case, tandem_bin, tmp_path):
    config = golden_families.CASES[case][0]
    entries, _ = golden_weights.weights(config, "bf16", seed=3)
    [embed] = [e for e in entries if e.name.endswith("embed_tokens.weight")]
    rest = [e for e in entries if not e.name.endswith("lm_head.weight")]
    [head] = [e.name for e in entries if e.name.endswith("lm_head.weight")]
    write(tmp_path / "tied", config, rest)
    same = Entry(head, embed.shape, embed.dtype, embed.chunks)
    write(tmp_path / "untied", config | {"tie_word_embeddings": False}, rest + [same])
    agree(tandem_bin, tmp_path / "untied", tmp_path / "tied")


def renamed(entries, *changes):
    def new(name):
        for old, by in changes:
            name = re.sub(old, by, name)
        return name

    return [Entry(new(e.name), e.shape, e.dtype, e.chunks) for e in entries]


OWN_NAMES = [(r"\.w1\.", ".gate_proj."), (r"\.w3\.", ".up_proj."), (r"\.w2\.", ".down_proj.")]
TEXT_NAMES = [(r"^language_model\.model\.", "model.language_model."), (r"^language_model\.lm_head", "lm_head"),
              (r"^(vision_tower|mm_projector|multi_modal_projector)\.", r"model.\1.")]


@pytest.mark.parametrize(
    ("case", "name", "changes"),
    [
        ("minimax_m2", "bf16", OWN_NAMES),
        ("minimax_m2", "bf16", [("block_sparse_moe", "mlp")]),
        ("minimax_m2", "bf16", [("block_sparse_moe", "mlp"), *OWN_NAMES]),
        ("minimax_m2", "int4-g32", [("block_sparse_moe", "mlp"), *OWN_NAMES]),
        ("mistral4_wrapped", "bf16", TEXT_NAMES),
        ("mistral4_fp8", "fp8-static", TEXT_NAMES),
        ("kimi_k25_bf16", "bf16", TEXT_NAMES),
        ("kimi_k25_int4", "int4-g32", TEXT_NAMES),
    ],
)
def test_newer_names(case, name, changes, tandem_bin, tmp_path):
    config = widened(case, {})
    entries, _ = golden_weights.weights(config, name, seed=3)
    if name != "bf16" and "static" not in name:
        config = architectures.quantize_config(config, name)
    if "static" in name:
        config = golden_families.config_of(case)[0] | {"text_config": config["text_config"]}
    write(tmp_path / "older", config, entries)
    other = renamed(entries, *changes)
    assert {e.name for e in other} != {e.name for e in entries}
    write(tmp_path / "newer", config, other)
    agree(tandem_bin, tmp_path / "older", tmp_path / "newer")
    if name == "bf16":
        fp8 = [tandem_bin, "quantize", "--model", tmp_path / "newer", "--to", "fp8", "--out", tmp_path / "fp8"]
        table = subprocess.run(fp8, capture_output=True, text=True, check=True).stdout
        assert re.search(r"experts\.(up_proj|w3)", table) and "lm_head" in table


def test_folder_of_a_hub_cache(tandem_bin, tmp_path):
    config = golden_families.CASES["minimax_m2"][0]
    entries, _ = golden_weights.weights(config, "bf16", seed=3)
    folder = tmp_path / "models--org--name"
    (folder / "snapshots").mkdir(parents=True)
    (folder / "refs").mkdir()
    write(folder / "snapshots/0123abcd", config, entries)
    command = [tandem_bin, "inspect", "--json", "--model", folder]
    missing = subprocess.run(command, capture_output=True, text=True)
    assert missing.returncode == 1 and "revision main is absent or incomplete" in missing.stderr
    (folder / "refs/main").write_text("0123abcd\n")
    facts = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert "org/name" in json.dumps(facts)


def fused_fp4(entries, tool):
    """NVFP4 experts one by one -> a tensor for all of a layer, as tools write it."""
    kept, parts = [], {}
    for e in entries:
        m = re.fullmatch(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.(\w+)", e.name)
        if m:
            [array] = e.chunks()
            parts[m[1], m[3], m[4], int(m[2])] = (array, e.dtype)
        else:
            kept.append(e)
    names = {"weight_packed": ("_packed", ""), "weight_scale": ("_scale", "_weight_scale"),
             "weight_global_scale": ("_global_scale", "_weight_scale_2")}
    for layer in {k[0] for k in parts}:
        n = 1 + max(k[3] for k in parts if k[0] == layer)
        for part, suffixes in names.items():
            suffix = suffixes[tool == "modelopt"]
            dtype = parts[layer, "down", part, 0][1]

            def of(role, part=part, layer=layer, n=n):
                return np.stack([parts[layer, role, part, i][0] for i in range(n)])

            both = np.concatenate([of("gate"), of("up")], axis=1)
            for role, array in (("gate_up", both), ("down", of("down"))):
                if part == "weight_global_scale":
                    array = array.reshape(n, -1)
                    array = array[:, 0] if role == "down" else array
                    array = 1 / array if tool == "modelopt" else array
                kept.append(Entry.of_array(f"{layer}.{role}_proj{suffix}", array, dtype))
        kept.append(Entry.of_array(f"{layer}.down_proj_input_scale", np.ones((), np.float32), "F32"))
    return kept


@pytest.mark.parametrize("tool", ["compressed-tensors", "modelopt"])
@pytest.mark.parametrize("case", ["qwen3_5_moe", "glm4_moe_bias"])
def test_fused_fp4(case, tool, tandem_bin, tmp_path):
    config = architectures.quantize_config(widened(case, {}), "nvfp4")
    entries, _ = golden_weights.weights(config, "nvfp4", seed=3)
    write(tmp_path / "one by one", config, entries)
    write(tmp_path / "fused", config, fused_fp4(entries, tool))
    agree(tandem_bin, tmp_path / "one by one", tmp_path / "fused")


def gpt_oss(seed=3):
    """gpt_oss without its experts: (config, entries, {name: float32 values of a layer's experts})."""
    config = golden_families.CASES["gpt_oss"][0]
    entries, used = golden_weights.weights(config, "bf16", seed)
    experts = {n: v.transpose(0, 2, 1) for n, v in used.items() if re.search(r"experts\.\w+_proj$", n)}
    return config, [e for e in entries if not e.name.endswith(("_blocks", "_scales"))], experts


def transposed(array):
    return np.ascontiguousarray(array.transpose(0, 2, 1))


def test_gpt_oss_of_modelopt(tandem_bin, tmp_path):
    """NVFP4 with codes and scales transposed, as the matrices of gpt_oss are."""
    config, rest, experts = gpt_oss()
    stored, plain = list(rest), list(rest)
    for name, values in experts.items():
        made = [FORMATS["nvfp4"].quantize("m", np.ascontiguousarray(w)) for w in values]
        codes, scales, factors = (np.stack([list(e[i].chunks())[0] for e, _ in made]) for i in range(3))
        stored += [
            Entry.of_array(name, transposed(codes), "U8"),
            Entry.of_array(name + "_weight_scale", transposed(scales), "F8_E4M3"),
            Entry.of_array(name + "_weight_scale_2", 1 / factors.reshape(-1), "F32"),
            Entry.of_array(name + "_input_scale", np.ones((), np.float32), "F32"),
        ]
        plain.append(Entry.of_array(name, transposed(np.stack([v for _, v in made]).astype(np.float32)), "F32"))
    write(tmp_path / "plain", config, plain)
    write(tmp_path / "stored", config | {"quantization_config": quant_formats.modelopt("NVFP4", [])}, stored)
    log = agree(tandem_bin, tmp_path / "plain", tmp_path / "stored")
    assert "16 tensors of experts are transposed while loading" in log


def one_by_one(rest, experts, name):
    """gpt_oss as tools quantize it, whose gate and up are matrices of each expert: (entries, F32 as gpt_oss has it)."""
    stored = [e for e in rest if not re.search(r"experts\.\w+_proj_bias$", e.name)]
    plain, biases = list(rest), {e.name: checkpoint.from_bf16(list(e.chunks())[0]) for e in rest
                                 if re.search(r"experts\.\w+_proj_bias$", e.name)}
    for fused, values in experts.items():
        used, prefix = np.zeros_like(values), fused.rpartition(".")[0]
        parts = {"gate": slice(0, None, 2), "up": slice(1, None, 2)} if "gate_up" in fused else {"down": slice(None)}
        for e, (role, part) in itertools.product(range(len(values)), parts.items()):
            module, w = f"{prefix}.{e}.{role}_proj", np.ascontiguousarray(values[e, part])
            if name == "bf16":
                bits = checkpoint.to_bf16(w)
                entries, used[e, part] = [Entry.of_array(module + ".weight", bits, "BF16")], checkpoint.from_bf16(bits)
            else:
                entries, used[e, part] = FORMATS[name].quantize(module, w)
            bias = np.ascontiguousarray(biases[fused + "_bias"][e, part])
            stored += [*entries, Entry.of_array(module + ".bias", checkpoint.to_bf16(bias), "BF16")]
        plain.append(Entry.of_array(fused, transposed(used), "F32"))
    return stored, plain


@pytest.mark.parametrize("name", ["bf16", "int4-g32", "gptq", "awq", "auto-round-gptq", "fp8-rows", "nvfp4", "int8"])
def test_gpt_oss_one_by_one(name, tandem_bin, tmp_path):
    config, rest, experts = gpt_oss()
    stored, plain = one_by_one(rest, experts, name)
    write(tmp_path / "plain", config, plain)
    quant = {} if name == "bf16" else {"quantization_config": FORMATS[name].config(["lm_head"])}
    write(tmp_path / "stored", config | quant, stored)
    agree(tandem_bin, tmp_path / "plain", tmp_path / "stored")
    if name == "bf16":
        fp8 = [tandem_bin, "quantize", "--model", tmp_path / "stored", "--to", "fp8", "--out", tmp_path / "fp8"]
        assert "experts.up_proj" in subprocess.run(fp8, capture_output=True, text=True, check=True).stdout
        logits(tandem_bin, tmp_path / "fp8")
