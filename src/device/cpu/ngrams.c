// src/device/cpu/ngrams.c - embeddings of n-grams: rows of a table in its file, their gates, and
// the convolution over them. A token's result depends on its sequence alone, however that is cut
// into steps.
#include <math.h>
#include <string.h>

#include "device/check.h"
#include "device/cpu/pages.h"

// ---- rows ---------------------------------------------------------------------------------------

// The token `back` before token t of sequence s; what is in front of the sequence is the end token.
static int32_t token_at(const td_ngram_rows_args *a, uint32_t s, int32_t t, int32_t back) {
  const td_ngram_hash *h = &a->table->hash;
  const int32_t first = a->batch.q_begin[s];
  if (t - back >= first) return a->tokens[t - back];
  const float *before = (const float *)(const void *)td_state_before(&a->batch, &a->state, s);
  int32_t id = h->end;
  if (before) {
    const int32_t i = (int32_t)h->size - 1 + (t - back - first);
    memcpy(&id, before + a->ids_at + i, sizeof id);
  }
  return id;
}

static void decode(const td_ngram_table *table, uint64_t row, float *out) {
  const uint32_t each = table->shards[0].rows;
  const td_weight *shard = &table->shards[row / each];
  td_kernels()->decode_row(
      &(td_decode_row_args){.w = shard, .row = (uint32_t)(row % each), .out = out});
}

void td_ngram_row(const td_ngram_table *table, const int32_t *ids, float *out) {
  const td_ngram_hash *h = &table->hash;
  const uint32_t cols = table->shards[0].cols;
  int32_t id = ids[0];
  uint64_t mixed = (uint64_t)id * h->factor[0], first_row = 0;
  bool has_ended = false;
  for (uint32_t i = 1; i < h->size; i++) {
    if (!has_ended) id = ids[i];
    has_ended |= id == h->end;
    mixed ^= (uint64_t)id * h->factor[i];
    for (uint32_t k = (i - 1) * h->n_heads; k < i * h->n_heads; k++, out += cols) {
      decode(table, first_row + mixed % h->rows[k], out);
      first_row += h->rows[k];
    }
  }
}

static void rows_of_token(void *ctx, size_t t, unsigned member) {
  (void)member;
  const td_ngram_rows_args *a = ctx;
  const td_ngram_hash *h = &a->table->hash;
  const size_t row = (size_t)td_ngram_rows(h) * a->table->shards[0].cols;
  int32_t ids[TD_MAX_NGRAM];
  for (uint32_t i = 0; i < h->size; i++)
    ids[i] = token_at(a, (uint32_t)a->batch.seq[t], (int32_t)t, (int32_t)i);
  td_ngram_row(a->table, ids, (float *)a->out + t * row);
}

static void keep_ids(const td_ngram_rows_args *a, const int32_t *past, uint32_t s, int32_t t,
                     float *state) {
  const int32_t n = (int32_t)a->table->hash.size - 1, first = a->batch.q_begin[s];
  for (int32_t i = 0; i < n; i++) {
    const int32_t from = t + 1 - n + i;
    const int32_t id = from >= first ? a->tokens[from] : past[n + from - first];
    memcpy(state + a->ids_at + i, &id, sizeof id);
  }
}

static void keep_sequence(void *ctx, size_t item, unsigned member) {
  (void)member;
  const td_ngram_rows_args *a = ctx;
  const uint32_t s = (uint32_t)item, n = a->table->hash.size - 1;
  const int32_t first = a->batch.q_begin[s], end = a->batch.q_begin[s + 1];
  int32_t past[TD_MAX_NGRAM];
  for (uint32_t i = 0; i < n && first < end; i++)
    past[i] = token_at(a, s, first, (int32_t)(n - i));
  for (td_page_run run = {.end = first}; run.end < end;) {
    run = td_page_run_at(&a->batch, &a->state, s, run.end);
    for (int32_t t = run.begin; t < run.end; t++) {
      float *slot = td_trail_slot(&a->trail, &a->batch, s, t);
      if (slot) keep_ids(a, past, s, t, slot);
    }
    keep_ids(a, past, s, run.end - 1, (float *)(void *)run.state);
  }
}

td_status td_cpu_op_ngram_rows(td_cpu_stream *stream, const td_ngram_rows_args *a, td_err *err) {
  const td_ngram_hash *h = &a->table->hash;
  td_status st = td_cpu_check_batch(&a->batch, &a->state, (td_kv_rows){0}, err);
  if (st != TD_OK) return st;
  TD_DEV_REQUIRE(h->size >= 2 && h->size <= TD_MAX_NGRAM && td_ngram_rows(h) &&
                     td_ngram_rows(h) <= TD_MAX_NGRAM_HEADS && a->table->n_shards,
                 "n-grams of %u tokens in %u shards", h->size, a->table->n_shards);
  TD_DEV_REQUIRE(a->state.dtype == TD_F32 &&
                     a->state.page_bytes >= (a->ids_at + h->size - 1) * sizeof(float),
                 "n-grams: a state at %zu in pages of %zu bytes", a->ids_at, a->state.page_bytes);
  for (uint32_t t = 0; t < a->batch.n_tokens; t++)
    TD_DEV_REQUIRE(a->tokens[t] >= 0, "n-grams: token id %d", a->tokens[t]);
  td_cpu_for(stream, a->batch.n_tokens, rows_of_token, (void *)a);
  td_cpu_for(stream, a->batch.n_seqs, keep_sequence, (void *)a);
  return TD_OK;
}

// ---- gates --------------------------------------------------------------------------------------

