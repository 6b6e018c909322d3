// src/device/cuda/blas.c - GEMM through cuBLAS, if installed: weights are converted to BF16 some
// rows at a time.
#include <string.h>

#include "base/log.h"
#include "device/cuda/cuda.h"

static bool is_aligned(const void *p, size_t stride) {
  return (uintptr_t)p % 16 == 0 && stride % 8 == 0;
}

static td_cu_blas blas_of(td_cuda_stream *stream) {
  if (stream->is_blas_tried) return stream->blas;
  stream->is_blas_tried = true;
  td_cuda_settle(td_cuda_dev_of(stream));
  if (td_cuda_dev_of(stream)->abi->blas_open(&stream->blas, stream->cu, td_cuda_blas_symbol,
                                             td_cuda_dev_of(stream)) != 0) {
    stream->blas = NULL;
    td_info("%s: prompts are computed without cuBLAS", stream->base.dev->name);
  }
  return stream->blas;
}

bool td_cuda_takes_blas(td_cuda_stream *stream, const td_cuda_matmul *m) {
  const td_cu_read read = td_cuda_read_of(m->w, is_aligned(m->x, m->x_stride));
  if (td_cuda_dev_of(stream)->uses.f16 && read == TD_CU_READ_F8) return false;
  return td_cuda_use_blas(m->w, m->n_tokens) && !m->bias.data && m->w->cols % 8 == 0 &&
         is_aligned(m->x, m->x_stride) && is_aligned(m->y, m->y_stride) && blas_of(stream);
}

// Rows [row, row + n) of the weights as BF16, converted to scratch if needed.
static td_status as_bf16(td_cuda_stream *stream, const td_weight *w, uint32_t row, uint32_t n,
                         const uint16_t **out, td_err *err) {
  if (w->dtype == TD_BF16) {
    *out = (const uint16_t *)w->data + (size_t)row * w->cols;
    return TD_OK;
  }
  td_status status = TD_OK;
  void *memory = td_cuda_scratch(stream, CUDA_SCRATCH_WEIGHT, (size_t)n * w->cols * sizeof **out,
                                 &status, err);
  *out = memory;
  const td_cu_dequant_args args = {
      .w = *w, .out = memory, .row0 = row, .n_rows = n, .read = td_cuda_read_of(w, true)};
  return status == TD_OK ? TD_CUDA_LAUNCH(stream, dequant, &args) : status;
}

// cuBLAS picks a kernel by the shape, and the driver may wait for the device when it first meets
// it. Of work that is captured, all shapes have been met.
static void settle_shape(td_cuda_stream *stream, const td_cu_gemm_args *args) {
  td_cu_gemm_args shape = *args;
  shape.w = shape.x = NULL;
  shape.y = NULL;
  const uint32_t hash = (shape.n_tokens * 31 + shape.n_rows) * 31 + shape.cols;
  td_cu_gemm_args *met = &stream->shapes[(hash ^ hash >> 6) % N_CUDA_SHAPES];
  if (stream->is_capturing || memcmp(met, &shape, sizeof shape) == 0) return;
  td_cuda_settle(td_cuda_dev_of(stream));
  *met = shape;
}

td_status td_cuda_run_blas(td_cuda_stream *stream, const td_cuda_matmul *m, td_err *err) {
  uint32_t piece = td_cuda_piece_rows(m->w, m->n_rows);
  size_t y_bytes = m->y_f32 ? sizeof(float) : sizeof(uint16_t);
  for (uint32_t done = 0; done < m->n_rows; done += piece) {
    td_cu_gemm_args args = {.x = m->x,
                            .y = (char *)m->y + done * y_bytes,
                            .x_stride = m->x_stride,
                            .y_stride = m->y_stride,
                            .n_tokens = m->n_tokens,
                            .n_rows = m->n_rows - done < piece ? m->n_rows - done : piece,
                            .cols = m->w->cols,
                            .y_f32 = m->y_f32};
    td_status status = as_bf16(stream, m->w, m->row0 + done, args.n_rows, &args.w, err);
    if (status != TD_OK) return status;
    const td_cuda_dev *dev = td_cuda_dev_of(stream);
    settle_shape(stream, &args);
    status = td_cuda_result(dev, dev->abi->blas_gemm(stream->blas, &args), "cuBLAS", err);
    if (status != TD_OK) return status;
  }
  return TD_OK;
}
