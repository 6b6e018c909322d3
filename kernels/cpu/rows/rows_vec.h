// kernels/cpu/rows/rows_vec.h - vector kernels for one row of activations. Included by each ISA's
// rows.c after its vec.h.
#pragma once

#include <math.h>

#include "kernels/cpu/common/blocks_vec.h"
#include "kernels/cpu/common/dequant.h"
#include "kernels/cpu/common/vec_math.h"
#include "kernels/cpu/rows/sum_row.h"
#include "kernels/decl.h"

#define TD_UNROLL _Pragma("GCC unroll 8")

enum { AXPY_VECTORS = 8 };

static void decode_e4m3(const uint8_t *w, float scale, float *out, uint32_t n) {
  if (e4m3_has_nan(w, n) || !(fabsf(scale) < 0x1p119f)) {
    for (uint32_t i = 0; i < n; i++)
      out[i] = f32_from_e4m3(w[i]) * scale;
    return;
  }
  vf lo, hi, s = vf_set1(scale * 256); // exact, so products are rounded once
  uint32_t i = 0;
  for (; i + 2 * VL <= n; i += 2 * VL) {
    vf_from_e4m3(w + i, &lo, &hi);
    vf_store(out + i, vf_mul(lo, s));
    vf_store(out + i + VL, vf_mul(hi, s));
  }
  if (i == n) return;
  uint32_t left = n - i;
  vf_from_e4m3_n(w + i, left, &lo, &hi);
  lo = vf_mul(lo, s);
  hi = vf_mul(hi, s);
  if (left < VL) {
    vf_store_n(out + i, lo, left);
  } else {
    vf_store(out + i, lo);
    vf_store_n(out + i + VL, hi, left - VL);
  }
}

// n codes of a group: VL or, at its end, fewer.
TD_INLINE void decode4(const td_weight *w, const uint8_t *codes, uint32_t n, float zero,
                       float scale, float *out) {
  uint8_t part[VL / 2] = {0};
  if (n < VL) codes = memcpy(part, codes, (n + 1) / 2);
  vi words = vi_spread4(codes);
  vf value = w->dtype == TD_I4 ? int4_low(words) : fp4_low(words);
  value = vf_mul(vf_sub(value, vf_set1(zero)), vf_set1(scale));
  if (w->dtype == TD_F4E2M1) value = vf_mul(value, vf_set1(w->global_scale));
  if (n < VL) {
    vf_store_n(out, value, n);
  } else {
    vf_store(out, value);
  }
}

static void decode_row4(const td_decode_row_args *a) {
  const td_weight *w = a->w;
  const uint8_t *codes = (const uint8_t *)w->data + a->row * td_weight_row_bytes(w);
  uint32_t n;
  for (uint32_t c = 0; c < w->cols; c += n) {
    size_t group = c / w->scale_cols;
    n = run_length(w, c, w->cols);
    float scale = scale_at(w, a->row, group);
    float zero = w->dtype == TD_I4 ? (float)(zero_at(w, a->row, group) - 8) : 0;
    for (uint32_t i = 0; i < n; i += VL)
      decode4(w, codes + (c + i) / 2, n - i < VL ? n - i : VL, zero, scale, a->out + c + i);
  }
}

static void decode_i8(const int8_t *w, float scale, float *out, uint32_t n) {
  uint32_t i = 0;
  for (; i + VL <= n; i += VL)
    vf_store(out + i, vf_mul(vf_from_i8(w + i), vf_set1(scale)));
  if (i == n) return;
  int8_t part[VL] = {0};
  memcpy(part, w + i, n - i);
  vf_store_n(out + i, vf_mul(vf_from_i8(part), vf_set1(scale)), n - i);
}

static void decode_bytes(const td_decode_row_args *a) {
  const td_weight *w = a->w;
  size_t at = (size_t)a->row * w->cols;
  const float *scales = row_scales(w, a->row);
  uint32_t n;
  for (uint32_t c = 0; c < w->cols; c += n) {
    n = run_length(w, c, w->cols);
    float scale = scales[c / w->scale_cols];
    if (w->dtype == TD_I8) {
      decode_i8((const int8_t *)w->data + at + c, scale, a->out + c, n);
    } else {
      decode_e4m3((const uint8_t *)w->data + at + c, scale, a->out + c, n);
    }
  }
}

