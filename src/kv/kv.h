// src/kv/kv.h - KV pages, each sequence's page table, and the cache of prefixes over both.
// Owns metadata only; page storage belongs to the engine's pool. Not thread-safe.
//
// A page whose tokens are all computed and told (td_kv_commit) is never written again, and other
// sequences that begin with the same tokens share it. What decides is token ids, all of them from
// the first on. Pages stay as cache when nobody holds them, and count as free: when no other is
// left, the one unused for longest is taken, later pages of a prefix before earlier ones.
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
  const td_digest *root; // what names of pages (kv/record.h) are chained to; NULL: they need none
} td_kv_opts;

// On success the caller owns *out; on error *out is NULL.
td_status td_kv_open(td_kv **out, const td_kv_opts *opts, td_err *err);
void td_kv_close(td_kv *kv);
// A new empty sequence, an index below max_seqs. TD_EAGAIN: all are taken.
td_status td_kv_seq_open(td_kv *kv, uint32_t *seq, td_err *err);
void td_kv_seq_close(td_kv *kv, uint32_t seq); // pages that it alone held become free
// Grows seq to hold n_tokens, all or nothing. TD_EAGAIN: pool full.
td_status td_kv_reserve(td_kv *kv, uint32_t seq, uint32_t n_tokens, td_err *err);
// Page indices of seq, in position order; valid until its next reserve, reuse or close. A page once
// given stays at its place.
const int32_t *td_kv_pages(const td_kv *kv, uint32_t seq, uint32_t *n_pages);
uint32_t td_kv_n_free(const td_kv *kv); // those that are only cache included
uint32_t td_kv_page_tokens(const td_kv *kv);

// How many of a prompt's tokens[n_tokens] the cache holds, in whole pages. The last one does not
// count: it always needs to be computed, its logits are wanted.
uint32_t td_kv_match(const td_kv *kv, const int32_t *tokens, uint32_t n_tokens);
// Gives the empty sequence the shared pages of that match and returns how many tokens they hold.
// Takes no free page.
uint32_t td_kv_reuse(td_kv *kv, uint32_t seq, const int32_t *tokens, uint32_t n_tokens);
// All of tokens[n_tokens], from the sequence's start, are computed and stay: full pages among them
// are shared from now on. Where another sequence was first with the same tokens, its page is the
// one that is shared; this one keeps both, for its own may be in use. n_tokens never sinks from
// call to call.
void td_kv_commit(td_kv *kv, uint32_t seq, const int32_t *tokens, uint32_t n_tokens);
// What the pages hold is lost: nothing is cached any more. No sequence is open.
void td_kv_invalidate_all(td_kv *kv);

// For a second tier behind this cache: the pages that it may lose.
// Up to n_most published pages that nobody holds, the next to make room first; returns how many.
uint32_t td_kv_idle(const td_kv *kv, uint32_t n_most, int32_t *pages);
uint32_t td_kv_n_empty(const td_kv *kv); // free pages that are not even cache

typedef struct {
  uint64_t serial; // the page's content is this one for as long as it has this serial
  td_digest name;
  const int32_t *tokens; // [page_tokens], of the page itself; valid as long
} td_kv_content;

// False: the page is not published, or for its owner alone. Only with a root.
bool td_kv_content_of(const td_kv *kv, int32_t page, td_kv_content *out);

// Nothing more of seq will be committed: it lets go of others' pages that equal its own, and from
// then on holds no more than its tokens need.
void td_kv_drop_duplicates(td_kv *kv, uint32_t seq);

// A sequence that makes room for others and goes on later. Pages with tokens of an answer are its
// own: they hold what was computed token by token, which rounds otherwise than a prompt's.
typedef struct {
  uint64_t owner; // of which there is one sequence at most; below 2^63
  const int32_t *tokens;
  uint32_t n_prompt, n_tokens; // n_tokens: computed, from the prompt's start
} td_kv_answer;

// Closes seq, whose prompt was committed as far as it goes. Its full pages stay in the cache like
// any, but those beyond the prompt for the same owner alone.
void td_kv_suspend(td_kv *kv, uint32_t seq, const td_kv_answer *answer);
// Gives the empty sequence what the cache still holds of the prompt, even its last token, and what
// park left; returns how many tokens that is. answer->n_tokens: the most that are of use.
uint32_t td_kv_resume(td_kv *kv, uint32_t seq, const td_kv_answer *answer);
// The owner will not be back.
void td_kv_drop_suspended(td_kv *kv, const td_kv_answer *answer);

#endif
