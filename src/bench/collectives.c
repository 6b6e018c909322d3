// src/bench/collectives.c - `tandem bench comm`: the collectives of expert parallelism between
// devices of this process. GB/s counts what a rank gets from the others.
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "base/cpus.h"
#include "base/stats.h"
#include "base/thread.h"
#include "bench/bench.h"
#include "bench/report.h"
#include "comm/comm.h"
#include "runtime/command.h"

typedef enum { ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, BROADCAST, N_COLLECTIVES } collective;
static const char *const names[] = {"all_gather", "reduce_scatter", "all_reduce", "broadcast"};

enum { MAX_REPEAT = 1000 };

typedef struct comm_bench comm_bench;

typedef struct {
  comm_bench *bench;
  uint32_t rank;
  td_dev *dev;
  td_stream *stream;
  td_comm *comm;
  void *part, *out; // f32 sums, and room for n_bytes
  pthread_t thread;
} bench_rank;

struct comm_bench {
  const td_options *options;
  uint32_t n_ranks;
  size_t n_bytes;  // largest size
  collective kind; // the case that runs
  size_t size;     // of it, in bytes
  bench_rank ranks[TD_COMM_MAX_RANKS];
  pthread_barrier_t barrier;
  double seconds[MAX_REPEAT];
  td_json_writer json;
  td_buf text;
  bool is_cut; // writing a line failed
};

// Elements of BF16 on the wire; each rank has an equal block of them.
static td_status run_once(bench_rank *r, td_err *err) {
  const comm_bench *b = r->bench;
  const size_t block = b->size / b->n_ranks / 128 * 64; // elements
  size_t n[TD_COMM_MAX_RANKS], n_bytes[TD_COMM_MAX_RANKS];
  for (uint32_t i = 0; i < b->n_ranks; i++)
    n[i] = block, n_bytes[i] = block * sizeof(uint16_t);
  switch (b->kind) {
  case ALL_GATHER: {
    char *mine = (char *)r->out + r->rank * n_bytes[0];
    const td_all_gather_args args = {.mine = mine, .all = r->out, .n_bytes = n_bytes};
    return td_comm_all_gather(r->comm, r->stream, &args, err);
  }
  case REDUCE_SCATTER: {
    const td_reduce_scatter_args args = {.part = r->part, .out = r->out, .n = n};
    return td_comm_reduce_scatter(r->comm, r->stream, &args, err);
  }
  case ALL_REDUCE:
    return td_comm_all_reduce(r->comm, r->stream, r->part, r->out, block * b->n_ranks, false, err);
  case BROADCAST: return td_comm_broadcast(r->comm, r->stream, r->out, b->size, 0, err);
  case N_COLLECTIVES: break;
  }
  return TD_OK;
}

static void *rank_main(void *arg) {
  bench_rank *r = arg;
  comm_bench *b = r->bench;
  for (int64_t i = -1; i < b->options->repeat; i++) { // -1: warm-up
    pthread_barrier_wait(&b->barrier);
    const double begin = td_clock_s();
    td_err err;
    td_status st = run_once(r, &err);
    if (st == TD_OK) st = td_stream_sync(r->stream, &err);
    if (st != TD_OK) td_comm_abort(r->comm, err.msg);
    pthread_barrier_wait(&b->barrier);
    if (r->rank == 0 && i >= 0) b->seconds[i] = td_clock_s() - begin;
  }
  return NULL;
}

// Bytes that a rank gets from others (rank 0 of a broadcast gets none; the others get all).
static double received_bytes(const comm_bench *b) {
  const double all = (double)b->size;
  if (b->kind == BROADCAST) return b->n_ranks > 1 ? all : 0;
  return (b->kind == ALL_REDUCE ? 2 : 1) * all * (b->n_ranks - 1) / b->n_ranks;
}

static void add_record(comm_bench *b) {
  const double seconds = td_median(b->seconds, (size_t)b->options->repeat);
  const double gbps = received_bytes(b) / seconds * 1e-9;
  const char *backend = td_comm_backend(b->ranks[0].comm);
  if (!b->options->json) {
    printf("%-15s %-8s %6u %12zu %10.3f %8.2f\n", names[b->kind], backend, b->n_ranks, b->size,
           seconds * 1e3, gbps);
    fflush(stdout);
    return;
  }
  td_json_writer *w = &b->json;
  td_jw_add(w,
            "{'collective': %s, 'backend': %s, 'device': %s, 'ranks': %u, 'bytes': %lu, 'ms': %g, "
            "'gbps': %g}",
            names[b->kind], backend, td_dev_name(b->ranks[0].dev), b->n_ranks, b->size,
            seconds * 1e3, gbps);
  b->is_cut |= !td_jw_print_line(w, stdout);
}

