// tests/unit/test_backend_disk.c - the backend with a directory behind its cache of prefixes: the
// engine's tokens lie in the pages, so a page that comes back wrong changes the answer.
#include <dirent.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include "backend_testing.h"
#include "kv/record.h"
#include "support/folder.h"

enum { PROMPT = 1000, PAGE = 64, N_FULL = PROMPT / PAGE, ANSWER = 20 };

static int32_t prompt[PROMPT];
static char folder[] = "/tmp/td_test_backend_disk_XXXXXX";

static void open_dir(void) {
  td_err err;
  if (td_kv_dir_open(&kv_dir, folder, 1 << 20, &err) != TD_OK) fail_msg("%s", err.msg);
}

// A directory with the prompt's pages, for all tests.
int before_all(void **state) {
  (void)state;
  if (!mkdtemp(folder)) return -1;
  make_prompt(prompt, PROMPT, 3);
  open_dir();
  world w;
  client c = {0};
  world_ready(&w, 2048, 4);
  c.backend = w.backend;
  assert_int_equal(submit(&c, prompt, PROMPT, ANSWER), TD_OK);
  run_until(&w, is_done, &c);
  check_answer(&c, prompt, PROMPT, ANSWER);
  assert_int_equal(td_backend_kv_disk(w.backend).bytes, 0); // memory has room
  world_close(&w);
  td_kv_dir_close(kv_dir);
  open_dir();
  return td_kv_dir_bytes(kv_dir) > N_FULL * PAGE * sizeof(int32_t) ? 0 : -1;
}

int after_all(void **state) {
  (void)state;
  td_kv_dir_close(kv_dir);
  kv_dir = NULL;
  td_test_remove_folder(folder);
  memcpy(strrchr(folder, '_'), "_XXXXXX", 7);
  return 0;
}

TEST(found) {
  world w;
  world_ready(&w, 2048, 4);
  client c = {.backend = w.backend}, again = c;
  assert_int_equal(submit(&c, prompt, PROMPT, ANSWER), TD_OK);
  assert_int_equal(c.n_done, 0);
  run_until(&w, is_done, &c);
  check_answer(&c, prompt, PROMPT, ANSWER);
  assert_int_equal(c.done.n_cached, N_FULL * PAGE);
  assert_int_equal(td_backend_kv_disk(w.backend).n_hits, N_FULL * PAGE);
  assert_int_equal(submit(&again, prompt, PROMPT, ANSWER), TD_OK); // from memory
  run_until(&w, is_done, &again);
  check_answer(&again, prompt, PROMPT, ANSWER);
  assert_int_equal(again.done.n_cached, N_FULL * PAGE);
  assert_int_equal(td_backend_kv_disk(w.backend).n_hits, N_FULL * PAGE);
  assert_true(td_backend_kv_use(w.backend) == 0);
  world_close(&w);
}

// One that begins alike waits for what the first loads.
TEST(found_by_several) {
  enum { N = 6 };
  world w;
  world_ready(&w, 2048, 4);
  static int32_t prompts[N][PROMPT];
  static client clients[N];
  for (uint32_t i = 0; i < N; i++) {
    memcpy(prompts[i], prompt, sizeof prompt);
    prompts[i][PROMPT - 1 - i] = (int32_t)i;
    clients[i] = (client){.backend = w.backend};
    assert_int_equal(submit(&clients[i], prompts[i], PROMPT, ANSWER), TD_OK);
  }
  run_until(&w, is_idle, &w);
  for (uint32_t i = 0; i < N; i++) {
    check_answer(&clients[i], prompts[i], PROMPT, ANSWER);
    assert_int_equal(clients[i].done.n_cached, N_FULL * PAGE);
  }
  assert_int_equal(td_backend_kv_disk(w.backend).n_hits, N_FULL * PAGE);
  world_close(&w);
}

TEST(cancel_while_it_loads) {
  world w;
  world_ready(&w, 2048, 4);
  client c = {.backend = w.backend}, next = c;
  assert_int_equal(submit(&c, prompt, PROMPT, ANSWER), TD_OK);
  c.is_canceled = true;
  td_backend_cancel(w.backend, c.id);
  assert_int_equal(td_backend_n_running(w.backend), 1); // its pages are being written to
  run_until(&w, is_idle, &w);
  assert_int_equal(c.n + (uint32_t)c.n_done, 0);
  assert_true(td_backend_kv_use(w.backend) == 0);
  assert_int_equal(submit(&next, prompt, PROMPT, ANSWER), TD_OK);
  run_until(&w, is_done, &next);
  check_answer(&next, prompt, PROMPT, ANSWER);
  world_close(&w);
}

TEST(close_while_it_loads) {
  world w;
  world_ready(&w, 2048, 4);
  client c = {.backend = w.backend};
  assert_int_equal(submit(&c, prompt, PROMPT, ANSWER), TD_OK);
  world_close(&w);
  assert_int_equal(c.n_done, 1);
  assert_int_equal(c.done.reason, TD_DONE_LOST);
}

// Workers die meanwhile: pages that were loaded are there, and those that were not are read.
TEST(deaths_while_it_loads) {
  world w;
  world_ready(&w, 2048, 4);
  static const int32_t deadly[] = {DIE, 3, 1};
  client poison = {.backend = w.backend}, c = poison;
  assert_int_equal(submit(&poison, deadly, 3, 10), TD_OK);
  assert_int_equal(submit(&c, prompt, PROMPT, ANSWER), TD_OK);
  run_until(&w, is_idle, &w);
  assert_int_equal(poison.done.reason, TD_DONE_LOST);
  if (c.done.reason == TD_DONE_LENGTH) check_answer(&c, prompt, PROMPT, ANSWER);
  client after = {.backend = w.backend};
  run_until(&w, is_settled, &w);
  assert_int_equal(submit(&after, prompt, PROMPT, ANSWER), TD_OK);
  run_until(&w, is_done, &after);
  check_answer(&after, prompt, PROMPT, ANSWER);
  assert_int_equal(after.done.n_cached, N_FULL * PAGE);
  world_close(&w);
}

