// src/model/ngrams.h - n-grams that end with a token, by which rows of a table are found: of each
// length from 2 on, several heads, each with a part of the table of its own.
#pragma once

#include <stdint.h>

#include "tandem/types.h"

enum { TD_MAX_NGRAM = 8, TD_MAX_NGRAM_HEADS = 128 };

// How an n-gram is hashed. Tokens x[0], the last, to x[n - 1] give the exclusive or of all
// x[i] * factor[i], and head h the row of that modulo rows[h], behind the rows of the heads before.
// A token in front of `end`, or of the text, counts as `end`.
typedef struct {
  uint64_t factor[TD_MAX_NGRAM];
  uint32_t rows[TD_MAX_NGRAM_HEADS]; // [(size - 1) * n_heads], those of pairs first
  uint32_t size, n_heads;            // of the longest n-gram; heads of each length
  int32_t end;
} td_ngram_hash;

static inline uint32_t td_ngram_rows(const td_ngram_hash *h) { // of a token
  return (h->size - 1) * h->n_heads;
}

// The rows of all heads, in one matrix or in several of the same number of rows, but for the last.
typedef struct {
  const td_weight *shards; // [n_shards]
  uint32_t n_shards;
  td_ngram_hash hash;
} td_ngram_table;

// hash->size, n_heads and end are set. seed: the model's. base: the least number of rows of a head.
// nth: of the layers that have n-grams. Returns the rows of all heads.
uint64_t td_ngram_hash_fill(td_ngram_hash *hash, uint32_t nth, uint32_t seed, uint32_t base,
                            uint32_t n_vocab);
