// src/front/supervisor.h - keeps a worker running: starts it, watches it, restarts it when it dies,
// and decides when to give up. Thread: the loop's.
//
// Before READY a worker must show progress (CPU time, page faults), afterwards a heartbeat or
// pulse. A worker that shows none is killed and restarted. A hang before READY counts as three
// deaths if the worker has been READY in an earlier life; a start may take at most an hour.
//
// A worker fails for good if it sends FATAL before the first READY, or dies three times in a row
// before it. A worker that dies while serving is restarted at once; if it dies repeatedly within
// seconds, the delay grows up to 8 s. After nine deaths in a row before READY it fails for good: a
// missing resource, such as memory, may be available some seconds later. Errors in the model's
// files count as three deaths.
#pragma once

#include <uv.h>

#include "base/status.h"
#include "front/backend.h"
#include "tandem/wire.h"
#include "worker/args.h"

typedef struct td_supervisor td_supervisor;

typedef struct {
  td_worker_opts worker; // strings are copied, parent_pid and log_* filled in
  int kv_fd;             // of the KV pool (kv/pool.h), borrowed
  uint64_t stuck_ns;     // time without a message or pulse until the worker is STUCK
  uint64_t kill_ns;      // time without a message or pulse until it is killed
  // The worker is READY. A result other than TD_OK ends supervision (FAILED).
  td_status (*on_ready)(void *ctx, const td_wire_ready *info, td_err *err);
  void (*on_record)(void *ctx, const td_wire_msg *msg); // PROGRESS, TOKEN, DONE; unchecked
  // The ring has room, or a heartbeat came: time to send, and to retry what lacked memory.
  void (*on_space)(void *ctx);
  // The worker died and lost all requests it was sent. The state is no longer READY. why is safe to
  // send to clients.
  void (*on_death)(void *ctx, const char *why);
  void (*on_state)(void *ctx, td_backend_state state); // after a change
  void *ctx;
} td_supervisor_opts;

// On success the caller owns *out; on error *out is NULL (run the loop once more).
td_status td_supervisor_open(td_supervisor **out, uv_loop_t *loop, const td_supervisor_opts *opts,
                             td_err *err);
// Stops the worker; closed is called when no handle is left on the loop, never from inside. No
// other callback is called meanwhile.
void td_supervisor_close(td_supervisor *supervisor, void (*closed)(void *ctx), void *ctx);

td_backend_state td_supervisor_state(const td_supervisor *supervisor);
// Why the worker FAILED, or why a killed worker has not been restarted yet; else "".
const char *td_supervisor_reason(const td_supervisor *supervisor);
uint32_t td_supervisor_n_restarts(const td_supervisor *supervisor);
// The last heartbeat of this life; zeroed before the first.
td_wire_heartbeat td_supervisor_heartbeat(const td_supervisor *supervisor);
// Sets the number of threads the worker may use from its next operator on. After a restart it is
// all of them.
void td_supervisor_lease(td_supervisor *supervisor, uint32_t n_threads);
// TD_EAGAIN: not now; wait for on_space or on_death.
td_status td_supervisor_send(td_supervisor *supervisor, const td_wire_msg *msg);
