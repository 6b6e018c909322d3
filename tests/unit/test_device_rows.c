// tests/unit/test_device_rows.c - the CPU device's operators that move bytes or take row by row
// (copies, signals, sums, embeddings, norms, products with a matrix, rotary positions) against
// naive ones in double.

#include "base/bf16.h"
#include "unit/device_test.h"

TEST(embed_gather_add) {
  device_fixture f;
  FOR_TEAMS(f) {
    ref_weight table = ref_make_weight(&f.rng, TD_BF16, 50, 33, 0, 0);
    int32_t ids[300], rows[] = {299, 0, 7};
    for (int i = 0; i < 300; i++)
      ids[i] = (int32_t)ref_below(&f.rng, 50);
    float *x = malloc(300 * 33 * sizeof *x), gathered[3 * 33];
    float *y = ref_floats(&f.rng, 300 * 33);
    td_op_embed(f.stream,
                &(td_embed_args){.table = table.w, .ids = ids, .out = x, .n_tokens = 300});
    td_op_gather_rows(f.stream, gathered, x, rows, 3, 33);
    td_op_add(f.stream, x, y, 300 * 33);
    device_sync(&f);
    for (int t = 0; t < 300; t++) {
      for (uint32_t c = 0; c < 33; c++) {
        double want = ref_at(&table.w, (uint32_t)ids[t], c);
        assert_true(x[t * 33 + c] == (float)(want + y[t * 33 + c]));
      }
    }
    for (int i = 0; i < 3; i++) {
      for (uint32_t c = 0; c < 33; c++) {
        assert_true(gathered[i * 33 + c] == ref_at(&table.w, (uint32_t)ids[rows[i]], c));
      }
    }
    free(x);
    free(y);
    ref_free_weight(&table);
  }
}

TEST(factors_and_cap) {
  enum { TOKENS = 300, ROWS = 50, COLS = 33 };
  device_fixture f;
  FOR_TEAMS(f) {
    ref_weight table = ref_make_weight(&f.rng, TD_BF16, ROWS, COLS, 0, 0);
    int32_t ids[TOKENS];
    for (int i = 0; i < TOKENS; i++)
      ids[i] = (int32_t)ref_below(&f.rng, ROWS);
    float *x = malloc(TOKENS * COLS * sizeof *x), *logits = malloc(TOKENS * ROWS * sizeof *logits);
    float *y = ref_floats(&f.rng, TOKENS * COLS);
    td_op_embed(f.stream,
                &(td_embed_args){
                    .table = table.w, .ids = ids, .out = x, .n_tokens = TOKENS, .factor = 2.5f});
    td_op_add_scaled(f.stream, x, y, TOKENS * COLS, -0.5f);
    td_op_linear(f.stream, &(td_linear_op_args){.w = &table.w,
                                                .x = x,
                                                .y = logits,
                                                .x_stride = COLS,
                                                .y_stride = ROWS,
                                                .n_tokens = TOKENS,
                                                .cap = 0.7f,
                                                .out_f32 = true});
    device_sync(&f);
    double *want = ref_doubles(TOKENS * ROWS);
    for (size_t t = 0; t < TOKENS; t++) {
      for (uint32_t c = 0; c < COLS; c++) {
        const float embedded = (float)ref_at(&table.w, (uint32_t)ids[t], c) * 2.5f;
        assert_true(x[t * COLS + c] == (embedded + y[t * COLS + c]) * -0.5f);
      }
      for (uint32_t r = 0; r < ROWS; r++) {
        double sum = 0;
        for (uint32_t c = 0; c < COLS; c++)
          sum += ref_at(&table.w, r, c) * x[t * COLS + c];
        want[t * ROWS + r] = 0.7f * tanh(sum / 0.7f);
      }
    }
    device_assert_close(logits, want, TOKENS * ROWS, 1e-6);
    free(x);
    free(y);
    free(logits);
    free(want);
    ref_free_weight(&table);
  }
}

