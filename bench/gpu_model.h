// bench/gpu_model.h - a model of DeepSeek-V3's shape in FP8 whose layers are one and the same in
// memory: 11.3 GB of experts instead of 654, and as many steps as a real one has.
#ifndef TD_BENCH_GPU_MODEL_H
#define TD_BENCH_GPU_MODEL_H

#include "base/thread_pool.h"
#include "model/model.h"

typedef struct {
  td_model *model;
  td_model_config config;
  td_weight *experts; // [3][n_experts]
  char *memory;       // of all weights
  size_t n_bytes;
  uint64_t layer_bytes; // of a layer's experts
} td_gpu_model;

// Random weights; dimensions divided by shrink; n_layers layers, 0: as many as V3 has. TD_ENOMEM.
td_status td_gpu_model_open(td_gpu_model *out, uint32_t n_layers, uint32_t shrink, td_pool *pool,
                            td_err *err);
// The same weights as fewer layers, the caller's to close, before out.
td_status td_gpu_model_shorter(td_model **out, const td_gpu_model *m, uint32_t n_layers,
                               td_err *err);
void td_gpu_model_close(td_gpu_model *m);

#endif
