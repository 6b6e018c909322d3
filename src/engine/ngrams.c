// src/engine/ngrams.c - embeddings of n-grams as an addition to the streams of the residual
// (Qwen4-Exp): a value from them, gated for each stream by their key and the stream, and a
// convolution of it over time. What tokens leave for later ones is a part of the layer's recurrent
// state.
// A GPU does not read the tables, of which tens of GB stay in their files. Before a step the
// calling thread gathers the rows of its tokens for all layers, by ids that the caller gives. Those
// in front of a step that are not given (td_step_seq.past) it copies from the state of a layer.
#include "base/bf16.h"
#include "engine/attn/kind.h"
#include "engine/rows.h"
#include "tandem/kernels.h"

// ---- rows of a GPU's steps ----------------------------------------------------------------------

enum { MAX_DIM = 16 << 10 }; // elements of a token's rows

// The number of layers below layer_idx that have n-grams.
static uint32_t n_before(const td_model_config *c, uint32_t layer_idx) {
  uint32_t n = 0;
  for (uint32_t i = 0; i < layer_idx; i++)
    n += td_layers_have(c->ngram_layers, i);
  return n;
}

// Of a layer with n-grams, from token t of the step on.
static uint16_t *rows_at(const td_engine *e, uint32_t layer_idx, size_t t) {
  const size_t first = (size_t)n_before(e->config, layer_idx) * e->opts.max_step_tokens;
  return e->ngram_rows + (first + t) * e->config->ngram_dim;
}

size_t td_engine_ngram_bytes_per_token(const td_model_config *c) {
  return c->ngram_size ? (size_t)n_before(c, c->n_layers) * c->ngram_dim * sizeof(uint16_t) : 0;
}

td_status td_ngrams_open(td_engine *e, td_err *err) {
  const td_model_config *c = e->config;
  if (!c->ngram_size || td_dev_gpu_index(e->dev) < 0) return TD_OK;
  if (c->ngram_dim > MAX_DIM) {
    return td_fail(err, TD_EUNSUPPORTED,
                   "n-grams of %u elements a token; on a GPU at most %d: give --device cpu",
                   c->ngram_dim, MAX_DIM);
  }
  td_kernels_init_any();
  const size_t n_bytes = e->opts.max_step_tokens * td_engine_ngram_bytes_per_token(c);
  const size_t n_ids = (size_t)e->opts.max_step_seqs * (c->ngram_size - 1);
  void *rows, *ids;
  td_status st = td_dev_alloc_host(e->dev, &rows, n_bytes, err);
  if (st != TD_OK) return st;
  e->ngram_rows = rows;
  st = td_dev_alloc_host(e->dev, &ids, n_ids * sizeof *e->ngram_ids, err);
  if (st == TD_OK) e->ngram_ids = ids;
  return st;
}

// The ids in front of sequences whose callers do not give them, from the states of a layer.
static td_status fetch_ids(td_engine *e, const td_step_seq *seqs, uint32_t n_seqs,
                           uint32_t layer_idx, td_err *err) {
  const uint32_t n = e->config->ngram_size - 1;
  const td_kv_view state = td_engine_kv_view(e, layer_idx);
  const size_t ids_at = td_attn_ngram_places(e->config).ids * sizeof(float);
  bool is_queued = false;
  for (uint32_t s = 0; s < n_seqs; s++) {
    if (!seqs[s].n_past || seqs[s].past) continue;
    const int32_t page = seqs[s].pages[(seqs[s].n_past - 1) / e->opts.page_tokens];
    const char *from = state.pages + (size_t)page * state.page_bytes + ids_at;
    td_op_copy(e->stream, e->ngram_ids + (size_t)s * n, from, n * sizeof *e->ngram_ids);
    is_queued = true;
  }
  return is_queued ? td_stream_sync(e->stream, err) : TD_OK;
}

// ids: of a table's `size` tokens, the last one token t of the sequence, the latest first. fetched:
// unless the sequence's past is known or empty.
static void ids_of(const td_step_seq *seq, const int32_t *fetched, uint32_t t,
                   const td_ngram_hash *h, int32_t *ids) {
  for (uint32_t i = 0; i < h->size; i++)
    if (i <= t)
      ids[i] = seq->tokens[t - i];
    else if (i - t > seq->n_past)
      ids[i] = h->end;
    else
      ids[i] = seq->past ? seq->past[seq->n_past - (i - t)] : fetched[h->size - 1 - (i - t)];
}

void td_ngrams_gather(td_dev *dev, const td_ngram_table *table, const td_step_seq *seq,
                      const int32_t *fetched, uint16_t *out) {
  enum { MANY = 64 }; // tokens whose rows several threads wait for, which may be on disk
  const int n = (int)seq->n_tokens;
  const size_t dim = (size_t)td_ngram_rows(&table->hash) * table->shards[0].cols;
#pragma omp parallel for schedule(dynamic, 8) if (n >= MANY)
  for (int t = 0; t < n; t++) {
    int32_t ids[TD_MAX_NGRAM];
    float row[MAX_DIM];
    ids_of(seq, fetched, (uint32_t)t, &table->hash, ids);
    td_ngram_row(table, ids, row);
    td_bf16_of_n(out + (size_t)t * dim, row, dim);
    td_dev_show_progress(dev);
  }
}

td_status td_ngrams_begin(td_engine *e, const td_step_seq *seqs, uint32_t n_seqs, td_err *err) {
  const td_model_config *c = e->config;
  bool has_ids = false;
  for (uint32_t i = 0; e->ngram_rows && i < c->n_layers; i++) {
    if (!td_layers_have(c->ngram_layers, i)) continue;
    td_status st = has_ids ? TD_OK : fetch_ids(e, seqs, n_seqs, i, err);
    if (st != TD_OK) return st;
    has_ids = true;
    for (uint32_t s = 0; s < n_seqs; s++)
      td_ngrams_gather(e->dev, &td_model_layer(e->model, i)->ngrams.table, &seqs[s],
                       e->ngram_ids + (size_t)s * (c->ngram_size - 1),
                       rows_at(e, i, e->first_token[s]));
  }
  return TD_OK;
}

// ---- in a layer ---------------------------------------------------------------------------------

// TD_ACT_MIXED = the rows of the table.
static void find_rows(td_engine *e, const td_microbatch *p, const td_layer *layer,
                      uint32_t layer_idx) {
  const td_model_config *c = e->config;
  for (int g = 0; g < N_GROUPS; g++) {
    const step_group *group = &p->groups[g];
    const size_t t = group->token_begin;
    if (!group->view.n_tokens) continue;
    const void *gathered = e->ngram_rows ? rows_at(e, layer_idx, p->begin + t) : NULL;
    td_op_ngram_rows(e->stream, &(td_ngram_rows_args){.batch = group->view,
                                                      .state = td_engine_kv_view(e, layer_idx),
                                                      .trail = td_engine_trail(e, layer_idx, g),
                                                      .ids_at = td_attn_ngram_places(c).ids,
                                                      .tokens = e->step.tokens + p->begin + t,
                                                      .table = &layer->ngrams.table,
                                                      .gathered = gathered,
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
