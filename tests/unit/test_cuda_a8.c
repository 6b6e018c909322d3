// tests/unit/test_cuda_a8.c - products of the CUDA device with activations in E4M3 or INT8, against
// a reference that rounds by the same rule (td_cu_round_a8_args), written from its definition, and
// adds in double: what is left to differ are FP32 sums, by at most a unit of the sum of magnitudes
// for each addition.
// CTest: gpu slow no-tsan

#include "unit/cuda_test.h"
#include "unit/sanitized.h"

enum { BLOCK = 128 };

// What has a kernel of its own: matrices' dtype, and the emulator's compute capability, ten times.
typedef struct {
  td_dtype dtype;
  const char *capability;
} a8_form;

static const a8_form e4m3_89 = {TD_F8E4M3, "89"}, e4m3_90 = {TD_F8E4M3, "90"};
static const a8_form int8_80 = {TD_I8, "80"}, int8_90 = {TD_I8, "90"};

// What a sum of products may err by, as a share of their magnitudes. Tensor cores keep fewer bits
// of a sum of E4M3 than FP32 has, some 14 on sm_90 (arXiv 2412.19437, 3.3.2); the emulator keeps
// all, and sums of INT8 are exact.
static double sum_ulp(const a8_form *form, uint32_t n) {
  return (n + 8) * ULP_F32 + (is_emulated() || form->dtype == TD_I8 ? 0 : 0x1p-8);
}

// Whether the GPU, by its capability alone, does not have the instructions.
static bool is_too_old(const a8_form *form) {
  td_dev *dev;
  td_err err;
  if (td_dev_open(&dev, &(td_dev_opts){.kind = "cuda"}, &err) != TD_OK) return false;
  const int capability = ((const td_cuda_dev *)dev)->props.capability;
  td_dev_close(dev);
  return capability < (form->dtype == TD_I8 ? 80 : 89);
}

// A GPU with the instructions. A test is skipped where there is none, and fails where it is there
// and does not open.
static bool opens_a8(cuda_fixture *f, const a8_form *form) {
  const bool is_int8 = form->dtype == TD_I8;
  const td_dev_opts opts = {.kind = "cuda",
                            .activations = is_int8 ? TD_ACTIVATIONS_INT8 : TD_ACTIVATIONS_FP8};
  td_err err;
  if (is_emulated()) setenv("TANDEM_EMU_CAPABILITY", form->capability, 1);
  const td_status status = td_dev_open(&f->dev, &opts, &err);
  if (status != TD_OK) {
    if (getenv("TANDEM_CUDA_LIB") && !is_too_old(form)) fail_msg("%s", err.msg);
    print_message("skipped: %s\n", err.msg);
    return false;
  }
  ((td_cuda_dev *)f->dev)->page_bytes = 1;
  assert_int_equal(td_stream_open(&f->stream, f->dev, &err), TD_OK);
  return true;
}

// A test of each form.
#define FORMS(name)                                                                                \
  static void try_##name(const a8_form *form);                                                     \
  TEST(name##_e4m3_89) {                                                                           \
    try_##name(&e4m3_89);                                                                          \
  }                                                                                                \
  TEST(name##_e4m3_90) {                                                                           \
    try_##name(&e4m3_90);                                                                          \
  }                                                                                                \
  TEST(name##_int8_80) {                                                                           \
    try_##name(&int8_80);                                                                          \
  }                                                                                                \
  TEST(name##_int8_90) {                                                                           \
    try_##name(&int8_90);                                                                          \
  }                                                                                                \
  static void try_##name(const a8_form *form)

#define A8_OPEN(f)                                                                                 \
  cuda_fixture f = {.rng = 1};                                                                     \
  if (!opens_a8(&(f), form)) skip()

// ---- the reference ------------------------------------------------------------------------------

