// src/model/families/mistral4.c - Mistral Small 4: MLA whose queries grow with their position, and
// a softmax router. Published inside a multimodal checkpoint of model_type mistral3.
#include "model/families/family.h"

static const td_config_key keys[] = {
    {"vocab_size", NULL, TD_CONFIG_FIELD(n_vocab), 1, 1u << 24, 131072},
    {"hidden_size", NULL, TD_CONFIG_FIELD(dim), 1, TD_MAX_DIM, 4096},
    {"num_hidden_layers", NULL, TD_CONFIG_FIELD(n_layers), 1, TD_MAX_LAYERS, 36},
    {"num_attention_heads", NULL, TD_CONFIG_FIELD(n_heads), 1, TD_MAX_HEADS, 32},
    {"max_position_embeddings", NULL, TD_CONFIG_FIELD(max_position), 1, 1u << 30, 1048576},
    {"intermediate_size", NULL, TD_CONFIG_FIELD(dense_dim), 1, TD_MAX_DIM, 12288},
    {"moe_intermediate_size", NULL, TD_CONFIG_FIELD(expert_dim), 1, TD_MAX_DIM, 2048},
    {"n_routed_experts", "num_local_experts", TD_CONFIG_FIELD(n_experts), 1, TD_MAX_EXPERTS, 128},
    {"num_experts_per_tok", NULL, TD_CONFIG_FIELD(top_k), 1, TD_MAX_EXPERTS, 4},
    {"n_shared_experts", NULL, TD_CONFIG_FIELD(n_shared_experts), 0, 256, 1},
    {"n_group", NULL, TD_CONFIG_FIELD(n_groups), 1, TD_MAX_EXPERTS, 1},
    {"topk_group", NULL, TD_CONFIG_FIELD(topk_groups), 1, TD_MAX_EXPERTS, 1},
    {"kv_lora_rank", NULL, TD_CONFIG_FIELD(kv_lora_rank), 1, TD_MAX_DIM, 256},
    {"qk_nope_head_dim", NULL, TD_CONFIG_FIELD(nope_dim), 1, TD_MAX_HEAD_DIM, 64},
    {"qk_rope_head_dim", NULL, TD_CONFIG_FIELD(rope_dim), 2, TD_MAX_HEAD_DIM, 64},
    {"v_head_dim", NULL, TD_CONFIG_FIELD(v_dim), 1, TD_MAX_HEAD_DIM, 128},
};

static td_status read_rest(const td_config_reader *r) {
  td_status st = td_config_read_mla(r, 1024);
  if (st == TD_OK) st = td_config_read_moe_layers(r, 0);
  if (st == TD_OK) st = td_config_read_scaling(r, "routed_scaling_factor", 1);
  return st == TD_OK ? td_config_check_groups(r) : st;
}

static const td_tensor_spec layer[] = {
    TD_NORM_PLACES, TD_MLA_PLACES, TD_DENSE_PLACES, TD_EXPERT_PLACES, TD_SHARED_PLACES,
};

const td_family td_family_mistral4 = {
    .model_types = {"mistral4"},
    .has_partial_rotary = true, // states the part that qk_rope_head_dim is
    .defaults = {.attn = TD_ATTN_MLA,
                 .yarn = {.factor = 128,
                          .beta_fast = 32,
                          .beta_slow = 1,
                          .mscale = 1,
                          .mscale_all_dim = 1,
                          .original_max_position = 8192},
                 .query_beta = 0.1,
                 .query_span = 8192,
                 .norm_topk = true,
                 .rope_interleaved = true,
                 .bos_id = 1,
                 .eos_ids = {2},
                 .n_eos = 1},
    .keys = keys,
    .n_keys = TD_COUNT(keys),
    .read = read_rest,
    .layer = layer,
    .n_layer = TD_COUNT(layer),
};
