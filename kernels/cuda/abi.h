// kernels/cuda/abi.h - the interface between the program and the CUDA library, in plain C.
// The library (kernels/cuda/*.cu, with the CUDA runtime linked in) is loaded at run time and
// exports one table of functions; the program itself does not link CUDA. tests/cuda_emu builds the
// same library from the same sources without a GPU.
//
// Functions return 0 or a code for error_text. Operators are enqueued on a stream; pointers in
// their arguments are device memory. Activations are BF16 bits in uint16_t, dense unless a stride
// (in elements) is given; accumulation is FP32. Operators are those of tandem/op_args.h, with the
// same arguments, or parts of those of device/device.h; shapes are documented there.
//
// No struct has padding, which the compiler checks: a field named unused is where it would be. So
// what a kernel is passed is all initialized, and the emulator can look for pointers in it.
//
// A launcher does not check sizes, dtypes or anything else the host can check. For errors that only
// the device can see (an id, position or page out of range) the kernel skips that row and stores a
// td_cu_fault in *fault, which is host memory.
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "tandem/op_args.h"
#include "tandem/types.h"

#if defined(__GNUC__) && !defined(__CUDACC__)
#pragma GCC diagnostic push
#pragma GCC diagnostic error "-Wpadded"
#endif

#include "kernels/cuda/abi_linear.h" // here, so that its structs are checked

#define TD_CUDA_ABI_VERSION 46u
#define TD_CUDA_ABI_SYMBOL  "td_cuda_abi"

typedef void *td_cu_stream;
typedef void *td_cu_event;
typedef void *td_cu_blas;
typedef void *td_cu_graph;
typedef void *td_cu_share; // of the GPU's SMs
// a cuBLAS function by name; NULL: not available
typedef void *(*td_cu_symbol_fn)(void *ctx, const char *name);

typedef enum {
  TD_CU_FAULT_NONE,
  TD_CU_FAULT_TOKEN,    // a token id outside the vocabulary
  TD_CU_FAULT_ROW,      // a negative row to gather
  TD_CU_FAULT_POSITION, // a negative position, or one beyond the sequence's pages
  TD_CU_FAULT_PAGE,     // an absent page
  TD_CU_FAULT_EXPERT,   // an expert id out of range
  TD_CU_FAULT_TIMEOUT,  // timeout while waiting for a signal
  TD_CU_FAULT_CANCELED, // canceled while waiting for a signal
} td_cu_fault;

typedef struct {
  char name[128];
  size_t total_bytes;
  int pci_domain, pci_bus, pci_device;
  int capability; // 10 * major + minor
  int n_sms;
  uint32_t has_wgmma;     // bool: sm_90a, and the library has code for it
  uint32_t has_f8;        // bool: E4M3 on tensor cores, sm_89 and later, likewise; set by open
  uint32_t is_translated; // bool: the library has PTX alone for it, which open has to translate
} td_cu_props;

// Limits of kernels that take the arguments of tandem/op_args.h.
//
// kv_store: pages are TD_BF16, TD_F16 or TD_F8E4M3. In the last, pages and page_bytes are multiples
// of 16 bytes, a row's codes of 16, and what follows them in BF16 of 8 elements.
//
// delta_conv, delta_rule: k_dim is at most TD_CU_DELTA_KEYS. delta_chunks, with one decay a value
// head, and delta_channels, with a decay for each channel, take so many positions at a time.
// page_tokens is a multiple of them, k_dim and v_dim are multiples of 8, and qkv is 16-byte
// aligned.
enum { TD_CU_DELTA_KEYS = 128, TD_CU_DELTA_CHUNK = 32, TD_CU_CHANNEL_CHUNK = 16 };
// What delta_channels has of a chunk and head in memory: elements. A slot is of a chunk of all
// heads: products are [slots][n_v_heads][TD_CU_CHANNEL_PRODUCTS].
enum { TD_CU_CHANNEL_PRODUCTS = 4 * TD_CU_CHANNEL_CHUNK * TD_CU_CHANNEL_CHUNK };

enum { TD_CU_MAX_SPLITS = 128, TD_CU_FOLDED = 4 };

