// src/api/call_values.c - the parameters of a tool for the forms of calls in which each argument is
// an element: which there are, and the grammar of a value that stands there without quotes.
#include <stdlib.h>

#include "api/api_impl.h"
#include "api/calls/tool_params.h"
#include "base/json_parse.h"
#include "text/grammar/json_schema.h"

// The only values a schema allows; NULL: it does not say.
static const cJSON *values_of(const cJSON *schema) {
  const cJSON *constant = td_json_get(schema, "const"), *list = td_json_get(schema, "enum");
  return constant ? constant : cJSON_IsArray(list) && list->child ? list->child : NULL;
}

// The grammar of a value, whose alternatives are being added to a list of b.
typedef struct {
  td_grammar_build *b;
  td_schema_ctx *ctx;
  const cJSON *root;
  bool is_free;
} value_builder;

enum {
  MAX_DEPTH = 8,
  MAX_COUNTED = 256, // characters of a string whose length is counted exactly
};

// A value as it stands in an element: a string without quotes, anything else as JSON.
static td_node node_of_value(const value_builder *v, const cJSON *value) {
  td_buf text = TD_BUF_INIT;
  td_json_writer w = TD_JSON_WRITER(&text);
  if (cJSON_IsString(value)) return td_g_str(v->b, value->valuestring);
  td_api_write_json(&w, NULL, value);
  if (text.failed) td_grammar_build_budget(v->b)->status = TD_ENOMEM;
  const td_node out = td_g_text(v->b, td_buf_text(&text), text.len);
  td_buf_free(&text);
  return out;
}

static uint32_t count_of(const cJSON *schema, const char *key, uint32_t otherwise) {
  const cJSON *count = td_json_get(schema, key);
  const bool is_count = cJSON_IsNumber(count) && count->valuedouble >= 0;
  return is_count && count->valuedouble < 1e9 ? (uint32_t)count->valuedouble : otherwise;
}

// Text of min to max characters without "</", which every marker that ends a value contains: rules
// for each number of characters, behind another character and behind <. Where max is large, < and
// what follows it count as one.
static td_node counted_text(td_grammar_build *b, uint32_t min, uint32_t max) {
  if (max > MAX_COUNTED) return td_g_repeat(b, td_g_gbnf(b, "[^<] | \"<\" [^/<]", NULL), min, max);
  td_node other = TD_NODE_EMPTY, less = TD_NODE_EMPTY; // of the characters from i + 1 on
  for (uint32_t i = max; i-- > 0;) {
    const td_node end = i >= min ? TD_NODE_EMPTY : TD_NODE_NEVER;
    const td_node args[] = {other, less, end};
    const td_node behind_other = td_g_gbnf(b, "[^<] $0 | \"<\" $1 | $2", args);
    const td_node behind_less = td_g_gbnf(b, "[^</] $0 | \"<\" $1 | $2", args);
    other = td_g_new_rule(b, behind_other);
    less = td_g_new_rule(b, behind_less);
  }
  return other;
}

// False: the string may be any text.
static bool add_string(const value_builder *v, const cJSON *schema) {
  const uint32_t min = count_of(schema, "minLength", 0);
  const uint32_t max = count_of(schema, "maxLength", UINT32_MAX);
  td_node bare;
  if (td_json_schema_bare(&bare, v->b, schema)) {
    td_g_add(v->b, bare);
    return true;
  }
  if (max == UINT32_MAX || max < min || max > UINT16_MAX) return false;
  td_g_add(v->b, counted_text(v->b, min, max));
  return true;
}

// A value that is not a string: the rule of its schema.
static bool add_json(const value_builder *v, const cJSON *schema) {
  const td_json_schema_opts opts = {
      .is_free = v->is_free, .is_one_line = true, .leaves_out = true, .root = v->root};
  td_node node;
  td_err ignored;
  if (td_json_schema_build(&node, v->b, schema, &opts, &ignored) != TD_OK) return false;
  td_g_add(v->b, node);
  return true;
}

