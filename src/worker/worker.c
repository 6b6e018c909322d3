// src/worker/worker.c - opening, the loop, and turning step results into records.
// One thread. Messages are received and sent between steps, and a step is bounded by prefill_chunk,
// so a cancellation or a heartbeat is delayed by at most one step. Where experts stream to a GPU, a
// second engine on it prefills long prompts: its work is queued a bounded time ahead between the
// steps of the first, which decode.
#include "worker/worker.h"

#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/numa.h"
#include "base/thread_pool.h"
#include "base/trace.h"
#include "engine/engine.h"
#include "runtime/devices.h"
#include "tandem/kernels.h"
#include "worker/args.h"
#include "worker/front_link.h"
#include "worker/kv_memory.h"
#include "worker/request.h"
#include "worker/step.h"
#include "worker/stream_pace.h"

#define HEARTBEAT_NS 500000000u // half of wire.h's one second, to leave time for a step

typedef struct {
  td_worker_opts opts;
  td_front_link front_link;
  td_model *model;
  const td_model_config *config;
  td_devices devices;
  td_engine *engine;
  td_kv_memory kv;
  td_token_index *tokens; // NULL: the checkpoint has no tokenizer
  td_grammars *grammars;  // NULL likewise
  td_requests requests;
  td_step step;
  // Prefill with streamed experts; NULL: engine does all.
  td_engine *streaming;
  td_step stream_step; // in progress if n is not 0; its requests are held
  td_stream_pace pace;
  uint64_t stream_begin_ns;
  td_stream_progress stream_begin; // as it was then
  uint64_t stream_until_bytes;     // queued_bytes up to which this decode step queues experts
  uint32_t n_beside;               // decode steps since
  td_segment trace;                // --trace records to it; closed without it
  uint64_t n_steps, heartbeat_ns;
  uint32_t n_threads; // of the thread pool
  bool is_shut_down;
} worker;

// ---- opening ----------------------------------------------------------------------------------

// Tokens per prefill step of the engine that also decodes.
static uint32_t usual_chunk(const worker *w) {
  const uint32_t usual = td_engine_prefill_chunk(w->config), most = w->devices.prefill_chunk;
  const bool is_second = w->streaming || (w->kv.transfer && w->opts.role == TD_ROLE_DECODE);
  return is_second && usual < most ? usual : most;
}

// Opens the engine that streams experts, and closes it again where that never pays.
static td_status open_streaming(worker *w, td_engine_opts *opts, td_err *err) {
  opts->stream_bytes = w->devices.stream_bytes;
  opts->max_step_tokens = w->devices.prefill_chunk;
  opts->is_told_of_writes = opts->is_confinable = true;
  td_status st = td_engine_open(&w->streaming, w->model, w->devices.dev, opts, err);
  opts->stream_bytes = 0;
  if (st != TD_OK || td_engine_stream_tokens(w->streaming)) return st;
  td_engine_close(w->streaming);
  w->streaming = NULL;
  return TD_OK;
}

static td_status open_engine(worker *w, td_err *err) {
  td_engine_opts opts = {
      .n_pages = w->kv.pool.plan.n_pages,
      .page_tokens = w->kv.layout.page_tokens,
      .max_step_seqs = w->opts.max_batch,
      .max_seq_tokens = w->kv.pool.plan.n_ctx,
      .kv_dtype = w->opts.runtime.kv_dtype,
      .kv_pages = w->kv.pages,
      .transfer = w->kv.transfer,
      .expert_dev = w->devices.expert_dev,
      .n_gpu_expert_layers = w->devices.n_gpu_expert_layers,
      .n_streamed_dense = w->devices.n_streamed_dense,
  };
  td_devices_use_peers(&w->devices, &opts);
  td_status st = w->devices.stream_bytes ? open_streaming(w, &opts, err) : TD_OK;
  if (st != TD_OK) return st;
  if (w->streaming) opts.n_peers = 0; // prompts on all devices are for that engine
  opts.max_step_tokens = td_step_max_tokens(w->opts.max_batch, usual_chunk(w));
  opts.is_urgent = true;
  opts.is_confinable = false;
  td_devices_use_cache(&w->devices, w->model, &opts);
  return td_engine_open(&w->engine, w->model, w->devices.dev, &opts, err);
}

