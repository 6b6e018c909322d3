// tests/unit/test_device_ops.c - every operator of the CPU device against a naive one in double.
#include <setjmp.h>

#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "base/bf16.h"
#include "device/cpu/tuner.h"
#include "device/device.h"
#include "tandem/kernels.h"
#include "unit/ref.h"

typedef struct {
  td_dev *dev;
  td_stream *stream;
  uint64_t rng;
} fixture;

static void open_fixture(fixture *f, unsigned n_threads) {
  td_err err;
  f->rng = 1;
  assert_int_equal(
      td_dev_open(&f->dev, &(td_dev_opts){.kind = "cpu", .n_threads = n_threads}, &err), TD_OK);
  assert_int_equal(td_stream_open(&f->stream, f->dev, &err), TD_OK);
}

static void close_fixture(fixture *f) {
  td_stream_close(f->stream);
  td_dev_close(f->dev);
}

static void sync_ok(fixture *f) {
  td_err err;
  if (td_stream_sync(f->stream, &err) != TD_OK) fail_msg("%s", err.msg);
}

static void assert_close(const float *got, const double *want, size_t n, double tolerance) {
  double distance = ref_distance(got, want, n);
  if (!(distance <= tolerance)) fail_msg("distance %g above %g", distance, tolerance);
}

static const unsigned teams[] = {1, 3};
#define FOR_TEAMS(f)                                                                               \
  for (size_t team_ = 0; team_ < TD_COUNT(teams); team_++)                                         \
    for (int once_ = (open_fixture(&(f), teams[team_]), 1); once_; close_fixture(&(f)), once_ = 0)

static void test_embed_gather_add(void **state) {
  (void)state;
  fixture f;
  FOR_TEAMS(f) {
    ref_weight table = ref_make_weight(&f.rng, TD_BF16, 50, 33, 0, 0);
    int32_t ids[300], rows[] = {299, 0, 7};
    for (int i = 0; i < 300; i++)
      ids[i] = (int32_t)ref_below(&f.rng, 50);
    float *x = malloc(300 * 33 * sizeof *x), gathered[3 * 33];
    float *y = ref_floats(&f.rng, 300 * 33);
    td_op_embed(f.stream, &(td_embed_args){&table.w, ids, x, 300});
    td_op_gather_rows(f.stream, gathered, x, rows, 3, 33);
    td_op_add(f.stream, x, y, 300 * 33);
    sync_ok(&f);
    for (int t = 0; t < 300; t++) {
      for (uint32_t c = 0; c < 33; c++) {
        double want = ref_at(&table.w, (uint32_t)ids[t], c);
        assert_true(x[t * 33 + c] == (float)(want + y[t * 33 + c]));
      }
    }
    for (int i = 0; i < 3; i++) {
      for (uint32_t c = 0; c < 33; c++) {
        assert_true(gathered[i * 33 + c] == ref_at(&table.w, (uint32_t)ids[rows[i]], c));
      }
    }
    free(x);
    free(y);
    ref_free_weight(&table);
  }
}

// BF16 and f32 parts give the same sum, in order; a single part is converted.
static void test_sum_parts(void **state) {
  (void)state;
  enum { N = 70000 }; // several pieces, and an incomplete block
  fixture f;
  FOR_TEAMS(f) {
    float *parts[3], *out = malloc(N * sizeof *out);
    uint16_t *bf16[3], *rounded = malloc(N * sizeof *rounded);
    for (int p = 0; p < 3; p++) {
      parts[p] = ref_floats(&f.rng, N);
      bf16[p] = malloc(N * sizeof **bf16);
      td_op_sum_parts(
          f.stream, &(td_sum_parts_args){
                        .parts = {parts[p]}, .out = bf16[p], .n = N, .n_parts = 1, .f32_parts = 1});
    }
    td_sum_parts_args sum = {.parts = {bf16[0], parts[1], bf16[2]},
                             .out = out,
                             .n = N,
                             .n_parts = 3,
                             .f32_parts = 2,
                             .out_f32 = true};
    td_op_sum_parts(f.stream, &sum);
    sum.out = rounded;
    sum.out_f32 = false;
    td_op_sum_parts(f.stream, &sum);
    sync_ok(&f);
    for (int i = 0; i < N; i++) {
      float want = 0;
      for (int p = 0; p < 3; p++) {
        assert_int_equal(bf16[p][i], td_bf16_of(parts[p][i]));
        want += td_bf16_value(bf16[p][i]);
      }
      assert_true(out[i] == want && rounded[i] == td_bf16_of(want));
    }
    sum.n_parts = TD_MAX_SUM_PARTS + 1;
    td_op_sum_parts(f.stream, &sum);
    td_err err;
    assert_int_equal(td_stream_sync(f.stream, &err), TD_EINVAL);
    for (int p = 0; p < 3; p++)
      free(parts[p]), free(bf16[p]);
    free(out), free(rounded);
  }
}

