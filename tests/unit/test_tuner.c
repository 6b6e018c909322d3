// In which way a kernel is called and for how many rows: what trials find out, told times of
// machines that do not exist.
// CTest: no-tsan

#include "device/cpu/tuner.h"
#include "unit/ref.h"

enum { ENOUGH = TD_TUNER_ROUND * TD_TUNER_ROUNDS };

static const td_weight matrix = {.dtype = TD_BF16, .rows = 2048, .cols = 7168};

// Nanoseconds that a run takes.
typedef double (*machine)(const td_trial *trial, uint32_t run);

// What n runs of a kernel that has so many ways lead to.
static td_trial tune_ways(uint8_t n_ways, const td_weight *w, uint32_t first0, uint32_t first1,
                          uint32_t n, machine ns) {
  td_cpu_tuner *tuner = td_cpu_tuner_open();
  td_tuner_kind kind = td_tuner_kind_of(w, 64, 1, false);
  kind.n_ways = n_ways;
  const uint32_t first[TD_TUNER_KNOBS] = {first0, first1};
  for (uint32_t i = 0; i < n; i++) {
    td_trial trial = td_cpu_tuner_next(tuner, &kind, first);
    td_cpu_tuner_add(tuner, &trial, (uint64_t)ns(&trial, i), 1);
  }
  td_trial last = td_cpu_tuner_next(tuner, &kind, first);
  td_cpu_tuner_close(tuner);
  return last;
}

static td_trial tune(const td_weight *w, uint32_t first0, uint32_t first1, uint32_t n, machine ns) {
  return tune_ways(1, w, first0, first1, n, ns);
}

static double dear_calls(const td_trial *trial, uint32_t run) {
  (void)run;
  return 1e6 * (1 + 64.0 / trial->rows[0]);
}

static double dear_waits(const td_trial *trial, uint32_t run) {
  (void)run;
  return 1e3 * trial->rows[0];
}

static double best_at_256_and_64(const td_trial *trial, uint32_t run) {
  (void)run;
  return 1e6 * (fabs(log2(trial->rows[0] / 256.0)) + 2 * fabs(log2(trial->rows[1] / 64.0)) + 8);
}

// They differ by 2 %, and every fifth run waits for something else.
static double all_alike(const td_trial *trial, uint32_t run) {
  double a_bit = 1 + 0.02 * (trial->rows[0] % 3);
  return 1e6 * a_bit * (run % 5 == 4 ? 20 : 1);
}

TEST(goes_where_it_is_quickest) {
  td_trial t = tune(&matrix, 128, 0, ENOUGH, dear_calls);
  assert_int_equal(t.rows[0], TD_TUNER_ROWS);
  assert_int_equal(t.rows[1], 0);
  assert_false(t.counts);
  t = tune(&matrix, 512, 0, ENOUGH, dear_waits);
  assert_int_equal(t.rows[0], 32);
  t = tune(&matrix, 128, 128, ENOUGH, best_at_256_and_64);
  assert_int_equal(t.rows[0], 256);
  assert_int_equal(t.rows[1], 64);
  t = tune(&matrix, 480, 0, TD_TUNER_ROUND, dear_waits); // no power of two
  assert_true(t.counts);
  assert_int_equal(t.rows[0] % 32, 0);
}

TEST(stays_where_nothing_is_gained) {
  td_trial t = tune(&matrix, 128, 0, TD_TUNER_ROUND, all_alike);
  assert_int_equal(t.rows[0], 128);
  assert_false(t.counts); // one round says so
}

// The second way is the quicker one for the first kind of calls, the first for the second, unless
// something else takes all the time.
static double has_ways(const td_trial *trial, uint32_t run) {
  const double gate = trial->way[0] == TD_GEMV_INTERLEAVED ? 0.8 : 1;
  const double down = trial->way[1] == TD_GEMV_INTERLEAVED ? 1.2 : 1;
  return 1e6 * (gate + down) * (run % 7 == 6 ? 5 : 1) * (1 + 64.0 / trial->rows[0]);
}

static double ways_are_alike(const td_trial *trial, uint32_t run) {
  (void)run;
  return 1e6 * (trial->way[0] == TD_GEMV_INTERLEAVED ? 0.98 : 1);
}

