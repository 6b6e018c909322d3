// src/cli/run.c - `tandem run`: generates one response, or chats on a terminal.
// Only responses go to stdout; progress and timings go to stderr.
#include <locale.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/fs.h"
#include "base/json_write.h"
#include "base/log.h"
#include "cli/cli.h"
#include "cli/remote.h"
#include "cli/run_impl.h"
#include "cli/terminal.h"
#include "runtime/command.h"

#define MAX_TEXT_BYTES (1u << 28)

// ---- one response ---------------------------------------------------------------------------

static double per_second(double n, double seconds) {
  return seconds > 0 ? n / seconds : 0;
}

static void report(const td_runner *r) {
  const td_generate_stats *stats = &r->stats;
  uint32_t n_read = stats->n_prompt - stats->n_reused;
  uint32_t n_steps = stats->n_output ? stats->n_output - 1 : 0;
  double decode = per_second(n_steps, stats->decode_s);
  if (r->served) {
    td_info("%s at %s | prompt %u tokens (%u cached), %.2f s | decode %u tokens, %.2f tokens/s",
            r->served, td_cli_server(r->options), stats->n_prompt, stats->n_reused,
            stats->prefill_s, stats->n_output, decode);
    return;
  }
  double bytes = (double)td_model_stats_of(r->session->model).active_bytes;
  td_info("load %.2f s | prefill %u tokens, %.1f tokens/s | decode %u tokens, %.2f tokens/s, "
          "%.2f GB/s of weights",
          r->session->load_s, n_read, per_second(n_read, stats->prefill_s), stats->n_output, decode,
          decode * bytes * 1e-9);
  if (r->is_parsed && stats->reason == TD_DONE_LENGTH && !r->said.len && r->reasoning.len) {
    td_info("the limit of %u tokens ended the reasoning, before an answer: see --n-predict",
            stats->n_output);
  }
}

static const char *reason_name(td_done_reason reason) {
  switch (reason) {
  case TD_DONE_STOP: return "stop";
  case TD_DONE_LENGTH: return "length";
  case TD_DONE_CANCELED: return "canceled";
  case TD_DONE_ERROR:
  case TD_DONE_PREFILLED:
  case TD_DONE_LOST:
  case TD_DONE_REFUSED: break;
  }
  return "error";
}

static td_status print_json(const td_runner *r, td_err *err) {
  td_buf text = TD_BUF_INIT;
  td_json_writer w = TD_JSON_WRITER(&text);
  td_jw_begin_object(&w, NULL);
  if (r->chat || r->served) td_jw_str_len(&w, "text", td_buf_text(&r->said), r->said.len);
  if (r->reasoning.len)
    td_jw_str_len(&w, "reasoning", td_buf_text(&r->reasoning), r->reasoning.len);
  td_jw_begin_array(&w, "token_ids");
  for (size_t i = 0; i < r->ids.n; i++)
    td_jw_int(&w, NULL, r->ids.ids[i]);
  td_jw_add(&w, "], 'finish_reason': %s, 'n_prompt': %u, 'n_output': %u",
            reason_name(r->stats.reason), r->stats.n_prompt, r->stats.n_output);
  if (r->session) td_jw_double(&w, "load_s", r->session->load_s);
  td_jw_add(&w, "'prefill_s': %g, 'decode_s': %g}", r->stats.prefill_s, r->stats.decode_s);
  td_status st = td_buf_status(&text, err);
  if (st == TD_OK) puts(td_buf_text(&text));
  fflush(stdout);
  td_buf_free(&text);
  return st;
}

// Reads the single prompt: --prompt, --file and then --prompt, or stdin if that is not a terminal.
static td_status read_prompt(const td_options *o, td_buf *text, td_err *err) {
  td_status st = TD_OK;
  if (o->file && strcmp(o->file, "-"))
    st = td_file_read(text, o->file, MAX_TEXT_BYTES, err);
  else if (o->file || !o->prompt)
    st = td_stdin_read(text, MAX_TEXT_BYTES, err);
  // Files and what programs print end in a line break that is not part of the prompt.
  if (text->len && text->data[text->len - 1] == '\n') text->len--;
  if (text->len && text->data[text->len - 1] == '\r') text->len--;
  if (o->prompt) td_buf_printf(text, "%s%s", text->len ? "\n\n" : "", o->prompt);
  return st == TD_OK ? td_buf_status(text, err) : st;
}

static td_status answer_text(td_runner *r, const td_buf *text, td_err *err) {
  if (!r->options->raw) {
    td_status st = td_run_ask(r, td_buf_text(text), text->len, err);
    return st == TD_OK ? td_run_answer_chat(r, err) : st;
  }
  td_token_ids ids = {0};
  td_status st = td_chat_encode_plain(r->chat, td_buf_text(text), text->len, true, &ids, err);
  if (st == TD_OK) st = td_run_answer(r, ids.ids, ids.n, err);
  td_token_ids_free(&ids);
  return st;
}

