// src/front/serve.c - `tandem serve`: starts and stops the workers and the HTTP server.
// SIGTERM or SIGINT drains: no new connections; running requests continue until --drain-timeout. A
// second signal ends them at once.
#include "front/front.h"
#include "front/serve_impl.h"

#include <malloc.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/thread.h"
#include "base/thread_pool.h"
#include "engine/engine.h"
#include "runtime/command.h"
#include "runtime/gpu_probe.h"

#define MAX_DESCRIPTORS 65536
#define MMAP_BYTES      (1 << 20)

// ---- used by all handlers -------------------------------------------------------------------

td_backend_state td_serve_state(const td_serve *serve) {
  return serve->backend ? td_backend_state_of(serve->backend) : TD_BACKEND_LOADING;
}

uint32_t td_serve_n_ctx(const td_serve *serve) {
  uint32_t n = serve->backend ? td_backend_info(serve->backend).n_ctx : 0;
  if (n == 0) n = (uint32_t)serve->options->ctx_size;
  return n ? n : serve->max_position;
}

static void add_headers(td_http_exchange *x, int status, uint32_t retry_s) {
  char text[16];
  snprintf(text, sizeof text, "%u", retry_s ? retry_s : 1);
  if (status == 429 || status == 503) td_http_add_header(x, "Retry-After", text);
  if (status == 401) td_http_add_header(x, "WWW-Authenticate", "Bearer");
}

void td_serve_fail(td_http_exchange *x, const td_api_error *error) {
  td_serve_fail_as(x, error, NULL);
}

void td_serve_fail_as(td_http_exchange *x, const td_api_error *error, const td_dialect *dialect) {
  td_buf body = TD_BUF_INIT;
  add_headers(x, error->status, error->retry_s);
  if (dialect) {
    dialect->error(&body, error, false);
  } else {
    td_api_error_write(&body, error);
  }
  if (body.failed) {
    td_http_abort(x);
  } else {
    td_http_respond(x, error->status, "application/json", td_buf_text(&body), body.len);
  }
  td_buf_free(&body);
}

// Body of errors detected by src/http.
static void write_error(void *ctx, td_buf *out, int status, const char *message) {
  (void)ctx;
  td_api_error error;
  td_api_fail(&error, status, NULL, NULL, "%s", message);
  td_api_error_write(out, &error);
}

bool td_serve_refuse_unready(td_serve *serve, td_http_exchange *x) {
  if (serve->backend && td_backend_accepts(serve->backend)) return false;
  td_backend_state state = td_serve_state(serve);
  td_api_error error;
  if (state == TD_BACKEND_LOADING) {
    td_api_fail(&error, 503, NULL, NULL, "the model is being loaded");
  } else {
    td_api_fail(&error, 503, NULL, NULL, TD_BACKEND_FAILED_TEXT);
  }
  td_serve_fail(x, &error);
  return true;
}

// ---- checks before the body is received -----------------------------------------------------

static const unsigned route_needs[TD_N_ROUTES] = {
#define X(name, method, path, needs, what) needs,
    TD_ROUTES(X)
#undef X
};

static bool needs(const td_http_exchange *x, unsigned what) {
  return route_needs[td_http_route_of(x)] & what;
}

bool td_serve_authorize(const td_serve *serve, const td_http_exchange *x, td_api_caller *caller) {
  const char *authorization = td_http_header(x, "Authorization");
  const char *key = td_http_header(x, "x-api-key"); // Anthropic's clients
  char bearer[1024];
  if (!authorization && key) {
    snprintf(bearer, sizeof bearer, "Bearer %s", key);
    authorization = bearer;
  }
  return td_api_keys_check(&serve->keys, authorization, td_http_peer(x), caller);
}

static bool is_authorized(const td_serve *serve, const td_http_exchange *x) {
  td_api_caller caller;
  if (needs(x, TD_ROUTE_OPEN)) return true;
  return td_serve_authorize(serve, x, &caller);
}

// Whether the request comes from a page of another site: its Origin is not the Host it was sent to.
static bool is_foreign(const td_http_exchange *x) {
  const char *origin = td_http_header(x, "Origin"), *host = td_http_header(x, "Host");
  if (!origin) return false;
  const char *slashes = strstr(origin, "://");
  return !slashes || !host || strcasecmp(slashes + 3, host) != 0;
}

// A page of another site can post any type except JSON without a CORS preflight. From programs,
// text/plain and a missing type are accepted as JSON too.
static bool is_json(const td_http_exchange *x) {
  const char *type = td_http_header(x, "Content-Type");
  size_t len = type ? strcspn(type, "; \t") : 0;
  if (len == 16 && strncasecmp(type, "application/json", 16) == 0) return true;
  bool is_text = len == 10 && strncasecmp(type, "text/plain", 10) == 0;
  return (len == 0 || is_text) && !is_foreign(x);
}

// Every response carries x-request-id: the request's own, or a new one.
static void add_request_id(td_http_exchange *x) {
  static const char allowed[] =
      "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.:";
  const char *given = td_http_header(x, "x-request-id");
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
  if (is_usable) td_http_add_header(x, "x-request-id", given);
}

