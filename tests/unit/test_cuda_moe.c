// tests/unit/test_cuda_moe.c - the CUDA device's experts, all at once, in groups and in a cache's
// slots, against naive ones in double, at small and ragged shapes, within bounds that follow from
// the types: a result in BF16 errs by half a unit in the last place, a sum of k products in FP32 by
// at most k units of the sum of their magnitudes.
// CTest: gpu slow no-tsan

#include <stdatomic.h>

#include "base/bf16.h"
#include "unit/cuda_test.h"
#include "unit/sanitized.h"

enum { DIM = 72, HIDDEN = 56, EXPERTS = 9, TOP_K = 3, MOE_TOKENS = 90 };
enum { PAIR_BYTES = 2 * HIDDEN + 4 * 2 * HIDDEN }; // scratch memory for a pair, 2 * HIDDEN > DIM

typedef struct {
  ref_weight gate[EXPERTS], up[EXPERTS], down[EXPERTS];
  td_weight g[EXPERTS], u[EXPERTS], d[EXPERTS];
  td_weight on_device[3][EXPERTS];
  float limit; // of a clamped activation; 0: none
} experts;

// Groups of one size or, of every other expert, of another, and zero points likewise.
typedef struct {
  ref_format format;
  uint32_t group, other;
  bool other_zeros;
} expert_formats;

static void make_experts(experts *e, uint64_t *rng, const expert_formats *formats) {
  e->limit = 0;
  for (int i = 0; i < EXPERTS; i++) {
    ref_format format = formats->format;
    uint32_t n = i % 2 ? formats->other : formats->group;
    if (i % 2) format.zeros = formats->other_zeros;
    e->gate[i] = ref_make_format(rng, &format, HIDDEN, DIM, 32, n);
    e->up[i] = ref_make_format(rng, &format, HIDDEN, DIM, 32, n);
    e->down[i] = ref_make_format(rng, &format, DIM, HIDDEN, 32, n);
    e->g[i] = e->gate[i].w;
    e->u[i] = e->up[i].w;
    e->d[i] = e->down[i].w;
  }
}

static void free_experts(experts *e) {
  for (int i = 0; i < EXPERTS; i++) {
    ref_free_weight(&e->gate[i]);
    ref_free_weight(&e->up[i]);
    ref_free_weight(&e->down[i]);
  }
}

// Adds an expert's weighted result to out, and what it may err by to slack: hidden values are
// rounded to BF16, and computed of sums in FP32 of weights that err by weight_ulp.
static void naive_expert(const experts *e, int idx, const float *x, double weight,
                         double weight_ulp, double *out, double *slack) {
  double h[HIDDEN], h_slack[HIDDEN];
  for (uint32_t r = 0; r < HIDDEN; r++) {
    double g = 0, u = 0, g_size = 0, u_size = 0;
    for (uint32_t k = 0; k < DIM; k++) {
      double a = ref_at(&e->g[idx], r, k) * x[k], b = ref_at(&e->u[idx], r, k) * x[k];
      g += a;
      u += b;
      g_size += fabs(a);
      u_size += fabs(b);
    }
    if (e->limit > 0) {
      g = fmin(g, e->limit);
      u = fmax(fmin(u, e->limit), -e->limit);
    }
    h[r] = g / (1 + exp(-g)) * u;
    // |silu'| < 1.1, |silu(g)| <= |g|
    double sums = (1.1 * g_size * fabs(u) + fabs(g) * u_size) * ((DIM + 8) * ULP_F32 + weight_ulp);
    h_slack[r] = fabs(h[r]) * ULP_BF16 / 2 + 2 * sums;
  }
  for (uint32_t r = 0; r < DIM; r++) {
    for (uint32_t k = 0; k < HIDDEN; k++) {
      double w = ref_at(&e->d[idx], r, k);
      out[r] += weight * w * h[k];
      slack[r] += fabs(weight * w) *
                  (h_slack[k] + fabs(h[k]) * ((HIDDEN + 8) * ULP_F32 + weight_ulp));
    }
  }
}

