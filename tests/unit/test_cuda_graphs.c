// tests/unit/test_cuda_graphs.c - work that comes again is captured as a graph of the CUDA device.
// CTest: gpu

#include "unit/cuda_test.h"

enum { RUN_N = 500 };

typedef struct {
  td_stream *stream;
  uint16_t *x, *ones;
  float *logits, *zeros; // ranked, which needs scratch memory
  td_top_logits *top;
  uint32_t n_rows;
  int n_calls;
} piece_of_work;

static void enqueue_piece(void *ctx) {
  piece_of_work *p = ctx;
  p->n_calls++;
  td_op_add(p->stream, p->x, p->ones, RUN_N);
  td_op_top_logits(p->stream, &(td_top_logits_args){.logits = p->logits,
                                                    .temperature = p->zeros,
                                                    .out = p->top,
                                                    .n_rows = p->n_rows,
                                                    .n_vocab = 70});
  td_op_add(p->stream, p->x, p->ones, RUN_N);
}

static piece_of_work make_piece(cuda_fixture *f) {
  float one[RUN_N], logits[4 * 70], zeros[4] = {0};
  for (int i = 0; i < RUN_N; i++)
    one[i] = 1;
  for (int i = 0; i < 4 * 70; i++)
    logits[i] = (float)(i % 70);
  return (piece_of_work){.stream = f->stream,
                         .x = cuda_put_bf16(f, one, RUN_N),
                         .ones = cuda_put_bf16(f, one, RUN_N),
                         .logits = cuda_put(f, logits, sizeof logits),
                         .zeros = cuda_put(f, zeros, sizeof zeros),
                         .top = cuda_alloc(f, 4 * sizeof(td_top_logits)),
                         .n_rows = 1};
}

static void run_piece(piece_of_work *p, uint32_t n_tokens, void (*enqueue)(void *ctx)) {
  const td_work_key key = {.n_tokens = n_tokens};
  td_stream_run(p->stream, &key, enqueue, p);
}

static void check_piece(cuda_fixture *f, const piece_of_work *p, int n_runs) {
  float *x = cuda_get_bf16(f, p->x, RUN_N);
  for (int i = 0; i < RUN_N; i++)
    assert_true(x[i] == (float)(1 + 2 * n_runs));
  free(x);
  td_top_logits top;
  cuda_get(f, &top, p->top, sizeof top);
  assert_int_equal(top.id[0], 69);
}

// The second time under a key it is captured, and from the third on nobody is called; memory that
// grows makes what knew it void.
TEST(work_that_comes_again) {
  CUDA_OPEN(f);
  piece_of_work p = make_piece(&f);
  static const int calls[] = {1, 2, 2, 2};
  for (int run = 0; run < 4; run++) {
    run_piece(&p, 7, enqueue_piece);
    assert_int_equal(p.n_calls, calls[run]);
    check_piece(&f, &p, run + 1);
  }
  p.n_rows = 4; // another key with more scratch memory
  run_piece(&p, 8, enqueue_piece);
  assert_int_equal(p.n_calls, 3);
  check_piece(&f, &p, 5);
  p.n_rows = 1;
  for (int run = 5; run < 8; run++) {
    run_piece(&p, 7, enqueue_piece);
    assert_int_equal(p.n_calls, run == 5 ? 4 : 5);
    check_piece(&f, &p, run + 1);
  }
  for (uint32_t key = 100; key < 170; key++) // more than are kept
    run_piece(&p, key, enqueue_piece);
  run_piece(&p, 7, enqueue_piece);
  assert_int_equal(p.n_calls, 76);
  check_piece(&f, &p, 79);
  cuda_close(&f);
}

TEST(work_that_cannot_be_captured) {
  if (!is_emulated()) skip();
  setenv("TANDEM_EMU_CAPTURE", "0", 1);
  CUDA_OPEN(f);
  piece_of_work p = make_piece(&f);
  for (int run = 0; run < 4; run++)
    run_piece(&p, 7, enqueue_piece);
  assert_int_equal(p.n_calls, 4);
  check_piece(&f, &p, 4);
  cuda_close(&f);
  unsetenv("TANDEM_EMU_CAPTURE");
}

