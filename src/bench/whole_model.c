// src/bench/whole_model.c - `tandem bench --model DIR`: prefill and decode speed on this machine.
// Bytes are counted, not estimated: the weights read by a step are the dense part and every expert
// used by at least one of its tokens.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/stats.h"
#include "bench/bench.h"
#include "bench/machine.h"
#include "bench/mem_bandwidth.h"
#include "bench/this_rig.h"
#include "runtime/command.h"
#include "runtime/predict.h"
#include "runtime/session.h"

typedef struct {
  const td_options *options;
  td_session *session;
  td_machine machine;
  td_read_speed reads;
  uint64_t random;      // state of the token generator
  int32_t *tokens;      // [n_ctx] scratch
  uint32_t *seqs;       // [max batch] open sequences
  uint8_t *chosen;      // [n_experts]
  td_rig rig;           // --plan
  td_json_writer *json; // NULL: print a table; else one line per case, so that an aborted run keeps
                        // its results
} bench;

typedef struct {
  bool is_prefill;
  uint32_t n_tokens, depth, batch;
} bench_case;

typedef struct {
  double seconds, bytes; // of one measurement
} bench_sample;

// ---- counting bytes -------------------------------------------------------------------------

static double expert_bytes(const td_layer *layer, uint32_t expert) {
  return (double)td_weight_bytes(&layer->gate[expert]) +
         (layer->up ? (double)td_weight_bytes(&layer->up[expert]) : 0) +
         (double)td_weight_bytes(&layer->down[expert]);
}

// Bytes of a layer's experts that the last step read.
static double routed_bytes(bench *b, uint32_t layer_idx) {
  const td_model_config *c = b->session->config;
  uint32_t n_tokens;
  const int32_t *ids = td_engine_routing(b->session->engine, layer_idx, &n_tokens);
  if (!ids) return 0;
  memset(b->chosen, 0, c->n_experts);
  double bytes = 0;
  for (size_t i = 0; i < (size_t)n_tokens * c->top_k; i++) {
    if (b->chosen[ids[i]]) continue;
    b->chosen[ids[i]] = 1;
    bytes += expert_bytes(td_model_layer(b->session->model, layer_idx), (uint32_t)ids[i]);
  }
  return bytes;
}

// Bytes that every step reads: one token's weights without routed experts. 0 if the CPU runs only
// the experts.
static double dense_bytes(const bench *b) {
  if (b->session->devices.expert_dev) return 0;
  const td_model_config *c = b->session->config;
  double bytes = (double)td_model_stats_of(b->session->model).active_bytes;
  for (uint32_t i = 0; i < c->n_layers; i++) {
    const td_layer *layer = td_model_layer(b->session->model, i);
    if (layer->is_moe) bytes -= c->top_k * expert_bytes(layer, 0);
  }
  return bytes;
}

static double step_bytes(bench *b) {
  double bytes = dense_bytes(b);
  for (uint32_t i = b->session->devices.n_gpu_expert_layers; i < b->session->config->n_layers; i++)
    bytes += routed_bytes(b, i);
  return bytes;
}

// ---- measuring ------------------------------------------------------------------------------

static int32_t random_token(bench *b) {
  b->random = b->random * 6364136223846793005u + 1442695040888963407u;
  return (int32_t)((b->random >> 33) % b->session->config->n_vocab);
}

// Prefills n random tokens of a sequence after n_past tokens, in chunks.
static td_status run_prompt(bench *b, uint32_t seq, uint32_t n_past, uint32_t n, double *bytes,
                            td_err *err) {
  td_session *s = b->session;
  td_status st = td_kv_reserve(s->kv, seq, n_past + n, err);
  for (uint32_t done = 0; st == TD_OK && done < n;) {
    uint32_t chunk = n - done < s->opts.runtime.prefill_chunk ? n - done
                                                              : s->opts.runtime.prefill_chunk;
    for (uint32_t i = 0; i < chunk; i++)
      b->tokens[i] = random_token(b);
    td_step_seq step = {.tokens = b->tokens,
                        .n_tokens = chunk,
                        .n_past = n_past + done,
                        .want = done + chunk == n ? TD_WANT_LAST : TD_WANT_NONE};
    step.pages = td_kv_pages(s->kv, seq, &step.n_pages);
    st = td_engine_step(s->engine, &step, 1, err);
    *bytes += step_bytes(b);
    done += chunk;
  }
  return st;
}

