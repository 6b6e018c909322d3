// src/base/ops.h - every operator of a device (device/device.h), once. From this list come the
// operators' queue entries, both devices' dispatch and prototypes, and the events of --trace. The
// list is only text: a file that uses a column includes what the column names.
#pragma once

// Name, function (td_op_, td_cpu_op_ and td_cuda_op_<name>), argument struct, and the two numbers
// that a trace shows, over `a`, a pointer to the arguments: unit, value; unit, value. NULL: none.

// td_op_<name> takes the argument struct.
#define TD_OPS_OF_ARGS(X)                                                                          \
  X(EMBED, embed, td_embed_args, "tokens", a->n_tokens, NULL, 0)                                   \
  X(RMSNORM, rmsnorm, td_rmsnorm_args, "tokens", a->n_rows, NULL, 0)                               \
  X(LAYERNORM, layernorm, td_layernorm_args, "tokens", a->n_rows, NULL, 0)                         \
  X(LINEAR, linear, td_linear_op_args, "tokens", a->n_tokens, "bytes", td_linear_bytes(a))         \
  X(ROPE, rope, td_rope_args, "tokens", a->n_tokens, NULL, 0)                                      \
  X(SCALE_ROWS, scale_rows, td_scale_rows_args, "tokens", a->n_tokens, NULL, 0)                    \
  X(KV_STORE, kv_store, td_kv_store_args, "tokens", a->batch.n_tokens, NULL, 0)                    \
  X(ATTN_GQA, attn_gqa, td_attn_gqa_args, "tokens", a->batch.n_tokens, NULL, 0)                    \
  X(ATTN_MLA, attn_mla, td_attn_mla_args, "tokens", a->batch.n_tokens, NULL, 0)                    \
  X(SELECT, select, td_select_args, "tokens", a->batch.n_tokens, NULL, 0)                          \
  X(POOL, pool, td_pool_args, "tokens", a->batch.n_tokens, NULL, 0)                                \
  X(ATTN_POOL, attn_pool, td_attn_pool_args, "tokens", a->batch.n_tokens, NULL, 0)                 \
  X(HYPER_READ, hyper_read, td_hyper_read_args, "tokens", a->n_tokens, NULL, 0)                    \
  X(HYPER_WRITE, hyper_write, td_hyper_write_args, "tokens", a->n_tokens, NULL, 0)                 \
  X(HYPER_MIX, hyper_mix, td_hyper_mix_args, "tokens", a->n_tokens, NULL, 0)                       \
  X(SILU_ROWS, silu_rows, td_silu_rows_args, "tokens", a->n_rows, NULL, 0)                         \
  X(ACTIVATE_ROWS, activate_rows, td_activate_rows_args, "tokens", a->n_rows, NULL, 0)             \
  X(NGRAM_ROWS, ngram_rows, td_ngram_rows_args, "tokens", a->batch.n_tokens, NULL, 0)              \
  X(NGRAM_GATE, ngram_gate, td_ngram_gate_args, "tokens", a->n_tokens, NULL, 0)                    \
  X(NGRAM_CONV, ngram_conv, td_ngram_conv_args, "tokens", a->batch.n_tokens, NULL, 0)              \
  X(DELTA_CONV, delta_conv, td_delta_conv_args, "tokens", a->batch.n_tokens, NULL, 0)              \
  X(DELTA_RULE, delta_rule, td_delta_rule_op_args, "tokens", a->batch.n_tokens, NULL, 0)           \
  X(GATE_ROWS, gate_rows, td_gate_rows_args, "tokens", a->n_tokens, NULL, 0)                       \
  X(TOP_LOGITS, top_logits, td_top_logits_args, "tokens", a->n_rows, NULL, 0)                      \
  X(ROUTER, router, td_router_args, "tokens", a->n_tokens, NULL, 0)                                \
  X(MOE, moe, td_moe_args, "tokens", a->n_tokens, NULL, 0)                                         \
  X(MOE_JOIN, moe_join, td_moe_join_args, "tokens", a->n_tokens, NULL, 0)                          \
  X(POST, post, td_post_args, NULL, 0, "bytes", a->n_bytes)                                        \
  X(SUM_PARTS, sum_parts, td_sum_parts_args, NULL, 0, "elements", a->n)

// td_op_<name>, or several functions named so, make it from their parameters.
#define TD_OPS_OF_PARAMETERS(X)                                                                    \
  X(COPY, copy, td_copy_args, NULL, 0, "bytes", a->n_bytes)                                        \
  X(FILL_ZERO, fill_zero, td_fill_zero_args, NULL, 0, "bytes", a->n_bytes)                         \
  X(ADD, add, td_add_args, NULL, 0, "elements", a->n)                                              \
  X(GATHER_ROWS, gather_rows, td_gather_rows_args, "tokens", a->n_rows, NULL, 0)                   \
  X(SIGNAL, signal, td_signal_args, NULL, 0, NULL, 0)                                              \
  X(AWAIT, await, td_await_args, NULL, 0, NULL, 0)

#define TD_OPS(X)                                                                                  \
  TD_OPS_OF_ARGS(X)                                                                                \
  TD_OPS_OF_PARAMETERS(X)
