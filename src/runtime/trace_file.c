// src/runtime/trace_file.c - a thread that drains the trace lanes 20 times a second.
#include "runtime/trace_file.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/buf.h"
#include "base/json_write.h"
#include "base/log.h"
#include "base/thread.h"
#include "base/trace.h"
#include "shm/segment.h"
#include "tandem/wire.h"

#define PERIOD_NS   50000000
#define TAKEN       1024
#define FLUSH_BYTES (1u << 20)
#define CLOSING     "\n]\n"

typedef struct {
  uint32_t pid, tid;  // as last written to the file
  uint64_t n_dropped; // as last reported
} lane_state;

struct td_trace_file {
  char *path;
  int fd;
  off_t end;   // offset of the closing bracket
  bool failed; // a write failed; nothing more is written
  td_segment segment;
  td_trace_memory *memory;
  lane_state told[TD_TRACE_LANES];
  uint64_t n_dropped, n_events;
  td_buf text;
  pthread_t thread;
  pthread_mutex_t lock; // guards stopping
  pthread_cond_t wake;
  bool stopping;
};

static const struct {
  const char *name, *category, *a, *b;
} events[TD_TRACE_N_EVENTS] = {
#define X(id, name, category, a, b) {name, category, a, b},
    TD_TRACE_EVENTS(X)
#undef X
};

static const char *const messages[] = {
    [TD_MSG_SUBMIT] = "submit", [TD_MSG_PAGES] = "pages",         [TD_MSG_TOKENS] = "tokens",
    [TD_MSG_DRY] = "dry",       [TD_MSG_IMAGES] = "images",       [TD_MSG_BIAS] = "bias",
    [TD_MSG_CANCEL] = "cancel", [TD_MSG_SHUTDOWN] = "shutdown",   [TD_MSG_READY] = "ready",
    [TD_MSG_FATAL] = "fatal",   [TD_MSG_PROGRESS] = "progress",   [TD_MSG_TOKEN] = "token",
    [TD_MSG_DONE] = "done",     [TD_MSG_HEARTBEAT] = "heartbeat",
};

static const char *message_name(uint32_t kind) {
  return kind < TD_COUNT(messages) && messages[kind] ? messages[kind] : "message";
}

// ---- the file ---------------------------------------------------------------------------------

static bool write_at(int fd, const char *bytes, size_t len, off_t at) {
  while (len) {
    ssize_t n = pwrite(fd, bytes, len, at);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    bytes += n;
    at += n;
    len -= (size_t)n;
  }
  return true;
}

// Overwrites the closing bracket with the text and a new bracket. If that fails, the file is
// truncated to its last valid state.
static void flush(td_trace_file *f) {
  td_buf *text = &f->text;
  if (!text->len || f->failed) {
    td_buf_clear(text);
    return;
  }
  size_t len = text->len;
  td_buf_str(text, CLOSING);
  if (!text->failed && write_at(f->fd, text->data, text->len, f->end)) {
    f->end += (off_t)len;
  } else {
    int code = text->failed ? ENOMEM : errno;
    f->failed = true;
    bool is_whole = ftruncate(f->fd, f->end) == 0 &&
                    write_at(f->fd, CLOSING, sizeof CLOSING - 1, f->end);
    td_warn("%s: %s: the trace ends here%s", f->path, strerror(code),
            is_whole ? "" : ", and its end is damaged");
  }
  td_buf_clear(text);
}

// ---- events -----------------------------------------------------------------------------------

// Begins an event; the caller appends ",\"key\":..." and a closing brace.
static void begin_event(td_trace_file *f, const char *name, const char *phase,
                        const td_trace_lane *lane) {
  td_buf_printf(&f->text, "%s{\"name\":\"%s\",\"ph\":\"%s\",\"pid\":%u,\"tid\":%u",
                f->n_events++ ? ",\n" : "", name, phase,
                atomic_load_explicit(&lane->pid, memory_order_relaxed), lane->tid);
}

static void put_time(td_buf *out, const char *key, uint64_t ns) {
  td_buf_printf(out, ",\"%s\":%llu.%03u", key, (unsigned long long)(ns / 1000),
                (unsigned)(ns % 1000));
}

