// src/model/model.h - a checkpoint directory: its configuration, and its weights mapped as stored.
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/numa.h"
#include "base/status.h"
#include "model/ngrams.h"
#include "model/vision.h"
#include "tandem/types.h"

// Kinds of attention, of which every layer is one. X(KIND, name): engine/attn/name.c computes it.
#define TD_ATTN_KINDS(X)                                                                           \
  X(GQA, gqa)               /* grouped-query attention */                                          \
  X(GQA_WIDE, gqa_wide)     /* GQA with heads of another width beside those of GQA */              \
  X(BLOCKS, blocks)         /* GQA over blocks of keys that an indexer selects for each KV head */ \
  X(MLA, mla)               /* multi-head latent attention */                                      \
  X(DSA, dsa)               /* MLA over keys that an indexer selects for each token */             \
  X(DSA_SHARED, dsa_shared) /* MLA over the keys that the layer before attended to */              \
  X(GROUPS, groups)         /* GQA over groups of keys, whose mean keys an indexer selects */      \
  X(DSA_POOL, dsa_pool)     /* MLA over groups of keys, whose pooled keys an indexer selects */    \
  X(DELTA, delta)           /* gated delta net: a recurrent state instead of keys and values */    \
  X(KDA, kda)               /* and with a decay for each channel: Kimi delta attention */          \
  X(NEAR, near)             /* one key within a window, which is the value, too */                 \
  X(POOL, pool)             /* and keys pooled of many positions each */                           \
  X(POOL_TOP, pool_top)     /* and pooled keys that an indexer selects */
typedef enum {
#define TD_ATTN_KIND(KIND, name) TD_ATTN_##KIND,
  TD_ATTN_KINDS(TD_ATTN_KIND)
#undef TD_ATTN_KIND
} td_attn_kind;

// RMS norms of queries and keys before RoPE (GQA).
typedef enum {
  TD_QK_NORM_NONE,
  TD_QK_NORM_HEAD, // each head by itself, with the same weights
  TD_QK_NORM_ALL,  // all heads together
} td_qk_norm;

typedef struct td_family td_family; // families/family.h
// How a checkpoint of several parts names the tensors of its language model.
typedef struct td_wrapper td_wrapper; // families/family.h

#define TD_MAX_EOS     16
#define TD_MAX_LAYERS  1024
#define TD_MAX_IGNORED 8

// YaRN RoPE scaling; factor 1: none. Field names follow config.json.
typedef struct {
  double factor, beta_fast, beta_slow, mscale, mscale_all_dim;
  double attention_factor; // 0: derived from factor (and mscale) as in transformers
  uint32_t original_max_position;
  bool untruncated; // the ramp's ends are not rounded to whole dimensions
} td_yarn;

