"""Golden models whose checkpoints are made on the spot from a seed, so that only results are stored.

Each case is a configuration as published and a format of its weights; what it is there for is said
beside it. tests/golden/families/ holds seed, prompt, logits and continuation, made by make_golden.py.
"""

import hashlib
import json
import os

import checkpoint
import golden_weights
import shapes

N_VOCAB = 64

_COMMON = {
    "bos_token_id": 0,
    "eos_token_id": 1,
    "hidden_act": "silu",
    "hidden_size": 40,
    "max_position_embeddings": 512,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 3,
    "tie_word_embeddings": False,
    "vocab_size": N_VOCAB,
}
_MLA = _COMMON | {
    "attention_bias": False,
    "first_k_dense_replace": 1,
    "intermediate_size": 48,
    "kv_lora_rank": 16,
    "moe_intermediate_size": 12,
    "n_group": 1,
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "routed_scaling_factor": 1.8,
    "topk_group": 1,
    "v_head_dim": 16,
}
_GLM = _COMMON | {
    "attention_bias": True,
    "first_k_dense_replace": 1,
    "head_dim": 16,
    "intermediate_size": 48,
    "model_type": "glm4_moe",
    "moe_intermediate_size": 12,
    "n_group": 1,
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_nextn_predict_layers": 0,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.0,
    "topk_group": 1,
    "use_qk_norm": False,
}
_MINIMAX = _COMMON | {
    "head_dim": 16,
    "intermediate_size": 12,
    "model_type": "minimax_m2",
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_local_experts": 6,
    "qk_norm_type": "per_layer",
    "rms_norm_eps": 1e-6,
    "rope_theta": 5000000,
    "rotary_dim": 8,
    "scoring_func": "sigmoid",
    "use_qk_norm": True,
    "use_routing_bias": True,
}
_HY = _COMMON | {
    "first_k_dense_replace": 1,
    "attention_bias": False,
    "head_dim": 16,
    "intermediate_size": 48,
    "model_type": "hy_v3",
    "moe_intermediate_size": 12,
    "num_attention_heads": 6,
    "num_experts": 6,
    "num_key_value_heads": 2,
    "num_shared_experts": 1,
    "rms_norm_eps": 1e-5,
    "rope_theta": 11158840.0,
    "router_scaling_factor": 2.826,
}
_YARN = {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "factor": 8.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 10000.0,
    "type": "yarn",
}
_KIMI = _MLA | {
    "model_type": "kimi_k2",
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}


def _wrapped(model_type, text):
    return {"model_type": model_type, "text_config": text, "vision_config": {"hidden_size": 8}}


def _lite(**changes):
    return _MLA | {"model_type": "glm4_moe_lite", "rms_norm_eps": 1e-5} | changes


def _mistral(beta=0.3, **changes):
    rope = _YARN | {"llama_4_scaling_beta": beta, "max_position_embeddings": 512}
    base = {"model_type": "mistral4", "first_k_dense_replace": 0, "rms_norm_eps": 1e-6}
    return _MLA | base | {"rope_parameters": rope, "routed_scaling_factor": 1.0} | changes


_GPT_OSS = _COMMON | {
    "attention_bias": True,
    "head_dim": 16,
    "hidden_size": 64,
    "intermediate_size": 32,
    "model_type": "gpt_oss",
    "num_attention_heads": 6,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 6,
    "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 24,
    "swiglu_limit": 7.0,
}

