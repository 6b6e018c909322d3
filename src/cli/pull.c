// src/cli/pull.c - `tandem pull`, and --model ORG/NAME of the other commands.
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "cli/cli.h"
#include "cli/find_model.h"
#include "cli/remote.h"
#include "gguf/files.h"
#include "hub/hub.h"
#include "model/outline.h"
#include "runtime/command.h"

static atomic_bool is_stopped;

static void on_signal(int number) {
  (void)number;
  atomic_store(&is_stopped, true);
}

// Downloads; SIGINT and SIGTERM end it and leave partial files.
static td_status pull(char **out, const td_options *o, td_err *err) {
  const struct sigaction stop = {.sa_handler = on_signal};
  struct sigaction on_int, on_term;
  char *repo, *quant;
  td_status st = td_hub_split(o->model, &repo, &quant, err);
  if (st != TD_OK) return st;
  const td_hub_opts opts = {.repo = repo,
                            .quant = quant,
                            .revision = o->revision,
                            .include = o->include.values,
                            .n_include = o->include.n,
                            .stop = &is_stopped};
  sigaction(SIGINT, &stop, &on_int);
  sigaction(SIGTERM, &stop, &on_term);
  st = td_hub_pull(out, &opts, err);
  sigaction(SIGINT, &on_int, NULL);
  sigaction(SIGTERM, &on_term, NULL);
  free(repo);
  free(quant);
  return st;
}

int td_cmd_pull(const td_options *o) {
  td_err err;
  char *dir;
  if (!o->model) {
    td_fail(
        &err, TD_EINVAL,
        "tandem pull needs the model: tandem pull ORG/NAME; tandem recommend lists some that fit "
        "this machine");
    return td_cmd_fail(&err);
  }
  td_status st = pull(&dir, o, &err);
  if (st != TD_OK) {
    const int status = td_cmd_fail(&err);
    return st == TD_ECANCELED ? 130 : status;
  }
  puts(dir);
  free(dir);
  return 0;
}

// The server offers the model under the name by which it was asked for.
static td_status keep_name(td_options *o, const char *repo, td_err *err) {
  if (o->command != TD_CMD_SERVE || o->model_names.n) return TD_OK;
  o->model_names.values = calloc(1, sizeof *o->model_names.values);
  char *copy = o->model_names.values ? strdup(repo) : NULL;
  if (!copy) return td_fail(err, TD_ENOMEM, "out of memory");
  o->model_names.values[0] = copy;
  o->model_names.n = 1;
  return TD_OK;
}

td_status td_cli_find_model(td_options *o, td_err *err) {
  char *dir;
  if (!o->server && !o->receipt && td_cli_is_served(o)) o->server = strdup(td_cli_server(o));
  if (o->command == TD_CMD_STOP || o->server || !o->model) return TD_OK;
  char *full = o->command == TD_CMD_PLAN ? NULL : td_cli_full_name(o->model); // it has shapes
  if (full) {
    free(o->model);
    o->model = full;
  } else if (o->command != TD_CMD_PLAN) {
    td_status known = td_cli_check_name(o->model, err);
    if (known != TD_OK) return known;
  }
  if (o->command == TD_CMD_PULL || o->command == TD_CMD_RM) return TD_OK;
  if (o->command == TD_CMD_PLAN && td_shape_find(o->model)) return TD_OK;
  if (td_hub_is_folder(o->model)) {
    td_status found = td_hub_find_in(&dir, o->model, o->revision, err);
    if (found != TD_OK) return found;
    free(o->model);
    o->model = dir;
    return TD_OK;
  }
  const td_status in = td_gguf_in(&dir, o->model, err);
  if (in == TD_OK && dir) {
    free(o->model);
    o->model = dir;
  }
  if (in != TD_OK || !td_hub_is_name(o->model)) return in;
  char *repo, *quant;
  td_status st = td_hub_split(o->model, &repo, &quant, err);
  if (st != TD_OK) return st;
  st = td_hub_find(&dir, repo, quant, o->revision, err);
  free(repo);
  free(quant);
  if (st == TD_ENOENT) {
    td_info("%s is neither here nor complete in the hub's cache: downloading it", o->model);
    st = pull(&dir, o, err);
  }
  if (st == TD_OK) st = keep_name(o, o->model, err);
  if (st != TD_OK) return st;
  free(o->model);
  o->model = dir;
  return TD_OK;
}
