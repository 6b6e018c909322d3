#!/usr/bin/env python3
"""The golden models of deepseek_v3 and qwen3_moe, whose checkpoints many tests share: made once a build folder.

usage: golden_models.py BUILD      makes BUILD/golden/NAME of each case, unless they are there by the same scripts

tests/golden/data/ holds seed, prompt, logits and continuation of each, made by make_golden.py.
"""

import fcntl
import functools
import hashlib
import json
import os
import pathlib
import shutil
import sys

import numpy as np

import architectures
import golden_weights
import published

SCRIPTS = pathlib.Path(__file__).resolve().parent
DATA = SCRIPTS.parent / "tests/golden/data"
N_VOCAB = 264  # 256 bytes and a few special tokens

DEEPSEEK = {
    "first_k_dense_replace": 1,
    "hidden_size": 68,
    "intermediate_size": 96,
    "kv_lora_rank": 32,
    "max_position_embeddings": 512,
    "moe_intermediate_size": 20,
    "n_group": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_attention_heads": 4,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "q_lora_rank": 40,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "rope_scaling": None,
    "topk_group": 1,
    "v_head_dim": 20,
    "vocab_size": N_VOCAB,
}
QWEN3 = {
    "bos_token_id": 0,
    "eos_token_id": 1,
    "head_dim": 24,
    "hidden_size": 68,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "max_window_layers": 3,
    "moe_intermediate_size": 20,
    "num_attention_heads": 6,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "vocab_size": N_VOCAB,
}
YARN = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 8,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
    "type": "yarn",
}


def deepseek(**changes):
    return published.DEEPSEEK_BASE | DEEPSEEK | changes


def qwen3(**changes):
    return published.QWEN3_BASE | QWEN3 | changes


