// src/cli/inspect_routing.c - `tandem inspect routing`: how the tokens of a text are distributed
// over the experts. An expert's load is its number of tokens divided by the mean, so 1 is perfect
// balance. And how many experts would have been found in memory for a part of them, if the tokens
// had been decoded one after the other.
#include <stdio.h>
#include <stdlib.h>

#include "base/json_write.h"
#include "cli/cli.h"
#include "cli/replay.h"
#include "runtime/command.h"

typedef struct {
  td_session *session;
  uint64_t *counts; // [n_layers][n_experts]
  uint32_t *uses;   // [n_uses], the first max_uses: layer * n_experts + expert, token by token
  size_t n_uses, max_uses;
} routing;

enum { MAX_USES = 16 << 20 }; // playing one back takes 20 bytes

static const uint32_t percents[] = {10, 25, 50, 75, 90}; // of the experts that memory holds

static uint64_t *layer_counts(const routing *r, uint32_t layer_idx) {
  return r->counts + (size_t)layer_idx * r->session->config->n_experts;
}

static void note_uses(routing *r, uint32_t n_tokens) {
  const td_model_config *c = r->session->config;
  for (uint32_t t = 0; t < n_tokens; t++) {
    for (uint32_t l = 0; l < c->n_layers; l++) {
      uint32_t n;
      const int32_t *ids = td_engine_routing(r->session->engine, l, &n);
      for (uint32_t k = 0; ids && k < c->top_k && r->n_uses < r->max_uses; k++)
        r->uses[r->n_uses++] = l * c->n_experts + (uint32_t)ids[(size_t)t * c->top_k + k];
    }
  }
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
    if (st == TD_OK) note_uses(r, n);
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

static uint32_t n_routed(const routing *r) {
  uint32_t n = 0;
  for (uint32_t l = 0; l < r->session->config->n_layers; l++)
    n += td_model_layer(r->session->model, l)->is_moe ? r->session->config->n_experts : 0;
  return n;
}

// The share that is found where memory holds percent of the experts.
static td_status replay(const routing *r, td_replay how, uint32_t percent, double *share,
                        td_err *err) {
  const td_model_config *c = r->session->config;
  const uint32_t n_slots = (uint32_t)((uint64_t)n_routed(r) * percent / 100);
  uint64_t hits;
  td_status st = td_replay_hits(&hits, how, r->uses, r->n_uses, c->n_layers * c->n_experts, n_slots,
                                err);
  *share = r->n_uses ? (double)hits / (double)r->n_uses : 0;
  return st;
}

static td_status replay_all(const routing *r, double out[TD_N_REPLAYS][TD_COUNT(percents)],
                            td_err *err) {
  td_status st = TD_OK;
  for (td_replay how = 0; how < TD_N_REPLAYS; how++)
    for (size_t i = 0; i < TD_COUNT(percents) && st == TD_OK; i++)
      st = replay(r, how, percents[i], &out[how][i], err);
  return st;
}

static void print_replays(const double found[TD_N_REPLAYS][TD_COUNT(percents)]) {
  static const char *const names[] = {
#define X(id, key, name) name,
      TD_REPLAYS(X)
#undef X
  };
  printf("\n%-40s", "percent found, decoding this text, in");
  printf("  memory for");
  for (size_t i = 0; i < TD_COUNT(percents); i++)
    printf(" %5u %%", percents[i]);
  puts(" of the experts");
  for (td_replay how = 0; how < TD_N_REPLAYS; how++) {
    printf("%-52s", names[how]);
    for (size_t i = 0; i < TD_COUNT(percents); i++)
      printf("  %6.1f", 100 * found[how][i]);
    putchar('\n');
  }
}

static void add_json_replays(td_json_writer *w,
                             const double found[TD_N_REPLAYS][TD_COUNT(percents)]) {
  static const char *const keys[] = {
#define X(id, key, name) key,
      TD_REPLAYS(X)
#undef X
  };
  td_jw_begin_array(w, "found_in_memory");
  for (size_t i = 0; i < TD_COUNT(percents); i++) {
    td_jw_add(w, "{'experts_in_memory': %g", percents[i] / 100.0);
    for (td_replay how = 0; how < TD_N_REPLAYS; how++)
      td_jw_double(w, keys[how], found[how][i]);
    td_jw_end_object(w);
  }
  td_jw_end_array(w);
}

static void print_json(const routing *r, const double found[TD_N_REPLAYS][TD_COUNT(percents)]) {
  const td_model_config *c = r->session->config;
  td_buf text = TD_BUF_INIT;
  td_json_writer w = TD_JSON_WRITER(&text);
  td_jw_add(&w, "{'layers': [");
  for (uint32_t l = 0; l < c->n_layers; l++) {
    if (!td_model_layer(r->session->model, l)->is_moe) continue;
    balance b = balance_of(r, l);
    td_jw_add(&w, "{'layer': %u, 'min_load': %g, 'max_load': %g, 'counts': [", l, b.min, b.max);
    for (uint32_t e = 0; e < c->n_experts; e++)
      td_jw_int(&w, NULL, (int64_t)layer_counts(r, l)[e]);
    td_jw_add(&w, "]}");
  }
  td_jw_end_array(&w);
  add_json_replays(&w, found);
  td_jw_end_object(&w);
  puts(td_buf_text(&text));
  td_buf_free(&text);
}

static td_status open_routing(routing *r, const td_options *o, size_t n_tokens, td_err *err) {
  td_session_opts opts;
  td_status st = td_cmd_session_opts(o, &opts, err);
  opts.record_routing = true;
  if (st == TD_OK) st = td_cmd_window(o, &opts.runtime.ctx_size, err);
  if (st == TD_OK) st = td_session_open(&r->session, &opts, err);
  if (st != TD_OK) return st;
  const td_model_config *c = r->session->config;
  r->counts = calloc((size_t)c->n_layers * c->n_experts + 1, sizeof *r->counts);
  r->max_uses = n_tokens * c->n_layers * c->top_k;
  if (r->max_uses > MAX_USES) r->max_uses = MAX_USES;
  r->uses = malloc((r->max_uses + 1) * sizeof *r->uses);
  return r->counts && r->uses ? TD_OK : td_fail(err, TD_ENOMEM, "out of memory");
}

int td_cmd_inspect_routing(const td_options *o) {
  td_err err;
  td_token_ids ids = {0};
  routing r = {0};
  td_status st = td_cmd_read_ids(o, &ids, &err);
  double found[TD_N_REPLAYS][TD_COUNT(percents)];
  if (st == TD_OK) st = open_routing(&r, o, ids.n, &err);
  if (st == TD_OK) st = count_all(&r, &ids, &err);
  if (st == TD_OK) st = replay_all(&r, found, &err);
  if (st == TD_OK && o->json) print_json(&r, found);
  if (st == TD_OK && !o->json) {
    puts("layer     min    max  load of each expert, in quarters of the mean");
    for (uint32_t l = 0; l < r.session->config->n_layers; l++)
      if (td_model_layer(r.session->model, l)->is_moe) print_row(&r, l);
    print_replays(found);
  }
  td_session_close(r.session);
  free(r.counts);
  free(r.uses);
  td_token_ids_free(&ids);
  return st == TD_OK ? 0 : td_cmd_fail(&err);
}
