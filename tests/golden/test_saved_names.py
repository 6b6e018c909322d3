"""Checkpoints as transformers 5.24 saves them, whose names and fused matrices are not the publisher's.

The tensors are those of a golden case, so that its logits hold; SAVED is what save_pretrained makes of their
names, by default ("restored", where it means to restore the publisher's), or with save_original_format=False
("own", and by default where it has no map for the language model alone).
"""

import re

import numpy as np
import pytest
from test_families import DATA, PROVENANCE, logits_of
from test_golden import check_logits, relative_errors, tandem  # noqa: F401

import checkpoint
import golden_families
import golden_weights

# A family's patterns of names and what stands for them, in order.
SAVED = {
    ("minimax_m3_odd", "own"): [
        (r"block_sparse_moe\.e_score", "mlp.gate.e_score"),
        (r"block_sparse_moe\.", "mlp."),
        (r"self_attn\.index_([qk])_", r"self_attn.indexer.\1_"),
    ],
    ("kimi_linear", "own"): [
        (r"block_sparse_moe\.", "mlp."),
        (r"self_attn\.(f_[ab]_proj|dt_bias|A_log)", r"self_attn.forget_gate.\1"),
    ],
    ("kimi_linear", "restored"): [(r"\.mlp\.", ".block_sparse_moe.")],
    ("deepseek_v4", "restored"): [
        (r"^layers\.", "model.layers."),
        (r"^embed\.", "model.embed_tokens."),
        (r"^norm\.", "model.norm."),
        (r"^hc_head_", "model.hc_head.hc_"),
        (r"\.attn\.kv_norm\.", ".attn.norm."),
    ],
    ("deepseek_v4", "own"): [
        (r"^layers\.", "model.layers."),
        (r"^embed\.", "model.embed_tokens."),
        (r"^head\.", "lm_head."),
        (r"^norm\.", "model.norm."),
        (r"^hc_head_", "model.hc_head.hc_"),
        (r"hc_(attn|ffn)_", r"\1_hc."),
        (r"\.attn_norm", ".input_layernorm"),
        (r"\.ffn_norm", ".post_attention_layernorm"),
        (r"indexer\.compressor", "compressor.indexer"),
        (r"indexer\.weights_proj", "compressor.indexer.scorer.weights_proj"),
        (r"indexer\.wq_b", "compressor.indexer.q_b_proj"),
        (r"(compressor|indexer)\.norm", r"\1.kv_norm"),
        (r"\.ape$", ".position_bias"),
        (r"\.attn_sink", ".sinks"),
        (r"\.q_norm", ".q_a_norm"),
        (r"\.wkv\.", ".kv_proj."),
        (r"\.wgate\.", ".gate_proj."),
        (r"\.w([qo]_[ab])\.", r".\1_proj."),
        (r"\.attn\.", ".self_attn."),
        (r"gate\.bias", "gate.e_score_correction_bias"),
        (r"shared_experts\.w1", "shared_experts.gate_proj"),
        (r"shared_experts\.w3", "shared_experts.up_proj"),
        (r"shared_experts\.w2", "shared_experts.down_proj"),
        (r"\.ffn\.", ".mlp."),
    ],
}
# Tensors that become one: the first's name up to a word, that word, the others' and the whole's.
JOINED = {
    "minimax_m3_odd": [("gate_proj.weight", "up_proj.weight", "gate_up_proj.weight")],
    "kimi_linear": [("q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight", "conv1d.weight")],
}


def fuse_experts(tensors):
    """Each layer's experts in two tensors, an expert's gate rows before its up rows."""
    layers = {}
    for name in [n for n in tensors if ".experts." in n]:
        prefix, e, matrix = re.fullmatch(r"(.*\.experts\.)(\d+)\.(\w+)\.weight", name).groups()
        layers.setdefault(prefix, {})[int(e), matrix] = tensors.pop(name)
    for prefix, of in layers.items():
        n = 1 + max(e for e, _ in of)
        tensors[prefix + "gate_up_proj"] = np.stack([np.concatenate([of[e, "w1"], of[e, "w3"]]) for e in range(n)])
        tensors[prefix + "down_proj"] = np.stack([of[e, "w2"] for e in range(n)])


