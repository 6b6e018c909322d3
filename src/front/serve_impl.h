// src/front/serve_impl.h - what the files of `tandem serve` share: the server's state and its
// handlers. The front owns sockets, templates and tokenization; it never computes a layer.
// Everything runs on the loop's thread but the preparing of prompts, which the loop's thread pool
// does.
#ifndef TD_FRONT_SERVE_IMPL_H
#define TD_FRONT_SERVE_IMPL_H

#include <stdatomic.h>

#include <uv.h>

#include "api/request.h"
#include "front/api_keys.h"
#include "front/backend.h"
#include "front/lane.h"
#include "front/metrics.h"
#include "http/http.h"
#include "model/model.h"
#include "options/options.h"
#include "runtime/session.h"
#include "runtime/trace_file.h"
#include "text/chat.h"

typedef struct {
  const td_options *options; // borrowed
  uv_loop_t loop;
  td_lane templates; // what a chat template may take long over
  uv_signal_t on_term, on_int;
  uv_timer_t drain_timer;
  td_http_server *http;
  td_backend *backend; // NULL while weights are being loaded
  td_chat *chat;
  struct td_job *jobs; // requests that are being answered (serve_generate.c)
  td_metrics metrics;
  td_api_defaults defaults;
  td_api_keys keys;
  uint32_t max_position; // the longest context the model was made for
  char *name;            // what the API calls the model; it may have other names
  int64_t created;       // seconds since 1970
  uint64_t started_ns;
  td_session_opts model_opts; // what the options ask of model and memory, checked
  td_placement placement;     // of the model; model_opts.device is its
  td_kv_dir *kv_dir;          // NULL without --kv-dir
  td_digest kv_model;         // fingerprint for it
  bool is_split;              // prefill and decode are two workers
  uv_work_t weights_work;
  atomic_bool weights_canceled;
  td_trace_file *trace; // NULL without --trace
  int weights_fd;       // of weights in memory; -1: none
  td_err weights_err;
  bool announced; // "listening on" was said
  bool draining, stopping;
  int exit_status;
} td_serve;

td_backend_state td_serve_state(const td_serve *serve);
// Longest context, tokens: the worker's, or the best guess while it loads.
uint32_t td_serve_n_ctx(const td_serve *serve);
// Whether clients may call the model so: a name it is served under, or --model as it was given.
bool td_serve_has_model(const td_serve *serve, const char *name);
// Answers with an error, and the headers that belong to its status.
void td_serve_fail(td_http_exchange *x, const td_api_error *error);
// Answers 503 and returns true while no worker can take requests.
bool td_serve_refuse_unready(td_serve *serve, td_http_exchange *x);

// Ends the server at once, with this exit status if it was 0 so far.
void td_serve_stop(td_serve *serve, int exit_status);
void td_serve_on_state(void *ctx, td_backend_state state);

// serve_start.c
// Loads the weights if they are to be in memory, then starts the worker; both happen while the
// server answers already. What fails ends the server.
void td_serve_start(td_serve *serve);

// serve_generate.c
void td_serve_chat(void *ctx, td_http_exchange *x);
void td_serve_completions(void *ctx, td_http_exchange *x);
// Every request that is being answered ends with an error.
void td_serve_end_jobs(td_serve *serve, const char *why);

// serve_info.c
void td_serve_models(void *ctx, td_http_exchange *x);
void td_serve_model(void *ctx, td_http_exchange *x);
void td_serve_health(void *ctx, td_http_exchange *x);
void td_serve_metrics(void *ctx, td_http_exchange *x);
void td_serve_page(void *ctx, td_http_exchange *x);

// chat.html, made into bytes by the build.
extern const unsigned char td_chat_page[];
extern const size_t td_chat_page_len;

// serve_text.c
void td_serve_tokenize(void *ctx, td_http_exchange *x);
void td_serve_detokenize(void *ctx, td_http_exchange *x);
void td_serve_apply_template(void *ctx, td_http_exchange *x);

// serve_prompt.c
// Tokens of a request's prompts; prompts has one entry a prompt (one for a chat). text, when not
// NULL, gets the rendered chat. Any thread.
td_status td_serve_encode(const td_chat *chat, const td_api_request *request, td_token_ids *prompts,
                          td_buf *text, td_api_error *error);

#endif
