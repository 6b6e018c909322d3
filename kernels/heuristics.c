// kernels/heuristics.c - how matrices are cut into calls of a linear kernel, and which kernel takes
// them. One table of what is tuned; no result depends on it.
#include "kernels/heuristics.h"

// What a CPU multiplies with decides; a column for weights in rows of more than 4 bits and one for
// those of 4. Measured by
//   tandem bench kernels --format F --batch 1,2,4,8,16,17,32,48,64
// with the values before and after in turn, a CPU of each kind, for AVX2 also by
// TANDEM_FORCE_ISA=avx2 (avx2int16) on one with AVX-512. Constants inside of kernels (prefetch
// distances, registers a tile) are named in the header of the loop that they belong to, because the
// compiler needs them: kernels/cpu/common/prefetch.h, the enum of kernels/cpu/*/linear_*.h.
typedef struct {
  uint32_t gemm_tokens[2]; // from so many tokens on the GEMM is faster than the GEMV
  uint32_t few_rows[2];    // most rows a call with fewer than MANY_TOKENS
  uint32_t many_rows[2];   // and with more
} tuning;

#define NEVER UINT32_MAX
enum { MANY_TOKENS = 17 };

typedef enum {
  IN_F32,
  IN_F32_AVX2,
  IN_INT16_AVX2,
  IN_INT16_AVX512,
  IN_BF16,
  IN_TILES,
  N_KINDS
} kind;

static const tuning table[N_KINDS] = {
    // scalar, and AVX-512 whose activations are not rounded: every call reads and prepares the
    // activations of all its tokens, which for many tokens takes longer than reading 4-bit weights
    [IN_F32] = {{0, 0}, {128, 128}, {128, 256}},
    // Haswell to Zen 3, not rounded: the GEMM costs as much as the GEMV at 16 tokens, three times
    // as much at 2, and is a quarter faster at 48; it takes 24 rows at once
    [IN_F32_AVX2] = {{48, 48}, {128, 128}, {480, 480}},
    // Haswell to Zen 3, Alder Lake: 4-bit weights in INT16, one kernel for any number of tokens
    [IN_INT16_AVX2] = {{48, NEVER}, {128, 256}, {480, 480}},
    // Skylake-X, Ice Lake
    [IN_INT16_AVX512] = {{0, 0}, {128, 256}, {128, 480}},
    // Zen 4, Zen 5, Sapphire Rapids: prefill multiplies more rows at a time
    [IN_BF16] = {{0, 0}, {128, 128}, {512, 512}},
    // Sapphire Rapids with tiles, which wait for activations that every call splits in two
    [IN_TILES] = {{0, 0}, {128, 128}, {1024, 1024}},
};
// 8-bit activations (--activations int8): rounding them takes longest.
enum { MANY_ROWS_ROUNDED = 512 };

static kind kind_of_machine(void) {
  const unsigned features = td_kernels_features();
  const bool has_avx512 = features & TD_ISA_AVX512;
  const bool is_rounded = td_kernels()->activations != TD_ACTIVATIONS_F32;
  if (is_rounded && features & TD_ISA_AMX) return IN_TILES;
  if (is_rounded && features & TD_ISA_AVX512_BF16) return IN_BF16;
  const bool has_int16 = features & TD_MATH_INT16 &&
                         !(features & (TD_ISA_AVX512_BF16 | TD_ISA_AVX512_FP16));
  if (is_rounded && has_int16) return has_avx512 ? IN_INT16_AVX512 : IN_INT16_AVX2;
  return features & TD_ISA_AVX2 && !has_avx512 ? IN_F32_AVX2 : IN_F32;
}

static bool is_4_bit(const td_weight *w) {
  return td_dtype_bits(w->dtype) == 4;
}

uint32_t td_kernels_n_schedules(const td_weight *w) {
  const bool meets_bf16 = !w->zero && w->dtype != TD_F32 && w->dtype != TD_F16 &&
                          !td_dtype_block(w->dtype).cols;
  return kind_of_machine() == IN_BF16 && meets_bf16 ? TD_N_GEMV_SCHEDULES : 1;
}

bool td_kernels_use_gemm(const td_weight *w, uint32_t n_tokens) {
  if (td_kernels_rounds_x(w)) return true;
  return n_tokens >= table[kind_of_machine()].gemm_tokens[is_4_bit(w)];
}

// Maximum rows per call.
static uint32_t most_rows(const td_weight *w, uint32_t n_tokens) {
  const tuning *t = &table[kind_of_machine()];
  const bool is_many = n_tokens >= MANY_TOKENS;
  if (is_many && td_kernels_rounds_x(w)) return MANY_ROWS_ROUNDED;
  return (is_many ? t->many_rows : t->few_rows)[is_4_bit(w)];
}

static size_t n_calls(const td_weight *w, uint32_t n_rows, size_t n_times) {
  return (w->rows + n_rows - 1) / n_rows * n_times;
}

// A call takes about a microsecond to reach full memory speed, because it begins far from where its
// thread has read before, so large calls are better. But threads that finish early wait for the
// last one: with 4 calls per thread that is short enough.
uint32_t td_kernels_tile_rows(const td_weight *w, uint32_t n_tokens, size_t n_times,
                              unsigned n_threads) {
  enum { LEAST_ROWS = 8, EVEN_ROWS = 32, CALLS_A_THREAD = 4 };
  uint32_t n = most_rows(w, n_tokens);
  if (n_threads == 1) return n;
  while (n > EVEN_ROWS && n_calls(w, n, n_times) < (size_t)CALLS_A_THREAD * n_threads)
    n /= 2;
  while (n > LEAST_ROWS && n_calls(w, n, n_times) < n_threads) // or some thread would have none
    n /= 2;
  return n;
}
