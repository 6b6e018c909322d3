// src/runtime/predict.h - how long a machine takes for a prompt and for a token: bytes over the
// bandwidth of memory and links, operations over the throughput of processors, layer by layer as in
// the engine's step plan. Pure arithmetic, without a device.
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "engine/step_plan.h"
#include "model/model.h"
#include "runtime/division.h"
#include "runtime/rig.h"

// A model larger than the rig's memory, whose experts come from the drive (--weights stream).
typedef struct {
  bool is_needed;         // the rig's memory does not hold what its CPU needs
  bool does_stream;       // and the rig has a drive
  double share, hit_rate; // of the experts that are in memory, of the experts of a token
  uint32_t prefill_chunk; // of the CPU alone
} td_drive_plan;

// Tokens of a context: the load's, or as kv/plan.h chooses it where memory is no limit.
uint32_t td_plan_load_ctx(const td_plan_load *load);
// How many of a token's experts are found in memory that holds this share of all.
double td_drive_hit_rate(double share);
// n_cards: 0: the CPU alone.
td_drive_plan td_drive_plan_of(const td_plan_load *load, const td_rig *rig, uint32_t n_cards);

// How a card's memory is divided, as a worker would.
typedef struct {
  bool fits; // at least the weights other than routed experts do
  td_gpu_drafts drafts;
  bool experts_stream;          // or else all experts are in the card's memory
  uint32_t n_gpu_expert_layers; // the first layers, whose experts never leave it
  uint64_t cache_bytes;         // for experts that decode used last
  uint32_t n_cached;            // experts that fit there, with decode steps of 16 sequences
  td_gpu_plan memory;
  td_gpu_pair pair;                 // of two cards of the kind
  uint64_t weight_bytes, own_bytes; // in the card's memory: no routed experts; routed experts
  // KV pages in what is left, for the load's n_seqs; 0: not even one context fits. Two of these
  // cards, one for prefill and one for decode, both hold them.
  uint64_t kv_bytes;
  uint32_t kv_tokens;
  uint32_t n_streamed_dense; // layers whose dense weights stream, see td_engine_opts
  td_long_steps long_steps;  // prompts, of a card alone
  uint64_t ngram_bytes;      // of the CPU's memory: rows of n-grams of a card's steps
} td_card_plan;

// Of the rig's first card. cache: of experts that decode used last, as --expert-cache has it.
td_card_plan td_card_plan_of(const td_plan_load *load, const td_rig *rig,
                             const td_expert_cache_size *cache);

// What a step may have to wait for.
#define TD_LIMITS(X)                                                                               \
  X(HOST_READ, "CPU memory")                                                                       \
  X(NODES, "the link between NUMA nodes")                                                          \
  X(HOST_OPS, "the CPU's arithmetic")                                                              \
  X(DRIVE, "the drive")                                                                            \
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

// The share of reads from another node's memory. n regions of region_bytes each begin anywhere in
// stripes that alternate between n_nodes; the cores of a node first read its own stripes, then what
// is left: tiles that span two nodes, and the rest of the node that has more.
double td_plan_remote_share(double n_regions, double region_bytes, uint32_t n_nodes);

// plan: of the rig's first card; NULL: the rig has none, or it does not hold the model's part.
// A prompt of n_tokens: experts that are not in a card's memory stream to it, if they are fewer
// than td_stream_from the CPU computes them. Several cards compute it together.
td_plan_time td_prefill_time_of(const td_plan_load *load, const td_rig *rig,
                                const td_card_plan *plan, uint32_t n_tokens);

// A step of decode.
typedef struct {
  uint32_t n_seqs, n_each; // sequences, and tokens of each: one, and its drafts
  uint32_t depth;          // tokens before
  double hit_rate;         // share of a token's experts that the cache holds, 0 to 1
} td_decode_work;

td_plan_time td_decode_time_of(const td_plan_load *load, const td_rig *rig,
                               const td_card_plan *plan, const td_decode_work *work);
// The time of a pass of the layer that drafts, beside the step that verifies its guesses: of
// n_tokens, after which n_seqs sequences have a guess each. plan NULL: the CPU. 0: there is none,
// or it does not draft there (td_devices.has_draft_layer): guesses are the text's.
double td_draft_time_of(const td_plan_load *load, const td_rig *rig, const td_card_plan *plan,
                        double n_tokens, double n_seqs);
