// src/model/families/family.h - a model family's descriptor; families alike share a file. The rest
// of the program branches on kinds (of attention, router, cache), never on the family.
#pragma once

#include <stddef.h>

#include "model/config.h"
#include "model/tensor_specs.h"

// Limits chosen so that the product of any two values fits 64 bits, and heads times head dimension
// fits 32.
#define TD_MAX_DIM      (1u << 22)
#define TD_MAX_HEADS    4096u
#define TD_MAX_HEAD_DIM 8192u
#define TD_MAX_EXPERTS  4096u

// An integer of config.json: its key, an alternative spelling, the destination field, its range,
// and the default of transformers' configuration class.
typedef struct {
  const char *key, *alias;
  size_t offset; // in td_model_config
  uint32_t min, max, fallback;
} td_config_key;

td_status td_config_read_uints(const td_config_reader *r, const td_config_key *keys, size_t n);

// Which layers have experts.
typedef enum {
  TD_EXPERTS_FROM, // mlp_layer_types, or all from first_k_dense_replace (td_family.n_dense) on
  TD_EXPERTS_ALL,
  TD_EXPERTS_STEP, // every decoder_sparse_step-th, but none that mlp_only_layers lists
  TD_EXPERTS_OWN,  // td_family.read finds out
} td_expert_layers;

struct td_family {
  const char *model_types[4]; // values of config.json's model_type, NULL-terminated
  const char *experts;        // what names of experts' tensors begin with; NULL: "mlp.experts"
  // Keys that other families have under the same name, but not the reference of this one.
  const char *ignores[4];
  bool is_bare;            // names have no body: "layers.N.", "embed.weight", "head.weight"
  bool has_partial_rotary; // partial_rotary_factor may be other than 1
  bool has_norm1;          // the last norm is stored as TD_SPEC_NORM1
  const char *mtp; // what names of multi-token prediction begin with; NULL: layers after the last
  bool has_mtp_apart; // with mtp: the layer is that of Qwen3-Next
  td_expert_layers expert_layers;
  uint32_t n_dense;
  const char *scaling; // key of the factor of all routing weights; NULL: none
  // Kinds that config.json does not state, and defaults of optional keys: head_dim (0: hidden_size
  // / num_attention_heads), and of latent attention q_lora_rank (0: q_proj is one matrix). 0 for
  // groups of experts and routed_scaling stands for 1.
  td_model_config defaults;
  const td_config_key *keys;
  size_t n_keys;
  // Reads everything else, and checks across keys; NULL: there is nothing else.
  td_status (*read)(const td_config_reader *r);
  const td_tensor_spec *layer; // tensors of a layer
  size_t n_layer;
};

// A checkpoint of several parts: its text_config describes the language model.
struct td_wrapper {
  const char *model_type;      // of the whole
  const char *text_model_type; // of text_config where it states none
  const char *body, *head;     // stand for "model." and "" before "lm_head.weight"
  bool is_tied;                // tie_word_embeddings of the whole where it is absent
  const char *others[8];       // what names of the other parts' tensors begin with; ends with NULL
  const td_tower *tower;       // of the first of others; NULL: images are not supported
};

// A tower: what its configuration and tensors are called. Names are behind the tower's own.
struct td_tower {
  const td_config_key *keys; // of vision_config
  size_t n_keys;
  const char *hidden_act;
  bool is_bicubic;      // learned positions, with half pixels; else bilinear, from edge to edge
  bool has_bias;        // of attention, where attention_bias does not say
  float eps, limit;     // defaults of rms_norm_eps and swiglu_limit; 0: no such key
  const uint32_t *deep; // default of deepstack_visual_indexes, [n_deep]; NULL: no such key
  uint32_t n_deep;
  const char *layers, *deep_mergers; // with "%u"
  // Tensors of td_vision_weights, of a layer and of a merger in `deep`.
  const td_tensor_spec *whole, *layer, *merger;
  size_t n_whole, n_layer, n_merger;
};
extern const td_tower td_tower_qwen3_vl, td_tower_qwen3_5, td_tower_qwen3_omni;
extern const td_tower td_tower_glm4v, td_tower_glm5;

#define TD_FAMILY(name) extern const td_family td_family_##name;
#include "model/families/families.inc"
#undef TD_FAMILY

// What is alike in every family's file.
#define TD_FAMILY_PARTS TD_FAMILY_PARTS_OF(keys)
// Of several families in a file, which differ in keys and defaults.
#define TD_FAMILY_PARTS_OF(its_keys)                                                               \
  .keys = its_keys, .n_keys = TD_COUNT(its_keys), .layer = layer, .n_layer = TD_COUNT(layer)

