// src/kv/kv.h - KV pages and each sequence's page table.
// Owns metadata only; page storage belongs to the engine's pool. Not thread-safe.
#ifndef TD_KV_KV_H
#define TD_KV_KV_H

#include <stdint.h>

#include "base/status.h"

typedef struct td_kv td_kv;
typedef struct {
  uint32_t page_tokens; // power of two
  uint32_t n_pages;
  uint32_t max_seqs;
} td_kv_opts;

// On success the caller owns *out; on error *out is NULL.
td_status td_kv_open(td_kv **out, const td_kv_opts *opts, td_err *err);
void td_kv_close(td_kv *kv);
// A new empty sequence, an index below max_seqs. TD_EAGAIN: all are taken.
td_status td_kv_seq_open(td_kv *kv, uint32_t *seq, td_err *err);
void td_kv_seq_close(td_kv *kv, uint32_t seq); // its pages become free
// Grows seq to hold n_tokens, all or nothing. TD_EAGAIN: pool full.
td_status td_kv_reserve(td_kv *kv, uint32_t seq, uint32_t n_tokens, td_err *err);
// Page indices of seq, in position order; valid until its next reserve or close.
const int32_t *td_kv_pages(const td_kv *kv, uint32_t seq, uint32_t *n_pages);
uint32_t td_kv_n_free(const td_kv *kv);
uint32_t td_kv_page_tokens(const td_kv *kv);

#endif
