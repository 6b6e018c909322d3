// src/api/tool_params.c - the types of tools' parameters, and arguments written as plain text.
#include "api/tool_params.h"

#include <stdlib.h>
#include <string.h>

#include "base/json_parse.h"
#include "base/json_write.h"

#define MAX_REFS 8 // followed for one parameter

// ---- types of a schema --------------------------------------------------------------------------

static unsigned type_named(const char *name) {
  static const struct {
    const char *name;
    unsigned type;
  } names[] = {{"null", TD_PARAM_NULL},      {"boolean", TD_PARAM_BOOL},
               {"integer", TD_PARAM_NUMBER}, {"number", TD_PARAM_NUMBER},
               {"string", TD_PARAM_STRING},  {"array", TD_PARAM_ARRAY},
               {"object", TD_PARAM_OBJECT}};
  for (size_t i = 0; i < TD_COUNT(names); i++) {
    if (strcmp(name, names[i].name) == 0) return names[i].type;
  }
  return 0;
}

static unsigned type_of_value(const cJSON *value) {
  if (cJSON_IsNull(value)) return TD_PARAM_NULL;
  if (cJSON_IsBool(value)) return TD_PARAM_BOOL;
  if (cJSON_IsNumber(value)) return TD_PARAM_NUMBER;
  if (cJSON_IsString(value)) return TD_PARAM_STRING;
  return cJSON_IsArray(value) ? TD_PARAM_ARRAY : TD_PARAM_OBJECT;
}

// The schema at #/KEY/NAME; NULL: there is none.
static const cJSON *resolve(const cJSON *root, const char *ref) {
  if (strncmp(ref, "#/", 2) != 0) return NULL;
  const char *key = ref + 2, *slash = strchr(key, '/');
  char first[32];
  if (!slash || (size_t)(slash - key) >= sizeof first) return NULL;
  memcpy(first, key, (size_t)(slash - key));
  first[slash - key] = '\0';
  return td_json_get(td_json_get(root, first), slash + 1);
}

static unsigned types_within(const cJSON *root, const cJSON *schema, unsigned depth);

// The union of what the schemas of a list allow; 0 if one of them allows anything.
static unsigned types_of_any(const cJSON *root, const cJSON *list, unsigned depth) {
  unsigned types = 0;
  for (const cJSON *item = list->child; item; item = item->next) {
    const unsigned own = types_within(root, item, depth);
    if (!own) return 0;
    types |= own;
  }
  return types;
}

static unsigned types_within(const cJSON *root, const cJSON *schema, unsigned depth) {
  const cJSON *type = td_json_get(schema, "type"), *ref = td_json_get(schema, "$ref");
  const cJSON *list = td_json_get(schema, "enum");
  const cJSON *constant = cJSON_GetObjectItemCaseSensitive(schema, "const");
  unsigned types = 0;
  if (cJSON_IsString(type)) return type_named(type->valuestring);
  if (cJSON_IsArray(type)) {
    for (const cJSON *item = type->child; item; item = item->next)
      types |= cJSON_IsString(item) ? type_named(item->valuestring) : 0;
    return types;
  }
  if (constant) return type_of_value(constant);
  if (cJSON_IsArray(list)) {
    for (const cJSON *item = list->child; item; item = item->next)
      types |= type_of_value(item);
    return types;
  }
  if (depth == MAX_REFS) return 0;
  if (cJSON_IsString(ref)) return types_within(root, resolve(root, ref->valuestring), depth + 1);
  static const char *const unions[] = {"anyOf", "oneOf"};
  for (size_t i = 0; i < TD_COUNT(unions); i++) {
    const cJSON *any = td_json_get(schema, unions[i]);
    if (cJSON_IsArray(any)) return types_of_any(root, any, depth + 1);
  }
  const cJSON *all = td_json_get(schema, "allOf");
  return cJSON_IsArray(all) && all->child ? types_within(root, all->child, depth + 1) : 0;
}

const cJSON *td_tool_param_resolve(const cJSON *root, const cJSON *schema) {
  for (unsigned i = 0; i < MAX_REFS; i++) {
    const cJSON *ref = td_json_get(schema, "$ref"), *all = td_json_get(schema, "allOf");
    const cJSON *next = NULL;
    if (td_json_get(schema, "type")) return schema;
    if (cJSON_IsString(ref)) {
      next = resolve(root, ref->valuestring);
    } else if (cJSON_IsArray(all) && all->child && !all->child->next) {
      next = all->child;
    }
    if (!next) return schema;
    schema = next;
  }
  return schema;
}

