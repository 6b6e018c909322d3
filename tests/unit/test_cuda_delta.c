// tests/unit/test_cuda_delta.c - the CUDA device's operators of gated delta nets against the CPU's
// kernels, which test_delta.c holds against double, and against themselves however a prompt is cut.
// CTest: gpu no-tsan

#include "unit/cuda_test.h"

enum { SEQS = 2, N = 21, TOKENS = SEQS * N };

// FP32 sums in another order, and functions of another library, of values of about 1.
#define SLACK 2e-5

typedef struct {
  td_delta_shape shape;
  uint32_t page_tokens;
  bool is_grouped; // inputs are sorted by key head
  float bound;     // of decays
} delta_case;

static const delta_case cases[] = {
    {{2, 6, 12, 36, 4, false, false}, 16, true, 0},  // widths that make no runs of eight, two tiles
    {{2, 4, 16, 40, 4, false, false}, 8, false, 0},  // in runs
    {{1, 2, 40, 8, 2, false, false}, 16, false, 0},  // keys of more than 32
    {{1, 1, 128, 32, 4, false, false}, 16, true, 0}, // of the most
    {{3, 3, 8, 136, 7, false, false}, 4, false, 0},  // values of more than a warp's piece; pages
                                                     // shorter than filters
    {{2, 6, 16, 8, 4, true, false}, 16, false, 0},   // value heads in the other order
    {{3, 3, 12, 12, 4, false, true}, 16, false, 0},  // a decay for each channel
    {{2, 2, 16, 40, 3, false, true}, 8, false, 0},
    {{1, 1, 128, 32, 4, false, true}, 16, false, 0},
    {{2, 2, 40, 40, 4, false, true}, 16, false, -5},
};

// A case's inputs, and what the GPU makes of them.
typedef struct {
  delta_case c;
  uint32_t channels, values, mixed, max_pages, n_pages;
  size_t state_bytes;
  float *conv, *decay, *bias, *x; // x: [SEQS][N][mixed]
  uint16_t *dev_x, *dev_qkv, *dev_out;
  float *dev_gates;
  int32_t *dev_tables;
  char *dev_states;
  td_state_trail trail;     // of the steps to come
  float *qkv, *gates, *out; // [SEQS][N][..]
  char *states;
} delta_run;

static uint32_t heads_of(const delta_run *r) {
  return r->c.shape.n_v_heads / r->c.shape.n_k_heads;
}

// Numbers of a token's gates.
static uint32_t gates_of(const td_delta_shape *s) {
  return s->n_v_heads * (td_delta_decays(s) + 1);
}

static delta_run open_run(cuda_fixture *f, const delta_case *c) {
  const td_delta_shape *s = &c->shape;
  delta_run r = {.c = *c, .channels = td_delta_channels(s), .values = s->n_v_heads * s->v_dim};
  r.mixed = r.channels + gates_of(s);
  r.mixed = (r.mixed + 7) / 8 * 8;
  r.max_pages = (N - 1) / c->page_tokens + 1;
  r.n_pages = SEQS * r.max_pages + 1;
  r.state_bytes = td_delta_state_bytes(s);
  f->rng = 7;
  r.conv = ref_floats(&f->rng, s->n_taps * r.channels);
  r.decay = ref_floats(&f->rng, s->n_v_heads);
  r.bias = ref_floats(&f->rng, gates_of(s));
  for (uint32_t h = 0; h < s->n_v_heads; h++)
    r.decay[h] -= 2;
  r.x = cuda_floats(f, (size_t)TOKENS * r.mixed);
  r.dev_x = cuda_alloc(f, (size_t)TOKENS * r.mixed * sizeof *r.dev_x);
  r.dev_qkv = cuda_alloc(f, (size_t)TOKENS * r.channels * sizeof *r.dev_qkv);
  r.dev_out = cuda_alloc(f, (size_t)TOKENS * r.values * sizeof *r.dev_out);
  r.dev_gates = cuda_alloc(f, (size_t)TOKENS * gates_of(s) * sizeof *r.dev_gates);
  r.dev_tables = cuda_alloc(f, (3 * TOKENS + SEQS * r.max_pages) * sizeof *r.dev_tables);
  r.dev_states = cuda_alloc(f, r.n_pages * r.state_bytes);
  r.qkv = malloc((size_t)TOKENS * r.channels * sizeof *r.qkv);
  r.gates = malloc((size_t)TOKENS * gates_of(s) * sizeof *r.gates);
  r.out = malloc((size_t)TOKENS * r.values * sizeof *r.out);
  r.states = malloc(r.n_pages * r.state_bytes);
  TD_CHECK(r.qkv && r.gates && r.out && r.states);
  memset(r.states, 0xff, r.n_pages * r.state_bytes); // NaN
  td_op_copy(f->stream, r.dev_states, r.states, r.n_pages * r.state_bytes);
  return r;
}

