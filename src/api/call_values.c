// src/api/call_values.c - the parameters of a tool for the forms of calls in which each argument is
// an element: which there are, and the grammar of a value that stands there without quotes.
#include <stdlib.h>
#include <string.h>

#include "api/api_impl.h"
#include "api/tool_params.h"
#include "text/grammar/json_schema.h"

static bool is_listed(const cJSON *list, const char *name) {
  for (const cJSON *item = cJSON_IsArray(list) ? list->child : NULL; item; item = item->next) {
    if (cJSON_IsString(item) && strcmp(item->valuestring, name) == 0) return true;
  }
  return false;
}

// The only values a schema allows; NULL: it does not say.
static const cJSON *values_of(const cJSON *schema) {
  const cJSON *constant = td_json_get(schema, "const"), *list = td_json_get(schema, "enum");
  return constant ? constant : cJSON_IsArray(list) && list->child ? list->child : NULL;
}

// A value as it stands in an element: a string without quotes, anything else as JSON.
static void write_value(td_buf *out, const cJSON *value) {
  td_buf text = TD_BUF_INIT;
  td_json_writer w = TD_JSON_WRITER(&text);
  if (cJSON_IsString(value)) {
    td_api_write_gbnf_literal(out, value->valuestring);
    return;
  }
  td_api_write_json(&w, NULL, value);
  out->failed |= text.failed;
  td_api_write_gbnf_literal(out, td_buf_text(&text));
  td_buf_free(&text);
}

// The rule t<TOOL>.v<AT>. A value that may be any string has none.
static void write_rule(td_api_request *out, td_api_tool_param *param, const cJSON *root,
                       const cJSON *schema, uint32_t tool, uint32_t at) {
  const unsigned types = td_tool_param_types(root, schema);
  const cJSON *values = values_of(schema);
  td_buf rules = TD_BUF_INIT;
  char prefix[32];
  td_err ignored;
  snprintf(prefix, sizeof prefix, "t%u.v%u.", tool, at);
  const td_json_schema_opts opts = {.prefix = prefix, .root = root};
  param->is_text = !values && (!types || types & TD_PARAM_STRING);
  if (param->is_text) return;
  td_buf_printf(&rules, "t%u.v%u ::= ", tool, at);
  if (values) {
    const bool is_list = !td_json_get(schema, "const");
    for (const cJSON *v = values; v; v = is_list ? v->next : NULL) {
      if (v != values) td_buf_str(&rules, " | ");
      write_value(&rules, v);
    }
    td_buf_char(&rules, '\n');
  } else {
    td_buf_printf(&rules, "%s0\n", prefix);
    param->is_text = td_json_schema_to_gbnf(&rules, schema, &opts, &ignored) != TD_OK;
  }
  if (!param->is_text) td_buf_add(&out->value_rules, td_buf_text(&rules), rules.len);
  out->value_rules.failed |= rules.failed;
  td_buf_free(&rules);
}

td_status td_api_add_params(td_api_request *out, td_api_tool *tool, uint32_t index,
                            const cJSON *root, td_api_error *error) {
  const cJSON *properties = td_json_get(root, "properties");
  const cJSON *required = td_json_get(root, "required");
  tool->takes_any = !cJSON_IsObject(properties);
  if (tool->takes_any || !properties->child) return TD_OK;
  const size_t n = (size_t)cJSON_GetArraySize(properties);
  tool->params = calloc(n, sizeof *tool->params);
  if (!tool->params) return td_api_fail(error, 503, NULL, NULL, "out of memory");
  for (const cJSON *p = properties->child; p; p = p->next) {
    td_api_tool_param *param = &tool->params[tool->n_params];
    td_status st = td_api_copy(&param->key, p->string, error);
    if (st != TD_OK) return st;
    param->is_required = is_listed(required, p->string);
    write_rule(out, param, root, p, index, tool->n_params);
    tool->n_params++;
  }
  return TD_OK;
}

void td_api_tool_free(td_api_tool *tool) {
  for (uint32_t i = 0; i < tool->n_params; i++)
    free(tool->params[i].key);
  free(tool->params);
  free(tool->name);
  *tool = (td_api_tool){0};
}
