// src/api/compose.c - one grammar for all of a generation: reasoning, then the answer or tool calls
// in the model's own form.
#include <stdlib.h>
#include <string.h>

#include "api/api_impl.h"
#include "api/calls/call_syntax.h"
#include "api/calls/tool_calls.h"
#include "api/calls/tool_params.h"
#include "base/utf8.h"

#define MAX_MARKER 64 // characters

typedef struct {
  td_grammar_build *b;
  const td_api_request *r;
  const td_call_syntax *s;
  // A value of an element with what ends it: any text; of at least so many characters.
  td_node value, least[TD_API_MAX_MIN_LENGTH + 1];
} composer;

// ---- text up to a marker -----------------------------------------------------------------------

typedef struct {
  td_char_range letters[MAX_MARKER]; // a character each
  unsigned n;
} marker;

static marker read_marker(const char *text) {
  marker m = {.n = 0};
  for (const char *at = text; *at && m.n < MAX_MARKER; m.n++) {
    at += td_utf8_decode(at, strlen(at), &m.letters[m.n].low);
    m.letters[m.n].high = m.letters[m.n].low;
  }
  return m;
}

// Length of the longest beginning of the marker that its first n characters, then c, end with.
static unsigned after_char(const marker *m, unsigned n, uint32_t c) {
  for (unsigned len = n + 1; len > 0; len--) {
    if (m->letters[len - 1].low != c) continue;
    unsigned i = 0;
    while (i + 1 < len && m->letters[i].low == m->letters[n - (len - 1) + i].low)
      i++;
    if (i + 1 == len) return len;
  }
  return 0;
}

static bool is_first_of(const marker *m, unsigned i) {
  for (unsigned k = 0; k < i; k++)
    if (m->letters[k].low == m->letters[i].low) return false;
  return true;
}

// Sets rules [m->n]: any text without the marker, of which so many characters are there already,
// then the marker, then `after`. may_stop: or no marker.
static void add_until(td_grammar_build *b, const marker *m, td_node after, bool may_stop,
                      td_rule *rules) {
  const td_node others = td_g_chars_but(b, m->letters, m->n);
  for (unsigned i = 0; i < m->n; i++)
    rules[i] = td_g_rule(b);
  for (unsigned i = 0; i < m->n; i++) {
    const size_t list = td_g_begin(b);
    td_g_add(b, TD_G_SEQ(b, others, td_g_call(b, rules[0])));
    for (unsigned k = 0; k < m->n; k++) {
      if (!is_first_of(m, k)) continue;
      const unsigned next = after_char(m, i, m->letters[k].low);
      td_g_add(b, TD_G_SEQ(b, td_g_chars(b, &m->letters[k], 1),
                           next == m->n ? after : td_g_call(b, rules[next])));
    }
    if (may_stop) td_g_add(b, TD_NODE_EMPTY);
    td_g_define(b, rules[i], td_g_end_any(b, list));
  }
}

static td_node until(td_grammar_build *b, const char *text, td_node after, bool may_stop) {
  const marker m = read_marker(text);
  td_rule rules[MAX_MARKER] = {0};
  add_until(b, &m, after, may_stop, rules);
  return td_g_call(b, rules[0]);
}

// Text of at least `least` characters up to a marker, by the rules of add_until. A rule [p][i]: i
// characters of a marker are there that began at p.
static td_node until_least(td_grammar_build *b, const marker *m, const td_rule *rules,
                           unsigned least) {
  td_rule before[TD_API_MAX_MIN_LENGTH][MAX_MARKER];
  const td_node others = td_g_chars_but(b, m->letters, m->n);
  for (unsigned p = 0; p < least; p++)
    for (unsigned i = 0; i < m->n; i++)
      before[p][i] = td_g_rule(b);
  for (unsigned p = 0; p < least; p++) {
    for (unsigned i = 0; i < m->n; i++) {
      const size_t list = td_g_begin(b);
      const unsigned end = p + i + 1;
      td_g_add(b, TD_G_SEQ(b, others, td_g_call(b, end < least ? before[end][0] : rules[0])));
      for (unsigned k = 0; k < m->n; k++) {
        const unsigned next = after_char(m, i, m->letters[k].low), from = end - next;
        if (!is_first_of(m, k) || next == m->n) continue;
        td_g_add(b, TD_G_SEQ(b, td_g_chars(b, &m->letters[k], 1),
                             td_g_call(b, from < least ? before[from][next] : rules[next])));
      }
      td_g_define(b, before[p][i], td_g_end_any(b, list));
    }
  }
  return td_g_call(b, before[0][0]);
}

