// Sampling: greedy, truncation, penalties, seeds, log-probabilities.
// CTest: no-tsan
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/sampler.h"
#include "unit/testing.h"

#define N_VOCAB 1000
#define N_DRAWS 4000

static float logits[N_VOCAB];

// Token i has logit -i/10: a known geometric distribution.
static void fill(float *out) {
  for (int i = 0; i < N_VOCAB; i++)
    out[i] = -0.1f * (float)i;
}

static td_sampler *open_sampler(td_sampling params, const td_token_value *bias, uint32_t n_bias) {
  td_sampler *s;
  td_err err;
  assert_int_equal(td_sampler_open(&s, &params, bias, n_bias, N_VOCAB, &err), TD_OK);
  return s;
}

static int32_t next(td_sampler *s) {
  fill(logits);
  return td_sampler_next(s, logits, 0).id;
}

// A sampler that is told what another drew goes on as that would have.
TEST(an_answer_changes_hands) {
  const td_sampling params = {.temperature = 1.5f,
                              .seed = 11,
                              .repetition_penalty = 1.3f,
                              .presence_penalty = 0.5f,
                              .frequency_penalty = 0.7f};
  static const int32_t prompt[] = {3, 1, 4};
  for (uint32_t at = 0; at < 20; at++) {
    td_sampler *whole = open_sampler(params, NULL, 0), *second = open_sampler(params, NULL, 0);
    int32_t drawn[20];
    td_sampler_prompt(whole, prompt, 3);
    for (uint32_t i = 0; i < at; i++)
      drawn[i] = next(whole);
    td_sampler_prompt(second, prompt, 3);
    td_sampler_answer(second, drawn, at);
    for (uint32_t i = at; i < 30; i++) {
      fill(logits);
      td_wire_token a = td_sampler_next(whole, logits, 0);
      fill(logits);
      td_wire_token b = td_sampler_next(second, logits, 0);
      assert_int_equal(a.id, b.id);
      assert_int_equal(a.index, b.index);
    }
    td_sampler_close(whole);
    td_sampler_close(second);
  }
}

// How often each of the first 40 tokens is drawn of N_DRAWS; all others must not be.
static void count_draws(td_sampling params, uint32_t counts[40]) {
  memset(counts, 0, 40 * sizeof *counts);
  params.temperature = params.temperature ? params.temperature : 1;
  td_sampler *s = open_sampler(params, NULL, 0);
  for (int i = 0; i < N_DRAWS; i++) {
    const int32_t id = next(s);
    assert_in_range(id, 0, 39);
    counts[id]++;
  }
  td_sampler_close(s);
}

// Logits 0 to -99.9 have a standard deviation of 28.9: 0.1 of it keeps 0 to -2.8.
TEST(top_n_sigma) {
  uint32_t counts[40];
  for (float t = 1; t < 100; t *= 9) { // whatever the temperature
    count_draws((td_sampling){.seed = 3, .top_n_sigma = 0.1f, .temperature = t}, counts);
    for (int i = 0; i < 40; i++)
      assert_true(i <= 28 ? counts[i] > 0 : counts[i] == 0);
  }
}

// The entropy of a geometric distribution whose ratio is e^-0.1 lies at token 9.5: those around it
// are typical, and the likeliest one is not.
TEST(typical_p) {
  uint32_t counts[40];
  count_draws((td_sampling){.seed = 3, .typical_p = 0.2f}, counts);
  const double ratio = exp(-0.1), mean = ratio / (1 - ratio);
  double have = 0;
  int first = 10, last = 9; // kept so far: none
  while (have < 0.2) {
    const int next_id = mean - (first - 1) < last + 1 - mean ? --first : ++last;
    have += (1 - ratio) * pow(ratio, next_id);
  }
  for (int i = 0; i < 40; i++)
    assert_true(i >= first && i <= last ? counts[i] > 0 : counts[i] == 0);
  assert_true(first > 0 && last < 20);
}

