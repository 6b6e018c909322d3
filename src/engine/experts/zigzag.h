// src/engine/experts/zigzag.h - how ranks share the tokens of a prompt's chunk. The chunk is cut in
// twice as many pieces as there are ranks, and rank r has the piece r from the front and the piece
// r from the back: late tokens attend to more than early ones, and so every rank has as much to do.
#pragma once

#include <stdint.h>

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
