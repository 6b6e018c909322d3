// src/text/grammar/json_schema.c - JSON Schema to a grammar: one rule a schema, found again when a
// $ref leads back to it. Schemas wait in a list until it is their turn, so that no document needs a
// deep stack.
#include "text/grammar/json_schema.h"

#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/grow.h"
#include "base/log.h"
#include "text/grammar/build_impl.h"
#include "text/grammar/schema_impl.h"

#define MAX_ITEMS        8192 // schemas of a document that is broken into lines
#define MAX_ALTERNATIVES 512
#define MAX_STEPS        32 // of a path, in messages

// ---- messages ----------------------------------------------------------------------------------

static const char *name_of(const td_schema_ctx *ctx) {
  return ctx->opts && ctx->opts->path ? ctx->opts->path : "schema";
}

// Appends where the schema being translated stands.
static void write_path(const td_schema_ctx *ctx, char path[TD_SCHEMA_PATH_BYTES]) {
  uint32_t steps[MAX_STEPS], n = 0;
  for (uint32_t i = ctx->at; ctx->n_items && i != TD_SCHEMA_NO_INDEX && n < MAX_STEPS;
       i = ctx->items[i].parent)
    steps[n++] = i;
  snprintf(path, TD_SCHEMA_PATH_BYTES, "%s", name_of(ctx));
  while (n-- > 0) {
    const td_schema_item *item = &ctx->items[steps[n]];
    const size_t len = strlen(path), room = TD_SCHEMA_PATH_BYTES - len;
    if (item->name)
      snprintf(path + len, room, ".%s.%.40s", item->key, item->name);
    else if (item->index != TD_SCHEMA_NO_INDEX)
      snprintf(path + len, room, ".%s[%u]", item->key, item->index);
    else if (item->key)
      snprintf(path + len, room, ".%s", item->key);
  }
}

td_status td_schema_refuse(const td_schema_ctx *ctx, const char *keyword, const char *why) {
  char path[TD_SCHEMA_PATH_BYTES];
  write_path(ctx, path);
  return td_fail(ctx->err, TD_EUNSUPPORTED, "%s: %s%s%.200s is not supported", path, keyword,
                 why ? ": " : "", why ? why : "");
}

// Each message once, or seldom: clients send the same schema with every request.
static void say_left_out(const char *message) {
  enum { N_REMEMBERED = 256 };
  static _Atomic uint32_t said[N_REMEMBERED];
  uint32_t hash = 2166136261u;
  for (const char *at = message; *at; at++)
    hash = (hash ^ (uint8_t)*at) * 16777619u;
  if (atomic_exchange(&said[hash % N_REMEMBERED], hash) == hash) return;
  td_info("%s: answers may disregard it, as the schema is not strict", message);
}

td_status td_schema_leave_out(const td_schema_ctx *ctx, const char *keyword, const char *why) {
  const td_status st = td_schema_refuse(ctx, keyword, why);
  if (!ctx->opts->leaves_out) return st;
  say_left_out(ctx->err->msg);
  return TD_OK;
}

td_status td_schema_bad(const td_schema_ctx *ctx, const char *keyword, const char *what) {
  char path[TD_SCHEMA_PATH_BYTES];
  write_path(ctx, path);
  return td_fail(ctx->err, TD_EINVAL, "%s: %s %s", path, keyword, what);
}

// ---- types -------------------------------------------------------------------------------------

static unsigned type_named(const char *name) {
  static const char *const names[] = {"null",   "boolean", "integer", "number",
                                      "string", "array",   "object"};
  for (unsigned i = 0; i < TD_COUNT(names); i++)
    if (strcmp(name, names[i]) == 0) return 1u << i;
  return 0;
}

td_status td_schema_types(td_schema_ctx *ctx, const cJSON *schema, unsigned *types) {
  const cJSON *type = td_schema_get(ctx, schema, "type");
  *types = TD_SCHEMA_ANY;
  if (!type) return TD_OK;
  const cJSON *item = cJSON_IsArray(type) ? type->child : type;
  *types = 0;
  for (; item; item = cJSON_IsArray(type) ? item->next : NULL) {
    unsigned bits = cJSON_IsString(item) ? type_named(item->valuestring) : 0;
    if (!bits) {
      return td_schema_bad(ctx, "type",
                           "must be null, boolean, integer, number, string, array or object");
    }
    *types |= bits;
  }
  return TD_OK;
}