// The slot of delta_channels' products that is a sequence's first; from its first token of the
// step. A sequence of n tokens has at most n / 16 + 2 chunks, so with those of all n_tokens and
// n_seqs this is the number of slots.
TD_ANYWHERE static inline size_t td_cu_channel_slot(uint32_t first_token, uint32_t seq) {
  return first_token / TD_CU_CHANNEL_CHUNK + (size_t)2 * seq;
}

// The most keys that attn_latents cuts into splits of `keys`, which is at least 64. Short sequences
// have few splits, so that batches of them do not leave more partial sums than they read keys.
enum { TD_CU_LATENT_SPLITS = 64 }; // of a sequence, at most
TD_ANYWHERE static inline uint64_t td_cu_latent_reach(uint64_t keys) {
  const uint64_t most = TD_CU_LATENT_SPLITS;
  return keys * (keys / 4 < most ? keys / 4 : most);
}

// Keys per split of a sequence of n_keys: a power of two, `least` (which is one) or more.
TD_ANYWHERE static inline uint32_t td_cu_latent_split(uint32_t n_keys, uint32_t least) {
  uint64_t keys = least;
  while (n_keys > td_cu_latent_reach(keys))
    keys *= 2;
  return (uint32_t)keys;
}

// Maximum heads that share keys in one block of attn_decode.
static inline uint32_t td_cu_decode_heads(uint32_t k_dim, bool v_in_k) {
  return k_dim <= 128 && !v_in_k ? 16 : 32;
}

// Attention of every token to the cached positions up to its own. Keys are cut into n_splits splits
// of split_keys, a power of two; at most TD_CU_MAX_SPLITS. Each split leaves partial sums, which a
// last kernel merges. With v_in_k, the sums of every TD_CU_FOLDED splits are first added in order:
// with by_block in the block that computes all of them, otherwise in the last kernel, with the same
// bits. n_rows: partial sums per head, which is n_splits or, by_block, n_splits / TD_CU_FOLDED
// rounded up.
//   GQA: n_kv_heads planes of keys, then of values; k_dim, v_dim at most TD_CU_MMA_HEAD. With a
//   window > 0 a token sees that many positions, its own the last, and its splits are counted from
//   the one with the first of them on. A sink is a logit of the head that adds to the sum of
//   weights and has no value. blocks, instead of a window: of a token that sees more than
//   top_blocks blocks of `block` positions, those that a KV head sees, in rising order; its keys
//   are then counted over them, one after the other. of_groups: blocks are the same for all KV
//   heads, and whole; a token also sees those of its own block, up to itself, unless that ends with
//   it. MLA absorbed: n_kv_heads 1, v_in_k: values are
//   the first v_dim elements of the keys; k_dim at most TD_CU_MMA_ENTRY, v_dim TD_CU_MMA_LORA.
// attn_latents does the latter for many heads and needs td_cu_props.has_wgmma, BF16 pages, queries
// in BF16 and results in f32, k_dim and v_dim multiples of 8, page_tokens one of TD_CU_LATENT_KEYS,
// pages, page_bytes and q of 16 bytes. Splits are by_length: those of td_cu_latent_split of a
// token's own number of keys with split_keys as `least`; there are at most n_splits.
enum { TD_CU_LATENT_HEADS = 64, TD_CU_LATENT_KEYS = 64 }; // of a block, of a tile
typedef struct {
  td_batch_view batch;
  td_kv_view kv;
  const void *q;         // [n_tokens][n_heads][k_dim], BF16 or, with q_f32, f32
  void *out;             // [n_tokens][n_heads][v_dim], likewise; of attn_latents always f32
  float *part;           // [n_tokens][n_heads][n_rows][v_dim]: sums, not normalized
  float *part_ml;        // [n_tokens][n_heads][n_rows][2]: maximum m, sum of weights 2^(.. - m)
  const float *sinks;    // [n_heads] or NULL
  const int32_t *blocks; // [n_tokens][n_kv_heads, or 1][top_blocks] or NULL: all
  uint32_t block, top_blocks;
  uint32_t n_heads, n_kv_heads, k_dim, v_dim, n_splits, split_keys, n_rows, window;
  float scale;
  uint16_t q_f32, v_in_k; // bool, as what follows
  uint32_t by_block, by_length, of_groups;
  uint32_t in_runs, in_pages, out_f32; // bool, set by the launcher: how the kernel loads and stores
} td_cu_attn_decode_args;

