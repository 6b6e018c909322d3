// src/api/calls/tool_calls.c - incremental reader of one tool call, for all supported forms.
#include "api/calls/tool_calls_impl.h"
#include "base/str.h"

#include <stdlib.h>
#include <string.h>

typedef td_call_outcome outcome;
typedef td_call_reading reading;

enum {
  HERMES,
  DEEPSEEK,
  KIMI,
  FUNCTION,
  ARG_KEYS,
  INVOKE,
  ELEMENTS,
  DSML,
  DSML_V4,
  DSML_PLAIN,
  DSML_V4_PLAIN,
  HY,
  HY_SUFFIXED,
  MISTRAL,
  MISTRAL_OBJECTS,
  GEMMA
};

static const td_call_tags function_tags = {.name_close = ">",
                                           .key_open = "<parameter=",
                                           .key_close = ">",
                                           .value_close = "</parameter>",
                                           .end = "</function>",
                                           .trims_line_feeds = true};
// GLM's and, with the mark behind the name, Hy3's.
static const td_call_tags arg_key_tags = {.after_name = "<tool_sep>",
                                          .key_open = "<arg_key>",
                                          .key_close = "</arg_key>",
                                          .value_open = "<arg_value>",
                                          .value_close = "</arg_value>"};
static const td_call_tags suffixed_tags = {.after_name = "<tool_sep:opensource>",
                                           .key_open = "<arg_key:opensource>",
                                           .key_close = "</arg_key:opensource>",
                                           .value_open = "<arg_value:opensource>",
                                           .value_close = "</arg_value:opensource>"};
static const td_call_tags invoke_tags = {.name_open = "<invoke name=",
                                         .name_close = ">",
                                         .key_open = "<parameter name=",
                                         .key_close = ">",
                                         .value_close = "</parameter>",
                                         .end = "</invoke>"};

// MiniMax-M3 puts a token before each tag.
#define NS "]<]minimax[>["
static const td_call_tags element_tags = {.name_open = NS "<invoke name=",
                                          .name_close = ">",
                                          .key_open = NS "<",
                                          .key_close = ">",
                                          .value_close = NS "</",
                                          .end = NS "</invoke>",
                                          .keys_are_tags = true};

// Some models write other bars.
#define DSML_TAGS(bar)                                                                             \
  {                                                                                                \
    .name_open = "<" bar "DSML" bar "invoke name=", .name_close = ">",                             \
    .key_open = "<" bar "DSML" bar "parameter name=", .key_close = ">",                            \
    .text_mark = " string=", .value_close = "</" bar "DSML" bar "parameter>",                      \
    .end = "</" bar "DSML" bar "invoke>"                                                           \
  }
#define DSML_FORM(bar, run, its_tags)                                                              \
  {                                                                                                \
    .open = "<" bar "DSML" bar run ">", .close = "</" bar "DSML" bar run ">",                      \
    .call_open = "<" bar "DSML" bar "invoke name=", .ends_thought = true, .tags = &(its_tags)      \
  }
static const td_call_tags dsml_tags = DSML_TAGS("｜"), plain_dsml_tags = DSML_TAGS("|");

