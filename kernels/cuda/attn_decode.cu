// kernels/cuda/attn_decode.cu - attention for few queries on tensor cores, for GQA and for MLA over
// its latents (one key for all heads, values inside it).
// A block takes one token, one split of its keys and up to HEADS heads that share them; a second
// kernel merges the splits. Shared memory has two buffers for tiles of keys: one is loaded while
// the other is used. For a tile, each of eight warps multiplies sixteen heads by eight keys;
// weights are exchanged through shared memory; then each warp multiplies all of them by its columns
// of the values. Of pages in E4M3 one buffer takes what is loaded, and the other one its values.
#include "kernels/cuda/attn_merge.cuh"
#include "kernels/cuda/cp_async.cuh"
#include "kernels/cuda/kv_f8.cuh"
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/swizzle.cuh"

enum { DECODE_WARPS = 8, DECODE_THREADS = DECODE_WARPS * WARP };
enum { ROWS_AT_ONCE = DECODE_THREADS / PANEL_CHUNKS };

template <td_dtype PAGES_, int KD_, int VD_, int HEADS_, int KEYS_, bool V_IN_K_, bool BLOCKS_>
struct decode_shape {
  enum { IS_F16 = PAGES_ == TD_F16 };   // dtype of pages and tensor core inputs: F16, else BF16
  enum { IS_F8 = PAGES_ == TD_F8E4M3 }; // but of pages E4M3
  enum { BLOCKS = BLOCKS_ };            // whether blocks of keys are selected
  enum { KD = KD_, VD = VD_, HEADS = HEADS_, KEYS = KEYS_, V_IN_K = V_IN_K_ };
  enum { COLUMNS = VD / DECODE_WARPS, ROW_TILES = HEADS / 16, KEY_TILES = KEYS / 8 };
  static_assert(ROW_TILES * KEY_TILES == DECODE_WARPS && COLUMNS % 16 == 0, "");
  static_assert(KEYS % ROWS_AT_ONCE == 0 && KD % 32 == 0, "");
  enum { SCALES = (KD + TD_KV_F8_BLOCK - 1) / TD_KV_F8_BLOCK };
  struct tile {
    uint16_t k[KD / PANEL][KEYS][PANEL], v[V_IN_K ? 0 : VD / PANEL][KEYS][PANEL];
  };
  struct shared {
    tile tiles[2];
    uint16_t weights[HEADS][KEYS + 8]; // padded against bank conflicts over eight rows
    float of_keys[HEADS][KEY_TILES];   // a row's maximum, or sum
    float scale[HEADS];                // the weight is 2^(scale * score)
    float folded[V_IN_K ? HEADS : 1];  // running maxima of folded splits
    float k_scales[IS_F8 ? KEYS : 1][SCALES], v_scales[IS_F8 && !V_IN_K ? KEYS : 1][SCALES];
  };
  typedef uint16_t (*queries)[HEADS][PANEL];
  static_assert(sizeof(uint16_t[KD / PANEL][HEADS][PANEL]) <= sizeof(tile), "");
};

// Queries are stored in the second tile's buffer until that tile is loaded.
template <class S> __device__ static typename S::queries queries_of(typename S::shared &s) {
  return reinterpret_cast<typename S::queries>(&s.tiles[1]);
}

// The work of a block.
struct decode_part {
  uint32_t t, seq, kv_head, head0, n_heads;
  uint32_t begin, end;   // keys [begin, end)
  uint32_t first;        // those before it are hidden
  const int32_t *blocks; // that hold the keys; NULL: a key's number is its position
};

