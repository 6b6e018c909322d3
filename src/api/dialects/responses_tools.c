// src/api/dialects/responses_tools.c - tools of Responses: those of the request and those that
// items of its input bring. Functions in namespaces, tools that take free text and the client's
// search for tools become functions of chat; calls of them are written as what they are.
#include <limits.h>
#include <string.h>

#include "api/dialects/responses_impl.h"
#include "text/grammar/regex.h"

#define MAX_BROUGHT 1024 // tools, by items of the input

// A search for tools that the client runs; one that runs at OpenAI is left out.
static bool is_search(const cJSON *tool) {
  return td_json_is(tool, "type", "tool_search") && td_json_is(tool, "execution", "client");
}

static const char *name_of(const cJSON *tool) {
  return is_search(tool) ? "tool_search" : td_json_text(tool, "name");
}

void td_responses_add_name(td_buf *out, const char *space, const char *name) {
  if (space) td_buf_str(out, space);
  const size_t n = space ? strlen(space) : 0;
  if (n && space[n - 1] != '_' && name[0] != '_') td_buf_str(out, "__");
  td_buf_str(out, name);
}

// Notes what a call of the function is to be written as.
static void note(cJSON *own, const char *flat, const char *space, const cJSON *tool) {
  cJSON *entry = own ? cJSON_AddObjectToObject(own, flat) : NULL;
  if (!entry) return; // it is written as a function
  if (space) cJSON_AddStringToObject(entry, "namespace", space);
  cJSON_AddStringToObject(entry, "name", name_of(tool));
  cJSON_AddStringToObject(entry, "type", td_json_text(tool, "type"));
}

// Whether a string of JSON can be made to match the regex.
static bool can_obey(const char *regex, size_t len) {
  td_budget budget = TD_API_BUDGET;
  td_grammar_build *b = td_grammar_build_open(&budget);
  td_node ignored;
  td_err why;
  const bool ok = b && td_g_regex(&ignored, b, regex, len, TD_REGEX_IN_JSON, &why) == TD_OK;
  td_grammar_build_close(b);
  return ok;
}

// The schema of a tool that takes text: one string, which obeys a regex.
static void write_input_schema(td_json_writer *w, const cJSON *format) {
  const char *syntax = td_json_text(format, "syntax"),
             *definition = td_json_text(format, "definition");
  td_buf schema = TD_BUF_INIT, pattern = TD_BUF_INIT;
  td_json_writer s = TD_JSON_WRITER(&schema);
  td_jw_add(&s, "{'type': 'object', 'properties': {'input': {'type': 'string'");
  if (syntax && definition && strcmp(syntax, "regex") == 0) {
    td_buf_printf(&pattern, "^(?:%s)$", definition);
    td_jw_str(&s, "pattern", td_buf_text(&pattern));
  }
  td_jw_add(&s, "}}");
  td_buf_str(&schema, ",\"required\":[\"input\"]");
  td_jw_end_object(&s);
  td_jw_raw(w, "parameters", td_buf_text(&schema));
  if (pattern.len && can_obey(td_buf_text(&pattern), pattern.len)) td_jw_bool(w, "strict", true);
  w->out->failed |= schema.failed || pattern.failed;
  td_buf_free(&schema);
  td_buf_free(&pattern);
}

// What a tool that takes text does, and the grammar of its text.
static void write_description(td_json_writer *w, const cJSON *tool) {
  const cJSON *format = td_json_get(tool, "format");
  const char *text = td_json_text(tool, "description"),
             *definition = td_json_text(format, "definition");
  const char *syntax = td_json_text(format, "syntax");
  td_buf all = TD_BUF_INIT;
  if (text) td_buf_str(&all, text);
  if (definition) {
    td_buf_printf(&all, "%sinput matches this %s:\n", all.len ? "\n\n" : "",
                  syntax && strcmp(syntax, "regex") == 0 ? "regular expression" : "grammar");
    td_buf_str(&all, definition);
  }
  if (all.len) td_jw_buf(w, "description", &all);
  w->out->failed |= all.failed;
  td_buf_free(&all);
}

// Where tools are written, and from where.
typedef struct {
  td_json_writer *w;
  td_dialect_state *s;
  unsigned n;        // written
  unsigned most;     // to write
  bool is_brought;   // by an item of the input
  const char *space; // that they are in; NULL: none
} writing;

