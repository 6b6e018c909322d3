// src/cli/inspect_routing.c - `tandem inspect routing`: how the tokens of a text are distributed
// over the experts. An expert's load is its number of tokens divided by the mean, so 1 is perfect
// balance.
#include <stdio.h>
#include <stdlib.h>

#include "base/json_write.h"
#include "cli/cli.h"
#include "runtime/command.h"

typedef struct {
  td_session *session;
  uint64_t *counts; // [n_layers][n_experts]
} routing;

static uint64_t *layer_counts(const routing *r, uint32_t layer_idx) {
  return r->counts + (size_t)layer_idx * r->session->config->n_experts;
}

static void count_step(routing *r) {
  const td_model_config *c = r->session->config;
  for (uint32_t l = 0; l < c->n_layers; l++) {
    uint32_t n_tokens;
    const int32_t *ids = td_engine_routing(r->session->engine, l, &n_tokens);
    for (size_t i = 0; ids && i < (size_t)n_tokens * c->top_k; i++)
      layer_counts(r, l)[ids[i]]++;
  }
}

// Processes the text in windows of the context size, each in prefill chunks.
static td_status count_all(routing *r, const td_token_ids *ids, td_err *err) {
  td_session *s = r->session;
  uint32_t n_past = 0;
  td_status st = td_kv_reserve(s->kv, s->seq, s->n_ctx, err);
  for (size_t at = 0; st == TD_OK && at < ids->n;) {
    uint32_t n = s->opts.runtime.prefill_chunk;
    if (n > s->n_ctx - n_past) n = s->n_ctx - n_past;
    if (n > ids->n - at) n = (uint32_t)(ids->n - at);
    td_step_seq seq = {.tokens = ids->ids + at, .n_tokens = n, .n_past = n_past};
    seq.pages = td_kv_pages(s->kv, s->seq, &seq.n_pages);
    st = td_engine_step(s->engine, &seq, 1, err);
    if (st == TD_OK) count_step(r);
    at += n;
    n_past = (n_past + n) % s->n_ctx;
  }
  return st;
}

typedef struct {
  double min, max; // load relative to the mean
  uint64_t total;
} balance;

static balance balance_of(const routing *r, uint32_t layer_idx) {
  uint32_t n = r->session->config->n_experts;
  const uint64_t *counts = layer_counts(r, layer_idx);
  balance b = {0};
  uint64_t min = UINT64_MAX, max = 0;
  for (uint32_t e = 0; e < n; e++) {
    b.total += counts[e];
    if (counts[e] < min) min = counts[e];
    if (counts[e] > max) max = counts[e];
  }
  if (b.total) {
    b.min = (double)min * n / (double)b.total;
    b.max = (double)max * n / (double)b.total;
  }
  return b;
}

// Prints one digit per expert: its load in quarters of the mean, at most 9.
static void print_row(const routing *r, uint32_t layer_idx) {
  balance b = balance_of(r, layer_idx);
  uint32_t n = r->session->config->n_experts;
  printf("%5u  %6.2f %6.2f  ", layer_idx, b.min, b.max);
  for (uint32_t e = 0; e < n; e++) {
    uint64_t quarters = b.total ? layer_counts(r, layer_idx)[e] * n * 4 / b.total : 0;
    putchar((char)('0' + (quarters > 9 ? 9 : quarters)));
  }
  putchar('\n');
}

static void print_table(const routing *r) {
  puts("layer     min    max  load of each expert, in quarters of the mean");
  for (uint32_t l = 0; l < r->session->config->n_layers; l++) {
    if (td_model_layer(r->session->model, l)->is_moe) print_row(r, l);
  }
}

static void print_json(const routing *r) {
  const td_model_config *c = r->session->config;
  td_buf text = TD_BUF_INIT;
  td_json_writer w = TD_JSON_WRITER(&text);
  td_jw_begin_object(&w, NULL);
  td_jw_begin_array(&w, "layers");
  for (uint32_t l = 0; l < c->n_layers; l++) {
    if (!td_model_layer(r->session->model, l)->is_moe) continue;
    balance b = balance_of(r, l);
    td_jw_begin_object(&w, NULL);
    td_jw_int(&w, "layer", l);
    td_jw_double(&w, "min_load", b.min);
    td_jw_double(&w, "max_load", b.max);
    td_jw_begin_array(&w, "counts");
    for (uint32_t e = 0; e < c->n_experts; e++)
      td_jw_int(&w, NULL, (int64_t)layer_counts(r, l)[e]);
    td_jw_end_array(&w);
    td_jw_end_object(&w);
  }
  td_jw_end_array(&w);
  td_jw_end_object(&w);
  puts(td_buf_text(&text));
  td_buf_free(&text);
}

static td_status open_routing(routing *r, const td_options *o, td_err *err) {
  td_session_opts opts;
  td_status st = td_cmd_session_opts(o, &opts, err);
  opts.record_routing = true;
  if (st == TD_OK) st = td_cmd_window(o, &opts.runtime.ctx_size, err);
  if (st == TD_OK) st = td_session_open(&r->session, &opts, err);
  if (st != TD_OK) return st;
  const td_model_config *c = r->session->config;
  r->counts = calloc((size_t)c->n_layers * c->n_experts + 1, sizeof *r->counts);
  return r->counts ? TD_OK : td_fail(err, TD_ENOMEM, "out of memory");
}

int td_cmd_inspect_routing(const td_options *o) {
  td_err err;
  td_token_ids ids = {0};
  routing r = {0};
  td_status st = td_cmd_read_ids(o, &ids, &err);
  if (st == TD_OK) st = open_routing(&r, o, &err);
  if (st == TD_OK) st = count_all(&r, &ids, &err);
  if (st == TD_OK && o->json) print_json(&r);
  if (st == TD_OK && !o->json) print_table(&r);
  td_session_close(r.session);
  free(r.counts);
  td_token_ids_free(&ids);
  return st == TD_OK ? 0 : td_cmd_fail(&err);
}
