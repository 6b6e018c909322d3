// tests/unit/test_kv_disk.c - KV pages as files: names, records, the directory.
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "front/kv_disk.h"
#include "kv/dir.h"
#include "kv/kv.h"
#include "kv/record.h"
#include "support/folder.h"
#include "unit/testing.h"

enum { N_TOKENS = 8, N_BYTES = 333, FILE_BYTES = 128 + N_TOKENS * 4 + N_BYTES };

static const int32_t tokens[N_TOKENS] = {5, 9, 2, 1, 7, 7, 7, 4};

// ---- names ------------------------------------------------------------------------------------

// A page's name tells all tokens before it, and the root.
TEST(names) {
  td_err err;
  uint32_t seq;
  const td_digest root = {.bytes = {1}};
  td_kv *kv;
  const td_kv_opts opts = {.page_tokens = 4, .n_pages = 4, .max_seqs = 2, .root = &root};
  assert_int_equal(td_kv_open(&kv, &opts, &err), TD_OK);
  assert_int_equal(td_kv_seq_open(kv, &seq, &err), TD_OK);
  assert_int_equal(td_kv_reserve(kv, seq, 8, &err), TD_OK);
  uint32_t n;
  int32_t pages[4];
  memcpy(pages, td_kv_pages(kv, seq, &n), 2 * sizeof pages[0]);
  td_kv_content first, second;
  assert_false(td_kv_content_of(kv, pages[0], &first));
  td_kv_commit(kv, seq, tokens, 8);
  assert_true(td_kv_content_of(kv, pages[0], &first));
  assert_true(td_kv_content_of(kv, pages[1], &second));
  td_digest name;
  td_kv_name_next(&name, &root, tokens, 4);
  assert_memory_equal(&name, &first.name, sizeof name);
  td_kv_name_next(&name, &name, tokens + 4, 4);
  assert_memory_equal(&name, &second.name, sizeof name);
  assert_memory_equal(second.tokens, tokens + 4, 4 * sizeof tokens[0]);
  td_kv_name_next(&name, &root, tokens + 4, 4);
  assert_memory_not_equal(&name, &second.name, sizeof name);

  assert_int_equal(td_kv_n_empty(kv), 2);
  assert_int_equal(td_kv_idle(kv, 4, pages), 0);
  int32_t given[2] = {pages[0], pages[1]};
  td_kv_seq_close(kv, seq);
  assert_int_equal(td_kv_idle(kv, 4, pages), 2);
  assert_int_equal(pages[0], given[1]); // the end goes first
  assert_int_equal(pages[1], given[0]);
  assert_int_equal(td_kv_idle(kv, 1, pages), 1);
  td_kv_close(kv);
}

// ---- records ----------------------------------------------------------------------------------

static td_kv_record make_record(uint8_t name) {
  return (td_kv_record){.model = {.bytes = {3}},
                        .name = {.bytes = {name, 8}},
                        .tokens = tokens,
                        .n_tokens = N_TOKENS,
                        .n_bytes = N_BYTES};
}

static void make_file(uint8_t file[FILE_BYTES], const td_kv_record *record) {
  assert_int_equal(td_kv_record_bytes(record), FILE_BYTES);
  for (size_t i = td_kv_record_offset(record); i < FILE_BYTES; i++)
    file[i] = (uint8_t)(i * 31);
  td_kv_record_seal(file, record);
}

TEST(every_flipped_bit) {
  uint8_t file[FILE_BYTES];
  td_err err;
  const td_kv_record record = make_record(1);
  make_file(file, &record);
  assert_int_equal(td_kv_record_check(file, FILE_BYTES, &record, &err), TD_OK);
  for (size_t bit = 0; bit < 8 * FILE_BYTES; bit++) {
    file[bit / 8] ^= (uint8_t)(1 << bit % 8);
    assert_int_equal(td_kv_record_check(file, FILE_BYTES, &record, &err), TD_EFORMAT);
    file[bit / 8] ^= (uint8_t)(1 << bit % 8);
  }
  assert_int_equal(td_kv_record_check(file, FILE_BYTES, &record, &err), TD_OK);
}

