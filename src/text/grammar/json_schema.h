// src/text/grammar/json_schema.h - JSON Schema to GBNF.
// What the grammar generates satisfies the schema. The subset of the standard is in README.md; a
// schema outside it is TD_EUNSUPPORTED with a message that names the keyword and where it stands.
#ifndef TD_TEXT_GRAMMAR_JSON_SCHEMA_H
#define TD_TEXT_GRAMMAR_JSON_SCHEMA_H

#include <cjson/cJSON.h>
#include <stdbool.h>

#include "base/buf.h"

// Appends rules of JSON itself, which the rules of schemas use: json-value, json-object, json-ws
// and so on. Once in a grammar.
void td_json_schema_write_common(td_buf *out);

typedef struct {
  const char *prefix; // of the names of the rules, which are unique in the grammar
  // As if every object with properties said additionalProperties: false.
  bool is_strict;
  const cJSON *root; // what $ref begins at; NULL: the schema itself
} td_json_schema_opts;

// Appends rules; the text of a value is that of the rule PREFIX0. schema is only read, but for
// cJSON's lookups.
td_status td_json_schema_to_gbnf(td_buf *out, const cJSON *schema, const td_json_schema_opts *opts,
                                 td_err *err);

// Appends an expression for a string that stands without quotes before a marker that begins with <,
// as the schema's pattern or format says. False: it has none, or none that a grammar can express.
bool td_json_schema_write_bare(td_buf *out, const cJSON *schema);

#endif
