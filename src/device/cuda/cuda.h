// src/device/cuda/cuda.h - internals of the CUDA device, shared by its files.
// All CUDA code is in a library that is loaded when a CUDA device opens (kernels/cuda/abi.h); this
// side is plain C that calls its table of functions. A td_stream is a CUDA stream; operators are
// checked and launched on the caller's thread. Errors that only the GPU can detect (an id out of
// range) set the stream's fault word; td_stream_sync reports them.
//
// Weights are in host memory. A matrix is copied to the GPU on first use and found again by its
// host address; it must not change until the device closes.
#pragma once

#include <pthread.h>

#include "device/check.h"
#include "kernels/cuda/abi.h"

enum { CUDA_OUT_OF_MEMORY = 2, CUDA_NOT_SUPPORTED = 801 }; // as cudaError_t has them

// Per-stream scratch buffers of operators; grown on demand, kept until the stream closes.
typedef enum {
  CUDA_SCRATCH_SORT,   // MoE: pairs sorted by expert, tiles
  CUDA_SCRATCH_HIDDEN, //
  // MoE: gate and up, then a result, per pair; attention: partial results of splits; delta nets:
  // products of chunks; ranking: top logits of slices
  CUDA_SCRATCH_PARTS,
  CUDA_SCRATCH_ML,      // attention: maxima and sums of splits; ranking: sums of slices
  CUDA_SCRATCH_QUERY,   // MLA: absorbed queries
  CUDA_SCRATCH_LATENT,  // MLA: latents of a sequence, or results over latents; pooled keys: open
                        // ones
  CUDA_SCRATCH_KEYS,    // prefill: keys and values of some heads; scores or entries of selections
  CUDA_SCRATCH_WEIGHT,  // some rows of a matrix as BF16
  CUDA_SCRATCH_A8,      // matrices' activations in 8 bits, and their scales
  CUDA_SCRATCH_MOE_A8,  // likewise of routed experts
  CUDA_SCRATCH_SPLITS,  // sums of tiles that several blocks compute
  CUDA_SCRATCH_ARRIVED, // how many of a tile's blocks are done: zeros
  N_CUDA_SCRATCH
} td_cuda_scratch_slot;

// Host memory and its copy in GPU memory.
typedef struct {
  const void *host;
  void *device;
  size_t n_bytes;
} td_cuda_copy;

// A layer's experts, or a group of them, as the kernels take them.
typedef struct {
  const void *key; // lookup key: data of the first gate, or the first gate itself if on the device
  td_weight *device;        // [3][n_experts]: gate, up, down
  td_weight gate, up, down; // expert 0, in device memory
  uint32_t n_experts;
  td_cu_read read_gate, read_down; // the fastest load method that suits all experts
  td_activations a8;               // of all of them, see td_weight_a8
} td_cuda_experts;

// State of a piece of the weights' memory: whether it is registered (pinned) with the driver.
typedef enum { CUDA_PIN_PENDING, CUDA_PIN_DONE, CUDA_PIN_REFUSED } td_cuda_pin_state;

typedef struct {
  const char *host;
  size_t n_bytes;
  td_cuda_pin_state state;
  bool is_wanted; // register before others
} td_cuda_pin_piece;

enum { CUDA_PIN_BYTES = 1 << 30 };

typedef struct {
  const char *base, *grid; // the memory; where the first piece begins, aligned down
  size_t n_bytes, piece_bytes;
  td_cuda_pin_piece *pieces; // NULL: nothing to register
  size_t n;
  pthread_t thread;
  void *reserve; // pinned, and freed at the system's limit: what is allocated later needs some
  bool has_thread, is_left_registered; // is_left_registered: skip unregistering at close
  bool is_writable;                    // mappings are
  bool needs_writing; // used by the thread: mappings must be writable while they are registered
  _Atomic size_t n_pending; // written with the lock held

  pthread_mutex_t lock; // guards the pieces' states and the fields below
  pthread_cond_t moved;
  bool is_stopping;
} td_cuda_pins;

