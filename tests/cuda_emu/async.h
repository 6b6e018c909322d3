// tests/cuda_emu/async.h - what a thread asks for and does not wait for: it is done when the thread
// waits, and not before, so that nobody gets by with less. For emu.h to include. Kernels' files
// compile it, so that races on what it touches are found (race.h).
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

// A thread must not end before it has waited for them.
struct emu_pending {
  std::vector<emu_copy> copies;
  std::vector<size_t> copy_groups; // where each committed group of copies ends
  std::vector<std::function<void()>> products;
  std::vector<size_t> groups; // where each group of products that was committed ends
  std::vector<emu_registers> registers;
  bool has_begun = false;
};
EMU_OWN emu_pending &emu_mine();

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

uint32_t emu_shared_address(const void *p);
unsigned char *emu_shared_at(uint32_t address);

inline void emu_copy_async(void *to, const void *from, size_t n_bytes, bool there) {
  if (reinterpret_cast<uintptr_t>(to) % n_bytes != 0) emu_misaligned(to, n_bytes);
  if (there && reinterpret_cast<uintptr_t>(from) % n_bytes != 0) emu_misaligned(from, n_bytes);
  emu_mine().copies.push_back({to, there ? from : nullptr, n_bytes});
}

inline void emu_copy_word(const emu_copy &copy, size_t i) {
  const uint32_t *from = static_cast<const uint32_t *>(copy.from);
  static_cast<uint32_t *>(copy.to)[i] = from ? from[i] : 0;
}

inline void emu_copy_first(size_t n) {
  auto &copies = emu_mine().copies;
  for (size_t i = 0; i < n; i++) {
    for (size_t j = 0; j < copies[i].n_bytes / sizeof(uint32_t); j++)
      emu_copy_word(copies[i], j);
  }
  copies.erase(copies.begin(), copies.begin() + static_cast<std::ptrdiff_t>(n));
}

inline void emu_copy_async_wait() {
  emu_copy_first(emu_mine().copies.size());
  emu_mine().copy_groups.clear();
}

inline void emu_copy_async_commit() {
  emu_mine().copy_groups.push_back(emu_mine().copies.size());
}

// For all groups but the last n_pending; what was not committed stays, too.
inline void emu_copy_async_wait_for(size_t n_pending) {
  auto &groups = emu_mine().copy_groups;
  if (groups.size() <= n_pending) return;
  size_t n_groups = groups.size() - n_pending, n = groups[n_groups - 1];
  emu_copy_first(n);
  groups.erase(groups.begin(), groups.begin() + static_cast<std::ptrdiff_t>(n_groups));
  for (size_t &end : groups)
    end -= n;
}

// ---- matrices in shared memory ----------------------------------------------------------------

inline void emu_load_matrices(uint32_t (&r)[4], const uint16_t *row, bool turned) {
  const unsigned char *slots = emu_exchange(&row, sizeof row);
  unsigned lane = threadIdx.x % EMU_WARP, g = lane / 4, p = lane % 4 * 2;
  const uint16_t *rows[4][2]; // which the thread's elements lie in
  for (unsigned i = 0; i < 4; i++) {
    for (unsigned e = 0; e < 2; e++)
      std::memcpy(&rows[i][e], slots + (8 * i + (turned ? p + e : g)) * EMU_SLOT_BYTES, sizeof row);
  }
  for (unsigned i = 0; i < 4; i++) {
    uint32_t low = rows[i][0][turned ? g : p], high = rows[i][1][turned ? g : p + 1];
    r[i] = low | high << 16;
  }
}

// Where an element of the matrix lies that a descriptor of wgmma means, swizzled by 128 bytes.
inline uint32_t emu_matrix_address(uint64_t matrix, unsigned row, unsigned column) {
  auto field = [=](int shift) { return static_cast<uint32_t>(matrix >> shift & 0x3fff) << 4; };
  uint32_t address = field(0) + column / 64 * field(16) + column % 64 * 2;
  address += row / 8 * field(32) + row % 8 * 128;
  return address ^ (address >> 7 & 7) << 4;
}

