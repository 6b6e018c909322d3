// src/engine/engine.h - the forward pass over a paged KV pool, on any device.
// One engine, one caller at a time. Sequences and their page tables belong to the caller (kv/kv.h);
// the engine owns the activations and the streams, and the page storage unless it is given.
#ifndef TD_ENGINE_ENGINE_H
#define TD_ENGINE_ENGINE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "device/device.h"
#include "engine/sampler.h"
#include "model/model.h"

typedef struct td_engine td_engine;

typedef struct {
  uint32_t n_pages;         // KV pages in the pool
  uint32_t page_tokens;     // tokens a page
  uint32_t max_step_tokens; // most tokens one step may carry
  uint32_t max_step_seqs;   // most sequences one step may carry
  uint32_t max_seq_tokens;  // longest context
  td_dtype kv_dtype;        // TD_F32, or TD_F16 for half the memory and 12 bits of precision
  // Borrowed storage for all pages, 64-byte aligned, n_pages * page_tokens *
  // td_engine_kv_bytes_per_token bytes, which the device can reach; NULL: the engine's own.
  void *kv_pages;
  bool record_routing; // keep each step's expert choices for td_engine_routing
  // Borrowed: computes the routed experts, from host memory, but those of the first
  // n_gpu_expert_layers layers. NULL: the engine's device does all.
  td_dev *expert_dev;
  uint32_t n_gpu_expert_layers;
  // With it: dual_batch of a step of answers that go through the layers one behind the other, 2, so
  // that both devices have work; or 1. 0: as is quicker, tried out.
  uint32_t n_microbatches;
  // With it: bytes of the engine's device through which experts of prompts stream, to be computed
  // there, in steps of at least break_even_tokens tokens of prompts; 0: none do.
  size_t stream_bytes;
  uint32_t break_even_tokens; // 0: from where on it is quicker, measured at the start
} td_engine_opts;

typedef enum { TD_WANT_NONE, TD_WANT_LAST, TD_WANT_ALL } td_want;

// One sequence's part of a step: n_tokens new tokens behind n_past cached ones.
typedef struct {
  const int32_t *tokens;
  uint32_t n_tokens, n_past;
  const int32_t *pages; // enough for n_past + n_tokens
  uint32_t n_pages;
  td_want want; // which of its tokens' logits are computed
  // Tokens of an answer rather than a piece of a prompt: attention takes the way that is cheap for
  // one query (MLA: absorbed), matrices those that are for few tokens. Said, not guessed from
  // n_tokens, so that a prompt's result does not depend on how it was cut, and an answer's not on
  // whether its tokens come one by one or, computed again, together.
  bool is_decode;
  float temperature; // of the draw from its logits; 0: greedy
} td_step_seq;

// model and dev are borrowed and must outlive the engine. On error *out is NULL; TD_ENOMEM names
// the bytes asked for and what to make smaller.
td_status td_engine_open(td_engine **out, const td_model *model, td_dev *dev,
                         const td_engine_opts *opts, td_err *err);
void td_engine_close(td_engine *engine);

// Runs one step. Wanted logits are rows, in the order of seqs and tokens, until the next step.
// TD_EINVAL: a token outside the vocabulary, too many tokens or sequences, or a context beyond
// max_seq_tokens; nothing was computed then.
td_status td_engine_step(td_engine *engine, const td_step_seq *seqs, uint32_t n_seqs, td_err *err);
// All rows of a step that wanted TD_WANT_ALL: f32 [n_rows][n_vocab], the caller's to overwrite.
float *td_engine_logits(td_engine *engine);
// Draws from a row, once: as td_sampler_next does, from the row's best alone where the device
// ranked them and that is enough.
td_status td_engine_draw(td_engine *engine, uint32_t row, td_sampler *sampler, int want_logprobs,
                         td_wire_token *out, td_err *err);

// The experts that layer layer_idx chose in the last step: i32 [n_tokens][top_k], tokens in an
// order of the engine's own. NULL for a dense layer or without record_routing.
const int32_t *td_engine_routing(const td_engine *engine, uint32_t layer_idx, uint32_t *n_tokens);

// Tokens of prompts from which on a step streams experts and so takes about as long however many
// there are; 0: none does.
uint32_t td_engine_stream_tokens(const td_engine *engine);

// Bytes of the device's memory that one token of a step takes, streaming included.
size_t td_engine_step_bytes_per_token(const td_model_config *config, td_dtype act_dtype);
// Bytes of KV cache one token takes over all layers.
size_t td_engine_kv_bytes_per_token(const td_model_config *config, td_dtype kv_dtype);
// Tokens that a prompt is best read in at a time, where nobody says: 512, of MLA, which makes keys
// of latents again each time, 1024, or so many that an expert gets 32, for whom its weights are
// decoded once; no more than 2048, which a step must last for.
uint32_t td_engine_prefill_chunk(const td_model_config *config);

#endif
