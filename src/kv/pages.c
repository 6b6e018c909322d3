// src/kv/pages.c - free list, content index and LRU list of KV pages.
#include "kv/pages.h"

#include <stdlib.h>
#include <string.h>

#include "kv/record.h"

#define MULTIPLIER 0x9e3779b97f4a7c15u // 2^64 / golden ratio

td_status td_pages_open(td_pages *out, uint32_t n_pages, uint32_t page_tokens,
                        const td_digest *root, td_err *err) {
  uint32_t n_buckets = 1;
  while (n_buckets < n_pages)
    n_buckets *= 2;
  *out = (td_pages){.n_pages = n_pages,
                    .page_tokens = page_tokens,
                    .pages = calloc(n_pages, sizeof(td_page)),
                    .tokens = malloc((size_t)n_pages * page_tokens * sizeof(int32_t)),
                    .free = malloc((size_t)n_pages * sizeof(int32_t)),
                    .buckets = malloc((size_t)n_buckets * sizeof(int32_t)),
                    .n_free = n_pages,
                    .n_buckets = n_buckets,
                    .oldest = TD_PAGE_NONE,
                    .newest = TD_PAGE_NONE};
  if (root) {
    out->root = *root;
    out->names = malloc((size_t)n_pages * sizeof(td_digest));
  }
  if (!out->pages || !out->tokens || !out->free || !out->buckets || (root && !out->names)) {
    td_pages_close(out);
    return td_fail(err, TD_ENOMEM, "out of memory for the tables of %u KV pages", n_pages);
  }
  for (uint32_t i = 0; i < n_pages; i++)
    out->free[i] = (int32_t)(n_pages - 1 - i);
  for (uint32_t i = 0; i < n_buckets; i++)
    out->buckets[i] = TD_PAGE_NONE;
  return TD_OK;
}

void td_pages_close(td_pages *p) {
  free(p->pages);
  free(p->tokens);
  free(p->names);
  free(p->free);
  free(p->buckets);
  *p = (td_pages){0};
}

// ---- content index ----------------------------------------------------------------------------

static int32_t *tokens_of(const td_pages *p, int32_t page) {
  return p->tokens + (size_t)page * p->page_tokens;
}

// Partial pages, whose length a search does not know, are hashed by their parent alone.
static int32_t *bucket_of(const td_pages *p, uint64_t parent, const int32_t *tokens,
                          uint32_t n_tokens) {
  uint64_t hash = parent * MULTIPLIER;
  for (uint32_t i = 0; n_tokens == p->page_tokens && i < n_tokens; i++) {
    hash = (hash ^ (uint32_t)tokens[i]) * MULTIPLIER;
    hash ^= hash >> 32;
  }
  return &p->buckets[hash & (p->n_buckets - 1)];
}

int32_t td_pages_find(const td_pages *p, uint64_t parent, const int32_t *tokens) {
  int32_t page = *bucket_of(p, parent, tokens, p->page_tokens);
  size_t n_bytes = (size_t)p->page_tokens * sizeof *tokens;
  while (page != TD_PAGE_NONE &&
         (p->pages[page].parent != parent || p->pages[page].n_tokens != p->page_tokens ||
          memcmp(tokens_of(p, page), tokens, n_bytes) != 0))
    page = p->pages[page].bucket_next;
  return page;
}

int32_t td_pages_find_partial(const td_pages *p, uint64_t parent, const int32_t *tokens,
                              uint32_t n_max) {
  int32_t longest = TD_PAGE_NONE;
  uint32_t n_longest = 0;
  for (int32_t page = *bucket_of(p, parent, tokens, 0); page != TD_PAGE_NONE;
       page = p->pages[page].bucket_next) {
    const uint32_t n = p->pages[page].n_tokens;
    if (p->pages[page].parent != parent || n == p->page_tokens) continue;
    if (n > n_max || n <= n_longest) continue;
    if (memcmp(tokens_of(p, page), tokens, n * sizeof *tokens) != 0) continue;
    longest = page;
    n_longest = n;
  }
  return longest;
}

static void tell(const td_pages *p, const td_kv_change *change) {
  if (p->listener.call) p->listener.call(p->listener.ctx, change);
}

static void publish(td_pages *p, int32_t page, uint64_t parent, const int32_t *tokens,
                    uint32_t n_tokens) {
  td_page *m = &p->pages[page];
  TD_CHECK(m->n_refs && !m->serial);
  m->parent = parent;
  m->serial = 2 * ++p->n_published;
  m->n_tokens = n_tokens;
  memcpy(tokens_of(p, page), tokens, (size_t)n_tokens * sizeof *tokens);
  int32_t *bucket = bucket_of(p, m->parent, tokens, n_tokens);
  m->bucket_next = *bucket;
  *bucket = page;
}

