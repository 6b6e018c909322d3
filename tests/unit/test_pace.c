// tests/unit/test_pace.c - the budget of prompts beside answers, on machines made of arithmetic.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/status.h"
#include "worker/prefill_budget.h"

#define MOST 512

// What steps take, in ns: answers and prompts alike wait for weights, which are read once a step.
typedef struct {
  double step, answer, token; // each step, answer, token of a prompt
  double weights;             // all of the experts: a token chooses one of `spread`
  double spread;
} machine;

static const machine many_cores = {5e6, 50e6, 1e6, 0, 1};
static const machine computes = {2e6, 10e6, 25e6, 0, 1};       // few cores, 16B: 40 tokens/s
static const machine streams = {2e6, 40e6, 1e6, 1700e6, 32};   // much memory to read, 671B
static const machine is_quick = {3e6, 0.2e6, 0.05e6, 20e6, 8}; // a GPU
static const machine reads_slowly = {1e6, 1e6, 500e6, 0, 1};   // less than a token fits

// Chunks and answers choose experts at random: what is not chosen is not read.
static uint64_t step_ns(const machine *m, uint32_t n_decode, uint32_t n_prefilled) {
  double share = 1;
  for (uint32_t i = 0; i < n_decode + n_prefilled; i++)
    share *= 1 - 1 / m->spread;
  if (m->spread <= 1) share = 1;
  return (uint64_t)(m->step + m->answer * n_decode + m->token * n_prefilled +
                    m->weights * (1 - share));
}

typedef struct {
  uint32_t n_steps, n_alone; // that only wrote answers
  uint32_t n_tokens;         // of prompts
  double longest;            // step over one that only writes answers
  double ns;
} run;

// n_left tokens of prompts beside n_decode answers; noise: each step takes up to so much longer.
static run read_beside(td_prefill_budget *budget, const machine *m, uint32_t n_decode,
                       uint32_t n_left, double noise) {
  run r = {0};
  uint64_t random = 88172645463325252u;
  while (n_left) {
    uint32_t n = td_prefill_budget_tokens(budget, n_decode, n_left);
    assert_in_range(n, 0, MOST);
    if (n > n_left) n = n_left;
    random ^= random << 13, random ^= random >> 7, random ^= random << 17;
    double ns = (double)step_ns(m, n_decode, n) * (1 + noise * (double)(random >> 40) / (1 << 24));
    double stretch = ns / (double)step_ns(m, n_decode, 0);
    td_prefill_budget_note(budget, n_decode, n, (uint64_t)ns);
    if (stretch > r.longest) r.longest = stretch;
    r.n_alone += n == 0;
    r.n_steps++;
    r.n_tokens += n;
    r.ns += ns;
    n_left -= n;
    assert_true(r.n_steps < 100000);
  }
  return r;
}

static double pace_of(const run *r) {
  return r->n_tokens / r->ns;
}

static void test_alone_all_goes(void **state) {
  (void)state;
  td_prefill_budget budget;
  td_prefill_budget_init(&budget, MOST);
  assert_int_equal(td_prefill_budget_tokens(&budget, 0, MOST), MOST);
  td_prefill_budget_note(&budget, 0, MOST, 1000000);
  assert_int_equal(td_prefill_budget_tokens(&budget, 0, MOST), MOST);
  assert_int_equal(td_prefill_budget_tokens(&budget, 3, MOST), 0); // first what three answers take
  td_prefill_budget_note(&budget, 3, 0, 1000000);
  assert_int_equal(td_prefill_budget_tokens(&budget, 3, MOST), TD_PREFILL_BUDGET_MIN_TOKENS);
  assert_int_equal(td_prefill_budget_tokens(&budget, 5, MOST), TD_PREFILL_BUDGET_MIN_TOKENS);
  assert_int_equal(td_prefill_budget_tokens(&budget, 6, MOST),
                   0); // twice as many are another matter
  assert_int_equal(td_prefill_budget_tokens(&budget, 1, MOST), 0);
  td_prefill_budget_init(&budget, 5);
  td_prefill_budget_note(&budget, 1, 0, 1000000);
  assert_int_equal(td_prefill_budget_tokens(&budget, 1, MOST), 5);
}

