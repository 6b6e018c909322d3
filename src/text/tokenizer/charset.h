// src/text/tokenizer/charset.h - character classes of patterns as sets. A set is a union of general
// categories, ranges and other properties, or the complement of such a union. Private to text/.
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/buf.h"
#include "text/unicode/unicode.h"

typedef struct {
  uint32_t categories; // bit mask
  td_runes ranges;     // first, last, first, last, ...
  td_buf properties;   // in PCRE2's syntax: \p{sc:Han}
  bool negated;
} td_charset;

void td_charset_free(td_charset *set);
td_status td_charset_add_range(td_charset *set, uint32_t first, uint32_t last, td_err *err);
// Adds \p{name}; false if the name is unknown. Script names are not checked here; PCRE2 does that.
bool td_charset_add_property(td_charset *set, const char *name, size_t len, td_err *err);
// Adds Oniguruma's \s, \d, \w or \h, with their meaning inside a class.
bool td_charset_add_escape(td_charset *set, char letter, td_err *err);
// set = set OR other; set = set AND other. False if the result is neither a union nor a complement.
bool td_charset_unite(td_charset *set, td_charset *other, td_err *err);
bool td_charset_intersect(td_charset *set, td_charset *other, td_err *err);
// Appends the set as a PCRE2 character class.
void td_charset_write(const td_charset *set, td_buf *out);
