// tests/unit/test_kernels_codes.c - weights of four bits: every code, zero point and scale there
// is, at every place of a row, in every version of the kernels this machine runs.
// CTest: no-asan no-tsan

#include "unit/kernel_test.h"

enum { MAX_COLS = 256 };

static const uint32_t widths[] = {150, 256}; // of rows

static void run(void (*fn)(void), const td_weight *w, const float *x, float *y) {
  multiply(fn, w, x, y, 1);
}

static bool same(float got, double want) {
  return isnan(want) ? isnan(got) : got == (float)want;
}

// Row r has code r at one place, and what is worth zero elsewhere.
static bool check_place(void (*fn)(void), ref_weight *m, uint32_t place, why *w) {
  const uint32_t cols = m->w.cols;
  float x[MAX_COLS], y[16];
  // The float zeros have either sign.
  int zero = m->w.dtype == TD_I4 ? ref_zero(&m->w, 0, 0) : (int)(place % 2 * 8);
  memset(m->data.data, zero * 0x11, td_weight_data_bytes(&m->w));
  for (uint32_t r = 0; r < 16; r++)
    ref_set_nibble(m->data.data, ref_index4(&m->w, r, place), r);
  for (uint32_t c = 0; c < cols; c++)
    x[c] = 1;
  run(fn, &m->w, x, y);
  for (uint32_t r = 0; r < 16; r++) {
    double want = ref_at(&m->w, r, place);
    if (!same(y[r], want)) {
      return KERNEL_FAIL(w, "code %u less %d at %u: %a, not %a", r, zero, place, y[r], want);
    }
  }
  return true;
}

static bool check_codes_of(void (*fn)(void), const ref_format *f, uint32_t cols, why *w) {
  uint64_t rng = 7;
  ref_weight m = ref_make_format(&rng, f, 16, cols, 1, 32);
  bool ok = true;
  for (uint32_t zero = 0; ok && zero < (f->zeros ? 16 : 1); zero++) {
    for (size_t i = 0; i < td_weight_zero_bytes(&m.w) / sizeof(uint32_t); i++)
      ((uint32_t *)m.zero.data)[i] = zero * 0x11111111;
    for (uint32_t place = 0; ok && place < cols; place++)
      ok = check_place(fn, &m, place, w);
  }
  ref_free_weight(&m);
  return ok;
}

static bool check_codes(void (*fn)(void), const void *arg, why *w) {
  return check_codes_of(fn, arg, widths[0], w) && check_codes_of(fn, arg, widths[1], w);
}

TEST(every_code_and_zero_point) {
  for (size_t f = 0; f < TD_COUNT(ref_formats); f++) {
    if (td_dtype_bits(ref_formats[f].dtype) != 4) continue;
    for_versions(ref_formats[f].family, check_codes, &ref_formats[f]);
  }
}

// A row for each of the 256 scales; the first and the last are special, and not in one call.
static bool check_scales_of(void (*fn)(void), const ref_format *f, uint32_t cols, why *w) {
  uint64_t rng = 8;
  float x[MAX_COLS], y[256];
  bool ok = true;
  for (uint32_t group = 16; ok && group <= 64; group *= 2) {
    ref_weight m = ref_make_format(&rng, f, 256, cols, 1, group);
    size_t groups = td_weight_groups(&m.w);
    for (uint32_t code = 1; ok && code < 16; code += code == 7 ? 2 : 1) {
      uint32_t place = ref_below(&rng, cols);
      memset(m.data.data, 0, td_weight_data_bytes(&m.w));
      for (uint32_t r = 0; r < 256; r++) {
        memset((uint8_t *)m.scale.data + r * groups, 1, groups);
        ((uint8_t *)m.scale.data)[r * groups + place / group] = (uint8_t)r;
        ref_set_nibble(m.data.data, ref_index4(&m.w, r, place), code);
      }
      for (uint32_t c = 0; c < cols; c++)
        x[c] = 1;
      for (uint32_t r = 0; r < 256; r += 128) {
        ((td_linear_fn)fn)(&(td_linear_args){.w = &m.w,
                                             .x = x,
                                             .y = y,
                                             .ldx = cols,
                                             .ldy = 256,
                                             .n_tokens = 1,
                                             .row_begin = r,
                                             .row_end = r + 128,
                                             .prompt = as_prompt,
                                             .way = in_way});
      }
      for (uint32_t r = 0; ok && r < 256; r++) {
        double want = ref_at(&m.w, r, place);
        if (!same(y[r], want)) {
          ok = KERNEL_FAIL(w, "code %u times scale 0x%02x at %u: %a, not %a", code, r, place, y[r],
                           want);
        }
      }
    }
    ref_free_weight(&m);
  }
  return ok;
}

