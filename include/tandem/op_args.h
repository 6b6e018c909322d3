// include/tandem/op_args.h - arguments of operators (device/device.h) that are one kernel on a GPU,
// which gets the same struct. Those of operators that take several kernels are in device/device.h.
//
// A GPU's device puts the addresses of its copies in place of those in host memory, and sets what
// is marked as its own: callers leave that zero. There is no padding, which the compiler checks: a
// field named unused is where it would be. bool stands for uint32_t that are 0 or 1.
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "tandem/types.h"

#if defined(__GNUC__) && !defined(__CUDACC__)
#pragma GCC diagnostic push
#pragma GCC diagnostic error "-Wpadded"
#endif

#ifdef __cplusplus
typedef uint16_t td_act; // BF16
typedef uint32_t td_signal_word;
#else
typedef void td_act; // an activation, of td_dev_act_dtype
typedef _Atomic uint32_t td_signal_word;
#endif

// ---- the batch and its pages --------------------------------------------------------------------

// The sequences of one step. Arrays are in device memory, i32.
// Token t of the step belongs to sequence seq[t] and stands at position[t] in it. Sequence s owns
// the tokens [q_begin[s], q_begin[s+1]), consecutive in position; what it attends to is every
// position up to the token's own. Position p of sequence s lies in page
// page_table[s * max_pages + p / page_tokens] at offset p % page_tokens.
typedef struct {
  const int32_t *seq;        // [n_tokens]
  const int32_t *position;   // [n_tokens]
  const int32_t *q_begin;    // [n_seqs + 1]
  const int32_t *page_table; // [n_seqs][max_pages]
  uint32_t n_tokens, n_seqs, max_pages, page_tokens;
  uint32_t max_keys; // the largest context of any token; 0: unknown, bounded by max_pages
  uint32_t unused;
  int32_t *fault; // a GPU's own
  // Host copies of q_begin and position, read while an operator is queued. NULL: not available.
  // With them, a GPU computes all prompts of a batch in one launch.
  const int32_t *host_q_begin, *host_position;
} td_batch_view;

// One layer's KV pages: page i begins at pages + i * page_bytes. Elements have the activations'
// dtype, or are f16: rounded to nearest even and saturated at the largest finite value. In
// TD_F8E4M3 pages are as tandem/kv_f8.h says, with td_gqa_rows or td_mla_rows.
//   GQA: K [n_kv_heads][page_tokens][head_dim], then V of the same shape
//   MLA: [page_tokens][kv_lora_rank + rope_dim], latent after its norm, key part after RoPE
typedef struct {
  char *pages;
  size_t page_bytes;
  td_dtype dtype;              // see td_dev_kv_dtype
  uint32_t n_codes, scales_at; // a GPU's own, with TD_F8E4M3: codes of a row; where scales begin
  uint32_t n_bf16;             // td_kv_rows, with TD_F8E4M3
} td_kv_view;

// Stores n_heads rows of head_dim elements a token: keys and, unless NULL, values. An entry of MLA,
// or an indexer's key, is one head without a value.
typedef struct {
  td_batch_view batch;
  td_kv_view kv;
  const td_act *k, *v;       // token t, head h at k + t * stride + h * head_dim
  size_t k_stride, v_stride; // elements
  uint32_t n_heads, head_dim;
} td_kv_store_args;

// ---- copies and signals -------------------------------------------------------------------------

typedef struct {
  void *dst;
  const void *src;
  size_t n_bytes;
  uint32_t is_direct, unused; // bool: see td_op_copy_direct
} td_copy_args;

typedef struct {
  void *dst;
  size_t n_bytes;
} td_fill_zero_args;

typedef struct {
  td_act *x;
  const void *y;
  size_t n;
  uint32_t y_f32; // bool
  float factor;   // on the CPU only: the sum is multiplied by it; 0: it is not
} td_add_args;

typedef struct {
  td_act *out;
  const td_act *x;
  const int32_t *rows;
  uint32_t n_rows, dim;
  int32_t *fault; // a GPU's own
} td_gather_rows_args;

typedef struct {
  td_signal_word *signal;
  const uint32_t *value;
} td_signal_args;

