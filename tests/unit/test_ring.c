// tests/unit/test_ring.c - shared segments, rings and channels: in one thread, between two threads
// (ThreadSanitizer runs this too), and between two processes.
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "shm/channel.h"
#include "unit/testing.h"

typedef struct {
  td_segment segment;
  td_ring_wake wake;
  td_ring_writer writer;
  td_ring_reader reader;
} pair;

static void pair_open(pair *p, uint32_t capacity) {
  td_err err;
  assert_int_equal(td_segment_create(&p->segment, "test", td_ring_bytes(capacity), &err), TD_OK);
  p->wake = (td_ring_wake){eventfd(0, EFD_NONBLOCK), eventfd(0, EFD_NONBLOCK)};
  td_ring_format(p->segment.base, capacity);
  void *mem = p->segment.base;
  size_t n = p->segment.n_bytes;
  assert_int_equal(td_ring_writer_attach(&p->writer, mem, n, p->wake, &err), TD_OK);
  assert_int_equal(td_ring_reader_attach(&p->reader, mem, n, p->wake, &err), TD_OK);
}

static void pair_close(pair *p) {
  close(p->wake.data_fd);
  close(p->wake.space_fd);
  td_segment_close(&p->segment);
}

// A record all of whose bytes follow from its number, so that a torn one shows.
static void fill(td_wire_msg *msg, uint64_t number) {
  *msg = (td_wire_msg){.kind = TD_MSG_TOKEN, .request = number};
  memset(msg->u.bytes, (int)(number * 31 + 7), sizeof msg->u.bytes);
}

static bool is_whole(const td_wire_msg *msg, uint64_t number) {
  td_wire_msg want;
  fill(&want, number);
  return memcmp(msg, &want, sizeof want) == 0;
}

static uint64_t event_count(int fd) {
  uint64_t count = 0;
  return read(fd, &count, sizeof count) < 0 ? 0 : count;
}

TEST(full_empty_and_laps) {
  pair p;
  pair_open(&p, 4);
  td_wire_msg msg;
  uint64_t sent = 0, got = 0;
  assert_int_equal(td_ring_pop(&p.reader, &msg), TD_EAGAIN);
  for (int lap = 0; lap < 50; lap++) {
    for (int i = 0; i < 4; i++) {
      fill(&msg, sent++);
      assert_int_equal(td_ring_push(&p.writer, &msg), TD_OK);
    }
    assert_int_equal(td_ring_n_used(&p.reader.end), 4);
    assert_int_equal(td_ring_push(&p.writer, &msg), TD_EAGAIN);
    for (int i = 0; i < 4 - lap % 2; i++) {
      assert_int_equal(td_ring_pop(&p.reader, &msg), TD_OK);
      assert_true(is_whole(&msg, got++));
    }
    if (lap % 2) {
      assert_int_equal(td_ring_pop(&p.reader, &msg), TD_OK);
      assert_true(is_whole(&msg, got++));
    }
    assert_int_equal(td_ring_pop(&p.reader, &msg), TD_EAGAIN);
  }
  assert_int_equal(sent, got);
  pair_close(&p);
}

TEST(wakes_only_sleepers) {
  pair p;
  pair_open(&p, 2);
  td_wire_msg msg;
  fill(&msg, 0);
  assert_int_equal(td_ring_push(&p.writer, &msg), TD_OK);
  assert_int_equal(event_count(p.wake.data_fd), 0); // nobody slept: no signal
  assert_false(td_ring_reader_arm(&p.reader));      // there is a record: no sleep
  assert_int_equal(td_ring_pop(&p.reader, &msg), TD_OK);
  assert_true(td_ring_reader_arm(&p.reader));
  assert_int_equal(td_ring_push(&p.writer, &msg), TD_OK);
  assert_int_equal(td_ring_push(&p.writer, &msg), TD_OK);
  assert_int_equal(event_count(p.wake.data_fd), 1); // one sleep, one signal
  td_ring_reader_disarm(&p.reader);

  assert_true(td_ring_writer_arm(&p.writer)); // full
  assert_int_equal(event_count(p.wake.space_fd), 0);
  assert_int_equal(td_ring_pop(&p.reader, &msg), TD_OK);
  struct pollfd pfd = {.fd = p.wake.space_fd, .events = POLLIN};
  assert_int_equal(poll(&pfd, 1, 0), 1);
  td_ring_writer_disarm(&p.writer);
  assert_int_equal(poll(&pfd, 1, 0), 0);
  assert_false(td_ring_writer_arm(&p.writer)); // room
  pair_close(&p);
}

