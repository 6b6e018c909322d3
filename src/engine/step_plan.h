// src/engine/step_plan.h - what a step does with every layer, decided before it runs: where the
// routed experts are computed, how results pass between devices, in how many microbatches. The
// forward pass interprets the plan. Pure functions.
#ifndef TD_ENGINE_STEP_PLAN_H
#define TD_ENGINE_STEP_PLAN_H

#include <stdbool.h>
#include <stdint.h>

#include "base/buf.h"
#include "model/model.h"

enum { TD_MAX_MICROBATCHES = 2 };

// What follows a layer's attention, and on which device.
#define TD_LAYER_WAYS(X)                                                                           \
  X(DENSE, "dense")         /* an MLP, no routed experts */                                        \
  X(RESIDENT, "resident")   /* experts on the engine's device */                                   \
  X(OFFLOADED, "offloaded") /* experts on the expert device */                                     \
  X(CACHED, "cached") /* hot experts on the engine's device, the others on the expert device */    \
  X(STREAMED, "streamed") /* experts copied to the engine's device, group by group */

typedef enum {
#define X(id, name) TD_LAYER_##id,
  TD_LAYER_WAYS(X)
#undef X
      TD_N_LAYER_WAYS
} td_layer_way;

// How the engine's device and the expert device wait for each other.
typedef enum {
  TD_HANDOVER_NONE,    // no layer is offloaded
  TD_HANDOVER_HOST,    // through events; the calling thread waits at every offloaded layer
  TD_HANDOVER_SIGNALS, // both devices' work is queued up front and waits for signals
} td_handover;

typedef struct {
  uint32_t n_tokens, n_prompt; // of the step; prompt tokens among them
  uint32_t n_seqs;             // sequences that decode
  uint32_t n_ranks;            // devices that compute the step together; 0 is 1
  uint32_t n_gpu_expert_layers;
  bool has_expert_dev;
  bool may_replay;            // the device gains from replaying a step's operators
  uint32_t break_even_tokens; // prompt tokens from which experts stream; 0: never
  const bool *may_stream;     // [n_layers], read from break_even_tokens on: these layers can
  const bool *may_cache;      // [n_layers]: decode can use a cache of experts there; NULL: nowhere
  uint32_t n_microbatches;    // wanted, 1 or 2
} td_step_shape;

typedef struct {
  uint32_t n_layers, n_tokens, n_prompt, n_ranks;
  uint32_t n_microbatches;
  td_handover handover;
  bool is_replayed; // operators depend on the work key alone, so a device may replay them
  uint32_t n_ways[TD_N_LAYER_WAYS]; // layers that go each way
  uint8_t way[TD_MAX_LAYERS];       // td_layer_way
} td_step_plan;

// Whether the layer's routed experts are in the expert device's memory.
static inline bool td_layer_is_offloaded(const td_model_config *config, const td_step_shape *shape,
                                         uint32_t layer_idx) {
  return shape->has_expert_dev && layer_idx >= shape->n_gpu_expert_layers &&
         td_model_is_moe(config, layer_idx);
}

// Whether the step's prompt tokens suffice for streaming.
bool td_step_wants_streaming(const td_step_shape *shape);
// Whether a step of one token per sequence can be cut in two microbatches, both queued up front.
bool td_step_can_split(const td_model_config *config, const td_step_shape *shape);
void td_step_plan_make(td_step_plan *out, const td_model_config *config,
                       const td_step_shape *shape);

// "layers 0-2 dense, 3-60 streamed; 8192 tokens, 8192 of prompts; ..."
void td_step_plan_print(td_buf *out, const td_step_plan *plan);

#endif