// most_ns: a GPU waits no longer, which is a fault, as being canceled is; later waits that see such
// a fault return at once.
typedef struct {
  const td_signal_word *signal;
  const uint32_t *value;
  const td_signal_word *canceled; // NULL: it cannot be canceled
  uint64_t most_ns;               // a GPU's own
  int32_t *fault;                 // a GPU's own
} td_await_args;

// Copies and then sets *signal to *value (release), by one kernel: a short message to another
// device, of some hundred KB at most. dst and signal are in an inbox or in memory of
// td_dev_alloc_host; src and value in memory the stream's device can read. A failed stream still
// signals.
typedef struct {
  void *dst;
  const void *src;
  size_t n_bytes; // may be 0
  td_signal_word *signal;
  const uint32_t *value;
} td_post_args;

// ---- rows ---------------------------------------------------------------------------------------

// out[t][:] = table[ids[t]][:], times factor unless that is 0 (on the CPU only). ids i32
// [n_tokens], each in [0, table.rows).
typedef struct {
  td_weight table; // [n_vocab][dim]
  const int32_t *ids;
  td_act *out; // [n_tokens][table.cols]
  uint32_t n_tokens;
  float factor;
  int32_t *fault; // a GPU's own
} td_embed_args;

// out[i][:] = x[i][:] / sqrt(mean(x[i]^2) + eps) * w[:] over n_rows rows of dim elements. w.data
// NULL: no weights. With residual: residual[i][:] += x[i][:] first, and the sum is normed (x is
// unchanged); with `more`, x[i][:] + more[i][:] is added, bit for bit as after td_op_add(x, more).
// x_stride and out_stride are in elements; out may equal x. also: n_rows further rows, with eps and
// without a residual, with the same bits as alone; a GPU norms both in one launch.
typedef struct {
  const td_act *x; // NULL: none
  td_vec w;        // [dim]
  td_act *out;
  size_t x_stride, out_stride;
  uint32_t dim, unused;
} td_norm_also;

typedef struct {
  const td_act *x;
  const td_act *more; // [n_rows][dim] or NULL; may be in memory of td_dev_alloc_host
  td_act *residual;   // [n_rows][dim] or NULL
  td_vec w;           // [dim]
  td_act *out;
  size_t x_stride, out_stride;
  uint32_t n_rows, dim;
  float eps;
  uint32_t unused;
  td_norm_also also;
} td_rmsnorm_args;

// The arguments for `also` alone.
TD_ANYWHERE static inline td_rmsnorm_args td_rmsnorm_also(const td_rmsnorm_args *a) {
  td_rmsnorm_args out = *a;
  out.x = a->also.x;
  out.more = out.residual = NULL;
  out.w = a->also.w;
  out.out = a->also.out;
  out.x_stride = a->also.x_stride;
  out.out_stride = a->also.out_stride;
  out.dim = a->also.dim;
  out.also.x = NULL;
  return out;
}

// x[i][:] = (x[i][:] - mean(x[i])) / sqrt(variance(x[i]) + eps) * w[:] + b[:] over n_rows rows of
// dim elements.
typedef struct {
  void *x;
  td_vec w, b;   // [dim]
  size_t stride; // elements
  uint32_t n_rows, dim;
  float eps;
  uint32_t is_f32; // bool: x is, whatever the device's activations are
} td_layernorm_args;

// out[i] = parts[0][i] + parts[1][i] + ... in this order, in f32, over n elements. A part is BF16,
// or f32 and then rounded to BF16 before it is added, so that the sum does not depend on which
// parts are f32. With a single part: a conversion. Parts and out may be in td_dev_alloc_host
// memory.
enum { TD_MAX_SUM_PARTS = 8 };
typedef struct {
  const void *parts[TD_MAX_SUM_PARTS]; // [n_parts], [n] elements each
  void *out;                           // [n], f32 or BF16, not one of the parts
  size_t n;
  uint32_t n_parts, f32_parts; // f32_parts: bit p is set if part p is f32
  uint32_t out_f32, unused;    // bool
} td_sum_parts_args;

// Rotates rot_dim elements of each head, in place: token t, head h at
// x + t * token_stride + h * head_stride (elements). Pairs are (i, i + rot_dim/2), or (2i, 2i + 1)
// when interleaved. cos_sin f32 [max_position][rot_dim/2][2], scaling already inside. backwards: by
// the negative angles. also: heads elsewhere, by the same angles (keys).
typedef struct {
  td_act *x; // NULL: none
  size_t token_stride, head_stride;
  uint32_t n_heads, unused;
} td_rope_heads;

