// src/text/grammar/schema_objects.c - objects and arrays of JSON Schema.
#include <stdlib.h>
#include <string.h>

#include "base/json_parse.h"
#include "base/utf8.h"
#include "text/grammar/regex.h"
#include "text/grammar/schema_impl.h"

#define MAX_PREFIX    64  // schemas of prefixItems
#define MAX_UNIQUE    8   // values of items of which each comes once
#define MAX_KEY_CHARS 256 // of a key that begins as a named one

static const td_json_spacing *spacing_of(const td_schema_ctx *ctx) {
  return &ctx->json->spacing[ctx->items[ctx->at].indent];
}

static bool is_indented(const td_schema_ctx *ctx) {
  return ctx->items[ctx->at].indent > 0;
}

// ---- arrays ------------------------------------------------------------------------------------

typedef struct {
  const cJSON *prefix; // prefixItems; NULL: none
  uint32_t n_prefix;
  const cJSON *rest; // NULL: anything
  uint32_t min, max;
} array_shape;

static td_status read_array(td_schema_ctx *ctx, const cJSON *schema, array_shape *a) {
  const cJSON *prefix = td_schema_get(ctx, schema, "prefixItems");
  const cJSON *items = td_schema_get(ctx, schema, "items");
  *a = (array_shape){.rest = items, .max = UINT32_MAX};
  if (cJSON_IsArray(items)) { // before draft 2020-12
    prefix = items;
    a->rest = td_schema_get(ctx, schema, "additionalItems");
  }
  if (prefix && !cJSON_IsArray(prefix))
    return td_schema_bad(ctx, "prefixItems", "must be an array");
  a->prefix = prefix;
  a->n_prefix = prefix ? (uint32_t)cJSON_GetArraySize(prefix) : 0;
  if (a->n_prefix > MAX_PREFIX)
    return td_schema_refuse(ctx, "prefixItems", "with more than 64 schemas");
  td_status st = td_schema_count(ctx, schema, "minItems", &a->min);
  if (st == TD_OK) st = td_schema_count(ctx, schema, "maxItems", &a->max);
  if (cJSON_IsFalse(a->rest) && a->max > a->n_prefix) a->max = a->n_prefix;
  return st;
}

// Items behind those of the prefix, with their commas; nothing is before the first if there is no
// prefix.
static td_node rest_of(td_schema_ctx *ctx, const array_shape *a) {
  const td_json_spacing *s = spacing_of(ctx);
  const uint32_t n = a->n_prefix, min = a->min > n ? a->min - n : 0;
  const uint32_t max = a->max == UINT32_MAX ? UINT32_MAX : a->max - n;
  const td_node item = td_schema_refer_item(
      ctx, a->rest, (td_schema_place){.key = "items", .index = TD_SCHEMA_NO_INDEX});
  const td_node next = TD_G_SEQ(ctx->b, s->comma, item);
  if (n) return td_g_repeat(ctx->b, next, min, max);
  const td_node others = td_g_repeat(ctx->b, next, min ? min - 1 : 0,
                                     max == UINT32_MAX ? max : max - 1);
  const td_node all = TD_G_SEQ(ctx->b, s->first, item, others);
  return min ? all : td_g_maybe(ctx->b, all);
}

