// src/model/families/qwen3_moe.c - Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder; the language model
// of Qwen3-VL; the thinker of Qwen3-Omni.
#include "model/families/family.h"

// Their published defaults: the vocabulary, layers, heads, positions, heads of keys, widths of a
// dense layer and of an expert, experts and how many a token has.
#define QWEN3_KEYS(vocab, layers, heads, positions, kv_heads, dense, expert, n, k)                 \
  {                                                                                                \
    TD_BODY_KEYS(vocab, 2048, layers, heads, positions), TD_GQA_KEY(kv_heads),                     \
        TD_DENSE_KEY(dense),                                                                       \
        TD_KEY("moe_intermediate_size", NULL, expert_dim, 1, TD_MAX_DIM, expert),                  \
        TD_EXPERT_KEYS(n, k),                                                                      \
  }

static const td_config_key keys[] = QWEN3_KEYS(151936, 24, 32, 32768, 4, 6144, 768, 128, 8);
static const td_config_key vl_keys[] = QWEN3_KEYS(151936, 24, 16, 128000, 16, 5632, 1408, 60, 4);
static const td_config_key omni_keys[] = QWEN3_KEYS(3584, 28, 28, 32768, 4, 18944, 768, 128, 8);

static td_status read_rest(const td_config_reader *r) {
  bool use = false;
  td_status st = td_config_bool(r, r->root, "use_sliding_window", &use);
  bool off = cJSON_IsNull(cJSON_GetObjectItemCaseSensitive(r->root, "sliding_window"));
  if (st == TD_OK && use && !off)
    st = td_config_fail(r, TD_EUNSUPPORTED, "use_sliding_window is not supported");
  return st;
}

static const td_tensor_spec layer[] = {
    TD_NORM_PLACES,    TD_GQA_PLACES,   TD_OUT_BIAS_PLACE,
    TD_QK_NORM_PLACES, TD_DENSE_PLACES, TD_EXPERT_PLACES,
};

const td_family td_family_qwen3_moe = {
    .model_types = {"qwen3_moe"},
    .expert_layers = TD_EXPERTS_STEP,
    .defaults = {.attn = TD_ATTN_GQA, .qk_norm = TD_QK_NORM_HEAD, .bos_id = -1},
    .read = read_rest,
    TD_FAMILY_PARTS,
};

const td_family td_family_qwen3_vl_moe = {
    .model_types = {"qwen3_vl_moe_text"},
    .ignores = {"norm_topk_prob"},
    .expert_layers = TD_EXPERTS_STEP,
    .defaults = {.attn = TD_ATTN_GQA,
                 .qk_norm = TD_QK_NORM_HEAD,
                 .tie_embeddings = true,
                 .rope_theta = 5e5,
                 .axes = {24, 20, 20},
                 .axes_interleaved = true,
                 .norm_topk = true,
                 .bos_id = -1},
    TD_FAMILY_PARTS_OF(vl_keys),
};

const td_family td_family_qwen3_omni_moe = {
    .model_types = {"qwen3_omni_moe_text"},
    .expert_layers = TD_EXPERTS_STEP,
    .defaults = {.attn = TD_ATTN_GQA,
                 .qk_norm = TD_QK_NORM_HEAD,
                 .rope_theta = 1e6,
                 .axes = {24, 20, 20},
                 .axes_interleaved = true,
                 .norm_topk = true,
                 .bos_id = -1},
    TD_FAMILY_PARTS_OF(omni_keys),
};
