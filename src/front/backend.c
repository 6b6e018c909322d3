// src/front/backend.c - the calls of backend.h, opening and closing, and worker state changes.
// submit copies a request; request_flow.c takes it from there. Thread: the loop's.
#include "front/backend.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/thread_pool.h"
#include "front/backend_impl.h"
#include "kv/pool.h"

// Of the threads, prefill's part beside decode. A GPU computes streamed experts itself.
enum { CPU_PART = 2, GPU_PART = 8 };
#define MAX_WAITING 1024 // requests in the queue; half of it for a single tenant
#define STUCK_S     30u  // unless asked otherwise

// ---- KV events --------------------------------------------------------------------------------

// A page's tokens are among the keys of a request that runs.
static void on_kv_change(void *ctx, const td_kv_change *change) {
  const td_backend *b = ctx;
  const uintptr_t page = (uintptr_t)change->tokens;
  td_kv_origin origin = {.ids = change->tokens};
  char digits[17];
  for (uint32_t i = 0; i < b->n_slots && change->tokens; i++) {
    const td_front_request *r = b->slots[i];
    if (!r) continue;
    const uint32_t n = r->out.submit.n_prompt + r->n_output;
    if (change->salt && !origin.salt && r->salt == change->salt) origin.salt = r->salt_text;
    if (page < (uintptr_t)r->keys || page >= (uintptr_t)(r->keys + n)) continue;
    origin.at = (uint32_t)(change->tokens - r->keys);
    origin.ids = r->out.tokens + origin.at;
    origin.pictures = r->pictures;
  }
  if (change->salt && !origin.salt) {
    snprintf(digits, sizeof digits, "%016" PRIx64, change->salt);
    origin.salt = digits;
  }
  td_kv_events_add(b->opts.kv_events, change, &origin);
}

// ---- worker state -----------------------------------------------------------------------------

static bool is_drive_busy(void *ctx) {
  return td_expert_watch_is_busy(ctx);
}

static td_status open_tier(td_backend *b, td_err *err) {
  const td_kv_disk_opts opts = {.loop = b->loop,
                                .dir = b->opts.kv_dir,
                                .model = b->opts.kv_model,
                                .kv = td_sched_kv(b->sched),
                                .pool_fd = b->kv_fd,
                                .flush_ns = b->opts.kv_flush_s * 1000000000ull,
                                .is_drive_busy = is_drive_busy,
                                .ctx = &b->watch};
  td_status st = TD_OK;
  if (b->opts.weights_fd)
    st = td_expert_watch_open(&b->watch, b->opts.weights_fd, b->opts.runtime.mirror,
                              td_kv_dir_path(b->opts.kv_dir), err);
  if (st == TD_OK) st = td_kv_disk_open(&b->tier, &opts, err);
  if (st != TD_EUNSUPPORTED) return st;
  td_warn("serving without --kv-dir: %s", err->msg);
  return TD_OK;
}

// Page content also depends on the kernels and the GPU, which only READY identifies, and on whether
// the kernels of decode may have computed a prompt's pages.
static void add_kernels(td_digest *model, const td_wire_ready *info, bool has_output) {
  td_sha256 sha;
  td_sha256_begin(&sha);
  td_sha256_add(&sha, model, sizeof *model);
  td_sha256_add(&sha, info->isa, strnlen(info->isa, sizeof info->isa));
  td_sha256_add(&sha, info->gpu, strnlen(info->gpu, sizeof info->gpu));
  if (has_output) td_sha256_add(&sha, "output", 6);
  td_sha256_end(&sha, model);
}

static td_status on_ready(void *ctx, const td_wire_ready *info, td_err *err) {
  td_backend *b = ((td_worker_handle *)ctx)->backend;
  if (!info->n_vocab || !info->n_ctx || !info->page_tokens || !info->n_pages ||
      info->max_seqs != b->opts.max_batch)
    return td_fail(err, TD_EFORMAT, "a worker process sent a malformed READY");
  if (!b->sched) {
    add_kernels(&b->opts.kv_model, info, b->opts.cache_output);
    uint32_t n_threads = b->opts.runtime.n_threads ? b->opts.runtime.n_threads : td_cpu_count();
    b->n_threads = n_threads;
    const td_sched_opts opts = {
        .max_seqs = info->max_seqs,
        .n_pages = info->n_pages,
        .page_tokens = info->page_tokens,
        .max_waiting = MAX_WAITING,
        .kv_root = b->opts.kv_dir || b->opts.kv_events ? &b->opts.kv_model : NULL,
        .kv_listener = {b->opts.kv_events ? on_kv_change : NULL, b},
        .prefill_ahead = b->opts.runtime.prefill_chunk ? b->opts.runtime.prefill_chunk
                                                       : info->prefill_chunk,
        .n_threads = n_threads,
        .prefill_threads = b->opts.prefill_threads
                               ? b->opts.prefill_threads
                               : n_threads / (b->opts.has_gpus ? GPU_PART : CPU_PART),
        .shares_output = b->opts.cache_output};
    td_status st = td_sched_open(&b->sched, &opts, err);
    if (st == TD_OK && b->opts.kv_dir) st = open_tier(b, err);
    if (st != TD_OK) return st;
  } else if (info->n_ctx != b->info.n_ctx || info->n_pages != b->info.n_pages ||
             info->n_vocab != b->info.n_vocab || info->flags != b->info.flags) {
    return td_fail(err, TD_EFORMAT, "the checkpoint has changed under the server; start it again");
  }
  if (ctx == &b->workers[0] || !b->info.n_vocab) b->info = *info;
  return TD_OK;
}

