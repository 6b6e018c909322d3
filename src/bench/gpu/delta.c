// src/bench/gpu/delta.c - gated delta nets at the shapes of Qwen3-Next and, with a decay for each
// channel, of Kimi-Linear. Calls of a decode case rotate through the states of several batches,
// since those of a model's layers do not stay in L2.
#include "bench/gpu/paths.h"

enum { PAGE_TOKENS = 512, MAX_STATES = 64, STATES_BYTES = 256 << 20 };

typedef struct {
  const char *name;
  td_delta_shape shape;
} delta_model;

static const delta_model models[] = {
    {"qwen3-next", {.n_k_heads = 16, .n_v_heads = 32, .k_dim = 128, .v_dim = 128, .n_taps = 4}},
    {"kimi-linear",
     {.n_k_heads = 32,
      .n_v_heads = 32,
      .k_dim = 128,
      .v_dim = 128,
      .n_taps = 4,
      .by_channel = true}},
};

static td_delta_shape shape_of(const td_gpu_bench *b, const delta_model *m) {
  td_delta_shape s = m->shape;
  const uint32_t of_group = s.n_v_heads / s.n_k_heads;
  s.n_k_heads = td_gpu_fewer(b, s.n_k_heads, 1);
  s.n_v_heads = s.n_k_heads * of_group;
  return s;
}

typedef struct {
  uint32_t seqs, tokens;
} delta_case;

static const delta_case cases[] = {{1, 1}, {16, 1}, {64, 1}, {1, 512}, {1, 8192}, {8, 1024}};

typedef struct {
  td_delta_conv_args conv;
  td_delta_rule_op_args rule;
  td_gate_rows_args gate;
  size_t n_bytes; // of the states of a batch
  uint32_t n;     // batches
} delta_calls;

static void conv_once(td_gpu_bench *b, const void *args, uint32_t call) {
  const delta_calls *c = args;
  td_delta_conv_args a = c->conv;
  a.state.pages += call % c->n * c->n_bytes;
  td_op_delta_conv(b->stream, &a);
}

static void rule_once(td_gpu_bench *b, const void *args, uint32_t call) {
  const delta_calls *c = args;
  td_delta_rule_op_args a = c->rule;
  a.state.pages += call % c->n * c->n_bytes;
  td_op_delta_rule(b->stream, &a);
}

TD_GPU_ONCE(gate_rows)

// Sequences whose tokens follow one that is in their first page.
static td_batch_view make_batch(td_gpu_bench *b, const delta_case *c) {
  const uint32_t n = c->seqs * c->tokens, max_pages = c->tokens / PAGE_TOKENS + 1;
  const size_t n_ints = 2 * (size_t)n + c->seqs + 1 + (size_t)c->seqs * max_pages;
  int32_t *host = td_gpu_host(b, n_ints * sizeof *host);
  int32_t *position = host + n, *q_begin = position + n, *pages = q_begin + c->seqs + 1;
  for (uint32_t i = 0; i < n; i++) {
    host[i] = (int32_t)(i / c->tokens);
    position[i] = (int32_t)(i % c->tokens + 1);
  }
  for (uint32_t s = 0; s <= c->seqs; s++)
    q_begin[s] = (int32_t)(s * c->tokens);
  for (uint32_t i = 0; i < c->seqs * max_pages; i++)
    pages[i] = (int32_t)i;
  const int32_t *dev = td_gpu_ints(b, host, n_ints);
  return (td_batch_view){.seq = dev,
                         .position = dev + n,
                         .q_begin = dev + 2 * (size_t)n,
                         .page_table = dev + 2 * (size_t)n + c->seqs + 1,
                         .n_tokens = n,
                         .n_seqs = c->seqs,
                         .max_pages = max_pages,
                         .page_tokens = PAGE_TOKENS};
}