template <class S> __device__ static decode_part part_of(const td_cu_attn_decode_args &a) {
  decode_part part;
  uint32_t group = a.n_heads / a.n_kv_heads, chunks = (group + S::HEADS - 1) / S::HEADS;
  part.t = blockIdx.z;
  part.seq = static_cast<uint32_t>(a.batch.seq[part.t]);
  part.kv_head = blockIdx.x / chunks;
  uint32_t first = blockIdx.x % chunks * S::HEADS;
  part.head0 = part.kv_head * group + first;
  part.n_heads = at_most(group - first, S::HEADS);
  part.blocks = S::BLOCKS ? blocks_of(a, part.t, part.kv_head) : nullptr;
  uint32_t n_keys = S::BLOCKS ? seen_keys(a, part.t, part.blocks) : keys_of(a.batch, part.t);
  part.first = S::V_IN_K ? 0 : first_seen(n_keys, a.window);
  uint32_t block_keys = block_keys_of(a, n_keys);
  part.begin = (part.first / block_keys + blockIdx.y) * block_keys;
  part.end = at_most(part.begin + block_keys, n_keys);
  uint32_t seen = part.first / S::KEYS * S::KEYS; // whole tiles before it are not loaded
  if (part.begin < seen) part.begin = seen;
  return part;
}

// The position of a key of the part.
template <class S>
__device__ static uint32_t position_of(const td_cu_attn_decode_args &a, const decode_part &part,
                                       uint32_t key) {
  if (!S::BLOCKS || !part.blocks) return key;
  uint32_t i = key / a.block, of_block = key % a.block;
  if (a.of_groups && i == a.top_blocks) { // its own
    uint32_t n_keys = keys_of(a.batch, part.t);
    return n_keys - n_keys % a.block + of_block;
  }
  return static_cast<uint32_t>(part.blocks[i]) * a.block + of_block;
}

// ---- queries and keys -------------------------------------------------------------------------

// The power of two u for a row whose largest magnitude is `most`: row / u has its largest element
// in [2^9, 2^10), so that even 2^-23 of it is a normal F16 number. *inverse is exactly 1 / u.
__device__ static float f16_unit(float most, float *inverse) {
  uint32_t exponent = __float_as_uint(most) >> 23;
  exponent = exponent < 10 ? 1 : exponent - 9;
  *inverse = __uint_as_float((254 - exponent) << 23);
  return __uint_as_float(exponent << 23);
}

// One warp per head; zeros after the last head.
template <class S>
__device__ static void load_queries(const td_cu_attn_decode_args &a, const decode_part &part,
                                    typename S::shared &s) {
  uint32_t lane = threadIdx.x % WARP;
  for (uint32_t h = threadIdx.x / WARP; h < S::HEADS; h += DECODE_WARPS) {
    size_t at = (static_cast<size_t>(part.t) * a.n_heads + part.head0 + h) * a.k_dim;
    uint32_t dim = h < part.n_heads ? a.k_dim : 0;
    float q[S::KD / WARP], most = 0, unit = 1, inverse = 1;
#pragma unroll
    for (uint32_t i = 0; i < S::KD / WARP; i++) {
      uint32_t d = lane + i * WARP;
      q[i] = 0;
      if (d < dim && a.q_f32) q[i] = static_cast<const float *>(a.q)[at + d];
      if (d < dim && !a.q_f32) q[i] = f32_from_bf16(static_cast<const uint16_t *>(a.q)[at + d]);
    }
#pragma unroll
    for (uint32_t i = 0; i < S::KD / WARP; i++)
      most = fmaxf(most, fabsf(q[i]));
    if (S::IS_F16) unit = f16_unit(warp_max(most), &inverse);
#pragma unroll
    for (uint32_t i = 0; i < S::KD / WARP; i++) {
      uint32_t d = lane + i * WARP;
      uint16_t bits = S::IS_F16 ? f16_from_f32(q[i] * inverse) : bf16_from_f32(q[i]);
      chunk_of(queries_of<S>(s), h, d / CHUNK)[d % CHUNK] = bits;
    }
    if (lane == 0) s.scale[h] = unit * a.scale * LOG2_E;
  }
}

