// src/bench/flops.c - measures arithmetic peaks with twelve independent chains of one instruction:
// enough to hide its latency, few enough to stay in registers.
#include "bench/machine.h"

#include <stddef.h>
#include <stdint.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "base/clock.h"

enum { N_CHAINS = 12, N_ROUNDS = 5, N_STEPS = 200000 };

#define UNROLL _Pragma("GCC unroll 12")

typedef struct {
  float (*chains)(uint32_t n); // runs n steps of every chain; the result keeps them from being
                               // optimized away
  double flops;                // per step of one chain
} peak_loop;

#if defined(__x86_64__)
#define CHAINS(name, isa, vec, set, step, add, first)                                              \
  __attribute__((target(isa))) static float name(uint32_t n) {                                     \
    vec acc[N_CHAINS];                                                                             \
    UNROLL for (int c = 0; c < N_CHAINS; c++) acc[c] = set((float)c);                              \
    for (uint32_t i = 0; i < n; i++)                                                               \
      UNROLL for (int c = 0; c < N_CHAINS; c++) acc[c] = step;                                     \
    UNROLL for (int c = 1; c < N_CHAINS; c++) acc[0] = add(acc[0], acc[c]);                        \
    return first(acc[0]);                                                                          \
  }
CHAINS(fma_avx512, "avx512f", __m512, _mm512_set1_ps,
       _mm512_fmadd_ps(acc[c], _mm512_set1_ps(0.999f), _mm512_set1_ps(0.001f)), _mm512_add_ps,
       _mm512_reduce_add_ps)
CHAINS(dot_avx512, "avx512f,avx512bf16", __m512, _mm512_set1_ps,
       _mm512_dpbf16_ps(acc[c], (__m512bh)_mm512_set1_epi16(0x3c00),
                        (__m512bh)_mm512_set1_epi16(0x3b80)),
       _mm512_add_ps, _mm512_reduce_add_ps)
CHAINS(fma_avx2, "avx2,fma", __m256, _mm256_set1_ps,
       _mm256_fmadd_ps(acc[c], _mm256_set1_ps(0.999f), _mm256_set1_ps(0.001f)), _mm256_add_ps,
       _mm256_cvtss_f32)

static peak_loop fma_loop(void) {
  if (__builtin_cpu_supports("avx512f")) return (peak_loop){fma_avx512, 32};
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
    return (peak_loop){fma_avx2, 16};
  return (peak_loop){NULL, 0};
}

static peak_loop dot_loop(void) {
  if (__builtin_cpu_supports("avx512bf16")) return (peak_loop){dot_avx512, 64};
  return (peak_loop){NULL, 0};
}
#else
static peak_loop fma_loop(void) {
  return (peak_loop){NULL, 0};
}

static peak_loop dot_loop(void) {
  return (peak_loop){NULL, 0};
}
#endif

static void run_loop(void *ctx, unsigned member, unsigned n_members) {
  (void)member;
  (void)n_members;
  const peak_loop *loop = ctx;
  volatile float sink = loop->chains(N_STEPS);
  (void)sink;
}

static double best_gflops(peak_loop loop, td_thread_pool *pool) {
  if (!loop.chains) return 0;
  double best = 0, flops = loop.flops * N_CHAINS * N_STEPS * td_thread_pool_size(pool);
  for (int i = 0; i < N_ROUNDS; i++) {
    double start = td_clock_s();
    td_thread_pool_run(pool, run_loop, &loop);
    double gflops = flops / (td_clock_s() - start) * 1e-9;
    if (gflops > best) best = gflops;
  }
  return best;
}

void td_peaks_measure(td_peaks *out, td_thread_pool *pool) {
  cpu_set_t before;
  td_thread_pool_pin_caller(pool, &before);
  out->fma_gflops = best_gflops(fma_loop(), pool);
  out->dot_gflops = best_gflops(dot_loop(), pool);
  td_thread_pool_unpin_caller(&before);
}