static const td_call_form_marks forms[] = {
    [HERMES] = {.call_open = "<tool_call>", .call_close = "</tool_call>", .ends_thought = true},
    [DEEPSEEK] = {.open = "<｜tool▁calls▁begin｜>",
                  .close = "<｜tool▁calls▁end｜>",
                  .call_open = "<｜tool▁call▁begin｜>",
                  .middle = "<｜tool▁sep｜>",
                  .call_close = "<｜tool▁call▁end｜>"},
    [KIMI] = {.open = "<|tool_calls_section_begin|>",
              .close = "<|tool_calls_section_end|>",
              .call_open = "<|tool_call_begin|>",
              .middle = "<|tool_call_argument_begin|>",
              .call_close = "<|tool_call_end|>",
              .has_ids = true,
              .ends_thought = true},
    [FUNCTION] = {.call_open = "<function=", .call_close = "</tool_call>", .tags = &function_tags},
    [ARG_KEYS] = {.call_close = "</tool_call>", .tags = &arg_key_tags},
    [INVOKE] = {.open = "<minimax:tool_call>",
                .close = "</minimax:tool_call>",
                .call_open = "<invoke name=",
                .opens_offered = true,
                .tags = &invoke_tags},
    [ELEMENTS] = {.open = NS "<tool_call>",
                  .close = NS "</tool_call>",
                  .call_open = NS "<invoke name=",
                  .tags = &element_tags},
    [DSML] = DSML_FORM("｜", "function_calls", dsml_tags),
    [DSML_V4] = DSML_FORM("｜", "tool_calls", dsml_tags),
    [DSML_PLAIN] = DSML_FORM("|", "function_calls", plain_dsml_tags),
    [DSML_V4_PLAIN] = DSML_FORM("|", "tool_calls", plain_dsml_tags),
    // Its calls begin with HERMES' marker.
    [HY] = {.open = "<tool_calls>",
            .close = "</tool_calls>",
            .call_close = "</tool_call>",
            .ends_thought = true,
            .tags = &arg_key_tags},
    [HY_SUFFIXED] = {.open = "<tool_calls:opensource>",
                     .close = "</tool_calls:opensource>",
                     .call_open = "<tool_call:opensource>",
                     .call_close = "</tool_call:opensource>",
                     .ends_thought = true,
                     .tags = &suffixed_tags},
    [MISTRAL] = {.call_open = "[TOOL_CALLS]", .middle = "[ARGS]", .id_mark = "[CALL_ID]"},
    [MISTRAL_OBJECTS] = {0},
    // A brace ends the name: what would be in the middle stands before it.
    [GEMMA] = {.call_open = "<|tool_call>call:",
               .middle = "call:",
               .has_bare_keys = true,
               .call_close = "<tool_call|>",
               .ends_thought = true},
};

void td_tool_call_free(td_tool_call *call) {
  free(call->name);
  td_buf_free(&call->arguments);
  *call = (td_tool_call){0};
}

// ---- markers ----------------------------------------------------------------------------------

td_marker_match td_marker_at(const char *marker, const char *text, size_t at, size_t len) {
  size_t n = strlen(marker), there = len - at;
  if (there == 0 || memcmp(text + at, marker, there < n ? there : n) != 0) return TD_MARKER_NONE;
  return there < n ? TD_MARKER_CUT : TD_MARKER_WHOLE;
}

td_marker_match td_call_marker_at(td_mark last, const char *text, size_t at, size_t len,
                                  td_mark *mark, size_t *n, unsigned *form) {
  td_marker_match found = TD_MARKER_NONE;
  if (at == len || !strchr("<[]", text[at]) || !text[at]) return found;
  for (unsigned i = 0; i < TD_COUNT(forms); i++) {
    const td_call_form_marks *f = &forms[i];
    const struct {
      const char *text;
      td_mark mark;
    } marks[] = {{f->open, TD_MARK_OPEN},
                 {f->call_open, TD_MARK_CALL},
                 {f->close, TD_MARK_CLOSE},
                 {f->call_close, TD_MARK_CLOSE}};
    for (size_t k = 0; k < TD_COUNT(marks); k++) {
      if (!marks[k].text || (last ? marks[k].mark > last : k > 1 || !f->ends_thought)) continue;
      td_marker_match match = td_marker_at(marks[k].text, text, at, len);
      if (match == TD_MARKER_WHOLE) {
        *mark = marks[k].mark;
        *n = strlen(marks[k].text);
        *form = i;
        return match;
      }
      if (match == TD_MARKER_CUT) found = match;
    }
  }
  return found;
}

const char *td_call_opening(unsigned i) {
  if (i / 2 >= TD_COUNT(forms)) return NULL;
  const char *marker = i % 2 ? forms[i / 2].call_open : forms[i / 2].open;
  return marker ? marker : "";
}

outcome td_call_at(const reading *x, const char *marker, size_t at) {
  const td_marker_match match = marker ? td_marker_at(marker, x->text, at, x->len) : TD_MARKER_NONE;
  return match == TD_MARKER_WHOLE ? GO : match == TD_MARKER_CUT ? WAIT : NONE;
}

