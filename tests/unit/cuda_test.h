// tests/unit/cuda_test.h - what the tests of the CUDA device share. The same programs run on the
// emulator (CTest names it in TANDEM_CUDA_LIB) and, called without it, on the first GPU, so all
// memory that operators touch is the device's.
#pragma once

#include "device/cuda/cuda.h"
#include "unit/ref.h"

#define ULP_BF16 0x1p-7 // of a value of 1; rounding to nearest errs by half
#define ULP_F16  0x1p-10
#define ULP_F32  0x1p-23

enum { MAX_OWNED = 256 };

typedef struct {
  td_dev *dev;
  td_stream *stream;
  uint64_t rng;
  void *owned[MAX_OWNED]; // device memory, freed with the fixture
  size_t n_owned;
} cuda_fixture;

// Every test begins here and is skipped, visibly, where there is neither emulator nor GPU. Copies
// of weights share no memory, so that sanitizers see where each ends.
#define CUDA_OPEN(f)                                                                               \
  cuda_fixture f = {.rng = 1};                                                                     \
  do {                                                                                             \
    td_err err_;                                                                                   \
    if (td_dev_open(&(f).dev, &(td_dev_opts){.kind = "cuda"}, &err_) != TD_OK) {                   \
      if (getenv("TANDEM_CUDA_LIB")) fail_msg("%s", err_.msg);                                     \
      print_message("skipped: %s\n", err_.msg);                                                    \
      skip();                                                                                      \
    }                                                                                              \
    ((td_cuda_dev *)(f).dev)->page_bytes = 1;                                                      \
    assert_int_equal(td_stream_open(&(f).stream, (f).dev, &err_), TD_OK);                          \
  } while (0)

// Whether the device is the emulator; a GPU's memory, tiles and driver are what they are.
static inline bool is_emulated(void) {
  const char *library = getenv("TANDEM_CUDA_LIB");
  return library && strstr(library, "_emu");
}

// What a sum in F16 may err by, as a share of the sum of its magnitudes, where n instructions
// follow one another; 0: the device adds up in FP32.
static inline double cuda_f16_error(const cuda_fixture *f, uint32_t n) {
  return ((const td_cuda_dev *)f->dev)->uses.f16 ? n * ULP_F16 / 2 : 0;
}

static inline void cuda_close(cuda_fixture *f) {
  td_stream_close(f->stream);
  while (f->n_owned > 0)
    td_dev_free(f->dev, f->owned[--f->n_owned]);
  td_dev_close(f->dev);
}

static inline void cuda_sync(cuda_fixture *f) {
  td_err err;
  if (td_stream_sync(f->stream, &err) != TD_OK) fail_msg("%s", err.msg);
}

static inline void *cuda_alloc(cuda_fixture *f, size_t n_bytes) {
  td_err err;
  TD_CHECK(f->n_owned < MAX_OWNED);
  void **out = &f->owned[f->n_owned++];
  if (td_dev_alloc(f->dev, out, n_bytes, &err) != TD_OK) fail_msg("%s", err.msg);
  return *out;
}

// A copy of host memory on the device.
static inline void *cuda_put(cuda_fixture *f, const void *host, size_t n_bytes) {
  void *out = cuda_alloc(f, n_bytes);
  td_op_copy(f->stream, out, host, n_bytes);
  cuda_sync(f);
  return out;
}

static inline void cuda_get(cuda_fixture *f, void *host, const void *device, size_t n_bytes) {
  td_op_copy(f->stream, host, device, n_bytes);
  cuda_sync(f);
}

// Floats that BF16 holds.
static inline float *cuda_floats(cuda_fixture *f, size_t n) {
  float *values = ref_floats(&f->rng, n);
  for (size_t i = 0; i < n; i++)
    values[i] = (float)ref_bf16(ref_to_bf16(values[i]));
  return values;
}

// The same as activations on the device.
static inline uint16_t *cuda_put_bf16(cuda_fixture *f, const float *values, size_t n) {
  uint16_t *bits = malloc((n ? n : 1) * sizeof *bits);
  TD_CHECK(bits);
  for (size_t i = 0; i < n; i++)
    bits[i] = ref_to_bf16(values[i]);
  uint16_t *out = cuda_put(f, bits, n * sizeof *bits);
  free(bits);
  return out;
}

static inline float *cuda_get_bf16(cuda_fixture *f, const void *device, size_t n) {
  uint16_t *bits = malloc((n ? n : 1) * sizeof *bits);
  float *out = malloc((n ? n : 1) * sizeof *out);
  TD_CHECK(bits && out);
  cuda_get(f, bits, device, n * sizeof *bits);
  for (size_t i = 0; i < n; i++)
    out[i] = (float)ref_bf16(bits[i]);
  free(bits);
  return out;
}

// A copy of a weight's matrix, scales and zero points on the device.
static inline td_weight cuda_put_weight(cuda_fixture *f, const td_weight *w) {
  td_weight copy = *w;
  copy.data = cuda_put(f, w->data, td_weight_data_bytes(w));
  if (w->scale) copy.scale = cuda_put(f, w->scale, td_weight_scale_bytes(w));
  if (w->zero) copy.zero = cuda_put(f, w->zero, td_weight_zero_bytes(w));
  return copy;
}

// The stream has failed with a sentence that holds part; it is opened anew, and starts clean.
static inline void cuda_expect_failure(cuda_fixture *f, const char *part) {
  td_err err;
  assert_int_equal(td_stream_sync(f->stream, &err), TD_EINVAL);
  if (!strstr(err.msg, part)) fail_msg("'%s' does not speak of '%s'", err.msg, part);
  td_stream_close(f->stream);
  assert_int_equal(td_stream_open(&f->stream, f->dev, &err), TD_OK);
  cuda_sync(f);
}

// |got - want| <= slack, element by element; NaN fails.
static inline void cuda_assert_within(double got, double want, double slack, const char *what,
                                      size_t at) {
  if (!(fabs(got - want) <= slack)) {
    fail_msg("%s: element %zu is %.9g, should be %.9g within %.3g", what, at, got, want, slack);
  }
}
