// src/sched/sched.h - which request runs next, and on which KV pages: first come, first served.
// A pure state machine: no clock, no I/O, no device. Time is passed in, so whole days are simulated
// in a test. One thread.
//
// A request waits in arrival order until a sequence is free, the KV pool holds all that it may ever
// need (ceil((n_prompt + max_tokens) / page_tokens) pages, those of them that the cache of prefixes
// holds shared), and the worker has nearly read the prompts given out before: prompts are read one
// after another anyway, and the longer one waits the more of it may be in the cache. For the same
// reason it waits while a prompt that begins alike is being read. The one at the head is never
// overtaken: what fits the empty pool cannot starve. A running request has all its pages, so it
// never stalls for one; it keeps them until it is removed.
#ifndef TD_SCHED_SCHED_H
#define TD_SCHED_SCHED_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "kv/kv.h"

typedef struct td_sched td_sched;

typedef struct {
  uint32_t max_seqs;      // running together
  uint32_t n_pages;       // of the KV pool
  uint32_t page_tokens;   // tokens a page, a power of two
  uint32_t max_waiting;   // requests in the queue
  uint32_t prefill_ahead; // a prompt is given out when at most so many tokens are still to be read
  // Where one worker reads prompts and another writes answers, each with all threads: how many
  // there are, and how many of them read while answers are written. Brought into 1 to n_threads
  // - 1.
  uint32_t n_threads, prefill_threads;
  const td_digest *kv_root; // see td_kv_opts; may be NULL
} td_sched_opts;

// Threads that may compute. Cores are leased: who is alone has all of them.
typedef struct {
  uint32_t prefill, decode;
} td_lease;

typedef enum {
  TD_SCHED_UNKNOWN,
  TD_SCHED_WAITING,
  TD_SCHED_PREFILL, // its prompt is being read
  TD_SCHED_DECODE,
} td_sched_phase;

typedef struct {
  const int32_t *prompt; // [n_prompt], borrowed until the request is removed
  uint32_t n_prompt, max_tokens;
} td_sched_job;

typedef struct {
  uint64_t id;
  uint64_t waited_ns;   // from submit to admission
  uint32_t n_cached;    // tokens of the prompt whose pages hold them already
  const int32_t *pages; // [n_pages], in position order, valid until the request is removed
  uint32_t n_pages;
} td_admission;

// On success the caller owns *out; on error *out is NULL.
td_status td_sched_open(td_sched **out, const td_sched_opts *opts, td_err *err);
void td_sched_close(td_sched *sched);

// Queues a request. id is new. TD_EAGAIN: the queue is full. TD_ELIMIT: more tokens than the whole
// pool holds.
td_status td_sched_submit(td_sched *sched, uint64_t id, const td_sched_job *job, uint64_t now_ns,
                          td_err *err);
// Admits the request at the head, if it may run now; it then runs until td_sched_remove.
bool td_sched_admit(td_sched *sched, uint64_t now_ns, td_admission *out);
// The first n_done tokens of a running request's prompt are computed: full pages of them are shared
// from now on, and with the last one it decodes. Pages with tokens of the answer are never shared:
// those are computed another way (td_step_seq's is_decode), the same but for rounding, and a
// prompt's result must not tell what was asked before. A number that cannot be is ignored.
void td_sched_progress(td_sched *sched, uint64_t id, uint32_t n_done);
// Takes a request out, done or canceled, and tells where it was.
td_sched_phase td_sched_remove(td_sched *sched, uint64_t id);
// A running request waits again (its worker died), before every request that came later. What of
// its prompt was shared stays cached.
void td_sched_requeue(td_sched *sched, uint64_t id);
// Nothing runs, and what the pages held is lost: nothing is cached any more.
void td_sched_forget(td_sched *sched);

// As it should be now; changes with admission, progress and removal.
td_lease td_sched_lease(const td_sched *sched);

td_sched_phase td_sched_phase_of(const td_sched *sched, uint64_t id);
uint32_t td_sched_n_waiting(const td_sched *sched);
uint32_t td_sched_n_running(const td_sched *sched);
uint32_t td_sched_n_free_pages(const td_sched *sched); // those that are only cache included
const td_kv *td_sched_kv(const td_sched *sched);       // what the pages hold, to look at

#endif
