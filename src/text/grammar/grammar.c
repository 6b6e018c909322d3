// src/text/grammar/grammar.c - from the syntax tree to one automaton a rule. States are made from
// the end of a rule to its beginning: each part is given the state that follows it.
#include "text/grammar/grammar.h"

#include <stdlib.h>
#include <string.h>

#include "base/grow.h"
#include "base/utf8.h"
#include "text/grammar/gbnf.h"
#include "text/grammar/grammar_impl.h"

#define MAX_STATES (1u << 19)
#define MAX_DEPTH  512

typedef struct {
  td_grammar *out;
  const td_gbnf *tree;
  unsigned depth;
  td_err *err;
} builder;

void td_grammar_close(td_grammar *grammar) {
  if (!grammar) return;
  free(grammar->states);
  free(grammar->starts);
  free(grammar);
}

// 0 when there is no room for one more; the error is then set.
static uint32_t add_state(const builder *b, td_nfa_state state) {
  td_grammar *g = b->out;
  if (g->n_states == MAX_STATES) {
    td_fail(b->err, TD_ELIMIT,
            "the grammar is too large: it needs more than %u states; make lengths, counts or "
            "repetitions smaller",
            MAX_STATES);
    return 0;
  }
  if (!TD_GROW(g->states, g->n_states, g->cap, 256)) {
    td_fail(b->err, TD_ENOMEM, "out of memory for the grammar");
    return 0;
  }
  g->states[g->n_states] = state;
  return g->n_states++;
}

static uint32_t add_bytes(const builder *b, uint8_t low, uint8_t high, uint32_t next) {
  if (!next) return 0;
  return add_state(b, (td_nfa_state){.kind = TD_NFA_BYTES, .low = low, .high = high, .next = next});
}

static uint32_t add_split(const builder *b, uint32_t next, uint32_t other) {
  if (!next || !other) return 0;
  return add_state(b, (td_nfa_state){.kind = TD_NFA_SPLIT, .next = next, .other = other});
}

// ---- characters --------------------------------------------------------------------------------

// The alternatives of a class, while they are collected.
typedef struct {
  const builder *b;
  uint32_t next;
  uint32_t tails[4]; // states for i continuation bytes, then next; 0: not made yet
  uint32_t first;    // the alternatives so far; 0: none
  bool failed;
} class;

static void add_alternative(class *c, uint32_t state) {
  if (state && c->first) state = add_split(c->b, state, c->first);
  c->failed |= !state;
  c->first = state;
}

static uint32_t tail(class *c, unsigned n) {
  if (n == 0) return c->next;
  if (!c->tails[n]) c->tails[n] = add_bytes(c->b, 0x80, 0xBF, tail(c, n - 1));
  return c->tails[n];
}

static bool are_all(const uint8_t *bytes, unsigned n, uint8_t value) {
  for (unsigned i = 0; i < n; i++) {
    if (bytes[i] != value) return false;
  }
  return true;
}

// The texts between low and high, both of n bytes, n <= 4, as alternatives behind the bytes of
// `before` [n_before].
static void add_span(class *c, const uint8_t *low, const uint8_t *high, unsigned n,
                     const uint8_t *before, unsigned n_before) {
  if (c->failed) return;
  uint8_t prefix[4], edge[4], from = low[0], to = high[0];
  memcpy(prefix, before, n_before);
  if (n > 1 && from == to) {
    prefix[n_before] = from;
    add_span(c, low + 1, high + 1, n - 1, prefix, n_before + 1);
    return;
  }
  if (n > 1 && !are_all(low + 1, n - 1, 0x80)) {
    prefix[n_before] = from++;
    memset(edge, 0xBF, sizeof edge);
    add_span(c, low + 1, edge, n - 1, prefix, n_before + 1);
  }
  if (n > 1 && !are_all(high + 1, n - 1, 0xBF)) {
    prefix[n_before] = to--;
    memset(edge, 0x80, sizeof edge);
    add_span(c, edge, high + 1, n - 1, prefix, n_before + 1);
  }
  if (from > to || c->failed) return;
  uint32_t state = add_bytes(c->b, from, to, tail(c, n - 1));
  for (unsigned i = n_before; i-- > 0;)
    state = add_bytes(c->b, before[i], before[i], state);
  add_alternative(c, state);
}

static void add_chars(class *c, uint32_t low, uint32_t high) {
  static const uint32_t last_of_length[] = {0x7F, 0x7FF, 0xD7FF, 0xFFFF, 0x10FFFF};
  for (size_t i = 0; i < TD_COUNT(last_of_length) && low <= high; i++) {
    if (low == 0xD800) low = 0xE000; // no surrogates
    if (low > last_of_length[i] || low > high) continue;
    if (low > 0xD7FF && low < 0xE000) low = 0xE000;
    uint32_t last = high < last_of_length[i] ? high : last_of_length[i];
    if (last >= 0xD800 && last < 0xE000) last = 0xD7FF;
    char from[4], to[4];
    const uint8_t none[1] = {0};
    if (last >= low) {
      int n = td_utf8_encode(low, from);
      td_utf8_encode(last, to);
      add_span(c, (const uint8_t *)from, (const uint8_t *)to, (unsigned)n, none, 0);
    }
    low = last_of_length[i] + 1;
  }
}

