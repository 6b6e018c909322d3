// src/cli/run_answer.c - generates one response: its content goes to stdout, reasoning and progress
// to a terminal on stderr.
#include <errno.h>
#include <stdio.h>
#include <unistd.h>

#include "api/receipt.h"
#include "base/fs.h"
#include "base/json_write.h"
#include "base/log.h"
#include "base/utf8.h"
#include "cli/run_impl.h"
#include "cli/terminal.h"
#include "model/fingerprint.h"
#include "tandem/kernels.h"

// ---- showing --------------------------------------------------------------------------------

// In a chat, text for a terminal is broken between words; text NULL: the word held back. A terminal
// gets no control characters; that of stdout is guarded in any case.
static void write_wrapped(td_runner *r, int fd, const char *text, size_t len) {
  td_buf safe = TD_BUF_INIT, shown = TD_BUF_INIT;
  r->wrap.width = r->is_chat && isatty(fd) == 1 ? td_terminal_width(fd) : 0;
  const bool is_safe = fd != STDERR_FILENO && !r->wrap.width;
  if (!is_safe && text) td_printable_add(&safe, text, len, "\n\t");
  if (text) {
    td_word_wrap_add(&r->wrap, is_safe ? text : td_buf_text(&safe), is_safe ? len : safe.len,
                     &shown);
  } else {
    td_word_wrap_end(&r->wrap, &shown);
  }
  fwrite(td_buf_text(&shown), 1, shown.len, fd == STDERR_FILENO ? stderr : stdout);
  td_buf_free(&safe);
  td_buf_free(&shown);
}

// To stdout past its guard, which lets no colours through; text NULL: what is held back.
static void write_markdown(td_runner *r, const char *text, size_t len) {
  td_buf safe = TD_BUF_INIT, shown = TD_BUF_INIT;
  r->markdown.wrap.width = td_terminal_width(STDOUT_FILENO);
  if (text) {
    td_printable_add(&safe, text, len, "\n\t");
    td_markdown_add(&r->markdown, td_buf_text(&safe), safe.len, &shown);
  } else {
    td_markdown_end(&r->markdown, &shown);
  }
  fflush(stdout);
  for (size_t done = 0; done < shown.len;) {
    const ssize_t n = write(STDOUT_FILENO, shown.data + done, shown.len - done);
    if (n < 0 && errno != EINTR) break;
    done += n > 0 ? (size_t)n : 0;
  }
  td_buf_free(&safe);
  td_buf_free(&shown);
}

static void write_content(td_runner *r, const char *text, size_t len) {
  if (r->shows_markdown)
    write_markdown(r, text, len);
  else
    write_wrapped(r, STDOUT_FILENO, text, len);
}

static void end_reasoning(td_runner *r) {
  if (!r->is_in_reasoning) return;
  r->is_in_reasoning = false;
  write_wrapped(r, STDERR_FILENO, NULL, 0);
  fputs(r->has_colors ? "\033[0m\n\n" : "\n\n", stderr);
}

static void show_reasoning(td_runner *r, const char *text, size_t len) {
  td_buf_add(&r->reasoning, text, len);
  if (!r->shows_reasoning || r->options->json || !len) return;
  td_spinner_stop(&r->spinner);
  if (!r->is_in_reasoning) fputs(r->has_colors ? "\033[2m" : "thinking: ", stderr);
  r->is_in_reasoning = true;
  write_wrapped(r, STDERR_FILENO, text, len);
}

static void show_content(td_runner *r, const char *text, size_t len) {
  td_buf_add(&r->said, text, len);
  if (r->options->json || !len) return;
  td_spinner_stop(&r->spinner);
  end_reasoning(r);
  write_content(r, text, len);
  fflush(stdout);
}

// Shows what of r->text is new and cannot change any more.
static td_status show_new(td_runner *r, bool is_final, td_err *err) {
  td_status st = td_buf_status(&r->text, err);
  if (!r->is_parsed) {
    if (st == TD_OK)
      show_content(r, td_buf_text(&r->text) + r->said.len, r->text.len - r->said.len);
    return st == TD_OK ? td_buf_status(&r->said, err) : st;
  }
  td_output_part part;
  for (bool found = true; st == TD_OK && found;) {
    st = td_output_parser_next(&r->parser, td_buf_text(&r->text), r->text.len,
                               is_final ? TD_TEXT_ENDED : TD_TEXT_GROWS, &part, &found, err);
    if (st != TD_OK || !found) break;
    const char *begin = td_buf_text(&r->text) + part.begin;
    (part.kind == TD_OUTPUT_REASONING ? show_reasoning : show_content)(r, begin,
                                                                       part.end - part.begin);
  }
  if (st == TD_OK) st = td_buf_status(&r->said, err);
  return st == TD_OK ? td_buf_status(&r->reasoning, err) : st;
}

