// kernels/cuda/runtime.cu - the library's table: memory, streams and events of the CUDA runtime,
// and the launchers of the other files.
#include <string.h>

#include "kernels/cuda/wgmma.cuh"

// Returns the code and clears the runtime's last error, so that the next launch does not report it
// again.
static int told(cudaError_t code) {
  if (code != cudaSuccess) cudaGetLastError();
  return code;
}

const char *td_cu_error_text(int code) {
  return cudaGetErrorString(static_cast<cudaError_t>(code));
}

int td_cu_count(int *n_devices) {
  return told(cudaGetDeviceCount(n_devices));
}

// Called for every operator, so it calls the runtime only when the device changes.
int td_cu_use(int device) {
  static thread_local int current = -1;
  if (device == current) return 0;
  int code = told(cudaSetDevice(device));
  if (code == 0) current = device;
  return code;
}

__global__ static void probe_kernel() {}

// Whether the code that the GPU runs was made for one with FP8 on tensor cores. Code for an earlier
// one, which it runs too, has no such instructions.
static bool runs_f8(int capability) {
  enum { FIRST_F8 = 89 };
  cudaFuncAttributes attributes;
  if (capability < FIRST_F8) return false;
  return told(cudaFuncGetAttributes(&attributes, probe_kernel)) == 0 &&
         attributes.ptxVersion >= FIRST_F8;
}

// Whether none of the code in the library runs on a GPU: that of X.Y runs on X.Y to X.9. The build
// names what there is, as X(80)X(90).
static bool is_translated(int capability) {
#define X(arch) arch,
  static const int code[] = {TD_CUDA_CODE 0};
#undef X
  for (int have : code)
    if (have / 10 == capability / 10 && have <= capability) return false;
  return true;
}

int td_cu_describe(int device, td_cu_props *props) {
  cudaDeviceProp p;
  cudaError_t code = cudaGetDeviceProperties(&p, device);
  if (code != cudaSuccess) return told(code);
  *props = {};
  memcpy(props->name, p.name, sizeof props->name - 1);
  props->pci_domain = p.pciDomainID;
  props->pci_bus = p.pciBusID;
  props->pci_device = p.pciDeviceID;
  props->total_bytes = p.totalGlobalMem;
  props->capability = 10 * p.major + p.minor;
  props->n_sms = p.multiProcessorCount;
  props->has_wgmma = runs_wgmma(props->capability);
  props->is_translated = is_translated(props->capability);
  return 0;
}

// Threads that wait for the GPU block instead of spinning, since a spinning thread would take a CPU
// from the offloaded experts.
int td_cu_open(int device, td_cu_props *props) {
  int code = told(cudaInitDevice(device, cudaDeviceScheduleBlockingSync | cudaDeviceMapHost,
                                 cudaInitDeviceFlagsAreValid));
  if (code == 0) code = td_cu_use(device);
  if (code == 0) props->has_f8 = runs_f8(props->capability);
  return code;
}

// Without this, a failure would show up at the first launch.
int td_cu_probe() {
  cudaFuncAttributes attributes;
  return told(cudaFuncGetAttributes(&attributes, probe_kernel));
}

int td_cu_memory(size_t *free_bytes, size_t *total_bytes) {
  return told(cudaMemGetInfo(free_bytes, total_bytes));
}

int td_cu_alloc(void **out, size_t n_bytes) {
  return told(cudaMalloc(out, n_bytes));
}

int td_cu_free(void *ptr) {
  return told(cudaFree(ptr));
}

int td_cu_alloc_host(void **out, size_t n_bytes) {
  return told(cudaHostAlloc(out, n_bytes, cudaHostAllocPortable | cudaHostAllocMapped));
}

int td_cu_free_host(void *ptr) {
  return told(cudaFreeHost(ptr));
}

int td_cu_reach(int device, bool *is_reached) {
  int current = 0, can = 0;
  cudaError_t code = cudaGetDevice(&current);
  if (code == cudaSuccess) code = cudaDeviceCanAccessPeer(&can, current, device);
  if (code == cudaSuccess && can) code = cudaDeviceEnablePeerAccess(device, 0);
  if (code == cudaErrorPeerAccessAlreadyEnabled) {
    cudaGetLastError();
    code = cudaSuccess;
  }
  *is_reached = code == cudaSuccess && can;
  return told(code);
}

int td_cu_pin(const void *host, size_t n_bytes, bool only_read) {
  unsigned flags = cudaHostRegisterPortable | cudaHostRegisterMapped;
  if (only_read) flags |= cudaHostRegisterReadOnly;
  return told(cudaHostRegister(const_cast<void *>(host), n_bytes, flags));
}

