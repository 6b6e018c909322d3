// include/tandem/kernels.h - the CPU kernels and how one version of each is chosen.
// kernels/registry.inc is the only list of kernels. A family is a function type below; its versions
// are named <family>__<isa>. td_kernels_init picks, once, the first listed version whose features
// the machine has; everything afterwards calls through td_kernels().
//
// A linear kernel is batch-invariant: y[t][r] depends, to the last bit, on x[t] and row r alone,
// not on n_tokens or on the row range it was called with. Prefill, chunks, batches and single
// tokens therefore give the same logits on one machine.
#ifndef TANDEM_KERNELS_H
#define TANDEM_KERNELS_H

#include <stdbool.h>
#include <stdint.h>

#include "tandem/types.h"

// y[t][r] = sum_k w[r][k] * x[t][k] for r in [row_begin, row_end), FP32 accumulation.
// Neither x nor y alias; ldx and ldy are row strides in elements.
typedef struct {
  const td_weight *w;
  const float *x; // f32 [n_tokens][ldx], ldx >= w->cols
  float *y;       // f32 [n_tokens][ldy], ldy >= w->rows
  size_t ldx, ldy;
  uint32_t n_tokens;
  uint32_t row_begin, row_end;
} td_linear_args;
typedef void (*td_linear_fn)(const td_linear_args *args);

#endif
