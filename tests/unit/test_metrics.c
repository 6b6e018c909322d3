// tests/unit/test_metrics.c - what GET /metrics writes, held against the text format's rules.
// CTest: no-tsan
#include <ctype.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/fs.h"
#include "front/metrics.h"
#include "unit/testing.h"

#define MS UINT64_C(1000000)

static td_buf written(const td_metrics *metrics, const char *model) {
  td_buf out = TD_BUF_INIT;
  const uint64_t n_routed[TD_N_ROUTES] = {[TD_ROUTE_ID_health] = 7};
  td_metrics_model m = {.counts = metrics,
                        .model = model,
                        .state = TD_HOST_LOADING,
                        .n_loads = 4,
                        .n_running = 3,
                        .n_waiting = 70,
                        .kv_use = 0.25,
                        .n_workers = 2};
  m.workers[0] = (td_backend_worker){.role = "prefill", .state = TD_BACKEND_READY};
  m.workers[1] = (td_backend_worker){
      .role = "decode",
      .state = TD_BACKEND_LOADING,
      .n_restarts = 2,
      .n_running = 5,
      .drive = {.hits = 20,
                .misses = 10,
                .n_bytes = 5000,
                .busy_ns = 1500000000,
                .prefetches_used = 3,
                .prefetches_unused = 2,
                .n_slots = 4,
                .n_ready = 3},
      .cache = {.hits = 70, .misses = 30, .moves = 9, .n_slots = 8, .n_cached = 6},
      .gpu_bytes = UINT64_C(80) << 30};
  td_metrics_write(
      &out, &(td_metrics_now){.models = &m, .n = 1, .n_routed = n_routed, .memory_bytes = 9});
  assert_false(out.failed);
  return out;
}

static void expect_line(const td_buf *text, const char *line) {
  const char *found = strstr(text->data, line);
  if (!found) print_error("missing: %s\nin:\n%s\n", line, text->data);
  assert_non_null(found);
  assert_true(found == text->data || found[-1] == '\n');
  assert_int_equal(found[strlen(line)], '\n');
}