static void put_args(td_buf *out, const td_trace_record *r) {
  const char *a = events[r->event].a, *b = events[r->event].b;
  td_buf_str(out, ",\"args\":{");
  if (a) td_buf_printf(out, "\"%s\":%u", a, r->a);
  if (b) td_buf_printf(out, "%s\"%s\":%llu", a ? "," : "", b, (unsigned long long)r->b);
  td_buf_str(out, "}}");
}

static void put_async(td_trace_file *f, const td_trace_lane *lane, const td_trace_record *r) {
  static const char *const phases[] = {"b", "e"};
  for (int i = 0; i < 2; i++) {
    begin_event(f, events[r->event].name, phases[i], lane);
    td_buf_printf(&f->text, ",\"cat\":\"%s\",\"id\":\"%llu\"", events[r->event].category,
                  (unsigned long long)r->b);
    put_time(&f->text, "ts", i == 0 ? r->begin_ns : r->end_ns);
    put_args(&f->text, r);
  }
}

static void put_record(td_trace_file *f, const td_trace_lane *lane, const td_trace_record *r) {
  if (r->shape == TD_TRACE_ASYNC) {
    put_async(f, lane, r);
    return;
  }
  bool is_message = r->event == TD_TRACE_SEND || r->event == TD_TRACE_RECEIVE;
  char name[64];
  snprintf(name, sizeof name, "%s%s%s", events[r->event].name, is_message ? " " : "",
           is_message ? message_name(r->a) : "");
  begin_event(f, name, r->shape == TD_TRACE_SPAN ? "X" : "i", lane);
  td_buf_printf(&f->text, ",\"cat\":\"%s\"", events[r->event].category);
  put_time(&f->text, "ts", r->begin_ns);
  if (r->shape == TD_TRACE_SPAN)
    put_time(&f->text, "dur", r->end_ns - r->begin_ns);
  else
    td_buf_str(&f->text, ",\"s\":\"t\"");
  put_args(&f->text, r);
}

static void put_name(td_trace_file *f, const td_trace_lane *lane, const char *what,
                     const char *name, size_t max) {
  begin_event(f, what, "M", lane);
  td_buf_str(&f->text, ",\"args\":{\"name\":");
  td_json_quote(&f->text, name, strnlen(name, max));
  td_buf_str(&f->text, "}}");
}

// ---- lanes ------------------------------------------------------------------------------------

static void announce(td_trace_file *f, const td_trace_lane *lane, lane_state *told) {
  uint32_t pid = atomic_load_explicit(&lane->pid, memory_order_relaxed);
  if (told->pid == pid && told->tid == lane->tid) return;
  *told = (lane_state){.pid = pid, .tid = lane->tid};
  put_name(f, lane, "process_name", lane->process, sizeof lane->process);
  put_name(f, lane, "thread_name", lane->thread, sizeof lane->thread);
}

// Takes at most one ring's capacity, so that a busy thread does not keep the others waiting.
static void drain_lane(td_trace_file *f, td_trace_lane *lane, lane_state *told) {
  td_trace_record records[TAKEN];
  for (size_t k = 0; k < TD_TRACE_RECORDS / TAKEN; k++) {
    size_t n = td_trace_take(lane, records, TAKEN);
    if (n == 0) break;
    announce(f, lane, told);
    for (size_t i = 0; i < n; i++)
      put_record(f, lane, &records[i]);
    if (f->text.len >= FLUSH_BYTES) flush(f);
  }
  uint64_t n_dropped = atomic_load_explicit(&lane->n_dropped, memory_order_acquire); // partner: put
  if (n_dropped == told->n_dropped) return;
  announce(f, lane, told);
  f->n_dropped += n_dropped - told->n_dropped;
  begin_event(f, "dropped", "i", lane);
  put_time(&f->text, "ts", td_clock_ns());
  td_buf_printf(&f->text, ",\"s\":\"t\",\"args\":{\"events\":%llu}}",
                (unsigned long long)(n_dropped - told->n_dropped));
  told->n_dropped = n_dropped;
}

static void drain(td_trace_file *f) {
  for (size_t i = 0; i < TD_TRACE_LANES; i++) {
    td_trace_lane *lane = &f->memory->lanes[i];
    uint32_t pid = atomic_load_explicit(&lane->pid, memory_order_acquire); // partner: claim
    if (!pid) continue;
    // checked before draining for the last time
    bool is_dead = kill((pid_t)pid, 0) != 0 && errno == ESRCH;
    drain_lane(f, lane, &f->told[i]);
    if (!is_dead) continue;
    f->told[i] = (lane_state){0};
    td_trace_free_lane(lane);
  }
  flush(f);
}