static void test_await_is_canceled(void **state) {
  (void)state;
  fixture f;
  open_fixture(&f, 1);
  _Atomic uint32_t signal = 0, canceled = 0;
  const uint32_t one = 1;
  td_op_await_or_cancel(f.stream, &signal, &one, &canceled);
  canceled = 1;
  td_err err;
  assert_int_equal(td_stream_sync(f.stream, &err), TD_ECANCELED);
  td_op_signal(f.stream, &signal, &one); // a failed stream still signals
  td_stream_sync(f.stream, NULL);
  assert_int_equal(signal, 1);
  close_fixture(&f);
}

static void test_post(void **state) {
  (void)state;
  fixture f;
  open_fixture(&f, 1);
  td_err err;
  td_inbox inbox;
  assert_int_equal(td_inbox_open(&inbox, f.dev, f.dev, 128, &err), TD_OK);
  char *data = inbox.memory;
  _Atomic uint32_t *signal = (_Atomic uint32_t *)(data + 64);
  assert_true(data[63] == 0 && *signal == 0);
  static const uint32_t values[] = {7, 8};
  td_op_post(f.stream, &(td_post_args){data, "seventeen letters", 17, signal, &values[0]});
  td_op_await(f.stream, signal, &values[0]);
  assert_int_equal(td_stream_sync(f.stream, &err), TD_OK);
  assert_memory_equal(data, "seventeen letters", 18);
  _Atomic uint32_t never = 0, canceled = 1;
  td_op_await_or_cancel(f.stream, &never, &values[0], &canceled);
  td_op_post(f.stream, &(td_post_args){data, "no", 2, signal, &values[1]});
  assert_int_equal(td_stream_sync(f.stream, &err), TD_ECANCELED);
  assert_int_equal(*signal, 8); // a failed stream still signals
  td_inbox_close(&inbox, f.dev);
  close_fixture(&f);
}

static void test_copy_and_zero(void **state) {
  (void)state;
  fixture f;
  FOR_TEAMS(f) {
    void *mem;
    td_err err;
    assert_int_equal(td_dev_alloc(f.dev, &mem, 1000, &err), TD_OK);
    assert_int_equal((uintptr_t)mem % 64, 0);
    char in[1000], out[1000];
    for (int i = 0; i < 1000; i++)
      in[i] = (char)i;
    td_op_copy(f.stream, mem, in, 1000);
    td_op_fill_zero(f.stream, (char *)mem + 10, 20);
    td_op_copy(f.stream, out, mem, 1000);
    sync_ok(&f);
    for (int i = 0; i < 1000; i++)
      assert_int_equal(out[i], i >= 10 && i < 30 ? 0 : in[i]);
    td_dev_free(f.dev, mem);
  }
}

static void test_rmsnorm(void **state) {
  (void)state;
  fixture f;
  enum { ROWS = 70, DIM = 501, STRIDE = 600 };
  FOR_TEAMS(f) {
    float *x = ref_floats(&f.rng, ROWS * STRIDE), *residual = ref_floats(&f.rng, ROWS * DIM);
    float *before = malloc(ROWS * DIM * sizeof *before), *out = malloc(ROWS * DIM * sizeof *out);
    double *want = ref_doubles(ROWS * DIM);
    float *w = ref_floats(&f.rng, DIM);
    memcpy(before, residual, ROWS * DIM * sizeof *before);
    td_op_rmsnorm(f.stream, &(td_rmsnorm_args){.x = x,
                                               .residual = residual,
                                               .w = {w, TD_F32, DIM},
                                               .out = out,
                                               .x_stride = STRIDE,
                                               .out_stride = DIM,
                                               .n_rows = ROWS,
                                               .dim = DIM,
                                               .eps = 1e-3f});
    sync_ok(&f);
    for (size_t i = 0; i < ROWS; i++) {
      double sum = 0;
      for (size_t d = 0; d < DIM; d++) {
        float h = before[i * DIM + d] + x[i * STRIDE + d];
        assert_true(residual[i * DIM + d] == h);
        sum += (double)h * h;
      }
      for (size_t d = 0; d < DIM; d++) {
        want[i * DIM + d] = residual[i * DIM + d] / sqrt(sum / DIM + 1e-3) * w[d];
      }
    }
    assert_close(out, want, ROWS * DIM, 1e-6);
    // in place, without a residual, BF16 weights
    uint16_t wb[DIM];
    for (int d = 0; d < DIM; d++)
      wb[d] = ref_to_bf16(w[d]);
    memcpy(before, out, ROWS * DIM * sizeof *before);
    td_op_rmsnorm(f.stream, &(td_rmsnorm_args){.x = out,
                                               .w = {wb, TD_BF16, DIM},
                                               .out = out,
                                               .x_stride = DIM,
                                               .out_stride = DIM,
                                               .n_rows = ROWS,
                                               .dim = DIM,
                                               .eps = 1e-6f});
    sync_ok(&f);
    for (size_t i = 0; i < ROWS; i++) {
      double sum = 0;
      for (size_t d = 0; d < DIM; d++)
        sum += (double)before[i * DIM + d] * before[i * DIM + d];
      for (size_t d = 0; d < DIM; d++) {
        want[i * DIM + d] = before[i * DIM + d] / sqrt(sum / DIM + 1e-6) * ref_bf16(wb[d]);
      }
    }
    assert_close(out, want, ROWS * DIM, 1e-6);
    free(x);
    free(residual);
    free(before);
    free(out);
    free(want);
    free(w);
  }
}

