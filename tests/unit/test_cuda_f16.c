// tests/unit/test_cuda_f16.c - the CUDA device's short sums in F16, which GeForce has, of numbers
// that F16 does not hold or whose sums it would not hold, against naive ones in double. Sums may
// err by half a unit of F16 for each instruction that follows another.
// CTest: gpu slow no-tsan

#include "unit/cuda_attn_test.h"

// Skipped on a GPU whose code has no such kernels; elsewhere they are right, if not faster.
#define OPEN_F16(f)                                                                                \
  CUDA_OPEN(f);                                                                                    \
  do {                                                                                             \
    td_cuda_dev *dev_ = (td_cuda_dev *)(f).dev;                                                    \
    const int capability_ = dev_->props.capability;                                                \
    if (capability_ >= 90 && capability_ < 120) {                                                  \
      cuda_close(&(f));                                                                            \
      skip();                                                                                      \
    }                                                                                              \
    dev_->uses.f16 = true;                                                                         \
    dev_->uses.wide = false; /* so that 65 tokens are many */                                      \
    dev_->uses.prefill = false;                                                                    \
  } while (0)

static float as_bf16(float v) {
  return (float)ref_bf16(ref_to_bf16(v));
}

enum { TOKENS = 77, ROWS = 136, COLS = 328 };

// Kinds of activations, in turn.
enum { PLAIN, HUGE_X, TINY, EQUAL, OUTLIERS, SUBNORMAL, SPREAD, ZEROS, CANCELLING, N_KINDS };

static float *draw_x(cuda_fixture *f) {
  float *x = cuda_floats(f, TOKENS * COLS);
  for (int i = 0; i < TOKENS * COLS; i++) {
    const int k = i % COLS;
    switch (i / COLS % N_KINDS) {
    case HUGE_X: x[i] *= 0x1p100f; break;
    case TINY: x[i] *= 0x1p-100f; break;
    case EQUAL: x[i] = 0x1.fep15f; break; // the largest below a power of two
    case OUTLIERS: x[i] *= k % 32 == 7 ? 0x1p20f : 1; break;
    case SUBNORMAL: x[i] *= 0x1p-128f; break;
    case SPREAD: x[i] *= ldexpf(1, -(int)ref_below(&f->rng, 20)); break;
    case ZEROS: x[i] = 0; break;
    case CANCELLING: x[i] = k % 2 ? -x[i - 1] : x[i]; break;
    default: break;
    }
    x[i] = as_bf16(x[i]);
  }
  return x;
}

// The first rows have the largest codes, of one sign and of two.
static ref_weight draw_w(cuda_fixture *f) {
  ref_weight w = ref_make_weight(&f->rng, TD_F8E4M3, ROWS, COLS, 128, 128);
  uint8_t *codes = w.data.data;
  memset(codes, 0x7e, 2 * COLS);
  for (int k = 0; k < COLS; k += 2)
    codes[COLS + k] = 0xfe;
  return w;
}

static void run_linear(cuda_fixture *f, const ref_weight *w, const uint16_t *x, uint32_t n,
                       float *out) {
  float *y = cuda_alloc(f, (size_t)n * ROWS * sizeof *y);
  td_op_linear(f->stream, &(td_linear_op_args){.w = &w->w,
                                               .x = x,
                                               .y = y,
                                               .x_stride = COLS,
                                               .y_stride = ROWS,
                                               .n_tokens = n,
                                               .out_f32 = true});
  cuda_get(f, out, y, (size_t)n * ROWS * sizeof *out);
}

TEST(products) {
  OPEN_F16(f);
  ref_weight w = draw_w(&f);
  float *x = draw_x(&f), *got = malloc(TOKENS * ROWS * sizeof *got);
  run_linear(&f, &w, cuda_put_bf16(&f, x, TOKENS * COLS), TOKENS, got);
  double err = 0, norm = 0; // of the first kind
  for (uint32_t i = 0; i < TOKENS * ROWS; i++) {
    double want = 0, size = 0;
    for (uint32_t k = 0; k < COLS; k++) {
      const double product = ref_at(&w.w, i % ROWS, k) * x[i / ROWS * COLS + k];
      want += product;
      size += fabs(product);
    }
    const double share = cuda_f16_error(&f, 2) + (COLS + 4) * ULP_F32;
    cuda_assert_within(got[i], want, size * share + 1e-42, "products", i);
    if (i / ROWS % N_KINDS != PLAIN) continue;
    err += (got[i] - want) * (got[i] - want);
    norm += want * want;
  }
  // Rounding activations to BF16, which they all were before, errs by 0.0017.
  const double share = sqrt(err / norm);
  if (share > 0.0006) fail_msg("products err by %g of their norm", share);
  print_message("products err by %.5f of their norm\n", share);
  free(x), free(got);
  ref_free_weight(&w);
  cuda_close(&f);
}

