// tests/unit/test_kv_prefix.c - the cache of prefixes against random traces.
// A shadow of the pool stores at every place what the engine would: a hash of all tokens up to
// there. Whatever is shared or evicted, each sequence must find its own. A naive model (a list of
// prefixes with the time they were let go) says exactly how much must be found in the cache.
// CTest: no-tsan
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "kv/kv.h"
#include "unit/draw.h"
#include "unit/testing.h"

enum {
  MAX_SEQS = 5,
  N_PAGES = 22,
  PAGE_TOKENS = 4,
  MAX_TOKENS = 48,
  N_STEPS = 250,
  N_TRACES = 3000
};

static uint32_t pages_of(uint32_t n_tokens) {
  return (n_tokens + PAGE_TOKENS - 1) / PAGE_TOKENS;
}

typedef struct {
  bool open;
  int32_t tokens[MAX_TOKENS];
  uint32_t n_prompt, n_max, n_past;
  uint32_t n_pages, n_shared;             // as the model has it
  bool is_twin[MAX_TOKENS / PAGE_TOKENS]; // of a page that another published before
} sequence;

typedef struct { // a published page: the prefix that it ends
  int32_t tokens[MAX_TOKENS];
  uint32_t n_pages;
  uint32_t n_refs;
  uint64_t idle_since;
} prefix;

typedef struct {
  td_kv *kv;
  sequence seqs[MAX_SEQS];
  uint64_t shadow[N_PAGES][PAGE_TOKENS];
  int32_t last_prompt[MAX_TOKENS];
  prefix prefixes[N_PAGES];
  uint32_t n_prefixes, n_own; // pages: published; held but not published
  uint64_t now;
  uint64_t n_hits, n_evicted;
} world;

// ---- the model ----------------------------------------------------------------------------------

static prefix *model_find(world *w, const int32_t *tokens, uint32_t n_pages) {
  for (uint32_t i = 0; i < w->n_prefixes; i++) {
    prefix *p = &w->prefixes[i];
    size_t n_bytes = (size_t)n_pages * PAGE_TOKENS * sizeof *tokens;
    if (p->n_pages == n_pages && memcmp(p->tokens, tokens, n_bytes) == 0) return p;
  }
  return NULL;
}

static void model_take(world *w) {
  w->n_own++;
  if (w->n_own + w->n_prefixes <= N_PAGES) return;
  prefix *oldest = NULL;
  for (uint32_t i = 0; i < w->n_prefixes; i++) {
    prefix *p = &w->prefixes[i];
    if (p->n_refs == 0 && (!oldest || p->idle_since < oldest->idle_since)) oldest = p;
  }
  assert_non_null(oldest);
  for (uint32_t i = 0; i < w->n_prefixes; i++) // the end of a prefix always goes before its start
    assert_false(w->prefixes[i].n_pages > oldest->n_pages &&
                 memcmp(w->prefixes[i].tokens, oldest->tokens,
                        (size_t)oldest->n_pages * PAGE_TOKENS * sizeof(int32_t)) == 0);
  *oldest = w->prefixes[--w->n_prefixes];
  w->n_evicted++;
}

static void model_reuse(world *w, sequence *s) {
  prefix *p;
  while ((s->n_shared + 1) * PAGE_TOKENS < s->n_prompt &&
         (p = model_find(w, s->tokens, s->n_shared + 1))) {
    p->n_refs++;
    s->n_pages = ++s->n_shared;
    s->n_past = s->n_shared * PAGE_TOKENS;
  }
}

static void model_commit(world *w, sequence *s) {
  while (s->n_shared < s->n_past / PAGE_TOKENS) {
    prefix *p = model_find(w, s->tokens, s->n_shared + 1);
    if (p) {
      p->n_refs++;
      s->is_twin[s->n_shared++] = true;
      continue;
    }
    p = &w->prefixes[w->n_prefixes++];
    *p = (prefix){.n_pages = ++s->n_shared, .n_refs = 1};
    memcpy(p->tokens, s->tokens, sizeof p->tokens);
    w->n_own--;
  }
}

static void model_close(world *w, sequence *s) {
  w->n_own -= s->n_pages - s->n_shared;
  for (uint32_t n = s->n_shared; n > 0; n--) {
    prefix *p = model_find(w, s->tokens, n);
    if (--p->n_refs == 0) p->idle_since = ++w->now;
    w->n_own -= s->is_twin[n - 1];
  }
  *s = (sequence){0};
}

