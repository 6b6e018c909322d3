// src/model/model.h - a checkpoint directory: its configuration, and its weights mapped as stored.
#ifndef TD_MODEL_MODEL_H
#define TD_MODEL_MODEL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "tandem/types.h"

// Grouped-query attention, or multi-head latent attention (MLA).
typedef enum { TD_ATTN_GQA, TD_ATTN_MLA } td_attn_kind;

// RMS norms of queries and keys before RoPE (GQA).
typedef enum {
  TD_QK_NORM_NONE,
  TD_QK_NORM_HEAD, // each head by itself, with the same weights
  TD_QK_NORM_ALL,  // all heads together
} td_qk_norm;

typedef struct td_family td_family; // families/family.h
// How a checkpoint that holds other parts, too, names those of the language model.
typedef struct td_wrapper td_wrapper; // families/family.h

#define TD_MAX_EOS    16
#define TD_MAX_LAYERS 1024

// YaRN RoPE scaling; factor 1: none. Field names follow config.json.
typedef struct {
  double factor, beta_fast, beta_slow, mscale, mscale_all_dim;
  double attention_factor; // 0: derived from factor (and mscale) as in transformers
  uint32_t original_max_position;
  bool untruncated; // the ramp's ends are not rounded to whole dimensions
} td_yarn;

// The contents of config.json and generation_config.json that the forward pass needs. Dimensions
// are in elements. Fields of the other attention kind are 0.
typedef struct {
  const td_family *family;
  const td_wrapper *wrapper; // NULL: the checkpoint is a language model alone
  td_attn_kind attn;
  char arch_name[64]; // model_type as published: "deepseek_v3", "kimi_k2", "qwen3_moe"
  uint32_t n_layers, n_vocab, dim, n_heads, max_position;
  bool tie_embeddings, attention_bias;
  float rms_eps;
  double rope_theta;
  td_yarn yarn;
  bool rope_interleaved;
  double partial_rotary; // as stated, 0: not; rope_dim follows from it for GQA
  uint32_t rope_dim;     // elements of a head that RoPE rotates; 0: all (GQA)
  // Queries at position p are scaled by 1 + query_beta * ln(1 + floor(p / query_span)).
  // query_beta 0: not scaled.
  double query_beta;
  uint32_t query_span;
  // GQA
  uint32_t n_kv_heads, head_dim;
  td_qk_norm qk_norm;
  bool has_sinks;
  // Positions that a token sees in the layers of window_layers (bit i: layer i), its own the last.
  uint32_t window;
  uint64_t window_layers[TD_MAX_LAYERS / 64];
  // q_proj has a gate for each query, whose sigmoid multiplies the attention's output.
  bool has_attn_gate;
  // Gated delta nets in place of attention, in the layers of delta_layers (bit i: layer i); none if
  // delta_taps is 0. delta_grouped: the input projection's rows are sorted by key head.
  uint64_t delta_layers[TD_MAX_LAYERS / 64];
  uint32_t delta_k_heads, delta_v_heads, delta_k_dim, delta_v_dim, delta_taps;
  bool delta_grouped;
  // MLA
  uint32_t q_lora_rank; // 0: q_proj is one matrix
  uint32_t kv_lora_rank, nope_dim, v_dim;
  // experts
  uint32_t n_experts, top_k, n_shared_experts, expert_dim, dense_dim;
  uint32_t shared_dim; // of all shared experts; 0: n_shared_experts * expert_dim
  uint32_t n_groups, topk_groups;
  // Experts with biases and a clamped activation, whose rows of gate and up alternate (device.h:
  // td_moe_args); swiglu_limit 0: plain experts.
  float swiglu_limit, swiglu_alpha;
  bool router_sigmoid, norm_topk;
  float routed_scaling;
  uint64_t moe_layers[TD_MAX_LAYERS / 64]; // bit i is set if layer i has experts
  // Multi-token prediction layers after the last one; they are not used. As stated by config.json,
  // and after td_model_open as found in the checkpoint.
  uint32_t n_mtp_layers;
  // Tensors of other parts (vision), which are not used: as found in the checkpoint.
  uint32_t n_other_tensors;
  uint64_t other_bytes;
  // generation
  int32_t bos_id; // -1: none
  int32_t eos_ids[TD_MAX_EOS];
  uint32_t n_eos;
  float temperature, top_p; // from generation_config.json; 1 if absent
  uint32_t top_k_sampling;  // 0: off
} td_model_config;

static inline bool td_model_is_moe(const td_model_config *config, uint32_t layer_idx) {
  return config->moe_layers[layer_idx / 64] >> layer_idx % 64 & 1;
}

// The window of a layer; 0: none.
static inline uint32_t td_model_window(const td_model_config *config, uint32_t layer_idx) {
  return config->window_layers[layer_idx / 64] >> layer_idx % 64 & 1 ? config->window : 0;
}

// Whether a layer is a gated delta net, with a recurrent state instead of keys and values.
static inline bool td_model_is_delta(const td_model_config *config, uint32_t layer_idx) {
  return config->delta_layers[layer_idx / 64] >> layer_idx % 64 & 1;
}

// How many of the first n layers are gated delta nets.
static inline uint32_t td_model_n_delta(const td_model_config *config, uint32_t n) {
  uint32_t n_delta = 0;
  for (uint32_t i = 0; i < n; i++)
    n_delta += td_model_is_delta(config, i);
  return n_delta;
}

