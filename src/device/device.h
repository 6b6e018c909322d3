// src/device/device.h - the device interface: memory, streams, events and operators.
// Streams are in-order queues that run concurrently. An event is a point in a stream that another
// stream or the host can wait for. Nothing above this header knows which device runs.
//
// Weights (td_weight, td_vec, the router's bias) are in host memory. A device with its own memory
// copies them on first use and finds the copies by host address, so weights must not change until
// td_dev_close.
//
// Operators are enqueued and return at once: td_op_<name>(stream, args), of those in base/ops.h, or
// with parameters of their own. Their argument structs are copied; memory that their pointers refer
// to must live until the operator has run. Activations have the dtype td_dev_act_dtype (f32 on the
// CPU, BF16 on CUDA), dense row-major, one row per token, unless a stride is given. A failure in a
// stream is sticky: its later operators are skipped and td_stream_sync reports the failure.
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/numa.h"
#include "base/ops.h"
#include "base/status.h"
#include "model/ngrams.h"
#include "tandem/kv_f8.h"
#include "tandem/types.h"

typedef struct td_dev td_dev;
typedef struct td_stream td_stream;
typedef struct td_event td_event;

typedef struct {
  const char *kind;           // "cpu"; "cuda": a GPU; "auto": a usable GPU, else the CPU
  unsigned index;             // index of the GPU, from 0
  unsigned n_threads;         // CPU: size of the thread pool; 0: one thread per CPU
  const td_nodes *nodes;      // CPU: over which threads are spread; NULL: all of them
  td_activations activations; // on the CPU of all CPU devices of the process
  bool cpus_from_end; // CPU: pin threads from the last CPU down; another device has the first CPUs
  size_t need_bytes;  // bytes of weights that must fit into the device's own memory
  bool ends_with_process; // td_dev_close leaves unpinning, which is slow, to process exit
} td_dev_opts;

// On success the caller owns *out; on error *out is NULL. TD_EUNSUPPORTED: no such device here.
// TD_ENOMEM: less than need_bytes are free. "auto" then falls back to the CPU and logs the reason.
td_status td_dev_open(td_dev **out, const td_dev_opts *opts, td_err *err);
void td_dev_close(td_dev *dev); // only after its streams, events and memory are closed
const char *td_dev_name(const td_dev *dev);
td_dtype td_dev_act_dtype(const td_dev *dev);
// The GPU's index as CUDA counts; -1: not a GPU.
int td_dev_gpu_index(const td_dev *dev);
// Whether, from now on, streams of dev wait for those of other devices, which other threads feed. A
// thread that made the driver wait for dev could hold up those, and so wait for ever. Meanwhile its
// streams wait for nothing that the calling thread has yet to do.
void td_dev_set_in_group(td_dev *dev, bool is_in_group);
// The nearest NUMA node, by the kernel's number; -1: no particular one.
int td_dev_node(const td_dev *dev);
// Of a GPU: what its PCIe link allows each way, in 10^9 bytes/s. 0: unknown, or host memory is the
// device's.
double td_dev_link_gbps(const td_dev *dev);
// Whether attention of prompts and E4M3 matrices are multiplied by sums in F16, for speed.
bool td_dev_adds_f16(const td_dev *dev);
// The dtype that KV pages get if `asked` is requested: TD_F32 becomes the activations' dtype, since
// those are what is stored.
td_dtype td_dev_kv_dtype(const td_dev *dev, td_dtype asked);
// CPU: limits the pool to *n_threads working threads (0 or too many: all); the others sleep. Read
// when a parallel part of an operator begins. Results do not depend on it. n_threads is borrowed;
// its value may change at any time.
void td_dev_set_thread_limit(td_dev *dev, const _Atomic uint32_t *n_threads);
// CPU: the memory that weights are in, if it lies on the NUMA nodes in stripes: threads then take
// rows on their own node first. Call before the first operator; the memory is borrowed.
void td_dev_use_stripes(td_dev *dev, const td_stripes *stripes);
// Bytes that threads on each node (first index) read of weights in each node's memory (second; the
// last: on none of them): the rows of td_op_linear and td_op_moe, without scales stored apart, and
// those of td_op_attn_mla's absorbed matrix, twice.
typedef struct {
  const uint8_t *page_node; // td_stripes_where
  size_t page_bytes;
  _Atomic uint64_t n_bytes[TD_MAX_NODES][TD_MAX_NODES + 1];
} td_dev_reads;
// CPU: adds what operators read from now on, which costs them time; NULL: no longer. Borrowed.
// Nothing may be queued.
void td_dev_count_reads(td_dev *dev, td_dev_reads *reads);
// *pulse advances while operators run: on the CPU also inside long ones; on a GPU as operators are
// queued, since a GPU holds only a limited number. pulse is borrowed; call before the first
// operator.
void td_dev_set_progress_counter(td_dev *dev, _Atomic uint32_t *pulse);
// Advances it: for long work of a caller, on any thread.
void td_dev_show_progress(td_dev *dev);