// Kernels that are used where they can be: those that the GPU has, but for what TANDEM_CUDA_WITHOUT
// names, as "a8,wide", so that a fault can be narrowed down.
typedef struct {
  bool wgmma, a8; // linear_wgmma, linear_a8_wgmma
  bool prefill;   // attn_prefill by wgmma
  bool latents;   // attn_latents
  bool wide;      // linear_wide
  bool chunks;    // delta_chunks, delta_channels
  bool f16;       // sums in F16: attn_prefill by mma.sync; linear_mma of E4M3, then not cuBLAS
} td_cuda_kernels;

typedef struct {
  td_dev base;
  void *library;
  const td_cu_abi *abi;
  int index; // the GPU's, from 0
  td_cu_props props;
  td_cuda_kernels uses;
  int node;                   // nearest NUMA node; -1: any
  td_activations activations; // to which prompts' are rounded where weights take them
  td_cu_stream upload;
  size_t pass_bytes; // scratch memory per MoE pass; more pairs are cut into rounds
  // scratch memory for attention: limits heads per launch in prefill, tokens in decode
  size_t keys_bytes;
  size_t page_bytes; // granularity of GPU memory allocation
  uint64_t await_ns; // timeout of a stream's wait for a signal
  td_cuda_pins pins;
  td_cuda_pins *followed; // another device's, which also registers for this one; or NULL

  pthread_mutex_t lock; // guards the fields below
  // hash table with open addressing, n_slots a power of two; host NULL: empty slot
  td_cuda_copy *copies;
  size_t n_copies, n_slots;
  size_t copied_bytes;
  void **pieces; // allocations that hold the copies
  size_t n_pieces;
  char *shared_piece; // rest of the newest allocation that small copies share
  size_t shared_bytes;
  td_cuda_experts *experts;
  size_t n_experts;
  uint32_t n_drops;   // of the copies: graphs made before refer to memory that was freed
  void *blas_library; // cuBLAS; NULL: not looked for yet, or not found
  bool is_blas_sought;
  td_cu_share share; // that streams are confined to; NULL: none
  bool is_share_sought;
} td_cuda_dev;

enum { N_CUDA_GRAPHS = 64, N_CAPTURES_REFUSED = 3, N_CUDA_RETIRED = 16, N_CUDA_SHAPES = 64 };

// Work queued under a key.
typedef struct {
  td_work_key key;
  td_cu_graph graph; // NULL: the work was queued once and not captured yet
  bool is_used;
} td_cuda_graph;

// Describes the sorted pairs in CUDA_SCRATCH_SORT.
typedef struct {
  const int32_t *ids; // NULL: none
  uint32_t n_tokens, top_k, n_experts, tile_tokens;
} td_cuda_sorted;

// Activations in CUDA_SCRATCH_MOE_A8.
typedef struct {
  const void *x; // NULL: none
  uint32_t n_tokens, dim;
} td_cuda_rounded;

typedef struct {
  td_stream base;
  td_cu_stream cu;            // whole or inside: the one that work is queued on
  td_cu_stream whole, inside; // inside: in the device's share; NULL: the stream cannot be confined
  td_cu_event turn;           // with inside: orders the two
  td_err err;                 // the first failure; TD_OK if none
  int32_t *fault;             // pinned host memory that kernels write to
  td_cu_blas blas;            // NULL: not needed yet, or not available
  bool is_blas_tried;
  td_cu_gemm_args shapes[N_CUDA_SHAPES]; // that cuBLAS has had, by a hash; without addresses
  td_cuda_graph graphs[N_CUDA_GRAPHS];
  uint32_t n_drops;    // td_cuda_dev.n_drops when they were made
  uint32_t next_graph; // the one to be replaced next
  bool is_capturing;
  uint32_t n_refused; // consecutive failed captures; no more attempts after N_CAPTURES_REFUSED
  td_cuda_sorted sorted;
  td_cuda_rounded rounded;
  // How many tiles each expert of the sorted pairs has, for the host: first_tile of moe_sort, in
  // pinned memory, once `counted` is done. NULL: not needed yet.
  uint32_t *first_tile;
  td_cu_event counted;
  bool is_counting; // the copy to first_tile is queued, for the pairs that `sorted` describes
  void *scratch[N_CUDA_SCRATCH];
  size_t scratch_bytes[N_CUDA_SCRATCH];
  void *retired[N_CUDA_RETIRED]; // outgrown scratch, freed when queued work has run
  uint32_t n_retired;
} td_cuda_stream;

