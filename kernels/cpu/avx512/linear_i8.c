// kernels/cpu/avx512/linear_i8.c - INT8 weights with scales; see linear_vec.h.
#include "kernels/cpu/avx512/vec.h"

typedef int8_t elem;
enum { HAS_SCALES = 1 };

static inline vf vector_at(const elem *group, int j) {
  return vf_from_i8(group + j * VL);
}

#include "kernels/cpu/linear/linear_plain.h"
#include "kernels/cpu/linear/linear_vec.h"

void linear_i8__avx512(const td_linear_args *args) {
  linear_vec(args);
}
