// include/tandem/types.h - dtypes and the descriptors of weights as a checkpoint stores them.
#ifndef TANDEM_TYPES_H
#define TANDEM_TYPES_H

#include <stddef.h>
#include <stdint.h>

typedef enum { TD_F32, TD_F16, TD_BF16, TD_F8E4M3, TD_I32 } td_dtype;

// Bytes of one element.
static inline size_t td_dtype_bytes(td_dtype dtype) {
  switch (dtype) {
  case TD_F32: return 4;
  case TD_I32: return 4;
  case TD_F16: return 2;
  case TD_BF16: return 2;
  case TD_F8E4M3: return 1;
  }
  return 0;
}

const char *td_dtype_name(td_dtype dtype);

// A matrix of weights, used exactly as stored: y = W x with W [rows][cols], row-major, dense.
// data is aligned for its dtype only. A zeroed td_weight stands for an absent matrix.
typedef struct {
  const void *data;
  const float *scale; // TD_F8E4M3: f32 [ceil(rows/scale_rows)][ceil(cols/scale_cols)], else NULL
  td_dtype dtype;     // TD_F32, TD_BF16 or TD_F8E4M3
  uint32_t rows, cols;
  uint32_t scale_rows, scale_cols; // block one scale covers, in elements; 0 without scales
} td_weight;

// A vector of weights: norms, biases.
typedef struct {
  const void *data;
  td_dtype dtype; // TD_F32 or TD_BF16
  uint32_t n;
} td_vec;

// Bytes of a matrix with its scales.
static inline size_t td_weight_bytes(const td_weight *w) {
  size_t bytes = (size_t)w->rows * w->cols * td_dtype_bytes(w->dtype);
  if (w->scale) {
    bytes += sizeof(float) * ((w->rows + w->scale_rows - 1) / w->scale_rows) *
             (size_t)((w->cols + w->scale_cols - 1) / w->scale_cols);
  }
  return bytes;
}

#endif