static void decode_halves(const td_decode_row_args *a) {
  const td_weight *w = a->w;
  const uint16_t *data = (const uint16_t *)w->data + (size_t)a->row * w->cols;
  bool is_bf16 = w->dtype == TD_BF16;
  uint32_t c = 0, left;
  for (; c + VL <= w->cols; c += VL)
    vf_store(a->out + c, is_bf16 ? vf_from_bf16(data + c) : vf_from_half(data + c));
  if ((left = w->cols - c) == 0) return;
  vf_store_n(a->out + c, is_bf16 ? vf_from_bf16_n(data + c, left) : vf_from_half_n(data + c, left),
             left);
}

void TD_VEC_NAME(decode_row)(const td_decode_row_args *a) {
  const td_weight *w = a->w;
  switch (w->dtype) {
  case TD_BF16:
  case TD_F16: decode_halves(a); return;
  case TD_F8E4M3:
  case TD_I8: decode_bytes(a); return;
  case TD_I4:
  case TD_F4E2M1:
    if (w->scale_cols % 2) break;
    decode_row4(a);
    return;
#define X(id, n_cols, n_bytes)                                                                     \
  case TD_##id:                                                                                    \
    decode_blocks(TD_##id, (const uint8_t *)w->data + a->row * td_weight_row_bytes(w), w->cols,    \
                  a->out);                                                                         \
    return;
    TD_BLOCK_DTYPES(X)
#undef X
  default: break;
  }
  decode_row__scalar(a);
}

TD_INLINE vf norm_weight(const td_vec *w, uint32_t i) {
  return w->dtype == TD_F32 ? vf_load((const float *)w->data + i)
                            : vf_from_bf16((const uint16_t *)w->data + i);
}

TD_INLINE vf norm_weight_n(const td_vec *w, uint32_t i, uint32_t n) {
  return w->dtype == TD_F32 ? vf_load_n((const float *)w->data + i, n)
                            : vf_from_bf16_n((const uint16_t *)w->data + i, n);
}

void TD_VEC_NAME(rmsnorm_row)(const td_norm_row_args *a) {
  uint32_t n = a->w.n, i = 0;
  vf squares[2] = {vf_zero(), vf_zero()};
  for (; i + 2 * VL <= n; i += 2 * VL) {
    vf x0 = vf_load(a->x + i), x1 = vf_load(a->x + i + VL);
    squares[0] = vf_fma(x0, x0, squares[0]);
    squares[1] = vf_fma(x1, x1, squares[1]);
  }
  for (; i < n; i += VL) {
    vf x = n - i < VL ? vf_load_n(a->x + i, n - i) : vf_load(a->x + i);
    squares[0] = vf_fma(x, x, squares[0]);
  }
  float mean = vf_sum(vf_add(squares[0], squares[1])) / (float)n;
  vf inverse = vf_set1(1.0f / sqrtf(mean + a->eps));
  for (i = 0; i + VL <= n; i += VL) {
    vf_store(a->out + i, vf_mul(vf_mul(vf_load(a->x + i), inverse), norm_weight(&a->w, i)));
  }
  if (i == n) return;
  vf x = vf_mul(vf_load_n(a->x + i, n - i), inverse);
  vf_store_n(a->out + i, vf_mul(x, norm_weight_n(&a->w, i, n - i)), n - i);
}

TD_INLINE vf swiglu(vf gate, vf up) {
  vf denominator = vf_add(vf_set1(1), vf_exp(vf_sub(vf_zero(), gate)));
  return vf_mul(vf_div(gate, denominator), up);
}

void TD_VEC_NAME(swiglu_row)(const td_swiglu_row_args *a) {
  size_t i = 0;
  for (; i + VL <= a->n; i += VL) {
    vf_store(a->out + i, swiglu(vf_load(a->gate + i), vf_load(a->up + i)));
  }
  uint32_t left = (uint32_t)(a->n - i);
  if (left) {
    vf_store_n(a->out + i, swiglu(vf_load_n(a->gate + i, left), vf_load_n(a->up + i, left)), left);
  }
}

