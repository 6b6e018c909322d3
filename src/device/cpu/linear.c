// src/device/cpu/linear.c - y = W x (+ bias): tiles of rows and tokens over the pool.
#include <math.h>

#include "base/clock.h"
#include "base/jitter.h"
#include "device/cpu/cpu.h"

enum {
  TILE_TOKENS = 192, // at most
  SPLIT_ROWS = 256   // a tile: what x is packed for
};

void td_cpu_linear_tile(const td_linear_args *args) {
  td_linear_args a = *args;
  a.x_int8 = a.prompt && td_kernels_rounds_x(a.w);
  td_kernels_linear(a.w, a.prompt)(&a);
}

typedef struct {
  const td_linear_op_args *a;
  uint32_t tile_rows;
  td_gemv_schedule way;
  size_t n_row_tiles;
  uint32_t row_end;
} linear_run;

static void add_bias(const td_linear_op_args *a, const td_linear_args *tile) {
  for (uint32_t t = 0; t < tile->n_tokens; t++) {
    float *y = tile->y + t * tile->ldy;
    for (uint32_t r = tile->row_begin; r < tile->row_end; r++) {
      uint32_t bits = a->bias.dtype == TD_BF16 ? (uint32_t)((const uint16_t *)a->bias.data)[r] << 16
                                               : ((const uint32_t *)a->bias.data)[r];
      union {
        uint32_t u;
        float f;
      } bias = {.u = bits};
      y[r] += bias.f;
    }
  }
}

static void cap_rows(const td_linear_op_args *a, const td_linear_args *tile) {
  for (uint32_t t = 0; t < tile->n_tokens; t++) {
    float *y = tile->y + t * tile->ldy;
    for (uint32_t r = tile->row_begin - tile->y_row0; r < tile->row_end - tile->y_row0; r++)
      y[r] = a->cap * tanhf(y[r] / a->cap);
  }
}

static uint32_t n_tiles_of(uint32_t n_tokens) {
  return (n_tokens + TILE_TOKENS - 1) / TILE_TOKENS;
}

static bool is_split(const td_linear_op_args *a) {
  return a->exact && a->split && a->w->dtype == TD_BF16;
}

static void linear_tile(void *ctx, size_t item, size_t next, unsigned member) {
  (void)member;
  const linear_run *run = ctx;
  const td_linear_op_args *a = run->a;
  uint32_t row = a->row_begin + (uint32_t)(item % run->n_row_tiles) * run->tile_rows;
  uint32_t rows_left = run->row_end - row, i = (uint32_t)(item / run->n_row_tiles);
  uint32_t n_decode = a->n_tokens - a->n_prompt, n_answer_tiles = n_tiles_of(n_decode);
  bool prompt = i >= n_answer_tiles;
  uint32_t n_tokens = prompt ? a->n_prompt : n_decode, n_tiles = n_tiles_of(n_tokens);
  if (prompt) i -= n_answer_tiles;
  uint32_t begin = td_cpu_cut(n_tokens, i, n_tiles), end = td_cpu_cut(n_tokens, i + 1, n_tiles);
  size_t token = (prompt ? n_decode : 0) + begin;
  td_linear_args tile = {
      .w = a->w,
      .x = (const float *)a->x + token * a->x_stride,
      .y = (float *)a->y + token * a->y_stride,
      .ldx = a->x_stride,
      .ldy = a->y_stride,
      .n_tokens = end - begin,
      .row_begin = row,
      .row_end = row + (rows_left < run->tile_rows ? rows_left : run->tile_rows),
      .y_row0 = a->row_begin,
      .prompt = prompt,
      .way = run->way,
  };
  if (next != TD_CPU_NO_ITEM) {
    const uint32_t after = (uint32_t)(next % run->n_row_tiles) * run->tile_rows;
    tile.next = td_cpu_rows_at(a->w, a->row_begin + after);
  }
  if (is_split(a))
    td_kernels()->linear_split(&tile);
  else if (a->exact)
    td_kernels_linear_exact(a->w)(&tile);
  else
    td_cpu_linear_tile(&tile);
  if (a->bias.data) add_bias(a, &tile);
  if (a->cap > 0) cap_rows(a, &tile);
}

static td_cpu_rows linear_rows(const void *ctx, size_t part, size_t matrix) {
  (void)part, (void)matrix;
  const linear_run *run = ctx;
  return td_cpu_rows_of(run->a->w, run->a->row_begin, run->tile_rows,
                        run->row_end - run->a->row_begin);
}

static td_status run_matrix(td_cpu_stream *stream, const td_linear_op_args *a, td_err *err) {
  td_status status = td_cpu_check_weight(a->w, "linear", err);
  if (status == TD_OK) status = td_dev_check_linear(a, err);
  if (status != TD_OK) return status;
  size_t n_token_tiles = n_tiles_of(a->n_tokens - a->n_prompt) + n_tiles_of(a->n_prompt);
  const td_cpu_dev *dev = td_cpu_dev_of(stream);
  const uint32_t first[TD_TUNER_KNOBS] = {
      td_kernels_tile_rows(a->w, a->n_tokens, n_token_tiles, td_thread_pool_size(dev->pool))};
  const td_tuner_kind kind = td_tuner_kind_of(a->w, 0, a->n_tokens, a->n_prompt > 0);
  const bool split = is_split(a); // whose times are not those of the kind
  const td_trial trial = split ? (td_trial){.rows = {SPLIT_ROWS}}
                               : td_cpu_tuner_next(dev->tuner, &kind, first);
  const uint64_t begin_ns = td_clock_ns();
  linear_run run = {
      .a = a, .tile_rows = td_cpu_tile_rows(dev, a->w, trial.rows[0]), .way = trial.way[0]};
  const uint32_t n_rows = a->n_rows ? a->n_rows : a->w->rows;
  run.row_end = a->row_begin + n_rows;
  run.n_row_tiles = (n_rows + run.tile_rows - 1) / run.tile_rows;
  const td_cpu_part part = {.n_matrices = n_token_tiles, .n_tiles = run.n_row_tiles};
  const td_cpu_tiles tiles = {
      .parts = &part, .n_parts = 1, .fn = linear_tile, .rows = linear_rows, .ctx = &run};
  status = td_cpu_parallel_tiles(stream, &tiles, err);
  if (!split)
    td_cpu_tuner_add(dev->tuner, &trial, td_jitter_time(td_clock_ns() - begin_ns), a->n_tokens);
  return status;
}

td_status td_cpu_op_linear(td_cpu_stream *stream, const td_linear_op_args *a, td_err *err) {
  td_status status = run_matrix(stream, a, err);
  for (uint32_t i = 1; status == TD_OK && i <= TD_LINEAR_ALSO; i++) {
    const td_linear_op_args one = td_linear_matrix(a, i);
    if (!one.w) break;
    status = run_matrix(stream, &one, err);
  }
  return status;
}