// Device memory, 64-byte aligned, not zeroed. *out is NULL on error.
td_status td_dev_alloc(td_dev *dev, void **out, size_t n_bytes, td_err *err);
void td_dev_free(td_dev *dev, void *ptr);
// Host memory, pinned and aligned alike, which the device copies from and to at full speed.
// Signals must be in such memory. Free with td_dev_free_host.
td_status td_dev_alloc_host(td_dev *dev, void **out, size_t n_bytes, td_err *err);
void td_dev_free_host(td_dev *dev, void *ptr);
// Zeros into which streams of `from`, a device of the same kind, write what streams of dev read:
// memory of dev's own where from's processors reach it, otherwise host memory. Signals may be in
// it, too. dev and from may be the same. On error *out is all zero, which close takes.
typedef struct {
  void *memory;
  bool is_host;
} td_inbox;
td_status td_inbox_open(td_inbox *out, td_dev *dev, td_dev *from, size_t n_bytes, td_err *err);
void td_inbox_close(td_inbox *inbox, td_dev *dev);
// Bytes free in the device's own memory; 0: it has none and uses host memory.
size_t td_dev_free_vram_bytes(td_dev *dev);
// All bytes of the device's own memory; 0: it has none.
size_t td_dev_vram_bytes(td_dev *dev);

// Whether td_op_moe accepts this matrix when td_op_copy has copied it to device memory. Data,
// scales and zero points then each begin at a multiple of 256 bytes.
bool td_dev_supports_device_weights(const td_dev *dev, const td_weight *w);

// Frees the device's copies of weights; what operators use later is copied again. Nothing may be
// queued on the device.
void td_dev_drop_weights(td_dev *dev);

// Registers a mapping that holds weights, read-only unless is_writable, until td_dev_close, so that
// a device that copies them does so at full speed; logs if that fails. It takes about a second for
// some GiB, so a thread of the device does it piece by piece, by rising address. Some memory that
// may be pinned is left for td_dev_alloc_host, where the system has a limit. Call once per device.
void td_dev_pin(td_dev *dev, const void *host, size_t n_bytes, bool is_writable);
// Whether some of this memory still waits to be registered, so that copies from it are slower than
// later. Its pieces are registered next.
bool td_dev_is_pinning(td_dev *dev, const void *host, size_t n_bytes);
// Copies of dev, which registers nothing itself, from memory that `of` registers are as good as
// of's. td_dev_is_pinning and td_dev_wait_pinned are answered for that memory. of is closed after
// dev. Only for devices of one kind.
void td_dev_follow_pins(td_dev *dev, td_dev *of);
void td_dev_stop_pinning(td_dev *dev); // memory not yet registered stays unregistered
void td_dev_wait_pinned(td_dev *dev, const void *host,
                        size_t n_bytes); // waits until td_dev_is_pinning is false

// Registers writable host memory with the device, all of it before this returns: operators then
// read and write it in place, and copies run at full speed, as with memory of td_dev_alloc_host.
// Ends with td_dev_unregister, before the memory is unmapped.
td_status td_dev_register(td_dev *dev, void *host, size_t n_bytes, td_err *err);
void td_dev_unregister(td_dev *dev, void *host);

td_status td_stream_open(td_stream **out, td_dev *dev, td_err *err);
// A stream whose work goes first where the device has priorities.
td_status td_stream_open_urgent(td_stream **out, td_dev *dev, td_err *err);
// A stream that can be confined, and yields where the device has priorities.
td_status td_stream_open_confinable(td_stream **out, td_dev *dev, td_err *err);
// Whether work queued from now on runs on a share of the device, so that the rest is always free
// for other streams, or on all of it, as it does first; its order is kept, and its results are the
// same. Returns whether it is confined: never on a device without shares. Not inside td_stream_run.
bool td_stream_confine(td_stream *stream, bool is_confined);
void td_stream_close(td_stream *stream); // waits for queued work
// Waits until everything queued has run. Returns the stream's first failure.
td_status td_stream_sync(td_stream *stream, td_err *err);

// For a library that queues its own work on the stream: the CUDA stream, whose device becomes the
// calling thread's current one. NULL: not a GPU's.
void *td_stream_native(td_stream *stream);

