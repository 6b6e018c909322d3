// kernels/cpu/avx2/linear_i8.c - INT8 weights with scales; see linear_vec.h.
#include "kernels/cpu/avx2/vec.h"

typedef int8_t elem;
enum { SCALED = 1, DOWN = 1 };

static inline void load2(const elem *w, vf *lo, vf *hi) {
  *lo = vf_from_i8(w);
  *hi = vf_from_i8(w + VL);
}

static inline void load2_n(const elem *w, uint32_t n, vf *lo, vf *hi) {
  elem part[2 * VL] = {0};
  memcpy(part, w, n);
  load2(part, lo, hi);
}

static inline int has_nan(const elem *w, uint32_t n) {
  (void)w;
  (void)n;
  return 0;
}

#include "kernels/cpu/linear_vec.h"

void linear_i8__avx2(const td_linear_args *args) {
  linear_vec(args);
}
