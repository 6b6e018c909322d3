// src/device/cuda/a8.c - products of prompts with activations rounded to E4M3 or INT8.
#include <assert.h>

#include "device/cuda/cuda.h"
#include "model/a8.h"

static_assert((int)TD_CU_A8_BLOCK == (int)TD_A8_BLOCK, "columns of a scale");

enum { PIECE_BYTES = 64 << 20 }; // of codes at a time

static size_t n_blocks_of(uint32_t cols) {
  return (cols + TD_CU_A8_BLOCK - 1) / TD_CU_A8_BLOCK;
}

bool td_cuda_rounds(const td_cuda_dev *dev, const td_weight *w, uint32_t n_prompt) {
  const td_activations a8 = td_weight_a8(w);
  return a8 != TD_ACTIVATIONS_AUTO && a8 == dev->activations && n_prompt > TD_CU_VEC_TOKENS;
}

size_t td_cuda_a8_bytes(size_t n_rows, uint32_t cols) {
  return n_rows * n_blocks_of(cols) * (TD_CU_A8_BLOCK + sizeof(float));
}

td_cuda_a8 td_cuda_a8_at(void *memory, size_t n_rows, uint32_t cols) {
  uint8_t *codes = memory;
  return (td_cuda_a8){codes,
                      (float *)(void *)(codes + n_rows * n_blocks_of(cols) * TD_CU_A8_BLOCK)};
}

// Tokens that are rounded at a time: whole tiles.
static uint32_t piece_tokens(uint32_t cols) {
  const size_t n = PIECE_BYTES / (n_blocks_of(cols) * TD_CU_A8_BLOCK) / TD_CU_A8_TOKENS;
  return n < 1 ? TD_CU_A8_TOKENS : (uint32_t)n * TD_CU_A8_TOKENS;
}

td_status td_cuda_launch_a8(td_cuda_stream *stream, const td_cu_linear_args *args, td_err *err) {
  return td_cuda_dev_of(stream)->uses.a8 ? TD_CUDA_LAUNCH(stream, linear_a8_wgmma, args)
                                         : TD_CUDA_LAUNCH(stream, linear_a8, args);
}

// Tokens [token, token + n) of a matmul.
static td_status run_piece(td_cuda_stream *stream, const td_cuda_matmul *m, const td_cuda_a8 *x,
                           uint32_t token, uint32_t n, td_err *err) {
  const uint32_t tile = td_cuda_tile_tokens(CUDA_GEMM_A8, n);
  const size_t y_bytes = m->y_f32 ? sizeof(float) : sizeof(uint16_t);
  const td_cu_linear_args args = {
      .w = *m->w,
      .n_matrices = 1,
      .x8 = x->codes,
      .x8_scale = x->scales,
      .y = (char *)m->y + token * m->y_stride * y_bytes,
      .bias = m->bias,
      .y_stride = m->y_stride,
      .n_tokens = n,
      .row0 = m->row0,
      .n_rows = m->n_rows,
      .tile_tokens = tile,
      .n_at_once = (n + tile - 1) / tile,
      .y_f32 = m->y_f32,
  };
  return td_cuda_launch_a8(stream, &args, err);
}

td_status td_cuda_run_a8(td_cuda_stream *stream, const td_cuda_matmul *m, uint32_t n_matmuls,
                         td_err *err) {
  const uint32_t cols = m->w->cols, most = piece_tokens(cols);
  for (uint32_t token = 0, n; token < m->n_tokens; token += n) {
    n = m->n_tokens - token < most ? m->n_tokens - token : most;
    td_status status = TD_OK;
    void *memory = td_cuda_scratch(stream, CUDA_SCRATCH_A8, td_cuda_a8_bytes(n, cols), &status,
                                   err);
    if (status != TD_OK) return status;
    const td_cuda_a8 x = td_cuda_a8_at(memory, n, cols);
    const td_cu_round_a8_args args = {.x = (const uint16_t *)m->x + token * m->x_stride,
                                      .codes = x.codes,
                                      .scales = x.scales,
                                      .x_stride = m->x_stride,
                                      .n_rows = n,
                                      .cols = cols,
                                      .dtype = m->w->dtype};
    status = TD_CUDA_LAUNCH(stream, round_a8, &args);
    for (uint32_t i = 0; i < n_matmuls && status == TD_OK; i++)
      status = run_piece(stream, &m[i], &x, token, n, err);
    if (status != TD_OK) return status;
  }
  return TD_OK;
}
