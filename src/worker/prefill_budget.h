// src/worker/prefill_budget.h - how many tokens of prompts go into a step beside answers. Pure
// arithmetic; time is passed in.
//
// The longer such a step takes, the longer every answer pauses. It may take TD_PACE_STRETCH times
// as long as a step that only writes answers. How many tokens fit is learnt from the steps
// themselves: from what the last one took beyond that, whatever it was spent on. The number begins
// small, doubles at most from step to step, and falls at once.
//
// From n_flat tokens on a step takes as long whatever their number is, because experts stream
// through a GPU then (td_engine_opts). So when as many are waiting, they all go into one step, and
// answers have as long for themselves as they paused for it before that happens again.
//
// It is never less than TD_PACE_LEAST: prompts are to get on, too. A step that reads any of them
// goes through many experts' weights and through all of the prompt's past; fewer tokens would be
// little quicker, and many more such steps.
#ifndef TD_WORKER_PREFILL_BUDGET_H
#define TD_WORKER_PREFILL_BUDGET_H

#include <stdint.h>

#define TD_PACE_STRETCH 3
#define TD_PACE_LEAST   64
#define TD_PACE_STEPS   64 // with prompts, until answers are measured alone again

typedef struct {
  uint32_t most;       // tokens of prompts a step, where it writes no answers
  uint32_t n_fit;      // beside answers
  uint64_t answers_ns; // a step that only wrote answers; 0: there was none yet
  uint32_t n_answers;  // so many
  uint32_t n_steps;    // with prompts since
  uint32_t n_flat;     // 0: there is no such number; set after td_pace_init
  uint64_t rest_ns;    // that answers still have for themselves
} td_pace;

void td_pace_init(td_pace *out, uint32_t most);

// Most tokens of prompts in the next step, which writes n_answers, while n_unread are waiting. 0:
// it is to measure what answers take alone, because that is not known, or was long ago, or of half
// or twice as many; or they have it for themselves.
uint32_t td_pace_budget(const td_pace *pace, uint32_t n_answers, uint32_t n_unread);

// A step that wrote n_answers and read n_read tokens of prompts took ns.
void td_pace_note(td_pace *pace, uint32_t n_answers, uint32_t n_read, uint64_t ns);

#endif
