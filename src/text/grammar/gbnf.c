// src/text/grammar/gbnf.c - a recursive-descent parser for GBNF.
#include "text/grammar/gbnf.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "base/grow.h"
#include "base/utf8.h"

#define MAX_NESTING 128
#define MAX_NAME    128
#define MAX_REPEAT  (1u << 20)
#define MAX_NODES   (1u << 20)
#define LAST_CHAR   0x10FFFFu

typedef struct {
  td_gbnf *out;
  const char *begin, *at, *end;
  unsigned depth;
  td_err *err;
} parser;

void td_gbnf_free(td_gbnf *gbnf) {
  for (uint32_t i = 0; i < gbnf->n_rules; i++)
    free(gbnf->rules[i].name);
  free(gbnf->nodes);
  free(gbnf->ranges);
  free(gbnf->rules);
  *gbnf = (td_gbnf){0};
}

static td_status fail(const parser *p, td_status code, const char *what) {
  unsigned line = 1;
  for (const char *c = p->begin; c < p->at; c++)
    line += *c == '\n';
  return td_fail(p->err, code, "grammar, line %u: %s", line, what);
}

// ---- growing -----------------------------------------------------------------------------------

static td_status fail_growing(const parser *p, uint32_t n) {
  if (n >= MAX_NODES) return fail(p, TD_ELIMIT, "the grammar is too large");
  return td_fail(p->err, TD_ENOMEM, "out of memory for the grammar");
}

// Makes room for one more in an array of nodes, ranges or rules.
#define GROW(p, array, n, cap)                                                                     \
  ((n) < (cap) || ((n) < MAX_NODES && TD_GROW(array, n, cap, 64)) ? TD_OK : fail_growing(p, n))

static td_status add_node(const parser *p, td_gbnf_node node, uint32_t *out) {
  td_gbnf *g = p->out;
  if (g->n_nodes == 0) g->n_nodes = 1;
  td_status st = GROW(p, g->nodes, g->n_nodes, g->cap_nodes);
  if (st != TD_OK) return st;
  *out = g->n_nodes++;
  g->nodes[*out] = node;
  return TD_OK;
}

static td_status add_range(const parser *p, uint32_t low, uint32_t high) {
  td_gbnf *g = p->out;
  td_status st = GROW(p, g->ranges, g->n_ranges, g->cap_ranges);
  if (st == TD_OK) g->ranges[g->n_ranges++] = (td_gbnf_range){low, high};
  return st;
}

// The rule of that name, which is added if there is none yet.
static td_status find_rule(const parser *p, const char *name, size_t len, uint32_t *out) {
  td_gbnf *g = p->out;
  uint32_t hash = 2166136261u; // FNV-1a
  for (size_t i = 0; i < len; i++)
    hash = (hash ^ (unsigned char)name[i]) * 16777619u;
  for (uint32_t i = 0; i < g->n_rules; i++) {
    const td_gbnf_rule *rule = &g->rules[i];
    if (rule->hash == hash && strncmp(rule->name, name, len) == 0 && !rule->name[len]) {
      *out = i;
      return TD_OK;
    }
  }
  td_status st = GROW(p, g->rules, g->n_rules, g->cap_rules);
  if (st != TD_OK) return st;
  char *copy = strndup(name, len);
  if (!copy) return td_fail(p->err, TD_ENOMEM, "out of memory for the grammar");
  *out = g->n_rules;
  g->rules[g->n_rules++] = (td_gbnf_rule){.name = copy, .hash = hash};
  return TD_OK;
}

// ---- words -------------------------------------------------------------------------------------

static char peek(const parser *p) {
  return p->at < p->end ? *p->at : '\0';
}

static bool is_name_char(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' ||
         c == '_' || c == '.';
}

static void skip_space(parser *p, bool over_lines) {
  while (p->at < p->end) {
    char c = *p->at;
    if (c == '#') {
      while (p->at < p->end && *p->at != '\n')
        p->at++;
    } else if (c == ' ' || c == '\t' || c == '\r' || (over_lines && c == '\n')) {
      p->at++;
    } else {
      return;
    }
  }
}

