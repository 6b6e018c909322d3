"""Golden models whose checkpoints are made on the spot from a seed, so that only results are stored.

Each case is a configuration as published and a format of its weights; what it is there for is said
beside it. tests/golden/families/ holds seed, prompt, logits and continuation, made by make_golden.py.
"""

import architectures
import golden_indexed
import golden_recurrent
import golden_weights
from golden_common import COMMON, MLA, N_VOCAB, YARN, wrapped

_GLM = COMMON | {
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
_GLM_V = {k: v for k, v in _GLM.items() if k not in ("partial_rotary_factor", "rope_theta")} | {
    "model_type": "glm4v_moe_text",
    "rope_parameters": {
        "mrope_section": [2, 1, 1],
        "partial_rotary_factor": 0.5,
        "rope_theta": 500000.0,
        "rope_type": "default",
    },
}
_SOLAR = {k: v for k, v in _GLM_V.items() if k not in ("first_k_dense_replace", "intermediate_size")} | {
    "attention_bias": False,
    "model_type": "solar_open",
    "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
}
_DOTS = {k: v for k, v in _GLM.items() if k not in ("partial_rotary_factor", "use_qk_norm")} | {
    "attention_bias": False,
    "model_type": "dots1",
    "n_shared_experts": 2,
    "sliding_window": None,
}
_ERNIE = {k: v for k, v in COMMON.items() if k != "num_experts_per_tok"} | {
    "head_dim": 10,
    "intermediate_size": 48,
    "model_type": "ernie4_5_moe",
    "moe_intermediate_size": 12,
    "moe_k": 2,
    "moe_layer_end_index": -1,
    "moe_layer_interval": 1,
    "moe_layer_start_index": 1,
    "moe_num_experts": 6,
    "moe_num_shared_experts": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "use_bias": False,
}
_MINIMAX = COMMON | {
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
_HY = COMMON | {
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
_EXAONE = {k: v for k, v in _HY.items() if k not in ("attention_bias", "router_scaling_factor")} | {
    "model_type": "exaone_moe",
    "num_hidden_layers": 4,
    "rope_theta": 1000000.0,
    "routed_scaling_factor": 2.5,
    "sliding_window": 24,
    "sliding_window_pattern": 4,
}
_GEMMA = {k: v for k, v in COMMON.items() if k not in ("hidden_act", "num_experts_per_tok")} | {
    "attention_bias": False,
    "attention_k_eq_v": True,
    "enable_moe_block": True,
    "final_logit_softcapping": 3.0,
    "global_head_dim": 24,
    "head_dim": 16,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size_per_layer_input": 0,
    "intermediate_size": 48,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "model_type": "gemma4_text",
    "moe_intermediate_size": 12,
    "num_attention_heads": 6,
    "num_experts": 6,
    "num_global_key_value_heads": 1,
    "num_hidden_layers": 5,
    "num_key_value_heads": 2,
    "num_kv_shared_layers": 0,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "sliding_window": 24,
    "tie_word_embeddings": True,
    "top_k_experts": 2,
    "vocab_size_per_layer_input": N_VOCAB,
}
_QWEN3_VL = COMMON | {
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 16,
    "intermediate_size": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_vl_moe_text",
    "moe_intermediate_size": 12,
    "num_attention_heads": 6,
    "num_experts": 6,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {"mrope_interleaved": True, "mrope_section": [4, 2, 2], "rope_type": "default"},
    "rope_theta": 5000000,
}
_OLMOE = COMMON | {
    "head_dim": 10,
    "intermediate_size": 12,
    "model_type": "olmoe",
    "norm_topk_prob": False,
    "num_attention_heads": 4,
    "num_experts": 6,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
}
_MIXTRAL = COMMON | {
    "head_dim": 12,
    "intermediate_size": 12,
    "model_type": "mixtral",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 6,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "sliding_window": None,
}
KIMI = MLA | {
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


def _lite(**changes):
    return MLA | {"model_type": "glm4_moe_lite", "rms_norm_eps": 1e-5} | changes


def _mistral(beta=0.3, **changes):
    rope = YARN | {"llama_4_scaling_beta": beta, "max_position_embeddings": 512}
    base = {"model_type": "mistral4", "first_k_dense_replace": 0, "rms_norm_eps": 1e-6}
    return MLA | base | {"rope_parameters": rope, "routed_scaling_factor": 1.0} | changes


_GPT_OSS = COMMON | {
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
    "glm4v_moe": (wrapped("glm4v_moe", _GLM_V), "bf16"),
    # Three quarters of each head rotate, one key head for five, expert groups, two shared experts, a
    # prediction layer to be skipped.
    "glm4v_moe_odd": (
        wrapped(
            "glm4v_moe",
            _GLM_V
            | {
                "attention_bias": False,
                "first_k_dense_replace": 0,
                "head_dim": 24,
                "n_group": 2,
                "n_shared_experts": 2,
                "num_attention_heads": 5,
                "num_key_value_heads": 1,
                "num_nextn_predict_layers": 1,
                "rope_parameters": _GLM_V["rope_parameters"] | {"mrope_section": [3, 3, 3], "partial_rotary_factor": 0.75},
                "routed_scaling_factor": 2.5,
            },
        ),
        "bf16",
    ),
    "glm4v_moe_fp8": (
        _GLM_V | {"norm_topk_prob": False, "num_attention_heads": 3, "num_key_value_heads": 3, "tie_word_embeddings": True},
        "fp8",
    ),
    "solar_open": (_SOLAR, "bf16"),
    # Biases, YaRN, expert groups, two shared experts.
    "solar_open_yarn": (
        _SOLAR
        | {
            "attention_bias": True,
            "n_group": 2,
            "n_shared_experts": 2,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "rope_parameters": YARN | {"rope_type": "yarn"},
            "routed_scaling_factor": 2.5,
        },
        "bf16",
    ),
    "solar_open_fp8": (
        _SOLAR
        | {
            "norm_topk_prob": False,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
            "tie_word_embeddings": True,
        },
        "fp8",
    ),
    "dots1": (_DOTS, "bf16"),
    # The last layers have a window, biases, one key head for five, expert groups.
    "dots1_windows": (
        _DOTS
        | {
            "attention_bias": True,
            "max_window_layers": 1,
            "n_group": 2,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "routed_scaling_factor": 2.5,
            "sliding_window": 24,
        },
        "bf16",
    ),
    "dots1_fp8": (
        _DOTS
        | {
            "first_k_dense_replace": 0,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "norm_topk_prob": False,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "sliding_window": 67,
            "tie_word_embeddings": True,
        },
        "fp8",
    ),
    "exaone_moe": (_EXAONE, "bf16"),
    # Types of layers as published, one key head for five, expert groups, two shared experts.
    "exaone_moe_layers": (
        _EXAONE
        | {
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "n_group": 2,
            "num_attention_heads": 5,
            "num_hidden_layers": 3,
            "num_key_value_heads": 1,
            "num_shared_experts": 2,
            "sliding_window": 67,
            "sliding_window_pattern": "GLG",
        },
        "bf16",
    ),
    "exaone_moe_fp8": (
        _EXAONE
        | {
            "norm_topk_prob": False,
            "num_attention_heads": 3,
            "num_hidden_layers": 3,
            "num_key_value_heads": 3,
            "sliding_window": 7,
            "sliding_window_pattern": 2,
            "tie_word_embeddings": True,
        },
        "fp8",
    ),
    "gemma4": (wrapped("gemma4", _GEMMA) | {"tie_word_embeddings": True}, "bf16"),
    # The default order of layers, all pairs rotate, a matrix of values everywhere, biases, one key head
    # for five, a window longer than a page, experts wider than the model, logits as they are, a head.
    "gemma4_odd": (
        {k: v for k, v in _GEMMA.items() if k != "layer_types"}
        | {
            "attention_bias": True,
            "attention_k_eq_v": False,
            "final_logit_softcapping": None,
            "global_head_dim": 10,
            "head_dim": 12,
            "intermediate_size": 20,
            "moe_intermediate_size": 44,
            "num_attention_heads": 5,
            "num_hidden_layers": 7,
            "num_key_value_heads": 1,
            "rms_norm_eps": 1e-3,
            "rope_parameters": {
                "full_attention": {"rope_theta": 5000.0, "rope_type": "default"},
                "sliding_attention": {"rope_theta": 500000.0, "rope_type": "default"},
            },
            "sliding_window": 67,
            "tie_word_embeddings": False,
            "top_k_experts": 1,
        },
        "bf16",
    ),
    # A last layer that states a window and has none; pages' entries of wide heads smaller than others'.
    "gemma4_fp8": (
        _GEMMA
        | {
            "global_head_dim": 8,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "num_attention_heads": 3,
            "num_hidden_layers": 3,
            "num_key_value_heads": 3,
            "sliding_window": 5,
            "top_k_experts": 3,
        },
        "fp8-static",
    ),
    "ernie4_5_moe": (_ERNIE, "bf16"),
    # Every second layer has experts but the last; a sum of weights that is mostly less than the least.
    "ernie4_5_moe_layers": (
        _ERNIE
        | {
            "head_dim": 12,
            "moe_layer_end_index": 3,
            "moe_layer_interval": 2,
            "moe_norm_min": 0.5,
            "moe_num_shared_experts": 0,
            "num_attention_heads": 5,
            "num_hidden_layers": 6,
            "num_key_value_heads": 1,
        },
        "bf16",
    ),
    "ernie4_5_moe_fp8": (
        _ERNIE | {"moe_k": 3, "moe_layer_start_index": 0, "rms_norm_eps": 1e-3, "tie_word_embeddings": True}, "fp8",
    ),
    "qwen3_vl_moe": (wrapped("qwen3_vl_moe", _QWEN3_VL), "bf16"),
    # A dense layer, biases, one key head for five, experts wider than the model.
    "qwen3_vl_moe_odd": (
        wrapped(
            "qwen3_vl_moe",
            _QWEN3_VL
            | {
                "attention_bias": True,
                "head_dim": 10,
                "mlp_only_layers": [1],
                "moe_intermediate_size": 44,
                "num_attention_heads": 5,
                "num_experts_per_tok": 3,
                "num_key_value_heads": 1,
                "rms_norm_eps": 1e-3,
            },
        ),
        "bf16",
    ),
    "qwen3_vl_moe_tied": (
        _QWEN3_VL | {"num_attention_heads": 3, "num_key_value_heads": 3, "tie_word_embeddings": True}, "bf16",
    ),
    # Weights of experts that are not normalized, as published.
    "olmoe": (_OLMOE, "bf16"),
    "olmoe_bias": (
        _OLMOE | {"attention_bias": True, "norm_topk_prob": True, "num_key_value_heads": 4, "rms_norm_eps": 1e-3},
        "bf16",
    ),
    "olmoe_fp8": (
        _OLMOE | {"head_dim": 8, "num_attention_heads": 5, "num_key_value_heads": 1, "tie_word_embeddings": True},
        "fp8",
    ),
    "mixtral": (_MIXTRAL, "bf16"),
    "mixtral_top_three": (
        _MIXTRAL | {"num_attention_heads": 6, "num_experts_per_tok": 3, "num_key_value_heads": 1, "rms_norm_eps": 1e-3},
        "bf16",
    ),
    "mixtral_fp8": (
        _MIXTRAL | {"num_attention_heads": 3, "num_key_value_heads": 3, "tie_word_embeddings": True}, "fp8",
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
    "kimi_k25_int4": (wrapped("kimi_k25", KIMI), "int4-g32"),
    "kimi_k25_groups": (
        wrapped(
            "kimi_k25", KIMI | {"n_group": 2, "rope_scaling": YARN, "num_attention_heads": 4,
                                 "num_key_value_heads": 4}
        ),
        "int4-g32",
    ),
    "kimi_k25_bf16": (
        wrapped(
            "kimi_k25",
            KIMI
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
        wrapped("mistral3", _mistral(norm_topk_prob=False, q_lora_rank=None, rope_interleave=False)),
        "bf16",
    ),
}

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
# Fused experts with one FP8 scale each.
CASES["mistral4_fp8"] = (
    wrapped("mistral3", _mistral(beta=0.2, n_shared_experts=2, num_attention_heads=5,
                                  num_key_value_heads=5)),
    "fp8-static",
)
CASES |= golden_recurrent.CASES | golden_indexed.CASES


def config_of(name):
    config, dtype = CASES[name]
    return architectures.quantize_config(config, dtype), dtype


def make(name, directory, seed):
    """Writes the checkpoint of a case; returns its digest."""
    return golden_weights.make(*config_of(name), directory, seed)