// Identifies repeated work on a stream, compared field by field. The caller defines the fields'
// meaning.
//   memory  must change when memory used by the work has moved
#define TD_WORK_KEY_FIELDS(X)                                                                      \
  X(n_tokens) X(n_seqs) X(n_rows) X(n_microbatches) X(max_keys) X(memory)
typedef struct {
#define X(field) uint32_t field;
  TD_WORK_KEY_FIELDS(X)
#undef X
} td_work_key;

// Calls enqueue, which queues operators on the stream. If work with this key was queued before, the
// device may replay that instead (CUDA graph). So the key must determine the operators' arguments
// and addresses. The contents of that memory may change, except weights.
void td_stream_run(td_stream *stream, const td_work_key *key, void (*enqueue)(void *ctx),
                   void *ctx);

// Who waits for whom, and by what:
//   a stream for one on a device of its kind     td_event_record, td_stream_wait
//   a stream for one on a device of any kind,    td_op_signal or td_op_post, td_op_await
//   also inside replayed work
//   the host for a stream                        td_event_sync, td_stream_sync
// Beyond that, the host waits in functions that close or free, in td_dev_wait_pinned, for copies of
// memory that is not pinned, and where a stream has more than TD_STREAM_DEPTH operators queued.
td_status td_event_open(td_event **out, td_dev *dev, td_err *err);
void td_event_close(td_event *event);
// The event is pending from now on and done when the stream gets here.
void td_event_record(td_event *event, td_stream *stream);
// Work queued on stream after this call starts when the event, as last recorded, is done. An event
// never recorded counts as done. The event may belong to another device of the same kind, which
// must stay open until the stream has passed this point.
void td_stream_wait(td_stream *stream, td_event *event);
void td_event_sync(td_event *event); // the host waits
// Whether the event, as last recorded, is done; also true if its stream has failed. Never waits.
bool td_event_is_done(td_event *event);

// Copies between host and device or within the device. Host memory must stay valid until it has
// run.
void td_op_copy(td_stream *stream, void *dst, const void *src, size_t n_bytes);
// For latency: the copy is made by the device's processors, not by its copy engines, where it would
// queue behind the large copies of other streams. Host memory must be that of td_dev_alloc_host.
void td_op_copy_direct(td_stream *stream, void *dst, const void *src, size_t n_bytes);
void td_op_fill_zero(td_stream *stream, void *dst, size_t n_bytes);

// Signals are numbers in memory of td_dev_alloc_host, or in an inbox, by which streams of two
// devices wait for each other, also inside replayed work. value is read when the operator runs; it
// is in memory the stream's device can read. td_op_signal sets *signal to *value (release: whoever
// sees it also sees the stream's earlier work). A failed stream still signals, if its device works
// at all.
void td_op_signal(td_stream *stream, _Atomic uint32_t *signal, const uint32_t *value);
// Later work of the stream waits until *signal equals *value. The signaling stream must not depend
// on work after this.
void td_op_await(td_stream *stream, _Atomic uint32_t *signal, const uint32_t *value);
// td_op_await that also ends when *canceled is not zero, with *signal still different. The stream
// has failed then (TD_ECANCELED). canceled is in memory as signal is.
void td_op_await_or_cancel(td_stream *stream, _Atomic uint32_t *signal, const uint32_t *value,
                           const _Atomic uint32_t *canceled);
// Copies and then sets *signal to *value (release), by one kernel: a short message to another
// device, of some hundred KB at most. dst and signal are in an inbox or in memory of
// td_dev_alloc_host; src and value in memory the stream's device can read. A failed stream still
// signals.
typedef struct {
  void *dst;
  const void *src;
  size_t n_bytes; // may be 0
  _Atomic uint32_t *signal;
  const uint32_t *value;
} td_post_args;
// Operators that a stream queues while it waits, before its caller has to wait too.
enum { TD_STREAM_DEPTH = 1024 };

// out[t][:] = table[ids[t]][:]. ids i32 [n_tokens], each in [0, table->rows).
typedef struct {
  const td_weight *table; // [n_vocab][dim]
  const int32_t *ids;
  void *out; // [n_tokens][table->cols]
  uint32_t n_tokens;
} td_embed_args;

// out[i][:] = x[i][:] / sqrt(mean(x[i]^2) + eps) * w[:] over n_rows rows of dim elements. w.data
// NULL: no weights. With residual: residual[i][:] += x[i][:] first, and the sum is normed (x is
// unchanged); with `more`, x[i][:] + more[i][:] is added, bit for bit as after td_op_add(x, more).
// x_stride and out_stride are in elements; out may equal x. also: n_rows further rows, with eps and
// without a residual, with the same bits as alone; a GPU norms both in one launch.
typedef struct {
  const void *x; // NULL: none
  td_vec w;      // [dim]
  void *out;
  size_t x_stride, out_stride;
  uint32_t dim;
} td_norm_also;

