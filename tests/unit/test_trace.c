// tests/unit/test_trace.c - recording into lanes, and the file that is written from them: threads,
// full rings, processes that die, disks that fill up.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cjson/cJSON.h>
#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/fs.h"
#include "base/trace.h"
#include "runtime/trace_file.h"
#include "shm/segment.h"
#include "unit/testing.h"

// ---- lanes --------------------------------------------------------------------------------------

static td_trace_memory *memory;

static int start(void **state) {
  (void)state;
  memory = calloc(1, sizeof *memory);
  return memory && td_trace_start(memory, "test") ? 0 : -1;
}

static int stop(void **state) {
  (void)state;
  td_trace_stop();
  free(memory);
  return 0;
}

TEST(off) {
  assert_false(td_trace_is_on);
  assert_int_equal(td_trace_begin(), 0);
  td_trace_span(td_trace_begin(), TD_TRACE_STEP, 1, 2); // nowhere to go, and no harm
  td_trace_mark(TD_TRACE_SEND, 1, 2);
}

TEST(round_trip, start, stop) {
  uint64_t begin_ns = td_trace_begin();
  assert_true(begin_ns > 0);
  td_trace_mark(TD_TRACE_SEND, 3, 4);
  td_trace_span(begin_ns, TD_TRACE_STEP, 1, 2);
  td_trace_async(begin_ns, TD_TRACE_REQUEST, 5, 6);
  td_trace_record r[8];
  td_trace_lane *lane = &memory->lanes[0];
  assert_int_equal(lane->pid, getpid());
  assert_string_equal(lane->process, "test");
  assert_string_equal(lane->thread, "main");
  assert_int_equal(td_trace_take(lane, r, 2), 2);
  assert_int_equal(r[0].shape, TD_TRACE_MARK);
  assert_int_equal(r[0].event, TD_TRACE_SEND);
  assert_true(r[0].a == 3 && r[0].b == 4 && r[0].begin_ns >= begin_ns);
  assert_true(r[1].shape == TD_TRACE_SPAN && r[1].begin_ns == begin_ns);
  assert_true(r[1].end_ns >= r[0].end_ns);
  assert_int_equal(td_trace_take(lane, r, 8), 1);
  assert_true(r[0].shape == TD_TRACE_ASYNC && r[0].b == 6);
  assert_int_equal(td_trace_take(lane, r, 8), 0);
}

TEST(full_rings_drop, start, stop) {
  for (uint64_t i = 0; i < TD_TRACE_RECORDS + 10; i++)
    td_trace_mark(TD_TRACE_SEND, 0, i);
  td_trace_lane *lane = &memory->lanes[0];
  assert_int_equal(lane->n_dropped, 10);
  static td_trace_record r[TD_TRACE_RECORDS];
  assert_int_equal(td_trace_take(lane, r, TD_TRACE_RECORDS), TD_TRACE_RECORDS);
  assert_int_equal(r[TD_TRACE_RECORDS - 1].b, TD_TRACE_RECORDS - 1); // the oldest stay
  td_trace_mark(TD_TRACE_SEND, 0, 77);
  assert_int_equal(td_trace_take(lane, r, TD_TRACE_RECORDS), 1);
  assert_int_equal(r[0].b, 77);
}

TEST(nonsense_is_skipped, start, stop) {
  td_trace_mark(TD_TRACE_SEND, 0, 1);
  td_trace_mark(TD_TRACE_SEND, 0, 2);
  td_trace_mark(TD_TRACE_SEND, 0, 3);
  td_trace_lane *lane = &memory->lanes[0];
  lane->records[0].event = TD_TRACE_N_EVENTS;
  lane->records[1].begin_ns = lane->records[1].end_ns + 1;
  td_trace_record r[8];
  assert_int_equal(td_trace_take(lane, r, 8), 1);
  assert_int_equal(r[0].b, 3);
  lane->head = lane->tail + TD_TRACE_RECORDS + 1;
  assert_int_equal(td_trace_take(lane, r, 8), 0);
  assert_int_equal(lane->head, lane->tail);
}

static void *mark_once(void *arg) {
  td_trace_mark(TD_TRACE_SEND, 0, *(uint64_t *)arg);
  return NULL;
}

