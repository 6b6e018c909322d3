// tests/unit/test_kernels_blocks.c - kernels for GGUF's blocks, every version this machine runs.
// CTest: no-tsan

#include "unit/kernel_test.h"
#include "unit/ref_blocks.h"
#include "unit/sanitized.h"

// Of the formats every so many are multiplied: AddressSanitizer watches neither tiles nor the
// products of avx512int16 (CMakeLists.txt), and release compares them all.
enum { EACH = IS_ASAN ? 4 : 1 };

typedef struct {
  const ref_block_format *format;
  uint32_t rows, cols, n_tokens;
} shape;

// Rounded to 15 bits, x errs by half a 16256th of the largest of 256 columns; in 8 bits by half a
// 127th of that of a block's columns.
static exact_dot dot_blocks(const td_weight *w, uint32_t row, const float *x) {
  const uint32_t part = in_int8 ? td_dtype_block(w->dtype).cols : 256;
  exact_dot d = {0};
  double weights = 0, most = 0;
  for (uint32_t k = 0; k < w->cols; k++) {
    const double value = ref_block_at(w, row, k), product = value * x[k];
    d.sum += product;
    d.magnitude += fabs(product);
    weights += fabs(value);
    most = fmax(most, fabs(x[k]));
    if ((k + 1) % part > 0 && k + 1 < w->cols) continue;
    d.in_int16 += weights * most / (2 * (in_int8 ? 127 : 16256));
    weights = most = 0;
  }
  return d;
}

// Blocks, x and y end at guard pages.
static bool check_product(void (*fn)(void), const void *arg, why *w) {
  const shape *s = arg;
  uint64_t rng = s->rows * 31 + s->cols;
  ref_weight weight = ref_make_blocks(&rng, s->format, s->rows, s->cols);
  const size_t n_x = (size_t)s->n_tokens * s->cols, n_y = (size_t)s->n_tokens * s->rows;
  ref_mem x = ref_guarded(n_x * sizeof(float)), y = ref_guarded(n_y * sizeof(float));
  for (size_t i = 0; i < n_x; i++)
    ((float *)x.data)[i] = ref_float(&rng);
  memset(y.data, 0xff, n_y * sizeof(float));
  multiply(fn, &weight.w, x.data, y.data, s->n_tokens);
  bool ok = true;
  for (size_t i = 0; ok && i<n_y; i += s->n_tokens> 20 ? 7 : 1) {
    const uint32_t token = (uint32_t)(i / s->rows), row = (uint32_t)(i % s->rows);
    const exact_dot d = dot_blocks(&weight.w, row, (const float *)x.data + (size_t)token * s->cols);
    const double error = fabs(((const float *)y.data)[i] - d.sum);
    const double bound = error_bound(fn, &weight.w, &d);
    if (!(error <= bound)) {
      ok = KERNEL_FAIL(w, "%ux%u, row %u token %u: off by %g, bound %g", s->rows, s->cols, row,
                       token, error, bound);
    }
  }
  ref_free_weight(&weight);
  ref_unmap(&x);
  ref_unmap(&y);
  return ok;
}

TEST(products) {
  static const shape shapes[] = {{0, 1, 256, 1},  {0, 3, 512, 2},   {0, 17, 256, 3},
                                 {0, 5, 2304, 5}, {0, 130, 768, 1}, {0, 26, 1024, 16},
                                 {0, 9, 768, 17}, {0, 33, 1280, 97}};
  for (size_t f = 0; f < TD_COUNT(ref_block_formats); f += EACH) {
    for (size_t i = 0; i < TD_COUNT(shapes); i++) {
      shape s = shapes[i];
      s.format = &ref_block_formats[f];
      if (td_dtype_block(s.format->dtype).cols == 32) s.cols += 32 * (uint32_t)i;
      for_versions(s.format->family, check_product, &s);
    }
  }
}

// y[t][r] to the bit, whatever is computed beside it.
static bool check_invariance(void (*fn)(void), const void *arg, why *w) {
  enum { ROWS = 29, COLS = 768, MOST = 40 };
  uint64_t rng = 5;
  ref_weight weight = ref_make_blocks(&rng, arg, ROWS, COLS);
  float *x = ref_floats(&rng, MOST * COLS), want[MOST * ROWS], y[MOST * ROWS];
  for (uint32_t t = 0; t < MOST; t++)
    multiply(fn, &weight.w, x + t * COLS, want + t * ROWS, 1);
  bool ok = true;
  for (uint32_t n = 1; ok && n <= MOST; n += n < 20 ? 1 : 10) {
    const uint32_t begin = ref_below(&rng, ROWS), end = begin + 1 + ref_below(&rng, ROWS - begin);
    const uint32_t n_rows = end - begin;
    td_linear_args a = {.w = &weight.w, .x = x, .y = y, .ldx = COLS, .ldy = n_rows};
    a.n_tokens = n;
    a.row_begin = a.y_row0 = begin;
    a.row_end = end;
    a.prompt = as_prompt;
    a.x_int8 = in_int8;
    ((td_linear_fn)fn)(&a);
    for (uint32_t t = 0; ok && t < n; t++) {
      if (memcmp(y + t * n_rows, want + t * ROWS + begin, n_rows * sizeof *y) != 0)
        ok = KERNEL_FAIL(w, "token %u of %u differs, rows %u to %u", t, n, begin, end);
    }
  }
  free(x);
  ref_free_weight(&weight);
  return ok;
}

