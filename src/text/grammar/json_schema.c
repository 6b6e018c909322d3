// src/text/grammar/json_schema.c - JSON Schema to GBNF: one rule a schema, found again when a $ref
// leads back to it.
#include "text/grammar/json_schema.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/grow.h"
#include "base/json_parse.h"
#include "base/utf8.h"
#include "text/grammar/grammar.h"
#include "text/grammar/schema_impl.h"

#define MAX_RULES        8192
#define MAX_DEPTH        200
#define MAX_ALTERNATIVES 512
#define MAX_VALUES       4096 // of an enum; an automaton follows four times as many at once

// ---- white space -------------------------------------------------------------------------------

// What stands before the first item of an object or array, between two, behind the last, and
// behind a key.
typedef struct {
  char first[64], comma[64], last[64];
  const char *colon;
} spacing;

// lines: indentation of the items in steps of two blanks; 0: none stands on a line of its own.
static spacing spacing_of(bool is_free, uint32_t lines) {
  spacing s = {.comma = " \", \" ", .colon = " \": \" "};
  if (is_free) {
    return (spacing){.first = " json-ws ",
                     .comma = " json-ws \",\" json-ws ",
                     .last = " json-ws ",
                     .colon = " json-ws \":\" json-ws "};
  }
  if (!lines) return s;
  const int n = 2 * (int)lines;
  snprintf(s.first, sizeof s.first, " \"\\n%*s\" ", n, "");
  snprintf(s.comma, sizeof s.comma, " \",\\n%*s\" ", n, "");
  snprintf(s.last, sizeof s.last, " \"\\n%*s\" ", n - 2, "");
  return s;
}

// The rules json-object, json-array and json-value, or those of lines, with .pN behind their names.
static void write_nested(td_buf *out, bool is_free, uint32_t lines) {
  const spacing s = spacing_of(is_free, lines);
  char own[8] = "", value[40] = "json-value";
  if (lines) snprintf(own, sizeof own, ".p%u", lines);
  if (lines && lines < TD_SCHEMA_MAX_LINES) {
    snprintf(value, sizeof value, "(json-value | json-value.p%u)", lines + 1);
  }
  const char *may = lines ? "" : "?", *none = lines ? "" : s.first;
  td_buf_printf(out, "json-member%s ::= json-string%s%s\n", own, s.colon, value);
  td_buf_printf(out, "json-object%s ::= \"{\" (%sjson-member%s (%sjson-member%s)*%s)%s %s \"}\"\n",
                own, s.first, own, s.comma, own, s.last, may, is_free ? none : "");
  td_buf_printf(out, "json-array%s ::= \"[\" (%s%s (%s%s)*%s)%s %s \"]\"\n", own, s.first, value,
                s.comma, value, s.last, may, is_free ? none : "");
  td_buf_printf(out, "json-value%s ::= json-object%s | json-array%s%s\n", own, own, own,
                lines ? "" : " | json-string | json-number | \"true\" | \"false\" | \"null\"");
}

void td_json_schema_write_common(td_buf *out, bool is_free) {
  td_buf_str(out,
             "json-ws ::= (\" \" | \"\\n\" [ \\t]{0,32})?\n"
             "json-hex ::= [0-9a-fA-F]\n"
             "json-plain ::= [^\"\\\\\\x00-\\x1F]\n"
             "json-char ::= json-plain | \"\\\\\" ([\"\\\\/bfnrt] | "
             "\"u\" ([0-9a-cA-CefEF] json-hex json-hex json-hex | [dD] [0-7] json-hex json-hex | "
             "[dD] [89abAB] json-hex json-hex \"\\\\u\" [dD] [c-fC-F] json-hex json-hex))\n"
             "json-string ::= \"\\\"\" json-char* \"\\\"\"\n"
             "json-integer ::= \"-\"? (\"0\" | [1-9] [0-9]{0,15})\n"
             "json-number ::= json-integer (\".\" [0-9]{1,16})? ([eE] [+-]? [0-9]{1,2})?\n");
  for (uint32_t i = 0; i <= (is_free ? 0 : TD_SCHEMA_MAX_LINES); i++)
    write_nested(out, is_free, i);
  td_buf_printf(out, "json-any ::= json-object%s\n", is_free ? "" : " | json-object.p1");
}

// ---- messages ----------------------------------------------------------------------------------

