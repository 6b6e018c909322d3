// kernels/cuda/swizzle.cuh - matrices of 16-bit elements in shared memory in panels of 64 columns:
// [panel][row][64].
// A panel's row has eight 16-byte chunks; chunk c is stored at position c ^ row % 8. So the same
// chunk of eight rows, which tensor cores load together, covers all banks. This is wgmma's 128-byte
// swizzle.
#pragma once

#include "kernels/cuda/common.cuh"

enum { PANEL = 64, CHUNK = 8, PANEL_CHUNKS = PANEL / CHUNK };

template <int ROWS>
__device__ inline uint16_t *chunk_of(uint16_t (*panels)[ROWS][PANEL], uint32_t row,
                                     uint32_t chunk) {
  return panels[chunk / PANEL_CHUNKS][row] + (chunk % PANEL_CHUNKS ^ row % 8) * CHUNK;
}
