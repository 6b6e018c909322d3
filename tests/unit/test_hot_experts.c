// tests/unit/test_hot_experts.c - which experts a cache holds: traces of routing against a plain
// model of the rules, and what recency is worth.
// CTest: no-tsan
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "engine/experts/hot_experts.h"
#include "unit/testing.h"

static td_hot_experts *open_hot(uint32_t n_layers, uint32_t n_experts, uint32_t n_slots) {
  td_hot_experts *hot;
  td_err err;
  assert_int_equal(td_hot_experts_open(&hot, n_layers, n_experts, n_slots, &err), TD_OK);
  return hot;
}

// A step of layer 0 that uses one expert; its moves are complete at once.
static void use(td_hot_experts *hot, int32_t expert) {
  td_hot_move moves[4];
  td_hot_experts_begin_step(hot);
  td_hot_experts_use(hot, 0, &expert, 1);
  const uint32_t n = td_hot_experts_choose(hot, moves, 4);
  for (uint32_t i = 0; i < n; i++)
    td_hot_experts_publish(hot, &moves[i]);
}

static bool holds(const td_hot_experts *hot, uint32_t expert) {
  return td_hot_experts_table(hot)[expert] >= 0;
}

TEST(the_least_recently_used_makes_room) {
  td_hot_experts *hot = open_hot(1, 8, 2);
  use(hot, 0);
  use(hot, 1);
  assert_true(holds(hot, 0) && holds(hot, 1));
  use(hot, 2); // once: stays out
  assert_false(holds(hot, 2));
  use(hot, 0);
  use(hot, 2); // twice since 1 was used, not since 0 was
  assert_true(holds(hot, 0) && holds(hot, 2));
  assert_false(holds(hot, 1));
  const td_hot_counts counts = td_hot_experts_counts(hot);
  assert_int_equal(counts.hits, 1);
  assert_int_equal(counts.misses, 4);
  assert_int_equal(counts.moves, 3);
  assert_int_equal(counts.n_cached, 2);
  td_hot_experts_close(hot);
}

TEST(one_slot) {
  td_hot_experts *hot = open_hot(2, 4, 1);
  for (int i = 0; i < 10; i++) // alternately: each is used twice between two uses of none
    use(hot, i % 2);
  assert_true(holds(hot, 0));
  assert_int_equal(td_hot_experts_counts(hot).hits, 4);
  use(hot, 3);
  use(hot, 3);
  assert_true(holds(hot, 3));
  assert_false(holds(hot, 0));
  td_hot_experts_close(hot);
}

// Every other expert gets a slot of the first three, until these are full; then all get others.
TEST(fill) {
  static const bool is_layer[] = {false, true, true};
  static const int32_t want[] = {-1, -1, -1, -1, -1, 0, 3, 1, 4, 2, 5, 6, 7, -1, -1};
  td_hot_experts *hot = open_hot(3, 5, 8);
  td_hot_move moves[8];
  const uint32_t n = td_hot_experts_fill(hot, is_layer, 3, moves);
  assert_int_equal(n, 8);
  assert_false(holds(hot, 5)); // not before it has arrived
  for (uint32_t i = 0; i < n; i++)
    td_hot_experts_publish(hot, &moves[i]);
  assert_memory_equal(td_hot_experts_table(hot), want, sizeof want);
  assert_int_equal(td_hot_experts_counts(hot).n_cached, 8);
  td_hot_experts_close(hot);
  hot = open_hot(3, 5, 20); // more slots than experts
  td_hot_move all[20];
  assert_int_equal(td_hot_experts_fill(hot, is_layer, 20, all), 10);
  td_hot_experts_close(hot);
}

TEST(no_slots) {
  td_hot_experts *hot = open_hot(1, 4, 0);
  use(hot, 1);
  use(hot, 1);
  assert_int_equal(td_hot_experts_counts(hot).misses, 2);
  assert_int_equal(td_hot_experts_counts(hot).n_cached, 0);
  td_hot_experts_close(hot);
}