static bool check_head(void *ctx, td_http_exchange *x) {
  td_api_error error;
  add_request_id(x);
  ((td_serve *)ctx)->metrics.n_routed[td_http_route_of(x)]++;
  const char *coding = td_http_header(x, "Content-Encoding");
  if (!is_authorized(ctx, x)) {
    td_api_fail(&error, 401, NULL, NULL, "a valid API key is needed: Authorization: Bearer KEY");
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

static void on_http_closed(void *ctx) {
  td_serve *serve = ctx;
  serve->http = NULL;
  atomic_store(&serve->weights_canceled, true);
  if (serve->backend) td_backend_close(serve->backend, NULL, NULL);
  uv_close((uv_handle_t *)&serve->on_term, NULL);
  uv_close((uv_handle_t *)&serve->on_int, NULL);
  uv_close((uv_handle_t *)&serve->drain_timer, NULL);
}

// Clients first: their requests are canceled while the worker still receives messages.
void td_serve_stop(td_serve *serve, int exit_status) {
  if (!serve->exit_status) serve->exit_status = exit_status;
  if (serve->stopping) return;
  serve->stopping = true;
  td_serve_end_jobs(serve, "the server is shutting down");
  td_http_server_close(serve->http, on_http_closed, serve);
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
  size_t n = td_http_server_n_connections(serve->http);
  if (n > 0) td_info("ending; %zu connections open, a second signal ends them at once", n);
  uv_timer_start(&serve->drain_timer, on_deadline, (uint64_t)serve->options->drain_timeout_s * 1000,
                 0);
  td_http_server_drain(serve->http);
}

void td_serve_on_state(void *ctx, td_backend_state state) {
  td_serve *serve = ctx;
  if (state == TD_BACKEND_READY && !serve->announced) {
    serve->announced = true;
    td_info("listening on %s, ready after %.2f s", td_http_server_url(serve->http),
            (double)(td_clock_ns() - serve->started_ns) * 1e-9);
  } else if (state == TD_BACKEND_FAILED) {
    td_error("%s", td_backend_reason(serve->backend));
    td_serve_stop(serve, 1);
  }
}

// ---- startup --------------------------------------------------------------------------------

static const td_http_route routes[] = {
#define X(name, method, path, needs, what)                                                         \
  {method, path, td_serve_##name, ((needs)&TD_ROUTE_ALWAYS) != 0},
    TD_ROUTES(X)
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
                       .on_head = check_head,
                       .write_error = write_error,
                       .on_drained = on_drained};
  opts.loopback_hosts_only = !serve->keys.n && td_http_server_is_loopback(o->host);
  td_status st = td_http_server_open(&serve->http, &serve->loop, &opts, err);
  if (st == TD_OK && !serve->keys.n && !td_http_server_is_loopback(o->host)) {
    td_warn("%s accepts unauthenticated requests from the network: set --api-key",
            td_http_server_url(serve->http));
  }
  return st;
}

static td_status choose_name(td_serve *serve, td_err *err) {
  serve->name = serve->options->model_names.n ? strdup(serve->options->model_names.values[0])
                                              : td_dir_model_name(serve->options->model);
  return serve->name ? TD_OK : td_fail(err, TD_ENOMEM, "out of memory");
}

bool td_serve_has_model(const td_serve *serve, const char *name) {
  const td_str_list *names = &serve->options->model_names;
  for (uint32_t i = 0; i < names->n; i++) {
    if (strcmp(names->values[i], name) == 0) return true;
  }
  return strcmp(name, serve->name) == 0 || strcmp(name, serve->options->model) == 0;
}

// Free bytes of GPU memory; 0: the model runs on the CPU.
static td_status find_gpu(const td_runtime_opts *wish, const td_model *model, uint64_t *out,
                          td_err *err) {
  const td_model_stats stats = td_model_stats_of(model);
  td_gpu_facts gpu;
  td_status st = td_gpu_probe(&gpu, td_placement_need_bytes(wish, &stats), err);
  *out = gpu.free_bytes;
  if (st == TD_OK) return TD_OK;
  *out = 0;
  if (strcmp(wish->device, "auto") == 0) {
    td_info("no usable GPU (%s); running on the CPU", err->msg);
    return TD_OK;
  }
  return st == TD_ENOMEM && wish->experts == TD_EXPERTS_GPU
             ? td_err_prefix(err, "--expert-device gpu")
             : st;
}

// Chooses the device and where experts run; resolves auto.
static td_status choose_placement(td_serve *serve, const td_model_config *config, td_err *err) {
  td_runtime_opts *m = &serve->runtime;
  uint64_t gpu_bytes = 0;
  td_model *model = NULL;
  td_status st = td_placement_check_model(m, config, err);
  if (st != TD_OK) return st;
  if (td_placement_may_use_gpu(m) && !td_model_is_cpu_only(config)) {
    st = td_model_open_shapes(&model, m->model_dir, err); // mapped, so nearly free
    if (st == TD_OK) st = find_gpu(m, model, &gpu_bytes, err);
  }
  if (st == TD_OK) serve->placement = td_placement_of(m, model, gpu_bytes);
  td_model_close(model);
  if (st != TD_OK) return st;
  m->device = serve->placement.device;
  // On a GPU it depends on free GPU memory, and the worker chooses.
  if (!serve->placement.is_discrete && !m->prefill_chunk) {
    m->prefill_chunk = td_engine_prefill_chunk(config);
  }
  return TD_OK;
}

// Chooses one worker, or two for prefill and decode.
static td_status choose_workers(td_serve *serve, td_err *err) {
  const td_auto_on_off how = (td_auto_on_off)serve->options->disaggregate;
  const bool has_gpu = serve->placement.is_discrete;
  uint32_t n_threads = serve->runtime.n_threads;
  serve->is_split = how == TD_AUTO ? !has_gpu && (n_threads ? n_threads : td_cpu_count()) > 1
                                   : how == TD_ON;
  const char *wish = serve->is_split ? "--disaggregate on" : "--kv-dir";
  if (has_gpu && (serve->is_split || serve->options->kv_dir)) {
    return td_fail(err, TD_EINVAL,
                   "%s: with --device %s KV pages are in the GPU's memory, where no other process "
                   "reaches them; leave it out, or give --device cpu",
                   wish, serve->options->device);
  }
  return TD_OK;
}

// Reports errors in the model directory before anything is started.
static td_status read_model(td_serve *serve, td_err *err) {
  td_model_config config;
  td_session_opts session;
  td_status st = td_cmd_session_opts(serve->options, &session, err);
  serve->runtime = session.runtime;
  if (st == TD_OK) st = td_model_config_read(&config, serve->options->model, err);
  if (st == TD_OK) st = td_chat_open(&serve->chat, serve->options->model, err);
  if (st == TD_OK) st = choose_name(serve, err);
  if (st == TD_OK) st = choose_placement(serve, &config, err);
  if (st == TD_OK) st = choose_workers(serve, err);
  if (st == TD_OK) {
    st = td_api_keys_read(&serve->keys, serve->options->api_key, serve->options->api_keys, err);
  }
  if (st == TD_OK) {
    serve->responses = td_response_store_open();
    if (!serve->responses) st = td_fail(err, TD_ENOMEM, "out of memory");
  }
  if (st != TD_OK) return st;
  serve->defaults = (td_api_defaults){.temperature = config.temperature,
                                      .top_p = config.top_p,
                                      .top_k = config.top_k_sampling,
                                      .n_vocab = config.n_vocab};
  serve->max_position = config.max_position;
  return TD_OK;
}

static void open_loop(td_serve *serve) {
  TD_CHECK(uv_loop_init(&serve->loop) == 0);
  // Leaves one of the pool's four threads for tokenization, files and KV pages, however long
  // templates take.
  serve->templates = (td_lane){.loop = &serve->loop, .max_running = 3};
  uv_signal_init(&serve->loop, &serve->on_term);
  uv_signal_init(&serve->loop, &serve->on_int);
  uv_timer_init(&serve->loop, &serve->drain_timer);
  serve->on_term.data = serve->on_int.data = serve->drain_timer.data = serve;
  uv_signal_start(&serve->on_term, on_signal, SIGTERM);
  uv_signal_start(&serve->on_int, on_signal, SIGINT);
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

static void close_half_open(td_serve *serve) {
  uv_close((uv_handle_t *)&serve->on_term, NULL);
  uv_close((uv_handle_t *)&serve->on_int, NULL);
  uv_close((uv_handle_t *)&serve->drain_timer, NULL);
}

static int serve_forever(td_serve *serve) {
  td_err err;
  open_loop(serve);
  td_status st = open_http(serve, &err);
  if (st == TD_OK) {
    td_serve_start(serve);
  } else {
    close_half_open(serve);
  }
  uv_run(&serve->loop, UV_RUN_DEFAULT);
  TD_CHECK(uv_loop_close(&serve->loop) == 0);
  if (serve->weights_fd >= 0) close(serve->weights_fd);
  td_kv_dir_close(serve->kv_dir);
  return st == TD_OK ? serve->exit_status : td_cmd_fail(&err);
}

int td_cmd_serve(const td_options *options) {
  td_serve serve = {
      .options = options, .started_ns = td_clock_ns(), .created = time(NULL), .weights_fd = -1};
  td_err err;
  td_metrics_init(&serve.metrics);
  set_limits();
  td_status st = read_model(&serve, &err);
  if (st == TD_OK && options->trace) {
    st = td_trace_file_open(&serve.trace, options->trace, "front", &err);
  }
  int status = st == TD_OK ? serve_forever(&serve) : td_cmd_fail(&err);
  td_trace_file_close(serve.trace);
  td_chat_close(serve.chat);
  td_api_keys_free(&serve.keys);
  td_response_store_close(serve.responses);
  free(serve.name);
  return status;
}
