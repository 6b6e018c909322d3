// tests/unit/test_device_cpu.c - the CPU device's streams and events.

#include <stdatomic.h>

#include <pthread.h>

#include "device/check.h"
#include "device/device.h"
#include "tandem/kernels.h"
#include "unit/ref.h"

static td_dev *open_dev(unsigned n_threads) {
  td_dev *dev;
  td_err err;
  assert_int_equal(td_dev_open(&dev, &(td_dev_opts){.kind = "cpu", .n_threads = n_threads}, &err),
                   TD_OK);
  return dev;
}

static td_stream *open_stream(td_dev *dev) {
  td_stream *stream;
  td_err err;
  assert_int_equal(td_stream_open(&stream, dev, &err), TD_OK);
  return stream;
}

static td_event *open_event(td_dev *dev) {
  td_event *event;
  td_err err;
  assert_int_equal(td_event_open(&event, dev, &err), TD_OK);
  return event;
}

static void sync_ok(td_stream *stream) {
  td_err err;
  if (td_stream_sync(stream, &err) != TD_OK) fail_msg("%s", err.msg);
}

// First of all, since the choice of kernels is made once in a process.
TEST(unknown_isa_is_an_error) {
  const char *forced = getenv("TANDEM_FORCE_ISA");
  char *kept = forced ? strdup(forced) : NULL;
  td_dev *dev;
  td_err err;
  setenv("TANDEM_FORCE_ISA", "abacus", 1);
  assert_int_equal(td_dev_open(&dev, &(td_dev_opts){.kind = "cpu"}, &err), TD_EINVAL);
  assert_null(dev);
  assert_non_null(strstr(err.msg, "abacus"));
  assert_non_null(strstr(err.msg, "scalar"));
  for (const char *const *isa = td_kernels_isas(); *isa; isa++)
    assert_non_null(strstr(err.msg, *isa));
  if (kept)
    setenv("TANDEM_FORCE_ISA", kept, 1);
  else
    unsetenv("TANDEM_FORCE_ISA");
  free(kept);
}

TEST(weights_without_a_kernel_are_refused) {
  td_err err;
  uint32_t data = 0;
  td_weight w = {.data = &data, .rows = 1, .cols = 1};
  assert_int_equal(td_dev_check_weight(&w, "w", &err), TD_OK);
  w.dtype = TD_I32;
  assert_int_equal(td_dev_check_weight(&w, "w", &err), TD_EINVAL);
  assert_non_null(strstr(err.msg, "I32"));
  w.dtype = TD_I8; // without scales
  assert_int_equal(td_dev_check_weight(&w, "w", &err), TD_EINVAL);
}

TEST(pulse_grows_within_an_operator) {
  enum { N = 1 << 20 };
  td_dev *dev = open_dev(
      1); // of several threads only the stream's own counts, and it may come late
  td_stream *stream = open_stream(dev);
  float *x = calloc(N, sizeof *x);
  _Atomic uint32_t pulse = 0;
  td_dev_set_progress_counter(dev, &pulse);
  td_op_add(stream, x, x, N);
  sync_ok(stream);
  assert_true(pulse > 1);
  td_stream_close(stream);
  td_dev_close(dev);
  free(x);
}

TEST(names_and_dtype) {
  td_dev *dev = open_dev(3);
  assert_non_null(strstr(td_dev_name(dev), "cpu, 3 threads"));
  assert_int_equal(td_dev_act_dtype(dev), TD_F32);
  td_dev_close(dev);
  td_dev_close(NULL);
  td_stream_close(NULL);
  td_event_close(NULL);
}

// x + 1 many times: in order, and many more operators than the ring holds.
TEST(ring_back_pressure_keeps_order) {
  td_dev *dev = open_dev(2);
  td_stream *stream = open_stream(dev);
  float x = 0, one = 1, seen[2000];
  for (int i = 0; i < 2000; i++) {
    td_op_add(stream, &x, &one, 1);
    td_op_copy(stream, &seen[i], &x, sizeof x);
  }
  sync_ok(stream);
  for (int i = 0; i < 2000; i++)
    assert_true(seen[i] == (float)(i + 1));
  td_stream_close(stream);
  td_dev_close(dev);
}

enum { WAITERS = 8, EACH = 60 };

typedef struct {
  td_event *event;
  float seen; // of x, by the stream, just before the event
  bool early;
} waiter;

static void *wait_for_event(void *arg) {
  waiter *w = arg;
  td_event_sync(w->event);
  w->early = w->seen == 0;
  return NULL;
}

