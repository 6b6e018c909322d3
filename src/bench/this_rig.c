// src/bench/this_rig.c - reads, arithmetic and the cost of a layer on this machine's CPU; its
// drive.
#include "bench/this_rig.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/mem_info.h"
#include "base/stats.h"
#include "bench/formats.h"
#include "bench/machine.h"
#include "bench/mem_bandwidth.h"
#include "device/device.h"
#include "engine/engine.h"
#include "model/drive/places.h"
#include "model/drive/reader.h"
#include "runtime/predict.h"

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

// ---- a drive ------------------------------------------------------------------------------------

enum { DRIVE_READS = 64, DRIVE_READ_BYTES = 1 << 20 };

static void note_read(void *ctx, const td_drive_read *read, int error) {
  atomic_uint *n_left = ctx;
  (void)read;
  (void)error;
  atomic_fetch_sub(n_left, 1);
}

// Reads that lie anywhere in the files, until a second is over. Returns 10^9 bytes/s.
static double read_files(td_drive_reader *reader, const td_store *store, char *memory,
                         atomic_uint *n_left) {
  const double begin_s = td_clock_s();
  uint64_t random = 1;
  while (td_clock_s() < begin_s + 1) {
    atomic_store(n_left, DRIVE_READS);
    for (uint32_t i = 0; i < DRIVE_READS; i++) {
      random = random * 6364136223846793005u + 1442695040888963407u;
      const uint32_t shard = (uint32_t)((random >> 33) % td_store_n_shards(store));
      const uint64_t n = td_store_shard(store, shard).n_bytes / DRIVE_READ_BYTES;
      const td_drive_read read = {.to = memory + (size_t)i * DRIVE_READ_BYTES,
                                  .offset = n ? (random >> 16) % n * DRIVE_READ_BYTES : 0,
                                  .n_bytes = DRIVE_READ_BYTES,
                                  .n_needed = DRIVE_READ_BYTES,
                                  .shard = shard};
      if (!n || !td_drive_reader_queue(reader, &read)) atomic_fetch_sub(n_left, 1);
    }
    while (atomic_load(n_left))
      usleep(100);
  }
  const td_drive_stats stats = td_drive_reader_stats(reader);
  return (double)stats.n_bytes / (td_clock_s() - begin_s) * 1e-9;
}

double td_rig_drive_gbps(const td_model *model) {
  const td_store *store = td_model_store(model);
  const size_t n_shards = store ? td_store_n_shards(store) : 0;
  td_file_id *ids = calloc(n_shards + 1, sizeof *ids);
  char *memory = aligned_alloc(TD_DRIVE_ALIGN, DRIVE_READS * DRIVE_READ_BYTES);
  td_drive_reader *reader = NULL;
  atomic_uint n_left = 0;
  td_err err;
  td_status st = ids && memory && n_shards ? TD_OK : TD_ENOMEM;
  for (size_t i = 0; i < n_shards && st == TD_OK; i++)
    st = td_file_id_of(&ids[i], td_store_shard(store, i).path, &err);
  const td_drive_reader_opts opts = {.store = store, .ids = ids, .done = note_read, .ctx = &n_left};
  if (st == TD_OK) st = td_drive_reader_open(&reader, &opts, &err);
  const double gbps = st == TD_OK ? read_files(reader, store, memory, &n_left) : 0;
  if (reader) td_drive_reader_close(reader);
  free(memory);
  free(ids);
  return gbps;
}

// The CPU alone: what it reads, of its own and of other NUMA nodes' memory, and what it computes
// with experts like the model's, each with as many tokens as in a usual step of a prompt; and what
// the drive with the model's files reads, if they are larger than memory.
// n_threads: 0 is one a CPU. Takes seconds. TD_ENOMEM.
static td_status measure(td_rig *out, const td_model *model, unsigned n_threads, td_err *err) {
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
  const td_plan_load load = td_plan_load_of(model);
  if (st == TD_OK && td_drive_plan_of(&load, out, 0).is_needed)
    out->drive_gbps = td_rig_drive_gbps(model);
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
  td_status st = measure(out, model, n_threads, err);
  return st == TD_OK ? td_rig_use_cards(out, machine[n] ? machine + n : NULL, err) : st;
}
