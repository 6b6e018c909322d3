// src/bench/load.c - generates load on a server and reports what its clients see.
// TTFT: request sent to first text. ITL: gap between two texts, over all requests. TPOT:
// (end-to-end - TTFT) / (output tokens - 1). Goodput: requests within all limits, per second.
// Interference: the first request generates one long response. Once a quarter of it has arrived,
// requests with long prompts and one output token follow one after another. The ITL of the long
// response is reported separately for gaps that overlap a prefill, even partly, and for the gaps
// before and after.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <uv.h>

#include "base/clock.h"
#include "base/grow.h"
#include "base/json_write.h"
#include "base/log.h"
#include "base/stats.h"
#include "bench/bench.h"
#include "bench/http_client.h"
#include "bench/openai_client.h"
#include "runtime/command.h"

typedef struct {
  double *values;
  size_t n, cap;
} series;

#define STREAM_WORDS 16 // prompt length of the watched request

typedef struct load load;

typedef struct {
  td_load_call call; // call.ctx points to this struct
  load *load;
  uint64_t first_ns, last_ns;
  int64_t n_prompt, n_output;
  int64_t n_tokens; // tokens received; counts events with text if the server does not report usage
                    // per token
  char event_error[160];
} request;

struct load {
  const td_options *options;
  uv_loop_t loop;
  uv_timer_t timer;
  td_load_target target;
  td_buf model;
  td_err err;
  request *requests; // [n_requests]
  uint32_t n_started, n_done, n_failed, n_good;
  uint64_t random, start_ns, end_ns;
  series ttft, itl, tpot, e2e; // ms
  series itl_alone;            // interference: gaps without a prefill; itl: the other gaps
  bool was_beside;             // a prefill was running when the last gap ended
  int64_t n_prompt, n_output;
  bool failed;      // out of memory
  bool ended_early; // the watched response ended before the last prefill
};

static void series_add(load *l, series *s, double value) {
  if (!TD_GROW(s->values, s->n, s->cap, 1024)) {
    l->failed = true;
    return;
  }
  s->values[s->n++] = value;
}

// Uniform in (0, 1): splitmix64 (Steele et al., OOPSLA 2014).
static double uniform(load *l) {
  uint64_t z = l->random += 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return ((double)((z ^ (z >> 31)) >> 11) + 0.5) * 0x1p-53;
}

// Seconds until the next arrival. gamma: shape 1/2 (coefficient of variation 1.41), i.e. the square
// of a normal deviate divided by the rate.
static double next_gap(load *l) {
  const td_options *o = l->options;
  if (o->load_shape == TD_LOAD_POISSON) return -log(uniform(l)) / o->rate;
  if (o->load_shape == TD_LOAD_GAMMA) {
    double normal = sqrt(-2 * log(uniform(l))) * cos(6.283185307179586 * uniform(l));
    return normal * normal / o->rate;
  }
  return 1 / o->rate;
}

static bool is_interference(const load *l) {
  return l->options->load_shape == TD_LOAD_INTERFERENCE;
}

static void start_next(load *l);

// Called for each gap of the watched response: records it and starts the first prefill.
static void watch_stream(load *l, const request *r, double gap_ms) {
  bool is_beside = l->n_started > l->n_done + 1; // the watched request is not done yet
  series_add(l, is_beside || l->was_beside ? &l->itl : &l->itl_alone, gap_ms);
  if (l->n_started == 1 && r->n_tokens >= l->options->bench_gen.values[0] / 4) start_next(l);
  l->was_beside = l->n_started > l->n_done + 1;
}