// Columns [at, at + m * VL), m constant, with sums in registers.
TD_INLINE void axpy_columns(const int m, const td_axpy_args *a, size_t at) {
  vf sum[AXPY_VECTORS];
  TD_UNROLL for (int v = 0; v < m; v++) sum[v] = vf_load(a->y + at + v * VL);
  for (uint32_t j = 0; j < a->n_rows; j++) {
    const float *x = a->x + j * a->ldx + at;
    vf factor = vf_set1(a->a[j]);
    TD_UNROLL for (int v = 0; v < m; v++) sum[v] = vf_fma(factor, vf_load(x + v * VL), sum[v]);
  }
  TD_UNROLL for (int v = 0; v < m; v++) vf_store(a->y + at + v * VL, sum[v]);
}

void TD_VEC_NAME(axpy)(const td_axpy_args *a) {
  size_t i = 0;
  for (; i + AXPY_VECTORS * VL <= a->n; i += AXPY_VECTORS * VL)
    axpy_columns(AXPY_VECTORS, a, i);
  for (; i + VL <= a->n; i += VL)
    axpy_columns(1, a, i);
  uint32_t left = (uint32_t)(a->n - i);
  if (left == 0) return;
  vf sum = vf_load_n(a->y + i, left);
  for (uint32_t j = 0; j < a->n_rows; j++)
    sum = vf_fma(vf_set1(a->a[j]), vf_load_n(a->x + j * a->ldx + i, left), sum);
  vf_store_n(a->y + i, sum, left);
}

enum { CHUNK = AXPY_VECTORS * VL }; // columns whose sums fit registers

// Walks over the scales of columns that share one in each row.
typedef struct {
  const float *at;
  size_t step;         // to the scale of the next rows
  uint32_t left, each; // rows left that share the current scale; rows per scale
} scale_walk;

static scale_walk scales_of(const td_weight *w, uint32_t row, uint32_t c) {
  static const float one = 1;
  if (!w->scale) return (scale_walk){.at = &one, .left = UINT32_MAX};
  return (scale_walk){.at = row_scales(w, row) + c / w->scale_cols,
                      .step = td_weight_groups(w),
                      .left = w->scale_rows - row % w->scale_rows,
                      .each = w->scale_rows};
}

TD_INLINE float next_scale(scale_walk *s) {
  const float scale = *s->at;
  if (--s->left == 0) {
    s->at += s->step;
    s->left = s->each;
  }
  return scale;
}

// CHUNK weights times s; E4M3 weights come out times 2^-8.
TD_INLINE void chunk_of(const td_dtype dtype, const char *at, vf s, vf out[AXPY_VECTORS]) {
  TD_UNROLL for (int v = 0; v < AXPY_VECTORS; v += 2) {
    switch (dtype) {
    case TD_BF16:
      out[v] = vf_from_bf16((const uint16_t *)at + v * VL);
      out[v + 1] = vf_from_bf16((const uint16_t *)at + v * VL + VL);
      break;
    case TD_F16:
      out[v] = vf_from_half((const uint16_t *)at + v * VL);
      out[v + 1] = vf_from_half((const uint16_t *)at + v * VL + VL);
      break;
    case TD_I8:
      out[v] = vf_mul(vf_from_i8((const int8_t *)at + v * VL), s);
      out[v + 1] = vf_mul(vf_from_i8((const int8_t *)at + v * VL + VL), s);
      break;
    default:
      vf_from_e4m3((const uint8_t *)at + v * VL, &out[v], &out[v + 1]);
      out[v] = vf_mul(out[v], s);
      out[v + 1] = vf_mul(out[v + 1], s);
    }
  }
}

