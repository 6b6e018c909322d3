// src/front/request_state.c - the table of a request's transitions.
#include "front/request_state.h"

#include "base/log.h"
#include "base/status.h"

#define TO(id) (1u << TD_REQUEST_##id)

// From each state, the states that may follow.
static const unsigned followers[TD_N_REQUEST_STATES] = {
    [TD_REQUEST_QUEUED] = TO(LOADING) | TO(HELD) | TO(SENDING) | TO(ENDED),
    [TD_REQUEST_LOADING] = TO(LOADING_RECALLED) | TO(LOADING_CANCELED) | TO(HELD) | TO(SENDING) |
                           TO(ENDED),
    [TD_REQUEST_LOADING_RECALLED] = TO(LOADING_CANCELED) | TO(QUEUED) | TO(ENDED),
    [TD_REQUEST_LOADING_CANCELED] = TO(ENDED),
    [TD_REQUEST_HELD] = TO(SENDING) | TO(QUEUED) | TO(ENDED),
    [TD_REQUEST_SENDING] = TO(RUNNING) | TO(QUEUED) | TO(ENDED),
    // HELD, SENDING: for the other worker, or for a restarted one
    [TD_REQUEST_RUNNING] = TO(HELD) | TO(SENDING) | TO(QUEUED) | TO(RECALLED) | TO(COMPLETE) |
                           TO(CANCELED) | TO(ENDED),
    // COMPLETE: the last token was on its way
    [TD_REQUEST_RECALLED] = TO(QUEUED) | TO(COMPLETE) | TO(CANCELED) | TO(ENDED),
    [TD_REQUEST_COMPLETE] = TO(CANCELED) | TO(ENDED),
    [TD_REQUEST_CANCELED] = TO(ENDED),
    [TD_REQUEST_ENDED] = 0,
};

const char *td_request_state_name(td_request_state state) {
  static const char *const names[] = {
#define X(id, name) name,
      TD_REQUEST_STATES(X)
#undef X
  };
  return (unsigned)state < TD_N_REQUEST_STATES ? names[state] : "unknown";
}

bool td_request_may_become(td_request_state from, td_request_state to) {
  return (unsigned)from < TD_N_REQUEST_STATES && (unsigned)to < TD_N_REQUEST_STATES &&
         followers[from] >> to & 1;
}

void td_request_become(td_request_state *state, td_request_state to, uint64_t id) {
  const bool is_allowed = td_request_may_become(*state, to);
  if (!is_allowed) {
    td_error("request %llu is %s and cannot become %s", (unsigned long long)id,
             td_request_state_name(*state), td_request_state_name(to));
  }
  TD_CHECK(is_allowed);
  *state = to;
}