static void close_run(delta_run *r) {
  float *const owned[] = {r->conv, r->decay, r->bias, r->x, r->qkv, r->gates, r->out};
  for (size_t i = 0; i < TD_COUNT(owned); i++)
    free(owned[i]);
  free(r->states);
}

// Pages of the sequences in no order; page 0 is no one's.
static int32_t page_of(const delta_run *r, uint32_t s, uint32_t p) {
  return (int32_t)(r->n_pages - 1 - (p * SEQS + s));
}

// Tables of a step that computes tokens [begin[s], begin[s] + n[s]) of the sequences:
// seq, position, q_begin, page table.
static uint32_t fill_tables(const delta_run *r, const uint32_t begin[SEQS], const uint32_t n[SEQS],
                            int32_t *tables) {
  int32_t *seq = tables, *position = tables + TOKENS, *q_begin = tables + 2 * TOKENS;
  uint32_t t = 0;
  for (uint32_t s = 0; s < SEQS; s++) {
    q_begin[s] = (int32_t)t;
    for (uint32_t i = 0; i < n[s]; i++, t++) {
      seq[t] = (int32_t)s;
      position[t] = (int32_t)(begin[s] + i);
    }
    for (uint32_t p = 0; p < r->max_pages; p++)
      tables[3 * TOKENS + s * r->max_pages + p] = page_of(r, s, p);
  }
  q_begin[SEQS] = (int32_t)t;
  return t;
}

static td_batch_view batch_of(const delta_run *r, const int32_t *tables, uint32_t n_tokens) {
  return (td_batch_view){.seq = tables,
                         .position = tables + TOKENS,
                         .q_begin = tables + 2 * TOKENS,
                         .page_table = tables + 3 * TOKENS,
                         .n_tokens = n_tokens,
                         .n_seqs = SEQS,
                         .max_pages = r->max_pages,
                         .page_tokens = r->c.page_tokens};
}

static td_delta_conv_args conv_args(const delta_run *r, const int32_t *tables, uint32_t n_tokens) {
  const td_delta_shape *s = &r->c.shape;
  const size_t heads = heads_of(r), k = s->k_dim, v = heads * s->v_dim, keys = s->n_k_heads * k;
  const size_t width = 2 * k + v, at = r->channels;
  const bool is_grouped = r->c.is_grouped;
  return (td_delta_conv_args){.batch = batch_of(r, tables, n_tokens),
                              .shape = *s,
                              .x_stride = r->mixed,
                              .q = {0, is_grouped ? width : k},
                              .k = {is_grouped ? k : keys, is_grouped ? width : k},
                              .v = {2 * (is_grouped ? k : keys), is_grouped ? width : v},
                              .b = {at, is_grouped ? 2 * heads : heads},
                              .a = {at + (is_grouped ? heads : s->n_v_heads),
                                    is_grouped ? 2 * heads : heads * td_delta_decays(s)},
                              .conv = r->conv,
                              .decay = r->decay,
                              .bias = r->bias,
                              .bound = r->c.bound};
}

