// kernels/cuda/router.cu - expert selection, and sorting of (token, j) pairs by expert.
#include "kernels/cuda/common.cuh"

struct best {
  float value;
  uint32_t idx;
};

// The lanes' largest value, ties to the lower index; returned to every lane.
__device__ static best warp_best(best b) {
  for (int offset = WARP / 2; offset > 0; offset /= 2) {
    best o = {__shfl_xor_sync(TD_FULL_WARP, b.value, offset),
              __shfl_xor_sync(TD_FULL_WARP, b.idx, offset)};
    if (o.value > b.value || (o.value == b.value && o.idx < b.idx)) b = o;
  }
  return b;
}

// A lane has every 32nd entry, from its own number on; bit i of its mask is entry lane + 32 i.
static_assert(TD_CU_MAX_EXPERTS <= WARP * WARP, "bits of a mask");

// Index of the largest of choice[0 .. n) that is not taken; takes it. NaN is never chosen; if
// nothing else is left, the lowest index not taken is.
__device__ static uint32_t take_best(const float *choice, uint32_t *taken, uint32_t n) {
  best b = {-INFINITY, UINT32_MAX};
  for (uint32_t i = threadIdx.x, bit = 1; i < n; i += WARP, bit <<= 1) {
    float v = choice[i];
    if (*taken & bit || isnan(v)) continue;
    if (b.idx == UINT32_MAX || v > b.value) b = {v, i};
  }
  b = warp_best(b);
  if (b.idx == UINT32_MAX) {
    for (uint32_t i = threadIdx.x, bit = 1; i < n && b.idx == UINT32_MAX; i += WARP, bit <<= 1)
      if (!(*taken & bit)) b = {0, i};
    b = warp_best({0, b.idx});
  }
  if (b.idx >= n) return 0;
  if (b.idx % WARP == threadIdx.x) *taken |= 1u << b.idx / WARP;
  return b.idx;
}

// Takes all experts outside the best groups, which are ranked by the sum of their two best experts.
// group: memory for a number of each group.
__device__ static void drop_groups(const td_router_args &a, const float *choice, float *group,
                                   uint32_t *taken) {
  uint32_t size = a.n_experts / a.n_groups;
  for (uint32_t g = threadIdx.x; g < a.n_groups; g += WARP) {
    float first = -INFINITY, second = -INFINITY;
    for (uint32_t i = 0; i < size; i++) {
      float v = choice[g * size + i];
      if (v > first) {
        second = first;
        first = v;
      } else if (v > second) {
        second = v;
      }
    }
    group[g] = size > 1 ? first + second : first;
  }
  __syncwarp();
  uint32_t taken_groups = 0;
  for (uint32_t i = 0; i < a.topk_groups; i++)
    take_best(group, &taken_groups, a.n_groups);
  __syncwarp(); // all have read the groups' sums, which become marks
  for (uint32_t g = threadIdx.x, bit = 1; g < a.n_groups; g += WARP, bit <<= 1)
    group[g] = taken_groups & bit ? 1 : 0;
  __syncwarp();
  for (uint32_t e = threadIdx.x, bit = 1; e < a.n_experts; e += WARP, bit <<= 1)
    if (group[e / size] == 0) *taken |= bit;
}

__device__ static float softplus(float x) {
  return x > 20 ? x : log1pf(expf(x));
}

// Each lane makes its own entries.
__device__ static void make_scores(const td_router_args &a, const float *logits, float *score,
                                   float *choice) {
  float largest = -INFINITY, sum = 0;
  for (uint32_t e = threadIdx.x; e < a.n_experts; e += WARP) {
    choice[e] = logits[e];
    largest = fmaxf(largest, choice[e]);
  }
  largest = warp_max(largest);
  for (uint32_t e = threadIdx.x; e < a.n_experts && a.kind == TD_ROUTER_SOFTMAX; e += WARP) {
    score[e] = expf(choice[e] - largest);
    sum += score[e];
  }
  sum = warp_sum(sum);
  for (uint32_t e = threadIdx.x; e < a.n_experts; e += WARP) {
    score[e] = a.kind == TD_ROUTER_SIGMOID    ? 1 / (1 + expf(-choice[e]))
               : a.kind == TD_ROUTER_SOFTPLUS ? sqrtf(softplus(choice[e]))
                                              : score[e] / sum;
    choice[e] = a.bias ? score[e] + a.bias[e] : score[e];
  }
  __syncwarp();
}

