// src/bench/gpu/bus.c - benchmarks the connection between host memory and GPU: copies from and to
// pinned memory, the cost of pinning, and the latency of signals between a stream and a thread.
#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/stats.h"
#include "base/units.h"
#include "bench/gpu/paths.h"
#include "bench/report.h"

#define KB(n) ((size_t)(n) << 10)
#define MB(n) ((size_t)(n) << 20)

enum { RUNS = 9, PART_BYTES = 4 << 20 };

static void begin(td_gpu_bench *b, const char *path, const char *what) {
  td_jw_add(b->json, "{'path': %s, 'case': %s", path, what);
}

static void end(td_gpu_bench *b) {
  td_jw_end_object(b->json);
  td_gpu_write(b);
}

// ---- copies -------------------------------------------------------------------------------------

// Pinned host memory and GPU memory, slightly larger than the largest copy.
typedef struct {
  char *host, *device;
  size_t n_bytes;
  td_gpu_kept *before; // device
} buffers;

static buffers open_buffers(td_gpu_bench *b) {
  td_err err;
  buffers m = {.n_bytes = MB(512) / b->shrink, .before = b->kept};
  void *host;
  td_gpu_must(td_dev_alloc_host(b->dev, &host, m.n_bytes + 64, &err), &err);
  memset(host, 1, m.n_bytes + 64);
  m.host = host;
  m.device = td_gpu_alloc(b, m.n_bytes);
  return m;
}

static void close_buffers(td_gpu_bench *b, const buffers *m) {
  td_gpu_release(b, m->before);
  td_dev_free_host(b->dev, m->host);
}

double td_gpu_pinned_gbps(td_gpu_bench *b) {
  buffers m = open_buffers(b);
  const td_gpu_copy up = {m.device, m.host, m.n_bytes};
  const double gbps = (double)m.n_bytes * 1e-9 / td_gpu_measure_copy(b, td_gpu_copy_once, &up);
  close_buffers(b, &m);
  return gbps;
}

static void copy_case(td_gpu_bench *b, const buffers *m, size_t n_bytes, bool is_up,
                      size_t offset) {
  char *host = m->host + offset;
  const td_gpu_copy a = is_up ? (td_gpu_copy){m->device, host, n_bytes}
                              : (td_gpu_copy){host, m->device, n_bytes};
  const double seconds = td_gpu_measure_copy(b, td_gpu_copy_once, &a);
  begin(b, "copies", is_up ? "host to device" : "device to host");
  td_jw_add(b->json,
            "'bytes': %lu, 'host_offset': %lu, 'us': %g, 'gbps': %g, "
            "'share_of_pinned_bandwidth': %g",
            n_bytes, offset, seconds * 1e6, (double)n_bytes / seconds * 1e-9,
            (double)n_bytes / seconds * 1e-9 / b->pinned_gbps);
  end(b);
}

// Seconds until a small copy is done that is enqueued on one stream right after a large copy on
// another. The large copy is split into parts of part_bytes; 0: no large copy.
static double beside(td_gpu_bench *b, const buffers *m, td_stream *other, size_t part_bytes,
                     const td_gpu_copy *small, bool large_is_up) {
  double seconds[RUNS];
  const size_t large = m->n_bytes / 2; // the small copy uses the other half
  for (int i = 0; i < RUNS; i++) {
    for (size_t at = 0; part_bytes && at < large; at += part_bytes) {
      char *host = m->host + at, *device = m->device + at;
      const size_t n = large - at < part_bytes ? large - at : part_bytes;
      td_op_copy(other, large_is_up ? device : host, large_is_up ? host : device, n);
    }
    const double start = td_clock_s();
    td_gpu_copy_once(b, small, 0);
    td_gpu_sync(b);
    seconds[i] = td_clock_s() - start;
    td_err err;
    td_gpu_must(td_stream_sync(other, &err), &err);
  }
  return td_median(seconds, RUNS);
}

