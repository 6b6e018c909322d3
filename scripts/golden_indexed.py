"""Golden models that attend to selected or pooled keys (golden_families.py)."""

from golden_common import COMMON, MLA, YARN, wrapped

CASES = {}

# Attention to the keys that an indexer selects: fewer than the prompt has from the 25th token on.
# Heads of indexers are many enough that few scores are exactly 0: ties there are a test's of its own.
_DSA = MLA | {
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
        "rope_scaling": YARN,
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
_V4 = {k: v for k, v in COMMON.items()} | {
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
# Bounded decays of channels, latent attention without positions to 6 of up to 50 groups of 4 keys, which
# chunks of 37 cut, hyper-connections, a clamp that many values reach.
_GLM53 = {k: v for k, v in MLA.items() if k != "first_k_dense_replace"} | {
    "hc_eps": 1e-6,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "index_head_dim": 16,
    "index_kpool": 4,
    "index_kpool_always_select_tail": True,
    "index_n_heads": 9,
    "index_topk": 24,
    "layer_types": ["linear_attention", "indexed_attention", "linear_attention", "indexed_attention"],
    "linear_conv_kernel_dim": 4,
    "linear_head_dim": 16,
    "linear_lower_bound": -5.0,
    "linear_num_heads": 2,
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "model_type": "glm5_next_text",
    "num_hidden_layers": 4,
    "num_nextn_predict_layers": 0,
    "pad_token_id": 0,
    "qk_rope_head_dim": 0,
    "rms_norm_eps": 1e-5,
    "swiglu_limit": 1.5,
}
CASES["glm5_next"] = (_GLM53, "bf16")
# Decays without a bound, as in linear_attn_config; layers that share selections, of two groups of 8; widths
# that fill no vector, another filter, biases, expert groups, weights not normalized, two shared experts.
CASES["glm5_next_odd"] = (
    {k: v for k, v in _GLM53.items() if not k.startswith("linear_")}
    | {
        "attention_bias": True,
        "hc_mult": 3,
        "hc_sinkhorn_iters": 2,
        "index_head_dim": 20,
        "index_kpool": 8,
        "index_n_heads": 12,
        "index_topk": 16,
        "indexer_types": ["full", "shared", "full", "full", "full"],
        "layer_types": ["full_attention", "full_attention", "linear_attention", "full_attention", "linear_attention"],
        "linear_attn_config": {
            "gate_lower_bound": None,
            "head_dim": 20,
            "num_heads": 3,
            "safe_gate": False,
            "short_conv_kernel_size": 3,
        },
        "mlp_layer_types": ["sparse", "dense", "sparse", "sparse", "dense"],
        "n_group": 3,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "num_attention_heads": 5,
        "num_hidden_layers": 5,
        "num_key_value_heads": 5,
        "rms_norm_eps": 1e-3,
        "topk_group": 2,
        "v_head_dim": 28,
    },
    "bf16",
)
# In a checkpoint with vision, whose types of layers are the default: groups of 16 as published, of which a
# selection holds more than the prompt and its continuation have; one head wider than a tile of the state, a
# prediction layer to be skipped, FP8.
CASES["glm5_next_fp8"] = (
    wrapped(
        "glm5_next",
        {k: v for k, v in _GLM53.items() if k not in ("layer_types", "mlp_layer_types")}
        | {
            "first_k_dense_replace": 3,
            "hc_mult": 2,
            "index_kpool": 16,
            "index_n_heads": 1,
            "index_topk": 256,
            "linear_conv_kernel_dim": 2,
            "linear_head_dim": 40,
            "linear_lower_bound": -3.0,
            "linear_num_heads": 1,
            "num_experts_per_tok": 1,
            "num_nextn_predict_layers": 1,
            "swiglu_limit": 10.0,
        },
    ),
    "fp8",
)
# Attention to 5 of up to 24 blocks of 6 keys, which pages of 64 cut, the last two in any case; a clamp that
# many values reach.
_M3 = COMMON | {
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
CASES["minimax_m3"] = (wrapped("minimax_m3_vl", _M3), "bf16")
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
