// src/engine/step_plan.h - what a step does with every layer, decided before it runs: where the
// routed experts are computed, how results pass between devices, in how many microbatches. The
// forward pass interprets the plan. Pure functions.
#pragma once

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
  X(READ, "read")     /* experts on the engine's device, as they come from the drive */            \
  X(STREAMED, "streamed")         /* experts copied to the engine's device, group by group */      \
  X(PAIRED, "on device and peer") /* experts on the engine's device and its peer */                \
  X(SPREAD, "on device, peer and expert device")

typedef enum {
#define X(id, name) TD_LAYER_##id,
  TD_LAYER_WAYS(X)
#undef X
      TD_N_LAYER_WAYS
} td_layer_way;

// Whether the expert device, or the peer, computes experts of a layer that goes this way.
static inline bool td_layer_way_has_expert_dev(uint8_t way) {
  return way == TD_LAYER_OFFLOADED || way == TD_LAYER_CACHED || way == TD_LAYER_SPREAD;
}
static inline bool td_layer_way_has_peer(uint8_t way) {
  return way == TD_LAYER_PAIRED || way == TD_LAYER_SPREAD;
}
// Whether single experts' results, of several devices, are added up in the router's order.
static inline bool td_layer_way_joins(uint8_t way) {
  return way == TD_LAYER_CACHED || td_layer_way_has_peer(way);
}

// Which of a layer's experts decode finds in the memory of the engine's device and of its peer.
typedef enum {
  TD_PAIR_NONE, // no peer computes experts of this layer
  TD_PAIR_SOME, // the expert device has the others
  TD_PAIR_ALL,
} td_pair_share;

// A layer of decode, to weigh the peer's experts against computing them on the expert device.
typedef struct {
  uint32_t dim, top_k, n_experts;
  uint32_t n_peer;       // experts that the peer has
  uint64_t expert_bytes; // of one
} td_pair_layer;

// Upper bounds: the rates at which the expert device and the peer read weights, and the time of a
// message. The estimate is for one token, because which device computes a token's experts must not
// depend on its batch; with more tokens the peer saves more.
typedef struct {
  double expert_dev_gbps, peer_gbps, link_gbps;
  double message_s; // from the sender's last operator to the receiver's first
} td_pair_rates;
extern const td_pair_rates td_pair_usual; // a server's memory and PCIe 5; not measured

typedef struct {
  double saved_s;              // of the expert device's time
  double peer_s, sent_s;       // experts on the peer; two messages and their bytes
  uint64_t to_peer, from_peer; // bytes
} td_pair_time;
td_pair_time td_pair_time_of(const td_pair_layer *layer, const td_pair_rates *rates);
static inline bool td_pair_pays(const td_pair_time *t) {
  return t->saved_s > t->peer_s + t->sent_s;
}

// How the engine's device and the expert device wait for each other.
typedef enum {
  TD_HANDOVER_NONE,    // no layer is offloaded
  TD_HANDOVER_HOST,    // through events; the calling thread waits at every offloaded layer
  TD_HANDOVER_SIGNALS, // both devices' work is queued up front and waits for signals
} td_handover;

typedef struct {
  uint32_t n_tokens, n_prompt; // of the step; prompt tokens among them
  uint32_t n_seqs;             // sequences that decode
  uint32_t max_drafts;         // tokens beside one a sequence with which a step may be replayed
  uint32_t n_ranks;            // devices that compute the step together; 0 is 1
  uint32_t n_gpu_expert_layers;
  bool has_expert_dev;
  bool has_drive;             // experts come from the drive
  bool may_replay;            // the device gains from replaying a step's operators
  uint32_t break_even_tokens; // prompt tokens from which experts stream; 0: never
  const bool *may_stream;     // [n_layers], read from break_even_tokens on: these layers can
  const bool *may_cache;      // [n_layers]: decode can use a cache of experts there; NULL: nowhere
  const uint8_t *pair_share;  // [n_layers] td_pair_share, of layers in may_cache; NULL: no peer
  // [n_layers]: bytes that the step copies of the layer's dense weights, if they stream; else 0.
  // NULL: none do.
  const uint64_t *dense_bytes;
  uint32_t n_microbatches; // wanted, 1 or 2
} td_step_shape;

typedef struct {
  uint32_t n_layers, n_tokens, n_prompt, n_ranks;
  uint32_t n_microbatches;
  td_handover handover;
  bool is_replayed; // operators depend on the work key alone, so a device may replay them
  uint32_t n_ways[TD_N_LAYER_WAYS];  // number of layers of each way
  uint8_t way[TD_MAX_LAYERS];        // td_layer_way
  bool streams_dense[TD_MAX_LAYERS]; // the layer's dense weights are copied in the step
  uint64_t dense_bytes;              // of all that are
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