static void test_linear(void **state) {
  (void)state;
  static const struct {
    td_dtype dtype;
    uint32_t rows, cols, n_tokens;
  } cases[] = {{TD_F32, 67, 33, 5},       {TD_BF16, 129, 200, 1},  {TD_F8E4M3, 300, 385, 7},
               {TD_F8E4M3, 130, 64, 250}, {TD_BF16, 40, 1031, 19}, {TD_F32, 1, 1, 1}};
  fixture f;
  FOR_TEAMS(f) {
    for (size_t c = 0; c < TD_COUNT(cases); c++) {
      uint32_t rows = cases[c].rows, cols = cases[c].cols, n = cases[c].n_tokens;
      size_t ldx = cols + 3, ldy = rows + 5;
      ref_weight w = ref_make_weight(&f.rng, cases[c].dtype, rows, cols, 128, 128);
      float *x = ref_floats(&f.rng, n * ldx), *bias = ref_floats(&f.rng, rows);
      float *y = ref_floats(&f.rng, n * ldy), *dense = malloc((size_t)n * rows * sizeof *dense);
      double *want = ref_doubles((size_t)n * rows);
      td_op_linear(f.stream, &(td_linear_op_args){.w = &w.w,
                                                  .bias = {bias, TD_F32, rows},
                                                  .x = x,
                                                  .y = y,
                                                  .x_stride = ldx,
                                                  .y_stride = ldy,
                                                  .n_tokens = n,
                                                  .n_prompt = n / 5 * 4,
                                                  .out_f32 = true});
      sync_ok(&f);
      for (uint32_t t = 0; t < n; t++) {
        for (uint32_t r = 0; r < rows; r++) {
          double sum = bias[r];
          for (uint32_t k = 0; k < cols; k++)
            sum += ref_at(&w.w, r, k) * x[t * ldx + k];
          want[(size_t)t * rows + r] = sum;
          dense[(size_t)t * rows + r] = y[t * ldy + r];
        }
      }
      assert_close(dense, want, (size_t)n * rows, 1e-6);
      free(x);
      free(bias);
      free(y);
      free(dense);
      free(want);
      ref_free_weight(&w);
    }
  }
}

static void test_rope(void **state) {
  (void)state;
  enum { TOKENS = 9, HEADS = 3, DIM = 20, ROT = 12, OFFSET = 8, MAX = 40 };
  fixture f;
  FOR_TEAMS(f) {
    float *table = ref_floats(&f.rng, MAX * ROT);
    int32_t position[TOKENS];
    for (int t = 0; t < TOKENS; t++)
      position[t] = (int32_t)ref_below(&f.rng, MAX);
    for (int interleaved = 0; interleaved < 2; interleaved++) {
      float *x = ref_floats(&f.rng, TOKENS * HEADS * DIM),
            *before = malloc(sizeof(float) * TOKENS * HEADS * DIM);
      memcpy(before, x, sizeof(float) * TOKENS * HEADS * DIM);
      td_op_rope(f.stream, &(td_rope_args){.x = x + OFFSET,
                                           .cos_sin = table,
                                           .position = position,
                                           .token_stride = HEADS * DIM,
                                           .head_stride = DIM,
                                           .n_tokens = TOKENS,
                                           .n_heads = HEADS,
                                           .rot_dim = ROT,
                                           .interleaved = interleaved});
      sync_ok(&f);
      for (size_t row = 0; row < TOKENS * HEADS; row++) {
        const float *cs = table + (size_t)position[row / HEADS] * ROT;
        for (size_t d = 0; d < OFFSET; d++)
          assert_true(x[row * DIM + d] == before[row * DIM + d]);
        for (size_t i = 0; i < ROT / 2; i++) {
          size_t a = row * DIM + OFFSET + (interleaved ? 2 * i : i);
          size_t b = interleaved ? a + 1 : a + ROT / 2;
          double c = cs[2 * i], s = cs[2 * i + 1];
          assert_float_equal(x[a], before[a] * c - before[b] * s, 1e-6);
          assert_float_equal(x[b], before[b] * c + before[a] * s, 1e-6);
        }
      }
      free(x);
      free(before);
    }
    free(table);
  }
}

static void test_scale_rows(void **state) {
  (void)state;
  enum { TOKENS = 9, DIM = 70, MAX = 40 };
  fixture f;
  FOR_TEAMS(f) {
    float *factor = ref_floats(&f.rng, MAX), *x = ref_floats(&f.rng, TOKENS * DIM);
    float before[TOKENS * DIM];
    memcpy(before, x, sizeof before);
    int32_t position[TOKENS];
    for (int t = 0; t < TOKENS; t++)
      position[t] = (int32_t)ref_below(&f.rng, MAX);
    td_op_scale_rows(
        f.stream,
        &(td_scale_rows_args){
            .x = x, .factor = factor, .position = position, .n_tokens = TOKENS, .dim = DIM});
    sync_ok(&f);
    for (int i = 0; i < TOKENS * DIM; i++)
      assert_true(x[i] == before[i] * factor[position[i / DIM]]);
    free(factor);
    free(x);
  }
}

