// src/sched/sched.c - admission, growth and preemption.
// Requests are in a fixed table with open addressing by id. Admission scans the waiting ones; every
// event scans the few that run.
#include "sched/sched.h"

#include <stdlib.h>

#include "sched/fair_share.h"

#define ANSWER_COST     2           // of a generated token; a prompt token costs 1
#define DUE_STRETCH     4           // the first token is due after this many times the prefill time
#define PATIENCE_NS     1000000000u // time past due until others are preempted for it
#define FIRST_GUESS_NS  1000000u    // prefill time per token until measured
#define MAX_PASSED      8           // tenants that await a prefix, until nobody is admitted
#define MEASURED_TOKENS 8192u       // the prefill speed is averaged over about this many tokens

typedef struct {
  uint64_t id, arrival, submitted_ns;
  td_sched_job job;
  uint32_t tenant;     // index, valid while it waits or runs
  uint32_t n_uncached; // prompt tokens not in the prefix cache at submission
  uint32_t n_charged;  // prompt tokens that its tenant was charged for, or that were cached
  bool has_run;

  uint32_t n_answer; // generated tokens when it was last requeued
  uint32_t n_done;   // tokens in its pages, or when it was preempted
  uint32_t seq;      // running: its sequence in kv
  uint32_t n_pages;  // running
  bool is_leaving;   // running: being preempted
  bool is_settled;   // running: see td_sched_settle
  int32_t keep;      // running: a page for a copy, until that is made; -1: none
  td_sched_phase phase;
} entry;

struct td_sched {
  td_sched_opts opts;
  td_kv *kv;
  entry *entries; // [n_entries]
  uint32_t n_entries;
  entry **running; // [max_seqs], the first n_running
  // the request that could not be admitted last time for lack of a sequence or pages; or NULL
  const entry *blocked;
  uint32_t n_waiting, n_running, n_reading;
  uint64_t n_prefill_left; // tokens left of the prefills in progress
  uint64_t n_arrived, n_preemptions;
  td_fair_share_share fair;
  // Prefill speed: decaying sums, and the time up to which prefill_ns is counted.
  uint64_t prefill_tokens, prefill_ns, prefilling_since_ns;
  // Queue speed: average time between admissions (0: unknown), and when the current wait began.
  uint64_t admission_ns, awaited_since_ns;
};

td_status td_sched_open(td_sched **out, const td_sched_opts *opts, td_err *err) {
  *out = NULL;
  if (!opts->max_waiting) return td_fail(err, TD_EINVAL, "a scheduler needs a queue");
  size_t n = (size_t)opts->max_seqs + opts->max_waiting;
  td_sched *sched = n < UINT32_MAX ? calloc(1, sizeof *sched) : NULL;
  if (!sched) return td_fail(err, TD_ENOMEM, "out of memory for a queue of %zu requests", n);
  *sched = (td_sched){.opts = *opts,
                      .entries = calloc(n, sizeof(entry)),
                      .n_entries = (uint32_t)n,
                      .running = calloc(opts->max_seqs + (size_t)1, sizeof(entry *))};
  const td_kv_opts kv = {.page_tokens = opts->page_tokens,
                         .n_pages = opts->n_pages,
                         .max_seqs = opts->max_seqs,
                         .root = opts->kv_root,
                         .listener = opts->kv_listener};
  bool has_tables = sched->entries && sched->running;
  td_status st = has_tables ? td_kv_open(&sched->kv, &kv, err)
                            : td_fail(err, TD_ENOMEM, "out of memory for %zu requests", n);
  if (st == TD_OK) st = td_fair_share_open(&sched->fair, (uint32_t)n, err);
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
  td_fair_share_close(&sched->fair);
  free(sched->running);
  free(sched->entries);
  free(sched);
}

static entry *find(const td_sched *sched, uint64_t id) {
  for (uint32_t i = 0; i < sched->n_entries; i++) {
    entry *e = &sched->entries[(id + i) % sched->n_entries];
    if (e->phase != TD_SCHED_UNKNOWN && e->id == id) return e;
  }
  return NULL;
}

// The free entry that find(id) reaches first.
static entry *find_free(const td_sched *sched, uint64_t id) {
  for (uint32_t i = 0; i < sched->n_entries; i++) {
    entry *e = &sched->entries[(id + i) % sched->n_entries];
    if (e->phase == TD_SCHED_UNKNOWN) return e;
  }
  return NULL;
}

