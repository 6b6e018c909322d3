// kernels/cpu/avx512/linear_f8e4m3.c - FP8 weights with block scales; see linear_vec.h.
// Most paths decode weights times 2^-8, which the scale makes good.
//
// One token has a path of its own, with 14 operations for 64 weights and 4 to find special codes;
// load2 and has_nan take 23. A code's byte in the top of a 32-bit lane, shifted right by 4 as a
// signed number and masked, is the weight times 2^-120. Activations are taken times 2^100, so that
// products are normal numbers; scaling by powers of two changes no bit of a sum that neither
// overflows nor becomes subnormal, and gemv_scale_x lets only such activations pass. So the results
// are those of the other paths.
#include <math.h>

#include "kernels/cpu/avx512/vec.h"

typedef uint8_t elem;
enum { SCALED = 1, DOWN = 256 };

static inline void load2(const elem *w, vf *lo, vf *hi) {
  vf_from_e4m3(w, lo, hi);
}

static inline void load2_n(const elem *w, uint32_t n, vf *lo, vf *hi) {
  vf_from_e4m3_n(w, n, lo, hi);
}

static inline int has_nan(const elem *w, uint32_t n) {
  return e4m3_has_nan(w, n);
}

#include "kernels/cpu/linear_vec.h"

enum {
  X_COLS = 8192,    // widest matrix of the one-token path: scaled activations lie on the stack
  FAST_ROWS = 4,    // enough to hide the latency of a row's additions
  GROUP = 64,       // weights of one load
  AHEAD_COLS = 1024 // prefetched
};

// x times 2^100, and zeros up to a whole group. False where an activation is not 0 and outside of
// [2^-96, 2^27): below, the product with the smallest weight loses bits here; above, overflow.
static bool gemv_scale_x(const float *x, uint32_t n, float *out) {
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  const __m512i lowest = _mm512_set1_epi32((127 - 96) << 23);
  const __m512i span = _mm512_set1_epi32((96 + 27) << 23);
  __mmask16 bad = 0;
  for (uint32_t k = 0; k < (n + GROUP - 1) / GROUP * GROUP; k += VL) {
    vf v = k >= n ? vf_zero() : n - k < VL ? vf_load_n(x + k, n - k) : vf_load(x + k);
    __m512i bits = _mm512_and_si512(_mm512_castps_si512(v), magnitude);
    __mmask16 outside = _mm512_cmpge_epu32_mask(_mm512_sub_epi32(bits, lowest), span);
    bad |= _mm512_mask_test_epi32_mask(outside, bits, bits);
    vf_store(out + k, vf_mul(v, vf_set1(0x1p100f)));
  }
  return bad == 0;
}

// Byte 4 l + j of the result is code 16 j + l: lane l holds the codes that are added there.
TD_INLINE __m512i gather_codes(__m512i codes) {
  const __m512i from = _mm512_add_epi8(
      _mm512_set1_epi32(0x30201000),
      _mm512_set_epi32(0x0f0f0f0f, 0x0e0e0e0e, 0x0d0d0d0d, 0x0c0c0c0c, 0x0b0b0b0b, 0x0a0a0a0a,
                       0x09090909, 0x08080808, 0x07070707, 0x06060606, 0x05050505, 0x04040404,
                       0x03030303, 0x02020202, 0x01010101, 0x00000000));
  return _mm512_permutexvar_epi8(from, codes);
}

// acc += 64 weights times x, none of them 0, subnormal or NaN.
TD_INLINE vf add_group(__m512i codes, const vf x[4], vf acc) {
  const __m512i keep = _mm512_set1_epi32((int)0x87f00000u);
  __m512i lanes = gather_codes(codes);
  __m512i odd = _mm512_srai_epi16(lanes, 4);
  __m512i even = _mm512_srai_epi16(_mm512_slli_epi16(lanes, 8), 4);
  __m512i w0 = _mm512_and_si512(_mm512_slli_epi32(even, 16), keep);
  __m512i w1 = _mm512_and_si512(_mm512_slli_epi32(odd, 16), keep);
  __m512i w2 = _mm512_and_si512(even, keep);
  __m512i w3 = _mm512_and_si512(odd, keep);
  acc = vf_fma(_mm512_castsi512_ps(w0), x[0], acc);
  acc = vf_fma(_mm512_castsi512_ps(w1), x[1], acc);
  acc = vf_fma(_mm512_castsi512_ps(w2), x[2], acc);
  return vf_fma(_mm512_castsi512_ps(w3), x[3], acc);
}

// The same for any codes: weights times 2^-8, activations times 2^-12.
TD_INLINE vf add_group_any(__m512i codes, const vf x[4], vf acc) {
  const vf down = vf_set1(0x1p-112f);
  vf w[4];
  vf_widen_e4m3(_mm512_castsi512_si256(codes), &w[0], &w[1]);
  vf_widen_e4m3(_mm512_extracti64x4_epi64(codes, 1), &w[2], &w[3]);
  TD_UNROLL for (int j = 0; j < 4; j++) acc = vf_fma(w[j], vf_mul(x[j], down), acc);
  return acc;
}