// Gaps are bounded from the first step on, and what is bearable is used.
static void test_gaps_are_bounded(void **state) {
  (void)state;
  static const machine *const machines[] = {&computes, &many_cores, &is_quick};
  static const uint32_t counts[] = {1, 4, 16};
  for (size_t i = 0; i < TD_COUNT(machines); i++) {
    for (size_t j = 0; j < TD_COUNT(counts); j++) {
      td_prefill_budget budget;
      td_prefill_budget_init(&budget, MOST);
      const machine *m = machines[i];
      double least = (double)step_ns(m, counts[j], TD_PREFILL_BUDGET_MIN_TOKENS) /
                     (double)step_ns(m, counts[j], 0);
      double bound = least > TD_PREFILL_BUDGET_STRETCH ? least : TD_PREFILL_BUDGET_STRETCH;
      run first = read_beside(&budget, m, counts[j], 2048, 0), r;
      assert_true(first.longest <= 1.35 * bound);
      r = read_beside(&budget, m, counts[j], 8192, 0);
      assert_true(r.longest <= 1.02 * bound);
      // At least a half of what reading takes is left to it.
      double mean = r.ns / r.n_steps / (double)step_ns(m, counts[j], 0);
      assert_true(budget.budget_tokens == MOST || mean > 0.85 * TD_PREFILL_BUDGET_STRETCH);
    }
  }
}

// A whole chunk would fit: it comes after a few steps.
static void test_what_is_cheap_is_read_at_once(void **state) {
  (void)state;
  static const machine cheap = {10e6, 1e6, 1e3, 0, 1};
  td_prefill_budget budget;
  td_prefill_budget_init(&budget, MOST);
  read_beside(&budget, &cheap, 4, 2048, 0);
  assert_int_equal(budget.budget_tokens, MOST);
  run r = read_beside(&budget, &cheap, 4, 64 * MOST, 0);
  assert_in_range(r.n_steps, 64, 66);
}

// Where the least that may be read takes longer than answers may wait, prompts still get on.
static void test_prompts_get_on(void **state) {
  (void)state;
  enum { N = 8192 };
  static const machine *const machines[] = {&reads_slowly, &streams};
  for (size_t i = 0; i < TD_COUNT(machines); i++) {
    td_prefill_budget budget;
    td_prefill_budget_init(&budget, MOST);
    run r = read_beside(&budget, machines[i], 1, N, 0);
    assert_int_equal(budget.budget_tokens, TD_PREFILL_BUDGET_MIN_TOKENS);
    assert_in_range(r.n_steps, N / TD_PREFILL_BUDGET_MIN_TOKENS + 2,
                    N / TD_PREFILL_BUDGET_MIN_TOKENS + 4);
    assert_in_range(r.n_alone, 2, 4);
  }
}

// Steps that take up to half again as long, and one that stood still for a minute.
static void test_noise(void **state) {
  (void)state;
  td_prefill_budget budget;
  td_prefill_budget_init(&budget, MOST);
  run calm = read_beside(&budget, &is_quick, 4, 1 << 16, 0);
  td_prefill_budget_init(&budget, MOST);
  run noisy = read_beside(&budget, &is_quick, 4, 1 << 16, 0.5);
  assert_true(noisy.longest < 1.5 * 1.5 * TD_PREFILL_BUDGET_STRETCH);
  assert_true(pace_of(&noisy) > 0.5 * pace_of(&calm));
  uint32_t budget_tokens = budget.budget_tokens;
  td_prefill_budget_note(&budget, 4, budget_tokens, 60000000000u);
  assert_int_equal(td_prefill_budget_tokens(&budget, 4, MOST), TD_PREFILL_BUDGET_MIN_TOKENS);
  read_beside(&budget, &is_quick, 4, 8 * budget_tokens, 0);
  assert_true(budget.budget_tokens > budget_tokens / 2);
}

