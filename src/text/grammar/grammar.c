// src/text/grammar/grammar.c - from nodes to one automaton a rule. States are made from the end of
// a rule to its beginning: each part is given the state that follows it.
#include "text/grammar/grammar.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "base/grow.h"
#include "base/utf8.h"
#include "text/grammar/build_impl.h"
#include "text/grammar/grammar_impl.h"

// A compiled grammar: this, starts [n_rules] as uint32_t, states [n_states] as td_nfa_state.
typedef struct {
  uint32_t magic, n_states, n_rules, root;
} header;

#define MAGIC      0x31474454u // "TDG1"
#define MAX_STATES (1u << 18)

static_assert(sizeof(td_nfa_state) == 12, "states are sent as they are");
static_assert(sizeof(header) + MAX_STATES * (sizeof(td_nfa_state) + 4) == TD_GRAMMAR_MAX_BYTES,
              "a rule has at least one state");

// ---- opening -----------------------------------------------------------------------------------

void td_grammar_close(td_grammar *grammar) {
  free(grammar);
}

static bool is_valid(const td_grammar *g) {
  for (uint32_t i = 0; i < g->n_rules; i++)
    if (g->starts[i] >= g->n_states) return false;
  for (uint32_t i = 0; i < g->n_states; i++) {
    const td_nfa_state *s = &g->states[i];
    const uint32_t n_other = s->kind == TD_NFA_CALL ? g->n_rules : g->n_states;
    if (s->kind > TD_NFA_MATCH || s->is_live > 1 || s->next >= g->n_states || s->other >= n_other)
      return false;
  }
  return true;
}

td_status td_grammar_open(td_grammar **out, const void *bytes, size_t len, td_err *err) {
  header h;
  *out = NULL;
  if (len > TD_GRAMMAR_MAX_BYTES || len < sizeof h) goto malformed;
  memcpy(&h, bytes, sizeof h);
  if (h.magic != MAGIC || !h.n_states || h.root >= h.n_rules ||
      len != sizeof h + (uint64_t)h.n_rules * 4 + (uint64_t)h.n_states * sizeof(td_nfa_state))
    goto malformed;
  td_grammar *g = malloc(sizeof *g);
  if (!g) return td_fail(err, TD_ENOMEM, "out of memory for the grammar");
  const uint32_t *starts = (const uint32_t *)((const char *)bytes + sizeof h);
  *g = (td_grammar){.states = (const td_nfa_state *)(starts + h.n_rules),
                    .n_states = h.n_states,
                    .starts = starts,
                    .n_rules = h.n_rules,
                    .root = h.root};
  if (is_valid(g)) {
    *out = g;
    return TD_OK;
  }
  td_grammar_close(g);
malformed:
  return td_fail(err, TD_EFORMAT, "malformed grammar");
}

// ---- states ------------------------------------------------------------------------------------

typedef struct {
  td_grammar_build *tree;
  td_nfa_state *states; // state 0 is DEAD
  uint32_t n_states;
  size_t cap;
  uint32_t *starts;    // [n_rules]: 0: not made yet
  uint32_t *number_of; // [tree's rules]: a rule's number + 1; 0: it is not used
  td_rule *rules;      // [n_rules]: those that are used
  uint32_t n_rules;
} compiler;

// 0 when there is no room for one more.
static uint32_t add_state(compiler *b, td_nfa_state state) {
  if (b->n_states == MAX_STATES) td_g_fail(b->tree, TD_ELIMIT);
  if (b->tree->status != TD_OK) return 0;
  if (!TD_GROW(b->states, b->n_states, b->cap, 256)) {
    td_g_fail(b->tree, TD_ENOMEM);
    return 0;
  }
  b->states[b->n_states] = state;
  return b->n_states++;
}

static uint32_t add_bytes(compiler *b, uint8_t low, uint8_t high, uint32_t next) {
  if (!next) return 0;
  return add_state(b, (td_nfa_state){.kind = TD_NFA_BYTES, .low = low, .high = high, .next = next});
}

static uint32_t add_split(compiler *b, uint32_t next, uint32_t other) {
  if (!next || !other) return 0;
  return add_state(b, (td_nfa_state){.kind = TD_NFA_SPLIT, .next = next, .other = other});
}

// The number of a rule in the compiled grammar.
static uint32_t number_of(compiler *b, td_rule rule) {
  if (!b->number_of[rule]) {
    b->rules[b->n_rules] = rule;
    b->number_of[rule] = ++b->n_rules;
  }
  return b->number_of[rule] - 1;
}

// ---- characters --------------------------------------------------------------------------------

// The alternatives of a class, while they are collected.
typedef struct {
  compiler *b;
  uint32_t next;
  uint32_t tails[4]; // states for i continuation bytes, then next; 0: not made yet
  uint32_t first;    // the alternatives so far; 0: none
  bool failed;
} class;

