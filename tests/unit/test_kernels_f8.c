// tests/unit/test_kernels_f8.c - FP8 matrices as checkpoints have them: nearly all codes are normal
// numbers, which random codes are not, so kernels may take another way with them. Activations of
// every magnitude, since kernels may scale them: with a scale a row, and with one for all rows. The
// bound is that of test_kernels_linear.c.
// CTest: slow no-asan no-tsan

#include "unit/kernel_test.h"

enum { ROWS = 13, COLS = 1650, TOKENS = 18, SOME_TOKENS = 6 };

typedef struct {
  uint32_t scale_rows, scale_cols, cols;
  int exponent;      // activations of every other token are +-[1, 2) times 2 to this
  uint32_t specials; // codes that are zero or subnormal
} f8_case;

static uint8_t codes[ROWS * COLS];
static float scales[ROWS * COLS], x[TOKENS * COLS];

static td_weight make_case(const f8_case *c) {
  uint64_t rng = 99;
  uint32_t groups = (c->cols + c->scale_cols - 1) / c->scale_cols;
  uint32_t bands = (ROWS + c->scale_rows - 1) / c->scale_rows;
  for (uint32_t i = 0; i < ROWS * c->cols; i++) {
    uint8_t magnitude = (uint8_t)(8 + ref_below(&rng, 0x77)); // 0x08 to 0x7e
    codes[i] = (uint8_t)(magnitude | ref_below(&rng, 2) << 7);
  }
  for (uint32_t i = 0; i < c->specials; i++) {
    codes[ref_below(&rng, ROWS * c->cols)] = (uint8_t)(ref_below(&rng, 8) | ref_below(&rng, 2)
                                                                                << 7);
  }
  for (uint32_t i = 0; i < bands * groups; i++)
    scales[i] = ldexpf(1 + (float)ref_below(&rng, 1000) * 1e-3f, -(int)ref_below(&rng, 9));
  for (uint32_t i = 0; i < TOKENS * c->cols; i++) {
    int exponent = i / c->cols % 2 ? 0 : c->exponent;
    float value = ldexpf(1 + (float)ref_below(&rng, 1 << 23) * 0x1p-23f, exponent);
    x[i] = i % 50 == 7 ? 0 : ref_below(&rng, 2) ? -value : value;
  }
  return (td_weight){.data = codes,
                     .scale = scales,
                     .dtype = TD_F8E4M3,
                     .scale_dtype = TD_F32,
                     .rows = ROWS,
                     .cols = c->cols,
                     .scale_rows = c->scale_rows,
                     .scale_cols = c->scale_cols};
}

static void run(void (*fn)(void), const td_weight *w, uint32_t token, uint32_t n, float *y) {
  multiply(fn, w, x + (size_t)token * w->cols, y, n);
}

static bool within_bound(void (*fn)(void), const td_weight *w, uint32_t token, const float *y,
                         why *why_) {
  for (uint32_t r = 0; r < ROWS; r++) {
    exact_dot d = dot_exactly(w, r, x + (size_t)token * w->cols);
    double bound = error_bound(fn, w, &d) + ldexp(w->cols, -149 + 8 + 1);
    if (!(fabs(y[r] - d.sum) <= bound)) {
      return KERNEL_FAIL(why_, "%u columns, row %u: off by %g, bound %g", w->cols, r,
                         fabs(y[r] - d.sum), bound);
    }
  }
  return true;
}

// A token alone is right, and the same to the last bit in company.
static bool check_case(void (*fn)(void), const void *arg, why *w) {
  const f8_case *c = arg;
  td_weight weight = make_case(c);
  float together[TOKENS * ROWS], some[SOME_TOKENS * ROWS], alone[ROWS];
  run(fn, &weight, 0, TOKENS, together);
  run(fn, &weight, 0, SOME_TOKENS, some);
  for (uint32_t t = 0; t < TOKENS; t++) {
    run(fn, &weight, t, 1, alone);
    if (!within_bound(fn, &weight, t, alone, w)) return false;
    if (memcmp(alone, together + (size_t)t * ROWS, sizeof alone) != 0 ||
        (t < SOME_TOKENS && memcmp(alone, some + (size_t)t * ROWS, sizeof alone) != 0)) {
      return KERNEL_FAIL(w, "exponent %d: token %u differs from itself alone", c->exponent, t);
    }
  }
  return true;
}

TEST(normal_codes) {
  static const int exponents[] = {0, -20, -91, -96, -99, -104, -115, -126, 27, 60, 98, 105};
  static const uint32_t scale_cols[] = {128, 9, 192, COLS};
  for (size_t e = 0; e < TD_COUNT(exponents); e++) {
    for (size_t s = 0; s < TD_COUNT(scale_cols); s++) {
      f8_case c = {.scale_cols = scale_cols[s], .exponent = exponents[e]};
      for (c.scale_rows = 1; c.scale_rows <= 128; c.scale_rows += 127) {
        c.cols = COLS;
        for (c.specials = 0; c.specials <= 20; c.specials += 20)
          for_versions("linear_f8e4m3", check_case, &c);
        c.cols = 64;
        if (c.scale_cols <= c.cols) for_versions("linear_f8e4m3", check_case, &c);
      }
    }
  }
}

static bool is_like(float y, float want) {
  return isnan(want) ? isnan(y) : y == want;
}

// One activation that is infinite or NaN, among weights that are normal.
static bool check_nonfinite(void (*fn)(void), const void *arg, why *w) {
  const float *value = arg;
  td_weight weight = make_case(&(f8_case){.scale_rows = 128, .scale_cols = 128, .cols = 1000});
  x[777] = *value;
  float y[ROWS];
  run(fn, &weight, 0, 1, y);
  for (uint32_t r = 0; r < ROWS; r++) {
    float want = ref_at(&weight, r, 777) < 0 ? -*value : *value;
    if (!is_like(y[r], want)) return KERNEL_FAIL(w, "row %u is %g, not %g", r, y[r], want);
  }
  return true;
}

TEST(activations_that_are_not_finite) {
  static const float values[] = {INFINITY, -INFINITY, NAN};
  for (size_t i = 0; i < TD_COUNT(values); i++)
    for_versions("linear_f8e4m3", check_nonfinite, &values[i]);
}

// A single NaN code, in either sign, anywhere in a row of normal ones.
static bool check_one_nan(void (*fn)(void), const void *arg, why *w) {
  const uint32_t *col = arg;
  uint32_t scale_rows = *col % 2 ? 1 : 128;
  td_weight weight = make_case(
      &(f8_case){.scale_rows = scale_rows, .scale_cols = 128, .cols = 1000});
  for (uint32_t r = 0; r < ROWS; r += 3)
    codes[r * 1000 + *col] = r % 2 ? 0xff : 0x7f;
  float y[ROWS];
  run(fn, &weight, 0, 1, y);
  for (uint32_t r = 0; r < ROWS; r++) {
    if (isnan(y[r]) != (r % 3 == 0))
      return KERNEL_FAIL(w, "column %u: row %u is %g", *col, r, y[r]);
  }
  return true;
}

TEST(one_nan_code) {
  static const uint32_t cols[] = {0, 63, 64, 100, 511, 960, 999};
  for (size_t i = 0; i < TD_COUNT(cols); i++)
    for_versions("linear_f8e4m3", check_one_nan, &cols[i]);
}