// The values that items may have, of which each comes once: a rule for each set of values that have
// come. False: they are not a short list.
static bool unique_items(td_schema_ctx *ctx, const array_shape *a, td_node *out) {
  static const cJSON no = {.type = cJSON_False}, yes = {.type = cJSON_True};
  const td_json_spacing *s = spacing_of(ctx);
  td_grammar_build *b = ctx->b;
  const cJSON *list = td_schema_get(ctx, a->rest, "enum"), *type;
  td_node values[MAX_UNIQUE];
  uint32_t n = 0;
  type = td_schema_get(ctx, a->rest, "type");
  if (a->n_prefix || !td_schema_asserts_only(a->rest, list ? "enum" : "type", "type")) return false;
  if (!list && cJSON_IsString(type) && strcmp(type->valuestring, "boolean") == 0) {
    values[n++] = td_schema_value(b, &no);
    values[n++] = td_schema_value(b, &yes);
  }
  for (const cJSON *v = list ? list->child : NULL; v; v = v->next) {
    for (const cJSON *w = list->child; w != v; w = w->next)
      if (cJSON_Compare(v, w, true)) return false;
    if (n == MAX_UNIQUE || (type && !cJSON_IsString(v))) return false;
    values[n++] = td_schema_value(b, v);
  }
  if (type && list && (!cJSON_IsString(type) || strcmp(type->valuestring, "string") != 0))
    return false;
  if (!n) return false;
  td_rule rules[1u << MAX_UNIQUE];
  for (uint32_t set = 0; set < 1u << n; set++)
    rules[set] = td_g_rule(b);
  for (uint32_t set = 0; set < 1u << n; set++) {
    const uint32_t n_come = (uint32_t)__builtin_popcount(set);
    const size_t any = td_g_begin(b);
    if (n_come >= a->min) td_g_add(b, TD_NODE_EMPTY);
    for (uint32_t i = 0; i < n && n_come < a->max; i++)
      if (!(set >> i & 1))
        td_g_add(b, TD_G_SEQ(b, set ? s->comma : s->first, values[i],
                             td_g_call(b, rules[set | 1u << i])));
    td_g_define(b, rules[set], td_g_end_any(b, any));
  }
  *out = td_g_call(b, rules[0]);
  return true;
}

td_status td_schema_array(td_schema_ctx *ctx, const cJSON *schema, td_node *out) {
  const td_json_spacing *s = spacing_of(ctx);
  array_shape a;
  td_node prefix[MAX_PREFIX];
  td_status st = read_array(ctx, schema, &a);
  if (st != TD_OK) return st;
  if (cJSON_IsTrue(td_schema_get(ctx, schema, "uniqueItems")) && a.max > 1) {
    td_node items;
    if (is_indented(ctx) && a.min == 0) a.min = 1;
    if (cJSON_IsObject(a.rest) && unique_items(ctx, &a, &items)) {
      *out = TD_G_SEQ(ctx->b, td_g_str(ctx->b, "["), items, s->last, td_g_str(ctx->b, "]"));
      return TD_OK;
    }
    st = td_schema_leave_out(ctx, "uniqueItems", "of other items than up to 8 values of an enum,");
    if (st != TD_OK) return st;
  }
  if (is_indented(ctx) && a.min == 0) a.min = 1; // an array without items has no lines
  if (a.min > a.max) return TD_OK;
  const cJSON *item = a.prefix ? a.prefix->child : NULL;
  const uint32_t n = a.n_prefix < a.max ? a.n_prefix : a.max;
  for (uint32_t i = 0; i < n; i++, item = item->next)
    prefix[i] = td_schema_refer_item(ctx, item, (td_schema_place){"prefixItems", NULL, i});
  td_node tail = a.n_prefix < a.max ? rest_of(ctx, &a) : TD_NODE_EMPTY;
  for (uint32_t i = n; i-- > 0;) {
    tail = TD_G_SEQ(ctx->b, i ? s->comma : s->first, prefix[i], tail);
    if (i >= a.min) tail = td_g_maybe(ctx->b, tail);
  }
  *out = TD_G_SEQ(ctx->b, td_g_str(ctx->b, "["), tail, s->last, td_g_str(ctx->b, "]"));
  return TD_OK;
}

// ---- objects -----------------------------------------------------------------------------------

typedef struct {
  const char *name;
  const cJSON *schema; // NULL: anything
  bool is_required;
} member;

typedef struct {
  member *members; // [n], owned
  uint32_t n, n_required;
  bool has_more;                    // members not named are generated
  bool is_closed;                   // the schema rules them out
  const cJSON *more;                // their schema; NULL: anything
  const char *more_key, *more_name; // where it stands
  td_node key;                      // their names, if has_key
  bool has_key;
  uint32_t min, max;
} object_shape;