// Of 20 tokens 0 to 6 have 11 % to 6.04 %: at a threshold of 6 % XTC leaves out all but the
// seventh.
TEST(xtc) {
  uint32_t counts[40];
  const td_sampling all = {.seed = 3, .top_k = 20, .xtc_probability = 1, .xtc_threshold = 0.06f};
  count_draws(all, counts);
  for (int i = 0; i < 40; i++)
    assert_true(i >= 6 && i < 20 ? counts[i] > 0 : counts[i] == 0);
  td_sampling half = all;
  half.xtc_probability = 0.5f;
  count_draws(half, counts);
  uint32_t n_tops = 0;
  for (int i = 0; i < 6; i++)
    n_tops += counts[i]; // 52 % where they stay
  assert_in_range(n_tops, N_DRAWS * 52 / 200 - 150, N_DRAWS * 52 / 200 + 150);
  td_sampling lowest = all; // of those that may come at all
  lowest.xtc_threshold = 0;
  lowest.temperature = 1;
  td_sampler *s = open_sampler(lowest, NULL, 0);
  for (int i = 0; i < 10; i++) {
    fill(logits);
    for (int id = 5; id < N_VOCAB; id++)
      logits[id] = -INFINITY;
    assert_int_equal(td_sampler_next(s, logits, 0).id, 4);
  }
  td_sampler_close(s);
  for (int kind = 0; kind < 2; kind++) { // a threshold that one token reaches, or none
    td_sampling few = all;
    few.xtc_threshold = kind ? 0.5f : 0.105f;
    count_draws(few, counts);
    assert_true(counts[0] > 0 && counts[1] > 0);
  }
}

TEST(greedy_takes_the_best) {
  td_token_value bias[] = {{.id = 7, .value = 100}, {.id = 5000, .value = 9}};
  td_sampler *plain = open_sampler((td_sampling){0}, NULL, 0);
  td_sampler *biased = open_sampler((td_sampling){0}, bias, 2);
  assert_int_equal(next(plain), 0);
  assert_int_equal(next(biased), 7);
  td_sampler_close(plain);
  td_sampler_close(biased);
}

TEST(ends_come_no_sooner) {
  static const int32_t ends[] = {0, 2, -1, N_VOCAB};
  for (int temperature = 0; temperature < 2; temperature++) {
    td_sampler *s = open_sampler((td_sampling){.temperature = (float)temperature, .top_k = 1}, NULL,
                                 0);
    const td_top_logits top = {.n = 1, .sum = 1, .sum_warm = 1};
    td_wire_token token;
    td_sampler_ends(s, ends, 4, 3);
    assert_false(td_sampler_next_of_top(s, &top, 0, &token));
    for (int i = 0; i < 3; i++)
      assert_int_equal(next(s), 1);
    assert_true(td_sampler_next_of_top(s, &top, 0, &token));
    assert_int_equal(next(s), 0);
    td_sampler_close(s);
  }
}

// Wherever among the others they are: the best one, and the best three.
TEST(the_best_are_found) {
  for (int32_t at = 0; at + 2 < N_VOCAB; at++) {
    for (uint32_t k = 1; k <= 3; k += 2) {
      td_sampler *s = open_sampler(
          (td_sampling){.temperature = 1, .top_k = k, .seed = (uint64_t)at}, NULL, 0);
      fill(logits);
      for (int32_t i = at; i < at + (int32_t)k; i++)
        logits[i] = 5;
      const int32_t id = td_sampler_next(s, logits, 0).id;
      assert_in_range(id, at, at + (int32_t)k - 1);
      td_sampler_close(s);
    }
  }
}

// Counts of N_DRAWS draws against the probabilities they should have, each within 5 sigma.
static void expect_distribution(td_sampling params, int n_kept) {
  int counts[N_VOCAB] = {0};
  td_sampler *s = open_sampler(params, NULL, 0);
  for (int i = 0; i < N_DRAWS; i++)
    counts[next(s)]++;
  td_sampler_close(s);
  double sum = 0;
  for (int i = 0; i < n_kept; i++)
    sum += exp(-0.1 * i / params.temperature);
  for (int i = 0; i < N_VOCAB; i++) {
    double p = i < n_kept ? exp(-0.1 * i / params.temperature) / sum : 0;
    double bound = 5 * sqrt(N_DRAWS * p * (1 - p));
    if (fabs(counts[i] - N_DRAWS * p) > bound) {
      fail_msg("token %d: %d draws, %.1f expected", i, counts[i], N_DRAWS * p);
    }
  }
}

