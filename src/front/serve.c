// src/front/serve.c - `tandem serve`: starts and stops the workers and the HTTP server.
// SIGTERM, SIGINT or SIGHUP drains: no new connections; running requests continue until
// --drain-timeout. A second signal ends them at once.
#include "front/front.h"
#include "front/serve_impl.h"

#include <errno.h>
#include <malloc.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/env.h"
#include "base/log.h"
#include "base/mem_info.h"
#include "base/thread.h"
#include "runtime/command.h"

#define MAX_DESCRIPTORS 65536
#define MMAP_BYTES      (1 << 20)
#define ENDING          "the server is shutting down"

// ---- used by all handlers -------------------------------------------------------------------

// Sends state, such as "READY=1", to the service manager, if it has named a socket (systemd's
// sd_notify).
static void notify(const char *state) {
  const char *path = td_env("NOTIFY_SOCKET");
  struct sockaddr_un to = {.sun_family = AF_UNIX};
  const size_t len = path ? strlen(path) : 0;
  if (len < 2 || len >= sizeof to.sun_path) return;
  memcpy(to.sun_path, path, len);
  if (path[0] == '@') to.sun_path[0] = '\0'; // an abstract address
  const int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  const socklen_t n_bytes = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + len);
  if (fd < 0 || sendto(fd, state, strlen(state), MSG_NOSIGNAL, (struct sockaddr *)&to, n_bytes) < 0)
    td_warn("%s: the service manager cannot be told %s: %s", path, state, strerror(errno));
  if (fd >= 0) close(fd);
}

static void write_as_addressed(td_http_exchange *x, td_buf *out, const td_api_error *error) {
  const bool is_anthropic = td_http_header(x, "anthropic-version");
  const td_dialect *dialect = td_dialect_of_path(td_http_path(x), is_anthropic);
  td_api_error named = *error;
  td_buf id = TD_BUF_INIT;
  td_http_added_header(x, TD_REQUEST_ID, &id);
  named.request_id = td_buf_text(&id);
  if (dialect)
    dialect->error(out, &named, false);
  else
    td_api_error_write(out, &named);
  td_buf_free(&id);
}

void td_serve_fail(td_http_exchange *x, const td_api_error *error) {
  td_buf body = TD_BUF_INIT;
  char text[16];
  snprintf(text, sizeof text, "%u", error->retry_s ? error->retry_s : 1);
  if (error->status == 429 || error->status == 503) td_http_add_header(x, "Retry-After", text);
  if (error->status == 401) td_http_add_header(x, "WWW-Authenticate", "Bearer");
  write_as_addressed(x, &body, error);
  if (body.failed)
    td_http_abort(x);
  else
    td_http_respond(x, error->status, "application/json", td_buf_text(&body), body.len);
  td_buf_free(&body);
}

void td_serve_respond(td_http_exchange *x, int status, const char *type, td_buf *body) {
  if (body->failed)
    td_http_error(x, 503, "out of memory");
  else
    td_http_respond(x, status, type, td_buf_text(body), body->len);
  td_buf_free(body);
}

static void add_request_id(void *ctx, td_http_exchange *x);

// Body of errors detected by src/http, which may be before the head is complete.
static void write_error(void *ctx, td_http_exchange *x, td_buf *out, int status,
                        const char *message) {
  td_api_error error;
  td_buf id = TD_BUF_INIT;
  if (!td_http_added_header(x, TD_REQUEST_ID, &id)) add_request_id(ctx, x);
  td_buf_free(&id);
  td_api_fail(&error, status, NULL, NULL, "%s", message);
  write_as_addressed(x, out, &error);
}

bool td_serve_refuse_unready(td_serve *serve, td_http_exchange *x) {
  const td_host *h = &serve->hosts.all[0];
  if (serve->hosts.is_on_demand || td_host_accepts(h)) return false;
  td_api_error error;
  if (td_host_state_of(h) == TD_HOST_LOADING)
    td_api_fail(&error, 503, NULL, NULL, "the model is being loaded");
  else
    td_api_fail(&error, 503, NULL, NULL, TD_BACKEND_FAILED_TEXT);
  td_serve_fail(x, &error);
  return true;
}

bool td_serve_was_canceled(const td_lane_work *work, td_api_error *error) {
  if (!atomic_load(&work->is_canceled)) return false;
  if (work->is_over) {
    td_api_fail(error, 400, NULL, NULL,
                "reading the request takes more than %d s of CPU time: shorten it",
                TD_LANE_MAX_CPU_S);
  } else {
    td_api_fail(error, 503, NULL, NULL, ENDING);
  }
  return true;
}

