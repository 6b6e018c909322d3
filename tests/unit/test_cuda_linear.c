// tests/unit/test_cuda_linear.c - the CUDA device's products with a matrix, of every format,
// against naive ones in double, at small and ragged shapes, within bounds that follow from the
// types: a result in BF16 errs by half a unit in the last place, a sum of k products in FP32 by at
// most k units of the sum of their magnitudes.
// CTest: gpu slow no-tsan

#include "unit/cuda_test.h"
#include "unit/ref_blocks.h"
#include "unit/sanitized.h"

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
  bool is_any = td_cuda_read_of(&w.w, true) == TD_CU_READ_ANY;
  bool is_rounded = w.w.scale && n > 64 &&
                    ((c->no_bias && n >= 65) || (is_any && c->group % 32 != 0));
  double weight_ulp = is_rounded ? ULP_BF16 / 2 : 0;
  if (w.w.dtype == TD_F8E4M3 && n > 64) weight_ulp = fmax(weight_ulp, cuda_f16_error(f, 2));
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

TEST(linear) {
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
    if (IS_ASAN && (i / TD_COUNT(cases) + i) % 4 != 0) continue; // every case, of some formats
    CUDA_OPEN(f); // each its own: a device knows weights by their address
    check_linear(&f, format, c);
    cuda_close(&f);
  }
}

// Some rows of a matrix, whose scales are of blocks that they cut.
TEST(some_rows) {
  enum { ROWS = 290, FIRST = 101, SOME = 70, COLS = 264, STRIDE = 3 * SOME, MOST = 70 };
  static const ref_format format = {"f8", TD_F8E4M3, TD_F32, false};
  CUDA_OPEN(f);
  ref_weight w = ref_make_format(&f.rng, &format, ROWS, COLS, 128, 128);
  float *x = cuda_floats(&f, MOST * COLS);
  static const uint32_t sizes[] = {3, 40, MOST};
  for (size_t s = 0; s < TD_COUNT(sizes); s++) {
    const uint32_t n = sizes[s];
    uint16_t *y = cuda_alloc(&f, (size_t)n * STRIDE * sizeof *y);
    td_op_fill_zero(f.stream, y, (size_t)n * STRIDE * sizeof *y);
    td_op_linear(f.stream, &(td_linear_op_args){.w = &w.w,
                                                .x = cuda_put_bf16(&f, x, (size_t)n * COLS),
                                                .y = y + SOME,
                                                .x_stride = COLS,
                                                .y_stride = STRIDE,
                                                .n_tokens = n,
                                                .row_begin = FIRST,
                                                .n_rows = SOME});
    float *got = cuda_get_bf16(&f, y, (size_t)n * STRIDE);
    for (size_t i = 0; i < (size_t)n * STRIDE; i++) {
      const size_t t = i / STRIDE, r = i % STRIDE - SOME;
      double want = 0, magnitude = 0;
      for (uint32_t k = 0; r < SOME && k < COLS; k++) {
        const double product = ref_at(&w.w, (uint32_t)(FIRST + r), k) * x[t * COLS + k];
        want += product;
        magnitude += fabs(product);
      }
      const double weight_ulp = n > 64 ? ULP_BF16 / 2 : 0; // for cuBLAS
      const double slack = fabs(want) * ULP_BF16 / 2 +
                           magnitude * (weight_ulp + (COLS + 4) * ULP_F32);
      cuda_assert_within(got[i], want, slack, "some rows", i);
    }
    free(got);
  }
  free(x);
  ref_free_weight(&w);
  cuda_close(&f);
}

// GGUF's blocks; of many tokens their values are rounded to BF16. Offsets and codes are summed
// apart.
static void check_blocks(cuda_fixture *f, const ref_block_format *format, uint32_t n,
                         uint32_t cols) {
  enum { ROWS = 19 };
  if (td_dtype_block(format->dtype).cols == 32 && cols > 2000) cols += 160; // no whole chunk
  ref_weight w = ref_make_blocks(&f->rng, format, ROWS, cols);
  float *x = cuda_floats(f, (size_t)n * cols), *got = malloc((size_t)n * ROWS * sizeof *got);
  float *y = cuda_alloc(f, (size_t)n * ROWS * sizeof *y);
  td_op_linear(f->stream, &(td_linear_op_args){.w = &w.w,
                                               .x = cuda_put_bf16(f, x, (size_t)n * cols),
                                               .y = y,
                                               .x_stride = cols,
                                               .y_stride = ROWS,
                                               .n_tokens = n,
                                               .out_f32 = true});
  cuda_get(f, got, y, (size_t)n * ROWS * sizeof *y);
  for (size_t i = 0; i < (size_t)n * ROWS; i++) {
    double want = 0, magnitude = 0;
    for (uint32_t k = 0; k < cols; k++) {
      const double product = ref_block_at(&w.w, (uint32_t)(i % ROWS), k) * x[i / ROWS * cols + k];
      want += product;
      magnitude += fabs(product);
    }
    const double slack = magnitude * ((n > 64 ? ULP_BF16 / 2 : 0) + (cols + 4) * ULP_F32);
    cuda_assert_within(got[i], want, slack, format->family, i);
  }
  free(x);
  free(got);
  ref_free_weight(&w);
}

