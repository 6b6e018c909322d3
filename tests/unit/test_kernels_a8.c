// tests/unit/test_kernels_a8.c - 4-bit weights times activations in 8 bits: every version gives the
// scalar one's bits, and that one is within its bound of the product in double.
// CTest: no-asan no-tsan

#include "unit/kernel_test.h"

typedef struct {
  const ref_format *format;
  uint32_t rows, cols, scale_cols, n_tokens;
} shape;

static const ref_format formats[] = {
    {"linear_i4", TD_I4, TD_BF16, false},
    {"linear_i4", TD_I4, TD_F32, false},
    {"linear_i4", TD_I4, TD_F16, true},
    {"linear_f4e2m1", TD_F4E2M1, TD_F8E8M0, false},
    {"linear_f4e2m1", TD_F4E2M1, TD_F8E4M3, false},
};

static const shape shapes[] = {
    {0, 1, 1, 128, 1},     {0, 17, 31, 32, 3},     {0, 40, 1000, 1000, 13}, {0, 66, 320, 32, 12},
    {0, 13, 272, 16, 100}, {0, 70, 328, 64, 25},   {0, 33, 1088, 48, 2},    {0, 257, 512, 256, 4},
    {0, 32, 7168, 128, 1}, {0, 35, 2056, 128, 13}, {0, 45, 1000, 128, 97},  {0, 33, 1320, 64, 16},
    {0, 16, 640, 32, 33}};

typedef struct {
  ref_weight weight;
  ref_mem x, y;
  uint32_t *x_rows; // tokens backwards
  td_linear_args args;
} product;

static product make_product(const shape *s) {
  uint64_t rng = s->rows * 31 + s->cols;
  product p = {.weight = ref_make_format(&rng, s->format, s->rows, s->cols, 1, s->scale_cols),
               .x = ref_guarded((size_t)s->n_tokens * s->cols * sizeof(float)),
               .y = ref_guarded((size_t)s->n_tokens * s->rows * sizeof(float)),
               .x_rows = calloc(s->n_tokens, sizeof(uint32_t))};
  for (size_t i = 0; i < (size_t)s->n_tokens * s->cols; i++) {
    float size = i / 100 % 3 == 0 ? 0x1p-12f : 1; // blocks of little, and of both
    ((float *)p.x.data)[i] = ref_float(&rng) * size;
  }
  for (uint32_t t = 0; t < s->n_tokens; t++)
    p.x_rows[t] = s->n_tokens - 1 - t;
  memset(p.y.data, 0xff, (size_t)s->n_tokens * s->rows * sizeof(float));
  p.args = (td_linear_args){.x = p.x.data,
                            .x_rows = p.x_rows,
                            .y = p.y.data,
                            .ldx = s->cols,
                            .ldy = s->rows,
                            .n_tokens = s->n_tokens,
                            .row_end = s->rows};
  return p;
}

static void free_product(product *p) {
  ref_free_weight(&p->weight);
  ref_unmap(&p->x);
  ref_unmap(&p->y);
  free(p->x_rows);
}

static bool same_numbers(const float *a, const float *b, size_t n, size_t *at) {
  for (*at = 0; *at < n; ++*at) {
    if (memcmp(&a[*at], &b[*at], sizeof *a) && !(isnan(a[*at]) && isnan(b[*at]))) return false;
  }
  return true;
}

// In two calls, so that rows and their ranges do not matter either.
static bool same_as_scalar(void (*fn)(void), const void *arg, why *w) {
  const shape *s = arg;
  product p = make_product(s);
  p.args.w = &p.weight.w;
  uint32_t middle = s->rows * 2 / 3;
  td_linear_args part = p.args;
  part.row_end = middle;
  if (middle) ((td_linear_fn)fn)(&part);
  part.row_begin = middle;
  part.row_end = s->rows;
  ((td_linear_fn)fn)(&part);
  size_t n = (size_t)s->n_tokens * s->rows, at;
  float *expected = malloc(n * sizeof *expected);
  p.args.y = expected;
  td_kernels()->linear_w4a8(&p.args);
  bool ok = same_numbers(p.y.data, expected, n, &at);
  if (!ok) {
    ok = KERNEL_FAIL(w, "%ux%u, groups of %u, %u tokens: place %zu is %g, scalar %g", s->rows,
                     s->cols, s->scale_cols, s->n_tokens, at, ((float *)p.y.data)[at],
                     expected[at]);
  }
  free(expected);
  free_product(&p);
  return ok;
}

static void for_all_shapes(kernel_check check) {
  assert_int_equal(td_kernels_init("scalar"), TD_KERNELS_OK);
  for (size_t f = 0; f < TD_COUNT(formats); f++) {
    for (size_t i = 0; i < TD_COUNT(shapes); i++) {
      shape s = shapes[i];
      s.format = &formats[f];
      for_versions("linear_w4a8", check, &s);
    }
  }
}

TEST(all_versions_agree) {
  for_all_shapes(same_as_scalar);
}

void linear_w4a8__emulated(const td_linear_args *args); // emulated_tiles.h

TEST(emulated_tiles_agree) {
  if (!td_kernel_variant_runs(&(td_kernel_variant){.features = TD_ISA_AVX512})) skip();
  assert_int_equal(td_kernels_init("scalar"), TD_KERNELS_OK);
  for (size_t i = 0; i < TD_COUNT(formats) * TD_COUNT(shapes); i++) {
    shape s = shapes[i % TD_COUNT(shapes)];
    s.format = &formats[i / TD_COUNT(shapes)];
    why w;
    if (!same_as_scalar((void (*)(void))linear_w4a8__emulated, &s, &w)) fail_msg("%s", w.text);
  }
}

