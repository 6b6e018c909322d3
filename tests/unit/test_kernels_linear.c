// tests/unit/test_kernels_linear.c - the linear kernels, every version this machine runs.
// The reference accumulates in double. To the bound of error_bound, products and sums that become
// subnormal in FP32 add k 2^-149, times 2^8 and the scale for FP8.
// CTest: slow no-asan no-tsan

#include "unit/kernel_test.h"

typedef struct {
  const ref_format *format;
  uint32_t rows, cols, scale_rows, scale_cols, n_tokens;
} shape;

static double max_scale(const td_weight *w) {
  if (!w->scale) return 1;
  double max = 0;
  for (uint32_t r = 0; r < w->rows; r++) {
    for (uint32_t k = 0; k < w->cols; k += w->scale_cols)
      max = fmax(max, fabs(ref_scale(w, r, k)));
  }
  return max * 256;
}

static bool row_within_bound(void (*fn)(void), const td_weight *w, const exact_row *exact,
                             uint32_t r, const float *x, const float *y, uint32_t n_tokens,
                             double tiny, why *why_) {
  for (uint32_t t = 0; t < n_tokens; t++) {
    exact_dot d = exact_row_dot(exact, w, x + (size_t)t * w->cols);
    double bound = error_bound(fn, w, &d) + tiny;
    double error = fabs(y[(size_t)t * w->rows + r] - d.sum);
    if (!(error <= bound)) {
      return KERNEL_FAIL(why_, "%ux%u, %u tokens: row %u token %u is off by %g, bound %g", w->rows,
                         w->cols, n_tokens, r, t, error, bound);
    }
  }
  return true;
}

// Compares y [n_tokens][rows] with the reference, of large matrices some of the rows. fn NULL: with
// the bound of FP32.
static bool within_bound(void (*fn)(void), const td_weight *w, const float *x, const float *y,
                         uint32_t n_tokens, why *why_) {
  double tiny = ldexp((double)w->cols, -149) * max_scale(w);
  uint32_t step = (uint64_t)w->rows * w->cols * n_tokens > 4000000 ? 61 : 1;
  exact_row exact = exact_row_of(w);
  bool ok = true;
  for (uint32_t r = 0; r < w->rows && ok; r += step) {
    exact_row_read(&exact, w, r);
    ok = row_within_bound(fn, w, &exact, r, x, y, n_tokens, tiny, why_);
  }
  exact_row_free(&exact);
  return ok;
}

static void fill_x(const shape *s, bool whole, float *x) {
  uint64_t rng = s->rows * 7 + s->cols;
  for (size_t i = 0; i < (size_t)s->n_tokens * s->cols; i++) {
    x[i] = ref_float(&rng);
    if (whole) x[i] = s->format->dtype == TD_I8 ? rintf(x[i]) : rintf(4 * x[i]);
  }
}

// Weights, scales, x and y all end at guard pages. whole: x are whole numbers so small that sums in
// FP16 are exact, of codes that are whole or half, and so is rounding them to BF16.
static bool check_product(void (*fn)(void), const shape *s, bool whole, why *w) {
  uint64_t rng = s->rows * 31 + s->cols;
  uint32_t rows = s->rows;
  ref_weight weight = ref_make_format(&rng, s->format, rows, s->cols, s->scale_rows, s->scale_cols);
  ref_mem x = ref_guarded((size_t)s->n_tokens * s->cols * sizeof(float));
  ref_mem y = ref_guarded((size_t)s->n_tokens * rows * sizeof(float));
  fill_x(s, whole, x.data);
  memset(y.data, 0xff, (size_t)s->n_tokens * rows * sizeof(float));
  multiply(fn, &weight.w, x.data, y.data, s->n_tokens);
  bool ok = within_bound(whole ? NULL : fn, &weight.w, x.data, y.data, s->n_tokens, w);
  ref_free_weight(&weight);
  ref_unmap(&x);
  ref_unmap(&y);
  return ok;
}

static bool check_shape(void (*fn)(void), const void *arg, why *w) {
  return check_product(fn, arg, false, w);
}

