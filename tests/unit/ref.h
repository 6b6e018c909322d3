// tests/unit/ref.h - what the kernel and device tests share: random data, memory that ends at a
// guard page, and decoders written from the formats' definitions, apart from those under test.
#ifndef TESTS_UNIT_REF_H
#define TESTS_UNIT_REF_H

#include <math.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/status.h"
#include "tandem/types.h"

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

// A matrix of random weights, with data and scales at the end of guarded memory.
typedef struct {
  td_weight w;
  ref_mem data, scale;
} ref_weight;

static inline ref_weight ref_make_weight(uint64_t *state, td_dtype dtype, uint32_t rows,
                                         uint32_t cols, uint32_t scale_rows, uint32_t scale_cols) {
  size_t n = (size_t)rows * cols;
  ref_weight r = {.w = {.dtype = dtype, .rows = rows, .cols = cols}};
  r.data = ref_guarded(n * td_dtype_bytes(dtype));
  r.w.data = r.data.data;
  for (size_t i = 0; i < n; i++) {
    if (dtype == TD_F32) ((float *)r.data.data)[i] = ref_float(state);
    if (dtype == TD_BF16) ((uint16_t *)r.data.data)[i] = ref_to_bf16(ref_float(state));
    if (dtype == TD_F8E4M3) {
      uint8_t code = (uint8_t)ref_next(state);
      if ((code & 0x7f) == 0x7f) code ^= 1; // NaN has its own test
      ((uint8_t *)r.data.data)[i] = code;
    }
  }
  if (dtype != TD_F8E4M3) return r;
  r.w.scale_rows = scale_rows;
  r.w.scale_cols = scale_cols;
  size_t n_scales = (size_t)((rows + scale_rows - 1) / scale_rows) *
                    ((cols + scale_cols - 1) / scale_cols);
  r.scale = ref_guarded(n_scales * sizeof(float));
  float *scale = r.scale.data;
  for (size_t i = 0; i < n_scales; i++)
    scale[i] = (ref_float(state) + 1.5f) * 0x1p-7f;
  r.w.scale = scale;
  return r;
}

static inline void ref_free_weight(ref_weight *r) {
  ref_unmap(&r->data);
  ref_unmap(&r->scale);
}

static inline double ref_at(const td_weight *w, uint32_t r, uint32_t c) {
  size_t i = (size_t)r * w->cols + c;
  if (w->dtype == TD_F32) return ((const float *)w->data)[i];
  if (w->dtype == TD_BF16) return ref_bf16(((const uint16_t *)w->data)[i]);
  double value = ref_e4m3(((const uint8_t *)w->data)[i]);
  size_t blocks = (w->cols + w->scale_cols - 1) / w->scale_cols;
  return value * ((const float *)w->scale)[r / w->scale_rows * blocks + c / w->scale_cols];
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

#endif