td_status td_schema_refuse(const td_schema_ctx *ctx, const char *keyword, const char *why) {
  return td_fail(ctx->err, TD_EUNSUPPORTED, "%s: %s%s%.200s is not supported", ctx->path, keyword,
                 why ? ": " : "", why ? why : "");
}

td_status td_schema_bad(const td_schema_ctx *ctx, const char *keyword, const char *what) {
  return td_fail(ctx->err, TD_EINVAL, "%s: %s %s", ctx->path, keyword, what);
}

// ---- types -------------------------------------------------------------------------------------

static unsigned type_named(const char *name) {
  static const char *const names[] = {"null",   "boolean", "integer", "number",
                                      "string", "array",   "object"};
  for (unsigned i = 0; i < TD_COUNT(names); i++) {
    if (strcmp(name, names[i]) == 0) return 1u << i;
  }
  return 0;
}

td_status td_schema_types(const td_schema_ctx *ctx, const cJSON *schema, unsigned *types) {
  const cJSON *type = td_json_get(schema, "type");
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
  bool is_whole = value->valuedouble == (double)(int64_t)value->valuedouble;
  return TD_SCHEMA_NUMBER | (is_whole ? TD_SCHEMA_INTEGER : 0);
}

td_status td_schema_count(const td_schema_ctx *ctx, const cJSON *schema, const char *key,
                          uint32_t *out) {
  const cJSON *item = td_json_get(schema, key);
  if (!item) return TD_OK;
  double value = cJSON_IsNumber(item) ? item->valuedouble : -1;
  if (!(value >= 0 && value < UINT32_MAX && value == (uint32_t)value)) {
    return td_schema_bad(ctx, key, "must be a whole number");
  }
  *out = (uint32_t)value;
  return TD_OK;
}

// ---- what a grammar cannot express -------------------------------------------------------------

static td_status check_keywords(const td_schema_ctx *ctx, const cJSON *schema, unsigned types) {
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
      {"propertyNames", TD_SCHEMA_OBJECT},
      {"patternProperties", TD_SCHEMA_OBJECT},
      {"unevaluatedProperties", TD_SCHEMA_OBJECT},
      {"contains", TD_SCHEMA_ARRAY},
      {"uniqueItems", TD_SCHEMA_ARRAY},
      {"unevaluatedItems", TD_SCHEMA_ARRAY},
  };
  for (size_t i = 0; i < TD_COUNT(refused); i++) {
    const cJSON *item = td_json_get(schema, refused[i].name);
    bool is_neutral = !item ||
                      (cJSON_IsFalse(item) && strcmp(refused[i].name, "uniqueItems") == 0) ||
                      (strncmp(refused[i].name, "unevaluated", 11) == 0 && cJSON_IsTrue(item)) ||
                      (cJSON_IsObject(item) && !item->child &&
                       refused[i].types == TD_SCHEMA_OBJECT);
    if (!is_neutral && (types & refused[i].types))
      return td_schema_refuse(ctx, refused[i].name, NULL);
  }
  return TD_OK;
}

// ---- rules -------------------------------------------------------------------------------------

static td_status generate(td_schema_ctx *ctx, const cJSON *schema, td_buf *out);

static td_schema_rule *find_rule(const td_schema_ctx *ctx, const cJSON *schema, uint32_t depth) {
  for (uint32_t i = 0; i < ctx->n_known; i++) {
    if (ctx->rules[i].schema == schema && ctx->rules[i].depth == depth) return &ctx->rules[i];
  }
  return NULL;
}

static void write_name(const td_schema_ctx *ctx, const td_schema_rule *rule, td_buf *out) {
  td_buf_printf(out, "%s%u", ctx->opts->prefix, rule->rule);
  if (rule->depth) td_buf_printf(out, ".p%u", rule->depth);
}

