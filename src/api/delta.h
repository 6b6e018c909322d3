// src/api/delta.h - what an answer has gained: of thoughts, of content, of tool calls.
#ifndef TD_API_DELTA_H
#define TD_API_DELTA_H

#include "api/answer.h"
#include "api/output_parser.h"

typedef struct {
  td_buf reasoning, content;
  // Of the parts' calls, those that are new or have grown: [first_call, last_call). What of each
  // was told before says the call.
  uint32_t first_call, last_call;
} td_delta;

// Adds to the delta what is sure of the answer's text up to what was taken (td_answer_take), and
// was not gathered before. TD_ENOMEM.
td_status td_delta_gather(td_delta *delta, td_output_parser *parts, const td_answer *answer,
                          td_err *err);
// It was told: empties it.
void td_delta_clear(td_delta *delta, td_output_parser *parts);
static inline bool td_delta_is_empty(const td_delta *delta) {
  return !delta->reasoning.len && !delta->content.len && delta->first_call == delta->last_call;
}
void td_delta_free(td_delta *delta);

#endif
