// kernels/cpu/attn/kv_f32.h - F32 keys and values, of the cache or expanded from latents, for
// attn_vec.h.
typedef float elem;

static inline vf load_kv(const elem *p) {
  return vf_load(p);
}

static inline vf load_kv_n(const elem *p, uint32_t n) {
  return vf_load_n(p, n);
}