static bool is_running(const entry *e) {
  return e->phase == TD_SCHED_PREFILL || e->phase == TD_SCHED_DECODE;
}

// Tokens to prefill or replay before the next token can be sampled: the prompt, and all generated
// tokens except the last.
static uint32_t n_to_prefill(const entry *e) {
  return e->job.n_prompt + (e->n_answer ? e->n_answer - 1 : 0);
}

static uint64_t n_max(const td_sched_job *job) {
  return (uint64_t)job->n_prompt + job->max_tokens;
}

// Tokens it should have pages for: half a page ahead, so that a page is there before it is needed.
static uint32_t n_wanted(const td_sched *sched, const entry *e) {
  uint32_t n = e->n_done > n_to_prefill(e) ? e->n_done : n_to_prefill(e);
  uint64_t ahead = (uint64_t)n + 1 + sched->opts.page_tokens / 2;
  return ahead < n_max(&e->job) ? (uint32_t)ahead : (uint32_t)n_max(&e->job);
}

static uint32_t n_prefill_left(const entry *e) {
  return e->phase == TD_SCHED_PREFILL ? n_to_prefill(e) - e->n_done : 0;
}

static td_kv_answer answer_of(const entry *e) {
  return (td_kv_answer){.owner = e->id,
                        .tokens = e->job.tokens,
                        .n_prompt = e->job.n_prompt,
                        .n_tokens = e->n_done,
                        .has_partial = e->is_settled};
}

static td_tenant *tenant_of(const td_sched *sched, const entry *e) {
  return &sched->fair.tenants[e->tenant];
}

static void count_prefills(td_sched *sched, const entry *e, int by) {
  sched->n_reading += (uint32_t)by;
  tenant_of(sched, e)->n_prefills += (uint32_t)by;
}

static void begin_waiting(td_sched *sched, entry *e) {
  td_fair_share_raise(&sched->fair, tenant_of(sched, e));
  e->phase = TD_SCHED_WAITING;
  sched->n_waiting++;
  tenant_of(sched, e)->n_waiting++;
}

static void stop_waiting(td_sched *sched, entry *e) {
  if (sched->blocked == e) sched->blocked = NULL;
  sched->n_waiting--;
  tenant_of(sched, e)->n_waiting--;
}

static void stop_running(td_sched *sched, entry *e) {
  uint32_t i = 0;
  while (sched->running[i] != e)
    i++;
  sched->running[i] = sched->running[--sched->n_running];
  tenant_of(sched, e)->n_running--;
  sched->n_prefill_left -= n_prefill_left(e);
  if (e->phase == TD_SCHED_PREFILL) count_prefills(sched, e, -1);
}

td_status td_sched_submit(td_sched *sched, uint64_t id, const td_sched_job *job, uint64_t now_ns,
                          td_err *err) {
  TD_CHECK(find(sched, id) == NULL && job->n_prompt > 0);
  uint64_t pool_tokens = (uint64_t)sched->opts.n_pages * sched->opts.page_tokens;
  if (n_max(job) > pool_tokens || n_max(job) > UINT32_MAX) {
    return td_fail(err, TD_ELIMIT, "prompt and output need %llu tokens, the KV pool holds %llu",
                   (unsigned long long)n_max(job), (unsigned long long)pool_tokens);
  }
  const td_tenant *tenant = td_fair_share_find(&sched->fair, job->tenant);
  uint32_t n_own = tenant ? tenant->n_waiting : 0, n_waiting = sched->n_waiting;
  uint32_t n_left = n_waiting < sched->opts.max_waiting ? sched->opts.max_waiting - n_waiting : 0;
  entry *e = n_own < n_left ? find_free(sched, id) : NULL;
  if (!e) {
    return td_fail(err, TD_EAGAIN,
                   "the queue is full: %u requests wait, %u of them with this API key", n_waiting,
                   n_own);
  }
  if (!n_waiting) sched->awaited_since_ns = now_ns;
  *e = (entry){.id = id,
               .arrival = sched->n_arrived++,
               .submitted_ns = now_ns,
               .job = *job,
               .keep = -1,
               .tenant = td_fair_share_join(&sched->fair, job->tenant, job->weight),
               .n_uncached = job->n_prompt -
                             td_kv_match(sched->kv, job->salt, job->tokens, job->n_prompt)};
  begin_waiting(sched, e);
  return TD_OK;
}

// ---- admission --------------------------------------------------------------------------------

