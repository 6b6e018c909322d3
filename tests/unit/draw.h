// tests/unit/draw.h - random numbers of the tests that play many short lives of a state machine: a
// life repeats from the seed that it is named by.
#pragma once

#include <stdint.h>

static uint64_t rng_state; // the seed, not 0

// In [0, n).
static inline uint32_t draw(uint32_t n) {
  rng_state ^= rng_state << 13;
  rng_state ^= rng_state >> 7;
  rng_state ^= rng_state << 17;
  return (uint32_t)((rng_state >> 11) % n);
}
