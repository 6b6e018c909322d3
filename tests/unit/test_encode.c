// tests/unit/test_encode.c - the encodings: what has a code keeps it, what lies between goes to the
// nearest, layouts are those the kernels read, and the search for scales pays.
// CTest: no-tsan

#include "base/bf16.h"
#include "model/quantize/encode.h"
#include "tandem/formats.h"
#include "unit/ref.h"

enum { INT4_G128, INT4_G32, FP8, MXFP4, INT8, N_NAMES };

static const char *const names[N_NAMES] = {"int4-g128", "int4-g32", "fp8", "mxfp4", "int8"};

static const td_encoding *find(const char *name) {
  const char *all;
  const td_encoding *e = strcmp(name, names[INT8]) == 0 ? &td_encoding_int8
                                                        : td_encoding_find(name, &all);
  assert_non_null(e);
  return e;
}

typedef struct {
  td_weight w;
  void *codes, *scales;
  td_encode_result result;
} encoded;

static encoded encode(const td_encoding *e, const float *values, uint32_t rows, uint32_t cols) {
  uint32_t strips = (rows + e->block_rows - 1) / e->block_rows;
  encoded out = {.codes = malloc(rows * td_encoded_row_bytes(e, cols)),
                 .scales = malloc(strips * td_encoded_groups(e, cols) * e->scale.item_bytes)};
  TD_CHECK(out.codes && out.scales);
  out.result = td_encode_rows(e, values, rows, cols, out.codes, out.scales);
  static const td_dtype dtypes[N_NAMES][2] = {[INT4_G128] = {TD_I4, TD_BF16},
                                              [INT4_G32] = {TD_I4, TD_BF16},
                                              [FP8] = {TD_F8E4M3, TD_F32},
                                              [MXFP4] = {TD_F4E2M1, TD_F8E8M0},
                                              [INT8] = {TD_I8, TD_BF16}};
  int name = 0;
  while (strcmp(names[name], e->name) != 0)
    name++;
  out.w = (td_weight){.data = out.codes,
                      .scale = out.scales,
                      .dtype = dtypes[name][0],
                      .scale_dtype = dtypes[name][1],
                      .rows = rows,
                      .cols = cols,
                      .scale_rows = e->block_rows,
                      .scale_cols = e->block_cols < cols ? e->block_cols : cols,
                      .global_scale = 1};
  assert_int_equal(td_weight_data_bytes(&out.w), rows * td_encoded_row_bytes(e, cols));
  return out;
}

static void release(encoded *e) {
  free(e->codes);
  free(e->scales);
}

TEST(knows_its_names) {
  const char *all;
  for (size_t i = 0; i < INT8; i++) {
    assert_string_equal(find(names[i])->name, names[i]);
    assert_null(td_encoding_find("int5", &all));
    assert_non_null(strstr(all, names[i]));
  }
  assert_null(td_encoding_find("int8", &all));
#define X(name) name,
  static const char *const given[] = {TD_ENCODINGS(X)};
#undef X
  assert_int_equal(TD_COUNT(given), INT8); // all of names but the last
  for (size_t i = 0; i < INT8; i++)
    assert_string_equal(given[i], names[i]);
}

// The error that is told is the one that decoding shows, at shapes no block divides.
TEST(tells_the_error) {
  enum { ROWS = 150, COLS = 328 };
  uint64_t rng = 1;
  float *values = ref_floats(&rng, ROWS * COLS);
  for (size_t i = 0; i < ROWS * COLS; i++)
    values[i] *= ref_float(&rng) * 0.02f;
  for (size_t i = 0; i < TD_COUNT(names); i++) {
    encoded e = encode(find(names[i]), values, ROWS, COLS);
    double error = 0, norm = 0;
    for (uint32_t r = 0; r < ROWS; r++) {
      for (uint32_t c = 0; c < COLS; c++) {
        double value = values[r * COLS + c], lost = value - ref_at(&e.w, r, c);
        error += lost * lost;
        norm += value * value;
      }
    }
    assert_true(e.result.finite);
    assert_true(fabs(e.result.error - error) < 1e-5 * error);
    assert_true(fabs(e.result.norm - norm) < 1e-9 * norm);
    static const double most[] = {0.14, 0.11, 0.027, 0.13, 0.01};
    if (!(sqrt(error / norm) < most[i])) fail_msg("%s: %f", names[i], sqrt(error / norm));
    release(&e);
  }
  free(values);
}

