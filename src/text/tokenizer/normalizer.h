// src/text/tokenizer/normalizer.h - the "normalizer" of tokenizer.json. Private to text/.
#pragma once

#include <cjson/cJSON.h>

#include "text/tokenizer/regex.h"
#include "text/unicode/unicode.h"

typedef struct td_norm td_norm;

// Supports NFC, NFD, Prepend, Replace, Strip, and Sequences of them. json may be NULL:
// text is unchanged.
td_status td_norm_open(td_norm **out, const cJSON *json, td_err *err);
void td_norm_close(td_norm *norm);

// Working memory for one call at a time.
typedef struct {
  td_runes runes, spare;
  td_buf utf8;
  td_spans found;
  size_t max_runes; // limit for the current text
} td_norm_scratch;

void td_norm_scratch_free(td_norm_scratch *scratch);

// True if text certainly does not change.
bool td_norm_keeps(const td_norm *norm, const char *text, size_t len);
// Appends the normalized text (valid UTF-8) to out and, to out_literal, the ranges that come from
// those in literal; literal and out_literal may be NULL. TD_ELIMIT: it grows too much.
td_status td_norm_apply(const td_norm *norm, td_norm_scratch *scratch, td_regex_scratch *regex,
                        const char *text, size_t len, const td_spans *literal, td_buf *out,
                        td_spans *out_literal, td_err *err);
