// tests/unit/test_cuda_delta_chunks.c - the gated delta rule of prompts in chunks on tensor cores,
// against the recurrence in double, and against itself in other steps.
// CTest: gpu no-tsan

#include "unit/cuda_test.h"

enum {
  CHUNK = TD_CU_DELTA_CHUNK,
  CHANNEL_CHUNK = TD_CU_CHANNEL_CHUNK,
  SEQS = 2,
  N = 3 * CHUNK + 7,
  SHORT = CHUNK + 1
};
static const uint32_t lengths[SEQS] = {N, SHORT};
enum { TOKENS = N + SHORT };

// Plain decays and strengths are from 0.5 to 1. Slow decays are nearly 1, so that a chunk sees much
// of those before it. Keys that hardly differ, with slow decays and strengths of nearly 1: a token
// takes back what those before it wrote. Of others some decays are 0, or so small that a chunk's
// product is no FP32 number. Uneven decays are from nearly 1 to e^-40, from one to the next.
typedef enum { PLAIN, SLOW, SAME_KEYS, GONE, UNEVEN } input_kind;

typedef struct {
  td_delta_shape shape;
  uint32_t page_tokens;
  input_kind kind;
} chunk_case;

static const chunk_case cases[] = {
    {{1, 2, 128, 40, 4, false, false}, CHUNK, SLOW},    // a second tile of eight columns
    {{2, 4, 128, 8, 4, true, false}, 2 * CHUNK, PLAIN}, // value heads in the other order
    {{1, 1, 128, 16, 4, false, false}, 2 * CHUNK, SAME_KEYS},
    {{2, 2, 72, 64, 2, false, false}, 4 * CHUNK, GONE}, // keys of fewer elements
    // a decay for each channel
    {{1, 1, 128, 40, 4, false, true}, CHUNK, SLOW},
    {{5, 5, 128, 8, 4, false, true}, 2 * CHUNK, UNEVEN}, // more heads than a block's warps
    {{1, 2, 128, 16, 4, false, true}, 2 * CHUNK, SAME_KEYS},
    {{2, 2, 72, 64, 2, false, true}, 4 * CHUNK, GONE},
    {{1, 1, 80, 8, 2, false, true}, CHUNK, PLAIN},
};

static uint32_t chunk_of(const chunk_case *c) {
  return c->shape.by_channel ? CHANNEL_CHUNK : CHUNK;
}

typedef struct {
  chunk_case c;
  uint32_t channels, values, max_pages, n_pages;
  size_t state_bytes;
  float *qkv, *gates; // [TOKENS][..], the sequences' tokens in a row
  uint16_t *dev_qkv, *dev_out;
  float *dev_gates;
  int32_t *dev_tables;
  char *dev_states;
  float *out; // [TOKENS][values]
  char *states;
} chunk_run;

static void norm_row(float *x, uint32_t n) {
  double sum = 0;
  for (uint32_t i = 0; i < n; i++)
    sum += (double)x[i] * x[i];
  for (uint32_t i = 0; i < n; i++)
    x[i] = (float)ref_bf16(ref_to_bf16((float)(x[i] / sqrt(sum + 1e-9))));
}

// Numbers of a value head's gates of a token: decays, strength.
static uint32_t gates_of(const td_delta_shape *s) {
  return td_delta_decays(s) + 1;
}

// Gate i of all, from a random number.
static float gate_of(const chunk_run *r, uint32_t i, float random) {
  const uint32_t n = gates_of(&r->c.shape);
  const float plain = 0.75f + 0.25f * random;
  const bool is_slow = r->c.kind == SLOW || r->c.kind == SAME_KEYS;
  if (i % n == n - 1) return r->c.kind == SAME_KEYS ? 1 - 0x1p-6f * plain : plain;
  if (is_slow) return 1 - 0x1p-10f * plain;
  const uint32_t of_decay = i / n * (n - 1) + i % n;
  if (r->c.kind == GONE && of_decay % 5 < 2) return of_decay % 5 == 0 ? 0 : 1e-30f;
  if (r->c.kind == UNEVEN) return expf(-40 * powf((random + 1) / 2, 4));
  return plain;
}

