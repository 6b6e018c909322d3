// tests/unit/test_ranks.c - expert parallelism: prompts on several CPU devices.
#include <setjmp.h>

#include <math.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "engine/ranks.h"
#include "engine/zigzag.h"
#include "unit/ranks_test.h"

// Every token belongs to one rank, the last to rank 0, and shares of work are even.
static void test_zigzag(void **state) {
  (void)state;
  for (uint32_t n = 1; n <= 8; n++) {
    for (uint32_t n_tokens = 1; n_tokens <= 100; n_tokens++) {
      uint32_t at = 0;
      for (uint32_t i = 0; i < 2 * n; i++) {
        assert_int_equal(td_zigzag_begin(n_tokens, n, i), at);
        at = td_zigzag_begin(n_tokens, n, i + 1);
      }
      assert_int_equal(at, n_tokens);
      assert_true(td_zigzag_begin(n_tokens, n, 2 * n - 1) < n_tokens);
    }
    uint32_t seen = 0;
    for (uint32_t r = 0; r < n; r++)
      seen |= 1u << td_zigzag_piece(n, r, 0) | 1u << td_zigzag_piece(n, r, 1);
    assert_int_equal(seen, (1u << 2 * n) - 1);
    assert_int_equal(td_zigzag_piece(n, 0, 1), 2 * n - 1);
    assert_int_equal(td_rank_first_expert(7, n, 0), 0);
    assert_int_equal(td_rank_first_expert(7, n, n), 7);
  }
}

// As one device within rounding (parts of sums are BF16), on any number of them, with experts in
// memory or passing through; and the same bits in every run, whatever takes long.
static void check_ranks(const small_model *m, bool is_streamed) {
  size_t n_vocab;
  const ranks_way one = {.kind = "cpu", .backend = "host", .n = 1, .is_streamed = is_streamed};
  float *want = ranks_logits(m, &one, &n_vocab);
  const size_t n = RANKS_ROWS * n_vocab;
  for (uint32_t n_ranks = 2; n_ranks <= 4; n_ranks++) {
    ranks_way way = one;
    way.n = n_ranks;
    float *got = ranks_logits(m, &way, &n_vocab);
    assert_near(got, want, n_vocab, 0x1p-8f);
    static const char *const jitters[] = {"1", "2"};
    for (size_t i = 0; i < TD_COUNT(jitters); i++) {
      way.jitter = jitters[i];
      way.is_borrowed = i > 0;
      float *again = ranks_logits(m, &way, &n_vocab);
      assert_memory_equal(again, got, n * sizeof *got);
      free(again);
    }
    free(got);
  }
  free(want);
}

static void test_ranks(void **state) {
  (void)state;
  for (size_t i = 0; i < TD_COUNT(small_models); i++)
    check_ranks(&small_models[i], false);
}

static void test_streamed(void **state) {
  (void)state;
  for (size_t i = 0; i < TD_COUNT(small_models); i++)
    check_ranks(&small_models[i], true);
}

// A failure ends the step with its reason; later ones are computed by one device.
static void test_a_rank_that_fails(void **state) {
  (void)state;
  size_t n_vocab;
  ranks_way way = {.kind = "cpu", .backend = "host", .n = 1};
  float *want = ranks_logits(&small_models[0], &way, &n_vocab);
  way.n = 3;
  ranks_engine f;
  open_ranks_engine(&f, &small_models[0], &way);
  td_comm_abort(f.engine->rank->comm, "rank 2: no memory");
  const int32_t token = 7, page = 0;
  const td_step_seq seq = {.tokens = &token, .n_tokens = 1, .pages = &page, .n_pages = 1};
  td_err err;
  assert_int_equal(td_engine_step(f.engine, &seq, 1, &err), TD_ECANCELED);
  assert_non_null(strstr(err.msg, "rank 2: no memory"));
  float *got = malloc(RANKS_ROWS * n_vocab * sizeof *got);
  ranks_steps(f.engine, n_vocab, got);
  assert_memory_equal(got, want, RANKS_ROWS * n_vocab * sizeof *got);
  close_ranks_engine(&f);
  free(got);
  free(want);
}

int main(void) {
  engine_activations = TD_ACTIVATIONS_F32;
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_zigzag), cmocka_unit_test(test_ranks),
                                     cmocka_unit_test(test_streamed),
                                     cmocka_unit_test(test_a_rank_that_fails)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
