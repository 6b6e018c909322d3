// tests/unit/kernel_test.h - runs a check for every registered version of a family that this
// machine supports. None is a failure.
#pragma once

#include <stdio.h>

#include "device/device.h"
#include "tandem/formats.h"
#include "tandem/kernels.h"
#include "unit/ref.h"

// A check returns false and says why; the tests of the tests expect just that.
typedef struct {
  char text[256];
} why;

#define KERNEL_FAIL(w, ...) (snprintf((w)->text, sizeof(w)->text, __VA_ARGS__), false)

// Whether a check's tokens shall be a prompt's, and which way an answer's go.
static bool as_prompt;
static bool in_int8; // x, of GGUF's blocks
static td_gemv_schedule in_way;

// y [n][w->rows] = w times x [n][w->cols].
static inline void multiply(void (*fn)(void), const td_weight *w, const float *x, float *y,
                            uint32_t n) {
  ((td_linear_fn)fn)(&(td_linear_args){.w = w,
                                       .x = x,
                                       .y = y,
                                       .ldx = w->cols,
                                       .ldy = w->rows,
                                       .n_tokens = n,
                                       .row_end = w->rows,
                                       .prompt = as_prompt,
                                       .x_int8 = in_int8,
                                       .way = in_way});
}

// Whether a version has another way for prompts.
static inline bool knows_prompts(const td_kernel_variant *v) {
  const unsigned tiles = TD_ISA_AMX | TD_ISA_AVX512_FP16;
  return v->features & TD_ISA_AVX512_BF16 || (v->features & tiles) == tiles ||
         strcmp(v->isa, "avx2") == 0;
}

// Whether a version has another way for GGUF's blocks with x in 8 bits.
static inline bool knows_int8(const td_kernel_variant *v) {
  for (td_dtype d = 0; d < TD_N_DTYPES; d++) {
    if (td_dtype_block(d).cols && strcmp(td_weight_kind_of(d)->family, v->family) == 0)
      return v->features & TD_MATH_INT16;
  }
  return false;
}

// Whether a version has another kernel for decode.
static inline bool knows_ways(const td_kernel_variant *v) {
  return v->features & TD_ISA_AVX512_BF16;
}

typedef bool (*kernel_check)(void (*fn)(void), const void *arg, why *w);

static inline void for_versions(const char *family, kernel_check check, const void *arg) {
  enum { ANSWER, ANSWER_SIDE_BY_SIDE, PROMPT, IN_INT8, MANNERS };
  static const char *const manners[] = {"", ", side by side", ", a prompt", ", x in 8 bits"};
  size_t n, n_run = 0;
  td_dev_ask_for_tiles();
  const td_kernel_variant *v = td_kernel_variants(&n);
  for (size_t i = 0; i < MANNERS * n; i++) {
    const td_kernel_variant *version = &v[i / MANNERS];
    const int manner = (int)(i % MANNERS);
    if (strcmp(version->family, family) != 0 || !td_kernel_variant_runs(version)) continue;
    if (manner == PROMPT && !knows_prompts(version)) continue;
    if (manner == ANSWER_SIDE_BY_SIDE && !knows_ways(version)) continue;
    if (manner == IN_INT8 && !knows_int8(version)) continue;
    as_prompt = manner == PROMPT;
    in_int8 = manner == IN_INT8;
    in_way = manner == ANSWER_SIDE_BY_SIDE ? TD_GEMV_INTERLEAVED : TD_GEMV_SEQUENTIAL;
    why w = {""};
    if (!check(version->fn, arg, &w)) {
      fail_msg("%s__%s%s: %s", family, version->isa, manners[manner], w.text);
    }
    n_run++;
  }
  as_prompt = in_int8 = false;
  in_way = TD_GEMV_SEQUENTIAL;
  if (n_run == 0) fail_msg("no version of %s runs on this machine", family);
}

// A row times a token, in double.
typedef struct {
  double sum, magnitude; // of products
  double largest;        // scale times activation
  double in_int16;       // what rounding x to 16 bits may cost at 4-bit weights
} exact_dot;

// Columns of x that have a scale there: the most, of 128 and its halves, that groups are whole
// multiples of.
static inline uint32_t ref_x_block(const td_weight *w) {
  const uint32_t group = w->scale_cols < w->cols ? w->scale_cols : 128;
  uint32_t block = 128;
  while (group % block)
    block /= 2;
  return block;
}

// A row's values and their scales, for many tokens: weights[cols], scales[cols].
typedef struct {
  double *weights, *scales;
} exact_row;