typedef struct {
  const void *x;
  const void *more; // [n_rows][dim] or NULL; may be in memory of td_dev_alloc_host
  void *residual;   // [n_rows][dim] or NULL
  td_vec w;         // [dim]
  void *out;
  size_t x_stride, out_stride;
  uint32_t n_rows, dim;
  float eps;
  td_norm_also also;
} td_rmsnorm_args;
td_rmsnorm_args td_rmsnorm_also(const td_rmsnorm_args *args); // the arguments for `also` alone

// x[i][:] = (x[i][:] - mean(x[i])) / sqrt(variance(x[i]) + eps) * w[:] + b[:] over n_rows rows of
// dim elements.
typedef struct {
  void *x;
  td_vec w, b;   // [dim]
  size_t stride; // elements
  uint32_t n_rows, dim;
  float eps;
  bool is_f32; // x is, whatever the device's activations are
} td_layernorm_args;

// y[t] = W x[t] (+ bias). bias.data may be NULL. out_f32: y is f32 whatever the activations are
// (router and lm_head). exact: x is not quantized, whatever td_activations is (router). The last
// n_prompt tokens belong to prompts; a device may use kernels for many tokens for them. n_prompt is
// passed in, not guessed from n_tokens, so that results do not depend on how a prompt is cut into
// chunks. weights_on_device: w's data are in device memory, see td_moe_args. n_rows > 0: y is of
// the rows [row_begin, row_begin + n_rows) alone, without a bias. also: further matrices times the
// same x, each with its own result, with the same bits as alone; weights_on_device, out_f32 and
// exact apply to all of them; not with n_rows. A GPU computes matrices of one format in one launch.
enum { TD_LINEAR_ALSO = 2 };
typedef struct {
  const td_weight *w; // NULL: none, and none after it
  td_vec bias;
  void *y;
  size_t y_stride;
} td_linear_also;

typedef struct {
  const td_weight *w;
  td_vec bias; // [w->rows]
  const void *x;
  void *y;
  size_t x_stride, y_stride; // elements
  uint32_t n_tokens, n_prompt;
  uint32_t row_begin, n_rows;
  bool out_f32, exact, weights_on_device;
  td_linear_also also[TD_LINEAR_ALSO];
} td_linear_op_args;
// The arguments for matrix i alone, i counting w and then also; w is NULL if there is none.
td_linear_op_args td_linear_matrix(const td_linear_op_args *args, uint32_t i);
uint64_t td_linear_bytes(const td_linear_op_args *args); // data of all matrices

// x[i] += y[i] over n elements. y may be in memory of td_dev_alloc_host.
void td_op_add(td_stream *stream, void *x, const void *y, size_t n);
// y is f32 whatever the dtype of x
void td_op_add_f32(td_stream *stream, void *x, const float *y, size_t n);

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
  bool out_f32;
} td_sum_parts_args;

// out[i][:] = x[rows[i]][:], dim elements each. rows i32 [n_rows].
void td_op_gather_rows(td_stream *stream, void *out, const void *x, const int32_t *rows,
                       uint32_t n_rows, uint32_t dim);

// Rotates rot_dim elements of each head, in place: token t, head h at
// x + t * token_stride + h * head_stride (elements). Pairs are (i, i + rot_dim/2), or (2i, 2i + 1)
// when interleaved. cos_sin f32 [max_position][rot_dim/2][2], scaling already inside. backwards: by
// the negative angles. also: heads elsewhere, by the same angles (keys).
typedef struct {
  void *x; // NULL: none
  size_t token_stride, head_stride;
  uint32_t n_heads;
} td_rope_heads;

typedef struct {
  void *x;
  const float *cos_sin;
  const int32_t *position; // i32 [n_tokens]
  size_t token_stride, head_stride;
  uint32_t n_tokens, n_heads, rot_dim;
  bool interleaved, backwards;
  td_rope_heads also;
} td_rope_args;

// x[t][:] *= factor[position[t]], dim elements each.
typedef struct {
  void *x;                 // [n_tokens][dim]
  const float *factor;     // f32 [max_position]
  const int32_t *position; // i32 [n_tokens]
  uint32_t n_tokens, dim;
} td_scale_rows_args;

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
  // Host copies of q_begin and position, read while an operator is queued. NULL: not available.
  // With them, a GPU computes all prompts of a batch in one launch.
  const int32_t *host_q_begin, *host_position;
} td_batch_view;

