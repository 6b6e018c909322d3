// src/api/calls/call_syntax.c - how a model writes tool calls: found in what its template writes,
// which the output parser must read, too.
#include "api/calls/call_syntax.h"

#include <string.h>

#include "api/output_parser.h"
#include "base/str.h"

static const td_call_syntax syntaxes[] = {
    [TD_CALL_HERMES] = {.form = TD_CALL_HERMES,
                        .open = "<tool_call>\n{\"name\": \"",
                        .between = "}\n</tool_call>\n<tool_call>\n{\"name\": \"",
                        .close = "}\n</tool_call>",
                        .after_name = "\", \"arguments\": "},
    [TD_CALL_DEEPSEEK] = {.form = TD_CALL_DEEPSEEK,
                          .open = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
                          .between = "<｜tool▁call▁end｜><｜tool▁call▁begin｜>",
                          .close = "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
                          .after_name = "<｜tool▁sep｜>"},
    [TD_CALL_DEEPSEEK_V3] =
        {.form = TD_CALL_DEEPSEEK_V3,
         .open = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>",
         .between = "\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
         .close = "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
         .after_name = "\n```json\n"},
    [TD_CALL_KIMI] = {.form = TD_CALL_KIMI,
                      .open = "<|tool_calls_section_begin|><|tool_call_begin|>functions.",
                      .between = "<|tool_call_end|><|tool_call_begin|>functions.",
                      .close = "<|tool_call_end|><|tool_calls_section_end|>",
                      .after_name = "<|tool_call_argument_begin|>",
                      .index = "\":\" [0-9]{1,3} "},
    [TD_CALL_FUNCTION] = {.form = TD_CALL_FUNCTION,
                          .open = "<tool_call>\n<function=",
                          .between = "</function>\n</tool_call>\n<tool_call>\n<function=",
                          .close = "</function>\n</tool_call>",
                          .after_name = ">\n",
                          .key_open = "<parameter=",
                          .key_close = ">\n",
                          .value_close = "\n</parameter>\n"},
    [TD_CALL_ARG_KEYS] = {.form = TD_CALL_ARG_KEYS,
                          .open = "<tool_call>",
                          .between = "</tool_call>\n<tool_call>",
                          .close = "</tool_call>",
                          .after_name = "\n",
                          .key_open = "<arg_key>",
                          .key_close = "</arg_key>\n<arg_value>",
                          .value_close = "</arg_value>\n"},
    [TD_CALL_ARG_KEYS_TIGHT] = {.form = TD_CALL_ARG_KEYS_TIGHT,
                                .open = "<tool_call>",
                                .between = "</tool_call><tool_call>",
                                .close = "</tool_call>",
                                .after_name = "",
                                .key_open = "<arg_key>",
                                .key_close = "</arg_key><arg_value>",
                                .value_close = "</arg_value>"},
    [TD_CALL_INVOKE] = {.form = TD_CALL_INVOKE,
                        .open = "<minimax:tool_call>\n<invoke name=\"",
                        .between = "</invoke>\n<invoke name=\"",
                        .close = "</invoke>\n</minimax:tool_call>",
                        .after_name = "\">\n",
                        .key_open = "<parameter name=\"",
                        .key_close = "\">",
                        .value_close = "</parameter>\n"},
    [TD_CALL_DSML] = {.form = TD_CALL_DSML,
                      .open = "<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"",
                      .between = "</｜DSML｜invoke>\n<｜DSML｜invoke name=\"",
                      .close = "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
                      .after_name = "\">\n",
                      .key_open = "<｜DSML｜parameter name=\"",
                      .key_close = "\" string=\"true\">",
                      .json_key_close = "\" string=\"false\">",
                      .value_close = "</｜DSML｜parameter>\n"},
    [TD_CALL_DSML_V4] = {.form = TD_CALL_DSML_V4,
                         .open = "<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"",
                         .between = "</｜DSML｜invoke>\n<｜DSML｜invoke name=\"",
                         .close = "</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
                         .after_name = "\">\n",
                         .key_open = "<｜DSML｜parameter name=\"",
                         .key_close = "\" string=\"true\">",
                         .json_key_close = "\" string=\"false\">",
                         .value_close = "</｜DSML｜parameter>\n"},
#define NS "]<]minimax[>["
    [TD_CALL_ELEMENTS] = {.form = TD_CALL_ELEMENTS,
                          .open = NS "<tool_call>\n" NS "<invoke name=\"",
                          .between = NS "</invoke>\n" NS "<invoke name=\"",
                          .close = NS "</invoke>\n" NS "</tool_call>",
                          .after_name = "\">",
                          .key_open = NS "<",
                          .key_close = ">",
                          .value_close = NS "<",
                          .ends_by_key = true},
    [TD_CALL_HY] = {.form = TD_CALL_HY,
                    .open = "<tool_calls>\n<tool_call>",
                    .between = "</tool_call>\n<tool_call>",
                    .close = "</tool_call>\n</tool_calls>",
                    .after_name = "<tool_sep>\n",
                    .key_open = "<arg_key>",
                    .key_close = "</arg_key>\n<arg_value>",
                    .value_close = "</arg_value>\n"},
    [TD_CALL_HY_SUFFIXED] = {.form = TD_CALL_HY_SUFFIXED,
                             .open = "<tool_calls:opensource>\n<tool_call:opensource>",
                             .between = "</tool_call:opensource>\n<tool_call:opensource>",
                             .close = "</tool_call:opensource>\n</tool_calls:opensource>",
                             .after_name = "<tool_sep:opensource>\n",
                             .key_open = "<arg_key:opensource>",
                             .key_close = "</arg_key:opensource>\n<arg_value:opensource>",
                             .value_close = "</arg_value:opensource>\n",
                             .thoughts = &td_output_forms[TD_OUTPUT_HY3]},
    [TD_CALL_MISTRAL] = {.form = TD_CALL_MISTRAL,
                         .open = "[TOOL_CALLS]",
                         .between = "[TOOL_CALLS]",
                         .close = "",
                         .after_name = "[ARGS]",
                         .thoughts = &td_output_forms[TD_OUTPUT_MISTRAL]},
    [TD_CALL_MISTRAL_OBJECTS] = {.form = TD_CALL_MISTRAL_OBJECTS,
                                 .open = "[TOOL_CALLS] [{\"name\": \"",
                                 .between = "}, {\"name\": \"",
                                 .close = "}]",
                                 .after_name = "\", \"arguments\": ",
                                 .thoughts = &td_output_forms[TD_OUTPUT_MISTRAL]},
    // Constrained calls have JSON in place of the model's own quotes, and are read alike.
    [TD_CALL_GEMMA] = {.form = TD_CALL_GEMMA,
                       .open = "<|tool_call>call:",
                       .between = "<tool_call|><|tool_call>call:",
                       .close = "<tool_call|>",
                       .after_name = "",
                       .thoughts = &td_output_forms[TD_OUTPUT_GEMMA]},
    // Any end token may follow, <|call|> among them.
    [TD_CALL_HARMONY] = {.form = TD_CALL_HARMONY,
                         .open = "<|channel|>commentary to=functions.",
                         .close = "",
                         .after_name = " <|constrain|>json<|message|>"},
};

