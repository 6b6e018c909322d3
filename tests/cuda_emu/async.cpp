// tests/cuda_emu/async.cpp - see async.h. It is not instrumented: it says itself what it touches.
#include "race.h"

#define CODE __builtin_return_address(0)

void emu_copy_async(void *to, const void *from, size_t n_bytes, bool there) {
  if (reinterpret_cast<uintptr_t>(to) % n_bytes != 0) emu_misaligned(to, n_bytes);
  if (there && reinterpret_cast<uintptr_t>(from) % n_bytes != 0) emu_misaligned(from, n_bytes);
  emu_mine().copies.push_back({to, there ? from : nullptr, n_bytes});
}

static void copy_first(size_t n, const void *code) {
  auto &copies = emu_mine().copies;
  for (size_t i = 0; i < n; i++) {
    const emu_copy &copy = copies[i];
    race_note(copy.to, copy.n_bytes, true, code);
    if (copy.from) {
      race_note(copy.from, copy.n_bytes, false, code);
      std::memcpy(copy.to, copy.from, copy.n_bytes);
    } else {
      std::memset(copy.to, 0, copy.n_bytes);
    }
  }
  copies.erase(copies.begin(), copies.begin() + static_cast<std::ptrdiff_t>(n));
}

void emu_copy_async_wait() {
  copy_first(emu_mine().copies.size(), CODE);
  emu_mine().copy_groups.clear();
}

void emu_copy_async_commit() {
  emu_mine().copy_groups.push_back(emu_mine().copies.size());
}

void emu_copy_async_wait_for(size_t n_pending) {
  auto &groups = emu_mine().copy_groups;
  if (groups.size() <= n_pending) return;
  size_t n_groups = groups.size() - n_pending, n = groups[n_groups - 1];
  copy_first(n, CODE);
  groups.erase(groups.begin(), groups.begin() + static_cast<std::ptrdiff_t>(n_groups));
  for (size_t &end : groups)
    end -= n;
}

// ---- matrices in shared memory ----------------------------------------------------------------

void emu_load_matrices(uint32_t (&r)[4], const uint16_t *row, bool turned) {
  const unsigned char *slots = emu_exchange(&row, sizeof row);
  const unsigned lane = threadIdx.x % EMU_WARP, g = lane / 4, p = lane % 4 * 2;
  const auto row_of = [slots](unsigned of) {
    const uint16_t *out;
    std::memcpy(&out, slots + of * EMU_SLOT_BYTES, sizeof out);
    return out;
  };
  for (unsigned i = 0; i < 4; i++) {
    if (!turned) {
      const uint16_t *pair = row_of(8 * i + g) + p;
      race_note(pair, sizeof r[i], false, CODE);
      std::memcpy(&r[i], pair, sizeof r[i]);
      continue;
    }
    const uint16_t *low = row_of(8 * i + p) + g, *high = row_of(8 * i + p + 1) + g;
    race_note(low, sizeof *low, false, CODE);
    race_note(high, sizeof *high, false, CODE);
    r[i] = static_cast<uint32_t>(*low) | static_cast<uint32_t>(*high) << 16;
  }
}

// Where an element of the matrix lies that a descriptor of wgmma means, swizzled by 128 bytes:
// eight elements from a column that is a multiple of eight are together.
static const unsigned char *matrix_at(uint64_t matrix, unsigned row, unsigned column) {
  auto field = [=](int shift) { return static_cast<uint32_t>(matrix >> shift & 0x3fff) << 4; };
  uint32_t address = field(0) + column / 64 * field(16) + column % 64 * 2;
  address += row / 8 * field(32) + row % 8 * 128;
  return emu_shared_at(address ^ (address >> 7 & 7) << 4);
}

// What products see of a matrix. Several lanes need the same; one of them is seen to read it
// (race.h), which takes long.
struct matrix_reader {
  uint64_t matrix;
  bool is_seen;
  const void *code;

  const unsigned char *at(unsigned row, unsigned column, size_t n_bytes) const {
    const unsigned char *from = matrix_at(matrix, row, column);
    if (is_seen) {
      if (reinterpret_cast<uintptr_t>(from) % 16 == 0) emu_read_by_product(from);
      race_note(from, n_bytes, false, code);
    }
    return from;
  }

  void row(unsigned row, void *out, size_t n_bytes) const {
    for (size_t i = 0; i < n_bytes; i += 16)
      std::memcpy(static_cast<char *>(out) + i, at(row, static_cast<unsigned>(i / 2), 16), 16);
  }
};

static bool is_seen(unsigned column) {
  return column / 8 % 8 == threadIdx.x % EMU_WARP / 4;
}

// A lane's columns are p and p + 1 of every eight, p even.
enum { MAX_COLUMNS = 256 / 4 };

static unsigned column_of(unsigned i) {
  return threadIdx.x % 4 * 2 + i / 2 * 8 + i % 2;
}

// Each sum in the order of k. From 0, and then added, or from what it is added to.
template <class C, unsigned K>
static void add_up(const emu_product &m, C (*c)[4], const C (&a)[2][K],
                   const C (&b)[K][MAX_COLUMNS], bool from_zero) {
  const unsigned n = static_cast<unsigned>(m.n) / 4;
  for (unsigned upper = 0; upper < 2; upper++) {
    C sums[MAX_COLUMNS];
    for (unsigned i = 0; i < n; i++)
      sums[i] = m.add && !from_zero ? c[i / 2][2 * upper + i % 2] : 0;
    for (unsigned k = 0; k < K; k++) {
      for (unsigned i = 0; i < n; i++)
        sums[i] += a[upper][k] * b[k][i];
    }
    for (unsigned i = 0; i < n; i++) {
      C *out = &c[i / 2][2 * upper + i % 2];
      *out = m.add && from_zero ? *out + sums[i] : sums[i];
    }
  }
}

