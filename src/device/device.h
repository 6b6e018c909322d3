// src/device/device.h - the seam between what is computed and where.
// A device has memory, streams (in-order queues that run beside one another), events (points in a
// stream another stream or the host can wait for) and the operators below. Nothing above this
// header knows which device runs.
//
// Weights (td_weight, td_vec, the router's bias) are in host memory. A device with memory of its
// own copies them when they are first used, and finds them again by their address: they must not
// change until td_dev_close.
//
// Operators are enqueued and return at once. Their argument structs are copied; what the pointers
// in them reach must live until the operator has run. Activations have the dtype td_dev_act_dtype
// tells (f32 on the CPU, BF16 with CUDA), dense row-major, one row a token, unless a stride is
// given. A failure in a stream is sticky: later operators of it are skipped and td_stream_sync
// reports it.
#ifndef TD_DEVICE_DEVICE_H
#define TD_DEVICE_DEVICE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "tandem/types.h"

typedef struct td_dev td_dev;
typedef struct td_stream td_stream;
typedef struct td_event td_event;

typedef struct {
  const char *kind;           // "cpu"; "cuda": a GPU; "auto": that if it can be used, or the CPU
  unsigned index;             // which GPU, from 0
  unsigned n_threads;         // CPU: members of the thread pool; 0: one for each CPU
  td_activations activations; // CPU; holds for all devices of the process
  bool cpus_from_end;     // CPU: its first threads have the last CPUs; another device has the first
  size_t need_bytes;      // weights that will be used: memory of the device's own must hold them
  bool ends_with_process; // td_dev_close leaves it to the kernel to unpin memory, which takes long
} td_dev_opts;

// On success the caller owns *out; on error *out is NULL. TD_EUNSUPPORTED: no such device here.
// TD_ENOMEM: need_bytes are not free. auto goes on with the CPU then, and says why in the log.
td_status td_dev_open(td_dev **out, const td_dev_opts *opts, td_err *err);
void td_dev_close(td_dev *dev); // after its streams, events and memory
const char *td_dev_name(const td_dev *dev);
td_dtype td_dev_act_dtype(const td_dev *dev);
// The NUMA node it is next to, by the kernel's number; -1: none in particular.
int td_dev_node(const td_dev *dev);
// What KV pages have where TD_F32 is asked for: the activations' dtype, for those are what is
// stored.
td_dtype td_dev_kv_dtype(const td_dev *dev, td_dtype asked);
// CPU: *n_threads members of the pool work (at most all; 0: all), as it says when a parallel part
// of an operator begins, and the others sleep. Results do not depend on it. Borrowed; may change at
// any time.
void td_dev_set_thread_limit(td_dev *dev, const _Atomic uint32_t *n_threads);
// *pulse grows while operators run, in the middle of long ones, too, on the CPU, and as they are
// queued on a GPU, which takes no more than some. Borrowed; given before the first operator.
void td_dev_set_progress_counter(td_dev *dev, _Atomic uint32_t *pulse);

// Device memory, 64-byte aligned, not zeroed. *out is NULL on error.
td_status td_dev_alloc(td_dev *dev, void **out, size_t n_bytes, td_err *err);
void td_dev_free(td_dev *dev, void *ptr);
// Host memory likewise, from which and to which the device copies as fast as it can, and where
// signals may be; td_dev_free_host ends it.
td_status td_dev_alloc_host(td_dev *dev, void **out, size_t n_bytes, td_err *err);
void td_dev_free_host(td_dev *dev, void *ptr);
// Bytes free now in the device's own memory; 0: it has none and works in the host's.
size_t td_dev_free_vram_bytes(td_dev *dev);

// Whether td_op_moe takes a copy of this matrix in the device's memory, made by td_op_copy: data,
// scales and zero points each from a multiple of 256 bytes on.
bool td_dev_supports_device_weights(const td_dev *dev, const td_weight *w);

