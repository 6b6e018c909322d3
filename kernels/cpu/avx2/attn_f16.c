// kernels/cpu/avx2/attn_f16.c - keys and values as the cache keeps them; see attn_vec.h.
#include "kernels/cpu/avx2/vec.h"

typedef uint16_t elem;

static inline vf load_kv(const elem *p) {
  return vf_from_half(p);
}

static inline vf load_kv_n(const elem *p, uint32_t n) {
  return vf_from_half_n(p, n);
}

#include "kernels/cpu/attn/attn_vec.h"

void attn_f16__avx2(const td_attn_block_args *args) {
  attend_all(args);
}
