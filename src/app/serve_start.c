// src/app/serve_start.c - from an open port to a worker: the weights, then the process.
#include <string.h>
#include <unistd.h>

#include "app/serve.h"
#include "app/weights.h"
#include "base/log.h"

static td_status open_backend(td_serve *serve, td_err *err) {
  const td_options *o = serve->options;
  const td_session_opts *m = &serve->model_opts;
  td_backend_opts opts = {.model_dir = m->model_dir,
                          .device = m->device,
                          .ctx_size = m->ctx_size,
                          .max_batch = (uint32_t)o->max_batch,
                          .is_split = serve->is_split,
                          .prefill_threads = (uint32_t)o->prefill_threads,
                          .n_threads = m->n_threads,
                          .prefill_chunk = m->prefill_chunk,
                          .kv_dtype = m->kv_dtype,
                          .weights_fd = serve->weights_fd >= 0 ? serve->weights_fd : 0,
                          .trace_fd = td_trace_file_fd(serve->trace),
                          .stuck_after_s = (uint32_t)o->stuck_after_s,
                          .on_state = td_serve_on_state,
                          .ctx = serve};
  return td_backend_open(&serve->backend, &serve->loop, &opts, err);
}

// On a thread of the loop's pool: reading a checkpoint may take minutes.
static void load_weights(uv_work_t *work) {
  td_serve *serve = work->data;
  const td_session_opts *m = &serve->model_opts;
  // A GPU has a copy of its own and needs no other.
  bool needs_none = m->weights == TD_WEIGHTS_AUTO && strcmp(m->device, "cpu") != 0;
  const td_weights_opts opts = {.mode = needs_none ? TD_WEIGHTS_MMAP : m->weights,
                                .model_dir = m->model_dir,
                                .ctx_size = m->ctx_size,
                                .kv_dtype = m->kv_dtype,
                                .canceled = &serve->weights_canceled};
  serve->weights_err.code = TD_OK;
  serve->weights_err.code = td_weights_open(&serve->weights_fd, &opts, &serve->weights_err);
}

static void after_weights(uv_work_t *work, int status) {
  (void)status; // nobody cancels the work itself
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
