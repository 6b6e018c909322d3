// tests/unit/test_cuda_ops.c - the CUDA device's operators against naive ones in double, at small
// and ragged shapes, within bounds that follow from the types: a result in BF16 errs by half a unit
// in the last place, a sum of k products in FP32 by at most k units of the sum of their magnitudes.
#include <setjmp.h>

#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>

#include <cmocka.h>

#include "base/bf16.h"
#include "unit/cuda_test.h"
#include "unit/filtered.h"
#include "unit/sanitized.h"

static void test_copy_and_zero(void **state) {
  (void)state;
  CUDA_OPEN(f);
  char in[1000], out[1000];
  for (int i = 0; i < 1000; i++)
    in[i] = (char)i;
  char *memory = cuda_put(&f, in, sizeof in);
  assert_int_equal((uintptr_t)memory % 64, 0);
  td_op_fill_zero(f.stream, memory + 10, 20);
  cuda_get(&f, out, memory, sizeof out);
  for (int i = 0; i < 1000; i++)
    assert_int_equal(out[i], i >= 10 && i < 30 ? 0 : in[i]);
  cuda_close(&f);
}

// In runs of eight, and not; one part and the sum in host memory.
static void check_sum_parts(size_t n) {
  CUDA_OPEN(f);
  td_err err;
  float *parts[3];
  uint16_t *host, *bits = malloc(n * sizeof *bits);
  float *sum = cuda_alloc(&f, n * sizeof *sum);
  assert_int_equal(td_dev_alloc_host(f.dev, (void **)&host, n * sizeof *host, &err), TD_OK);
  for (int p = 0; p < 3; p++)
    parts[p] = ref_floats(&f.rng, n);
  td_op_sum_parts(f.stream, &(td_sum_parts_args){.parts = {cuda_put(&f, parts[0], n * 4)},
                                                 .out = host,
                                                 .n = n,
                                                 .n_parts = 1,
                                                 .f32_parts = 1});
  for (size_t i = 0; i < n; i++)
    bits[i] = td_bf16_of(parts[2][i]);
  td_sum_parts_args args = {
      .parts = {host, cuda_put(&f, parts[1], n * 4), cuda_put(&f, bits, n * 2)},
      .out = sum,
      .n = n,
      .n_parts = 3,
      .f32_parts = 2,
      .out_f32 = true};
  td_op_sum_parts(f.stream, &args);
  args.out = cuda_alloc(&f, n * sizeof *bits);
  args.out_f32 = false;
  td_op_sum_parts(f.stream, &args);
  cuda_get(&f, bits, args.out, n * sizeof *bits);
  float *got = malloc(n * sizeof *got);
  cuda_get(&f, got, sum, n * sizeof *got);
  for (size_t i = 0; i < n; i++) {
    float want = 0;
    for (int p = 0; p < 3; p++)
      want += td_bf16_value(td_bf16_of(parts[p][i]));
    assert_true(got[i] == want && bits[i] == td_bf16_of(want));
  }
  for (int p = 0; p < 3; p++)
    free(parts[p]);
  free(got), free(bits);
  td_dev_free_host(f.dev, host);
  cuda_close(&f);
}

static void test_sum_parts(void **state) {
  (void)state;
  check_sum_parts(1000);
  check_sum_parts(1003);
}

static void check_embed_gather_add(uint32_t dim) {
  enum { TOKENS = 70, VOCAB = 50 };
  CUDA_OPEN(f);
  ref_weight table = ref_make_weight(&f.rng, TD_BF16, VOCAB, dim, 0, 0);
  int32_t ids[TOKENS], rows[] = {TOKENS - 1, 0, 7};
  for (int i = 0; i < TOKENS; i++)
    ids[i] = (int32_t)ref_below(&f.rng, VOCAB);
  float *y = cuda_floats(&f, TOKENS * dim);
  uint16_t *x = cuda_alloc(&f, TOKENS * dim * sizeof *x);
  uint16_t *few = cuda_alloc(&f, 3 * dim * sizeof *few);
  td_op_embed(f.stream, &(td_embed_args){&table.w, cuda_put(&f, ids, sizeof ids), x, TOKENS});
  td_op_gather_rows(f.stream, few, x, cuda_put(&f, rows, sizeof rows), 3, dim);
  td_op_add(f.stream, x, cuda_put_bf16(&f, y, TOKENS * dim), TOKENS * dim);
  float *sums = cuda_get_bf16(&f, x, TOKENS * dim), *gathered = cuda_get_bf16(&f, few, 3 * dim);
  for (size_t i = 0; i < TOKENS * dim; i++) {
    double want = ref_at(&table.w, (uint32_t)ids[i / dim], i % dim) + y[i];
    cuda_assert_within(sums[i], want, fabs(want) * ULP_BF16 / 2, "sum", i);
  }
  for (size_t i = 0; i < 3 * dim; i++)
    assert_true(gathered[i] == ref_at(&table.w, (uint32_t)ids[rows[i / dim]], i % dim));
  free(y);
  free(sums);
  free(gathered);
  ref_free_weight(&table);
  cuda_close(&f);
}

// Rows that runs of eight make, and that they do not.
static void test_embed_gather_add(void **state) {
  (void)state;
  check_embed_gather_add(33);
  check_embed_gather_add(40);
}

// x[i] / rms(x) * w[i] of a row.
static void check_norm(const float *x, const float *w, const float *got, size_t dim, double eps) {
  double sum = 0;
  for (size_t d = 0; d < dim; d++)
    sum += (double)x[d] * x[d];
  for (size_t d = 0; d < dim; d++) {
    double want = x[d] / sqrt(sum / (double)dim + eps) * w[d];
    double slack = fabs(want) * (ULP_BF16 / 2 + (double)(dim + 4) * ULP_F32);
    cuda_assert_within(got[d], want, slack, "norm", d);
  }
}

static void check_rmsnorm(uint32_t dim) {
  enum { ROWS = 9 };
  const uint32_t stride = dim % 8 ? dim + 99 : dim + 104;
  CUDA_OPEN(f);
  float *x = cuda_floats(&f, ROWS * stride), *before = cuda_floats(&f, ROWS * dim);
  float *w = ref_floats(&f.rng, dim);
  uint16_t *residual = cuda_put_bf16(&f, before, ROWS * dim);
  uint16_t *out = cuda_alloc(&f, ROWS * dim * sizeof *out);
  td_op_rmsnorm(f.stream, &(td_rmsnorm_args){.x = cuda_put_bf16(&f, x, ROWS * stride),
                                             .residual = residual,
                                             .w = {w, TD_F32, dim},
                                             .out = out,
                                             .x_stride = stride,
                                             .out_stride = dim,
                                             .n_rows = ROWS,
                                             .dim = dim,
                                             .eps = 1e-3f});
  float *sum = cuda_get_bf16(&f, residual, ROWS * dim), *got = cuda_get_bf16(&f, out, ROWS * dim);
  for (size_t i = 0; i < ROWS * dim; i++) {
    double want = (double)before[i] + x[i / dim * stride + i % dim];
    cuda_assert_within(sum[i], want, fabs(want) * ULP_BF16 / 2, "residual", i);
  }
  for (size_t i = 0; i < ROWS; i++)
    check_norm(sum + i * dim, w, got + i * dim, dim, 1e-3);
  // heads of 24, in place, BF16 weights
  enum { HEAD = 24 };
  uint16_t wb[HEAD];
  for (int d = 0; d < HEAD; d++) {
    wb[d] = ref_to_bf16(w[d]);
    w[d] = (float)ref_bf16(wb[d]);
  }
  td_op_rmsnorm(f.stream, &(td_rmsnorm_args){.x = out,
                                             .w = {wb, TD_BF16, HEAD},
                                             .out = out,
                                             .x_stride = HEAD,
                                             .out_stride = HEAD,
                                             .n_rows = 100,
                                             .dim = HEAD,
                                             .eps = 1e-6f});
  float *again = cuda_get_bf16(&f, out, ROWS * dim);
  for (size_t i = 0; i < 100; i++)
    check_norm(got + i * HEAD, w, again + i * HEAD, HEAD, 1e-6);
  assert_memory_equal(again + 100 * HEAD, got + 100 * HEAD,
                      (ROWS * dim - 100 * HEAD) * sizeof *got);
  free(x);
  free(before);
  free(w);
  free(sum);
  free(got);
  free(again);
  cuda_close(&f);
}

// Rows of any length, and of runs of eight, short and long.
static void test_rmsnorm(void **state) {
  (void)state;
  check_rmsnorm(501);
  check_rmsnorm(512 + 5 * 8);
  check_rmsnorm(1024 + 21 * 8);
}

