// src/model/families/qwen4_exp.c - Qwen3.8-Flash-Next (Qwen4-Exp): as Qwen3.5, with an indexer that
// selects groups of keys, streams of the residual that gates of low rank read, and embeddings of
// n-grams in some layers.
#include <string.h>

#include "model/families/delta_net.h"

static const td_config_key keys[] = {
    TD_BODY_KEYS(248320, 2048, 40, 16, 32768),
    TD_GQA_KEY(2),
    TD_KEY("moe_intermediate_size", NULL, expert_dim, 1, TD_MAX_DIM, 512),
    TD_KEY("shared_expert_intermediate_size", NULL, shared_dim, 1, TD_MAX_DIM, 512),
    TD_EXPERT_KEYS(512, 10),
    TD_DELTA_KEYS,
    TD_KEY("hc_count", NULL, n_streams, 2, 16, 4),
    TD_KEY("hc_lowrank", NULL, hyper_rank, 1, TD_MAX_DIM, 320),
    TD_KEY("ngram_size", NULL, ngram_size, 2, TD_MAX_NGRAM, 3),
    TD_KEY("heads_per_ngram", NULL, ngram_heads, 1, TD_MAX_NGRAM_HEADS, 8),
    TD_KEY("ngram_vocab_size_base", NULL, ngram_base, 2, 1u << 30, 20000000),
    TD_KEY("ple_conv_kernel_size", NULL, ngram_taps, 2, TD_MAX_TAPS, 4),
    TD_KEY("seed", NULL, ngram_seed, 0, INT32_MAX, 1234),
};

// The attention layers have all of these, of which no default is known.
static td_status read_selection(const td_config_reader *r) {
  td_model_config *c = r->out;
  uint32_t kv_heads = 0;
  const td_config_key need[] = {
      TD_KEY("indexer_n_heads", NULL, index_heads, 1, TD_MAX_HEADS, 0),
      TD_KEY("indexer_head_dim", NULL, index_dim, 2, TD_MAX_HEAD_DIM, 0),
      TD_KEY("indexer_budget", NULL, index_top_k, 1, 1u << 20, 0),
      TD_KEY("indexer_compress_ratio", NULL, index_group, 1, 1u << 16, 0),
  };
  td_status st = td_config_uint(r, r->root, "indexer_kv_heads", 1, 1, &kv_heads);
  for (size_t i = 0; i < TD_COUNT(need) && st == TD_OK; i++) {
    uint32_t *out = (uint32_t *)(void *)((char *)c + need[i].offset);
    if (!td_json_get(r->root, need[i].key)) {
      return td_config_fail(r, TD_EFORMAT, "has no %s, without which attention is not known",
                            need[i].key);
    }
    st = td_config_uint(r, r->root, need[i].key, need[i].min, need[i].max, out);
  }
  if (st != TD_OK) return st;
  if (c->index_group & (c->index_group - 1)) {
    return td_config_fail(
        r, TD_EUNSUPPORTED,
        "an indexer_compress_ratio of %u is not supported; supported are powers of "
        "two",
        c->index_group);
  }
  if (c->index_top_k % c->index_group)
    return td_config_bad(r, "indexer_compress_ratio must divide indexer_budget");
  c->index_top_k /= c->index_group;
  if (c->index_dim < (uint32_t)(c->head_dim * (c->partial_rotary > 0 ? c->partial_rotary : 1)))
    return td_config_bad(r, "indexer_head_dim must not be less than the rotary part of a head");
  return TD_OK;
}

// The token that parts texts: the first of eos_token_id.
static td_status read_end(const td_config_reader *r) {
  const cJSON *end = td_json_get(r->root, "eos_token_id");
  if (cJSON_IsArray(end)) end = end->child;
  int64_t id;
  if (!td_json_whole(end, 0, (int64_t)r->out->n_vocab - 1, &id)) {
    return td_config_bad(r,
                         "eos_token_id must be a token id, or begin with one: n-grams end there");
  }
  r->out->ngram_end = (int32_t)id;
  return TD_OK;
}

// ple_layer_ids counts layers from 1.
static td_status read_ngrams(const td_config_reader *r) {
  td_model_config *c = r->out;
  const cJSON *layers = td_json_get(r->root, "ple_layer_ids");
  c->ngram_dim = c->dim;
  td_status st = TD_OK;
  if (td_json_get(r->root, "ple_embed_dim"))
    st = td_config_uint(r, r->root, "ple_embed_dim", 1, TD_MAX_DIM, &c->ngram_dim);
  if (st != TD_OK) return st;
  if (layers && !cJSON_IsArray(layers)) return td_config_bad(r, "ple_layer_ids must be an array");
  bool has_any = false;
  for (const cJSON *item = layers ? layers->child : NULL; item; item = item->next) {
    int64_t id;
    if (!td_json_whole(item, 1, c->n_layers, &id))
      return td_config_bad(r, "ple_layer_ids must hold numbers of layers, from 1 on");
    if (c->kind[id - 1] != TD_ATTN_DELTA)
      return td_config_bad(r, "ple_layer_ids must hold layers of type \"linear_attention\"");
    td_layers_add(c->ngram_layers, (uint32_t)id - 1);
    has_any = true;
  }
  if (!has_any) {
    c->ngram_size = 0;
    return TD_OK;
  }
  const uint32_t n = (c->ngram_size - 1) * c->ngram_heads;
  if (n > TD_MAX_NGRAM_HEADS || c->ngram_dim % n) {
    return td_config_fail(
        r, TD_EUNSUPPORTED,
        "%u heads of n-grams; supported are up to %d that divide ple_embed_dim, %u", n,
        TD_MAX_NGRAM_HEADS, c->ngram_dim);
  }
  return read_end(r);
}