static td_status run_once(td_runner *r, td_err *err) {
  const td_options *o = r->options;
  td_status st;
  if (o->token_ids.n) {
    st = td_run_answer(r, o->token_ids.values, o->token_ids.n, err);
  } else {
    td_buf text = TD_BUF_INIT;
    st = read_prompt(o, &text, err);
    if (st == TD_OK) st = answer_text(r, &text, err);
    td_buf_free(&text);
  }
  if (st == TD_OK && o->json) st = print_json(r, err);
  if (st == TD_OK) report(r);
  return st;
}

// ---- the command ----------------------------------------------------------------------------

td_status td_run_open_model(td_runner *r, td_err *err) {
  const td_options *o = r->options;
  td_options chosen = *o; // borrows
  chosen.model = r->settings.model ? r->settings.model : o->model;
  td_session_opts opts;
  td_status st = td_cmd_session_opts(&chosen, &opts, err);
  if (st == TD_OK && !o->token_ids.n) st = td_chat_open(&r->chat, chosen.model, err);
  if (st == TD_OK) st = td_session_open(&r->session, &opts, err);
  if (st != TD_OK) return st;
  r->n_ctx = r->session->n_ctx;
  td_run_settle(r);
  if (!r->chat) return TD_OK;
  st = td_run_open_images(r, chosen.model, err);
  if (st != TD_OK) return st;
  const td_output_form *form = o->raw ? NULL : td_output_form_of(r->chat);
  r->parser.is_harmony = form && form->final_begin;
  td_detok_init(&r->detok, td_chat_tokenizer(r->chat), !form || !form->keeps_specials);
  return TD_OK;
}

void td_run_close_model(td_runner *r) {
  if (r->chat) td_detok_free(&r->detok);
  td_session_close(r->session);
  td_chat_close(r->chat);
  r->session = NULL;
  r->chat = NULL;
}

static td_status open_runner(td_runner *r, td_err *err) {
  const td_options *o = r->options;
  td_status st = td_run_open_settings(r, err);
  if (st == TD_OK && o->models && !o->model) st = td_run_choose_first(r, err);
  if (st == TD_OK && o->trace) st = td_trace_file_open(&r->trace, o->trace, "run", err);
  if (st == TD_OK && o->system) td_buf_str(&r->conversation.system, o->system);
  if (st == TD_OK) st = td_buf_status(&r->conversation.system, err);
  if (st == TD_OK && o->images.n && (o->raw || o->token_ids.n))
    st = td_fail(err, TD_EINVAL, "--image goes through the chat template: leave out %s",
                 o->raw ? "--raw" : "--token-ids");
  for (size_t i = 0; i < o->images.n && st == TD_OK; i++)
    st = td_conversation_attach(&r->conversation, o->images.values[i], err);
  if (st == TD_OK && o->server && o->receipt)
    st = td_fail(err, TD_EINVAL, "--receipt is of an answer computed here: leave out --server");
  if (st != TD_OK) return st;
  return o->server ? td_run_open_server(r, err) : td_run_open_model(r, err);
}

static void close_runner(td_runner *r) {
  td_run_close_model(r);
  td_output_parser_free(&r->parser);
  td_conversation_free(&r->conversation);
  td_word_wrap_free(&r->wrap);
  td_markdown_free(&r->markdown);
  td_buf_free(&r->text);
  td_buf_free(&r->reasoning);
  td_buf_free(&r->said);
  td_token_ids_free(&r->ids);
  td_buf_free(&r->drawn);
  free(r->images);
  td_trace_file_close(r->trace);
  td_options_free(&r->settings);
  free(r->served);
}

int td_cmd_run(const td_options *o) {
  td_runner r = {.options = o,
                 .shows_reasoning = isatty(STDERR_FILENO) == 1,
                 .shows_progress = td_terminal_moves_cursor(STDERR_FILENO),
                 .has_colors = td_terminal_has_colors(STDERR_FILENO),
                 .shows_markdown = !o->json && !o->raw && !o->token_ids.n &&
                                   td_terminal_has_colors(STDOUT_FILENO),
                 .markdown.is_start = true};
  td_err err;
  if (r.shows_markdown) setlocale(LC_CTYPE, "C.UTF-8"); // for the width of characters
  td_status st = open_runner(&r, &err);
  bool is_interrupted = false;
  if (st == TD_OK) {
    td_interrupt_catch();
    bool one = o->prompt || o->file || o->token_ids.n || !isatty(STDIN_FILENO);
    r.is_chat = !one;
    st = one ? run_once(&r, &err) : td_run_chat(&r, &err);
    is_interrupted = one && td_interrupted();
  }
  close_runner(&r);
  if (st != TD_OK) return td_cmd_fail(&err);
  return is_interrupted ? 130 : 0;
}