// Threads that wait for one stream's past and future, none for the same: each goes on, none early,
// also those that are after the place where the stream wakes somebody else.
TEST(waiters_for_different_places) {
  td_dev *dev = open_dev(2);
  td_stream *gate = open_stream(dev), *stream = open_stream(dev);
  float one = 1, *much = calloc(1 << 22, sizeof *much), x = 0;
  td_event *opened = open_event(dev);
  td_op_add(gate, much, much, 1 << 22); // long enough for threads to wait
  td_event_record(opened, gate);
  td_stream_wait(stream, opened);
  waiter waiters[WAITERS];
  pthread_t threads[WAITERS];
  for (int i = 0; i < WAITERS; i++) {
    for (int k = 0; k < EACH; k++) // in all, more than the ring holds
      td_op_add(stream, &x, &one, 1);
    waiters[i] = (waiter){.event = open_event(dev)};
    td_op_copy(stream, &waiters[i].seen, &x, sizeof x);
    td_event_record(waiters[i].event, stream);
    if (i % 2) assert_int_equal(pthread_create(&threads[i], NULL, wait_for_event, &waiters[i]), 0);
  }
  for (int i = WAITERS - 2; i >= 0; i -= 2) // from the last on
    assert_int_equal(pthread_create(&threads[i], NULL, wait_for_event, &waiters[i]), 0);
  for (int i = 0; i < WAITERS; i++) {
    pthread_join(threads[i], NULL);
    assert_false(waiters[i].early);
    assert_true(waiters[i].seen == (float)(EACH * (i + 1)));
    td_event_close(waiters[i].event);
  }
  td_stream_close(stream);
  td_stream_close(gate);
  td_event_close(opened);
  td_dev_close(dev);
  free(much);
}

// Two streams that hand a value to and fro can only finish if both run at once, and only give the
// right sum if waits hold back what is after them.
TEST(streams_wait_for_one_another) {
  enum { ROUNDS = 400 };
  td_dev *dev = open_dev(2);
  td_stream *ping = open_stream(dev), *pong = open_stream(dev);
  td_event *to = open_event(dev), *fro = open_event(dev);
  float a = 0, b = 0, one = 1;
  for (int i = 0; i < ROUNDS; i++) {
    td_stream_wait(ping, fro);
    td_op_copy(ping, &a, &b, sizeof a);
    td_op_add(ping, &a, &one, 1);
    td_event_record(to, ping);
    td_stream_wait(pong, to);
    td_op_copy(pong, &b, &a, sizeof a);
    td_op_add(pong, &b, &one, 1);
    td_event_record(fro, pong);
  }
  td_event_sync(fro);
  assert_true(b == 2 * ROUNDS);
  td_stream_close(ping);
  td_stream_close(pong);
  td_event_close(to);
  td_event_close(fro);
  td_dev_close(dev);
}

// The wait is for the recording that was the last when td_stream_wait was called, not for later
// ones: here the later one can only happen after the waiter has gone on.
TEST(wait_means_the_last_record_before_it) {
  td_dev *dev = open_dev(1);
  td_stream *one = open_stream(dev), *two = open_stream(dev);
  td_event *event = open_event(dev), *gate = open_event(dev);
  float x = 1, y = 0;
  td_event_sync(event); // never recorded: done
  td_stream_wait(two, event);
  td_op_copy(one, &y, &x, sizeof x);
  td_event_record(event, one);
  td_stream_wait(two, event);
  td_event_record(gate, two);
  td_stream_wait(one, gate);
  td_event_record(event, one);
  td_event_sync(event);
  assert_true(y == 1);
  td_stream_close(one);
  td_event_sync(event); // its stream is gone, and was done
  td_stream_wait(two, event);
  sync_ok(two);
  td_stream_close(two);
  td_event_close(event);
  td_event_close(gate);
  td_dev_close(dev);
}

// An event is asked for without waiting, while its stream waits for the host.
TEST(an_event_that_is_not_done) {
  td_dev *dev = open_dev(2);
  td_stream *stream;
  td_err err;
  assert_int_equal(td_stream_open_urgent(&stream, dev, &err), TD_OK);
  td_event *event = open_event(dev);
  _Atomic uint32_t signal = 0;
  const uint32_t one = 1;
  assert_true(td_event_is_done(event)); // never recorded
  td_op_await(stream, &signal, &one);
  td_event_record(event, stream);
  assert_false(td_event_is_done(event));
  atomic_store(&signal, 1);
  td_event_sync(event);
  assert_true(td_event_is_done(event));
  td_stream_close(stream);
  assert_true(td_event_is_done(event)); // its stream is gone, and was done
  td_event_close(event);
  td_dev_close(dev);
}

