// kernels/cpu/common/prefetch.h - how far ahead of their use rows of weights are fetched.
#ifndef KERNELS_CPU_AHEAD_H
#define KERNELS_CPU_AHEAD_H

#include <stdint.h>

// Bytes of a row from what is used to what is fetched into L2, of one token and, elsewhere than
// with avx512bf16, of more, which take longer; into L1 an eighth of that. The processor's own
// prefetch loses each row at a page's end.
enum { PREFETCH_GEMV_BYTES = 8192, AHEAD_MORE = 4096 };

// Such bytes as rows of a panel and columns.
typedef struct {
  uint32_t rows, cols;
} distance;

#endif
