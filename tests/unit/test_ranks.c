// tests/unit/test_ranks.c - expert parallelism: prompts on several CPU devices.
// CTest: slow

#include <math.h>

#include "engine/experts/ranks.h"
#include "unit/ranks_test.h"
#include "unit/sanitized.h"

// Every token belongs to one rank, the last to rank 0, and shares of work are even.
TEST(zigzag) {
  for (uint32_t n = 1; n <= 8; n++) {
    for (uint32_t n_tokens = 1; n_tokens <= 100; n_tokens++) {
      uint32_t at = 0;
      for (uint32_t i = 0; i < 2 * n; i++) {
        assert_int_equal(td_zigzag_begin(n_tokens, n, i), at);
        at = td_zigzag_begin(n_tokens, n, i + 1);
      }
      assert_int_equal(at, n_tokens);
      assert_true(td_zigzag_begin(n_tokens, n, 2 * n - 1) < n_tokens);
    }
    uint32_t seen = 0;
    for (uint32_t r = 0; r < n; r++)
      seen |= 1u << td_zigzag_piece(n, r, 0) | 1u << td_zigzag_piece(n, r, 1);
    assert_int_equal(seen, (1u << 2 * n) - 1);
    assert_int_equal(td_zigzag_piece(n, 0, 1), 2 * n - 1);
    assert_int_equal(td_rank_first_expert(7, n, 0), 0);
    assert_int_equal(td_rank_first_expert(7, n, n), 7);
  }
}

// ---- what routers choose ------------------------------------------------------------------------
// Parts of sums are rounded to BF16, so that scores of experts differ a little from those of one
// device. Where two scores are closer than that, a token goes to another expert and its logits are
// off by far more than rounding. So one device's choices are recorded, and others that ranks make
// are counted, compared and replaced: then every row of logits is within rounding.

enum { MAX_CALLS = 32, MAX_EXPERTS = 8 };

typedef struct {
  uint32_t n_tokens, n_experts, top_k;
  bool is_by_logits; // the largest are chosen, else by a function of them
  float *logits;
  int32_t *ids;
  float *weights;
} routing;

static struct {
  enum { ROUTERS_FREE, ROUTERS_RECORDED, ROUTERS_FORCED } mode;
  uint32_t n_ranks;           // ROUTERS_FORCED
  routing calls[MAX_CALLS];   // of one device: steps x layers
  uint32_t n_calls, n_layers; // n_layers: that have experts
  uint32_t n_rerouted;        // tokens
  char failure[128];          // the first; the test asserts when no rank runs any more
} routers;

static _Thread_local uint32_t n_routed; // calls on this thread
static _Thread_local bool is_rank_0;    // the test's own thread is

void __real_td_op_router(td_stream *stream, const td_router_args *args);
void __wrap_td_op_router(td_stream *stream, const td_router_args *args);

static void record(const td_router_args *a) {
  TD_CHECK(routers.n_calls < MAX_CALLS && a->n_experts <= MAX_EXPERTS);
  routing *r = &routers.calls[routers.n_calls++];
  *r = (routing){.n_tokens = a->n_tokens,
                 .n_experts = a->n_experts,
                 .top_k = a->top_k,
                 .is_by_logits = a->kind == TD_ROUTER_SOFTMAX};
  const size_t n_scores = (size_t)a->n_tokens * a->n_experts, n_ids = a->n_tokens * a->top_k;
  r->logits = memcpy(malloc(n_scores * sizeof *r->logits), a->logits, n_scores * sizeof *r->logits);
  r->ids = memcpy(malloc(n_ids * sizeof *r->ids), a->ids, n_ids * sizeof *r->ids);
  r->weights = memcpy(malloc(n_ids * sizeof *r->weights), a->weights, n_ids * sizeof *r->weights);
}

static void forget_routing(void) {
  for (uint32_t i = 0; i < routers.n_calls; i++) {
    free(routers.calls[i].logits);
    free(routers.calls[i].ids);
    free(routers.calls[i].weights);
  }
  memset(&routers, 0, sizeof routers);
}

// The step of this thread's call: other ranks see only those that all compute.
static uint32_t step_of_call(uint32_t call) {
  uint32_t left = call / routers.n_layers, step = 0;
  while (left || !(is_rank_0 || ranks_shapes[step].is_parallel))
    left -= is_rank_0 || ranks_shapes[step].is_parallel, step++;
  return step;
}