// The rule of a schema in the lines of ctx, made if there is none yet. *rule is a copy: while it is
// being made, it counts as one that has text.
static td_status rule_of(td_schema_ctx *ctx, const cJSON *schema, td_schema_rule *rule) {
  const td_schema_rule *known = find_rule(ctx, schema, ctx->lines);
  if (known) {
    *rule = *known;
    return TD_OK;
  }
  if (ctx->n_rules == MAX_RULES || ctx->depth >= MAX_DEPTH ||
      ctx->out->len > TD_GRAMMAR_MAX_BYTES) {
    return td_fail(ctx->err, TD_ELIMIT, "the schema is too large, or nested too deep");
  }
  if (!TD_GROW(ctx->rules, ctx->n_known, ctx->cap_known, 64)) return td_schema_no_memory(ctx);
  *rule = (td_schema_rule){schema, ++ctx->n_rules, ctx->lines, true};
  const uint32_t at = ctx->n_known++;
  ctx->rules[at] = *rule;
  td_buf body = TD_BUF_INIT;
  const bool had_text = ctx->has_text;
  ctx->has_text = !ctx->lines;
  ctx->depth++;
  td_status st = generate(ctx, schema, &body);
  ctx->depth--;
  rule->has_text = ctx->rules[at].has_text = ctx->has_text;
  ctx->has_text = had_text;
  write_name(ctx, rule, ctx->out);
  td_buf_str(ctx->out, " ::= ");
  td_buf_add(ctx->out, td_buf_text(&body), body.len);
  td_buf_char(ctx->out, '\n');
  ctx->out->failed |= body.failed;
  td_buf_free(&body);
  return st;
}

// Appends the schema's rule in the lines of ctx; nothing where it has no text there. key says where
// it stands.
static td_status refer_to(td_schema_ctx *ctx, const cJSON *schema, const char *key,
                          const char *between, td_buf *out) {
  td_schema_rule rule;
  size_t len = strlen(ctx->path);
  if (key[0]) snprintf(ctx->path + len, TD_SCHEMA_PATH_BYTES - len, ".%.52s", key);
  td_status st = rule_of(ctx, schema, &rule);
  if (st != TD_OK) return st;
  ctx->path[len] = '\0';
  ctx->has_text |= rule.has_text;
  if (!rule.has_text) return TD_OK;
  td_buf_str(out, between);
  write_name(ctx, &rule, out);
  return TD_OK;
}

// The schema itself stands for the one being written.
static td_status refer(td_schema_ctx *ctx, const cJSON *schema, const char *key, td_buf *out) {
  if (!ctx->lines) return refer_to(ctx, schema, key, "", out);
  td_buf_str(out, "([]");
  td_status st = refer_to(ctx, schema, key, " | ", out);
  td_buf_char(out, ')');
  return st;
}

// Whether some value of the schema may have items.
static bool may_nest(const cJSON *schema) {
  const cJSON *type = td_json_get(schema, "type");
  if (td_json_get(schema, "enum") || cJSON_GetObjectItemCaseSensitive(schema, "const"))
    return false;
  return !cJSON_IsString(type) || strcmp(type->valuestring, "array") == 0 ||
         strcmp(type->valuestring, "object") == 0;
}

// Appends an item of the value being written (NULL: anything): on one line, or one deeper in lines.
static td_status refer_item(td_schema_ctx *ctx, const cJSON *schema, const char *key, td_buf *out) {
  const uint32_t lines = ctx->lines;
  const bool had_text = ctx->has_text, has_more = lines && lines < ctx->most;
  td_status st = TD_OK;
  td_buf_char(out, '(');
  if (schema) {
    ctx->lines = 0;
    st = refer_to(ctx, schema, key, "", out);
    ctx->lines = lines + 1;
    if (st == TD_OK && has_more && may_nest(schema)) st = refer_to(ctx, schema, key, " | ", out);
    ctx->lines = lines;
  } else {
    td_buf_str(out, "json-value");
    if (has_more) td_buf_printf(out, " | json-value.p%u", lines + 1);
  }
  td_buf_char(out, ')');
  ctx->has_text = had_text;
  return st;
}

// ---- arrays ------------------------------------------------------------------------------------

typedef struct {
  const cJSON *prefix; // the first schema of prefixItems
  uint32_t n_prefix;
  const cJSON *rest; // NULL: anything
  uint32_t min, max;
} array_shape;

static td_status read_array(td_schema_ctx *ctx, const cJSON *schema, array_shape *a) {
  const cJSON *prefix = td_json_get(schema, "prefixItems"), *items = td_json_get(schema, "items");
  *a = (array_shape){.rest = items, .max = UINT32_MAX};
  if (cJSON_IsArray(items)) { // before draft 2020-12
    prefix = items;
    a->rest = td_json_get(schema, "additionalItems");
  }
  if (prefix && !cJSON_IsArray(prefix)) {
    return td_schema_bad(ctx, "prefixItems", "must be an array");
  }
  if (prefix) {
    a->prefix = prefix->child;
    a->n_prefix = (uint32_t)cJSON_GetArraySize(prefix);
  }
  td_status st = td_schema_count(ctx, schema, "minItems", &a->min);
  if (st == TD_OK) st = td_schema_count(ctx, schema, "maxItems", &a->max);
  if (cJSON_IsFalse(a->rest) && a->max > a->n_prefix) a->max = a->n_prefix;
  return st;
}

