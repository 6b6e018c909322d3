// tests/unit/test_weights.c - where weights live: the choice, and the copy in shared memory.
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/fs.h"
#include "base/units.h"
#include "model/checkpoint/resident.h"
#include "runtime/weights.h"
#include "support/checkpoint.h"
#include "unit/testing.h"

// ---- the choice ---------------------------------------------------------------------------------

TEST(choice) {
  enum { PLAIN = TD_PAGES_PLAIN, THP = TD_PAGES_TRANSPARENT, RESERVED = TD_PAGES_RESERVED };
  enum { CPU, NODES, GPU, BOTH }; // NODES: two; BOTH: experts are the CPU's
  static const struct {
    td_weights_mode mode;
    int pages, where;
    uint64_t weights_gib, kv_gib, available_gib, limit_gib;
    td_status status;
    bool is_resident, is_warning;
  } cases[] = {
      {TD_WEIGHTS_AUTO, THP, CPU, 10, 2, 14, 99, TD_OK, true, false},
      {TD_WEIGHTS_AUTO, THP, CPU, 10, 2, 13, 99, TD_OK, false, false},    // two contexts do not fit
      {TD_WEIGHTS_AUTO, PLAIN, CPU, 10, 2, 99, 99, TD_OK, false, false},  // brings nothing
      {TD_WEIGHTS_AUTO, PLAIN, NODES, 10, 2, 99, 99, TD_OK, true, false}, // each has its part
      {TD_WEIGHTS_AUTO, RESERVED, CPU, 10, 2, 4, 99, TD_OK, true, false}, // set aside already
      {TD_WEIGHTS_AUTO, RESERVED, CPU, 10, 2, 3, 99, TD_OK, false, true},
      {TD_WEIGHTS_AUTO, THP, CPU, 10, 2, 9, 99, TD_OK, false, true}, // the disk will be read on
      {TD_WEIGHTS_MMAP, THP, CPU, 10, 2, 99, 99, TD_OK, false, false},
      {TD_WEIGHTS_MMAP, THP, CPU, 10, 2, 9, 99, TD_OK, false, true},
      {TD_WEIGHTS_RESIDENT, PLAIN, CPU, 10, 2, 99, 99, TD_OK, true, false},
      {TD_WEIGHTS_RESIDENT, PLAIN, CPU, 10, 2, 10, 99, TD_OK, true, false}, // a shorter context may
      {TD_WEIGHTS_RESIDENT, THP, CPU, 10, 2, 9, 10, TD_OK, true, true},     // memory may grow
      {TD_WEIGHTS_RESIDENT, THP, CPU, 10, 2, 9, 9, TD_ENOMEM, false, false},
      {TD_WEIGHTS_RESIDENT, RESERVED, CPU, 10, 2, 4, 4, TD_OK, true, false},
      // The GPU has all weights, or copies experts again and again, from whatever pages.
      {TD_WEIGHTS_AUTO, THP, GPU, 10, 0, 99, 99, TD_OK, false, false},
      {TD_WEIGHTS_AUTO, THP, GPU, 10, 0, 9, 99, TD_OK, false, false},
      {TD_WEIGHTS_RESIDENT, THP, GPU, 10, 0, 99, 99, TD_OK, true, false},
      {TD_WEIGHTS_AUTO, THP, BOTH, 10, 0, 10, 99, TD_OK, true, false},
      {TD_WEIGHTS_AUTO, PLAIN, BOTH, 10, 0, 10, 99, TD_OK, true, true}, // says how to allow others
      {TD_WEIGHTS_AUTO, THP, BOTH, 10, 0, 9, 99, TD_OK, false, true},
  };
  for (size_t i = 0; i < TD_COUNT(cases); i++) {
    const td_placement placement = {.is_discrete = cases[i].where >= GPU,
                                    .experts_on_cpu = cases[i].where == BOTH};
    const td_weights_need need = {.mode = cases[i].mode,
                                  .placement = placement,
                                  .file_bytes = cases[i].weights_gib * TD_GIB,
                                  .resident_bytes = cases[i].weights_gib * TD_GIB,
                                  .kv_bytes = cases[i].kv_gib * TD_GIB,
                                  .available_bytes = cases[i].available_gib * TD_GIB,
                                  .limit_bytes = cases[i].limit_gib * TD_GIB,
                                  .pages = (td_page_kind)cases[i].pages,
                                  .n_nodes = cases[i].where == NODES ? 2 : 1};
    td_weights_choice choice;
    td_err err;
    td_status st = td_weights_choose(&choice, &need, &err);
    if (st != cases[i].status) fail_msg("case %zu: status %d", i, (int)st);
    if (st == TD_ENOMEM) assert_non_null(strstr(err.msg, "--weights mmap"));
    if (st != TD_OK) continue;
    if (choice.is_resident != cases[i].is_resident) fail_msg("case %zu: resident?", i);
    if (choice.is_warning != cases[i].is_warning) fail_msg("case %zu: warning?", i);
    if (cases[i].pages != PLAIN || cases[i].mode == TD_WEIGHTS_MMAP) continue;
    if (!strstr(choice.text, "shmem_enabled, or sysctl vm.nr_hugepages=5120")) {
      fail_msg("case %zu: %s", i, choice.text);
    }
  }
}

