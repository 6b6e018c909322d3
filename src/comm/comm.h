// src/comm/comm.h - collectives between ranks of this process, each of which has one device.
//
// Every rank calls the same collectives with the same sizes in the same order; a call that differs
// aborts the group. A call only queues work on a stream of the rank's device. It may block until
// other ranks have queued theirs, so each rank needs a thread.
//
// Results are the same bits on every run and with every back end: data is copied, and sums are made
// from parts in BF16, added in f32 in the order of ranks.
//
// Failures: a rank that fails calls td_comm_abort. Then streams no longer wait for other ranks,
// further calls fail, and td_comm_check tells why, in one sentence. A stream may have succeeded
// with incomplete data: results count when td_comm_check says so on every rank behind its sync. An
// aborted group can only be closed.
#pragma once

#include <assert.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "device/device.h"

enum { TD_COMM_MAX_RANKS = 8 };
static_assert((int)TD_COMM_MAX_RANKS <= (int)TD_MAX_SUM_PARTS, "a sum has a part of each rank");

typedef struct td_comm td_comm; // one rank's end

typedef struct {
  // "host": through memory of the host, any devices
  // "nccl": a GPU of its own for each rank
  // "auto": nccl if every rank can, else, or if NCCL fails to open, host
  const char *backend;
  uint32_t n_ranks;   // 1 to TD_COMM_MAX_RANKS
  size_t piece_bytes; // a transfer is cut into pieces of at most this size; 0: 4 MiB
} td_comm_opts;

// Opens all ranks: out[r] is on devs[r]. On error out is all NULL.
td_status td_comm_open(td_comm **out, td_dev *const *devs, const td_comm_opts *opts, td_err *err);

// After the streams of all ranks have been synced. NCCL waits for the other ranks to close, for a
// few seconds: all close together. NULL is legal, and as an entry.
void td_comm_close(td_comm *comm);
void td_comm_close_all(td_comm *const *comms, uint32_t n);

// Ends what all ranks wait for; the first reason stays. Any thread.
void td_comm_abort(td_comm *comm, const char *why);
// TD_OK, or the reason why the group was aborted. Any thread.
td_status td_comm_check(td_comm *comm, td_err *err);

uint32_t td_comm_rank(const td_comm *comm);
uint32_t td_comm_n_ranks(const td_comm *comm);
const char *td_comm_backend(const td_comm *comm); // "host" or "nccl"

// Called by a collective after it has queued a piece: [begin, end) of each rank's block, as far as
// the block goes, is complete where the stream now is. An event recorded here lets another stream
// begin with what has arrived.
typedef void (*td_comm_arrival)(void *ctx, size_t begin, size_t end);

// all = the blocks of all ranks, one behind the other. mine may be this rank's block in all.
typedef struct {
  const void *mine;
  void *all;
  const size_t *n_bytes;      // [n_ranks], of each rank's block; may be 0
  td_comm_arrival on_arrival; // NULL: none; in bytes
  void *ctx;
} td_all_gather_args;
td_status td_comm_all_gather(td_comm *comm, td_stream *stream, const td_all_gather_args *args,
                             td_err *err);

// out = this rank's block of the sum over all ranks. part has all blocks, one behind the other.
typedef struct {
  const float *part;
  void *out;       // f32 or BF16; may be elsewhere in host memory, but not in part
  const size_t *n; // [n_ranks], elements of each block; may be 0
  bool out_f32;
  td_comm_arrival on_arrival; // NULL: none; in elements
  void *ctx;
} td_reduce_scatter_args;
td_status td_comm_reduce_scatter(td_comm *comm, td_stream *stream,
                                 const td_reduce_scatter_args *args, td_err *err);

// out = the sum over all ranks of part, n elements, rounded once to f32 or BF16. out is not part.
td_status td_comm_all_reduce(td_comm *comm, td_stream *stream, const float *part, void *out,
                             size_t n, bool out_f32, td_err *err);

// data of rank root replaces that of all others.
td_status td_comm_broadcast(td_comm *comm, td_stream *stream, void *data, size_t n_bytes,
                            uint32_t root, td_err *err);
