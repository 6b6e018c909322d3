// kernels/cuda/attn_merge.cuh - partial sums of decode attention's splits: how they are added up,
// in the block that computes several splits of a head or in the kernel that comes last.
#pragma once

#include "kernels/cuda/attn.cuh"

// The blocks of keys that a token sees with a KV head; NULL: all.
__device__ inline const int32_t *blocks_of(const td_cu_attn_decode_args &a, uint32_t t,
                                           uint32_t kv_head) {
  const uint64_t most = static_cast<uint64_t>(a.top_blocks) * a.block;
  if (!a.blocks || keys_of(a.batch, t) <= most + (a.of_groups ? a.block - 1 : 0)) return nullptr;
  const size_t row = a.of_groups ? t : static_cast<size_t>(t) * a.n_kv_heads + kv_head;
  return a.blocks + row * a.top_blocks;
}

// The number of keys that it sees with them: all are whole but the one that it is in itself.
__device__ inline uint32_t seen_keys(const td_cu_attn_decode_args &a, uint32_t t,
                                     const int32_t *blocks) {
  uint32_t n_keys = keys_of(a.batch, t), before = a.top_blocks - 1;
  if (!blocks) return n_keys;
  if (a.of_groups) return a.top_blocks * a.block + n_keys % a.block;
  return before * a.block +
         at_most(n_keys - static_cast<uint32_t>(blocks[before]) * a.block, a.block);
}

// Keys per split of a token that sees n_keys.
__device__ inline uint32_t split_keys_of(const td_cu_attn_decode_args &a, uint32_t n_keys) {
  return a.by_length ? td_cu_latent_split(n_keys, a.split_keys) : a.split_keys;
}

// Keys per block.
__device__ inline uint32_t block_keys_of(const td_cu_attn_decode_args &a, uint32_t n_keys) {
  return split_keys_of(a, n_keys) * (a.by_block ? TD_CU_FOLDED : 1);
}

// Factors that bring two partial sums with different maxima to the common maximum m.
struct fold_factors {
  float m, old, more;
};

__device__ inline fold_factors factors_of(float m, float other) {
  float larger = fmaxf(m, other);
  return {larger, exp2_approx(m - larger), exp2_approx(other - larger)};
}

// Result of folding a head's rows in order: maximum, sum and the factors.
struct folded_rows {
  float m, l;
  float old[TD_CU_FOLDED], more[TD_CU_FOLDED];
};

__device__ inline folded_rows fold_rows(const float *ml, uint32_t n) {
  folded_rows f = {ml[0], ml[1], {}, {}};
#pragma unroll
  for (uint32_t i = 1; i < TD_CU_FOLDED; i++) {
    if (i >= n) break;
    fold_factors next = factors_of(f.m, ml[2 * i]);
    f.l = fold(f.l, next.old, ml[2 * i + 1], next.more);
    f.m = next.m;
    f.old[i] = next.old;
    f.more[i] = next.more;
  }
  return f;
}

// One block per token and head. All warps compute the same factors. FOLDED: rows that are added in
// order first.
template <int FOLDED> __global__ static void attn_merge_kernel(td_cu_attn_decode_args a) {
  __shared__ float factor[TD_CU_MAX_SPLITS], old[TD_CU_MAX_SPLITS], more[TD_CU_MAX_SPLITS];
  size_t row = static_cast<size_t>(blockIdx.y) * a.n_heads + blockIdx.x;
  const float *ml = a.part_ml + row * a.n_rows * 2;
  const float *part = a.part + row * a.n_rows * a.v_dim;
  uint32_t lane = threadIdx.x % WARP, kv_head = blockIdx.x / (a.n_heads / a.n_kv_heads);
  uint32_t n_keys = seen_keys(a, blockIdx.y, blocks_of(a, blockIdx.y, kv_head));
  uint32_t block_keys = block_keys_of(a, n_keys);
  uint32_t skipped = first_seen(n_keys, a.window) / block_keys; // splits
  uint32_t n = at_most((n_keys + block_keys - 1) / block_keys - skipped, a.n_rows);
  float m = -INFINITY, l = 0;
  for (uint32_t i = lane * FOLDED; i < n; i += WARP * FOLDED)
    m = fmaxf(m, FOLDED > 1 ? fold_rows(ml + 2 * i, n - i).m : ml[2 * i]);
  float sink = a.sinks ? a.sinks[blockIdx.x] * LOG2_E : -INFINITY;
  m = fmaxf(warp_max(m), sink);
  for (uint32_t i = lane * FOLDED; i < n; i += WARP * FOLDED) {
    folded_rows rows = {ml[2 * i], ml[2 * i + 1], {}, {}};
    if (FOLDED > 1) rows = fold_rows(ml + 2 * i, n - i);
    float f = exp2_approx(rows.m - m);
    l += f * rows.l;
    if (threadIdx.x >= WARP) continue;
    factor[i] = f;
    for (uint32_t j = 1; j < FOLDED && i + j < n; j++) {
      old[i + j] = rows.old[j];
      more[i + j] = rows.more[j];
    }
  }
  l = warp_sum(l);
  if (a.sinks) l += exp2_approx(sink - m);
  __syncthreads();
  for (uint32_t d = threadIdx.x; d < a.v_dim; d += blockDim.x) {
    float sum = 0;
#pragma unroll 4
    for (uint32_t i = 0; i < n; i += FOLDED) {
      float of_rows = part[static_cast<size_t>(i) * a.v_dim + d];
#pragma unroll
      for (uint32_t j = 1; j < FOLDED; j++) {
        if (i + j < n)
          of_rows = fold(of_rows, old[i + j], part[static_cast<size_t>(i + j) * a.v_dim + d],
                         more[i + j]);
      }
      sum += factor[i] * of_rows;
    }
    float v = sum / l;
    if (a.out_f32) {
      static_cast<float *>(a.out)[row * a.v_dim + d] = v;
    } else {
      static_cast<uint16_t *>(a.out)[row * a.v_dim + d] = bf16_from_f32(v);
    }
  }
}

// Adds up the sums of all splits, after the kernel that made them; folds: unless by_block, rows are
// folded first.
static inline int launch_merge(const td_cu_attn_decode_args &a, bool folds, td_cu_stream stream) {
  enum { LEAST_THREADS = 128, MOST_THREADS = 512 };
  auto kernel = folds && !a.by_block ? attn_merge_kernel<TD_CU_FOLDED> : attn_merge_kernel<1>;
  const uint32_t n_threads = ceil_div(a.v_dim, LEAST_THREADS) * LEAST_THREADS;
  return TD_LAUNCH(kernel, dim3(a.n_heads, a.batch.n_tokens), at_most(n_threads, MOST_THREADS), 0,
                   stream, a);
}
