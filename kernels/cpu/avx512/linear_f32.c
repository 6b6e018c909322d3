// kernels/cpu/avx512/linear_f32.c - F32 weights; see linear_vec.h.
#include "kernels/cpu/avx512/vec.h"

typedef float elem;
enum { SCALED = 0, DOWN = 1 };
#include "kernels/cpu/linear_plain.h"

static inline void load2(const elem *w, vf *lo, vf *hi) {
  *lo = vf_load(w);
  *hi = vf_load(w + VL);
}

static inline void load2_n(const elem *w, uint32_t n, vf *lo, vf *hi) {
  *lo = n < VL ? vf_load_n(w, n) : vf_load(w);
  *hi = n > VL ? vf_load_n(w + VL, n - VL) : vf_zero();
}

#include "kernels/cpu/linear_vec.h"

void linear_f32__avx512(const td_linear_args *args) {
  linear_vec(args);
}