static td_status read_rest(const td_config_reader *r) {
  td_model_config *c = r->out;
  const char *gate = "silu";
  td_status st = read_selection(r);
  if (st == TD_OK) st = td_config_read_delta(r);
  if (st == TD_OK) st = read_ngrams(r);
  if (st == TD_OK && td_json_get(r->root, "output_gate_type"))
    st = td_config_str(r, r->root, "output_gate_type", &gate);
  if (st != TD_OK) return st;
  c->delta_sigmoid = strcmp(gate, "sigmoid") == 0;
  if (!c->delta_sigmoid && strcmp(gate, "silu") != 0) {
    return td_fail(
        r->err, TD_EUNSUPPORTED,
        "%s: output_gate_type \"%.40s\" is not supported; supported are silu and sigmoid", r->file,
        gate);
  }
  if ((uint64_t)c->n_streams * c->dim > TD_MAX_DIM)
    return td_config_bad(r, "hc_count times hidden_size is too wide");
  return TD_OK;
}

#define HYPER_PLACES(name, field)                                                                  \
  TD_NORM1(name ".hc_norm.weight", field.norm, STREAM_WIDTH, 0),                                   \
      TD_MATRIX(LATENT, name ".input_mix_weight_down.weight", field.down, HYPER_RANK,              \
                STREAM_WIDTH, 0),                                                                  \
      TD_MATRIX(LATENT, name ".input_mix_weight_up.weight", field.up, STREAM_WIDTH, HYPER_RANK,    \
                0),                                                                                \
      TD_MATRIX(ROUTER, name ".block_inject_weight.weight", field.inject, STREAMS, STREAM_WIDTH,   \
                0)

static const td_tensor_spec layer[] = {
    HYPER_PLACES("attn_hyper_connection", attn_hyper),
    HYPER_PLACES("mlp_hyper_connection", mlp_hyper),
    TD_GATED_ATTN_PLACES(TD_IF(GROUPS)),
    TD_MATRIX(LATENT, "self_attn.indexer.index_qk_proj.weight", index_q, INDEX_QK, MODEL,
              TD_IF(GROUPS)),
    TD_NORM1("self_attn.indexer.q_layernorm.weight", index_q_norm, INDEX_K, TD_IF(GROUPS)),
    TD_NORM1("self_attn.indexer.k_layernorm.weight", index_norm, INDEX_K, TD_IF(GROUPS)),
    TD_DELTA_PLACES,
    TD_DELTA_INPUT_PLACES,
    TD_MATRIX(NGRAMS, "ple.ple_embedding.ngram_embedding.", ngrams.table, ONE, ONE, TD_IF(NGRAMS)),
    TD_MATRIX(WEIGHT, "ple.key_proj.weight", ngrams.key, STREAM_WIDTH, NGRAM, TD_IF(NGRAMS)),
    TD_MATRIX(WEIGHT, "ple.value_proj.weight", ngrams.value, MODEL, NGRAM, TD_IF(NGRAMS)),
    TD_NORM1("ple.norm_key.weight", ngrams.key_norm, STREAM_WIDTH, TD_IF(NGRAMS)),
    TD_NORM1("ple.norm_query.weight", ngrams.query_norm, STREAM_WIDTH, TD_IF(NGRAMS)),
    TD_NORM1("ple.norm_conv.weight", ngrams.in_norm, STREAM_WIDTH, TD_IF(NGRAMS)),
    TD_MATRIX(CONV, "ple.conv1d.weight", ngrams.conv, STREAM_WIDTH, NGRAM_TAPS, TD_IF(NGRAMS)),
    TD_GATED_EXPERT_PLACES,
};

const td_family td_family_qwen4_exp = {
    .model_types = {"qwen4_exp_text"},
    .has_partial_rotary = true,
    .mtp = "mtp.",
    .expert_layers = TD_EXPERTS_ALL,
    .defaults = {.attn = TD_ATTN_GROUPS,
                 .head_dim = 256,
                 .has_attn_gate = true,
                 .qk_norm = TD_QK_NORM_HEAD,
                 .n_shared_experts = 1,
                 .norm_topk = true,
                 .bos_id = -1},
    .read = read_rest,
    TD_FAMILY_PARTS,
};
