// tests/unit/test_cuda_moe_pairs.c - the CUDA device's experts whose rows of gate and up alternate,
// with biases and a clamp, against naive ones in double, at small and ragged shapes, within bounds
// that follow from the types: a result in BF16 errs by half a unit in the last place, a sum of k
// products in FP32 by at most k units of the sum of their magnitudes.
// CTest: gpu no-tsan

#include "unit/cuda_test.h"

enum { EXPERTS = 9, TOP_K = 3, PAIRS_DIM = 96, PAIRS_HIDDEN = 64, PAIRS_TOKENS = 90 };

typedef struct {
  ref_weight gate[EXPERTS], down[EXPERTS];
  td_weight g[EXPERTS], d[EXPERTS];
  td_weight on_device[2][EXPERTS];
  float *gate_bias, *down_bias;
  td_moe_args args; // but for tokens and matrices
} paired_experts;

static void make_pairs(paired_experts *e, cuda_fixture *f, const ref_format *format) {
  for (int i = 0; i < EXPERTS; i++) {
    e->gate[i] = ref_make_format(&f->rng, format, 2 * PAIRS_HIDDEN, PAIRS_DIM, 1, 32);
    e->down[i] = ref_make_format(&f->rng, format, PAIRS_DIM, PAIRS_HIDDEN, 1, 32);
    e->g[i] = e->gate[i].w;
    e->d[i] = e->down[i].w;
    e->on_device[0][i] = cuda_put_weight(f, &e->g[i]);
    e->on_device[1][i] = cuda_put_weight(f, &e->d[i]);
  }
  e->gate_bias = ref_floats(&f->rng, (size_t)EXPERTS * 2 * PAIRS_HIDDEN);
  e->down_bias = ref_floats(&f->rng, (size_t)EXPERTS * PAIRS_DIM);
  e->args = (td_moe_args){.gate_bias = e->gate_bias,
                          .down_bias = e->down_bias,
                          .limit = 0.6f, // which values reach on either side
                          .alpha = 1.7f,
                          .pairs = true,
                          .top_k = TOP_K};
}

static void free_pairs(paired_experts *e) {
  for (int i = 0; i < EXPERTS; i++) {
    ref_free_weight(&e->gate[i]);
    ref_free_weight(&e->down[i]);
  }
  free(e->gate_bias);
  free(e->down_bias);
}

// As naive_expert. The derivative of the activation is at most alpha + 1.
static void naive_pairs(const paired_experts *e, int idx, const float *x, double weight,
                        double *out, double *slack) {
  const double limit = e->args.limit, alpha = e->args.alpha;
  const float *gate_bias = e->gate_bias + (size_t)idx * 2 * PAIRS_HIDDEN;
  double h[PAIRS_HIDDEN], h_slack[PAIRS_HIDDEN];
  for (uint32_t r = 0; r < PAIRS_HIDDEN; r++) {
    double v[2], size[2];
    for (uint32_t i = 0; i < 2; i++) {
      v[i] = gate_bias[2 * r + i];
      size[i] = fabs(v[i]);
      for (uint32_t k = 0; k < PAIRS_DIM; k++) {
        const double part = ref_at(&e->g[idx], 2 * r + i, k) * x[k];
        v[i] += part;
        size[i] += fabs(part);
      }
    }
    const double g = fmin(v[0], limit), u = fmax(fmin(v[1], limit), -limit);
    const double active = g / (1 + exp(-alpha * g));
    h[r] = active * (u + 1);
    const double sums = (alpha + 1) * size[0] * (limit + 1) + fabs(active) * size[1];
    h_slack[r] = fabs(h[r]) * ULP_BF16 / 2 + 2 * sums * (PAIRS_DIM + 8) * ULP_F32;
  }
  for (uint32_t r = 0; r < PAIRS_DIM; r++) {
    const double bias = e->down_bias[(size_t)idx * PAIRS_DIM + r];
    out[r] += weight * bias;
    slack[r] += fabs(weight * bias) * 8 * ULP_F32;
    for (uint32_t k = 0; k < PAIRS_HIDDEN; k++) {
      const double w = weight * ref_at(&e->d[idx], r, k);
      out[r] += w * h[k];
      slack[r] += fabs(w) * (h_slack[k] + fabs(h[k]) * (PAIRS_HIDDEN + 8) * ULP_F32);
    }
  }
}