// The sequences of one launch of prefill attention. Their keys, of n_keys positions from `first`
// on, a multiple of TD_CU_PREFILL_TOKENS, are stored one sequence after the other in n_keys slots,
// each sequence from key_begin on. Their tokens are cut into n_tiles tiles of TD_CU_PREFILL_TOKENS,
// each sequence from tile_begin on.
enum { TD_CU_PREFILL_SEQS = 32, TD_CU_PREFILL_TOKENS = 128 };
typedef struct {
  struct {
    uint32_t seq, first, n_keys, key_begin, tile_begin;
  } seqs[TD_CU_PREFILL_SEQS];
  uint32_t n_seqs, n_keys, n_tiles;
  uint32_t max_keys; // of a single sequence
} td_cu_prefill_list;

// out[plane][head - head0][key_begin + p][:] = position first + p of a listed sequence's pages as
// BF16, for p < its n_keys and heads [head0, head0 + n_heads) of each plane's n_kv_heads. Elements
// from dim up to a multiple of 8 are zeros; nothing is written past the sequence's end.
typedef struct {
  td_batch_view batch;
  td_kv_view kv;
  td_cu_prefill_list list;
  uint16_t *out; // [n_planes][n_heads][list.n_keys][dim, rounded up]
  uint32_t n_planes, n_kv_heads, head0, n_heads, dim;
  uint32_t in_runs; // bool, set by the launcher: how the kernel loads
} td_cu_kv_gather_args;

// Causal attention on tensor cores, of the tokens of the listed sequences to their sequence's
// n_keys positions; windows and sinks as in td_cu_attn_decode_args. Slot p of KV head h has its key
// at k[h * k_head + p * k_stride ..) with the last rope_dim elements at rope[p * rope_stride ..),
// and its value at v[h * v_head + p * v_stride
// ..). All are BF16. Addresses are multiples of 16 bytes, strides multiples of 8 elements. Dims are
// multiples of 8 too, unless rope_dim is 0 and rows can be read up to the next multiple. k_dim and
// v_dim are at most TD_CU_MMA_HEAD.
typedef struct {
  td_batch_view batch;
  td_cu_prefill_list list;
  const uint16_t *q; // token t, head h at q + t * q_stride + h * k_dim
  uint16_t *out;     // likewise with out_stride, v_dim
  const uint16_t *k, *rope, *v;
  size_t q_stride, out_stride;
  size_t k_head, v_head, k_stride, rope_stride, v_stride;
  const float *sinks; // [n_heads] or NULL
  uint32_t n_heads, heads_per_kv, k_dim, v_dim, rope_dim, window;
  float scale;
  uint16_t by_wgmma; // bool: needs td_cu_props.has_wgmma
  uint8_t in_f16;    // bool, if not by wgmma: by short sums in F16; not of compute capability 9.0
  uint8_t q_in_runs; // bool, set by the launcher: how the kernel loads
} td_cu_attn_prefill_args;

enum { TD_CU_MMA_HEAD = 256, TD_CU_MMA_ENTRY = 576, TD_CU_MMA_LORA = 512 };

// absorb: query[t][h][0 .. lora) = q_nope times kv_b's key rows of head h; query[t][h][lora ..) =
// q_rope; f32 or, with query_bf16, BF16. values: out[t][h][:] = kv_b's value rows of head h times
// latent[t][h][:].
typedef struct {
  td_weight kv_b;
  const uint16_t *q;   // [n_tokens][n_heads][nope + rope]
  void *query;         // [n_tokens][n_heads][lora + rope]
  const float *latent; // [n_tokens][n_heads][lora]
  uint16_t *out;       // [n_tokens][n_heads][v_dim]
  uint32_t n_tokens, n_heads, nope_dim, rope_dim, v_dim, lora;
  uint32_t query_bf16; // bool
  td_cu_read read;     // of kv_b
} td_cu_mla_args;

enum { TD_CU_INDEX_DIM = 128 }; // td_select_args: dim, at most

