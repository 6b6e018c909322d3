// kernels/cpu/avx2/linear_f8e4m3.c - FP8 weights with block scales; see linear_vec.h.
// Weights are decoded times 2^-8, which the scale makes good.
#include <math.h>

#include "kernels/cpu/avx2/vec.h"

typedef uint8_t elem;
enum { SCALED = 1, DOWN = 256 };

static inline void load2(const elem *w, vf *lo, vf *hi) {
  vf_from_e4m3(w, lo, hi);
}

static inline void load2_n(const elem *w, uint32_t n, vf *lo, vf *hi) {
  vf_from_e4m3_n(w, n, lo, hi);
}

static inline int has_nan(const elem *w, uint32_t n) {
  return e4m3_has_nan(w, n);
}

#include "kernels/cpu/linear_vec.h"

void linear_f8e4m3__avx2(const td_linear_args *args) {
  linear_vec(args);
}
