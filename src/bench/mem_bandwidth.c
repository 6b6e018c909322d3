// src/bench/mem_bandwidth.c - measures the memory read bandwidth.
#include "bench/mem_bandwidth.h"

#include <limits.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "base/clock.h"
#include "base/mem_info.h"
#include "base/units.h"

#define BUFFER_BYTES TD_GIB
#define MIN_S        0.06 // stop after this time and at least two passes

enum { LINE_WORDS = 8 };

static void slice_of(unsigned member, unsigned n_members, size_t *begin, size_t *end) {
  size_t n = BUFFER_BYTES / sizeof(uint64_t) / LINE_WORDS;
  *begin = n * member / n_members * LINE_WORDS;
  *end = n * (member + 1) / n_members * LINE_WORDS;
}

static void touch_slice(void *ctx, unsigned member, unsigned n_members) {
  uint64_t *words = ctx;
  size_t begin, end;
  slice_of(member, n_members, &begin, &end);
  for (size_t i = begin; i < end; i++)
    words[i] = i;
}

// Reads the slice as n_streams interleaved streams, one cache line of each in turn, with prefetch.
static inline void read_streams(const uint64_t *words, size_t begin, size_t end, size_t n_streams) {
  enum { AHEAD_WORDS = 256 };
  size_t n = (end - begin) / n_streams / LINE_WORDS * LINE_WORDS;
  uint64_t sum[LINE_WORDS] = {0};
  for (size_t i = begin; i < begin + n; i += LINE_WORDS) {
    for (size_t s = 0; s < n_streams; s++) {
      const uint64_t *line = words + s * n + i;
      if (n_streams > 1) __builtin_prefetch(line + AHEAD_WORDS);
      for (size_t j = 0; j < LINE_WORDS; j++)
        sum[j] ^= line[j];
    }
  }
  for (size_t j = 1; j < LINE_WORDS; j++)
    sum[0] ^= sum[j];
  volatile uint64_t sink = sum[0]; // keeps the reads alive
  (void)sink;
}

typedef struct {
  uint64_t *words;
  const td_thread_pool *pool;
  size_t n_streams;
  bool is_remote;
} reading;

// A member of the next node that has any, so that each is about one other's; UINT_MAX: none has.
static unsigned remote_of(const td_thread_pool *pool, unsigned member, unsigned n_members) {
  const unsigned node = td_thread_pool_node(pool, member);
  for (unsigned step = 1; step < TD_MAX_NODES; step++) {
    unsigned n = 0, found = UINT_MAX;
    for (unsigned i = 0; i < n_members; i++)
      n += td_thread_pool_node(pool, i) == (node + step) % TD_MAX_NODES;
    for (unsigned i = 0; i < n_members && n; i++)
      if (td_thread_pool_node(pool, i) == (node + step) % TD_MAX_NODES &&
          td_thread_pool_rank(pool, i) == td_thread_pool_rank(pool, member) % n)
        found = i;
    if (found != UINT_MAX) return found;
  }
  return UINT_MAX;
}

static void read_slice(void *ctx, unsigned member, unsigned n_members) {
  const reading *r = ctx;
  size_t begin, end;
  slice_of(r->is_remote ? remote_of(r->pool, member, n_members) : member, n_members, &begin, &end);
  read_streams(r->words, begin, end, r->n_streams);
}

td_status td_read_speed_open(td_read_speed *out, unsigned n_threads, td_err *err) {
  *out = (td_read_speed){0};
  void *buffer;
  if (posix_memalign(&buffer, TD_HUGE_PAGE_BYTES, BUFFER_BYTES) != 0)
    return td_fail(err, TD_ENOMEM, "out of memory: no 1 GiB to measure reads with");
  madvise(buffer, BUFFER_BYTES, MADV_HUGEPAGE); // measure memory rather than page walks
  out->words = buffer;
  td_nodes nodes = td_nodes_get();
  const td_thread_pool_opts pool = {.n_threads = n_threads, .pin = true, .nodes = &nodes};
  td_status st = td_thread_pool_open(&out->pool, &pool, err);
  if (st != TD_OK) {
    td_read_speed_close(out);
    return st;
  }
  cpu_set_t before;
  td_thread_pool_pin_caller(out->pool, &before);
  td_thread_pool_run(out->pool, touch_slice, out->words);
  td_thread_pool_unpin_caller(&before);
  return TD_OK;
}

void td_read_speed_close(td_read_speed *speed) {
  td_thread_pool_close(speed->pool);
  free(speed->words);
  *speed = (td_read_speed){0};
}

// Depending on the CPU, one stream or four streams are faster: measure both and keep the best.
static double best_of(td_read_speed *speed, bool is_remote) {
  cpu_set_t before;
  td_thread_pool_pin_caller(speed->pool, &before);
  double best = 0, spent = 0;
  for (unsigned i = 0; i < 2 || spent < MIN_S; i++) {
    double start = td_clock_s();
    reading r = {speed->words, speed->pool, i % 2 ? 4 : 1, is_remote};
    td_thread_pool_run(speed->pool, read_slice, &r);
    double seconds = td_clock_s() - start, gbps = (double)BUFFER_BYTES / seconds * 1e-9;
    if (gbps > best) best = gbps;
    spent += seconds;
  }
  td_thread_pool_unpin_caller(&before);
  return best;
}

double td_read_speed_gbps(td_read_speed *speed) {
  return best_of(speed, false);
}

double td_read_speed_remote_gbps(td_read_speed *speed) {
  const unsigned n = td_thread_pool_size(speed->pool);
  return remote_of(speed->pool, 0, n) == UINT_MAX ? 0 : best_of(speed, true);
}
