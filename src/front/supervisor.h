// src/front/supervisor.h - keeps a worker running: starts it, watches its heartbeat, starts it
// again when it dies, and knows when to give up.
//
// A worker is watched from its first moment: until READY for progress (CPU time, page faults),
// afterwards for its heartbeat and pulse. One that stands still is killed and started again; before
// READY that counts as three deaths where it has served, and no start may last an hour.
//
// A worker that says FATAL before the first READY, or three in a row that die before it, is a
// failure for good. One that dies while serving is started again at once; deaths in quick
// succession wait longer and longer, up to 8 s. If nine in a row do not get READY again, that is
// for good, too: what they lack, memory for instance, may be there some seconds later. Three are
// enough where the model's files are the reason.
#ifndef TD_FRONT_SUPERVISOR_H
#define TD_FRONT_SUPERVISOR_H

#include <uv.h>

#include "base/status.h"
#include "front/backend.h"
#include "tandem/wire.h"
#include "worker/args.h"

typedef struct td_supervisor td_supervisor;

typedef struct {
  td_worker_opts worker; // texts are copied, parent_pid and log_* filled in
  int kv_fd;             // of the KV pool (kv/pool.h), borrowed
  uint64_t stuck_ns;     // without a message or a pulse, after which a worker counts as stuck
  uint64_t kill_ns;      // the same, after which it is killed
  // A worker is ready; what it returns other than TD_OK ends the supervision (FAILED).
  td_status (*on_ready)(void *ctx, const td_wire_ready *info, td_err *err);
  void (*on_record)(void *ctx, const td_wire_msg *msg); // PROGRESS, TOKEN, DONE; unchecked
  void (*on_space)(void *ctx);
  // The worker is gone, with all it had been given. The state is no longer READY. why may be told
  // to clients.
  void (*on_death)(void *ctx, const char *why);
  void (*on_state)(void *ctx, td_backend_state state); // after a change
  void *ctx;
} td_supervisor_opts;

// On success the caller owns *out; on error *out is NULL (run the loop once more).
td_status td_supervisor_open(td_supervisor **out, uv_loop_t *loop, const td_supervisor_opts *opts,
                             td_err *err);
// Ends the worker; closed is called when nothing is left on the loop, never from inside. No other
// callback comes meanwhile.
void td_supervisor_close(td_supervisor *supervisor, void (*closed)(void *ctx), void *ctx);

td_backend_state td_supervisor_state(const td_supervisor *supervisor);
// Why FAILED, for the owner to report, or why a worker that was killed is not started again yet;
// else "".
const char *td_supervisor_reason(const td_supervisor *supervisor);
uint32_t td_supervisor_n_restarts(const td_supervisor *supervisor);
// What the worker said of itself last; zeroed until it has.
td_wire_heartbeat td_supervisor_heartbeat(const td_supervisor *supervisor);
// How many threads the worker may compute with from its next operator on. Each life begins with
// all.
void td_supervisor_lease(td_supervisor *supervisor, uint32_t n_threads);
// TD_EAGAIN: not now; on_space or on_death comes.
td_status td_supervisor_send(td_supervisor *supervisor, const td_wire_msg *msg);

#endif
