// src/worker/worker.c - opening, and the loop.
// One thread, beside which another makes the masks of grammars. Messages are received and sent
// between steps, and a step is bounded by prefill_chunk, so a cancellation or a heartbeat is
// delayed by at most one step. Steps of prompts whose experts are read from a drive to a CPU are
// longer: messages are received meanwhile, and a step that nobody wants any more is abandoned.
// Where experts stream to a GPU, a second engine on it prefills long prompts: its work is queued a
// bounded time ahead between the steps of the first, which decode.
#include "worker/worker.h"

#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/jitter.h"
#include "base/log.h"
#include "base/numa.h"
#include "base/thread_pool.h"
#include "base/trace.h"
#include "engine/attn/kind.h"
#include "tandem/kernels.h"
#include "worker/worker_impl.h"

#define HEARTBEAT_NS 500000000u // half of wire.h's one second, to leave time for a step

// ---- opening ----------------------------------------------------------------------------------

// Tokens per prefill step of the engine that also decodes.
static uint32_t usual_chunk(const td_worker *w) {
  const uint32_t usual = td_engine_prefill_chunk(w->config), most = w->devices.prefill_chunk;
  const bool is_second = w->streaming || (w->kv.transfer && w->opts.role == TD_ROLE_DECODE);
  return is_second && usual < most ? usual : most;
}

// Opens the engine that streams experts, and closes it again where that never pays.
static td_status open_streaming(td_worker *w, td_engine_opts *opts, td_err *err) {
  opts->stream_bytes = w->devices.stream_bytes;
  opts->break_even_tokens = w->devices.stream_from;
  opts->max_step_tokens = w->devices.prefill_chunk;
  opts->writes_are_noted = opts->is_confinable = true;
  w->streaming_opts = *opts;
  td_status st = td_engine_open(&w->streaming, w->model, w->devices.dev, opts, err);
  opts->stream_bytes = 0;
  if (st != TD_OK || td_engine_stream_tokens(w->streaming)) return st;
  td_engine_close(w->streaming);
  w->streaming = NULL;
  return TD_OK;
}

// Of a step; 0: this worker drafts nothing.
static uint32_t max_drafts(const td_worker *w) {
  return w->opts.role == TD_ROLE_PREFILL ? 0 : w->devices.max_drafts;
}

static bool is_unwanted(void *ctx);

static td_status open_engine(td_worker *w, td_err *err) {
  td_engine_opts opts = {
      .n_pages = w->kv.pool.plan.n_pages,
      .page_tokens = w->kv.layout.page_tokens,
      .max_step_seqs = w->opts.max_batch,
      .max_seq_tokens = w->kv.pool.plan.n_ctx,
      .kv_dtype = w->opts.runtime.kv_dtype,
      .kv_pages = w->kv.pages,
      .transfer = w->kv.transfer,
      .arena = w->arena,
      .expert_dev = w->devices.expert_dev,
      .vision = w->devices.vision,
      .n_gpu_expert_layers = w->devices.n_gpu_expert_layers,
      .n_streamed_dense = w->devices.n_streamed_dense,
  };
  td_devices_use_peers(&w->devices, &opts);
  td_status st = w->devices.stream_bytes ? open_streaming(w, &opts, err) : TD_OK;
  if (st != TD_OK) return st;
  if (w->streaming) opts.n_peers = 0; // prompts on all devices are for that engine
  opts.max_drafts = max_drafts(w);
  opts.has_draft_layer = w->has_draft_layer;
  opts.max_step_tokens = td_step_max_tokens(w->opts.max_batch, usual_chunk(w));
  opts.is_urgent = true;
  opts.is_confinable = false;
  opts.is_unwanted = is_unwanted;
  opts.unwanted_ctx = w;
  td_devices_use_cache(&w->devices, w->model, &opts);
  return td_engine_open(&w->engine, w->model, w->devices.dev, &opts, err);
}

// The vocabulary by its bytes, for grammars. A checkpoint without a tokenizer is served without
// them.
static td_status open_grammars(td_worker *w, td_err *err) {
  td_tokenizer *tok;
  td_err why;
  if (td_tokenizer_open(&tok, w->opts.runtime.model_dir, &why) != TD_OK) {
    td_debug("grammars are not available: %s", why.msg);
    return TD_OK;
  }
  td_status st = td_token_index_open(&w->tokens, tok, w->config->n_vocab, err);
  td_tokenizer_close(tok);
  if (st == TD_OK) st = td_grammars_open(&w->grammars, w->tokens, err);
  if (st != TD_OK) return st;
  w->masks_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  if (w->masks_fd < 0) return td_fail(err, TD_EIO, "eventfd: %s", strerror(errno));
  return td_grammars_start(w->grammars, w->masks_fd, err);
}