// An expert that is on its way is not in the table, is not chosen again, and its slot is nobody
// else's. One whose move is canceled may be chosen again.
TEST(moves_take_time) {
  td_hot_experts *hot = open_hot(1, 8, 1);
  td_hot_move move, other;
  const int32_t expert = 5, next = 6;
  td_hot_experts_begin_step(hot);
  td_hot_experts_use(hot, 0, &expert, 1);
  assert_int_equal(td_hot_experts_choose(hot, &move, 1), 1);
  assert_int_equal(move.expert, 5);
  for (int i = 0; i < 3; i++) {
    td_hot_experts_begin_step(hot);
    td_hot_experts_use(hot, 0, &expert, 1);
    td_hot_experts_use(hot, 0, &next, 1);
    assert_false(holds(hot, 5));
    assert_int_equal(td_hot_experts_choose(hot, &other, 1), 0);
  }
  td_hot_experts_cancel(hot, &move);
  assert_false(holds(hot, 5));
  td_hot_experts_begin_step(hot);
  td_hot_experts_use(hot, 0, &expert, 1);
  assert_int_equal(td_hot_experts_choose(hot, &move, 1), 1);
  td_hot_experts_publish(hot, &move);
  assert_true(holds(hot, 5));
  assert_int_equal(td_hot_experts_counts(hot).moves, 1);
  td_hot_experts_close(hot);
}

// ---- traces -------------------------------------------------------------------------------------

enum { LAYERS = 3, EXPERTS = 64, TOP_K = 4, STEPS = 400, MOST = 2 };

static uint32_t random_below(uint64_t *random, uint32_t n) {
  *random = *random * 6364136223846793005u + 1442695040888963407u;
  return (uint32_t)(*random >> 33) % n;
}

// Routing with recency: most choices are among those of the last few steps, the others uniform.
static void route(uint64_t *random, int32_t recent[16], int32_t ids[TOP_K]) {
  for (int j = 0; j < TOP_K; j++) {
    const uint32_t at = random_below(random, 16);
    ids[j] = random_below(random, 100) < 85 ? recent[at] : (int32_t)random_below(random, EXPERTS);
    recent[random_below(random, 16)] = ids[j];
  }
}

// Slots are those of one expert each, and every slot that is held has its expert in the table.
static void check_table(const td_hot_experts *hot, uint32_t n_slots) {
  bool is_used[LAYERS * EXPERTS] = {false};
  const int32_t *table = td_hot_experts_table(hot);
  uint32_t n = 0;
  for (uint32_t i = 0; i < LAYERS * EXPERTS; i++) {
    if (table[i] < 0) continue;
    assert_true((uint32_t)table[i] < n_slots && !is_used[table[i]]);
    is_used[table[i]] = true;
    n++;
  }
  assert_int_equal(n, td_hot_experts_counts(hot).n_cached);
}

// Moves complete one to three steps after they were chosen, some are canceled. The share of hits.
static double run_trace(uint32_t n_slots, uint64_t seed) {
  td_hot_experts *hot = open_hot(LAYERS, EXPERTS, n_slots);
  int32_t recent[LAYERS][16];
  td_hot_move moves[MOST];
  uint32_t n_moves = 0, due = 0;
  uint64_t random = seed;
  for (int i = 0; i < LAYERS * 16; i++)
    recent[i / 16][i % 16] = i % EXPERTS;
  for (uint32_t step = 0; step < STEPS; step++) {
    if (step >= due) {
      for (; n_moves; n_moves--) {
        if (random_below(&random, 20) == 0) {
          td_hot_experts_cancel(hot, &moves[n_moves - 1]);
        } else {
          td_hot_experts_publish(hot, &moves[n_moves - 1]);
        }
      }
    }
    td_hot_experts_begin_step(hot);
    for (uint32_t l = 0; l < LAYERS; l++) {
      int32_t ids[TOP_K];
      route(&random, recent[l], ids);
      td_hot_experts_use(hot, l, ids, TOP_K);
    }
    if (!n_moves) n_moves = td_hot_experts_choose(hot, moves, MOST);
    due = step + 1 + random_below(&random, 3);
    check_table(hot, n_slots);
  }
  const td_hot_counts counts = td_hot_experts_counts(hot);
  td_hot_experts_close(hot);
  return (double)counts.hits / (double)(counts.hits + counts.misses);
}

// A quarter of the experts, chosen by recency, gets far more than a quarter of the uses; a larger
// cache gets no fewer.
TEST(recency) {
  enum { ALL = LAYERS * EXPERTS };
  for (uint64_t seed = 1; seed <= 5; seed++) {
    const double eighth = run_trace(ALL / 8, seed), quarter = run_trace(ALL / 4, seed);
    const double all = run_trace(ALL, seed);
    assert_true(quarter > 0.4);
    assert_true(eighth < quarter && quarter < all);
  }
}