// Items after the i-th, with their commas. depth: of parentheses opened for them.
static td_status write_tail(td_schema_ctx *ctx, const array_shape *a, const spacing *s,
                            td_buf *out) {
  td_status st = TD_OK;
  const cJSON *item = a->prefix;
  uint32_t i = 0, n_open = 0;
  for (; item && st == TD_OK && i < a->max; item = item->next, i++) {
    td_buf_printf(out, "(%s", i ? s->comma : s->first);
    char at[32];
    snprintf(at, sizeof at, "prefixItems[%u]", i);
    st = refer_item(ctx, item, at, out);
    n_open++;
  }
  if (st == TD_OK && i == a->n_prefix && i < a->max) {
    uint32_t min = a->min > i ? a->min - i : 0, max = a->max - i;
    td_buf rest = TD_BUF_INIT;
    st = refer_item(ctx, a->rest, "items", &rest);
    const char *name = td_buf_text(&rest);
    if (i) {
      td_buf_printf(out, "(%s%s)", s->comma, name);
    } else {
      td_buf_printf(out, "(%s%s (%s%s)", s->first, name, s->comma, name);
    }
    uint32_t less = i ? 0 : 1;
    uint32_t least = min > less ? min - less : 0;
    if (a->max == UINT32_MAX) {
      td_buf_printf(out, "{%u,}", least);
    } else {
      td_buf_printf(out, "{%u,%u}", least, max - less);
    }
    if (!i) td_buf_str(out, min ? ")" : ")?");
    out->failed |= rest.failed;
    td_buf_free(&rest);
  }
  while (n_open--)
    td_buf_str(out, n_open >= a->min ? ")?" : ")");
  return st;
}

static td_status write_array(td_schema_ctx *ctx, const cJSON *schema, td_buf *out) {
  array_shape a;
  td_status st = read_array(ctx, schema, &a);
  if (st != TD_OK) return st;
  if (a.min > a.max) {
    td_buf_str(out, "[]");
    return TD_OK;
  }
  if (a.n_prefix > 64) return td_schema_refuse(ctx, "prefixItems", "with more than 64 schemas");
  const spacing s = spacing_of(ctx->opts->is_free, ctx->lines);
  if (ctx->lines && a.min == 0) a.min = 1; // an array without items has no lines
  ctx->has_text |= a.max > 0;
  td_buf_str(out, a.min > a.max ? "[] \"[\"" : "\"[\"");
  st = write_tail(ctx, &a, &s, out);
  td_buf_printf(out, "%s\"]\"", ctx->opts->is_free || ctx->lines ? s.last : "");
  return st;
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
  bool has_more;     // members not named are generated
  bool is_closed;    // the schema rules them out
  const cJSON *more; // their schema; NULL: anything
  uint32_t min, max;
} object_shape;

static member *find_member(const object_shape *o, const char *name) {
  for (uint32_t i = 0; i < o->n; i++) {
    if (strcmp(o->members[i].name, name) == 0) return &o->members[i];
  }
  return NULL;
}

static td_status read_required(td_schema_ctx *ctx, const cJSON *required, object_shape *o) {
  for (const cJSON *item = required ? required->child : NULL; item; item = item->next) {
    if (!cJSON_IsString(item)) return td_schema_bad(ctx, "required", "must hold strings");
    member *m = find_member(o, item->valuestring);
    if (!m) {
      m = &o->members[o->n++];
      static const cJSON nothing = {.type = cJSON_False};
      *m = (member){.name = item->valuestring, .schema = o->is_closed ? &nothing : o->more};
    }
    o->n_required += !m->is_required;
    m->is_required = true;
  }
  return TD_OK;
}