// BF16 and f32 parts give the same sum, in order; a single part is converted.
TEST(sum_parts) {
  enum { N = 70000 }; // several pieces, and an incomplete block
  device_fixture f;
  FOR_TEAMS(f) {
    float *parts[3], *out = malloc(N * sizeof *out);
    uint16_t *bf16[3], *rounded = malloc(N * sizeof *rounded);
    for (int p = 0; p < 3; p++) {
      parts[p] = ref_floats(&f.rng, N);
      bf16[p] = malloc(N * sizeof **bf16);
      td_op_sum_parts(
          f.stream, &(td_sum_parts_args){
                        .parts = {parts[p]}, .out = bf16[p], .n = N, .n_parts = 1, .f32_parts = 1});
    }
    td_sum_parts_args sum = {.parts = {bf16[0], parts[1], bf16[2]},
                             .out = out,
                             .n = N,
                             .n_parts = 3,
                             .f32_parts = 2,
                             .out_f32 = true};
    td_op_sum_parts(f.stream, &sum);
    sum.out = rounded;
    sum.out_f32 = false;
    td_op_sum_parts(f.stream, &sum);
    device_sync(&f);
    for (int i = 0; i < N; i++) {
      float want = 0;
      for (int p = 0; p < 3; p++) {
        assert_int_equal(bf16[p][i], td_bf16_of(parts[p][i]));
        want += td_bf16_value(bf16[p][i]);
      }
      assert_true(out[i] == want && rounded[i] == td_bf16_of(want));
    }
    sum.n_parts = TD_MAX_SUM_PARTS + 1;
    td_op_sum_parts(f.stream, &sum);
    td_err err;
    assert_int_equal(td_stream_sync(f.stream, &err), TD_EINVAL);
    for (int p = 0; p < 3; p++)
      free(parts[p]), free(bf16[p]);
    free(out), free(rounded);
  }
}

TEST(await_is_canceled) {
  device_fixture f;
  device_open(&f, 1);
  _Atomic uint32_t signal = 0, canceled = 0;
  const uint32_t one = 1;
  td_op_await_or_cancel(f.stream, &signal, &one, &canceled);
  canceled = 1;
  td_err err;
  assert_int_equal(td_stream_sync(f.stream, &err), TD_ECANCELED);
  td_op_signal(f.stream, &signal, &one); // a failed stream still signals
  td_stream_sync(f.stream, NULL);
  assert_int_equal(signal, 1);
  device_close(&f);
}

TEST(post) {
  device_fixture f;
  device_open(&f, 1);
  td_err err;
  td_inbox inbox;
  assert_int_equal(td_inbox_open(&inbox, f.dev, f.dev, 128, &err), TD_OK);
  char *data = inbox.memory;
  _Atomic uint32_t *signal = (_Atomic uint32_t *)(data + 64);
  assert_true(data[63] == 0 && *signal == 0);
  static const uint32_t values[] = {7, 8};
  td_op_post(f.stream, &(td_post_args){data, "seventeen letters", 17, signal, &values[0]});
  td_op_await(f.stream, signal, &values[0]);
  assert_int_equal(td_stream_sync(f.stream, &err), TD_OK);
  assert_memory_equal(data, "seventeen letters", 18);
  _Atomic uint32_t never = 0, canceled = 1;
  td_op_await_or_cancel(f.stream, &never, &values[0], &canceled);
  td_op_post(f.stream, &(td_post_args){data, "no", 2, signal, &values[1]});
  assert_int_equal(td_stream_sync(f.stream, &err), TD_ECANCELED);
  assert_int_equal(*signal, 8); // a failed stream still signals
  td_inbox_close(&inbox, f.dev);
  device_close(&f);
}