static bool check_scales(void (*fn)(void), const void *arg, why *w) {
  return check_scales_of(fn, arg, widths[0], w) && check_scales_of(fn, arg, widths[1], w);
}

TEST(every_scale) {
  for (size_t f = 0; f < TD_COUNT(ref_formats); f++) {
    if (ref_formats[f].dtype == TD_F4E2M1) {
      for_versions(ref_formats[f].family, check_scales, &ref_formats[f]);
    }
  }
}

// A scale that is NaN makes its row NaN in every path, and only its row.
static bool check_nan_scale_of(void (*fn)(void), const ref_format *f, uint32_t cols, why *w) {
  enum { ROWS = 20, BAD = 13 };
  uint64_t rng = 3;
  ref_weight m = ref_make_format(&rng, f, ROWS, cols, 1, 32);
  size_t groups = td_weight_groups(&m.w);
  ((uint8_t *)m.scale.data)[BAD * groups + groups - 1] = 0xff;
  bool ok = true;
  for (uint32_t n = 1; ok && n <= 9; n++) {
    float x[9 * MAX_COLS] = {0}, y[9 * ROWS];
    multiply(fn, &m.w, x, y, n);
    for (uint32_t i = 0; ok && i < n * ROWS; i++) {
      if (i % ROWS == BAD ? !isnan(y[i]) : y[i] != 0) {
        ok = KERNEL_FAIL(w, "%u tokens, row %u: %g", n, i % ROWS, y[i]);
      }
    }
  }
  ref_free_weight(&m);
  return ok;
}

static bool check_nan_scale(void (*fn)(void), const void *arg, why *w) {
  return check_nan_scale_of(fn, arg, widths[0], w) && check_nan_scale_of(fn, arg, widths[1], w);
}

TEST(nan_scales_make_the_row_nan) {
  for (size_t f = 0; f < TD_COUNT(ref_formats); f++) {
    if (ref_formats[f].dtype == TD_F4E2M1) {
      for_versions(ref_formats[f].family, check_nan_scale, &ref_formats[f]);
    }
  }
}

// Kernels with one fault each; the checks above must see it.

static const ref_format int4 = {"linear_i4", TD_I4, TD_F16, true};
static const ref_format nvfp4 = {"linear_f4e2m1", TD_F4E2M1, TD_F8E4M3, false};
static const ref_format mxfp4 = {"linear_f4e2m1", TD_F4E2M1, TD_F8E8M0, false};

static void naive(const td_linear_args *a) {
  for (uint32_t r = a->row_begin; r < a->row_end; r++) {
    for (uint32_t t = 0; t < a->n_tokens; t++) {
      double sum = 0;
      for (uint32_t c = 0; c < a->w->cols; c++)
        sum += ref_at(a->w, r, c) * a->x[t * a->ldx + c];
      a->y[t * a->ldy + r - a->y_row0] = (float)sum;
    }
  }
}

static void with(const td_linear_args *a, const td_weight *w) {
  td_linear_args changed = *a;
  changed.w = w;
  naive(&changed);
}

static void forgets_zero_points(const td_linear_args *a) {
  td_weight w = *a->w;
  w.zero = NULL;
  with(a, &w);
}

static void forgets_global_scale(const td_linear_args *a) {
  td_weight w = *a->w;
  w.global_scale = 1;
  with(a, &w);
}

static void flushes_small_scales(const td_linear_args *a) {
  uint8_t scale[256 * 16];
  td_weight w = *a->w;
  memcpy(scale, w.scale, td_weight_scale_bytes(&w));
  for (size_t i = 0; i < td_weight_scale_bytes(&w); i++)
    scale[i] = scale[i] ? scale[i] : 1;
  w.scale = scale;
  with(a, &w);
}

TEST(broken_kernels_are_caught) {
  why w;
  typedef void (*any)(void);
  assert_true(check_codes((any)naive, &int4, &w));
  assert_false(check_codes((any)forgets_zero_points, &int4, &w));
  assert_true(check_codes((any)naive, &nvfp4, &w));
  assert_false(check_codes((any)forgets_global_scale, &nvfp4, &w));
  assert_true(check_scales((any)naive, &mxfp4, &w));
  assert_false(check_scales((any)flushes_small_scales, &mxfp4, &w));
}
