// src/api/compose.c - one grammar for all of a generation: reasoning, then the answer or tool calls
// in the model's own form. Rules that are not the client's begin with a dot or hold one.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "api/api_impl.h"
#include "api/calls/call_syntax.h"
#include "api/calls/tool_calls.h"
#include "api/calls/tool_params.h"
#include "base/utf8.h"
#include "text/grammar/grammar.h"
#include "text/grammar/json_schema.h"

#define MAX_MARKER 64 // characters

// ---- text up to a marker -----------------------------------------------------------------------

// Length of the longest beginning of marker that the first n characters of it, then c, end with.
static unsigned after_char(const uint32_t *marker, unsigned n, uint32_t c) {
  for (unsigned len = n + 1; len > 0; len--) {
    if (marker[len - 1] != c) continue;
    unsigned i = 0;
    while (i + 1 < len && marker[i] == marker[n - (len - 1) + i])
      i++;
    if (i + 1 == len) return len;
  }
  return 0;
}

static bool is_first_of(const uint32_t *marker, unsigned i) {
  for (unsigned k = 0; k < i; k++) {
    if (marker[k] == marker[i]) return false;
  }
  return true;
}

static unsigned read_marker(const char *text, uint32_t marker[MAX_MARKER]) {
  unsigned n = 0;
  for (const char *at = text; *at && n < MAX_MARKER; n++)
    at += td_utf8_decode(at, strlen(at), &marker[n]);
  return n;
}

// Any character that is not in the marker.
static void write_others(td_buf *out, const uint32_t *marker, unsigned n) {
  td_buf_str(out, "[^");
  for (unsigned k = 0; k < n; k++)
    if (is_first_of(marker, k)) td_buf_printf(out, "\\U%08X", marker[k]);
  td_buf_char(out, ']');
}

// Rules NAME0, NAME1, ...: any text without the marker, then the marker, then the rule `after`. The
// number says how many characters of the marker precede. may_stop: or no marker.
static void write_until(td_buf *out, const char *name, const char *text, const char *after,
                        bool may_stop) {
  uint32_t marker[MAX_MARKER];
  const unsigned n = read_marker(text, marker);
  for (unsigned i = 0; i < n; i++) {
    td_buf_printf(out, "%s%u ::= ", name, i);
    write_others(out, marker, n);
    td_buf_printf(out, " %s0", name);
    for (unsigned k = 0; k < n; k++) {
      if (!is_first_of(marker, k)) continue;
      unsigned next = after_char(marker, i, marker[k]);
      td_buf_printf(out, " | [\\U%08X] ", marker[k]);
      if (next == n) {
        td_buf_str(out, after);
      } else {
        td_buf_printf(out, "%s%u", name, next);
      }
    }
    td_buf_str(out, may_stop ? " | \"\"\n" : "\n");
  }
}

// Where the text goes on in which next characters of a marker are there that began at p: behind
// `least` characters, in the rules of write_until.
static void write_next(td_buf *out, const char *name, const char *until, unsigned least, unsigned p,
                       unsigned next) {
  if (p >= least) {
    td_buf_printf(out, "%s%u", until, next);
  } else {
    td_buf_printf(out, "%s%u.%u", name, p, next);
  }
}

// Rules NAME0.0 and so on: text up to the marker of the rules UNTIL0 and so on, that has at least
// `least` characters. The numbers of NAMEp.i: i characters of a marker are there that began at p.
static void write_least(td_buf *out, const char *name, const char *until, const char *text,
                        unsigned least) {
  uint32_t marker[MAX_MARKER];
  const unsigned n = read_marker(text, marker);
  for (unsigned p = 0; p < least; p++) {
    for (unsigned i = 0; i < n; i++) {
      td_buf_printf(out, "%s%u.%u ::= ", name, p, i);
      write_others(out, marker, n);
      td_buf_char(out, ' ');
      write_next(out, name, until, least, p + i + 1, 0);
      for (unsigned k = 0; k < n; k++) {
        const unsigned next = after_char(marker, i, marker[k]);
        if (!is_first_of(marker, k) || next == n) continue;
        td_buf_printf(out, " | [\\U%08X] ", marker[k]);
        write_next(out, name, until, least, p + i + 1 - next, next);
      }
      td_buf_char(out, '\n');
    }
  }
}

