// src/sched/sched.c
// Requests live in a fixed pool of entries, which is small enough to be scanned: an event looks at
// each of them a few times.
#include "sched/sched.h"

#include <stdlib.h>

typedef struct {
  uint64_t id, arrival, submitted_ns;
  td_sched_job job;
  uint32_t n_answer; // tokens of the answer that were known when it was last queued
  uint32_t n_done;   // tokens in its pages, or that were when it made room
  uint32_t seq;      // running: of the KV tables
  uint32_t n_pages;  // running
  bool is_leaving;   // running: called back
  td_sched_phase phase;
} entry;

struct td_sched {
  td_sched_opts opts;
  td_kv *kv;
  entry *entries; // [n_entries]
  uint32_t n_entries;
  uint32_t n_waiting, n_running, n_reading;
  uint64_t n_unread; // tokens of the prompts being read
  uint64_t n_arrived, n_preemptions;
};

td_status td_sched_open(td_sched **out, const td_sched_opts *opts, td_err *err) {
  *out = NULL;
  if (!opts->max_waiting) return td_fail(err, TD_EINVAL, "a scheduler needs a queue");
  size_t n = (size_t)opts->max_seqs + opts->max_waiting;
  td_sched *sched = n < UINT32_MAX ? calloc(1, sizeof *sched) : NULL;
  if (!sched) return td_fail(err, TD_ENOMEM, "out of memory for a queue of %zu requests", n);
  *sched = (td_sched){.opts = *opts, .entries = calloc(n, sizeof(entry)), .n_entries = (uint32_t)n};
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
  *out = sched;
  return TD_OK;
}

void td_sched_close(td_sched *sched) {
  if (!sched) return;
  td_kv_close(sched->kv);
  free(sched->entries);
  free(sched);
}

static entry *find(const td_sched *sched, uint64_t id) {
  for (uint32_t i = 0; i < sched->n_entries; i++) {
    entry *e = &sched->entries[i];
    if (e->phase != TD_SCHED_UNKNOWN && e->id == id) return e;
  }
  return NULL;
}

static entry *find_free(const td_sched *sched) {
  for (uint32_t i = 0; i < sched->n_entries; i++) {
    if (sched->entries[i].phase == TD_SCHED_UNKNOWN) return &sched->entries[i];
  }
  return NULL;
}

static bool is_running(const entry *e) {
  return e->phase == TD_SCHED_PREFILL || e->phase == TD_SCHED_DECODE;
}

// Tokens that are computed before the next one is drawn but by the step that draws it: the prompt,
// and of a known answer all but the last.
static uint32_t n_to_read(const entry *e) {
  return e->job.n_prompt + (e->n_answer ? e->n_answer - 1 : 0);
}

static uint64_t n_most(const td_sched_job *job) {
  return (uint64_t)job->n_prompt + job->max_tokens;
}

// Tokens that it should have pages for: half a page ahead, so that a page is there before it is
// needed.
static uint32_t n_wanted(const td_sched *sched, const entry *e) {
  uint32_t n = e->n_done > n_to_read(e) ? e->n_done : n_to_read(e);
  uint64_t ahead = (uint64_t)n + 1 + sched->opts.page_tokens / 2;
  return ahead < n_most(&e->job) ? (uint32_t)ahead : (uint32_t)n_most(&e->job);
}

static uint32_t n_unread(const entry *e) {
  return e->phase == TD_SCHED_PREFILL ? n_to_read(e) - e->n_done : 0;
}

static td_kv_answer answer_of(const entry *e) {
  return (td_kv_answer){
      .owner = e->id, .tokens = e->job.tokens, .n_prompt = e->job.n_prompt, .n_tokens = e->n_done};
}

static void stop_running(td_sched *sched, entry *e) {
  sched->n_running--;
  sched->n_reading -= e->phase == TD_SCHED_PREFILL;
  sched->n_unread -= n_unread(e);
}

td_status td_sched_submit(td_sched *sched, uint64_t id, const td_sched_job *job, uint64_t now_ns,
                          td_err *err) {
  TD_CHECK(find(sched, id) == NULL && job->n_prompt > 0);
  uint64_t pool_tokens = (uint64_t)sched->opts.n_pages * sched->opts.page_tokens;
  if (n_most(job) > pool_tokens || n_most(job) > UINT32_MAX) {
    return td_fail(err, TD_ELIMIT, "%llu tokens of prompt and answer; the KV pool holds %llu",
                   (unsigned long long)n_most(job), (unsigned long long)pool_tokens);
  }
  entry *e = sched->n_waiting < sched->opts.max_waiting ? find_free(sched) : NULL;
  if (!e) return td_fail(err, TD_EAGAIN, "%u requests wait already", sched->n_waiting);
  *e = (entry){.id = id,
               .arrival = sched->n_arrived++,
               .submitted_ns = now_ns,
               .job = *job,
               .phase = TD_SCHED_WAITING};
  sched->n_waiting++;
  return TD_OK;
}

