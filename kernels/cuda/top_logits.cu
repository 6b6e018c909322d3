// kernels/cuda/top_logits.cu - the top logits of each row and the row's sums, so that a row need
// not cross the bus.
// First, blocks sort slices of a row and store each slice's top keys. Then one block per row finds
// a threshold that enough keys reach, sorts all keys that reach it and takes the top. If those are
// too many, it merges the slices' sorted lists instead, one key at a time.
#include "kernels/cuda/common.cuh"

enum { THREADS = 256, SLICE = TD_CU_TOP_SLICE, LISTS = TD_CU_TOP_MAX_SLICES / THREADS };

// A sort key, larger is better: the value as an ordered integer, NaN lowest, then the lower id. 0
// is no token.
__device__ static uint64_t key_of(float v, uint32_t id) {
  uint32_t bits = __float_as_uint(v == 0 ? 0.0f : v); // -0 becomes +0
  uint32_t order = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  if (isnan(v)) order = 0;
  return static_cast<uint64_t>(order) << 32 | (0xffffffffu - id);
}

__device__ static float value_of(uint64_t key) {
  uint32_t order = static_cast<uint32_t>(key >> 32);
  if (order == 0) return __uint_as_float(0x7fc00000u);
  return __uint_as_float(order & 0x80000000u ? order & 0x7fffffffu : ~order);
}

__device__ static uint32_t id_of(uint64_t key) {
  return 0xffffffffu - static_cast<uint32_t>(key);
}

// exp((v - largest) * inverse), and 1 if both are the same infinity.
__device__ static float weight_of(float v, float largest, float inverse) {
  return v == largest ? 1 : expf((v - largest) * inverse);
}

// Bitonic sort, descending.
__device__ static void sort(uint64_t *keys) {
  for (uint32_t size = 2; size <= SLICE; size *= 2) {
    for (uint32_t stride = size / 2; stride > 0; stride /= 2) {
      __syncthreads();
      for (uint32_t i = threadIdx.x; i < SLICE / 2; i += THREADS) {
        uint32_t low = 2 * i - (i & (stride - 1)), high = low + stride;
        uint64_t a = keys[low], b = keys[high];
        if ((a < b) != ((low & size) == 0)) continue;
        keys[low] = b;
        keys[high] = a;
      }
    }
  }
  __syncthreads();
}

__device__ static float inverse_temperature(const td_top_logits_args &a, uint32_t row) {
  return a.temperature[row] > 0 ? 1 / a.temperature[row] : 1;
}

__global__ static void top_slice_kernel(td_top_logits_args a) {
  __shared__ uint64_t keys[SLICE];
  __shared__ float scratch[2][WARP];
  uint32_t row = blockIdx.y, first = blockIdx.x * SLICE;
  const float *logits = a.logits + static_cast<size_t>(row) * a.n_vocab;
  for (uint32_t i = threadIdx.x; i < SLICE; i += THREADS)
    keys[i] = first + i < a.n_vocab ? key_of(logits[first + i], first + i) : 0;
  sort(keys);
  float largest = value_of(keys[0]), inverse = inverse_temperature(a, row);
  float sum = 0, warm = 0;
  for (uint32_t i = threadIdx.x; i < SLICE && first + i < a.n_vocab; i += THREADS) {
    float v = value_of(keys[i]); // the first entries are the slice's tokens
    sum += weight_of(v, largest, 1);
    warm += weight_of(v, largest, inverse);
  }
  sum = block_sum(sum, scratch[0]);
  warm = block_sum(warm, scratch[1]);
  size_t at = static_cast<size_t>(row) * a.n_slices + blockIdx.x;
  for (uint32_t i = threadIdx.x; i < TD_TOP_LOGITS; i += THREADS)
    a.part[at * TD_TOP_LOGITS + i] = keys[i];
  if (threadIdx.x == 0) {
    a.part_sums[2 * at] = sum;
    a.part_sums[2 * at + 1] = warm;
  }
}

// The block's largest key, returned to all threads. best: shared, one entry per warp; consecutive
// calls need different arrays.
__device__ static uint64_t block_best(uint64_t key, uint64_t *best) {
  for (int offset = WARP / 2; offset > 0; offset /= 2) {
    uint64_t other = __shfl_xor_sync(TD_FULL_WARP, key, offset);
    if (other > key) key = other;
  }
  if (threadIdx.x % WARP == 0) best[threadIdx.x / WARP] = key;
  __syncthreads();
  for (uint32_t w = 0; w < THREADS / WARP; w++) {
    if (best[w] > key) key = best[w];
  }
  return key;
}

// The largest head of this thread's lists, which are every THREADS-th slice of the row; taken[i]
// entries of list i are used up.
__device__ static uint64_t head_of(const td_top_logits_args &a, const uint64_t *part,
                                   const uint32_t (&taken)[LISTS], uint32_t *list) {
  uint64_t best = 0;
#pragma unroll
  for (uint32_t i = 0; i < LISTS; i++) {
    uint32_t slice = threadIdx.x + i * THREADS;
    if (slice >= a.n_slices || taken[i] == TD_TOP_LOGITS) continue;
    uint64_t key = part[static_cast<size_t>(slice) * TD_TOP_LOGITS + taken[i]];
    if (key <= best) continue;
    best = key;
    *list = i;
  }
  return best;
}