static uint32_t common_prefix_len(const td_sched_job *a, const td_sched_job *b) {
  uint32_t n = 0, least = a->n_prompt < b->n_prompt ? a->n_prompt : b->n_prompt;
  while (n < least && a->salt == b->salt && a->tokens[n] == b->tokens[n])
    n++;
  return n;
}

// Whether a prefill in progress will leave more of this prompt in the prefix cache than it has now.
static bool awaits_prefix(const td_sched *sched, const td_sched_job *job) {
  uint32_t page_tokens = sched->opts.page_tokens;
  for (uint32_t i = 0; i < sched->n_running && sched->n_prefill_left && !job->is_fresh; i++) {
    const entry *e = sched->running[i];
    if (e->phase != TD_SCHED_PREFILL || e->n_done >= e->job.n_prompt) continue;
    uint32_t n = common_prefix_len(job, &e->job);
    if (n == job->n_prompt) n--; // the last token is always computed
    const bool is_kept = e->keep >= 0 && n >= e->job.n_keep;
    if (n < page_tokens && !is_kept) continue;
    const uint32_t n_cached = td_kv_match(sched->kv, job->salt, job->tokens, job->n_prompt);
    if (n / page_tokens > n_cached / page_tokens) return true;
    if (is_kept && e->job.n_keep > n_cached) return true;
  }
  return false;
}

// Reserves the pages that it needs to begin. If it is the only one and the pool cannot hold both
// them and the page that the first would be a copy of, it takes that page itself.
static bool reserve(td_sched *sched, const entry *e, uint32_t seq) {
  td_err err; // too few pages is not an error
  const uint32_t n = n_wanted(sched, e);
  if (td_kv_reserve(sched->kv, seq, n, &err) == TD_OK)
    return !sched->n_running || td_kv_n_free(sched->kv) >= sched->n_running;
  return !sched->n_running && td_kv_take_source(sched->kv, seq) &&
         td_kv_reserve(sched->kv, seq, n, &err) == TD_OK;
}

// Takes a page for the copy that the request wants kept, if one is free beyond those that running
// requests may need.
static int32_t take_keep(td_sched *sched, const entry *e) {
  const uint32_t n_keep = e->job.n_keep;
  if (n_keep <= e->n_done || n_keep % sched->opts.page_tokens == 0) return -1;
  if (td_kv_n_free(sched->kv) <= sched->n_running) return -1;
  return td_kv_take_spare(sched->kv, e->seq);
}

// Opens the request's sequence with the pages it needs to begin, all or nothing.
static bool take_pages(td_sched *sched, entry *e) {
  td_err err; // too few pages is not an error
  uint32_t n_cached, seq;
  if (td_kv_seq_open(sched->kv, &seq, &err) != TD_OK) return false;
  td_kv_set_salt(sched->kv, seq, e->job.salt);
  if (e->n_answer) {
    const td_kv_answer answer = answer_of(e);
    n_cached = td_kv_resume(sched->kv, seq, &answer);
  } else {
    n_cached = e->job.is_fresh ? 0 : td_kv_reuse(sched->kv, seq, e->job.tokens, e->job.n_prompt);
  }
  if (reserve(sched, e, seq)) {
    e->seq = seq;
    e->n_done = n_cached;
    e->keep = take_keep(sched, e);
    return true;
  }
  const td_kv_answer answer = {.owner = e->id,
                               .tokens = e->job.tokens,
                               .n_prompt = e->job.n_prompt,
                               .n_tokens = n_cached,
                               .has_partial = td_kv_has_partial(sched->kv, seq)};
  td_kv_suspend(sched->kv, seq, &answer);
  return false;
}

// The oldest running request that needs more pages.
static entry *first_short(const td_sched *sched) {
  entry *first = NULL;
  for (uint32_t i = 0; i < sched->n_running; i++) {
    entry *e = sched->running[i];
    if (e->is_leaving) continue;
    if ((uint64_t)e->n_pages * sched->opts.page_tokens >= n_wanted(sched, e)) continue;
    if (!first || e->arrival < first->arrival) first = e;
  }
  return first;
}

// Estimated time to prefill n_tokens.
static uint64_t prefill_eta_ns(const td_sched *sched, uint64_t n_tokens) {
  if (!sched->prefill_tokens) return n_tokens * FIRST_GUESS_NS;
  return (uint64_t)((double)n_tokens * (double)sched->prefill_ns / (double)sched->prefill_tokens);
}