td_status td_serve_unknown_model(const td_serve *serve, const char *name, td_api_error *error) {
  char names[160];
  td_hosts_list(&serve->hosts, names, sizeof names);
  return td_api_fail(error, 404, "model", "model_not_found",
                     "model '%.100s' not found: this server has %s", name, names);
}

td_host *td_serve_pick(const td_serve *serve, const td_buf *body, const char *suffix,
                       td_api_error *error) {
  const td_hosts *hosts = &serve->hosts;
  char *name = NULL;
  td_host *host = NULL;
  if (hosts->n == 1) return &hosts->all[0]; // a wrong name is an error of the whole request's check
  if (td_api_parse_model(&name, td_buf_text(body), body->len, error) != TD_OK) return NULL;
  if (name) {
    host = td_hosts_find(hosts, name, suffix);
    if (!host) td_serve_unknown_model(serve, name, error);
  } else {
    char names[160];
    td_hosts_list(hosts, names, sizeof names);
    td_api_wrong(error, "model", "is missing: this server has %s", names);
  }
  free(name);
  return host;
}

// ---- checks before the body is received -----------------------------------------------------

static const unsigned route_needs[TD_N_ROUTES] = {
#define X(name, method, path, needs, what) needs,
    TD_ROUTES(X)
#undef X
};

// Routes behind those are of endpoints that are not offered.
static bool is_offered(const td_http_exchange *x) {
  return td_http_route_of(x) < TD_N_ROUTES;
}

static bool needs(const td_http_exchange *x, unsigned what) {
  return is_offered(x) && route_needs[td_http_route_of(x)] & what;
}

void td_serve_write_time(td_json_writer *w, const char *key, int64_t seconds) {
  char text[40];
  time_t when = (time_t)seconds;
  struct tm tm;
  gmtime_r(&when, &tm);
  strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &tm);
  td_jw_str(w, key, text);
}

bool td_serve_authorize(const td_serve *serve, const td_http_exchange *x, td_api_caller *caller) {
  const char *authorization = td_http_header(x, "Authorization");
  const char *key = td_http_header(x, "x-api-key"); // Anthropic's clients
  if (!key) key = td_http_header(x, "api-key");     // Azure's
  char bearer[1024];
  if (!authorization && key) {
    snprintf(bearer, sizeof bearer, "Bearer %s", key);
    authorization = bearer;
  }
  return td_api_keys_check(&serve->keys, authorization, td_http_peer(x), caller);
}

uint64_t td_serve_owner(const td_serve *serve, const td_api_caller *caller) {
  return serve->keys.n ? caller->tenant + 1 : 0;
}

// Whether the request comes from a page of another site: its Origin is not the Host it was sent to.
static bool is_foreign(const td_http_exchange *x) {
  const char *origin = td_http_header(x, "Origin"), *host = td_http_header(x, "Host");
  if (!origin) return false;
  const char *slashes = strstr(origin, "://");
  return !slashes || !host || strcasecmp(slashes + 3, host) != 0;
}

static bool is_type(const char *type, size_t len, const char *name) {
  return len == strlen(name) && strncasecmp(type, name, len) == 0;
}

// A page of another site can post any type except JSON without a CORS preflight. From programs,
// what they send where they are told no type is accepted as JSON, too: curl calls it a form, as it
// does in Ollama's documentation.
static bool is_json(const td_http_exchange *x) {
  const char *type = td_http_header(x, "Content-Type");
  const size_t len = type ? strcspn(type, "; \t") : 0;
  static const char *const untold[] = {"text/plain", "application/x-www-form-urlencoded"};
  if (is_type(type, len, "application/json")) return true;
  bool is_untold = len == 0;
  for (size_t i = 0; i < TD_COUNT(untold); i++)
    is_untold |= is_type(type, len, untold[i]);
  return is_untold && !is_foreign(x);
}

// The request's own id, or a new one; Anthropic's header of it is request-id.
static void add_request_id(void *ctx, td_http_exchange *x) {
  (void)ctx;
  static const char allowed[] =
      "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.:";
  const char *given = td_http_header(x, TD_REQUEST_ID);
  char fresh[40];
  bool is_usable = given && given[0] && strlen(given) <= 128 && !given[strspn(given, allowed)];
  unsigned char random[16];
  if (!is_usable && getrandom(random, sizeof random, 0) == sizeof random) {
    size_t n = (size_t)snprintf(fresh, sizeof fresh, "req_");
    for (size_t i = 0; i < sizeof random; i++)
      n += (size_t)snprintf(fresh + n, sizeof fresh - n, "%02x", random[i]);
    given = fresh;
    is_usable = true;
  }
  if (!is_usable) return;
  td_http_add_header(x, TD_REQUEST_ID, given);
  td_http_add_header(x, "request-id", given);
}

