// src/device/cpu/cpu.h - internals of the CPU device, shared by its files.
// A stream is a thread with a bounded ring of operators, each of which runs on the device's thread
// pool. Concurrent streams share the pool, one parallel part of an operator at a time. An event is
// a position in a stream. Stream structs are freed only by td_dev_close, so an event can refer to a
// closed stream, and waiting compares two counters.
#pragma once

#include <pthread.h>

#include "base/jitter.h"
#include "base/thread_pool.h"
#include "device/check.h"
#include "device/cpu/tile_map.h"
#include "device/cpu/tuner.h"
#include "tandem/kernels.h"

// Per-stream scratch buffers of operators; grown on demand, kept until the device closes.
typedef enum {
  SCRATCH_ITEMS, // lists of work items
  SCRATCH_ORDER, // MoE: pairs sorted by expert
  SCRATCH_X,     // MoE: BF16 activations widened to f32
  SCRATCH_GATE,
  SCRATCH_UP,
  SCRATCH_PARTS,  // partial results
  SCRATCH_MEMBER, // one piece per member of the pool
  SCRATCH_QUERY,  // absorbed queries
  SCRATCH_LATENT, // attention over latents, before the value rows
  SCRATCH_RUNS,   // runs of tiles, by NUMA node
  SCRATCH_HALVES, // MoE: whether one of gate and up is done
  N_SCRATCH
} td_cpu_scratch_slot;

typedef struct td_cpu_dev {
  td_dev base;
  td_nodes nodes;
  td_thread_pool *pool; // spread over the NUMA nodes
  td_stripes stripes;   // of weights
  td_dev_reads *reads;  // NULL: not counted
  td_cpu_tuner *tuner;
  pthread_mutex_t lock;          // guards streams
  struct td_cpu_stream *streams; // open and closed ones, for reuse
} td_cpu_dev;

// Tiles taken from a member's share of a part: low 32 bits from the front, high 32 bits from the
// back.
typedef struct {
  _Alignas(64) _Atomic uint64_t taken;
} td_cpu_tile_range;

enum { CPU_RING = TD_STREAM_DEPTH }; // commands queued before the caller waits

typedef struct td_cpu_stream td_cpu_stream;

typedef enum { CMD_OP, CMD_WAIT, CMD_MARK } td_cpu_cmd_kind;

typedef struct {
  td_cpu_cmd_kind kind;
  td_op op; // CMD_OP
  // CMD_WAIT: wait until this stream has completed wait_n_completed commands
  td_cpu_stream *wait_for;
  uint64_t wait_n_completed; //
} td_cpu_cmd;

struct td_cpu_stream {
  td_stream base;
  td_cpu_stream *next; // in td_cpu_dev.streams
  bool open;           // guarded by td_cpu_dev.lock

  pthread_t thread;
  td_jitter jitter;     // of the stream's thread
  pthread_mutex_t lock; // guards what follows
  pthread_cond_t work;  // signals the stream's thread
  pthread_cond_t moved; // wakes waiters for n_completed, once it reaches awaited
  uint64_t n_queued, n_completed;
  uint64_t awaited; // the smallest n_completed waited for; UINT64_MAX: none
  bool idle, stopping;
  td_err err; // the first failure; TD_OK if none

  td_cpu_cmd *ring;          // [CPU_RING]
  td_cpu_tile_range *shares; // [TD_CPU_MAX_PARTS][members of the pool]
  void *scratch[N_SCRATCH];
  size_t scratch_bytes[N_SCRATCH];
};

struct td_cpu_event {
  td_event base;
  pthread_mutex_t lock;
  td_cpu_stream *stream; // NULL: never recorded
  uint64_t n_completed;  // of stream, when the event is done
};

td_status td_cpu_stream_open(td_stream **out, td_dev *dev, td_stream_kind kind, td_err *err);
void td_cpu_stream_close(td_stream *stream);
void td_cpu_stream_free(td_cpu_stream *stream); // after close
td_status td_cpu_stream_sync(td_stream *stream, td_err *err);
void td_cpu_enqueue(td_stream *stream, const td_op *op);
td_status td_cpu_event_open(td_event **out, td_dev *dev, td_err *err);
void td_cpu_event_close(td_event *event);
void td_cpu_event_record(td_event *event, td_stream *stream);
void td_cpu_stream_wait(td_stream *stream, td_event *event);
void td_cpu_event_sync(td_event *event);
bool td_cpu_event_is_done(td_event *event);