// A matrix that the format can hold exactly comes back exactly.
TEST(keeps_what_has_a_code) {
  enum { COLS = 256 };
  float values[COLS];
  for (int i = 0; i < COLS; i++)
    values[i] = (float)(i % 15 - 7) * 0x1.4p-3f; // 7 of them is the largest of each group
  for (int k = 0; k < 2; k++) {
    encoded e = encode(find(names[k]), values, 1, COLS);
    assert_true(e.result.error <= 1e-12 * e.result.norm);
    for (uint32_t c = 0; c < COLS; c++)
      assert_true(ref_at(&e.w, 0, c) == values[c]);
    release(&e);
  }
  for (int i = 0; i < COLS; i++)
    values[i] = (float)(i < 128 ? i : 128 - i) * 0x1.4p-9f; // from -127 to 127
  encoded int8 = encode(find("int8"), values, 1, COLS);
  assert_true(int8.result.error <= 1e-12 * int8.result.norm);
  for (uint32_t c = 0; c < COLS; c++)
    assert_true(ref_at(&int8.w, 0, c) == values[c]);
  release(&int8);
  for (int i = 0; i < COLS; i++)
    values[i] = (float)ref_e2m1((unsigned)i % 16) * 0x1p-9f;
  encoded fp4 = encode(find("mxfp4"), values, 1, COLS);
  for (uint32_t c = 0; c < COLS; c++)
    assert_true(ref_at(&fp4.w, 0, c) == values[c]);
  release(&fp4);
  for (int i = 0; i < COLS; i++)
    values[i] = i % 128 == 127 ? 448 : (float)ref_e4m3((uint8_t)i) * 0x1p-3f;
  encoded fp8 = encode(find("fp8"), values, 1, COLS);
  for (uint32_t c = 0; c < COLS; c++)
    assert_true(fabs(ref_at(&fp8.w, 0, c) - values[c]) <= fabsf(values[c]) * 0x1p-4f + 0x1p-10f);
  release(&fp8);
}

// No code is nearer than the one chosen; ties are even.
TEST(rounds_to_the_nearest) {
  enum { COLS = 128 };
  uint64_t rng = 2;
  float values[COLS];
  for (int round = 0; round < 200; round++) {
    for (int i = 0; i < COLS; i++)
      values[i] = ref_float(&rng) * 6;
    for (size_t k = 0; k < TD_COUNT(names); k++) {
      encoded e = encode(find(names[k]), values, 1, COLS);
      for (uint32_t c = 0; c < COLS; c++) {
        double best = INFINITY, scale = ref_scale(&e.w, 0, c);
        for (unsigned code = 0; code < (k == FP8 || k == INT8 ? 256u : 16u); code++) {
          double value = k == FP8     ? ref_e4m3((uint8_t)code)
                         : k == INT8  ? (int8_t)code
                         : k == MXFP4 ? ref_e2m1(code)
                                      : (int)code - 8;
          if (!isnan(value)) best = fmin(best, fabs(value * scale - values[c]));
        }
        double lost = fabs(ref_at(&e.w, 0, c) - values[c]);
        if (!(lost <= best * (1 + 1e-5) + 1e-6)) {
          fail_msg("%s: %g lost, %g could be", names[k], lost, best);
        }
      }
      release(&e);
    }
  }
}

// Against the scale that just holds the largest value.
TEST(search_pays) {
  enum { COLS = 4096 };
  uint64_t rng = 3;
  float values[COLS];
  double plain = 0;
  for (int i = 0; i < COLS; i++) { // nearly normal
    values[i] = 0;
    for (int k = 0; k < 8; k++)
      values[i] += ref_float(&rng);
  }
  for (int g = 0; g < COLS; g += 32) {
    float max = 0;
    for (int i = g; i < g + 32; i++)
      max = fmaxf(max, fabsf(values[i]));
    for (int i = g; i < g + 32; i++) {
      double lost = values[i] - max / 7 * rint(values[i] * 7 / max);
      plain += lost * lost;
    }
  }
  encoded e = encode(find("int4-g32"), values, 1, COLS);
  assert_true(e.result.error < 0.93 * plain);
  release(&e);
}

TEST(copes_with_the_extremes) {
  enum { COLS = 256 };
  static const float peaks[] = {0, 1e-44f, 1e-38f, 1e-30f, 1e30f, 3e38f};
  for (size_t p = 0; p < TD_COUNT(peaks); p++) {
    float values[COLS];
    for (int i = 0; i < COLS; i++)
      values[i] = i % 2 ? peaks[p] : -peaks[p] / 2;
    for (size_t k = 0; k < TD_COUNT(names); k++) {
      encoded e = encode(find(names[k]), values, 1, COLS);
      for (uint32_t c = 0; c < COLS; c++) {
        double value = ref_at(&e.w, 0, c);
        bool near = fabs(value - values[c]) <= 0.26 * fabs((double)peaks[p]) + 1e-34;
        if (!near) fail_msg("%s: %g became %g", names[k], values[c], value);
      }
      release(&e);
    }
  }
  float bad[COLS] = {0};
  bad[200] = NAN;
  for (size_t k = 0; k < TD_COUNT(names); k++) {
    encoded e = encode(find(names[k]), bad, 1, COLS);
    assert_false(e.result.finite);
    release(&e);
  }
}

TEST(bf16_is_nearest_even) {
  assert_int_equal(td_bf16_of(1), 0x3f80);
  assert_int_equal(td_bf16_of(0x1.01p0f), 0x3f80); // a tie, to even
  assert_int_equal(td_bf16_of(0x1.03p0f), 0x3f82);
  assert_int_equal(td_bf16_of(0x1.010002p0f), 0x3f81);
  assert_int_equal(td_bf16_of(-0x1.fffffep127f), 0xff80);
  assert_true(isnan(ref_bf16(td_bf16_of(NAN))));
}
