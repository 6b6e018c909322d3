// src/cli/main.c - the program's main: parses options and runs the subcommand.
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/cpus.h"
#include "base/log.h"
#include "base/thread.h"
#include "base/utf8.h"
#include "bench/bench.h"
#include "cli/cli.h"
#include "cli/find_model.h"
#include "front/api_keys.h"
#include "front/front.h"
#include "runtime/command.h"
#include "runtime/gpu_probe.h"
#include "worker/worker.h"

static int (*const commands[])(const td_options *options) = {
    [TD_CMD_RUN] = td_cmd_run,
    [TD_CMD_SERVE] = td_cmd_serve,
    [TD_CMD_BENCH] = td_cmd_bench,
    [TD_CMD_BENCH_KERNELS] = td_cmd_bench_kernels,
    [TD_CMD_BENCH_LAYER] = td_cmd_bench_layer,
    [TD_CMD_BENCH_COMM] = td_cmd_bench_comm,
    [TD_CMD_BENCH_GPU] = td_cmd_bench_gpu,
    [TD_CMD_EVAL_LOGITS] = td_cmd_eval_logits,
    [TD_CMD_EVAL_PERPLEXITY] = td_cmd_eval_perplexity,
    [TD_CMD_EVAL_CHAT] = td_cmd_eval_chat,
    [TD_CMD_VERIFY] = td_cmd_verify,
    [TD_CMD_QUANTIZE] = td_cmd_quantize,
    [TD_CMD_PULL] = td_cmd_pull,
    [TD_CMD_PLAN] = td_cmd_plan,
    [TD_CMD_RECOMMEND] = td_cmd_recommend,
    [TD_CMD_DOCTOR] = td_cmd_doctor,
    [TD_CMD_LIST] = td_cmd_list,
    [TD_CMD_RM] = td_cmd_rm,
    [TD_CMD_PS] = td_cmd_ps,
    [TD_CMD_TOP] = td_cmd_top,
    [TD_CMD_STOP] = td_cmd_stop,
    [TD_CMD_INSPECT] = td_cmd_inspect,
    [TD_CMD_INSPECT_TOKENS] = td_cmd_inspect_tokens,
    [TD_CMD_INSPECT_TEMPLATE] = td_cmd_inspect_template,
    [TD_CMD_INSPECT_ROUTING] = td_cmd_inspect_routing,
};
_Static_assert(TD_COUNT(commands) == TD_N_COMMANDS, "every command has a function");

// If a standard descriptor is closed, the next file opened, e.g. a checkpoint, would get its
// number. Occupies the number with /dev/null, opened so that writing to stdout still fails.
static void hold_standard_descriptors(void) {
  for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++) {
    if (fcntl(fd, F_GETFD) >= 0 || errno != EBADF) continue;
    int mode = fd == STDOUT_FILENO ? O_RDONLY : O_RDWR; // stderr's output may be discarded
    if (open("/dev/null", mode) != fd) abort();         // open returns the lowest free number
  }
}

// ---- stdout on a terminal -----------------------------------------------------------------------
// Text from models, templates and configurations may contain escape sequences that a terminal would
// interpret. If stdout is a terminal, it is replaced by a stream that escapes control characters.

typedef struct {
  char split[4]; // an incomplete UTF-8 character from the previous write
  size_t n_split;
} terminal;

static ssize_t write_terminal(void *cookie, const char *bytes, size_t len) {
  terminal *t = cookie;
  td_buf text = TD_BUF_INIT, shown = TD_BUF_INIT;
  td_buf_add(&text, t->split, t->n_split);
  td_buf_add(&text, bytes, len);
  size_t n_whole = td_utf8_whole(td_buf_text(&text), text.len);
  t->n_split = text.len - n_whole;
  memcpy(t->split, td_buf_text(&text) + n_whole, t->n_split);
  td_printable_add(&shown, td_buf_text(&text), n_whole, "\n\t");
  bool is_whole = !text.failed && !shown.failed;
  for (size_t done = 0; is_whole && done < shown.len;) {
    ssize_t n = write(STDOUT_FILENO, shown.data + done, shown.len - done);
    if (n < 0 && errno == EINTR) continue;
    is_whole = n > 0;
    done += is_whole ? (size_t)n : 0;
  }
  td_buf_free(&text);
  td_buf_free(&shown);
  return is_whole ? (ssize_t)len : 0; // 0 reports an error
}