CASES = {
    "glm4_moe_bias": (_GLM, "bf16"),
    # Norms of queries and keys, a quarter of each head rotates, one key head for five, expert groups,
    # two shared experts, a prediction layer to be skipped.
    "glm4_moe_norms": (
        _GLM
        | {
            "attention_bias": False,
            "head_dim": 24,
            "n_group": 2,
            "n_shared_experts": 2,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "num_nextn_predict_layers": 1,
            "partial_rotary_factor": 0.25,
            "routed_scaling_factor": 2.5,
            "use_qk_norm": True,
        },
        "bf16",
    ),
    # As transformers 5 writes it: rope_parameters; weights not normalized, no dense layer, no key
    # heads shared, tied embeddings.
    "glm4_moe_tied": (
        {k: v for k, v in _GLM.items() if k not in ("partial_rotary_factor", "rope_theta")}
        | {
            "first_k_dense_replace": 0,
            "norm_topk_prob": False,
            "num_attention_heads": 3,
            "num_hidden_layers": 2,
            "num_key_value_heads": 3,
            "rope_parameters": {
                "partial_rotary_factor": 0.75,
                "rope_theta": 10000.0,
                "rope_type": "default",
            },
            "tie_word_embeddings": True,
            "use_qk_norm": True,
        },
        "fp8",
    ),
    "minimax_m2": (_MINIMAX, "bf16"),
    "minimax_m2_odd": (
        _MINIMAX
        | {
            "head_dim": 12,
            "num_attention_heads": 5,
            "num_experts_per_tok": 1,
            "num_key_value_heads": 1,
            "num_local_experts": 5,
            "rms_norm_eps": 1e-3,
            "rotary_dim": 4,
        },
        "bf16",
    ),
    "minimax_m2_fp8": (
        {k: v for k, v in _MINIMAX.items() if k != "rotary_dim"}
        | {
            "num_attention_heads": 3,
            "num_experts_per_tok": 3,
            "num_key_value_heads": 3,
            "rope_parameters": {
                "partial_rotary_factor": 0.25,
                "rope_theta": 10000.0,
                "rope_type": "default",
            },
            "tie_word_embeddings": True,
        },
        "fp8",
    ),
    "kimi_k25_int4": (_wrapped("kimi_k25", _KIMI), "int4-g32"),
    "kimi_k25_groups": (
        _wrapped(
            "kimi_k25", _KIMI | {"n_group": 2, "rope_scaling": _YARN, "num_attention_heads": 4,
                                 "num_key_value_heads": 4}
        ),
        "int4-g32",
    ),
    "kimi_k25_bf16": (
        _wrapped(
            "kimi_k25",
            _KIMI
            | {
                "hidden_size": 40,
                "moe_intermediate_size": 12,
                "n_shared_experts": 2,
                "num_hidden_layers": 3,
                "q_lora_rank": None,
            },
        ),
        "bf16",
    ),
    "glm4_moe_lite": (_lite(), "bf16"),
    # Values wider than keys; the layers with experts do not come last.
    "glm4_moe_lite_layers": (
        _lite(
            attention_bias=True,
            mlp_layer_types=["sparse", "dense", "sparse"],
            n_group=3,
            num_attention_heads=5,
            num_key_value_heads=5,
            topk_group=2,
            v_head_dim=28,
        ),
        "bf16",
    ),
    "glm4_moe_lite_whole": (
        _lite(
            norm_topk_prob=False,
            n_shared_experts=2,
            q_lora_rank=None,
            rope_interleave=False,
            rope_parameters={"rope_theta": 50000.0, "rope_type": "default"},
        ),
        "fp8",
    ),
    "hy_v3": (_HY, "bf16"),
    "hy_v3_bias": (
        _HY
        | {
            "attention_bias": True,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "num_shared_experts": 2,
        },
        "bf16",
    ),
    "hy_v3_tied": (
        _HY
        | {
            "num_attention_heads": 3,
            "num_experts_per_tok": 3,
            "num_hidden_layers": 2,
            "num_key_value_heads": 3,
            "rms_norm_eps": 1e-3,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
            "router_scaling_factor": 1.0,
            "tie_word_embeddings": True,
        },
        "bf16",
    ),
    # Positions reach over six spans of the query scale.
    "mistral4": (_mistral(), "bf16"),
    "mistral4_groups": (
        _mistral(
            beta=0.1,
            first_k_dense_replace=1,
            n_group=3,
            n_shared_experts=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            routed_scaling_factor=2.0,
            topk_group=2,
        ),
        "bf16",
    ),
    "mistral4_wrapped": (
        _wrapped("mistral3", _mistral(norm_topk_prob=False, q_lora_rank=None, rope_interleave=False)),
        "bf16",
    ),
}


