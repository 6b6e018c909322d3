// tests/cuda_emu/runtime.cpp - memory, streams and events of the emulated devices.
#include "cuda.h"
#include "cuda_runtime.h"

#include "base/jitter.h"
#include "green.h"
#include "hooks.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <shared_mutex>
#include <string>
#include <sys/stat.h>
#include <thread>
#include <unistd.h>
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

  bool is_done(uint64_t n) {
    std::lock_guard<std::mutex> hold(lock);
    return n_done >= n;
  }
};

// Does one copy after the other, in the order in which streams get to theirs.
struct copy_engine {
  std::mutex lock;
  std::condition_variable moved;
  uint64_t n_asked = 0, n_done = 0;

  void take() {
    std::unique_lock<std::mutex> hold(lock);
    uint64_t mine = n_asked++;
    moved.wait(hold, [&] { return n_done == mine; });
  }

  void give_back() {
    std::lock_guard<std::mutex> hold(lock);
    n_done++;
    moved.notify_all();
  }
};

// A queue of the hardware: what several streams have put into it begins in the order in which they
// did, so that work which waits for its own stream holds up that of others behind it.
struct hardware_queue {
  std::mutex lock;
  std::condition_variable moved;
  uint64_t n_added = 0, n_begun = 0;
  long n_streams = 0;

  uint64_t add() {
    std::lock_guard<std::mutex> hold(lock);
    return n_added++;
  }

  void wait(uint64_t n) {
    std::unique_lock<std::mutex> hold(lock);
    moved.wait(hold, [&] { return n_begun == n; });
  }

  void leave() {
    std::lock_guard<std::mutex> hold(lock);
    n_begun++;
    moved.notify_all();
  }
};

struct operation {
  std::function<void()> run;
  copy_engine *engine; // that it needs, or null
  bool waits = false;  // for other streams: it stays at the head of its hardware queue meanwhile
  uint64_t place = 0;  // in the hardware queue
};

struct emu_graph {
  int device;
  std::vector<operation> work;
};

enum { MAX_DEVICES = 8, MAX_QUEUES = 32 };

struct emu_stream;

struct emu_device {
  copy_engine to_device, to_host;
  hardware_queue queues[MAX_QUEUES];
  std::mutex streams_lock;
  std::set<emu_stream *> streams;   // guarded by streams_lock, as the numbers of streams of queues
  std::set<const void *> is_loaded; // kernels; likewise
  size_t used_bytes = 0;            // guarded by memory_lock
  std::atomic<bool> is_waited_for_asleep{false};
};

static emu_device devices[MAX_DEVICES];

static long number_of(const char *name, long otherwise) {
  const char *text = std::getenv(name);
  return text ? std::strtol(text, nullptr, 10) : otherwise;
}
static thread_local int current_device = 0;

// A failure stays with the calling thread until cudaGetLastError.
static thread_local cudaError_t last_error = cudaSuccess;

static cudaError_t result(cudaError_t code) {
  if (code != cudaSuccess) last_error = code;
  return code;
}

// Of the calling thread: what would disturb a capture is refused, and spoils it.
static thread_local emu_graph *captured = nullptr;
static thread_local bool is_spoiled = false;

static cudaError_t spoil() {
  is_spoiled = true;
  return result(cudaErrorStreamCaptureUnsupported);
}

// TANDEM_EMU_BREAK, while it is set: the device is broken, as one is whose kernel has touched
// memory that is not there, and nothing works any more.
static bool is_broken() {
  return std::getenv("TANDEM_EMU_BREAK") != nullptr;
}

// CUDA_LAUNCH_BLOCKING=1, as hardware has it, but for all that is queued: whoever queues it waits.
static bool is_blocking() {
  return number_of("CUDA_LAUNCH_BLOCKING", 0) != 0;
}

// Held by whoever queues work; alone, by a thread that waits inside the driver.
static std::shared_mutex driver_lock;