// A model of 100 GiB, of which 90 are experts of 10 MiB.
static td_weights_need need_of_large(td_weights_mode mode, uint64_t available_gib) {
  return (td_weights_need){.mode = mode,
                           .file_bytes = 100 * TD_GIB,
                           .resident_bytes = 100 * TD_GIB,
                           .kv_bytes = TD_GIB,
                           .available_bytes = available_gib * TD_GIB,
                           .limit_bytes = 999 * TD_GIB,
                           .n_nodes = 1,
                           .streamed_bytes = 90 * TD_GIB,
                           .why_not = "",
                           .slot_bytes = 10 << 20,
                           .n_slots = 9216,
                           .least_slots = 8,
                           .token_bytes = 1 << 20,
                           .usual_chunk = 512,
                           .n_ctx = 32768};
}

TEST(choice_of_stream) {
  td_weights_choice choice;
  td_err err;
  td_weights_need need = need_of_large(TD_WEIGHTS_AUTO, 50);
  assert_int_equal(td_weights_choose(&choice, &need, &err), TD_OK);
  assert_true(choice.is_streamed && choice.is_resident);
  // of the 40 GiB beside other weights, four contexts, an eighth and something more are left
  assert_true(choice.arena_bytes == TD_GIB * 40 - TD_GIB * 4 - TD_GIB * 40 / 8 - (128 << 20));
  assert_int_equal(choice.prefill_chunk, 5 * 1024); // of 1 MiB each
  const uint64_t without_drafts = choice.arena_bytes;
  need.draft_bytes = TD_GIB;
  assert_int_equal(td_weights_choose(&choice, &need, &err), TD_OK);
  assert_true(choice.arena_bytes == without_drafts - TD_GIB);
  need.n_ctx = 4096;
  assert_int_equal(td_weights_choose(&choice, &need, &err), TD_OK);
  assert_int_equal(choice.prefill_chunk, 4096);
  need.arena_bytes = 7 * TD_GIB;
  assert_int_equal(td_weights_choose(&choice, &need, &err), TD_OK);
  assert_true(choice.arena_bytes == 7 * TD_GIB);
  need = need_of_large(TD_WEIGHTS_AUTO, 10); // there is no room: the files are mapped
  assert_int_equal(td_weights_choose(&choice, &need, &err), TD_OK);
  assert_true(!choice.is_streamed && choice.is_warning);
  need.mode = TD_WEIGHTS_STREAM;
  assert_int_equal(td_weights_choose(&choice, &need, &err), TD_ENOMEM);
  assert_non_null(strstr(err.msg, "a smaller --ctx-size, or --weights mmap"));
  need = need_of_large(TD_WEIGHTS_STREAM, 999); // all of them
  assert_int_equal(td_weights_choose(&choice, &need, &err), TD_OK);
  assert_true(choice.arena_bytes >= need.n_slots * need.slot_bytes);
  need.streamed_bytes = 0;
  need.why_not = "they are odd";
  assert_int_equal(td_weights_choose(&choice, &need, &err), TD_EUNSUPPORTED);
  assert_non_null(strstr(err.msg, "--weights stream: they are odd; or give --weights mmap"));
  need.placement.is_discrete = true;
  assert_int_equal(td_weights_choose(&choice, &need, &err), TD_EUNSUPPORTED);
  assert_non_null(strstr(err.msg, "the GPU holds all experts"));
  need = need_of_large(TD_WEIGHTS_AUTO, 20); // with a GPU for the rest
  need.placement.is_discrete = need.placement.experts_on_cpu = true;
  assert_int_equal(td_weights_choose(&choice, &need, &err), TD_OK);
  assert_true(choice.is_streamed);
  assert_int_equal(choice.prefill_chunk, 0);
  need = need_of_large(TD_WEIGHTS_AUTO, 200); // it fits
  assert_int_equal(td_weights_choose(&choice, &need, &err), TD_OK);
  assert_false(choice.is_streamed);
}

