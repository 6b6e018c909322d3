// src/front/worker_process.h - one worker process on the front's loop: spawn, messages both ways,
// exit. The worker is this program executed again with the channel's descriptors inherited. A pipe
// whose write end only this process holds lets the worker detect that the front has died. Thread:
// the loop's.
#pragma once

#include <uv.h>

#include "base/status.h"
#include "tandem/wire.h"
#include "worker/args.h"

typedef struct td_process td_process;

typedef struct {
  void (*on_record)(void *ctx, const td_wire_msg *msg); // not validated
  void (*on_space)(void *ctx);                          // the ring has room again
  // The last callback: the process has exited, all its messages and output were received, and none
  // of its handles is on the loop. why is a sentence ("the worker process died (signal 9,
  // Killed)"); said is the last line of its stderr or "". The td_process is freed after the call.
  void (*on_exit)(void *ctx, const char *why, const char *said);
  void *ctx;
} td_process_events;

// On error *out is NULL and no event comes, but the loop must run once more to free resources.
// kv_fd is the KV pool's, borrowed.
td_status td_process_spawn(td_process **out, uv_loop_t *loop, const td_worker_opts *opts, int kv_fd,
                           const td_process_events *events, td_err *err);

// TD_EAGAIN: the ring is full; on_space follows. TD_EFORMAT: the ring is corrupt; the process is
// killed and on_exit follows.
td_status td_process_send(td_process *process, const td_wire_msg *msg);
// Sets the number of threads it may use from its next operator on; 0: all.
void td_process_lease(td_process *process, uint32_t n_threads);
// A counter that changes while the worker computes.
uint32_t td_process_pulse(const td_process *process);
// A number that changes while the worker makes progress, even before its first message: pulse, CPU
// time and page faults.
uint64_t td_process_progress(const td_process *process);
// Receives pending messages without waiting for the loop.
void td_process_drain(td_process *process);
void td_process_kill(td_process *process);
// After td_process_kill: why the process has not exited, as a part of a sentence.
void td_process_lingers(const td_process *process, char *out, size_t n_bytes);