// With the bound of FP32, versions that have another one elsewhere: a column that is left out is
// less than what that allows.
static bool check_whole(void (*fn)(void), const void *arg, why *w) {
  const shape *s = arg;
  const bool exact = td_dtype_bits(s->format->dtype) == 4 || s->format->dtype == TD_BF16;
  const bool in_bf16 = uses_bf16(fn) && !s->format->zeros;
  return !(uses_f16(fn) || in_bf16) || !exact || check_product(fn, s, true, w);
}

TEST(shapes) {
  static const shape shapes[] = {
      {0, 1, 1, 128, 128, 1},     {0, 3, 385, 128, 128, 2},   {0, 17, 31, 128, 128, 3},
      {0, 300, 200, 128, 128, 4}, {0, 9, 33, 4, 7, 5},        {0, 21, 129, 2, 128, 6},
      {0, 40, 1000, 1, 1000, 7},  {0, 5, 1031, 128, 1, 11},   {0, 130, 258, 128, 128, 97},
      {0, 33, 16, 128, 128, 200}, {0, 2, 5000, 1, 5000, 13},  {0, 7, 2047, 128, 96, 1},
      {0, 12, 15, 128, 128, 12},  {0, 8, 512, 128, 128, 100}, {0, 66, 320, 1, 32, 3},
      {0, 70, 328, 1, 64, 9},     {0, 13, 272, 1, 16, 1},     {0, 35, 1088, 1, 32, 1},
      {0, 150, 136, 1, 24, 4},    {0, 257, 512, 1, 256, 2},   {0, 18, 1640, 1, 48, 17},
  };
  for (size_t f = 0; f < TD_COUNT(ref_formats); f++) {
    for (size_t i = 0; i < TD_COUNT(shapes); i++) {
      shape s = shapes[i];
      s.format = &ref_formats[f];
      for_versions(s.format->family, check_shape, &s);
      for_versions(s.format->family, check_whole, &s);
    }
  }
}

void linear_bf16__emulated(const td_linear_args *args), linear_i4__emulated(const td_linear_args *);

// AMX's tiles as arrays (emulated_tiles.h), where the CPU rounds to BF16.
TEST(emulated_tiles) {
  static const shape shapes[] = {{0, 1, 64, 1, 64, 1},
                                 {0, 70, 320, 1, 32, 3},
                                 {0, 130, 1280, 1, 128, 33},
                                 {0, 64, 2048, 1, 2048, 16},
                                 {0, 513, 128, 1, 32, 130}};
  if (!__builtin_cpu_supports("avx512bf16")) skip();
  as_prompt = true;
  for (size_t i = 0; i < TD_COUNT(shapes) * TD_COUNT(ref_formats); i++) {
    shape s = shapes[i % TD_COUNT(shapes)];
    s.format = &ref_formats[i / TD_COUNT(shapes)];
    const bool is_bf16 = s.format->dtype == TD_BF16;
    if (!is_bf16 && s.format->dtype != TD_I4) continue;
    why w = {""};
    void (*fn)(void) = (void (*)(void))(is_bf16 ? linear_bf16__emulated : linear_i4__emulated);
    if (!check_product(fn, &s, true, &w)) fail_msg("%s: %s", s.format->family, w.text);
  }
  as_prompt = false;
}

TEST(an_expert_of_deepseek) {
  for (size_t f = 0; f < TD_COUNT(ref_formats); f++) {
    static const uint32_t batches[] = {1, 7};
    for (size_t b = 0; b < TD_COUNT(batches); b++) {
      uint32_t rows = f < 3 ? 2048 : 136; // of the formats without a fast version for every ISA
      shape s = {&ref_formats[f], rows, 7168, 128, 32u << f % 3, batches[b]};
      for_versions(s.format->family, check_shape, &s);
    }
  }
}

// One product w x s has at most two roundings; every code at every place of a long row must give
// its value.
static bool check_codes(void (*fn)(void), const void *arg, why *w) {
  enum { COLS = 70 };
  const float *scale = arg;
  uint8_t codes[256 * COLS];
  float x[COLS], y[256];
  for (int c = 0; c < COLS; c++)
    x[c] = 1;
  td_weight weight = {.data = codes,
                      .scale = scale,
                      .dtype = TD_F8E4M3,
                      .rows = 256,
                      .cols = COLS,
                      .scale_rows = 256,
                      .scale_cols = COLS};
  for (int place = 0; place < COLS; place++) {
    memset(codes, place % 2 ? 0x80 : 0, sizeof codes); // zeros of either sign
    for (int r = 0; r < 256; r++)
      codes[r * COLS + place] = (uint8_t)r;
    multiply(fn, &weight, x, y, 1);
    for (int r = 0; r < 256; r++) {
      double want = ref_e4m3((uint8_t)r) * *scale;
      bool same = isnan(want) ? isnan(y[r]) : y[r] == (float)want;
      if (!same) return KERNEL_FAIL(w, "code 0x%02x at %d: %g, not %g", r, place, y[r], want);
    }
  }
  return true;
}

