// src/text/grammar/regex.c - regular expressions to nodes. Groups are kept on a stack of their own,
// so that no expression needs a deep one.
#include "text/grammar/regex.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/utf8.h"
#include "text/grammar/build_impl.h"
#include "text/grammar/json_rules.h"

#define MAX_RANGES  256
#define MAX_NESTING 64
#define MAX_COUNT   65536

typedef struct {
  td_char_range ranges[MAX_RANGES];
  uint32_t n;
  bool names_less; // < was written by itself
} char_set;

typedef struct {
  const char *begin, *at, *end;
  td_grammar_build *b;
  td_regex_place place;
  bool has_end; // the sequence ends with $
  td_err *err;
} parser;

static td_status fail(const parser *p, td_status code, const char *what) {
  return td_fail(p->err, code, "regular expression, byte %zu: %s", (size_t)(p->at - p->begin),
                 what);
}

static char peek(const parser *p) {
  return p->at < p->end ? *p->at : '\0';
}

static bool take(parser *p, const char *text) {
  size_t n = strlen(text);
  if ((size_t)(p->end - p->at) < n || memcmp(p->at, text, n) != 0) return false;
  p->at += n;
  return true;
}

// ---- sets of characters ------------------------------------------------------------------------

static td_status add(const parser *p, char_set *set, uint32_t low, uint32_t high) {
  if (set->n == MAX_RANGES) return fail(p, TD_ELIMIT, "a class has too many ranges");
  set->names_less |= low == '<' && high == '<';
  set->ranges[set->n++] = (td_char_range){low, high};
  return TD_OK;
}

static int by_low(const void *a, const void *b) {
  const td_char_range *x = a, *y = b;
  return (x->low > y->low) - (x->low < y->low);
}

// Sorts the ranges and merges those that overlap or touch.
static void normalize(char_set *set) {
  uint32_t n = 0;
  qsort(set->ranges, set->n, sizeof *set->ranges, by_low);
  for (uint32_t i = 0; i < set->n; i++) {
    const td_char_range r = set->ranges[i];
    if (n && r.low <= set->ranges[n - 1].high + 1) {
      if (r.high > set->ranges[n - 1].high) set->ranges[n - 1].high = r.high;
    } else {
      set->ranges[n++] = r;
    }
  }
  set->n = n;
}

static td_status negate(const parser *p, char_set *set) {
  char_set out = {.n = 0};
  uint32_t from = 0;
  td_status st = TD_OK;
  normalize(set);
  for (uint32_t i = 0; i < set->n && st == TD_OK; i++) {
    if (set->ranges[i].low > from) st = add(p, &out, from, set->ranges[i].low - 1);
    from = set->ranges[i].high + 1;
  }
  if (st == TD_OK && from <= TD_G_LAST_CHAR) st = add(p, &out, from, TD_G_LAST_CHAR);
  *set = out;
  set->names_less = false;
  return st;
}

static td_status add_all(const parser *p, char_set *to, const char_set *from) {
  td_status st = TD_OK;
  for (uint32_t i = 0; i < from->n && st == TD_OK; i++)
    st = add(p, to, from->ranges[i].low, from->ranges[i].high);
  return st;
}

// The class that a letter after a backslash means. False: none.
static bool named_class(char letter, char_set *out) {
  static const td_char_range digits[] = {{'0', '9'}};
  static const td_char_range word[] = {{'0', '9'}, {'A', 'Z'}, {'_', '_'}, {'a', 'z'}};
  static const td_char_range space[] = {{'\t', '\r'}, {' ', ' '}};
  const td_char_range *ranges;
  switch (letter | 0x20) {
  case 'd':
    ranges = digits;
    out->n = TD_COUNT(digits);
    break;
  case 'w':
    ranges = word;
    out->n = TD_COUNT(word);
    break;
  case 's':
    ranges = space;
    out->n = TD_COUNT(space);
    break;
  default: return false;
  }
  memcpy(out->ranges, ranges, out->n * sizeof *ranges);
  return true;
}

// ---- sets to nodes -----------------------------------------------------------------------------

// Adds the escapes of those characters that do not stand for themselves in a JSON string.
static void add_escapes(td_grammar_build *b, const char_set *set) {
  static const char letters[] = "\"\\\b\f\n\r\t", names[] = "\"\\bfnrt";
  for (uint32_t i = 0; i < set->n; i++) {
    for (uint32_t c = set->ranges[i].low; c <= set->ranges[i].high && c <= '\\'; c++) {
      const char *letter = c ? strchr(letters, (int)c) : NULL;
      char text[8];
      if (letter)
        snprintf(text, sizeof text, "\\%c", names[letter - letters]);
      else if (c < 0x20)
        snprintf(text, sizeof text, "\\u%04x", c);
      else
        continue;
      td_g_add(b, td_g_str(b, text));
    }
  }
}

