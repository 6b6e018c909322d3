// src/engine/draft_layer.c - drafts by the layer of multi-token prediction behind the last one.
// It takes the state of a token and the token that follows, and predicts the one after that; where
// the residual has several streams, the state is all of them. Behind
// every step it computes the step's tokens, whose entries it keeps in a part of the KV pages of its
// own, and drafts from the last. For more drafts it continues from its own state and draft, one
// token a sequence.
#include <stdlib.h>
#include <string.h>

#include "engine/engine_impl.h"
#include "engine/experts/expert_drive.h"
#include "engine/rows.h"

td_status td_draft_layer_open(td_engine *e, td_err *err) {
  if (!e->config->n_draft_layers || !e->opts.has_draft_layer) return TD_OK;
  TD_CHECK(!e->opts.n_peers && !e->window && !e->opts.record_routing && !e->opts.stream_bytes);
  const size_t row = td_engine_row(e->config) * e->act_bytes;
  const size_t of_token = td_engine_draft_token_bytes(e->config, td_dev_act_dtype(e->dev));
  td_status st = td_dev_alloc(e->dev, &e->draft_in, of_token * e->opts.max_step_tokens, err);
  if (st != TD_OK) return st;
  e->draft_seqs = malloc(e->opts.max_step_seqs * sizeof *e->draft_seqs);
  e->draft_rows = malloc(e->opts.max_step_seqs * sizeof *e->draft_rows);
  if (!e->draft_seqs || !e->draft_rows)
    return td_fail(err, TD_ENOMEM, "out of memory: sequences that draft");
  st = td_dev_alloc(e->dev, &e->draft_hidden, row * e->opts.max_step_seqs, err);
  return st == TD_OK ? td_draft_head_open(e, err) : st;
}

// out = norm(x), n rows of dim elements.
static void norm(td_engine *e, const void *x, td_vec w, uint32_t n, void *out, size_t out_stride) {
  const uint32_t dim = e->config->dim;
  td_op_rmsnorm(e->stream, &(td_rmsnorm_args){.x = x,
                                              .w = w,
                                              .out = out,
                                              .x_stride = dim,
                                              .out_stride = out_stride,
                                              .n_rows = n,
                                              .dim = dim,
                                              .eps = e->config->rms_eps});
}

// x, from the tokens' embeddings in delta and the states at hidden.
static void join(td_engine *e, const void *hidden) {
  const td_mtp *mtp = td_model_mtp(e->model);
  const td_microbatch *p = &e->step.whole;
  const uint32_t dim = e->config->dim, n = p->n_tokens;
  norm(e, hidden, mtp->hidden_norm, n, td_rows_offset(e, e->draft_in, dim), 2 * (size_t)dim);
  norm(e, p->delta, mtp->embed_norm, n, e->draft_in, 2 * (size_t)dim);
  td_rows_linear(e, p, &mtp->proj, (td_vec){0}, e->draft_in, 2 * (size_t)dim, p->x);
}

static void join_streams(td_engine *e, const void *hidden) {
  const td_mtp *mtp = td_model_mtp(e->model);
  const td_microbatch *p = &e->step.whole;
  const uint32_t dim = e->config->dim, n_streams = e->config->n_streams;
  const uint32_t n_rows = p->n_tokens * n_streams; // each stream as a token
  void *const product = td_rows_offset(e, e->draft_in, (size_t)n_rows * dim);
  norm(e, hidden, mtp->hidden_norm, n_rows, e->draft_in, dim);
  td_op_linear(e->stream, &(td_linear_op_args){.w = &mtp->hidden_proj,
                                               .x = e->draft_in,
                                               .y = product,
                                               .x_stride = dim,
                                               .y_stride = dim,
                                               .n_tokens = n_rows});
  norm(e, p->delta, mtp->embed_norm, p->n_tokens, e->h, dim);
  td_rows_linear(e, p, &mtp->proj, (td_vec){0}, e->h, dim, p->delta);
  td_op_hyper_write(
      e->stream,
      &(td_hyper_write_args){
          .x = p->x, .y = p->delta, .n_tokens = p->n_tokens, .n_streams = n_streams, .dim = dim});
  td_op_add(e->stream, p->x, product, (size_t)n_rows * dim);
}

