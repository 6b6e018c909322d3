// tests/unit/comm_test.h - ranks as threads of a test, and what collectives must give, for every
// kind of device and back end.
#pragma once

#include <pthread.h>
#include <string.h>

#include "base/bf16.h"
#include "comm/comm.h"
#include "unit/ref.h"

typedef struct ranks ranks;

typedef struct {
  ranks *all;
  uint32_t rank;
  td_dev *dev;
  td_stream *stream;
  td_comm *comm;
  td_status status; // of what `run` did last
  td_err err;
  pthread_t thread;
} rank_end;

struct ranks {
  uint32_t n;
  rank_end ends[TD_COMM_MAX_RANKS];
  void *ctx;
  void (*run)(rank_end *end);
};

static void *rank_main(void *arg) {
  rank_end *end = arg;
  end->all->run(end);
  return NULL;
}

// Runs it on all ranks at once and waits for them.
static inline void run_ranks(ranks *r, void (*run)(rank_end *end), void *ctx) {
  r->run = run;
  r->ctx = ctx;
  for (uint32_t i = 0; i < r->n; i++)
    assert_int_equal(pthread_create(&r->ends[i].thread, NULL, rank_main, &r->ends[i]), 0);
  for (uint32_t i = 0; i < r->n; i++)
    pthread_join(r->ends[i].thread, NULL);
}

// devs: index 0 is used for all if one_dev.
static inline void open_ranks(ranks *r, uint32_t n, const char *kind, const char *backend,
                              size_t piece_bytes) {
  *r = (ranks){.n = n};
  td_err err;
  td_dev *devs[TD_COMM_MAX_RANKS];
  td_comm *comms[TD_COMM_MAX_RANKS];
  for (uint32_t i = 0; i < n; i++) {
    const td_dev_opts opts = {.kind = kind, .index = i, .n_threads = 1};
    if (td_dev_open(&devs[i], &opts, &err) != TD_OK) fail_msg("%s", err.msg);
  }
  const td_comm_opts opts = {.backend = backend, .n_ranks = n, .piece_bytes = piece_bytes};
  if (td_comm_open(comms, devs, &opts, &err) != TD_OK) fail_msg("%s", err.msg);
  for (uint32_t i = 0; i < n; i++) {
    r->ends[i] = (rank_end){.all = r, .rank = i, .dev = devs[i], .comm = comms[i]};
    assert_int_equal(td_stream_open(&r->ends[i].stream, devs[i], &err), TD_OK);
  }
}

static inline void close_ranks(ranks *r) {
  for (uint32_t i = 0; i < r->n; i++)
    td_stream_close(r->ends[i].stream);
  td_comm *comms[TD_COMM_MAX_RANKS];
  for (uint32_t i = 0; i < r->n; i++)
    comms[i] = r->ends[i].comm;
  td_comm_close_all(comms, r->n);
  for (uint32_t i = 0; i < r->n; i++)
    td_dev_close(r->ends[i].dev);
}

static inline void *rank_alloc(rank_end *end, size_t n_bytes) {
  void *out;
  td_err err;
  TD_CHECK(td_dev_alloc(end->dev, &out, n_bytes, &err) == TD_OK);
  return out;
}

static inline void *rank_put(rank_end *end, const void *host, size_t n_bytes) {
  void *out = rank_alloc(end, n_bytes);
  td_op_copy(end->stream, out, host, n_bytes);
  return out;
}

// The end of a test's work on a rank: its status, and what the group says.
static inline td_status rank_sync(rank_end *end) {
  td_status st = td_stream_sync(end->stream, &end->err);
  td_err why;
  if (td_comm_check(end->comm, &why) != TD_OK) st = why.code, end->err = why;
  return end->status = st;
}

static inline void rank_ok(rank_end *end, td_status st) {
  if (st != TD_OK) td_comm_abort(end->comm, end->err.msg);
  TD_CHECK(st == TD_OK);
}

// Element i of what a rank brings to a sum.
static inline float part_value(uint32_t rank, size_t i) {
  return (float)((double)((i * 2654435761u + rank * 40503u) % 100003) / 1000 - 50);
}

// Elements [begin, begin + n) of the sum over all ranks, as the contract has it.
static inline float sum_value(uint32_t n_ranks, size_t i) {
  float sum = td_bf16_value(td_bf16_of(part_value(0, i)));
  for (uint32_t r = 1; r < n_ranks; r++)
    sum += td_bf16_value(td_bf16_of(part_value(r, i)));
  return sum;
}

static inline float *make_part(uint32_t rank, size_t n) {
  float *part = malloc((n ? n : 1) * sizeof *part);
  TD_CHECK(part);
  for (size_t i = 0; i < n; i++)
    part[i] = part_value(rank, i);
  return part;
}

static inline unsigned char byte_of(uint32_t rank, size_t i) {
  return (unsigned char)(i * 7 + rank * 131 + (i >> 8));
}

typedef struct {
  size_t sizes[TD_COMM_MAX_RANKS];
} block_sizes;