// One step of both sequences on the GPU.
static void step(cuda_fixture *f, delta_run *r, const uint32_t begin[SEQS],
                 const uint32_t n[SEQS]) {
  int32_t tables[3 * TOKENS + SEQS * N];
  const uint32_t n_tokens = fill_tables(r, begin, n, tables), n_gates = gates_of(&r->c.shape);
  td_op_copy(f->stream, r->dev_tables, tables, (3 * TOKENS + SEQS * r->max_pages) * sizeof *tables);
  uint16_t *x = malloc((size_t)TOKENS * r->mixed * sizeof *x);
  TD_CHECK(x);
  for (uint32_t s = 0, t = 0; s < SEQS; t += n[s], s++)
    for (size_t i = 0; i < (size_t)n[s] * r->mixed; i++)
      x[t * r->mixed + i] = ref_to_bf16(r->x[(size_t)(s * N + begin[s]) * r->mixed + i]);
  td_op_copy(f->stream, r->dev_x, x, (size_t)n_tokens * r->mixed * sizeof *x);
  td_delta_conv_args conv = conv_args(r, r->dev_tables, n_tokens);
  conv.state = (td_kv_view){.pages = r->dev_states, .page_bytes = r->state_bytes, .dtype = TD_F32};
  conv.trail = r->trail;
  conv.x = r->dev_x;
  conv.out = r->dev_qkv;
  conv.gates = r->dev_gates;
  td_op_delta_conv(f->stream, &conv);
  td_op_delta_rule(f->stream, &(td_delta_rule_op_args){.batch = conv.batch,
                                                       .state = conv.state,
                                                       .shape = conv.shape,
                                                       .trail = r->trail,
                                                       .qkv = r->dev_qkv,
                                                       .gates = r->dev_gates,
                                                       .out = r->dev_out});
  cuda_sync(f);
  free(x);
  float *qkv = cuda_get_bf16(f, r->dev_qkv, (size_t)n_tokens * r->channels);
  float *out = cuda_get_bf16(f, r->dev_out, (size_t)n_tokens * r->values);
  for (uint32_t s = 0, t = 0; s < SEQS; t += n[s], s++) {
    const size_t to = s * N + begin[s];
    if (n[s] == 0) continue;
    memcpy(r->qkv + to * r->channels, qkv + t * r->channels, n[s] * r->channels * sizeof *qkv);
    memcpy(r->out + to * r->values, out + t * r->values, n[s] * r->values * sizeof *out);
    cuda_get(f, r->gates + to * n_gates, r->dev_gates + t * n_gates,
             n[s] * n_gates * sizeof *r->gates);
  }
  free(qkv);
  free(out);
}

// Both sequences from token `begin` on, `chunk` tokens a step, the second one half as many.
static void run_from(cuda_fixture *f, delta_run *r, uint32_t begin, uint32_t chunk) {
  uint32_t at[SEQS] = {begin, begin};
  while (at[0] < N || at[1] < N) {
    uint32_t n[SEQS] = {chunk, chunk < 2 ? chunk : chunk / 2};
    for (int s = 0; s < SEQS; s++)
      if (n[s] > N - at[s]) n[s] = N - at[s];
    step(f, r, at, n);
    for (int s = 0; s < SEQS; s++)
      at[s] += n[s];
  }
  cuda_get(f, r->states, r->dev_states, r->n_pages * r->state_bytes);
}

// ---- against the CPU ----------------------------------------------------------------------------

// The CPU's convolution of the same inputs, and its recurrence over the GPU's queries, keys, values
// and gates.
typedef struct {
  float *qkv, *gates, *out;
  char *states;
} cpu_results;