struct emu_stream {
  const int device = current_device;
  emu_green *const green = nullptr; // null: all SMs
  std::shared_ptr<progress> at = std::make_shared<progress>();
  std::deque<operation> queue; // guarded by at->lock
  bool stopping = false;       // likewise
  uint64_t n_added = 0;
  td_jitter jitter = td_jitter_open(TD_JITTER_EMULATOR);
  hardware_queue *const hardware = join();
  std::thread thread{[this] { main(); }};

  emu_stream(emu_green *in = nullptr) : device(in ? in->device : current_device), green(in) {}

  ~emu_stream() {
    emu_device &d = devices[device];
    std::lock_guard<std::mutex> hold(d.streams_lock);
    d.streams.erase(this);
    hardware->n_streams--;
  }

  // The queue that the fewest streams share, of as many as CUDA_DEVICE_MAX_CONNECTIONS says.
  hardware_queue *join() {
    emu_device &d = devices[device];
    const long n = std::clamp<long>(number_of("CUDA_DEVICE_MAX_CONNECTIONS", 8), 1, MAX_QUEUES);
    std::lock_guard<std::mutex> hold(d.streams_lock);
    d.streams.insert(this);
    hardware_queue *best = std::min_element(
        d.queues, d.queues + n, [](auto &a, auto &b) { return a.n_streams < b.n_streams; });
    best->n_streams++;
    return best;
  }

  void main() {
    std::unique_lock<std::mutex> hold(at->lock);
    for (;;) {
      at->moved.wait(hold, [&] { return stopping || !queue.empty(); });
      if (queue.empty()) return;
      operation next = std::move(queue.front());
      queue.pop_front();
      hold.unlock();
      run(next);
      hold.lock();
      at->n_done++;
      at->moved.notify_all();
    }
  }

  // A copy that takes long holds its engine meanwhile.
  void run(const operation &o) {
    hardware->wait(o.place);
    if (!o.waits) hardware->leave();
    if (o.engine) o.engine->take();
    td_jitter_wait(&jitter);
    o.run();
    if (o.engine) o.engine->give_back();
    if (o.waits) hardware->leave();
  }

  uint64_t add(std::function<void()> work, copy_engine *engine = nullptr, bool waits = false) {
    if (captured) {
      captured->work.push_back({std::move(work), engine, waits});
      return n_added;
    }
    std::shared_lock<std::shared_mutex> queuing(driver_lock);
    std::unique_lock<std::mutex> hold(at->lock);
    queue.push_back({std::move(work), engine, waits, hardware->add()});
    at->moved.notify_all();
    n_added = ++at->n_queued;
    queuing.unlock();
    if (is_blocking()) at->moved.wait(hold, [&] { return at->n_done == at->n_queued; });
    return n_added;
  }
};

struct emu_event {
  const int device = current_device;
  std::shared_ptr<progress> of; // null: never recorded
  uint64_t n = 0;
  bool is_waited_for_asleep = false;
};

// TANDEM_EMU_CAPABILITY: the GPU's compute capability, ten times.
int emu_capability() {
  return static_cast<int>(number_of("TANDEM_EMU_CAPABILITY", 80));
}

// Waits for all that has been put into a device's streams.
static void await_idle(int device) {
  std::vector<std::pair<std::shared_ptr<progress>, uint64_t>> all;
  {
    std::lock_guard<std::mutex> hold(devices[device].streams_lock);
    for (emu_stream *s : devices[device].streams) {
      std::lock_guard<std::mutex> queued(s->at->lock);
      all.emplace_back(s->at, s->at->n_queued);
    }
  }
  for (auto &[at, n] : all)
    at->wait(n);
}

void emu_await_idle_inside() {
  if (captured) return;
  std::unique_lock<std::shared_mutex> alone(driver_lock);
  await_idle(current_device);
}