TEST(batch_invariance) {
  for (size_t f = 0; f < TD_COUNT(ref_block_formats); f += EACH)
    for_versions(ref_block_formats[f].family, check_invariance, &ref_block_formats[f]);
}

// Scale times code is exact, so that a value is rounded once, by its offset.
static bool check_row(void (*fn)(void), const void *arg, why *w) {
  enum { ROWS = 40, COLS = 1024 };
  uint64_t rng = 9;
  ref_weight weight = ref_make_blocks(&rng, arg, ROWS, COLS);
  ref_mem out = ref_guarded(COLS * sizeof(float));
  float *values = out.data;
  bool ok = true;
  for (uint32_t r = 0; ok && r < ROWS; r++) {
    td_decode_row_args a = {.w = &weight.w, .out = values, .row = r};
    ((void (*)(const td_decode_row_args *))fn)(&a);
    for (uint32_t c = 0; ok && c < COLS; c++) {
      const double want = ref_block_at(&weight.w, r, c);
      if (values[c] != (float)want)
        ok = KERNEL_FAIL(w, "row %u column %u: %g, not %g", r, c, values[c], want);
    }
  }
  ref_unmap(&out);
  ref_free_weight(&weight);
  return ok;
}

TEST(rows) {
  for (size_t f = 0; f < TD_COUNT(ref_block_formats); f++)
    for_versions("decode_row", check_row, &ref_block_formats[f]);
}

// A token that cannot be rounded changes no other, and gets what FP32 gives.
static bool check_odd_tokens(void (*fn)(void), const void *arg, why *w) {
  enum { ROWS = 21, COLS = 768, N = 4 };
  static const float odd[] = {NAN, INFINITY, 0x1p104f, 0x1p-120f};
  uint64_t rng = 6;
  ref_weight weight = ref_make_blocks(&rng, arg, ROWS, COLS);
  float *x = ref_floats(&rng, N * COLS), want[N * ROWS], y[N * ROWS];
  multiply(fn, &weight.w, x, want, N);
  bool ok = true;
  for (size_t i = 0; ok && i < TD_COUNT(odd); i++) {
    float *token = x + 2 * COLS;
    for (uint32_t k = 0; k < COLS; k++)
      token[k] = i < 2 ? (k == 300 ? odd[i] : 1) : odd[i];
    multiply(fn, &weight.w, x, y, N);
    ok = memcmp(y, want, 2 * ROWS * sizeof *y) == 0 &&
         memcmp(y + 3 * ROWS, want + 3 * ROWS, ROWS * sizeof *y) == 0;
    if (!ok) ok = KERNEL_FAIL(w, "%g in a token changes others", (double)odd[i]);
    for (uint32_t r = 0; ok && r < ROWS; r++) {
      const exact_dot d = dot_blocks(&weight.w, r, token);
      const double got = y[2 * ROWS + r], bound = (COLS + 5.0) * 0x1p-24 * d.magnitude;
      const bool is_right = i < 2 ? !isfinite(got) : fabs(got - d.sum) <= bound;
      if (!is_right) ok = KERNEL_FAIL(w, "%g: row %u is %g, not %g", (double)odd[i], r, got, d.sum);
    }
  }
  free(x);
  ref_free_weight(&weight);
  return ok;
}

TEST(odd_tokens) {
  for (size_t f = 0; f < TD_COUNT(ref_block_formats); f += EACH)
    for_versions(ref_block_formats[f].family, check_odd_tokens, &ref_block_formats[f]);
}

// y of the first version that rounds x, and that in 8 bits.
static float *first_ys[2];

static bool check_same_bits(void (*fn)(void), const void *arg, why *w) {
  enum { ROWS = 43, COLS = 1280, N = 7 };
  if (!uses_int16(fn)) return true;
  uint64_t rng = 12;
  ref_weight weight = ref_make_blocks(&rng, arg, ROWS, COLS);
  float *x = ref_floats(&rng, N * COLS), *y = malloc(sizeof(float[N * ROWS]));
  multiply(fn, &weight.w, x, y, N);
  float **first_y = &first_ys[in_int8];
  const bool ok = !*first_y || memcmp(y, *first_y, sizeof(float[N * ROWS])) == 0 ||
                  KERNEL_FAIL(w, "not the bits of another instruction set");
  if (*first_y) {
    free(y);
  } else {
    *first_y = y;
  }
  free(x);
  ref_free_weight(&weight);
  return ok;
}

