// src/bench/gpu/experts.c - a layer's experts, for few tokens and for many.
#include "bench/gpu/paths.h"

// Calls rotate through the experts.
static void moe_once(td_gpu_bench *b, const void *args, uint32_t call) {
  td_moe_args a = *(const td_moe_args *)args;
  a.ids += (size_t)call * a.n_tokens * a.top_k % a.n_experts;
  td_op_moe(b->stream, &a);
}

// One expert of all tokens, as a shared one.
static void shared_once(td_gpu_bench *b, const void *args, uint32_t call) {
  td_moe_args a = *(const td_moe_args *)args;
  a.gate += call % a.n_experts;
  a.up += call % a.n_experts;
  a.down += call % a.n_experts;
  a.ids = NULL;
  a.weights = NULL;
  a.n_experts = a.top_k = 1;
  td_op_moe(b->stream, &a);
}

static void bench_shared(td_gpu_bench *b, const td_gpu_shape *m, const td_gpu_format *format,
                         td_moe_args *args, uint32_t most) {
  static const uint32_t tokens[] = {1, 8, 16, 64};
  for (size_t i = 0; i < TD_COUNT(tokens) && tokens[i] <= most; i++) {
    args->n_tokens = tokens[i];
    args->n_prompt = 0;
    td_gpu_record(b,
                  &(td_gpu_case){.op = "shared_expert",
                                 .model = m->name,
                                 .format = format->name,
                                 .rows = m->hidden,
                                 .cols = m->dim,
                                 .tokens = tokens[i],
                                 .bytes = 3.0 * (double)td_weight_bytes(&args->gate[0]),
                                 .flops = 6.0 * m->dim * m->hidden * tokens[i]},
                  td_gpu_measure(b, shared_once, args, args->n_experts));
  }
}

// With `most` tokens at most.
static void bench_tokens(td_gpu_bench *b, const td_gpu_shape *m, const td_gpu_format *format,
                         td_moe_args *args, uint32_t most, td_activations a8) {
  const bool is_a8 = a8 != TD_ACTIVATIONS_AUTO;
  static const uint32_t tokens[] = {1, 8, 64, 512, 4096};
  for (size_t i = 0; i < TD_COUNT(tokens) && tokens[i] <= most; i++) {
    if (is_a8 && tokens[i] <= 16) continue; // as without
    args->n_tokens = tokens[i];
    args->n_prompt = is_a8 ? tokens[i] : 0;
    uint32_t pairs = tokens[i] * m->top_k, used = pairs < args->n_experts ? pairs : args->n_experts;
    double seconds = td_gpu_measure(b, moe_once, args, args->n_experts / used);
    td_gpu_record(b,
                  &(td_gpu_case){.op = is_a8 ? "experts_a8" : "experts",
                                 .model = m->name,
                                 .format = format->name,
                                 .rows = m->hidden,
                                 .cols = m->dim,
                                 .tokens = tokens[i],
                                 .bytes = used * 3.0 * (double)td_weight_bytes(&args->gate[0]),
                                 .flops = 6.0 * m->dim * m->hidden * pairs,
                                 .a8 = a8},
                  seconds);
  }
}

// Tokens also rotate through the experts, so that n tokens use min(n * top_k, experts) of them. If
// a model has too many experts, 64 represent them.
void td_gpu_experts_cases(td_gpu_bench *b, const td_gpu_shape *m, const td_gpu_format *format) {
  enum { MAX_EXPERTS = 128, MAX_K = 8, TOKENS = 4096 };
  static td_weight w[3][MAX_EXPERTS];
  static int32_t ids[TOKENS * MAX_K + MAX_EXPERTS];
  static float weights[TOKENS * MAX_K];
  const td_activations a8 = td_gpu_a8(b, format);
  const bool is_a8 = a8 != TD_ACTIVATIONS_AUTO &&
                     td_gpu_wants(b, "experts_a8", m->name, format->name);
  const bool is_plain = td_gpu_wants(b, "experts", m->name, format->name);
  const bool is_shared = td_gpu_wants(b, "shared_expert", m->name, format->name);
  if (!is_plain && !is_a8 && !is_shared) return;
  uint32_t n_experts = m->n_experts <= MAX_EXPERTS ? m->n_experts : 64;
  for (uint32_t e = 0; e < n_experts; e++) {
    w[0][e] = td_gpu_weight(b, format, m->hidden, m->dim);
    w[1][e] = td_gpu_weight(b, format, m->hidden, m->dim);
    w[2][e] = td_gpu_weight(b, format, m->dim, m->hidden);
  }
  for (uint32_t i = 0; i < TD_COUNT(ids); i++)
    ids[i] = (int32_t)(i % n_experts);
  for (uint32_t i = 0; i < TD_COUNT(weights); i++)
    weights[i] = 0.125f;
  void *x = td_gpu_noise(b, (size_t)TOKENS * m->dim * 2),
       *out = td_gpu_alloc(b, (size_t)TOKENS * m->dim * 2);
  void *dev_ids = td_gpu_alloc(b, sizeof ids), *dev_weights = td_gpu_alloc(b, sizeof weights);
  if (b->dev) td_op_copy(b->stream, dev_ids, ids, sizeof ids);
  if (b->dev) td_op_copy(b->stream, dev_weights, weights, sizeof weights);
  td_moe_args args = {.gate = w[0],
                      .up = w[1],
                      .down = w[2],
                      .x = x,
                      .ids = dev_ids,
                      .weights = dev_weights,
                      .out = out,
                      .n_experts = n_experts,
                      .top_k = m->top_k};
  const uint32_t most = td_gpu_fewer(b, TOKENS, 1);
  if (is_plain) bench_tokens(b, m, format, &args, most, TD_ACTIVATIONS_AUTO);
  if (is_shared) bench_shared(b, m, format, &args, most);
  td_gpu_round(b, a8);
  if (is_a8) bench_tokens(b, m, format, &args, most, a8);
  td_gpu_round(b, TD_ACTIVATIONS_AUTO);
  void *const memory[] = {x, out, dev_ids, dev_weights};
  for (size_t i = 0; i < TD_COUNT(memory); i++)
    td_gpu_free(b, memory[i]);
  td_gpu_forget_weights(b);
}