typedef struct {
  uint32_t rows, cols, n_tokens, group;
  bool out_f32, no_bias; // a bias is not for cuBLAS
} linear_case;

// Where weights go through cuBLAS, or are read value by value and a scale changes within a tensor
// core's step of 32 columns, they may be rounded once more; elsewhere products are exact.
static void check_linear(cuda_fixture *f, const ref_format *format, const linear_case *c) {
  uint32_t n = c->n_tokens, rows = c->rows, cols = c->cols;
  size_t ldx = cols + 8, ldy = rows + 5;
  ref_weight w = ref_make_format(&f->rng, format, rows, cols, 128, c->group);
  if (c->no_bias) ldy = (ldy + 7) / 8 * 8;
  float *x = cuda_floats(f, n * ldx), *bias = ref_floats(&f->rng, rows);
  for (uint32_t r = 0; c->no_bias && r < rows; r++)
    bias[r] = 0;
  size_t y_bytes = n * ldy * (c->out_f32 ? sizeof(float) : sizeof(uint16_t));
  void *y = cuda_alloc(f, y_bytes);
  td_op_linear(f->stream, &(td_linear_op_args){.w = &w.w,
                                               .bias = {c->no_bias ? NULL : bias, TD_F32, rows},
                                               .x = cuda_put_bf16(f, x, n * ldx),
                                               .y = y,
                                               .x_stride = ldx,
                                               .y_stride = ldy,
                                               .n_tokens = n,
                                               .out_f32 = c->out_f32});
  float *got = c->out_f32 ? malloc(y_bytes) : cuda_get_bf16(f, y, n * ldy);
  if (c->out_f32) cuda_get(f, got, y, y_bytes);
  double out_ulp = c->out_f32 ? ULP_F32 : ULP_BF16 / 2;
  td_weight in_rows = w.w;
  in_rows.layout = TD_LAYOUT_ROWS; // as they are on the GPU
  in_rows.zero_add = 0;
  bool is_any = td_cuda_read_of(&in_rows, true) == TD_CU_READ_ANY;
  bool is_rounded = w.w.scale && n > 64 &&
                    ((c->no_bias && n >= 65) || (is_any && c->group % 32 != 0));
  double weight_ulp = is_rounded ? ULP_BF16 / 2 : 0;
  double *row = ref_doubles(cols);
  for (size_t i = 0; i < (size_t)n * rows; i++) {
    size_t r = i / n, t = i % n;
    for (uint32_t k = 0; t == 0 && k < cols; k++)
      row[k] = ref_at(&w.w, (uint32_t)r, k);
    double want = bias[r], magnitude = fabs((double)bias[r]);
    for (uint32_t k = 0; k < cols; k++) {
      want += row[k] * x[t * ldx + k];
      magnitude += fabs(row[k] * x[t * ldx + k]);
    }
    double slack = fabs(want) * out_ulp + magnitude * (weight_ulp + (cols + 4) * ULP_F32);
    cuda_assert_within(got[t * ldy + r], want, slack, format->family, i);
  }
  free(row);
  free(x);
  free(bias);
  free(got);
  ref_free_weight(&w);
}

static void test_linear(void **state) {
  (void)state;
  static const linear_case cases[] = {
      {67, 33, 1, 32, false, false},   {40, 136, 3, 128, true, false},
      {72, 200, 16, 40, false, false}, {136, 264, 70, 64, true, false},
      {64, 72, 130, 24, false, false}, {8, 8, 17, 8, false, false},
      {24, 40, 17, 8, true, true},     {16, 72, 260, 24, false, true},
      {24, 2664, 1, 64, true, false},  {8, 1640, 9, 32, true, false}, // many chunks, and a few
      {16, 2048, 5, 16, true, false},  {40, 768, 12, 256, false, false},
      {16, 2568, 2, 128, true, false}, {72, 1288, 16, 16, true, false},
      {72, 648, 70, 128, true, false}, {67, 152, 33, 16, true, false},
      {64, 520, 20, 256, true, false}, {16, 264, 257, 128, false, true},
      {64, 200, 40, 32, true, false},  {24, 2592, 3, 128, true, false},
      {8, 1056, 16, 128, true, false}, {8, 1056, 4, 32, true, false},
      {40, 300, 20, 96, true, false},  {16, 72, 2, 100, false, false},   // a group is a whole row
      {24, 1024, 3, 32, true, false},  {24, 1024, 10, 128, true, false}, // scales loaded at once
      {24, 1024, 3, 64, true, false},  {24, 1024, 3, 256, true, false},  // and not
      {40, 264, 64, 128, true, true},  {24, 136, 65, 128, true, true},   // where ways part
      {24, 136, 95, 64, true, true},   {24, 136, 96, 128, true, true},
  };
  for (size_t i = 0; i < TD_COUNT(ref_formats) * TD_COUNT(cases); i++) {
    const ref_format *format = &ref_formats[i / TD_COUNT(cases)];
    const linear_case *c = &cases[i % TD_COUNT(cases)];
    if (format->layout == TD_LAYOUT_AWQ && c->rows % 8 != 0) continue;
    if (IS_ASAN && (i / TD_COUNT(cases) + i) % 4 != 0) continue; // every case, of some formats
    CUDA_OPEN(f); // each its own: a device knows weights by their address
    check_linear(&f, format, c);
    cuda_close(&f);
  }
}

// Every E4M3 code alone in a row, NaN included.
static void test_e4m3_codes(void **state) {
  (void)state;
  enum { ROWS = 256, COLS = 16 };
  CUDA_OPEN(f);
  static const float scale = 1;
  uint8_t codes[ROWS][COLS] = {{0}};
  for (uint32_t r = 0; r < ROWS; r++)
    codes[r][r % COLS] = (uint8_t)r;
  const td_weight w = {.dtype = TD_F8E4M3,
                       .rows = ROWS,
                       .cols = COLS,
                       .data = codes,
                       .scale = &scale,
                       .scale_dtype = TD_F32,
                       .scale_rows = ROWS,
                       .scale_cols = COLS};
  float ones[COLS], got[ROWS];
  for (int k = 0; k < COLS; k++)
    ones[k] = 1;
  float *y = cuda_alloc(&f, sizeof got);
  td_op_linear(f.stream, &(td_linear_op_args){.w = &w,
                                              .x = cuda_put_bf16(&f, ones, COLS),
                                              .y = y,
                                              .x_stride = COLS,
                                              .y_stride = ROWS,
                                              .n_tokens = 1,
                                              .out_f32 = true});
  cuda_get(&f, got, y, sizeof got);
  for (uint32_t r = 0; r < ROWS; r++) {
    double want = ref_at(&w, r, r % COLS);
    if (isnan(want) ? !isnan(got[r]) : got[r] != (float)want)
      fail_msg("code %#x is %g, should be %g", r, (double)got[r], want);
  }
  cuda_close(&f);
}

// Every E2M1 code times every scale from one code to another, NaN included; a row has a scale, and
// a token a column.
static void check_e2m1(td_dtype scale_dtype, uint32_t group, uint32_t first, uint32_t last) {
  enum { COLS = 32, TOKENS = 16, MOST_ROWS = 256 };
  CUDA_OPEN(f);
  const uint32_t rows = last - first + 1;
  static uint8_t codes[MOST_ROWS][COLS / 2], scales[MOST_ROWS * 2];
  for (uint32_t r = 0; r < rows; r++) {
    for (uint32_t k = 0; k < COLS / 2; k++)
      codes[r][k] = (uint8_t)(2 * k % 16 | (2 * k + 1) % 16 << 4);
    for (uint32_t i = 0; i < COLS / group; i++)
      scales[r * (COLS / group) + i] = (uint8_t)(first + r);
  }
  const td_weight w = {.dtype = TD_F4E2M1,
                       .rows = rows,
                       .cols = COLS,
                       .data = codes,
                       .scale = scales,
                       .scale_dtype = scale_dtype,
                       .scale_rows = 1,
                       .scale_cols = group,
                       .global_scale = 1};
  float *y = cuda_alloc(&f, TOKENS * rows * sizeof *y), *got = malloc(TOKENS * rows * sizeof *got);
  for (uint32_t half = 0; half < COLS; half += TOKENS) {
    float x[TOKENS][COLS] = {{0}};
    for (uint32_t t = 0; t < TOKENS; t++)
      x[t][half + t] = 1;
    td_op_linear(f.stream, &(td_linear_op_args){.w = &w,
                                                .x = cuda_put_bf16(&f, x[0], TOKENS * COLS),
                                                .y = y,
                                                .x_stride = COLS,
                                                .y_stride = rows,
                                                .n_tokens = TOKENS,
                                                .out_f32 = true});
    cuda_get(&f, got, y, TOKENS * rows * sizeof *got);
    for (uint32_t i = 0; i < TOKENS * rows; i++) {
      double want = ref_at(&w, i % rows, half + i / rows);
      if (isnan(want) ? !isnan(got[i]) : got[i] != (float)want)
        fail_msg("column %u times scale %#x is %g, should be %g", half + i / rows, first + i % rows,
                 (double)got[i], want);
    }
  }
  free(got);
  cuda_close(&f);
}