#define TD_TOKEN_IDS(bos, eos) .bos_id = bos, .eos_ids = {eos}, .n_eos = 1

// ---- keys that families share, each with its defaults -------------------------------------------

#define TD_KEY(key, alias, field, min, max, fallback)                                              \
  { key, alias, offsetof(td_model_config, field), min, max, fallback }

#define TD_BODY_KEYS(vocab, hidden, layers, heads, positions)                                      \
  TD_KEY("vocab_size", NULL, n_vocab, 1, 1u << 24, vocab),                                         \
      TD_KEY("hidden_size", NULL, dim, 1, TD_MAX_DIM, hidden),                                     \
      TD_KEY("num_hidden_layers", NULL, n_layers, 1, TD_MAX_LAYERS, layers),                       \
      TD_KEY("num_attention_heads", NULL, n_heads, 1, TD_MAX_HEADS, heads),                        \
      TD_KEY("max_position_embeddings", NULL, max_position, 1, 1u << 30, positions)

#define TD_GQA_KEY(kv_heads)                                                                       \
  TD_KEY("num_key_value_heads", NULL, n_kv_heads, 1, TD_MAX_HEADS, kv_heads)

#define TD_MLA_KEYS(lora_rank, nope, rope, value)                                                  \
  TD_KEY("kv_lora_rank", NULL, kv_lora_rank, 1, TD_MAX_DIM, lora_rank),                            \
      TD_KEY("qk_nope_head_dim", NULL, nope_dim, 1, TD_MAX_HEAD_DIM, nope),                        \
      TD_KEY("qk_rope_head_dim", NULL, rope_dim, 2, TD_MAX_HEAD_DIM, rope),                        \
      TD_KEY("v_head_dim", NULL, v_dim, 1, TD_MAX_HEAD_DIM, value)

#define TD_INDEX_KEYS(heads, head_dim, n_selected)                                                 \
  TD_KEY("index_n_heads", NULL, index_heads, 1, TD_MAX_HEADS, heads),                              \
      TD_KEY("index_head_dim", NULL, index_dim, 2, TD_MAX_HEAD_DIM, head_dim),                     \
      TD_KEY("index_topk", NULL, index_top_k, 1, 1u << 20, n_selected)

#define TD_DENSE_KEY(width) TD_KEY("intermediate_size", NULL, dense_dim, 1, TD_MAX_DIM, width)

#define TD_EXPERT_KEYS(n, per_token)                                                               \
  TD_KEY("num_experts", "num_local_experts", n_experts, 1, TD_MAX_EXPERTS, n),                     \
      TD_KEY("num_experts_per_tok", NULL, top_k, 1, TD_MAX_EXPERTS, per_token)

// Experts in groups, beside shared ones.
#define TD_ROUTED_KEYS(n, per_token, width, groups, groups_per_token)                              \
  TD_KEY("n_routed_experts", "num_local_experts", n_experts, 1, TD_MAX_EXPERTS, n),                \
      TD_KEY("num_experts_per_tok", NULL, top_k, 1, TD_MAX_EXPERTS, per_token),                    \
      TD_KEY("moe_intermediate_size", NULL, expert_dim, 1, TD_MAX_DIM, width),                     \
      TD_KEY("n_shared_experts", NULL, n_shared_experts, 0, 256, 1),                               \
      TD_KEY("n_group", NULL, n_groups, 1, TD_MAX_EXPERTS, groups),                                \
      TD_KEY("topk_group", NULL, topk_groups, 1, TD_MAX_EXPERTS, groups_per_token)

#define TD_MTP_KEY TD_KEY("num_nextn_predict_layers", "num_mtp_layers", n_mtp_layers, 0, 64, 1)

// ---- tensors that families share ----------------------------------------------------------------

// kind, rows and cols: the suffixes of TD_SPEC_ and TD_DIM_.
#define TD_PLACE(of, kind, name, field, rows, cols, conditions, ...)                               \
  {                                                                                                \
    name, TD_SPEC_##kind, offsetof(of, field), TD_DIM_##rows, TD_DIM_##cols, conditions, {         \
      __VA_ARGS__                                                                                  \
    }                                                                                              \
  }
// A tensor as its publisher calls it, and as transformers or newer tools do.
#define TD_RENAMED(kind, name, field, rows, cols, conditions, ...)                                 \
  TD_PLACE(td_layer, kind, name, field, rows, cols, conditions, __VA_ARGS__)
