// src/bench/known_answers.c - compares a device's results with sums in double.
#include "bench/known_answers.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/bf16.h"
#include "bench/formats.h"
#include "tandem/kernels.h"

// Rows and columns divide into no kernel's tiles but the columns of blocks.
enum { ROWS = 70, COLS = 512, MAX_TOKENS = 40, MOST_NAMED = 4, KEYS = 50, HEAD_DIM = 64 };

typedef struct {
  td_buf *out;
  td_dev *dev;
  td_stream *stream;
  uint32_t n_checked, n_wrong;
  // In device memory: x [MAX_TOKENS][COLS] in the activations' dtype, y f32 [MAX_TOKENS][ROWS].
  void *x;
  float *y;
  float values[MAX_TOKENS][COLS], results[MAX_TOKENS][ROWS], row[COLS];
} answers;

static void note(answers *a, bool is_right, const char *what, uint32_t n_tokens) {
  a->n_checked++;
  if (is_right) return;
  if (a->n_wrong++ < MOST_NAMED)
    td_buf_printf(a->out, "%s%s of %u", a->n_wrong > 1 ? ", " : "", what, n_tokens);
}

static void (*scalar_of(const char *family))(void) {
  size_t n;
  const td_kernel_variant *v = td_kernel_variants(&n);
  for (size_t i = 0; i < n; i++)
    if (!strcmp(v[i].family, family) && !strcmp(v[i].isa, "scalar")) return v[i].fn;
  return NULL;
}

// ---- matrices -----------------------------------------------------------------------------------

// Whole numbers of at most 4, of which sums of 16 products with codes are exact in FP16, or 1 for
// codes of 8 bits.
static td_status put_x(answers *a, const td_format *format, td_err *err) {
  const int most = format->dtype == TD_I8 ? 1 : 4;
  uint16_t *bf16 = malloc(sizeof a->values / 2);
  if (!bf16) return td_fail(err, TD_ENOMEM, "out of memory: known answers");
  float *x = a->values[0];
  for (uint32_t i = 0; i < MAX_TOKENS * COLS; i++)
    x[i] = (float)((int)(i * 2654435761u >> 16) % (2 * most + 1) - most);
  td_bf16_of_n(bf16, x, (size_t)MAX_TOKENS * COLS);
  const bool is_f32 = td_dev_act_dtype(a->dev) == TD_F32;
  td_op_copy(a->stream, a->x, is_f32 ? (void *)x : bf16, sizeof a->values / (is_f32 ? 1 : 2));
  td_status st = td_stream_sync(a->stream, err);
  free(bf16);
  return st;
}

// Whether y [n_tokens][ROWS] is what decoded rows and x make.
static bool is_near(answers *a, const td_weight *w, uint32_t n_tokens) {
  const td_kernel_variant scalar = {.fn = scalar_of("decode_row")};
  const double rounded = td_dev_act_dtype(a->dev) == TD_F32 ? 0 : 0x1p-8;
  for (uint32_t r = 0; r < ROWS; r++) {
    ((void (*)(const td_decode_row_args *))scalar.fn)(
        &(td_decode_row_args){.w = w, .out = a->row, .row = r});
    for (uint32_t t = 0; t < n_tokens; t++) {
      double sum = 0, magnitude = 0, weights = 0;
      for (uint32_t c = 0; c < COLS; c++) {
        sum += (double)a->row[c] * a->values[t][c];
        magnitude += fabs((double)a->row[c] * a->values[t][c]);
        weights += fabs((double)a->row[c]);
      }
      // The order of sums and the rounding of scales; 16 bits of a block whose largest is at
      // most 4.
      const double bound = (COLS + 8) * 0x1p-24 * magnitude + 4.1 / 65534 * weights;
      if (!(fabs(a->results[t][r] - sum) <= bound + rounded * magnitude)) return false;
    }
  }
  return true;
}

static td_status check_format(answers *a, const td_format *format, td_err *err) {
  static const uint32_t batches[] = {1, 3, MAX_TOKENS};
  td_weight w;
  void *memory = aligned_alloc(64, td_bench_weight(&w, format, ROWS, COLS, NULL));
  if (!memory) return td_fail(err, TD_ENOMEM, "out of memory: known answers");
  td_bench_weight(&w, format, ROWS, COLS, memory);
  td_bench_fill(&w, memory, 1);
  td_status st = put_x(a, format, err);
  for (size_t i = 0; i < sizeof batches / sizeof batches[0] && st == TD_OK; i++) {
    const uint32_t n = batches[i];
    td_op_linear(a->stream, &(td_linear_op_args){.w = &w,
                                                 .x = a->x,
                                                 .y = a->y,
                                                 .x_stride = COLS,
                                                 .y_stride = ROWS,
                                                 .n_tokens = n,
                                                 .n_prompt = n == MAX_TOKENS ? n : 0,
                                                 .out_f32 = true});
    td_op_copy(a->stream, a->results, a->y, sizeof a->results[0] * n);
    st = td_stream_sync(a->stream, err);
    if (st == TD_OK) note(a, is_near(a, &w, n), format->name, n);
  }
  td_dev_drop_weights(a->dev);
  free(memory);
  return st;
}