TEST(ways) {
  td_trial t = tune_ways(TD_N_GEMV_SCHEDULES, &matrix, 128, 128, TD_TUNER_ROUND, has_ways);
  assert_int_equal(t.way[0], TD_GEMV_INTERLEAVED);
  assert_int_equal(t.way[1], TD_GEMV_SEQUENTIAL);
  assert_true(t.counts); // rows come next
  t = tune_ways(TD_N_GEMV_SCHEDULES, &matrix, 128, 128, ENOUGH, has_ways);
  assert_int_equal(t.way[0], TD_GEMV_INTERLEAVED);
  assert_int_equal(t.way[1], TD_GEMV_SEQUENTIAL);
  assert_int_equal(t.rows[0], TD_TUNER_ROWS);
  assert_false(t.counts);
  t = tune_ways(TD_N_GEMV_SCHEDULES, &matrix, 128, 0, TD_TUNER_ROUND, ways_are_alike);
  assert_int_equal(t.way[0], TD_GEMV_SEQUENTIAL);
  assert_int_equal(t.rows[1], 0);
  t = tune(&matrix, 128, 128, 1, has_ways);
  assert_int_equal(t.way[0], TD_GEMV_SEQUENTIAL); // a kernel with one
}

TEST(what_is_not_tried) {
  assert_int_equal(tune(&matrix, 16, 0, ENOUGH, dear_calls).rows[0], 16); // short for a reason
  const td_weight router = {.dtype = TD_BF16, .rows = 64, .cols = 7168};
  td_trial t = tune(&router, 32, 0, 1, dear_calls);
  assert_false(t.counts);
  assert_int_equal(t.rows[0], 32);
}

// A run of twice the work may take twice as long.
TEST(time_is_of_work) {
  td_cpu_tuner *tuner = td_cpu_tuner_open();
  const td_tuner_kind kind = td_tuner_kind_of(&matrix, 64, 8, false);
  const uint32_t first[TD_TUNER_KNOBS] = {128, 128};
  for (uint32_t i = 0; i < TD_TUNER_ROUND; i++) {
    td_trial trial = td_cpu_tuner_next(tuner, &kind, first);
    td_cpu_tuner_add(tuner, &trial, 1000 * trial.rows[0], trial.rows[0]);
  }
  assert_int_equal(td_cpu_tuner_next(tuner, &kind, first).rows[0], 128);
  td_cpu_tuner_close(tuner);
}

TEST(kinds_are_told_apart) {
  td_weight other = matrix;
  other.scale_cols = 32;
  const td_tuner_kind a = td_tuner_kind_of(&matrix, 64, 1, false);
  const td_tuner_kind kinds[] = {
      td_tuner_kind_of(&matrix, 64, 1, true), td_tuner_kind_of(&matrix, 64, 2, false),
      td_tuner_kind_of(&matrix, 1, 1, false), td_tuner_kind_of(&other, 64, 1, false)};
  for (size_t i = 0; i < TD_COUNT(kinds); i++)
    assert_memory_not_equal(&a, &kinds[i], sizeof a);
  const td_tuner_kind nine = td_tuner_kind_of(&matrix, 64, 9, false);
  const td_tuner_kind sixteen = td_tuner_kind_of(&matrix, 64, 16, false);
  assert_memory_equal(&nine, &sixteen, sizeof nine);
}

// Streams begin runs before others end; those of a round that is over, and kinds there is no room
// for, change nothing.
TEST(late_and_too_many) {
  td_cpu_tuner *tuner = td_cpu_tuner_open();
  const td_tuner_kind kind = td_tuner_kind_of(&matrix, 64, 1, false);
  const uint32_t first[TD_TUNER_KNOBS] = {128, 0};
  td_trial late[3 * TD_TUNER_ROUND];
  for (size_t i = 0; i < TD_COUNT(late); i++)
    late[i] = td_cpu_tuner_next(tuner, &kind, first);
  for (size_t i = 0; i < TD_COUNT(late); i++)
    td_cpu_tuner_add(tuner, &late[i], (uint64_t)dear_calls(&late[i], 0), 1);
  const td_trial second = td_cpu_tuner_next(tuner, &kind, first);
  assert_true(second.counts); // of which only one round is over
  assert_int_equal(second.round, late[0].round + 1);
  for (uint32_t i = 1; i < 1000; i++) {
    td_weight w = matrix;
    w.rows += 8 * i;
    const td_tuner_kind many = td_tuner_kind_of(&w, 64, 1, false);
    for (uint32_t j = 0; j < 2; j++) {
      td_trial trial = td_cpu_tuner_next(tuner, &many, first);
      assert_true(trial.rows[0] == 64 || trial.rows[0] == 128 || trial.rows[0] == 256);
      td_cpu_tuner_add(tuner, &trial, 1000, 1);
    }
  }
  td_cpu_tuner_close(tuner);
}
