// kernels/cuda/share.cu - a share of the GPU's SMs, which streams can be confined to: a green
// context. The driver's functions are looked up when a share is opened, so the library also loads
// where the driver is older (green contexts came with CUDA 12.4, their streams with 12.5).
#include <cuda.h>

#include "kernels/cuda/common.cuh"

#if CUDART_VERSION >= 12050

__global__ static void probe_share_kernel(int32_t *) {}

static int kept(cudaError_t code) {
  if (code != cudaSuccess) cudaGetLastError();
  return code;
}

// Their codes are those of the runtime where both have one.
static int kept(CUresult code) {
  return static_cast<int>(code);
}

struct driver {
  decltype(&cuDeviceGet) device_get;
  decltype(&cuDeviceGetDevResource) get_resource;
  decltype(&cuDevSmResourceSplitByCount) split;
  decltype(&cuDevResourceGenerateDesc) describe;
  decltype(&cuGreenCtxCreate) create;
  decltype(&cuGreenCtxDestroy) destroy;
  decltype(&cuGreenCtxStreamCreate) stream_create;
};

struct share {
  driver d;
  CUgreenCtx context;
};

template <class F> static int find(F *out, const char *name, unsigned cuda_version) {
  void *found = nullptr;
  cudaDriverEntryPointQueryResult status;
  int code = kept(
      cudaGetDriverEntryPointByVersion(name, &found, cuda_version, cudaEnableDefault, &status));
  *out = reinterpret_cast<F>(found);
  return code == 0 && found ? 0 : static_cast<int>(cudaErrorNotSupported);
}

static int find_driver(driver *d) {
  int code = find(&d->device_get, "cuDeviceGet", 2000);
  if (code == 0) code = find(&d->get_resource, "cuDeviceGetDevResource", 12040);
  if (code == 0) code = find(&d->split, "cuDevSmResourceSplitByCount", 12040);
  if (code == 0) code = find(&d->describe, "cuDevResourceGenerateDesc", 12040);
  if (code == 0) code = find(&d->create, "cuGreenCtxCreate", 12040);
  if (code == 0) code = find(&d->destroy, "cuGreenCtxDestroy", 12040);
  return code == 0 ? find(&d->stream_create, "cuGreenCtxStreamCreate", 12050) : code;
}

// The SMs left over are nobody's: streams outside of the share run on all SMs.
static int create(share *s, int device, int *n_sms) {
  CUdevice handle;
  CUdevResource all, mine;
  CUdevResourceDesc desc;
  unsigned n_groups = 1;
  int code = kept(s->d.device_get(&handle, device));
  if (code == 0) code = kept(s->d.get_resource(handle, &all, CU_DEV_RESOURCE_TYPE_SM));
  if (code == 0) {
    code = kept(s->d.split(&mine, &n_groups, &all, nullptr, 0, static_cast<unsigned>(*n_sms)));
  }
  if (code == 0 && n_groups != 1) code = cudaErrorNotSupported;
  if (code == 0) code = kept(s->d.describe(&desc, &mine, 1));
  if (code == 0) code = kept(s->d.create(&s->context, desc, handle, CU_GREEN_CTX_DEFAULT_STREAM));
  if (code == 0) *n_sms = static_cast<int>(mine.sm.smCount);
  return code;
}

extern "C" int td_cu_share_stream_open(td_cu_stream *out, td_cu_share opened) {
  const share *s = static_cast<const share *>(opened);
  CUstream stream = nullptr;
  int least = 0, greatest = 0;
  int code = kept(cudaDeviceGetStreamPriorityRange(&least, &greatest));
  if (code == 0) {
    code = kept(s->d.stream_create(&stream, s->context, CU_STREAM_NON_BLOCKING, least));
  }
  *out = code == 0 ? stream : nullptr;
  return code;
}

// Whether the runtime takes a stream of the share: its kernels run there, and it and other streams
// wait for each other's events.
static int probe(td_cu_share s) {
  td_cu_stream inside = nullptr, outside = nullptr;
  td_cu_event event = nullptr;
  int code = td_cu_share_stream_open(&inside, s);
  if (code == 0) code = td_cu_stream_open(&outside, false);
  if (code == 0) code = td_cu_event_open(&event);
  if (code == 0)
    code = TD_LAUNCH(probe_share_kernel, 1, WARP, 0, inside, static_cast<int32_t *>(nullptr));
  if (code == 0) code = td_cu_event_record(event, inside);
  if (code == 0) code = td_cu_stream_wait(outside, event);
  if (code == 0) code = td_cu_event_record(event, outside);
  if (code == 0) code = td_cu_stream_wait(inside, event);
  if (code == 0) code = td_cu_stream_sync(inside);
  if (event) td_cu_event_close(event);
  if (outside) td_cu_stream_close(outside);
  if (inside) td_cu_stream_close(inside);
  return code;
}

extern "C" int td_cu_share_close(td_cu_share opened) {
  share *s = static_cast<share *>(opened);
  int code = kept(s->d.destroy(s->context));
  delete s;
  return code;
}

extern "C" int td_cu_share_open(td_cu_share *out, int device, int *n_sms) {
  share *s = new share();
  int code = find_driver(&s->d);
  if (code == 0) code = create(s, device, n_sms);
  if (code != 0) {
    delete s;
  } else if ((code = probe(s)) != 0) {
    td_cu_share_close(s);
  }
  *out = code == 0 ? s : nullptr;
  return code;
}

#else // a toolkit without green contexts

extern "C" int td_cu_share_open(td_cu_share *out, int, int *) {
  *out = nullptr;
  return cudaErrorNotSupported;
}

extern "C" int td_cu_share_close(td_cu_share) {
  return cudaErrorNotSupported;
}

extern "C" int td_cu_share_stream_open(td_cu_stream *out, td_cu_share) {
  *out = nullptr;
  return cudaErrorNotSupported;
}

#endif
