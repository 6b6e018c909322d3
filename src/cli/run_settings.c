// src/cli/run_settings.c - what a chat can change while it runs: sampling, reasoning, the limit of
// a response.
#include <float.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>

#include "base/log.h"
#include "base/utf8.h"
#include "cli/run_impl.h"
#include "text/thinking.h"

static const char *const names[] = {
    "temperature",
    "top-p",
    "top-k",
    "min-p",
    "repetition-penalty",
    "presence-penalty",
    "frequency-penalty",
    "seed",
    "n-predict",
    "thinking",
    "effort",
};

td_status td_run_open_settings(td_runner *r, td_err *err) {
  char program[] = "tandem", command[] = "run";
  char *argv[] = {program, command};
  td_status st = td_options_parse(&r->settings, 2, argv, err);
  td_buf text = TD_BUF_INIT;
  for (size_t i = 0; st == TD_OK && i < TD_COUNT(names); i++) {
    if (!td_options_given(r->options, names[i])) continue;
    td_buf_clear(&text);
    td_options_show(&text, r->options, names[i]);
    st = td_buf_status(&text, err);
    if (st == TD_OK) st = td_options_set(&r->settings, names[i], td_buf_text(&text), err);
  }
  td_buf_free(&text);
  return st;
}

void td_run_settle(td_runner *r) {
  const td_options *o = &r->settings;
  if (r->served) return; // by the server
  const td_model_config *config = r->session->config;
  const uint64_t before = r->sampling.seed;
  td_sampling s = {.temperature = (float)o->temperature,
                   .top_p = (float)o->top_p,
                   .min_p = (float)o->min_p,
                   .repetition_penalty = (float)o->repetition_penalty,
                   .presence_penalty = (float)o->presence_penalty,
                   .frequency_penalty = (float)o->frequency_penalty,
                   .top_k = (uint32_t)o->top_k,
                   .seed = (uint64_t)o->seed};
  if (!td_options_given(o, "temperature")) s.temperature = config->temperature;
  if (!td_options_given(o, "top-p")) s.top_p = config->top_p;
  if (!td_options_given(o, "top-k")) s.top_k = config->top_k_sampling;
  if (s.top_p == 0) s.top_p = FLT_MIN; // greedy: 0 would disable top_p instead
  if (!td_options_given(o, "seed")) {
    s.seed = before;
    if (!before && getrandom(&s.seed, sizeof s.seed, 0) < 0) s.seed = 0;
  }
  r->sampling = s;
}

void td_run_write_reasoning(const td_runner *r, td_json_writer *w) {
  const td_options *o = &r->settings;
  const bool is_off = o->thinking == TD_OFF || (o->effort && td_thinking_is_off(o->effort));
  if (o->effort) td_jw_str(w, "reasoning_effort", o->effort);
  if (o->thinking != TD_AUTO || is_off) td_jw_bool(w, "enable_thinking", !is_off);
}

// ---- /set -----------------------------------------------------------------------------------

static void show(const td_runner *r, const char *name) {
  td_buf value = TD_BUF_INIT, safe = TD_BUF_INIT;
  const bool is_given = td_options_given(&r->settings, name);
  const char *whose = "";
  if (!is_given && !strcmp(name, "temperature")) {
    td_buf_printf(&value, "%g", (double)r->sampling.temperature);
    whose = " (the model's)";
  } else if (!is_given && !strcmp(name, "top-p")) {
    td_buf_printf(&value, "%g", (double)r->sampling.top_p);
    whose = " (the model's)";
  } else if (!is_given && !strcmp(name, "top-k")) {
    td_buf_printf(&value, "%u", r->sampling.top_k);
    whose = " (the model's)";
  } else if (!is_given && !strcmp(name, "seed")) {
    td_buf_str(&value, "random");
  } else {
    td_options_show(&value, &r->settings, name);
  }
  td_printable_add(&safe, td_buf_text(&value), value.len, "");
  fprintf(stderr, "  %-18s %s%s\n", name, safe.len ? td_buf_text(&safe) : "not set", whose);
  td_buf_free(&value);
  td_buf_free(&safe);
}

const char *td_run_setting(const char *word, size_t len) {
  for (size_t i = 0; i < TD_COUNT(names); i++) {
    size_t at = 0;
    while (at < len && names[i][at] == (word[at] == '_' ? '-' : word[at]))
      at++;
    if (at == len && !names[i][len]) return names[i];
  }
  return NULL;
}

void td_run_set(td_runner *r, const char *args) {
  if (!*args) {
    for (size_t i = 0; i < TD_COUNT(names); i++)
      show(r, names[i]);
    fputs("/set NAME VALUE changes one, /set NAME puts its default back.\n", stderr);
    return;
  }
  const size_t len = strcspn(args, " \t\n");
  const char *value = args + len + strspn(args + len, " \t\n");
  const char *name = td_run_setting(args, len);
  if (!name) {
    fprintf(stderr, "Unknown setting %.*s; /set lists them.\n", (int)len, args);
    return;
  }
  td_err err;
  if (td_options_set(&r->settings, name, *value ? value : NULL, &err) != TD_OK) {
    td_error("%s", err.msg);
    return;
  }
  if (!strcmp(name, "seed")) r->sampling.seed = 0;
  td_run_settle(r);
  show(r, name);
}

void td_run_complete_set(const char *begun, td_buf *out) {
  for (size_t i = 0; i < TD_COUNT(names); i++)
    if (!strncmp(names[i], begun, strlen(begun))) td_buf_printf(out, "/set %s \n", names[i]);
}
