// src/runtime/embed.c - implements include/tandem.h on top of a session.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/session.h"
#include "tandem.h"
#include "text/chat.h"

struct tandem {
  td_session *session;
  td_chat *chat;
};

typedef struct {
  const tandem_request *request;
  td_detok detok;
  td_buf text;
  td_status status; // of decoding the tokens
  td_err err;
} generation;

static int report(td_status st, const td_err *err, char *error, size_t error_len) {
  if (st != TD_OK && error_len) snprintf(error, error_len, "%s", err->msg);
  return st;
}

int tandem_open(tandem **out, const tandem_opts *opts, char *error, size_t error_len) {
  td_err err;
  *out = NULL;
  tandem *t = calloc(1, sizeof *t);
  if (!t) return report(td_fail(&err, TD_ENOMEM, "out of memory"), &err, error, error_len);
  td_session_opts session = {.runtime = {.model_dir = opts->model_dir,
                                         .device = opts->device,
                                         .n_threads = opts->n_threads,
                                         .ctx_size = opts->ctx_size,
                                         .prefill_chunk = opts->prefill_chunk}};
  td_status st = td_chat_open(&t->chat, opts->model_dir, &err);
  if (st == TD_OK) st = td_session_open(&t->session, &session, &err);
  if (st != TD_OK) {
    tandem_close(t);
    return report(st, &err, error, error_len);
  }
  *out = t;
  return 0;
}

void tandem_close(tandem *t) {
  if (!t) return;
  td_session_close(t->session);
  td_chat_close(t->chat);
  free(t);
}

// Passes the decoded text to on_text; false: stop.
static bool hand_on(generation *g) {
  const tandem_request *r = g->request;
  bool stop = g->text.len && r->on_text && r->on_text(r->ctx, td_buf_text(&g->text), g->text.len);
  td_buf_clear(&g->text);
  return !stop;
}

static bool on_token(void *ctx, int32_t id, float logprob) {
  (void)logprob;
  generation *g = ctx;
  g->status = td_detok_feed(&g->detok, id, &g->text, &g->err);
  return g->status == TD_OK && hand_on(g);
}

static td_status encode(const tandem *t, const tandem_request *r, td_token_ids *ids, td_err *err) {
  if (r->messages) return td_chat_encode(t->chat, r->messages, strlen(r->messages), ids, NULL, err);
  if (r->prompt) return td_chat_encode_plain(t->chat, r->prompt, strlen(r->prompt), true, ids, err);
  return td_fail(err, TD_EINVAL, "a request needs messages or a prompt");
}

static td_status generate(tandem *t, const tandem_request *r, const td_token_ids *ids,
                          td_generate_stats *stats, td_err *err) {
  generation g = {.request = r};
  td_detok_init(&g.detok, td_chat_tokenizer(t->chat), true);
  td_generate_args args = {.prompt = ids->ids,
                           .n_prompt = (uint32_t)ids->n,
                           .max_tokens = r->max_tokens ? r->max_tokens : UINT32_MAX,
                           .tok = td_chat_tokenizer(t->chat),
                           .sampling = {.temperature = r->temperature,
                                        .top_p = r->top_p,
                                        .top_k = r->top_k,
                                        .seed = r->seed},
                           .on_token = on_token,
                           .ctx = &g};
  td_status st = td_session_generate(t->session, &args, stats, err);
  if (st == TD_OK && g.status != TD_OK) {
    *err = g.err;
    st = g.status;
  }
  if (st == TD_OK) st = td_detok_flush(&g.detok, &g.text, err);
  if (st == TD_OK) hand_on(&g);
  td_detok_free(&g.detok);
  td_buf_free(&g.text);
  return st;
}

int tandem_generate(tandem *t, const tandem_request *request, tandem_result *result, char *error,
                    size_t error_len) {
  td_err err;
  td_token_ids ids = {0};
  td_generate_stats stats = {0};
  td_status st = encode(t, request, &ids, &err);
  if (st == TD_OK) st = generate(t, request, &ids, &stats, &err);
  *result = (tandem_result){.n_prompt = stats.n_prompt,
                            .n_reused = stats.n_reused,
                            .n_output = stats.n_output,
                            .prefill_s = stats.prefill_s,
                            .decode_s = stats.decode_s,
                            .stopped = stats.reason == TD_DONE_STOP};
  td_token_ids_free(&ids);
  return report(st, &err, error, error_len);
}
