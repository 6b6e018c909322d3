// kernels/cuda/linear_wgmma.cu - y = W x for many tokens on the tensor cores of sm_90a.
// A block computes 256 rows of W by 64 or 128 tokens. Each of its two warpgroups that multiply has
// two units of 64 rows: it converts their weights to BF16 in registers, from where tensor cores
// take them, 16 columns at a time and up to four such products under way, while the other
// warpgroup's are multiplied, too. Codes of up to 8 bits are exact in BF16, and so are those of FP4
// times their groups' scales. Other scales multiply sums over their columns, 128 at most, in FP32.
#include "kernels/cuda/dequant8.cuh"
#include "kernels/cuda/linear_ring.cuh"

enum {
  K = 16, // columns of a product
  UNITS = 2,
  UNIT_ROWS = 64,
  REGISTERS = 224, // of a thread that multiplies
  MOST_STAGES = 4,
  STAGES_BYTES = 224 << 10
};

template <int READ> constexpr int STEP = BITS<READ> == 16 ? PANEL : 2 * PANEL;
template <int READ> constexpr int CHUNKS = STEP<READ> *BITS<READ> / 8 / COPY; // of a row's codes

// Columns of FP4 that share a scale, and words of four such scales in a row's step.
template <int READ> constexpr int FP4_COLUMNS = READ == TD_CU_READ_NVFP4 ? 16 : 32;
template <int READ> constexpr int FP4_WORDS = STEP<READ> / FP4_COLUMNS<READ> / 4;

// SPAN: 0 where no scales are left for sums, else the fewest columns of one: 32 or a step.
template <int READ, int SPAN> struct step_scales {
  float scale[STEP<READ> / SPAN][RING_ROWS];
  uint8_t zero[READ == TD_CU_READ_I4 ? STEP<READ> / SPAN : 1][RING_ROWS];
};
template <int READ> struct step_scales<READ, 0> { uint32_t words[RING_ROWS][FP4_WORDS<READ>]; };
template <> struct step_scales<TD_CU_READ_BF16, 0> {};

template <int READ, int SPAN, int TOKENS> struct alignas(1024) linear_stage {
  uint16_t x[STEP<READ> / PANEL][TOKENS][PANEL];
  uint4 codes[RING_ROWS * CHUNKS<READ>];
  step_scales<READ, SPAN> scales;
};

template <int READ, int SPAN, int TOKENS>
constexpr int STAGES = sizeof(linear_stage<READ, SPAN, TOKENS>) * MOST_STAGES <= STAGES_BYTES
                           ? MOST_STAGES
                           : MOST_STAGES - 1;

template <int READ, int SPAN, int TOKENS> struct linear_stages {
  enum { N = STAGES<READ, SPAN, TOKENS> };
  linear_stage<READ, SPAN, TOKENS> stage[N];
  // of warps that copy:
  token_rows<TOKENS> rows[N];
  uint32_t first_scale[N][RING_ROWS];
  linear_ring<N> ring;
};

// ---- copies -------------------------------------------------------------------------------------

// What rows of eight weights at a time are aligned to.
template <int READ> using code_unit = decltype(raw8<READ>::v);

// Where the scales of a tile's rows begin, a table a warp, of which each lane has its own rows.
// Rows past the last one repeat it, and columns the last one; their sums are not stored.
__device__ static void find_scales(const td_weight &w, uint32_t row0, uint32_t last,
                                   uint32_t (&first)[RING_ROWS]) {
  const uint32_t n_groups = weight_groups(w), each = w.scale_rows;
#pragma unroll 1
  for (uint32_t r = threadIdx.x % WARP; r < RING_ROWS; r += WARP)
    first[r] = at_most(row0 + r, last) / each * n_groups;
}

// Rows of a lane whose scales are loaded together, through registers.
enum { BATCH = 4 };

// Four bytes from byte i on, of n. Unit: what rows are aligned to.
template <class Unit>
__device__ inline uint32_t word_at(const uint8_t *row, uint32_t i, uint32_t n) {
  uint32_t word = 0;
#pragma unroll
  for (uint32_t b = 0; b < 4; b += sizeof(Unit)) {
    const uint8_t *at = row + at_most(i + b, n - static_cast<uint32_t>(sizeof(Unit)));
    word |= static_cast<uint32_t>(__ldg(reinterpret_cast<const Unit *>(at))) << 8 * b;
  }
  return word;
}