// What the set and one of the ranges have in common.
static size_t cut_ranges(const char_set *set, const td_char_range *with, size_t n_with,
                         td_char_range *out) {
  size_t n = 0;
  for (uint32_t i = 0; i < set->n; i++) {
    for (size_t k = 0; k < n_with; k++) {
      const uint32_t low = set->ranges[i].low > with[k].low ? set->ranges[i].low : with[k].low;
      const uint32_t high = set->ranges[i].high < with[k].high ? set->ranges[i].high : with[k].high;
      if (low <= high) out[n++] = (td_char_range){low, high};
    }
  }
  return n;
}

static td_node node_of(const parser *p, char_set *set) {
  static const td_char_range plain[] = {
      {' ', '!'}, {'#', '['}, {']', 0xD7FF}, {0xE000, TD_G_LAST_CHAR}};
  static const td_char_range no_less[] = {
      {0, '<' - 1}, {'<' + 1, 0xD7FF}, {0xE000, TD_G_LAST_CHAR}};
  static const td_char_range all[] = {{0, 0xD7FF}, {0xE000, TD_G_LAST_CHAR}};
  td_char_range ranges[TD_COUNT(plain) * MAX_RANGES];
  normalize(set);
  if (p->place != TD_REGEX_IN_JSON) {
    const bool has_less = p->place != TD_REGEX_IN_ELEMENT || set->names_less;
    const size_t n = has_less ? cut_ranges(set, all, TD_COUNT(all), ranges)
                              : cut_ranges(set, no_less, TD_COUNT(no_less), ranges);
    return td_g_chars(p->b, ranges, n);
  }
  const size_t list = td_g_begin(p->b);
  td_g_add(p->b, td_g_chars(p->b, ranges, cut_ranges(set, plain, TD_COUNT(plain), ranges)));
  add_escapes(p->b, set);
  return td_g_end_any(p->b, list);
}

// ---- escapes -----------------------------------------------------------------------------------

static td_status read_hex(parser *p, unsigned n, uint32_t *out) {
  *out = 0;
  for (unsigned i = 0; i < n; i++) {
    char c = peek(p), low = (char)(c | 0x20);
    bool is_digit = c >= '0' && c <= '9';
    if (!is_digit && !(low >= 'a' && low <= 'f'))
      return fail(p, TD_EFORMAT, "hexadecimal digits are missing");
    *out = *out << 4 | (uint32_t)(is_digit ? c - '0' : low - 'a' + 10);
    p->at++;
  }
  return TD_OK;
}

static td_status read_unicode(parser *p, uint32_t *out) {
  td_status st = TD_OK;
  if (take(p, "{")) {
    unsigned n = 0;
    while (p->at + n < p->end && p->at[n] != '}')
      n++;
    if (n > 6) n = 6;
    st = read_hex(p, n, out);
    if (st == TD_OK && !take(p, "}")) st = fail(p, TD_EFORMAT, "} is missing");
  } else {
    st = read_hex(p, 4, out);
    uint32_t low;
    const char *at = p->at;
    if (st == TD_OK && *out >= 0xD800 && *out < 0xDC00 && take(p, "\\u")) {
      st = read_hex(p, 4, &low);
      if (st == TD_OK && low >= 0xDC00 && low < 0xE000)
        *out = 0x10000 + ((*out - 0xD800) << 10) + (low - 0xDC00);
      else
        p->at = at;
    }
  }
  if (st == TD_OK && (*out > TD_G_LAST_CHAR || (*out >= 0xD800 && *out < 0xE000)))
    st = fail(p, TD_EUNSUPPORTED, "an escape is not a character");
  return st;
}

// After a backslash: one character in *out, or a class in set (n > 0).
static td_status read_escape(parser *p, char_set *set, uint32_t *out) {
  static const char letters[] = "nrtfv0", meanings[] = "\n\r\t\f\v\0";
  set->n = 0;
  char c = peek(p);
  if (p->at == p->end) return fail(p, TD_EFORMAT, "it ends with a backslash");
  if (named_class(c, set)) {
    p->at++;
    return c < 'a' ? negate(p, set) : TD_OK;
  }
  const char *letter = c ? strchr(letters, c) : NULL;
  if (letter) {
    *out = (uint32_t)meanings[letter - letters];
    p->at++;
    return TD_OK;
  }
  if (take(p, "x")) return read_hex(p, 2, out);
  if (take(p, "u")) return read_unicode(p, out);
  if (c >= '1' && c <= '9') return fail(p, TD_EUNSUPPORTED, "back-references are not supported");
  if (c == 'k') return fail(p, TD_EUNSUPPORTED, "back-references are not supported");
  if (c == 'b' || c == 'B') return fail(p, TD_EUNSUPPORTED, "\\b and \\B are not supported");
  if (c == 'p' || c == 'P') return fail(p, TD_EUNSUPPORTED, "Unicode properties are not supported");
  bool is_letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
  if (is_letter) return fail(p, TD_EUNSUPPORTED, "an unknown escape");
  int n = td_utf8_decode(p->at, (size_t)(p->end - p->at), out);
  if (n <= 0) return fail(p, TD_EFORMAT, "not valid UTF-8");
  p->at += n;
  return TD_OK;
}