// Whether the device takes copies of them.
static bool copy_experts(cuda_fixture *f, experts *e) {
  for (int i = 0; i < EXPERTS; i++) {
    if (!td_dev_supports_device_weights(f->dev, &e->g[i])) return false;
    e->on_device[0][i] = cuda_put_weight(f, &e->g[i]);
    e->on_device[1][i] = cuda_put_weight(f, &e->u[i]);
    e->on_device[2][i] = cuda_put_weight(f, &e->d[i]);
  }
  return true;
}

// The same operator as several, over some of the experts each, which are on the device; their sum.
static float *sum_in_groups(cuda_fixture *f, const experts *e, const td_moe_args *whole) {
  enum { GROUP = 4 };
  float *sum = cuda_alloc(f, (size_t)whole->n_tokens * DIM * sizeof *sum);
  td_moe_args args = *whole;
  args.n_routed = EXPERTS;
  args.out = sum;
  args.out_f32 = args.weights_on_device = true;
  for (uint32_t first = 0; first < EXPERTS; first += GROUP) {
    args.first_expert = first;
    args.n_experts = EXPERTS - first < GROUP ? EXPERTS - first : GROUP;
    args.gate = &e->on_device[0][first];
    args.up = &e->on_device[1][first];
    args.down = &e->on_device[2][first];
    args.accumulate = args.same_ids = first > 0;
    td_op_moe(f->stream, &args);
  }
  return sum;
}

typedef enum { ROUTED, IN_GROUPS, DENSE } moe_kind;

static void run_moe(cuda_fixture *f, const experts *e, uint32_t n, moe_kind kind) {
  const bool routed = kind != DENSE;
  size_t n_x = (size_t)n * DIM, n_pairs = (size_t)n * TOP_K;
  float *x = cuda_floats(f, n_x), *before = cuda_floats(f, n_x);
  float *weights = ref_floats(&f->rng, n_pairs);
  int32_t *ids = malloc(n_pairs * sizeof *ids);
  for (size_t i = 0; i < n_pairs; i += TOP_K) { // distinct; expert 8 gets none, expert 0 most
    ids[i] = 0;
    ids[i + 1] = 1 + (int32_t)ref_below(&f->rng, 4);
    ids[i + 2] = 5 + (int32_t)ref_below(&f->rng, 3);
  }
  uint16_t *out = cuda_put_bf16(f, before, n_x);
  const td_moe_args args = {.gate = e->g,
                            .up = e->u,
                            .down = e->d,
                            .x = cuda_put_bf16(f, x, n_x),
                            .ids = routed ? cuda_put(f, ids, n_pairs * sizeof *ids) : NULL,
                            .weights = routed ? cuda_put(f, weights, n_pairs * sizeof *weights)
                                              : NULL,
                            .out = out,
                            .n_tokens = n,
                            .n_experts = routed ? EXPERTS : 1,
                            .top_k = routed ? TOP_K : 1,
                            .limit = e->limit,
                            .alpha = 1,
                            .plain = e->limit > 0,
                            .accumulate = routed};
  if (kind == IN_GROUPS) {
    td_op_add_f32(f->stream, out, sum_in_groups(f, e, &args), n_x);
  } else {
    td_op_moe(f->stream, &args);
  }
  float *got = cuda_get_bf16(f, out, n_x);
  const bool is_rounded = kind == DENSE && n > 64 && e->g[0].scale; // for cuBLAS
  double weight_ulp = is_rounded ? ULP_BF16 / 2 : 0;
  if (e->g[0].dtype == TD_F8E4M3 && n > 64) weight_ulp = fmax(weight_ulp, cuda_f16_error(f, 2));
  for (size_t t = 0; t < n; t++) {
    double want[DIM] = {0}, slack[DIM] = {0};
    for (int d = 0; d < DIM; d++)
      want[d] = routed ? before[t * DIM + d] : 0;
    for (int j = 0; j < (routed ? TOP_K : 1); j++) {
      size_t pair = t * TOP_K + j;
      naive_expert(e, routed ? ids[pair] : 0, x + t * DIM, routed ? weights[pair] : 1, weight_ulp,
                   want, slack);
    }
    for (int d = 0; d < DIM; d++) {
      double bound = (fabs(want[d]) + slack[d]) * ULP_BF16 / 2 + slack[d];
      cuda_assert_within(got[t * DIM + d], want[d], bound, "experts", t * DIM + d);
    }
  }
  free(x);
  free(before);
  free(weights);
  free(ids);
  free(got);
}

