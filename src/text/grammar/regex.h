// src/text/grammar/regex.h - a regular expression as a GBNF expression.
// The syntax is ECMAScript's, which JSON Schema asks for; \d, \w and \s are ASCII. Not supported:
// look-around, back-references, \b, Unicode properties, flags, anchors in the middle.
#pragma once

#include <stdbool.h>
#include <stddef.h>

#include "base/buf.h"

typedef enum {
  TD_REGEX_WHOLE, // the whole text has to match, anchored or not
  // The inside of a JSON string whose text matches. Where the expression is not anchored, the rule
  // json-char is used.
  TD_REGEX_IN_JSON,
  // Text before a marker that begins with <. Only where the expression names that character does
  // the text have it, not where a dot, a range or a negated class stands for any.
  TD_REGEX_IN_ELEMENT,
} td_regex_place;

// Appends an expression. TD_EFORMAT, TD_EUNSUPPORTED.
td_status td_regex_to_gbnf(td_buf *out, const char *regex, size_t len, td_regex_place place,
                           td_err *err);