static uint32_t emit_chars(const builder *b, const td_gbnf_node *node, uint32_t next) {
  class c = {.b = b, .next = next};
  for (uint32_t i = 0; i < node->n; i++) {
    const td_gbnf_range *range = &b->tree->ranges[node->first + i];
    add_chars(&c, range->low, range->high);
  }
  if (c.failed) return 0;
  return c.first ? c.first : add_state(b, (td_nfa_state){.kind = TD_NFA_DEAD});
}

// ---- expressions -------------------------------------------------------------------------------

static uint32_t emit(builder *b, uint32_t node, uint32_t next);

static uint32_t emit_children(builder *b, const td_gbnf_node *node, uint32_t next) {
  uint32_t child = node->child, first = 0;
  if (node->kind == TD_GBNF_ALT) {
    for (; child; child = b->tree->nodes[child].next) {
      uint32_t state = emit(b, child, next);
      first = first ? add_split(b, state, first) : state;
      if (!first) return 0;
    }
    return first;
  }
  uint32_t n = 0, *order;
  for (uint32_t i = child; i; i = b->tree->nodes[i].next)
    n++;
  order = malloc((n + 1) * sizeof *order);
  if (!order) {
    td_fail(b->err, TD_ENOMEM, "out of memory for the grammar");
    return 0;
  }
  for (uint32_t i = 0; i < n; i++, child = b->tree->nodes[child].next)
    order[i] = child;
  while (n && next)
    next = emit(b, order[--n], next);
  free(order);
  return next;
}

static uint32_t emit_repeat(builder *b, const td_gbnf_node *node, uint32_t next) {
  const uint32_t min = node->min, max = node->max, child = node->child, after = next;
  if (max == TD_GBNF_MANY) {
    uint32_t loop = add_split(b, next, next);
    uint32_t state = loop ? emit(b, child, loop) : 0;
    if (!state) return 0;
    b->out->states[loop].next = state;
    next = loop;
  } else {
    for (uint32_t i = min; i < max && next; i++) {
      uint32_t state = emit(b, child, next);
      next = state ? add_split(b, state, after) : 0;
    }
  }
  for (uint32_t i = 0; i < min && next; i++)
    next = emit(b, child, next);
  return next;
}

// The state at which the node begins; after it comes next. 0: failed.
static uint32_t emit(builder *b, uint32_t index, uint32_t next) {
  const td_gbnf_node *node = &b->tree->nodes[index];
  if (b->depth == MAX_DEPTH) {
    td_fail(b->err, TD_ELIMIT, "the grammar is nested too deep");
    return 0;
  }
  b->depth++;
  uint32_t state = 0;
  switch (node->kind) {
  case TD_GBNF_CHARS: state = emit_chars(b, node, next); break;
  case TD_GBNF_RULE:
    state = add_state(b, (td_nfa_state){.kind = TD_NFA_CALL, .next = next, .other = node->first});
    break;
  case TD_GBNF_REPEAT: state = emit_repeat(b, node, next); break;
  default: state = emit_children(b, node, next); break;
  }
  b->depth--;
  return state;
}

static td_status emit_rules(builder *b) {
  td_grammar *g = b->out;
  g->n_rules = b->tree->n_rules;
  g->starts = calloc(g->n_rules + 1, sizeof *g->starts);
  if (!g->starts) return td_fail(b->err, TD_ENOMEM, "out of memory for the grammar");
  b->err->code = TD_OK;
  add_state(b, (td_nfa_state){.kind = TD_NFA_DEAD}); // state 0
  for (uint32_t i = 0; i < g->n_rules; i++) {
    uint32_t end = add_state(b, (td_nfa_state){.kind = TD_NFA_MATCH});
    g->starts[i] = end ? emit(b, b->tree->rules[i].body, end) : 0;
    if (!g->starts[i]) return b->err->code;
  }
  return TD_OK;
}

// ---- checks ------------------------------------------------------------------------------------

// Marks the states from which the rule's end can be reached; without_text: without consuming
// anything.
static void mark(const td_grammar *g, bool *marks, bool without_text) {
  bool has_changed = true;
  while (has_changed) {
    has_changed = false;
    for (uint32_t i = 0; i < g->n_states; i++) {
      const td_nfa_state *s = &g->states[i];
      if (marks[i]) continue;
      switch (s->kind) {
      case TD_NFA_BYTES: marks[i] = !without_text && marks[s->next]; break;
      case TD_NFA_SPLIT: marks[i] = marks[s->next] || marks[s->other]; break;
      case TD_NFA_CALL: marks[i] = marks[s->next] && marks[g->starts[s->other]]; break;
      case TD_NFA_MATCH: marks[i] = true; break;
      default: break;
      }
      has_changed |= marks[i];
    }
  }
}