const td_call_syntax *td_call_syntax_of_form(td_call_form form) {
  return &syntaxes[form];
}

void td_call_syntax_close(td_call_syntax *syntax) {
  td_buf_free(&syntax->own);
  *syntax = (td_call_syntax){0};
}

// The form is told by what the template mentions.
static td_call_form form_of(const td_chat *chat) {
  static const struct {
    const char *text, *also; // NULL: nothing else
    td_call_form form;
  } marks[] = {{"<|channel|>", NULL, TD_CALL_HARMONY},
               {"<tool_sep", ":opensource", TD_CALL_HY_SUFFIXED},
               {"<tool_sep", NULL, TD_CALL_HY},
               {"<|tool_calls_section_begin|>", NULL, TD_CALL_KIMI},
               {"<minimax:tool_call>", NULL, TD_CALL_INVOKE},
               {"<｜DSML｜tool_calls>", NULL, TD_CALL_DSML_V4},
               {"｜DSML｜", NULL, TD_CALL_DSML},
               {NS, NULL, TD_CALL_ELEMENTS},
               {"<|tool_call>", NULL, TD_CALL_GEMMA},
               {"</arg_key><arg_value>", NULL, TD_CALL_ARG_KEYS_TIGHT},
               {"<arg_key>", NULL, TD_CALL_ARG_KEYS},
               {"<function=", NULL, TD_CALL_FUNCTION},
               {"[ARGS]", NULL, TD_CALL_MISTRAL},
               {"[TOOL_CALLS]", NULL, TD_CALL_MISTRAL_OBJECTS},
               {"<｜tool▁calls▁begin｜>", "```json", TD_CALL_DEEPSEEK_V3},
               {"<｜tool▁calls▁begin｜>", NULL, TD_CALL_DEEPSEEK}};
  for (size_t i = 0; i < TD_COUNT(marks); i++)
    if (td_chat_template_mentions(chat, marks[i].text) &&
        (!marks[i].also || td_chat_template_mentions(chat, marks[i].also)))
      return marks[i].form;
  return TD_CALL_HERMES;
}

