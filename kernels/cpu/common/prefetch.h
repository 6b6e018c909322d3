// kernels/cpu/common/prefetch.h - software prefetch distances for rows of weights.
#pragma once

#include <stdint.h>

// Distance in bytes from use to prefetch into L2: for one token, and (except in avx512bf16) for
// more tokens, which take longer. Distance into L1: an eighth of it. The hardware prefetcher stops
// at page ends.
enum { PREFETCH_GEMV_BYTES = 8192, AHEAD_MORE = 4096 };

// A distance expressed as rows of a panel and columns.
typedef struct {
  uint32_t rows, cols;
} distance;
