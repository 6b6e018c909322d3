// tests/unit/test_prefill_budget.c - the prefill budget beside decode, and of streamed experts
// beside decode, on simulated machines.
// CTest: no-tsan
#include <math.h>

#include "base/status.h"
#include "unit/testing.h"
#include "worker/prefill_budget.h"
#include "worker/stream_pace.h"

#define MOST 512

// What steps take, in ns: decode and prefill alike wait for weights, which are read once a step.
typedef struct {
  double step, answer, token; // each step, decoding sequence, token of a prompt
  double weights;             // all of the experts: a token chooses one of `spread`
  double spread;
} machine;

static const machine many_cores = {5e6, 50e6, 1e6, 0, 1};
static const machine computes = {2e6, 10e6, 25e6, 0, 1};       // few cores, 16B: 40 tokens/s
static const machine streams = {2e6, 40e6, 1e6, 1700e6, 32};   // much memory to read, 671B
static const machine is_quick = {3e6, 0.2e6, 0.05e6, 20e6, 8}; // a GPU
static const machine reads_slowly = {1e6, 1e6, 500e6, 0, 1};   // less than a token fits

// Prefill and decode choose experts at random: what is not chosen is not read.
static uint64_t step_ns(const machine *m, uint32_t n_decode, uint32_t n_prefilled) {
  double share = 1;
  for (uint32_t i = 0; i < n_decode + n_prefilled; i++)
    share *= 1 - 1 / m->spread;
  if (m->spread <= 1) share = 1;
  return (uint64_t)(m->step + m->answer * n_decode + m->token * n_prefilled +
                    m->weights * (1 - share));
}

typedef struct {
  uint32_t n_steps, n_alone; // that only decoded
  uint32_t n_tokens;         // of prompts
  double longest;            // step over one that only decodes
  double ns;
} run;

