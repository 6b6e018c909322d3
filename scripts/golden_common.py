"""What configurations of golden models have in common."""

N_VOCAB = 64

COMMON = {
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
MLA = COMMON | {
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
YARN = {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "factor": 8.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 10000.0,
    "type": "yarn",
}


def wrapped(model_type, text):
    return {"model_type": model_type, "text_config": text, "vision_config": {"hidden_size": 8}}
