// src/runtime/gpu_probe.h - queries the GPU in a process of its own. The front never loads CUDA,
// because the driver would keep memory and threads in it permanently.
#pragma once

#include <stdint.h>

#include "base/status.h"

typedef struct {
  uint64_t free_bytes; // GPU memory free while a context is open
  double link_gbps;    // td_dev_link_gbps
  char name[64];       // of the device, NUL-terminated
} td_gpu_facts;

// Runs this program again as `tandem worker probe`, which takes milliseconds without a driver, and
// as long as CUDA's start-up with one. need_bytes: size of the weights. TD_EUNSUPPORTED: no usable
// GPU of that index. TD_ENOMEM: the weights do not fit. The message gives the reason and the cure.
td_status td_gpu_probe(td_gpu_facts *out, uint32_t index, uint64_t need_bytes, td_err *err);

// Main function of that process; its arguments after "probe" are need=BYTES and index=N. Returns
// the exit status.
int td_gpu_probe_main(int argc, char **argv);