typedef struct {
  td_rope_heads heads, also;
  const float *cos_sin;
  const int32_t *position; // i32 [n_tokens]
  uint32_t n_tokens, rot_dim;
  uint32_t interleaved, backwards; // bool
  int32_t *fault;                  // a GPU's own
} td_rope_args;

// x[t][:] *= factor[position[t]], dim elements each.
typedef struct {
  td_act *x;               // [n_tokens][dim]
  const float *factor;     // f32 [max_position]
  const int32_t *position; // i32 [n_tokens]
  uint32_t n_tokens, dim;
  int32_t *fault; // a GPU's own
} td_scale_rows_args;

// ---- gated delta nets ---------------------------------------------------------------------------

// Heads of keys (and queries) and of values; n_v_heads is a multiple of n_k_heads, and as many
// value heads in a row share a key head; is_tiled: value head h has key head h % n_k_heads. n_taps:
// length of the causal convolution, from 2 to TD_DELTA_MAX_TAPS. by_channel: a value head has a
// decay for each of its k_dim rows of the state, not one for all.
enum { TD_DELTA_MAX_TAPS = 16 };
typedef struct {
  uint32_t n_k_heads, n_v_heads, k_dim, v_dim, n_taps;
  uint32_t is_tiled, by_channel; // bool
} td_delta_shape;

// Decays of a value head.
TD_ANYWHERE static inline uint32_t td_delta_decays(const td_delta_shape *s) {
  return s->by_channel ? s->k_dim : 1;
}

// The channels of the convolution: queries, keys, values.
static inline uint32_t td_delta_channels(const td_delta_shape *s) {
  return 2 * s->n_k_heads * s->k_dim + s->n_v_heads * s->v_dim;
}

// A layer's recurrent state, f32: the convolution's last n_taps - 1 inputs [n_taps - 1][channels],
// then from td_delta_conv_floats on a matrix for each value head, in tiles of TD_DELTA_COLUMNS
// columns: [n_v_heads][tiles][k_dim][TD_DELTA_COLUMNS].
enum { TD_DELTA_TILE = 32 };
static inline size_t td_delta_conv_floats(const td_delta_shape *s) {
  return ((size_t)(s->n_taps - 1) * td_delta_channels(s) + 15) / 16 * 16;
}
static inline uint32_t td_delta_tiles(const td_delta_shape *s) {
  return (s->v_dim + TD_DELTA_TILE - 1) / TD_DELTA_TILE;
}
static inline size_t td_delta_state_bytes(const td_delta_shape *s) {
  const size_t of_head = (size_t)td_delta_tiles(s) * s->k_dim * TD_DELTA_TILE;
  return (td_delta_conv_floats(s) + s->n_v_heads * of_head) * sizeof(float);
}

// The states of a step's sequences are in their KV pages: the state after n positions is in the
// page of position n - 1. An operator reads the one before a sequence's first token (zeros at
// position 0) and writes that after its last one, and at the end of each page it passes. So a full
// page keeps the state at its end.
//
// Where a state may have to be rolled back, the states between tokens are also kept, in the
// device's memory (td_state_trail): all of a delta net's state, only the open entries of a pooled
// one.

// The causal convolution and SiLU of queries, keys and values, then queries and keys divided by
// their norms (queries by sqrt(k_dim), too), and of each value head decay
// exp(-exp(decay) * softplus(a + bias)) and strength sigmoid(b). bound < 0, with by_channel: decays
// are exp(bound * sigmoid(exp(decay) * (a + bias))). q, k: groups of k_dim elements; v, a, b: of
// the value heads that share a key head. a, bias: td_delta_decays elements of a value head.
typedef struct {
  td_batch_view batch;
  td_kv_view state; // f32
  td_delta_shape shape;
  float bound; // 0: none
  td_state_trail trail;
  const td_act *x; // [n_tokens][x_stride]
  size_t x_stride; // elements
  td_row_part q, k, v, a, b;
  const float *conv;         // f32 [n_taps][channels] in host memory, as the next
  const float *decay, *bias; // f32 [n_v_heads], [n_v_heads][n_decays]
  td_act *out;               // [n_tokens][channels]
  float *gates;              // f32 [n_tokens][n_v_heads][n_decays + 1]: decays, strength
  uint32_t channels, unused; // a GPU's own
} td_delta_conv_args;