static void on_state(void *ctx, td_backend_state state) {
  td_worker_handle *w = ctx;
  td_backend *b = w->backend;
  if (state == TD_BACKEND_FAILED) td_backend_fail_all(b, TD_BACKEND_FAILED_TEXT);
  if (state == TD_BACKEND_READY) td_backend_pump(b);
  td_backend_state now = td_backend_state_of(b);
  if (b->is_closing || now == b->told) return;
  b->told = now;
  if (b->opts.on_state) b->opts.on_state(b->opts.ctx, now);
}

// ---- open and close ---------------------------------------------------------------------------

static void free_backend(td_backend *b) {
  if (b->sched && b->opts.kv_events) on_kv_change(b, &(td_kv_change){.kind = TD_KV_CLEARED});
  td_kv_events_send(b->opts.kv_events);
  td_sched_close(b->sched);
  if (b->kv_fd >= 0) close(b->kv_fd);
  td_expert_watch_close(&b->watch);
  free(b->slots);
  free(b);
}

// No worker writes to the pages any more, and the disk tier has been flushed.
static void on_tier_closed(void *ctx) {
  td_backend *b = ctx;
  void (*closed)(void *) = b->closed;
  void *closed_ctx = b->closed_ctx;
  free_backend(b);
  if (closed) closed(closed_ctx);
}

static void on_closed(void *ctx) {
  td_worker_handle *w = ctx;
  td_backend *b = w->backend;
  w->supervisor = NULL;
  if (--b->n_open) return;
  td_backend_fail_all(b, "the server is shutting down");
  td_kv_disk *tier = b->tier;
  b->tier = NULL;
  td_kv_disk_close(tier, on_tier_closed, b);
}

// Frees b once the last worker is gone, or at once if there is none.
static void close_workers(td_backend *b) {
  b->is_closing = true;
  uint32_t n = b->n_open;
  if (!n) free_backend(b);
  for (uint32_t i = 0; i < n; i++)
    td_supervisor_close(b->workers[i].supervisor, on_closed, &b->workers[i]);
}

static td_status open_worker(td_backend *b, uv_loop_t *loop, const td_worker_opts *opts,
                             td_err *err) {
  td_worker_handle *w = &b->workers[b->n_open];
  w->backend = b;
  uint64_t stuck_s = b->opts.stuck_after_s ? b->opts.stuck_after_s : STUCK_S;
  const td_supervisor_opts supervisor = {.worker = *opts,
                                         .kv_fd = b->kv_fd,
                                         .stuck_ns = stuck_s * 1000000000u,
                                         .kill_ns = 2 * stuck_s * 1000000000u,
                                         .on_ready = on_ready,
                                         .on_record = td_backend_on_record,
                                         .on_space = td_backend_on_space,
                                         .on_death = td_backend_on_death,
                                         .on_state = on_state,
                                         .ctx = w};
  td_status st = td_supervisor_open(&w->supervisor, loop, &supervisor, err);
  if (st == TD_OK) b->n_open++;
  return st;
}

// Both divide their GPU's memory alike (td_gpu_pair), so that as many KV pages fit on either.
static td_status open_gpu_workers(td_backend *b, uv_loop_t *loop, td_worker_opts *w, td_err *err) {
  static const td_worker_role roles[] = {TD_ROLE_PREFILL, TD_ROLE_DECODE};
  enum { PARALLEL_OFF = 2 };
  td_device_list list;
  td_status st = td_device_list_parse(&list, w->runtime.devices, err);
  if (st == TD_OK && list.n != TD_COUNT(roles)) st = td_fail(err, TD_EINVAL, "give two GPUs");
  w->runtime.expert_parallel = PARALLEL_OFF;
  for (size_t i = 0; i < TD_COUNT(roles) && st == TD_OK; i++) {
    char index[16];
    snprintf(index, sizeof index, "%u", list.index[i]);
    w->runtime.devices = index;
    w->role = roles[i];
    st = open_worker(b, loop, w, err);
  }
  return st;
}

