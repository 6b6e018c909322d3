// tests/unit/test_draft.c - guesses from the text, whether they were right, and how many pay.
// CTest: no-tsan
#include <string.h>

#include "engine/draft.h"
#include "unit/testing.h"

// ---- guesses ------------------------------------------------------------------------------------

static void expect_lookup(const int32_t *text, uint32_t n, uint32_t most, const int32_t *guesses,
                          uint32_t n_guesses) {
  int32_t tokens[64];
  memcpy(tokens, text, n * sizeof *text);
  for (uint32_t i = n; i < 64; i++)
    tokens[i] = -1;
  assert_int_equal(td_draft_lookup(tokens, n, most), n_guesses);
  assert_memory_equal(tokens, text, n * sizeof *text);
  for (uint32_t i = 0; i < n_guesses; i++)
    assert_int_equal(tokens[n + i], guesses[i]);
  for (uint32_t i = n + n_guesses; i < 64; i++)
    assert_int_equal(tokens[i], -1);
}

#define EXPECT_LOOKUP(text, most, ...)                                                             \
  do {                                                                                             \
    const int32_t guesses_[] = {__VA_ARGS__};                                                      \
    expect_lookup(text, sizeof(text) / sizeof *(text), most, guesses_,                             \
                  sizeof guesses_ / sizeof *guesses_);                                             \
  } while (0)

TEST(lookup) {
  static const int32_t once[] = {1, 2, 3, 4, 5, 6, 7, 8};
  static const int32_t pair[] = {1, 2, 9, 9, 1, 2};
  static const int32_t again[] = {1, 2, 3, 4, 5, 6, 1, 2, 3};
  static const int32_t recent[] = {1, 2, 3, 7, 1, 2, 3, 8, 1, 2, 3};
  static const int32_t longer[] = {5, 1, 2, 3, 7, 6, 1, 2, 3, 8, 5, 1, 2, 3};
  static const int32_t first[] = {1, 2, 3, 1, 2, 3};
  static const int32_t same[] = {4, 4, 4, 4};
  static const int32_t few[] = {4, 4, 4};
  expect_lookup(once, 8, 4, NULL, 0);
  expect_lookup(pair, 6, 4, NULL, 0); // two tokens say too little
  expect_lookup(few, 3, 4, NULL, 0);
  expect_lookup(few, 1, 4, NULL, 0);
  expect_lookup(again, 9, 0, NULL, 0);
  EXPECT_LOOKUP(again, 2, 4, 5);
  EXPECT_LOOKUP(recent, 1, 8);
  EXPECT_LOOKUP(longer, 1, 7);                  // more tokens match there
  EXPECT_LOOKUP(first, 7, 1, 2, 3, 1, 2, 3, 1); // goes on in the guesses
  EXPECT_LOOKUP(same, 3, 4, 4, 4);
}

// ---- a step's guesses ---------------------------------------------------------------------------

TEST(taken_and_dropped) {
  static const int32_t guesses[] = {5, 6, 7, 8};
  td_draft_pace p;
  td_draft_pace_init(&p);
  td_draft d = {.n_proposed = 4, .n_drafted = 2};
  assert_true(td_draft_take(&d, &p, &guesses[0], 5));
  assert_true(td_draft_take(&d, &p, &guesses[1], 6));
  assert_false(td_draft_take(&d, &p, &guesses[2], 7)); // right, but not computed
  assert_int_equal(td_draft_drop(&d), 0);
  assert_true(d.odds[TD_DRAFT_TEXT].hits > 2 &&
              d.odds[TD_DRAFT_TEXT].hits == d.odds[TD_DRAFT_TEXT].trials);
  d.n_proposed = d.n_drafted = 3;
  assert_true(td_draft_take(&d, &p, &guesses[0], 5));
  assert_false(td_draft_take(&d, &p, &guesses[1], 9));
  assert_int_equal(td_draft_drop(&d), 2);
  assert_true(d.odds[TD_DRAFT_TEXT].hits < d.odds[TD_DRAFT_TEXT].trials);
  const float trials = d.odds[TD_DRAFT_TEXT].trials;
  assert_false(td_draft_take(&d, &p, NULL, 9)); // none was proposed
  assert_int_equal(td_draft_drop(&d), 0);
  assert_true(d.odds[TD_DRAFT_TEXT].trials == trials);
  d.n_proposed = 2; // none of them computed: a miss or hit shows in the odds alone
  assert_false(td_draft_take(&d, &p, &guesses[0], 5));
  assert_int_equal(td_draft_drop(&d), 0);
  assert_true(d.odds[TD_DRAFT_TEXT].trials > trials - 1);
}

