// tests/unit/test_cuda_router.c - the CUDA device's choices against naive ones: experts by their
// router's logits, and the most probable tokens.
// CTest: gpu no-tsan

#include "unit/cuda_test.h"
#include "unit/sanitized.h"

typedef struct {
  td_router_kind kind;
  uint32_t n_experts, top_k, n_groups, topk_groups;
  bool norm, bias, has_table;
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

// fixed: the table's row, or NULL.
static void naive_route(const router_case *c, const float *logits, const float *bias,
                        const int32_t *fixed, int32_t *ids, double *weights) {
  double score[512], choice[512], total = 0;
  for (uint32_t e = 0; e < c->n_experts; e++)
    total += exp(logits[e]);
  for (uint32_t e = 0; e < c->n_experts; e++) {
    score[e] = c->kind == TD_ROUTER_SOFTMAX   ? exp(logits[e]) / total
               : c->kind == TD_ROUTER_SIGMOID ? 1 / (1 + exp(-(double)logits[e]))
                                              : sqrt(log1p(exp(logits[e])));
    choice[e] = score[e] + (c->bias ? bias[e] : 0);
  }
  if (c->n_groups > 1) drop_groups(c, choice);
  take(choice, c->n_experts, c->top_k, ids);
  if (fixed) memcpy(ids, fixed, c->top_k * sizeof *ids);
  double sum = 0;
  for (uint32_t j = 0; j < c->top_k; j++)
    sum += score[ids[j]];
  for (uint32_t j = 0; j < c->top_k; j++)
    weights[j] = score[ids[j]] / (c->norm ? fmax(sum, c->bias ? 0.25 : 0) : 1) * 2.5;
}

TEST(router) {
  static const router_case cases[] = {{TD_ROUTER_SOFTMAX, 128, 8, 0, 0, true, false, false},
                                      {TD_ROUTER_SOFTMAX, 7, 2, 1, 1, false, false, false},
                                      {TD_ROUTER_SOFTMAX, 12, 4, 3, 2, true, false, false},
                                      {TD_ROUTER_SOFTMAX, 64, 6, 1, 1, true, true, false},
                                      {TD_ROUTER_SIGMOID, 256, 8, 8, 4, true, true, false},
                                      {TD_ROUTER_SIGMOID, 64, 6, 1, 1, true, true, false},
                                      {TD_ROUTER_SIGMOID, 12, 4, 3, 1, false, false, false},
                                      {TD_ROUTER_SOFTPLUS, 256, 6, 1, 1, true, true, false},
                                      {TD_ROUTER_SOFTPLUS, 40, 6, 1, 1, true, false, true}};
  enum { TOKENS = 20, MAX_K = 8, VOCAB = 7 };
  for (size_t i = 0; i < TD_COUNT(cases); i++) {
    CUDA_OPEN(f); // each its own: a device knows biases and tables by their address
    const router_case *c = &cases[i];
    uint32_t n = c->n_experts, k = c->top_k;
    float *logits = ref_floats(&f.rng, TOKENS * n), *bias = ref_floats(&f.rng, n);
    for (size_t j = 0; j < (size_t)TOKENS * n; j++)
      logits[j] *= c->kind == TD_ROUTER_SOFTPLUS && j % 50 == 7 ? 40 : 4;
    int32_t table[VOCAB * MAX_K], tokens[TOKENS];
    for (uint32_t j = 0; j < VOCAB * k; j++) // distinct in a row
      table[j] = (int32_t)(j % k * (n / k) + ref_below(&f.rng, n / k));
    for (int t = 0; t < TOKENS; t++)
      tokens[t] = (int32_t)ref_below(&f.rng, VOCAB);
    int32_t ids[TOKENS * MAX_K], *dev_ids = cuda_alloc(&f, TOKENS * k * sizeof *ids);
    float weights[TOKENS * MAX_K], *dev_weights = cuda_alloc(&f, TOKENS * k * sizeof *weights);
    td_op_router(f.stream,
                 &(td_router_args){.logits = cuda_put(&f, logits, TOKENS * n * sizeof *logits),
                                   .bias = c->bias ? bias : NULL,
                                   .ids = dev_ids,
                                   .weights = dev_weights,
                                   .table = c->has_table ? table : NULL,
                                   .tokens = cuda_put(&f, tokens, sizeof tokens),
                                   .kind = c->kind,
                                   .n_tokens = TOKENS,
                                   .n_vocab = VOCAB,
                                   .n_experts = n,
                                   .top_k = k,
                                   .n_groups = c->n_groups,
                                   .topk_groups = c->topk_groups,
                                   .norm_topk = c->norm,
                                   .scaling = 2.5f,
                                   .min_sum = c->bias ? 0.25f : 0});
    cuda_get(&f, ids, dev_ids, TOKENS * k * sizeof *ids);
    cuda_get(&f, weights, dev_weights, TOKENS * k * sizeof *weights);
    for (uint32_t t = 0; t < TOKENS; t++) {
      int32_t want_ids[MAX_K];
      double want[MAX_K];
      const int32_t *fixed = c->has_table ? table + (size_t)tokens[t] * k : NULL;
      naive_route(c, logits + t * n, bias, fixed, want_ids, want);
      assert_memory_equal(ids + t * k, want_ids, k * sizeof *ids);
      for (uint32_t j = 0; j < k; j++) {
        double slack = want[j] * (n + 16) * ULP_F32;
        cuda_assert_within(weights[t * k + j], want[j], slack, "router", t * k + j);
      }
    }
    free(logits);
    free(bias);
    cuda_close(&f);
  }
}

TEST(a_token_of_no_table) {
  static const int32_t table[] = {1, 0};
  static const float logits[] = {1, 2};
  static const int32_t bad[] = {2, -1};
  CUDA_OPEN(f);
  for (size_t i = 0; i < TD_COUNT(bad); i++) {
    td_op_router(f.stream, &(td_router_args){.logits = cuda_put(&f, logits, sizeof logits),
                                             .ids = cuda_alloc(&f, sizeof(int32_t)),
                                             .weights = cuda_alloc(&f, sizeof(float)),
                                             .table = table,
                                             .tokens = cuda_put(&f, &bad[i], sizeof bad[i]),
                                             .kind = TD_ROUTER_SOFTPLUS,
                                             .n_tokens = 1,
                                             .n_experts = 2,
                                             .top_k = 1,
                                             .n_vocab = 2,
                                             .scaling = 1});
    cuda_expect_failure(&f, "token id");
  }
  cuda_close(&f);
}

// Nor is NaN taken while there is anything else.
TEST(router_ties_go_to_the_lower_index) {
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

TEST(ranking) {
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

TEST(ranking_of_no_numbers) {
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