static td_status read_object(td_schema_ctx *ctx, const cJSON *schema, object_shape *o) {
  const cJSON *properties = td_json_get(schema, "properties");
  const cJSON *required = td_json_get(schema, "required");
  const cJSON *more = td_json_get(schema, "additionalProperties");
  *o = (object_shape){.max = UINT32_MAX};
  if (properties && !cJSON_IsObject(properties)) {
    return td_schema_bad(ctx, "properties", "must be an object");
  }
  if (required && !cJSON_IsArray(required)) {
    return td_schema_bad(ctx, "required", "must be an array");
  }
  o->is_closed = cJSON_IsFalse(more);
  o->more = cJSON_IsObject(more) ? more : NULL;
  if (more && !cJSON_IsObject(more) && !cJSON_IsBool(more)) {
    return td_schema_bad(ctx, "additionalProperties", "must be a schema");
  }
  size_t most = (size_t)cJSON_GetArraySize(properties) + (size_t)cJSON_GetArraySize(required);
  o->members = calloc(most + 1, sizeof *o->members);
  if (!o->members) return td_schema_no_memory(ctx);
  for (const cJSON *p = properties ? properties->child : NULL; p; p = p->next) {
    if (!find_member(o, p->string)) o->members[o->n++] = (member){.name = p->string, .schema = p};
  }
  td_status st = read_required(ctx, required, o);
  if (st == TD_OK) st = td_schema_count(ctx, schema, "minProperties", &o->min);
  if (st == TD_OK) st = td_schema_count(ctx, schema, "maxProperties", &o->max);
  // Models make up members where they may.
  const bool is_enough = properties && o->min <= o->n;
  o->has_more = more ? !o->is_closed : ctx->opts->is_free || !is_enough;
  return st;
}

// minProperties and maxProperties can be counted only among members that are not named.
static td_status check_counts(const td_schema_ctx *ctx, object_shape *o) {
  if (o->n == 0) return TD_OK;
  if (o->min <= o->n_required) o->min = 0;
  if (!o->has_more && o->max >= o->n) o->max = UINT32_MAX;
  if (o->min > 1) return td_schema_refuse(ctx, "minProperties", "beside properties");
  if (o->max != UINT32_MAX) return td_schema_refuse(ctx, "maxProperties", "beside properties");
  return TD_OK;
}

// The rules for the rest of a key that none of the members has: those in names[0..n) begin with
// what was read, up to byte `at`. Returns the first rule's number.
static uint32_t write_other_key(td_schema_ctx *ctx, const char **names, uint32_t n, size_t at) {
  uint32_t rule = ctx->n_key_rules++;
  td_buf body = TD_BUF_INIT, excluded = TD_BUF_INIT;
  bool is_name = false;
  for (uint32_t i = 0; i < n; i++) {
    uint32_t c, n_same = 0;
    const char *rest = names[i] + at;
    is_name |= !*rest;
    int len = *rest ? td_utf8_decode(rest, strlen(rest), &c) : 0;
    bool is_first = len > 0 && c >= 0x20 && c != '"' && c != '\\';
    for (uint32_t k = 0; k < i && is_first; k++)
      is_first = strncmp(names[k] + at, rest, (size_t)len) != 0;
    if (!is_first) continue;
    const char **same = malloc(n * sizeof *same);
    if (!same) {
      ctx->out->failed = true;
      continue;
    }
    for (uint32_t k = i; k < n; k++) {
      if (strncmp(names[k] + at, rest, (size_t)len) == 0) same[n_same++] = names[k];
    }
    uint32_t next = write_other_key(ctx, same, n_same, at + (size_t)len);
    free(same);
    td_buf_printf(&body, " | [\\U%08X] %s.k%u", c, ctx->opts->prefix, next);
    td_buf_printf(&excluded, "\\U%08X", c);
  }
  td_buf_printf(ctx->out, "%s.k%u ::= [^\"\\\\\\x00-\\x1F%s] json-plain* \"\\\"\"%s%s\n",
                ctx->opts->prefix, rule, td_buf_text(&excluded), is_name ? "" : " | \"\\\"\"",
                td_buf_text(&body));
  ctx->out->failed |= body.failed || excluded.failed;
  td_buf_free(&body);
  td_buf_free(&excluded);
  return rule;
}

// Appends one member that is not named: key, colon, value.
static td_status write_more(td_schema_ctx *ctx, const object_shape *o, td_buf *out) {
  if (o->n) {
    const char **names = malloc(o->n * sizeof *names);
    if (!names) return td_schema_no_memory(ctx);
    for (uint32_t i = 0; i < o->n; i++)
      names[i] = o->members[i].name;
    td_buf_printf(out, "\"\\\"\" %s.k%u", ctx->opts->prefix, write_other_key(ctx, names, o->n, 0));
    free(names);
  } else {
    td_buf_str(out, "json-string");
  }
  td_buf_str(out, spacing_of(ctx->opts->is_free, ctx->lines).colon);
  return refer_item(ctx, o->more, "additionalProperties", out);
}

