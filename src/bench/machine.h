// src/bench/machine.h - identifies the machine that a measurement was taken on, and measures its
// peaks.
#pragma once

#include <stdint.h>

#include "base/json_write.h"
#include "base/thread_pool.h"

typedef struct {
  char cpu[96], kernel[96];
  uint64_t memory_bytes;
  unsigned n_threads; // threads used by the measurement
  double read_gbps;   // read bandwidth of these threads (bench/mem_bandwidth.h)
} td_machine;

td_machine td_machine_get(void); // all but the last two members
// Writes a member "machine" with cpu, kernel, threads, memory_bytes, read_gbps.
void td_machine_json(const td_machine *machine, td_json_writer *w);

// flops.c: peak arithmetic throughput, without memory accesses.
typedef struct {
  double fma_gflops; // FP32 FMA at the widest vector length; 0: not measured on this architecture
  double dot_gflops; // BF16 dot products into FP32 (vdpbf16ps); 0 without the instruction
} td_peaks;

// Runs on all members of the pool at once, in registers only. Takes a few tenths of a second.
void td_peaks_measure(td_peaks *out, td_thread_pool *pool);