// order[i]: which token of the step is i-th where all ranks' tokens are gathered.
static void order_tokens(const ranks_step_shape *s, uint32_t n_ranks, uint32_t *order) {
  uint32_t at = 0;
  for (uint32_t i = 0; !s->is_parallel && i < s->n_tokens[0] + s->n_tokens[1]; i++)
    order[i] = i;
  for (uint32_t i = 0; s->is_parallel && i < n_ranks * s->n_seqs * 2; i++) {
    const uint32_t seq = i % s->n_seqs, half = i / s->n_seqs % 2, n = s->n_tokens[seq];
    const uint32_t piece = td_zigzag_piece(n_ranks, i / s->n_seqs / 2, half);
    for (uint32_t t = td_zigzag_begin(n, n_ranks, piece);
         t < td_zigzag_begin(n, n_ranks, piece + 1); t++)
      order[at++] = t + (seq ? s->n_tokens[0] : 0);
  }
}

// Experts that a token of `a` goes to, and not one of `b`.
static uint32_t only_in(const int32_t *a, const int32_t *b, uint32_t top_k) {
  uint32_t in_a = 0, in_b = 0;
  for (uint32_t k = 0; k < top_k; k++)
    in_a |= 1u << a[k], in_b |= 1u << b[k];
  return in_a & ~in_b;
}

// How much better one device finds the experts it chose than those of the ranks.
static float margin(const float *logits, uint32_t chosen, uint32_t others, uint32_t n_experts) {
  float best = -INFINITY, worst_other = INFINITY;
  for (uint32_t i = 0; i < n_experts; i++) {
    if (chosen >> i & 1) best = fmaxf(best, logits[i]);
    if (others >> i & 1) worst_other = fminf(worst_other, logits[i]);
  }
  return best - worst_other;
}

static float largest_of(const float *x, size_t n) {
  float most = 0;
  for (size_t i = 0; i < n; i++)
    most = fmaxf(most, fabsf(x[i]));
  return most;
}

static void note_failure(const char *what, uint32_t layer, uint32_t t, float got, float bound) {
  if (routers.failure[0]) return;
  snprintf(routers.failure, sizeof routers.failure, "layer %u, token %u: %s by %g, not %g", layer,
           t, what, (double)got, (double)bound);
}

// A router behind n layers with experts reads n sums whose parts have errors of at most 2^-9 each
// (half a unit in the last of 8 bits), and its scores move by as much of the largest: behind none,
// not at all. Two scores that changed places were at most twice that apart.
static void check_token(const routing *want, uint32_t layer, uint32_t t, const float *logits,
                        const int32_t *ids) {
  const uint32_t n = want->n_experts, top_k = want->top_k;
  const float *want_logits = want->logits + t * n;
  const int32_t *want_ids = want->ids + t * top_k;
  const float bound = (float)layer * 0x1p-9f * largest_of(want->logits, want->n_tokens * n);
  for (uint32_t i = 0; i < n; i++) {
    const float off = fabsf(logits[i] - want_logits[i]);
    if (!(off <= bound)) note_failure("a score is off", layer, t, off, bound);
  }
  const uint32_t chosen = only_in(want_ids, ids, top_k);
  if (!chosen) return;
  routers.n_rerouted++;
  const float gap = margin(want_logits, chosen, only_in(ids, want_ids, top_k), n);
  if (!(gap <= 2 * bound) || !want->is_by_logits)
    note_failure("other experts, which are worse", layer, t, gap, 2 * bound);
}

static void force(const td_router_args *a, uint32_t call) {
  const uint32_t step = step_of_call(call), layer = call % routers.n_layers;
  const routing *want = &routers.calls[step * routers.n_layers + layer];
  uint32_t order[RANKS_TOKENS];
  TD_CHECK(a->n_tokens == want->n_tokens);
  order_tokens(&ranks_shapes[step], routers.n_ranks, order);
  for (uint32_t i = 0; i < a->n_tokens; i++) {
    const uint32_t t = order[i];
    int32_t *ids = a->ids + i * a->top_k;
    const int32_t *want_ids = want->ids + t * a->top_k;
    if (is_rank_0) check_token(want, layer, t, a->logits + i * a->n_experts, ids);
    if (!only_in(want_ids, ids, a->top_k)) continue;
    memcpy(ids, want_ids, a->top_k * sizeof *ids);
    memcpy(a->weights + i * a->top_k, want->weights + t * a->top_k, a->top_k * sizeof(float));
  }
}

void __wrap_td_op_router(td_stream *stream, const td_router_args *args) {
  __real_td_op_router(stream, args);
  if (routers.mode == ROUTERS_FREE) return;
  td_err err;
  if (td_stream_sync(stream, &err) != TD_OK) return; // a CPU device: its memory can be used now
  if (routers.mode == ROUTERS_RECORDED) {
    record(args);
  } else {
    force(args, n_routed++);
  }
}

