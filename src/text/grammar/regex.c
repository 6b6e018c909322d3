// src/text/grammar/regex.c - translates a regular expression while parsing it: GBNF has the same
// constructs.
#include "text/grammar/regex.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/utf8.h"
#include "text/grammar/gbnf.h"

#define MAX_RANGES  256
#define MAX_NESTING 64
#define MAX_COUNT   65536
#define LAST_CHAR   0x10FFFFu

typedef struct {
  td_gbnf_range ranges[MAX_RANGES];
  uint32_t n;
  bool names_less; // < was written by itself
} char_set;

typedef struct {
  const char *begin, *at, *end;
  td_buf *out;
  td_regex_place place;
  unsigned depth;
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
  set->ranges[set->n++] = (td_gbnf_range){low, high};
  return TD_OK;
}

static int by_low(const void *a, const void *b) {
  const td_gbnf_range *x = a, *y = b;
  return (x->low > y->low) - (x->low < y->low);
}

// Sorts the ranges and merges those that overlap or touch.
static void normalize(char_set *set) {
  uint32_t n = 0;
  qsort(set->ranges, set->n, sizeof *set->ranges, by_low);
  for (uint32_t i = 0; i < set->n; i++) {
    const td_gbnf_range r = set->ranges[i];
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
  if (st == TD_OK && from <= LAST_CHAR) st = add(p, &out, from, LAST_CHAR);
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
  static const td_gbnf_range digits[] = {{'0', '9'}};
  static const td_gbnf_range word[] = {{'0', '9'}, {'A', 'Z'}, {'_', '_'}, {'a', 'z'}};
  static const td_gbnf_range space[] = {{'\t', '\r'}, {' ', ' '}};
  const td_gbnf_range *ranges;
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

static void write_range(td_buf *out, uint32_t low, uint32_t high) {
  td_buf_printf(out, low == high ? "\\U%08X" : "\\U%08X-\\U%08X", low, high);
}

// The escapes of those characters that do not stand for themselves in a JSON string.
static void write_escapes(td_buf *out, const char_set *set) {
  static const char letters[] = "\"\\\b\f\n\r\t", names[] = "\"\\bfnrt";
  for (uint32_t i = 0; i < set->n; i++) {
    for (uint32_t c = set->ranges[i].low; c <= set->ranges[i].high && c <= '\\'; c++) {
      const char *letter = c ? strchr(letters, (int)c) : NULL;
      if (letter) {
        td_buf_printf(out, " | \"\\\\\\x%02X\"", (unsigned)names[letter - letters]);
      } else if (c < 0x20) {
        td_buf_printf(out, " | \"\\\\u%04x\"", c);
      }
    }
  }
}

// A range of a set that stands in text. in_element and not named: without <.
static void write_plain_range(td_buf *out, uint32_t low, uint32_t high, bool has_less) {
  if (has_less || low > '<' || high < '<') {
    write_range(out, low, high);
    return;
  }
  if (low < '<') write_range(out, low, '<' - 1);
  if (high > '<') write_range(out, '<' + 1, high);
}

static void write_set(const parser *p, char_set *set) {
  static const td_gbnf_range plain[] = {{' ', '!'}, {'#', '['}, {']', 0xD7FF}, {0xE000, LAST_CHAR}};
  td_buf *out = p->out;
  const bool in_json = p->place == TD_REGEX_IN_JSON;
  const bool has_less = p->place != TD_REGEX_IN_ELEMENT || set->names_less;
  normalize(set);
  td_buf_str(out, in_json ? "([" : "[");
  for (uint32_t i = 0; i < set->n; i++) {
    const td_gbnf_range r = set->ranges[i];
    for (size_t k = 0; k < TD_COUNT(plain) && in_json; k++) {
      uint32_t low = r.low > plain[k].low ? r.low : plain[k].low;
      uint32_t high = r.high < plain[k].high ? r.high : plain[k].high;
      if (low <= high) write_range(out, low, high);
    }
    uint32_t low = r.low, high = r.high; // an escape of GBNF is no surrogate
    if (low >= 0xD800 && low <= 0xDFFF) low = 0xE000;
    if (high >= 0xD800 && high <= 0xDFFF) high = 0xD7FF;
    if (!in_json && low <= high) write_plain_range(out, low, high, has_less);
  }
  td_buf_char(out, ']');
  if (!in_json) return;
  write_escapes(out, set);
  td_buf_char(out, ')');
}

// ---- escapes -----------------------------------------------------------------------------------

static td_status read_hex(parser *p, unsigned n, uint32_t *out) {
  *out = 0;
  for (unsigned i = 0; i < n; i++) {
    char c = peek(p), low = (char)(c | 0x20);
    bool is_digit = c >= '0' && c <= '9';
    if (!is_digit && !(low >= 'a' && low <= 'f')) {
      return fail(p, TD_EFORMAT, "hexadecimal digits are missing");
    }
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
      if (st == TD_OK && low >= 0xDC00 && low < 0xE000) {
        *out = 0x10000 + ((*out - 0xD800) << 10) + (low - 0xDC00);
      } else {
        p->at = at;
      }
    }
  }
  if (st == TD_OK && (*out > LAST_CHAR || (*out >= 0xD800 && *out < 0xE000))) {
    st = fail(p, TD_EUNSUPPORTED, "an escape is no character");
  }
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

static td_status read_class(parser *p) {
  char_set set = {.n = 0};
  bool is_negated = take(p, "^");
  td_status st = TD_OK;
  while (st == TD_OK && peek(p) != ']') {
    if (p->at == p->end) return fail(p, TD_EFORMAT, "] is missing");
    st = read_class_item(p, &set);
  }
  p->at++;
  if (st == TD_OK && is_negated) st = negate(p, &set);
  if (st == TD_OK) write_set(p, &set);
  return st;
}

// ---- expressions -------------------------------------------------------------------------------

static td_status read_alternatives(parser *p, bool is_outer);

static td_status read_group(parser *p) {
  if (take(p, "?")) {
    bool is_plain = take(p, ":");
    if (!is_plain && !take(p, "P<") && !take(p, "<")) {
      return fail(p, TD_EUNSUPPORTED, "look-around and flags are not supported");
    }
    if (!is_plain && (peek(p) == '=' || peek(p) == '!')) {
      return fail(p, TD_EUNSUPPORTED, "look-around is not supported");
    }
    while (!is_plain && p->at < p->end && !take(p, ">"))
      p->at++;
  }
  if (++p->depth > MAX_NESTING) return fail(p, TD_ELIMIT, "groups are nested too deep");
  td_buf_char(p->out, '(');
  td_status st = read_alternatives(p, false);
  td_buf_char(p->out, ')');
  p->depth--;
  if (st == TD_OK && !take(p, ")")) st = fail(p, TD_EFORMAT, ") is missing");
  return st;
}

static td_status read_atom(parser *p) {
  static const td_gbnf_range line_ends[] = {{'\n', '\n'}, {'\r', '\r'}, {0x2028, 0x2029}};
  char_set set = {.n = 0};
  uint32_t c;
  if (take(p, "(")) return read_group(p);
  if (take(p, "[")) return read_class(p);
  if (take(p, ".")) {
    set.n = TD_COUNT(line_ends);
    memcpy(set.ranges, line_ends, sizeof line_ends);
    td_status st = negate(p, &set);
    if (st == TD_OK) write_set(p, &set);
    return st;
  }
  char first = peek(p);
  if (first == '*' || first == '+' || first == '?') {
    return fail(p, TD_EFORMAT, "there is nothing to repeat");
  }
  if (first == '^' || first == '$') {
    return fail(p, TD_EUNSUPPORTED,
                "^ and $ are supported only at the beginning and the end of the expression");
  }
  td_status st = read_char(p, &set, &c);
  if (st == TD_OK && !set.n) st = add(p, &set, c, c);
  if (st == TD_OK) write_set(p, &set);
  return st;
}

// Reads {m}, {m,} or {m,n}. False: it is no repetition, and nothing was read.
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
  *max = which == 0 ? *min : n_digits[1] ? (uint32_t)counts[1] : TD_GBNF_MANY;
  p->at = at + 1;
  return true;
}

static td_status read_repetition(parser *p) {
  uint32_t min, max;
  char c = peek(p);
  if (c == '{' && read_counts(p, &min, &max)) {
    if (max < min) return fail(p, TD_EFORMAT, "a repetition's counts are reversed");
    if (min > MAX_COUNT || (max > MAX_COUNT && max != TD_GBNF_MANY)) {
      return fail(p, TD_ELIMIT, "a repetition is too large");
    }
    td_buf_printf(p->out, max == TD_GBNF_MANY ? "{%u,}" : "{%u,%u}", min, max);
  } else if (c == '*' || c == '+' || c == '?') {
    td_buf_char(p->out, c);
    p->at++;
  } else {
    return TD_OK;
  }
  if (peek(p) == '+') return fail(p, TD_EUNSUPPORTED, "possessive repetition is not supported");
  take(p, "?"); // lazy: the same texts
  c = peek(p);
  if (c == '*' || c == '?') return fail(p, TD_EFORMAT, "there is nothing to repeat");
  return TD_OK;
}

static bool is_at_end(const parser *p) {
  return p->at == p->end || *p->at == '|' || *p->at == ')';
}

static bool is_at_last_dollar(const parser *p) {
  return peek(p) == '$' && (p->at + 1 == p->end || p->at[1] == '|');
}

static td_status read_sequence(parser *p, bool is_outer) {
  td_status st = TD_OK;
  // Anything may stand around an expression without anchors.
  const bool is_open = p->place != TD_REGEX_WHOLE && is_outer;
  const char *any = p->place == TD_REGEX_IN_JSON ? "json-char*" : "[^<]*";
  if (is_outer && take(p, "^")) {
    td_buf_str(p->out, "\"\"");
  } else {
    td_buf_str(p->out, is_open ? any : "\"\"");
  }
  while (st == TD_OK && !is_at_end(p) && !(is_outer && is_at_last_dollar(p))) {
    td_buf_char(p->out, ' ');
    st = read_atom(p);
    if (st == TD_OK) st = read_repetition(p);
    if (st == TD_OK && p->out->len > (1u << 20)) st = fail(p, TD_ELIMIT, "it is too large");
  }
  if (st == TD_OK && is_outer && take(p, "$")) return st;
  if (is_open) td_buf_printf(p->out, " %s", any);
  return st;
}

static td_status read_alternatives(parser *p, bool is_outer) {
  for (;;) {
    td_status st = read_sequence(p, is_outer);
    if (st != TD_OK || !take(p, "|")) return st;
    td_buf_str(p->out, " | ");
  }
}

td_status td_regex_to_gbnf(td_buf *out, const char *regex, size_t len, td_regex_place place,
                           td_err *err) {
  parser p = {
      .begin = regex, .at = regex, .end = regex + len, .out = out, .place = place, .err = err};
  td_buf_char(out, '(');
  td_status st = read_alternatives(&p, true);
  td_buf_char(out, ')');
  if (st == TD_OK && p.at < p.end) st = fail(&p, TD_EFORMAT, ") without (");
  return st == TD_OK ? td_buf_status(out, err) : st;
}
