// src/api/call_values.c - the parameters of a tool for the forms of calls in which each argument is
// an element: which there are, and the grammar of a value that stands there without quotes.
#include <stdlib.h>
#include <string.h>

#include "api/api_impl.h"
#include "api/calls/tool_params.h"
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

// The rule t<TOOL>.v<AT> being written: its alternatives, and the rules they use.
typedef struct {
  const cJSON *root;
  bool is_free;
  uint32_t tool, at, n_parts;
  td_buf alternatives, rules;
} value_rule;

enum {
  MAX_DEPTH = 8,
  MAX_COUNTED = 256, // characters of a string whose length is counted exactly
};

static uint32_t count_of(const cJSON *schema, const char *key, uint32_t otherwise) {
  const cJSON *count = td_json_get(schema, key);
  const bool is_count = cJSON_IsNumber(count) && count->valuedouble >= 0;
  return is_count && count->valuedouble < 1e9 ? (uint32_t)count->valuedouble : otherwise;
}

// Text of min to max characters without "</", which every marker that ends a value contains: rules
// for each number of characters, and whether the last one is <. Where max is large, < and what
// follows it count as one.
static void write_counted(value_rule *r, uint32_t min, uint32_t max) {
  td_buf *out = &r->rules;
  if (max > MAX_COUNTED) {
    td_buf_printf(&r->alternatives, "([^<] | \"<\" [^/<]){%u,%u}", min, max);
    return;
  }
  char name[48];
  snprintf(name, sizeof name, "t%u.v%u.%u.", r->tool, r->at, r->n_parts++);
  td_buf_printf(&r->alternatives, "%sa0", name);
  for (uint32_t i = 0; i < max; i++) {
    for (int is_less = 0; is_less < 2; is_less++) {
      td_buf_printf(out, "%s%c%u ::= [^<%s] %sa%u | \"<\" %sb%u%s\n", name, is_less ? 'b' : 'a', i,
                    is_less ? "/" : "", name, i + 1, name, i + 1, i >= min ? " | \"\"" : "");
    }
  }
  td_buf_printf(out, "%sa%u ::= \"\"\n%sb%u ::= \"\"\n", name, max, name, max);
}

// False: the string may be any text.
static bool write_string(value_rule *r, const cJSON *schema) {
  const uint32_t min = count_of(schema, "minLength", 0);
  const uint32_t max = count_of(schema, "maxLength", UINT32_MAX);
  if (td_json_schema_write_bare(&r->alternatives, schema)) return true;
  if (max == UINT32_MAX || max < min || max > UINT16_MAX) return false;
  write_counted(r, min, max);
  return true;
}

// A value that is no string: the rule of its schema.
static bool write_json(value_rule *r, const cJSON *schema) {
  char prefix[48];
  td_err ignored;
  snprintf(prefix, sizeof prefix, "t%u.v%u.%u.", r->tool, r->at, r->n_parts++);
  const td_json_schema_opts opts = {
      .prefix = prefix, .is_free = r->is_free, .is_one_line = true, .root = r->root};
  td_buf_printf(&r->alternatives, "%s0", prefix);
  const td_status st = td_json_schema_to_gbnf(&r->rules, schema, &opts, &ignored);
  r->rules.failed |= st == TD_ENOMEM;
  return st == TD_OK;
}

static bool write_schema(value_rule *r, const cJSON *schema, unsigned depth);

static bool write_any_of(value_rule *r, const cJSON *list, unsigned depth) {
  bool is_bound = list->child != NULL;
  for (const cJSON *item = list->child; item && is_bound; item = item->next) {
    if (item != list->child) td_buf_str(&r->alternatives, " | ");
    is_bound = write_schema(r, item, depth + 1);
  }
  return is_bound;
}

static bool write_expanded(value_rule *r, const cJSON *schema, unsigned depth) {
  const cJSON *values = values_of(schema), *any = td_json_get(schema, "anyOf");
  const bool is_list = !td_json_get(schema, "const");
  const unsigned types = td_tool_param_types(r->root, schema, &r->rules.failed);
  if (!any) any = td_json_get(schema, "oneOf");
  if (depth > MAX_DEPTH) return false;
  for (const cJSON *v = values; v; v = is_list ? v->next : NULL) {
    if (v != values) td_buf_str(&r->alternatives, " | ");
    write_value(&r->alternatives, v);
  }
  if (values) return true;
  if (types && !(types & TD_PARAM_STRING)) return write_json(r, schema);
  if (types == TD_PARAM_STRING && !any) return write_string(r, schema);
  if (types == (TD_PARAM_STRING | TD_PARAM_NULL) && !any) {
    td_buf_str(&r->alternatives, "\"null\" | ");
    return write_string(r, schema);
  }
  return cJSON_IsArray(any) && !td_json_get(schema, "type") && write_any_of(r, any, depth);
}

// Adds what the schema allows. False: any text, or more than can be told.
static bool write_schema(value_rule *r, const cJSON *schema, unsigned depth) {
  cJSON *expanded = td_json_schema_expanded(r->root, schema, &r->rules.failed);
  const bool is_bound = expanded && write_expanded(r, expanded, depth);
  cJSON_Delete(expanded);
  return is_bound;
}

// The rule t<TOOL>.v<AT>. A value that may be any text has none.
static void write_rule(td_api_request *out, td_api_tool_param *param, const cJSON *root,
                       const cJSON *schema, uint32_t tool, uint32_t at) {
  value_rule r = {.root = root, .is_free = out->is_free_json, .tool = tool, .at = at};
  param->is_text = !write_schema(&r, schema, 0);
  param->types = td_tool_param_types(root, schema, &r.rules.failed);
  if (param->is_text) {
    cJSON *own = td_json_schema_expanded(root, schema, &r.rules.failed);
    const uint32_t min = count_of(own, "minLength", 0);
    const bool is_string = param->types == TD_PARAM_STRING;
    cJSON_Delete(own);
    param->min_length = !is_string ? 0 : min < TD_API_MOST_LEAST ? min : TD_API_MOST_LEAST;
  } else {
    td_buf_printf(&out->value_rules, "t%u.v%u ::= %s\n", tool, at, td_buf_text(&r.alternatives));
    td_buf_add(&out->value_rules, td_buf_text(&r.rules), r.rules.len);
  }
  out->value_rules.failed |= r.rules.failed || r.alternatives.failed;
  td_buf_free(&r.rules);
  td_buf_free(&r.alternatives);
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