// Decodes one token for each sequence of the batch. Tokens are random and distinct: equal ones
// would use the same experts and overstate the speed.
static td_status run_decode_step(bench *b, uint32_t batch, uint32_t n_past, double *bytes,
                                 td_err *err) {
  td_session *s = b->session;
  td_step_seq steps[1024];
  for (uint32_t i = 0; i < batch; i++) {
    td_status st = td_kv_reserve(s->kv, b->seqs[i], n_past + 1, err);
    if (st != TD_OK) return st;
    b->tokens[i] = random_token(b);
    steps[i] = (td_step_seq){.tokens = &b->tokens[i],
                             .n_tokens = 1,
                             .n_past = n_past,
                             .want = TD_WANT_LAST,
                             .is_decode = true};
  }
  for (uint32_t i = 0; i < batch; i++)
    steps[i].pages = td_kv_pages(s->kv, b->seqs[i], &steps[i].n_pages);
  td_status st = td_engine_step(s->engine, steps, batch, err);
  *bytes += step_bytes(b);
  return st;
}

static td_status measure_prefill(bench *b, const bench_case *c, bench_sample *out, td_err *err) {
  double ignored = 0;
  td_status st = run_prompt(b, b->seqs[0], 0, c->depth, &ignored, err);
  double start = td_clock_s();
  if (st == TD_OK) st = run_prompt(b, b->seqs[0], c->depth, c->n_tokens, &out->bytes, err);
  out->seconds = td_clock_s() - start;
  return st;
}

static td_status measure_decode(bench *b, const bench_case *c, bench_sample *out, td_err *err) {
  td_status st = TD_OK;
  double ignored = 0;
  for (uint32_t i = 0; i < c->batch && st == TD_OK; i++)
    st = run_prompt(b, b->seqs[i], 0, c->depth, &ignored, err);
  double start = td_clock_s();
  for (uint32_t i = 0; i < c->n_tokens && st == TD_OK; i++)
    st = run_decode_step(b, c->batch, c->depth + i, &out->bytes, err);
  out->seconds = td_clock_s() - start;
  return st;
}

static td_status measure_once(bench *b, const bench_case *c, bench_sample *out, td_err *err) {
  *out = (bench_sample){0};
  td_status st = TD_OK;
  uint32_t n_open = 0;
  for (; n_open < c->batch && st == TD_OK; n_open++) {
    st = td_kv_seq_open(b->session->kv, &b->seqs[n_open], err);
    if (st != TD_OK) break;
  }
  if (st == TD_OK)
    st = c->is_prefill ? measure_prefill(b, c, out, err) : measure_decode(b, c, out, err);
  while (n_open)
    td_kv_seq_close(b->session->kv, b->seqs[--n_open]);
  return st;
}

// ---- predicting -----------------------------------------------------------------------------

// Memory and arithmetic of a shared machine differ from minute to minute, so it is measured again
// before each case.
static td_status prepare_plan(bench *b, td_err *err) {
  const td_options *o = b->options;
  if (!o->with_plan) return TD_OK;
  if (td_rig_is_this(o->machine) && b->session->devices.placement.is_discrete) {
    return td_fail(
        err, TD_EINVAL,
        "--plan: --machine this is the CPU alone; describe a machine with a GPU in a file, "
        "or add --device cpu");
  }
  return td_rig_open(&b->rig, o->machine, b->session->model, (unsigned)o->threads, err);
}

// Tokens per second, as predicted.
static double planned_rate(const bench *b, const bench_case *c) {
  td_plan_load load = td_plan_load_of(b->session->model);
  load.activations = b->options->activations;
  load.kv_dtype = td_cmd_kv_dtype(b->options);
  load.n_seqs = b->session->opts.max_seqs;
  td_expert_cache_size cache = {0};
  td_expert_cache_parse(&cache, b->options->expert_cache, NULL); // checked when the session opened
  td_card_plan card = {.fits = false};
  if (b->rig.n_gpus) card = td_card_plan_of(&load, &b->rig, &cache);
  const td_card_plan *plan = card.fits ? &card : NULL;
  if (c->is_prefill) {
    const double before_s = td_prefill_time_of(&load, &b->rig, plan, c->depth).seconds;
    const uint32_t n_all = c->depth + c->n_tokens;
    return c->n_tokens / (td_prefill_time_of(&load, &b->rig, plan, n_all).seconds - before_s);
  }
  const td_decode_work work = {c->batch, 1, c->depth + c->n_tokens / 2, 0};
  return c->batch / td_decode_time_of(&load, &b->rig, plan, &work).seconds;
}

