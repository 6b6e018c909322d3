// src/model/families/mistral4.c - Mistral Small 4: MLA whose queries grow with their position, and
// a softmax router. Published inside a multimodal checkpoint of model_type mistral3.
#include "model/families/family.h"

static const td_config_key keys[] = {
    TD_BODY_KEYS(131072, 4096, 36, 32, 1048576),
    TD_MLA_KEYS(256, 64, 64, 128),
    TD_DENSE_KEY(12288),
    TD_ROUTED_KEYS(128, 4, 2048, 1, 1),
};

static const td_tensor_spec layer[] = {
    TD_NORM_PLACES, TD_MLA_PLACES, TD_DENSE_PLACES, TD_EXPERT_PLACES, TD_SHARED_PLACES,
};

const td_family td_family_mistral4 = {
    .model_types = {"mistral4"},
    .ignores = {"mlp_layer_types"},
    .has_partial_rotary = true, // states the part that qk_rope_head_dim is
    .scaling = "routed_scaling_factor",
    .defaults = {.attn = TD_ATTN_MLA,
                 .q_lora_rank = 1024,
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
                 TD_TOKEN_IDS(1, 2)},
    TD_FAMILY_PARTS,
};
