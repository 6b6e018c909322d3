// tests/cuda_emu/fibers.cpp - a block's threads as fibers, and how they wait for one another.
#include "race.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <sys/mman.h>
#include <vector>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

// The stacks of a host thread's fibers lie side by side, from a multiple of REGION_BYTES on; each
// ends with a pointer to its fiber. How far apart they are is no multiple of what caches repeat
// their sets by, or the same frames of all fibers would share a few lines.
enum : size_t { STACK_BYTES = (128 << 10) + 17 * 64, REGION_BYTES = 256 << 20 };
static_assert(STACK_BYTES * EMU_MAX_THREADS <= REGION_BYTES, "");

#if defined(__x86_64__)
// Leaves one stack for another: the registers a callee must keep, and where to go on.
extern "C" void emu_switch(void **save, void *to);
asm(R"(
.text
.globl emu_switch
.hidden emu_switch
.type emu_switch, @function
emu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emu_switch, .-emu_switch
)");
#endif

// A fiber's first frames never return, so AddressSanitizer still guards what lay around their
// variables, for whoever has the memory next.
static void forget_frames(char *stack) {
#if defined(__SANITIZE_ADDRESS__)
  enum { FRAMES_BYTES = 2 << 10 };
  __asan_unpoison_memory_region(stack + STACK_BYTES - FRAMES_BYTES, FRAMES_BYTES);
#else
  (void)stack;
#endif
}

struct rendezvous {
  unsigned n_live = 0, n_arrived = 0;
  uint64_t n_passed = 0; // completed meetings

  void release() {
    n_arrived = 0;
    n_passed++;
  }
};

using emu_seen = std::array<uint32_t, EMU_MAX_WARPS>;

struct warp_state {
  rendezvous meet;
  uint32_t n_arrivals; // at barriers in shared memory
  emu_seen seen;       // of each warp, how many arrivals lie before what this one does
  alignas(16) unsigned char slots[2][EMU_WARP * EMU_SLOT_BYTES];
};

// A barrier in shared memory.
struct phase_barrier {
  const uint64_t *at;
  rendezvous meet;
  emu_seen gathered, told; // what those that arrived had seen, in this phase and the ones before
};

struct block_state;
struct fiber {
  emu_place place;
  block_state *block;
  const rendezvous *waits_at; // until n_waited have passed; NULL: it can run
  uint64_t n_waited;
  race_clock clock;
  uint32_t n_published; // clock.n_publishes at the last barrier
  emu_pending pending;
  warp_state *warp;
  bool done;
#if defined(__x86_64__)
  void *stack_pointer;
#else
  ucontext_t context;
#endif
};

// The block a host thread is running. Stacks are kept from block to block.
struct block_state {
  std::vector<fiber> fibers;
  std::vector<warp_state> warps;
  char *const stacks = make_stacks();
  size_t n_stacks = 0; // that have been used
  rendezvous meet;
  std::deque<phase_barrier> phases;
  fiber *current = nullptr;
  size_t first = 0,
         n_turns = 0;        // of the warp that runs; lanes that have had their turn in this round
  size_t n_left = 0;         // fibers that have not ended
  bool backwards = false;    // from the last thread to the first
  race_view *view = nullptr; // the host thread's
  const std::function<void()> *body = nullptr;
  uint64_t n_moves = 0; // meetings and ends: without any in a round, the block is stuck
  uint32_t n_barriers = 1;
  uint32_t first_barrier = 1; // of the block
  alignas(1024) unsigned char shared[EMU_SHARED_BYTES_90];
#if defined(__x86_64__)
  void *scheduler;
#else
  ucontext_t scheduler;
#endif
#if defined(__SANITIZE_ADDRESS__)
  const void *scheduler_stack = nullptr;
  size_t scheduler_stack_bytes = 0;
#endif

  ~block_state() {
    for (size_t i = 0; i < n_stacks; i++)
      forget_frames(stack_of(i));
    munmap(stacks, STACK_BYTES * EMU_MAX_THREADS);
  }

  char *stack_of(size_t i) const {
    return stacks + i * STACK_BYTES;
  }

