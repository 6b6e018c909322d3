// src/cli/top.c - `tandem top`: what a running server does, from two samples of its /metrics.
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/units.h"
#include "base/utf8.h"
#include "cli/cli.h"
#include "cli/remote.h"
#include "cli/terminal.h"
#include "runtime/command.h"

#define PERIOD_MS 2000
#define NEW_FRAME "\033[H\033[J"

// /metrics at a time.
typedef struct {
  td_buf text;
  double at_s;
} sample;

// After the line that at is in; NULL: there is none.
static const char *next_line(const char *at) {
  const char *end = strchr(at, '\n');
  return end && end[1] ? end + 1 : NULL;
}

// Where the labels of a line begin if it is a sample of tandem_<name>, else NULL.
static const char *labels_of(const char *line, const char *name) {
  const size_t len = strlen(name);
  if (strncmp(line, "tandem_", 7) != 0 || strncmp(line + 7, name, len) != 0) return NULL;
  return strchr("{ ", line[7 + len]) ? line + 7 + len : NULL;
}

static double value_of(const char *line) {
  const char *end = line + strcspn(line, "\n");
  while (end > line && end[-1] != ' ')
    end--;
  return strtod(end, NULL);
}

// The sum over all samples with this label, as finished_reason="stop"; "": any.
static double add_up(const sample *s, const char *name, const char *label) {
  double sum = 0;
  for (const char *line = td_buf_text(&s->text); line; line = next_line(line)) {
    const char *own = labels_of(line, name);
    if (own && memmem(own, strcspn(own, "\n"), label, strlen(label))) sum += value_of(line);
  }
  return sum;
}

static double total(const sample *s, const char *name) {
  return add_up(s, name, "");
}

static double growth(const sample *from, const sample *to, const char *name) {
  return total(to, name) - total(from, name);
}

static double per_second(const sample *from, const sample *to, const char *name) {
  return growth(from, to, name) / (to->at_s - from->at_s);
}

static void add_mean(td_buf *out, const char *what, const sample *from, const sample *to,
                     const char *sum, const char *count) {
  const double n = growth(from, to, count);
  if (n > 0) td_buf_printf(out, "  %s %.0f ms", what, 1000 * growth(from, to, sum) / n);
}

static void add_memory(td_buf *out, const char *what, double all, double left) {
  if (all > 0) td_buf_printf(out, "  %s %.1f of %.1f GiB", what, td_gib(all - left), td_gib(all));
}

// Experts that come from the drive, if any do.
static void add_drive(td_buf *out, const sample *from, const sample *to) {
  const double slots = total(to, "streamed_expert_slots");
  const double hits = growth(from, to, "streamed_expert_hits_total");
  const double n = hits + growth(from, to, "streamed_expert_misses_total");
  const double bytes = growth(from, to, "streamed_expert_read_bytes_total");
  const double busy_s = growth(from, to, "streamed_expert_read_seconds_total");
  if (slots <= 0) return;
  td_buf_printf(out, "drive     memory for %.0f experts", slots);
  if (n > 0) td_buf_printf(out, "  found there %.0f%%", 100 * hits / n);
  if (busy_s > 0) {
    td_buf_printf(out, "  reads %.2f GB/s  busy %.0f%%", bytes / busy_s * 1e-9,
                  100 * busy_s / (to->at_s - from->at_s));
  }
  td_buf_char(out, '\n');
}