// Whether requests draft tokens: not where a rejected one would leave a trace, or a drafted one
// would be computed by other kernels than it is alone.
static void choose_drafts(td_worker *w) {
  const bool has_cache = td_engine_cache_stats(w->engine).n_slots > 0;
  const char *why = td_draft_hindrance(&w->kv.layout, has_cache);
  const uint32_t max_tokens = w->opts.max_batch + TD_DRAFT_STEP;
  const bool is_on = max_drafts(w) > 0;
  if (is_on && why) td_info("no tokens are drafted: %s", why);
  if (!is_on || why) return;
  w->step.draft_mode = w->opts.runtime.draft;
  w->step.max_drafts = max_drafts(w);
  w->step.max_draft_tokens = w->devices.placement.is_discrete ? TD_DRAFT_GPU_TOKENS : max_tokens;
}

static td_status open_tables(td_worker *w, td_err *err) {
  const td_vision_config *vision = &w->config->vision;
  const bool sees = w->devices.vision != NULL;
  const td_request_limits limits = {.n_vocab = w->config->n_vocab,
                                    .n_ctx = w->kv.pool.plan.n_ctx,
                                    .max_seqs = w->opts.max_batch,
                                    .n_pages = w->kv.pool.plan.n_pages,
                                    .page_tokens = w->kv.layout.page_tokens,
                                    .eos_ids = w->config->eos_ids,
                                    .n_eos = w->config->n_eos,
                                    .grammars = w->grammars,
                                    .tokens = w->tokens,
                                    .patch = sees ? vision->patch : 0,
                                    .merge = vision->merge,
                                    .images_fd = TD_WORKER_IMAGES_FD};
  td_status st = td_requests_open(&w->requests, &limits, err);
  if (st == TD_OK) st = td_step_open(&w->step, w->opts.max_batch, usual_chunk(w), err);
  if (st == TD_OK) choose_drafts(w);
  if (st == TD_OK && w->has_draft_layer) st = td_step_use_layer(&w->step, err);
  if (st != TD_OK || !w->streaming) return st;
  td_stream_pace_init(&w->pace, w->opts.decode_slowdown * 0.01);
  st = td_step_open(&w->stream_step, w->opts.max_batch, w->devices.prefill_chunk, err);
  return st == TD_OK && w->has_draft_layer ? td_step_use_layer(&w->stream_step, err) : st;
}

static td_status open_devices(td_worker *w, td_err *err) {
  const td_devices_opts opts = {.runtime = &w->opts.runtime,
                                .gpu_bytes = (uint64_t)w->opts.gpu_mib << 20,
                                .ends_with_process = true,
                                .role = w->opts.role,
                                .has_drive = w->arena != NULL,
                                .drafts = w->opts.runtime.draft != TD_DRAFT_OFF,
                                .max_seqs = w->opts.max_batch,
                                .kv_tokens = w->opts.kv_tokens};
  td_devices *d = &w->devices;
  td_status st = td_devices_open(d, &opts, w->model, err);
  if (st != TD_OK) return st;
  w->n_threads = d->n_threads;
  w->opts.runtime.kv_dtype = td_dev_kv_dtype(d->dev, w->opts.runtime.kv_dtype);
  td_dev_set_thread_limit(d->expert_dev ? d->expert_dev : d->dev, w->front_link.channel.lease);
  td_dev_set_progress_counter(d->dev, w->front_link.channel.pulse);
  if (d->expert_dev) td_dev_set_progress_counter(d->expert_dev, w->front_link.channel.pulse);
  td_devices_use_memory(d, w->model, w->arena);
  if (w->opts.images_fd) st = td_devices_open_vision(d, w->model, err);
  if (st != TD_OK) return st;
  size_t n_bytes;
  if (d->expert_dev && !td_model_memory(w->model, &n_bytes)) {
    td_info("experts are read through the page cache, from which they stream to the GPU more "
            "slowly; give --weights resident");
  }
  return TD_OK;
}

