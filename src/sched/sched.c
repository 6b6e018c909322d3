// src/sched/sched.c
// Requests live in a fixed pool of entries; the waiting ones form a list in order of arrival. An id
// is found by a scan: there are at most max_waiting + max_seqs entries, and it happens a few times
// in a request's life, never for each token.
#include "sched/sched.h"

#include <stdlib.h>

#define NONE UINT32_MAX

typedef struct {
  uint64_t id, arrival, submitted_ns;
  td_sched_job job;
  uint32_t seq;        // running: of the KV tables
  uint32_t n_done;     // running: tokens of the prompt that are computed
  uint32_t prev, next; // waiting: neighbours; free: next
  td_sched_phase phase;
} entry;

struct td_sched {
  td_sched_opts opts;
  td_kv *kv;
  entry *entries;
  uint32_t n_entries;
  uint32_t free_list, head, tail;
  uint32_t n_waiting, n_running, n_reading;
  uint64_t n_unread; // tokens of the prompts being read
  uint64_t n_arrived;
};

td_status td_sched_open(td_sched **out, const td_sched_opts *opts, td_err *err) {
  *out = NULL;
  if (!opts->max_waiting) return td_fail(err, TD_EINVAL, "a scheduler needs a queue");
  size_t n = (size_t)opts->max_seqs + opts->max_waiting;
  td_sched *sched = n < NONE ? calloc(1, sizeof *sched) : NULL;
  if (!sched) return td_fail(err, TD_ENOMEM, "out of memory for a queue of %zu requests", n);
  *sched = (td_sched){.opts = *opts,
                      .entries = calloc(n, sizeof(entry)),
                      .n_entries = (uint32_t)n,
                      .head = NONE,
                      .tail = NONE};
  const td_kv_opts kv = {.page_tokens = opts->page_tokens,
                         .n_pages = opts->n_pages,
                         .max_seqs = opts->max_seqs,
                         .root = opts->kv_root};
  td_status st = sched->entries ? td_kv_open(&sched->kv, &kv, err)
                                : td_fail(err, TD_ENOMEM, "out of memory for %zu requests", n);
  if (st != TD_OK) {
    td_sched_close(sched);
    return st;
  }
  for (uint32_t i = 0; i < sched->n_entries; i++)
    sched->entries[i].next = i + 1 < sched->n_entries ? i + 1 : NONE;
  *out = sched;
  return TD_OK;
}

void td_sched_close(td_sched *sched) {
  if (!sched) return;
  td_kv_close(sched->kv);
  free(sched->entries);
  free(sched);
}

static uint32_t find(const td_sched *sched, uint64_t id) {
  for (uint32_t i = 0; i < sched->n_entries; i++) {
    const entry *e = &sched->entries[i];
    if (e->phase != TD_SCHED_UNKNOWN && e->id == id) return i;
  }
  return NONE;
}

// Puts entry i into the waiting list behind `after` (NONE: at the head).
static void link_waiting(td_sched *sched, uint32_t i, uint32_t after) {
  entry *e = &sched->entries[i];
  e->prev = after;
  e->next = after == NONE ? sched->head : sched->entries[after].next;
  *(e->prev == NONE ? &sched->head : &sched->entries[e->prev].next) = i;
  *(e->next == NONE ? &sched->tail : &sched->entries[e->next].prev) = i;
  e->phase = TD_SCHED_WAITING;
  sched->n_waiting++;
}

static void unlink_waiting(td_sched *sched, uint32_t i) {
  entry *e = &sched->entries[i];
  *(e->prev == NONE ? &sched->head : &sched->entries[e->prev].next) = e->next;
  *(e->next == NONE ? &sched->tail : &sched->entries[e->next].prev) = e->prev;
  sched->n_waiting--;
}

static uint32_t n_unread(const entry *e) {
  return e->phase == TD_SCHED_PREFILL ? e->job.n_prompt - e->n_done : 0;
}

static void release_running(td_sched *sched, entry *e) {
  sched->n_running--;
  sched->n_reading -= e->phase == TD_SCHED_PREFILL;
  sched->n_unread -= n_unread(e);
  td_kv_seq_close(sched->kv, e->seq);
}

static uint64_t n_tokens_of(const td_sched_job *job) {
  return (uint64_t)job->n_prompt + job->max_tokens;
}

td_status td_sched_submit(td_sched *sched, uint64_t id, const td_sched_job *job, uint64_t now_ns,
                          td_err *err) {
  TD_CHECK(find(sched, id) == NONE && job->n_prompt > 0);
  uint64_t n_tokens = n_tokens_of(job);
  uint64_t pool_tokens = (uint64_t)sched->opts.n_pages * sched->opts.page_tokens;
  if (n_tokens > pool_tokens || n_tokens > UINT32_MAX) {
    return td_fail(err, TD_ELIMIT, "%llu tokens of prompt and answer; the KV pool holds %llu",
                   (unsigned long long)n_tokens, (unsigned long long)pool_tokens);
  }
  if (sched->n_waiting >= sched->opts.max_waiting) {
    return td_fail(err, TD_EAGAIN, "%u requests wait already", sched->n_waiting);
  }
  uint32_t i = sched->free_list;
  TD_CHECK(i != NONE);
  entry *e = &sched->entries[i];
  sched->free_list = e->next;
  *e = (entry){.id = id, .arrival = sched->n_arrived++, .submitted_ns = now_ns, .job = *job};
  link_waiting(sched, i, sched->tail);
  return TD_OK;
}

