// src/text/tokenizer/regex.h - compiled patterns. Private to text/.
#pragma once

#include <stdbool.h>
#include <stddef.h>

#include "base/buf.h"
#include "base/status.h"
#include "text/span.h"

typedef struct td_regex td_regex;
typedef struct td_regex_scratch td_regex_scratch; // for one thread at a time; any pattern

// pattern: Oniguruma's dialect (text/tokenizer/oniguruma.h), or plain text if literal.
td_status td_regex_open(td_regex **out, const char *pattern, size_t len, bool literal, td_err *err);
void td_regex_close(td_regex *regex);

td_regex_scratch *td_regex_scratch_new(void);
void td_regex_scratch_free(td_regex_scratch *scratch);

// Sets out to all matches in text (valid UTF-8), from left to right without overlap. An empty match
// is skipped if it touches the previous one. TD_ELIMIT: the pattern backtracks too much.
td_status td_regex_find_all(const td_regex *regex, td_regex_scratch *scratch, const char *text,
                            size_t len, td_spans *out, td_err *err);

// Finds the same matches one after the other, so that none need be kept. Between two of them the
// scratch may serve other searches.
typedef struct {
  const td_regex *regex;
  td_regex_scratch *scratch;
  const char *text;
  size_t len, start, last_end;
} td_regex_search;

// stand_in: working memory of this search alone, which outlives it.
td_status td_regex_search_begin(td_regex_search *search, const td_regex *regex,
                                td_regex_scratch *scratch, td_buf *stand_in, const char *text,
                                size_t len, td_err *err);
// *found: there was another match.
td_status td_regex_search_next(td_regex_search *search, td_span *match, bool *found, td_err *err);