// The first launch of a kernel loads it, which waits until the device is idle; with
// CUDA_MODULE_LOADING=EAGER all are loaded before.
static void load_kernel(const void *kernel, int device) {
  const char *when = std::getenv("CUDA_MODULE_LOADING");
  if (when && std::string(when) == "EAGER") return;
  {
    std::lock_guard<std::mutex> hold(devices[device].streams_lock);
    if (!devices[device].is_loaded.insert(kernel).second) return;
  }
  emu_await_idle_inside();
}

// TANDEM_EMU_PTX=0: the driver is older than what the code was built with.
cudaError_t emu_load() {
  return result(number_of("TANDEM_EMU_PTX", 1) ? cudaSuccess : cudaErrorUnsupportedPtxVersion);
}

// Dynamic shared memory that kernels have asked for.
static std::mutex kernels_lock;
static std::map<const void *, size_t> allowed_shared; // guarded by kernels_lock

cudaError_t emu_allow_shared(const void *kernel, int n_bytes) {
  int most = emu_capability() == 90 ? EMU_SHARED_BYTES_90 : EMU_SHARED_BYTES;
  if (n_bytes < 0 || n_bytes > most) return result(cudaErrorInvalidValue);
  std::lock_guard<std::mutex> hold(kernels_lock);
  allowed_shared[kernel] = static_cast<size_t>(n_bytes);
  return cudaSuccess;
}

static size_t max_shared(const void *kernel) {
  std::lock_guard<std::mutex> hold(kernels_lock);
  auto found = allowed_shared.find(kernel);
  size_t asked = found == allowed_shared.end() ? 0 : found->second;
  return std::max<size_t>(asked, EMU_PLAIN_SHARED);
}

static std::atomic<unsigned long> n_launches[2]; // outside and inside of shares

unsigned long emu_launches(bool in_share) {
  return n_launches[in_share];
}

void emu_enqueue(void *stream, std::function<void()> work) {
  n_launches[static_cast<emu_stream *>(stream)->green != nullptr]++;
  static_cast<emu_stream *>(stream)->add(std::move(work));
}

// Work other than a copy is for streams of the calling thread's device.
static bool is_current(cudaStream_t stream) {
  if (stream->device == current_device) return true;
  last_error = cudaErrorInvalidResourceHandle;
  return false;
}

bool emu_check_launch(const void *kernel, dim3 grid, dim3 block, size_t shared_bytes,
                      void *stream) {
  if (!is_current(static_cast<cudaStream_t>(stream))) return false;
  if (is_broken()) return result(cudaErrorIllegalAddress) == cudaSuccess;
  unsigned n = block.x * block.y * block.z;
  bool fine = n > 0 && n <= EMU_MAX_THREADS && block.x % EMU_WARP == 0 && grid.x > 0 &&
              grid.y > 0 && grid.z > 0 && grid.x <= 0x7fffffffu && grid.y <= 65535 &&
              grid.z <= 65535 && shared_bytes <= max_shared(kernel);
  if (!fine) last_error = cudaErrorInvalidConfiguration;
  if (fine) load_kernel(kernel, current_device);
  return fine;
}

