// kernels/cpu/avx512bf16/exact_rows.h - results that BF16 products cannot give, again in FP32. For
// gemm_prompt.h and avx512amx/linear_tiles.h, which say what LEAST and linear_exact are.
#pragma once

#include "kernels/cpu/common/finite_range.h"
#include "kernels/decl.h"

// Recomputes some rows of one token in FP32.
static void do_exactly(const td_linear_args *a, uint32_t token, uint32_t row, uint32_t end) {
  td_linear_args one = one_token(a, token, row, end);
  linear_exact(&one);
}

// Recomputes a token's results that are not valid: all of them, or some rows'.
static void end_rows(const td_linear_args *a, uint32_t token, x_range range, const bool *tiny,
                     uint32_t row, uint32_t end) {
  if (!range_within(range, LEAST, 1 / LEAST)) {
    do_exactly(a, token, row, end);
    return;
  }
  if (!memchr(tiny, true, end - row)) return;
  for (uint32_t r = row; r < end; r++) {
    if (tiny[r - row]) do_exactly(a, token, r, r + 1);
  }
}