template <int READ, class Unit>
__device__ static void copy_words(const td_weight &w, const uint32_t (&first)[RING_ROWS],
                                  uint32_t k, step_scales<READ, 0> &to) {
  enum { N = FP4_WORDS<READ> };
  const uint32_t n_groups = weight_groups(w), group = k / FP4_COLUMNS<READ>;
  const uint8_t *scales = static_cast<const uint8_t *>(w.scale);
#pragma unroll 1
  for (uint32_t r = threadIdx.x % WARP; r < RING_ROWS; r += BATCH * WARP) {
    uint32_t words[BATCH][N];
#pragma unroll
    for (uint32_t e = 0; e < BATCH * N; e++)
      words[e / N][e % N] = word_at<Unit>(scales + first[r + e / N * WARP], group + e % N * 4,
                                          n_groups);
#pragma unroll
    for (uint32_t e = 0; e < BATCH * N; e++)
      to.words[r + e / N * WARP][e % N] = words[e / N][e % N];
  }
}

// INT4's scales and zero points of a group of columns, the i-th of the step.
template <int SPAN>
__device__ static void copy_i4_scales(const td_weight &w, const uint32_t (&first)[RING_ROWS],
                                      uint32_t row0, uint32_t last, uint32_t i, uint32_t group,
                                      step_scales<TD_CU_READ_I4, SPAN> &to) {
  const char *scales = static_cast<const char *>(w.scale);
  const uint32_t n_bytes = scale_bytes<TD_CU_READ_I4>(w.scale_dtype), n_groups = weight_groups(w);
#pragma unroll 1
  for (uint32_t r = threadIdx.x % WARP; r < RING_ROWS; r += BATCH * WARP) {
    uint32_t bits[BATCH][1], zeros[BATCH];
#pragma unroll
    for (uint32_t j = 0; j < BATCH; j++) {
      const size_t at = first[r + j * WARP], row = at_most(row0 + r + j * WARP, last);
      const row_scales from = {scales + at * n_bytes, 0, w.scale_dtype};
      load_scales<TD_CU_READ_I4>(from, {group}, bits[j]);
      zeros[j] = w.zero ? __ldg(w.zero + row / 8 * n_groups + group) : 0x88888888u;
    }
#pragma unroll
    for (uint32_t j = 0; j < BATCH; j++) {
      float value[1];
      scale_values<TD_CU_READ_I4>(w.scale_dtype, bits[j], value);
      to.scale[i][r + j * WARP] = value[0];
      to.zero[i][r + j * WARP] = zeros[j] >> at_most(row0 + r + j * WARP, last) % 8 * 4 & 15;
    }
  }
}

template <int READ, int SPAN>
__device__ static void copy_scales(const td_weight &w, const uint32_t (&first)[RING_ROWS],
                                   uint32_t row0, uint32_t last, uint32_t k,
                                   step_scales<READ, SPAN> &to) {
  if constexpr (IS_FP4<READ>) {
    const uintptr_t places = reinterpret_cast<uintptr_t>(w.scale) | weight_groups(w);
    if (places % 4 == 0) {
      copy_words<READ, uint32_t>(w, first, k, to);
    } else if (places % 2 == 0) {
      copy_words<READ, uint16_t>(w, first, k, to);
    } else {
      copy_words<READ, uint8_t>(w, first, k, to);
    }
  } else {
    const uint32_t shift = group_shift(w);
#pragma unroll 1
    for (uint32_t i = 0; i < STEP<READ> / SPAN; i++) {
      const uint32_t group = at_most(k + i * SPAN, w.cols - 1) >> shift;
      if constexpr (READ == TD_CU_READ_I4) {
        copy_i4_scales<SPAN>(w, first, row0, last, i, group, to);
      } else {
        const float *scales = static_cast<const float *>(w.scale) + group;
#pragma unroll 4
        for (uint32_t r = threadIdx.x % WARP; r < RING_ROWS; r += WARP)
          copy_async_value(&to.scale[i][r], scales + first[r], true);
      }
    }
  }
}

