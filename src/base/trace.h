// src/base/trace.h - records what each process does and when, for --trace.
// All processes share one memory with lanes; every recording thread claims one. A lane is a ring of
// fixed-size records, written by its thread and read by the front, which writes them to a file
// (runtime/trace_file.h). Recording never blocks: a record that finds its ring full is dropped and
// counted. While tracing is off, a call costs one predicted branch.
#pragma once

#include <assert.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/clock.h"
#include "base/ops.h"

// All events: id, name, category, names of its two values (NULL: none). Operators are events as
// well. Only a macro named X can expand the list.
#define TD_TRACE_OF_OP(NAME, name, args_type, unit, n_tokens, amount_unit, amount)                 \
  X(OP_##NAME, #name, "operator", unit, amount_unit)
#define TD_TRACE_EVENTS(X)                                                                         \
  X(REQUEST, "request", "request", "tokens", "id")                                                 \
  X(PREPARE, "prepare prompt", "request", NULL, NULL)                                              \
  X(LOAD_WEIGHTS, "load weights", "start", NULL, NULL)                                             \
  X(OPEN_MODEL, "open model", "start", NULL, NULL)                                                 \
  X(STEP, "step", "step", "tokens", "sequences")                                                   \
  X(SAMPLE, "sample", "step", NULL, NULL)                                                          \
  X(SEND, "send", "message", "kind", "request")                                                    \
  X(RECEIVE, "receive", "message", "kind", "request")                                              \
  TD_OPS(TD_TRACE_OF_OP)

typedef enum {
#define X(id, name, category, a, b) TD_TRACE_##id,
  TD_TRACE_EVENTS(X)
#undef X
      TD_TRACE_N_EVENTS
} td_trace_event;

typedef enum {
  TD_TRACE_SPAN,  // spans of one thread nest
  TD_TRACE_ASYNC, // may begin and end on any thread; b distinguishes instances of an event
  TD_TRACE_MARK,  // an instant: begin_ns
} td_trace_shape;

// ---- the shared memory ------------------------------------------------------------------------

#define TD_TRACE_MAGIC   0x43525444u // "DTRC"
#define TD_TRACE_VERSION 1u
#define TD_TRACE_LANES   64u
#define TD_TRACE_RECORDS 16384u // per lane; a power of two

typedef struct {
  uint64_t begin_ns, end_ns; // td_clock_ns
  uint64_t b;
  uint32_t a;
  uint16_t event; // td_trace_event
  uint16_t shape; // td_trace_shape
} td_trace_record;
static_assert(sizeof(td_trace_record) == 32, "shared layout");

// head and tail only grow; record p is in records[p % TD_TRACE_RECORDS].
typedef struct {
  _Alignas(64) _Atomic uint32_t pid; // owner; 0: free. Claimed by exchange, freed by the reader
  uint32_t tid;
  char process[24], thread[24];       // names; written before the first record
  _Alignas(64) _Atomic uint64_t head; // written by the writer: release, after the record
  _Atomic uint64_t n_dropped;         // written by the writer: release, so that the names are
                                      // visible
  _Alignas(64) _Atomic uint64_t tail; // written by the reader: release, after copying the record
  _Alignas(64) td_trace_record records[TD_TRACE_RECORDS];
} td_trace_lane;

typedef struct {
  uint32_t magic, version;
  _Atomic uint64_t n_unplaced; // records of threads without a lane; relaxed
  td_trace_lane lanes[TD_TRACE_LANES];
} td_trace_memory;

// ---- recording ----------------------------------------------------------------------------------

extern bool td_trace_is_on;

// Starts recording into memory that is zeroed or that another process started with. It must live
// until td_trace_stop. process: name of this process, at most 23 characters. Call both while no
// other thread records. False: the memory is not trace memory.
bool td_trace_start(td_trace_memory *memory, const char *process);
void td_trace_stop(void);
// Names the calling thread, at most 23 characters; call before its first record.
void td_trace_name_thread(const char *name);

void td_trace_put(const td_trace_record *record);

// Start time for td_trace_span; 0 while tracing is off.
static inline uint64_t td_trace_begin(void) {
  return __builtin_expect(td_trace_is_on, 0) ? td_clock_ns() : 0;
}

// Records a span of this thread from begin_ns (td_trace_begin) until now.
static inline void td_trace_span(uint64_t begin_ns, td_trace_event event, uint32_t a, uint64_t b) {
  if (__builtin_expect(begin_ns == 0, 1)) return;
  td_trace_put(&(td_trace_record){.begin_ns = begin_ns,
                                  .end_ns = td_clock_ns(),
                                  .a = a,
                                  .b = b,
                                  .event = (uint16_t)event,
                                  .shape = TD_TRACE_SPAN});
}

// Records something that began at begin_ns, on any thread, and ends now.
static inline void td_trace_async(uint64_t begin_ns, td_trace_event event, uint32_t a, uint64_t b) {
  if (__builtin_expect(!td_trace_is_on, 1)) return;
  td_trace_put(&(td_trace_record){.begin_ns = begin_ns,
                                  .end_ns = td_clock_ns(),
                                  .a = a,
                                  .b = b,
                                  .event = (uint16_t)event,
                                  .shape = TD_TRACE_ASYNC});
}

static inline void td_trace_mark(td_trace_event event, uint32_t a, uint64_t b) {
  if (__builtin_expect(!td_trace_is_on, 1)) return;
  uint64_t now_ns = td_clock_ns();
  td_trace_put(&(td_trace_record){.begin_ns = now_ns,
                                  .end_ns = now_ns,
                                  .a = a,
                                  .b = b,
                                  .event = (uint16_t)event,
                                  .shape = TD_TRACE_MARK});
}

// ---- taking records out -----------------------------------------------------------------------

// Takes up to max records of a lane, oldest first; skips invalid records of a corrupt writer. One
// reader per memory.
size_t td_trace_take(td_trace_lane *lane, td_trace_record *out, size_t max);
// Frees a lane whose process has ended, once it is empty.
void td_trace_free_lane(td_trace_lane *lane);