outcome td_call_any_at(const reading *x, const char *const *marks, size_t n, size_t at) {
  outcome found = NONE;
  for (size_t i = 0; i < n && found != GO; i++) {
    const outcome o = td_call_at(x, marks[i], at);
    if (o != NONE) found = o;
  }
  return found;
}

// ---- steps ------------------------------------------------------------------------------------

static outcome go(reading *x, int step) {
  return td_call_go(x, step);
}

static void set_form(reading *x, unsigned form) {
  x->r->form = form;
  x->form = &forms[form];
}

bool td_call_skip_space(reading *x) {
  td_call_reader *r = x->r;
  while (r->at < x->len && td_is_space(x->text[r->at]))
    r->at++;
  return r->at < x->len;
}

// ---- names ------------------------------------------------------------------------------------

static bool is_quote(char c) {
  return c == '"' || c == '\'';
}

void td_call_strip(const char **text, size_t *len) {
  while (*len && (td_is_space((*text)[0]) || is_quote((*text)[0])))
    ++*text, --*len;
  while (*len && (td_is_space((*text)[*len - 1]) || is_quote((*text)[*len - 1])))
    --*len;
}

static size_t without_digits(const char *text, size_t len) {
  while (len && text[len - 1] >= '0' && text[len - 1] <= '9')
    len--;
  return len;
}

// Whether the text ends in a colon and digits.
static bool has_index(const char *text, size_t len) {
  const size_t n = without_digits(text, len);
  return n > 0 && n < len && text[n - 1] == ':';
}

// Length of the name without what the model appended. way 0: all of it; 1: without an index, as in
// NAME_0 and NAME.0; 2: without an id, as in NAME:call_1 and NAME#x; 3: without digits, as in
// NAME0.
static size_t without_id(const char *name, size_t len, int way) {
  const size_t n = way == 2 ? strcspn(name, ":#") : without_digits(name, len);
  if (way == 0 || n == 0) return len;
  if (way == 3) return n;
  if (way == 2) return n < len ? n : len;
  return n < len && strchr(":#._-", name[n - 1]) ? n - 1 : len;
}

bool td_call_match_name(const td_tool_params *params, bool has_ids, char *name) {
  static const char prefix[] = "functions";
  const size_t n = sizeof prefix - 1;
  char tried[TD_CALL_MAX_NAME + 1];
  const bool has_prefix = strncmp(name, prefix, n) == 0;
  const char *begins[] = {name, name + (has_prefix ? n : 0)};
  if (has_prefix && name[n] && strchr("._:/-", name[n])) begins[1]++;
  for (int k = 0; k < 8; k++) {
    const char *from = begins[k % 2];
    const size_t n_tried = without_id(from, strlen(from), k / 2);
    memcpy(tried, from, n_tried);
    tried[n_tried] = '\0';
    if (!td_tool_params_has_tool(params, tried)) continue;
    memcpy(name, tried, n_tried + 1);
    return true;
  }
  if (has_prefix && name[n] == '.') memmove(name, name + n + 1, strlen(name + n));
  if (has_ids && has_index(name, strlen(name))) *strrchr(name, ':') = '\0';
  return false;
}

// Kimi writes functions.NAME:INDEX, which is also the id; parts of it may be missing. Mistral
// writes the id behind a marker.
outcome td_call_set_name(reading *x, const char *text, size_t len) {
  char name[TD_CALL_MAX_NAME + 1];
  const char *mark = x->form->id_mark;
  const char *found = mark && len ? memmem(text, len, mark, strlen(mark)) : NULL;
  if (found) {
    const char *id = found + strlen(mark);
    const size_t n = len - (size_t)(id - text);
    if (n < sizeof x->call->id && !memchr(id, '\0', n)) memcpy(x->call->id, id, n);
    len = (size_t)(found - text);
  }
  td_call_strip(&text, &len);
  if (len == 0 || len > TD_CALL_MAX_NAME || memchr(text, '\0', len)) return NONE;
  memcpy(name, text, len);
  name[len] = '\0';
  td_call_match_name(x->r->params, x->form->has_ids, name);
  if (!name[0] || !td_tool_params_may_call(x->r->params, name)) return NONE;
  // Markup and blanks are of no name, but of text that looks like a call.
  const bool must_be_offered = strpbrk(name, "<> \t\r\n") ||
                               (x->form->opens_offered && !x->r->in_run);
  if (must_be_offered && !td_tool_params_has_tool(x->r->params, name)) return NONE;
  if (x->form->has_ids && has_index(text, len) && len < sizeof x->call->id)
    memcpy(x->call->id, text, len);
  x->call->name = strdup(name);
  if (!x->call->name) x->call->arguments.failed = true;
  return GO;
}