// ---- tool calls --------------------------------------------------------------------------------

// types: TD_PARAM_* of the value that follows; 0: any.
static td_node key_close(const composer *c, unsigned types) {
  const td_call_syntax *s = c->s;
  const bool is_text = !s->json_key_close || types == TD_PARAM_STRING;
  const bool is_json = !is_text && types && !(types & TD_PARAM_STRING);
  const td_node text = is_json ? TD_NODE_NEVER : td_g_str(c->b, s->key_close);
  return TD_G_ANY(c->b, text, is_text ? TD_NODE_NEVER : td_g_str(c->b, s->json_key_close));
}

// The end of an element that repeats its key.
static td_node end_by(const composer *c, td_node key) {
  if (!c->s->ends_by_key) return TD_NODE_EMPTY;
  return td_g_gbnf(c->b, "\"/\" $0 \">\"", &key);
}

static td_node element(const composer *c, const td_api_tool_param *param) {
  const td_node key = td_g_str(c->b, param->key);
  const td_node value = param->is_text
                            ? c->least[param->min_length]
                            : TD_G_SEQ(c->b, param->value, td_g_str(c->b, c->s->value_close));
  const td_node all = TD_G_SEQ(c->b, td_g_str(c->b, c->s->key_open), key,
                               key_close(c, param->types), value, end_by(c, key));
  return param->is_required ? all : td_g_maybe(c->b, all);
}

// The arguments as elements, in the order of the schema.
static td_node elements(const composer *c, const td_api_tool *tool) {
  if (tool->takes_any) {
    const td_node key = td_g_gbnf(c->b, "[a-zA-Z0-9_.-]{1,64}", NULL);
    return td_g_star(c->b, TD_G_SEQ(c->b, td_g_str(c->b, c->s->key_open), key, key_close(c, 0),
                                    c->value, end_by(c, key)));
  }
  const size_t list = td_g_begin(c->b);
  for (uint32_t i = 0; i < tool->n_params; i++)
    td_g_add(c->b, element(c, &tool->params[i]));
  return td_g_end_seq(c->b, list);
}

static void add_values(composer *c) {
  const marker m = read_marker(c->s->value_close);
  td_rule rules[MAX_MARKER] = {0};
  add_until(c->b, &m, TD_NODE_EMPTY, false, rules);
  c->value = c->least[0] = td_g_call(c->b, rules[0]);
  for (unsigned least = 1; least <= TD_API_MAX_MIN_LENGTH; least++)
    c->least[least] = until_least(c->b, &m, rules, least);
}

// Calls, behind the opening marker.
static td_node calls(composer *c) {
  const td_call_syntax *s = c->s;
  td_grammar_build *b = c->b;
  if (s->key_open) add_values(c);
  const size_t list = td_g_begin(b);
  for (uint32_t i = 0; i < c->r->n_callable; i++) {
    const td_api_tool *tool = &c->r->callable[i];
    td_g_add(b, TD_G_SEQ(b, td_g_str(b, tool->name),
                         s->index ? td_g_gbnf(b, s->index, NULL) : TD_NODE_EMPTY,
                         td_g_str(b, s->after_name),
                         s->key_open ? elements(c, tool) : tool->arguments));
  }
  const td_node call = td_g_new_rule(b, td_g_end_any(b, list));
  const td_node more = c->r->one_call || !s->between
                           ? TD_NODE_EMPTY
                           : td_g_star(b, TD_G_SEQ(b, td_g_str(b, s->between), call));
  return td_g_new_rule(b, TD_G_SEQ(b, call, more, td_g_str(b, s->close)));
}

// ---- text in which calls may begin -------------------------------------------------------------