const char *cudaGetErrorString(cudaError_t code) {
  switch (code) {
  case cudaSuccess: return "no error";
  case cudaErrorInvalidValue: return "invalid argument";
  case cudaErrorMemoryAllocation: return "out of memory";
  case cudaErrorInvalidConfiguration: return "invalid configuration argument";
  case cudaErrorNotReady: return "device not ready";
  case cudaErrorIllegalAddress: return "an illegal memory access was encountered";
  case cudaErrorPeerAccessAlreadyEnabled: return "peer access is already enabled";
  case cudaErrorNoDevice: return "no CUDA-capable device is detected";
  case cudaErrorInvalidDevice: return "invalid device ordinal";
  case cudaErrorInvalidResourceHandle: return "invalid resource handle";
  case cudaErrorUnsupportedPtxVersion:
    return "the provided PTX was compiled with an unsupported toolchain.";
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

// TANDEM_EMU_DEVICES: how many GPUs the machine has; 0: none.
int emu_n_devices() {
  return std::min<int>(static_cast<int>(number_of("TANDEM_EMU_DEVICES", 1)), MAX_DEVICES);
}

cudaError_t cudaGetDeviceCount(int *n) {
  *n = emu_n_devices();
  return result(*n > 0 ? cudaSuccess : cudaErrorNoDevice);
}

// TANDEM_EMU_MEMORY_MB: how much memory each emulated GPU has.
static size_t memory_bytes() {
  return static_cast<size_t>(number_of("TANDEM_EMU_MEMORY_MB", 4096)) << 20;
}

static const size_t total_bytes = memory_bytes();
static std::mutex memory_lock;

struct range {
  size_t n_bytes;
  int device; // PINNED, REGISTERED: host memory
};
enum { PINNED = -1, REGISTERED = -2, PAGEABLE = -3 };

// All memory that CUDA knows, by its begin; guarded by memory_lock.
static std::map<const char *, range> known;
static std::atomic<bool> have_several{false}; // devices but the first had memory

// Where n_bytes of memory are.
struct place {
  int device;
  bool fits; // they are in one piece of it
};

static place place_of(const void *ptr, size_t n_bytes) {
  const char *begin = static_cast<const char *>(ptr);
  std::lock_guard<std::mutex> hold(memory_lock);
  auto next = known.upper_bound(begin);
  if (next != known.begin()) {
    const auto &[at, found] = *std::prev(next);
    if (begin < at + found.n_bytes) return {found.device, begin + n_bytes <= at + found.n_bytes};
  }
  return {PAGEABLE, next == known.end() || begin + n_bytes <= next->first};
}

// reaches[a][b]: kernels of device a may access memory of b.
static std::atomic<bool> reaches[MAX_DEVICES][MAX_DEVICES];

static bool is_elsewhere(int device, const place &p, bool by_kernel = false) {
  if (p.device < 0 || p.device == device) return false;
  if (by_kernel && reaches[device][p.device]) return false;
  std::fprintf(stderr, "cuda_emu: a stream of device %d is given memory of device %d\n", device,
               p.device);
  return true;
}

bool emu_check_pointers(void *stream, const void *words, size_t n_bytes) {
  if (!have_several) return true;
  const int device = static_cast<cudaStream_t>(stream)->device;
  for (size_t i = 0; i + sizeof(void *) <= n_bytes; i += sizeof(void *)) {
    const void *word;
    std::memcpy(&word, static_cast<const char *>(words) + i, sizeof word);
    if (is_elsewhere(device, place_of(word, 1), true))
      return result(cudaErrorIllegalAddress) == cudaSuccess;
  }
  return true;
}

// TANDEM_EMU_SMS: how many SMs each GPU has.
int emu_n_sms() {
  return static_cast<int>(number_of("TANDEM_EMU_SMS", 2));
}

// TANDEM_EMU_NAME: the GPUs' name.
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *props, int device) {
  if (device < 0 || device >= emu_n_devices()) return result(cudaErrorInvalidDevice);
  *props = {"emulated GPU", total_bytes, emu_capability() / 10, emu_capability() % 10,
            emu_n_sms(), 0, device + 1, 0};
  const char *name = std::getenv("TANDEM_EMU_NAME");
  if (name) std::snprintf(props->name, sizeof props->name, "%s", name);
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device) {
  (void)device;
  bool is_major = attribute == cudaDevAttrComputeCapabilityMajor;
  *value = is_major ? emu_capability() / 10 : emu_capability() % 10;
  return cudaSuccess;
}

// TANDEM_EMU_PEER=1: a path between devices.
cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
  *can = number_of("TANDEM_EMU_PEER", 0) != 0 && device != peer;
  return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned) {
  if (peer < 0 || peer >= emu_n_devices() || number_of("TANDEM_EMU_PEER", 0) == 0)
    return result(cudaErrorInvalidDevice);
  const bool was = reaches[current_device][peer].exchange(true);
  return result(was ? cudaErrorPeerAccessAlreadyEnabled : cudaSuccess);
}

