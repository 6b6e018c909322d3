// src/kv/kv.c - page tables, prefix cache and suspended sequences.
#include "kv/kv.h"

#include <stdlib.h>
#include <string.h>

#include "kv/pages.h"

typedef struct {
  int32_t *pages; // [n_pages], owned, grown by doubling
  // [n_shared], owned, same capacity as pages: for each of the first n_shared pages the published
  // page with the same content, held; usually the same page. Those pages are never written again.
  int32_t *shared;
  uint32_t n_pages, cap, n_shared;
  bool is_open;
} sequence;

struct td_kv {
  uint32_t page_tokens, n_pages, max_seqs;
  td_pages pool;
  sequence *seqs; // [max_seqs]
};

td_status td_kv_open(td_kv **out, const td_kv_opts *opts, td_err *err) {
  *out = NULL;
  if (opts->page_tokens == 0 || (opts->page_tokens & (opts->page_tokens - 1)) != 0) {
    return td_fail(err, TD_EINVAL, "KV pages of %u tokens: give a power of two", opts->page_tokens);
  }
  if (opts->n_pages == 0 || opts->n_pages > INT32_MAX || opts->max_seqs == 0) {
    return td_fail(err, TD_EINVAL, "a KV pool of %u pages for %u sequences: give at least one each",
                   opts->n_pages, opts->max_seqs);
  }
  td_kv *kv = calloc(1, sizeof *kv);
  sequence *seqs = calloc(opts->max_seqs, sizeof *seqs);
  if (!kv || !seqs) {
    free(kv);
    free(seqs);
    return td_fail(err, TD_ENOMEM, "out of memory for the tables of %u sequences", opts->max_seqs);
  }
  *kv = (td_kv){.page_tokens = opts->page_tokens,
                .n_pages = opts->n_pages,
                .max_seqs = opts->max_seqs,
                .seqs = seqs};
  td_status st = td_pages_open(&kv->pool, opts->n_pages, opts->page_tokens, opts->root, err);
  if (st != TD_OK) {
    td_kv_close(kv);
    return st;
  }
  *out = kv;
  return TD_OK;
}

static void free_tables(sequence *s) {
  free(s->pages);
  free(s->shared);
}

void td_kv_close(td_kv *kv) {
  if (!kv) return;
  for (uint32_t i = 0; i < kv->max_seqs; i++)
    free_tables(&kv->seqs[i]);
  free(kv->seqs);
  td_pages_close(&kv->pool);
  free(kv);
}

td_status td_kv_seq_open(td_kv *kv, uint32_t *seq, td_err *err) {
  for (uint32_t i = 0; i < kv->max_seqs; i++) {
    if (kv->seqs[i].is_open) continue;
    kv->seqs[i].is_open = true;
    *seq = i;
    return TD_OK;
  }
  return td_fail(err, TD_EAGAIN, "all %u sequences are in use", kv->max_seqs);
}

static sequence *open_seq(const td_kv *kv, uint32_t seq) {
  TD_CHECK(seq < kv->max_seqs && kv->seqs[seq].is_open);
  return &kv->seqs[seq];
}

// Releases the last page first, so that the end of a prefix is evicted before its start, without
// which it is useless.
void td_kv_seq_close(td_kv *kv, uint32_t seq) {
  sequence *s = open_seq(kv, seq);
  while (s->n_pages) {
    uint32_t i = --s->n_pages;
    if (i < s->n_shared && s->shared[i] != s->pages[i]) td_pages_drop(&kv->pool, s->shared[i]);
    td_pages_drop(&kv->pool, s->pages[i]);
  }
  s->n_shared = 0;
  s->is_open = false;
}

static td_status grow_table(sequence *s, uint32_t n_pages, td_err *err) {
  if (n_pages <= s->cap) return TD_OK;
  uint32_t cap = s->cap ? s->cap : 16;
  while (cap < n_pages)
    cap *= 2;
  int32_t *pages = realloc(s->pages, (size_t)cap * sizeof *pages);
  if (pages) s->pages = pages;
  int32_t *shared = realloc(s->shared, (size_t)cap * sizeof *shared);
  if (shared) s->shared = shared;
  if (!pages || !shared) {
    return td_fail(err, TD_ENOMEM, "out of memory for a table of %u KV pages", n_pages);
  }
  s->cap = cap;
  return TD_OK;
}

