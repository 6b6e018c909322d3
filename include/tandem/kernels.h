// include/tandem/kernels.h - the CPU kernels and their dispatch.
// kernels/registry.inc is the only list of kernels. A family is a row of TD_KERNEL_FAMILIES; its
// variants are named <family>__<isa> and take one argument struct. td_kernels_init selects once the
// first listed variant whose features the machine has; everything afterwards calls through
// td_kernels(). Kernels do not allocate, log or check arguments: valid sizes and dtypes are the
// caller's responsibility.
//
// Linear kernels are batch-invariant: y[t][r] depends, to the last bit, only on x[t], row r and
// whether the token is prefill or decode, not on n_tokens or the row range of the call. Logits on
// one machine therefore do not depend on how a prompt is chunked or what else is in a decode batch.
// The attention kernels guarantee the same per query.
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "tandem/types.h"

// Traversal order of a GEMV. The faster one depends on the CPU and its memory; results are
// bit-identical. Kernels with a single traversal ignore it.
typedef enum {
  TD_GEMV_SEQUENTIAL,  // one row after the other where possible; activations in L1
  TD_GEMV_INTERLEAVED, // several streams of whole rows at once; activations in L2
  TD_N_GEMV_SCHEDULES
} td_gemv_schedule;

// y[t][r - y_row0] = sum_k w[r][k] * x[t][k] for r in [row_begin, row_end).
// Sums are FP32, except in the avx512fp16 variants. x is rounded by the variants of avx512fp16,
// avx512bf16, avxvnni, avx2int16 and avx512int16: see td_activations. Neither x nor y may alias.
// Weights are used as stored: a scale multiplies sums, or activations (one rounding), or, where
// that is exact, weights. A NaN code or scale anywhere in a row makes the row's results NaN.
typedef struct {
  const td_weight *w;
  const float *x;         // f32 [..][ldx], ldx >= w->cols
  const uint32_t *x_rows; // token t reads row x_rows[t] of x; NULL: row t
  float *y;               // f32 [n_tokens][ldy]
  size_t ldx, ldy;
  uint32_t n_tokens;
  uint32_t row_begin, row_end;
  uint32_t y_row0; // <= row_begin
  // true: prefill, where a kernel may sum in another order that is faster for many tokens. false:
  // decode.
  bool prompt;
  bool x_int8;          // a kernel of GGUF's blocks that rounds x rounds it to 8 bits
  td_gemv_schedule way; // used for decode only
  // Weight rows the caller needs next, usually as many bytes each; kernels may prefetch them. NULL:
  // those that follow row_end.
  const void *next;
} td_linear_args;
typedef void (*td_linear_fn)(const td_linear_args *args);

// out[c] = w[row][c] with its scale, over all columns (one rounding; two with a global scale).
typedef struct {
  const td_weight *w;
  float *out; // f32 [w->cols]
  uint32_t row;
} td_decode_row_args;

// out[i] = x[i] / sqrt(mean(x^2) + eps) * w[i]; out may be x.
typedef struct {
  const float *x;
  td_vec w; // w.n elements
  float *out;
  float eps;
} td_norm_row_args;

// out[i] = silu(gate[i]) * up[i]; out may be gate or up.
typedef struct {
  const float *gate, *up;
  float *out;
  size_t n;
} td_swiglu_row_args;

// out[i] = sigmoid(gate[i]) * x[i]; out may be gate or x.
typedef struct {
  const float *gate, *x;
  float *out;
  size_t n;
} td_sigmoid_row_args;

// One position of a causal convolution with a filter of n_taps for each of n channels:
// out[c] = silu(sum_j w[j * ldw + c] * x[j][c]), x[n_taps - 1] the position itself.
typedef struct {
  const float *const *x; // [n_taps], f32 [n] each
  const float *w;        // f32 [n_taps][ldw]
  float *out;            // f32 [n], none of x
  size_t n, ldw;
  uint32_t n_taps;
} td_conv_silu_args;

// Columns of a head's state that delta_rule keeps together.
#define TD_DELTA_COLUMNS 32