cudaError_t cudaGetDevice(int *device) {
  *device = current_device;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= emu_n_devices()) return result(cudaErrorInvalidDevice);
  current_device = device;
  return cudaSuccess;
}

cudaError_t cudaInitDevice(int device, unsigned device_flags, unsigned flags) {
  if (device < 0 || device >= emu_n_devices()) return result(cudaErrorInvalidDevice);
  if (flags & cudaInitDeviceFlagsAreValid)
    devices[device].is_waited_for_asleep = device_flags & cudaDeviceScheduleBlockingSync;
  return cudaSuccess;
}

// On hardware such a wait spins, and takes a processor from those who compute.
static void check_wait(bool is_asleep) {
  if (is_asleep) return;
  std::fprintf(stderr, "cuda_emu: a thread waits for a GPU without cudaDeviceScheduleBlockingSync, "
                       "or for an event without cudaEventBlockingSync\n");
  std::abort();
}

cudaError_t cudaDeviceSynchronize() {
  if (captured) return spoil();
  check_wait(devices[current_device].is_waited_for_asleep);
  await_idle(current_device);
  return result(is_broken() ? cudaErrorIllegalAddress : cudaSuccess);
}

cudaError_t cudaMemGetInfo(size_t *free_out, size_t *total_out) {
  std::lock_guard<std::mutex> hold(memory_lock);
  *free_out = total_bytes - devices[current_device].used_bytes;
  *total_out = total_bytes;
  return cudaSuccess;
}

cudaError_t cudaMalloc(void **out, size_t n_bytes) {
  if (captured) return spoil();
  if (is_broken()) return result(cudaErrorIllegalAddress);
  std::lock_guard<std::mutex> hold(memory_lock);
  *out = nullptr;
  size_t &used_bytes = devices[current_device].used_bytes;
  if (n_bytes > total_bytes - used_bytes) return result(cudaErrorMemoryAllocation);
  // Big pieces stay untouched, so that a KV pool costs nothing before it is used.
  if (posix_memalign(out, 256, n_bytes ? n_bytes : 1) != 0)
    return result(cudaErrorMemoryAllocation);
  if (n_bytes <= 1 << 20) std::memset(*out, 0xff, n_bytes);
  known[static_cast<char *>(*out)] = {n_bytes, current_device};
  if (current_device > 0) have_several = true;
  used_bytes += n_bytes;
  return cudaSuccess;
}

// Whether ptr was the begin of such memory; no longer, then.
static bool forget(const void *ptr, bool (*is_such)(int device)) {
  std::lock_guard<std::mutex> hold(memory_lock);
  auto found = known.find(static_cast<const char *>(ptr));
  if (found == known.end() || !is_such(found->second.device)) return false;
  if (found->second.device >= 0) devices[found->second.device].used_bytes -= found->second.n_bytes;
  known.erase(found);
  return true;
}

cudaError_t cudaFree(void *ptr) {
  if (captured) return spoil();
  if (!ptr) return cudaSuccess;
  emu_await_idle_inside(); // as hardware does
  if (!forget(ptr, [](int device) { return device >= 0; })) return result(cudaErrorInvalidValue);
  std::free(ptr);
  return result(is_broken() ? cudaErrorIllegalAddress : cudaSuccess);
}

// TANDEM_EMU_PIN_BYTES: how much host memory can be pinned, as where a system lets a driver pin a
// part of it. memory_lock is held.
static bool may_pin(size_t n_bytes) {
  for (const auto &one : known)
    n_bytes += one.second.device < 0 ? one.second.n_bytes : 0;
  return n_bytes <= static_cast<size_t>(number_of("TANDEM_EMU_PIN_BYTES", LONG_MAX));
}

