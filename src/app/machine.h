// src/app/machine.h - which machine a measurement was taken on, and how fast it reads memory.
#ifndef TD_APP_MACHINE_H
#define TD_APP_MACHINE_H

#include <stdint.h>

#include "base/json_write.h"
#include "base/status.h"

typedef struct {
  char cpu[96], kernel[96];
  unsigned n_threads; // used by the measurement
  uint64_t memory_bytes;
  double read_gbps; // all threads reading, 10^9 bytes a second
} td_machine;

// Reads a buffer far larger than the caches with n_threads threads (0: one for each CPU), several
// times, and keeps the best. Takes about a second. TD_ENOMEM.
td_status td_machine_measure(td_machine *out, unsigned n_threads, td_err *err);
// One object: cpu, kernel, threads, memory_bytes, read_gbps.
void td_machine_json(const td_machine *machine, td_json_writer *w, const char *key);

#endif
