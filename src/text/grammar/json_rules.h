// src/text/grammar/json_rules.h - the rules of JSON itself, which those of schemas use.
#pragma once

#include "text/grammar/build.h"

#define TD_JSON_MAX_INDENT 6 // depth down to which values are broken into lines

// White space of an object or array: before the first item, between two, behind the last, and
// behind a key.
typedef struct {
  td_node first, comma, last, colon;
} td_json_spacing;

// Calls of rules. [0]: on one line; [k]: items on lines of their own, indented by k steps of two
// blanks. Free white space has no lines.
struct td_json_rules {
  td_node character, plain; // of a string; plain: no escape
  td_node string, integer, number;
  td_node object[TD_JSON_MAX_INDENT + 1], value[TD_JSON_MAX_INDENT + 1];
  td_json_spacing spacing[TD_JSON_MAX_INDENT + 1];
};
typedef struct td_json_rules td_json_rules;

// The rules in b, which are made when they are asked for first. is_free: white space is any that
// JSON allows. Never NULL: where building has failed, nothing matches.
const td_json_rules *td_g_json(td_grammar_build *b, bool is_free);
// Any JSON object, which may be broken into lines.
td_node td_g_json_object(td_grammar_build *b, bool is_free);