// With scratch memory for 40 tokens, and without any for one.
static void run_moe_in_passes(cuda_fixture *f, const experts *e) {
  td_cuda_dev *dev = (td_cuda_dev *)f->dev;
  dev->pass_bytes = (size_t)40 * TOP_K * PAIR_BYTES;
  run_moe(f, e, MOE_TOKENS, ROUTED);
  dev->pass_bytes = 1;
  run_moe(f, e, 7, ROUTED);
  run_moe(f, e, 7, DENSE);
}

// How a group's pairs are cut into rounds changes no bit of its sum. All tokens take expert 0, and
// so few the last ones that some rounds have none.
static void check_rounds(cuda_fixture *f, const experts *e) {
  enum { N = MOE_TOKENS * DIM };
  td_cuda_dev *dev = (td_cuda_dev *)f->dev;
  const size_t own = dev->pass_bytes;
  const size_t some[] = {own, 3 * TD_CU_MMA_TOKENS * PAIR_BYTES, 1};
  float *x = cuda_floats(f, N), *weights = ref_floats(&f->rng, MOE_TOKENS * TOP_K);
  int32_t ids[MOE_TOKENS * TOP_K];
  for (int i = 0; i < MOE_TOKENS * TOP_K; i++)
    ids[i] = i % TOP_K == 0 ? 0 : i % TOP_K + 2 * (int32_t)ref_below(&f->rng, 2);
  td_moe_args args = {.x = cuda_put_bf16(f, x, N),
                      .ids = cuda_put(f, ids, sizeof ids),
                      .weights = cuda_put(f, weights, MOE_TOKENS * TOP_K * sizeof *weights),
                      .n_tokens = MOE_TOKENS,
                      .top_k = TOP_K};
  float *first = NULL;
  for (size_t i = 0; i < TD_COUNT(some); i++) {
    dev->pass_bytes = some[i];
    float *got = malloc(N * sizeof *got);
    cuda_get(f, got, sum_in_groups(f, e, &args), N * sizeof *got);
    if (first) assert_memory_equal(got, first, N * sizeof *got);
    if (!first) {
      first = got;
    } else {
      free(got);
    }
  }
  dev->pass_bytes = own;
  free(first);
  free(x);
  free(weights);
}

