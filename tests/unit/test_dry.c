// DRY against its definition, in quadratic time: random texts with breakers, in and across tokens.
// CTest: no-tsan
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/dry.h"
#include "engine/sampler.h"
#include "unit/testing.h"

enum { N_VOCAB = 12, N_TEXT = 160, N_INDEXED = N_VOCAB - 2 };

// Of the others one is a control token, and one outside the tokenizer's vocabulary.
static const char *const texts[N_INDEXED] = {
    "a", "b", "ab", ":", "a:", "##", "#", "\n\n", "c", "ba"};

static td_token_index tokens;
static uint32_t begin[N_INDEXED + 1], place_of[N_VOCAB - 1];
static uint8_t bytes[64];

static void index_tokens(void) {
  for (uint32_t i = 0; i < N_INDEXED; i++) {
    memcpy(bytes + begin[i], texts[i], strlen(texts[i]));
    begin[i + 1] = begin[i] + (uint32_t)strlen(texts[i]);
    place_of[i] = i;
  }
  place_of[N_INDEXED] = UINT32_MAX;
  tokens = (td_token_index){
      .n = N_INDEXED, .n_vocab = N_VOCAB - 1, .begin = begin, .bytes = bytes, .place_of = place_of};
}

static uint32_t random_below(uint32_t n) {
  static uint64_t state = 7;
  state = state * 6364136223846793005u + 1442695040888963407u;
  return (uint32_t)(state >> 33) % n;
}

static td_wire_dry with_breakers(const char *all, uint32_t n_bytes) {
  td_wire_dry dry = {.multiplier = 0.8f,
                     .base = 1.75f,
                     .allowed_length = 2,
                     .last_n = UINT32_MAX,
                     .n_bytes = n_bytes};
  memcpy(dry.breakers, all, n_bytes);
  return dry;
}
#define BREAKERS(text) with_breakers(text, sizeof(text))

// Whether a breaker ends in ids[at], by all of the text before and in it.
static bool breaks(const td_wire_dry *p, const int32_t *ids, uint32_t at) {
  char text[N_TEXT * 2 + 1] = "";
  size_t before = 0;
  if (ids[at] >= N_INDEXED) return true;
  for (uint32_t i = 0; i <= at; i++) {
    before = strlen(text);
    strcat(text, ids[i] >= N_INDEXED ? "\x01" : texts[ids[i]]);
  }
  for (uint32_t k = 0; k < p->n_bytes; k += (uint32_t)strlen(p->breakers + k) + 1)
    for (const char *s = text; (s = strstr(s, p->breakers + k)); s++)
      if (s + strlen(p->breakers + k) > text + before) return true;
  return false;
}

static void penalize(const td_wire_dry *p, const int32_t *ids, uint32_t n, double *out) {
  const uint32_t first = n > p->last_n ? n - p->last_n : 0;
  bool is_break[N_TEXT];
  uint32_t longest[N_VOCAB] = {0};
  for (uint32_t i = 0; i < n; i++)
    is_break[i] = breaks(p, ids, i);
  for (uint32_t i = first; i < n; i++) {
    uint32_t run = 0;
    while (run < i - first && ids[i - 1 - run] == ids[n - 1 - run] && !is_break[i - 1 - run] &&
           !is_break[n - 1 - run])
      run++;
    if (!is_break[i] && run > longest[ids[i]]) longest[ids[i]] = run;
  }
  for (int id = 0; id < N_VOCAB; id++) {
    const double more = (double)longest[id] - p->allowed_length;
    out[id] = more < 0 ? 0 : fmin((double)p->multiplier * pow((double)p->base, more), 1e6);
  }
}

// Returns how many penalties there were.
static uint32_t check(const td_wire_dry *p, const int32_t *ids, uint32_t n) {
  td_dry *dry;
  td_err err;
  double want[N_VOCAB];
  uint32_t n_penalties = 0;
  assert_true(td_dry_is_valid(p));
  assert_int_equal(td_dry_open(&dry, p, &tokens, N_VOCAB, N_TEXT, &err), TD_OK);
  for (uint32_t at = 0; at <= n; at++) {
    float logits[N_VOCAB] = {0};
    penalize(p, ids, at, want);
    td_dry_apply(dry, logits);
    for (int id = 0; id < N_VOCAB; id++) {
      assert_true(fabs(want[id] + (double)logits[id]) <= 1e-6 * want[id]);
      n_penalties += want[id] > 0;
    }
    if (at < n) td_dry_take(dry, ids + at, 1);
  }
  td_dry_close(dry);
  return n_penalties;
}