static uint64_t due_ns(const td_sched *sched, const entry *e) {
  return e->submitted_ns + DUE_STRETCH * prefill_eta_ns(sched, e->n_uncached);
}

// Of two that wait or are in prefill.
static bool goes_before(const td_sched *sched, const entry *a, const entry *b) {
  if (a->tenant != b->tenant)
    return td_fair_share_is_before(&sched->fair, tenant_of(sched, a), tenant_of(sched, b));
  if (a->phase == TD_SCHED_WAITING && b->phase == TD_SCHED_WAITING) {
    if (a->has_run != b->has_run) return a->has_run;
    if (a->has_run) return a->arrival < b->arrival;
  }
  uint64_t x = due_ns(sched, a), y = due_ns(sched, b);
  return x != y ? x < y : a->arrival < b->arrival;
}

// The waiting request that goes before the others; not of these tenants.
static entry *first_waiting(const td_sched *sched, const uint32_t *passed, uint32_t n_passed) {
  entry *first = NULL;
  for (uint32_t i = 0; i < sched->n_entries && sched->n_waiting; i++) {
    entry *e = &sched->entries[i];
    bool is_passed = e->phase != TD_SCHED_WAITING;
    for (uint32_t k = 0; k < n_passed && !is_passed; k++)
      is_passed = e->tenant == passed[k];
    if (!is_passed && (!first || goes_before(sched, e, first))) first = e;
  }
  return first;
}

// A tenant whose first request awaits a prefix lets others pass; a few tenants at most are asked,
// since that takes time.
static entry *next_waiting(const td_sched *sched) {
  uint32_t passed[MAX_PASSED], n = 0;
  for (;;) {
    entry *e = first_waiting(sched, passed, n);
    if (!e || !awaits_prefix(sched, &e->job)) return e;
    if (n == MAX_PASSED) return NULL;
    passed[n++] = e->tenant;
  }
}

static const entry *first_prefill(const td_sched *sched, td_sched_filter *is_among, void *ctx) {
  const entry *first = NULL;
  for (uint32_t i = 0; i < sched->n_running; i++) {
    const entry *e = sched->running[i];
    if (e->phase != TD_SCHED_PREFILL || (is_among && !is_among(ctx, e->id))) continue;
    if (!first || goes_before(sched, e, first)) first = e;
  }
  return first;
}

bool td_sched_next_prefill(const td_sched *sched, td_sched_filter *is_among, void *ctx,
                           uint64_t *id) {
  const entry *first = first_prefill(sched, is_among, ctx);
  if (first) *id = first->id;
  return first != NULL;
}

static void begin_running(td_sched *sched, entry *e, uint64_t now_ns) {
  td_tenant *tenant = tenant_of(sched, e);
  stop_waiting(sched, e);
  if (sched->n_waiting) {
    uint64_t ns = now_ns - sched->awaited_since_ns;
    sched->admission_ns = sched->admission_ns ? (7 * sched->admission_ns + ns) / 8 : ns;
  }
  sched->awaited_since_ns = now_ns;
  tenant->n_running++;
  sched->running[sched->n_running++] = e;
  e->phase = e->n_done < n_to_prefill(e) ? TD_SCHED_PREFILL : TD_SCHED_DECODE;
  if (e->phase == TD_SCHED_PREFILL && !sched->n_reading) sched->prefilling_since_ns = now_ns;
  if (e->phase == TD_SCHED_PREFILL) count_prefills(sched, e, 1);
  sched->n_prefill_left += n_prefill_left(e);
  if (!e->has_run) e->n_charged = e->n_done;
  e->has_run = true;
}

bool td_sched_admit(td_sched *sched, uint64_t now_ns, td_admission *out) {
  entry *e = next_waiting(sched);
  if (!e) return false;
  const entry *first = first_prefill(sched, NULL, NULL);
  const bool urgent = first && goes_before(sched, e, first);
  sched->blocked = NULL;
  if (first_short(sched) || (sched->n_prefill_left > sched->opts.prefill_ahead && !urgent))
    return false;
  bool has_seq = sched->n_running < sched->opts.max_seqs;
  if (!has_seq || !take_pages(sched, e)) {
    sched->blocked = e;
    return false;
  }
  begin_running(sched, e, now_ns);
  *out = (td_admission){.id = e->id,
                        .n_cached = e->n_done,
                        .is_urgent = urgent,
                        .source = td_kv_source(sched->kv, e->seq),
                        .keep = e->keep,
                        .n_keep = e->keep >= 0 ? e->job.n_keep : 0};
  out->pages = td_kv_pages(sched->kv, e->seq, &out->n_pages);
  e->n_pages = out->n_pages;
  return true;
}

