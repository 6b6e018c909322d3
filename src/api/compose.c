// src/api/compose.c - one grammar for all of a generation: reasoning, then the answer or tool calls
// in the model's own form. Rules that are not the client's begin with a dot or hold one.
#include <stdio.h>
#include <string.h>

#include "api/api_impl.h"
#include "base/utf8.h"
#include "text/grammar/grammar.h"
#include "text/grammar/json_schema.h"

#define MAX_MARKER 64 // characters

static void write_literal(td_buf *out, const char *text) {
  td_api_write_gbnf_literal(out, text);
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
  unsigned n = 0;
  for (const char *at = text; *at && n < MAX_MARKER; n++)
    at += td_utf8_decode(at, strlen(at), &marker[n]);
  for (unsigned p = 0; p < least; p++) {
    for (unsigned i = 0; i < n; i++) {
      td_buf_printf(out, "%s%u.%u ::= [^", name, p, i);
      for (unsigned k = 0; k < n; k++)
        if (is_first_of(marker, k)) td_buf_printf(out, "\\U%08X", marker[k]);
      td_buf_str(out, "] ");
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

// How a form writes each argument of a call as an element: key_open KEY key_close VALUE
// value_close.
typedef struct {
  const char *key_open, *key_close, *value_close;
} element_syntax;

// How a form writes calls: open call (between call)* close.
typedef struct {
  const char *open, *between, *close; // between NULL: one call
  const char *before_name, *after_name, *after_arguments;
  const char *index;        // GBNF between name and after_name
  const element_syntax *in; // NULL: the arguments are one object
} call_syntax;

static const element_syntax function_elements = {"<parameter=", ">\n", "\n</parameter>\n"};
static const element_syntax key_elements = {"<arg_key>", "</arg_key>\n<arg_value>",
                                            "</arg_value>\n"};
static const element_syntax tight_elements = {"<arg_key>", "</arg_key><arg_value>", "</arg_value>"};
static const element_syntax suffixed_elements = {"<arg_key:opensource>",
                                                 "</arg_key:opensource>\n<arg_value:opensource>",
                                                 "</arg_value:opensource>\n"};
static const element_syntax invoke_elements = {"<parameter name=\"", "\">", "</parameter>\n"};

static const call_syntax syntaxes[] = {
    [TD_CALL_HERMES] = {"<tool_call>\n", "\n<tool_call>\n", "", "{\"name\": \"",
                        "\", \"arguments\": ", "}\n</tool_call>", "", NULL},
    [TD_CALL_DEEPSEEK] = {"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "<｜tool▁call▁begin｜>",
                          "<｜tool▁calls▁end｜>", "", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "",
                          NULL},
    [TD_CALL_DEEPSEEK_V3] = {"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
                             "\n<｜tool▁call▁begin｜>", "<｜tool▁calls▁end｜>",
                             "function<｜tool▁sep｜>", "\n```json\n", "\n```<｜tool▁call▁end｜>",
                             "", NULL},
    [TD_CALL_KIMI] = {"<|tool_calls_section_begin|><|tool_call_begin|>", "<|tool_call_begin|>",
                      "<|tool_calls_section_end|>", "functions.", "<|tool_call_argument_begin|>",
                      "<|tool_call_end|>", "\":\" [0-9]{1,3} ", NULL},
    [TD_CALL_FUNCTION] = {"<tool_call>\n", "\n<tool_call>\n", "", "<function=", ">\n",
                          "</function>\n</tool_call>", "", &function_elements},
    [TD_CALL_ARG_KEYS] = {"<tool_call>", "\n<tool_call>", "", "", "\n", "</tool_call>", "",
                          &key_elements},
    [TD_CALL_ARG_KEYS_TIGHT] = {"<tool_call>", "<tool_call>", "", "", "", "</tool_call>", "",
                                &tight_elements},
    [TD_CALL_INVOKE] = {"<minimax:tool_call>\n", "", "</minimax:tool_call>", "<invoke name=\"",
                        "\">\n", "</invoke>\n", "", &invoke_elements},
    [TD_CALL_HY] = {"<tool_calls>\n<tool_call>", "\n<tool_call>", "\n</tool_calls>", "",
                    "<tool_sep>\n", "</tool_call>", "", &key_elements},
    [TD_CALL_HY_SUFFIXED] = {"<tool_calls:opensource>\n<tool_call:opensource>",
                             "\n<tool_call:opensource>", "\n</tool_calls:opensource>", "",
                             "<tool_sep:opensource>\n", "</tool_call:opensource>", "",
                             &suffixed_elements},
    [TD_CALL_MISTRAL] = {"[TOOL_CALLS]", "[TOOL_CALLS]", "", "", "[ARGS]", "", "", NULL},
    [TD_CALL_MISTRAL_OBJECTS] = {"[TOOL_CALLS] [", ", ", "]", "{\"name\": \"",
                                 "\", \"arguments\": ", "}", "", NULL},
    // Any end token may follow, <|call|> among them.
    [TD_CALL_HARMONY] = {"<|channel|>commentary to=functions.", NULL, "", "",
                         " <|constrain|>json<|message|>", "", "", NULL},
};

// The rule t<TOOL>.e: the arguments as elements, in the order of the schema.
static void write_elements(td_buf *out, const td_api_tool *tool, uint32_t index,
                           const element_syntax *e) {
  td_buf_printf(out, "t%u.e ::= ", index);
  if (tool->takes_any) {
    td_buf_char(out, '(');
    write_literal(out, e->key_open);
    td_buf_str(out, " [a-zA-Z0-9_.-]{1,64} ");
    write_literal(out, e->key_close);
    td_buf_str(out, " .value0)*\n");
    return;
  }
  for (uint32_t i = 0; i < tool->n_params; i++) {
    const td_api_tool_param *param = &tool->params[i];
    td_buf_char(out, '(');
    write_literal(out, e->key_open);
    td_buf_char(out, ' ');
    write_literal(out, param->key);
    td_buf_char(out, ' ');
    write_literal(out, e->key_close);
    if (param->is_text) {
      if (param->min_length) {
        td_buf_printf(out, " .least%u.0.0", param->min_length);
      } else {
        td_buf_str(out, " .value0");
      }
    } else {
      td_buf_printf(out, " t%u.v%u ", index, i);
      write_literal(out, e->value_close);
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
static void write_calls(td_buf *out, const td_api_request *r, const call_syntax *s) {
  for (uint32_t i = 0; i < r->n_callable; i++) {
    td_buf_str(out, i ? " | " : ".call ::= ");
    write_literal(out, s->before_name);
    td_buf_char(out, ' ');
    write_literal(out, r->callable[i].name);
    td_buf_printf(out, " %s", s->index);
    write_literal(out, s->after_name);
    td_buf_printf(out, " t%u.%c ", i, s->in ? 'e' : '0');
    write_literal(out, s->after_arguments);
  }
  td_buf_str(out, "\n.calls ::= .call ");
  if (!r->one_call && s->between) {
    td_buf_char(out, '(');
    write_literal(out, s->between);
    td_buf_str(out, " .call)* ");
  }
  write_literal(out, s->close);
  td_buf_char(out, '\n');
  if (!s->in) return;
  for (uint32_t i = 0; i < r->n_callable; i++)
    write_elements(out, &r->callable[i], i, s->in);
  write_until(out, ".value", s->in->value_close, "\"\"", false);
  for (unsigned least = 1; least <= TD_API_MOST_LEAST; least++) {
    char name[24];
    snprintf(name, sizeof name, ".least%u.", least);
    if (has_least(r, least)) write_least(out, name, ".value", s->in->value_close, least);
  }
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

// The rule .root of messages in the Harmony format, behind <|start|>assistant: reasoning may come
// before a call or an answer, and text that is not constrained before more of them.
static void write_messages(td_buf *out, const td_api_request *r, const call_syntax *s) {
  const bool has_format = r->grammar.len, has_calls = r->calls_mode != TD_CALLS_FREE;
  const bool may_say = r->calls_mode != TD_CALLS_REQUIRED;
  td_buf_str(out, ".root ::= .answer | \"<|channel|>analysis<|message|>\" .think0\n");
  write_until(out, ".think", "<|end|>", ".rest", false);
  td_buf_str(out, ".rest ::= \"<|start|>assistant\" .answer\n");
  if (has_calls) write_calls(out, r, s);
  td_buf_str(out, ".answer ::= ");
  if (has_calls) {
    write_literal(out, s->open);
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

td_status td_api_compose_grammar(td_api_request *r, td_call_form form, td_reasoning reasoning,
                                 td_api_error *error) {
  const bool is_mistral = form == TD_CALL_MISTRAL || form == TD_CALL_MISTRAL_OBJECTS;
  const bool is_suffixed = form == TD_CALL_HY_SUFFIXED;
  const char *begin = is_mistral ? "[THINK]" : is_suffixed ? "<think:opensource>" : "<think>";
  const char *end = is_mistral ? "[/THINK]" : is_suffixed ? "</think:opensource>" : "</think>";
  if (!r->grammar.len && r->calls_mode == TD_CALLS_FREE) return TD_OK;
  td_buf text = TD_BUF_INIT;
  td_err err;
  if (r->is_chat && form == TD_CALL_HARMONY) {
    write_messages(&text, r, &syntaxes[form]);
  } else if (r->is_chat) {
    td_buf_str(&text, ".root ::= ");
    if (reasoning != TD_REASONING_BEGUN) td_buf_str(&text, ".answer");
    if (reasoning == TD_REASONING_MAYBE) td_buf_printf(&text, " | \"%s\" ", begin);
    td_buf_str(&text, reasoning == TD_REASONING_NONE ? "\n" : ".think0\n");
    write_until(&text, ".think", end, ".rest", false);
    td_buf_str(&text, ".rest ::= [ \\n]{0,4} .answer\n");
    write_answer(&text, r, &syntaxes[form]);
  }
  if (r->needs_json_rules) td_json_schema_write_common(&text);
  td_buf_add(&text, td_buf_text(&r->grammar), r->grammar.len);
  const td_buf *rules = syntaxes[form].in ? &r->value_rules : &r->call_rules;
  td_buf_add(&text, td_buf_text(rules), rules->len);
  text.failed |= r->grammar.failed || rules->failed;
  td_buf_free(&r->grammar);
  r->grammar = text;
  td_grammar *grammar;
  td_status st = td_buf_status(&text, &err);
  if (st == TD_OK) st = td_grammar_open(&grammar, text.data, text.len, &err);
  if (st != TD_OK) {
    const char *param = r->constraint ? r->constraint : "tools";
    td_err_prefix(&err, "%s", param);
    return td_api_fail_err(error, param, &err);
  }
  td_grammar_close(grammar);
  return TD_OK;
}