static void test_e2m1_codes_and_scales(void **state) {
  (void)state;
  check_e2m1(TD_F8E4M3, 16, 0, 255);
  check_e2m1(TD_F8E8M0, 32, 34, 160); // what MXFP4's kernels take
  check_e2m1(TD_F8E8M0, 32, 33, 160); // and others must
  check_e2m1(TD_F8E8M0, 32, 34, 161);
  check_e2m1(TD_F8E8M0, 32, 0, 252); // 6 times the next is infinite
}

// Where cuBLAS is not installed, the kernels do it.
static void test_linear_without_blas(void **state) {
  (void)state;
  static const linear_case plain = {8, 40, 260, 8, true, true};
  setenv("TANDEM_EMU_BLAS", "0", 1); // a GPU's library does not look at it
  for (size_t i = 0; i < 3; i++) {
    CUDA_OPEN(f);
    check_linear(&f, &ref_formats[i], &plain);
    cuda_close(&f);
  }
  unsetenv("TANDEM_EMU_BLAS");
}

// A token's row is the same to the last bit with any neighbours, up to 64 tokens and beyond.
static void test_linear_alone_and_in_company(void **state) {
  (void)state;
  enum { TOKENS = 100, ROWS = 72, COLS = 128 };
  CUDA_OPEN(f);
  ref_weight w = ref_make_weight(&f.rng, TD_F8E4M3, ROWS, COLS, 128, 128);
  float *values = cuda_floats(&f, TOKENS * COLS);
  uint16_t *x = cuda_put_bf16(&f, values, TOKENS * COLS);
  float *y = cuda_alloc(&f, TOKENS * ROWS * sizeof *y);
  float got[2][ROWS];
  static const uint32_t sizes[][2] = {{1, 16}, {3, 16}, {1, 64}, {17, 64}, {65, 95}, {70, 80}};
  for (size_t i = 0; i < TD_COUNT(sizes); i++) {
    for (int j = 0; j < 2; j++) {
      td_op_linear(f.stream, &(td_linear_op_args){.w = &w.w,
                                                  .x = x,
                                                  .y = y,
                                                  .x_stride = COLS,
                                                  .y_stride = ROWS,
                                                  .n_tokens = sizes[i][j],
                                                  .out_f32 = true});
      cuda_get(&f, got[j], y + (sizes[i][0] - 1) * ROWS, sizeof got[j]);
    }
    assert_memory_equal(got[0], got[1], sizeof got[0]);
  }
  free(values);
  ref_free_weight(&w);
  cuda_close(&f);
}

static void check_rope(uint32_t rot) {
  enum { TOKENS = 9, HEADS = 3, OFFSET = 8, MAX = 40 };
  const uint32_t dim = OFFSET + rot, n = TOKENS * HEADS * dim;
  CUDA_OPEN(f);
  float *table = ref_floats(&f.rng, MAX * rot);
  float *cos_sin = cuda_put(&f, table, MAX * rot * sizeof *table);
  int32_t position[TOKENS];
  for (int t = 0; t < TOKENS; t++)
    position[t] = (int32_t)ref_below(&f.rng, MAX);
  int32_t *positions = cuda_put(&f, position, sizeof position);
  for (int interleaved = 0; interleaved < 2; interleaved++) {
    float *before = cuda_floats(&f, n);
    uint16_t *x = cuda_put_bf16(&f, before, n);
    td_op_rope(f.stream, &(td_rope_args){.x = x + OFFSET,
                                         .cos_sin = cos_sin,
                                         .position = positions,
                                         .token_stride = HEADS * dim,
                                         .head_stride = dim,
                                         .n_tokens = TOKENS,
                                         .n_heads = HEADS,
                                         .rot_dim = rot,
                                         .interleaved = interleaved});
    float *got = cuda_get_bf16(&f, x, n);
    for (size_t row = 0; row < TOKENS * HEADS; row++) {
      const float *cs = table + (size_t)position[row / HEADS] * rot;
      for (size_t d = 0; d < OFFSET; d++)
        assert_true(got[row * dim + d] == before[row * dim + d]);
      for (size_t i = 0; i < rot / 2; i++) {
        size_t a = row * dim + OFFSET + (interleaved ? 2 * i : i);
        size_t b = interleaved ? a + 1 : a + rot / 2;
        double c = cs[2 * i], s = cs[2 * i + 1], u = before[a], v = before[b];
        double slack = (fabs(u) + fabs(v)) * 4 * ULP_F32;
        double first = u * c - v * s, second = v * c + u * s;
        cuda_assert_within(got[a], first, fabs(first) * ULP_BF16 / 2 + slack, "rope", a);
        cuda_assert_within(got[b], second, fabs(second) * ULP_BF16 / 2 + slack, "rope", b);
      }
    }
    free(before);
    free(got);
  }
  free(table);
  cuda_close(&f);
}

static void test_rope(void **state) {
  (void)state;
  check_rope(12);
  check_rope(32); // runs of eight pairs
}

static void test_scale_rows(void **state) {
  (void)state;
  enum { TOKENS = 9, DIM = 70, MAX = 40, N = TOKENS * DIM };
  CUDA_OPEN(f);
  float *factor = ref_floats(&f.rng, MAX), *before = cuda_floats(&f, N);
  int32_t position[TOKENS];
  for (int t = 0; t < TOKENS; t++)
    position[t] = (int32_t)ref_below(&f.rng, MAX);
  uint16_t *x = cuda_put_bf16(&f, before, N);
  td_op_scale_rows(f.stream,
                   &(td_scale_rows_args){.x = x,
                                         .factor = cuda_put(&f, factor, MAX * sizeof *factor),
                                         .position = cuda_put(&f, position, sizeof position),
                                         .n_tokens = TOKENS,
                                         .dim = DIM});
  float *got = cuda_get_bf16(&f, x, N);
  for (uint32_t i = 0; i < N; i++) {
    const double want = (double)before[i] * factor[position[i / DIM]];
    cuda_assert_within(got[i], want, fabs(want) * (ULP_BF16 / 2 + ULP_F32), "scale_rows", i);
  }
  free(factor);
  free(before);
  free(got);
  cuda_close(&f);
}

typedef struct {
  td_router_kind kind;
  uint32_t n_experts, top_k, n_groups, topk_groups;
  bool norm, bias;
} router_case;

// Takes the best of choice, n times over; what is -inf is not there.
static void take(double *choice, uint32_t n, uint32_t k, int32_t *ids) {
  for (uint32_t j = 0; j < k; j++) {
    uint32_t best = 0;
    for (uint32_t e = 1; e < n; e++)
      best = choice[e] > choice[best] ? e : best;
    ids[j] = (int32_t)best;
    choice[best] = -INFINITY;
  }
}

static void drop_groups(const router_case *c, double *choice) {
  uint32_t size = c->n_experts / c->n_groups;
  double group[64];
  int32_t kept[64];
  for (uint32_t g = 0; g < c->n_groups; g++) {
    double first = -INFINITY, second = -INFINITY;
    for (uint32_t i = 0; i < size; i++) {
      double v = choice[g * size + i];
      second = fmax(second, fmin(first, v));
      first = fmax(first, v);
    }
    group[g] = first + second;
  }
  take(group, c->n_groups, c->topk_groups, kept);
  for (uint32_t g = 0; g < c->n_groups; g++) {
    for (uint32_t i = 0; group[g] != -INFINITY && i < size; i++)
      choice[g * size + i] = -INFINITY;
  }
}

