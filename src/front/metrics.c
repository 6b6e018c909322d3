// src/front/metrics.c - histograms, and writing GET /metrics.
#include "front/metrics.h"

#include <inttypes.h>
#include <stdlib.h>

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
  const char *prefix; // of the names that are being written
  const td_metrics_now *now;
  td_buf *labels; // [now->n] model_name="..."
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
  td_buf_printf(w->out, "# HELP %s%s %s\n# TYPE %s%s %s\n", w->prefix, name, help, w->prefix, name,
                type);
}

// Every model's value of one metric: an expression of m, the td_metrics_model.
#define EACH_MODEL(w, m)                                                                           \
  for (const td_metrics_model *m = (w)->now->models; m < (w)->now->models + (w)->now->n; m++)
#define GAUGE(w, name, value, help)                                                                \
  do {                                                                                             \
    write_head(w, name, "gauge", help);                                                            \
    EACH_MODEL(w, m)                                                                               \
    td_buf_printf((w)->out, "%s%s{%s} %.9g\n", (w)->prefix, name, label_of(w, m),                  \
                  (double)(value));                                                                \
  } while (0)
#define COUNTER(w, name, value, help)                                                              \
  do {                                                                                             \
    write_head(w, name, "counter", help);                                                          \
    EACH_MODEL(w, m)                                                                               \
    td_buf_printf((w)->out, "%s%s{%s} %" PRIu64 "\n", (w)->prefix, name, label_of(w, m), (value)); \
  } while (0)

static const char *label_of(const writer *w, const td_metrics_model *m) {
  return td_buf_text(&w->labels[m - w->now->models]);
}

static void write_states(const writer *w) {
  static const char *const names[] = {
#define X(id, name) name,
      TD_HOST_STATES(X)
#undef X
  };
  write_head(w, "model_state", "gauge", "1: the model is in this state.");
  EACH_MODEL(w, m)
  for (int i = 0; i < TD_N_HOST_STATES; i++) {
    td_buf_printf(w->out, "tandem_model_state{%s,state=\"%s\"} %d\n", label_of(w, m), names[i],
                  (int)m->state == i);
  }
}

static void write_finished(const writer *w) {
  write_head(w, "requests_total", "counter", "Requests that ended, by finish reason.");
  EACH_MODEL(w, m)
  for (int i = 0; i < TD_N_FINISHES; i++) {
    td_buf_printf(w->out, "tandem_requests_total{%s,finished_reason=\"%s\"} %" PRIu64 "\n",
                  label_of(w, m), finish_names[i], m->counts->n_finished[i]);
  }
}

// A request has a model only once its body is known, so that with several models these have none.
static void write_routed(const writer *w) {
  static const struct {
    const char *method, *path;
  } routes[TD_N_ROUTES] = {
#define X(name, method, path, needs, what) {method, path},
      TD_ROUTES(X)
#undef X
  };
  const bool has_label = w->now->n == 1;
  write_head(w, "http_requests_total", "counter", "HTTP requests, by endpoint.");
  for (int i = 0; i < TD_N_ROUTES; i++) {
    td_buf_printf(w->out, "tandem_http_requests_total{%s%smethod=\"%s\",path=\"%s\"} %" PRIu64 "\n",
                  has_label ? td_buf_text(&w->labels[0]) : "", has_label ? "," : "",
                  routes[i].method, routes[i].path, w->now->n_routed[i]);
  }
}

static void write_histogram(const writer *w, const char *name, const char *label,
                            const td_histogram *h) {
  const char *const p = w->prefix;
  uint64_t n = 0;
  for (int i = 0; i < TD_HISTOGRAM_BOUNDS; i++) {
    n += h->counts[i];
    td_buf_printf(w->out, "%s%s_bucket{%s,le=\"%g\"} %" PRIu64 "\n", p, name, label, h->bounds[i],
                  n);
  }
  n += h->counts[TD_HISTOGRAM_BOUNDS];
  td_buf_printf(w->out, "%s%s_bucket{%s,le=\"+Inf\"} %" PRIu64 "\n", p, name, label, n);
  td_buf_printf(w->out, "%s%s_sum{%s} %.9g\n", p, name, label, h->sum);
  td_buf_printf(w->out, "%s%s_count{%s} %" PRIu64 "\n", p, name, label, n);
}

#define HISTOGRAM(w, name, field, help)                                                            \
  do {                                                                                             \
    write_head(w, name, "histogram", help);                                                        \
    EACH_MODEL(w, m) write_histogram(w, name, label_of(w, m), &m->counts->field);                  \
  } while (0)

#define EACH_WORKER(m, k)                                                                          \
  for (const td_backend_worker *k = (m)->workers; k < (m)->workers + (m)->n_workers; k++)