TEST(blocks) {
  static const struct {
    uint32_t n_tokens, cols;
  } cases[] = {{1, 512}, {20, 512}, {70, 512}, {9, 2304}, {3, 256}};
  for (size_t i = 0; i < TD_COUNT(ref_block_formats) * TD_COUNT(cases); i++) {
    const size_t c = i % TD_COUNT(cases);
    if (IS_ASAN && i % 4 != 0) continue;
    CUDA_OPEN(f);
    check_blocks(&f, &ref_block_formats[i / TD_COUNT(cases)], cases[c].n_tokens, cases[c].cols);
    cuda_close(&f);
  }
}

// Every E4M3 code alone in a row, NaN included.
TEST(e4m3_codes) {
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

TEST(e2m1_codes_and_scales) {
  check_e2m1(TD_F8E4M3, 16, 0, 255);
  check_e2m1(TD_F8E8M0, 32, 34, 160); // what MXFP4's kernels take
  check_e2m1(TD_F8E8M0, 32, 33, 160); // and others must
  check_e2m1(TD_F8E8M0, 32, 34, 161);
  check_e2m1(TD_F8E8M0, 32, 0, 252); // 6 times the next is infinite
}

// Where cuBLAS is not installed, the kernels do it.
TEST(linear_without_blas) {
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
static void check_company(const ref_block_format *format, uint32_t n_sizes) {
  enum { TOKENS = 100, ROWS = 72, COLS = 512 };
  CUDA_OPEN(f);
  ref_weight w = format ? ref_make_blocks(&f.rng, format, ROWS, COLS)
                        : ref_make_weight(&f.rng, TD_F8E4M3, ROWS, COLS, 128, 128);
  float *values = cuda_floats(&f, TOKENS * COLS);
  uint16_t *x = cuda_put_bf16(&f, values, TOKENS * COLS);
  float *y = cuda_alloc(&f, TOKENS * ROWS * sizeof *y);
  float got[2][ROWS];
  static const uint32_t sizes[][2] = {{1, 16},  {3, 16},  {1, 64},  {17, 64},
                                      {65, 95}, {70, 80}, {64, 100}};
  for (size_t i = 0; i < n_sizes; i++) {
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

TEST(linear_alone_and_in_company) {
  check_company(NULL, 7);
  check_company(&ref_block_formats[1], 4); // Q4_K, up to 64 tokens
}

// The same of every format, where tiles of rows are several blocks, with one part of the sum each
// or more, or one; rows and columns end within a tile and a chunk.
static void check_wide(cuda_fixture *f, const ref_format *format, uint32_t n_sms) {
  enum { TOKENS = 64, ROWS = 136, COLS = 1696 };
  static const uint32_t alone[] = {0, 16, 40, TOKENS - 1}, sizes[] = {TOKENS, 17};
  ((td_cuda_dev *)f->dev)->props.n_sms = (int)n_sms;
  ref_weight w = ref_make_format(&f->rng, format, ROWS, COLS, 128, 128 >> n_sms % 2 * 2);
  float *values = cuda_floats(f, TOKENS * COLS),
        *bias = ref_floats(&f->rng, ROWS); // not for cuBLAS
  float want[TD_COUNT(alone)][ROWS], got[ROWS], *y = cuda_alloc(f, TOKENS * ROWS * sizeof *y);
  const uint16_t *x = cuda_put_bf16(f, values, TOKENS * COLS);
  td_linear_op_args args = {.w = &w.w,
                            .bias = {bias, TD_F32, ROWS},
                            .y = y,
                            .x_stride = COLS,
                            .y_stride = ROWS,
                            .out_f32 = true};
  for (size_t i = 0; i < TD_COUNT(alone); i++) {
    args.x = x + alone[i] * COLS;
    args.n_tokens = 1;
    td_op_linear(f->stream, &args);
    cuda_get(f, want[i], y, sizeof got);
  }
  for (size_t i = 0; i < TD_COUNT(sizes) * TD_COUNT(alone); i++) {
    const uint32_t n = sizes[i / TD_COUNT(alone)], t = alone[i % TD_COUNT(alone)];
    args.x = x;
    args.n_tokens = n;
    if (t == 0) td_op_linear(f->stream, &args);
    if (t >= n) continue;
    cuda_get(f, got, y + t * ROWS, sizeof got);
    assert_memory_equal(got, want[i % TD_COUNT(alone)], sizeof got);
  }
  free(values);
  free(bias);
  ref_free_weight(&w);
}

TEST(wide_linear_alone_and_in_company) {
  static const uint32_t n_sms[] = {132, 5, 1};
  for (size_t i = 0; i < TD_COUNT(ref_formats) * TD_COUNT(n_sms); i++) {
    if (i % TD_COUNT(n_sms) != 0 && i % 4 != 0) continue; // those of some formats
    if (IS_ASAN && i % 4 != 0) continue;
    CUDA_OPEN(f);
    check_wide(&f, &ref_formats[i / TD_COUNT(n_sms)], n_sms[i % TD_COUNT(n_sms)]);
    cuda_close(&f);
  }
}

// Scales that the kernels of MXFP4 have no room for are widened when they are copied.
static int (*linear_vec)(const td_cu_linear_args *args, td_cu_stream stream);
static uint32_t n_launches;

static int count_launch(const td_cu_linear_args *args, td_cu_stream stream) {
  n_launches++;
  return linear_vec(args, stream);
}

// Matrices of one input have the bits that each has alone; those of one format are one launch.
TEST(matrices_of_one_input) {
  enum { N = 3, COLS = 264, MOST_ROWS = 67, MOST_TOKENS = 70 };
  static const uint32_t rows[N] = {40, MOST_ROWS, 24}, n_tokens[] = {1, 9, 20, MOST_TOKENS};
  static const struct {
    td_dtype dtype[N];
    uint32_t n_launches; // of few tokens
  } cases[] = {{{TD_F8E4M3, TD_F8E4M3, TD_F8E4M3}, 1},
               {{TD_BF16, TD_F8E4M3, TD_BF16}, 2},
               {{TD_BF16, TD_BF16, TD_F16}, 2}};
  for (size_t i = 0; i < TD_COUNT(cases) * TD_COUNT(n_tokens); i++) {
    const uint32_t n = n_tokens[i % TD_COUNT(n_tokens)];
    CUDA_OPEN(f);
    td_cuda_dev *dev = (td_cuda_dev *)f.dev;
    static td_cu_abi counting;
    counting = *dev->abi;
    linear_vec = counting.linear_vec;
    counting.linear_vec = count_launch;
    dev->abi = &counting;
    dev->props.n_sms = MOST_ROWS; // as many warps for each, on which the bits depend
    ref_weight w[N];
    float *x = cuda_floats(&f, (size_t)n * COLS), *bias = cuda_floats(&f, MOST_ROWS);
    uint16_t *alone[N], *y[N];
    td_linear_op_args all = {
        .x = cuda_put_bf16(&f, x, (size_t)n * COLS), .x_stride = COLS, .n_tokens = n};
    for (uint32_t m = 0; m < N; m++) {
      w[m] = ref_make_weight(&f.rng, cases[i / TD_COUNT(n_tokens)].dtype[m], rows[m], COLS, 128,
                             128);
      y[m] = cuda_alloc(&f, (size_t)n * rows[m] * sizeof **y);
      alone[m] = cuda_alloc(&f, (size_t)n * rows[m] * sizeof **alone);
      const td_vec of_rows = {.data = m == 1 ? bias : NULL, .dtype = TD_F32, .n = rows[m]};
      td_linear_op_args one = all;
      one.w = &w[m].w;
      one.bias = of_rows;
      one.y = alone[m];
      one.y_stride = rows[m];
      td_op_linear(f.stream, &one);
      if (m > 0) {
        all.also[m - 1] = (td_linear_also){&w[m].w, of_rows, y[m], rows[m]};
        continue;
      }
      all.w = one.w;
      all.y = y[m];
      all.y_stride = rows[m];
    }
    n_launches = 0;
    td_op_linear(f.stream, &all);
    if (n <= TD_CU_VEC_TOKENS)
      assert_int_equal(n_launches, cases[i / TD_COUNT(n_tokens)].n_launches);
    for (uint32_t m = 0; m < N; m++) {
      float *want = cuda_get_bf16(&f, alone[m], (size_t)n * rows[m]);
      float *got = cuda_get_bf16(&f, y[m], (size_t)n * rows[m]);
      assert_memory_equal(got, want, (size_t)n * rows[m] * sizeof *got);
      free(want);
      free(got);
      ref_free_weight(&w[m]);
    }
    free(x);
    free(bias);
    cuda_close(&f);
  }
}

TEST(scales_that_are_not_taken) {
  CUDA_OPEN(f);
  const ref_format format = {"f4", TD_F4E2M1, TD_F8E8M0, false};
  ref_weight w = ref_make_format(&f.rng, &format, 16, 64, 1, 32);
  memset((void *)w.w.scale, 127, td_weight_scale_bytes(&w.w));
  assert_true(td_dev_supports_device_weights(f.dev, &w.w));
  ((uint8_t *)w.w.scale)[5] = 127 + TD_CU_E8M0_MOST + 1;
  assert_false(td_dev_supports_device_weights(f.dev, &w.w));
  ref_free_weight(&w);
  cuda_close(&f);
}