// Notes n guesses of which every miss-th is wrong; 0: none is.
static void guess(td_draft *d, td_draft_pace *p, td_draft_source source, int n, int miss) {
  static const int32_t right = 1;
  for (int i = 0; i < n; i++) {
    d->source = source;
    d->n_proposed = d->n_drafted = 1;
    td_draft_take(d, p, &right, miss && i % miss == 0 ? 2 : right);
    td_draft_drop(d);
  }
}

TEST(odds) {
  td_draft_pace p;
  td_draft_pace_init(&p);
  td_draft d = {0};
  const float before = td_draft_odds_of(&d, TD_DRAFT_TEXT, &p);
  assert_true(before > 0.5f && before < 0.9f); // else nothing would be tried
  guess(&d, &p, TD_DRAFT_TEXT, 100, 4);
  assert_true(td_draft_odds_of(&d, TD_DRAFT_TEXT, &p) > 0.6f);
  assert_true(td_draft_odds_of(&d, TD_DRAFT_TEXT, &p) < 0.9f);
  guess(&d, &p, TD_DRAFT_TEXT, 300, 1);
  assert_true(td_draft_odds_of(&d, TD_DRAFT_TEXT, &p) < 0.15f);
  assert_true(td_draft_odds_of(&d, TD_DRAFT_LAYER, &p) == before); // each source has its own
  td_draft next = {0}; // a request begins with what those before it have learned
  assert_true(td_draft_odds_of(&next, TD_DRAFT_TEXT, &p) < 0.15f);
  guess(&next, &p, TD_DRAFT_TEXT, 30, 0); // and is soon judged by its own
  assert_true(td_draft_odds_of(&next, TD_DRAFT_TEXT, &p) > 0.8f);
}

// ---- what they cost -----------------------------------------------------------------------------

// Steps of n_tokens that take fixed + n_tokens * each ns.
static void run(td_draft_pace *pace, int n_steps, uint32_t n_tokens, uint64_t fixed,
                uint64_t each) {
  for (int i = 0; i < n_steps; i++)
    td_draft_pace_note(pace, n_tokens, fixed + n_tokens * each);
}

TEST(pace) {
  td_draft_pace pace;
  td_draft_pace_init(&pace);
  const double unknown = td_draft_pace_cost(&pace, 1);
  run(&pace, 50, 1, 900000, 100000);
  assert_true(td_draft_pace_cost(&pace, 1) < 0.4); // still: one kind of step shows nothing
  for (int i = 0; i < 50; i++)
    run(&pace, 1, 1 + i % 3, 900000, 100000);
  const double one = td_draft_pace_cost(&pace, 1), four = td_draft_pace_cost(&pace, 4);
  assert_true(one > 0.09 && one < 0.11);
  assert_true(four > 0.07 && four < 0.08); // 0.1 of 1.3 ms
  for (int i = 0; i < 300; i++)
    run(&pace, 1, 1 + i % 2, 100000, 900000);
  assert_true(td_draft_pace_cost(&pace, 1) > 0.8);
  run(&pace, 1000, 1, 100000, 900000); // forgotten, to be tried again
  assert_true(td_draft_pace_cost(&pace, 1) < 1.1 * unknown);
  for (int i = 0; i < 300; i++)
    td_draft_pace_note(&pace, 1 + i % 2, 1000000 - 1000 * (uint64_t)(i % 2));
  assert_true(td_draft_pace_cost(&pace, 1) < 0.01);
}

// ---- how many pay -------------------------------------------------------------------------------

static void choose(const td_draft_pace *pace, uint32_t mode, td_draft *a, td_draft *b,
                   uint32_t max_tokens) {
  td_draft *const drafts[] = {a, b};
  a->n_drafted = b->n_drafted = 77; // of an earlier step
  td_draft_choose(drafts, 2, mode, pace, 2, max_tokens);
}