#define WORKERS(w, name, type, value, help)                                                        \
  do {                                                                                             \
    write_head(w, name, type, help);                                                               \
    EACH_MODEL(w, m)                                                                               \
    EACH_WORKER(m, k)                                                                              \
    td_buf_printf((w)->out, "tandem_%s{%s,worker=\"%s\"} %" PRIu64 "\n", name, label_of(w, m),     \
                  k->role, (uint64_t)(value));                                                     \
  } while (0)

static void write_workers(const writer *w) {
  WORKERS(w, "worker_up", "gauge", k->state == TD_BACKEND_READY,
          "1: the worker process is running and responsive.");
  WORKERS(w, "worker_requests_running", "gauge", k->n_running, "Requests at the worker process.");
  WORKERS(w, "worker_restarts_total", "counter", k->n_restarts,
          "Times the worker process was started again.");
  WORKERS(w, "gpu_memory_bytes", "gauge", k->gpu_bytes,
          "Memory of the worker's GPU, 0 without one.");
  WORKERS(w, "gpu_memory_free_bytes", "gauge", k->gpu_free_bytes,
          "Free memory of the worker's GPU once it had loaded the model.");
}

static td_wire_cache caches_of(const td_metrics_model *m) {
  td_wire_cache sum = {.n_slots = 0};
  EACH_WORKER(m, k) {
    sum.hits += k->cache.hits;
    sum.misses += k->cache.misses;
    sum.moves += k->cache.moves;
    sum.n_slots += k->cache.n_slots;
    sum.n_cached += k->cache.n_cached;
  }
  return sum;
}

// Nothing without a cache.
static void write_caches(const writer *w) {
  uint32_t n_slots = 0;
  EACH_MODEL(w, m) n_slots += caches_of(m).n_slots;
  if (!n_slots) return;
  GAUGE(w, "expert_cache_slots", caches_of(m).n_slots,
        "Experts that the GPU's cache has room for.");
  GAUGE(w, "expert_cache_experts", caches_of(m).n_cached, "Experts in the GPU's cache.");
  COUNTER(w, "expert_cache_hits_total", caches_of(m).hits,
          "Experts that decode steps found in the GPU's cache.");
  COUNTER(w, "expert_cache_misses_total", caches_of(m).misses,
          "Experts that decode steps did not find in the GPU's cache.");
  COUNTER(w, "expert_cache_moves_total", caches_of(m).moves,
          "Experts that were copied to the GPU's cache.");
}

// Of all workers; they share the slots.
static td_wire_drive drive_of(const td_metrics_model *m) {
  td_wire_drive sum = {.n_slots = 0};
  EACH_WORKER(m, k) {
    sum.hits += k->drive.hits;
    sum.misses += k->drive.misses;
    sum.prefetches_used += k->drive.prefetches_used;
    sum.prefetches_unused += k->drive.prefetches_unused;
    sum.n_bytes += k->drive.n_bytes;
    sum.busy_ns += k->drive.busy_ns;
    if (k->drive.n_slots) sum.n_slots = k->drive.n_slots;
    if (k->drive.n_ready) sum.n_ready = k->drive.n_ready;
  }
  return sum;
}

// Nothing where experts do not come from the drive.
static void write_drives(const writer *w) {
  uint32_t n_slots = 0;
  EACH_MODEL(w, m) n_slots += drive_of(m).n_slots;
  if (!n_slots) return;
  GAUGE(w, "streamed_expert_slots", drive_of(m).n_slots,
        "Experts that memory has room for, of those that come from the drive.");
  GAUGE(w, "streamed_experts", drive_of(m).n_ready, "Experts in that memory.");
  COUNTER(w, "streamed_expert_hits_total", drive_of(m).hits,
          "Experts that a layer's tokens needed and found in memory.");
  COUNTER(w, "streamed_expert_misses_total", drive_of(m).misses,
          "Experts that were read from the drive.");
  COUNTER(w, "streamed_expert_prefetches_used_total", drive_of(m).prefetches_used,
          "Experts that were guessed, read before they were needed, and found in memory.");
  COUNTER(w, "streamed_expert_prefetches_unused_total", drive_of(m).prefetches_unused,
          "Experts that were guessed and then not needed.");
  COUNTER(w, "streamed_expert_read_bytes_total", drive_of(m).n_bytes,
          "Bytes of experts read from the drive.");
  write_head(w, "streamed_expert_read_seconds_total", "counter",
             "Time with such a read in progress, of each worker.");
  EACH_MODEL(w, m)
  td_buf_printf(w->out, "tandem_streamed_expert_read_seconds_total{%s} %.3f\n", label_of(w, m),
                (double)drive_of(m).busy_ns * 1e-9);
}