static void naive_route(const router_case *c, const float *logits, const float *bias, int32_t *ids,
                        double *weights) {
  double score[512], choice[512], total = 0;
  for (uint32_t e = 0; e < c->n_experts; e++)
    total += exp(logits[e]);
  for (uint32_t e = 0; e < c->n_experts; e++) {
    bool soft = c->kind == TD_ROUTER_SOFTMAX;
    score[e] = soft ? exp(logits[e]) / total : 1 / (1 + exp(-(double)logits[e]));
    choice[e] = score[e] + (c->bias ? bias[e] : 0);
  }
  if (c->n_groups > 1) drop_groups(c, choice);
  take(choice, c->n_experts, c->top_k, ids);
  double sum = 0;
  for (uint32_t j = 0; j < c->top_k; j++)
    sum += score[ids[j]];
  for (uint32_t j = 0; j < c->top_k; j++)
    weights[j] = score[ids[j]] / (c->norm ? sum : 1) * 2.5;
}

static void test_router(void **state) {
  (void)state;
  static const router_case cases[] = {{TD_ROUTER_SOFTMAX, 128, 8, 0, 0, true, false},
                                      {TD_ROUTER_SOFTMAX, 7, 2, 1, 1, false, false},
                                      {TD_ROUTER_SOFTMAX, 12, 4, 3, 2, true, false},
                                      {TD_ROUTER_SIGMOID, 256, 8, 8, 4, true, true},
                                      {TD_ROUTER_SIGMOID, 64, 6, 1, 1, true, true},
                                      {TD_ROUTER_SIGMOID, 12, 4, 3, 1, false, false}};
  enum { TOKENS = 20, MAX_K = 8 };
  CUDA_OPEN(f);
  for (size_t i = 0; i < TD_COUNT(cases); i++) {
    const router_case *c = &cases[i];
    uint32_t n = c->n_experts, k = c->top_k;
    float *logits = ref_floats(&f.rng, TOKENS * n), *bias = ref_floats(&f.rng, n);
    for (size_t j = 0; j < (size_t)TOKENS * n; j++)
      logits[j] *= 4;
    int32_t ids[TOKENS * MAX_K], *dev_ids = cuda_alloc(&f, TOKENS * k * sizeof *ids);
    float weights[TOKENS * MAX_K], *dev_weights = cuda_alloc(&f, TOKENS * k * sizeof *weights);
    td_op_router(f.stream,
                 &(td_router_args){.logits = cuda_put(&f, logits, TOKENS * n * sizeof *logits),
                                   .bias = c->bias ? bias : NULL,
                                   .ids = dev_ids,
                                   .weights = dev_weights,
                                   .kind = c->kind,
                                   .n_tokens = TOKENS,
                                   .n_experts = n,
                                   .top_k = k,
                                   .n_groups = c->n_groups,
                                   .topk_groups = c->topk_groups,
                                   .norm_topk = c->norm,
                                   .scaling = 2.5f});
    cuda_get(&f, ids, dev_ids, TOKENS * k * sizeof *ids);
    cuda_get(&f, weights, dev_weights, TOKENS * k * sizeof *weights);
    for (uint32_t t = 0; t < TOKENS; t++) {
      int32_t want_ids[MAX_K];
      double want[MAX_K];
      naive_route(c, logits + t * n, bias, want_ids, want);
      assert_memory_equal(ids + t * k, want_ids, k * sizeof *ids);
      for (uint32_t j = 0; j < k; j++) {
        double slack = want[j] * (n + 16) * ULP_F32;
        cuda_assert_within(weights[t * k + j], want[j], slack, "router", t * k + j);
      }
    }
    free(logits);
    free(bias);
  }
  cuda_close(&f);
}

// Nor is NaN taken while there is anything else.
static void test_router_ties_go_to_the_lower_index(void **state) {
  (void)state;
  enum { ROWS = 3, N = 64, K = 4 };
  static const int32_t want[ROWS][K] = {{0, 1, 2, 3}, {1, 2, 3, 4}, {0, 1, 2, 3}};
  CUDA_OPEN(f);
  float logits[ROWS][N] = {{0}, {NAN}};
  for (int e = 0; e < N; e++)
    logits[2][e] = NAN;
  int32_t ids[ROWS][K], *dev_ids = cuda_alloc(&f, sizeof ids);
  td_op_router(f.stream, &(td_router_args){.logits = cuda_put(&f, logits, sizeof logits),
                                           .ids = dev_ids,
                                           .weights = cuda_alloc(&f, ROWS * K * sizeof(float)),
                                           .kind = TD_ROUTER_SIGMOID,
                                           .n_tokens = ROWS,
                                           .n_experts = N,
                                           .top_k = K,
                                           .n_groups = 4,
                                           .topk_groups = 2,
                                           .scaling = 1});
  cuda_get(&f, ids, dev_ids, sizeof ids);
  assert_memory_equal(ids, want, sizeof ids);
  cuda_close(&f);
}

// Ranks rows on the device and checks each. The rows are f32 [n_rows][n_vocab].
static void check_ranking(const float *logits, uint32_t n_rows, uint32_t n_vocab) {
  enum { MAX_ROWS = 4 };
  static const float temperature[MAX_ROWS] = {0, 0.6f, 1, 2.5f};
  TD_CHECK(n_rows <= MAX_ROWS);
  CUDA_OPEN(f);
  td_top_logits top[MAX_ROWS], *out = cuda_alloc(&f, n_rows * sizeof *out);
  const td_top_logits_args args = {
      .logits = cuda_put(&f, logits, (size_t)n_rows * n_vocab * sizeof *logits),
      .temperature = cuda_put(&f, temperature, sizeof temperature),
      .out = out,
      .n_rows = n_rows,
      .n_vocab = n_vocab};
  td_op_top_logits(f.stream, &args);
  cuda_get(&f, top, out, n_rows * sizeof *out);
  for (uint32_t r = 0; r < n_rows; r++)
    ref_check_top(logits + (size_t)r * n_vocab, n_vocab, temperature[r], &top[r]);
  cuda_close(&f);
}

// More slices than a block has threads; too slow for a sanitizer.
enum { MANY = IS_ASAN ? 20000 : 263000 };

static void test_ranking(void **state) {
  (void)state;
  static const uint32_t sizes[][2] = {{4, 1},    {3, 7},    {2, 64},   {2, 65},
                                      {2, 1023}, {3, 1025}, {2, 5000}, {1, MANY}};
  uint64_t rng = 5;
  for (size_t i = 0; i < TD_COUNT(sizes); i++) {
    uint32_t n = sizes[i][1];
    float *logits = ref_floats(&rng, sizes[i][0] * n), *ties = ref_ties(&rng, sizes[i][0] * n);
    for (size_t j = 0; j < sizes[i][0] * n; j++)
      logits[j] *= 12;
    check_ranking(logits, sizes[i][0], n);
    check_ranking(ties, sizes[i][0], n);
    free(logits);
    free(ties);
  }
}

static void test_ranking_of_no_numbers(void **state) {
  (void)state;
  enum { N = 2100 };
  uint64_t rng = 6;
  float *logits = ref_floats(&rng, 3 * N);
  for (int i = 0; i < N; i += 3)
    logits[i] = i % 2 ? NAN : -INFINITY; // the best are numbers
  for (int i = 0; i < N; i++)
    logits[N + i] = i < 2000 ? -INFINITY : logits[i]; // whole slices without one
  for (int i = 0; i < N; i++)
    logits[2 * N + i] = i % 100 == 7 ? INFINITY : NAN; // fewer numbers than places
  check_ranking(logits, 3, N);
  for (int i = 0; i < N; i++)
    logits[i] = i % 2 ? -NAN : -INFINITY;
  check_ranking(logits, 1, N);
  free(logits);
}

enum { DIM = 72, HIDDEN = 56, EXPERTS = 9, TOP_K = 3, MOE_TOKENS = 90 };
enum { PAIR_BYTES = 2 * HIDDEN + 4 * 2 * HIDDEN }; // scratch memory for a pair, 2 * HIDDEN > DIM

typedef struct {
  ref_weight gate[EXPERTS], up[EXPERTS], down[EXPERTS];
  td_weight g[EXPERTS], u[EXPERTS], d[EXPERTS];
  td_weight on_device[3][EXPERTS];
} experts;

// Groups of one size or, of every other expert, of another, and zero points likewise.
typedef struct {
  ref_format format;
  uint32_t group, other;
  bool other_zeros;
} expert_formats;

static void make_experts(experts *e, uint64_t *rng, const expert_formats *formats) {
  for (int i = 0; i < EXPERTS; i++) {
    ref_format format = formats->format;
    uint32_t n = i % 2 ? formats->other : formats->group;
    if (i % 2) format.zeros = formats->other_zeros;
    e->gate[i] = ref_make_format(rng, &format, HIDDEN, DIM, 32, n);
    e->up[i] = ref_make_format(rng, &format, HIDDEN, DIM, 32, n);
    e->down[i] = ref_make_format(rng, &format, DIM, HIDDEN, 32, n);
    e->g[i] = e->gate[i].w;
    e->u[i] = e->up[i].w;
    e->d[i] = e->down[i].w;
  }
}

