// kernels/cpu/avx2/linear_f8e4m3.c - FP8 weights with scales; see linear_vec.h.
#include <stdbool.h>

#include "kernels/cpu/avx2/vec.h"

typedef uint8_t elem;
enum { HAS_SCALES = 1, DOWN = 256, GROUP = 64 };

typedef struct {
  const elem *at;
} codes;

static inline codes load_codes(const elem *w) {
  return (codes){w};
}

static inline codes load_codes_n(const elem *w, uint32_t n, elem room[GROUP]) {
  memset(room, 0, GROUP);
  memcpy(room, w, n);
  return (codes){room};
}

static inline __m256i are_nan(const codes *c, int half) {
  const __m256i magnitude = _mm256_set1_epi8(0x7f);
  __m256i v = _mm256_loadu_si256((const __m256i *)(c->at + 32 * half));
  return _mm256_cmpeq_epi8(_mm256_and_si256(v, magnitude), magnitude);
}

static inline bool has_nan(const codes *c) {
  __m256i found = _mm256_or_si256(are_nan(c, 0), are_nan(c, 1));
  return !_mm256_testz_si256(found, found);
}

static inline __attribute__((always_inline)) bool plain(int n, const codes *c) {
  __m256i found = _mm256_setzero_si256();
  for (int i = 0; i < 2 * n; i++)
    found = _mm256_or_si256(found, are_nan(&c[i / 2], i % 2));
  return _mm256_testz_si256(found, found);
}

// Weights times 2^-8, but NaN comes out as 1.875: the code's bits are an f16's with the exponent
// eight too low, and F16C conversion takes f16 subnormals as they are.
static inline vf vector_of(const codes *c, int j) {
  __m128i half = _mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i *)(c->at + j * VL)));
  half = _mm_and_si128(_mm_slli_epi16(half, 7), _mm_set1_epi16((short)0xbf80));
  return _mm256_cvtph_ps(half);
}

static inline vf any_vector_of(const codes *c, int j) {
  return vector_of(c, j);
}

#include "kernels/cpu/linear_vec.h"

void linear_f8e4m3__avx2(const td_linear_args *args) {
  linear_vec(args);
}
