// src/engine/ngrams.c - embeddings of n-grams as an addition to the streams of the residual
// (Qwen4-Exp): a value from them, gated for each stream by their key and the stream, and a
// convolution of it over time. What tokens leave for later ones is a part of the layer's recurrent
// state.
#include "engine/attn/kind.h"
#include "engine/rows.h"

// TD_ACT_MIXED = the rows of the table.
static void find_rows(td_engine *e, const td_microbatch *p, const td_layer *layer,
                      uint32_t layer_idx) {
  const td_model_config *c = e->config;
  for (int g = 0; g < N_GROUPS; g++) {
    const step_group *group = &p->groups[g];
    const size_t t = group->token_begin;
    if (!group->view.n_tokens) continue;
    td_op_ngram_rows(e->stream, &(td_ngram_rows_args){.batch = group->view,
                                                      .state = td_engine_kv_view(e, layer_idx),
                                                      .trail = td_engine_trail(e, layer_idx, g),
                                                      .ids_at = td_attn_ngram_places(c).ids,
                                                      .tokens = e->step.tokens + p->begin + t,
                                                      .table = &layer->ngrams.table,
                                                      .out = td_rows_offset(e, e->act[TD_ACT_MIXED],
                                                                            t * c->ngram_dim)});
  }
}

// x += y + its convolution; in: y after its norm.
static void convolve(td_engine *e, const td_microbatch *p, const td_layer *layer,
                     uint32_t layer_idx, void *in, void *y) {
  const td_model_config *c = e->config;
  const size_t row = td_engine_row(c);
  for (int g = 0; g < N_GROUPS; g++) {
    const step_group *group = &p->groups[g];
    const size_t at = group->token_begin * row;
    if (!group->view.n_tokens) continue;
    td_op_ngram_conv(e->stream, &(td_ngram_conv_args){.batch = group->view,
                                                      .state = td_engine_kv_view(e, layer_idx),
                                                      .trail = td_engine_trail(e, layer_idx, g),
                                                      .rows_at = td_attn_ngram_places(c).rows,
                                                      .conv = layer->ngrams.conv,
                                                      .in = td_rows_offset(e, in, at),
                                                      .y = td_rows_offset(e, y, at),
                                                      .x = td_rows_offset(e, p->x, at),
                                                      .channels = (uint32_t)row,
                                                      .n_taps = c->ngram_taps,
                                                      .step = c->ngram_size});
  }
}

void td_engine_ngrams(td_engine *e, const td_microbatch *p, const td_layer *layer,
                      uint32_t layer_idx) {
  const td_model_config *c = e->config;
  const td_ngrams *n = &layer->ngrams;
  const void *rows = e->act[TD_ACT_MIXED];
  void *keys = e->streams, *queries = e->gates;
  if (!p->n_tokens) return;
  find_rows(e, p, layer, layer_idx);
  td_rows_linear(e, p, &n->key, (td_vec){0}, rows, c->ngram_dim, keys);
  td_rows_linear(e, p, &n->value, (td_vec){0}, rows, c->ngram_dim, p->delta);
  td_rows_norm_streams(e, p, n->key_norm, keys, keys);
  td_rows_norm_streams(e, p, n->query_norm, p->x, queries);
  td_op_ngram_gate(e->stream, &(td_ngram_gate_args){.x = keys,
                                                    .query = queries,
                                                    .value = p->delta,
                                                    .n_tokens = p->n_tokens,
                                                    .n_streams = c->n_streams,
                                                    .dim = c->dim});
  td_rows_norm_streams(e, p, n->in_norm, keys, queries);
  convolve(e, p, layer, layer_idx, queries, keys);
}