unsigned td_schema_types_of(const cJSON *value) {
  if (cJSON_IsNull(value)) return TD_SCHEMA_NULL;
  if (cJSON_IsBool(value)) return TD_SCHEMA_BOOL;
  if (cJSON_IsString(value)) return TD_SCHEMA_STRING;
  if (cJSON_IsArray(value)) return TD_SCHEMA_ARRAY;
  if (cJSON_IsObject(value)) return TD_SCHEMA_OBJECT;
  const bool is_whole = value->valuedouble == floor(value->valuedouble);
  return TD_SCHEMA_NUMBER | (is_whole ? TD_SCHEMA_INTEGER : 0);
}

td_status td_schema_count(td_schema_ctx *ctx, const cJSON *schema, const char *key, uint32_t *out) {
  const cJSON *item = td_schema_get(ctx, schema, key);
  if (!item) return TD_OK;
  double value = cJSON_IsNumber(item) ? item->valuedouble : -1;
  if (!(value >= 0 && value < UINT32_MAX && value == (uint32_t)value))
    return td_schema_bad(ctx, key, "must be a whole number");
  *out = (uint32_t)value;
  return TD_OK;
}

// ---- what a grammar cannot express -------------------------------------------------------------

static td_status check_keywords(td_schema_ctx *ctx, const cJSON *schema, unsigned types) {
  static const struct {
    const char *name;
    unsigned types; // to which it applies
  } refused[] = {
      {"not", TD_SCHEMA_ANY},
      {"if", TD_SCHEMA_ANY},
      {"$dynamicRef", TD_SCHEMA_ANY},
      {"$recursiveRef", TD_SCHEMA_ANY},
      {"dependentRequired", TD_SCHEMA_OBJECT},
      {"dependentSchemas", TD_SCHEMA_OBJECT},
      {"dependencies", TD_SCHEMA_OBJECT},
      {"unevaluatedProperties", TD_SCHEMA_OBJECT},
      {"contains", TD_SCHEMA_ARRAY},
      {"unevaluatedItems", TD_SCHEMA_ARRAY},
  };
  for (size_t i = 0; i < TD_COUNT(refused); i++) {
    const cJSON *item = td_schema_get(ctx, schema, refused[i].name);
    bool is_neutral = !item ||
                      (strncmp(refused[i].name, "unevaluated", 11) == 0 && cJSON_IsTrue(item)) ||
                      (cJSON_IsObject(item) && !item->child &&
                       refused[i].types == TD_SCHEMA_OBJECT);
    if (!is_neutral && (types & refused[i].types)) {
      const td_status st = td_schema_leave_out(ctx, refused[i].name, NULL);
      if (st != TD_OK) return st;
    }
  }
  return TD_OK;
}

// ---- rules -------------------------------------------------------------------------------------

static uint32_t hash_of(const cJSON *schema, uint32_t indent) {
  const uint64_t x = ((uint64_t)(uintptr_t)schema + indent) * 0x9e3779b97f4a7c15u;
  return (uint32_t)(x >> 32);
}

static uint32_t *slot_of(const td_schema_ctx *ctx, const cJSON *schema, uint32_t indent) {
  uint32_t at = hash_of(schema, indent) & (ctx->n_slots - 1);
  for (; ctx->slots[at]; at = (at + 1) & (ctx->n_slots - 1)) {
    const td_schema_item *item = &ctx->items[ctx->slots[at] - 1];
    if (item->schema == schema && item->indent == indent) break;
  }
  return &ctx->slots[at];
}

// Makes room for one more item.
static bool grow_items(td_schema_ctx *ctx) {
  const uint32_t n_slots = ctx->n_slots ? 2 * ctx->n_slots : 64;
  if (!td_budget_step(ctx->budget, 1) || !td_budget_take(ctx->budget, sizeof *ctx->items + 16) ||
      !TD_GROW(ctx->items, ctx->n_items, ctx->cap_items, 16))
    return false;
  if (2 * (ctx->n_items + 1) <= ctx->n_slots) return true;
  uint32_t *slots = calloc(n_slots, sizeof *slots);
  if (!slots) return false;
  free(ctx->slots);
  ctx->slots = slots;
  ctx->n_slots = n_slots;
  for (uint32_t i = 0; i < ctx->n_items; i++)
    *slot_of(ctx, ctx->items[i].schema, ctx->items[i].indent) = i + 1;
  return true;
}

