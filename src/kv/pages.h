// src/kv/pages.h - the pages themselves: who holds them, and what finished ones contain.
//
// A page is free, or held by sequences, or published and held by nobody: then it stays as cache
// until no page is free, and the one that was let go first makes room. Inside src/kv only.
//
// What a published page contains is said by its key: the tokens in it and what it stands behind,
// either the published page before it, named by a serial number that is never given twice, or a
// root: the start of all prompts, or one owner's. So equal keys mean equal tokens from the root on;
// the hash only finds candidates, the tokens decide.
#ifndef TD_KV_PAGES_H
#define TD_KV_PAGES_H

#include <stdbool.h>
#include <stdint.h>

#include "base/sha256.h"
#include "base/status.h"

#define TD_PAGE_NONE     (-1)
#define TD_PAGE_START    0u              // the root of all prompts
#define TD_PAGE_OWNER(n) (1u | (n) << 1) // the root of owner n, below 2^63

typedef struct {
  uint64_t serial; // of its publication, even; 0: not published
  uint64_t parent; // serial of the page before it, or a root
  uint32_t n_refs; // sequences that hold it
  bool is_own;     // published for its owner alone
  int32_t bucket_next;
  int32_t older, newer; // in the list of published pages that nobody holds
} td_page;

typedef struct {
  uint32_t n_pages, page_tokens;
  td_page *pages;   // [n_pages]
  int32_t *tokens;  // [n_pages][page_tokens], of published pages
  td_digest *names; // [n_pages] of published pages (kv/record.h); NULL: they have none
  td_digest root;   // that names are chained to
  int32_t *free;    // stack: pages used last, still in the CPU's caches, are used again first
  int32_t *buckets; // [n_buckets]
  uint32_t n_free, n_buckets, n_idle;
  int32_t oldest, newest; // idle: published, held by nobody
  uint64_t n_published;
} td_pages;

// With a root (which may be NULL), published pages get names. On error *out is closed. TD_ENOMEM.
td_status td_pages_open(td_pages *out, uint32_t n_pages, uint32_t page_tokens,
                        const td_digest *root, td_err *err);
void td_pages_close(td_pages *pages); // closing a zeroed one is legal

// A page for new content, held once. The caller knows that td_pages_n_free is not 0.
int32_t td_pages_take(td_pages *pages);
void td_pages_hold(td_pages *pages, int32_t page);
void td_pages_drop(td_pages *pages, int32_t page);
static inline uint32_t td_pages_n_free(const td_pages *pages) {
  return pages->n_free + pages->n_idle;
}

// Makes no page findable any more; nobody holds one. All are free then.
void td_pages_forget(td_pages *pages);

// Of a published page: what the next one stands behind.
static inline uint64_t td_pages_serial(const td_pages *pages, int32_t page) {
  TD_CHECK(pages->pages[page].serial);
  return pages->pages[page].serial;
}
// The published page that holds tokens[page_tokens] behind `parent`, a serial number or a root;
// TD_PAGE_NONE: there is none.
int32_t td_pages_find(const td_pages *pages, uint64_t parent, const int32_t *tokens);
// Makes a held page findable, behind a published one that is held, too, or TD_PAGE_NONE. No page of
// this key is published yet.
void td_pages_publish(td_pages *pages, int32_t page, int32_t before, const int32_t *tokens);
// The same in an owner's chain.
void td_pages_publish_own(td_pages *pages, int32_t page, uint64_t parent, const int32_t *tokens);
// The opposite.
void td_pages_withdraw(td_pages *pages, int32_t page);

#endif
