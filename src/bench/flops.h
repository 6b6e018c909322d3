// src/bench/flops.h - how fast this machine multiplies when nothing else holds it up.
#ifndef TD_BENCH_FLOPS_H
#define TD_BENCH_FLOPS_H

#include "base/thread_pool.h"

typedef struct {
  double fma_gflops; // FP32 fused multiply-add, the widest vectors; 0: not measured here
  double dot_gflops; // BF16 dot products into FP32 (vdpbf16ps); 0 without the instruction
} td_peaks;

// All members of the pool at once; registers only. Takes some tenths of a second.
void td_peaks_measure(td_peaks *out, td_pool *pool);

#endif
