// kernels/cuda/peak.cu - what tensor cores reach with nothing else to do: mma.sync with its
// operands in registers, the yardstick of GPUs without wgmma, whose peak cuBLAS does not show on
// one that has it; and wgmma with its operands in shared memory.
#include "kernels/cuda/common.cuh"
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/wgmma.cuh"

enum { MMAS = TD_CU_PEAK_MMAS, PEAK_THREADS = TD_CU_PEAK_WARPS * WARP };

// The products of a round do not depend on one another. In 8 bits and F16 the operands are small
// numbers, too. Sums of F16 are F16, two in a word.
template <int DTYPE, class Sum>
__global__ static void __launch_bounds__(PEAK_THREADS, 2)
    mma_peak_kernel(td_cu_mma_peak_args args) {
  const uint32_t low = 0x3c003d00u ^ (threadIdx.x & 0x7f); // two small numbers
  const uint32_t a[4] = {low, low ^ 0x80000011u, low ^ 0x00228000u, low ^ 0x44u};
  const uint32_t b[2] = {low ^ 0x80000055u, low ^ 0x00668000u};
  enum { WORDS = DTYPE == TD_F16 ? 2 : 4 };
  Sum c[MMAS][WORDS] = {};
  for (uint32_t i = 0; i < args.n_rounds; i++) {
#pragma unroll
    for (int k = 0; k < MMAS; k++) {
      if constexpr (DTYPE == TD_BF16) {
        mma_bf16(c[k], a, b);
      } else if constexpr (DTYPE == TD_F16) {
        mma_f16(c[k], a, b);
      } else {
        mma_8bit(c[k], a, b);
      }
    }
  }
  float sum = 0;
#pragma unroll
  for (int k = 0; k < MMAS; k++)
    sum += static_cast<float>(c[k][0] + c[k][1] + c[k][WORDS - 2] + c[k][WORDS - 1]);
  args.out[blockIdx.x * PEAK_THREADS + threadIdx.x] = sum;
}

enum { PEAK_ROWS = 64, PEAK_COLUMNS = 128 };
struct peak_matrices {
  uint16_t a[PEAK_ROWS][PANEL], b[PEAK_COLUMNS][PANEL];
};
static_assert(TD_CU_PEAK_WGMMA == PEAK_COLUMNS / 8, "in units of mma.sync's columns");

template <int DTYPE, class Sum>
__global__ static void __launch_bounds__(PEAK_THREADS, 2)
    wgmma_peak_kernel(td_cu_mma_peak_args args) {
#if TD_HAS_WGMMA
  TD_DYNAMIC_SHARED(memory);
  auto &s = *reinterpret_cast<peak_matrices *>(memory);
  for (uint32_t i = threadIdx.x; i < sizeof s / sizeof(uint16_t); i += PEAK_THREADS)
    s.a[0][i] = static_cast<uint16_t>(0x3c3du ^ (i * 0x2b41u & 0x8383u)); // small numbers
  wgmma_publish();
  __syncthreads();
  Sum c[PEAK_COLUMNS / 8][4] = {};
  for (uint32_t i = 0; i < args.n_rounds; i++) {
    wgmma_begin();
#pragma unroll
    for (int k = 0; k < MMAS; k++) {
      const uint64_t a = wgmma_matrix(s.a[0] + k % 4 * 16, PEAK_ROWS);
      const uint64_t b = wgmma_matrix(s.b[0] + k % 4 * 16, PEAK_COLUMNS);
      if constexpr (DTYPE == TD_BF16) {
        wgmma_rows<PEAK_COLUMNS, 0>(c, a, b, true);
      } else {
        wgmma_rows_8bit<PEAK_COLUMNS>(c, a, b, true);
      }
    }
    wgmma_commit();
    wgmma_wait<0>(c);
  }
  float sum = 0;
#pragma unroll
  for (int e = 0; e < PEAK_COLUMNS / 2; e++)
    sum += static_cast<float>(c[e / 4][e % 4]);
  args.out[blockIdx.x * PEAK_THREADS + threadIdx.x] = sum;
#elif defined(__CUDA_ARCH__)
  __trap(); // unreachable: td_cu_props.has_wgmma is false
#endif
}

template <int DTYPE, class Sum>
static int launch(const td_cu_mma_peak_args *a, td_cu_stream stream) {
  auto kernel = a->is_wgmma ? wgmma_peak_kernel<DTYPE, Sum> : mma_peak_kernel<DTYPE, Sum>;
  return TD_LAUNCH(kernel, a->n_blocks, PEAK_THREADS, a->is_wgmma ? sizeof(peak_matrices) : 0,
                   stream, *a);
}

extern "C" int td_cu_mma_peak(const td_cu_mma_peak_args *a, td_cu_stream stream) {
  switch (a->dtype) {
  case TD_F8E4M3: return launch<TD_F8E4M3, float>(a, stream);
  case TD_I8: return launch<TD_I8, int32_t>(a, stream);
  case TD_F16: {
    auto kernel = mma_peak_kernel<TD_F16, uint32_t>;
    return TD_LAUNCH(kernel, a->n_blocks, PEAK_THREADS, 0, stream, *a);
  }
  default: return launch<TD_BF16, float>(a, stream);
  }
}
