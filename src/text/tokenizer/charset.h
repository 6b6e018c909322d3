// src/text/tokenizer/charset.h - character classes of patterns as sets. Private to text/.
// A set is a union of general categories, ranges and other properties, or all but such a union.
#ifndef TD_TEXT_TOKENIZER_CHARSET_H
#define TD_TEXT_TOKENIZER_CHARSET_H

#include <stdbool.h>
#include <stdint.h>

#include "base/buf.h"
#include "text/unicode/unicode.h"

typedef struct {
  uint32_t categories; // a bit each
  td_runes ranges;     // first, last, first, last, ...
  td_buf properties;   // PCRE2's spelling: \p{sc:Han}
  bool negated;
} td_charset;

void td_charset_free(td_charset *set);
td_status td_charset_add_range(td_charset *set, uint32_t first, uint32_t last, td_err *err);
// Adds \p{name}; false for a name that is unknown. Scripts are taken on trust: PCRE2 checks them.
bool td_charset_add_property(td_charset *set, const char *name, size_t len, td_err *err);
// Oniguruma's \s, \d, \w and \h, as they are in a class.
bool td_charset_add_escape(td_charset *set, char letter, td_err *err);
// set = set or other, set = set and other. False when that is neither a union nor all but one.
bool td_charset_unite(td_charset *set, td_charset *other, td_err *err);
bool td_charset_intersect(td_charset *set, td_charset *other, td_err *err);
// Appends the set as a PCRE2 class.
void td_charset_write(const td_charset *set, td_buf *out);

#endif