static bool add_schema(const value_builder *v, const cJSON *schema, unsigned depth);

static bool add_any_of(const value_builder *v, const cJSON *list, unsigned depth) {
  bool is_bound = list->child != NULL;
  for (const cJSON *item = list->child; item && is_bound; item = item->next)
    is_bound = add_schema(v, item, depth + 1);
  return is_bound;
}

// Adds what the schema allows. False: any text, or more than can be told.
static bool add_schema(const value_builder *v, const cJSON *schema, unsigned depth) {
  schema = td_json_schema_expanded(v->ctx, schema);
  if (!schema || depth > MAX_DEPTH) return false;
  const cJSON *values = values_of(schema), *any = td_json_get(schema, "anyOf");
  const bool is_list = !td_json_get(schema, "const");
  const unsigned types = td_tool_param_types(v->ctx, schema);
  if (!any) any = td_json_get(schema, "oneOf");
  for (const cJSON *value = values; value; value = is_list ? value->next : NULL)
    td_g_add(v->b, node_of_value(v, value));
  if (values) return true;
  if (types && !(types & TD_PARAM_STRING)) return add_json(v, schema);
  if (types == TD_PARAM_STRING && !any) return add_string(v, schema);
  if (types == (TD_PARAM_STRING | TD_PARAM_NULL) && !any) {
    td_g_add(v->b, td_g_str(v->b, "null"));
    return add_string(v, schema);
  }
  return cJSON_IsArray(any) && !td_json_get(schema, "type") && add_any_of(v, any, depth);
}

static void set_value(const value_builder *v, td_api_tool_param *param, const cJSON *schema) {
  const size_t list = td_g_begin(v->b);
  param->is_text = !add_schema(v, schema, 0);
  param->value = td_g_end_any(v->b, list);
  param->types = td_tool_param_types(v->ctx, schema);
  if (!param->is_text || param->types != TD_PARAM_STRING) return;
  const uint32_t min = count_of(td_json_schema_expanded(v->ctx, schema), "minLength", 0);
  param->min_length = min < TD_API_MAX_MIN_LENGTH ? min : TD_API_MAX_MIN_LENGTH;
}

td_status td_api_add_params(td_api_request *out, td_api_tool *tool, const cJSON *root,
                            td_api_error *error) {
  const cJSON *properties = td_json_get(root, "properties");
  td_json_names required;
  td_status st = TD_OK;
  tool->takes_any = !cJSON_IsObject(properties);
  if (tool->takes_any || !properties->child) return TD_OK;
  tool->params = calloc((size_t)cJSON_GetArraySize(properties), sizeof *tool->params);
  if (!tool->params || !td_json_names_open(&required, td_json_get(root, "required"), NULL))
    return td_api_fail(error, 503, NULL, NULL, "out of memory");
  const value_builder v = {.b = out->build,
                           .ctx = td_json_schema_open(root, &out->budget),
                           .root = root,
                           .is_free = out->allows_any_json};
  for (const cJSON *p = properties->child; p && st == TD_OK && out->budget.status == TD_OK;
       p = p->next) {
    td_api_tool_param *param = &tool->params[tool->n_params];
    st = td_api_copy(&param->key, p->string, error);
    if (st != TD_OK) break;
    param->is_required = td_json_names_has(&required, p->string);
    set_value(&v, param, p);
    tool->n_params++;
  }
  td_json_schema_close(v.ctx);
  td_json_names_close(&required);
  td_err err;
  if (st == TD_OK && td_grammar_build_status(out->build, &err) != TD_OK) {
    td_err_prefix(&err, "tools");
    st = td_api_fail_err(error, "tools", &err);
  }
  return st;
}

void td_api_tool_free(td_api_tool *tool) {
  for (uint32_t i = 0; i < tool->n_params; i++)
    free(tool->params[i].key);
  free(tool->params);
  free(tool->name);
  *tool = (td_api_tool){0};
}
