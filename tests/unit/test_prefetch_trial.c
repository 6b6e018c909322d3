// tests/unit/test_prefetch_trial.c - when decode steps prefetch experts, on simulated times.
// CTest: no-tsan
#include "engine/experts/prefetch_trial.h"
#include "unit/testing.h"

// Runs a round of steps, every fourth pair of which has steps of unlike size, and returns how many
// prefetched. One step in ten that does not is held up by something else.
static uint32_t run(td_prefetch_trial *t, uint64_t with_ns) {
  uint32_t n = 0, n_decided = 0;
  for (uint32_t i = 0; i < TD_PREFETCH_ROUND; i++) {
    const bool prefetches = td_prefetch_trial_next(t);
    const uint32_t n_tokens = i % 8 == 0 ? 4 : 1;
    const uint64_t ns = (prefetches ? with_ns : i % 20 ? 1000 : 1000000) * n_tokens;
    n_decided += td_prefetch_trial_note(t, n_tokens, ns);
    n += prefetches;
    if (i >= 2 * TD_PREFETCH_PAIRS) assert_int_equal(prefetches, t->pays);
  }
  assert_int_equal(n_decided, 1);
  return n;
}

TEST(the_faster_way_is_taken) {
  td_prefetch_trial t = {0};
  assert_int_equal(run(&t, 700), TD_PREFETCH_ROUND - TD_PREFETCH_PAIRS);
  assert_int_equal(t.n_pairs, 3 * TD_PREFETCH_PAIRS / 4);
}

TEST(what_changes_is_seen) {
  td_prefetch_trial t = {0};
  run(&t, 700);
  assert_int_equal(run(&t, 2000), TD_PREFETCH_PAIRS);
  assert_int_equal(run(&t, 700), TD_PREFETCH_ROUND - TD_PREFETCH_PAIRS);
}