// The sum of all experts, at once or in groups of matrices on the device, in f32.
static float *sum_pairs(cuda_fixture *f, const paired_experts *e, const td_moe_args *all,
                        uint32_t group) {
  const size_t n = (size_t)all->n_tokens * PAIRS_DIM;
  float *sum = cuda_alloc(f, n * sizeof *sum), *got = malloc(n * sizeof *got);
  td_moe_args args = *all;
  args.out = sum;
  args.out_f32 = true;
  for (uint32_t first = 0; first < EXPERTS; first += group) {
    const bool is_part = group < EXPERTS;
    args.gate = is_part ? &e->on_device[0][first] : e->g;
    args.down = is_part ? &e->on_device[1][first] : e->d;
    args.weights_on_device = is_part;
    args.first_expert = first;
    args.n_experts = EXPERTS - first < group ? EXPERTS - first : group;
    args.n_routed = is_part ? EXPERTS : 0;
    args.accumulate = args.same_ids = first > 0;
    td_op_moe(f->stream, &args);
  }
  cuda_get(f, got, sum, n * sizeof *got);
  return got;
}

static void run_pairs(cuda_fixture *f, const paired_experts *e, uint32_t n) {
  float *x = cuda_floats(f, (size_t)n * PAIRS_DIM), *weights = ref_floats(&f->rng, n * TOP_K);
  int32_t ids[PAIRS_TOKENS * TOP_K];
  for (uint32_t i = 0; i < n * TOP_K; i++) // expert 8 gets none, expert 0 most
    ids[i] = i % 3 ? (int32_t)ref_below(&f->rng, EXPERTS - 1) : 0;
  td_moe_args args = e->args;
  args.x = cuda_put_bf16(f, x, (size_t)n * PAIRS_DIM);
  args.ids = cuda_put(f, ids, n * TOP_K * sizeof *ids);
  args.weights = cuda_put(f, weights, n * TOP_K * sizeof *weights);
  args.n_tokens = n;
  static const uint32_t groups[] = {EXPERTS, 4};
  for (size_t i = 0; i < TD_COUNT(groups); i++) {
    float *got = sum_pairs(f, e, &args, groups[i]);
    for (size_t t = 0; t < n; t++) {
      double want[PAIRS_DIM] = {0}, slack[PAIRS_DIM] = {0};
      for (size_t pair = t * TOP_K; pair < (t + 1) * TOP_K; pair++)
        naive_pairs(e, ids[pair], x + t * PAIRS_DIM, weights[pair], want, slack);
      for (size_t d = 0; d < PAIRS_DIM; d++)
        cuda_assert_within(got[t * PAIRS_DIM + d], want[d], slack[d], "pairs", t * PAIRS_DIM + d);
    }
    free(got);
  }
  free(x);
  free(weights);
}

static void check_pairs(const ref_format *format) {
  CUDA_OPEN(f);
  paired_experts e;
  make_pairs(&e, &f, format);
  run_pairs(&f, &e, 1);
  run_pairs(&f, &e, 7);
  run_pairs(&f, &e, PAIRS_TOKENS);
  ((td_cuda_dev *)f.dev)->pass_bytes = 1; // token by token, or tile by tile
  run_pairs(&f, &e, 7);
  free_pairs(&e);
  cuda_close(&f);
}

TEST(moe_of_pairs) {
  check_pairs(&(ref_format){"bf16", TD_BF16, TD_F32, false});
}

TEST(moe_of_pairs_in_mxfp4) {
  check_pairs(&(ref_format){"f4", TD_F4E2M1, TD_F8E8M0, false});
}
