#include "api/parts_call.h"

#include <stdlib.h>
#include <string.h>

#include "api/parse.h"

// How a family of models writes calls. A NULL marker is not used.
typedef struct {
  const char *open;      // of a run of calls
  const char *close;     // of it
  const char *call_open; // of one call
  const char *middle;    // between its name and its arguments; NULL: one object holds both
  const char *call_close;
} form;

#define HERMES_OPEN   "<tool_call>"
#define DEEPSEEK_OPEN "<｜tool▁calls▁begin｜>"
#define KIMI_OPEN     "<|tool_calls_section_begin|>"

static const form forms[] = {
    {NULL, NULL, HERMES_OPEN, NULL, "</tool_call>"},
    {DEEPSEEK_OPEN, "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>",
     "<｜tool▁call▁end｜>"},
    {KIMI_OPEN, "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>",
     "<|tool_call_end|>"},
};

const char *const *td_call_openers(size_t *n) {
  static const char *const openers[] = {HERMES_OPEN, DEEPSEEK_OPEN, KIMI_OPEN};
  *n = TD_COUNT(openers);
  return openers;
}

td_marker_match td_marker_at(const char *marker, const char *text, size_t at, size_t len) {
  size_t n = strlen(marker), there = len - at;
  if (there == 0 || memcmp(text + at, marker, there < n ? there : n) != 0) return TD_MARKER_NONE;
  return there < n ? TD_MARKER_CUT : TD_MARKER_WHOLE;
}

static bool is_space(char c) {
  return c == ' ' || c == '\n' || c == '\t' || c == '\r';
}

size_t td_skip_space(const char *text, size_t at, size_t len) {
  while (at < len && is_space(text[at]))
    at++;
  return at;
}

size_t td_trim_end(const char *text, size_t begin, size_t end) {
  while (end > begin && is_space(text[end - 1]))
    end--;
  return end;
}

// Where the marker stands; len where it does not.
static size_t find(const char *marker, const char *text, size_t at, size_t len) {
  while (at < len && td_marker_at(marker, text, at, len) != TD_MARKER_WHOLE)
    at++;
  return at;
}

// The end of the JSON object that begins at text[at]; 0: it is cut off. Braces inside strings do
// not count; whether it is JSON otherwise is for the parser to say.
static size_t object_end(const char *text, size_t at, size_t len) {
  int depth = 0;
  bool in_string = false;
  for (; at < len; at++) {
    char c = text[at];
    if (in_string) {
      if (c == '\\') at++;
      in_string = c != '"';
    } else if (c == '"') {
      in_string = true;
    } else if (c == '{' || c == '[') {
      depth++;
    } else if ((c == '}' || c == ']') && --depth == 0) {
      return at + 1;
    }
  }
  return 0;
}

static td_status copy(char **out, const char *text, size_t len, td_err *err) {
  *out = malloc(len + 1);
  if (!*out) return td_fail(err, TD_ENOMEM, "out of memory for a tool call");
  memcpy(*out, text, len);
  (*out)[len] = '\0';
  return TD_OK;
}

static td_status print(char **out, const cJSON *value, td_err *err) {
  td_buf text = TD_BUF_INIT;
  td_json_writer w = TD_JSON_WRITER(&text);
  td_api_write_json(&w, NULL, value);
  td_status st = td_buf_status(&text, err);
  *out = text.data;
  if (st != TD_OK) {
    td_buf_free(&text);
    *out = NULL;
  }
  return st;
}

// {"name": N, "arguments": {...}}: Hermes. "parameters" is what Llama says for "arguments".
static td_status read_object(td_tool_call *call, bool *is_call, const char *text, size_t len,
                             td_err *err) {
  cJSON *root;
  td_err ignored;
  *is_call = false;
  if (td_json_parse(&root, text, len, TD_JSON_MAX_DEPTH, &ignored) != TD_OK) return TD_OK;
  const cJSON *name = td_json_get(root, "name"), *arguments = td_json_get(root, "arguments");
  if (!arguments) arguments = td_json_get(root, "parameters");
  td_status st = TD_OK;
  if (cJSON_IsString(name) && name->valuestring[0] && (!arguments || cJSON_IsObject(arguments))) {
    *is_call = true;
    st = copy(&call->name, name->valuestring, strlen(name->valuestring), err);
    if (st == TD_OK) {
      st = arguments ? print(&call->arguments, arguments, err)
                     : copy(&call->arguments, "{}", 2, err);
    }
    if (st != TD_OK) free(call->name);
  }
  cJSON_Delete(root);
  return st;
}

// "functions.get_weather:0" is an id that holds the name: Kimi. Elsewhere the header is the name.
static td_status read_header(td_tool_call *call, const char *text, size_t len, td_err *err) {
  static const char prefix[] = "functions.";
  size_t n = sizeof prefix - 1;
  const char *colon = len > n && memcmp(text, prefix, n) == 0 ? memchr(text + n, ':', len - n)
                                                              : NULL;
  if (!colon) return copy(&call->name, text, len, err);
  if (len < sizeof call->id) memcpy(call->id, text, len);
  return copy(&call->name, text + n, (size_t)(colon - text) - n, err);
}