inline const uint16_t *emu_matrix_at(uint64_t matrix, unsigned row, unsigned column) {
  const uint32_t address = emu_matrix_address(matrix, row, column);
  const unsigned char *at = emu_shared_at(address);
  if (address % 16 == 0) emu_read_by_product(at);
  return reinterpret_cast<const uint16_t *>(at);
}

inline float emu_bf16(uint16_t bits) {
  return __uint_as_float(static_cast<uint32_t>(bits) << 16);
}

const float *emu_e4m3_values(); // of all codes

// One product of a warpgroup: what kernels/cuda/wgmma.cuh says of its functions. b's rows are
// columns of the product or, with b_turned, steps along the sum.
struct emu_product {
  float (*c)[4]; // of INT8: of integers
  int n;
  const uint32_t *a_registers; // NULL: a is in shared memory
  uint64_t a, b;
  bool add, b_turned;
};

inline void emu_load_a(const emu_product &m, float (&a)[2][16]) {
  unsigned lane = threadIdx.x % EMU_WARP, g = lane / 4;
  unsigned warp_row = threadIdx.x / EMU_WARP % 4 * 16;
  uint32_t registers[4] = {};
  if (m.a_registers) std::memcpy(registers, m.a_registers, sizeof registers);
  const unsigned char *slots = emu_exchange(registers, sizeof registers);
  for (unsigned upper = 0; upper < 2; upper++) {
    for (unsigned k = 0; k < 16; k++) {
      uint16_t bits;
      if (m.a_registers) {
        size_t at = (g * 4 + k % 8 / 2) * EMU_SLOT_BYTES + (upper + 2 * (k / 8)) * 4 + k % 2 * 2;
        std::memcpy(&bits, slots + at, sizeof bits);
      } else {
        bits = *emu_matrix_at(m.a, warp_row + g + 8 * upper, k);
      }
      a[upper][k] = emu_bf16(bits);
    }
  }
}

// Of b's columns each lane needs a quarter. One of the eight that need the same is seen to read it
// (race.h), which takes long; the others take it from memory, by a function that is not
// instrumented.
inline bool emu_is_seen(unsigned column) {
  return column / 8 % 8 == threadIdx.x % EMU_WARP / 4;
}
void emu_take_bf16(const emu_product &m, unsigned column, uint16_t (&out)[16]);
void emu_take_bytes(const emu_product &m, unsigned column, uint8_t (&out)[32]);

inline void emu_load_b(const emu_product &m, unsigned column, uint16_t (&out)[16]) {
  if (!emu_is_seen(column)) return emu_take_bf16(m, column, out);
  for (unsigned k = 0; k < 16; k++)
    out[k] = m.b_turned ? *emu_matrix_at(m.b, k, column) : *emu_matrix_at(m.b, column, k);
}

inline void emu_multiply(const emu_product &m) {
  unsigned p = threadIdx.x % 4 * 2;
  float a[2][16];
  emu_load_a(m, a);
  for (unsigned column = p; column < static_cast<unsigned>(m.n); column += column % 2 ? 7 : 1) {
    uint16_t b[16];
    emu_load_b(m, column, b);
    float sum[2] = {0, 0};
    for (unsigned k = 0; k < 16; k++) {
      sum[0] += a[0][k] * emu_bf16(b[k]);
      sum[1] += a[1][k] * emu_bf16(b[k]);
    }
    for (unsigned upper = 0; upper < 2; upper++) {
      float *c = &m.c[column / 8][2 * upper + column % 2];
      *c = (m.add ? *c : 0) + sum[upper];
    }
  }
}

enum emu_codes { EMU_BF16, EMU_E4M3, EMU_I8 };

// Row `row` of a matrix of 32 columns in 8 bits.
inline void emu_load_bytes(uint64_t matrix, unsigned row, uint8_t (&out)[32]) {
  for (unsigned k = 0; k < 32; k += 2) {
    const uint16_t pair = *emu_matrix_at(matrix, row, k / 2);
    out[k] = static_cast<uint8_t>(pair & 0xff);
    out[k + 1] = static_cast<uint8_t>(pair >> 8);
  }
}