static void naive_route(const td_router_args *a, uint32_t t, int32_t *ids, double *weights) {
  uint32_t n = a->n_experts;
  double score[512], choice[512], max = -INFINITY, total = 0;
  const float *logits = a->logits + (size_t)t * n;
  for (uint32_t e = 0; e < n; e++)
    max = fmax(max, logits[e]);
  for (uint32_t e = 0; e < n; e++)
    total += exp(logits[e] - max);
  for (uint32_t e = 0; e < n; e++) {
    bool soft = a->kind == TD_ROUTER_SOFTMAX;
    score[e] = soft ? exp(logits[e] - max) / total : 1 / (1 + exp(-(double)logits[e]));
    choice[e] = score[e] + (a->bias ? a->bias[e] : 0);
  }
  if (a->n_groups > 1) {
    uint32_t size = n / a->n_groups;
    double group[512];
    for (uint32_t g = 0; g < a->n_groups; g++) {
      group[g] = -INFINITY; // the best sum of any two
      for (uint32_t i = 0; i < size; i++) {
        for (uint32_t j = 0; j < i; j++) {
          group[g] = fmax(group[g], choice[g * size + i] + choice[g * size + j]);
        }
      }
    }
    for (uint32_t g = 0; g < a->n_groups; g++) {
      uint32_t better = 0;
      for (uint32_t h = 0; h < a->n_groups; h++)
        better += group[h] > group[g];
      for (uint32_t i = 0; better >= a->topk_groups && i < size; i++)
        choice[g * size + i] = -1e30;
    }
  }
  double sum = a->kind == TD_ROUTER_SIGMOID ? 1e-20 : 0;
  for (uint32_t j = 0; j < a->top_k; j++) {
    uint32_t best = 0;
    for (uint32_t e = 1; e < n; e++)
      best = choice[e] > choice[best] ? e : best;
    choice[best] = -1e31;
    ids[j] = (int32_t)best;
    weights[j] = score[best];
    sum += score[best];
  }
  for (uint32_t j = 0; j < a->top_k; j++) {
    weights[j] *= a->scaling / (a->norm_topk ? sum : 1.0);
  }
}

static void test_router(void **state) {
  (void)state;
  static const struct {
    td_router_kind kind;
    uint32_t n_experts, top_k, n_groups, topk_groups;
    bool norm, bias;
  } cases[] = {{TD_ROUTER_SOFTMAX, 128, 8, 0, 0, true, false},
               {TD_ROUTER_SOFTMAX, 7, 2, 1, 1, false, false},
               {TD_ROUTER_SOFTMAX, 12, 4, 3, 2, true, false},
               {TD_ROUTER_SIGMOID, 256, 8, 8, 4, true, true},
               {TD_ROUTER_SIGMOID, 64, 6, 1, 1, true, true},
               {TD_ROUTER_SIGMOID, 12, 4, 3, 1, false, false}};
  enum { TOKENS = 100 };
  fixture f;
  FOR_TEAMS(f) {
    for (size_t c = 0; c < TD_COUNT(cases); c++) {
      uint32_t n = cases[c].n_experts, k = cases[c].top_k;
      float *logits = ref_floats(&f.rng, TOKENS * n), *bias = ref_floats(&f.rng, n);
      for (size_t i = 0; i < (size_t)TOKENS * n; i++)
        logits[i] *= 4;
      int32_t *ids = malloc(TOKENS * k * sizeof *ids);
      float *weights = malloc(TOKENS * k * sizeof *weights);
      td_router_args args = {.logits = logits,
                             .bias = cases[c].bias ? bias : NULL,
                             .ids = ids,
                             .weights = weights,
                             .kind = cases[c].kind,
                             .n_tokens = TOKENS,
                             .n_experts = n,
                             .top_k = k,
                             .n_groups = cases[c].n_groups,
                             .topk_groups = cases[c].topk_groups,
                             .norm_topk = cases[c].norm,
                             .scaling = 2.5f};
      td_op_router(f.stream, &args);
      sync_ok(&f);
      for (uint32_t t = 0; t < TOKENS; t++) {
        int32_t want_ids[16];
        double want[16];
        naive_route(&args, t, want_ids, want);
        assert_memory_equal(ids + t * k, want_ids, k * sizeof *ids);
        assert_close(weights + t * k, want, k, 1e-6);
      }
      free(logits);
      free(bias);
      free(ids);
      free(weights);
    }
  }
}

static void test_ranking(void **state) {
  (void)state;
  enum { ROWS = 3, N = 700 };
  static const float temperature[ROWS] = {0, 0.6f, 2.5f};
  fixture f;
  FOR_TEAMS(f) {
    float *logits = ref_ties(&f.rng, ROWS * N);
    td_top_logits top[ROWS];
    for (int i = 0; i < N; i += 2)
      logits[2 * N + i] = i % 4 ? NAN : -INFINITY;
    for (uint32_t n = 1; n <= N; n += 233) {
      td_op_top_logits(f.stream, &(td_top_logits_args){logits, temperature, top, ROWS, n});
      sync_ok(&f);
      for (uint32_t r = 0; r < ROWS; r++)
        ref_check_top(logits + r * n, n, temperature[r], &top[r]);
    }
    free(logits);
  }
}