TEST(is_its_definition) {
  static const uint32_t windows[] = {UINT32_MAX, 1, 2, 17, 60};
  uint32_t n_penalties = 0, n_large = 0;
  index_tokens();
  for (uint32_t round = 0; round < 150; round++) {
    td_wire_dry p = round % 3 ? BREAKERS(":\0#a\0b\n") : with_breakers("", 0);
    if (round % 3 == 2) p = BREAKERS("\n\0b#\0ab#a\0###");
    p.allowed_length = 1 + round % 4;
    p.last_n = windows[round % TD_COUNT(windows)];
    if (round % 7 == 0) p.base = round % 2 ? 1 : 30;
    int32_t ids[N_TEXT];
    const uint32_t n = N_TEXT - round % 20, n_letters = round % 5 ? N_VOCAB : 1 + round / 5 % 3;
    for (uint32_t i = 0; i < n; i++) { // copies of what came before, and others
      const bool is_copy = i > 8 && random_below(8);
      ids[i] = is_copy ? ids[i - 1 - round % 7] : (int32_t)random_below(n_letters);
    }
    n_penalties += check(&p, ids, n);
    n_large += n_letters == 1;
  }
  assert_true(n_penalties > 1000 && n_large > 0);
}

TEST(breakers) {
  static const int32_t ids[] = {0, 1, 8, 3, 0, 1}; // a b c : a b
  float logits[N_VOCAB] = {0};
  td_dry *dry;
  td_err err;
  index_tokens();
  for (int kind = 0; kind < 4; kind++) {
    // c would follow; it is a breaker; the run holds one; one begins in the run and ends in c
    const td_wire_dry p = kind == 0   ? BREAKERS(":")
                          : kind == 1 ? BREAKERS("c")
                          : kind == 2 ? BREAKERS("b")
                                      : BREAKERS("bc");
    memset(logits, 0, sizeof logits);
    assert_int_equal(td_dry_open(&dry, &p, &tokens, N_VOCAB, N_TEXT, &err), TD_OK);
    td_dry_take(dry, ids, TD_COUNT(ids));
    td_dry_apply(dry, logits);
    for (int id = 0; id < N_VOCAB; id++)
      assert_true(logits[id] == (kind == 0 && id == 8 ? -0.8f : 0));
    td_dry_close(dry);
  }
}

// One that is told what another drew goes on as that would have, and the text repeats nothing.
TEST(samplers_take_it) {
  const td_wire_dry p = with_breakers("", 0);
  int32_t drawn[60];
  td_err err;
  index_tokens();
  for (uint32_t at = 0; at < TD_COUNT(drawn); at += 7) {
    td_sampler *s;
    td_dry *dry;
    const td_top_logits top = {.n = 1, .value[0] = 9, .sum = 1, .sum_warm = 1};
    td_wire_token token;
    assert_int_equal(td_sampler_open(&s, &(td_sampling){0}, NULL, 0, N_VOCAB, &err), TD_OK);
    assert_true(at || td_sampler_next_of_top(s, &top, 0, &token));
    assert_int_equal(td_dry_open(&dry, &p, &tokens, N_VOCAB, 64, &err), TD_OK);
    td_sampler_dry(s, dry);
    assert_false(td_sampler_next_of_top(s, &top, 0, &token));
    td_sampler_prompt(s, (int32_t[]){0, 1, 2}, 3);
    td_sampler_answer(s, drawn, at);
    for (uint32_t i = at; i < TD_COUNT(drawn); i++) {
      float logits[N_VOCAB];
      for (int id = 0; id < N_VOCAB; id++)
        logits[id] = id < N_INDEXED ? (float)((id * 5 + (int)i) % 3) : -9;
      const int32_t id = td_sampler_next(s, logits, 0).id;
      assert_true(at == 0 || id == drawn[i]);
      drawn[i] = id;
    }
    td_sampler_close(s);
    td_dry_close(dry);
  }
  uint32_t n_runs = 0; // of more than 12 tokens
  for (uint32_t i = 13; i < TD_COUNT(drawn); i++)
    for (uint32_t k = 13; k < i; k++)
      n_runs += !memcmp(drawn + i - 13, drawn + k - 13, 13 * sizeof *drawn);
  assert_int_equal(n_runs, 0);
}

TEST(refuses_what_is_malformed) {
  td_wire_dry bad[] = {BREAKERS("a"),      BREAKERS("a"),         BREAKERS("a"),
                       BREAKERS("a"),      BREAKERS("a"),         BREAKERS("a"),
                       BREAKERS("a\0\0b"), with_breakers("a", 1), BREAKERS("")};
  bad[0].multiplier = 0;
  bad[1].multiplier = NAN;
  bad[2].base = 0.5f;
  bad[3].base = INFINITY;
  bad[4].allowed_length = 0;
  bad[5].last_n = 0;
  for (size_t i = 0; i < TD_COUNT(bad); i++)
    assert_false(td_dry_is_valid(&bad[i]));
  td_wire_dry most = BREAKERS("a");
  most.n_bytes = TD_WIRE_MAX_BREAKERS + 1;
  assert_false(td_dry_is_valid(&most));
}