void td_run_show(td_runner *r, const char *text, size_t len, bool is_reasoning) {
  (is_reasoning ? show_reasoning : show_content)(r, text, len);
}

// ---- generating -----------------------------------------------------------------------------

static bool on_prefill(void *ctx, uint32_t n_done, uint32_t n_prompt) {
  td_runner *r = ctx;
  td_spinner_update(&r->spinner, n_done, n_prompt);
  return !td_interrupted();
}

static bool on_token(void *ctx, int32_t id, float logprob) {
  td_runner *r = ctx;
  if (r->options->receipt)
    td_buf_add(&r->drawn, &(td_token_value){id, logprob}, sizeof(td_token_value));
  r->status = td_token_ids_push(&r->ids, id, &r->err);
  if (r->status == TD_OK && r->chat)
    r->status = td_detok_feed(&r->detok, id, &r->text, &r->err);
  else if (r->status == TD_OK) // without a tokenizer print ids
    td_buf_printf(&r->text, "%s%d", r->text.len ? "," : "", id);
  if (r->status == TD_OK) r->status = show_new(r, false, &r->err);
  return r->status == TD_OK && !td_interrupted() && !ferror(stdout);
}

static void begin(td_runner *r) {
  td_buf_clear(&r->text);
  td_buf_clear(&r->reasoning);
  td_buf_clear(&r->said);
  td_buf_clear(&r->drawn);
  r->ids.n = 0;
  r->status = TD_OK;
  r->stats = (td_generate_stats){0};
  const td_output_parser parser = {.begins_in_reasoning = r->parser.begins_in_reasoning,
                                   .is_harmony = r->parser.is_harmony};
  td_output_parser_free(&r->parser);
  r->parser = parser;
  if (r->shows_progress) td_spinner_start(&r->spinner);
}

static void end(td_runner *r, td_status st) {
  end_reasoning(r);
  if (st != TD_OK || r->options->json) return;
  write_content(r, NULL, 0);
  putchar('\n');
  fflush(stdout);
}

// Of the answer, to a file.
static td_status write_receipt(const td_runner *r, const td_generate_args *args, td_err *err) {
  const td_dev *dev = r->session->devices.dev;
  td_buf text = TD_BUF_INIT, place = TD_BUF_INIT;
  td_json_writer w = TD_JSON_WRITER(&text);
  td_receipt_add_place(&place, td_dev_gpu_index(dev) < 0 ? NULL : td_dev_name(dev),
                       td_kernels()->isa);
  td_receipt receipt = {.options = r->options,
                        .model = td_model_name(r->session->model),
                        .computed_by = td_buf_text(&place),
                        .sampling = args->sampling,
                        .ignore_eos = args->ignore_eos,
                        .has_tokenizer = args->tok != NULL,
                        .is_ended = r->stats.reason == TD_DONE_STOP,
                        .prompt = args->prompt,
                        .n_prompt = args->n_prompt,
                        .answer = (const td_token_value *)(const void *)td_buf_text(&r->drawn),
                        .n_answer = r->drawn.len / sizeof(td_token_value)};
  td_status st = td_model_digest(&receipt.weights, r->session->opts.runtime.model_dir, err);
  td_receipt_add(&w, NULL, &receipt);
  td_buf_char(&text, '\n');
  if (st == TD_OK) st = td_buf_status(&r->drawn, err);
  if (st == TD_OK) st = td_buf_status(&text, err);
  if (st == TD_OK) st = td_file_write(r->options->receipt, td_buf_text(&text), text.len, err);
  td_buf_free(&text);
  td_buf_free(&place);
  return st;
}

td_status td_run_answer(td_runner *r, const int32_t *prompt, size_t n_prompt, td_err *err) {
  begin(r);
  td_generate_args args = {.prompt = prompt,
                           .n_prompt = (uint32_t)n_prompt,
                           .images = r->images,
                           .n_images = r->n_images,
                           .max_tokens = (uint32_t)r->settings.n_predict,
                           .ignore_eos = r->options->ignore_eos,
                           .tok = r->chat ? td_chat_tokenizer(r->chat) : NULL,
                           .sampling = r->sampling,
                           .want_logprobs = r->options->receipt != NULL,
                           .on_prefill = on_prefill,
                           .on_token = on_token,
                           .ctx = r};
  td_status st = td_session_generate(r->session, &args, &r->stats, err);
  td_spinner_stop(&r->spinner);
  if (st == TD_OK && r->status != TD_OK) {
    *err = r->err;
    st = r->status;
  }
  if (st == TD_OK && r->chat) st = td_detok_flush(&r->detok, &r->text, err);
  if (st == TD_OK) st = show_new(r, true, err);
  end(r, st);
  if (st == TD_OK && r->options->receipt && r->stats.reason != TD_DONE_CANCELED)
    st = write_receipt(r, &args, err);
  r->n_cached = r->session->n_cached;
  return st;
}

