// tests/unit/test_kernels_rounding.c - linear kernels that round activations. Those in FP16 chains
// (kernels/cpu/avx512fp16) lose less than rounding to BF16 would, and no sum leaves the range of
// FP16; those of kernels/cpu/avx512bf16 and avx2int16 lose no more than that. That each is within
// error_bound, whatever its weights and activations, is for test_kernels_linear.c and
// test_kernels_f8.c.
// CTest: no-asan no-tsan

#include "unit/kernel_test.h"

enum { ROWS = 16, COLS = 7168, MAX_TOKENS = 18 };

typedef struct {
  const char *family;
  td_dtype dtype;
  uint32_t scale_rows, scale_cols;
} format;

static const format formats[] = {
    {"linear_f8e4m3", TD_F8E4M3, 128, 128}, {"linear_f8e4m3", TD_F8E4M3, 1, COLS},
    {"linear_i8", TD_I8, 1, COLS},          {"linear_bf16", TD_BF16, 1, COLS},
    {"linear_f4e2m1", TD_F4E2M1, 1, 32},    {"linear_i4", TD_I4, 1, 128}};

static _Alignas(64) uint8_t codes[ROWS * COLS * sizeof(uint16_t)];
static uint32_t zeros[ROWS / 8 * (COLS / 128)];
static float scales[ROWS * (COLS / 32)], x[MAX_TOKENS * COLS], y[MAX_TOKENS * ROWS];

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

static uint16_t bf16_bits(double value) {
  float f = (float)value;
  uint32_t bits;
  memcpy(&bits, &f, sizeof bits);
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static td_weight describe(const format *f) {
  return (td_weight){.data = codes,
                     .scale = f->dtype == TD_BF16 ? NULL : scales,
                     .zero = f->dtype == TD_I4 ? zeros : NULL,
                     .dtype = f->dtype,
                     .scale_dtype = TD_F32,
                     .rows = ROWS,
                     .cols = COLS,
                     .scale_rows = f->scale_rows,
                     .scale_cols = f->scale_cols,
                     .global_scale = 1};
}

static td_weight make_normal(const format *f) {
  uint64_t rng = 4;
  for (size_t i = 0; i < ROWS * COLS; i++) {
    double value = normal(&rng);
    if (f->dtype == TD_BF16) {
      const uint16_t bits = bf16_bits(value);
      memcpy(codes + i * sizeof bits, &bits, sizeof bits);
      continue;
    }
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
  multiply(fn, w, x, y, n);
}

// The error that rounding x to BF16 alone would make in a sum: decode's times the scales of
// bands, so that x lies in its binades as it does there.
static double bf16_error(const td_weight *w, uint32_t row, const float *xs) {
  double sum = 0;
  for (uint32_t k = 0; k < COLS; k++) {
    double scale = w->scale_rows > 1 && !as_prompt ? ref_scale(w, row, k) : 1,
           scaled = xs[k] * scale;
    sum += ref_at(w, row, k) / scale * (ref_bf16(bf16_bits(scaled)) - scaled);
  }
  return sum;
}

// FP16: less than that. BF16: no more, but for the sums' own rounding.
static bool loses_as_it_may(void (*fn)(void), const void *arg, why *why_) {
  const format *f = arg;
  const bool rounds = uses_f16(fn) || uses_bf16(fn) || uses_int16(fn);
  if (!rounds && why_->text[0] == 0) return true; // more is asked elsewhere
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
  const double most = uses_bf16(fn) ? 1.01 * theirs : theirs;
  return ours < most || KERNEL_FAIL(why_, "error %g, BF16 activations' %g", ours, theirs);
}

TEST(error_is_within_that_of_bf16) {
  for (size_t i = 0; i < TD_COUNT(formats); i++)
    for_versions(formats[i].family, loses_as_it_may, &formats[i]);
}

static int largest_byte(td_dtype dtype) {
  switch (dtype) {
  case TD_I4: return 0;
  case TD_I8: return 0x80;
  case TD_F4E2M1: return 0x77;
  case TD_BF16: return 0x3f; // others have no largest that is finite
  default: return 0x7e;
  }
}

// All products of one sign and as large as can be: sums reach the largest that there are.
static bool stays_in_range(void (*fn)(void), const void *arg, why *w) {
  const format *f = arg;
  td_weight weight = describe(f);
  memset(codes, largest_byte(f->dtype), sizeof codes);
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

TEST(the_largest_sums) {
  for (size_t i = 0; i < TD_COUNT(formats); i++)
    for_versions(formats[i].family, stays_in_range, &formats[i]);
}

// BF16 weights and activations of any size, one of each row and token, the others 0 and 1: products
// of powers of two are exact wherever FP32 has them.
static bool keeps_any_size(void (*fn)(void), const void *arg, why *why_) {
  static const int of_w[ROWS] = {-133, -127, -126, -120, -100, -65, -64, -63,
                                 -62,  -30,  0,    30,   62,   63,  64,  120};
  static const int of_x[MAX_TOKENS] = {-149, -127, -126, -100, -65, -64, -63, -62, -40,
                                       0,    20,   40,   62,   63,  64,  65,  100, 126};
  enum { COLUMN = 1027 };
  td_weight w = describe(arg);
  memset(codes, 0, sizeof codes);
  for (uint32_t r = 0; r < ROWS; r++) {
    const uint16_t bits = bf16_bits(ldexp(-1, of_w[r]));
    memcpy(codes + ((size_t)r * COLS + COLUMN) * sizeof bits, &bits, sizeof bits);
  }
  for (uint32_t i = 0; i < TD_COUNT(x); i++)
    x[i] = i % COLS == COLUMN ? ldexpf(1, of_x[i / COLS]) : 1;
  for (uint32_t n = 1; n <= MAX_TOKENS; n += n == 1 ? 7 : 10) {
    run(fn, &w, n);
    for (uint32_t i = 0; i < n * ROWS; i++) {
      const int exponent = of_w[i % ROWS] + of_x[i / ROWS];
      if (exponent < -149 || exponent > 127) continue;
      if (y[i] != ldexpf(-1, exponent))
        return KERNEL_FAIL(why_, "%u tokens: 2^%d times 2^%d is %a", n, of_w[i % ROWS],
                           of_x[i / ROWS], y[i]);
    }
  }
  return true;
}

static const format bf16 = {"linear_bf16", TD_BF16, 1, COLS};

TEST(bf16_of_any_size) {
  for_versions(bf16.family, keeps_any_size, &bf16);
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

// As a processor that takes what is subnormal for 0.
static void loses_small_ones(const td_linear_args *a) {
  for (uint32_t i = 0; i < a->n_tokens * ROWS; i++) {
    double sum = 0;
    for (uint32_t k = 0; k < COLS; k++) {
      double product = ref_at(a->w, i % ROWS, k) * x[i / ROWS * COLS + k];
      if (fabs(ref_at(a->w, i % ROWS, k)) >= 0x1p-126) sum += product;
    }
    y[i] = (float)sum;
  }
}

TEST(broken_kernels_are_caught) {
  why w = {"not one of the registered"};
  typedef void (*any)(void);
  assert_true(loses_as_it_may((any)sound, &formats[1], &w));
  assert_false(loses_as_it_may((any)never_leaves_f16, &formats[1], &w));
  assert_false(loses_as_it_may((any)forgets_a_column, &formats[1], &w));
  assert_false(keeps_any_size((any)loses_small_ones, &bf16, &w));
}