// A mapping that holds weights until td_dev_close, read-only: a device that copies them does so
// faster where it can register it, and says in the log where it cannot. That takes a second for
// some GiB: a thread of the device's own does it, in pieces, by rising address. Once a device.
void td_dev_pin(td_dev *dev, const void *host, size_t n_bytes);
// Whether some of this memory is yet to be registered, and will be, so that copies from it are
// slower than they will be. The pieces it is in come next.
bool td_dev_is_pinning(td_dev *dev, const void *host, size_t n_bytes);
void td_dev_stop_pinning(td_dev *dev); // what is not registered yet will not be
void td_dev_wait_pinned(td_dev *dev, const void *host,
                        size_t n_bytes); // until that is no longer so

td_status td_stream_open(td_stream **out, td_dev *dev, td_err *err);
void td_stream_close(td_stream *stream); // waits for what is queued
// Waits until all that is queued has run. Returns the stream's first failure.
td_status td_stream_sync(td_stream *stream, td_err *err);

// What tells pieces of work stride, field by field. What a field means is the caller's.
typedef struct {
  uint32_t n_tokens, n_rows, n_microbatches, max_keys;
  uint32_t memory; // another number when what the work points to has moved
} td_work_key;

// Calls enqueue, which queues operators on the stream; when it has done so under this key before, a
// device may queue what it did then instead. So the key stands for their arguments and for what
// memory they point to; what lies in that memory may change, but in weights.
void td_stream_run(td_stream *stream, const td_work_key *key, void (*enqueue)(void *ctx),
                   void *ctx);

td_status td_event_open(td_event **out, td_dev *dev, td_err *err);
void td_event_close(td_event *event);
// The event becomes pending now and done when the stream gets here.
void td_event_record(td_event *event, td_stream *stream);
// Work queued on stream after this call starts when the event, as last recorded, is done. An event
// never recorded counts as done. The event may be another device's, which must stay open until the
// stream has got past it; where that is of another kind, the caller waits here.
void td_stream_wait(td_stream *stream, td_event *event);
void td_event_sync(td_event *event); // the host waits

// Between host and device or within the device; host memory must stay put until it has run.
void td_op_copy(td_stream *stream, void *dst, const void *src, size_t n_bytes);
void td_op_fill_zero(td_stream *stream, void *dst, size_t n_bytes);

// Signals: numbers in memory of td_dev_alloc_host, by which streams of two devices wait for one
// another in the middle of what is queued, as often as it is run. *value is in the stream's memory.
// td_op_signal: *signal becomes *value, and who has seen it sees what the stream has done before. A
// stream that has failed does so, too, if its device still works at all.
void td_op_signal(td_stream *stream, _Atomic uint32_t *signal, const uint32_t *value);
// What follows is done when *signal is *value; who gives it must not wait for anything behind this.
void td_op_await(td_stream *stream, _Atomic uint32_t *signal, const uint32_t *value);
// Operators that may be queued on a stream while it waits, without its caller waiting, too.
enum { TD_STREAM_DEPTH = 1024 };

// out[t][:] = table[ids[t]][:]. ids i32 [n_tokens], each in [0, table->rows).
typedef struct {
  const td_weight *table; // [n_vocab][dim]
  const int32_t *ids;
  void *out; // [n_tokens][table->cols]
  uint32_t n_tokens;
} td_embed_args;
void td_op_embed(td_stream *stream, const td_embed_args *args);

// out[i][:] = x[i][:] / sqrt(mean(x[i]^2) + eps) * w[:] over n_rows rows of dim elements. With
// residual, residual[i][:] += x[i][:] first and the sum is what is normed (then x is left alone).
// x_stride and out_stride are in elements; out may be x.
typedef struct {
  const void *x;
  void *residual; // [n_rows][dim] or NULL
  td_vec w;       // [dim]
  void *out;
  size_t x_stride, out_stride;
  uint32_t n_rows, dim;
  float eps;
} td_rmsnorm_args;
void td_op_rmsnorm(td_stream *stream, const td_rmsnorm_args *args);