// One character, or an escape's class.
static td_status read_char(parser *p, char_set *set, uint32_t *out) {
  set->n = 0;
  if (take(p, "\\")) return read_escape(p, set, out);
  int n = p->at < p->end ? td_utf8_decode(p->at, (size_t)(p->end - p->at), out) : 0;
  if (n <= 0) return fail(p, TD_EFORMAT, "it ends inside a class, or is not valid UTF-8");
  p->at += n;
  return TD_OK;
}

static td_status read_class_item(parser *p, char_set *set) {
  char_set named;
  uint32_t low, high;
  if (p->at[0] == '\\' && p->at + 1 < p->end && p->at[1] == 'b') { // backspace, in a class
    p->at += 2;
    return add(p, set, '\b', '\b');
  }
  td_status st = read_char(p, &named, &low);
  if (st != TD_OK) return st;
  if (named.n) return add_all(p, set, &named);
  high = low;
  if (p->at + 1 < p->end && p->at[0] == '-' && p->at[1] != ']') {
    p->at++;
    st = read_char(p, &named, &high);
    if (st == TD_OK && named.n) return fail(p, TD_EFORMAT, "a range ends in a class");
  }
  if (st == TD_OK && high < low) return fail(p, TD_EFORMAT, "a range is reversed");
  return st == TD_OK ? add(p, set, low, high) : st;
}

static td_status read_class(parser *p, td_node *out) {
  char_set set = {.n = 0};
  bool is_negated = take(p, "^");
  td_status st = TD_OK;
  while (st == TD_OK && peek(p) != ']') {
    if (p->at == p->end) return fail(p, TD_EFORMAT, "] is missing");
    st = read_class_item(p, &set);
  }
  p->at++;
  if (st == TD_OK && is_negated) st = negate(p, &set);
  if (st == TD_OK) *out = node_of(p, &set);
  return st;
}

// ---- expressions -------------------------------------------------------------------------------

// What stands behind the parenthesis of a group before its expression.
static td_status skip_group_name(parser *p) {
  if (!take(p, "?") || take(p, ":")) return TD_OK;
  if (!take(p, "P<") && !take(p, "<"))
    return fail(p, TD_EUNSUPPORTED, "look-around and flags are not supported");
  if (peek(p) == '=' || peek(p) == '!')
    return fail(p, TD_EUNSUPPORTED, "look-around is not supported");
  while (p->at < p->end && !take(p, ">"))
    p->at++;
  return TD_OK;
}

static td_status read_atom(parser *p, td_node *out) {
  static const td_char_range line_ends[] = {{'\n', '\n'}, {'\r', '\r'}, {0x2028, 0x2029}};
  char_set set = {.n = 0};
  uint32_t c;
  if (take(p, "[")) return read_class(p, out);
  if (take(p, ".")) {
    set.n = TD_COUNT(line_ends);
    memcpy(set.ranges, line_ends, sizeof line_ends);
    td_status st = negate(p, &set);
    if (st == TD_OK) *out = node_of(p, &set);
    return st;
  }
  char first = peek(p);
  if (first == '*' || first == '+' || first == '?')
    return fail(p, TD_EFORMAT, "there is nothing to repeat");
  if (first == '^' || first == '$') {
    return fail(p, TD_EUNSUPPORTED,
                "^ and $ are supported only at the beginning and the end of the expression");
  }
  td_status st = read_char(p, &set, &c);
  if (st == TD_OK && !set.n) st = add(p, &set, c, c);
  if (st == TD_OK) *out = node_of(p, &set);
  return st;
}

// Reads {m}, {m,} or {m,n}. False: it is not a repetition, and nothing was read.
static bool read_counts(parser *p, uint32_t *min, uint32_t *max) {
  const char *at = p->at + 1;
  uint64_t counts[2] = {0, 0};
  size_t n_digits[2] = {0, 0};
  int which = 0;
  for (; at < p->end && *at != '}'; at++) {
    if (*at == ',' && which == 0) {
      which = 1;
    } else if (*at >= '0' && *at <= '9') {
      counts[which] = counts[which] * 10 + (uint64_t)(*at - '0');
      if (counts[which] > MAX_COUNT) counts[which] = MAX_COUNT + 1;
      n_digits[which]++;
    } else {
      return false;
    }
  }
  if (at == p->end || !n_digits[0]) return false;
  *min = (uint32_t)counts[0];
  *max = which == 0 ? *min : n_digits[1] ? (uint32_t)counts[1] : TD_G_MANY;
  p->at = at + 1;
  return true;
}