// Columns [c, c + CHUNK), which share a scale in each row. Prefetches the same number of bytes of
// what is next. Returns false without changing y if there are NaN codes, or scales so large that
// axpy_each is needed.
TD_INLINE bool axpy_chunk(const td_dtype dtype, const td_axpy_weights_args *a, uint32_t c) {
  const size_t bytes = td_dtype_bytes(dtype), row_bytes = a->w->cols * bytes;
  const char *at = (const char *)a->w->data + a->row * row_bytes + c * bytes;
  uintptr_t next = a->next ? (uintptr_t)a->next
                           : (uintptr_t)a->w->data + (a->row + a->n_rows) * row_bytes;
  next += a->n_rows * c * bytes;
  scale_walk scales = scales_of(a->w, a->row, c);
  bool bad = false;
  vf sum[AXPY_VECTORS], w[AXPY_VECTORS];
  TD_UNROLL for (int v = 0; v < AXPY_VECTORS; v++) sum[v] = vf_load(a->y + c + v * VL);
  for (uint32_t j = 0; j < a->n_rows; j++, at += row_bytes) {
    for (uint32_t i = 0; i < CHUNK * bytes; i += 64, next += 64)
      __builtin_prefetch((const void *)next);
    float scale = next_scale(&scales);
    if (dtype == TD_F8E4M3) {
      bad |= e4m3_has_nan((const uint8_t *)at, CHUNK) || !(fabsf(scale) < 0x1p119f);
      scale *= 256; // exact, as in decode_e4m3
    }
    chunk_of(dtype, at, vf_set1(scale), w);
    const vf factor = vf_set1(a->a[j]);
    TD_UNROLL for (int v = 0; v < AXPY_VECTORS; v++) sum[v] = vf_fma(factor, w[v], sum[v]);
  }
  if (bad) return false;
  TD_UNROLL for (int v = 0; v < AXPY_VECTORS; v++) vf_store(a->y + c + v * VL, sum[v]);
  return true;
}

// Columns [c, end), one by one.
static void axpy_each(const td_axpy_weights_args *a, uint32_t c, uint32_t end) {
  for (; c < end; c++) {
    for (uint32_t j = 0; j < a->n_rows; j++)
      a->y[c] = fmaf(a->a[j], weight_at(a->w, a->row + j, c), a->y[c]);
  }
}

void TD_VEC_NAME(axpy_weights)(const td_axpy_weights_args *a) {
  const td_weight *w = a->w;
  uint32_t c = 0;
  for (; c + CHUNK <= w->cols; c += CHUNK) {
    const bool one_scale = !w->scale || c % w->scale_cols + CHUNK <= w->scale_cols;
    bool done = false;
    switch (one_scale ? w->dtype : TD_F32) {
    case TD_BF16: done = axpy_chunk(TD_BF16, a, c); break;
    case TD_F16: done = axpy_chunk(TD_F16, a, c); break;
    case TD_F8E4M3: done = axpy_chunk(TD_F8E4M3, a, c); break;
    case TD_I8: done = axpy_chunk(TD_I8, a, c); break;
    default: break;
    }
    if (!done) axpy_each(a, c, c + CHUNK);
  }
  axpy_each(a, c, w->cols);
}

void TD_VEC_NAME(f32_from_f16)(const td_convert_args *a) {
  const uint16_t *in = a->in;
  float *out = a->out;
  size_t i = 0;
  for (; i + VL <= a->n; i += VL)
    vf_store(out + i, vf_from_half(in + i));
  uint32_t left = (uint32_t)(a->n - i);
  if (left) vf_store_n(out + i, vf_from_half_n(in + i, left), left);
}

// NaN passes through both bounds, as the second operand.
TD_INLINE vf saturate_half(vf v) {
  return vf_min(vf_set1(65504), vf_max(vf_set1(-65504), v));
}

void TD_VEC_NAME(f16_from_f32)(const td_convert_args *a) {
  const float *in = a->in;
  uint16_t *out = a->out;
  size_t i = 0;
  for (; i + VL <= a->n; i += VL)
    vf_to_half(out + i, saturate_half(vf_load(in + i)));
  uint32_t left = (uint32_t)(a->n - i);
  if (left) vf_to_half_n(out + i, saturate_half(vf_load_n(in + i, left)), left);
}

void TD_VEC_NAME(sum_row)(const td_sum_row_args *a) {
  sum_row(a);
}
