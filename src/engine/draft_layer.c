// src/engine/draft_layer.c - drafts by the layer of multi-token prediction behind the last one.
// It takes the state of a token and the token that follows, and predicts the one after that. Behind
// every step it computes the step's tokens, whose entries it keeps in a part of the KV pages of its
// own, and drafts from the last. For more drafts it goes on from its own state and draft, one token
// a sequence.
#include <stdlib.h>
#include <string.h>

#include "engine/engine_impl.h"
#include "engine/rows.h"

td_status td_draft_layer_open(td_engine *e, td_err *err) {
  if (!e->config->n_draft_layers) return TD_OK;
  TD_CHECK(!e->offload.dev && !e->ranks && !e->window && !e->can_rank && !e->opts.record_routing);
  const size_t row = e->config->dim * e->act_bytes;
  td_status st = td_dev_alloc(e->dev, &e->draft_in, 2 * row * e->opts.max_step_tokens, err);
  if (st != TD_OK) return st;
  e->draft_seqs = malloc(e->opts.max_step_seqs * sizeof *e->draft_seqs);
  if (!e->draft_seqs) return td_fail(err, TD_ENOMEM, "out of memory: sequences that draft");
  return td_dev_alloc(e->dev, &e->draft_hidden, row * e->opts.max_step_seqs, err);
}

// out = norm(x), rows of dim elements.
static void norm(td_engine *e, const void *x, td_vec w, void *out, size_t out_stride) {
  const uint32_t dim = e->config->dim;
  td_op_rmsnorm(e->stream, &(td_rmsnorm_args){.x = x,
                                              .w = w,
                                              .out = out,
                                              .x_stride = dim,
                                              .out_stride = out_stride,
                                              .n_rows = e->step.n_tokens,
                                              .dim = dim,
                                              .eps = e->config->rms_eps});
}

// The layer on the step's tokens, which follow those of the states at hidden.
static void run_layer(td_engine *e, const void *hidden) {
  const td_mtp *mtp = td_model_mtp(e->model);
  const td_microbatch *p = &e->step.whole;
  const uint32_t dim = e->config->dim;
  norm(e, hidden, mtp->hidden_norm, td_rows_offset(e, e->draft_in, dim), 2 * (size_t)dim);
  td_op_embed(e->stream, &(td_embed_args){.table = td_model_embed(e->model),
                                          .ids = e->step.tokens,
                                          .out = p->delta,
                                          .n_tokens = p->n_tokens});
  norm(e, p->delta, mtp->embed_norm, e->draft_in, 2 * (size_t)dim);
  td_rows_linear(e, p, &mtp->proj, (td_vec){0}, e->draft_in, 2 * (size_t)dim, p->x);
  td_engine_run_layer(e, e->config->n_layers);
}

// Logits of the step's rows, whose states go to draft_hidden.
static void run_head(td_engine *e) {
  const td_mtp *mtp = td_model_mtp(e->model);
  const uint32_t dim = e->config->dim, n_vocab = e->config->n_vocab, n = e->step.n_rows;
  if (!n) return;
  td_op_gather_rows(e->stream, e->draft_hidden, e->step.whole.x, e->step.rows, n, dim);
  if (mtp->is_normed) td_rows_norm(e, e->draft_hidden, mtp->norm, dim, n, e->config->rms_eps);
  td_op_gather_rows(e->stream, e->h, e->step.whole.x, e->step.rows, n, dim);
  td_rows_norm(e, e->h, mtp->norm, dim, n, e->config->rms_eps);
  td_op_linear(e->stream, &(td_linear_op_args){.w = td_model_lm_head(e->model),
                                               .x = e->h,
                                               .y = e->dev_logits,
                                               .x_stride = dim,
                                               .y_stride = n_vocab,
                                               .n_tokens = n,
                                               .out_f32 = true});
  td_op_copy(e->stream, e->logits, e->dev_logits, (size_t)n * n_vocab * sizeof(float));
}

static int32_t best_of(const float *logits, uint32_t n) {
  uint32_t best = 0;
  for (uint32_t i = 1; i < n; i++)
    best = logits[i] > logits[best] ? i : best;
  return (int32_t)best;
}

static void upload(td_engine *e) {
  td_op_copy_direct(e->stream, e->dev_meta, e->meta, e->step.meta_len * sizeof *e->meta);
}

// Makes the tokens of the step those that follow, and its rows those to draft from.
static void shift_tokens(td_engine *e, const td_step_seq *seqs, const td_draft_seq *drafts,
                         uint32_t n_seqs, bool has_drafts) {
  int32_t *tokens = e->meta, *rows = e->meta + (e->step.rows - e->dev_meta);
  e->step.n_rows = 0;
  for (uint32_t i = 0; i < n_seqs; i++) {
    const td_draft_seq *d = &drafts[i];
    const uint32_t first = e->first_token[i];
    memset(tokens + first, 0, seqs[i].n_tokens * sizeof *tokens);
    if (d->n_next) memcpy(tokens + first, d->next, d->n_next * sizeof *tokens);
    if (has_drafts && d->out) rows[e->step.n_rows++] = (int32_t)(first + d->n_next - 1);
  }
}

// Builds the step of the last drafts, of which there are n_made for each sequence that wants them.
static void build_next(td_engine *e, const td_step_seq *seqs, const td_draft_seq *drafts,
                       uint32_t n_seqs, uint32_t n_made) {
  uint32_t n = 0;
  for (uint32_t i = 0; i < n_seqs; i++) {
    if (!drafts[i].out) continue;
    td_step_seq *next = &e->draft_seqs[n++];
    *next = seqs[i];
    next->tokens = drafts[i].out + n_made - 1;
    next->n_tokens = 1;
    next->n_past = seqs[i].n_past + drafts[i].n_next + n_made - 1;
    next->is_decode = true;
    next->want = TD_WANT_LAST;
  }
  td_engine_build_step(e, e->draft_seqs, NULL, n);
}

static void take_drafts(const td_engine *e, const td_draft_seq *drafts, uint32_t n_seqs,
                        uint32_t at) {
  const size_t n_vocab = e->config->n_vocab;
  const float *logits = e->logits;
  for (uint32_t i = 0; i < n_seqs; i++) {
    if (!drafts[i].out) continue;
    drafts[i].out[at] = best_of(logits, e->config->n_vocab);
    logits += n_vocab;
  }
}

td_status td_engine_draft(td_engine *e, const td_step_seq *seqs, const td_draft_seq *drafts,
                          uint32_t n_seqs, uint32_t n_drafts, td_err *err) {
  TD_CHECK(e->draft_in && n_seqs == e->step.n_seqs);
  shift_tokens(e, seqs, drafts, n_seqs, n_drafts > 0);
  upload(e);
  norm(e, e->x, td_model_final_norm(e->model), e->h, e->config->dim);
  run_layer(e, e->h);
  run_head(e);
  td_status st = td_stream_sync(e->stream, err);
  for (uint32_t k = 0; k < n_drafts && e->step.n_rows && st == TD_OK; k++) {
    if (k) {
      build_next(e, seqs, drafts, n_seqs, k);
      upload(e);
      run_layer(e, e->draft_hidden);
      run_head(e);
      st = td_stream_sync(e->stream, err);
    }
    take_drafts(e, drafts, n_seqs, k);
  }
  return st;
}