typedef struct {
  td_event base;
  td_cu_event cu;
} td_cuda_event;

static inline td_cuda_dev *td_cuda_dev_of(const td_cuda_stream *stream) {
  return (td_cuda_dev *)stream->base.dev;
}

// Makes the device current on the calling thread. Call it before creating memory, streams or events
// and before queuing work. Failures show up in the calls that follow.
static inline void td_cuda_use(const td_cuda_dev *dev) {
  dev->abi->use(dev->index);
}

// Call before what may wait for the device inside the driver, where no other thread can queue work:
// after this it has nothing to wait for.
static inline void td_cuda_settle(const td_cuda_dev *dev) {
  if (dev->base.is_in_group) dev->abi->await_idle(); // a failure shows up at the next call
}

// The view as kernels take it. rows: of a token in a page.
static inline td_kv_view td_cuda_kv_of(const td_kv_view *kv, td_kv_rows rows,
                                       uint32_t page_tokens) {
  td_kv_view out = *kv;
  if (kv->dtype != TD_F8E4M3) return out;
  out.n_codes = td_kv_f8_codes(&rows);
  out.scales_at = (uint32_t)td_kv_f8_scales_at(&rows, page_tokens);
  return out;
}

// TD_OK for code 0; otherwise an error with the runtime's message. TD_ENOMEM for out of memory.
td_status td_cuda_result(const td_cuda_dev *dev, int code, const char *what, td_err *err);

// library.c: loads the table from TANDEM_CUDA_LIB or from the file beside the program.
// TD_EUNSUPPORTED: no library, one of another build, or no GPU.
td_status td_cuda_library_open(td_cuda_dev *dev, td_err *err);
// TD_EUNSUPPORTED unless the library at path has the functions of this program with the same
// arguments; names the first that is missing or differs.
td_status td_cuda_abi_check(const td_cu_abi *abi, const char *path, td_err *err);
void td_cuda_library_close(td_cuda_dev *dev);
// find_blas.c: looks up a function in cuBLAS, from an already loaded or an installed library; NULL:
// none. ctx is a td_cuda_dev. A td_cu_symbol_fn.
void *td_cuda_blas_symbol(void *ctx, const char *name);
void *td_cuda_find_blas(const char *path, int cuda_major); // path: list of program folders, as PATH

// pin.c: td_dev_pin and its companions.
void td_cuda_pin(td_dev *dev, const void *host, size_t n_bytes, bool is_writable);
bool td_cuda_is_pinning(td_dev *dev, const void *host, size_t n_bytes);
void td_cuda_wait_pinned(td_dev *dev, const void *host, size_t n_bytes);
void td_cuda_stop_pinning(td_dev *dev);
void td_cuda_follow_pins(td_dev *dev, td_dev *of);
td_status td_cuda_register(td_dev *dev, void *host, size_t n_bytes, td_err *err);
void td_cuda_unregister(td_dev *dev, void *host);
size_t td_cuda_pinned_bytes(td_cuda_dev *dev); // registered so far
void td_cuda_pins_close(td_cuda_dev *dev);
// Queues a copy; n_bytes > 0. Splits it where src spans several pieces: the driver rejects a range
// that is neither inside one registration nor entirely unregistered.
int td_cuda_copy_from(const td_cuda_dev *dev, void *dst, const void *src, size_t n_bytes,
                      td_cu_stream stream);

