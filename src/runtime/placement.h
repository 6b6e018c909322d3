// src/runtime/placement.h - where a model is computed, and how GPU memory is divided. Decided
// before weights are loaded, by the front and again where a device is opened, from the same
// numbers. Pure arithmetic.
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "comm/comm.h"
#include "engine/dense_slots.h"
#include "model/model.h"
#include "runtime/runtime_opts.h"

// What a process computes. Of two with a GPU each, one prefills long prompts, the other decodes:
// see td_gpu_pair. Otherwise a hint for CPU placement and naming only: the front decides what each
// worker is sent.
#define TD_WORKER_ROLES(X)                                                                         \
  X(BOTH, "worker")                                                                                \
  X(PREFILL, "prefill")                                                                            \
  X(DECODE, "decode")

typedef enum {
#define X(id, name) TD_ROLE_##id,
  TD_WORKER_ROLES(X)
#undef X
      TD_N_ROLES
} td_worker_role;

typedef struct {
  const char *device;  // "cpu" or "cuda"
  bool is_discrete;    // weights, KV pages and activations are in a GPU's memory
  bool experts_on_cpu; // with a GPU: the CPU computes the routed experts of some layers
} td_placement;

// The indices of --devices, "0,1": TD_COMM_MAX_RANKS at most, without duplicates. TD_EINVAL: names
// what is wrong.
typedef struct {
  uint32_t index[TD_COMM_MAX_RANKS], n;
} td_device_list;
td_status td_device_list_parse(td_device_list *out, const char *text, td_err *err);

// --expert-cache: "auto", "off" (as NULL is), or GiB. TD_EINVAL: something else.
typedef struct {
  bool is_auto;
  uint64_t bytes; // 0: off or auto
} td_expert_cache_size;
td_status td_expert_cache_parse(td_expert_cache_size *out, const char *text, td_err *err);

// TD_EINVAL: the options contradict each other on any machine and for any model.
td_status td_placement_check(const td_runtime_opts *opts, td_err *err);

// TD_EUNSUPPORTED: --expert-parallel on, for a model whose prompts devices cannot share.
td_status td_placement_check_model(const td_runtime_opts *opts, const td_model_config *config,
                                   td_err *err);
// Whether several devices can compute a prompt together: not with recurrent states.
bool td_may_share_prompts(const td_model_config *config);
// Whether the devices that opts name would compute prompts together, in one worker.
bool td_shares_prompts(const td_runtime_opts *opts, const td_model_config *config);

// False: with these options the model always runs on the CPU; logs the reason if it is the model's.
bool td_placement_may_use_gpu(const td_runtime_opts *opts, const td_model_config *config);

// Bytes of weights that must fit on the GPU.
uint64_t td_placement_need_bytes(const td_runtime_opts *opts, const td_model_stats *stats);

// gpu_bytes: free GPU memory; 0: no usable GPU, the model runs on the CPU (model is then not used).
td_placement td_placement_of(const td_runtime_opts *opts, const td_model *model,
                             uint64_t gpu_bytes);

// Prompt tokens of a step from which a GPU streams experts sooner than the CPU computes them, both
// at usual rates: it depends on the model, its format, the threads and the kind of link alone, not
// on a time, so that every process finds the same number. n_threads: of the CPU; 0: as many as
// beside a GPU. link_gbps: td_dev_link_gbps of the slowest GPU.
uint32_t td_stream_from(const td_model *model, uint32_t n_threads, double link_gbps);
// layer_bytes: of the largest layer's routed experts. n_threads: not 0. copy_gbps: from pinned
// memory.
uint32_t td_stream_from_bytes(const td_model_config *config, uint64_t layer_bytes,
                              uint32_t n_threads, double copy_gbps);

// Whether a GPU with gpu_bytes of free memory holds weights of that many bytes, workspaces and a
// context.
bool td_gpu_holds_all(uint64_t gpu_bytes, uint64_t weight_bytes, uint32_t ctx_size,
                      td_dtype kv_dtype, const td_model_config *config);

// What drafted tokens take of a GPU's memory.
typedef struct {
  uint64_t bytes;       // of guesses, wherever they come from
  uint64_t layer_bytes; // with the layer of multi-token prediction on the GPU; 0: it is not
} td_gpu_draft_bytes;
// max_seqs: requests of a step. The layer's routed experts are left out.
td_gpu_draft_bytes td_gpu_draft_bytes_of(const td_model *model, uint32_t max_seqs);

typedef struct {
  bool are_verified; // false: none are drafted
  bool has_layer;    // the layer drafts on the GPU
  uint64_t bytes;    // of the two, the one that is taken
  uint64_t lacking;  // what guesses would take, where that does not fit
} td_gpu_drafts;

// KV bytes of one context on a GPU: of ctx_size tokens, or if that is 0 of the model's maximum but
// at most n_tokens. kv_dtype: of --kv-dtype.
uint64_t td_placement_kv_bytes(uint32_t ctx_size, td_dtype kv_dtype, const td_model_config *config,
                               uint32_t n_tokens);
// The dtype that GPUs make of the one of --kv-dtype.
td_dtype td_gpu_kv_dtype(td_dtype kv_dtype);

// Input for dividing GPU memory.
typedef struct {
  uint64_t free_bytes;       // free GPU memory
  uint64_t weight_bytes;     // weights resident on the GPU, without experts that the CPU computes
  uint64_t layer_bytes;      // largest layer of routed experts computed by the CPU; 0: none
  uint64_t kv_bytes;         // KV cache of one context, which should fit
  bool is_ctx_given;         // the context was requested, so it must fit
  uint64_t pool_bytes;       // KV pages that requests can use at most; 0: any number
  uint64_t step_token_bytes; // activations per token of a step
  uint32_t usual_chunk;      // step size in tokens that the operators' workspace already covers
  uint32_t prefill_chunk;    // as requested; 0: chosen
} td_gpu_need;