// The E4M3 value next to v, the even one of two; saturated.
static double nearest_e4m3(double v) {
  if (isnan(v)) return v;
  double best = 0, best_error = INFINITY;
  for (unsigned code = 0; code < 0x7f; code++) {
    const double value = ref_e4m3((uint8_t)code), error = fabs(value - fabs(v));
    if (error < best_error || (error == best_error && code % 2 == 0)) {
      best = value;
      best_error = error;
    }
  }
  return copysign(best, v);
}

static float nearest_bf16(float f) {
  uint32_t bits;
  memcpy(&bits, &f, sizeof bits);
  bits += 0x7fff + (bits >> 16 & 1);
  return (float)ref_bf16((uint16_t)(bits >> 16));
}

// What a row of n activations becomes: codes' values times their blocks' scales.
static void round_row(const a8_form *form, const float *x, uint32_t n, double *out) {
  const float largest = form->dtype == TD_I8 ? 127.0f : 448.0f;
  for (uint32_t k = 0; k < n; k += BLOCK) {
    const uint32_t end = k + BLOCK < n ? k + BLOCK : n;
    float most = 0x1p-100f;
    for (uint32_t i = k; i < end; i++)
      most = fmaxf(most, fabsf(x[i]));
    const float factor = largest / most, scale = most / largest;
    for (uint32_t i = k; i < end; i++) {
      const double value = form->dtype == TD_I8 ? nearbyint((double)x[i] * (double)factor)
                                                : nearest_e4m3((double)(x[i] * factor));
      out[i] = value * (double)scale;
    }
  }
}

// y[t][r] of rounded x, and the sum of the products' magnitudes.
static double product(const td_weight *w, uint32_t r, const double *x, double *magnitude) {
  double sum = 0;
  *magnitude = 0;
  for (uint32_t k = 0; k < w->cols; k++) {
    const double one = ref_at(w, r, k) * x[k];
    sum += one;
    *magnitude += fabs(one);
  }
  return sum;
}

// ---- linear -------------------------------------------------------------------------------------

typedef struct {
  uint32_t rows, cols, n_tokens, n_prompt, scale_rows, scale_cols;
  bool out_f32, has_bias, exact, is_offset, is_fine;
} linear_case;

// The tokens before the prompt's have results of a step without prompts, to the bit.
static void check_others(cuda_fixture *f, const linear_case *c, td_linear_op_args a,
                         const float *got) {
  a.n_tokens -= c->n_prompt;
  a.n_prompt = 0;
  if (!a.n_tokens || !c->out_f32) return;
  a.y = cuda_alloc(f, a.n_tokens * a.y_stride * sizeof(float));
  td_op_linear(f->stream, &a);
  float *alone = malloc(a.n_tokens * a.y_stride * sizeof *alone);
  cuda_get(f, alone, a.y, a.n_tokens * a.y_stride * sizeof *alone);
  for (uint32_t t = 0; t < a.n_tokens; t++)
    assert_memory_equal(alone + t * a.y_stride, got + t * a.y_stride, c->rows * sizeof *got);
  free(alone);
}

