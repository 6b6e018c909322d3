// src/cli/inspect_cmd.c - `tandem inspect` and its subcommands `tokens` and `template`.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/fs.h"
#include "cli/cli.h"
#include "cli/inspect.h"
#include "runtime/command.h"
#include "text/chat.h"

#define MAX_INPUT_BYTES (1u << 28)

int td_cmd_inspect(const td_options *o) {
  td_err err;
  td_status st = td_cmd_need_model(o, &err);
  const td_inspect_opts opts = {
      .tensors = o->tensors, .json = o->json, .kv_dtype = td_cmd_kv_dtype(o)};
  if (st == TD_OK) st = td_inspect_model(o->model, &opts, stdout, &err);
  return st == TD_OK ? 0 : td_cmd_fail(&err);
}

static td_status print_text(const td_buf *text, td_err *err) {
  td_status st = td_buf_status(text, err);
  if (st != TD_OK) return st;
  bool whole = fwrite(td_buf_text(text), 1, text->len, stdout) == text->len && fflush(stdout) == 0;
  return whole ? TD_OK : td_fail(err, TD_EIO, "standard output: cannot write");
}

static td_status print_ids(const td_tokenizer *tok, const td_buf *text, td_err *err) {
  td_token_ids ids = {0};
  td_buf out = TD_BUF_INIT;
  td_status st = td_tokenizer_encode(tok, td_buf_text(text), text->len,
                                     TD_TOK_ADD_SPECIAL | TD_TOK_PARSE_SPECIAL, &ids, err);
  td_buf_char(&out, '[');
  for (size_t i = 0; i < ids.n; i++)
    td_buf_printf(&out, "%s%d", i ? "," : "", ids.ids[i]);
  td_buf_str(&out, "]\n");
  if (st == TD_OK) st = print_text(&out, err);
  td_buf_free(&out);
  td_token_ids_free(&ids);
  return st;
}

// Parses "[1, 2, 3]".
static td_status parse_ids(const char *text, td_token_ids *ids, td_err *err) {
  const char *space = " \t\r\n", *at = text + strspn(text, space);
  td_status st = TD_OK;
  bool ok = *at == '[';
  at += ok;
  at += strspn(at, space);
  while (ok && st == TD_OK && *at != ']') {
    char *end;
    long id = strtol(at, &end, 10);
    ok = end != at && id >= 0 && id <= INT32_MAX;
    if (!ok) break;
    st = td_token_ids_push(ids, (int32_t)id, err);
    at = end + strspn(end, space);
    if (*at == ',') {
      at += 1 + strspn(at + 1, space);
      ok = *at != ']';
    } else {
      ok = *at == ']';
    }
  }
  if (ok) at++;
  if (!ok || at[strspn(at, space)])
    return td_fail(err, TD_EFORMAT, "standard input: not a JSON array of token ids");
  return st;
}

static td_status print_decoded(const td_tokenizer *tok, const td_buf *text, td_err *err) {
  td_token_ids ids = {0};
  td_buf out = TD_BUF_INIT;
  td_status st = parse_ids(td_buf_text(text), &ids, err);
  if (st == TD_OK) st = td_tokenizer_decode(tok, ids.ids, ids.n, false, &out, err);
  if (st == TD_OK) st = print_text(&out, err);
  td_buf_free(&out);
  td_token_ids_free(&ids);
  return st;
}

int td_cmd_inspect_tokens(const td_options *o) {
  td_err err;
  td_tokenizer *tok = NULL;
  td_buf text = TD_BUF_INIT;
  td_status st = td_cmd_need_model(o, &err);
  if (st == TD_OK) st = td_tokenizer_open(&tok, o->model, &err);
  if (st == TD_OK) st = td_stdin_read(&text, MAX_INPUT_BYTES, &err);
  if (st == TD_OK) st = o->decode ? print_decoded(tok, &text, &err) : print_ids(tok, &text, &err);
  td_buf_free(&text);
  td_tokenizer_close(tok);
  return st == TD_OK ? 0 : td_cmd_fail(&err);
}

int td_cmd_inspect_template(const td_options *o) {
  td_err err;
  td_buf vars = TD_BUF_INIT, out = TD_BUF_INIT;
  td_status st = TD_OK;
  if (!o->input || (!o->model && !o->template_file)) {
    st = td_fail(&err, TD_EINVAL,
                 "tandem inspect template needs --input FILE and --model DIR or --template FILE");
  } else if (!strcmp(o->input, "-")) {
    st = td_stdin_read(&vars, MAX_INPUT_BYTES, &err);
  } else {
    st = td_file_read(&vars, o->input, MAX_INPUT_BYTES, &err);
  }
  if (st == TD_OK)
    st = td_chat_render(o->template_file, o->model, td_buf_text(&vars), vars.len, &out, &err);
  if (st == TD_OK) st = print_text(&out, &err);
  td_buf_free(&vars);
  td_buf_free(&out);
  return st == TD_OK ? 0 : td_cmd_fail(&err);
}