int td_cu_unpin(const void *host) {
  return told(cudaHostUnregister(const_cast<void *>(host)));
}

int td_cu_stream_open(td_cu_stream *out, bool is_urgent) {
  cudaStream_t stream;
  int least = 0, greatest = 0;
  cudaError_t code = cudaDeviceGetStreamPriorityRange(&least, &greatest);
  if (code == cudaSuccess) {
    code = cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking,
                                        is_urgent ? greatest : least);
  }
  *out = code == cudaSuccess ? stream : nullptr;
  return told(code);
}

int td_cu_stream_close(td_cu_stream stream) {
  return told(cudaStreamDestroy(static_cast<cudaStream_t>(stream)));
}

int td_cu_stream_sync(td_cu_stream stream) {
  return told(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)));
}

// Unlike calls that wait inside the driver, this one lets other threads queue work meanwhile.
int td_cu_await_idle() {
  return told(cudaDeviceSynchronize());
}

int td_cu_event_open(td_cu_event *out) {
  cudaEvent_t event;
  cudaError_t code = cudaEventCreateWithFlags(&event,
                                              cudaEventDisableTiming | cudaEventBlockingSync);
  *out = code == cudaSuccess ? event : nullptr;
  return told(code);
}

int td_cu_event_close(td_cu_event event) {
  return told(cudaEventDestroy(static_cast<cudaEvent_t>(event)));
}

int td_cu_event_record(td_cu_event event, td_cu_stream stream) {
  return told(cudaEventRecord(static_cast<cudaEvent_t>(event), static_cast<cudaStream_t>(stream)));
}

int td_cu_event_sync(td_cu_event event) {
  return told(cudaEventSynchronize(static_cast<cudaEvent_t>(event)));
}

int td_cu_event_is_done(td_cu_event event, bool *is_done) {
  cudaError_t code = cudaEventQuery(static_cast<cudaEvent_t>(event));
  *is_done = code != cudaErrorNotReady;
  return told(code == cudaErrorNotReady ? cudaSuccess : code);
}

int td_cu_stream_wait(td_cu_stream stream, td_cu_event event) {
  return told(
      cudaStreamWaitEvent(static_cast<cudaStream_t>(stream), static_cast<cudaEvent_t>(event), 0));
}

int td_cu_copy(void *dst, const void *src, size_t n_bytes, td_cu_stream stream) {
  return told(
      cudaMemcpyAsync(dst, src, n_bytes, cudaMemcpyDefault, static_cast<cudaStream_t>(stream)));
}

int td_cu_fill_zero(void *dst, size_t n_bytes, td_cu_stream stream) {
  return told(cudaMemsetAsync(dst, 0, n_bytes, static_cast<cudaStream_t>(stream)));
}

int td_cu_capture_begin(td_cu_stream stream) {
  return told(
      cudaStreamBeginCapture(static_cast<cudaStream_t>(stream), cudaStreamCaptureModeThreadLocal));
}

int td_cu_capture_end(td_cu_stream stream, td_cu_graph *out) {
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  cudaError_t code = cudaStreamEndCapture(static_cast<cudaStream_t>(stream), &graph);
  if (code == cudaSuccess) code = cudaGraphInstantiateWithFlags(&executable, graph, 0);
  if (graph) cudaGraphDestroy(graph);
  *out = code == cudaSuccess ? executable : nullptr;
  return told(code);
}

int td_cu_graph_launch(td_cu_graph graph, td_cu_stream stream) {
  return told(
      cudaGraphLaunch(static_cast<cudaGraphExec_t>(graph), static_cast<cudaStream_t>(stream)));
}

int td_cu_graph_close(td_cu_graph graph) {
  return told(cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(graph)));
}

extern "C" __attribute__((visibility("default"))) const td_cu_abi *td_cuda_abi(void) {
  static const td_cu_function functions[] = TD_CU_FUNCTION_LIST;
  static const td_cu_abi abi = {TD_CUDA_ABI_VERSION,
                                sizeof(td_cu_abi),
                                sizeof functions / sizeof functions[0],
                                CUDART_VERSION / 1000,
                                functions,
#define X(name, result, params) td_cu_##name,
                                TD_CU_CALLS(X)
#undef X
#define X(name, args_type) td_cu_##name,
                                    TD_CU_OPS(X)
#undef X
  };
  return &abi;
}
