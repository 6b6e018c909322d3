// src/text/grammar/words.c - one of many texts: what begins alike is said once, so that whoever
// follows the grammar follows one text at a time.
#include <stdlib.h>
#include <string.h>

#include "text/grammar/build_impl.h"

// Branches within each other, each of two nodes' depth; and the texts that are then listed, which
// an automaton follows all at once.
#define MAX_BRANCHES 16
#define MAX_LISTED   4096

static int by_bytes(const void *a, const void *b) {
  const td_g_word *x = a, *y = b;
  const size_t n = x->len < y->len ? x->len : y->len;
  const int order = memcmp(x->text, y->text, n);
  return order ? order : (x->len > y->len) - (x->len < y->len);
}

// Bytes from at that both have, of whole characters.
static size_t shared(const td_g_word *a, const td_g_word *b, size_t at) {
  const size_t most = a->len < b->len ? a->len : b->len;
  size_t n = at;
  while (n < most && a->text[n] == b->text[n])
    n++;
  while (n > at && n < b->len && ((unsigned char)b->text[n] & 0xC0) == 0x80)
    n--;
  return n - at;
}

// The n sorted words, which are alike before at.
static td_node rest_of(td_grammar_build *b, const td_g_word *words, size_t n, size_t at,
                       uint32_t n_branches) {
  if (!td_budget_step(b->budget, n)) td_g_fail(b, b->budget->status);
  if (b->status != TD_OK) return TD_NODE_NEVER;
  const size_t n_shared = shared(&words[0], &words[n - 1], at);
  const td_node head = td_g_text(b, words[0].text + at, n_shared);
  at += n_shared;
  const bool is_listed = n_branches == MAX_BRANCHES;
  if (is_listed && n > MAX_LISTED) td_g_fail(b, TD_ELIMIT);
  const size_t list = td_g_begin(b);
  for (size_t i = 0, end; i < n; i = end) {
    end = i + 1;
    if (words[i].len == at) {
      td_g_add(b, TD_NODE_EMPTY);
      continue;
    }
    while (!is_listed && end < n && shared(&words[i], &words[end], at))
      end++;
    td_g_add(b, end == i + 1 ? td_g_text(b, words[i].text + at, words[i].len - at)
                             : rest_of(b, words + i, end - i, at, n_branches + 1));
  }
  return TD_G_SEQ(b, head, td_g_end_any(b, list));
}

td_node td_g_words(td_grammar_build *b, td_g_word *words, size_t n) {
  if (n > 1) qsort(words, n, sizeof *words, by_bytes);
  size_t n_kept = 0;
  for (size_t i = 0; i < n; i++)
    if (!n_kept || by_bytes(&words[n_kept - 1], &words[i]) != 0) words[n_kept++] = words[i];
  return n_kept ? rest_of(b, words, n_kept, 0, 0) : TD_NODE_NEVER;
}
