// src/api/delta.h - what a choice gained since the last chunk: reasoning, content, tool calls.
#pragma once

#include "api/answer.h"
#include "api/output_parser.h"

typedef struct {
  bool in_order; // stops before a part that precedes, in the order below, what it has already
  td_buf reasoning, content;
  // Tool calls of the output parser that are new or have grown: [first_call, last_call). Each call
  // records how much of it was already sent (td_tool_call.n_sent).
  uint32_t first_call, last_call;
  td_output_part held;       // the part it stopped before
  bool has_held;             // there is more to gather once this was sent
  td_output_part_kind last;  // of the parts gathered
  char ends[TD_OUTPUT_CALL]; // of reasoning and content: their last byte, also of what was sent
} td_delta;

// Adds the parts of text[0..len) that are final and were not added before (output_parser.h). Where
// text goes on behind a part of another kind, a line feed keeps the sentences apart. Not in_order,
// a call within which the model ended its answer is text. Error: TD_ENOMEM.
td_status td_delta_parse(td_delta *delta, td_output_parser *parts, const char *text, size_t len,
                         td_text_end end, td_err *err);
// The same of an answer's text that td_answer_take released.
td_status td_delta_gather(td_delta *delta, td_output_parser *parts, const td_answer *answer,
                          td_err *err);
// Empties the delta after it was sent, and marks its tool calls as sent.
void td_delta_clear(td_delta *delta, td_output_parser *parts);
static inline bool td_delta_is_empty(const td_delta *delta) {
  return !delta->reasoning.len && !delta->content.len && delta->first_call == delta->last_call;
}
void td_delta_free(td_delta *delta);
