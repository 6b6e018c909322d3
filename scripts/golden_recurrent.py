"""Golden models with recurrent states: gated delta nets and Kimi delta attention (golden_families.py)."""

import published
from golden_common import COMMON, wrapped

CASES = {}

QWEN3_NEXT = COMMON | {
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
QWEN35 = published.qwen35_of(QWEN3_NEXT) | {
    "model_type": "qwen3_5_moe_text",
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [1, 1, 0],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
}

CASES["qwen3_next"] = (QWEN3_NEXT, "bf16")
# A pattern of layers that does not repeat, as many key heads as value heads, widths that fill no
# vector, another filter, a dense layer, one expert a token.
CASES["qwen3_next_odd"] = (
    QWEN3_NEXT
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
    QWEN3_NEXT
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
CASES["qwen3_5_moe"] = (wrapped("qwen3_5_moe", QWEN35), "bf16")
CASES["qwen3_5_moe_odd"] = (
    wrapped(
        "qwen3_5_moe",
        QWEN35
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
    QWEN35
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


# Decays of channels, latent attention without rotation, as published: numbers of layers from 1 on, heads
# that fill a vector.
_KIMI_LINEAR = COMMON | {
    "first_k_dense_replace": 1,
    "intermediate_size": 48,
    "kv_lora_rank": 16,
    "linear_attn_config": {
        "full_attn_layers": [3, 4],
        "head_dim": 16,
        "kda_layers": [1, 2],
        "num_heads": 2,
        "short_conv_kernel_size": 4,
    },
    "mla_use_nope": True,
    "model_max_length": 512,
    "model_type": "kimi_linear",
    "moe_intermediate_size": 12,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_attention_heads": 3,
    "num_expert_group": 1,
    "num_experts": 6,
    "num_experts_per_token": 2,
    "num_hidden_layers": 4,
    "num_key_value_heads": 3,
    "num_shared_experts": 1,
    "pad_token_id": 0,
    "q_lora_rank": None,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 2.446,
    "topk_group": 1,
    "use_grouped_topk": True,
    "v_head_dim": 16,
}
_KIMI_LINEAR = {k: v for k, v in _KIMI_LINEAR.items() if k not in ("max_position_embeddings", "num_experts_per_tok")}
CASES["kimi_linear"] = (_KIMI_LINEAR, "bf16")
# As transformers writes it: layer_types; widths that fill no vector, another filter, queries of low rank,
# groups, weights not normalized, dense layers in between, two shared experts.
CASES["kimi_linear_odd"] = (
    {k: v for k, v in _KIMI_LINEAR.items()
     if k not in ("first_k_dense_replace", "linear_attn_config", "mla_use_nope", "rope_scaling", "rope_theta")}
    | {
        "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention", "linear_attention"],
        "linear_conv_kernel_dim": 3,
        "linear_head_dim": 20,
        "linear_num_heads": 3,
        "mlp_layer_types": ["sparse", "dense", "sparse", "sparse", "dense"],
        "moe_renormalize": False,
        "num_attention_heads": 5,
        "num_expert_group": 3,
        "num_hidden_layers": 5,
        "num_key_value_heads": 5,
        "num_shared_experts": 2,
        "q_lora_rank": 24,
        "rms_norm_eps": 1e-3,
        "topk_group": 2,
        "v_head_dim": 28,
    },
    "bf16",
)
# One head wider than a tile of the state, a filter of two taps, one expert a token, FP8.
CASES["kimi_linear_fp8"] = (
    _KIMI_LINEAR
    | {
        "linear_attn_config": {
            "full_attn_layers": [2],
            "head_dim": 40,
            "kda_layers": [1, 3],
            "num_heads": 1,
            "short_conv_kernel_size": 2,
        },
        "num_experts_per_token": 1,
        "num_hidden_layers": 3,
    },
    "fp8",
)

# Whole matrices of decays and gates, bounded decays, latent attention with rotation and a gate for each head.
_LING = COMMON | {
    "first_k_dense_replace": 1,
    "head_dim": 16,
    "intermediate_size": 48,
    "kda_lower_bound": -5.0,
    "kda_safe_gate": True,
    "kv_lora_rank": 16,
    "layer_group_size": 3,
    "model_type": "bailing_hybrid",
    "moe_intermediate_size": 12,
    "n_group": 3,
    "norm_topk_prob": True,
    "num_attention_heads": 3,
    "num_experts": 6,
    "num_hidden_layers": 4,
    "num_key_value_heads": 3,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 1,
    "pad_token_id": 0,
    "q_lora_rank": None,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 6000000.0,
    "routed_scaling_factor": 2.5,
    "short_conv_kernel_size": 4,
    "topk_group": 2,
    "v_head_dim": 16,
}
CASES["bailing_hybrid"] = (_LING, "bf16")
# Queries of low rank, decays without a bound, widths that fill no vector, another filter, weights not normalized, two
# shared experts, a dense layer more.
CASES["bailing_hybrid_odd"] = (
    _LING
    | {
        "first_k_dense_replace": 2,
        "head_dim": 20,
        "kda_safe_gate": False,
        "layer_group_size": 2,
        "n_group": 1,
        "norm_topk_prob": False,
        "num_attention_heads": 5,
        "num_hidden_layers": 5,
        "num_key_value_heads": 5,
        "num_shared_experts": 2,
        "q_lora_rank": 24,
        "rms_norm_eps": 1e-3,
        "rope_theta": 10000.0,
        "short_conv_kernel_size": 3,
        "topk_group": 1,
        "v_head_dim": 28,
    },
    "bf16",
)
CASES["bailing_hybrid_fp8"] = (
    _LING | {"head_dim": 40, "kda_lower_bound": -2.0, "layer_group_size": 2, "num_attention_heads": 1,
             "num_hidden_layers": 3, "num_key_value_heads": 1, "short_conv_kernel_size": 2},
    "fp8",
)

# Keys of more than 64 elements, whose prompts a GPU computes in chunks; one delta net.
CASES["kimi_linear_wide"] = (
    _KIMI_LINEAR
    | {
        "linear_attn_config": {
            "full_attn_layers": [2],
            "head_dim": 72,
            "kda_layers": [1],
            "num_heads": 2,
            "short_conv_kernel_size": 4,
        },
        "num_hidden_layers": 2,
    },
    "bf16",
)
# Each expert by itself, its blocks described outside of text_config.
CASES["qwen3_5_moe_fp8"] = (
    wrapped(
        "qwen3_5_moe",
        QWEN35 | {"full_attention_interval": 2, "hidden_size": 136, "linear_num_key_heads": 1,
                   "linear_num_value_heads": 3, "moe_intermediate_size": 20, "num_hidden_layers": 3},
    ),
    "fp8",
)
# Attention to 5 of up to 50 groups of 4 keys, which chunks of 37 cut, streams read by gates, n-grams of up to
# three tokens in two layers, whose convolution reaches 9 tokens back.
_QWEN4 = QWEN35 | {
    "full_attention_interval": 3,
    "hc_count": 4,
    "hc_lowrank": 12,
    "heads_per_ngram": 2,
    "indexer_budget": 20,
    "indexer_compress_ratio": 4,
    "indexer_head_dim": 16,
    "indexer_kv_heads": 1,
    "indexer_n_heads": 9,
    "make_ngram_vocab_size_divisible_by": 16,
    "model_type": "qwen4_exp_text",
    "mtp_num_hidden_layers": 0,
    "ngram_size": 3,
    "ngram_vocab_size_base": 60,
    "norm_topk_prob": True,
    "num_hidden_layers": 6,
    "output_gate_type": "sigmoid",
    "ple_conv_kernel_size": 4,
    "ple_embed_dim": 24,
    "ple_layer_ids": [1, 4],
    "seed": 1234,
    "split_ngram_parts": 5,
}
CASES["qwen4_exp_text"] = (_QWEN4, "bf16")
# In a checkpoint with vision, tied embeddings: types of layers as published, three streams, groups of 8, of which
# two are seen, n-grams of up to four tokens in one table, a token of the prompt that ends them, widths that fill no vector, one expert a token.
CASES["qwen4_exp_odd"] = (
    wrapped(
        "qwen4_exp",
        {k: v for k, v in _QWEN4.items() if k not in ("full_attention_interval", "output_gate_type")}
        | {
            "eos_token_id": [7, 1],
            "hc_count": 3,
            "hc_lowrank": 7,
            "head_dim": 24,
            "heads_per_ngram": 1,
            "indexer_budget": 16,
            "indexer_compress_ratio": 8,
            "indexer_head_dim": 20,
            "indexer_n_heads": 12,
            "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention",
                            "linear_attention"],
            "linear_conv_kernel_dim": 3,
            "linear_key_head_dim": 12,
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 3,
            "linear_value_head_dim": 20,
            "ngram_size": 4,
            "norm_topk_prob": False,
            "num_attention_heads": 5,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 5,
            "num_key_value_heads": 1,
            "ple_conv_kernel_size": 3,
            "ple_embed_dim": 30,
            "ple_layer_ids": [5, 2],
            "rms_norm_eps": 1e-3,
            "split_ngram_parts": 1,
            "tie_word_embeddings": True,
        },
    )
    | {"tie_word_embeddings": True},
    "bf16",
)
# A selection that holds more than the prompt and its continuation have, by one head; pairs of tokens, five ends of them, one value head
# wider than a tile of the state, a prediction layer to be skipped, FP8.
CASES["qwen4_exp_fp8"] = (
    _QWEN4
    | {
        "attention_bias": True,
        "full_attention_interval": 2,
        "hc_count": 2,
        "heads_per_ngram": 3,
        "indexer_budget": 256,
        "indexer_compress_ratio": 16,
        "indexer_n_heads": 1,
        "linear_conv_kernel_dim": 2,
        "linear_key_head_dim": 24,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "linear_value_head_dim": 40,
        "mtp_num_hidden_layers": 1,
        "ngram_size": 2,
        "num_attention_heads": 3,
        "num_hidden_layers": 3,
        "num_key_value_heads": 3,
        "output_gate_type": None,
        "ple_conv_kernel_size": 2,
        "ple_layer_ids": [3],
        "seed": 7,
    },
    "fp8",
)
