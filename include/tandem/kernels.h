// include/tandem/kernels.h - the CPU kernels and how one version of each is chosen.
// kernels/registry.inc is the only list of kernels. A family is a row of TD_KERNEL_FAMILIES; its
// versions are named <family>__<isa> and take one argument struct. td_kernels_init picks, once, the
// first listed version whose features the machine has; everything afterwards calls through
// td_kernels(). Kernels do not allocate, log or check: sizes and dtypes are the caller's promise.
//
// A linear kernel is batch-invariant: y[t][r] depends, to the last bit, on x[t], row r and whether
// the token is a prompt's alone, not on n_tokens or on the row range it was called with. However a
// prompt is cut, and whatever else is computed with an answer's tokens, they therefore give the
// same logits on one machine. The attention kernels keep the same promise for each query.
#ifndef TANDEM_KERNELS_H
#define TANDEM_KERNELS_H

#include <stdbool.h>
#include <stdint.h>

#include "tandem/types.h"

// How an answer's rows are read: which is quicker is the processor's and its memory's, and no bit
// depends on it. Kernels that have one way take that.
typedef enum {
  TD_GEMV_SEQUENTIAL,  // row by row as far as that goes, activations in L1
  TD_GEMV_INTERLEAVED, // several places at once, whole rows, activations in L2
  TD_N_GEMV_SCHEDULES
} td_gemv_schedule;

// y[t][r - y_row0] = sum_k w[r][k] * x[t][k] for r in [row_begin, row_end), FP32 accumulation
// but for the versions of avx512fp16, x rounded by those and by avx512bf16's, avxvnni's,
// avx2int16's and avx512int16's: see td_activations. Neither x nor y alias. The weight is used as
// stored: a scale multiplies sums, or activations with one rounding, or, where that is exact,
// weights; a NaN code or scale anywhere in a row makes the row's results NaN.
typedef struct {
  const td_weight *w;
  const float *x;         // f32 [..][ldx], ldx >= w->cols
  const uint32_t *x_rows; // token t reads row x_rows[t] of x; NULL: row t
  float *y;               // f32 [n_tokens][ldy]
  size_t ldx, ldy;
  uint32_t n_tokens;
  uint32_t row_begin, row_end;
  uint32_t y_row0; // <= row_begin
  // Tokens of a prompt: a kernel may add their products in another order, which is quicker for
  // many of them. Others are an answer's, of which few come at once.
  bool prompt;
  td_gemv_schedule way; // of an answer's tokens
  // Rows of weights, most likely as many bytes each, that the caller goes on with: fetched ahead by
  // kernels that can. NULL: those behind row_end.
  const void *next;
} td_linear_args;
typedef void (*td_linear_fn)(const td_linear_args *args);

// out[c] = w[row][c], scale included (one rounding; two with a global scale), over all columns.
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

// y[i] += sum_j a[j] * x[j * ldx + i], in the order of j.
typedef struct {
  float *y;       // f32 [n]
  const float *x; // f32 [n_rows][ldx]
  const float *a; // f32 [n_rows]
  size_t n, ldx;
  uint32_t n_rows;
} td_axpy_args;

// y[c] += sum_j a[j] * w[row + j][c], in the order of j, over all columns: what decode_row and axpy
// give, to the last bit. Weights of 8 bits and more, in rows; as many rows are fetched ahead.
typedef struct {
  const td_weight *w;
  float *y;         // f32 [w->cols]
  const float *a;   // f32 [n_rows]
  const void *next; // what is fetched; NULL: the rows behind these
  uint32_t row, n_rows;
} td_axpy_weights_args;

// f16 <-> f32. To f16: round to nearest even, saturated at the largest finite value, NaN stays NaN.
typedef struct {
  const void *in;
  void *out;
  size_t n;
} td_convert_args;

// linear_w4a8: TD_I4 and TD_F4E2M1 in rows, times activations of 8 bits with a scale for each 16
// to 128 columns of a token (kernels/cpu/linear/w4a8.h). Off unless asked for.

// Keys one attention block may hold.
#define TD_ATTN_KEYS 64

// One block of keys for a group of queries, online softmax. For query i, with
// s[j] = q[i] . k[j] over the first n_visible[i] keys: m[i] becomes max(m, s), and l[i] and acc[i],
// rescaled to the new m, gain sum exp(s[j] - m) and sum exp(s[j] - m) v[j]. Start with m = -inf and
// l = acc = 0; the result is acc / l. Keys a query does not see are not read for it, but all
// n_visible maxima lie in valid memory. k and v are f16 (attn_f16) or f32 (attn_f32) and may be
// one. With `transposed` attn_f32 may turn keys there first, so that a score is one lane's sum:
// that pays with a hundred queries and more, and rounds otherwise.
typedef struct {
  const float *q;            // f32 [n_q][ldq], scale already inside
  const void *k, *v;         // [n_keys][ldk], [n_keys][ldv]
  const uint32_t *n_visible; // [n_q], <= TD_ATTN_KEYS; 0 leaves the query as it is
  float *m, *l;              // f32 [n_q]
  float *acc;                // f32 [n_q][ldacc]
  float *transposed;         // scratch, f32 [k_dim][TD_ATTN_KEYS], or NULL
  const void *next_k;        // keys and values that come next, fetched meanwhile; NULL: none, or,
  const void *next_v;        //   of values, that keys are them
  size_t next_bytes;         // of each
  size_t ldq, ldk, ldv, ldacc;
  uint32_t n_q, k_dim, v_dim;
} td_attn_block_args;