// ---- admission --------------------------------------------------------------------------------

static uint32_t n_alike(const td_sched_job *a, const td_sched_job *b) {
  uint32_t n = 0, least = a->n_prompt < b->n_prompt ? a->n_prompt : b->n_prompt;
  while (n < least && a->prompt[n] == b->prompt[n])
    n++;
  return n;
}

// Whether a prompt that is being read will leave more of this one in the cache than there is now.
static bool awaits_prefix(const td_sched *sched, const td_sched_job *job) {
  uint32_t page_tokens = sched->opts.page_tokens;
  uint32_t n_cached = td_kv_match(sched->kv, job->prompt, job->n_prompt);
  for (uint32_t i = 0; i < sched->n_entries && sched->n_unread; i++) {
    const entry *e = &sched->entries[i];
    if (e->phase != TD_SCHED_PREFILL) continue;
    uint32_t n = n_alike(job, &e->job);
    if (n == job->n_prompt) n--; // its last token is computed in any case
    if (n / page_tokens > n_cached / page_tokens) return true;
  }
  return false;
}

// Gives the request its sequence and every page it may ever need, or nothing.
static bool take_pages(td_sched *sched, entry *e) {
  td_err err; // not enough now is no error
  if (td_kv_seq_open(sched->kv, &e->seq, &err) != TD_OK) return false;
  e->n_done = td_kv_reuse(sched->kv, e->seq, e->job.prompt, e->job.n_prompt);
  uint64_t n_tokens = n_tokens_of(&e->job);
  if (td_kv_reserve(sched->kv, e->seq, (uint32_t)n_tokens, &err) == TD_OK) return true;
  td_kv_seq_close(sched->kv, e->seq);
  return false;
}

bool td_sched_admit(td_sched *sched, uint64_t now_ns, td_admission *out) {
  uint32_t i = sched->head;
  if (i == NONE || sched->n_running >= sched->opts.max_seqs) return false;
  if (sched->n_unread > sched->opts.prefill_ahead) return false;
  entry *e = &sched->entries[i];
  if (awaits_prefix(sched, &e->job) || !take_pages(sched, e)) return false;
  unlink_waiting(sched, i);
  e->phase = TD_SCHED_PREFILL;
  sched->n_running++;
  sched->n_reading++;
  sched->n_unread += n_unread(e);
  *out = (td_admission){.id = e->id, .waited_ns = now_ns - e->submitted_ns, .n_cached = e->n_done};
  out->pages = td_kv_pages(sched->kv, e->seq, &out->n_pages);
  return true;
}

// ---- afterwards -------------------------------------------------------------------------------

void td_sched_progress(td_sched *sched, uint64_t id, uint32_t n_done) {
  uint32_t i = find(sched, id);
  entry *e = i == NONE ? NULL : &sched->entries[i];
  if (!e || e->phase != TD_SCHED_PREFILL || n_done < e->n_done || n_done > e->job.n_prompt) return;
  sched->n_unread -= n_done - e->n_done;
  e->n_done = n_done;
  td_kv_commit(sched->kv, e->seq, e->job.prompt, n_done);
  if (n_done < e->job.n_prompt) return;
  e->phase = TD_SCHED_DECODE;
  sched->n_reading--;
}

td_lease td_sched_lease(const td_sched *sched) {
  uint32_t n = sched->opts.n_threads, share = sched->opts.prefill_threads;
  if (!sched->n_reading || sched->n_reading == sched->n_running || n < 2) return (td_lease){n, n};
  if (share < 1) share = 1;
  if (share > n - 1) share = n - 1;
  return (td_lease){.prefill = share, .decode = n - share};
}

td_sched_phase td_sched_remove(td_sched *sched, uint64_t id) {
  uint32_t i = find(sched, id);
  if (i == NONE) return TD_SCHED_UNKNOWN;
  entry *e = &sched->entries[i];
  td_sched_phase phase = e->phase;
  if (phase == TD_SCHED_WAITING) {
    unlink_waiting(sched, i);
  } else {
    release_running(sched, e);
  }
  *e = (entry){.next = sched->free_list};
  sched->free_list = i;
  return phase;
}

void td_sched_requeue(td_sched *sched, uint64_t id) {
  uint32_t i = find(sched, id);
  TD_CHECK(i != NONE && sched->entries[i].phase > TD_SCHED_WAITING);
  release_running(sched, &sched->entries[i]);
  uint32_t after = NONE;
  for (uint32_t j = sched->head; j != NONE; j = sched->entries[j].next) {
    if (sched->entries[j].arrival > sched->entries[i].arrival) break;
    after = j;
  }
  link_waiting(sched, i, after);
}

void td_sched_forget(td_sched *sched) {
  TD_CHECK(sched->n_running == 0);
  td_kv_forget(sched->kv);
}

td_sched_phase td_sched_phase_of(const td_sched *sched, uint64_t id) {
  uint32_t i = find(sched, id);
  return i == NONE ? TD_SCHED_UNKNOWN : sched->entries[i].phase;
}

uint32_t td_sched_n_waiting(const td_sched *sched) {
  return sched->n_waiting;
}

uint32_t td_sched_n_running(const td_sched *sched) {
  return sched->n_running;
}

uint32_t td_sched_n_free_pages(const td_sched *sched) {
  return td_kv_n_free(sched->kv);
}

const td_kv *td_sched_kv(const td_sched *sched) {
  return sched->kv;
}