// One transformer layer. Absent matrices are zeroed. gate/up/down of the routed experts are arrays
// of n_experts. A dense layer has is_moe false and uses mlp_*; on a MoE layer mlp_* is the shared
// expert (shared_dim or n_shared_experts * expert_dim wide), absent without shared experts.
typedef struct {
  bool is_moe;
  td_vec attn_norm, mlp_norm;
  td_weight q, k, v, o; // GQA; q also for MLA without q_lora; o for all kinds
  td_vec q_bias, k_bias, v_bias, o_bias;
  td_vec q_norm, k_norm;
  td_weight q_a, q_b, kv_a, kv_b; // MLA
  td_vec q_a_norm, kv_a_norm;
  td_vec q_a_bias, kv_a_bias;
  // Gated delta net: inputs of queries, keys, values and the output gate (delta_grouped: one
  // matrix), strengths and decays (delta_grouped: one matrix). conv f32 [delta_taps][channels].
  td_weight delta_qkv, delta_z, delta_b, delta_a;
  const float *delta_conv, *delta_decay, *delta_bias; // the others f32 [delta_v_heads]
  td_vec delta_norm;
  td_weight router;         // [n_experts][dim]
  const float *router_bias; // f32 [n_experts] or NULL
  td_vec logit_bias;        // of the router's logits
  const float *sinks;       // f32 [n_heads] or NULL
  // f32 [n_experts][gate's rows], [n_experts][dim]; NULL: none. up is NULL then, and the rows of
  // gate and up alternate in gate.
  const float *gate_bias, *down_bias;
  td_weight *gate, *up, *down;
  td_weight mlp_gate, mlp_up, mlp_down;
  td_weight
      shared_gate; // [1][dim]: the sigmoid of its product multiplies the shared expert's output
} td_layer;

typedef struct td_model td_model;

typedef struct {
  uint64_t params, active_params;       // active: used by one token's forward pass
  uint64_t bytes;                       // all weights in use
  uint64_t expert_bytes;                // of them, routed experts
  uint64_t active_bytes;                // read by one token's forward pass, without the embedding
                                        // row
  uint64_t bytes_by_dtype[TD_N_DTYPES]; // indexed by td_dtype
} td_model_stats;

// Reads config.json and generation_config.json only.
td_status td_model_config_read(td_model_config *out, const char *dir, td_err *err);

// Maps the shards and binds every tensor. Data are copied or converted only for the few tensors
// whose file offset is misaligned for their dtype, and for matrices in a format without a kernel
// (model/convert.h). Errors name file and tensor: TD_ENOENT, TD_EFORMAT (corrupt or truncated
// shard, wrong header, missing, unexpected or misshapen tensor), TD_EUNSUPPORTED (architecture,
// dtype, quantization method). On success the caller owns *out.
td_status td_model_open(td_model **out, const char *dir, td_err *err);
// Like td_model_open, but with the resident weights at weights_fd (model/checkpoint/resident.h),
// which every process that opens them shares. weights_fd is borrowed for the call; -1: the shards.
td_status td_model_open_weights(td_model **out, const char *dir, int weights_fd, td_err *err);
// Like td_model_open, for inspection: tensors that need conversion (model/convert.h) have shape and
// dtype but no data until td_model_convert is called.
td_status td_model_open_shapes(td_model **out, const char *dir, td_err *err);
// Fills tensors that need conversion. Does nothing if that is done. TD_ENOMEM.
td_status td_model_convert(td_model *model, td_err *err);
// A model whose weights are already in memory, for benchmarks. The memory is borrowed until close;
// several layers may share weights.
typedef struct {
  const td_layer *layers; // [config->n_layers]
  td_weight embed, lm_head;
  td_vec final_norm;
  const void *memory; // contains all weights
  size_t n_bytes;
} td_model_parts;
td_status td_model_assemble(td_model **out, const td_model_config *config,
                            const td_model_parts *parts, td_err *err);
void td_model_close(td_model *model);
// The memory that contains all weights; NULL if they are mapped from files.
const void *td_model_memory(const td_model *model, size_t *n_bytes);

const td_model_config *td_model_config_of(const td_model *model);
const td_layer *td_model_layer(const td_model *model, uint32_t layer_idx);
const td_weight *td_model_embed(const td_model *model);
const td_weight *td_model_lm_head(const td_model *model); // the embedding if tied
td_vec td_model_final_norm(const td_model *model);
td_model_stats td_model_stats_of(const td_model *model);
// Size of a layer's routed experts in bytes.
uint64_t td_model_expert_bytes(const td_model *model, uint32_t layer_idx);
const char *td_model_dir(const td_model *model);
const char *td_model_name(const td_model *model);
// A model name derived from its directory: the repository's name if it is a snapshot in a hub cache
// (models--ORG--NAME/snapshots/HASH), otherwise the last component of its real path. The caller
// frees it; NULL: out of memory.
char *td_dir_model_name(const char *dir);

// A tensor of the checkpoint, for listing. shape has n_dims entries.
typedef struct {
  const char *name, *file, *dtype;
  uint64_t shape[8];
  uint32_t n_dims;
  uint64_t n_bytes;
} td_tensor_info;
size_t td_model_n_tensors(const td_model *model);
td_tensor_info td_model_tensor(const td_model *model, size_t idx);

#endif