TEST(values) {
  td_metrics m;
  td_metrics_init(&m);
  m.n_finished[TD_FINISH_STOP] = 5;
  m.n_finished[TD_FINISH_ERROR] = 1;
  m.n_prompt = 12345678901u;
  m.n_cached = 64;
  m.n_output = 99;
  td_buf text = written(&m, "nano");
  expect_line(&text, "# TYPE vllm:num_requests_running gauge");
  expect_line(&text, "vllm:num_requests_waiting{model_name=\"nano\"} 70");
  expect_line(&text, "vllm:prefix_cache_hits_total{model_name=\"nano\"} 64");
  expect_line(&text, "# TYPE tandem_num_requests_running gauge");
  expect_line(&text, "tandem_num_requests_running{model_name=\"nano\"} 3");
  expect_line(&text, "tandem_num_requests_waiting{model_name=\"nano\"} 70");
  expect_line(&text, "tandem_kv_cache_usage_perc{model_name=\"nano\"} 0.25");
  expect_line(&text, "# TYPE tandem_requests_total counter");
  expect_line(&text, "tandem_requests_total{model_name=\"nano\",finished_reason=\"stop\"} 5");
  expect_line(&text, "tandem_requests_total{model_name=\"nano\",finished_reason=\"length\"} 0");
  expect_line(&text, "tandem_requests_total{model_name=\"nano\",finished_reason=\"abort\"} 0");
  expect_line(&text, "tandem_requests_total{model_name=\"nano\",finished_reason=\"error\"} 1");
  expect_line(&text, "tandem_prompt_tokens_total{model_name=\"nano\"} 12345678901");
  expect_line(&text, "tandem_generation_tokens_total{model_name=\"nano\"} 99");
  expect_line(&text, "tandem_prefix_cache_queries_total{model_name=\"nano\"} 12345678901");
  expect_line(&text, "tandem_prefix_cache_hits_total{model_name=\"nano\"} 64");
  expect_line(&text, "tandem_worker_up{model_name=\"nano\",worker=\"prefill\"} 1");
  expect_line(&text, "tandem_worker_up{model_name=\"nano\",worker=\"decode\"} 0");
  expect_line(&text, "tandem_worker_requests_running{model_name=\"nano\",worker=\"decode\"} 5");
  expect_line(&text, "tandem_worker_restarts_total{model_name=\"nano\",worker=\"decode\"} 2");
  expect_line(&text, "tandem_gpu_memory_bytes{model_name=\"nano\",worker=\"decode\"} 85899345920");
  expect_line(&text, "tandem_memory_bytes 9");
  expect_line(&text, "tandem_model_loads_total{model_name=\"nano\"} 4");
  expect_line(&text, "tandem_model_state{model_name=\"nano\",state=\"loading\"} 1");
  expect_line(&text, "tandem_model_state{model_name=\"nano\",state=\"ok\"} 0");
  expect_line(&text, "tandem_expert_cache_slots{model_name=\"nano\"} 8");
  expect_line(&text, "tandem_expert_cache_experts{model_name=\"nano\"} 6");
  expect_line(&text, "tandem_expert_cache_hits_total{model_name=\"nano\"} 70");
  expect_line(&text, "tandem_expert_cache_misses_total{model_name=\"nano\"} 30");
  expect_line(&text, "tandem_expert_cache_moves_total{model_name=\"nano\"} 9");
  expect_line(&text, "tandem_streamed_expert_slots{model_name=\"nano\"} 4");
  expect_line(&text, "tandem_streamed_expert_hits_total{model_name=\"nano\"} 20");
  expect_line(&text, "tandem_streamed_expert_prefetches_used_total{model_name=\"nano\"} 3");
  expect_line(&text, "tandem_streamed_expert_prefetches_unused_total{model_name=\"nano\"} 2");
  expect_line(&text, "tandem_streamed_expert_read_bytes_total{model_name=\"nano\"} 5000");
  expect_line(&text, "tandem_streamed_expert_read_seconds_total{model_name=\"nano\"} 1.500");
  assert_int_equal(text.data[text.len - 1], '\n');
  td_buf_free(&text);
}

// Whether openapi.json has the path of a route ("/v1/models/*" is "/v1/models/{id}") with its
// method and what it answers.
static bool is_described(const td_buf *api, const char *method, const char *path,
                         const char *what) {
  td_buf begin = TD_BUF_INIT, operation = TD_BUF_INIT;
  size_t len = strcspn(path, "*");
  td_buf_printf(&begin, "\n    \"%.*s%s\": {", (int)len, path, path[len] ? "{id}" : "");
  td_buf_str(&operation, "\"");
  for (const char *c = method; *c; c++)
    td_buf_char(&operation, (char)tolower(*c));
  td_buf_printf(&operation, "\": {\"summary\": \"%s\",", what);
  const char *at = strstr(td_buf_text(api), td_buf_text(&begin));
  const char *end = at ? strstr(at + 1, "\n    \"/") : NULL;
  const char *is = at ? strstr(at, td_buf_text(&operation)) : NULL;
  const bool found = is && (!end || is < end);
  if (!found) print_error("openapi.json lacks: %s%s\n", begin.data, operation.data);
  td_buf_free(&begin);
  td_buf_free(&operation);
  return found;
}

// Every route has a counter, a row in the folder's README and a path in openapi.json, and no path
// and method has two.
TEST(routes) {
  static const char *const names[] = {
#define X(name, method, path, needs, what) method " " path,
      TD_ROUTES(X)
#undef X
  };
  td_metrics m;
  td_metrics_init(&m);
  td_buf text = written(&m, "a"), page = TD_BUF_INIT, api = TD_BUF_INIT;
  expect_line(&text, "tandem_http_requests_total{model_name=\"a\",method=\"GET\","
                     "path=\"/health\"} 7");
  td_err err;
  assert_int_equal(td_file_read(&page, TD_TEST_DIR "/../src/front/README.md", 1 << 20, &err),
                   TD_OK);
  assert_int_equal(td_file_read(&api, TD_TEST_DIR "/../src/front/openapi.json", 1 << 20, &err),
                   TD_OK);
#define X(name, method, path, needs, what)                                                         \
  assert_true(is_described(&api, method, path, what));                                             \
  expect_line(&page, "| `" method " " path "` | " what " |");                                      \
  assert_non_null(strstr(text.data, "method=\"" method "\",path=\"" path "\"} "));
  TD_ROUTES(X)
#undef X
  for (int i = 0; i < TD_N_ROUTES; i++) {
    for (int j = 0; j < i; j++)
      assert_string_not_equal(names[i], names[j]);
  }
  td_buf_free(&text);
  td_buf_free(&page);
  td_buf_free(&api);
}

