// src/comm/comm_impl.h - what the back ends share: a rank's end, and the group.
#pragma once

#include <pthread.h>
#include <stdatomic.h>

#include "comm/comm.h"

enum {
  COMM_REASON_BYTES = TD_ERR_BYTES,
  COMM_ID_BYTES = 128,
  COMM_CALLS = 64, // latest calls of a rank that others compare theirs with
  // Up to here every rank gets the parts of all others and adds them up itself: one exchange
  // instead of two, but more bytes from three ranks on. Break-even of four CPU devices; not
  // measured on GPUs.
  COMM_SMALL_BYTES = 64 << 10,
  COMM_TICK_MS = 20, // how often a rank looks after the others
};

// What a rank tells the others. Written by it before has_joined (release; others acquire), calls
// later.
typedef struct {
  _Atomic uint32_t has_joined;
  int32_t gpu; // index; -1: none
  bool has_nccl;
  void *area;               // of host_memory.c
  _Atomic uint32_t is_open; // area is there, and its back end ready (release; others acquire)
  // Call c is in entry c % COMM_CALLS: c + 1 in the high half, a hash of its arguments in the low.
  _Atomic uint64_t calls[COMM_CALLS];
} comm_rank_info;

typedef struct {
  _Atomic uint32_t n_refs;
  uint32_t n_ranks;
  const char *backend; // as asked for; while ranks open
  size_t piece_bytes;
  _Atomic uint32_t abort_state; // 0; 1: the reason is being written; 2: it is there (release)
  char reason[COMM_REASON_BYTES];
  _Atomic uint32_t has_id; // id is there (release); rank 0 writes it
  unsigned char id[COMM_ID_BYTES];
  comm_rank_info ranks[TD_COMM_MAX_RANKS];
} comm_group;

typedef struct {
  const char *name;
  // After all have joined. On error the rank is closed without `close`.
  td_status (*open)(td_comm *comm, td_err *err);
  void (*close)(td_comm *comm);
  td_status (*all_gather)(td_comm *comm, td_stream *stream, const td_all_gather_args *args,
                          td_err *err);
  td_status (*reduce_scatter)(td_comm *comm, td_stream *stream, const td_reduce_scatter_args *args,
                              td_err *err);
  // td_comm_all_reduce of at most COMM_SMALL_BYTES, and a piece, as BF16. NULL: nothing faster than
  // the other two.
  td_status (*reduce_small)(td_comm *comm, td_stream *stream, const float *part, void *out,
                            size_t n, bool out_f32, td_err *err);
  td_status (*broadcast)(td_comm *comm, td_stream *stream, void *data, size_t n_bytes,
                         uint32_t root, td_err *err);
  // By the rank's watcher thread, every COMM_TICK_MS: aborts on a failure of its own.
  void (*poll)(td_comm *comm);   // NULL: nothing to do
  void (*cancel)(td_comm *comm); // once, after an abort: ends what this rank waits for
} comm_backend;

struct td_comm {
  comm_group *group;
  td_dev *dev;
  uint32_t rank, n_ranks;
  const comm_backend *backend; // NULL until all have joined
  void *state;                 // the back end's
  uint32_t n_calls;

  pthread_t watcher;
  bool has_watcher;
  _Atomic bool is_closing, is_ready; // is_ready: backend and state may be used by the watcher
};

extern const comm_backend comm_host, comm_nccl;

// Whether libnccl can be used here.
bool comm_nccl_is_there(void);

// Waits until *flag is not zero; TD_ECANCELED with the reason when the group is aborted.
td_status comm_wait_flag(td_comm *comm, const _Atomic uint32_t *flag, td_err *err);
bool comm_is_aborted(const comm_group *group);

// A block is cut into pieces of `most`; piece p of a block of n is [begin, begin + length).
typedef struct {
  size_t begin, length;
} comm_span;

static inline comm_span comm_piece(size_t n, size_t most, size_t p) {
  const size_t begin = p * most < n ? p * most : n;
  return (comm_span){.begin = begin, .length = n - begin < most ? n - begin : most};
}

static inline size_t comm_largest(const size_t *n, uint32_t n_ranks) {
  size_t most = 0;
  for (uint32_t r = 0; r < n_ranks; r++)
    most = n[r] > most ? n[r] : most;
  return most;
}

static inline size_t comm_before(const size_t *n, uint32_t rank) {
  size_t sum = 0;
  for (uint32_t r = 0; r < rank; r++)
    sum += n[r];
  return sum;
}