// One layer's KV pages: page i begins at pages + i * page_bytes. Elements have the activations'
// dtype, or are f16: rounded to nearest even and saturated at the largest finite value. In
// TD_F8E4M3 pages are as tandem/kv_f8.h says, with the rows below.
//   GQA: K [n_kv_heads][page_tokens][head_dim], then V of the same shape
//   MLA: [page_tokens][kv_lora_rank + rope_dim], latent after its norm, key part after RoPE
typedef struct {
  void *pages;
  size_t page_bytes;
  td_dtype dtype;  // see td_dev_kv_dtype
  uint32_t n_bf16; // td_kv_rows, with TD_F8E4M3
} td_kv_view;

typedef struct {
  td_batch_view batch;
  td_kv_view kv;
  const void *k, *v;         // token t, head h at k + t * stride + h * head_dim
  size_t k_stride, v_stride; // elements
  uint32_t n_kv_heads, head_dim;
} td_kv_store_gqa_args;

// What a token has in a layer's pages.
static inline td_kv_rows td_gqa_rows(const td_kv_view *kv, uint32_t n_kv_heads, uint32_t head_dim) {
  return (td_kv_rows){.n = 2 * n_kv_heads, .dim = head_dim, .n_bf16 = kv->n_bf16};
}
static inline td_kv_rows td_mla_rows(const td_kv_view *kv, uint32_t entry_dim) {
  return (td_kv_rows){.n = 1, .dim = entry_dim, .n_bf16 = kv->n_bf16};
}

typedef struct {
  td_batch_view batch;
  td_kv_view kv;
  const void *entry; // [n_tokens][entry_dim], entry_dim = kv_lora_rank + rope_dim
  uint32_t entry_dim;
} td_kv_store_mla_args;

// Causal attention over the cached pages (this step's keys are stored before). Softmax in f32.
// window: a token sees that many positions, its own the last; 0: all. sinks: a logit of each head
// that takes part in its softmax without a value. blocks: results of td_op_select_blocks with this
// `block` and top_blocks, of n_kv_heads heads, without a window; NULL: tokens see all keys.
// selected: groups of `group` positions that tokens see, for all heads, as in td_attn_mla_args.
// prompt: all tokens belong to prompts, see n_prompt in td_linear_op_args.
typedef struct {
  td_batch_view batch;
  td_kv_view kv;
  const void *q; // [n_tokens][n_heads][head_dim]
  void *out;     // [n_tokens][n_heads][head_dim]
  uint32_t n_heads, n_kv_heads, head_dim, window;
  const int32_t *blocks; // [n_tokens][n_kv_heads][top_blocks]
  uint32_t block, top_blocks;
  const int32_t *selected; // [n_tokens][top_k]
  uint32_t top_k, group;
  const float *sinks; // f32 [n_heads] in host memory, or NULL
  float scale;
  bool prompt;
} td_attn_gqa_args;

// Multi-head latent attention. kv_b [n_heads * (nope_dim + v_dim)][kv_lora_rank], each head's nope
// rows first. absorbed: q_nope is multiplied by kv_b's key rows and scores are computed on the
// latents (cheap for few queries). Otherwise keys and values are expanded from the latents block by
// block (cheap for many queries). Both give the same result up to rounding. weights_on_device:
// kv_b's data are in device memory, see td_moe_args.
// selected: results of td_op_select_keys with this top_k; NULL: tokens see all keys. A token that
// sees a selection is computed as with `absorbed`. group > 0: what is selected are groups of so
// many positions; a token also sees those of its own group, up to itself, unless that ends with it.
typedef struct {
  td_batch_view batch;
  td_kv_view kv;
  const void *q; // [n_tokens][n_heads][nope_dim + rope_dim]
  const td_weight *kv_b;
  const int32_t *selected; // [n_tokens][top_k]
  void *out;               // [n_tokens][n_heads][v_dim]
  uint32_t n_heads, nope_dim, rope_dim, v_dim, kv_lora_rank, top_k, group;
  float scale;
  bool absorbed, weights_on_device;
} td_attn_mla_args;
// The most keys that a token sees, also of a selection.
static inline uint64_t td_most_selected(uint32_t top_k, uint32_t group) {
  return group ? ((uint64_t)top_k + 1) * group - 1 : top_k;
}

