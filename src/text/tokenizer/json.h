// src/text/tokenizer/json.h - helpers to read the typed objects of tokenizer.json. Private to
// text/.
#pragma once

#include <cjson/cJSON.h>

#include "base/status.h"
#include "text/tokenizer/regex.h"

// Maximum number of steps in a Sequence.
#define TD_TOK_MAX_STEPS 64

// Calls step with json itself or, if its type is Sequence, with each element of the array `key`;
// also of nested Sequences. Errors are prefixed with the path.
typedef td_status (*td_tok_step)(void *owner, const cJSON *json, const char *type, td_err *err);
td_status td_tok_each_step(const cJSON *json, const char *key, td_tok_step step, void *owner,
                           td_err *err);

// Reads the "pattern" of a Split or Replace: {"String": ..} or {"Regex": ..}.
td_status td_tok_read_pattern(const cJSON *json, td_regex **regex, td_err *err);
// Reads a required string.
td_status td_tok_need_str(const cJSON *json, const char *key, const char **out, td_err *err);
