// tests/cuda_emu/race.h - finds races on shared memory: two threads of a block at the same byte, at
// least one of them writing, with no barrier between them. What orders accesses is what CUDA says
// does: __syncthreads, and __syncwarp within a warp; shuffles and mma do not.
// wgmma's products read shared memory by another way than threads write it, so there a barrier
// alone orders nothing: whoever wrote must have fenced (fence.proxy.async) before it. The
// compiler's instrumentation for ThreadSanitizer calls race.cpp at every access that a kernel
// makes; its own runtime is not linked.
#ifndef TESTS_CUDA_EMU_RACE_H
#define TESTS_CUDA_EMU_RACE_H

#include "emu.h"

// Where a thread of a block is. n_barriers goes on from block to block and is never 0.
struct race_clock {
  uint32_t n_barriers;
  uint16_t n_warp_barriers, thread; // the former since the last barrier
  uint32_t n_publishes;
};

// What a host thread's accesses are held against.
struct race_record;
struct race_view {
  const race_clock *now; // of the kernel's thread that runs; NULL: none
  uintptr_t begin;       // shared memory
  size_t n_bytes;
  race_record *records; // [n_bytes]
};
// The host thread's own, with its memory.
race_view *race_begin();
// Whether products may read what was written then: a thread of this block has published it, and
// met the others, since.
bool emu_is_published(const race_clock &write);

#endif
