// kernels/cuda/peak.cu - what mma.sync reaches with its operands in registers and nothing else to
// do: the yardstick of kernels for GPUs without wgmma, whose peak cuBLAS does not show on one that
// has it.
#include "kernels/cuda/common.cuh"
#include "kernels/cuda/mma.cuh"

enum { MMAS = TD_CU_PEAK_MMAS, PEAK_THREADS = TD_CU_PEAK_WARPS * WARP };

// The products of a round do not depend on one another. As E4M3 the operands are small numbers,
// too.
template <bool IS_F8>
__global__ static void __launch_bounds__(PEAK_THREADS, 2)
    mma_peak_kernel(td_cu_mma_peak_args args) {
  const uint32_t low = 0x3c003d00u ^ (threadIdx.x & 0x7f); // two small numbers
  const uint32_t a[4] = {low, low ^ 0x80000011u, low ^ 0x00228000u, low ^ 0x44u};
  const uint32_t b[2] = {low ^ 0x80000055u, low ^ 0x00668000u};
  float c[MMAS][4] = {};
  for (uint32_t i = 0; i < args.n_rounds; i++) {
#pragma unroll
    for (int k = 0; k < MMAS; k++) {
      if (IS_F8) mma_e4m3(c[k], a, b);
      if (!IS_F8) mma_bf16(c[k], a, b);
    }
  }
  float sum = 0;
#pragma unroll
  for (int k = 0; k < MMAS; k++)
    sum += c[k][0] + c[k][1] + c[k][2] + c[k][3];
  args.out[blockIdx.x * PEAK_THREADS + threadIdx.x] = sum;
}

extern "C" int td_cu_mma_peak(const td_cu_mma_peak_args *a, td_cu_stream stream) {
  auto kernel = a->is_f8 ? mma_peak_kernel<true> : mma_peak_kernel<false>;
  TD_LAUNCH(kernel, a->n_blocks, PEAK_THREADS, 0, stream, *a);
  return launched();
}