static void load_a(const emu_product &m, const void *code, float (&a)[2][16]) {
  const unsigned lane = threadIdx.x % EMU_WARP, g = lane / 4;
  const unsigned first = threadIdx.x / EMU_WARP % 4 * 16 + g;
  uint32_t registers[4] = {};
  if (m.a_registers) std::memcpy(registers, m.a_registers, sizeof registers);
  const unsigned char *slots = emu_exchange(registers, sizeof registers);
  for (unsigned upper = 0; upper < 2; upper++) {
    uint16_t bits[16];
    if (!m.a_registers)
      matrix_reader{m.a, lane % 4 == 0, code}.row(first + 8 * upper, bits, sizeof bits);
    for (unsigned k = 0; k < 16; k++) {
      const size_t at = (g * 4 + k % 8 / 2) * EMU_SLOT_BYTES + (upper + 2 * (k / 8)) * 4 +
                        k % 2 * 2;
      if (m.a_registers) std::memcpy(&bits[k], slots + at, sizeof bits[k]);
      a[upper][k] = emu_bf16(bits[k]);
    }
  }
}

static void multiply(const emu_product &m, const void *code) {
  float a[2][16], b[16][MAX_COLUMNS];
  load_a(m, code, a);
  for (unsigned i = 0; i < static_cast<unsigned>(m.n) / 4; i++) {
    const unsigned column = column_of(i);
    const matrix_reader reader = {m.b, is_seen(column), code};
    uint16_t bits[16];
    if (!m.b_turned) reader.row(column, bits, sizeof bits);
    for (unsigned k = 0; k < 16; k++) {
      if (m.b_turned) std::memcpy(&bits[k], reader.at(k, column, sizeof bits[k]), sizeof bits[k]);
      b[k][i] = emu_bf16(bits[k]);
    }
  }
  add_up(m, m.c, a, b, true);
}

// Both factors in 8 bits, in shared memory; added up as by emu_mma_e4m3.
template <class C, class Decode>
static void multiply_bytes(const emu_product &m, C (*c)[4], const void *code, Decode decode) {
  const unsigned lane = threadIdx.x % EMU_WARP;
  const unsigned first = threadIdx.x / EMU_WARP % 4 * 16 + lane / 4;
  uint8_t bytes[32];
  C a[2][32], b[32][MAX_COLUMNS];
  for (unsigned upper = 0; upper < 2; upper++) {
    matrix_reader{m.a, lane % 4 == 0, code}.row(first + 8 * upper, bytes, sizeof bytes);
    for (unsigned k = 0; k < 32; k++)
      a[upper][k] = decode(bytes[k]);
  }
  for (unsigned i = 0; i < static_cast<unsigned>(m.n) / 4; i++) {
    const unsigned column = column_of(i);
    matrix_reader{m.b, is_seen(column), code}.row(column, bytes, sizeof bytes);
    for (unsigned k = 0; k < 32; k++)
      b[k][i] = decode(bytes[k]);
  }
  add_up(m, c, a, b, false);
}

static void multiply_as(const emu_product &m, emu_codes codes, const void *code) {
  const float *value = emu_e4m3_values();
  switch (codes) {
  case EMU_BF16: multiply(m, code); return;
  case EMU_E4M3: multiply_bytes(m, m.c, code, [=](uint8_t x) { return value[x]; }); return;
  case EMU_I8:
    multiply_bytes(m, reinterpret_cast<int32_t(*)[4]>(m.c), code,
                   [](uint8_t x) { return static_cast<int32_t>(static_cast<int8_t>(x)); });
  }
}

void emu_wgmma_begin() {
  emu_mine().has_begun = true;
  for (emu_registers &r : emu_mine().registers)
    r.look();
}

// Registers of a product: nobody has written them since the last emu_wgmma_begin.
static void use_registers(const void *at, size_t n_bytes) {
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

void emu_wgmma(const emu_product &m, emu_codes codes) {
  use_registers(m.c, static_cast<size_t>(m.n) / 2 * sizeof(float));
  if (m.a_registers) use_registers(m.a_registers, 4 * sizeof *m.a_registers);
  emu_mine().products.push_back({m, codes});
}

void emu_wgmma_commit() {
  emu_mine().groups.push_back(emu_mine().products.size());
}

void emu_wgmma_wait(size_t n_pending) {
  auto &products = emu_mine().products;
  auto &groups = emu_mine().groups;
  if (groups.size() <= n_pending) return;
  size_t n_groups = groups.size() - n_pending, n = groups[n_groups - 1];
  for (size_t i = 0; i < n; i++) {
    const auto [m, codes] = products[i];
    multiply_as(m, codes, CODE);
    for (emu_registers &r : emu_mine().registers) {
      if (r.at == m.c) r.look();
    }
  }
  products.erase(products.begin(), products.begin() + static_cast<std::ptrdiff_t>(n));
  groups.erase(groups.begin(), groups.begin() + static_cast<std::ptrdiff_t>(n_groups));
  for (size_t &end : groups)
    end -= n;
}