static void free_experts(experts *e) {
  for (int i = 0; i < EXPERTS; i++) {
    ref_free_weight(&e->gate[i]);
    ref_free_weight(&e->up[i]);
    ref_free_weight(&e->down[i]);
  }
}

// Adds an expert's weighted result to out, and what it may err by to slack: hidden values are
// rounded to BF16, and computed of sums in FP32 of weights that err by weight_ulp.
static void naive_expert(const experts *e, int idx, const float *x, double weight,
                         double weight_ulp, double *out, double *slack) {
  double h[HIDDEN], h_slack[HIDDEN];
  for (uint32_t r = 0; r < HIDDEN; r++) {
    double g = 0, u = 0, g_size = 0, u_size = 0;
    for (uint32_t k = 0; k < DIM; k++) {
      double a = ref_at(&e->g[idx], r, k) * x[k], b = ref_at(&e->u[idx], r, k) * x[k];
      g += a;
      u += b;
      g_size += fabs(a);
      u_size += fabs(b);
    }
    h[r] = g / (1 + exp(-g)) * u;
    // |silu'| < 1.1, |silu(g)| <= |g|
    double sums = (1.1 * g_size * fabs(u) + fabs(g) * u_size) * ((DIM + 8) * ULP_F32 + weight_ulp);
    h_slack[r] = fabs(h[r]) * ULP_BF16 / 2 + 2 * sums;
  }
  for (uint32_t r = 0; r < DIM; r++) {
    for (uint32_t k = 0; k < HIDDEN; k++) {
      double w = ref_at(&e->d[idx], r, k);
      out[r] += weight * w * h[k];
      slack[r] += fabs(weight * w) *
                  (h_slack[k] + fabs(h[k]) * ((HIDDEN + 8) * ULP_F32 + weight_ulp));
    }
  }
}

static td_weight copied(cuda_fixture *f, const td_weight *w) {
  td_weight copy = *w;
  copy.data = cuda_put(f, w->data, td_weight_data_bytes(w));
  if (w->scale) copy.scale = cuda_put(f, w->scale, td_weight_scale_bytes(w));
  if (w->zero) copy.zero = cuda_put(f, w->zero, td_weight_zero_bytes(w));
  return copy;
}

// Whether the device takes copies of them.
static bool copy_experts(cuda_fixture *f, experts *e) {
  for (int i = 0; i < EXPERTS; i++) {
    if (!td_dev_supports_device_weights(f->dev, &e->g[i])) return false;
    e->on_device[0][i] = copied(f, &e->g[i]);
    e->on_device[1][i] = copied(f, &e->u[i]);
    e->on_device[2][i] = copied(f, &e->d[i]);
  }
  return true;
}

// The same operator as several, over some of the experts each, which are on the device; their sum.
static float *sum_in_groups(cuda_fixture *f, const experts *e, const td_moe_args *whole) {
  enum { GROUP = 4 };
  float *sum = cuda_alloc(f, (size_t)whole->n_tokens * DIM * sizeof *sum);
  td_moe_args args = *whole;
  args.n_routed = EXPERTS;
  args.out = sum;
  args.out_f32 = args.weights_on_device = true;
  for (uint32_t first = 0; first < EXPERTS; first += GROUP) {
    args.first_expert = first;
    args.n_experts = EXPERTS - first < GROUP ? EXPERTS - first : GROUP;
    args.gate = &e->on_device[0][first];
    args.up = &e->on_device[1][first];
    args.down = &e->on_device[2][first];
    args.accumulate = args.same_ids = first > 0;
    td_op_moe(f->stream, &args);
  }
  return sum;
}

typedef enum { ROUTED, IN_GROUPS, DENSE } moe_kind;

static void run_moe(cuda_fixture *f, const experts *e, uint32_t n, moe_kind kind) {
  const bool routed = kind != DENSE;
  size_t n_x = (size_t)n * DIM, n_pairs = (size_t)n * TOP_K;
  float *x = cuda_floats(f, n_x), *before = cuda_floats(f, n_x);
  float *weights = ref_floats(&f->rng, n_pairs);
  int32_t *ids = malloc(n_pairs * sizeof *ids);
  for (size_t i = 0; i < n_pairs; i += TOP_K) { // distinct; expert 8 gets none, expert 0 most
    ids[i] = 0;
    ids[i + 1] = 1 + (int32_t)ref_below(&f->rng, 4);
    ids[i + 2] = 5 + (int32_t)ref_below(&f->rng, 3);
  }
  uint16_t *out = cuda_put_bf16(f, before, n_x);
  const td_moe_args args = {.gate = e->g,
                            .up = e->u,
                            .down = e->d,
                            .x = cuda_put_bf16(f, x, n_x),
                            .ids = routed ? cuda_put(f, ids, n_pairs * sizeof *ids) : NULL,
                            .weights = routed ? cuda_put(f, weights, n_pairs * sizeof *weights)
                                              : NULL,
                            .out = out,
                            .n_tokens = n,
                            .n_experts = routed ? EXPERTS : 1,
                            .top_k = routed ? TOP_K : 1,
                            .accumulate = routed};
  if (kind == IN_GROUPS) {
    td_op_add_f32(f->stream, out, sum_in_groups(f, e, &args), n_x);
  } else {
    td_op_moe(f->stream, &args);
  }
  float *got = cuda_get_bf16(f, out, n_x);
  const bool is_rounded = kind == DENSE && n > 64 && e->g[0].scale; // for cuBLAS
  const double weight_ulp = is_rounded ? ULP_BF16 / 2 : 0;
  for (size_t t = 0; t < n; t++) {
    double want[DIM] = {0}, slack[DIM] = {0};
    for (int d = 0; d < DIM; d++)
      want[d] = routed ? before[t * DIM + d] : 0;
    for (int j = 0; j < (routed ? TOP_K : 1); j++) {
      size_t pair = t * TOP_K + j;
      naive_expert(e, routed ? ids[pair] : 0, x + t * DIM, routed ? weights[pair] : 1, weight_ulp,
                   want, slack);
    }
    for (int d = 0; d < DIM; d++) {
      double bound = (fabs(want[d]) + slack[d]) * ULP_BF16 / 2 + slack[d];
      cuda_assert_within(got[t * DIM + d], want[d], bound, "experts", t * DIM + d);
    }
  }
  free(x);
  free(before);
  free(weights);
  free(ids);
  free(got);
}

// Scales that the kernels of MXFP4 have no room for are widened when they are copied.
static void test_scales_that_are_not_taken(void **state) {
  (void)state;
  CUDA_OPEN(f);
  const ref_format format = {"f4", TD_F4E2M1, TD_F8E8M0, TD_LAYOUT_ROWS, false, 0};
  ref_weight w = ref_make_format(&f.rng, &format, 16, 64, 1, 32);
  memset((void *)w.w.scale, 127, td_weight_scale_bytes(&w.w));
  assert_true(td_dev_supports_device_weights(f.dev, &w.w));
  ((uint8_t *)w.w.scale)[5] = 127 + TD_CU_E8M0_MOST + 1;
  assert_false(td_dev_supports_device_weights(f.dev, &w.w));
  ref_free_weight(&w);
  cuda_close(&f);
}

// With scratch memory for 40 tokens, and without any for one.
static void run_moe_in_passes(cuda_fixture *f, const experts *e) {
  td_cuda_dev *dev = (td_cuda_dev *)f->dev;
  dev->pass_bytes = (size_t)40 * TOP_K * PAIR_BYTES;
  run_moe(f, e, MOE_TOKENS, ROUTED);
  dev->pass_bytes = 1;
  run_moe(f, e, 7, ROUTED);
  run_moe(f, e, 7, DENSE);
}