cudaError_t cudaHostAlloc(void **out, size_t n_bytes, unsigned) {
  if (captured) return spoil();
  if (is_broken()) return result(cudaErrorIllegalAddress);
  std::lock_guard<std::mutex> hold(memory_lock);
  if (!may_pin(n_bytes) || posix_memalign(out, 256, n_bytes) != 0)
    return result(cudaErrorMemoryAllocation);
  known[static_cast<char *>(*out)] = {n_bytes, PINNED};
  return cudaSuccess;
}

cudaError_t cudaFreeHost(void *ptr) {
  if (captured) return spoil();
  if (!ptr) return cudaSuccess;
  if (!forget(ptr, [](int device) { return device == PINNED; }))
    return result(cudaErrorInvalidValue);
  std::free(ptr);
  return result(is_broken() ? cudaErrorIllegalAddress : cudaSuccess);
}

static bool is_writable(const void *ptr) {
  std::ifstream maps("/proc/self/maps");
  std::string line;
  while (std::getline(maps, line)) {
    unsigned long begin, end;
    char rights[5];
    if (std::sscanf(line.c_str(), "%lx-%lx %4s", &begin, &end, rights) != 3) continue;
    unsigned long at = reinterpret_cast<uintptr_t>(ptr);
    if (begin <= at && at < end) return rights[1] == 'w';
  }
  return false;
}

// TANDEM_EMU_PIN_GATE: a file with a byte for each registration that may go on, which takes it;
// others wait for one, or for the file to be gone.
static void pass_gate() {
  const char *path = std::getenv("TANDEM_EMU_PIN_GATE");
  struct stat gate;
  while (path && stat(path, &gate) == 0) {
    if (gate.st_size > 0 && truncate(path, gate.st_size - 1) == 0) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

// TANDEM_EMU_PIN=0: a device that registers nothing; 1: what can be written to, as on x86; 2: what
// can only be read, too.
cudaError_t cudaHostRegister(void *ptr, size_t n_bytes, unsigned flags) {
  long allowed = number_of("TANDEM_EMU_PIN", 1);
  bool only_read = flags & cudaHostRegisterReadOnly;
  if (allowed == 0 || (allowed == 1 && only_read)) return result(cudaErrorNotSupported);
  if (!ptr || n_bytes == 0 || (!only_read && !is_writable(ptr)))
    return result(cudaErrorInvalidValue);
  pass_gate();
  const place p = place_of(ptr, n_bytes);
  if (p.device != PAGEABLE || !p.fits) return result(cudaErrorHostMemoryAlreadyRegistered);
  std::lock_guard<std::mutex> hold(memory_lock);
  if (!may_pin(n_bytes)) return result(cudaErrorMemoryAllocation);
  known[static_cast<char *>(ptr)] = {n_bytes, REGISTERED};
  return cudaSuccess;
}

cudaError_t cudaHostUnregister(void *ptr) {
  bool is_known = forget(ptr, [](int device) { return device == REGISTERED; });
  return result(is_known ? cudaSuccess : cudaErrorHostMemoryNotRegistered);
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

// Priorities change no order that a program may rely on.
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *out, unsigned flags, int priority) {
  (void)flags;
  (void)priority;
  if (is_broken()) return result(cudaErrorIllegalAddress);
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
  if (stream->green) stream->green->n_streams--;
  delete stream;
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (captured) return spoil();
  check_wait(devices[stream->device].is_waited_for_asleep);
  std::unique_lock<std::mutex> hold(stream->at->lock);
  stream->at->moved.wait(hold, [&] { return stream->at->n_done == stream->at->n_queued; });
  return result(is_broken() ? cudaErrorIllegalAddress : cudaSuccess);
}

// The event may be another device's.
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  (void)flags;
  std::shared_ptr<progress> of = event->of;
  uint64_t n = event->n;
  if (of) stream->add([=] { of->wait(n); }, nullptr, true);
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned flags) {
  *out = new emu_event;
  (*out)->is_waited_for_asleep = flags & cudaEventBlockingSync;
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  if (event->device != stream->device) return result(cudaErrorInvalidResourceHandle);
  event->of = stream->at;
  event->n = stream->add([] {});
  return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  check_wait(event->is_waited_for_asleep);
  if (event->of) event->of->wait(event->n);
  return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  if (captured) return spoil();
  if (is_broken()) return result(cudaErrorIllegalAddress);
  return !event->of || event->of->is_done(event->n) ? cudaSuccess : cudaErrorNotReady;
}

static std::atomic<unsigned long> n_pageable;

cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t n_bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  (void)kind;
  if (is_broken()) return result(cudaErrorIllegalAddress);
  const place to = place_of(dst, n_bytes), from = place_of(src, n_bytes);
  if (!to.fits || !from.fits) return result(cudaErrorInvalidValue);
  // Hardware would take it through the host; nothing here asks for that.
  if (is_elsewhere(stream->device, to) || is_elsewhere(stream->device, from))
    return result(cudaErrorInvalidValue);
  const bool is_pageable = to.device == PAGEABLE || from.device == PAGEABLE;
  if (is_pageable && captured) return spoil();
  emu_device &device = devices[stream->device];
  copy_engine *engine = nullptr;
  if (from.device < 0 && to.device >= 0) engine = &device.to_device;
  if (from.device >= 0 && to.device < 0) engine = &device.to_host;
  const uint64_t n = stream->add([=] { std::memmove(dst, src, n_bytes); }, engine);
  if (!is_pageable) return cudaSuccess;
  stream->at->wait(n);
  n_pageable += from.device == PAGEABLE;
  return cudaSuccess;
}