// Half of what experts would have goes to activations, where a prompt of 2,048 tokens needs it.
TEST(steps_of_little_memory) {
  enum { MIB = 1 << 20 };
  td_weights_choice choice;
  td_err err;
  td_weights_need need = need_of_large(TD_WEIGHTS_STREAM, 18); // 8 GiB beside other weights
  need.token_bytes = MIB / 2;
  const uint64_t shared = 8 * TD_GIB - 128 * MIB - 2 * TD_GIB;
  assert_int_equal(td_weights_choose(&choice, &need, &err), TD_OK);
  assert_int_equal(choice.prefill_chunk, 2048);
  assert_true(choice.arena_bytes == shared - TD_GIB);
  need.token_bytes = 2 * MIB; // as far as they fit
  assert_int_equal(td_weights_choose(&choice, &need, &err), TD_OK);
  assert_true(choice.arena_bytes == shared - (shared + TD_GIB) / 2);
  assert_int_equal(choice.prefill_chunk, (shared + TD_GIB) / 2 / need.token_bytes / 64 * 64);
  need.arena_bytes = 9 * TD_GIB / 2; // what is asked for leaves less
  assert_int_equal(td_weights_choose(&choice, &need, &err), TD_OK);
  assert_true(choice.arena_bytes == need.arena_bytes);
  assert_int_equal(choice.prefill_chunk, (shared - need.arena_bytes) / need.token_bytes / 64 * 64);
  need.arena_bytes = 0;
  need.kv_bytes = 3 * TD_GIB / 2; // half of what it gets holds a context
  assert_int_equal(td_weights_choose(&choice, &need, &err), TD_OK);
  const uint64_t left = shared - TD_GIB + 128 * MIB; // nearly 3 GiB are for KV pages
  assert_true(choice.arena_bytes == left - (left + TD_GIB) / 2);
}

TEST(limits_of_memory) {
  assert_true(td_memory_available_bytes() <= td_memory_limit_bytes());
  assert_true(td_memory_limit_bytes() < UINT64_MAX);
}

// ---- the memory -----------------------------------------------------------------------------

typedef struct {
  checkpoint ck;
  td_store *store;
  td_resident_stats stats;
  uint64_t last_done, last_total; // that on_progress heard
} fixture;

static int setup(void **state) {
  static fixture f;
  f = (fixture){0};
  ck_deepseek(&f.ck);
  ck_write(&f.ck);
  td_err err;
  if (td_store_open(&f.store, f.ck.dir, &err) != TD_OK) fail_msg("%s", err.msg);
  *state = &f;
  return 0;
}

static int teardown(void **state) {
  fixture *f = *state;
  td_store_close(f->store);
  ck_free(&f->ck);
  return 0;
}

static void note_progress(void *ctx, uint64_t done, uint64_t total) {
  fixture *f = ctx;
  assert_true(done >= f->last_done && done <= total);
  f->last_done = done;
  f->last_total = total;
}