// Selects the positions that each token attends to: of the positions up to its own, the top_k with
// the largest scores, in rising order; of equal scores the lower position comes first. A token that
// sees top_k keys or fewer sees all of them, and its row is not written. With key j at the begin of
// its page in kv, [page_tokens][dim]:
//   score[j] = sum_h weights[h] * max(0, q[h] . key[j])
// Positive factors common to all scores are left out, as they do not change the order. Sums are
// f32, whatever the activations are, and the same for tokens of prompts and of decode. group > 0:
// keys are entries of td_op_pool in place of positions; a token sees those of the groups that end
// with it or before.
typedef struct {
  td_batch_view batch;
  td_kv_view kv;
  const void *q;        // [n_tokens][n_heads][dim]
  const float *weights; // f32 [n_tokens][n_heads]; NULL: all 1
  int32_t *selected;    // [n_tokens][top_k]
  uint32_t n_heads, dim, top_k, group;
} td_select_keys_args;

// Selects the blocks of `block` positions that each head of a token attends to: its own block and
// the n_local - 1 before, and those whose best keys have the largest scores q[h] . key[j],
// top_blocks in all, in rising order; of equal scores the lower block comes first. A token that
// sees top_blocks blocks or fewer sees all of them, and its rows are not written. Keys as in
// td_select_keys_args.
typedef struct {
  td_batch_view batch;
  td_kv_view kv;
  const void *q;     // [n_tokens][n_heads][dim]
  int32_t *selected; // [n_tokens][n_heads][top_blocks]
  uint32_t n_heads, dim, block, top_blocks, n_local;
} td_select_blocks_args;

// ---- gated delta nets ---------------------------------------------------------------------------

// Heads of keys (and queries) and of values; n_v_heads is a multiple of n_k_heads, and as many
// value heads in a row share a key head; is_tiled: value head h has key head h % n_k_heads. n_taps:
// length of the causal convolution, from 2 to TD_DELTA_MAX_TAPS. by_channel: a value head has a
// decay for each of its k_dim rows of the state, not one for all.
enum { TD_DELTA_MAX_TAPS = 16 };
typedef struct {
  uint32_t n_k_heads, n_v_heads, k_dim, v_dim, n_taps;
  bool is_tiled, by_channel;
} td_delta_shape;

// Decays of a value head.
static inline uint32_t td_delta_decays(const td_delta_shape *s) {
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
  td_state_trail trail;
  const void *x;   // [n_tokens][x_stride]
  size_t x_stride; // elements
  td_row_part q, k, v, a, b;
  const float *conv;         // f32 [n_taps][channels] in host memory, as the next
  const float *decay, *bias; // f32 [n_v_heads], [n_v_heads][n_decays]
  float bound;               // 0: none
  void *out;                 // [n_tokens][channels]
  float *gates;              // f32 [n_tokens][n_v_heads][n_decays + 1]: decays, strength
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
  td_state_trail trail;
  const void *qkv;
  const float *gates;
  void *out; // [n_tokens][n_v_heads][v_dim]
  bool prompt;
} td_delta_rule_op_args;

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
  uint32_t dim, rot_dim, group;
  bool overlaps, rotates_first;
  float eps;
} td_pool_args;

// Attention with one key for all heads, which is also the value. A token sees entries of td_op_pool
// (of the groups that end with it or before; with more than top_k of them those selected; none if
// group is 0), then the keys of the last `window` positions, its own the last. Then this step's
// keys are stored in the ring. Sinks as in td_attn_gqa_args.
typedef struct {
  td_batch_view batch;
  td_kv_view state;
  void *q;         // [n_tokens][n_heads][dim], and then the output
  const void *key; // this step's: token t at key + t * key_stride
  size_t key_stride;
  const float *sinks;      // f32 [n_heads] in host memory
  const int32_t *selected; // [n_tokens][top_k], or NULL: all
  size_t entry_at;         // elements of the state; the ring is at its begin
  uint32_t n_heads, dim, window, ring, group, top_k; // ring: at least window
  float scale;
} td_attn_pool_args;

// ---- hyper-connections --------------------------------------------------------------------------

// A residual of n_streams rows a token (Xie et al., "mHC", 2026). Of each token's scores, f32
// [(2 + n_streams) * n_streams] products with x, times 1 / sqrt(mean(x^2) + norm_eps) over all
// streams and scale, plus base: the factors `pre` of the streams in out = sum pre[k] x[k]; `post`,
// of a block's output in each stream; and `comb`, how streams mix, made doubly stochastic in
// n_rounds of Sinkhorn's. They replace the scores. out is normed with w.
// head: scores are n_streams alone. scores NULL: out is the norm of the streams' mean.
enum { TD_MAX_STREAMS = 16 };
typedef struct {
  const void *x;             // [n_tokens][n_streams][dim]
  float *scores;             // [n_tokens][td_hyper_scores, or n_streams]
  const float *base, *scale; // f32 [scores], f32 [3 or 1], in host memory
  td_vec w;                  // [dim]
  void *out;                 // [n_tokens][dim]
  uint32_t n_tokens, n_streams, dim, n_rounds;
  float eps, norm_eps;
  bool head;
} td_hyper_read_args;
static inline uint32_t td_hyper_scores(uint32_t n_streams) {
  return (2 + n_streams) * n_streams;
}

