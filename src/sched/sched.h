// src/sched/sched.h - which request runs next, and on which KV pages.
// A pure state machine: no clock, no I/O, no device. Time is passed in, so whole days are simulated
// in a test. One thread.
//
// Next is the tenant that was served least for its weight (fair.h), and of its requests the one
// whose first token is due first: four times the time that it takes to read its prompt, as
// measured, after it came. So a short prompt does not stand behind long ones, and a long one is
// overtaken only by what comes before it is due itself. Requests that ran before go on first.
//
// It waits until a sequence is free, the KV pool holds its prompt, and the worker has nearly read
// the prompts given out before: the longer one waits the more of it may be in the cache of
// prefixes, and for the same reason it waits while a prompt that begins alike is being read. What
// is due before all that is being read, of tenants that were not served less, is given out at once,
// to be read first. Who is next is not overtaken for want of pages, and becomes next as others are
// served or come later: nobody starves.
//
// Nobody knows how long an answer becomes, so pages for it are given as it grows, a little ahead.
// When none is left, the running request that came last makes room (td_sched_preempt): its pages
// become cache, it waits again at its place, and goes on where it was when there is room. The one
// that came first never makes room and can have the whole pool, so there is always one that gets
// on. Room for one page for each that runs is left at admission, so that this is rare.
#ifndef TD_SCHED_SCHED_H
#define TD_SCHED_SCHED_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "kv/kv.h"

typedef struct td_sched td_sched;

typedef struct {
  uint32_t max_seqs;    // running together
  uint32_t n_pages;     // of the KV pool
  uint32_t page_tokens; // tokens a page, a power of two
  // Requests in the queue. A tenant may have as many as it leaves free for others: alone half.
  uint32_t max_waiting;
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
} td_thread_split;

typedef enum {
  TD_SCHED_UNKNOWN,
  TD_SCHED_WAITING,
  TD_SCHED_PREFILL, // its prompt is being read, or what is known of its answer computed again
  TD_SCHED_DECODE,
} td_sched_phase;

typedef struct {
  // [n_prompt], and behind it what td_sched_requeue says; borrowed until the request is removed
  const int32_t *tokens;
  uint32_t n_prompt, max_tokens;
  uint64_t tenant;
  uint32_t weight; // of the tenant; 0 is 1
} td_sched_job;

typedef struct {
  uint64_t id;
  uint64_t waited_ns;   // from submit to admission
  uint32_t n_cached;    // tokens whose pages hold them already
  const int32_t *pages; // [n_pages], in position order, valid until it grows or is removed
  uint32_t n_pages;
  bool is_urgent; // to be read before all that is being read
} td_admission;

typedef struct {
  uint64_t id;
  const int32_t *pages; // [n_pages], all of them; those it had are the first
  uint32_t n_pages;
} td_growth;

// On success the caller owns *out; on error *out is NULL.
td_status td_sched_open(td_sched **out, const td_sched_opts *opts, td_err *err);
void td_sched_close(td_sched *sched);

// Queues a request. id is new, below 2^63. TD_EAGAIN: the tenant has too many in the queue.
// TD_ELIMIT: more tokens than the whole pool holds.
td_status td_sched_submit(td_sched *sched, uint64_t id, const td_sched_job *job, uint64_t now_ns,
                          td_err *err);
// Admits the next request, if it may run now; it then runs until td_sched_remove or
// td_sched_requeue.
bool td_sched_admit(td_sched *sched, uint64_t now_ns, td_admission *out);
// The first n_done tokens of a running request are computed: of its prompt, full pages are shared
// from now on. Pages with tokens of the answer are never shared: those are computed another way
// (td_step_seq's is_decode), the same but for rounding, and a prompt's result must not tell what
// was asked before. A number that cannot be is ignored.
void td_sched_progress(td_sched *sched, uint64_t id, uint32_t n_done, uint64_t now_ns);
// Gives the next of those that need them more pages; false: nobody needs any, or none is left.
bool td_sched_grow(td_sched *sched, td_growth *out);
// Whom to call back, because one that came before it needs a page, or because it is not the only
// one of its tenant and the next in the queue, overdue, would be the only one of its own. It keeps
// what it has until its worker has let go of it, then td_sched_requeue or td_sched_remove is due.
// False: nobody, or one is being called back already.
bool td_sched_preempt(td_sched *sched, uint64_t now_ns, uint64_t *id);
// Takes a request out, done or canceled, and tells where it was.
td_sched_phase td_sched_remove(td_sched *sched, uint64_t id);
// A running request waits again, before those of its tenant that have not run. n_answer tokens of
// its answer stand behind its prompt and need not be drawn again; all but the last of them need to
// be computed, where the cache does not hold what was.
void td_sched_requeue(td_sched *sched, uint64_t id, uint32_t n_answer);
// Nothing runs, and what the pages held is lost: nothing is cached any more.
void td_sched_forget(td_sched *sched);

// As it should be now; changes with admission, progress and removal.
td_thread_split td_sched_lease(const td_sched *sched);

// When half of the queue will have begun, as fast as it went lately: when to ask again.
uint64_t td_sched_retry_ns(const td_sched *sched, uint64_t now_ns);

td_sched_phase td_sched_phase_of(const td_sched *sched, uint64_t id);
uint32_t td_sched_n_waiting(const td_sched *sched);
uint32_t td_sched_n_running(const td_sched *sched);
uint32_t td_sched_n_free_pages(const td_sched *sched); // those that are only cache included
uint64_t td_sched_n_preemptions(const td_sched *sched);
const td_kv *td_sched_kv(const td_sched *sched); // what the pages hold, to look at

#endif