static bool check_head(void *ctx, td_http_exchange *x) {
  td_api_error error;
  if (is_offered(x)) ((td_serve *)ctx)->n_routed[td_http_route_of(x)]++;
  const char *coding = td_http_header(x, "Content-Encoding");
  td_api_caller caller;
  if (!needs(x, TD_ROUTE_OPEN) && !td_serve_authorize(ctx, x, &caller)) {
    td_api_fail(
        &error, 401, NULL, NULL,
        "a valid API key is needed: Authorization: Bearer KEY, x-api-key: KEY or api-key: KEY");
  } else if (!is_offered(x)) { // before a body is received, whatever it is
    td_serve_not_offered(ctx, x);
    return false;
  } else if (strcmp(td_http_method(x), "POST") != 0) {
    return true;
  } else if (coding && strcasecmp(coding, "identity") != 0) {
    td_api_fail(&error, 415, NULL, NULL, "compressed bodies are not supported");
  } else if (!is_json(x)) {
    td_api_fail(&error, 400, NULL, NULL, "Content-Type must be application/json");
  } else {
    return !needs(x, TD_ROUTE_WORKER) || !td_serve_refuse_unready(ctx, x);
  }
  td_serve_fail(x, &error);
  return false;
}

// ---- shutdown -------------------------------------------------------------------------------

static void close_handles(td_serve *serve) {
  for (unsigned i = 0; i < TD_N_END_SIGNALS; i++)
    uv_close((uv_handle_t *)&serve->on_signal[i], NULL);
  uv_close((uv_handle_t *)&serve->drain_timer, NULL);
  td_lane_close(&serve->lane);
}

static void on_http_closed(void *ctx) {
  td_serve *serve = ctx;
  serve->http = NULL;
  td_hosts_shut_down(&serve->hosts);
  close_handles(serve);
}

static void on_lane_stopped(td_lane *lane) {
  td_serve *serve = (td_serve *)((char *)lane - offsetof(td_serve, lane));
  td_http_server_close(serve->http, on_http_closed, serve);
}

// Clients first: their requests are canceled while the worker still receives messages.
void td_serve_stop(td_serve *serve, int exit_status) {
  if (!serve->exit_status) serve->exit_status = exit_status;
  if (serve->stopping) return;
  serve->stopping = true;
  td_serve_end_jobs(serve, ENDING);
  td_lane_stop(&serve->lane, on_lane_stopped);
}

static void on_drained(void *ctx) {
  td_serve_stop(ctx, 0);
}

static void on_deadline(uv_timer_t *timer) {
  td_serve *serve = timer->data;
  td_warn("requests still running after %lld s are ended",
          (long long)serve->options->drain_timeout_s);
  td_serve_stop(serve, 0);
}

static void on_signal(uv_signal_t *handle, int signal_number) {
  td_serve *serve = handle->data;
  if (serve->draining) {
    td_serve_stop(serve, 128 + signal_number);
    return;
  }
  serve->draining = true;
  notify("STOPPING=1");
  size_t n = td_http_server_n_connections(serve->http);
  if (n > 0) td_info("ending; %zu connections open, a second signal ends them at once", n);
  uv_timer_start(&serve->drain_timer, on_deadline, (uint64_t)serve->options->drain_timeout_s * 1000,
                 0);
  td_http_server_drain(serve->http);
}

void td_serve_on_loaded(td_serve *serve, const td_host *host, double seconds) {
  if (host->was_ready || serve->options->models) {
    td_info("%s: loaded in %.2f s", host->name, seconds);
  } else {
    td_info("listening on %s, ready after %.2f s", td_http_server_url(serve->http),
            (double)(td_clock_ns() - serve->started_ns) * 1e-9);
    notify("READY=1");
  }
}

// ---- startup --------------------------------------------------------------------------------

