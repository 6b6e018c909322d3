// src/engine/engine_impl.h - what engine.c (memory, steps), forward.c (operators), experts.c and
// streaming.c share.
#ifndef TD_ENGINE_ENGINE_IMPL_H
#define TD_ENGINE_ENGINE_IMPL_H

#include <stdint.h>

#include "device/device.h"
#include "engine/dual_batch.h"
#include "engine/engine.h"

// A step runs tokens of answers (decode) and pieces of prompts (prefill) as two groups, since
// attention is computed differently. What a sequence's result is never depends on its neighbours.
enum { GROUP_DECODE, GROUP_PREFILL, N_GROUPS };

// Tokens [token_begin, token_begin + view.n_tokens) of the step; indices in view are its own.
typedef struct {
  td_batch_view view;
  uint32_t token_begin;
} step_group;

// Tokens of a step that go through the layers together: all of them, or, where experts are another
// device's, the first or second half of its answers, so that each device has one to do while the
// other has the other.
typedef struct {
  uint32_t begin, n_tokens, idx; // of the step's tokens; which part
  step_group groups[N_GROUPS];   // token_begin counts from the part's
  const int32_t *position;       // in dev_meta
  char *x, *delta;               // the part's of the engine's, for these last from layer to layer
} td_microbatch;

enum { TD_MAX_MICROBATCHES = 2 };

// The number of the last step in which it was so; the only thing in its cache line.
typedef struct {
  _Alignas(64) _Atomic uint32_t step;
} td_engine_signal;

// Where the routed experts are another device's.
typedef struct {
  td_dev *dev; // NULL: they are not
  td_stream *stream;
  uint32_t most_tokens; // that go there at a time
  char *in;             // host memory, a copy of what begins at h
  void *out, *sum;      // host memory, and the engine's device's: [most_tokens][dim]
  // The engine's device has handed a layer's tokens over; their sum is made. Where the step has
  // signals that is told by them, host memory, [n_layers][TD_MAX_MICROBATCHES] each; else by
  // events.
  td_event *given, *done;
  td_engine_signal *input_signals, *done_signals;
} td_moe_offload;

typedef struct td_expert_stream td_expert_stream;

struct td_engine {
  const td_model *model;
  const td_model_config *config;
  td_dev *dev;
  td_stream *stream;
  td_moe_offload offload;
  td_expert_stream *streaming; // NULL: of no prompt
  td_engine_opts opts;
  size_t act_bytes; // of one activation element
  uint32_t max_pages;
  float attention_scale;

  // device memory; activations are [max_step_tokens][...]
  void *x, *h, *delta;    // residual stream, normed input, a block's output: [dim]
  void *q, *q_a, *kv, *v; // kv: latent and rope key (MLA) or k (GQA)
  void *attn;             // [n_heads * v_dim]
  float *router_logits;
  float *cos_sin;         // [max_seq_tokens][rot_dim/2][2]
  float *dev_logits;      // [logits_rows][n_vocab]
  td_top_logits *dev_top; // [logits_rows]; NULL unless the device ranks
  int32_t *dev_meta;
  int32_t *dev_routing; // [n_layers][n_tokens][top_k]; NULL unless recorded
  char *kv_pages;       // [n_layers][n_pages][page_bytes]
  size_t page_bytes;

  // host memory
  int32_t *meta;         // staged copy of dev_meta
  size_t meta_len;       // entries of the step's
  uint32_t *first_token; // where each sequence of the step begins in it
  int32_t *routing;      // copy of dev_routing
  float *logits;         // [logits_rows][n_vocab]
  td_top_logits *top;    // [logits_rows] likewise
  uint32_t logits_rows;  // rows there is room for
  bool can_rank;         // logits cross a bus to reach the host

  // the step being run
  td_microbatch whole, microbatches[TD_MAX_MICROBATCHES];
  td_dual_batch_tuner dual_batch;
  uint32_t n_microbatches;
  uint32_t n_tokens, n_rows, n_steps; // of the step; steps so far
  bool is_ranked;                     // the host gets the best of each row, not the logits
  bool has_signals; // both devices' microbatches are queued beforehand, and wait for one another
  const uint32_t *step, *dev_step; // its number, in meta and dev_meta
  const int32_t *tokens, *rows;    // in dev_meta
  const float *temperature;        // [n_rows], likewise
};

// experts.c
td_status td_moe_offload_open(td_engine *engine, td_err *err); // closed in any case
void td_moe_offload_close(td_engine *engine);
// At h: what n_tokens tokens need there, activations and choices of experts; and where a part has
// that, behind n_before tokens of the other.
size_t td_engine_offload_input_bytes(const td_engine *engine, size_t n_tokens);
size_t td_engine_offload_input_at(const td_engine *engine, uint32_t n_before);
// Whether both devices' work for a step in so many microbatches can be queued beforehand.
bool td_engine_can_signal(const td_engine *engine, uint32_t n_microbatches);
void td_moe_offload_enqueue(td_engine *engine); // the other device's
void td_moe_offload_release(td_engine *engine); // it need not wait: nothing more comes
// delta (+)= the layer's dense MLP, or its shared expert, of h.
void td_engine_mlp(td_engine *engine, const td_microbatch *part, const td_layer *layer,
                   bool accumulate);
// delta = experts of h, when it has ended.
void td_engine_moe_begin(td_engine *engine, const td_microbatch *part, uint32_t layer_idx);
void td_engine_moe_end(td_engine *engine, const td_microbatch *part, uint32_t layer_idx);

// Of layer layer_idx, n tokens of a prompt, as the other device is to compute them.
td_moe_args td_engine_trial_offload(td_engine *engine, uint32_t layer_idx, uint32_t n);

// streaming.c
td_status td_expert_stream_open(td_engine *engine, td_err *err); // closed in any case
void td_expert_stream_close(td_engine *engine);
td_status td_expert_stream_sync(td_engine *engine, td_err *err);
// Whether the step's tokens are for the device itself, to which the layer's experts come.
bool td_engine_streams_layer(td_engine *engine, const td_microbatch *part, uint32_t layer_idx);
// delta += what they make of routed's x.
void td_engine_stream_experts(td_engine *engine, const td_microbatch *part, uint32_t layer_idx,
                              const td_moe_args *routed);

// Enqueues the whole forward pass of the step that engine describes.
void td_engine_forward(td_engine *engine);
// What the host draws from: the best of each row, or the logits. The record of routing, too.
void td_engine_copy_outputs(td_engine *engine);

static inline td_kv_view td_engine_kv_view(const td_engine *engine, uint32_t layer_idx) {
  size_t layer_bytes = engine->opts.n_pages * engine->page_bytes;
  return (td_kv_view){.pages = engine->kv_pages + layer_idx * layer_bytes,
                      .page_bytes = engine->page_bytes,
                      .dtype = engine->opts.kv_dtype};
}

// Whether the layer's routed experts are the other device's.
static inline bool td_engine_is_offloaded(const td_engine *engine, uint32_t layer_idx) {
  return engine->offload.dev && layer_idx >= engine->opts.n_gpu_expert_layers &&
         td_model_is_moe(engine->config, layer_idx);
}

// Where a layer's choices begin in the record of the step.
static inline size_t td_engine_routing_at(const td_engine *engine, uint32_t layer_idx) {
  return (size_t)layer_idx * engine->n_tokens * engine->config->top_k;
}

#endif
