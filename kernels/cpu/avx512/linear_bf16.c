// kernels/cpu/avx512/linear_bf16.c - BF16 weights; see linear_vec.h.
#include "kernels/cpu/avx512/vec.h"

typedef uint16_t elem;
enum { SCALED = 0, DOWN = 1 };
#include "kernels/cpu/linear_plain.h"

static inline void load2(const elem *w, vf *lo, vf *hi) {
  *lo = vf_from_bf16(w);
  *hi = vf_from_bf16(w + VL);
}

static inline void load2_n(const elem *w, uint32_t n, vf *lo, vf *hi) {
  *lo = n < VL ? vf_from_bf16_n(w, n) : vf_from_bf16(w);
  *hi = n > VL ? vf_from_bf16_n(w + VL, n - VL) : vf_zero();
}

#include "kernels/cpu/linear_vec.h"

void linear_bf16__avx512(const td_linear_args *args) {
  linear_vec(args);
}
