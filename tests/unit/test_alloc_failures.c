// tests/unit/test_alloc_failures.c - every allocation fails once. A run without failures lists the
// places that allocate (support/failing_alloc.h); then, for each, the first and the second
// allocation there fail in a process of their own. Expected: an error that says what is missing, or
// the same result as without the failure; no crash, nothing leaked, and the next request works.
// CTest: slow no-tsan
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "api/calls/call_syntax.h"
#include "api/dialects/dialect.h"
#include "api/request.h"
#include "base/fs.h"
#include "base/status.h"
#include "front/front.h"
#include "image/image.h"
#include "kv/pool.h"
#include "model/quantize/quantize.h"
#include "options/options.h"
#include "runtime/command.h"
#include "shm/channel.h"
#include "support/checkpoint.h"
#include "support/failing_alloc.h"
#include "support/folder.h"
#include "tandem.h"
#include "unit/sanitized.h"
#include "unit/testing.h"
#include "worker/args.h"
#include "worker/worker.h"

#define MAX_TEXT (1u << 16)
// Of the places every so many are tried, and of their allocations so many fail.
enum { EACH = IS_ASAN ? 3 : 1, N_AT_PLACE = IS_ASAN ? 1 : 2 };

// What child processes report.
typedef struct {
  size_t n_sites;
  fa_site sites[4096];
  char expected[MAX_TEXT]; // the result without a failure; empty: not known yet
  char text[MAX_TEXT];     // the result
  bool was_reached;        // the allocation that was to fail
} report;

static report *shared;
static char dir[] = "/tmp/tandem-alloc-XXXXXX";
static char model_dir[64], socket_path[64], kv_path[64], log_path[64], trace_path[64];

// ---- one run in a process of its own ------------------------------------------------------------

typedef struct {
  void (*prepare)(void); // before the process starts; may be NULL
  // In the process, whose allocations are counted and fail. Returns 0 if all is as expected.
  int (*run)(void);
  // Meanwhile in the test program; returns 0 if all is as expected. May be NULL.
  int (*peer)(pid_t pid);
} scenario;