// y[t] = W x[t] (+ bias). bias.data may be NULL. out_f32: y is f32 whatever the activations are
// (router and lm_head). exact: x is used as it is, whatever td_activations says (router). The last
// n_prompt tokens are a prompt's, which a device may compute in a way that is quick for many: said,
// not guessed from n_tokens, so that results do not depend on how a prompt is cut.
typedef struct {
  const td_weight *w;
  td_vec bias; // [w->rows]
  const void *x;
  void *y;
  size_t x_stride, y_stride; // elements
  uint32_t n_tokens, n_prompt;
  bool out_f32, exact;
} td_linear_op_args;
void td_op_linear(td_stream *stream, const td_linear_op_args *args);

// x[i] += y[i] over n elements.
void td_op_add(td_stream *stream, void *x, const void *y, size_t n);
void td_op_add_f32(td_stream *stream, void *x, const float *y, size_t n); // whatever x is

// out[i][:] = x[rows[i]][:], dim elements each. rows i32 [n_rows].
void td_op_gather_rows(td_stream *stream, void *out, const void *x, const int32_t *rows,
                       uint32_t n_rows, uint32_t dim);

// Rotates rot_dim elements of each head, in place: token t, head h at
// x + t * token_stride + h * head_stride (elements). Pairs are (i, i + rot_dim/2), or (2i, 2i + 1)
// when interleaved. cos_sin f32 [max_position][rot_dim/2][2], scaling already inside.
typedef struct {
  void *x;
  const float *cos_sin;
  const int32_t *position; // i32 [n_tokens]
  size_t token_stride, head_stride;
  uint32_t n_tokens, n_heads, rot_dim;
  bool interleaved;
} td_rope_args;
void td_op_rope(td_stream *stream, const td_rope_args *args);

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
  uint32_t max_keys; // no token attends to more positions than these; 0: max_pages tell
  // q_begin and position in host memory, as they are above, read while an operator is queued. NULL:
  // not given; with them, a GPU computes all prompts of a batch at once.
  const int32_t *host_q_begin, *host_position;
} td_batch_view;

// One layer's KV pages: page i begins at pages + i * page_bytes. Elements have the activations'
// dtype, or are f16: rounded to nearest even and saturated at the largest finite value.
//   GQA: K [n_kv_heads][page_tokens][head_dim], then V likewise
//   MLA: [page_tokens][kv_lora_rank + rope_dim], latent after its norm, key part after RoPE
typedef struct {
  void *pages;
  size_t page_bytes;
  td_dtype dtype; // of td_dev_kv_dtype
} td_kv_view;

typedef struct {
  td_batch_view batch;
  td_kv_view kv;
  const void *k, *v;         // token t, head h at k + t * stride + h * head_dim
  size_t k_stride, v_stride; // elements
  uint32_t n_kv_heads, head_dim;
} td_kv_store_gqa_args;
void td_op_kv_store_gqa(td_stream *stream, const td_kv_store_gqa_args *args);

typedef struct {
  td_batch_view batch;
  td_kv_view kv;
  const void *entry; // [n_tokens][entry_dim], entry_dim = kv_lora_rank + rope_dim
  uint32_t entry_dim;
} td_kv_store_mla_args;
void td_op_kv_store_mla(td_stream *stream, const td_kv_store_mla_args *args);

// Causal attention over the cached pages (this step's keys are stored before). Softmax in f32.
// prompt: all tokens are a prompt's, as n_prompt in td_linear_op_args.
typedef struct {
  td_batch_view batch;
  td_kv_view kv;
  const void *q; // [n_tokens][n_heads][head_dim]
  void *out;     // [n_tokens][n_heads][head_dim]
  uint32_t n_heads, n_kv_heads, head_dim;
  float scale;
  bool prompt;
} td_attn_gqa_args;
void td_op_attn_gqa(td_stream *stream, const td_attn_gqa_args *args);

