// src/text/tokenizer/oniguruma.h - from Oniguruma's dialect, which tokenizer.json uses, to PCRE2's.
// Private to text/.
#ifndef TD_TEXT_TOKENIZER_ONIGURUMA_H
#define TD_TEXT_TOKENIZER_ONIGURUMA_H

#include <stddef.h>

#include "base/buf.h"
#include "base/status.h"

// Appends the pattern (valid UTF-8, Oniguruma's Ruby syntax) as PCRE2 reads it with UTF, UCP and
// MULTILINE. The differences that matter here:
//   [a&&b], [a[^b]]   become one class, or one behind a lookahead
//   \s \d \w \h \b    are the Unicode properties of Oniguruma, not PCRE2's
//   \p{Han}           is the script, without its extensions
//   x{2,3}+           repeats the repetition; x{2}? makes it optional; x{,3} starts at 0
//   (?m:...)          lets . match newlines; (?i) reaches over | to the end of its group
// Groups do not capture. TD_EUNSUPPORTED, with the byte offset, for what has no translation (back
// references, \G, \K, \X, calls, conditions, absent groups, extended mode).
td_status td_pattern_translate(td_buf *out, const char *pattern, size_t len, td_err *err);
// Appends text as a pattern that matches it literally.
void td_pattern_quote(td_buf *out, const char *text, size_t len);

#endif
