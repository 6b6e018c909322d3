#include "kv/kv.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "kv/pages.h"

typedef struct {
  int32_t *pages; // [n_pages], owned, grown by doubling
  uint32_t n_pages, cap;
  uint32_t n_shared; // the first of them are published; nothing is written there
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
  td_status st = td_pages_open(&kv->pool, opts->n_pages, opts->page_tokens, err);
  if (st != TD_OK) {
    td_kv_close(kv);
    return st;
  }
  *out = kv;
  return TD_OK;
}

void td_kv_close(td_kv *kv) {
  if (!kv) return;
  for (uint32_t i = 0; i < kv->max_seqs; i++)
    free(kv->seqs[i].pages);
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

// From the last page to the first, so that of a prefix the end leaves the cache before its start,
// without which it is of no use.
void td_kv_seq_close(td_kv *kv, uint32_t seq) {
  sequence *s = open_seq(kv, seq);
  while (s->n_pages)
    td_pages_drop(&kv->pool, s->pages[--s->n_pages]);
  s->n_shared = 0;
  s->is_open = false;
}

static td_status grow_table(sequence *s, uint32_t n_pages, td_err *err) {
  if (n_pages <= s->cap) return TD_OK;
  uint32_t cap = s->cap ? s->cap : 16;
  while (cap < n_pages)
    cap *= 2;
  int32_t *pages = realloc(s->pages, (size_t)cap * sizeof *pages);
  if (!pages) return td_fail(err, TD_ENOMEM, "out of memory for a table of %u KV pages", n_pages);
  s->pages = pages;
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

// ---- the cache of prefixes --------------------------------------------------------------------

// The published page that continues what s shares with tokens.
static int32_t find_next(const td_kv *kv, const sequence *s, const int32_t *tokens) {
  int32_t parent = s->n_shared ? s->pages[s->n_shared - 1] : TD_PAGE_NONE;
  return td_pages_find(&kv->pool, parent, tokens + (size_t)s->n_shared * kv->page_tokens);
}

// Page n_shared of s becomes `page`; its own, if it has one there, is let go.
static void share(td_kv *kv, sequence *s, int32_t page) {
  td_pages_hold(&kv->pool, page);
  if (s->n_shared < s->n_pages) {
    td_pages_drop(&kv->pool, s->pages[s->n_shared]);
  } else {
    s->n_pages++;
  }
  s->pages[s->n_shared++] = page;
}

uint32_t td_kv_reuse(td_kv *kv, uint32_t seq, const int32_t *tokens, uint32_t n_tokens,
                     uint32_t n_past) {
  sequence *s = open_seq(kv, seq);
  td_err err; // without memory for the table it shares less
  TD_CHECK(n_past / kv->page_tokens == s->n_shared);
  while ((uint64_t)(s->n_shared + 1) * kv->page_tokens < n_tokens) {
    int32_t page = find_next(kv, s, tokens);
    if (page == TD_PAGE_NONE || grow_table(s, s->n_shared + 1, &err) != TD_OK) break;
    share(kv, s, page);
    n_past = s->n_shared * kv->page_tokens;
  }
  return n_past;
}

void td_kv_commit(td_kv *kv, uint32_t seq, const int32_t *tokens, uint32_t n_tokens) {
  sequence *s = open_seq(kv, seq);
  uint32_t n_full = n_tokens / kv->page_tokens;
  TD_CHECK(n_full >= s->n_shared && n_full <= s->n_pages);
  while (s->n_shared < n_full) {
    int32_t same = find_next(kv, s, tokens);
    if (same != TD_PAGE_NONE) {
      share(kv, s, same);
      continue;
    }
    int32_t parent = s->n_shared ? s->pages[s->n_shared - 1] : TD_PAGE_NONE;
    td_pages_publish(&kv->pool, s->pages[s->n_shared], parent,
                     tokens + (size_t)s->n_shared * kv->page_tokens);
    s->n_shared++;
  }
}
