// src/front/backend.h - the front's interface to its worker processes, on the front's libuv loop.
// It hides submission, scheduling (sched/), the rings (shm/) and supervision; sockets and protocols
// see only this header. All calls and callbacks happen on the loop's thread.
#pragma once

#include <stdbool.h>
#include <stdint.h>
#include <uv.h>

#include "base/status.h"
#include "front/kv_disk.h"
#include "front/kv_events.h"
#include "front/pictures.h"
#include "runtime/devices.h"
#include "tandem/wire.h"

typedef struct td_backend td_backend;

typedef enum {
  TD_BACKEND_LOADING, // a worker is loading the model, at first start or after a crash
  TD_BACKEND_READY,
  TD_BACKEND_STUCK,  // no heartbeat for longer than stuck_after_s
  TD_BACKEND_FAILED, // a worker could not start; see td_backend_reason
} td_backend_state;

// Sent to clients in that state. The reason itself may contain paths and goes only to the log.
#define TD_BACKEND_FAILED_TEXT "the worker process failed for good; the server's log says why"

typedef struct {
  td_runtime_opts runtime; // texts are borrowed during the call
  uint32_t max_batch;      // sequences decoded together
  bool is_split;           // one worker for prefill, one for decode; else one for both
  bool cache_output;       // see td_sched_opts.shares_output
  // With is_split: workers have a GPU each, the first and the second of runtime.devices.
  bool has_gpus;
  uint32_t kv_tokens;       // size of the KV pool in tokens; 0: chosen from ctx_size and max_batch
  uint32_t decode_slowdown; // by streamed prefill, in percent
  uint32_t gpu_mib;         // free GPU memory that each worker divides; 0: what it finds free
  uint32_t prefill_threads; // when split: prefill's threads while decode is active; 0: half
  // weights in shared memory (model/checkpoint/resident.h), borrowed; 0: workers map the files
  int weights_fd;
  td_kv_dir *kv_dir; // on-disk tier of the prefix cache, borrowed; NULL: none
  // fingerprint of all that determines the content of KV pages, except the kernels
  td_digest kv_model;
  int images_fd;           // of the pixels of images (pictures.h), borrowed; 0: it does not see
  uint32_t kv_flush_s;     // time limit for writing pages to it at shutdown
  td_kv_events *kv_events; // told of the prefix cache's changes, borrowed; NULL: none
  int trace_fd;            // of runtime/trace_file.h, borrowed; 0: workers do not trace
  uint32_t stuck_after_s;  // seconds without a heartbeat until a worker is STUCK; 0: 30
  void (*on_state)(void *ctx, td_backend_state state); // may be NULL
  void *ctx;
} td_backend_opts;

// Most bytes of compiled grammars of one tenant's requests together.
#define TD_BACKEND_GRAMMAR_BYTES (16u << 20)

// What to generate. td_backend_submit copies the arrays.
typedef struct {
  const int32_t *prompt;
  uint32_t n_prompt, max_tokens, flags; // TD_SUBMIT_*
  td_sampling sampling;
  const td_wire_dry *dry; // NULL: off
  const td_token_value *bias;
  uint32_t n_bias;
  const char *grammar; // [n_grammar] bytes of text/grammar/grammar.h; what is generated must match
  uint32_t n_grammar;  // 0: any text
  const int32_t *ends; // [n_ends], at most TD_WIRE_MAX_ENDS: see td_wire_submit
  uint32_t n_ends, min_tokens;
  uint32_t n_keep; // prompt tokens that a later prompt is likely to begin with; 0: all
  uint64_t tenant; // tenant (sched/fair_share.h) and that tenant's weight; weight 0 means 1
  uint32_t weight;
  uint64_t salt;             // keeps its prefix cache apart (kv/kv.h); 0: shared
  const char *salt_text;     // what KV events call the salt; NULL: its digits
  td_picture_list *pictures; // of the prompt; NULL: none
} td_request;

// TD_EINVAL: workers whose READY was info cannot run this request.
td_status td_request_check(const td_request *request, const td_wire_ready *info, td_err *err);

// on_done is called exactly once, as the last callback, unless the request is canceled.
typedef struct {
  void (*on_progress)(void *ctx, const td_wire_progress *progress); // may be NULL
  void (*on_token)(void *ctx, const td_wire_token *token);
  // With TD_SUBMIT_SCORE_PROMPT: every token of the prompt but the first, once, in order. May be
  // NULL.
  void (*on_prompt_token)(void *ctx, const td_wire_token *token);
  void (*on_done)(void *ctx, const td_wire_done *done);
  void *ctx;
} td_request_callbacks;

// Starts the workers by executing this program again with inherited descriptors. Returns before the
// model is loaded. On success the caller owns *out; on error *out is NULL.
td_status td_backend_open(td_backend **out, uv_loop_t *loop, const td_backend_opts *opts,
                          td_err *err);
// Stops the workers (SHUTDOWN, then SIGKILL after a grace period) and calls closed when no handle
// is left on the loop. Requests still running end with on_done (ERROR).
void td_backend_close(td_backend *backend, void (*closed)(void *ctx), void *ctx);

td_backend_state td_backend_state_of(const td_backend *backend);
const char *td_backend_reason(const td_backend *backend);
// Of the worker that prefills; zeroed until a worker is ready.
td_wire_ready td_backend_info(const td_backend *backend);
uint32_t td_backend_n_running(const td_backend *backend);
uint32_t td_backend_n_waiting(const td_backend *backend);
td_kv_disk_stats td_backend_kv_disk(const td_backend *backend); // zeros without a directory
// How often a running request was preempted for one that arrived before it.
uint64_t td_backend_n_preemptions(const td_backend *backend);
// Share of KV pages held by running requests, 0 to 1.
double td_backend_kv_use(const td_backend *backend);

enum { TD_BACKEND_MAX_WORKERS = 2 };

typedef struct {
  const char *role; // "worker", "prefill" or "decode"
  td_backend_state state;
  const char *reason; // see td_supervisor_reason; borrowed until control returns to the loop
  uint32_t n_restarts;
  uint32_t n_running; // requests at this worker now
  // From its last heartbeat: steps since it was started, active threads, the cache of experts, its
  // GPU's memory.
  uint64_t n_steps;
  uint32_t n_threads;
  td_wire_cache cache;
  td_wire_drive drive;
  uint64_t gpu_bytes, gpu_free_bytes;
} td_backend_worker;

// Fills out and returns the number of workers.
uint32_t td_backend_workers(const td_backend *backend,
                            td_backend_worker out[TD_BACKEND_MAX_WORKERS]);

// Whether requests may be submitted: a worker has been READY at least once and none is FAILED.
// Requests submitted while a worker restarts are queued.
bool td_backend_accepts(const td_backend *backend);
// Queues a request; callbacks never run from inside submit. TD_EAGAIN: the tenant's queue is full,
// or td_backend_accepts is false. TD_EINVAL: longer than the context.
td_status td_backend_submit(td_backend *backend, const td_request *request,
                            const td_request_callbacks *callbacks, uint64_t *id, td_err *err);
// Estimated seconds until a request refused with TD_EAGAIN is worth retrying, 1 to 600.
uint32_t td_backend_retry_s(const td_backend *backend);
// No callback of this request runs after this call. Unknown ids are ignored.
void td_backend_cancel(td_backend *backend, uint64_t id);