TEST(bad_headers_are_refused) {
  pair p;
  pair_open(&p, 8);
  td_ring_reader reader;
  td_err err;
  uint32_t *header = p.segment.base; // magic, version, capacity, slot bytes
  size_t n = p.segment.n_bytes;
  static const struct {
    int field;
    uint32_t value;
  } bad[] = {{0, 0}, {1, 99}, {2, 0}, {2, 1}, {2, 7}, {2, 16}, {2, 1u << 31}, {3, 256}};
  for (size_t i = 0; i < TD_COUNT(bad); i++) {
    uint32_t good = header[bad[i].field];
    header[bad[i].field] = bad[i].value;
    assert_int_equal(td_ring_reader_attach(&reader, header, n, p.wake, &err), TD_EFORMAT);
    header[bad[i].field] = good;
  }
  assert_int_equal(td_ring_reader_attach(&reader, header, n - 1, p.wake, &err), TD_EFORMAT);
  assert_int_equal(td_ring_reader_attach(&reader, header, 16, p.wake, &err), TD_EFORMAT);
  assert_int_equal(td_ring_reader_attach(&reader, header, n, p.wake, &err), TD_OK);
  pair_close(&p);
}

TEST(overwritten_numbers_are_noticed) {
  pair p;
  pair_open(&p, 4);
  td_wire_msg msg = {0};
  char *first_slot = (char *)p.segment.base + (td_ring_bytes(4) - 4 * 320);
  memset(first_slot, 0xa5, 8);
  assert_int_equal(td_ring_pop(&p.reader, &msg), TD_EFORMAT);
  assert_int_equal(td_ring_push(&p.writer, &msg), TD_EFORMAT);
  pair_close(&p);
}

TEST(segment_size_is_sealed) {
  td_err err;
  td_segment a, b;
  assert_int_equal(td_segment_create(&a, "test", 8192, &err), TD_OK);
  assert_int_equal(ftruncate(a.fd, 4096), -1);
  assert_int_equal(ftruncate(a.fd, 16384), -1);
  assert_int_equal(td_segment_attach(&b, dup(a.fd), &err), TD_OK);
  strcpy(a.base, "seen by both");
  assert_string_equal(b.base, "seen by both");
  td_segment_close(&b);
  td_segment_close(&a);
  td_segment_close(&a);

  int unsealed = memfd_create("unsealed", MFD_ALLOW_SEALING);
  assert_int_equal(ftruncate(unsealed, 4096), 0);
  assert_int_equal(td_segment_attach(&b, unsealed, &err), TD_EFORMAT);
  close(unsealed);
  assert_int_equal(td_segment_attach(&b, STDERR_FILENO, &err), TD_EFORMAT);
}

// ---- two threads, two processes ---------------------------------------------------------------

static void wait_readable(int fd) {
  struct pollfd pfd = {.fd = fd, .events = POLLIN};
  // A wake lost is a hang; ten seconds are the bound that makes it a failure.
  if (poll(&pfd, 1, 10000) != 1) {
    fprintf(stderr, "a wake was lost\n");
    abort();
  }
}

static void write_all(td_ring_writer *writer, uint64_t n) {
  for (uint64_t i = 0; i < n; i++) {
    td_wire_msg msg;
    fill(&msg, i);
    td_status st;
    while ((st = td_ring_push(writer, &msg)) == TD_EAGAIN) {
      if (td_ring_writer_arm(writer)) {
        wait_readable(writer->end.wake.space_fd);
        td_ring_writer_disarm(writer);
      }
    }
    if (st != TD_OK) abort();
  }
}

