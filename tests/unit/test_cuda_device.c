// tests/unit/test_cuda_device.c - opening the CUDA device where it is and where it is not, streams,
// events and pinned memory.
// CTest: gpu

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cuda_emu/hooks.h"
#include "support/folder.h"
#include "unit/cuda_test.h"
#include "unit/log_of.h"

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

TEST(without_a_library, NULL, restore) {
  with_library("/nonexistent/libtandem_cuda.so", NULL);
  expect_open("cuda", TD_EUNSUPPORTED, "/nonexistent/libtandem_cuda.so");
  expect_open("auto", TD_OK, "cpu");
  with_library("libm.so.6", NULL);
  expect_open("cuda", TD_EUNSUPPORTED, "not a library of tandem");
}

TEST(without_a_gpu, NULL, restore) {
  if (!library || !strstr(library, "_emu")) skip();
  with_library(NULL, "0");
  expect_open("cuda", TD_EUNSUPPORTED, "no CUDA-capable device");
  expect_open("auto", TD_OK, "cpu");
  with_library(NULL, NULL);
  expect_open("auto", TD_OK, "cuda");
}

// A driver that is older than the release the kernels were built with, on a GPU that they have no
// code for.
TEST(a_driver_that_is_too_old) {
  if (!library || !strstr(library, "_emu")) skip();
  setenv("TANDEM_EMU_PTX", "0", 1);
  expect_open("cuda", TD_EUNSUPPORTED, "unsupported toolchain");
  expect_open("cuda", TD_EUNSUPPORTED, "-DTD_CUDA_ARCHS=");
  expect_open("auto", TD_OK, "cpu");
  unsetenv("TANDEM_EMU_PTX");
}

static uint32_t n_wide, n_wgmma;
static int count_wide(const td_cu_linear_args *args, td_cu_stream stream) {
  (void)stream;
  n_wide += args->wide.n_arrived != NULL;
  return 0;
}
static int count_wgmma(const td_cu_linear_args *args, td_cu_stream stream) {
  (void)args, (void)stream;
  n_wgmma++;
  return 0;
}
static int launch_nothing(const td_cu_linear_args *args, td_cu_stream stream) {
  (void)args, (void)stream;
  return 0;
}

// Kernels that are left out by name are not launched, others are.
static void check_without(const char *names, uint32_t want_wide, uint32_t want_wgmma) {
  setenv("TANDEM_CUDA_WITHOUT", names, 1);
  CUDA_OPEN(f);
  td_cuda_dev *dev = (td_cuda_dev *)f.dev;
  td_cu_abi abi = *dev->abi;
  const td_cu_abi *own = dev->abi;
  abi.linear_vec = count_wide;
  abi.linear_wgmma = count_wgmma;
  abi.linear_mma = launch_nothing;
  dev->abi = &abi;
  ((td_cuda_stream *)f.stream)->is_blas_tried = true;
  n_wide = n_wgmma = 0;
  ref_weight w = ref_make_weight(&f.rng, TD_F8E4M3, 128, 128, 128, 128);
  void *x = cuda_alloc(&f, 129 * 128 * 2), *y = cuda_alloc(&f, 129 * 128 * 2);
  for (uint32_t n = 64; n <= 129; n += 65) {
    td_op_linear(f.stream,
                 &(td_linear_op_args){
                     .w = &w.w, .x = x, .y = y, .x_stride = 128, .y_stride = 128, .n_tokens = n});
    cuda_sync(&f);
  }
  dev->abi = own;
  assert_int_equal(n_wide, want_wide);
  assert_int_equal(n_wgmma, want_wgmma);
  ref_free_weight(&w);
  cuda_close(&f);
}

static int use_all_kernels(void **state) {
  (void)state;
  unsetenv("TANDEM_CUDA_WITHOUT");
  unsetenv("TANDEM_EMU_CAPABILITY");
  unsetenv("TANDEM_EMU_NAME");
  return 0;
}

TEST(kernels_that_are_left_out, NULL, use_all_kernels) {
  if (!library || !strstr(library, "_emu")) skip();
  setenv("TANDEM_EMU_CAPABILITY", "90", 1);
  check_without("", 1, 1);
  check_without("wide,latents", 0, 1);
  check_without("a8,prefill,chunks,wgmma", 1, 0);
  setenv("TANDEM_CUDA_WITHOUT", "wide,wgm", 1);
  expect_open("cuda", TD_EINVAL, "TANDEM_CUDA_WITHOUT: no kernels are called \"wgm\"");
}

