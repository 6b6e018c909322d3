// tests/cuda_emu/race.cpp - see race.h. Shared memory, static and dynamic, lies in this library's
// thread-local memory, each pair of bytes of which has a record of who touched it last; the second
// byte has one of its own while others have touched it than the first.
#include "race.h"

#include <cstdio>
#include <cstdlib>
#include <dlfcn.h>
#include <link.h>
#include <memory>
#include <vector>

struct race_record {
  race_clock write; // the last ones; n_barriers 0: none
  race_time read;
  bool many_lanes, many_warps; // since the last barrier others have read it as well
  bool is_split;               // the second byte has its own
};

// Constant at first, so that no access to it asks whether it is.
static __thread race_view view;

static int find_memory(dl_phdr_info *info, size_t, void *out) {
  uintptr_t here = reinterpret_cast<uintptr_t>(find_memory);
  uintptr_t memory = reinterpret_cast<uintptr_t>(info->dlpi_tls_data);
  size_t n_bytes = 0;
  bool is_ours = false;
  for (int i = 0; i < info->dlpi_phnum; i++) {
    const auto &part = info->dlpi_phdr[i];
    if (part.p_type == PT_TLS) n_bytes = part.p_memsz;
    uintptr_t begin = info->dlpi_addr + part.p_vaddr;
    is_ours |= part.p_type == PT_LOAD && here - begin < part.p_memsz;
  }
  if (!is_ours) return 0;
  n_bytes += n_bytes % 2;
  void *records = std::calloc(n_bytes, sizeof(race_record)); // most of it is never touched
  if (!records) std::abort();
  static_cast<std::unique_ptr<void, decltype(&std::free)> *>(out)->reset(records);
  view = {nullptr, memory, n_bytes, static_cast<race_record *>(records), nullptr, false};
  return 1;
}

static bool is_of_warp(const race_time &a, const race_time &b) {
  return a.thread / EMU_WARP == b.thread / EMU_WARP;
}

// No barrier lies between then, another thread's, and now.
static bool is_unordered(const race_time &then, const race_clock &now) {
  if (then.n_barriers != now.n_barriers || then.thread == now.thread) return false;
  if (is_of_warp(then, now)) return then.n_warp_barriers == now.n_warp_barriers;
  return !view.has_phases || !emu_has_seen(now, then.thread / EMU_WARP, then.n_arrivals);
}

static race_read *reads_at(size_t warp, size_t at) {
  return &view.reads[warp * (view.n_bytes / RACE_GRAIN + 1) + at / RACE_GRAIN];
}

// Another warp has read what lies at `at`, and no barrier is between.
static bool races_with_warps(size_t at, const race_clock &now) {
  if (!view.has_phases) return true;
  for (unsigned warp = 0; warp < EMU_MAX_WARPS; warp++) {
    const race_read &read = *reads_at(warp, at);
    if (warp != now.thread / EMU_WARP && read.n_barriers == now.n_barriers &&
        !emu_has_seen(now, warp, read.n_arrivals))
      return true;
  }
  return false;
}

static bool races_with_reads(const race_record &r, size_t at, const race_clock &now) {
  if (r.read.n_barriers != now.n_barriers) return false;
  if (is_unordered(r.read, now) || (r.many_warps && races_with_warps(at, now))) return true;
  return r.many_lanes && is_of_warp(r.read, now) && r.read.n_warp_barriers == now.n_warp_barriers;
}

static void note_read(race_record &r, size_t at, const race_clock &now) {
  if (view.has_phases) *reads_at(now.thread / EMU_WARP, at) = {now.n_barriers, now.n_arrivals};
  if (r.read.n_barriers != now.n_barriers) {
    r.read = now;
    r.many_lanes = r.many_warps = false;
  } else if (!is_of_warp(r.read, now)) {
    r.many_warps = true;
  } else if (r.read.n_warp_barriers != now.n_warp_barriers) {
    r.read = now;
    r.many_lanes = false;
  } else {
    r.many_lanes |= r.read.thread != now.thread;
  }
}

[[noreturn]] static void report(const race_time &then, const race_time &now, const void *code) {
  Dl_info where = {};
  dladdr(code, &where);
  std::fprintf(
      stderr,
      "cuda_emu: threads %u (or more) and %u of block %u, %u, %u touch the same shared memory, one "
      "of them writes, and no barrier is between them: %s+%#zx\n",
      then.thread, now.thread, blockIdx.x, blockIdx.y, blockIdx.z,
      where.dli_fname ? where.dli_fname : "?",
      static_cast<size_t>(static_cast<const char *>(code) -
                          static_cast<const char *>(where.dli_fbase)));
  std::abort();
}

static inline void note_one(race_record &r, size_t at, bool is_write, const race_clock &now,
                            const void *code) {
  if (is_unordered(r.write, now)) report(r.write, now, code);
  if (is_write && races_with_reads(r, at, now)) report(r.read, now, code);
  if (is_write) {
    r.write = now;
  } else {
    note_read(r, at, now);
  }
}

