// src/bench/delta.c - speed of delta_rule. A state is read from memory and written back once for
// all tokens of a call; a token takes 7 operations for each of its elements.
#include <stdlib.h>
#include <string.h>

#include "bench/report.h"

enum { HEADS = 32, K_HEADS = 16, DIM = 128, LAYERS = 36, TILES = DIM / TD_DELTA_COLUMNS };
enum { TILE = DIM * TD_DELTA_COLUMNS, STATE = HEADS * TILES * TILE };
enum { CHANNELS = (2 * K_HEADS + HEADS) * DIM, OPERATIONS = 7 };

typedef struct {
  td_bench_report *report;
  const td_format *format;
  void (*fn)(const td_delta_rule_args *args);
  float *states; // [LAYERS][STATE]
  float *qkv, *gates, *out;
  uint32_t n_tokens, layer;
} delta_bench;

static void run_share(void *ctx, unsigned member, unsigned n_members) {
  const delta_bench *b = ctx;
  const size_t n = (size_t)HEADS * TILES;
  for (size_t i = n * member / n_members; i < n * (member + 1) / n_members; i++) {
    const size_t head = i / TILES, column = i % TILES * TD_DELTA_COLUMNS;
    const float *q = b->qkv + head / (HEADS / K_HEADS) * DIM;
    b->fn(&(td_delta_rule_args){.state = b->states + (size_t)b->layer * STATE + i * TILE,
                                .q = q,
                                .k = q + K_HEADS * DIM,
                                .v = b->qkv + (2 * K_HEADS + head) * DIM + column,
                                .gates = b->gates + 2 * head,
                                .out = b->out + head * DIM + column,
                                .ldk = CHANNELS,
                                .ldv = CHANNELS,
                                .ldg = 2 * HEADS,
                                .ldo = HEADS * DIM,
                                .n_tokens = b->n_tokens,
                                .k_dim = DIM,
                                .n_cols = TD_DELTA_COLUMNS,
                                .n_decays = 1});
  }
}

static void run_once(void *ctx) {
  delta_bench *b = ctx;
  td_thread_pool_run(b->report->reads.pool, run_share, b);
  b->layer = (b->layer + 1) % LAYERS;
}

// Keys and queries of norm 1 and gates of a half, so that states stay small.
static td_status open_memory(delta_bench *b, uint32_t max_tokens, td_err *err) {
  const size_t n_states = (size_t)LAYERS * STATE;
  td_status st = td_bench_need_memory((double)n_states * sizeof(float), "delta_rule", err);
  if (st != TD_OK) return st;
  b->states = calloc(n_states, sizeof *b->states);
  b->qkv = malloc((size_t)max_tokens * CHANNELS * sizeof *b->qkv);
  b->gates = malloc((size_t)max_tokens * 2 * HEADS * sizeof *b->gates);
  b->out = malloc((size_t)max_tokens * HEADS * DIM * sizeof *b->out);
  if (!b->states || !b->qkv || !b->gates || !b->out)
    return td_fail(err, TD_ENOMEM, "out of memory");
  memset(b->states, 0, n_states * sizeof *b->states); // so that it is there
  for (size_t i = 0; i < (size_t)max_tokens * CHANNELS; i++)
    b->qkv[i] = i % 2 ? 0.0884f : -0.0884f; // 1 / sqrt(DIM)
  for (size_t i = 0; i < (size_t)max_tokens * 2 * HEADS; i++)
    b->gates[i] = 0.5f;
  return TD_OK;
}

static void run_case(void *ctx, const td_bench_speed *speed, const td_kernel_variant *v,
                     uint32_t n_tokens) {
  delta_bench *b = ctx;
  cpu_set_t before;
  if (strcmp(v->family, "delta_rule") != 0) return;
  b->fn = (void (*)(const td_delta_rule_args *))v->fn;
  b->n_tokens = n_tokens;
  td_thread_pool_pin_caller(b->report->reads.pool, &before);
  const td_bench_time time = td_bench_measure(b->report, run_once, b);
  td_thread_pool_unpin_caller(&before);
  td_bench_report_add(b->report, &(td_bench_record){.kernel = v->family,
                                                    .variant = v->isa,
                                                    .format = b->format,
                                                    .rows = HEADS * DIM,
                                                    .cols = DIM,
                                                    .batch = n_tokens,
                                                    .speed = speed,
                                                    .bytes = 2.0 * STATE * sizeof(float),
                                                    .flops = 1.0 * OPERATIONS * STATE * n_tokens,
                                                    .time = time});
}

td_status td_bench_delta(td_bench_report *report, const td_format *format, td_err *err) {
  delta_bench b = {.report = report, .format = format};
  td_status st = open_memory(&b, td_bench_largest_batch(report->options), err);
  if (st == TD_OK) st = td_bench_each_case(report, run_case, &b, err);
  free(b.states);
  free(b.qkv);
  free(b.gates);
  free(b.out);
  return st;
}
