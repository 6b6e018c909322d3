// src/cli/run_impl.h - shared by the files of `tandem run`.
#pragma once

#include "api/output_parser.h"
#include "base/buf.h"
#include "base/token_ids.h"
#include "cli/conversation.h"
#include "cli/markdown.h"
#include "cli/spinner.h"
#include "image/image.h"
#include "options/options.h"
#include "runtime/session.h"
#include "runtime/trace_file.h"
#include "text/chat.h"

typedef struct {
  const td_options *options;
  td_options settings;      // the model, sampling and the rest that a chat may change
  td_session *session;      // NULL: a server answers
  char *served;             // owned: the server's model; NULL: the session answers
  uint32_t n_ctx, n_cached; // tokens of context, and of it in use
  td_trace_file *trace;     // NULL without --trace
  td_chat *chat;            // NULL: the prompt is token ids, and so is the output
  td_sampling sampling;
  bool shows_reasoning; // stderr is a terminal; reasoning goes nowhere else
  bool shows_progress;  // stderr is a terminal that can redraw a line
  bool has_colors;      // on stderr
  bool shows_markdown;  // stdout is a terminal with colours
  bool is_chat;         // on a terminal
  td_conversation conversation;
  td_image_processor processor; // patch 0: the session's model does not see
  td_image_input *images;       // [n_images], owned: the prompt's; pixels are the conversation's
  uint32_t n_images;

  // the response being generated
  td_spinner spinner;
  td_word_wrap wrap; // of a chat; width 0: not shown on a terminal
  td_markdown markdown;
  td_detok detok;
  td_output_parser parser;
  bool is_parsed;         // by the chat template: the text has reasoning and content
  bool is_in_reasoning;   // reasoning was the last thing shown
  td_buf text;            // all of it
  td_buf reasoning, said; // its parts
  td_token_ids ids;
  td_buf drawn;     // td_token_value of each, for a receipt
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
// Shows a part of the response, and keeps it.
void td_run_show(td_runner *r, const char *text, size_t len, bool is_reasoning);
// Appends a user's message.
td_status td_run_ask(td_runner *r, const char *text, size_t len, td_err *err);

// run.c
// Opens the model of settings; td_run_close_model in every case.
td_status td_run_open_model(td_runner *r, td_err *err);
void td_run_close_model(td_runner *r);

// run_images.c
// Finds out whether the model that is open sees.
td_status td_run_open_images(td_runner *r, const char *model_dir, td_err *err);
// Prepares the images of the conversation, whose tokens ids are, and puts as many tokens in the
// place of each as it has.
td_status td_run_put_images(td_runner *r, td_token_ids *ids, td_err *err);

// run_server.c
// Finds the model at the server.
td_status td_run_open_server(td_runner *r, td_err *err);
// Has the server continue the conversation.
td_status td_run_answer_server(td_runner *r, td_err *err);

// run_settings.c
// Copies from the options what a chat may change.
td_status td_run_open_settings(td_runner *r, td_err *err);
// Sets r->sampling from the settings and, where they say nothing, from generation_config.json.
void td_run_settle(td_runner *r);
// Writes the members of a template's variables that say how much the model thinks.
void td_run_write_reasoning(const td_runner *r, td_json_writer *w);
// The command /set, and the ways to complete it: whole lines.
void td_run_set(td_runner *r, const char *args);
// The setting that a word names, also with underscores. NULL: no setting.
const char *td_run_setting(const char *word, size_t len);
void td_run_complete_set(const char *begun, td_buf *out);

// run_models.c, for --models
// Appends the names, one a line. An error: there is none.
td_status td_run_list_models(const td_runner *r, td_buf *out, td_err *err);
td_status td_run_choose_first(td_runner *r, td_err *err);
// Loads the model of that name, or lists all. The conversation stays. False: there is no model now.
bool td_run_change_model(td_runner *r, const char *name);

// run_chat.c
void td_run_print_name(const td_runner *r);
// Chats until the end of input. An error in one turn does not end the chat.
td_status td_run_chat(td_runner *r, td_err *err);
