// src/runtime/predict.h - how long a GPU takes to prefill, from bytes over its link's rate and
// operations over its own, and to decode beside the CPU, from bytes over the memories' rates. Pure
// arithmetic, without a device.
#ifndef TD_RUNTIME_PREDICT_H
#define TD_RUNTIME_PREDICT_H

#include <stdbool.h>
#include <stdint.h>

#include "engine/step_plan.h"
#include "model/model.h"
#include "runtime/placement.h"

typedef struct {
  const char *name;
  uint64_t memory_bytes;
  double link_gbps; // from pinned host memory, 10^9 bytes/s
  double tflops;    // that prefill reaches, 10^12 operations/s
} td_gpu_card;

// What of a model determines the time.
typedef struct {
  const td_model_config *config;
  uint64_t active_params;
  uint64_t other_bytes;                // weights that are no routed experts
  uint64_t layer_bytes[TD_MAX_LAYERS]; // of routed experts; 0: a dense layer
  td_dense_size dense[TD_MAX_LAYERS];  // of other matrices that can stream
} td_prefill_load;

td_prefill_load td_prefill_load_of(const td_model *model);

// How a card's memory is divided, as a worker would.
typedef struct {
  bool fits;                    // at least the weights that are no routed experts do
  bool experts_stream;          // or else all experts are in the card's memory
  uint32_t n_gpu_expert_layers; // the first layers, whose experts never leave it
  uint64_t cache_bytes;         // for experts that decode used last
  uint32_t n_cached;            // experts that fit there, with decode steps of 16 sequences
  td_gpu_plan memory;
  td_gpu_pair pair;                 // of two such cards
  uint64_t weight_bytes, own_bytes; // in the card's memory: no routed experts; routed experts
  // KV pages in what is left, for as many requests as `serve` decodes by default. Two of these
  // cards, one for prefill and one for decode, both hold them.
  uint64_t kv_bytes;
  uint32_t kv_tokens;
  uint32_t n_streamed_dense; // layers whose dense weights stream, see td_engine_opts
} td_card_plan;

td_card_plan td_card_plan_of(const td_prefill_load *load, const td_gpu_card *card);
// Of the first of two such cards, which prefills only.
td_card_plan td_card_plan_for_prefill(const td_card_plan *plan);

typedef struct {
  td_step_plan step;        // of a chunk
  uint32_t n_steps;         // chunks
  double link_s, compute_s; // of each alone
  double seconds;
} td_prefill_time;

// A prompt of n_tokens, with all experts and dense weights streamed that are not in the card's
// memory.
td_prefill_time td_prefill_time_of(const td_prefill_load *load, const td_card_plan *plan,
                                   const td_gpu_card *card, uint32_t n_tokens);

// What decode depends on and a prediction has to assume.
typedef struct {
  double host_gbps, gpu_gbps; // that the CPU reads weights with, and the GPU, 10^9 bytes/s
  double hit_rate;            // share of a token's experts that the cache holds, 0 to 1
} td_decode_rates;

typedef struct {
  td_step_plan step;
  double host_s, gpu_s; // of each alone
  double seconds;       // a layer's experts on both sides at the same time, after its attention
} td_decode_time;

// One token of one sequence, a step of its own.
td_decode_time td_decode_time_of(const td_prefill_load *load, const td_card_plan *plan,
                                 const td_decode_rates *rates);

#endif
