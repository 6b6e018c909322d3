// kernels/cpu/common/prefetch.h - software prefetch distances for rows of weights.
#pragma once

#include <stdint.h>

// Distance in bytes from use to prefetch into L2: for one token, and (except in avx512bf16) for
// more tokens, which take longer. Distance into L1: an eighth of it. The hardware prefetcher stops
// at page ends.
enum { PREFETCH_GEMV_BYTES = 8192, AHEAD_MORE = 4096 };

// The address of a row's column, the bytes of n columns and the columns of n bytes, unless columns
// are in blocks, whose header defines them for whole blocks.
#ifndef COLUMN_AT
#define COLUMN_AT(row, k) ((row) + (k))
#define COLUMNS_BYTES(n)  ((n) * sizeof(elem))
#define BYTES_COLUMNS(n)  ((n) / (uint32_t)sizeof(elem))
#endif

// A distance expressed as rows of a panel and columns.
typedef struct {
  uint32_t rows, cols;
} distance;
