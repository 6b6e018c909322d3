// kernels/cpu/avx2/linear_bf16.c - BF16 weights; see linear_vec.h.
#include "kernels/cpu/avx2/vec.h"

typedef uint16_t elem;
enum { HAS_SCALES = 0 };

static inline vf vector_at(const elem *group, int j) {
  return vf_from_bf16(group + j * VL);
}

#include "kernels/cpu/linear/linear_plain.h"
#include "kernels/cpu/linear/linear_vec.h"

enum { DWORD_COLS = 2 };

static inline void columns_of(vi dwords, vf out[2]) {
  out[0] = _mm256_castsi256_ps(_mm256_slli_epi32(dwords, 16));
  out[1] = _mm256_castsi256_ps(_mm256_and_si256(dwords, _mm256_set1_epi32((int)0xffff0000)));
}

#include "kernels/cpu/avx2/gemm_prompt.h"

void linear_bf16__avx2(const td_linear_args *args) {
  if (args->prompt) {
    linear_prompt(args);
  } else {
    linear_vec(args);
  }
}