# Families whose cases include their wrapper.
INSIDE = {"mistral3": "mistral4", "qwen3_5_moe": "qwen3_5_moe_text", "minimax_m3_vl": "minimax_m3_vl_text"}

_QWEN3_NEXT = _COMMON | {
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "full_attention_interval": 4,
    "head_dim": 16,
    "intermediate_size": 48,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 16,
    "mlp_only_layers": [],
    "model_type": "qwen3_next",
    "moe_intermediate_size": 12,
    "mtp_num_hidden_layers": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 6,
    "num_experts": 6,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000000,
    "shared_expert_intermediate_size": 20,
}
_QWEN35 = shapes.qwen35_of(_QWEN3_NEXT) | {
    "model_type": "qwen3_5_moe_text",
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [1, 1, 0],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
}

CASES["qwen3_next"] = (_QWEN3_NEXT, "bf16")
# A pattern of layers that does not repeat, as many key heads as value heads, widths that fill no
# vector, another filter, a dense layer, one expert a token.
CASES["qwen3_next_odd"] = (
    _QWEN3_NEXT
    | {
        "head_dim": 24,
        "layer_types": ["full_attention"] + ["linear_attention"] * 2 + ["full_attention"]
        + ["linear_attention"],
        "linear_conv_kernel_dim": 3,
        "linear_key_head_dim": 12,
        "linear_num_key_heads": 3,
        "linear_num_value_heads": 3,
        "linear_value_head_dim": 20,
        "mlp_only_layers": [1],
        "mtp_num_hidden_layers": 0,
        "num_attention_heads": 5,
        "num_experts_per_tok": 1,
        "num_hidden_layers": 5,
        "num_key_value_heads": 1,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-3,
        "tie_word_embeddings": True,
    },
    "bf16",
)
# One key head for five value heads wider than a tile of the state, biases, FP8.
CASES["qwen3_next_fp8"] = (
    _QWEN3_NEXT
    | {
        "attention_bias": True,
        "full_attention_interval": 2,
        "linear_conv_kernel_dim": 2,
        "linear_key_head_dim": 24,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 5,
        "linear_value_head_dim": 40,
        "norm_topk_prob": False,
        "num_attention_heads": 3,
        "num_experts_per_tok": 3,
        "num_hidden_layers": 3,
        "num_key_value_heads": 3,
    },
    "fp8",
)
CASES["qwen3_5_moe"] = (_wrapped("qwen3_5_moe", _QWEN35), "bf16")
CASES["qwen3_5_moe_odd"] = (
    _wrapped(
        "qwen3_5_moe",
        _QWEN35
        | {
            "head_dim": 24,
            "layer_types": ["linear_attention", "full_attention"] + ["linear_attention"] * 2
            + ["full_attention"],
            "linear_conv_kernel_dim": 5,
            "linear_key_head_dim": 20,
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 9,
            "linear_value_head_dim": 36,
            "num_attention_heads": 3,
            "num_experts_per_tok": 1,
            "num_hidden_layers": 5,
            "num_key_value_heads": 3,
        },
    ),
    "bf16",
)
# The language model alone.
CASES["qwen3_5_moe_text"] = (
    _QWEN35
    | {
        "full_attention_interval": 3,
        "linear_num_key_heads": 3,
        "linear_num_value_heads": 3,
        "mtp_num_hidden_layers": 0,
        "num_attention_heads": 5,
        "num_hidden_layers": 3,
        "num_key_value_heads": 1,
        "rope_parameters": {
            "partial_rotary_factor": 0.75,
            "rope_theta": 10000.0,
            "rope_type": "default",
        },
        "tie_word_embeddings": True,
    },
    "bf16",
)