// The gated delta rule (tandem/kernels.h: td_delta_rule_args) of every value head, token by token:
// a token's result is the same however its sequence is cut into steps. A GPU may compute prompts in
// chunks that begin at multiples of 32 positions: then steps that begin there give the same result,
// and other steps one that differs by rounding. qkv, gates: results of td_op_delta_conv. prompt:
// all tokens belong to prompts, see n_prompt in td_linear_op_args.
typedef struct {
  td_batch_view batch;
  td_kv_view state; // f32
  td_delta_shape shape;
  uint32_t prompt; // bool
  td_state_trail trail;
  const td_act *qkv;
  const float *gates;
  td_act *out; // [n_tokens][n_v_heads][v_dim]
  // A GPU's own: where the heads' matrices begin in a state, and products of chunks.
  size_t rule_at;
  td_act *products;
  uint32_t channels, unused;
} td_delta_rule_op_args;

// ---- selection ----------------------------------------------------------------------------------

// Selects the positions that each token attends to: of the positions up to its own, the top_k with
// the largest scores, in rising order; of equal scores the lower position comes first. A token that
// sees top_k keys or fewer sees all of them, and its row is not written. With key j at the begin of
// its page in kv, [page_tokens][dim]:
//   score[j] = sum_h weights[h] * max(0, q[h] . key[j])
// Positive factors common to all scores are left out, as they do not change the order. Sums are
// f32, whatever the activations are, and the same for tokens of prompts and of decode. group > 0:
// keys are entries of td_op_pool, f32, in place of positions; a token sees those of the groups that
// end with it or before.
//
// block > 0: selects the blocks of so many positions that each head of a token attends to: its own
// block and the n_local - 1 before, and those whose best keys have the largest scores
// q[h] . key[j], top_k in all; a token that sees top_k blocks or fewer sees all of them.
typedef struct {
  td_batch_view batch;
  td_kv_view kv;
  const td_act *q;      // [n_tokens][n_heads][dim]
  const float *weights; // f32 [n_tokens][n_heads], not with blocks; NULL: all 1
  int32_t *selected;    // [n_tokens][top_k] or, with blocks, [n_tokens][n_heads][top_k]
  uint32_t n_heads, dim, top_k, group, block, n_local;
  // A GPU's own: scores [n_tokens][stride] or, with blocks, [n_tokens][n_heads][stride]; stride is
  // at least the largest number of keys, or blocks, of any token.
  float *scores;
  size_t stride;
  uint32_t page_entries;        // of a page, with groups
  uint32_t tile_rows, run_keys; // of a thread block, with blocks
  uint32_t in_runs;             // bool: how the kernel loads
} td_select_args;

// ---- attention over a window and pooled keys ----------------------------------------------------

// Layers whose state in a KV page (see above, f32) is a ring of the last `ring` keys, entry
// position % ring, and entries pooled of `group` positions each, a power of two. Entry i is in
// the page of the last of its positions, at i % td_pool_entries. A ring that is longer than the
// window still has its keys when up to ring - window of the last tokens are taken back; entries
// that end with those are not seen, and are computed again.
static inline uint32_t td_pool_entries(uint32_t page_tokens, uint32_t group) {
  return page_tokens > group ? page_tokens / group : 1;
}

// Channel d of entry i is the mean of x over the group's positions, weighted by the softmax of
// gate + bias; gate and bias NULL: weights are equal. overlaps: rows of x, gate and bias have two
// halves of dim elements; the mean is of the first halves of the group before (if there is one) and
// the second halves of its own. Then an RMS norm (norm.n 0: none), and its last rot_dim elements
// are rotated (interleaved) as at the group's first position; rotates_first: its first rot_dim, not
// interleaved. What is open between steps is kept at open_at in the page's state: running maxima,
// sums of weights and weighted sums, f32 [overlaps + 1][3][dim], the entry that is filled first.
typedef struct {
  td_batch_view batch;
  td_kv_view state;
  td_state_trail trail;
  size_t trail_at; // elements of a slot: where these open entries are
  const float *x, *gate;
  size_t stride;     // elements, of x and gate
  const float *bias; // f32 [group][dim or 2 * dim] in host memory
  td_vec norm;
  const float *cos_sin;     // see td_rope_args
  size_t open_at, entry_at; // elements of the state
  float eps;
  uint32_t dim, rot_dim, group;
  uint32_t overlaps, rotates_first; // bool
  // A GPU's own: entries of a page, and scratch for what stays open in the page of each sequence's
  // first token.
  uint32_t page_entries, unused;
  float *open; // [n_seqs][overlaps + 1][3][dim]
} td_pool_args;