TEST(moe) {
  static const expert_formats cases[] = {
      {{"bf16", TD_BF16, TD_F32, false}, 0, 0, false},
      {{"f8", TD_F8E4M3, TD_F32, false}, 128, 128, false},
      {{"i4", TD_I4, TD_BF16, false}, 32, 32, false},
      {{"i4", TD_I4, TD_BF16, false}, 128, 32, false},
      {{"i4", TD_I4, TD_BF16, false}, 32, 32, true},
      {{"i4", TD_I4, TD_BF16, true}, 32, 32, false},
      {{"i4", TD_I4, TD_F16, true}, 32, 32, true},
      {{"f4", TD_F4E2M1, TD_F8E4M3, false}, 16, 16, false},
  };
  static const uint32_t sizes[] = {1, 7, MOE_TOKENS};
  for (size_t i = 0; i < TD_COUNT(cases); i++) {
    CUDA_OPEN(f);
    experts e;
    make_experts(&e, &f.rng, &cases[i]);
    assert_true(copy_experts(&f, &e));
    for (size_t j = 0; j < TD_COUNT(sizes); j++) {
      if (IS_ASAN && sizes[j] == MOE_TOKENS && i % 6 != 0) continue; // nine tenths of the time
      run_moe(&f, &e, sizes[j], ROUTED);
      run_moe(&f, &e, sizes[j], DENSE);
      run_moe(&f, &e, sizes[j], IN_GROUPS);
    }
    // Tables: of all experts, of the one of a dense MLP, of each group; however often they are
    // used.
    assert_int_equal(((td_cuda_dev *)f.dev)->n_experts, 5);
    e.limit = 0.4f; // which values reach on either side
    for (moe_kind kind = ROUTED; i < 2 && kind <= DENSE; kind++)
      run_moe(&f, &e, 7, kind);
    e.limit = 0;
    if (i == 0) {
      run_moe_in_passes(&f, &e);
      check_rounds(&f, &e);
      if (!IS_ASAN)
        run_moe(&f, &e, TD_CU_SORT_PAIRS / TOP_K + 30, IN_GROUPS); // sorted by many blocks
    }
    cuda_close(&f);
    free_experts(&e);
  }
}

enum { SLOTS = 5, N_OF_CACHE = 11, CACHE_PAIRS = N_OF_CACHE * TOP_K };

// What went into run_moe_of_slots, and the results: of pairs, and their sums.
typedef struct {
  const float *x, *weights, *there, *pairs, *got;
  const int32_t *slots, *ids;
} slots_result;

static void check_token_of_slots(const experts *e, const slots_result *r, size_t t) {
  double want[DIM] = {0}, slack[DIM] = {0};
  for (size_t pair = t * TOP_K; pair < (t + 1) * TOP_K; pair++) {
    double own[DIM] = {0}, own_slack[DIM] = {0};
    const bool is_here = r->slots[r->ids[pair]] >= 0;
    if (is_here) naive_expert(e, r->ids[pair], r->x + t * DIM, 1, 0, own, own_slack);
    for (size_t d = 0; d < DIM; d++) {
      const double part = is_here ? own[d] : (double)r->there[pair * DIM + d];
      cuda_assert_within(r->pairs[pair * DIM + d], part, own_slack[d], "a pair", pair * DIM + d);
      want[d] += r->weights[pair] * part;
      slack[d] += fabs(r->weights[pair]) * own_slack[d] +
                  TOP_K * ULP_F32 * fabs(r->weights[pair] * part);
    }
  }
  for (size_t d = 0; d < DIM; d++) {
    const double bound = (fabs(want[d]) + slack[d]) * ULP_BF16 / 2 + slack[d];
    cuda_assert_within(r->got[t * DIM + d], want[d], bound, "experts of slots", t * DIM + d);
  }
}