// n_left tokens of prompts beside n_decode sequences that decode; noise: each step takes up to so
// much longer.
static run read_beside(td_prefill_budget *budget, const machine *m, uint32_t n_decode,
                       uint32_t n_left, double noise) {
  run r = {0};
  uint64_t random = 88172645463325252u;
  while (n_left) {
    uint32_t n = td_prefill_budget_tokens(budget, n_decode);
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

TEST(alone_all_goes) {
  td_prefill_budget budget;
  td_prefill_budget_init(&budget, MOST);
  assert_int_equal(td_prefill_budget_tokens(&budget, 0), MOST);
  td_prefill_budget_note(&budget, 0, MOST, 1000000);
  assert_int_equal(td_prefill_budget_tokens(&budget, 0), MOST);
  assert_int_equal(td_prefill_budget_tokens(&budget, 3), 0); // first decode's share
  td_prefill_budget_note(&budget, 3, 0, 1000000);
  assert_int_equal(td_prefill_budget_tokens(&budget, 3), TD_PREFILL_BUDGET_MIN_TOKENS);
  assert_int_equal(td_prefill_budget_tokens(&budget, 5), TD_PREFILL_BUDGET_MIN_TOKENS);
  assert_int_equal(td_prefill_budget_tokens(&budget, 6),
                   0); // twice as many are another matter
  assert_int_equal(td_prefill_budget_tokens(&budget, 1), 0);
  td_prefill_budget_init(&budget, 5);
  td_prefill_budget_note(&budget, 1, 0, 1000000);
  assert_int_equal(td_prefill_budget_tokens(&budget, 1), 5);
}

// Gaps are bounded from the first step on, and what is bearable is used.
TEST(gaps_are_bounded) {
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
TEST(what_is_cheap_is_read_at_once) {
  static const machine cheap = {10e6, 1e6, 1e3, 0, 1};
  td_prefill_budget budget;
  td_prefill_budget_init(&budget, MOST);
  read_beside(&budget, &cheap, 4, 2048, 0);
  assert_int_equal(budget.budget_tokens, MOST);
  run r = read_beside(&budget, &cheap, 4, 64 * MOST, 0);
  assert_in_range(r.n_steps, 64, 66);
}

// Where the least that may be read takes longer than decode may wait, prompts still get on.
TEST(prompts_get_on) {
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
TEST(noise) {
  td_prefill_budget budget;
  td_prefill_budget_init(&budget, MOST);
  run calm = read_beside(&budget, &is_quick, 4, 1 << 16, 0);
  td_prefill_budget_init(&budget, MOST);
  run noisy = read_beside(&budget, &is_quick, 4, 1 << 16, 0.5);
  assert_true(noisy.longest < 1.5 * 1.5 * TD_PREFILL_BUDGET_STRETCH);
  assert_true(pace_of(&noisy) > 0.5 * pace_of(&calm));
  uint32_t budget_tokens = budget.budget_tokens;
  td_prefill_budget_note(&budget, 4, budget_tokens, 60000000000u);
  assert_int_equal(td_prefill_budget_tokens(&budget, 4), TD_PREFILL_BUDGET_MIN_TOKENS);
  read_beside(&budget, &is_quick, 4, 8 * budget_tokens, 0);
  assert_true(budget.budget_tokens > budget_tokens / 2);
}

// The first step of all waits for the disk: that measure does not last.
TEST(a_cold_start) {
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
TEST(short_prompts) {
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

// ---- streaming beside decode --------------------------------------------------------------------

// Decode steps of `alone` ns, which take `cost` of the time longer during which the link is busy.
// The link carries groups of experts at `rate` bytes/ns into a ring of slots; the GPU computes them
// at `computing` bytes/ns (0: at once), which frees their slots.
typedef struct {
  double rate, alone, cost, noise, computing;
  double group_bytes;
} link_machine;

enum { LEARNING = 16, SLOTS = 23 }; // steps; of the ring
#define SLICE_NS 200e3              // between two feeds

typedef struct {
  double left, queued, carried, computed; // bytes; the last three since the start
  double seen, seen_ns, first_ns;         // whole groups, when; when the next could begin
  double now_ns, copying_ns;
  double worst, sum;          // steps over one alone, once the pace has learned
  uint32_t n_steps, n_paused; // n_paused: steps during which nothing was copied
  uint64_t random;
} stream_run;

static double whole_groups(double bytes, const link_machine *m) {
  return floor(bytes / m->group_bytes + 1e-9) * m->group_bytes;
}

// Queues what the pace allows, as a worker does, and lets a slice of time pass. Returns how long
// the link was busy.
static double slice(stream_run *r, const link_machine *m, double until, double ahead) {
  const double ring = SLOTS * m->group_bytes, begin_ns = r->now_ns;
  while (r->left > 0 && r->queued < until && r->queued - whole_groups(r->computed, m) < ring &&
         (r->queued == r->seen || r->queued - r->seen < ahead)) {
    if (r->queued == r->seen) r->first_ns = begin_ns;
    r->queued += m->group_bytes;
    r->left -= m->group_bytes;
  }
  const double n = fmin(r->queued - r->carried, m->rate * SLICE_NS);
  r->carried += n;
  r->now_ns += SLICE_NS;
  const double seen = whole_groups(r->carried, m);
  if (seen > r->seen) {
    r->copying_ns += r->now_ns - fmax(r->first_ns, r->seen_ns);
    r->seen = seen;
    r->seen_ns = r->now_ns;
  }
  r->computed = m->computing > 0 ? fmin(seen, r->computed + m->computing * SLICE_NS) : seen;
  return n / m->rate;
}

static void decode_beside(stream_run *r, td_stream_pace *pace, const link_machine *m,
                          uint32_t n_decode) {
  const double until = r->seen + (double)td_stream_pace_ahead(pace, n_decode);
  const double ahead = (double)td_stream_pace_ahead(pace, 0);
  const double seen = r->seen, copying_ns = r->copying_ns, begin_ns = r->now_ns;
  r->random ^= r->random << 13, r->random ^= r->random >> 7, r->random ^= r->random << 17;
  const double alone = m->alone * (1 + m->noise * (double)(r->random >> 40) / (1 << 24));
  double ns = alone;
  while (r->now_ns - begin_ns < ns)
    ns += m->cost / (1 + m->cost) * slice(r, m, until, ahead);
  td_stream_pace_note(pace, &(td_timed_step){.n_decode = n_decode,
                                             .ns = (uint64_t)ns,
                                             .copied_bytes = (uint64_t)(r->seen - seen),
                                             .left_bytes = (uint64_t)(r->queued - r->seen),
                                             .copying_ns = (uint64_t)(r->copying_ns - copying_ns)});
  if (++r->n_steps > LEARNING) r->sum += ns / alone;
  if (r->n_steps > LEARNING && ns / alone > r->worst) r->worst = ns / alone;
  r->n_paused += r->seen == seen;
  assert_true(r->n_steps < 100000);
}

// Streams n_bytes beside n_decode sequences.
static stream_run stream_beside(td_stream_pace *pace, const link_machine *m, uint32_t n_decode,
                                double n_bytes) {
  stream_run r = {.left = n_bytes, .random = 88172645463325252u};
  while (r.left > 0 || r.queued > r.seen)
    decode_beside(&r, pace, m, n_decode);
  return r;
}

static double seconds_of(const stream_run *r) {
  return r->now_ns * 1e-9;
}

// V3 on an H100: 654 GB at 55 GB/s beside decode steps of 147 ms that take 40 % longer while the
// link is busy. Decode keeps to its bound, and prefill gets what that leaves.
TEST(decode_keeps_its_pace) {
  const link_machine m = {.rate = 55, .alone = 147e6, .cost = 0.4, .group_bytes = 512 << 20};
  const double bytes = 654e9, alone_s = bytes / m.rate * 1e-9;
  td_stream_pace pace;
  td_stream_pace_init(&pace, 0.15);
  const stream_run r = stream_beside(&pace, &m, 4, bytes);
  assert_true(r.worst < 1.25);
  assert_true(r.sum / (r.n_steps - LEARNING) < 1.16);
  assert_true(r.n_paused <= 2 + r.n_steps / 16);
  assert_true(seconds_of(&r) > alone_s * 1.5 && seconds_of(&r) < alone_s * 4);
}

// What copies get must not depend on what held them up before: here the GPU's computing did, with
// the ring full at every step's end.
static const link_machine held_up = {
    .rate = 25, .alone = 50e6, .cost = 0.6, .computing = 1, .group_bytes = 64 << 20};

// Where streaming costs decode nothing, the link is never idle for long.
TEST(streaming_that_costs_nothing) {
  const link_machine m = {.rate = 25, .alone = 50e6, .cost = 0.02, .group_bytes = 64 << 20};
  const double bytes = 650e9, alone_s = bytes / m.rate * 1e-9;
  for (int is_held_up = 0; is_held_up < 2; is_held_up++) {
    td_stream_pace pace;
    td_stream_pace_init(&pace, 0.15);
    if (is_held_up) stream_beside(&pace, &held_up, 1, 20e9);
    const stream_run r = stream_beside(&pace, &m, 1, bytes);
    assert_true(r.worst < 1.03);
    assert_true(seconds_of(&r) < 1.05 * alone_s);
  }
}

// However much decode suffers, a quarter of the link is prefill's, from its first step on and after
// copies were held up.
TEST(prefill_is_not_starved) {
  const link_machine m = {
      .rate = 25, .alone = 20e6, .cost = 2, .noise = 0.3, .group_bytes = 4 << 20};
  const double bytes = 100e9, alone_s = bytes / m.rate * 1e-9;
  for (int is_held_up = 0; is_held_up < 2; is_held_up++) {
    td_stream_pace pace;
    td_stream_pace_init(&pace, 0);
    if (is_held_up) stream_beside(&pace, &held_up, 8, 20e9);
    const stream_run r = stream_beside(&pace, &m, 8, bytes);
    assert_true(seconds_of(&r) < 6 * alone_s);
  }
}

// Steps with short prompts of their own are no measure of decode, and do not stop prefill either.
TEST(short_prompts_do_not_stop_streaming) {
  td_stream_pace pace;
  td_stream_pace_init(&pace, 0.15);
  uint32_t n = 0;
  while (!td_stream_pace_ahead(&pace, 8) && n < 100) {
    td_stream_pace_note(&pace, &(td_timed_step){.n_decode = 8, .n_prefilled = 64, .ns = 90000000});
    n++;
  }
  assert_in_range(n, 1, 8);
}

// Decode is measured alone again when twice as many sequences decode.
TEST(more_sequences_are_measured) {
  td_stream_pace pace;
  td_stream_pace_init(&pace, 0.15);
  td_stream_pace_note(&pace, &(td_timed_step){.ns = 900, .copied_bytes = 5000, .copying_ns = 500});
  assert_int_equal(td_stream_pace_ahead(&pace, 0), 10ull * TD_STREAM_AHEAD_NS);
  assert_int_equal(td_stream_pace_ahead(&pace, 1), 0);
  td_stream_pace_note(&pace, &(td_timed_step){.n_decode = 1, .ns = 1000});
  assert_true(td_stream_pace_ahead(&pace, 1) > 0);
  assert_int_equal(td_stream_pace_ahead(&pace, 2), 0);
  td_stream_pace_note(&pace, &(td_timed_step){.n_decode = 2, .ns = 9000, .copied_bytes = 1});
  assert_int_equal(td_stream_pace_ahead(&pace, 2), 0); // something was still copied
  td_stream_pace_note(&pace, &(td_timed_step){.n_decode = 2, .ns = 2000});
  assert_true(td_stream_pace_ahead(&pace, 3) > 0);
  assert_int_equal(td_stream_pace_ahead(&pace, 4), 0);
}
