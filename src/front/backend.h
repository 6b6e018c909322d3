// src/front/backend.h - the front's handle on its worker processes, on the front's libuv loop.
// Submitting, scheduling (sched/), the rings (shm/), and supervision stand behind it; sockets and
// protocols know only this. All calls and callbacks happen on the loop's thread.
#ifndef TD_FRONT_BACKEND_H
#define TD_FRONT_BACKEND_H

#include <stdbool.h>
#include <stdint.h>
#include <uv.h>

#include "base/status.h"
#include "front/kv_disk.h"
#include "runtime/devices.h"
#include "tandem/types.h"
#include "tandem/wire.h"

typedef struct td_backend td_backend;

typedef enum {
  TD_BACKEND_LOADING, // a worker maps the model, for the first time or after another's death
  TD_BACKEND_READY,
  TD_BACKEND_STUCK,  // no heartbeat for longer than it should take
  TD_BACKEND_FAILED, // a worker could not start; td_backend_reason tells why
} td_backend_state;

// What clients are told then: the reason may name paths, and is for the log.
#define TD_BACKEND_FAILED_TEXT "the worker process failed for good; the server's log says why"

typedef struct {
  const char *model_dir;
  const char *device;       // a kind of td_dev_opts; the workers open it
  uint32_t ctx_size;        // tokens; 0: what the model allows, within memory
  uint32_t max_batch;       // sequences decoded together
  bool is_split;            // one worker reads prompts, another decodes; else one does both
  uint32_t n_threads;       // of each worker's team; 0: one for each CPU
  uint32_t kv_tokens;       // tokens the KV pool holds; 0: chosen from ctx_size and max_batch
  uint32_t prefill_chunk;   // most prompt tokens a step
  uint32_t prefill_threads; // when split: that read a prompt while answers are written; 0: half
  td_dtype kv_dtype;        // TD_F32 or TD_F16
  td_activations activations;
  td_expert_place experts;
  int weights_fd; // weights in memory (model/checkpoint/resident.h), borrowed; 0: workers map the
                  // files
  td_kv_dir *kv_dir;      // pages on disk behind the cache of prefixes, borrowed; NULL: none
  td_digest kv_model;     // all that decides what its pages hold, but for the kernels
  uint32_t kv_flush_s;    // how long they may be written at the end
  int trace_fd;           // of runtime/trace_file.h, borrowed; 0: workers do not trace
  uint32_t stuck_after_s; // silence after which a worker is STUCK; 0: 30
  void (*on_state)(void *ctx, td_backend_state state); // may be NULL
  void *ctx;
} td_backend_opts;

// What to answer. Arrays are copied by submit.
typedef struct {
  const int32_t *prompt;
  uint32_t n_prompt, max_tokens, flags; // TD_SUBMIT_*
  td_sampling sampling;
  const td_token_value *bias;
  uint32_t n_bias;
  const int32_t *ends; // [n_ends], at most TD_WIRE_MAX_ENDS: see td_wire_submit
  uint32_t n_ends, min_tokens;
  uint64_t tenant; // whose it is (sched/fair_share.h), and the weight of that one; 0 is 1
  uint32_t weight;
} td_request;

// TD_EINVAL: workers that have said info cannot answer it.
td_status td_request_check(const td_request *request, const td_wire_ready *info, td_err *err);

// on_done is called exactly once and last, unless the request was canceled.
typedef struct {
  void (*on_progress)(void *ctx, const td_wire_progress *progress); // may be NULL
  void (*on_token)(void *ctx, const td_wire_token *token);
  void (*on_done)(void *ctx, const td_wire_done *done);
  void *ctx;
} td_request_callbacks;

// Starts the workers by executing this program again with inherited descriptors. Returns before the
// model is loaded. On success the caller owns *out; on error *out is NULL.
td_status td_backend_open(td_backend **out, uv_loop_t *loop, const td_backend_opts *opts,
                          td_err *err);
// Ends the workers (SHUTDOWN, then SIGKILL after a grace period) and calls closed when nothing is
// left on the loop. Requests still running end with on_done (ERROR).
void td_backend_close(td_backend *backend, void (*closed)(void *ctx), void *ctx);

td_backend_state td_backend_state_of(const td_backend *backend);
const char *td_backend_reason(const td_backend *backend);
// Zeroed until a worker is ready.
td_wire_ready td_backend_info(const td_backend *backend);
uint32_t td_backend_n_running(const td_backend *backend);
uint32_t td_backend_n_waiting(const td_backend *backend);
td_kv_disk_stats td_backend_kv_disk(const td_backend *backend); // zeros without a directory
// Times a running request made room for one that had come before it.
uint64_t td_backend_n_preemptions(const td_backend *backend);
double td_backend_kv_use(const td_backend *backend); // pages that running requests hold, 0 to 1

enum { TD_BACKEND_MAX_WORKERS = 2 };

typedef struct {
  const char *role; // "worker", "prefill" or "decode"
  td_backend_state state;
  const char *reason; // of td_supervisor_reason, borrowed until the loop goes on
  uint32_t n_restarts;
  uint32_t n_running; // requests that it has now
  // As of its last heartbeat: steps of this life, and threads that computed.
  uint64_t n_steps;
  uint32_t n_threads;
} td_backend_worker;

// Fills out and returns how many workers there are.
uint32_t td_backend_workers(const td_backend *backend,
                            td_backend_worker out[TD_BACKEND_MAX_WORKERS]);

// Whether requests may be submitted: a worker was ready once, and none has failed for good. Those
// that come while a worker is started again wait.
bool td_backend_accepts(const td_backend *backend);
// Queues a request; callbacks come later, never from inside submit. TD_EAGAIN: too many of its
// tenant's wait already, or td_backend_accepts says no. TD_EINVAL: longer than the context.
td_status td_backend_submit(td_backend *backend, const td_request *request,
                            const td_request_callbacks *callbacks, uint64_t *id, td_err *err);
// When to ask again what was refused with TD_EAGAIN, as fast as things go: 1 to 600.
uint32_t td_backend_retry_s(const td_backend *backend);
// No callback of this request comes after this call. Unknown ids are ignored.
void td_backend_cancel(td_backend *backend, uint64_t id);

#endif
