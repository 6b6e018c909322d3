// src/base/jitter.h - random delays before the operations of a stream, so that tests run what goes
// on side by side in other orders than an idle machine would. The CPU device's streams use them,
// and those of the CUDA emulator, which compiles this file as well.
#ifndef TD_BASE_JITTER_H
#define TD_BASE_JITTER_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// One stream's; used by one thread.
typedef struct {
  uint64_t seed; // 0: no delays
  uint64_t n_operations;
  unsigned n_delayed, n_long; // of 64 operations; of 64 delays
} td_jitter;

typedef enum { TD_JITTER_CPU, TD_JITTER_EMULATOR } td_jitter_kind;

// For a stream that is opened now. Delays depend on the environment's TANDEM_JITTER, on how many
// streams of this kind have been opened since that changed, and on the operation's number. Any
// thread.
td_jitter td_jitter_open(td_jitter_kind kind);

void td_jitter_sleep(td_jitter *jitter);

// Before every operation: nothing, or up to 200 us, or 1 to 3 ms where a delay is long.
static inline void td_jitter_wait(td_jitter *jitter) {
  if (jitter->seed) td_jitter_sleep(jitter);
}

#ifdef __cplusplus
}
#endif

#endif