static void check_linear(cuda_fixture *f, const a8_form *form, const linear_case *c) {
  const uint32_t n = c->n_tokens, rows = c->rows, cols = c->cols;
  const size_t ldx = cols + (c->is_offset ? 3 : 8), ldy = rows + 5;
  ref_weight w = ref_make_weight(&f->rng, form->dtype, rows, cols, c->scale_rows, c->scale_cols);
  float *x = cuda_floats(f, n * ldx), *bias = ref_floats(&f->rng, rows);
  for (size_t i = 0; i < n * ldx; i++)
    if (i / 96 % 3 == 0) x[i] *= 0x1p-6f; // so that blocks' scales differ
  void *y = cuda_alloc(f, n * ldy * sizeof(float));
  const td_linear_op_args args = {.w = &w.w,
                                  .bias = {c->has_bias ? bias : NULL, TD_F32, rows},
                                  .x = cuda_put_bf16(f, x, n * ldx),
                                  .y = y,
                                  .x_stride = ldx,
                                  .y_stride = ldy,
                                  .n_tokens = n,
                                  .n_prompt = c->n_prompt,
                                  .out_f32 = c->out_f32,
                                  .exact = c->exact};
  td_op_linear(f->stream, &args);
  float *got = c->out_f32 ? malloc(n * ldy * sizeof *got) : cuda_get_bf16(f, y, n * ldy);
  if (c->out_f32) cuda_get(f, got, y, n * ldy * sizeof *got);
  check_others(f, c, args, got);
  double *row = ref_doubles(cols);
  for (uint32_t t = n - c->n_prompt; t < n; t++) {
    for (uint32_t k = 0; k < cols; k++)
      row[k] = x[t * ldx + k];
    if (!c->exact && !c->is_fine && c->n_prompt > 16) round_row(form, x + t * ldx, cols, row);
    for (uint32_t r = 0; r < rows; r++) {
      double magnitude, want = product(&w.w, r, row, &magnitude);
      if (c->has_bias) want += bias[r];
      const double slack = fabs(want) * (c->out_f32 ? ULP_F32 : ULP_BF16 / 2) +
                           magnitude * sum_ulp(form, cols);
      cuda_assert_within(got[t * ldy + r], want, slack, "linear", t * rows + r);
    }
  }
  free(row);
  free(x);
  free(bias);
  free(got);
  ref_free_weight(&w);
}

FORMS(linear) {
  static const linear_case cases[] = {
      {128, 256, 17, 17, 128, 128, .out_f32 = true},
      {40, 200, 33, 33, 128, 128, .out_f32 = true, .has_bias = true}, // rows of 8 bytes
      {136, 128, 64, 64, 128, 128, .out_f32 = false},
      {300, 392, 65, 65, 128, 128, .out_f32 = true}, // the larger tile
      {129, 640, 130, 130, 128, 128, .has_bias = true},
      {64, 520, 300, 300, 128, 256, .out_f32 = true}, // two steps have a scale
      {72, 136, 100, 100, 1, 136, .out_f32 = true},   // and each row
      {72, 264, 50, 50, 72, 264, .out_f32 = true},    // and the matrix
      {200, 384, 77, 77, 48, 128, .out_f32 = true},
      {24, 80, 40, 40, 24, 128, .out_f32 = true, .is_offset = true},   // rows of x as they come
      {136, 256, 60, 41, 128, 128, .out_f32 = true, .has_bias = true}, // decode's tokens first
      {136, 256, 90, 17, 128, 128, .out_f32 = true},
      {136, 256, 40, 16, 128, 128, .out_f32 = true},                // too few
      {40, 256, 60, 60, 128, 128, .out_f32 = true, .exact = true},  // a router
      {40, 256, 60, 60, 128, 64, .out_f32 = true, .is_fine = true}, // scales change in a block
      {264, 1160, 66, 66, 128, 128, .has_bias = true}, // more steps than stages, and two tiles
  };
  for (size_t i = 0; i < TD_COUNT(cases); i++) {
    linear_case c = cases[i];
    A8_OPEN(f);
    if (IS_ASAN && i % 3 != 0) c.rows = 24;
    check_linear(&f, form, &c);
    cuda_close(&f);
  }
}

// y [n][rows] of n tokens of a prompt, BF16 [n][cols].
static void multiply_prompt(cuda_fixture *f, const td_weight *w, const uint16_t *x, float *y,
                            uint32_t n) {
  td_op_linear(f->stream, &(td_linear_op_args){.w = w,
                                               .x = x,
                                               .y = y,
                                               .x_stride = w->cols,
                                               .y_stride = w->rows,
                                               .n_tokens = n,
                                               .n_prompt = n,
                                               .out_f32 = true});
}

