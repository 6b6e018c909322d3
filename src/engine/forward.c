// src/engine/forward.c - one forward pass for every architecture: the order of layers and of their
// parts, as operators on a stream.
#include <math.h>

#include "engine/attn/ops.h"
#include "engine/attn/window.h"
#include "engine/engine_impl.h"
#include "engine/experts/ranks.h"
#include "engine/images.h"
#include "engine/rows.h"

void td_engine_copy_outputs(td_engine *e) {
  uint32_t n_vocab = e->config->n_vocab;
  if (e->dev_routing) {
    size_t n = td_engine_routing_at(e, e->config->n_layers);
    td_op_copy(e->stream, e->routing, e->dev_routing, n * sizeof *e->routing);
  }
  if (e->step.n_rows == 0) return;
  if (e->step.is_copied) {
    td_op_copy(e->stream, e->logits, e->dev_logits,
               (size_t)e->step.n_rows * n_vocab * sizeof(float));
  }
  if (!e->can_rank) return;
  td_op_top_logits(e->stream, &(td_top_logits_args){.logits = e->dev_logits,
                                                    .temperature = e->step.temperature,
                                                    .out = e->dev_top,
                                                    .n_rows = e->step.n_rows,
                                                    .n_vocab = n_vocab});
  td_op_copy_direct(e->stream, e->top, e->dev_top, e->step.n_rows * sizeof *e->top);
}

// Whether logits are wanted, of any rank's tokens.
static bool has_rows(const td_engine *e) {
  return td_rank_is_active(e) ? e->rank->n_all_rows > 0 : e->step.n_rows > 0;
}

// Final norm and lm_head for the rows whose logits are wanted.
static void head(td_engine *e) {
  const td_model_config *c = e->config;
  const td_microbatch *p = &e->step.whole;
  const td_weight *lm_head = td_model_lm_head(e->model);
  if (!c->has_out_norms) td_rows_leave(e, p);
  if (!has_rows(e)) return;
  const td_vec norm = td_model_final_norm(e->model);
  void *rows = c->n_streams ? e->delta : e->h;
  if (c->n_streams) td_rows_read_streams(e, p, norm, td_model_head_hyper(e->model), true);
  td_op_gather_rows(e->stream, rows, c->n_streams ? e->h : p->x, e->step.rows, e->step.n_rows,
                    c->dim);
  if (td_rank_is_active(e)) td_rank_gather_rows(e);
  if (!c->n_streams) td_rows_norm(e, rows, norm, c->dim, e->step.n_rows, c->rms_eps);
  td_op_linear(e->stream, &(td_linear_op_args){.w = lm_head,
                                               .x = rows,
                                               .y = e->dev_logits,
                                               .x_stride = c->dim,
                                               .y_stride = c->n_vocab,
                                               .n_tokens = e->step.n_rows,
                                               .cap = c->logit_cap,
                                               .out_f32 = true});
}

// h, and from it queries, keys and values. more: what the layer before left out of delta.
static void begin_attention(td_engine *e, const td_microbatch *p, uint32_t layer_idx,
                            const void *more) {
  const td_layer *layer = td_engine_layer(e, layer_idx);
  td_rows_left left = {.pending = layer_idx > 0 && !e->config->has_out_norms, .more = more};
  if (td_layers_have(e->config->ngram_layers, layer_idx)) {
    td_rows_complete(e, p, left.more);
    if (left.pending) td_rows_leave(e, p);
    td_engine_ngrams(e, p, layer, layer_idx);
    left = (td_rows_left){.pending = false};
  }
  td_rows_enter(e, p, layer->attn_norm, &layer->attn_hyper, left);
  if (e->drive) td_engine_moe_guess(e, p, layer_idx);
  td_attn_ops_of(e->config, layer_idx)->project(e, p, layer);
}

// After the KV entries of these tokens and all before them are stored: h for what follows
// attention.
static void end_attention(td_engine *e, const td_microbatch *p, uint32_t layer_idx) {
  const td_layer *layer = td_engine_layer(e, layer_idx);
  td_attn_ops_of(e->config, layer_idx)->attend(e, p, layer, layer_idx);
  td_rows_linear(e, p, &layer->o, layer->o_bias,
                 td_rows_at(e, p, e->act[TD_ACT_OUT], layer->o.cols), layer->o.cols, p->delta);
  if (e->config->has_out_norms) {
    td_rows_norm(e, p->delta, layer->attn_out_norm, e->config->dim, p->n_tokens,
                 e->config->rms_eps);
  }
  td_rows_enter(e, p, layer->mlp_norm, &layer->mlp_hyper, (td_rows_left){.pending = true});
}

// One layer, except that offloaded experts' sums may still be missing from delta.
static void begin_layer(td_engine *e, const td_microbatch *p, uint32_t layer_idx,
                        const void *more) {
  const td_layer *layer = td_engine_layer(e, layer_idx);
  td_dense_stream_use(e, layer_idx, TD_DENSE_ATTN);
  begin_attention(e, p, layer_idx, more);
  td_window_enter(e, layer_idx);
  td_attn_store_rows(e, p, layer_idx);
  end_attention(e, p, layer_idx);
  td_window_leave(e, layer_idx);
  td_dense_stream_leave(e, TD_DENSE_ATTN);
  td_dense_stream_use(e, layer_idx, TD_DENSE_MLP);
  if (layer->is_moe)
    td_engine_moe_begin(e, p, layer_idx);
  else
    td_engine_mlp(e, p, layer, false);
  if (e->config->has_out_norms) td_rows_leave_normed(e, p, layer->mlp_out_norm, *layer->factor);
  td_dense_stream_leave(e, TD_DENSE_MLP);
  if (e->step.plan.way[layer_idx] != TD_LAYER_STREAMED) td_dense_stream_fetch_ahead(e, layer_idx);
}