TEST(a_failed_stream_lets_others_go_on) {
  td_dev *dev = open_dev(2);
  td_stream *bad = open_stream(dev), *good = open_stream(dev);
  td_event *event = open_event(dev);
  float x[4] = {0}, one = 1, y = 0;
  int32_t row = -1;
  td_op_gather_rows(bad, x, x, &row, 1, 2);
  td_event_record(event, bad);
  td_stream_wait(good, event);
  td_op_add(good, &y, &one, 1);
  sync_ok(good);
  assert_true(y == 1);
  td_err err;
  assert_int_equal(td_stream_sync(bad, &err), TD_EINVAL);
  assert_int_equal(td_stream_sync(bad, NULL), TD_EINVAL);
  td_stream_close(bad);
  td_stream_close(good);
  td_event_close(event);
  td_dev_close(dev);
}

enum { NODES = 300, STREAMS = 4, CELLS = 16, WIDTH = 300 };

typedef struct {
  int kind, dst, src; // 0: copy, 1: add, 2: norm
} node;

static void run_node(const node *n, float (*cells)[WIDTH], const float *w, td_stream *stream) {
  float *dst = cells[n->dst];
  const float *src = cells[n->src];
  if (n->kind == 0) td_op_copy(stream, dst, src, WIDTH * sizeof *dst);
  if (n->kind == 1) td_op_add(stream, dst, src, WIDTH);
  if (n->kind == 2) {
    td_op_rmsnorm(stream, &(td_rmsnorm_args){.x = src,
                                             .w = {w, TD_F32, WIDTH},
                                             .out = dst,
                                             .x_stride = WIDTH,
                                             .out_stride = WIDTH,
                                             .n_rows = 1,
                                             .dim = WIDTH,
                                             .eps = 1e-5f});
  }
}

// The reference runs nodes in the order they were made.
static void run_serial(const node *nodes, float (*cells)[WIDTH], const float *w, td_dev *dev) {
  td_stream *stream = open_stream(dev);
  for (int i = 0; i < NODES; i++) {
    run_node(&nodes[i], cells, w, stream);
    sync_ok(stream);
  }
  td_stream_close(stream);
}

// Random operators on random streams; each waits for the events of those it conflicts with.
static void run_concurrent(const node *nodes, float (*cells)[WIDTH], const float *w, td_dev *dev,
                           uint64_t *rng) {
  td_stream *streams[STREAMS];
  td_event *events[NODES];
  for (int s = 0; s < STREAMS; s++)
    streams[s] = open_stream(dev);
  for (int i = 0; i < NODES; i++) {
    td_stream *stream = streams[ref_below(rng, STREAMS)];
    for (int j = 0; j < i; j++) {
      bool conflict = nodes[j].dst == nodes[i].dst || nodes[j].dst == nodes[i].src ||
                      nodes[j].src == nodes[i].dst;
      if (conflict) td_stream_wait(stream, events[j]);
    }
    run_node(&nodes[i], cells, w, stream);
    events[i] = open_event(dev);
    td_event_record(events[i], stream);
  }
  for (int s = 0; s < STREAMS; s++)
    sync_ok(streams[s]);
  for (int s = 0; s < STREAMS; s++)
    td_stream_close(streams[s]);
  for (int i = 0; i < NODES; i++)
    td_event_close(events[i]);
}

TEST(random_graph_equals_serial) {
  static float first[CELLS][WIDTH], second[CELLS][WIDTH];
  float w[WIDTH];
  uint64_t rng = 7;
  for (int round = 0; round < 5; round++) {
    node nodes[NODES];
    for (int i = 0; i < NODES; i++) {
      nodes[i].kind = (int)ref_below(&rng, 3);
      nodes[i].dst = (int)ref_below(&rng, CELLS);
      do {
        nodes[i].src = (int)ref_below(&rng, CELLS);
      } while (nodes[i].src == nodes[i].dst);
    }
    for (int d = 0; d < WIDTH; d++)
      w[d] = ref_float(&rng);
    for (int c = 0; c < CELLS; c++) {
      for (int d = 0; d < WIDTH; d++)
        first[c][d] = second[c][d] = ref_float(&rng);
    }
    td_dev *dev = open_dev(2);
    run_serial(nodes, first, w, dev);
    run_concurrent(nodes, second, w, dev, &rng);
    assert_memory_equal(first, second, sizeof first);
    td_dev_close(dev);
  }
}

// Large operators of several streams on one pool at once.
TEST(streams_share_the_team) {
  enum { N = 200000 };
  td_dev *dev = open_dev(3);
  td_stream *streams[3];
  float *x[3], *one = malloc(N * sizeof *one);
  for (int i = 0; i < N; i++)
    one[i] = 1;
  for (int s = 0; s < 3; s++) {
    streams[s] = open_stream(dev);
    x[s] = calloc(N, sizeof *x[s]);
  }
  for (int round = 0; round < 20; round++) {
    for (int s = 0; s < 3; s++)
      td_op_add(streams[s], x[s], one, N);
  }
  for (int s = 0; s < 3; s++) {
    sync_ok(streams[s]);
    for (int i = 0; i < N; i++)
      assert_true(x[s][i] == 20);
    td_stream_close(streams[s]);
    free(x[s]);
  }
  free(one);
  td_dev_close(dev);
}