#define MAX_STATES 1024

// A tree of markers. The children of state i begin at first[i] and continue at next.
typedef struct {
  uint32_t letter;
  uint16_t first, next, fail;
  const char *marker; // ends here
} text_state;

typedef struct {
  text_state states[MAX_STATES];
  uint16_t n;
} marker_tree;

static uint16_t child_of(const marker_tree *t, uint16_t state, uint32_t letter) {
  uint16_t c = t->states[state].first;
  while (c && t->states[c].letter != letter)
    c = t->states[c].next;
  return c;
}

static void add_marker(marker_tree *t, const char *text) {
  uint16_t at = 0;
  for (const char *c = text; *c;) {
    uint32_t letter;
    c += td_utf8_decode(c, strlen(c), &letter);
    uint16_t next = child_of(t, at, letter);
    if (!next && t->n < MAX_STATES) {
      next = t->n++;
      t->states[next] = (text_state){.letter = letter, .next = t->states[at].first};
      t->states[at].first = next;
    }
    at = next;
  }
  t->states[at].marker = text;
}

// The state behind another and a letter.
static uint16_t state_after(const marker_tree *t, uint16_t state, uint32_t letter) {
  for (;;) {
    const uint16_t c = child_of(t, state, letter);
    if (c || !state) return c;
    state = t->states[state].fail;
  }
}

static void link_states(marker_tree *t) {
  uint16_t queue[MAX_STATES], n = 0;
  queue[n++] = 0;
  for (uint16_t i = 0; i < n; i++) {
    const uint16_t at = queue[i];
    for (uint16_t c = t->states[at].first; c; c = t->states[c].next) {
      t->states[c].fail = at ? state_after(t, t->states[at].fail, t->states[c].letter) : 0;
      queue[n++] = c;
    }
  }
}

// What follows in state i: each letter that a marker continues with, and any other. The marker of
// the model's own form begins calls; another cannot be written, as it would be read as a call.
static td_node text_from(const composer *c, const marker_tree *t, uint16_t i, const td_rule *rules,
                         td_node calls) {
  td_grammar_build *b = c->b;
  td_char_range letters[MAX_STATES];
  size_t n = 0;
  const size_t list = td_g_begin(b);
  td_g_add(b, TD_NODE_EMPTY);
  for (uint16_t from = i;; from = t->states[from].fail) {
    for (uint16_t to = t->states[from].first; to; to = t->states[to].next) {
      const text_state *next = &t->states[to];
      if (state_after(t, i, next->letter) != to) continue; // a longer beginning continues with it
      letters[n++] = (td_char_range){next->letter, next->letter};
      const char *own = next->marker ? strstr(c->s->open, next->marker) : NULL;
      // Another form's marker may be the end of one.
      if (own != c->s->open && c->s->ends_by_key) own = NULL;
      if (next->marker && !own) continue;
      const td_node rest = own ? TD_G_SEQ(b, td_g_str(b, own + strlen(next->marker)), calls)
                               : td_g_call(b, rules[to]);
      td_g_add(b, TD_G_SEQ(b, td_g_chars(b, &letters[n - 1], 1), rest));
    }
    if (!from) break;
  }
  td_g_add(b, TD_G_SEQ(b, td_g_chars_but(b, letters, n), td_g_call(b, rules[0])));
  return td_g_end_any(b, list);
}

// Any text; behind a marker that the output parser takes for the beginning of calls, calls.
static td_node text_with(const composer *c, td_node calls) {
  marker_tree *t = calloc(1, sizeof *t);
  td_rule rules[MAX_STATES] = {0};
  if (!t) {
    td_grammar_build_budget(c->b)->status = TD_ENOMEM;
    return TD_NODE_NEVER;
  }
  t->n = 1;
  const char *text;
  for (unsigned i = 0; (text = td_call_opening(i)); i++)
    if (text[0]) add_marker(t, text);
  link_states(t);
  for (uint16_t i = 0; i < t->n; i++)
    rules[i] = td_g_rule(c->b);
  for (uint16_t i = 0; i < t->n; i++)
    if (!t->states[i].marker) td_g_define(c->b, rules[i], text_from(c, t, i, rules, calls));
  free(t);
  return td_g_call(c->b, rules[0]);
}

