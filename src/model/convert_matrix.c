// src/model/convert_matrix.c - unpacks one matrix of 4-bit or 8-bit codes.
#include "model/convert_matrix.h"

#include <stdlib.h>
#include <string.h>

#include "tandem/kernels.h"

static uint32_t per_word(const td_word_matrix *m) {
  return 32 / m->bits;
}

static size_t words_of(const td_word_matrix *m, uint32_t n) {
  return ((size_t)n + per_word(m) - 1) / per_word(m);
}

static uint32_t half_range(const td_word_matrix *m) {
  return 1u << (m->bits - 1);
}

static uint32_t u32_at(const void *words, size_t idx) {
  uint32_t word;
  memcpy(&word, (const char *)words + idx * sizeof word, sizeof word);
  return word;
}

static uint32_t code_in(const td_word_matrix *m, uint32_t word, uint32_t idx) {
  return word >> (idx % per_word(m) * m->bits) & ((1u << m->bits) - 1);
}

static uint32_t zero_at(const td_word_matrix *m, uint32_t row, uint32_t group) {
  if (!m->zeros) return half_range(m);
  size_t at = m->is_gptq ? group * words_of(m, m->rows) + row / per_word(m)
                         : row / per_word(m) * (size_t)m->groups + group;
  return code_in(m, u32_at(m->zeros, at) + m->zero_add, row);
}

static float scale_at(const td_word_matrix *m, uint32_t row, uint32_t group) {
  size_t at = m->one_scale ? 0
              : m->is_gptq ? (size_t)group * m->rows + row
                           : (size_t)row * m->groups + group;
  if (m->scale_dtype == TD_F32) {
    float value;
    memcpy(&value, (const char *)m->scales + at * sizeof value, sizeof value);
    return value;
  }
  uint16_t half;
  memcpy(&half, (const char *)m->scales + at * sizeof half, sizeof half);
  return m->scale_dtype == TD_F16 ? td_f16_value(half) : td_bf16_value(half);
}

bool td_words_are_symmetric(const td_word_matrix *m) {
  if (!m->zeros) return true;
  for (uint32_t g = 0; g < m->groups; g++) {
    for (uint32_t r = 0; r < m->rows; r++)
      if (zero_at(m, r, g) != half_range(m)) return false;
  }
  return true;
}

// The codes of a row's columns [col, col + codes per word), as one word.
static uint32_t word_at(const td_word_matrix *m, uint32_t row, uint32_t col) {
  size_t k = col / per_word(m);
  size_t at = m->is_gptq ? k * m->rows + row : row * words_of(m, m->cols) + k;
  return u32_at(m->words, at);
}

// Unpacks the n codes of a word, minus half their range.
static void put_codes(const td_word_matrix *m, uint32_t word, uint32_t n, int8_t *out) {
  if (m->bits == 8 && n == 4) {
    word ^= 0x80808080;
    memcpy(out, &word, sizeof word);
  } else if (m->bits == 4 && n == 8) {
    for (int i = 0; i < 8; i++)
      out[i] = (int8_t)((int)(word >> 4 * i & 15) - 8);
  } else {
    for (uint32_t i = 0; i < n; i++)
      out[i] = (int8_t)((int)code_in(m, word, i) - (int)half_range(m));
  }
}

void td_words_to_i8(const td_word_matrix *m, int8_t *out) {
  enum { BLOCK = 64 }; // rows whose words of one column share cache lines
  uint32_t each = per_word(m);
  for (uint32_t begin = 0; begin < m->rows; begin += BLOCK) {
    uint32_t end = m->rows - begin < BLOCK ? m->rows : begin + BLOCK;
    for (uint32_t col = 0; col < m->cols; col += each) {
      uint32_t n = m->cols - col < each ? m->cols - col : each;
      for (uint32_t r = begin; r < end; r++)
        put_codes(m, word_at(m, r, col), n, out + (size_t)r * m->cols + col);
    }
  }
}

void td_words_scales(const td_word_matrix *m, float *out) {
  for (uint32_t r = 0; r < m->rows; r++)
    for (uint32_t g = 0; g < m->groups; g++)
      out[(size_t)r * m->groups + g] = scale_at(m, r, g);
}

bool td_words_to_values(const td_word_matrix *m, void *out) {
  float *scales = malloc(m->groups * sizeof *scales); // of one row
  int *zeros = malloc(m->groups * sizeof *zeros);
  for (uint32_t r = 0; scales && zeros && r < m->rows; r++) {
    for (uint32_t g = 0; g < m->groups; g++) {
      scales[g] = scale_at(m, r, g);
      zeros[g] = (int)zero_at(m, r, g);
    }
    const uint32_t each = per_word(m), mask = (1u << m->bits) - 1;
    for (uint32_t col = 0; col < m->cols; col += each) {
      uint32_t word = word_at(m, r, col), end = m->cols - col < each ? m->cols : col + each;
      for (uint32_t c = col; c < end; c++, word >>= m->bits) {
        uint32_t g = m->order ? u32_at(m->order, c) : c / m->group_cols;
        float value = (float)((int)(word & mask) - zeros[g]) * scales[g];
        td_put_value(m->scale_dtype, out, (size_t)r * m->cols + c, value);
      }
    }
  }
  bool done = scales && zeros;
  free(scales);
  free(zeros);
  return done;
}