// Runs one operator, on the stream's thread.
td_status td_cpu_execute(td_cpu_stream *stream, const td_op *op, td_err *err);

// td_cpu_execute with a trace span while tracing is on.
td_status td_cpu_execute_traced(td_cpu_stream *stream, const td_op *op, td_err *err);

static inline td_cpu_dev *td_cpu_dev_of(const td_cpu_stream *stream) {
  return (td_cpu_dev *)stream->base.dev;
}

// At least n_bytes, 64-byte aligned, content undefined. Valid until the same slot is requested
// again.
td_status td_cpu_scratch(td_cpu_stream *stream, td_cpu_scratch_slot slot, size_t n_bytes,
                         void **out, td_err *err);

// Calls fn(ctx, item, member) for every item below n_items. The pool takes items one by one in
// ascending order, so an item may wait for lower ones, which are done or running.
void td_cpu_for(td_cpu_stream *stream, size_t n_items,
                void (*fn)(void *ctx, size_t item, unsigned member), void *ctx);

// One iteration of a spin loop that waits for another thread. Yields after many iterations, because
// there may be more threads than CPUs.
void td_cpu_wait_turn(unsigned n_waits);

#define TD_CPU_NO_ITEM SIZE_MAX

typedef struct {
  const td_cpu_part *parts; // [n_parts], at most TD_CPU_MAX_PARTS
  size_t n_parts;
  void (*fn)(void *ctx, size_t item, size_t next, unsigned member);
  // The memory of a matrix of a part; NULL: none is known.
  td_cpu_rows (*rows)(const void *ctx, size_t part, size_t matrix);
  void *ctx; // of both
} td_cpu_tiles;

// Calls fn(ctx, item, next, member) for every item; an item may wait for items of earlier parts.
// Each member has a share of every part, tiles in order, and takes from its front. next is the item
// it computes afterwards, for prefetching, or TD_CPU_NO_ITEM. A member whose share is empty steals
// from the back of others' shares, of members on its own NUMA node first. A member's share holds
// tiles whose rows are on its own node (tile_map.h). TD_ENOMEM.
td_status td_cpu_parallel_tiles(td_cpu_stream *stream, const td_cpu_tiles *tiles, td_err *err);
// At most tile_rows, so that a stripe of the weights' memory has many tiles of the matrix.
uint32_t td_cpu_tile_rows(const td_cpu_dev *dev, const td_weight *w, uint32_t tile_rows);
// Of a matrix in tiles of tile_rows rows, n_rows in all, the first at row_begin.
td_cpu_rows td_cpu_rows_of(const td_weight *w, size_t row_begin, size_t tile_rows, size_t n_rows);

// Start of piece i when n things are cut into n_pieces as evenly as possible.
static inline uint32_t td_cpu_cut(uint32_t n, uint32_t i, uint32_t n_pieces) {
  return (uint32_t)((uint64_t)n * i / n_pieces);
}

// Address where a matrix's rows from `row` on begin.
static inline const void *td_cpu_rows_at(const td_weight *w, uint32_t row) {
  return (const char *)w->data + row * td_weight_row_bytes(w);
}

// TD_EINVAL unless the kernels can read the matrix.
td_status td_cpu_check_weight(const td_weight *w, const char *what, td_err *err);
// TD_EINVAL unless the batch's arrays are consistent and its positions, of these rows each, fit the
// pages.
td_status td_cpu_check_batch(const td_batch_view *batch, const td_kv_view *kv, td_kv_rows rows,
                             td_err *err);

// Runs the linear kernel of the weight's dtype on the calling thread.
void td_cpu_linear_tile(const td_linear_args *args);

#define X(NAME, name, args_type, ...)                                                              \
  td_status td_cpu_op_##name(td_cpu_stream *stream, const args_type *args, td_err *err);
TD_OPS(X)
#undef X
