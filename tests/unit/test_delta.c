// tests/unit/test_delta.c - gated delta nets: every version of their kernels, and the operators of
// the CPU device, whose results and states must not depend on how a sequence is cut.

#include "device/check.h"
#include "device/device.h"
#include "unit/kernel_test.h"

// ---- kernels ------------------------------------------------------------------------------------

// e^-g within 2 ulp, then three roundings of half an ulp.
static bool check_sigmoid(void (*fn)(void), const void *arg, why *w) {
  (void)arg;
  static const size_t lengths[] = {1, 7, 8, 9, 16, 17, 100};
  uint64_t rng = 1;
  bool ok = true;
  for (size_t c = 0; ok && c < TD_COUNT(lengths); c++) {
    const size_t n = lengths[c];
    ref_mem out = ref_guarded(n * sizeof(float));
    float *gate = ref_floats(&rng, n), *x = ref_floats(&rng, n), *y = out.data;
    ((void (*)(const td_sigmoid_row_args *))fn)(
        &(td_sigmoid_row_args){.gate = gate, .x = x, .out = y, .n = n});
    for (size_t i = 0; ok && i < n; i++) {
      const double want = x[i] / (1 + exp(-(double)gate[i]));
      if (!(fabs(y[i] - want) <= 8 * 0x1p-24 * fabs(want)))
        ok = KERNEL_FAIL(w, "gate %g, x %g: %g, not %g", gate[i], x[i], y[i], want);
    }
    free(gate);
    free(x);
    ref_unmap(&out);
  }
  return ok;
}

static double silu(double x) {
  return x / (1 + exp(-x));
}

// A sum of n_taps products, whose error passes SiLU at most 1.1 times, and SiLU's own.
static bool check_conv(void (*fn)(void), const void *arg, why *w) {
  (void)arg;
  static const size_t lengths[] = {1, 7, 16, 19, 64, 100};
  uint64_t rng = 2;
  bool ok = true;
  for (size_t c = 0; ok && c < 3 * TD_COUNT(lengths); c++) {
    const size_t n = lengths[c / 3], ldw = n + c;
    const uint32_t n_taps = 2 + c % 3;
    ref_mem out = ref_guarded(n * sizeof(float));
    float *x = ref_floats(&rng, 4 * n), *filter = ref_floats(&rng, 4 * ldw), *y = out.data;
    const float *const rows[] = {x, x + n, x + 2 * n, x + 3 * n};
    ((void (*)(const td_conv_silu_args *))fn)(&(td_conv_silu_args){
        .x = rows, .w = filter, .out = y, .n = n, .ldw = ldw, .n_taps = n_taps});
    for (size_t i = 0; ok && i < n; i++) {
      double sum = 0, magnitude = 0;
      for (uint32_t j = 0; j < n_taps; j++) {
        sum += (double)filter[j * ldw + i] * rows[j][i];
        magnitude += fabs((double)filter[j * ldw + i] * rows[j][i]);
      }
      const double bound = (1.1 * (n_taps + 1) * magnitude + 8 * fabs(sum)) * 0x1p-24;
      if (!(fabs(y[i] - silu(sum)) <= bound))
        ok = KERNEL_FAIL(w, "n %zu, %u taps, at %zu: %g, not %g", n, n_taps, i, y[i], silu(sum));
    }
    free(x);
    free(filter);
    ref_unmap(&out);
  }
  return ok;
}

enum { RULE_TOKENS = 6, MAX_K = 128, COLUMNS = TD_DELTA_COLUMNS };

// Inputs of a head: normed queries and keys, decays and strengths between 0 and 1.
typedef struct {
  float *q, *k, *v, *state, gates[(MAX_K + 1) * RULE_TOKENS];
  uint32_t k_dim, n_cols, n_decays;
} rule_case;

static void norm_rows(float *x, uint32_t n_rows, uint32_t n) {
  for (uint32_t r = 0; r < n_rows; r++) {
    double sum = 0;
    for (uint32_t i = 0; i < n; i++)
      sum += (double)x[r * n + i] * x[r * n + i];
    for (uint32_t i = 0; i < n; i++)
      x[r * n + i] = (float)(x[r * n + i] / sqrt(sum + 1e-9));
  }
}