static inline exact_row exact_row_of(const td_weight *w) {
  return (exact_row){.weights = malloc(w->cols * sizeof(double)),
                     .scales = malloc(w->cols * sizeof(double))};
}

static inline void exact_row_free(exact_row *r) {
  free(r->weights);
  free(r->scales);
}

static inline void exact_row_read(exact_row *r, const td_weight *w, uint32_t row) {
  for (uint32_t k = 0; k < w->cols; k++) {
    r->weights[k] = ref_at(w, row, k);
    r->scales[k] = ref_scale(w, row, k);
  }
}

static inline exact_dot exact_row_dot(const exact_row *r, const td_weight *w, const float *x) {
  exact_dot d = {0};
  for (uint32_t k = 0; k < w->cols; k++) {
    double product = r->weights[k] * x[k];
    d.sum += product;
    d.magnitude += fabs(product);
    d.largest = fmax(d.largest, fabs(r->scales[k] * x[k]));
  }
  const uint32_t block = td_dtype_bits(w->dtype) == 4 ? ref_x_block(w) : w->cols;
  for (uint32_t k = 0; k < w->cols; k += block) {
    double weights = 0, most = 0;
    for (uint32_t i = k; i < k + block && i < w->cols; i++) {
      weights += fabs(r->weights[i]);
      most = fmax(most, fabs(x[i]));
    }
    d.in_int16 += weights * most / 65534;
  }
  return d;
}

static inline exact_dot dot_exactly(const td_weight *w, uint32_t row, const float *x) {
  exact_row r = exact_row_of(w);
  exact_row_read(&r, w, row);
  const exact_dot d = exact_row_dot(&r, w, x);
  exact_row_free(&r);
  return d;
}

static inline bool needs(void (*fn)(void), unsigned features) {
  size_t n;
  const td_kernel_variant *v = td_kernel_variants(&n);
  for (size_t i = 0; i < n; i++) {
    if (v[i].fn == fn) return v[i].features & features;
  }
  return false;
}

static inline bool uses_f16(void (*fn)(void)) {
  return needs(fn, TD_ISA_AVX512_FP16);
}

static inline bool uses_bf16(void (*fn)(void)) {
  return needs(fn, TD_ISA_AVX512_BF16);
}

static inline bool uses_int16(void (*fn)(void)) {
  return needs(fn, TD_MATH_INT16);
}

// Whether a version multiplies these weights by tiles, in two BF16 numbers.
static inline bool uses_tiles(void (*fn)(void), const td_weight *w) {
  enum { COLS = 64 }; // that AMX's kernels take at once, or half of them
  const bool fits = w->cols % COLS == 0 && (w->scale_cols >= w->cols || w->scale_cols % COLS == 0);
  return as_prompt && fits && !w->zero && needs(fn, TD_ISA_AMX) && uses_f16(fn);
}

// How far a version may be from d. With any order of additions in FP32 and at most five further
// roundings (run sums, scales), |error| <= (k + 5) 2^-24 sum |w x|.
// Tiles: x is rounded by 2^-18 of itself, and each of two products may be less than 2^-126 and
// lost. BF16: x is rounded by 2^-8 of itself. 16 bits, which take its place where there are zero
// points: by half a 32767th of a block's largest, and what is multiplied with that for a number by
// 2^-24 of itself at most twice. FP16 chains: x is rounded by 2^-11 of itself, and so is each of at
// most 16 sums, that of two chains and that of two lanes: 19 roundings, and their products with
// each other. What is subnormal is rounded by 2^-25 instead, where a window's largest activation m
// is at least 2^9 / (2 c), c the largest code as an FP16 number: for each column x costs c 2^-25,
// and the sum 2^-25, of 2 c m / 2^9; c is at most 128, so that is less than 2^-25 c m.
static inline double error_bound(void (*fn)(void), const td_weight *w, const exact_dot *d) {
  double bound = (w->cols + 5.0) * 0x1p-24 * d->magnitude;
  if (uses_tiles(fn, w)) return bound + 0x1p-18 * d->magnitude + w->cols * 0x1p-125;
  if (uses_bf16(fn) && !w->zero) return bound + 0x1p-8 * d->magnitude;
  if (uses_int16(fn) || uses_bf16(fn)) return bound + (1 + 0x1p-8) * d->in_int16;
  if (!uses_f16(fn)) return bound;
  double code = w->dtype == TD_F8E4M3 ? 448 : w->dtype == TD_I8 ? 128 : 15;
  return bound + 19.5 * 0x1p-11 * d->magnitude + w->cols * 0x1p-25 * code * d->largest;
}