#define TD_KERNEL_FAMILIES(X)                                                                      \
  X(linear_f32, td_linear_args)                                                                    \
  X(linear_bf16, td_linear_args)                                                                   \
  X(linear_f16, td_linear_args)                                                                    \
  X(linear_f8e4m3, td_linear_args)                                                                 \
  X(linear_i8, td_linear_args)                                                                     \
  X(linear_i4, td_linear_args)                                                                     \
  X(linear_i4_gptq, td_linear_args)                                                                \
  X(linear_i4_awq, td_linear_args)                                                                 \
  X(linear_f4e2m1, td_linear_args)                                                                 \
  X(linear_w4a8, td_linear_args)                                                                   \
  X(decode_row, td_decode_row_args)                                                                \
  X(rmsnorm_row, td_norm_row_args)                                                                 \
  X(swiglu_row, td_swiglu_row_args)                                                                \
  X(axpy, td_axpy_args)                                                                            \
  X(axpy_weights, td_axpy_weights_args)                                                            \
  X(f32_from_f16, td_convert_args)                                                                 \
  X(f16_from_f32, td_convert_args)                                                                 \
  X(attn_f16, td_attn_block_args)                                                                  \
  X(attn_f32, td_attn_block_args)

// The frozen dispatch table.
typedef struct {
#define X(family, args_type) void (*family)(const args_type *args);
  TD_KERNEL_FAMILIES(X)
#undef X
  const char *isa; // the best the table may use: see td_kernels_isas
  td_activations activations;
} td_kernel_table;

// What a version needs of the machine.
enum {
  TD_ISA_AVX2 = 1u << 0,   // with FMA and F16C
  TD_ISA_AVX512 = 1u << 1, // F, BW, VL, DQ, VBMI, VNNI
  TD_ISA_AVX512_FP16 = 1u << 2,
  TD_ISA_AVX512_BF16 = 1u << 3,
  TD_MATH_INT16 = 1u << 4,   // AVX2 or more; marks what multiplies activations of 16 bits
  TD_ISA_AVX_VNNI = 1u << 5, // AVX2's width, without AVX-512: Intel's desktops from Alder Lake on
};

typedef enum { TD_KERNELS_OK, TD_KERNELS_UNKNOWN_ISA, TD_KERNELS_ISA_ABSENT } td_kernels_result;

// Fills the dispatch table. force_isa NULL: the best of this machine; else a name of
// td_kernels_isas and no family takes a better version. On failure the table is left as it was. Not
// thread-safe; programs reach it through td_dev_open.
td_kernels_result td_kernels_init(const char *force_isa);
// Names accepted above, best first, ending with NULL.
const char *const *td_kernels_isas(void);
// Fills it again, for these activations; td_kernels_init does for F32. As little thread-safe.
void td_kernels_use_activations(td_activations activations);
// Valid after td_kernels_init.
const td_kernel_table *td_kernels(void);
// The linear kernel for weights of this dtype and layout, and tokens of a prompt or of answers;
// NULL where there is none.
td_linear_fn td_kernels_linear(const td_weight *w, bool prompt);
// The same that never rounds activations.
td_linear_fn td_kernels_linear_exact(const td_weight *w);
// How many of TD_N_GEMV_SCHEDULES it has, from the first on, for an answer's tokens.
uint32_t td_kernels_n_schedules(const td_weight *w);
// Whether it is the prompt's way that is quicker for n_tokens of a prompt.
bool td_kernels_use_gemm(const td_weight *w, uint32_t n_tokens);
// Rows that one call of it had best have, as far as can be told beforehand, when n_times as much
// work as all the rows of the matrix with n_tokens is shared out to n_threads: for speed only.
uint32_t td_kernels_tile_rows(const td_weight *w, uint32_t n_tokens, size_t n_times,
                              unsigned n_threads);

// Every registered version, best first within its family, for tests, benches and reports. Cast fn
// back to the family's type.
typedef struct {
  const char *family, *isa;
  unsigned features; // TD_ISA_ bits
  void (*fn)(void);
} td_kernel_variant;
const td_kernel_variant *td_kernel_variants(size_t *n);
bool td_kernel_variant_runs(const td_kernel_variant *variant); // on this machine

#endif