static void fill_calls(td_gpu_bench *b, const td_delta_shape *s, delta_calls *c,
                       const td_batch_view *batch) {
  const size_t k = s->k_dim, heads = s->n_v_heads / s->n_k_heads, v = heads * s->v_dim;
  const size_t n_decays = s->n_v_heads * td_delta_decays(s), n_gates = n_decays + s->n_v_heads;
  const size_t group = 2 * (k + v), at = s->n_k_heads * group, stride = at + n_gates;
  const size_t channels = td_delta_channels(s), n = batch->n_tokens;
  const size_t values = (size_t)s->n_v_heads * s->v_dim;
  const td_kv_view state = {.pages = NULL, .page_bytes = td_delta_state_bytes(s), .dtype = TD_F32};
  const float *of_heads = td_gpu_weight_floats(b, n_decays, 0);
  c->n_bytes = (size_t)batch->n_seqs * batch->max_pages * state.page_bytes;
  c->n = n == batch->n_seqs ? (uint32_t)(STATES_BYTES / c->n_bytes) : 1;
  c->n = c->n < 1 ? 1 : c->n > MAX_STATES ? MAX_STATES : c->n;
  c->conv = (td_delta_conv_args){.batch = *batch,
                                 .state = state,
                                 .shape = *s,
                                 .x = td_gpu_noise(b, n * stride * 2),
                                 .x_stride = stride,
                                 .q = {0, group},
                                 .k = {k, group},
                                 .v = {2 * k, group},
                                 .b = {at, n_gates / s->n_k_heads},
                                 .a = {at + heads, n_gates / s->n_k_heads},
                                 .conv = td_gpu_weight_floats(b, s->n_taps * channels, 0.25f),
                                 .decay = of_heads,
                                 .bias = of_heads,
                                 .out = td_gpu_alloc(b, n * channels * 2),
                                 .gates = td_gpu_alloc(b, n * n_gates * sizeof(float))};
  c->conv.state.pages = td_gpu_alloc(b, c->n * c->n_bytes);
  c->rule = (td_delta_rule_op_args){.batch = *batch,
                                    .state = c->conv.state,
                                    .shape = *s,
                                    .qkv = c->conv.out,
                                    .gates = c->conv.gates,
                                    .out = td_gpu_alloc(b, n * values * 2),
                                    .prompt = n > batch->n_seqs};
  c->gate = (td_gate_rows_args){.x = c->rule.out,
                                .gate = c->conv.x,
                                .gate_stride = stride,
                                .part = {2 * k + v, group},
                                .n_tokens = batch->n_tokens,
                                .n_groups = s->n_k_heads,
                                .dim = (uint32_t)v,
                                .silu = true};
}

// Bytes: every input and result once, and of the states what is computed with.
static void run_cases(td_gpu_bench *b, const delta_model *m, const delta_calls *c) {
  const td_delta_shape *s = &c->rule.shape;
  const double n = c->rule.batch.n_tokens, seqs = c->rule.batch.n_seqs;
  const double matrix = (double)s->n_v_heads * s->k_dim * s->v_dim;
  const double channels = td_delta_channels(s), values = (double)s->n_v_heads * s->v_dim;
  const double gates = (double)s->n_v_heads * (td_delta_decays(s) + 1);
  const struct {
    const char *op;
    td_gpu_call fn;
    const void *args;
    double bytes, flops;
  } ops[] = {
      {"delta_conv", conv_once, c,
       n * (channels * 4 + gates * 6) + seqs * (s->n_taps - 1) * channels * 8, 0},
      {"delta_rule", rule_once, c, n * ((channels + values) * 2 + gates * 4) + seqs * matrix * 8,
       n * matrix * 7},
      {"delta_gate", gate_rows_once, &c->gate, n * values * 6, 0},
  };
  for (size_t i = 0; i < TD_COUNT(ops); i++) {
    td_gpu_run(b,
               &(td_gpu_case){.op = ops[i].op,
                              .model = m->name,
                              .tokens = (uint32_t)n,
                              .seqs = (uint32_t)seqs,
                              .bytes = ops[i].bytes,
                              .flops = ops[i].flops},
               ops[i].fn, ops[i].args, c->n);
  }
}

static void run_case(td_gpu_bench *b, const delta_model *m, const delta_case *c) {
  const td_delta_shape shape = shape_of(b, m);
  const td_batch_view batch = make_batch(b, c);
  delta_calls calls = {.n = 1};
  fill_calls(b, &shape, &calls, &batch);
  run_cases(b, m, &calls);
  td_gpu_release(b, NULL);
}

void td_gpu_delta_cases(td_gpu_bench *b) {
  for (size_t m = 0; m < TD_COUNT(models); m++) {
    if (!td_gpu_wants_any(b, "delta_conv delta_rule delta_gate", models[m].name)) continue;
    for (size_t i = 0; i < TD_COUNT(cases); i++) {
      delta_case c = cases[i];
      if (b->shrink > 1) c = (delta_case){1, c.tokens > 1 ? 2 : 1};
      run_case(b, &models[m], &c);
    }
  }
}