// What is neither a number nor in range: NaN stays in its token, and so does infinity, as NaN.
FORMS(what_is_no_number) {
  enum { TOKENS = 20, ROWS = 32, COLS = 256 };
  A8_OPEN(f);
  ref_weight w = ref_make_weight(&f.rng, form->dtype, ROWS, COLS, 128, 128);
  float *x = cuda_floats(&f, TOKENS * COLS), got[TOKENS][ROWS];
  for (uint32_t k = 0; k < COLS; k++) {
    x[2 * COLS + k] = 0;
    x[7 * COLS + k] = 0x1p-120f; // below the least scale
    x[8 * COLS + k] = k % 2 ? 0x1p120f : 0;
  }
  x[3 * COLS + 130] = NAN;
  x[5 * COLS + 7] = INFINITY;
  float *y = cuda_alloc(&f, sizeof got);
  multiply_prompt(&f, &w.w, cuda_put_bf16(&f, x, TOKENS * COLS), y, TOKENS);
  cuda_get(&f, got, y, sizeof got);
  for (uint32_t t = 0; t < TOKENS; t++) {
    for (uint32_t r = 0; r < ROWS; r++) {
      assert_true((t == 3 || t == 5) == (bool)isnan(got[t][r]));
      if (t == 2) assert_true(got[t][r] == 0);
      if (t == 7) assert_true(fabsf(got[t][r]) < 0x1p-80f);
    }
  }
  free(x);
  ref_free_weight(&w);
  cuda_close(&f);
}

// A token's row is the same to the last bit with any neighbours, in tiles of 64 and of 128.
FORMS(alone_and_in_company) {
  enum { TOKENS = 200, ROWS = 136, COLS = 392 };
  A8_OPEN(f);
  ref_weight w = ref_make_weight(&f.rng, form->dtype, ROWS, COLS, 128, 128);
  float *values = cuda_floats(&f, TOKENS * COLS);
  uint16_t *x = cuda_put_bf16(&f, values, TOKENS * COLS);
  float *y = cuda_alloc(&f, TOKENS * ROWS * sizeof *y), got[2][ROWS];
  static const uint32_t sizes[][3] = {{17, 64, 17}, {60, 65, 60}, {64, 200, 64}, {130, 199, 130}};
  for (size_t i = 0; i < TD_COUNT(sizes); i++) {
    for (int j = 0; j < 2; j++) {
      multiply_prompt(&f, &w.w, x, y, sizes[i][j]);
      cuda_get(&f, got[j], y + (size_t)(sizes[i][2] - 1) * ROWS, sizeof got[j]);
    }
    assert_memory_equal(got[0], got[1], sizeof got[0]);
  }
  free(values);
  ref_free_weight(&w);
  cuda_close(&f);
}

// ---- experts ------------------------------------------------------------------------------------

enum { DIM = 200, HIDDEN = 136, EXPERTS = 5, TOP_K = 2 };

typedef struct {
  ref_weight matrices[3][EXPERTS];
  td_weight w[3][EXPERTS]; // gate, up, down
} experts;

static experts make_experts(cuda_fixture *f, const a8_form *form) {
  experts e;
  for (int i = 0; i < EXPERTS; i++) {
    e.matrices[0][i] = ref_make_weight(&f->rng, form->dtype, HIDDEN, DIM, 128, 128);
    e.matrices[1][i] = ref_make_weight(&f->rng, form->dtype, HIDDEN, DIM, 128, 128);
    e.matrices[2][i] = ref_make_weight(&f->rng, form->dtype, DIM, HIDDEN, 128, 128);
    for (int m = 0; m < 3; m++)
      e.w[m][i] = e.matrices[m][i].w;
  }
  return e;
}

static void free_experts(experts *e) {
  for (int i = 0; i < 3 * EXPERTS; i++)
    ref_free_weight(&e->matrices[i / EXPERTS][i % EXPERTS]);
}

// A step of codes where a rounded value is, in a block of that largest magnitude.
static double step_of(const a8_form *form, double value, double most) {
  return form->dtype == TD_I8 ? most / 127 : fabs(value) / 8 + most / 448 * 0x1p-9;
}

