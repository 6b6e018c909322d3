// src/bench/layer.c - `tandem bench layer`: the routed experts of one DeepSeek-V3 layer through the
// device's MoE operator. Every step routes each token to new random distinct experts. Bytes count
// the experts that at least one token of the step uses. Weights lie on NUMA nodes as a server's do;
// --nodes counts which threads read them where, and measures the first node alone, too.
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/mem_info.h"
#include "bench/bench.h"
#include "bench/report.h"
#include "device/device.h"
#include "runtime/command.h"

enum { DIM = 7168, HIDDEN = 2048, TOP_K = 8 };

typedef struct {
  td_bench_report report;
  const td_format *format;
  uint32_t n_experts, top_k, n_largest; // n_largest: largest batch, in tokens
  td_weight *weights;                   // [3][n_experts]: gate, up, down
  void *memory;                         // of the weights
  float *x, *out, *route;               // [n_largest][DIM] twice, [n_largest][top_k]
  int32_t *ids;                         // [n_largest][top_k]
  uint8_t *chosen;                      // [n_experts]
  const td_nodes *nodes;                // that threads and weights are on
  td_stripes stripes;                   // of memory
  td_dev_reads reads;
  uint8_t *page_node; // NULL: reads are not counted
  double *alone_s;    // [batches]: on the first node alone; 0: not measured
  td_dev *dev;
  td_stream *stream;
  uint32_t n_tokens;
  uint64_t random;
  double bytes; // weight bytes read by the steps so far
  uint32_t n_steps;
  td_status status; // first error of a step
  td_err *err;
} layer_bench;

static void route_tokens(layer_bench *b) {
  memset(b->chosen, 0, b->n_experts);
  for (uint32_t t = 0; t < b->n_tokens; t++) {
    int32_t *ids = b->ids + (size_t)t * b->top_k;
    for (uint32_t j = 0; j < b->top_k;) {
      b->random = b->random * 6364136223846793005u + 1442695040888963407u;
      const int32_t id = (int32_t)((b->random >> 33) % b->n_experts);
      uint32_t i = 0;
      while (i < j && ids[i] != id)
        i++;
      if (i < j) continue;
      ids[j++] = id;
      b->chosen[id] = 1;
    }
  }
  for (uint32_t e = 0; e < b->n_experts; e++)
    for (uint32_t part = 0; part < 3 && b->chosen[e]; part++)
      b->bytes += (double)td_weight_bytes(&b->weights[part * b->n_experts + e]);
}

static void run_step(void *ctx) {
  layer_bench *b = ctx;
  if (b->status != TD_OK) return;
  route_tokens(b);
  b->n_steps++;
  td_op_moe(b->stream, &(td_moe_args){.gate = b->weights,
                                      .up = b->weights + b->n_experts,
                                      .down = b->weights + 2 * (size_t)b->n_experts,
                                      .x = b->x,
                                      .ids = b->ids,
                                      .weights = b->route,
                                      .out = b->out,
                                      .n_tokens = b->n_tokens,
                                      .n_prompt = b->n_tokens > TD_BENCH_ANSWERS ? b->n_tokens : 0,
                                      .n_experts = b->n_experts,
                                      .top_k = b->top_k});
  b->status = td_stream_sync(b->stream, b->err);
}

// Number of rows of gate, up and down.
static uint32_t rows_of(uint32_t part) {
  return part == 2 ? DIM : HIDDEN;
}

static size_t weight_bytes(const td_format *format, uint32_t part) {
  td_weight unused;
  return td_bench_weight(&unused, format, rows_of(part), DIM + HIDDEN - rows_of(part), NULL);
}

// Has the memory's pages allocated on the nodes, and notes where they are if reads are counted.
static td_status place_weights(layer_bench *b, size_t n_bytes, td_err *err) {
  const size_t page = (size_t)sysconf(_SC_PAGESIZE);
  b->stripes = (td_stripes){b->memory, n_bytes, TD_HUGE_PAGE_BYTES, b->nodes->n};
  const bool is_placed = td_stripes_touch(&b->stripes, b->nodes);
  if (is_placed) td_dev_use_stripes(b->dev, &b->stripes);
  if (!b->report.options->bench_nodes) return TD_OK;
  free(b->page_node);
  b->page_node = malloc(n_bytes / page + 1);
  if (!b->page_node) return td_fail(err, TD_ENOMEM, "out of memory");
  b->reads = (td_dev_reads){.page_node = b->page_node, .page_bytes = page};
  if (is_placed && td_stripes_where(&b->stripes, b->nodes, page, b->page_node)) return TD_OK;
  return td_fail(err, TD_EUNSUPPORTED,
                 "--nodes: the kernel neither places memory nor says where it is: allow "
                 "set_mempolicy and move_pages, as with --cap-add SYS_NICE of a container");
}