// Copies what token t attends to into page t of `out`, [page_tokens][dim] each, in the order of
// positions: the selected entries or, of a token that sees no more than most, all. group > 0:
// groups of so many entries are selected, and a token sees those of its own, too
// (td_attn_mla_args). seq, position and page_table describe these pages: tokens are sequences of
// one page.
typedef struct {
  td_batch_view batch;
  td_kv_view kv;
  const int32_t *selected;
  uint16_t *out;
  int32_t *seq, *position, *page_table; // [n_tokens]
  uint32_t dim, top_k, group, page_tokens;
  uint32_t most;    // keys that any token sees: td_most_selected
  uint32_t in_runs; // bool, set by the launcher: how the kernel copies
} td_cu_select_gather_args;

// Copies what tokens [token0, token0 + n) of the batch see (td_attn_pool_args in device/device.h)
// into pages of `out`, [page_tokens][dim] each: entries, then the window's keys. seq, position and
// page_table describe these pages: tokens are sequences of one page.
typedef struct {
  td_batch_view batch;
  td_kv_view state;    // the ring is at their begin
  const uint16_t *key; // of the batch's token t at key + t * key_stride
  size_t key_stride;
  const int32_t *selected; // [batch.n_tokens][top_k], or NULL: all entries
  uint16_t *out;
  int32_t *seq, *position, *page_table; // [n]
  size_t entry_at;                      // elements of the state
  uint32_t token0, n, dim, window, ring, group, top_k, page_entries, page_tokens;
  uint32_t most_keys; // that any token sees
  uint32_t in_runs;   // bool, set by the launcher: how the kernel copies
  uint32_t unused;
} td_cu_pool_gather_args;

// Leaves the last `ring` keys in each page that the batch's sequences pass: that of position p at
// element p % ring * dim of the state. Earlier keys are in the page of the position before.
typedef struct {
  td_batch_view batch;
  td_kv_view state;
  const uint16_t *key;
  size_t key_stride;
  uint32_t dim, ring;
} td_cu_pool_ring_args;

enum { TD_CU_STREAM_DIM = 24 << 10 }; // hyper_read: dim, at most

// Leaves the ids of the last n_ids tokens, oldest first, in the states that the batch's sequences
// pass: i32, at element ids_at. Before a sequence's begin, `end` stands for a token.
typedef struct {
  td_batch_view batch;
  td_kv_view state;
  td_state_trail trail;
  size_t ids_at;
  const int32_t *tokens; // [n_tokens]
  uint32_t n_ids;
  int32_t end;
} td_cu_ngram_ids_args;

enum { TD_CU_TOP_SLICE = 1024, TD_CU_TOP_MAX_SLICES = 1024 };

// Nothing but mma.sync or wgmma, to measure its peak: each warp of n_blocks blocks multiplies
// TD_CU_PEAK_MMAS times n_rounds tiles of TD_CU_PEAK_FLOPS, TD_CU_PEAK_WGMMA times that by wgmma,
// and twice that in 8 bits.
enum { TD_CU_PEAK_WGMMA = 16 };
enum { TD_CU_PEAK_WARPS = 8, TD_CU_PEAK_MMAS = 8, TD_CU_PEAK_FLOPS = 2 * 16 * 8 * 16 };
typedef struct {
  float *out; // [n_blocks][32 * TD_CU_PEAK_WARPS]
  uint32_t n_blocks, n_rounds;
  // TD_BF16; TD_F8E4M3, which needs td_cu_props.has_f8; TD_I8; TD_F16 with sums in F16, by mma.sync
  td_dtype dtype;
  uint32_t is_wgmma; // bool: needs td_cu_props.has_wgmma
} td_cu_mma_peak_args;