// ---- arguments --------------------------------------------------------------------------------

// The arguments are complete.
static outcome end_arguments(reading *x) {
  td_call_reader *r = x->r;
  if (!x->call->arguments.len) td_buf_str(&x->call->arguments, "{}");
  r->has_arguments = r->has_value = true;
  r->begin = r->at;
  return go(x, x->form->middle ? STEP_CLOSE : STEP_KEY);
}

// Passes the quote that begins a string, which step reads into word.
static outcome begin_string(reading *x, int step) {
  td_call_reader *r = x->r;
  r->string = (td_string_reader){.quote = x->text[r->at++]};
  td_buf_clear(&r->word);
  return go(x, step);
}

// At the first byte of a value that may be the arguments.
static outcome begin_arguments(reading *x) {
  td_call_reader *r = x->r;
  r->object = (td_object_reader){0};
  td_buf_clear(&r->word);
  switch (x->text[r->at]) {
  case '{': return go(x, x->form->has_bare_keys ? STEP_BARE : STEP_OBJECT);
  case '"':
  case '\'': return begin_string(x, STEP_QUOTED);
  case 'N':
  case 'n':
  case '[': return go(x, STEP_LITERAL);
  default: return NONE;
  }
}

// Reads an object or array into out, which may be NULL. GO: it is complete.
static outcome read_nested(reading *x, td_buf *out) {
  td_call_reader *r = x->r;
  while (r->at < x->len) {
    const td_object_state state = td_object_feed(&r->object, x->text[r->at], out);
    if (state == TD_OBJECT_BAD) return NONE;
    r->at++;
    if (state == TD_OBJECT_WHOLE) return GO;
  }
  return WAIT;
}

// Whether the object in the string that holds the arguments has ended.
static bool is_quoted_whole(const reading *x) {
  return x->call->arguments.len && !x->r->object.depth;
}

// A byte of that string.
static bool take_quoted(reading *x, char c) {
  td_call_reader *r = x->r;
  const bool is_over = is_quoted_whole(x);
  if (td_is_space(c) && (is_over || !r->object.depth)) return true;
  if (is_over || (r->word.len && c == '{')) return false;
  if (r->object.depth || c == '{')
    return td_object_feed(&r->object, c, &x->call->arguments) != TD_OBJECT_BAD;
  td_buf_char(&r->word, c);
  return r->word.len <= 4;
}

static bool is_nothing(const td_buf *word) {
  const char *text = td_buf_text(word);
  return !text[0] || !strcmp(text, "null") || !strcmp(text, "None") || !strcmp(text, "[]");
}

static outcome read_quoted(reading *x) {
  td_call_reader *r = x->r;
  for (; r->at < x->len; r->at++) {
    char bytes[TD_STRING_PIECE];
    bool ended;
    size_t n = td_string_feed(&r->string, x->text[r->at], bytes, &ended);
    for (size_t i = 0; i < n; i++) {
      if (take_quoted(x, bytes[i])) continue;
      r->has_arguments = is_quoted_whole(x); // what follows them is not part of the string
      return NONE;
    }
    if (!ended) continue;
    if (r->object.depth || !is_nothing(&r->word)) return NONE;
    r->at++;
    return end_arguments(x);
  }
  return x->is_final && is_quoted_whole(x) ? end_arguments(x) : WAIT;
}

static outcome read_literal(reading *x) {
  td_call_reader *r = x->r;
  while (r->at < x->len) {
    char c = x->text[r->at];
    bool is_array = r->word.len && r->word.data[0] == '[';
    if (is_array && td_is_space(c)) {
      r->at++;
      continue;
    }
    td_buf_char(&r->word, c);
    if (r->word.failed) return NONE;
    const char *whole = r->word.data[0] == '[' ? "[]" : r->word.data[0] == 'n' ? "null" : "None";
    if (strncmp(whole, r->word.data, r->word.len) != 0) return NONE;
    r->at++;
    if (r->word.len == strlen(whole)) return end_arguments(x);
  }
  return WAIT;
}