// ---- admission --------------------------------------------------------------------------------

static uint32_t n_alike(const td_sched_job *a, const td_sched_job *b) {
  uint32_t n = 0, least = a->n_prompt < b->n_prompt ? a->n_prompt : b->n_prompt;
  while (n < least && a->tokens[n] == b->tokens[n])
    n++;
  return n;
}

// Whether a prompt that is being read will leave more of this one in the cache than there is now.
static bool awaits_prefix(const td_sched *sched, const td_sched_job *job) {
  uint32_t page_tokens = sched->opts.page_tokens;
  uint32_t n_cached = td_kv_match(sched->kv, job->tokens, job->n_prompt);
  for (uint32_t i = 0; i < sched->n_entries && sched->n_unread; i++) {
    const entry *e = &sched->entries[i];
    if (e->phase != TD_SCHED_PREFILL || e->n_done >= e->job.n_prompt) continue;
    uint32_t n = n_alike(job, &e->job);
    if (n == job->n_prompt) n--; // its last token is computed in any case
    if (n / page_tokens > n_cached / page_tokens) return true;
  }
  return false;
}

// Gives the request its sequence and the pages that it needs to begin, or nothing.
static bool take_pages(td_sched *sched, entry *e) {
  td_err err; // not enough now is no error
  uint32_t n_cached, seq;
  if (td_kv_seq_open(sched->kv, &seq, &err) != TD_OK) return false;
  if (e->n_answer) {
    const td_kv_answer answer = answer_of(e);
    n_cached = td_kv_resume(sched->kv, seq, &answer);
  } else {
    n_cached = td_kv_reuse(sched->kv, seq, e->job.tokens, e->job.n_prompt);
  }
  if (td_kv_reserve(sched->kv, seq, n_wanted(sched, e), &err) == TD_OK &&
      (!sched->n_running || td_kv_n_free(sched->kv) >= sched->n_running)) {
    e->seq = seq;
    e->n_done = n_cached;
    return true;
  }
  const td_kv_answer answer = {
      .owner = e->id, .tokens = e->job.tokens, .n_prompt = e->job.n_prompt, .n_tokens = n_cached};
  td_kv_park(sched->kv, seq, &answer);
  return false;
}

// The running request that came first of those whose pages do not reach far enough.
static entry *first_short(const td_sched *sched) {
  entry *first = NULL;
  for (uint32_t i = 0; i < sched->n_entries; i++) {
    entry *e = &sched->entries[i];
    if (!is_running(e) || e->is_leaving) continue;
    if ((uint64_t)e->n_pages * sched->opts.page_tokens >= n_wanted(sched, e)) continue;
    if (!first || e->arrival < first->arrival) first = e;
  }
  return first;
}

static entry *first_waiting(const td_sched *sched) {
  entry *first = NULL;
  for (uint32_t i = 0; i < sched->n_entries; i++) {
    entry *e = &sched->entries[i];
    if (e->phase == TD_SCHED_WAITING && (!first || e->arrival < first->arrival)) first = e;
  }
  return first;
}

bool td_sched_admit(td_sched *sched, uint64_t now_ns, td_admission *out) {
  if (!sched->n_waiting || sched->n_running >= sched->opts.max_seqs) return false;
  if (sched->n_unread > sched->opts.prefill_ahead || first_short(sched)) return false;
  entry *e = first_waiting(sched);
  if (awaits_prefix(sched, &e->job) || !take_pages(sched, e)) return false;
  sched->n_waiting--;
  sched->n_running++;
  e->phase = e->n_done < n_to_read(e) ? TD_SCHED_PREFILL : TD_SCHED_DECODE;
  sched->n_reading += e->phase == TD_SCHED_PREFILL;
  sched->n_unread += n_unread(e);
  *out = (td_admission){.id = e->id, .waited_ns = now_ns - e->submitted_ns, .n_cached = e->n_done};
  out->pages = td_kv_pages(sched->kv, e->seq, &out->n_pages);
  e->n_pages = out->n_pages;
  return true;
}

