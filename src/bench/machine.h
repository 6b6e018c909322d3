// src/bench/machine.h - identifies the machine that a measurement was taken on.
#pragma once

#include <stdint.h>

#include "base/json_write.h"

typedef struct {
  char cpu[96], kernel[96];
  uint64_t memory_bytes;
  unsigned n_threads; // threads used by the measurement
  double read_gbps;   // read bandwidth of these threads (bench/mem_bandwidth.h)
} td_machine;

td_machine td_machine_get(void); // all but the last two members
// Writes a member "machine" with cpu, kernel, threads, memory_bytes, read_gbps.
void td_machine_json(const td_machine *machine, td_json_writer *w);
