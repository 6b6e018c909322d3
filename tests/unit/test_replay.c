// tests/unit/test_replay.c - uses of experts played back against memories of every size.
// CTest: no-tsan
#include "cli/replay.h"
#include "unit/testing.h"

enum { MAX_KEYS = 12, MAX_USES = 60 };

// The most hits of uses [i, n) with what is held, by trying all there is to give up.
static unsigned best(const uint32_t *uses, unsigned n, unsigned i, unsigned held,
                     unsigned n_slots) {
  unsigned hits = 0;
  for (; i < n && (held >> uses[i] & 1); i++)
    hits++;
  if (i == n) return hits;
  const unsigned with = held | 1u << uses[i];
  if ((unsigned)__builtin_popcount(held) < n_slots)
    return hits + best(uses, n, i + 1, with, n_slots);
  unsigned most = 0;
  for (unsigned k = 0; k < MAX_KEYS; k++) {
    if (!(held >> k & 1)) continue;
    const unsigned one = best(uses, n, i + 1, with & ~(1u << k), n_slots);
    if (one > most) most = one;
  }
  return hits + most;
}

static uint64_t lru_hits(const uint32_t *uses, unsigned n, unsigned n_slots) {
  uint64_t hits = 0;
  for (unsigned i = 0; i < n; i++) {
    unsigned others = 0; // that were used since
    for (unsigned k = i; k-- > 0;) {
      if (uses[k] == uses[i]) {
        hits += (unsigned)__builtin_popcount(others) < n_slots;
        break;
      }
      others |= 1u << uses[k];
    }
  }
  return hits;
}

TEST(replays) {
  uint64_t random = 1;
  for (unsigned round = 0; round < 300; round++) {
    uint32_t uses[MAX_USES];
    const unsigned n_keys = 2 + round % (MAX_KEYS - 1), n_slots = 1 + round % 3;
    const unsigned n = round % 10 ? 14 : MAX_USES;
    for (unsigned i = 0; i < n; i++) {
      random = random * 6364136223846793005u + 1442695040888963407u;
      const unsigned at = (unsigned)(random >> 33);
      uses[i] = at % 3 ? at / 3 % n_keys : at / 3 % 2; // two are used more than others
    }
    uint64_t hits[TD_N_REPLAYS];
    for (td_replay how = 0; how < TD_N_REPLAYS; how++) {
      assert_int_equal(td_replay_hits(&hits[how], how, uses, n, n_keys, n_slots, NULL), TD_OK);
      uint64_t all;
      assert_int_equal(td_replay_hits(&all, how, uses, n, n_keys, n_keys, NULL), TD_OK);
      assert_true(hits[how] <= all && all >= n - n_keys);
    }
    assert_int_equal(hits[TD_REPLAY_LRU], lru_hits(uses, n, n_slots));
    for (td_replay how = 0; how < TD_N_REPLAYS; how++)
      assert_true(hits[how] <= hits[TD_REPLAY_OPTIMUM]);
    if (n == 14) assert_int_equal(hits[TD_REPLAY_OPTIMUM], best(uses, n, 0, 0, n_slots));
  }
}

// The least often used goes first.
TEST(what_makes_room) {
  static const uint32_t uses[] = {0, 0, 1, 2, 3, 4, 0, 5, 5, 5, 6, 5};
  static const uint64_t want[] = {
      [TD_REPLAY_AGED] = 5, [TD_REPLAY_LRU] = 4, [TD_REPLAY_LFU] = 5, [TD_REPLAY_OPTIMUM] = 5};
  for (td_replay how = 0; how < TD_N_REPLAYS; how++) {
    uint64_t hits;
    assert_int_equal(td_replay_hits(&hits, how, uses, TD_COUNT(uses), 7, 3, NULL), TD_OK);
    assert_int_equal(hits, want[how]);
  }
}

// Half of the keys are used often and the others seldom, until it is the other way round. Uses
// that do not age hold the first ones; the order of the last uses never finds out which are which.
TEST(uses_age) {
  enum { N_KEYS = 16, N = 4096 };
  uint32_t uses[N];
  uint64_t hits[TD_N_REPLAYS], random = 1;
  for (unsigned i = 0; i < N; i++) {
    random = random * 6364136223846793005u + 1442695040888963407u;
    const unsigned at = (unsigned)(random >> 33);
    uses[i] = at / 4 % (N_KEYS / 2) + ((at % 4 != 0) == (i < N / 2) ? 0 : N_KEYS / 2);
  }
  for (td_replay how = 0; how < TD_N_REPLAYS; how++)
    assert_int_equal(td_replay_hits(&hits[how], how, uses, N, N_KEYS, N_KEYS / 2, NULL), TD_OK);
  assert_true(hits[TD_REPLAY_AGED] > hits[TD_REPLAY_LFU] + N / 20);
  assert_true(hits[TD_REPLAY_AGED] > hits[TD_REPLAY_LRU] + N / 20);
}
