// kernels/cpu/avx512/linear_f32.c - F32 weights; see linear_vec.h.
#include "kernels/cpu/avx512/vec.h"

typedef float elem;
enum { HAS_SCALES = 0 };

static inline vf vector_at(const elem *group, int j) {
  return vf_load(group + j * VL);
}

#include "kernels/cpu/linear/linear_plain.h"
#include "kernels/cpu/linear/linear_vec.h"

void linear_f32__avx512(const td_linear_args *args) {
  linear_vec(args);
}