  static char *make_stacks() {
    const int protection = PROT_READ | PROT_WRITE;
    const int kind = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void *all = mmap(nullptr, 2 * REGION_BYTES, protection, kind, -1, 0);
    if (all == MAP_FAILED) abort();
    char *begin = static_cast<char *>(all);
    const size_t before = REGION_BYTES - reinterpret_cast<uintptr_t>(begin) % REGION_BYTES;
    const size_t end = before + STACK_BYTES * EMU_MAX_THREADS;
    munmap(begin, before);
    munmap(begin + end, 2 * REGION_BYTES - end);
    return begin + before;
  }
};

// The one that runs. By its stack: thread-local memory of a library takes a call to find.
static fiber *here() {
  const uintptr_t frame = reinterpret_cast<uintptr_t>(__builtin_frame_address(0));
  const uintptr_t stacks = frame / REGION_BYTES * REGION_BYTES;
  const uintptr_t end = stacks + ((frame - stacks) / STACK_BYTES + 1) * STACK_BYTES;
  return reinterpret_cast<fiber *const *>(end)[-1];
}

const emu_place &emu_here() {
  return here()->place;
}

unsigned char *emu_dynamic_shared() {
  return here()->block->shared;
}

uint32_t emu_shared_address(const void *p) {
  return static_cast<uint32_t>(static_cast<const unsigned char *>(p) - emu_dynamic_shared());
}

unsigned char *emu_shared_at(uint32_t address) {
  return emu_dynamic_shared() + address;
}

emu_pending &emu_mine() {
  return here()->pending;
}

static bool can_run(fiber *f) {
  if (f->done || (f->waits_at && f->waits_at->n_passed == f->n_waited)) return false;
  f->waits_at = nullptr;
  return true;
}

// The warp's next thread that can run in this round; NULL: none.
static fiber *next_turn(block_state *b) {
  while (b->n_turns < EMU_WARP) {
    const size_t lane = b->n_turns++;
    fiber *f = &b->fibers[b->first + (b->backwards ? EMU_WARP - 1 - lane : lane)];
    if (can_run(f)) return f;
  }
  return nullptr;
}

// From a fiber, NULL: the scheduler, to another. for_good: nobody comes back.
static void go(block_state *b, fiber *from, fiber *to, bool for_good) {
  if (to) {
    b->current = to;
    b->view->now = &to->clock;
  }
#if defined(__SANITIZE_ADDRESS__)
  void *fake = nullptr;
  const void *stack = to ? b->stack_of(static_cast<size_t>(to - b->fibers.data()))
                         : b->scheduler_stack;
  __sanitizer_start_switch_fiber(for_good ? nullptr : &fake, stack,
                                 to ? STACK_BYTES : b->scheduler_stack_bytes);
#else
  (void)for_good;
#endif
#if defined(__x86_64__)
  emu_switch(from ? &from->stack_pointer : &b->scheduler, to ? to->stack_pointer : b->scheduler);
#else
  swapcontext(from ? &from->context : &b->scheduler, to ? &to->context : &b->scheduler);
#endif
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
}

static void leave(block_state *b, bool for_good) {
  fiber *f = b->current;
  go(b, f, next_turn(b), for_good);
}

static void meet(block_state *b, fiber *f, rendezvous *r) {
  f->n_waited = r->n_passed;
  if (++r->n_arrived == r->n_live) {
    r->release();
    b->n_moves++;
    return;
  }
  f->waits_at = r;
  leave(b, false);
}

static void depart(rendezvous *r) {
  if (--r->n_live > 0 && r->n_arrived == r->n_live) r->release();
}

bool emu_is_published(const race_clock &write) {
  const block_state *b = here()->block;
  if (write.n_barriers < b->first_barrier) return true; // in another block
  return b->fibers[write.thread].n_published > write.n_publishes;
}

void emu_wgmma_publish() {
  here()->clock.n_publishes++;
}

void emu_no_fence() {
  std::fprintf(stderr,
               "cuda_emu: registers of a product were written and no wgmma_begin came after "
               "that, or none at all\n");
  abort();
}

// ---- barriers in shared memory ------------------------------------------------------------------