static td_status read_repetition(parser *p, td_node *item) {
  uint32_t min, max;
  char c = peek(p);
  if (c == '{' && read_counts(p, &min, &max)) {
    if (max < min) return fail(p, TD_EFORMAT, "a repetition's counts are reversed");
    if (min > MAX_COUNT || (max > MAX_COUNT && max != TD_G_MANY))
      return fail(p, TD_ELIMIT, "a repetition is too large");
  } else if (c == '*' || c == '+' || c == '?') {
    min = c == '+';
    max = c == '?' ? 1 : TD_G_MANY;
    p->at++;
  } else {
    return TD_OK;
  }
  *item = td_g_repeat(p->b, *item, min, max);
  if (peek(p) == '+') return fail(p, TD_EUNSUPPORTED, "possessive repetition is not supported");
  take(p, "?"); // lazy: the same texts
  c = peek(p);
  if (c == '*' || c == '?') return fail(p, TD_EFORMAT, "there is nothing to repeat");
  return TD_OK;
}

// The lists of a group: its alternatives, and the items of the last of them.
typedef struct {
  size_t alternatives, items;
} group;

// Anything may stand around an expression without anchors.
static void add_anything(parser *p) {
  if (p->place == TD_REGEX_IN_JSON)
    td_g_add(p->b, td_g_star(p->b, td_g_json(p->b, p->b->json[1])->character));
  else if (p->place == TD_REGEX_IN_ELEMENT)
    td_g_add(p->b, td_g_gbnf(p->b, "[^<]*", NULL));
}

static void begin_sequence(parser *p, bool is_outer) {
  p->has_end = false;
  if (is_outer && !take(p, "^")) add_anything(p);
}

// Makes the items the last alternative.
static void end_sequence(parser *p, group *g, bool is_outer) {
  if (is_outer && !p->has_end) add_anything(p);
  td_g_add(p->b, td_g_end_seq(p->b, g->items));
  g->items = td_g_begin(p->b);
}

static td_status read_expression(parser *p, td_node *out) {
  group groups[MAX_NESTING + 1];
  unsigned depth = 0;
  groups[0].alternatives = groups[0].items = td_g_begin(p->b);
  begin_sequence(p, true);
  while (p->at < p->end) {
    td_status st = td_budget_step(p->b->budget, 1) ? TD_OK : td_grammar_build_status(p->b, p->err);
    td_node item = TD_NODE_NEVER;
    if (st != TD_OK) return st;
    if (take(p, "|")) {
      end_sequence(p, &groups[depth], depth == 0);
      begin_sequence(p, depth == 0);
      continue;
    }
    if (take(p, "(")) {
      if (depth == MAX_NESTING) return fail(p, TD_ELIMIT, "groups are nested too deep");
      st = skip_group_name(p);
      if (st != TD_OK) return st;
      depth++;
      groups[depth].alternatives = groups[depth].items = td_g_begin(p->b);
      continue;
    }
    if (depth == 0 && (peek(p) == '$' && (p->at + 1 == p->end || p->at[1] == '|'))) {
      p->has_end = true;
      p->at++;
      continue;
    }
    if (take(p, ")")) {
      if (!depth) return fail(p, TD_EFORMAT, ") without (");
      end_sequence(p, &groups[depth], false);
      item = td_g_end_any(p->b, groups[depth--].alternatives);
    } else {
      st = read_atom(p, &item);
    }
    if (st == TD_OK) st = read_repetition(p, &item);
    if (st != TD_OK) return st;
    td_g_add(p->b, item);
  }
  if (depth) return fail(p, TD_EFORMAT, ") is missing");
  end_sequence(p, &groups[0], true);
  *out = td_g_end_any(p->b, groups[0].alternatives);
  return td_grammar_build_status(p->b, p->err);
}

td_status td_g_regex(td_node *out, td_grammar_build *b, const char *regex, size_t len,
                     td_regex_place place, td_err *err) {
  parser p = {.begin = regex, .at = regex, .end = regex + len, .b = b, .place = place, .err = err};
  const size_t list = td_g_begin(b);
  *out = TD_NODE_NEVER;
  td_status st = td_budget_step(b->budget, len) ? read_expression(&p, out)
                                                : td_grammar_build_status(b, err);
  td_g_end_any(b, list); // what a failure has left
  return st;
}
