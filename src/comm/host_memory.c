// src/comm/host_memory.c - the back end through memory of the host.
// Every rank has an area with an outbox of a few slots. It copies a piece into a slot and raises a
// signal; the others copy out of it and raise one each, after which the slot is free again. All of
// it is queued on the ranks' streams, so nothing blocks a thread, and no order of the streams can
// deadlock: a rank queues the filling of slot k + 1 before the emptying of slot k, and either waits
// only for what other ranks have queued earlier in this same order.
#include <stdlib.h>
#include <string.h>

#include "comm/comm_impl.h"

enum { HOST_SLOTS = 3 };

// A signal and its value, on a cache line of its own. Laps through the outbox alternate between 1
// and 2, and no one is more than a lap ahead, so that equality tells them apart.
typedef struct {
  _Alignas(64) _Atomic uint32_t value;
} line;

typedef struct {
  line canceled;                             // the rank's streams end their waiting
  line filled[HOST_SLOTS];                   // by the rank
  line taken[HOST_SLOTS][TD_COMM_MAX_RANKS]; // by the others
  uint32_t laps[16];                         // {1, 2}: what signals are set to
  _Alignas(64) char outbox[];                // [HOST_SLOTS][piece_bytes]
} comm_area;

typedef struct {
  comm_area *own, *areas[TD_COMM_MAX_RANKS];
  size_t piece_bytes;
  uint64_t n_filled[TD_COMM_MAX_RANKS]; // slots that each rank has filled so far
} host_state;

static td_status place_area(td_comm *comm, host_state *s, td_err *err) {
  comm_rank_info *info = &comm->group->ranks[comm->rank];
  const size_t n_bytes = sizeof(comm_area) + HOST_SLOTS * s->piece_bytes;
  td_status st = td_dev_alloc_host(comm->dev, &info->area, n_bytes, err);
  if (st != TD_OK) return st;
  s->own = info->area;
  memset(s->own, 0, sizeof *s->own);
  s->own->laps[0] = 1, s->own->laps[1] = 2;
  atomic_store_explicit(&info->is_open, 1, memory_order_release);
  return TD_OK;
}

static td_status find_areas(td_comm *comm, host_state *s, td_err *err) {
  for (uint32_t r = 0; r < comm->n_ranks; r++) {
    const comm_rank_info *info = &comm->group->ranks[r];
    td_status st = comm_wait_flag(comm, &info->is_open, err);
    if (st != TD_OK) return st;
    s->areas[r] = info->area;
  }
  return TD_OK;
}

static void close_host(td_comm *comm) {
  host_state *s = comm->state;
  if (s) td_dev_free_host(comm->dev, s->own);
  free(s);
  comm->state = NULL;
}

static td_status open_host(td_comm *comm, td_err *err) {
  host_state *s = comm->state = calloc(1, sizeof *s);
  if (!s) return td_fail(err, TD_ENOMEM, "out of memory");
  s->piece_bytes = comm->group->piece_bytes;
  td_status st = place_area(comm, s, err);
  if (st == TD_OK) st = find_areas(comm, s, err);
  if (st != TD_OK) close_host(comm);
  return st;
}

static void cancel_host(td_comm *comm) {
  host_state *s = comm->state;
  atomic_store_explicit(&s->own->canceled.value, 1, memory_order_release);
}

static const uint32_t *lap_of(const host_state *s, uint64_t k) {
  return &s->own->laps[k / HOST_SLOTS % 2];
}

static void await(td_comm *comm, td_stream *stream, line *signal, uint64_t k) {
  const host_state *s = comm->state;
  td_op_await_or_cancel(stream, &signal->value, lap_of(s, k), &s->own->canceled.value);
}

static char *slot_of(const host_state *s, uint32_t rank, uint64_t k) {
  return s->areas[rank]->outbox + k % HOST_SLOTS * s->piece_bytes;
}

// The next slot of this rank's outbox, once the others have emptied it.
static char *begin_fill(td_comm *comm, td_stream *stream) {
  host_state *s = comm->state;
  const uint64_t k = s->n_filled[comm->rank];
  for (uint32_t r = 0; r < comm->n_ranks && k >= HOST_SLOTS; r++)
    if (r != comm->rank) await(comm, stream, &s->own->taken[k % HOST_SLOTS][r], k - HOST_SLOTS);
  return slot_of(s, comm->rank, k);
}

