// src/runtime/predict.h - how long a machine takes for a prompt and for a token: bytes over the
// rates of memories and links, operations over those of processors, layer by layer as the engine's
// plan of the step has it. Pure arithmetic, without a device.
#ifndef TD_RUNTIME_PREDICT_H
#define TD_RUNTIME_PREDICT_H

#include <stdbool.h>
#include <stdint.h>

#include "engine/step_plan.h"
#include "model/model.h"
#include "runtime/placement.h"
#include "runtime/rig.h"

// What of a model determines the time.
typedef struct {
  const td_model_config *config;
  uint64_t active_params;
  // With --activations fp8, which the caller sets: what is computed at a card's FP8 rate, of the
  // active parameters without routed experts and the output matrix.
  bool is_f8;
  uint64_t f8_params;
  bool f8_experts[TD_MAX_LAYERS], f8_latents[TD_MAX_LAYERS];
  uint64_t other_bytes;             // weights that are no routed experts
  uint64_t step_bytes;              // of them, what every step reads: all but the embedding
  uint64_t head_params, head_bytes; // of these, the output matrix; a prompt's last token needs it
  uint64_t draft_bytes; // that the layer which drafts reads for a guess; 0: there is none
  uint64_t layer_bytes[TD_MAX_LAYERS]; // of routed experts; 0: a dense layer
  td_dense_size dense[TD_MAX_LAYERS];  // of other matrices that can stream
} td_plan_load;

td_plan_load td_plan_load_of(const td_model *model);
uint64_t td_plan_load_expert_bytes(const td_plan_load *load); // of all layers

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
  td_gpu_long longer;        // prompts, of a card alone
} td_card_plan;

// cache: of experts that decode used last, as --expert-cache has it.
td_card_plan td_card_plan_of(const td_plan_load *load, const td_gpu_card *card,
                             const td_expert_cache_size *cache);
// Of the first of two such cards, which prefills only.
td_card_plan td_card_plan_for_prefill(const td_card_plan *plan);
// Of a card alone, for a prompt that has its dense weights' memory.
td_card_plan td_card_plan_for_long(const td_card_plan *plan);

// What a step may have to wait for.
#define TD_LIMITS(X)                                                                               \
  X(HOST_READ, "CPU memory")                                                                       \
  X(NODES, "the link between NUMA nodes")                                                          \
  X(HOST_OPS, "the CPU's arithmetic")                                                              \
  X(LINK, "the link to the GPU")                                                                   \
  X(GPU_READ, "GPU memory")                                                                        \
  X(GPU_OPS, "the GPU's arithmetic")                                                               \
  X(WAITS, "launches and messages")

typedef enum {
#define X(id, name) TD_LIMIT_##id,
  TD_LIMITS(X)
#undef X
      TD_N_LIMITS
} td_limit;

const char *td_limit_name(td_limit limit);

typedef struct {
  td_step_plan step;          // of a prompt, its first
  uint32_t n_steps;           // a prompt's chunks
  double busy_s[TD_N_LIMITS]; // of each alone
  double host_bytes;          // that the CPU's cores read of weights, keys and values
  double remote_bytes;        // of them, of another node's memory than the core's
  double seconds;
} td_plan_time;

td_limit td_plan_time_limit(const td_plan_time *time); // the one that is busy longest

// Of reads of n regions of region_bytes each, which begin anywhere in stripes that lie on n_nodes
// in turn, the share that cores read of other nodes' memory, if those on a node read its stripes
// first and then what is left of others': tiles that lie on two nodes, and the rest of the node
// that has more.
double td_plan_remote_share(double n_regions, double region_bytes, uint32_t n_nodes);

// plan: of the rig's first card; NULL: the rig has none, or it does not hold the model's part.
// A prompt of n_tokens: experts that are not in a card's memory stream to it, if they are fewer
// than td_stream_from the CPU computes them. Several cards compute it together.
td_plan_time td_prefill_time_of(const td_plan_load *load, const td_rig *rig,
                                const td_card_plan *plan, uint32_t n_tokens);

// A step of decode.
typedef struct {
  uint32_t n_seqs, n_each; // sequences, and tokens of each: one, and those that are drafted
  uint32_t depth;          // tokens before
  double hit_rate;         // share of a token's experts that the cache holds, 0 to 1
} td_decode_work;

td_plan_time td_decode_time_of(const td_plan_load *load, const td_rig *rig,
                               const td_card_plan *plan, const td_decode_work *work);

#endif
