#!/usr/bin/env python3
"""Makes tests/unit/config_defaults.inc: what transformers' configuration classes say of themselves.

Run in the environment of scripts/setup.sh --dev. For each family a config.json that states nothing but
model_type, and what the reference makes of it; tests/unit/test_config_defaults.c reads both and compares.
"""

import json
import os

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

# model_type: what a config.json has to state, since neither side has a default.
FAMILIES = {
    "bailing_hybrid": {},
    "deepseek_v3": {},
    "deepseek_v32": {},
    "deepseek_v4": {},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6},
    "ernie4_5_moe": {},
    "exaone_moe": {},
    "gemma4_text": {
        "enable_moe_block": True,
        "hidden_size_per_layer_input": 0,
        "moe_intermediate_size": 704,
        "num_experts": 128,
        "top_k_experts": 8,
    },
    "glm4_moe": {"head_dim": 128},
    "glm4_moe_lite": {},
    "glm4v_moe_text": {"head_dim": 128},
    "glm_moe_dsa": {},
    "glm5_next_text": {},
    "gpt_oss": {},
    "hy_v3": {},
    "kimi_linear": {},
    "minimax_m2": {},
    "minimax_m3_vl_text": {},
    "mistral4": {},
    "mixtral": {},
    "olmoe": {},
    "qwen3_moe": {},
    "qwen3_omni_moe_text": {"head_dim": 128},
    "qwen3_vl_moe_text": {},
    "qwen3_next": {},
    "qwen3_5_moe_text": {},
    "solar_open": {},
    "qwen4_exp_text": {
        "eos_token_id": 5,
        "indexer_budget": 2048,
        "indexer_compress_ratio": 16,
        "indexer_head_dim": 256,
        "indexer_kv_heads": 1,
        "indexer_n_heads": 4,
    },
}
# What is of training, of transformers itself, or of generation; null is what an absent key is.
LEFT_OUT = {"attention_dropout", "initializer_range", "use_cache", *transformers.PreTrainedConfig().to_dict()}


def main():
    here = os.path.dirname(os.path.abspath(__file__))
    with open(os.path.join(here, "..", "tests", "unit", "config_defaults.inc"), "w", encoding="utf-8") as f:
        f.write("// Made by scripts/make_config_defaults.py from transformers " + transformers.__version__ + ".\n")
        for name, need in FAMILIES.items():
            whole = CONFIG_MAPPING[name](**need).to_dict()
            whole = {k: v for k, v in whole.items() if k not in LEFT_OUT - {"tie_word_embeddings"} and v is not None}
            if "rope_theta" in whole.get("rope_parameters", {}):  # what the rotary embedding takes an absent one for
                whole["rope_parameters"].setdefault("partial_rotary_factor", 1.0)
            texts = (json.dumps({"model_type": name} | need), json.dumps(whole | {"model_type": name}))
            f.write("{%s,\n %s},\n" % tuple(json.dumps(t) for t in texts))


if __name__ == "__main__":
    main()