# Windows shorter than a KV page, than the prompt.
CASES["gpt_oss"] = (_GPT_OSS, "bf16")
# A pattern of layers that does not repeat, a window over more than a page, one key head for five, a
# clamp that most values reach.
CASES["gpt_oss_layers"] = (
    _GPT_OSS
    | {
        "head_dim": 24,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "num_attention_heads": 5,
        "num_experts_per_tok": 3,
        "num_hidden_layers": 3,
        "num_key_value_heads": 1,
        "num_local_experts": 5,
        "sliding_window": 67,
        "swiglu_limit": 0.75,
    },
    "bf16",
)
# No YaRN, no biases of attention, one expert a token, a key head for each, another gain.
CASES["gpt_oss_plain"] = (
    {k: v for k, v in _GPT_OSS.items() if k not in ("rope_scaling", "rope_theta")}
    | {
        "attention_bias": False,
        "intermediate_size": 64,
        "num_attention_heads": 3,
        "num_experts_per_tok": 1,
        "num_hidden_layers": 3,
        "num_key_value_heads": 3,
        "num_local_experts": 4,
        "rms_norm_eps": 1e-3,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "sliding_window": 7,
        "swiglu_alpha": 1.2,
        "tie_word_embeddings": True,
    },
    "bf16",
)