static void test_router_ties_go_to_the_lower_index(void **state) {
  (void)state;
  fixture f;
  open_fixture(&f, 1);
  float logits[16] = {0}, weights[4];
  int32_t ids[4];
  td_op_router(f.stream, &(td_router_args){.logits = logits,
                                           .ids = ids,
                                           .weights = weights,
                                           .kind = TD_ROUTER_SIGMOID,
                                           .n_tokens = 1,
                                           .n_experts = 16,
                                           .top_k = 4,
                                           .n_groups = 4,
                                           .topk_groups = 2,
                                           .scaling = 1});
  sync_ok(&f);
  for (int i = 0; i < 4; i++)
    assert_int_equal(ids[i], i);
  close_fixture(&f);
}

enum { DIM = 72, HIDDEN = 56, EXPERTS = 9, TOP_K = 3 };

typedef struct {
  ref_weight gate[EXPERTS], up[EXPERTS], down[EXPERTS];
  td_weight g[EXPERTS], u[EXPERTS], d[EXPERTS];
} experts;

static void make_experts(experts *e, uint64_t *rng, td_dtype dtype) {
  for (int i = 0; i < EXPERTS; i++) {
    e->gate[i] = ref_make_weight(rng, dtype, HIDDEN, DIM, 32, 32);
    e->up[i] = ref_make_weight(rng, dtype, HIDDEN, DIM, 32, 32);
    e->down[i] = ref_make_weight(rng, dtype, DIM, HIDDEN, 32, 32);
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

static void naive_expert(const experts *e, int idx, const float *x, double weight, double *out) {
  double h[HIDDEN];
  for (uint32_t r = 0; r < HIDDEN; r++) {
    double g = 0, u = 0;
    for (uint32_t k = 0; k < DIM; k++) {
      g += ref_at(&e->g[idx], r, k) * x[k];
      u += ref_at(&e->u[idx], r, k) * x[k];
    }
    h[r] = g / (1 + exp(-g)) * u;
  }
  for (uint32_t r = 0; r < DIM; r++) {
    for (uint32_t k = 0; k < HIDDEN; k++)
      out[r] += weight * ref_at(&e->d[idx], r, k) * h[k];
  }
}

// A token alone, of a prompt or not, gives the same bits as in the batch.
static void check_alone(fixture *f, td_moe_args args) {
  float *out = args.out;
  td_op_moe(f->stream, &args);
  for (uint32_t t = 0; t < args.n_tokens; t += 41) {
    float alone[DIM];
    td_moe_args one = args;
    one.n_tokens = 1;
    one.n_prompt = t >= args.n_tokens - args.n_prompt;
    one.x = (const float *)args.x + t * DIM;
    one.ids = args.ids + t * TOP_K;
    one.weights = args.weights + t * TOP_K;
    one.out = alone;
    td_op_moe(f->stream, &one);
    sync_ok(f);
    assert_memory_equal(alone, out + t * DIM, sizeof alone);
  }
}

static void test_moe(void **state) {
  (void)state;
  enum { TOKENS = 210, PROMPT = 128 };
  static const td_dtype dtypes[] = {TD_BF16, TD_F8E4M3};
  fixture f;
  FOR_TEAMS(f) {
    for (size_t c = 0; c < TD_COUNT(dtypes); c++) {
      experts e;
      make_experts(&e, &f.rng, dtypes[c]);
      float *x = ref_floats(&f.rng, TOKENS * DIM), *out = ref_floats(&f.rng, TOKENS * DIM);
      float *weights = ref_floats(&f.rng, TOKENS * TOP_K);
      int32_t ids[TOKENS * TOP_K];
      for (int i = 0; i < TOKENS * TOP_K; i++) { // expert 8 gets none, expert 0 most
        ids[i] = i % 3 ? (int32_t)ref_below(&f.rng, EXPERTS - 1) : 0;
      }
      double *want = ref_doubles(TOKENS * DIM);
      for (int t = 0; t < TOKENS; t++) {
        for (int d = 0; d < DIM; d++)
          want[t * DIM + d] = out[t * DIM + d];
        for (int j = 0; j < TOP_K; j++) {
          naive_expert(&e, ids[t * TOP_K + j], x + t * DIM, weights[t * TOP_K + j], want + t * DIM);
        }
      }
      td_moe_args args = {.gate = e.g,
                          .up = e.u,
                          .down = e.d,
                          .x = x,
                          .ids = ids,
                          .weights = weights,
                          .out = out,
                          .n_tokens = TOKENS,
                          .n_prompt = PROMPT,
                          .n_experts = EXPERTS,
                          .top_k = TOP_K,
                          .accumulate = true};
      td_op_moe(f.stream, &args);
      sync_ok(&f);
      assert_close(out, want, TOKENS * DIM, 2e-6);
      args.accumulate = false;
      check_alone(&f, args);
      td_kernels_use_activations(TD_ACTIVATIONS_AUTO);
      check_alone(&f, args);
      td_kernels_use_activations(TD_ACTIVATIONS_F32);
      // Dense: expert 0, weight 1.
      memset(want, 0, TOKENS * DIM * sizeof *want);
      for (int t = 0; t < TOKENS; t++)
        naive_expert(&e, 0, x + t * DIM, 1, want + t * DIM);
      args.ids = NULL;
      args.weights = NULL;
      args.top_k = 1;
      td_op_moe(f.stream, &args);
      sync_ok(&f);
      assert_close(out, want, TOKENS * DIM, 2e-6);
      free(x);
      free(out);
      free(weights);
      free(want);
      free_experts(&e);
    }
  }
}

// Rows of gate and up alternate; biases; a clamp that values reach on either side.
static void naive_pairs(const td_moe_args *a, int idx, const float *x, double weight, double *out) {
  double h[HIDDEN / 2];
  for (uint32_t r = 0; r < HIDDEN / 2; r++) {
    double g = a->gate_bias[idx * HIDDEN + 2 * r], u = a->gate_bias[idx * HIDDEN + 2 * r + 1];
    for (uint32_t k = 0; k < DIM; k++) {
      g += ref_at(&a->gate[idx], 2 * r, k) * x[k];
      u += ref_at(&a->gate[idx], 2 * r + 1, k) * x[k];
    }
    g = fmin(g, a->limit);
    u = fmax(fmin(u, a->limit), -a->limit);
    h[r] = g / (1 + exp(-a->alpha * g)) * (u + 1);
  }
  for (uint32_t r = 0; r < DIM; r++) {
    double sum = a->down_bias[idx * DIM + r];
    for (uint32_t k = 0; k < HIDDEN / 2; k++)
      sum += ref_at(&a->down[idx], r, k) * h[k];
    out[r] += weight * sum;
  }
}

static void test_moe_of_pairs(void **state) {
  (void)state;
  enum { TOKENS = 210, PROMPT = 128 };
  fixture f;
  FOR_TEAMS(f) {
    ref_weight gate[EXPERTS], down[EXPERTS];
    td_weight g[EXPERTS], d[EXPERTS];
    for (int i = 0; i < EXPERTS; i++) {
      gate[i] = ref_make_weight(&f.rng, TD_BF16, HIDDEN, DIM, 0, 0);
      down[i] = ref_make_weight(&f.rng, TD_BF16, DIM, HIDDEN / 2, 0, 0);
      g[i] = gate[i].w;
      d[i] = down[i].w;
    }
    float *x = ref_floats(&f.rng, TOKENS * DIM), *out = ref_floats(&f.rng, TOKENS * DIM);
    float *weights = ref_floats(&f.rng, TOKENS * TOP_K);
    float *gate_bias = ref_floats(&f.rng, EXPERTS * HIDDEN);
    float *down_bias = ref_floats(&f.rng, EXPERTS * DIM);
    int32_t ids[TOKENS * TOP_K];
    for (int i = 0; i < TOKENS * TOP_K; i++)
      ids[i] = (int32_t)ref_below(&f.rng, EXPERTS);
    td_moe_args args = {.gate = g,
                        .down = d,
                        .gate_bias = gate_bias,
                        .down_bias = down_bias,
                        .limit = 0.6f,
                        .alpha = 1.7f,
                        .pairs = true,
                        .x = x,
                        .ids = ids,
                        .weights = weights,
                        .out = out,
                        .n_tokens = TOKENS,
                        .n_prompt = PROMPT,
                        .n_experts = EXPERTS,
                        .top_k = TOP_K};
    double *want = ref_doubles(TOKENS * DIM);
    for (int t = 0; t < TOKENS; t++) {
      for (int j = 0; j < TOP_K; j++)
        naive_pairs(&args, ids[t * TOP_K + j], x + t * DIM, weights[t * TOP_K + j], want + t * DIM);
    }
    td_op_moe(f.stream, &args);
    sync_ok(&f);
    assert_close(out, want, TOKENS * DIM, 2e-6);
    check_alone(&f, args);
    for (int i = 0; i < EXPERTS; i++) {
      ref_free_weight(&gate[i]);
      ref_free_weight(&down[i]);
    }
    free(x);
    free(out);
    free(weights);
    free(gate_bias);
    free(down_bias);
    free(want);
  }
}

static uint16_t *rounded(const float *x, size_t n) {
  uint16_t *out = malloc(n * sizeof *out);
  td_bf16_of_n(out, x, n);
  return out;
}

// Some of the experts at a time, one of which nobody has chosen.
static void test_moe_in_groups(void **state) {
  (void)state;
  enum { TOKENS = 210, PROMPT = 128, GROUP = 4 };
  fixture f;
  FOR_TEAMS(f) {
    experts e;
    make_experts(&e, &f.rng, TD_F8E4M3);
    float *x = ref_floats(&f.rng, TOKENS * DIM), *out = ref_floats(&f.rng, TOKENS * DIM);
    float *sum = ref_floats(&f.rng, TOKENS * DIM), *weights = ref_floats(&f.rng, TOKENS * TOP_K);
    double *want = ref_doubles(TOKENS * DIM);
    int32_t ids[TOKENS * TOP_K];
    for (int i = 0; i < TOKENS * TOP_K; i++)
      ids[i] = (int32_t)ref_below(&f.rng, EXPERTS - 1);
    for (int t = 0; t < TOKENS; t++) {
      for (int d = 0; d < DIM; d++)
        want[t * DIM + d] = out[t * DIM + d];
      for (int j = 0; j < TOP_K; j++)
        naive_expert(&e, ids[t * TOP_K + j], x + t * DIM, weights[t * TOP_K + j], want + t * DIM);
    }
    for (uint32_t first = 0; first < EXPERTS; first += GROUP) {
      td_op_moe(f.stream,
                &(td_moe_args){.gate = e.g + first,
                               .up = e.u + first,
                               .down = e.d + first,
                               .x = x,
                               .ids = ids,
                               .weights = weights,
                               .out = sum,
                               .n_tokens = TOKENS,
                               .n_prompt = PROMPT,
                               .n_experts = first + GROUP < EXPERTS ? GROUP : EXPERTS - first,
                               .top_k = TOP_K,
                               .first_expert = first,
                               .n_routed = EXPERTS,
                               .accumulate = first > 0,
                               .out_f32 = true,
                               .weights_on_device = true});
    }
    td_op_add_f32(f.stream, out, sum, TOKENS * DIM);
    sync_ok(&f);
    assert_close(out, want, TOKENS * DIM, 2e-6);
    free(x);
    free(out);
    free(sum);
    free(weights);
    free(want);
    free_experts(&e);
  }
}

// BF16 in and out: what f32 gives for the same activations, rounded once.
static void test_moe_of_bf16(void **state) {
  (void)state;
  enum { TOKENS = (1 << 17) / DIM + 1 }; // so many that widening them is shared out
  fixture f;
  open_fixture(&f, 3);
  experts e;
  make_experts(&e, &f.rng, TD_F8E4M3);
  float *x = ref_floats(&f.rng, TOKENS * DIM), *out = ref_floats(&f.rng, TOKENS * DIM);
  float *weights = ref_floats(&f.rng, TOKENS * TOP_K);
  uint16_t *x16 = rounded(x, TOKENS * DIM), *out16 = rounded(out, TOKENS * DIM);
  td_bf16_values(x, x16, TOKENS * DIM);
  td_bf16_values(out, out16, TOKENS * DIM);
  int32_t *ids = malloc(TOKENS * TOP_K * sizeof *ids);
  for (int i = 0; i < TOKENS * TOP_K; i++)
    ids[i] = (int32_t)ref_below(&f.rng, EXPERTS);
  td_moe_args args = {.gate = e.g,
                      .up = e.u,
                      .down = e.d,
                      .ids = ids,
                      .weights = weights,
                      .n_tokens = TOKENS,
                      .n_prompt = TOKENS / 2,
                      .n_experts = EXPERTS,
                      .top_k = TOP_K};
  for (int accumulate = 1; accumulate >= 0; accumulate--) {
    args.accumulate = accumulate;
    args.is_bf16 = false;
    args.x = x;
    args.out = out;
    td_op_moe(f.stream, &args);
    args.is_bf16 = true;
    args.x = x16;
    args.out = out16;
    td_op_moe(f.stream, &args);
    sync_ok(&f);
    uint16_t *want = rounded(out, TOKENS * DIM);
    assert_memory_equal(out16, want, TOKENS * DIM * sizeof *want);
    free(want);
  }
  free(x);
  free(out);
  free(weights);
  free(x16);
  free(out16);
  free(ids);
  free_experts(&e);
  close_fixture(&f);
}

// How many rows a call has is tried out while matrices this large are computed.
static void test_trials_change_no_bit(void **state) {
  (void)state;
  enum { ROWS = 1040, COLS = 1024, TOKENS = 40, RUNS = 2 * TD_TUNER_ROUND };
  _Static_assert(ROWS * COLS >= TD_TUNER_WEIGHTS, "is tried");
  static const td_dtype dtypes[] = {TD_F8E4M3, TD_I4};
  fixture f;
  open_fixture(&f, 3);
  td_kernels_use_activations(TD_ACTIVATIONS_AUTO);
  for (size_t c = 0; c < TD_COUNT(dtypes); c++) {
    ref_weight gate = ref_make_weight(&f.rng, dtypes[c], ROWS, COLS, 1, 128);
    ref_weight down = ref_make_weight(&f.rng, dtypes[c], COLS, ROWS, 1, 1040);
    float *x = ref_floats(&f.rng, TOKENS * COLS), *first = ref_floats(&f.rng, TOKENS * COLS);
    float *out = ref_floats(&f.rng, TOKENS * COLS), *y = ref_floats(&f.rng, TOKENS * ROWS);
    float *first_y = ref_floats(&f.rng, TOKENS * ROWS);
    td_moe_args args = {.gate = &gate.w,
                        .up = &gate.w,
                        .down = &down.w,
                        .x = x,
                        .out = first,
                        .n_tokens = TOKENS,
                        .n_prompt = TOKENS / 2,
                        .n_experts = 1,
                        .top_k = 1};
    td_linear_op_args linear = {.w = &gate.w,
                                .x = x,
                                .y = first_y,
                                .x_stride = COLS,
                                .y_stride = ROWS,
                                .n_tokens = TOKENS,
                                .n_prompt = TOKENS / 2};
    for (int run = 0; run < RUNS; run++) {
      td_op_linear(f.stream, &linear); // which is not the same operator with the same matrix
      td_op_moe(f.stream, &args);
      sync_ok(&f);
      if (run > 0) {
        assert_memory_equal(out, first, TOKENS * COLS * sizeof *out);
        assert_memory_equal(y, first_y, TOKENS * ROWS * sizeof *y);
      }
      args.out = out;
      linear.y = y;
    }
    ref_free_weight(&gate);
    ref_free_weight(&down);
    free(x);
    free(first);
    free(out);
    free(y);
    free(first_y);
  }
  td_kernels_use_activations(TD_ACTIVATIONS_F32);
  close_fixture(&f);
}

static void expect_failure(fixture *f, const char *part) {
  td_err err;
  assert_int_equal(td_stream_sync(f->stream, &err), TD_EINVAL);
  if (!strstr(err.msg, part)) fail_msg("'%s' does not speak of '%s'", err.msg, part);
}

static void test_bad_arguments_stick(void **state) {
  (void)state;
  fixture f;
  open_fixture(&f, 2);
  ref_weight table = ref_make_weight(&f.rng, TD_BF16, 10, 8, 0, 0);
  int32_t ids[] = {3, 10};
  float out[16] = {0}, more[16] = {0};
  td_op_embed(f.stream, &(td_embed_args){&table.w, ids, out, 2});
  td_op_fill_zero(f.stream, more, 4);
  expect_failure(&f, "token id 10");
  td_err err;
  td_stream_close(f.stream);
  assert_int_equal(td_stream_open(&f.stream, f.dev, &err), TD_OK);
  sync_ok(&f); // a new stream starts clean
  ids[1] = -1;
  td_op_embed(f.stream, &(td_embed_args){&table.w, ids, out, 2});
  more[0] = 7;
  td_op_fill_zero(f.stream, more, sizeof more); // skipped
  expect_failure(&f, "token id -1");
  expect_failure(&f, "token id -1");
  assert_true(more[0] == 7);
  td_stream_close(f.stream);
  assert_int_equal(td_stream_open(&f.stream, f.dev, &err), TD_OK);
  experts e;
  make_experts(&e, &f.rng, TD_BF16);
  float x[DIM] = {0}, weight = 1;
  int32_t expert = EXPERTS;
  td_moe_args moe = {.gate = e.g,
                     .up = e.u,
                     .down = e.d,
                     .x = x,
                     .ids = &expert,
                     .weights = &weight,
                     .out = x,
                     .n_tokens = 1,
                     .n_experts = EXPERTS,
                     .top_k = 1};
  for (int is_part = 0; is_part < 2; is_part++) { // nor is it one of the others
    td_op_moe(f.stream, &moe);
    expect_failure(&f, "id 9");
    td_stream_close(f.stream);
    assert_int_equal(td_stream_open(&f.stream, f.dev, &err), TD_OK);
    moe.n_experts = 2;
    moe.first_expert = 3;
    moe.n_routed = EXPERTS;
  }
  td_op_linear(f.stream,
               &(td_linear_op_args){.w = &e.g[0], .x = x, .y = x, .n_tokens = 1, .n_prompt = 2});
  expect_failure(&f, "2 of 1 tokens");
  free_experts(&e);
  ref_free_weight(&table);
  close_fixture(&f);
}

static void test_unknown_device(void **state) {
  (void)state;
  td_dev *dev;
  td_err err;
  assert_int_equal(td_dev_open(&dev, &(td_dev_opts){.kind = "abacus"}, &err), TD_EUNSUPPORTED);
  assert_null(dev);
  assert_non_null(strstr(err.msg, "abacus"));
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_embed_gather_add),
      cmocka_unit_test(test_sum_parts),
      cmocka_unit_test(test_await_is_canceled),
      cmocka_unit_test(test_post),
      cmocka_unit_test(test_copy_and_zero),
      cmocka_unit_test(test_rmsnorm),
      cmocka_unit_test(test_linear),
      cmocka_unit_test(test_rope),
      cmocka_unit_test(test_scale_rows),
      cmocka_unit_test(test_router),
      cmocka_unit_test(test_router_ties_go_to_the_lower_index),
      cmocka_unit_test(test_ranking),
      cmocka_unit_test(test_moe),
      cmocka_unit_test(test_moe_of_pairs),
      cmocka_unit_test(test_moe_of_bf16),
      cmocka_unit_test(test_moe_in_groups),
      cmocka_unit_test(test_trials_change_no_bit),
      cmocka_unit_test(test_bad_arguments_stick),
      cmocka_unit_test(test_unknown_device),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