static void gate_token(void *ctx, size_t t, unsigned member) {
  (void)member;
  const td_ngram_gate_args *a = ctx;
  const float *value = (const float *)a->value + t * a->dim;
  for (size_t k = t * a->n_streams; k < (t + 1) * a->n_streams; k++) {
    float *x = (float *)a->x + k * a->dim;
    const float *query = (const float *)a->query + k * a->dim;
    double sum = 0;
    for (uint32_t i = 0; i < a->dim; i++)
      sum += (double)x[i] * query[i];
    const float s = (float)(sum / sqrt(a->dim)), root = sqrtf(fmaxf(fabsf(s), 1e-6f));
    const float g = s > 0 ? root : s < 0 ? -root : 0, factor = 1 / (1 + expf(-g));
    for (uint32_t i = 0; i < a->dim; i++)
      x[i] = factor * value[i];
  }
}

td_status td_cpu_op_ngram_gate(td_cpu_stream *stream, const td_ngram_gate_args *a, td_err *err) {
  (void)err;
  td_cpu_for(stream, a->n_tokens, gate_token, (void *)a);
  return TD_OK;
}

// ---- the convolution ----------------------------------------------------------------------------

enum { CHANNELS = 64, MAX_PAST = 128 }; // channels of an item; rows of a state

// Channels [channel, channel + n) of a sequence, and the rows before its first token.
typedef struct {
  const td_ngram_conv_args *a;
  uint32_t channel, n;
  int32_t first, n_past;
  float past[MAX_PAST * CHANNELS];
} conv_piece;

// The inputs of token t, which may be before the first.
static const float *inputs_of(const conv_piece *p, int32_t t) {
  if (t < p->first) return p->past + (size_t)(p->n_past + t - p->first) * CHANNELS;
  return (const float *)p->a->in + (size_t)t * p->a->channels + p->channel;
}

// The rows that the token behind t needs, to a state.
static void keep_rows(const conv_piece *p, int32_t t, float *state) {
  for (int32_t i = 0; i < p->n_past; i++) {
    float *to = state + p->a->rows_at + (size_t)i * p->a->channels + p->channel;
    memcpy(to, inputs_of(p, t + 1 - p->n_past + i), p->n * sizeof *to);
  }
}

static void conv_token(const conv_piece *p, int32_t t) {
  const td_ngram_conv_args *a = p->a;
  const float *rows[TD_DELTA_MAX_TAPS];
  const size_t at = (size_t)t * a->channels + p->channel;
  float out[CHANNELS], *x = (float *)a->x + at;
  const float *y = (const float *)a->y + at;
  for (uint32_t j = 0; j < a->n_taps; j++)
    rows[j] = inputs_of(p, t - (int32_t)((a->n_taps - 1 - j) * a->step));
  td_kernels()->conv_silu(&(td_conv_silu_args){.x = rows,
                                               .w = a->conv + p->channel,
                                               .out = out,
                                               .n = p->n,
                                               .ldw = a->channels,
                                               .n_taps = a->n_taps});
  for (uint32_t i = 0; i < p->n; i++)
    x[i] += y[i] + out[i];
}

// Items: of each sequence the pieces of channels.
static void conv_item(void *ctx, size_t item, unsigned member) {
  (void)member;
  const td_ngram_conv_args *a = ctx;
  const uint32_t n_pieces = (a->channels + CHANNELS - 1) / CHANNELS;
  const uint32_t s = (uint32_t)(item / n_pieces);
  const int32_t end = a->batch.q_begin[s + 1];
  conv_piece p = {.a = a,
                  .channel = (uint32_t)(item % n_pieces) * CHANNELS,
                  .first = a->batch.q_begin[s],
                  .n_past = (int32_t)td_ngram_past(a->n_taps, a->step)};
  if (p.first == end) return;
  p.n = a->channels - p.channel < CHANNELS ? a->channels - p.channel : CHANNELS;
  const float *before = (const float *)(const void *)td_state_before(&a->batch, &a->state, s);
  for (int32_t i = 0; before && i < p.n_past; i++)
    memcpy(p.past + (size_t)i * CHANNELS, before + a->rows_at + (size_t)i * a->channels + p.channel,
           p.n * sizeof *p.past);
  for (td_page_run run = {.end = p.first}; run.end < end;) {
    run = td_page_run_at(&a->batch, &a->state, s, run.end);
    for (int32_t t = run.begin; t < run.end; t++) {
      conv_token(&p, t);
      float *slot = td_trail_slot(&a->trail, &a->batch, s, t);
      if (slot) keep_rows(&p, t, slot);
    }
    keep_rows(&p, run.end - 1, (float *)(void *)run.state);
  }
}

td_status td_cpu_op_ngram_conv(td_cpu_stream *stream, const td_ngram_conv_args *a, td_err *err) {
  td_status st = td_cpu_check_batch(&a->batch, &a->state, (td_kv_rows){0}, err);
  if (st != TD_OK) return st;
  const size_t n_past = td_ngram_past(a->n_taps, a->step);
  TD_DEV_REQUIRE(a->n_taps >= 2 && a->n_taps <= TD_DELTA_MAX_TAPS && n_past <= MAX_PAST,
                 "n-grams: a filter of %u taps, %u tokens apart", a->n_taps, a->step);
  TD_DEV_REQUIRE(a->state.dtype == TD_F32 &&
                     a->state.page_bytes >= (a->rows_at + n_past * a->channels) * sizeof(float),
                 "n-grams: a state at %zu in pages of %zu bytes", a->rows_at, a->state.page_bytes);
  const uint32_t n_pieces = (a->channels + CHANNELS - 1) / CHANNELS;
  td_cpu_for(stream, (size_t)a->batch.n_seqs * n_pieces, conv_item, (void *)a);
  return TD_OK;
}