// ---- what a template writes ---------------------------------------------------------------------

#define USER   "probe-user"
#define SAID   "probe-said"
#define ID     "probe0000"
#define FIRST  "probe_first"
#define SECOND "probe_second"

// Kimi's ids hold the name. Some templates take arguments as text.
#define CALL(id, name, arguments)                                                                  \
  "{\"id\": \"" id "\", \"type\": \"function\", \"function\": {\"name\": \"" name                  \
  "\", \"arguments\": " arguments "}}"
#define OBJECT "{\"probe_key\": \"probe-value\", \"probe_key2\": \"probe-value2\"}"
#define TEXT                                                                                       \
  "\"{\\\"probe_key\\\": \\\"probe-value\\\", \\\"probe_key2\\\": \\\"probe-value2\\\"}\""
#define CHAT(message)                                                                              \
  "{\"messages\": [{\"role\": \"user\", \"content\": \"" USER "\"}, {\"role\": \"assistant\", "    \
  "\"content\": " message                                                                          \
  "}], \"tools\": [{\"type\": \"function\", \"function\": {\"name\": \"" FIRST                     \
  "\", \"description\": \"\", \"parameters\": {\"type\": \"object\", \"properties\": {}}}}]"       \
  ", \"add_generation_prompt\": false}"
#define CALLS(list) CHAT("null, \"tool_calls\": [" list "]")
#define PROBES(first, second, arguments)                                                           \
  {                                                                                                \
    CALLS(CALL(first, FIRST, arguments)),                                                          \
        CALLS(CALL(first, FIRST, arguments) ", " CALL(second, SECOND, arguments))                  \
  }

static bool render(td_buf *out, const td_chat *chat, const char *vars) {
  td_token_ids ids = {.most = SIZE_MAX};
  td_err ignored;
  const bool ok = td_chat_encode(chat, vars, strlen(vars), &ids, out, &ignored) == TD_OK;
  td_token_ids_free(&ids);
  return ok && !out->failed;
}

// A piece of a rendered text.
typedef struct {
  const char *at;
  size_t n;
} piece;

static const char *end_of(piece p) {
  return p.at + p.n;
}

// Cuts text at a word: what precedes it goes to *before, what follows remains. False: it is not
// there.
static bool cut(piece *text, const char *word, piece *before) {
  const char *found = memmem(text->at, text->n, word, strlen(word));
  if (!found) return false;
  *before = (piece){text->at, (size_t)(found - text->at)};
  const char *behind = found + strlen(word);
  *text = (piece){behind, (size_t)(end_of(*text) - behind)};
  return true;
}

// The same at the last such word.
static bool cut_last(piece *text, const char *word, piece *before) {
  const size_t n = strlen(word);
  piece rest = *text, head;
  if (!cut(&rest, word, &head)) return false;
  while (cut(&rest, word, &head)) {
  }
  *before = (piece){text->at, (size_t)(rest.at - text->at) - n};
  *text = rest;
  return true;
}

static bool drop_front(piece *text, piece word) {
  if (text->n < word.n || memcmp(text->at, word.at, word.n) != 0) return false;
  *text = (piece){text->at + word.n, text->n - word.n};
  return true;
}

static bool drop_back(piece *text, piece word) {
  if (text->n < word.n || memcmp(end_of(*text) - word.n, word.at, word.n) != 0) return false;
  text->n -= word.n;
  return true;
}

// The pieces of a syntax.
enum { OPEN, BETWEEN, CLOSE, AFTER_NAME, KEY_OPEN, KEY_CLOSE, VALUE_CLOSE, N_PIECES };

static const piece quote_brace = {"\"}", 2};

