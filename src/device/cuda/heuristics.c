// src/device/cuda/heuristics.c - pure choices: kernel variants, splits, tiles and pieces.
#include <assert.h>
#include <math.h>
#include <string.h>

#include "device/cuda/cuda.h"

// Large GPUs have some 130 SMs; with few blocks, more splits are needed to keep them busy.
enum { FEW_BLOCKS = 2, FEW_BLOCKS_KEYS = 128, FIRST_SPLIT_KEYS = 256, MAX_SPLITS = 64 };
// linear_vec gives a token the same bits in any company up to MOST_VEC_TOKENS. Converting a matrix
// to BF16 for cuBLAS moves five times the bytes of FP8 (H100: 21 us at 128 tokens for 1536 x 7168),
// so up to PASSES_TOKENS it is read twice instead; expected, not measured: tandem bench gpu --only
// "linear v3 fp8" has cases on both sides. FP4 needs more tokens, because the product of weight and
// global scale is rounded only on this path.
enum { MOST_VEC_TOKENS = 64, PASSES_TOKENS = 128, DEQUANT_TOKENS = 65, DEQUANT_F4_TOKENS = 256 };
enum { PIECE_BYTES = 64 << 20 };
enum { UNLIKELY_TILES = 8 };
enum { VEC_ROWS = 16, CHUNK_ROW_BYTES = 128 }; // of linear_vec: per block; of a chunk, mostly

static bool groups_are_simple(const td_weight *w) {
  if (!w->scale) return false;
  return w->scale_cols >= w->cols ||
         (w->scale_cols >= 32 && (w->scale_cols & (w->scale_cols - 1)) == 0);
}

static td_cu_read read_of_format(const td_weight *w) {
  bool is_f32 = w->scale_dtype == TD_F32, is_byte = td_dtype_bytes(w->scale_dtype) == 1;
  switch (w->dtype) {
  case TD_F32: return TD_CU_READ_F32;
  case TD_F16: return TD_CU_READ_F16;
  case TD_BF16: return TD_CU_READ_BF16;
  case TD_F8E4M3: return is_f32 && groups_are_simple(w) ? TD_CU_READ_F8 : TD_CU_READ_ANY;
  case TD_I8: return is_f32 && groups_are_simple(w) ? TD_CU_READ_I8 : TD_CU_READ_ANY;
  case TD_I4: return !is_byte && groups_are_simple(w) ? TD_CU_READ_I4 : TD_CU_READ_ANY;
  case TD_F4E2M1:
    if (w->cols % 32) return TD_CU_READ_ANY;
    if (w->scale_dtype == TD_F8E8M0 && w->scale_cols == 32) return TD_CU_READ_MXFP4;
    if (w->scale_dtype == TD_F8E4M3 && w->scale_cols == 16) return TD_CU_READ_NVFP4;
    return TD_CU_READ_ANY;
  default: return td_dtype_block(w->dtype).cols ? TD_CU_READ_BLOCKS : TD_CU_READ_ANY;
  }
}

td_cu_read td_cuda_read_of(const td_weight *w, bool x_aligned) {
  bool is_even = x_aligned && w->cols % 8 == 0;
  return is_even ? read_of_format(w) : TD_CU_READ_ANY;
}

bool td_cuda_same_format(const td_weight *a, const td_weight *b) {
  return a->dtype == b->dtype && a->cols == b->cols && a->scale_dtype == b->scale_dtype &&
         a->scale_rows == b->scale_rows && a->scale_cols == b->scale_cols &&
         !a->scale == !b->scale && !a->zero == !b->zero;
}

td_cuda_gemm td_cuda_gemm_of(const td_weight *w, td_cu_read read, uint32_t n_tokens,
                             bool has_wgmma) {
  if (n_tokens <= MOST_VEC_TOKENS || w->dtype == TD_F32 || w->dtype == TD_F16) return CUDA_GEMM_VEC;
  const bool is_direct = read != TD_CU_READ_ANY && read != TD_CU_READ_BLOCKS;
  return has_wgmma && is_direct ? CUDA_GEMM_WGMMA : CUDA_GEMM_MMA;
}