static void beside_cases(td_gpu_bench *b, const buffers *m) {
  static const struct {
    const char *name;
    bool small_is_up, large_is_up, has_large, is_cut;
  } cases[] = {
      {"small up, alone", true, true, false, false},
      {"small down, alone", false, true, false, false},
      {"small up, large up", true, true, true, false},
      {"small up, large up in parts of 4 MB", true, true, true, true},
      {"small down, large up", false, true, true, false},
      {"small up, large down", true, false, true, false},
  };
  td_err err;
  td_stream *other;
  td_gpu_must(td_stream_open(&other, b->dev, &err), &err);
  char *host = m->host + m->n_bytes / 2, *device = m->device + m->n_bytes / 2;
  const size_t n = KB(51) < m->n_bytes / 2 ? KB(51) : m->n_bytes / 2;
  for (size_t i = 0; i < TD_COUNT(cases); i++) {
    const td_gpu_copy small = cases[i].small_is_up ? (td_gpu_copy){device, host, n}
                                                   : (td_gpu_copy){host, device, n};
    const size_t part = !cases[i].has_large ? 0 : cases[i].is_cut ? PART_BYTES : m->n_bytes / 2;
    const double seconds = beside(b, m, other, part, &small, cases[i].large_is_up);
    begin(b, "copies", cases[i].name);
    td_jw_add(b->json, "'bytes': %lu, 'large_bytes': %ld, 'us': %g", n,
              cases[i].has_large ? (int64_t)(m->n_bytes / 2) : 0, seconds * 1e6);
    end(b);
  }
  td_stream_close(other);
}

void td_gpu_path_copies(td_gpu_bench *b) {
  static const size_t sizes[] = {KB(4), KB(51), KB(256), MB(1), MB(4), MB(16), MB(128), MB(512)};
  buffers m = open_buffers(b);
  for (size_t i = 0; i < TD_COUNT(sizes) && sizes[i] <= m.n_bytes; i++) {
    for (int is_up = 1; is_up >= 0; is_up--) {
      copy_case(b, &m, sizes[i], is_up, 0);
      copy_case(b, &m, sizes[i], is_up, 8);
    }
  }
  beside_cases(b, &m);
  close_buffers(b, &m);
}

// ---- pinning ------------------------------------------------------------------------------------

typedef struct {
  const char *name;
  bool is_shared, is_large, is_reserved;
} memory_kind;

// Bytes of the mapping that are in 2 MB pages, as reported by the kernel.
static int64_t huge_bytes(const void *memory) {
  FILE *f = fopen("/proc/self/smaps", "r");
  char line[512], start[32];
  int64_t kb = 0, n;
  bool is_here = false;
  snprintf(start, sizeof start, "%lx-", (unsigned long)(uintptr_t)memory);
  while (f && fgets(line, sizeof line, f)) {
    unsigned long from, to;
    if (sscanf(line, "%lx-%lx ", &from, &to) == 2)
      is_here = strncmp(line, start, strlen(start)) == 0;
    if (!is_here) continue;
    if (sscanf(line, "AnonHugePages: %ld", &n) == 1 ||
        sscanf(line, "ShmemPmdMapped: %ld", &n) == 1 ||
        sscanf(line, "Private_Hugetlb: %ld", &n) == 1)
      kb += n;
  }
  if (f) fclose(f);
  return kb << 10;
}

static void *map_memory(const memory_kind *k, size_t n_bytes) {
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | (k->is_reserved ? MAP_HUGETLB : 0), fd = -1;
  if (k->is_shared) {
    fd = memfd_create("bench", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)n_bytes) != 0) return MAP_FAILED;
    flags = MAP_SHARED;
  }
  void *memory = mmap(NULL, n_bytes, PROT_READ | PROT_WRITE, flags, fd, 0);
  if (fd >= 0) close(fd);
  if (memory != MAP_FAILED && !k->is_reserved)
    madvise(memory, n_bytes, k->is_large ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
  return memory;
}

// Pins memory in parts of part_bytes. Returns seconds; a negative number is an error code.
static double pin(td_gpu_bench *b, char *memory, size_t n_bytes, size_t part_bytes, bool is_pin) {
  const td_cu_abi *abi = ((td_cuda_dev *)b->dev)->abi;
  const double start = td_clock_s();
  for (size_t at = 0; at < n_bytes; at += part_bytes) {
    const size_t n = n_bytes - at < part_bytes ? n_bytes - at : part_bytes;
    const int code = is_pin ? abi->pin(memory + at, n, false) : abi->unpin(memory + at);
    if (code) return -code;
  }
  return td_clock_s() - start;
}