template <int READ, int SPAN, int TOKENS>
__device__ static void copy_tiles(const td_cu_linear_args &a,
                                  linear_stages<READ, SPAN, TOKENS> &s) {
  enum { N_STAGES = linear_stages<READ, SPAN, TOKENS>::N };
  const linear_span &span = s.ring.span;
  const uint32_t column = threadIdx.x % PANEL_CHUNKS * CHUNK;
  uint32_t n = 0; // steps of tiles before
  if (!has_stage<N_STAGES>()) return;
#pragma unroll 1
  for (uint32_t at = span.first;; at += gridDim.y) {
    const linear_part &part = find_part(a, at, s.ring);
    if (part.n == 0) return;
    const uint32_t cols = part.w.cols, n_steps = (cols + STEP<READ> - 1) / STEP<READ>;
    token_rows<TOKENS> &rows = s.rows[threadIdx.x / WARP - MULTIPLY_WARPS];
    find_rows(a, part, static_cast<uint32_t>(a.x_stride * sizeof *a.x), rows);
#pragma unroll 1
    for (uint32_t tile = span.begin; tile < span.end; tile++, n += n_steps) {
      const uint32_t row0 = a.row0 + tile * RING_ROWS, end = a.row0 + a.n_rows;
      const code_source codes = codes_of<CHUNKS<READ>>(part.w, bytes_of<READ>(cols), row0, end);
      uint32_t(&first)[RING_ROWS] = s.first_scale[threadIdx.x / WARP - MULTIPLY_WARPS];
      if (READ != TD_CU_READ_BF16) find_scales(part.w, row0, end - 1, first);
#pragma unroll 1
      for (uint32_t i = ring_next<N_STAGES>(n); i < n + n_steps; i += N_STAGES) {
        auto &stage = s.stage[i % N_STAGES];
        const uint32_t k = (i - n) * STEP<READ>;
        ring_wait_free(s.ring, i);
#pragma unroll 1
        for (uint32_t p = 0; p < STEP<READ> / PANEL; p++)
          copy_panel(a.x, (k + p * PANEL) * static_cast<uint32_t>(sizeof *a.x),
                     k + p * PANEL + column < cols, part.n, rows, stage.x[p]);
        copy_codes<CHUNKS<READ>, code_unit<READ>>(codes, bytes_of<READ>(k), stage.codes);
        if constexpr (READ != TD_CU_READ_BF16)
          copy_scales<READ, SPAN>(part.w, first, row0, end - 1, k, stage.scales);
        ring_fill(s.ring, i);
      }
    }
  }
}

// ---- weights ------------------------------------------------------------------------------------

// The first of the thread's two rows of a unit in the tile; the other one is eight below.
__device__ inline uint32_t unit_row(uint32_t unit) {
  return (threadIdx.x / GROUP * UNITS + unit) * UNIT_ROWS + threadIdx.x % GROUP / WARP * 16 +
         threadIdx.x % WARP / 4;
}

// The codes of the thread's first row of a unit: at its columns of chunk 0, were that at position
// 0, and where chunks are. The row eight below has its chunks at the same positions (code_chunk).
struct row_codes {
  const unsigned char *at;
  uint32_t swizzle; // bytes
};

template <int READ> __device__ inline row_codes row_codes_of(const uint4 *codes, uint32_t row) {
  return {reinterpret_cast<const unsigned char *>(codes + row * CHUNKS<READ>) +
              threadIdx.x % 4 * 2 * BITS<READ> / 8,
          unknown(code_chunk<CHUNKS<READ>>(row, 0) % CHUNKS<READ> * COPY)};
}

// Codes of two rows at columns from K i of the step on, as they are stored: of columns p and p + 8,
// 8 bits and less together.
template <int READ>
__device__ inline void codes_of_step(const row_codes &codes, uint32_t i, uint32_t (&out)[2][2]) {
#pragma unroll
  for (uint32_t e = 0; e < 4; e++) {
    const uint32_t h = e / 2, j = e % 2, byte = (K * i + 8 * j) * BITS<READ> / 8;
    const unsigned char *at = codes.at + 8 * h * CHUNKS<READ> * COPY +
                              (byte / COPY * COPY ^ codes.swizzle) + byte % COPY;
    if constexpr (READ == TD_CU_READ_BF16) {
      out[h][j] = *reinterpret_cast<const uint32_t *>(at);
    } else if constexpr (BITS<READ> == 8) {
      out[h][j] = *reinterpret_cast<const uint16_t *>(at);
    } else {
      out[h][j] = *at;
    }
  }
}

