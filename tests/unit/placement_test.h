// tests/unit/placement_test.h - DeepSeek-V3 in FP8 without its file, for what is planned of it.
#pragma once

#include <string.h>

#include "runtime/placement.h"
#include "runtime/predict.h"
#include "unit/testing.h"

#define GB ((uint64_t)1000000000)

static const td_model_config deepseek_v3 = {.n_layers = 61,
                                            .kind = {[0 ... 60] = TD_ATTN_MLA},
                                            .n_vocab = 129280,
                                            .dim = 7168,
                                            .n_heads = 128,
                                            .max_position = 163840,
                                            .q_lora_rank = 1536,
                                            .kv_lora_rank = 512,
                                            .nope_dim = 128,
                                            .rope_dim = 64,
                                            .v_dim = 128,
                                            .n_experts = 256,
                                            .top_k = 8};

// FP8 with a scale for each 128 x 128.
static inline uint64_t expert_bytes(uint64_t dim, uint64_t expert_dim) {
  return 3 * (dim * expert_dim + dim * expert_dim / 4096);
}

// DeepSeek-V3 in FP8, whose layers' experts are 11.3 GB, without its file.
static inline td_plan_load load_of_v3(void) {
  static td_model_config config;
  config = deepseek_v3;
  memset(config.moe_layers, 0xff, sizeof config.moe_layers);
  config.moe_layers[0] &= ~(uint64_t)7;
  config.nope_dim = config.v_dim = 128;
  config.expert_dim = 2048;
  td_plan_load load = {.config = &config,
                       .active_params = 37 * GB,
                       .other_bytes = 18500000000,
                       .step_bytes = 16650000000,
                       .head_params = 129280ull * 7168,
                       .head_bytes = 129280ull * 7168 * 2};
  for (uint32_t i = 0; i < config.n_layers; i++) {
    if (i >= 3) load.layer_bytes[i] = 256 * expert_bytes(7168, 2048);
    load.dense[i] = (td_dense_size){{187 << 20, i < 3 ? 396 << 20 : 48 << 20}};
  }
  return load;
}

// All that the first GPU has is what it would have with its dense weights.
static inline void check_memory_of_first(const td_gpu_need *need, const td_gpu_plan *plan,
                                         const td_gpu_pair *pair, uint64_t cache_bytes,
                                         const td_dense_size *dense) {
  uint64_t room = plan->stream_bytes + plan->chunk_bytes + cache_bytes;
  for (uint32_t i = 61 - pair->n_streamed_dense; i < 61; i++)
    room += dense[i].bytes[TD_DENSE_ATTN] + dense[i].bytes[TD_DENSE_MLP];
  const uint64_t chunk_bytes = (uint64_t)(pair->prefill_chunk - need->usual_chunk) *
                               need->step_token_bytes;
  assert_true(pair->stream_bytes + chunk_bytes + 2 * pair->dense_ring_bytes <= room);
}