TEST(every_e4m3_code) {
  static const float scales[] = {1, 0x1p-20f, 0x1.8p3f, 0x1p119f, -0x1p118f, 0x1p-110f};
  for (size_t i = 0; i < TD_COUNT(scales); i++) {
    for_versions("linear_f8e4m3", check_codes, &scales[i]);
  }
}

// A NaN code makes its row NaN in every path, and only its row.
static bool check_nan_row(void (*fn)(void), const void *arg, why *w) {
  enum { ROWS = 20, COLS = 300, BAD = 13 };
  (void)arg;
  uint64_t rng = 3;
  ref_weight weight = ref_make_weight(&rng, TD_F8E4M3, ROWS, COLS, 128, 128);
  ((uint8_t *)weight.data.data)[BAD * COLS + 299] = 0xff;
  bool ok = true;
  for (uint32_t n = 1; ok && n <= 7; n++) {
    float x[7 * COLS] = {0}, y[7 * ROWS];
    multiply(fn, &weight.w, x, y, n);
    for (uint32_t i = 0; ok && i < n * ROWS; i++) {
      if (i % ROWS == BAD ? !isnan(y[i]) : y[i] != 0) {
        ok = KERNEL_FAIL(w, "%u tokens, row %u: %g", n, i % ROWS, y[i]);
      }
    }
  }
  ref_free_weight(&weight);
  return ok;
}

TEST(nan_codes_make_the_row_nan) {
  for_versions("linear_f8e4m3", check_nan_row, NULL);
}

// y[t][r] to the bit, whatever n_tokens, row range, y_row0, x_rows and way.
static bool check_invariance(void (*fn)(void), const void *arg, why *w) {
  const shape *s = arg;
  uint32_t rows = s->rows, cols = s->cols, max = s->n_tokens;
  uint64_t rng = 5;
  ref_weight weight = ref_make_format(&rng, s->format, rows, cols, s->scale_rows, s->scale_cols);
  float *x = ref_floats(&rng, (size_t)max * cols), *want = malloc((size_t)max * rows * sizeof *x);
  float *y = malloc((size_t)max * rows * sizeof *y);
  uint32_t *x_rows = malloc(max * sizeof *x_rows);
  const td_gemv_schedule way = in_way;
  in_way = TD_GEMV_SEQUENTIAL;
  for (uint32_t t = 0; t < max; t++) {
    x_rows[t] = max - 1 - t;
    multiply(fn, &weight.w, x + (size_t)t * cols, want + (size_t)t * rows, 1);
  }
  in_way = way;
  bool ok = true;
  for (uint32_t n = 1; ok && n <= max; n += n < 37 ? 1 : 31) {
    for (int reversed = 0; ok && reversed < 2; reversed++) {
      uint32_t begin = ref_below(&rng, rows), end = begin + 1 + ref_below(&rng, rows - begin);
      ((td_linear_fn)fn)(&(td_linear_args){.w = &weight.w,
                                           .x = x,
                                           .x_rows = reversed ? x_rows : NULL,
                                           .y = y,
                                           .ldx = cols,
                                           .ldy = end - begin,
                                           .n_tokens = n,
                                           .row_begin = begin,
                                           .row_end = end,
                                           .y_row0 = begin,
                                           .prompt = as_prompt,
                                           .way = way});
      for (uint32_t t = 0; ok && t < n; t++) {
        uint32_t from = reversed ? x_rows[t] : t;
        if (memcmp(y + (size_t)t * (end - begin), want + (size_t)from * rows + begin,
                   (end - begin) * sizeof *y) != 0) {
          ok = KERNEL_FAIL(w, "token %u of %u differs from itself alone, rows %u to %u", t, n,
                           begin, end);
        }
      }
    }
  }
  free(x);
  free(want);
  free(y);
  free(x_rows);
  ref_free_weight(&weight);
  return ok;
}