static bool read_all(td_ring_reader *reader, uint64_t n) {
  for (uint64_t i = 0; i < n; i++) {
    td_wire_msg msg;
    td_status st;
    while ((st = td_ring_pop(reader, &msg)) == TD_EAGAIN) {
      if (td_ring_reader_arm(reader)) {
        wait_readable(reader->end.wake.data_fd);
        td_ring_reader_disarm(reader);
      }
    }
    if (st != TD_OK || !is_whole(&msg, i)) return false;
  }
  return true;
}

#define N_RECORDS 200000

static void *writer_thread(void *arg) {
  write_all(arg, N_RECORDS);
  return NULL;
}

TEST(two_threads) {
  static const uint32_t capacities[] = {2, 8, 256};
  for (size_t i = 0; i < TD_COUNT(capacities); i++) {
    pair p;
    pair_open(&p, capacities[i]);
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, writer_thread, &p.writer), 0);
    assert_true(read_all(&p.reader, N_RECORDS));
    pthread_join(thread, NULL);
    pair_close(&p);
  }
}

// The child attaches over the descriptors, as a worker does, and sends back what it hears.
static void echo(const int *fds, uint64_t n) {
  td_err err;
  td_channel channel;
  if (td_channel_attach(&channel, fds, &err) != TD_OK) _exit(2);
  for (uint64_t i = 0; i < n; i++) {
    td_wire_msg msg;
    td_status st;
    while ((st = td_ring_pop(&channel.rx, &msg)) == TD_EAGAIN) {
      if (td_ring_reader_arm(&channel.rx)) {
        wait_readable(fds[TD_CHANNEL_DOWN_DATA]);
        td_ring_reader_disarm(&channel.rx);
      }
    }
    if (st != TD_OK || !is_whole(&msg, i)) _exit(3);
    while (td_ring_push(&channel.tx, &msg) == TD_EAGAIN) {
      if (td_ring_writer_arm(&channel.tx)) {
        wait_readable(fds[TD_CHANNEL_UP_SPACE]);
        td_ring_writer_disarm(&channel.tx);
      }
    }
  }
  td_channel_close(&channel);
  _exit(0);
}

TEST(two_processes) {
  enum { N = 20000, WINDOW = 12 };
  td_err err;
  td_channel channel;
  assert_int_equal(td_channel_create(&channel, 8, &err), TD_OK);
  pid_t pid = fork();
  assert_true(pid >= 0);
  if (pid == 0) echo(channel.fds, N);
  uint64_t sent = 0, got = 0;
  while (got < N) {
    td_wire_msg msg;
    fill(&msg, sent);
    if (sent < N && sent - got < WINDOW && td_ring_push(&channel.tx, &msg) == TD_OK) {
      sent++;
      continue;
    }
    if (td_ring_pop(&channel.rx, &msg) == TD_OK) {
      assert_true(is_whole(&msg, got++));
    } else if (td_ring_reader_arm(&channel.rx)) {
      wait_readable(channel.fds[TD_CHANNEL_UP_DATA]);
      td_ring_reader_disarm(&channel.rx);
    }
  }
  int status;
  assert_int_equal(waitpid(pid, &status, 0), pid);
  assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  td_channel_close(&channel);
  td_channel_close(&channel);
}

TEST(channel_attach_refuses_strangers) {
  td_err err;
  td_channel channel;
  int fds[TD_CHANNEL_N_FDS];
  for (int i = 0; i < TD_CHANNEL_N_FDS; i++)
    fds[i] = eventfd(0, 0);
  assert_int_equal(td_channel_attach(&channel, fds, &err), TD_EFORMAT);
  for (int i = 0; i < TD_CHANNEL_N_FDS; i++)
    assert_int_equal(fcntl(fds[i], F_GETFD), -1); // owned in every case, so closed
  assert_int_equal(td_channel_attach(&channel, fds, &err), TD_EINVAL);
}
