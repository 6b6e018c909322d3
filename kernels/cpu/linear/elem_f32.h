// kernels/cpu/linear/elem_f32.h - F32 weights for linear_vec.h.
typedef float elem;
enum { HAS_SCALES = 0 };

static inline vf vector_at(const elem *group, int j) {
  return vf_load(group + j * VL);
}