// Adds an expert's weighted result, and twice what it may err by. Rounding magnifies what hidden
// values err by, to a step of codes at most where they are nearly a tie: of E4M3 1/16 of a value,
// or 2^-10 of the block's largest over 448.
static void add_expert(const a8_form *form, const experts *e, uint32_t idx, const double *x,
                       double weight, double *out, double *slack) {
  float hidden[HIDDEN];
  double rounded[HIDDEN], err[HIDDEN], most = 0;
  for (uint32_t r = 0; r < HIDDEN; r++) {
    double g_size, u_size;
    const double g = product(&e->w[0][idx], r, x, &g_size);
    const double u = product(&e->w[1][idx], r, x, &u_size);
    const double h = g / (1 + exp(-g)) * u;
    hidden[r] = nearest_bf16((float)h);
    err[r] = fabs(h) * ULP_BF16 + 2 * (fabs(u) * g_size + fabs(g) * u_size) * sum_ulp(form, DIM);
    most = fmax(most, fabs(h));
  }
  round_row(form, hidden, HIDDEN, rounded);
  for (uint32_t r = 0; r < DIM; r++) {
    double magnitude;
    out[r] += weight * product(&e->w[2][idx], r, rounded, &magnitude);
    for (uint32_t k = 0; k < HIDDEN; k++) {
      const double step = step_of(form, rounded[k], most);
      slack[r] += fabs(weight * ref_at(&e->w[2][idx], r, k)) *
                  (err[k] < step / 2 ? step : err[k] + step);
    }
  }
}

// Experts of all tokens, or of those of a prompt behind those of decode. How far results are from
// the reference, as a share of their norm: errors of single values may be a step of codes, but not
// of all.
static double run_moe(cuda_fixture *f, const a8_form *form, uint32_t n, uint32_t n_prompt,
                      bool is_routed, float *got) {
  experts e = make_experts(f, form);
  const uint32_t k = is_routed ? TOP_K : 1;
  float *x = cuda_floats(f, (size_t)n * DIM), *weights = ref_floats(&f->rng, (size_t)n * k);
  int32_t *ids = malloc((size_t)n * k * sizeof *ids);
  for (uint32_t i = 0; i < n * k; i++) // distinct; of expert 0 most
    ids[i] = i % k == 0 ? (int32_t)ref_below(&f->rng, 2) : 2 + (int32_t)ref_below(&f->rng, 3);
  float *out = cuda_alloc(f, (size_t)n * DIM * sizeof *out);
  td_op_moe(
      f->stream,
      &(td_moe_args){.gate = e.w[0],
                     .up = e.w[1],
                     .down = e.w[2],
                     .x = cuda_put_bf16(f, x, (size_t)n * DIM),
                     .ids = is_routed ? cuda_put(f, ids, n * k * sizeof *ids) : NULL,
                     .weights = is_routed ? cuda_put(f, weights, n * k * sizeof *weights) : NULL,
                     .out = out,
                     .n_tokens = n,
                     .n_prompt = n_prompt,
                     .n_experts = is_routed ? EXPERTS : 1,
                     .top_k = k,
                     .out_f32 = true});
  cuda_get(f, got, out, (size_t)n * DIM * sizeof *got);
  double error = 0, norm = 0;
  for (uint32_t t = n - n_prompt; t < n; t++) {
    double row[DIM], want[DIM] = {0}, slack[DIM] = {0};
    round_row(form, x + (size_t)t * DIM, DIM, row);
    for (uint32_t j = 0; j < k; j++)
      add_expert(form, &e, is_routed ? (uint32_t)ids[t * k + j] : 0, row,
                 is_routed ? (double)weights[t * k + j] : 1, want, slack);
    for (uint32_t r = 0; r < DIM; r++) {
      const double v = got[(size_t)t * DIM + r];
      cuda_assert_within(v, want[r], slack[r], "experts", t * DIM + r);
      error += (v - want[r]) * (v - want[r]);
      norm += want[r] * want[r];
    }
  }
  free(x);
  free(weights);
  free(ids);
  free_experts(&e);
  return sqrt(error / norm);
}

