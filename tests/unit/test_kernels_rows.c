// tests/unit/test_kernels_rows.c - norms, activations, conversions: every version this machine
// runs.
// CTest: no-asan no-tsan

#include <float.h>

#include "base/bf16.h"
#include "unit/kernel_test.h"

static const size_t lengths[] = {1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 64, 100, 1031, 7168};

static ref_mem guarded_floats(uint64_t *rng, size_t n, float scale) {
  ref_mem mem = ref_guarded(n * sizeof(float));
  for (size_t i = 0; i < n; i++)
    ((float *)mem.data)[i] = ref_float(rng) * scale;
  return mem;
}

// Each row is summed in n + 1 roundings, halved by the root, and has three more.
static bool check_rmsnorm(void (*fn)(void), const void *arg, why *w) {
  (void)arg;
  uint64_t rng = 1;
  for (size_t c = 0; c < 2 * TD_COUNT(lengths); c++) {
    size_t n = lengths[c / 2];
    td_dtype dtype = c % 2 ? TD_BF16 : TD_F32;
    ref_mem x = guarded_floats(&rng, n, 3), out = guarded_floats(&rng, n, 1);
    ref_weight weight = ref_make_weight(&rng, dtype, 1, (uint32_t)n, 0, 0);
    const float *xs = x.data, *y = out.data;
    ((void (*)(const td_norm_row_args *))fn)(&(td_norm_row_args){
        .x = x.data, .w = {weight.w.data, dtype, (uint32_t)n}, .out = out.data, .eps = 1e-5f});
    double sum = 0;
    bool ok = true;
    for (size_t i = 0; i < n; i++)
      sum += (double)xs[i] * xs[i];
    for (size_t i = 0; ok && i < n; i++) {
      double want = xs[i] / sqrt(sum / (double)n + 1e-5) * ref_at(&weight.w, 0, (uint32_t)i);
      double bound = (0.5 * (double)n + 6) * 0x1p-24 * fabs(want);
      if (!(fabs(y[i] - want) <= bound)) {
        ok = KERNEL_FAIL(w, "n %zu, element %zu: %g, not %g", n, i, y[i], want);
      }
    }
    ref_unmap(&x);
    ref_unmap(&out);
    ref_free_weight(&weight);
    if (!ok) return false;
  }
  return true;
}

// e^-g within 2 ulp, then three roundings of half an ulp; below 2^-126 a few subnormal steps times
// |g up|.
static bool check_swiglu(void (*fn)(void), const void *arg, why *w) {
  (void)arg;
  uint64_t rng = 2;
  static const float scales[] = {1, 12, 110, 1e4f};
  for (size_t c = 0; c < TD_COUNT(lengths) * TD_COUNT(scales); c++) {
    size_t n = lengths[c / TD_COUNT(scales)];
    ref_mem gate = guarded_floats(&rng, n, scales[c % TD_COUNT(scales)]);
    ref_mem up = guarded_floats(&rng, n, 1), out = guarded_floats(&rng, n, 1);
    const float *g = gate.data, *u = up.data, *y = out.data;
    ((void (*)(const td_swiglu_row_args *))fn)(
        &(td_swiglu_row_args){.gate = gate.data, .up = up.data, .out = out.data, .n = n});
    bool ok = true;
    for (size_t i = 0; ok && i < n; i++) {
      double want = g[i] / (1 + exp(-(double)g[i])) * u[i];
      double bound = 8 * 0x1p-24 * fabs(want) + 0x1p-124 * fabs((double)g[i]);
      if (!(fabs(y[i] - want) <= bound)) {
        ok = KERNEL_FAIL(w, "gate %g up %g: %g, not %g", g[i], u[i], y[i], want);
      }
    }
    ref_unmap(&gate);
    ref_unmap(&up);
    ref_unmap(&out);
    if (!ok) return false;
  }
  return true;
}

