// tests/unit/test_cuda_devices.c - two CUDA devices in one process, and copies that queue after
// others as a GPU's copy engines make them.
// CTest: slow no-asan

#include <dlfcn.h>
#include <pthread.h>
#include <sys/mman.h>

#include "cuda_emu/hooks.h"
#include "model/checkpoint/resident.h"
#include "runtime/devices.h"
#include "unit/cuda_test.h"
#include "unit/engine_test.h"
#include "unit/kv_transfer_test.h"

enum { N = 1000 };

static void (*hold_copies)(int device, bool to_host); // NULL: a GPU's library, or none
static void (*release_copies)(int device, bool to_host);
static td_cuda_abi_fn abi_of_library;

static void open_emulator(void) {
  const char *path = getenv("TANDEM_CUDA_LIB");
  void *library = path ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;
  if (!library) return;
  *(void **)&hold_copies = dlsym(library, "emu_hold_copies");
  *(void **)&release_copies = dlsym(library, "emu_release_copies");
  *(void **)&abi_of_library = dlsym(library, TD_CUDA_ABI_SYMBOL);
  if (hold_copies) setenv("TANDEM_EMU_DEVICES", "2", 1);
}

// Skips the test where there is none of that index.
static cuda_fixture open_device(unsigned index) {
  cuda_fixture f = {.rng = 1};
  td_err err;
  if (td_dev_open(&f.dev, &(td_dev_opts){.kind = "cuda", .index = index}, &err) != TD_OK) {
    if (hold_copies) fail_msg("%s", err.msg);
    print_message("skipped: %s\n", err.msg);
    skip();
  }
  assert_int_equal(td_stream_open(&f.stream, f.dev, &err), TD_OK);
  return f;
}

typedef struct {
  cuda_fixture dev[2];
} two_devices;

static two_devices open_two(void) {
  const two_devices two = {.dev = {open_device(0), open_device(1)}};
  return two;
}

static void close_two(two_devices *two) {
  cuda_close(&two->dev[1]);
  cuda_close(&two->dev[0]);
}

static uint16_t *put_ones(cuda_fixture *f) {
  float one[N];
  for (int i = 0; i < N; i++)
    one[i] = 1;
  return cuda_put_bf16(f, one, N);
}

static uint16_t *alloc_host(cuda_fixture *f) {
  void *out;
  td_err err;
  if (td_dev_alloc_host(f->dev, &out, N * sizeof(uint16_t), &err) != TD_OK) fail_msg("%s", err.msg);
  memset(out, 0, N * sizeof(uint16_t));
  return out;
}

static void assert_all(cuda_fixture *f, const uint16_t *x, float want) {
  float *got = cuda_get_bf16(f, x, N);
  for (int i = 0; i < N; i++)
    assert_true(got[i] == want);
  free(got);
}

static void assert_stream_fails(cuda_fixture *f, const char *part) {
  td_err err;
  assert_int_not_equal(td_stream_sync(f->stream, &err), TD_OK);
  if (!strstr(err.msg, part)) fail_msg("'%s' does not speak of '%s'", err.msg, part);
}

TEST(devices_by_index) {
  two_devices two = open_two();
  assert_non_null(strstr(td_dev_name(two.dev[1].dev), "cuda 1"));
  const size_t n_free[] = {td_dev_free_vram_bytes(two.dev[0].dev),
                           td_dev_free_vram_bytes(two.dev[1].dev)};
  cuda_alloc(&two.dev[1], 64 << 20);
  assert_int_equal(td_dev_free_vram_bytes(two.dev[0].dev), n_free[0]);
  assert_true(td_dev_free_vram_bytes(two.dev[1].dev) + (64 << 20) <= n_free[1]);
  close_two(&two);
  td_dev *none;
  td_err err;
  const td_dev_opts absent = {.kind = "cuda", .index = 99};
  assert_int_equal(td_dev_open(&none, &absent, &err), TD_EUNSUPPORTED);
  assert_null(none);
  assert_non_null(strstr(err.msg, "there is no GPU 99"));
}

