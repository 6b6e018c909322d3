// src/api/delta.h - what a choice gained since the last chunk: reasoning, content, tool calls.
#pragma once

#include "api/answer.h"
#include "api/output_parser.h"

typedef struct {
  td_buf reasoning, content;
  // Tool calls of the output parser that are new or have grown: [first_call, last_call). Each call
  // records how much of it was already sent (td_tool_call.n_told).
  uint32_t first_call, last_call;
} td_delta;

// Adds the text that is final, was released by td_answer_take and has not been gathered before.
// Error: TD_ENOMEM.
td_status td_delta_gather(td_delta *delta, td_output_parser *parts, const td_answer *answer,
                          td_err *err);
// Empties the delta after it was sent, and marks its tool calls as sent.
void td_delta_clear(td_delta *delta, td_output_parser *parts);
static inline bool td_delta_is_empty(const td_delta *delta) {
  return !delta->reasoning.len && !delta->content.len && delta->first_call == delta->last_call;
}
void td_delta_free(td_delta *delta);