// Reads NAME behind, up to the end of the first call's arguments; *text is what follows.
static bool read_arguments(piece *text, piece parts[N_PIECES], const char *key_mark) {
  piece before, gap, value = {0};
  if (!cut(text, "probe_key", &before) || !cut(text, "probe-value", &parts[KEY_CLOSE]) ||
      !cut(text, "probe_key2", &gap) || !cut(text, "probe-value2", &value))
    return false;
  if (!key_mark) {
    static const piece begins = {"{\"", 2}, next = {"\", \"", 4}, colon = {"\": \"", 4};
    parts[AFTER_NAME] = before;
    return drop_back(&parts[AFTER_NAME], begins) && gap.n == next.n &&
           parts[KEY_CLOSE].n == colon.n && !memcmp(gap.at, next.at, next.n) &&
           !memcmp(parts[KEY_CLOSE].at, colon.at, colon.n) && drop_front(text, quote_brace);
  }
  // What both a key and the end of the arguments follow ends a value.
  piece close, rest = gap;
  if (!cut_last(&rest, key_mark, &close)) return false;
  size_t n = 0;
  while (n < close.n && n < text->n && close.at[n] == text->at[n])
    n++;
  parts[VALUE_CLOSE] = (piece){gap.at, n};
  parts[KEY_OPEN] = (piece){gap.at + n, gap.n - n};
  parts[AFTER_NAME] = before;
  return drop_back(&parts[AFTER_NAME], parts[KEY_OPEN]) && drop_front(text, parts[VALUE_CLOSE]);
}

// What the text of a message of calls has behind the last, without what ends every message.
static piece without_end(piece text, piece end) {
  drop_back(&text, end);
  while (text.n && td_is_space(text.at[text.n - 1]))
    text.n--;
  return text;
}

// Where the first marker that opens calls stands.
static bool find_open(piece *text) {
  for (size_t at = 0; at < text->n; at++) {
    td_mark mark;
    size_t n;
    unsigned form;
    if (td_call_marker_at(TD_MARK_CALL, text->at, at, text->n, &mark, &n, &form) != TD_MARKER_WHOLE)
      continue;
    *text = (piece){text->at + at, text->n - at};
    return true;
  }
  return false;
}

// The tag before a key, without the quote that may follow it; NULL: arguments are one object.
static const char *key_mark_of(td_call_form form) {
  return form == TD_CALL_INVOKE ? "<parameter name=" : syntaxes[form].key_open;
}

// one, two: messages of one call and of two. said: a message without calls, which ends alike.
static bool read_parts(piece parts[N_PIECES], td_call_form form, piece one, piece two, piece said) {
  const char *key_mark = key_mark_of(form);
  piece ignored, again[N_PIECES] = {{0}};
  if (!cut_last(&said, SAID, &ignored) || !cut_last(&one, USER, &ignored) ||
      !cut(&one, FIRST, &parts[OPEN]) || !find_open(&parts[OPEN]) ||
      !read_arguments(&one, parts, key_mark))
    return false;
  parts[CLOSE] = without_end(one, said);
  static const piece index = {":0", 2};
  if (form == TD_CALL_KIMI && !drop_front(&parts[AFTER_NAME], index)) return false;
  if (!two.n) return true;
  if (!cut_last(&two, USER, &ignored) || !cut(&two, FIRST, &ignored) ||
      !read_arguments(&two, again, key_mark))
    return false;
  return cut(&two, SECOND, &parts[BETWEEN]);
}

// Whether the parser reads the calls that the syntax makes, and nothing else.
static bool is_read(const td_call_syntax *s) {
  td_buf text = TD_BUF_INIT;
  td_output_parser parser = {.parse_tool_calls = true};
  td_output_part part;
  bool found = true, is_all = true;
  td_err ignored;
  for (int i = 0; i < (s->between ? 2 : 1); i++) {
    td_buf_printf(&text, "%s%s%s%s", i ? s->between : s->open, FIRST, s->index ? ":0" : "",
                  s->after_name);
    for (int k = 0; s->key_open && k < 2; k++)
      td_buf_printf(&text, "%skey%d%svalue%s", s->key_open, k, s->key_close, s->value_close);
    if (!s->key_open) td_buf_str(&text, "{\"key\": 1}");
  }
  td_buf_str(&text, s->close);
  while (found && is_all) {
    if (td_output_parser_next(&parser, td_buf_text(&text), text.len, TD_TEXT_ENDED, &part, &found,
                              &ignored) != TD_OK)
      break;
    is_all = !found || part.kind == TD_OUTPUT_CALL;
  }
  const bool ok = !text.failed && !found && is_all && parser.n_calls == (s->between ? 2u : 1u) &&
                  !td_output_parser_is_cut(&parser) && strcmp(parser.calls[0].name, FIRST) == 0;
  td_output_parser_free(&parser);
  td_buf_free(&text);
  return ok;
}

