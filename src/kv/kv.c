// src/kv/kv.c - free pages are a stack, so pages used last (and still in cache) are reused first.
#include "kv/kv.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
  int32_t *pages; // [n_pages], owned, grown by doubling
  uint32_t n_pages, cap;
  bool is_open;
} sequence;

struct td_kv {
  uint32_t page_tokens, n_pages, max_seqs;
  int32_t *free_pages; // stack, top at n_free - 1
  uint32_t n_free;
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
  if (kv) {
    *kv = (td_kv){.page_tokens = opts->page_tokens,
                  .n_pages = opts->n_pages,
                  .max_seqs = opts->max_seqs,
                  .free_pages = malloc((size_t)opts->n_pages * sizeof(int32_t)),
                  .n_free = opts->n_pages,
                  .seqs = calloc(opts->max_seqs, sizeof(sequence))};
  }
  if (!kv || !kv->free_pages || !kv->seqs) {
    td_kv_close(kv);
    return td_fail(err, TD_ENOMEM, "out of memory for the tables of %u KV pages", opts->n_pages);
  }
  for (uint32_t i = 0; i < kv->n_pages; i++)
    kv->free_pages[i] = (int32_t)(kv->n_pages - 1 - i);
  *out = kv;
  return TD_OK;
}

void td_kv_close(td_kv *kv) {
  if (!kv) return;
  for (uint32_t i = 0; kv->seqs && i < kv->max_seqs; i++)
    free(kv->seqs[i].pages);
  free(kv->seqs);
  free(kv->free_pages);
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

void td_kv_seq_close(td_kv *kv, uint32_t seq) {
  sequence *s = open_seq(kv, seq);
  for (uint32_t i = 0; i < s->n_pages; i++)
    kv->free_pages[kv->n_free++] = s->pages[i];
  TD_CHECK(kv->n_free <= kv->n_pages);
  s->n_pages = 0;
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
  if (need - s->n_pages > kv->n_free) {
    return td_fail(err, TD_EAGAIN, "%u more KV pages wanted, %u of %u are free", need - s->n_pages,
                   kv->n_free, kv->n_pages);
  }
  td_status st = grow_table(s, need, err);
  if (st != TD_OK) return st;
  while (s->n_pages < need)
    s->pages[s->n_pages++] = kv->free_pages[--kv->n_free];
  return TD_OK;
}

const int32_t *td_kv_pages(const td_kv *kv, uint32_t seq, uint32_t *n_pages) {
  const sequence *s = open_seq(kv, seq);
  *n_pages = s->n_pages;
  return s->pages;
}

uint32_t td_kv_n_free(const td_kv *kv) {
  return kv->n_free;
}

uint32_t td_kv_page_tokens(const td_kv *kv) {
  return kv->page_tokens;
}