// The weights, as wgmma_rows takes them. scale: of FP4, as it is stored; zero: of INT4.
template <int READ>
__device__ inline void weights_of(const uint32_t (&codes)[2][2], const uint32_t (&scale)[2],
                                  const uint32_t (&zero)[2], uint32_t (&out)[4]) {
#pragma unroll
  for (uint32_t h = 0; h < 2; h++) {
    float value[1] = {1};
    if (IS_FP4<READ>) scale_values<READ>(TD_F32, {scale[h]}, value);
    const uint32_t pairs = codes[h][0] | codes[h][1] << 16; // of 8 bits
#pragma unroll
    for (uint32_t j = 0; j < 2; j++) {
      uint32_t &to = out[h + 2 * j];
      if constexpr (READ == TD_CU_READ_BF16) to = codes[h][j];
      if constexpr (BITS<READ> == 8) to = bf16x2_of_bytes<READ>(pairs, j);
      if constexpr (READ == TD_CU_READ_I4)
        to = bf16x2_from_i4_pair(codes[h][j], less_zero_point(zero[h]));
      if constexpr (IS_FP4<READ>)
        to = bf16x2_fma(bf16x2_from_e2m1_pair(codes[h][j]), bf16x2_cut(value[0], value[0]),
                        0x80008000u);
    }
  }
}

// ---- products -----------------------------------------------------------------------------------

// total += sum times the scales of the thread's two rows.
template <int N>
__device__ static void take(const float (&scale)[2], const float (&sum)[N][4], float (*total)[4]) {
#pragma unroll
  for (int e = 0; e < 4 * N; e++)
    total[e / 4][e % 4] += scale[e % 4 / 2] * sum[e / 4][e % 4];
}

// Registers of what is multiplied: with scales for sums there are fewer for products under way. A
// sum of 32 columns is of two, and of 64 tokens, so that their scales have registers, too.
template <int SPAN> constexpr int UNDER_WAY = SPAN == 0 ? 4 : 2;
template <int SPAN, int TOKENS> constexpr int SUM_TOKENS = SPAN == 2 * K ? 64 : TOKENS;

template <int SPAN, int TOKENS> struct products {
  float total[UNITS][TOKENS / 8][4];
  float sum[SPAN == 0 ? 1 : SUM_TOKENS<SPAN, TOKENS> / 8][4];
  uint32_t weights[UNDER_WAY<SPAN>][4];
};

// The matrix of a step's tokens from t on and columns from K i on.
template <int READ, int SPAN, int TOKENS>
__device__ inline uint64_t tokens_at(const linear_stage<READ, SPAN, TOKENS> &stage, uint32_t t,
                                     uint32_t i) {
  return wgmma_matrix(stage.x[i / (PANEL / K)][t] + i % (PANEL / K) * K, TOKENS);
}

// total += the unit's rows by a step's columns, of which 2 K share scales.
template <int READ, int SPAN, int TOKENS>
__device__ static void multiply_by_pairs(const linear_stage<READ, SPAN, TOKENS> &stage,
                                         uint32_t unit, products<SPAN, TOKENS> &m) {
  enum { N = SUM_TOKENS<SPAN, TOKENS> };
  const row_codes codes = row_codes_of<READ>(stage.codes, unit_row(unit));
#pragma unroll 1
  for (uint32_t i = 0; i < STEP<READ> / K; i += 2) {
    const float *scale = &stage.scales.scale[i * K / SPAN][unit_row(unit)];
    uint32_t zero[2] = {8, 8};
    for (uint32_t h = 0; h < 2 && READ == TD_CU_READ_I4; h++)
      zero[h] = stage.scales.zero[i * K / SPAN][unit_row(unit) + 8 * h];
    for (uint32_t q = 0; q < 2; q++) {
      uint32_t stored[2][2];
      codes_of_step<READ>(codes, i + q, stored);
      weights_of<READ>(stored, {0, 0}, zero, m.weights[q]);
    }
#pragma unroll
    for (uint32_t t = 0; t < TOKENS; t += N) {
      wgmma_begin();
      wgmma_rows<N, 0>(m.sum, m.weights[0], tokens_at(stage, t, i), false);
      wgmma_rows<N, 0>(m.sum, m.weights[1], tokens_at(stage, t, i + 1), true);
      wgmma_commit();
      wgmma_wait<0>(m.sum);
      take({scale[0], scale[8]}, m.sum, m.total[unit] + t / 8);
    }
  }
}