// The vocabulary by its bytes, for grammars. A checkpoint without a tokenizer is served without
// them.
static td_status open_grammars(worker *w, td_err *err) {
  td_tokenizer *tok;
  td_err why;
  if (td_tokenizer_open(&tok, w->opts.runtime.model_dir, &why) != TD_OK) {
    td_debug("grammars are not available: %s", why.msg);
    return TD_OK;
  }
  td_status st = td_token_index_open(&w->tokens, tok, w->config->n_vocab, err);
  td_tokenizer_close(tok);
  return st == TD_OK ? td_grammars_open(&w->grammars, w->tokens, err) : st;
}

static td_status open_tables(worker *w, td_err *err) {
  const td_request_limits limits = {.n_vocab = w->config->n_vocab,
                                    .n_ctx = w->kv.pool.plan.n_ctx,
                                    .max_seqs = w->opts.max_batch,
                                    .n_pages = w->kv.pool.plan.n_pages,
                                    .page_tokens = w->kv.layout.page_tokens,
                                    .eos_ids = w->config->eos_ids,
                                    .n_eos = w->config->n_eos,
                                    .grammars = w->grammars};
  td_status st = td_requests_open(&w->requests, &limits, err);
  if (st == TD_OK) st = td_step_open(&w->step, w->opts.max_batch, usual_chunk(w), err);
  if (st != TD_OK || !w->streaming) return st;
  td_stream_pace_init(&w->pace, w->opts.decode_slowdown * 0.01,
                      td_engine_stream_rate(w->streaming));
  return td_step_open(&w->stream_step, w->opts.max_batch, w->devices.prefill_chunk, err);
}

static td_status open_devices(worker *w, td_err *err) {
  const td_devices_opts opts = {.runtime = &w->opts.runtime,
                                .ends_with_process = true,
                                .is_alone = w->opts.role == TD_ROLE_DECODE,
                                .is_for_prefill = w->opts.role == TD_ROLE_PREFILL,
                                .is_for_decode = w->opts.role == TD_ROLE_DECODE,
                                .cpus_from_end = w->opts.role == TD_ROLE_PREFILL};
  td_devices *d = &w->devices;
  td_status st = td_devices_open(d, &opts, w->model, err);
  if (st != TD_OK) return st;
  w->n_threads = d->n_threads;
  w->opts.runtime.kv_dtype = td_dev_kv_dtype(d->dev, w->opts.runtime.kv_dtype);
  td_dev_set_thread_limit(d->expert_dev ? d->expert_dev : d->dev, w->front_link.channel.lease);
  td_dev_set_progress_counter(d->dev, w->front_link.channel.pulse);
  if (d->expert_dev) td_dev_set_progress_counter(d->expert_dev, w->front_link.channel.pulse);
  size_t n_bytes;
  const void *memory = td_model_memory(w->model, &n_bytes);
  td_devices_pin(d, memory, n_bytes);
  if (d->expert_dev && !memory) {
    td_info("experts are read through the page cache, from which they stream to the GPU more "
            "slowly; give --weights resident");
  }
  return TD_OK;
}

