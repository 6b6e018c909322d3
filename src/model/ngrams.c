// src/model/ngrams.c - hashes of n-grams as the checkpoint's maker derives them from a seed.
#include "model/ngrams.h"

#include <stdbool.h>

// Steele et al., "Fast splittable pseudorandom number generators", 2014.
static const uint64_t gamma_step = 0x9e3779b97f4a7c15u;

static uint64_t splitmix(uint64_t x) {
  x += gamma_step;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return x ^ x >> 31;
}

static bool is_prime(uint64_t n) {
  if (n < 4) return n > 1;
  if (n % 2 == 0) return false;
  for (uint64_t i = 3; i * i <= n; i += 2)
    if (n % i == 0) return false;
  return true;
}

// Rows of heads are the primes from base on, one after the other over all layers.
uint64_t td_ngram_hash_fill(td_ngram_hash *h, uint32_t nth, uint32_t seed, uint32_t base,
                            uint32_t n_vocab) {
  enum { LAYER_STEP = 10007 };
  const uint64_t most = (uint64_t)INT64_MAX / n_vocab, half = most / 2 ? most / 2 : 1;
  for (uint32_t i = 0; i < h->size; i++) {
    const uint64_t at = seed + (uint64_t)LAYER_STEP * nth + gamma_step * (i + 1);
    h->factor[i] = 2 * (splitmix(at) % half) + 1;
  }
  const uint32_t n = td_ngram_rows(h);
  uint64_t prime = (uint64_t)base - 1, total = 0;
  for (uint64_t i = 0; i < (uint64_t)n * (nth + 1); i++) {
    do {
      prime++;
    } while (!is_prime(prime));
    if (i < (uint64_t)n * nth) continue;
    h->rows[i - (uint64_t)n * nth] = (uint32_t)prime;
    total += prime;
  }
  return total;
}