// Buckets add up from below; a value on a bound is in it; one above all is in +Inf alone.
TEST(histograms) {
  td_metrics m;
  td_metrics_init(&m);
  td_histogram_add(&m.next_token, 0);
  td_histogram_add(&m.next_token, 25 * MS);
  td_histogram_add(&m.next_token, 26 * MS);
  td_histogram_add(&m.next_token, 100000 * MS);
  td_buf text = written(&m, "a");
  expect_line(&text, "# TYPE tandem_inter_token_latency_seconds histogram");
#define BUCKET "tandem_inter_token_latency_seconds_bucket{model_name=\"a\",le="
  expect_line(&text, BUCKET "\"0.001\"} 1");
  expect_line(&text, BUCKET "\"0.01\"} 1");
  expect_line(&text, BUCKET "\"0.025\"} 2");
  expect_line(&text, BUCKET "\"0.05\"} 3");
  expect_line(&text, BUCKET "\"10\"} 3");
  expect_line(&text, BUCKET "\"+Inf\"} 4");
  expect_line(&text, "tandem_inter_token_latency_seconds_sum{model_name=\"a\"} 100.051");
  expect_line(&text, "tandem_inter_token_latency_seconds_count{model_name=\"a\"} 4");
  expect_line(&text, "tandem_time_to_first_token_seconds_count{model_name=\"a\"} 0");
  expect_line(&text, "tandem_e2e_request_latency_seconds_bucket{model_name=\"a\",le=\"+Inf\"} 0");
  for (int i = 1; i < TD_HISTOGRAM_BOUNDS; i++) {
    assert_true(m.first_token.bounds[i] > m.first_token.bounds[i - 1]);
    assert_true(m.next_token.bounds[i] > m.next_token.bounds[i - 1]);
    assert_true(m.whole.bounds[i] > m.whole.bounds[i - 1]);
  }
  td_buf_free(&text);
}

TEST(names_are_escaped) {
  td_metrics m;
  td_metrics_init(&m);
  td_buf text = written(&m, "a\"b\\c\nd");
  expect_line(&text, "tandem_num_requests_running{model_name=\"a\\\"b\\\\c\\nd\"} 3");
  td_buf_free(&text);
}

// Each family is declared once and has a sample of every model; counts of routes have no model.
TEST(several_models) {
  td_metrics first, second;
  td_metrics_init(&first);
  td_metrics_init(&second);
  first.n_output = 5;
  second.n_output = 6;
  const uint64_t n_routed[TD_N_ROUTES] = {0};
  td_metrics_model models[] = {{.counts = &first, .model = "a", .state = TD_HOST_READY},
                               {.counts = &second, .model = "b", .state = TD_HOST_SLEEPING}};
  td_buf text = TD_BUF_INIT;
  td_metrics_write(&text, &(td_metrics_now){.models = models, .n = 2, .n_routed = n_routed});
  expect_line(&text, "tandem_generation_tokens_total{model_name=\"a\"} 5");
  expect_line(&text, "tandem_generation_tokens_total{model_name=\"b\"} 6");
  expect_line(&text, "tandem_model_state{model_name=\"b\",state=\"sleeping\"} 1");
  expect_line(&text, "tandem_http_requests_total{method=\"GET\",path=\"/health\"} 0");
  const char *declared = strstr(text.data, "# TYPE tandem_generation_tokens_total");
  assert_non_null(declared);
  assert_null(strstr(declared + 1, "# TYPE tandem_generation_tokens_total"));
  td_buf_free(&text);
}