// The contents of config.json and generation_config.json that the forward pass needs. Dimensions
// are in elements. Fields of kinds of attention that no layer is are 0.
typedef struct {
  const td_family *family;
  const td_wrapper *wrapper;            // NULL: the checkpoint is a language model alone
  bool has_bailing_names;               // of attention, "attention.dense": td_settle_names
  bool has_newer_names, has_newer_head; // of a wrapper, or a family of bare names: td_settle_names
  td_attn_kind attn;                    // of most layers, and of those that predict
  char arch_name[64]; // model_type as published: "deepseek_v3", "kimi_k2", "qwen3_moe"
  uint32_t n_layers, n_vocab, dim, n_heads, max_position;
  uint8_t kind[TD_MAX_LAYERS]; // td_attn_kind of each layer
  bool tie_embeddings, attention_bias;
  float rms_eps;
  double rope_theta;
  td_yarn yarn;
  bool rope_interleaved;
  double partial_rotary; // as stated, 0: not; rope_dim follows from it for GQA
  uint32_t rope_dim;     // elements of a head that RoPE rotates
  // Pairs of a head that rotate by positions in time, by row and by column (mrope.h); 0: all by the
  // token's index. axes_interleaved: the axes take turns, else they follow one another.
  uint32_t axes[3];
  bool axes_interleaved;
  // Queries at position p are scaled by 1 + query_beta * ln(1 + floor(p / query_span)).
  // query_beta 0: not scaled.
  double query_beta;
  uint32_t query_span;
  // GQA
  uint32_t n_kv_heads, head_dim;
  td_qk_norm qk_norm;
  // Positions that a token sees in the layers of window_layers (bit i: layer i), its own the last.
  uint32_t window;
  uint64_t window_layers[TD_MAX_LAYERS / 64];
  bool only_windows_rotate; // RoPE is of those layers alone
  // GQA_WIDE: its heads. Of the pairs of a head wide_pairs rotate, by powers of wide_theta.
  // wide_shares: keys, before their norm, are the values, too.
  uint32_t wide_kv_heads, wide_head_dim, wide_pairs;
  double wide_theta;
  bool wide_shares;
  bool norms_values; // without weights, for each head by itself
  bool unit_scores;  // scores are not divided by sqrt(head_dim)
  // q_proj has a gate for each query, whose sigmoid multiplies the attention's output.
  bool has_attn_gate;
  // Gated delta nets in place of attention (DELTA, KDA). delta_grouped: the input projection's rows
  // are sorted by key head. delta_tiled: value head h has key head h % delta_k_heads, as in GGUF
  // files. delta_by_channel: the kind is KDA.
  uint32_t delta_k_heads, delta_v_heads, delta_k_dim, delta_v_dim, delta_taps;
  bool delta_grouped, delta_tiled, delta_by_channel;
  bool delta_sigmoid; // of the output's gate, in place of its SiLU
  float delta_bound;  // of the decays' logarithms (device.h: td_delta_conv_args); 0: none
  // MLA
  bool has_no_rope;     // the rotary part of queries and keys, if any, is not rotated
  bool has_head_gates;  // the sigmoid of a gate for each head multiplies attention's output
  bool latents_eps;     // norms of latents have rms_eps, not MLA's own epsilon
  uint32_t q_lora_rank; // 0: q_proj is one matrix
  uint32_t kv_lora_rank, nope_dim, v_dim;
  // Indexer over MLA (DSA): its heads, their width, how many keys it selects for a token, and how
  // it rotates the first rope_dim elements.
  uint32_t index_heads, index_dim, index_top_k;
  bool index_interleaved;
  uint32_t index_group; // DSA_POOL, GROUPS: positions of a key; index_top_k counts such keys
  // Indexer over GQA (BLOCKS): positions in a block, how many blocks a token sees, and how many of
  // them are always its own and the ones just before.
  uint32_t index_block, index_top_blocks, index_local_blocks;
  // Pooled attention, kinds NEAR, POOL and POOL_TOP: positions pooled into an entry of either kind,
  // their own RoPE base (only they use yarn), and the low-rank output projection, in groups of
  // heads. window applies to all layers.
  uint32_t pool_group, pool_top_group;
  double pool_theta;
  uint32_t o_groups, o_lora_rank;
  // Hyper-connections: streams of the residual; 0: a plain residual. streams_mean: the head reads
  // their mean.
  uint32_t n_streams, hyper_rounds;
  uint32_t hyper_rank; // of what gates each element of the streams; 0: a factor for each stream
  bool streams_mean;
  float hyper_eps;
  // Embeddings of the n-grams that end with a token, added to the streams in front of the layers of
  // ngram_layers, which are delta nets (ngrams.h). ngram_taps: of the convolution over them,
  // ngram_size tokens apart.
  uint64_t ngram_layers[TD_MAX_LAYERS / 64];
  uint32_t ngram_size, ngram_heads, ngram_dim, ngram_taps, ngram_base, ngram_seed;
  int32_t ngram_end; // the token that parts texts
  // experts
  uint32_t n_experts, top_k, n_shared_experts, expert_dim, dense_dim;
  uint32_t shared_dim; // of all shared experts; 0: n_shared_experts * expert_dim
  uint32_t n_groups, topk_groups;
  // Experts with biases and a clamped activation, whose rows of gate and up alternate (device.h:
  // td_moe_args); swiglu_limit 0: plain experts.
  float swiglu_limit, swiglu_alpha;
  bool swiglu_plain;      // with a limit: silu and no more
  bool has_split_experts; // with a limit: they do not alternate, as found in the checkpoint
  bool is_gelu;           // MLPs have GELU (its approximation by tanh) in place of SiLU
  bool router_sigmoid, router_softplus, norm_topk;
  float routed_scaling, router_min_sum;      // the latter as in td_router_args
  uint64_t table_layers[TD_MAX_LAYERS / 64]; // bit i: token ids choose layer i's experts
  uint64_t moe_layers[TD_MAX_LAYERS / 64];   // bit i is set if layer i has experts
  // Outputs of attention and of MLPs are normed before they are added to the residual, which every
  // layer then multiplies by a factor of its own. A layer's dense MLP is beside its experts, which
  // have norms of their own, as has the router, and each expert a factor.
  bool has_out_norms;
  bool scales_embeddings; // by sqrt(dim)
  float logit_cap;        // logits are logit_cap * tanh(logits / logit_cap); 0: as they are
  // Multi-token prediction layers after the last one. As stated by config.json, and after
  // td_model_open as found in the checkpoint.
  uint32_t n_mtp_layers;
  uint32_t n_draft_layers; // how many of them are in use: 0, or 1 after td_model_use_mtp
  td_vision_config vision;
  // Tensors of other parts, which are not used: as found in the checkpoint.
  uint32_t n_other_tensors;
  uint64_t other_bytes;
  // generation
  int32_t bos_id; // -1: none
  int32_t eos_ids[TD_MAX_EOS];
  uint32_t n_eos;
  // Keys of config.json, ended by NULL, that other families obey but this one's reference does not.
  const char *ignored[TD_MAX_IGNORED + 1];
  float temperature, top_p; // from generation_config.json; 1 if absent
  uint32_t top_k_sampling;  // 0: off
} td_model_config;

