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

// The largest magnitude of each byte's place among 32 codes and those before, with the sign set.
static inline __m256i highest_of(__m256i before, const elem *p) {
  __m256i bytes = _mm256_loadu_si256((const __m256i *)p);
  return _mm256_max_epu8(before, _mm256_or_si256(bytes, _mm256_set1_epi8((char)0x80)));
}

static inline bool is_nan(__m256i highest) {
  return _mm256_movemask_epi8(_mm256_cmpeq_epi8(highest, _mm256_set1_epi8(-1))) != 0;
}

static inline __attribute__((always_inline)) bool plain(int n, const codes *c) {
  __m256i highest = _mm256_setzero_si256();
  for (int i = 0; i < n; i++)
    highest = highest_of(highest_of(highest, c[i].at), c[i].at + 32);
  return !is_nan(highest);
}

static inline bool has_nan(const codes *c) {
  return !plain(1, c);
}

// Weights times 2^-8, but NaN comes out as 1.875: the code's bits are an f16's with the exponent
// eight too low, and F16C conversion takes f16 subnormals as they are. What two vectors share the
// compiler does only once.
static inline __attribute__((always_inline)) vf vector_of(const codes *c, int j) {
  __m256i half = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(c->at + j / 2 * 16)));
  half = _mm256_and_si256(_mm256_slli_epi16(half, 7), _mm256_set1_epi16((short)0xbf80));
  return _mm256_cvtph_ps(j % 2 == 0 ? _mm256_castsi256_si128(half)
                                    : _mm256_extracti128_si256(half, 1));
}

static inline vf any_vector_of(const codes *c, int j) {
  return vector_of(c, j);
}

#include "kernels/cpu/linear_vec.h"

void linear_f8e4m3__avx2(const td_linear_args *args) {
  linear_vec(args);
}
