// tests/unit/test_images.c - positions of tokens in sequences with images, and the operators that
// only towers use, against double.
// CTest: no-tsan
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/bf16.h"
#include "device/device.h"
#include "model/mrope.h"
#include "tandem/kernels.h"
#include "unit/ref.h"
#include "unit/testing.h"

// Text of 3, an image of 4 x 6 patches (2 x 3 tokens), text of 2, one of 8 x 2 (4 x 1), text.
static const td_image_input images[] = {{.at = 3, .n_tokens = 6, .grid_h = 4, .grid_w = 6},
                                        {.at = 11, .n_tokens = 4, .grid_h = 8, .grid_w = 2}};
static const td_model_config config = {.axes = {2, 1, 1}};

static void expect_position(uint32_t token, int32_t time, int32_t row, int32_t column) {
  int32_t offset, at[3];
  const td_image_input *image = td_mrope_find(&config, images, 2, token, &offset);
  if (image)
    td_mrope_position(image, token, offset, at);
  else
    at[0] = at[1] = at[2] = (int32_t)token + offset;
  assert_int_equal(at[0], time);
  assert_int_equal(at[1], row);
  assert_int_equal(at[2], column);
}

// As get_rope_index of transformers' Qwen3-VL gives them.
TEST(positions) {
  expect_position(0, 0, 0, 0);
  expect_position(2, 2, 2, 2);
  expect_position(3, 3, 3, 3);
  expect_position(5, 3, 3, 5);
  expect_position(6, 3, 4, 3);
  expect_position(8, 3, 4, 5);
  expect_position(9, 6, 6, 6);
  expect_position(10, 7, 7, 7);
  expect_position(11, 8, 8, 8);
  expect_position(14, 8, 11, 8);
  expect_position(15, 12, 12, 12);
}

TEST(offsets) {
  const td_model_config plain = {.n_layers = 1};
  assert_int_equal(td_mrope_offset(&config, images, 0), 0);
  assert_int_equal(td_mrope_offset(&config, images, 1), -3);
  assert_int_equal(td_mrope_offset(&config, images, 2), -3);
  assert_int_equal(td_mrope_offset(&plain, images, 2), 0);
}

typedef struct {
  td_dev *dev;
  td_stream *stream;
} cpu;

static cpu open_cpu(void) {
  cpu c;
  assert_int_equal(td_dev_open(&c.dev, &(td_dev_opts){.kind = "cpu", .n_threads = 2}, NULL), TD_OK);
  assert_int_equal(td_stream_open(&c.stream, c.dev, NULL), TD_OK);
  return c;
}

static void close_cpu(cpu c) {
  td_err err;
  assert_int_equal(td_stream_sync(c.stream, &err), TD_OK);
  td_stream_close(c.stream);
  td_dev_close(c.dev);
}

enum { N = 301, HEADS = 2, DIM = 12 }; // more than a split of keys, no whole number of blocks

static double score(const float *q, const float *k, uint32_t t, uint32_t key, uint32_t h) {
  double sum = 0;
  for (uint32_t d = 0; d < DIM; d++)
    sum += (double)q[(t * HEADS + h) * DIM + d] * k[(key * HEADS + h) * DIM + d];
  return sum * 0.3;
}

// Every token of the sequence sees all of its keys, also those behind it.
TEST(attention_to_the_whole) {
  uint64_t rng = 7;
  const size_t n = (size_t)N * HEADS * DIM;
  float *q = ref_floats(&rng, n), *k = ref_floats(&rng, n), *v = ref_floats(&rng, n);
  float *out = malloc(n * sizeof *out);
  int32_t position[N], seq[N] = {0}, q_begin[] = {0, N}, table[] = {0};
  void *pages;
  cpu c = open_cpu();
  assert_int_equal(td_dev_alloc(c.dev, &pages, 2 * n * sizeof(float), NULL), TD_OK);
  for (int i = 0; i < N; i++)
    position[i] = i;
  const td_batch_view batch = {.seq = seq,
                               .position = position,
                               .q_begin = q_begin,
                               .page_table = table,
                               .n_tokens = N,
                               .n_seqs = 1,
                               .max_pages = 1,
                               .page_tokens = N};
  const td_kv_view kv = {.pages = pages, .page_bytes = 2 * n * sizeof(float), .dtype = TD_F32};
  td_op_kv_store(c.stream, &(td_kv_store_args){.batch = batch,
                                               .kv = kv,
                                               .k = k,
                                               .v = v,
                                               .k_stride = HEADS * DIM,
                                               .v_stride = HEADS * DIM,
                                               .n_heads = HEADS,
                                               .head_dim = DIM});
  td_op_attn_gqa(c.stream, &(td_attn_gqa_args){.batch = batch,
                                               .kv = kv,
                                               .q = q,
                                               .out = out,
                                               .n_heads = HEADS,
                                               .n_kv_heads = HEADS,
                                               .head_dim = DIM,
                                               .scale = 0.3f,
                                               .prompt = true,
                                               .whole = true});
  assert_int_equal(td_stream_sync(c.stream, NULL), TD_OK);
  for (uint32_t i = 0; i < n; i++) {
    const uint32_t d = i % DIM, h = i / DIM % HEADS, t = i / DIM / HEADS;
    double sum = 0, weights = 0;
    for (uint32_t key = 0; key < N; key++) {
      const double w = exp(score(q, k, t, key, h));
      weights += w;
      sum += w * v[(key * HEADS + h) * DIM + d];
    }
    assert_true(fabs(out[i] - sum / weights) < 1e-5);
  }
  td_dev_free(c.dev, pages);
  free(q), free(k), free(v), free(out);
  close_cpu(c);
}

