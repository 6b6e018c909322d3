// src/api/calls/tool_params.c - the types of tools' parameters, and arguments written as plain
// text.
#include "api/calls/tool_params.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "api/calls/json_pieces.h"
#include "base/grow.h"
#include "base/json_parse.h"
#include "base/json_write.h"
#include "base/str.h"
#include "text/grammar/json_schema.h"

// ---- types of a schema --------------------------------------------------------------------------

unsigned td_tool_param_types(td_schema_ctx *ctx, const cJSON *schema) {
  static const struct {
    unsigned schema, param;
  } types[] = {{TD_SCHEMA_NULL, TD_PARAM_NULL},
               {TD_SCHEMA_BOOL, TD_PARAM_BOOL},
               {TD_SCHEMA_INTEGER | TD_SCHEMA_NUMBER, TD_PARAM_NUMBER},
               {TD_SCHEMA_STRING, TD_PARAM_STRING},
               {TD_SCHEMA_ARRAY, TD_PARAM_ARRAY},
               {TD_SCHEMA_OBJECT, TD_PARAM_OBJECT}};
  const unsigned allowed = td_json_schema_types(ctx, schema);
  unsigned out = 0;
  for (size_t i = 0; i < TD_COUNT(types) && allowed != TD_SCHEMA_ANY; i++)
    out |= allowed & types[i].schema ? types[i].param : 0;
  return out;
}

static td_status add(td_tool_params *params, const char *tool, const char *key, unsigned types,
                     unsigned at, td_err *err) {
  if (!TD_GROW(params->items, params->n, params->cap, 16))
    return td_fail(err, TD_ENOMEM, "out of memory");
  td_tool_param *item = &params->items[params->n];
  *item = (td_tool_param){
      .tool = strdup(tool), .key = key ? strdup(key) : NULL, .types = types, .at = at};
  params->n++;
  const bool is_lost = !item->tool || (key && !item->key);
  return is_lost ? td_fail(err, TD_ENOMEM, "out of memory") : TD_OK;
}

#define MAX_NESTED 256 // schemas within a tool's parameters that are looked into
#define MAX_DEPTH  32

// The schemas whose members are to be added.
typedef struct {
  const char *tool;
  td_schema_ctx *ctx;
  size_t n;
  struct {
    const cJSON *schema;
    char *path; // owned; NULL: the parameters themselves
    unsigned depth;
  } items[MAX_NESTED];
} nested;

// What a tool nests deeper, or more of, stays unknown.
static td_status look_into(nested *in, const cJSON *schema, const char *path, unsigned depth,
                           td_err *err) {
  if (in->n == MAX_NESTED || depth > MAX_DEPTH) return TD_OK;
  char *copy = path ? strdup(path) : NULL;
  if (path && !copy) return td_fail(err, TD_ENOMEM, "out of memory");
  in->items[in->n].schema = schema;
  in->items[in->n].path = copy;
  in->items[in->n++].depth = depth;
  return TD_OK;
}

static td_status add_member(td_tool_params *params, nested *in, const td_buf *path, unsigned depth,
                            const cJSON *schema, unsigned at, td_err *err) {
  const unsigned types = td_tool_param_types(in->ctx, schema);
  td_status st = td_buf_status(path, err);
  if (st == TD_OK) st = add(params, in->tool, td_buf_text(path), types, at, err);
  const bool may_nest = !types || types & (TD_PARAM_ARRAY | TD_PARAM_OBJECT);
  return st != TD_OK || !may_nest ? st : look_into(in, schema, td_buf_text(path), depth + 1, err);
}

// Adds what the i-th of the schemas says of members and items, and has its alternatives looked
// into.
static td_status add_members(td_tool_params *params, nested *in, size_t i, td_err *err) {
  static const char *const alternatives[] = {"anyOf", "oneOf"};
  const char *path = in->items[i].path;
  const unsigned depth = in->items[i].depth;
  const cJSON *schema = td_json_schema_expanded(in->ctx, in->items[i].schema);
  const cJSON *of = td_json_get(schema, "properties"), *items = td_json_get(schema, "items");
  td_buf key = TD_BUF_INIT;
  td_status st = TD_OK;
  unsigned at = 0;
  for (const cJSON *p = cJSON_IsObject(of) ? of->child : NULL; p && st == TD_OK; p = p->next) {
    td_buf_clear(&key);
    if (path) td_buf_printf(&key, "%s%c", path, TD_PARAM_MEMBER);
    td_buf_str(&key, p->string);
    st = add_member(params, in, &key, depth, p, at++, err);
  }
  if (st == TD_OK && path && cJSON_IsObject(items)) {
    td_buf_clear(&key);
    td_buf_printf(&key, "%s%c", path, TD_PARAM_ITEMS);
    st = add_member(params, in, &key, depth, items, 0, err);
  }
  for (size_t k = 0; k < TD_COUNT(alternatives) && path; k++) {
    const cJSON *list = td_json_get(schema, alternatives[k]);
    for (const cJSON *p = cJSON_IsArray(list) ? list->child : NULL; p && st == TD_OK; p = p->next)
      st = look_into(in, p, path, depth + 1, err);
  }
  td_buf_free(&key);
  return st;
}

