// kernels/registry.c - runtime dispatch of CPU kernels: features and choice of variants.
#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "kernels/cpu/linear/w4a8.h"
#include "kernels/decl.h"
#include "kernels/heuristics.h"
#include "tandem/formats.h"

// The build defines TD_ROW_ISA as one of these: a program of fewer folders (TD_ISAS) lacks their
// rows.
#define TD_KEPT(...) __VA_ARGS__
#define TD_LEFT_OUT(...)

static const td_kernel_variant all_variants[] = {
#define TD_KERNEL(family, isa, features, ...)                                                      \
  TD_ROW_##isa({#family, #isa, features, (void (*)(void))family##__##isa}, )
#include "kernels/registry.inc"
#undef TD_KERNEL
};

static const struct {
  const char *name;
  unsigned needs, allows; // TD_ISA_ bits
} isas[] = {
#define X(name, needs, allows) TD_ROW_##name({#name, needs, allows}, )
    TD_ISAS(X)
#undef X
};
#define X(name, needs, allows) +1
enum { N_ISAS = sizeof isas / sizeof isas[0], IS_NATIVE = N_ISAS < 0 TD_ISAS(X) };
#undef X

static td_kernel_table table, exact_table; // exact_table: variants that never round activations
static unsigned table_features;            // TD_ISA_ bits that both tables may use
static bool has_tiles;                     // granted

#if defined(__x86_64__)
// clang before 15 does not know "f16c" in __builtin_cpu_supports, and compilers differ in the
// features they do know.
static int has_f16c(void) {
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
}

static int has_avx_vnni(void) {
  enum { AVX_VNNI = 1 << 4 };
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax & AVX_VNNI);
}

// Bits of CPUID's leaf 7, edx.
enum { AMX_BF16 = 1 << 22, AVX512_FP16 = 1 << 23, AMX_TILE = 1 << 24, AMX_INT8 = 1 << 25 };

static int has_in_leaf_7(unsigned bits) {
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (edx & bits) == bits;
}
#endif

static unsigned machine_features(void) {
  unsigned features = 0;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c()) {
    features |= TD_ISA_AVX2 | TD_MATH_INT16;
    if (has_avx_vnni()) features |= TD_ISA_AVX_VNNI;
  }
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vnni")) {
    features |= TD_ISA_AVX512;
    if (__builtin_cpu_supports("avx512bf16")) features |= TD_ISA_AVX512_BF16;
    if (has_in_leaf_7(AVX512_FP16)) features |= TD_ISA_AVX512_FP16;
    const unsigned beside = TD_ISA_AVX512_FP16 | TD_ISA_AVX512_BF16;
    if (has_tiles && has_in_leaf_7(AMX_TILE | AMX_INT8 | AMX_BF16) && (features & beside) == beside)
      features |= TD_ISA_AMX;
  }
#endif
  return features;
}

// The family's first variant within the allowed features. The scalar one always matches.
static void (*best_version(const char *family, unsigned allowed))(void) {
  for (size_t i = 0; i < sizeof all_variants / sizeof all_variants[0]; i++) {
    const td_kernel_variant *v = &all_variants[i];
    if (strcmp(v->family, family) == 0 && (v->features & ~allowed) == 0) return v->fn;
  }
  return NULL;
}

td_kernels_result td_kernels_init(const char *force_isa) {
  unsigned features = machine_features();
  size_t idx = 0;
  if (force_isa) {
    while (idx < N_ISAS && strcmp(isas[idx].name, force_isa) != 0)
      idx++;
    if (idx == N_ISAS) return TD_KERNELS_UNKNOWN_ISA;
    if (isas[idx].needs & ~features) return TD_KERNELS_ISA_ABSENT;
  } else {
    // Tiles may also be refused, and speed up little.
    if (IS_NATIVE && isas[0].needs & ~features & ~TD_ISA_AMX) return TD_KERNELS_FOREIGN;
    while (isas[idx].needs & ~features)
      idx++;
  }
  table_features = features & isas[idx].allows;
  table.isa = isas[idx].name;
  td_kernels_use_activations(TD_ACTIVATIONS_F32);
  return TD_KERNELS_OK;
}

void td_kernels_grant_tiles(void) {
  has_tiles = true;
}

void td_kernels_init_any(void) {
  if (!table.isa && td_kernels_init(NULL) != TD_KERNELS_OK) td_kernels_init("scalar");
}

static void fill(td_kernel_table *t, unsigned allowed) {
#define X(family, args_type)                                                                       \
  t->family = (void (*)(const args_type *))best_version(#family, allowed);
  TD_KERNEL_FAMILIES(X)
#undef X
}

void td_kernels_use_activations(td_activations activations) {
  const unsigned rounding = TD_ISA_AVX512_FP16 | TD_ISA_AVX512_BF16 | TD_MATH_INT16 |
                            TD_ISA_AVX_VNNI;
  const unsigned exact = table_features & ~rounding;
  fill(&table, activations == TD_ACTIVATIONS_F32 ? exact : table_features);
  fill(&exact_table, exact);
  table.activations = activations;
}

const char *const *td_kernels_isas(void) {
  static const char *const names[] = {
#define X(name, needs, allows) TD_ROW_##name(#name, )
      TD_ISAS(X)
#undef X
          NULL};
  return names;
}

const td_kernel_table *td_kernels(void) {
  return &table;
}

unsigned td_kernels_features(void) {
  return table_features;
}

bool td_kernels_rounds_x(const td_weight *w) {
  if (table.activations != TD_ACTIVATIONS_INT8) return false;
  if (td_dtype_block(w->dtype).cols) return table_features & TD_MATH_INT16;
  return (w->dtype == TD_I4 || w->dtype == TD_F4E2M1) && a8_block(w) > 0;
}

static td_linear_fn linear_of(const td_kernel_table *t, const td_weight *w) {
  switch (w->dtype) {
#define X(dtype, family, scales)                                                                   \
  case TD_##dtype: return t->family;
    TD_WEIGHT_KINDS(X)
#undef X
  default: break;
  }
  return NULL;
}

td_linear_fn td_kernels_linear(const td_weight *w, bool prompt) {
  const bool is_a8 = prompt && td_kernels_rounds_x(w) && !td_dtype_block(w->dtype).cols;
  return is_a8 ? table.linear_w4a8 : linear_of(&table, w);
}

td_linear_fn td_kernels_linear_exact(const td_weight *w) {
  return linear_of(&exact_table, w);
}

const td_kernel_variant *td_kernel_variants(size_t *n) {
  *n = sizeof all_variants / sizeof all_variants[0];
  return all_variants;
}

bool td_kernel_variant_runs(const td_kernel_variant *variant) {
  return (variant->features & ~machine_features()) == 0;
}
