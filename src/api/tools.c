// src/api/tools.c - tools, tool_choice and response_format: checked here, obeyed elsewhere.
#include <string.h>

#include "api/parse.h"

static const char *tool_name(const cJSON *tool) {
  const cJSON *name = td_json_get(td_json_get(tool, "function"), "name");
  return cJSON_IsString(name) ? name->valuestring : NULL;
}

static td_status check_tool(const cJSON *tool, td_api_error *error) {
  const cJSON *type = td_json_get(tool, "type");
  if (!cJSON_IsString(type) || strcmp(type->valuestring, "function") != 0) {
    return td_api_bad(error, "tools", "each of tools must be an object of type \"function\"");
  }
  const char *name = tool_name(tool);
  if (!name || name[0] == 0) {
    return td_api_bad(error, "tools", "each of tools must have a function with a name");
  }
  const cJSON *parameters = td_json_get(td_json_get(tool, "function"), "parameters");
  if (parameters && !cJSON_IsObject(parameters)) {
    return td_api_bad(error, "tools", "the parameters of %s must be a JSON schema, an object",
                      name);
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
  for (const cJSON *tool = *tools ? (*tools)->child : NULL; tool; tool = tool->next) {
    td_status st = check_tool(tool, error);
    if (st != TD_OK) return st;
  }
  bool parallel;
  td_status st = td_api_get_bool(root, "parallel_tool_calls", &parallel, error);
  const cJSON *choice = td_json_get(root, "tool_choice");
  if (st != TD_OK || !choice) return st;
  const char *word = cJSON_IsString(choice) ? choice->valuestring : "";
  if (strcmp(word, "none") == 0) {
    *tools = NULL;
    return TD_OK;
  }
  if (strcmp(word, "auto") != 0 && strcmp(word, "required") != 0) {
    st = check_named(choice, *tools, error);
  } else if (!*tools) {
    st = td_api_bad(error, "tool_choice", "tool_choice is allowed only with tools");
  }
  return st;
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
