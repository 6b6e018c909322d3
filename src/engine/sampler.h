// src/engine/sampler.h - one token from one row of logits.
// Draws depend on (seed, index of the token in the answer) alone, so a request's text does not
// depend on what else runs in its batch.
#ifndef TD_ENGINE_SAMPLER_H
#define TD_ENGINE_SAMPLER_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "tandem/types.h"
#include "tandem/wire.h"

typedef struct td_sampler td_sampler;

// bias is copied. On success the caller owns *out; on error *out is NULL.
td_status td_sampler_open(td_sampler **out, const td_sampling *params, const td_token_value *bias,
                          uint32_t n_bias, uint32_t n_vocab, td_err *err);
void td_sampler_close(td_sampler *sampler);
// Tokens that are not drawn before the answer has min_tokens; the array is borrowed.
void td_sampler_ends(td_sampler *sampler, const int32_t *ids, uint32_t n, uint32_t min_tokens);
// Tokens of the prompt, for the repetition penalty. Ids outside the vocabulary are ignored.
void td_sampler_prompt(td_sampler *sampler, const int32_t *ids, uint32_t n);
// Tokens of the answer that another sampler drew: the next draw is the one behind them.
void td_sampler_answer(td_sampler *sampler, const int32_t *ids, uint32_t n);

// Draws the next token of the answer and remembers it. logits f32 [n_vocab] are overwritten.
// want_logprobs: fills logprob and the n_top_logprobs best candidates of the distribution that the
// model gave, before bias, penalties and temperature.
td_wire_token td_sampler_next(td_sampler *sampler, float *logits, int want_logprobs);
// The same from the best of the logits alone, ranked with the sampler's temperature. False, and
// nothing drawn: they do not decide it (bias, penalties, tokens that must not be drawn yet, a tail
// that they do not end, NaN).
bool td_sampler_next_of_top(td_sampler *sampler, const td_top_logits *top, int want_logprobs,
                            td_wire_token *out);

#endif
