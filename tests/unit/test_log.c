// tests/unit/test_log.c - what stands on stderr, as text and as JSON.
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include <cjson/cJSON.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/log.h"
#include "base/status.h"
#include "unit/testing.h"

// What fn(ctx) writes to stderr, one read: every message is one write.
static char said[16384];
static void listen_to(void (*fn)(void *ctx), void *ctx) {
  int ends[2], before = dup(STDERR_FILENO);
  assert_int_equal(pipe(ends), 0);
  dup2(ends[1], STDERR_FILENO);
  close(ends[1]);
  fn(ctx);
  dup2(before, STDERR_FILENO);
  close(before);
  ssize_t n = read(ends[0], said, sizeof said - 1);
  close(ends[0]);
  said[n > 0 ? n : 0] = '\0';
}

static void set(td_log_level level, bool is_json) {
  const td_log_opts opts = {.max_level = level, .is_json = is_json, .role = "front"};
  td_log_set(&opts);
}

static void say(void *ctx) {
  td_info("%s", (const char *)ctx);
}

TEST(text) {
  set(TD_LOG_INFO, false);
  listen_to(say, "hello");
  assert_string_equal(said, "tandem: info: hello\n");
  set(TD_LOG_WARN, false);
  listen_to(say, "hello");
  assert_string_equal(said, "");
}

// The one line that was said, checked to be one.
static cJSON *line(void) {
  char *newline = strchr(said, '\n');
  assert_non_null(newline);
  assert_string_equal(newline, "\n");
  cJSON *object = cJSON_Parse(said);
  assert_non_null(object);
  return object;
}

static const char *text_of(const cJSON *object, const char *key) {
  const char *text = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(object, key));
  assert_non_null(text);
  return text;
}

TEST(json) {
  set(TD_LOG_INFO, true);
  listen_to(say, "a \"quote\",\na tab\t and \xff");
  cJSON *object = line();
  assert_string_equal(text_of(object, "msg"), "a \"quote\",\na tab\t and \xef\xbf\xbd");
  assert_string_equal(text_of(object, "level"), "info");
  assert_string_equal(text_of(object, "role"), "front");
  assert_int_equal(cJSON_GetObjectItem(object, "pid")->valueint, getpid());
  const char *ts = text_of(object, "ts"); // 2026-01-31T23:59:59.123456Z
  assert_int_equal(strlen(ts), 27);
  assert_int_equal(ts[10], 'T');
  assert_int_equal(ts[26], 'Z');
  cJSON_Delete(object);
}

TEST(long_messages_are_cut) {
  static char text[10000];
  memset(text, 'x', sizeof text - 1);
  set(TD_LOG_INFO, true);
  listen_to(say, text);
  cJSON *object = line();
  assert_int_equal(strlen(text_of(object, "msg")), 2047);
  cJSON_Delete(object);
  set(TD_LOG_INFO, false);
  listen_to(say, text);
  assert_int_equal(said[strlen(said) - 1], '\n');
}

static void forward(void *ctx) {
  td_log_forward("worker", 77, ctx, strlen(ctx));
}

TEST(forwarded_lines) {
  set(TD_LOG_ERROR, false);
  listen_to(forward, "free(): invalid pointer");
  assert_string_equal(said, "free(): invalid pointer\n");
  set(TD_LOG_ERROR, true);
  listen_to(forward, "free(): invalid pointer");
  cJSON *object = line();
  assert_string_equal(text_of(object, "msg"), "free(): invalid pointer");
  assert_string_equal(text_of(object, "role"), "worker");
  assert_string_equal(text_of(object, "level"), "error");
  assert_int_equal(cJSON_GetObjectItem(object, "pid")->valueint, 77);
  cJSON_Delete(object);
  listen_to(forward, "{\"msg\":\"its own\"}");
  assert_string_equal(said, "{\"msg\":\"its own\"}\n");
  listen_to(forward, "");
  assert_string_equal(said, "");
}