#define TD_CU_OPS(X)                                                                               \
  X(embed, td_embed_args)                                                                          \
  X(add, td_add_args)                                                                              \
  X(copy_direct, td_copy_args)                                                                     \
  X(gather, td_gather_rows_args)                                                                   \
  X(sum_parts, td_sum_parts_args)                                                                  \
  X(rmsnorm, td_rmsnorm_args)                                                                      \
  X(layernorm, td_layernorm_args)                                                                  \
  X(rope, td_rope_args)                                                                            \
  X(scale_rows, td_scale_rows_args)                                                                \
  X(linear_vec, td_cu_linear_args)                                                                 \
  X(linear_mma, td_cu_linear_args)                                                                 \
  X(linear_wgmma, td_cu_linear_args)                                                               \
  X(round_a8, td_cu_round_a8_args)                                                                 \
  X(linear_a8, td_cu_linear_args)                                                                  \
  X(linear_a8_wgmma, td_cu_linear_args)                                                            \
  X(dequant, td_cu_dequant_args)                                                                   \
  X(kv_store, td_kv_store_args)                                                                    \
  X(kv_gather, td_cu_kv_gather_args)                                                               \
  X(attn_decode, td_cu_attn_decode_args)                                                           \
  X(attn_latents, td_cu_attn_decode_args)                                                          \
  X(attn_prefill, td_cu_attn_prefill_args)                                                         \
  X(delta_conv, td_delta_conv_args)                                                                \
  X(delta_rule, td_delta_rule_op_args)                                                             \
  X(delta_chunks, td_delta_rule_op_args)                                                           \
  X(delta_channels, td_delta_rule_op_args)                                                         \
  X(gate_rows, td_gate_rows_args)                                                                  \
  X(mla_absorb, td_cu_mla_args)                                                                    \
  X(mla_values, td_cu_mla_args)                                                                    \
  X(select, td_select_args)                                                                        \
  X(select_gather, td_cu_select_gather_args)                                                       \
  X(pool, td_pool_args)                                                                            \
  X(pool_gather, td_cu_pool_gather_args)                                                           \
  X(pool_ring, td_cu_pool_ring_args)                                                               \
  X(hyper_read, td_hyper_read_args)                                                                \
  X(hyper_write, td_hyper_write_args)                                                              \
  X(hyper_mix, td_hyper_mix_args)                                                                  \
  X(silu_rows, td_silu_rows_args)                                                                  \
  X(ngram_ids, td_cu_ngram_ids_args)                                                               \
  X(ngram_gate, td_ngram_gate_args)                                                                \
  X(ngram_conv, td_ngram_conv_args)                                                                \
  X(router, td_router_args)                                                                        \
  X(top_logits, td_top_logits_args)                                                                \
  X(moe_sort, td_cu_moe_sort_args)                                                                 \
  X(swiglu, td_cu_swiglu_args)                                                                     \
  X(moe_sum, td_cu_moe_sum_args)                                                                   \
  X(moe_join, td_moe_join_args)                                                                    \
  X(signal, td_signal_args)                                                                        \
  X(post, td_post_args)                                                                            \
  X(await, td_await_args)                                                                          \
  X(mma_peak, td_cu_mma_peak_args)

