// src/text/grammar/schema_impl.h - shared by the files that translate JSON Schema. Private to
// text/grammar.
#pragma once

#include "text/grammar/json_rules.h"
#include "text/grammar/json_schema.h"

#define TD_SCHEMA_NO_INDEX UINT32_MAX

// A schema with a rule: translated, or waiting for it.
typedef struct {
  const cJSON *schema;
  uint32_t indent; // indentation of its items, in steps; 0: no lines
  td_rule rule;
  // Where it stands: in the schema of another one, as the member key, of that the member `name` or
  // the item `index`.
  uint32_t parent;
  const char *key, *name;
  uint32_t index;
} td_schema_item;

// A member of a large object, by object and name.
typedef struct {
  const cJSON *object, *member; // member NULL: says that all of the object are in the table
} td_schema_member;

struct td_schema_ctx {
  td_grammar_build *b; // NULL: nothing is translated
  td_budget *budget;
  const td_json_rules *json;
  const cJSON *root;
  const td_json_schema_opts *opts;
  td_schema_item *items; // [n_items], owned
  uint32_t n_items, at;  // the one being translated
  size_t cap_items;
  uint32_t *slots; // [n_slots], owned: hash table of items, index + 1
  uint32_t n_slots;
  td_schema_member *members; // [n_member_slots], owned: hash table
  uint32_t n_members, n_member_slots;
  cJSON **owned; // [n_owned] schemas made here, whose members are others'
  uint32_t n_owned;
  size_t cap_owned;
  uint32_t max_indent;   // deepest indentation
  unsigned expand_depth; // of $ref and allOf within each other
  td_err *err;
  td_err ignored;
};

// TD_EUNSUPPORTED: the schema being translated has a keyword that a grammar cannot express, and
// why.
td_status td_schema_refuse(const td_schema_ctx *ctx, const char *keyword, const char *why);
// The same; TD_OK: it is to be left out (td_json_schema_opts).
td_status td_schema_leave_out(const td_schema_ctx *ctx, const char *keyword, const char *why);
td_status td_schema_bad(const td_schema_ctx *ctx, const char *keyword, const char *what);
// The budget or memory is exhausted.
td_status td_schema_exhausted(td_schema_ctx *ctx);
// The types a schema allows: TD_SCHEMA_*.
td_status td_schema_types(td_schema_ctx *ctx, const cJSON *schema, unsigned *types);
// The types a value has.
unsigned td_schema_types_of(const cJSON *value);
// A count such as minLength. *out is unchanged if it is absent.
td_status td_schema_count(td_schema_ctx *ctx, const cJSON *schema, const char *key, uint32_t *out);

// schema_lookup.c
// As td_json_get, and cJSON_GetObjectItemCaseSensitive; objects of more than 32 members have an
// index.
const cJSON *td_schema_get(td_schema_ctx *ctx, const cJSON *object, const char *key);
const cJSON *td_schema_member_of(td_schema_ctx *ctx, const cJSON *object, const char *key);
// The schema that a $ref names.
td_status td_schema_resolve(td_schema_ctx *ctx, const char *ref, const cJSON **out);

// schema_merge.c
// Frees what ctx owns.
void td_schema_ctx_free(td_schema_ctx *ctx);
// A schema that means both a and b; ctx owns it.
td_status td_schema_both(td_schema_ctx *ctx, const cJSON *a, const cJSON *b, const cJSON **out);
// The same schema without $ref and allOf at its top; ctx owns it if it is new.
td_status td_schema_expand(td_schema_ctx *ctx, const cJSON *schema, const cJSON **out);
// The same without the members a and b (either may be NULL); ctx owns it.
td_status td_schema_without(td_schema_ctx *ctx, const cJSON *schema, const char *a, const char *b,
                            cJSON **out);
// Whether no value satisfies both, neither of which has $ref or allOf at its top.
bool td_schema_excludes(td_schema_ctx *ctx, const cJSON *a, const cJSON *b);
// Whether the schema asserts nothing beside the keywords a and b (either may be NULL).
bool td_schema_asserts_only(const cJSON *schema, const char *a, const char *b);

// schema_values.c
void td_schema_write_value(td_buf *out, const cJSON *value);      // as JSON, on one line
td_node td_schema_value(td_grammar_build *b, const cJSON *value); // its text
// Whether a schema of strings asserts nothing but pattern, format and lengths.
bool td_schema_is_plain_string(const cJSON *schema);
td_status td_schema_string(td_schema_ctx *ctx, const cJSON *schema, td_node *out);
// schema_numbers.c
td_status td_schema_number(td_schema_ctx *ctx, const cJSON *schema, bool is_integer, td_node *out);
// schema_objects.c: items of an object or array stand in the lines of the schema being translated.
td_status td_schema_object(td_schema_ctx *ctx, const cJSON *schema, td_node *out);
td_status td_schema_array(td_schema_ctx *ctx, const cJSON *schema, td_node *out);

// json_schema.c
// The rule of a schema in lines, which is translated later if it is new.
typedef struct {
  const char *key, *name; // where it stands: td_schema_item
  uint32_t index;
} td_schema_place;
td_node td_schema_refer(td_schema_ctx *ctx, const cJSON *schema, uint32_t indent,
                        td_schema_place place);
// An item of the value being translated (NULL: anything): on one line, or one deeper in lines.
td_node td_schema_refer_item(td_schema_ctx *ctx, const cJSON *schema, td_schema_place place);
