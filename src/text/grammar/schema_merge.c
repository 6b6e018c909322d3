// src/text/grammar/schema_merge.c - $ref, allOf, and whether two schemas exclude each other. A
// schema for what two schemas assert together is put together keyword by keyword.
#include <stdlib.h>
#include <string.h>

#include "base/grow.h"
#include "base/json_parse.h"
#include "base/str.h"
#include "text/grammar/schema_impl.h"
#include "text/json_replace.h"

#define MAX_EXPAND       32
#define MAX_ALTERNATIVES 64
#define MAX_OWNED        8192

td_status td_schema_no_memory(td_schema_ctx *ctx) {
  ctx->has_failed = true;
  return td_fail(ctx->err, TD_ENOMEM, "out of memory for a schema");
}

static td_status own(td_schema_ctx *ctx, cJSON *schema) {
  if (ctx->n_owned >= 2 * MAX_OWNED) {
    cJSON_Delete(schema);
    return td_fail(ctx->err, TD_ELIMIT, "the schema has too many combinations");
  }
  if (!schema || !TD_GROW(ctx->owned, ctx->n_owned, ctx->cap_owned, 16)) {
    cJSON_Delete(schema);
    return td_schema_no_memory(ctx);
  }
  ctx->owned[ctx->n_owned++] = schema;
  return TD_OK;
}

void td_schema_ctx_free(td_schema_ctx *ctx) {
  for (uint32_t i = 0; i < ctx->n_owned; i++)
    cJSON_Delete(ctx->owned[i]);
  free(ctx->owned);
  free(ctx->rules);
}

// ---- keywords ----------------------------------------------------------------------------------

// Keywords that assert nothing, or are used by others.
static bool is_annotation(const char *key) {
  static const char asserting[] =
      "$ref type enum const properties required additionalProperties items prefixItems "
      "additionalItems minItems maxItems minLength maxLength pattern format minimum maximum "
      "exclusiveMinimum exclusiveMaximum multipleOf anyOf oneOf allOf not if then else "
      "dependentRequired dependentSchemas dependencies propertyNames patternProperties contains "
      "minContains maxContains uniqueItems minProperties maxProperties unevaluatedProperties "
      "unevaluatedItems $dynamicRef $recursiveRef";
  return !td_is_word(asserting, key);
}

bool td_schema_asserts_only(const cJSON *schema, const char *a, const char *b) {
  for (const cJSON *item = schema ? schema->child : NULL; item; item = item->next) {
    if ((a && strcmp(item->string, a) == 0) || (b && strcmp(item->string, b) == 0)) continue;
    if (!is_annotation(item->string)) return false;
  }
  return true;
}

td_status td_schema_without(td_schema_ctx *ctx, const cJSON *schema, const char *key, cJSON **out) {
  *out = cJSON_Duplicate(schema, true);
  td_status st = own(ctx, *out);
  if (st == TD_OK) cJSON_DeleteItemFromObjectCaseSensitive(*out, key);
  return st;
}

// ---- $ref --------------------------------------------------------------------------------------

