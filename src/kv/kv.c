// src/kv/kv.c - page tables, prefix cache and suspended sequences.
#include "kv/kv.h"

#include <stdlib.h>

#include "kv/pages.h"

typedef struct {
  int32_t *pages; // [n_pages], owned, grown by doubling
  // [n_shared], owned, same capacity as pages: for each of the first n_shared pages the published
  // page with the same content, held; usually the same page. Those pages are never written again.
  int32_t *shared;
  uint32_t n_pages, cap, n_shared;
  bool is_open;
  uint64_t salt;
  int32_t source, spare; // held; TD_PAGE_NONE
  uint32_t n_partial;    // tokens in its partial page when it got that
  // The partial page that it has put into the cache, as long as that has the serial.
  int32_t kept;
  uint64_t kept_serial;
} sequence;

struct td_kv {
  uint32_t page_tokens, n_pages, max_seqs;
  td_pages pool;
  sequence *seqs; // [max_seqs]
};

td_status td_kv_open(td_kv **out, const td_kv_opts *opts, td_err *err) {
  *out = NULL;
  if (opts->page_tokens == 0 || (opts->page_tokens & (opts->page_tokens - 1)) != 0)
    return td_fail(err, TD_EINVAL, "KV pages of %u tokens: give a power of two", opts->page_tokens);
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
  kv->pool.listener = opts->listener;
  *out = kv;
  return TD_OK;
}

void td_kv_close(td_kv *kv) {
  if (!kv) return;
  for (uint32_t i = 0; i < kv->max_seqs; i++) {
    free(kv->seqs[i].pages);
    free(kv->seqs[i].shared);
  }
  free(kv->seqs);
  td_pages_close(&kv->pool);
  free(kv);
}

td_status td_kv_seq_open(td_kv *kv, uint32_t *seq, td_err *err) {
  for (uint32_t i = 0; i < kv->max_seqs; i++) {
    if (kv->seqs[i].is_open) continue;
    sequence *s = &kv->seqs[i];
    s->is_open = true;
    s->source = s->spare = s->kept = TD_PAGE_NONE;
    s->n_partial = 0;
    s->salt = 0;
    *seq = i;
    return TD_OK;
  }
  return td_fail(err, TD_EAGAIN, "all %u sequences are in use", kv->max_seqs);
}

static sequence *open_seq(const td_kv *kv, uint32_t seq) {
  TD_CHECK(seq < kv->max_seqs && kv->seqs[seq].is_open);
  return &kv->seqs[seq];
}

void td_kv_set_salt(td_kv *kv, uint32_t seq, uint64_t salt) {
  open_seq(kv, seq)->salt = salt;
}

// What it has put into the cache is about as old as its pages.
static void refresh_kept(td_kv *kv, sequence *s) {
  if (s->kept == TD_PAGE_NONE) return;
  const td_page *page = &kv->pool.pages[s->kept];
  if (page->serial == s->kept_serial && !page->n_refs) td_pages_refresh(&kv->pool, s->kept);
  s->kept = TD_PAGE_NONE;
}