// x[k] = post[k] * y + sum_j comb[j][k] * x[j], with the factors that td_op_hyper_read left in
// scores; x[k] = y if that is NULL. adds: x[k] += scores[k] * y, with those of td_op_hyper_mix.
typedef struct {
  void *x;             // [n_tokens][n_streams][dim]
  const void *y;       // [n_tokens][dim]
  const float *scores; // f32 [n_tokens][td_hyper_scores, or n_streams] or NULL
  uint32_t n_tokens, n_streams, dim;
  bool adds;
} td_hyper_write_args;

// out = the mean over streams of sigmoid(gate[k]) * x[k], by element; scores[k] = 2 *
// sigmoid(scores[k] / n_streams) become the factors of a block's output.
typedef struct {
  const void *x, *gate; // [n_tokens][n_streams][dim]
  float *scores;        // f32 [n_tokens][n_streams] or NULL
  void *out;            // [n_tokens][dim]
  uint32_t n_tokens, n_streams, dim;
} td_hyper_mix_args;

// x[i][:] = silu(factor * x[i][:]).
typedef struct {
  void *x; // [n_rows][dim]
  uint32_t n_rows, dim;
  float factor;
} td_silu_rows_args;

// ---- embeddings of n-grams ----------------------------------------------------------------------

// The rows of the n-grams that end with each token, side by side. A state (see above) has the ids
// of the last hash.size - 1 tokens, i32, oldest first. A GPU does not read tables: it copies
// `gathered`, which the caller has filled (td_ngram_row).
typedef struct {
  td_batch_view batch;
  td_kv_view state;
  td_state_trail trail;
  size_t ids_at;         // elements, of the state and of a slot
  const int32_t *tokens; // [n_tokens]
  const td_ngram_table *table;
  const void *gathered; // as out, in memory of td_dev_alloc_host; NULL on the CPU
  void *out;            // [n_tokens][td_ngram_rows * columns of a shard]
} td_ngram_rows_args;

// The rows of one token's n-grams, from the table in its file: ids are the token's and those before
// it, the latest first, [hash.size]. out: f32, as a row of td_ngram_rows_args.out.
void td_ngram_row(const td_ngram_table *table, const int32_t *ids, float *out);

// x[k] = sigmoid(g) * value, g = sign(s) sqrt(max(|s|, 1e-6)), s = x[k] . query[k] / sqrt(dim).
typedef struct {
  void *x;           // [n_tokens][n_streams][dim]: keys, then what is added to the streams
  const void *query; // [n_tokens][n_streams][dim]
  const void *value; // [n_tokens][dim]
  uint32_t n_tokens, n_streams, dim;
} td_ngram_gate_args;

// x[t] += y[t] + silu(sum_j conv[j] * in[t - (n_taps - 1 - j) * step]), channel by channel, zeros
// in front of the sequence. A state has the last (n_taps - 1) * step rows of `in`, oldest first.
typedef struct {
  td_batch_view batch;
  td_kv_view state;
  td_state_trail trail;
  size_t rows_at;    // elements, of the state and of a slot
  const float *conv; // f32 [n_taps][channels] in host memory
  const void *in, *y;
  void *x; // [n_tokens][channels]
  uint32_t channels, n_taps, step;
} td_ngram_conv_args;
static inline uint32_t td_ngram_past(uint32_t n_taps, uint32_t step) { // rows of the state
  return (n_taps - 1) * step;
}

// x[t][g][:] *= sigmoid(gate), or silu(gate), over n_groups groups of dim elements; gates of group
// g begin at gate + t * gate_stride + part.offset + g * part.stride. scalar: one f32 gate a group.
typedef struct {
  void *x; // [n_tokens][n_groups][dim]
  const void *gate;
  size_t gate_stride; // elements
  td_row_part part;
  uint32_t n_tokens, n_groups, dim;
  bool silu, scalar;
} td_gate_rows_args;

// The top logits of each row and the row's sums, from which most draws can be made without copying
// all logits to the host.
typedef struct {
  const float *logits;      // f32 [n_rows][n_vocab]
  const float *temperature; // f32 [n_rows], for sum_warm; 0 counts as 1
  td_top_logits *out;       // [n_rows]
  uint32_t n_rows, n_vocab;
} td_top_logits_args;

