// src/bench/cpu_kernels.c - `tandem bench kernels`: every linear kernel that this machine supports,
// at the shapes of DeepSeek-V3's experts, and with format f32 delta_rule (delta.c). Calls rotate
// through many matrices, so that weights are read from memory as in a model.
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/clock.h"
#include "base/stats.h"
#include "bench/bench.h"
#include "bench/report.h"
#include "device/device.h"
#include "runtime/command.h"

enum { TILE_TOKENS = 192, HUGE_PAGE_BYTES = 2 << 20 };

static const struct {
  uint32_t rows, cols;
} shapes[] = {{2048, 7168}, {7168, 2048}}; // gate and up; down

// Matrices of one format and shape, and the kernel that runs on them.
typedef struct {
  td_bench_report report;
  const td_format *format;
  td_weight *weights; // [n_weights]
  uint32_t n_weights, next;
  char *memory;
  size_t weight_bytes; // in memory
  float *x, *y;        // [largest batch][largest dimension]
  td_linear_fn fn;
  td_gemv_schedule way;
  uint32_t batch;
} kernel_bench;

static size_t n_token_tiles(const kernel_bench *b) {
  return (b->batch + TILE_TOKENS - 1) / TILE_TOKENS;
}

// Work is split as for a layer's experts: every member takes consecutive tiles, and prefetches its
// share of the next matrix.
static void run_share(void *ctx, unsigned member, unsigned n_members) {
  const kernel_bench *b = ctx;
  const td_weight *w = &b->weights[b->next], *then = &b->weights[(b->next + 1) % b->n_weights];
  uint32_t n = td_kernels_tile_rows(&b->weights[b->next], b->batch, n_token_tiles(b),
                                    td_thread_pool_size(b->report.reads.pool));
  size_t row_tiles = (w->rows + n - 1) / n, n_tiles = row_tiles * n_token_tiles(b);
  size_t begin = n_tiles * member / n_members, end = n_tiles * (member + 1) / n_members;
  const void *then_at = (const char *)then->data + begin % row_tiles * n * td_weight_row_bytes(w);
  for (size_t i = begin; i < end; i++) {
    uint32_t row = (uint32_t)(i % row_tiles) * n, rows_left = w->rows - row;
    size_t n_times = n_token_tiles(b), token = i / row_tiles * b->batch / n_times;
    size_t token_end = (i / row_tiles + 1) * b->batch / n_times;
    b->fn(&(td_linear_args){
        .w = w,
        .x = b->x + token * w->cols,
        .y = b->y + token * w->rows,
        .ldx = w->cols,
        .ldy = w->rows,
        .n_tokens = (uint32_t)(token_end - token),
        .row_begin = row,
        .row_end = row + (rows_left < n ? rows_left : n),
        .prompt = b->batch > TD_BENCH_ANSWERS,
        .x_int8 = b->batch > TD_BENCH_ANSWERS && td_kernels_rounds_x(w),
        .way = b->way,
        .next = i + 1 < end ? NULL : then_at,
    });
  }
}

static void run_once(void *ctx) {
  kernel_bench *b = ctx;
  td_thread_pool_run(b->report.reads.pool, run_share, b);
  b->next = (b->next + 1) % b->n_weights;
}

static char *matrix_at(const kernel_bench *b, size_t i) {
  return b->memory + TD_BENCH_OFF_LINE + i * b->weight_bytes;
}

static td_status make_weights(kernel_bench *b, const td_format *format, uint32_t rows,
                              uint32_t cols, td_err *err) {
  td_weight unused;
  b->weight_bytes = td_bench_weight(&unused, format, rows, cols, NULL);
  size_t bytes = TD_BENCH_OFF_LINE + b->weight_bytes * b->n_weights;
  td_status st = td_bench_need_memory((double)bytes, format->name, err);
  if (st != TD_OK) return st;
  void *memory;
  if (posix_memalign(&memory, HUGE_PAGE_BYTES, bytes) != 0)
    return td_fail(err, TD_ENOMEM, "out of memory: %zu bytes of matrices", bytes);
  madvise(memory, bytes, MADV_HUGEPAGE);
  b->memory = memory;
  for (uint32_t i = 0; i < b->n_weights; i++)
    td_bench_weight(&b->weights[i], format, rows, cols, matrix_at(b, i));
#pragma omp parallel for schedule(dynamic, 1) num_threads(td_thread_pool_size(b->report.reads.pool))
  for (uint32_t i = 0; i < b->n_weights; i++)
    td_bench_fill(&b->weights[i], matrix_at(b, i), i);
  return TD_OK;
}

