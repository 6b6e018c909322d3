// src/sched/sched.c
// Requests live in a fixed pool of entries; the waiting ones form a list in order of arrival. An id
// is found by a scan: there are at most max_waiting + max_seqs entries, and it happens a few times
// in a request's life, never for each token.
#include "sched/sched.h"

#include <stdlib.h>

#define NONE UINT32_MAX

typedef struct {
  uint64_t id, arrival, submitted_ns;
  uint32_t n_pages;
  uint32_t prev, next; // waiting: neighbours; free: next
  td_sched_phase phase;
} entry;

struct td_sched {
  td_sched_opts opts;
  entry *entries;
  uint32_t n_entries;
  uint32_t free_list, head, tail;
  uint32_t n_waiting, n_running, n_free_pages;
  uint64_t n_arrived;
};

td_status td_sched_open(td_sched **out, const td_sched_opts *opts, td_err *err) {
  *out = NULL;
  if (!opts->max_seqs || !opts->n_pages || !opts->page_tokens || !opts->max_waiting) {
    return td_fail(err, TD_EINVAL,
                   "a scheduler needs sequences, pages and a queue, none of them 0");
  }
  size_t n = (size_t)opts->max_seqs + opts->max_waiting;
  td_sched *sched = n < NONE ? calloc(1, sizeof *sched) : NULL;
  entry *entries = sched ? calloc(n, sizeof *entries) : NULL;
  if (!entries) {
    free(sched);
    return td_fail(err, TD_ENOMEM, "out of memory for a queue of %zu requests", n);
  }
  *sched = (td_sched){.opts = *opts,
                      .entries = entries,
                      .n_entries = (uint32_t)n,
                      .head = NONE,
                      .tail = NONE,
                      .n_free_pages = opts->n_pages};
  for (uint32_t i = 0; i < sched->n_entries; i++)
    entries[i].next = i + 1 < sched->n_entries ? i + 1 : NONE;
  *out = sched;
  return TD_OK;
}

void td_sched_close(td_sched *sched) {
  if (!sched) return;
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

static void release_running(td_sched *sched, uint32_t i) {
  sched->n_running--;
  sched->n_free_pages += sched->entries[i].n_pages;
  TD_CHECK(sched->n_free_pages <= sched->opts.n_pages);
}

td_status td_sched_submit(td_sched *sched, uint64_t id, uint64_t n_tokens, uint64_t now_ns,
                          td_err *err) {
  TD_CHECK(find(sched, id) == NONE);
  uint64_t page_tokens = sched->opts.page_tokens;
  uint64_t n_pages = n_tokens / page_tokens + (n_tokens % page_tokens != 0);
  if (n_pages > sched->opts.n_pages) {
    return td_fail(err, TD_ELIMIT, "%llu tokens of prompt and answer; the KV pool holds %llu",
                   (unsigned long long)n_tokens,
                   (unsigned long long)sched->opts.n_pages * page_tokens);
  }
  if (sched->n_waiting >= sched->opts.max_waiting) {
    return td_fail(err, TD_EAGAIN, "%u requests wait already", sched->n_waiting);
  }
  uint32_t i = sched->free_list;
  TD_CHECK(i != NONE);
  entry *e = &sched->entries[i];
  sched->free_list = e->next;
  *e = (entry){.id = id,
               .arrival = sched->n_arrived++,
               .submitted_ns = now_ns,
               .n_pages = (uint32_t)n_pages};
  link_waiting(sched, i, sched->tail);
  return TD_OK;
}

bool td_sched_admit(td_sched *sched, uint64_t now_ns, td_admission *out) {
  uint32_t i = sched->head;
  if (i == NONE || sched->n_running >= sched->opts.max_seqs) return false;
  entry *e = &sched->entries[i];
  if (e->n_pages > sched->n_free_pages) return false;
  unlink_waiting(sched, i);
  e->phase = TD_SCHED_RUNNING;
  sched->n_running++;
  sched->n_free_pages -= e->n_pages;
  *out = (td_admission){.id = e->id, .waited_ns = now_ns - e->submitted_ns};
  return true;
}

td_sched_phase td_sched_remove(td_sched *sched, uint64_t id) {
  uint32_t i = find(sched, id);
  if (i == NONE) return TD_SCHED_UNKNOWN;
  entry *e = &sched->entries[i];
  td_sched_phase phase = e->phase;
  if (phase == TD_SCHED_WAITING) {
    unlink_waiting(sched, i);
  } else {
    release_running(sched, i);
  }
  *e = (entry){.next = sched->free_list};
  sched->free_list = i;
  return phase;
}

void td_sched_requeue(td_sched *sched, uint64_t id) {
  uint32_t i = find(sched, id);
  TD_CHECK(i != NONE && sched->entries[i].phase == TD_SCHED_RUNNING);
  release_running(sched, i);
  uint32_t after = NONE;
  for (uint32_t j = sched->head; j != NONE; j = sched->entries[j].next) {
    if (sched->entries[j].arrival > sched->entries[i].arrival) break;
    after = j;
  }
  link_waiting(sched, i, after);
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
  return sched->n_free_pages;
}