// The end of the layer before and one layer, of a step of several ranks, half by half: what one is
// exchanged for continues while the other is computed.
static void begin_ranks_layer(td_engine *e, uint32_t layer_idx) {
  td_rank *r = e->rank;
  const uint32_t n_layers = e->config->n_layers;
  for (uint32_t h = 0; h < r->n_halves; h++) {
    if (layer_idx > 0 && td_model_layer(e->model, layer_idx - 1)->is_moe)
      td_engine_moe_ranks_end(e, h, layer_idx - 1);
    if (layer_idx == n_layers) continue;
    begin_attention(e, &r->halves[h].own, layer_idx, NULL);
    td_rank_gather_entries(e, &r->halves[h], layer_idx);
  }
  if (layer_idx == n_layers) return;
  const td_layer *layer = td_model_layer(e->model, layer_idx);
  td_window_enter(e, layer_idx);
  for (uint32_t h = 0; h < r->n_halves; h++) {
    td_rank_store(e, &r->halves[h], layer_idx);
    end_attention(e, &r->halves[h].own, layer_idx);
    if (layer->is_moe)
      td_rank_gather_hidden(e, &r->halves[h]);
    else
      td_engine_mlp(e, &r->halves[h].own, layer, false);
  }
  td_window_leave(e, layer_idx);
  if (layer->is_moe) td_engine_moe_ranks_begin(e, layer_idx);
}

static void embed(td_engine *e) {
  const td_model_config *c = e->config;
  if (!e->step.n_tokens) return;
  void *out = c->n_streams ? e->h : e->step.whole.x;
  td_op_embed(e->stream,
              &(td_embed_args){.table = *td_model_embed(e->model),
                               .ids = e->step.tokens,
                               .out = out,
                               .n_tokens = e->step.n_tokens,
                               .factor = c->scales_embeddings ? sqrtf((float)c->dim) : 0});
  td_images_embed(e, out);
  if (!c->n_streams) return;
  td_op_hyper_write(e->stream, &(td_hyper_write_args){.x = e->step.whole.x,
                                                      .y = out,
                                                      .n_tokens = e->step.n_tokens,
                                                      .n_streams = c->n_streams,
                                                      .dim = c->dim});
}

void td_engine_run_layer(td_engine *e, uint32_t layer_idx) {
  const td_microbatch *p = &e->step.whole;
  const td_layer *layer = td_model_layer(e->model, layer_idx);
  const td_attn_ops *attn = td_attn_ops_of(e->config, layer_idx);
  const bool is_offloaded = layer->is_moe && e->offload.dev;
  e->step.plan.way[layer_idx] = !layer->is_moe ? TD_LAYER_DENSE
                                : is_offloaded ? TD_LAYER_OFFLOADED
                                : e->drive     ? TD_LAYER_READ
                                               : TD_LAYER_RESIDENT;
  e->step.plan.handover = is_offloaded ? TD_HANDOVER_HOST : TD_HANDOVER_NONE;
  td_rows_enter(e, p, layer->attn_norm, &layer->attn_hyper, (td_rows_left){.pending = false});
  attn->project(e, p, layer);
  td_attn_store_rows(e, p, layer_idx);
  end_attention(e, p, layer_idx);
  if (layer->is_moe) {
    td_engine_moe_begin(e, p, layer_idx);
    td_rows_complete(e, p, td_engine_moe_end(e, p, layer_idx));
  } else {
    td_engine_mlp(e, p, layer, false);
  }
  if (e->config->has_out_norms)
    td_rows_leave_normed(e, p, layer->mlp_out_norm, *layer->factor);
  else
    td_rows_leave(e, p);
}

// Alternates between microbatches: while one waits for its experts, the other is computed.
bool td_engine_forward_piece(td_engine *e) {
  td_engine_cursor *at = &e->step.cursor;
  const uint32_t n_layers = e->config->n_layers, layer_idx = at->layer_idx;
  if (at->group < at->n_groups) {
    td_engine_moe_group(e, &e->step.microbatches[0], layer_idx - 1, at->group++);
    if (at->group == at->n_groups) td_dense_stream_fetch_ahead(e, layer_idx - 1);
    return true;
  }
  if (layer_idx > n_layers) return false;
  if (layer_idx == 0)
    embed(e);
  else
    td_images_add_deep(e, layer_idx - 1);
  if (td_rank_is_active(e)) begin_ranks_layer(e, layer_idx);
  for (uint32_t k = 0; !td_rank_is_active(e) && k < e->step.plan.n_microbatches; k++) {
    const td_microbatch *p = &e->step.microbatches[k];
    const void *more = layer_idx > 0 ? td_engine_moe_end(e, p, layer_idx - 1) : NULL;
    if (layer_idx < n_layers)
      begin_layer(e, p, layer_idx, more);
    else
      td_rows_complete(e, p, more);
  }
  const bool is_streamed = layer_idx < n_layers && e->step.plan.way[layer_idx] == TD_LAYER_STREAMED;
  *at = (td_engine_cursor){.layer_idx = layer_idx + 1};
  if (is_streamed) td_engine_stream_range(e, &at->group, &at->n_groups);
  if (layer_idx == n_layers && (has_rows(e) || e->draft_in)) head(e);
  return true;
}

void td_engine_forward(td_engine *e) {
  e->step.cursor = (td_engine_cursor){.layer_idx = 0}; // a device may ask for the operators twice
  while (!e->step.is_abandoned && td_engine_forward_piece(e)) {
  }
}