// ---- reporting ------------------------------------------------------------------------------

typedef struct {
  double mean, median, min, max, stdev;
} spread;

// Sorts values in place.
static spread spread_of(double *values, size_t n) {
  spread s = {.median = td_median(values, n)};
  s.min = values[0], s.max = values[n - 1];
  for (size_t i = 0; i < n; i++)
    s.mean += values[i] / (double)n;
  double squares = 0;
  for (size_t i = 0; i < n; i++)
    squares += (values[i] - s.mean) * (values[i] - s.mean);
  if (n > 1) s.stdev = sqrt(squares / (double)(n - 1));
  return s;
}

static td_status print_line(bench *b, td_err *err) {
  if (!b->json || td_jw_print_line(b->json, stdout)) return TD_OK;
  return td_fail(err, TD_EINTERNAL, "a result cannot be written to stdout");
}

static void print_case(const bench *b, const bench_case *c, const spread *rate, double gbps,
                       double read_gbps) {
  const double planned = b->options->with_plan ? planned_rate(b, c) : 0;
  const char *kind = c->is_prefill ? "prefill" : "decode";
  if (!b->json) {
    printf("%-8s %7u %7u %6u %11.2f %11.2f %10.2f %8.2f %8.2f %7.2f", kind, c->n_tokens, c->depth,
           c->batch, rate->mean, rate->median, rate->stdev, gbps, read_gbps, gbps / read_gbps);
    if (b->options->with_plan) printf(" %11.2f %7.2f", planned, planned / rate->median);
    puts("");
    fflush(stdout);
    return;
  }
  td_json_writer *w = b->json;
  td_jw_add(w,
            "{'kind': %s, 'n_tokens': %u, 'depth': %u, 'batch': %u, 'repeat': %ld, "
            "'tokens_per_s': {'mean': %g, 'median': %g, 'min': %g",
            kind, c->n_tokens, c->depth, c->batch, b->options->repeat, rate->mean, rate->median,
            rate->min);
  td_jw_add(w,
            "'max': %g, 'stdev': %g}, 'gbps': %g, 'read_gbps': %g, 'share_of_read_bandwidth': %g",
            rate->max, rate->stdev, gbps, read_gbps, gbps / read_gbps);
  if (b->options->with_plan) {
    td_jw_double(w, "planned_tokens_per_s", planned);
    td_jw_double(w, "planned_over_measured", planned / rate->median);
  }
  td_jw_end_object(w);
}

static td_status run_case(bench *b, const bench_case *c, td_err *err) {
  double rates[1000], gbps[1000];
  size_t n = (size_t)b->options->repeat;
  bench_sample sample;
  td_status st = prepare_plan(b, err);
  if (st == TD_OK) st = measure_once(b, c, &sample, err); // warm-up
  double read_gbps = td_read_speed_gbps(&b->reads);
  for (size_t i = 0; i < n && st == TD_OK; i++) {
    st = measure_once(b, c, &sample, err);
    rates[i] = (double)c->n_tokens * c->batch / sample.seconds;
    gbps[i] = sample.bytes / sample.seconds * 1e-9;
  }
  if (st != TD_OK) return st;
  read_gbps = fmax(read_gbps, td_read_speed_gbps(&b->reads));
  if (td_rig_is_this(b->options->machine)) b->rig.read_gbps = read_gbps;
  spread rate = spread_of(rates, n), speed = spread_of(gbps, n);
  print_case(b, c, &rate, speed.median, read_gbps);
  return print_line(b, err);
}

static td_status run_cases(bench *b, td_err *err) {
  const td_options *o = b->options;
  td_status st = TD_OK;
  for (uint32_t d = 0; d < o->bench_depth.n; d++) {
    uint32_t depth = (uint32_t)o->bench_depth.values[d];
    for (uint32_t i = 0; i < o->bench_prompt.n && st == TD_OK; i++) {
      bench_case c = {true, (uint32_t)o->bench_prompt.values[i], depth, 1};
      if (c.n_tokens) st = run_case(b, &c, err);
    }
    for (uint32_t k = 0; k < o->bench_batch.n; k++) {
      for (uint32_t i = 0; i < o->bench_gen.n && st == TD_OK; i++) {
        bench_case c = {false, (uint32_t)o->bench_gen.values[i], depth,
                        (uint32_t)o->bench_batch.values[k]};
        if (c.n_tokens) st = run_case(b, &c, err);
      }
    }
  }
  return st;
}

