// src/api/tools.c - tools, tool_choice, and members that are rejected.
#include <stdlib.h>
#include <string.h>

#include "api/api_impl.h"
#include "base/json_parse.h"
#include "text/grammar/json_rules.h"
#include "text/grammar/json_schema.h"

static const char *tool_name(const cJSON *tool) {
  return td_json_text(td_json_get(tool, "function"), "name");
}

static td_status check_tool(const cJSON *tool, const char *where, td_api_error *error) {
  td_api_path at = td_api_member(where, "type");
  if (!td_json_is(tool, "type", "function"))
    return td_api_wrong(error, at.text, "must be \"function\"");
  const char *name = tool_name(tool);
  at = td_api_member(where, "function.name");
  if (!name || name[0] == 0) return td_api_wrong(error, at.text, "is missing or not a string");
  const cJSON *parameters = td_json_get(td_json_get(tool, "function"), "parameters");
  at = td_api_member(where, "function.parameters");
  if (parameters && !cJSON_IsObject(parameters))
    return td_api_wrong(error, at.text, "must be a JSON schema, an object");
  return TD_OK;
}

static td_status names_open(td_json_names *names, const cJSON *tools, td_api_error *error) {
  if (td_json_names_open(names, tools, tool_name)) return TD_OK;
  return td_api_fail(error, 503, NULL, NULL, "out of memory");
}

// A function of tools, as tool_choice or one of its allowed_tools, at the path where.
static td_status check_named(const cJSON *choice, const td_json_names *names, const char *where,
                             td_api_error *error) {
  const char *name = tool_name(choice);
  const td_api_path at = td_api_member(where, "function.name");
  if (!name && td_json_is(choice, "type", "function"))
    return td_api_wrong(error, at.text, "is missing");
  if (!cJSON_IsObject(choice) || !name) {
    return td_api_wrong(error, where,
                        "must be none, auto, required, a function of tools, or allowed_tools");
  }
  if (td_json_names_has(names, name)) return TD_OK;
  return td_api_wrong(error, at.text, "is \"%.64s\", which tools does not hold", name);
}

// tool_choice of type allowed_tools: a mode, and some of tools. NULL: it is of another type.
static const cJSON *allowed_tools(const cJSON *choice) {
  if (!td_json_is(choice, "type", "allowed_tools")) return NULL;
  const cJSON *allowed = td_json_get(choice, "allowed_tools");
  return allowed ? allowed : choice;
}

static td_status check_allowed(const cJSON *choice, const cJSON *allowed,
                               const td_json_names *names, td_api_error *error) {
  const char *where = allowed == choice ? "tool_choice" : "tool_choice.allowed_tools";
  const td_api_path at = td_api_member(where, "mode"), list_at = td_api_member(where, "tools");
  const cJSON *list = td_json_get(allowed, "tools");
  unsigned i = 0;
  if (!td_json_is(allowed, "mode", "auto") && !td_json_is(allowed, "mode", "required"))
    return td_api_wrong(error, at.text, "must be auto or required");
  if (!cJSON_IsArray(list) || !list->child)
    return td_api_wrong(error, list_at.text, "must be an array of functions of tools");
  for (const cJSON *tool = list->child; tool; tool = tool->next) {
    td_status st = check_named(tool, names, td_api_item(list_at.text, i++).text, error);
    if (st != TD_OK) return st;
  }
  return TD_OK;
}

td_status td_api_check_tools(const cJSON *root, const cJSON **tools, td_api_error *error) {
  *tools = td_json_get(root, "tools");
  if (*tools && !cJSON_IsArray(*tools)) return td_api_wrong(error, "tools", "must be an array");
  if (*tools && !(*tools)->child) *tools = NULL;
  unsigned i = 0;
  for (const cJSON *tool = *tools ? (*tools)->child : NULL; tool; tool = tool->next) {
    td_api_path where = td_api_item("tools", i++);
    td_status st = check_tool(tool, where.text, error);
    if (st != TD_OK) return st;
  }
  const cJSON *choice = td_json_get(root, "tool_choice");
  if (!choice) return TD_OK;
  const char *word = cJSON_IsString(choice) ? choice->valuestring : "";
  if (strcmp(word, "none") == 0) {
    *tools = NULL;
    return TD_OK;
  }
  if (strcmp(word, "auto") != 0 && strcmp(word, "required") != 0) {
    const cJSON *allowed = allowed_tools(choice);
    td_json_names names;
    td_status st = names_open(&names, *tools, error);
    if (st == TD_OK) {
      st = allowed ? check_allowed(choice, allowed, &names, error)
                   : check_named(choice, &names, "tool_choice", error);
    }
    td_json_names_close(&names);
    return st;
  }
  if (*tools) return TD_OK;
  return td_api_wrong(error, "tool_choice", "is allowed only with tools");
}

// ---- constraints of calls -----------------------------------------------------------------------

