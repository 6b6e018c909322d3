// src/engine/engine_impl.h - what engine.c (memory, steps) and forward.c (operators) share.
#ifndef TD_ENGINE_ENGINE_IMPL_H
#define TD_ENGINE_ENGINE_IMPL_H

#include <stdint.h>

#include "device/device.h"
#include "engine/engine.h"

// A step runs tokens of answers (decode) and pieces of prompts (prefill) as two groups, since
// attention is computed differently. What a sequence's result is never depends on its neighbours.
enum { GROUP_DECODE, GROUP_PREFILL, N_GROUPS };

// Tokens [token_begin, token_begin + view.n_tokens) of the step; indices in view are its own.
typedef struct {
  td_batch_view view;
  uint32_t token_begin;
} step_group;

struct td_engine {
  const td_model *model;
  const td_model_config *config;
  td_dev *dev;
  td_stream *stream;
  td_engine_opts opts;
  size_t act_bytes; // of one activation element
  uint32_t max_pages;
  float attention_scale;

  // device memory; activations are [max_step_tokens][...]
  void *x, *h, *delta;    // residual stream, normed input, a block's output: [dim]
  void *q, *q_a, *kv, *v; // kv: latent and rope key (MLA) or k (GQA)
  void *attn;             // [n_heads * v_dim]
  float *router_logits, *router_weights;
  int32_t *router_ids;
  float *cos_sin;         // [max_seq_tokens][rot_dim/2][2]
  float *dev_logits;      // [logits_rows][n_vocab]
  td_top_logits *dev_top; // [logits_rows]; NULL unless the device ranks
  int32_t *dev_meta;
  int32_t *dev_routing; // [n_layers][n_tokens][top_k]; NULL unless recorded
  char *kv_pages;       // [n_layers][n_pages][page_bytes]
  size_t page_bytes;

  // host memory
  int32_t *meta;         // staged copy of dev_meta
  size_t meta_len;       // entries
  uint32_t *first_token; // where each sequence of the step begins in it
  int32_t *routing;      // copy of dev_routing
  float *logits;         // [logits_rows][n_vocab]
  td_top_logits *top;    // [logits_rows] likewise
  uint32_t logits_rows;  // rows there is room for
  bool can_rank;         // logits cross a bus to reach the host

  // the step being run
  step_group groups[N_GROUPS];
  uint32_t n_tokens, n_rows;
  bool is_ranked;                          // the host gets the best of each row, not the logits
  const int32_t *tokens, *rows, *position; // in dev_meta
  const float *temperature;                // [n_rows], likewise
};

// Enqueues the whole forward pass of the step that engine describes.
void td_engine_forward(td_engine *engine);
// What the host draws from: the best of each row, or the logits. The record of routing, too.
void td_engine_hand_over(td_engine *engine);

static inline td_kv_view td_engine_kv_view(const td_engine *engine, uint32_t layer_idx) {
  size_t layer_bytes = engine->opts.n_pages * engine->page_bytes;
  return (td_kv_view){.pages = engine->kv_pages + layer_idx * layer_bytes,
                      .page_bytes = engine->page_bytes,
                      .dtype = engine->opts.kv_dtype};
}

// Where a layer's choices begin in the record of the step.
static inline size_t td_engine_routing_at(const td_engine *engine, uint32_t layer_idx) {
  return (size_t)layer_idx * engine->n_tokens * engine->config->top_k;
}

#endif