// Skips line ends before a `|`, which continues the rule.
static void skip_to_bar(parser *p) {
  const char *at = p->at;
  skip_space(p, true);
  if (peek(p) != '|') p->at = at;
}

static td_status read_name(parser *p, const char **name, size_t *len) {
  *name = p->at;
  while (p->at < p->end && is_name_char(*p->at))
    p->at++;
  *len = (size_t)(p->at - *name);
  if (*len == 0) return fail(p, TD_EFORMAT, "a rule's name is expected");
  return *len <= MAX_NAME ? TD_OK : fail(p, TD_ELIMIT, "a rule's name is too long");
}

static td_status read_hex(parser *p, unsigned n, uint32_t *out) {
  *out = 0;
  for (unsigned i = 0; i < n; i++) {
    char c = peek(p);
    bool is_digit = c >= '0' && c <= '9';
    char low = (char)(c | 0x20);
    if (!is_digit && !(low >= 'a' && low <= 'f')) {
      return fail(p, TD_EFORMAT, "hexadecimal digits are missing after the backslash");
    }
    *out = *out << 4 | (uint32_t)(is_digit ? c - '0' : low - 'a' + 10);
    p->at++;
  }
  if (*out > LAST_CHAR || (*out >= 0xD800 && *out <= 0xDFFF)) {
    return fail(p, TD_EFORMAT, "an escape is not a character");
  }
  return TD_OK;
}

// One character of a literal or class.
static td_status read_char(parser *p, uint32_t *out) {
  if (p->at == p->end) return fail(p, TD_EFORMAT, "the text ends inside a literal or class");
  char c = *p->at;
  if (c != '\\') {
    int n = td_utf8_decode(p->at, (size_t)(p->end - p->at), out);
    if (n <= 0) return fail(p, TD_EFORMAT, "not valid UTF-8");
    p->at += n;
    return TD_OK;
  }
  p->at++;
  c = peek(p);
  static const char letters[] = "nrt\\\"[]-^./'", meanings[] = "\n\r\t\\\"[]-^./'";
  const char *letter = c ? strchr(letters, c) : NULL;
  if (letter) {
    *out = (unsigned char)meanings[letter - letters];
    p->at++;
    return TD_OK;
  }
  unsigned n = c == 'x' ? 2 : c == 'u' ? 4 : c == 'U' ? 8 : 0;
  if (n == 0) return fail(p, TD_EFORMAT, "an unknown escape");
  p->at++;
  return read_hex(p, n, out);
}

// ---- expressions -------------------------------------------------------------------------------

static td_status read_alternatives(parser *p, bool is_nested, uint32_t *out);

static td_status add_chars(const parser *p, uint32_t first, uint32_t *out) {
  return add_node(
      p, (td_gbnf_node){.kind = TD_GBNF_CHARS, .first = first, .n = p->out->n_ranges - first}, out);
}

static td_status read_literal(parser *p, uint32_t *out) {
  p->at++;
  td_status st = add_node(p, (td_gbnf_node){.kind = TD_GBNF_SEQ}, out);
  uint32_t last = 0;
  while (st == TD_OK && peek(p) != '"') {
    uint32_t c, node = 0, first = p->out->n_ranges;
    st = read_char(p, &c);
    if (st == TD_OK) st = add_range(p, c, c);
    if (st == TD_OK) st = add_chars(p, first, &node);
    if (st != TD_OK) return st;
    *(last ? &p->out->nodes[last].next : &p->out->nodes[*out].child) = node;
    last = node;
  }
  p->at++;
  return st;
}

static int by_low(const void *a, const void *b) {
  const td_gbnf_range *x = a, *y = b;
  return (x->low > y->low) - (x->low < y->low);
}

