// src/text/tokenizer/json.h - reading the typed parts of tokenizer.json. Private to text/.
#ifndef TD_TEXT_TOKENIZER_JSON_H
#define TD_TEXT_TOKENIZER_JSON_H

#include <cjson/cJSON.h>

#include "base/status.h"
#include "text/tokenizer/regex.h"

// Steps that a Sequence may spell out.
#define TD_TOK_MAX_STEPS 64

// Calls step with every part of json: itself, or where its type is Sequence each of the array that
// key names, Sequences within it likewise. Errors get the path in front.
typedef td_status (*td_tok_step)(void *owner, const cJSON *json, const char *type, td_err *err);
td_status td_tok_each_step(const cJSON *json, const char *key, td_tok_step step, void *owner,
                           td_err *err);

// The "pattern" of a Split or a Replace: {"String": ..} or {"Regex": ..}.
td_status td_tok_read_pattern(const cJSON *json, td_regex **regex, td_err *err);
// A string that must be there.
td_status td_tok_need_str(const cJSON *json, const char *key, const char **out, td_err *err);

#endif