static const cJSON nothing = {.type = cJSON_False};

static int by_name(const void *a, const void *b) {
  return strcmp(((const member *)a)->name, ((const member *)b)->name);
}

// Members that are required and not among the properties come behind them, each once.
static td_status add_required(td_schema_ctx *ctx, const cJSON *properties, const cJSON *required,
                              object_shape *o) {
  const uint32_t n_properties = o->n;
  for (const cJSON *item = required ? required->child : NULL; item; item = item->next) {
    if (!cJSON_IsString(item)) return td_schema_bad(ctx, "required", "must hold strings");
    if (td_schema_member_of(ctx, properties, item->valuestring)) continue;
    o->members[o->n++] = (member){item->valuestring, o->is_closed ? &nothing : o->more, true};
  }
  uint32_t n = n_properties;
  qsort(o->members + n, o->n - n, sizeof *o->members, by_name);
  for (uint32_t i = n; i < o->n; i++)
    if (n == n_properties || by_name(&o->members[n - 1], &o->members[i]) != 0)
      o->members[n++] = o->members[i];
  o->n = n;
  o->n_required += n - n_properties;
  return TD_OK;
}

static td_status mark_required(td_schema_ctx *ctx, const cJSON *required, object_shape *o) {
  td_json_names names;
  if (!td_json_names_open(&names, required, NULL)) return td_schema_exhausted(ctx);
  for (uint32_t i = 0; i < o->n; i++) {
    member *m = &o->members[i];
    m->is_required = td_json_names_has(&names, m->name);
    o->n_required += m->is_required;
  }
  td_json_names_close(&names);
  return TD_OK;
}

// The names of an enum that no member has. Members that it has not do not come.
static td_node names_left(td_schema_ctx *ctx, const cJSON *schema, const cJSON *list,
                          object_shape *o) {
  const cJSON *properties = td_schema_get(ctx, schema, "properties");
  td_json_names all, required;
  const bool has_all = td_json_names_open(&all, list, NULL);
  const bool has_required = td_json_names_open(&required, td_schema_get(ctx, schema, "required"),
                                               NULL);
  if (!has_all || !has_required) ctx->budget->status = TD_ENOMEM;
  for (uint32_t i = 0; i < o->n && has_all; i++)
    if (!td_json_names_has(&all, o->members[i].name)) o->members[i].schema = &nothing;
  const size_t any = td_g_begin(ctx->b);
  for (const cJSON *v = list->child; v && ctx->budget->status == TD_OK; v = v->next) {
    if (!cJSON_IsString(v) || td_json_names_has(&required, v->valuestring)) continue;
    if (!td_schema_member_of(ctx, properties, v->valuestring))
      td_g_add(ctx->b, td_schema_value(ctx->b, v));
  }
  td_json_names_close(&all);
  td_json_names_close(&required);
  return td_g_end_any(ctx->b, any);
}

// propertyNames, and patternProperties of one pattern: languages of the names of members that are
// not named, where none is named or the names are listed; each beside the other's absence.
static td_status read_names(td_schema_ctx *ctx, const cJSON *schema, object_shape *o) {
  const cJSON *names = td_schema_get(ctx, schema, "propertyNames");
  const cJSON *patterns = td_schema_get(ctx, schema, "patternProperties");
  const bool has_names = cJSON_IsObject(names) && names->child;
  const bool has_patterns = cJSON_IsObject(patterns) && patterns->child;
  const cJSON *pattern = has_patterns ? patterns->child : NULL;
  const char *keyword = has_names ? "propertyNames" : "patternProperties";
  td_err why;
  td_status st = TD_OK;
  if (cJSON_IsFalse(names)) {
    o->has_more = false;
    return TD_OK;
  }
  if (!has_names && !has_patterns) return TD_OK;
  const bool is_one = has_names != has_patterns && !(pattern && pattern->next);
  const cJSON *list = has_names ? td_schema_get(ctx, names, "enum") : NULL;
  if ((o->n && !list) || !is_one) return td_schema_leave_out(ctx, keyword, "beside others");
  if (has_names) {
    if (list && !td_schema_asserts_only(names, "enum", "type"))
      return td_schema_leave_out(ctx, keyword, "with more than an enum");
    if (!list && !td_schema_is_plain_string(names))
      return td_schema_leave_out(ctx, keyword, "with other than pattern, format and lengths");
    if (!list) st = td_schema_string(ctx, names, &o->key);
    if (list) o->key = names_left(ctx, schema, list, o);
    o->has_key = st == TD_OK;
    o->has_more = st == TD_OK && !o->is_closed && o->key != TD_NODE_NEVER;
    return st;
  }
  td_node text;
  if (td_g_regex(&text, ctx->b, pattern->string, strlen(pattern->string), TD_REGEX_IN_JSON, &why) !=
      TD_OK)
    return td_schema_leave_out(ctx, keyword, why.msg);
  o->key = td_g_gbnf(ctx->b, "\"\\\"\" $0 \"\\\"\"", &text);
  o->has_key = o->has_more = true; // others stay away, whether they may come or not
  o->more = pattern;
  o->more_key = keyword;
  o->more_name = pattern->string;
  return TD_OK;
}