// How a group's pairs are cut into rounds changes no bit of its sum. All tokens take expert 0, and
// so few the last ones that some rounds have none.
static void check_rounds(cuda_fixture *f, const experts *e) {
  enum { N = MOE_TOKENS * DIM };
  td_cuda_dev *dev = (td_cuda_dev *)f->dev;
  const size_t own = dev->pass_bytes;
  const size_t some[] = {own, 3 * TD_CU_MMA_TOKENS * PAIR_BYTES, 1};
  float *x = cuda_floats(f, N), *weights = ref_floats(&f->rng, MOE_TOKENS * TOP_K);
  int32_t ids[MOE_TOKENS * TOP_K];
  for (int i = 0; i < MOE_TOKENS * TOP_K; i++)
    ids[i] = i % TOP_K == 0 ? 0 : i % TOP_K + 2 * (int32_t)ref_below(&f->rng, 2);
  td_moe_args args = {.x = cuda_put_bf16(f, x, N),
                      .ids = cuda_put(f, ids, sizeof ids),
                      .weights = cuda_put(f, weights, MOE_TOKENS * TOP_K * sizeof *weights),
                      .n_tokens = MOE_TOKENS,
                      .top_k = TOP_K};
  float *first = NULL;
  for (size_t i = 0; i < TD_COUNT(some); i++) {
    dev->pass_bytes = some[i];
    float *got = malloc(N * sizeof *got);
    cuda_get(f, got, sum_in_groups(f, e, &args), N * sizeof *got);
    if (first) assert_memory_equal(got, first, N * sizeof *got);
    if (!first) {
      first = got;
    } else {
      free(got);
    }
  }
  dev->pass_bytes = own;
  free(first);
  free(x);
  free(weights);
}

enum { SLOTS = 5, N_OF_CACHE = 11, CACHE_PAIRS = N_OF_CACHE * TOP_K };

// The experts in slots by pair, others untouched; then the sum with what another device has
// computed. Where neither an expert's matrices nor a token's company change, results do not.
static void run_moe_of_slots(cuda_fixture *f, const experts *e) {
  static const int32_t in_slot[SLOTS] = {4, 1, 8, 0, 3};
  td_weight gate[SLOTS], up[SLOTS], down[SLOTS];
  int32_t slots[EXPERTS], ids[CACHE_PAIRS];
  memset(slots, 0xff, sizeof slots);
  for (int i = 0; i < SLOTS; i++) {
    slots[in_slot[i]] = i;
    gate[i] = e->on_device[0][in_slot[i]];
    up[i] = e->on_device[1][in_slot[i]];
    down[i] = e->on_device[2][in_slot[i]];
  }
  float *x = cuda_floats(f, N_OF_CACHE * DIM), *weights = ref_floats(&f->rng, CACHE_PAIRS);
  float *there = ref_floats(&f->rng, CACHE_PAIRS * DIM);
  for (int i = 0; i < CACHE_PAIRS; i++)
    ids[i] = (int32_t)ref_below(&f->rng, EXPERTS);
  const int32_t *dev_slots = cuda_put(f, slots, sizeof slots);
  float *here = cuda_put(f, there, CACHE_PAIRS * DIM * sizeof *there);
  const td_moe_args args = {.gate = gate,
                            .up = up,
                            .down = down,
                            .x = cuda_put_bf16(f, x, N_OF_CACHE * DIM),
                            .ids = cuda_put(f, ids, sizeof ids),
                            .weights = cuda_put(f, weights, CACHE_PAIRS * sizeof *weights),
                            .out = here,
                            .n_tokens = N_OF_CACHE,
                            .n_experts = EXPERTS,
                            .top_k = TOP_K,
                            .slots = dev_slots,
                            .n_slots = SLOTS,
                            .weights_on_device = true,
                            .out_f32 = true,
                            .by_pair = true};
  td_op_moe(f->stream, &args);
  float *pairs = malloc(CACHE_PAIRS * DIM * sizeof *pairs);
  cuda_get(f, pairs, here, CACHE_PAIRS * DIM * sizeof *pairs);
  uint16_t *out = cuda_alloc(f, N_OF_CACHE * DIM * sizeof *out);
  td_op_moe_join(f->stream,
                 &(td_moe_join_args){.here = here,
                                     .there = cuda_put(f, there, CACHE_PAIRS * DIM * sizeof *there),
                                     .slots = dev_slots,
                                     .ids = args.ids,
                                     .weights = args.weights,
                                     .out = out,
                                     .n_tokens = N_OF_CACHE,
                                     .n_experts = EXPERTS,
                                     .top_k = TOP_K,
                                     .dim = DIM});
  float *got = cuda_get_bf16(f, out, N_OF_CACHE * DIM);
  for (size_t t = 0; t < N_OF_CACHE; t++) {
    double want[DIM] = {0}, slack[DIM] = {0};
    for (size_t pair = t * TOP_K; pair < (t + 1) * TOP_K; pair++) {
      double own[DIM] = {0}, own_slack[DIM] = {0};
      const bool is_here = slots[ids[pair]] >= 0;
      if (is_here) naive_expert(e, ids[pair], x + t * DIM, 1, 0, own, own_slack);
      for (size_t d = 0; d < DIM; d++) {
        const double part = is_here ? own[d] : (double)there[pair * DIM + d];
        cuda_assert_within(pairs[pair * DIM + d], part, own_slack[d], "a pair", pair * DIM + d);
        want[d] += weights[pair] * part;
        slack[d] += fabs(weights[pair]) * own_slack[d] +
                    TOP_K * ULP_F32 * fabs(weights[pair] * part);
      }
    }
    for (size_t d = 0; d < DIM; d++) {
      const double bound = (fabs(want[d]) + slack[d]) * ULP_BF16 / 2 + slack[d];
      cuda_assert_within(got[t * DIM + d], want[d], bound, "experts of slots", t * DIM + d);
    }
  }
  free(x);
  free(weights);
  free(there);
  free(pairs);
  free(got);
}

// ---- experts whose rows of gate and up alternate ------------------------------------------------

enum { PAIRS_DIM = 96, PAIRS_HIDDEN = 64, PAIRS_TOKENS = 90 };

typedef struct {
  ref_weight gate[EXPERTS], down[EXPERTS];
  td_weight g[EXPERTS], d[EXPERTS];
  td_weight on_device[2][EXPERTS];
  float *gate_bias, *down_bias;
  td_moe_args args; // but for tokens and matrices
} paired_experts;

static void make_pairs(paired_experts *e, cuda_fixture *f, const ref_format *format) {
  for (int i = 0; i < EXPERTS; i++) {
    e->gate[i] = ref_make_format(&f->rng, format, 2 * PAIRS_HIDDEN, PAIRS_DIM, 1, 32);
    e->down[i] = ref_make_format(&f->rng, format, PAIRS_DIM, PAIRS_HIDDEN, 1, 32);
    e->g[i] = e->gate[i].w;
    e->d[i] = e->down[i].w;
    e->on_device[0][i] = copied(f, &e->g[i]);
    e->on_device[1][i] = copied(f, &e->d[i]);
  }
  e->gate_bias = ref_floats(&f->rng, (size_t)EXPERTS * 2 * PAIRS_HIDDEN);
  e->down_bias = ref_floats(&f->rng, (size_t)EXPERTS * PAIRS_DIM);
  e->args = (td_moe_args){.gate_bias = e->gate_bias,
                          .down_bias = e->down_bias,
                          .limit = 0.6f, // which values reach on either side
                          .alpha = 1.7f,
                          .pairs = true,
                          .top_k = TOP_K};
}

static void free_pairs(paired_experts *e) {
  for (int i = 0; i < EXPERTS; i++) {
    ref_free_weight(&e->gate[i]);
    ref_free_weight(&e->down[i]);
  }
  free(e->gate_bias);
  free(e->down_bias);
}

// As naive_expert. The derivative of the activation is at most alpha + 1.
static void naive_pairs(const paired_experts *e, int idx, const float *x, double weight,
                        double *out, double *slack) {
  const double limit = e->args.limit, alpha = e->args.alpha;
  const float *gate_bias = e->gate_bias + (size_t)idx * 2 * PAIRS_HIDDEN;
  double h[PAIRS_HIDDEN], h_slack[PAIRS_HIDDEN];
  for (uint32_t r = 0; r < PAIRS_HIDDEN; r++) {
    double v[2], size[2];
    for (uint32_t i = 0; i < 2; i++) {
      v[i] = gate_bias[2 * r + i];
      size[i] = fabs(v[i]);
      for (uint32_t k = 0; k < PAIRS_DIM; k++) {
        const double part = ref_at(&e->g[idx], 2 * r + i, k) * x[k];
        v[i] += part;
        size[i] += fabs(part);
      }
    }
    const double g = fmin(v[0], limit), u = fmax(fmin(v[1], limit), -limit);
    const double active = g / (1 + exp(-alpha * g));
    h[r] = active * (u + 1);
    const double sums = (alpha + 1) * size[0] * (limit + 1) + fabs(active) * size[1];
    h_slack[r] = fabs(h[r]) * ULP_BF16 / 2 + 2 * sums * (PAIRS_DIM + 8) * ULP_F32;
  }
  for (uint32_t r = 0; r < PAIRS_DIM; r++) {
    const double bias = e->down_bias[(size_t)idx * PAIRS_DIM + r];
    out[r] += weight * bias;
    slack[r] += fabs(weight * bias) * 8 * ULP_F32;
    for (uint32_t k = 0; k < PAIRS_HIDDEN; k++) {
      const double w = weight * ref_at(&e->d[idx], r, k);
      out[r] += w * h[k];
      slack[r] += fabs(w) * (h_slack[k] + fabs(h[k]) * (PAIRS_HIDDEN + 8) * ULP_F32);
    }
  }
}

