// tests/unit/test_turns.c - the memory of generated turns: found by key, the least recently used
// forgotten.
// CTest: no-tsan
#include <stdlib.h>
#include <string.h>

#include "front/turns.h"
#include "unit/testing.h"

static void keep(td_turns *turns, uint8_t key, int32_t first, size_t n) {
  int32_t *ids = calloc(n + 1, sizeof *ids);
  ids[0] = first;
  const td_turn turn = {
      .key = {{key}}, .ids = ids, .n_ids = n, .end = first + 1, .reasoning = "so"};
  td_turns_keep(turns, &turn);
  free(ids);
}

// The first token of the turn; -1: it is not known.
static int32_t find(td_turns *turns, uint8_t key) {
  const td_digest wanted = {{key}};
  td_token_ids ids = {0};
  int32_t end = 0;
  char *reasoning;
  if (!td_turns_find(turns, &wanted, &ids, &end, &reasoning)) return -1;
  const int32_t first = ids.n ? ids.ids[0] : 0;
  assert_int_equal(end, first + 1);
  assert_string_equal(reasoning, "so");
  td_token_ids_free(&ids);
  free(reasoning);
  return first;
}

TEST(forgets_what_was_not_used) {
  td_turns *turns;
  td_err err;
  assert_int_equal(td_turns_open(&turns, 10000, &err), TD_OK);
  assert_int_equal(find(turns, 1), -1);
  keep(turns, 1, 10, 1000);
  keep(turns, 2, 20, 1000);
  assert_int_equal(find(turns, 1), 10);
  keep(turns, 3, 30, 1000); // room for two
  assert_int_equal(find(turns, 2), -1);
  assert_int_equal(find(turns, 1), 10);
  keep(turns, 3, 31, 500); // in its place
  assert_int_equal(find(turns, 3), 31);
  keep(turns, 4, 40, 5000); // too large
  assert_int_equal(find(turns, 4), -1);
  td_turns_close(turns);
  td_turns_close(NULL);
}