// ---- hyper-connections --------------------------------------------------------------------------

// A residual of n_streams rows a token (Xie et al., "mHC", 2026). Of each token's scores, f32
// [(2 + n_streams) * n_streams] products with x, times 1 / sqrt(mean(x^2) + norm_eps) over all
// streams and scale, plus base: the factors `pre` of the streams in out = sum pre[k] x[k]; `post`,
// of a block's output in each stream; and `comb`, how streams mix, made doubly stochastic in
// n_rounds of Sinkhorn's. They replace the scores. out is normed with w.
// head: scores are n_streams alone. scores NULL: out is the norm of the streams' mean.
enum { TD_MAX_STREAMS = 16 };
typedef struct {
  const td_act *x;           // [n_tokens][n_streams][dim]
  float *scores;             // [n_tokens][td_hyper_scores, or n_streams]
  const float *base, *scale; // f32 [scores], f32 [3 or 1], in host memory
  td_vec w;                  // [dim]
  td_act *out;               // [n_tokens][dim]
  uint32_t n_tokens, n_streams, dim, n_rounds;
  float eps, norm_eps;
  uint32_t head;     // bool
  uint32_t n_scores; // a GPU's own
} td_hyper_read_args;
static inline uint32_t td_hyper_scores(uint32_t n_streams) {
  return (2 + n_streams) * n_streams;
}

// x[k] = post[k] * y + sum_j comb[j][k] * x[j], with the factors that td_op_hyper_read left in
// scores; x[k] = y if that is NULL. adds: x[k] += scores[k] * y, with those of td_op_hyper_mix.
typedef struct {
  td_act *x;           // [n_tokens][n_streams][dim]
  const td_act *y;     // [n_tokens][dim]
  const float *scores; // f32 [n_tokens][td_hyper_scores, or n_streams] or NULL
  uint32_t n_tokens, n_streams, dim;
  uint32_t adds; // bool
} td_hyper_write_args;

// out = the mean over streams of sigmoid(gate[k]) * x[k], by element; scores[k] = 2 *
// sigmoid(scores[k] / n_streams) become the factors of a block's output.
typedef struct {
  const td_act *x, *gate; // [n_tokens][n_streams][dim]
  float *scores;          // f32 [n_tokens][n_streams] or NULL
  td_act *out;            // [n_tokens][dim]
  uint32_t n_tokens, n_streams, dim, unused;
} td_hyper_mix_args;

// x[i][:] = silu(factor * x[i][:]).
typedef struct {
  td_act *x; // [n_rows][dim]
  uint32_t n_rows, dim;
  float factor;
  uint32_t unused;
} td_silu_rows_args;

// x[k] = sigmoid(g) * value, g = sign(s) sqrt(max(|s|, 1e-6)), s = x[k] . query[k] / sqrt(dim).
typedef struct {
  td_act *x;           // [n_tokens][n_streams][dim]: keys, then what is added to the streams
  const td_act *query; // [n_tokens][n_streams][dim]
  const td_act *value; // [n_tokens][dim]
  uint32_t n_tokens, n_streams, dim, unused;
} td_ngram_gate_args;

// x[t] += y[t] + silu(sum_j conv[j] * in[t - (n_taps - 1 - j) * step]), channel by channel, zeros
// in front of the sequence. A state has the last (n_taps - 1) * step rows of `in`, oldest first.
typedef struct {
  td_batch_view batch;
  td_kv_view state;
  td_state_trail trail;
  size_t rows_at;    // elements, of the state and of a slot
  const float *conv; // f32 [n_taps][channels] in host memory
  const td_act *in, *y;
  td_act *x; // [n_tokens][channels]
  uint32_t channels, n_taps, step, unused;
} td_ngram_conv_args;
static inline uint32_t td_ngram_past(uint32_t n_taps, uint32_t step) { // rows of the state
  return (n_taps - 1) * step;
}

