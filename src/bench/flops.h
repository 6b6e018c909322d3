// src/bench/flops.h - the machine's peak arithmetic throughput, without memory accesses.
#pragma once

#include "base/thread_pool.h"

typedef struct {
  double fma_gflops; // FP32 FMA at the widest vector length; 0: not measured on this architecture
  double dot_gflops; // BF16 dot products into FP32 (vdpbf16ps); 0 without the instruction
} td_peaks;

// Runs on all members of the pool at once, in registers only. Takes a few tenths of a second.
void td_peaks_measure(td_peaks *out, td_thread_pool *pool);
