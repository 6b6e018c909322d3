// src/runtime/placement.h - where a model is computed, and how a GPU's memory is shared out:
// decided before weights are loaded, by the front and by whoever opens a device, from the same
// numbers. Pure arithmetic.
#ifndef TD_RUNTIME_PLACEMENT_H
#define TD_RUNTIME_PLACEMENT_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "model/model.h"

// Where routed experts are computed if there is a GPU. AUTO: there, as many layers of them as fit
// beside everything else, the others on the CPU.
typedef enum {
  TD_EXPERTS_AUTO,
  TD_EXPERTS_CPU,
  TD_EXPERTS_GPU,
  TD_N_EXPERT_PLACES
} td_expert_place;

// What is asked for.
typedef struct {
  const char *device; // cpu, cuda or auto: a GPU if one can be used
  td_expert_place experts;
  td_activations activations;
  uint32_t ctx_size; // tokens; 0: chosen
} td_placement_opts;

typedef struct {
  const char *device;  // "cpu" or "cuda"
  bool is_discrete;    // weights, KV pages and activations are in a GPU's memory
  bool experts_on_cpu; // of a GPU's model, the routed experts of some layers
} td_placement;

// TD_EINVAL: what cannot go together, whatever the machine and the model.
td_status td_placement_check(const td_placement_opts *opts, td_err *err);

// False: whatever GPU there is, the CPU computes.
bool td_placement_may_use_gpu(const td_placement_opts *opts);

// Bytes of weights that a GPU must have room for.
uint64_t td_placement_need_bytes(const td_placement_opts *opts, const td_model_stats *stats);

// gpu_bytes: of its memory that are free; 0: there is none that can be used, and the CPU computes
// (then model is not read).
td_placement td_placement_of(const td_placement_opts *opts, const td_model *model,
                             uint64_t gpu_bytes);

// Of keys and values of one context, as asked for, else of at most n_tokens.
uint64_t td_placement_kv_bytes(uint32_t ctx_size, const td_model_config *config, uint32_t n_tokens);

// What decides how a GPU's memory is shared out.
typedef struct {
  uint64_t free_bytes;       // of its memory
  uint64_t weight_bytes;     // that it holds for good; without experts that the CPU computes
  uint64_t layer_bytes;      // routed experts of the largest layer that the CPU computes; 0: none
  uint64_t kv_bytes;         // of one context, which is to fit
  bool is_ctx_given;         // and must
  uint64_t step_token_bytes; // activations of one token of a step
  uint32_t usual_chunk;      // tokens of a step that are counted as the operators' own
  uint32_t prefill_chunk;    // as asked for; 0: chosen
} td_gpu_need;

typedef struct {
  uint32_t prefill_chunk; // tokens
  uint64_t chunk_bytes;   // for more than usual_chunk
  uint64_t stream_bytes;  // for the experts of prompts that stream
} td_gpu_plan;

// Of what weights, operators and a context that was asked for leave, up to a quarter is for a long
// prefill_chunk; of the rest, one context if none was asked for, within half, and then the ring of
// experts that stream, up to a layer of them.
td_gpu_plan td_gpu_plan_make(const td_gpu_need *need);

// How many layers' experts, from the first on, the GPU can have beside all that (layer_bytes
// [n_layers], 0 where there are none): in half of what held_bytes and two contexts leave. *bytes:
// what they take.
uint32_t td_gpu_own_layers(const td_gpu_need *need, uint64_t held_bytes,
                           const uint64_t *layer_bytes, uint32_t n_layers, uint64_t *bytes);

#endif
