// src/text/grammar/schema_impl.h - shared by the files that translate JSON Schema. Private to
// text/grammar.
#pragma once

#include "text/grammar/json_schema.h"

#define TD_SCHEMA_MAX_LINES 6 // depth down to which values are broken into lines

typedef struct {
  const cJSON *schema;
  uint32_t rule;
  uint32_t depth; // 0: without lines
  bool has_text;  // in lines: some value of the schema has items
} td_schema_rule;

typedef struct {
  td_buf *out;
  const cJSON *root;
  const td_json_schema_opts *opts;
  td_schema_rule *rules; // [n_known] schemas that have a rule
  uint32_t n_known;
  size_t cap_known;
  cJSON **owned; // [n_owned] schemas made here
  uint32_t n_owned;
  size_t cap_owned;
  uint32_t n_rules, n_key_rules;
  uint32_t lines; // indentation of the items of the value being written, in steps; 0: no lines
  uint32_t most;  // depth of lines at most
  bool has_text;  // in lines: what was written of the schema has items
  unsigned depth; // of schemas within schemas
  unsigned expand_depth; // of $ref and allOf within each other
  bool has_failed;       // memory ran out, whatever else was said
  char *path;            // [TD_SCHEMA_PATH_BYTES] of the schema being translated, for messages
  td_err *err;
} td_schema_ctx;

td_status td_schema_no_memory(td_schema_ctx *ctx);
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
// Frees what ctx owns.
void td_schema_ctx_free(td_schema_ctx *ctx);
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