TEST(copy_and_zero) {
  device_fixture f;
  FOR_TEAMS(f) {
    void *mem;
    td_err err;
    assert_int_equal(td_dev_alloc(f.dev, &mem, 1000, &err), TD_OK);
    assert_int_equal((uintptr_t)mem % 64, 0);
    char in[1000], out[1000];
    for (int i = 0; i < 1000; i++)
      in[i] = (char)i;
    td_op_copy(f.stream, mem, in, 1000);
    td_op_fill_zero(f.stream, (char *)mem + 10, 20);
    td_op_copy(f.stream, out, mem, 1000);
    device_sync(&f);
    for (int i = 0; i < 1000; i++)
      assert_int_equal(out[i], i >= 10 && i < 30 ? 0 : in[i]);
    td_dev_free(f.dev, mem);
  }
}

static void naive_norm(double *want, const float *x, const float *w, size_t dim, double eps) {
  double sum = 0;
  for (size_t d = 0; d < dim; d++)
    sum += (double)x[d] * x[d];
  for (size_t d = 0; d < dim; d++)
    want[d] = x[d] / sqrt(sum / (double)dim + eps) * w[d];
}

// A norm that also adds what a block's output lacks has the bits of two operators.
TEST(rmsnorm_of_more) {
  device_fixture f;
  enum { ROWS = 70, DIM = 501, N = ROWS * DIM };
  FOR_TEAMS(f) {
    float *x = ref_floats(&f.rng, N), *more = ref_floats(&f.rng, N), *w = ref_floats(&f.rng, DIM);
    float *before = ref_floats(&f.rng, N), *residual[2], *out[2];
    for (int two = 0; two < 2; two++) { // operators
      residual[two] = malloc(N * sizeof(float));
      out[two] = malloc(N * sizeof(float));
      memcpy(residual[two], before, N * sizeof(float));
      if (two) td_op_add(f.stream, x, more, N);
      td_op_rmsnorm(f.stream, &(td_rmsnorm_args){.x = x,
                                                 .more = two ? NULL : more,
                                                 .residual = residual[two],
                                                 .w = {w, TD_F32, DIM},
                                                 .out = out[two],
                                                 .x_stride = DIM,
                                                 .out_stride = DIM,
                                                 .n_rows = ROWS,
                                                 .dim = DIM,
                                                 .eps = 1e-6f});
      device_sync(&f);
    }
    assert_memory_equal(residual[0], residual[1], N * sizeof(float));
    assert_memory_equal(out[0], out[1], N * sizeof(float));
    for (int two = 0; two < 2; two++)
      free(residual[two]), free(out[two]);
    free(x);
    free(more);
    free(w);
    free(before);
  }
}

TEST(rmsnorm) {
  device_fixture f;
  enum { ROWS = 70, DIM = 501, STRIDE = 600 };
  FOR_TEAMS(f) {
    float *x = ref_floats(&f.rng, ROWS * STRIDE), *residual = ref_floats(&f.rng, ROWS * DIM);
    float *before = malloc(ROWS * DIM * sizeof *before), *out = malloc(ROWS * DIM * sizeof *out);
    double *want = ref_doubles(ROWS * DIM);
    float *w = ref_floats(&f.rng, DIM);
    memcpy(before, residual, ROWS * DIM * sizeof *before);
    td_op_rmsnorm(f.stream, &(td_rmsnorm_args){.x = x,
                                               .residual = residual,
                                               .w = {w, TD_F32, DIM},
                                               .out = out,
                                               .x_stride = STRIDE,
                                               .out_stride = DIM,
                                               .n_rows = ROWS,
                                               .dim = DIM,
                                               .eps = 1e-3f});
    device_sync(&f);
    for (size_t i = 0; i < ROWS * DIM; i++)
      assert_true(residual[i] == before[i] + x[i / DIM * STRIDE + i % DIM]);
    for (size_t i = 0; i < ROWS; i++)
      naive_norm(want + i * DIM, residual + i * DIM, w, DIM, 1e-3);
    device_assert_close(out, want, ROWS * DIM, 1e-6);
    // in place, without a residual, BF16 weights
    uint16_t wb[DIM];
    for (int d = 0; d < DIM; d++) {
      wb[d] = ref_to_bf16(w[d]);
      w[d] = (float)ref_bf16(wb[d]);
    }
    memcpy(before, out, ROWS * DIM * sizeof *before);
    td_op_rmsnorm(f.stream, &(td_rmsnorm_args){.x = out,
                                               .w = {wb, TD_BF16, DIM},
                                               .out = out,
                                               .x_stride = DIM,
                                               .out_stride = DIM,
                                               .n_rows = ROWS,
                                               .dim = DIM,
                                               .eps = 1e-6f});
    device_sync(&f);
    for (size_t i = 0; i < ROWS; i++)
      naive_norm(want + i * DIM, before + i * DIM, w, DIM, 1e-6);
    device_assert_close(out, want, ROWS * DIM, 1e-6);
    free(x);
    free(residual);
    free(before);
    free(out);
    free(want);
    free(w);
  }
}