static rule_case make_rule(uint64_t *rng, uint32_t k_dim, uint32_t n_cols, bool has_each) {
  rule_case c = {.q = ref_floats(rng, RULE_TOKENS * k_dim),
                 .k = ref_floats(rng, RULE_TOKENS * k_dim),
                 .v = ref_floats(rng, RULE_TOKENS * n_cols),
                 .state = ref_floats(rng, (size_t)k_dim * COLUMNS),
                 .k_dim = k_dim,
                 .n_cols = n_cols,
                 .n_decays = has_each ? k_dim : 1};
  norm_rows(c.q, RULE_TOKENS, k_dim);
  norm_rows(c.k, RULE_TOKENS, k_dim);
  for (uint32_t i = 0; i < (c.n_decays + 1) * RULE_TOKENS; i++)
    c.gates[i] = 0.5f + 0.5f * ref_float(rng);
  return c;
}

static void free_rule(rule_case *c) {
  free(c->q);
  free(c->k);
  free(c->v);
  free(c->state);
}

// Tokens [begin, begin + n) through a kernel.
static void run_rule(void (*fn)(void), const rule_case *c, float *state, float *out, uint32_t begin,
                     uint32_t n) {
  const uint32_t of_gates = c->n_decays + 1;
  ((void (*)(const td_delta_rule_args *))fn)(
      &(td_delta_rule_args){.state = state,
                            .q = c->q + begin * c->k_dim,
                            .k = c->k + begin * c->k_dim,
                            .v = c->v + begin * c->n_cols,
                            .gates = c->gates + of_gates * begin,
                            .out = out + begin * c->n_cols,
                            .ldk = c->k_dim,
                            .ldv = c->n_cols,
                            .ldg = of_gates,
                            .ldo = c->n_cols,
                            .n_tokens = n,
                            .k_dim = c->k_dim,
                            .n_cols = c->n_cols,
                            .n_decays = c->n_decays});
}

// One token in double; *magnitude becomes the largest sum of absolute products.
static void naive_rule(const rule_case *c, uint32_t t, double *state, double *out,
                       double *magnitude) {
  const float *gates = c->gates + (c->n_decays + 1) * t;
  const double b = gates[c->n_decays];
  for (uint32_t col = 0; col < c->n_cols; col++) {
    double known = 0, sum = 0, terms = fabs(c->v[t * c->n_cols + col]);
    for (uint32_t i = 0; i < c->k_dim; i++) {
      const double g = gates[c->n_decays > 1 ? i : 0];
      known += g * c->k[t * c->k_dim + i] * state[i * COLUMNS + col];
      terms += fabs(c->k[t * c->k_dim + i] * state[i * COLUMNS + col]);
    }
    const double d = b * (c->v[t * c->n_cols + col] - known);
    for (uint32_t i = 0; i < c->k_dim; i++) {
      double *s = &state[i * COLUMNS + col];
      *s = gates[c->n_decays > 1 ? i : 0] * *s + c->k[t * c->k_dim + i] * d;
      sum += c->q[t * c->k_dim + i] * *s;
      terms += fabs(c->q[t * c->k_dim + i] * *s);
    }
    out[t * c->n_cols + col] = sum;
    *magnitude = fmax(*magnitude, terms);
  }
}

// Decays and strengths of at most 1 and keys of norm 1 do not make an error of the state grow, so a
// token adds to it what its own sums of k_dim terms and eight more roundings cost.
static bool check_rule(void (*fn)(void), const void *arg, why *w) {
  (void)arg;
  static const uint32_t dims[][2] = {{1, 1}, {3, 7}, {12, 20}, {16, 16}, {24, 32}, {128, 32}};
  uint64_t rng = 3;
  bool ok = true;
  for (size_t n = 0; ok && n < 2 * TD_COUNT(dims); n++) {
    const size_t i = n / 2;
    rule_case c = make_rule(&rng, dims[i][0], dims[i][1], n % 2);
    const size_t n_state = (size_t)c.k_dim * COLUMNS;
    ref_mem got = ref_guarded(RULE_TOKENS * c.n_cols * sizeof(float));
    float out[RULE_TOKENS * COLUMNS], *whole = malloc(n_state * sizeof *whole);
    double *exact = ref_doubles(n_state), want[RULE_TOKENS * COLUMNS], magnitude = 0;
    for (size_t k = 0; k < n_state; k++)
      exact[k] = whole[k] = c.state[k];
    for (uint32_t t = 0; t < RULE_TOKENS; t++)
      naive_rule(&c, t, exact, want, &magnitude);
    run_rule(fn, &c, whole, got.data, 0, RULE_TOKENS);
    for (uint32_t t = 0; t < RULE_TOKENS; t++)
      run_rule(fn, &c, c.state, out, t, 1);
    const double bound = 2.0 * RULE_TOKENS * (c.k_dim + 8) * 0x1p-24 * magnitude;
    for (uint32_t k = 0; ok && k < RULE_TOKENS * c.n_cols; k++) {
      const double y = ((float *)got.data)[k];
      if (!(fabs(y - want[k]) <= bound))
        ok = KERNEL_FAIL(w, "%u x %u, at %u: %g, not %g", c.k_dim, c.n_cols, k, y, want[k]);
    }
    if (ok && (memcmp(out, got.data, RULE_TOKENS * c.n_cols * sizeof *out) != 0 ||
               memcmp(whole, c.state, n_state * sizeof *whole) != 0))
      ok = KERNEL_FAIL(w, "%u x %u: token by token is not all together", c.k_dim, c.n_cols);
    free(whole);
    free(exact);
    free_rule(&c);
    ref_unmap(&got);
  }
  return ok;
}