// The layer on the step's tokens, which follow those of the states at hidden.
static void run_layer(td_engine *e, const void *hidden) {
  const td_microbatch *p = &e->step.whole;
  td_op_embed(e->stream, &(td_embed_args){.table = *td_model_embed(e->model),
                                          .ids = e->step.tokens,
                                          .out = p->delta,
                                          .n_tokens = p->n_tokens});
  if (e->config->n_streams)
    join_streams(e, hidden);
  else
    join(e, hidden);
  td_engine_run_layer(e, e->config->n_layers);
}

// Logits of the step's rows, whose states go to draft_hidden.
static void run_head(td_engine *e) {
  const td_mtp *mtp = td_model_mtp(e->model);
  const td_microbatch *p = &e->step.whole;
  const uint32_t dim = e->config->dim, n_vocab = e->config->n_vocab, n = e->step.n_rows;
  const uint32_t row = (uint32_t)td_engine_row(e->config);
  if (!n) return;
  td_op_gather_rows(e->stream, e->draft_hidden, p->x, e->step.rows, n, row);
  if (mtp->is_normed) td_rows_norm(e, e->draft_hidden, mtp->norm, dim, n, e->config->rms_eps);
  void *rows = e->config->n_streams ? p->delta : e->h;
  if (e->config->n_streams) {
    td_rows_read_streams(e, p, mtp->norm, &mtp->hyper, true);
    td_op_gather_rows(e->stream, rows, e->h, e->step.rows, n, dim);
  } else {
    td_op_gather_rows(e->stream, rows, p->x, e->step.rows, n, dim);
    td_rows_norm(e, rows, mtp->norm, dim, n, e->config->rms_eps);
  }
  td_op_linear(e->stream, &(td_linear_op_args){.w = &e->draft_head,
                                               .x = rows,
                                               .y = e->dev_logits,
                                               .x_stride = dim,
                                               .y_stride = n_vocab,
                                               .n_tokens = n,
                                               .out_f32 = true});
  td_op_copy(e->stream, e->logits, e->dev_logits, (size_t)n * n_vocab * sizeof(float));
}

// The first of the largest logits. By blocks, whose maxima need no order and do not wait for each
// other.
static int32_t best_of(const float *logits, uint32_t n) {
  enum { LANES = 16, BLOCK = 64 * LANES };
  uint32_t best = 0;
  for (uint32_t from = 0; from < n; from += BLOCK) {
    const uint32_t end = n - from < BLOCK ? n : from + BLOCK;
    float most[LANES];
    for (uint32_t k = 0; k < LANES; k++)
      most[k] = logits[best];
    for (uint32_t i = from; i + LANES <= end; i += LANES)
      for (uint32_t k = 0; k < LANES; k++)
        most[k] = logits[i + k] > most[k] ? logits[i + k] : most[k];
    bool is_better = end - from < BLOCK; // whose last ones were not looked at
    for (uint32_t k = 0; k < LANES; k++)
      is_better |= most[k] > logits[best];
    for (uint32_t i = from; i < end && is_better; i++)
      best = logits[i] > logits[best] ? i : best;
  }
  return (int32_t)best;
}

static void upload(td_engine *e) {
  td_op_copy_direct(e->stream, e->dev_meta, e->meta, e->step.meta_len * sizeof *e->meta);
}

// What the layer has of a sequence: nothing before `from`, whose page is its first.
static td_step_seq seen_of(const td_engine *e, const td_step_seq *seq, const td_draft_seq *d) {
  const uint32_t n_before = d->from > seq->n_past ? d->from - seq->n_past : 0;
  const uint32_t n_pages = d->from / e->opts.page_tokens;
  td_step_seq seen = *seq;
  TD_CHECK(d->from % e->opts.page_tokens == 0);
  seen.n_tokens = d->n_next > n_before ? d->n_next - n_before : 0;
  seen.tokens = seen.n_tokens ? d->next + n_before : NULL;
  seen.n_past = seq->n_past + n_before - d->from;
  seen.pages += n_pages;
  seen.n_pages -= n_pages < seq->n_pages ? n_pages : seq->n_pages;
  if (d->from) seen.n_images = 0, seen.rope_offset = 0; // only where it is from others counts
  seen.want = d->out ? TD_WANT_LAST : TD_WANT_NONE;
  TD_CHECK(seen.n_tokens || !d->out);
  return seen;
}

// Whether the layer's tokens are those of the step: none is before it, and none was rejected.
static bool is_whole(const td_engine *e, const td_draft_step *s) {
  for (uint32_t i = 0; i < s->n_seqs; i++)
    if (s->drafts[i].from || s->drafts[i].n_next < s->seqs[i].n_tokens) return false;
  return s->of == e;
}