// Writes a prompt of random words, so that no two prompts share a prefix, within a run or between
// runs: the server may have a prefix cache. --seed makes them reproducible.
static void write_prompt(load *l, td_buf *out) {
  static const char *const words[] = {"river", "seven", "under", "light", "stone", "open",
                                      "ask",   "north", "paper", "green", "often", "table",
                                      "move",  "sound", "early", "plain"};
  uint32_t n = (uint32_t)l->options->bench_prompt.values[0];
  if (is_interference(l) && l->n_started == 1 && n > STREAM_WORDS) n = STREAM_WORDS;
  for (uint32_t i = 0; i < n; i++)
    td_buf_printf(out, "%s%s", i ? " " : "", words[(int)(uniform(l) * TD_COUNT(words))]);
}

static void on_event(td_load_call *call, const char *data, size_t len) {
  request *r = call->ctx;
  uint64_t now = td_clock_ns();
  td_client_event event;
  td_err err;
  if (len == 6 && !memcmp(data, "[DONE]", 6)) return;
  if (td_client_parse_event(&event, data, len, &err) != TD_OK) {
    snprintf(r->event_error, sizeof r->event_error, "an event is %.140s", err.msg);
    return;
  }
  if (event.is_error) snprintf(r->event_error, sizeof r->event_error, "%s", event.message);
  // A token that ends inside a UTF-8 character has no text; use the server's count if it sends one.
  bool is_token = event.is_so_far ? event.n_output > r->n_output : event.has_text;
  if (event.n_prompt >= 0) r->n_prompt = event.n_prompt;
  if (event.n_output >= 0) r->n_output = event.n_output;
  if (!is_token) return;
  if (r->n_tokens++) {
    double gap_ms = (double)(now - r->last_ns) * 1e-6;
    if (is_interference(r->load))
      watch_stream(r->load, r, gap_ms);
    else
      series_add(r->load, &r->load->itl, gap_ms);
  } else {
    r->first_ns = now;
  }
  r->last_ns = now;
}

static const char *failure_of(const request *r) {
  if (r->call.error[0]) return r->call.error;
  if (r->event_error[0]) return r->event_error;
  if (r->call.http_status != 200) return td_buf_text(&r->call.body);
  bool may_be_mute = is_interference(r->load) && r != r->load->requests; // its single token may be
                                                                         // an incomplete character
  return r->n_tokens || may_be_mute ? NULL : "no text came";
}

static void record(load *l, const request *r) {
  const td_options *o = l->options;
  uint64_t start = r->call.start_ns, end = td_clock_ns();
  double ttft = (double)((r->n_tokens ? r->first_ns : end) - start) * 1e-6,
         e2e = (double)(end - start) * 1e-6;
  int64_t n_output = r->n_output > 0 ? r->n_output : r->n_tokens;
  double tpot = n_output > 1 ? (e2e - ttft) / (double)(n_output - 1) : 0;
  series_add(l, &l->ttft, ttft);
  series_add(l, &l->e2e, e2e);
  if (n_output > 1) series_add(l, &l->tpot, tpot);
  l->n_prompt += r->n_prompt > 0 ? r->n_prompt : 0;
  l->n_output += n_output;
  bool in_time = !o->slo_ttft_ms || ttft <= o->slo_ttft_ms;
  l->n_good += in_time && (!o->slo_tpot_ms || tpot <= o->slo_tpot_ms);
}

static void on_request_done(td_load_call *call) {
  request *r = call->ctx;
  load *l = r->load;
  const char *failure = failure_of(r);
  if (failure) {
    l->n_failed++;
    td_warn("request %zu failed: status %d, %.200s", (size_t)(r - l->requests), r->call.http_status,
            failure);
  } else {
    record(l, r);
  }
  td_load_call_free(&r->call);
  l->n_done++;
  l->end_ns = td_clock_ns();
  bool is_stream = is_interference(l) && r == l->requests;
  if (is_stream && l->n_done < l->options->n_requests)
    l->ended_early = true;
  else if (is_interference(l) || l->options->load_shape == TD_LOAD_CONCURRENCY)
    start_next(l);
}