static td_status make_weights(layer_bench *b, td_err *err) {
  const td_format *f = b->format;
  size_t bytes = TD_BENCH_OFF_LINE + b->n_experts * (2 * weight_bytes(f, 0) + weight_bytes(f, 2));
  td_status st = td_bench_need_memory((double)bytes, f->name, err);
  if (st == TD_OK) st = td_dev_alloc(b->dev, &b->memory, bytes, err);
  if (st == TD_OK) st = place_weights(b, bytes, err);
  if (st != TD_OK) return st;
  char *at = (char *)b->memory + TD_BENCH_OFF_LINE;
  for (uint32_t i = 0; i < 3 * b->n_experts; i++) {
    uint32_t rows = rows_of(i / b->n_experts);
    size_t n = td_bench_weight(&b->weights[i], f, rows, DIM + HIDDEN - rows, at);
    td_bench_fill(&b->weights[i], at, i);
    at += n;
  }
  return TD_OK;
}

// What the threads on each node read in a step, of a few.
static void count_nodes(layer_bench *b, td_bench_nodes *out) {
  enum { STEPS = 8 };
  *out = (td_bench_nodes){.n = b->nodes->n};
  memset(b->reads.n_bytes, 0, sizeof b->reads.n_bytes);
  td_dev_count_reads(b->dev, &b->reads);
  for (int i = 0; i < STEPS; i++)
    run_step(b);
  td_dev_count_reads(b->dev, NULL);
  for (unsigned k = 0; k < out->n; k++) {
    for (unsigned of = 0; of <= TD_MAX_NODES; of++)
      *(of == k ? &out->local_bytes[k] : &out->remote_bytes[k]) += (double)b->reads.n_bytes[k][of] /
                                                                   STEPS;
  }
}

static void run_case(layer_bench *b, const td_bench_speed *speed, double *alone_s) {
  td_bench_nodes nodes;
  // Excludes the device's autotuning in its first runs from the measurement, unless runs are long.
  enum { RUNS = 40, SECONDS = 2 };
  const double end = td_clock_s() + SECONDS;
  for (int i = 0; i < RUNS && td_clock_s() < end && b->status == TD_OK; i++)
    run_step(b);
  b->bytes = 0;
  b->n_steps = 0;
  td_bench_time time = td_bench_measure(&b->report, run_step, b);
  if (b->status != TD_OK) return;
  const double bytes = b->bytes / b->n_steps;
  if (b->page_node) {
    count_nodes(b, &nodes);
    if (nodes.n == 1) *alone_s = time.seconds;
    if (nodes.n > 1 && *alone_s > 0) nodes.speedup = *alone_s / time.seconds;
  }
  const char *isa = strrchr(td_dev_name(b->dev), ' ');
  td_bench_report_add(&b->report, &(td_bench_record){
                                      .kernel = "moe_layer",
                                      .variant = isa ? isa + 1 : td_dev_name(b->dev),
                                      .format = b->format,
                                      .rows = HIDDEN,
                                      .cols = DIM,
                                      .batch = b->n_tokens,
                                      .speed = speed,
                                      .bytes = bytes,
                                      .flops = 6.0 * DIM * HIDDEN * b->top_k * (double)b->n_tokens,
                                      .time = time,
                                      .nodes = b->page_node ? &nodes : NULL,
                                  });
}

static void close_device(layer_bench *b) {
  if (b->stream) td_stream_close(b->stream);
  if (b->dev) td_dev_free(b->dev, b->memory);
  if (b->dev) td_dev_close(b->dev);
  b->stream = NULL;
  b->memory = NULL;
  b->dev = NULL;
}

