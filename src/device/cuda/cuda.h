// src/device/cuda/cuda.h - the CUDA device's insides, shared by its files.
// Everything of CUDA lies in a library that is loaded when a CUDA device is opened
// (kernels/cuda/abi.h); this is plain C over its table. A stream is a CUDA stream; operators are
// checked and launched on the caller's thread. What only the GPU can see to be wrong (an id out of
// range) is left in the stream's fault word and reported by td_stream_sync.
//
// Weights lie in host memory. A matrix is copied to the GPU when it is first used and found again
// by its address; it must not change until the device is closed.
#ifndef TD_DEVICE_CUDA_CUDA_H
#define TD_DEVICE_CUDA_CUDA_H

#include <pthread.h>

#include "device/check.h"
#include "kernels/cuda/abi.h"

enum { CUDA_OUT_OF_MEMORY = 2 }; // cudaErrorMemoryAllocation

// What a stream's operators need besides their arguments; grown on demand, kept until it closes.
typedef enum {
  CUDA_SCRATCH_SORT,    // MoE: pairs in order of expert, tiles
  CUDA_SCRATCH_GATE_UP, //
  CUDA_SCRATCH_HIDDEN,  //
  CUDA_SCRATCH_PARTS,   // MoE: a row a pair; attention: sums of splits; ranking: best of slices
  CUDA_SCRATCH_ML,      // attention: maxima and weights of splits; ranking: sums of slices
  CUDA_SCRATCH_QUERY,   // MLA: absorbed queries
  CUDA_SCRATCH_LATENT,  // MLA: a sequence's latents, or attention over them
  CUDA_SCRATCH_KEYS,    // prefill: keys and values of some heads
  CUDA_SCRATCH_WEIGHT,  // a piece of a matrix as BF16
  N_CUDA_SCRATCH
} td_cuda_scratch_slot;

// Host memory and its copy on the GPU.
typedef struct {
  const void *host;
  void *device;
  size_t n_bytes;
} td_cuda_copy;

// One layer's experts, or some of them, as the kernels read them.
typedef struct {
  const void *key;          // the first gate's data, or the first gate that is on the device
  td_weight *device;        // [3][n_experts]: gates, ups, downs
  td_weight gate, up, down; // the first ones, in device memory
  uint32_t n_experts;
  td_cu_read read_gate, read_down; // what all of them allow
} td_cuda_experts;

// A piece of the weights' memory, as far as it is registered with the driver.
typedef enum { CUDA_PIN_PENDING, CUDA_PIN_DONE, CUDA_PIN_REFUSED } td_cuda_pin_state;

typedef struct {
  const char *host;
  size_t n_bytes;
  td_cuda_pin_state state;
  bool is_wanted; // before others
} td_cuda_pin_piece;

enum { CUDA_PIN_BYTES = 1 << 30 };

typedef struct {
  const char *base, *grid; // the memory; where the first piece begins, or would
  size_t n_bytes, piece_bytes;
  td_cuda_pin_piece *pieces; // NULL: nothing is to be registered
  size_t n;
  pthread_t thread;
  bool has_thread, is_left_registered; // at close
  bool needs_writing;                  // the thread's: mappings must be writable meanwhile
  _Atomic size_t n_pending;            // written with the lock held

  pthread_mutex_t lock; // guards the pieces' state and what follows
  pthread_cond_t moved;
  bool is_stopping;
} td_cuda_pins;

typedef struct {
  td_dev base;
  void *library;
  const td_cu_abi *abi;
  int index; // the GPU's, from 0
  td_cu_props props;
  int node; // of NUMA, beside it; -1: any
  td_cu_stream upload;
  _Atomic uint32_t *pulse; // NULL: nobody looks
  size_t pass_bytes;       // of scratch memory, for which experts' pairs are cut into rounds
  size_t keys_bytes;       // likewise: heads of a prompt's attention, tokens of an answer's
  size_t page_bytes;       // the GPU's memory comes in pages of so many
  uint64_t await_ns;       // that a stream waits for a signal
  td_cuda_pins pins;

  pthread_mutex_t lock; // guards what follows
  td_cuda_copy *copies; // open addressing, a power of two of slots; host NULL: free
  size_t n_copies, n_slots;
  size_t copied_bytes;
  void **pieces; // of the GPU's memory, in which the copies lie
  size_t n_pieces;
  char *shared_piece; // what is left of the newest that many copies share
  size_t shared_bytes;
  void *staging; // of the GPU's memory: weights before they are brought into rows
  size_t staging_bytes;
  td_cuda_experts *experts;
  size_t n_experts;
  void *blas_library; // cuBLAS; NULL: not sought yet, or not there
  bool is_blas_sought;
} td_cuda_dev;