static bool check_axpy(void (*fn)(void), const void *arg, why *w) {
  (void)arg;
  uint64_t rng = 3;
  for (size_t c = 0; c < TD_COUNT(lengths); c++) {
    size_t n = lengths[c];
    const float factors[] = {0.7f, -1.5f, 0.01f};
    uint32_t n_rows = 1 + c % TD_COUNT(factors);
    ref_mem x = guarded_floats(&rng, n * n_rows, 1), y = guarded_floats(&rng, n, 1);
    float *before = malloc(n * sizeof *before);
    memcpy(before, y.data, n * sizeof *before);
    ((void (*)(const td_axpy_args *))fn)(&(td_axpy_args){
        .y = y.data, .x = x.data, .a = factors, .n = n, .ldx = n, .n_rows = n_rows});
    bool ok = true;
    for (size_t i = 0; ok && i < n; i++) {
      double want = before[i], bound = 0;
      for (uint32_t j = 0; j < n_rows; j++) {
        double product = factors[j] * (double)((float *)x.data)[j * n + i];
        want += product;
        bound += 0x1p-24 * (fabs(product) + fabs(want)) * 1.001;
      }
      if (!(fabs(((float *)y.data)[i] - want) <= bound)) ok = KERNEL_FAIL(w, "n %zu at %zu", n, i);
    }
    free(before);
    ref_unmap(&x);
    ref_unmap(&y);
    if (!ok) return false;
  }
  return true;
}

static bool check_from_half(void (*fn)(void), const void *arg, why *w) {
  (void)arg;
  for (size_t c = 0; c < TD_COUNT(lengths) + 1; c++) {
    size_t n = c < TD_COUNT(lengths) ? lengths[c] : 65536;
    ref_mem in = ref_guarded(n * sizeof(uint16_t)), out = ref_guarded(n * sizeof(float));
    for (size_t i = 0; i < n; i++)
      ((uint16_t *)in.data)[i] = (uint16_t)i;
    ((void (*)(const td_convert_args *))fn)(
        &(td_convert_args){.in = in.data, .out = out.data, .n = n});
    bool ok = true;
    for (size_t i = 0; ok && i < n; i++) {
      double want = ref_half((uint16_t)i), got = ((float *)out.data)[i];
      bool same = isnan(want) ? isnan(got) : got == want && !signbit(got) == !signbit(want);
      if (!same) ok = KERNEL_FAIL(w, "0x%04zx: %g, not %g", i, got, want);
    }
    ref_unmap(&in);
    ref_unmap(&out);
    if (!ok) return false;
  }
  return true;
}

// Every f16, the midpoints between neighbours and what lies beside them, and the ends.
static size_t half_inputs(float *in) {
  size_t n = 0;
  static const float ends[] = {65504,    65519.99f, 65520,      1e30f,     -65520,   -1e30f,
                               0x1p-24f, 0x1p-25f,  0x1.8p-25f, -0x1p-26f, INFINITY, -INFINITY};
  for (size_t i = 0; i < TD_COUNT(ends); i++)
    in[n++] = ends[i];
  for (uint32_t h = 0; h < 0x7bff; h++) {
    float value = (float)ref_half((uint16_t)h), next = (float)ref_half((uint16_t)(h + 1));
    float middle = value + (next - value) / 2; // exact
    in[n++] = value;
    in[n++] = middle;
    in[n++] = nextafterf(middle, 0);
    in[n++] = -nextafterf(middle, 1e9f);
  }
  return n;
}

static bool check_to_half(void (*fn)(void), const void *arg, why *w) {
  (void)arg;
  float *inputs = malloc(sizeof *inputs * 0x20000);
  size_t n_inputs = half_inputs(inputs);
  bool ok = true;
  for (size_t c = 0; ok && c < TD_COUNT(lengths) + 1; c++) {
    size_t n = c < TD_COUNT(lengths) ? lengths[c] : n_inputs;
    ref_mem in = ref_guarded(n * sizeof(float)), out = ref_guarded(n * sizeof(uint16_t));
    memcpy(in.data, inputs, n * sizeof(float));
    ((void (*)(const td_convert_args *))fn)(
        &(td_convert_args){.in = in.data, .out = out.data, .n = n});
    for (size_t i = 0; ok && i < n; i++) {
      double want = ref_through_half(inputs[i]), got = ref_half(((uint16_t *)out.data)[i]);
      if (got != want) ok = KERNEL_FAIL(w, "%a: %a, not %a", inputs[i], got, want);
    }
    ref_unmap(&in);
    ref_unmap(&out);
  }
  float nans[20];
  uint16_t kept[20];
  for (int i = 0; i < 20; i++)
    nans[i] = NAN;
  ((void (*)(const td_convert_args *))fn)(&(td_convert_args){.in = nans, .out = kept, .n = 20});
  for (int i = 0; ok && i < 20; i++) {
    if (!isnan(ref_half(kept[i]))) ok = KERNEL_FAIL(w, "NaN became 0x%04x", kept[i]);
  }
  free(inputs);
  return ok;
}