// stream.c
td_status td_cuda_stream_open(td_stream **out, td_dev *dev, td_stream_kind kind, td_err *err);
bool td_cuda_stream_confine(td_stream *stream, bool is_confined);
void td_cuda_stream_close(td_stream *stream);
td_status td_cuda_stream_sync(td_stream *stream, td_err *err);
td_status td_cuda_event_open(td_event **out, td_dev *dev, td_err *err);
void td_cuda_event_close(td_event *event);
void td_cuda_event_record(td_event *event, td_stream *stream);
void td_cuda_stream_wait(td_stream *stream, td_event *event);
void td_cuda_event_sync(td_event *event);
bool td_cuda_event_is_done(td_event *event);
void td_cuda_enqueue(td_stream *stream, const td_op *op);
// graph.c
void td_cuda_stream_run(td_stream *stream, const td_work_key *key, void (*enqueue)(void *ctx),
                        void *ctx);
void td_cuda_graphs_drop(td_cuda_stream *stream); // before memory that they use is freed
// At least n_bytes, content undefined. Valid until the same slot is requested again. NULL if
// *status is not TD_OK, before or by this.
void *td_cuda_scratch(td_cuda_stream *stream, td_cuda_scratch_slot slot, size_t n_bytes,
                      td_status *status, td_err *err);

// weights.c: the GPU copy of a matrix, a vector or memory.
// Does nothing unless *status is TD_OK. n_bytes 0 or host NULL gives NULL, as a failure does.
const void *td_cuda_on_device(td_cuda_dev *dev, const void *host, size_t n_bytes, td_status *status,
                              td_err *err);
td_status td_cuda_weight(td_cuda_dev *dev, const td_weight *host, const char *what, td_weight *out,
                         td_err *err);
// weights_on_device: w's data are there already, so out is w.
td_status td_cuda_weight_at(td_cuda_dev *dev, const td_weight *w, bool weights_on_device,
                            const char *what, td_weight *out, td_err *err);
// Puts the copy in place of the vector; does nothing unless *status is TD_OK.
void td_cuda_vec(td_cuda_dev *dev, td_vec *v, td_status *status, td_err *err);
// Entries of gate, up and down.
static inline uint32_t td_cuda_n_matrices(const td_moe_args *a) {
  return a->slots ? a->n_slots : a->n_experts;
}
td_status td_cuda_experts_of(td_cuda_dev *dev, const td_moe_args *a, td_cuda_experts *out,
                             td_err *err);
bool td_cuda_takes_on_device(const td_dev *dev, const td_weight *w);
// frees all copies; weights used later are copied again
void td_cuda_weights_close(td_cuda_dev *dev);
void td_cuda_weights_drop(td_dev *dev); // likewise, while streams are open

// heuristics.c: pure functions.
// How kernels load weights of this format. x_aligned: activations allow 16-byte loads.
td_cu_read td_cuda_read_of(const td_weight *w, bool x_aligned);
// Whether matrices differ in data and number of rows alone.
bool td_cuda_same_format(const td_weight *a, const td_weight *b);
// linear_vec, linear_mma, linear_wgmma: each takes only weights that the ones before it take.
// linear_a8 is chosen apart, since it rounds activations.
typedef enum { CUDA_GEMM_VEC, CUDA_GEMM_MMA, CUDA_GEMM_WGMMA, CUDA_GEMM_A8 } td_cuda_gemm;
// The kernel that computes n_tokens tokens (the maximum per matrix): linear_vec for as many as its
// pass has, and for weights that BF16 cannot represent.
td_cuda_gemm td_cuda_gemm_of(const td_weight *w, td_cu_read read, uint32_t n_tokens,
                             bool has_wgmma);
