// src/cli/run_models.c - the models of --models, between which a chat can change.
#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "cli/run_impl.h"
#include "gguf/files.h"

static int is_visible(const struct dirent *entry) {
  return entry->d_name[0] != '.';
}

td_status td_run_list_models(const td_runner *r, td_buf *out, td_err *err) {
  const char *parent = r->options->models;
  struct dirent **entries;
  const int n = scandir(parent, &entries, is_visible, alphasort);
  if (n < 0) return td_fail(err, TD_ENOENT, "--models %s: %s", parent, strerror(errno));
  for (int i = 0; i < n; i++) {
    const char *name = entries[i]->d_name;
    if (td_checkpoint_is(parent, name)) td_buf_printf(out, "%s\n", name);
    free(entries[i]);
  }
  free(entries);
  if (!out->len) return td_fail(err, TD_ENOENT, "--models %s: it holds no model", parent);
  return td_buf_status(out, err);
}

static td_status choose(td_runner *r, const char *name, size_t len, td_err *err) {
  td_buf path = TD_BUF_INIT;
  td_buf_printf(&path, "%s/%.*s", r->options->models, (int)len, name);
  char *file = NULL;
  td_status st = td_buf_status(&path, err);
  if (st == TD_OK) st = td_gguf_in(&file, td_buf_text(&path), err);
  const char *model = file ? file : td_buf_text(&path);
  if (st == TD_OK) st = td_options_set(&r->settings, "model", model, err);
  free(file);
  td_buf_free(&path);
  return st;
}

td_status td_run_choose_first(td_runner *r, td_err *err) {
  td_buf list = TD_BUF_INIT;
  td_status st = td_run_list_models(r, &list, err);
  const char *first = td_buf_text(&list);
  if (st == TD_OK) st = choose(r, first, strcspn(first, "\n"), err);
  td_buf_free(&list);
  return st;
}

static bool has_line(const td_buf *list, const char *line) {
  const size_t len = strlen(line);
  for (const char *at = td_buf_text(list); *at; at += strcspn(at, "\n") + 1)
    if (strcspn(at, "\n") == len && !memcmp(at, line, len)) return true;
  return false;
}

// Loads the model; if that fails, the one before it again. False: there is none now.
static bool change(td_runner *r, const char *name) {
  td_err err;
  char *before = strdup(r->settings.model);
  td_run_close_model(r);
  td_status st = choose(r, name, strlen(name), &err);
  if (st == TD_OK) st = td_run_open_model(r, &err);
  if (st != TD_OK) {
    td_error("%s", err.msg);
    td_run_close_model(r);
    st = before ? td_options_set(&r->settings, "model", before, &err) : TD_ENOMEM;
    if (st == TD_OK) st = td_run_open_model(r, &err);
    if (st != TD_OK) td_error("%s", err.msg);
  }
  free(before);
  return st == TD_OK;
}

bool td_run_change_model(td_runner *r, const char *name) {
  td_err err;
  td_buf list = TD_BUF_INIT;
  bool should_continue = true;
  if (!r->options->models) {
    fputs("Only one model: start with --models DIR to choose among several.\n", stderr);
  } else if (td_run_list_models(r, &list, &err) != TD_OK) {
    td_error("%s", err.msg);
  } else if (!has_line(&list, name)) {
    if (*name) fprintf(stderr, "Unknown model %s. Known are:\n", name);
    for (const char *at = td_buf_text(&list); *at; at += strcspn(at, "\n") + 1)
      fprintf(stderr, "  %.*s\n", (int)strcspn(at, "\n"), at);
  } else {
    should_continue = change(r, name);
    if (should_continue) td_run_print_name(r);
  }
  td_buf_free(&list);
  return should_continue;
}