# Names and keys of Tencent, one FP8 scale a matrix, a prediction layer.
CASES["hy_v3_published"] = (
    {k: v for k, v in _HY.items() if k != "rope_theta"}
    | {
        "enable_moe_fp32_combine": False,
        "expert_hidden_dim": 12,
        "moe_router_enable_expert_bias": True,
        "moe_router_use_sigmoid": True,
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
        "num_nextn_predict_layers": 1,
        "num_shared_experts": 2,
        "qk_norm": True,
        "rope_parameters": {"rope_theta": 11158840.0, "rope_type": "default"},
        "route_norm": True,
    },
    "fp8-static",
)
# Attention to the keys that an indexer selects: fewer than the prompt has from the 25th token on.
# Heads of indexers are many enough that few scores are exactly 0: ties there are a test's of its own.
_DSA = _MLA | {
    "index_head_dim": 16,
    "index_n_heads": 9,
    "index_topk": 24,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
}
_V32 = _DSA | {"model_type": "deepseek_v32", "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
_GLM5 = _DSA | {"model_type": "glm_moe_dsa"}
CASES["deepseek_v32"] = (_V32, "bf16")
# YaRN as published, expert groups, one selected key in three of the prompt, heads of the indexer that
# are all rotary, a prediction layer to be skipped, FP8.
CASES["deepseek_v32_yarn"] = (
    {k: v for k, v in _V32.items() if k != "rope_parameters"}
    | {
        "first_k_dense_replace": 0,
        "index_head_dim": 8,
        "index_n_heads": 13,
        "index_topk": 67,
        "n_group": 3,
        "num_nextn_predict_layers": 1,
        "num_attention_heads": 5,
        "num_hidden_layers": 2,
        "num_key_value_heads": 5,
        "rope_scaling": _YARN,
        "topk_group": 2,
        "v_head_dim": 20,
    },
    "fp8",
)
# A selection larger than the prompt and its continuation, so that all zeros of a single head of the
# indexer change nothing; biases, weights of experts as they are.
CASES["deepseek_v32_dense"] = (
    _V32
    | {
        "attention_bias": True,
        "index_n_heads": 1,
        "index_topk": 300,
        "mlp_layer_types": ["sparse", "dense", "sparse"],
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "routed_scaling_factor": 1.0,
    },
    "bf16",
)
CASES["glm_moe_dsa"] = (_GLM5, "bf16")
# Layers that share selections, of five keys.
CASES["glm_moe_dsa_shared"] = (
    _GLM5
    | {
        "index_head_dim": 20,
        "index_n_heads": 12,
        "index_topk": 5,
        "indexer_types": ["full", "shared", "full", "shared"],
        "num_attention_heads": 5,
        "num_hidden_layers": 4,
        "num_key_value_heads": 5,
        "v_head_dim": 28,
    },
    "bf16",
)
# Sharing by step, values wider than keys, expert groups, tied embeddings, FP8.
CASES["glm_moe_dsa_step"] = (
    _GLM5
    | {
        "index_n_heads": 11,
        "index_topk": 37,
        "index_skip_topk_offset": 1,
        "index_topk_freq": 2,
        "n_group": 3,
        "n_shared_experts": 2,
        "num_attention_heads": 4,
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
        "topk_group": 2,
        "v_head_dim": 28,
    },
    "fp8",
)
# Attention over a window and pooled keys. Rates are such that a prompt has entries of both kinds,
# more than are selected. Names are the publisher's; the first layer's experts follow from a table.
_V4 = {k: v for k, v in _COMMON.items()} | {
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
    "compress_ratios": [0, 4, 128, 4],
    "compress_rope_theta": 160000,
    "hc_eps": 1e-6,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "head_dim": 16,
    "index_head_dim": 16,
    "index_n_heads": 9,
    "index_topk": 12,
    "model_type": "deepseek_v4",
    "moe_intermediate_size": 12,
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_hash_layers": 1,
    "num_hidden_layers": 4,
    "num_key_value_heads": 1,
    "num_nextn_predict_layers": 0,
    "o_groups": 2,
    "o_lora_rank": 12,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 16,
        "original_max_position_embeddings": 32,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "sliding_window": 24,
    "swiglu_limit": 10.0,
    "topk_method": "noaux_tc",
}
CASES["deepseek_v4"] = (_V4, "bf16")
# A window of one position, other rates, widths that fill no vector, three groups of one head, a
# clamp that most values reach, no tables, no YaRN.
CASES["deepseek_v4_odd"] = (
    {k: v for k, v in _V4.items() if k not in ("rope_scaling", "compress_ratios")}
    | {
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 8},
        "hc_mult": 3,
        "hc_sinkhorn_iters": 2,
        "head_dim": 12,
        "index_head_dim": 20,
        "index_n_heads": 13,
        "index_topk": 5,
        "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention",
                        "compressed_sparse_attention"],
        "num_attention_heads": 3,
        "num_experts_per_tok": 3,
        "num_hash_layers": 0,
        "num_hidden_layers": 3,
        "o_groups": 3,
        "o_lora_rank": 5,
        "qk_rope_head_dim": 4,
        "sliding_window": 1,
        "swiglu_limit": 0.75,
    },
    "bf16",
)
# Rates and formats as published, all entries seen, a window over more than a page of 64, one group,
# two streams.
CASES["deepseek_v4_dense"] = (
    {k: v for k, v in _V4.items() if k != "compress_rates"}
    | {
        "compress_ratios": [128, 4, 0],
        "hc_mult": 2,
        "hidden_size": 64,
        "moe_intermediate_size": 32,
        "index_n_heads": 1,
        "index_topk": 300,
        "num_attention_heads": 5,
        "num_experts_per_tok": 1,
        "num_hash_layers": 2,
        "num_hidden_layers": 3,
        "o_groups": 1,
        "rms_norm_eps": 1e-4,
        "sliding_window": 67,
        "tie_word_embeddings": True,
    },
    "deepseek-v4",
)
# Attention to 5 of up to 24 blocks of 6 keys, which pages of 64 cut, the last two in any case; a clamp that
# many values reach.
_M3 = _COMMON | {
    "dense_intermediate_size": 48,
    "head_dim": 16,
    "intermediate_size": 12,
    "model_type": "minimax_m3_vl_text",
    "moe_layer_freq": [0, 1, 1],
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_local_experts": 6,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-6,
    "rope_theta": 5000000,
    "rotary_dim": 8,
    "routed_scaling_factor": 1.5,
    "shared_intermediate_size": 20,
    "sparse_attention_config": {
        "sparse_attention_freq": [0, 1, 1],
        "sparse_block_size": 6,
        "sparse_index_dim": 16,
        "sparse_local_block": 2,
        "sparse_num_index_heads": 2,
        "sparse_topk_blocks": 5,
    },
    "swiglu_alpha": 1.702,
    "swiglu_limit": 1.5,
}
CASES["minimax_m3"] = (_wrapped("minimax_m3_vl", _M3), "bf16")
# By itself, with the keys of transformers: one KV head for five, widths that fill no vector, small blocks of which
# none is seen in any case, a layer without experts behind one with, tied embeddings.
CASES["minimax_m3_odd"] = (
    {k: v for k, v in _M3.items()
     if k not in ("moe_layer_freq", "partial_rotary_factor", "rope_theta", "sparse_attention_config")}
    | {
        "head_dim": 24,
        "index_block_size": 3,
        "index_head_dim": 20,
        "index_local_blocks": 0,
        "index_n_heads": 1,
        "index_topk_blocks": 7,
        "layer_types": ["minimax_m3_sparse", "full_attention", "minimax_m3_sparse"],
        "mlp_layer_types": ["sparse", "dense", "sparse"],
        "num_attention_heads": 5,
        "num_experts_per_tok": 1,
        "num_key_value_heads": 1,
        "rms_norm_eps": 1e-3,
        "rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 10000.0, "rope_type": "default"},
        "rotary_dim": 12,
        "swiglu_alpha": 1.2,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": True,
    },
    "bf16",
)
# A token's own block alone, of 128 keys, which is more than a page; three KV heads, experts in every layer, FP8.
CASES["minimax_m3_fp8"] = (
    _M3
    | {
        "moe_layer_freq": [1, 1, 1],
        "num_attention_heads": 3,
        "num_experts_per_tok": 3,
        "num_key_value_heads": 3,
        "sparse_attention_config": _M3["sparse_attention_config"]
        | {"sparse_block_size": 128, "sparse_local_block": 1, "sparse_num_index_heads": 3,
           "sparse_topk_blocks": 1},
    },
    "fp8",
)
# Fused experts with one FP8 scale each.
CASES["mistral4_fp8"] = (
    _wrapped("mistral3", _mistral(beta=0.2, n_shared_experts=2, num_attention_heads=5,
                                  num_key_value_heads=5)),
    "fp8-static",
)
# Each expert by itself, its blocks described outside of text_config.
CASES["qwen3_5_moe_fp8"] = (
    _wrapped(
        "qwen3_5_moe",
        _QWEN35 | {"full_attention_interval": 2, "hidden_size": 136, "linear_num_key_heads": 1,
                   "linear_num_value_heads": 3, "moe_intermediate_size": 20, "num_hidden_layers": 3},
    ),
    "fp8",
)


