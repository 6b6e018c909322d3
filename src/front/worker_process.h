// src/front/worker_process.h - one worker process on the front's loop: starting it, hearing and
// telling it, and learning of its end. It is started by executing this program again, with the
// channel's descriptors inherited; a pipe that only this process holds open tells it that the front
// lives.
#ifndef TD_FRONT_WORKER_PROCESS_H
#define TD_FRONT_WORKER_PROCESS_H

#include <uv.h>

#include "base/status.h"
#include "tandem/wire.h"
#include "worker/args.h"

typedef struct td_process td_process;

typedef struct {
  void (*on_record)(void *ctx, const td_wire_msg *msg); // as the worker wrote it: unchecked
  void (*on_space)(void *ctx);                          // td_process_send works again
  // The last call: the process has ended, all it wrote was heard, nothing of it is on the loop.
  // why is a sentence ("the worker process died (signal 9, Killed)"), said the last line it wrote
  // to its stderr or "". The td_process is freed after the call.
  void (*on_exit)(void *ctx, const char *why, const char *said);
  void *ctx;
} td_process_events;

// On error *out is NULL and no event comes, but the loop must run once more to free what was begun.
// kv_fd is the KV pool's, borrowed.
td_status td_process_spawn(td_process **out, uv_loop_t *loop, const td_worker_opts *opts, int kv_fd,
                           const td_process_events *events, td_err *err);

// TD_EAGAIN: the ring is full; on_space comes. TD_EFORMAT: the ring is corrupt; the process is
// killed and on_exit comes.
td_status td_process_send(td_process *process, const td_wire_msg *msg);
// How many threads it may compute with from its next operator on; 0: all.
void td_process_lease(td_process *process, uint32_t n_threads);
// Another number than a moment ago: it computes.
uint32_t td_process_pulse(const td_process *process);
// Another number than a moment ago: it gets on, though it may not have said a word yet. Its pulse,
// CPU time and page faults.
uint64_t td_process_progress(const td_process *process);
// Hears what the process has written so far, without waiting for the loop.
void td_process_drain(td_process *process);
void td_process_kill(td_process *process);
// After td_process_kill: what the process still does instead of ending, as a part of a sentence.
void td_process_lingers(const td_process *process, char *out, size_t n_bytes);

#endif