// The columns of x that share a scale.
static uint32_t block_of(const shape *s) {
  uint32_t group = s->scale_cols >= s->cols ? 128 : s->scale_cols;
  for (uint32_t n = 128; n > 16; n /= 2) {
    if (group % n == 0) return n;
  }
  return 16;
}

// Rounding x costs at most sum |w| max|x| / 254 over each block; the FP32 sum has a rounding a
// block, and two for its scale.
static bool check_row(const shape *s, const product *p, uint32_t row, uint32_t t, why *w) {
  const float *x = (const float *)p->x.data + (size_t)p->x_rows[t] * s->cols;
  uint32_t block = block_of(s), n_blocks = (s->cols + block - 1) / block;
  double sum = 0, bound = 0, magnitude = 0;
  for (uint32_t k = 0; k < s->cols; k += block) {
    double most = 0, weights = 0;
    for (uint32_t i = k; i < k + block && i < s->cols; i++) {
      double weight = ref_at(&p->weight.w, row, i);
      most = fmax(most, fabs(x[i]));
      weights += fabs(weight);
      magnitude += fabs(weight * x[i]);
      sum += weight * x[i];
    }
    bound += weights * most / 254;
  }
  bound = bound * (1 + 0x1p-20) + (n_blocks + 3) * 0x1p-24 * (magnitude + bound) + 0x1p-120;
  double error = fabs(((float *)p->y.data)[(size_t)t * s->rows + row] - sum);
  if (error <= bound) return true;
  return KERNEL_FAIL(w, "%ux%u, groups of %u: row %u token %u is off by %g, bound %g", s->rows,
                     s->cols, s->scale_cols, row, t, error, bound);
}

static bool within_bound(void (*fn)(void), const void *arg, why *w) {
  const shape *s = arg;
  product p = make_product(s);
  p.args.w = &p.weight.w;
  ((td_linear_fn)fn)(&p.args);
  bool ok = true;
  uint32_t row_step = s->rows * s->cols > 60000 ? 7 : 1, token_step = s->n_tokens / 9 + 1;
  for (uint32_t r = 0; r < s->rows && ok; r += row_step) {
    for (uint32_t t = 0; t < s->n_tokens && ok; t += token_step)
      ok = check_row(s, &p, r, t, w);
  }
  free_product(&p);
  return ok;
}

TEST(error_has_its_bound) {
  for_all_shapes(within_bound);
}

// Wrong in one place, by a few units of the last.
static void a_little_off(const td_linear_args *args) {
  td_kernels()->linear_w4a8(args);
  args->y[args->row_begin - args->y_row0] *= 1 + 0x1p-22f;
}

static void a_tenth_off(const td_linear_args *args) {
  td_kernels()->linear_w4a8(args);
  for (uint32_t r = args->row_begin; r < args->row_end; r++)
    args->y[r - args->y_row0] *= 1.1f;
}

TEST(the_checks_see_errors) {
  assert_int_equal(td_kernels_init("scalar"), TD_KERNELS_OK);
  why w;
  shape s = shapes[1];
  s.format = &formats[0];
  assert_false(same_as_scalar((void (*)(void))a_little_off, &s, &w));
  assert_false(within_bound((void (*)(void))a_tenth_off, &s, &w));
}

// A token with a value that is not finite has results that are not; others do not notice.
static bool check_values(void (*fn)(void), const void *arg, why *w) {
  (void)arg;
  enum { ROWS = 5, COLS = 64, TOKENS = 4 };
  uint64_t rng = 9;
  ref_weight weight = ref_make_format(&rng, &formats[3], ROWS, COLS, 1, 32);
  float x[TOKENS][COLS] = {{0}}, y[TOKENS][ROWS];
  for (int k = 0; k < COLS; k++)
    x[1][k] = x[3][k] = 1;
  x[1][40] = INFINITY;
  x[2][3] = NAN;
  x[3][0] = 0x1p-140f;
  ((td_linear_fn)fn)(&(td_linear_args){.w = &weight.w,
                                       .x = x[0],
                                       .y = y[0],
                                       .ldx = COLS,
                                       .ldy = ROWS,
                                       .n_tokens = TOKENS,
                                       .row_end = ROWS});
  bool ok = true;
  for (int r = 0; r < ROWS; r++) {
    if (y[0][r] != 0 || isfinite(y[1][r]) || isfinite(y[2][r]) || !isfinite(y[3][r])) {
      ok = KERNEL_FAIL(w, "row %d: %g %g %g %g", r, y[0][r], y[1][r], y[2][r], y[3][r]);
    }
  }
  ref_free_weight(&weight);
  return ok;
}

TEST(values_that_are_not_finite) {
  for_versions("linear_w4a8", check_values, NULL);
}

TEST(is_chosen_when_asked_for) {
  uint32_t scale = 0;
  td_weight w = {.dtype = TD_I4, .scale = &scale, .scale_rows = 1, .cols = 256, .scale_cols = 32};
  td_weight odd = w, bf16 = {.dtype = TD_BF16};
  odd.scale_cols = 24;
  assert_int_equal(td_kernels_init("scalar"), TD_KERNELS_OK);
  assert_ptr_equal(td_kernels_linear(&w, true), td_kernels()->linear_i4);
  td_kernels_use_activations(TD_ACTIVATIONS_INT8);
  assert_ptr_equal(td_kernels_linear(&w, true), td_kernels()->linear_w4a8);
  assert_ptr_equal(td_kernels_linear(&w, false), td_kernels()->linear_i4);
  assert_ptr_equal(td_kernels_linear(&odd, true), td_kernels()->linear_i4);
  assert_ptr_equal(td_kernels_linear(&bf16, true), td_kernels()->linear_bf16);
}
