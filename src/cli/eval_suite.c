// src/cli/eval_suite.c - `tandem eval chat`: generates greedy responses to a suite of questions and
// compares them with the expected ones.
#include <stdio.h>
#include <string.h>

#include "base/json_write.h"
#include "base/log.h"
#include "cli/cli.h"
#include "cli/suite.h"
#include "runtime/command.h"
#include "runtime/session.h"
#include "text/chat.h"

#define MAX_KINDS 64

typedef struct {
  const char *kind; // borrowed from the suite
  unsigned n, n_right;
} tally;

typedef struct {
  const td_options *options;
  td_session *session;
  td_chat *chat;
  td_suite suite;
  tally kinds[MAX_KINDS];
  size_t n_kinds;
  td_token_ids answer;
  td_err err;
} eval;

static bool keep_token(void *ctx, int32_t id, float logprob) {
  (void)logprob;
  eval *e = ctx;
  return td_token_ids_push(&e->answer, id, &e->err) == TD_OK;
}

static td_status answer(eval *e, const td_question *q, td_buf *text, td_err *err) {
  td_token_ids prompt = {0};
  td_status st = td_chat_encode(e->chat, q->vars, strlen(q->vars), &prompt, NULL, err);
  td_generate_args args = {.prompt = prompt.ids,
                           .n_prompt = (uint32_t)prompt.n,
                           .max_tokens = (uint32_t)e->options->n_predict,
                           .tok = td_chat_tokenizer(e->chat),
                           .on_token = keep_token,
                           .ctx = e};
  td_generate_stats stats;
  e->answer.n = 0;
  if (st == TD_OK) st = td_session_generate(e->session, &args, &stats, err);
  if (st == TD_OK) {
    st = td_tokenizer_decode(td_chat_tokenizer(e->chat), e->answer.ids, e->answer.n, true, text,
                             err);
  }
  td_token_ids_free(&prompt);
  return st;
}

static tally *tally_of(eval *e, const char *kind) {
  for (size_t i = 0; i < e->n_kinds; i++)
    if (!strcmp(e->kinds[i].kind, kind)) return &e->kinds[i];
  size_t idx = e->n_kinds < MAX_KINDS ? e->n_kinds++ : MAX_KINDS - 1;
  e->kinds[idx].kind = kind;
  return &e->kinds[idx];
}

static td_status run_suite(eval *e, td_err *err) {
  td_buf text = TD_BUF_INIT;
  td_status st = TD_OK;
  for (size_t i = 0; i < e->suite.n && st == TD_OK; i++) {
    const td_question *q = &e->suite.questions[i];
    td_buf_clear(&text);
    st = answer(e, q, &text, err);
    if (st != TD_OK) break;
    bool right = td_question_matches(q, td_buf_text(&text));
    tally *t = tally_of(e, q->kind);
    t->n++;
    t->n_right += right;
    if (!right) {
      td_debug("question %zu (%s): \"%s\", expected \"%s\"", i + 1, q->kind, td_buf_text(&text),
               q->expect[0]);
    }
  }
  td_buf_free(&text);
  return st;
}

static void print_scores(const eval *e) {
  unsigned n = 0, n_right = 0;
  td_buf text = TD_BUF_INIT;
  td_json_writer w = TD_JSON_WRITER(&text);
  td_jw_add(&w, "{'kinds': [");
  for (size_t i = 0; i < e->n_kinds; i++) {
    const tally *t = &e->kinds[i];
    n += t->n;
    n_right += t->n_right;
    if (!e->options->json) printf("%-16s %4u of %4u\n", t->kind, t->n_right, t->n);
    td_jw_add(&w, "{'kind': %s, 'right': %u, 'questions': %u}", t->kind, t->n_right, t->n);
  }
  td_jw_add(&w, "], 'right': %u, 'questions': %u}", n_right, n);
  if (e->options->json)
    puts(td_buf_text(&text));
  else
    printf("%-16s %4u of %4u, %.1f %%\n", "all", n_right, n, 100.0 * n_right / n);
  td_buf_free(&text);
}

static td_status open_eval(eval *e, td_err *err) {
  const td_options *o = e->options;
  td_session_opts opts;
  td_status st = td_cmd_session_opts(o, &opts, err);
  if (st == TD_OK && !o->suite) st = td_fail(err, TD_EINVAL, "tandem eval chat needs --suite FILE");
  if (st == TD_OK) st = td_suite_read(&e->suite, o->suite, err);
  if (st == TD_OK) st = td_chat_open(&e->chat, o->model, err);
  return st == TD_OK ? td_session_open(&e->session, &opts, err) : st;
}

int td_cmd_eval_chat(const td_options *o) {
  eval e = {.options = o};
  td_err err;
  td_status st = open_eval(&e, &err);
  if (st == TD_OK) st = run_suite(&e, &err);
  if (st == TD_OK) print_scores(&e);
  td_session_close(e.session);
  td_chat_close(e.chat);
  td_suite_free(&e.suite);
  td_token_ids_free(&e.answer);
  return st == TD_OK ? 0 : td_cmd_fail(&err);
}