static td_status run_case(comm_bench *b, td_err *err) {
  pthread_barrier_init(&b->barrier, NULL, b->n_ranks);
  for (uint32_t r = 0; r < b->n_ranks; r++)
    TD_CHECK(td_thread_start(&b->ranks[r].thread, rank_main, &b->ranks[r]) == 0);
  for (uint32_t r = 0; r < b->n_ranks; r++)
    pthread_join(b->ranks[r].thread, NULL);
  pthread_barrier_destroy(&b->barrier);
  td_status st = td_comm_check(b->ranks[0].comm, err);
  if (st == TD_OK) add_record(b);
  return st;
}

static void close_ranks(comm_bench *b) {
  for (uint32_t r = 0; r < b->n_ranks; r++)
    td_stream_close(b->ranks[r].stream);
  td_comm *comms[TD_COMM_MAX_RANKS];
  for (uint32_t r = 0; r < b->n_ranks; r++)
    comms[r] = b->ranks[r].comm;
  td_comm_close_all(comms, b->n_ranks);
  for (uint32_t r = 0; r < b->n_ranks; r++) {
    bench_rank *rank = &b->ranks[r];
    if (!rank->dev) continue;
    td_dev_free(rank->dev, rank->part);
    td_dev_free(rank->dev, rank->out);
    td_dev_close(rank->dev);
  }
  memset(b->ranks, 0, sizeof b->ranks);
}

static td_status open_rank(comm_bench *b, uint32_t r, td_err *err) {
  bench_rank *rank = &b->ranks[r];
  *rank = (bench_rank){.bench = b, .rank = r};
  const unsigned share = td_cpu_count() / b->n_ranks;
  // Pools of CPU devices begin at the same CPU: two of them do not share any if one begins at the
  // end.
  const td_dev_opts opts = {.kind = b->options->device,
                            .index = r,
                            .n_threads = share ? share : 1,
                            .cpus_from_end = r % 2};
  td_status st = td_dev_open(&rank->dev, &opts, err);
  if (st == TD_OK) st = td_stream_open(&rank->stream, rank->dev, err);
  if (st == TD_OK) st = td_dev_alloc(rank->dev, &rank->part, 2 * b->n_bytes, err);
  if (st == TD_OK) st = td_dev_alloc(rank->dev, &rank->out, b->n_bytes, err);
  if (st == TD_OK) td_op_fill_zero(rank->stream, rank->part, 2 * b->n_bytes);
  if (st == TD_OK) td_op_fill_zero(rank->stream, rank->out, b->n_bytes);
  return st;
}

static td_status open_ranks(comm_bench *b, const char *backend, td_err *err) {
  td_dev *devs[TD_COMM_MAX_RANKS];
  td_comm *comms[TD_COMM_MAX_RANKS];
  td_status st = TD_OK;
  for (uint32_t r = 0; r < b->n_ranks && st == TD_OK; r++) {
    st = open_rank(b, r, err);
    devs[r] = b->ranks[r].dev;
  }
  const td_comm_opts opts = {.backend = backend, .n_ranks = b->n_ranks};
  if (st == TD_OK) st = td_comm_open(comms, devs, &opts, err);
  for (uint32_t r = 0; r < b->n_ranks && st == TD_OK; r++)
    b->ranks[r].comm = comms[r];
  return st;
}

static td_status run_ranks(comm_bench *b, td_err *err) {
  const td_int_list *sizes = &b->options->bench_bytes;
  td_status st = open_ranks(b, td_comm_way_name(b->options->comm_backend), err);
  for (uint32_t i = 0; i < sizes->n && st == TD_OK; i++) {
    b->size = (size_t)sizes->values[i];
    for (int k = 0; k < N_COLLECTIVES && st == TD_OK; k++) {
      b->kind = (collective)k;
      st = run_case(b, err);
    }
  }
  close_ranks(b);
  return st;
}

int td_cmd_bench_comm(const td_options *o) {
  td_err err;
  comm_bench b = {.options = o, .text = TD_BUF_INIT};
  b.json = TD_JSON_WRITER(&b.text);
  for (uint32_t i = 0; i < o->bench_bytes.n; i++)
    if ((size_t)o->bench_bytes.values[i] > b.n_bytes) b.n_bytes = (size_t)o->bench_bytes.values[i];
  if (!o->json) {
    printf("%-15s %-8s %6s %12s %10s %8s\n", "collective", "backend", "ranks", "bytes", "ms",
           "GB/s");
  }
  td_status st = TD_OK;
  for (uint32_t i = 0; i < o->bench_ranks.n && st == TD_OK; i++) {
    b.n_ranks = (uint32_t)o->bench_ranks.values[i];
    st = run_ranks(&b, &err);
  }
  td_buf_free(&b.text);
  if (st == TD_OK && b.is_cut) st = td_fail(&err, TD_EIO, "standard output: cannot write");
  return st == TD_OK ? 0 : td_cmd_fail(&err);
}
