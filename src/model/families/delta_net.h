// src/model/families/delta_net.h - what families with gated delta nets (Yang et al., "Gated Delta
// Networks", 2024) and gated attention share.
#pragma once

#include "model/families/family.h"

// The keys of the delta nets, with the defaults of Qwen3-Next.
#define TD_DELTA_KEYS                                                                              \
  TD_KEY("linear_conv_kernel_dim", NULL, delta_taps, 2, TD_MAX_TAPS, 4),                           \
      TD_KEY("linear_key_head_dim", NULL, delta_k_dim, 1, TD_MAX_HEAD_DIM, 128),                   \
      TD_KEY("linear_value_head_dim", NULL, delta_v_dim, 1, TD_MAX_HEAD_DIM, 128),                 \
      TD_KEY("linear_num_key_heads", NULL, delta_k_heads, 1, TD_MAX_HEADS, 16),                    \
      TD_KEY("linear_num_value_heads", NULL, delta_v_heads, 1, TD_MAX_HEADS, 32)

#define TD_KDA_KEYS(heads)                                                                         \
  TD_KEY("linear_num_heads", NULL, delta_v_heads, 1, TD_MAX_HEADS, heads),                         \
      TD_KEY("linear_head_dim", NULL, delta_v_dim, 1, TD_MAX_HEAD_DIM, 128),                       \
      TD_KEY("linear_conv_kernel_dim", NULL, delta_taps, 2, TD_MAX_TAPS, 4)

#define TD_MAX_TAPS 16u

// layer_types, or every full_attention_interval-th layer has attention, and checks of the heads.
td_status td_config_read_delta(const td_config_reader *r);
// The heads of Kimi delta attention: keys of their own (TD_KDA_KEYS), or in linear_attn_config.
td_status td_config_read_kda_heads(const td_config_reader *r);
// Makes these layers delta nets, and checks them.
td_status td_config_set_delta(const td_config_reader *r, const uint64_t *layers);

#define TD_DELTA_PLACES                                                                            \
  TD_MATRIX(CONV, "linear_attn.conv1d.weight", delta_conv, DELTA_QKV, DELTA_TAPS, TD_IF(DELTA)),   \
      TD_MATRIX(F32, "linear_attn.A_log", delta_decay, DELTA_HEADS, ONE, TD_IF(DELTA)),            \
      TD_MATRIX(F32, "linear_attn.dt_bias", delta_bias, DELTA_HEADS, ONE, TD_IF(DELTA)),           \
      TD_VECTOR("linear_attn.norm.weight", delta_norm, DELTA_HEAD, TD_IF(DELTA)),                  \
      TD_MATRIX(WEIGHT, "linear_attn.out_proj.weight", o, MODEL, DELTA_V, TD_IF(DELTA))

// Kimi delta attention, the second names those of transformers. Decays and strengths keep their
// precision.
#define TD_KDA_PLACES                                                                              \
  TD_KDA_COMMON_PLACES,                                                                            \
      TD_RENAMED(ROUTER, "self_attn.f_a_proj.weight", delta_a_in, DELTA_HEAD, MODEL, TD_IF(KDA),   \
                 "self_attn.forget_gate.f_a_proj.weight"),                                         \
      TD_RENAMED(ROUTER, "self_attn.f_b_proj.weight", delta_a, DELTA_V, DELTA_HEAD, TD_IF(KDA),    \
                 "self_attn.forget_gate.f_b_proj.weight"),                                         \
      TD_MATRIX(WEIGHT, "self_attn.g_a_proj.weight", delta_z_in, DELTA_HEAD, MODEL, TD_IF(KDA)),   \
      TD_MATRIX(WEIGHT, "self_attn.g_b_proj.weight", delta_z, DELTA_V, DELTA_HEAD, TD_IF(KDA))
