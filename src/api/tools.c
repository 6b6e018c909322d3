// src/api/tools.c - checks tools, tool_choice and response_format, and rejects unsupported members.
#include <string.h>

#include "api/api_impl.h"

static const char *tool_name(const cJSON *tool) {
  const cJSON *name = td_json_get(td_json_get(tool, "function"), "name");
  return cJSON_IsString(name) ? name->valuestring : NULL;
}

static td_status check_tool(const cJSON *tool, const char *where, td_api_error *error) {
  const cJSON *type = td_json_get(tool, "type");
  td_api_path at = td_api_member(where, "type");
  if (!cJSON_IsString(type) || strcmp(type->valuestring, "function") != 0) {
    return td_api_bad(error, at.text, "%s must be \"function\"", at.text);
  }
  const char *name = tool_name(tool);
  at = td_api_member(where, "function.name");
  if (!name || name[0] == 0) return td_api_bad(error, at.text, "%s is missing", at.text);
  const cJSON *parameters = td_json_get(td_json_get(tool, "function"), "parameters");
  at = td_api_member(where, "function.parameters");
  if (parameters && !cJSON_IsObject(parameters)) {
    return td_api_bad(error, at.text, "%s must be a JSON schema, an object", at.text);
  }
  return TD_OK;
}

static td_status check_named(const cJSON *choice, const cJSON *tools, td_api_error *error) {
  const char *name = tool_name(choice);
  if (!cJSON_IsObject(choice) || !name) {
    return td_api_bad(error, "tool_choice",
                      "tool_choice must be none, auto, required or a function of tools");
  }
  for (const cJSON *tool = tools ? tools->child : NULL; tool; tool = tool->next) {
    if (strcmp(tool_name(tool), name) == 0) return TD_OK;
  }
  return td_api_bad(error, "tool_choice", "tool_choice names %.64s, which tools does not hold",
                    name);
}

td_status td_api_check_tools(const cJSON *root, const cJSON **tools, td_api_error *error) {
  *tools = td_json_get(root, "tools");
  if (*tools && !cJSON_IsArray(*tools)) {
    return td_api_bad(error, "tools", "tools must be an array");
  }
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
  bool is_auto = strcmp(word, "auto") == 0, is_required = strcmp(word, "required") == 0;
  if (!is_auto && !is_required) {
    td_status st = check_named(choice, *tools, error);
    if (st != TD_OK) return st;
  } else if (!*tools) {
    return td_api_bad(error, "tool_choice", "tool_choice is allowed only with tools");
  }
  if (is_auto) return TD_OK;
  return td_api_fail(error, 400, "tool_choice", "unsupported_parameter",
                     "tool_choice %s is not supported: a model cannot be made to call; give auto "
                     "or none",
                     is_required ? "required" : "with a function");
}

// ---- unsupported members ------------------------------------------------------------------------

// Members rejected on both endpoints. Those that only completions reject are in request.c.
static const char *const unsupported[] = {
    "allowed_token_ids",
    "audio",
    "bad_words",
    "chat_template",
    "continue_final_message",
    "documents",
    "ebnf",
    "echo",
    "function_call",
    "functions",
    "grammar",
    "guided_choice",
    "guided_grammar",
    "guided_json",
    "guided_regex",
    "guided_whitespace_pattern",
    "include_stop_str_in_output",
    "json_schema",
    "logits_processors",
    "prompt_logprobs",
    "regex",
    "structural_tag",
    "structured_outputs",
    "suffix",
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
    return td_api_fail(error, 400, name, "unsupported_parameter", "%s is not supported", name);
  }
  return TD_OK;
}

static td_status check_schema(const cJSON *format, td_api_error *error) {
  const cJSON *schema = td_json_get(td_json_get(format, "json_schema"), "schema");
  if (!cJSON_IsObject(schema)) {
    return td_api_bad(error, "response_format",
                      "response_format of type json_schema needs json_schema.schema, an object");
  }
  return TD_OK;
}

td_status td_api_check_format(const cJSON *root, td_api_error *error) {
  const cJSON *format = td_json_get(root, "response_format");
  if (!format) return TD_OK;
  const cJSON *type = td_json_get(format, "type");
  if (!cJSON_IsString(type)) {
    return td_api_bad(error, "response_format", "response_format must be an object with a type");
  }
  const char *name = type->valuestring;
  if (strcmp(name, "text") == 0) return TD_OK;
  bool is_schema = strcmp(name, "json_schema") == 0;
  if (!is_schema && strcmp(name, "json_object") != 0) {
    return td_api_bad(error, "response_format", "response_format has the unknown type %.64s", name);
  }
  td_status st = is_schema ? check_schema(format, error) : TD_OK;
  if (st != TD_OK) return st;
  return td_api_fail(error, 400, "response_format", "unsupported_parameter",
                     "response_format of type %s is not supported", name);
}
