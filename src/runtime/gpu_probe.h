// src/runtime/gpu_probe.h - what GPU there is, found out by a process of its own: the front never
// loads CUDA, whose driver would hold memory and threads of it for good.
#ifndef TD_RUNTIME_GPU_PROBE_H
#define TD_RUNTIME_GPU_PROBE_H

#include <stdint.h>

#include "base/status.h"

typedef struct {
  uint64_t free_bytes; // of its memory, with a context open
  char name[64];       // of the device
} td_gpu_facts;

// Runs this program again as `tandem worker probe`: milliseconds without a driver, and as long as
// CUDA takes to start with one. need_bytes: of weights. TD_EUNSUPPORTED: there is no GPU that can
// be used; TD_ENOMEM: the weights do not fit. The message says why and what to do.
td_status td_gpu_probe(td_gpu_facts *out, uint64_t need_bytes, td_err *err);

// That process: need=BYTES is its third argument. Returns its exit status.
int td_gpu_probe_main(int argc, char **argv);

#endif
