// tests/cuda_emu/cublas.cpp - what kernels/cuda/cublas.cu uses of cuBLAS, on the host, in FP32. The
// program looks for it in the library with the kernels first. It picks kernels by the shape, and
// waits inside the driver at the first product of each.
#include "cuda_runtime.h"

#include <array>
#include <cstdlib>
#include <mutex>
#include <set>

struct cublasContext {
  cudaStream_t stream;
  void *workspace;
};

enum {
  OP_N = 0,
  OP_T = 1,
  TYPE_F32 = 0,
  TYPE_BF16 = 14,
  NOT_INITIALIZED = 1,
  INVALID_VALUE = 7,
  EXECUTION_FAILED = 13,
  NOT_SUPPORTED = 15,
};

#define EXPORTED extern "C" __attribute__((visibility("default")))

// TANDEM_EMU_BLAS=0: a machine where cuBLAS cannot be used.
EXPORTED int cublasCreate_v2(cublasContext **out) {
  const char *text = std::getenv("TANDEM_EMU_BLAS");
  if (text && std::atoi(text) == 0) return NOT_INITIALIZED;
  *out = new cublasContext{nullptr, nullptr};
  return 0;
}

EXPORTED int cublasDestroy_v2(cublasContext *handle) {
  delete handle;
  return 0;
}

EXPORTED int cublasSetStream_v2(cublasContext *handle, cudaStream_t stream) {
  handle->stream = stream;
  handle->workspace = nullptr;
  return 0;
}

EXPORTED int cublasSetWorkspace_v2(cublasContext *handle, void *workspace, size_t n_bytes) {
  handle->workspace = workspace;
  return workspace && n_bytes && reinterpret_cast<uintptr_t>(workspace) % 256 == 0 ? 0
                                                                                   : INVALID_VALUE;
}

EXPORTED int cublasSetMathMode(cublasContext *, int) {
  return 0;
}

static float at(const void *matrix, int stride, int row, int column) {
  return __uint_as_float(static_cast<uint32_t>(static_cast<const uint16_t *>(
                             matrix)[static_cast<size_t>(column) * stride + row])
                         << 16);
}

static void put(void *matrix, int type, size_t i, float v) {
  if (type == TYPE_F32) {
    static_cast<float *>(matrix)[i] = v;
    return;
  }
  uint32_t bits = __float_as_uint(v); // to nearest even; no NaN comes here
  static_cast<uint16_t *>(matrix)[i] = static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >>
                                                             16);
}

static bool is_first(const std::array<int, 8> &shape) {
  static std::mutex lock;
  static std::set<std::array<int, 8>> seen;
  std::lock_guard<std::mutex> hold(lock);
  return seen.insert(shape).second;
}

// Op T and N with alpha 1 and beta 0, which is all that is asked for.
EXPORTED int cublasGemmEx(cublasContext *handle, int op_a, int op_b, int m, int n, int k,
                          const void *alpha, const void *a, int a_type, int a_stride, const void *b,
                          int b_type, int b_stride, const void *beta, void *c, int c_type,
                          int c_stride, int, int) {
  if (!handle->workspace) return NOT_INITIALIZED; // it would take some of its own
  if (op_a != OP_T || op_b != OP_N || a_type != TYPE_BF16 || b_type != TYPE_BF16 ||
      *static_cast<const float *>(alpha) != 1 || *static_cast<const float *>(beta) != 0)
    return NOT_SUPPORTED;
  if (m <= 0 || n <= 0 || k <= 0 || a_stride < k || b_stride < k || c_stride < m)
    return INVALID_VALUE;
  const void *pointers[] = {a, b, c, handle->workspace};
  if (!emu_check_pointers(handle->stream, pointers, sizeof pointers)) return EXECUTION_FAILED;
  int device;
  cudaGetDevice(&device);
  if (is_first({device, m, n, k, c_type, a_stride, b_stride, c_stride})) emu_await_idle_inside();
  emu_enqueue(handle->stream, [=] {
    for (int j = 0; j < n; j++) {
      for (int i = 0; i < m; i++) {
        float sum = 0;
        for (int l = 0; l < k; l++)
          sum += at(a, a_stride, l, i) * at(b, b_stride, l, j);
        put(c, c_type, static_cast<size_t>(j) * c_stride + i, sum);
      }
    }
  });
  return 0;
}