// Sets of layers, a bit each: [TD_MAX_LAYERS / 64].
static inline void td_layers_add(uint64_t *layers, uint32_t layer_idx) {
  layers[layer_idx / 64] |= (uint64_t)1 << layer_idx % 64;
}
static inline bool td_layers_have(const uint64_t *layers, uint32_t layer_idx) {
  return layers[layer_idx / 64] >> layer_idx % 64 & 1;
}

static inline bool td_model_is_moe(const td_model_config *config, uint32_t layer_idx) {
  return td_layers_have(config->moe_layers, layer_idx);
}

// The window of a layer; 0: none.
static inline uint32_t td_model_window(const td_model_config *config, uint32_t layer_idx) {
  return td_layers_have(config->window_layers, layer_idx) ? config->window : 0;
}

// A layer's kind of attention.
static inline td_attn_kind td_model_attn(const td_model_config *config, uint32_t layer_idx) {
  return (td_attn_kind)config->kind[layer_idx];
}

// The number of layers of a kind.
static inline uint32_t td_model_n_attn(const td_model_config *config, td_attn_kind kind) {
  uint32_t n = 0;
  for (uint32_t i = 0; i < config->n_layers; i++)
    n += td_model_attn(config, i) == kind;
  return n;
}

// Scores of hyper-connections (device.h: td_hyper_read_args).
typedef struct {
  td_weight fn;
  const float *base, *scale;
  // With hyper_rank, in their place: a norm of each stream, gates of low rank, the factors of the
  // block's output.
  td_vec norm; // [n_streams * dim]
  td_weight down, up, inject;
} td_hyper;