// Magnitudes 0x08 to 0x7e, the normal numbers, come out as 0x89 to 0xff and all others lower: NaN
// as 0.
TD_INLINE __m512i rank_codes(__m512i codes) {
  return _mm512_add_epi8(_mm512_or_si512(codes, _mm512_set1_epi8((char)0x80)), _mm512_set1_epi8(1));
}

// acc[r] += 64 products of each row. Multiplying by a subnormal number takes the processor a
// hundred cycles, so groups that have some, or zeros or NaN, go another way: a few in a hundred.
TD_INLINE void dot_group(const int R, const __m512i *codes, const float *x, vf *acc, int *nan) {
  vf xs[4];
  TD_UNROLL for (int j = 0; j < 4; j++) xs[j] = vf_load(x + j * VL);
  __m512i lowest = rank_codes(codes[0]);
  TD_UNROLL for (int r = 1; r < R; r++) lowest = _mm512_min_epu8(lowest, rank_codes(codes[r]));
  if (__builtin_expect(_mm512_cmple_epu8_mask(lowest, _mm512_set1_epi8((char)0x88)) == 0, 1)) {
    TD_UNROLL for (int r = 0; r < R; r++) acc[r] = add_group(codes[r], xs, acc[r]);
    return;
  }
  TD_UNROLL for (int r = 0; r < R; r++) {
    acc[r] = add_group_any(codes[r], xs, acc[r]);
    nan[r] |= _mm512_testn_epi8_mask(rank_codes(codes[r]), _mm512_set1_epi8((char)0xff)) != 0;
  }
}

// acc[r] += the run's products. Where the run is no whole number of groups, zeros stand for the
// weights behind it. ahead: bytes from a weight to the one to prefetch.
TD_INLINE void dot_fast(const int R, const elem *const *w, const float *x, uint32_t k, uint32_t n,
                        size_t ahead, vf *acc, int *nan) {
  __m512i codes[R];
  uint32_t end = k + n;
  for (; k + GROUP <= end; k += GROUP) {
    TD_UNROLL for (int r = 0; r < R; r++) {
      _mm_prefetch((const char *)((uintptr_t)(w[r] + k) + ahead), _MM_HINT_T0);
      codes[r] = _mm512_loadu_si512(w[r] + k);
    }
    dot_group(R, codes, x + k, acc, nan);
  }
  if (k == end) return;
  TD_UNROLL for (int r = 0; r < R; r++) {
    codes[r] = _mm512_maskz_loadu_epi8(((__mmask64)1 << (end - k)) - 1, w[r] + k);
  }
  dot_group(R, codes, x + k, acc, nan);
}

// total + acc * up * scale for a power of two, which goes into the scale where that cannot
// overflow it.
static inline vf add_run_times(vf total, vf acc, float up, float scale) {
  if (fabsf(scale) < 0x1p127f / up) return vf_fma(acc, vf_set1(scale * up), total);
  return vf_fma(vf_mul(acc, vf_set1(up)), vf_set1(scale), total);
}

TD_INLINE void fast_tile(const int R, const td_linear_args *a, const float *x, uint32_t row) {
  const elem *w[R];
  const float *scales[R];
  vf total[R], acc[R];
  int nan[R];
  TD_UNROLL for (int r = 0; r < R; r++) {
    w[r] = row_data(a, row + (uint32_t)r);
    scales[r] = row_scales(a->w, row + (uint32_t)r);
    total[r] = vf_zero();
    nan[r] = 0;
  }
  uint32_t n, cols = a->w->cols;
  for (uint32_t k = 0; k < cols; k += n) {
    n = run_length(a->w, k, RUN);
    // Behind the rows' ends come the rows after this tile's.
    size_t ahead = AHEAD_COLS + (k + AHEAD_COLS < cols ? 0 : (size_t)(R - 1) * cols);
    TD_UNROLL for (int r = 0; r < R; r++) acc[r] = vf_zero();
    dot_fast(R, w, x, k, n, ahead, acc, nan);
    TD_UNROLL for (int r = 0; r < R; r++) {
      float scale = scales[r][k / a->w->scale_cols];
      total[r] = add_run_times(total[r], acc[r], 0x1p20f, scale);
    }
  }
  TD_UNROLL for (int r = 0; r < R; r++) {
    a->y[row + (uint32_t)r - a->y_row0] = nan[r] ? NAN : vf_sum(total[r]);
  }
}

// False where x or the matrix is not for this path; then nothing is written.
static bool gemv_fast(const td_linear_args *a) {
  _Alignas(64) float x[X_COLS + GROUP]; // a run may end inside a group: up to one group is read
  uint32_t cols = a->w->cols;           // behind its end
  if (cols > X_COLS || !gemv_scale_x(token_x(a, 0), cols, x)) return false;
  for (uint32_t k = (cols + GROUP - 1) / GROUP * GROUP, i = 0; i < GROUP; i += VL)
    vf_store(x + k + i, vf_zero());
  uint32_t row = a->row_begin;
  for (; row + FAST_ROWS <= a->row_end; row += FAST_ROWS)
    fast_tile(FAST_ROWS, a, x, row);
  for (; row < a->row_end; row++)
    fast_tile(1, a, x, row);
  return true;
}

void linear_f8e4m3__avx512(const td_linear_args *args) {
  if (args->n_tokens == 1 && gemv_fast(args)) return;
  linear_vec(args);
}
