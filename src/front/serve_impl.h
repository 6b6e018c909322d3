// src/front/serve_impl.h - shared by the files of `tandem serve`: the server's state and its
// handlers. The front owns sockets, templates and tokenization; it never computes a layer.
// Everything runs on the loop's thread, except preparing prompts and loading weights, which use the
// loop's thread pool.
#pragma once

#include <uv.h>

#include "api/dialects/dialect.h"
#include "api/request.h"
#include "base/json_write.h"
#include "front/api_keys.h"
#include "front/backend.h"
#include "front/hosts.h"
#include "front/lane.h"
#include "front/routes.h"
#include "front/turns.h"
#include "http/http.h"
#include "options/options.h"
#include "runtime/session.h"
#include "runtime/trace_file.h"
#include "text/chat.h"

#define TD_N_END_SIGNALS 3 // that end the server

typedef struct td_serve {
  const td_options *options; // borrowed
  uv_loop_t loop;
  td_lane lane; // requests that wait to be prepared
  uv_signal_t on_signal[TD_N_END_SIGNALS];
  uv_timer_t drain_timer;
  td_http_server *http;
  td_hosts hosts;                 // the models
  struct td_job *jobs;            // active requests (job.h)
  uint64_t n_routed[TD_N_ROUTES]; // HTTP requests whose route was found
  td_api_keys keys;
  td_response_store *responses; // for previous_response_id
  int64_t created;              // seconds since 1970
  uint64_t started_ns;
  td_trace_file *trace; // NULL without --trace
  bool draining, stopping;
  int exit_status;
} td_serve;

// The model that a request's body names; suffix: see td_hosts_find. With one model it is that one,
// whatever the name. NULL: error says why. Any thread.
td_host *td_serve_pick(const td_serve *serve, const td_buf *body, const char *suffix,
                       td_api_error *error);
// The model that ?model=NAME names; without it the first. NULL: error says why.
td_host *td_serve_queried_host(const td_serve *serve, const td_http_exchange *x,
                               td_api_error *error);
// The chat of h; NULL: the exchange has been answered. h NULL: error says why.
const td_chat *td_serve_chat_of(td_host *h, td_http_exchange *x, td_api_error *error);
// 404 that lists the models.
td_status td_serve_unknown_model(const td_serve *serve, const char *name, td_api_error *error);
// The header with the request's id.
#define TD_REQUEST_ID "x-request-id"
// Responds with error, in the form of the API that the request's path belongs to, and the headers
// of its status.
void td_serve_fail(td_http_exchange *x, const td_api_error *error);
// Responds with body of this media type, and frees it.
void td_serve_respond(td_http_exchange *x, int status, const char *type, td_buf *body);
#define TD_JSON_TYPE "application/json"
// seconds since 1970 as 2026-01-31T12:00:00Z.
void td_serve_write_time(td_json_writer *w, const char *key, int64_t seconds);
// system_fingerprint and choices: the choices that a model's rounding depends on, made once for all
// its workers. Writes nothing before they are ready.
void td_serve_write_choices(td_json_writer *w, const td_host *h);
// Whether the request has a valid key, in Authorization or x-api-key, and whose it is.
bool td_serve_authorize(const td_serve *serve, const td_http_exchange *x, td_api_caller *caller);
// Whose stored responses the caller may read: those stored with its key or, where no key is needed,
// everyone's.
uint64_t td_serve_owner(const td_serve *serve, const td_api_caller *caller);
// Whether work that comes back from the lane was canceled; error says why.
bool td_serve_was_canceled(const td_lane_work *work, td_api_error *error);
// Responds 503 and returns true while the model is not ready, unless requests wait for that.
bool td_serve_refuse_unready(td_serve *serve, td_http_exchange *x);

// Shuts the server down at once. exit_status is used if none was set before.
void td_serve_stop(td_serve *serve, int exit_status);
// Logs that a model became ready, and after how many seconds.
void td_serve_on_loaded(td_serve *serve, const td_host *host, double seconds);

// job.c
// Fails all active requests.
void td_serve_end_jobs(td_serve *serve, const char *why);

// The files of front/page, embedded by the build; the last has no name.
typedef struct {
  const char *name;
  const unsigned char *bytes;
  size_t len;
} td_page_file;
extern const td_page_file td_page_files[];
// The rest of openapi.json after the members that info.c writes.
extern const unsigned char td_openapi[];
extern const size_t td_openapi_len;

// prompt.c
// Tokenizes a request's prompts into prompts: one entry per prompt, one for a chat. text (may be
// NULL) receives the rendered chat. turns: the server's own messages in a chat keep the tokens they
// were generated as; NULL: they are tokenized again. pictures: the chat's images, which get their
// places; NULL: none. Any thread.
td_status td_serve_encode(const td_chat *chat, td_turns *turns, const td_api_request *request,
                          td_picture_list *pictures, td_token_ids *prompts, td_buf *text,
                          td_api_error *error);
// Whether a request may name this model (NULL: it names none); suffix: see td_hosts_find.
td_status td_serve_check_model(const td_serve *serve, const char *asked, const char *suffix,
                               td_api_error *error);
// Whether prompts leave room for a token of output.
td_status td_serve_check_context(const td_token_ids *prompts, uint32_t n_prompts, bool is_chat,
                                 uint32_t n_ctx, td_api_error *error);
// Whose what is kept of a request is: its caller's if callers are apart, and its cache_salt's (may
// be NULL). 0: everyone's.
uint64_t td_serve_cache_owner(const td_api_caller *caller, const char *cache_salt, bool is_apart);
// For whom the turns of a request are remembered. They hold reasoning that was not shown: callers
// with keys are always apart.
uint64_t td_serve_turn_owner(const td_serve *serve, const td_api_caller *caller,
                             const td_api_request *request);
// How many of a chat's tokens the next turn's prompt will probably begin with: a reasoning block
// that is opened, or opened and closed, at the end is not repeated there.
uint32_t td_serve_n_lasting(const td_chat *chat, const td_token_ids *prompt);
// Puts the request's constraints into one grammar. Any thread.
td_status td_serve_compose(const td_chat *chat, const td_call_syntax *calls,
                           td_api_request *request, td_reasoning reasoning, td_api_error *error);

// A chat's complete output; all borrowed.
typedef struct {
  const td_digest *place; // of the request (api/turn.h)
  const td_output_parser *how;
  const td_buf *text;
  const td_token_ids *prompt, *ids; // ids: generated
  bool has_end;                     // the last of ids is an end token
} td_generated;
// Keeps it for when the conversation comes back.
void td_serve_keep_turn(td_turns *turns, const td_generated *generated);