static void start_next(load *l) {
  if (l->n_started == l->options->n_requests || l->ended_early) return;
  request *r = &l->requests[l->n_started++];
  r->load = l;
  r->call.target = &l->target;
  r->call.on_event = on_event;
  r->call.on_done = on_request_done;
  r->call.ctx = r;
  bool is_prompt = is_interference(l) && l->n_started > 1;
  td_buf prompt = TD_BUF_INIT, body = TD_BUF_INIT;
  write_prompt(l, &prompt);
  td_client_body(&body, td_buf_text(&l->model), td_buf_text(&prompt),
                 is_prompt ? 1 : (uint32_t)l->options->bench_gen.values[0], l->options->extra_body);
  td_load_call_start(&r->call, &l->loop, "/v1/chat/completions", &body);
  td_buf_free(&prompt);
  td_buf_free(&body);
}

static void on_arrival(uv_timer_t *timer) {
  load *l = timer->data;
  start_next(l);
  if (l->n_started < l->options->n_requests)
    uv_timer_start(timer, on_arrival, (uint64_t)(next_gap(l) * 1000 + 0.5), 0);
  else
    uv_close((uv_handle_t *)timer, NULL);
}

static td_status run_load(load *l, td_err *err) {
  l->requests = calloc((size_t)l->options->n_requests, sizeof *l->requests);
  if (!l->requests) return td_fail(err, TD_ENOMEM, "out of memory");
  l->start_ns = td_clock_ns();
  if (is_interference(l)) {
    start_next(l);
  } else if (l->options->load_shape == TD_LOAD_CONCURRENCY) {
    for (int64_t i = 0; i < l->options->concurrency; i++)
      start_next(l);
  } else {
    uv_timer_init(&l->loop, &l->timer);
    l->timer.data = l;
    uv_timer_start(&l->timer, on_arrival, 0, 0);
  }
  uv_run(&l->loop, UV_RUN_DEFAULT);
  if (l->failed) return td_fail(err, TD_ENOMEM, "out of memory: the record of a run");
  if (l->ended_early) {
    return td_fail(err, TD_EINVAL,
                   "the answer ended before all prompts were read: give a larger --gen-tokens or "
                   "fewer --requests");
  }
  return TD_OK;
}

// ---- the model's name -----------------------------------------------------------------------

// Uses --model, or the first model that the server lists.
static td_status choose_model(load *l, td_err *err) {
  if (l->options->model) {
    td_buf_str(&l->model, l->options->model);
    return td_buf_status(&l->model, err);
  }
  td_buf models = TD_BUF_INIT;
  const td_fetch_args args = {
      .server = l->options->server, .api_key = l->options->api_key, .path = "/v1/models"};
  td_status st = td_fetch(&models, &args, err);
  if (st == TD_OK) {
    st = td_client_parse_models(&l->model, td_buf_text(&models), models.len, err);
    if (st != TD_OK) td_err_prefix(err, "%s", l->options->server);
  }
  td_buf_free(&models);
  return st;
}

// ---- report ---------------------------------------------------------------------------------

static double percentile(const series *s, double p) {
  return td_percentile(s->values, s->n, p);
}

static void report_series(series *s, const char *name, const char *title, td_json_writer *w) {
  td_sort(s->values, s->n);
  double mean = 0;
  for (size_t i = 0; i < s->n; i++)
    mean += s->values[i] / (double)s->n;
  if (!w) {
    printf("%-18s %10.2f %10.2f %10.2f %10.2f %10.2f\n", title, mean, percentile(s, 50),
           percentile(s, 90), percentile(s, 99), percentile(s, 100));
    return;
  }
  td_jw_begin_object(w, name);
  td_jw_add(w, "'mean': %g, 'p50': %g, 'p90': %g, 'p99': %g, 'max': %g}", s->n ? mean : NAN,
            percentile(s, 50), percentile(s, 90), percentile(s, 99), percentile(s, 100));
}