static void make_inputs(cuda_fixture *f, chunk_run *r) {
  const td_delta_shape *s = &r->c.shape;
  const uint32_t keys = s->n_k_heads * s->k_dim;
  r->qkv = cuda_floats(f, (size_t)TOKENS * r->channels);
  r->gates = ref_floats(&f->rng, (size_t)TOKENS * gates_of(s) * s->n_v_heads);
  for (uint32_t t = 0; t < TOKENS; t++) {
    float *row = r->qkv + (size_t)t * r->channels;
    if (r->c.kind == SAME_KEYS && t > 0) {
      for (uint32_t i = 0; i < keys; i++)
        row[keys + i] = r->qkv[keys + i] + 0.01f * row[keys + i];
    }
    for (uint32_t h = 0; h < 2 * s->n_k_heads; h++)
      norm_row(row + h * s->k_dim, s->k_dim);
  }
  for (uint32_t i = 0; i < TOKENS * s->n_v_heads * gates_of(s); i++)
    r->gates[i] = gate_of(r, i, r->gates[i]);
}

static chunk_run open_run(cuda_fixture *f, const chunk_case *c) {
  const td_delta_shape *s = &c->shape;
  chunk_run r = {.c = *c, .channels = td_delta_channels(s), .values = s->n_v_heads * s->v_dim};
  r.max_pages = (N - 1) / c->page_tokens + 1;
  r.n_pages = SEQS * r.max_pages + 1;
  r.state_bytes = td_delta_state_bytes(s);
  f->rng = 7;
  make_inputs(f, &r);
  r.dev_qkv = cuda_alloc(f, (size_t)TOKENS * r.channels * sizeof *r.dev_qkv);
  r.dev_gates = cuda_alloc(f, (size_t)TOKENS * gates_of(s) * s->n_v_heads * sizeof *r.dev_gates);
  r.dev_out = cuda_alloc(f, (size_t)TOKENS * r.values * sizeof *r.dev_out);
  r.dev_tables = cuda_alloc(f, (3 * TOKENS + SEQS * N) * sizeof *r.dev_tables);
  r.dev_states = cuda_alloc(f, r.n_pages * r.state_bytes);
  r.out = calloc((size_t)TOKENS * r.values, sizeof *r.out);
  r.states = malloc(r.n_pages * r.state_bytes);
  TD_CHECK(r.out && r.states);
  memset(r.states, 0xff, r.n_pages * r.state_bytes); // NaN
  td_op_copy(f->stream, r.dev_states, r.states, r.n_pages * r.state_bytes);
  return r;
}

static void close_run(chunk_run *r) {
  free(r->qkv);
  free(r->gates);
  free(r->out);
  free(r->states);
}

// Pages of the sequences in no order; page 0 is no one's.
static uint32_t page_of(const chunk_run *r, uint32_t s, uint32_t p) {
  return r->n_pages - 1 - (p * SEQS + s);
}

static size_t token_of(uint32_t s, uint32_t position) {
  return (s == 0 ? 0 : lengths[0]) + position;
}

// One step with positions [begin[s], begin[s] + n[s]) of the sequences.
static void step(cuda_fixture *f, chunk_run *r, const uint32_t begin[SEQS], const uint32_t n[SEQS],
                 bool prompt) {
  int32_t tables[3 * TOKENS + SEQS * N] = {0};
  int32_t *position = tables + TOKENS, *q_begin = tables + 2 * TOKENS;
  const size_t of_gates = gates_of(&r->c.shape) * r->c.shape.n_v_heads;
  uint32_t t = 0;
  for (uint32_t s = 0; s < SEQS; s++) {
    const size_t from = token_of(s, begin[s]);
    q_begin[s] = (int32_t)t;
    for (uint32_t p = 0; p < r->max_pages; p++)
      tables[3 * TOKENS + s * r->max_pages + p] = (int32_t)page_of(r, s, p);
    if (n[s] == 0) continue;
    uint16_t *bits = malloc((size_t)n[s] * r->channels * sizeof *bits);
    TD_CHECK(bits);
    for (size_t i = 0; i < (size_t)n[s] * r->channels; i++)
      bits[i] = ref_to_bf16(r->qkv[from * r->channels + i]);
    td_op_copy(f->stream, r->dev_qkv + t * r->channels, bits,
               (size_t)n[s] * r->channels * sizeof *bits);
    td_op_copy(f->stream, r->dev_gates + t * of_gates, r->gates + from * of_gates,
               n[s] * of_gates * sizeof *r->gates);
    cuda_sync(f);
    free(bits);
    for (uint32_t i = 0; i < n[s]; i++, t++) {
      tables[t] = (int32_t)s;
      position[t] = (int32_t)(begin[s] + i);
    }
  }
  q_begin[SEQS] = (int32_t)t;
  td_op_copy(f->stream, r->dev_tables, tables, sizeof tables);
  td_op_delta_rule(
      f->stream,
      &(td_delta_rule_op_args){
          .batch = {.seq = r->dev_tables,
                    .position = r->dev_tables + TOKENS,
                    .q_begin = r->dev_tables + 2 * TOKENS,
                    .page_table = r->dev_tables + 3 * TOKENS,
                    .n_tokens = t,
                    .n_seqs = SEQS,
                    .max_pages = r->max_pages,
                    .page_tokens = r->c.page_tokens},
          .state = {.pages = r->dev_states, .page_bytes = r->state_bytes, .dtype = TD_F32},
          .shape = r->c.shape,
          .qkv = r->dev_qkv,
          .gates = r->dev_gates,
          .out = r->dev_out,
          .prompt = prompt});
  cuda_sync(f);
  float *out = cuda_get_bf16(f, r->dev_out, (size_t)t * r->values);
  for (uint32_t s = 0, at = 0; s < SEQS; at += n[s], s++)
    memcpy(r->out + token_of(s, begin[s]) * r->values, out + (size_t)at * r->values,
           n[s] * r->values * sizeof *out);
  free(out);
}

