// src/device/cpu/pages.h - rows of KV pages in E4M3 (tandem/kv_f8.h), and recurrent states: the one
// before a sequence's tokens of a step, and the pages that they pass.
#pragma once

#include "device/cpu/cpu.h"
#include "tandem/kv_f8.h"

// The tokens [begin, end) of a step, of one sequence and one page.
typedef struct {
  int32_t begin, end;
  char *state; // of the page
} td_page_run;

static inline char *td_state_page(const td_batch_view *b, const td_kv_view *state, uint32_t s,
                                  int32_t position) {
  const size_t slot = (size_t)s * b->max_pages + (uint32_t)position / b->page_tokens;
  return state->pages + (size_t)b->page_table[slot] * state->page_bytes;
}

// The state before sequence s's first token of the step; NULL: there is none.
static inline const char *td_state_before(const td_batch_view *b, const td_kv_view *state,
                                          uint32_t s) {
  const int32_t position = b->position[b->q_begin[s]];
  return position ? td_state_page(b, state, s, position - 1) : NULL;
}

// The run that begins at token `begin` of sequence s.
static inline td_page_run td_page_run_at(const td_batch_view *b, const td_kv_view *state,
                                         uint32_t s, int32_t begin) {
  const int32_t position = b->position[begin], left = b->q_begin[s + 1] - begin;
  const int32_t in_page = (int32_t)(b->page_tokens - (uint32_t)position % b->page_tokens);
  return (td_page_run){.begin = begin,
                       .end = begin + (left < in_page ? left : in_page),
                       .state = td_state_page(b, state, s, position)};
}

// The slot for the state after token t of sequence s, which is not its last; NULL: it is not kept.
static inline float *td_trail_slot(const td_state_trail *trail, const td_batch_view *b, uint32_t s,
                                   int32_t t) {
  if (!trail->slots || trail->first[s] < 0 || t + 1 >= b->q_begin[s + 1]) return NULL;
  const size_t slot = (size_t)(trail->first[s] + t - b->q_begin[s]);
  return (float *)(void *)(trail->slots + slot * trail->slot_bytes);
}

// Row `row` of a page in E4M3, counted over all heads and tokens: [rows->dim].
void td_kv_f8_put(const td_kv_rows *rows, uint32_t page_tokens, void *page, size_t row,
                  const float *in);
void td_kv_f8_get(const td_kv_rows *rows, uint32_t page_tokens, const void *page, size_t row,
                  float *out);