// Writes a tool, at the path where, as chat's, unless an item brings it and it is there already.
static void write_tool(writing *to, const cJSON *tool, const char *where) {
  static const char *const names[] = {"description", "parameters", "strict"};
  const char *name = name_of(tool);
  td_json_writer *w = to->w;
  td_buf flat = TD_BUF_INIT;
  if (name) td_responses_add_name(&flat, to->space, name);
  if (name && to->is_brought &&
      cJSON_GetObjectItemCaseSensitive(to->s->own_tools, td_buf_text(&flat))) {
    td_buf_free(&flat);
    return;
  }
  const td_api_path chat = td_api_item("tools", to->n++);
  td_dialect_note(to->s, chat.text, where);
  td_dialect_note(to->s, td_api_member(chat.text, "function").text, where);
  td_jw_add(w, "{'type': 'function', 'function': {");
  if (name) {
    td_jw_str(w, "name", td_buf_text(&flat));
    note(to->s->own_tools, td_buf_text(&flat), to->space, tool);
  }
  if (td_json_is(tool, "type", "custom")) {
    write_description(w, tool);
    write_input_schema(w, td_json_get(tool, "format"));
  } else {
    for (size_t i = 0; i < TD_COUNT(names); i++) {
      const cJSON *item = td_json_get(tool, names[i]);
      if (item) td_api_write_json(w, names[i], item);
    }
  }
  td_jw_add(w, "}}");
  w->out->failed |= flat.failed;
  td_buf_free(&flat);
}

// Writes the tools of a list that is the member `tools` of what is at the path where.
static void write_list(writing *to, const cJSON *tools, const char *where) {
  const td_api_path list = td_api_member(where, "tools");
  unsigned i = 0;
  for (const cJSON *tool = tools->child; tool && to->n < to->most; tool = tool->next) {
    const cJSON *inner = td_json_get(tool, "tools");
    const td_api_path at = td_api_item(list.text, i++);
    if (td_json_is(tool, "type", "namespace") && cJSON_IsArray(inner) && !to->space) {
      to->space = td_json_text(tool, "name");
      if (!to->space) to->space = "";
      write_list(to, inner, at.text);
      to->space = NULL;
    } else if (td_json_is(tool, "type", "function") || td_json_is(tool, "type", "custom") ||
               is_search(tool)) {
      write_tool(to, tool, at.text);
    }
  }
}

unsigned td_responses_write_tools(td_json_writer *w, const cJSON *root, td_dialect_state *s) {
  const cJSON *tools = td_json_get(root, "tools"), *input = td_json_get(root, "input");
  writing to = {.w = w, .s = s, .most = UINT_MAX};
  unsigned i = 0;
  td_jw_begin_array(w, "tools");
  if (tools) write_list(&to, tools, "");
  to.is_brought = true;
  to.most = to.n + MAX_BROUGHT;
  for (const cJSON *item = cJSON_IsArray(input) ? input->child : NULL; item; item = item->next) {
    const td_api_path at = td_api_item("input", i++);
    if (!td_json_is(item, "type", "additional_tools") &&
        !td_json_is(item, "type", "tool_search_output"))
      continue;
    tools = td_json_get(item, "tools");
    if (cJSON_IsArray(tools)) write_list(&to, tools, at.text);
  }
  td_jw_end_array(w);
  return to.n;
}

void td_responses_add_found(td_buf *out, const cJSON *tools, const char *space) {
  for (const cJSON *tool = tools ? tools->child : NULL; tool; tool = tool->next) {
    const cJSON *inner = td_json_get(tool, "tools");
    const char *name = td_json_text(tool, "name");
    if (td_json_is(tool, "type", "namespace") && cJSON_IsArray(inner) && !space) {
      td_responses_add_found(out, inner, name ? name : "");
    } else if (name) {
      td_buf_str(out, out->len ? "\n[the tool " : "[the tool ");
      td_responses_add_name(out, space, name);
      td_buf_str(out, " can be called now]");
    }
  }
}

// ---- the choice --------------------------------------------------------------------------------