static cpu_results run_cpu(const delta_run *r) {
  const uint32_t begin[SEQS] = {0, 0}, n[SEQS] = {N, N};
  int32_t tables[3 * TOKENS + SEQS * N];
  fill_tables(r, begin, n, tables);
  cpu_results c = {.qkv = malloc((size_t)TOKENS * r->channels * sizeof *c.qkv),
                   .gates = malloc((size_t)TOKENS * gates_of(&r->c.shape) * sizeof *c.gates),
                   .out = malloc((size_t)TOKENS * r->values * sizeof *c.out),
                   .states = malloc(r->n_pages * r->state_bytes)};
  TD_CHECK(c.qkv && c.gates && c.out && c.states);
  memset(c.states, 0xff, r->n_pages * r->state_bytes);
  td_dev *dev;
  td_stream *stream;
  td_err err;
  assert_int_equal(td_dev_open(&dev, &(td_dev_opts){.kind = "cpu", .n_threads = 1}, &err), TD_OK);
  assert_int_equal(td_stream_open(&stream, dev, &err), TD_OK);
  td_delta_conv_args conv = conv_args(r, tables, TOKENS);
  conv.state = (td_kv_view){.pages = c.states, .page_bytes = r->state_bytes, .dtype = TD_F32};
  conv.x = r->x;
  conv.out = c.qkv;
  conv.gates = c.gates;
  td_op_delta_conv(stream, &conv);
  td_op_delta_rule(stream, &(td_delta_rule_op_args){.batch = conv.batch,
                                                    .state = conv.state,
                                                    .shape = conv.shape,
                                                    .qkv = r->qkv,
                                                    .gates = r->gates,
                                                    .out = c.out});
  if (td_stream_sync(stream, &err) != TD_OK) fail_msg("%s", err.msg);
  td_stream_close(stream);
  td_dev_close(dev);
  return c;
}

static void check_states(const delta_run *r, const char *want) {
  const size_t n_conv = (size_t)(r->c.shape.n_taps - 1) * r->channels;
  const size_t rule_at = td_delta_conv_floats(&r->c.shape);
  for (uint32_t p = 1; p < r->n_pages; p++) {
    const float *got = (const float *)(const void *)(r->states + p * r->state_bytes);
    const float *exact = (const float *)(const void *)(want + p * r->state_bytes);
    assert_memory_equal(got, exact, n_conv * sizeof *got);
    for (size_t i = rule_at; i < r->state_bytes / sizeof *got; i++)
      cuda_assert_within(got[i], exact[i], SLACK, "state", i);
  }
  for (size_t i = 0; i < r->state_bytes; i++) // no one's
    assert_int_equal((unsigned char)r->states[i], 0xff);
}

TEST(as_the_cpu) {
  for (size_t i = 0; i < TD_COUNT(cases); i++) {
    CUDA_OPEN(f);
    delta_run r = open_run(&f, &cases[i]);
    run_from(&f, &r, 0, N);
    cpu_results want = run_cpu(&r);
    for (size_t e = 0; e < (size_t)TOKENS * r.channels; e++)
      cuda_assert_within(r.qkv[e], want.qkv[e], fabs((double)want.qkv[e]) * ULP_BF16 / 2 + SLACK,
                         "convolution", e);
    for (size_t e = 0; e < (size_t)TOKENS * gates_of(&r.c.shape); e++)
      cuda_assert_within(r.gates[e], want.gates[e], SLACK, "gate", e);
    for (size_t e = 0; e < (size_t)TOKENS * r.values; e++)
      cuda_assert_within(r.out[e], want.out[e], fabs((double)want.out[e]) * ULP_BF16 / 2 + SLACK,
                         "result", e);
    check_states(&r, want.states);
    free(want.qkv), free(want.gates), free(want.out), free(want.states);
    close_run(&r);
    cuda_close(&f);
  }
}

// ---- against themselves -------------------------------------------------------------------------