// A device uploads weights and loads kernels at first use. A long chunk, a short one and a decode
// step together use all of them, before the first request.
static td_status warm_up(td_worker *w, td_err *err) {
  enum { PAGES = 5, LONG = (PAGES - 1) * TD_KV_PAGE_TOKENS, SHORT = 32 };
  static const int32_t tokens[LONG] = {0}, pages[PAGES] = {0, 1, 2, 3, 4};
  static const uint32_t steps[] = {LONG, SHORT, 1};
  if (!w->devices.placement.is_discrete) return TD_OK;
  const td_kv_plan *plan = &w->kv.pool.plan;
  if (w->kv.transfer) td_kv_transfer_pause(w->kv.transfer, true);
  uint32_t n_pages = plan->n_pages < PAGES ? plan->n_pages : PAGES;
  uint32_t n_ctx = n_pages * TD_KV_PAGE_TOKENS < plan->n_ctx ? n_pages * TD_KV_PAGE_TOKENS
                                                             : plan->n_ctx;
  td_status st = TD_OK;
  for (size_t i = 0; i < TD_COUNT(steps) && st == TD_OK; i++) {
    uint32_t n = steps[i] < n_ctx ? steps[i] : n_ctx;
    td_step_seq seq = {.tokens = tokens,
                       .n_tokens = n < usual_chunk(w) ? n : usual_chunk(w),
                       .pages = pages,
                       .n_pages = n_pages,
                       .is_decode = steps[i] == 1,
                       .want = TD_WANT_LAST};
    st = td_engine_step(w->engine, &seq, 1, err);
  }
  if (w->kv.transfer) td_kv_transfer_pause(w->kv.transfer, false);
  return st;
}

// Whether the model's layer for multi-token prediction is used: by both workers of a pair alike,
// since it has a part in KV pages. Not where devices share prompts, nor where keys leave a window.
static void choose_layer(td_worker *w) {
  const td_runtime_opts *r = &w->opts.runtime;
  const td_devices *d = &w->devices;
  const bool fits = !d->placement.is_discrete || d->has_draft_layer;
  const td_kv_layout layout = td_kv_layout_of(w->config, r->kv_dtype, 0);
  if (r->draft == TD_DRAFT_OFF || !fits || layout.n_blocks) return;
  if (td_shares_prompts(r, w->config)) return;
  w->has_draft_layer = td_model_use_mtp(w->model);
}

// The pool is sized by the worker of a pair that opens first, whichever drafts or prefills. A GPU's
// memory for drafts is part of td_devices.held_bytes. On a CPU the one that decodes never prefills.
static td_status open_kv(td_worker *w, td_err *err) {
  const bool is_host = !w->devices.placement.is_discrete;
  const td_engine_opts drafts = {
      .max_drafts = w->devices.max_drafts,
      .has_draft_layer = w->has_draft_layer,
      .max_step_tokens = td_step_max_tokens(w->opts.max_batch, w->devices.prefill_chunk),
      .max_step_seqs = w->opts.max_batch};
  uint64_t n_bytes = is_host ? td_engine_draft_bytes(w->model, true, &drafts) : 0;
  if (is_host && w->arena)
    n_bytes += w->devices.prefill_chunk * td_engine_drive_step_bytes_per_token(w->config);
  if (is_host && w->opts.role == TD_ROLE_DECODE) w->devices.prefill_chunk = 1;
  return td_kv_memory_open(&w->kv, &w->opts, &w->devices, w->model, n_bytes, err);
}

static td_status open_parts(td_worker *w, td_err *err) {
  td_status st = open_devices(w, err);
  if (st == TD_OK) choose_layer(w);
  if (st == TD_OK) st = open_kv(w, err);
  if (st == TD_OK) st = open_engine(w, err);
  // Whether steps can be long enough for experts to stream, and whether any are cached, is known
  // only now.
  if (st == TD_OK && !w->streaming && !w->devices.n_streamed_dense &&
      !td_engine_cache_stats(w->engine).n_slots)
    td_dev_stop_pinning(w->devices.dev);
  if (st == TD_OK) st = warm_up(w, err);
  if (st == TD_OK) st = open_grammars(w, err);
  if (st == TD_OK) st = open_tables(w, err);
  if (st != TD_OK) return st;
  // On several NUMA nodes, binds this thread to the device's node. Comes last: threads started
  // later would inherit the binding.
  const td_nodes nodes = td_nodes_get();
  const int node = td_dev_node(w->devices.dev);
  for (unsigned i = 0; i < nodes.n; i++)
    if (nodes.ids[i] == node) td_nodes_bind(&nodes, i, pthread_self());
  for (uint32_t i = 0; st == TD_OK && i <= w->devices.n_peers; i++) {
    td_dev *dev = i ? w->devices.peers[i - 1] : w->devices.dev;
    w->gpu_bytes += td_dev_vram_bytes(dev);
    w->gpu_free_bytes += td_dev_free_vram_bytes(dev);
  }
  return TD_OK;
}