// The gated delta rule, position by position, on TD_DELTA_COLUMNS columns of a head's state S
// [k_dim][TD_DELTA_COLUMNS]. With decay g, of all rows of S or of each, and strength b of a
// position:
//   S *= g;  d = b * (v - k S);  S += k (x) d;  out = q S
// The result of a position does not depend on how many are computed by a call. Columns from n_cols
// on are also computed, with v = 0.
typedef struct {
  float *state;       // f32 [k_dim][TD_DELTA_COLUMNS]
  const float *q, *k; // f32 [n_tokens][ldk]
  const float *v;     // f32 [n_tokens][ldv]
  const float *gates; // f32 [n_tokens][ldg]: n_decays of g, b
  float *out;         // f32 [n_tokens][ldo]
  size_t ldk, ldv, ldg, ldo;
  uint32_t n_tokens, k_dim, n_cols; // n_cols: 1 to TD_DELTA_COLUMNS
  uint32_t n_decays;                // 1 or k_dim
} td_delta_rule_args;

// Decays of a head's channels: out[i] = exp(-rate * softplus(x[i] + bias[i])) or, with a bound
// below 0, exp(bound * sigmoid(rate * (x[i] + bias[i]))).
typedef struct {
  const float *x, *bias;
  float *out;
  size_t n;
  float rate, bound; // 0: no bound
} td_decay_row_args;

// y[i] += sum_j a[j] * x[j * ldx + i], in the order of j.
typedef struct {
  float *y;       // f32 [n]
  const float *x; // f32 [n_rows][ldx]
  const float *a; // f32 [n_rows]
  size_t n, ldx;
  uint32_t n_rows;
} td_axpy_args;

// y[c] += sum_j a[j] * w[row + j][c] over all columns, in the order of j: bit-identical to
// decode_row followed by axpy. Weights of 8 bits or more, in rows. The kernel prefetches as many
// rows.
typedef struct {
  const td_weight *w;
  float *y;         // f32 [w->cols]
  const float *a;   // f32 [n_rows]
  const void *next; // rows to prefetch; NULL: those that follow
  uint32_t row, n_rows;
} td_axpy_weights_args;

// f16 <-> f32. To f16: round to nearest even, saturate at the largest finite value, NaN stays NaN.
typedef struct {
  const void *in;
  void *out;
  size_t n;
} td_convert_args;

// out[i] = parts[0][i] + parts[1][i] + ... in this order, in f32. A part is BF16, or f32 and then
// rounded to BF16 (nearest even, NaN stays NaN) before it is added. At least one part.
typedef struct {
  const void *const *parts; // [n_parts], [n] elements each
  void *out;                // [n], f32 or BF16, no alias
  size_t n;
  uint32_t n_parts, f32_parts; // f32_parts: bit p is set if part p is f32
  bool out_f32;
} td_sum_row_args;

// linear_w4a8: TD_I4 and TD_F4E2M1 in rows, times 8-bit activations with one scale per 16 to 128
// columns of a token (kernels/cpu/linear/w4a8.h). Off unless requested.

// Maximum keys in an attention block.
#define TD_ATTN_KEYS 64

