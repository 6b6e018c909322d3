// src/engine/experts/ranks.h - expert parallelism: a step computed by several engines, one a
// device, as ranks. Each has a share of the tokens (see below) and of every layer's experts.
// Internal to engine/.
//
// In a layer, a rank gathers the keys and values (or latents) of all tokens, so that every rank has
// the whole KV cache, and attends for its own tokens. Then it gathers all hidden states, routes all
// tokens (so that no routing tables travel) and computes its own experts for them. Their sums are
// reduced and scattered: each rank gets the sums of its own tokens.
//
// A step with enough tokens passes through the layers in two halves: the first half of every
// sequence's tokens, and the second (a piece of the zigzag each). What ranks send each other is on
// a stream of its own, so that one half is exchanged while the other is computed. Bits do not
// depend on it.
//
// Gathered activations are exact, so attention and routing equal a single engine's, bit by
// bit. Experts' sums are rounded to BF16 and added in f32 in the order of ranks (comm.h).
//
// Rank 0 is the engine that the caller has. Steps that are not for all ranks run on it alone; KV
// pages that these steps write are sent to the other ranks when they need them.
#pragma once

#include <stdint.h>

#include "comm/comm.h"
#include "engine/engine_impl.h"

// Tables of a step as in td_engine.
typedef struct {
  int32_t *meta, *dev_meta;
  uint32_t *first_token;
  size_t len; // entries used by the step
} rank_tables;

enum { TD_RANK_HALVES = 2 };

// Tokens of all ranks that are exchanged together: a half of the step, or all of it.
typedef struct {
  td_microbatch own;                  // this rank's tokens
  step_group all;                     // all ranks' tokens, rank by rank
  uint32_t begin, n;                  // `all` is [begin, begin + n) of the gathered tokens
  size_t n_tokens[TD_COMM_MAX_RANKS]; // of each rank
  td_event *exchanged;                // its latest collective has ended
} td_rank_half;

// An engine's part of the group.
struct td_rank {
  td_comm *comm;
  uint32_t rank, n_ranks;
  uint32_t first_expert, n_experts; // its share
  bool is_active;                   // the step being run is computed by all ranks
  td_stream *stream;                // of the exchange
  td_event *ready;                  // the next data to exchange is computed

  // device memory, for all tokens of a step: hidden states with ids and weights as in td_engine.h,
  // entries of the KV cache, the own experts' sums
  void *h, *entry[TD_N_ENTRIES];
  float *part;
  rank_tables all[TD_RANK_HALVES], own, own_halves[TD_RANK_HALVES];
  rank_tables saved;  // the engine's own, put back behind the step
  rank_tables wanted; // of wanted logits: where the gathered rows have them; temperatures
  // [2 * n_ranks * max_step_seqs]: pieces of sequences, and the sequence of each
  td_step_seq *seqs;
  uint32_t *wholes;

  // the step being run
  td_rank_half halves[TD_RANK_HALVES];
  uint32_t n_halves, n_all;         // n_all: tokens
  bool is_sorted;                   // the latest td_op_moe was for all tokens of the step
  size_t n_rows[TD_COMM_MAX_RANKS]; // wanted logits
  uint32_t n_all_rows;
  td_status status; // of the collectives
  td_err err;
};

// Rank 0: opens the engines of the other ranks, and the group. On error, close it.
td_status td_ranks_open(td_engine *engine, td_err *err);
void td_ranks_close(td_engine *engine);

// Whether all ranks compute this step; the engine must have ranks.
bool td_ranks_wants(td_engine *engine, const td_step_seq *seqs, uint32_t n_seqs);
td_status td_ranks_step(td_engine *engine, const td_step_seq *seqs, uint32_t n_seqs, td_err *err);
// Rank 0 computes this step alone: the others lack the KV entries it writes.
void td_ranks_note_alone(td_engine *engine, const td_step_seq *seqs, uint32_t n_seqs);

static inline bool td_rank_is_active(const td_engine *e) {
  return e->rank && e->rank->is_active;
}

// In an active step. An exchange runs on its own stream, behind what the engine's stream has; the
// engine's waits for it where td_rank_await is queued.
// Entries of the layer, for td_rank_store.
void td_rank_gather_entries(td_engine *engine, td_rank_half *half, uint32_t layer_idx);
void td_rank_gather_hidden(td_engine *engine, td_rank_half *half); // rank->h
// delta of the own tokens = their sums over all ranks' parts, [n_all][dim]
void td_rank_reduce(td_engine *engine, td_rank_half *half, const float *sums);
void td_rank_await(td_engine *engine, const td_rank_half *half); // its latest collective
// Awaits gathered KV entries and copies them into the layer's pages.
void td_rank_store(td_engine *engine, const td_rank_half *half, uint32_t layer_idx);
// h = the residual stream of all wanted rows, in the caller's order; h had the own rows. From then
// on the step's rows are all ranks'.
void td_rank_gather_rows(td_engine *engine);

// ---- the zigzag ---------------------------------------------------------------------------------

// How ranks share the tokens of a prompt's chunk. The chunk is cut in twice as many pieces as there
// are ranks, and rank r has the piece r from the front and the piece r from the back: late tokens
// attend to more than early ones, and so every rank has as much to do.
//
// Token of the chunk at which piece i of 2 * n_ranks begins; i up to 2 * n_ranks. Pieces may be
// empty, but never the last one.
static inline uint32_t td_zigzag_begin(uint32_t n_tokens, uint32_t n_ranks, uint32_t i) {
  return (uint32_t)((uint64_t)n_tokens * i / (2 * n_ranks));
}

// The rank's piece from the front (half 0) or from the back (half 1).
static inline uint32_t td_zigzag_piece(uint32_t n_ranks, uint32_t rank, uint32_t half) {
  return half ? 2 * n_ranks - 1 - rank : rank;
}

// The first of the experts that a rank has; the last rank's end with n_experts.
static inline uint32_t td_rank_first_expert(uint32_t n_experts, uint32_t n_ranks, uint32_t rank) {
  return (uint32_t)((uint64_t)n_experts * rank / n_ranks);
}
