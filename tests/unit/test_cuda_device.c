// tests/unit/test_cuda_device.c - opening the CUDA device where it is and where it is not, streams
// and events, what is kept of weights, and the choices of heuristics.c.
#include <setjmp.h>

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "support/folder.h"
#include "unit/cuda_test.h"
#include "unit/filtered.h"

static void expect_open(const char *kind, td_status status, const char *part) {
  td_dev *dev;
  td_err err = {.code = TD_OK};
  assert_int_equal(td_dev_open(&dev, &(td_dev_opts){.kind = kind, .n_threads = 1}, &err), status);
  if (status == TD_OK) {
    if (!strstr(td_dev_name(dev), part)) fail_msg("%s is no %s", td_dev_name(dev), part);
  } else {
    assert_null(dev);
    if (!strstr(err.msg, part)) fail_msg("'%s' does not speak of '%s'", err.msg, part);
  }
  td_dev_close(dev);
}

static char *library; // TANDEM_CUDA_LIB as it was given, or NULL

// Names a library and a number of emulated GPUs; NULL: as it was.
static void with_library(const char *path, const char *n_devices) {
  if (!path) path = library;
  if (path) setenv("TANDEM_CUDA_LIB", path, 1);
  if (!path) unsetenv("TANDEM_CUDA_LIB");
  if (n_devices) setenv("TANDEM_EMU_DEVICES", n_devices, 1);
  if (!n_devices) unsetenv("TANDEM_EMU_DEVICES");
}

static int restore(void **state) {
  (void)state;
  with_library(NULL, NULL);
  return 0;
}

static void test_without_a_library(void **state) {
  (void)state;
  with_library("/nonexistent/libtandem_cuda.so", NULL);
  expect_open("cuda", TD_EUNSUPPORTED, "/nonexistent/libtandem_cuda.so");
  expect_open("auto", TD_OK, "cpu");
  with_library("libm.so.6", NULL);
  expect_open("cuda", TD_EUNSUPPORTED, "not a library of tandem");
}

static void test_without_a_gpu(void **state) {
  (void)state;
  if (!library || !strstr(library, "_emu")) skip();
  with_library(NULL, "0");
  expect_open("cuda", TD_EUNSUPPORTED, "no CUDA-capable device");
  expect_open("auto", TD_OK, "cpu");
  with_library(NULL, NULL);
  expect_open("auto", TD_OK, "cuda");
}

// A driver that is older than the release the kernels were built with, on a GPU that they have no
// code for.
static void test_a_driver_that_is_too_old(void **state) {
  (void)state;
  if (!library || !strstr(library, "_emu")) skip();
  setenv("TANDEM_EMU_PTX", "0", 1);
  expect_open("cuda", TD_EUNSUPPORTED, "unsupported toolchain");
  expect_open("cuda", TD_EUNSUPPORTED, "-DTD_CUDA_ARCHS=");
  expect_open("auto", TD_OK, "cpu");
  unsetenv("TANDEM_EMU_PTX");
}

