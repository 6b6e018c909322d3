// src/engine/dry.h - DRY, a penalty for what would repeat the text so far: for the longest run of
// tokens at the end of the text that also stands before an earlier t, if it has n >= allowed_length
// tokens, logit[t] -= multiplier * base^(n - allowed_length). Tokens with which a breaker ends, and
// control tokens, are in no run and are never penalized.
// What is known depends only on the tokens taken. Thread: one caller at a time.
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "tandem/wire.h"
#include "text/grammar/token_index.h"

typedef struct td_dry td_dry;

bool td_dry_is_valid(const td_wire_dry *params);
// params: valid, copied. tokens: borrowed; NULL: no token breaks a run. At most max_tokens are
// taken. On success the caller owns *out; on error *out is NULL.
td_status td_dry_open(td_dry **out, const td_wire_dry *params, const td_token_index *tokens,
                      uint32_t n_vocab, uint32_t max_tokens, td_err *err);
void td_dry_close(td_dry *dry);
// The text's next tokens.
void td_dry_take(td_dry *dry, const int32_t *ids, uint32_t n);
// Subtracts the penalties from logits f32 [n_vocab]. Time and memory are linear in last_n.
void td_dry_apply(td_dry *dry, float *logits);