static td_status load(fixture *f, int *fd, td_err *err) {
  const td_resident_opts opts = {.n_threads = 3, .on_progress = note_progress, .ctx = f};
  return td_resident_load(fd, &f->stats, f->store, &opts, err);
}

static int load_well(fixture *f) {
  int fd;
  td_err err;
  if (load(f, &fd, &err) != TD_OK) fail_msg("%s", err.msg);
  return fd;
}

TEST(holds_the_files, setup, teardown) {
  fixture *f = *state;
  int fd = load_well(f);
  td_resident r;
  td_err err;
  assert_int_equal(td_resident_attach(&r, fd, &err), TD_OK);
  close(fd); // the mapping keeps the memory
  uint64_t n_bytes = 0;
  assert_int_equal(td_store_n_shards(f->store), CK_SHARDS);
  for (size_t i = 0; i < CK_SHARDS; i++) {
    td_shard_info info = td_store_shard(f->store, i);
    td_buf want = TD_BUF_INIT;
    assert_int_equal(td_file_read(&want, info.path, 1 << 30, &err), TD_OK);
    size_t n;
    const char *got = td_resident_find(&r, info.name, &n);
    assert_non_null(got);
    assert_int_equal((uintptr_t)got % 4096, 0);
    assert_int_equal(n, want.len);
    assert_memory_equal(got, want.data, n);
    td_buf_free(&want);
    n_bytes += n;
  }
  assert_int_equal(f->stats.n_bytes, n_bytes);
  assert_int_equal(f->last_done, n_bytes);
  assert_int_equal(f->last_total, n_bytes);
  assert_int_equal(r.n_bytes, td_resident_bytes(f->store, NULL));
  size_t n;
  assert_null(td_resident_find(&r, "model.safetensors", &n));
  td_resident_detach(&r);
}