td_status td_kv_reserve(td_kv *kv, uint32_t seq, uint32_t n_tokens, td_err *err) {
  sequence *s = open_seq(kv, seq);
  uint32_t need = (uint32_t)(((uint64_t)n_tokens + kv->page_tokens - 1) / kv->page_tokens);
  if (need <= s->n_pages) return TD_OK;
  if (need - s->n_pages > td_kv_n_free(kv)) {
    return td_fail(err, TD_EAGAIN, "%u more KV pages wanted, %u of %u are free", need - s->n_pages,
                   td_kv_n_free(kv), kv->n_pages);
  }
  td_status st = grow_table(s, need, err);
  if (st != TD_OK) return st;
  while (s->n_pages < need)
    s->pages[s->n_pages++] = td_pages_take(&kv->pool);
  return TD_OK;
}

const int32_t *td_kv_pages(const td_kv *kv, uint32_t seq, uint32_t *n_pages) {
  const sequence *s = open_seq(kv, seq);
  *n_pages = s->n_pages;
  return s->pages;
}

uint32_t td_kv_n_free(const td_kv *kv) {
  return td_pages_n_free(&kv->pool);
}

uint32_t td_kv_page_tokens(const td_kv *kv) {
  return kv->page_tokens;
}

// ---- prefix cache -----------------------------------------------------------------------------

// The tokens of page idx.
static const int32_t *tokens_at(const td_kv *kv, const int32_t *tokens, uint32_t idx) {
  return tokens + (size_t)idx * kv->page_tokens;
}

static uint64_t behind(const td_kv *kv, int32_t page) {
  return page == TD_PAGE_NONE ? TD_PAGE_START : td_pages_serial(&kv->pool, page);
}

// The published page for page idx of a prompt, after the page `before`.
static int32_t find_page(const td_kv *kv, int32_t before, const int32_t *tokens, uint32_t idx) {
  return td_pages_find(&kv->pool, behind(kv, before), tokens_at(kv, tokens, idx));
}

uint32_t td_kv_match(const td_kv *kv, const int32_t *tokens, uint32_t n_tokens) {
  uint32_t n = 0;
  int32_t page = TD_PAGE_NONE;
  while ((uint64_t)(n + 1) * kv->page_tokens < n_tokens &&
         (page = find_page(kv, page, tokens, n)) != TD_PAGE_NONE) {
    n++;
  }
  return n * kv->page_tokens;
}

uint32_t td_kv_reuse(td_kv *kv, uint32_t seq, const int32_t *tokens, uint32_t n_tokens) {
  sequence *s = open_seq(kv, seq);
  TD_CHECK(s->n_pages == 0);
  uint32_t n = td_kv_match(kv, tokens, n_tokens) / kv->page_tokens;
  td_err err; // out of memory for the table: nothing is shared
  if (grow_table(s, n, &err) != TD_OK) return 0;
  int32_t page = TD_PAGE_NONE;
  while (s->n_pages < n) {
    page = find_page(kv, page, tokens, s->n_pages);
    td_pages_hold(&kv->pool, page);
    s->pages[s->n_pages] = s->shared[s->n_pages] = page;
    s->n_shared = ++s->n_pages;
  }
  return n * kv->page_tokens;
}

void td_kv_commit(td_kv *kv, uint32_t seq, const int32_t *tokens, uint32_t n_tokens) {
  sequence *s = open_seq(kv, seq);
  uint32_t n_full = n_tokens / kv->page_tokens;
  TD_CHECK(n_full >= s->n_shared && n_full <= s->n_pages);
  for (uint32_t i = s->n_shared; i < n_full; i++) {
    int32_t before = i ? s->shared[i - 1] : TD_PAGE_NONE;
    s->shared[i] = find_page(kv, before, tokens, i);
    if (s->shared[i] == TD_PAGE_NONE) {
      s->shared[i] = s->pages[i];
      td_pages_publish(&kv->pool, s->pages[i], before, tokens_at(kv, tokens, i));
    } else {
      td_pages_hold(&kv->pool, s->shared[i]);
    }
    s->n_shared = i + 1;
  }
}

void td_kv_drop_duplicates(td_kv *kv, uint32_t seq) {
  sequence *s = open_seq(kv, seq);
  for (uint32_t i = 0; i < s->n_shared; i++) {
    if (s->shared[i] == s->pages[i]) continue;
    td_pages_drop(&kv->pool, s->shared[i]);
    s->shared[i] = s->pages[i];
  }
}