// Few tokens of a prompt take decode's kernel, where the kernels have two.
TEST(way_of_prompts) {
  td_weight w = {.dtype = TD_F8E4M3, .rows = 2048, .cols = 7168};
  assert_int_equal(td_kernels_init("scalar"), TD_KERNELS_OK);
  assert_true(td_kernels_use_gemm(&w, 1));
  if (td_kernels_init("avx2") != TD_KERNELS_OK) skip();
  assert_false(td_kernels_use_gemm(&w, 16));
  assert_true(td_kernels_use_gemm(&w, 64));
  w.dtype = TD_I4; // which decode and prefill multiply by the same kernel in 16 bits
  assert_int_equal(td_kernels_init("avx2int16"), TD_KERNELS_OK);
  assert_true(td_kernels_use_gemm(&w, 64));
  td_kernels_use_activations(TD_ACTIVATIONS_AUTO);
  assert_false(td_kernels_use_gemm(&w, 64));
}

// Long calls where there is work for all, shorter ones before anybody waits for others' ends.
TEST(rows_of_a_call) {
  td_dev *dev = open_dev(1); // has chosen kernels
  td_weight down = {.dtype = TD_F8E4M3, .rows = 7168, .cols = 2048};
  td_weight gate = {.dtype = TD_F8E4M3, .rows = 2048, .cols = 7168};
  td_weight router = {.dtype = TD_BF16, .rows = 64, .cols = 2048};
  assert_int_equal(td_kernels_tile_rows(&down, 1, 8, 2), 128);
  assert_int_equal(td_kernels_tile_rows(&down, 1, 8, 64), 128);
  assert_int_equal(td_kernels_tile_rows(&gate, 1, 8, 64), 64);
  assert_int_equal(td_kernels_tile_rows(&gate, 1, 1, 64), 32);
  assert_int_equal(td_kernels_tile_rows(&gate, 1, 1, 65), 16);
  assert_int_equal(td_kernels_tile_rows(&router, 1, 1, 1), 128);
  assert_int_equal(td_kernels_tile_rows(&router, 1, 1, 2), 32);
  assert_int_equal(td_kernels_tile_rows(&router, 1, 1, 64), 8);
  td_dev_close(dev);
}

typedef struct {
  _Alignas(64) _Atomic uint32_t step;
} signal_line;

// Two devices' streams, each queued as a whole before either has run, take turns at a number.
TEST(signals) {
  enum { TURNS = TD_STREAM_DEPTH / 3, FLOATS = 1000 };
  td_dev *devs[] = {open_dev(2), open_dev(1)};
  td_stream *streams[] = {open_stream(devs[0]), open_stream(devs[1])};
  void *memory;
  td_err err;
  assert_int_equal(td_dev_alloc_host(devs[0], &memory, 2 * TURNS * sizeof(signal_line), &err),
                   TD_OK);
  memset(memory, 0, 2 * TURNS * sizeof(signal_line));
  signal_line *there = memory, *back = there + TURNS;
  float sum[FLOATS] = {0}, one[FLOATS];
  for (int i = 0; i < FLOATS; i++)
    one[i] = 1;
  for (uint32_t step = 1; step <= 2; step++) {
    for (int i = 0; i < TURNS; i++) {
      td_op_await(streams[1], &there[i].step, &step);
      td_op_add(streams[1], sum, one, FLOATS);
      td_op_signal(streams[1], &back[i].step, &step);
    }
    for (int i = 0; i < TURNS; i++) {
      td_op_add(streams[0], sum, one, FLOATS);
      td_op_signal(streams[0], &there[i].step, &step);
      td_op_await(streams[0], &back[i].step, &step);
    }
    sync_ok(streams[0]);
    sync_ok(streams[1]);
  }
  for (int i = 0; i < FLOATS; i++)
    assert_true(sum[i] == 4 * TURNS);
  td_dev_free_host(devs[0], memory);
  for (int i = 0; i < 2; i++) {
    td_stream_close(streams[i]);
    td_dev_close(devs[i]);
  }
}

TEST(a_failed_stream_signals) {
  td_dev *dev = open_dev(1);
  td_stream *failing = open_stream(dev), *waiting = open_stream(dev);
  signal_line line = {0};
  const uint32_t step = 7;
  const int32_t row = -1;
  float x = 0;
  td_err err;
  td_op_await(waiting, &line.step, &step);
  td_op_gather_rows(failing, &x, &x, &row, 1, 1);
  td_op_signal(failing, &line.step, &step);
  sync_ok(waiting);
  assert_int_equal(td_stream_sync(failing, &err), TD_EINVAL);
  td_stream_close(failing);
  td_stream_close(waiting);
  td_dev_close(dev);
}