// ---- the trace ----------------------------------------------------------------------------------

static uint64_t next_hash(uint64_t hash, int32_t token) {
  return (hash ^ (uint64_t)(token + 1)) * 0x9e3779b97f4a7c15u;
}

static void check(world *w) {
  uint32_t n_refs[N_PAGES] = {0}, n_idle = 0;
  for (uint32_t i = 0; i < MAX_SEQS; i++) {
    const sequence *s = &w->seqs[i];
    if (!s->open) continue;
    uint32_t n;
    const int32_t *pages = td_kv_pages(w->kv, i, &n);
    assert_int_equal(n, s->n_pages);
    uint64_t hash = 0;
    for (uint32_t pos = 0; pos < s->n_past; pos++) {
      hash = next_hash(hash, s->tokens[pos]);
      assert_int_equal(w->shadow[pages[pos / PAGE_TOKENS]][pos % PAGE_TOKENS], hash);
    }
    for (uint32_t j = 0; j < n; j++) {
      assert_in_range(pages[j], 0, N_PAGES - 1);
      if (j < s->n_shared && !s->is_twin[j]) {
        n_refs[pages[j]] |= 1;
      } else {
        assert_int_equal(n_refs[pages[j]], 0); // nobody writes where another reads
        n_refs[pages[j]] = 2;
      }
      assert_true(n_refs[pages[j]] < 3);
    }
  }
  for (uint32_t i = 0; i < w->n_prefixes; i++)
    n_idle += w->prefixes[i].n_refs == 0;
  uint32_t n_free = N_PAGES - w->n_own - w->n_prefixes;
  assert_int_equal(td_kv_n_free(w->kv), n_free + n_idle);
}

// Two tokens only, and half of the prompts begin like one before: collisions abound.
static void draw_prompt(world *w, sequence *s) {
  s->n_prompt = 1 + draw(MAX_TOKENS - 8);
  s->n_max = s->n_prompt + 1 + draw(MAX_TOKENS - s->n_prompt);
  uint32_t n_alike = draw(2) ? draw(MAX_TOKENS) : 0;
  for (uint32_t i = 0; i < MAX_TOKENS; i++)
    s->tokens[i] = i < n_alike ? w->last_prompt[i] : (int32_t)draw(2);
  memcpy(w->last_prompt, s->tokens, sizeof s->tokens);
}

static void stop_one(world *w, uint32_t i) {
  td_kv_seq_close(w->kv, i);
  model_close(w, &w->seqs[i]);
}

// A sequence starts when the pool has all that it may need.
static void start_one(world *w) {
  td_err err;
  uint32_t seq;
  sequence s = {.open = true};
  draw_prompt(w, &s);
  if (td_kv_seq_open(w->kv, &seq, &err) != TD_OK) return;
  assert_false(w->seqs[seq].open);
  uint32_t n_match = td_kv_match(w->kv, 0, s.tokens, s.n_prompt);
  uint32_t n_reused = td_kv_reuse(w->kv, seq, s.tokens, s.n_prompt);
  model_reuse(w, &s);
  assert_int_equal(n_reused, n_match);
  assert_int_equal(n_reused, s.n_past);
  assert_true(n_reused < s.n_prompt);
  w->n_hits += n_reused;
  w->seqs[seq] = s;
  bool fits = pages_of(s.n_max) - s.n_pages <= td_kv_n_free(w->kv);
  assert_int_equal(td_kv_reserve(w->kv, seq, s.n_max, &err), fits ? TD_OK : TD_EAGAIN);
  while (fits && w->seqs[seq].n_pages < pages_of(s.n_max)) {
    model_take(w);
    w->seqs[seq].n_pages++;
  }
  if (!fits) stop_one(w, seq);
}