// Tokens per tile when each matrix has n_tokens of them.
uint32_t td_cuda_tile_tokens(td_cuda_gemm gemm, uint32_t n_tokens);
// Tokens that linear_vec takes in one pass over weights other than routed experts'; 0: tiles of
// td_cuda_tile_tokens.
uint32_t td_cuda_wide_tokens(td_cu_read read, uint32_t n_tokens);
// Passes of linear_wide in which a matrix is multiplied rather than by a kernel of more tokens.
uint32_t td_cuda_wide_passes(const td_weight *w, td_cu_read read, uint32_t n_tokens);
// Whether cuBLAS computes them, if available: BF16 weights of more than TD_CU_VEC_TOKENS tokens;
// other weights when there are enough tokens to amortize
// converting them to BF16.
bool td_cuda_use_blas(const td_weight *w, uint32_t n_tokens);
// Whether tensor cores add up twice as fast in F16 as in FP32: GeForce's from RTX 30 on. Those of
// the same compute capabilities for workstations and servers add up as fast in FP32.
bool td_cuda_adds_f16(const td_cu_props *props);
// Of a group's n_tiles tiles of experts, how many get their own blocks in the round that skips the
// first `skip` tiles. n_likely: the expected number of tiles. Rounds that are probably empty are
// cheap.
uint32_t td_cuda_tiles_at_once(uint32_t skip, uint32_t n_tiles, uint32_t n_likely);
// Of n_rows rows, how many are converted to BF16 at a time: a multiple of 8, or all.
uint32_t td_cuda_piece_rows(const td_weight *w, uint32_t n_rows);
// Warps per block of linear_vec for n_rows rows of w, or of each of a block's n_matrices like it:
// so that SMs have TD_CU_VEC_WARPS warps even with few rows, that the last wave of blocks does not
// leave most SMs idle, and that warps of short rows have more than one chunk. It determines
// summation order, so it must not depend on n_tokens (batch invariance).
uint32_t td_cuda_vec_warps(const td_weight *w, uint32_t n_matrices, uint32_t n_rows,
                           bool of_experts, uint32_t n_sms);
// Keys per split and number of splits for contexts of at most max_keys. The same for all contexts
// up to the same power of two, so that sums do not depend on other sequences of the batch.
// n_blocks: blocks per split of one token.
void td_cuda_splits(uint32_t max_keys, uint32_t n_blocks, uint32_t *split_keys, uint32_t *n_splits);
// The same with a window, whatever the contexts: as many splits as any token's window can touch.
void td_cuda_window_splits(uint32_t window, uint32_t max_keys, uint32_t n_blocks,
                           uint32_t *split_keys, uint32_t *n_splits);
// Whether attn_latents computes this absorbed attention: where wgmma is, BF16 or E4M3 pages that
// its tiles fit, and more heads than a block of attn_decode takes.
bool td_cuda_takes_latents(const td_cu_attn_decode_args *a, bool has_wgmma);
// Whether delta_chunks or, with a decay for each channel, delta_channels computes this of prompts:
// keys that fill more than half of its 128 elements, rows in runs of 16 bytes, and pages that end
// where chunks do.
bool td_cuda_takes_delta_chunks(const td_delta_rule_op_args *a);
// Least keys per split for a step's number of tokens, and the most splits of a sequence of at most
// max_keys.
uint32_t td_cuda_latent_keys(uint32_t n_tokens);
uint32_t td_cuda_latent_splits(uint32_t max_keys, uint32_t least);
// Whether one block computes TD_CU_FOLDED splits and leaves their merged sum: yes where this
// smaller number of blocks still keeps all SMs busy. n_blocks: per token and split.
bool td_cuda_folds_by_block(uint32_t n_tokens, uint32_t n_blocks, uint32_t n_splits,
                            uint32_t n_sms);