// Softplus within 8 roundings, by which its product with the rate may be off; e to that within 2
// ulp. With a bound, what the sigmoid is of has two roundings, which its slope of at most 1/4
// passes on, and then some more.
static bool check_decay(void (*fn)(void), const void *arg, why *w) {
  (void)arg;
  static const size_t lengths[] = {1, 7, 16, 19, 100};
  static const float rates[] = {0.01f, 1, 16}, spans[] = {1, 30, 200}, bounds[] = {0, -5};
  uint64_t rng = 6;
  bool ok = true;
  for (size_t c = 0; ok && c < 18 * TD_COUNT(lengths); c++) {
    const size_t n = lengths[c / 18];
    const float bound = bounds[c / 9 % 2];
    const float rate = rates[c / 3 % 3];
    ref_mem out = ref_guarded(n * sizeof(float));
    float *x = ref_floats(&rng, n), *bias = ref_floats(&rng, n), *y = out.data;
    for (size_t i = 0; i < n; i++)
      x[i] *= spans[c % 3];
    ((void (*)(const td_decay_row_args *))fn)(
        &(td_decay_row_args){.x = x, .bias = bias, .out = y, .n = n, .rate = rate, .bound = bound});
    for (size_t i = 0; ok && i < n; i++) {
      const double sum = (double)(x[i] + bias[i]);
      const double open = rate * (fmax(sum, 0) + log1p(exp(-fabs(sum))));
      const double power = bound < 0 ? -bound / (1 + exp(-rate * sum)) : open, want = exp(-power);
      const double slack = bound < 0 ? -bound * (fabs(rate * sum) * exp(-fabs(rate * sum)) + 8)
                                     : 8 * power;
      if (!(fabs(y[i] - want) <= (slack + 6) * 0x1p-24 * want + 0x1p-149))
        ok = KERNEL_FAIL(w, "rate %g, %g: %g, not %g", rate, sum, y[i], want);
    }
    free(x);
    free(bias);
    ref_unmap(&out);
  }
  return ok;
}

TEST(kernels) {
  for_versions("sigmoid_row", check_sigmoid, NULL);
  for_versions("conv_silu", check_conv, NULL);
  for_versions("delta_rule", check_rule, NULL);
  for_versions("decay_row", check_decay, NULL);
}

// Takes the first decay for all.
static void broken_rule(const td_delta_rule_args *a) {
  float gates[2 * RULE_TOKENS];
  td_delta_rule_args args = *a;
  for (uint32_t t = 0; t < a->n_tokens; t++) {
    gates[2 * t] = a->gates[t * a->ldg];
    gates[2 * t + 1] = a->gates[t * a->ldg + a->n_decays];
  }
  args.gates = gates;
  args.ldg = 2;
  args.n_decays = 1;
  td_kernels()->delta_rule(&args);
}

TEST(a_broken_kernel_is_caught) {
  why w;
  assert_false(check_rule((void (*)(void))broken_rule, NULL, &w));
}

// ---- operators ----------------------------------------------------------------------------------

enum { PAGE = 16, SEQ_PAGES = 4, N_TOKENS = 55, N_PAGES = 2 * SEQ_PAGES + 1 };

