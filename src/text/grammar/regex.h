// src/text/grammar/regex.h - regular expressions to nodes of a grammar.
// The syntax is ECMAScript's, which JSON Schema asks for; \d, \w and \s are ASCII. Not supported:
// look-around, back-references, \b, Unicode properties, flags, anchors in the middle.
#pragma once

#include <stddef.h>

#include "text/grammar/build.h"

typedef enum {
  TD_REGEX_WHOLE, // the whole text has to match, anchored or not
  // The inside of a JSON string whose text matches. Anything may stand around an expression without
  // anchors.
  TD_REGEX_IN_JSON,
  // Text before a marker that begins with <. Only where the expression names that character does
  // the text have it, not where a dot, a range or a negated class stands for any.
  TD_REGEX_IN_ELEMENT,
} td_regex_place;

// *out generates the texts that match. TD_EFORMAT, TD_EUNSUPPORTED, TD_ELIMIT; or as
// td_grammar_build_status.
td_status td_g_regex(td_node *out, td_grammar_build *b, const char *regex, size_t len,
                     td_regex_place place, td_err *err);