static td_status write_member(td_schema_ctx *ctx, const member *m, td_buf *out) {
  const cJSON key = {.type = cJSON_String, .valuestring = (char *)m->name};
  td_schema_write_value(out, &key);
  td_buf_str(out, spacing_of(ctx->opts->is_free, ctx->lines).colon);
  char at[64];
  snprintf(at, sizeof at, "properties.%.40s", m->name);
  return refer_item(ctx, m->schema, at, out);
}

// Members in order, as rules from the last to the first: PREFIX.oN-i is what may come from member i
// on when none came before, PREFIX.rN-i when one did.
static td_status write_members(td_schema_ctx *ctx, const object_shape *o, const char *more,
                               const spacing *s, uint32_t id) {
  const char *p = ctx->opts->prefix;
  td_status st = TD_OK;
  if (o->has_more) {
    td_buf_printf(ctx->out, "%s.o%u-%u ::= (%s (%s%s)*)%s\n", p, id, o->n, more, s->comma, more,
                  o->min ? "" : "?");
    td_buf_printf(ctx->out, "%s.r%u-%u ::= (%s%s)*\n", p, id, o->n, s->comma, more);
  } else {
    td_buf_printf(ctx->out, "%s.o%u-%u ::= %s\n", p, id, o->n, o->min ? "[]" : "\"\"");
    td_buf_printf(ctx->out, "%s.r%u-%u ::= \"\"\n", p, id, o->n);
  }
  for (uint32_t i = o->n; i-- > 0 && st == TD_OK;) {
    const member *m = &o->members[i];
    td_buf body = TD_BUF_INIT;
    st = write_member(ctx, m, &body);
    const char *text = td_buf_text(&body);
    td_buf_printf(ctx->out, "%s.o%u-%u ::= %s %s.r%u-%u", p, id, i, text, p, id, i + 1);
    if (!m->is_required) td_buf_printf(ctx->out, " | %s.o%u-%u", p, id, i + 1);
    td_buf_printf(ctx->out, "\n%s.r%u-%u ::= %s%s %s.r%u-%u", p, id, i, s->comma, text, p, id,
                  i + 1);
    if (!m->is_required) td_buf_printf(ctx->out, " | %s.r%u-%u", p, id, i + 1);
    td_buf_char(ctx->out, '\n');
    ctx->out->failed |= body.failed;
    td_buf_free(&body);
  }
  return st;
}

// Members that are not named, as many as minProperties and maxProperties say.
static void write_counted(const object_shape *o, const char *more, const spacing *s, td_buf *out) {
  if (!o->has_more || o->max == 0) {
    td_buf_str(out, o->min ? "[]" : "\"\"");
  } else if (o->max < o->min) {
    td_buf_str(out, "[]");
  } else {
    td_buf_printf(out, "(%s (%s%s){%u,", more, s->comma, more, o->min ? o->min - 1 : 0);
    if (o->max != UINT32_MAX) td_buf_printf(out, "%u", o->max - 1);
    td_buf_printf(out, "})%s", o->min ? "" : "?");
  }
}

static td_status write_object_of(td_schema_ctx *ctx, object_shape *o, td_buf *out) {
  const spacing s = spacing_of(ctx->opts->is_free, ctx->lines);
  td_buf more = TD_BUF_INIT;
  td_status st = check_counts(ctx, o);
  if (ctx->lines && o->n_required == 0 && o->min == 0) o->min = 1; // {} has no lines
  ctx->has_text |= o->n > 0 || o->has_more;
  if (st == TD_OK && o->has_more) st = write_more(ctx, o, &more);
  td_buf_printf(out, "\"{\"%s", s.first);
  if (st == TD_OK && o->n == 0) {
    write_counted(o, td_buf_text(&more), &s, out);
  } else if (st == TD_OK) {
    uint32_t id = ctx->n_key_rules++;
    st = write_members(ctx, o, td_buf_text(&more), &s, id);
    td_buf_printf(out, "%s.o%u-0", ctx->opts->prefix, id);
  }
  td_buf_printf(out, "%s\"}\"", s.last[0] ? s.last : " ");
  out->failed |= more.failed;
  td_buf_free(&more);
  return st;
}