TEST(draws_follow_the_distribution) {
  expect_distribution((td_sampling){.temperature = 1, .seed = 1}, N_VOCAB);
  expect_distribution((td_sampling){.temperature = 2.5f, .seed = 2}, N_VOCAB);
  expect_distribution((td_sampling){.temperature = 1, .seed = 3, .top_k = 5}, 5);
  // Weight of the first n tokens is 1 - e^(-n/10): 0.5 is passed at n = 7, 0.9995 at n = 77.
  expect_distribution((td_sampling){.temperature = 1, .seed = 4, .top_p = 0.5f}, 7);
  expect_distribution((td_sampling){.temperature = 1, .seed = 5, .top_p = 0.9995f}, 77);
  // e^(-n/10) >= 0.25 for n <= 13.
  expect_distribution((td_sampling){.temperature = 1, .seed = 6, .min_p = 0.25f}, 14);
  expect_distribution((td_sampling){.temperature = 1, .seed = 7, .top_k = 20, .top_p = 0.5f}, 6);
}

// Many tokens above the cut are not sorted, those of a top_k are: both draw the same, whatever the
// weights, ties among them.
TEST(many_above_the_cut) {
  static const td_sampling cuts[] = {{.top_p = 0.5f},    {.top_p = 0.95f},
                                     {.top_p = 0.9999f}, {.min_p = 0.3f},
                                     {.min_p = 1e-3f},   {.top_p = 0.9f, .min_p = 0.1f}};
  static const float spreads[] = {0.01f, 1, 5};
  static float given[N_VOCAB];
  for (size_t i = 0; i < sizeof cuts / sizeof cuts[0] * 3; i++) {
    td_sampling params = cuts[i / 3];
    params.temperature = 1.3f;
    params.seed = i;
    uint32_t state_of_rng = (uint32_t)i;
    for (int t = 0; t < N_VOCAB; t++) {
      state_of_rng = state_of_rng * 1664525u + 1013904223u;
      given[t] = spreads[i % 3] * (float)(state_of_rng >> 24) / 64; // 256 values: most are shared
    }
    given[N_VOCAB - 1] = -INFINITY;
    td_sampler *all = open_sampler(params, NULL, 0);
    params.top_k = N_VOCAB - 1;
    td_sampler *sorted = open_sampler(params, NULL, 0);
    for (int n = 0; n < 500; n++) {
      memcpy(logits, given, sizeof given);
      int32_t id = td_sampler_next(all, logits, 0).id;
      memcpy(logits, given, sizeof given);
      assert_int_equal(id, td_sampler_next(sorted, logits, 0).id);
    }
    td_sampler_close(all);
    td_sampler_close(sorted);
  }
}

// Of equal ones the first stand.
TEST(ties) {
  td_sampler *s = open_sampler((td_sampling){.temperature = 1, .seed = 1, .top_k = 5}, NULL, 0);
  for (int n = 0; n < 100; n++) {
    memset(logits, 0, sizeof logits);
    assert_in_range(td_sampler_next(s, logits, 0).id, 0, 4);
  }
  td_sampler_close(s);
}

// A row with NaN or infinity, drawn from or scored, is an error from then on.
TEST(logits_that_are_not_numbers) {
  const float odd[] = {NAN, INFINITY};
  for (uint32_t at = 0; at < N_VOCAB; at += N_VOCAB - 1) {
    for (size_t i = 0; i < TD_COUNT(odd); i++) {
      td_sampler *drawn = open_sampler((td_sampling){0}, NULL, 0);
      td_sampler *scored = open_sampler((td_sampling){0}, NULL, 0);
      td_err err;
      td_wire_token token;
      fill(logits);
      logits[5] = -INFINITY; // as a model that forbids a token would have it
      td_sampler_score(scored, logits, 3, &token);
      (void)td_sampler_next(drawn, logits, 1);
      assert_int_equal(td_sampler_status(drawn, &err), TD_OK);
      assert_int_equal(td_sampler_status(scored, &err), TD_OK);
      logits[at] = odd[i];
      td_sampler_score(scored, logits, 3, &token);
      (void)td_sampler_next(drawn, logits, 0);
      assert_int_equal(td_sampler_status(drawn, &err), TD_EFORMAT);
      assert_int_equal(td_sampler_status(scored, &err), TD_EFORMAT);
      (void)next(drawn);
      assert_int_equal(td_sampler_status(drawn, &err), TD_EFORMAT);
      td_sampler_close(drawn);
      td_sampler_close(scored);
    }
  }
}