static const td_http_route routes[] = {
#define X(name, method, path, needs, what)                                                         \
  {method, path, td_serve_##name, ((needs)&TD_ROUTE_ALWAYS) != 0},
    TD_ROUTES(X)
#undef X
#define X(method, path, why) {method, path, td_serve_not_offered, false},
        TD_NOT_OFFERED(X)
#undef X
};

static td_status open_http(td_serve *serve, td_err *err) {
  const td_options *o = serve->options;
  td_http_opts opts = {.host = o->host,
                       .port = (uint16_t)o->port,
                       .routes = routes,
                       .n_routes = TD_COUNT(routes),
                       .cors = serve->options->cors,
                       .ctx = serve,
                       .on_request = add_request_id,
                       .on_head = check_head,
                       .write_error = write_error,
                       .on_drained = on_drained};
  // A body takes up to six times its size while it becomes a prompt.
  const uint64_t memory = td_memory_limit_bytes(), one = 32u << 20, all = 256u << 20;
  opts.limits.max_body_bytes = memory / 16 < one ? memory / 16 : one;
  opts.max_bodies_bytes = memory / 8 < all ? memory / 8 : all;
  opts.loopback_hosts_only = !serve->keys.n && td_http_server_is_loopback(o->host);
  td_status st = td_http_server_open(&serve->http, &serve->loop, &opts, err);
  if (st == TD_OK && !serve->keys.n && !td_http_server_is_loopback(o->host)) {
    td_warn("%s accepts unauthenticated requests from the network: set --api-key",
            td_http_server_url(serve->http));
  }
  return st;
}

// Reports errors in the models' directories before anything is started.
static td_status read_models(td_serve *serve, td_err *err) {
  const td_options *o = serve->options;
  td_status st = td_hosts_open(&serve->hosts, serve, err);
  if (st == TD_OK) st = td_api_keys_read(&serve->keys, o->api_key, o->api_keys, err);
  if (st == TD_OK) {
    serve->responses = td_response_store_open();
    if (!serve->responses) st = td_fail(err, TD_ENOMEM, "out of memory");
  }
  return st;
}

static td_status open_loop(td_serve *serve, td_err *err) {
  const int error = uv_loop_init(&serve->loop);
  if (error) {
    return td_fail(err, TD_EIO, "cannot make an event loop: %s%s", uv_strerror(error),
                   error == UV_EMFILE ? ": allow more of them (ulimit -n)" : "");
  }
  if (td_lane_open(&serve->lane, &serve->loop, err) != TD_OK) {
    TD_CHECK(uv_loop_close(&serve->loop) == 0);
    return err->code;
  }
  for (unsigned i = 0; i < TD_N_END_SIGNALS; i++) {
    static const int numbers[TD_N_END_SIGNALS] = {SIGTERM, SIGINT, SIGHUP};
    struct sigaction now;
    uv_signal_init(&serve->loop, &serve->on_signal[i]);
    serve->on_signal[i].data = serve;
    const bool is_ignored = sigaction(numbers[i], NULL, &now) == 0 && now.sa_handler == SIG_IGN;
    if (numbers[i] == SIGHUP && is_ignored) continue; // nohup
    uv_signal_start(&serve->on_signal[i], on_signal, numbers[i]);
  }
  uv_timer_init(&serve->loop, &serve->drain_timer);
  serve->drain_timer.data = serve;
  return TD_OK;
}

static void set_limits(void) {
  // Setting it disables glibc's dynamic threshold, so that large bodies are always unmapped when
  // freed.
  mallopt(M_MMAP_THRESHOLD, MMAP_BYTES);
  struct rlimit limit;
  if (getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur < MAX_DESCRIPTORS) {
    limit.rlim_cur = limit.rlim_max < MAX_DESCRIPTORS ? limit.rlim_max : MAX_DESCRIPTORS;
    setrlimit(RLIMIT_NOFILE, &limit);
  }
  // libuv's pool threads get the process's stack limit, or 2 MiB if it is unlimited.
  if (getrlimit(RLIMIT_STACK, &limit) == 0 && limit.rlim_cur > TD_STACK_BYTES) {
    limit.rlim_cur = TD_STACK_BYTES;
    setrlimit(RLIMIT_STACK, &limit);
  }
}

// With --models nothing is loaded yet, and requests are served all the same.
static void announce_models(const td_serve *serve) {
  char names[1024];
  if (!serve->options->models) return;
  td_hosts_list(&serve->hosts, names, sizeof names);
  td_info("listening on %s, models to load on demand: %s", td_http_server_url(serve->http), names);
  notify("READY=1");
}

static int serve_forever(td_serve *serve) {
  td_err err;
  td_status st = open_loop(serve, &err);
  if (st != TD_OK) return td_cmd_fail(&err);
  st = open_http(serve, &err);
  if (st == TD_OK) {
    td_hosts_start(&serve->hosts, &serve->loop);
    announce_models(serve);
  } else {
    close_handles(serve);
  }
  uv_run(&serve->loop, UV_RUN_DEFAULT);
  TD_CHECK(uv_loop_close(&serve->loop) == 0);
  return st == TD_OK ? serve->exit_status : td_cmd_fail(&err);
}

int td_cmd_serve(const td_options *options) {
  td_serve serve = {.options = options, .started_ns = td_clock_ns(), .created = time(NULL)};
  td_err err;
  set_limits();
  td_status st = read_models(&serve, &err);
  if (st == TD_OK && options->trace)
    st = td_trace_file_open(&serve.trace, options->trace, "front", &err);
  int status = st == TD_OK ? serve_forever(&serve) : td_cmd_fail(&err);
  td_trace_file_close(serve.trace);
  td_hosts_close(&serve.hosts);
  td_api_keys_free(&serve.keys);
  td_response_store_close(serve.responses);
  return status;
}