// The name in chat of a tool that a choice names.
static void write_function(td_json_writer *w, const char *key, const cJSON *choice,
                           const cJSON *own) {
  const char *name = td_json_text(choice, "name"), *space = td_json_text(choice, "namespace");
  td_buf flat = TD_BUF_INIT;
  if (name) td_responses_add_name(&flat, space, name);
  const bool is_flat = flat.len && cJSON_GetObjectItemCaseSensitive(own, flat.data);
  for (const cJSON *entry = own && !is_flat ? own->child : NULL; entry && name && !space;
       entry = entry->next) {
    const char *own_name = td_json_text(entry, "name");
    if (!own_name || strcmp(own_name, name) != 0) continue;
    td_buf_clear(&flat);
    td_buf_str(&flat, entry->string);
  }
  td_jw_begin_object(w, key);
  td_jw_add(w, "'type': 'function', 'function': {");
  if (name) td_jw_str(w, "name", td_buf_text(&flat));
  td_jw_add(w, "}}");
  w->out->failed |= flat.failed;
  td_buf_free(&flat);
}

void td_responses_write_choice(td_json_writer *w, const cJSON *choice, unsigned n_tools,
                               td_dialect_state *s) {
  static const char key[] = "tool_choice", allowed[] = "tool_choice.allowed_tools";
  const cJSON *list = td_json_get(choice, "tools");
  const char *word = cJSON_IsString(choice) ? choice->valuestring : "";
  if (!n_tools && (strcmp(word, "auto") == 0 || strcmp(word, "none") == 0)) return;
  td_dialect_note(s, "tool_choice.function", key);
  if (td_json_get(choice, "name")) {
    write_function(w, key, choice, s->own_tools);
  } else if (cJSON_IsArray(list)) {
    unsigned i = 0;
    td_dialect_note(s, allowed, key);
    td_jw_begin_object(w, key);
    td_jw_add(w, "'type': 'allowed_tools', 'allowed_tools': {");
    td_api_write_json(w, "mode", td_json_get(choice, "mode"));
    td_jw_begin_array(w, "tools");
    for (const cJSON *tool = list->child; tool; tool = tool->next, i++) {
      const td_api_path from = td_api_item("tool_choice.tools", i);
      const td_api_path to = td_api_item(td_api_member(allowed, "tools").text, i);
      td_dialect_note(s, td_api_member(to.text, "function").text, from.text);
      write_function(w, NULL, tool, s->own_tools);
    }
    td_jw_add(w, "]}}");
  } else {
    td_api_write_json(w, key, choice);
  }
}

// ---- calls -------------------------------------------------------------------------------------

void td_responses_add_input(td_buf *out, const char *arguments, size_t len) {
  enum { MAX_CUT = 16 }; // bytes of an escape or a character that broke off
  const char *colon = memchr(arguments, ':', len);
  const char *begin = colon ? memchr(colon, '"', len - (size_t)(colon - arguments)) : NULL;
  td_err ignored;
  cJSON *json;
  td_status st = td_json_parse(&json, arguments, len, TD_JSON_MAX_DEPTH, &ignored);
  out->failed |= st == TD_ENOMEM;
  if (st == TD_OK) {
    if (td_json_text(json, "input")) td_buf_str(out, td_json_text(json, "input"));
    cJSON_Delete(json);
    return;
  }
  const size_t n = begin ? len - (size_t)(begin - arguments) : 0;
  for (size_t cut = 0; cut < MAX_CUT && cut < n; cut++) {
    td_buf text = TD_BUF_INIT;
    td_buf_add(&text, begin, n - cut);
    td_buf_char(&text, '"');
    st = td_json_parse(&json, td_buf_text(&text), text.len, 1, &ignored);
    out->failed |= text.failed || st == TD_ENOMEM;
    td_buf_free(&text);
    if (st != TD_OK) continue;
    if (cJSON_IsString(json)) td_buf_str(out, json->valuestring);
    cJSON_Delete(json);
    return;
  }
}

td_responses_call td_responses_call_of(const td_dialect_state *s, const td_tool_call *call) {
  const cJSON *entry = call && s->own_tools
                           ? cJSON_GetObjectItemCaseSensitive(s->own_tools, call->name)
                           : NULL;
  return td_json_is(entry, "type", "custom")        ? TD_RESPONSES_CUSTOM
         : td_json_is(entry, "type", "tool_search") ? TD_RESPONSES_SEARCH
                                                    : TD_RESPONSES_FUNCTION;
}

void td_responses_write_name(td_json_writer *w, const td_dialect_state *s,
                             const td_tool_call *call) {
  const cJSON *entry = s->own_tools ? cJSON_GetObjectItemCaseSensitive(s->own_tools, call->name)
                                    : NULL;
  const char *name = td_json_text(entry, "name"), *space = td_json_text(entry, "namespace");
  td_jw_str(w, "name", name ? name : call->name);
  if (space) td_jw_str(w, "namespace", space);
}