static float *logits_of_one(const small_model *m, const ranks_way *one, size_t *n_vocab) {
  forget_routing();
  routers.mode = ROUTERS_RECORDED;
  float *want = ranks_logits(m, one, n_vocab);
  routers.mode = ROUTERS_FREE;
  routers.n_layers = routers.n_calls / TD_COUNT(ranks_shapes);
  return want;
}

// Returns how many tokens went elsewhere.
static uint32_t check_routed_alike(const small_model *m, const ranks_way *way, const float *want) {
  size_t n_vocab;
  routers.mode = ROUTERS_FORCED;
  routers.n_ranks = way->n;
  routers.n_rerouted = n_routed = 0;
  is_rank_0 = true;
  float *got = ranks_logits(m, way, &n_vocab);
  routers.mode = ROUTERS_FREE;
  assert_string_equal(routers.failure, "");
  assert_near(got, want, n_vocab, 0x1p-8f, 0);
  free(got);
  return routers.n_rerouted;
}

// ---- prompts ------------------------------------------------------------------------------------

// As one device within rounding (parts of sums are BF16), on any number of them, with experts in
// memory or passing through; and the same bits in every run, whatever takes long, and with the
// exchange of one half beside the other's operators.
static void check_ranks(const small_model *m, bool is_streamed) {
  size_t n_vocab;
  const ranks_way one = {.kind = "cpu", .backend = "host", .n = 1, .is_streamed = is_streamed};
  float *want = logits_of_one(m, &one, &n_vocab);
  const size_t n = RANKS_ROWS * n_vocab;
  for (uint32_t n_ranks = 2; n_ranks <= 4; n_ranks += IS_TSAN ? 2 : 1) {
    ranks_way way = one;
    way.n = n_ranks;
    const uint32_t n_rerouted = check_routed_alike(m, &way, want);
    float *got = ranks_logits(m, &way, &n_vocab);
    assert_near(got, want, n_vocab, 0x1p-8f, n_rerouted);
    static const char *const jitters[] = {NULL, "1", "2", "3"};
    for (size_t i = 0; i < TD_COUNT(jitters); i++) {
      way.jitter = jitters[i];
      way.is_halved = i < 3;
      way.is_borrowed = i > 1;
      float *again = ranks_logits(m, &way, &n_vocab);
      assert_memory_equal(again, got, n * sizeof *got);
      free(again);
    }
    free(got);
  }
  forget_routing();
  free(want);
}

TEST(ranks) {
  for (size_t i = 0; i < N_SMALL_MODELS; i++)
    check_ranks(&small_models[i], false);
}

TEST(streamed) {
  for (size_t i = 0; i < N_SMALL_MODELS; i++)
    check_ranks(&small_models[i], true);
}

// Biases are those of the rank's own experts.
TEST(paired_experts) {
  checkpoint ck;
  ck_gpt_oss(&ck);
  ck_write(&ck);
  check_ranks(&(small_model){ck.dir, PAIRED_RING}, false);
  check_ranks(&(small_model){ck.dir, PAIRED_RING}, true);
  ck_free(&ck);
}

// A failure ends the step with its reason; later ones are computed by one device.
TEST(a_rank_that_fails) {
  size_t n_vocab;
  ranks_way way = {.kind = "cpu", .backend = "host", .n = 1};
  float *want = ranks_logits(&small_models[0], &way, &n_vocab);
  way.n = 3;
  ranks_engine f;
  open_ranks_engine(&f, &small_models[0], &way);
  td_comm_abort(f.engine->rank->comm, "rank 2: no memory");
  const int32_t token = 7, page = 0;
  const td_step_seq seq = {.tokens = &token, .n_tokens = 1, .pages = &page, .n_pages = 1};
  td_err err;
  assert_int_equal(td_engine_step(f.engine, &seq, 1, &err), TD_ECANCELED);
  assert_non_null(strstr(err.msg, "rank 2: no memory"));
  float *got = malloc(RANKS_ROWS * n_vocab * sizeof *got);
  ranks_steps(f.engine, n_vocab, got);
  assert_memory_equal(got, want, RANKS_ROWS * n_vocab * sizeof *got);
  close_ranks_engine(&f);
  free(got);
  free(want);
}

int before_all(void **state) {
  (void)state;
  engine_activations = TD_ACTIVATIONS_F32;
  return 0;
}