TEST(every_length) {
  uint8_t file[FILE_BYTES];
  td_err err;
  const td_kv_record record = make_record(1);
  make_file(file, &record);
  for (size_t n = 0; n < FILE_BYTES; n++) {
    uint8_t *cut = malloc(n + !n); // so that reading past the end is seen
    memcpy(cut, file, n);
    assert_int_equal(td_kv_record_check(cut, n, &record, &err), TD_EFORMAT);
    free(cut);
  }
}

TEST(somebody_elses) {
  uint8_t file[FILE_BYTES];
  int32_t other_tokens[N_TOKENS] = {5, 9, 2, 1, 7, 7, 7, 5};
  td_err err;
  const td_kv_record record = make_record(1);
  make_file(file, &record);
  td_kv_record name = make_record(2), model = make_record(1), content = make_record(1);
  model.model.bytes[31] = 1;
  content.tokens = other_tokens;
  assert_int_equal(td_kv_record_check(file, FILE_BYTES, &name, &err), TD_EFORMAT);
  assert_int_equal(td_kv_record_check(file, FILE_BYTES, &content, &err), TD_EFORMAT);
  assert_int_equal(td_kv_record_check(file, FILE_BYTES, &model, &err), TD_EFORMAT);
  assert_non_null(strstr(err.msg, "another model"));
}

// ---- the directory ----------------------------------------------------------------------------

static char folder[] = "/tmp/td_test_kv_disk_XXXXXX/kv";

static td_kv_dir *open_dir(uint64_t max_bytes) {
  td_kv_dir *dir;
  td_err err;
  td_status st = td_kv_dir_open(&dir, folder, max_bytes, &err);
  if (st != TD_OK) fail_msg("%s", err.msg);
  return dir;
}

static void put(td_kv_dir *dir, uint8_t name, uint64_t used_ns) {
  uint8_t file[FILE_BYTES];
  td_err err;
  const td_kv_record record = make_record(name);
  make_file(file, &record);
  assert_int_equal(td_kv_record_write(td_kv_dir_path(dir), &record, file, used_ns, &err), TD_OK);
  td_kv_dir_add(dir, &record.name, FILE_BYTES);
}

static td_status get(const td_kv_dir *dir, uint8_t name) {
  uint8_t file[FILE_BYTES], expected[FILE_BYTES];
  td_err err;
  const td_kv_record record = make_record(name);
  td_status st = td_kv_record_read(td_kv_dir_path(dir), &record, file, &err);
  assert_true(st == TD_OK || err.msg[0]);
  if (st != TD_OK) return st;
  make_file(expected, &record);
  assert_memory_equal(file, expected, FILE_BYTES);
  return TD_OK;
}

static bool has(const td_kv_dir *dir, uint8_t name) {
  td_kv_record record = make_record(name);
  return td_kv_dir_has(dir, &record.name);
}

static void path_of(char *out, size_t size, uint8_t name, const char *suffix) {
  char hex[TD_DIGEST_HEX];
  td_kv_record record = make_record(name);
  td_digest_hex(hex, &record.name);
  snprintf(out, size, "%s/%s%s", folder, hex, suffix);
}

static int begin(void **state) {
  (void)state;
  char *slash = strrchr(folder, '/');
  *slash = '\0';
  bool ok = mkdtemp(folder) != NULL;
  *slash = '/';
  return ok ? 0 : -1;
}

static int end(void **state) {
  (void)state;
  char *slash = strrchr(folder, '/');
  *slash = '\0';
  td_test_remove_folder(folder);
  memcpy(slash - 6, "XXXXXX/kv", 9);
  return 0;
}

TEST(found_again, begin, end) {
  td_kv_dir *dir = open_dir(1 << 20), *second;
  td_err err;
  put(dir, 1, 1000);
  put(dir, 2, 2000);
  assert_int_equal(get(dir, 1), TD_OK);
  assert_int_equal(get(dir, 3), TD_ENOENT);
  assert_int_equal(td_kv_dir_open(&second, folder, 1 << 20, &err), TD_EAGAIN);
  assert_null(second);
  td_kv_dir_close(dir);
  dir = open_dir(1 << 20);
  assert_int_equal(td_kv_dir_bytes(dir), 2 * FILE_BYTES);
  assert_true(has(dir, 1) && has(dir, 2) && !has(dir, 3));
  assert_int_equal(get(dir, 2), TD_OK);
  td_kv_dir_close(dir);
}