TEST(batch_invariance) {
  static const shape shapes[] = {
      {0, 19, 385, 128, 128, 37}, {0, 53, 1300, 1, 1300, 230}, {0, 37, 100, 16, 9, 130},
      {0, 139, 328, 1, 32, 37},   {0, 20, 272, 1, 16, 70},     {0, 24, 1280, 1, 128, 130},
      {0, 29, 640, 1, 32, 20},    {0, 17, 2704, 128, 128, 3},  {0, 9, 5120, 128, 128, 14}};
  for (size_t f = 0; f < TD_COUNT(ref_formats); f++) {
    for (size_t i = 0; i < TD_COUNT(shapes); i++) {
      shape s = shapes[i];
      s.format = &ref_formats[f];
      for_versions(s.format->family, check_invariance, &s);
    }
  }
}

// Where 4-bit kernels change their ways: groups of several blocks, a part of one or beside them,
// rows longer than a window, activations in order that have no room, or none in L1, strips with
// rows and words left over.
TEST(windows_and_strips) {
  static const shape shapes[] = {
      {0, 6, 8400, 1, 256, 3},  {0, 5, 8456, 1, 1024, 2}, {0, 9, 1160, 1, 384, 18},
      {0, 10, 700, 1, 24, 17},  {0, 7, 776, 1, 64, 16},   {0, 11, 2104, 1, 40, 9},
      {0, 328, 132, 1, 64, 5},  {0, 600, 45, 1, 16, 3},   {0, 2, 12800, 1, 128, 16},
      {0, 1, 12800, 1, 32, 16}, {0, 71, 5376, 1, 128, 9}, {0, 38, 8320, 1, 32, 3},
      {0, 5, 640, 1, 64, 5},    {0, 6, 384, 1, 128, 2},   {0, 7, 512, 1, 16, 6}};
  for (size_t f = 0; f < TD_COUNT(ref_formats); f++) {
    if (td_dtype_bits(ref_formats[f].dtype) != 4) continue;
    for (size_t i = 0; i < TD_COUNT(shapes); i++) {
      shape s = shapes[i];
      s.format = &ref_formats[f];
      for_versions(s.format->family, check_shape, &s);
      for_versions(s.format->family, check_whole, &s);
      for_versions(s.format->family, check_invariance, &s);
      s.n_tokens = 1;
      for_versions(s.format->family, check_shape, &s);
      for_versions(s.format->family, check_whole, &s);
    }
  }
}

// 4-bit codes times tokens of any size: 2^-140 to 2^80, nothing but zeros, one value that is not
// finite.
static bool check_ranges(void (*fn)(void), const void *arg, why *w) {
  enum { MOST_ROWS = 24, TOKENS = 19, ZEROS = 16, INF, NOT };
  const shape *s = arg;
  const uint32_t rows = 21, cols = s->cols;
  uint64_t rng = 11;
  ref_weight m = ref_make_format(&rng, s->format, rows, cols, 1, s->scale_cols);
  float *x = ref_floats(&rng, TOKENS * cols), y[TOKENS * MOST_ROWS], one[MOST_ROWS];
  for (uint32_t i = 0; i < ZEROS * cols; i++)
    x[i] = ldexpf(x[i], (int)(i / cols) * 220 / 15 - 140);
  memset(x + ZEROS * cols, 0, cols * sizeof *x);
  x[INF * cols + cols - 1] = INFINITY;
  x[NOT * cols] = NAN;
  td_linear_args a = {.w = &m.w,
                      .x = x,
                      .y = y,
                      .ldx = cols,
                      .ldy = rows,
                      .n_tokens = TOKENS,
                      .row_end = rows,
                      .prompt = as_prompt,
                      .way = in_way};
  ((td_linear_fn)fn)(&a);
  bool ok = within_bound(fn, &m.w, x, y, ZEROS + 1, w);
  for (uint32_t i = INF * rows; ok && i < TOKENS * rows; i++) {
    if (isfinite(y[i])) ok = KERNEL_FAIL(w, "token %u is %g", i / rows, y[i]);
  }
  a.n_tokens = 1;
  a.y = one;
  for (uint32_t t = 0; ok && t < NOT; t++, a.x += cols) {
    ((td_linear_fn)fn)(&a);
    if (memcmp(one, y + t * rows, rows * sizeof *one))
      ok = KERNEL_FAIL(w, "token %u alone differs", t);
  }
  ref_free_weight(&m);
  free(x);
  return ok;
}