TEST(choice) {
  td_draft_pace cheap = {0}, dear = {0};
  for (int i = 0; i < 100; i++) {
    run(&cheap, 1, 1 + i % 4, 950000, 50000);
    run(&dear, 1, 1 + i % 4, 50000, 950000);
  }
  td_draft right = {.n_proposed = 8}, wrong = {.n_proposed = 8};
  td_draft_pace unused = {0};
  guess(&right, &unused, TD_DRAFT_TEXT, 50, 0);
  guess(&wrong, &unused, TD_DRAFT_TEXT, 50, 1);
  right.n_proposed = wrong.n_proposed = 8;
  right.source = wrong.source = TD_DRAFT_TEXT;
  choose(&cheap, TD_DRAFT_AUTO, &right, &wrong, 100);
  assert_true(right.n_drafted == 8 && wrong.n_drafted <= 1);
  choose(&dear, TD_DRAFT_AUTO, &right, &wrong, 100);
  assert_true(right.n_drafted <= 2 && wrong.n_drafted == 0);
  choose(&dear, TD_DRAFT_OFF + 3, &right, &wrong, 100); // as many as was asked for
  assert_true(right.n_drafted == 3 && wrong.n_drafted == 3);
  choose(&cheap, TD_DRAFT_OFF + 3, &right, &wrong, 6); // within the step, the likelier ones first
  assert_true(right.n_drafted == 3 && wrong.n_drafted == 1);
  choose(&cheap, TD_DRAFT_AUTO, &right, &wrong, 2);
  assert_true(right.n_drafted == 0 && wrong.n_drafted == 0);
  right.n_proposed = 2;
  choose(&cheap, TD_DRAFT_AUTO, &right, &wrong, 100);
  assert_int_equal(right.n_drafted, 2);
  td_draft_choose(NULL, 0, TD_DRAFT_AUTO, &cheap, 0, 100);
}

// ---- the layer, by a clock that is made up -----------------------------------------------------

// A machine: a step of one token, each token more and a pass of the layer, in ns, and how many of a
// hundred guesses are right. Where experts come from a drive, every token of a step and of a pass
// waits for those that are missed, one time in four and miss_ns on average.
typedef struct {
  uint64_t step_ns, token_ns, pass_ns, first_pass_ns;
  uint32_t percent;
  uint64_t miss_ns;
} machine;

static uint32_t next_of(uint32_t *random) {
  *random = *random * 1664525u + 1013904223u;
  return *random >> 8;
}

static uint64_t missed_ns(const machine *m, uint32_t n_tokens, uint32_t *random) {
  uint64_t ns = 0;
  for (uint32_t i = 0; m->miss_ns && i < n_tokens; i++)
    ns += next_of(random) % 4 ? 0 : 4 * m->miss_ns;
  return ns;
}

typedef struct {
  double ns, off_ns; // with drafts, and without
  uint32_t n_passes, deepest;
} outcome;

// Answers of n_tokens each, whose prompts take ten steps' time and a pass' time if the layer reads
// them, too.
static outcome answer(const machine *m, td_draft_pace *p, int n_requests, uint32_t n_tokens) {
  static const int32_t guesses[TD_DRAFT_MAX] = {0};
  outcome out = {0};
  uint32_t random = 1, missed = 7;
  for (int i = 0; i < n_requests; i++) {
    const bool has_layer = td_draft_layer_pays(p, 1);
    td_draft d = {.source = TD_DRAFT_LAYER};
    td_draft *const drafts[] = {&d};
    out.off_ns += (double)(10 * m->step_ns + n_tokens * (m->step_ns + m->miss_ns));
    out.ns += (double)(10 * m->step_ns + (has_layer ? m->pass_ns : 0));
    for (uint32_t done = 0; done < n_tokens;) {
      const uint32_t depth = has_layer ? td_draft_depth(&d, TD_DRAFT_AUTO, p, 1, false) : 0;
      if (depth) {
        const uint64_t ns = depth * (out.n_passes ? m->pass_ns : m->first_pass_ns) +
                            missed_ns(m, depth, &missed);
        td_draft_pace_note_passes(p, depth, ns);
        out.ns += (double)ns;
        out.n_passes += depth;
      }
      if (depth > out.deepest) out.deepest = depth;
      d.n_proposed = depth;
      td_draft_choose(drafts, 1, TD_DRAFT_AUTO, p, 1, 40);
      const uint64_t step_ns = m->step_ns + d.n_drafted * m->token_ns +
                               missed_ns(m, 1 + d.n_drafted, &missed);
      td_draft_pace_note(p, 1 + d.n_drafted, step_ns);
      out.ns += (double)step_ns;
      bool is_right = true;
      while (is_right) {
        done++;
        is_right = next_of(&random) % 100 < m->percent;
        is_right = td_draft_take(&d, p, guesses, is_right ? 0 : 1);
      }
      td_draft_drop(&d);
    }
  }
  return out;
}