// A device uploads weights and loads kernels at first use. A long chunk, a short one and a decode
// step together use all of them, before the first request.
static td_status warm_up(worker *w, td_err *err) {
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

// On several NUMA nodes, binds this thread to the device's node. Comes last: threads started later
// would inherit the binding.
static void sit_beside_device(const worker *w) {
  const td_nodes nodes = td_nodes_get();
  const int node = td_dev_node(w->devices.dev);
  for (unsigned i = 0; i < nodes.n; i++) {
    if (nodes.ids[i] == node) td_nodes_bind(&nodes, i, pthread_self());
  }
}

static td_status open_parts(worker *w, td_err *err) {
  td_status st = open_devices(w, err);
  if (st == TD_OK) st = td_kv_memory_open(&w->kv, &w->opts, &w->devices, w->config, err);
  if (st == TD_OK) st = open_engine(w, err);
  // Whether steps can be long enough for experts to stream, and whether any are cached, is known
  // only now.
  if (st == TD_OK && !w->streaming && !w->devices.n_streamed_dense &&
      !td_engine_cache_stats(w->engine).n_slots)
    td_dev_stop_pinning(w->devices.dev);
  if (st == TD_OK) st = warm_up(w, err);
  if (st == TD_OK) st = open_grammars(w, err);
  if (st == TD_OK) st = open_tables(w, err);
  if (st == TD_OK) sit_beside_device(w);
  return st;
}

// What on a GPU the content of KV pages depends on; not which of several equal ones it is.
static void name_gpu(const worker *w, char *out, size_t size) {
  const char *kind = strchr(td_dev_name(w->devices.dev), ',');
  snprintf(out, size, "%s, experts of %u layers", kind ? kind + 2 : "",
           w->devices.n_gpu_expert_layers);
}

static td_status open_all(worker *w, td_err *err) {
  uint64_t begin_ns = td_clock_ns(), trace_ns = td_trace_begin();
  int weights_fd = w->opts.weights_fd ? TD_WORKER_WEIGHTS_FD : -1;
  td_status st = td_model_open_weights(&w->model, w->opts.runtime.model_dir, weights_fd, err);
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
  if (w->devices.placement.is_discrete) name_gpu(w, ready.u.ready.gpu, sizeof ready.u.ready.gpu);
  return td_front_link_send(&w->front_link, &ready, err);
}

static void close_all(worker *w) {
  td_step_close(&w->step);
  td_step_close(&w->stream_step);
  td_requests_close(&w->requests);
  td_grammars_close(w->grammars);
  td_token_index_close(w->tokens);
  td_engine_close(w->engine);
  td_engine_close(w->streaming);
  td_kv_memory_close(&w->kv);
  td_devices_close(&w->devices);
  td_model_close(w->model);
  td_channel_close(&w->front_link.channel);
}

// ---- the loop ---------------------------------------------------------------------------------

// Before a DONE that says that the state in the request's last page is that after n_past tokens:
// it has to be where all workers find it.
static td_status save_state(worker *w, const td_worker_request *r, td_err *err) {
  const uint32_t page_idx = r->n_past / w->kv.layout.page_tokens;
  if (r->is_held || r->is_ended || page_idx >= r->n_pages_received) return TD_OK;
  return td_engine_save_state(w->engine, r->pages[page_idx], err);
}

static td_status post_done(worker *w, td_worker_request *r, td_done_reason reason, const char *text,
                           td_err *err) {
  td_wire_msg done;
  td_status st = save_state(w, r, err);
  if (st != TD_OK) return st;
  td_requests_end(&w->requests, r, reason, text, &done);
  return td_front_link_send(&w->front_link, &done, err);
}

// Has the front's record taken by its request, and replies if that has ended.
static td_status take(worker *w, const td_wire_msg *msg, td_err *err) {
  td_wire_msg reply;
  const td_worker_request *r = msg->kind == TD_MSG_CANCEL
                                   ? td_requests_find(&w->requests, msg->request)
                                   : NULL;
  td_status st = r ? save_state(w, r, err) : TD_OK;
  if (st != TD_OK || !td_requests_take(&w->requests, msg, &reply)) return st;
  return td_front_link_send(&w->front_link, &reply, err);
}

static td_status drain(worker *w, td_err *err) {
  td_wire_msg msg;
  for (;;) {
    td_status st = td_ring_pop(&w->front_link.channel.rx, &msg);
    if (st == TD_EAGAIN) return TD_OK;
    if (st != TD_OK) return td_fail(err, st, "the ring from the front is corrupt");
    if (msg.kind == TD_MSG_SHUTDOWN) {
      w->is_shut_down = true;
      return TD_OK;
    }
    st = take(w, &msg, err);
    if (st != TD_OK) return st;
  }
}

static uint32_t n_threads_now(const worker *w) {
  uint32_t n = atomic_load_explicit(w->front_link.channel.lease, memory_order_relaxed);
  return n && n < w->n_threads ? n : w->n_threads;
}

static td_wire_cache cache_now(const worker *w) {
  const td_expert_cache_stats stats = td_engine_cache_stats(w->engine);
  return (td_wire_cache){.hits = stats.hits,
                         .misses = stats.misses,
                         .moves = stats.moves,
                         .n_slots = stats.n_slots,
                         .n_cached = stats.n_cached};
}

static td_status beat(worker *w, td_err *err) {
  uint64_t now_ns = td_clock_ns();
  if (now_ns - w->heartbeat_ns < HEARTBEAT_NS) return TD_OK;
  w->heartbeat_ns = now_ns;
  td_status st = td_front_link_check_alive(&w->front_link, err);
  if (st != TD_OK) return st;
  const td_wire_msg msg = {.kind = TD_MSG_HEARTBEAT,
                           .u.heartbeat = {.n_steps = w->n_steps,
                                           .n_running = w->requests.n,
                                           .n_threads = n_threads_now(w),
                                           .cache = cache_now(w)}};
  return td_front_link_send(&w->front_link, &msg, err);
}

// Samples the request's next token from a row of the step, and ends the request if it was the last.
static td_status answer(worker *w, td_engine *engine, td_worker_request *r, uint32_t row,
                        td_err *err) {
  td_wire_msg msg = {.kind = TD_MSG_TOKEN, .request = r->id};
  td_wire_token *token = &msg.u.token;
  td_err why;
  td_status st = TD_OK;
  const bool is_complete = td_request_is_complete(r);
  if (!is_complete) {
    st = td_engine_draw(engine, row, r->sampler, (r->submit.flags & TD_SUBMIT_LOGPROBS) != 0, token,
                        err);
  }
  if (st != TD_OK) return st;
  if (td_sampler_status(r->sampler, &why) != TD_OK) {
    return post_done(w, r, TD_DONE_ERROR, why.msg, err);
  }
  if (is_complete) return post_done(w, r, TD_DONE_STOP, NULL, err);
  token->index = r->n_output++;
  r->tokens[r->submit.n_prompt + token->index] = token->id;
  token->is_eos = td_request_ends_with(r, token->id);
  st = td_front_link_send(&w->front_link, &msg, err);
  if (st != TD_OK) return st;
  if (token->is_eos || td_request_is_complete(r)) return post_done(w, r, TD_DONE_STOP, NULL, err);
  if (r->n_output == r->max_output) return post_done(w, r, TD_DONE_LENGTH, NULL, err);
  if (r->submit.flags & TD_SUBMIT_PREFILL_ONLY)
    return post_done(w, r, TD_DONE_PREFILLED, NULL, err);
  return TD_OK;
}

// Reports the log-probabilities of the prompt's tokens that follow those of the step, whose rows
// begin at row.
static td_status score(worker *w, td_engine *engine, const td_worker_request *r, uint32_t n_tokens,
                       uint32_t row, td_err *err) {
  td_status st = TD_OK;
  const float *logits = td_engine_logits(engine);
  for (uint32_t i = 0; i < n_tokens && st == TD_OK; i++) {
    const uint32_t at = r->n_past + i + 1;
    if (at >= r->submit.n_prompt) break;
    td_wire_msg msg = {.kind = TD_MSG_PROMPT_TOKEN, .request = r->id};
    td_sampler_score(r->sampler, logits + (size_t)(row + i) * w->config->n_vocab, r->tokens[at],
                     &msg.u.token);
    msg.u.token.index = at;
    st = td_front_link_send(&w->front_link, &msg, err);
  }
  return st;
}

static td_status report_progress(worker *w, td_worker_request *r, td_err *err) {
  uint64_t now_ns = td_clock_ns();
  const td_wire_msg msg = {.kind = TD_MSG_PROGRESS,
                           .request = r->id,
                           .u.progress = {.n_done = r->n_past,
                                          .n_prompt = r->submit.n_prompt,
                                          .n_cached = r->submit.n_past,
                                          .elapsed_ns = now_ns - r->begin_ns}};
  if (r->phase == TD_REQUEST_PREFILL && r->n_past == r->submit.n_prompt) r->first_token_ns = now_ns;
  r->phase = td_request_phase_of(r);
  td_status st = td_front_link_send(&w->front_link, &msg, err);
  bool is_read = r->phase == TD_REQUEST_DECODE && r->submit.n_answer;
  if (st != TD_OK || !is_read || !(r->submit.flags & TD_SUBMIT_PREFILL_ONLY)) return st;
  return post_done(w, r, TD_DONE_PREFILLED, NULL, err);
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
static td_status copy_sources(const worker *w, td_engine *engine, const td_step *step,
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

// Copies the page that is being filled, if this is where it is to be kept.
static td_status keep_page(const worker *w, td_engine *engine, td_worker_request *r, td_err *err) {
  if (r->copies.keep < 0 || r->n_past != r->copies.n_keep) return TD_OK;
  const int32_t page = r->pages[(r->n_past - 1) / w->kv.layout.page_tokens], keep = r->copies.keep;
  r->copies.keep = -1;
  return td_engine_copy_page(engine, keep, page, err);
}

// Sends what a computed step has for its requests.
static td_status post_results(worker *w, td_engine *engine, const td_step *step, td_err *err) {
  uint32_t row = 0;
  td_status st = TD_OK;
  w->n_steps++;
  for (uint32_t i = 0; i < step->n && st == TD_OK; i++) {
    td_worker_request *r = step->requests[i];
    const td_step_seq *seq = &step->seqs[i];
    const bool is_scored = seq->want == TD_WANT_ALL;
    const uint32_t n_rows = is_scored ? seq->n_tokens : seq->want == TD_WANT_LAST;
    const bool wants_token = n_rows &&
                             (!is_scored || r->n_past + seq->n_tokens == r->submit.n_prompt);
    if (r->is_ended) {
      st = post_done(w, r, r->end_reason, r->end_text, err);
    } else {
      if (is_scored) st = score(w, engine, r, seq->n_tokens, row, err);
      r->n_past += seq->n_tokens;
      if (st == TD_OK) st = keep_page(w, engine, r, err);
      if (st == TD_OK && r->phase != TD_REQUEST_DECODE) st = report_progress(w, r, err);
      if (st == TD_OK && wants_token) st = answer(w, engine, r, row + n_rows - 1, err);
    }
    row += n_rows;
  }
  return st;
}

static void feed_beside(void *ctx);

static td_status run_step(worker *w, td_err *err) {
  td_step *step = &w->step;
  uint64_t now_ns = td_clock_ns();
  note_begin(step, now_ns);
  td_status st = copy_sources(w, w->engine, step, err);
  if (st == TD_OK && w->stream_step.n) {
    st = td_engine_step_with(w->engine, step->seqs, step->n, feed_beside, w, err);
  } else if (st == TD_OK) {
    st = td_engine_step(w->engine, step->seqs, step->n, err);
  }
  if (st != TD_OK) return td_err_prefix(err, "a step of %u sequences failed", step->n);
  if (w->streaming) td_engine_note_written(w->streaming, step->seqs, step->n);
  td_step_note(step, td_clock_ns() - now_ns);
  return post_results(w, w->engine, step, err);
}

// ---- prefill with streamed experts --------------------------------------------------------------

// Ends the step in progress: all of it is computed, or nobody waits for it.
static td_status end_streaming(worker *w, td_err *err) {
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
  st = post_results(w, w->streaming, step, err);
  step->n = 0;
  return st;
}

// Prompts on all devices at once, while nothing is decoded.
static td_status run_on_all(worker *w, td_err *err) {
  td_step *step = &w->stream_step;
  td_engine_confine(w->streaming, false);
  td_status st = td_engine_step(w->streaming, step->seqs, step->n, err);
  if (st != TD_OK) return td_err_prefix(err, "a prefill of %u prompts failed", step->n);
  td_step_hold(step, false);
  td_debug("prefill of %u tokens on %u devices: %.2f s", step->n_prefilled, w->devices.n_peers + 1,
           (double)(td_clock_ns() - w->stream_begin_ns) * 1e-9);
  st = post_results(w, w->streaming, step, err);
  step->n = 0;
  return st;
}

static bool is_decoding(const worker *w) {
  for (uint32_t i = 0; i < w->requests.n; i++) {
    if (w->requests.active[i]->phase == TD_REQUEST_DECODE) return true;
  }
  return false;
}

static td_status begin_streaming(worker *w, td_err *err) {
  td_step *step = &w->stream_step;
  const uint32_t least_tokens = td_engine_stream_tokens(w->streaming);
  w->step.stream_tokens = least_tokens;
  td_step_build_prefill(step, &w->requests, least_tokens);
  if (!step->n) return TD_OK;
  if (!td_engine_streams_all(w->streaming)) { // not yet: the other engine takes them
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
static td_status advance_streaming(worker *w, td_err *err) {
  td_status st = TD_OK;
  if (!w->streaming) return TD_OK;
  if (w->stream_step.n && (td_engine_feed(w->streaming, 0) || td_step_is_ended(&w->stream_step)))
    st = end_streaming(w, err);
  return st == TD_OK && !w->stream_step.n ? begin_streaming(w, err) : st;
}

// Queues streamed experts a short time ahead, until those of this step are all queued.
static void feed_beside(void *ctx) {
  worker *w = ctx;
  const uint64_t queued_bytes = td_engine_stream_progress(w->streaming).queued_bytes;
  const uint64_t ahead_bytes = td_stream_pace_ahead(&w->pace, 0);
  td_engine_feed(w->streaming, queued_bytes < w->stream_until_bytes ? ahead_bytes : 0);
}

// Runs the step that was built beside the prefill in progress.
static td_status run_beside_streaming(worker *w, td_err *err) {
  const uint32_t n_decode = w->step.n_decode, n_prefilled = w->step.n_prefilled;
  const td_stream_progress before = td_engine_stream_progress(w->streaming);
  w->stream_until_bytes = before.copied_bytes + td_stream_pace_ahead(&w->pace, n_decode);
  td_engine_confine(w->streaming, n_decode > 0);
  if (w->stream_step.n) feed_beside(w);
  const uint64_t begin_ns = td_clock_ns();
  td_status st = TD_OK;
  if (w->step.n) {
    st = run_step(w, err);
  } else {
    td_engine_wait(w->streaming);
  }
  const uint64_t ns = td_clock_ns() - begin_ns;
  if (w->stream_step.n) td_engine_feed(w->streaming, 0);
  w->n_beside += n_decode > 0;
  const td_stream_progress after = td_engine_stream_progress(w->streaming);
  td_stream_pace_note(&w->pace,
                      &(td_timed_step){.n_decode = n_decode,
                                       .n_prefilled = n_prefilled,
                                       .ns = ns,
                                       .copied_bytes = after.copied_bytes - before.copied_bytes,
                                       .left_bytes = after.queued_bytes - after.copied_bytes});
  return st;
}

// Begins to copy the pages of new requests to the device. Until they are there, steps of others run
// without them. Returns whether some are not.
static bool enter_pages(worker *w) {
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

static td_status serve(worker *w, td_err *err) {
  for (;;) {
    td_status st = drain(w, err);
    if (st != TD_OK || w->is_shut_down) return st;
    st = beat(w, err);
    const bool are_entering = enter_pages(w);
    if (st == TD_OK) st = advance_streaming(w, err);
    if (st != TD_OK) return st;
    td_step_build(&w->step, &w->requests);
    if (w->streaming && (w->step.n || w->stream_step.n)) {
      st = run_beside_streaming(w, err);
    } else if (w->step.n) {
      st = run_step(w, err);
    } else if (are_entering) {
      td_kv_transfer_wait(w->kv.transfer);
    } else {
      st = td_front_link_wait(&w->front_link, HEARTBEAT_NS / 1000000, err);
    }
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
  if ((uint32_t)getppid() != parent_pid) {
    return td_fail(err, TD_ECANCELED, "worker: process %u is not its parent", parent_pid);
  }
  return TD_OK;
}

static td_status attach_trace(worker *w, td_err *err) {
  if (!w->opts.trace_fd) return TD_OK;
  td_status st = td_segment_attach(&w->trace, TD_WORKER_TRACE_FD, err);
  if (st != TD_OK) return td_err_prefix(err, "worker");
  if (w->trace.n_bytes >= sizeof(td_trace_memory) &&
      td_trace_start(w->trace.base, td_worker_role_name(w->opts.role))) {
    return TD_OK;
  }
  return td_fail(err, TD_EFORMAT, "worker: descriptor %d is not for a trace", TD_WORKER_TRACE_FD);
}

static td_status attach(worker *w, td_err *err) {
  int fds[TD_CHANNEL_N_FDS];
  for (int i = 0; i < TD_CHANNEL_N_FDS; i++)
    fds[i] = TD_WORKER_FIRST_CHANNEL + i;
  w->front_link.life_fd = TD_WORKER_LIFE_FD;
  td_status st = td_channel_attach(&w->front_link.channel, fds, err);
  return st == TD_OK ? st : td_err_prefix(err, "worker");
}

// Sends FATAL to the front; logs it if that fails. Does neither if the front has died.
static int fail(worker *w, const td_err *why) {
  if (why->code == TD_ECANCELED) return 0;
  td_wire_msg msg = {.kind = TD_MSG_FATAL, .request = (uint64_t)(int64_t)why->code};
  int n = snprintf(msg.u.text, sizeof msg.u.text, "%.*s", TD_WIRE_MAX_TEXT - 1, why->msg);
  td_err err;
  bool is_told = td_front_link_send(&w->front_link, &msg, &err) == TD_OK && why->msg[n] == '\0';
  if (!is_told) td_error("%s", why->msg);
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
  worker w = {.trace = TD_SEGMENT_CLOSED};
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
