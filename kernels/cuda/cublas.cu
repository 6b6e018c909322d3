// kernels/cuda/cublas.cu - y = W x for very many tokens: W converted to BF16, then cuBLAS.
// cuBLAS is loaded when a stream first needs it, and the required API is declared here, so neither
// the build nor the library depends on it. The workspace is allocated here, because an allocation
// by cuBLAS would become part of a captured graph. SetStream resets the workspace, so it is called
// first.
#include "kernels/cuda/dequant8.cuh"

typedef struct cublasContext *blas_handle;
typedef int (*create_fn)(blas_handle *handle);
typedef int (*destroy_fn)(blas_handle handle);
typedef int (*set_stream_fn)(blas_handle handle, cudaStream_t stream);
typedef int (*set_math_mode_fn)(blas_handle handle, int mode);
typedef int (*set_workspace_fn)(blas_handle handle, void *workspace, size_t n_bytes);
// C = alpha op(A) op(B) + beta C, op(A) [m][k], op(B) [k][n], all column-major.
typedef int (*gemm_fn)(blas_handle handle, int op_a, int op_b, int m, int n, int k,
                       const void *alpha, const void *a, int a_type, int a_stride, const void *b,
                       int b_type, int b_stride, const void *beta, void *c, int c_type,
                       int c_stride, int compute_type, int algorithm);

enum {
  STATUS_ALLOC_FAILED = 3,    // CUBLAS_STATUS_ALLOC_FAILED
  OP_N = 0,                   // CUBLAS_OP_N
  OP_T = 1,                   // CUBLAS_OP_T
  TYPE_F32 = 0,               // CUDA_R_32F
  TYPE_BF16 = 14,             // CUDA_R_16BF
  COMPUTE_F32 = 68,           // CUBLAS_COMPUTE_32F
  ALGORITHM_DEFAULT = -1,     // CUBLAS_GEMM_DEFAULT
  MATH_SUMS_IN_F32 = 16,      // CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION
  CODE_OUT_OF_MEMORY = 2,     // cudaErrorMemoryAllocation
  CODE_UNKNOWN = 999,         // cudaErrorUnknown
  WORKSPACE_BYTES = 32 << 20, // cuBLAS's own default on the GPUs where it is largest
};

struct blas {
  blas_handle handle;
  destroy_fn destroy;
  gemm_fn gemm;
  set_stream_fn set_stream;
  set_workspace_fn set_workspace;
  void *workspace;
};

// The runtime's error code is more specific than cuBLAS's status.
static int code_of(int status) {
  if (status == 0) return 0;
  cudaError_t code = cudaGetLastError();
  if (code != cudaSuccess) return code;
  return status == STATUS_ALLOC_FAILED ? CODE_OUT_OF_MEMORY : CODE_UNKNOWN;
}

extern "C" int td_cu_blas_open(td_cu_blas *out, td_cu_stream stream, td_cu_symbol_fn symbol,
                               void *ctx) {
  *out = nullptr;
  auto create = reinterpret_cast<create_fn>(symbol(ctx, "cublasCreate_v2"));
  auto destroy = reinterpret_cast<destroy_fn>(symbol(ctx, "cublasDestroy_v2"));
  auto set_stream = reinterpret_cast<set_stream_fn>(symbol(ctx, "cublasSetStream_v2"));
  auto set_mode = reinterpret_cast<set_math_mode_fn>(symbol(ctx, "cublasSetMathMode"));
  auto set_workspace = reinterpret_cast<set_workspace_fn>(symbol(ctx, "cublasSetWorkspace_v2"));
  auto gemm = reinterpret_cast<gemm_fn>(symbol(ctx, "cublasGemmEx"));
  if (!create || !destroy || !set_stream || !set_mode || !set_workspace || !gemm)
    return CODE_UNKNOWN;
  blas opened = {nullptr, destroy, gemm, set_stream, set_workspace, nullptr};
  int status = create(&opened.handle);
  if (status != 0) return code_of(status);
  status = set_mode(opened.handle, MATH_SUMS_IN_F32);
  if (status == 0 && cudaMalloc(&opened.workspace, WORKSPACE_BYTES) != cudaSuccess)
    status = STATUS_ALLOC_FAILED;
  int code = status == 0 ? td_cu_blas_use(&opened, stream) : code_of(status);
  if (code == 0) {
    *out = new blas(opened);
  } else {
    destroy(opened.handle);
    if (opened.workspace) cudaFree(opened.workspace);
  }
  return code;
}