static td_status open_all(td_worker *w, td_err *err) {
  uint64_t begin_ns = td_clock_ns(), trace_ns = td_trace_begin();
  int weights_fd = w->opts.weights_fd ? TD_WORKER_WEIGHTS_FD : -1;
  td_status st = td_model_open_weights(&w->model, w->opts.runtime.model_dir, weights_fd, err);
  if (st != TD_OK) return st;
  const td_expert_arena_opts how = {.mirror = w->opts.runtime.mirror};
  if (weights_fd >= 0) st = td_expert_arena_open(&w->arena, w->model, weights_fd, &how, err);
  if (st != TD_OK) return st;
  w->config = td_model_config_of(w->model);
  td_trace_span(trace_ns, TD_TRACE_OPEN_MODEL, 0, 0);
  st = open_parts(w, err);
  if (st != TD_OK) return st;
  td_debug("%s opened after %.2f s: a context of %u tokens, %u pages of %u",
           w->opts.runtime.model_dir, (double)(td_clock_ns() - begin_ns) * 1e-9,
           w->kv.pool.plan.n_ctx, w->kv.pool.plan.n_pages, w->kv.layout.page_tokens);
  td_wire_msg ready = {
      .kind = TD_MSG_READY,
      .u.ready = {.n_vocab = w->config->n_vocab,
                  .n_ctx = w->kv.pool.plan.n_ctx,
                  .max_seqs = w->opts.max_batch,
                  .page_tokens = w->kv.layout.page_tokens,
                  .prefill_chunk = w->devices.prefill_chunk,
                  .n_pages = w->kv.pool.plan.n_pages,
                  .flags = (w->kv.pool.pages ? 0 : TD_READY_DEVICE_KV) |
                           (w->kv.layout.n_states ? TD_READY_STATES : 0),
                  .stream_tokens = w->streaming ? td_engine_stream_tokens(w->streaming) : 0,
                  .load_ns = td_clock_ns() - begin_ns}};
  const char *isa = td_kernels()->isa;
  snprintf(ready.u.ready.isa, sizeof ready.u.ready.isa, "%s", isa ? isa : "");
  // What on a GPU the content of KV pages depends on; not which of several equal ones it is.
  if (w->devices.placement.is_discrete) {
    const char *kind = strchr(td_dev_name(w->devices.dev), ',');
    snprintf(ready.u.ready.gpu, sizeof ready.u.ready.gpu, "%s, experts of %u layers",
             kind ? kind + 2 : "", w->devices.n_gpu_expert_layers);
  }
  return td_front_link_send(&w->front_link, &ready, err);
}

static void close_all(td_worker *w) {
  td_step_close(&w->step);
  td_step_close(&w->stream_step);
  td_requests_close(&w->requests);
  td_grammars_close(w->grammars);
  if (w->masks_fd >= 0) close(w->masks_fd);
  td_token_index_close(w->tokens);
  td_engine_close(w->engine);
  td_engine_close(w->streaming);
  td_engine_close(w->saved_engine);
  td_kv_memory_close(&w->kv);
  td_devices_close(&w->devices);
  td_expert_arena_close(w->arena);
  td_model_close(w->model);
  td_channel_close(&w->front_link.channel);
}

// ---- the loop ---------------------------------------------------------------------------------

// Has the front's record taken by its request, and replies if that has ended.
static td_status take(td_worker *w, const td_wire_msg *msg, td_err *err) {
  td_wire_msg reply;
  td_worker_request *r = msg->kind == TD_MSG_CANCEL ? td_requests_find(&w->requests, msg->request)
                                                    : NULL;
  if (r && w->is_in_step && w->kv.transfer && !r->is_held) {
    r->is_left = true;
    return TD_OK;
  }
  td_status st = r ? td_worker_save_state(w, r, err) : TD_OK;
  if (st != TD_OK || !td_requests_take(&w->requests, msg, &reply)) return st;
  return td_front_link_send(&w->front_link, &reply, err);
}

// Ends requests that were canceled in the middle of a step of others: a state that is copied out
// may wait there for what this thread has yet to queue.
static td_status end_left(td_worker *w, td_err *err) {
  td_status st = TD_OK;
  for (uint32_t i = w->requests.n; i-- > 0 && st == TD_OK;) {
    const td_worker_request *r = w->requests.active[i];
    const td_wire_msg cancel = {.kind = TD_MSG_CANCEL, .request = r->id};
    if (r->is_left) st = take(w, &cancel, err);
  }
  return st;
}

static td_status drain(td_worker *w, td_err *err) {
  td_wire_msg msg;
  for (;;) {
    td_status st = td_ring_pop(&w->front_link.channel.rx, &msg);
    if (st == TD_EAGAIN) return TD_OK;
    if (st != TD_OK) return td_fail(err, st, "the ring from the front is corrupt");
    if (msg.kind == TD_MSG_SHUTDOWN) {
      w->is_shut_down = true;
      return TD_OK;
    }
    if (msg.kind == TD_MSG_FIRST) {
      td_step_put_first(&w->requests, msg.request);
      continue;
    }
    st = take(w, &msg, err);
    if (st != TD_OK) return st;
  }
}

static uint32_t n_threads_now(const td_worker *w) {
  uint32_t n = atomic_load_explicit(w->front_link.channel.lease, memory_order_relaxed);
  return n && n < w->n_threads ? n : w->n_threads;
}

