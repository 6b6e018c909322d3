// kernels/cpu/avx512/linear_bf16.c - BF16 weights; see linear_vec.h. A group's first vector has its
// even columns, the second its odd ones: a shift or a mask converts them to floats.
#include "kernels/cpu/avx512/vec.h"

typedef uint16_t elem;
enum { HAS_SCALES = 0 };

static inline vf vector_at(const elem *group, int j) {
  __m512i both = _mm512_loadu_si512(group);
  return _mm512_castsi512_ps(j == 0 ? _mm512_slli_epi32(both, 16)
                                    : _mm512_and_si512(both, _mm512_set1_epi32(~0xffff)));
}

static inline void order_x(vf v[2]) {
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
  vf first = v[0];
  v[0] = _mm512_permutex2var_ps(first, even, v[1]);
  v[1] = _mm512_permutex2var_ps(first, odd, v[1]);
}
#define ORDER_X order_x

#include "kernels/cpu/linear/linear_plain.h"
#include "kernels/cpu/linear/linear_vec.h"

void linear_bf16__avx512(const td_linear_args *args) {
  linear_vec(args);
}
