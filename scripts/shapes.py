"""Shapes to make models of: the config.json of each, from those in published.py."""

import copy

from architectures import V4_TYPES, text_config
from published import (
    DEEPSEEK_BASE,
    GEMMA_4,
    GLM_5,
    GLM_53,
    GLM_AIR,
    GLM_FLASH,
    GPT_OSS,
    HY3,
    KIMI_K2,
    KIMI_LINEAR,
    MINIMAX_M2,
    MINIMAX_M3,
    MISTRAL_SMALL_4,
    MOONLIGHT,
    QWEN35,
    QWEN3_BASE,
    QWEN3_NEXT,
    V32,
    V4,
)

_TINY = {
    "first_k_dense_replace": 1,
    "hidden_size": 128,
    "intermediate_size": 256,
    "kv_lora_rank": 64,
    "max_position_embeddings": 8192,
    "moe_intermediate_size": 64,
    "n_group": 4,
    "n_routed_experts": 16,
    "num_attention_heads": 4,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "rope_scaling": None,
    "topk_group": 2,
    "v_head_dim": 32,
    "vocab_size": 1024,
}

_TINY_QWEN3 = {
    "head_dim": 32,
    "hidden_size": 128,
    "intermediate_size": 256,
    "max_position_embeddings": 8192,
    "moe_intermediate_size": 64,
    "num_attention_heads": 4,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
}

# The defaults of transformers, with sizes of what has none. As tests have it: no shape that is published.
_QWEN4 = QWEN35 | {
    "eos_token_id": 1,
    "hc_count": 4,
    "hc_lowrank": 320,
    "heads_per_ngram": 8,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 16,
    "indexer_head_dim": 128,
    "indexer_kv_heads": 1,
    "indexer_n_heads": 16,
    "make_ngram_vocab_size_divisible_by": 128,
    "model_type": "qwen4_exp_text",
    "ngram_size": 3,
    "ngram_vocab_size_base": 20000000,
    "norm_topk_prob": True,
    "ple_conv_kernel_size": 4,
    "ple_embed_dim": 2048,
    "ple_layer_ids": [2],
    "seed": 1234,
    "split_ngram_parts": 512,
}


def _wrapped(model_type, text, vision={}):
    return {"model_type": model_type, "text_config": text, "vision_config": vision}


_TINY_NEXT = {
    "head_dim": 32,
    "hidden_size": 128,
    "intermediate_size": 256,
    "linear_key_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 32,
    "max_position_embeddings": 8192,
    "moe_intermediate_size": 64,
    "num_attention_heads": 4,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 4,
    "shared_expert_intermediate_size": 64,
    "vocab_size": 1024,
}
_TINY_TOWER = {
    "deepstack_visual_indexes": [0],
    "depth": 2,
    "hidden_size": 32,
    "in_channels": 3,
    "intermediate_size": 64,
    "num_heads": 2,
    "num_position_embeddings": 64,
    "out_hidden_size": 128,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}