TEST(linear) {
  static const struct {
    td_dtype dtype;
    uint32_t rows, cols, n_tokens;
  } cases[] = {{TD_F32, 67, 33, 5},       {TD_BF16, 129, 200, 1},  {TD_F8E4M3, 300, 385, 7},
               {TD_F8E4M3, 130, 64, 250}, {TD_BF16, 40, 1031, 19}, {TD_F32, 1, 1, 1}};
  device_fixture f;
  FOR_TEAMS(f) {
    for (size_t c = 0; c < TD_COUNT(cases); c++) {
      uint32_t rows = cases[c].rows, cols = cases[c].cols, n = cases[c].n_tokens;
      size_t ldx = cols + 3, ldy = rows + 5;
      ref_weight w = ref_make_weight(&f.rng, cases[c].dtype, rows, cols, 128, 128);
      float *x = ref_floats(&f.rng, n * ldx), *bias = ref_floats(&f.rng, rows);
      float *y = ref_floats(&f.rng, n * ldy), *dense = malloc((size_t)n * rows * sizeof *dense);
      float *again = malloc((size_t)n * rows * sizeof *again); // by the same matrix
      double *want = ref_doubles((size_t)n * rows);
      td_op_linear(
          f.stream,
          &(td_linear_op_args){
              .w = &w.w,
              .bias = {bias, TD_F32, rows},
              .x = x,
              .y = y,
              .x_stride = ldx,
              .y_stride = ldy,
              .n_tokens = n,
              .n_prompt = n / 5 * 4,
              .out_f32 = true,
              .also = {{.w = &w.w, .bias = {bias, TD_F32, rows}, .y = again, .y_stride = rows}}});
      device_sync(&f);
      for (uint32_t t = 0; t < n; t++) {
        for (uint32_t r = 0; r < rows; r++) {
          double sum = bias[r];
          for (uint32_t k = 0; k < cols; k++)
            sum += ref_at(&w.w, r, k) * x[t * ldx + k];
          want[(size_t)t * rows + r] = sum;
          dense[(size_t)t * rows + r] = y[t * ldy + r];
        }
      }
      device_assert_close(dense, want, (size_t)n * rows, 1e-6);
      assert_memory_equal(again, dense, (size_t)n * rows * sizeof *dense);
      free(x);
      free(bias);
      free(y);
      free(again);
      free(dense);
      free(want);
      ref_free_weight(&w);
    }
  }
}