// Pages in a device's memory are not for the disk.
TEST(none_with_a_device) {
  if (is_split) skip();
  device = "cuda";
  world w;
  world_ready(&w, 2048, 4);
  client c = {.backend = w.backend};
  assert_int_equal(submit(&c, prompt, PROMPT, ANSWER), TD_OK);
  run_until(&w, is_done, &c);
  check_answer(&c, prompt, PROMPT, ANSWER);
  assert_int_equal(c.done.n_cached, 0);
  world_close(&w);
  device = "cpu";
}

// ---- a full disk --------------------------------------------------------------------------------

static uint64_t disk_bytes = UINT64_MAX; // most that the records may take

static uint64_t bytes_of_records(void) {
  uint64_t n_bytes = 0;
  DIR *dir = opendir(folder);
  if (!dir) return 0;
  for (const struct dirent *d; (d = readdir(dir));) {
    struct stat info;
    size_t len = strlen(d->d_name), n_suffix = strlen(TD_KV_RECORD_SUFFIX);
    bool is_record = len > n_suffix && !strcmp(d->d_name + len - n_suffix, TD_KV_RECORD_SUFFIX);
    if (is_record && fstatat(dirfd(dir), d->d_name, &info, 0) == 0) {
      n_bytes += (uint64_t)info.st_size;
    }
  }
  closedir(dir);
  return n_bytes;
}

#ifndef __SANITIZE_THREAD__ // which has to see every write
// In the place of libc's: files may grow only as long as the disk has room.
ssize_t write(int fd, const void *bytes, size_t n) {
  struct stat info;
  if (disk_bytes != UINT64_MAX && fstat(fd, &info) == 0 && S_ISREG(info.st_mode) &&
      bytes_of_records() + n > disk_bytes) {
    errno = ENOSPC;
    return -1;
  }
  return syscall(SYS_write, fd, bytes, n);
}
#endif

// What was used least gives way there to what is used, while serving and at the end.
TEST(a_full_disk) {
#ifdef __SANITIZE_THREAD__
  skip();
#endif
  enum { N = 6, N_RECORDS = 10, SHORT = 500, N_PAGES = SHORT / PAGE };
  static int32_t prompts[N][SHORT];
  static client clients[N];
  disk_bytes = bytes_of_records() / N_FULL * N_RECORDS; // less than there is
  kv_tokens = 16 * PAGE;
  world w;
  world_ready(&w, 1024, 2);
  for (uint32_t i = 0; i < N; i++) {
    clients[i] = (client){.backend = w.backend};
    make_prompt(prompts[i], SHORT, 100 + i);
    assert_int_equal(submit(&clients[i], prompts[i], SHORT, ANSWER), TD_OK);
    run_until(&w, is_done, &clients[i]);
  }
  world_close(&w);
  td_kv_dir_close(kv_dir);
  open_dir();
  assert_in_range(bytes_of_records(), disk_bytes / 2, disk_bytes);
  assert_int_equal(td_kv_dir_bytes(kv_dir), bytes_of_records());
  kv_tokens = 0;
  world_ready(&w, 1024, 2);
  client again = {.backend = w.backend};
  assert_int_equal(submit(&again, prompts[N - 1], SHORT, ANSWER), TD_OK);
  run_until(&w, is_done, &again);
  check_answer(&again, prompts[N - 1], SHORT, ANSWER);
  assert_int_equal(again.done.n_cached, N_PAGES * PAGE);
  disk_bytes = UINT64_MAX;
  world_close(&w);
}

// A directory with room for fewer pages than memory keeps ready: what is written fits it, nothing
// is written twice, and once the backend is idle nothing is written at all.
static bool is_still(void *ctx) {
  static uint64_t written_bytes;
  static int n_same;
  const uint64_t now = td_backend_kv_disk(((world *)ctx)->backend).written_bytes;
  n_same = now == written_bytes ? n_same + 1 : 0;
  written_bytes = now;
  return n_same >= 20; // turns of the loop, at most 10 ms each
}

TEST(a_small_directory) {
  enum { N = 6, N_RECORDS = 5, SHORT = 500 };
  static int32_t prompts[N][SHORT];
  static client clients[N];
  kv_tokens = 40 * PAGE;
  td_kv_dir_limit(kv_dir, bytes_of_records() / N_FULL * N_RECORDS);
  world w;
  world_ready(&w, 1024, 2);
  for (uint32_t i = 0; i < N; i++) {
    clients[i] = (client){.backend = w.backend};
    make_prompt(prompts[i], SHORT, 200 + i);
    assert_int_equal(submit(&clients[i], prompts[i], SHORT, ANSWER), TD_OK);
    run_until(&w, is_done, &clients[i]);
  }
  run_until(&w, is_still, &w);
  const td_kv_disk_stats stats = td_backend_kv_disk(w.backend);
  assert_true(stats.written_bytes > 0 && stats.bytes <= td_kv_dir_max_bytes(kv_dir));
  assert_int_equal(stats.rewritten_bytes, 0);
  assert_true(td_kv_disk_amplification(&stats) == 1);
  kv_tokens = 0;
  world_close(&w);
  td_kv_dir_close(kv_dir);
  open_dir();
}

int main(int argc, char **argv) {
  if (argc > 1 && strcmp(argv[1], "worker") == 0) return td_worker_main(argc, argv);
  const int n_failed = testing_main(argc, argv); // one worker
  is_split = true;
  return n_failed + testing_main(argc, argv);
}