// A token has the same bits beside others, whatever those are; one that is not finite has no
// finite products, and spoils no other.
TEST(tokens_in_company) {
  OPEN_F16(f);
  enum { FEWER = 66 };
  ref_weight w = draw_w(&f);
  float *x = draw_x(&f), *alone = malloc(FEWER * ROWS * sizeof *alone);
  float *beside = malloc(TOKENS * ROWS * sizeof *beside);
  run_linear(&f, &w, cuda_put_bf16(&f, x, FEWER * COLS), FEWER, alone);
  x[(TOKENS - 1) * COLS + 3] = INFINITY;
  x[(TOKENS - 2) * COLS + 300] = NAN;
  run_linear(&f, &w, cuda_put_bf16(&f, x, TOKENS * COLS), TOKENS, beside);
  assert_memory_equal(alone, beside, FEWER * ROWS * sizeof *alone);
  for (uint32_t r = 0; r < 2; r++) // whose codes are not zero
    assert_false(isfinite(beside[(TOKENS - 1) * ROWS + r]) ||
                 isfinite(beside[(TOKENS - 2) * ROWS + r]));
  free(x), free(alone), free(beside);
  ref_free_weight(&w);
  cuda_close(&f);
}

// Every E4M3 code, NaN included: with one column each, exact.
TEST(codes) {
  enum { CODES = 256, WIDTH = 16, MANY = 65 };
  OPEN_F16(f);
  static const float scale = 1;
  static uint8_t codes[CODES][WIDTH];
  for (uint32_t r = 0; r < CODES; r++)
    codes[r][r % WIDTH] = (uint8_t)r;
  const td_weight w = {.dtype = TD_F8E4M3,
                       .rows = CODES,
                       .cols = WIDTH,
                       .data = codes,
                       .scale = &scale,
                       .scale_dtype = TD_F32,
                       .scale_rows = CODES,
                       .scale_cols = WIDTH};
  static float ones[MANY * WIDTH], got[MANY * CODES];
  for (int k = 0; k < MANY * WIDTH; k++)
    ones[k] = 1;
  float *y = cuda_alloc(&f, sizeof got);
  td_op_linear(f.stream, &(td_linear_op_args){.w = &w,
                                              .x = cuda_put_bf16(&f, ones, MANY * WIDTH),
                                              .y = y,
                                              .x_stride = WIDTH,
                                              .y_stride = CODES,
                                              .n_tokens = MANY,
                                              .out_f32 = true});
  cuda_get(&f, got, y, sizeof got);
  for (uint32_t i = 0; i < MANY * CODES; i++) {
    const double want = ref_at(&w, i % CODES, i % WIDTH);
    if (isnan(want) ? !isnan(got[i]) : got[i] != (float)want)
      fail_msg("code %#x is %g, should be %g", i % CODES, (double)got[i], want);
  }
  cuda_close(&f);
}

// What becomes of queries, keys and values that were drawn.
typedef struct {
  layout l;
  int q, k, v;            // all are multiplied by 2 to these
  int k_spread, v_spread; // and those of a position by another power of two from this range
  bool outliers;          // some dims of keys and of values are 1,000 times the others
  bool equal;             // all are the same number, so that sums are as large as can be
  bool sink;              // the first key has much weight, and a value of zeros
} attention_case;

#define HEADS(name_, dim, n)                                                                       \
  .name = name_, .n_heads = 3, .n_kv_heads = 1, .head_dim = dim, .len = {n}, .page_tokens = 32,    \
  .n_seqs = 1, .kv_dtype = TD_BF16

static const attention_case cases[] = {
    {.l = {HEADS("plain", 128, 150)}},
    {.l = {HEADS("huge keys", 128, 140)}, .q = -100, .k = 100},
    {.l = {HEADS("huge queries", 64, 140)}, .q = 90, .k = -90},
    {.l = {HEADS("huge values", 128, 140)}, .v = 100},
    {.l = {HEADS("tiny values", 128, 140)}, .v = -60},
    {.l = {HEADS("keys and values of all sizes", 128, 200)},
     .q = -1,
     .k_spread = 4,
     .v_spread = 24},
    {.l = {HEADS("dims of all sizes", 128, 140)}, .outliers = true},
    {.l = {HEADS("the largest sums", 128, 200)}, .q = -8, .v = 12, .equal = true},
    {.l = {HEADS("a sink", 128, 200)}, .v = 60, .sink = true},
    {.l = {HEADS("a window and sinks", 128, 200), .window = 70, .has_sinks = true},
     .v = 14,
     .v_spread = 8},
    {.l = {HEADS("wide heads", 256, 140)}, .v = 14, .k_spread = 2, .v_spread = 8, .outliers = true},
};