// The table's row for a token; NULL: there is no table, or a fault.
__device__ static const int32_t *row_of(const td_router_args &a, size_t t) {
  if (!a.table) return nullptr;
  uint32_t token = static_cast<uint32_t>(a.tokens[t]);
  if (token < a.n_vocab) return a.table + static_cast<size_t>(token) * a.top_k;
  if (threadIdx.x == 0) *a.fault = TD_CU_FAULT_TOKEN;
  return nullptr;
}

// One warp per token. Lane j has the chosen experts j, j + 32, ..
__global__ static void router_kernel(td_router_args a) {
  __shared__ float score[TD_CU_MAX_EXPERTS], choice[TD_CU_MAX_EXPERTS], group[TD_CU_MAX_EXPERTS];
  float *chosen = group; // scores, when groups are done
  size_t t = blockIdx.x;
  make_scores(a, a.logits + t * a.n_experts, score, choice);
  uint32_t taken = 0;
  if (a.n_groups > 1) drop_groups(a, choice, group, &taken);
  __syncwarp();
  float sum = a.kind == TD_ROUTER_SOFTMAX ? 0 : 1e-20f;
  const int32_t *row = row_of(a, t);
  for (uint32_t j = 0; j < a.top_k; j++) {
    uint32_t e = row ? static_cast<uint32_t>(row[j]) : take_best(choice, &taken, a.n_experts);
    sum += score[e];
    if (threadIdx.x != j % WARP) continue;
    a.ids[t * a.top_k + j] = static_cast<int32_t>(e);
    chosen[j] = score[e];
  }
  sum = fmaxf(sum, a.min_sum);
  for (uint32_t j = threadIdx.x; j < a.top_k; j += WARP)
    a.weights[t * a.top_k + j] = (a.norm_topk ? chosen[j] / sum : chosen[j]) * a.scaling;
}

extern "C" int td_cu_router(const td_router_args *a, td_cu_stream stream) {
  return TD_LAUNCH(router_kernel, a->n_tokens, WARP, 0, stream, *a);
}

// ---- sorting pairs by expert --------------------------------------------------------------------

enum { SORT_THREADS = 256 };

struct pair_slice {
  uint32_t begin, end;
};

// A block's share of the pairs.
__device__ static pair_slice slice_of(const td_cu_moe_sort_args &a) {
  uint32_t n_pairs = a.n_tokens * a.top_k, share = (n_pairs + gridDim.x - 1) / gridDim.x;
  uint32_t begin = at_most(blockIdx.x * share, n_pairs);
  return {begin, begin + at_most(share, n_pairs - begin)};
}

__device__ static bool is_taken(const td_cu_moe_sort_args &a, uint32_t expert) {
  return !a.slots || a.slots[expert] >= 0;
}

// n[e] (shared) = the slice's number of pairs of expert e.
__device__ static void count_pairs(const td_cu_moe_sort_args &a, const pair_slice &slice,
                                   uint32_t *n) {
  for (uint32_t e = threadIdx.x; e < a.n_experts; e += SORT_THREADS)
    n[e] = 0;
  __syncthreads();
  for (uint32_t p = slice.begin + threadIdx.x; p < slice.end; p += SORT_THREADS) {
    uint32_t e = static_cast<uint32_t>(a.ids[p]);
    if (e >= a.n_experts) {
      *a.fault = TD_CU_FAULT_EXPERT;
    } else if (is_taken(a, e)) {
      atomicAdd(&n[e], 1u);
    }
  }
  __syncthreads();
}

// Exclusive prefix sum over the block's threads.
__device__ static uint64_t sum_before(uint64_t mine, uint64_t (&sums)[SORT_THREADS]) {
  sums[threadIdx.x] = mine;
  for (uint32_t distance = 1; distance < SORT_THREADS; distance *= 2) {
    __syncthreads();
    uint64_t before = threadIdx.x >= distance ? sums[threadIdx.x - distance] : 0;
    __syncthreads();
    sums[threadIdx.x] += before;
  }
  return sums[threadIdx.x] - mine;
}