// Columns [d, d + 8) of a row of dim elements; zeros past its end.
__device__ static void load_chunk(const td_cu_attn_decode_args &a, const uint16_t *row, uint32_t d,
                                  uint32_t dim, uint16_t *to) {
  if (a.in_runs) {
    copy_async(to, row + d, row && d < dim);
    return;
  }
  for (uint32_t i = 0; i < CHUNK; i++)
    to[i] = row && d + i < dim ? row[d + i] : 0;
}

__device__ static size_t values_plane(const td_cu_attn_decode_args &a) {
  return static_cast<size_t>(a.n_kv_heads) * a.batch.page_tokens * a.k_dim;
}

// A tile's rows one by one, whatever page each is in; eight threads per row.
template <class S>
__device__ static void load_rows(const td_cu_attn_decode_args &a, const decode_part &part,
                                 uint32_t begin, typename S::tile &to) {
  uint32_t column = threadIdx.x % PANEL_CHUNKS;
#pragma unroll 1
  for (uint32_t row = threadIdx.x / PANEL_CHUNKS; row < S::KEYS; row += ROWS_AT_ONCE) {
    uint32_t key = begin + row, position = key < part.end ? position_of<S>(a, part, key) : 0;
    int32_t id = key < part.end ? kv_page(a.batch, part.seq, position) : -1;
    const uint16_t *page = nullptr, *k = nullptr, *v = nullptr;
    if (id >= 0) {
      page = reinterpret_cast<const uint16_t *>(kv_page_at(a.kv, id));
      k = page + kv_row(a.batch, position, part.kv_head, a.k_dim);
      v = page + values_plane(a) + kv_row(a.batch, position, part.kv_head, a.v_dim);
    }
    for (uint32_t chunk = column; chunk < S::KD / CHUNK; chunk += PANEL_CHUNKS)
      load_chunk(a, k, chunk * CHUNK, a.k_dim, chunk_of(to.k, row, chunk));
    for (uint32_t chunk = column; !S::V_IN_K && chunk < S::VD / CHUNK; chunk += PANEL_CHUNKS)
      load_chunk(a, v, chunk * CHUNK, a.v_dim, chunk_of(to.v, row, chunk));
  }
}

// Where a tile is that lies within one page; a negative page: it begins after the last key.
struct tile_place {
  uint32_t position;
  int32_t page;
};

template <class S>
__device__ static tile_place place_of(const td_cu_attn_decode_args &a, const decode_part &part,
                                      uint32_t begin) {
  if (!a.in_pages || begin >= part.end) return {begin, -1};
  uint32_t position = position_of<S>(a, part, begin);
  return {position, kv_page(a.batch, part.seq, position)};
}

// Keys and values from position begin on; zeros after the last key.
template <class S>
__device__ static void load_tile(const td_cu_attn_decode_args &a, const decode_part &part,
                                 uint32_t begin, tile_place place, typename S::tile &to) {
  if (!a.in_pages) {
    load_rows<S>(a, part, begin, to);
    return;
  }
  uint32_t column = threadIdx.x % PANEL_CHUNKS, row0 = threadIdx.x / PANEL_CHUNKS;
  uint32_t n = place.page < 0 ? 0 : at_most(part.end - begin, S::KEYS);
  uint32_t position = S::BLOCKS ? place.position : begin;
  const uint16_t *page = reinterpret_cast<const uint16_t *>(kv_page_at(a.kv, place.page));
  size_t row = static_cast<size_t>(part.kv_head) * a.batch.page_tokens +
               (position & (a.batch.page_tokens - 1)) + row0;
  const uint16_t *k = page + row * a.k_dim + column * CHUNK;
  const uint16_t *v = page + values_plane(a) + row * a.v_dim + column * CHUNK;
#pragma unroll
  for (uint32_t i = 0; i < S::KEYS; i += ROWS_AT_ONCE) {
#pragma unroll
    for (uint32_t c = 0; c < S::KD / CHUNK; c += PANEL_CHUNKS)
      copy_async(chunk_of(to.k, row0 + i, c + column), k + i * a.k_dim + c * CHUNK,
                 row0 + i < n && (c + column) * CHUNK < a.k_dim);
#pragma unroll
    for (uint32_t c = 0; !S::V_IN_K && c < S::VD / CHUNK; c += PANEL_CHUNKS)
      copy_async(chunk_of(to.v, row0 + i, c + column), v + i * a.v_dim + c * CHUNK,
                 row0 + i < n && (c + column) * CHUNK < a.v_dim);
  }
}

