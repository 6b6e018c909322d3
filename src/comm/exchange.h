// src/comm/exchange.h - what expert parallelism sends between ranks in a prefill step, and how long
// that takes. Pure functions.
#pragma once

#include <stdbool.h>
#include <stdint.h>

// A layer of a step. Every rank has n_tokens / n_ranks tokens; it gathers the keys and values (or
// latents) of all of them, and with experts their hidden states, of which it computes its experts'
// part of the sum; each token's parts are added on its own rank. All in BF16.
typedef struct {
  uint32_t n_tokens, n_ranks;
  uint32_t dim;          // of a hidden state
  uint32_t kv_elements;  // that a token adds to the layer's cache
  uint64_t expert_bytes; // of the layer's routed experts; 0: a dense layer
} td_exchange_layer;

typedef struct {
  uint64_t kv_bytes, hidden_bytes, sum_bytes; // received by a rank
  uint64_t expert_bytes;                      // streamed to a rank
} td_exchange_bytes;

td_exchange_bytes td_exchange_bytes_of(const td_exchange_layer *layer);

typedef struct {
  double rank_gbps;   // between ranks, into one of them
  double stream_gbps; // from host memory to one of them
  bool is_same_link;  // both take the link to the host, as without a path between GPUs
} td_exchange_links;

typedef struct {
  double exchange_s, stream_s;
  double layer_s; // of transfers: the longer of both, or their sum on the same link
} td_exchange_time;

td_exchange_time td_exchange_time_of(const td_exchange_bytes *bytes,
                                     const td_exchange_links *links);
