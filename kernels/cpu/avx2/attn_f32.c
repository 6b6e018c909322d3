// kernels/cpu/avx2/attn_f32.c - keys and values expanded from latents; see attn_vec.h.
#include "kernels/cpu/avx2/vec.h"

typedef float elem;

static inline vf load_kv(const elem *p) {
  return vf_load(p);
}

static inline vf load_kv_n(const elem *p, uint32_t n) {
  return vf_load_n(p, n);
}

#include "kernels/cpu/attn/attn_vec.h"

void attn_f32__avx2(const td_attn_block_args *args) {
  attend_all(args);
}