// ---- keys and values in E4M3 --------------------------------------------------------------------

// Row `row` of a tile as it is in its page, and its scales, both from position `at` of the page's
// rows. There is room: rows have fewer bytes than in BF16.
template <int SCALES>
__device__ static void load_row(const td_cu_attn_decode_args &a, const char *page, size_t at,
                                uint32_t dim, char *row, float (&scales)[SCALES]) {
  const char *from = page + f8_codes_at(a.kv, at, dim);
  uint32_t column = threadIdx.x % PANEL_CHUNKS, n_chunks = f8_row_bytes(a.kv, dim) / sizeof(uint4);
#pragma unroll 2
  for (uint32_t c = column; c < n_chunks; c += PANEL_CHUNKS)
    copy_async_value(reinterpret_cast<uint4 *>(row) + c, reinterpret_cast<const uint4 *>(from) + c,
                     true);
  auto from_scales = reinterpret_cast<const float *>(page + f8_scales_at(a.kv, at));
  if (column < f8_blocks(a.kv)) copy_async_value(scales + column, from_scales + column, true);
}

// A tile's rows, as load_tile or load_rows has them; nothing after the last key.
template <class S>
__device__ static void load_f8(const td_cu_attn_decode_args &a, const decode_part &part,
                               uint32_t begin, tile_place place, typename S::shared &s) {
  auto k = reinterpret_cast<char *>(s.tiles[0].k), v = reinterpret_cast<char *>(s.tiles[0].v);
#pragma unroll 1
  for (uint32_t row = threadIdx.x / PANEL_CHUNKS; row < S::KEYS; row += ROWS_AT_ONCE) {
    uint32_t position = begin + row;
    if (position >= part.end) return;
    int32_t id = a.in_pages ? place.page : kv_page(a.batch, part.seq, position);
    const char *page = kv_page_at(a.kv, id < 0 ? 0 : id);
    load_row(a, page, kv_row(a.batch, position, part.kv_head, 1), a.k_dim,
             k + row * S::KD * sizeof(uint16_t), s.k_scales[row]);
    if constexpr (!S::V_IN_K)
      load_row(a, page, kv_row(a.batch, position, a.n_kv_heads + part.kv_head, 1), a.v_dim,
               v + row * S::VD * sizeof(uint16_t), s.v_scales[row]);
  }
}

// Values of what load_f8 loaded of n keys; zeros after the last key and the last column.
template <class S>
__device__ static void expand_f8(const td_cu_attn_decode_args &a, uint32_t n,
                                 typename S::shared &s) {
  auto k = reinterpret_cast<char *>(s.tiles[0].k), v = reinterpret_cast<char *>(s.tiles[0].v);
  const uint4 zeros = {0, 0, 0, 0};
#pragma unroll 1
  for (uint32_t row = threadIdx.x / PANEL_CHUNKS; row < S::KEYS; row += ROWS_AT_ONCE) {
#pragma unroll 2
    for (uint32_t c = threadIdx.x % PANEL_CHUNKS; c < S::KD / CHUNK; c += PANEL_CHUNKS) {
      bool there = row < n && c * CHUNK < a.k_dim;
      const char *from = k + row * S::KD * sizeof(uint16_t);
      put_run(chunk_of(s.tiles[1].k, row, c),
              there ? f8_run(a.kv, from, s.k_scales[row], c * CHUNK) : zeros);
    }
#pragma unroll 2
    for (uint32_t c = threadIdx.x % PANEL_CHUNKS; !S::V_IN_K && c < S::VD / CHUNK;
         c += PANEL_CHUNKS) {
      bool there = row < n && c * CHUNK < a.v_dim;
      const char *from = v + row * S::VD * sizeof(uint16_t);
      put_run(chunk_of(s.tiles[1].v, row, c),
              there ? f8_run(a.kv, from, s.v_scales[row], c * CHUNK) : zeros);
    }
  }
}