static td_status open_workers(td_backend *b, uv_loop_t *loop, const td_backend_opts *opts,
                              td_err *err) {
  td_worker_opts w = {.runtime = opts->runtime,
                      .role = TD_ROLE_BOTH,
                      .max_batch = opts->max_batch,
                      .kv_tokens = opts->kv_tokens,
                      .weights_fd = (uint32_t)opts->weights_fd,
                      .trace_fd = (uint32_t)opts->trace_fd,
                      .images_fd = (uint32_t)opts->images_fd,
                      .decode_slowdown = opts->decode_slowdown,
                      .gpu_mib = opts->gpu_mib};
  if (b->n_workers == 1) return open_worker(b, loop, &w, err);
  if (opts->has_gpus) return open_gpu_workers(b, loop, &w, err);
  TD_CHECK(opts->runtime.prefill_chunk); // must be set: the decode worker's READY does not know it
  w.role = TD_ROLE_PREFILL;
  td_status st = open_worker(b, loop, &w, err);
  if (st != TD_OK) return st;
  w.role = TD_ROLE_DECODE;
  return open_worker(b, loop, &w, err);
}

td_status td_backend_open(td_backend **out, uv_loop_t *loop, const td_backend_opts *opts,
                          td_err *err) {
  *out = NULL;
  td_backend *b = calloc(1, sizeof *b);
  if (!b) return td_fail(err, TD_ENOMEM, "out of memory");
  b->opts = *opts;
  b->loop = loop;
  // borrowed during this call only
#define X(field, option) b->opts.runtime.field = NULL;
  TD_RUNTIME_TEXTS(X)
#undef X
  b->n_workers = opts->is_split ? 2 : 1;
  b->kv_fd = -1;
  b->n_slots = MAX_WAITING + opts->max_batch;
  b->slots = calloc(b->n_slots, sizeof(td_front_request *));
  td_status st = b->slots ? td_kv_pool_create(&b->kv_fd, err)
                          : td_fail(err, TD_ENOMEM, "out of memory");
  if (st == TD_OK) st = open_workers(b, loop, opts, err);
  if (st != TD_OK) {
    close_workers(b);
    return st;
  }
  *out = b;
  return TD_OK;
}

void td_backend_close(td_backend *b, void (*closed)(void *ctx), void *ctx) {
  b->closed = closed;
  b->closed_ctx = ctx;
  close_workers(b);
}

// ---- calls ------------------------------------------------------------------------------------

// Worst first.
static const td_backend_state states[] = {TD_BACKEND_FAILED, TD_BACKEND_LOADING, TD_BACKEND_STUCK};

td_backend_state td_backend_state_of(const td_backend *b) {
  for (size_t i = 0; i < TD_COUNT(states); i++) {
    for (uint32_t j = 0; j < b->n_workers; j++) {
      const td_supervisor *s = b->workers[j].supervisor;
      if ((s ? td_supervisor_state(s) : TD_BACKEND_FAILED) == states[i]) return states[i];
    }
  }
  return TD_BACKEND_READY;
}

const char *td_backend_reason(const td_backend *b) {
  for (uint32_t i = 0; i < b->n_workers; i++) {
    const td_supervisor *s = b->workers[i].supervisor;
    if (s && td_supervisor_state(s) == TD_BACKEND_FAILED) return td_supervisor_reason(s);
  }
  return b->is_closing ? "the server is shutting down" : "";
}

td_wire_ready td_backend_info(const td_backend *b) {
  return b->info;
}

uint32_t td_backend_n_running(const td_backend *b) {
  return b->sched ? td_sched_n_running(b->sched) : 0;
}

uint32_t td_backend_n_waiting(const td_backend *b) {
  return b->sched ? td_sched_n_waiting(b->sched) : 0;
}

