// src/text/grammar/gbnf.c - GBNF text to nodes. It is llama.cpp's notation: rules `name ::=
// alternatives`, literals "..", classes [..], `.`, groups, and the repetitions * + ? {n} {n,}
// {n,m}. `[]` is the empty class, which nothing matches. Groups are kept on a stack of their own,
// so that no text needs a deep one.
#include <stdlib.h>
#include <string.h>

#include "base/grow.h"
#include "base/utf8.h"
#include "text/grammar/build_impl.h"

#define MAX_NESTING 128
#define MAX_NAME    128
#define MAX_REPEAT  (1u << 20)

// A rule by its name.
typedef struct {
  const char *name; // in the text; NULL: an empty slot
  uint32_t len, hash;
  td_rule rule;
  bool is_defined;
} named_rule;

typedef struct {
  td_grammar_build *b;
  const char *begin, *at, *end;
  const td_node *args; // what $0 and so on stand for; NULL: nothing, and there are names
  named_rule *names;   // hash table
  uint32_t n_names, n_slots;
  td_err *err;
} parser;

static td_status fail(const parser *p, td_status code, const char *what) {
  unsigned line = 1;
  for (const char *c = p->begin; c < p->at; c++)
    line += *c == '\n';
  return td_fail(p->err, code, "grammar, line %u: %s", line, what);
}

// ---- names -------------------------------------------------------------------------------------

static uint32_t hash_of(const char *name, size_t len) {
  uint32_t hash = 2166136261u; // FNV-1a
  for (size_t i = 0; i < len; i++)
    hash = (hash ^ (unsigned char)name[i]) * 16777619u;
  return hash;
}

static bool grow_names(parser *p) {
  if (2 * (p->n_names + 1) <= p->n_slots) return true;
  const uint32_t n = p->n_slots ? 2 * p->n_slots : 64;
  named_rule *slots = td_budget_take(p->b->budget, n * sizeof *slots) ? calloc(n, sizeof *slots)
                                                                      : NULL;
  if (!slots) {
    td_g_fail(p->b, p->b->budget->status != TD_OK ? p->b->budget->status : TD_ENOMEM);
    return false;
  }
  for (uint32_t i = 0; i < p->n_slots; i++) {
    uint32_t at = p->names[i].hash & (n - 1);
    while (p->names[i].name && slots[at].name)
      at = (at + 1) & (n - 1);
    if (p->names[i].name) slots[at] = p->names[i];
  }
  free(p->names);
  p->names = slots;
  p->n_slots = n;
  return true;
}

// The rule of that name, which is added if there is none yet. NULL: building has failed.
static named_rule *find_rule(parser *p, const char *name, size_t len) {
  const uint32_t hash = hash_of(name, len);
  if (!grow_names(p)) return NULL;
  uint32_t at = hash & (p->n_slots - 1);
  for (; p->names[at].name; at = (at + 1) & (p->n_slots - 1)) {
    const named_rule *r = &p->names[at];
    if (!td_budget_step(p->b->budget, 1)) break;
    if (r->hash == hash && r->len == len && memcmp(r->name, name, len) == 0) return &p->names[at];
  }
  const td_rule rule = td_g_rule(p->b);
  td_g_name(p->b, rule, name, len);
  if (td_grammar_build_status(p->b, NULL) != TD_OK) return NULL;
  p->n_names++;
  p->names[at] = (named_rule){.name = name, .len = (uint32_t)len, .hash = hash, .rule = rule};
  return &p->names[at];
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
    if (c == '#')
      while (p->at < p->end && *p->at != '\n')
        p->at++;
    else if (c == ' ' || c == '\t' || c == '\r' || (over_lines && c == '\n'))
      p->at++;
    else
      return;
  }
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
    if (!is_digit && !(low >= 'a' && low <= 'f'))
      return fail(p, TD_EFORMAT, "hexadecimal digits are missing after the backslash");
    *out = *out << 4 | (uint32_t)(is_digit ? c - '0' : low - 'a' + 10);
    p->at++;
  }
  if (*out > TD_G_LAST_CHAR || (*out >= 0xD800 && *out <= 0xDFFF))
    return fail(p, TD_EFORMAT, "an escape is not a character");
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

// ---- items -------------------------------------------------------------------------------------