// Begins to load a tile into the buffer.
template <class S>
__device__ static void load_next(const td_cu_attn_decode_args &a, const decode_part &part,
                                 uint32_t begin, tile_place place, uint32_t buffer,
                                 typename S::shared &s) {
  if constexpr (S::IS_F8) {
    load_f8<S>(a, part, begin, place, s);
  } else {
    load_tile<S>(a, part, begin, place, s.tiles[buffer]);
  }
}

// ---- a tile of keys ---------------------------------------------------------------------------

template <class S>
__device__ static void multiply(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  if constexpr (S::IS_F16) {
    mma_f16(c, a, b);
  } else {
    mma_bf16(c, a, b);
  }
}

// A thread's registers: rows g and g + 8 of each sixteen heads, as in mma.cuh.
template <class S> struct decode_state {
  uint32_t q[S::KD / 16][4];    // queries of the warp's heads
  float m[S::ROW_TILES][2];     // running maxima of scores
  float scale[S::ROW_TILES][2]; //
  float l[2];                   // this lane's share, of the warp's heads
  float acc[S::ROW_TILES][S::COLUMNS / 8][4];
};

template <class S> __device__ static uint32_t row_tile() {
  return threadIdx.x / WARP / S::KEY_TILES;
}

template <class S> __device__ static uint32_t key_tile() {
  return threadIdx.x / WARP % S::KEY_TILES;
}

// Scores of sixteen heads by eight keys; only the first n_keys keys of the tile exist, of which the
// first n_hidden are not seen.
template <class S>
__device__ static void score_keys(typename S::tile &tile, uint32_t n_hidden, uint32_t n_keys,
                                  const decode_state<S> &state, float (&score)[4]) {
  uint32_t lane = threadIdx.x % WARP, p = lane % 4 * 2;
  float odd[4] = {}; // a second set of sums, to shorten the dependency chain
  score[0] = score[1] = score[2] = score[3] = 0;
#pragma unroll
  for (uint32_t k = 0; k < S::KD / 16; k += 2) {
    uint32_t b[4];
    load_matrices(b, chunk_of(tile.k, key_tile<S>() * 8 + lane % 8, 2 * k + lane / 8));
    multiply<S>(score, state.q[k], {b[0], b[1]});
    multiply<S>(odd, state.q[k + 1], {b[2], b[3]});
  }
#pragma unroll
  for (int c = 0; c < 4; c++) {
    uint32_t key = key_tile<S>() * 8 + p + c % 2;
    bool is_there = key < n_keys && (S::V_IN_K || key >= n_hidden);
    score[c] = is_there ? score[c] + odd[c] : -INFINITY;
  }
}

// Turns scores into weights, visible to all after the next barrier; rescales sums to the new
// maxima.
template <class S>
__device__ static void weigh_keys(typename S::shared &s, const float (&score)[4],
                                  decode_state<S> &state) {
  uint32_t g = threadIdx.x % WARP / 4, p = threadIdx.x % 4 * 2;
#pragma unroll
  for (uint32_t i = 0; i < S::ROW_TILES; i++) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      uint32_t row = 16 * i + g + 8 * r;
      float m = state.m[i][r], scale = state.scale[i][r];
#pragma unroll
      for (int j = 0; j < S::KEY_TILES; j++)
        m = fmaxf(m, s.of_keys[row][j]);
      float seen = m == -INFINITY ? 0 : m, base = seen * scale;
      float rescale = exp2_approx((state.m[i][r] - seen) * scale); // exactly 1 where m is unchanged
      state.m[i][r] = m;
#pragma unroll
      for (int e = 0; e < S::COLUMNS / 4; e++)
        state.acc[i][e / 2][2 * r + e % 2] *= rescale;
      if (i != row_tile<S>()) continue;
      float low = exp2_approx(score[2 * r] * scale - base);
      float high = exp2_approx(score[2 * r + 1] * scale - base);
      state.l[r] = state.l[r] * rescale + low + high;
      uint32_t pair = S::IS_F16 ? f16x2_from_f32(low, high) : bf16x2_from_f32(low, high);
      *reinterpret_cast<uint32_t *>(&s.weights[row][key_tile<S>() * 8 + p]) = pair;
    }
  }
}

