// src/kv/kv.h - KV pages, each sequence's page table, and the prefix cache. Owns metadata only;
// page storage belongs to the engine's pool. Not thread-safe.
//
// A full page whose tokens were all computed and committed (td_kv_commit) is never written again
// and is shared with sequences that begin with the same token ids. Pages that no sequence holds
// stay as cache and count as free; if no other page is left, the least recently used one is reused,
// later pages of a prefix before earlier ones.
//
// A page with a state (recurrent, or keys and values of its last tokens alone) holds it after the
// last computed token, so a page that is still filled cannot be shared. A copy of it can: it is
// cached as a partial page, found by prompts that begin with exactly its tokens, and copied to a
// page of theirs, which they fill further.
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/sha256.h"
#include "base/status.h"

typedef struct td_kv td_kv;

typedef enum { TD_KV_STORED, TD_KV_REMOVED, TD_KV_CLEARED } td_kv_change_kind;

// A full page that prompts may find from now on, or no longer; or none is left to be found.
typedef struct {
  td_kv_change_kind kind;
  uint32_t n_tokens;
  const td_digest *name, *before; // before: of the page before it; NULL: it is a prompt's first
  uint64_t salt;                  // of a first page
  const int32_t *tokens;          // [n_tokens], the page's own, among those of the caller
} td_kv_change;

// May not call td_kv; what the change points to is valid during the call.
typedef struct {
  void (*call)(void *ctx, const td_kv_change *change); // NULL: nobody listens
  void *ctx;
} td_kv_listener;

typedef struct {
  uint32_t page_tokens; // power of two
  uint32_t n_pages;
  uint32_t max_seqs;
  const td_digest *root;   // start of the chain of page names (kv/record.h); NULL: no names
  td_kv_listener listener; // requires a root
} td_kv_opts;

// On success the caller owns *out; on error *out is NULL.
td_status td_kv_open(td_kv **out, const td_kv_opts *opts, td_err *err);
void td_kv_close(td_kv *kv);
// Opens an empty sequence; *seq is an index below max_seqs. TD_EAGAIN: all are in use.
td_status td_kv_seq_open(td_kv *kv, uint32_t *seq, td_err *err);
// Keeps the cached pages of the sequence apart from those of sequences with another salt, or none
// (0). Call before the sequence has pages.
void td_kv_set_salt(td_kv *kv, uint32_t seq, uint64_t salt);
void td_kv_seq_close(td_kv *kv, uint32_t seq); // pages that only it held become free
// Grows seq to hold n_tokens, all or nothing. TD_EAGAIN: pool full.
td_status td_kv_reserve(td_kv *kv, uint32_t seq, uint32_t n_tokens, td_err *err);
// Page indices of seq, in position order; valid until its next reserve, reuse or close. Pages keep
// their position.
const int32_t *td_kv_pages(const td_kv *kv, uint32_t seq, uint32_t *n_pages);
uint32_t td_kv_n_free(const td_kv *kv); // including pages that are only cache
uint32_t td_kv_page_tokens(const td_kv *kv);