static void report_counts(const load *l, double seconds, td_json_writer *w) {
  double rate = (double)l->n_output / seconds, goodput = l->n_good / seconds;
  if (!w) {
    printf("%s, %s: %u requests, %u failed, %.2f s\n", l->options->server, td_buf_text(&l->model),
           l->n_done, l->n_failed, seconds);
    printf("output %.2f tokens/s, %.3f requests/s, goodput %.3f requests/s\n", rate,
           (l->n_done - l->n_failed) / seconds, goodput);
    printf("%-18s %10s %10s %10s %10s %10s\n", "ms", "mean", "p50", "p90", "p99", "max");
    return;
  }
  td_jw_add(w,
            "'server': %s, 'model': %s, 'load': %s, 'requests': %u, 'failed': %u, 'seconds': %g, "
            "'prompt_tokens': %ld, 'output_tokens': %ld, 'output_tokens_per_s': %g, "
            "'requests_per_s': %g",
            l->options->server, td_buf_text(&l->model),
            td_load_name((td_load_shape)l->options->load_shape), l->n_done, l->n_failed, seconds,
            l->n_prompt, l->n_output, rate, (l->n_done - l->n_failed) / seconds);
  td_jw_add(w, "'goodput_per_s': %g, 'slo_ttft_ms': %g, 'slo_tpot_ms': %g", goodput,
            l->options->slo_ttft_ms, l->options->slo_tpot_ms);
}

static void report(load *l) {
  td_buf text = TD_BUF_INIT;
  td_json_writer writer = TD_JSON_WRITER(&text), *w = l->options->json ? &writer : NULL;
  if (w) td_jw_begin_object(w, NULL);
  report_counts(l, (double)(l->end_ns - l->start_ns) * 1e-9, w);
  report_series(&l->ttft, "ttft_ms", "TTFT", w);
  if (is_interference(l)) report_series(&l->itl_alone, "itl_alone_ms", "ITL, alone", w);
  report_series(&l->itl, "itl_ms", is_interference(l) ? "ITL, prompts read" : "ITL", w);
  report_series(&l->tpot, "tpot_ms", "TPOT", w);
  report_series(&l->e2e, "e2e_ms", "end-to-end", w);
  if (w) {
    td_jw_end_object(w);
    puts(td_buf_text(&text));
  }
  td_buf_free(&text);
}

static uint64_t choose_seed(const td_options *o) {
  uint64_t seed = (uint64_t)o->seed;
  if (td_options_given(o, "seed") || getrandom(&seed, sizeof seed, 0) == sizeof seed) return seed;
  return td_clock_ns();
}

int td_bench_server(const td_options *o) {
  load l = {.options = o, .random = choose_seed(o)};
  td_err err;
  td_status st = TD_OK;
  if (is_interference(&l) && o->n_requests < 2)
    st = td_fail(&err, TD_EINVAL, "--load interference needs --requests 2 at least");
  if (st == TD_OK) st = td_client_check_extra(o->extra_body, &err);
  if (st == TD_OK) st = td_load_target_parse(&l.target, o->server, &err);
  l.target.api_key = o->api_key;
  const int error = uv_loop_init(&l.loop);
  if (st == TD_OK && error)
    st = td_fail(&err, TD_EIO, "cannot make an event loop: %s", uv_strerror(error));
  if (st == TD_OK) st = choose_model(&l, &err);
  if (st == TD_OK) st = run_load(&l, &err);
  if (!error) uv_loop_close(&l.loop);
  if (st == TD_OK) report(&l);
  bool all_failed = st == TD_OK && l.n_failed == l.n_done;
  td_buf_free(&l.model);
  free(l.requests);
  free(l.ttft.values);
  free(l.itl.values);
  free(l.itl_alone.values);
  free(l.tpot.values);
  free(l.e2e.values);
  return st != TD_OK ? td_cmd_fail(&err) : all_failed;
}