uint64_t td_sched_retry_ns(const td_sched *sched, uint64_t now_ns) {
  uint64_t n_prefill_waiting = 0;
  for (uint32_t i = 0; i < sched->n_entries; i++) {
    const entry *e = &sched->entries[i];
    if (e->phase == TD_SCHED_WAITING) n_prefill_waiting += e->n_uncached;
  }
  uint64_t to_prefill_ns = prefill_eta_ns(sched, sched->n_prefill_left + n_prefill_waiting);
  uint64_t since_ns = now_ns - sched->awaited_since_ns;
  uint64_t each_ns = sched->admission_ns > since_ns ? sched->admission_ns : since_ns;
  uint64_t to_begin_ns = sched->n_waiting * each_ns;
  return (to_prefill_ns > to_begin_ns ? to_prefill_ns : to_begin_ns) / 2;
}

// ---- running ----------------------------------------------------------------------------------

static void note_reading(td_sched *sched, uint32_t n_tokens, uint64_t now_ns) {
  sched->prefill_tokens += n_tokens;
  sched->prefill_ns += now_ns - sched->prefilling_since_ns;
  sched->prefilling_since_ns = now_ns;
  if (sched->prefill_tokens < MEASURED_TOKENS) return;
  sched->prefill_tokens /= 2;
  sched->prefill_ns /= 2;
}

// The source was copied, and at n_keep tokens so was the page to be kept. More tokens than that at
// once came from elsewhere, and no copy was made.
static void note_copies(td_sched *sched, entry *e) {
  td_kv_drop_source(sched->kv, e->seq);
  if (e->keep < 0 || e->n_done < e->job.n_keep) return;
  if (e->n_done == e->job.n_keep)
    td_kv_keep_spare(sched->kv, e->seq, e->job.tokens, e->n_done);
  else
    td_kv_drop_spare(sched->kv, e->seq);
  e->keep = -1;
}

// Charges its tenant for the tokens up to n_done; for none twice that are recomputed.
static void charge(td_sched *sched, entry *e, uint32_t n_done) {
  const uint32_t n = n_done < e->job.n_prompt ? n_done : e->job.n_prompt;
  if (e->phase == TD_SCHED_DECODE)
    td_fair_share_charge(&sched->fair, tenant_of(sched, e),
                         (uint64_t)ANSWER_COST * (n_done - e->n_done), false);
  if (e->phase == TD_SCHED_DECODE || n <= e->n_charged) return;
  td_fair_share_charge(&sched->fair, tenant_of(sched, e), n - e->n_charged, true);
  e->n_charged = n;
}

void td_sched_progress(td_sched *sched, uint64_t id, uint32_t n_done, uint64_t now_ns) {
  entry *e = find(sched, id);
  if (!e || !is_running(e) || n_done <= e->n_done || n_done > n_max(&e->job)) return;
  if ((uint64_t)n_done > (uint64_t)e->n_pages * sched->opts.page_tokens) return;
  uint32_t n_before = e->n_done, n_prompt = e->job.n_prompt;
  charge(sched, e, n_done);
  if (e->phase == TD_SCHED_PREFILL) note_reading(sched, n_done - n_before, now_ns);
  sched->n_prefill_left -= n_prefill_left(e);
  e->n_done = n_done;
  e->is_settled = false;
  if (n_before < n_prompt)
    td_kv_commit(sched->kv, e->seq, e->job.tokens, n_done < n_prompt ? n_done : n_prompt);
  note_copies(sched, e);
  if (n_before < n_prompt && n_done >= n_prompt) td_kv_drop_duplicates(sched->kv, e->seq);
  if (e->phase == TD_SCHED_PREFILL && n_done >= n_to_prefill(e)) {
    count_prefills(sched, e, -1);
    e->phase = TD_SCHED_DECODE;
  }
  sched->n_prefill_left += n_prefill_left(e);
}

bool td_sched_grow(td_sched *sched, td_growth *out) {
  td_err err; // too few pages is not an error
  entry *e = first_short(sched);
  if (!e || td_kv_reserve(sched->kv, e->seq, n_wanted(sched, e), &err) != TD_OK) return false;
  *out = (td_growth){.id = e->id};
  out->pages = td_kv_pages(sched->kv, e->seq, &out->n_pages);
  e->n_pages = out->n_pages;
  return true;
}

