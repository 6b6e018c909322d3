// src/kv/pages.h - the page allocator and the content index of published pages.
//
// A page is free, held by sequences, or idle: published and held by none. Idle pages stay as prefix
// cache; when no page is free, the one idle for longest is reused. Private to src/kv. Not
// thread-safe.
//
// A published page is identified by a key: its tokens and its parent. The parent is the previous
// published page, given by a serial number that is never reused, or a root: the start of all
// prompts, or of one owner's chain. Equal keys therefore mean equal tokens from the root on. The
// hash only finds candidates; the tokens are compared.
//
// A published page is full, or partial: with fewer tokens, and never anybody's parent.
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/sha256.h"
#include "base/status.h"
#include "kv/kv.h"

#define TD_PAGE_NONE     (-1)
#define TD_PAGE_START    0u              // the root of all prompts
#define TD_PAGE_OWNER(n) (1u | (n) << 1) // the root of owner n, below 2^63
// The root of the prompts with this salt; serials stay below it.
#define TD_PAGE_SALTED(salt) ((salt) ? ((salt) << 1) | 1ull << 63 : TD_PAGE_START)

typedef struct {
  uint64_t serial;   // assigned when published, even; 0: not published
  uint64_t parent;   // serial of the page before it, or a root
  uint32_t n_refs;   // sequences that hold it
  bool is_own;       // published in an owner's chain
  uint32_t n_tokens; // when published
  int32_t bucket_next;
  int32_t older, newer; // links of the list of idle pages
  uint64_t idled;       // grows each time the page becomes idle
} td_page;

typedef struct {
  uint32_t n_pages, page_tokens;
  td_page *pages;   // [n_pages]
  int32_t *tokens;  // [n_pages][page_tokens], valid for published pages
  td_digest *names; // [n_pages], valid for published pages (kv/record.h); NULL without a root
  td_digest root;   // start of the chain of names
  int32_t *free;    // stack: recently used pages, still in the CPU's caches, are reused first
  int32_t *buckets; // [n_buckets]
  uint32_t n_free, n_buckets, n_idle;
  int32_t oldest, newest;        // ends of the list of idle pages
  uint64_t n_published, n_idled; // so far
  td_kv_listener listener;
} td_pages;

// With a root (may be NULL), published pages get names. On error *out is closed. TD_ENOMEM.
td_status td_pages_open(td_pages *out, uint32_t n_pages, uint32_t page_tokens,
                        const td_digest *root, td_err *err);
void td_pages_close(td_pages *pages); // closing a zeroed one is legal

// Allocates a page for new content, held once. td_pages_n_free must not be 0.
int32_t td_pages_take(td_pages *pages);
void td_pages_hold(td_pages *pages, int32_t page);
void td_pages_drop(td_pages *pages, int32_t page);
static inline uint32_t td_pages_n_free(const td_pages *pages) {
  return pages->n_free + pages->n_idle;
}

// Withdraws all published pages and frees them. No page may be held.
void td_pages_forget(td_pages *pages);

// Serial of a published page: the parent of the page that follows it.
static inline uint64_t td_pages_serial(const td_pages *pages, int32_t page) {
  TD_CHECK(pages->pages[page].serial);
  return pages->pages[page].serial;
}
// The full published page that holds tokens[page_tokens] after `parent`, a serial or a root;
// TD_PAGE_NONE if there is none.
int32_t td_pages_find(const td_pages *pages, uint64_t parent, const int32_t *tokens);
// Publishes a held page after `before`, a published and held page, or TD_PAGE_NONE for the first of
// the prompts with this salt. No page with this key may be published yet.
void td_pages_publish(td_pages *pages, int32_t page, int32_t before, uint64_t salt,
                      const int32_t *tokens);
// The same, in an owner's chain.
void td_pages_publish_own(td_pages *pages, int32_t page, uint64_t parent, const int32_t *tokens);
// The longest partial page after `parent` whose tokens tokens[n_max] begin with; TD_PAGE_NONE if
// there is none.
int32_t td_pages_find_partial(const td_pages *pages, uint64_t parent, const int32_t *tokens,
                              uint32_t n_max);
// Publishes a held page that holds tokens[n_tokens], 0 < n_tokens < page_tokens. No partial page
// with this key may be published yet.
void td_pages_publish_partial(td_pages *pages, int32_t page, uint64_t parent, const int32_t *tokens,
                              uint32_t n_tokens);
// Makes an idle page the one that is evicted last.
void td_pages_refresh(td_pages *pages, int32_t page);
// Undoes publishing.
void td_pages_withdraw(td_pages *pages, int32_t page);
