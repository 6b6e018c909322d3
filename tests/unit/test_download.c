// tests/unit/test_download.c - a download beside another process that downloads the same file.
// CTest: no-tsan
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "hub/hub_impl.h"
#include "unit/testing.h"

#define HASH "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824" // of "hello"

static char folder[64], begun[256], whole[256];
static void (*other_process)(void); // what it does before the next lock

// Called instead of the C library's.
int flock(int fd, int operation);
int flock(int fd, int operation) {
  void (*act)(void) = other_process;
  other_process = NULL;
  if (act) act();
  return (int)syscall(SYS_flock, fd, operation);
}

static void put(const char *path, const char *text) {
  FILE *f = fopen(path, "w");
  assert_non_null(f);
  fputs(text, f);
  fclose(f);
}

static void finish(void) {
  assert_int_equal(rename(begun, whole), 0);
}

static void begin_again(void) {
  assert_int_equal(unlink(begun), 0);
  put(begun, "hello");
}

// With what has come so far, while the other process acts between opening it and locking it. No
// server is asked.
static void check(const char *so_far, void (*act)(void)) {
  char text[16] = "";
  td_err err = {0};
  td_hub_file file = {.path = "file", .hash = HASH, .is_sha256 = true, .n_bytes = 5};
  const td_hub_listing listing = {.files = &file, .n = 1};
  put(begun, so_far);
  other_process = act;
  const td_status st = td_hub_download_all(
      &(td_hub_download){.base_url = "", .folder = folder, .listing = &listing}, &err);
  if (st != TD_OK) print_error("%s\n", err.msg);
  assert_int_equal(st, TD_OK);
  assert_null(other_process);
  FILE *f = fopen(whole, "r");
  assert_non_null(f);
  assert_int_equal(fread(text, 1, sizeof text, f), 5);
  fclose(f);
  assert_string_equal(text, "hello");
  assert_int_equal(access(begun, F_OK), -1);
  assert_int_equal(unlink(whole), 0);
}

static int make_folder(void **state) {
  (void)state;
  snprintf(folder, sizeof folder, "/tmp/tandem-download-XXXXXX");
  if (!mkdtemp(folder)) return -1;
  snprintf(whole, sizeof whole, "%s/blobs", folder);
  if (mkdir(whole, 0755) != 0) return -1;
  snprintf(whole, sizeof whole, "%s/blobs/" HASH, folder);
  snprintf(begun, sizeof begun, "%s/blobs/" HASH ".incomplete", folder);
  return 0;
}

static int remove_folder(void **state) {
  (void)state;
  snprintf(whole, sizeof whole, "%s/blobs", folder);
  return rmdir(whole) || rmdir(folder);
}

TEST(another_process, make_folder, remove_folder) {
  check("hello", NULL);
  check("hello", finish);
  check("jello", begin_again);
}