static void change(world *w, const attention_case *c) {
  const uint32_t dim = w->l->head_dim, n = w->l->len[0];
  for (uint32_t i = 0; i < n * 3 * dim; i++) {
    float *q = &w->q[0][i];
    if (c->equal) *q = 0x1.fep0f;
    if (c->outliers && i % dim == 5) *q *= 0x1p-10f;
    if (c->sink && i % dim == 0) *q = 4;
    *q = as_bf16(ldexpf(*q, c->q));
  }
  for (uint32_t i = 0; i < n * dim; i++) {
    static int k_power, v_power;
    float *k = &w->k[0][i], *v = &w->v[0][i];
    if (i % dim == 0) {
      k_power = c->k_spread ? (int)ref_below(&w->f->rng, (uint32_t)c->k_spread) : 0;
      v_power = c->v_spread ? (int)ref_below(&w->f->rng, (uint32_t)c->v_spread) : 0;
    }
    if (c->equal) *k = *v = 0x1.fep0f;
    if (c->outliers && i % dim == 5) *k *= 0x1p10f;
    if (c->outliers && i % dim == 9) *v *= 0x1p10f;
    if (c->sink && i % dim == 0) *k = i == 0 ? 16 : 0;
    if (c->sink && i < dim) *v = 0;
    *k = as_bf16(ldexpf(*k, c->k - k_power));
    *v = as_bf16(ldexpf(*v, c->v - v_power));
  }
  memcpy(w->kept_k[0], w->k[0], (size_t)n * dim * sizeof **w->k);
  memcpy(w->kept_v[0], w->v[0], (size_t)n * dim * sizeof **w->v);
  make_keys(w);
}

// A prompt, and one on top of it.
TEST(attention) {
  for (size_t i = 0; i < TD_COUNT(cases); i++) {
    const layout *l = &cases[i].l;
    OPEN_F16(f);
    world w;
    make_world(&w, l, &f);
    change(&w, &cases[i]);
    w.prompt = true;
    const uint32_t steps[] = {0, l->len[0] - 37, l->len[0]};
    for (int j = 0; j < 2; j++)
      free(step(&w, &steps[j], &steps[j + 1]));
    cuda_close(&f);
    free_world(&w);
  }
}

// The share of the norm by which results err.
static double error_of(const layout *l, int q, bool in_f16) {
  OPEN_F16(f);
  ((td_cuda_dev *)f.dev)->uses.f16 = in_f16;
  world w;
  make_world(&w, l, &f);
  change(&w, &(attention_case){.q = q});
  w.prompt = true;
  const uint32_t n = l->len[0], dim = l->head_dim, from = 0;
  float *got = step(&w, &from, &n);
  double *ks = ref_doubles((size_t)n * dim), *vs = ref_doubles((size_t)n * dim);
  double out[256], slack[256], err = 0, norm = 0;
  for (uint32_t p = 0; p < n; p++)
    naive_key(&w, 0, p, 0, ks + (size_t)p * dim, vs + (size_t)p * dim);
  for (uint32_t p = 0; p < n * l->n_heads; p++) {
    naive_attention(&w, 0, p % l->n_heads, p / l->n_heads, ks, vs, out, slack);
    for (uint32_t d = 0; d < dim; d++) {
      err += (got[p * dim + d] - out[d]) * (got[p * dim + d] - out[d]);
      norm += out[d] * out[d];
    }
  }
  free(got), free(ks), free(vs);
  cuda_close(&f);
  free_world(&w);
  return sqrt(err / norm);
}

// Of exact queries and keys sums in F16 alone err, where BF16's are FP32's; weights err less. So
// with scores of a few units they err less than in BF16, and with large ones by less than rounding
// queries and keys to BF16 did.
TEST(attention_errs_as_in_bf16) {
  static const layout l = {HEADS("errors", 128, 160)};
  static const struct {
    int q;
    double most; // of BF16's error
  } sizes[] = {{0, 1}, {2, 1.1}, {4, 2}};
  for (size_t i = 0; i < TD_COUNT(sizes); i++) {
    const double f16 = error_of(&l, sizes[i].q, true), bf16 = error_of(&l, sizes[i].q, false);
    print_message("queries times 2^%d: in F16 %.5f of the norm, in BF16 %.5f\n", sizes[i].q, f16,
                  bf16);
    if (f16 > sizes[i].most * bf16) fail_msg("F16 errs by %g, BF16 by %g", f16, bf16);
  }
}