// A key that at least n keys reach (or all, if fewer exist), found among the first few keys of each
// list.
__device__ static uint64_t find_threshold(const td_top_logits_args &a, const uint64_t *part,
                                          uint32_t n, uint64_t *keys) {
  uint32_t depth = (TD_TOP_LOGITS + a.n_slices - 1) / a.n_slices;
  for (uint32_t i = threadIdx.x; i < SLICE; i += THREADS)
    keys[i] = i < a.n_slices * depth ? part[i / depth * TD_TOP_LOGITS + i % depth] : 0;
  sort(keys);
  uint64_t threshold = keys[n - 1];
  __syncthreads();
  return threshold;
}

// Collects all keys >= threshold and sorts them. Returns their number; keys holds at most SLICE.
__device__ static uint32_t sort_candidates(const td_top_logits_args &a, const uint64_t *part,
                                           uint64_t threshold, uint64_t *keys,
                                           uint32_t *n_candidates) {
  if (threadIdx.x == 0) *n_candidates = 0;
  for (uint32_t i = threadIdx.x; i < SLICE; i += THREADS)
    keys[i] = 0;
  __syncthreads();
#pragma unroll 8
  for (uint32_t i = threadIdx.x; i < a.n_slices * TD_TOP_LOGITS; i += THREADS) {
    uint64_t key = part[i];
    if (key == 0 || key < threshold) continue;
    uint32_t at = atomicAdd(n_candidates, 1u);
    if (at < SLICE) keys[at] = key;
  }
  __syncthreads();
  uint32_t n = *n_candidates;
  if (n <= SLICE) sort(keys);
  return n;
}

__device__ static void put_place(td_top_logits *out, uint32_t i, uint64_t key) {
  out->value[i] = value_of(key);
  out->id[i] = static_cast<int32_t>(id_of(key));
}

// Takes the n best by merging the lists. Returns the largest.
__device__ static uint64_t take_heads(const td_top_logits_args &a, const uint64_t *part, uint32_t n,
                                      td_top_logits *out) {
  __shared__ uint64_t best[2][THREADS / WARP];
  uint32_t taken[LISTS] = {}, list = 0;
  uint64_t head = head_of(a, part, taken, &list), largest = 0;
  for (uint32_t i = 0; i < n; i++) {
    uint64_t key = block_best(head, best[i % 2]);
    if (i == 0) largest = key;
    if (threadIdx.x == 0) put_place(out, i, key);
    if (key != head) continue; // keys are unique
#pragma unroll
    for (uint32_t j = 0; j < LISTS; j++)
      taken[j] += j == list;
    head = head_of(a, part, taken, &list);
  }
  return largest;
}

__global__ static void top_row_kernel(td_top_logits_args a) {
  __shared__ uint64_t keys[SLICE];
  __shared__ uint32_t n_candidates;
  __shared__ float scratch[2][WARP];
  size_t row = blockIdx.x, first = row * a.n_slices;
  const uint64_t *part = a.part + first * TD_TOP_LOGITS;
  td_top_logits *out = a.out + row;
  uint32_t n = at_most(a.n_vocab, TD_TOP_LOGITS);
  uint64_t threshold = find_threshold(a, part, n, keys), best;
  if (sort_candidates(a, part, threshold, keys, &n_candidates) <= SLICE) {
    best = keys[0];
    if (threadIdx.x < n) put_place(out, threadIdx.x, keys[threadIdx.x]);
  } else {
    best = take_heads(a, part, n, out);
  }
  float largest = value_of(best);
  float sum = 0, warm = 0, inverse = inverse_temperature(a, static_cast<uint32_t>(row));
  for (uint32_t s = threadIdx.x; s < a.n_slices; s += THREADS) {
    float v = value_of(part[static_cast<size_t>(s) * TD_TOP_LOGITS]);
    sum += a.part_sums[2 * (first + s)] * weight_of(v, largest, 1);
    warm += a.part_sums[2 * (first + s) + 1] * weight_of(v, largest, inverse);
  }
  sum = block_sum(sum, scratch[0]);
  warm = block_sum(warm, scratch[1]);
  if (threadIdx.x != 0) return;
  out->n = n;
  out->sum = sum;
  out->sum_warm = warm;
}

extern "C" int td_cu_top_logits(const td_top_logits_args *a, td_cu_stream stream) {
  const dim3 slices(a->n_slices, a->n_rows);
  if (int failed = TD_LAUNCH(top_slice_kernel, slices, THREADS, 0, stream, *a)) return failed;
  return TD_LAUNCH(top_row_kernel, dim3(a->n_rows), THREADS, 0, stream, *a);
}