static void pin_case(td_gpu_bench *b, char *memory, size_t n_bytes, size_t part_bytes,
                     const char *prefix) {
  char key[64];
  const double seconds = pin(b, memory, n_bytes, part_bytes, true);
  snprintf(key, sizeof key, "%s_register_s", prefix);
  if (seconds < 0) {
    td_jw_str(b->json, key, ((td_cuda_dev *)b->dev)->abi->error_text((int)-seconds));
    return;
  }
  td_jw_double(b->json, key, seconds);
  snprintf(key, sizeof key, "%s_copy_gbps", prefix);
  const size_t n = part_bytes < MB(256) ? part_bytes : MB(256); // a copy must not span two parts
  td_gpu_kept *const before = b->kept;
  const td_gpu_copy up = {td_gpu_alloc(b, n), memory, n};
  td_jw_double(b->json, key, (double)n * 1e-9 / td_gpu_measure_copy(b, td_gpu_copy_once, &up));
  td_gpu_release(b, before);
  snprintf(key, sizeof key, "%s_unregister_s", prefix);
  td_jw_double(b->json, key, pin(b, memory, n_bytes, part_bytes, false));
}

static void register_case(td_gpu_bench *b, const memory_kind *k, size_t n_bytes) {
  begin(b, "register", k->name);
  td_jw_int(b->json, "bytes", (int64_t)n_bytes);
  const double start = td_clock_s();
  char *memory = map_memory(k, n_bytes);
  if (memory == MAP_FAILED) {
    td_jw_str(b->json, "unavailable", "the kernel has no such memory to give");
    end(b);
    return;
  }
  memset(memory, 1, n_bytes);
  td_jw_double(b->json, "fill_s", td_clock_s() - start);
  td_jw_int(b->json, "huge_bytes", huge_bytes(memory));
  pin_case(b, memory, n_bytes, n_bytes, "whole");
  pin_case(b, memory, n_bytes, TD_GIB / b->shrink, "parts_of_1_gib");
  munmap(memory, n_bytes);
  end(b);
}

void td_gpu_path_register(td_gpu_bench *b) {
  static const memory_kind kinds[] = {
      {"shared, 4 KiB pages", true, false, false},
      {"shared, 2 MB pages where allowed", true, true, false},
      {"anonymous, 4 KiB pages", false, false, false},
      {"anonymous, 2 MB pages", false, true, false},
      {"reserved 2 MB pages", false, true, true},
  };
  for (size_t i = 0; i < TD_COUNT(kinds); i++)
    register_case(b, &kinds[i], 8 * TD_GIB / b->shrink);
}

// ---- signals ------------------------------------------------------------------------------------

enum {
  MAX_ROUNDS = 200,
  TOKEN_BYTES = 14400
}; // one V3 token: hidden state, expert ids and
   // weights

typedef struct {
  _Alignas(64) _Atomic uint32_t value;
} signal_word;

// A thread and a stream that wait for each other, n_rounds times per run.
typedef struct {
  td_gpu_bench *b;
  signal_word *ping, *pong; // written by the stream; by the thread
  uint32_t *values;         // device memory with the values 0 to MAX_ROUNDS
  char *host, *device;      // TOKEN_BYTES each
  bool has_copies;
  uint32_t n_rounds;
  _Atomic uint32_t n_runs, n_done; // runs requested and completed; UINT32_MAX: stop
} table_tennis;

static void *answer(void *arg) {
  table_tennis *t = arg;
  for (uint32_t run = 1;; run++) {
    uint32_t asked;
    while ((asked = atomic_load(&t->n_runs)) < run)
      sched_yield();
    if (asked == UINT32_MAX) return NULL;
    for (uint32_t i = 1; i <= t->n_rounds; i++) {
      while (atomic_load_explicit(&t->ping->value, memory_order_acquire) != i)
        if (t->b->shrink > 1) sched_yield();
      atomic_store_explicit(&t->pong->value, i, memory_order_release);
    }
    atomic_store(&t->n_done, run);
  }
}