static uint32_t tail(class *c, unsigned n) {
  if (n == 0) return c->next;
  if (!c->tails[n]) c->tails[n] = add_bytes(c->b, 0x80, 0xBF, tail(c, n - 1));
  return c->tails[n];
}

static bool are_all(const uint8_t *bytes, unsigned n, uint8_t value) {
  for (unsigned i = 0; i < n; i++)
    if (bytes[i] != value) return false;
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
  if (state && c->first) state = add_split(c->b, state, c->first);
  c->failed |= !state;
  c->first = state;
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

static uint32_t emit_chars(compiler *b, const td_g_node *node, uint32_t next) {
  class c = {.b = b, .next = next};
  for (uint32_t i = 0; i < node->n && !c.failed; i++) {
    const td_char_range *range = &b->tree->ranges[node->first + i];
    add_chars(&c, range->low, range->high);
  }
  if (c.failed) return 0;
  return c.first ? c.first : add_state(b, (td_nfa_state){.kind = TD_NFA_DEAD});
}

// ---- nodes -------------------------------------------------------------------------------------

static uint32_t emit(compiler *b, td_node node, uint32_t next);

static uint32_t emit_repeat(compiler *b, const td_g_node *node, uint32_t next) {
  const uint32_t min = node->min, max = node->max, after = next;
  const td_node child = node->first;
  if (max == TD_G_MANY) {
    const uint32_t loop = add_split(b, next, next), state = emit(b, child, loop);
    if (!state) return 0;
    b->states[loop].next = state;
    next = loop;
  } else {
    for (uint32_t i = min; i < max && next; i++)
      next = add_split(b, emit(b, child, next), after);
  }
  for (uint32_t i = 0; i < min && next; i++)
    next = emit(b, child, next);
  return next;
}

// The state at which the node begins; after it comes next. 0: failed. Depth: TD_G_MAX_DEPTH.
static uint32_t emit(compiler *b, td_node index, uint32_t next) {
  const td_grammar_build *tree = b->tree;
  const td_g_node *node = &tree->nodes[index];
  uint32_t first = 0;
  if (!td_budget_step(tree->budget, 1)) td_g_fail(b->tree, tree->budget->status);
  if (!next || tree->status != TD_OK) return 0;
  switch (node->kind) {
  case TD_G_EMPTY: return next;
  case TD_G_TEXT:
    for (uint32_t i = node->n; i-- > 0 && next;) {
      const uint8_t byte = (uint8_t)tree->text[node->first + i];
      next = add_bytes(b, byte, byte, next);
    }
    return next;
  case TD_G_CHARS: return emit_chars(b, node, next);
  case TD_G_CALL:
    return add_state(
        b, (td_nfa_state){.kind = TD_NFA_CALL, .next = next, .other = number_of(b, node->first)});
  case TD_G_SEQ:
    for (uint32_t i = node->n; i-- > 0 && next;)
      next = emit(b, tree->kids[node->first + i], next);
    return next;
  case TD_G_ANY:
    for (uint32_t i = 0; i < node->n; i++) {
      const uint32_t state = emit(b, tree->kids[node->first + i], next);
      first = i ? add_split(b, state, first) : state;
      if (!first) return 0;
    }
    return first;
  case TD_G_REPEAT: return emit_repeat(b, node, next);
  default: return add_state(b, (td_nfa_state){.kind = TD_NFA_DEAD});
  }
}

static void emit_rules(compiler *b, td_node root) {
  add_state(b, (td_nfa_state){.kind = TD_NFA_DEAD}); // state 0
  const td_rule top = td_g_rule(b->tree);
  const size_t n = b->tree->n_rules;
  td_g_define(b->tree, top, root);
  b->starts = malloc(n * sizeof *b->starts);
  b->rules = malloc(n * sizeof *b->rules);
  b->number_of = calloc(n, sizeof *b->number_of);
  if (!b->starts || !b->rules || !b->number_of) td_g_fail(b->tree, TD_ENOMEM);
  if (b->tree->status != TD_OK) return;
  number_of(b, top);
  for (uint32_t i = 0; i < b->n_rules && b->tree->status == TD_OK; i++) {
    const uint32_t end = add_state(b, (td_nfa_state){.kind = TD_NFA_MATCH});
    b->starts[i] = emit(b, b->tree->rules[b->rules[i]].body, end);
  }
}

// ---- checks ------------------------------------------------------------------------------------

// From each state those that lead to it: [begin[i], begin[i + 1]) of from.
typedef struct {
  uint32_t *begin, *from;
} reverse_edges;

// The states that a state leads to: one or two; a call also begins its rule.
static uint32_t edges_of(const td_grammar *g, uint32_t i, uint32_t to[2]) {
  const td_nfa_state *s = &g->states[i];
  to[0] = s->next;
  to[1] = s->kind == TD_NFA_CALL ? g->starts[s->other] : s->other;
  return s->kind == TD_NFA_BYTES ? 1 : s->kind == TD_NFA_SPLIT || s->kind == TD_NFA_CALL ? 2 : 0;
}

static bool open_edges(reverse_edges *e, const td_grammar *g) {
  uint32_t to[2];
  e->begin = calloc(g->n_states + (size_t)2, sizeof *e->begin);
  e->from = malloc(2 * (size_t)g->n_states * sizeof *e->from);
  if (!e->begin || !e->from) return false;
  uint32_t *at = e->begin + 1; // of the next edge into each state
  for (uint32_t i = 0; i < g->n_states; i++)
    for (uint32_t k = edges_of(g, i, to); k-- > 0;)
      at[to[k] + 1]++;
  for (uint32_t i = 1; i < g->n_states; i++)
    at[i] += at[i - 1];
  for (uint32_t i = 0; i < g->n_states; i++)
    for (uint32_t k = edges_of(g, i, to); k-- > 0;)
      e->from[at[to[k]]++] = i;
  return true;
}

// Marks the states from which the rule's end can be reached; without_text: without consuming
// anything. todo: room for all states.
static void mark(const td_grammar *g, const reverse_edges *e, uint32_t *todo, bool *marks,
                 bool without_text) {
  uint32_t n = 0;
  for (uint32_t i = 0; i < g->n_states; i++) {
    marks[i] = g->states[i].kind == TD_NFA_MATCH;
    if (marks[i]) todo[n++] = i;
  }
  while (n) {
    const uint32_t at = todo[--n];
    for (uint32_t k = e->begin[at]; k < e->begin[at + 1]; k++) {
      const uint32_t i = e->from[k];
      const td_nfa_state *s = &g->states[i];
      if (marks[i] || (s->kind == TD_NFA_BYTES && without_text)) continue;
      if (s->kind == TD_NFA_CALL && !(marks[s->next] && marks[g->starts[s->other]])) continue;
      marks[i] = true;
      todo[n++] = i;
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

static td_status fail_recursion(const td_grammar_build *tree, td_rule rule, td_err *err) {
  const td_g_rule_body *r = &tree->rules[rule];
  if (!r->n_name)
    return td_fail(err, TD_EUNSUPPORTED, "$ref: a schema that is itself, without end");
  return td_fail(err, TD_EUNSUPPORTED, "grammar: the rule %.*s begins with itself (left recursion)",
                 (int)r->n_name, tree->text + r->name);
}

static td_status check_rules(const compiler *c, td_err *err) {
  const td_grammar whole = {c->states, c->n_states, c->starts, c->n_rules, 0}, *g = &whole;
  bool *marks = malloc(g->n_states), *nullable = malloc(g->n_states);
  reverse_edges edges = {0};
  search s = {.g = g,
              .nullable = nullable,
              .seen = calloc(g->n_states, 1),
              .color = calloc(g->n_rules + 1, 1),
              .todo = malloc(((size_t)3 * g->n_states + 2 * g->n_rules + 2) * sizeof *s.todo)};
  td_status st = TD_OK;
  if (!marks || !nullable || !s.seen || !s.color || !s.todo || !open_edges(&edges, g)) {
    st = td_fail(err, TD_ENOMEM, "out of memory for the grammar");
  } else {
    mark(g, &edges, s.todo, marks, false);
    mark(g, &edges, s.todo, nullable, true);
    for (uint32_t i = 0; i < g->n_states; i++)
      c->states[i].is_live = marks[i];
    const uint32_t rule = find_left_recursion(&s);
    if (rule < g->n_rules)
      st = fail_recursion(c->tree, c->rules[rule], err);
    else if (!marks[g->starts[0]])
      st = td_fail(err, TD_EFORMAT, "no text satisfies it");
  }
  free(edges.begin);
  free(edges.from);
  free(marks);
  free(nullable);
  free(s.seen);
  free(s.color);
  free(s.todo);
  return st;
}

td_status td_grammar_finish(td_buf *out, td_grammar_build *b, td_node root, td_err *err) {
  compiler c = {.tree = b};
  emit_rules(&c, root);
  td_status st = td_grammar_build_status(b, err);
  if (st == TD_OK) st = check_rules(&c, err);
  if (st == TD_OK) {
    const header h = {MAGIC, c.n_states, c.n_rules, 0};
    td_buf_add(out, &h, sizeof h);
    td_buf_add(out, c.starts, c.n_rules * sizeof *c.starts);
    td_buf_add(out, c.states, c.n_states * sizeof *c.states);
    st = td_buf_status(out, err);
  }
  free(c.states);
  free(c.starts);
  free(c.rules);
  free(c.number_of);
  return st;
}