td_node td_schema_refer(td_schema_ctx *ctx, const cJSON *schema, uint32_t indent,
                        td_schema_place place) {
  if (!grow_items(ctx)) {
    td_schema_exhausted(ctx);
    return TD_NODE_NEVER;
  }
  uint32_t *slot = slot_of(ctx, schema, indent);
  if (!*slot) {
    ctx->items[ctx->n_items] = (td_schema_item){.schema = schema,
                                                .indent = indent,
                                                .rule = td_g_rule(ctx->b),
                                                .parent = ctx->n_items ? ctx->at
                                                                       : TD_SCHEMA_NO_INDEX,
                                                .key = place.key,
                                                .name = place.name,
                                                .index = place.index};
    *slot = ++ctx->n_items;
  }
  return td_g_call(ctx->b, ctx->items[*slot - 1].rule);
}

// Whether some value of the schema may have items.
static bool may_nest(td_schema_ctx *ctx, const cJSON *schema) {
  const cJSON *type = td_schema_get(ctx, schema, "type");
  if (td_schema_get(ctx, schema, "enum") || td_schema_member_of(ctx, schema, "const")) return false;
  return !cJSON_IsString(type) || strcmp(type->valuestring, "array") == 0 ||
         strcmp(type->valuestring, "object") == 0;
}

td_node td_schema_refer_item(td_schema_ctx *ctx, const cJSON *schema, td_schema_place place) {
  const uint32_t indent = ctx->items[ctx->at].indent;
  const bool has_more = indent && indent < ctx->max_indent;
  if (!schema) {
    const td_node more = has_more ? ctx->json->value[indent + 1] : TD_NODE_NEVER;
    return TD_G_ANY(ctx->b, ctx->json->value[0], more);
  }
  const td_node flat = td_schema_refer(ctx, schema, 0, place);
  if (!has_more || !may_nest(ctx, schema)) return flat;
  return TD_G_ANY(ctx->b, flat, td_schema_refer(ctx, schema, indent + 1, place));
}

// The schema itself stands for the one being translated.
static td_node refer(td_schema_ctx *ctx, const cJSON *schema, const char *key, uint32_t index) {
  return td_schema_refer(ctx, schema, ctx->items[ctx->at].indent,
                         (td_schema_place){.key = key, .index = index});
}

// ---- a schema ----------------------------------------------------------------------------------

static td_status translate_values(td_schema_ctx *ctx, const cJSON *schema, unsigned types,
                                  td_node *out) {
  const cJSON *list = td_schema_get(ctx, schema, "enum");
  const cJSON *single = td_schema_member_of(ctx, schema, "const");
  if (list && !cJSON_IsArray(list)) return td_schema_bad(ctx, "enum", "must be an array");
  const char *a = list ? "enum" : "const";
  const bool has_both = list && single;
  cJSON *rest;
  td_status st = td_schema_without(ctx, schema, a, NULL, &rest);
  if (st != TD_OK) return st;
  if (!td_schema_asserts_only(rest, "type", has_both ? "const" : NULL)) {
    st = td_schema_leave_out(ctx, a, "beside other keywords");
    if (st != TD_OK) return st;
  }
  td_buf text = TD_BUF_INIT, words = TD_BUF_INIT;
  for (const cJSON *item = list ? list->child : single; item; item = list ? item->next : NULL) {
    if (!(td_schema_types_of(item) & types)) continue;
    if (has_both && !cJSON_Compare(item, single, true)) continue;
    const size_t begin = text.len;
    td_schema_write_value(&text, item);
    td_buf_add(&words, &(td_g_word){.len = text.len - begin}, sizeof(td_g_word));
  }
  td_g_word *all = (td_g_word *)(void *)words.data;
  const size_t n = words.len / sizeof *all;
  const char *at = td_buf_text(&text);
  for (size_t i = 0; i < n; at += all[i++].len)
    all[i].text = at;
  if (text.failed || words.failed)
    td_grammar_build_budget(ctx->b)->status = TD_ENOMEM;
  else
    *out = td_g_words(ctx->b, all, n);
  td_buf_free(&text);
  td_buf_free(&words);
  return st;
}