// ---- an object with name and arguments ----------------------------------------------------------

// Families share the marker of a call and differ in what it holds: an object, a function with
// parameters, or a name with pairs of keys and values.
static outcome begin_tags(reading *x) {
  td_call_reader *r = x->r;
  if (x->text[r->at] != '<') {
    set_form(x, ARG_KEYS);
    return go(x, STEP_TAG_OPEN);
  }
  const char *marker = forms[FUNCTION].call_open;
  const outcome o = td_call_at(x, marker, r->at);
  if (o != GO) return o;
  r->at += strlen(marker);
  set_form(x, FUNCTION);
  return go(x, STEP_TAG_OPEN);
}

// Some models put an array of calls between the markers.
static outcome read_brace(reading *x) {
  td_call_reader *r = x->r;
  if (!td_call_skip_space(x)) return WAIT;
  char c = x->text[r->at];
  if (r->form == HERMES && !r->is_array && c == '<') { // the marker may stand twice
    const outcome again = td_call_at(x, x->form->call_open, r->at);
    if (again == GO) r->at += strlen(x->form->call_open);
    if (again != NONE) return again;
  }
  if (r->form == HERMES && !r->is_array && c != '{' && c != '[') return begin_tags(x);
  bool is_array = c == '[' && !r->is_array;
  if (c != '{' && !is_array) return NONE;
  r->is_array |= is_array;
  r->at++;
  return is_array ? GO : go(x, STEP_KEY);
}

// A closing brace: of the outer object, or of the nested one.
static outcome end_object(reading *x) {
  td_call_reader *r = x->r;
  if (r->is_nested) {
    r->is_nested = false;
    r->has_value = true;
    return GO;
  }
  if (!x->call->name) return NONE;
  if (!r->has_arguments) end_arguments(x);
  r->begin = r->at;
  return go(x, STEP_CLOSE);
}

static outcome read_key(reading *x) {
  td_call_reader *r = x->r;
  bool is_complete = x->call->name && r->has_arguments;
  if (!td_call_skip_space(x)) return x->is_final && is_complete ? go(x, STEP_CLOSE) : WAIT;
  char c = x->text[r->at];
  if (c == '<' && is_complete) return go(x, STEP_CLOSE); // the model forgot a closing brace
  if (c == ',' && r->has_value && !r->has_comma) {
    r->has_comma = true;
    r->at++;
    return GO;
  }
  if (is_quote(c) && r->has_value == r->has_comma) return begin_string(x, STEP_KEY_TEXT);
  if (c != '}' || r->has_comma) return NONE;
  r->at++;
  return end_object(x);
}

// Reads a string into word, keeping at most max bytes. GO: the string is complete.
static outcome read_text(reading *x, size_t max) {
  td_call_reader *r = x->r;
  while (r->at < x->len) {
    char bytes[TD_STRING_PIECE];
    bool ended;
    size_t n = td_string_feed(&r->string, x->text[r->at++], bytes, &ended);
    if (r->word.len <= max) td_buf_add(&r->word, bytes, n);
    if (ended) return GO;
  }
  return WAIT;
}

static outcome read_colon(reading *x) {
  if (!td_call_skip_space(x)) return WAIT;
  if (x->text[x->r->at] != ':') return NONE;
  x->r->at++;
  return go(x, STEP_VALUE);
}

static bool is_key(const td_call_reader *r, const char *a, const char *b) {
  const char *key = td_buf_text(&r->word);
  return strcmp(key, a) == 0 || strcmp(key, b) == 0;
}

// Skips the value of a key that is not used.
static outcome begin_skip(reading *x) {
  td_call_reader *r = x->r;
  if (is_quote(x->text[r->at])) return begin_string(x, STEP_SKIP_TEXT);
  r->object = (td_object_reader){.may_be_array = true};
  return go(x, strchr("{[", x->text[r->at]) ? STEP_SKIP_OBJECT : STEP_SKIP_WORD);
}