// The experts in slots by pair, others untouched; then the sum with what another device has
// computed. Where neither an expert's matrices nor a token's company change, results do not.
static void run_moe_of_slots(cuda_fixture *f, const experts *e) {
  static const int32_t in_slot[SLOTS] = {4, 1, 8, 0, 3};
  td_weight gate[SLOTS], up[SLOTS], down[SLOTS];
  int32_t slots[EXPERTS], ids[CACHE_PAIRS];
  memset(slots, 0xff, sizeof slots);
  for (int i = 0; i < SLOTS; i++) {
    slots[in_slot[i]] = i;
    gate[i] = e->on_device[0][in_slot[i]];
    up[i] = e->on_device[1][in_slot[i]];
    down[i] = e->on_device[2][in_slot[i]];
  }
  float *x = cuda_floats(f, N_OF_CACHE * DIM), *weights = ref_floats(&f->rng, CACHE_PAIRS);
  float *there = ref_floats(&f->rng, CACHE_PAIRS * DIM);
  for (int i = 0; i < CACHE_PAIRS; i++)
    ids[i] = (int32_t)ref_below(&f->rng, EXPERTS);
  const int32_t *dev_slots = cuda_put(f, slots, sizeof slots);
  float *here = cuda_put(f, there, CACHE_PAIRS * DIM * sizeof *there);
  const td_moe_args args = {.gate = gate,
                            .up = up,
                            .down = down,
                            .x = cuda_put_bf16(f, x, N_OF_CACHE * DIM),
                            .ids = cuda_put(f, ids, sizeof ids),
                            .weights = cuda_put(f, weights, CACHE_PAIRS * sizeof *weights),
                            .out = here,
                            .n_tokens = N_OF_CACHE,
                            .n_experts = EXPERTS,
                            .top_k = TOP_K,
                            .slots = dev_slots,
                            .n_slots = SLOTS,
                            .weights_on_device = true,
                            .out_f32 = true,
                            .by_pair = true};
  td_op_moe(f->stream, &args);
  float *pairs = malloc(CACHE_PAIRS * DIM * sizeof *pairs);
  cuda_get(f, pairs, here, CACHE_PAIRS * DIM * sizeof *pairs);
  uint16_t *out = cuda_alloc(f, N_OF_CACHE * DIM * sizeof *out);
  td_op_moe_join(f->stream,
                 &(td_moe_join_args){.here = here,
                                     .there = cuda_put(f, there, CACHE_PAIRS * DIM * sizeof *there),
                                     .slots = dev_slots,
                                     .ids = args.ids,
                                     .weights = args.weights,
                                     .out = out,
                                     .n_tokens = N_OF_CACHE,
                                     .n_experts = EXPERTS,
                                     .top_k = TOP_K,
                                     .dim = DIM});
  float *got = cuda_get_bf16(f, out, N_OF_CACHE * DIM);
  const slots_result r = {x, weights, there, pairs, got, slots, ids};
  for (size_t t = 0; t < N_OF_CACHE; t++)
    check_token_of_slots(e, &r, t);
  free(x);
  free(weights);
  free(there);
  free(pairs);
  free(got);
}

TEST(moe_of_slots) {
  static const expert_formats formats[] = {{{"bf16", TD_BF16, TD_F32, false}, 0, 0, false},
                                           {{"f8", TD_F8E4M3, TD_F32, false}, 128, 128, false},
                                           {{"i4", TD_I4, TD_BF16, true}, 32, 32, true}};
  for (size_t i = 0; i < TD_COUNT(formats); i++) {
    CUDA_OPEN(f);
    experts e;
    make_experts(&e, &f.rng, &formats[i]);
    assert_true(copy_experts(&f, &e));
    run_moe_of_slots(&f, &e);
    ((td_cuda_dev *)f.dev)->pass_bytes = 1; // token by token
    run_moe_of_slots(&f, &e);
    free_experts(&e);
    cuda_close(&f);
  }
}

static const td_cu_abi *counted_abi;
static uint32_t n_rounds;

static int count_sum(const td_cu_moe_sum_args *args, td_cu_stream stream) {
  n_rounds++;
  return counted_abi->moe_sum(args, stream);
}

// Queues the group and returns its number of rounds.
static uint32_t rounds_of(cuda_fixture *f, const experts *e, td_moe_args *args, uint32_t first,
                          uint32_t n) {
  const uint32_t before = n_rounds;
  args->first_expert = first;
  args->n_experts = n;
  args->gate = e->on_device[0] + first;
  args->up = e->on_device[1] + first;
  args->down = e->on_device[2] + first;
  args->accumulate = args->same_ids = first > 0;
  td_op_moe(f->stream, args);
  return n_rounds - before;
}

