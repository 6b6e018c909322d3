// src/device/cpu/stream.c - streams as threads, events as positions in them.
#include <stdlib.h>

#include "base/thread.h"
#include "base/trace.h"
#include "device/cpu/cpu.h"

typedef struct td_cpu_event cpu_event;

// Lock held. The stream wakes waiters when it reaches the smallest n awaited, not after every
// command: each wake-up would take a core from the pool.
static void await(td_cpu_stream *stream, uint64_t n) {
  while (stream->n_completed < n) {
    if (n < stream->awaited) stream->awaited = n;
    pthread_cond_wait(&stream->moved, &stream->lock);
  }
}

// Waits until the stream has completed n commands; UINT64_MAX: all that are queued now.
static void wait_completed(td_cpu_stream *stream, uint64_t n) {
  pthread_mutex_lock(&stream->lock);
  await(stream, n == UINT64_MAX ? stream->n_queued : n);
  pthread_mutex_unlock(&stream->lock);
}

static void run_command(td_cpu_stream *stream, const td_cpu_cmd *cmd) {
  switch (cmd->kind) {
  case CMD_MARK: break;
  case CMD_WAIT: wait_completed(cmd->wait_for, cmd->wait_n_completed); break;
  case CMD_OP:
    // err is written by this thread only
    if (stream->err.code != TD_OK && !td_op_signals(&cmd->op)) break;
    td_err err = {.code = TD_OK};
    if (td_cpu_execute_traced(stream, &cmd->op, &err) == TD_OK) break;
    pthread_mutex_lock(&stream->lock);
    stream->err = err;
    pthread_mutex_unlock(&stream->lock);
  }
}

static void *stream_main(void *arg) {
  td_cpu_stream *stream = arg;
  td_trace_name_thread("stream");
  cpu_set_t unused;
  td_thread_pool_pin_caller(td_cpu_dev_of(stream)->pool, &unused); // for good
  pthread_mutex_lock(&stream->lock);
  for (;;) {
    while (stream->n_queued == stream->n_completed && !stream->stopping) {
      stream->idle = true;
      pthread_cond_wait(&stream->work, &stream->lock);
      stream->idle = false;
    }
    if (stream->n_queued == stream->n_completed) break;
    const td_cpu_cmd *cmd = &stream->ring[stream->n_completed % CPU_RING];
    pthread_mutex_unlock(&stream->lock);
    td_jitter_wait(&stream->jitter);
    run_command(stream, cmd);
    pthread_mutex_lock(&stream->lock);
    stream->n_completed++;
    if (stream->n_completed < stream->awaited) continue;
    stream->awaited = UINT64_MAX; // waiters for more set it again
    pthread_cond_broadcast(&stream->moved);
  }
  pthread_mutex_unlock(&stream->lock);
  return NULL;
}

// Reuses a closed stream's struct or adds a new one to the device's list.
static td_cpu_stream *take_struct(td_cpu_dev *dev) {
  pthread_mutex_lock(&dev->lock);
  td_cpu_stream *stream = dev->streams;
  while (stream && stream->open)
    stream = stream->next;
  if (!stream) {
    stream = calloc(1, sizeof *stream);
    td_cpu_cmd *ring = stream ? malloc(CPU_RING * sizeof *ring) : NULL;
    size_t n_shares = (size_t)TD_CPU_MAX_PARTS * td_thread_pool_size(dev->pool);
    td_cpu_tile_range *shares = ring ? aligned_alloc(64, n_shares * sizeof *shares) : NULL;
    if (!shares) {
      free(ring);
      free(stream);
      pthread_mutex_unlock(&dev->lock);
      return NULL;
    }
    stream->base.dev = &dev->base;
    stream->ring = ring;
    stream->shares = shares;
    pthread_mutex_init(&stream->lock, NULL);
    pthread_cond_init(&stream->work, NULL);
    pthread_cond_init(&stream->moved, NULL);
    stream->awaited = UINT64_MAX;
    stream->next = dev->streams;
    dev->streams = stream;
  }
  stream->open = true;
  pthread_mutex_unlock(&dev->lock);
  return stream;
}

static void return_struct(td_cpu_stream *stream) {
  td_cpu_dev *dev = td_cpu_dev_of(stream);
  pthread_mutex_lock(&dev->lock);
  stream->open = false;
  pthread_mutex_unlock(&dev->lock);
}

// All streams share the pool operator by operator, so none is more urgent.
td_status td_cpu_stream_open(td_stream **out, td_dev *base, td_stream_kind kind, td_err *err) {
  (void)kind;
  td_cpu_stream *stream = take_struct((td_cpu_dev *)base);
  if (!stream) return td_fail(err, TD_ENOMEM, "out of memory for a stream");
  stream->stopping = false;
  stream->err.code = TD_OK;
  stream->jitter = td_jitter_open(TD_JITTER_CPU);
  if (td_thread_start(&stream->thread, stream_main, stream) != 0) {
    return_struct(stream);
    return td_fail(err, TD_ENOMEM, "cannot start a thread for a stream");
  }
  *out = &stream->base;
  return TD_OK;
}