static td_status read_object(td_schema_ctx *ctx, const cJSON *schema, object_shape *o) {
  const cJSON *properties = td_schema_get(ctx, schema, "properties");
  const cJSON *required = td_schema_get(ctx, schema, "required");
  const cJSON *more = td_schema_get(ctx, schema, "additionalProperties");
  *o = (object_shape){.max = UINT32_MAX};
  if (properties && !cJSON_IsObject(properties))
    return td_schema_bad(ctx, "properties", "must be an object");
  if (required && !cJSON_IsArray(required))
    return td_schema_bad(ctx, "required", "must be an array");
  o->is_closed = cJSON_IsFalse(more);
  o->more = cJSON_IsObject(more) ? more : NULL;
  if (more && !cJSON_IsObject(more) && !cJSON_IsBool(more))
    return td_schema_bad(ctx, "additionalProperties", "must be a schema");
  const size_t n = (size_t)cJSON_GetArraySize(properties) + (size_t)cJSON_GetArraySize(required);
  const bool is_there = td_budget_step(ctx->budget, 4 * n) &&
                        td_budget_take(ctx->budget, (n + 1) * sizeof *o->members);
  o->members = is_there ? malloc((n + 1) * sizeof *o->members) : NULL;
  if (!o->members) return td_schema_exhausted(ctx);
  for (const cJSON *p = properties ? properties->child : NULL; p; p = p->next) {
    const bool is_first = td_schema_member_of(ctx, properties, p->string) == p;
    if (is_first) o->members[o->n++] = (member){.name = p->string, .schema = p};
  }
  td_status st = mark_required(ctx, required, o);
  if (st == TD_OK) st = add_required(ctx, properties, required, o);
  if (st == TD_OK) st = td_schema_count(ctx, schema, "minProperties", &o->min);
  if (st == TD_OK) st = td_schema_count(ctx, schema, "maxProperties", &o->max);
  // Models make up members where they may.
  const bool is_enough = properties && o->min <= o->n;
  o->has_more = more ? !o->is_closed : ctx->opts->is_free || !is_enough;
  o->more_key = "additionalProperties";
  if (st == TD_OK) st = read_names(ctx, schema, o);
  return ctx->budget->status == TD_OK ? st : td_schema_exhausted(ctx);
}

// minProperties and maxProperties can be counted only among members that are not named.
static td_status check_counts(const td_schema_ctx *ctx, object_shape *o) {
  if (o->n == 0) return TD_OK;
  if (o->min <= o->n_required) o->min = 0;
  if (!o->has_more && o->max >= o->n) o->max = UINT32_MAX;
  td_status st = TD_OK;
  if (o->min > 1) st = td_schema_leave_out(ctx, "minProperties", "beside properties");
  if (st == TD_OK && o->max != UINT32_MAX)
    st = td_schema_leave_out(ctx, "maxProperties", "beside properties");
  if (o->min > 1) o->min = 0;
  o->max = UINT32_MAX;
  return st;
}