// The sum of all experts, at once or in groups of matrices on the device, in f32.
static float *sum_pairs(cuda_fixture *f, const paired_experts *e, const td_moe_args *all,
                        uint32_t group) {
  const size_t n = (size_t)all->n_tokens * PAIRS_DIM;
  float *sum = cuda_alloc(f, n * sizeof *sum), *got = malloc(n * sizeof *got);
  td_moe_args args = *all;
  args.out = sum;
  args.out_f32 = true;
  for (uint32_t first = 0; first < EXPERTS; first += group) {
    const bool is_part = group < EXPERTS;
    args.gate = is_part ? &e->on_device[0][first] : e->g;
    args.down = is_part ? &e->on_device[1][first] : e->d;
    args.weights_on_device = is_part;
    args.first_expert = first;
    args.n_experts = EXPERTS - first < group ? EXPERTS - first : group;
    args.n_routed = is_part ? EXPERTS : 0;
    args.accumulate = args.same_ids = first > 0;
    td_op_moe(f->stream, &args);
  }
  cuda_get(f, got, sum, n * sizeof *got);
  return got;
}

static void run_pairs(cuda_fixture *f, const paired_experts *e, uint32_t n) {
  float *x = cuda_floats(f, (size_t)n * PAIRS_DIM), *weights = ref_floats(&f->rng, n * TOP_K);
  int32_t ids[PAIRS_TOKENS * TOP_K];
  for (uint32_t i = 0; i < n * TOP_K; i++) // expert 8 gets none, expert 0 most
    ids[i] = i % 3 ? (int32_t)ref_below(&f->rng, EXPERTS - 1) : 0;
  td_moe_args args = e->args;
  args.x = cuda_put_bf16(f, x, (size_t)n * PAIRS_DIM);
  args.ids = cuda_put(f, ids, n * TOP_K * sizeof *ids);
  args.weights = cuda_put(f, weights, n * TOP_K * sizeof *weights);
  args.n_tokens = n;
  static const uint32_t groups[] = {EXPERTS, 4};
  for (size_t i = 0; i < TD_COUNT(groups); i++) {
    float *got = sum_pairs(f, e, &args, groups[i]);
    for (size_t t = 0; t < n; t++) {
      double want[PAIRS_DIM] = {0}, slack[PAIRS_DIM] = {0};
      for (size_t pair = t * TOP_K; pair < (t + 1) * TOP_K; pair++)
        naive_pairs(e, ids[pair], x + t * PAIRS_DIM, weights[pair], want, slack);
      for (size_t d = 0; d < PAIRS_DIM; d++)
        cuda_assert_within(got[t * PAIRS_DIM + d], want[d], slack[d], "pairs", t * PAIRS_DIM + d);
    }
    free(got);
  }
  free(x);
  free(weights);
}

static void test_moe_of_pairs(void **state) {
  (void)state;
  static const ref_format formats[] = {{"bf16", TD_BF16, TD_F32, TD_LAYOUT_ROWS, false, 0},
                                       {"f4", TD_F4E2M1, TD_F8E8M0, TD_LAYOUT_ROWS, false, 0}};
  for (size_t i = 0; i < TD_COUNT(formats); i++) {
    CUDA_OPEN(f);
    paired_experts e;
    make_pairs(&e, &f, &formats[i]);
    run_pairs(&f, &e, 1);
    run_pairs(&f, &e, 7);
    run_pairs(&f, &e, PAIRS_TOKENS);
    ((td_cuda_dev *)f.dev)->pass_bytes = 1; // token by token, or tile by tile
    run_pairs(&f, &e, 7);
    free_pairs(&e);
    cuda_close(&f);
  }
}

static void test_moe_of_slots(void **state) {
  (void)state;
  static const expert_formats formats[] = {
      {{"bf16", TD_BF16, TD_F32, TD_LAYOUT_ROWS, false, 0}, 0, 0, false},
      {{"f8", TD_F8E4M3, TD_F32, TD_LAYOUT_ROWS, false, 0}, 128, 128, false},
      {{"i4", TD_I4, TD_BF16, TD_LAYOUT_ROWS, true, 0}, 32, 32, true}};
  for (size_t i = 0; i < TD_COUNT(formats); i++) {
    CUDA_OPEN(f);
    experts e;
    make_experts(&e, &f.rng, &formats[i]);
    assert_true(copy_experts(&f, &e));
    run_moe_of_slots(&f, &e);
    ((td_cuda_dev *)f.dev)->pass_bytes = 1; // token by token
    run_moe_of_slots(&f, &e);
    free_experts(&e);
    cuda_close(&f);
  }
}

static const td_cu_abi *counted_abi;
static uint32_t n_rounds;

static int count_sum(const td_cu_moe_sum_args *args, td_cu_stream stream) {
  n_rounds++;
  return counted_abi->moe_sum(args, stream);
}

// Queues the group and returns its number of rounds.
static uint32_t rounds_of(cuda_fixture *f, const experts *e, td_moe_args *args, uint32_t first,
                          uint32_t n) {
  const uint32_t before = n_rounds;
  args->first_expert = first;
  args->n_experts = n;
  args->gate = e->on_device[0] + first;
  args->up = e->on_device[1] + first;
  args->down = e->on_device[2] + first;
  args->accumulate = args->same_ids = first > 0;
  td_op_moe(f->stream, args);
  return n_rounds - before;
}

// A group queued when the host has the counts has no rounds beyond its tiles. One queued before has
// rounds for all pairs that it may have, which is at most one for each token and expert. No bit
// depends on that. Here the first two groups have all pairs, the third none.
static void test_rounds_end_with_the_tiles(void **state) {
  (void)state;
  CUDA_OPEN(f);
  enum { N_TOKENS = 400, N_PAIRS = N_TOKENS * TOP_K, N = N_TOKENS * DIM, LEAST_ROUNDS = 10 };
  static const expert_formats format = {
      {"f8", TD_F8E4M3, TD_F32, TD_LAYOUT_ROWS, false, 0}, 128, 128, false};
  experts e;
  make_experts(&e, &f.rng, &format);
  assert_true(copy_experts(&f, &e));
  td_cuda_dev *dev = (td_cuda_dev *)f.dev;
  td_cu_abi abi = *dev->abi;
  counted_abi = dev->abi;
  abi.moe_sum = count_sum;
  dev->abi = &abi;
  dev->pass_bytes = (size_t)2 * TD_CU_MMA_TOKENS * PAIR_BYTES;
  float *x = cuda_floats(&f, N), *weights = ref_floats(&f.rng, N_PAIRS);
  int32_t ids[N_PAIRS];
  for (int i = 0; i < N_PAIRS; i++) // each of three experts is every token's
    ids[i] = i % TOP_K;
  td_moe_args args = {.x = cuda_put_bf16(&f, x, N),
                      .ids = cuda_put(&f, ids, sizeof ids),
                      .weights = cuda_put(&f, weights, N_PAIRS * sizeof *weights),
                      .out = cuda_alloc(&f, N * sizeof(float)),
                      .n_tokens = N_TOKENS,
                      .top_k = TOP_K,
                      .n_routed = EXPERTS,
                      .out_f32 = true,
                      .weights_on_device = true};
  _Atomic uint32_t *gate = NULL;
  const uint32_t open = 1;
  assert_int_equal(td_dev_alloc_host(f.dev, (void **)&gate, sizeof *gate, NULL), TD_OK);
  atomic_store(gate, 0);
  float *early = malloc(N * sizeof *early), *late = malloc(N * sizeof *late);
  td_op_await(f.stream, gate, cuda_put(&f, &open, sizeof open)); // so that no counts arrive
  assert_int_equal(rounds_of(&f, &e, &args, 0, 1), 4);           // one expert of all tokens
  assert_true(rounds_of(&f, &e, &args, 1, 4) >= LEAST_ROUNDS);
  assert_true(rounds_of(&f, &e, &args, 5, 4) >= LEAST_ROUNDS);
  atomic_store(gate, open);
  cuda_get(&f, early, args.out, N * sizeof *early);
  rounds_of(&f, &e, &args, 0, 1);
  cuda_sync(&f);
  const uint32_t n_needed = rounds_of(&f, &e, &args, 1, 4);
  assert_true(n_needed > 1 && n_needed < LEAST_ROUNDS);
  assert_int_equal(rounds_of(&f, &e, &args, 5, 4), 1);
  cuda_get(&f, late, args.out, N * sizeof *late);
  assert_memory_equal(early, late, N * sizeof *early);
  dev->abi = counted_abi;
  td_dev_free_host(f.dev, (void *)gate);
  free_experts(&e);
  free(early);
  free(late);
  free(x);
  free(weights);
  cuda_close(&f);
}