// Two key heads for six value heads, widths that fill no vector, two tiles of the state.
static td_delta_shape shape = {
    .n_k_heads = 2, .n_v_heads = 6, .k_dim = 12, .v_dim = 36, .n_taps = 4};
enum { KEYS = 24, VALUES = 216, CHANNELS = 2 * KEYS + VALUES, DECAYS = 6 * 12 };
enum { MIXED = CHANNELS + 6 + DECAYS + 5, GATES = 6 + DECAYS };

typedef struct {
  td_dev *dev;
  td_stream *stream;
  float *conv, decay[6], bias[DECAYS];
  float *x;     // [2][N_TOKENS][MIXED], of two sequences
  char *states; // [N_PAGES]
  td_state_trail trail;
  float *out; // [2][N_TOKENS][VALUES]
} fixture;

static const int32_t pages[2][SEQ_PAGES] = {{3, 0, 7, 5}, {1, 2, 6, 4}};

static void open_fixture(fixture *f, unsigned n_threads) {
  td_err err;
  uint64_t rng = 4;
  const td_dev_opts opts = {.kind = "cpu", .n_threads = n_threads};
  f->trail = (td_state_trail){.slots = NULL};
  assert_int_equal(td_dev_open(&f->dev, &opts, &err), TD_OK);
  assert_int_equal(td_stream_open(&f->stream, f->dev, &err), TD_OK);
  f->conv = ref_floats(&rng, 4 * CHANNELS);
  f->x = ref_floats(&rng, 2 * N_TOKENS * MIXED);
  f->states = malloc(N_PAGES * td_delta_state_bytes(&shape));
  f->out = malloc(2 * N_TOKENS * VALUES * sizeof *f->out);
  for (int h = 0; h < 6; h++)
    f->decay[h] = ref_float(&rng) - 2;
  for (int i = 0; i < DECAYS; i++)
    f->bias[i] = ref_float(&rng);
  memset(f->states, 0xff, N_PAGES * td_delta_state_bytes(&shape)); // NaN
}

static void close_fixture(fixture *f) {
  td_stream_close(f->stream);
  td_dev_close(f->dev);
  free(f->conv);
  free(f->x);
  free(f->states);
  free(f->out);
}

// Tokens [begin[s], begin[s] + n[s]) of both sequences in one step; inputs grouped by key head or
// by kind.
static void step(fixture *f, const uint32_t begin[2], const uint32_t n[2], bool is_grouped) {
  int32_t seq[2 * N_TOKENS], position[2 * N_TOKENS], q_begin[3] = {0};
  uint32_t t = 0;
  const uint32_t n_all = n[0] + n[1], heads = 3, width = 2 * shape.k_dim + heads * shape.v_dim;
  float *x = malloc(n_all * MIXED * sizeof *x), *qkv = malloc(n_all * CHANNELS * sizeof *qkv);
  float *gates = malloc(n_all * GATES * sizeof *gates), *out = malloc(n_all * VALUES * sizeof *out);
  for (int s = 0; s < 2; s++) {
    for (uint32_t i = 0; i < n[s]; i++, t++) {
      seq[t] = s;
      position[t] = (int32_t)(begin[s] + i);
      memcpy(x + t * MIXED, f->x + ((uint32_t)s * N_TOKENS + begin[s] + i) * MIXED,
             MIXED * sizeof *x);
    }
    q_begin[s + 1] = (int32_t)t;
  }
  const td_batch_view batch = {.seq = seq,
                               .position = position,
                               .q_begin = q_begin,
                               .page_table = pages[0],
                               .n_tokens = n_all,
                               .n_seqs = 2,
                               .max_pages = SEQ_PAGES,
                               .page_tokens = PAGE};
  const td_kv_view states = {
      .pages = f->states, .page_bytes = td_delta_state_bytes(&shape), .dtype = TD_F32};
  td_delta_conv_args conv = {
      .batch = batch,
      .state = states,
      .shape = shape,
      .trail = f->trail,
      .x = x,
      .x_stride = MIXED,
      .q = {0, is_grouped ? width : shape.k_dim},
      .k = {is_grouped ? shape.k_dim : KEYS, is_grouped ? width : shape.k_dim},
      .v = {2 * (is_grouped ? shape.k_dim : KEYS), is_grouped ? width : heads * shape.v_dim},
      .b = {CHANNELS, is_grouped ? 2 * heads : heads},
      .a = {CHANNELS + (is_grouped ? heads : 2 * heads),
            is_grouped ? 2 * heads : heads * td_delta_decays(&shape)},
      .conv = f->conv,
      .decay = f->decay,
      .bias = f->bias,
      .out = qkv,
      .gates = gates};
  td_op_delta_conv(f->stream, &conv);
  td_op_delta_rule(f->stream, &(td_delta_rule_op_args){.batch = batch,
                                                       .state = states,
                                                       .shape = shape,
                                                       .trail = f->trail,
                                                       .qkv = qkv,
                                                       .gates = gates,
                                                       .out = out});
  td_err err;
  if (td_stream_sync(f->stream, &err) != TD_OK) fail_msg("%s", err.msg);
  for (int s = 0; s < 2; s++)
    memcpy(f->out + ((uint32_t)s * N_TOKENS + begin[s]) * VALUES,
           out + (uint32_t)q_begin[s] * VALUES, n[s] * VALUES * sizeof *out);
  free(x);
  free(qkv);
  free(gates);
  free(out);
}