uint32_t td_backend_workers(const td_backend *b, td_backend_worker out[TD_BACKEND_MAX_WORKERS]) {
  for (uint32_t i = 0; i < b->n_workers; i++) {
    const td_supervisor *s = b->workers[i].supervisor;
    uint32_t role = b->n_workers == 1 ? TD_ROLE_BOTH : i == 0 ? TD_ROLE_PREFILL : TD_ROLE_DECODE;
    out[i] = (td_backend_worker){
        .role = td_worker_role_name(role), .state = TD_BACKEND_FAILED, .reason = ""};
    if (!s) continue;
    td_wire_heartbeat heartbeat = td_supervisor_heartbeat(s);
    out[i].state = td_supervisor_state(s);
    out[i].reason = td_supervisor_reason(s);
    out[i].n_restarts = td_supervisor_n_restarts(s);
    out[i].n_steps = heartbeat.n_steps;
    out[i].n_threads = heartbeat.n_threads;
    out[i].cache = heartbeat.cache;
    out[i].drive = heartbeat.drive;
    out[i].gpu_bytes = heartbeat.gpu_bytes;
    out[i].gpu_free_bytes = heartbeat.gpu_free_bytes;
    for (uint32_t j = 0; j < b->n_slots; j++)
      out[i].n_running += b->slots[j] && b->slots[j]->at == &b->workers[i];
  }
  return b->n_workers;
}

td_kv_disk_stats td_backend_kv_disk(const td_backend *b) {
  return td_kv_disk_stats_of(b->tier);
}

uint64_t td_backend_n_preemptions(const td_backend *b) {
  return b->sched ? td_sched_n_preemptions(b->sched) : 0;
}

double td_backend_kv_use(const td_backend *b) {
  if (!b->sched) return 0;
  return 1 - (double)td_sched_n_free_pages(b->sched) / (double)b->info.n_pages;
}

bool td_backend_accepts(const td_backend *b) {
  return b->sched && !b->is_closing && td_backend_state_of(b) != TD_BACKEND_FAILED;
}

static td_front_request *copy_request(const td_backend *b, const td_request *q,
                                      const td_request_callbacks *callbacks) {
  td_front_request *r = calloc(1, sizeof *r);
  if (!r) return NULL;
  uint32_t room = b->info.n_ctx - q->n_prompt;
  uint32_t max_tokens = q->max_tokens < room ? q->max_tokens : room;
  r->callbacks = *callbacks;
  r->tenant = q->tenant;
  r->salt = q->salt;
  r->salt_text = q->salt_text ? strdup(q->salt_text) : NULL;
  r->out.submit = (td_wire_submit){.sampling = q->sampling,
                                   .n_prompt = q->n_prompt,
                                   .max_tokens = max_tokens,
                                   .n_bias = q->n_bias,
                                   .n_grammar = q->n_grammar,
                                   .flags = q->flags | (q->dry ? TD_SUBMIT_DRY : 0u),
                                   .min_tokens = q->min_tokens,
                                   .n_ends = q->n_ends};
  if (q->dry) r->out.dry = *q->dry;
  if (q->n_ends) memcpy(r->out.submit.ends, q->ends, q->n_ends * sizeof *q->ends);
  const size_t n_most = (size_t)q->n_prompt + max_tokens;
  r->out.tokens = malloc(n_most * sizeof *r->out.tokens);
  r->keys = q->pictures ? malloc(n_most * sizeof *r->keys) : r->out.tokens;
  r->out.bias = malloc((q->n_bias + (size_t)1) * sizeof *r->out.bias);
  r->out.grammar = malloc(q->n_grammar + (size_t)1);
  if (!r->out.tokens || !r->keys || !r->out.bias || !r->out.grammar ||
      (q->salt_text && !r->salt_text)) {
    td_backend_free_request(r);
    return NULL;
  }
  memcpy(r->out.tokens, q->prompt, q->n_prompt * sizeof *r->out.tokens);
  if (q->pictures) {
    r->pictures = td_pictures_hold(q->pictures);
    r->out.images = q->pictures->images + q->pictures->first;
    r->out.submit.n_images = (uint16_t)(q->pictures->n - q->pictures->first);
    memcpy(r->keys, q->prompt, q->n_prompt * sizeof *r->keys);
    td_pictures_key(q->pictures, r->keys);
  }
  if (q->n_grammar) memcpy(r->out.grammar, q->grammar, q->n_grammar);
  if (q->n_bias) memcpy(r->out.bias, q->bias, q->n_bias * sizeof *r->out.bias);
  return r;
}

// An id whose slot is free. One exists: n_slots is the scheduler's limit on requests.
static uint64_t new_id(td_backend *b) {
  for (uint32_t i = 0; i < b->n_slots; i++) {
    uint64_t id = ++b->n_submitted;
    if (!b->slots[id % b->n_slots]) return id;
  }
  return 0;
}

