// src/base/clock.h - the only clock: monotonic nanoseconds, comparable between processes.
#pragma once

#include <stdint.h>
#include <time.h>

static inline uint64_t td_clock_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

// CPU time used by the calling thread.
static inline uint64_t td_clock_cpu_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static inline double td_clock_s(void) {
  return (double)td_clock_ns() * 1e-9;
}