extern "C" int td_cu_blas_use(td_cu_blas opened, td_cu_stream stream) {
  const blas *b = static_cast<const blas *>(opened);
  int status = b->set_stream(b->handle, static_cast<cudaStream_t>(stream));
  if (status == 0) status = b->set_workspace(b->handle, b->workspace, WORKSPACE_BYTES);
  return code_of(status);
}

extern "C" int td_cu_blas_close(td_cu_blas opened) {
  blas *b = static_cast<blas *>(opened);
  int status = b->destroy(b->handle);
  // the failure of an earlier operator
  if (cudaFree(b->workspace) != cudaSuccess) cudaGetLastError();
  delete b;
  return code_of(status);
}

// In column-major terms our row-major W, x and y are transposed.
extern "C" int td_cu_blas_gemm(td_cu_blas opened, const td_cu_gemm_args *a) {
  const blas *b = static_cast<const blas *>(opened);
  const float one = 1, zero = 0;
  return code_of(b->gemm(
      b->handle, OP_T, OP_N, static_cast<int>(a->n_rows), static_cast<int>(a->n_tokens),
      static_cast<int>(a->cols), &one, a->w, TYPE_BF16, static_cast<int>(a->cols), a->x, TYPE_BF16,
      static_cast<int>(a->x_stride), &zero, a->y, a->y_f32 ? TYPE_F32 : TYPE_BF16,
      static_cast<int>(a->y_stride), COMPUTE_F32, ALGORITHM_DEFAULT));
}

// ---- conversion to BF16 -------------------------------------------------------------------------

enum { THREADS = 256 };

// Eight weights per thread, of row blockIdx.x.
template <int READ> __global__ static void dequant_kernel(td_cu_dequant_args a) {
  uint32_t row = a.row0 + blockIdx.x, k = (blockIdx.y * THREADS + threadIdx.x) * 8;
  if (k >= a.w.cols) return;
  float v[8], scale = global_scale(a.w);
  decode8<READ>(a.w, row, k, load8<READ>(a.w, row, k), v);
  if constexpr (READ == TD_CU_READ_ANY) {
    scale_each(a.w, row, k, v);
  } else {
    scale *= scale_in<READ>(scales_of_row<READ>(a.w, row), k);
  }
  for (int j = 0; j < 8; j++)
    v[j] *= scale;
  put8(a.out + static_cast<size_t>(blockIdx.x) * a.w.cols + k, v);
}

template <int READ> static int launch(const td_cu_dequant_args *a, td_cu_stream stream) {
  auto kernel = dequant_kernel<READ>;
  return TD_LAUNCH(kernel, dim3(a->n_rows, ceil_div(a->w.cols, 8 * THREADS)), THREADS, 0, stream,
                   *a);
}

extern "C" int td_cu_dequant(const td_cu_dequant_args *a, td_cu_stream stream) {
  switch (a->read) {
  case TD_CU_READ_F8: return launch<TD_CU_READ_F8>(a, stream);
  case TD_CU_READ_I8: return launch<TD_CU_READ_I8>(a, stream);
  case TD_CU_READ_I4: return launch<TD_CU_READ_I4>(a, stream);
  case TD_CU_READ_MXFP4: return launch<TD_CU_READ_MXFP4>(a, stream);
  case TD_CU_READ_NVFP4: return launch<TD_CU_READ_NVFP4>(a, stream);
  default: return launch<TD_CU_READ_ANY>(a, stream);
  }
}