// Llama writes "parameters" instead of "arguments". OpenAI nests both in a "function" object, and
// some models put the name there.
static outcome read_value(reading *x) {
  td_call_reader *r = x->r;
  if (!td_call_skip_space(x)) return WAIT;
  char c = x->text[r->at];
  bool is_name = is_key(r, "name", "function") && !x->call->name;
  r->has_value = true;
  r->has_comma = false;
  if (is_name && is_quote(c)) return begin_string(x, STEP_NAME_TEXT);
  if (is_name && c == '{' && !r->is_nested && is_key(r, "function", "function")) {
    r->at++;
    r->is_nested = true;
    r->has_value = false;
    return go(x, STEP_KEY);
  }
  if (is_name) return NONE;
  if (!is_key(r, "arguments", "parameters") || r->has_arguments) return begin_skip(x);
  return c == '}' || c == ',' ? end_arguments(x) : begin_arguments(x);
}

static outcome read_skipped_word(reading *x) {
  td_call_reader *r = x->r;
  for (; r->at < x->len; r->at++) {
    char c = x->text[r->at];
    if (c == ',' || c == '}' || td_is_space(c)) return go(x, STEP_KEY);
    if (c == '<' || c == '"' || c == '{' || c == '[') return NONE;
  }
  return WAIT;
}

// ---- a header followed by arguments -------------------------------------------------------------

// Whether a marker that ends the call is here. WAIT: it may be.
static outcome at_end(const reading *x) {
  const char *const ends[] = {x->form->call_close, x->form->call_open, x->form->close};
  return td_call_any_at(x, ends, TD_COUNT(ends), x->r->at);
}

// Where a header may be, some models write an object, or an array of them.
static bool begins_object(reading *x) {
  td_call_reader *r = x->r;
  if (r->form != MISTRAL) return false;
  for (size_t at = r->begin; at < r->at; at++)
    if (!td_is_space(x->text[at])) return false;
  if (x->text[r->at] != '[' && x->text[r->at] != '{') return false;
  set_form(x, MISTRAL_OBJECTS);
  return true;
}

// Reads up to the middle marker, which models may omit whether or not arguments follow.
static outcome read_header(reading *x) {
  td_call_reader *r = x->r;
  const char *middle = x->form->middle;
  for (; r->at < x->len; r->at++) {
    char c = x->text[r->at];
    if (r->at - r->begin > TD_CALL_MAX_NAME) return NONE;
    if (c != '<' && c != '{' && c != '[') continue;
    if (begins_object(x)) return go(x, STEP_BRACE);
    td_marker_match match = td_marker_at(middle, x->text, r->at, x->len);
    outcome id = match == TD_MARKER_NONE ? td_call_at(x, x->form->id_mark, r->at) : NONE;
    if (id == GO) continue;
    outcome end = c == '{' || match == TD_MARKER_WHOLE ? GO : at_end(x);
    if (match == TD_MARKER_CUT || end == WAIT || id == WAIT) return WAIT;
    if (end == NONE && c == '[' && middle[0] != '[') continue;
    if (end == NONE) return NONE;
    td_buf_clear(&r->word);
    td_buf_add(&r->word, x->text + r->begin, r->at - r->begin);
    if (match == TD_MARKER_WHOLE) {
      r->at += strlen(middle);
      return go(x, STEP_BODY);
    }
    if (td_call_set_name(x, td_buf_text(&r->word), r->word.len) == NONE) return NONE;
    return c == '{' ? begin_arguments(x) : end_arguments(x);
  }
  return WAIT;
}

// There was no middle marker: the header kept in word is the name.
static outcome name_is_header(reading *x) {
  if (x->call->name) return GO;
  return td_call_set_name(x, td_buf_text(&x->r->word), x->r->word.len);
}

static bool is_type(const td_buf *header) {
  const char *text = td_buf_text(header);
  while (td_is_space(*text))
    text++;
  return strncmp(text, "function", 8) == 0 && !text[8 + strspn(text + 8, " \n\t\r")];
}

