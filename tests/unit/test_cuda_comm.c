// tests/unit/test_cuda_comm.c - collectives between GPUs: through host memory, and by NCCL. On the
// emulator NCCL is a fake (tests/cuda_emu/nccl.cpp); on a machine with one GPU the real one has a
// group of one rank.
// CTest: gpu slow no-asan

#include <dlfcn.h>
#include <unistd.h>

#include "cuda_emu/hooks.h"
#include "unit/comm_test.h"
#include "unit/cuda_test.h"
#include "unit/ranks_test.h"

static bool is_emulator;
static void (*nccl_fail)(int rank, int group);

// The fake NCCL is in the emulator's library.
static void open_emulator(void) {
  const char *path = getenv("TANDEM_CUDA_LIB");
  void *library = path ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;
  if (library) *(void **)&nccl_fail = dlsym(library, "emu_nccl_fail");
  if (!nccl_fail) return;
  is_emulator = true;
  setenv("TANDEM_EMU_DEVICES", "4", 1);
  setenv("TANDEM_NCCL_LIB", path, 1);
}

// Most GPUs that can be used, up to 4; 0: the test skips.
static uint32_t count_gpus(void) {
  for (uint32_t n = 0; n < 4; n++) {
    td_dev *dev;
    td_err err;
    if (td_dev_open(&dev, &(td_dev_opts){.kind = "cuda", .index = n}, &err) != TD_OK) {
      if (is_emulator || (n == 0 && getenv("TANDEM_CUDA_LIB"))) fail_msg("%s", err.msg);
      if (n == 0) print_message("skipped: %s\n", err.msg);
      return n;
    }
    td_dev_close(dev);
  }
  return 4;
}

static void check_backend(const char *backend, const char *expected, size_t unit) {
  const uint32_t n_gpus = count_gpus();
  if (n_gpus == 0) skip();
  for (uint32_t n = 1; n <= n_gpus; n++) {
    ranks r;
    open_ranks(&r, n, "cuda", backend, 512);
    assert_string_equal(td_comm_backend(r.ends[0].comm), expected);
    run_ranks(&r, check_all_collectives, &unit);
    close_ranks(&r);
  }
}

TEST(host) {
  check_backend("host", "host", 40);
}

static bool has_nccl(void) {
  td_dev *dev;
  td_comm *comm;
  td_err err;
  if (td_dev_open(&dev, &(td_dev_opts){.kind = "cuda"}, &err) != TD_OK) {
    if (getenv("TANDEM_CUDA_LIB")) fail_msg("%s", err.msg);
    print_message("skipped: %s\n", err.msg);
    return false;
  }
  const td_status st = td_comm_open(&comm, &dev, &(td_comm_opts){"nccl", 1, 0}, &err);
  if (st != TD_OK) print_message("skipped: %s\n", err.msg);
  td_comm_close(comm);
  td_dev_close(dev);
  if (st != TD_OK && is_emulator) fail_msg("%s", err.msg);
  return st == TD_OK;
}

TEST(nccl) {
  if (!has_nccl()) skip();
  check_backend("nccl", "nccl", 40);
  setenv("TANDEM_JITTER", "1", 1);
  check_backend("auto", "nccl", 20);
  unsetenv("TANDEM_JITTER");
}

// The engine's prompts on several GPUs: the same bits with either back end, also with one half
// exchanged while the other is computed.
static void check_engine(ranks_way way, const float *want) {
  size_t n_vocab;
  way.backend = "host";
  float *host = ranks_logits(&small_models[0], &way, &n_vocab);
  way.backend = "nccl";
  way.jitter = "1";
  way.is_halved = true;
  float *nccl = ranks_logits(&small_models[0], &way, &n_vocab);
  assert_memory_equal(nccl, host, RANKS_ROWS * n_vocab * sizeof *host);
  assert_near(host, want, n_vocab, 0x1p-5f, 1);
  free(host);
  free(nccl);
}

// And as on one within rounding; activations are BF16 themselves.
TEST(engine) {
  const uint32_t n_gpus = count_gpus();
  if (n_gpus < 2 || !has_nccl()) skip();
  size_t n_vocab;
  const ranks_way one = {.kind = "cuda", .backend = "host", .n = 1};
  float *want = ranks_logits(&small_models[0], &one, &n_vocab);
  check_engine((ranks_way){.kind = "cuda", .n = n_gpus < 3 ? n_gpus : 3}, want);
  check_engine((ranks_way){.kind = "cuda", .n = 2, .is_streamed = true}, want);
  free(want);
}

// ---- failures, on the emulator ------------------------------------------------------------------

static void gather_twice(rank_end *end) {
  enum { N = 1000 };
  const size_t sizes[TD_COMM_MAX_RANKS] = {N, N, N};
  char *all = rank_alloc(end, 3 * N);
  const td_all_gather_args args = {.mine = all + end->rank * N, .all = all, .n_bytes = sizes};
  end->status = TD_OK;
  for (int i = 0; i < 2 && end->status == TD_OK; i++)
    end->status = td_comm_all_gather(end->comm, end->stream, &args, &end->err);
  if (end->status == TD_OK) rank_sync(end);
  td_stream_sync(end->stream, NULL);
  td_dev_free(end->dev, all);
}

// What NCCL reports on one rank ends all.
TEST(nccl_error) {
  if (!is_emulator) skip();
  ranks r;
  open_ranks(&r, 3, "cuda", "nccl", 0);
  nccl_fail(1, 1);
  run_ranks(&r, gather_twice, NULL);
  nccl_fail(-1, 0);
  for (uint32_t i = 0; i < r.n; i++) {
    assert_int_equal(r.ends[i].status, TD_ECANCELED);
    assert_non_null(strstr(r.ends[i].err.msg, "NCCL on rank 1: unhandled system error"));
  }
  close_ranks(&r);
}