// ---- while it runs ----------------------------------------------------------------------------

void td_sched_progress(td_sched *sched, uint64_t id, uint32_t n_done) {
  entry *e = find(sched, id);
  if (!e || !is_running(e) || n_done <= e->n_done || n_done > n_most(&e->job)) return;
  if ((uint64_t)n_done > (uint64_t)e->n_pages * sched->opts.page_tokens) return;
  uint32_t n_before = e->n_done, n_prompt = e->job.n_prompt;
  sched->n_unread -= n_unread(e);
  e->n_done = n_done;
  if (n_before < n_prompt) {
    td_kv_commit(sched->kv, e->seq, e->job.tokens, n_done < n_prompt ? n_done : n_prompt);
    if (n_done >= n_prompt) td_kv_settle(sched->kv, e->seq);
  }
  if (e->phase == TD_SCHED_PREFILL && n_done >= n_to_read(e)) {
    e->phase = TD_SCHED_DECODE;
    sched->n_reading--;
  }
  sched->n_unread += n_unread(e);
}

bool td_sched_grow(td_sched *sched, td_growth *out) {
  td_err err; // not enough now is no error
  entry *e = first_short(sched);
  if (!e || td_kv_reserve(sched->kv, e->seq, n_wanted(sched, e), &err) != TD_OK) return false;
  *out = (td_growth){.id = e->id};
  out->pages = td_kv_pages(sched->kv, e->seq, &out->n_pages);
  e->n_pages = out->n_pages;
  return true;
}

bool td_sched_preempt(td_sched *sched, uint64_t *id) {
  const entry *in_need = first_short(sched);
  if (!in_need || td_kv_n_free(sched->kv)) return false;
  entry *last = NULL;
  for (uint32_t i = 0; i < sched->n_entries; i++) {
    entry *e = &sched->entries[i];
    if (!is_running(e)) continue;
    if (e->is_leaving) return false;
    if (e->arrival > in_need->arrival && (!last || e->arrival > last->arrival)) last = e;
  }
  if (!last) return false;
  last->is_leaving = true;
  *id = last->id;
  return true;
}

td_lease td_sched_lease(const td_sched *sched) {
  uint32_t n = sched->opts.n_threads, share = sched->opts.prefill_threads;
  if (!sched->n_reading || sched->n_reading == sched->n_running || n < 2) return (td_lease){n, n};
  if (share < 1) share = 1;
  if (share > n - 1) share = n - 1;
  return (td_lease){.prefill = share, .decode = n - share};
}

// ---- afterwards -------------------------------------------------------------------------------

td_sched_phase td_sched_remove(td_sched *sched, uint64_t id) {
  entry *e = find(sched, id);
  if (!e) return TD_SCHED_UNKNOWN;
  td_sched_phase phase = e->phase;
  if (phase == TD_SCHED_WAITING) {
    const td_kv_answer answer = answer_of(e);
    td_kv_discard(sched->kv, &answer);
    sched->n_waiting--;
  } else {
    stop_running(sched, e);
    td_kv_seq_close(sched->kv, e->seq);
  }
  e->phase = TD_SCHED_UNKNOWN;
  return phase;
}

void td_sched_requeue(td_sched *sched, uint64_t id, uint32_t n_answer) {
  entry *e = find(sched, id);
  TD_CHECK(e && is_running(e) && n_answer <= e->job.max_tokens);
  sched->n_preemptions += e->is_leaving;
  stop_running(sched, e);
  e->n_answer = n_answer;
  if (e->n_done > n_to_read(e)) e->n_done = n_to_read(e);
  const td_kv_answer answer = answer_of(e);
  td_kv_park(sched->kv, e->seq, &answer);
  e->is_leaving = false;
  e->phase = TD_SCHED_WAITING;
  sched->n_waiting++;
}

void td_sched_forget(td_sched *sched) {
  TD_CHECK(sched->n_running == 0);
  td_kv_forget(sched->kv);
}

td_sched_phase td_sched_phase_of(const td_sched *sched, uint64_t id) {
  const entry *e = find(sched, id);
  return e ? e->phase : TD_SCHED_UNKNOWN;
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

uint64_t td_sched_n_preemptions(const td_sched *sched) {
  return sched->n_preemptions;
}

const td_kv *td_sched_kv(const td_sched *sched) {
  return sched->kv;
}
