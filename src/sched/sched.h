// src/sched/sched.h - which request runs next, and on which KV pages.
// A pure state machine: no clock, no I/O, no device. Time is passed in, so whole days can be
// simulated in a test. One thread.
//
// Order: the tenant with the least service for its weight goes next (fair_share.h). Within a tenant
// it is earliest deadline first: the deadline is arrival plus four times the estimated prefill
// time. Short prompts thus do not wait for long ones, and a long prompt is overtaken only by
// prompts due before it. Requests that have run before go first. Prompts in prefill are in the same
// order (td_sched_next_prefill), and tenants are charged as tokens are computed, so the order may
// change after every chunk: the prompt of a tenant that has just come begins with the next.
//
// Admission waits for a free sequence, for pages for the prompt, and until the prefills in progress
// are nearly done: later admission finds more of the prompt in the prefix cache. A request that
// goes before all prefills in progress is admitted at once. While a prompt with a common prefix is
// in prefill, a request lets other tenants pass. It is never bypassed for lack of pages, so no
// request starves.
//
// The length of a response is unknown, so pages are allocated as it grows, a little ahead. When the
// pool is full the newest running request is preempted (td_sched_preempt): its pages become prefix
// cache, it returns to its place in the queue, and it continues when there is room. The oldest
// request is never preempted for pages and can use the whole pool, so at least one always
// progresses. Admission leaves one free page per running request, which makes preemption rare.
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "kv/kv.h"

typedef struct td_sched td_sched;

typedef struct {
  uint32_t max_seqs;    // running at the same time
  uint32_t n_pages;     // size of the KV pool
  uint32_t page_tokens; // tokens per page, a power of two
  // Limit on queued requests. A tenant may queue at most as many as it leaves free: half if alone.
  uint32_t max_waiting;
  // the next request is admitted when at most this many tokens are left to prefill
  uint32_t prefill_ahead;
  // With separate prefill and decode workers: all threads, and prefill's share while both have
  // work, clamped to 1 .. n_threads - 1.
  uint32_t n_threads, prefill_threads;
  const td_digest *kv_root;   // see td_kv_opts; may be NULL
  td_kv_listener kv_listener; // see td_kv_opts
  bool shares_output;         // later prompts find the pages of finished requests' generated tokens
} td_sched_opts;

// Thread counts of the two workers. A worker that is the only one with work gets all threads.
typedef struct {
  uint32_t prefill, decode;
} td_thread_split;

typedef enum {
  TD_SCHED_UNKNOWN,
  TD_SCHED_WAITING,
  TD_SCHED_PREFILL, // prefill, or replay of generated tokens
  TD_SCHED_DECODE,
} td_sched_phase;

typedef struct {
  // [n_prompt], followed by the generated tokens (td_sched_requeue); borrowed until the request is
  // removed
  const int32_t *tokens;
  uint32_t n_prompt, max_tokens;
  uint64_t tenant;
  uint32_t weight; // of the tenant; 0 means 1
  uint64_t salt;   // td_kv_set_salt
  bool is_fresh;   // the prompt is computed whole: nothing of the prefix cache is used
  // Tokens of the prompt after which a copy of the page that is then being filled is kept in the
  // prefix cache, for models whose pages hold a recurrent state (kv/kv.h). 0: none.
  uint32_t n_keep;
} td_sched_job;

typedef struct {
  uint64_t id;
  uint32_t n_cached;    // tokens already in its pages
  const int32_t *pages; // [n_pages], in position order, valid until it grows or is removed
  uint32_t n_pages;
  bool is_urgent; // it goes before all prefills in progress
  // The page that is to be copied to the page of token n_cached before that is computed; it holds
  // the tokens up to there. Valid until the first progress. -1: none.
  int32_t source;
  // The page to which the page of token n_keep - 1 is to be copied when n_keep tokens are computed,
  // before that is reported as progress. -1: none, or no page was free.
  int32_t keep;
  uint32_t n_keep;
} td_admission;

typedef struct {
  uint64_t id;
  const int32_t *pages; // [n_pages], all of its pages, the old ones first
  uint32_t n_pages;
} td_growth;

// On success the caller owns *out; on error *out is NULL.
td_status td_sched_open(td_sched **out, const td_sched_opts *opts, td_err *err);
void td_sched_close(td_sched *sched);

// Queues a request. id is new and below 2^63. TD_EAGAIN: the tenant has too many in the queue.
// TD_ELIMIT: more tokens than the whole pool holds.
td_status td_sched_submit(td_sched *sched, uint64_t id, const td_sched_job *job, uint64_t now_ns,
                          td_err *err);
// Admits the next request if it may run now. It runs until td_sched_remove or td_sched_requeue.
bool td_sched_admit(td_sched *sched, uint64_t now_ns, td_admission *out);
// The first n_done tokens of a running request are computed. Full pages of the prompt are shared
// from now on. Pages with generated tokens are not shared without shares_output: they were computed
// by the decode kernels (td_step_seq's is_decode), which round differently, and the result for a
// prompt would depend on earlier requests. Impossible values are ignored.
void td_sched_progress(td_sched *sched, uint64_t id, uint32_t n_done, uint64_t now_ns);
// The request in prefill that goes before the others, of those for which is_among is true (NULL:
// of all). False: there is none.
typedef bool td_sched_filter(void *ctx, uint64_t id);
bool td_sched_next_prefill(const td_sched *sched, td_sched_filter *is_among, void *ctx,
                           uint64_t *id);
// Allocates pages for the next running request that needs them. False: none needs any, or no page
// is free.
bool td_sched_grow(td_sched *sched, td_growth *out);
// Selects a request to preempt: because an older one needs a page, or because the head of the queue
// is overdue, its tenant has no running request, and another tenant has several. The request keeps
// its pages until its worker has dropped it; then call td_sched_requeue or td_sched_remove. False:
// none, or a preemption is in progress.
bool td_sched_preempt(td_sched *sched, uint64_t now_ns, uint64_t *id);
// The worker has dropped the running request, and its last page holds the recurrent state after the
// tokens last reported: that page can also be kept. Call before td_sched_remove or
// td_sched_requeue.
void td_sched_settle(td_sched *sched, uint64_t id);
// Removes a request, finished or canceled, and returns the phase it was in.
td_sched_phase td_sched_remove(td_sched *sched, uint64_t id);
// Puts a running request back into the queue, before those of its tenant that have not run. Its
// prompt is followed by n_answer generated tokens, which are not sampled again; all but the last
// are recomputed where the cache has lost them.
void td_sched_requeue(td_sched *sched, uint64_t id, uint32_t n_answer);
// Invalidates the prefix cache, when the content of the pages is lost. No request may be running.
void td_sched_forget(td_sched *sched);

// The current split; changes with admission, progress and removal.
td_thread_split td_sched_lease(const td_sched *sched);

// Estimated time until half of the queue has been admitted, for Retry-After.
uint64_t td_sched_retry_ns(const td_sched *sched, uint64_t now_ns);

td_sched_phase td_sched_phase_of(const td_sched *sched, uint64_t id);
uint32_t td_sched_n_waiting(const td_sched *sched);
uint32_t td_sched_n_running(const td_sched *sched);
uint32_t td_sched_n_free_pages(const td_sched *sched); // including pages that are only cache
uint64_t td_sched_n_preemptions(const td_sched *sched);
const td_kv *td_sched_kv(const td_sched *sched); // page metadata, read-only
