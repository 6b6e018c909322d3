// src/front/lane.h - whose request is prepared next: what is done with a client's request before
// the scheduler has it (parsing, template, tokens, grammar) runs on libuv's thread pool, and here
// it waits for a thread.
//
// Fair: the tenant that has used the least CPU time goes next, refused requests counted (sched/
// fair_share.h), so that a flood costs another tenant the wait for one running item. Bounded: one
// thread of the pool's four stays free for files and KV pages, and slow work takes two at most, as
// libuv limits its own. A tenant's short work does not wait behind its slow work. Cancelable: work
// that waits can be taken back; work that runs has a flag, which is also set when it has used its
// CPU time. Thread: the loop's, except where noted.
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <time.h>

#include <uv.h>

#include "base/status.h"
#include "sched/fair_share.h"

#define TD_LANE_MAX_RUNNING 3
#define TD_LANE_MAX_OF_KIND 2
#define TD_LANE_SLOW_BYTES  (64u << 10) // from which work is slow
// From which one item runs at a time, because of the memory it needs.
#define TD_LANE_LARGE_BYTES (1u << 20)
#define TD_LANE_MAX_CPU_S   20 // of one item

typedef struct td_lane td_lane;
typedef struct td_lane_work td_lane_work;

typedef enum { TD_LANE_OUTSIDE, TD_LANE_WAITING, TD_LANE_RUNNING } td_lane_state;
typedef enum { TD_LANE_SHORT, TD_LANE_SLOW, TD_LANE_N_KINDS } td_lane_kind;

// Embedded in the owner's struct, which is zeroed.
struct td_lane_work {
  // The owner's, set before it is queued.
  uv_work_t work;         // data
  uv_work_cb run;         // on the thread pool
  uv_after_work_cb after; // on the loop; may free work or queue it again
  uint64_t tenant;        // td_api_caller
  uint32_t weight;
  size_t n_bytes; // of what is worked on
  // Nobody wants the result: loops that may be long look at it. Any thread.
  atomic_bool is_canceled;
  bool is_over; // canceled because it has used TD_LANE_MAX_CPU_S

  // The lane's.
  td_lane *lane;
  td_lane_state state;
  td_lane_work *prev, *next; // among those that wait
  td_lane_kind kind;
  uint32_t tenant_idx;
  atomic_bool has_begun; // the next two are set
  clockid_t clock;       // CPU time of the thread that runs it
  uint64_t begin_ns, cpu_ns;
};

typedef struct {
  td_lane_work *first, *last;
} td_lane_line;

struct td_lane {
  uv_loop_t *loop;
  uv_timer_t timer; // looks at the CPU time of what runs
  td_fair_share_share fair;
  td_lane_line (*waiting)[TD_LANE_N_KINDS];     // of each tenant of fair
  td_lane_work *running[TD_LANE_MAX_RUNNING];   // NULL: free
  unsigned n_of_kind[TD_LANE_N_KINDS], n_large; // running
  uint64_t max_cpu_ns;                          // of one item
  void (*on_stopped)(td_lane *lane);            // not NULL: nothing is queued any more
};

// On error *lane is closed.
td_status td_lane_open(td_lane *lane, uv_loop_t *loop, td_err *err);
// Nothing may wait or run. The timer's handle closes with the loop's next turn.
void td_lane_close(td_lane *lane);
// Runs work once it is its turn. `after` gets status 0, or UV_ECANCELED if run was not called.
void td_lane_queue(td_lane *lane, td_lane_work *work);
// Takes work back. True: it waited or was outside, and is the owner's again. False: it runs, and
// `after` will be called; is_canceled is set.
bool td_lane_cancel(td_lane_work *work);
// Calls `after` of what waits, or is queued later, with UV_ECANCELED and cancels what runs; calls
// on_stopped, perhaps at once, when nothing runs any more.
void td_lane_stop(td_lane *lane, void (*on_stopped)(td_lane *lane));

// ---- the choice, without threads ----------------------------------------------------------------

// Work begins to wait.
void td_lane_enter(td_lane *lane, td_lane_work *work);
// The work whose turn it is, which runs from now on. NULL: none, or no thread is free for it.
td_lane_work *td_lane_next(td_lane *lane);
// Work has run and used so much CPU time.
void td_lane_end(td_lane_work *work, uint64_t cpu_ns);