static void queue_by_kernels(void *ctx) {
  table_tennis *t = ctx;
  td_stream *stream = t->b->stream;
  for (uint32_t i = 1; i <= t->n_rounds; i++) {
    if (t->has_copies) td_op_copy(stream, t->host, t->device, TOKEN_BYTES);
    td_op_signal(stream, &t->ping->value, t->values + i);
    td_op_await(stream, &t->pong->value, t->values + i);
    if (t->has_copies) td_op_copy(stream, t->device, t->host, TOKEN_BYTES);
  }
}

// The driver's stream memory operations, which occupy no SM while waiting. Types as in cuda.h.
typedef int (*stream_value_fn)(void *stream, unsigned long long at, uint32_t value, unsigned flags);

typedef struct {
  stream_value_fn write, wait;
} value_calls;

static value_calls find_value_calls(void) {
  void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  union {
    void *symbol;
    stream_value_fn fn;
  } write = {NULL}, wait = {NULL};
  if (library) write.symbol = dlsym(library, "cuStreamWriteValue32_v2");
  if (library) wait.symbol = dlsym(library, "cuStreamWaitValue32_v2");
  return (value_calls){write.fn, wait.fn};
}

static int queue_by_values(const table_tennis *t, const value_calls *calls) {
  enum { EQUAL = 1 }; // CU_STREAM_WAIT_VALUE_EQ
  void *stream = ((td_cuda_stream *)t->b->stream)->cu;
  for (uint32_t i = 1; i <= t->n_rounds; i++) {
    if (t->has_copies) td_op_copy(t->b->stream, t->host, t->device, TOKEN_BYTES);
    int code = calls->write(stream, (uintptr_t)&t->ping->value, i, 0);
    if (!code) code = calls->wait(stream, (uintptr_t)&t->pong->value, i, EQUAL);
    if (code && i > 1) {
      fprintf(stderr, "bench_gpu: the driver takes some waits for a value, and not all\n");
      exit(1); // the stream would wait forever
    }
    if (code) return code;
    if (t->has_copies) td_op_copy(t->b->stream, t->device, t->host, TOKEN_BYTES);
  }
  return 0;
}

// Seconds per round; negative: an error code of the driver.
static double play(table_tennis *t, const value_calls *calls, const buffers *m, td_stream *other) {
  const td_work_key key = {.memory = ++t->b->graph};
  double seconds[RUNS];
  for (int i = -2; i < RUNS; i++) { // the second launch of a key captures a graph
    atomic_store(&t->pong->value, 0);
    for (int k = 0; other && k < 4; k++) // for about the longest duration of a run
      td_op_copy(other, m->device, m->host, m->n_bytes);
    const double start = td_clock_s();
    int code = 0;
    if (calls) {
      code = queue_by_values(t, calls);
      if (code) return -code;
    }
    const uint32_t run = atomic_fetch_add(&t->n_runs, 1) + 1;
    if (!calls) td_stream_run(t->b->stream, &key, queue_by_kernels, t);
    td_gpu_sync(t->b);
    if (i >= 0) seconds[i] = (td_clock_s() - start) / t->n_rounds;
    while (atomic_load(&t->n_done) < run)
      sched_yield();
    td_err err;
    if (other) td_gpu_must(td_stream_sync(other, &err), &err);
  }
  return td_median(seconds, RUNS);
}

static void signal_case(table_tennis *t, const value_calls *calls, const buffers *m,
                        td_stream *other) {
  td_gpu_bench *b = t->b;
  begin(b, "signals", calls ? "stream wait-value" : "spinning kernel");
  td_jw_add(b->json, "'with_copies': %i, 'bus': %s", t->has_copies, other ? "busy" : "idle");
  const double seconds = calls && !(calls->write && calls->wait) ? -1 : play(t, calls, m, other);
  if (seconds < 0)
    td_jw_str(b->json, "unavailable", "the driver has no cuStreamWaitValue32, or refuses it");
  else
    td_jw_double(b->json, "round_trip_us", seconds * 1e6);
  end(b);
}