// A row for each model that has a state.
static void add_models(td_buf *out, const sample *s) {
  static const char begin[] = "{model_name=\"";
  td_buf_str(out, "\n  RUNNING  WAITING   KV  STATE      MODEL\n");
  for (const char *line = td_buf_text(&s->text); line; line = next_line(line)) {
    const char *labels = labels_of(line, "model_state");
    const char *state = labels ? strstr(labels, "\",state=\"") : NULL;
    if (!state || value_of(line) != 1) continue;
    td_buf own = TD_BUF_INIT;
    td_buf_add(&own, labels, (size_t)(state + 1 - labels));
    state += strlen("\",state=\"");
    td_buf_printf(out, "  %7.0f  %7.0f %3.0f%%  %-9.*s  ",
                  add_up(s, "num_requests_running", td_buf_text(&own)),
                  add_up(s, "num_requests_waiting", td_buf_text(&own)),
                  100 * add_up(s, "kv_cache_usage_perc", td_buf_text(&own)),
                  (int)strcspn(state, "\""), state);
    if (own.len > sizeof begin)
      td_printable_add(out, own.data + sizeof begin - 1, own.len - sizeof begin, "");
    td_buf_char(out, '\n');
    td_buf_free(&own);
  }
}

static void draw(td_buf *out, const sample *from, const sample *to) {
  const double asked = total(to, "prefix_cache_queries_total");
  td_buf_printf(out, "requests  running %.0f  waiting %.0f  failed %.0f\n",
                total(to, "num_requests_running"), total(to, "num_requests_waiting"),
                add_up(to, "requests_total", "finished_reason=\"error\""));
  td_buf_printf(out, "tokens/s  generating %.1f  prefilling %.1f",
                per_second(from, to, "generation_tokens_total"),
                per_second(from, to, "prompt_tokens_total"));
  add_mean(out, "first token", from, to, "time_to_first_token_seconds_sum",
           "time_to_first_token_seconds_count");
  add_mean(out, "per token", from, to, "inter_token_latency_seconds_sum",
           "inter_token_latency_seconds_count");
  td_buf_printf(out, "\nworkers   up %.0f  restarts %.0f\nmemory  ", total(to, "worker_up"),
                total(to, "worker_restarts_total"));
  add_memory(out, "in use", total(to, "memory_bytes"), total(to, "memory_available_bytes"));
  add_memory(out, "on GPUs", total(to, "gpu_memory_bytes"), total(to, "gpu_memory_free_bytes"));
  if (asked > 0) {
    td_buf_printf(out, "  prompt tokens from the cache %.0f%%",
                  100 * total(to, "prefix_cache_hits_total") / asked);
  }
  td_buf_char(out, '\n');
  add_drive(out, from, to);
  add_models(out, to);
}

static td_status take(sample *out, const td_options *o, td_err *err) {
  td_buf_clear(&out->text);
  out->at_s = td_clock_s();
  return td_cli_fetch(&out->text, o, "/metrics", NULL, 0, err);
}

static td_status show(const sample *from, const sample *to, bool is_screen, td_err *err) {
  td_buf frame = TD_BUF_INIT;
  draw(&frame, from, to);
  td_status st = td_buf_status(&frame, err);
  if (st == TD_OK && is_screen) { // stdout escapes control characters; the frame has none
    ssize_t n = write(STDOUT_FILENO, NEW_FRAME, strlen(NEW_FRAME));
    (void)n; // what follows fails, too
  }
  if (st == TD_OK) fputs(td_buf_text(&frame), stdout);
  fflush(stdout);
  td_buf_free(&frame);
  return st;
}

int td_cmd_top(const td_options *o) {
  td_err err;
  const bool is_screen = td_terminal_moves_cursor(STDOUT_FILENO);
  sample samples[2] = {{.text = TD_BUF_INIT}, {.text = TD_BUF_INIT}};
  td_interrupt_catch();
  td_status st = take(&samples[0], o, &err);
  for (int i = 1; st == TD_OK; i ^= 1) {
    poll(NULL, 0, PERIOD_MS);
    if (td_interrupted()) break;
    st = take(&samples[i], o, &err);
    if (st == TD_OK) st = show(&samples[i ^ 1], &samples[i], is_screen, &err);
    if (!is_screen) break;
  }
  td_buf_free(&samples[0].text);
  td_buf_free(&samples[1].text);
  return st == TD_OK ? 0 : td_cmd_fail(&err);
}