// Results and all pages' states are the same bits in prompts of any cut and token by token. Runs
// are closed last: a device knows weights by their address.
TEST(cuts_change_no_bit) {
  static const uint32_t chunks[] = {2 * N, 16, 7, 1};
  for (size_t i = 0; i < TD_COUNT(cases); i++) {
    CUDA_OPEN(f);
    delta_run runs[TD_COUNT(chunks)];
    for (size_t k = 0; k < TD_COUNT(chunks); k++) {
      const delta_run *whole = &runs[0], *cut = &runs[k];
      runs[k] = open_run(&f, &cases[i]);
      run_from(&f, &runs[k], 0, chunks[k]);
      assert_memory_equal(whole->out, cut->out, (size_t)TOKENS * cut->values * sizeof *cut->out);
      assert_memory_equal(whole->states, cut->states, cut->n_pages * cut->state_bytes);
    }
    for (size_t k = 0; k < TD_COUNT(chunks); k++)
      close_run(&runs[k]);
    cuda_close(&f);
  }
}

// A sequence goes on from a full page alone, copied from elsewhere.
TEST(a_restored_page_continues) {
  CUDA_OPEN(f);
  delta_run whole = open_run(&f, &cases[0]), restored = open_run(&f, &cases[0]);
  const uint32_t page_tokens = whole.c.page_tokens;
  run_from(&f, &whole, 0, 2 * N);
  for (uint32_t s = 0; s < SEQS; s++) {
    const size_t at = (size_t)page_of(&whole, s, 0) * whole.state_bytes;
    td_op_copy(f.stream, restored.dev_states + at, whole.dev_states + at, whole.state_bytes);
  }
  run_from(&f, &restored, page_tokens, 3);
  for (uint32_t s = 0; s < SEQS; s++) {
    const size_t at = (size_t)(s * N + page_tokens) * whole.values;
    assert_memory_equal(whole.out + at, restored.out + at,
                        (N - page_tokens) * whole.values * sizeof *whole.out);
  }
  assert_memory_equal(whole.states, restored.states, whole.n_pages * whole.state_bytes);
  close_run(&whole);
  close_run(&restored);
  cuda_close(&f);
}

// The states that a sequence may go back to are those of steps that end there, of it alone.
TEST(states_to_go_back_to) {
  enum { FIRST = 1 };
  static const int32_t first[SEQS] = {-1, FIRST};
  static const uint32_t begin[SEQS] = {0, 0};
  for (size_t i = 0; i < TD_COUNT(cases); i++) {
    CUDA_OPEN(f);
    delta_run r = open_run(&f, &cases[i]);
    const uint32_t over = r.c.page_tokens + 3, n = over < N ? over : N; // into another page
    const size_t n_bytes = (FIRST + n) * r.state_bytes;
    char *slots = malloc(n_bytes);
    TD_CHECK(slots);
    memset(slots, 0xff, n_bytes);
    char *dev_slots = cuda_put(&f, slots, n_bytes);
    r.trail = (td_state_trail){dev_slots, cuda_put(&f, first, sizeof first), r.state_bytes};
    step(&f, &r, begin, (uint32_t[]){2, n});
    cuda_get(&f, slots, dev_slots, n_bytes);
    r.trail = (td_state_trail){.slots = NULL};
    for (uint32_t t = 0; t + 1 < n; t++) {
      const size_t at = (size_t)page_of(&r, 1, t / r.c.page_tokens) * r.state_bytes;
      step(&f, &r, begin, (uint32_t[]){2, t + 1});
      cuda_get(&f, r.states, r.dev_states, r.n_pages * r.state_bytes);
      assert_memory_equal(slots + (FIRST + t) * r.state_bytes, r.states + at, r.state_bytes);
    }
    for (size_t k = 0; k < r.state_bytes; k++) // no one's
      assert_true(slots[k] == (char)0xff && slots[n_bytes - 1 - k] == (char)0xff);
    free(slots);
    close_run(&r);
    cuda_close(&f);
  }
}

// ---- gates --------------------------------------------------------------------------------------