TEST(nobody_changes_it, setup, teardown) {
  int fd = load_well(*state);
  assert_true(mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) == MAP_FAILED);
  char path[64];
  snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
  int writable = open(path, O_RDWR | O_CLOEXEC); // whoever gets that far is stopped by the seals
  assert_true(writable >= 0);
  assert_true(mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, writable, 0) == MAP_FAILED);
  assert_int_equal(pwrite(writable, "x", 1, 0), -1);
  assert_int_equal(ftruncate(writable, 0), -1);
  assert_int_equal(fcntl(fd, F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
  close(writable);
  close(fd);
}

// A driver makes mappings writable while it registers them; nobody makes the memory smaller.
TEST(for_a_device, setup, teardown) {
  fixture *f = *state;
  const td_resident_opts opts = {.for_device = true};
  int fd;
  td_err err;
  assert_int_equal(td_resident_load(&fd, &f->stats, f->store, &opts, &err), TD_OK);
  td_resident r;
  assert_int_equal(td_resident_attach(&r, fd, &err), TD_OK);
  assert_int_equal(mprotect((void *)(uintptr_t)r.base, r.n_bytes, PROT_READ | PROT_WRITE), 0);
  assert_int_equal(ftruncate(fd, 0), -1);
  assert_int_equal(fcntl(fd, F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
  td_resident_detach(&r);
  close(fd);
}

TEST(a_model_opens_from_it, setup, teardown) {
  fixture *f = *state;
  int fd = load_well(f);
  td_model *mapped, *resident;
  td_err err;
  assert_int_equal(td_model_open(&mapped, f->ck.dir, &err), TD_OK);
  // The shards may go now: a worker that starts later does not need them.
  for (size_t i = 0; i < CK_SHARDS; i++)
    assert_int_equal(unlink(td_store_shard(f->store, i).path), 0);
  if (td_model_open_weights(&resident, f->ck.dir, fd, &err) != TD_OK) fail_msg("%s", err.msg);
  close(fd);
  const td_weight *a = td_model_embed(mapped), *b = td_model_embed(resident);
  assert_int_equal(td_model_n_tensors(mapped), td_model_n_tensors(resident));
  assert_int_equal(td_weight_data_bytes(a), td_weight_data_bytes(b));
  assert_memory_equal(a->data, b->data, td_weight_data_bytes(a));
  td_model_close(mapped);
  td_model_close(resident);
}

// Of a table, whole pages are holes, and what is read of it is in the file.
TEST(tables_stay_in_their_files) {
  enum { ROWS = 9000, PAGE = 4096 };
  static const char name[] = "layer.ngram_embedding.shard_0.weight";
  static const char zeros[PAGE];
  fixture f = {0};
  td_err err;
  td_store *resident;
  td_resident r;
  ck_deepseek(&f.ck);
  ck_add(&f.ck, name, "BF16", ROWS, 2, 0);
  ck_write(&f.ck);
  assert_int_equal(td_store_open(&f.store, f.ck.dir, &err), TD_OK);
  assert_int_equal(td_store_table_bytes(f.store), ROWS * 4);
  uint64_t n_files = 0;
  for (size_t i = 0; i < CK_SHARDS; i++)
    n_files += td_store_shard(f.store, i).n_bytes;
  const int fd = load_well(&f);
  assert_int_equal(f.last_done, f.stats.n_bytes);
  assert_true(n_files - f.stats.n_bytes > ROWS * 4 - 2 * PAGE &&
              f.stats.n_bytes % PAGE == n_files % PAGE);
  const td_tensor *mapped = td_store_tensor(f.store, (size_t)td_store_find(f.store, name));
  assert_int_equal(td_store_open_resident(&resident, f.ck.dir, fd, &err), TD_OK);
  const td_tensor *t = td_store_tensor(resident, (size_t)td_store_find(resident, name));
  assert_memory_equal(t->data, mapped->data, ROWS * 4);
  assert_int_equal(td_resident_attach(&r, fd, &err), TD_OK);
  assert_true((const char *)t->data < r.base || (const char *)t->data >= r.base + r.n_bytes);
  for (size_t i = 0; i < CK_SHARDS; i++) {
    const td_shard_info info = td_store_shard(f.store, i);
    size_t n_bytes;
    if (info.path != mapped->file) continue;
    const char *data = td_resident_find(&r, info.name, &n_bytes);
    data += mapped->data - info.bytes;
    const char *page = data + (PAGE - (uintptr_t)data % PAGE) % PAGE;
    assert_memory_equal(page, zeros, PAGE);
    assert_memory_not_equal(mapped->data + (page - data), zeros, PAGE);
  }
  td_store_close(resident);
  assert_int_equal(truncate(mapped->file, 100), 0);
  assert_int_equal(td_store_open_resident(&resident, f.ck.dir, fd, &err), TD_EFORMAT);
  assert_non_null(strstr(err.msg, "changed since it was loaded"));
  td_resident_detach(&r);
  close(fd);
  td_store_close(f.store);
  ck_free(&f.ck);
}

static int count_descriptors(void) {
  int n = 0;
  for (int fd = 0; fd < 256; fd++)
    n += fcntl(fd, F_GETFD) >= 0;
  return n;
}

TEST(a_changed_file, setup, teardown) {
  fixture *f = *state;
  td_shard_info info = td_store_shard(f->store, CK_SHARDS - 1);
  int n_before = count_descriptors(), fd;
  td_err err;
  assert_int_equal(truncate(info.path, (off_t)info.n_bytes - 1), 0);
  assert_int_equal(load(f, &fd, &err), TD_EIO);
  assert_int_equal(fd, -1);
  assert_non_null(strstr(err.msg, info.path));
  assert_non_null(strstr(err.msg, "changed"));
  assert_int_equal(unlink(info.path), 0);
  assert_int_equal(load(f, &fd, &err), TD_EIO);
  assert_int_equal(count_descriptors(), n_before);
}

static void touch_last_shard(void *ctx, uint64_t done, uint64_t total) {
  fixture *f = ctx;
  if (done < total) return;
  struct timespec times[2] = {{.tv_sec = 1}, {.tv_sec = 1}};
  const char *path = td_store_shard(f->store, CK_SHARDS - 1).path;
  assert_int_equal(utimensat(AT_FDCWD, path, times, 0), 0);
}

// All was read, but nobody can say whether before or after the change.
TEST(a_file_that_changes_meanwhile, setup, teardown) {
  fixture *f = *state;
  const td_resident_opts opts = {.on_progress = touch_last_shard, .ctx = f};
  int n_before = count_descriptors(), fd;
  td_err err;
  assert_int_equal(td_resident_load(&fd, &f->stats, f->store, &opts, &err), TD_EIO);
  assert_int_equal(fd, -1);
  assert_non_null(strstr(err.msg, td_store_shard(f->store, CK_SHARDS - 1).path));
  assert_int_equal(count_descriptors(), n_before);
}

TEST(no_shared_memory, setup, teardown) {
  fixture *f = *state;
  struct rlimit before, none;
  assert_int_equal(getrlimit(RLIMIT_FSIZE, &before), 0);
  none = (struct rlimit){.rlim_cur = 4096, .rlim_max = before.rlim_max}; // holds for memfds, too
  signal(SIGXFSZ, SIG_IGN);
  int n_before = count_descriptors(), fd;
  td_err err;
  setrlimit(RLIMIT_FSIZE, &none);
  td_status st = load(f, &fd, &err);
  setrlimit(RLIMIT_FSIZE, &before);
  assert_int_equal(st, TD_ENOMEM);
  assert_non_null(strstr(err.msg, "--weights mmap"));
  assert_int_equal(count_descriptors(), n_before);
}

// The loader's reads go through here: after so many one fails, as they do when memory runs out.
static _Atomic int reads_left = INT_MAX;
static int read_error;

ssize_t pread(int fd, void *to, size_t n, off_t at) {
  if (atomic_fetch_sub(&reads_left, 1) > 0) return syscall(SYS_pread64, fd, to, n, at);
  errno = read_error;
  return -1;
}

static bool is_mapped(const char *name) {
  td_buf maps = TD_BUF_INIT;
  td_err err;
  assert_int_equal(td_file_read(&maps, "/proc/self/maps", 1 << 24, &err), TD_OK);
  bool is = strstr(td_buf_text(&maps), name) != NULL;
  td_buf_free(&maps);
  return is;
}

TEST(memory_runs_out, setup, teardown) {
  fixture *f = *state;
  static const int errors[] = {ENOMEM, EFAULT, ENOSPC};
  int n_before = count_descriptors(), fd;
  for (int i = 0; i < (int)TD_COUNT(errors) * CK_SHARDS; i++) {
    td_err err;
    f->last_done = 0;
    read_error = errors[i / CK_SHARDS];
    atomic_store(&reads_left, i % CK_SHARDS); // a shard is one read here
    td_status st = load(f, &fd, &err);
    atomic_store(&reads_left, INT_MAX);
    assert_int_equal(st, TD_ENOMEM);
    assert_int_equal(fd, -1);
    assert_non_null(strstr(err.msg, "memory ran out"));
    assert_non_null(strstr(err.msg, "--weights mmap"));
    assert_true(f->last_done < f->last_total);
    assert_int_equal(count_descriptors(), n_before);
    assert_false(is_mapped("tandem-weights"));
  }
  f->last_done = 0;
  close(load_well(f));
}

TEST(cancel, setup, teardown) {
  fixture *f = *state;
  atomic_bool canceled = true;
  const td_resident_opts opts = {.canceled = &canceled};
  int n_before = count_descriptors(), fd;
  td_err err;
  assert_int_equal(td_resident_load(&fd, &f->stats, f->store, &opts, &err), TD_ECANCELED);
  assert_int_equal(fd, -1);
  assert_int_equal(count_descriptors(), n_before);
}

TEST(not_weights) {
  td_resident r;
  td_err err;
  int fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
  assert_int_equal(td_resident_attach(&r, fd, &err), TD_EFORMAT);
  close(fd);
  fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING); // sealed, but of other contents
  assert_int_equal(ftruncate(fd, 1 << 16), 0);
  assert_int_equal(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE), 0);
  char path[64];
  snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
  int read_only = open(path, O_RDONLY | O_CLOEXEC);
  assert_int_equal(td_resident_attach(&r, read_only, &err), TD_EFORMAT);
  assert_null(r.base);
  close(read_only);
  close(fd);
}