// A dense MLP that is added, which few tokens' last product does itself, has the bits of its sums
// in f32 and an addition.
TEST(a_dense_sum_is_added) {
  static const expert_formats format = {{"f8", TD_F8E4M3, TD_F32, false}, 128, 128, false};
  static const uint32_t sizes[] = {1, 20, MOE_TOKENS};
  CUDA_OPEN(f);
  experts e;
  make_experts(&e, &f.rng, &format);
  for (size_t i = 0; i < TD_COUNT(sizes); i++) {
    const size_t n = (size_t)sizes[i] * DIM;
    float *x = cuda_floats(&f, n), *before = cuda_floats(&f, n), *sums = malloc(n * sizeof *sums);
    uint16_t *got = malloc(n * sizeof *got);
    td_moe_args args = {.gate = e.g,
                        .up = e.u,
                        .down = e.d,
                        .x = cuda_put_bf16(&f, x, n),
                        .out = cuda_alloc(&f, n * sizeof *sums),
                        .n_tokens = sizes[i],
                        .n_experts = 1,
                        .top_k = 1,
                        .out_f32 = true};
    td_op_moe(f.stream, &args);
    cuda_get(&f, sums, args.out, n * sizeof *sums);
    args.out = cuda_put_bf16(&f, before, n);
    args.out_f32 = false;
    args.accumulate = true;
    td_op_moe(f.stream, &args);
    cuda_get(&f, got, args.out, n * sizeof *got);
    for (size_t j = 0; j < n; j++)
      assert_int_equal(got[j], td_bf16_of(before[j] + sums[j]));
    free(x), free(before), free(sums), free(got);
  }
  free_experts(&e);
  cuda_close(&f);
}

// Up to 64 tokens of a dense MLP have the bits that each has alone, however many blocks share a
// tile of gate and up.
TEST(a_dense_mlp_alone_and_in_company) {
  enum { TOKENS = 64, COLS = 1688, ROWS = 72 };
  static const uint32_t n_sms[] = {132, 1}, sizes[] = {1, 20, TOKENS};
  for (size_t i = 0; i < TD_COUNT(n_sms); i++) {
    CUDA_OPEN(f);
    ((td_cuda_dev *)f.dev)->props.n_sms = (int)n_sms[i];
    ref_weight gate = ref_make_weight(&f.rng, TD_F8E4M3, ROWS, COLS, 128, 128);
    ref_weight up = ref_make_weight(&f.rng, TD_F8E4M3, ROWS, COLS, 128, 128);
    ref_weight down = ref_make_weight(&f.rng, TD_F8E4M3, COLS, ROWS, 128, 128);
    float *x = cuda_floats(&f, TOKENS * COLS);
    uint16_t *bits[TD_COUNT(sizes)];
    for (size_t j = 0; j < TD_COUNT(sizes); j++) { // of the first token
      void *out = cuda_alloc(&f, (size_t)sizes[j] * COLS * sizeof **bits);
      td_op_moe(f.stream, &(td_moe_args){.gate = &gate.w,
                                         .up = &up.w,
                                         .down = &down.w,
                                         .x = cuda_put_bf16(&f, x, (size_t)sizes[j] * COLS),
                                         .out = out,
                                         .n_tokens = sizes[j],
                                         .n_experts = 1,
                                         .top_k = 1});
      cuda_get(&f, bits[j] = malloc(COLS * sizeof **bits), out, COLS * sizeof **bits);
      assert_memory_equal(bits[j], bits[0], COLS * sizeof **bits);
    }
    for (size_t j = 0; j < TD_COUNT(sizes); j++)
      free(bits[j]);
    free(x);
    ref_free_weight(&gate), ref_free_weight(&up), ref_free_weight(&down);
    cuda_close(&f);
  }
}