def saved(case, form):
    """The configuration of a case, and its tensors as transformers saves them."""
    config, dtype = golden_families.config_of(case)
    assert dtype == "bf16"
    tensors = {}
    for name, values in golden_weights.weights(config, dtype, PROVENANCE[case]["seed"])[1].items():
        for pattern, to in SAVED[case, form]:
            name = re.sub(pattern, to, name)
        tensors[name] = values
    if form == "own":
        fuse_experts(tensors)
        for first, *others, whole in JOINED.get(case, []):
            for name in [n for n in tensors if n.endswith("." + first)]:
                stem = name.removesuffix(first)
                tensors[stem + whole] = np.concatenate([tensors.pop(stem + part) for part in (first, *others)])
    return config, tensors


def write(directory, case, form):
    config, tensors = saved(case, form)
    entries = [checkpoint.Entry.of_array(n, np.ascontiguousarray(v), "I64" if v.dtype == np.int64 else "F32")
               for n, v in tensors.items()]
    golden_weights.write_checkpoint(directory, config, entries)


@pytest.mark.parametrize(("case", "form"), SAVED)
def test_logits_of_what_is_saved(tandem, case, form, tmp_path):  # noqa: F811
    golden = np.load(DATA / f"{case}.npz")
    write(tmp_path / "m", case, form)
    for weights in ("mmap", "resident"):
        ours = logits_of(tandem, tmp_path / "m", golden["prompt"], tmp_path / "l.npy", 37, "--weights", weights)
        check_logits(ours, golden["logits"])


def test_a_thinker(tandem, tmp_path):  # noqa: F811
    """Qwen3-Omni as published: expert by expert, beside other parts. The text model's formulas are Qwen3-VL's."""
    config, _ = golden_families.config_of("qwen3_vl_moe")
    golden = np.load(DATA / "qwen3_vl_moe.npz")
    used = golden_weights.weights(config, "bf16", PROVENANCE["qwen3_vl_moe"]["seed"])[1]
    tensors = {"thinker.visual.merger.weight": np.zeros((2, 2)), "talker.model.norm.weight": np.zeros(3)}
    for name, values in used.items():
        name = "thinker." + name.replace("model.language_model.", "model.").replace("model.visual.", "visual.")
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = values
            continue
        prefix, _, kind = name.rpartition(".")
        for e, v in enumerate(values):
            half = v.shape[1] // 2
            parts = {"down": v} if kind == "down_proj" else {"gate": v[:, :half], "up": v[:, half:]}
            tensors |= {f"{prefix}.{e}.{part}_proj.weight": m.T for part, m in parts.items()}
    text = config["text_config"] | {"model_type": "qwen3_omni_moe_text"}
    entries = [checkpoint.Entry.of_array(n, np.ascontiguousarray(v, np.float32), "F32") for n, v in tensors.items()]
    whole = {"model_type": "qwen3_omni_moe", "thinker_config": {"text_config": text}, "talker_config": {}}
    golden_weights.write_checkpoint(tmp_path / "m", text, entries)
    checkpoint.write_json(tmp_path / "m" / "config.json", whole)
    ours = logits_of(tandem, tmp_path / "m", golden["prompt"], tmp_path / "l.npy", 37)
    check_logits(ours, golden["logits"])


# A block of 128 rows would not end with the 20 of a gate here: such matrices become INT8.
@pytest.mark.parametrize("case", [case for case, form in SAVED if form == "own"])
def test_quantizes_what_is_saved(tandem, case, tmp_path):  # noqa: F811
    golden = np.load(DATA / f"{case}.npz")
    write(tmp_path / "m", case, "own")
    tandem("quantize", "--model", tmp_path / "m", "--to", "fp8", "--out", tmp_path / "fp8")
    ours = logits_of(tandem, tmp_path / "fp8", golden["prompt"], tmp_path / "l.npy", None)
    assert np.median(relative_errors(ours, golden["logits"])) < 0.25