static td_wire_cache cache_now(const td_worker *w) {
  const td_expert_cache_stats stats = td_engine_cache_stats(w->engine);
  return (td_wire_cache){.hits = stats.hits,
                         .misses = stats.misses,
                         .moves = stats.moves,
                         .n_slots = stats.n_slots,
                         .n_cached = stats.n_cached};
}

static td_wire_drive drive_now(const td_worker *w) {
  if (!w->arena) return (td_wire_drive){.n_slots = 0};
  const td_expert_arena_stats stats = td_expert_arena_stats_of(w->arena);
  return (td_wire_drive){.hits = stats.hits,
                         .misses = stats.misses,
                         .prefetches_used = stats.prefetches_used,
                         .prefetches_unused = stats.prefetches_unused,
                         .n_bytes = stats.drive.n_bytes,
                         .busy_ns = stats.drive.busy_ns,
                         .n_slots = stats.n_slots,
                         .n_ready = stats.n_ready};
}

static td_status beat(td_worker *w, td_err *err) {
  uint64_t now_ns = td_clock_ns();
  if (now_ns - w->heartbeat_ns < HEARTBEAT_NS) return TD_OK;
  w->heartbeat_ns = now_ns;
  td_status st = td_front_link_check_alive(&w->front_link, err);
  if (st != TD_OK) return st;
  const uint32_t n_seqs = w->step.n_decode;
  const td_wire_msg msg = {
      .kind = TD_MSG_HEARTBEAT,
      .u.heartbeat = {.n_steps = w->n_steps,
                      .n_running = w->requests.n,
                      .n_threads = n_threads_now(w),
                      .skips_layer = w->step.draft_mode == TD_DRAFT_AUTO &&
                                     !td_draft_layer_pays(&w->step.pace, n_seqs ? n_seqs : 1),
                      .cache = cache_now(w),
                      .drive = drive_now(w),
                      .gpu_bytes = w->gpu_bytes,
                      .gpu_free_bytes = w->gpu_free_bytes}};
  return td_front_link_send(&w->front_link, &msg, err);
}

static void note_begin(const td_step *step, uint64_t now_ns) {
  for (uint32_t i = 0; i < step->n; i++) {
    td_worker_request *r = step->requests[i];
    if (r->begin_ns) continue;
    r->begin_ns = now_ns;
    if (r->phase == TD_REQUEST_DECODE) r->first_token_ns = now_ns;
  }
}

// Fills pages that are copies, before a step that continues them.
static td_status copy_sources(const td_worker *w, td_engine *engine, const td_step *step,
                              td_err *err) {
  td_status st = TD_OK;
  for (uint32_t i = 0; i < step->n && st == TD_OK; i++) {
    td_worker_request *r = step->requests[i];
    if (r->copies.source < 0) continue;
    st = td_engine_copy_page(engine, r->pages[r->n_past / w->kv.layout.page_tokens],
                             r->copies.source, err);
    r->copies.source = -1;
  }
  return st;
}

// Whether nobody waits for the step in progress, whose prompts' experts are being read.
static bool is_unwanted(void *ctx) {
  td_worker *w = ctx;
  const td_step *step = &w->step;
  if (!step->n_prefilled || !step->requests[0]->is_held) return false;
  w->is_in_step = true;
  if (w->link_status == TD_OK) w->link_status = drain(w, &w->link_err);
  w->is_in_step = false;
  if (w->link_status == TD_OK) w->link_status = beat(w, &w->link_err);
  return w->link_status != TD_OK || w->is_shut_down || td_step_is_ended(step);
}

static void feed_beside(void *ctx);

static td_status run_step(td_worker *w, td_err *err) {
  td_step *step = &w->step;
  uint64_t now_ns = td_clock_ns();
  note_begin(step, now_ns);
  td_status st = copy_sources(w, w->engine, step, err);
  td_step_hold(step, w->arena != NULL);
  if (st == TD_OK && w->stream_step.n)
    st = td_engine_step_with(w->engine, step->seqs, step->n, feed_beside, w, err);
  else if (st == TD_OK)
    st = td_engine_step(w->engine, step->seqs, step->n, err);
  if (st != TD_OK) return td_err_prefix(err, "a step of %u sequences failed", step->n);
  td_step_hold(step, false);
  if (w->link_status != TD_OK) *err = w->link_err;
  if (w->link_status != TD_OK || w->is_shut_down) return w->link_status;
  if (td_step_is_ended(step)) {
    step->is_warm = false;
    return td_worker_post_results(w, w->engine, step, err);
  }
  if (w->streaming) td_engine_note_written(w->streaming, step->seqs, step->n);
  td_step_note(step, td_jitter_time(td_clock_ns() - now_ns));
  st = td_worker_note_next(w, step, err);
  if (st == TD_OK) st = td_worker_post_results(w, w->engine, step, err);
  return st == TD_OK ? td_worker_draft(w, step, err) : st;
}