void td_kv_commit_output(td_kv *kv, uint32_t seq, const int32_t *tokens, uint32_t n_tokens) {
  sequence *s = open_seq(kv, seq);
  const uint32_t n_full = n_tokens / kv->page_tokens, n_prompt = s->n_shared;
  TD_CHECK(n_full <= s->n_pages);
  int32_t before = TD_PAGE_NONE;
  for (uint32_t i = 0; i < n_full; i++) {
    const int32_t page = find_page(kv, before, tokens, i);
    if (page == TD_PAGE_NONE && i < n_prompt) return; // the prompt's page was lost or is another's
    if (page == TD_PAGE_NONE)
      td_pages_publish(&kv->pool, s->pages[i], before, tokens_at(kv, tokens, i));
    before = page == TD_PAGE_NONE ? s->pages[i] : page;
  }
}

// ---- suspended sequences ----------------------------------------------------------------------

// Takes the pages left by td_kv_suspend out of the cache: adds them to s, or frees them if s is
// NULL.
static void unpark(td_kv *kv, const td_kv_answer *a, sequence *s) {
  uint64_t parent = TD_PAGE_OWNER(a->owner);
  uint32_t n_full = a->n_tokens / kv->page_tokens;
  for (uint32_t i = a->n_prompt / kv->page_tokens; i < n_full; i++) {
    int32_t page = td_pages_find(&kv->pool, parent, tokens_at(kv, a->tokens, i));
    if (page == TD_PAGE_NONE) return;
    parent = td_pages_serial(&kv->pool, page);
    td_pages_hold(&kv->pool, page);
    td_pages_withdraw(&kv->pool, page);
    if (s) {
      s->pages[s->n_pages++] = page;
    } else {
      td_pages_drop(&kv->pool, page);
    }
  }
}

void td_kv_suspend(td_kv *kv, uint32_t seq, const td_kv_answer *a) {
  const sequence *s = open_seq(kv, seq);
  uint64_t parent = TD_PAGE_OWNER(a->owner);
  uint32_t n_full = a->n_tokens / kv->page_tokens;
  TD_CHECK(n_full <= s->n_pages);
  for (uint32_t i = a->n_prompt / kv->page_tokens; i < n_full; i++) {
    td_pages_publish_own(&kv->pool, s->pages[i], parent, tokens_at(kv, a->tokens, i));
    parent = td_pages_serial(&kv->pool, s->pages[i]);
  }
  td_kv_seq_close(kv, seq);
}

uint32_t td_kv_resume(td_kv *kv, uint32_t seq, const td_kv_answer *a) {
  sequence *s = open_seq(kv, seq);
  uint32_t n_full = a->n_tokens / kv->page_tokens;
  td_err err;
  bool should_continue = td_kv_reuse(kv, seq, a->tokens, a->n_prompt + 1) ==
                             a->n_prompt / kv->page_tokens * kv->page_tokens &&
                         grow_table(s, n_full, &err) == TD_OK;
  unpark(kv, a, should_continue ? s : NULL);
  return s->n_pages * kv->page_tokens;
}

void td_kv_drop_suspended(td_kv *kv, const td_kv_answer *a) {
  unpark(kv, a, NULL);
}

void td_kv_invalidate_all(td_kv *kv) {
  td_pages_forget(&kv->pool);
}

// ---- second cache tier ------------------------------------------------------------------------

uint32_t td_kv_idle(const td_kv *kv, uint32_t n_most, int32_t *pages) {
  uint32_t n = 0;
  for (int32_t page = kv->pool.oldest; page != TD_PAGE_NONE && n < n_most;) {
    pages[n++] = page;
    page = kv->pool.pages[page].newer;
  }
  return n;
}

uint32_t td_kv_n_empty(const td_kv *kv) {
  return kv->pool.n_free;
}

bool td_kv_content_of(const td_kv *kv, int32_t page, td_kv_content *out) {
  const td_pages *p = &kv->pool;
  TD_CHECK(p->names && page >= 0 && (uint32_t)page < p->n_pages);
  if (!p->pages[page].serial || p->pages[page].is_own) return false;
  *out = (td_kv_content){.serial = p->pages[page].serial,
                         .name = p->names[page],
                         .tokens = p->tokens + (size_t)page * p->page_tokens};
  return true;
}