// A group queued when the host has the counts has no rounds beyond its tiles. One queued before has
// rounds for all pairs that it may have, which is at most one for each token and expert. No bit
// depends on that. Here the first two groups have all pairs, the third none.
TEST(rounds_end_with_the_tiles) {
  CUDA_OPEN(f);
  enum { N_TOKENS = 400, N_PAIRS = N_TOKENS * TOP_K, N = N_TOKENS * DIM };
  // A GPU chooses tiles by more than this test knows.
  const uint32_t min_rounds = is_emulated() ? 10 : 1;
  static const expert_formats format = {{"f8", TD_F8E4M3, TD_F32, false}, 128, 128, false};
  experts e;
  make_experts(&e, &f.rng, &format);
  assert_true(copy_experts(&f, &e));
  td_cuda_dev *dev = (td_cuda_dev *)f.dev;
  td_cu_abi abi = *dev->abi;
  counted_abi = dev->abi;
  abi.moe_sum = count_sum;
  dev->abi = &abi;
  dev->pass_bytes = (size_t)2 * TD_CU_MMA_TOKENS * PAIR_BYTES;
  float *x = cuda_floats(&f, N), *weights = ref_floats(&f.rng, N_PAIRS);
  int32_t ids[N_PAIRS];
  for (int i = 0; i < N_PAIRS; i++) // each of three experts is every token's
    ids[i] = i % TOP_K;
  td_moe_args args = {.x = cuda_put_bf16(&f, x, N),
                      .ids = cuda_put(&f, ids, sizeof ids),
                      .weights = cuda_put(&f, weights, N_PAIRS * sizeof *weights),
                      .out = cuda_alloc(&f, N * sizeof(float)),
                      .n_tokens = N_TOKENS,
                      .top_k = TOP_K,
                      .n_routed = EXPERTS,
                      .out_f32 = true,
                      .weights_on_device = true};
  _Atomic uint32_t *gate = NULL;
  const uint32_t open = 1;
  assert_int_equal(td_dev_alloc_host(f.dev, (void **)&gate, sizeof *gate, NULL), TD_OK);
  atomic_store(gate, 0);
  float *early = malloc(N * sizeof *early), *late = malloc(N * sizeof *late);
  td_op_await(f.stream, gate, cuda_put(&f, &open, sizeof open)); // so that no counts arrive
  assert_int_equal(rounds_of(&f, &e, &args, 0, 1), 4);           // one expert of all tokens
  assert_true(rounds_of(&f, &e, &args, 1, 4) >= min_rounds);
  assert_true(rounds_of(&f, &e, &args, 5, 4) >= min_rounds);
  atomic_store(gate, open);
  cuda_get(&f, early, args.out, N * sizeof *early);
  rounds_of(&f, &e, &args, 0, 1);
  cuda_sync(&f);
  const uint32_t n_needed = rounds_of(&f, &e, &args, 1, 4);
  assert_true(n_needed > 1 && n_needed < min_rounds);
  assert_int_equal(rounds_of(&f, &e, &args, 5, 4), 1);
  cuda_get(&f, late, args.out, N * sizeof *late);
  assert_memory_equal(early, late, N * sizeof *early);
  dev->abi = counted_abi;
  td_dev_free_host(f.dev, (void *)gate);
  free_experts(&e);
  free(early);
  free(late);
  free(x);
  free(weights);
  cuda_close(&f);
}

TEST(an_expert_that_is_none) {
  CUDA_OPEN(f);
  experts e;
  make_experts(&e, &f.rng, &(expert_formats){.format = {.dtype = TD_BF16, .scale_dtype = TD_F32}});
  float *x = cuda_floats(&f, DIM), weight = 1;
  int32_t id = EXPERTS;
  const td_moe_args args = {.gate = e.g,
                            .up = e.u,
                            .down = e.d,
                            .x = cuda_put_bf16(&f, x, DIM),
                            .ids = cuda_put(&f, &id, sizeof id),
                            .weights = cuda_put(&f, &weight, sizeof weight),
                            .out = cuda_alloc(&f, DIM * sizeof(uint16_t)),
                            .n_tokens = 1,
                            .n_experts = EXPERTS,
                            .top_k = 1};
  td_op_moe(f.stream, &args);
  cuda_expect_failure(&f, "experts");
  td_moe_args some = args; // nor is it one of the others
  some.n_experts = 2;
  some.first_expert = 3;
  some.n_routed = EXPERTS;
  td_op_moe(f.stream, &some);
  cuda_expect_failure(&f, "experts");
  free(x);
  cuda_close(&f);
  free_experts(&e);
}