// What is no number, or infinite, does not keep the best of the others from being drawn.
TEST(odd_logits) {
  td_sampler *greedy = open_sampler((td_sampling){0}, NULL, 0);
  td_sampler *warm = open_sampler((td_sampling){.temperature = 1, .seed = 1}, NULL, 0);
  for (int i = 0; i < N_VOCAB; i++)
    logits[i] = -INFINITY;
  logits[3] = 2;
  logits[N_VOCAB - 1] = NAN;
  assert_int_equal(td_sampler_next(greedy, logits, 0).id, 3);
  assert_int_equal(td_sampler_next(warm, logits, 0).id, 3);
  logits[5] = INFINITY;
  assert_int_equal(td_sampler_next(greedy, logits, 0).id, 5);
  assert_int_equal(td_sampler_next(warm, logits, 0).id, 5);
  td_sampler_close(greedy);
  td_sampler_close(warm);
}

TEST(seed_decides) {
  td_sampling params = {.temperature = 1, .seed = 42};
  td_sampler *a = open_sampler(params, NULL, 0), *b = open_sampler(params, NULL, 0);
  params.seed = 43;
  td_sampler *c = open_sampler(params, NULL, 0);
  int n_same = 0;
  for (int i = 0; i < 100; i++) {
    int32_t id = next(a);
    assert_int_equal(id, next(b));
    n_same += id == next(c);
  }
  assert_true(n_same < 50);
  td_sampler_close(a);
  td_sampler_close(b);
  td_sampler_close(c);
}

TEST(penalties) {
  int32_t prompt[] = {0, 1, -5, 100000};
  // Logits are at most 0, so a repetition penalty multiplies: token 0 stays at 0, token 1 sinks.
  td_sampler *s = open_sampler((td_sampling){.repetition_penalty = 2}, NULL, 0);
  td_sampler_prompt(s, prompt, 4);
  fill(logits);
  td_sampler_next(s, logits, 0);
  assert_true(logits[0] == 0 && logits[1] == -0.2f && logits[2] == -0.2f);
  td_sampler_close(s);
  // Presence counts once, frequency each time, and neither counts the prompt.
  s = open_sampler((td_sampling){.presence_penalty = 0.15f, .frequency_penalty = 0.5f}, NULL, 0);
  td_sampler_prompt(s, prompt, 4);
  assert_int_equal(next(s), 0);
  assert_int_equal(next(s), 1);
  td_sampler_close(s);
}

TEST(logprobs_are_the_models_own) {
  td_token_value bias = {.id = 3, .value = 50};
  td_sampler *s = open_sampler((td_sampling){.n_top_logprobs = 3, .temperature = 0.5f}, &bias, 1);
  fill(logits);
  td_wire_token token = td_sampler_next(s, logits, 1);
  double norm = 0;
  for (int i = 0; i < N_VOCAB; i++)
    norm += exp(-0.1 * i);
  norm = log(norm);
  assert_int_equal(token.id, 3);
  assert_int_equal(token.n_top, 3);
  assert_true(fabs(token.logprob - (-0.3 - norm)) < 1e-5);
  for (int i = 0; i < 3; i++) {
    assert_int_equal(token.top[i].id, i);
    assert_true(fabs(token.top[i].value - (-0.1 * i - norm)) < 1e-5);
  }
  td_sampler_close(s);
}

// Ranks in the simplest way; logits are different from one another.
static td_top_logits rank(const float *row, float temperature) {
  td_top_logits top = {.n = TD_TOP_LOGITS};
  double sum = 0, warm = 0;
  for (int i = 0; i < N_VOCAB; i++) {
    int place = 0;
    for (int j = 0; j < N_VOCAB; j++)
      place += row[j] > row[i];
    if (place >= TD_TOP_LOGITS) continue;
    top.id[place] = i;
    top.value[place] = row[i];
  }
  for (int i = 0; i < N_VOCAB; i++) {
    sum += exp(row[i] - top.value[0]);
    warm += exp((row[i] - top.value[0]) / (temperature > 0 ? temperature : 1));
  }
  top.sum = (float)sum;
  top.sum_warm = (float)warm;
  return top;
}