typedef struct {
  const td_grammar *g;
  const bool *nullable; // of states
  bool *seen;           // of states
  uint8_t *color;       // of rules: 0 new, 1 being visited, 2 done
  uint32_t *todo;       // states to visit and, with the highest bit set, rules to leave
  uint32_t n_todo;
} search;

// Depth first over what rules can begin with. Returns a rule that begins with itself, or n_rules.
static uint32_t find_left_recursion(search *s) {
  const td_grammar *g = s->g;
  for (uint32_t rule = 0; rule < g->n_rules; rule++) {
    if (s->color[rule]) continue;
    s->color[rule] = 1;
    s->todo[s->n_todo++] = rule | 1u << 31;
    s->todo[s->n_todo++] = g->starts[rule];
    while (s->n_todo) {
      uint32_t at = s->todo[--s->n_todo];
      if (at >> 31) {
        s->color[at & ~(1u << 31)] = 2;
        continue;
      }
      const td_nfa_state *state = &g->states[at];
      if (s->seen[at] || state->kind == TD_NFA_BYTES || !state->is_live) continue;
      s->seen[at] = true;
      if (state->kind == TD_NFA_SPLIT) s->todo[s->n_todo++] = state->other;
      bool should_continue = state->kind == TD_NFA_SPLIT;
      if (state->kind == TD_NFA_CALL) should_continue = s->nullable[g->starts[state->other]];
      if (should_continue) s->todo[s->n_todo++] = state->next;
      if (state->kind != TD_NFA_CALL) continue;
      if (s->color[state->other] == 1) return state->other;
      if (s->color[state->other] == 2) continue;
      s->color[state->other] = 1;
      s->todo[s->n_todo++] = state->other | 1u << 31;
      s->todo[s->n_todo++] = g->starts[state->other];
    }
  }
  return g->n_rules;
}

static td_status check_rules(builder *b) {
  td_grammar *g = b->out;
  bool *marks = calloc(g->n_states, sizeof *marks), *nullable = calloc(g->n_states, 1);
  search s = {.g = g,
              .nullable = nullable,
              .seen = calloc(g->n_states, 1),
              .color = calloc(g->n_rules + 1, 1),
              .todo = malloc(((size_t)3 * g->n_states + 2 * g->n_rules + 2) * sizeof *s.todo)};
  td_status st = TD_OK;
  if (!marks || !nullable || !s.seen || !s.color || !s.todo) {
    st = td_fail(b->err, TD_ENOMEM, "out of memory for the grammar");
  } else {
    mark(g, marks, false);
    mark(g, nullable, true);
    for (uint32_t i = 0; i < g->n_states; i++)
      g->states[i].is_live = marks[i];
    uint32_t rule = find_left_recursion(&s);
    if (rule < g->n_rules) {
      st = td_fail(b->err, TD_EUNSUPPORTED,
                   "grammar: the rule %s begins with itself (left recursion)",
                   b->tree->rules[rule].name);
    } else if (!marks[g->starts[g->root]]) {
      st = td_fail(b->err, TD_EFORMAT, "no text satisfies it");
    }
  }
  free(marks);
  free(nullable);
  free(s.seen);
  free(s.color);
  free(s.todo);
  return st;
}

static td_status find_root(builder *b) {
  static const char *const names[] = {".root", "root"};
  for (size_t k = 0; k < TD_COUNT(names); k++) {
    for (uint32_t i = 0; i < b->tree->n_rules; i++) {
      b->out->root = i;
      if (strcmp(b->tree->rules[i].name, names[k]) == 0) return TD_OK;
    }
  }
  return td_fail(b->err, TD_EFORMAT, "grammar: there is no rule named root");
}

td_status td_grammar_open(td_grammar **out, const char *text, size_t len, td_err *err) {
  td_gbnf tree;
  *out = NULL;
  if (len > TD_GRAMMAR_MAX_BYTES) {
    return td_fail(err, TD_ELIMIT, "the grammar has %zu bytes; at most %u are allowed", len,
                   TD_GRAMMAR_MAX_BYTES);
  }
  td_grammar *g = calloc(1, sizeof *g);
  if (!g) return td_fail(err, TD_ENOMEM, "out of memory for the grammar");
  td_status st = td_gbnf_parse(&tree, text, len, err);
  builder b = {.out = g, .tree = &tree, .err = err};
  if (st == TD_OK) st = find_root(&b);
  if (st == TD_OK) st = emit_rules(&b);
  if (st == TD_OK) st = check_rules(&b);
  td_gbnf_free(&tree);
  if (st != TD_OK) {
    td_grammar_close(g);
    return st;
  }
  *out = g;
  return TD_OK;
}