TEST(layer_that_does_not_pay) {
  static const machine machines[] = {
      {.step_ns = 484, .token_ns = 175, .pass_ns = 262, .first_pass_ns = 3000, .percent = 85},
      {.step_ns = 1000, .token_ns = 900, .pass_ns = 300, .first_pass_ns = 300, .percent = 90},
      {.step_ns = 1000, .token_ns = 50, .pass_ns = 100, .first_pass_ns = 9000, .percent = 5}};
  for (size_t i = 0; i < sizeof machines / sizeof *machines; i++) {
    td_draft_pace p;
    td_draft_pace_init(&p);
    const outcome first = answer(&machines[i], &p, 20, 12),
                  then = answer(&machines[i], &p, 500, 12);
    assert_true(first.n_passes >= 16 && first.n_passes <= 20 && first.deepest == 1);
    assert_true(first.ns < 1.03 * first.off_ns);
    assert_true(then.ns < 1.01 * then.off_ns);
    assert_true(then.n_passes > 0); // tried again from time to time
  }
}

// What guesses miss is part of the times that they are judged by: the same guesses pay where nearly
// all experts are in memory, and where they are not, only trials are made.
TEST(missed_bytes_are_a_cost) {
  machine m = {.step_ns = 1000, .token_ns = 100, .pass_ns = 50, .first_pass_ns = 50, .percent = 80};
  static const uint64_t misses_ns[] = {0, 100, 3000, 6000, 9000};
  for (size_t i = 0; i < sizeof misses_ns / sizeof *misses_ns; i++) {
    td_draft_pace p;
    td_draft_pace_init(&p);
    m.miss_ns = misses_ns[i];
    answer(&m, &p, 20, 50);
    const outcome then = answer(&m, &p, 500, 50);
    assert_true(then.ns < (m.miss_ns < m.step_ns ? 0.85 : 1.03) * then.off_ns);
  }
}

TEST(layer_that_pays) {
  static const machine machines[] = {
      {.step_ns = 1000, .token_ns = 100, .pass_ns = 50, .first_pass_ns = 5000, .percent = 80},
      {.step_ns = 1000, .token_ns = 300, .pass_ns = 100, .first_pass_ns = 100, .percent = 90}};
  for (size_t i = 0; i < sizeof machines / sizeof *machines; i++) {
    td_draft_pace p;
    td_draft_pace_init(&p);
    answer(&machines[i], &p, 20, 50);
    const outcome then = answer(&machines[i], &p, 100, 50);
    assert_true(then.ns < 0.85 * then.off_ns);
  }
  td_draft_pace p; // what did not pay does once it is cheap
  td_draft_pace_init(&p);
  answer(&(machine){1000, 900, 300, 300, 90, 0}, &p, 20, 50);
  answer(&machines[0], &p, 100, 50);
  assert_true(answer(&machines[0], &p, 50, 50).ns < 0.85 * 50 * 60 * 1000);
}

TEST(first_guesses) {
  td_draft_pace p;
  td_draft_pace_init(&p);
  const td_draft d = {0};
  assert_int_equal(td_draft_depth(&d, TD_DRAFT_AUTO, &p, 1, false),
                   1); // several once they are right
  assert_int_equal(td_draft_depth(&d, TD_DRAFT_AUTO, &p, 1, true), 0); // those of the text are free
  assert_int_equal(td_draft_depth(&d, TD_DRAFT_OFF + 3, &p, 1, false), 3);
}