// ---- prefill with streamed experts --------------------------------------------------------------

// Ends the step in progress: all of it is computed, or nobody waits for it.
static td_status end_streaming(td_worker *w, td_err *err) {
  td_step *step = &w->stream_step;
  td_status st = td_engine_end(w->streaming, err);
  if (st != TD_OK) return td_err_prefix(err, "a prefill of %u tokens failed", step->n_prefilled);
  td_step_hold(step, false);
  const td_stream_progress progress = td_engine_stream_progress(w->streaming);
  const double queued = (double)(progress.queued_bytes - w->stream_begin.queued_bytes);
  const double confined = (double)(progress.confined_bytes - w->stream_begin.confined_bytes);
  td_debug("prefill of %u tokens with streamed experts: %.2f s, beside %u decode steps, %.0f %% of "
           "it on a share of the SMs",
           step->n_prefilled, (double)(td_clock_ns() - w->stream_begin_ns) * 1e-9, w->n_beside,
           queued > 0 ? 100 * confined / queued : 0);
  st = td_worker_note_next(w, step, err);
  if (st == TD_OK) st = td_worker_post_results(w, w->streaming, step, err);
  if (st == TD_OK) st = td_worker_draft(w, step, err);
  step->n = 0;
  return st;
}

// Prompts on all devices at once, while nothing is decoded.
static td_status run_on_all(td_worker *w, td_err *err) {
  td_step *step = &w->stream_step;
  td_engine_confine(w->streaming, false);
  td_status st = td_engine_step(w->streaming, step->seqs, step->n, err);
  if (st != TD_OK) return td_err_prefix(err, "a prefill of %u prompts failed", step->n);
  td_step_hold(step, false);
  td_debug("prefill of %u tokens on %u devices: %.2f s", step->n_prefilled, w->devices.n_peers + 1,
           (double)(td_clock_ns() - w->stream_begin_ns) * 1e-9);
  st = td_worker_post_results(w, w->streaming, step, err);
  step->n = 0;
  return st;
}

static bool is_decoding(const td_worker *w) {
  for (uint32_t i = 0; i < w->requests.n; i++)
    if (w->requests.active[i]->phase == TD_REQUEST_DECODE) return true;
  return false;
}

// Whether the prompts that wait are worth the memory of dense weights. Nobody else computes while
// they have it.
static bool wants_long_steps(td_worker *w) {
  const uint64_t n = td_step_long_prompts(&w->requests, td_engine_stream_tokens(w->streaming));
  return td_long_steps_pay(&w->devices.long_steps, w->config, w->devices.stream_from, n) &&
         td_engine_streams_all(w->streaming);
}

// Between steps: the engine for long ones takes the usual one's place, or gives it back.
static void choose_streaming(td_worker *w) {
  const bool is_long = w->saved_engine != NULL;
  if (wants_long_steps(w) == is_long) return;
  if (is_long) {
    td_engine_close(w->streaming);
    w->streaming = w->saved_engine;
    w->saved_engine = NULL;
  } else {
    td_engine *longer;
    td_devices_open_long_engine(&longer, &w->devices, w->model, &w->streaming_opts);
    if (!longer) return;
    w->saved_engine = w->streaming;
    w->streaming = longer;
  }
  td_prefill_budget_init(&w->stream_step.budget, w->saved_engine
                                                     ? w->devices.long_steps.prefill_chunk
                                                     : w->devices.prefill_chunk);
}

static td_status begin_streaming(td_worker *w, td_err *err) {
  td_step *step = &w->stream_step;
  choose_streaming(w);
  const uint32_t min_tokens = td_engine_stream_tokens(w->streaming);
  w->step.stream_tokens = min_tokens;
  td_step_build_prefill(step, &w->requests, min_tokens);
  if (!step->n) return TD_OK;
  if (!td_engine_streams_all(w->streaming)) { // a layer's format: the other engine takes them
    w->step.stream_tokens = step->n = 0;
    return TD_OK;
  }
  w->stream_begin_ns = td_clock_ns();
  w->stream_begin = td_engine_stream_progress(w->streaming);
  w->n_beside = 0;
  note_begin(step, w->stream_begin_ns);
  td_status st = copy_sources(w, w->streaming, step, err);
  if (st != TD_OK) return st;
  td_step_hold(step, true);
  if (w->devices.n_peers && !is_decoding(w)) return run_on_all(w, err);
  st = td_engine_begin(w->streaming, step->seqs, step->n, err);
  return st == TD_OK ? st : td_err_prefix(err, "a prefill of %u prompts failed", step->n);
}