// x grows by one on either device in turn, and goes to and fro through host memory.
TEST(devices_hand_over) {
  enum { ROUNDS = 20 };
  two_devices two = open_two();
  uint16_t *ones[2], *x[2], *host[2];
  td_event *handed[2];
  td_err err;
  for (int d = 0; d < 2; d++) {
    ones[d] = put_ones(&two.dev[d]);
    x[d] = put_ones(&two.dev[d]);
    host[d] = alloc_host(&two.dev[d]);
    assert_int_equal(td_event_open(&handed[d], two.dev[d].dev, &err), TD_OK);
  }
  // Whoever waits for the other device's event is not held up itself.
  if (hold_copies) hold_copies(0, true);
  for (int i = 0; i < 2 * ROUNDS; i++) {
    const int d = i % 2;
    td_stream *stream = two.dev[d].stream;
    td_stream_wait(stream, handed[!d]); // never recorded at first: done
    if (i > 0) td_op_copy(stream, x[d], host[!d], N * sizeof **x);
    td_op_add(stream, x[d], ones[d], N);
    td_op_copy(stream, host[d], x[d], N * sizeof **x);
    td_event_record(handed[d], stream);
  }
  if (hold_copies) {
    assert_int_equal(host[0][0], 0);
    release_copies(0, true);
  }
  assert_all(&two.dev[1], x[1], 1 + 2 * ROUNDS);
  assert_all(&two.dev[0], x[0], 2 * ROUNDS);
  for (int d = 0; d < 2; d++) {
    td_event_close(handed[d]);
    td_dev_free_host(two.dev[d].dev, host[d]);
  }
  close_two(&two);
}

TEST(memory_of_another_device) {
  if (!hold_copies) skip();
  two_devices two = open_two();
  uint16_t *here = put_ones(&two.dev[0]), *there = put_ones(&two.dev[1]);
  td_op_copy(two.dev[0].stream, here, there, N * sizeof *here);
  assert_stream_fails(&two.dev[0], "invalid argument");
  td_op_add(two.dev[1].stream, there, here, N);
  assert_stream_fails(&two.dev[1], "illegal memory access");
  close_two(&two);
}