static void print_head(bench *b) {
  td_model_stats stats = td_model_stats_of(b->session->model);
  const char *name = td_model_name(b->session->model);
  if (!b->json) {
    printf("%s: %.2f B parameters, %.2f B active, %.2f GB; %s, %u threads, reads %.1f GB/s\n", name,
           (double)stats.params * 1e-9, (double)stats.active_params * 1e-9,
           (double)stats.bytes * 1e-9, b->machine.cpu, b->machine.n_threads, b->machine.read_gbps);
    printf("%-8s %7s %7s %6s %11s %11s %10s %8s %8s %7s%s\n", "", "tokens", "depth", "batch",
           "mean tok/s", "median", "stdev", "GB/s", "of reads", "share",
           b->options->with_plan ? "     planned   ratio" : "");
    return;
  }
  td_jw_begin_object(b->json, NULL);
  td_machine_json(&b->machine, b->json);
  td_jw_add(b->json,
            "'model': {'name': %s, 'params': %lu, 'active_params': %lu, 'bytes': %lu, "
            "'load_s': %g}}",
            name, stats.params, stats.active_params, stats.bytes, b->session->load_s);
}

static uint32_t largest(const td_int_list *list) {
  int32_t best = 0;
  for (uint32_t i = 0; i < list->n; i++)
    if (list->values[i] > best) best = list->values[i];
  return (uint32_t)best;
}

static td_status measure_machine(bench *b, td_err *err) {
  b->machine = td_machine_get();
  td_status st = td_read_speed_open(&b->reads, (unsigned)b->options->threads, err);
  if (st != TD_OK) return st;
  b->machine.n_threads = td_thread_pool_size(b->reads.pool);
  b->machine.read_gbps = td_read_speed_gbps(&b->reads);
  return TD_OK;
}

static td_status open_bench(bench *b, td_err *err) {
  const td_options *o = b->options;
  td_session_opts opts;
  td_status st = td_cmd_session_opts(o, &opts, err);
  if (st != TD_OK) return st;
  uint32_t n_prompt = largest(&o->bench_prompt), n_gen = largest(&o->bench_gen);
  uint32_t batch = largest(&o->bench_batch);
  uint32_t n_ctx = largest(&o->bench_depth) + (n_prompt > n_gen ? n_prompt : n_gen);
  opts.runtime.ctx_size = n_ctx;
  opts.max_seqs = batch + 1; // in addition to the session's own sequence
  opts.record_routing = true;
  st = td_session_open(&b->session, &opts, err);
  if (st == TD_OK) st = measure_machine(b, err);
  if (st != TD_OK) return st;
  const uint32_t chunk = b->session->opts.runtime.prefill_chunk,
                 n_scratch = chunk > batch ? chunk : batch;
  b->tokens = malloc(n_scratch * sizeof *b->tokens);
  b->seqs = malloc(batch * sizeof *b->seqs);
  b->chosen = malloc(b->session->config->n_experts + 1);
  b->random = (uint64_t)o->seed;
  if (!b->tokens || !b->seqs || !b->chosen) return td_fail(err, TD_ENOMEM, "out of memory");
  return TD_OK;
}

int td_cmd_bench(const td_options *o) {
  if (o->server) return td_bench_server(o);
  td_buf text = TD_BUF_INIT;
  td_json_writer w = TD_JSON_WRITER(&text);
  bench b = {.options = o, .json = o->json ? &w : NULL};
  td_err err;
  td_status st = open_bench(&b, &err);
  if (st == TD_OK) {
    print_head(&b);
    st = print_line(&b, &err);
  }
  if (st == TD_OK) st = run_cases(&b, &err);
  td_buf_free(&text);
  td_read_speed_close(&b.reads);
  td_session_close(b.session);
  free(b.tokens);
  free(b.seqs);
  free(b.chosen);
  return st == TD_OK ? 0 : td_cmd_fail(&err);
}