static td_status read_named(td_tool_call *call, bool *is_call, const char *header, size_t n_header,
                            const char *arguments, size_t n_arguments, td_err *err) {
  td_err ignored;
  *is_call = n_header > 0 &&
             td_json_check(arguments, n_arguments, TD_JSON_MAX_DEPTH, &ignored) == TD_OK;
  if (!*is_call) return TD_OK;
  td_status st = read_header(call, header, n_header, err);
  if (st != TD_OK) return st;
  st = copy(&call->arguments, arguments, n_arguments, err);
  if (st != TD_OK) free(call->name);
  return st;
}

// What stands between a call's opening marker and its arguments.
typedef struct {
  size_t header, header_end; // the name; empty without a middle marker
  size_t body;               // where the arguments' object begins
} layout;

// DeepSeek V3 and R1 write `function`, the middle marker, the name, and the arguments in a fenced
// block; V3.1 writes the name, the middle marker and the arguments.
static td_call_result lay_out(layout *out, const form *f, const char *text, size_t at, size_t len) {
  *out = (layout){.body = td_skip_space(text, at, len)};
  if (f->middle) {
    size_t middle = find(f->middle, text, at, len);
    if (middle == len) return TD_CALL_CUT;
    size_t behind = middle + strlen(f->middle);
    size_t brace = find("{", text, behind, len);
    if (brace == len) return TD_CALL_CUT;
    size_t from = at, to = middle;
    size_t fence = find("```", text, behind, brace);
    if (fence < brace) from = behind, to = fence;
    from = td_skip_space(text, from, to);
    to = td_trim_end(text, from, to);
    *out = (layout){.header = from, .header_end = to, .body = brace};
  }
  if (out->body == len) return TD_CALL_CUT;
  return text[out->body] == '{' ? TD_CALL_WHOLE : TD_CALL_MALFORMED;
}

// Behind the arguments: the end of a fenced block, and the call's closing marker, which a model may
// forget.
static td_call_result close_call(const form *f, const char *text, size_t *at, size_t len,
                                 bool is_final) {
  size_t end = td_skip_space(text, *at, len);
  if (td_marker_at("```", text, end, len) == TD_MARKER_WHOLE) {
    end = td_skip_space(text, end + 3, len);
  }
  td_marker_match match = td_marker_at(f->call_close, text, end, len);
  if (match == TD_MARKER_WHOLE) *at = end + strlen(f->call_close);
  bool is_open = match == TD_MARKER_CUT || end == len || text[end] == '`';
  return match == TD_MARKER_WHOLE || is_final || !is_open ? TD_CALL_WHOLE : TD_CALL_CUT;
}

static td_status take_whole(const form *f, td_call_result *result, td_tool_call *call,
                            const char *text, size_t *at, size_t len, bool is_final, td_err *err) {
  size_t begin = *at + strlen(f->call_open);
  layout where;
  *result = lay_out(&where, f, text, begin, len);
  *at = begin;
  if (*result != TD_CALL_WHOLE) return TD_OK;
  size_t end = object_end(text, where.body, len);
  if (!end) {
    *result = TD_CALL_CUT;
    return TD_OK;
  }
  *at = end;
  *result = close_call(f, text, at, len, is_final);
  if (*result != TD_CALL_WHOLE) return TD_OK;
  bool is_call;
  size_t n_body = end - where.body;
  td_status st = f->middle
                     ? read_named(call, &is_call, text + where.header,
                                  where.header_end - where.header, text + where.body, n_body, err)
                     : read_object(call, &is_call, text + where.body, n_body, err);
  if (!is_call) *result = TD_CALL_MALFORMED;
  return st;
}

td_status td_call_take(td_call_result *result, td_tool_call *call, const char *text, size_t *at,
                       size_t len, bool is_final, td_err *err) {
  *call = (td_tool_call){0};
  *at = td_skip_space(text, *at, len);
  *result = *at == len ? TD_CALL_CUT : TD_CALL_NONE;
  for (size_t i = 0; i < TD_COUNT(forms); i++) {
    const form *f = &forms[i];
    td_marker_match match = td_marker_at(f->call_open, text, *at, len);
    if (match == TD_MARKER_WHOLE) {
      return take_whole(f, result, call, text, at, len, is_final, err);
    }
    bool is_cut = match == TD_MARKER_CUT;
    const char *const around[] = {f->open, f->close};
    for (size_t k = 0; k < TD_COUNT(around); k++) {
      if (!around[k]) continue;
      match = td_marker_at(around[k], text, *at, len);
      if (match == TD_MARKER_WHOLE) {
        *at += strlen(around[k]);
        *result = k == 0 ? TD_CALL_OPENED : TD_CALL_CLOSED;
        return TD_OK;
      }
      is_cut |= match == TD_MARKER_CUT;
    }
    if (is_cut) *result = TD_CALL_CUT;
  }
  return TD_OK;
}