// The faster GEMV schedule, found by alternating between them as the engine does at run time.
static td_gemv_schedule quicker_way(kernel_bench *b, const td_kernel_variant *variant) {
  enum { TRIALS = 9 };
  const bool has_ways = variant->features & TD_ISA_AVX512_BF16 && b->batch <= TD_BENCH_ANSWERS;
  if (!has_ways || td_kernels_n_schedules(&b->weights[0]) == 1) return TD_GEMV_SEQUENTIAL;
  double seconds[TD_N_GEMV_SCHEDULES][TRIALS];
  for (uint32_t i = 0; i < TRIALS * TD_N_GEMV_SCHEDULES; i++) {
    b->way = (td_gemv_schedule)(i % TD_N_GEMV_SCHEDULES);
    const double start = td_clock_s();
    run_once(b);
    seconds[b->way][i / TD_N_GEMV_SCHEDULES] = td_clock_s() - start;
  }
  const double one = td_median(seconds[TD_GEMV_SEQUENTIAL], TRIALS);
  const double other = td_median(seconds[TD_GEMV_INTERLEAVED], TRIALS);
  return one <= other ? TD_GEMV_SEQUENTIAL : TD_GEMV_INTERLEAVED;
}

static void run_case(void *ctx, const td_bench_speed *speed, const td_kernel_variant *variant,
                     uint32_t batch) {
  kernel_bench *b = ctx;
  const td_weight *w = &b->weights[0];
  cpu_set_t before;
  if (strcmp(variant->family,
             td_bench_family(b->format, td_kernels()->activations, batch > TD_BENCH_ANSWERS)) != 0)
    return;
  b->fn = (td_linear_fn)variant->fn;
  b->batch = batch;
  td_thread_pool_pin_caller(b->report.reads.pool, &before);
  b->way = quicker_way(b, variant);
  td_bench_time time = td_bench_measure(&b->report, run_once, b);
  td_thread_pool_unpin_caller(&before);
  td_bench_report_add(&b->report, &(td_bench_record){
                                      .kernel = variant->family,
                                      .variant = variant->isa,
                                      .format = b->format,
                                      .rows = w->rows,
                                      .cols = w->cols,
                                      .batch = batch,
                                      .speed = speed,
                                      .bytes = (double)td_weight_bytes(w),
                                      .flops = 2.0 * w->rows * w->cols * batch,
                                      .time = time,
                                  });
}

static td_status run_format(kernel_bench *b, const td_format *format, td_err *err) {
  td_status st = TD_OK;
  for (size_t s = 0; s < sizeof shapes / sizeof shapes[0] && st == TD_OK; s++) {
    st = make_weights(b, format, shapes[s].rows, shapes[s].cols, err);
    b->format = format;
    if (st == TD_OK) st = td_bench_each_case(&b->report, run_case, b, err);
    free(b->memory);
    b->memory = NULL;
  }
  return st;
}

static td_status open_bench(kernel_bench *b, const td_options *o, td_err *err) {
  td_dev_ask_for_tiles();
  td_kernels_init_any(); // needed for the number of rows per call
  td_kernels_use_activations((td_activations)o->activations);
  td_status st = td_bench_report_open(&b->report, o, err);
  if (st != TD_OK) return st;
  enum { LONGEST_SIDE = 7168 };
  size_t n = (size_t)td_bench_largest_batch(o) * LONGEST_SIDE;
  b->n_weights = (uint32_t)o->n_matrices;
  b->weights = calloc(b->n_weights, sizeof *b->weights);
  b->x = aligned_alloc(64, n * sizeof *b->x); // aligned as device memory is
  b->y = aligned_alloc(64, n * sizeof *b->y);
  if (!b->weights || !b->x || !b->y) return td_fail(err, TD_ENOMEM, "out of memory");
  for (size_t i = 0; i < n; i++)
    b->x[i] = (float)(int)(i * 2654435761u % 2001 - 1000) * 1e-3f;
  return TD_OK;
}

int td_cmd_bench_kernels(const td_options *o) {
  kernel_bench b = {0};
  td_err err;
  td_status st = open_bench(&b, o, &err);
  size_t n;
  const td_format *formats = td_formats(&n);
  for (size_t i = 0; i < n && st == TD_OK; i++) {
    if (td_bench_format_chosen(&formats[i], o->bench_format))
      st = run_format(&b, &formats[i], &err);
    if (st == TD_OK && strcmp(formats[i].name, "f32") == 0 &&
        td_bench_format_chosen(&formats[i], o->bench_format))
      st = td_bench_delta(&b.report, &formats[i], &err);
  }
  st = td_bench_report_close(&b.report, st, &err);
  free(b.weights);
  free(b.x);
  free(b.y);
  return st == TD_OK ? 0 : td_cmd_fail(&err);
}