enum { N_CUDA_GRAPHS = 64, N_CAPTURES_REFUSED = 3, N_CUDA_RETIRED = 16 };

// Work that was queued under a key.
typedef struct {
  td_work_key key;
  td_cu_graph graph; // NULL: it came once so far
  bool is_used;
} td_cuda_graph;

// Pairs that lie in order in CUDA_SCRATCH_SORT.
typedef struct {
  const int32_t *ids; // NULL: none
  uint32_t n_tokens, top_k, n_experts, tile_tokens;
} td_cuda_sorted;

typedef struct {
  td_stream base;
  td_cu_stream cu;
  td_err err;      // the first failure; code TD_OK without
  int32_t *fault;  // host memory that kernels write to
  td_cu_blas blas; // NULL: not wanted so far, or not there
  bool is_blas_tried;
  td_cuda_graph graphs[N_CUDA_GRAPHS];
  uint32_t next_graph; // the oldest
  bool is_capturing;
  uint32_t n_refused; // captures in a row; from N_CAPTURES_REFUSED on there are no more
  td_cuda_sorted sorted;
  void *scratch[N_CUDA_SCRATCH];
  size_t scratch_bytes[N_CUDA_SCRATCH];
  void *retired[N_CUDA_RETIRED]; // scratch that has grown: freed when what is queued has run
  uint32_t n_retired;
} td_cuda_stream;

typedef struct {
  td_event base;
  td_cu_event cu;
} td_cuda_event;

static inline td_cuda_dev *td_cuda_dev_of(const td_cuda_stream *stream) {
  return (td_cuda_dev *)stream->base.dev;
}

// Makes the device the calling thread's. Whatever makes memory, streams or events or queues work
// begins with it. A failure is that of what follows.
static inline void td_cuda_use(const td_cuda_dev *dev) {
  dev->abi->use(dev->index);
}

// TD_OK for code 0; else the runtime's words for it. TD_ENOMEM where memory is what lacks.
td_status td_cuda_result(const td_cuda_dev *dev, int code, const char *what, td_err *err);

// library.c: the table, from TANDEM_CUDA_LIB or the file beside the program. TD_EUNSUPPORTED: there
// is no library, or not this program's, or no GPU.
td_status td_cuda_library_open(td_cuda_dev *dev, td_err *err);
void td_cuda_library_close(td_cuda_dev *dev);
// find_blas.c: a function of cuBLAS, the library's own or that of an installed one; NULL: none. ctx
// is a td_cuda_dev. A td_cu_symbol_fn.
void *td_cuda_blas_symbol(void *ctx, const char *name);
void *td_cuda_find_blas(const char *path, int cuda_major); // path: folders of programs, as PATH

// pin.c: td_dev_pin and its questions.
void td_cuda_pin(td_dev *dev, const void *host, size_t n_bytes);
bool td_cuda_is_pinning(td_dev *dev, const void *host, size_t n_bytes);
void td_cuda_wait_pinned(td_dev *dev, const void *host, size_t n_bytes);
void td_cuda_stop_pinning(td_dev *dev);
size_t td_cuda_pinned_bytes(td_cuda_dev *dev); // so far
void td_cuda_pins_close(td_cuda_dev *dev);
// Queues a copy; n_bytes > 0. In parts where src is in several pieces: the driver refuses a range
// that is not all of one registration, or of none.
int td_cuda_copy_from(const td_cuda_dev *dev, void *dst, const void *src, size_t n_bytes,
                      td_cu_stream stream);

// stream.c
td_status td_cuda_stream_open(td_stream **out, td_dev *dev, td_err *err);
void td_cuda_stream_close(td_stream *stream);
td_status td_cuda_stream_sync(td_stream *stream, td_err *err);
td_status td_cuda_event_open(td_event **out, td_dev *dev, td_err *err);
void td_cuda_event_close(td_event *event);
void td_cuda_event_record(td_event *event, td_stream *stream);
void td_cuda_stream_wait(td_stream *stream, td_event *event);
void td_cuda_event_sync(td_event *event);
void td_cuda_enqueue(td_stream *stream, const td_op *op);
// graph.c
void td_cuda_stream_run(td_stream *stream, const td_work_key *key, void (*enqueue)(void *ctx),
                        void *ctx);
void td_cuda_graphs_drop(td_cuda_stream *stream); // the memory that they know is to be freed
// At least n_bytes, content undefined; valid until the slot is asked for again.
td_status td_cuda_scratch(td_cuda_stream *stream, td_cuda_scratch_slot slot, size_t n_bytes,
                          void **out, td_err *err);

