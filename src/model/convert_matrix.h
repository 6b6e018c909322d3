// src/model/convert_matrix.h - one matrix of words into rows of a plainer dtype.
#ifndef TD_MODEL_CONVERT_MATRIX_H
#define TD_MODEL_CONVERT_MATRIX_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "tandem/types.h"

// Element (r, c) is worth (code - zero) * scale, of group order[c], or c / group_cols without
// order. A word holds 32 / bits codes, the first in its lowest bits. Pointers need no alignment.
typedef struct {
  // In words: is_gptq: [ceil(cols / per word)][rows], else [rows][ceil(cols / per word)].
  const void *words;
  // In words, each less zero_add: is_gptq: [groups][ceil(rows / per word)], else [ceil(rows / per
  // word)][groups]. NULL: 2^(bits - 1) everywhere.
  const void *zeros;
  const void *scales;   // is_gptq: [groups][rows]; else [rows][groups], or one for all
  const void *order;    // int32 [cols], each below groups
  td_dtype scale_dtype; // TD_F32, TD_F16 or TD_BF16
  uint32_t bits, rows, cols, groups, group_cols, zero_add;
  bool is_gptq, one_scale;
} td_word_matrix;

// Whether every zero point is 2^(bits - 1).
bool td_words_are_symmetric(const td_word_matrix *m);
// code - 2^(bits - 1): int8 [rows][cols].
void td_words_to_i8(const td_word_matrix *m, int8_t *out);
// The scales as F32 [rows][groups].
void td_words_scales(const td_word_matrix *m, float *out);
// The values, in scale_dtype, [rows][cols]. False: out of memory.
bool td_words_to_values(const td_word_matrix *m, void *out);

#endif
