// kernels/cpu/common/finite_range.h - whether a token's scaled activations stay well within the
// range of FP32. Include after a vec.h.
#pragma once

#include <math.h>
#include <stdbool.h>

#include "kernels/cpu/common/numeric.h"
#include "kernels/cpu/common/vec_math.h"

// Smallest and largest magnitude of scaled activations; ignores NaN and activations that are 0
// before scaling.
typedef struct {
  vf least, most;
} x_range;

TD_INLINE x_range empty_range(void) {
  return (x_range){vf_set1(INFINITY), vf_zero()};
}

// Extends the range by v, which is x times a scale.
TD_INLINE x_range range_with(x_range r, vf v, vf x) {
  return (x_range){vf_min_abs(r.least, v, x), vf_max_abs(r.most, v)};
}

TD_INLINE x_range both_ranges(x_range a, x_range b) {
  return (x_range){vf_min(a.least, b.least), vf_max(a.most, b.most)};
}

// Within these limits products with FP8 and 4-bit weights are normal numbers, and their sums
// finite.
#define X_LEAST 0x1p-100f
#define X_MOST  0x1p100f

static inline bool range_within(x_range range, float least, float most) {
  return -vf_max_all(vf_sub(vf_zero(), range.least)) >= least && vf_max_all(range.most) < most;
}
