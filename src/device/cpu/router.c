// src/device/cpu/router.c - expert selection, a token at a time.
#include <math.h>
#include <string.h>

#include "device/cpu/cpu.h"

// Index of the largest value not taken; ties go to the lower index. At least one must be free.
static uint32_t best_free(const float *value, const uint8_t *taken, uint32_t n) {
  uint32_t best = UINT32_MAX;
  for (uint32_t i = 0; i < n; i++)
    if (!taken[i] && (best == UINT32_MAX || value[i] > value[best])) best = i;
  return best;
}

static void softmax(float *p, const float *logits, uint32_t n) {
  float max = -INFINITY, sum = 0;
  for (uint32_t i = 0; i < n; i++)
    max = fmaxf(max, logits[i]);
  for (uint32_t i = 0; i < n; i++) {
    p[i] = expf(logits[i] - max);
    sum += p[i];
  }
  for (uint32_t i = 0; i < n; i++)
    p[i] /= sum;
}

static float softplus(float x) {
  return x > 20 ? x : log1pf(expf(x));
}

static float two_best(const float *value, uint32_t n) {
  float first = -INFINITY, second = -INFINITY;
  for (uint32_t i = 0; i < n; i++) {
    if (value[i] > first) {
      second = first;
      first = value[i];
    } else if (value[i] > second) {
      second = value[i];
    }
  }
  return n > 1 ? first + second : first;
}

// Marks as taken all experts outside the topk_groups best groups.
static void drop_groups(const td_router_args *a, const float *choice, float *group_score,
                        uint8_t *group_kept, uint8_t *taken) {
  uint32_t size = a->n_experts / a->n_groups;
  for (uint32_t g = 0; g < a->n_groups; g++) {
    group_score[g] = two_best(choice + (size_t)g * size, size);
    group_kept[g] = 0;
  }
  for (uint32_t i = 0; i < a->topk_groups; i++)
    group_kept[best_free(group_score, group_kept, a->n_groups)] = 1;
  for (uint32_t e = 0; e < a->n_experts; e++)
    taken[e] = !group_kept[e / size];
}

typedef struct {
  const td_router_args *a;
  char *scratch; // one piece per member
  size_t member_bytes;
} router_run;

static void route_token(void *ctx, size_t t, unsigned member) {
  const router_run *run = ctx;
  const td_router_args *a = run->a;
  uint32_t n = a->n_experts;
  float *score = (float *)(run->scratch + member * run->member_bytes);
  float *choice = score + n, *group_score = choice + n;
  uint8_t *taken = (uint8_t *)(group_score + n), *group_kept = taken + n;
  const float *logits = a->logits + t * n;
  memset(taken, 0, n);
  if (a->kind == TD_ROUTER_SOFTMAX) {
    softmax(score, logits, n);
  } else {
    for (uint32_t e = 0; e < n; e++)
      score[e] = a->kind == TD_ROUTER_SIGMOID ? 1 / (1 + expf(-logits[e]))
                                              : sqrtf(softplus(logits[e]));
  }
  for (uint32_t e = 0; e < n; e++)
    choice[e] = score[e] + (a->bias ? a->bias[e] : 0);
  if (a->n_groups > 1) drop_groups(a, choice, group_score, group_kept, taken);
  int32_t *ids = a->ids + t * a->top_k;
  float *weights = a->weights + t * a->top_k;
  float sum = a->kind == TD_ROUTER_SOFTMAX ? 0 : 1e-20f;
  const int32_t *fixed = a->table ? a->table + (size_t)a->tokens[t] * a->top_k : NULL;
  for (uint32_t j = 0; j < a->top_k; j++) {
    uint32_t e = fixed ? (uint32_t)fixed[j] : best_free(choice, taken, n);
    taken[e] = 1;
    ids[j] = (int32_t)e;
    weights[j] = score[e];
    sum += score[e];
  }
  sum = fmaxf(sum, a->min_sum);
  for (uint32_t j = 0; j < a->top_k; j++) {
    if (a->norm_topk) weights[j] /= sum;
    weights[j] *= a->scaling;
    if (a->expert_scale) weights[j] *= a->expert_scale[ids[j]];
  }
}

td_status td_cpu_op_router(td_cpu_stream *stream, const td_router_args *a, td_err *err) {
  td_status status = td_dev_check_router(a, err);
  if (status != TD_OK) return status;
  router_run run = {.a = a, .member_bytes = ((size_t)a->n_experts * 14 + 63) / 64 * 64};
  void *scratch;
  status = td_cpu_scratch(stream, SCRATCH_MEMBER,
                          run.member_bytes * td_thread_pool_size(td_cpu_dev_of(stream)->pool),
                          &scratch, err);
  if (status != TD_OK) return status;
  run.scratch = scratch;
  td_cpu_for(stream, a->n_tokens, route_token, &run);
  return TD_OK;
}