TEST(lanes_run_out_and_come_back, start, stop) {
  for (uint64_t i = 0; i < TD_TRACE_LANES + 3; i++) {
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, mark_once, &i), 0);
    pthread_join(thread, NULL);
  }
  assert_int_equal(memory->n_unplaced, 3);
  td_trace_free_lane(&memory->lanes[5]);
  uint64_t value = 99;
  pthread_t thread;
  assert_int_equal(pthread_create(&thread, NULL, mark_once, &value), 0);
  pthread_join(thread, NULL);
  td_trace_record r[2];
  assert_int_equal(td_trace_take(&memory->lanes[5], r, 2), 1);
  assert_int_equal(r[0].b, 99);
}

// A writer and a reader at once: every record comes whole and in order, or is counted as dropped.
enum { N_RACED = 200000 };

static void *write_many(void *arg) {
  (void)arg;
  for (uint64_t i = 1; i <= N_RACED; i++)
    td_trace_put(&(td_trace_record){.begin_ns = i, .end_ns = i, .b = i, .a = (uint32_t)i});
  return NULL;
}

TEST(race, start, stop) {
  pthread_t thread;
  assert_int_equal(pthread_create(&thread, NULL, write_many, NULL), 0);
  td_trace_lane *lane = &memory->lanes[0];
  uint64_t last = 0, n = 0;
  while (n + atomic_load(&lane->n_dropped) < N_RACED) {
    td_trace_record r[256];
    size_t n_taken = td_trace_take(lane, r, TD_COUNT(r));
    for (size_t i = 0; i < n_taken; i++) {
      assert_true(r[i].b > last && r[i].begin_ns == r[i].b && r[i].a == (uint32_t)r[i].b);
      last = r[i].b;
    }
    n += n_taken;
  }
  pthread_join(thread, NULL);
}

// ---- the file -----------------------------------------------------------------------------------

static char path[64];

static int make_path(void **state) {
  (void)state;
  snprintf(path, sizeof path, "/tmp/td_trace_XXXXXX");
  int fd = mkstemp(path);
  return fd < 0 ? -1 : close(fd);
}

static int remove_path(void **state) {
  (void)state;
  return unlink(path);
}

static cJSON *read_trace(void) {
  td_buf text = TD_BUF_INIT;
  td_err err;
  assert_int_equal(td_file_read(&text, path, 1 << 28, &err), TD_OK);
  cJSON *trace = cJSON_Parse(td_buf_text(&text));
  td_buf_free(&text);
  assert_true(cJSON_IsArray(trace));
  return trace;
}

static const cJSON *find(const cJSON *trace, const char *name) {
  const cJSON *event;
  cJSON_ArrayForEach(event, trace) {
    if (!strcmp(cJSON_GetStringValue(cJSON_GetObjectItem(event, "name")), name)) return event;
  }
  return NULL;
}

static double number(const cJSON *event, const char *key) {
  const cJSON *item = cJSON_GetObjectItem(event, key);
  if (!item) item = cJSON_GetObjectItem(cJSON_GetObjectItem(event, "args"), key);
  assert_true(cJSON_IsNumber(item));
  return item->valuedouble;
}

static td_trace_file *open_file(void) {
  td_trace_file *file;
  td_err err;
  if (td_trace_file_open(&file, path, "front", &err) != TD_OK) fail_msg("%s", err.msg);
  return file;
}

TEST(file, make_path, remove_path) {
  td_trace_file *file = open_file();
  uint64_t outer = td_trace_begin(), inner = td_trace_begin();
  td_trace_span(inner, TD_TRACE_OP_MOE, 7, 0);
  td_trace_span(outer, TD_TRACE_STEP, 7, 2);
  td_trace_async(outer, TD_TRACE_REQUEST, 12, 34);
  td_trace_mark(TD_TRACE_SEND, 1, 34);
  td_trace_file_close(file);
  assert_false(td_trace_is_on);
  cJSON *trace = read_trace();
  const cJSON *step = find(trace, "step"), *moe = find(trace, "moe");
  assert_true(number(step, "ts") <= number(moe, "ts"));
  assert_true(number(moe, "ts") + number(moe, "dur") <= number(step, "ts") + number(step, "dur"));
  assert_true(number(step, "tokens") == 7 && number(step, "sequences") == 2);
  assert_true(number(step, "pid") == getpid());
  assert_non_null(find(trace, "send submit"));
  const cJSON *begin = find(trace, "request"), *end = begin->next;
  assert_string_equal(cJSON_GetObjectItem(begin, "ph")->valuestring, "b");
  assert_string_equal(cJSON_GetObjectItem(end, "ph")->valuestring, "e");
  assert_string_equal(cJSON_GetObjectItem(begin, "id")->valuestring, "34");
  const cJSON *name = cJSON_GetObjectItem(find(trace, "process_name"), "args");
  assert_string_equal(cJSON_GetObjectItem(name, "name")->valuestring, "front");
  assert_true(number(find(trace, "end of trace"), "dropped") == 0);
  cJSON_Delete(trace);
}