static void write_text(const char *path, const char *text) {
  FILE *file = fopen(path, "w");
  assert_non_null(file);
  assert_true(fputs(text, file) >= 0);
  assert_int_equal(fclose(file), 0);
}

// What is half written goes; what is not ours stays; what is damaged is found but not served.
TEST(strange_files, begin, end) {
  td_kv_dir *dir = open_dir(1 << 20);
  char temp[256], notes[256], damaged[256], directory[256], empty[256], shorter[256];
  put(dir, 1, 1000);
  path_of(damaged, sizeof damaged, 1, ".kv");
  path_of(temp, sizeof temp, 2, ".tmp");
  path_of(directory, sizeof directory, 3, ".kv");
  path_of(empty, sizeof empty, 4, ".kv");
  path_of(shorter, sizeof shorter, 5, ".kv");
  snprintf(notes, sizeof notes, "%s/notes.kv", folder);
  write_text(temp, "half");
  write_text(empty, "");
  write_text(shorter, "shorter than a head");
  write_text(notes, "mine");
  assert_int_equal(truncate(damaged, FILE_BYTES - 1), 0);
  assert_int_equal(mkdir(directory, 0700), 0);
  td_kv_dir_close(dir);
  dir = open_dir(1 << 20);
  assert_int_equal(access(temp, F_OK), -1);
  assert_int_equal(access(notes, F_OK), 0);
  assert_true(has(dir, 1) && !has(dir, 3) && !has(dir, 4) && !has(dir, 5));
  assert_int_equal(access(empty, F_OK), -1);
  assert_int_equal(access(shorter, F_OK), -1);
  assert_int_equal(get(dir, 1), TD_EFORMAT);
  assert_int_equal(get(dir, 3), TD_EFORMAT); // not a file, and not waited for
  td_kv_record record = make_record(1);
  td_kv_record_remove(td_kv_dir_path(dir), &record.name);
  td_kv_dir_forget(dir, &record.name);
  assert_int_equal(access(damaged, F_OK), -1);
  assert_false(has(dir, 1));
  assert_int_equal(td_kv_dir_bytes(dir), 0);
  td_kv_dir_close(dir);
}

TEST(the_limit, begin, end) {
  td_kv_dir *dir = open_dir(10 * FILE_BYTES);
  td_digest victim;
  for (uint8_t i = 0; i < 10; i++)
    put(dir, i, 1000u + i);
  assert_false(td_kv_dir_evict(dir, 0, &victim));
  td_kv_record first = make_record(0);
  td_kv_dir_use(dir, &first.name);
  assert_true(td_kv_dir_evict(dir, FILE_BYTES, &victim));
  assert_int_equal(victim.bytes[0], 1);
  td_kv_record_remove(td_kv_dir_path(dir), &victim);
  assert_false(td_kv_dir_evict(dir, FILE_BYTES, &victim));
  td_kv_record_touch(td_kv_dir_path(dir), &first.name, 5000);
  td_kv_dir_close(dir);
  dir = open_dir(3 * FILE_BYTES); // a smaller one: the least recently used go
  assert_int_equal(td_kv_dir_bytes(dir), 3 * FILE_BYTES);
  assert_true(has(dir, 0) && has(dir, 9) && has(dir, 8) && !has(dir, 7));
  assert_int_equal(get(dir, 7), TD_ENOENT);
  while (td_kv_dir_evict(dir, 4 * FILE_BYTES, &victim)) {
  }
  assert_int_equal(td_kv_dir_bytes(dir), 0);
  td_kv_dir_close(dir);
}