// Releases the last page first, so that the end of a prefix is evicted before its start, without
// which it is useless.
void td_kv_seq_close(td_kv *kv, uint32_t seq) {
  sequence *s = open_seq(kv, seq);
  td_kv_drop_source(kv, seq);
  td_kv_drop_spare(kv, seq);
  refresh_kept(kv, s);
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
  if (!pages || !shared)
    return td_fail(err, TD_ENOMEM, "out of memory for a table of %u KV pages", n_pages);
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

static uint64_t behind(const td_kv *kv, uint64_t salt, int32_t page) {
  return page == TD_PAGE_NONE ? TD_PAGE_SALTED(salt) : td_pages_serial(&kv->pool, page);
}

// The published page for page idx of a prompt, after the page `before`.
static int32_t find_page(const td_kv *kv, uint64_t salt, int32_t before, const int32_t *tokens,
                         uint32_t idx) {
  return td_pages_find(&kv->pool, behind(kv, salt, before), tokens_at(kv, tokens, idx));
}

// What the cache has of tokens[n_tokens], without the last one.
typedef struct {
  uint32_t n_full, n_partial; // pages; tokens in the partial page
  int32_t last, partial;      // full page, partial page; TD_PAGE_NONE
} cached_prefix;

static cached_prefix find_prefix(const td_kv *kv, uint64_t salt, const int32_t *tokens,
                                 uint32_t n_tokens) {
  cached_prefix found = {.last = TD_PAGE_NONE};
  int32_t page;
  while ((uint64_t)(found.n_full + 1) * kv->page_tokens < n_tokens &&
         (page = find_page(kv, salt, found.last, tokens, found.n_full)) != TD_PAGE_NONE) {
    found.last = page;
    found.n_full++;
  }
  const uint32_t left = n_tokens - found.n_full * kv->page_tokens;
  found.partial = td_pages_find_partial(&kv->pool, behind(kv, salt, found.last),
                                        tokens_at(kv, tokens, found.n_full), left ? left - 1 : 0);
  if (found.partial != TD_PAGE_NONE) found.n_partial = kv->pool.pages[found.partial].n_tokens;
  return found;
}

uint32_t td_kv_match(const td_kv *kv, uint64_t salt, const int32_t *tokens, uint32_t n_tokens) {
  const cached_prefix found = find_prefix(kv, salt, tokens, n_tokens);
  return found.n_full * kv->page_tokens + found.n_partial;
}

static void hold_full(td_kv *kv, sequence *s, const cached_prefix *found, const int32_t *tokens) {
  int32_t page = TD_PAGE_NONE;
  while (s->n_pages < found->n_full) {
    page = find_page(kv, s->salt, page, tokens, s->n_pages);
    td_pages_hold(&kv->pool, page);
    s->pages[s->n_pages] = s->shared[s->n_pages] = page;
    s->n_shared = ++s->n_pages;
  }
}

// Returns the tokens in the source.
static uint32_t hold_source(td_kv *kv, sequence *s, const cached_prefix *found) {
  if (found->partial == TD_PAGE_NONE) return 0;
  td_pages_hold(&kv->pool, found->partial);
  s->source = found->partial;
  return found->n_partial;
}

uint32_t td_kv_reuse(td_kv *kv, uint32_t seq, const int32_t *tokens, uint32_t n_tokens) {
  sequence *s = open_seq(kv, seq);
  TD_CHECK(s->n_pages == 0);
  const cached_prefix found = find_prefix(kv, s->salt, tokens, n_tokens);
  td_err err; // out of memory for the table: nothing is shared
  if (grow_table(s, found.n_full, &err) != TD_OK) return 0;
  hold_full(kv, s, &found, tokens);
  return found.n_full * kv->page_tokens + hold_source(kv, s, &found);
}

int32_t td_kv_source(const td_kv *kv, uint32_t seq) {
  return open_seq(kv, seq)->source;
}

void td_kv_drop_source(td_kv *kv, uint32_t seq) {
  sequence *s = open_seq(kv, seq);
  if (s->source != TD_PAGE_NONE) td_pages_drop(&kv->pool, s->source);
  s->source = TD_PAGE_NONE;
}

bool td_kv_take_source(td_kv *kv, uint32_t seq) {
  sequence *s = open_seq(kv, seq);
  td_err err;
  if (s->source == TD_PAGE_NONE || kv->pool.pages[s->source].n_refs > 1) return false;
  if (s->n_pages > s->n_shared || grow_table(s, s->n_pages + 1, &err) != TD_OK) return false;
  s->n_partial = kv->pool.pages[s->source].n_tokens;
  td_pages_withdraw(&kv->pool, s->source);
  s->pages[s->n_pages++] = s->source;
  s->source = TD_PAGE_NONE;
  return true;
}

bool td_kv_has_partial(const td_kv *kv, uint32_t seq) {
  return open_seq(kv, seq)->n_partial > 0;
}

int32_t td_kv_take_spare(td_kv *kv, uint32_t seq) {
  sequence *s = open_seq(kv, seq);
  TD_CHECK(s->spare == TD_PAGE_NONE);
  if (td_kv_n_free(kv)) s->spare = td_pages_take(&kv->pool);
  return s->spare;
}

void td_kv_drop_spare(td_kv *kv, uint32_t seq) {
  sequence *s = open_seq(kv, seq);
  if (s->spare != TD_PAGE_NONE) td_pages_drop(&kv->pool, s->spare);
  s->spare = TD_PAGE_NONE;
}

// Publishes the page that holds what follows the full pages of tokens[n_tokens], unless that was
// published before or the full pages are no longer.
static void publish_partial(td_kv *kv, sequence *s, int32_t page, const int32_t *tokens,
                            uint32_t n_tokens) {
  const uint32_t n_full = n_tokens / kv->page_tokens, n = n_tokens % kv->page_tokens;
  const cached_prefix found = find_prefix(kv, s->salt, tokens, n_tokens + 1);
  if (!n || found.n_full != n_full) return;
  s->kept = page;
  if (found.n_partial == n) {
    s->kept = found.partial;
  } else {
    td_pages_publish_partial(&kv->pool, page, behind(kv, s->salt, found.last),
                             tokens_at(kv, tokens, n_full), n);
    kv->pool.pages[page].is_own = false;
  }
  s->kept_serial = td_pages_serial(&kv->pool, s->kept);
}

void td_kv_keep_spare(td_kv *kv, uint32_t seq, const int32_t *tokens, uint32_t n_tokens) {
  sequence *s = open_seq(kv, seq);
  TD_CHECK(s->spare != TD_PAGE_NONE);
  publish_partial(kv, s, s->spare, tokens, n_tokens);
  td_kv_drop_spare(kv, seq);
}

void td_kv_commit(td_kv *kv, uint32_t seq, const int32_t *tokens, uint32_t n_tokens) {
  sequence *s = open_seq(kv, seq);
  uint32_t n_full = n_tokens / kv->page_tokens;
  TD_CHECK(n_full >= s->n_shared && n_full <= s->n_pages);
  s->n_partial = 0;
  for (uint32_t i = s->n_shared; i < n_full; i++) {
    int32_t before = i ? s->shared[i - 1] : TD_PAGE_NONE;
    s->shared[i] = find_page(kv, s->salt, before, tokens, i);
    if (s->shared[i] == TD_PAGE_NONE) {
      s->shared[i] = s->pages[i];
      td_pages_publish(&kv->pool, s->pages[i], before, s->salt, tokens_at(kv, tokens, i));
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

void td_kv_commit_output(td_kv *kv, uint32_t seq, const int32_t *tokens, uint32_t n_tokens,
                         bool has_partial) {
  sequence *s = open_seq(kv, seq);
  const uint32_t n_full = n_tokens / kv->page_tokens, n_prompt = s->n_shared;
  TD_CHECK(n_full <= s->n_pages);
  int32_t before = TD_PAGE_NONE;
  for (uint32_t i = 0; i < n_full; i++) {
    const int32_t page = find_page(kv, s->salt, before, tokens, i);
    if (page == TD_PAGE_NONE && i < n_prompt) return; // the prompt's page was lost or is another's
    if (page == TD_PAGE_NONE)
      td_pages_publish(&kv->pool, s->pages[i], before, s->salt, tokens_at(kv, tokens, i));
    before = page == TD_PAGE_NONE ? s->pages[i] : page;
  }
  if (has_partial && n_full < s->n_pages)
    publish_partial(kv, s, s->pages[n_full], tokens, n_tokens);
}

// ---- suspended sequences ----------------------------------------------------------------------

static void unpark_partial(td_kv *kv, const td_kv_answer *a, uint64_t parent, sequence *s) {
  const uint32_t n_full = a->n_tokens / kv->page_tokens, n = a->n_tokens % kv->page_tokens;
  const int32_t page = td_pages_find_partial(&kv->pool, parent, tokens_at(kv, a->tokens, n_full),
                                             n);
  if (a->n_tokens <= a->n_prompt) return; // it went to the cache of prompts
  if (page == TD_PAGE_NONE || kv->pool.pages[page].n_tokens != n) return;
  td_pages_hold(&kv->pool, page);
  td_pages_withdraw(&kv->pool, page);
  if (s) {
    s->pages[s->n_pages++] = page;
    s->n_partial = n;
  } else {
    td_pages_drop(&kv->pool, page);
  }
}

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
    if (s)
      s->pages[s->n_pages++] = page;
    else
      td_pages_drop(&kv->pool, page);
  }
  unpark_partial(kv, a, parent, s);
}

void td_kv_suspend(td_kv *kv, uint32_t seq, const td_kv_answer *a) {
  sequence *s = open_seq(kv, seq);
  uint64_t parent = TD_PAGE_OWNER(a->owner);
  const uint32_t n_full = a->n_tokens / kv->page_tokens, n = a->n_tokens % kv->page_tokens;
  TD_CHECK(n_full <= s->n_pages);
  for (uint32_t i = a->n_prompt / kv->page_tokens; i < n_full; i++) {
    td_pages_publish_own(&kv->pool, s->pages[i], parent, tokens_at(kv, a->tokens, i));
    parent = td_pages_serial(&kv->pool, s->pages[i]);
  }
  const bool has_partial = a->has_partial && n && n_full < s->n_pages;
  if (has_partial && a->n_tokens <= a->n_prompt) {
    publish_partial(kv, s, s->pages[n_full], a->tokens, a->n_tokens);
  } else if (has_partial) {
    td_pages_publish_partial(&kv->pool, s->pages[n_full], parent, tokens_at(kv, a->tokens, n_full),
                             n);
    kv->pool.pages[s->pages[n_full]].is_own = true;
  }
  td_kv_seq_close(kv, seq);
}

uint32_t td_kv_resume(td_kv *kv, uint32_t seq, const td_kv_answer *a) {
  sequence *s = open_seq(kv, seq);
  const uint32_t n_max = a->n_tokens / kv->page_tokens + 1;
  const cached_prefix found = find_prefix(kv, s->salt, a->tokens, a->n_prompt + 1);
  td_err err; // out of memory for the table: nothing is reused
  const uint32_t need = found.n_full > n_max ? found.n_full : n_max;
  if (grow_table(s, need, &err) != TD_OK) {
    unpark(kv, a, NULL);
    return 0;
  }
  hold_full(kv, s, &found, a->tokens);
  unpark(kv, a, found.n_full == a->n_prompt / kv->page_tokens ? s : NULL);
  if (s->n_partial) return a->n_tokens;
  if (s->n_pages > found.n_full) return s->n_pages * kv->page_tokens;
  return s->n_pages * kv->page_tokens + hold_source(kv, s, &found);
}

void td_kv_drop_suspended(td_kv *kv, const td_kv_answer *a) {
  unpark(kv, a, NULL);
}

void td_kv_invalidate_all(td_kv *kv) {
  td_pages_forget(&kv->pool);
}

// ---- second cache tier ------------------------------------------------------------------------

uint32_t td_kv_idle(const td_kv *kv, uint32_t n_max, int32_t *pages) {
  uint32_t n = 0;
  for (int32_t page = kv->pool.oldest; page != TD_PAGE_NONE && n < n_max;) {
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
  const bool is_partial = p->pages[page].n_tokens != p->page_tokens; // not kept on disk
  if (!p->pages[page].serial || p->pages[page].is_own || is_partial) return false;
  *out = (td_kv_content){.serial = p->pages[page].serial,
                         .idled = p->pages[page].idled,
                         .name = p->names[page],
                         .tokens = p->tokens + (size_t)page * p->page_tokens};
  return true;
}
