// src/base/trace.c - records trace events in lanes of shared memory, and takes them out.
#include "base/trace.h"

#include <stdio.h>
#include <sys/syscall.h>
#include <unistd.h>

bool td_trace_is_on;

static td_trace_memory *memory;
static char process_name[24];
static unsigned generation; // number of starts; a thread whose number differs has a lane of old
                            // memory

typedef struct {
  unsigned generation;
  td_trace_lane *lane; // NULL: no lane was free
  char name[24];
} own_lane;
static _Thread_local own_lane own;

bool td_trace_start(td_trace_memory *m, const char *process) {
  if (m->magic == 0) {
    m->magic = TD_TRACE_MAGIC;
    m->version = TD_TRACE_VERSION;
  } else if (m->magic != TD_TRACE_MAGIC || m->version != TD_TRACE_VERSION) {
    return false;
  }
  memory = m;
  snprintf(process_name, sizeof process_name, "%s", process);
  generation++;
  td_trace_is_on = true;
  return true;
}

void td_trace_stop(void) {
  td_trace_is_on = false;
  memory = NULL;
}

static void name_lane(td_trace_lane *lane) {
  if (own.name[0]) {
    snprintf(lane->thread, sizeof lane->thread, "%s", own.name);
  } else {
    snprintf(lane->thread, sizeof lane->thread, "%s",
             lane->tid == (uint32_t)getpid() ? "main" : "thread");
  }
}

static void claim(void) {
  own.generation = generation;
  own.lane = NULL;
  for (uint32_t i = 0; i < TD_TRACE_LANES; i++) {
    td_trace_lane *lane = &memory->lanes[i];
    uint32_t nobody = 0;
    // partner: the release of td_trace_free_lane
    if (!atomic_compare_exchange_strong_explicit(&lane->pid, &nobody, (uint32_t)getpid(),
                                                 memory_order_acquire, memory_order_relaxed))
      continue;
    lane->tid = (uint32_t)syscall(SYS_gettid);
    snprintf(lane->process, sizeof lane->process, "%s", process_name);
    name_lane(lane);
    own.lane = lane;
    return;
  }
}

void td_trace_name_thread(const char *name) {
  snprintf(own.name, sizeof own.name, "%s", name);
}

void td_trace_put(const td_trace_record *record) {
  if (!memory) return;
  if (own.generation != generation) claim();
  td_trace_lane *lane = own.lane;
  if (!lane) {
    atomic_fetch_add_explicit(&memory->n_unplaced, 1, memory_order_relaxed);
    return;
  }
  uint64_t head = atomic_load_explicit(&lane->head, memory_order_relaxed); // only this thread
                                                                           // writes it
  // partner: the release of td_trace_take, after which the slot may be overwritten
  if (head - atomic_load_explicit(&lane->tail, memory_order_acquire) >= TD_TRACE_RECORDS) {
    atomic_fetch_add_explicit(&lane->n_dropped, 1, memory_order_release); // partner: drain_lane
    return;
  }
  lane->records[head % TD_TRACE_RECORDS] = *record;
  atomic_store_explicit(&lane->head, head + 1, memory_order_release); // partner: td_trace_take
}

size_t td_trace_take(td_trace_lane *lane, td_trace_record *out, size_t max) {
  uint64_t tail = atomic_load_explicit(&lane->tail, memory_order_relaxed); // only the reader writes
                                                                           // it
  uint64_t head = atomic_load_explicit(&lane->head, memory_order_acquire); // partner: put
  uint64_t n_waiting = head - tail;
  if (n_waiting > TD_TRACE_RECORDS) { // impossible unless the writer is corrupt
    atomic_store_explicit(&lane->tail, head, memory_order_release);
    return 0;
  }
  size_t n = 0, n_looked = n_waiting < max ? (size_t)n_waiting : max;
  for (size_t i = 0; i < n_looked; i++) {
    const td_trace_record *r = &lane->records[(tail + i) % TD_TRACE_RECORDS];
    out[n] = *r;
    if (out[n].event < TD_TRACE_N_EVENTS && out[n].shape <= TD_TRACE_MARK &&
        out[n].begin_ns <= out[n].end_ns)
      n++;
  }
  atomic_store_explicit(&lane->tail, tail + n_looked, memory_order_release); // partner: put
  return n;
}

void td_trace_free_lane(td_trace_lane *lane) {
  atomic_store_explicit(&lane->head, 0, memory_order_relaxed);
  atomic_store_explicit(&lane->tail, 0, memory_order_relaxed);
  atomic_store_explicit(&lane->n_dropped, 0, memory_order_relaxed);
  atomic_store_explicit(&lane->pid, 0, memory_order_release); // partner: claim
}