static inline size_t size_before(const size_t *n, uint32_t rank) {
  size_t sum = 0;
  for (uint32_t r = 0; r < rank; r++)
    sum += n[r];
  return sum;
}

static inline void check_all_gather(rank_end *end, const size_t *sizes) {
  const size_t n = sizes[end->rank], total = size_before(sizes, end->all->n);
  unsigned char *host = malloc(total + 1);
  for (size_t i = 0; i < n; i++)
    host[i] = byte_of(end->rank, i);
  void *mine = rank_put(end, host, n), *all = rank_alloc(end, total);
  rank_ok(end, td_stream_sync(end->stream, &end->err));
  const td_all_gather_args args = {.mine = mine, .all = all, .n_bytes = sizes};
  rank_ok(end, td_comm_all_gather(end->comm, end->stream, &args, &end->err));
  td_op_copy(end->stream, host, all, total);
  rank_ok(end, rank_sync(end));
  for (uint32_t r = 0, at = 0; r < end->all->n; r++) {
    for (size_t i = 0; i < sizes[r]; i++)
      TD_CHECK(host[at++] == byte_of(r, i));
  }
  td_dev_free(end->dev, mine);
  td_dev_free(end->dev, all);
  free(host);
}

// Compares n elements of got, in host memory, with the sum's from `begin` on.
static inline void check_sum(const void *got, uint32_t n_ranks, size_t begin, size_t n, bool f32) {
  for (size_t i = 0; i < n; i++) {
    const float want = sum_value(n_ranks, begin + i);
    if (f32) {
      TD_CHECK(((const float *)got)[i] == want);
    } else {
      TD_CHECK(((const uint16_t *)got)[i] == td_bf16_of(want));
    }
  }
}

static inline void check_reduce_scatter(rank_end *end, const size_t *sizes, bool f32) {
  const size_t n = sizes[end->rank], total = size_before(sizes, end->all->n);
  float *host = make_part(end->rank, total);
  void *part = rank_put(end, host, total * sizeof *host);
  void *out = rank_alloc(end, n * sizeof(float));
  const td_reduce_scatter_args args = {.part = part, .out = out, .n = sizes, .out_f32 = f32};
  rank_ok(end, td_stream_sync(end->stream, &end->err));
  rank_ok(end, td_comm_reduce_scatter(end->comm, end->stream, &args, &end->err));
  td_op_copy(end->stream, host, out, n * (f32 ? 4 : 2));
  rank_ok(end, rank_sync(end));
  check_sum(host, end->all->n, size_before(sizes, end->rank), n, f32);
  td_dev_free(end->dev, part);
  td_dev_free(end->dev, out);
  free(host);
}

static inline void check_all_reduce(rank_end *end, size_t n, bool f32) {
  float *host = make_part(end->rank, n);
  void *part = rank_put(end, host, n * sizeof *host), *out = rank_alloc(end, n * sizeof *host);
  rank_ok(end, td_stream_sync(end->stream, &end->err));
  rank_ok(end, td_comm_all_reduce(end->comm, end->stream, part, out, n, f32, &end->err));
  td_op_copy(end->stream, host, out, n * (f32 ? 4 : 2));
  rank_ok(end, rank_sync(end));
  check_sum(host, end->all->n, 0, n, f32);
  td_dev_free(end->dev, part);
  td_dev_free(end->dev, out);
  free(host);
}

static inline void check_broadcast(rank_end *end, size_t n, uint32_t root) {
  unsigned char *host = malloc(n + 1);
  for (size_t i = 0; i < n; i++)
    host[i] = byte_of(end->rank, i);
  void *data = rank_put(end, host, n);
  rank_ok(end, td_stream_sync(end->stream, &end->err));
  rank_ok(end, td_comm_broadcast(end->comm, end->stream, data, n, root, &end->err));
  td_op_copy(end->stream, host, data, n);
  rank_ok(end, rank_sync(end));
  for (size_t i = 0; i < n; i++)
    TD_CHECK(host[i] == byte_of(root, i));
  td_dev_free(end->dev, data);
  free(host);
}

// All collectives over blocks of even, uneven and no length. ctx: the unit of sizes, size_t.
static inline void check_all_collectives(rank_end *end) {
  const size_t unit = *(const size_t *)end->all->ctx;
  size_t sizes[3][TD_COMM_MAX_RANKS];
  for (uint32_t r = 0; r < end->all->n; r++) {
    sizes[0][r] = 8 * unit;
    sizes[1][r] = r * unit + 3; // not a multiple of anything
    sizes[2][r] = r ? 0 : unit;
  }
  for (int i = 0; i < 3; i++) {
    check_all_gather(end, sizes[i]);
    check_reduce_scatter(end, sizes[i], i % 2 == 0);
  }
  check_all_reduce(end, 5 * unit + 1, false);
  check_all_reduce(end, 3, true);
  for (uint32_t root = 0; root < end->all->n; root++)
    check_broadcast(end, 3 * unit + root, root);
}