// Adds what closes the key of a value that is not a string, where the tag says so: the probes'
// values are strings.
static bool add_json_key_close(td_buf *out, piece key_close) {
  piece before;
  if (!cut(&key_close, "true", &before)) return false;
  td_buf_add(out, before.at, before.n);
  td_buf_str(out, "false");
  td_buf_add(out, key_close.at, key_close.n);
  td_buf_char(out, '\0');
  return true;
}

// Makes a syntax of the pieces. False: they are none, such as where an id stands in them.
static bool take_parts(td_call_syntax *s, td_call_form form, const piece parts[N_PIECES],
                       bool has_two) {
  const bool has_elements = key_mark_of(form) != NULL;
  size_t at[N_PIECES];
  for (int i = 0; i < N_PIECES; i++) {
    at[i] = s->own.len;
    if (parts[i].n &&
        (memmem(parts[i].at, parts[i].n, ID, strlen(ID)) || memchr(parts[i].at, '\0', parts[i].n)))
      return false;
    td_buf_add(&s->own, parts[i].n ? parts[i].at : "", parts[i].n);
    td_buf_char(&s->own, '\0');
  }
  const bool says_type = syntaxes[form].json_key_close != NULL;
  const size_t json_at = s->own.len;
  if (says_type && !add_json_key_close(&s->own, parts[KEY_CLOSE])) return false;
  if (s->own.failed) return false;
  const char *text = td_buf_text(&s->own);
  s->form = form;
  s->open = text + at[OPEN];
  s->between = has_two ? text + at[BETWEEN] : NULL;
  s->close = text + at[CLOSE];
  s->after_name = text + at[AFTER_NAME];
  s->index = syntaxes[form].index;
  s->key_open = has_elements ? text + at[KEY_OPEN] : NULL;
  s->key_close = text + at[KEY_CLOSE];
  s->json_key_close = says_type ? text + json_at : NULL;
  s->value_close = text + at[VALUE_CLOSE];
  return is_read(s);
}

void td_call_syntax_open(td_call_syntax *out, const td_chat *chat) {
  enum { N_TRIES = 2 };
  static const char *const probes[2][N_TRIES][2] = {
      {PROBES(ID, ID, OBJECT), PROBES(ID, ID, TEXT)},
      {PROBES("functions." FIRST ":0", "functions." SECOND ":1", OBJECT),
       PROBES("functions." FIRST ":0", "functions." SECOND ":1", TEXT)}};
  const td_call_form form = form_of(chat);
  td_buf said = TD_BUF_INIT;
  bool is_found = false;
  // Templates write Harmony's recipients elsewhere than models do, and end tags with a key's name
  // are not pieces.
  const bool can_say = form != TD_CALL_HARMONY && !syntaxes[form].ends_by_key &&
                       render(&said, chat, CHAT("\"" SAID "\""));
  for (size_t i = 0; i < N_TRIES && can_say && !is_found; i++) {
    const char *const *probe = probes[form == TD_CALL_KIMI][i];
    td_buf one = TD_BUF_INIT, two = TD_BUF_INIT;
    piece parts[N_PIECES] = {{0}};
    *out = (td_call_syntax){0};
    if (render(&one, chat, probe[0])) {
      if (!render(&two, chat, probe[1])) td_buf_clear(&two);
      is_found = read_parts(parts, form, (piece){td_buf_text(&one), one.len},
                            (piece){td_buf_text(&two), two.len},
                            (piece){td_buf_text(&said), said.len}) &&
                 take_parts(out, form, parts, two.len > 0);
    }
    if (!is_found) td_call_syntax_close(out);
    td_buf_free(&one);
    td_buf_free(&two);
  }
  td_buf_free(&said);
  if (!is_found) *out = syntaxes[form];
  out->thoughts = td_output_form_of(chat);
}