void td_transpose(void *out, const void *from, uint64_t rows, uint64_t cols, size_t element_bytes) {
  enum { BLOCK = 32 };
  char *to = out;
  const char *of = from;
  for (uint64_t first = 0; first < rows; first += BLOCK) {
    for (uint64_t col = 0; col < cols; col += BLOCK) {
      for (uint64_t r = first; r < rows && r < first + BLOCK; r++) {
        for (uint64_t c = col; c < cols && c < col + BLOCK; c++)
          memcpy(to + (r * cols + c) * element_bytes, of + (c * rows + r) * element_bytes,
                 element_bytes);
      }
    }
  }
}

// The code of a word in which AWQ has row % 8.
static uint32_t awq_place(uint32_t row) {
  return row % 2 * 4 + row % 8 / 2;
}

void td_awq_sort(uint32_t *words, uint64_t n) {
  for (uint64_t i = 0; i < n; i++) {
    const uint32_t word = words[i];
    words[i] = 0;
    for (uint32_t r = 0; r < 8; r++)
      words[i] |= (word >> 4 * awq_place(r) & 15) << 4 * r;
  }
}

// Transposes the 8 x 8 codes of eight words: halves of words, then of halves, then of bytes.
static void transpose_codes(uint32_t words[8]) {
  static const uint32_t low[] = {0x0000ffff, 0x00ff00ff, 0x0f0f0f0f};
  for (uint32_t n = 4, step = 0; n; n /= 2, step++) {
    for (uint32_t i = 0; i < 8; i++) {
      if (i & n) continue;
      const uint32_t moved = (words[i] >> 4 * n ^ words[i + n]) & low[step];
      words[i] ^= moved << 4 * n;
      words[i + n] ^= moved;
    }
  }
}

void td_awq_to_rows(uint32_t *out, const void *from, uint64_t rows, uint64_t cols) {
  enum { BLOCK = 16 }; // words of a column in a cache line
  const uint64_t octets = rows / 8, n_words = cols / 8;
  for (uint64_t first = 0; first < octets; first += BLOCK) {
    for (uint64_t k = 0; k < n_words; k++) {
      for (uint64_t o = first; o < octets && o < first + BLOCK; o++) {
        uint32_t words[8];
        for (uint32_t c = 0; c < 8; c++)
          words[c] = u32_at(from, (k * 8 + c) * octets + o);
        transpose_codes(words);
        for (uint32_t r = 0; r < 8; r++)
          out[(o * 8 + r) * n_words + k] = words[awq_place(r)];
      }
    }
  }
}

// ---- halves of kv_b_proj ------------------------------------------------------------------------

td_dtype td_kv_b_dtype(td_dtype k, td_dtype v) {
  return k == v && (k == TD_F16 || k == TD_BF16) ? k : TD_F32;
}

// Writes values to elements at, at + step and so on of out.
static void put(const td_kv_b_parts *p, const float *values, uint32_t n, void *out, size_t at,
                size_t step) {
  for (uint32_t i = 0; i < n; i++, at += step)
    td_put_value(p->dtype, out, at, values[i]);
}

static void decode(const void *data, td_dtype dtype, uint32_t rows, uint32_t cols, uint32_t row,
                   float *out) {
  const td_weight w = {.data = data, .dtype = dtype, .rows = rows, .cols = cols};
  td_kernels()->decode_row(&(td_decode_row_args){.w = &w, .out = out, .row = row});
}

bool td_kv_b_join(const td_kv_b_parts *p, void *out) {
  const uint32_t widest = p->nope > p->latent ? p->nope : p->latent;
  float *row = malloc(widest * sizeof *row);
  if (!row) return false;
  for (uint32_t h = 0; h < p->heads; h++) {
    const size_t at = (size_t)h * (p->nope + p->v_dim) * p->latent;
    for (uint32_t l = 0; l < p->latent; l++) {
      decode(p->k, p->k_dtype, p->heads * p->latent, p->nope, h * p->latent + l, row);
      put(p, row, p->nope, out, at + l, p->latent);
    }
    for (uint32_t d = 0; d < p->v_dim; d++) {
      decode(p->v, p->v_dtype, p->heads * p->v_dim, p->latent, h * p->v_dim + d, row);
      put(p, row, p->latent, out, at + (size_t)(p->nope + d) * p->latent, 1);
    }
  }
  free(row);
  return true;
}