// The stored value times its scale, rounded once.
static bool check_decode(void (*fn)(void), const void *arg, why *w) {
  (void)arg;
  uint64_t rng = 4;
  for (size_t c = 0; c < TD_COUNT(lengths) * TD_COUNT(ref_formats); c++) {
    uint32_t cols = (uint32_t)lengths[c / TD_COUNT(ref_formats)];
    const ref_format *f = &ref_formats[c % TD_COUNT(ref_formats)];
    ref_weight weight = ref_make_format(&rng, f, 8, cols, 2, 48);
    if (weight.w.dtype == TD_F8E4M3) ((uint8_t *)weight.data.data)[cols * 3] = 0x7f;
    ref_mem out = ref_guarded(cols * sizeof(float));
    bool ok = true;
    for (uint32_t row = 0; ok && row < 8; row++) {
      ((void (*)(const td_decode_row_args *))fn)(
          &(td_decode_row_args){.w = &weight.w, .out = out.data, .row = row});
      for (uint32_t i = 0; ok && i < cols; i++) {
        float want = (float)ref_at(&weight.w, row, i), got = ((float *)out.data)[i];
        if (isnan(want) ? !isnan(got) : got != want) {
          ok = KERNEL_FAIL(w, "row %u column %u of %u: %a, not %a", row, i, cols, got, want);
        }
      }
    }
    ref_free_weight(&weight);
    ref_unmap(&out);
    if (!ok) return false;
  }
  return true;
}

// Rows [2, 7) of 8 times factors, onto what is there; NaN codes and scales that overflow when
// multiplied carelessly among them.
static bool check_axpy_weights_of(void (*fn)(void), const ref_format *f, uint32_t cols,
                                  uint32_t scale_rows, uint32_t scale_cols, why *w) {
  enum { ROWS = 8, ROW = 2, N = 5 };
  static const float factors[N] = {0.7f, -1.5f, 0.01f, 3, -0.2f};
  uint64_t rng = cols;
  ref_weight weight = ref_make_format(&rng, f, ROWS, cols, scale_rows, scale_cols);
  uint8_t *codes = weight.data.data;
  if (f->dtype == TD_F8E4M3) codes[cols * 4 + cols / 2] = 0xff;
  for (uint32_t c = 0; f->dtype == TD_F8E4M3 && c < cols; c++)
    codes[ROW * cols + c] &= 0xbf; // below 2
  if (weight.w.scale && cols > 300) ((float *)weight.scale.data)[0] = 0x1p120f;
  ref_mem y = guarded_floats(&rng, cols, 1);
  float *before = malloc(cols * sizeof *before);
  memcpy(before, y.data, cols * sizeof *before);
  ((void (*)(const td_axpy_weights_args *))fn)(
      &(td_axpy_weights_args){.w = &weight.w, .y = y.data, .a = factors, .row = ROW, .n_rows = N});
  bool ok = true;
  for (uint32_t c = 0; ok && c < cols; c++) {
    double want = before[c], bound = 0, got = ((float *)y.data)[c];
    for (uint32_t j = 0; j < N; j++) { // the weight, and the sum
      double product = factors[j] * ref_at(&weight.w, ROW + j, c);
      want += product;
      bound += 0x1p-24 * (2 * fabs(product) + fabs(want)) * 1.001;
    }
    if (isnan(want) ? !isnan(got) : !(fabs(got - want) <= bound)) {
      ok = KERNEL_FAIL(w, "column %u of %u: %a, not %a", c, cols, got, want);
    }
  }
  free(before);
  ref_unmap(&y);
  ref_free_weight(&weight);
  return ok;
}