// Escape sequences, bytes that are not UTF-8 and line breaks do not reach a terminal.
TEST(control_characters_are_written_out) {
  set(TD_LOG_INFO, false);
  listen_to(say, "a\x1b[2Jb\tc\nd\re\x7f \xc2\x9b\x9b \xe2\x82\xac\xe2\x82");
  assert_string_equal(
      said, "tandem: info: a\\x1b[2Jb\tc\\x0ad\\x0de\\x7f \\x9b\\x9b \xe2\x82\xac\\xe2\\x82\n");
  listen_to(forward, "free(): \x1b]0;title\x07");
  assert_string_equal(said, "free(): \\x1b]0;title\\x07\n");
  set(TD_LOG_INFO, true);
  listen_to(forward, "{\"msg\":\"\x1b\"}");
  assert_string_equal(said, "{\"msg\":\"\\x1b\"}\n");
  listen_to(say, "\x7f\xc2\x9b");
  assert_non_null(strstr(said, "\"\\u007f\\u009b\""));
}

enum { N_LINES = 3000 }; // many more than a pipe or a socket takes

static void say_much(void *ctx) {
  (void)ctx;
  for (int i = 0; i < N_LINES; i++)
    td_info("%0100d", i);
}

static size_t read_all(int fd, char *text, size_t size) {
  size_t len = 0;
  ssize_t n;
  while (len < size - 1 && (n = recv(fd, text + len, size - 1 - len, MSG_DONTWAIT)) > 0)
    len += (size_t)n;
  while (len < size - 1 && errno == ENOTSOCK && (n = read(fd, text + len, size - 1 - len)) > 0)
    len += (size_t)n;
  text[len] = '\0';
  return len;
}

// The lines that came, and how many the log says it dropped, are all.
static void check_unread(int reading, int writing) {
  static char text[1 << 20];
  int before = dup(STDERR_FILENO), flags = fcntl(reading, F_GETFL);
  set(TD_LOG_INFO, false);
  fcntl(reading, F_SETFL, flags | O_NONBLOCK);
  dup2(writing, STDERR_FILENO);
  close(writing);
  say_much(NULL);
  size_t len = read_all(reading, text, sizeof text / 2);
  td_log_catch_up();
  td_log_catch_up(); // once
  td_info("flows again");
  assert_false(fcntl(STDERR_FILENO, F_GETFL) & O_NONBLOCK); // it may be others' as well
  dup2(before, STDERR_FILENO);
  close(before);
  read_all(reading, text + len, sizeof text / 2);
  close(reading);
  unsigned n_came = 0, n_dropped = 0, n;
  for (const char *at = text; (at = strstr(at, "tandem: info: 0")); at++)
    n_came++;
  for (const char *at = text; (at = strstr(at, "tandem: warning: ")); at++) {
    assert_int_equal(sscanf(at, "tandem: warning: %u lines", &n), 1);
    n_dropped += n;
  }
  assert_true(n_came > 100 && n_came < N_LINES);
  assert_in_range(n_came + n_dropped, N_LINES, N_LINES + 1); // one may be cut
  assert_non_null(strstr(text, " lines of the log were dropped: stderr was not read\n"));
  assert_non_null(strstr(text, "\ntandem: info: flows again\n"));
}

TEST(nobody_reads) {
  int ends[2];
  assert_int_equal(pipe(ends), 0);
  check_unread(ends[0], ends[1]);
  assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
  check_unread(ends[0], ends[1]);
}

static void break_an_invariant(void *ctx) {
  (void)ctx;
  pid_t child = fork();
  if (child == 0) TD_CHECK(1 + 1 == 3);
  int status;
  assert_int_equal(waitpid(child, &status, 0), child);
  assert_true(WIFSIGNALED(status));
}

TEST(broken_invariants_are_logged) {
  set(TD_LOG_ERROR, true);
  listen_to(break_an_invariant, NULL);
  cJSON *object = line();
  assert_non_null(strstr(text_of(object, "msg"), "broken invariant: 1 + 1 == 3"));
  cJSON_Delete(object);
}