// What kept a capture from working may pass.
TEST(captures_that_fail_at_first) {
  if (!is_emulated()) skip();
  CUDA_OPEN(f);
  piece_of_work p = make_piece(&f);
  static const int calls[] = {1, 2, 3, 4, 4, 4};
  for (int run = 0; run < 6; run++) {
    if (run == 1) setenv("TANDEM_EMU_CAPTURE", "0", 1);
    if (run == 3) unsetenv("TANDEM_EMU_CAPTURE");
    run_piece(&p, 7, enqueue_piece);
    assert_int_equal(p.n_calls, calls[run]);
  }
  check_piece(&f, &p, 6);
  setenv("TANDEM_EMU_CAPTURE", "0", 1); // for as often as it takes to believe it
  for (int run = 0; run < 5; run++)
    run_piece(&p, 8, enqueue_piece);
  unsetenv("TANDEM_EMU_CAPTURE");
  for (int run = 0; run < 5; run++)
    run_piece(&p, 8, enqueue_piece);
  assert_int_equal(p.n_calls, 14);
  check_piece(&f, &p, 16);
  cuda_close(&f);
}

// Every field of a key tells pieces apart.
TEST(keys_of_work) {
  static const td_work_key keys[] = {
#define X(field) {.field = 1},
      TD_WORK_KEY_FIELDS(X)
#undef X
          {.n_tokens = 1u << 31}};
  CUDA_OPEN(f);
  piece_of_work p = make_piece(&f);
  for (int run = 0; run < 3; run++) {
    for (size_t i = 0; i < TD_COUNT(keys); i++)
      td_stream_run(f.stream, &keys[i], enqueue_piece, &p);
  }
  assert_int_equal(p.n_calls, 2 * TD_COUNT(keys));
  check_piece(&f, &p, 3 * TD_COUNT(keys));
  cuda_close(&f);
}

// Where there is no memory for one more graph, those that are there make room.
TEST(more_work_than_graphs_fit) {
  if (!is_emulated()) skip();
  setenv("TANDEM_EMU_GRAPHS", "2", 1);
  CUDA_OPEN(f);
  piece_of_work p = make_piece(&f);
  static const int calls[] = {1, 2, 2, 3, 4,
                              4, 5, 7, 8, 8}; // the eighth run's first is for nothing
  for (int run = 0; run < 10; run++) {
    run_piece(&p, run < 9 ? run / 3 : 2, enqueue_piece);
    assert_int_equal(p.n_calls, calls[run]);
    check_piece(&f, &p, run + 1);
  }
  cuda_close(&f);
  unsetenv("TANDEM_EMU_GRAPHS");
}

// Where there is no memory for any, it is not tried at every step.
TEST(no_memory_for_graphs) {
  if (!is_emulated()) skip();
  setenv("TANDEM_EMU_GRAPHS", "0", 1);
  CUDA_OPEN(f);
  piece_of_work p = make_piece(&f);
  static const int calls[] = {1, 3, 5, 7, 8, 9};
  for (int run = 0; run < (int)TD_COUNT(calls); run++) {
    run_piece(&p, 7, enqueue_piece);
    assert_int_equal(p.n_calls, calls[run]);
    check_piece(&f, &p, run + 1);
  }
  cuda_close(&f);
  unsetenv("TANDEM_EMU_GRAPHS");
}

// A capture that is spoiled on the way leaves nothing behind, and the work is done all the same.
static void grow_on_second_call(void *ctx) {
  piece_of_work *p = ctx;
  if (p->n_calls == 1) p->n_rows = 4;
  enqueue_piece(ctx);
}

TEST(work_that_spoils_its_capture) {
  CUDA_OPEN(f);
  piece_of_work p = make_piece(&f);
  for (int run = 0; run < 4; run++)
    run_piece(&p, 7, grow_on_second_call);
  assert_int_equal(p.n_calls, 4); // the second for nothing, the last captured
  check_piece(&f, &p, 4);
  cuda_close(&f);
}
