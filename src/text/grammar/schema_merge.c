// src/text/grammar/schema_merge.c - $ref, allOf, and whether two schemas exclude each other. A
// schema for what two schemas assert together is put together keyword by keyword, from references
// to their members: what a member holds is never copied.
#include <stdlib.h>
#include <string.h>

#include "base/grow.h"
#include "base/str.h"
#include "text/grammar/schema_impl.h"

#define MAX_EXPAND       32
#define MAX_ALTERNATIVES 64

td_status td_schema_exhausted(td_schema_ctx *ctx) {
  if (ctx->budget->status == TD_OK) ctx->budget->status = TD_ENOMEM;
  return td_budget_fail(ctx->budget, ctx->err);
}

// Takes a new schema, also on error. NULL: memory or the budget is exhausted.
static td_status own(td_schema_ctx *ctx, cJSON *schema) {
  if (!schema || !TD_GROW(ctx->owned, ctx->n_owned, ctx->cap_owned, 16)) {
    cJSON_Delete(schema);
    return td_schema_exhausted(ctx);
  }
  ctx->owned[ctx->n_owned++] = schema;
  return TD_OK;
}

void td_schema_ctx_free(td_schema_ctx *ctx) {
  for (uint32_t i = 0; i < ctx->n_owned; i++)
    cJSON_Delete(ctx->owned[i]);
  free(ctx->owned);
  free(ctx->items);
  free(ctx->slots);
  free(ctx->members);
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

// ---- references --------------------------------------------------------------------------------

// Each of these takes from the budget, and is false where it or memory is exhausted.

static bool may_add(td_schema_ctx *ctx, const char *key) {
  return td_budget_step(ctx->budget, 1) &&
         td_budget_take(ctx->budget, sizeof(cJSON) + strlen(key) + 1);
}

// A value that holds what another does. cJSON's own functions lose theirs where memory is short.
static cJSON *reference_to(const cJSON *value) {
  cJSON *out = cJSON_CreateNull();
  if (!out) return NULL;
  out->type = (value->type & 0xFF) | cJSON_IsReference;
  out->child = value->child;
  out->valuestring = value->valuestring;
  out->valueint = value->valueint;
  out->valuedouble = value->valuedouble;
  return out;
}

// Adds a new value, which may be NULL and is taken, also on error.
static bool add_new(td_schema_ctx *ctx, cJSON *to, const char *key, cJSON *value) {
  if (value && may_add(ctx, key) && cJSON_AddItemToObject(to, key, value)) return true;
  cJSON_Delete(value);
  return false;
}

// Adds a member that is another's.
static bool add_reference(td_schema_ctx *ctx, cJSON *to, const char *key, const cJSON *value) {
  return add_new(ctx, to, key, reference_to(value));
}

static bool append_reference(td_schema_ctx *ctx, cJSON *list, const cJSON *value) {
  cJSON *reference = list && may_add(ctx, "") ? reference_to(value) : NULL;
  return reference && cJSON_AddItemToArray(list, reference);
}

// An object of references to all members of `schema` but two.
static cJSON *refer_without(td_schema_ctx *ctx, const cJSON *schema, const char *a, const char *b) {
  cJSON *out = cJSON_CreateObject();
  bool ok = out != NULL;
  for (const cJSON *m = schema->child; m && ok; m = m->next) {
    if ((a && strcmp(m->string, a) == 0) || (b && strcmp(m->string, b) == 0)) continue;
    ok = add_reference(ctx, out, m->string, m);
  }
  if (ok) return out;
  cJSON_Delete(out);
  return NULL;
}

td_status td_schema_without(td_schema_ctx *ctx, const cJSON *schema, const char *a, const char *b,
                            cJSON **out) {
  *out = refer_without(ctx, schema, a, b);
  return own(ctx, *out);
}

// {"allOf": [a, b]}
static cJSON *both_of(td_schema_ctx *ctx, const cJSON *a, const cJSON *b) {
  cJSON *both = cJSON_CreateObject(), *list = cJSON_AddArrayToObject(both, "allOf");
  if (append_reference(ctx, list, a) && append_reference(ctx, list, b)) return both;
  cJSON_Delete(both);
  return NULL;
}

// ---- two schemas in one ------------------------------------------------------------------------

// Adds the properties of `of`, each of which must also satisfy what the other schema says of it:
// its own property, or its additionalProperties. is_second: those of both are there already.
static bool add_properties(td_schema_ctx *ctx, cJSON *to, const cJSON *of, const cJSON *other,
                           bool is_second) {
  const cJSON *properties = td_schema_get(ctx, of, "properties");
  const cJSON *others = td_schema_get(ctx, other, "properties");
  const cJSON *additional = td_schema_get(ctx, other, "additionalProperties");
  for (const cJSON *p = properties ? properties->child : NULL; p; p = p->next) {
    const cJSON *there = td_schema_member_of(ctx, others, p->string);
    if (ctx->budget->status != TD_OK) return false;
    if (there && is_second) continue;
    const cJSON *with = there ? there : additional;
    const bool ok = with ? add_new(ctx, to, p->string, both_of(ctx, p, with))
                         : add_reference(ctx, to, p->string, p);
    if (!ok) return false;
  }
  return true;
}

static bool has_value(td_schema_ctx *ctx, const cJSON *list, const cJSON *value) {
  for (const cJSON *item = list->child; item; item = item->next) {
    if (!td_budget_step(ctx->budget, 1)) return false;
    if (cJSON_Compare(item, value, true)) return true;
  }
  return false;
}

// The union (required) or the intersection (enum) of two lists.
static cJSON *merge_lists(td_schema_ctx *ctx, const cJSON *a, const cJSON *b, bool is_union) {
  cJSON *list = cJSON_CreateArray();
  bool ok = list != NULL;
  for (const cJSON *item = is_union ? a->child : NULL; item && ok; item = item->next)
    ok = append_reference(ctx, list, item);
  for (const cJSON *item = b->child; item && ok; item = item->next)
    if (has_value(ctx, a, item) != is_union) ok = append_reference(ctx, list, item);
  if (ok) return list;
  cJSON_Delete(list);
  return NULL;
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
  bool ok = list != NULL;
  for (size_t i = 0; i < TD_COUNT(names) && ok; i++) {
    bool is_both = of_a & of_b & names[i].bits;
    if (names[i].bits == TD_SCHEMA_INTEGER) is_both &= !(of_a & of_b & TD_SCHEMA_NUMBER);
    if (is_both) ok = cJSON_AddItemToArray(list, cJSON_CreateString(names[i].name));
  }
  if (!ok) cJSON_Delete(list);
  return add_new(ctx, to, "type", ok ? list : NULL) ? TD_OK : td_schema_exhausted(ctx);
}

// Every alternative of one beside every one of the other.
static td_status merge_alternatives(td_schema_ctx *ctx, cJSON *to, const cJSON *a, const cJSON *b) {
  if (cJSON_GetArraySize(a) * (double)cJSON_GetArraySize(b) > MAX_ALTERNATIVES)
    return td_schema_refuse(ctx, "anyOf", "with so many combinations");
  cJSON *list = cJSON_CreateArray();
  bool ok = list != NULL;
  for (const cJSON *x = a->child; x && ok; x = x->next) {
    for (const cJSON *y = b->child; y && ok; y = y->next) {
      cJSON *both = both_of(ctx, x, y);
      ok = both && cJSON_AddItemToArray(list, both);
    }
  }
  if (!ok) cJSON_Delete(list);
  return add_new(ctx, to, "anyOf", ok ? list : NULL) ? TD_OK : td_schema_exhausted(ctx);
}

// Adds a keyword that both have.
static td_status merge_keyword(td_schema_ctx *ctx, cJSON *to, const cJSON *a, const cJSON *b) {
  static const char larger[] = "minLength minItems minProperties minimum exclusiveMinimum";
  static const char smaller[] = "maxLength maxItems maxProperties maximum exclusiveMaximum";
  const char *key = b->string;
  bool ok;
  if (!td_budget_step(ctx->budget, 1)) return td_schema_exhausted(ctx);
  const bool is_min = td_is_word(larger, key);
  if (cJSON_Compare(a, b, true)) {
    ok = add_reference(ctx, to, key, a);
  } else if (is_min || td_is_word(smaller, key)) {
    if (!cJSON_IsNumber(a) || !cJSON_IsNumber(b)) return td_schema_refuse(ctx, key, "of two kinds");
    bool takes_b = is_min ? b->valuedouble > a->valuedouble : b->valuedouble < a->valuedouble;
    ok = add_reference(ctx, to, key, takes_b ? b : a);
  } else if (strcmp(key, "required") == 0 || strcmp(key, "enum") == 0) {
    if (!cJSON_IsArray(a) || !cJSON_IsArray(b)) return td_schema_bad(ctx, key, "must be an array");
    ok = add_new(ctx, to, key, merge_lists(ctx, a, b, key[0] == 'r'));
  } else if (strcmp(key, "additionalProperties") == 0 || strcmp(key, "items") == 0) {
    if (cJSON_IsArray(a) || cJSON_IsArray(b)) return td_schema_refuse(ctx, "items", "within allOf");
    ok = add_new(ctx, to, key, both_of(ctx, a, b));
  } else if (strcmp(key, "const") == 0) {
    ok = add_new(ctx, to, "enum", cJSON_CreateArray()); // no value
  } else if (strcmp(key, "anyOf") == 0) {
    return merge_alternatives(ctx, to, a, b);
  } else {
    return td_schema_refuse(ctx, key, "more than once within allOf");
  }
  return ok ? TD_OK : td_schema_exhausted(ctx);
}

static bool has_items(td_schema_ctx *ctx, const cJSON *schema) {
  return td_schema_get(ctx, schema, "prefixItems") || td_schema_get(ctx, schema, "items");
}

// Puts what a and b assert into an empty object.
static td_status merge_objects(td_schema_ctx *ctx, cJSON *to, const cJSON *a, const cJSON *b) {
  const bool has_tuples = td_schema_get(ctx, a, "prefixItems") ||
                          td_schema_get(ctx, b, "prefixItems");
  if (has_tuples && has_items(ctx, a) && has_items(ctx, b))
    return td_schema_refuse(ctx, "prefixItems", "within allOf");
  td_status st = TD_OK;
  for (const cJSON *m = a->child; m && st == TD_OK; m = m->next) {
    const char *key = m->string;
    const cJSON *other = td_schema_get(ctx, b, key);
    if (strcmp(key, "properties") == 0 || (strcmp(key, "type") == 0 && other)) continue;
    if (cJSON_IsNull(m) && other) continue;
    if (other && !is_annotation(key))
      st = merge_keyword(ctx, to, m, other);
    else if (!add_reference(ctx, to, key, m))
      st = td_schema_exhausted(ctx);
  }
  for (const cJSON *m = b->child; m && st == TD_OK; m = m->next) {
    const char *key = m->string;
    if (strcmp(key, "properties") == 0 || cJSON_IsNull(m) || td_schema_get(ctx, a, key)) continue;
    if (!add_reference(ctx, to, key, m)) st = td_schema_exhausted(ctx);
  }
  if (st == TD_OK && td_schema_get(ctx, a, "type") && td_schema_get(ctx, b, "type"))
    st = merge_types(ctx, to, a, b);
  if (st != TD_OK || (!td_schema_get(ctx, a, "properties") && !td_schema_get(ctx, b, "properties")))
    return st;
  cJSON *merged = cJSON_AddObjectToObject(to, "properties");
  const bool ok = merged && add_properties(ctx, merged, a, b, false) &&
                  add_properties(ctx, merged, b, a, true);
  return ok ? TD_OK : td_schema_exhausted(ctx);
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
  cJSON *to = cJSON_CreateObject();
  st = own(ctx, to);
  if (st == TD_OK) st = merge_objects(ctx, to, a, b);
  *out = to;
  return st;
}

// A schema that means all of n, n > 0. Halves are merged first, so that n schemas of one property
// each take n log n steps. Depth: log n.
static td_status merge_all(td_schema_ctx *ctx, const cJSON *const *all, size_t n,
                           const cJSON **out) {
  const cJSON *first, *second;
  if (n == 1) return td_schema_expand(ctx, all[0], out);
  td_status st = merge_all(ctx, all, n / 2, &first);
  if (st == TD_OK) st = merge_all(ctx, all + n / 2, n - n / 2, &second);
  return st == TD_OK ? td_schema_both(ctx, first, second, out) : st;
}

// The same of base, which is expanded, and the items of a list.
static td_status merge_list(td_schema_ctx *ctx, const cJSON *base, const cJSON *list,
                            const cJSON **out) {
  const size_t n = (size_t)cJSON_GetArraySize(list);
  const cJSON **all = td_budget_step(ctx->budget, n) ? malloc((n + 1) * sizeof *all) : NULL;
  if (!all) return td_schema_exhausted(ctx);
  size_t i = 0;
  all[i++] = base;
  for (const cJSON *item = list->child; item; item = item->next)
    all[i++] = item;
  const td_status st = merge_all(ctx, all, i, out);
  free(all);
  return st;
}

td_status td_schema_expand(td_schema_ctx *ctx, const cJSON *schema, const cJSON **out) {
  const cJSON *ref = td_schema_get(ctx, schema, "$ref"), *all = td_schema_get(ctx, schema, "allOf");
  const cJSON *part;
  *out = schema;
  if (!ref && !all) return TD_OK;
  if (ref && !cJSON_IsString(ref)) return td_schema_bad(ctx, "$ref", "must be a string");
  if (all && (!cJSON_IsArray(all) || !all->child))
    return td_schema_bad(ctx, "allOf", "must be an array of schemas");
  if (ctx->expand_depth >= MAX_EXPAND)
    return td_schema_refuse(ctx, ref ? "$ref" : "allOf", "that contains itself");
  ctx->expand_depth++;
  cJSON *base;
  td_status st = td_schema_without(ctx, schema, "$ref", "allOf", &base);
  *out = base;
  if (st == TD_OK && ref) {
    st = td_schema_resolve(ctx, ref->valuestring, &part);
    if (st == TD_OK) st = td_schema_both(ctx, base, part, out);
  }
  if (st == TD_OK && all) st = merge_list(ctx, *out, all, out);
  ctx->expand_depth--;
  return st;
}

// ---- exclusion ---------------------------------------------------------------------------------

// Whether the values of enum and const, where both have some, are different ones.
static bool have_different_values(td_schema_ctx *ctx, const cJSON *a, const cJSON *b) {
  const cJSON *of_a = td_schema_get(ctx, a, "const"), *of_b = td_schema_get(ctx, b, "const");
  const cJSON *list_a = td_schema_get(ctx, a, "enum"), *list_b = td_schema_get(ctx, b, "enum");
  if (of_a && of_b) return !cJSON_Compare(of_a, of_b, true);
  if (of_a && list_b) return !has_value(ctx, list_b, of_a);
  if (list_a && of_b) return !has_value(ctx, list_a, of_b);
  if (!list_a || !list_b) return false;
  for (const cJSON *item = list_a->child; item; item = item->next)
    if (has_value(ctx, list_b, item)) return false;
  return true;
}

static bool is_required(td_schema_ctx *ctx, const cJSON *schema, const char *key) {
  const cJSON *required = td_schema_get(ctx, schema, "required");
  for (const cJSON *item = required ? required->child : NULL; item; item = item->next) {
    if (!td_budget_step(ctx->budget, 1)) return false;
    if (cJSON_IsString(item) && strcmp(item->valuestring, key) == 0) return true;
  }
  return false;
}

// Whether one names a required property that the other does not allow.
static bool lacks_required(td_schema_ctx *ctx, const cJSON *a, const cJSON *b) {
  const cJSON *properties = td_schema_get(ctx, b, "properties"),
              *required = td_schema_get(ctx, a, "required");
  if (!cJSON_IsFalse(td_schema_get(ctx, b, "additionalProperties"))) return false;
  for (const cJSON *item = required ? required->child : NULL; item; item = item->next) {
    if (!cJSON_IsString(item) || !td_budget_step(ctx->budget, 1)) continue;
    if (!td_schema_get(ctx, properties, item->valuestring)) return true;
  }
  return false;
}

bool td_schema_excludes(td_schema_ctx *ctx, const cJSON *a, const cJSON *b) {
  unsigned of_a, of_b;
  if (!td_budget_step(ctx->budget, 1)) return false;
  if (cJSON_IsFalse(a) || cJSON_IsFalse(b)) return true;
  if (td_schema_types(ctx, a, &of_a) != TD_OK || td_schema_types(ctx, b, &of_b) != TD_OK)
    return false;
  if (of_a & TD_SCHEMA_NUMBER) of_a |= TD_SCHEMA_INTEGER;
  if (of_b & TD_SCHEMA_NUMBER) of_b |= TD_SCHEMA_INTEGER;
  if (!(of_a & of_b) || have_different_values(ctx, a, b)) return true;
  if ((of_a & of_b) != TD_SCHEMA_OBJECT) return false;
  const cJSON *properties = td_schema_get(ctx, a, "properties"),
              *others = td_schema_get(ctx, b, "properties");
  for (const cJSON *p = properties ? properties->child : NULL; p; p = p->next) {
    const cJSON *other = td_schema_get(ctx, others, p->string), *x, *y;
    if (!other || !is_required(ctx, a, p->string) || !is_required(ctx, b, p->string)) continue;
    if (td_schema_expand(ctx, p, &x) != TD_OK || td_schema_expand(ctx, other, &y) != TD_OK)
      continue;
    if (have_different_values(ctx, x, y)) return true;
  }
  return lacks_required(ctx, a, b) || lacks_required(ctx, b, a);
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
  if (depth == MAX_EXPAND || !td_budget_step(ctx->budget, 1) ||
      td_schema_expand(ctx, schema, &schema) != TD_OK)
    return TD_SCHEMA_ANY;
  if (cJSON_IsFalse(schema)) return 0;
  if (td_schema_types(ctx, schema, &types) != TD_OK) return TD_SCHEMA_ANY;
  const cJSON *single = td_schema_member_of(ctx, schema, "const");
  const cJSON *list = td_schema_get(ctx, schema, "enum");
  if (single) types &= td_schema_types_of(single);
  if (cJSON_IsArray(list)) types &= types_of_values(list);
  for (size_t i = 0; i < TD_COUNT(unions); i++) {
    const cJSON *any = td_schema_get(ctx, schema, unions[i]);
    unsigned of_any = 0;
    for (const cJSON *item = cJSON_IsArray(any) ? any->child : NULL; item; item = item->next)
      of_any |= types_within(ctx, item, depth + 1);
    if (cJSON_IsArray(any)) types &= of_any;
  }
  return types;
}

td_schema_ctx *td_json_schema_open(const cJSON *root, td_budget *budget) {
  td_schema_ctx *ctx = calloc(1, sizeof *ctx);
  if (!ctx) {
    budget->status = TD_ENOMEM;
    return NULL;
  }
  *ctx = (td_schema_ctx){.root = root, .budget = budget, .err = &ctx->ignored};
  return ctx;
}

void td_json_schema_close(td_schema_ctx *ctx) {
  if (!ctx) return;
  td_schema_ctx_free(ctx);
  free(ctx);
}

unsigned td_json_schema_types(td_schema_ctx *ctx, const cJSON *schema) {
  return ctx ? types_within(ctx, schema, 0) : TD_SCHEMA_ANY;
}

const cJSON *td_json_schema_expanded(td_schema_ctx *ctx, const cJSON *schema) {
  return ctx && td_schema_expand(ctx, schema, &schema) == TD_OK ? schema : NULL;
}
