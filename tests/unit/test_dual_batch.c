// tests/unit/test_dual_batch.c - when decode steps are split into microbatches, on simulated
// machines.

#include "engine/dual_batch.h"
#include "unit/testing.h"

enum { ONE_NS = 1000 };

// n steps of n_tokens tokens that take ONE_NS in one part and two_ns in two, and in their first run
// ten times as long; how many were in two.
static uint32_t run(td_dual_batch_tuner *h, uint32_t n, uint32_t n_tokens, uint64_t two_ns) {
  uint32_t n_two = 0, n_runs[2] = {0};
  for (uint32_t i = 0; i < n; i++) {
    uint32_t n_microbatches = td_dual_batch_choose(h, n_tokens);
    assert_in_range(n_microbatches, 1, 2);
    uint64_t ns = n_microbatches == 2 ? two_ns : ONE_NS;
    td_dual_batch_note(h, n_tokens, n_microbatches, n_runs[n_microbatches - 1]++ ? ns : 10 * ns);
    n_two += n_microbatches == 2;
  }
  return n_two;
}

TEST(the_quicker_way) {
  td_dual_batch_tuner h = {0};
  const uint32_t n = TD_HALVES_ROUND, n_trials = TD_HALVES_TRIALS;
  assert_int_equal(run(&h, n, 5, ONE_NS + 1), n_trials);
  assert_int_equal(run(&h, n, 5, ONE_NS - 1), n - n_trials); // found out in the next round
  assert_int_equal(run(&h, n, 5, ONE_NS), n_trials);
}

TEST(sizes_are_apart) {
  td_dual_batch_tuner h = {0};
  run(&h, TD_HALVES_ROUND / 2, 4, ONE_NS - 1);
  assert_int_equal(run(&h, 100, 7, ONE_NS - 1), 100); // about as many
  assert_int_equal(run(&h, 100, 8, ONE_NS + 1), TD_HALVES_TRIALS);
  assert_int_equal(run(&h, 100, 4, ONE_NS - 1), 100);
  assert_int_equal(run(&h, 100, 4096, ONE_NS - 1), 100 - TD_HALVES_TRIALS);
  assert_int_equal(run(&h, 100, 1, ONE_NS - 1), 0); // has no halves
}