// After the middle marker. DeepSeek V3 and R1 write the type `function` before it, and after it the
// name and the arguments in a fenced block; V3.1 writes the name before it and the arguments after.
static outcome read_body(reading *x) {
  td_call_reader *r = x->r;
  if (!td_call_skip_space(x)) return WAIT;
  char c = x->text[r->at];
  if (c == '`' && !r->is_fenced) {
    r->begin = r->at;
    return name_is_header(x) == NONE ? NONE : go(x, STEP_FENCE);
  }
  if (c == '<' || c == '`') {
    outcome end = c == '`' ? GO : at_end(x);
    if (end != GO) return end;
    return name_is_header(x) == NONE ? NONE : end_arguments(x);
  }
  bool is_value = c == '{' || c == '"' || c == '[' || (c == 'n' && !is_type(&r->word));
  if (is_value || x->call->name) return name_is_header(x) == NONE ? NONE : begin_arguments(x);
  if (!is_type(&r->word)) return NONE;
  r->begin = r->at;
  return go(x, STEP_NAME);
}

static outcome read_name(reading *x) {
  td_call_reader *r = x->r;
  for (; r->at < x->len; r->at++) {
    char c = x->text[r->at];
    if (r->at - r->begin > TD_CALL_MAX_NAME) return NONE;
    if (c != '\n' && c != '`' && c != '{' && c != '<') continue;
    if (td_call_set_name(x, x->text + r->begin, r->at - r->begin) == NONE) return NONE;
    return go(x, STEP_BODY);
  }
  return WAIT;
}

// The opening ```json of a fenced block.
static outcome read_fence(reading *x) {
  td_call_reader *r = x->r;
  for (; r->at < x->len; r->at++) {
    char c = x->text[r->at];
    size_t n = r->at - r->begin;
    bool is_letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
    if (n < 3 ? c == '`' : is_letter && n < 3 + TD_CALL_MAX_KEY) continue;
    if (n < 3) return NONE;
    r->is_fenced = true;
    return go(x, STEP_BODY);
  }
  return WAIT;
}

// ---- end of a call ------------------------------------------------------------------------------

// After the arguments: skips the end of a fenced block, a surplus brace and the rest of an array,
// then the closing marker. If the model omitted the marker, `at` stays at the end of the arguments.
static outcome read_close(reading *x) {
  td_call_reader *r = x->r;
  const char *close = x->form->call_close;
  bool is_object = !x->form->middle && !x->form->tags;
  r->is_open = true;
  if (!close && !is_object) return WHOLE;
  for (; r->begin < x->len; r->begin++) {
    char c = x->text[r->begin];
    bool is_passed = td_is_space(c) || (c == '`' && r->is_fenced) || c == '}' ||
                     (is_object && (c == ',' || c == ']'));
    if (!is_passed) break;
  }
  if (!close && x->is_final) r->at = r->begin;
  if (r->begin == x->len) return x->is_final ? WHOLE : WAIT;
  if (is_object && x->text[r->begin] == '{') {
    r->at = r->begin;
    return WHOLE;
  }
  if (!close) {
    r->at = r->begin;
    return WHOLE;
  }
  td_marker_match match = td_marker_at(close, x->text, r->begin, x->len);
  if (match == TD_MARKER_CUT && !x->is_final) return WAIT;
  if (match == TD_MARKER_CUT) r->at = x->len;
  if (match == TD_MARKER_WHOLE) {
    r->at = r->begin + strlen(close);
    r->is_open = false;
  }
  return WHOLE;
}

// Skips what a call still holds whose arguments went wrong, up to a marker.
static outcome read_broken(reading *x) {
  td_call_reader *r = x->r;
  for (; r->at < x->len; r->at++) {
    td_mark mark;
    size_t n;
    unsigned form;
    const td_marker_match match = td_call_marker_at(TD_MARK_CLOSE, x->text, r->at, x->len, &mark,
                                                    &n, &form);
    if (match == TD_MARKER_CUT && !x->is_final) return WAIT;
    if (match == TD_MARKER_WHOLE) return BROKEN;
  }
  return x->is_final ? BROKEN : WAIT;
}

