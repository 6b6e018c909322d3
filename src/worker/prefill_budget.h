// src/worker/prefill_budget.h - how many prompt tokens go into a step that also decodes. Pure
// arithmetic; time is passed in.
//
// A mixed step may take TD_PREFILL_BUDGET_STRETCH times as long as a decode-only step, which bounds
// ITL. How many prompt tokens fit is learned from the steps themselves, by the time the last one
// took beyond decode alone. The budget starts small, at most doubles from step to step, and falls
// at once.
//
// The budget is at least TD_PREFILL_BUDGET_MIN_TOKENS, so that prefill progresses too. Any step
// with prompt tokens reads many experts' weights and the prompt's whole KV cache; with fewer tokens
// it would hardly be faster, and many more steps would be needed.
#pragma once

#include <stdint.h>

#define TD_PREFILL_BUDGET_STRETCH    3
#define TD_PREFILL_BUDGET_MIN_TOKENS 64
#define TD_PREFILL_BUDGET_STEPS      64 // mixed steps until a decode-only step is measured again

typedef struct {
  uint32_t max_tokens;    // prompt tokens per step without decode
  uint32_t budget_tokens; // prompt tokens per step with decode
  uint64_t decode_ns;     // duration of a decode-only step; 0: not measured yet
  uint32_t n_decode;      // sequences in that step
  uint32_t n_steps;       // mixed steps since
} td_prefill_budget;

void td_prefill_budget_init(td_prefill_budget *out, uint32_t max_tokens);

// Maximum prompt tokens in the next step, which decodes n_decode sequences. 0: the step is
// decode-only, to measure it (unknown, too old, or measured with at most half or at least twice as
// many sequences).
uint32_t td_prefill_budget_tokens(const td_prefill_budget *budget, uint32_t n_decode);

// Records that a step with n_decode sequences and n_prefilled prompt tokens took ns.
void td_prefill_budget_note(td_prefill_budget *budget, uint32_t n_decode, uint32_t n_prefilled,
                            uint64_t ns);