// ---- keys that no member has -------------------------------------------------------------------

// The names [from, to) begin with the same `at` bytes; rule generates what may follow these.
typedef struct {
  uint32_t from, to, at, n_chars;
  td_rule rule;
} key_part;

// Adds the parts in which the names continue, and the characters with which they do to ranges.
// Returns the number of parts.
static uint32_t split_names(td_schema_ctx *ctx, const member *sorted, key_part whole,
                            key_part *parts, td_char_range *ranges) {
  uint32_t n = 0;
  for (uint32_t i = whole.from, end; i < whole.to; i = end) {
    const char *rest = sorted[i].name + whole.at;
    uint32_t c;
    const int len = *rest ? td_utf8_decode(rest, strlen(rest), &c) : 0;
    end = i + 1;
    while (end < whole.to && len > 0 && td_budget_step(ctx->budget, 1) &&
           strncmp(sorted[end].name + whole.at, rest, (size_t)len) == 0)
      end++;
    if (len <= 0 || c < 0x20 || c == '"' || c == '\\') continue;
    ranges[n] = (td_char_range){c, c};
    parts[n++] = (key_part){.from = i,
                            .to = end,
                            .at = whole.at + (uint32_t)len,
                            .n_chars = whole.n_chars + 1,
                            .rule = td_g_rule(ctx->b)};
  }
  return n;
}

// A key that none of the members has, with its quotes. Names are followed character by character; a
// key that goes along with one for MAX_KEY_CHARS is not generated.
static td_node other_key(td_schema_ctx *ctx, const object_shape *o) {
  td_grammar_build *b = ctx->b;
  const td_char_range quoted[] = {{0, 0x1F}, {'"', '"'}, {'\\', '\\'}};
  const td_node quote = td_g_str(b, "\"");
  const td_node tail = td_g_new_rule(b, TD_G_SEQ(b, td_g_star(b, ctx->json->plain), quote));
  member *sorted = malloc((o->n + (size_t)1) * sizeof *sorted);
  // The parts that wait have no names in common.
  key_part *parts = malloc((o->n + (size_t)1) * sizeof *parts);
  td_char_range *ranges = malloc((o->n + TD_COUNT(quoted)) * sizeof *ranges);
  const td_rule rule = td_g_rule(b);
  uint32_t n_parts = 1;
  if (!sorted || !parts || !ranges) {
    ctx->budget->status = TD_ENOMEM;
    n_parts = 0;
  } else {
    memcpy(sorted, o->members, o->n * sizeof *sorted);
    qsort(sorted, o->n, sizeof *sorted, by_name);
    memcpy(ranges, quoted, sizeof quoted);
    parts[0] = (key_part){.to = o->n, .rule = rule};
  }
  while (n_parts && td_budget_step(ctx->budget, 1) && td_grammar_build_status(b, NULL) == TD_OK) {
    const key_part part = parts[--n_parts];
    const bool is_name = !sorted[part.from].name[part.at];
    key_part *more = parts + n_parts;
    const uint32_t n = split_names(ctx, sorted, part, more, ranges + TD_COUNT(quoted));
    const size_t list = td_g_begin(b);
    td_g_add(b, TD_G_SEQ(b, td_g_chars_but(b, ranges, n + TD_COUNT(quoted)), tail));
    if (!is_name) td_g_add(b, quote);
    const bool may_go_on = part.n_chars < MAX_KEY_CHARS;
    for (uint32_t i = 0; i < n && may_go_on; i++)
      td_g_add(b, TD_G_SEQ(b,
                           td_g_range(b, ranges[TD_COUNT(quoted) + i].low,
                                      ranges[TD_COUNT(quoted) + i].low),
                           td_g_call(b, more[i].rule)));
    td_g_define(b, part.rule, td_g_end_any(b, list));
    if (may_go_on) n_parts += n;
  }
  free(sorted);
  free(parts);
  free(ranges);
  return TD_G_SEQ(b, quote, td_g_call(b, rule));
}

