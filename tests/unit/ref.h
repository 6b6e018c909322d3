// tests/unit/ref.h - what the kernel and device tests share: random data, memory that ends at a
// guard page, and decoders written from the formats' definitions, stride from those under test.
#pragma once

#include <math.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/status.h"
#include "tandem/types.h"
#include "unit/testing.h"

static inline uint64_t ref_next(uint64_t *state) { // splitmix64
  uint64_t z = *state += 0x9e3779b97f4a7c15u;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  return z ^ z >> 31;
}

static inline uint32_t ref_below(uint64_t *state, uint32_t n) {
  return (uint32_t)(ref_next(state) >> 32) % n;
}

// Uniform in [-1, 1).
static inline float ref_float(uint64_t *state) {
  return (float)(ref_next(state) >> 40) * 0x1p-23f - 1;
}

// Memory whose last byte is followed by a page that must not be touched.
typedef struct {
  void *data;
  void *map;
  size_t map_bytes;
} ref_mem;

static inline ref_mem ref_guarded(size_t n_bytes) {
  size_t page = (size_t)sysconf(_SC_PAGESIZE);
  size_t used = (n_bytes + page - 1) / page * page;
  ref_mem mem = {.map_bytes = used + page};
  mem.map = mmap(NULL, mem.map_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  TD_CHECK(mem.map != MAP_FAILED);
  TD_CHECK(mprotect((char *)mem.map + used, page, PROT_NONE) == 0);
  mem.data = (char *)mem.map + used - n_bytes;
  return mem;
}

static inline void ref_unmap(ref_mem *mem) {
  if (mem->map) munmap(mem->map, mem->map_bytes);
  *mem = (ref_mem){0};
}

static inline double ref_e4m3(uint8_t code) {
  int exponent = code >> 3 & 15, mantissa = code & 7;
  double sign = code & 0x80 ? -1 : 1;
  if (exponent == 15 && mantissa == 7) return NAN;
  if (exponent == 0) return sign * ldexp(mantissa, -9);
  return sign * ldexp(8 + mantissa, exponent - 10);
}

static inline double ref_bf16(uint16_t h) {
  uint32_t bits = (uint32_t)h << 16;
  float f;
  memcpy(&f, &bits, sizeof f);
  return f;
}

static inline uint16_t ref_to_bf16(float f) { // truncates: any value will do
  uint32_t bits;
  memcpy(&bits, &f, sizeof bits);
  return (uint16_t)(bits >> 16);
}

static inline double ref_half(uint16_t h) {
  int exponent = h >> 10 & 31, mantissa = h & 1023;
  double sign = h & 0x8000 ? -1 : 1;
  if (exponent == 31) return mantissa ? NAN : sign * (double)INFINITY;
  if (exponent == 0) return sign * ldexp(mantissa, -24);
  return sign * ldexp(1024 + mantissa, exponent - 25);
}

// The value f becomes when kept as f16: nearest even, saturated.
static inline double ref_through_half(double f) {
  if (f == 0 || isnan(f)) return f;
  if (fabs(f) >= 65504) return copysign(65504, f);
  int exponent;
  frexp(f, &exponent);
  int ulp = exponent - 11 < -24 ? -24 : exponent - 11;
  double rounded = ldexp(nearbyint(ldexp(f, -ulp)), ulp);
  return fabs(rounded) > 65504 ? copysign(65504, f) : rounded;
}

// What an E4M3 page keeps of a row (tandem/kv_f8.h).
static inline void ref_through_f8(float *row, uint32_t dim, uint32_t n_bf16) {
  const uint32_t n_codes = dim - n_bf16;
  for (uint32_t begin = 0, end; begin < n_codes; begin = end) {
    end = begin + 128 < n_codes ? begin + 128 : n_codes;
    double most = 0, scale = ldexp(1, -108);
    for (uint32_t i = begin; i < end; i++)
      most = fmax(most, fabs(row[i]));
    while (most > 448 * scale)
      scale *= 2;
    for (uint32_t i = begin; i < end; i++) {
      int exponent;
      frexp(row[i] / scale, &exponent);
      const double ulp = ldexp(scale, exponent - 4 < -9 ? -9 : exponent - 4);
      row[i] = (float)(nearbyint(row[i] / ulp) * ulp);
      if (fabsf(row[i]) > 448 * scale) row[i] = (float)copysign(448 * scale, row[i]);
    }
  }
  for (uint32_t i = n_codes; i < dim; i++) {
    int exponent;
    frexp(row[i], &exponent);
    row[i] = (float)ldexp(nearbyint(ldexp(row[i], 8 - exponent)), exponent - 8);
  }
}

static inline double ref_e2m1(unsigned code) {
  int exponent = code >> 1 & 3, mantissa = code & 1;
  double magnitude = exponent ? ldexp(2 + mantissa, exponent - 2) : 0.5 * mantissa;
  return code & 8 ? -magnitude : magnitude;
}

// A way of storing weights and the kernels for it.
typedef struct {
  const char *family;
  td_dtype dtype, scale_dtype;
  bool zeros;
} ref_format;

static const ref_format ref_formats[] = {
    {"linear_f32", TD_F32, TD_F32, false},
    {"linear_bf16", TD_BF16, TD_F32, false},
    {"linear_f8e4m3", TD_F8E4M3, TD_F32, false},
    {"linear_f16", TD_F16, TD_F32, false},
    {"linear_i8", TD_I8, TD_F32, false},
    {"linear_i4", TD_I4, TD_BF16, false},
    {"linear_i4", TD_I4, TD_F32, false},
    {"linear_i4", TD_I4, TD_F16, true},
    {"linear_i4", TD_I4, TD_F16, false},
    {"linear_i4", TD_I4, TD_BF16, true},
    {"linear_f4e2m1", TD_F4E2M1, TD_F8E8M0, false},
    {"linear_f4e2m1", TD_F4E2M1, TD_F8E4M3, false},
};

// A matrix of random weights, with data, scales and zero points at the end of guarded memory.
typedef struct {
  td_weight w;
  ref_mem data, scale, zero;
} ref_weight;

static inline void ref_fill_scales(uint64_t *state, const ref_mem *mem, td_dtype dtype, size_t n) {
  for (size_t i = 0; i < n; i++) {
    float value = (ref_float(state) + 1.5f) * 0x1p-7f;
    uint8_t byte = (uint8_t)(ref_next(state) >> 32);
    switch (dtype) {
    case TD_F32: ((float *)mem->data)[i] = value; break;
    case TD_BF16: ((uint16_t *)mem->data)[i] = ref_to_bf16(value); break;
    case TD_F16: ((uint16_t *)mem->data)[i] = 0x1800 | (byte << 4 & 0x0fff); break;
    case TD_F8E8M0: ((uint8_t *)mem->data)[i] = 110 + byte % 32; break;
    default: ((uint8_t *)mem->data)[i] = (byte & 0x7f) == 0x7f ? 1 : byte; break;
    }
  }
}

// 4-bit formats have scale_rows 1 whatever is asked for.
static inline ref_weight ref_make_format(uint64_t *state, const ref_format *f, uint32_t rows,
                                         uint32_t cols, uint32_t scale_rows, uint32_t scale_cols) {
  ref_weight r = {.w = {.dtype = f->dtype, .rows = rows, .cols = cols}};
  size_t n_bytes = td_weight_data_bytes(&r.w);
  r.data = ref_guarded(n_bytes);
  r.w.data = r.data.data;
  for (size_t i = 0; i < n_bytes; i++)
    ((uint8_t *)r.data.data)[i] = (uint8_t)(ref_next(state) >> 40);
  for (size_t i = 0; i < (size_t)rows * cols; i++) { // NaN has its own test
    if (f->dtype == TD_F32) ((float *)r.data.data)[i] = ref_float(state);
    if (f->dtype == TD_BF16) ((uint16_t *)r.data.data)[i] = ref_to_bf16(ref_float(state));
    if (f->dtype == TD_F16) ((uint16_t *)r.data.data)[i] &= 0xbfff;
    if (f->dtype == TD_F8E4M3) {
      uint8_t *code = (uint8_t *)r.data.data + i;
      if ((*code & 0x7f) == 0x7f) *code ^= 1;
    }
  }
  if (f->dtype == TD_F32 || f->dtype == TD_BF16 || f->dtype == TD_F16) return r;
  r.w.scale_rows = td_dtype_bits(f->dtype) == 4 ? 1 : scale_rows;
  r.w.scale_cols = scale_cols;
  r.w.scale_dtype = f->scale_dtype;
  r.w.global_scale = f->scale_dtype == TD_F8E4M3 ? 0x1.4p-5f : 1;
  r.w.scale = &r; // for the size
  size_t scale_bytes = td_weight_scale_bytes(&r.w);
  r.scale = ref_guarded(scale_bytes);
  r.w.scale = r.scale.data;
  ref_fill_scales(state, &r.scale, f->scale_dtype, scale_bytes / td_dtype_bytes(f->scale_dtype));
  if (!f->zeros) return r;
  size_t n_words = ((size_t)rows + 7) / 8 * td_weight_groups(&r.w);
  r.zero = ref_guarded(n_words * sizeof(uint32_t));
  for (size_t i = 0; i < n_words; i++)
    ((uint32_t *)r.zero.data)[i] = (uint32_t)ref_next(state);
  r.w.zero = r.zero.data;
  return r;
}

static inline ref_weight ref_make_weight(uint64_t *state, td_dtype dtype, uint32_t rows,
                                         uint32_t cols, uint32_t scale_rows, uint32_t scale_cols) {
  ref_format f = {.dtype = dtype};
  return ref_make_format(state, &f, rows, cols, scale_rows, scale_cols);
}

static inline void ref_free_weight(ref_weight *r) {
  ref_unmap(&r->data);
  ref_unmap(&r->scale);
  ref_unmap(&r->zero);
}

// Where a 4-bit code is: counted in codes from the beginning of the data, two a byte, low first.
static inline size_t ref_index4(const td_weight *w, uint32_t r, uint32_t c) {
  size_t cols = w->cols, unit = w->dtype == TD_I4 ? 8 : 2;
  return (cols + unit - 1) / unit * unit * r + c;
}

static inline int ref_nibble(const void *data, size_t idx) {
  return ((const uint8_t *)data)[idx / 2] >> idx % 2 * 4 & 15;
}

static inline void ref_set_nibble(void *data, size_t idx, unsigned code) {
  uint8_t *byte = (uint8_t *)data + idx / 2;
  *byte = (uint8_t)(idx % 2 ? (*byte & 15) | code << 4 : (*byte & 0xf0) | code);
}

static inline int ref_zero(const td_weight *w, uint32_t r, uint32_t c) {
  if (!w->zero) return 8;
  size_t group = c / w->scale_cols, groups = (w->cols + w->scale_cols - 1) / w->scale_cols;
  return ref_nibble(&w->zero[r / 8 * groups + group], r % 8);
}

// The scale of an element, the global one included; 1 without.
static inline double ref_scale(const td_weight *w, uint32_t r, uint32_t c) {
  if (!w->scale) return 1;
  size_t groups = (w->cols + w->scale_cols - 1) / w->scale_cols;
  size_t at = r / w->scale_rows * groups + c / w->scale_cols;
  switch (w->scale_dtype) {
  case TD_BF16: return ref_bf16(((const uint16_t *)w->scale)[at]);
  case TD_F16: return ref_half(((const uint16_t *)w->scale)[at]);
  case TD_F8E4M3: return ref_e4m3(((const uint8_t *)w->scale)[at]) * w->global_scale;
  case TD_F8E8M0: {
    uint8_t code = ((const uint8_t *)w->scale)[at];
    return code == 255 ? NAN : ldexp(1, code - 127) * w->global_scale;
  }
  default: return ((const float *)w->scale)[at];
  }
}

static inline double ref_at(const td_weight *w, uint32_t r, uint32_t c) {
  size_t i = (size_t)r * w->cols + c;
  switch (w->dtype) {
  case TD_F32: return ((const float *)w->data)[i];
  case TD_BF16: return ref_bf16(((const uint16_t *)w->data)[i]);
  case TD_F16: return ref_half(((const uint16_t *)w->data)[i]);
  case TD_F8E4M3: return ref_e4m3(((const uint8_t *)w->data)[i]) * ref_scale(w, r, c);
  case TD_I8: return ((const int8_t *)w->data)[i] * ref_scale(w, r, c);
  case TD_I4:
    return (ref_nibble(w->data, ref_index4(w, r, c)) - ref_zero(w, r, c)) * ref_scale(w, r, c);
  default: return ref_e2m1((unsigned)ref_nibble(w->data, ref_index4(w, r, c))) * ref_scale(w, r, c);
  }
}

// ||a - b|| / ||b||
static inline double ref_distance(const float *a, const double *b, size_t n) {
  double diff = 0, norm = 0;
  for (size_t i = 0; i < n; i++) {
    diff += (a[i] - b[i]) * (a[i] - b[i]);
    norm += b[i] * b[i];
  }
  return sqrt(diff) / (norm > 0 ? sqrt(norm) : 1);
}

static inline float *ref_floats(uint64_t *state, size_t n) {
  float *f = malloc((n ? n : 1) * sizeof *f);
  TD_CHECK(f);
  for (size_t i = 0; i < n; i++)
    f[i] = ref_float(state);
  return f;
}

static inline double *ref_doubles(size_t n) {
  double *f = calloc(n ? n : 1, sizeof *f);
  TD_CHECK(f);
  return f;
}

// Logits of few different values, so that most are ties, both zeros among them.
static inline float *ref_ties(uint64_t *state, size_t n) {
  float *f = ref_floats(state, n);
  for (size_t i = 0; i < n; i++)
    f[i] = f[i] < 0 ? -floorf(-f[i] * 16) / 4 : floorf(f[i] * 16) / 4;
  return f;
}

static inline bool ref_ranks_before(const float *logits, uint32_t a, uint32_t b) {
  if (isnan(logits[a]) != isnan(logits[b])) return isnan(logits[b]);
  if (logits[a] != logits[b] && !isnan(logits[a])) return logits[a] > logits[b];
  return a < b;
}

// A row is ranked as td_top_logits says. Terms of the sums err by a few units of FP32, and they by
// another for each addition on the way, of which there are fewer than 64.
static inline void ref_check_top(const float *logits, uint32_t n, float temperature,
                                 const td_top_logits *top) {
  uint8_t *taken = calloc(n, 1);
  TD_CHECK(taken);
  assert_int_equal(top->n, n < TD_TOP_LOGITS ? n : TD_TOP_LOGITS);
  double sum = 0, warm = 0;
  for (uint32_t i = 0; i < top->n; i++) {
    uint32_t best = UINT32_MAX;
    for (uint32_t j = 0; j < n; j++) {
      if (!taken[j] && (best == UINT32_MAX || ref_ranks_before(logits, j, best))) best = j;
    }
    taken[best] = 1;
    assert_int_equal(top->id[i], best);
    assert_true(top->value[i] == logits[best] || (isnan(top->value[i]) && isnan(logits[best])));
  }
  free(taken);
  for (uint32_t j = 0; j < n; j++) {
    double below = (double)logits[j] - (double)top->value[0];
    sum += exp(below);
    warm += exp(below / (temperature > 0 ? (double)temperature : 1));
  }
  if (isnan(sum) || isinf(top->value[0])) {
    assert_false(isfinite(top->sum) && isfinite(top->value[0]));
    return;
  }
  assert_true(fabs((double)top->sum - sum) <= sum * 64 * 0x1p-23);
  assert_true(fabs((double)top->sum_warm - warm) <= warm * 64 * 0x1p-23);
}
