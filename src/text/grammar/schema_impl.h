// src/text/grammar/schema_impl.h - shared by the files that translate JSON Schema. Private to
// text/grammar.
#ifndef TD_TEXT_GRAMMAR_SCHEMA_IMPL_H
#define TD_TEXT_GRAMMAR_SCHEMA_IMPL_H

#include "text/grammar/json_schema.h"

enum {
  TD_SCHEMA_NULL = 1,
  TD_SCHEMA_BOOL = 2,
  TD_SCHEMA_INTEGER = 4,
  TD_SCHEMA_NUMBER = 8, // includes integers
  TD_SCHEMA_STRING = 16,
  TD_SCHEMA_ARRAY = 32,
  TD_SCHEMA_OBJECT = 64,
  TD_SCHEMA_ANY = 127,
};

typedef struct {
  const cJSON *schema;
  uint32_t rule;
} td_schema_rule;

typedef struct {
  td_buf *out;
  const cJSON *root;
  const td_json_schema_opts *opts;
  td_schema_rule *rules; // [n_known] schemas that have a rule
  uint32_t n_known, cap_known;
  cJSON **owned; // [n_owned] schemas made here
  uint32_t n_owned, cap_owned;
  uint32_t n_rules, n_key_rules;
  unsigned depth;        // of schemas within schemas
  unsigned expand_depth; // of $ref and allOf within each other
  char path[128];        // of the schema being translated, for messages
  td_err *err;
} td_schema_ctx;

// TD_EUNSUPPORTED: the schema at ctx->path has a keyword that a grammar cannot express, and why.
td_status td_schema_refuse(const td_schema_ctx *ctx, const char *keyword, const char *why);
td_status td_schema_bad(const td_schema_ctx *ctx, const char *keyword, const char *what);
// The types a schema allows: TD_SCHEMA_*.
td_status td_schema_types(const td_schema_ctx *ctx, const cJSON *schema, unsigned *types);
// The types a value has.
unsigned td_schema_types_of(const cJSON *value);
// A count such as minLength. *out is unchanged if it is absent.
td_status td_schema_count(const td_schema_ctx *ctx, const cJSON *schema, const char *key,
                          uint32_t *out);

// schema_merge.c
// The schema that a $ref names.
td_status td_schema_resolve(const td_schema_ctx *ctx, const char *ref, const cJSON **out);
// A schema that means both a and b; ctx owns it.
td_status td_schema_both(td_schema_ctx *ctx, const cJSON *a, const cJSON *b, const cJSON **out);
// The same schema without $ref and allOf at its top; ctx owns it if it is new.
td_status td_schema_expand(td_schema_ctx *ctx, const cJSON *schema, const cJSON **out);
// A copy without one member; ctx owns it.
td_status td_schema_without(td_schema_ctx *ctx, const cJSON *schema, const char *key, cJSON **out);
// Whether no value satisfies both.
bool td_schema_excludes(td_schema_ctx *ctx, const cJSON *a, const cJSON *b);
// Whether the schema asserts nothing beside the keywords a and b (either may be NULL).
bool td_schema_asserts_only(const cJSON *schema, const char *a, const char *b);

// schema_values.c: each appends an expression.
void td_schema_write_literal(td_buf *out, const char *text, size_t len);
void td_schema_write_value(td_buf *out, const cJSON *value);
td_status td_schema_write_string(const td_schema_ctx *ctx, const cJSON *schema, td_buf *out);
td_status td_schema_write_number(const td_schema_ctx *ctx, const cJSON *schema, bool is_integer,
                                 td_buf *out);

#endif
