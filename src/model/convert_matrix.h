// src/model/convert_matrix.h - makes one matrix that kernels support: of packed codes, or of
// two halves.
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/bf16.h"
#include "base/f16.h"
#include "tandem/types.h"

// Element (r, c) has the value (code - zero) * scale; its group is order[c], or c / group_cols
// without order. A word holds 32 / bits codes, the first in its lowest bits. Pointers need no
// alignment.
typedef struct {
  // u32 words: if is_gptq [ceil(cols / per word)][rows], else [rows][ceil(cols / per word)].
  const void *words;
  // u32 words; zero_add is added to each: if is_gptq [groups][ceil(rows / per word)], else
  // [ceil(rows / per word)][groups]. NULL: all zero points are 2^(bits - 1).
  const void *zeros;
  const void *scales;   // is_gptq: [groups][rows]; else [rows][groups], or a single one
  const void *order;    // int32 [cols], each below groups
  td_dtype scale_dtype; // TD_F32, TD_F16 or TD_BF16
  uint32_t bits, rows, cols, groups, group_cols, zero_add;
  bool is_gptq, one_scale;
} td_word_matrix;

// Whether every zero point is 2^(bits - 1).
bool td_words_are_symmetric(const td_word_matrix *m);
// Writes code - 2^(bits - 1) as int8 [rows][cols].
void td_words_to_i8(const td_word_matrix *m, int8_t *out);
// Writes the scales as F32 [rows][groups].
void td_words_scales(const td_word_matrix *m, float *out);
// Writes the dequantized values in scale_dtype, [rows][cols]. False: out of memory.
bool td_words_to_values(const td_word_matrix *m, void *out);
// AWQ's codes in rows: out [rows][cols / 8] words of eight columns, from [cols][rows / 8] words of
// eight rows. rows % 8 == 0, cols % 8 == 0.
void td_awq_to_rows(uint32_t *out, const void *from, uint64_t rows, uint64_t cols);
// Puts the eight rows in each of n words, of which AWQ's order is 0 2 4 6 1 3 5 7, in order.
void td_awq_sort(uint32_t *words, uint64_t n);
// out [rows][cols] of from [cols][rows], elements of 1, 2 or 4 bytes.
void td_transpose(void *out, const void *from, uint64_t rows, uint64_t cols, size_t element_bytes);
// Rounds a value to element `at` of an array of TD_F32, TD_F16 or TD_BF16.
static inline void td_put_value(td_dtype dtype, void *out, size_t at, float value) {
  switch (dtype) {
  case TD_F16: ((uint16_t *)out)[at] = td_f16_of(value); break;
  case TD_BF16: ((uint16_t *)out)[at] = td_bf16_of(value); break;
  default: ((float *)out)[at] = value;
  }
}

// MLA's kv_b_proj, [heads][nope, then v][latent], of the two tensors that GGUF stores instead:
//   k_b [heads][latent][nope], each head's part transposed
//   v_b [heads][v][latent]
typedef struct {
  const void *k, *v;
  td_dtype k_dtype, v_dtype; // any that has a kernel without scales
  td_dtype dtype;            // of the result: TD_F32, TD_F16 or TD_BF16
  uint32_t heads, latent, nope, v_dim;
} td_kv_b_parts;

// The dtype that holds every value of both: their own F16 or BF16, otherwise F32, since scale times
// code of a block has up to 19 bits.
td_dtype td_kv_b_dtype(td_dtype k, td_dtype v);
// False: out of memory.
bool td_kv_b_join(const td_kv_b_parts *parts, void *out);
