// src/base/jitter.c - random delays and measured times for tests.
#include "base/jitter.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

#include "base/env.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uint64_t last_seed, n_streams; // guarded by lock

// SplitMix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators".
static uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// How many of 64 operations are delayed, and how many of 64 delays are long. With equal rates
// streams would stay in step, however long each operation takes, so every stream gets its own.
// Operations that take microseconds on the CPU take milliseconds on the emulator.
typedef struct {
  unsigned n_delayed, n_long;
} speed;
static const speed speeds[][4] = {
    [TD_JITTER_CPU] = {{0, 0}, {2, 1}, {8, 1}, {24, 1}},
    [TD_JITTER_EMULATOR] = {{0, 0}, {4, 4}, {16, 4}, {64, 32}},
};

td_jitter td_jitter_open(td_jitter_kind kind) {
  const char *text = td_test_var_get(TD_ENV_JITTER);
  const uint64_t seed = text ? strtoull(text, NULL, 10) : 0;
  if (!seed) return (td_jitter){.seed = 0};
  pthread_mutex_lock(&lock);
  if (seed != last_seed) n_streams = 0;
  last_seed = seed;
  const uint64_t own = mix(mix(seed) ^ (n_streams++ << 8 | (uint64_t)kind)) | 1;
  pthread_mutex_unlock(&lock);
  const speed s = speeds[kind][own >> 62];
  return (td_jitter){.seed = own, .n_delayed = s.n_delayed, .n_long = s.n_long};
}

void td_jitter_sleep(td_jitter *jitter) {
  const uint64_t r = mix(jitter->seed ^ ++jitter->n_operations);
  if (r % 64 >= jitter->n_delayed) return;
  long us = (long)(r >> 8 & 0xffff) % 200;
  if ((r >> 24 & 63) < jitter->n_long) us = 1000 + (long)(r >> 32 & 0xffff) % 2000;
  nanosleep(&(struct timespec){.tv_nsec = us * 1000}, NULL);
}

static uint64_t times_seed; // 0: measured times are what they are
static atomic_uint_fast64_t n_times;

static void read_times(void) {
  const char *text = td_test_var_get(TD_ENV_TIMES);
  times_seed = text ? strtoull(text, NULL, 10) : 0;
}

uint64_t td_jitter_time(uint64_t ns) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, read_times);
  if (!times_seed) return ns;
  const uint64_t r = mix(mix(times_seed) ^ atomic_fetch_add(&n_times, 1));
  return (uint64_t)((double)ns * (double)(r >> 40) * (16.0 / (1 << 24)));
}