// Both factors in 8 bits, in shared memory; added up in order, as by emu_mma_e4m3. C: of sums.
template <class C, class Multiply>
inline void emu_multiply_bytes(const emu_product &m, C (*sums)[4], Multiply multiply) {
  const unsigned g = threadIdx.x % EMU_WARP / 4, p = threadIdx.x % 4 * 2;
  uint8_t a[2][32], b[32];
  for (unsigned upper = 0; upper < 2; upper++)
    emu_load_bytes(m.a, threadIdx.x / EMU_WARP % 4 * 16 + g + 8 * upper, a[upper]);
  for (unsigned column = p; column < static_cast<unsigned>(m.n); column += column % 2 ? 7 : 1) {
    if (emu_is_seen(column)) {
      emu_load_bytes(m.b, column, b);
    } else {
      emu_take_bytes(m, column, b);
    }
    for (unsigned upper = 0; upper < 2; upper++) {
      C *c = &sums[column / 8][2 * upper + column % 2];
      C sum = m.add ? *c : 0;
      for (unsigned k = 0; k < 32; k++)
        sum += multiply(a[upper][k], b[k]);
      *c = sum;
    }
  }
}

inline void emu_multiply_as(const emu_product &m, emu_codes codes) {
  const float *value = emu_e4m3_values();
  switch (codes) {
  case EMU_BF16: emu_multiply(m); return;
  case EMU_E4M3:
    emu_multiply_bytes(m, m.c, [=](uint8_t x, uint8_t y) { return value[x] * value[y]; });
    return;
  case EMU_I8:
    emu_multiply_bytes(m, reinterpret_cast<int32_t(*)[4]>(m.c), [](uint8_t x, uint8_t y) {
      return static_cast<int8_t>(x) * static_cast<int8_t>(y);
    });
  }
}

inline void emu_wgmma_begin() {
  emu_mine().has_begun = true;
  for (emu_registers &r : emu_mine().registers)
    r.look();
}

// Registers of a product: nobody has written them since the last emu_wgmma_begin.
inline void emu_use_registers(const void *at, size_t n_bytes) {
  if (!emu_mine().has_begun) emu_no_fence();
  for (const emu_registers &r : emu_mine().registers) {
    if (r.at != at || r.last.size() != n_bytes) continue;
    if (!r.is_unchanged()) emu_no_fence();
    return;
  }
  emu_registers r = {at, std::vector<unsigned char>(n_bytes)};
  r.look();
  emu_mine().registers.push_back(r);
}

inline void emu_finish(const emu_product &m, emu_codes codes) {
  emu_multiply_as(m, codes);
  for (emu_registers &r : emu_mine().registers) {
    if (r.at == m.c) r.look();
  }
}

inline void emu_wgmma(const emu_product &m, emu_codes codes) {
  emu_use_registers(m.c, static_cast<size_t>(m.n) / 2 * sizeof(float));
  if (m.a_registers) emu_use_registers(m.a_registers, 4 * sizeof *m.a_registers);
  emu_mine().products.push_back([=] { emu_finish(m, codes); });
}

inline void emu_wgmma_commit() {
  emu_mine().groups.push_back(emu_mine().products.size());
}

// For all groups but the last n_pending; what was not committed stays, too. Nothing is done before
// it is waited for, so that what is read too early, or written meanwhile, shows.
inline void emu_wgmma_wait(size_t n_pending) {
  auto &products = emu_mine().products;
  auto &groups = emu_mine().groups;
  if (groups.size() <= n_pending) return;
  size_t n_groups = groups.size() - n_pending, n = groups[n_groups - 1];
  for (size_t i = 0; i < n; i++)
    products[i]();
  products.erase(products.begin(), products.begin() + static_cast<std::ptrdiff_t>(n));
  groups.erase(groups.begin(), groups.begin() + static_cast<std::ptrdiff_t>(n_groups));
  for (size_t &end : groups)
    end -= n;
}