# name -> (config, tokens the tokenizer is trained to)
SHAPES = {
    "tiny": (DEEPSEEK_BASE | _TINY, 1000),
    "tiny-dsa": (V32 | _TINY | {"index_head_dim": 32, "index_n_heads": 8, "index_topk": 48}, 1000),
    "tiny-deepseek-v4": (
        V4
        | {
            "compress_rates": {V4_TYPES[4]: 4, V4_TYPES[128]: 32},
            "head_dim": 32,
            "hidden_size": 128,
            "index_head_dim": 32,
            "index_n_heads": 8,
            "index_topk": 16,
            "max_position_embeddings": 8192,
            "moe_intermediate_size": 64,
            "n_routed_experts": 16,
            "num_attention_heads": 4,
            "num_experts_per_tok": 4,
            "o_groups": 2,
            "o_lora_rank": 32,
            "q_lora_rank": 64,
            "qk_rope_head_dim": 16,
            "rope_scaling": None,
            "sliding_window": 48,
            "vocab_size": 1024,
        },
        1000,
    ),
    "tiny-qwen3": (QWEN3_BASE | _TINY_QWEN3, 1000),
    "tiny-qwen3-vl": (
        _wrapped(
            "qwen3_vl_moe",
            QWEN3_BASE
            | _TINY_QWEN3
            | {
                "model_type": "qwen3_vl_moe_text",
                "moe_intermediate_size": 48,  # fused matrices are not square: it shows how they lie
                "rope_scaling": {"mrope_interleaved": True, "mrope_section": [6, 5, 5], "rope_type": "default"},
            },
            _TINY_TOWER | {"model_type": "qwen3_vl_moe"},
        ),
        1000,
    ),
    "tiny-gpt-oss": (
        GPT_OSS
        | {
            "head_dim": 32,
            "hidden_size": 128,
            "intermediate_size": 64,
            "num_attention_heads": 4,
            "num_hidden_layers": 4,
            "num_key_value_heads": 2,
            "num_local_experts": 16,
            "vocab_size": 1024,
        },
        1000,
    ),
    "tiny-gemma4": (
        _wrapped(
            "gemma4",
            GEMMA_4
            | {
                "global_head_dim": 64,
                "head_dim": 32,
                "hidden_size": 128,
                "intermediate_size": 96,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
                "max_position_embeddings": 8192,
                "moe_intermediate_size": 64,
                "num_attention_heads": 4,
                "num_experts": 16,
                "num_global_key_value_heads": 1,
                "num_hidden_layers": 4,
                "num_key_value_heads": 2,
                "sliding_window": 48,
                "top_k_experts": 4,
                "vocab_size": 1024,
            },
        ),
        1000,
    ),
    "tiny-qwen3-next": (QWEN3_NEXT | _TINY_NEXT, 1000),
    "tiny-qwen3.5-vl": (
        _wrapped(
            "qwen3_5_moe",
            QWEN35
            | _TINY_NEXT
            | {
                "rope_parameters": {
                    "mrope_interleaved": True,
                    "mrope_section": [2, 1, 1],
                    "partial_rotary_factor": 0.25,
                    "rope_theta": 10000000,
                    "rope_type": "default",
                },
            },
            {k: v for k, v in _TINY_TOWER.items() if k != "deepstack_visual_indexes"} | {"model_type": "qwen3_5_moe"},
        ),
        1000,
    ),
    "tiny-kimi-linear": (
        KIMI_LINEAR
        | {
            "hidden_size": 128,
            "intermediate_size": 256,
            "kv_lora_rank": 64,
            "linear_attn_config": {
                "full_attn_layers": [3],
                "head_dim": 32,
                "kda_layers": [1, 2, 4],
                "num_heads": 4,
                "short_conv_kernel_size": 4,
            },
            "model_max_length": 8192,
            "moe_intermediate_size": 64,
            "num_attention_heads": 4,
            "num_experts": 16,
            "num_experts_per_token": 4,
            "num_hidden_layers": 4,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 16,
            "v_head_dim": 32,
            "vocab_size": 1024,
        },
        1000,
    ),
    # A selection smaller than prompts of tests, of groups that their chunks cut.
    "tiny-glm5-next": (
        _wrapped(
            "glm5_next",
            GLM_53
            | {
                "hidden_size": 128,
                "index_head_dim": 32,
                "index_kpool": 8,
                "index_n_heads": 8,
                "index_topk": 64,
                "intermediate_size": 256,
                "kv_lora_rank": 64,
                "layer_types": ["linear_attention", "indexed_attention", "linear_attention", "indexed_attention"],
                "linear_head_dim": 32,
                "linear_num_heads": 4,
                "max_position_embeddings": 8192,
                "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
                "moe_intermediate_size": 64,
                "n_routed_experts": 16,
                "num_attention_heads": 4,
                "num_experts_per_tok": 4,
                "num_hidden_layers": 4,
                "num_key_value_heads": 4,
                "pad_token_id": 0,
                "q_lora_rank": 64,
                "qk_nope_head_dim": 32,
                "v_head_dim": 32,
                "vocab_size": 1024,
            },
        ),
        1000,
    ),
    # A selection smaller than prompts of tests, tables of n-grams larger than pages of memory.
    "tiny-qwen4-exp": (
        _wrapped(
            "qwen4_exp",
            _QWEN4
            | {
                "head_dim": 32,
                "hc_lowrank": 16,
                "heads_per_ngram": 2,
                "hidden_size": 128,
                "indexer_budget": 64,
                "indexer_compress_ratio": 8,
                "indexer_head_dim": 32,
                "indexer_n_heads": 8,
                "linear_key_head_dim": 32,
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 4,
                "linear_value_head_dim": 32,
                "max_position_embeddings": 8192,
                "moe_intermediate_size": 64,
                "ngram_vocab_size_base": 1000,
                "num_attention_heads": 4,
                "num_experts": 16,
                "num_experts_per_tok": 4,
                "num_hidden_layers": 4,
                "ple_embed_dim": 64,
                "ple_layer_ids": [1, 3],
                "shared_expert_intermediate_size": 64,
                "split_ngram_parts": 6,
                "vocab_size": 1024,
            },
        ),
        1000,
    ),
    # As small as it can be, for tests on the emulated GPU.
    "mini-qwen3-next": (
        QWEN3_NEXT
        | {
            "full_attention_interval": 2,
            "head_dim": 16,
            "hidden_size": 32,
            "intermediate_size": 64,
            "linear_key_head_dim": 16,
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 2,
            "linear_value_head_dim": 16,
            "max_position_embeddings": 8192,
            "moe_intermediate_size": 32,
            "num_attention_heads": 2,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 2,
            "shared_expert_intermediate_size": 32,
            "vocab_size": 1024,
        },
        1000,
    ),
    "mini-qwen4-exp": (
        _wrapped(
            "qwen4_exp",
            _QWEN4
            | {
                "full_attention_interval": 2,
                "head_dim": 16,
                "hc_lowrank": 16,
                "heads_per_ngram": 2,
                "hidden_size": 32,
                "indexer_budget": 8,
                "indexer_compress_ratio": 4,
                "indexer_head_dim": 16,
                "indexer_n_heads": 4,
                "linear_key_head_dim": 16,
                "linear_num_key_heads": 1,
                "linear_num_value_heads": 2,
                "linear_value_head_dim": 16,
                "max_position_embeddings": 8192,
                "moe_intermediate_size": 32,
                "ngram_vocab_size_base": 1000,
                "num_attention_heads": 2,
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "num_hidden_layers": 2,
                "ple_embed_dim": 32,
                "ple_layer_ids": [1],
                "shared_expert_intermediate_size": 32,
                "split_ngram_parts": 6,
                "vocab_size": 1024,
            },
        ),
        1000,
    ),
    "mini-glm5-next": (
        _wrapped(
            "glm5_next",
            GLM_53
            | {
                "hidden_size": 32,
                "index_head_dim": 16,
                "index_kpool": 4,
                "index_n_heads": 8,
                "index_topk": 4,
                "intermediate_size": 64,
                "kv_lora_rank": 32,
                "layer_types": ["linear_attention", "indexed_attention"],
                "linear_head_dim": 16,
                "linear_num_heads": 2,
                "max_position_embeddings": 8192,
                "mlp_layer_types": ["sparse", "sparse"],
                "moe_intermediate_size": 32,
                "n_routed_experts": 4,
                "num_attention_heads": 2,
                "num_experts_per_tok": 2,
                "num_hidden_layers": 2,
                "num_key_value_heads": 2,
                "pad_token_id": 0,
                "q_lora_rank": 32,
                "qk_nope_head_dim": 16,
                "v_head_dim": 16,
                "vocab_size": 1024,
            },
        ),
        1000,
    ),
    "mini-deepseek-v4": (
        V4
        | {
            "compress_rates": {V4_TYPES[4]: 4, V4_TYPES[128]: 32},
            "compress_ratios": [4, 128],
            "hc_mult": 2,
            "head_dim": 16,
            "hidden_size": 32,
            "index_head_dim": 16,
            "index_n_heads": 2,
            "index_topk": 8,
            "max_position_embeddings": 8192,
            "moe_intermediate_size": 32,
            "n_routed_experts": 4,
            "num_attention_heads": 2,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 2,
            "o_groups": 1,
            "o_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "rope_scaling": None,
            "sliding_window": 32,
            "vocab_size": 1024,
        },
        1000,
    ),
    "moonlight-16b-a3b": (DEEPSEEK_BASE | MOONLIGHT, 4000),
    "qwen3-30b-a3b": (QWEN3_BASE, 4000),
    # Four of the 61 layers unless --layers says otherwise: three dense and one of experts.
    "deepseek-v3-layers": (DEEPSEEK_BASE | {"num_hidden_layers": 4}, 4000),
    "deepseek-v3.2-layers": (V32 | {"num_hidden_layers": 4}, 4000),
    "deepseek-v4-layers": (V4, 4000),
    "glm-5-layers": (GLM_5, 4000),
    "kimi-k2.5-layers": (_wrapped("kimi_k25", DEEPSEEK_BASE | KIMI_K2), 4000),
    "glm-4.5-air": (GLM_AIR, 4000),
    "glm-4.7-flash": (GLM_FLASH, 4000),
    "minimax-m2": (MINIMAX_M2, 4000),
    "minimax-m3-layers": (_wrapped("minimax_m3_vl", MINIMAX_M3), 4000),
    "hy3": (HY3, 4000),
    "gpt-oss-20b": (GPT_OSS, 4000),
    "gpt-oss-120b": (GPT_OSS | {"num_hidden_layers": 36, "num_local_experts": 128}, 4000),
    "qwen3-next-80b-a3b": (QWEN3_NEXT, 4000),
    "qwen3.5-35b-a3b": (_wrapped("qwen3_5_moe", QWEN35), 4000),
    "kimi-linear-48b-a3b": (KIMI_LINEAR, 4000),
    "glm-5.3-flash": (_wrapped("glm5_next", GLM_53), 4000),
    "mistral-small-4": (_wrapped("mistral3", MISTRAL_SMALL_4), 4000),
}


def config_of(shape, n_layers=None):
    config = copy.deepcopy(SHAPES[shape][0])
    if n_layers is not None:
        text = text_config(config)
        text["num_hidden_layers"] = n_layers
        for key in {"layer_types", "mlp_layer_types"} & text.keys():
            text[key] = text[key][:n_layers]
        for key, value in text.get("linear_attn_config", {}).items():
            if key.endswith("_layers"):
                text["linear_attn_config"][key] = [i for i in value if i <= n_layers]
    return config