FORMS(experts) {
  static const uint32_t sizes[][2] = {{17, 17}, {100, 100}, {200, 200}, {70, 40}};
  for (size_t i = 0; i < 2 * TD_COUNT(sizes); i++) {
    const bool is_large = form == &e4m3_90 || form == &int8_90; // their tiles are
    if ((IS_ASAN || is_large) && i % 3 != 0) continue;
    const uint32_t n = sizes[i / 2][0], n_prompt = sizes[i / 2][1];
    A8_OPEN(f);
    float *got = malloc((size_t)n * DIM * sizeof *got);
    const double error = run_moe(&f, form, n, n_prompt, i % 2, got);
    if (!(error < (is_emulated() ? 0.002 : 0.01)))
      fail_msg("%u of %u tokens err by %g of their norm", n_prompt, n, error);
    free(got);
    cuda_close(&f);
  }
}

// Passes that scratch memory cuts do not change a bit.
FORMS(experts_in_passes) {
  enum { TOKENS = 120 };
  static float got[2][TOKENS * DIM];
  for (int i = 0; i < 2; i++) {
    A8_OPEN(f);
    if (i) ((td_cuda_dev *)f.dev)->pass_bytes = 50 * TOP_K * (HIDDEN * 10 + 300);
    run_moe(&f, form, TOKENS, TOKENS, true, got[i]);
    cuda_close(&f);
  }
  assert_memory_equal(got[0], got[1], sizeof got[0]);
}

// Where sums of E4M3 have all bits of FP32, on the emulator, a GPU of sm_90 has the results of
// others. Those of INT8 are exact everywhere.
TEST(forms_agree) {
  enum { TOKENS = 130, ROWS = 300, COLS = 392 };
  static const a8_form *const forms[][2] = {{&e4m3_89, &e4m3_90}, {&int8_80, &int8_90}};
  static const uint32_t scales[][2] = {{128, 128}, {1, COLS}};
  static float got[2][TOKENS * ROWS];
  if (!is_emulated()) skip();
  for (size_t i = 0; i < TD_COUNT(scales) * TD_COUNT(forms); i++) {
    const uint32_t *const scale = scales[i % TD_COUNT(scales)];
    for (size_t j = 0; j < 2; j++) {
      const a8_form *form = forms[i / TD_COUNT(scales)][j];
      cuda_fixture f = {.rng = 1};
      if (!opens_a8(&f, form)) skip();
      ref_weight w = ref_make_weight(&f.rng, form->dtype, ROWS, COLS, scale[0], scale[1]);
      float *x = cuda_floats(&f, TOKENS * COLS), *y = cuda_alloc(&f, sizeof got[j]);
      multiply_prompt(&f, &w.w, cuda_put_bf16(&f, x, TOKENS * COLS), y, TOKENS);
      cuda_get(&f, got[j], y, sizeof got[j]);
      free(x);
      ref_free_weight(&w);
      cuda_close(&f);
    }
    assert_memory_equal(got[0], got[1], sizeof got[0]);
  }
}

// ---- what cannot be -----------------------------------------------------------------------------

TEST(gpu_without_f8) {
  td_dev *dev;
  td_err err;
  if (!is_emulated()) skip();
  setenv("TANDEM_EMU_CAPABILITY", "86", 1);
  const td_dev_opts opts = {.kind = "cuda", .activations = TD_ACTIVATIONS_FP8};
  assert_int_equal(td_dev_open(&dev, &opts, &err), TD_EUNSUPPORTED);
  unsetenv("TANDEM_EMU_CAPABILITY");
  assert_non_null(strstr(err.msg, "--activations fp8"));
  assert_non_null(strstr(err.msg, "8.6"));
  assert_non_null(strstr(err.msg, "--activations auto"));
}
