// tests/unit/test_device_moe.c - the CPU device's experts against naive ones in double.

#include "base/bf16.h"
#include "device/cpu/tuner.h"
#include "tandem/kernels.h"
#include "unit/device_test.h"
#include "unit/sanitized.h"

enum { DIM = 72, HIDDEN = 56, EXPERTS = 9, TOP_K = 3 };

typedef struct {
  ref_weight gate[EXPERTS], up[EXPERTS], down[EXPERTS];
  td_weight g[EXPERTS], u[EXPERTS], d[EXPERTS];
} experts;

static void make_experts(experts *e, uint64_t *rng, td_dtype dtype) {
  for (int i = 0; i < EXPERTS; i++) {
    e->gate[i] = ref_make_weight(rng, dtype, HIDDEN, DIM, 32, 32);
    e->up[i] = ref_make_weight(rng, dtype, HIDDEN, DIM, 32, 32);
    e->down[i] = ref_make_weight(rng, dtype, DIM, HIDDEN, 32, 32);
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

static double naive_activation(double g, bool gelu) {
  const double z = 0.79788456080286536 * (g + 0.044715 * g * g * g);
  return gelu ? 0.5 * g * (1 + tanh(z)) : g / (1 + exp(-g));
}

static void naive_expert(const experts *e, int idx, const float *x, double weight, bool gelu,
                         double *out) {
  double h[HIDDEN];
  for (uint32_t r = 0; r < HIDDEN; r++) {
    double g = 0, u = 0;
    for (uint32_t k = 0; k < DIM; k++) {
      g += ref_at(&e->g[idx], r, k) * x[k];
      u += ref_at(&e->u[idx], r, k) * x[k];
    }
    h[r] = naive_activation(g, gelu) * u;
  }
  for (uint32_t r = 0; r < DIM; r++) {
    for (uint32_t k = 0; k < HIDDEN; k++)
      out[r] += weight * ref_at(&e->d[idx], r, k) * h[k];
  }
}

// The whole operator, with f32 activations.
static void naive_moe(const experts *e, const td_moe_args *a, double *want) {
  const float *x = a->x, *before = a->out;
  for (uint32_t i = 0; i < a->n_tokens * DIM; i++)
    want[i] = a->accumulate ? before[i] : 0;
  for (uint32_t pair = 0; pair < a->n_tokens * a->top_k; pair++) {
    const uint32_t at = pair / a->top_k * DIM;
    naive_expert(e, a->ids ? a->ids[pair] : 0, x + at, a->weights ? a->weights[pair] : 1, a->gelu,
                 want + at);
  }
}

// A token alone, of a prompt or not, gives the same bits as in the batch.
static void check_alone(device_fixture *f, td_moe_args args) {
  float *out = args.out;
  td_op_moe(f->stream, &args);
  for (uint32_t t = 0; t < args.n_tokens; t += 41) {
    float alone[DIM];
    td_moe_args one = args;
    one.n_tokens = 1;
    one.n_prompt = t >= args.n_tokens - args.n_prompt;
    one.x = (const float *)args.x + t * DIM;
    one.ids = args.ids + t * TOP_K;
    one.weights = args.weights + t * TOP_K;
    one.out = alone;
    td_op_moe(f->stream, &one);
    device_sync(f);
    assert_memory_equal(alone, out + t * DIM, sizeof alone);
  }
}

TEST(moe) {
  enum { TOKENS = 210, PROMPT = 128 };
  static const td_dtype dtypes[] = {TD_BF16, TD_F8E4M3};
  device_fixture f;
  FOR_TEAMS(f) {
    for (size_t c = 0; c < TD_COUNT(dtypes); c++) {
      experts e;
      make_experts(&e, &f.rng, dtypes[c]);
      float *x = ref_floats(&f.rng, TOKENS * DIM), *out = ref_floats(&f.rng, TOKENS * DIM);
      float *weights = ref_floats(&f.rng, TOKENS * TOP_K);
      int32_t ids[TOKENS * TOP_K];
      for (int i = 0; i < TOKENS * TOP_K; i++) { // expert 8 gets none, expert 0 most
        ids[i] = i % 3 ? (int32_t)ref_below(&f.rng, EXPERTS - 1) : 0;
      }
      double *want = ref_doubles(TOKENS * DIM);
      td_moe_args args = {.gate = e.g,
                          .up = e.u,
                          .down = e.d,
                          .x = x,
                          .ids = ids,
                          .weights = weights,
                          .out = out,
                          .n_tokens = TOKENS,
                          .n_prompt = PROMPT,
                          .n_experts = EXPERTS,
                          .top_k = TOP_K,
                          .accumulate = true};
      naive_moe(&e, &args, want);
      td_op_moe(f.stream, &args);
      device_sync(&f);
      device_assert_close(out, want, TOKENS * DIM, 2e-6);
      args.accumulate = false;
      check_alone(&f, args);
      td_kernels_use_activations(TD_ACTIVATIONS_AUTO);
      check_alone(&f, args);
      td_kernels_use_activations(TD_ACTIVATIONS_F32);
      // Dense: expert 0, weight 1.
      args.ids = NULL;
      args.weights = NULL;
      args.top_k = 1;
      naive_moe(&e, &args, want);
      td_op_moe(f.stream, &args);
      device_sync(&f);
      device_assert_close(out, want, TOKENS * DIM, 2e-6);
      args.gelu = true;
      naive_moe(&e, &args, want);
      td_op_moe(f.stream, &args);
      device_sync(&f);
      device_assert_close(out, want, TOKENS * DIM, 2e-6);
      free(x);
      free(out);
      free(weights);
      free(want);
      free_experts(&e);
    }
  }
}

// Rows of gate and up alternate; biases; a clamp that values reach on either side.
static void naive_pairs(const td_moe_args *a, int idx, const float *x, double weight, double *out) {
  double h[HIDDEN / 2];
  for (uint32_t r = 0; r < HIDDEN / 2; r++) {
    double g = a->gate_bias[idx * HIDDEN + 2 * r], u = a->gate_bias[idx * HIDDEN + 2 * r + 1];
    for (uint32_t k = 0; k < DIM; k++) {
      g += ref_at(&a->gate[idx], 2 * r, k) * x[k];
      u += ref_at(&a->gate[idx], 2 * r + 1, k) * x[k];
    }
    g = fmin(g, a->limit);
    u = fmax(fmin(u, a->limit), -a->limit);
    h[r] = g / (1 + exp(-a->alpha * g)) * (u + 1);
  }
  for (uint32_t r = 0; r < DIM; r++) {
    double sum = a->down_bias[idx * DIM + r];
    for (uint32_t k = 0; k < HIDDEN / 2; k++)
      sum += ref_at(&a->down[idx], r, k) * h[k];
    out[r] += weight * sum;
  }
}

TEST(moe_of_pairs) {
  enum { TOKENS = 210, PROMPT = 128 };
  device_fixture f;
  FOR_TEAMS(f) {
    ref_weight gate[EXPERTS], down[EXPERTS];
    td_weight g[EXPERTS], d[EXPERTS];
    for (int i = 0; i < EXPERTS; i++) {
      gate[i] = ref_make_weight(&f.rng, TD_BF16, HIDDEN, DIM, 0, 0);
      down[i] = ref_make_weight(&f.rng, TD_BF16, DIM, HIDDEN / 2, 0, 0);
      g[i] = gate[i].w;
      d[i] = down[i].w;
    }
    float *x = ref_floats(&f.rng, TOKENS * DIM), *out = ref_floats(&f.rng, TOKENS * DIM);
    float *weights = ref_floats(&f.rng, TOKENS * TOP_K);
    float *gate_bias = ref_floats(&f.rng, EXPERTS * HIDDEN);
    float *down_bias = ref_floats(&f.rng, EXPERTS * DIM);
    int32_t ids[TOKENS * TOP_K];
    for (int i = 0; i < TOKENS * TOP_K; i++)
      ids[i] = (int32_t)ref_below(&f.rng, EXPERTS);
    td_moe_args args = {.gate = g,
                        .down = d,
                        .gate_bias = gate_bias,
                        .down_bias = down_bias,
                        .limit = 0.6f,
                        .alpha = 1.7f,
                        .pairs = true,
                        .x = x,
                        .ids = ids,
                        .weights = weights,
                        .out = out,
                        .n_tokens = TOKENS,
                        .n_prompt = PROMPT,
                        .n_experts = EXPERTS,
                        .top_k = TOP_K};
    double *want = ref_doubles(TOKENS * DIM);
    for (int t = 0; t < TOKENS; t++) {
      for (int j = 0; j < TOP_K; j++)
        naive_pairs(&args, ids[t * TOP_K + j], x + t * DIM, weights[t * TOP_K + j], want + t * DIM);
    }
    td_op_moe(f.stream, &args);
    device_sync(&f);
    device_assert_close(out, want, TOKENS * DIM, 2e-6);
    check_alone(&f, args);
    for (int i = 0; i < EXPERTS; i++) {
      ref_free_weight(&gate[i]);
      ref_free_weight(&down[i]);
    }
    free(x);
    free(out);
    free(weights);
    free(gate_bias);
    free(down_bias);
    free(want);
  }
}

static uint16_t *rounded(const float *x, size_t n) {
  uint16_t *out = malloc(n * sizeof *out);
  td_bf16_of_n(out, x, n);
  return out;
}

// Some of the experts at a time, one of which nobody has chosen.
TEST(moe_in_groups) {
  enum { TOKENS = 210, PROMPT = 128, GROUP = 4 };
  device_fixture f;
  FOR_TEAMS(f) {
    experts e;
    make_experts(&e, &f.rng, TD_F8E4M3);
    float *x = ref_floats(&f.rng, TOKENS * DIM), *out = ref_floats(&f.rng, TOKENS * DIM);
    float *sum = ref_floats(&f.rng, TOKENS * DIM), *weights = ref_floats(&f.rng, TOKENS * TOP_K);
    double *want = ref_doubles(TOKENS * DIM);
    int32_t ids[TOKENS * TOP_K];
    for (int i = 0; i < TOKENS * TOP_K; i++)
      ids[i] = (int32_t)ref_below(&f.rng, EXPERTS - 1);
    td_moe_args args = {.x = x,
                        .ids = ids,
                        .weights = weights,
                        .out = out,
                        .n_tokens = TOKENS,
                        .n_prompt = PROMPT,
                        .top_k = TOP_K,
                        .accumulate = true};
    naive_moe(&e, &args, want);
    args.out = sum;
    args.n_routed = EXPERTS;
    args.out_f32 = args.weights_on_device = true;
    for (uint32_t first = 0; first < EXPERTS; first += GROUP) {
      args.gate = e.g + first;
      args.up = e.u + first;
      args.down = e.d + first;
      args.first_expert = first;
      args.n_experts = first + GROUP < EXPERTS ? GROUP : EXPERTS - first;
      args.accumulate = first > 0;
      td_op_moe(f.stream, &args);
    }
    td_op_add_f32(f.stream, out, sum, TOKENS * DIM);
    device_sync(&f);
    device_assert_close(out, want, TOKENS * DIM, 2e-6);
    free(x);
    free(out);
    free(sum);
    free(weights);
    free(want);
    free_experts(&e);
  }
}

// BF16 in and out: what f32 gives for the same activations, rounded once.
TEST(moe_of_bf16) {
  enum { TOKENS = (1 << 17) / DIM + 1 }; // so many that widening them is shared out
  device_fixture f;
  device_open(&f, 3);
  experts e;
  make_experts(&e, &f.rng, TD_F8E4M3);
  float *x = ref_floats(&f.rng, TOKENS * DIM), *out = ref_floats(&f.rng, TOKENS * DIM);
  float *weights = ref_floats(&f.rng, TOKENS * TOP_K);
  uint16_t *x16 = rounded(x, TOKENS * DIM), *out16 = rounded(out, TOKENS * DIM);
  td_bf16_values(x, x16, TOKENS * DIM);
  td_bf16_values(out, out16, TOKENS * DIM);
  int32_t *ids = malloc(TOKENS * TOP_K * sizeof *ids);
  for (int i = 0; i < TOKENS * TOP_K; i++)
    ids[i] = (int32_t)ref_below(&f.rng, EXPERTS);
  td_moe_args args = {.gate = e.g,
                      .up = e.u,
                      .down = e.d,
                      .ids = ids,
                      .weights = weights,
                      .n_tokens = TOKENS,
                      .n_prompt = TOKENS / 2,
                      .n_experts = EXPERTS,
                      .top_k = TOP_K};
  for (int accumulate = 1; accumulate >= 0; accumulate--) {
    args.accumulate = accumulate;
    args.is_bf16 = false;
    args.x = x;
    args.out = out;
    td_op_moe(f.stream, &args);
    args.is_bf16 = true;
    args.x = x16;
    args.out = out16;
    td_op_moe(f.stream, &args);
    device_sync(&f);
    uint16_t *want = rounded(out, TOKENS * DIM);
    assert_memory_equal(out16, want, TOKENS * DIM * sizeof *want);
    free(want);
  }
  free(x);
  free(out);
  free(weights);
  free(x16);
  free(out16);
  free(ids);
  free_experts(&e);
  device_close(&f);
}

// How many rows a call has is tried out while matrices this large are computed.
TEST(trials_change_no_bit) {
  enum { ROWS = 1040, COLS = 1024, TOKENS = 40, RUNS = 2 * TD_TUNER_ROUND };
  _Static_assert(ROWS * COLS >= TD_TUNER_WEIGHTS, "is tried");
  static const td_dtype dtypes[] = {TD_F8E4M3, TD_I4};
  device_fixture f;
  device_open(&f, 3);
  td_kernels_use_activations(TD_ACTIVATIONS_AUTO);
  for (size_t c = IS_TSAN; c < TD_COUNT(dtypes); c++) {
    ref_weight gate = ref_make_weight(&f.rng, dtypes[c], ROWS, COLS, 1, 128);
    ref_weight down = ref_make_weight(&f.rng, dtypes[c], COLS, ROWS, 1, 1040);
    float *x = ref_floats(&f.rng, TOKENS * COLS), *first = ref_floats(&f.rng, TOKENS * COLS);
    float *out = ref_floats(&f.rng, TOKENS * COLS), *y = ref_floats(&f.rng, TOKENS * ROWS);
    float *first_y = ref_floats(&f.rng, TOKENS * ROWS);
    td_moe_args args = {.gate = &gate.w,
                        .up = &gate.w,
                        .down = &down.w,
                        .x = x,
                        .out = first,
                        .n_tokens = TOKENS,
                        .n_prompt = TOKENS / 2,
                        .n_experts = 1,
                        .top_k = 1};
    td_linear_op_args linear = {.w = &gate.w,
                                .x = x,
                                .y = first_y,
                                .x_stride = COLS,
                                .y_stride = ROWS,
                                .n_tokens = TOKENS,
                                .n_prompt = TOKENS / 2};
    for (int run = 0; run < RUNS; run++) {
      td_op_linear(f.stream, &linear); // which is not the same operator with the same matrix
      td_op_moe(f.stream, &args);
      device_sync(&f);
      if (run > 0) {
        assert_memory_equal(out, first, TOKENS * COLS * sizeof *out);
        assert_memory_equal(y, first_y, TOKENS * ROWS * sizeof *y);
      }
      args.out = out;
      linear.y = y;
    }
    ref_free_weight(&gate);
    ref_free_weight(&down);
    free(x);
    free(first);
    free(out);
    free(y);
    free(first_y);
  }
  td_kernels_use_activations(TD_ACTIVATIONS_F32);
  device_close(&f);
}

TEST(an_expert_that_is_none) {
  device_fixture f;
  device_open(&f, 2);
  experts e;
  make_experts(&e, &f.rng, TD_BF16);
  float x[DIM] = {0}, weight = 1;
  int32_t expert = EXPERTS;
  td_moe_args moe = {.gate = e.g,
                     .up = e.u,
                     .down = e.d,
                     .x = x,
                     .ids = &expert,
                     .weights = &weight,
                     .out = x,
                     .n_tokens = 1,
                     .n_experts = EXPERTS,
                     .top_k = 1};
  for (int is_part = 0; is_part < 2; is_part++) { // nor is it one of the others
    td_op_moe(f.stream, &moe);
    device_expect_failure(&f, "id 9");
    device_reopen_stream(&f);
    moe.n_experts = 2;
    moe.first_expert = 3;
    moe.n_routed = EXPERTS;
  }
  free_experts(&e);
  device_close(&f);
}

// Moves the weights of all experts into one block, in stripes on the nodes.
static td_stripes move_to_stripes(experts *e, unsigned n_nodes) {
  enum { STRIPE = 1000 };
  td_weight *const parts[] = {e->g, e->u, e->d};
  const size_t n_bytes = EXPERTS * 3 * td_weight_data_bytes(&e->g[0]);
  char *block = malloc(n_bytes), *at = block;
  for (int i = 0; i < EXPERTS; i++) {
    for (size_t k = 0; k < TD_COUNT(parts); k++) {
      td_weight *w = &parts[k][i];
      memcpy(at, w->data, td_weight_data_bytes(w));
      w->data = at;
      at += td_weight_data_bytes(w);
    }
  }
  return (td_stripes){block, n_bytes, STRIPE, n_nodes};
}

// Gate and up are items of their own then: the same bits, and every byte of a chosen expert is read
// once, by threads on either node.
TEST(moe_in_stripes) {
  enum { TOKENS = 40, NODES = 2, PAGE = 100 };
  const td_nodes nodes = {.n = NODES, .is_fake = true};
  uint64_t rng = 3;
  td_err err;
  td_dev *dev;
  td_stream *stream;
  experts e;
  make_experts(&e, &rng, TD_BF16);
  const td_dev_opts opts = {.kind = "cpu", .n_threads = 3, .nodes = &nodes};
  assert_int_equal(td_dev_open(&dev, &opts, &err), TD_OK);
  assert_int_equal(td_stream_open(&stream, dev, &err), TD_OK);
  float *x = ref_floats(&rng, TOKENS * DIM), *weights = ref_floats(&rng, TOKENS * TOP_K);
  float *out[2] = {ref_floats(&rng, TOKENS * DIM), ref_floats(&rng, TOKENS * DIM)};
  int32_t ids[TOKENS * TOP_K];
  for (int i = 0; i < TOKENS * TOP_K; i++)
    ids[i] = i % 3 == 0 ? 0 : 1 + (int32_t)ref_below(&rng, EXPERTS - 2); // the last gets none
  const td_stripes stripes = move_to_stripes(&e, NODES);
  static uint8_t page_node[1 << 16];
  assert_true(td_stripes_where(&stripes, &nodes, PAGE, page_node));
  for (int n_tokens = 1; n_tokens <= TOKENS; n_tokens += TOKENS - 1) {
    td_dev_reads reads = {.page_node = page_node, .page_bytes = PAGE};
    bool is_chosen[EXPERTS] = {false};
    uint64_t wanted = 0, counted = 0;
    for (int i = 0; i < n_tokens * TOP_K; i++) {
      if (!is_chosen[ids[i]]) wanted += 3 * td_weight_data_bytes(&e.g[0]);
      is_chosen[ids[i]] = true;
    }
    for (int is_placed = 0; is_placed < 2; is_placed++) {
      td_dev_use_stripes(dev, is_placed ? &stripes : &(td_stripes){.base = NULL});
      td_dev_count_reads(dev, is_placed ? &reads : NULL);
      td_op_moe(stream, &(td_moe_args){.gate = e.g,
                                       .up = e.u,
                                       .down = e.d,
                                       .x = x,
                                       .ids = ids,
                                       .weights = weights,
                                       .out = out[is_placed],
                                       .n_tokens = (uint32_t)n_tokens,
                                       .n_experts = EXPERTS,
                                       .top_k = TOP_K});
      assert_int_equal(td_stream_sync(stream, &err), TD_OK);
    }
    assert_memory_equal(out[0], out[1], (size_t)n_tokens * DIM * sizeof *x);
    for (unsigned by = 0; by < NODES; by++) {
      for (unsigned of = 0; of < NODES; of++)
        counted += reads.n_bytes[by][of];
    }
    assert_int_equal(counted, wanted);
  }
  td_stream_close(stream);
  td_dev_close(dev);
  free((void *)(uintptr_t)stripes.base);
  free(x);
  free(weights);
  free(out[0]);
  free(out[1]);
  free_experts(&e);
}
