// src/runtime/devices.h - the devices of a process: one device, or a GPU with the CPU for the
// routed experts.
#pragma once

#include "comm/comm.h"
#include "device/device.h"
#include "engine/engine.h"
#include "model/model.h"
#include "runtime/division.h"

typedef struct {
  const td_runtime_opts *runtime;
  // Free GPU memory from which placement and sizes follow, whatever is free now, so that processes
  // opened one after the other choose the same; 0: what is free.
  uint64_t gpu_bytes;
  td_worker_role role;
  bool ends_with_process; // see td_dev_opts
  bool is_alone;          // one device, whatever --devices has; so is one that decodes only
  bool has_drive;         // experts come from the drive (model/drive/arena.h): none stay on a GPU
  bool drafts;        // tokens (engine/draft.h), also by the model's layer for that where it can
  uint32_t max_seqs;  // requests with KV pages, and with drafts those of a step; 0: any number
  uint32_t kv_tokens; // of the KV pool; 0: chosen
} td_devices_opts;

typedef struct {
  td_dev *dev;
  td_dev *peers[TD_COMM_MAX_RANKS - 1]; // more devices like dev, for expert parallelism
  uint32_t n_peers;
  uint32_t parallel_tokens;     // see td_engine_opts
  td_dev *expert_dev;           // computes the routed experts; NULL: dev does
  uint32_t n_gpu_expert_layers; // with expert_dev: the first n layers have their experts on dev
  unsigned n_threads;           // CPU threads for computing
  td_placement placement;       // the final decision
  // weights, and on a discrete device also what a large prefill_chunk and streaming need
  uint64_t held_bytes;
  uint32_t max_drafts;       // of a step (td_engine_opts); 0: none, or not beside the rest
  bool has_draft_layer;      // the layer of multi-token prediction drafts on the GPU
  uint64_t draft_bytes;      // part of held_bytes: of a GPU, for drafts and that layer
  uint64_t stream_bytes;     // part of held_bytes: the ring for streamed experts (td_engine_opts)
  uint64_t cache_bytes;      // part of held_bytes: the cache of experts for decode
  uint64_t peer_cache_bytes; // more of it, in the memory of the first peer; 0: none
  bool is_cache_fixed;       // see td_engine_opts
  uint32_t stream_from;      // prompt tokens of a step from which experts stream
  uint32_t prefill_chunk;    // tokens per step; larger steps amortize streaming better
  uint32_t n_streamed_dense; // layers whose dense weights also stream (td_engine_opts)
  td_long_steps long_steps;  // prompts; prefill_chunk 0: no such steps
  td_dev *vision_dev;        // a CPU for the tower where no other device is one; else NULL
  td_vision *vision;         // td_devices_open_vision; NULL: the model does not see
} td_devices;

// TD_EINVAL: see td_placement_check. Otherwise the errors of td_dev_open; the message of TD_ENOMEM
// names the cure. Call td_devices_close in every case.
td_status td_devices_open(td_devices *out, const td_devices_opts *opts, const td_model *model,
                          td_err *err);
void td_devices_close(td_devices *devices);
// Tells CPU devices how the model's weights lie on NUMA nodes, and registers their memory with the
// devices that copy from it: with an arena, which may be NULL, that of its experts. Borrowed.
void td_devices_use_memory(const td_devices *devices, const td_model *model,
                           const td_expert_arena *arena);
// Has images embedded by the CPU, for engines' opts.vision, if the model sees. Opened before and
// closed after the engines.
td_status td_devices_open_vision(td_devices *devices, const td_model *model, td_err *err);
// Gives the cache of experts to an engine, if it is fixed or the weights are in memory that the
// device copies from at full speed; logs if they are not.
void td_devices_use_cache(const td_devices *devices, const td_model *model, td_engine_opts *out);
// Opens the engine of td_devices.long_steps, otherwise with opts, in the memory of the weights'
// copies. Nothing is queued on the device, and until the engine is closed no other may run there.
// On error *out is NULL, and no long prompts are tried any more, which is logged.
void td_devices_open_long_engine(td_engine **out, td_devices *devices, const td_model *model,
                                 const td_engine_opts *opts);
// Lets an engine compute prompts on all devices.
void td_devices_use_peers(const td_devices *devices, td_engine_opts *out);
