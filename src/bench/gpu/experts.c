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

static void bench_shared(td_gpu_bench *b, const td_gpu_shape *m, const td_format *format,
                         td_moe_args *args, uint32_t most) {
  static const uint32_t tokens[] = {1, 8, 16, 17, 64, 128};
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

// How tokens choose experts.
typedef struct {
  const char *op, *op_a8;
  bool is_drawn; // at random among all, so that some have more tokens; else in turn
  uint32_t tokens[8];
} routing;

enum { MAX_EXPERTS = 256, MAX_K = 8, MAX_TOKENS = 8192 };
static const routing in_turn = {
    "experts", "experts_a8", false, {1, 8, 16, 64, 128, 256, 512, 4096}};
static const routing drawn = {
    "experts_drawn", "experts_a8_drawn", true, {1, 8, 64, 512, 1024, 2048, 4096, MAX_TOKENS}};

// [n_tokens][top_k], those of a token distinct, and n_experts more.
static void choose_experts(const routing *r, int32_t *ids, uint32_t n_tokens, uint32_t top_k,
                           uint32_t n_experts) {
  uint32_t state = 1;
  for (uint32_t i = 0; i < n_tokens * top_k + n_experts; i++) {
    const int32_t *token = ids + i / top_k * top_k;
    bool is_taken = r->is_drawn;
    ids[i] = (int32_t)(i % n_experts);
    while (is_taken) {
      state = state * 1664525 + 1013904223;
      ids[i] = (int32_t)((state >> 16) % n_experts);
      is_taken = false;
      for (const int32_t *id = token; id < ids + i; id++)
        is_taken |= *id == ids[i];
    }
  }
}

static uint32_t n_used(const int32_t *ids, uint32_t n_pairs) {
  bool is_used[MAX_EXPERTS] = {false};
  uint32_t n = 0;
  for (uint32_t i = 0; i < n_pairs; i++) {
    n += !is_used[ids[i]];
    is_used[ids[i]] = true;
  }
  return n;
}

// ids: those of args in host memory. With `most` tokens at most.
static void bench_tokens(td_gpu_bench *b, const td_gpu_shape *m, const td_format *format,
                         const routing *r, td_moe_args *args, const int32_t *ids, uint32_t most,
                         td_activations a8) {
  const bool is_a8 = a8 != TD_ACTIVATIONS_AUTO;
  for (size_t i = 0; i < TD_COUNT(r->tokens) && r->tokens[i] <= most; i++) {
    const uint32_t n = r->tokens[i], pairs = n * m->top_k, used = n_used(ids, pairs);
    if (is_a8 && n <= 16) continue; // as without
    args->n_tokens = n;
    args->n_prompt = is_a8 ? n : 0;
    double seconds = td_gpu_measure(b, moe_once, args, args->n_experts / used);
    td_gpu_record(b,
                  &(td_gpu_case){.op = is_a8 ? r->op_a8 : r->op,
                                 .model = m->name,
                                 .format = format->name,
                                 .rows = m->hidden,
                                 .cols = m->dim,
                                 .tokens = n,
                                 .experts = args->n_experts,
                                 .bytes = used * 3.0 * (double)td_weight_bytes(&args->gate[0]),
                                 .flops = 6.0 * m->dim * m->hidden * pairs,
                                 .a8 = a8},
                  seconds);
  }
}

static void bench_routing(td_gpu_bench *b, const td_gpu_shape *shape, const td_format *format,
                          const routing *r, uint32_t n_experts) {
  static td_weight w[3][MAX_EXPERTS];
  static int32_t ids[MAX_TOKENS * MAX_K + MAX_EXPERTS];
  static float weights[MAX_TOKENS * MAX_K];
  const td_activations a8 = td_gpu_a8(b, format);
  const bool is_a8 = a8 != TD_ACTIVATIONS_AUTO &&
                     td_gpu_wants(b, r->op_a8, shape->name, format->name);
  const bool is_plain = td_gpu_wants(b, r->op, shape->name, format->name);
  const bool is_shared = !r->is_drawn &&
                         td_gpu_wants(b, "shared_expert", shape->name, format->name);
  if (!is_plain && !is_a8 && !is_shared) return;
  td_gpu_shape m = *shape;
  m.dim = td_gpu_whole_blocks(format, shape->dim);
  m.hidden = td_gpu_whole_blocks(format, shape->hidden);
  for (uint32_t e = 0; e < n_experts; e++) {
    w[0][e] = td_gpu_weight(b, format, m.hidden, m.dim);
    w[1][e] = td_gpu_weight(b, format, m.hidden, m.dim);
    w[2][e] = td_gpu_weight(b, format, m.dim, m.hidden);
  }
  choose_experts(r, ids, MAX_TOKENS, m.top_k, n_experts);
  for (uint32_t i = 0; i < TD_COUNT(weights); i++)
    weights[i] = 0.125f;
  const uint32_t last = r->tokens[TD_COUNT(r->tokens) - 1], most = td_gpu_fewer(b, last, 1);
  void *x = td_gpu_noise(b, (size_t)most * m.dim * 2),
       *out = td_gpu_alloc(b, (size_t)most * m.dim * 2);
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
                      .top_k = m.top_k};
  if (is_plain) bench_tokens(b, &m, format, r, &args, ids, most, TD_ACTIVATIONS_AUTO);
  if (is_shared) bench_shared(b, &m, format, &args, most);
  td_gpu_round(b, a8);
  if (is_a8) bench_tokens(b, &m, format, r, &args, ids, most, a8);
  td_gpu_round(b, TD_ACTIVATIONS_AUTO);
  td_gpu_release(b, NULL);
}

// With experts in turn n tokens use min(n * top_k, experts) of them, and full tiles; if a model has
// too many, 64 represent them. Drawn ones are all there, in the model's own format.
void td_gpu_experts_cases(td_gpu_bench *b, const td_gpu_shape *m, const td_format *format) {
  enum { MANY = 128, FEW = 64 };
  bench_routing(b, m, format, &in_turn, m->n_experts <= MANY ? m->n_experts : FEW);
  if (format == m->format) bench_routing(b, m, format, &drawn, m->n_experts);
}