// SMs of the share that a prefill has beside decode; 0: the GPU is too small for one. A quarter, or
// more as the driver rounds, is left to decode alone: with few tokens it waits for memory and for
// the CPU's experts, not for SMs, whereas prefill is limited by its SMs.
uint32_t td_cuda_share_sms(uint32_t n_sms, int capability);
// Tokens of a page of n gathered entries, or of a split: so that no tile of keys crosses it.
uint32_t td_cuda_page_of(uint32_t n);
// The largest number of visible positions of any token in the batch.
uint32_t td_cuda_max_keys(const td_batch_view *b);
// Lists the sequences, from `first` on, whose prefill is one launch: up to most_keys keys in total,
// at least one sequence; exactly one if the batch has no host copy. Keys before the window (0:
// none) of a sequence's first token are left out, if the batch has a host copy. Returns the first
// sequence not listed.
uint32_t td_cuda_list_prompts(const td_batch_view *b, uint32_t first, uint32_t window,
                              size_t most_keys, td_cu_prefill_list *out);

// Rows [row0, row0 + n_rows) of w (device memory) times n_tokens activation rows.
typedef struct {
  const td_weight *w;
  td_vec bias; // device memory
  const void *x;
  void *y;
  size_t x_stride, y_stride;
  uint32_t n_tokens, row0, n_rows;
  bool y_f32;
  bool add;       // y += ; linear_vec alone can
  bool is_prompt; // the tokens belong to prompts, so x may be rounded
} td_cuda_matmul;
td_status td_cuda_run_matmul(td_cuda_stream *stream, const td_cuda_matmul *m, td_err *err);
// attn.c: how many of n heads or tokens, each_bytes of scratch each, fit keys_bytes; at least 1.
uint32_t td_cuda_at_once(const td_cuda_stream *stream, uint32_t n, size_t each_bytes);
// Attention of a few queries a sequence, each of which sees max_keys keys at most: chooses the
// splits, unless args have n_splits and split_keys already, allocates scratch for them, and
// launches for as many tokens at a time as fit.
td_status td_cuda_run_decode(td_cuda_stream *stream, td_cu_attn_decode_args *args,
                             uint32_t max_keys, td_err *err);

// a8.c: activations in E4M3 or INT8, see td_cu_round_a8_args.
typedef struct {
  uint8_t *codes;
  float *scales;
} td_cuda_a8;
// Whether a matrix takes n_prompt tokens of prompts so. Few tokens wait for weights, not for
// arithmetic.
bool td_cuda_rounds(const td_cuda_dev *dev, const td_weight *w, uint32_t n_prompt);
size_t td_cuda_a8_bytes(size_t n_rows, uint32_t cols); // of memory for td_cuda_a8_at
td_cuda_a8 td_cuda_a8_at(void *memory, size_t n_rows, uint32_t cols);
// By wgmma where the GPU has it.
td_status td_cuda_launch_a8(td_cuda_stream *stream, const td_cu_linear_args *args, td_err *err);
// n matmuls with the same x and n_tokens.
td_status td_cuda_run_a8(td_cuda_stream *stream, const td_cuda_matmul *m, uint32_t n, td_err *err);
// blas.c: whether cuBLAS is available and can compute this matmul.
bool td_cuda_takes_blas(td_cuda_stream *stream, const td_cuda_matmul *m);
td_status td_cuda_run_blas(td_cuda_stream *stream, const td_cuda_matmul *m, td_err *err);

#define X(NAME, name, args_type, ...)                                                              \
  td_status td_cuda_op_##name(td_cuda_stream *stream, args_type *args, td_err *err);
TD_OPS(X) // they put device addresses in place of those of the host
#undef X

// Refuses more of something than kernels take; what: the begin of the message, with its %u.
#define TD_CUDA_MOST(n, most, what)                                                                \
  do {                                                                                             \
    if ((n) > (most))                                                                              \
      return td_fail(err, TD_EUNSUPPORTED, what "; on a GPU at most %d", (n), (most));             \
  } while (0)

// Launches an operator of the library's table on the stream.
#define TD_CUDA_LAUNCH(stream, name, args)                                                         \
  td_cuda_result(td_cuda_dev_of(stream), td_cuda_dev_of(stream)->abi->name((args), (stream)->cu),  \
                 #name, err)