TEST(bits_of_instruction_sets) {
  for (size_t f = 0; f < TD_COUNT(ref_block_formats); f += EACH) {
    for_versions(ref_block_formats[f].family, check_same_bits, &ref_block_formats[f]);
    assert_true(!first_ys[0] == !first_ys[1]);
    if (first_ys[0]) // they do differ
      assert_memory_not_equal(first_ys[0], first_ys[1], sizeof(float[43 * 7]));
    for (size_t i = 0; i < TD_COUNT(first_ys); i++) {
      free(first_ys[i]);
      first_ys[i] = NULL;
    }
  }
}

// What two kernels give in 15 and in 8 bits for odd numbers of rows, blocks and tokens.
static void expect_same_bits(const ref_block_format *format, td_linear_fn one, td_linear_fn other) {
  static const shape shapes[] = {{0, 43, 1280, 16}, {0, 16, 256, 17},  {0, 5, 512, 23},
                                 {0, 70, 768, 45},  {0, 33, 2304, 64}, {0, 17, 1024, 97}};
  for (size_t i = 0; i < 2 * TD_COUNT(shapes); i++) {
    const shape *s = &shapes[i / 2];
    const uint32_t cols = s->cols +
                          (td_dtype_block(format->dtype).cols == 32 ? 32 * (i / 2 + 1) : 0);
    const size_t n_y = (size_t)s->n_tokens * s->rows;
    uint64_t rng = 21 + i;
    ref_weight weight = ref_make_blocks(&rng, format, s->rows, cols);
    float *x = ref_floats(&rng, s->n_tokens * cols), *y = malloc(2 * n_y * sizeof *y);
    in_int8 = i % 2;
    multiply((void (*)(void))one, &weight.w, x, y, s->n_tokens);
    multiply((void (*)(void))other, &weight.w, x, y + n_y, s->n_tokens);
    in_int8 = false;
    if (memcmp(y, y + n_y, n_y * sizeof *y) != 0)
      fail_msg("%s: %u x %u times %u tokens%s", format->family, s->rows, cols, s->n_tokens,
               i % 2 ? " in 8 bits" : "");
    free(x);
    free(y);
    ref_free_weight(&weight);
  }
}

// NULL: this CPU does not run it.
static td_linear_fn version_of(const char *family, const char *isa) {
  size_t n;
  const td_kernel_variant *v = td_kernel_variants(&n);
  for (size_t i = 0; i < n; i++) {
    const bool is_it = strcmp(v[i].family, family) == 0 && strcmp(v[i].isa, isa) == 0;
    if (is_it && td_kernel_variant_runs(&v[i])) return (td_linear_fn)v[i].fn;
  }
  return NULL;
}

TEST(bits_of_tiles) {
  td_dev_ask_for_tiles();
  if (!version_of("linear_q8_0", "avx512amx")) skip();
  for (size_t f = 0; f < TD_COUNT(ref_block_formats); f += EACH) {
    const char *family = ref_block_formats[f].family;
    expect_same_bits(&ref_block_formats[f], version_of(family, "avx512amx"),
                     version_of(family, "avx512int16"));
  }
}

#define EMULATED(X) X(q8_0) X(q4_k) X(q6_k) X(q5_1) // emulated_tiles.h
#define X(name)     void linear_##name##__emulated(const td_linear_args *args);
EMULATED(X)
#undef X

TEST(bits_of_emulated_tiles) {
  static const struct {
    const char *family;
    td_linear_fn fn;
  } emulated[] = {
#define X(name) {"linear_" #name, linear_##name##__emulated},
      EMULATED(X)
#undef X
  };
  size_t n_seen = 0;
  for (size_t i = 0; i < TD_COUNT(emulated) * TD_COUNT(ref_block_formats); i++) {
    const ref_block_format *format = &ref_block_formats[i % TD_COUNT(ref_block_formats)];
    if (strcmp(format->family, emulated[i / TD_COUNT(ref_block_formats)].family) != 0) continue;
    const td_linear_fn by_vectors = version_of(format->family, "avx512int16");
    if (!by_vectors) skip();
    expect_same_bits(format, emulated[i / TD_COUNT(ref_block_formats)].fn, by_vectors);
    n_seen++;
  }
  assert_int_equal(n_seen, TD_COUNT(emulated));
}

TEST(every_block_has_a_reference) {
  size_t n = 0;
#define X(id, cols, bytes)                                                                         \
  assert_int_equal(ref_block_formats[n].dtype, TD_##id);                                           \
  assert_string_equal(ref_block_formats[n].family, td_weight_kind_of(TD_##id)->family);            \
  n++;
  TD_BLOCK_DTYPES(X)
#undef X
  assert_int_equal(n, TD_COUNT(ref_block_formats));
}