// The same where a step has one scale or, for the sums, none: total is valid then as soon as
// products are waited for.
template <int READ, int SPAN, int TOKENS>
__device__ static void multiply_unit(const linear_stage<READ, SPAN, TOKENS> &stage, uint32_t unit,
                                     bool is_first, products<SPAN, TOKENS> &m) {
  const row_codes codes = row_codes_of<READ>(stage.codes, unit_row(unit));
  uint32_t zero[2] = {8, 8}, scale[2] = {};
  if constexpr (READ == TD_CU_READ_I4) {
    for (uint32_t h = 0; h < 2; h++)
      zero[h] = stage.scales.zero[0][unit_row(unit) + 8 * h];
  }
#pragma unroll
  for (uint32_t i = 0; i < STEP<READ> / K; i++) {
    uint32_t(&weights)[4] = m.weights[i % UNDER_WAY<SPAN>];
    if constexpr (IS_FP4<READ>) {
      const uint32_t group = i * K / FP4_COLUMNS<READ>;
      for (uint32_t h = 0; h < 2; h++)
        scale[h] = stage.scales.words[unit_row(unit) + 8 * h][group / 4] >> group % 4 * 8 & 0xff;
    }
    uint32_t stored[2][2];
    codes_of_step<READ>(codes, i, stored);
    wgmma_wait<UNDER_WAY<SPAN> - 1>();
    weights_of<READ>(stored, scale, zero, weights);
    wgmma_begin();
    if constexpr (SPAN == 0) {
      wgmma_rows<TOKENS, 0>(m.total[unit], weights, tokens_at(stage, 0, i), !is_first || i > 0);
    } else {
      wgmma_rows<TOKENS, 0>(m.sum, weights, tokens_at(stage, 0, i), i > 0);
    }
    wgmma_commit();
  }
  if constexpr (SPAN > 0) {
    const float *scales = &stage.scales.scale[0][unit_row(unit)];
    wgmma_wait<0>(m.sum);
    take({scales[0], scales[8]}, m.sum, m.total[unit]);
  }
}

template <int READ, int SPAN, int TOKENS>
__device__ static void multiply_tile(uint32_t cols, uint32_t &n,
                                     linear_stages<READ, SPAN, TOKENS> &s,
                                     products<SPAN, TOKENS> &m) {
  if constexpr (SPAN > 0) {
#pragma unroll
    for (int e = 0; e < UNITS * TOKENS / 2; e++)
      m.total[e / (TOKENS / 2)][e / 4 % (TOKENS / 8)][e % 4] = 0;
  }
#pragma unroll 1
  for (uint32_t k = 0; k < cols; k += STEP<READ>, n++) {
    const auto &stage = s.stage[n % STAGES<READ, SPAN, TOKENS>];
    ring_wait_full(s.ring, n);
#pragma unroll
    for (uint32_t unit = 0; unit < UNITS; unit++) {
      if constexpr (SPAN == 2 * K) {
        multiply_by_pairs<READ, SPAN, TOKENS>(stage, unit, m);
      } else {
        multiply_unit<READ, SPAN, TOKENS>(stage, unit, k == 0, m);
      }
    }
    wgmma_wait<0>();
    ring_free(s.ring, n);
  }
#pragma unroll
  for (uint32_t unit = 0; SPAN == 0 && unit < UNITS; unit++)
    wgmma_wait<0>(m.total[unit]);
}

// Results of the thread's rows that exist, times factor and with their biases.
template <int SPAN, int TOKENS, class Out>
__device__ static void put_rows(Out *y, const linear_out &out, const linear_part &part,
                                const float *bias, uint32_t row0, uint32_t end, float factor,
                                const products<SPAN, TOKENS> &m) {
  const uint32_t p = unknown(threadIdx.x % 4 * 2), first = row0 + unit_row(0) - out.row0;
  float more[UNITS][2] = {};
  bool is_there[UNITS][2];
#pragma unroll
  for (uint32_t e = 0; e < 2 * UNITS; e++) {
    const uint32_t r = first + e / 2 * UNIT_ROWS + e % 2 * 8;
    is_there[e / 2][e % 2] = r < end - out.row0;
    if (is_there[e / 2][e % 2] && out.bias.data) more[e / 2][e % 2] = vec_at(out.bias, r);
    if (is_there[e / 2][e % 2] && bias) more[e / 2][e % 2] += bias[r];
  }
  Out *to = y + out.first + (part.begin + p) * out.stride + first;
#pragma unroll
  for (uint32_t t = 0; t < TOKENS / 4; t++) {
    const uint32_t j = t / 2, c = t % 2;
    if (8 * j >= part.n) return;
#pragma unroll
    for (uint32_t e = 0; e < 2 * UNITS; e++) {
      const float v[1] = {m.total[e / 2][j][c + e % 2 * 2] * factor + more[e / 2][e % 2]};
      if (is_there[e / 2][e % 2] && 8 * j + p + c < part.n)
        put_elements(to + e / 2 * UNIT_ROWS + e % 2 * 8, v);
    }
    to += (c ? 7 : 1) * out.stride;
    settle(to);
  }
}