// Turns the counts into each expert's first index and makes tiles. Each thread handles a range of
// consecutive experts.
__device__ static void cut(const td_cu_moe_sort_args &a, uint32_t *next,
                           uint64_t (&sums)[SORT_THREADS]) {
  uint32_t share = (a.n_experts + SORT_THREADS - 1) / SORT_THREADS, first = threadIdx.x * share;
  uint32_t last = at_most(first + share, a.n_experts);
  uint64_t mine = 0; // upper half: pairs; lower half: tiles
  for (uint32_t e = first; e < last; e++) {
    uint32_t n = next[e];
    mine += static_cast<uint64_t>(n) << 32 | (n + a.tile_tokens - 1) / a.tile_tokens;
  }
  uint64_t before = sum_before(mine, sums);
  uint32_t begin = static_cast<uint32_t>(before >> 32), n_tiles = static_cast<uint32_t>(before);
  for (uint32_t e = first; e < last; e++) {
    uint32_t n = next[e];
    a.first_tile[e] = n_tiles;
    for (uint32_t at = 0; at < n; at += a.tile_tokens)
      a.tiles[n_tiles++] = {e, begin + at, at_most(n - at, a.tile_tokens)};
    next[e] = begin;
    begin += n;
  }
  if (threadIdx.x == SORT_THREADS - 1) a.first_tile[a.n_experts] = n_tiles;
}

// Writes the slice's pairs; next[e] (shared) is the next index for expert e. The order of an
// expert's pairs is not deterministic. No result depends on it, since linear kernels compute every
// row of a tile alike.
__device__ static void put_pairs(const td_cu_moe_sort_args &a, const pair_slice &slice,
                                 uint32_t *next) {
  for (uint32_t p = slice.begin + threadIdx.x; p < slice.end; p += SORT_THREADS) {
    uint32_t e = static_cast<uint32_t>(a.ids[p]), to = UINT32_MAX;
    if (e < a.n_experts && is_taken(a, e)) {
      to = atomicAdd(&next[e], 1u);
      a.token[to] = p / a.top_k;
    }
    a.place[p] = to;
  }
}

// Few pairs: a single block.
__global__ static void sort_few_kernel(td_cu_moe_sort_args a) {
  __shared__ uint32_t next[TD_CU_MAX_EXPERTS];
  __shared__ uint64_t sums[SORT_THREADS];
  pair_slice all = slice_of(a);
  count_pairs(a, all, next);
  cut(a, next, sums);
  __syncthreads();
  put_pairs(a, all, next);
}

// Many pairs: each block counts a slice; one block turns the counts into start indices per block
// and expert; each block writes its slice.
__global__ static void sort_count_kernel(td_cu_moe_sort_args a) {
  __shared__ uint32_t n[TD_CU_MAX_EXPERTS];
  count_pairs(a, slice_of(a), n);
  for (uint32_t e = threadIdx.x; e < a.n_experts; e += SORT_THREADS)
    a.counts[static_cast<size_t>(blockIdx.x) * a.n_experts + e] = n[e];
}

__global__ static void sort_cut_kernel(td_cu_moe_sort_args a) {
  __shared__ uint32_t next[TD_CU_MAX_EXPERTS];
  __shared__ uint64_t sums[SORT_THREADS];
  for (uint32_t e = threadIdx.x; e < a.n_experts; e += SORT_THREADS) {
    uint32_t n = 0;
#pragma unroll 8
    for (uint32_t b = 0; b < TD_CU_SORT_BLOCKS; b++) {
      uint32_t *count = &a.counts[static_cast<size_t>(b) * a.n_experts + e], before = n;
      n += *count;
      *count = before;
    }
    next[e] = n;
  }
  __syncthreads();
  cut(a, next, sums);
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < TD_CU_SORT_BLOCKS * a.n_experts; i += SORT_THREADS)
    a.counts[i] += next[i % a.n_experts];
}

__global__ static void sort_put_kernel(td_cu_moe_sort_args a) {
  __shared__ uint32_t next[TD_CU_MAX_EXPERTS];
  for (uint32_t e = threadIdx.x; e < a.n_experts; e += SORT_THREADS)
    next[e] = a.counts[static_cast<size_t>(blockIdx.x) * a.n_experts + e];
  __syncthreads();
  put_pairs(a, slice_of(a), next);
}

extern "C" int td_cu_moe_sort(const td_cu_moe_sort_args *a, td_cu_stream stream) {
  if (a->n_tokens * a->top_k <= TD_CU_SORT_PAIRS)
    return TD_LAUNCH(sort_few_kernel, 1, SORT_THREADS, 0, stream, *a);
  if (int failed = TD_LAUNCH(sort_count_kernel, TD_CU_SORT_BLOCKS, SORT_THREADS, 0, stream, *a))
    return failed;
  if (int failed = TD_LAUNCH(sort_cut_kernel, 1, SORT_THREADS, 0, stream, *a)) return failed;
  return TD_LAUNCH(sort_put_kernel, TD_CU_SORT_BLOCKS, SORT_THREADS, 0, stream, *a);
}