// Token t has nothing but column t, so small that products with most weights are subnormal, or
// would be if one of both were taken lower.
static bool check_small_ones(void (*fn)(void), const void *arg, why *w) {
  enum { MOST_ROWS = 24, COLS = 72 };
  const ref_format *f = arg;
  uint64_t rng = 23;
  const uint32_t scale_rows = td_dtype_bits(f->dtype) == 4 ? 1 : 128;
  ref_weight m = ref_make_format(&rng, f, 19, COLS, scale_rows, 32);
  float x[COLS * COLS] = {0}, y[COLS * MOST_ROWS];
  bool ok = true;
  for (int exponent = -127; ok && exponent < -60; exponent += 11) {
    for (int t = 0; t < COLS; t++)
      x[t * COLS + t] = ldexpf(1.5f, exponent);
    multiply(fn, &m.w, x, y, COLS);
    ok = within_bound(fn, &m.w, x, y, COLS, w);
  }
  ref_free_weight(&m);
  return ok;
}

TEST(activations_of_any_size) {
  for (size_t f = 0; f < TD_COUNT(ref_formats); f++) {
    for_versions(ref_formats[f].family, check_small_ones, &ref_formats[f]);
    if (td_dtype_bits(ref_formats[f].dtype) == 4) {
      static const uint32_t widths[][2] = {{600, 32}, {640, 32}, {640, 128}}; // and groups
      for (size_t i = 0; i < TD_COUNT(widths); i++) {
        shape s = {.format = &ref_formats[f], .cols = widths[i][0], .scale_cols = widths[i][1]};
        for_versions(s.format->family, check_ranges, &s);
      }
    }
  }
}

// Kernels with one fault each; the checks above must see it.

static void naive(const td_linear_args *a, uint32_t skip, bool first_scale_only, bool batch_order) {
  const td_weight *w = a->w;
  for (uint32_t t = 0; t < a->n_tokens; t++) {
    const float *x = a->x + (a->x_rows ? a->x_rows[t] : t) * a->ldx;
    for (uint32_t r = a->row_begin; r < a->row_end; r++) {
      float sum = 0;
      for (uint32_t i = 0; i + skip < w->cols; i++) {
        uint32_t k = batch_order && a->n_tokens > 8 ? w->cols - 1 - i : i;
        double value = ref_at(w, r, k);
        if (first_scale_only) value = value / ref_scale(w, r, k) * ref_scale(w, r, 0);
        sum += (float)value * x[k];
      }
      a->y[t * a->ldy + r - a->y_row0] = sum;
    }
  }
}

static void broken_last_column(const td_linear_args *a) {
  naive(a, 1, false, false);
}

static void broken_scale(const td_linear_args *a) {
  naive(a, 0, true, false);
}

static void broken_invariance(const td_linear_args *a) {
  naive(a, 0, false, true);
}

static void sound(const td_linear_args *a) {
  naive(a, 0, false, false);
}

static void broken_subnormals(const td_linear_args *a) {
  uint8_t codes[256 * 70];
  memcpy(codes, a->w->data, sizeof codes);
  for (size_t i = 0; i < sizeof codes; i++)
    codes[i] = codes[i] & 0x78 ? codes[i] : codes[i] & 0x80;
  td_weight w = *a->w;
  w.data = codes;
  td_linear_args flushed = *a;
  flushed.w = &w;
  naive(&flushed, 0, false, false);
}

TEST(broken_kernels_are_caught) {
  why w;
  float one = 1;
  shape s = {&ref_formats[2], 20, 300, 128, 128, 12};
  assert_true(check_shape((void (*)(void))sound, &s, &w));
  assert_true(check_invariance((void (*)(void))sound, &s, &w));
  assert_true(check_codes((void (*)(void))sound, &one, &w));
  assert_false(check_shape((void (*)(void))broken_last_column, &s, &w));
  shape fp4 = {&ref_formats[11], 20, 300, 1, 32, 12};
  assert_true(check_product((void (*)(void))sound, &fp4, true, &w));
  assert_false(check_product((void (*)(void))broken_last_column, &fp4, true, &w));
  assert_false(check_shape((void (*)(void))broken_scale, &s, &w));
  assert_false(check_invariance((void (*)(void))broken_invariance, &s, &w));
  assert_false(check_codes((void (*)(void))broken_subnormals, &one, &w));
}

