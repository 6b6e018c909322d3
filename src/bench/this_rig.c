// src/bench/this_rig.c - reads, arithmetic and the cost of a layer on this machine's CPU.
#include "bench/this_rig.h"

#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/mem_info.h"
#include "base/stats.h"
#include "bench/formats.h"
#include "bench/machine.h"
#include "bench/mem_bandwidth.h"
#include "device/device.h"
#include "engine/engine.h"

enum { MAX_BYTES = 256 << 20, REPEAT = 5 };

// A few experts as the model has them.
typedef struct {
  const td_model_config *config;
  uint32_t n, n_tokens, top_k;
  td_weight *weights; // [3][n]: gate, up, down
  float *x, *out, *route;
  int32_t *ids;
  void *memory;
  td_dev *dev;
  td_stream *stream;
} experts;

static const td_weight *first_expert(const td_model *model) {
  for (uint32_t i = 0; i < td_model_config_of(model)->n_layers; i++)
    if (td_model_is_moe(td_model_config_of(model), i)) return td_model_layer(model, i)->down;
  return NULL;
}

static td_format format_of(const td_weight *w) {
  return (td_format){.dtype = w->dtype,
                     .scale_dtype = w->scale_dtype,
                     .scale_rows = w->scale_rows,
                     .scale_cols = w->scale ? w->scale_cols : 0,
                     .zero = w->zero != NULL};
}

static td_status make(experts *e, const td_model *model, unsigned n_threads, td_err *err) {
  const td_model_config *c = e->config = td_model_config_of(model);
  const td_format format = format_of(first_expert(model));
  td_weight unused;
  const size_t up = td_bench_weight(&unused, &format, c->expert_dim, c->dim, NULL);
  const size_t down = td_bench_weight(&unused, &format, c->dim, c->expert_dim, NULL);
  const size_t most = MAX_BYTES / (2 * up + down);
  e->n = most < c->top_k ? c->top_k : most < c->n_experts ? (uint32_t)most : c->n_experts;
  e->top_k = c->top_k;
  e->n_tokens = (uint32_t)((uint64_t)td_engine_prefill_chunk(c) * e->n / c->n_experts);
  if (e->n_tokens < 1) e->n_tokens = 1;
  const size_t n_pairs = (size_t)e->n_tokens * e->top_k;
  td_status st = td_dev_open(&e->dev, &(td_dev_opts){.kind = "cpu", .n_threads = n_threads}, err);
  if (st == TD_OK) st = td_stream_open(&e->stream, e->dev, err);
  if (st == TD_OK) st = td_dev_alloc(e->dev, &e->memory, e->n * (2 * up + down) + 64, err);
  if (st != TD_OK) return st;
  e->weights = calloc((size_t)3 * e->n, sizeof *e->weights);
  e->x = calloc((size_t)e->n_tokens * c->dim, sizeof *e->x);
  e->out = calloc((size_t)e->n_tokens * c->dim, sizeof *e->out);
  e->route = calloc(n_pairs, sizeof *e->route);
  e->ids = calloc(n_pairs, sizeof *e->ids);
  if (!e->weights || !e->x || !e->out || !e->route || !e->ids)
    return td_fail(err, TD_ENOMEM, "out of memory: experts to measure this machine with");
  char *at = e->memory;
  for (uint32_t i = 0; i < 3 * e->n; i++) {
    const bool is_down = i >= 2 * e->n;
    td_bench_weight(&e->weights[i], &format, is_down ? c->dim : c->expert_dim,
                    is_down ? c->expert_dim : c->dim, at);
    td_bench_fill(&e->weights[i], at, i);
    at += is_down ? down : up;
  }
  for (size_t i = 0; i < n_pairs; i++) {
    e->ids[i] = (int32_t)(i % e->n);
    e->route[i] = 0.125f;
  }
  for (size_t i = 0; i < (size_t)e->n_tokens * c->dim; i++)
    e->x[i] = (float)(int)(i * 2654435761u % 2001 - 1000) * 1e-3f;
  return TD_OK;
}

static td_status compute(const experts *e, double *gflops, td_err *err) {
  const td_model_config *c = e->config;
  double seconds[1 + REPEAT];
  for (int i = 0; i < 1 + REPEAT; i++) {
    const double start = td_clock_s();
    td_op_moe(e->stream, &(td_moe_args){.gate = e->weights,
                                        .up = e->weights + e->n,
                                        .down = e->weights + 2 * (size_t)e->n,
                                        .x = e->x,
                                        .ids = e->ids,
                                        .weights = e->route,
                                        .out = e->out,
                                        .n_tokens = e->n_tokens,
                                        .n_prompt = e->n_tokens,
                                        .n_experts = e->n,
                                        .top_k = e->top_k});
    td_status st = td_stream_sync(e->stream, err);
    if (st != TD_OK) return st;
    seconds[i] = td_clock_s() - start;
  }
  const double ops = 6.0 * c->dim * c->expert_dim * e->top_k * e->n_tokens;
  *gflops = ops / td_median(seconds + 1, REPEAT) * 1e-9;
  return TD_OK;
}

static void destroy(experts *e) {
  if (e->stream) td_stream_close(e->stream);
  if (e->dev) td_dev_free(e->dev, e->memory);
  if (e->dev) td_dev_close(e->dev);
  free(e->weights);
  free(e->x);
  free(e->out);
  free(e->route);
  free(e->ids);
}

td_status td_rig_measure(td_rig *out, const td_model *model, unsigned n_threads, td_err *err) {
  const td_machine machine = td_machine_get();
  td_read_speed reads = {0};
  experts e = {0};
  *out = (td_rig){.memory_bytes = td_memory_limit_bytes(), .n_nodes = 1, .layer_us = 20};
  td_status st = td_read_speed_open(&reads, n_threads, err);
  if (st == TD_OK) {
    out->n_cores = td_thread_pool_size(reads.pool);
    out->read_gbps = td_read_speed_gbps(&reads);
    out->remote_gbps = td_read_speed_remote_gbps(&reads);
    if (out->remote_gbps > 0) out->n_nodes = td_nodes_get().n;
    snprintf(out->name, sizeof out->name, "this: %u threads, %.90s", out->n_cores, machine.cpu);
  }
  td_read_speed_close(&reads);
  if (st == TD_OK) st = make(&e, model, n_threads, err);
  if (st == TD_OK) st = compute(&e, &out->gflops, err);
  destroy(&e);
  return st;
}

bool td_rig_is_this(const char *machine) {
  return strcmp(machine, "this") == 0;
}

td_status td_rig_open(td_rig *out, const char *machine, const td_model *model, unsigned n_threads,
                      td_err *err) {
  static const char this[] = "this";
  const size_t n = sizeof this - 1;
  if (strncmp(machine, this, n) || (machine[n] && machine[n] != '+'))
    return td_rig_read(out, machine, err);
  td_status st = td_rig_measure(out, model, n_threads, err);
  return st == TD_OK ? td_rig_use_cards(out, machine[n] ? machine + n : NULL, err) : st;
}