typedef struct {
  uint32_t prefill_chunk; // tokens
  uint64_t chunk_bytes;   // for the tokens beyond usual_chunk
  uint64_t decode_bytes;  // activations of the engine that decodes beside streamed prefill
  uint64_t stream_bytes;  // ring for streamed experts
} td_gpu_plan;

// Of the memory left after weights, workspace, decode beside streaming and a requested context, up
// to a quarter goes to a long prefill_chunk. Of the rest, one context is reserved if none was
// requested (at most half), then the ring for streamed experts, up to one layer.
td_gpu_plan td_gpu_plan_make(const td_gpu_need *need);

// How many layers, from the first on, can have their experts on the GPU: as many as fit into half
// of the memory left after held_bytes and two contexts, or into what pool_bytes leaves, and the
// quarter that kv/plan.h keeps free. layer_bytes is [n_layers], 0 for layers
// without experts. *bytes: what they occupy.
uint32_t td_gpu_own_layers(const td_gpu_need *need, uint64_t held_bytes,
                           const uint64_t *layer_bytes, uint32_t n_layers, uint64_t *bytes);

typedef struct {
  uint32_t n_layers;     // the first layers, whose experts are on the GPU
  uint64_t layers_bytes; // of those
  uint64_t cache_bytes;
} td_gpu_experts;

// Divides that memory between whole layers (none without has_layers) and the cache of experts. A
// cache of a given size comes first, and may take more than the half: all that is left after
// held_bytes and two contexts. auto: the cache gets what whole layers leave if at least half of the
// layers with experts fit, and otherwise all of it, since the experts used last are used again far
// more often than a few layers are.
td_gpu_experts td_gpu_experts_plan(const td_gpu_need *need, uint64_t held_bytes,
                                   const uint64_t *layer_bytes, uint32_t n_layers, bool has_layers,
                                   const td_expert_cache_size *cache);

// Decode with experts in the memory of two GPUs in one process, which otherwise hold the same.
typedef struct {
  td_gpu_experts first;
  uint64_t peer_bytes; // of the second's cache
  bool is_fixed;       // see td_engine_opts.is_cache_fixed
} td_gpu_shared_experts;

// Without a cache (own.cache_bytes is 0), half the memory of whole layers goes to a fixed cache
// instead, whose experts alternate with the second GPU's. The second GPU holds 1 / n_devices of the
// first's whole layers, for prompts; the rest of that memory is its cache.
td_gpu_shared_experts td_gpu_share_experts(const td_gpu_experts *own, const uint64_t *layer_bytes,
                                           uint32_t n_layers, uint32_t n_devices);

// Two GPUs that share KV pages, one for prefill and one for decode, use the same amount of memory
// for everything else, so that the same number of pages fits on both. The first spends the cache's
// part on a longer ring, up to one layer; the second spends the parts of the ring and of a long
// prefill_chunk on a larger cache.
//
// If that leaves the first a ring of less than half a layer, or short steps, the dense weights of
// its last layers also stream: of as few layers as are enough for both, or of all. A layer's
// experts have about fifty times the bytes of its dense weights, so this costs little.
typedef struct {
  uint64_t stream_bytes, cache_bytes; // of the first; of the second
  // Of the first:
  uint32_t prefill_chunk;
  uint32_t n_streamed_dense; // layers, see td_engine_opts
  uint64_t dense_ring_bytes; // of the ring of each of its TD_PREFILL_ENGINES
} td_gpu_pair;
enum { TD_PREFILL_ENGINES = 2 }; // one for long prompts, and one for what else there is
// dense: [n_layers]. cache_bytes: of the cache, if each of the two GPUs were alone.
td_gpu_pair td_gpu_pair_plan(const td_gpu_need *need, const td_gpu_plan *plan, uint64_t cache_bytes,
                             const td_dense_size *dense, uint32_t n_layers);

// What a long prompt's steps copy and compute.
typedef struct {
  uint64_t expert_bytes;   // of all layers whose experts stream
  uint64_t resident_bytes; // of all weights on the GPU otherwise
  uint64_t active_params;
  uint64_t a8_params; // of those, that are multiplied in 8 bits
  uint64_t f8_params; // and those in E4M3, in 8 bits or not
  bool adds_f16;      // see td_dev_adds_f16
} td_gpu_work;

// A long prompt on one GPU while nothing decodes: a separate engine takes the memory of the dense
// weights that can stream, and streams them as well. That costs one more copy of all weights on the
// GPU, before or after its steps, by the engine that uses them first.
typedef struct {
  uint32_t prefill_chunk;    // of that engine; 0: it would take no longer steps than without
  uint32_t n_streamed_dense; // all layers
  uint64_t stream_bytes;
  uint64_t dense_bytes; // that stream
  uint32_t usual_chunk;
  td_gpu_work work;
} td_long_steps;
// plan: without it. dense: of every layer.
td_long_steps td_long_steps_plan(const td_gpu_need *need, const td_gpu_plan *plan,
                                 const td_gpu_work *work, const td_dense_size *dense,
                                 uint32_t n_layers);
// Whether a prompt of n_tokens takes a fifth less time that way at the rates of a usual card,
// enough for others to wait until a step ends. Nothing measured here may choose, as with
// td_stream_from.
bool td_long_steps_pay(const td_long_steps *plan, const td_model_config *config,
                       uint32_t stream_from, uint64_t n_tokens);
