// tests/cuda_emu/race.h - finds races on shared memory: two threads of a block at the same byte, at
// least one of them writing, with no barrier between them. What orders accesses is what CUDA says
// does: __syncthreads, a barrier in shared memory on which one warp arrives and for which the other
// waits, and __syncwarp within a warp; shuffles and mma do not.
// wgmma's products read shared memory by another way than threads write it, so there a barrier
// alone orders nothing: whoever wrote must have fenced (fence.proxy.async) before it. In
// libtandem_cuda_emu_races.so the compiler's instrumentation for ThreadSanitizer calls race.cpp at
// every access that a kernel makes; its own runtime is not linked. libtandem_cuda_emu.so looks for
// none.
#pragma once

#include "emu.h"

// Where a thread of a block is. n_barriers goes on from block to block and is never 0.
struct race_time {
  uint32_t n_barriers;
  uint16_t n_warp_barriers, thread; // the former since the last barrier
  uint32_t n_arrivals; // of the thread's warp at barriers in shared memory, in this block
};
struct race_clock : race_time {
  uint32_t n_publishes;
};

// What a host thread's accesses are held against.
struct race_record;
// A warp's last read of any of RACE_GRAIN bytes.
struct race_read {
  uint32_t n_barriers, n_arrivals;
};
enum { RACE_GRAIN = 16 };
struct race_view {
  const race_clock *now; // of the kernel's thread that runs; NULL: none
  uintptr_t begin;       // shared memory
  size_t n_bytes;
  race_record *records; // [n_bytes / 2] of pairs of bytes, and [n_bytes / 2] of second bytes
  race_read *reads;     // [EMU_MAX_WARPS][n_bytes / RACE_GRAIN + 1]
  bool has_phases;      // the block has barriers in shared memory, and `reads` are kept
};
// The host thread's own, with its memory.
race_view *race_begin();
// What the library does for the thread that runs counts as the thread's own access, by the kernel's
// code there.
void race_note(const void *at, size_t n_bytes, bool is_write, const void *code);
// From now on, to the end of the block, with the times of each warp's reads.
void race_keep_reads();
// Whether products may read what was written then: a thread of this block has published it, and
// met the others, since.
bool emu_is_published(const race_clock &write);
// Whether the thread that is `now` has waited for a phase that warp `warp` arrived at behind its
// first n_arrivals.
bool emu_has_seen(const race_clock &now, unsigned warp, uint32_t n_arrivals);