// Replaces the ranges from first on by all characters outside them.
static td_status complement(parser *p, uint32_t first) {
  td_gbnf *g = p->out;
  uint32_t n = g->n_ranges - first, from = 0;
  td_gbnf_range *given = malloc((n + 1) * sizeof *given);
  if (!given) return td_fail(p->err, TD_ENOMEM, "out of memory for the grammar");
  if (n) memcpy(given, g->ranges + first, n * sizeof *given);
  qsort(given, n, sizeof *given, by_low);
  g->n_ranges = first;
  td_status st = TD_OK;
  for (uint32_t i = 0; i < n && st == TD_OK; i++) {
    if (given[i].low > from) st = add_range(p, from, given[i].low - 1);
    if (given[i].high >= from) from = given[i].high + 1;
  }
  if (st == TD_OK && from <= LAST_CHAR) st = add_range(p, from, LAST_CHAR);
  free(given);
  return st;
}

static td_status read_class(parser *p, uint32_t *out) {
  p->at++;
  uint32_t first = p->out->n_ranges;
  bool is_negated = peek(p) == '^';
  p->at += is_negated;
  td_status st = TD_OK;
  while (st == TD_OK && peek(p) != ']') {
    uint32_t low, high;
    st = read_char(p, &low);
    high = low;
    if (st == TD_OK && peek(p) == '-' && p->at + 1 < p->end && p->at[1] != ']') {
      p->at++;
      st = read_char(p, &high);
    }
    if (st == TD_OK && high < low) st = fail(p, TD_EFORMAT, "a range of a class is reversed");
    if (st == TD_OK) st = add_range(p, low, high);
  }
  if (st == TD_OK && is_negated) st = complement(p, first);
  if (st != TD_OK) return st;
  p->at++;
  return add_chars(p, first, out);
}

static td_status read_number(parser *p, uint32_t *out) {
  uint64_t n = 0;
  if (peek(p) < '0' || peek(p) > '9') return fail(p, TD_EFORMAT, "a count is expected in { }");
  for (; peek(p) >= '0' && peek(p) <= '9'; p->at++) {
    n = n * 10 + (uint64_t)(*p->at - '0');
    if (n > MAX_REPEAT) return fail(p, TD_ELIMIT, "a repetition is too large");
  }
  *out = (uint32_t)n;
  return TD_OK;
}

static td_status read_counts(parser *p, uint32_t *min, uint32_t *max) {
  p->at++;
  skip_space(p, false);
  td_status st = read_number(p, min);
  *max = *min;
  skip_space(p, false);
  if (st == TD_OK && peek(p) == ',') {
    p->at++;
    skip_space(p, false);
    *max = TD_GBNF_MANY;
    if (peek(p) != '}') st = read_number(p, max);
    skip_space(p, false);
  }
  if (st != TD_OK) return st;
  if (peek(p) != '}') return fail(p, TD_EFORMAT, "} is missing");
  p->at++;
  return *max < *min ? fail(p, TD_EFORMAT, "a repetition's counts are reversed") : TD_OK;
}

// The repetitions after an item.
static td_status read_repetitions(parser *p, uint32_t *item) {
  for (;;) {
    char c = peek(p);
    uint32_t min = c == '+', max = c == '?' ? 1 : TD_GBNF_MANY;
    if (c == '{') {
      td_status st = read_counts(p, &min, &max);
      if (st != TD_OK) return st;
    } else if (c == '*' || c == '+' || c == '?') {
      p->at++;
    } else {
      return TD_OK;
    }
    td_status st = add_node(
        p, (td_gbnf_node){.kind = TD_GBNF_REPEAT, .min = min, .max = max, .child = *item}, item);
    if (st != TD_OK) return st;
  }
}

static td_status read_group(parser *p, uint32_t *out) {
  p->at++;
  if (++p->depth > MAX_NESTING) return fail(p, TD_ELIMIT, "groups are nested too deep");
  td_status st = read_alternatives(p, true, out);
  if (st == TD_OK && peek(p) != ')') st = fail(p, TD_EFORMAT, ") is missing");
  p->at++;
  p->depth--;
  return st;
}