// ---- members -----------------------------------------------------------------------------------

// A member that is not named: key, colon, value.
static td_node other_member(td_schema_ctx *ctx, const object_shape *o) {
  const td_node value = td_schema_refer_item(
      ctx, o->more,
      (td_schema_place){.key = o->more_key, .name = o->more_name, .index = TD_SCHEMA_NO_INDEX});
  const td_node key = o->has_key ? o->key : o->n ? other_key(ctx, o) : ctx->json->string;
  return td_g_new_rule(ctx->b, TD_G_SEQ(ctx->b, key, spacing_of(ctx)->colon, value));
}

static td_node named_member(td_schema_ctx *ctx, const member *m) {
  const cJSON key = {.type = cJSON_String, .valuestring = (char *)m->name};
  const td_node value = td_schema_refer_item(
      ctx, m->schema,
      (td_schema_place){.key = "properties", .name = m->name, .index = TD_SCHEMA_NO_INDEX});
  return td_g_new_rule(
      ctx->b, TD_G_SEQ(ctx->b, td_schema_value(ctx->b, &key), spacing_of(ctx)->colon, value));
}

// Members in order, from the last to the first: `only` is what may come from a member on when none
// came before, `then` when one did.
static td_node members_of(td_schema_ctx *ctx, const object_shape *o, td_node more) {
  td_grammar_build *b = ctx->b;
  const td_node comma = spacing_of(ctx)->comma;
  td_node then = td_g_star(b, TD_G_SEQ(b, comma, more)); // nothing, where there are no more
  td_node only = TD_G_SEQ(b, more, then);
  if (!o->min) only = td_g_maybe(b, only);
  for (uint32_t i = o->n; i-- > 0 && td_grammar_build_status(b, NULL) == TD_OK;) {
    const td_node one = named_member(ctx, &o->members[i]);
    const bool may_miss = !o->members[i].is_required;
    only = td_g_new_rule(b, TD_G_ANY(b, TD_G_SEQ(b, one, then), may_miss ? only : TD_NODE_NEVER));
    then = td_g_new_rule(
        b, TD_G_ANY(b, TD_G_SEQ(b, comma, one, then), may_miss ? then : TD_NODE_NEVER));
  }
  return only;
}

// Members that are not named, as many as minProperties and maxProperties say.
static td_node counted(td_schema_ctx *ctx, const object_shape *o, td_node more) {
  td_grammar_build *b = ctx->b;
  if (!o->has_more || o->max == 0) return o->min ? TD_NODE_NEVER : TD_NODE_EMPTY;
  if (o->max < o->min) return TD_NODE_NEVER;
  const td_node next = TD_G_SEQ(b, spacing_of(ctx)->comma, more);
  const td_node all = TD_G_SEQ(
      b, more,
      td_g_repeat(b, next, o->min ? o->min - 1 : 0, o->max == UINT32_MAX ? o->max : o->max - 1));
  return o->min ? all : td_g_maybe(b, all);
}

static td_status translate_object(td_schema_ctx *ctx, object_shape *o, td_node *out) {
  const td_json_spacing *s = spacing_of(ctx);
  td_status st = check_counts(ctx, o);
  if (st != TD_OK) return st;
  if (is_indented(ctx) && o->n_required == 0 && o->min == 0) o->min = 1; // {} has no lines
  const td_node more = o->has_more ? other_member(ctx, o) : TD_NODE_NEVER;
  const td_node members = o->n ? members_of(ctx, o, more) : counted(ctx, o, more);
  *out = TD_G_SEQ(ctx->b, td_g_str(ctx->b, "{"), s->first, members, s->last, td_g_str(ctx->b, "}"));
  return TD_OK;
}

td_status td_schema_object(td_schema_ctx *ctx, const cJSON *schema, td_node *out) {
  object_shape o;
  td_status st = read_object(ctx, schema, &o);
  if (st == TD_OK) st = translate_object(ctx, &o, out);
  free(o.members);
  return st;
}
