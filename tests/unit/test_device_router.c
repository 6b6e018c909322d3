// tests/unit/test_device_router.c - the CPU device's choices against naive ones: experts by their
// router's logits, and the most probable tokens.

#include "unit/device_test.h"

static void naive_route(const td_router_args *a, uint32_t t, int32_t *ids, double *weights) {
  uint32_t n = a->n_experts;
  double score[512], choice[512], max = -INFINITY, total = 0;
  const float *logits = a->logits + (size_t)t * n;
  for (uint32_t e = 0; e < n; e++)
    max = fmax(max, logits[e]);
  for (uint32_t e = 0; e < n; e++)
    total += exp(logits[e] - max);
  for (uint32_t e = 0; e < n; e++) {
    bool soft = a->kind == TD_ROUTER_SOFTMAX;
    score[e] = soft ? exp(logits[e] - max) / total : 1 / (1 + exp(-(double)logits[e]));
    choice[e] = score[e] + (a->bias ? a->bias[e] : 0);
  }
  if (a->n_groups > 1) {
    uint32_t size = n / a->n_groups;
    double group[512];
    for (uint32_t g = 0; g < a->n_groups; g++) {
      group[g] = -INFINITY; // the best sum of any two
      for (uint32_t i = 0; i < size; i++) {
        for (uint32_t j = 0; j < i; j++) {
          group[g] = fmax(group[g], choice[g * size + i] + choice[g * size + j]);
        }
      }
    }
    for (uint32_t g = 0; g < a->n_groups; g++) {
      uint32_t better = 0;
      for (uint32_t h = 0; h < a->n_groups; h++)
        better += group[h] > group[g];
      for (uint32_t i = 0; better >= a->topk_groups && i < size; i++)
        choice[g * size + i] = -1e30;
    }
  }
  double sum = a->kind == TD_ROUTER_SIGMOID ? 1e-20 : 0;
  for (uint32_t j = 0; j < a->top_k; j++) {
    uint32_t best = 0;
    for (uint32_t e = 1; e < n; e++)
      best = choice[e] > choice[best] ? e : best;
    choice[best] = -1e31;
    ids[j] = (int32_t)best;
    weights[j] = score[best];
    sum += score[best];
  }
  for (uint32_t j = 0; j < a->top_k; j++) {
    weights[j] *= a->scaling / (a->norm_topk ? fmax(sum, a->min_sum) : 1.0);
    if (a->expert_scale) weights[j] *= a->expert_scale[ids[j]];
  }
}

TEST(router) {
  static const struct {
    td_router_kind kind;
    uint32_t n_experts, top_k, n_groups, topk_groups;
    bool norm, bias;
  } cases[] = {
      {TD_ROUTER_SOFTMAX, 128, 8, 0, 0, true, false}, {TD_ROUTER_SOFTMAX, 7, 2, 1, 1, false, false},
      {TD_ROUTER_SOFTMAX, 12, 4, 3, 2, true, false},  {TD_ROUTER_SOFTMAX, 64, 6, 1, 1, true, true},
      {TD_ROUTER_SIGMOID, 256, 8, 8, 4, true, true},  {TD_ROUTER_SIGMOID, 64, 6, 1, 1, true, true},
      {TD_ROUTER_SIGMOID, 12, 4, 3, 1, false, false}};
  enum { TOKENS = 100 };
  device_fixture f;
  FOR_TEAMS(f) {
    for (size_t c = 0; c < TD_COUNT(cases); c++) {
      uint32_t n = cases[c].n_experts, k = cases[c].top_k;
      float *logits = ref_floats(&f.rng, TOKENS * n), *bias = ref_floats(&f.rng, n);
      for (size_t i = 0; i < (size_t)TOKENS * n; i++)
        logits[i] *= 4;
      int32_t *ids = malloc(TOKENS * k * sizeof *ids);
      float *weights = malloc(TOKENS * k * sizeof *weights);
      td_router_args args = {.logits = logits,
                             .bias = cases[c].bias ? bias : NULL,
                             .ids = ids,
                             .weights = weights,
                             .kind = cases[c].kind,
                             .n_tokens = TOKENS,
                             .n_experts = n,
                             .top_k = k,
                             .n_groups = cases[c].n_groups,
                             .topk_groups = cases[c].topk_groups,
                             .norm_topk = cases[c].norm,
                             .scaling = 2.5f,
                             .min_sum = cases[c].bias ? 0.25f : 0,
                             .expert_scale = cases[c].bias ? NULL : bias};
      td_op_router(f.stream, &args);
      device_sync(&f);
      for (uint32_t t = 0; t < TOKENS; t++) {
        int32_t want_ids[16];
        double want[16];
        naive_route(&args, t, want_ids, want);
        assert_memory_equal(ids + t * k, want_ids, k * sizeof *ids);
        device_assert_close(weights + t * k, want, k, 1e-6);
      }
      free(logits);
      free(bias);
      free(ids);
      free(weights);
    }
  }
}

TEST(ranking) {
  enum { ROWS = 3, N = 700 };
  static const float temperature[ROWS] = {0, 0.6f, 2.5f};
  device_fixture f;
  FOR_TEAMS(f) {
    float *logits = ref_ties(&f.rng, ROWS * N);
    td_top_logits top[ROWS];
    for (int i = 0; i < N; i += 2)
      logits[2 * N + i] = i % 4 ? NAN : -INFINITY;
    for (uint32_t n = 1; n <= N; n += 233) {
      td_op_top_logits(f.stream, &(td_top_logits_args){.logits = logits,
                                                       .temperature = temperature,
                                                       .out = top,
                                                       .n_rows = ROWS,
                                                       .n_vocab = n});
      device_sync(&f);
      for (uint32_t r = 0; r < ROWS; r++)
        ref_check_top(logits + r * n, n, temperature[r], &top[r]);
    }
    free(logits);
  }
}

TEST(router_ties_go_to_the_lower_index) {
  device_fixture f;
  device_open(&f, 1);
  float logits[16] = {0}, weights[4];
  int32_t ids[4];
  td_op_router(f.stream, &(td_router_args){.logits = logits,
                                           .ids = ids,
                                           .weights = weights,
                                           .kind = TD_ROUTER_SIGMOID,
                                           .n_tokens = 1,
                                           .n_experts = 16,
                                           .top_k = 4,
                                           .n_groups = 4,
                                           .topk_groups = 2,
                                           .scaling = 1});
  device_sync(&f);
  for (int i = 0; i < 4; i++)
    assert_int_equal(ids[i], i);
  device_close(&f);
}