// Adds a tool that may be called, with the grammar of its arguments. A schema that a grammar cannot
// express is an error for a strict tool; another tool then takes any object.
static td_status add_callable(td_api_request *out, const cJSON *tool, unsigned at,
                              td_api_error *error) {
  const cJSON *function = td_json_get(tool, "function");
  const cJSON *parameters = td_json_get(function, "parameters");
  td_err err;
  bool is_strict = cJSON_IsTrue(td_json_get(function, "strict"));
  if (out->n_callable == TD_API_MAX_TOOLS)
    return td_api_bad(error, "tools", "more than %d tools cannot be constrained", TD_API_MAX_TOOLS);
  td_api_tool *grown = realloc(out->callable, (out->n_callable + 1) * sizeof *grown);
  if (!grown) return td_api_fail(error, 503, NULL, NULL, "out of memory");
  out->callable = grown;
  grown[out->n_callable] = (td_api_tool){0};
  td_status st = td_api_copy(&grown[out->n_callable].name, tool_name(tool), error);
  if (st != TD_OK) return st;
  td_api_tool *added = &grown[out->n_callable++];
  if (!td_api_build(out, error)) return TD_ENOMEM;
  st = td_api_add_params(out, added, parameters, error);
  if (st != TD_OK) return st;
  td_api_path where = td_api_member(td_api_item("tools", at).text, "function.parameters");
  const td_json_schema_opts opts = {.is_free = out->allows_any_json,
                                    .is_one_line = true,
                                    .leaves_out = !is_strict,
                                    .path = where.text};
  if (parameters) st = td_json_schema_build(&added->arguments, out->build, parameters, &opts, &err);
  if (st != TD_OK && (is_strict || td_grammar_build_status(out->build, NULL) != TD_OK))
    return td_api_fail_err(error, where.text, &err);
  if (!parameters || st != TD_OK)
    added->arguments = td_g_json(out->build, out->allows_any_json)->object[0];
  return TD_OK;
}

// Adds the tools that tool_choice lets be called.
static td_status add_tools(td_api_request *out, const cJSON *tools, const cJSON *choice,
                           td_api_error *error) {
  const cJSON *allowed = allowed_tools(choice);
  const char *only = cJSON_IsObject(choice) && !allowed ? tool_name(choice) : NULL;
  td_json_names names;
  td_status st = names_open(&names, td_json_get(allowed, "tools"), error);
  unsigned i = 0;
  for (const cJSON *tool = tools->child; tool && st == TD_OK; tool = tool->next, i++) {
    td_err err;
    const char *name = tool_name(tool);
    if (only ? strcmp(only, name) != 0 : allowed && !td_json_names_has(&names, name)) continue;
    st = td_tool_params_add(&out->params, tool, &out->budget, &err);
    if (st != TD_OK) st = td_api_fail_err(error, "tools", &err);
    if (st == TD_OK && out->calls_mode != TD_CALLS_FREE) st = add_callable(out, tool, i, error);
  }
  if (st == TD_OK) td_tool_params_sort(&out->params);
  td_json_names_close(&names);
  return st;
}

td_status td_api_parse_calls(td_api_request *out, const cJSON *root, td_api_error *error) {
  const cJSON *tools = td_json_get(root, "tools"), *choice = td_json_get(root, "tool_choice");
  const cJSON *allowed = allowed_tools(choice);
  const char *word = cJSON_IsString(choice) ? choice->valuestring : "auto";
  if (!out->has_tools) return TD_OK;
  if (allowed) {
    out->calls_mode = td_json_is(allowed, "mode", "required") ? TD_CALLS_REQUIRED
                                                              : TD_CALLS_CHECKED;
  } else if (cJSON_IsObject(choice) || strcmp(word, "required") == 0) {
    out->calls_mode = TD_CALLS_REQUIRED;
  }
  for (const cJSON *tool = tools->child; tool; tool = tool->next) {
    bool is_strict = cJSON_IsTrue(td_json_get(td_json_get(tool, "function"), "strict"));
    if ((is_strict || out->has_format) && out->calls_mode == TD_CALLS_FREE)
      out->calls_mode = TD_CALLS_CHECKED;
  }
  out->params.is_closed = out->calls_mode != TD_CALLS_FREE;
  return add_tools(out, tools, choice, error);
}

// ---- unsupported members ------------------------------------------------------------------------

// Members rejected on both endpoints. Those that only completions reject are in request.c.
static const char *const unsupported[] = {
    "allowed_token_ids",
    "audio",
    "bad_words",
    "chat_template",
    "documents",
    "function_call",
    "functions",
    "guided_whitespace_pattern",
    "include_stop_str_in_output",
    "logits_processors",
    "structural_tag",
    "truncate_prompt_tokens",
    "use_beam_search",
    "web_search_options",
};

// Whether the value requests nothing: null, false, "", [] or {}.
static bool is_neutral(const cJSON *item) {
  if (!item || cJSON_IsFalse(item)) return true;
  if (cJSON_IsString(item)) return item->valuestring[0] == '\0';
  return (cJSON_IsArray(item) || cJSON_IsObject(item)) && !item->child;
}

td_status td_api_refuse_unsupported(const cJSON *root, td_api_error *error) {
  for (size_t i = 0; i < TD_COUNT(unsupported); i++) {
    const char *name = unsupported[i];
    if (is_neutral(td_json_get(root, name))) continue;
    const char *newer = strcmp(name, "functions") == 0       ? "; use tools"
                        : strcmp(name, "function_call") == 0 ? "; use tool_choice"
                                                             : "";
    return td_api_fail(error, 400, name, "unsupported_parameter", "%s is not supported%s", name,
                       newer);
  }
  return TD_OK;
}
