// src/text/tokenizer/oniguruma.h - translates Oniguruma's dialect, which tokenizer.json uses, to
// PCRE2's. Private to text/.
#pragma once

#include <stddef.h>

#include "base/buf.h"
#include "base/status.h"

// Appends the pattern (valid UTF-8, Oniguruma's Ruby syntax) for PCRE2 with the options UTF, UCP
// and MULTILINE. Differences that matter here:
//   [a&&b], [a[^b]]   become one class, or a class after a lookahead
//   \s \d \w \h \b    are Oniguruma's Unicode properties, not PCRE2's
//   \p{Han}           is the script, without script extensions
//   x{2,3}+           repeats the repetition; x{2}? makes it optional; x{,3} starts at 0
//   (?m:...)          lets . match newlines; (?i) extends over | to the end of its group
// Groups do not capture. TD_EUNSUPPORTED, with the byte offset, for constructs without a
// translation (back references, \G, \K, \X, calls, conditions, absent groups, extended mode).
td_status td_pattern_translate(td_buf *out, const char *pattern, size_t len, td_err *err);
// Appends a pattern that matches text literally.
void td_pattern_quote(td_buf *out, const char *text, size_t len);