// Multi-head latent attention. kv_b [n_heads * (nope_dim + v_dim)][kv_lora_rank], a head's nope
// rows first. absorbed: q_nope is taken through kv_b's key rows and scores are computed on the
// latents (cheap for few queries); otherwise keys and values are expanded from the latents block
// by block (cheap for many). Both give the same result up to rounding.
typedef struct {
  td_batch_view batch;
  td_kv_view kv;
  const void *q; // [n_tokens][n_heads][nope_dim + rope_dim]
  const td_weight *kv_b;
  void *out; // [n_tokens][n_heads][v_dim]
  uint32_t n_heads, nope_dim, rope_dim, v_dim, kv_lora_rank;
  float scale;
  bool absorbed;
} td_attn_mla_args;
void td_op_attn_mla(td_stream *stream, const td_attn_mla_args *args);

// The best of each row and its sums, where a draw needs no more: all of them need not reach the
// host.
typedef struct {
  const float *logits;      // f32 [n_rows][n_vocab]
  const float *temperature; // f32 [n_rows], of sum_warm; 0 counts as 1
  td_top_logits *out;       // [n_rows]
  uint32_t n_rows, n_vocab;
} td_top_logits_args;
void td_op_top_logits(td_stream *stream, const td_top_logits_args *args);

typedef enum { TD_ROUTER_SOFTMAX, TD_ROUTER_SIGMOID } td_router_kind;

// Scores from f32 logits, then top_k experts a token, ties to the lower index.
//   SOFTMAX: p = softmax(logits); the top_k largest.
//   SIGMOID: s = sigmoid(logits); selection by s + bias; groups of n_experts / n_groups are ranked
//   by the sum of their two best (DeepSeek-V3), the best topk_groups stay; weights are the plain s.
// norm_topk: weights are divided by their sum (+ 1e-20 for SIGMOID). All are multiplied by scaling.
typedef struct {
  const float *logits; // f32 [n_tokens][n_experts]
  const float *bias;   // f32 [n_experts] or NULL
  int32_t *ids;        // [n_tokens][top_k], by falling selection score
  float *weights;      // f32 [n_tokens][top_k]
  td_router_kind kind;
  uint32_t n_tokens, n_experts, top_k, n_groups, topk_groups;
  bool norm_topk;
  float scaling;
} td_router_args;
void td_op_router(td_stream *stream, const td_router_args *args);

// out[t] = sum_j weights[t][j] * down_e(silu(gate_e x[t]) * up_e x[t]) with e = ids[t][j], summed
// in the order of j. With ids NULL every token goes to expert 0 with weight 1: a dense MLP or a
// shared expert. accumulate: added to out instead of overwriting it. is_bf16: x and out are BF16
// whatever the device's activations are; the sum is rounded once. out_f32: out is f32 whatever x
// is. n_prompt: see td_linear_op_args.
//
// Some of a layer's experts: with n_routed, ids are in [0, n_routed), those of the n_experts that
// are here in [first_expert, first_expert + n_experts), and what a token has chosen of others is no
// part of its sum; a device may then sum in order of expert. same_ids: ids and n_tokens are those
// of the stream's td_op_moe before this one, also a part of this layer, so pairs that a device has
// put in order stay so. weights_on_device: what the matrices point to is the device's memory, and
// is read when the operator runs; td_dev_supports_device_weights says which may be. The arrays must
// not change.
typedef struct {
  const td_weight *gate, *up, *down; // host arrays [n_experts]
  const void *x;                     // [n_tokens][dim]
  const int32_t *ids;                // [n_tokens][top_k]
  const float *weights;              // f32 [n_tokens][top_k]
  void *out;                         // [n_tokens][dim], not x
  uint32_t n_tokens, n_prompt, n_experts, top_k;
  uint32_t first_expert, n_routed;
  bool accumulate, is_bf16, out_f32, weights_on_device, same_ids;
} td_moe_args;
void td_op_moe(td_stream *stream, const td_moe_args *args);

#endif
