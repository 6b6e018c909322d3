// src/engine/attn/gqa_wide.c - grouped-query attention with heads of another width and number than
// in the model's other layers.
#include "engine/attn/gqa.h"

static void attend(td_engine *e, const td_microbatch *p, const td_layer *layer,
                   uint32_t layer_idx) {
  td_gqa_attend(e, p, layer, layer_idx, NULL);
}

static void store(td_engine *e, const td_attn_store *s) {
  td_gqa_store_heads(e, s, td_gqa_heads_of(e->config, TD_ATTN_GQA_WIDE));
}

// ---- what follows from the configuration --------------------------------------------------------

static td_attn_cache cache(const td_model_config *c) {
  return td_gqa_cache_of(td_gqa_heads_of(c, TD_ATTN_GQA_WIDE));
}

static td_attn_rows act(const td_model_config *c) {
  const size_t heads = (size_t)c->n_heads * c->wide_head_dim;
  return (td_attn_rows){.act = {[TD_ACT_Q] = heads, [TD_ACT_OUT] = heads}};
}

static double flops(const td_model_config *c, double n, double n_past) {
  return td_attn_pair_flops(c->n_heads, 2.0 * c->wide_head_dim, n, n_past);
}

static void describe(const td_model_config *c, td_buf *out) {
  td_buf_printf(out, "              in %u of the %u layers %u of keys and values, %u wide%s\n",
                td_model_n_attn(c, TD_ATTN_GQA_WIDE), c->n_layers, c->wide_kv_heads,
                c->wide_head_dim, c->wide_shares ? ", which are the values, too" : "");
}

const td_attn_ops td_attn_gqa_wide = {
    {cache, act, flops, describe, 512, false, NULL}, td_gqa_project, store, attend};