// The alternatives of anyOf or oneOf, each together with the schema's other keywords.
static td_status list_alternatives(td_schema_ctx *ctx, const cJSON *schema, const char *key,
                                   const cJSON **out, uint32_t *n) {
  cJSON *base;
  *n = 0;
  td_status st = td_schema_without(ctx, schema, key, NULL, &base);
  const bool is_alone = st == TD_OK && td_schema_asserts_only(base, NULL, NULL);
  const cJSON *item = td_schema_get(ctx, schema, key)->child;
  for (; item && st == TD_OK; item = item->next) {
    if (*n == MAX_ALTERNATIVES) return td_schema_refuse(ctx, key, "with so many schemas");
    out[*n] = item;
    if (!is_alone) st = td_schema_both(ctx, base, item, &out[*n]);
    ++*n;
  }
  return st;
}

// Whether no two of the alternatives can hold for one value.
static bool are_apart(td_schema_ctx *ctx, const cJSON **all, uint32_t n) {
  const cJSON *expanded[MAX_ALTERNATIVES];
  for (uint32_t i = 0; i < n; i++)
    if (td_schema_expand(ctx, all[i], &expanded[i]) != TD_OK) return false;
  for (uint32_t i = 0; i < n; i++) {
    for (uint32_t k = i + 1; k < n; k++)
      if (!td_schema_excludes(ctx, expanded[i], expanded[k])) return false;
  }
  return true;
}

static td_status translate_alternatives(td_schema_ctx *ctx, const cJSON *schema, const char *key,
                                        td_node *out) {
  const cJSON *list = td_schema_get(ctx, schema, key), *all[MAX_ALTERNATIVES];
  uint32_t n;
  if (!cJSON_IsArray(list) || !list->child)
    return td_schema_bad(ctx, key, "must be an array of schemas");
  td_status st = list_alternatives(ctx, schema, key, all, &n);
  if (st == TD_OK && key[0] == 'o' && !are_apart(ctx, all, n)) {
    st = ctx->budget->status != TD_OK
             ? td_schema_exhausted(ctx)
             : td_schema_leave_out(ctx, key, "of schemas that may both hold; use anyOf");
  }
  const size_t begin = td_g_begin(ctx->b);
  for (uint32_t i = 0; i < n && st == TD_OK; i++)
    td_g_add(ctx->b, refer(ctx, all[i], key, i));
  *out = td_g_end_any(ctx->b, begin);
  return st;
}

static td_status translate_types(td_schema_ctx *ctx, const cJSON *schema, unsigned types,
                                 td_node *out) {
  td_node number = TD_NODE_NEVER, string = TD_NODE_NEVER, array = TD_NODE_NEVER;
  td_node object = TD_NODE_NEVER, null = TD_NODE_NEVER, boolean = TD_NODE_NEVER;
  td_status st = check_keywords(ctx, schema, types);
  if (ctx->items[ctx->at].indent) types &= TD_SCHEMA_ARRAY | TD_SCHEMA_OBJECT;
  if (types & TD_SCHEMA_NULL) null = td_g_str(ctx->b, "null");
  if (types & TD_SCHEMA_BOOL) boolean = td_g_gbnf(ctx->b, "\"true\" | \"false\"", NULL);
  if (st == TD_OK && types & (TD_SCHEMA_NUMBER | TD_SCHEMA_INTEGER))
    st = td_schema_number(ctx, schema, !(types & TD_SCHEMA_NUMBER), &number);
  if (st == TD_OK && types & TD_SCHEMA_STRING) st = td_schema_string(ctx, schema, &string);
  if (st == TD_OK && types & TD_SCHEMA_ARRAY) st = td_schema_array(ctx, schema, &array);
  if (st == TD_OK && types & TD_SCHEMA_OBJECT) st = td_schema_object(ctx, schema, &object);
  *out = TD_G_ANY(ctx->b, null, boolean, number, string, array, object);
  return st;
}

