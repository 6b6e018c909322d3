// kernels/cpu/attn/kv_f16.h - F16 keys and values, as the cache keeps them, for attn_vec.h.
typedef uint16_t elem;

static inline vf load_kv(const elem *p) {
  return vf_from_half(p);
}

static inline vf load_kv_n(const elem *p, uint32_t n) {
  return vf_from_half_n(p, n);
}
