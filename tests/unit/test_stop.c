// tests/unit/test_stop.c - stop strings: the outcome must not depend on how the text arrives, and
// nothing of a stop string may ever be shown.
// CTest: no-tsan
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "api/stop.h"
#include "base/status.h"
#include "unit/testing.h"

static td_stops make(const char *a, const char *b) {
  td_stops stops = {0};
  const char *texts[] = {a, b};
  for (int i = 0; i < 2 && texts[i]; i++) {
    stops.strings[stops.n].text = strdup(texts[i]);
    stops.strings[stops.n++].len = strlen(texts[i]);
  }
  return stops;
}

// Feeds text in pieces of n bytes and returns what was shown, checking that it only grows.
static size_t shown(const td_stops *stops, const char *text, size_t step, bool *matched) {
  size_t len = strlen(text), sure = 0;
  *matched = false;
  for (size_t at = 0; at < len && !*matched;) {
    at = len - at < step ? len : at + step;
    size_t next = td_stops_scan(stops, text, at, sure, false, matched);
    assert_true(next >= sure && next <= at);
    sure = next;
  }
  if (!*matched) sure = td_stops_scan(stops, text, len, sure, true, matched);
  return sure;
}

static void expect(const char *a, const char *b, const char *text, const char *wanted, bool stops) {
  td_stops s = make(a, b);
  for (size_t step = 1; step <= strlen(text) + 1; step++) {
    bool matched;
    size_t n = shown(&s, text, step, &matched);
    if (n != strlen(wanted) || matched != stops) {
      fail_msg("%s|%s in '%s' by %zu: %zu bytes, matched %d", a, b ? b : "", text, step, n,
               (int)matched);
    }
  }
  td_stops_free(&s);
}

TEST(cuts_where_the_first_one_begins) {
  expect("STOP", NULL, "one STOP two STOP", "one ", true);
  expect("STOP", NULL, "STOP", "", true);
  expect("STOP", NULL, "one STO", "one STO", false);
  expect("STOP", NULL, "SSTOP", "S", true);
  expect("STOP", NULL, "STSTOPS", "ST", true);
  expect("aab", NULL, "aaab", "a", true);
  expect("aab", NULL, "aaaa", "aaaa", false);
  expect("\n\n", NULL, "a\nb\n\nc", "a\nb", true);
  expect("\xC3\xA9", NULL, "caf\xC3\xA9!", "caf", true);
  expect("abcd", "ab", "xxabyy", "xx", true);
  expect("abcx", "bc", "abcd", "a", true);
  expect("abcx", "bc", "abc", "a", true); // held for abcx until nothing more came
  expect("abcx", "bc", "abcx", "", true);
  expect("</s>", "<|end|>", "a <b> </s", "a <b> </s", false);
}

TEST(holds_back_only_what_may_begin_one) {
  td_stops s = make("STOP", NULL);
  bool matched;
  assert_int_equal(td_stops_scan(&s, "one ST", 6, 0, false, &matched), 4);
  assert_false(matched);
  assert_int_equal(td_stops_scan(&s, "one STx", 7, 4, false, &matched), 7);
  td_stops_free(&s);
  td_stops none = {0};
  assert_int_equal(td_stops_scan(&none, "one", 3, 0, false, &matched), 3);
}

// Against a search of the whole text, over all short texts of two letters.
TEST(agrees_with_a_plain_search) {
  static const char *const pairs[][2] = {{"ab", NULL},   {"aa", "ab"},   {"aba", "ba"},
                                         {"bab", "abb"}, {"abab", "bb"}, {"b", "aaab"}};
  for (size_t p = 0; p < TD_COUNT(pairs); p++) {
    for (unsigned bits = 0; bits < 1u << 9; bits++) {
      char text[10] = {0};
      for (int i = 0; i < 9; i++)
        text[i] = bits >> i & 1 ? 'b' : 'a';
      const char *first = strstr(text, pairs[p][0]);
      const char *other = pairs[p][1] ? strstr(text, pairs[p][1]) : NULL;
      if (!first || (other && other < first)) first = other;
      char wanted[10];
      strcpy(wanted, text);
      if (first) wanted[first - text] = 0;
      expect(pairs[p][0], pairs[p][1], text, wanted, first != NULL);
    }
  }
}