// Both sequences from token `begin` on, `chunk` tokens a step, the second one at most half as many.
static void run(fixture *f, uint32_t begin, uint32_t chunk, bool is_grouped) {
  uint32_t at[2] = {begin, begin};
  while (at[0] < N_TOKENS || at[1] < N_TOKENS) {
    uint32_t n[2] = {chunk, chunk < 2 ? chunk : chunk / 2};
    for (int s = 0; s < 2; s++)
      if (n[s] > N_TOKENS - at[s]) n[s] = N_TOKENS - at[s];
    step(f, at, n, is_grouped);
    at[0] += n[0];
    at[1] += n[1];
  }
}

// The input of a channel at a token: keys' and queries' and values' by key head, or by kind.
static double input_at(const fixture *f, int s, int t, uint32_t channel, bool is_grouped) {
  const uint32_t values = 3 * shape.v_dim, width = 2 * shape.k_dim + values;
  uint32_t at = channel;
  if (t < 0) return 0;
  if (is_grouped && channel < 2 * KEYS) {
    const uint32_t head = channel % KEYS / shape.k_dim;
    at = head * width + channel / KEYS * shape.k_dim + channel % shape.k_dim;
  } else if (is_grouped) {
    const uint32_t head = (channel - 2 * KEYS) / values;
    at = head * width + 2 * shape.k_dim + (channel - 2 * KEYS) % values;
  }
  return f->x[((uint32_t)s * N_TOKENS + (uint32_t)t) * MIXED + at];
}

// A sequence in double.
static void naive(const fixture *f, int s, bool is_grouped, double *out) {
  static double states[6][12][36];
  memset(states, 0, sizeof states);
  for (int t = 0; t < N_TOKENS; t++) {
    double c[CHANNELS];
    for (uint32_t i = 0; i < CHANNELS; i++) {
      double sum = 0;
      for (int j = 0; j < 4; j++)
        sum += f->conv[j * CHANNELS + (int)i] * input_at(f, s, t - 3 + j, i, is_grouped);
      c[i] = silu(sum);
    }
    const float *row = f->x + ((uint32_t)s * N_TOKENS + (uint32_t)t) * MIXED + CHANNELS;
    for (int h = 0; h < 6; h++) {
      const int k_head = shape.is_tiled ? h % 2 : h / 3;
      const double *q = c + k_head * 12, *k = c + KEYS + k_head * 12, *v = c + 2 * KEYS + h * 36;
      const double b = row[is_grouped ? h / 3 * 6 + h % 3 : h];
      double g[12], strength = 1 / (1 + exp(-b)), qq = 1e-6, kk = 1e-6;
      for (int i = 0; i < 12; i++) {
        const int own = shape.by_channel ? h * 12 + i : h;
        const double a = row[is_grouped ? h / 3 * 6 + 3 + h % 3 : 6 + own] + f->bias[own];
        g[i] = exp(-exp(f->decay[h]) * log1p(exp(a)));
        qq += q[i] * q[i];
        kk += k[i] * k[i];
      }
      for (int e = 0; e < 36; e++) {
        double known = 0, sum = 0;
        for (int i = 0; i < 12; i++)
          known += g[i] * states[h][i][e] * k[i] / sqrt(kk);
        for (int i = 0; i < 12; i++) {
          states[h][i][e] = g[i] * states[h][i][e] + k[i] / sqrt(kk) * strength * (v[e] - known);
          sum += states[h][i][e] * q[i] / sqrt(qq * 12);
        }
        out[t * VALUES + h * 36 + e] = sum;
      }
    }
  }
}