template <class S>
__device__ static void add_values(typename S::shared &s, typename S::tile &tile,
                                  decode_state<S> &state) {
  uint32_t lane = threadIdx.x % WARP;
  uint32_t first = threadIdx.x / WARP * (S::COLUMNS / CHUNK);
#pragma unroll
  for (uint32_t k = 0; k < S::KEYS / 16; k++) {
    uint32_t p[S::ROW_TILES][4];
#pragma unroll
    for (uint32_t i = 0; i < S::ROW_TILES; i++)
      load_matrices(p[i], &s.weights[16 * i + lane % 16][16 * k + lane / 16 * CHUNK]);
#pragma unroll
    for (uint32_t j = 0; j < S::COLUMNS / 16; j++) {
      uint32_t b[4], chunk = first + 2 * j + lane / 16, row = 16 * k + lane % 16;
      load_matrices_turned(b,
                           S::V_IN_K ? chunk_of(tile.k, row, chunk) : chunk_of(tile.v, row, chunk));
#pragma unroll
      for (uint32_t i = 0; i < S::ROW_TILES; i++) {
        multiply<S>(state.acc[i][2 * j], p[i], {b[0], b[1]});
        multiply<S>(state.acc[i][2 * j + 1], p[i], {b[2], b[3]});
      }
    }
  }
}

// ---- the kernels --------------------------------------------------------------------------------

// Stores one number per head of the warp, for its eight keys.
template <class S>
__device__ static void put_of_keys(typename S::shared &s, float of_g, float of_g_8) {
  uint32_t row = row_tile<S>() * 16 + threadIdx.x % WARP / 4;
  if (threadIdx.x % 4 != 0) return;
  s.of_keys[row][key_tile<S>()] = of_g;
  s.of_keys[row + 8][key_tile<S>()] = of_g_8;
}

// Writes the sums of a split. added: adds them to the sums of the block's earlier splits, which the
// same threads wrote. The loads of a batch are in flight at once, since no store is between them.
template <class S>
__device__ static void put_part(const td_cu_attn_decode_args &a, const decode_part &part,
                                const typename S::shared &s, const decode_state<S> &state,
                                bool added) {
  enum { BATCH = 4 };
  uint32_t g = threadIdx.x % WARP / 4, p = threadIdx.x % 4 * 2;
#pragma unroll
  for (uint32_t tile = 0; tile < S::ROW_TILES; tile++) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      uint32_t h = 16 * tile + g + 8 * r;
      if (h >= part.n_heads) continue;
      size_t row = (static_cast<size_t>(part.t) * a.n_heads + part.head0 + h) * a.n_rows;
      row += blockIdx.y;
      float m = product(state.m[tile][r], state.scale[tile][r]);
      fold_factors f = {m, 0, 1};
      if (S::V_IN_K && added) f = factors_of(s.folded[h], m);
#pragma unroll
      for (int e = 0; e < S::COLUMNS / 4; e += BATCH) {
        float before[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
          uint32_t d = threadIdx.x / WARP * S::COLUMNS + (e + i) / 2 * 8 + p + i % 2;
          before[i] = S::V_IN_K && added && d < a.v_dim ? a.part[row * a.v_dim + d] : 0;
        }
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
          uint32_t d = threadIdx.x / WARP * S::COLUMNS + (e + i) / 2 * 8 + p + i % 2;
          float more = state.acc[tile][(e + i) / 2][2 * r + i % 2];
          if (S::V_IN_K && added) more = fold(before[i], f.old, more, f.more);
          if (d < a.v_dim) a.part[row * a.v_dim + d] = more;
        }
      }
      if (threadIdx.x / WARP != 0 || p != 0) continue;
      float l = 0;
      for (int j = 0; j < S::KEY_TILES; j++)
        l += s.of_keys[h][j];
      if (S::V_IN_K && added) l = fold(a.part_ml[2 * row + 1], f.old, l, f.more);
      a.part_ml[2 * row] = f.m;
      a.part_ml[2 * row + 1] = l;
    }
  }
}