// ---- the thread -------------------------------------------------------------------------------

static void *collect(void *arg) {
  td_trace_file *f = arg;
  pthread_mutex_lock(&f->lock);
  while (!f->stopping) {
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += PERIOD_NS;
    if (until.tv_nsec >= 1000000000) {
      until.tv_nsec -= 1000000000;
      until.tv_sec++;
    }
    pthread_cond_timedwait(&f->wake, &f->lock, &until);
    pthread_mutex_unlock(&f->lock);
    drain(f);
    pthread_mutex_lock(&f->lock);
  }
  pthread_mutex_unlock(&f->lock);
  return NULL;
}

static void put_end(td_trace_file *f) {
  f->n_dropped += atomic_load_explicit(&f->memory->n_unplaced, memory_order_relaxed);
  td_buf_printf(&f->text, "%s{\"name\":\"end of trace\",\"ph\":\"i\",\"pid\":%d,\"tid\":%d",
                f->n_events++ ? ",\n" : "", (int)getpid(), (int)getpid());
  put_time(&f->text, "ts", td_clock_ns());
  td_buf_printf(&f->text, ",\"s\":\"g\",\"args\":{\"dropped\":%llu}}",
                (unsigned long long)f->n_dropped);
}

// ---- open and close ---------------------------------------------------------------------------

static void free_file(td_trace_file *f) {
  td_segment_close(&f->segment);
  if (f->fd >= 0) close(f->fd);
  td_buf_free(&f->text);
  free(f->path);
  free(f);
}

static td_status create(td_trace_file *f, td_err *err) {
  struct stat info;
  f->fd = open(f->path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NONBLOCK, 0644);
  if (f->fd < 0 || fstat(f->fd, &info) != 0)
    return td_fail(err, TD_EIO, "--trace %s: cannot create: %s", f->path, strerror(errno));
  if (!S_ISREG(info.st_mode))
    return td_fail(err, TD_EIO, "--trace %s: not a regular file", f->path);
  f->end = 2;
  if (!write_at(f->fd, "[\n" CLOSING, 2 + sizeof CLOSING - 1, 0))
    return td_fail(err, TD_EIO, "--trace %s: cannot write: %s", f->path, strerror(errno));
  return td_segment_create(&f->segment, "tandem-trace", sizeof(td_trace_memory), err);
}

static td_status start(td_trace_file *f, const char *process, td_err *err) {
  td_status st = create(f, err);
  if (st != TD_OK) return st;
  f->memory = f->segment.base;
  TD_CHECK(td_trace_start(f->memory, process));
  pthread_mutex_init(&f->lock, NULL);
  pthread_cond_init(&f->wake, NULL);
  if (td_thread_start(&f->thread, collect, f) == 0) return TD_OK;
  td_trace_stop();
  return td_fail(err, TD_ENOMEM, "--trace: cannot start a thread");
}

td_status td_trace_file_open(td_trace_file **out, const char *path, const char *process,
                             td_err *err) {
  *out = NULL;
  td_trace_file *f = calloc(1, sizeof *f);
  if (!f) return td_fail(err, TD_ENOMEM, "out of memory");
  f->fd = -1;
  f->segment = TD_SEGMENT_CLOSED;
  f->path = strdup(path);
  td_status st = f->path ? start(f, process, err) : td_fail(err, TD_ENOMEM, "out of memory");
  if (st != TD_OK) {
    free_file(f);
    return st;
  }
  *out = f;
  return TD_OK;
}

int td_trace_file_fd(const td_trace_file *f) {
  return f ? f->segment.fd : 0;
}

void td_trace_file_close(td_trace_file *f) {
  if (!f) return;
  td_trace_stop();
  pthread_mutex_lock(&f->lock);
  f->stopping = true;
  pthread_cond_signal(&f->wake);
  pthread_mutex_unlock(&f->lock);
  pthread_join(f->thread, NULL);
  drain(f);
  put_end(f);
  flush(f);
  pthread_cond_destroy(&f->wake);
  pthread_mutex_destroy(&f->lock);
  free_file(f);
}
