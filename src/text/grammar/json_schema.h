// src/text/grammar/json_schema.h - JSON Schema to grammars.
// What the grammar generates satisfies the schema. The subset of the standard is in README.md; a
// schema outside it is TD_EUNSUPPORTED with a message that names the keyword and where it stands,
// unless td_json_schema_opts.leaves_out.
// Schemas are only read, and have to stay until a call returns.
#pragma once

#include <cjson/cJSON.h>
#include <stdbool.h>

#include "text/grammar/build.h"

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

typedef struct {
  // Objects may have members that the schema neither names nor rules out, and white space is any
  // that JSON allows. Otherwise objects with properties have no others unless the schema says so,
  // and there is one blank behind each comma and colon, or every item on a line of its own.
  bool is_free;
  bool is_one_line;  // never lines
  bool leaves_out;   // what a grammar cannot express does not count, alone; the log says so
  const cJSON *root; // what $ref begins at; NULL: the schema itself
  // [TD_SCHEMA_PATH_BYTES], what messages call the schema; an error adds where in it the wrong part
  // is, as .properties.x.items. NULL: "schema".
  char *path;
} td_json_schema_opts;

// *out generates the values that satisfy the schema. On an error that is not of b's budget or of
// memory, b is as it was.
td_status td_json_schema_build(td_node *out, td_grammar_build *b, const cJSON *schema,
                               const td_json_schema_opts *opts, td_err *err);

// Questions about the schemas of a document, root, which $ref begins at. Whether budget or memory
// were exhausted, the budget's status tells: that must not pass for a schema that allows more.
typedef struct td_schema_ctx td_schema_ctx;
td_schema_ctx *td_json_schema_open(const cJSON *root, td_budget *budget); // NULL: out of memory
void td_json_schema_close(td_schema_ctx *ctx);
// The types of the values that a schema allows, TD_SCHEMA_*, behind its $ref, allOf, anyOf and the
// like; TD_SCHEMA_ANY where that cannot be told. ctx may be NULL.
unsigned td_json_schema_types(td_schema_ctx *ctx, const cJSON *schema);
// The schema without $ref and allOf at its top, valid until ctx is closed. NULL: there is none, or
// the budget or memory are exhausted. ctx may be NULL.
const cJSON *td_json_schema_expanded(td_schema_ctx *ctx, const cJSON *schema);

// A string that stands without quotes before a marker that begins with <, as the schema's pattern
// or format says. False: it has none, or none that a grammar can express.
bool td_json_schema_bare(td_node *out, td_grammar_build *b, const cJSON *schema);