# name -> (config, dtype); each says what it is there for. What all deepseek_v3 cases share: the
# latent norms use eps 1e-6 whatever rms_norm_eps says.
CASES = {
    "deepseek_v3": (deepseek(), "bf16"),
    "deepseek_no_q_lora": (
        # Moonlight's form: one query matrix, two shared experts; three heads; an eps that shows.
        deepseek(
            n_shared_experts=2,
            num_attention_heads=3,
            num_key_value_heads=3,
            q_lora_rank=None,
            rms_norm_eps=1e-3,
            rope_theta=50000.0,
            routed_scaling_factor=2.446,
        ),
        "bf16",
    ),
    "deepseek_groups": (
        deepseek(n_group=4, n_routed_experts=16, num_experts_per_tok=4, topk_group=2), "bf16",
    ),
    "deepseek_yarn": (
        deepseek(n_group=2, rope_scaling=YARN, topk_group=1, num_experts_per_tok=2), "bf16",
    ),
    "deepseek_yarn_mscale": (
        # mscale differs from mscale_all_dim: cosines are scaled, too. Two dense layers; top-k
        # weights not normalized; the bias of attention_bias; a prediction layer to be skipped.
        deepseek(
            attention_bias=True,
            first_k_dense_replace=2,
            norm_topk_prob=False,
            num_nextn_predict_layers=1,
            rope_scaling=YARN | {"mscale": 0.707, "factor": 4},
            routed_scaling_factor=1.0,
        ),
        "bf16",
    ),
    "deepseek_fp8": (
        # No dimension is a multiple of 128; groups, YaRN and two blocks each way.
        deepseek(
            hidden_size=200,
            intermediate_size=192,
            kv_lora_rank=136,
            moe_intermediate_size=136,
            n_group=2,
            n_routed_experts=4,
            num_attention_heads=3,
            num_experts_per_tok=2,
            num_hidden_layers=2,
            num_key_value_heads=3,
            q_lora_rank=80,
            qk_nope_head_dim=40,
            rope_scaling=YARN,
            topk_group=2,
            v_head_dim=56,
        ),
        "fp8",
    ),
    "deepseek_mixed": (
        deepseek(
            hidden_size=136,
            moe_intermediate_size=72,
            n_routed_experts=6,
            num_experts_per_tok=2,
            num_hidden_layers=2,
            q_lora_rank=None,
        ),
        "mixed",
    ),
    "qwen3_moe": (qwen3(), "bf16"),
    "qwen3_tied": (
        qwen3(norm_topk_prob=False, num_attention_heads=3, num_key_value_heads=1,
              tie_word_embeddings=True),
        "bf16",
    ),
    "qwen3_dense_layers": (
        # Layer 1 and 3 by decoder_sparse_step; 3 is dense after all by mlp_only_layers.
        qwen3(
            decoder_sparse_step=2,
            head_dim=32,
            mlp_only_layers=[3],
            num_attention_heads=4,
            num_hidden_layers=4,
            num_key_value_heads=4,
        ),
        "bf16",
    ),
    "qwen3_yarn_bias": (
        qwen3(
            attention_bias=True,
            num_experts_per_tok=1,
            num_hidden_layers=2,
            rope_scaling={
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        ),
        "bf16",
    ),
    "qwen3_fp8": (
        qwen3(
            head_dim=40,
            hidden_size=192,
            moe_intermediate_size=136,
            num_attention_heads=5,
            num_experts=4,
            num_experts_per_tok=2,
            num_hidden_layers=2,
            num_key_value_heads=1,
        ),
        "fp8",
    ),
    "qwen3_mixed_tied": (
        qwen3(
            hidden_size=136,
            moe_intermediate_size=40,
            num_experts=6,
            num_hidden_layers=2,
            tie_word_embeddings=True,
        ),
        "mixed",
    ),
    # The formats of quant_formats.py; layers enough that both kinds of MLP are there.
    "deepseek_int4": (
        deepseek(hidden_size=96, moe_intermediate_size=32, n_routed_experts=6,
                 num_hidden_layers=2, num_experts_per_tok=2),
        "int4-g32",
    ),
    "deepseek_mxfp4": (
        deepseek(hidden_size=96, moe_intermediate_size=32, n_routed_experts=6, q_lora_rank=32,
                 num_hidden_layers=2, num_experts_per_tok=2, v_head_dim=24),
        "mxfp4",
    ),
    "deepseek_awq": (
        deepseek(hidden_size=96, moe_intermediate_size=32, n_routed_experts=6, q_lora_rank=32,
                 num_hidden_layers=2, num_experts_per_tok=2, v_head_dim=24),
        "awq",
    ),
    "deepseek_fp8_rows": (
        deepseek(moe_intermediate_size=36, n_routed_experts=4, num_hidden_layers=2,
                 num_experts_per_tok=2),
        "fp8-rows",
    ),
    "qwen3_int4_zeros": (
        qwen3(head_dim=32, hidden_size=128, moe_intermediate_size=64, num_experts=4,
              num_attention_heads=4, num_experts_per_tok=2, num_hidden_layers=2),
        "int4-g64-zeros",
    ),
    "qwen3_nvfp4": (
        qwen3(head_dim=24, hidden_size=80, moe_intermediate_size=48, num_attention_heads=4,
              num_experts=6, num_experts_per_tok=2, num_hidden_layers=2),
        "nvfp4",
    ),
    "qwen3_gptq": (
        qwen3(head_dim=24, hidden_size=96, moe_intermediate_size=32, num_attention_heads=4,
              num_experts=6, num_experts_per_tok=2, num_hidden_layers=2),
        "gptq",
    ),
    "qwen3_int8": (
        qwen3(moe_intermediate_size=36, num_experts=6, num_experts_per_tok=2,
              num_hidden_layers=2),
        "int8",
    ),
}


def config_of(name):
    config, dtype = CASES[name]
    return architectures.quantize_config(config, dtype), dtype


def golden(name):
    """prompt, logits and continuation."""
    return np.load(DATA / f"{name}.npz")


@functools.cache
def made(build=None):
    """The folder of all checkpoints in a build folder, the tests' own by default; bytes that no golden is of are an error."""
    folder = SCRIPTS.parent / (build or os.environ.get("TANDEM_BUILD", "build")) / "golden"
    folder.mkdir(parents=True, exist_ok=True)
    provenance = (DATA / "provenance.json").read_bytes()
    sources = [p.read_bytes() for p in sorted(SCRIPTS.glob("*.py"))]
    key = hashlib.sha256(b"".join([provenance, *sources])).hexdigest()
    with open(folder / "made_by", "a+", encoding="utf-8") as stamp:
        fcntl.flock(stamp, fcntl.LOCK_EX)
        stamp.seek(0)
        if stamp.read() == key:
            return folder
        stamp.truncate(0)
        for name, facts in json.loads(provenance)["cases"].items():
            shutil.rmtree(folder / name, ignore_errors=True)
            config, dtype = config_of(name)
            if golden_weights.make(config, dtype, folder / name, facts["seed"]) != facts["digest"]:
                raise SystemExit(f"{name}: not the checkpoint that the golden is of")
        stamp.write(key)
    return folder


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__.split("\n")[2])
    made(sys.argv[1])
