// src/front/metrics.c - histograms, and writing GET /metrics.
#include "front/metrics.h"

#include <inttypes.h>

static const double first_token_bounds[TD_HISTOGRAM_BOUNDS] = {
    0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640};
static const double next_token_bounds[TD_HISTOGRAM_BOUNDS] = {
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15,
    0.2,   0.3,    0.4,   0.5,  0.75,  1,    2.5,   5,   10};
static const double whole_bounds[TD_HISTOGRAM_BOUNDS] = {
    0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 15, 20, 30, 45, 60, 120, 240, 480, 960, 1920};

static const char *const finish_names[TD_N_FINISHES] = {"stop", "length", "abort", "error"};

void td_metrics_init(td_metrics *metrics) {
  *metrics = (td_metrics){.first_token.bounds = first_token_bounds,
                          .next_token.bounds = next_token_bounds,
                          .whole.bounds = whole_bounds};
}

void td_histogram_add(td_histogram *h, uint64_t ns) {
  double seconds = (double)ns * 1e-9;
  int i = 0;
  while (i < TD_HISTOGRAM_BOUNDS && seconds > h->bounds[i])
    i++;
  h->counts[i]++;
  h->sum += seconds;
}

// ---- writing ----------------------------------------------------------------------------------

typedef struct {
  td_buf *out;
  td_buf label; // model_name="..."
} writer;

static void write_label(td_buf *out, const char *model) {
  td_buf_str(out, "model_name=\"");
  for (const char *c = model; *c; c++) {
    if (*c == '\n') {
      td_buf_str(out, "\\n");
      continue;
    }
    if (*c == '"' || *c == '\\') td_buf_char(out, '\\');
    td_buf_char(out, *c);
  }
  td_buf_char(out, '"');
}

static void write_head(const writer *w, const char *name, const char *type, const char *help) {
  td_buf_printf(w->out, "# HELP tandem_%s %s\n# TYPE tandem_%s %s\n", name, help, name, type);
}

static void write_gauge(const writer *w, const char *name, double value, const char *help) {
  write_head(w, name, "gauge", help);
  td_buf_printf(w->out, "tandem_%s{%s} %.9g\n", name, td_buf_text(&w->label), value);
}

static void write_counter(const writer *w, const char *name, uint64_t value, const char *help) {
  write_head(w, name, "counter", help);
  td_buf_printf(w->out, "tandem_%s{%s} %" PRIu64 "\n", name, td_buf_text(&w->label), value);
}

static void write_finished(const writer *w, const td_metrics *m) {
  write_head(w, "requests_total", "counter", "Requests that ended, by how they did.");
  for (int i = 0; i < TD_N_FINISHES; i++) {
    td_buf_printf(w->out, "tandem_requests_total{%s,finished_reason=\"%s\"} %" PRIu64 "\n",
                  td_buf_text(&w->label), finish_names[i], m->n_finished[i]);
  }
}

static void write_routed(const writer *w, const td_metrics *m) {
  static const struct {
    const char *method, *path;
  } routes[TD_N_ROUTES] = {
#define X(name, method, path, needs, what) {method, path},
      TD_ROUTES(X)
#undef X
  };
  write_head(w, "http_requests_total", "counter", "HTTP requests, by endpoint.");
  for (int i = 0; i < TD_N_ROUTES; i++) {
    td_buf_printf(w->out, "tandem_http_requests_total{%s,method=\"%s\",path=\"%s\"} %" PRIu64 "\n",
                  td_buf_text(&w->label), routes[i].method, routes[i].path, m->n_routed[i]);
  }
}

static void write_histogram(const writer *w, const char *name, const td_histogram *h,
                            const char *help) {
  const char *label = td_buf_text(&w->label);
  uint64_t n = 0;
  write_head(w, name, "histogram", help);
  for (int i = 0; i < TD_HISTOGRAM_BOUNDS; i++) {
    n += h->counts[i];
    td_buf_printf(w->out, "tandem_%s_bucket{%s,le=\"%g\"} %" PRIu64 "\n", name, label, h->bounds[i],
                  n);
  }
  n += h->counts[TD_HISTOGRAM_BOUNDS];
  td_buf_printf(w->out, "tandem_%s_bucket{%s,le=\"+Inf\"} %" PRIu64 "\n", name, label, n);
  td_buf_printf(w->out, "tandem_%s_sum{%s} %.9g\n", name, label, h->sum);
  td_buf_printf(w->out, "tandem_%s_count{%s} %" PRIu64 "\n", name, label, n);
}