// Ends a step that is done, and begins the next. Before requests are chosen for a decode step.
static td_status advance_streaming(td_worker *w, td_err *err) {
  td_status st = TD_OK;
  if (!w->streaming) return TD_OK;
  if (w->stream_step.n && (td_engine_feed(w->streaming, 0) || td_step_is_ended(&w->stream_step)))
    st = end_streaming(w, err);
  return st == TD_OK && !w->stream_step.n ? begin_streaming(w, err) : st;
}

// Queues streamed experts a short time ahead, until those of this step are all queued.
static void feed_beside(void *ctx) {
  td_worker *w = ctx;
  const uint64_t queued_bytes = td_engine_stream_progress(w->streaming).queued_bytes;
  const uint64_t ahead_bytes = td_stream_pace_ahead(&w->pace, 0);
  td_engine_feed(w->streaming, queued_bytes < w->stream_until_bytes ? ahead_bytes : 0);
}

// Runs the step that was built beside the prefill in progress.
static td_status run_beside_streaming(td_worker *w, td_err *err) {
  const uint32_t n_decode = w->step.n_decode, n_prefilled = w->step.n_prefilled;
  const td_stream_progress before = td_engine_stream_progress(w->streaming);
  w->stream_until_bytes = before.copied_bytes + td_stream_pace_ahead(&w->pace, n_decode);
  td_engine_confine(w->streaming, n_decode > 0);
  if (w->stream_step.n) feed_beside(w);
  const uint64_t begin_ns = td_clock_ns();
  td_status st = TD_OK;
  if (w->step.n)
    st = run_step(w, err);
  else
    td_engine_wait(w->streaming);
  const uint64_t ns = td_jitter_time(td_clock_ns() - begin_ns);
  if (w->stream_step.n) td_engine_feed(w->streaming, 0);
  w->n_beside += n_decode > 0;
  const td_stream_progress after = td_engine_stream_progress(w->streaming);
  td_stream_pace_note(
      &w->pace,
      &(td_timed_step){.n_decode = n_decode,
                       .n_prefilled = n_prefilled,
                       .ns = ns,
                       .copied_bytes = after.copied_bytes - before.copied_bytes,
                       .left_bytes = after.queued_bytes - after.copied_bytes,
                       .copying_ns = td_jitter_time(after.copying_ns - before.copying_ns)});
  return st;
}

// Begins to copy the pages of new requests to the device. Until they are there, steps of others run
// without them. Returns whether some are not.
static bool enter_pages(td_worker *w) {
  td_kv_transfer *transfer = w->kv.transfer;
  if (!transfer) return false;
  for (uint32_t i = 0; i < w->requests.n; i++) {
    td_worker_request *r = w->requests.active[i];
    if (r->phase == TD_REQUEST_RECEIVING || r->is_placed) continue;
    td_kv_transfer_enter(transfer, r->pages,
                         (r->n_past + w->kv.layout.page_tokens - 1) / w->kv.layout.page_tokens);
    r->is_placed = r->is_entering = true;
  }
  const bool is_done = td_kv_transfer_has_entered(transfer);
  for (uint32_t i = 0; i < w->requests.n; i++)
    w->requests.active[i]->is_entering &= !is_done;
  return !is_done;
}

// Embeds a piece of the next image that a prompt waits for, so that others are decoded between
// pieces. *is_begun: there is more to embed.
static td_status embed(td_worker *w, bool *is_begun, td_err *err) {
  td_worker_request *r;
  const td_image_input *image;
  const td_step *step = w->streaming ? &w->stream_step : &w->step;
  bool is_done = true;
  td_status st = TD_OK;
  while (st == TD_OK && is_done && (image = td_step_awaited(step, &w->requests, &r))) {
    st = td_vision_advance(w->devices.vision, image, &is_done, err);
    if (is_done) r->n_embedded = (uint32_t)(image - r->images) + 1;
  }
  *is_begun = !is_done;
  return st == TD_OK ? st : td_err_prefix(err, "an image was not embedded");
}

static td_status serve(td_worker *w, td_err *err) {
  for (;;) {
    bool is_begun;
    td_status st = end_left(w, err);
    if (st == TD_OK) st = drain(w, err);
    if (st != TD_OK || w->is_shut_down) return st;
    st = td_worker_answer_waiting(w, err);
    if (st == TD_OK) st = beat(w, err);
    const bool are_entering = enter_pages(w);
    if (st == TD_OK) st = embed(w, &is_begun, err);
    if (st == TD_OK) st = advance_streaming(w, err);
    if (st != TD_OK) return st;
    if (w->saved_engine)
      td_step_clear(&w->step);
    else
      td_step_build(&w->step, &w->requests);
    if (w->streaming && (w->step.n || w->stream_step.n))
      st = run_beside_streaming(w, err);
    else if (w->step.n)
      st = run_step(w, err);
    else if (are_entering)
      td_kv_transfer_wait(w->kv.transfer);
    else if (!is_begun)
      st = td_front_link_wait(&w->front_link, w->masks_fd, HEARTBEAT_NS / 1000000, err);
    if (st != TD_OK) return st;
  }
}

