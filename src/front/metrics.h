// src/front/metrics.h - what the server counts about its requests, and GET /metrics:
// Prometheus' text format, version 0.0.4. Names and meanings follow vLLM's, with tandem_ in front.
#ifndef TD_FRONT_METRICS_H
#define TD_FRONT_METRICS_H

#include <stdint.h>

#include "base/buf.h"
#include "front/backend.h"

#define TD_METRICS_TYPE "text/plain; version=0.0.4; charset=utf-8"

#define TD_HISTOGRAM_BOUNDS 18

typedef struct {
  const double
      *bounds; // [TD_HISTOGRAM_BOUNDS] ascending; a value belongs to the first not below it
  uint64_t counts[TD_HISTOGRAM_BOUNDS + 1]; // the last: above all bounds
  double sum;
} td_histogram;

// Every choice of a response counts as a request of its own.
typedef enum {
  TD_FINISH_STOP,
  TD_FINISH_LENGTH,
  TD_FINISH_ABORT, // the client went away, or another choice of its request failed
  TD_FINISH_ERROR,
  TD_N_FINISHES,
} td_finish;

typedef struct {
  uint64_t n_finished[TD_N_FINISHES];
  uint64_t n_prompt,
      n_cached;             // tokens of prompts that were read to their end; of them from the cache
  uint64_t n_output;        // tokens of answers
  td_histogram first_token; // seconds from the request's arrival
  td_histogram next_token;  // seconds between two tokens of an answer
  td_histogram whole;       // seconds from arrival to the last token, of answers that ended well
} td_metrics;

// What is not counted but looked up when asked.
typedef struct {
  const char *model;
  uint32_t n_running, n_waiting, n_workers;
  td_backend_worker workers[TD_BACKEND_MAX_WORKERS];
  td_kv_disk_stats kv_disk; // written when has_kv_dir
  bool has_kv_dir;
  double kv_use; // pages that running requests hold over all pages, 0 to 1
  uint64_t n_preemptions;
} td_metrics_now;

void td_metrics_init(td_metrics *metrics);
void td_histogram_add(td_histogram *histogram, uint64_t ns);
void td_metrics_write(td_buf *out, const td_metrics *metrics, const td_metrics_now *now);

#endif