// How many of a prompt's tokens[n_tokens], with this salt, are cached: whole pages and at most one
// partial page after them. Excludes the last token, which is always computed for its logits.
uint32_t td_kv_match(const td_kv *kv, uint64_t salt, const int32_t *tokens, uint32_t n_tokens);
// Adds those whole pages to the empty sequence and returns the tokens cached. Takes no free page.
// A partial page becomes the sequence's source.
uint32_t td_kv_reuse(td_kv *kv, uint32_t seq, const int32_t *tokens, uint32_t n_tokens);
// The partial page that the caller copies to the page after the whole ones, before it is filled
// further; held until td_kv_drop_source, which says that it was copied or is not needed. -1: none.
int32_t td_kv_source(const td_kv *kv, uint32_t seq);
void td_kv_drop_source(td_kv *kv, uint32_t seq);
// Takes the source itself, out of the cache, as the page that it would be copied to. False: there
// is none, another sequence holds it, or seq has its page already.
bool td_kv_take_source(td_kv *kv, uint32_t seq);
// Takes a free page for a copy of a page of seq. At most one at a time. -1: no page is free.
int32_t td_kv_take_spare(td_kv *kv, uint32_t seq);
// The spare page is a copy of seq's last page after tokens[n_tokens], of which the full pages are
// committed: it is a cached partial page from now on.
void td_kv_keep_spare(td_kv *kv, uint32_t seq, const int32_t *tokens, uint32_t n_tokens);
void td_kv_drop_spare(td_kv *kv, uint32_t seq); // it is free again; no effect without one
// tokens[n_tokens], from the sequence's start, are computed and final: full pages are shared from
// now on. If another sequence has already published a page with the same tokens, that page is the
// shared one; seq holds both, because its own may be in use. n_tokens must not decrease from call
// to call.
void td_kv_commit(td_kv *kv, uint32_t seq, const int32_t *tokens, uint32_t n_tokens);
// Invalidates all cached pages, when their content is lost. No sequence may be open.
void td_kv_invalidate_all(td_kv *kv);

// For a second cache tier: the pages that may be evicted next.
// Up to n_max idle pages (published, held by no sequence), next to be evicted first; returns how
// many.
uint32_t td_kv_idle(const td_kv *kv, uint32_t n_max, int32_t *pages);
uint32_t td_kv_n_empty(const td_kv *kv); // free pages that are not cache either

typedef struct {
  uint64_t serial; // the page keeps this content as long as it has this serial
  uint64_t idled;  // differs each time the page becomes idle
  td_digest name;
  const int32_t *tokens; // [page_tokens], the page's own tokens; valid as long
} td_kv_content;

// False: the page is not published, or only in its owner's chain. Requires a root.
bool td_kv_content_of(const td_kv *kv, int32_t page, td_kv_content *out);

// Call when no more of seq will be committed: releases other sequences' pages that equal its own,
// so that it holds only the pages its tokens need.
void td_kv_drop_duplicates(td_kv *kv, uint32_t seq);

// Shares also the full pages with generated tokens: tokens[n_tokens], from the sequence's start,
// are computed. Its prompt was committed and dropped its duplicates. Call before closing seq.
// has_partial: the page after the full ones is also cached, with the state after n_tokens.
void td_kv_commit_output(td_kv *kv, uint32_t seq, const int32_t *tokens, uint32_t n_tokens,
                         bool has_partial);

// A sequence that is suspended and resumed later. Pages with generated tokens are private to it:
// the decode kernels, which computed them, round differently from prefill.
typedef struct {
  uint64_t owner; // unique per suspended sequence; below 2^63
  const int32_t *tokens;
  uint32_t n_prompt, n_tokens; // n_tokens: computed tokens, prompt included
  // For td_kv_suspend: the page after the full ones can be kept; its state is that after n_tokens.
  bool has_partial;
} td_kv_answer;

// Closes seq, whose computed prompt tokens were committed. Its full pages, and the partial one if
// wanted, stay in the cache; pages beyond the prompt only for the same owner.
void td_kv_suspend(td_kv *kv, uint32_t seq, const td_kv_answer *answer);
// Adds to the empty sequence the cached pages of the prompt, its last token included, and those
// left by td_kv_suspend; returns the number of tokens they hold. answer->n_tokens: the maximum of
// use. A partial page left by td_kv_suspend becomes a page of seq; another's is its source.
uint32_t td_kv_resume(td_kv *kv, uint32_t seq, const td_kv_answer *answer);
// Before anything is computed: whether td_kv_resume or td_kv_take_source gave it a partial page.
bool td_kv_has_partial(const td_kv *kv, uint32_t seq);
// Frees the pages kept for the owner, which will not resume.
void td_kv_drop_suspended(td_kv *kv, const td_kv_answer *answer);
