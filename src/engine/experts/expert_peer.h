// src/engine/experts/expert_peer.h - experts of the cache that are in a second device's memory:
// decode computes them there. Internal to engine/.
//
// Per layer the engine's device posts hidden states and routing to the peer's inbox and continues
// with the experts of its own. The peer, whose work for the whole step is queued up front, writes a
// result for each pair of token and expert to the engine's inbox and signals. What is added is
// added in the router's order (td_op_moe_join), so no bit depends on which device computed a pair,
// or when.
#pragma once

#include "engine/engine_impl.h"

// Experts as the peer has them: arrays of a site of the cache.
typedef struct {
  const td_weight *gate, *up, *down; // [n_slots]
  uint32_t n_slots;
} td_peer_experts;

// Bytes of the peer's memory beside its slots.
size_t td_expert_peer_bytes(const td_engine *engine);
td_status td_expert_peer_open(td_engine *engine, const td_peer_experts *experts, td_err *err);
void td_expert_peer_close(td_engine *engine);

// [n_layers][n_experts] slots of the peer, -1 for others; written before a step.
int32_t *td_expert_peer_table(td_engine *engine);
// Queues all layers of the step that was planned on the peer.
void td_expert_peer_enqueue(td_engine *engine);
// Sends the microbatch's input, which lies at `input` as in td_engine.h, to the peer.
void td_expert_peer_post(td_engine *engine, const td_microbatch *part, uint32_t layer_idx,
                         const void *input, size_t n_bytes);
// Queues the wait for the peer's results, which are [n_tokens][top_k][dim].
const float *td_expert_peer_await(td_engine *engine, const td_microbatch *part, uint32_t layer_idx);
// Ends the peer's waiting after a failure of the engine's device.
void td_expert_peer_release(td_engine *engine);
td_status td_expert_peer_sync(td_engine *engine, td_err *err);