// Whether a grammar fits beside those of the tenant's other requests.
static td_status check_grammars(const td_backend *b, const td_request *q, td_err *err) {
  size_t n_bytes = q->n_grammar;
  for (uint32_t i = 0; q->n_grammar && i < b->n_slots; i++) {
    const td_front_request *r = b->slots[i];
    if (r && r->tenant == q->tenant) n_bytes += r->out.submit.n_grammar;
  }
  if (n_bytes <= TD_BACKEND_GRAMMAR_BYTES) return TD_OK;
  return td_fail(err, TD_EAGAIN,
                 "the schemas and grammars of your requests take more than %u MB: wait for some of "
                 "them to end",
                 TD_BACKEND_GRAMMAR_BYTES >> 20);
}

td_status td_backend_submit(td_backend *b, const td_request *q,
                            const td_request_callbacks *callbacks, uint64_t *id, td_err *err) {
  *id = 0;
  if (!td_backend_accepts(b)) return td_fail(err, TD_EAGAIN, "the worker process is not ready");
  td_status st = td_request_check(q, &b->info, err);
  if (st == TD_OK) st = check_grammars(b, q, err);
  if (st != TD_OK) return st;
  uint64_t fresh = new_id(b);
  if (!fresh) return td_fail(err, TD_EAGAIN, "the queue is full: %u requests wait", b->n_slots);
  td_front_request *r = copy_request(b, q, callbacks);
  if (!r) return td_fail(err, TD_ENOMEM, "out of memory for a prompt of %u tokens", q->n_prompt);
  const bool keeps = b->info.flags & TD_READY_STATES;
  const td_sched_job job = {.tokens = r->keys,
                            .n_prompt = q->n_prompt,
                            .max_tokens = r->out.submit.max_tokens,
                            .tenant = q->tenant,
                            .weight = q->weight,
                            .salt = q->salt,
                            .is_fresh = q->flags & TD_SUBMIT_SCORE_PROMPT,
                            .n_keep = keeps ? q->n_keep ? q->n_keep : q->n_prompt : 0};
  st = td_sched_submit(b->sched, fresh, &job, td_clock_ns(), err);
  if (st != TD_OK) {
    td_backend_free_request(r);
    return st == TD_ELIMIT ? td_fail(err, TD_EINVAL, "the KV pool holds less than the context")
                           : st;
  }
  r->out.id = *id = fresh;
  b->slots[fresh % b->n_slots] = r;
  td_backend_pump(b);
  return TD_OK;
}

uint32_t td_backend_retry_s(const td_backend *b) {
  uint64_t s = b->sched ? td_sched_retry_ns(b->sched, td_clock_ns()) / 1000000000u + 1 : 1;
  return s < 600 ? (uint32_t)s : 600;
}

void td_backend_cancel(td_backend *b, uint64_t id) {
  td_front_request *r = td_backend_find(b, id);
  if (!r || td_request_is_canceled(r->out.state)) return;
  if (td_request_is_loading(r->out.state)) {
    td_request_become(&r->out.state, TD_REQUEST_LOADING_CANCELED, id);
    td_kv_loading_cancel(r->loading);
  } else if (td_request_is_at_worker(r->out.state)) {
    td_request_become(&r->out.state, TD_REQUEST_CANCELED, id);
    td_outbox_enter(&r->at->outbox, &r->out); // the worker's DONE ends it
  } else {
    td_backend_end_request(b, r, NULL);
  }
  td_backend_pump(b);
}

// ---- requests that no worker could run ----------------------------------------------------------

td_status td_request_check(const td_request *q, const td_wire_ready *info, td_err *err) {
  if (q->n_prompt == 0) return td_fail(err, TD_EINVAL, "the prompt is empty");
  if (q->max_tokens == 0) return td_fail(err, TD_EINVAL, "max_tokens must be at least 1");
  if (q->n_prompt >= info->n_ctx) {
    return td_fail(err, TD_EINVAL,
                   "the prompt has %u tokens, the context holds %u, output included", q->n_prompt,
                   info->n_ctx);
  }
  if (q->n_bias > info->n_vocab)
    return td_fail(err, TD_EINVAL, "%u logit biases for %u tokens", q->n_bias, info->n_vocab);
  if (q->n_ends > TD_WIRE_MAX_ENDS) {
    return td_fail(err, TD_EINVAL, "%u end tokens; at most %d may be given", q->n_ends,
                   TD_WIRE_MAX_ENDS);
  }
  for (uint32_t i = 0; i < q->n_prompt; i++) {
    if (q->prompt[i] < 0 || (uint32_t)q->prompt[i] >= info->n_vocab) {
      return td_fail(err, TD_EINVAL, "token %d of the prompt is outside the vocabulary of %u",
                     q->prompt[i], info->n_vocab);
    }
  }
  return TD_OK;
}