static int hex_value(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  c |= 0x20;
  return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

// One step of a JSON pointer, unescaped, up to the next slash. Returns what follows it.
static const char *read_step(const char *at, char *out, size_t cap) {
  size_t n = 0;
  for (; *at && *at != '/'; at++) {
    char c = *at;
    if (c == '~' && (at[1] == '0' || at[1] == '1')) {
      c = *++at == '0' ? '~' : '/';
    } else if (c == '%' && hex_value(at[1]) >= 0 && hex_value(at[2]) >= 0) {
      c = (char)(hex_value(at[1]) << 4 | hex_value(at[2]));
      at += 2;
    }
    if (n + 1 < cap) out[n++] = c;
  }
  out[n] = '\0';
  return at;
}

td_status td_schema_resolve(const td_schema_ctx *ctx, const char *ref, const cJSON **out) {
  const cJSON *at = ctx->root;
  char step[256];
  if (ref[0] != '#' || (ref[1] && ref[1] != '/')) {
    return td_schema_refuse(ctx, "$ref", "other than a pointer into the schema, #/...");
  }
  const char *rest = ref + 1;
  while (*rest && at) {
    rest = read_step(rest + 1, step, sizeof step);
    if (cJSON_IsArray(at)) {
      at = cJSON_GetArrayItem(at, atoi(step));
    } else {
      at = cJSON_GetObjectItemCaseSensitive(at, step);
    }
  }
  if (!at) return td_schema_bad(ctx, "$ref", "points at nothing");
  *out = at;
  return TD_OK;
}

// ---- two schemas in one ------------------------------------------------------------------------

// Puts value, which is whole or not, into an object. Takes it, also on error. False: out of memory.
static bool put_if(bool is_whole, cJSON *to, const char *key, cJSON *value) {
  if (is_whole) return td_json_put(to, key, value);
  cJSON_Delete(value);
  return false;
}

// Puts {"allOf": [a, b]} into an object.
static bool put_both(cJSON *to, const char *key, const cJSON *a, const cJSON *b) {
  cJSON *both = cJSON_CreateObject(), *list = cJSON_AddArrayToObject(both, "allOf");
  bool ok = list && cJSON_AddItemToArray(list, cJSON_Duplicate(a, true)) &&
            cJSON_AddItemToArray(list, cJSON_Duplicate(b, true));
  return put_if(ok, to, key, both);
}

// Properties that only `from` names must also satisfy the other's additionalProperties.
static bool restrict_properties(cJSON *properties, const cJSON *from, const cJSON *others,
                                const cJSON *additional) {
  bool ok = true;
  for (const cJSON *p = from ? from->child : NULL; p && ok; p = p->next) {
    if (!additional || td_json_get(others, p->string)) continue;
    ok = put_both(properties, p->string, p, additional);
  }
  return ok;
}

static bool merge_properties(cJSON *to, const cJSON *a, const cJSON *b) {
  const cJSON *of_a = td_json_get(a, "properties"), *of_b = td_json_get(b, "properties");
  cJSON *merged = of_a ? cJSON_Duplicate(of_a, true) : cJSON_CreateObject();
  bool ok = merged;
  for (const cJSON *p = of_b ? of_b->child : NULL; p && ok; p = p->next) {
    const cJSON *there = td_json_get(of_a, p->string);
    ok = there ? put_both(merged, p->string, there, p)
               : td_json_put(merged, p->string, cJSON_Duplicate(p, true));
  }
  if (ok) ok = restrict_properties(merged, of_a, of_b, td_json_get(b, "additionalProperties"));
  if (ok) ok = restrict_properties(merged, of_b, of_a, td_json_get(a, "additionalProperties"));
  return put_if(ok, to, "properties", merged);
}

static bool has_value(const cJSON *list, const cJSON *value) {
  for (const cJSON *item = list->child; item; item = item->next) {
    if (cJSON_Compare(item, value, true)) return true;
  }
  return false;
}

// The union (required) or the intersection (enum) of two lists.
static bool merge_lists(cJSON *to, const char *key, const cJSON *a, const cJSON *b, bool is_union) {
  cJSON *list = is_union ? cJSON_Duplicate(a, true) : cJSON_CreateArray();
  bool ok = list;
  for (const cJSON *item = b->child; item && ok; item = item->next) {
    if (has_value(a, item) == is_union) continue;
    ok = cJSON_AddItemToArray(list, cJSON_Duplicate(item, true));
  }
  return put_if(ok, to, key, list);
}

static td_status merge_types(td_schema_ctx *ctx, cJSON *to, const cJSON *a, const cJSON *b) {
  static const struct {
    const char *name;
    unsigned bits;
  } names[] = {{"null", TD_SCHEMA_NULL},     {"boolean", TD_SCHEMA_BOOL},
               {"number", TD_SCHEMA_NUMBER}, {"integer", TD_SCHEMA_INTEGER},
               {"string", TD_SCHEMA_STRING}, {"array", TD_SCHEMA_ARRAY},
               {"object", TD_SCHEMA_OBJECT}};
  unsigned of_a, of_b;
  td_status st = td_schema_types(ctx, a, &of_a);
  if (st == TD_OK) st = td_schema_types(ctx, b, &of_b);
  if (st != TD_OK) return st;
  cJSON *list = cJSON_CreateArray();
  bool ok = list;
  for (size_t i = 0; i < TD_COUNT(names) && ok; i++) {
    bool is_both = of_a & of_b & names[i].bits;
    if (names[i].bits == TD_SCHEMA_INTEGER) is_both &= !(of_a & of_b & TD_SCHEMA_NUMBER);
    if (is_both) ok = cJSON_AddItemToArray(list, cJSON_CreateString(names[i].name));
  }
  return put_if(ok, to, "type", list) ? TD_OK : td_schema_no_memory(ctx);
}

// Every alternative of one beside every one of the other.
static td_status merge_alternatives(td_schema_ctx *ctx, cJSON *to, const cJSON *a, const cJSON *b) {
  if (cJSON_GetArraySize(a) * cJSON_GetArraySize(b) > MAX_ALTERNATIVES) {
    return td_schema_refuse(ctx, "anyOf", "with so many combinations");
  }
  cJSON *list = cJSON_CreateArray();
  bool ok = list;
  for (const cJSON *x = a->child; x && ok; x = x->next) {
    for (const cJSON *y = b->child; y && ok; y = y->next) {
      cJSON *holder = cJSON_CreateObject();
      ok = holder && put_both(holder, "both", x, y) &&
           cJSON_AddItemToArray(list, cJSON_DetachItemFromObjectCaseSensitive(holder, "both"));
      cJSON_Delete(holder);
    }
  }
  return put_if(ok, to, "anyOf", list) ? TD_OK : td_schema_no_memory(ctx);
}

// A keyword that both have. *done: it is merged.
static td_status merge_keyword(td_schema_ctx *ctx, cJSON *to, const cJSON *a, const cJSON *b) {
  static const char larger[] = "minLength minItems minProperties minimum exclusiveMinimum";
  static const char smaller[] = "maxLength maxItems maxProperties maximum exclusiveMaximum";
  const char *key = b->string;
  bool ok = true;
  if (cJSON_Compare(a, b, true)) return TD_OK;
  bool is_min = td_is_word(larger, key);
  if (is_min || td_is_word(smaller, key)) {
    if (!cJSON_IsNumber(a) || !cJSON_IsNumber(b)) return td_schema_refuse(ctx, key, "of two kinds");
    bool takes_b = is_min ? b->valuedouble > a->valuedouble : b->valuedouble < a->valuedouble;
    if (takes_b) ok = td_json_replace(to, key, cJSON_Duplicate(b, true));
  } else if (strcmp(key, "required") == 0 || strcmp(key, "enum") == 0) {
    if (!cJSON_IsArray(a) || !cJSON_IsArray(b)) return td_schema_bad(ctx, key, "must be an array");
    ok = merge_lists(to, key, a, b, key[0] == 'r');
  } else if (strcmp(key, "additionalProperties") == 0 || strcmp(key, "items") == 0) {
    if (cJSON_IsArray(a) || cJSON_IsArray(b)) return td_schema_refuse(ctx, "items", "within allOf");
    ok = put_both(to, key, a, b);
  } else if (strcmp(key, "const") == 0) {
    cJSON_DeleteItemFromObjectCaseSensitive(to, "const");
    ok = cJSON_AddArrayToObject(to, "enum"); // no value
  } else if (strcmp(key, "anyOf") == 0) {
    return merge_alternatives(ctx, to, a, b);
  } else {
    return td_schema_refuse(ctx, key, "more than once within allOf");
  }
  return ok ? TD_OK : td_schema_no_memory(ctx);
}

static td_status merge_objects(td_schema_ctx *ctx, cJSON *to, const cJSON *a, const cJSON *b) {
  td_status st = TD_OK;
  bool has_tuples = td_json_get(a, "prefixItems") || td_json_get(b, "prefixItems");
  if (has_tuples && td_json_get(a, "items") != td_json_get(b, "items") &&
      (td_json_get(a, "prefixItems") || td_json_get(a, "items")) &&
      (td_json_get(b, "prefixItems") || td_json_get(b, "items"))) {
    return td_schema_refuse(ctx, "prefixItems", "within allOf");
  }
  bool has_properties = td_json_get(a, "properties") || td_json_get(b, "properties");
  if (has_properties && !merge_properties(to, a, b)) return td_schema_no_memory(ctx);
  for (const cJSON *item = b->child; item && st == TD_OK; item = item->next) {
    const char *key = item->string;
    if (strcmp(key, "properties") == 0 || cJSON_IsNull(item)) continue;
    const cJSON *there = td_json_get(a, key);
    if (strcmp(key, "type") == 0) {
      st = merge_types(ctx, to, a, b);
    } else if (!there) {
      if (!td_json_put(to, key, cJSON_Duplicate(item, true))) st = td_schema_no_memory(ctx);
    } else if (!is_annotation(key)) {
      st = merge_keyword(ctx, to, there, item);
    }
  }
  return st;
}

td_status td_schema_both(td_schema_ctx *ctx, const cJSON *a, const cJSON *b, const cJSON **out) {
  td_status st = td_schema_expand(ctx, a, &a);
  if (st == TD_OK) st = td_schema_expand(ctx, b, &b);
  if (st != TD_OK) return st;
  if (cJSON_IsTrue(a) || cJSON_IsFalse(b)) {
    *out = b;
    return TD_OK;
  }
  if (cJSON_IsTrue(b) || cJSON_IsFalse(a)) {
    *out = a;
    return TD_OK;
  }
  if (!cJSON_IsObject(a) || !cJSON_IsObject(b))
    return td_schema_bad(ctx, "allOf", "holds no schema");
  cJSON *to = cJSON_Duplicate(a, true);
  st = own(ctx, to);
  if (st == TD_OK) st = merge_objects(ctx, to, a, b);
  *out = to;
  return st;
}

td_status td_schema_expand(td_schema_ctx *ctx, const cJSON *schema, const cJSON **out) {
  const cJSON *ref = td_json_get(schema, "$ref"), *all = td_json_get(schema, "allOf"), *part;
  *out = schema;
  if (!ref && !all) return TD_OK;
  if (ref && !cJSON_IsString(ref)) return td_schema_bad(ctx, "$ref", "must be a string");
  if (all && (!cJSON_IsArray(all) || !all->child)) {
    return td_schema_bad(ctx, "allOf", "must be an array of schemas");
  }
  if (ctx->expand_depth >= MAX_EXPAND || ctx->n_owned >= MAX_OWNED) {
    return td_schema_refuse(ctx, ref ? "$ref" : "allOf", "that contains itself");
  }
  ctx->expand_depth++;
  cJSON *base;
  td_status st = td_schema_without(ctx, schema, "$ref", &base);
  if (st == TD_OK) cJSON_DeleteItemFromObjectCaseSensitive(base, "allOf");
  *out = base;
  if (st == TD_OK && ref) {
    st = td_schema_resolve(ctx, ref->valuestring, &part);
    if (st == TD_OK) st = td_schema_both(ctx, base, part, out);
  }
  for (const cJSON *item = all ? all->child : NULL; item && st == TD_OK; item = item->next)
    st = td_schema_both(ctx, *out, item, out);
  ctx->expand_depth--;
  return st;
}

// ---- exclusion ---------------------------------------------------------------------------------

// Whether the values of enum and const, where both have some, are different ones.
static bool have_different_values(const cJSON *a, const cJSON *b) {
  const cJSON *of_a = td_json_get(a, "const"), *of_b = td_json_get(b, "const");
  const cJSON *list_a = td_json_get(a, "enum"), *list_b = td_json_get(b, "enum");
  if (of_a && of_b) return !cJSON_Compare(of_a, of_b, true);
  if (of_a && list_b) return !has_value(list_b, of_a);
  if (list_a && of_b) return !has_value(list_a, of_b);
  if (!list_a || !list_b) return false;
  for (const cJSON *item = list_a->child; item; item = item->next) {
    if (has_value(list_b, item)) return false;
  }
  return true;
}

static bool is_required(const cJSON *schema, const char *key) {
  const cJSON *required = td_json_get(schema, "required");
  for (const cJSON *item = required ? required->child : NULL; item; item = item->next) {
    if (cJSON_IsString(item) && strcmp(item->valuestring, key) == 0) return true;
  }
  return false;
}

// Whether one names a required property that the other does not allow.
static bool lacks_required(const cJSON *a, const cJSON *b) {
  const cJSON *additional = td_json_get(b, "additionalProperties");
  const cJSON *required = td_json_get(a, "required");
  if (!cJSON_IsFalse(additional)) return false;
  for (const cJSON *item = required ? required->child : NULL; item; item = item->next) {
    if (!cJSON_IsString(item)) continue;
    if (!td_json_get(td_json_get(b, "properties"), item->valuestring)) return true;
  }
  return false;
}

bool td_schema_excludes(td_schema_ctx *ctx, const cJSON *a, const cJSON *b) {
  unsigned of_a, of_b;
  if (td_schema_expand(ctx, a, &a) != TD_OK || td_schema_expand(ctx, b, &b) != TD_OK) return false;
  if (cJSON_IsFalse(a) || cJSON_IsFalse(b)) return true;
  if (td_schema_types(ctx, a, &of_a) != TD_OK || td_schema_types(ctx, b, &of_b) != TD_OK) {
    return false;
  }
  if (of_a & TD_SCHEMA_NUMBER) of_a |= TD_SCHEMA_INTEGER;
  if (of_b & TD_SCHEMA_NUMBER) of_b |= TD_SCHEMA_INTEGER;
  if (!(of_a & of_b) || have_different_values(a, b)) return true;
  if ((of_a & of_b) != TD_SCHEMA_OBJECT) return false;
  const cJSON *properties = td_json_get(a, "properties");
  for (const cJSON *p = properties ? properties->child : NULL; p; p = p->next) {
    const cJSON *other = td_json_get(td_json_get(b, "properties"), p->string), *x, *y;
    if (!other || !is_required(a, p->string) || !is_required(b, p->string)) continue;
    if (td_schema_expand(ctx, p, &x) != TD_OK || td_schema_expand(ctx, other, &y) != TD_OK)
      continue;
    if (have_different_values(x, y)) return true;
  }
  return lacks_required(a, b) || lacks_required(b, a);
}

// ---- types behind references --------------------------------------------------------------------

static unsigned types_of_values(const cJSON *list) {
  unsigned types = 0;
  for (const cJSON *v = list->child; v; v = v->next)
    types |= td_schema_types_of(v);
  return types;
}

static unsigned types_within(td_schema_ctx *ctx, const cJSON *schema, unsigned depth) {
  static const char *const unions[] = {"anyOf", "oneOf"};
  unsigned types;
  if (depth == MAX_EXPAND || td_schema_expand(ctx, schema, &schema) != TD_OK) return TD_SCHEMA_ANY;
  if (cJSON_IsFalse(schema)) return 0;
  if (td_schema_types(ctx, schema, &types) != TD_OK) return TD_SCHEMA_ANY;
  const cJSON *single = cJSON_GetObjectItemCaseSensitive(schema, "const");
  const cJSON *list = td_json_get(schema, "enum");
  if (single) types &= td_schema_types_of(single);
  if (cJSON_IsArray(list)) types &= types_of_values(list);
  for (size_t i = 0; i < TD_COUNT(unions); i++) {
    const cJSON *any = td_json_get(schema, unions[i]);
    unsigned of_any = 0;
    for (const cJSON *item = cJSON_IsArray(any) ? any->child : NULL; item; item = item->next)
      of_any |= types_within(ctx, item, depth + 1);
    if (cJSON_IsArray(any)) types &= of_any;
  }
  return types;
}

unsigned td_json_schema_types(const cJSON *root, const cJSON *schema, bool *has_failed) {
  td_err ignored;
  td_schema_ctx ctx = {
      .root = root, .path = (char[TD_SCHEMA_PATH_BYTES]){"schema"}, .err = &ignored};
  const unsigned types = types_within(&ctx, schema, 0);
  *has_failed |= ctx.has_failed;
  td_schema_ctx_free(&ctx);
  return types;
}

cJSON *td_json_schema_expanded(const cJSON *root, const cJSON *schema, bool *has_failed) {
  td_err ignored;
  td_schema_ctx ctx = {
      .root = root, .path = (char[TD_SCHEMA_PATH_BYTES]){"schema"}, .err = &ignored};
  const td_status st = td_schema_expand(&ctx, schema, &schema);
  cJSON *copy = st == TD_OK ? cJSON_Duplicate(schema, true) : NULL;
  *has_failed |= ctx.has_failed || (st == TD_OK && !copy);
  td_schema_ctx_free(&ctx);
  return copy;
}
