// src/app/main.c - picks the subcommand.
#include <signal.h>
#include <stdio.h>
#include <string.h>

#include "app/command.h"
#include "base/log.h"
#include "worker/worker.h"

static int (*const commands[])(const td_options *options) = {
    [TD_CMD_RUN] = td_cmd_run,
    [TD_CMD_SERVE] = td_cmd_serve,
    [TD_CMD_BENCH] = td_cmd_bench,
    [TD_CMD_BENCH_KERNELS] = td_cmd_bench_kernels,
    [TD_CMD_BENCH_LAYER] = td_cmd_bench_layer,
    [TD_CMD_EVAL_LOGITS] = td_cmd_eval_logits,
    [TD_CMD_EVAL_PERPLEXITY] = td_cmd_eval_perplexity,
    [TD_CMD_EVAL_CHAT] = td_cmd_eval_chat,
    [TD_CMD_QUANTIZE] = td_cmd_quantize,
    [TD_CMD_INSPECT] = td_cmd_inspect,
    [TD_CMD_INSPECT_TOKENS] = td_cmd_inspect_tokens,
    [TD_CMD_INSPECT_TEMPLATE] = td_cmd_inspect_template,
    [TD_CMD_INSPECT_ROUTING] = td_cmd_inspect_routing,
};
_Static_assert(TD_COUNT(commands) == TD_N_COMMANDS, "every command has a function");

static int print_help(td_command command, bool markdown) {
  td_buf text = TD_BUF_INIT;
  if (markdown) {
    td_options_reference(&text);
  } else {
    td_options_help(&text, command);
  }
  fputs(td_buf_text(&text), stdout);
  td_buf_free(&text);
  return fflush(stdout) == 0 ? 0 : 1;
}

static void set_log(const td_options *options) {
  const td_log_opts opts = {.is_json = options->log == TD_LOG_JSON,
                            .max_level = (td_log_level)options->log_level,
                            .role = options->command == TD_CMD_SERVE ? "front" : "tandem"};
  td_log_set(&opts);
}

int main(int argc, char **argv) {
  signal(SIGPIPE, SIG_IGN);
  // The front starts its workers with this word; it is not for users and not in the table.
  if (argc >= 2 && !strcmp(argv[1], "worker")) return td_worker_main(argc, argv);
  if (argc == 2 && !strcmp(argv[1], "--version")) {
    puts("tandem " TD_VERSION);
    return 0;
  }
  if (argc == 3 && !strcmp(argv[1], "help") && !strcmp(argv[2], "--markdown")) {
    return print_help(TD_N_COMMANDS, true);
  }
  td_options options;
  td_err err;
  int status;
  const td_status st = td_options_parse(&options, argc, argv, &err);
  set_log(&options); // also the format of the error
  if (st != TD_OK) {
    status = td_cmd_fail(&err);
  } else if (options.help) {
    status = print_help(options.command, false);
  } else {
    status = commands[options.command](&options);
  }
  td_options_free(&options);
  return status;
}