// weights.c: the same matrix, vector or memory on the GPU; a matrix always in TD_LAYOUT_ROWS.
// n_bytes 0 or host NULL gives NULL.
td_status td_cuda_on_device(td_cuda_dev *dev, const void *host, size_t n_bytes, const void **out,
                            td_err *err);
td_status td_cuda_weight(td_cuda_dev *dev, const td_weight *host, const char *what, td_weight *out,
                         td_err *err);
td_status td_cuda_vec(td_cuda_dev *dev, const td_vec *host, td_vec *out, td_err *err);
td_status td_cuda_experts_of(td_cuda_dev *dev, const td_moe_args *a, td_cuda_experts *out,
                             td_err *err);
bool td_cuda_takes_on_device(const td_dev *dev, const td_weight *w);
void td_cuda_weights_close(td_cuda_dev *dev); // all copies; what is used again is copied again

// heuristics.c: pure choices.
// How weights of this format can be read; x_aligned: activations may be read 16 bytes at a time.
td_cu_read td_cuda_read_of(const td_weight *w, bool x_aligned);
// Whether n_tokens tokens, the most one matrix sees, are for linear_mma. Weights that BF16 does not
// hold are not; others are when linear_vec, TD_CU_VEC_TOKENS at a time, would read them too often.
bool td_cuda_use_mma(const td_weight *w, uint32_t n_tokens);
// Whether they are for cuBLAS, where it can be used: weights in BF16 from the first that linear_vec
// does not compute at once, others when there are enough tokens to make up for writing them as
// BF16.
bool td_cuda_use_blas(const td_weight *w, uint32_t n_tokens);
// Of n_tiles of a group of experts, those that get blocks of their own in the round behind skip;
// the group probably has n_likely. Rounds that most likely have none cost little.
uint32_t td_cuda_tiles_at_once(uint32_t skip, uint32_t n_tiles, uint32_t n_likely);
// Rows of n_rows that are written as BF16 at a time: a multiple of 8, or all.
uint32_t td_cuda_piece_rows(const td_weight *w, uint32_t n_rows);
uint32_t td_cuda_vec_tokens(uint32_t n_tokens); // tokens a tile of linear_vec has
// Warps of its blocks, so that SMs have TD_CU_VEC_WARPS of them however few rows there are, and the
// last blocks do not leave most of them idle. Sums hang on it, so it does not on the number of
// tokens.
uint32_t td_cuda_vec_warps(uint32_t n_rows, bool of_experts, uint32_t n_sms);
// Keys of a split and their number for contexts of at most max_keys. The same for all contexts that
// one power of two holds, so that sums do not depend on the neighbours of a sequence.
// n_blocks: that a split of one token has.
void td_cuda_splits(uint32_t max_keys, uint32_t n_blocks, uint32_t *split_keys, uint32_t *n_splits);
// Whether a block takes TD_CU_FOLDED splits and leaves the sum of them: where so few blocks, of
// n_blocks a token and split, still keep all SMs busy.
bool td_cuda_folds_by_block(uint32_t n_tokens, uint32_t n_blocks, uint32_t n_splits,
                            uint32_t n_sms);
// Positions that no token of the batch sees more of.
uint32_t td_cuda_max_keys(const td_batch_view *b);
// The sequences from first on whose prefill is one launch: as many as have most_keys keys in all,
// one at least; just one where the host does not have the batch. Returns the first one left.
uint32_t td_cuda_list_prompts(const td_batch_view *b, uint32_t first, size_t most_keys,
                              td_cu_prefill_list *out);

// Rows [row0, row0 + n_rows) of w (device memory) times n_tokens activations.
typedef struct {
  const td_weight *w;
  td_vec bias; // device memory
  const void *x;
  void *y;
  size_t x_stride, y_stride;
  uint32_t n_tokens, row0, n_rows;
  bool y_f32;
} td_cuda_matmul;
td_status td_cuda_run_matmul(td_cuda_stream *stream, const td_cuda_matmul *m, td_err *err);
// blas.c: whether cuBLAS is there and takes this one.
bool td_cuda_takes_blas(td_cuda_stream *stream, const td_cuda_matmul *m);
td_status td_cuda_run_blas(td_cuda_stream *stream, const td_cuda_matmul *m, td_err *err);

#define X(NAME, name, args_type)                                                                   \
  td_status td_cuda_op_##name(td_cuda_stream *stream, const args_type *args, td_err *err);
TD_DEVICE_OPS(X)
#undef X

// Launches an operator of the table on the stream.
#define TD_CUDA_LAUNCH(stream, name, args)                                                         \
  td_cuda_result(td_cuda_dev_of(stream), td_cuda_dev_of(stream)->abi->name((args), (stream)->cu),  \
                 #name, err)

#endif