// ---- rows and attention on the CPU --------------------------------------------------------------

static bool are_near(const float *a, const float *b, uint32_t n, float bound) {
  for (uint32_t i = 0; i < n; i++)
    if (!(fabsf(a[i] - b[i]) <= bound * fmaxf(1, fabsf(b[i])))) return false;
  return true;
}

#define SCALAR(family, args_type) ((void (*)(const args_type *))scalar_of(#family))

static void check_rows(answers *a) {
  const td_kernel_table *k = td_kernels();
  float x[COLS], weights[COLS], found[COLS], expected[COLS];
  for (uint32_t i = 0; i < COLS; i++) {
    x[i] = sinf((float)i);
    weights[i] = cosf((float)i * 3);
  }
  td_norm_row_args norm = {.x = x, .w = {weights, TD_F32, COLS}, .out = found, .eps = 1e-6f};
  k->rmsnorm_row(&norm);
  norm.out = expected;
  SCALAR(rmsnorm_row, td_norm_row_args)(&norm);
  note(a, are_near(found, expected, COLS, 1e-5f), "norm", 1);
  td_swiglu_row_args gated = {.gate = x, .up = weights, .out = found, .n = COLS};
  k->swiglu_row(&gated);
  gated.out = expected;
  SCALAR(swiglu_row, td_swiglu_row_args)(&gated);
  note(a, are_near(found, expected, COLS, 1e-5f), "SwiGLU", 1);
}

static void check_attention(answers *a) {
  enum { QUERIES = 3 };
  float q[QUERIES * HEAD_DIM], acc[2][QUERIES * HEAD_DIM] = {{0}}, m[2][QUERIES], l[2][QUERIES];
  float keys[KEYS * HEAD_DIM];
  const uint32_t n_visible[QUERIES] = {KEYS - 2, KEYS - 1, KEYS};
  for (uint32_t i = 0; i < KEYS * HEAD_DIM; i++)
    keys[i] = sinf((float)i * 0.7f);
  for (uint32_t i = 0; i < QUERIES * HEAD_DIM; i++)
    q[i] = cosf((float)i);
  for (int way = 0; way < 2; way++) {
    for (int i = 0; i < QUERIES; i++) {
      m[way][i] = -INFINITY;
      l[way][i] = 0;
    }
    const td_attn_block_args args = {.q = q,
                                     .k = keys,
                                     .v = keys,
                                     .n_visible = n_visible,
                                     .m = m[way],
                                     .l = l[way],
                                     .acc = acc[way],
                                     .ldq = HEAD_DIM,
                                     .ldk = HEAD_DIM,
                                     .ldv = HEAD_DIM,
                                     .ldacc = HEAD_DIM,
                                     .n_q = QUERIES,
                                     .k_dim = HEAD_DIM,
                                     .v_dim = HEAD_DIM};
    if (way)
      SCALAR(attn_f32, td_attn_block_args)(&args);
    else
      td_kernels()->attn_f32(&args);
  }
  note(a,
       are_near(acc[0], acc[1], QUERIES * HEAD_DIM, 1e-4f) && are_near(l[0], l[1], QUERIES, 1e-4f),
       "attention", QUERIES);
}

td_status td_known_answers(td_buf *out, td_dev *dev, uint32_t *n_checked, uint32_t *n_wrong,
                           td_err *err) {
  answers *a = calloc(1, sizeof *a);
  if (!a) return td_fail(err, TD_ENOMEM, "out of memory: known answers");
  a->out = out;
  a->dev = dev;
  td_status st = td_stream_open(&a->stream, dev, err);
  if (st == TD_OK) st = td_dev_alloc(dev, &a->x, sizeof a->values, err);
  if (st == TD_OK) st = td_dev_alloc(dev, (void **)&a->y, sizeof a->results, err);
  size_t n;
  const td_format *formats = td_formats(&n);
  for (size_t i = 0; i < n && st == TD_OK; i++)
    st = check_format(a, &formats[i], err);
  if (st == TD_OK && td_dev_gpu_index(dev) < 0) {
    check_rows(a);
    check_attention(a);
  }
  *n_checked = a->n_checked;
  *n_wrong = a->n_wrong;
  td_dev_free(dev, a->x);
  td_dev_free(dev, a->y);
  if (a->stream) td_stream_close(a->stream);
  free(a);
  return st;
}
