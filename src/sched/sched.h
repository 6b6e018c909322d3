// src/sched/sched.h - which request runs next: first come, first served.
// A pure state machine: no clock, no I/O, no device. Time is passed in, so whole days are simulated
// in a test. One thread.
//
// A request waits in arrival order until a sequence is free and the KV pool holds all that it may
// ever need, ceil((n_prompt + max_tokens) / page_tokens) pages; so a running request never stalls
// for pages. The sum is safe beside the worker's cache of prefixes: pages that are shared are
// promised more than once, and those that are only cache make room. The one at the head is never
// overtaken: what fits the empty pool cannot starve.
#ifndef TD_SCHED_SCHED_H
#define TD_SCHED_SCHED_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"

typedef struct td_sched td_sched;

typedef struct {
  uint32_t max_seqs;    // running together
  uint32_t n_pages;     // of the KV pool
  uint32_t page_tokens; // tokens a page
  uint32_t max_waiting; // requests in the queue
} td_sched_opts;

typedef enum { TD_SCHED_UNKNOWN, TD_SCHED_WAITING, TD_SCHED_RUNNING } td_sched_phase;

typedef struct {
  uint64_t id;
  uint64_t waited_ns; // from submit to admission
} td_admission;

// On success the caller owns *out; on error *out is NULL.
td_status td_sched_open(td_sched **out, const td_sched_opts *opts, td_err *err);
void td_sched_close(td_sched *sched);

// Queues a request. id is new. TD_EAGAIN: the queue is full. TD_ELIMIT: more tokens than the whole
// pool holds.
td_status td_sched_submit(td_sched *sched, uint64_t id, uint64_t n_tokens, uint64_t now_ns,
                          td_err *err);
// Admits the request at the head, if it fits now; it then runs until td_sched_remove.
bool td_sched_admit(td_sched *sched, uint64_t now_ns, td_admission *out);
// Takes a request out, done or canceled, and tells where it was.
td_sched_phase td_sched_remove(td_sched *sched, uint64_t id);
// A running request, never answered, waits again (its worker died), before every request that came
// later.
void td_sched_requeue(td_sched *sched, uint64_t id);

td_sched_phase td_sched_phase_of(const td_sched *sched, uint64_t id);
uint32_t td_sched_n_waiting(const td_sched *sched);
uint32_t td_sched_n_running(const td_sched *sched);
uint32_t td_sched_n_free_pages(const td_sched *sched);

#endif