// ---- answers -----------------------------------------------------------------------------------

// What follows the reasoning.
static td_node answer(composer *c) {
  const td_api_request *r = c->r;
  if (r->calls_mode == TD_CALLS_FREE) return r->format;
  const td_node called = calls(c);
  const bool may_answer = r->calls_mode == TD_CALLS_CHECKED;
  if (may_answer && !r->has_format) return text_with(c, called);
  return TD_G_ANY(c->b, TD_G_SEQ(c->b, td_g_str(c->b, c->s->open), called),
                  may_answer ? r->format : TD_NODE_NEVER);
}

// A message behind reasoning.
static td_node reasoned(composer *c, td_reasoning reasoning) {
  const td_output_form *form = c->s->thoughts ? c->s->thoughts : &td_output_forms[TD_OUTPUT_THINK];
  const td_node said = td_g_new_rule(c->b, answer(c));
  const td_node thought = until(c->b, form->think_end, td_g_gbnf(c->b, "[ \\n]{0,4} $0", &said),
                                false);
  const td_node begun = TD_G_SEQ(c->b, td_g_str(c->b, form->think_begin), thought);
  return reasoning == TD_REASONING_BEGUN  ? thought
         : reasoning == TD_REASONING_NONE ? said
                                          : TD_G_ANY(c->b, said, begun);
}

// Messages in the Harmony format, behind <|start|>assistant: reasoning may come before a call or an
// answer, and text that is not constrained before more of them.
static td_node messages(composer *c) {
  const td_api_request *r = c->r;
  td_grammar_build *b = c->b;
  const td_rule said = td_g_rule(b);
  const td_node next = TD_G_SEQ(b, td_g_str(b, "<|start|>assistant"), td_g_call(b, said));
  td_node call = TD_NODE_NEVER, text = TD_NODE_NEVER;
  if (r->calls_mode != TD_CALLS_FREE) call = TD_G_SEQ(b, td_g_str(b, c->s->open), calls(c));
  if (r->calls_mode == TD_CALLS_REQUIRED) {
    text = TD_NODE_NEVER;
  } else if (r->has_format) {
    text = TD_G_SEQ(b, td_g_str(b, "<|channel|>final<|message|>"), r->format);
  } else {
    const td_node any = until(b, "<|end|>", td_g_maybe(b, next), true);
    text = td_g_gbnf(b, "\"<|channel|>\" (\"final\" | \"commentary\") \"<|message|>\" $0", &any);
  }
  td_g_define(b, said, TD_G_ANY(b, call, text));
  const td_output_form *form = &td_output_forms[TD_OUTPUT_HARMONY];
  const td_node thought[] = {until(b, form->think_end, next, false),
                             td_g_str(b, form->think_begin)};
  return TD_G_ANY(b, td_g_call(b, said), td_g_gbnf(b, "$1 \"<|message|>\" $0", thought));
}

const char *td_api_constrained_by(const td_api_request *r) {
  return r->constraint ? r->constraint : r->build || r->grammar.len ? "tools" : NULL;
}

td_status td_api_compose_grammar(td_api_request *r, const td_call_syntax *syntax,
                                 td_reasoning reasoning, td_api_error *error) {
  td_err err;
  if (!r->has_format && r->calls_mode == TD_CALLS_FREE) return TD_OK;
  if (!td_api_build(r, error)) return TD_ENOMEM; // tools may be wanted where none is there
  composer c = {.b = r->build, .r = r, .s = syntax};
  const td_node root = !r->is_chat                       ? r->format
                       : syntax->form == TD_CALL_HARMONY ? messages(&c)
                                                         : reasoned(&c, reasoning);
  td_status st = td_grammar_finish(&r->grammar, r->build, root, &err);
  if (st != TD_OK) {
    const char *param = td_api_constrained_by(r);
    td_err_prefix(&err, "%s", param);
    st = td_api_fail_err(error, param, &err);
  }
  td_grammar_build_close(r->build);
  r->build = NULL;
  return st;
}