// ---- conversations --------------------------------------------------------------------------

static td_status encode(td_runner *r, td_token_ids *ids, td_err *err) {
  td_buf vars = TD_BUF_INIT, text = TD_BUF_INIT;
  td_json_writer w = TD_JSON_WRITER(&vars);
  ids->n = 0;
  td_jw_begin_object(&w, NULL);
  td_conversation_write(&r->conversation, &w, TD_FOR_TEMPLATE);
  td_jw_bool(&w, "add_generation_prompt", true);
  td_run_write_reasoning(r, &w);
  td_jw_end_object(&w);
  td_status st = td_buf_status(&vars, err);
  if (st == TD_OK) st = td_chat_encode(r->chat, td_buf_text(&vars), vars.len, ids, &text, err);
  if (st == TD_OK) st = td_buf_status(&text, err);
  if (st == TD_OK) st = td_run_put_images(r, ids, err);
  r->parser.begins_in_reasoning = st == TD_OK &&
                                  td_output_parser_after(td_buf_text(&text), text.len) ==
                                      TD_REASONING_BEGUN;
  td_buf_free(&vars);
  td_buf_free(&text);
  return st;
}

// Encodes the conversation. Where little room would be left for a response, turns are left out
// until half of the context is free, so that not every turn has to be prefilled again.
static td_status encode_fitting(td_runner *r, td_token_ids *ids, td_err *err) {
  const uint32_t n_ctx = r->session->n_ctx;
  const size_t before = r->conversation.first;
  uint64_t n_room = (uint64_t)r->settings.n_predict;
  if (n_room > n_ctx / 4) n_room = n_ctx / 4;
  td_status st = encode(r, ids, err);
  if (st != TD_OK || ids->n + n_room <= n_ctx) return st;
  while (st == TD_OK && ids->n > n_ctx / 2 && td_conversation_slide(&r->conversation))
    st = encode(r, ids, err);
  if (st != TD_OK) return st;
  if (ids->n > n_ctx) { // the last message alone
    r->conversation.first = before;
    return td_fail(err, TD_EINVAL,
                   "the message makes a prompt of %zu tokens, more than the context of %u: shorten "
                   "it, or start with a larger --ctx-size",
                   ids->n, n_ctx);
  }
  if (r->conversation.first > before) {
    td_info("the context of %u tokens is full: the %u oldest messages are no longer part of it",
            n_ctx, (unsigned)r->conversation.first);
  }
  return TD_OK;
}

// By the model opened here.
static td_status answer_here(td_runner *r, td_err *err) {
  td_token_ids ids = {0};
  td_status st = encode_fitting(r, &ids, err);
  if (st == TD_OK) st = td_run_answer(r, ids.ids, ids.n, err);
  td_token_ids_free(&ids);
  return st;
}

static td_status answer_there(td_runner *r, td_err *err) {
  begin(r);
  td_status st = td_run_answer_server(r, err);
  td_spinner_stop(&r->spinner);
  end(r, st);
  return st;
}

td_status td_run_answer_chat(td_runner *r, td_err *err) {
  r->is_parsed = true;
  td_status st = r->served ? answer_there(r, err) : answer_here(r, err);
  if (st != TD_OK) return st;
  td_message *m = td_conversation_add(&r->conversation, TD_ROLE_ASSISTANT);
  if (!m) return td_fail(err, TD_ENOMEM, "out of memory");
  td_buf_add(&m->content, td_buf_text(&r->said), r->said.len);
  td_buf_add(&m->reasoning, td_buf_text(&r->reasoning), r->reasoning.len);
  st = td_buf_status(&m->content, err);
  return st == TD_OK ? td_buf_status(&m->reasoning, err) : st;
}

td_status td_run_ask(td_runner *r, const char *text, size_t len, td_err *err) {
  td_message *m = td_conversation_add(&r->conversation, TD_ROLE_USER);
  if (!m) return td_fail(err, TD_ENOMEM, "out of memory");
  td_buf_add(&m->content, text, len);
  return td_buf_status(&m->content, err);
}