// The table against a plain array, over many more than it begins with.
TEST(many, begin, end) {
  enum { N = 3000 };
  static bool there[N];
  td_kv_dir *dir = open_dir(UINT64_MAX);
  uint64_t n = 0;
  uint32_t random = 1;
  for (int i = 0; i < 20000; i++) {
    random = random * 1664525 + 1013904223;
    uint32_t k = random >> 8 & 0xfff;
    if (k >= N) continue;
    td_digest name = {.bytes = {(uint8_t)k, (uint8_t)(k >> 8), (uint8_t)(k >> 1)}};
    assert_int_equal(td_kv_dir_has(dir, &name), there[k]);
    bool add = random >> 24 & 1;
    (add ? (void)td_kv_dir_add(dir, &name, 7) : td_kv_dir_forget(dir, &name));
    n += (uint64_t)add - (uint64_t)there[k];
    there[k] = add;
    assert_int_equal(td_kv_dir_bytes(dir), 7 * n);
  }
  td_kv_dir_close(dir);
}

// A record that does not fit leaves nothing behind, and the one of this name that was there.
TEST(a_full_disk, begin, end) {
  td_kv_dir *dir = open_dir(1 << 20);
  td_err err;
  char temp[256];
  uint8_t file[FILE_BYTES];
  const td_kv_record record = make_record(1), other = make_record(2);
  put(dir, 1, 1000);
  make_file(file, &record);
  struct rlimit before, tight;
  assert_int_equal(getrlimit(RLIMIT_FSIZE, &before), 0);
  signal(SIGXFSZ, SIG_IGN);
  tight = (struct rlimit){.rlim_cur = FILE_BYTES - 1, .rlim_max = before.rlim_max};
  assert_int_equal(setrlimit(RLIMIT_FSIZE, &tight), 0);
  td_status again = td_kv_record_write(td_kv_dir_path(dir), &record, file, 2000, &err);
  td_status fresh = td_kv_record_write(td_kv_dir_path(dir), &other, file, 2000, &err);
  assert_int_equal(setrlimit(RLIMIT_FSIZE, &before), 0);
  assert_int_equal(again, TD_EIO);
  assert_int_equal(fresh, TD_EIO);
  assert_string_equal(err.msg, strerror(EFBIG));
  assert_int_equal(get(dir, 1), TD_OK);
  assert_int_equal(get(dir, 2), TD_ENOENT);
  path_of(temp, sizeof temp, 1, ".tmp");
  assert_int_equal(access(temp, F_OK), -1);
  td_kv_dir_close(dir);
}

TEST(a_bad_directory, begin, end) {
  td_kv_dir *dir;
  td_err err;
  write_text(folder, "a file");
  assert_int_equal(td_kv_dir_open(&dir, folder, 1, &err), TD_EIO);
  assert_non_null(strstr(err.msg, folder));
  assert_int_equal(td_kv_dir_open(&dir, "/absent/parent/kv", 1, &err), TD_EIO);
  assert_null(dir);
}

// ---- a drive that others need more --------------------------------------------------------------

enum { PAGE_TOKENS = 4, N_PAGES = 8, N_PROMPT = PAGE_TOKENS * N_PAGES };
static const td_digest root = {.bytes = {1}};
static _Atomic unsigned n_asked;

static bool is_always_busy(void *ctx) {
  (void)ctx;
  atomic_fetch_add(&n_asked, 1);
  return true;
}

static td_kv_disk *open_disk(uv_loop_t *loop, const td_kv *kv, td_kv_dir *dir, int pool_fd) {
  td_kv_disk *disk;
  td_err err;
  const td_kv_disk_opts opts = {.loop = loop,
                                .dir = dir,
                                .model = root,
                                .kv = kv,
                                .pool_fd = pool_fd,
                                .flush_ns = UINT64_MAX / 2,
                                .is_drive_busy = is_always_busy};
  if (td_kv_disk_open(&disk, &opts, &err) != TD_OK) fail_msg("%s", err.msg);
  return disk;
}

static void on_loaded(void *ctx, uint64_t id, uint32_t n_cached) {
  (void)id;
  *(uint32_t *)ctx = n_cached;
}

static void on_closed(void *ctx) {
  *(bool *)ctx = true;
}