static td_status run_threads(layer_bench *b, const td_bench_speed *speed, td_err *err) {
  const td_int_list *batches = &b->report.options->bench_batches;
  const td_dev_opts dev = {.kind = "cpu",
                           .n_threads = speed->n_threads,
                           .nodes = b->nodes,
                           .activations = (td_activations)b->report.options->activations};
  td_status st = td_bench_report_use(&b->report, speed, err);
  if (st == TD_OK) st = td_dev_open(&b->dev, &dev, err);
  if (st == TD_OK) st = td_stream_open(&b->stream, b->dev, err);
  if (st == TD_OK) st = make_weights(b, err);
  for (uint32_t i = 0; i < batches->n && st == TD_OK; i++) {
    b->n_tokens = (uint32_t)batches->values[i];
    run_case(b, speed, &b->alone_s[i]);
    st = b->status;
  }
  close_device(b);
  return st;
}

// On the first of the nodes, with its part of the threads.
static td_status run_alone(layer_bench *b, const td_nodes *all, const td_bench_speed *speed,
                           td_err *err) {
  const td_nodes first = {.n = 1, .ids = {all->ids[0]}, .is_fake = all->is_fake};
  td_bench_speed part = *speed;
  cpu_set_t before;
  part.n_threads = speed->n_threads / all->n;
  part.peaks.fma_gflops /= all->n;
  part.peaks.dot_gflops /= all->n;
  sched_getaffinity(0, sizeof before, &before);
  td_nodes_bind(all, 0, pthread_self());
  b->nodes = &first;
  td_status st = run_threads(b, &part, err);
  sched_setaffinity(0, sizeof before, &before);
  return st;
}

static td_status run_format(layer_bench *b, const td_nodes *all, td_err *err) {
  td_status st = TD_OK;
  for (uint32_t i = 0; i < b->report.n_speeds && st == TD_OK; i++) {
    const td_bench_speed *speed = &b->report.speeds[i];
    memset(b->alone_s, 0, b->report.options->bench_batches.n * sizeof *b->alone_s);
    if (b->report.options->bench_nodes && speed->n_threads >= all->n)
      st = run_alone(b, all, speed, err);
    b->nodes = all;
    if (st == TD_OK) st = run_threads(b, speed, err);
  }
  return st;
}

static td_status open_bench(layer_bench *b, const td_options *o, td_err *err) {
  td_status st = td_bench_report_open(&b->report, o, err);
  if (st != TD_OK) return st;
  b->n_experts = (uint32_t)o->n_matrices;
  b->top_k = b->n_experts < TOP_K ? b->n_experts : TOP_K;
  b->n_largest = td_bench_largest_batch(o);
  size_t n = (size_t)b->n_largest * DIM, n_pairs = (size_t)b->n_largest * b->top_k;
  b->weights = calloc(3 * (size_t)b->n_experts, sizeof *b->weights);
  b->chosen = malloc(b->n_experts);
  b->x = malloc(n * sizeof *b->x);
  b->out = malloc(n * sizeof *b->out);
  b->route = malloc(n_pairs * sizeof *b->route);
  b->ids = malloc(n_pairs * sizeof *b->ids);
  b->alone_s = calloc(o->bench_batches.n, sizeof *b->alone_s);
  if (!b->alone_s || !b->weights || !b->chosen || !b->x || !b->out || !b->route || !b->ids)
    return td_fail(err, TD_ENOMEM, "out of memory");
  for (size_t i = 0; i < n; i++)
    b->x[i] = (float)(int)(i * 2654435761u % 2001 - 1000) * 1e-3f;
  for (size_t i = 0; i < n_pairs; i++)
    b->route[i] = 0.125f;
  return TD_OK;
}

int td_cmd_bench_layer(const td_options *o) {
  td_err err;
  layer_bench b = {.random = 1, .err = &err};
  const td_nodes all = td_nodes_get();
  td_status st = TD_OK;
  if (o->bench_nodes && all.n < 2)
    st = td_fail(&err, TD_EUNSUPPORTED, "--nodes: this machine has one NUMA node: leave it out");
  if (st == TD_OK) st = open_bench(&b, o, &err);
  const char *list = o->bench_format ? o->bench_format : "fp8-b128,bf16";
  size_t n;
  const td_format *formats = td_formats(&n);
  for (size_t f = 0; f < n && st == TD_OK; f++) {
    if (!td_bench_format_chosen(&formats[f], list)) continue;
    b.format = &formats[f];
    st = run_format(&b, &all, &err);
  }
  st = td_bench_report_close(&b.report, st, &err);
  free(b.weights);
  free(b.page_node);
  free(b.alone_s);
  free(b.chosen);
  free(b.x);
  free(b.out);
  free(b.route);
  free(b.ids);
  return st == TD_OK ? 0 : td_cmd_fail(&err);
}
