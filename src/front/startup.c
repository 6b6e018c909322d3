// src/front/startup.c - from an open port to running workers: loads the weights, then opens the
// backend.
#include <unistd.h>

#include "base/log.h"
#include "front/serve_impl.h"
#include "kv/plan.h"
#include "model/fingerprint.h"
#include "runtime/weights.h"

#define GIB ((double)(1 << 30))

static td_status open_backend(td_serve *serve, td_err *err) {
  const td_options *o = serve->options;
  td_backend_opts opts = {.runtime = serve->runtime,
                          .max_batch = (uint32_t)o->max_batch,
                          .kv_tokens = (uint32_t)o->kv_tokens,
                          .is_split = serve->is_split,
                          .prefill_threads = (uint32_t)o->prefill_threads,
                          .decode_slowdown = (uint32_t)o->decode_slowdown,
                          .weights_fd = serve->weights_fd >= 0 ? serve->weights_fd : 0,
                          .kv_dir = serve->kv_dir,
                          .kv_model = serve->kv_model,
                          .kv_flush_s = (uint32_t)o->drain_timeout_s,
                          .trace_fd = td_trace_file_fd(serve->trace),
                          .stuck_after_s = (uint32_t)o->stuck_after_s,
                          .on_state = td_serve_on_state,
                          .ctx = serve};
  return td_backend_open(&serve->backend, &serve->loop, &opts, err);
}

// Fingerprint of all that determines KV content: weights, KV format and activation precision.
static td_status identify(td_serve *serve, td_err *err) {
  const td_runtime_opts *r = &serve->runtime;
  const uint32_t page_tokens = TD_KV_PAGE_TOKENS;
  td_sha256 sha;
  td_sha256_begin(&sha);
  td_sha256_add(&sha, TD_VERSION, sizeof TD_VERSION);
  td_sha256_add(&sha, &page_tokens, sizeof page_tokens);
#define X(type, field, option, least, most, in_kv)                                                 \
  if (in_kv) td_sha256_add(&sha, &r->field, sizeof r->field);
  TD_RUNTIME_NUMBERS(X)
#undef X
  td_status st = td_model_fingerprint(&sha, r->model_dir, err);
  td_sha256_end(&sha, &serve->kv_model);
  return st;
}

// If another process uses the directory, the server runs without it.
static td_status open_kv_dir(td_serve *serve, td_err *err) {
  const td_options *o = serve->options;
  if (!o->kv_dir) return TD_OK;
  td_status st = identify(serve, err);
  uint64_t max_bytes = (uint64_t)(o->kv_dir_gib * GIB);
  if (st == TD_OK) st = td_kv_dir_open(&serve->kv_dir, o->kv_dir, max_bytes, err);
  if (st == TD_OK) {
    td_info("--kv-dir %s: %.2f of %.2f GiB are used", o->kv_dir,
            (double)td_kv_dir_bytes(serve->kv_dir) / GIB, o->kv_dir_gib);
  }
  if (st != TD_EAGAIN) return st;
  td_warn("--kv-dir %s; serving without it", err->msg);
  return TD_OK;
}

// On the thread pool: reading a checkpoint may take minutes.
static void load_weights(uv_work_t *work) {
  td_serve *serve = work->data;
  const td_weights_opts opts = {.runtime = &serve->runtime,
                                .canceled = &serve->weights_canceled,
                                .placement = serve->placement};
  serve->weights_err.code = TD_OK;
  td_status st = open_kv_dir(serve, &serve->weights_err);
  if (st == TD_OK) st = td_weights_open(&serve->weights_fd, &opts, &serve->weights_err);
  serve->weights_err.code = st;
}

static void after_weights(uv_work_t *work, int status) {
  (void)status; // the work itself is never canceled
  td_serve *serve = work->data;
  if (serve->stopping) return;
  td_err *err = &serve->weights_err;
  if (err->code == TD_OK && open_backend(serve, err) == TD_OK) return;
  td_error("%s", err->msg);
  td_serve_stop(serve, 1);
}

void td_serve_start(td_serve *serve) {
  serve->weights_work.data = serve;
  TD_CHECK(uv_queue_work(&serve->loop, &serve->weights_work, load_weights, after_weights) == 0);
}
