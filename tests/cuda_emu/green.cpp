// tests/cuda_emu/green.cpp - green contexts: shares of an emulated device's SMs.
#include "green.h"

#include "hooks.h"

#include <algorithm>
#include <string>

static std::atomic<unsigned> share_sms{0};

unsigned emu_share_sms(void) {
  return share_sms;
}

struct emu_resource {
  unsigned n_sms;
};

static CUresult device_get(CUdevice *device, int ordinal) {
  *device = ordinal;
  return ordinal >= 0 && ordinal < emu_n_devices() ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult get_resource(CUdevice, CUdevResource *resource, CUdevResourceType type) {
  *resource = {type, {static_cast<unsigned>(emu_n_sms())}};
  return CUDA_SUCCESS;
}

// As drivers do: whole units, at least so many SMs.
static CUresult split_by_count(CUdevResource *out, unsigned *n_groups, const CUdevResource *input,
                               CUdevResource *, unsigned, unsigned least) {
  const unsigned unit = emu_capability() >= 90 ? 8 : 2;
  const unsigned n = std::max((least + unit - 1) / unit * unit, emu_capability() >= 90 ? 8u : 4u);
  if (n > input->sm.smCount) return CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION;
  *out = {CU_DEV_RESOURCE_TYPE_SM, {n}};
  *n_groups = 1;
  return CUDA_SUCCESS;
}

static CUresult generate_desc(CUdevResourceDesc *out, CUdevResource *resources, unsigned n) {
  *out = new emu_resource{resources->sm.smCount};
  return n == 1 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult green_create(CUgreenCtx *out, CUdevResourceDesc desc, CUdevice device,
                             unsigned flags) {
  if (flags != CU_GREEN_CTX_DEFAULT_STREAM) return CUDA_ERROR_INVALID_VALUE;
  *out = new emu_green{device, desc->n_sms};
  share_sms += desc->n_sms;
  delete desc;
  return CUDA_SUCCESS;
}

static CUresult green_destroy(CUgreenCtx context) {
  if (context->n_streams != 0) return CUDA_ERROR_INVALID_VALUE;
  share_sms -= context->n_sms;
  delete context;
  return CUDA_SUCCESS;
}

static CUresult green_stream_create(CUstream *out, CUgreenCtx context, unsigned flags, int) {
  if (flags != CU_STREAM_NON_BLOCKING) return CUDA_ERROR_INVALID_VALUE;
  context->n_streams++;
  *out = emu_stream_in(context);
  return CUDA_SUCCESS;
}

void *emu_driver_function(const char *symbol, unsigned version) {
  static const struct {
    const char *name;
    void *function;
    unsigned since;
  } functions[] = {
      {"cuDeviceGet", reinterpret_cast<void *>(device_get), 2000},
      {"cuDeviceGetDevResource", reinterpret_cast<void *>(get_resource), 12040},
      {"cuDevSmResourceSplitByCount", reinterpret_cast<void *>(split_by_count), 12040},
      {"cuDevResourceGenerateDesc", reinterpret_cast<void *>(generate_desc), 12040},
      {"cuGreenCtxCreate", reinterpret_cast<void *>(green_create), 12040},
      {"cuGreenCtxDestroy", reinterpret_cast<void *>(green_destroy), 12040},
      {"cuGreenCtxStreamCreate", reinterpret_cast<void *>(green_stream_create), 12050}};
  for (const auto &f : functions) {
    if (std::string(f.name) == symbol && version >= f.since) return f.function;
  }
  return nullptr;
}
