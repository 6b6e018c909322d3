// src/text/tokenizer/hash.h - hashes of short byte strings and of pairs. Private to text/.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

static inline uint64_t td_hash_mix(uint64_t h) {
  h ^= h >> 32;
  h *= 0x9FB21C651E98DF25u;
  h ^= h >> 29;
  return h;
}

static inline uint64_t td_hash_bytes(const char *bytes, size_t len) {
  uint64_t h = len * 0x9E3779B97F4A7C15u, word;
  for (; len >= 8; bytes += 8, len -= 8) {
    memcpy(&word, bytes, 8);
    h = td_hash_mix(h ^ word) + word;
  }
  if (len) {
    word = 0;
    memcpy(&word, bytes, len);
    h = td_hash_mix(h ^ word) + word;
  }
  return td_hash_mix(h);
}

static inline uint64_t td_hash_pair(int32_t a, int32_t b) {
  return td_hash_mix(((uint64_t)(uint32_t)a << 32 | (uint32_t)b) * 0x9E3779B97F4A7C15u);
}
