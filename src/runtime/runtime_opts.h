// src/runtime/runtime_opts.h - which model runs, on which devices and in what precision: one struct
// from the command line through the front and its workers to the devices.
// A new option of this kind is a row here and one in options/table.c. Code that opens a device,
// places weights or starts a worker is handed the whole struct.
#pragma once

#include <stdint.h>

#include "engine/draft.h"
#include "tandem/types.h"

// Where routed experts are computed if there is a GPU. AUTO: on the GPU for as many layers as fit,
// on the CPU for the others.
typedef enum {
  TD_EXPERTS_AUTO,
  TD_EXPERTS_CPU,
  TD_EXPERTS_GPU,
  TD_N_EXPERT_PLACES
} td_expert_place;

typedef enum {
  TD_WEIGHTS_MMAP,
  TD_WEIGHTS_RESIDENT,
  TD_WEIGHTS_AUTO,
  TD_WEIGHTS_STREAM,
  TD_N_WEIGHTS_MODES
} td_weights_mode;

// Texts, borrowed: field, option.
//   model_dir  the checkpoint's directory
//   device     "cpu"; "cuda": a GPU; "auto": a usable GPU, else the CPU
//   devices    indices of GPUs, "0,1"; see td_device_list_parse
//   expert_cache  GiB, "auto" or "off"; see td_expert_cache_parse
//   mirror     a folder with the checkpoint's files on another drive; "" or NULL: none
#define TD_RUNTIME_TEXTS(X)                                                                        \
  X(model_dir, "model")                                                                            \
  X(device, "device")                                                                              \
  X(devices, "devices")                                                                            \
  X(expert_cache, "expert-cache")                                                                  \
  X(mirror, "mirror")

// Numbers: type, field, option, minimum, maximum, whether the content of KV pages depends on it (it
// is then part of the fingerprint of --kv-dir).
//   n_threads      of each process's thread pool; 0: one per CPU, one less beside a GPU
//   ctx_size       tokens; 0: chosen by kv/plan.h
//   prefill_chunk  tokens per step; 0: chosen by runtime/devices.h
//   stream_from    prompt tokens of a step from which experts stream; 0: td_stream_from
//   expert_parallel  0: automatic, 1: on, 2: off
//   draft          see engine/draft.h
//   kv_dtype       TD_F32 (the device's default, td_dev_kv_dtype), TD_F16 or TD_F8E4M3
#define TD_RUNTIME_NUMBERS(X)                                                                      \
  X(uint32_t, n_threads, "threads", 0, 4096, false)                                                \
  X(uint32_t, ctx_size, "ctx-size", 0, 1 << 24, false)                                             \
  X(uint32_t, prefill_chunk, "prefill-chunk", 0, 1 << 20, false)                                   \
  X(uint32_t, stream_from, "stream-from", 0, 1 << 24, true)                                        \
  X(uint32_t, expert_parallel, "expert-parallel", 0, 2, true)                                      \
  X(uint32_t, draft, "draft", 0, TD_N_DRAFT_MODES - 1, false)                                      \
  X(td_dtype, kv_dtype, "kv-dtype", TD_F32, TD_F8E4M3, true)                                       \
  X(td_weights_mode, weights, "weights", 0, TD_N_WEIGHTS_MODES - 1, false)                         \
  X(td_activations, activations, "activations", 0, TD_N_ACTIVATIONS - 1, true)                     \
  X(td_expert_place, experts, "expert-device", 0, TD_N_EXPERT_PLACES - 1, false)

typedef struct {
#define X(field, option) const char *field;
  TD_RUNTIME_TEXTS(X)
#undef X
#define X(type, field, option, least, most, in_kv) type field;
  TD_RUNTIME_NUMBERS(X)
#undef X
} td_runtime_opts;
