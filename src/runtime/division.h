// src/runtime/division.h - how a GPU's memory is divided between weights, drafts, long steps, the
// ring for streamed experts, experts that stay, and KV pages: by a worker for the GPU it has
// opened, and by predict.h for one that it has not. Pure arithmetic.
#pragma once

#include "model/a8.h"
#include "runtime/placement.h"

// What of a model determines the time.
typedef struct {
  const td_model_config *config;
  td_dtype kv_dtype; // of --kv-dtype, which the caller sets; TD_F32 to begin with
  // For predict.h, which the caller sets: of a context, 0: chosen; requests whose contexts have KV
  // pages, 0: TD_PLAN_SEQS.
  uint32_t ctx_size, n_seqs;
  uint64_t active_params;
  td_activations activations; // which the caller sets; at first TD_ACTIVATIONS_AUTO
  // What a card computes in 8 bits, by the activations that ask for it: of the active parameters
  // without the output matrix, and which of a layer (TD_ACTIVATIONS_AUTO: none).
  td_a8_stats a8[TD_N_ACTIVATIONS];
  td_activations a8_experts[TD_MAX_LAYERS], a8_latents[TD_MAX_LAYERS];
  uint64_t vision_bytes;            // of a tower, which the CPU has
  uint64_t other_bytes;             // weights other than routed experts
  uint64_t step_bytes;              // of them, what every step reads: all but the embedding
  uint64_t head_params, head_bytes; // of these, the output matrix; a prompt's last token needs it
  td_gpu_draft_bytes drafts;        // on a card
  // The layer that drafts: all of its routed experts, what a guess reads of others, and on the CPU
  // of the output matrix (on a GPU head_bytes); 0: there is none.
  uint64_t draft_expert_bytes, draft_bytes, draft_head_bytes;
  uint64_t layer_bytes[TD_MAX_LAYERS]; // of routed experts; 0: a dense layer
  td_dense_size dense[TD_MAX_LAYERS];  // of other matrices that can stream
} td_plan_load;

// drafts: of steps of TD_PLAN_SEQS requests.
enum { TD_PLAN_SEQS = 16 }; // the default of --max-batch
td_plan_load td_plan_load_of(const td_model *model);
uint64_t td_plan_load_expert_bytes(const td_plan_load *load); // of all layers

// What there is, and what is asked for; kv_dtype and activations are the load's.
typedef struct {
  uint64_t free_bytes; // of each GPU
  uint32_t n_gpus;     // that compute prompts together, in one process
  td_dtype act_dtype;
  bool adds_f16; // see td_dev_adds_f16
  td_worker_role role;
  uint32_t ctx_size, prefill_chunk; // 0: chosen
  uint32_t n_seqs, kv_tokens;       // of the KV pool: requests at most, 0: any number; 0: chosen
  td_expert_cache_size cache;
  bool streams_experts; // the CPU computes them, where the GPU does not hold them
  bool keeps_layers;    // whole layers of these may stay on the GPU
  bool has_drive;       // experts come from the drive: none stay
  bool drafts;
} td_card_wish;

typedef struct {
  td_gpu_drafts drafts;
  td_gpu_plan memory;
  uint64_t layer_bytes;      // of the largest layer of experts that stream
  uint64_t weight_bytes;     // with drafts, without experts that stream
  uint64_t held_bytes;       // of all that is here but the pair's and the peer's parts
  td_gpu_experts own;        // with streams_experts, as the rest
  uint64_t peer_cache_bytes; // of the second GPU of this process
  bool is_cache_fixed;
  td_gpu_pair pair; // of two GPUs of the kind, one for prefill and one for decode
  td_long_steps long_steps;
} td_division;

td_division td_divide(const td_plan_load *load, const td_card_wish *wish);