// A name, unless it begins the next rule. *out is 0 then.
static td_status read_reference(parser *p, uint32_t *out) {
  const char *name, *begin = p->at;
  size_t len;
  uint32_t rule;
  *out = 0;
  td_status st = read_name(p, &name, &len);
  if (st != TD_OK) return st;
  const char *after = p->at;
  skip_space(p, false);
  if (p->end - p->at >= 3 && memcmp(p->at, "::=", 3) == 0) {
    p->at = begin;
    return TD_OK;
  }
  p->at = after;
  st = find_rule(p, name, len, &rule);
  return st == TD_OK ? add_node(p, (td_gbnf_node){.kind = TD_GBNF_RULE, .first = rule}, out) : st;
}

// *out is 0 if no item begins here.
static td_status read_item(parser *p, uint32_t *out) {
  char c = peek(p);
  uint32_t first = p->out->n_ranges;
  td_status st;
  *out = 0;
  if (c == '"') {
    st = read_literal(p, out);
  } else if (c == '[') {
    st = read_class(p, out);
  } else if (c == '(') {
    st = read_group(p, out);
  } else if (c == '.' && !(p->at + 1 < p->end && is_name_char(p->at[1]))) {
    p->at++;
    st = add_range(p, 0, LAST_CHAR);
    if (st == TD_OK) st = add_chars(p, first, out);
  } else if (c && is_name_char(c)) {
    st = read_reference(p, out);
  } else {
    return TD_OK;
  }
  return st == TD_OK && *out ? read_repetitions(p, out) : st;
}

static td_status read_sequence(parser *p, bool is_nested, uint32_t *out) {
  td_status st = add_node(p, (td_gbnf_node){.kind = TD_GBNF_SEQ}, out);
  uint32_t last = 0, item;
  while (st == TD_OK) {
    skip_space(p, is_nested);
    st = read_item(p, &item);
    if (st != TD_OK || !item) break;
    *(last ? &p->out->nodes[last].next : &p->out->nodes[*out].child) = item;
    last = item;
  }
  return st;
}

static td_status read_alternatives(parser *p, bool is_nested, uint32_t *out) {
  uint32_t last = 0, sequence;
  td_status st = add_node(p, (td_gbnf_node){.kind = TD_GBNF_ALT}, out);
  while (st == TD_OK) {
    st = read_sequence(p, is_nested, &sequence);
    if (st != TD_OK) return st;
    *(last ? &p->out->nodes[last].next : &p->out->nodes[*out].child) = sequence;
    last = sequence;
    skip_to_bar(p);
    if (peek(p) != '|') return TD_OK;
    p->at++;
    skip_space(p, true);
  }
  return st;
}

static td_status read_rule(parser *p) {
  const char *name;
  size_t len;
  uint32_t rule, body = 0;
  td_status st = read_name(p, &name, &len);
  if (st != TD_OK) return st;
  skip_space(p, false);
  if (p->end - p->at < 3 || memcmp(p->at, "::=", 3) != 0) {
    return fail(p, TD_EFORMAT, "::= is expected after a rule's name");
  }
  p->at += 3;
  st = find_rule(p, name, len, &rule);
  if (st == TD_OK && p->out->rules[rule].body) {
    st = fail(p, TD_EFORMAT, "a rule is defined twice");
  }
  skip_space(p, true);
  if (st == TD_OK) st = read_alternatives(p, false, &body);
  if (st != TD_OK) return st;
  p->out->rules[rule].body = body;
  skip_space(p, false);
  return p->at == p->end || *p->at == '\n' ? TD_OK : fail(p, TD_EFORMAT, "unexpected character");
}

td_status td_gbnf_parse(td_gbnf *out, const char *text, size_t len, td_err *err) {
  *out = (td_gbnf){0};
  parser p = {.out = out, .begin = text, .at = text, .end = text + len, .err = err};
  td_status st = TD_OK;
  for (;;) {
    skip_space(&p, true);
    if (p.at == p.end) break;
    st = read_rule(&p);
    if (st != TD_OK) return st;
  }
  for (uint32_t i = 0; i < out->n_rules; i++) {
    if (out->rules[i].body) continue;
    return td_fail(err, TD_EFORMAT, "grammar: the rule %s is used but not defined",
                   out->rules[i].name);
  }
  return TD_OK;
}