static phase_barrier &phase_of(const uint64_t *at) {
  for (phase_barrier &p : here()->block->phases)
    if (p.at == at) return p;
  std::fprintf(stderr, "cuda_emu: a barrier in shared memory is not open\n");
  abort();
}

static void join(emu_seen &to, const emu_seen &from) {
  for (size_t i = 0; i < to.size(); i++)
    to[i] = std::max(to[i], from[i]);
}

void emu_phase_open(const uint64_t *barrier, uint32_t n_arrivals) {
  phase_barrier p = {barrier, rendezvous(), {}, {}};
  p.meet.n_live = n_arrivals;
  here()->block->phases.push_back(p);
  race_keep_reads();
}

void emu_phase_arrive(const uint64_t *barrier) {
  block_state *b = here()->block;
  phase_barrier &p = phase_of(barrier);
  warp_state *warp = here()->warp;
  const size_t idx = static_cast<size_t>(warp - b->warps.data());
  warp->seen[idx] = ++warp->n_arrivals;
  for (size_t lane = 0; lane < EMU_WARP; lane++) {
    fiber &f = b->fibers[idx * EMU_WARP + lane];
    f.clock.n_arrivals = warp->n_arrivals;
    f.n_published = f.clock.n_publishes;
  }
  join(p.gathered, warp->seen);
  if (++p.meet.n_arrived < p.meet.n_live) return;
  p.told = p.gathered;
  p.meet.release();
  b->n_moves++;
}

void emu_phase_wait(const uint64_t *barrier, uint32_t phase) {
  fiber *f = here();
  phase_barrier &p = phase_of(barrier);
  while (p.meet.n_passed % 2 == phase % 2) {
    f->waits_at = &p.meet;
    f->n_waited = p.meet.n_passed;
    leave(f->block, false);
  }
  join(f->warp->seen, p.told);
}

bool emu_has_seen(const race_clock &now, unsigned warp, uint32_t n_arrivals) {
  return here()->block->warps[now.thread / EMU_WARP].seen[warp] > n_arrivals;
}

void __syncthreads() {
  fiber *f = here();
  block_state *b = f->block;
  race_clock *clock = &f->clock;
  f->n_published = clock->n_publishes;
  meet(b, f, &b->meet);
  clock->n_barriers++;
  clock->n_warp_barriers = 0;
  if (b->n_barriers < clock->n_barriers) b->n_barriers = clock->n_barriers;
}

void __syncwarp() {
  fiber *f = here();
  meet(f->block, f, &f->warp->meet);
  f->clock.n_warp_barriers++;
}

// One fiber at a time, and not instrumented, so that no two of them race.
unsigned atomicAdd(unsigned *at, unsigned v) {
  unsigned before = *at;
  *at += v;
  return before;
}

const unsigned char *emu_exchange(const void *mine, size_t n_bytes) {
  fiber *f = here();
  warp_state *warp = f->warp;
  if (warp->meet.n_live < EMU_WARP) {
    std::fprintf(stderr, "cuda_emu: a warp shuffles or multiplies without all of its lanes\n");
    abort();
  }
  unsigned char *slots = warp->slots[warp->meet.n_passed % 2];
  std::memcpy(slots + f->place.thread.x % EMU_WARP * EMU_SLOT_BYTES, mine, n_bytes);
  meet(f->block, f, &warp->meet);
  return slots;
}

static void fiber_main() {
  fiber *f = here();
  block_state *b = f->block;
#if defined(__SANITIZE_ADDRESS__)
  const bool is_first = !b->scheduler_stack; // the scheduler's call, then
  __sanitizer_finish_switch_fiber(nullptr, is_first ? &b->scheduler_stack : nullptr,
                                  is_first ? &b->scheduler_stack_bytes : nullptr);
#endif
  (*b->body)();
  if (!f->pending.copies.empty() || !f->pending.products.empty()) {
    std::fprintf(stderr, "cuda_emu: a thread ends and has not waited for what it asked for\n");
    abort();
  }
  f->done = true;
  b->n_left--;
  b->n_moves++;
  depart(&f->warp->meet);
  depart(&b->meet);
  leave(b, true);
  abort();
}