// Both sequences, `first` tokens in the first step and `each` in later ones.
static void run_all(cuda_fixture *f, chunk_run *r, uint32_t first, uint32_t each, bool prompt) {
  uint32_t at[SEQS] = {0}, most = first;
  while (at[0] < lengths[0] || at[1] < lengths[1]) {
    uint32_t n[SEQS];
    for (int s = 0; s < SEQS; s++)
      n[s] = lengths[s] - at[s] < most ? lengths[s] - at[s] : most;
    step(f, r, at, n, prompt);
    for (int s = 0; s < SEQS; s++)
      at[s] += n[s];
    most = each;
  }
  cuda_get(f, r->states, r->dev_states, r->n_pages * r->state_bytes);
}

// ---- against double -----------------------------------------------------------------------------

// A head's recurrence. squares: the largest sum of squared terms of a product so far.
typedef struct {
  const chunk_run *run;
  uint32_t head, k_head;
  double *state, squares; // [k_dim][v_dim]
} exact_head;

static void advance(exact_head *h, size_t t, double *out) {
  const td_delta_shape *s = &h->run->c.shape;
  const float *q = h->run->qkv + t * h->run->channels + h->k_head * s->k_dim;
  const float *k = q + s->n_k_heads * s->k_dim;
  const float *v = h->run->qkv + t * h->run->channels + 2 * s->n_k_heads * s->k_dim +
                   h->head * s->v_dim;
  const uint32_t n_decays = td_delta_decays(s);
  const float *gates = h->run->gates + (t * s->n_v_heads + h->head) * gates_of(s);
  for (uint32_t c = 0; c < s->v_dim; c++) {
    double known = 0, squares = (double)v[c] * v[c];
    for (uint32_t i = 0; i < s->k_dim; i++) {
      double *state = &h->state[i * s->v_dim + c];
      *state *= gates[i % n_decays];
      known += k[i] * *state;
      squares += pow(k[i] * *state, 2);
    }
    const double d = gates[n_decays] * (v[c] - known);
    out[c] = 0;
    for (uint32_t i = 0; i < s->k_dim; i++) {
      double *state = &h->state[i * s->v_dim + c];
      *state += k[i] * d;
      out[c] += q[i] * *state;
      squares += pow(q[i] * *state, 2);
    }
    h->squares = fmax(h->squares, squares);
  }
}

// Seven standard deviations of what is lost. An operand in two parts errs by at most 2^-17 of
// itself, and what else a product of two such operands loses is as much again. Roundings are
// independent. A chunk's way to the state and to results is through at most eight of them (S in k S
// and q S, T and R, P and D, D in the state, and A; with a decay for each channel A is FP32, and k,
// q and the update's k are rounded when they have decayed: ten), and the state's own error does not
// grow, since decays and strengths are at most 1 and keys have norm 1. FP32 sums add less.
static double bound_of(const exact_head *h, uint32_t n_tokens) {
  const chunk_case *c = &h->run->c;
  const uint32_t n_chunks = (n_tokens + chunk_of(c) - 1) / chunk_of(c);
  return 7 * 0x1p-17 * sqrt(2 * (c->shape.by_channel ? 10 : 8) * n_chunks * h->squares);
}