// ---- tool calls --------------------------------------------------------------------------------

// types: TD_PARAM_* of the value that follows; 0: any.
static void write_key_close(td_buf *out, const td_call_syntax *e, unsigned types) {
  const bool is_text = !e->json_key_close || types == TD_PARAM_STRING;
  const bool is_json = !is_text && types && !(types & TD_PARAM_STRING);
  if (is_text || is_json) {
    td_api_write_gbnf_literal(out, is_text ? e->key_close : e->json_key_close);
    return;
  }
  td_buf_char(out, '(');
  td_api_write_gbnf_literal(out, e->key_close);
  td_buf_str(out, " | ");
  td_api_write_gbnf_literal(out, e->json_key_close);
  td_buf_char(out, ')');
}

// The rule t<TOOL>.e: the arguments as elements, in the order of the schema.
static void write_elements(td_buf *out, const td_api_tool *tool, uint32_t index,
                           const td_call_syntax *e) {
  td_buf_printf(out, "t%u.e ::= ", index);
  if (tool->takes_any) {
    td_buf_char(out, '(');
    td_api_write_gbnf_literal(out, e->key_open);
    td_buf_str(out, " [a-zA-Z0-9_.-]{1,64} ");
    write_key_close(out, e, 0);
    td_buf_printf(out, " .value0%s)*\n", e->ends_by_key ? " \"/\" [a-zA-Z0-9_.-]{1,64} \">\"" : "");
    return;
  }
  for (uint32_t i = 0; i < tool->n_params; i++) {
    const td_api_tool_param *param = &tool->params[i];
    td_buf_char(out, '(');
    td_api_write_gbnf_literal(out, e->key_open);
    td_buf_char(out, ' ');
    td_api_write_gbnf_literal(out, param->key);
    td_buf_char(out, ' ');
    write_key_close(out, e, param->types);
    if (param->is_text) {
      if (param->min_length) {
        td_buf_printf(out, " .least%u.0.0", param->min_length);
      } else {
        td_buf_str(out, " .value0");
      }
    } else {
      td_buf_printf(out, " t%u.v%u ", index, i);
      td_api_write_gbnf_literal(out, e->value_close);
    }
    if (e->ends_by_key) {
      td_buf_str(out, " \"/\" ");
      td_api_write_gbnf_literal(out, param->key);
      td_buf_str(out, " \">\" ");
    }
    td_buf_str(out, param->is_required ? ") " : ")? ");
  }
  td_buf_str(out, tool->n_params ? "\n" : "\"\"\n");
}

static bool has_least(const td_api_request *r, unsigned least) {
  for (uint32_t i = 0; i < r->n_callable; i++) {
    for (uint32_t k = 0; k < r->callable[i].n_params; k++) {
      const td_api_tool_param *param = &r->callable[i].params[k];
      if (param->is_text && param->min_length == least) return true;
    }
  }
  return false;
}