TEST(operators) {
  for (int order = 0; order < 4; order++) {
    const bool is_grouped = order == 1;
    fixture f;
    shape.is_tiled = order == 2;
    shape.by_channel = order == 3;
    open_fixture(&f, 3);
    run(&f, 0, N_TOKENS, is_grouped);
    double *want = ref_doubles(N_TOKENS * VALUES);
    for (int s = 0; s < 2; s++) {
      naive(&f, s, is_grouped, want);
      const double d = ref_distance(f.out + s * N_TOKENS * VALUES, want, N_TOKENS * VALUES);
      if (!(d < 1e-5)) fail_msg("sequence %d: distance %g", s, d);
    }
    free(want);
    close_fixture(&f);
  }
  shape.is_tiled = shape.by_channel = false;
}

// Results and all pages' states are the same bits however both sequences are cut, whatever the
// number of threads; a page no token is in keeps what it has.
TEST(cuts_change_no_bit) {
  static const uint32_t chunks[] = {32, 16, 7, 1};
  const size_t n_states = N_PAGES * td_delta_state_bytes(&shape);
  fixture whole, cut;
  open_fixture(&whole, 3);
  run(&whole, 0, N_TOKENS, true);
  for (size_t i = 0; i < TD_COUNT(chunks); i++) {
    open_fixture(&cut, i % 2 ? 1 : 3);
    run(&cut, 0, chunks[i], true);
    assert_memory_equal(whole.out, cut.out, 2 * N_TOKENS * VALUES * sizeof *cut.out);
    assert_memory_equal(whole.states, cut.states, n_states);
    close_fixture(&cut);
  }
  close_fixture(&whole);
}

// A sequence goes on from a full page alone, copied from elsewhere.
TEST(a_restored_page_continues) {
  const size_t n = td_delta_state_bytes(&shape);
  fixture whole, restored;
  open_fixture(&whole, 2);
  open_fixture(&restored, 2);
  run(&whole, 0, 20, false);
  for (int s = 0; s < 2; s++)
    memcpy(restored.states + (size_t)pages[s][1] * n, whole.states + (size_t)pages[s][1] * n, n);
  run(&restored, 2 * PAGE, 5, false);
  for (int s = 0; s < 2; s++) {
    const size_t at = ((size_t)s * N_TOKENS + 2 * PAGE) * VALUES;
    assert_memory_equal(whole.out + at, restored.out + at,
                        (N_TOKENS - 2 * PAGE) * VALUES * sizeof *whole.out);
    for (int p = 2; p < SEQ_PAGES; p++)
      assert_memory_equal(whole.states + (size_t)pages[s][p] * n,
                          restored.states + (size_t)pages[s][p] * n, n);
  }
  close_fixture(&whole);
  close_fixture(&restored);
}

// The states that a sequence may go back to are those of steps that end there, of it alone.
TEST(states_to_go_back_to) {
  enum { N = PAGE + 3, FIRST = 1 };
  static const int32_t first[] = {-1, FIRST};
  static const uint32_t begin[2] = {0, 0};
  const size_t n = td_delta_state_bytes(&shape);
  char *slots = malloc((FIRST + N) * n);
  fixture kept, cut;
  memset(slots, 0xff, (FIRST + N) * n);
  open_fixture(&kept, 3);
  kept.trail = (td_state_trail){slots, first, n};
  step(&kept, begin, (uint32_t[]){2, N}, true);
  for (uint32_t i = 0; i < N; i++) {
    open_fixture(&cut, 2);
    step(&cut, begin, (uint32_t[]){2, i + 1}, true);
    const char *want = cut.states + (size_t)pages[1][i / PAGE] * n;
    if (i + 1 < N) {
      assert_memory_equal(slots + (FIRST + i) * n, want, n);
    } else {
      assert_memory_equal(cut.states, kept.states, N_PAGES * n);
      assert_memory_equal(cut.out, kept.out, 2 * VALUES * sizeof *cut.out);
    }
    close_fixture(&cut);
  }
  for (size_t i = 0; i < n; i++)
    assert_true(slots[i] == (char)0xff && slots[(FIRST + N - 1) * n + i] == (char)0xff);
  free(slots);
  close_fixture(&kept);
}

