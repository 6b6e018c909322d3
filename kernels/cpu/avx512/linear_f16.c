// kernels/cpu/avx512/linear_f16.c - F16 weights; see linear_vec.h.
#include "kernels/cpu/avx512/vec.h"

typedef uint16_t elem;
enum { HAS_SCALES = 0 };

static inline vf vector_at(const elem *group, int j) {
  return vf_from_half(group + j * VL);
}

#include "kernels/cpu/linear/linear_plain.h"
#include "kernels/cpu/linear/linear_vec.h"

void linear_f16__avx512(const td_linear_args *args) {
  linear_vec(args);
}