def config_of(name):
    config, dtype = CASES[name]
    return shapes.quantize_config(config, dtype), dtype


def _write_tokenizer(directory):
    """A token for each of N_VOCAB - 2 printable bytes; nothing else can be encoded."""
    vocab = {"<bos>": 0, "<eos>": 1} | {chr(33 + i): i + 2 for i in range(N_VOCAB - 2)}
    added = [
        {"id": i, "content": t, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": True}
        for i, t in enumerate(["<bos>", "<eos>"])
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                  "use_regex": True}
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
        "normalizer": None, "pre_tokenizer": byte_level, "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "dropout": None, "unk_token": None,
                  "continuing_subword_prefix": None, "end_of_word_suffix": None,
                  "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": vocab, "merges": []},
    }
    checkpoint.write_json(os.path.join(directory, "tokenizer.json"), tokenizer)
    special = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": None}
    checkpoint.write_json(os.path.join(directory, "tokenizer_config.json"), special)


def write_checkpoint(directory, config, stored):
    os.makedirs(directory, exist_ok=True)
    total = sum(e.n_bytes for e in stored)
    checkpoint.write_shards(directory, stored, total // 2 + 1)
    checkpoint.write_json(os.path.join(directory, "config.json"), config)
    _write_tokenizer(directory)


def digest(config, stored):
    """Of everything that the results depend on."""
    h = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for entry in stored:
        h.update(f"{entry.name} {entry.shape} {entry.dtype}".encode())
        for chunk in entry.chunks():
            h.update(memoryview(chunk).cast("B"))
    return h.hexdigest()


def make(name, directory, seed):
    """Writes the checkpoint of a case; returns its digest."""
    config, dtype = config_of(name)
    stored, _ = golden_weights.weights(config, dtype, seed)
    write_checkpoint(directory, config, stored)
    return digest(config, stored)
