// src/engine/attn/window.h - keys and values of layers with a window (td_kv_layout.n_blocks), for
// the steps of an engine. Internal to engine/.
//
// Of a layer with a window, a page keeps the last n_blocks blocks of its tokens: block b is in
// slot b % n_blocks of its part. A sequence's next token finds all that it sees there, in its page
// and the one before, and is stored there. More tokens at once would overwrite what the first of
// them see. They are stored and attended to in blocks of the engine's own, which all layers take
// turns to use: before a layer, what the tokens see of the past is copied there; behind it, what
// later tokens see is copied to the pages.
//
// For the device's operators, blocks are pages of block_tokens tokens, with a page table of their
// own and positions as they are. So results are the same as if layers kept everything.
#pragma once

#include "engine/engine_impl.h"

td_status td_window_open(td_engine *engine, td_err *err); // on error, close it too
void td_window_close(td_engine *engine);
// Entries of a sequence's block table; 0: no layer has a window that leaves the pages.
uint32_t td_window_max_blocks(const td_engine *engine);
// Before td_engine_build_step: where the tokens of the step's sequences go.
void td_window_begin(td_engine *engine, const td_step_seq *seqs, uint32_t n_seqs);
// The block table, i32 [td_window_max_blocks], of seq: sequence s of td_window_begin, or a part of
// it.
void td_window_table(const td_engine *engine, const td_step_seq *seq, uint32_t s, int32_t *out);

// Queues the copies before and behind a layer's attention; without effect where the layer keeps
// everything or the step's tokens are stored in the pages at once.
void td_window_enter(td_engine *engine, uint32_t layer_idx);
void td_window_leave(td_engine *engine, uint32_t layer_idx);

// What operators of the layer take for the group's sequences.
td_batch_view td_layer_batch(const td_engine *engine, const step_group *group, uint32_t layer_idx);
td_kv_view td_layer_kv(const td_engine *engine, uint32_t layer_idx, bool is_decode);