// All but decays and the output's gate, which may also be of full rank.
#define TD_KDA_COMMON_PLACES                                                                       \
  TD_MATRIX(WEIGHT, "self_attn.q_proj.weight", q, DELTA_V, MODEL, TD_IF(KDA)),                     \
      TD_MATRIX(WEIGHT, "self_attn.k_proj.weight", k, DELTA_V, MODEL, TD_IF(KDA)),                 \
      TD_MATRIX(WEIGHT, "self_attn.v_proj.weight", v, DELTA_V, MODEL, TD_IF(KDA)),                 \
      TD_RENAMED(CONV, "self_attn.q_conv1d.weight", delta_conv, DELTA_QKV, DELTA_TAPS, TD_IF(KDA), \
                 "self_attn.conv1d.weight"),                                                       \
      TD_RENAMED(F32, "self_attn.A_log", delta_decay, DELTA_HEADS, ONE, TD_IF(KDA),                \
                 "self_attn.forget_gate.A_log"),                                                   \
      TD_RENAMED(F32, "self_attn.dt_bias", delta_bias, DELTA_V, ONE, TD_IF(KDA),                   \
                 "self_attn.forget_gate.dt_bias"),                                                 \
      TD_MATRIX(ROUTER, "self_attn.b_proj.weight", delta_b, DELTA_HEADS, MODEL, TD_IF(KDA)),       \
      TD_VECTOR("self_attn.o_norm.weight", delta_norm, DELTA_HEAD, TD_IF(KDA)),                    \
      TD_MATRIX(WEIGHT, "self_attn.o_proj.weight", o, MODEL, DELTA_V, TD_IF(KDA))

// Attention whose q_proj has a gate, in layers of the kind.
#define TD_GATED_ATTN_PLACES(kind)                                                                 \
  TD_MATRIX(WEIGHT, "self_attn.q_proj.weight", q, Q_GATED, MODEL, kind),                           \
      TD_MATRIX(WEIGHT, "self_attn.k_proj.weight", k, KV, MODEL, kind),                            \
      TD_MATRIX(WEIGHT, "self_attn.v_proj.weight", v, KV, MODEL, kind),                            \
      TD_MATRIX(WEIGHT, "self_attn.o_proj.weight", o, MODEL, Q, kind),                             \
      TD_VECTOR("self_attn.q_proj.bias", q_bias, Q_GATED, kind | TD_IF(BIAS)),                     \
      TD_VECTOR("self_attn.k_proj.bias", k_bias, KV, kind | TD_IF(BIAS)),                          \
      TD_VECTOR("self_attn.v_proj.bias", v_bias, KV, kind | TD_IF(BIAS)),                          \
      TD_VECTOR("self_attn.o_proj.bias", o_bias, MODEL, kind | TD_IF(BIAS)),                       \
      TD_NORM1("self_attn.q_norm.weight", q_norm, HEAD, kind),                                     \
      TD_NORM1("self_attn.k_norm.weight", k_norm, HEAD, kind)

// Experts and a gated shared expert.
#define TD_GATED_EXPERT_PLACES                                                                     \
  TD_EXPERT_PLACES, TD_MLP_PLACES("mlp.shared_expert", SHARED, TD_IF(MOE)),                        \
      TD_MATRIX(ROUTER, "mlp.shared_expert_gate.weight", shared_gate, ONE, MODEL, TD_IF(MOE))

// Both, and norms of the layer.
#define TD_GATED_PLACES                                                                            \
  TD_NORM1("input_layernorm.weight", attn_norm, MODEL, 0),                                         \
      TD_NORM1("post_attention_layernorm.weight", mlp_norm, MODEL, 0),                             \
      TD_GATED_ATTN_PLACES(TD_IF(GQA)), TD_GATED_EXPERT_PLACES

// The inputs of delta nets, each a matrix.
#define TD_DELTA_INPUT_PLACES                                                                      \
  TD_MATRIX(WEIGHT, "linear_attn.in_proj_qkv.weight", delta_qkv, DELTA_QKV, MODEL, TD_IF(DELTA)),  \
      TD_MATRIX(WEIGHT, "linear_attn.in_proj_z.weight", delta_z, DELTA_V, MODEL, TD_IF(DELTA)),    \
      TD_MATRIX(ROUTER, "linear_attn.in_proj_b.weight", delta_b, DELTA_HEADS, MODEL,               \
                TD_IF(DELTA)),                                                                     \
      TD_MATRIX(ROUTER, "linear_attn.in_proj_a.weight", delta_a, DELTA_HEADS, MODEL, TD_IF(DELTA))

#define TD_DELTA_DEFAULTS                                                                          \
  .attn = TD_ATTN_GQA, .head_dim = 256, .has_attn_gate = true, .qk_norm = TD_QK_NORM_HEAD,         \
  .partial_rotary = 0.25, .n_shared_experts = 1, .norm_topk = true, .bos_id = -1