// The newest running request, of one tenant or (NULL) of all.
static entry *last_running(const td_sched *sched, const td_tenant *of) {
  entry *last = NULL;
  for (uint32_t i = 0; i < sched->n_running; i++) {
    entry *e = sched->running[i];
    if (of && tenant_of(sched, e) != of) continue;
    if (!last || e->arrival > last->arrival) last = e;
  }
  return last;
}

// The most served tenant among those with several running requests.
static const td_tenant *richest(const td_sched *sched) {
  const td_tenant *most = NULL;
  for (uint32_t i = 0; i < sched->fair.n; i++) {
    const td_tenant *t = &sched->fair.tenants[i];
    if (t->n_running > 1 && (!most || t->served > most->served)) most = t;
  }
  return most;
}

static entry *who_makes_room(const td_sched *sched, uint64_t now_ns) {
  const entry *in_need = first_short(sched);
  if (in_need) {
    if (td_kv_n_free(sched->kv)) return NULL;
    entry *last = last_running(sched, NULL);
    return last->arrival > in_need->arrival ? last : NULL;
  }
  const entry *next = sched->blocked ? next_waiting(sched) : NULL;
  if (!next || tenant_of(sched, next)->n_running) return NULL;
  // next has not been tried yet
  if (next != sched->blocked && sched->n_running < sched->opts.max_seqs) return NULL;
  if (now_ns < due_ns(sched, next) + PATIENCE_NS) return NULL;
  const td_tenant *rich = richest(sched);
  return rich ? last_running(sched, rich) : NULL;
}

bool td_sched_preempt(td_sched *sched, uint64_t now_ns, uint64_t *id) {
  for (uint32_t i = 0; i < sched->n_running; i++)
    if (sched->running[i]->is_leaving) return false;
  entry *e = who_makes_room(sched, now_ns);
  if (!e) return false;
  e->is_leaving = true;
  *id = e->id;
  return true;
}

td_thread_split td_sched_lease(const td_sched *sched) {
  uint32_t n = sched->opts.n_threads, share = sched->opts.prefill_threads;
  if (!sched->n_reading || sched->n_reading == sched->n_running || n < 2)
    return (td_thread_split){n, n};
  if (share < 1) share = 1;
  if (share > n - 1) share = n - 1;
  return (td_thread_split){.prefill = share, .decode = n - share};
}

// ---- end and requeue --------------------------------------------------------------------------

void td_sched_settle(td_sched *sched, uint64_t id) {
  entry *e = find(sched, id);
  if (!e || !is_running(e)) return;
  e->is_settled = td_kv_source(sched->kv, e->seq) < 0; // else its page is not filled yet
}

// Closes its sequence; what later prompts may find stays in the cache.
static void let_go(td_sched *sched, const entry *e, td_sched_phase phase) {
  if (e->is_settled && e->n_done <= e->job.n_prompt) {
    const td_kv_answer answer = answer_of(e);
    td_kv_suspend(sched->kv, e->seq, &answer);
    return;
  }
  if (sched->opts.shares_output && phase == TD_SCHED_DECODE)
    td_kv_commit_output(sched->kv, e->seq, e->job.tokens, e->n_done, e->is_settled);
  td_kv_seq_close(sched->kv, e->seq);
}

td_sched_phase td_sched_remove(td_sched *sched, uint64_t id) {
  entry *e = find(sched, id);
  if (!e) return TD_SCHED_UNKNOWN;
  td_sched_phase phase = e->phase;
  if (phase == TD_SCHED_WAITING) {
    const td_kv_answer answer = answer_of(e);
    td_kv_drop_suspended(sched->kv, &answer);
    stop_waiting(sched, e);
  } else {
    stop_running(sched, e);
    let_go(sched, e, phase);
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
  if (e->n_done > n_to_prefill(e)) {
    e->n_done = n_to_prefill(e);
    e->is_settled = false;
  }
  const td_kv_answer answer = answer_of(e);
  td_kv_suspend(sched->kv, e->seq, &answer);
  e->is_leaving = e->is_settled = false;
  e->keep = -1;
  begin_waiting(sched, e);
}

void td_sched_forget(td_sched *sched) {
  TD_CHECK(sched->n_running == 0);
  td_kv_invalidate_all(sched->kv);
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
