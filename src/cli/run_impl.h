// src/cli/run_impl.h - shared by the files of `tandem run`.
#ifndef TD_CLI_RUN_IMPL_H
#define TD_CLI_RUN_IMPL_H

#include "api/output_parser.h"
#include "base/buf.h"
#include "base/token_ids.h"
#include "cli/conversation.h"
#include "cli/spinner.h"
#include "options/options.h"
#include "runtime/session.h"
#include "runtime/trace_file.h"
#include "text/chat.h"

typedef struct {
  const td_options *options;
  td_session *session;
  td_trace_file *trace; // NULL without --trace
  td_chat *chat;        // NULL: the prompt is token ids, and so is the output
  td_sampling sampling;
  bool shows_reasoning; // stderr is a terminal; reasoning goes nowhere else
  bool shows_progress;  // stderr is a terminal that can redraw a line
  bool has_colors;      // on stderr
  td_conversation conversation;

  // the response being generated
  td_spinner spinner;
  td_detok detok;
  td_output_parser parser;
  bool is_parsed;         // by the chat template: the text has reasoning and content
  bool is_in_reasoning;   // reasoning was the last thing shown
  td_buf text;            // all of it
  td_buf reasoning, said; // its parts
  td_token_ids ids;
  td_status status; // of decoding its tokens; err if not TD_OK
  td_err err;
  td_generate_stats stats;
} td_runner;

// run_answer.c
// Generates and shows a response to a prompt; it is in text, reasoning, said and stats afterwards.
// is_parsed and parser.begins_in_reasoning are set before.
td_status td_run_answer(td_runner *r, const int32_t *prompt, size_t n_prompt, td_err *err);
// Generates the next message of the conversation and appends it. Turns that do not fit into the
// context are left out, with a notice.
td_status td_run_answer_chat(td_runner *r, td_err *err);
// Appends a user's message.
td_status td_run_ask(td_runner *r, const char *text, size_t len, td_err *err);

// run_chat.c
// Chats until the end of input. An error in one turn does not end the chat.
td_status td_run_chat(td_runner *r, td_err *err);

#endif