static void write_workers(const writer *w, const td_metrics_now *now) {
  const char *label = td_buf_text(&w->label);
  write_head(w, "worker_up", "gauge", "1: the worker process is running and responsive.");
  for (uint32_t i = 0; i < now->n_workers; i++) {
    td_buf_printf(w->out, "tandem_worker_up{%s,worker=\"%s\"} %d\n", label, now->workers[i].role,
                  now->workers[i].state == TD_BACKEND_READY);
  }
  write_head(w, "worker_requests_running", "gauge", "Requests at the worker process.");
  for (uint32_t i = 0; i < now->n_workers; i++) {
    td_buf_printf(w->out, "tandem_worker_requests_running{%s,worker=\"%s\"} %u\n", label,
                  now->workers[i].role, now->workers[i].n_running);
  }
  write_head(w, "worker_restarts_total", "counter", "Times the worker process was started again.");
  for (uint32_t i = 0; i < now->n_workers; i++) {
    td_buf_printf(w->out, "tandem_worker_restarts_total{%s,worker=\"%s\"} %u\n", label,
                  now->workers[i].role, now->workers[i].n_restarts);
  }
}

static void write_kv_disk(const writer *w, const td_kv_disk_stats *stats) {
  write_gauge(w, "kv_disk_bytes", (double)stats->bytes, "Bytes in --kv-dir.");
  write_counter(w, "kv_disk_hits_total", stats->n_hits, "Tokens of prompts read from --kv-dir.");
  write_counter(w, "kv_disk_read_bytes_total", stats->read_bytes, "Bytes read from --kv-dir.");
  write_counter(w, "kv_disk_written_bytes_total", stats->written_bytes,
                "Bytes written to --kv-dir.");
  write_counter(w, "kv_disk_dropped_total", stats->n_damaged,
                "Files of --kv-dir that were damaged or not this model's.");
}

void td_metrics_write(td_buf *out, const td_metrics *m, const td_metrics_now *now) {
  writer w = {.out = out, .label = TD_BUF_INIT};
  write_label(&w.label, now->model);
  write_gauge(&w, "num_requests_running", now->n_running, "Requests that are running.");
  write_gauge(&w, "num_requests_waiting", now->n_waiting, "Requests that wait for their turn.");
  write_gauge(&w, "kv_cache_usage_perc", now->kv_use,
              "KV pages that running requests hold, 1 is all.");
  write_counter(&w, "num_preemptions_total", now->n_preemptions,
                "Times a request was preempted because another needed its KV pages.");
  write_finished(&w, m);
  write_routed(&w, m);
  write_counter(&w, "prompt_tokens_total", m->n_prompt, "Tokens of prompts, cached ones included.");
  write_counter(&w, "generation_tokens_total", m->n_output, "Generated tokens.");
  write_counter(&w, "prefix_cache_queries_total", m->n_prompt,
                "Tokens looked for in the cache of prefixes.");
  write_counter(&w, "prefix_cache_hits_total", m->n_cached,
                "Tokens found in the cache of prefixes.");
  if (now->has_kv_dir) write_kv_disk(&w, &now->kv_disk);
  write_workers(&w, now);
  write_histogram(&w, "time_to_first_token_seconds", &m->first_token,
                  "From a request's arrival to its first token.");
  write_histogram(&w, "inter_token_latency_seconds", &m->next_token,
                  "Between two generated tokens of a request.");
  write_histogram(&w, "e2e_request_latency_seconds", &m->whole,
                  "From a request's arrival to its last token.");
  if (w.label.failed) out->failed = true;
  td_buf_free(&w.label);
}