_Noreturn static void run_child(const scenario *s, fa_site site, uint32_t idx) {
  int log = open(log_path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
  int trace = open(trace_path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  dup2(log, STDERR_FILENO);
  close(log);
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  static const int ends[] = {SIGSEGV, SIGABRT, SIGBUS, SIGFPE, SIGILL};
  for (size_t i = 0; i < TD_COUNT(ends); i++) // cmocka's handlers would go on with the next test
    signal(ends[i], SIG_DFL);
  fa_begin(site, idx, trace);
  int rc = s->run();
  fa_end();
  shared->was_reached = fa_has_failed();
  if (fa_print_leaks() > 0) rc = 1;
  if (!site.caller) {
    const fa_site *sites;
    shared->n_sites = fa_sites(&sites);
    memcpy(shared->sites, sites, shared->n_sites * sizeof *sites);
  }
  _exit(rc != 0);
}

static bool log_has(const char *word) {
  char line[1024];
  bool found = false;
  FILE *f = fopen(log_path, "r");
  while (f && fgets(line, sizeof line, f))
    found |= strstr(line, word) != NULL;
  if (f) fclose(f);
  return found;
}

static void print_file(const char *path) {
  char line[1024];
  FILE *f = fopen(path, "r");
  while (f && fgets(line, sizeof line, f))
    fputs(line, stderr);
  if (f) fclose(f);
}

// True: as expected.
static bool try_with(const scenario *s, fa_site site, uint32_t idx) {
  int status;
  shared->text[0] = '\0';
  if (s->prepare) s->prepare();
  const pid_t pid = fork();
  assert_true(pid >= 0);
  if (pid == 0) run_child(s, site, idx);
  const int peer = s->peer ? s->peer(pid) : 0;
  assert_int_equal(waitpid(pid, &status, 0), pid);
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0 && peer == 0) return true;
  fprintf(stderr, "---- the process ended with %s %d:\n", WIFEXITED(status) ? "status" : "signal",
          WIFEXITED(status) ? WEXITSTATUS(status) : WTERMSIG(status));
  print_file(log_path);
  print_file(trace_path);
  return false;
}

static void sweep(const scenario *s, size_t min_sites) {
  int n_bad = 0, n_reached = 0;
  shared->expected[0] = '\0';
  assert_true(try_with(s, (fa_site){0}, 0));
  memcpy(shared->expected, shared->text, sizeof shared->expected);
  assert_true(shared->expected[0]);
  const size_t n = shared->n_sites;
  assert_true(n >= min_sites);
  for (size_t i = 0; i < n; i += EACH) {
    for (uint32_t idx = 0; idx < N_AT_PLACE; idx++) {
      n_bad += !try_with(s, shared->sites[i], idx);
      if (!shared->was_reached) break;
      n_reached++;
    }
  }
  print_message("%zu places, %d allocations failed\n", n, n_reached);
  assert_int_equal(n_bad, 0);
  assert_true((size_t)n_reached >= min_sites / EACH);
}

// Fails unless the failure is one of memory that says so.
static int check_error(int code, const char *error) {
  if (code == TD_ENOMEM && strstr(error, "memory")) return 0;
  fprintf(stderr, "error %d is not about memory: %s\n", code, error);
  return 1;
}

static int check_result(void) {
  if (!shared->expected[0] || strcmp(shared->text, shared->expected) == 0) return 0;
  fprintf(stderr, "the result is not what it is without a failure: %s\n", shared->text);
  return 1;
}

// ---- the library: open a model, generate --------------------------------------------------------

static int add_text(void *ctx, const char *text, size_t len) {
  (void)ctx;
  const size_t at = strlen(shared->text);
  TD_CHECK(at + len < MAX_TEXT);
  memcpy(shared->text + at, text, len);
  shared->text[at + len] = '\0';
  return 0;
}

// Opens a model, generates twice, the second time from the KV cache of the first, and closes it.
// Returns the number of errors that are not as expected; *n_failed: of errors.
static int use_model(int *n_failed) {
  char error[512] = "";
  tandem *model;
  const tandem_opts opts = {.model_dir = model_dir, .n_threads = 1, .ctx_size = 128};
  int rc = tandem_open(&model, &opts, error, sizeof error);
  *n_failed = rc != 0;
  if (rc) return check_error(rc, error);
  const tandem_request request = {
      .messages = "{\"messages\":[{\"role\":\"user\",\"content\":\"caf\\u00e9 and tea\"}]}",
      .max_tokens = 12,
      .temperature = 1,
      .top_p = 0.9f,
      .top_k = 20,
      .seed = 1,
      .on_text = add_text};
  int n_bad = 0;
  for (int i = 0; i < 2; i++) {
    tandem_result result;
    shared->text[0] = '\0';
    rc = tandem_generate(model, &request, &result, error, sizeof error);
    n_bad += rc ? check_error(rc, error) : check_result();
    *n_failed += rc != 0;
  }
  tandem_close(model);
  return n_bad;
}

static int embed(void) {
  int n_failed, n_again = 0;
  int n_bad = use_model(&n_failed);
  if (n_failed) n_bad += use_model(&n_again);
  return n_bad + n_again;
}

TEST(library) {
  sweep(&(scenario){.run = embed}, 100);
}

// ---- a worker: open a model, serve requests -----------------------------------------------------

static struct {
  td_channel channel; // the front's end
  int life[2], kv_fd;
  td_worker_argv args;
} front;

static void prepare_worker(void) {
  td_err err;
  TD_CHECK(td_channel_create(&front.channel, 64, &err) == TD_OK);
  TD_CHECK(td_kv_pool_create(&front.kv_fd, &err) == TD_OK);
  TD_CHECK(pipe(front.life) == 0);
  char *argv[] = {"tandem", "serve",      "--model", model_dir,         "--threads",
                  "2",      "--ctx-size", "128",     "--prefill-chunk", "32"};
  td_options options;
  td_session_opts session;
  TD_CHECK(td_options_parse(&options, TD_COUNT(argv), argv, &err) == TD_OK);
  TD_CHECK(td_cmd_session_opts(&options, &session, &err) == TD_OK);
  const td_worker_opts opts = {
      .runtime = session.runtime, .max_batch = 2, .parent_pid = (uint32_t)getpid()};
  TD_CHECK(td_worker_args_format(&front.args, &opts, &err) == TD_OK);
  td_options_free(&options);
}

// Puts descriptors where a worker expects them.
static void place_descriptors(void) {
  int from[TD_WORKER_FIRST_CHANNEL + TD_CHANNEL_N_FDS] = {
      [TD_WORKER_LIFE_FD] = front.life[0], [TD_WORKER_KV_FD] = front.kv_fd};
  for (int i = 0; i < TD_CHANNEL_N_FDS; i++)
    from[TD_WORKER_FIRST_CHANNEL + i] = front.channel.fds[i];
  for (size_t i = 0; i < TD_COUNT(from); i++)
    from[i] = from[i] ? fcntl(from[i], F_DUPFD, 100) : -1;
  close(front.life[1]);
  for (size_t i = 0; i < TD_COUNT(from); i++) {
    if (from[i] >= 0) TD_CHECK(dup2(from[i], (int)i) == (int)i);
  }
}

static int run_worker(void) {
  place_descriptors();
  const int status = td_worker_main(front.args.argc, front.args.argv);
  // 1: FATAL was sent, which the peer checks. 2: the worker could not even attach.
  return status == 2 ? !fa_has_failed() : 0;
}

static bool has_ended(pid_t pid) {
  siginfo_t ended = {0};
  TD_CHECK(waitid(P_PID, (id_t)pid, &ended, WEXITED | WNOHANG | WNOWAIT) == 0);
  return ended.si_pid == pid;
}

// Next record from the worker; false if it has ended.
static bool receive(pid_t pid, td_wire_msg *msg) {
  for (;;) {
    const bool is_over = has_ended(pid);
    if (td_ring_pop(&front.channel.rx, msg) == TD_OK) return true;
    if (is_over) return false;
    usleep(200);
  }
}

static void submit(uint64_t id) {
  enum { N_PROMPT = TD_WIRE_MAX_TOKENS, PAGES = 2 };
  td_wire_msg records[] = {
      {.kind = TD_MSG_SUBMIT,
       .u.submit = {.sampling = {.temperature = 1, .top_k = 20, .seed = 3},
                    .n_prompt = N_PROMPT,
                    .max_tokens = 10,
                    .n_bias = 1,
                    .flags = TD_SUBMIT_IGNORE_EOS,
                    .n_pages = PAGES}},
      {.kind = TD_MSG_PAGES, .u.pages = {.n = PAGES, .ids = {3, 1}}},
      {.kind = TD_MSG_TOKENS, .u.tokens = {.n = N_PROMPT}},
      {.kind = TD_MSG_BIAS, .u.bias = {.n = 1, .entries = {{7, 2.0f}}}},
  };
  for (int i = 0; i < N_PROMPT; i++)
    records[2].u.tokens.ids[i] = (i * 37 + 5) % 250;
  for (size_t i = 0; i < TD_COUNT(records); i++) {
    records[i].request = id;
    TD_CHECK(td_ring_push(&front.channel.tx, &records[i]) == TD_OK);
  }
}

// Returns the number of reports that are not as expected.
static int talk(pid_t pid) {
  td_wire_msg msg;
  int n_bad = 0;
  for (uint64_t id = 1; receive(pid, &msg);) {
    if (msg.kind == TD_MSG_FATAL) {
      n_bad += check_error((int)(int64_t)msg.request, msg.u.text);
    } else if (msg.kind == TD_MSG_READY) {
      submit(id);
    } else if (msg.kind == TD_MSG_TOKEN) {
      const size_t at = strlen(shared->text);
      snprintf(shared->text + at, MAX_TEXT - at, "%d ", msg.u.token.id);
    } else if (msg.kind == TD_MSG_DONE) {
      n_bad += msg.u.done.reason == TD_DONE_ERROR ? check_error(TD_ENOMEM, msg.u.done.text)
                                                  : check_result();
      if (id < 2) shared->text[0] = '\0';
      if (id++ < 2)
        submit(id);
      else
        td_ring_push(&front.channel.tx, &(td_wire_msg){.kind = TD_MSG_SHUTDOWN});
    }
  }
  return n_bad;
}

static int be_front(pid_t pid) {
  close(front.life[0]);
  const int n_bad = talk(pid);
  td_channel_close(&front.channel);
  close(front.life[1]);
  close(front.kv_fd);
  td_worker_argv_free(&front.args);
  return n_bad;
}

TEST(worker) {
  sweep(&(scenario){.prepare = prepare_worker, .run = run_worker, .peer = be_front}, 100);
}

// ---- the server ---------------------------------------------------------------------------------

static void prepare_server(void) {
  td_test_remove_folder(kv_path);
  unlink(socket_path);
}

static int run_server(void) {
  char host[80];
  snprintf(host, sizeof host, "unix:%s", socket_path);
  char *argv[] = {"tandem",         "serve", "--model",   model_dir, "--host",     host,
                  "--disaggregate", "off",   "--threads", "1",       "--ctx-size", "128",
                  "--kv-dir",       kv_path, "--weights", "mmap"};
  td_options options;
  td_err err;
  td_status st = td_options_parse(&options, TD_COUNT(argv), argv, &err);
  const int status = st == TD_OK ? td_cmd_serve(&options) : td_cmd_fail(&err);
  td_options_free(&options);
  return status != 0 && !(fa_has_failed() && log_has("memory"));
}

// Sends a request on a connection of its own and stores all that comes back. False: no connection.
static bool exchange(const char *request, char *out, size_t size) {
  struct sockaddr_un addr = {.sun_family = AF_UNIX};
  memcpy(addr.sun_path, socket_path, sizeof socket_path);
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const bool is_open = connect(fd, (struct sockaddr *)&addr, sizeof addr) == 0;
  size_t len = 0;
  if (is_open && send(fd, request, strlen(request), MSG_NOSIGNAL) > 0) {
    ssize_t n;
    while (len + 1 < size && (n = recv(fd, out + len, size - 1 - len, 0)) > 0)
      len += (size_t)n;
  }
  out[len] = '\0';
  close(fd);
  return is_open;
}

// Appends the values of all members of that name to shared->text, as they are spelled in JSON.
static void add_values(const char *response, const char *key) {
  for (const char *at = response; (at = strstr(at, key));) {
    at += strlen(key);
    size_t len = 0;
    while (at[len] && at[len] != '"')
      len += at[len] == '\\' ? 2 : 1;
    add_text(NULL, at, len);
  }
}

// Whether the connection was closed before the end of the response, which clients notice.
static bool is_cut(const char *response) {
  const char *body = strstr(response, "\r\n\r\n"), *length = strstr(response, "Content-Length: ");
  if (!body) return true;
  if (length) return strlen(body + 4) < strtoul(length + 16, NULL, 10);
  const size_t len = strlen(body);
  return len < 5 || strcmp(body + len - 5, "0\r\n\r\n") != 0;
}

// Returns 0: the result; 1: an error that is about memory, or a closed connection; 2: neither.
static int ask(bool is_stream, char *response, size_t size) {
  char body[256], request[512];
  snprintf(body, sizeof body,
           "{\"messages\":[{\"role\":\"user\",\"content\":\"one, two\"}],\"max_tokens\":8,"
           "\"temperature\":0,\"stop\":[\"zzz\"],\"logprobs\":true,\"top_logprobs\":2,"
           "\"stream\":%s}",
           is_stream ? "true" : "false");
  snprintf(request, sizeof request,
           "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
           "Content-Type: application/json\r\nContent-Length: %zu\r\n\r\n%s",
           strlen(body), body);
  exchange(request, response, size);
  if (strstr(response, "memory") || is_cut(response)) return 1;
  shared->text[0] = '\0';
  add_values(response, "\"content\":\"");
  add_values(response, "\"token\":\"");
  if (strncmp(response, "HTTP/1.1 200", 12) == 0 &&
      strstr(response, is_stream ? "[DONE]" : "usage")) {
    if (!shared->expected[0] || strcmp(shared->text, shared->expected) == 0) return 0;
  }
  return 2;
}

static int use_server(void) {
  static char response[1 << 16];
  int n_failed = 0, n_bad = 0;
  for (int i = 0; i < 2; i++) {
    int rc = ask(i > 0, response, sizeof response);
    if (rc == 1) { // the same once more
      n_failed++;
      rc = ask(i > 0, response, sizeof response);
    }
    if (rc) {
      n_bad++;
      fprintf(stderr, "%s\n", response);
    }
  }
  exchange("GET /metrics HTTP/1.0\r\nHost: localhost\r\n\r\n", response, sizeof response);
  return n_bad + (n_failed > 1);
}

static int be_client(pid_t pid) {
  static char response[1 << 16];
  while (!has_ended(pid)) {
    exchange("GET /health HTTP/1.0\r\nHost: localhost\r\n\r\n", response, sizeof response);
    if (strncmp(response, "HTTP/1.1 200", 12) == 0) {
      const int n_bad = use_server();
      kill(pid, SIGTERM);
      return n_bad;
    }
    usleep(2000);
  }
  return 0; // it has printed why
}

TEST(server) {
  sweep(&(scenario){.prepare = prepare_server, .run = run_server, .peer = be_client}, 100);
}

// ---- checkpoints in formats that are converted, quantized ones made
// ------------------------------

static checkpoint words, experts; // 8-bit words with rules by name; BF16, transposed

static void make_words(void) {
  ck_qwen3(&words);
  ck_set(&words, "quantization_config",
         "{\"quant_method\": \"gptq\", \"bits\": 8, \"group_size\": 8, \"dynamic\":"
         " {\"-:.*lm_head\": {}, \"+:.*up_proj\": {\"bits\": 4}}}");
  const ck_tensor was = *ck_find(&words, "model.layers.0.mlp.down_proj.weight");
  const uint64_t rows = was.shape[0], cols = was.shape[1];
  ck_drop(&words, was.name);
  ck_add(&words, "model.layers.0.mlp.down_proj.qweight", "I32", cols / 4, rows, 0);
  ck_add(&words, "model.layers.0.mlp.down_proj.qzeros", "I32", cols / 8, rows / 4, 0);
  ck_add(&words, "model.layers.0.mlp.down_proj.scales", "BF16", cols / 8, rows, 0);
  ck_write(&words);
}

static void make_experts(void) {
  ck_gpt_oss(&experts);
  for (int layer = 0; layer < 2; layer++) {
    static const char *const names[] = {"gate_up_proj", "down_proj"};
    for (size_t i = 0; i < TD_COUNT(names); i++) {
      char name[128], part[160];
      snprintf(name, sizeof name, "model.layers.%d.mlp.experts.%s", layer, names[i]);
      snprintf(part, sizeof part, "%s_blocks", name);
      ck_drop(&experts, part);
      snprintf(part, sizeof part, "%s_scales", name);
      ck_drop(&experts, part);
      snprintf(part, sizeof part, "%s_bias", name);
      ck_add(&experts, name, "BF16", 8, 32, ck_find(&experts, part)->shape[1]);
    }
  }
  ck_write(&experts);
}

static td_status open_model(const char *folder, td_err *err) {
  td_model *m;
  td_status st = td_model_open(&m, folder, err);
  if (st != TD_OK) return st;
  const size_t at = strlen(shared->text);
  snprintf(shared->text + at, MAX_TEXT - at, "%s %llu ", td_model_config_of(m)->arch_name,
           (unsigned long long)td_model_stats_of(m).bytes);
  td_model_close(m);
  return TD_OK;
}

static td_status make_smaller(td_err *err) {
  td_quantize_report made;
  const char *names;
  const td_quantize_opts opts = {
      .in = model_dir, .out = kv_path, .encoding = td_encoding_find("fp8", &names), .n_threads = 1};
  const td_status st = td_quantize(&opts, &made, err);
  td_quantize_report_free(&made);
  return st;
}

// Each once more after a failure.
static int use_formats(void) {
  int n_bad = 0, n_failed = 0;
  for (int i = 0; i < 3; i++) {
    td_err err;
    td_status st = TD_EAGAIN;
    for (int tries = 0; st != TD_OK && tries < 2; tries++) {
      st = i == 2 ? make_smaller(&err) : open_model(i ? experts.dir : words.dir, &err);
      if (st == TD_OK) break;
      n_bad += check_error(st, err.msg);
      n_failed++;
    }
  }
  return n_bad + (n_failed > 1) + check_result();
}

TEST(formats) {
  sweep(&(scenario){.prepare = prepare_server, .run = use_formats}, 60);
}

static td_status show_image(const char *name, td_err *err) {
  static const td_image_processor processor = {
      .patch = 4, .merge = 2, .temporal = 2, .min_pixels = 256, .max_pixels = 4096};
  const td_image_limits limits = {.max_pixels = 4096, .max_bytes = 4096};
  char path[PATH_MAX];
  td_buf file = TD_BUF_INIT;
  td_image image = {0};
  td_image_input input;
  uint8_t *rgb = NULL;
  snprintf(path, sizeof path, "%s/fuzz/corpus/fuzz_image/%s", TD_TEST_DIR, name);
  td_status st = td_file_read(&file, path, limits.max_bytes, err);
  if (st == TD_OK)
    st = td_image_decode(&image, (const uint8_t *)td_buf_text(&file), file.len, &limits, err);
  if (st == TD_OK) st = td_image_prepare(&input, &rgb, &image, &processor, err);
  const size_t at = strlen(shared->text);
  if (st == TD_OK)
    snprintf(shared->text + at, MAX_TEXT - at, "%u.%u ", input.hash[0], input.hash[1]);
  td_image_free(&image);
  free(rgb);
  td_buf_free(&file);
  return st;
}

static int use_images(void) {
  static const char *const names[] = {"png_rgba_interlaced", "jpeg_exif_6", "jpeg_cmyk",
                                      "webp_animation"};
  int n_bad = 0;
  for (size_t i = 0; i < TD_COUNT(names); i++) {
    td_err err;
    const td_status st = show_image(names[i], &err);
    if (st == TD_OK) continue;
    n_bad += check_error(st, err.msg);
    n_bad += show_image(names[i], &err) != TD_OK;
  }
  return n_bad + check_result();
}

TEST(images) {
  sweep(&(scenario){.run = use_images}, 9);
}

// ---- requests of every kind, read and made into grammars ----------------------------------------

typedef struct {
  const td_dialect *dialect; // NULL: OpenAI's chat
  td_call_form form;
  const char *body;
} request_case;

#define CHAT "'messages': [{'role': 'user', 'content': 'a'}]"
#define TOOL                                                                                       \
  "'tools': [{'type': 'function', 'function': {'name': 'f', 'parameters': {'type': 'object',"      \
  " 'properties': {'n': {'type': 'integer', 'minimum': 3}, 's': {'enum': ['p', 'q']}, 'l':"        \
  " {'type': 'array', 'items': {'$ref': '#/$defs/t'}}, 'm': {'type': 'string', 'maxLength': 4}},"  \
  " 'required': ['n'], '$defs': {'t': {'type': ['number', 'null']}}}}}]"

// Their quotes are single ones.
static const request_case requests[] = {
    {NULL, TD_CALL_HERMES,
     "{'messages': [{'role': 'system', 'content': 'a'}, {'role': 'user', 'content': [{'type': "
     "'text', 'text': 'b'}]}, {'role': 'assistant', 'tool_calls': [{'id': 'x', 'type': 'function',"
     " 'function': {'name': 'f', 'arguments': '{}'}}]}, {'role': 'tool', 'tool_call_id': 'x',"
     " 'content': '1'}], " TOOL ", 'tool_choice': 'required', 'stop': ['z'],"
     " 'logit_bias': {'5': 1}, 'chat_template_kwargs': {'k': 1}}"},
    {NULL, TD_CALL_FUNCTION, "{" CHAT ", " TOOL ", 'tool_choice': 'required'}"},
    {NULL, TD_CALL_HERMES,
     "{" CHAT ", 'response_format': {'type': 'json_schema', 'json_schema': {'name': 's', 'schema':"
     " {'$defs': {'t': {'type': 'array', 'items': {'pattern': '^a+[b-d]{2}$', 'type': 'string'}}},"
     " 'anyOf': [{'$ref': '#/$defs/t'}, {'type': 'object', 'properties': {'d': {'type': 'number'}}"
     "}]}}}}"},
    {NULL, TD_CALL_HERMES,
     "{" CHAT ", 'response_format': {'type': 'json_schema', 'json_schema': {'name': 's', 'schema':"
     " {'allOf': [{'type': 'object', 'properties': {'a': {'enum': [1, 2]}, 'b': {}}, 'required':"
     " ['a'], 'additionalProperties': {'maximum': 5}}, {'type': ['object', 'null'], 'properties':"
     " {'a': {'enum': [2, 3]}, 'c': {'type': 'integer'}}, 'required': ['c'], 'title': 't'}],"
     " 'anyOf': [{'required': ['b']}, {'required': ['c']}]}}}}"},
    {NULL, TD_CALL_HERMES,
     "{" CHAT ", 'response_format': {'type': 'json_schema', 'json_schema': {'name': 's', 'schema':"
     " {'oneOf': [{'$ref': '#/$defs/u'}, {'type': 'object', 'properties': {'k': {'const': 2}},"
     " 'required': ['k']}], '$defs': {'u': {'type': 'object', 'properties': {'k': {'const': 1}},"
     " 'required': ['k']}}}}}}"},
    {NULL, TD_CALL_HERMES, "{" CHAT ", 'guided_regex': '(yes|no)[0-9]+'}"},
    {NULL, TD_CALL_HERMES, "{" CHAT ", 'guided_json': '{\\'type\\': \\'integer\\'}'}"},
    {&td_dialect_responses, TD_CALL_HERMES,
     "{'model': 'm', 'input': [{'role': 'user', 'content': 'a'}, {'type': 'function_call',"
     " 'call_id': 'c', 'name': 'f', 'arguments': '{}'}, {'type': 'function_call_output',"
     " 'call_id': 'c', 'output': '2'}], 'instructions': 'i', 'max_output_tokens': 9, 'tools':"
     " [{'type': 'custom', 'name': 'g', 'format': {'type': 'grammar', 'syntax': 'regex',"
     " 'definition': 'a+'}}], 'tool_choice': 'required'}"},
    {&td_dialect_messages, TD_CALL_HERMES,
     "{'model': 'm', 'max_tokens': 9, 'system': 'i', 'messages': [{'role': 'user', 'content':"
     " [{'type': 'text', 'text': 'a'}]}], 'stop_sequences': ['z']}"},
    {&td_dialect_ollama_chat, TD_CALL_HERMES,
     "{'model': 'm', " CHAT ", 'format': 'json', 'options': {'num_predict': 5}}"},
};

static td_status read_request(const request_case *c, td_api_error *error) {
  static const td_api_defaults defaults = {.temperature = 1, .top_p = 1, .n_vocab = 256};
  td_dialect_state state = {0};
  td_api_request request = {0};
  td_buf body = TD_BUF_INIT;
  td_status st = TD_OK;
  char asked[2048];
  const char *text = asked;
  TD_CHECK(snprintf(asked, sizeof asked, "%s", c->body) < (int)sizeof asked);
  for (char *at = asked; (at = strchr(at, '\'')) != NULL;)
    *at = '"';
  if (c->dialect) {
    st = td_dialect_translate(c->dialect, &state, text, strlen(text), &body, error);
    text = td_buf_text(&body);
  }
  if (st == TD_OK) st = td_api_parse_chat(&request, text, strlen(text), &defaults, error);
  const td_call_syntax *calls = td_call_syntax_of_form(c->form);
  if (st == TD_OK) st = td_api_compose_grammar(&request, calls, TD_REASONING_MAYBE, error);
  if (st == TD_OK) {
    const size_t at = strlen(shared->text);
    td_sha256 sha;
    td_digest digest;
    char hex[TD_DIGEST_HEX + 1] = "";
    td_sha256_begin(&sha);
    td_sha256_add(&sha, request.grammar.data, request.grammar.len);
    td_sha256_end(&sha, &digest);
    td_digest_hex(hex, &digest);
    snprintf(shared->text + at, MAX_TEXT - at, "%s\n", hex);
  }
  td_api_request_free(&request);
  td_dialect_state_free(&state);
  td_buf_free(&body);
  return st;
}

static int use_requests(void) {
  int n_bad = 0, n_failed = 0;
  for (size_t i = 0; i < TD_COUNT(requests); i++) {
    td_api_error error = {0};
    for (int tries = 0; tries < 2; tries++) {
      if (read_request(&requests[i], &error) == TD_OK) break;
      n_failed++;
      if (error.status >= 500 && strstr(error.message, "memory")) continue;
      fprintf(stderr, "error %d is not about memory: %s\n", error.status, error.message);
      n_bad++;
    }
  }
  return n_bad + (n_failed > 1) + check_result();
}

TEST(requests) {
  sweep(&(scenario){.run = use_requests}, 100);
}

// ---- setup ------------------------------------------------------------------------------------

static void make_path(char *out, const char *name) {
  TD_CHECK(snprintf(out, 64, "%s/%s", dir, name) < 64);
}

// A golden checkpoint by links, with a chat template.
static void make_model(void) {
  static const char *const files[] = {"config.json",
                                      "model-00001-of-00003.safetensors",
                                      "model-00002-of-00003.safetensors",
                                      "model-00003-of-00003.safetensors",
                                      "model.safetensors.index.json",
                                      "tokenizer.json"};
  char from[PATH_MAX], to[PATH_MAX];
  TD_CHECK(mkdir(model_dir, 0700) == 0);
  for (size_t i = 0; i < TD_COUNT(files); i++) {
    snprintf(from, sizeof from, "%s/%s", td_test_golden("qwen3_moe"), files[i]);
    snprintf(to, sizeof to, "%s/%s", model_dir, files[i]);
    TD_CHECK(symlink(from, to) == 0);
  }
  snprintf(to, sizeof to, "%s/tokenizer_config.json", model_dir);
  FILE *f = fopen(to, "w");
  fputs("{\"bos_token\":\"<bos>\",\"eos_token\":\"<eos>\",\"chat_template\":"
        "\"{{bos_token}}{% for m in messages %}{{m.role ~ ': ' ~ m.content|trim}}\\n"
        "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}\"}",
        f);
  TD_CHECK(fclose(f) == 0);
}

int before_all(void **state) {
  (void)state;
  TD_CHECK(mkdtemp(dir));
  make_path(model_dir, "model");
  make_path(socket_path, "socket");
  make_path(log_path, "log");
  make_path(trace_path, "trace");
  make_path(kv_path, "kv");
  make_model();
  make_words();
  make_experts();
  shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  TD_CHECK(shared != MAP_FAILED);
  return 0;
}

int after_all(void **state) {
  (void)state;
  td_test_remove_folder(dir);
  ck_free(&words);
  ck_free(&experts);
  return 0;
}

int main(int argc, char **argv) {
  if (argc > 1 && strcmp(argv[1], "worker") == 0) return td_worker_main(argc, argv);
  return testing_main(argc, argv);
}
