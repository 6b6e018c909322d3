// tests/unit/test_api_keys.c - files of API keys, and who is let in.
// CTest: no-tsan
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "front/api_keys.h"
#include "unit/testing.h"

static char path[] = "/tmp/td_test_api_keys_XXXXXX";

static td_status read_text(td_api_keys *keys, const char *one, const char *text, td_err *err) {
  FILE *file = fopen(path, "w");
  assert_non_null(file);
  fputs(text, file);
  assert_int_equal(fclose(file), 0);
  return td_api_keys_read(keys, one, path, err);
}

TEST(who_is_let_in) {
  td_api_keys keys;
  td_err err;
  td_api_caller caller, other;
  const char *text = "# ours\nalpha\n\n  beta\t 20 # pays\r\ngamma 1";
  assert_int_equal(read_text(&keys, "first", text, &err), TD_OK);
  assert_int_equal(keys.n, 4);
  assert_true(td_api_keys_check(&keys, "Bearer beta", 7, &caller));
  assert_int_equal(caller.weight, 20);
  assert_true(td_api_keys_check(&keys, "bearer  gamma", 7, &other));
  assert_int_equal(other.weight, 1);
  assert_true(other.tenant != caller.tenant);
  assert_true(td_api_keys_check(&keys, "Bearer first", 7, &other));
  static const char *const wrong[] = {"Bearer bet", "Bearer betaa", "Bearer ",        "Bearer",
                                      "beta",       "Basic beta",   "Bearer beta 20", "Bearer #"};
  for (size_t i = 0; i < TD_COUNT(wrong); i++)
    assert_false(td_api_keys_check(&keys, wrong[i], 7, &caller));
  assert_false(td_api_keys_check(&keys, NULL, 7, &caller));
  td_api_keys_free(&keys);
}

// Without keys everybody is let in, and a peer is the same whatever token it sends.
TEST(without_keys) {
  td_api_keys keys;
  td_err err;
  td_api_caller a, again, nobody, other;
  assert_int_equal(td_api_keys_read(&keys, NULL, NULL, &err), TD_OK);
  assert_true(td_api_keys_check(&keys, "Bearer a", 1, &a));
  assert_true(td_api_keys_check(&keys, "Bearer b", 1, &again));
  assert_true(td_api_keys_check(&keys, NULL, 1, &nobody));
  assert_true(td_api_keys_check(&keys, "Bearer a", 2, &other));
  assert_true(a.tenant == again.tenant && a.tenant == nobody.tenant && a.tenant != other.tenant);
  td_api_keys_free(&keys);
}

TEST(bad_files) {
  static const char *const bad[] = {"",           "# nothing\n\n", "a 0",   "a 1001",
                                    "ok\na -1\n", "a x",           "a 1 2", "a 1x"};
  for (size_t i = 0; i < TD_COUNT(bad); i++) {
    td_api_keys keys;
    td_err err = {0};
    assert_int_equal(read_text(&keys, "one", bad[i], &err), TD_EINVAL);
    assert_non_null(strstr(err.msg, path));
    assert_int_equal(strstr(err.msg, ":2:") != NULL, i == 4);
    td_api_keys_free(&keys);
  }
}

int before_all(void **state) {
  (void)state;
  int fd = mkstemp(path);
  return fd < 0 ? -1 : close(fd);
}

int after_all(void **state) {
  (void)state;
  return unlink(path);
}
