// src/device/device.h - the device interface: memory, streams, events and operators.
// Streams are in-order queues that run concurrently. An event is a point in a stream that another
// stream or the host can wait for. Nothing above this header knows which device runs.
//
// Weights (td_weight, td_vec, the router's bias) are in host memory. A device with its own memory
// copies them on first use and finds the copies by host address, so weights must not change until
// td_dev_close.
//
// Operators are enqueued and return at once: td_op_<name>(stream, args), of those in base/ops.h, or
// with parameters of their own. Their argument structs, here and in tandem/op_args.h, are copied;
// memory that their pointers refer to must live until the operator has run. Activations have the
// dtype td_dev_act_dtype (f32 on the CPU, BF16 on CUDA), dense row-major, one row per token, unless
// a stride is given. A failure in a stream is sticky: its later operators are skipped and
// td_stream_sync reports the failure.
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/numa.h"
#include "base/ops.h"
#include "base/status.h"
#include "model/ngrams.h"
#include "tandem/kv_f8.h"
#include "tandem/op_args.h"

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
// Asks the operating system for AMX's tiles, for this process's CPU kernels; td_dev_open does.
void td_dev_ask_for_tiles(void);
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
// Operators that a stream queues while it waits, before its caller has to wait too.
enum { TD_STREAM_DEPTH = 1024 };

// y[t] = W x[t] (+ bias). bias.data may be NULL. out_f32: y is f32 whatever the activations are
// (router and lm_head). exact: x is not quantized, whatever td_activations is (router). The last
// n_prompt tokens belong to prompts; a device may use kernels for many tokens for them. n_prompt is
// passed in, not guessed from n_tokens, so that results do not depend on how a prompt is cut into
// chunks. weights_on_device: w's data are in device memory, see td_moe_args. n_rows > 0: y is of
// the rows [row_begin, row_begin + n_rows) alone, without a bias. also: further matrices times the
// same x, each with its own result, with the same bits as alone; weights_on_device, out_f32 and
// exact apply to all of them; not with n_rows. A GPU computes matrices of one format in one launch.
// cap > 0: y is cap * tanh(y / cap), on the CPU only. split: with exact, BF16 weights may be
// multiplied by parts of x that are exact together, which adds in another order and is faster.
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
  float cap;
  bool out_f32, exact, split, weights_on_device;
  td_linear_also also[TD_LINEAR_ALSO];
} td_linear_op_args;
// The arguments for matrix i alone, i counting w and then also; w is NULL if there is none.
td_linear_op_args td_linear_matrix(const td_linear_op_args *args, uint32_t i);
uint64_t td_linear_bytes(const td_linear_op_args *args); // data of all matrices

// x[i] += y[i] over n elements. y may be in memory of td_dev_alloc_host.
void td_op_add(td_stream *stream, void *x, const void *y, size_t n);
// x[i] = (x[i] + y[i]) * factor, on the CPU only.
void td_op_add_scaled(td_stream *stream, void *x, const void *y, size_t n, float factor);
// y is f32 whatever the dtype of x
void td_op_add_f32(td_stream *stream, void *x, const float *y, size_t n);

// out[i][:] = x[rows[i]][:], dim elements each. rows i32 [n_rows].
void td_op_gather_rows(td_stream *stream, void *out, const void *x, const int32_t *rows,
                       uint32_t n_rows, uint32_t dim);

// What a token has in a layer's pages.
static inline td_kv_rows td_gqa_rows(const td_kv_view *kv, uint32_t n_kv_heads, uint32_t head_dim) {
  return (td_kv_rows){.n = 2 * n_kv_heads, .dim = head_dim, .n_bf16 = kv->n_bf16};
}
static inline td_kv_rows td_mla_rows(const td_kv_view *kv, uint32_t entry_dim) {
  return (td_kv_rows){.n = 1, .dim = entry_dim, .n_bf16 = kv->n_bf16};
}

static inline td_kv_rows td_kv_store_rows(const td_kv_store_args *a) {
  return a->v ? td_gqa_rows(&a->kv, a->n_heads, a->head_dim)
              : (td_kv_rows){.n = a->n_heads, .dim = a->head_dim, .n_bf16 = a->kv.n_bf16};
}

// Causal attention over the cached pages (this step's keys are stored before). Softmax in f32.
// window: a token sees that many positions, its own the last; 0: all. sinks: a logit of each head
// that takes part in its softmax without a value. blocks: results of td_op_select with this
// `block` and top_blocks, of n_kv_heads heads, without a window; NULL: tokens see all keys.
// selected: groups of `group` positions that tokens see, for all heads, as in td_attn_mla_args.
// prompt: all tokens belong to prompts, see n_prompt in td_linear_op_args. whole: a token also sees
// the keys behind it, up to its sequence's last token of the batch, on the CPU only.
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
  bool prompt, whole;
} td_attn_gqa_args;

// x[i][:] = f(x[i][:]), of f32 rows, on the CPU only.
typedef enum {
  TD_ACTIVATE_GELU,
  TD_ACTIVATE_GELU_TANH, // approximated by tanh
  TD_ACTIVATE_SWIGLU,    // silu(min(x, limit)) * clamp(up, -limit, limit); limit 0: none
} td_activate_kind;
typedef struct {
  float *x;  // [n_rows][dim]
  float *up; // the same, for TD_ACTIVATE_SWIGLU; clamped in place
  uint32_t n_rows, dim;
  td_activate_kind kind;
  float limit;
} td_activate_rows_args;

// Multi-head latent attention. kv_b [n_heads * (nope_dim + v_dim)][kv_lora_rank], each head's nope
// rows first. absorbed: q_nope is multiplied by kv_b's key rows and scores are computed on the
// latents (cheap for few queries). Otherwise keys and values are expanded from the latents block by
// block (cheap for many queries). Both give the same result up to rounding. weights_on_device:
// kv_b's data are in device memory, see td_moe_args.
// selected: results of td_op_select with this top_k; NULL: tokens see all keys. A token that
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
// g * sigmoid(alpha * g) * (u + 1); plain: g * sigmoid(g) * u. gelu: GELU, approximated by tanh, in
// place of silu, without a limit, on the CPU only.
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
  bool gelu, plain, pairs, accumulate, is_bf16, out_f32, weights_on_device, same_ids, rest, by_pair;
} td_moe_args;

#define X(NAME, name, args_type, ...) void td_op_##name(td_stream *stream, const args_type *args);
TD_OPS_OF_ARGS(X)
#undef X
