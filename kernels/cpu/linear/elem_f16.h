// kernels/cpu/linear/elem_f16.h - F16 weights for linear_vec.h.
typedef uint16_t elem;
enum { HAS_SCALES = 0 };

static inline vf vector_at(const elem *group, int j) {
  return vf_from_half(group + j * VL);
}