static void test_moe(void **state) {
  (void)state;
  static const expert_formats cases[] = {
      {{"bf16", TD_BF16, TD_F32, TD_LAYOUT_ROWS, false, 0}, 0, 0, false},
      {{"f8", TD_F8E4M3, TD_F32, TD_LAYOUT_ROWS, false, 0}, 128, 128, false},
      {{"i4", TD_I4, TD_BF16, TD_LAYOUT_ROWS, false, 0}, 32, 32, false},
      {{"i4", TD_I4, TD_BF16, TD_LAYOUT_ROWS, false, 0}, 128, 32, false},
      {{"i4", TD_I4, TD_BF16, TD_LAYOUT_ROWS, false, 0}, 32, 32, true},
      {{"i4", TD_I4, TD_BF16, TD_LAYOUT_ROWS, true, 0}, 32, 32, false},
      {{"i4", TD_I4, TD_F16, TD_LAYOUT_AWQ, true, 0}, 32, 32, true},
      {{"f4", TD_F4E2M1, TD_F8E4M3, TD_LAYOUT_ROWS, false, 0}, 16, 16, false},
  };
  static const uint32_t sizes[] = {1, 7, MOE_TOKENS};
  for (size_t i = 0; i < TD_COUNT(cases); i++) {
    CUDA_OPEN(f);
    experts e;
    make_experts(&e, &f.rng, &cases[i]);
    const bool is_copied = copy_experts(&f, &e);
    assert_int_equal(is_copied, cases[i].format.layout == TD_LAYOUT_ROWS);
    for (size_t j = 0; j < TD_COUNT(sizes); j++) {
      if (IS_ASAN && sizes[j] == MOE_TOKENS && i % 3 != 0) continue; // nine tenths of the time
      run_moe(&f, &e, sizes[j], ROUTED);
      run_moe(&f, &e, sizes[j], DENSE);
      if (is_copied) run_moe(&f, &e, sizes[j], IN_GROUPS);
    }
    // Tables: of all experts, of the one of a dense MLP, of each group; however often they are
    // used.
    assert_int_equal(((td_cuda_dev *)f.dev)->n_experts, is_copied ? 5 : 2);
    if (i == 0) {
      run_moe_in_passes(&f, &e);
      check_rounds(&f, &e);
      run_moe(&f, &e, TD_CU_SORT_PAIRS / TOP_K + 30, IN_GROUPS); // sorted by many blocks
    }
    cuda_close(&f);
    free_experts(&e);
  }
}

static void expect_failure(cuda_fixture *f, const char *part) {
  td_err err;
  assert_int_equal(td_stream_sync(f->stream, &err), TD_EINVAL);
  if (!strstr(err.msg, part)) fail_msg("'%s' does not speak of '%s'", err.msg, part);
  td_stream_close(f->stream);
  assert_int_equal(td_stream_open(&f->stream, f->dev, &err), TD_OK);
  cuda_sync(f); // a new stream starts clean
}

static void test_bad_arguments(void **state) {
  (void)state;
  CUDA_OPEN(f);
  ref_weight table = ref_make_weight(&f.rng, TD_BF16, 10, 8, 0, 0);
  uint16_t *x = cuda_alloc(&f, 64 * sizeof *x);
  static const int32_t bad_ids[][2] = {{3, 10}, {-1, 3}};
  for (int i = 0; i < 2; i++) {
    int32_t *ids = cuda_put(&f, bad_ids[i], sizeof bad_ids[i]);
    td_op_embed(f.stream, &(td_embed_args){&table.w, ids, x, 2});
    expect_failure(&f, "token id");
  }
  int32_t *rows = cuda_put(&f, bad_ids[1], sizeof bad_ids[1]);
  td_op_gather_rows(f.stream, x + 32, x, rows, 1, 8);
  expect_failure(&f, "negative");
  td_weight absent = {0};
  td_op_embed(f.stream, &(td_embed_args){&absent, rows, x, 1});
  td_op_fill_zero(f.stream, x, 8);
  expect_failure(&f, "absent");
  float weight = 1;
  td_op_moe(f.stream, &(td_moe_args){.gate = &table.w,
                                     .up = &table.w,
                                     .down = &table.w,
                                     .x = x,
                                     .ids = rows,
                                     .weights = cuda_put(&f, &weight, sizeof weight),
                                     .out = x + 32,
                                     .n_tokens = 1,
                                     .n_experts = 1,
                                     .top_k = 1});
  expect_failure(&f, "shapes");
  td_op_moe(f.stream, &(td_moe_args){.gate = &table.w,
                                     .up = &table.w,
                                     .down = &table.w,
                                     .x = x,
                                     .ids = rows,
                                     .weights = cuda_put(&f, &weight, sizeof weight),
                                     .out = x + 32,
                                     .n_tokens = 1,
                                     .n_experts = 2,
                                     .first_expert = 3,
                                     .n_routed = 4,
                                     .top_k = 1});
  expect_failure(&f, "from expert 3");
  ref_free_weight(&table);
  cuda_close(&f);
}

static void test_an_expert_that_is_none(void **state) {
  (void)state;
  CUDA_OPEN(f);
  experts e;
  make_experts(&e, &f.rng, &(expert_formats){.format = {.dtype = TD_BF16, .scale_dtype = TD_F32}});
  float *x = cuda_floats(&f, DIM), weight = 1;
  int32_t id = EXPERTS;
  const td_moe_args args = {.gate = e.g,
                            .up = e.u,
                            .down = e.d,
                            .x = cuda_put_bf16(&f, x, DIM),
                            .ids = cuda_put(&f, &id, sizeof id),
                            .weights = cuda_put(&f, &weight, sizeof weight),
                            .out = cuda_alloc(&f, DIM * sizeof(uint16_t)),
                            .n_tokens = 1,
                            .n_experts = EXPERTS,
                            .top_k = 1};
  td_op_moe(f.stream, &args);
  expect_failure(&f, "experts");
  td_moe_args some = args; // nor is it one of the others
  some.n_experts = 2;
  some.first_expert = 3;
  some.n_routed = EXPERTS;
  td_op_moe(f.stream, &some);
  expect_failure(&f, "experts");
  free(x);
  cuda_close(&f);
  free_experts(&e);
}

int main(int argc, char **argv) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_copy_and_zero),
      cmocka_unit_test(test_sum_parts),
      cmocka_unit_test(test_embed_gather_add),
      cmocka_unit_test(test_rmsnorm),
      cmocka_unit_test(test_linear),
      cmocka_unit_test(test_e4m3_codes),
      cmocka_unit_test(test_e2m1_codes_and_scales),
      cmocka_unit_test(test_linear_without_blas),
      cmocka_unit_test(test_linear_alone_and_in_company),
      cmocka_unit_test(test_rope),
      cmocka_unit_test(test_scale_rows),
      cmocka_unit_test(test_router),
      cmocka_unit_test(test_router_ties_go_to_the_lower_index),
      cmocka_unit_test(test_ranking),
      cmocka_unit_test(test_ranking_of_no_numbers),
      cmocka_unit_test(test_moe),
      cmocka_unit_test(test_moe_of_pairs),
      cmocka_unit_test(test_moe_of_slots),
      cmocka_unit_test(test_rounds_end_with_the_tiles),
      cmocka_unit_test(test_scales_that_are_not_taken),
      cmocka_unit_test(test_bad_arguments),
      cmocka_unit_test(test_an_expert_that_is_none),
  };
  if (!filter_tests(argc, argv, tests, TD_COUNT(tests))) return 2;
  return cmocka_run_group_tests(tests, NULL, NULL);
}
