// src/text/grammar/build.c - nodes and rules in arrays that grow within a budget.
#include "text/grammar/build.h"

#include <stdlib.h>
#include <string.h>

#include "base/grow.h"
#include "text/grammar/build_impl.h"

td_grammar_build *td_grammar_build_open(td_budget *budget) {
  td_grammar_build *b = calloc(1, sizeof *b);
  if (!b) return NULL;
  b->budget = budget;
  b->n_nodes = 2;
  b->cap_nodes = 64;
  b->nodes = calloc(b->cap_nodes, sizeof *b->nodes);
  if (!b->nodes) {
    free(b);
    return NULL;
  }
  b->nodes[TD_NODE_EMPTY].kind = TD_G_EMPTY;
  return b;
}

void td_grammar_build_close(td_grammar_build *b) {
  if (!b) return;
  free(b->nodes);
  free(b->kids);
  free(b->stack);
  free(b->ranges);
  free(b->rules);
  free(b->text);
  free(b->json[0]);
  free(b->json[1]);
  free(b);
}

td_budget *td_grammar_build_budget(td_grammar_build *b) {
  return b->budget;
}

void td_g_fail(td_grammar_build *b, td_status why) {
  if (b->status == TD_OK) b->status = why;
}

td_status td_grammar_build_status(const td_grammar_build *b, td_err *err) {
  const td_budget failed = {.status = b->status != TD_OK ? b->status : b->budget->status};
  return td_budget_fail(&failed, err);
}

// ---- growing -----------------------------------------------------------------------------------

// Makes room for n more in an array, whose bytes are taken from the budget.
static bool make_room(td_grammar_build *b, void *items, size_t *cap, size_t n_there, size_t n,
                      size_t each_bytes) {
  const size_t before = *cap;
  if (b->status != TD_OK) return false;
  if (!td_budget_step(b->budget, n + 1)) {
    td_g_fail(b, b->budget->status);
    return false;
  }
  if (n_there + n <= *cap) return true;
  size_t more = before > n ? before : n;
  if (!td_budget_take(b->budget, more * each_bytes)) {
    td_g_fail(b, b->budget->status);
    return false;
  }
  if (td_grow(items, cap, n_there + n, 64, each_bytes)) return true;
  td_g_fail(b, TD_ENOMEM);
  return false;
}