static td_status write_object(td_schema_ctx *ctx, const cJSON *schema, td_buf *out) {
  object_shape o;
  td_status st = read_object(ctx, schema, &o);
  if (st == TD_OK) st = write_object_of(ctx, &o, out);
  free(o.members);
  return st;
}

// ---- a schema ----------------------------------------------------------------------------------

static td_status write_values(td_schema_ctx *ctx, const cJSON *schema, unsigned types,
                              td_buf *out) {
  const cJSON *list = td_json_get(schema, "enum"),
              *single = cJSON_GetObjectItemCaseSensitive(schema, "const");
  if (list && !cJSON_IsArray(list)) return td_schema_bad(ctx, "enum", "must be an array");
  const char *a = list ? "enum" : "const";
  cJSON *rest;
  td_status st = td_schema_without(ctx, schema, a, &rest);
  if (st != TD_OK) return st;
  bool has_both = list && single;
  if (!td_schema_asserts_only(rest, "type", has_both ? "const" : NULL)) {
    return td_schema_refuse(ctx, a, "beside other keywords");
  }
  uint32_t n = 0;
  const cJSON *item = list ? list->child : single;
  for (; item; item = list ? item->next : NULL) {
    if (!(td_schema_types_of(item) & types)) continue;
    if (has_both && !cJSON_Compare(item, single, true)) continue;
    if (n == MAX_VALUES) return td_schema_refuse(ctx, a, "with so many values");
    if (n++) td_buf_str(out, " | ");
    td_schema_write_value(out, item);
  }
  if (!n) td_buf_str(out, "[]");
  return TD_OK;
}

// The alternatives of anyOf or oneOf, each together with the schema's other keywords.
static td_status list_alternatives(td_schema_ctx *ctx, const cJSON *schema, const char *key,
                                   const cJSON **out, uint32_t *n) {
  cJSON *base;
  *n = 0;
  td_status st = td_schema_without(ctx, schema, key, &base);
  bool is_alone = st == TD_OK && td_schema_asserts_only(base, NULL, NULL);
  const cJSON *item = td_json_get(schema, key)->child;
  for (; item && st == TD_OK; item = item->next) {
    if (*n == MAX_ALTERNATIVES) return td_schema_refuse(ctx, key, "with so many schemas");
    out[*n] = item;
    if (!is_alone) st = td_schema_both(ctx, base, item, &out[*n]);
    ++*n;
  }
  return st;
}

static td_status write_alternatives(td_schema_ctx *ctx, const cJSON *schema, const char *key,
                                    td_buf *out) {
  const cJSON *list = td_json_get(schema, key);
  if (!cJSON_IsArray(list) || !list->child) {
    return td_schema_bad(ctx, key, "must be an array of schemas");
  }
  const cJSON **all = malloc(MAX_ALTERNATIVES * sizeof *all);
  if (!all) return td_schema_no_memory(ctx);
  uint32_t n;
  td_status st = list_alternatives(ctx, schema, key, all, &n);
  for (uint32_t i = 0; i < n && st == TD_OK && key[0] == 'o'; i++) {
    for (uint32_t k = i + 1; k < n && st == TD_OK; k++) {
      if (td_schema_excludes(ctx, all[i], all[k])) continue;
      st = td_schema_refuse(ctx, key, "of schemas that may both hold; use anyOf");
    }
  }
  for (uint32_t i = 0; i < n && st == TD_OK; i++) {
    char at[16];
    snprintf(at, sizeof at, "%s[%u]", key, i);
    if (i) td_buf_str(out, " | ");
    st = refer(ctx, all[i], at, out);
  }
  free(all);
  return st;
}

static td_status write_types(td_schema_ctx *ctx, const cJSON *schema, unsigned types, td_buf *out) {
  td_status st = check_keywords(ctx, schema, types);
  td_buf_str(out, "[]");
  if (ctx->lines) types &= TD_SCHEMA_ARRAY | TD_SCHEMA_OBJECT;
  if (types & TD_SCHEMA_NULL) td_buf_str(out, " | \"null\"");
  if (types & TD_SCHEMA_BOOL) td_buf_str(out, " | \"true\" | \"false\"");
  if (st == TD_OK && types & (TD_SCHEMA_NUMBER | TD_SCHEMA_INTEGER)) {
    td_buf_str(out, " | ");
    st = td_schema_write_number(ctx, schema, !(types & TD_SCHEMA_NUMBER), out);
  }
  if (st == TD_OK && types & TD_SCHEMA_STRING) {
    td_buf_str(out, " | ");
    st = td_schema_write_string(ctx, schema, out);
  }
  if (st == TD_OK && types & TD_SCHEMA_ARRAY) {
    td_buf_str(out, " | ");
    st = write_array(ctx, schema, out);
  }
  if (st == TD_OK && types & TD_SCHEMA_OBJECT) {
    td_buf_str(out, " | ");
    st = write_object(ctx, schema, out);
  }
  return st;
}