uint32_t td_cuda_tile_tokens(td_cuda_gemm gemm, uint32_t n_tokens) {
  if (gemm == CUDA_GEMM_VEC) return n_tokens <= 8 ? 8 : TD_CU_VEC_TOKENS;
  static_assert((int)TD_CU_A8_TOKENS == (int)TD_CU_WGMMA_TOKENS, "tiles of many tokens");
  return gemm != CUDA_GEMM_MMA && n_tokens > TD_CU_MMA_TOKENS ? TD_CU_WGMMA_TOKENS
                                                              : TD_CU_MMA_TOKENS;
}

uint32_t td_cuda_wide_tokens(td_cu_read read, uint32_t n_tokens) {
  static_assert((int)MOST_VEC_TOKENS == (int)TD_CU_WIDE_TOKENS, "one pass");
  const bool is_direct = read != TD_CU_READ_ANY && read != TD_CU_READ_BLOCKS;
  if (!is_direct || n_tokens <= TD_CU_VEC_TOKENS || n_tokens > TD_CU_WIDE_TOKENS) return 0;
  return n_tokens > TD_CU_WIDE_TOKENS / 2 ? TD_CU_WIDE_TOKENS : TD_CU_WIDE_TOKENS / 2;
}

uint32_t td_cuda_wide_passes(const td_weight *w, td_cu_read read, uint32_t n_tokens) {
  const bool has_passes = td_cuda_wide_tokens(read, TD_CU_WIDE_TOKENS) &&
                          (w->dtype == TD_F8E4M3 || w->dtype == TD_I8 || w->dtype == TD_I4);
  return has_passes && n_tokens <= PASSES_TOKENS
             ? (n_tokens + TD_CU_WIDE_TOKENS - 1) / TD_CU_WIDE_TOKENS
             : 1;
}

bool td_cuda_use_blas(const td_weight *w, uint32_t n_tokens) {
  if (w->dtype == TD_F32 || w->dtype == TD_F16) return false;
  if (w->dtype == TD_BF16) return n_tokens > TD_CU_VEC_TOKENS;
  return n_tokens >= (w->dtype == TD_F4E2M1 ? DEQUANT_F4_TOKENS : DEQUANT_TOKENS);
}

bool td_cuda_adds_f16(const td_cu_props *props) {
  const int c = props->capability;
  return (c == 86 || c == 89 || c == 120) && strstr(props->name, "GeForce");
}

uint32_t td_cuda_tiles_at_once(uint32_t skip, uint32_t n_tiles, uint32_t n_likely) {
  return skip < n_likely || n_tiles < UNLIKELY_TILES ? n_tiles : UNLIKELY_TILES;
}

uint32_t td_cuda_piece_rows(const td_weight *w, uint32_t n_rows) {
  if (w->dtype == TD_BF16) return n_rows;
  uint32_t n = PIECE_BYTES / (w->cols * (uint32_t)sizeof(uint16_t));
  n = n < 16 ? 16 : n - n % 8;
  return n < n_rows ? n : n_rows;
}

// How long linear_vec's blocks of n_warps warps take, in times of a warp's chunk. A block begins
// and ends with as much as 1.3 of them: some 370 instructions of each warp, where a chunk has 186,
// and a barrier (counted in the code for FP8; on an H100, which took 20 us for 24576 x 1536 by
// blocks of 8 warps with one chunk or two, 1.6 us a chunk).
static double vec_time(uint32_t n_blocks, uint32_t n_chunks, uint32_t n_warps, uint32_t n_sms) {
  const double at_once = (double)n_sms * (TD_CU_VEC_WARPS / n_warps);
  return ceil(n_blocks / at_once) * (1.3 + ceil((double)n_chunks / n_warps));
}

