// src/base/jitter.h - random measurements, and random delays before a stream's operations, so that
// tests exercise concurrent operations in more orders than an idle machine produces. Used by the
// CPU device's streams and by the CUDA emulator, which compiles this file as well.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// State of one stream; used by one thread.
typedef struct {
  uint64_t seed; // 0: no delays
  uint64_t n_operations;
  unsigned n_delayed, n_long; // out of 64 operations; out of 64 delays
} td_jitter;

typedef enum { TD_JITTER_CPU, TD_JITTER_EMULATOR } td_jitter_kind;

// For a stream being opened. Delays depend on the environment variable TANDEM_JITTER, on the number
// of streams of this kind opened since it changed, and on the operation's number. Any thread.
td_jitter td_jitter_open(td_jitter_kind kind);

void td_jitter_sleep(td_jitter *jitter);

// Call before every operation. Waits not at all, up to 200 us, or 1 to 3 ms for a long delay.
static inline void td_jitter_wait(td_jitter *jitter) {
  if (jitter->seed) td_jitter_sleep(jitter);
}

// A measured time: ns itself or, with the environment variable TANDEM_TIMES (a seed), a random one
// from 0 to 16 times as long. No text may depend on what a measurement chooses. Any thread.
uint64_t td_jitter_time(uint64_t ns);

#ifdef __cplusplus
}
#endif
