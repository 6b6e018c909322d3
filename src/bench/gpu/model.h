// src/bench/gpu/model.h - a synthetic FP8 model of DeepSeek-V3's shape whose layers share their
// weights: 11.3 GB of experts instead of 654 GB, but as many steps as the real model.
#pragma once

#include "model/model.h"

typedef struct {
  td_model *model;
  td_model_config config;
  td_weight *experts; // [3][n_experts]
  char *memory;       // contains all weights
  size_t n_bytes;
  uint64_t layer_bytes; // bytes of one layer's experts
} td_gpu_model;

// Opens a model with random weights, dimensions divided by shrink, and n_layers layers (0: as many
// as V3). TD_ENOMEM.
td_status td_gpu_model_open(td_gpu_model *out, uint32_t n_layers, uint32_t shrink,
                            unsigned n_threads, td_err *err);
// A model of fewer layers on the same weights. The caller closes it, before out.
td_status td_gpu_model_shorter(td_model **out, const td_gpu_model *m, uint32_t n_layers,
                               td_err *err);
void td_gpu_model_close(td_gpu_model *m);