TEST(rope) {
  enum { TOKENS = 9, HEADS = 3, DIM = 20, ROT = 12, OFFSET = 8, MAX = 40 };
  device_fixture f;
  FOR_TEAMS(f) {
    float *table = ref_floats(&f.rng, MAX * ROT);
    int32_t position[TOKENS];
    for (int t = 0; t < TOKENS; t++)
      position[t] = (int32_t)ref_below(&f.rng, MAX);
    for (int interleaved = 0; interleaved < 2; interleaved++) {
      float *x = ref_floats(&f.rng, TOKENS * HEADS * DIM),
            *before = malloc(sizeof(float) * TOKENS * HEADS * DIM);
      memcpy(before, x, sizeof(float) * TOKENS * HEADS * DIM);
      td_op_rope(f.stream, &(td_rope_args){.heads = {.x = x + OFFSET,
                                                     .token_stride = HEADS * DIM,
                                                     .head_stride = DIM,
                                                     .n_heads = HEADS - 1},
                                           .cos_sin = table,
                                           .position = position,
                                           .n_tokens = TOKENS,
                                           .rot_dim = ROT,
                                           .interleaved = interleaved,
                                           .also = {.x = x + OFFSET + (HEADS - 1) * DIM,
                                                    .token_stride = HEADS * DIM,
                                                    .head_stride = DIM,
                                                    .n_heads = 1}});
      device_sync(&f);
      for (size_t row = 0; row < TOKENS * HEADS; row++) {
        const float *cs = table + (size_t)position[row / HEADS] * ROT;
        for (size_t d = 0; d < OFFSET; d++)
          assert_true(x[row * DIM + d] == before[row * DIM + d]);
        for (size_t i = 0; i < ROT / 2; i++) {
          size_t a = row * DIM + OFFSET + (interleaved ? 2 * i : i);
          size_t b = interleaved ? a + 1 : a + ROT / 2;
          double c = cs[2 * i], s = cs[2 * i + 1];
          assert_float_equal(x[a], before[a] * c - before[b] * s, 1e-6);
          assert_float_equal(x[b], before[b] * c + before[a] * s, 1e-6);
        }
      }
      free(x);
      free(before);
    }
    free(table);
  }
}

TEST(scale_rows) {
  enum { TOKENS = 9, DIM = 70, MAX = 40 };
  device_fixture f;
  FOR_TEAMS(f) {
    float *factor = ref_floats(&f.rng, MAX), *x = ref_floats(&f.rng, TOKENS * DIM);
    float before[TOKENS * DIM];
    memcpy(before, x, sizeof before);
    int32_t position[TOKENS];
    for (int t = 0; t < TOKENS; t++)
      position[t] = (int32_t)ref_below(&f.rng, MAX);
    td_op_scale_rows(
        f.stream,
        &(td_scale_rows_args){
            .x = x, .factor = factor, .position = position, .n_tokens = TOKENS, .dim = DIM});
    device_sync(&f);
    for (int i = 0; i < TOKENS * DIM; i++)
      assert_true(x[i] == before[i] * factor[position[i / DIM]]);
    free(factor);
    free(x);
  }
}

TEST(bad_arguments_stick) {
  device_fixture f;
  device_open(&f, 2);
  ref_weight table = ref_make_weight(&f.rng, TD_BF16, 10, 8, 0, 0);
  int32_t ids[] = {3, 10};
  float out[16] = {0}, more[16] = {0};
  td_op_embed(f.stream, &(td_embed_args){.table = table.w, .ids = ids, .out = out, .n_tokens = 2});
  td_op_fill_zero(f.stream, more, 4);
  device_expect_failure(&f, "token id 10");
  device_reopen_stream(&f);
  ids[1] = -1;
  td_op_embed(f.stream, &(td_embed_args){.table = table.w, .ids = ids, .out = out, .n_tokens = 2});
  more[0] = 7;
  td_op_fill_zero(f.stream, more, sizeof more); // skipped
  device_expect_failure(&f, "token id -1");
  device_expect_failure(&f, "token id -1");
  assert_true(more[0] == 7);
  device_reopen_stream(&f);
  td_op_linear(f.stream, &(td_linear_op_args){
                             .w = &table.w, .x = more, .y = out, .n_tokens = 1, .n_prompt = 2});
  device_expect_failure(&f, "2 of 1 tokens");
  ref_free_weight(&table);
  device_close(&f);
}

TEST(unknown_device) {
  td_dev *dev;
  td_err err;
  assert_int_equal(td_dev_open(&dev, &(td_dev_opts){.kind = "abacus"}, &err), TD_EUNSUPPORTED);
  assert_null(dev);
  assert_non_null(strstr(err.msg, "abacus"));
}
