// src/model/families/glm5_next.c - GLM-5.3-Flash: most layers are Kimi delta attention, the others
// MLA without positions over groups of keys that an indexer selects; hyper-connections.
#include <string.h>

#include "model/families/delta_net.h"

static const td_config_key keys[] = {
    TD_BODY_KEYS(154880, 4096, 45, 64, 1048576),
    TD_KEY("kv_lora_rank", NULL, kv_lora_rank, 1, TD_MAX_DIM, 512),
    TD_KEY("qk_nope_head_dim", NULL, nope_dim, 1, TD_MAX_HEAD_DIM, 256),
    TD_KEY("qk_rope_head_dim", NULL, rope_dim, 0, TD_MAX_HEAD_DIM, 0),
    TD_KEY("v_head_dim", NULL, v_dim, 1, TD_MAX_HEAD_DIM, 256),
    TD_INDEX_KEYS(32, 128, 2048),
    TD_KEY("index_kpool", NULL, index_group, 1, 1u << 16, 16),
    TD_KEY("hc_mult", NULL, n_streams, 1, 16, 4),
    TD_KEY("hc_sinkhorn_iters", NULL, hyper_rounds, 1, 1000, 20),
    TD_KDA_KEYS(64),
    TD_DENSE_KEY(12288),
    TD_ROUTED_KEYS(288, 8, 2048, 1, 1),
    TD_MTP_KEY,
};

// A number below 0, or null: none. Absent: as it was.
static td_status read_bound(const td_config_reader *r, const cJSON *object, const char *key,
                            double *bound) {
  if (!cJSON_IsNull(cJSON_GetObjectItemCaseSensitive(object, key)))
    return td_config_double(r, object, key, -1e6, -1e-6, bound);
  *bound = 0;
  return TD_OK;
}

static td_status read_decays(const td_config_reader *r) {
  const cJSON *part = td_json_get(r->root, "linear_attn_config");
  double bound = -5;
  bool is_safe = true;
  td_status st = td_config_read_kda_heads(r);
  if (st == TD_OK) st = read_bound(r, r->root, "linear_lower_bound", &bound);
  if (st == TD_OK && part) st = read_bound(r, part, "gate_lower_bound", &bound);
  if (st == TD_OK && part) st = td_config_bool(r, part, "safe_gate", &is_safe);
  if (part && is_safe && bound == 0) bound = -5;
  r->out->delta_bound = (float)bound;
  if (st == TD_OK) st = td_config_read_delta(r);
  if (st != TD_OK || td_model_n_attn(r->out, TD_ATTN_KDA)) return st;
  return td_config_fail(r, TD_EUNSUPPORTED,
                        "layer_types without \"linear_attention\" is not supported");
}

// index_topk counts positions.
static td_status read_selection(const td_config_reader *r) {
  td_model_config *c = r->out;
  bool has_tail = true;
  td_status st = td_config_bool(r, r->root, "index_kpool_always_select_tail", &has_tail);
  if (st == TD_OK && !has_tail) {
    return td_config_fail(r, TD_EUNSUPPORTED,
                          "index_kpool_always_select_tail false is not supported");
  }
  if (st == TD_OK && c->index_group & (c->index_group - 1)) {
    return td_config_fail(r, TD_EUNSUPPORTED,
                          "an index_kpool of %u is not supported; supported are powers of two",
                          c->index_group);
  }
  if (st == TD_OK && c->index_top_k % c->index_group)
    st = td_config_bad(r, "index_kpool must divide index_topk");
  c->index_top_k /= c->index_group;
  if (st == TD_OK) st = td_config_read_index_layers(r);
  for (uint32_t i = 0; i < c->n_layers && st == TD_OK; i++)
    if (c->kind[i] == TD_ATTN_DSA_SHARED && (i == 0 || c->kind[i - 1] == TD_ATTN_KDA))
      st = td_config_bad(r, "a layer without an indexer must follow one that attends to keys");
  return st;
}

static td_status read_rest(const td_config_reader *r) {
  td_model_config *c = r->out;
  double limit = 10, eps = 1e-6;
  uint32_t n_kv_heads = c->n_heads;
  if (c->rope_dim) {
    return td_config_fail(r, TD_EUNSUPPORTED,
                          "a qk_rope_head_dim of %u is not supported; "
                          "supported is 0",
                          c->rope_dim);
  }
  td_status st = td_config_uint(r, r->root, "num_key_value_heads", 1, TD_MAX_HEADS, &n_kv_heads);
  if (st == TD_OK && n_kv_heads != c->n_heads)
    st = td_config_bad(r, "num_key_value_heads must be num_attention_heads");
  if (st == TD_OK) st = read_decays(r);
  if (st == TD_OK) st = read_selection(r);
  if (st == TD_OK) st = td_config_double(r, r->root, "swiglu_limit", 1e-6, 1e6, &limit);
  if (st == TD_OK) st = td_config_double(r, r->root, "hc_eps", 0, 1, &eps);
  c->swiglu_limit = (float)limit;
  c->hyper_eps = (float)eps;
  return st;
}

static const td_tensor_spec layer[] = {
    TD_NORM_PLACES,
    TD_MLA_PLACES,
    TD_INDEX_PLACES,
    TD_MATRIX(SCORES, "self_attn.indexer.index_kpool_compress_gate", index_pool.gate, INDEX_K,
              MODEL, TD_IF(DSA_POOL)),
    TD_MATRIX(F32, "self_attn.indexer.index_kpool_compress_ape", index_pool.bias, INDEX_GROUP,
              INDEX_K, TD_IF(DSA_POOL)),
    TD_KDA_PLACES,
    TD_HYPER_PLACES("hc_attn", attn_hyper, "attn_hc"),
    TD_HYPER_PLACES("hc_ffn", mlp_hyper, "ffn_hc"),
    TD_ROUTED_PLACES,
};

const td_family td_family_glm5_next = {
    .model_types = {"glm5_next_text"},
    .ignores = {"first_k_dense_replace"},
    .n_dense = 3,
    .scaling = "routed_scaling_factor",
    .defaults = {.attn = TD_ATTN_DSA_POOL,
                 .q_lora_rank = 1536,
                 .has_no_rope = true,
                 .routed_scaling = 2.5f,
                 .latents_eps = true,
                 .delta_by_channel = true,
                 .streams_mean = true,
                 .rms_eps = 1e-5f,
                 .router_sigmoid = true,
                 .norm_topk = true,
                 .swiglu_plain = true,
                 .swiglu_alpha = 1,
                 .bos_id = -1},
    .read = read_rest,
    TD_FAMILY_PARTS,
};
