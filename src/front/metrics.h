// src/front/metrics.h - request counters and GET /metrics in Prometheus' text format, version
// 0.0.4. Names and meanings follow vLLM's, with the prefix tandem_; what is the same there is
// written under its prefix as well. Thread: the loop's.
#pragma once

#include <stdint.h>

#include "base/buf.h"
#include "front/backend.h"
#include "front/routes.h"

#define TD_METRICS_TYPE "text/plain; version=0.0.4; charset=utf-8"

// Where a model is in its life, and what /health, /v1/models and /metrics call that.
//   SLEEPING   neither weights nor workers
//   LOADING    weights are read or workers start: at first, after a sleep, after a crash
//   STUCK      a worker makes no progress
//   FAILED     the last attempt to load it failed, or its workers did; the log says why
//   UNLOADING  workers end, and KV pages are written to --kv-dir
#define TD_HOST_STATES(X)                                                                          \
  X(SLEEPING, "sleeping")                                                                          \
  X(LOADING, "loading")                                                                            \
  X(READY, "ok")                                                                                   \
  X(STUCK, "stuck")                                                                                \
  X(FAILED, "failed")                                                                              \
  X(UNLOADING, "unloading")

typedef enum {
#define X(id, name) TD_HOST_##id,
  TD_HOST_STATES(X)
#undef X
      TD_N_HOST_STATES
} td_host_state;

static inline const char *td_host_state_name(td_host_state state) {
  static const char *const names[] = {
#define X(id, name) name,
      TD_HOST_STATES(X)
#undef X
  };
  return names[state];
}

#define TD_HISTOGRAM_BOUNDS 18

typedef struct {
  const double *bounds; // [TD_HISTOGRAM_BOUNDS] ascending, seconds; a value counts in the first
                        // bucket with bound >= value
  uint64_t counts[TD_HISTOGRAM_BOUNDS + 1]; // not cumulative; the last: above all bounds
  double sum;
} td_histogram;

// Each choice of a response counts as a request.
typedef enum {
  TD_FINISH_STOP,
  TD_FINISH_LENGTH,
  TD_FINISH_ABORT, // the client disconnected, or another choice of its request failed
  TD_FINISH_ERROR,
  TD_N_FINISHES,
} td_finish;

typedef struct {
  uint64_t n_finished[TD_N_FINISHES];
  // prompt tokens of completed prefills; of them from the prefix cache
  uint64_t n_prompt, n_cached;
  uint64_t n_output;               // generated tokens
  uint64_t n_accepted, n_rejected; // drafted tokens
  td_histogram first_token;        // TTFT, seconds from the request's arrival
  td_histogram next_token;         // ITL, seconds between consecutive tokens
  td_histogram whole; // end-to-end latency, seconds, of requests that ended with stop or length
} td_metrics;

// A model's counters, and values read at the time of the scrape.
typedef struct {
  const td_metrics *counts;
  const char *model;
  td_host_state state;
  uint64_t n_loads; // times it was loaded
  uint32_t n_running, n_waiting, n_workers;
  td_backend_worker workers[TD_BACKEND_MAX_WORKERS];
  td_kv_disk_stats kv_disk;      // written when has_kv_dir
  uint32_t page_tokens, n_pages; // of its KV cache; 0: not loaded
  double kv_use;                 // share of KV pages held by running requests, 0 to 1
  uint64_t n_preemptions;
} td_metrics_model;

typedef struct {
  td_metrics_model *models; // [n]
  uint32_t n;
  const uint64_t *n_routed; // [TD_N_ROUTES] HTTP requests whose route was found
  bool has_kv_dir;
  int64_t started;                               // Unix time
  uint64_t memory_bytes, memory_available_bytes; // see base/mem_info.h
} td_metrics_now;

void td_metrics_init(td_metrics *metrics);
void td_histogram_add(td_histogram *histogram, uint64_t ns);
void td_metrics_write(td_buf *out, const td_metrics_now *now);