// Before each page but the first it asks, of reads and of writes, but not once its server stops;
// and gets on though the drive is always busy.
TEST(a_busy_drive, begin, end) {
  enum { N_SAVED = N_PAGES / 2 + 1 }; // what is to be ready for eviction
  td_kv_pool pool;
  td_kv *kv;
  td_err err;
  uint32_t seq, n, n_cached = 0;
  int32_t prompt[N_PROMPT], pages[N_PAGES];
  bool is_closed = false;
  uv_loop_t loop;
  int pool_fd;
  const td_kv_opts opts = {
      .page_tokens = PAGE_TOKENS, .n_pages = N_PAGES, .max_seqs = 1, .root = &root};
  const td_kv_need need = {.max_position = N_PROMPT,
                           .kv_bytes_per_token = 100,
                           .available_bytes = 1 << 20,
                           .ctx_size = N_PROMPT,
                           .kv_tokens = N_PROMPT,
                           .max_batch = 1,
                           .n_layers = 1,
                           .page_tokens = PAGE_TOKENS};
  for (int32_t i = 0; i < N_PROMPT; i++)
    prompt[i] = i * i % 31;
  assert_int_equal(uv_loop_init(&loop), 0);
  assert_int_equal(td_kv_pool_create(&pool_fd, &err), TD_OK);
  if (td_kv_pool_attach(&pool, pool_fd, &need, &err) != TD_OK) fail_msg("%s", err.msg);
  memset(pool.pages, 7, (size_t)N_PROMPT * 100);
  assert_int_equal(td_kv_open(&kv, &opts, &err), TD_OK);
  assert_int_equal(td_kv_seq_open(kv, &seq, &err), TD_OK);
  assert_int_equal(td_kv_reserve(kv, seq, N_PROMPT, &err), TD_OK);
  memcpy(pages, td_kv_pages(kv, seq, &n), sizeof pages);
  td_kv_commit(kv, seq, prompt, N_PROMPT);
  td_kv_seq_close(kv, seq);
  td_kv_dir *dir = open_dir(1 << 20);
  td_kv_disk *disk = open_disk(&loop, kv, dir, pool_fd);
  td_kv_disk_save(disk);
  assert_int_equal(uv_run(&loop, UV_RUN_DEFAULT), 0);
  const td_kv_record record = {.n_tokens = PAGE_TOKENS, .n_bytes = PAGE_TOKENS * 100};
  assert_int_equal(td_kv_disk_stats_of(disk).bytes, N_SAVED * td_kv_record_bytes(&record));
  assert_true(atomic_exchange(&n_asked, 0) >= N_SAVED);
  td_kv_disk_close(disk, on_closed, &is_closed); // writes the others
  assert_int_equal(uv_run(&loop, UV_RUN_DEFAULT), 0);
  assert_true(is_closed);
  assert_int_equal(atomic_load(&n_asked), 0);

  disk = open_disk(&loop, kv, dir, pool_fd);
  memset(pool.pages, 0, (size_t)N_PROMPT * 100);
  const td_kv_load load = {.prompt = prompt,
                           .n_prompt = N_PROMPT,
                           .pages = pages,
                           .on_loaded = on_loaded,
                           .ctx = &n_cached};
  assert_non_null(td_kv_disk_load(disk, &load));
  assert_int_equal(uv_run(&loop, UV_RUN_DEFAULT), 0);
  assert_int_equal(n_cached, N_PROMPT - PAGE_TOKENS); // the last token is always computed
  assert_true(atomic_load(&n_asked) >= N_PAGES - 2);
  const char *first = (const char *)pool.pages + (size_t)pages[0] * PAGE_TOKENS * 100;
  for (size_t i = 0; i < PAGE_TOKENS * 100; i++)
    assert_int_equal(first[i], 7);
  td_kv_disk_close(disk, on_closed, &is_closed);
  assert_int_equal(uv_run(&loop, UV_RUN_DEFAULT), 0);
  assert_int_equal(uv_loop_close(&loop), 0);
  td_kv_dir_close(dir);
  td_kv_close(kv);
  td_kv_pool_close(&pool);
}
