// tests/cuda_emu/async.h - what a thread asks for and does not wait for: it is done when the thread
// waits, and not before, so that nobody gets by with less. For emu.h to include.
#pragma once

#include "emu.h"

struct emu_copy {
  void *to;
  const void *from; // NULL: zeros
  size_t n_bytes;   // 4, 8 or 16
};

// Registers that products use, and what they held when that was last in order: behind the thread's
// last emu_wgmma_begin, or behind the product that wrote them.
struct emu_registers {
  const void *at;
  std::vector<unsigned char> last;

  void look() { std::memcpy(last.data(), at, last.size()); }
  bool is_unchanged() const { return std::memcmp(last.data(), at, last.size()) == 0; }
};

// One product of a warpgroup: what kernels/cuda/wgmma.cuh says of its functions. b's rows are
// columns of the product or, with b_turned, steps along the sum.
struct emu_product {
  float (*c)[4]; // of INT8: of integers
  int n;
  const uint32_t *a_registers; // NULL: a is in shared memory
  uint64_t a, b;
  bool add, b_turned;
};

enum emu_codes { EMU_BF16, EMU_E4M3, EMU_I8 };

// A thread must not end before it has waited for them.
struct emu_pending {
  std::vector<emu_copy> copies;
  std::vector<size_t> copy_groups; // where each committed group of copies ends
  std::vector<std::pair<emu_product, emu_codes>> products;
  std::vector<size_t> groups; // where each group of products that was committed ends
  std::vector<emu_registers> registers;
  bool has_begun = false;
};
EMU_OWN emu_pending &emu_mine();

uint32_t emu_shared_address(const void *p);
unsigned char *emu_shared_at(uint32_t address);

// there: false for zeros.
void emu_copy_async(void *to, const void *from, size_t n_bytes, bool there);
void emu_copy_async_wait();
void emu_copy_async_commit();
// For all groups but the last n_pending; what was not committed stays, too.
void emu_copy_async_wait_for(size_t n_pending);

// What the thread has written to shared memory may be read by products behind the next barrier.
void emu_wgmma_publish();
// A product reads 16 bytes of shared memory, not through caches that threads write to: whoever
// wrote them must have published them before a barrier (race.h).
void emu_read_by_product(const void *at);
[[noreturn]] void emu_no_fence();

// A barrier in shared memory (mbarrier), of which an arrival is a warp's: what its lanes did
// before, up to a __syncwarp, is seen by those that have waited for the phase. emu_phase_wait
// returns when the last phase of that parity has completed; before the first one, odd phases have.
void emu_phase_open(const uint64_t *barrier, uint32_t n_arrivals);
void emu_phase_arrive(const uint64_t *barrier);
void emu_phase_wait(const uint64_t *barrier, uint32_t phase);

void emu_load_matrices(uint32_t (&r)[4], const uint16_t *row, bool turned);

inline float emu_bf16(uint16_t bits) {
  return __uint_as_float(static_cast<uint32_t>(bits) << 16);
}

const float *emu_e4m3_values(); // of all codes

void emu_wgmma_begin();
void emu_wgmma(const emu_product &m, emu_codes codes);
void emu_wgmma_commit();
// As for copies. Nothing is done before it is waited for, so that what is read too early, or
// written meanwhile, shows.
void emu_wgmma_wait(size_t n_pending);