// Bytes of a pair that have just been touched together need one record again, if what else is known
// of them is the same or can race with nothing any more.
static bool is_alike(const race_record &a, const race_record &b, bool is_write,
                     uint32_t n_barriers) {
  if (is_write) return a.read.n_barriers != n_barriers && b.read.n_barriers != n_barriers;
  return a.write.n_barriers != n_barriers && b.write.n_barriers != n_barriers &&
         std::memcmp(&a.read, &b.read, sizeof a.read) == 0 && a.many_lanes == b.many_lanes &&
         a.many_warps == b.many_warps;
}

// A pair of which not both bytes are touched, or have not been.
static void note_split(const race_view &v, size_t at, size_t end, bool is_write, const void *code) {
  race_record &r = v.records[at / 2], &second = v.records[v.n_bytes / 2 + at / 2];
  if (!r.is_split) second = r;
  if (at % 2 == 0) note_one(r, at, is_write, *v.now, code);
  if (end > (at | 1)) note_one(second, at | 1, is_write, *v.now, code);
  r.is_split = at % 2 || end <= (at | 1) || !is_alike(r, second, is_write, v.now->n_barriers);
}

static void note(const race_view &v, size_t at, size_t n_bytes, bool is_write, const void *code) {
  const size_t end = at + n_bytes < v.n_bytes ? at + n_bytes : v.n_bytes;
  for (; at < end; at = (at | 1) + 1) {
    race_record &r = v.records[at / 2];
    if (r.is_split || at % 2 || end - at < 2) {
      note_split(v, at, end, is_write, code);
    } else {
      note_one(r, at, is_write, *v.now, code);
    }
  }
}

void race_keep_reads() {
  static thread_local std::vector<race_read> reads;
  if (reads.empty()) reads.resize(EMU_MAX_WARPS * (view.n_bytes / RACE_GRAIN + 1));
  view.reads = reads.data();
  view.has_phases = true;
}

race_view *race_begin() {
  static thread_local std::unique_ptr<void, decltype(&std::free)> records(nullptr, std::free);
  if (EMU_RACES && !records) dl_iterate_phdr(find_memory, &records);
  return &view;
}

void emu_read_by_product(const void *memory) {
  uintptr_t at = reinterpret_cast<uintptr_t>(memory) - view.begin;
  if (at >= view.n_bytes) return;
  const race_clock &write = view.records[at / 2].write;
  if (write.n_barriers == 0 || emu_is_published(write)) return;
  std::fprintf(
      stderr,
      "cuda_emu: a product of block %u, %u, %u reads shared memory that thread %u wrote and "
      "has not published before a barrier (wgmma_publish)\n",
      blockIdx.x, blockIdx.y, blockIdx.z, write.thread);
  std::abort();
}

// Most accesses are to the thread's own stack, which is told without a look at anything.
static inline void touch(const void *memory, size_t n_bytes, bool is_write, const void *code) {
  enum { FRAME_BYTES = 4096 };
  uintptr_t at = reinterpret_cast<uintptr_t>(memory);
  if (at - reinterpret_cast<uintptr_t>(__builtin_frame_address(0)) < FRAME_BYTES) return;
  const race_view &v = view;
  if (at - v.begin < v.n_bytes && v.now) note(v, at - v.begin, n_bytes, is_write, code);
}

void race_note(const void *at, size_t n_bytes, bool is_write, const void *code) {
  if (EMU_RACES) touch(at, n_bytes, is_write, code);
}

// ---- what the compiler calls
// ----------------------------------------------------------------------

#define CALLED(name, ...)                                                                          \
  extern "C" void name(__VA_ARGS__);                                                               \
  extern "C" void name(__VA_ARGS__)
#define CODE __builtin_return_address(0)

CALLED(__tsan_init) {}
CALLED(__tsan_func_entry, void *) {}
CALLED(__tsan_func_exit) {}
CALLED(__tsan_vptr_read, void **) {}
CALLED(__tsan_vptr_update, void **, void *) {}
CALLED(__tsan_read_range, void *at, size_t n) {
  touch(at, n, false, CODE);
}
CALLED(__tsan_write_range, void *at, size_t n) {
  touch(at, n, true, CODE);
}

#define ACCESSES(n)                                                                                \
  CALLED(__tsan_read##n, void *at) {                                                               \
    touch(at, n, false, CODE);                                                                     \
  }                                                                                                \
  CALLED(__tsan_write##n, void *at) {                                                              \
    touch(at, n, true, CODE);                                                                      \
  }                                                                                                \
  CALLED(__tsan_unaligned_read##n, void *at) {                                                     \
    touch(at, n, false, CODE);                                                                     \
  }                                                                                                \
  CALLED(__tsan_unaligned_write##n, void *at) {                                                    \
    touch(at, n, true, CODE);                                                                      \
  }
ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)

// Newer compilers' for what the C library's would do.
extern "C" void *__tsan_memset(void *to, int value, size_t n);
extern "C" void *__tsan_memset(void *to, int value, size_t n) {
  touch(to, n, true, CODE);
  return std::memset(to, value, n);
}

extern "C" void *__tsan_memcpy(void *to, const void *from, size_t n);
extern "C" void *__tsan_memcpy(void *to, const void *from, size_t n) {
  touch(from, n, false, CODE);
  touch(to, n, true, CODE);
  return std::memcpy(to, from, n);
}
