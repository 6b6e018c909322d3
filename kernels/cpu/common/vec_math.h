// kernels/cpu/common/vec_math.h - math functions on vectors, for either vec.h.
#pragma once

#define TD_INLINE static inline __attribute__((always_inline))

// e^x within 2 ulp, also for subnormal results; NaN stays NaN. x = n ln 2 + r with |r| <= ln(2)/2;
// the polynomial for e^r is that of Cephes' expf.
TD_INLINE vf vf_exp(vf x) {
  x = vf_min(vf_set1(130.0f), vf_max(vf_set1(-130.0f), x));
  vf n = vf_round(vf_mul(x, vf_set1(1.44269504088896341f)));
  vf r = vf_fma(n, vf_set1(-0.693359375f), x);
  r = vf_fma(n, vf_set1(2.12194440e-4f), r);
  vf p = vf_set1(1.9875691500e-4f);
  p = vf_fma(p, r, vf_set1(1.3981999507e-3f));
  p = vf_fma(p, r, vf_set1(8.3334519073e-3f));
  p = vf_fma(p, r, vf_set1(4.1665795894e-2f));
  p = vf_fma(p, r, vf_set1(1.6666665459e-1f));
  p = vf_fma(p, r, vf_set1(5.0000001201e-1f));
  p = vf_fma(p, vf_mul(r, r), vf_add(r, vf_set1(1.0f)));
  return vf_scale2(p, n);
}

TD_INLINE float vf_sum(vf a) {
  float sum[4];
  vf_sum4(a, vf_zero(), vf_zero(), vf_zero(), sum);
  return sum[0];
}