#define TD_MATRIX(kind, name, field, rows, cols, conditions)                                       \
  TD_PLACE(td_layer, kind, name, field, rows, cols, conditions, NULL)
#define TD_VECTOR(name, field, rows, conditions) TD_MATRIX(VEC, name, field, rows, ONE, conditions)
#define TD_NORM1(name, field, rows, conditions)  TD_MATRIX(NORM1, name, field, rows, ONE, conditions)

#define TD_NORM_PLACES                                                                             \
  TD_VECTOR("input_layernorm.weight", attn_norm, MODEL, 0),                                        \
      TD_VECTOR("post_attention_layernorm.weight", mlp_norm, MODEL, 0)

// Grouped-query attention with separate projections, the biases of attention_bias on q, k and v.
#define TD_GQA_PLACES                                                                              \
  TD_MATRIX(WEIGHT, "self_attn.q_proj.weight", q, Q, MODEL, 0),                                    \
      TD_MATRIX(WEIGHT, "self_attn.k_proj.weight", k, KV, MODEL, 0),                               \
      TD_MATRIX(WEIGHT, "self_attn.v_proj.weight", v, KV, MODEL, 0),                               \
      TD_MATRIX(WEIGHT, "self_attn.o_proj.weight", o, MODEL, Q, 0),                                \
      TD_VECTOR("self_attn.q_proj.bias", q_bias, Q, TD_IF(BIAS)),                                  \
      TD_VECTOR("self_attn.k_proj.bias", k_bias, KV, TD_IF(BIAS)),                                 \
      TD_VECTOR("self_attn.v_proj.bias", v_bias, KV, TD_IF(BIAS))

#define TD_OUT_BIAS_PLACE TD_VECTOR("self_attn.o_proj.bias", o_bias, MODEL, TD_IF(BIAS))

// Norms of queries and keys, for each head by itself.
#define TD_QK_NORM_PLACES                                                                          \
  TD_VECTOR("self_attn.q_norm.weight", q_norm, HEAD, TD_IF(QK_NORM)),                              \
      TD_VECTOR("self_attn.k_norm.weight", k_norm, HEAD, TD_IF(QK_NORM))

// Multi-head latent attention.
#define TD_MLA_PLACES                                                                              \
  TD_MATRIX(WEIGHT, "self_attn.q_proj.weight", q, MLA_Q, MODEL, TD_IF(LATENT) | TD_IF(Q_WHOLE)),   \
      TD_MATRIX(WEIGHT, "self_attn.o_proj.weight", o, MODEL, MLA_OUT, TD_IF(LATENT)),              \
      TD_VECTOR("self_attn.o_proj.bias", o_bias, MODEL, TD_IF(LATENT) | TD_IF(BIAS)),              \
      TD_MATRIX(WEIGHT, "self_attn.q_a_proj.weight", q_a, Q_LORA, MODEL,                           \
                TD_IF(LATENT) | TD_IF(Q_LORA)),                                                    \
      TD_VECTOR("self_attn.q_a_proj.bias", q_a_bias, Q_LORA,                                       \
                TD_IF(LATENT) | TD_IF(Q_LORA) | TD_IF(BIAS)),                                      \
      TD_VECTOR("self_attn.q_a_layernorm.weight", q_a_norm, Q_LORA,                                \
                TD_IF(LATENT) | TD_IF(Q_LORA)),                                                    \
      TD_MATRIX(WEIGHT, "self_attn.q_b_proj.weight", q_b, MLA_Q, Q_LORA,                           \
                TD_IF(LATENT) | TD_IF(Q_LORA)),                                                    \
      TD_MATRIX(LATENT, "self_attn.kv_a_proj_with_mqa.weight", kv_a, KV_A, MODEL, TD_IF(LATENT)),  \
      TD_VECTOR("self_attn.kv_a_proj_with_mqa.bias", kv_a_bias, KV_A,                              \
                TD_IF(LATENT) | TD_IF(BIAS)),                                                      \
      TD_VECTOR("self_attn.kv_a_layernorm.weight", kv_a_norm, KV_LORA, TD_IF(LATENT)),             \
      TD_MATRIX(LATENT, "self_attn.kv_b_proj.weight", kv_b, KV_B, KV_LORA, TD_IF(LATENT))

