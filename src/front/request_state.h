// src/front/request_state.h - where a request is in its life, and how it may continue. One state
// says what several flags would have to agree on; every change is checked against one table. Pure.
#pragma once

#include <stdbool.h>
#include <stdint.h>

//   QUEUED            in the scheduler's queue; new, preempted, or back from a dead worker
//   LOADING           admitted; pages of its prompt are read from disk
//   LOADING_RECALLED  preempted meanwhile: queued again when the read ends
//   LOADING_CANCELED  canceled meanwhile: ends when the read ends
//   HELD              has a worker, which is sent nothing while a crash suspect is on probation
//   SENDING           in its worker's outbox; the worker knows nothing of it yet
//   RUNNING           its worker has it: SUBMIT was sent
//   RECALLED          preempted: its worker is asked to drop it
//   COMPLETE          its last token has arrived, its worker's DONE has not
//   CANCELED          by the client: its worker is asked to drop it; no callbacks are made
//   ENDED             on_done is called unless it was canceled; it is freed
#define TD_REQUEST_STATES(X)                                                                       \
  X(QUEUED, "queued")                                                                              \
  X(LOADING, "loading")                                                                            \
  X(LOADING_RECALLED, "loading, recalled")                                                         \
  X(LOADING_CANCELED, "loading, canceled")                                                         \
  X(HELD, "held")                                                                                  \
  X(SENDING, "sending")                                                                            \
  X(RUNNING, "running")                                                                            \
  X(RECALLED, "recalled")                                                                          \
  X(COMPLETE, "complete")                                                                          \
  X(CANCELED, "canceled")                                                                          \
  X(ENDED, "ended")

typedef enum {
#define X(id, name) TD_REQUEST_##id,
  TD_REQUEST_STATES(X)
#undef X
      TD_N_REQUEST_STATES
} td_request_state;

const char *td_request_state_name(td_request_state state);

bool td_request_may_become(td_request_state from, td_request_state to);
// Changes *state. A change that is not in the table is a fault of this program: the log names the
// request and both states, and the process aborts.
void td_request_become(td_request_state *state, td_request_state to, uint64_t id);

// Pages are being read from disk, and are written to until that ends.
static inline bool td_request_is_loading(td_request_state s) {
  return s == TD_REQUEST_LOADING || s == TD_REQUEST_LOADING_RECALLED ||
         s == TD_REQUEST_LOADING_CANCELED;
}

// A worker has it, and its DONE or death is still to come.
static inline bool td_request_is_at_worker(td_request_state s) {
  return s == TD_REQUEST_RUNNING || s == TD_REQUEST_RECALLED || s == TD_REQUEST_COMPLETE ||
         s == TD_REQUEST_CANCELED;
}

static inline bool td_request_is_canceled(td_request_state s) {
  return s == TD_REQUEST_CANCELED || s == TD_REQUEST_LOADING_CANCELED;
}