static void end_fill(td_comm *comm, td_stream *stream) {
  host_state *s = comm->state;
  const uint64_t k = s->n_filled[comm->rank]++;
  td_op_signal(stream, &s->own->filled[k % HOST_SLOTS].value, lap_of(s, k));
}

// Slot k of rank r's outbox, once it is filled.
static const char *begin_take(td_comm *comm, td_stream *stream, uint32_t r, uint64_t k) {
  host_state *s = comm->state;
  await(comm, stream, &s->areas[r]->filled[k % HOST_SLOTS], k);
  return slot_of(s, r, k);
}

static void end_take(td_comm *comm, td_stream *stream, uint32_t r, uint64_t k) {
  host_state *s = comm->state;
  td_op_signal(stream, &s->areas[r]->taken[k % HOST_SLOTS][comm->rank].value, lap_of(s, k));
}

// ---- all-gather ---------------------------------------------------------------------------------

static void fill_gather(td_comm *comm, td_stream *stream, const td_all_gather_args *a, size_t p) {
  const host_state *s = comm->state;
  const comm_span own = comm_piece(a->n_bytes[comm->rank], s->piece_bytes, p);
  if (!own.length) return;
  char *slot = begin_fill(comm, stream);
  td_op_copy(stream, slot, (const char *)a->mine + own.begin, own.length);
  end_fill(comm, stream);
}

static void take_gather(td_comm *comm, td_stream *stream, const td_all_gather_args *a, size_t p) {
  host_state *s = comm->state;
  char *block = a->all;
  for (uint32_t r = 0; r < comm->n_ranks; block += a->n_bytes[r++]) {
    const comm_span piece = comm_piece(a->n_bytes[r], s->piece_bytes, p);
    if (r == comm->rank || !piece.length) continue;
    const uint64_t k = s->n_filled[r]++;
    const char *slot = begin_take(comm, stream, r, k);
    td_op_copy(stream, block + piece.begin, slot, piece.length);
    end_take(comm, stream, r, k);
  }
}

static td_status host_all_gather(td_comm *comm, td_stream *stream, const td_all_gather_args *a,
                                 td_err *err) {
  (void)err;
  const host_state *s = comm->state;
  char *own = (char *)a->all + comm_before(a->n_bytes, comm->rank);
  if (own != a->mine) td_op_copy(stream, own, a->mine, a->n_bytes[comm->rank]);
  const size_t most = comm_largest(a->n_bytes, comm->n_ranks);
  const size_t n_pieces = (most + s->piece_bytes - 1) / s->piece_bytes;
  for (size_t p = 0; p <= n_pieces; p++) {
    if (p < n_pieces) fill_gather(comm, stream, a, p);
    if (p == 0) continue;
    take_gather(comm, stream, a, p - 1);
    const comm_span piece = comm_piece(most, s->piece_bytes, p - 1);
    if (a->on_arrival) a->on_arrival(a->ctx, piece.begin, piece.begin + piece.length);
  }
  return TD_OK;
}

// ---- reduce-scatter -----------------------------------------------------------------------------

// A slot has a section for each rank, in BF16. The own one stays empty.
static size_t section_elements(const td_comm *comm) {
  const host_state *s = comm->state;
  return s->piece_bytes / comm->n_ranks / sizeof(uint16_t) & ~(size_t)31;
}

static void fill_sum(td_comm *comm, td_stream *stream, const td_reduce_scatter_args *a, size_t p) {
  const size_t section = section_elements(comm);
  uint16_t *slot = (uint16_t *)begin_fill(comm, stream);
  const float *block = a->part;
  for (uint32_t r = 0; r < comm->n_ranks; block += a->n[r++]) {
    const comm_span piece = comm_piece(a->n[r], section, p);
    if (r == comm->rank || !piece.length) continue;
    td_op_sum_parts(stream, &(td_sum_parts_args){.parts = {block + piece.begin},
                                                 .out = slot + r * section,
                                                 .n = piece.length,
                                                 .n_parts = 1,
                                                 .f32_parts = 1});
  }
  end_fill(comm, stream);
}

