// kernels/cpu/avx2/linear_i8.c - INT8 weights with scales; see linear_vec.h.
#include "kernels/cpu/avx2/vec.h"

typedef int8_t elem;
enum { HAS_SCALES = 1 };

static inline vf vector_at(const elem *group, int j) {
  return vf_from_i8(group + j * VL);
}

#include "kernels/cpu/linear/linear_plain.h"
#include "kernels/cpu/linear/linear_vec.h"

enum { DWORD_COLS = 4 };

static inline void columns_of(vi dwords, vf out[4]) {
  for (int j = 0; j < 4; j++)
    out[j] = _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(dwords, 24 - 8 * j), 24));
}

#include "kernels/cpu/avx2/gemm_prompt.h"

void linear_i8__avx2(const td_linear_args *args) {
  if (args->prompt && prompt_fits(args->w)) {
    linear_prompt(args);
  } else {
    linear_vec(args);
  }
}