// Embeddings of n-grams, and what makes them an addition to the streams.
typedef struct {
  td_ngram_table table;
  td_weight key, value;                 // [n_streams * dim][ngram_dim], [dim][ngram_dim]
  td_vec key_norm, query_norm, in_norm; // [n_streams * dim]
  const float *conv;                    // f32 [ngram_taps][n_streams * dim]
} td_ngrams;

// How keys are pooled (device.h: td_pool_args).
typedef struct {
  td_weight x, gate;
  const float *bias;
  td_vec norm;
} td_pool_weights;

// One transformer layer. Absent matrices are zeroed. gate/up/down of the routed experts are arrays
// of n_experts. A dense layer has is_moe false and uses mlp_*; on a MoE layer mlp_* is the shared
// expert (shared_dim or n_shared_experts * expert_dim wide), absent without shared experts.
typedef struct {
  bool is_moe, has_window;
  td_attn_kind kind;
  td_vec attn_norm, mlp_norm;
  td_weight q, k, v, o; // GQA and KDA; q also for MLA without q_lora; o for all kinds
  td_vec q_bias, k_bias, v_bias, o_bias;
  td_vec q_norm, k_norm;
  td_weight q_a, q_b, kv_a, kv_b; // MLA
  td_weight head_gate;            // [n_heads][dim]
  td_vec q_a_norm, kv_a_norm;
  td_vec q_a_bias, kv_a_bias;
  // Indexer: queries from the low-rank queries, one key, a weight per head; the key's layer norm.
  // GROUPS: index_q has the rows of the key behind those of queries.
  td_weight index_q, index_k, index_weights;
  td_vec index_norm, index_norm_bias;
  td_vec index_q_norm; // BLOCKS, GROUPS: of each head's query
  // Gated delta net: inputs of queries, keys, values and the output gate (delta_grouped: one
  // matrix), strengths and decays (delta_grouped: one matrix). conv f32 [delta_taps][channels].
  td_weight delta_qkv, delta_z, delta_b, delta_a;
  const float *delta_conv, *delta_decay, *delta_bias; // the others f32 [delta_v_heads]
  td_vec delta_norm;
  // KDA: of low rank, in front of delta_z and delta_a, or absent. delta_bias f32
  // [delta_v_heads][delta_k_dim].
  td_weight delta_z_in, delta_a_in;
  // Pooled attention: a key for all heads in k, k_norm; o_a [o_groups * o_lora_rank][heads of a
  // group], o from that; queries and weights of the indexer as above.
  td_weight o_a;
  td_pool_weights pool, index_pool; // DSA_POOL: the key of index_k is what is pooled
  td_hyper attn_hyper, mlp_hyper;
  // has_out_norms; of a layer with experts: the norm of the dense MLP's output, those in front of
  // the experts and behind them, the router's, and of both sums together mlp_out_norm.
  td_vec attn_out_norm, mlp_out_norm, dense_out_norm, experts_norm, experts_out_norm, router_norm;
  const float *expert_scale, *factor; // f32 [n_experts], [1]
  td_ngrams ngrams;
  td_weight router;            // [n_experts][dim]
  const int32_t *expert_table; // [n_vocab][top_k] or NULL
  const float *router_bias;    // f32 [n_experts] or NULL
  td_vec logit_bias;           // of the router's logits
  const float *sinks;          // f32 [n_heads] or NULL
  // f32 [n_experts][gate's rows], [n_experts][dim]; NULL: none. Either up is NULL, and the rows of
  // gate and up alternate in gate, or the biases of up follow those of gate.
  const float *gate_bias, *down_bias;
  td_weight *gate, *up, *down;
  td_weight mlp_gate, mlp_up, mlp_down;
  td_weight
      shared_gate; // [1][dim]: the sigmoid of its product multiplies the shared expert's output
} td_layer;