// Whatever the best alone decide is what the whole row decides.
TEST(the_best_are_enough) {
  static const struct {
    td_sampling params;
    int is_enough;
  } cases[] = {
      {{.n_top_logprobs = 20}, 1},
      {{.temperature = 0.7f, .top_k = 20, .top_p = 0.95f, .n_top_logprobs = 2}, 1},
      {{.temperature = 1.5f, .top_k = 64}, 1},
      {{.temperature = 0.6f, .top_p = 0.9f}, 1},
      {{.temperature = 1, .min_p = 0.3f}, 1},
      {{.temperature = 1, .top_k = 40, .min_p = 0.1f, .top_p = 0.5f}, 1},
      {{.temperature = 1, .top_k = 65}, 0},
      {{.temperature = 1}, 0},
      {{.temperature = 90, .top_p = 0.95f}, 0}, // the tail is long
      {{.presence_penalty = 1}, 0},
  };
  for (size_t i = 0; i < TD_COUNT(cases); i++) {
    td_sampling params = cases[i].params;
    params.seed = 3 + i;
    td_sampler *whole = open_sampler(params, NULL, 0), *best = open_sampler(params, NULL, 0);
    uint32_t state_word = 1;
    for (int n = 0; n < 20; n++) {
      float row[N_VOCAB];
      for (int j = 0; j < N_VOCAB; j++) {
        state_word = state_word * 1664525u + 1013904223u;
        row[j] = (float)(state_word >> 8) * 0x1p-17f + (float)j * 1e-4f;
      }
      td_top_logits top = rank(row, params.temperature);
      td_wire_token got = {0}, want;
      assert_int_equal(td_sampler_next_of_top(best, &top, 1, &got), cases[i].is_enough);
      want = td_sampler_next(whole, row, 1);
      if (!cases[i].is_enough) continue;
      assert_int_equal(got.id, want.id);
      assert_int_equal(got.index, want.index);
      assert_int_equal(got.n_top, want.n_top);
      assert_true(fabs(got.logprob - want.logprob) < 1e-5);
      for (uint32_t j = 0; j < got.n_top; j++) {
        assert_int_equal(got.top[j].id, want.top[j].id);
        assert_true(fabs(got.top[j].value - want.top[j].value) < 1e-5);
      }
    }
    td_sampler_close(whole);
    td_sampler_close(best);
  }
}

TEST(what_the_best_do_not_decide) {
  const td_token_value bias = {.id = 3, .value = 1};
  fill(logits);
  td_top_logits top = rank(logits, 0), bad = top;
  td_wire_token token;
  td_sampler *biased = open_sampler((td_sampling){0}, &bias, 1);
  td_sampler *plain = open_sampler((td_sampling){0}, NULL, 0);
  assert_false(td_sampler_next_of_top(biased, &top, 0, &token));
  bad.sum = NAN;
  assert_false(td_sampler_next_of_top(plain, &bad, 0, &token));
  bad = top;
  bad.value[0] = INFINITY;
  assert_false(td_sampler_next_of_top(plain, &bad, 0, &token));
  assert_true(td_sampler_next_of_top(plain, &top, 0, &token));
  assert_int_equal(token.index, 0); // nothing was drawn before
  td_sampler_close(biased);
  td_sampler_close(plain);
}

TEST(bad_parameters_are_refused) {
  const td_sampling bad[] = {
      {.temperature = -1},   {.temperature = NAN},       {.top_p = 1.5f},
      {.min_p = -0.5f},      {.repetition_penalty = -1}, {.presence_penalty = INFINITY},
      {.n_top_logprobs = 21}};
  for (size_t i = 0; i < TD_COUNT(bad); i++) {
    td_sampler *s;
    td_err err;
    assert_int_equal(td_sampler_open(&s, &bad[i], NULL, 0, N_VOCAB, &err), TD_EINVAL);
    assert_null(s);
  }
}