static td_status read_literal(parser *p, td_node *out) {
  const size_t list = td_g_begin(p->b);
  td_status st = TD_OK;
  const char *from = ++p->at; // of characters that stand for themselves
  while (st == TD_OK && peek(p) != '"') {
    const char *at = p->at;
    uint32_t c;
    char bytes[4];
    st = read_char(p, &c);
    if (st != TD_OK || *at != '\\') continue;
    td_g_add(p->b, td_g_text(p->b, from, (size_t)(at - from)));
    td_g_add(p->b, td_g_text(p->b, bytes, (size_t)td_utf8_encode(c, bytes)));
    from = p->at;
  }
  td_g_add(p->b, td_g_text(p->b, from, st == TD_OK ? (size_t)(p->at - from) : 0));
  *out = td_g_end_seq(p->b, list);
  p->at++;
  return st;
}

static td_status read_class(parser *p, td_node *out) {
  td_char_range *ranges = NULL;
  size_t n = 0, cap = 0;
  p->at++;
  const bool is_negated = peek(p) == '^';
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
    if (st == TD_OK && !TD_GROW(ranges, n, cap, 8)) {
      td_g_fail(p->b, TD_ENOMEM);
      st = td_grammar_build_status(p->b, p->err);
    }
    if (st == TD_OK) ranges[n++] = (td_char_range){low, high};
  }
  p->at++;
  if (st == TD_OK)
    *out = is_negated ? td_g_chars_but(p->b, ranges, n) : td_g_chars(p->b, ranges, n);
  free(ranges);
  return st;
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
    *max = TD_G_MANY;
    if (peek(p) != '}') st = read_number(p, max);
    skip_space(p, false);
  }
  if (st != TD_OK) return st;
  if (peek(p) != '}') return fail(p, TD_EFORMAT, "} is missing");
  p->at++;
  return *max < *min ? fail(p, TD_EFORMAT, "a repetition's counts are reversed") : TD_OK;
}

// The repetitions after an item.
static td_status read_repetitions(parser *p, td_node *item) {
  for (;;) {
    const char c = peek(p);
    uint32_t min = c == '+', max = c == '?' ? 1 : TD_G_MANY;
    if (c == '{') {
      td_status st = read_counts(p, &min, &max);
      if (st != TD_OK) return st;
    } else if (c == '*' || c == '+' || c == '?') {
      p->at++;
    } else {
      return TD_OK;
    }
    *item = td_g_repeat(p->b, *item, min, max);
  }
}

// A name, unless it begins the next rule: *is_item is false then.
static td_status read_reference(parser *p, td_node *out, bool *is_item) {
  const char *name, *begin = p->at;
  size_t len;
  td_status st = read_name(p, &name, &len);
  if (st != TD_OK) return st;
  const char *after = p->at;
  skip_space(p, false);
  *is_item = p->end - p->at < 3 || memcmp(p->at, "::=", 3) != 0;
  p->at = *is_item ? after : begin;
  const named_rule *rule = *is_item ? find_rule(p, name, len) : NULL;
  if (rule) *out = td_g_call(p->b, rule->rule);
  return TD_OK;
}

// An item that is not a group. *is_item: one begins here.
static td_status read_item(parser *p, td_node *out, bool *is_item) {
  const char c = peek(p);
  *is_item = true;
  if (c == '"') return read_literal(p, out);
  if (c == '[') return read_class(p, out);
  if (c == '.' && !(p->at + 1 < p->end && is_name_char(p->at[1]))) {
    p->at++;
    *out = td_g_range(p->b, 0, TD_G_LAST_CHAR);
    return TD_OK;
  }
  if (c == '$' && p->args) {
    *out = p->args[p->at[1] - '0'];
    p->at += 2;
    return TD_OK;
  }
  if (c && is_name_char(c) && !p->args) return read_reference(p, out, is_item);
  *is_item = false;
  return TD_OK;
}

// ---- expressions -------------------------------------------------------------------------------

// The lists of a group: its alternatives, and the items of the last of them.
typedef struct {
  size_t alternatives, items;
} group;

static group open_group(parser *p) {
  const size_t at = td_g_begin(p->b);
  return (group){at, at};
}

// Makes the items the last alternative.
static void end_sequence(parser *p, group *g) {
  td_g_add(p->b, td_g_end_seq(p->b, g->items));
  g->items = td_g_begin(p->b);
}

