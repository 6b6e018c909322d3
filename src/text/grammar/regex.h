// src/text/grammar/regex.h - a regular expression as a GBNF expression.
// The syntax is ECMAScript's, which JSON Schema asks for; \d, \w and \s are ASCII. Not supported:
// look-around, back-references, \b, Unicode properties, flags, anchors in the middle.
#ifndef TD_TEXT_GRAMMAR_REGEX_H
#define TD_TEXT_GRAMMAR_REGEX_H

#include <stdbool.h>
#include <stddef.h>

#include "base/buf.h"

// Appends an expression. in_json: it matches the inside of a JSON string whose text matches, and
// uses the rule json-char where the expression is not anchored; otherwise the whole text has to
// match, anchored or not. TD_EFORMAT, TD_EUNSUPPORTED.
td_status td_regex_to_gbnf(td_buf *out, const char *regex, size_t len, bool in_json, td_err *err);

#endif