TEST(gate_rows) {
  enum { TOKENS = 5, GROUPS = 3, DIM = 18, STRIDE = 2 * GROUPS * DIM + 1 };
  fixture f;
  open_fixture(&f, 3);
  uint64_t rng = 5;
  float *x = ref_floats(&rng, TOKENS * GROUPS * DIM), *gate = ref_floats(&rng, TOKENS * STRIDE);
  for (int kind = 0; kind < 3; kind++) { // sigmoid; silu; one gate a token
    const bool is_scalar = kind == 2;
    float y[TOKENS * GROUPS * DIM];
    double want[TOKENS * GROUPS * DIM];
    memcpy(y, x, sizeof y);
    td_op_gate_rows(f.stream, &(td_gate_rows_args){.x = y,
                                                   .gate = gate,
                                                   .gate_stride = STRIDE,
                                                   .part = {.offset = DIM, .stride = 2 * DIM},
                                                   .n_tokens = TOKENS,
                                                   .n_groups = GROUPS,
                                                   .dim = DIM,
                                                   .silu = kind == 1,
                                                   .scalar = is_scalar});
    td_err err;
    assert_int_equal(td_stream_sync(f.stream, &err), TD_OK);
    for (int i = 0; i < TOKENS * GROUPS * DIM; i++) {
      const int t = i / (GROUPS * DIM), g = i / DIM % GROUPS, e = i % DIM;
      const double at = gate[t * STRIDE + DIM + g * 2 * DIM + (is_scalar ? 0 : e)];
      want[i] = x[i] * (kind == 1 ? silu(at) : 1 / (1 + exp(-at)));
    }
    assert_true(ref_distance(y, want, TOKENS * GROUPS * DIM) < 1e-6);
  }
  free(x);
  free(gate);
  close_fixture(&f);
}

TEST(bad_shapes) {
  static const struct {
    td_delta_shape shape;
    td_dtype dtype;
    const char *part;
  } cases[] = {{{2, 4, 8, 8, 4, false, false}, TD_F32, NULL},
               {{2, 4, 8, 8, 2, false, false}, TD_F32, NULL},
               {{2, 4, 8, 8, TD_DELTA_MAX_TAPS, false, false}, TD_F32, NULL},
               {{0, 4, 8, 8, 4, false, false}, TD_F32, "4 value heads for 0 key heads"},
               {{3, 4, 8, 8, 4, false, false}, TD_F32, "4 value heads for 3 key heads"},
               {{2, 4, 8, 8, 1, false, false}, TD_F32, "a filter of 1 taps"},
               {{2, 4, 8, 8, TD_DELTA_MAX_TAPS + 1, false, false}, TD_F32, "a filter of 17 taps"},
               {{2, 4, 8, 8, 4, false, false}, TD_F16, "a state of"}};
  for (size_t i = 0; i < TD_COUNT(cases); i++) {
    td_err err;
    td_kv_view view = {.dtype = cases[i].dtype,
                       .page_bytes = td_delta_state_bytes(&cases[i].shape)};
    const td_status st = td_dev_check_delta(&view, &cases[i].shape, &err);
    assert_int_equal(st, cases[i].part ? TD_EINVAL : TD_OK);
    if (cases[i].part && !strstr(err.msg, cases[i].part))
      fail_msg("'%s' does not speak of '%s'", err.msg, cases[i].part);
    view.page_bytes--;
    assert_int_equal(td_dev_check_delta(&view, &cases[i].shape, &err), TD_EINVAL);
  }
}

static int by_channel(void **state) {
  (void)state;
  shape.by_channel = true;
  return 0;
}

static int by_head(void **state) {
  (void)state;
  shape.by_channel = false;
  return 0;
}

TEST(cuts_change_no_bit_by_channel, by_channel, by_head) {
  test_cuts_change_no_bit(state);
}

TEST(a_restored_page_continues_by_channel, by_channel, by_head) {
  test_a_restored_page_continues(state);
}

TEST(states_to_go_back_to_by_channel, by_channel, by_head) {
  test_states_to_go_back_to(state);
}

int before_all(void **state) {
  (void)state;
  td_kernels_init(NULL);
  return 0;
}