static void open_table(table_tennis *t, td_gpu_bench *b) {
  td_err err;
  void *memory;
  *t = (table_tennis){.b = b, .n_rounds = b->shrink > 1 ? 4 : MAX_ROUNDS};
  td_gpu_must(td_dev_alloc_host(b->dev, &memory, 2 * sizeof *t->ping + TOKEN_BYTES, &err), &err);
  memset(memory, 0, 2 * sizeof *t->ping + TOKEN_BYTES);
  t->ping = memory;
  t->pong = t->ping + 1;
  t->host = (char *)(t->pong + 1);
  t->device = td_gpu_alloc(b, TOKEN_BYTES);
  t->values = td_gpu_alloc(b, (MAX_ROUNDS + 1) * sizeof *t->values);
  uint32_t values[MAX_ROUNDS + 1];
  for (uint32_t i = 0; i <= MAX_ROUNDS; i++)
    values[i] = i;
  td_op_copy(b->stream, t->values, values, sizeof values);
  td_gpu_sync(b);
}

// ---- cuBLAS beside a spin
// -------------------------------------------------------------------------

// Ends a kernel that spins, after SPIN_S if nothing else did.
typedef struct {
  signal_word *word;
  _Atomic bool is_done; // what ran beside it
} watchdog;
#define SPIN_S 5.0

static void *end_spin(void *arg) {
  watchdog *w = arg;
  const double start = td_clock_s();
  while (!atomic_load(&w->is_done) && td_clock_s() - start < SPIN_S)
    usleep(1000);
  atomic_store_explicit(&w->word->value, 1, memory_order_release);
  return NULL;
}

// Whether the first matrix product of a size waits for a kernel that spins on another stream, as
// loading code would: between two GPUs that wait for each other it would never end.
static void blas_case(td_gpu_bench *b, const table_tennis *t, td_stream *other, uint32_t n_tokens) {
  enum { DIM = 4096 };
  const uint32_t n = td_gpu_fewer(b, n_tokens, 17), dim = td_gpu_shrunk(b, DIM);
  td_gpu_kept *const before = b->kept;
  td_weight w = td_gpu_weight(b, &td_gpu_bf16, dim, dim);
  void *x = td_gpu_noise(b, 2ul * n * dim), *y = td_gpu_alloc(b, 2ul * n * dim);
  td_linear_op_args args = {
      .w = &w, .x = x, .y = y, .x_stride = dim, .y_stride = dim, .n_tokens = 1};
  td_op_linear(b->stream, &args); // copies the matrix
  td_gpu_sync(b);
  watchdog dog = {.word = t->pong};
  pthread_t thread;
  atomic_store(&t->pong->value, 0);
  td_op_await(other, &t->pong->value, t->values + 1);
  TD_CHECK(pthread_create(&thread, NULL, end_spin, &dog) == 0);
  const double start = td_clock_s();
  args.n_tokens = n;
  td_op_linear(b->stream, &args);
  td_gpu_sync(b);
  const double seconds = td_clock_s() - start;
  atomic_store(&dog.is_done, true);
  pthread_join(thread, NULL);
  td_err err;
  td_gpu_must(td_stream_sync(other, &err), &err);
  begin(b, "signals", "cuBLAS beside a spinning kernel");
  td_jw_add(b->json, "'tokens': %u, 'first_us': %g, 'waits': %i", n, seconds * 1e6,
            seconds >= SPIN_S);
  end(b);
  td_gpu_release(b, before);
}

void td_gpu_path_signals(td_gpu_bench *b) {
  table_tennis t;
  open_table(&t, b);
  td_err err;
  td_stream *other;
  td_gpu_must(td_stream_open(&other, b->dev, &err), &err);
  const buffers m = open_buffers(b);
  const value_calls calls = find_value_calls();
  pthread_t thread;
  TD_CHECK(pthread_create(&thread, NULL, answer, &t) == 0);
  for (int is_busy = 0; is_busy < 2; is_busy++) {
    for (int has_copies = 0; has_copies < 2; has_copies++) {
      t.has_copies = has_copies;
      signal_case(&t, NULL, &m, is_busy ? other : NULL);
      signal_case(&t, &calls, &m, is_busy ? other : NULL);
    }
  }
  atomic_store(&t.n_runs, UINT32_MAX);
  pthread_join(thread, NULL);
  static const uint32_t tokens[] = {65, 128, 512, 2048, 8192};
  for (size_t i = 0; i < TD_COUNT(tokens); i++)
    blas_case(b, &t, other, tokens[i]);
  td_stream_close(other);
  close_buffers(b, &m);
  td_gpu_release(b, NULL);
  td_dev_free_host(b->dev, t.ping);
}
