// tests/unit/test_convert.c - words of codes into rows: rounding, orders and odd sizes. Whole
// formats are in tests/golden/test_formats.py.
// CTest: no-tsan

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "model/convert_matrix.h"
#include "unit/testing.h"

static double value_of_half(uint16_t h) {
  double mantissa = h & 1023;
  int exponent = h >> 10 & 31;
  double value = exponent ? ldexp(1024 + mantissa, exponent - 25) : ldexp(mantissa, -24);
  return h & 0x8000 ? -value : value;
}

// The half that is nearest to value, even among two, by looking at all.
static uint16_t nearest_half(double value) {
  uint16_t best = 0;
  for (uint32_t h = 0; h < 0x7C00; h++) {
    double now = fabs(value_of_half((uint16_t)h) - fabs(value));
    double least = fabs(value_of_half(best) - fabs(value));
    if (now < least || (now == least && h % 2 == 0)) best = (uint16_t)h;
  }
  return fabs(value) >= 65520 ? 0x7C00 : best;
}

// One row with one code each of a scale of its own: value = code * scale, rounded once.
TEST(halves_are_rounded_to_the_nearest) {
  static const uint16_t scales[] = {0x3C00, 0x3C01, 0x2EB7, 0x0001, 0x03FF, 0x0400, 0x0401,
                                    0x7BFF, 0x1234, 0x00A7, 0x5555, 0x6FFF, 0xBC01, 0x8005};
  for (size_t i = 0; i < TD_COUNT(scales); i++) {
    for (int code = -7; code <= 15; code += 2) {
      uint32_t word = (uint32_t)(code < 0 ? 0 : code), zero = (uint32_t)(code < 0 ? -code : 0);
      uint16_t out = 0;
      td_word_matrix m = {.words = &word,
                          .zeros = &zero,
                          .scales = &scales[i],
                          .scale_dtype = TD_F16,
                          .bits = 4,
                          .rows = 1,
                          .cols = 1,
                          .groups = 1,
                          .group_cols = 1,
                          .is_gptq = true};
      assert_true(td_words_to_values(&m, &out));
      double exact = code * value_of_half(scales[i]);
      uint16_t want = nearest_half(exact) | (exact < 0 ? 0x8000 : 0);
      if (out != want) fail_msg("%d * %04x: %04x, not %04x", code, scales[i], out, want);
    }
  }
}

// Three columns in words of four, in an order of their own; rows that fill no word of zero points.
TEST(odd_sizes_and_orders) {
  static const uint32_t words[] = {0x00030201, 0x00060504}; // [2 rows][1 word]
  static const uint32_t zeros[] = {0x0201, 0x0403};         // [1 word of 2 rows][2 groups]
  static const float scales[] = {1, 10, 100, 1000};         // [2][2]
  static const int32_t order[] = {1, 0, 1};
  td_word_matrix m = {.words = words,
                      .zeros = zeros,
                      .scales = scales,
                      .order = order,
                      .scale_dtype = TD_F32,
                      .bits = 8,
                      .rows = 2,
                      .cols = 3,
                      .groups = 2,
                      .group_cols = 2};
  float out[6];
  assert_true(td_words_to_values(&m, out));
  static const float want[] = {-20, 1, 0, 0, 300, 2000};
  assert_memory_equal(out, want, sizeof want);
  assert_false(td_words_are_symmetric(&m));
  m.zeros = NULL;
  assert_true(td_words_are_symmetric(&m));
  int8_t codes[6];
  td_words_to_i8(&m, codes);
  static const int8_t want_codes[] = {1 - 128, 2 - 128, 3 - 128, 4 - 128, 5 - 128, 6 - 128};
  assert_memory_equal(codes, want_codes, sizeof want_codes);
}