static void check_state(const exact_head *h, uint32_t s, uint32_t position) {
  const chunk_run *r = h->run;
  const td_delta_shape *shape = &r->c.shape;
  const uint32_t tiles = td_delta_tiles(shape);
  const char *page = r->states + page_of(r, s, position / r->c.page_tokens) * r->state_bytes;
  const float *state = (const float *)(const void *)page + td_delta_conv_floats(shape);
  const double bound = bound_of(h, position + 1);
  for (uint32_t i = 0; i < shape->k_dim; i++) {
    for (uint32_t c = 0; c < shape->v_dim; c++) {
      const size_t tile = h->head * tiles + c / TD_DELTA_TILE;
      const size_t at = (tile * shape->k_dim + i) * TD_DELTA_TILE + c % TD_DELTA_TILE;
      cuda_assert_within(state[at], h->state[i * shape->v_dim + c], bound, "state", at);
    }
  }
}

static void check_run(const chunk_run *r) {
  const td_delta_shape *s = &r->c.shape;
  double *state = ref_doubles((size_t)s->k_dim * s->v_dim), *out = ref_doubles(s->v_dim);
  for (uint32_t i = 0; i < SEQS * s->n_v_heads; i++) {
    const uint32_t seq = i / s->n_v_heads, head = i % s->n_v_heads;
    const uint32_t of_group = s->n_v_heads / s->n_k_heads;
    exact_head h = {.run = r,
                    .head = head,
                    .k_head = s->is_tiled ? head % s->n_k_heads : head / of_group,
                    .state = state};
    memset(state, 0, (size_t)s->k_dim * s->v_dim * sizeof *state);
    for (uint32_t p = 0; p < lengths[seq]; p++) {
      const size_t t = token_of(seq, p);
      advance(&h, t, out);
      for (uint32_t c = 0; c < s->v_dim; c++) {
        const size_t at = t * r->values + head * s->v_dim + c;
        cuda_assert_within(r->out[at], out[c], fabs(out[c]) * ULP_BF16 / 2 + bound_of(&h, p + 1),
                           "result", at);
      }
      if (p + 1 == lengths[seq] || (p + 1) % r->c.page_tokens == 0) check_state(&h, seq, p);
    }
  }
  free(state);
  free(out);
  for (size_t i = 0; i < r->state_bytes; i++) // no one's
    assert_int_equal((unsigned char)r->states[i], 0xff);
}

// In one step, and cut where chunks are not.
TEST(against_double) {
  static const uint32_t firsts[] = {N, 5, CHUNK + 9};
  for (size_t i = 0; i < TD_COUNT(cases); i++) {
    for (size_t k = 0; k < TD_COUNT(firsts); k++) {
      CUDA_OPEN(f);
      chunk_run r = open_run(&f, &cases[i]);
      run_all(&f, &r, firsts[k], N, true);
      check_run(&r);
      close_run(&r);
      cuda_close(&f);
    }
  }
}

// ---- against itself -----------------------------------------------------------------------------

// Results and all pages' states are the same bits in steps that begin where chunks do, and a
// sequence's are whatever is beside it. Token by token they are not: chunks are what is tested.
TEST(cuts_between_chunks_change_no_bit) {
  for (size_t i = 0; i < TD_COUNT(cases); i++) {
    const uint32_t each[] = {chunk_of(&cases[i]), 3 * chunk_of(&cases[i])};
    CUDA_OPEN(f);
    chunk_run whole = open_run(&f, &cases[i]), tokens = open_run(&f, &cases[i]);
    run_all(&f, &whole, N, N, true);
    for (size_t k = 0; k < TD_COUNT(each); k++) {
      chunk_run cut = open_run(&f, &cases[i]);
      run_all(&f, &cut, each[k], each[k], true);
      assert_memory_equal(whole.out, cut.out, (size_t)TOKENS * cut.values * sizeof *cut.out);
      assert_memory_equal(whole.states, cut.states, cut.n_pages * cut.state_bytes);
      close_run(&cut);
    }
    run_all(&f, &tokens, N, N, false);
    assert_memory_not_equal(whole.states, tokens.states, whole.n_pages * whole.state_bytes);
    close_run(&whole);
    close_run(&tokens);
    cuda_close(&f);
  }
}

// Of a prompt's chunk that ends early, decode goes on from the state of its last token.
TEST(decode_follows_a_prompt) {
  for (size_t i = 0; i < TD_COUNT(cases); i++) {
    CUDA_OPEN(f);
    chunk_run r = open_run(&f, &cases[i]);
    const uint32_t n[SEQS] = {N - 3, SHORT};
    step(&f, &r, (uint32_t[SEQS]){0, 0}, n, true);
    for (uint32_t p = n[0]; p < N; p++)
      step(&f, &r, (uint32_t[SEQS]){p, SHORT}, (uint32_t[SEQS]){1, 0}, false);
    cuda_get(&f, r.states, r.dev_states, r.n_pages * r.state_bytes);
    check_run(&r);
    close_run(&r);
    cuda_close(&f);
  }
}
