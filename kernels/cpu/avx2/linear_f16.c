// kernels/cpu/avx2/linear_f16.c - F16 weights; see linear_vec.h.
#include "kernels/cpu/avx2/vec.h"

typedef uint16_t elem;
enum { SCALED = 0, DOWN = 1 };
#include "kernels/cpu/linear_plain.h"

static inline void load2(const elem *w, vf *lo, vf *hi) {
  *lo = vf_from_half(w);
  *hi = vf_from_half(w + VL);
}

static inline void load2_n(const elem *w, uint32_t n, vf *lo, vf *hi) {
  *lo = n < VL ? vf_from_half_n(w, n) : vf_from_half(w);
  *hi = n > VL ? vf_from_half_n(w + VL, n - VL) : vf_zero();
}

#include "kernels/cpu/linear_vec.h"

void linear_f16__avx2(const td_linear_args *args) {
  linear_vec(args);
}