// ---- the process ------------------------------------------------------------------------------

// Weights are read from mapped files: if one is truncated meanwhile, SIGBUS arrives.
static void on_bus_error(int signal_number) {
  static const char text[] = "a mapped file of the model cannot be read any more: it was cut short "
                             "or its disk fails; put it back, or use --weights resident\n";
  if (write(STDERR_FILENO, text, sizeof text - 1) < 0) _exit(1);
  signal(signal_number, SIG_DFL);
  raise(signal_number);
}

// Only the front ends the worker: signals that a terminal or service manager sends to the whole
// group are ignored here, as the front drains on them. If the front dies, so does the worker.
static td_status follow_parent(uint32_t parent_pid, td_err *err) {
  static const int ignored[] = {SIGINT, SIGTERM, SIGHUP, SIGPIPE};
  for (size_t i = 0; i < TD_COUNT(ignored); i++)
    signal(ignored[i], SIG_IGN);
  signal(SIGBUS, on_bus_error);
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  // The parent may have died before the prctl.
  if ((uint32_t)getppid() != parent_pid)
    return td_fail(err, TD_ECANCELED, "worker: process %u is not its parent", parent_pid);
  return TD_OK;
}

static td_status attach_trace(td_worker *w, td_err *err) {
  if (!w->opts.trace_fd) return TD_OK;
  td_status st = td_segment_attach(&w->trace, TD_WORKER_TRACE_FD, err);
  if (st != TD_OK) return td_err_prefix(err, "worker");
  if (w->trace.n_bytes >= sizeof(td_trace_memory) &&
      td_trace_start(w->trace.base, td_worker_role_name(w->opts.role)))
    return TD_OK;
  return td_fail(err, TD_EFORMAT, "worker: descriptor %d is not for a trace", TD_WORKER_TRACE_FD);
}

static td_status attach(td_worker *w, td_err *err) {
  int fds[TD_CHANNEL_N_FDS];
  for (int i = 0; i < TD_CHANNEL_N_FDS; i++)
    fds[i] = TD_WORKER_FIRST_CHANNEL + i;
  w->front_link.life_fd = TD_WORKER_LIFE_FD;
  td_status st = td_channel_attach(&w->front_link.channel, fds, err);
  return st == TD_OK ? st : td_err_prefix(err, "worker");
}

// Sends FATAL to the front; logs it if that fails. Does neither if the front has died.
static int fail(td_worker *w, const td_err *why) {
  td_err err;
  if (td_front_link_check_alive(&w->front_link, &err) != TD_OK) return 0;
  td_wire_msg msg = {.kind = TD_MSG_FATAL, .request = (uint64_t)(int64_t)why->code};
  int n = snprintf(msg.u.text, sizeof msg.u.text, "%.*s", TD_WIRE_MAX_TEXT - 1, why->msg);
  bool is_sent = td_front_link_send(&w->front_link, &msg, &err) == TD_OK && why->msg[n] == '\0';
  if (!is_sent) td_error("%s", why->msg);
  return 1;
}

// Sets the process name for ps and top, and the log's role.
static void introduce(const td_worker_opts *opts) {
  char name[16];
  snprintf(name, sizeof name, "tandem-%s", td_worker_role_name(opts->role));
  prctl(PR_SET_NAME, name);
  const td_log_opts log = {.max_level = (td_log_level)opts->log_level,
                           .is_json = opts->log_json != 0,
                           .role = td_worker_role_name(opts->role)};
  td_log_set(&log);
}

int td_worker_main(int argc, char **argv) {
  td_worker w = {.trace = TD_SEGMENT_CLOSED, .masks_fd = -1};
  td_err err = {0};
  td_status st = td_worker_args_parse(&w.opts, argc, argv, &err);
  if (st == TD_OK) introduce(&w.opts);
  if (st == TD_OK) st = follow_parent(w.opts.parent_pid, &err);
  if (st == TD_OK) st = attach_trace(&w, &err);
  if (st == TD_OK) st = attach(&w, &err);
  if (st != TD_OK) {
    td_error("%s", err.msg);
    return 2;
  }
  st = open_all(&w, &err);
  if (st == TD_OK) st = serve(&w, &err);
  int status = st == TD_OK ? 0 : fail(&w, &err);
  close_all(&w);
  td_trace_stop();
  td_segment_close(&w.trace);
  return status;
}