static void abort_or_gather(rank_end *end) {
  if (end->rank < 2) {
    gather_twice(end);
  } else {
    td_comm_abort(end->comm, "rank 2 gives up");
  }
}

TEST(nccl_aborted) {
  if (!is_emulator) skip();
  ranks r;
  open_ranks(&r, 3, "cuda", "nccl", 0);
  run_ranks(&r, abort_or_gather, NULL);
  for (uint32_t i = 0; i < 2; i++) {
    assert_int_equal(r.ends[i].status, TD_ECANCELED);
    assert_non_null(strstr(r.ends[i].err.msg, "rank 2 gives up"));
  }
  close_ranks(&r);
}

// Without NCCL, or with one that is too old: an error that says what to install, and another way.
static void check_no_nccl(const char *name, const char *value) {
  const char *before = getenv(name);
  char *kept = before ? strdup(before) : NULL;
  td_dev *dev;
  td_comm *comm;
  td_err err;
  setenv(name, value, 1);
  assert_int_equal(td_dev_open(&dev, &(td_dev_opts){.kind = "cuda"}, &err), TD_OK);
  assert_int_equal(td_comm_open(&comm, &dev, &(td_comm_opts){"nccl", 1, 0}, &err), TD_EUNSUPPORTED);
  assert_null(comm);
  assert_non_null(strstr(err.msg, "libnccl.so.2 is not found, or older than 2.18"));
  assert_int_equal(td_comm_open(&comm, &dev, &(td_comm_opts){"auto", 1, 0}, &err), TD_OK);
  assert_string_equal(td_comm_backend(comm), "host");
  td_comm_close(comm);
  td_dev_close(dev);
  if (kept) setenv(name, kept, 1);
  if (!kept) unsetenv(name);
  free(kept);
}

TEST(no_nccl) {
  if (!is_emulator) skip();
  check_no_nccl("TANDEM_NCCL_LIB", "/nonexistent/libnccl.so.2");
  check_no_nccl("TANDEM_EMU_NCCL", "21700");
  check_no_nccl("TANDEM_EMU_NCCL", "30000");
}

// A NCCL that does not open: an error where it was asked for, else another way.
TEST(nccl_fails_to_open) {
  if (!is_emulator) skip();
  enum { N = 3 };
  td_dev *devs[N];
  td_comm *comms[N];
  td_err err;
  for (uint32_t i = 0; i < N; i++)
    assert_int_equal(td_dev_open(&devs[i], &(td_dev_opts){.kind = "cuda", .index = i}, &err),
                     TD_OK);
  nccl_fail(1, -2);
  assert_int_equal(td_comm_open(comms, devs, &(td_comm_opts){"nccl", N, 0}, &err), TD_ECANCELED);
  assert_non_null(strstr(err.msg, "NCCL on rank 1: unhandled system error"));
  assert_null(comms[0]);
  for (uint32_t i = 0; i < N; i++)
    td_dev_close(devs[i]);
  const size_t unit = 40;
  ranks r;
  open_ranks(&r, N, "cuda", "auto", 512);
  nccl_fail(-1, 0);
  assert_string_equal(td_comm_backend(r.ends[0].comm), "host");
  run_ranks(&r, check_all_collectives, (void *)&unit);
  close_ranks(&r);
}

// ---- what the driver waits for ------------------------------------------------------------------

// The first product of a shape, behind an exchange that a rank which is late has yet to begin. Were
// the driver to wait for that exchange, the late rank could not queue it.
static void meet_a_shape(rank_end *end) {
  enum { N = 64, TOKENS = 136 }; // enough for cuBLAS
  const ref_weight *w = end->all->ctx;
  const size_t sizes[] = {TOKENS * N, TOKENS * N};
  uint16_t *x = rank_alloc(end, 2 * TOKENS * N), *y = rank_alloc(end, sizeof *y * TOKENS * N);
  const td_all_gather_args args = {
      .mine = (char *)x + end->rank * sizes[0], .all = x, .n_bytes = sizes};
  td_linear_op_args product = {
      .w = &w->w, .x = x, .y = y, .x_stride = N, .y_stride = N, .n_tokens = TOKENS - 1};
  td_op_fill_zero(end->stream, x, 2 * TOKENS * N);
  td_op_linear(end->stream, &product);
  rank_ok(end, td_stream_sync(end->stream, &end->err));
  td_dev_set_in_group(end->dev, true);
  if (end->rank == 1) usleep(100000);
  rank_ok(end, td_comm_all_gather(end->comm, end->stream, &args, &end->err));
  product.n_tokens = TOKENS;
  td_op_linear(end->stream, &product);
  rank_ok(end, rank_sync(end));
  td_dev_free(end->dev, x);
  td_dev_free(end->dev, y);
}

TEST(first_products_beside_an_exchange) {
  if (count_gpus() < 2) skip();
  static const char *const backends[] = {"host", "nccl"};
  uint64_t rng = 1;
  for (size_t i = 0; i < TD_COUNT(backends) && (i == 0 || has_nccl()); i++) {
    ref_weight w = ref_make_weight(&rng, i ? TD_F8E4M3 : TD_BF16, 64, 64, i ? 64 : 0, i ? 64 : 0);
    ranks r;
    open_ranks(&r, 2, "cuda", backends[i], 512);
    run_ranks(&r, meet_a_shape, &w);
    close_ranks(&r);
    ref_free_weight(&w);
  }
}

int before_all(void **state) {
  (void)state;
  open_emulator();
  return 0;
}