td_status td_tool_params_add(td_tool_params *params, const cJSON *tool, td_budget *budget,
                             td_err *err) {
  const cJSON *function = td_json_get(tool, "function");
  const cJSON *name = td_json_get(function, "name"), *root = td_json_get(function, "parameters");
  if (!cJSON_IsString(name)) return TD_OK;
  td_status st = add(params, name->valuestring, NULL, 0, 0, err);
  if (st != TD_OK || !td_json_get(root, "properties")) return st;
  nested *in = calloc(1, sizeof *in);
  if (!in) return td_fail(err, TD_ENOMEM, "out of memory");
  in->tool = name->valuestring;
  in->ctx = td_json_schema_open(root, budget);
  st = look_into(in, root, NULL, 0, err);
  for (size_t i = 0; i < in->n; i++) {
    if (st == TD_OK && budget->status == TD_OK) st = add_members(params, in, i, err);
    free(in->items[i].path);
    in->items[i].path = NULL;
  }
  td_json_schema_close(in->ctx);
  free(in);
  return st == TD_OK ? td_budget_fail(budget, err) : st;
}

// By tools, then keys: a tool's own entry before its parameters'.
static int compare(const td_tool_param *item, const char *tool, const char *key) {
  const int order = strcmp(item->tool, tool);
  if (order || !item->key || !key) return order ? order : !!item->key - !!key;
  return strcmp(item->key, key);
}

static int in_order(const void *a, const void *b) {
  const td_tool_param *x = a, *y = b;
  const int order = compare(x, y->tool, y->key);
  return order ? order : (x->at > y->at) - (x->at < y->at);
}

void td_tool_params_sort(td_tool_params *params) {
  if (params->n) qsort(params->items, params->n, sizeof *params->items, in_order);
}

void td_tool_params_free(td_tool_params *params) {
  for (size_t i = 0; i < params->n; i++) {
    free(params->items[i].tool);
    free(params->items[i].key);
  }
  free(params->items);
  *params = (td_tool_params){0};
}

// The first entry that is not before those of the tool and the key; NULL: all are.
static const td_tool_param *find(const td_tool_params *params, const char *tool, const char *key) {
  size_t low = 0, high = params ? params->n : 0;
  while (low < high) {
    const size_t mid = low + (high - low) / 2;
    if (compare(&params->items[mid], tool, key) < 0)
      low = mid + 1;
    else
      high = mid;
  }
  return params && low < params->n ? &params->items[low] : NULL;
}

bool td_tool_params_has_tool(const td_tool_params *params, const char *tool) {
  const td_tool_param *found = find(params, tool, NULL);
  return found && strcmp(found->tool, tool) == 0;
}

bool td_tool_params_may_call(const td_tool_params *params, const char *tool) {
  return !params || !params->is_closed || td_tool_params_has_tool(params, tool);
}

bool td_tool_params_lists(const td_tool_params *params, const char *tool) {
  const td_tool_param *found = find(params, tool, "");
  return found && strcmp(found->tool, tool) == 0;
}

unsigned td_tool_params_find(const td_tool_params *params, const char *tool, const char *key,
                             unsigned *at) {
  const td_tool_param *found = find(params, tool, key);
  const bool is_there = found && compare(found, tool, key) == 0;
  *at = is_there ? found->at : UINT_MAX;
  unsigned types = is_there ? found->types : 0;
  // Alternatives may say different things of one member.
  for (; is_there && ++found < params->items + params->n && compare(found, tool, key) == 0;)
    types = types && found->types ? types | found->types : 0;
  return types;
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

// Writes an array or an object, in JSON or as Python writes it. False: it is none.
static bool write_nested(td_buf *out, const char *text, size_t len) {
  td_buf json = TD_BUF_INIT;
  td_object_reader reader = {.may_be_array = true};
  td_object_state state = TD_OBJECT_OPEN;
  td_err ignored;
  for (size_t i = 0; i < len && state != TD_OBJECT_BAD; i++)
    state = td_object_feed(&reader, text[i], &json);
  const bool ok = state == TD_OBJECT_WHOLE &&
                  td_json_check(td_buf_text(&json), json.len, TD_JSON_MAX_DEPTH - 1, &ignored) ==
                      TD_OK;
  if (ok) td_buf_add(out, json.data, json.len);
  out->failed |= json.failed;
  td_buf_free(&json);
  return ok;
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
  while (n && td_is_space(from[0]))
    from++, n--;
  while (n && td_is_space(from[n - 1]))
    n--;
  const unsigned type = n ? type_of_json(from[0]) : 0, nesting = types & ~(unsigned)TD_PARAM_NULL;
  if (!n && (nesting == TD_PARAM_ARRAY || nesting == TD_PARAM_OBJECT)) {
    td_buf_str(out, nesting == TD_PARAM_ARRAY ? "[]" : "{}");
    return;
  }
  if (type & allowed & ~(unsigned)TD_PARAM_STRING &&
      td_json_check(from, n, TD_JSON_MAX_DEPTH - 1, &ignored) == TD_OK) {
    td_buf_add(out, from, n);
    return;
  }
  const bool is_nested = type & allowed & (TD_PARAM_ARRAY | TD_PARAM_OBJECT);
  if (is_nested && !(allowed & TD_PARAM_STRING) && write_nested(out, from, n)) return;
  for (size_t i = 0; i < TD_COUNT(words); i++) {
    if (n != strlen(words[i].python) || memcmp(from, words[i].python, n) != 0) continue;
    if (!(words[i].type & types)) continue;
    td_buf_str(out, words[i].json);
    return;
  }
  td_json_quote(out, text, len);
}