unsigned td_tool_param_types(const cJSON *root, const cJSON *schema) {
  return types_within(root, schema, 0);
}

// ---- the table ----------------------------------------------------------------------------------

static td_status add(td_tool_params *params, const char *tool, const char *key, unsigned types,
                     td_err *err) {
  if (params->n == params->cap) {
    const size_t cap = params->cap ? 2 * params->cap : 16;
    td_tool_param *grown = realloc(params->items, cap * sizeof *grown);
    if (!grown) return td_fail(err, TD_ENOMEM, "out of memory");
    params->items = grown;
    params->cap = cap;
  }
  td_tool_param *item = &params->items[params->n];
  *item = (td_tool_param){.tool = strdup(tool), .key = key ? strdup(key) : NULL, .types = types};
  params->n++;
  const bool is_lost = !item->tool || (key && !item->key);
  return is_lost ? td_fail(err, TD_ENOMEM, "out of memory") : TD_OK;
}

td_status td_tool_params_add(td_tool_params *params, const cJSON *tools, td_err *err) {
  for (const cJSON *tool = tools->child; tool; tool = tool->next) {
    const cJSON *function = td_json_get(tool, "function");
    const cJSON *name = td_json_get(function, "name"), *root = td_json_get(function, "parameters");
    const cJSON *properties = td_json_get(root, "properties");
    if (!cJSON_IsString(name)) continue;
    td_status st = add(params, name->valuestring, NULL, 0, err);
    if (st != TD_OK) return st;
    if (!cJSON_IsObject(properties)) continue;
    for (const cJSON *p = properties->child; p; p = p->next) {
      st = add(params, name->valuestring, p->string, td_tool_param_types(root, p), err);
      if (st != TD_OK) return st;
    }
  }
  return TD_OK;
}

void td_tool_params_free(td_tool_params *params) {
  for (size_t i = 0; i < params->n; i++) {
    free(params->items[i].tool);
    free(params->items[i].key);
  }
  free(params->items);
  *params = (td_tool_params){0};
}

bool td_tool_params_has_tool(const td_tool_params *params, const char *tool) {
  for (size_t i = 0; params && i < params->n; i++) {
    if (strcmp(params->items[i].tool, tool) == 0) return true;
  }
  return false;
}

unsigned td_tool_params_types(const td_tool_params *params, const char *tool, const char *key) {
  for (size_t i = 0; params && i < params->n; i++) {
    const td_tool_param *p = &params->items[i];
    if (p->key && strcmp(p->key, key) == 0 && strcmp(p->tool, tool) == 0) return p->types;
  }
  return 0;
}

// ---- arguments ----------------------------------------------------------------------------------

static unsigned type_of_json(char first) {
  switch (first) {
  case '{': return TD_PARAM_OBJECT;
  case '[': return TD_PARAM_ARRAY;
  case '"': return TD_PARAM_STRING;
  case 'n': return TD_PARAM_NULL;
  case 't':
  case 'f': return TD_PARAM_BOOL;
  default: return TD_PARAM_NUMBER;
  }
}

static bool is_space(char c) {
  return c == ' ' || c == '\n' || c == '\t' || c == '\r';
}

void td_tool_param_write(td_buf *out, unsigned types, const char *text, size_t len) {
  static const struct {
    const char *python, *json;
    unsigned type;
  } words[] = {{"True", "true", TD_PARAM_BOOL},
               {"False", "false", TD_PARAM_BOOL},
               {"None", "null", TD_PARAM_NULL}};
  const unsigned allowed = types ? types : ~0u;
  const char *from = text;
  size_t n = len;
  td_err ignored;
  while (n && is_space(from[0]))
    from++, n--;
  while (n && is_space(from[n - 1]))
    n--;
  const unsigned type = n ? type_of_json(from[0]) : 0;
  if (type & allowed & ~(unsigned)TD_PARAM_STRING &&
      td_json_check(from, n, TD_JSON_MAX_DEPTH - 1, &ignored) == TD_OK) {
    td_buf_add(out, from, n);
    return;
  }
  for (size_t i = 0; i < TD_COUNT(words); i++) {
    if (n != strlen(words[i].python) || memcmp(from, words[i].python, n) != 0) continue;
    if (!(words[i].type & types)) continue;
    td_buf_str(out, words[i].json);
    return;
  }
  td_json_quote(out, text, len);
}
