// src/front/serve_impl.h - shared by the files of `tandem serve`: the server's state and its
// handlers. The front owns sockets, templates and tokenization; it never computes a layer.
// Everything runs on the loop's thread, except preparing prompts and loading weights, which use the
// loop's thread pool.
#ifndef TD_FRONT_SERVE_IMPL_H
#define TD_FRONT_SERVE_IMPL_H

#include <stdatomic.h>

#include <uv.h>

#include "api/dialect.h"
#include "api/request.h"
#include "front/api_keys.h"
#include "front/backend.h"
#include "front/lane.h"
#include "front/metrics.h"
#include "front/routes.h"
#include "http/http.h"
#include "model/model.h"
#include "options/options.h"
#include "runtime/session.h"
#include "runtime/trace_file.h"
#include "text/chat.h"

typedef struct {
  const td_options *options; // borrowed
  uv_loop_t loop;
  td_lane templates; // limits concurrent chat templates, which may be slow
  uv_signal_t on_term, on_int;
  uv_timer_t drain_timer;
  td_http_server *http;
  td_backend *backend; // NULL while weights are being loaded
  td_chat *chat;
  struct td_job *jobs; // active requests (completions.c)
  td_metrics metrics;
  td_api_defaults defaults;
  td_api_keys keys;
  td_response_store *responses; // for previous_response_id
  uint32_t max_position;        // the model's maximum context
  char *name;                   // the model's primary name in the API; owned
  int64_t created;              // seconds since 1970
  uint64_t started_ns;
  td_runtime_opts runtime; // checked
  td_placement placement;  // device is also runtime.device
  td_kv_dir *kv_dir;       // NULL without --kv-dir
  td_digest kv_model;      // fingerprint of the KV content
  bool is_split;           // prefill and decode are two workers
  uv_work_t weights_work;
  atomic_bool weights_canceled;
  td_trace_file *trace; // NULL without --trace
  int weights_fd;       // of weights in shared memory; -1: none
  td_err weights_err;
  bool announced; // "listening on" was logged
  bool draining, stopping;
  int exit_status;
} td_serve;

td_backend_state td_serve_state(const td_serve *serve);
// Context size in tokens: the worker's, or an estimate while it loads.
uint32_t td_serve_n_ctx(const td_serve *serve);
// Whether name is valid in requests: one of the model's names, or --model as given.
bool td_serve_has_model(const td_serve *serve, const char *name);
// Responds with error and the headers of its status.
void td_serve_fail(td_http_exchange *x, const td_api_error *error);
// The same in the form of a dialect; NULL: OpenAI's.
void td_serve_fail_as(td_http_exchange *x, const td_api_error *error, const td_dialect *dialect);
// Whether the request has a valid key, in Authorization or x-api-key, and whose it is.
bool td_serve_authorize(const td_serve *serve, const td_http_exchange *x, td_api_caller *caller);
// Responds 503 and returns true while no worker accepts requests.
bool td_serve_refuse_unready(td_serve *serve, td_http_exchange *x);

// Shuts the server down at once. exit_status is used if none was set before.
void td_serve_stop(td_serve *serve, int exit_status);
void td_serve_on_state(void *ctx, td_backend_state state);

// startup.c
// Loads the weights if they are to be in shared memory, then starts the workers. The server accepts
// connections meanwhile. An error shuts it down.
void td_serve_start(td_serve *serve);

// completions.c
// Fails all active requests.
void td_serve_end_jobs(td_serve *serve, const char *why);

// chat.html, embedded by the build.
extern const unsigned char td_chat_page[];
extern const size_t td_chat_page_len;

// prompt.c
// Tokenizes a request's prompts into prompts: one entry per prompt, one for a chat. text (may be
// NULL) receives the rendered chat. Any thread.
td_status td_serve_encode(const td_chat *chat, const td_api_request *request, td_token_ids *prompts,
                          td_buf *text, td_api_error *error);

#endif
