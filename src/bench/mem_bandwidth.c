// src/bench/mem_bandwidth.c - measures the memory read bandwidth.
#include "bench/mem_bandwidth.h"

#include <stdlib.h>
#include <sys/mman.h>

#include "base/clock.h"
#include "base/mem_info.h"
#include "base/units.h"

#define BUFFER_BYTES TD_GIB
#define LEAST_S      0.06 // stop after this time and at least two passes

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

static void read_one_stream(void *ctx, unsigned member, unsigned n_members) {
  size_t begin, end;
  slice_of(member, n_members, &begin, &end);
  read_streams(ctx, begin, end, 1);
}

static void read_four_streams(void *ctx, unsigned member, unsigned n_members) {
  size_t begin, end;
  slice_of(member, n_members, &begin, &end);
  read_streams(ctx, begin, end, 4);
}

static void run(const td_read_speed *speed, void (*fn)(void *, unsigned, unsigned)) {
  td_pool_run(speed->pool, fn, speed->words);
}

td_status td_read_speed_open(td_read_speed *out, unsigned n_threads, td_err *err) {
  *out = (td_read_speed){0};
  void *buffer;
  if (posix_memalign(&buffer, TD_HUGE_PAGE_BYTES, BUFFER_BYTES) != 0) {
    return td_fail(err, TD_ENOMEM, "out of memory: no 1 GiB to measure reads with");
  }
  madvise(buffer, BUFFER_BYTES, MADV_HUGEPAGE); // measure memory rather than page walks
  out->words = buffer;
  td_nodes nodes = td_nodes_get();
  const td_pool_opts pool = {.n_threads = n_threads, .pin = true, .nodes = &nodes};
  td_status st = td_pool_open(&out->pool, &pool, err);
  if (st != TD_OK) {
    td_read_speed_close(out);
    return st;
  }
  cpu_set_t before;
  td_pool_pin_caller(out->pool, &before);
  run(out, touch_slice);
  td_pool_unpin_caller(&before);
  return TD_OK;
}

void td_read_speed_close(td_read_speed *speed) {
  td_pool_close(speed->pool);
  free(speed->words);
  *speed = (td_read_speed){0};
}

// Depending on the CPU, one stream or four streams are faster: measure both and keep the best.
double td_read_speed_gbps(td_read_speed *speed) {
  cpu_set_t before;
  td_pool_pin_caller(speed->pool, &before);
  double best = 0, spent = 0;
  for (unsigned i = 0; i < 2 || spent < LEAST_S; i++) {
    double start = td_clock_s();
    run(speed, i % 2 ? read_four_streams : read_one_stream);
    double seconds = td_clock_s() - start, gbps = (double)BUFFER_BYTES / seconds * 1e-9;
    if (gbps > best) best = gbps;
    spent += seconds;
  }
  td_pool_unpin_caller(&before);
  return best;
}