uint32_t td_cuda_vec_warps(const td_weight *w, uint32_t n_matrices, uint32_t n_rows,
                           bool of_experts, uint32_t n_sms) {
  static const uint32_t others[] = {TD_CU_VEC_WARPS / 12, TD_CU_VEC_WARPS / 6, TD_CU_VEC_WARPS / 4,
                                    TD_CU_VEC_WARPS / 2};
  const uint32_t n_blocks = (n_rows + VEC_ROWS - 1) / VEC_ROWS;
  const size_t row_bytes = td_weight_row_bytes(w);
  const uint32_t n_chunks = n_matrices *
                            (uint32_t)((row_bytes + CHUNK_ROW_BYTES - 1) / CHUNK_ROW_BYTES);
  uint32_t best = TD_CU_VEC_WARPS / 3;
  if (of_experts) return best;
  if (n_blocks <= n_sms) return TD_CU_VEC_WARPS;
  for (size_t i = 0; i < TD_COUNT(others); i++) // only for a clear gain
    if (1.05 * vec_time(n_blocks, n_chunks, others[i], n_sms) <
        vec_time(n_blocks, n_chunks, best, n_sms))
      best = others[i];
  return best;
}

void td_cuda_splits(uint32_t max_keys, uint32_t n_blocks, uint32_t *split_keys,
                    uint32_t *n_splits) {
  bool is_few = n_blocks <= FEW_BLOCKS;
  uint32_t keys = is_few ? FEW_BLOCKS_KEYS : FIRST_SPLIT_KEYS;
  uint32_t most = is_few ? TD_CU_MAX_SPLITS : MAX_SPLITS;
  while ((uint64_t)keys * most < max_keys)
    keys *= 2;
  *split_keys = keys;
  *n_splits = max_keys > 0 ? (max_keys - 1) / keys + 1 : 1;
}

void td_cuda_window_splits(uint32_t window, uint32_t max_keys, uint32_t n_blocks,
                           uint32_t *split_keys, uint32_t *n_splits) {
  td_cuda_splits(window, n_blocks, split_keys, n_splits);
  const uint32_t keys = *split_keys, touched = (window - 1 + keys - 1) / keys + 1;
  const uint32_t all = max_keys > 0 ? (max_keys - 1) / keys + 1 : 1;
  *n_splits = touched < all ? touched : all;
}

// Steps of more tokens, whose results depend on one another's number anyway (MOST_VEC_TOKENS), have
// enough of them to fill a GPU.
enum { LATENT_KEYS = 64, LATENT_KEYS_OF_MANY = 2048, FEW_HEADS = 32 };

bool td_cuda_takes_latents(const td_cu_attn_decode_args *a, bool has_wgmma) {
  const size_t places = (uintptr_t)a->kv.pages | (uintptr_t)a->q | a->kv.page_bytes;
  return has_wgmma && a->n_heads > FEW_HEADS &&
         (a->kv.dtype == TD_BF16 || a->kv.dtype == TD_F8E4M3) && (a->k_dim | a->v_dim) % 8 == 0 &&
         places % 16 == 0 && a->batch.page_tokens % TD_CU_LATENT_KEYS == 0;
}

bool td_cuda_takes_delta_chunks(const td_delta_rule_op_args *a) {
  const td_delta_shape *s = &a->shape;
  return s->k_dim > TD_CU_DELTA_KEYS / 2 && (s->k_dim | s->v_dim) % 8 == 0 &&
         (uintptr_t)a->qkv % 16 == 0 && a->batch.page_tokens % TD_CU_DELTA_CHUNK == 0;
}

uint32_t td_cuda_latent_keys(uint32_t n_tokens) {
  return n_tokens > MOST_VEC_TOKENS ? LATENT_KEYS_OF_MANY : LATENT_KEYS;
}

uint32_t td_cuda_latent_splits(uint32_t max_keys, uint32_t least) {
  uint64_t most = 1;
  for (uint64_t keys = least;; keys *= 2) {
    const uint64_t reach = td_cu_latent_reach(keys), n_keys = max_keys < reach ? max_keys : reach;
    if ((n_keys + keys - 1) / keys > most) most = (n_keys + keys - 1) / keys;
    if (max_keys <= reach) return (uint32_t)most;
  }
}

