// src/worker/prefill_budget.h - how many tokens of prompts go into a step beside answers. Pure
// arithmetic; time is passed in.
//
// The longer such a step takes, the longer every answer pauses. It may take
// TD_PREFILL_BUDGET_STRETCH times as long as a step that only writes answers. How many tokens fit
// is learnt from the steps themselves: from what the last one took beyond that, whatever it was
// spent on. The number begins small, doubles at max_tokens from step to step, and falls at once.
//
// From break_even_tokens tokens on a step takes as long whatever their number is, because experts
// stream through a GPU then (td_engine_opts). So when as many are waiting, they all go into one
// step, and answers have as long for themselves as they paused for it before that happens again.
//
// It is never less than TD_PREFILL_BUDGET_MIN_TOKENS: prompts are to get on, too. A step that reads
// any of them goes through many experts' weights and through all of the prompt's past; fewer tokens
// would be little quicker, and many more such steps.
#ifndef TD_WORKER_PREFILL_BUDGET_H
#define TD_WORKER_PREFILL_BUDGET_H

#include <stdint.h>

#define TD_PREFILL_BUDGET_STRETCH    3
#define TD_PREFILL_BUDGET_MIN_TOKENS 64
#define TD_PREFILL_BUDGET_STEPS      64 // with prompts, until answers are measured alone again

typedef struct {
  uint32_t max_tokens;        // tokens of prompts a step, where it writes no answers
  uint32_t budget_tokens;     // beside answers
  uint64_t decode_ns;         // a step that only wrote answers; 0: there was none yet
  uint32_t n_decode;          // so many
  uint32_t n_steps;           // with prompts since
  uint32_t break_even_tokens; // 0: there is no such number; set after td_prefill_budget_init
  uint64_t decode_credit_ns;  // that answers still have for themselves
} td_prefill_budget;

void td_prefill_budget_init(td_prefill_budget *out, uint32_t max_tokens);

// Most tokens of prompts in the next step, which writes n_decode, while n_prefill_left are waiting.
// 0: it is to measure what answers take alone, because that is not known, or was long ago, or of
// half or twice as many; or they have it for themselves.
uint32_t td_prefill_budget_tokens(const td_prefill_budget *budget, uint32_t n_decode,
                                  uint32_t n_prefill_left);

// A step that wrote n_decode and read n_prefilled tokens of prompts took ns.
void td_prefill_budget_note(td_prefill_budget *budget, uint32_t n_decode, uint32_t n_prefilled,
                            uint64_t ns);

#endif