static void check_gate_rows(uint32_t dim, int kind) {
  enum { ROWS = 3, GROUPS = 2 };
  const bool is_silu = kind == 1, is_scalar = kind == 2;
  const uint32_t stride = 2 * GROUPS * dim + 8, n = ROWS * GROUPS * dim;
  CUDA_OPEN(f);
  float *x = cuda_floats(&f, n), *gate = cuda_floats(&f, ROWS * stride);
  uint16_t *y = cuda_put_bf16(&f, x, n);
  td_op_gate_rows(f.stream, &(td_gate_rows_args){
                                .x = y,
                                .gate = is_scalar ? cuda_put(&f, gate, ROWS * stride * sizeof *gate)
                                                  : (void *)cuda_put_bf16(&f, gate, ROWS * stride),
                                .gate_stride = stride,
                                .part = {.offset = dim, .stride = 2 * dim},
                                .n_tokens = ROWS,
                                .n_groups = GROUPS,
                                .dim = dim,
                                .silu = is_silu,
                                .scalar = is_scalar});
  float *got = cuda_get_bf16(&f, y, n);
  for (uint32_t i = 0; i < n; i++) {
    const uint32_t t = i / (GROUPS * dim), g = i / dim % GROUPS;
    const double at = gate[t * stride + dim + g * 2 * dim + (is_scalar ? 0 : i % dim)];
    const double want = x[i] / (1 + exp(-at)) * (is_silu ? at : 1);
    cuda_assert_within(got[i], want, fabs(want) * (ULP_BF16 / 2 + 8 * ULP_F32), "gated", i);
  }
  free(x), free(gate), free(got);
  cuda_close(&f);
}

TEST(gate_rows) {
  for (int kind = 0; kind < 3; kind++) { // sigmoid; SiLU; one gate a group
    check_gate_rows(18, kind);
    check_gate_rows(2056, kind); // in runs, more than a block's threads take at once
  }
}

// ---- what cannot be -----------------------------------------------------------------------------

TEST(errors) {
  CUDA_OPEN(f);
  td_err err;
  delta_run r = open_run(&f, &cases[3]);
  td_delta_conv_args conv = conv_args(&r, r.dev_tables, 1);
  conv.state = (td_kv_view){.pages = r.dev_states, .page_bytes = r.state_bytes, .dtype = TD_F32};
  conv.shape.k_dim = 136;
  conv.state.page_bytes *= 2;
  td_op_delta_conv(f.stream, &conv);
  assert_int_equal(td_stream_sync(f.stream, &err), TD_EUNSUPPORTED);
  assert_non_null(strstr(err.msg, "keys of 136 elements; on a GPU at most 128"));
  close_run(&r);
  cuda_close(&f);
}

TEST(an_absent_page_is_noticed) {
  CUDA_OPEN(f);
  td_err err;
  delta_run r = open_run(&f, &cases[0]);
  const uint32_t begin[SEQS] = {3, 0}, n[SEQS] = {1, 0};
  int32_t tables[3 * TOKENS + SEQS * N];
  fill_tables(&r, begin, n, tables);
  tables[3 * TOKENS] = -1;
  td_op_copy(f.stream, r.dev_tables, tables, (3 * TOKENS + SEQS * r.max_pages) * sizeof *tables);
  td_op_fill_zero(f.stream, r.dev_qkv, r.channels * sizeof *r.dev_qkv);
  td_op_fill_zero(f.stream, r.dev_gates, 2 * r.c.shape.n_v_heads * sizeof *r.dev_gates);
  td_op_delta_rule(
      f.stream, &(td_delta_rule_op_args){
                    .batch = batch_of(&r, r.dev_tables, 1),
                    .state = {.pages = r.dev_states, .page_bytes = r.state_bytes, .dtype = TD_F32},
                    .shape = r.c.shape,
                    .qkv = r.dev_qkv,
                    .gates = r.dev_gates,
                    .out = r.dev_out});
  assert_true(td_stream_sync(f.stream, &err) != TD_OK);
  assert_non_null(strstr(err.msg, "page"));
  close_run(&r);
  cuda_close(&f);
}