unsigned long emu_pageable_copies() {
  return n_pageable;
}

void emu_hold_copies(int device, bool to_host) {
  (to_host ? devices[device].to_host : devices[device].to_device).take();
}

void emu_release_copies(int device, bool to_host) {
  (to_host ? devices[device].to_host : devices[device].to_device).give_back();
}

cudaError_t cudaMemsetAsync(void *dst, int value, size_t n_bytes, cudaStream_t stream) {
  if (!is_current(stream)) return last_error;
  if (is_elsewhere(stream->device, place_of(dst, n_bytes))) return result(cudaErrorInvalidValue);
  stream->add([=] { std::memset(dst, value, n_bytes); });
  return cudaSuccess;
}

// TANDEM_EMU_CAPTURE=0: a stream cannot be captured.
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  if (number_of("TANDEM_EMU_CAPTURE", 1) == 0) return result(cudaErrorNotSupported);
  if (captured) return spoil();
  captured = new emu_graph{stream->device, {}};
  is_spoiled = false;
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t *out) {
  *out = captured;
  captured = nullptr;
  if (!is_spoiled) return cudaSuccess;
  delete *out;
  *out = nullptr;
  return result(cudaErrorStreamCaptureInvalidated);
}

static std::atomic<long> n_executables{0};

// TANDEM_EMU_GRAPHS: how many graphs the GPU has memory for.
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *out, cudaGraph_t graph,
                                          unsigned long long) {
  if (n_executables >= number_of("TANDEM_EMU_GRAPHS", LONG_MAX)) {
    return result(cudaErrorMemoryAllocation);
  }
  n_executables++;
  *out = new emu_graph(*graph);
  return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
  n_executables--;
  delete graph;
  return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
  if (!is_current(stream)) return last_error;
  if (graph->device != stream->device) return result(cudaErrorInvalidValue);
  for (const auto &work : graph->work)
    stream->add(work.run, work.engine, work.waits);
  return cudaSuccess;
}

CUstream emu_stream_in(emu_green *context) {
  return new emu_stream(context);
}

// TANDEM_EMU_GREEN=0: a driver without green contexts. 1: one without their streams.
cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **out, unsigned version,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult *) {
  static const unsigned drivers[] = {12030, 12040, 13000};
  const unsigned driver = drivers[number_of("TANDEM_EMU_GREEN", 2)];
  *out = version > driver ? nullptr : emu_driver_function(symbol, version);
  return version > driver ? result(cudaErrorInvalidValue) : cudaSuccess;
}
