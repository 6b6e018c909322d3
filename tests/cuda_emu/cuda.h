// tests/cuda_emu/cuda.h - the parts of the CUDA driver that kernels/cuda looks up at run time.
#pragma once

#include "cuda_runtime.h"

enum CUresult {
  CUDA_SUCCESS = 0,
  CUDA_ERROR_INVALID_VALUE = 1,
  CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION = 915,
};
enum CUdevResourceType { CU_DEV_RESOURCE_TYPE_SM = 1 };
enum { CU_GREEN_CTX_DEFAULT_STREAM = 1, CU_STREAM_NON_BLOCKING = 1 };

typedef int CUdevice;
typedef cudaStream_t CUstream;
typedef struct emu_resource *CUdevResourceDesc;
typedef struct emu_green *CUgreenCtx;

struct CUdevResource {
  CUdevResourceType type;
  struct {
    unsigned smCount;
  } sm;
};

CUresult cuDeviceGet(CUdevice *device, int ordinal);
CUresult cuDeviceGetDevResource(CUdevice device, CUdevResource *resource, CUdevResourceType type);
CUresult cuDevSmResourceSplitByCount(CUdevResource *out, unsigned *n_groups,
                                     const CUdevResource *input, CUdevResource *remaining,
                                     unsigned flags, unsigned least);
CUresult cuDevResourceGenerateDesc(CUdevResourceDesc *out, CUdevResource *resources, unsigned n);
CUresult cuGreenCtxCreate(CUgreenCtx *out, CUdevResourceDesc desc, CUdevice device, unsigned flags);
CUresult cuGreenCtxDestroy(CUgreenCtx context);
CUresult cuGreenCtxStreamCreate(CUstream *out, CUgreenCtx context, unsigned flags, int priority);
