// src/engine/sampler.h - draws one token from one row of logits.
// Draws depend only on (seed, index of the generated token), so a request's text does not depend on
// its batch. Thread: one caller at a time per sampler.
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "engine/dry.h"
#include "tandem/types.h"
#include "tandem/wire.h"
#include "text/grammar/matcher.h"

// The message where logits are not numbers.
#define TD_NO_LOGITS                                                                               \
  "the model computed logits that are not numbers (NaN or infinity): its weights are damaged, "    \
  "download them again; or values overflow, try --activations f32"

typedef struct td_sampler td_sampler;

// bias is copied. On success the caller owns *out; on error *out is NULL.
td_status td_sampler_open(td_sampler **out, const td_sampling *params, const td_token_value *bias,
                          uint32_t n_bias, uint32_t n_vocab, td_err *err);
void td_sampler_close(td_sampler *sampler);
// Token ids (end of sequence) that are not drawn before min_tokens tokens were generated. ids is
// borrowed.
void td_sampler_ends(td_sampler *sampler, const int32_t *ids, uint32_t n, uint32_t min_tokens);
// Only tokens that the matcher accepts are drawn; end tokens when it may end. Drawn tokens advance
// it. Borrowed; NULL: any token. Call before td_sampler_answer, after td_sampler_ends.
void td_sampler_constrain(td_sampler *sampler, td_matcher *matcher);
// Draws also with DRY's penalty. Borrowed, fed by the functions below; NULL: without.
void td_sampler_dry(td_sampler *sampler, td_dry *dry);
// What was drawn or scored counts only while this is TD_OK. TD_EINVAL: a token was drawn, or passed
// to td_sampler_answer, that the matcher does not accept, because it failed or no token of the
// vocabulary can follow. TD_EFORMAT: logits were not numbers.
td_status td_sampler_status(const td_sampler *sampler, td_err *err);
// Tokens of the prompt, for the repetition penalty and DRY. Ids outside the vocabulary are ignored.
void td_sampler_prompt(td_sampler *sampler, const int32_t *ids, uint32_t n);
// Generated tokens that another sampler drew (replay); the next draw is the one after them.
void td_sampler_answer(td_sampler *sampler, const int32_t *ids, uint32_t n);

// The log-probability of a token in a row of logits, and the n_top_logprobs best candidates: id,
// logprob, n_top and top of *out.
void td_sampler_score(td_sampler *sampler, const float *logits, int32_t id, td_wire_token *out);
// Draws the next token and records it. logits f32 [n_vocab] are overwritten. want_logprobs: fills
// logprob and the n_top_logprobs best candidates from the model's distribution before bias,
// penalties and temperature.
td_wire_token td_sampler_next(td_sampler *sampler, float *logits, int want_logprobs);
// The same from the top logits alone, which must be ranked with the sampler's temperature. Returns
// false, and draws nothing, where they do not suffice: bias, penalties, min_tokens not reached, a
// truncation that keeps more tokens than were ranked, or NaN.
bool td_sampler_next_of_top(td_sampler *sampler, const td_top_logits *top, int want_logprobs,
                            td_wire_token *out);