// x[t][g][:] *= sigmoid(gate), or silu(gate), over n_groups groups of dim elements; gates of group
// g begin at gate + t * gate_stride + part.offset + g * part.stride. scalar: one f32 gate a group.
typedef struct {
  td_act *x; // [n_tokens][n_groups][dim]
  const void *gate;
  size_t gate_stride; // elements
  td_row_part part;
  uint32_t n_tokens, n_groups, dim;
  uint32_t silu, scalar, unused; // bool
} td_gate_rows_args;

// The top logits of each row and the row's sums, from which most draws can be made without copying
// all logits to the host.
typedef struct {
  const float *logits;      // f32 [n_rows][n_vocab]
  const float *temperature; // f32 [n_rows], for sum_warm; 0 counts as 1
  td_top_logits *out;       // [n_rows]
  uint32_t n_rows, n_vocab;
  // A GPU's own: the best of slices of a row, and their sums.
  uint32_t n_slices, unused;
  uint64_t *part;   // [n_rows][n_slices][TD_TOP_LOGITS]
  float *part_sums; // [n_rows][n_slices][2]
} td_top_logits_args;

typedef enum { TD_ROUTER_SOFTMAX, TD_ROUTER_SIGMOID, TD_ROUTER_SOFTPLUS } td_router_kind;

// Scores from f32 logits, then top_k experts a token, ties to the lower index.
//   SOFTMAX: s = softmax(logits); selection by s + bias, weights are the plain s.
//   SIGMOID: s = sigmoid(logits), else alike.
//   SOFTPLUS: s = sqrt(ln(1 + exp(logits))), else alike. With a table, token t's experts are
//   table[tokens[t]], in its order.
// Groups of n_experts / n_groups are ranked by the sum of their two best (DeepSeek-V3), the best
// topk_groups stay; then the top_k largest are taken.
// norm_topk: weights are divided by their sum (+ 1e-20, but for SOFTMAX), or by min_sum if that is
// more. All are multiplied by scaling and, on the CPU only, by the expert's own factor.
typedef struct {
  const float *logits; // f32 [n_tokens][n_experts]
  const float *bias;   // f32 [n_experts] or NULL
  int32_t *ids;        // [n_tokens][top_k], by falling selection score
  float *weights;      // f32 [n_tokens][top_k]
  // i32 [n_vocab][top_k] in host memory, ids in [0, n_experts); or NULL. tokens i32 [n_tokens]
  const int32_t *table, *tokens;
  td_router_kind kind;
  uint32_t n_tokens, n_experts, top_k, n_groups, topk_groups, n_vocab; // n_vocab: with a table
  uint32_t norm_topk;                                                  // bool
  float scaling, min_sum;
  const float *expert_scale; // f32 [n_experts] in host memory or NULL
  int32_t *fault;            // a GPU's own
} td_router_args;

// out[t] = sum_j weights[t][j] * parts[t][j] in the order of j, rounded once, where parts are
// `here` for experts with a slot, `peer` for those with a slot of the peer, and `there` for the
// others: results by_pair of td_op_moe on two or three devices. Which device computed a pair does
// not change the order. ids, weights, there and peer may be in memory of td_dev_alloc_host.
typedef struct {
  const float *here, *there; // [n_tokens][top_k][dim]
  const float *peer;         // [n_tokens][top_k][dim], or NULL
  const int32_t *slots;      // i32 [n_experts], device memory
  const int32_t *peer_slots; // i32 [n_experts]; NULL without peer
  const int32_t *ids;        // [n_tokens][top_k], in [0, n_experts)
  const float *weights;      // f32 [n_tokens][top_k]
  td_act *out;               // [n_tokens][dim]
  uint32_t n_tokens, n_experts, top_k, dim;
  uint32_t is_bf16; // out on a CPU: of BF16
  uint32_t unused;
  int32_t *fault; // a GPU's own
} td_moe_join_args;

#if defined(__GNUC__) && !defined(__CUDACC__)
#pragma GCC diagnostic pop
#endif