typedef enum { TD_ROUTER_SOFTMAX, TD_ROUTER_SIGMOID, TD_ROUTER_SOFTPLUS } td_router_kind;

// Scores from f32 logits, then top_k experts a token, ties to the lower index.
//   SOFTMAX: s = softmax(logits).
//   SIGMOID: s = sigmoid(logits); selection by s + bias, weights are the plain s.
//   SOFTPLUS: s = sqrt(ln(1 + exp(logits))), else alike. With a table, token t's experts are
//   table[tokens[t]], in its order.
// Groups of n_experts / n_groups are ranked by the sum of their two best (DeepSeek-V3), the best
// topk_groups stay; then the top_k largest are taken.
// norm_topk: weights are divided by their sum (+ 1e-20, but for SOFTMAX). All are multiplied by
// scaling.
typedef struct {
  const float *logits; // f32 [n_tokens][n_experts]
  const float *bias;   // f32 [n_experts] or NULL
  int32_t *ids;        // [n_tokens][top_k], by falling selection score
  float *weights;      // f32 [n_tokens][top_k]
  // i32 [n_vocab][top_k] in host memory, ids in [0, n_experts); or NULL. tokens i32 [n_tokens]
  const int32_t *table, *tokens;
  td_router_kind kind;
  uint32_t n_tokens, n_experts, top_k, n_groups, topk_groups, n_vocab; // n_vocab: with a table
  bool norm_topk;
  float scaling;
} td_router_args;

// out[t] = sum_j weights[t][j] * down_e(silu(gate_e x[t]) * up_e x[t]) with e = ids[t][j], summed
// in the order of j. With ids NULL every token goes to expert 0 with weight 1: a dense MLP or a
// shared expert. accumulate: added to out instead of overwriting it. is_bf16: x and out are BF16
// whatever the device's activations are; the sum is rounded once. out_f32: out is f32 whatever x
// is. n_prompt: see td_linear_op_args.
//
// pairs: gate holds the rows of gate and up alternately, [2 * hidden][dim], and up is absent.
// gate_bias and down_bias, of all experts of the layer, are added to the products; without pairs
// the biases of up follow those of gate, [2][n_routed or n_experts][hidden]. limit > 0: with
// g = min(gate, limit) and u = clamp(up, -limit, limit) the activation is
// g * sigmoid(alpha * g) * (u + 1); plain: g * sigmoid(g) * u.
//
// A group of a layer's experts: n_routed is the layer's number of experts and ids are in [0,
// n_routed), those of a token distinct; the group is [first_expert, first_expert + n_experts).
// Other experts are left out of the sum, and a device may sum in order of expert. same_ids: ids and
// n_tokens are those of the stream's previous td_op_moe, also a group of this layer, and so is what
// x points to, so that a device can reuse the sorted pairs and rounded tokens. weights_on_device:
// the matrices' data are in device memory, read when the operator runs;
// td_dev_supports_device_weights tells which matrices may be. The arrays gate, up and down must not
// change.
//
// slots: i32 [n_experts] in device memory, read when the operator runs. Experts with a slot >= 0
// are in gate[slot], up[slot] and down[slot], of n_slots matrices alike; the others are left out of
// the sum. rest: the other way round, those with a slot are left out, and gate, up and down are by
// expert; on the CPU only. Both without n_routed.
// by_pair: out is f32 [n_tokens][top_k][dim], the experts' results instead of their sum, weights
// aside; those of pairs left out are not written. For td_op_moe_join.
typedef struct {
  const td_weight *gate, *up, *down; // host arrays [n_experts], or [n_slots]
  const void *x;                     // [n_tokens][dim]
  const int32_t *ids;                // [n_tokens][top_k]
  const float *weights;              // f32 [n_tokens][top_k]
  void *out;                         // [n_tokens][dim], not x
  uint32_t n_tokens, n_prompt, n_experts, top_k;
  uint32_t first_expert, n_routed;
  // f32 [n_routed or n_experts][gate's rows] (and up's), [..][dim], in host memory, or NULL
  const float *gate_bias, *down_bias;
  const int32_t *slots;
  uint32_t n_slots;
  float limit, alpha;
  bool plain, pairs, accumulate, is_bf16, out_f32, weights_on_device, same_ids, rest, by_pair;
} td_moe_args;

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
  void *out;                 // [n_tokens][dim]
  uint32_t n_tokens, n_experts, top_k, dim;
  bool is_bf16; // out on a CPU: of BF16
} td_moe_join_args;

#define X(NAME, name, args_type, ...) void td_op_##name(td_stream *stream, const args_type *args);
TD_OPS_OF_ARGS(X)
#undef X