static void prepare(block_state *b, size_t i) {
  fiber *f = &b->fibers[i];
  f->done = false;
  f->waits_at = nullptr;
  f->pending.registers.clear();
  f->pending.has_begun = false;
  forget_frames(b->stack_of(i));
  void **top = reinterpret_cast<void **>(b->stack_of(i) + STACK_BYTES);
  *--top = f;
#if defined(__x86_64__)
  // As if it had called emu_switch just before fiber_main: six registers and a place to return to,
  // with the stack aligned as at a function's entry.
  *--top = reinterpret_cast<void *>(fiber_main);
  for (int r = 0; r < 6; r++)
    *--top = nullptr;
  f->stack_pointer = top;
#else
  getcontext(&f->context);
  f->context.uc_stack.ss_sp = b->stack_of(i);
  f->context.uc_stack.ss_size = STACK_BYTES - 16;
  f->context.uc_link = nullptr;
  makecontext(&f->context, fiber_main, 0);
#endif
}

// Runs the warp that begins at fiber `first` until each of its threads has ended or waits for other
// warps, round by round, in which one thread hands over to the next.
static void run_warp(block_state *b, size_t first) {
  b->first = first;
  for (uint64_t before = ~b->n_moves; b->n_moves != before;) {
    before = b->n_moves;
    b->n_turns = 0;
    if (fiber *f = next_turn(b)) go(b, nullptr, f, false);
  }
}

static void run_block(block_state *b) {
  const size_t n = b->n_left = b->fibers.size();
  b->meet = rendezvous();
  b->meet.n_live = static_cast<unsigned>(n);
  b->phases.clear();
  b->view->has_phases = false;
  for (warp_state &warp : b->warps) {
    warp.meet = rendezvous();
    warp.meet.n_live = EMU_WARP;
    warp.n_arrivals = 0;
    warp.seen = {};
  }
  b->first_barrier = ++b->n_barriers;
  for (size_t i = 0; i < n; i++) {
    prepare(b, i);
    b->fibers[i].clock = {{b->n_barriers, 0, static_cast<uint16_t>(i), 0}, 0};
    b->fibers[i].n_published = 0;
  }
  while (b->n_left > 0) {
    const uint64_t before = b->n_moves;
    for (size_t j = 0; j < n; j += EMU_WARP)
      run_warp(b, b->backwards ? n - j - EMU_WARP : j);
    if (b->n_moves == before) {
      std::fprintf(stderr, "cuda_emu: a block's threads wait for one another for ever\n");
      abort();
    }
  }
}

static void make_fibers(block_state *b, dim3 grid, dim3 dim) {
  size_t n = static_cast<size_t>(dim.x) * dim.y * dim.z;
  b->fibers.resize(n);
  b->warps.resize(n / EMU_WARP);
  b->n_stacks = std::max(b->n_stacks, n);
  for (size_t i = 0; i < n; i++) {
    unsigned x = static_cast<unsigned>(i);
    b->fibers[i].place = {dim3(x % dim.x, x / dim.x % dim.y, x / dim.x / dim.y), dim3(), dim, grid};
    b->fibers[i].block = b;
    b->fibers[i].warp = &b->warps[i / EMU_WARP];
  }
}

void emu_run(dim3 grid, dim3 dim, size_t shared_bytes, const std::function<void()> &body) {
  static thread_local block_state state;
  block_state *b = &state;
  b->body = &body;
  b->view = race_begin();
  make_fibers(b, grid, dim);
  size_t n_blocks = static_cast<size_t>(grid.x) * grid.y * grid.z;
  for (size_t i = 0; i < n_blocks; i++) {
    dim3 at(static_cast<unsigned>(i % grid.x), static_cast<unsigned>(i / grid.x % grid.y),
            static_cast<unsigned>(i / grid.x / grid.y));
    for (fiber &f : b->fibers)
      f.place.block = at;
    std::memset(b->shared, 0xff, shared_bytes);
    b->backwards = i % 2 == 1;
    run_block(b);
  }
  b->current = nullptr;
  b->view->now = nullptr;
}

void emu_misaligned(const void *at, size_t n_bytes) {
  std::fprintf(stderr, "cuda_emu: %zu bytes are loaded at once from %p\n", n_bytes, at);
  abort();
}
