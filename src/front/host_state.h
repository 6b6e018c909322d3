// src/front/host_state.h - where a model is in its life, and what /health, /v1/models and /metrics
// call that.
#pragma once

//   SLEEPING   neither weights nor workers
//   LOADING    weights are read or workers start: at first, after a sleep, after a crash
//   STUCK      a worker makes no progress
//   FAILED     the last attempt to load it failed, or its workers did; the log says why
//   UNLOADING  workers end, and KV pages are written to --kv-dir
#define TD_HOST_STATES(X)                                                                          \
  X(SLEEPING, "sleeping")                                                                          \
  X(LOADING, "loading")                                                                            \
  X(READY, "ok")                                                                                   \
  X(STUCK, "stuck")                                                                                \
  X(FAILED, "failed")                                                                              \
  X(UNLOADING, "unloading")

typedef enum {
#define X(id, name) TD_HOST_##id,
  TD_HOST_STATES(X)
#undef X
      TD_N_HOST_STATES
} td_host_state;

static inline const char *td_host_state_name(td_host_state state) {
  static const char *const names[] = {
#define X(id, name) name,
      TD_HOST_STATES(X)
#undef X
  };
  return names[state];
}