#define ROOM(b, array, n)                                                                          \
  make_room(b, &(b)->array, &(b)->cap_##array, (b)->n_##array, n, sizeof *(b)->array)

static td_node add_node(td_grammar_build *b, td_g_node node) {
  if (node.depth >= TD_G_MAX_DEPTH) td_g_fail(b, TD_ELIMIT);
  if (!ROOM(b, nodes, 1)) return TD_NODE_NEVER;
  b->nodes[b->n_nodes] = node;
  return (td_node)b->n_nodes++;
}

// ---- leaves ------------------------------------------------------------------------------------

td_node td_g_text(td_grammar_build *b, const char *text, size_t len) {
  if (!len) return TD_NODE_EMPTY;
  if (!ROOM(b, text, len)) return TD_NODE_NEVER;
  memcpy(b->text + b->n_text, text, len);
  b->n_text += len;
  return add_node(b, (td_g_node){.kind = TD_G_TEXT,
                                 .depth = 1,
                                 .first = (uint32_t)(b->n_text - len),
                                 .n = (uint32_t)len});
}

td_node td_g_str(td_grammar_build *b, const char *text) {
  return td_g_text(b, text, strlen(text));
}

td_node td_g_chars(td_grammar_build *b, const td_char_range *ranges, size_t n) {
  if (!n || !ROOM(b, ranges, n)) return TD_NODE_NEVER;
  memcpy(b->ranges + b->n_ranges, ranges, n * sizeof *ranges);
  b->n_ranges += n;
  return add_node(b, (td_g_node){.kind = TD_G_CHARS,
                                 .depth = 1,
                                 .first = (uint32_t)(b->n_ranges - n),
                                 .n = (uint32_t)n});
}

td_node td_g_range(td_grammar_build *b, uint32_t low, uint32_t high) {
  return td_g_chars(b, &(td_char_range){low, high}, 1);
}

static int by_low(const void *a, const void *b) {
  const td_char_range *x = a, *y = b;
  return (x->low > y->low) - (x->low < y->low);
}

td_node td_g_chars_but(td_grammar_build *b, const td_char_range *ranges, size_t n) {
  if (!ROOM(b, ranges, 2 * n + 1)) return TD_NODE_NEVER;
  td_char_range *given = b->ranges + b->n_ranges, *out = given + n; // n and at most n + 1
  size_t n_out = 0;
  uint32_t from = 0;
  if (n) memcpy(given, ranges, n * sizeof *given);
  qsort(given, n, sizeof *given, by_low);
  for (size_t i = 0; i < n; i++) {
    if (given[i].low > from) out[n_out++] = (td_char_range){from, given[i].low - 1};
    if (given[i].high >= from) from = given[i].high + 1;
  }
  if (from <= TD_G_LAST_CHAR) out[n_out++] = (td_char_range){from, TD_G_LAST_CHAR};
  memmove(given, out, n_out * sizeof *out);
  b->n_ranges += n_out;
  if (!n_out) return TD_NODE_NEVER;
  return add_node(b, (td_g_node){.kind = TD_G_CHARS,
                                 .depth = 1,
                                 .first = (uint32_t)(b->n_ranges - n_out),
                                 .n = (uint32_t)n_out});
}

// ---- what consists of others -------------------------------------------------------------------

static td_node add_group(td_grammar_build *b, td_g_kind kind, const td_node *of, size_t n) {
  const td_node drops = kind == TD_G_SEQ ? TD_NODE_EMPTY : TD_NODE_NEVER;
  size_t n_kept = 0;
  uint8_t depth = 0;
  td_node last = drops;
  if (!ROOM(b, kids, n)) return TD_NODE_NEVER;
  for (size_t i = 0; i < n; i++) {
    if (kind == TD_G_SEQ && of[i] == TD_NODE_NEVER) return TD_NODE_NEVER;
    if (of[i] == drops || (of[i] == TD_NODE_EMPTY && last == of[i])) continue;
    last = of[i];
    if (b->nodes[last].depth > depth) depth = b->nodes[last].depth;
    b->kids[b->n_kids + n_kept++] = last;
  }
  if (n_kept <= 1) return last;
  b->n_kids += n_kept;
  return add_node(b, (td_g_node){.kind = (uint8_t)kind,
                                 .depth = depth + 1,
                                 .first = (uint32_t)(b->n_kids - n_kept),
                                 .n = (uint32_t)n_kept});
}

td_node td_g_seq(td_grammar_build *b, const td_node *of, size_t n) {
  return add_group(b, TD_G_SEQ, of, n);
}

td_node td_g_any(td_grammar_build *b, const td_node *of, size_t n) {
  return add_group(b, TD_G_ANY, of, n);
}

td_node td_g_repeat(td_grammar_build *b, td_node of, uint32_t min, uint32_t max) {
  if (max < min) return TD_NODE_NEVER;
  if (of == TD_NODE_NEVER) return min ? TD_NODE_NEVER : TD_NODE_EMPTY;
  if (of == TD_NODE_EMPTY || max == 0) return TD_NODE_EMPTY;
  if (min == 1 && max == 1) return of;
  return add_node(b, (td_g_node){.kind = TD_G_REPEAT,
                                 .depth = b->nodes[of].depth + 1,
                                 .first = of,
                                 .min = min,
                                 .max = max});
}

td_node td_g_maybe(td_grammar_build *b, td_node of) {
  return td_g_repeat(b, of, 0, 1);
}

td_node td_g_star(td_grammar_build *b, td_node of) {
  return td_g_repeat(b, of, 0, TD_G_MANY);
}

size_t td_g_begin(td_grammar_build *b) {
  return b->n_stack;
}

void td_g_add(td_grammar_build *b, td_node node) {
  if (ROOM(b, stack, 1)) b->stack[b->n_stack++] = node;
}

static td_node end_list(td_grammar_build *b, td_g_kind kind, size_t begin) {
  const size_t n = b->n_stack - begin;
  b->n_stack = begin;
  if (!n) return kind == TD_G_SEQ ? TD_NODE_EMPTY : TD_NODE_NEVER;
  return add_group(b, kind, b->stack + begin, n);
}

td_node td_g_end_seq(td_grammar_build *b, size_t begin) {
  return end_list(b, TD_G_SEQ, begin);
}

td_node td_g_end_any(td_grammar_build *b, size_t begin) {
  return end_list(b, TD_G_ANY, begin);
}

// ---- rules -------------------------------------------------------------------------------------

td_rule td_g_rule(td_grammar_build *b) {
  if (!ROOM(b, rules, 1)) return 0;
  b->rules[b->n_rules] = (td_g_rule_body){.body = TD_NODE_NEVER};
  return (td_rule)b->n_rules++;
}

void td_g_define(td_grammar_build *b, td_rule rule, td_node body) {
  if (b->status == TD_OK) b->rules[rule].body = body;
}

void td_g_name(td_grammar_build *b, td_rule rule, const char *name, size_t len) {
  if (!ROOM(b, text, len)) return;
  memcpy(b->text + b->n_text, name, len);
  b->rules[rule].name = (uint32_t)b->n_text;
  b->rules[rule].n_name = (uint32_t)len;
  b->n_text += len;
}

td_node td_g_call(td_grammar_build *b, td_rule rule) {
  return add_node(b, (td_g_node){.kind = TD_G_CALL, .depth = 1, .first = rule});
}

td_node td_g_new_rule(td_grammar_build *b, td_node body) {
  const td_rule rule = td_g_rule(b);
  td_g_define(b, rule, body);
  return td_g_call(b, rule);
}

td_grammar_mark td_g_mark(const td_grammar_build *b) {
  return (td_grammar_mark){b->n_nodes, b->n_kids, b->n_ranges, b->n_rules, b->n_text};
}

void td_g_reset(td_grammar_build *b, const td_grammar_mark *mark) {
  if (b->status != TD_OK) return;
  b->n_nodes = mark->n_nodes;
  b->n_kids = mark->n_kids;
  b->n_ranges = mark->n_ranges;
  b->n_rules = mark->n_rules;
  b->n_text = mark->n_text;
}

// ---- one of many texts --------------------------------------------------------------------------
// What begins alike is said once, so that whoever follows the grammar follows one text at a time.

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