// What CUDA refuses where the calling thread's device is another, and what not.
// Memory that one device has registered in pieces: another one's copies are cut where these end,
// too, and wait for none that is not registered.
TEST(pins_of_another_device) {
  if (!hold_copies) skip();
  enum { PIECE = 8192, N_PIECES = 4, N_BYTES = N_PIECES * PIECE };
  two_devices two = open_two();
  setenv("TANDEM_EMU_PIN", "2", 1);
  char *memory = mmap(NULL, N_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  assert_true(memory != MAP_FAILED);
  for (size_t i = 0; i < N_BYTES; i++)
    memory[i] = (char)(i >> 5);
  td_dev *first = two.dev[0].dev, *second = two.dev[1].dev;
  ((td_cuda_dev *)first)->pins.piece_bytes = PIECE;
  td_dev_follow_pins(second, first);
  td_dev_pin(first, memory, N_BYTES, false);
  td_dev_wait_pinned(second, memory, N_BYTES);
  assert_false(td_dev_is_pinning(second, memory, N_BYTES));
  char got[N_BYTES], *copy = cuda_alloc(&two.dev[1], N_BYTES);
  td_op_copy(two.dev[1].stream, copy, memory + 10, N_BYTES - 10);
  cuda_get(&two.dev[1], got, copy, N_BYTES - 10);
  assert_memory_equal(got, memory + 10, N_BYTES - 10);
  close_two(&two);
  munmap(memory, N_BYTES);
  unsetenv("TANDEM_EMU_PIN");
}

enum { MESSAGE_BYTES = 4096, MESSAGE_ROUNDS = 6 };

// a posts to b's inbox, which sends it on to a's; sizes with and without runs of 16 bytes. Round r
// is signal value r + 1.
static void send_round(cuda_fixture dev[2], const td_inbox inbox[2], uint32_t r) {
  static const size_t sizes[] = {MESSAGE_BYTES - 64, 17, 0};
  const size_t n = sizes[r % TD_COUNT(sizes)];
  unsigned char sent[MESSAGE_BYTES], got[MESSAGE_BYTES];
  for (size_t i = 0; i < n; i++)
    sent[i] = (unsigned char)(i * 7 + r);
  const uint32_t value = r + 1;
  const void *from = cuda_put(&dev[0], sent, n + 1), *values[2];
  _Atomic uint32_t *signals[2];
  for (int i = 0; i < 2; i++) {
    values[i] = cuda_put(&dev[i], &value, sizeof value);
    signals[i] = (_Atomic uint32_t *)((char *)inbox[i].memory + MESSAGE_BYTES - 64);
  }
  td_op_await(dev[1].stream, signals[1], values[1]); // both queued before what they wait for
  td_op_post(dev[1].stream,
             &(td_post_args){inbox[0].memory, inbox[1].memory, n, signals[0], values[1]});
  td_op_post(dev[0].stream, &(td_post_args){inbox[1].memory, from, n, signals[1], values[0]});
  td_op_await(dev[0].stream, signals[0], values[0]);
  td_op_copy(dev[0].stream, got, inbox[0].memory, n);
  cuda_sync(&dev[0]);
  cuda_sync(&dev[1]);
  assert_memory_equal(got, sent, n);
}

// Through each other's memory and through the host's. On a machine with one GPU, it is both.
TEST(messages) {
  cuda_fixture dev[2] = {open_device(0)};
  td_err err;
  td_dev *second;
  unsigned index = 1;
  if (td_dev_open(&second, &(td_dev_opts){.kind = "cuda", .index = 1}, &err) != TD_OK) index = 0;
  if (index == 1) td_dev_close(second);
  dev[1] = open_device(index);
  for (int by_memory = 0; by_memory < 2; by_memory++) {
    if (hold_copies) setenv("TANDEM_EMU_PEER", by_memory ? "1" : "0", 1);
    td_inbox inbox[2];
    for (int i = 0; i < 2; i++) {
      assert_int_equal(td_inbox_open(&inbox[i], dev[i].dev, dev[!i].dev, MESSAGE_BYTES, &err),
                       TD_OK);
      if (hold_copies) assert_true(inbox[i].is_host == !by_memory);
    }
    for (uint32_t r = 0; r < MESSAGE_ROUNDS; r++)
      send_round(dev, inbox, r);
    for (int i = 0; i < 2; i++)
      td_inbox_close(&inbox[i], dev[i].dev);
  }
  unsetenv("TANDEM_EMU_PEER");
  cuda_close(&dev[1]);
  cuda_close(&dev[0]);
}

TEST(the_current_device) {
  two_devices two = open_two();
  if (!abi_of_library) skip();
  const td_cu_abi *abi = abi_of_library();
  uint16_t *x = put_ones(&two.dev[1]), *host = alloc_host(&two.dev[1]);
  td_cu_stream stream = ((td_cuda_stream *)two.dev[1].stream)->cu;
  td_cu_event event;
  const td_add_args args = {.x = x, .y = x, .n = N};
  assert_int_equal(abi->use(0), 0);
  assert_int_not_equal(abi->add(&args, stream), 0);
  assert_int_equal(abi->copy(host, x, N * sizeof *x, stream), 0);
  assert_int_equal(abi->event_open(&event), 0);
  assert_int_not_equal(abi->event_record(event, stream), 0);
  assert_int_equal(abi->event_record(event, ((td_cuda_stream *)two.dev[0].stream)->cu), 0);
  assert_int_equal(abi->stream_wait(stream, event), 0);
  assert_int_equal(abi->event_sync(event), 0);
  assert_int_equal(abi->event_close(event), 0);
  assert_int_equal(abi->use(1), 0);
  assert_int_equal(abi->add(&args, stream), 0);
  assert_int_not_equal(abi->use(99), 0);
  assert_all(&two.dev[1], x, 2);
  td_dev_free_host(two.dev[1].dev, host);
  close_two(&two);
}

// A copy in one direction waits for others of its device, whatever their streams, and for no
// others.
TEST(copies_of_one_direction) {
  if (!hold_copies) skip();
  two_devices two = open_two();
  uint16_t *x = put_ones(&two.dev[0]), *y = put_ones(&two.dev[0]), *far = put_ones(&two.dev[1]);
  uint16_t *zeros = alloc_host(&two.dev[0]), *got = alloc_host(&two.dev[0]);
  td_stream *other;
  td_err err;
  assert_int_equal(td_stream_open(&other, two.dev[0].dev, &err), TD_OK);
  hold_copies(0, false);
  td_op_copy(two.dev[0].stream, x, zeros, N * sizeof *x);
  td_op_copy(other, got, y, N * sizeof *y);
  assert_int_equal(td_stream_sync(other, &err), TD_OK);
  td_op_copy(two.dev[1].stream, far, zeros, N * sizeof *far);
  td_op_copy(other, y, zeros, N * sizeof *y);
  assert_all(&two.dev[1], far, 0);
  assert_int_equal(ref_bf16(got[N - 1]), 1);
  assert_int_equal(ref_bf16(y[N - 1]), 1); // the emulator's memory can be looked at
  release_copies(0, false);
  assert_all(&two.dev[0], x, 0);
  assert_int_equal(td_stream_sync(other, &err), TD_OK);
  assert_all(&two.dev[0], y, 0);
  td_stream_close(other);
  td_dev_free_host(two.dev[0].dev, zeros);
  td_dev_free_host(two.dev[0].dev, got);
  close_two(&two);
}

// The caller has copied from pageable memory when it goes on.
TEST(copies_of_pageable_memory) {
  if (!hold_copies) skip();
  enum { BYTES = 16 << 20 };
  setenv("TANDEM_JITTER", "2", 1);
  cuda_fixture f = open_device(0);
  char *host = malloc(BYTES), *device = cuda_alloc(&f, BYTES);
  for (int round = 1; round < 4; round++) {
    memset(host, round, BYTES);
    td_op_fill_zero(f.stream, device, BYTES);
    td_op_copy(f.stream, device, host, BYTES);
    assert_memory_equal(device, host, BYTES);
  }
  // What is registered in part only is refused.
  const td_cu_abi *abi = abi_of_library();
  assert_int_equal(abi->pin(host, BYTES / 2, false), 0);
  td_op_copy(f.stream, device, host, BYTES / 2);
  cuda_sync(&f);
  td_op_copy(f.stream, device, host + 1, BYTES / 2);
  assert_stream_fails(&f, "invalid argument");
  assert_int_equal(abi->unpin(host), 0);
  cuda_close(&f);
  free(host);
  unsetenv("TANDEM_JITTER");
}

typedef struct {
  td_dev *dev;
  float *logits;
  size_t n_vocab;
} engine_run;

static void *run_engine(void *arg) {
  engine_run *run = arg;
  run->logits = engine_logits(&small_models[0], run->dev, TOGETHER, false, &run->n_vocab);
  return NULL;
}

TEST(an_engine_on_either_device) {
  two_devices two = open_two();
  engine_run runs[2];
  pthread_t threads[2];
  for (int d = 0; d < 2; d++) {
    runs[d] = (engine_run){.dev = two.dev[d].dev};
    assert_int_equal(pthread_create(&threads[d], NULL, run_engine, &runs[d]), 0);
  }
  for (int d = 0; d < 2; d++)
    pthread_join(threads[d], NULL);
  assert_memory_equal(runs[0].logits, runs[1].logits,
                      ENGINE_ROWS * runs[0].n_vocab * sizeof(float));
  free(runs[0].logits);
  free(runs[1].logits);
  close_two(&two);
}

static void check_states_transfer(checkpoint *ck, size_t ring_bytes) {
  ck_write(ck);
  const small_model m = {ck->dir, ring_bytes};
  check_xfer(&m, "cuda", false);
  ck_free(ck);
}

// Prefill on one GPU, decode on the other, over pages in host memory.
TEST(kv_transfer) {
  two_devices two = open_two(); // or the test is skipped
  close_two(&two);
  for (size_t i = 0; i < N_SMALL_MODELS; i++) {
    setenv("TANDEM_JITTER", i ? "3" : "0", 1);
    check_xfer(&small_models[i], "cuda", i == 1);
  }
  checkpoint ck;
  if (!IS_TSAN) {
    check_f8_xfer("cuda");
    ck_qwen3_next(&ck);
    check_states_transfer(&ck, NEXT_RING);
  }
  ck_gpt_oss(&ck);
  check_states_transfer(&ck, PAIRED_RING);
  unsetenv("TANDEM_JITTER");
}

// Of memory that the driver can pin only a part of, experts that stream come first. What is there
// already when they are named is at most a piece.
TEST(what_streams_is_registered_first) {
  if (!hold_copies) skip();
  enum { PIECE = 8192 };
  char gate[] = "/tmp/tandem-gate-XXXXXX";
  const int fd = mkstemp(gate);
  assert_true(fd >= 0);
  close(fd);
  setenv("TANDEM_EMU_PIN_GATE", gate, 1);
  cuda_fixture f = open_device(0);
  td_model *model;
  td_store *store;
  td_resident_stats stats;
  td_err err;
  int weights;
  const td_resident_opts opts = {.n_threads = 1, .for_device = true};
  assert_int_equal(td_store_open(&store, golden_dir("qwen3_moe"), &err), TD_OK);
  assert_int_equal(td_resident_load(&weights, &stats, store, &opts, &err), TD_OK);
  td_store_close(store);
  assert_int_equal(td_model_open_weights(&model, golden_dir("qwen3_moe"), weights, &err), TD_OK);
  td_cuda_pins *pins = &((td_cuda_dev *)f.dev)->pins;
  pins->piece_bytes = PIECE;
  const uint32_t n_experts = td_model_config_of(model)->n_experts;
  td_devices_use_memory(&(td_devices){.dev = f.dev, .stream_bytes = 1, .n_gpu_expert_layers = 1},
                        model, NULL);
  for (uint32_t i = 0; i < 2; i++) {
    const td_layer *layer = td_model_layer(model, i);
    for (uint32_t k = 0; k < n_experts; k++) {
      const td_weight *w = &layer->down[k]; // longer than a piece, of which it may share two
      const size_t first = (size_t)((const char *)w->data - pins->grid) / PIECE;
      assert_true(td_weight_data_bytes(w) > 0);
      if (i == 1) assert_true(pins->pieces[first].is_wanted);
      if (i == 0 && k == 0) assert_false(pins->pieces[first].is_wanted);
    }
  }
  unlink(gate);
  unsetenv("TANDEM_EMU_PIN_GATE");
  td_stream_close(f.stream);
  td_dev_close(f.dev);
  td_model_close(model);
  close(weights);
}
int before_all(void **state) {
  (void)state;
  open_emulator();
  return 0;
}