// Of the emulated GPU, whether it adds up in F16.
static bool uses_f16(const char *name, const char *without) {
  setenv("TANDEM_EMU_NAME", name, 1);
  setenv("TANDEM_CUDA_WITHOUT", without, 1);
  CUDA_OPEN(f);
  const bool uses = ((td_cuda_dev *)f.dev)->uses.f16;
  cuda_close(&f);
  return uses;
}

TEST(sums_in_f16, NULL, use_all_kernels) {
  if (!library || !strstr(library, "_emu")) skip();
  setenv("TANDEM_EMU_CAPABILITY", "89", 1);
  assert_true(uses_f16("NVIDIA GeForce RTX 4090", ""));
  assert_false(uses_f16("NVIDIA GeForce RTX 4090", "f16"));
  assert_false(uses_f16("NVIDIA L40S", ""));
}

static void open_and_close(void *ctx) {
  (void)ctx;
  expect_open("cuda", TD_OK, "cuda");
}

// A GPU for which the library has PTX alone is said to take its time; others are not.
TEST(kernels_that_are_translated, NULL, use_all_kernels) {
  if (!library || !strstr(library, "_emu")) skip();
  char said[4096];
  setenv("TANDEM_EMU_CAPABILITY", "100", 1);
  log_of(said, sizeof said, open_and_close, NULL);
  assert_non_null(
      strstr(said, "emulated GPU: the kernels have no code for compute capability 10.0"));
  assert_non_null(strstr(said, "-DTD_CUDA_ARCHS=100"));
  setenv("TANDEM_EMU_CAPABILITY", "86", 1);
  log_of(said, sizeof said, open_and_close, NULL);
  assert_null(strstr(said, "translates"));
}

