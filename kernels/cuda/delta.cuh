// kernels/cuda/delta.cuh - the gated delta rule: what a block computes, and where its inputs are.
#pragma once

#include "kernels/cuda/cp_async.cuh"
#include "kernels/cuda/states.cuh"

enum { TILE = TD_DELTA_TILE }; // columns of a head's state that a block has

struct rule_part {
  uint32_t head, k_head, column; // column: of the head's values, the first of the tile
};

__device__ inline rule_part rule_part_of(const td_delta_shape &s, uint32_t head, uint32_t column) {
  return {head, s.is_tiled ? head % s.n_k_heads : head / (s.n_v_heads / s.n_k_heads), column};
}

// blockIdx: tile, value head, sequence.
__device__ inline rule_part rule_part_of_block(const td_delta_shape &s) {
  return rule_part_of(s, blockIdx.y, blockIdx.x * TILE);
}

// Where the block's tile [k_dim][TILE] is in a state.
__device__ inline size_t rule_tile_at(const td_delta_rule_op_args &a) {
  const size_t of_tile = static_cast<size_t>(a.shape.k_dim) * TILE;
  return a.rule_at + (static_cast<size_t>(blockIdx.y) * gridDim.x + blockIdx.x) * of_tile;
}

// A token's queries, keys and values are at these elements of its row.
__device__ inline size_t q_of(const td_delta_rule_op_args &a, const rule_part &part, uint32_t t) {
  return static_cast<size_t>(t) * a.channels + part.k_head * a.shape.k_dim;
}

__device__ inline size_t k_of(const td_delta_rule_op_args &a, const rule_part &part, uint32_t t) {
  return q_of(a, part, t) + static_cast<size_t>(a.shape.n_k_heads) * a.shape.k_dim;
}

__device__ inline size_t v_of(const td_delta_rule_op_args &a, const rule_part &part, uint32_t t) {
  return static_cast<size_t>(t) * a.channels +
         static_cast<size_t>(2) * a.shape.n_k_heads * a.shape.k_dim +
         static_cast<size_t>(part.head) * a.shape.v_dim + part.column;
}

// Decays and strength.
__device__ inline const float *gates_of(const td_delta_rule_op_args &a, const rule_part &part,
                                        uint32_t t) {
  const size_t head = static_cast<size_t>(t) * a.shape.n_v_heads + part.head;
  return a.gates + head * (td_delta_decays(&a.shape) + 1);
}
