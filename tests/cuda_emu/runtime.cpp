// tests/cuda_emu/runtime.cpp - memory, streams and events of the emulated device.
#include "cuda_runtime.h"

#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

// How far a stream has come; events keep it beyond the stream's end.
struct progress {
  std::mutex lock;
  std::condition_variable moved;
  uint64_t n_queued = 0, n_done = 0;

  void wait(uint64_t n) {
    std::unique_lock<std::mutex> hold(lock);
    moved.wait(hold, [&] { return n_done >= n; });
  }
};

struct emu_graph {
  std::vector<std::function<void()>> work;
};

// Of the calling thread: what would disturb a capture is refused, and spoils it.
static thread_local emu_graph *captured = nullptr;
static thread_local bool is_spoiled = false;

static cudaError_t spoil() {
  is_spoiled = true;
  return cudaErrorStreamCaptureUnsupported;
}

struct emu_stream {
  std::shared_ptr<progress> at = std::make_shared<progress>();
  std::deque<std::function<void()>> queue; // guarded by at->lock
  bool stopping = false;                   // likewise
  uint64_t n_added = 0;
  std::thread thread{[this] { main(); }};

  void main() {
    std::unique_lock<std::mutex> hold(at->lock);
    for (;;) {
      at->moved.wait(hold, [&] { return stopping || !queue.empty(); });
      if (queue.empty()) return;
      std::function<void()> work = std::move(queue.front());
      queue.pop_front();
      hold.unlock();
      work();
      hold.lock();
      at->n_done++;
      at->moved.notify_all();
    }
  }

  uint64_t add(std::function<void()> work) {
    if (captured) {
      captured->work.push_back(std::move(work));
      return n_added;
    }
    std::lock_guard<std::mutex> hold(at->lock);
    queue.push_back(std::move(work));
    at->moved.notify_all();
    return n_added = ++at->n_queued;
  }
};

struct emu_event {
  std::shared_ptr<progress> of; // null: never recorded
  uint64_t n = 0;
};

static thread_local cudaError_t last_error = cudaSuccess;

void emu_enqueue(void *stream, std::function<void()> work) {
  static_cast<emu_stream *>(stream)->add(std::move(work));
}

bool emu_check_launch(dim3 grid, dim3 block, size_t shared_bytes) {
  unsigned n = block.x * block.y * block.z;
  bool fine = n > 0 && n <= EMU_MAX_THREADS && block.x % EMU_WARP == 0 && grid.x > 0 &&
              grid.y > 0 && grid.z > 0 && grid.x <= 0x7fffffffu && grid.y <= 65535 &&
              grid.z <= 65535 && shared_bytes <= EMU_SHARED_BYTES;
  if (!fine) last_error = cudaErrorInvalidConfiguration;
  return fine;
}

const char *cudaGetErrorString(cudaError_t code) {
  switch (code) {
  case cudaSuccess: return "no error";
  case cudaErrorInvalidValue: return "invalid argument";
  case cudaErrorMemoryAllocation: return "out of memory";
  case cudaErrorInvalidConfiguration: return "invalid configuration argument";
  case cudaErrorNoDevice: return "no CUDA-capable device is detected";
  case cudaErrorHostMemoryAlreadyRegistered: return "memory is already registered";
  case cudaErrorHostMemoryNotRegistered: return "memory is not registered";
  case cudaErrorNotSupported: return "operation not supported";
  case cudaErrorStreamCaptureUnsupported:
  case cudaErrorStreamCaptureInvalidated: return "not while a stream is captured";
  }
  return "unknown error";
}

cudaError_t cudaGetLastError() {
  cudaError_t code = last_error;
  last_error = cudaSuccess;
  return code;
}

// TANDEM_EMU_DEVICES=0: a machine without a GPU.
cudaError_t cudaGetDeviceCount(int *n) {
  const char *text = std::getenv("TANDEM_EMU_DEVICES");
  *n = text ? std::atoi(text) : 1;
  return *n > 0 ? cudaSuccess : cudaErrorNoDevice;
}

// TANDEM_EMU_MEMORY_MB: how much memory the emulated GPU has.
static size_t memory_bytes() {
  const char *text = std::getenv("TANDEM_EMU_MEMORY_MB");
  return (text ? std::strtoull(text, nullptr, 10) : 4096) << 20;
}

static const size_t total_bytes = memory_bytes();
static std::mutex memory_lock;
static std::map<void *, size_t> allocations; // guarded by memory_lock
static size_t used_bytes = 0;                // likewise

