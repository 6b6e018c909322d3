// tests/cuda_emu/mistakes.cpp - kernels with the mistakes that the emulator is to find, for its
// test.
#include "mistakes.h"

#include "kernels/cuda/mbarrier.cuh"
#include "kernels/cuda/wgmma.cuh"

struct mistake {
  int which;
};

static void kernel(mistake m) {
  __shared__ float values[64];
  float *dynamic = reinterpret_cast<float *>(emu_dynamic_shared());
  unsigned i = threadIdx.x, other_warp = (i + 32) % 64, other_lane = i ^ 1;
  values[i] = static_cast<float>(i);
  if (m.which != EMU_NO_BARRIER) __syncthreads();
  float v = m.which == EMU_NO_BARRIER || m.which == EMU_FINE ? values[other_warp] : 0;
  if (m.which == EMU_FINE) __syncthreads();
  if (m.which == EMU_OVERWRITTEN) v += values[other_lane]; // read, then written by its owner
  values[i] = v;
  __shared__ uint16_t pairs[32];
  uint8_t *bytes = reinterpret_cast<uint8_t *>(pairs);
  bytes[i] = static_cast<uint8_t>(i);
  if (m.which == EMU_BYTE) v += bytes[other_lane];
  if (m.which != EMU_NO_WARP_BARRIER) __syncwarp();
  v += values[other_lane];
  v += pairs[i / 2];
  if (m.which == EMU_BYTE_OF_PAIR) bytes[i] = 0;
  if (m.which == EMU_LEFT_LANE && i % 32 == 31) return;
  v = __shfl_xor_sync(0xffffffffu, v, 1);
  alignas(8) static const float numbers[4] = {1, 2, 3, 4};
  const float *pair = numbers + (m.which == EMU_MISALIGNED ? 1 : 2);
  v += __uint_as_float(__ldg(reinterpret_cast<const uint2 *>(pair)).x);
  dynamic[m.which == EMU_DYNAMIC ? i / 2 : i] = v;
  __syncthreads();
  const uint4 *copied = reinterpret_cast<const uint4 *>(dynamic);
  emu_copy_async(reinterpret_cast<uint4 *>(dynamic) + i, nullptr, sizeof(uint4), false);
  if (m.which != EMU_NO_WAIT) emu_copy_async_wait();
  if (m.which != EMU_COPIED) __syncthreads();
  values[i] = static_cast<float>(copied[other_warp].x);
}

struct matrices {
  uint16_t a[1][64][PANEL], b[1][64][PANEL];
};

// Products of a warpgroup, of rows in shared memory and of rows in registers.
static void multiply(mistake m) {
  auto &s = *reinterpret_cast<matrices *>(emu_dynamic_shared());
  float c[8][4] = {};
  uint32_t rows[4] = {};
  for (unsigned i = threadIdx.x; i < 64 * PANEL / CHUNK; i += 128) {
    emu_copy_async(chunk_of(s.a, i / PANEL_CHUNKS, i % PANEL_CHUNKS), nullptr, sizeof(uint4),
                   false);
    for (unsigned e = 0; e < CHUNK; e++)
      chunk_of(s.b, i / PANEL_CHUNKS, i % PANEL_CHUNKS)[e] = bf16_from_f32(1);
  }
  emu_copy_async_wait();
  if (m.which != EMU_NO_PUBLISH && m.which != EMU_LATE_PUBLISH) wgmma_publish();
  __syncthreads();
  if (m.which == EMU_LATE_PUBLISH) wgmma_publish();
  if (m.which != EMU_NO_BEGIN) wgmma_begin();
  wgmma_rows<64, 0>(c, wgmma_matrix(s.a[0][0], 64), wgmma_matrix(s.b[0][0], 64), false);
  wgmma_columns<64, 0>(c, rows, wgmma_matrix(s.b[0][0], 64));
  wgmma_commit();
  wgmma_wait<0>(c);
  if (m.which != EMU_NO_BEGIN_ROWS) c[0][0] += 1;
  if (m.which != EMU_NO_BEGIN_SUMS) rows[1] = bf16x2_from_f32(1, 2);
  if (m.which != EMU_NO_BEGIN_ROWS && m.which != EMU_NO_BEGIN_SUMS) wgmma_begin();
  wgmma_columns<64, 0>(c, rows, wgmma_matrix(s.b[0][0], 64));
  wgmma_commit();
  wgmma_wait<0>(c);
}

struct handed_over {
  matrices of[1];
  uint64_t full, free;
};

// A fifth warp fills matrices twice, and a warpgroup multiplies them.
static void hand_over(mistake m) {
  auto &s = *reinterpret_cast<handed_over *>(emu_dynamic_shared());
  const unsigned warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  if (threadIdx.x == 0) {
    mbarrier_open(&s.full, 1);
    mbarrier_open(&s.free, m.which == EMU_NOT_FREE_OF_ONE ? 1 : 4);
  }
  __syncthreads();
  float c[8][4] = {};
  for (uint32_t n = 0; n < 2; n++) {
    if (warp < 4) {
      if (m.which != EMU_NOT_FILLED) mbarrier_wait(&s.full, n);
      wgmma_begin();
      wgmma_rows<64, 0>(c, wgmma_matrix(s.of[0].a[0][0], 64), wgmma_matrix(s.of[0].b[0][0], 64), n);
      wgmma_commit();
      wgmma_wait<0>(c);
      __syncwarp();
      if (lane == 0 && (warp == 0 || m.which != EMU_NOT_FREE_OF_ONE)) mbarrier_arrive(&s.free);
      continue;
    }
    if (m.which != EMU_NOT_FREE) mbarrier_wait(&s.free, n + 1);
    uint16_t *all = s.of[0].a[0][0];
    for (unsigned i = lane; i < sizeof s.of / 2; i += WARP)
      all[i] = bf16_from_f32(1);
    if (m.which != EMU_FILLED_UNPUBLISHED) wgmma_publish();
    __syncwarp();
    if (lane == 0) mbarrier_arrive(&s.full);
    if (m.which == EMU_LATE_ARRIVAL) all[lane] = 0;
  }
}

extern "C" bool emu_make_mistake(int which) {
  mistake m = {which};
  emu_run(dim3(2), dim3(160), sizeof(handed_over), [=] { hand_over(m); });
  emu_run(dim3(3), dim3(64), 64 * sizeof(uint4), [=] { kernel(m); });
  emu_run(dim3(2), dim3(128), sizeof(matrices), [=] { multiply(m); });
#if defined(__SANITIZE_THREAD__)
  return true;
#else
  return false;
#endif
}
