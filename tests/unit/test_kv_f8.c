// tests/unit/test_kv_f8.c - rows of KV pages in E4M3, against rounding in double.
// CTest: no-tsan

#include "device/cpu/pages.h"
#include "tandem/kernels.h"
#include "unit/ref.h"

enum { PAGE_TOKENS = 4, MOST = 640 };

static const td_kv_rows shapes[] = {
    {1, 576, 64}, {4, 128, 0}, {2, 144, 0}, {2, 16, 0}, {1, 40, 24}};

// A row's values and what is kept of them; sizes from below the least scale to E4M3's on top of the
// largest one.
static void check_row(const td_kv_rows *rows, char *page, size_t row, float *in, int exponent) {
  float want[MOST], got[MOST];
  for (uint32_t i = 0; i < rows->dim; i++)
    in[i] = ldexpf(in[i], exponent - (int)(i % 5) * 3);
  in[0] = 0;
  memcpy(want, in, rows->dim * sizeof *in);
  ref_through_f8(want, rows->dim, rows->n_bf16);
  td_kv_f8_put(rows, PAGE_TOKENS, page, row, in);
  td_kv_f8_get(rows, PAGE_TOKENS, page, row, got);
  for (uint32_t i = 0; i < rows->dim; i++)
    if (got[i] != want[i])
      fail_msg("row %zu, exponent %d, element %u: %g, not %g", row, exponent, i, got[i], want[i]);
}

TEST(rows) {
  uint64_t rng = 7;
  static const int exponents[] = {0, -6, 9, 100, -100, -105};
  for (size_t s = 0; s < TD_COUNT(shapes); s++) {
    const td_kv_rows *rows = &shapes[s];
    const size_t n_bytes = PAGE_TOKENS * td_kv_f8_token_bytes(rows), n_rows = rows->n * PAGE_TOKENS;
    for (size_t e = 0; e < TD_COUNT(exponents); e++) {
      char *page = malloc(n_bytes); // ends where the sanitizer sees it
      for (size_t row = 0; row < n_rows; row++) {
        float *in = ref_floats(&rng, rows->dim);
        check_row(rows, page, row, in, exponents[e]);
        free(in);
      }
      free(page);
    }
  }
}

// What stands beside a row stays, and all of a row is written.
TEST(rows_are_apart) {
  const td_kv_rows rows = {2, 144, 0};
  float in[2 * PAGE_TOKENS][144], got[144];
  char *page = malloc(PAGE_TOKENS * td_kv_f8_token_bytes(&rows));
  for (size_t row = 0; row < 2 * PAGE_TOKENS; row++) {
    for (size_t i = 0; i < 144; i++)
      in[row][i] = ldexpf((float)(i % 8 + 8), (int)row);
    td_kv_f8_put(&rows, PAGE_TOKENS, page, row, in[row]);
  }
  for (size_t row = 0; row < 2 * PAGE_TOKENS; row++) {
    td_kv_f8_get(&rows, PAGE_TOKENS, page, row, got);
    assert_memory_equal(got, in[row], sizeof got); // which E4M3 has
  }
  free(page);
}

TEST(what_is_not_finite) {
  const td_kv_rows rows = {1, 32, 16};
  float in[32] = {0}, got[32];
  char *page = malloc(PAGE_TOKENS * td_kv_f8_token_bytes(&rows));
  in[3] = NAN;
  in[4] = 1;
  in[20] = NAN;
  td_kv_f8_put(&rows, PAGE_TOKENS, page, 1, in);
  td_kv_f8_get(&rows, PAGE_TOKENS, page, 1, got);
  assert_true(isnan(got[3]) && got[4] == 1 && got[0] == 0 && isnan(got[20]));
  in[3] = INFINITY;
  td_kv_f8_put(&rows, PAGE_TOKENS, page, 1, in);
  td_kv_f8_get(&rows, PAGE_TOKENS, page, 1, got);
  assert_true(!(got[3] < INFINITY));
  free(page);
}

int before_all(void **state) {
  (void)state;
  td_kernels_init(NULL);
  return 0;
}