static bool check_axpy_weights(void (*fn)(void), const void *arg, why *w) {
  (void)arg;
  for (size_t c = 0; c < TD_COUNT(lengths) * TD_COUNT(ref_formats); c++) {
    uint32_t cols = (uint32_t)lengths[c / TD_COUNT(ref_formats)];
    const ref_format *f = &ref_formats[c % TD_COUNT(ref_formats)];
    if (td_dtype_bits(f->dtype) < 8) continue;
    if (!check_axpy_weights_of(fn, f, cols, 2, 48, w)) return false;
    if (!check_axpy_weights_of(fn, f, cols, 3, 384, w)) return false;
    if (!check_axpy_weights_of(fn, f, cols, 1, cols, w)) return false;
  }
  return true;
}

// What element i of part p is: what rounds to even in both directions, NaN, infinity, the largest
// finite value, zeros of both signs and denormals among them.
static float sum_part_value(uint64_t *rng, size_t i) {
  static const float special[] = {0x1.01p0f, 0x1.03p0f,       -0x1.010002p0f, NAN,
                                  -INFINITY, FLT_MAX,         -0.0f,          0,
                                  0x1p-140f, 0x1.fffffep-127f};
  return i % 13 < TD_COUNT(special) && i % 3 ? special[i % 13] : ref_float(rng) * 100;
}

// Exactly as in double, rounded to f32 after every addition, since each is a rounding of its own.
static bool check_sum_of(void (*fn)(void), size_t n, uint32_t n_parts, uint32_t f32_parts,
                         bool out_f32, why *w) {
  enum { MOST = 8 };
  uint64_t rng = n + f32_parts;
  ref_mem in[MOST], out = ref_guarded(n * (out_f32 ? 4 : 2));
  const void *parts[MOST];
  float *want = calloc(n, sizeof *want);
  for (uint32_t p = 0; p < n_parts; p++) {
    const bool is_f32 = f32_parts >> p & 1;
    in[p] = ref_guarded(n * (is_f32 ? 4 : 2));
    parts[p] = in[p].data;
    for (size_t i = 0; i < n; i++) {
      const float value = sum_part_value(&rng, i + p);
      const uint16_t bf16 = td_bf16_of(value);
      if (is_f32) {
        ((float *)in[p].data)[i] = value;
      } else {
        ((uint16_t *)in[p].data)[i] = bf16;
      }
      want[i] = p ? want[i] + td_bf16_value(bf16) : td_bf16_value(bf16);
    }
  }
  ((void (*)(const td_sum_row_args *))fn)(&(td_sum_row_args){.parts = parts,
                                                             .out = out.data,
                                                             .n = n,
                                                             .n_parts = n_parts,
                                                             .f32_parts = f32_parts,
                                                             .out_f32 = out_f32});
  bool ok = true;
  for (size_t i = 0; ok && i < n; i++) {
    const float rounded = out_f32 ? want[i] : td_bf16_value(td_bf16_of(want[i]));
    const float got = out_f32 ? ((float *)out.data)[i] : td_bf16_value(((uint16_t *)out.data)[i]);
    if (isnan(rounded) ? !isnan(got) : memcmp(&got, &rounded, sizeof got) != 0)
      ok = KERNEL_FAIL(w, "%u parts, element %zu of %zu: %a, not %a", n_parts, i, n, got, rounded);
  }
  for (uint32_t p = 0; p < n_parts; p++)
    ref_unmap(&in[p]);
  ref_unmap(&out);
  free(want);
  return ok;
}

static bool check_sum(void (*fn)(void), const void *arg, why *w) {
  (void)arg;
  static const struct {
    uint32_t n_parts, f32_parts;
  } kinds[] = {{1, 1}, {1, 0}, {2, 1}, {2, 2}, {3, 0}, {8, 0x55}};
  for (size_t c = 0; c < TD_COUNT(lengths) * TD_COUNT(kinds) * 2; c++) {
    const size_t k = c / 2 % TD_COUNT(kinds);
    if (!check_sum_of(fn, lengths[c / 2 / TD_COUNT(kinds)], kinds[k].n_parts, kinds[k].f32_parts,
                      c % 2, w))
      return false;
  }
  return true;
}

