// tests/unit/test_kernels_f16.c - linear kernels in FP16 chains (kernels/cpu/avx512fp16): they lose
// less than rounding activations to BF16 would, and no sum leaves the range of FP16. That each is
// within error_bound, whatever its weights and activations, is for test_kernels_linear.c and
// test_kernels_f8.c.
#include <setjmp.h>

#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "unit/kernel_test.h"

enum { ROWS = 16, COLS = 7168, MAX_TOKENS = 18 };

typedef struct {
  const char *family;
  td_dtype dtype;
  td_layout layout;
  uint32_t scale_rows, scale_cols;
} format;

static const format formats[] = {{"linear_f8e4m3", TD_F8E4M3, TD_LAYOUT_ROWS, 128, 128},
                                 {"linear_f8e4m3", TD_F8E4M3, TD_LAYOUT_ROWS, 1, COLS},
                                 {"linear_i8", TD_I8, TD_LAYOUT_ROWS, 1, COLS},
                                 {"linear_i4", TD_I4, TD_LAYOUT_ROWS, 1, 128},
                                 {"linear_i4_gptq", TD_I4, TD_LAYOUT_GPTQ, 1, 128},
                                 {"linear_i4_awq", TD_I4, TD_LAYOUT_AWQ, 1, 128}};

static uint8_t codes[ROWS * COLS];
static uint32_t zeros[ROWS / 8 * (COLS / 128)];
static float scales[ROWS * (COLS / 128)], x[MAX_TOKENS * COLS], y[MAX_TOKENS * ROWS];

// Close to a normal distribution of variance 1.
static double normal(uint64_t *rng) {
  double sum = 0;
  for (int i = 0; i < 12; i++)
    sum += (double)ref_float(rng) / 2;
  return sum;
}

static uint8_t nearest_e4m3(double value) {
  int best = 0;
  for (int code = 1; code < 0x7f; code++) {
    if (fabs(ref_e4m3((uint8_t)code) - fabs(value)) < fabs(ref_e4m3((uint8_t)best) - fabs(value))) {
      best = code;
    }
  }
  return (uint8_t)(value < 0 ? best | 0x80 : best);
}

static td_weight describe(const format *f) {
  return (td_weight){.data = codes,
                     .scale = scales,
                     .zero = f->dtype == TD_I4 ? zeros : NULL,
                     .dtype = f->dtype,
                     .scale_dtype = TD_F32,
                     .layout = f->layout,
                     .rows = ROWS,
                     .cols = COLS,
                     .scale_rows = f->scale_rows,
                     .scale_cols = f->scale_cols};
}

static td_weight make_normal(const format *f) {
  uint64_t rng = 4;
  for (size_t i = 0; i < TD_COUNT(codes); i++) {
    double value = normal(&rng);
    codes[i] = f->dtype == TD_I8 ? (uint8_t)(int)fmin(127, value * 30) : nearest_e4m3(value * 100);
  }
  for (size_t i = 0; i < TD_COUNT(scales); i++)
    scales[i] = 1.5f + ref_float(&rng);
  memset(zeros, 0x77, sizeof zeros);
  for (size_t i = 0; i < TD_COUNT(x); i++)
    x[i] = (float)normal(&rng);
  return describe(f);
}

static void run(void (*fn)(void), const td_weight *w, uint32_t n) {
  ((td_linear_fn)fn)(&(td_linear_args){
      .w = w, .x = x, .y = y, .ldx = COLS, .ldy = ROWS, .n_tokens = n, .row_end = ROWS});
}

static double through_bf16(double value) {
  float f = (float)value;
  uint32_t bits;
  memcpy(&bits, &f, sizeof bits);
  return ref_bf16((uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16));
}

// The error that rounding x to BF16 alone would make in a sum.
static double bf16_error(const td_weight *w, uint32_t row, const float *xs) {
  double sum = 0;
  for (uint32_t k = 0; k < COLS; k++)
    sum += ref_at(w, row, k) * (through_bf16(xs[k]) - xs[k]);
  return sum;
}