TEST(dispatch) {
  assert_int_equal(td_kernels_init("abacus"), TD_KERNELS_UNKNOWN_ISA);
  assert_int_equal(td_kernels_init(""), TD_KERNELS_UNKNOWN_ISA);
  size_t n;
  const td_kernel_variant *v = td_kernel_variants(&n);
  for (const char *const *isa = td_kernels_isas(); *isa; isa++) {
    bool runs = false;
    td_linear_fn expected = NULL;
    for (size_t i = 0; i < n; i++) {
      if (strcmp(v[i].family, "linear_bf16") != 0 || strcmp(v[i].isa, *isa) != 0) continue;
      runs = td_kernel_variant_runs(&v[i]);
      expected = (td_linear_fn)v[i].fn;
    }
    if (!expected) continue; // a folder of few families
    assert_int_equal(td_kernels_init(*isa), runs ? TD_KERNELS_OK : TD_KERNELS_ISA_ABSENT);
    if (!runs) continue;
    td_kernels_use_activations(TD_ACTIVATIONS_AUTO);
    assert_string_equal(td_kernels()->isa, *isa);
    assert_ptr_equal(td_kernels()->linear_bf16, expected);
    assert_ptr_equal(td_kernels_linear(&(td_weight){.dtype = TD_BF16}, false), expected);
    assert_null(td_kernels_linear(&(td_weight){.dtype = TD_I32}, false));
#define X(family, args_type) assert_non_null(td_kernels()->family);
    TD_KERNEL_FAMILIES(X)
#undef X
  }
}

static bool is_tested(td_dtype dtype, td_dtype scale_dtype) {
  if (td_dtype_block(dtype).cols > 0) return true; // test_kernels_blocks.c
  for (size_t f = 0; f < TD_COUNT(ref_formats); f++) {
    if (ref_formats[f].dtype == dtype && ref_formats[f].scale_dtype == scale_dtype) return true;
  }
  return false;
}

// Every kind of matrix, with every dtype of scales, has a kernel and a reference to test it by.
TEST(every_kind_has_a_kernel_and_a_reference) {
  assert_int_equal(td_kernels_init("scalar"), TD_KERNELS_OK);
#define X(dtype_, fam, scales)                                                                     \
  {                                                                                                \
    td_weight w = {.dtype = TD_##dtype_};                                                          \
    assert_ptr_equal(td_kernels_linear_exact(&w), td_kernels()->fam);                              \
    const td_weight_kind *kind = td_weight_kind_of(w.dtype);                                       \
    assert_string_equal(kind->family, #fam);                                                       \
    for (int s = 0; s < TD_N_DTYPES; s++) {                                                        \
      if (!(kind->scale_dtypes >> s & 1)) continue;                                                \
      if (!is_tested(w.dtype, (td_dtype)s))                                                        \
        fail_msg(#fam " with scales of %s", td_dtype_name((td_dtype)s));                           \
    }                                                                                              \
    assert_true(kind->scale_dtypes || is_tested(w.dtype, TD_F32));                                 \
  }
  TD_WEIGHT_KINDS(X)
#undef X
  assert_null(td_weight_kind_of(TD_I32));
  size_t n;
  const td_format *formats = td_formats(&n);
  for (size_t f = 0; f < n; f++) {
    const td_weight_kind *kind = td_weight_kind_of(formats[f].dtype);
    const bool has_scales = formats[f].scale_cols;
    if (!kind || has_scales != (kind->scale_dtypes >> formats[f].scale_dtype & 1))
      fail_msg("%s is no kind of matrix", formats[f].name);
  }
}

// Dtypes are found by their own name and no other.
TEST(dtypes_by_name) {
  td_dtype found;
  for (int i = 0; i < TD_N_DTYPES; i++) {
    assert_true(td_dtype_find(td_dtype_name((td_dtype)i), &found));
    assert_int_equal(found, i);
  }
  assert_false(td_dtype_find("BF1", &found));
  assert_int_equal(found, TD_N_DTYPES);
  assert_string_equal(td_dtype_name(TD_N_DTYPES), "unknown");
}