// Makes the tokens of the step those that follow, and its rows those to draft from. The states are
// where they are.
static const void *shift_tokens(td_engine *e, const td_draft_step *s) {
  int32_t *tokens = e->meta, *rows = e->meta + (e->step.rows - e->dev_meta);
  TD_CHECK(s->n_seqs == e->step.n_seqs);
  e->step.n_rows = 0;
  for (uint32_t i = 0; i < s->n_seqs; i++) {
    const td_draft_seq *d = &s->drafts[i];
    const uint32_t first = e->first_token[i];
    memcpy(tokens + first, d->next, d->n_next * sizeof *tokens);
    if (s->n_drafts && d->out) rows[e->step.n_rows++] = (int32_t)(first + d->n_next - 1);
  }
  return e->x;
}

// Builds a step of what the layer has of the sequences, and gathers their states.
static const void *build_seen(td_engine *e, const td_draft_step *s) {
  const size_t row_bytes = td_engine_row(e->config) * e->act_bytes;
  uint32_t n = 0, n_tokens = 0;
  for (uint32_t i = 0; i < s->n_seqs; i++) {
    const td_step_seq seen = seen_of(e, &s->seqs[i], &s->drafts[i]);
    if (!seen.n_tokens) continue;
    e->draft_rows[n] = s->of->first_token[i] + (uint32_t)(seen.tokens - s->drafts[i].next);
    e->draft_seqs[n++] = seen;
    n_tokens += seen.n_tokens;
  }
  TD_CHECK(n_tokens <= e->opts.max_step_tokens);
  td_engine_build_step(e, e->draft_seqs, NULL, n);
  for (uint32_t i = 0; i < n; i++) {
    td_op_copy(e->stream, (char *)e->draft_in + e->first_token[i] * row_bytes,
               (const char *)s->of->x + e->draft_rows[i] * row_bytes,
               e->draft_seqs[i].n_tokens * row_bytes);
  }
  return e->draft_in;
}

// Builds the step of the last drafts, of which there are n_made for each sequence that wants them.
static void build_next(td_engine *e, const td_draft_step *s, uint32_t n_made) {
  uint32_t n = 0;
  for (uint32_t i = 0; i < s->n_seqs; i++) {
    const td_draft_seq *d = &s->drafts[i];
    if (!d->out) continue;
    td_step_seq *next = &e->draft_seqs[n++];
    *next = seen_of(e, &s->seqs[i], d);
    next->n_past += next->n_tokens + n_made - 1;
    next->tokens = d->out + n_made - 1;
    next->n_tokens = 1;
    next->is_decode = true;
  }
  td_engine_build_step(e, e->draft_seqs, NULL, n);
}

static void take_drafts(const td_engine *e, const td_draft_step *s, uint32_t at) {
  const size_t n_vocab = e->config->n_vocab;
  const float *logits = e->logits;
  for (uint32_t i = 0; i < s->n_seqs; i++) {
    if (!s->drafts[i].out) continue;
    s->drafts[i].out[at] = best_of(logits, e->config->n_vocab);
    logits += n_vocab;
  }
}

// Runs the layer on the step that was built, and waits for it. An expert that cannot be read spoils
// guesses, and no text.
static td_status run(td_engine *e, const void *hidden, td_err *err) {
  td_expert_drive_begin_step(e, false);
  run_layer(e, hidden);
  run_head(e);
  const td_status st = td_stream_sync(e->stream, err);
  td_expert_drive_end_step(e);
  return st;
}

td_status td_engine_draft(td_engine *e, const td_draft_step *s, td_err *err) {
  TD_CHECK(e->draft_in);
  const void *hidden = is_whole(e, s) ? shift_tokens(e, s) : build_seen(e, s);
  if (!e->step.n_tokens) return TD_OK;
  upload(e);
  if (!e->config->n_streams) { // which are not normed
    norm(e, hidden, td_model_final_norm(e->model), e->step.n_tokens, e->h, e->config->dim);
    hidden = e->h;
  }
  td_status st = run(e, hidden, err);
  for (uint32_t k = 0; k < s->n_drafts && e->step.n_rows && st == TD_OK; k++) {
    if (k) {
      build_next(e, s, k);
      upload(e);
      st = run(e, e->draft_hidden, err);
    }
    take_drafts(e, s, k);
  }
  return st;
}