// What is around a layer of multi-token prediction, which is the one behind the last. From the
// state of a token and the token that follows it, it predicts the one after that:
//   norm(layer(proj [embed_norm(embedding), hidden_norm(state)])), and the model's head.
// With n_streams, the state is that of the streams, each of which gets
//   proj embed_norm(embedding) + hidden_proj hidden_norm(stream),
// and hyper reads them in front of norm.
typedef struct {
  td_vec embed_norm, hidden_norm, norm;
  td_weight proj;        // [dim][2 * dim] or, with n_streams, [dim][dim]
  td_weight hidden_proj; // [dim][dim]
  td_hyper hyper;
  bool is_normed; // it continues, to the token after that one, from norm's result
} td_mtp;

typedef struct td_model td_model;
struct td_store; // checkpoint/store.h

// Matrices that take prompts' activations in 8 bits.
typedef struct {
  uint32_t n_matrices;
  uint64_t params;        // without routed experts
  uint64_t active_params; // with them, as far as a token has them
} td_a8_stats;

typedef struct {
  uint64_t params, active_params;       // active: used by one token's forward pass
  uint64_t bytes;                       // all weights in use
  uint64_t expert_bytes;                // of them, routed experts
  uint64_t active_bytes;                // read by one token's forward pass, without the embedding
                                        // row
  uint64_t bytes_by_dtype[TD_N_DTYPES]; // indexed by td_dtype
  uint64_t vision_bytes, vision_params; // of the tower; not in the others
  uint64_t table_bytes;             // of tables of n-grams, which stay in their files; not in bytes
  uint32_t n_matrices;              // that a token's activations are multiplied by, routers aside
  td_a8_stats a8[TD_N_ACTIVATIONS]; // of those, by td_weight_a8
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
// A model whose weights are already in memory, or of which only the sizes count (model/outline.h).
// The memory is borrowed until close;
// several layers may share weights.
typedef struct {
  const td_layer *layers; // [config->n_layers], and the one of mtp
  const td_mtp *mtp;      // NULL: no layer of multi-token prediction
  td_weight embed, lm_head;
  td_vec final_norm;
  const void *memory; // contains all weights
  size_t n_bytes;
  const char *name; // NULL: the architecture's
  void *owned;      // freed with the model
} td_model_parts;
td_status td_model_assemble(td_model **out, const td_model_config *config,
                            const td_model_parts *parts, td_err *err);
void td_model_close(td_model *model);
// The memory that contains all weights; NULL if they are mapped from files.
const void *td_model_memory(const td_model *model, size_t *n_bytes);
// How it lies on NUMA nodes; base is NULL if it is not spread over them.
td_stripes td_model_stripes(const td_model *model);

const td_model_config *td_model_config_of(const td_model *model);
// Layer n_layers is that of multi-token prediction, if there is one, in use or not.
const td_layer *td_model_layer(const td_model *model, uint32_t layer_idx);
// Has the layer of multi-token prediction used, as layer n_layers, with a part of its own in KV
// pages. False: the checkpoint has none that can be used. Before anything is sized by the model.
bool td_model_use_mtp(td_model *model);
const td_mtp *td_model_mtp(const td_model *model); // NULL: none
// Bytes of its weights, with or without its routed experts; 0: none.
uint64_t td_model_mtp_bytes(const td_model *model, bool has_experts);
const td_vision_weights *td_model_vision(const td_model *model); // NULL: it does not see
const td_weight *td_model_embed(const td_model *model);
const td_hyper *td_model_head_hyper(const td_model *model); // before the final norm
const td_weight *td_model_lm_head(const td_model *model);   // the embedding if tied
td_vec td_model_final_norm(const td_model *model);
td_model_stats td_model_stats_of(const td_model *model);
// Size of a layer's routed experts in bytes.
uint64_t td_model_expert_bytes(const td_model *model, uint32_t layer_idx);
// The files' tensors; NULL: none.
const struct td_store *td_model_store(const td_model *model);
const struct td_quant *td_model_quant(const td_model *model);
// NULL: the weights are resident, and were converted when they were loaded.
const struct td_conversion *td_model_conversion(const td_model *model);
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