bool td_cuda_folds_by_block(uint32_t n_tokens, uint32_t n_blocks, uint32_t n_splits,
                            uint32_t n_sms) {
  return (uint64_t)n_tokens * n_blocks * ((n_splits + TD_CU_FOLDED - 1) / TD_CU_FOLDED) >= n_sms;
}

uint32_t td_cuda_share_sms(uint32_t n_sms, int capability) {
  const bool is_90 = capability >= 90; // what the driver takes: at least 8 by 8, or 4 by 2
  const uint32_t unit = is_90 ? 8 : 2, least = is_90 ? 8 : 4;
  const uint32_t n = (n_sms - (n_sms + 3) / 4) / unit * unit;
  return n < least ? 0 : n;
}

uint32_t td_cuda_page_of(uint32_t n) {
  uint32_t out = TD_CU_LATENT_KEYS;
  while (out < n)
    out *= 2;
  return out;
}

uint32_t td_cuda_max_keys(const td_batch_view *b) {
  const uint32_t room = b->max_pages * b->page_tokens;
  return b->max_keys && b->max_keys < room ? b->max_keys : room;
}

// A sequence's number of tokens, the first key that any of them sees, in whole tiles, and the
// number of keys from it on; upper bounds if the batch has no host copy.
static void size_of(const td_batch_view *b, uint32_t seq, uint32_t window, uint32_t *n_tokens,
                    uint32_t *first_key, uint32_t *n_keys) {
  *n_tokens = b->n_tokens;
  *first_key = 0;
  *n_keys = td_cuda_max_keys(b);
  if (!b->host_q_begin || !b->host_position) return;
  const int32_t begin = b->host_q_begin[seq], end = b->host_q_begin[seq + 1];
  *n_tokens = end > begin ? (uint32_t)(end - begin) : 0;
  const int32_t last = *n_tokens ? b->host_position[end - 1] : -1;
  const uint32_t n = last < 0 ? 0 : (uint32_t)last + 1;
  if (n < *n_keys) *n_keys = n;
  const int32_t seen = *n_tokens ? b->host_position[begin] + 1 : 0; // by the first token
  if (!window || seen <= 0 || (uint32_t)seen <= window) return;
  const uint32_t hidden = ((uint32_t)seen - window) / TD_CU_PREFILL_TOKENS * TD_CU_PREFILL_TOKENS;
  *first_key = hidden < *n_keys ? hidden : 0;
  *n_keys -= *first_key;
}

uint32_t td_cuda_list_prompts(const td_batch_view *b, uint32_t first, uint32_t window,
                              size_t most_keys, td_cu_prefill_list *out) {
  const bool is_known = b->host_q_begin && b->host_position;
  const uint32_t most = is_known ? TD_CU_PREFILL_SEQS : 1;
  uint32_t seq = first;
  *out = (td_cu_prefill_list){.n_seqs = 0};
  for (; seq < b->n_seqs && out->n_seqs < most; seq++) {
    uint32_t n_tokens, first_key, n_keys;
    size_of(b, seq, window, &n_tokens, &first_key, &n_keys);
    if (out->n_seqs > 0 && (size_t)out->n_keys + n_keys > most_keys) break;
    const uint32_t i = out->n_seqs++;
    out->seqs[i].seq = seq;
    out->seqs[i].first = first_key;
    out->seqs[i].n_keys = n_keys;
    out->seqs[i].key_begin = out->n_keys;
    out->seqs[i].tile_begin = out->n_tiles;
    out->n_keys += n_keys;
    out->n_tiles += (n_tokens + TD_CU_PREFILL_TOKENS - 1) / TD_CU_PREFILL_TOKENS;
    if (n_keys > out->max_keys) out->max_keys = n_keys;
  }
  return seq;
}