// The first step of all waits for the disk: that measure does not last.
static void test_a_cold_start(void **state) {
  (void)state;
  td_prefill_budget budget;
  td_prefill_budget_init(&budget, MOST);
  td_prefill_budget_note(&budget, 1, 0, 20000000000u);
  for (int i = 0; i < 3; i++)
    td_prefill_budget_note(&budget, 1, 0, step_ns(&computes, 1, 0));
  run r = read_beside(&budget, &computes, 1, 2048, 0);
  double least = (double)step_ns(&computes, 1, TD_PREFILL_BUDGET_MIN_TOKENS) /
                 (double)step_ns(&computes, 1, 0);
  assert_true(r.longest <= least);
}

// Prompts of a few tokens say nothing about many, unless they took too long.
static void test_short_prompts(void **state) {
  (void)state;
  td_prefill_budget budget;
  td_prefill_budget_init(&budget, MOST);
  read_beside(&budget, &is_quick, 4, 8192, 0);
  uint32_t budget_tokens = budget.budget_tokens;
  assert_true(budget_tokens > 128);
  for (int i = 0; i < 50; i++)
    td_prefill_budget_note(&budget, 4, 1 + (uint32_t)i % 8,
                           step_ns(&is_quick, 4, 1 + (uint32_t)i % 8));
  assert_int_equal(budget.budget_tokens, budget_tokens);
  td_prefill_budget_note(&budget, 4, 100, 10 * step_ns(&is_quick, 4, 0));
  assert_int_equal(budget.budget_tokens, TD_PREFILL_BUDGET_MIN_TOKENS);
}

// Prompts that are long enough are read in one step, before which answers have had as long as that
// takes; shorter ones as ever.
static void test_flat_steps(void **state) {
  (void)state;
  enum { FLAT = 200, STEP_NS = 1000000, FLAT_NS = 10 * STEP_NS };
  td_prefill_budget budget;
  td_prefill_budget_init(&budget, MOST);
  budget.break_even_tokens = FLAT;
  assert_int_equal(td_prefill_budget_tokens(&budget, 3, FLAT - 1), 0);
  assert_int_equal(td_prefill_budget_tokens(&budget, 3, FLAT), MOST);
  td_prefill_budget_note(&budget, 3, MOST, FLAT_NS);
  for (int i = 0; i < 10; i++) {
    assert_int_equal(td_prefill_budget_tokens(&budget, 3, FLAT), 0);
    td_prefill_budget_note(&budget, 3, 0, STEP_NS);
  }
  assert_int_equal(td_prefill_budget_tokens(&budget, 3, FLAT - 1),
                   TD_PREFILL_BUDGET_MIN_TOKENS); // what was flat taught nothing
  assert_int_equal(td_prefill_budget_tokens(&budget, 3, FLAT), MOST);
  td_prefill_budget_note(&budget, 3, FLAT, FLAT_NS);
  assert_int_equal(td_prefill_budget_tokens(&budget, 0, FLAT), MOST); // nobody is there to rest
  td_prefill_budget_note(&budget, 0, MOST, FLAT_NS);
  assert_int_equal(td_prefill_budget_tokens(&budget, 1, FLAT), MOST);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_alone_all_goes),
      cmocka_unit_test(test_gaps_are_bounded),
      cmocka_unit_test(test_what_is_cheap_is_read_at_once),
      cmocka_unit_test(test_prompts_get_on),
      cmocka_unit_test(test_noise),
      cmocka_unit_test(test_a_cold_start),
      cmocka_unit_test(test_short_prompts),
      cmocka_unit_test(test_flat_steps),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
