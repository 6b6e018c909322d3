// src/text/unicode/unicode.h - code point arrays, normal forms, and what patterns need besides.
// The data is src/text/unicode/unicode_tables.inc, made by scripts/gen_unicode.py.
#ifndef TD_TEXT_UNICODE_UNICODE_H
#define TD_TEXT_UNICODE_UNICODE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/buf.h"
#include "base/status.h"
#include "text/span.h"

// Code points, each with a flag above its 21 bits that survives every change of the text: the
// character came out of a literal span (text/span.h).
#define TD_RUNE_LITERAL 0x80000000u
#define TD_RUNE_CODE(r) ((r)&0x1FFFFFu)

typedef struct {
  uint32_t *r; // owned; NULL while empty
  size_t n, cap;
} td_runes;

void td_runes_free(td_runes *runes);
td_status td_runes_reserve(td_runes *runes, size_t n_extra, td_err *err);
td_status td_runes_add(td_runes *runes, const uint32_t *more, size_t n, td_err *err);
// Decodes UTF-8 (which must be valid) behind what runes holds; literal may be NULL.
td_status td_runes_decode(td_runes *runes, const char *text, size_t len, const td_spans *literal,
                          td_err *err);
// The way back. literal gets the ranges of flagged code points; it may be NULL.
td_status td_runes_encode(const td_runes *runes, td_buf *text, td_spans *literal, td_err *err);
td_status td_spans_add(td_spans *spans, size_t begin, size_t end, td_err *err);

typedef enum { TD_NFC, TD_NFD, TD_NFKC, TD_NFKD } td_normal_form;

// Brings text into a normal form, in place. spare is working memory.
td_status td_unicode_normalize(td_runes *text, td_normal_form form, td_runes *spare, td_err *err);
// True when the UTF-8 text is certainly in NFC, or NFKC with compat; false says nothing.
bool td_unicode_surely_composed(const char *text, size_t len, bool compat);

// The Unicode property White_Space.
bool td_unicode_is_space(uint32_t code_point);

// Code points younger than the oldest PCRE2 in use (Unicode 14): patterns are matched with an
// older code point of the same category, script and UTF-8 length in their place.
bool td_unicode_has_newer(const char *text, size_t len);
// Puts the stand-ins in place in valid UTF-8.
void td_unicode_stand_in(char *text, size_t len);

#endif