static void write_kv_disk(const writer *w) {
  GAUGE(w, "kv_disk_bytes", m->kv_disk.bytes, "Bytes in --kv-dir.");
  COUNTER(w, "kv_disk_hits_total", m->kv_disk.n_hits, "Tokens of prompts read from --kv-dir.");
  COUNTER(w, "kv_disk_read_bytes_total", m->kv_disk.read_bytes, "Bytes read from --kv-dir.");
  COUNTER(w, "kv_disk_written_bytes_total", m->kv_disk.written_bytes, "Bytes written to --kv-dir.");
  COUNTER(w, "kv_disk_rewritten_bytes_total", m->kv_disk.rewritten_bytes,
          "Of these, bytes of pages that had been written before.");
  GAUGE(w, "kv_disk_write_amplification", td_kv_disk_amplification(&m->kv_disk),
        "Bytes written to --kv-dir for each byte of pages, 1 is best.");
  COUNTER(w, "kv_disk_dropped_total", m->kv_disk.n_damaged,
          "Files of --kv-dir that were damaged or not this model's.");
}

// What means the same at vLLM, by whose names routers and dashboards ask for it.
static void write_shared(const writer *w) {
  GAUGE(w, "num_requests_running", m->n_running, "Requests that are running.");
  GAUGE(w, "num_requests_waiting", m->n_waiting, "Requests that wait for their turn.");
  GAUGE(w, "kv_cache_usage_perc", m->kv_use, "KV pages that running requests hold, 1 is all.");
  COUNTER(w, "num_preemptions_total", m->n_preemptions,
          "Times a request was preempted because another needed its KV pages.");
  COUNTER(w, "prompt_tokens_total", m->counts->n_prompt,
          "Tokens of prompts, cached ones included.");
  COUNTER(w, "generation_tokens_total", m->counts->n_output, "Generated tokens.");
  COUNTER(w, "prefix_cache_queries_total", m->counts->n_prompt,
          "Tokens looked for in the cache of prefixes.");
  COUNTER(w, "prefix_cache_hits_total", m->counts->n_cached,
          "Tokens found in the cache of prefixes.");
  COUNTER(w, "spec_decode_num_draft_tokens_total", m->counts->n_accepted + m->counts->n_rejected,
          "Tokens that were drafted and computed.");
  COUNTER(w, "spec_decode_num_accepted_tokens_total", m->counts->n_accepted,
          "Drafted tokens that became generated ones.");
  HISTOGRAM(w, "time_to_first_token_seconds", first_token,
            "From a request's arrival to its first token.");
  HISTOGRAM(w, "inter_token_latency_seconds", next_token,
            "Between two generated tokens of a request.");
  HISTOGRAM(w, "e2e_request_latency_seconds", whole, "From a request's arrival to its last token.");
  write_head(w, "cache_config_info", "gauge", "1: size of the KV cache.");
  EACH_MODEL(w, m)
  td_buf_printf(w->out, "%scache_config_info{%s,block_size=\"%u\",num_gpu_blocks=\"%u\"} 1\n",
                w->prefix, label_of(w, m), m->page_tokens, m->n_pages);
}

static void write_all(const writer *w) {
  write_states(w);
  COUNTER(w, "model_loads_total", m->n_loads, "Times the model was loaded.");
  write_finished(w);
  write_routed(w);
  if (w->now->has_kv_dir) write_kv_disk(w);
  write_workers(w);
  // Of the server and the machine, not of a model.
  write_head(w, "build_info", "gauge", "1: the server's version.");
  td_buf_str(w->out, "tandem_build_info{version=\"" TD_VERSION "\"} 1\n");
  write_head(w, "start_time_seconds", "gauge", "When the server was started, in Unix time.");
  td_buf_printf(w->out, "tandem_start_time_seconds %" PRId64 "\n", w->now->started);
  write_head(w, "memory_bytes", "gauge", "Memory of this machine, or its control group's limit.");
  td_buf_printf(w->out, "tandem_memory_bytes %" PRIu64 "\n", w->now->memory_bytes);
  write_head(w, "memory_available_bytes", "gauge", "Memory that programs could still use.");
  td_buf_printf(w->out, "tandem_memory_available_bytes %" PRIu64 "\n",
                w->now->memory_available_bytes);
  write_caches(w);
  write_drives(w);
  write_shared(w);
  writer as_vllm = *w;
  as_vllm.prefix = "vllm:";
  write_shared(&as_vllm);
}

void td_metrics_write(td_buf *out, const td_metrics_now *now) {
  writer w = {
      .out = out, .prefix = "tandem_", .now = now, .labels = calloc(now->n, sizeof *w.labels)};
  out->failed |= !w.labels;
  for (uint32_t i = 0; w.labels && i < now->n; i++) {
    write_label(&w.labels[i], now->models[i].model);
    out->failed |= w.labels[i].failed;
  }
  if (!out->failed) write_all(&w);
  for (uint32_t i = 0; w.labels && i < now->n; i++)
    td_buf_free(&w.labels[i]);
  free(w.labels);
}