static void guard_terminal(void) {
  static terminal out;
  if (isatty(STDOUT_FILENO) != 1) return;
  FILE *stream = fopencookie(&out, "w", (cookie_io_functions_t){.write = write_terminal});
  if (!stream) abort(); // out of memory at startup
  setvbuf(stream, NULL, _IOLBF, BUFSIZ);
  stdout = stream;
}

// Output counts as delivered only if writing it succeeded.
static int check_stdout(int status) {
  errno = 0;
  bool is_whole = fflush(stdout) == 0 && !ferror(stdout);
  if (is_whole || status != 0) return status;
  td_error("standard output: cannot write%s%s: the output is not complete", errno ? ": " : "",
           errno ? strerror(errno) : "");
  return 1;
}

static int print(td_buf *text) {
  fputs(td_buf_text(text), stdout);
  td_buf_free(text);
  return 0;
}

// `tandem help --FORM`: what the option table says in another form. Returns -1 if there is none.
static int print_form(const char *form) {
  td_buf text = TD_BUF_INIT, models = TD_BUF_INIT;
  bool is_known = true;
  td_cli_short_names(&models);
  if (strcmp(form, "--markdown") == 0)
    td_options_reference(&text);
  else if (strcmp(form, "--man") == 0)
    td_options_man(&text);
  else
    is_known = strncmp(form, "--", 2) == 0 &&
               td_options_completion(&text, form + 2, td_buf_text(&models));
  td_buf_free(&models);
  return is_known ? print(&text) : -1;
}

static void set_log(const td_options *options) {
  const td_log_opts opts = {.is_json = options->log == TD_LOG_JSON,
                            .max_level = (td_log_level)options->log_level,
                            .role = options->command == TD_CMD_SERVE ? "front" : "tandem"};
  td_log_set(&opts);
}

static void check_threads(const td_options *options) {
  const unsigned n_cpus = td_cpu_count();
  if (options->threads <= 2 * (int64_t)n_cpus) return;
  td_warn("--threads %lld: this process may use %u CPUs; threads that share one are slower",
          (long long)options->threads, n_cpus);
}

int main(int argc, char **argv) {
  td_err err;
  hold_standard_descriptors();
  guard_terminal();
  if (td_thread_raise_limit(&err) != TD_OK) return td_cmd_fail(&err);
  // What started this process may have blocked the signals that end it.
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, NULL);
  signal(SIGPIPE, SIG_IGN);
  signal(SIGXFSZ, SIG_IGN); // exceeding the file size limit is reported as a write error
  // `tandem worker` is internal: the front starts its workers with it. It is not in the option
  // table.
  if (argc >= 3 && !strcmp(argv[1], "worker") && !strcmp(argv[2], "probe"))
    return td_gpu_probe_main(argc, argv);
  if (argc >= 2 && !strcmp(argv[1], "worker")) return td_worker_main(argc, argv);
  if (argc == 2 && !strcmp(argv[1], "--version")) {
    puts("tandem " TD_VERSION);
    return check_stdout(0);
  }
  if (argc == 3 && !strcmp(argv[1], "help")) {
    const int printed = print_form(argv[2]);
    if (printed >= 0) return check_stdout(printed);
  }
  td_options options;
  int status;
  td_status st = td_options_parse(&options, argc, argv, &err);
  set_log(&options); // also sets the format of the error
  if (st != TD_OK) {
    status = td_cmd_fail(&err);
  } else if (options.help) {
    td_buf text = TD_BUF_INIT;
    td_options_help(&text, options.command);
    status = print(&text);
  } else if (td_api_key_find(&options, argc, argv, &err) != TD_OK) {
    status = td_cmd_fail(&err);
  } else {
    check_threads(&options);
    st = td_cli_find_model(&options, &err);
    status = st == TD_OK ? commands[options.command](&options) : td_cmd_fail(&err);
  }
  td_options_free(&options);
  return check_stdout(status);
}