// Updates each row's running maximum over the block's splits, after all threads used the previous
// one.
template <class S>
__device__ static void note_maxima(typename S::shared &s, const decode_state<S> &state,
                                   bool added) {
  uint32_t g = threadIdx.x % WARP / 4;
  if (threadIdx.x / WARP != 0 || threadIdx.x % 4 != 0) return;
#pragma unroll
  for (uint32_t i = 0; i < 2 * S::ROW_TILES; i++) {
    float m = product(state.m[i / 2][i % 2], state.scale[i / 2][i % 2]);
    s.folded[8 * i + g] = added ? fmaxf(s.folded[8 * i + g], m) : m;
  }
}

template <class S> __device__ static void begin_split(decode_state<S> &state) {
#pragma unroll
  for (uint32_t i = 0; i < 2 * S::ROW_TILES; i++)
    state.m[i / 2][i % 2] = -INFINITY;
  state.l[0] = state.l[1] = 0;
#pragma unroll
  for (uint32_t e = 0; e < S::ROW_TILES * S::COLUMNS / 2; e++)
    state.acc[e / (S::COLUMNS / 2)][e / 4 % (S::COLUMNS / 8)][e % 4] = 0;
}

template <class S>
__global__ static void __launch_bounds__(DECODE_THREADS)
    attn_decode_kernel(td_cu_attn_decode_args a) {
  TD_DYNAMIC_SHARED(memory);
  auto &s = *reinterpret_cast<typename S::shared *>(memory);
  decode_part part = part_of<S>(a);
  if (part.begin >= part.end) return; // attn_merge_kernel skips such splits
  load_next<S>(a, part, part.begin, place_of<S>(a, part, part.begin), 0, s);
  tile_place place = place_of<S>(a, part, part.begin + S::KEYS);
  load_queries<S>(a, part, s);
  __syncthreads();
  decode_state<S> state = {};
  uint32_t lane = threadIdx.x % WARP;
#pragma unroll
  for (uint32_t k = 0; k < S::KD / 16; k++)
    load_matrices(state.q[k],
                  chunk_of(queries_of<S>(s), row_tile<S>() * 16 + lane % 16, 2 * k + lane / 16));
#pragma unroll
  for (uint32_t i = 0; i < 2 * S::ROW_TILES; i++) {
    state.m[i / 2][i % 2] = -INFINITY;
    state.scale[i / 2][i % 2] = s.scale[8 * i + lane / 4];
  }
  uint32_t at = 0;
  for (uint32_t begin = part.begin; begin < part.end; begin += S::KEYS, at ^= 1) {
    copy_async_wait();
    __syncthreads(); // after it the other buffer and the weights are free
    if constexpr (S::IS_F8) {
      expand_f8<S>(a, at_most(part.end - begin, S::KEYS), s);
      __syncthreads();
      at = 0;
    }
    auto &tile = s.tiles[S::IS_F8 ? 1 : at];
    if (begin + S::KEYS < part.end) {
      load_next<S>(a, part, begin + S::KEYS, place, at ^ 1, s);
      place = place_of<S>(a, part, begin + 2 * S::KEYS);
    }
    float score[4];
    uint32_t n_hidden = part.first > begin ? part.first - begin : 0;
    score_keys<S>(tile, n_hidden, part.end - begin, state, score);
    put_of_keys<S>(s, quad_max(fmaxf(score[0], score[1])), quad_max(fmaxf(score[2], score[3])));
    __syncthreads();
    weigh_keys<S>(s, score, state);
    __syncthreads();
    add_values<S>(s, tile, state);
    if constexpr (S::V_IN_K) {
      bool ends = ((begin + S::KEYS) & (a.split_keys - 1)) == 0; // a power of two
      if (!ends || begin + S::KEYS >= part.end) continue;
      bool added = begin - part.begin >= a.split_keys;
      put_of_keys<S>(s, quad_sum(state.l[0]), quad_sum(state.l[1]));
      __syncthreads();
      put_part<S>(a, part, s, state, added);
      __syncthreads();
      note_maxima<S>(s, state, added);
      begin_split<S>(state);
    }
  }
  put_of_keys<S>(s, quad_sum(state.l[0]), quad_sum(state.l[1]));
  __syncthreads();
  put_part<S>(a, part, s, state, part.end - part.begin > a.split_keys);
}