void td_pages_publish(td_pages *p, int32_t page, int32_t before, uint64_t salt,
                      const int32_t *tokens) {
  bool is_first = before == TD_PAGE_NONE;
  publish(p, page, is_first ? TD_PAGE_SALTED(salt) : td_pages_serial(p, before), tokens,
          p->page_tokens);
  p->pages[page].is_own = false;
  if (!p->names) return;
  td_digest name = is_first ? p->root : p->names[before];
  if (is_first) td_kv_name_salted(&name, &name, salt);
  td_kv_name_next(&p->names[page], &name, tokens, p->page_tokens);
  tell(p, &(td_kv_change){.kind = TD_KV_STORED,
                          .n_tokens = p->page_tokens,
                          .name = &p->names[page],
                          .before = is_first ? NULL : &p->names[before],
                          .salt = is_first ? salt : 0,
                          .tokens = tokens});
}

void td_pages_publish_own(td_pages *p, int32_t page, uint64_t parent, const int32_t *tokens) {
  publish(p, page, parent, tokens, p->page_tokens);
  p->pages[page].is_own = true;
}

void td_pages_publish_partial(td_pages *p, int32_t page, uint64_t parent, const int32_t *tokens,
                              uint32_t n_tokens) {
  TD_CHECK(n_tokens && n_tokens < p->page_tokens);
  publish(p, page, parent, tokens, n_tokens);
}

static void withdraw(td_pages *p, int32_t page) {
  td_page *m = &p->pages[page];
  int32_t *link = bucket_of(p, m->parent, tokens_of(p, page), m->n_tokens);
  while (*link != page)
    link = &p->pages[*link].bucket_next;
  *link = m->bucket_next;
  m->serial = 0;
}

void td_pages_withdraw(td_pages *p, int32_t page) {
  const bool is_shared = p->names && !p->pages[page].is_own;
  withdraw(p, page);
  if (is_shared && p->pages[page].n_tokens == p->page_tokens)
    tell(p, &(td_kv_change){.kind = TD_KV_REMOVED, .name = &p->names[page]});
}

// ---- allocation and LRU -----------------------------------------------------------------------

static void enter_idle(td_pages *p, int32_t page) {
  td_page *m = &p->pages[page];
  m->older = p->newest;
  m->newer = TD_PAGE_NONE;
  m->idled = ++p->n_idled;
  *(m->older == TD_PAGE_NONE ? &p->oldest : &p->pages[m->older].newer) = page;
  p->newest = page;
  p->n_idle++;
}

static void leave_idle(td_pages *p, int32_t page) {
  const td_page *m = &p->pages[page];
  *(m->older == TD_PAGE_NONE ? &p->oldest : &p->pages[m->older].newer) = m->newer;
  *(m->newer == TD_PAGE_NONE ? &p->newest : &p->pages[m->newer].older) = m->older;
  p->n_idle--;
}

void td_pages_refresh(td_pages *p, int32_t page) {
  leave_idle(p, page);
  enter_idle(p, page);
}

int32_t td_pages_take(td_pages *p) {
  TD_CHECK(td_pages_n_free(p) > 0);
  int32_t page;
  if (p->n_free) {
    page = p->free[--p->n_free];
  } else {
    page = p->oldest;
    leave_idle(p, page);
    td_pages_withdraw(p, page);
  }
  TD_CHECK(p->pages[page].n_refs == 0 && !p->pages[page].serial);
  p->pages[page].n_refs = 1;
  return page;
}

void td_pages_forget(td_pages *p) {
  while (p->n_idle) {
    int32_t page = p->oldest;
    leave_idle(p, page);
    withdraw(p, page);
    p->free[p->n_free++] = page;
  }
  TD_CHECK(p->n_free == p->n_pages);
  tell(p, &(td_kv_change){.kind = TD_KV_CLEARED});
}

void td_pages_hold(td_pages *p, int32_t page) {
  td_page *m = &p->pages[page];
  if (m->n_refs++ == 0) {
    TD_CHECK(m->serial);
    leave_idle(p, page);
  }
}

void td_pages_drop(td_pages *p, int32_t page) {
  td_page *m = &p->pages[page];
  TD_CHECK(m->n_refs > 0);
  if (--m->n_refs) return;
  if (m->serial)
    enter_idle(p, page);
  else
    p->free[p->n_free++] = page;
}