// The indexer of MLA over selected keys.
#define TD_INDEX_PLACES                                                                            \
  TD_MATRIX(LATENT, "self_attn.indexer.wq_b.weight", index_q, INDEX_Q, Q_LORA, TD_IF(INDEX)),      \
      TD_MATRIX(LATENT, "self_attn.indexer.wk.weight", index_k, INDEX_K, MODEL, TD_IF(INDEX)),     \
      TD_VECTOR("self_attn.indexer.k_norm.weight", index_norm, INDEX_K, TD_IF(INDEX)),             \
      TD_VECTOR("self_attn.indexer.k_norm.bias", index_norm_bias, INDEX_K, TD_IF(INDEX)),          \
      TD_MATRIX(ROUTER, "self_attn.indexer.weights_proj.weight", index_weights, INDEX_HEADS,       \
                MODEL, TD_IF(INDEX))

// Scores of hyper-connections, in front of a block; alias as transformers names them.
#define TD_HYPER_PLACES(name, field, alias)                                                        \
  TD_RENAMED(SCORES, name "_fn", field.fn, STREAM_SCORES, STREAM_WIDTH, 0, alias ".fn"),           \
      TD_RENAMED(F32, name "_base", field.base, STREAM_SCORES, ONE, 0, alias ".base"),             \
      TD_RENAMED(F32, name "_scale", field.scale, THREE, ONE, 0, alias ".scale")

// A gated MLP, its width a dimension; what the matrices' names begin with, and a second such name.
#define TD_MLP_PLACES(name, width, conditions)                                                     \
  TD_MATRIX(WEIGHT, name ".gate_proj.weight", mlp_gate, width, MODEL, conditions),                 \
      TD_MATRIX(WEIGHT, name ".up_proj.weight", mlp_up, width, MODEL, conditions),                 \
      TD_MATRIX(WEIGHT, name ".down_proj.weight", mlp_down, MODEL, width, conditions)
#define TD_MLP_RENAMED(name, width, conditions, alias)                                             \
  TD_RENAMED(WEIGHT, name ".gate_proj.weight", mlp_gate, width, MODEL, conditions,                 \
             alias ".gate_proj.weight", alias ".gate_up_proj.weight"),                             \
      TD_RENAMED(WEIGHT, name ".up_proj.weight", mlp_up, width, MODEL, conditions,                 \
                 alias ".up_proj.weight", alias ".gate_up_proj.weight"),                           \
      TD_RENAMED(WEIGHT, name ".down_proj.weight", mlp_down, MODEL, width, conditions,             \
                 alias ".down_proj.weight")

#define TD_DENSE_PLACES TD_MLP_PLACES("mlp", DENSE, TD_IF(DENSE))

// The experts (names after td_family.experts and the expert's number).
#define TD_EACH_EXPERT_PLACES                                                                      \
  TD_MATRIX(EXPERT, "gate_proj.weight", gate, EXPERT, MODEL, TD_IF(MOE)),                          \
      TD_MATRIX(EXPERT, "up_proj.weight", up, EXPERT, MODEL, TD_IF(MOE)),                          \
      TD_MATRIX(EXPERT, "down_proj.weight", down, MODEL, EXPERT, TD_IF(MOE))

// As Mixtral calls them, and as transformers does.
#define TD_W_EXPERT_PLACES(conditions)                                                             \
  TD_RENAMED(EXPERT, "w1.weight", gate, EXPERT, MODEL, conditions, "gate_proj.weight"),            \
      TD_RENAMED(EXPERT, "w3.weight", up, EXPERT, MODEL, conditions, "up_proj.weight"),            \
      TD_RENAMED(EXPERT, "w2.weight", down, MODEL, EXPERT, conditions, "down_proj.weight")

// The router and its experts.
#define TD_EXPERT_PLACES                                                                           \
  TD_MATRIX(ROUTER, "mlp.gate.weight", router, EXPERTS, MODEL, TD_IF(MOE)), TD_EACH_EXPERT_PLACES

#define TD_ROUTER_BIAS_PLACE(name) TD_MATRIX(F32, name, router_bias, EXPERTS, ONE, TD_IF(MOE))

#define TD_SHARED_PLACES TD_MLP_PLACES("mlp.shared_experts", SHARED, TD_IF(MOE) | TD_IF(SHARED))

// The MLPs of DeepSeek V3.
#define TD_ROUTED_PLACES                                                                           \
  TD_DENSE_PLACES, TD_EXPERT_PLACES, TD_ROUTER_BIAS_PLACE("mlp.gate.e_score_correction_bias"),     \
      TD_SHARED_PLACES

#define TD_ROUTED_DEFAULTS                                                                         \
  .router_sigmoid = true, .norm_topk = true, .rope_interleaved = true, TD_TOKEN_IDS(0, 1)