void td_cpu_stream_close(td_stream *base) {
  td_cpu_stream *stream = (td_cpu_stream *)base;
  pthread_mutex_lock(&stream->lock);
  stream->stopping = true;
  pthread_cond_signal(&stream->work);
  pthread_mutex_unlock(&stream->lock);
  pthread_join(stream->thread, NULL);
  for (int i = 0; i < N_SCRATCH; i++) {
    free(stream->scratch[i]);
    stream->scratch[i] = NULL;
    stream->scratch_bytes[i] = 0;
  }
  return_struct(stream);
}

void td_cpu_stream_free(td_cpu_stream *stream) {
  pthread_cond_destroy(&stream->moved);
  pthread_cond_destroy(&stream->work);
  pthread_mutex_destroy(&stream->lock);
  free(stream->shares);
  free(stream->ring);
  free(stream);
}

td_status td_cpu_stream_sync(td_stream *base, td_err *err) {
  td_cpu_stream *stream = (td_cpu_stream *)base;
  wait_completed(stream, UINT64_MAX);
  pthread_mutex_lock(&stream->lock);
  td_err failure = stream->err;
  pthread_mutex_unlock(&stream->lock);
  if (failure.code != TD_OK && err) *err = failure;
  return failure.code;
}

// Returns the n_completed at which the command has run. If the ring is full, waits until half of it
// is free.
static uint64_t push(td_cpu_stream *stream, const td_cpu_cmd *cmd) {
  pthread_mutex_lock(&stream->lock);
  while (stream->n_queued - stream->n_completed == CPU_RING)
    await(stream, stream->n_completed + CPU_RING / 2);
  stream->ring[stream->n_queued % CPU_RING] = *cmd;
  uint64_t n = ++stream->n_queued;
  if (stream->idle) pthread_cond_signal(&stream->work);
  pthread_mutex_unlock(&stream->lock);
  return n;
}

void td_cpu_enqueue(td_stream *stream, const td_op *op) {
  push((td_cpu_stream *)stream, &(td_cpu_cmd){.kind = CMD_OP, .op = *op});
}

td_status td_cpu_event_open(td_event **out, td_dev *dev, td_err *err) {
  cpu_event *event = calloc(1, sizeof *event);
  if (!event) return td_fail(err, TD_ENOMEM, "out of memory for an event");
  event->base.dev = dev;
  pthread_mutex_init(&event->lock, NULL);
  *out = &event->base;
  return TD_OK;
}

void td_cpu_event_close(td_event *base) {
  cpu_event *event = (cpu_event *)base;
  pthread_mutex_destroy(&event->lock);
  free(event);
}

void td_cpu_event_record(td_event *base, td_stream *stream_base) {
  cpu_event *event = (cpu_event *)base;
  td_cpu_stream *stream = (td_cpu_stream *)stream_base;
  pthread_mutex_lock(&event->lock);
  event->n_completed = push(stream, &(td_cpu_cmd){.kind = CMD_MARK});
  event->stream = stream;
  pthread_mutex_unlock(&event->lock);
}

// A command that waits for the event's last recording; wait_for NULL: never recorded.
static td_cpu_cmd wait_command(cpu_event *event) {
  pthread_mutex_lock(&event->lock);
  td_cpu_cmd cmd = {
      .kind = CMD_WAIT, .wait_for = event->stream, .wait_n_completed = event->n_completed};
  pthread_mutex_unlock(&event->lock);
  return cmd;
}

void td_cpu_stream_wait(td_stream *base, td_event *event) {
  td_cpu_cmd cmd = wait_command((cpu_event *)event);
  // A stream runs in order, so an event of the same stream needs no waiting.
  if (cmd.wait_for && &cmd.wait_for->base != base) push((td_cpu_stream *)base, &cmd);
}

void td_cpu_event_sync(td_event *event) {
  td_cpu_cmd cmd = wait_command((cpu_event *)event);
  if (cmd.wait_for) wait_completed(cmd.wait_for, cmd.wait_n_completed);
}

bool td_cpu_event_is_done(td_event *event) {
  td_cpu_cmd cmd = wait_command((cpu_event *)event);
  if (!cmd.wait_for) return true;
  pthread_mutex_lock(&cmd.wait_for->lock);
  const bool is_done = cmd.wait_for->n_completed >= cmd.wait_n_completed;
  pthread_mutex_unlock(&cmd.wait_for->lock);
  return is_done;
}

td_status td_cpu_scratch(td_cpu_stream *stream, td_cpu_scratch_slot slot, size_t n_bytes,
                         void **out, td_err *err) {
  if (n_bytes > stream->scratch_bytes[slot]) {
    size_t grown = stream->scratch_bytes[slot] + stream->scratch_bytes[slot] / 2;
    size_t size = (n_bytes > grown ? n_bytes : grown) + 63;
    free(stream->scratch[slot]);
    stream->scratch_bytes[slot] = 0;
    stream->scratch[slot] = aligned_alloc(64, size & ~(size_t)63);
    if (!stream->scratch[slot])
      return td_fail(err, TD_ENOMEM, "out of memory: %zu bytes for an operator", n_bytes);
    stream->scratch_bytes[slot] = size & ~(size_t)63;
  }
  *out = stream->scratch[slot];
  return TD_OK;
}