template <class S> static int launch(const td_cu_attn_decode_args *a, td_cu_stream stream) {
  auto kernel = attn_decode_kernel<S>;
  const size_t n_bytes = sizeof(typename S::shared);
  static_assert(n_bytes <= SHARED_BYTES, "");
  if (int failed = allow_shared(kernel, n_bytes)) return failed;
  td_cu_attn_decode_args args = *a;
  uintptr_t places = reinterpret_cast<uintptr_t>(a->kv.pages) | a->kv.page_bytes;
  uint32_t page_tokens = a->batch.page_tokens;
  args.out_f32 = a->q_f32;
  args.in_runs = (a->k_dim | a->v_dim) % CHUNK == 0 && places % sizeof(uint4) == 0;
  args.in_pages = args.in_runs && page_tokens % S::KEYS == 0 && a->split_keys % S::KEYS == 0 &&
                  (page_tokens & (page_tokens - 1)) == 0 && (!S::BLOCKS || a->block % S::KEYS == 0);
  uint32_t chunks = ceil_div(a->n_heads / a->n_kv_heads, S::HEADS);
  dim3 grid(a->n_kv_heads * chunks, a->n_rows, a->batch.n_tokens);
  if (int failed = TD_LAUNCH(kernel, grid, DECODE_THREADS, n_bytes, stream, args)) return failed;
  return launch_merge(args, S::V_IN_K, stream);
}

// For up to td_cu_decode_heads heads.
template <td_dtype PAGES, bool BLOCKS>
static int launch_gqa(const td_cu_attn_decode_args *a, td_cu_stream stream) {
  if (a->k_dim <= 128 && a->v_dim <= 128)
    return launch<decode_shape<PAGES, 128, 128, 16, 64, false, BLOCKS>>(a, stream);
  return launch<decode_shape<PAGES, 256, 256, 32, 32, false, BLOCKS>>(a, stream);
}

template <td_dtype PAGES>
static int launch_shape(const td_cu_attn_decode_args *a, td_cu_stream stream) {
  if (a->v_in_k) return launch<decode_shape<PAGES, 576, 512, 32, 32, true, false>>(a, stream);
  if constexpr (PAGES != TD_F8E4M3)
    if (a->blocks) return launch_gqa<PAGES, true>(a, stream);
  return launch_gqa<PAGES, false>(a, stream);
}

extern "C" int td_cu_attn_decode(const td_cu_attn_decode_args *a, td_cu_stream stream) {
  if (a->kv.dtype == TD_F8E4M3) return launch_shape<TD_F8E4M3>(a, stream);
  if (a->kv.dtype == TD_F16) return launch_shape<TD_F16>(a, stream);
  return launch_shape<TD_BF16>(a, stream);
}
