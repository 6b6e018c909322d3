// src/kv/kv.h - KV pages, each sequence's page table, and the prefix cache. Owns metadata only;
// page storage belongs to the engine's pool. Not thread-safe.
//
// A full page whose tokens were all computed and committed (td_kv_commit) is never written again
// and is shared with sequences that begin with the same token ids. Pages that no sequence holds
// stay as cache and count as free; if no other page is left, the least recently used one is reused,
// later pages of a prefix before earlier ones.
#ifndef TD_KV_KV_H
#define TD_KV_KV_H

#include <stdbool.h>
#include <stdint.h>

#include "base/sha256.h"
#include "base/status.h"

typedef struct td_kv td_kv;
typedef struct {
  uint32_t page_tokens; // power of two
  uint32_t n_pages;
  uint32_t max_seqs;
  const td_digest *root; // start of the chain of page names (kv/record.h); NULL: no names
} td_kv_opts;

// On success the caller owns *out; on error *out is NULL.
td_status td_kv_open(td_kv **out, const td_kv_opts *opts, td_err *err);
void td_kv_close(td_kv *kv);
// Opens an empty sequence; *seq is an index below max_seqs. TD_EAGAIN: all are in use.
td_status td_kv_seq_open(td_kv *kv, uint32_t *seq, td_err *err);
void td_kv_seq_close(td_kv *kv, uint32_t seq); // pages that only it held become free
// Grows seq to hold n_tokens, all or nothing. TD_EAGAIN: pool full.
td_status td_kv_reserve(td_kv *kv, uint32_t seq, uint32_t n_tokens, td_err *err);
// Page indices of seq, in position order; valid until its next reserve, reuse or close. Pages keep
// their position.
const int32_t *td_kv_pages(const td_kv *kv, uint32_t seq, uint32_t *n_pages);
uint32_t td_kv_n_free(const td_kv *kv); // including pages that are only cache
uint32_t td_kv_page_tokens(const td_kv *kv);

// How many of a prompt's tokens[n_tokens] are cached, in whole pages. Excludes the last token,
// which is always computed for its logits.
uint32_t td_kv_match(const td_kv *kv, const int32_t *tokens, uint32_t n_tokens);
// Adds those cached pages to the empty sequence and returns the tokens they hold. Takes no free
// page.
uint32_t td_kv_reuse(td_kv *kv, uint32_t seq, const int32_t *tokens, uint32_t n_tokens);
// tokens[n_tokens], from the sequence's start, are computed and final: full pages are shared from
// now on. If another sequence has already published a page with the same tokens, that page is the
// shared one; seq holds both, because its own may be in use. n_tokens must not decrease from call
// to call.
void td_kv_commit(td_kv *kv, uint32_t seq, const int32_t *tokens, uint32_t n_tokens);
// Invalidates all cached pages, when their content is lost. No sequence may be open.
void td_kv_invalidate_all(td_kv *kv);

// For a second cache tier: the pages that may be evicted next.
// Up to n_most idle pages (published, held by no sequence), next to be evicted first; returns how
// many.
uint32_t td_kv_idle(const td_kv *kv, uint32_t n_most, int32_t *pages);
uint32_t td_kv_n_empty(const td_kv *kv); // free pages that are not cache either

typedef struct {
  uint64_t serial; // the page keeps this content as long as it has this serial
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
void td_kv_commit_output(td_kv *kv, uint32_t seq, const int32_t *tokens, uint32_t n_tokens);

// A sequence that is suspended and resumed later. Pages with generated tokens are private to it:
// the decode kernels, which computed them, round differently from prefill.
typedef struct {
  uint64_t owner; // unique per suspended sequence; below 2^63
  const int32_t *tokens;
  uint32_t n_prompt, n_tokens; // n_tokens: computed tokens, prompt included
} td_kv_answer;

// Closes seq, whose computed prompt tokens were committed. Its full pages stay in the cache, those
// beyond the prompt for the same owner only.
void td_kv_suspend(td_kv *kv, uint32_t seq, const td_kv_answer *answer);
// Adds to the empty sequence the cached pages of the prompt, its last token included, and those
// left by td_kv_suspend; returns the number of tokens they hold. answer->n_tokens: the maximum of
// use.
uint32_t td_kv_resume(td_kv *kv, uint32_t seq, const td_kv_answer *answer);
// Frees the pages kept for the owner, which will not resume.
void td_kv_drop_suspended(td_kv *kv, const td_kv_answer *answer);

#endif
