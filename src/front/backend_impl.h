// src/front/backend_impl.h - what the files of the backend share. backend_flow.c moves requests
// from the queue through the workers to their ends; backend.c has the callers' side, and workers
// that come and go.
#ifndef TD_FRONT_BACKEND_IMPL_H
#define TD_FRONT_BACKEND_IMPL_H

#include "front/backend.h"
#include "front/outbox.h"
#include "front/supervisor.h"
#include "sched/sched.h"

typedef struct td_front_request td_front_request;

// A worker, and what is on its way to it.
typedef struct {
  td_backend *backend;
  td_supervisor *supervisor; // NULL once closed
  td_outbox outbox;
  td_front_request *on_probation; // the one suspect of having killed it that it has now; NULL: none
  bool is_dying;                  // what it had is being looked through
} td_worker_handle;

// A request from submit to its end.
struct td_front_request {
  td_outgoing out; // first
  td_request_callbacks callbacks;
  td_worker_handle *at;  // NULL while it waits
  uint32_t n_output;     // tokens of the answer that came, behind the prompt in out.tokens
  bool is_last;          // the answer ends with the last of them
  uint32_t n_past;       // tokens, of prompt and answer, that its pages hold
  bool was_given;        // to a worker, once
  uint32_t n_cached;     // tokens of the prompt that were found in the cache of prefixes at first
  uint32_t max_progress; // most tokens, of prompt and answer, that were ever computed
  uint32_t crash_score;  // for deaths of workers
  uint64_t prefill_ns, read_ns; // time it took to read the prompt, and when that was done
  td_kv_disk_read *loading;     // its pages come from the disk: neither waits nor is at a worker
  bool is_quarantined;          // from its worker, until a trial is over
};

struct td_backend {
  td_backend_opts opts;
  uv_loop_t *loop;
  td_worker_handle
      workers[TD_BACKEND_MAX_WORKERS]; // n_workers: the first reads prompts, the last decodes
  uint32_t n_workers, n_open;          // made; not yet closed
  td_backend_state told;               // to on_state
  int kv_fd;                           // the KV pool, which outlives workers
  td_sched *sched;                     // NULL until a worker was ready once
  td_kv_disk *tier;                    // NULL without a directory
  td_wire_ready info;
  td_front_request **slots; // [n_slots]; request id lies in slot id % n_slots
  uint32_t n_slots;
  uint64_t n_submitted;
  bool is_closing;
  void (*closed)(void *ctx);
  void *closed_ctx;
};

// Below here: backend_flow.c.

td_front_request *td_backend_find(const td_backend *b, uint64_t id); // NULL: there is none
void td_backend_free_request(td_front_request *r);                   // NULL is legal
// Takes the request out of everything and tells its caller how it ended, if there still is one;
// done may be NULL where there is none.
void td_backend_end_request(td_backend *b, td_front_request *r, const td_wire_done *done);
void td_backend_fail_all(td_backend *b, const char *why);
// Admits what fits, and sends it. No callback comes from inside.
void td_backend_pump(td_backend *b);
// Of td_supervisor_opts; ctx is a td_worker_handle.
void td_backend_on_record(void *ctx, const td_wire_msg *msg);
void td_backend_on_space(void *ctx);
void td_backend_on_death(void *ctx, const char *why);

#endif
