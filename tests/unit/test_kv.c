// tests/unit/test_kv.c - the page tables against random traces: no page is leaked, none is shared.
// CTest: no-tsan
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "kv/kv.h"
#include "unit/draw.h"
#include "unit/testing.h"

enum { MAX_SEQS = 7, N_PAGES = 50, PAGE_TOKENS = 16 };

typedef struct {
  td_kv *kv;
  bool open[MAX_SEQS];
  uint32_t n_tokens[MAX_SEQS];
  int32_t first_page[MAX_SEQS]; // a page once given stays at its place
} world;

static uint32_t pages_of(uint32_t n_tokens) {
  return (n_tokens + PAGE_TOKENS - 1) / PAGE_TOKENS;
}

static void check(const world *w) {
  uint8_t owner[N_PAGES] = {0};
  uint32_t n_used = 0;
  for (uint32_t i = 0; i < MAX_SEQS; i++) {
    if (!w->open[i]) continue;
    uint32_t n;
    const int32_t *pages = td_kv_pages(w->kv, i, &n);
    assert_int_equal(n, pages_of(w->n_tokens[i]));
    if (n) assert_int_equal(pages[0], w->first_page[i]);
    for (uint32_t j = 0; j < n; j++) {
      assert_in_range(pages[j], 0, N_PAGES - 1);
      assert_int_equal(owner[pages[j]]++, 0);
    }
    n_used += n;
  }
  assert_int_equal(td_kv_n_free(w->kv), N_PAGES - n_used);
}

static void open_one(world *w) {
  td_err err;
  uint32_t seq, n_open = 0;
  for (int i = 0; i < MAX_SEQS; i++)
    n_open += w->open[i];
  td_status st = td_kv_seq_open(w->kv, &seq, &err);
  assert_int_equal(st, n_open == MAX_SEQS ? TD_EAGAIN : TD_OK);
  if (st != TD_OK) return;
  assert_true(seq < MAX_SEQS && !w->open[seq]);
  w->open[seq] = true;
  w->n_tokens[seq] = 0;
}

static void grow_one(world *w, uint32_t i) {
  td_err err;
  uint32_t want = w->n_tokens[i] + draw(200);
  uint32_t extra = pages_of(want) - pages_of(w->n_tokens[i]);
  td_status st = td_kv_reserve(w->kv, i, want, &err);
  assert_int_equal(st, extra > td_kv_n_free(w->kv) + (st == TD_OK ? extra : 0) ? TD_EAGAIN : TD_OK);
  if (st != TD_OK) return;
  w->n_tokens[i] = want;
  uint32_t n;
  const int32_t *pages = td_kv_pages(w->kv, i, &n);
  if (n && n == extra) w->first_page[i] = pages[0];
}

TEST(random_traces) {
  for (uint64_t seed = 1; seed <= 200; seed++) {
    rng_state = seed * 0x9e3779b97f4a7c15u;
    td_err err;
    world w = {0};
    td_kv_opts opts = {.page_tokens = PAGE_TOKENS, .n_pages = N_PAGES, .max_seqs = MAX_SEQS};
    assert_int_equal(td_kv_open(&w.kv, &opts, &err), TD_OK);
    for (int i = 0; i < 400; i++) {
      uint32_t seq = draw(MAX_SEQS), what = draw(4);
      if (what == 0) {
        open_one(&w);
      } else if (!w.open[seq]) {
        continue;
      } else if (what == 1) {
        td_kv_seq_close(w.kv, seq);
        w.open[seq] = false;
      } else {
        grow_one(&w, seq);
      }
      check(&w);
    }
    for (uint32_t i = 0; i < MAX_SEQS; i++) {
      if (w.open[i]) td_kv_seq_close(w.kv, i);
    }
    assert_int_equal(td_kv_n_free(w.kv), N_PAGES);
    td_kv_close(w.kv);
  }
}

TEST(all_or_nothing) {
  td_err err;
  td_kv *kv;
  td_kv_opts opts = {.page_tokens = PAGE_TOKENS, .n_pages = 4, .max_seqs = 2};
  uint32_t a, b, n;
  assert_int_equal(td_kv_open(&kv, &opts, &err), TD_OK);
  assert_int_equal(td_kv_page_tokens(kv), PAGE_TOKENS);
  assert_int_equal(td_kv_seq_open(kv, &a, &err), TD_OK);
  assert_int_equal(td_kv_seq_open(kv, &b, &err), TD_OK);
  assert_int_equal(td_kv_reserve(kv, a, 3 * PAGE_TOKENS, &err), TD_OK);
  assert_int_equal(td_kv_reserve(kv, b, PAGE_TOKENS + 1, &err), TD_EAGAIN);
  td_kv_pages(kv, b, &n);
  assert_int_equal(n, 0);
  assert_int_equal(td_kv_reserve(kv, b, UINT32_MAX, &err), TD_EAGAIN);
  assert_int_equal(td_kv_reserve(kv, a, 1, &err), TD_OK); // never shrinks
  td_kv_pages(kv, a, &n);
  assert_int_equal(n, 3);
  td_kv_close(kv);
}

TEST(bad_options) {
  td_err err;
  td_kv *kv;
  static const td_kv_opts bad[] = {{.page_tokens = 0, .n_pages = 4, .max_seqs = 4},
                                   {.page_tokens = 24, .n_pages = 4, .max_seqs = 4},
                                   {.page_tokens = 16, .n_pages = 0, .max_seqs = 4},
                                   {.page_tokens = 16, .n_pages = 4, .max_seqs = 0},
                                   {.page_tokens = 16, .n_pages = 1u << 31, .max_seqs = 4}};
  for (size_t i = 0; i < TD_COUNT(bad); i++) {
    assert_int_equal(td_kv_open(&kv, &bad[i], &err), TD_EINVAL);
    assert_null(kv);
  }
  td_kv_close(NULL);
}