static td_status read_alternatives(parser *p, td_node *out) {
  group groups[MAX_NESTING + 1];
  unsigned depth = 0;
  groups[0] = open_group(p);
  for (td_status st = TD_OK;; st = TD_OK) {
    td_node item = TD_NODE_NEVER;
    bool is_item = true;
    skip_space(p, depth > 0 || p->args);
    if (!td_budget_step(p->b->budget, 1)) return td_grammar_build_status(p->b, p->err);
    if (peek(p) == '(') {
      if (depth == MAX_NESTING) return fail(p, TD_ELIMIT, "groups are nested too deep");
      p->at++;
      groups[++depth] = open_group(p);
      continue;
    }
    if (peek(p) == ')' && depth) {
      p->at++;
      end_sequence(p, &groups[depth]);
      item = td_g_end_any(p->b, groups[depth--].alternatives);
    } else {
      st = read_item(p, &item, &is_item);
    }
    if (st == TD_OK && is_item) {
      st = read_repetitions(p, &item);
      td_g_add(p->b, item);
    }
    if (st != TD_OK) return st;
    if (is_item) continue;
    const char *at = p->at;
    skip_space(p, true); // line ends before a `|`, which continues the rule
    if (peek(p) != '|') {
      p->at = at;
      break;
    }
    p->at++;
    end_sequence(p, &groups[depth]);
    skip_space(p, true);
  }
  if (depth) return fail(p, TD_EFORMAT, ") is missing");
  end_sequence(p, &groups[0]);
  *out = td_g_end_any(p->b, groups[0].alternatives);
  return td_grammar_build_status(p->b, p->err);
}

static td_status read_rule(parser *p) {
  const char *name;
  size_t len;
  td_node body;
  td_status st = read_name(p, &name, &len);
  if (st != TD_OK) return st;
  skip_space(p, false);
  if (p->end - p->at < 3 || memcmp(p->at, "::=", 3) != 0)
    return fail(p, TD_EFORMAT, "::= is expected after a rule's name");
  p->at += 3;
  named_rule *named = find_rule(p, name, len);
  if (!named) return td_grammar_build_status(p->b, p->err);
  if (named->is_defined) return fail(p, TD_EFORMAT, "a rule is defined twice");
  named->is_defined = true;
  const td_rule rule = named->rule; // the table may move
  skip_space(p, true);
  st = read_alternatives(p, &body);
  if (st != TD_OK) return st;
  td_g_define(p->b, rule, body);
  skip_space(p, false);
  return p->at == p->end || *p->at == '\n' ? TD_OK : fail(p, TD_EFORMAT, "unexpected character");
}

static td_status read_rules(parser *p, td_node *root) {
  for (;;) {
    skip_space(p, true);
    if (p->at == p->end) break;
    td_status st = read_rule(p);
    if (st != TD_OK) return st;
  }
  const named_rule *first = NULL;
  for (uint32_t i = 0; i < p->n_slots; i++) {
    const named_rule *r = &p->names[i];
    if (r->name && !r->is_defined && (!first || r->rule < first->rule)) first = r;
  }
  if (first) {
    return td_fail(p->err, TD_EFORMAT, "grammar: the rule %.*s is used but not defined",
                   (int)first->len, first->name);
  }
  const uint32_t n_rules = p->n_names;
  const named_rule *named = find_rule(p, "root", 4);
  if (!named) return td_grammar_build_status(p->b, p->err);
  if (p->n_names > n_rules) return td_fail(p->err, TD_EFORMAT, "grammar: no rule named root");
  *root = td_g_call(p->b, named->rule);
  return td_grammar_build_status(p->b, p->err);
}

td_status td_g_parse(td_node *root, td_grammar_build *b, const char *text, size_t len,
                     td_err *err) {
  parser p = {.b = b, .begin = text, .at = text, .end = text + len, .err = err};
  const size_t list = td_g_begin(b);
  *root = TD_NODE_NEVER;
  td_status st = td_budget_step(b->budget, len) ? read_rules(&p, root)
                                                : td_grammar_build_status(b, err);
  free(p.names);
  td_g_end_any(b, list); // what a failure has left
  return st;
}

td_node td_g_gbnf(td_grammar_build *b, const char *expression, const td_node *args) {
  static const td_node none[1];
  td_err err;
  td_node out = TD_NODE_NEVER;
  parser p = {.b = b,
              .begin = expression,
              .at = expression,
              .end = expression + strlen(expression),
              .args = args ? args : none,
              .err = &err};
  const td_status st = read_alternatives(&p, &out);
  TD_CHECK(b->status != TD_OK || b->budget->status != TD_OK || (st == TD_OK && p.at == p.end));
  return out;
}