// The rules .call and .calls; the latter comes after the opening marker.
static void write_calls(td_buf *out, const td_api_request *r, const td_call_syntax *s) {
  for (uint32_t i = 0; i < r->n_callable; i++) {
    td_buf_str(out, i ? " | " : ".call ::= ");
    td_api_write_gbnf_literal(out, r->callable[i].name);
    td_buf_printf(out, " %s", s->index ? s->index : "");
    td_api_write_gbnf_literal(out, s->after_name);
    td_buf_printf(out, " t%u.%c ", i, s->key_open ? 'e' : '0');
  }
  td_buf_str(out, "\n.calls ::= .call ");
  if (!r->one_call && s->between) {
    td_buf_char(out, '(');
    td_api_write_gbnf_literal(out, s->between);
    td_buf_str(out, " .call)* ");
  }
  td_api_write_gbnf_literal(out, s->close);
  td_buf_char(out, '\n');
  if (!s->key_open) return;
  for (uint32_t i = 0; i < r->n_callable; i++)
    write_elements(out, &r->callable[i], i, s);
  write_until(out, ".value", s->value_close, "\"\"", false);
  for (unsigned least = 1; least <= TD_API_MOST_LEAST; least++) {
    char name[24];
    snprintf(name, sizeof name, ".least%u.", least);
    if (has_least(r, least)) write_least(out, name, ".value", s->value_close, least);
  }
}

// ---- text in which calls may begin
// ---------------------------------------------------------------

#define MAX_STATES 1024

// A tree of markers. The children of state i begin at first[i] and go on at next.
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