static double expected(td_activate_kind kind, double x, double up, double limit) {
  if (kind == TD_ACTIVATE_GELU) return 0.5 * x * (1 + erf(x / sqrt(2)));
  if (kind == TD_ACTIVATE_GELU_TANH)
    return 0.5 * x * (1 + tanh(sqrt(2 / acos(-1)) * (x + 0.044715 * x * x * x)));
  if (limit > 0) x = fmin(x, limit), up = fmax(-limit, fmin(up, limit));
  return x / (1 + exp(-x)) * up;
}

TEST(activations) {
  enum { ROWS = 3, WIDTH = 517 };
  static const td_activate_rows_args kinds[] = {{.kind = TD_ACTIVATE_GELU},
                                                {.kind = TD_ACTIVATE_GELU_TANH},
                                                {.kind = TD_ACTIVATE_SWIGLU},
                                                {.kind = TD_ACTIVATE_SWIGLU, .limit = 0.5f}};
  cpu c = open_cpu();
  for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
    float x[ROWS * WIDTH], up[ROWS * WIDTH], x0[ROWS * WIDTH], up0[ROWS * WIDTH];
    for (int k = 0; k < ROWS * WIDTH; k++) {
      x[k] = x0[k] = (float)(k - 700) / 100;
      up[k] = up0[k] = (float)(k % 37 - 18) / 10;
    }
    td_activate_rows_args args = kinds[i];
    args.x = x, args.up = up, args.n_rows = ROWS, args.dim = WIDTH;
    td_op_activate_rows(c.stream, &args);
    assert_int_equal(td_stream_sync(c.stream, NULL), TD_OK);
    for (int k = 0; k < ROWS * WIDTH; k++)
      assert_true(fabs(x[k] - expected(args.kind, x0[k], up0[k], args.limit)) < 4e-6);
  }
  close_cpu(c);
}

// y of token t and row r in double; *sum: of the products' magnitudes.
static double product(const uint16_t *w, const float *x, uint32_t cols, double *sum) {
  double y = 0;
  *sum = 0;
  for (uint32_t c = 0; c < cols; c++) {
    const double p = (double)td_bf16_value(w[c]) * x[c];
    y += p;
    *sum += fabs(p);
  }
  return y;
}

static void check_split(td_linear_fn fn, uint32_t rows, uint32_t cols, uint32_t n) {
  uint64_t rng = rows;
  float *values = ref_floats(&rng, (size_t)rows * cols), *x = ref_floats(&rng, (size_t)n * cols);
  uint16_t *bits = malloc((size_t)rows * cols * sizeof *bits);
  float *y = calloc((size_t)n * rows, sizeof *y), *one = calloc(rows, sizeof *one);
  td_bf16_of_n(bits, values, (size_t)rows * cols);
  const td_weight w = {.data = bits, .dtype = TD_BF16, .rows = rows, .cols = cols};
  td_linear_args args = {.w = &w,
                         .x = x,
                         .y = y,
                         .ldx = cols,
                         .ldy = rows,
                         .n_tokens = n,
                         .row_end = rows,
                         .prompt = true};
  fn(&args);
  for (uint32_t t = 0; t < n; t++) {
    for (uint32_t r = 0; r < rows; r++) {
      double sum;
      const double want = product(bits + (size_t)r * cols, x + (size_t)t * cols, cols, &sum);
      assert_true(fabs(y[(size_t)t * rows + r] - want) <= 3 * cols * 0x1p-24 * sum);
    }
  }
  // The last token, of the rows from the second on, has the same bits alone.
  args.x += (size_t)(n - 1) * cols;
  args.y = one;
  args.n_tokens = args.row_begin = args.y_row0 = 1;
  fn(&args);
  assert_memory_equal(one, y + (size_t)(n - 1) * rows + 1, (rows - 1) * sizeof *one);
  free(values), free(x), free(bits), free(y), free(one);
}

// Rows, columns and tokens that fill no tiles, and more of each than are computed at once.
TEST(split_products) {
  size_t n_variants;
  const td_kernel_variant *v = td_kernel_variants(&n_variants);
  uint32_t n = 0;
  td_dev_ask_for_tiles();
  for (size_t i = 0; i < n_variants; i++) {
    if (strcmp(v[i].family, "linear_split") != 0 || !td_kernel_variant_runs(&v[i])) continue;
    check_split((td_linear_fn)v[i].fn, 37, 72, 5);
    check_split((td_linear_fn)v[i].fn, 531, 40, 3);
    check_split((td_linear_fn)v[i].fn, 18, 1100, 201);
    n++;
  }
  assert_true(n > 0);
}