static void make_folders(char *path) {
  for (char *slash = strchr(path + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
    *slash = '\0';
    mkdir(path, 0700);
    *slash = '/';
  }
}

// cuBLAS is found in Python's packages beside a folder of PATH, and needs what lies beside it.
static void test_where_cublas_is(void **state) {
  (void)state;
  enum { MAJOR = 99 }; // which no machine has
  if (!library || !strstr(library, "_emu")) skip();
  static const struct {
    const char *packages, *release;
  } cases[] = {{"lib/python3.11/site-packages", "cu99"}, {"lib/python3.9/dist-packages", "cublas"}};
  char root[] = "/tmp/tandem-cublas-XXXXXX";
  assert_non_null(mkdtemp(root));
  for (size_t i = 0; i < TD_COUNT(cases); i++) {
    char folder[256], file[512], path[256];
    snprintf(folder, sizeof folder, "%s/%zu/%s/nvidia/%s/lib/", root, i, cases[i].packages,
             cases[i].release);
    snprintf(path, sizeof path, "/nonexistent::%s/%zu/bin:%s", root, i, root);
    make_folders(folder);
    snprintf(file, sizeof file, "%s/%zu/bin/", root, i);
    make_folders(file);
    snprintf(file, sizeof file, "%slibcublas.so.%d", folder, MAJOR);
    assert_int_equal(symlink(library, file), 0);
    void *found = td_cuda_find_blas(path, MAJOR);
    assert_non_null(found);
    assert_non_null(dlsym(found, TD_CUDA_ABI_SYMBOL)); // which no other cuBLAS has
    assert_int_equal(unlink(file), 0);
  }
  td_test_remove_folder(root);
}

static void test_names_and_memory(void **state) {
  (void)state;
  CUDA_OPEN(f);
  assert_non_null(strstr(td_dev_name(f.dev), "cuda"));
  assert_int_equal(td_dev_act_dtype(f.dev), TD_BF16);
  assert_true(td_dev_free_vram_bytes(f.dev) > 0);
  td_err err;
  void *memory;
  assert_int_equal(td_dev_alloc(f.dev, &memory, (size_t)1 << 50, &err), TD_ENOMEM);
  assert_null(memory);
  assert_non_null(strstr(err.msg, "GPU"));
  cuda_close(&f);
}

// Mapped for reading, as workers map weights.
static int32_t *shared_weights(size_t n_bytes, int seals) {
  int fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  static const int32_t values[] = {1, 2, 3};
  assert_int_equal(pwrite(fd, values, sizeof values, 4096), sizeof values);
  assert_int_equal(ftruncate(fd, (off_t)n_bytes), 0);
  assert_int_equal(fcntl(fd, F_ADD_SEALS, seals | F_SEAL_SHRINK), 0);
  char path[64];
  snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
  int mapped = open(path, (seals & F_SEAL_WRITE ? O_RDONLY : O_RDWR) | O_CLOEXEC);
  void *memory = mmap(NULL, n_bytes, PROT_READ, MAP_SHARED, mapped, 0);
  assert_true(memory != MAP_FAILED);
  close(mapped);
  close(fd);
  return memory;
}

// What the log says is for people; the device works either way, and lets go of the memory.
static void test_pinned_memory(void **state) {
  (void)state;
  if (!library || !strstr(library, "_emu")) skip();
  // What the device registers: anything, what can be written to, nothing.
  static const struct {
    const char *allowed;
    int seals;
    bool is_pinned;
  } rounds[] = {{"2", F_SEAL_WRITE, true},  {"2", 0, true},
                {"1", F_SEAL_WRITE, false}, {"1", 0, true},
                {"0", F_SEAL_WRITE, false}, {"0", 0, false}};
  enum { BYTES = 8192 };
  for (size_t round = 0; round < TD_COUNT(rounds); round++) {
    setenv("TANDEM_EMU_PIN", rounds[round].allowed, 1);
    int32_t *weights = shared_weights(BYTES, rounds[round].seals);
    CUDA_OPEN(f);
    td_cuda_dev *dev = (td_cuda_dev *)f.dev;
    td_dev_pin(f.dev, NULL, 0);
    assert_int_equal(td_cuda_pinned_bytes(dev), 0);
    td_dev_pin(f.dev, weights, BYTES);
    td_dev_wait_pinned(f.dev, weights, BYTES);
    assert_int_equal(td_cuda_pinned_bytes(dev), rounds[round].is_pinned ? BYTES : 0);
    int zeros = open("/dev/zero", O_RDONLY | O_CLOEXEC); // reads into what can be written to
    assert_int_equal(read(zeros, weights, 1), -1);
    assert_int_equal(errno, EFAULT);
    close(zeros);
    const void *device;
    td_err err;
    assert_int_equal(td_cuda_on_device(dev, weights, BYTES, &device, &err), TD_OK);
    int32_t got[BYTES / sizeof(int32_t)];
    cuda_get(&f, got, device, sizeof got);
    assert_memory_equal(got, weights, sizeof got);
    cuda_close(&f);
    munmap(weights, BYTES);
  }
  unsetenv("TANDEM_EMU_PIN");
}

enum { PIECE = 8192, N_PIECES = 8 };

// Memory that ends up in N_PIECES pieces or one more, registered in steps: until the gate is
// removed, as many pieces as are let through.
typedef struct {
  char gate[64];
  size_t n;
  int32_t *weights;
  td_dev *dev;
} pinning;

static void let_pieces(pinning *p, size_t n) {
  const td_cuda_pins *pins = &((td_cuda_dev *)p->dev)->pins;
  assert_int_equal(truncate(p->gate, (off_t)n), 0);
  while (p->n - atomic_load(&pins->n_pending) < n)
    usleep(1000);
}

static pinning begin_pinning(bool ends_with_process) {
  pinning p = {.gate = "/tmp/tandem-gate-XXXXXX"};
  int fd = mkstemp(p.gate);
  assert_true(fd >= 0);
  close(fd);
  setenv("TANDEM_EMU_PIN_GATE", p.gate, 1);
  p.weights = shared_weights(PIECE * N_PIECES, 0);
  td_err err;
  const td_dev_opts opts = {.kind = "cuda", .ends_with_process = ends_with_process};
  if (td_dev_open(&p.dev, &opts, &err) != TD_OK) fail_msg("%s", err.msg);
  ((td_cuda_dev *)p.dev)->pins.piece_bytes = PIECE;
  td_dev_pin(p.dev, p.weights, PIECE * N_PIECES);
  p.n = ((td_cuda_dev *)p.dev)->pins.n_pending;
  return p;
}

static void open_gate(pinning *p) {
  unlink(p->gate);
  unsetenv("TANDEM_EMU_PIN_GATE");
}

static bool is_pinning(const pinning *p, size_t piece) {
  return td_dev_is_pinning(p->dev, (char *)p->weights + piece * PIECE, 1);
}

// Registering goes on beside the device's work, what is asked for first; copies are cut where
// pieces end, for those across them would fail.
static void test_memory_is_registered_in_pieces(void **state) {
  (void)state;
  if (!library || !strstr(library, "_emu")) skip();
  enum { LAST = N_PIECES - 1, MIDDLE = N_PIECES / 2 };
  pinning p = begin_pinning(false);
  td_cuda_dev *dev = (td_cuda_dev *)p.dev;
  char *const begin = (char *)p.weights;
  assert_true(is_pinning(&p, LAST));
  assert_false(td_dev_is_pinning(p.dev, begin - 1, 1));
  assert_false(td_dev_is_pinning(p.dev, begin + PIECE * N_PIECES, 1));
  let_pieces(&p, 2);
  assert_false(is_pinning(&p, LAST));
  assert_true(is_pinning(&p, MIDDLE)); // though it comes before
  const void *device;
  td_err err;
  const size_t sizes[] = {PIECE * N_PIECES, PIECE * (N_PIECES - 1), PIECE / 2};
  for (size_t i = 0; i < TD_COUNT(sizes); i++) {
    if (i == 1) { // again, with all of it registered
      open_gate(&p);
      td_dev_wait_pinned(p.dev, p.weights, PIECE * N_PIECES);
      assert_int_equal(td_cuda_pinned_bytes(dev), PIECE * N_PIECES);
    }
    assert_int_equal(td_cuda_on_device(dev, begin, sizes[i], &device, &err), TD_OK);
    assert_memory_equal(device, begin, sizes[i]); // the emulator's memory is the host's
  }
  td_dev_close(p.dev);
  munmap(p.weights, PIECE * N_PIECES);
}

// Closing waits for a piece at most, and leaves nothing registered, but where the process ends.
static void test_registering_stops(void **state) {
  (void)state;
  if (!library || !strstr(library, "_emu")) skip();
  for (int is_last = 0; is_last < 2; is_last++) {
    pinning p = begin_pinning(is_last);
    let_pieces(&p, 1);
    open_gate(&p);
    td_dev_close(p.dev);
    td_err err;
    assert_int_equal(td_dev_open(&p.dev, &(td_dev_opts){.kind = "cuda"}, &err), TD_OK);
    td_cuda_dev *dev = (td_cuda_dev *)p.dev;
    td_dev_pin(p.dev, p.weights, PIECE);
    td_dev_wait_pinned(p.dev, p.weights, PIECE);
    assert_int_equal(td_cuda_pinned_bytes(dev), is_last ? 0 : PIECE);
    for (size_t i = 0; is_last && i < N_PIECES; i++)
      dev->abi->unpin((char *)p.weights + i * PIECE);
    td_dev_close(p.dev);
    munmap(p.weights, PIECE * N_PIECES);
  }
}

// Where streaming does not pay, the rest need not be registered, and nobody waits for it.
static void test_registering_is_given_up(void **state) {
  (void)state;
  if (!library || !strstr(library, "_emu")) skip();
  pinning p = begin_pinning(false);
  let_pieces(&p, 1);
  td_dev_stop_pinning(p.dev);
  assert_false(td_dev_is_pinning(p.dev, p.weights, PIECE * N_PIECES));
  td_dev_wait_pinned(p.dev, p.weights, PIECE * N_PIECES);
  open_gate(&p); // for the one that had begun
  assert_true(td_cuda_pinned_bytes((td_cuda_dev *)p.dev) <= 2 * PIECE);
  td_dev_close(p.dev);
  munmap(p.weights, PIECE * N_PIECES);
}

// The next operator is not blamed for memory that was not there.
static void test_a_failure_is_told_once(void **state) {
  (void)state;
  CUDA_OPEN(f);
  void *memory;
  td_err err;
  assert_int_equal(td_dev_alloc(f.dev, &memory, (size_t)1 << 60, &err), TD_ENOMEM);
  float one[] = {1, 1};
  uint16_t *x = cuda_put_bf16(&f, one, 2), *y = cuda_put_bf16(&f, one, 2);
  td_op_add(f.stream, x, y, 2);
  cuda_sync(&f);
  cuda_close(&f);
}

// A device that is broken stays so: everything says why, and closing works.
static void test_a_broken_device(void **state) {
  (void)state;
  if (!library || !strstr(library, "_emu")) skip();
  CUDA_OPEN(f);
  float one[] = {1, 1};
  uint16_t *x = cuda_put_bf16(&f, one, 2);
  td_op_add(f.stream, x, x, 1);
  cuda_sync(&f);
  setenv("TANDEM_EMU_BREAK", "1", 1);
  td_err err;
  for (int i = 0; i < 2; i++) {
    td_op_add(f.stream, x, x, 1);
    assert_int_equal(td_stream_sync(f.stream, &err), TD_EINTERNAL);
    assert_non_null(strstr(err.msg, "illegal memory access"));
  }
  td_stream *other;
  assert_int_equal(td_stream_open(&other, f.dev, &err), TD_EINTERNAL);
  assert_null(other);
  cuda_close(&f);
  unsetenv("TANDEM_EMU_BREAK");
}

static void test_weights_that_do_not_fit(void **state) {
  (void)state;
  if (!library) skip();
  td_dev *dev;
  td_err err;
  const td_dev_opts gpu = {.kind = "cuda", .need_bytes = (size_t)1 << 50};
  assert_int_equal(td_dev_open(&dev, &gpu, &err), TD_ENOMEM);
  assert_null(dev);
  assert_non_null(strstr(err.msg, "--device cpu"));
  const td_dev_opts best = {.kind = "auto", .n_threads = 1, .need_bytes = (size_t)1 << 50};
  assert_int_equal(td_dev_open(&dev, &best, &err), TD_OK);
  assert_int_equal(td_dev_free_vram_bytes(dev), 0);
  td_dev_close(dev);
}

// b[i] of the second stream is computed from what the first has left by then.
static void test_streams_wait_for_events(void **state) {
  (void)state;
  enum { N = 4096, ROUNDS = 20 };
  CUDA_OPEN(f);
  td_err err;
  td_stream *other;
  td_event *ready, *taken;
  assert_int_equal(td_stream_open(&other, f.dev, &err), TD_OK);
  assert_int_equal(td_event_open(&ready, f.dev, &err), TD_OK);
  assert_int_equal(td_event_open(&taken, f.dev, &err), TD_OK);
  float one[N];
  for (int i = 0; i < N; i++)
    one[i] = 1;
  uint16_t *ones = cuda_put_bf16(&f, one, N), *x = cuda_put_bf16(&f, one, N);
  uint16_t *copies = cuda_alloc(&f, ROUNDS * N * sizeof *copies);
  for (int i = 0; i < ROUNDS; i++) {
    td_stream_wait(f.stream, taken); // never recorded at first: done
    td_op_add(f.stream, x, ones, N);
    td_event_record(ready, f.stream);
    td_stream_wait(other, ready);
    td_op_copy(other, copies + (size_t)i * N, x, N * sizeof *x);
    td_event_record(taken, other);
  }
  td_event_sync(taken);
  assert_int_equal(td_stream_sync(other, &err), TD_OK);
  float *got = cuda_get_bf16(&f, copies, ROUNDS * N);
  for (size_t i = 0; i < ROUNDS * N; i++)
    assert_true(got[i] == (float)(i / N + 2));
  free(got);
  td_event_close(ready);
  td_event_close(taken);
  td_stream_close(other);
  cuda_close(&f);
}

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
  td_op_top_logits(p->stream, &(td_top_logits_args){p->logits, p->zeros, p->top, p->n_rows, 70});
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
static void test_work_that_comes_again(void **state) {
  (void)state;
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

static void test_work_that_cannot_be_captured(void **state) {
  (void)state;
  if (!library || !strstr(library, "_emu")) skip();
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
static void test_captures_that_fail_at_first(void **state) {
  (void)state;
  if (!library || !strstr(library, "_emu")) skip();
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

static void refuses(const td_cu_abi *abi, const char *why) {
  td_err err = {.msg = ""};
  assert_int_equal(td_cuda_abi_check(abi, "LIB", &err), TD_EUNSUPPORTED);
  if (!strstr(err.msg, why)) fail_msg("\"%s\" where \"%s\" belongs", err.msg, why);
}

// A library that lacks a function, or takes other arguments, is refused by the function's name.
static void test_library_of_another_build(void **state) {
  (void)state;
  td_cu_function functions[] = TD_CU_FUNCTION_LIST;
  enum { N = TD_COUNT(functions) };
  const td_cu_abi good = {.version = TD_CUDA_ABI_VERSION,
                          .n_bytes = sizeof good,
                          .n_functions = N,
                          .functions = functions};
  td_err err;
  assert_int_equal(td_cuda_abi_check(&good, "LIB", &err), TD_OK);
  td_cu_abi other = good;
  other.version--;
  refuses(&other, "LIB has interface ");
  other = good;
  other.n_functions++;
  refuses(&other, "functions that this program does not have");
  for (uint32_t i = 0; i < N; i++) {
    char why[96];
    const td_cu_function kept = functions[i];
    snprintf(why, sizeof why, "LIB has no function %s ", kept.name);
    other = good;
    other.n_functions = i;
    refuses(&other, why);
    functions[i].name = "another";
    refuses(&good, why);
    functions[i] = kept;
    functions[i].args_bytes += 4;
    snprintf(why, sizeof why, "other arguments for its function %s ", kept.name);
    refuses(&good, why);
    functions[i] = kept;
  }
}

// Every field of a key tells pieces apart.
static void test_keys_of_work(void **state) {
  (void)state;
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

// Memory that has grown is let go of when the step ends, not in its middle, unless there is no
// other.
static void test_scratch_that_grows(void **state) {
  (void)state;
  CUDA_OPEN(f);
  td_cuda_stream *stream = (td_cuda_stream *)f.stream;
  void *memory;
  td_err err;
  for (size_t n = 1; n <= 2 * N_CUDA_RETIRED; n++) {
    assert_int_equal(td_cuda_scratch(stream, CUDA_SCRATCH_PARTS, n * 4096, &memory, &err), TD_OK);
    td_op_fill_zero(f.stream, memory, n * 4096);
    if (n == 2) assert_int_equal(stream->n_retired, 1);
  }
  cuda_sync(&f);
  assert_int_equal(stream->n_retired, 0);
  const size_t most = td_dev_free_vram_bytes(f.dev) / 4 * 3;
  for (int i = 0; i < 2; i++) { // too much for both
    assert_int_equal(td_cuda_scratch(stream, CUDA_SCRATCH_PARTS, most / 5 * (4 - i), &memory, &err),
                     TD_OK);
    assert_int_equal(td_cuda_scratch(stream, CUDA_SCRATCH_ML, i * 4096, &memory, &err), TD_OK);
  }
  assert_int_equal(td_cuda_scratch(stream, CUDA_SCRATCH_PARTS, most, &memory, &err), TD_OK);
  assert_int_equal(stream->n_retired, 0);
  cuda_close(&f);
}

// A signal that does not come ends the step with an error, whatever else it waits for.
static void test_a_signal_that_does_not_come(void **state) {
  (void)state;
  CUDA_OPEN(f);
  td_cuda_dev *dev = (td_cuda_dev *)f.dev;
  td_err err;
  void *host;
  assert_int_equal(td_dev_alloc_host(f.dev, &host, 64, &err), TD_OK);
  memset(host, 0, 64);
  _Atomic uint32_t *signal = host;
  const uint32_t one = 1, *value = cuda_put(&f, &one, sizeof one);
  td_op_signal(f.stream, signal, value);
  td_op_await(f.stream, signal, value);
  cuda_sync(&f);
  dev->await_ns = 1000000;
  td_op_await(f.stream, signal + 1, value);
  dev->await_ns = UINT64_MAX;
  td_op_await(f.stream, signal + 2, value);
  td_op_signal(f.stream, signal + 3, value);
  assert_int_equal(td_stream_sync(f.stream, &err), TD_EINTERNAL);
  assert_non_null(strstr(err.msg, "waited"));
  assert_int_equal(atomic_load(signal + 3), 1); // who waits for this stream is let go
  td_dev_free_host(f.dev, host);
  cuda_close(&f);
}

// Copies that the device's processors make, from and to the host's memory, of any alignment.
static void test_direct_copies(void **state) {
  (void)state;
  enum { N = 70000 };
  CUDA_OPEN(f);
  td_err err;
  void *memory;
  assert_int_equal(td_dev_alloc_host(f.dev, &memory, 2 * N, &err), TD_OK);
  uint8_t *from = memory, *back = from + N, *device = cuda_alloc(&f, N);
  for (uint32_t i = 0; i < N; i++)
    from[i] = (uint8_t)(7 * i + i / 256);
  static const size_t shapes[][2] = {{0, N}, {1, 513}, {4, 1000}, {16, 32768}, {0, 1}, {0, 0}};
  for (size_t i = 0; i < TD_COUNT(shapes); i++) {
    const size_t at = shapes[i][0], n = shapes[i][1] < N - at ? shapes[i][1] : N - at;
    memset(back, 0, N);
    td_op_copy_direct(f.stream, device + at, from + at, n);
    td_op_copy_direct(f.stream, back + at, device + at, n);
    cuda_sync(&f);
    assert_memory_equal(back + at, from + at, n);
    if (at + n < N) assert_int_equal(back[at + n], 0);
  }
  td_dev_free_host(f.dev, memory);
  cuda_close(&f);
}

// An event is asked for without waiting, while its stream waits for the host.
static void test_events_that_are_not_done(void **state) {
  (void)state;
  CUDA_OPEN(f);
  td_err err;
  void *host;
  td_event *event;
  td_stream *urgent;
  assert_int_equal(td_dev_alloc_host(f.dev, &host, 64, &err), TD_OK);
  memset(host, 0, 64);
  assert_int_equal(td_event_open(&event, f.dev, &err), TD_OK);
  assert_int_equal(td_stream_open_urgent(&urgent, f.dev, &err), TD_OK);
  _Atomic uint32_t *signal = host;
  const uint32_t one = 1, *value = cuda_put(&f, &one, sizeof one);
  assert_true(td_event_is_done(event)); // never recorded
  td_op_await(urgent, signal, value);
  td_event_record(event, urgent);
  assert_false(td_event_is_done(event));
  atomic_store(signal, 1);
  td_event_sync(event);
  assert_true(td_event_is_done(event));
  td_stream_close(urgent);
  td_event_close(event);
  td_dev_free_host(f.dev, host);
  cuda_close(&f);
}

static void test_an_await_that_is_canceled(void **state) {
  (void)state;
  CUDA_OPEN(f);
  ((td_cuda_dev *)f.dev)->await_ns = UINT64_MAX;
  td_err err;
  void *host;
  assert_int_equal(td_dev_alloc_host(f.dev, &host, 64, &err), TD_OK);
  memset(host, 0, 64);
  _Atomic uint32_t *signal = host;
  const uint32_t one = 1, *value = cuda_put(&f, &one, sizeof one);
  td_op_await_or_cancel(f.stream, signal, value, signal + 2);
  td_op_await_or_cancel(f.stream, signal + 1, value, signal + 2);
  atomic_store(signal, 1);
  cuda_alloc(&f, 1);
  atomic_store(signal + 2, 1);
  assert_int_equal(td_stream_sync(f.stream, &err), TD_ECANCELED);
  td_dev_free_host(f.dev, host);
  cuda_close(&f);
}

// Where there is no memory for one more graph, those that are there make room.
static void test_more_work_than_graphs_fit(void **state) {
  (void)state;
  if (!library || !strstr(library, "_emu")) skip();
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

// A capture that is spoiled on the way leaves nothing behind, and the work is done all the same.
static void grow_on_second_call(void *ctx) {
  piece_of_work *p = ctx;
  if (p->n_calls == 1) p->n_rows = 4;
  enqueue_piece(ctx);
}

static void test_work_that_spoils_its_capture(void **state) {
  (void)state;
  CUDA_OPEN(f);
  piece_of_work p = make_piece(&f);
  for (int run = 0; run < 4; run++)
    run_piece(&p, 7, grow_on_second_call);
  assert_int_equal(p.n_calls, 4); // the second for nothing, the last captured
  check_piece(&f, &p, 4);
  cuda_close(&f);
}

// Small copies share a piece of memory, and so do larger ones whose last page would stay half
// empty; whole pages do not, nor does what no piece holds.
static void test_copies_share_pages(void **state) {
  (void)state;
  enum { MIB = 1 << 20 };
  static const struct {
    size_t n_bytes, n_pieces;
  } steps[] = {{7, 1},        {3 * MIB, 1},  {4 * MIB, 2},  {65 * MIB, 3}, {13 * MIB, 3},
               {13 * MIB, 3}, {13 * MIB, 3}, {13 * MIB, 3}, {13 * MIB, 4}};
  CUDA_OPEN(f);
  td_cuda_dev *dev = (td_cuda_dev *)f.dev;
  dev->page_bytes = 2 * MIB;
  uint8_t *host = malloc(65 * MIB), *got = malloc(65 * MIB);
  const void *device[TD_COUNT(steps)];
  td_err err;
  for (size_t i = 0; i < 65 * MIB; i++)
    host[i] = (uint8_t)(i * 37 >> 3);
  for (size_t i = 0; i < TD_COUNT(steps); i++) {
    assert_int_equal(td_cuda_on_device(dev, host + i, steps[i].n_bytes - i, &device[i], &err),
                     TD_OK);
    assert_int_equal((uintptr_t)device[i] % 256, 0);
    assert_int_equal(dev->n_pieces, steps[i].n_pieces);
  }
  for (size_t i = 0; i < TD_COUNT(steps); i++) {
    cuda_get(&f, got, device[i], steps[i].n_bytes - i);
    assert_memory_equal(got, host + i, steps[i].n_bytes - i);
  }
  free(host);
  free(got);
  cuda_close(&f);
}

static void test_weights_are_copied_once(void **state) {
  (void)state;
  enum { N = 3000 }; // more than the table has slots for at first
  CUDA_OPEN(f);
  td_cuda_dev *dev = (td_cuda_dev *)f.dev;
  int32_t *host = malloc(N * sizeof *host);
  const void **device = malloc(N * sizeof *device);
  td_err err;
  for (int i = 0; i < N; i++) {
    host[i] = i;
    assert_int_equal(td_cuda_on_device(dev, &host[i], sizeof host[i], &device[i], &err), TD_OK);
  }
  for (int i = 0; i < N; i++) {
    const void *again;
    int32_t value;
    assert_int_equal(td_cuda_on_device(dev, &host[i], sizeof host[i], &again, &err), TD_OK);
    assert_ptr_equal(again, device[i]);
    if (i % 97 == 0) {
      cuda_get(&f, &value, again, sizeof value);
      assert_int_equal(value, i);
    }
  }
  const void *none = host;
  assert_int_equal(td_cuda_on_device(dev, NULL, 4, &none, &err), TD_OK);
  assert_null(none);
  assert_int_equal(td_cuda_on_device(dev, host, (size_t)1 << 50, &none, &err), TD_ENOMEM);
  assert_non_null(strstr(err.msg, "do not fit the GPU"));
  free(host);
  free(device);
  cuda_close(&f);
}

// A matrix of another layout is brought into rows once, and found again with all its parts.
static void test_layouts_become_rows(void **state) {
  (void)state;
  enum { GROUP = 32, SIZES = 3 };
  static const uint32_t dims[SIZES][2] = {{16, 64}, {8, 32}, {40, 96}}; // rows, columns
  ref_weight weights[TD_COUNT(ref_formats) * SIZES] = {0}; // none where another one was
  CUDA_OPEN(f);
  td_cuda_dev *dev = (td_cuda_dev *)f.dev;
  td_err err;
  for (size_t i = 0; i < TD_COUNT(weights); i++) {
    const ref_format *format = &ref_formats[i / SIZES];
    if (format->layout == TD_LAYOUT_ROWS) continue;
    uint32_t rows = dims[i % SIZES][0], cols = dims[i % SIZES][1];
    const ref_weight w = weights[i] = ref_make_format(&f.rng, format, rows, cols, 1, GROUP);
    td_weight first, again;
    assert_int_equal(td_cuda_weight(dev, &w.w, "test", &first, &err), TD_OK);
    assert_int_equal(td_cuda_weight(dev, &w.w, "test", &again, &err), TD_OK);
    assert_int_equal(first.layout, TD_LAYOUT_ROWS);
    assert_memory_equal(&first, &again, sizeof first);
    td_weight here = first;
    char *data = malloc(td_weight_data_bytes(&here)), *scale = malloc(td_weight_scale_bytes(&here));
    uint32_t *zero = malloc(td_weight_zero_bytes(&here) + 1);
    TD_CHECK(data && scale && zero);
    cuda_get(&f, data, first.data, td_weight_data_bytes(&here));
    cuda_get(&f, scale, first.scale, td_weight_scale_bytes(&here));
    if (here.zero) cuda_get(&f, zero, first.zero, td_weight_zero_bytes(&here));
    here.data = data;
    here.scale = scale;
    if (here.zero) here.zero = zero;
    for (uint32_t r = 0; r < rows; r++) {
      for (uint32_t c = 0; c < cols; c++)
        assert_true(ref_at(&here, r, c) == ref_at(&w.w, r, c));
    }
    free(data);
    free(scale);
    free(zero);
  }
  for (size_t i = 0; i < TD_COUNT(weights); i++)
    ref_free_weight(&weights[i]);
  cuda_close(&f);
}

static void test_how_weights_are_read(void **state) {
  (void)state;
  float scale;
  static const struct {
    td_dtype dtype, scale_dtype;
    uint32_t cols, scale_cols;
    td_layout layout;
    td_cu_read want;
  } cases[] = {
      {TD_F32, TD_F32, 64, 0, TD_LAYOUT_ROWS, TD_CU_READ_F32},
      {TD_F16, TD_F32, 64, 0, TD_LAYOUT_ROWS, TD_CU_READ_F16},
      {TD_BF16, TD_F32, 64, 0, TD_LAYOUT_ROWS, TD_CU_READ_BF16},
      {TD_BF16, TD_F32, 68, 0, TD_LAYOUT_ROWS, TD_CU_READ_ANY},
      {TD_F8E4M3, TD_F32, 640, 128, TD_LAYOUT_ROWS, TD_CU_READ_F8},
      {TD_F8E4M3, TD_F32, 640, 32, TD_LAYOUT_ROWS, TD_CU_READ_F8},
      {TD_F8E4M3, TD_F32, 640, 16, TD_LAYOUT_ROWS, TD_CU_READ_ANY},
      {TD_F8E4M3, TD_F32, 640, 384, TD_LAYOUT_ROWS, TD_CU_READ_ANY}, // no power of two
      {TD_F8E4M3, TD_F32, 640, 700, TD_LAYOUT_ROWS, TD_CU_READ_F8},  // but a row
      {TD_F8E4M3, TD_F8E8M0, 640, 128, TD_LAYOUT_ROWS, TD_CU_READ_ANY},
      {TD_I8, TD_F32, 640, 640, TD_LAYOUT_ROWS, TD_CU_READ_I8},
      {TD_I4, TD_BF16, 640, 32, TD_LAYOUT_ROWS, TD_CU_READ_I4},
      {TD_I4, TD_BF16, 640, 16, TD_LAYOUT_ROWS, TD_CU_READ_ANY},
      {TD_I4, TD_BF16, 640, 32, TD_LAYOUT_AWQ, TD_CU_READ_ANY},
      {TD_F4E2M1, TD_F8E4M3, 640, 16, TD_LAYOUT_ROWS, TD_CU_READ_NVFP4},
      {TD_F4E2M1, TD_F8E8M0, 640, 32, TD_LAYOUT_ROWS, TD_CU_READ_MXFP4},
      {TD_F4E2M1, TD_F8E8M0, 640, 16, TD_LAYOUT_ROWS, TD_CU_READ_ANY},
      {TD_F4E2M1, TD_F8E4M3, 640, 32, TD_LAYOUT_ROWS, TD_CU_READ_ANY},
  };
  for (size_t i = 0; i < TD_COUNT(cases); i++) {
    td_weight w = {.dtype = cases[i].dtype,
                   .scale_dtype = cases[i].scale_dtype,
                   .cols = cases[i].cols,
                   .scale_cols = cases[i].scale_cols,
                   .scale = cases[i].scale_cols ? &scale : NULL,
                   .layout = cases[i].layout};
    assert_int_equal(td_cuda_read_of(&w, true), cases[i].want);
    assert_int_equal(td_cuda_read_of(&w, false), TD_CU_READ_ANY);
  }
  td_weight bf16 = {.dtype = TD_BF16, .rows = 8, .cols = 64};
  td_weight f8 = {.dtype = TD_F8E4M3, .scale = &scale, .scale_cols = 128, .cols = 64};
  td_weight f32 = {.dtype = TD_F32, .rows = 8, .cols = 64};
  td_weight f4 = {.dtype = TD_F4E2M1, .scale = &scale, .scale_cols = 16, .cols = 64};
  const td_cu_read f8_read = TD_CU_READ_F8, any = TD_CU_READ_ANY;
  assert_int_equal(td_cuda_gemm_of(&f8, f8_read, 64, true), CUDA_GEMM_VEC);
  assert_int_equal(td_cuda_gemm_of(&f8, f8_read, 65, true), CUDA_GEMM_WGMMA);
  assert_int_equal(td_cuda_gemm_of(&f8, f8_read, 65, false), CUDA_GEMM_MMA);
  assert_int_equal(td_cuda_gemm_of(&f8, any, 65, true), CUDA_GEMM_MMA);
  assert_int_equal(td_cuda_gemm_of(&f32, TD_CU_READ_F32, 1000, true), CUDA_GEMM_VEC);
  assert_int_equal(td_cuda_tile_tokens(CUDA_GEMM_MMA, 500), 64);
  assert_int_equal(td_cuda_tile_tokens(CUDA_GEMM_WGMMA, 64), 64);
  assert_int_equal(td_cuda_tile_tokens(CUDA_GEMM_WGMMA, 65), 128);
  assert_false(td_cuda_use_blas(&bf16, 16));
  assert_true(td_cuda_use_blas(&bf16, 17));
  assert_false(td_cuda_use_blas(&f8, 64));
  assert_true(td_cuda_use_blas(&f8, 65));
  assert_false(td_cuda_use_blas(&f4, 255));
  assert_true(td_cuda_use_blas(&f4, 256));
  assert_false(td_cuda_use_blas(&f32, 1000));
  assert_int_equal(td_cuda_tiles_at_once(0, 170, 200), 170);
  assert_int_equal(td_cuda_tiles_at_once(199, 170, 200), 170);
  assert_int_equal(td_cuda_tiles_at_once(200, 170, 200), 8);
  assert_int_equal(td_cuda_tiles_at_once(200, 3, 200), 3);
  static const uint32_t tokens[][2] = {{1, 8}, {8, 8}, {9, 16}, {16, 16}, {900, 16}};
  for (size_t i = 0; i < TD_COUNT(tokens); i++)
    assert_int_equal(td_cuda_tile_tokens(CUDA_GEMM_VEC, tokens[i][0]), tokens[i][1]);
  // rows, SMs, warps
  static const uint32_t rows[][3] = {{1, 132, 24},    {2112, 132, 24},  {2113, 132, 12},
                                     {4096, 132, 12}, {7168, 132, 6},   {8192, 132, 6},
                                     {6144, 132, 8},  {129280, 132, 8}, {7168, 82, 8}};
  for (size_t i = 0; i < TD_COUNT(rows); i++) {
    assert_int_equal(td_cuda_vec_warps(rows[i][0], false, rows[i][1]), rows[i][2]);
    assert_int_equal(td_cuda_vec_warps(rows[i][0], true, rows[i][1]), 8);
  }
}

// A matrix in pieces is the matrix.
static void test_pieces_of_a_matrix(void **state) {
  (void)state;
  enum { ROWS = 24, COLS = 64, TOKENS = 256, CUT = 16 };
  td_weight wide = {.dtype = TD_F8E4M3, .rows = 100, .cols = 1u << 24}, v3 = wide;
  assert_int_equal(td_cuda_piece_rows(&wide, 100), 16);
  v3.cols = 7168;
  assert_int_equal(td_cuda_piece_rows(&v3, 18432), 4680);
  assert_int_equal(td_cuda_piece_rows(&v3, 2048), 2048);
  CUDA_OPEN(f);
  td_err err;
  ref_weight w = ref_make_weight(&f.rng, TD_F8E4M3, ROWS, COLS, 8, 32);
  td_weight device;
  assert_int_equal(td_cuda_weight((td_cuda_dev *)f.dev, &w.w, "w", &device, &err), TD_OK);
  float *x = cuda_floats(&f, TOKENS * COLS), got[2][TOKENS * ROWS];
  float *y = cuda_alloc(&f, sizeof got[0]);
  td_cuda_matmul m = {.w = &device,
                      .x = cuda_put_bf16(&f, x, TOKENS * COLS),
                      .y = y,
                      .x_stride = COLS,
                      .y_stride = ROWS,
                      .n_tokens = TOKENS,
                      .n_rows = ROWS,
                      .y_f32 = true};
  td_cuda_stream *stream = (td_cuda_stream *)f.stream;
  assert_int_equal(td_cuda_run_matmul(stream, &m, &err), TD_OK);
  cuda_get(&f, got[0], y, sizeof got[0]);
  m.n_rows = CUT;
  assert_int_equal(td_cuda_run_matmul(stream, &m, &err), TD_OK);
  m.row0 = CUT;
  m.n_rows = ROWS - CUT;
  m.y = y + CUT;
  assert_int_equal(td_cuda_run_matmul(stream, &m, &err), TD_OK);
  cuda_get(&f, got[1], y, sizeof got[1]);
  for (size_t i = 0; i < TOKENS * ROWS; i++) // cuBLAS may sum in another order
    cuda_assert_within(got[1][i], got[0][i], fabsf(got[0][i]) * 1e-4 + 1e-4, "piece", i);
  free(x);
  ref_free_weight(&w);
  cuda_close(&f);
}

static void test_splits(void **state) {
  (void)state;
  for (uint32_t max_keys = 1; max_keys < 1u << 20; max_keys += 1 + max_keys / 3) {
    for (uint32_t n_blocks = 1; n_blocks <= 4; n_blocks++) {
      uint32_t keys, n, few = n_blocks <= 2;
      td_cuda_splits(max_keys, n_blocks, &keys, &n);
      assert_true((uint64_t)keys * n >= max_keys && (uint64_t)keys * (n - 1) < max_keys);
      assert_true(n <= (few ? 128 : 64) && (keys & (keys - 1)) == 0);
      // the same for all usual contexts
      if (max_keys <= 256 * 64) assert_int_equal(keys, few ? 128 : 256);
    }
  }
}

static void test_splits_that_a_block_adds_up(void **state) {
  (void)state;
  assert_false(td_cuda_folds_by_block(1, 4, 64, 132));
  assert_false(td_cuda_folds_by_block(4, 4, 32, 132));
  assert_true(td_cuda_folds_by_block(4, 4, 33, 132)); // 9 blocks in a row
  assert_true(td_cuda_folds_by_block(33, 4, 1, 132));
}

static void test_prompts_of_a_launch(void **state) {
  (void)state;
  enum { SEQS = 40 };
  int32_t q_begin[SEQS + 1] = {0}, position[SEQS * 130];
  for (int32_t s = 0; s < SEQS; s++) { // of 0, 1, 129, 0, 1, .. tokens, behind 10 others
    const int32_t n = s % 3 == 2 ? 129 : s % 3;
    q_begin[s + 1] = q_begin[s] + n;
    for (int32_t t = 0; t < n; t++)
      position[q_begin[s] + t] = 10 + t;
  }
  td_batch_view b = {.n_tokens = (uint32_t)q_begin[SEQS],
                     .n_seqs = SEQS,
                     .max_pages = 2,
                     .page_tokens = 64,
                     .host_q_begin = q_begin,
                     .host_position = position};
  td_cu_prefill_list list;
  assert_int_equal(td_cuda_list_prompts(&b, 0, SIZE_MAX, &list), TD_CU_PREFILL_SEQS);
  assert_int_equal(td_cuda_list_prompts(&b, TD_CU_PREFILL_SEQS, SIZE_MAX, &list), SEQS);
  assert_int_equal(list.n_seqs, SEQS - TD_CU_PREFILL_SEQS);
  assert_int_equal(td_cuda_list_prompts(&b, 1, 11 + 128, &list), 4); // pages hold 128 of 139 keys
  assert_int_equal(list.n_seqs, 3);
  assert_int_equal(list.n_keys, 11 + 128);
  assert_int_equal(list.n_tiles, 1 + 2);
  assert_int_equal(list.max_keys, 128);
  assert_int_equal(list.seqs[1].seq, 2);
  assert_int_equal(list.seqs[1].key_begin, 11);
  assert_int_equal(list.seqs[1].tile_begin, 1);
  assert_int_equal(list.seqs[2].n_keys, 0);
  assert_int_equal(list.seqs[2].tile_begin, 3);
  assert_int_equal(td_cuda_list_prompts(&b, 2, 1, &list), 3); // one at least
  b.host_position = NULL;
  assert_int_equal(td_cuda_list_prompts(&b, 5, SIZE_MAX, &list), 6);
  assert_int_equal(list.n_keys, 128);
  assert_int_equal(list.n_tiles, (b.n_tokens + 127) / 128);
}

int main(int argc, char **argv) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_teardown(test_without_a_library, restore),
      cmocka_unit_test_teardown(test_without_a_gpu, restore),
      cmocka_unit_test(test_a_driver_that_is_too_old),
      cmocka_unit_test(test_where_cublas_is),
      cmocka_unit_test(test_names_and_memory),
      cmocka_unit_test(test_pinned_memory),
      cmocka_unit_test(test_memory_is_registered_in_pieces),
      cmocka_unit_test(test_registering_stops),
      cmocka_unit_test(test_registering_is_given_up),
      cmocka_unit_test(test_a_failure_is_told_once),
      cmocka_unit_test(test_a_broken_device),
      cmocka_unit_test(test_weights_that_do_not_fit),
      cmocka_unit_test(test_streams_wait_for_events),
      cmocka_unit_test(test_work_that_comes_again),
      cmocka_unit_test(test_work_that_cannot_be_captured),
      cmocka_unit_test(test_captures_that_fail_at_first),
      cmocka_unit_test(test_library_of_another_build),
      cmocka_unit_test(test_keys_of_work),
      cmocka_unit_test(test_scratch_that_grows),
      cmocka_unit_test(test_a_signal_that_does_not_come),
      cmocka_unit_test(test_direct_copies),
      cmocka_unit_test(test_events_that_are_not_done),
      cmocka_unit_test(test_an_await_that_is_canceled),
      cmocka_unit_test(test_more_work_than_graphs_fit),
      cmocka_unit_test(test_work_that_spoils_its_capture),
      cmocka_unit_test(test_copies_share_pages),
      cmocka_unit_test(test_weights_are_copied_once),
      cmocka_unit_test(test_layouts_become_rows),
      cmocka_unit_test(test_how_weights_are_read),
      cmocka_unit_test(test_pieces_of_a_matrix),
      cmocka_unit_test(test_splits),
      cmocka_unit_test(test_splits_that_a_block_adds_up),
      cmocka_unit_test(test_prompts_of_a_launch),
  };
  if (!filter_tests(argc, argv, tests, TD_COUNT(tests))) return 2;
  const char *given = getenv("TANDEM_CUDA_LIB");
  library = given ? strdup(given) : NULL;
  int n_failed = cmocka_run_group_tests(tests, NULL, NULL);
  free(library);
  return n_failed;
}
