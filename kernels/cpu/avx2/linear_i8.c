// kernels/cpu/avx2/linear_i8.c - INT8 weights with scales; see linear_vec.h.
#include "kernels/cpu/avx2/vec.h"

typedef int8_t elem;
enum { HAS_SCALES = 1 };

static inline vf vector_at(const elem *group, int j) {
  return vf_from_i8(group + j * VL);
}

#include "kernels/cpu/linear_plain.h"
#include "kernels/cpu/linear_vec.h"

void linear_i8__avx2(const td_linear_args *args) {
  linear_vec(args);
}
