// src/text/grammar/json_schema.h - JSON Schema to GBNF.
// What the grammar generates satisfies the schema. The subset of the standard is in README.md; a
// schema outside it is TD_EUNSUPPORTED with a message that names the keyword and where it stands.
#pragma once

#include <cjson/cJSON.h>
#include <stdbool.h>

#include "base/buf.h"

enum {
  TD_SCHEMA_PATH_BYTES = 128, // as TD_API_PARAM_BYTES
  TD_SCHEMA_NULL = 1,
  TD_SCHEMA_BOOL = 2,
  TD_SCHEMA_INTEGER = 4,
  TD_SCHEMA_NUMBER = 8, // includes integers
  TD_SCHEMA_STRING = 16,
  TD_SCHEMA_ARRAY = 32,
  TD_SCHEMA_OBJECT = 64,
  TD_SCHEMA_ANY = 127,
};

// Appends rules of JSON itself, which the rules of schemas use: json-value, json-object, and
// json-any, an object that may be broken into lines. Once in a grammar. is_free:
// td_json_schema_opts.
void td_json_schema_write_common(td_buf *out, bool is_free);

typedef struct {
  const char *prefix; // of the names of the rules, which are unique in the grammar
  // Objects may have members that the schema neither names nor rules out, and white space is any
  // that JSON allows. Otherwise objects with properties have no others unless the schema says so,
  // and there is one blank behind each comma and colon, or every item on a line of its own.
  bool is_free;
  bool is_one_line;  // never lines
  const cJSON *root; // what $ref begins at; NULL: the schema itself
  // [TD_SCHEMA_PATH_BYTES], what messages call the schema; an error adds where in it the wrong part
  // is, as .properties.x.items. NULL: "schema".
  char *path;
} td_json_schema_opts;

// Appends rules; the text of a value is that of the rule PREFIX0. schema is only read, but for
// cJSON's lookups.
td_status td_json_schema_to_gbnf(td_buf *out, const cJSON *schema, const td_json_schema_opts *opts,
                                 td_err *err);

// The types of the values that a schema allows, TD_SCHEMA_*, behind its $ref, allOf, anyOf and the
// like; TD_SCHEMA_ANY where that cannot be told. root: what $ref begins at.
// *has_failed is set if memory ran out, which must not pass for a schema that allows more.
unsigned td_json_schema_types(const cJSON *root, const cJSON *schema, bool *has_failed);
// A copy of the schema without $ref and allOf at its top, which the caller deletes; NULL: there is
// none, or memory ran out, which sets *has_failed.
cJSON *td_json_schema_expanded(const cJSON *root, const cJSON *schema, bool *has_failed);

// Appends an expression for a string that stands without quotes before a marker that begins with <,
// as the schema's pattern or format says. False: it has none, or none that a grammar can express.
bool td_json_schema_write_bare(td_buf *out, const cJSON *schema);
