// src/front/backend_impl.h - shared by the backend's files. request_flow.c moves requests from the
// queue through the workers to completion; backend.c has the calls of backend.h and worker state.
// Thread: the loop's.
#pragma once

#include "front/backend.h"
#include "front/outbox.h"
#include "front/supervisor.h"
#include "model/drive/arena.h"
#include "sched/sched.h"

typedef struct td_front_request td_front_request;

// A worker and the records still to be sent to it.
typedef struct {
  td_backend *backend;
  td_supervisor *supervisor; // NULL once closed
  td_outbox outbox;
  td_front_request *on_probation; // the only crash suspect it has been sent; NULL: none
  bool is_dying;                  // td_backend_on_death is going through its requests
  uint64_t first;                 // the request whose prompt it computes before all others; 0: none
} td_worker_handle;

// A request from submit to its end.
struct td_front_request {
  td_outgoing out; // first
  td_request_callbacks callbacks;
  td_worker_handle *at;         // NULL while it waits
  uint32_t n_output;            // generated tokens received; they follow the prompt in out.tokens
  uint32_t n_past;              // tokens, prompt and generated, in its KV pages
  bool was_given;               // was sent to a worker at least once
  uint32_t n_cached;            // prompt tokens found in the prefix cache at first admission
  uint32_t n_scored;            // prompt tokens whose log-probabilities were passed on
  uint32_t max_progress;        // most tokens, prompt and generated, ever computed for it
  uint32_t crash_score;         // raised by worker crashes, see request_flow.c
  uint64_t prefill_ns, read_ns; // duration of the prefill so far, and the time it ended
  uint64_t given_prefill_ns;    // prefill_ns when it was last sent to a worker
  // What the prefix cache knows its tokens by (pictures.h): out.tokens, or owned.
  int32_t *keys;
  td_picture_list *pictures; // held; NULL: none
  uint64_t tenant, salt;
  char *salt_text;          // owned; NULL: none
  td_kv_disk_read *loading; // while pages are read from disk
};

struct td_backend {
  td_backend_opts opts;
  uv_loop_t *loop;
  td_worker_handle
      workers[TD_BACKEND_MAX_WORKERS]; // [n_workers]: the first does prefill, the last decode
  uint32_t n_workers, n_open;          // n_open: not yet closed
  td_backend_state told;               // state last passed to on_state
  int kv_fd;                           // the KV pool; it survives worker crashes
  td_sched *sched;                     // NULL until a worker has been READY
  td_kv_disk *tier;                    // NULL without a directory
  td_expert_watch watch;               // of the tier's drive
  td_wire_ready info;                  // the first worker's, or until that is READY the other's
  uint32_t n_threads;                  // of both together
  td_front_request **slots;            // [n_slots]; request id is in slot id % n_slots
  uint32_t n_slots;
  uint64_t n_submitted;
  bool is_closing;
  void (*closed)(void *ctx);
  void *closed_ctx;
};

// Below: request_flow.c.

td_front_request *td_backend_find(const td_backend *b, uint64_t id); // NULL if not found
void td_backend_free_request(td_front_request *r);                   // NULL is legal
// Removes the request everywhere, frees it and calls on_done(done) unless it was canceled: it is in
// a canceled state, or done is NULL.
void td_backend_end_request(td_backend *b, td_front_request *r, const td_wire_done *done);
void td_backend_fail_all(td_backend *b, const char *why);
// Admits what fits and sends it to the workers. Does not call callbacks.
void td_backend_pump(td_backend *b);
// Callbacks for td_supervisor_opts; ctx is a td_worker_handle.
void td_backend_on_record(void *ctx, const td_wire_msg *msg);
void td_backend_on_space(void *ctx);
void td_backend_on_death(void *ctx, const char *why);