static void step_one(world *w, uint32_t i) {
  sequence *s = &w->seqs[i];
  uint32_t n = 1, n_pages;
  if (s->n_past < s->n_prompt) {
    n = 1 + draw(10);
    if (n > s->n_prompt - s->n_past) n = s->n_prompt - s->n_past;
  }
  const int32_t *pages = td_kv_pages(w->kv, i, &n_pages);
  uint64_t hash = 0;
  for (uint32_t pos = 0; pos < s->n_past + n; pos++) {
    hash = next_hash(hash, s->tokens[pos]);
    if (pos >= s->n_past) w->shadow[pages[pos / PAGE_TOKENS]][pos % PAGE_TOKENS] = hash;
  }
  s->n_past += n;
  check(w); // what was just written is in nobody's way
  td_kv_commit(w->kv, i, s->tokens, s->n_past);
  model_commit(w, s);
  if (s->n_past == s->n_max) stop_one(w, i);
}

// The pages that a listener knows of, by the first bytes of their names, which say all.
typedef struct {
  uint64_t known[N_PAGES];
  uint32_t n, n_cleared;
} listener;

static uint32_t find_known(const listener *l, const td_digest *name) {
  uint64_t hash;
  uint32_t i = 0;
  memcpy(&hash, name->bytes, sizeof hash);
  while (i < l->n && l->known[i] != hash)
    i++;
  return i;
}

static void on_change(void *ctx, const td_kv_change *change) {
  listener *l = ctx;
  const uint32_t i = change->kind == TD_KV_CLEARED ? 0 : find_known(l, change->name);
  if (change->kind == TD_KV_CLEARED) {
    l->n = 0;
    l->n_cleared++;
  } else if (change->kind == TD_KV_REMOVED) {
    assert_true(i < l->n);
    l->known[i] = l->known[--l->n];
  } else {
    assert_true(i == l->n && l->n < N_PAGES && change->n_tokens == PAGE_TOKENS);
    if (change->before) assert_true(find_known(l, change->before) < l->n);
    memcpy(&l->known[l->n++], change->name->bytes, sizeof l->known[0]);
  }
}

TEST(random_traces) {
  uint64_t n_hits = 0, n_evicted = 0;
  for (uint64_t seed = 1; seed <= N_TRACES; seed++) {
    rng_state = seed * 0x9e3779b97f4a7c15u;
    td_err err;
    world w = {0};
    listener told = {0};
    const td_digest root = {{0}};
    const td_kv_opts opts = {.page_tokens = PAGE_TOKENS,
                             .n_pages = N_PAGES,
                             .max_seqs = MAX_SEQS,
                             .root = &root,
                             .listener = {on_change, &told}};
    assert_int_equal(td_kv_open(&w.kv, &opts, &err), TD_OK);
    for (int i = 0; i < N_STEPS; i++) {
      uint32_t seq = draw(MAX_SEQS);
      if (!w.seqs[seq].open) {
        start_one(&w);
      } else if (draw(40) == 0) {
        stop_one(&w, seq);
      } else {
        step_one(&w, seq);
      }
      check(&w);
      assert_int_equal(told.n, w.n_prefixes);
    }
    for (uint32_t i = 0; i < MAX_SEQS; i++) {
      if (w.seqs[i].open) stop_one(&w, i);
    }
    assert_int_equal(td_kv_n_free(w.kv), N_PAGES);
    td_kv_close(w.kv);
    n_hits += w.n_hits;
    n_evicted += w.n_evicted;
  }
  assert_true(n_hits > 10 * N_TRACES && n_evicted > 10 * N_TRACES); // the traces do test something
}

static void fill(td_kv *kv, uint32_t *seq, const int32_t *tokens, uint32_t n) {
  td_err err;
  assert_int_equal(td_kv_seq_open(kv, seq, &err), TD_OK);
  assert_int_equal(td_kv_reserve(kv, *seq, n, &err), TD_OK);
  td_kv_commit(kv, *seq, tokens, n);
}

TEST(the_last_token_is_never_reused) {
  static const int32_t tokens[3 * PAGE_TOKENS] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12};
  const td_kv_opts opts = {.page_tokens = PAGE_TOKENS, .n_pages = 8, .max_seqs = 2};
  td_kv *kv;
  td_err err;
  uint32_t a, b;
  assert_int_equal(td_kv_open(&kv, &opts, &err), TD_OK);
  fill(kv, &a, tokens, 12);
  for (uint32_t n = 1; n <= 12; n++) {
    assert_int_equal(td_kv_seq_open(kv, &b, &err), TD_OK);
    assert_int_equal(td_kv_reuse(kv, b, tokens, n), (n - 1) / PAGE_TOKENS * PAGE_TOKENS);
    td_kv_seq_close(kv, b);
  }
  td_kv_close(kv);
}