TEST(dropped_events_are_told, make_path, remove_path) {
  td_trace_file *file = open_file();
  for (uint64_t i = 0; i < 20 * (uint64_t)TD_TRACE_RECORDS; i++)
    td_trace_mark(TD_TRACE_RECEIVE, 0, i);
  td_trace_file_close(file);
  cJSON *trace = read_trace();
  double n_dropped = number(find(trace, "end of trace"), "dropped"), n_told = 0, n_kept = 0;
  const cJSON *event;
  cJSON_ArrayForEach(event, trace) {
    const char *name = cJSON_GetObjectItem(event, "name")->valuestring;
    if (!strcmp(name, "dropped")) n_told += number(event, "events");
    if (!strcmp(name, "receive message")) n_kept++;
  }
  assert_true(n_dropped > 0 && n_told == n_dropped);
  assert_true(n_kept + n_dropped == 20 * TD_TRACE_RECORDS);
  cJSON_Delete(trace);
}

// The child records until it is killed.
static pid_t start_child(const td_trace_file *file) {
  pid_t child = fork();
  assert_true(child >= 0);
  if (child > 0) return child;
  td_segment segment;
  td_err err;
  if (td_segment_attach(&segment, td_trace_file_fd(file), &err) != TD_OK) _exit(1);
  if (!td_trace_start(segment.base, "worker")) _exit(1);
  for (;;) {
    uint64_t begin_ns = td_trace_begin();
    usleep(1000);
    td_trace_span(begin_ns, TD_TRACE_STEP, 1, 1);
  }
}

TEST(a_process_dies, make_path, remove_path) {
  td_trace_file *file = open_file();
  pid_t child = start_child(file);
  usleep(150000);
  kill(child, SIGKILL);
  waitpid(child, NULL, 0);
  usleep(150000);              // longer than the file lags behind
  cJSON *trace = read_trace(); // whole, though nobody closed it
  const cJSON *step = find(trace, "step");
  assert_non_null(step);
  assert_true(number(step, "pid") == child);
  cJSON_Delete(trace);
  td_segment segment;
  td_err err;
  assert_int_equal(td_segment_attach(&segment, dup(td_trace_file_fd(file)), &err), TD_OK);
  const td_trace_memory *m = segment.base;
  for (size_t i = 0; i < TD_TRACE_LANES; i++)
    assert_true(m->lanes[i].pid != (uint32_t)child); // its lane is free again
  td_segment_close(&segment);
  td_trace_file_close(file);
  cJSON_Delete(read_trace());
}

TEST(a_full_disk, make_path, remove_path) {
  struct rlimit before, small;
  assert_int_equal(getrlimit(RLIMIT_FSIZE, &before), 0);
  signal(SIGXFSZ, SIG_IGN);
  td_trace_file *file = open_file();
  small = (struct rlimit){.rlim_cur = 5000, .rlim_max = before.rlim_max};
  td_trace_mark(TD_TRACE_SEND, 1, 1);
  usleep(120000); // this one is written
  setrlimit(RLIMIT_FSIZE, &small);
  for (uint64_t i = 0; i < 1000; i++)
    td_trace_mark(TD_TRACE_RECEIVE, 1, i);
  td_trace_file_close(file);
  setrlimit(RLIMIT_FSIZE, &before);
  cJSON *trace = read_trace();
  assert_non_null(find(trace, "send submit"));
  assert_null(find(trace, "end of trace"));
  cJSON_Delete(trace);
}

TEST(bad_paths) {
  static const char *const bad[] = {"/nonexistent/trace.json", "/dev/null", "/tmp"};
  for (size_t i = 0; i < TD_COUNT(bad); i++) {
    td_trace_file *file;
    td_err err;
    assert_int_equal(td_trace_file_open(&file, bad[i], "front", &err), TD_EIO);
    assert_null(file);
    assert_non_null(strstr(err.msg, bad[i]));
  }
  assert_int_equal(td_trace_file_fd(NULL), 0);
  td_trace_file_close(NULL);
}