static void add_marker(marker_tree *t, const char *marker) {
  uint16_t at = 0;
  for (const char *c = marker; *c;) {
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
  t->states[at].marker = marker;
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

// What follows in state i: each letter that a marker goes on with, and any other. The marker of the
// model's own form begins calls; another cannot be written, as it would be read as a call.
static void write_state(td_buf *out, const marker_tree *t, uint16_t i, const td_call_syntax *s) {
  td_buf others = TD_BUF_INIT;
  td_buf_printf(out, ".text%u ::= \"\"", i);
  for (uint16_t from = i;; from = t->states[from].fail) {
    for (uint16_t c = t->states[from].first; c; c = t->states[c].next) {
      const uint32_t letter = t->states[c].letter;
      const text_state *next = &t->states[c];
      if (state_after(t, i, letter) != c) continue; // a longer beginning goes on with it
      td_buf_printf(&others, "\\U%08X", letter);
      const char *own = next->marker ? strstr(s->open, next->marker) : NULL;
      // Another form's marker may be the end of one.
      if (own != s->open && s->ends_by_key) own = NULL;
      if (next->marker && !own) continue;
      td_buf_printf(out, " | [\\U%08X] ", letter);
      if (own) {
        td_api_write_gbnf_literal(out, own + strlen(next->marker));
        td_buf_str(out, " .calls");
      } else {
        td_buf_printf(out, ".text%u", c);
      }
    }
    if (!from) break;
  }
  td_buf_printf(out, " | [^%s] .text0\n", td_buf_text(&others));
  out->failed |= others.failed;
  td_buf_free(&others);
}

// Rules .text0, .text1, ...: any text; behind a marker that the output parser takes for the
// beginning of calls, calls.
static void write_text(td_buf *out, const td_call_syntax *s) {
  marker_tree *t = calloc(1, sizeof *t);
  if (!t) {
    out->failed = true;
    return;
  }
  t->n = 1;
  const char *marker;
  for (unsigned i = 0; (marker = td_call_opening(i)); i++)
    if (marker[0]) add_marker(t, marker);
  link_states(t);
  for (uint16_t i = 0; i < t->n; i++)
    if (!t->states[i].marker) write_state(out, t, i, s);
  free(t);
}

// The rule .answer: what follows the reasoning.
static void write_answer(td_buf *out, const td_api_request *r, const td_call_syntax *s) {
  bool has_format = r->grammar.len, has_calls = r->calls_mode != TD_CALLS_FREE;
  if (has_calls) write_calls(out, r, s);
  td_buf_str(out, ".answer ::= ");
  if (has_calls && !has_format && r->calls_mode == TD_CALLS_CHECKED) {
    td_buf_str(out, ".text0\n");
    write_text(out, s);
    return;
  }
  if (has_calls) {
    td_api_write_gbnf_literal(out, s->open);
    td_buf_str(out, " .calls");
  }
  if (has_calls && has_format && r->calls_mode == TD_CALLS_CHECKED) td_buf_str(out, " | root");
  if (!has_calls) td_buf_str(out, "root");
  td_buf_char(out, '\n');
}

// The rule .root of messages in the Harmony format, behind <|start|>assistant: reasoning may come
// before a call or an answer, and text that is not constrained before more of them.
static void write_messages(td_buf *out, const td_api_request *r, const td_call_syntax *s) {
  const bool has_format = r->grammar.len, has_calls = r->calls_mode != TD_CALLS_FREE;
  const bool may_say = r->calls_mode != TD_CALLS_REQUIRED;
  td_buf_str(out, ".root ::= .answer | \"<|channel|>analysis<|message|>\" .think0\n");
  write_until(out, ".think", "<|end|>", ".rest", false);
  td_buf_str(out, ".rest ::= \"<|start|>assistant\" .answer\n");
  if (has_calls) write_calls(out, r, s);
  td_buf_str(out, ".answer ::= ");
  if (has_calls) {
    td_api_write_gbnf_literal(out, s->open);
    td_buf_str(out, may_say ? " .calls | " : " .calls\n");
  }
  if (!may_say) return;
  if (has_format) {
    td_buf_str(out, "\"<|channel|>final<|message|>\" root\n");
    return;
  }
  td_buf_str(out, "\"<|channel|>\" (\"final\" | \"commentary\") \"<|message|>\" .text0\n");
  write_until(out, ".text", "<|end|>", ".more", true);
  td_buf_str(out, ".more ::= (\"<|start|>assistant\" .answer)?\n");
}

const char *td_api_constrained_by(const td_api_request *r) {
  return r->constraint ? r->constraint : r->grammar.len ? "tools" : NULL;
}

td_status td_api_compose_grammar(td_api_request *r, const td_call_syntax *syntax,
                                 td_reasoning reasoning, td_api_error *error) {
  const td_call_form form = syntax->form;
  const char *begin = syntax->thought ? syntax->thought : "<think>";
  const char *end = syntax->thought_end ? syntax->thought_end : "</think>";
  if (!r->grammar.len && r->calls_mode == TD_CALLS_FREE) return TD_OK;
  td_buf text = TD_BUF_INIT;
  td_err err;
  if (r->is_chat && form == TD_CALL_HARMONY) {
    write_messages(&text, r, syntax);
  } else if (r->is_chat) {
    td_buf_str(&text, ".root ::= ");
    if (reasoning != TD_REASONING_BEGUN) td_buf_str(&text, ".answer");
    if (reasoning == TD_REASONING_MAYBE) td_buf_printf(&text, " | \"%s\" ", begin);
    td_buf_str(&text, reasoning == TD_REASONING_NONE ? "\n" : ".think0\n");
    write_until(&text, ".think", end, ".rest", false);
    td_buf_str(&text, ".rest ::= [ \\n]{0,4} .answer\n");
    write_answer(&text, r, syntax);
  }
  if (r->needs_json_rules) td_json_schema_write_common(&text, r->is_free_json);
  td_buf_add(&text, td_buf_text(&r->grammar), r->grammar.len);
  const td_buf *rules = syntax->key_open ? &r->value_rules : &r->call_rules;
  td_buf_add(&text, td_buf_text(rules), rules->len);
  text.failed |= r->grammar.failed || rules->failed;
  td_buf_free(&r->grammar);
  r->grammar = text;
  td_grammar *grammar;
  td_status st = td_buf_status(&text, &err);
  if (st == TD_OK) st = td_grammar_open(&grammar, text.data, text.len, &err);
  if (st != TD_OK) {
    const char *param = td_api_constrained_by(r);
    td_err_prefix(&err, "%s", param);
    return td_api_fail_err(error, param, &err);
  }
  td_grammar_close(grammar);
  return TD_OK;
}