static void make_folders(char *path) {
  for (char *slash = strchr(path + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
    *slash = '\0';
    mkdir(path, 0700);
    *slash = '/';
  }
}

// cuBLAS is found in Python's packages beside a folder of PATH, and needs what lies beside it.
TEST(where_cublas_is) {
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

TEST(names_and_memory) {
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
TEST(pinned_memory) {
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
    td_dev_pin(f.dev, NULL, 0, false);
    assert_int_equal(td_cuda_pinned_bytes(dev), 0);
    td_dev_pin(f.dev, weights, BYTES, false);
    td_dev_wait_pinned(f.dev, weights, BYTES);
    assert_int_equal(td_cuda_pinned_bytes(dev), rounds[round].is_pinned ? BYTES : 0);
    int zeros = open("/dev/zero", O_RDONLY | O_CLOEXEC); // reads into what can be written to
    assert_int_equal(read(zeros, weights, 1), -1);
    assert_int_equal(errno, EFAULT);
    close(zeros);
    td_status st = TD_OK;
    td_err err;
    const void *device = td_cuda_on_device(dev, weights, BYTES, &st, &err);
    assert_int_equal(st, TD_OK);
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
  td_dev_pin(p.dev, p.weights, PIECE * N_PIECES, false);
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
TEST(memory_is_registered_in_pieces) {
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
  td_status st = TD_OK;
  const void *device;
  td_err err;
  const size_t sizes[] = {PIECE * N_PIECES, PIECE * (N_PIECES - 1), PIECE / 2};
  for (size_t i = 0; i < TD_COUNT(sizes); i++) {
    if (i == 1) { // again, with all of it registered
      open_gate(&p);
      td_dev_wait_pinned(p.dev, p.weights, PIECE * N_PIECES);
      assert_int_equal(td_cuda_pinned_bytes(dev), PIECE * N_PIECES);
    }
    device = td_cuda_on_device(dev, begin, sizes[i], &st, &err);
    assert_int_equal(st, TD_OK);
    assert_memory_equal(device, begin, sizes[i]); // the emulator's memory is the host's
  }
  td_dev_close(p.dev);
  munmap(p.weights, PIECE * N_PIECES);
}

// Closing waits for a piece at most, and leaves nothing registered, but where the process ends.
TEST(registering_stops) {
  if (!library || !strstr(library, "_emu")) skip();
  for (int is_last = 0; is_last < 2; is_last++) {
    pinning p = begin_pinning(is_last);
    let_pieces(&p, 1);
    open_gate(&p);
    td_dev_close(p.dev);
    td_err err;
    assert_int_equal(td_dev_open(&p.dev, &(td_dev_opts){.kind = "cuda"}, &err), TD_OK);
    td_cuda_dev *dev = (td_cuda_dev *)p.dev;
    td_dev_pin(p.dev, p.weights, PIECE, false);
    td_dev_wait_pinned(p.dev, p.weights, PIECE);
    assert_int_equal(td_cuda_pinned_bytes(dev), is_last ? 0 : PIECE);
    for (size_t i = 0; is_last && i < N_PIECES; i++)
      dev->abi->unpin((char *)p.weights + i * PIECE);
    td_dev_close(p.dev);
    munmap(p.weights, PIECE * N_PIECES);
  }
}

// Where the system lets the driver pin a part of the memory, what is asked for first is registered
// as far as that goes, nobody waits for the rest, and copies from all of it are right.
TEST(registering_has_a_limit) {
  if (!library || !strstr(library, "_emu")) skip();
  enum { LIMIT = N_PIECES / 2, LAST = N_PIECES - 1, RESERVE = 64 << 20 };
  char bytes[32];
  snprintf(bytes, sizeof bytes, "%d", LIMIT * PIECE + RESERVE);
  setenv("TANDEM_EMU_PIN_BYTES", bytes, 1);
  pinning p = begin_pinning(false);
  assert_true(is_pinning(&p, LAST));
  let_pieces(&p, 2);
  open_gate(&p);
  td_dev_wait_pinned(p.dev, p.weights, PIECE * N_PIECES);
  const td_cuda_pins *pins = &((td_cuda_dev *)p.dev)->pins;
  assert_in_range(td_cuda_pinned_bytes((td_cuda_dev *)p.dev), PIECE, LIMIT * PIECE);
  const size_t last = (size_t)((const char *)p.weights + LAST * PIECE - pins->grid) / PIECE;
  assert_int_equal(pins->pieces[last].state, CUDA_PIN_DONE);
  for (size_t i = 0; i < N_PIECES; i++)
    assert_false(is_pinning(&p, i));
  td_status st = TD_OK;
  td_err err;
  const void *device = td_cuda_on_device((td_cuda_dev *)p.dev, p.weights, PIECE * N_PIECES, &st,
                                         &err);
  assert_int_equal(st, TD_OK);
  assert_memory_equal(device, p.weights, PIECE * N_PIECES);
  void *buffer; // of an engine, which opens later
  assert_int_equal(td_dev_alloc_host(p.dev, &buffer, RESERVE / 2, &err), TD_OK);
  td_dev_free_host(p.dev, buffer);
  td_dev_close(p.dev);
  munmap(p.weights, PIECE * N_PIECES);
  unsetenv("TANDEM_EMU_PIN_BYTES");
}

// Where streaming does not pay, the rest need not be registered, and nobody waits for it.
TEST(registering_is_given_up) {
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
TEST(a_failure_is_told_once) {
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
TEST(a_broken_device) {
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

TEST(weights_that_do_not_fit) {
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
TEST(streams_wait_for_events) {
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

static void refuses(const td_cu_abi *abi, const char *why) {
  td_err err = {.msg = ""};
  assert_int_equal(td_cuda_abi_check(abi, "LIB", &err), TD_EUNSUPPORTED);
  if (!strstr(err.msg, why)) fail_msg("\"%s\" where \"%s\" belongs", err.msg, why);
}

// A library that lacks a function, or takes other arguments, is refused by the function's name.
TEST(library_of_another_build) {
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

// Memory that has grown is let go of when the step ends, not in its middle, unless there is no
// other.
TEST(scratch_that_grows) {
  CUDA_OPEN(f);
  td_cuda_stream *stream = (td_cuda_stream *)f.stream;
  td_status st = TD_OK;
  td_err err;
  for (size_t n = 1; n <= 2 * N_CUDA_RETIRED; n++) {
    td_op_fill_zero(f.stream, td_cuda_scratch(stream, CUDA_SCRATCH_PARTS, n * 4096, &st, &err),
                    n * 4096);
    if (n == 2) assert_int_equal(stream->n_retired, 1);
  }
  cuda_sync(&f);
  assert_int_equal(stream->n_retired, 0);
  // Other programs take of a real GPU's memory meanwhile.
  const size_t most = td_dev_free_vram_bytes(f.dev) / 4 * (is_emulated() ? 3 : 1);
  for (int i = 0; i < 2; i++) { // too much for both
    td_cuda_scratch(stream, CUDA_SCRATCH_PARTS, most / 5 * (4 - i), &st, &err);
    td_cuda_scratch(stream, CUDA_SCRATCH_ML, i * 4096, &st, &err);
  }
  td_cuda_scratch(stream, CUDA_SCRATCH_PARTS, most, &st, &err);
  assert_int_equal(st, TD_OK);
  assert_int_equal(stream->n_retired, 0);
  cuda_close(&f);
}

// Sixteen of them, zero, in host memory.
static _Atomic uint32_t *open_signals(td_dev *dev) {
  void *host;
  td_err err;
  assert_int_equal(td_dev_alloc_host(dev, &host, 64, &err), TD_OK);
  memset(host, 0, 64);
  return host;
}

// A signal that does not come ends the step with an error, whatever else it waits for.
TEST(a_signal_that_does_not_come) {
  CUDA_OPEN(f);
  td_cuda_dev *dev = (td_cuda_dev *)f.dev;
  td_err err;
  _Atomic uint32_t *signal = open_signals(f.dev);
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
  td_dev_free_host(f.dev, (void *)signal);
  cuda_close(&f);
}

// Copies that the device's processors make, from and to the host's memory, of any alignment.
TEST(direct_copies) {
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
TEST(events_that_are_not_done) {
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

TEST(an_await_that_is_canceled) {
  CUDA_OPEN(f);
  ((td_cuda_dev *)f.dev)->await_ns = UINT64_MAX;
  td_err err;
  _Atomic uint32_t *signal = open_signals(f.dev);
  const uint32_t one = 1, *value = cuda_put(&f, &one, sizeof one);
  td_op_await_or_cancel(f.stream, signal, value, signal + 2);
  td_op_await_or_cancel(f.stream, signal + 1, value, signal + 2);
  atomic_store(signal, 1);
  cuda_alloc(&f, 1);
  atomic_store(signal + 2, 1);
  assert_int_equal(td_stream_sync(f.stream, &err), TD_ECANCELED);
  td_dev_free_host(f.dev, (void *)signal);
  cuda_close(&f);
}

// The emulator's; NULL on a GPU.
static unsigned long (*launches)(bool in_share);
static unsigned (*share_sms)(void);

static void find_share_hooks(void) {
  void *opened = library ? dlopen(library, RTLD_NOW | RTLD_LOCAL) : NULL;
  if (!opened) return;
  *(void **)&launches = dlsym(opened, "emu_launches");
  *(void **)&share_sms = dlsym(opened, "emu_share_sms");
}

enum { CHAIN = 64, CHAIN_TURNS = 24, CHAIN_TOKENS = 80 }; // enough tokens for cuBLAS

// A chain of products and sums, each of which reads the last one's result: x = W x + x. The stream
// moves before some of them. Returns how many were queued while it was confined.
static unsigned run_chain(cuda_fixture *f, td_stream *stream, const td_weight *w, uint16_t *x,
                          uint16_t *y, unsigned moves) {
  unsigned n_confined = 0;
  bool is_confined = false;
  for (unsigned i = 0; i < CHAIN_TURNS; i++) {
    if (moves && ref_below(&f->rng, moves) == 0)
      is_confined = td_stream_confine(stream, !is_confined);
    td_op_linear(stream, &(td_linear_op_args){.w = w,
                                              .x = x,
                                              .y = y,
                                              .x_stride = CHAIN,
                                              .y_stride = CHAIN,
                                              .n_tokens = CHAIN_TOKENS,
                                              .n_prompt = CHAIN_TOKENS});
    td_op_add(stream, x, y, (size_t)CHAIN_TOKENS * CHAIN);
    n_confined += is_confined;
  }
  td_stream_confine(stream, false);
  return n_confined;
}

// Work of a stream that moves to a share of the SMs and back stays in order and has the same bits,
// products of cuBLAS included. In the share there is what is queued while the stream is confined,
// and nothing else; on a driver without shares, nothing.
static void check_share(const char *driver, bool has_share) {
  setenv("TANDEM_EMU_SMS", "16", 1);
  if (driver) setenv("TANDEM_EMU_GREEN", driver, 1);
  setenv("TANDEM_JITTER", "3", 1);
  CUDA_OPEN(f);
  td_err err;
  td_stream *stream;
  enum { N = CHAIN_TOKENS * CHAIN };
  ref_weight w = ref_make_weight(&f.rng, TD_BF16, CHAIN, CHAIN, 0, 0);
  float *start = cuda_floats(&f, N);
  uint16_t want[N], got[N], *y = cuda_alloc(&f, sizeof got);
  assert_int_equal(td_stream_open_confinable(&stream, f.dev, &err), TD_OK);
  if (share_sms) assert_int_equal(share_sms(), has_share ? 12 : 0);
  for (unsigned moves = 0; moves < 4; moves++) {
    uint16_t *x = cuda_put_bf16(&f, start, N);
    const unsigned long before[] = {launches ? launches(false) : 0, launches ? launches(true) : 0};
    const unsigned n_confined = run_chain(&f, stream, &w.w, x, y, moves);
    assert_int_equal(td_stream_sync(stream, &err), TD_OK);
    if (launches) {
      assert_int_equal(launches(true) - before[1], 2 * n_confined);
      assert_int_equal(launches(false) - before[0], 2 * (CHAIN_TURNS - n_confined));
      assert_int_equal(n_confined > 0, has_share && moves > 0);
    }
    cuda_get(&f, got, x, sizeof got);
    if (!moves) memcpy(want, got, sizeof want);
    assert_memory_equal(got, want, sizeof want);
  }
  td_stream_close(stream);
  free(start);
  ref_free_weight(&w);
  cuda_close(&f);
  if (share_sms) assert_int_equal(share_sms(), 0);
}

static int unset_share(void **state) {
  (void)state;
  unsetenv("TANDEM_EMU_SMS");
  unsetenv("TANDEM_EMU_GREEN");
  unsetenv("TANDEM_JITTER");
  return 0;
}

// Whether a stream's kernel ends within ms while another stream's spins and more work waits behind
// that.
static bool passes_a_spin(int ms) {
  CUDA_OPEN(f);
  ((td_cuda_dev *)f.dev)->await_ns = UINT64_MAX;
  td_err err;
  td_stream *other;
  td_event *done;
  assert_int_equal(td_stream_open(&other, f.dev, &err), TD_OK);
  assert_int_equal(td_event_open(&done, f.dev, &err), TD_OK);
  _Atomic uint32_t *signal = open_signals(f.dev);
  const uint32_t one = 1, *value = cuda_put(&f, &one, sizeof one);
  td_op_await(f.stream, signal, value);
  td_op_signal(f.stream, signal + 1, value); // waits for the kernel before it
  td_op_signal(other, signal + 2, value);
  td_event_record(done, other);
  for (int i = 0; i < ms && !td_event_is_done(done); i++)
    usleep(1000);
  const bool passed = td_event_is_done(done);
  atomic_store(signal, 1);
  cuda_sync(&f);
  td_event_sync(done);
  td_event_close(done);
  td_stream_close(other);
  td_dev_free_host(f.dev, (void *)signal);
  cuda_close(&f);
  return passed;
}

// Work behind a spin holds up the other streams of its hardware queue, so there must be enough
// queues. The last part shows that the emulator would notice.
TEST(streams_pass_a_spin) {
  assert_true(passes_a_spin(20000)); // a busy machine may take long
  assert_string_equal(getenv("CUDA_MODULE_LOADING"), "EAGER");
  assert_string_equal(getenv("CUDA_DEVICE_MAX_CONNECTIONS"), "32");
  if (!launches) return; // a GPU's driver has read it once
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1", 1);
  assert_false(passes_a_spin(100));
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
}

TEST(a_share_of_the_gpu, NULL, unset_share) {
  check_share(NULL, true);
}

TEST(drivers_without_shares, NULL, unset_share) {
  if (!launches) skip(); // a GPU's driver is what it is
  check_share("0", false);
  check_share("1", false);
}

int before_all(void **state) {
  (void)state;
  const char *given = getenv("TANDEM_CUDA_LIB");
  library = given ? strdup(given) : NULL;
  find_share_hooks();
  return 0;
}

int after_all(void **state) {
  (void)state;
  free(library);
  return 0;
}
