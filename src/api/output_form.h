// src/api/output_form.h - what the families' output looks like: how thoughts begin and end, one row
// a family. What a model's tool calls look like: calls/.
#pragma once

#include <stdbool.h>

#include "text/chat.h"

// Whether reasoning may precede the answer.
typedef enum {
  TD_REASONING_NONE,  // or the prompt ends behind it: thinking is switched off
  TD_REASONING_MAYBE, // the model may begin with <think>
  TD_REASONING_BEGUN, // the prompt ends inside a reasoning block
} td_reasoning;

typedef struct {
  const char *name;
  const char *think_begin, *think_end; // around thoughts
  const char *final_begin; // where output is messages of channels, of the answer; else NULL
  const char *mentioned;   // by the family's chat templates, and by no other family's before it
  bool ends_prompts;       // a prompt may end in think_begin
  bool keeps_specials;     // the markers are control tokens, which are part of the text then
} td_output_form;

enum {
  TD_OUTPUT_HARMONY,
  TD_OUTPUT_MISTRAL,
  TD_OUTPUT_GEMMA,
  TD_OUTPUT_MINIMAX_M3,
  TD_OUTPUT_HY3,
  TD_OUTPUT_THINK,
  TD_OUTPUT_FORMS,
};
extern const td_output_form td_output_forms[TD_OUTPUT_FORMS];

// That of the chat's model; NULL: it does not think.
const td_output_form *td_output_form_of(const td_chat *chat);