// One block of keys for a group of queries, online softmax. For query i, with s[j] = q[i] . k[j]
// over the first n_visible[i] keys: m[i] becomes max(m, s), and l[i] and acc[i], rescaled to the
// new m, gain sum exp(s[j] - m) and sum exp(s[j] - m) v[j]. Start with m = -inf and l = acc = 0;
// the result is acc / l. Keys beyond n_visible[i] do not affect query i, but keys up to the largest
// n_visible must be readable. k and v are f16 (attn_f16) or f32 (attn_f32) and may be the same
// memory. Keys before n_hidden[i], which must be finite, do not affect query i either (a window's
// begin); if n_visible[i] is not 0, some of [n_hidden[i], n_visible[i]) remain. attn_f32 may first
// transpose the keys into `transposed`, so that each SIMD lane sums one score: faster with about a
// hundred queries or more, and rounds differently. With `rows`, which excludes that, keys are
// anywhere: key j at rows[j], and its value as far behind it as v is behind k.
typedef struct {
  const float *q;            // f32 [n_q][ldq], already multiplied by the softmax scale
  const void *k, *v;         // [n_keys][ldk], [n_keys][ldv]
  const char *const *rows;   // [n_keys], or NULL
  const uint32_t *n_visible; // [n_q], <= TD_ATTN_KEYS; 0: the query is unchanged
  const uint32_t *n_hidden;  // [n_q], or NULL: 0 for all
  float *m, *l;              // f32 [n_q]
  float *acc;                // f32 [n_q][ldacc]
  float *transposed;         // scratch, f32 [k_dim][TD_ATTN_KEYS], or NULL
  const void *next_k;        // keys to prefetch for the next block; NULL: none
  const void *next_v;        // values to prefetch; NULL: none, or the keys are the values
  size_t next_bytes;         // bytes of next_k and of next_v, each
  size_t ldq, ldk, ldv, ldacc;
  uint32_t n_q, k_dim, v_dim;
} td_attn_block_args;

#define TD_FAMILY_ROW(X, ID, name, cols, bytes) X(linear_##name, td_linear_args)
#define TD_KERNEL_FAMILIES(X)                                                                      \
  X(linear_f32, td_linear_args)                                                                    \
  X(linear_bf16, td_linear_args)                                                                   \
  X(linear_f16, td_linear_args)                                                                    \
  X(linear_f8e4m3, td_linear_args)                                                                 \
  X(linear_i8, td_linear_args)                                                                     \
  X(linear_i4, td_linear_args)                                                                     \
  X(linear_f4e2m1, td_linear_args)                                                                 \
  TD_BLOCK_ROWS(TD_FAMILY_ROW, X)                                                                  \
  X(linear_w4a8, td_linear_args)                                                                   \
  X(linear_split, td_linear_args)                                                                  \
  X(decode_row, td_decode_row_args)                                                                \
  X(rmsnorm_row, td_norm_row_args)                                                                 \
  X(swiglu_row, td_swiglu_row_args)                                                                \
  X(sigmoid_row, td_sigmoid_row_args)                                                              \
  X(conv_silu, td_conv_silu_args)                                                                  \
  X(delta_rule, td_delta_rule_args)                                                                \
  X(decay_row, td_decay_row_args)                                                                  \
  X(axpy, td_axpy_args)                                                                            \
  X(axpy_weights, td_axpy_weights_args)                                                            \
  X(f32_from_f16, td_convert_args)                                                                 \
  X(f16_from_f32, td_convert_args)                                                                 \
  X(sum_row, td_sum_row_args)                                                                      \
  X(attn_f16, td_attn_block_args)                                                                  \
  X(attn_f32, td_attn_block_args)

// The frozen dispatch table.
typedef struct {
#define X(family, args_type) void (*family)(const args_type *args);
  TD_KERNEL_FAMILIES(X)
#undef X
  const char *isa; // the best ISA the table may use: see td_kernels_isas
  td_activations activations;
} td_kernel_table;

// Features a variant requires.
enum {
  TD_ISA_AVX2 = 1u << 0,   // with FMA and F16C
  TD_ISA_AVX512 = 1u << 1, // F, BW, VL, DQ, VBMI, VNNI
  TD_ISA_AVX512_FP16 = 1u << 2,
  TD_ISA_AVX512_BF16 = 1u << 3,
  TD_MATH_INT16 = 1u << 4, // AVX2 or better; marks variants with 16-bit activations
  // 256-bit VNNI without AVX-512: Intel's desktop CPUs from Alder Lake on
  TD_ISA_AVX_VNNI = 1u << 5,
  // AMX's tiles, with FP16 and BF16: Intel's servers from Sapphire Rapids on. Only once granted
  TD_ISA_AMX = 1u << 6,
};