static bool loses_less_than_bf16(void (*fn)(void), const void *arg, why *why_) {
  const format *f = arg;
  if (!uses_f16(fn) && why_->text[0] == 0) return true; // of the others more is asked elsewhere
  td_weight w = make_normal(f);
  const uint32_t n_tokens = 2;
  double ours = 0, theirs = 0, norm = 0;
  run(fn, &w, n_tokens);
  for (uint32_t i = 0; i < n_tokens * ROWS; i++) {
    const float *xs = x + (size_t)(i / ROWS) * COLS;
    double sum = dot_exactly(&w, i % ROWS, xs).sum;
    norm += sum * sum;
    ours += (y[i] - sum) * (y[i] - sum);
    theirs += pow(bf16_error(&w, i % ROWS, xs), 2);
  }
  print_message("%s: error %.1e of the result, with BF16 activations %.1e\n", f->family,
                sqrt(ours / norm), sqrt(theirs / norm));
  return ours < theirs || KERNEL_FAIL(why_, "error %g, BF16 activations' %g", ours, theirs);
}

static void test_error_is_below_that_of_bf16(void **state) {
  (void)state;
  for (size_t i = 0; i < TD_COUNT(formats); i++)
    for_versions(formats[i].family, loses_less_than_bf16, &formats[i]);
}

// All products of one sign and as large as can be: sums reach the largest that there are.
static bool stays_in_range(void (*fn)(void), const void *arg, why *w) {
  const format *f = arg;
  td_weight weight = describe(f);
  memset(codes, f->dtype == TD_I4 ? 0 : f->dtype == TD_I8 ? 0x80 : 0x7e, sizeof codes);
  memset(zeros, 0xff, sizeof zeros);
  for (size_t i = 0; i < TD_COUNT(scales); i++)
    scales[i] = 0x1.fffffep-4f;
  for (uint32_t t = 0; t < MAX_TOKENS; t++) {
    for (uint32_t k = 0; k < COLS; k++)
      x[t * COLS + k] = ldexpf(0x1.fffffep0f, (int)t * 9 - 80);
  }
  for (uint32_t n = 1; n <= MAX_TOKENS; n += n == 1 ? 7 : 10) {
    run(fn, &weight, n);
    for (uint32_t i = 0; i < n * ROWS; i++) {
      exact_dot d = dot_exactly(&weight, i % ROWS, x + (size_t)(i / ROWS) * COLS);
      if (!(fabs(y[i] - d.sum) <= error_bound(fn, &weight, &d)))
        return KERNEL_FAIL(w, "%u tokens, token %u: %g, not %g", n, i / ROWS, y[i], d.sum);
      i += ROWS - 1; // rows are alike
    }
  }
  return true;
}

static void test_the_largest_sums(void **state) {
  (void)state;
  for (size_t i = 0; i < TD_COUNT(formats); i++)
    for_versions(formats[i].family, stays_in_range, &formats[i]);
}

// Kernels with one fault each; the checks above must see it.

// One row times one token in chains of some steps of 32 lanes, x below 2^10.
static double in_chains(const td_weight *w, uint32_t row, const float *xs, uint32_t n_steps,
                        uint32_t n_cols) {
  double total = 0;
  for (uint32_t lane = 0; lane < 32; lane++) {
    double sum = 0;
    for (uint32_t k = lane, step = 0; k < n_cols; k += 32, step++) {
      double product = ref_at(w, row, k) / 256 * ref_through_half((double)xs[k] * 128);
      sum = ref_through_half(sum + product);
      if (step % n_steps == n_steps - 1) total += sum, sum = 0;
    }
    total += sum;
  }
  return total * 2;
}

static void chains(const td_linear_args *a, uint32_t n_steps, uint32_t n_cols) {
  for (uint32_t i = 0; i < a->n_tokens * ROWS; i++)
    y[i] = (float)in_chains(a->w, i % ROWS, x + (size_t)(i / ROWS) * COLS, n_steps, n_cols);
}

static void sound(const td_linear_args *a) {
  chains(a, 16, COLS);
}

static void never_leaves_f16(const td_linear_args *a) {
  chains(a, COLS, COLS);
}

static void forgets_a_column(const td_linear_args *a) {
  chains(a, 16, COLS - 1);
}

static void test_broken_kernels_are_caught(void **state) {
  (void)state;
  why w = {"not one of the registered"};
  typedef void (*any)(void);
  assert_true(loses_less_than_bf16((any)sound, &formats[1], &w));
  assert_false(loses_less_than_bf16((any)never_leaves_f16, &formats[1], &w));
  assert_false(loses_less_than_bf16((any)forgets_a_column, &formats[1], &w));
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_error_is_below_that_of_bf16),
      cmocka_unit_test(test_the_largest_sums),
      cmocka_unit_test(test_broken_kernels_are_caught),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