template <int SPAN, int TOKENS>
__device__ static void put_tile(const td_cu_linear_args &a, const linear_part &part, uint32_t at,
                                uint32_t row0, const products<SPAN, TOKENS> &m) {
  const float *bias = linear_bias(a, at), factor = global_scale(part.w);
  const linear_out out = linear_out_of(a);
  const uint32_t end = a.row0 + a.n_rows;
  if (a.y_f32) {
    put_rows(static_cast<float *>(out.y), out, part, bias, row0, end, factor, m);
  } else {
    put_rows(static_cast<uint16_t *>(out.y), out, part, bias, row0, end, factor, m);
  }
}

template <int READ, int SPAN, int TOKENS>
__device__ static void multiply_tiles(const td_cu_linear_args &a,
                                      linear_stages<READ, SPAN, TOKENS> &s) {
  const linear_span &span = s.ring.span;
  products<SPAN, TOKENS> m;
  uint32_t n = 0; // steps
#pragma unroll 1
  for (uint32_t at = span.first;; at += gridDim.y) {
    const linear_part &part = find_part(a, at, s.ring);
    if (part.n == 0) return;
#pragma unroll 1
    for (uint32_t tile = span.begin; tile < span.end; tile++) {
      const uint32_t row0 = a.row0 + tile * RING_ROWS;
      multiply_tile<READ, SPAN, TOKENS>(part.w.cols, n, s, m);
      put_tile<SPAN, TOKENS>(a, part, at, row0, m);
    }
  }
}

template <int READ, int SPAN, int TOKENS>
__global__ static void __launch_bounds__(RING_THREADS, 1) linear_wgmma_kernel(td_cu_linear_args a) {
#if TD_HAS_WGMMA
  TD_DYNAMIC_SHARED(memory);
  auto &s = *reinterpret_cast<linear_stages<READ, SPAN, TOKENS> *>(memory);
  ring_open(a, s.ring);
  if (begin_copying<REGISTERS>()) {
    copy_tiles<READ, SPAN, TOKENS>(a, s);
  } else {
    multiply_tiles<READ, SPAN, TOKENS>(a, s);
  }
#elif defined(__CUDA_ARCH__)
  __trap(); // unreachable: td_cu_props.has_wgmma is false
#endif
}

template <int READ, int SPAN, int TOKENS>
static int launch(const td_cu_linear_args *a, td_cu_stream stream) {
  return launch_ring<linear_stages<READ, SPAN, TOKENS>>(linear_wgmma_kernel<READ, SPAN, TOKENS>, a,
                                                        stream);
}

template <int READ, int SPAN> static int launch(const td_cu_linear_args *a, td_cu_stream stream) {
  if (a->tile_tokens <= 64) return launch<READ, SPAN, 64>(a, stream);
  return launch<READ, SPAN, TD_CU_WGMMA_TOKENS>(a, stream);
}

template <int READ> static int launch_scaled(const td_cu_linear_args *a, td_cu_stream stream) {
  const uint32_t each = a->w.scale_cols;
  if (each < STEP<READ> && each < a->w.cols) return launch<READ, 32>(a, stream);
  return launch<READ, STEP<READ>>(a, stream);
}

extern "C" int td_cu_linear_wgmma(const td_cu_linear_args *a, td_cu_stream stream) {
  switch (a->read) {
  case TD_CU_READ_BF16: return launch<TD_CU_READ_BF16, 0>(a, stream);
  case TD_CU_READ_F8: return launch_scaled<TD_CU_READ_F8>(a, stream);
  case TD_CU_READ_I8: return launch_scaled<TD_CU_READ_I8>(a, stream);
  case TD_CU_READ_I4: return launch_scaled<TD_CU_READ_I4>(a, stream);
  case TD_CU_READ_MXFP4: return launch<TD_CU_READ_MXFP4, 0>(a, stream);
  case TD_CU_READ_NVFP4: return launch<TD_CU_READ_NVFP4, 0>(a, stream);
  default: return cudaErrorInvalidValue;
  }
}