// Translates the schema whose turn it is. What it refers to is put at the end of the list.
static td_status translate(td_schema_ctx *ctx, const cJSON *schema, td_node *out) {
  const uint32_t indent = ctx->items[ctx->at].indent;
  unsigned types;
  *out = TD_NODE_NEVER;
  if (!cJSON_IsObject(schema) && !cJSON_IsBool(schema))
    return td_schema_bad(ctx, "a schema", "must be an object");
  if (cJSON_IsFalse(schema)) return TD_OK;
  if (cJSON_IsTrue(schema) || td_schema_asserts_only(schema, NULL, NULL)) {
    *out = ctx->json->value[indent];
    return TD_OK;
  }
  const cJSON *ref = td_schema_get(ctx, schema, "$ref"), *target;
  const cJSON *all = td_schema_get(ctx, schema, "allOf");
  if (ref || all) {
    const bool is_alone = cJSON_IsString(ref) && td_schema_asserts_only(schema, "$ref", NULL);
    td_status st = is_alone ? td_schema_resolve(ctx, ref->valuestring, &target)
                            : td_schema_expand(ctx, schema, &target);
    if (st == TD_OK) *out = refer(ctx, target, ref ? "$ref" : "allOf", TD_SCHEMA_NO_INDEX);
    return st;
  }
  td_status st = td_schema_types(ctx, schema, &types);
  if (st != TD_OK) return st;
  if (td_schema_get(ctx, schema, "anyOf")) return translate_alternatives(ctx, schema, "anyOf", out);
  if (td_schema_get(ctx, schema, "oneOf")) return translate_alternatives(ctx, schema, "oneOf", out);
  if (td_schema_get(ctx, schema, "enum") || td_schema_member_of(ctx, schema, "const"))
    return indent ? TD_OK : translate_values(ctx, schema, types, out);
  return translate_types(ctx, schema, types, out);
}

static td_status translate_all(td_schema_ctx *ctx, const cJSON *schema, td_node *out) {
  const td_schema_place top = {.index = TD_SCHEMA_NO_INDEX};
  const bool is_indented = ctx->max_indent && may_nest(ctx, schema);
  const td_node flat = td_schema_refer(ctx, schema, 0, top);
  *out = TD_G_ANY(ctx->b, flat, is_indented ? td_schema_refer(ctx, schema, 1, top) : TD_NODE_NEVER);
  td_status st = td_grammar_build_status(ctx->b, ctx->err);
  while (st == TD_OK && ctx->at < ctx->n_items) {
    const td_schema_item item = ctx->items[ctx->at];
    td_node body;
    if (ctx->max_indent && ctx->n_items > MAX_ITEMS) return TD_ELIMIT;
    const size_t list = td_g_begin(ctx->b);
    st = translate(ctx, item.schema, &body);
    if (st == TD_EUNSUPPORTED && ctx->opts->leaves_out) { // this schema allows anything
      say_left_out(ctx->err->msg);
      td_g_end_any(ctx->b, list);
      body = ctx->json->value[item.indent];
      st = TD_OK;
    }
    if (st == TD_OK) td_g_define(ctx->b, item.rule, body);
    if (st == TD_OK) st = td_grammar_build_status(ctx->b, ctx->err);
    if (st == TD_OK) ctx->at++;
  }
  return st;
}

static td_status build(td_node *out, td_grammar_build *b, const cJSON *schema,
                       const td_json_schema_opts *opts, uint32_t max_indent, td_err *err) {
  const td_json_rules *json = td_g_json(b, opts->is_free);
  const td_grammar_mark mark = td_g_mark(b);
  td_schema_ctx ctx = {.b = b,
                       .budget = td_grammar_build_budget(b),
                       .json = json,
                       .root = opts->root ? opts->root : schema,
                       .opts = opts,
                       .max_indent = max_indent,
                       .err = err};
  const size_t list = td_g_begin(b);
  td_status st = translate_all(&ctx, schema, out);
  td_g_end_any(b, list);                        // what a failure has left
  if (td_grammar_build_status(b, err) != TD_OK) // of no part alone
    st = td_err_prefix(err, "%s", name_of(&ctx));
  else if (st != TD_OK)
    td_g_reset(b, &mark);
  if (st != TD_OK && ctx.budget->status == TD_OK && opts->path) {
    char path[TD_SCHEMA_PATH_BYTES];
    write_path(&ctx, path);
    memcpy(opts->path, path, sizeof path);
  }
  td_schema_ctx_free(&ctx);
  return st;
}

td_status td_json_schema_build(td_node *out, td_grammar_build *b, const cJSON *schema,
                               const td_json_schema_opts *opts, td_err *err) {
  const uint32_t max_indent = opts->is_free || opts->is_one_line ? 0 : TD_JSON_MAX_INDENT;
  td_status st = build(out, b, schema, opts, max_indent, err);
  if (st != TD_ELIMIT || !max_indent || td_grammar_build_status(b, NULL) != TD_OK) return st;
  return build(out, b, schema, opts, 0, err); // on one line
}
