// tests/unit/test_cuda_rows.c - the CUDA device's operators that move bytes or take row by row
// (copies, sums, embeddings, norms, rotary positions) against naive ones in double, at small and
// ragged shapes, within bounds that follow from the types: a result in BF16 errs by half a unit in
// the last place, a sum of k products in FP32 by at most k units of the sum of their magnitudes.
// CTest: gpu no-tsan

#include "base/bf16.h"
#include "unit/cuda_test.h"

TEST(copy_and_zero) {
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

TEST(sum_parts) {
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
  td_op_embed(f.stream, &(td_embed_args){.table = table.w,
                                         .ids = cuda_put(&f, ids, sizeof ids),
                                         .out = x,
                                         .n_tokens = TOKENS});
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
TEST(embed_gather_add) {
  check_embed_gather_add(33);
  check_embed_gather_add(40);
}

// x[i] / rms(x) * w[i] of a row, or without w.
static void check_norm(const float *x, const float *w, const float *got, size_t dim, double eps) {
  double sum = 0;
  for (size_t d = 0; d < dim; d++)
    sum += (double)x[d] * x[d];
  for (size_t d = 0; d < dim; d++) {
    double want = x[d] / sqrt(sum / (double)dim + eps) * (w ? w[d] : 1);
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
  free(sum);
  sum = cuda_get_bf16(&f, residual, ROWS * dim);
  td_op_rmsnorm(f.stream, &(td_rmsnorm_args){.x = residual,
                                             .w = {.n = dim},
                                             .out = residual,
                                             .x_stride = dim,
                                             .out_stride = dim,
                                             .n_rows = ROWS,
                                             .dim = dim,
                                             .eps = 1e-3f});
  free(got);
  got = cuda_get_bf16(&f, residual, ROWS * dim);
  for (size_t i = 0; i < ROWS; i++)
    check_norm(sum + i * dim, NULL, got + i * dim, dim, 1e-3);
  free(x);
  free(before);
  free(w);
  free(sum);
  free(got);
  free(again);
  cuda_close(&f);
}

// A norm that also adds what a block's output lacks, which is in host memory: the bits of td_op_add
// and a norm, and the output stays as it is.
static void check_norm_of_more(uint32_t dim) {
  enum { ROWS = 3 };
  CUDA_OPEN(f);
  td_err err;
  const size_t n = (size_t)ROWS * dim, n_bytes = n * sizeof(uint16_t);
  float *values[3], *w = ref_floats(&f.rng, dim);
  for (int i = 0; i < 3; i++)
    values[i] = cuda_floats(&f, n);
  uint16_t *more, *got[2][2], *x = cuda_put_bf16(&f, values[0], n);
  assert_int_equal(td_dev_alloc_host(f.dev, (void **)&more, n_bytes, &err), TD_OK);
  for (size_t i = 0; i < n; i++)
    more[i] = ref_to_bf16(values[1][i]);
  for (int two = 0; two < 2; two++) { // operators
    uint16_t *residual = cuda_put_bf16(&f, values[2], n), *out = cuda_alloc(&f, n_bytes);
    if (two) td_op_add(f.stream, x, more, n);
    td_op_rmsnorm(f.stream, &(td_rmsnorm_args){.x = x,
                                               .more = two ? NULL : more,
                                               .residual = residual,
                                               .w = {w, TD_F32, dim},
                                               .out = out,
                                               .x_stride = dim,
                                               .out_stride = dim,
                                               .n_rows = ROWS,
                                               .dim = dim,
                                               .eps = 1e-6f});
    cuda_get(&f, got[two][0] = malloc(n_bytes), residual, n_bytes);
    cuda_get(&f, got[two][1] = malloc(n_bytes), out, n_bytes);
  }
  for (int i = 0; i < 2; i++) {
    assert_memory_equal(got[0][i], got[1][i], n_bytes);
    free(got[0][i]), free(got[1][i]);
  }
  td_dev_free_host(f.dev, more);
  for (int i = 0; i < 3; i++)
    free(values[i]);
  free(w);
  cuda_close(&f);
}

// Rows of two kinds in one operator have the bits that each has alone.
static void check_both_norms(uint32_t dim, uint32_t also_dim) {
  enum { ROWS = 11 };
  CUDA_OPEN(f);
  const uint32_t stride = also_dim + 64;
  const size_t n = (size_t)ROWS * dim, n_also = (size_t)ROWS * stride;
  float *x = cuda_floats(&f, n), *y = cuda_floats(&f, n_also), *w = ref_floats(&f.rng, dim);
  float *also_w = ref_floats(&f.rng, also_dim), *got[2][2];
  for (int together = 0; together < 2; together++) {
    uint16_t *rows = cuda_put_bf16(&f, x, n), *also = cuda_put_bf16(&f, y, n_also);
    td_rmsnorm_args args = {.x = rows,
                            .w = {w, TD_F32, dim},
                            .out = rows,
                            .x_stride = dim,
                            .out_stride = dim,
                            .n_rows = ROWS,
                            .dim = dim,
                            .eps = 1e-6f,
                            .also = {.x = also,
                                     .w = {also_w, TD_F32, also_dim},
                                     .out = also,
                                     .x_stride = stride,
                                     .out_stride = stride,
                                     .dim = also_dim}};
    const td_rmsnorm_args second = td_rmsnorm_also(&args);
    if (!together) args.also.x = NULL;
    td_op_rmsnorm(f.stream, &args);
    if (!together) td_op_rmsnorm(f.stream, &second);
    got[together][0] = cuda_get_bf16(&f, rows, n);
    got[together][1] = cuda_get_bf16(&f, also, n_also);
  }
  assert_memory_equal(got[0][0], got[1][0], n * sizeof **got[0]);
  assert_memory_equal(got[0][1], got[1][1], n_also * sizeof **got[0]);
  for (int i = 0; i < 4; i++)
    free(got[i / 2][i % 2]);
  free(x), free(y), free(w), free(also_w);
  cuda_close(&f);
}

// Rows of any length, and of runs of eight: of a warp, of a block, and of more runs than it has
// threads.
TEST(rmsnorm) {
  static const uint32_t dims[] = {501, 512 + 5 * 8, 1024 + 21 * 8};
  for (size_t i = 0; i < TD_COUNT(dims); i++) {
    check_rmsnorm(dims[i]);
    check_norm_of_more(dims[i]);
  }
  check_norm_of_more(512 * 8 + 3 * 8);
  check_both_norms(1536, 512);
  check_both_norms(768, 512);
  check_both_norms(512, 1032); // these are not one launch
  check_both_norms(1536, 501);
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
  for (int kind = 0; kind < 4; kind++) {
    const bool interleaved = kind % 2, backwards = kind / 2;
    float *before = cuda_floats(&f, n);
    uint16_t *x = cuda_put_bf16(&f, before, n);
    td_op_rope(f.stream, &(td_rope_args){.heads = {.x = x + OFFSET,
                                                   .token_stride = HEADS * dim,
                                                   .head_stride = dim,
                                                   .n_heads = HEADS - 1},
                                         .cos_sin = cos_sin,
                                         .position = positions,
                                         .n_tokens = TOKENS,
                                         .rot_dim = rot,
                                         .interleaved = interleaved,
                                         .backwards = backwards,
                                         .also = {.x = x + OFFSET + (HEADS - 1) * dim,
                                                  .token_stride = HEADS * dim,
                                                  .head_stride = dim,
                                                  .n_heads = 1}});
    float *got = cuda_get_bf16(&f, x, n);
    for (size_t row = 0; row < TOKENS * HEADS; row++) {
      const float *cs = table + (size_t)position[row / HEADS] * rot;
      for (size_t d = 0; d < OFFSET; d++)
        assert_true(got[row * dim + d] == before[row * dim + d]);
      for (size_t i = 0; i < rot / 2; i++) {
        size_t a = row * dim + OFFSET + (interleaved ? 2 * i : i);
        size_t b = interleaved ? a + 1 : a + rot / 2;
        double c = cs[2 * i], s = backwards ? -cs[2 * i + 1] : cs[2 * i + 1];
        double u = before[a], v = before[b];
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

TEST(rope) {
  check_rope(12);
  check_rope(32); // runs of eight pairs
}

TEST(scale_rows) {
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

TEST(bad_arguments) {
  CUDA_OPEN(f);
  ref_weight table = ref_make_weight(&f.rng, TD_BF16, 10, 8, 0, 0);
  uint16_t *x = cuda_alloc(&f, 64 * sizeof *x);
  static const int32_t bad_ids[][2] = {{3, 10}, {-1, 3}};
  for (int i = 0; i < 2; i++) {
    int32_t *ids = cuda_put(&f, bad_ids[i], sizeof bad_ids[i]);
    td_op_embed(f.stream, &(td_embed_args){.table = table.w, .ids = ids, .out = x, .n_tokens = 2});
    cuda_expect_failure(&f, "token id");
  }
  int32_t *rows = cuda_put(&f, bad_ids[1], sizeof bad_ids[1]);
  td_op_gather_rows(f.stream, x + 32, x, rows, 1, 8);
  cuda_expect_failure(&f, "negative");
  td_weight absent = {0};
  td_op_embed(f.stream, &(td_embed_args){.table = absent, .ids = rows, .out = x, .n_tokens = 1});
  td_op_fill_zero(f.stream, x, 8);
  cuda_expect_failure(&f, "absent");
  float weight = 1;
  td_moe_args moe = {.gate = &table.w,
                     .up = &table.w,
                     .down = &table.w,
                     .x = x,
                     .ids = rows,
                     .weights = cuda_put(&f, &weight, sizeof weight),
                     .out = x + 32,
                     .n_tokens = 1,
                     .n_experts = 1,
                     .top_k = 1};
  td_op_moe(f.stream, &moe);
  cuda_expect_failure(&f, "shapes");
  moe.n_experts = 2;
  moe.first_expert = 3;
  moe.n_routed = 4;
  td_op_moe(f.stream, &moe);
  cuda_expect_failure(&f, "from expert 3");
  ref_free_weight(&table);
  cuda_close(&f);
}
