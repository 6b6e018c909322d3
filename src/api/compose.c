// src/api/compose.c - one grammar for all of a generation: reasoning, then the answer or tool calls
// in the model's own form. Rules that are not the client's begin with a dot or hold one.
#include <string.h>

#include "api/api_impl.h"
#include "base/utf8.h"
#include "text/grammar/grammar.h"
#include "text/grammar/json_schema.h"

#define MAX_MARKER 64 // characters

static void write_literal(td_buf *out, const char *text) {
  td_buf_char(out, '"');
  for (const char *c = text; *c; c++) {
    if (*c == '\n') {
      td_buf_str(out, "\\n");
    } else if (*c == '"' || *c == '\\') {
      td_buf_printf(out, "\\%c", *c);
    } else {
      td_buf_char(out, *c);
    }
  }
  td_buf_char(out, '"');
}

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

// Rules NAME0, NAME1, ...: any text without the marker, then the marker, then the rule `after`. The
// number says how many characters of the marker precede. may_stop: or no marker.
static void write_until(td_buf *out, const char *name, const char *text, const char *after,
                        bool may_stop) {
  uint32_t marker[MAX_MARKER];
  unsigned n = 0;
  for (const char *at = text; *at && n < MAX_MARKER; n++)
    at += td_utf8_decode(at, strlen(at), &marker[n]);
  for (unsigned i = 0; i < n; i++) {
    td_buf_printf(out, "%s%u ::= [^", name, i);
    for (unsigned k = 0; k < n; k++)
      if (is_first_of(marker, k)) td_buf_printf(out, "\\U%08X", marker[k]);
    td_buf_printf(out, "] %s0", name);
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

// ---- tool calls --------------------------------------------------------------------------------

// How a form writes calls: open call (between call)* close.
typedef struct {
  const char *open, *between, *close;
  const char *before_name, *after_name, *after_arguments;
  const char *index; // GBNF between name and after_name
} call_syntax;

static const call_syntax syntaxes[] = {
    [TD_CALL_HERMES] = {"<tool_call>\n", "\n<tool_call>\n", "", "{\"name\": \"",
                        "\", \"arguments\": ", "}\n</tool_call>", ""},
    [TD_CALL_DEEPSEEK] = {"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "<｜tool▁call▁begin｜>",
                          "<｜tool▁calls▁end｜>", "", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", ""},
    [TD_CALL_DEEPSEEK_V3] = {"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
                             "\n<｜tool▁call▁begin｜>", "<｜tool▁calls▁end｜>",
                             "function<｜tool▁sep｜>", "\n```json\n", "\n```<｜tool▁call▁end｜>",
                             ""},
    [TD_CALL_KIMI] = {"<|tool_calls_section_begin|><|tool_call_begin|>", "<|tool_call_begin|>",
                      "<|tool_calls_section_end|>", "functions.", "<|tool_call_argument_begin|>",
                      "<|tool_call_end|>", "\":\" [0-9]{1,3} "},
};

// The rules .call and .calls; the latter comes after the opening marker.
static void write_calls(td_buf *out, const td_api_request *r, const call_syntax *s) {
  for (uint32_t i = 0; i < r->n_callable; i++) {
    td_buf_str(out, i ? " | " : ".call ::= ");
    write_literal(out, s->before_name);
    td_buf_char(out, ' ');
    write_literal(out, r->callable[i].name);
    td_buf_printf(out, " %s", s->index);
    write_literal(out, s->after_name);
    td_buf_printf(out, " t%u.0 ", i);
    write_literal(out, s->after_arguments);
  }
  td_buf_str(out, "\n.calls ::= .call ");
  if (!r->one_call) {
    td_buf_char(out, '(');
    write_literal(out, s->between);
    td_buf_str(out, " .call)* ");
  }
  write_literal(out, s->close);
  td_buf_char(out, '\n');
}

// The rule .answer: what follows the reasoning.
static void write_answer(td_buf *out, const td_api_request *r, const call_syntax *s) {
  bool has_format = r->grammar.len, has_calls = r->calls_mode != TD_CALLS_FREE;
  if (has_calls) write_calls(out, r, s);
  td_buf_str(out, ".answer ::= ");
  if (has_calls && !has_format && r->calls_mode == TD_CALLS_CHECKED) {
    td_buf_str(out, ".text0\n");
    write_until(out, ".text", s->open, ".calls", true);
    return;
  }
  if (has_calls) {
    write_literal(out, s->open);
    td_buf_str(out, " .calls");
  }
  if (has_calls && has_format && r->calls_mode == TD_CALLS_CHECKED) td_buf_str(out, " | root");
  if (!has_calls) td_buf_str(out, "root");
  td_buf_char(out, '\n');
}

td_status td_api_compose_grammar(td_api_request *r, td_call_form form, td_reasoning reasoning,
                                 td_api_error *error) {
  static const char *const roots[] = {[TD_REASONING_NONE] = ".answer",
                                      [TD_REASONING_MAYBE] = ".answer | \"<think>\" .think0",
                                      [TD_REASONING_BEGUN] = ".think0"};
  if (!r->grammar.len && r->calls_mode == TD_CALLS_FREE) return TD_OK;
  td_buf text = TD_BUF_INIT;
  td_err err;
  if (r->is_chat) {
    td_buf_printf(&text, ".root ::= %s\n", roots[reasoning]);
    write_until(&text, ".think", "</think>", ".rest", false);
    td_buf_str(&text, ".rest ::= [ \\n]{0,4} .answer\n");
    write_answer(&text, r, &syntaxes[form]);
  }
  if (r->needs_json_rules) td_json_schema_write_common(&text);
  td_buf_add(&text, td_buf_text(&r->grammar), r->grammar.len);
  td_buf_add(&text, td_buf_text(&r->call_rules), r->call_rules.len);
  text.failed |= r->grammar.failed || r->call_rules.failed;
  td_buf_free(&r->grammar);
  r->grammar = text;
  td_grammar *grammar;
  td_status st = td_buf_status(&text, &err);
  if (st == TD_OK) st = td_grammar_open(&grammar, text.data, text.len, &err);
  if (st != TD_OK) return td_api_fail_err(error, r->n_callable ? "tools" : "response_format", &err);
  td_grammar_close(grammar);
  return TD_OK;
}
