// kernels/cuda/attn_tile.cuh - a tile of queries against a tile of keys: the online softmax, and
// the products on wgmma. Matrices are in shared memory in panels (swizzle.cuh); registers of scores
// and sums are laid out as in mma.cuh.
#pragma once

#include "kernels/cuda/attn.cuh"
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/wgmma.cuh"

// Turns scores of a thread's two rows into weights 2^(scale (score - m) + lift). m: running maxima
// of scores; l: this lane's share of the sums of weights, each times the factor of its element.
// Sums made with the old m must be multiplied by rescale.
template <int BLOCKS, class Factor>
__device__ static void weigh(float (&score)[BLOCKS][4], float scale, float lift, float (&m)[2],
                             float (&l)[2], float (&rescale)[2], Factor factor) {
  float top[2] = {m[0], m[1]}, base[2];
#pragma unroll
  for (int e = 0; e < 4 * BLOCKS; e++)
    top[e % 4 / 2] = fmaxf(top[e % 4 / 2], score[e / 4][e % 4]);
#pragma unroll
  for (int r = 0; r < 2; r++) {
    top[r] = quad_max(top[r]);
    float seen = top[r] == -INFINITY ? 0 : top[r]; // nothing seen yet: all weights are 0
    base[r] = seen * scale - lift;
    rescale[r] = exp2_approx((m[r] - seen) * scale); // exactly 1 where m is unchanged
    m[r] = top[r];
    l[r] *= rescale[r];
  }
#pragma unroll
  for (int e = 0; e < 4 * BLOCKS; e++) {
    float &s = score[e / 4][e % 4];
    s = exp2_approx(s * scale - base[e % 4 / 2]);
    l[e % 4 / 2] += s * factor(e);
  }
}

template <int BLOCKS>
__device__ static void weigh(float (&score)[BLOCKS][4], float scale, float (&m)[2], float (&l)[2],
                             float (&rescale)[2]) {
  weigh(score, scale, 0.0f, m, l, rescale, [](int) { return 1.0f; });
}

// Weights as BF16 or F16 fragments in the order of mma.cuh.
template <bool F16 = false, int BLOCKS>
__device__ static void pack(const float (&weight)[BLOCKS][4], uint32_t (&p)[BLOCKS / 2][4]) {
#pragma unroll
  for (int i = 0; i < 2 * BLOCKS; i++) { // registers 0 and 1, then 2 and 3 of every second block
    const float low = weight[i / 2][i % 2 * 2], high = weight[i / 2][i % 2 * 2 + 1];
    p[i / 4][i % 4] = F16 ? f16x2_from_f32(low, high) : bf16x2_from_f32(low, high);
  }
}

template <int BLOCKS>
__device__ static void multiply(float (&acc)[BLOCKS][4], const float (&rescale)[2]) {
#pragma unroll
  for (int e = 0; e < 4 * BLOCKS; e++)
    acc[e / 4][e % 4] *= rescale[e % 4 / 2];
}

// score = q k^T for 64 of the queries, beginning with `row`. Asynchronous, on a warpgroup.
template <int KD, int QUERIES, int KEYS>
__device__ static void begin_scores(uint16_t (*q)[QUERIES][PANEL], uint32_t row,
                                    uint16_t (*keys)[KEYS][PANEL], float (&score)[KEYS / 8][4]) {
  wgmma_begin();
#pragma unroll
  for (uint32_t k = 0; k < KD / 16; k++) {
    uint32_t panel = k / 4, column = k % 4 * 16;
    wgmma_rows<KEYS, 0>(score, wgmma_matrix(q[panel][row] + column, QUERIES),
                        wgmma_matrix(keys[panel][0] + column, KEYS), k > 0);
  }
  wgmma_commit();
}

// acc += p v. Asynchronous, on a warpgroup.
template <int VD, int KEYS>
__device__ static void begin_values(uint16_t (*values)[KEYS][PANEL],
                                    const uint32_t (&p)[KEYS / 16][4], float (&acc)[VD / 8][4]) {
  enum { COLUMNS = VD < 128 ? VD : 128 };
  wgmma_begin();
#pragma unroll
  for (uint32_t k = 0; k < KEYS / 16; k++) {
    wgmma_columns<COLUMNS, 0>(acc, p[k], wgmma_matrix(values[0][16 * k], KEYS));
    if constexpr (VD > COLUMNS)
      wgmma_columns<COLUMNS, COLUMNS / 8>(acc, p[k],
                                          wgmma_matrix(values[COLUMNS / PANEL][16 * k], KEYS));
  }
  wgmma_commit();
}