#define FAMILY_TEST(family, check)                                                                 \
  TEST(family) {                                                                                   \
    for_versions(#family, check, NULL);                                                            \
  }
FAMILY_TEST(rmsnorm_row, check_rmsnorm)
FAMILY_TEST(swiglu_row, check_swiglu)
FAMILY_TEST(axpy, check_axpy)
FAMILY_TEST(axpy_weights, check_axpy_weights)
FAMILY_TEST(f32_from_f16, check_from_half)
FAMILY_TEST(f16_from_f32, check_to_half)
FAMILY_TEST(sum_row, check_sum)
FAMILY_TEST(decode_row, check_decode)

// Truncates instead of rounding.
static void broken_to_half(const td_convert_args *a) {
  for (size_t i = 0; i < a->n; i++) {
    uint32_t bits;
    float f = fminf(fmaxf(((const float *)a->in)[i], -65504), 65504);
    memcpy(&bits, &f, sizeof bits);
    uint32_t magnitude = bits & 0x7fffffff;
    uint16_t half = magnitude < 0x38800000 ? (uint16_t)(fabsf(f) * 0x1p24f)
                                           : (uint16_t)((magnitude - (112u << 23)) >> 13);
    ((uint16_t *)a->out)[i] = (uint16_t)(half | (bits >> 16 & 0x8000));
  }
}

// Forgets eps.
static void broken_rmsnorm(const td_norm_row_args *a) {
  double sum = 0;
  for (uint32_t i = 0; i < a->w.n; i++)
    sum += (double)a->x[i] * a->x[i];
  for (uint32_t i = 0; i < a->w.n; i++) {
    double w = a->w.dtype == TD_F32 ? ((const float *)a->w.data)[i]
                                    : ref_bf16(((const uint16_t *)a->w.data)[i]);
    a->out[i] = (float)(a->x[i] / sqrt(sum / a->w.n) * w);
  }
}

// One token's way is that of several, to the last bit, with each set of kernels.
TEST(axpy_weights_is_decode_and_axpy) {
  enum { ROWS = 16, COLS = 600 };
  static float rows[ROWS * COLS], want[COLS], got[COLS];
  uint64_t rng = 9;
  float *factors = ref_floats(&rng, ROWS), *y = ref_floats(&rng, COLS);
  for (const char *const *isa = td_kernels_isas(); *isa; isa++) {
    if (td_kernels_init(*isa) != TD_KERNELS_OK) continue;
    for (size_t f = 0; f < TD_COUNT(ref_formats); f++) {
      if (td_dtype_bits(ref_formats[f].dtype) < 8) continue;
      ref_weight m = ref_make_format(&rng, &ref_formats[f], ROWS, COLS, 4, 256);
      for (uint32_t r = 0; r < ROWS; r++)
        td_kernels()->decode_row(
            &(td_decode_row_args){.w = &m.w, .out = rows + r * COLS, .row = r});
      memcpy(want, y, sizeof want);
      memcpy(got, y, sizeof got);
      td_kernels()->axpy(&(td_axpy_args){
          .y = want, .x = rows, .a = factors, .n = COLS, .ldx = COLS, .n_rows = ROWS});
      td_kernels()->axpy_weights(
          &(td_axpy_weights_args){.w = &m.w, .y = got, .a = factors, .n_rows = ROWS});
      if (memcmp(want, got, sizeof got)) fail_msg("%s, %s", *isa, ref_formats[f].family);
      ref_free_weight(&m);
    }
  }
  free(factors);
  free(y);
}

// Truncates its only part.
static void broken_sum(const td_sum_row_args *a) {
  for (size_t i = 0; i < a->n && a->out_f32; i++) {
    uint32_t bits;
    memcpy(&bits, (const float *)a->parts[0] + i, sizeof bits);
    bits &= 0xffff0000;
    memcpy((float *)a->out + i, &bits, sizeof bits);
  }
}

TEST(broken_kernels_are_caught) {
  why w;
  assert_false(check_to_half((void (*)(void))broken_to_half, NULL, &w));
  assert_false(check_rmsnorm((void (*)(void))broken_rmsnorm, NULL, &w));
  assert_false(check_sum_of((void (*)(void))broken_sum, 100, 1, 1, true, &w));
}