static void receive_sum(td_comm *comm, td_stream *stream, const td_reduce_scatter_args *a,
                        size_t p) {
  host_state *s = comm->state;
  const size_t section = section_elements(comm);
  const comm_span own = comm_piece(a->n[comm->rank], section, p);
  const float *part = a->part + comm_before(a->n, comm->rank) + own.begin;
  td_sum_parts_args sum = {.out = (char *)a->out + own.begin * (a->out_f32 ? 4 : 2),
                           .n = own.length,
                           .n_parts = comm->n_ranks,
                           .f32_parts = 1u << comm->rank,
                           .out_f32 = a->out_f32};
  sum.parts[comm->rank] = part;
  uint64_t k[TD_COMM_MAX_RANKS];
  for (uint32_t r = 0; r < comm->n_ranks; r++) {
    if (r == comm->rank) continue;
    k[r] = s->n_filled[r]++;
    sum.parts[r] = (const uint16_t *)begin_take(comm, stream, r, k[r]) + comm->rank * section;
  }
  if (own.length) td_op_sum_parts(stream, &sum);
  for (uint32_t r = 0; r < comm->n_ranks; r++)
    if (r != comm->rank) end_take(comm, stream, r, k[r]);
}

static td_status host_reduce_scatter(td_comm *comm, td_stream *stream,
                                     const td_reduce_scatter_args *a, td_err *err) {
  (void)err;
  const size_t section = section_elements(comm), most = comm_largest(a->n, comm->n_ranks);
  const size_t n_pieces = (most + section - 1) / section;
  for (size_t p = 0; p <= n_pieces; p++) {
    if (p < n_pieces) fill_sum(comm, stream, a, p);
    if (p == 0) continue;
    receive_sum(comm, stream, a, p - 1);
    const comm_span piece = comm_piece(most, section, p - 1);
    if (a->on_arrival) a->on_arrival(a->ctx, piece.begin, piece.begin + piece.length);
  }
  return TD_OK;
}

// Every rank leaves all of its part to the others, and adds up all parts.
static td_status host_reduce_small(td_comm *comm, td_stream *stream, const float *part, void *out,
                                   size_t n, bool out_f32, td_err *err) {
  (void)err;
  host_state *s = comm->state;
  if (!n) return TD_OK;
  td_op_sum_parts(
      stream,
      &(td_sum_parts_args){
          .parts = {part}, .out = begin_fill(comm, stream), .n = n, .n_parts = 1, .f32_parts = 1});
  end_fill(comm, stream);
  td_sum_parts_args sum = {.out = out,
                           .n = n,
                           .n_parts = comm->n_ranks,
                           .f32_parts = 1u << comm->rank,
                           .out_f32 = out_f32};
  sum.parts[comm->rank] = part;
  uint64_t k[TD_COMM_MAX_RANKS];
  for (uint32_t r = 0; r < comm->n_ranks; r++) {
    if (r == comm->rank) continue;
    k[r] = s->n_filled[r]++;
    sum.parts[r] = begin_take(comm, stream, r, k[r]);
  }
  td_op_sum_parts(stream, &sum);
  for (uint32_t r = 0; r < comm->n_ranks; r++)
    if (r != comm->rank) end_take(comm, stream, r, k[r]);
  return TD_OK;
}

static td_status host_broadcast(td_comm *comm, td_stream *stream, void *data, size_t n_bytes,
                                uint32_t root, td_err *err) {
  size_t sizes[TD_COMM_MAX_RANKS] = {0};
  sizes[root] = n_bytes;
  const td_all_gather_args args = {.mine = data, .all = data, .n_bytes = sizes};
  return host_all_gather(comm, stream, &args, err);
}

const comm_backend comm_host = {
    .name = "host",
    .open = open_host,
    .close = close_host,
    .all_gather = host_all_gather,
    .reduce_scatter = host_reduce_scatter,
    .reduce_small = host_reduce_small,
    .broadcast = host_broadcast,
    .cancel = cancel_host,
};
