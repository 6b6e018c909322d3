// src/runtime/devices.h - what a process computes with: one device, or a GPU and beside it the CPU,
// which has the routed experts.
#ifndef TD_RUNTIME_DEVICES_H
#define TD_RUNTIME_DEVICES_H

#include "device/device.h"
#include "model/model.h"
#include "runtime/placement.h"

typedef struct {
  td_dev_opts dev; // need_bytes is not read: it follows from the model
  td_expert_place experts;
  uint32_t prefill_chunk; // tokens; 0: chosen
  uint32_t ctx_size;      // tokens; 0: as kv_plan.h has it
} td_devices_opts;

typedef struct {
  td_dev *dev;
  td_dev *expert_dev;           // NULL: dev has them
  uint32_t n_gpu_expert_layers; // else, layers from the first whose experts dev has
  unsigned n_threads;           // the CPU's to compute with
  td_placement placement;       // as it came out
  uint64_t held_bytes;    // weights; of dev's own memory also what a large prefill_chunk needs
  uint64_t stream_bytes;  // of those, for experts of prompts that pass through dev (td_engine_opts)
  uint32_t prefill_chunk; // tokens a step: the more, the better it pays that experts pass through
} td_devices;

// TD_EINVAL: see td_placement_check. Else the errors of td_dev_open; TD_ENOMEM names the cure.
// Closed in any case.
td_status td_devices_open(td_devices *out, const td_devices_opts *opts, const td_model *model,
                          td_err *err);
void td_devices_close(td_devices *devices);

#endif
