// kernels/cuda/swizzle.cuh - matrices of 16-bit elements in shared memory, in panels of 64 columns:
// [panel][row][64]. Of the eight 16-byte chunks of a panel's row, chunk c lies where c ^ row % 8
// would, so that the same chunk of eight rows, which is what tensor cores are given, lies in all
// banks. wgmma knows that as a swizzle of 128 bytes.
#ifndef KERNELS_CUDA_PANELS_CUH
#define KERNELS_CUDA_PANELS_CUH

#include "kernels/cuda/common.cuh"

enum { PANEL = 64, CHUNK = 8, PANEL_CHUNKS = PANEL / CHUNK };

template <int ROWS>
__device__ inline uint16_t *chunk_of(uint16_t (*panels)[ROWS][PANEL], uint32_t row,
                                     uint32_t chunk) {
  return panels[chunk / PANEL_CHUNKS][row] + (chunk % PANEL_CHUNKS ^ row % 8) * CHUNK;
}

#endif