cudaError_t cudaGetDeviceProperties(cudaDeviceProp *props, int device) {
  (void)device;
  *props = {"emulated GPU", total_bytes, 8, 0, 2};
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  return device == 0 ? cudaSuccess : cudaErrorInvalidValue;
}

cudaError_t cudaMemGetInfo(size_t *free_out, size_t *total_out) {
  std::lock_guard<std::mutex> hold(memory_lock);
  *free_out = total_bytes - used_bytes;
  *total_out = total_bytes;
  return cudaSuccess;
}

cudaError_t cudaMalloc(void **out, size_t n_bytes) {
  if (captured) return spoil();
  std::lock_guard<std::mutex> hold(memory_lock);
  *out = nullptr;
  if (n_bytes > total_bytes - used_bytes) return cudaErrorMemoryAllocation;
  // Big pieces stay untouched, so that a KV pool costs nothing before it is used.
  if (posix_memalign(out, 256, n_bytes ? n_bytes : 1) != 0) return cudaErrorMemoryAllocation;
  if (n_bytes <= 1 << 20) std::memset(*out, 0xff, n_bytes);
  allocations[*out] = n_bytes;
  used_bytes += n_bytes;
  return cudaSuccess;
}

cudaError_t cudaFree(void *ptr) {
  if (captured) return spoil();
  std::lock_guard<std::mutex> hold(memory_lock);
  auto found = allocations.find(ptr);
  if (found == allocations.end()) return ptr ? cudaErrorInvalidValue : cudaSuccess;
  used_bytes -= found->second;
  allocations.erase(found);
  std::free(ptr);
  return cudaSuccess;
}

static std::map<void *, size_t> pinned; // guarded by memory_lock

// TANDEM_EMU_PIN=0: a device that cannot register read-only memory.
cudaError_t cudaHostRegister(void *ptr, size_t n_bytes, unsigned flags) {
  std::lock_guard<std::mutex> hold(memory_lock);
  const char *text = std::getenv("TANDEM_EMU_PIN");
  if (text && (flags & cudaHostRegisterReadOnly) && std::atoi(text) == 0)
    return last_error = cudaErrorNotSupported;
  if (!ptr || n_bytes == 0) return last_error = cudaErrorInvalidValue;
  bool is_new = pinned.emplace(ptr, n_bytes).second;
  return is_new ? cudaSuccess : last_error = cudaErrorHostMemoryAlreadyRegistered;
}

cudaError_t cudaHostUnregister(void *ptr) {
  std::lock_guard<std::mutex> hold(memory_lock);
  return pinned.erase(ptr) ? cudaSuccess : last_error = cudaErrorHostMemoryNotRegistered;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned flags) {
  (void)flags;
  *out = new emu_stream;
  return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  {
    std::lock_guard<std::mutex> hold(stream->at->lock);
    stream->stopping = true;
    stream->at->moved.notify_all();
  }
  stream->thread.join();
  delete stream;
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (captured) return spoil();
  std::unique_lock<std::mutex> hold(stream->at->lock);
  stream->at->moved.wait(hold, [&] { return stream->at->n_done == stream->at->n_queued; });
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  (void)flags;
  std::shared_ptr<progress> of = event->of;
  uint64_t n = event->n;
  if (of) stream->add([=] { of->wait(n); });
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned flags) {
  (void)flags;
  *out = new emu_event;
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  event->of = stream->at;
  event->n = stream->add([] {});
  return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  if (event->of) event->of->wait(event->n);
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t n_bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  (void)kind;
  stream->add([=] { std::memmove(dst, src, n_bytes); });
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *dst, int value, size_t n_bytes, cudaStream_t stream) {
  stream->add([=] { std::memset(dst, value, n_bytes); });
  return cudaSuccess;
}

// TANDEM_EMU_CAPTURE=0: a stream cannot be captured.
cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode) {
  const char *text = std::getenv("TANDEM_EMU_CAPTURE");
  if (text && std::atoi(text) == 0) return cudaErrorNotSupported;
  if (captured) return spoil();
  captured = new emu_graph;
  is_spoiled = false;
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t *out) {
  *out = captured;
  captured = nullptr;
  if (!is_spoiled) return cudaSuccess;
  delete *out;
  *out = nullptr;
  return cudaErrorStreamCaptureInvalidated;
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *out, cudaGraph_t graph,
                                          unsigned long long) {
  *out = new emu_graph(*graph);
  return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
  delete graph;
  return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
  for (const auto &work : graph->work)
    stream->add(work);
  return cudaSuccess;
}