// The same page after different ones is not the same: its keys saw other tokens.
TEST(what_came_before_counts) {
  static const int32_t first[] = {1, 1, 1, 1, 7, 7, 7, 7}, second[] = {2, 2, 2, 2, 7, 7, 7, 7, 0};
  const td_kv_opts opts = {.page_tokens = PAGE_TOKENS, .n_pages = 8, .max_seqs = 3};
  td_kv *kv;
  td_err err;
  uint32_t a, b, c, n;
  assert_int_equal(td_kv_open(&kv, &opts, &err), TD_OK);
  fill(kv, &a, first, 8);
  fill(kv, &b, second, 4);
  assert_int_equal(td_kv_seq_open(kv, &c, &err), TD_OK);
  assert_int_equal(td_kv_reuse(kv, c, second, 9), 4);
  assert_int_equal(td_kv_pages(kv, c, &n)[0], td_kv_pages(kv, b, &n)[0]);
  td_kv_seq_close(kv, b);
  assert_int_equal(td_kv_n_free(kv), 8 - 2 - 1); // c holds what b let go
  td_kv_close(kv);
}

// Pages of one salt are found by that salt alone, and their names on disk differ.
TEST(salts_keep_apart) {
  static const int32_t tokens[] = {1, 2, 3, 4, 5, 6, 7, 8, 9};
  static const uint64_t salts[] = {0, 1, 1ull << 40 | 1};
  const td_digest root = {.bytes = {1}};
  const td_kv_opts opts = {.page_tokens = PAGE_TOKENS, .n_pages = 16, .max_seqs = 4, .root = &root};
  td_kv_content content[3];
  td_kv *kv;
  td_err err;
  uint32_t n;
  assert_int_equal(td_kv_open(&kv, &opts, &err), TD_OK);
  for (uint32_t i = 0; i < TD_COUNT(salts); i++) {
    uint32_t seq;
    assert_int_equal(td_kv_match(kv, salts[i], tokens, 9), 0);
    assert_int_equal(td_kv_seq_open(kv, &seq, &err), TD_OK);
    td_kv_set_salt(kv, seq, salts[i]);
    assert_int_equal(td_kv_reuse(kv, seq, tokens, 9), 0);
    assert_int_equal(td_kv_reserve(kv, seq, 9, &err), TD_OK);
    td_kv_commit(kv, seq, tokens, 9);
    assert_true(td_kv_content_of(kv, td_kv_pages(kv, seq, &n)[1], &content[i]));
    td_kv_seq_close(kv, seq);
    for (uint32_t k = 0; k < i; k++)
      assert_memory_not_equal(&content[k].name, &content[i].name, sizeof root);
  }
  for (uint32_t i = 0; i < TD_COUNT(salts); i++)
    assert_int_equal(td_kv_match(kv, salts[i], tokens, 9), 8);
  td_kv_close(kv);
}

// What is lost is found no more, and every page is free for something else.
TEST(what_is_forgotten) {
  static const int32_t tokens[] = {1, 2, 3, 4, 5, 6, 7, 8, 9};
  listener told = {0};
  const td_digest root = {{0}};
  const td_kv_opts opts = {.page_tokens = PAGE_TOKENS,
                           .n_pages = 8,
                           .max_seqs = 3,
                           .root = &root,
                           .listener = {on_change, &told}};
  td_kv *kv;
  td_err err;
  uint32_t a, b;
  assert_int_equal(td_kv_open(&kv, &opts, &err), TD_OK);
  for (uint32_t round = 0; round < 3; round++) {
    fill(kv, &a, tokens, 9);
    td_kv_seq_close(kv, a);
    assert_int_equal(td_kv_match(kv, 0, tokens, 9), 8);
    assert_int_equal(told.n, 2);
    td_kv_invalidate_all(kv);
    assert_true(told.n == 0 && told.n_cleared == round + 1);
    assert_int_equal(td_kv_match(kv, 0, tokens, 9), 0);
    assert_int_equal(td_kv_n_free(kv), 8);
  }
  assert_int_equal(td_kv_seq_open(kv, &b, &err), TD_OK);
  assert_int_equal(td_kv_reserve(kv, b, 8 * PAGE_TOKENS, &err), TD_OK);
  td_kv_close(kv);
}