static td_status generate(td_schema_ctx *ctx, const cJSON *schema, td_buf *out) {
  unsigned types;
  if (!cJSON_IsObject(schema) && !cJSON_IsBool(schema)) {
    return td_schema_bad(ctx, "a schema", "must be an object");
  }
  if (cJSON_IsFalse(schema)) {
    td_buf_str(out, "[]");
    return TD_OK;
  }
  if (cJSON_IsTrue(schema) || td_schema_asserts_only(schema, NULL, NULL)) {
    td_buf_str(out, "json-value");
    if (ctx->lines) td_buf_printf(out, ".p%u", ctx->lines);
    ctx->has_text = true;
    return TD_OK;
  }
  const cJSON *ref = td_json_get(schema, "$ref"), *target;
  if (cJSON_IsString(ref) && td_schema_asserts_only(schema, "$ref", NULL)) {
    td_status st = td_schema_resolve(ctx, ref->valuestring, &target);
    return st == TD_OK ? refer(ctx, target, "$ref", out) : st;
  }
  if (ref || td_json_get(schema, "allOf")) {
    td_status st = td_schema_expand(ctx, schema, &target);
    return st == TD_OK ? refer(ctx, target, ref ? "$ref" : "allOf", out) : st;
  }
  td_status st = td_schema_types(ctx, schema, &types);
  if (st != TD_OK) return st;
  if (td_json_get(schema, "anyOf")) return write_alternatives(ctx, schema, "anyOf", out);
  if (td_json_get(schema, "oneOf")) return write_alternatives(ctx, schema, "oneOf", out);
  if (td_json_get(schema, "enum") || cJSON_GetObjectItemCaseSensitive(schema, "const")) {
    if (ctx->lines) td_buf_str(out, "[]");
    if (ctx->lines) return TD_OK;
    return write_values(ctx, schema, types, out);
  }
  return write_types(ctx, schema, types, out);
}

static td_status translate(td_buf *out, const cJSON *schema, const td_json_schema_opts *opts,
                           uint32_t most, td_err *err) {
  td_schema_ctx ctx = {.out = out,
                       .root = opts->root ? opts->root : schema,
                       .opts = opts,
                       .most = most,
                       .path = opts->path ? opts->path : (char[TD_SCHEMA_PATH_BYTES]){"schema"},
                       .err = err};
  const size_t n_path = strlen(ctx.path);
  td_buf top = TD_BUF_INIT;
  td_status st = refer_to(&ctx, schema, "", "", &top);
  ctx.lines = 1;
  if (st == TD_OK && most && may_nest(schema)) st = refer_to(&ctx, schema, "", " | ", &top);
  td_buf_printf(out, "%s0 ::= %s\n", opts->prefix, td_buf_text(&top));
  out->failed |= top.failed;
  td_buf_free(&top);
  td_schema_ctx_free(&ctx);
  if (ctx.has_failed) st = td_fail(err, TD_ENOMEM, "out of memory for a schema");
  if (st == TD_OK && out->len > TD_GRAMMAR_MAX_BYTES) {
    st = td_fail(err, TD_ELIMIT, "the schema is too large");
  }
  if (st == TD_OK) st = td_buf_status(out, err);
  if (st == TD_ELIMIT || st == TD_ENOMEM) { // of no part alone
    ctx.path[n_path] = '\0';
    td_err_prefix(err, "%s", ctx.path);
  }
  return st;
}

td_status td_json_schema_to_gbnf(td_buf *out, const cJSON *schema, const td_json_schema_opts *opts,
                                 td_err *err) {
  const size_t begin = out->len;
  const uint32_t most = opts->is_free || opts->is_one_line ? 0 : TD_SCHEMA_MAX_LINES;
  td_status st = translate(out, schema, opts, most, err);
  if (st != TD_ELIMIT || !most) return st;
  out->len = begin; // on one line
  return translate(out, schema, opts, 0, err);
}