static outcome take_step(reading *x) {
  outcome o;
  switch (x->r->step) {
  case STEP_BRACE: return read_brace(x);
  case STEP_KEY: return read_key(x);
  case STEP_KEY_TEXT: o = read_text(x, TD_CALL_MAX_KEY); return o == GO ? go(x, STEP_COLON) : o;
  case STEP_COLON: return read_colon(x);
  case STEP_VALUE: return read_value(x);
  case STEP_NAME_TEXT:
    o = read_text(x, TD_CALL_MAX_NAME);
    if (o == GO) o = td_call_set_name(x, td_buf_text(&x->r->word), x->r->word.len);
    return o == GO ? go(x, STEP_KEY) : o;
  case STEP_SKIP_OBJECT: o = read_nested(x, NULL); return o == GO ? go(x, STEP_KEY) : o;
  case STEP_SKIP_TEXT: o = read_text(x, 0); return o == GO ? go(x, STEP_KEY) : o;
  case STEP_SKIP_WORD: return read_skipped_word(x);
  case STEP_HEADER: return read_header(x);
  case STEP_BODY: return read_body(x);
  case STEP_NAME: return read_name(x);
  case STEP_FENCE: return read_fence(x);
  case STEP_OBJECT: o = read_nested(x, &x->call->arguments); return o == GO ? end_arguments(x) : o;
  case STEP_BARE: o = td_bare_call_step(x); return o == GO ? end_arguments(x) : o;
  case STEP_QUOTED: return read_quoted(x);
  case STEP_LITERAL: return read_literal(x);
  case STEP_CLOSE: return read_close(x);
  case STEP_BROKEN: return read_broken(x);
  default: return td_tagged_call_step(x);
  }
}

td_marker_match td_call_repeats_at(unsigned form, const char *text, size_t at, size_t len) {
  const td_call_form_marks *f = &forms[form];
  if (f->tags)
    return f->tags->name_open ? td_marker_at(f->tags->name_open, text, at, len) : TD_MARKER_NONE;
  return !f->middle && at < len && text[at] == '{' ? TD_MARKER_WHOLE : TD_MARKER_NONE;
}

// The marker of a call may be the beginning of its name's tag.
static int first_step(unsigned form) {
  const td_call_tags *tags = forms[form].tags;
  if (tags && tags->name_open && forms[form].call_open) return STEP_TAG_NAME;
  return forms[form].tags ? STEP_TAG_OPEN : forms[form].middle ? STEP_HEADER : STEP_BRACE;
}

void td_call_begin(td_call_reader *reader, unsigned form, size_t at, const td_tool_params *params) {
  td_buf word = reader->word, key = reader->key;
  *reader = (td_call_reader){.form = form,
                             .step = first_step(form),
                             .at = at,
                             .begin = at,
                             .params = params,
                             .word = word,
                             .key = key};
}

void td_call_reader_free(td_call_reader *reader) {
  td_buf_free(&reader->word);
  td_buf_free(&reader->key);
}

td_status td_call_read(td_call_reader *reader, td_tool_call *call, const char *text, size_t len,
                       td_text_end end, td_call_state *state, td_err *err) {
  static const td_call_state states[] = {[WAIT] = TD_CALL_OPEN,
                                         [NONE] = TD_CALL_NONE,
                                         [WHOLE] = TD_CALL_WHOLE,
                                         [BROKEN] = TD_CALL_BROKEN};
  reading x = {.r = reader,
               .call = call,
               .form = &forms[reader->form],
               .text = text,
               .len = len,
               .is_final = end != TD_TEXT_GROWS,
               .is_ended = end == TD_TEXT_ENDED};
  outcome o = GO;
  while (o == GO) {
    o = take_step(&x);
    // A call that was told stays one, whatever follows: arguments that are whole end it, others go
    // wrong here.
    if (o == NONE && td_call_is_sure(reader, call)) {
      reader->begin = reader->at;
      o = go(&x, reader->has_arguments ? STEP_CLOSE : STEP_BROKEN);
    }
  }
  *state = states[o];
  td_status st = td_buf_status(&call->arguments, err);
  if (st == TD_OK) st = td_buf_status(&reader->word, err);
  return st == TD_OK ? td_buf_status(&reader->key, err) : st;
}

bool td_call_is_sure(const td_call_reader *reader, const td_tool_call *call) {
  bool has_begun = call->arguments.len && reader->object.has_member;
  return call->name && (reader->has_arguments || has_begun);
}