// Instruction sets, best first: name, features that select an entry, features its kernels may use.
// BF16 dot products have a quarter of FP16's throughput on CPUs that have both, and twice FP32's.
#define TD_ISAS(X)                                                                                 \
  X(avx512amx, TD_ISA_AMX | TD_ISA_AVX512_FP16,                                                    \
    TD_ISA_AMX | TD_ISA_AVX512_FP16 | TD_ISA_AVX512 | TD_MATH_INT16 | TD_ISA_AVX2)                 \
  X(avx512fp16, TD_ISA_AVX512_FP16,                                                                \
    TD_ISA_AVX512_FP16 | TD_ISA_AVX512 | TD_MATH_INT16 | TD_ISA_AVX2)                              \
  X(avx512bf16, TD_ISA_AVX512_BF16,                                                                \
    TD_ISA_AVX512_BF16 | TD_ISA_AVX512 | TD_MATH_INT16 | TD_ISA_AVX2)                              \
  X(avx512int16, TD_ISA_AVX512, TD_ISA_AVX512 | TD_MATH_INT16 | TD_ISA_AVX2)                       \
  X(avx512, TD_ISA_AVX512, TD_ISA_AVX512 | TD_ISA_AVX2)                                            \
  X(avxvnni, TD_ISA_AVX_VNNI, TD_ISA_AVX_VNNI | TD_MATH_INT16 | TD_ISA_AVX2)                       \
  X(avx2int16, TD_MATH_INT16, TD_MATH_INT16 | TD_ISA_AVX2)                                         \
  X(avx2, TD_ISA_AVX2, TD_ISA_AVX2)                                                                \
  X(scalar, 0, 0)

typedef enum {
  TD_KERNELS_OK,
  TD_KERNELS_UNKNOWN_ISA,
  TD_KERNELS_ISA_ABSENT,
  TD_KERNELS_FOREIGN // built with TD_ISAS=native on a CPU that has more than this one
} td_kernels_result;

// Fills the dispatch table. force_isa NULL: the best of this machine; otherwise a name of
// td_kernels_isas, and no family uses a better variant. On failure the table is unchanged. Not
// thread-safe; programs call it through td_dev_open.
td_kernels_result td_kernels_init(const char *force_isa);
// From now on td_kernels_init and td_kernel_variant_runs count TD_ISA_AMX in, if the CPU has it:
// the operating system has granted the process tiles. Not thread-safe.
void td_kernels_grant_tiles(void);
// If nothing is chosen yet, the best that runs: decoding, which all variants do exactly, takes any.
void td_kernels_init_any(void);
// The names accepted by td_kernels_init, those of the build, best first, NULL-terminated.
const char *const *td_kernels_isas(void);
// Refills the table for these activations (td_kernels_init uses F32). Not thread-safe.
void td_kernels_use_activations(td_activations activations);
// Valid after td_kernels_init.
const td_kernel_table *td_kernels(void);
// The linear kernel for weights of this dtype, for prefill (prompt) or decode; NULL: none.
td_linear_fn td_kernels_linear(const td_weight *w, bool prompt);
// The same, but one that never rounds activations.
td_linear_fn td_kernels_linear_exact(const td_weight *w);
// Whether prefill rounds activations to 8 bits for these weights: its calls have x_int8.
bool td_kernels_rounds_x(const td_weight *w);
// How many of the TD_N_GEMV_SCHEDULES, from the first on, the decode kernel for w implements.
uint32_t td_kernels_n_schedules(const td_weight *w);
// Whether the prefill (GEMM) kernel is faster than the decode kernel for n_tokens prompt tokens.
bool td_kernels_use_gemm(const td_weight *w, uint32_t n_tokens);
// Recommended rows per call of the linear kernel, when n_times the work of the whole matrix with
// n_tokens is divided among n_threads. Affects speed only.
uint32_t td_kernels_tile_rows(const td_weight *w, uint32_t n_tokens, size_t n_times,
                              unsigned n_threads);

// All registered variants, best first within their family, for tests, benches and reports. Cast fn
// to the family's type.
typedef struct {
  const char *family, *isa;
  unsigned features; // TD_ISA_ bits
  void (*fn)(void);
} td_kernel_variant;
const td_kernel_variant *td_kernel_variants(size_t *n);
bool td_kernel_variant_runs(const td_kernel_variant *variant); // on this machine