// The library's other functions: name, result (a CUDA error code where it is an int), parameters.
//   open           also makes it the calling thread's current device; threads waiting for it sleep
//                  instead of spinning
//   use            makes an open device current on the calling thread: memory, streams and events
//                  are created on it, and operators go to its streams only
//   probe          whether the driver can run the library's code
//   alloc_host     host memory that the device accesses at the same address
//   reach          lets kernels of the current device access memory of another one; *is_reached:
//                  false where there is no path between them
//   pin            registers memory; only_read: the mapping is read-only, and the device never
//                  writes to it
//   share_open     a share of *n_sms SMs, which becomes the number that it has; fails if the driver
//                  has no green contexts. Closed after its streams
//   share_stream_open
//                  a stream whose kernels run on the share's SMs alone, and yield to others there
//   event_is_done  *is_done is also true after a failure
//   capture_begin, capture_end
//                  work queued between them does not run but becomes a graph; on failure *out is
//                  NULL
//   blas_open      cuBLAS on a stream, which must be closed after it; fails if cuBLAS is not
//                  installed
//   blas_use       moves it to another stream, whose work follows that of the one before
#define TD_CU_CALLS(X)                                                                             \
  X(error_text, const char *, (int code))                                                          \
  X(count, int, (int *n_devices))                                                                  \
  X(describe, int, (int device, td_cu_props *props))                                               \
  X(open, int, (int device, td_cu_props *props))                                                   \
  X(use, int, (int device))                                                                        \
  X(probe, int, (void))                                                                            \
  X(memory, int, (size_t * free_bytes, size_t * total_bytes))                                      \
  X(alloc, int, (void **out, size_t n_bytes))                                                      \
  X(free, int, (void *ptr))                                                                        \
  X(alloc_host, int, (void **out, size_t n_bytes))                                                 \
  X(free_host, int, (void *ptr))                                                                   \
  X(reach, int, (int device, bool *is_reached))                                                    \
  X(pin, int, (const void *host, size_t n_bytes, bool only_read))                                  \
  X(unpin, int, (const void *host))                                                                \
  X(stream_open, int, (td_cu_stream * out, bool is_urgent))                                        \
  X(share_open, int, (td_cu_share * out, int device, int *n_sms))                                  \
  X(share_close, int, (td_cu_share share))                                                         \
  X(share_stream_open, int, (td_cu_stream * out, td_cu_share share))                               \
  X(stream_close, int, (td_cu_stream stream))                                                      \
  X(stream_sync, int, (td_cu_stream stream))                                                       \
  X(await_idle, int, (void))                                                                       \
  X(event_open, int, (td_cu_event * out))                                                          \
  X(event_close, int, (td_cu_event event))                                                         \
  X(event_record, int, (td_cu_event event, td_cu_stream stream))                                   \
  X(event_sync, int, (td_cu_event event))                                                          \
  X(event_is_done, int, (td_cu_event event, bool *is_done))                                        \
  X(stream_wait, int, (td_cu_stream stream, td_cu_event event))                                    \
  X(copy, int, (void *dst, const void *src, size_t n_bytes, td_cu_stream stream))                  \
  X(fill_zero, int, (void *dst, size_t n_bytes, td_cu_stream stream))                              \
  X(capture_begin, int, (td_cu_stream stream))                                                     \
  X(capture_end, int, (td_cu_stream stream, td_cu_graph * out))                                    \
  X(graph_launch, int, (td_cu_graph graph, td_cu_stream stream))                                   \
  X(graph_close, int, (td_cu_graph graph))                                                         \
  X(blas_open, int, (td_cu_blas * out, td_cu_stream stream, td_cu_symbol_fn symbol, void *ctx))    \
  X(blas_use, int, (td_cu_blas blas, td_cu_stream stream))                                         \
  X(blas_close, int, (td_cu_blas blas))                                                            \
  X(blas_gemm, int, (td_cu_blas blas, const td_cu_gemm_args *args))

// What the library says of one of its functions.
typedef struct {
  const char *name;
  size_t args_bytes; // size of the argument struct of TD_CU_OPS; 0 for TD_CU_CALLS
} td_cu_function;

#define TD_CU_FUNCTION_LIST                                                                        \
  { TD_CU_CALLS(TD_CU_CALL_ENTRY) TD_CU_OPS(TD_CU_OP_ENTRY) }
#define TD_CU_CALL_ENTRY(name, result, params) {#name, 0},
#define TD_CU_OP_ENTRY(name, args_type)        {#name, sizeof(args_type)},

// The first five members keep their places in all versions.
typedef struct {
  uint32_t version;                // TD_CUDA_ABI_VERSION
  uint32_t n_bytes;                // size of this struct
  uint32_t n_functions;            // of the library
  int cuda_major;                  // the CUDA release it was built with
  const td_cu_function *functions; // [n_functions], in the order of the pointers below
#define X(name, result, params) result(*name) params;
  TD_CU_CALLS(X)
#undef X
#define X(name, args_type) int (*name)(const args_type *args, td_cu_stream stream);
  TD_CU_OPS(X)
#undef X
} td_cu_abi;

typedef const td_cu_abi *(*td_cuda_abi_fn)(void);

#if defined(__GNUC__) && !defined(__CUDACC__)
#pragma GCC diagnostic pop
#endif

#ifdef __cplusplus
extern "C" {
#endif
// The library's only symbol.
const td_cu_abi *td_cuda_abi(void);
// The functions in the table.
#define X(name, result, params) result td_cu_##name params;
TD_CU_CALLS(X)
#undef X
#define X(name, args_type) int td_cu_##name(const args_type *args, td_cu_stream stream);
TD_CU_OPS(X)
#undef X
#ifdef __cplusplus
}
#endif
