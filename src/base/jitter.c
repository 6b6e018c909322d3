#include "base/jitter.h"

#include <pthread.h>
#include <stdlib.h>
#include <time.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uint64_t last_seed, n_streams; // guarded by lock

// SplitMix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators".
static uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// TANDEM_JITTER is for tests and debugging, and this is where it is read.
td_jitter td_jitter_open(td_jitter_kind kind) {
  // Streams of one speed stay close to one another whatever each operation takes: some run ahead.
  static const unsigned shares[] = {0, 2, 8, 24};
  const char *text = getenv("TANDEM_JITTER");
  const uint64_t seed = text ? strtoull(text, NULL, 10) : 0;
  if (!seed) return (td_jitter){.seed = 0};
  pthread_mutex_lock(&lock);
  if (seed != last_seed) n_streams = 0;
  last_seed = seed;
  const uint64_t own = mix(mix(seed) ^ (n_streams++ << 8 | (uint64_t)kind)) | 1;
  pthread_mutex_unlock(&lock);
  return (td_jitter){.seed = own, .share = shares[own >> 62]};
}

void td_jitter_sleep(td_jitter *jitter) {
  const uint64_t r = mix(jitter->seed ^ ++jitter->n_operations);
  if (r % 64 >= jitter->share) return;
  long us = (long)(r >> 8 & 0xffff) % 300;
  if ((r >> 24 & 31) == 0) us = 1000 + (long)(r >> 32 & 0xffff) % 2000;
  nanosleep(&(struct timespec){.tv_nsec = us * 1000}, NULL);
}
