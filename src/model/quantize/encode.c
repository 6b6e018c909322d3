// src/model/quantize/encode.c - encodes blocks of f32 weights: chooses a scale and rounds to codes.
#include "model/quantize/encode.h"

#include <math.h>
#include <string.h>

#include "base/bf16.h"
#include "base/e4m3.h"
#include "base/status.h"
#include "tandem/formats.h"

static float float_of(uint32_t bits) {
  float f;
  memcpy(&f, &bits, sizeof f);
  return f;
}

static uint32_t bits_of(float f) {
  uint32_t bits;
  memcpy(&bits, &f, sizeof bits);
  return bits;
}

static float clamp(float f, float low, float high) {
  f = f < low ? low : f;
  return f > high ? high : f;
}

// Rounds f to nearest even in a float format with mantissa_bits, whose smallest normal number is
// 2^min_exponent. Adding 1.5 times a power of two aligns the unit in the last place.
static float round_to(float f, int mantissa_bits, int min_exponent) {
  uint32_t exponent = bits_of(f) & 0x7f800000, least = (uint32_t)(127 + min_exponent) << 23;
  exponent = exponent < least ? least : exponent;
  float shift = float_of((exponent + ((uint32_t)(23 - mantissa_bits) << 23)) | 0x400000);
  return f + shift - shift;
}

static float round_int4(float f) {
  return clamp(f, -8, 7) + 0x1.8p23f - 0x1.8p23f;
}

static float round_int8(float f) {
  return clamp(f, -128, 127) + 0x1.8p23f - 0x1.8p23f;
}

static float round_e2m1(float f) {
  return round_to(clamp(f, -6, 6), 1, 0);
}

static uint8_t code_e2m1(float f) {
  float a = fabsf(f);
  uint32_t magnitude = a < 1 ? (uint32_t)(2 * a) : (bits_of(a) >> 22) - 252;
  return (uint8_t)(magnitude | (signbit(f) ? 8 : 0));
}

typedef struct {
  const float *w;
  size_t ld;
  uint32_t rows, cols;
} block;

static float largest(const block *b) {
  float max = 0;
  for (uint32_t r = 0; r < b->rows; r++) {
    for (uint32_t c = 0; c < b->cols; c++) {
      float a = fabsf(b->w[r * b->ld + c]);
      max = a > max ? a : max;
    }
  }
  return max;
}

// Squared error of encoding a block with a given scale. Computed in units of the scale to avoid
// subnormals. One function per format, so that the loop vectorizes.
#define LOSS(name, round)                                                                          \
  static double name(const block *b, float scale) {                                                \
    float inverse = 1 / scale;                                                                     \
    double sum = 0;                                                                                \
    for (uint32_t r = 0; r < b->rows; r++) {                                                       \
      const float *w = b->w + r * b->ld;                                                           \
      float lane[8] = {0};                                                                         \
      uint32_t c = 0;                                                                              \
      for (; c + 8 <= b->cols; c += 8) {                                                           \
        for (int i = 0; i < 8; i++) {                                                              \
          float lost = w[c + i] * inverse - round(w[c + i] * inverse);                             \
          lane[i] += lost * lost;                                                                  \
        }                                                                                          \
      }                                                                                            \
      for (; c < b->cols; c++) {                                                                   \
        float lost = w[c] * inverse - round(w[c] * inverse);                                       \
        lane[0] += lost * lost;                                                                    \
      }                                                                                            \
      for (int i = 0; i < 8; i++)                                                                  \
        sum += lane[i];                                                                            \
    }                                                                                              \
    return sum * scale * scale;                                                                    \
  }
LOSS(loss_int4, round_int4)
LOSS(loss_int8, round_int8)
LOSS(loss_e2m1, round_e2m1)
LOSS(loss_e4m3, td_e4m3_round)

typedef struct {
  float scale;
  double loss;
} choice;

static void consider(choice *best, const block *b, float scale,
                     double (*loss)(const block *b, float scale)) {
  double lost = loss(b, scale);
  if (lost < best->loss) *best = (choice){scale, lost};
}

// Smaller scales would underflow, or their reciprocal would overflow.
#define MIN_SCALE 0x1p-120f

static void put4(uint8_t *codes, uint32_t idx, uint8_t code) {
  codes[idx / 2] = (uint8_t)(idx % 2 ? (codes[idx / 2] & 15) | code << 4 : code);
}

// Chooses a BF16 scale: candidates range from mapping the largest value to code `top` down to
// clipping it.
static choice choose_bf16(const block *b, int top, double (*loss)(const block *b, float scale),
                          uint8_t *scale) {
  float max = largest(b);
  choice best = {1, INFINITY};
  for (int percent = 100; percent >= 68; percent -= 4) {
    float s = td_bf16_value(td_bf16_of(max * ((float)percent / (100 * (float)top))));
    if (s >= MIN_SCALE) consider(&best, b, s, loss);
  }
  if (best.loss == INFINITY) best = (choice){1, loss(b, 1)};
  uint16_t stored = td_bf16_of(best.scale);
  memcpy(scale, &stored, sizeof stored);
  return best;
}

static double encode_int4(const float *w, size_t ld, uint32_t rows, uint32_t cols, uint8_t *codes,
                          size_t codes_ld, uint8_t *scale) {
  (void)codes_ld;
  choice best = choose_bf16(&(block){w, ld, rows, cols}, 7, loss_int4, scale);
  for (uint32_t c = 0; c < cols; c++)
    put4(codes, c, (uint8_t)((int)round_int4(w[c] * (1 / best.scale)) + 8));
  for (uint32_t c = cols; c % 8; c++)
    put4(codes, c, 0);
  return best.loss;
}

static double encode_int8(const float *w, size_t ld, uint32_t rows, uint32_t cols, uint8_t *codes,
                          size_t codes_ld, uint8_t *scale) {
  (void)codes_ld;
  choice best = choose_bf16(&(block){w, ld, rows, cols}, 127, loss_int8, scale);
  for (uint32_t c = 0; c < cols; c++)
    codes[c] = (uint8_t)(int)round_int8(w[c] * (1 / best.scale));
  return best.loss;
}

// Chooses a power of two: the one that maps the largest value to [4, 8), or a neighbour.
static double encode_mxfp4(const float *w, size_t ld, uint32_t rows, uint32_t cols, uint8_t *codes,
                           size_t codes_ld, uint8_t *scale) {
  (void)codes_ld;
  block b = {w, ld, rows, cols};
  float max = largest(&b);
  choice best = {1, INFINITY};
  if (max >= MIN_SCALE) {
    int exponent;
    frexpf(max, &exponent);
    for (int e = exponent - 4; e <= exponent - 2; e++)
      consider(&best, &b, ldexpf(1, e), loss_e2m1);
  } else {
    best.loss = loss_e2m1(&b, 1);
  }
  *scale = (uint8_t)(bits_of(best.scale) >> 23);
  for (uint32_t c = 0; c < cols; c++)
    put4(codes, c, code_e2m1(round_e2m1(w[c] * (1 / best.scale))));
  return best.loss;
}

// Chooses an F32 scale among eight within an octave, since rounding errors vary with the scale.
static double encode_fp8(const float *w, size_t ld, uint32_t rows, uint32_t cols, uint8_t *codes,
                         size_t codes_ld, uint8_t *scale) {
  block b = {w, ld, rows, cols};
  float max = largest(&b);
  choice best = {1, INFINITY};
  for (int step = 0; step < 8; step++) {
    float s = max / 448 * exp2f((float)step / 8);
    if (s >= MIN_SCALE) consider(&best, &b, s, loss_e4m3);
  }
  if (best.loss == INFINITY) best = (choice){1, loss_e4m3(&b, 1)};
  memcpy(scale, &best.scale, sizeof best.scale);
  for (uint32_t r = 0; r < rows; r++)
    for (uint32_t c = 0; c < cols; c++)
      codes[r * codes_ld + c] = td_e4m3_code(td_e4m3_round(w[r * ld + c] * (1 / best.scale)));
  return best.loss;
}

// As the members of td_encoding; codes and scales by tensor, dtype, bytes of an item.
#define ENCODING(name, format, type, rows, cols, per_item, codes, dtype, bytes, scales, s_bytes,   \
                 whole, shape, encode)                                                             \
  {                                                                                                \
    name, format, type, rows, cols, per_item, {codes, dtype, bytes},                               \
        {"weight_scale", scales, s_bytes}, whole, shape, encode                                    \
  }
static const td_encoding encodings[] = {
    ENCODING("int4-g128", "pack-quantized", "int", 1, 128, 8, "weight_packed", "I32", 4, "BF16", 2,
             true, true, encode_int4),
    ENCODING("int4-g32", "pack-quantized", "int", 1, 32, 8, "weight_packed", "I32", 4, "BF16", 2,
             true, true, encode_int4),
    ENCODING("fp8", "float-quantized", "float", 128, 128, 1, "weight", "F8_E4M3", 1, "F32", 4,
             false, false, encode_fp8),
    ENCODING("mxfp4", "mxfp4-pack-quantized", "float", 1, 32, 2, "weight_packed", "U8", 1, "U8", 1,
             true, false, encode_mxfp4),
};
const td_encoding td_encoding_int8 = ENCODING("int8", "int-quantized", "int", 1,
                                              TD_ENCODE_WHOLE_ROW, 1, "weight", "I8", 1, "BF16", 2,
                                              false, false, encode_int8);

const td_encoding *td_encoding_find(const char *name, const char **names) {
#define X(each) ", " each
  static const char list[] = TD_ENCODINGS(X);
#undef X
  *names = list + 2;
  for (size_t i = 0; i < TD_COUNT(encodings); i++)
    if (strcmp(encodings[i].name, name) == 0) return &encodings[i];
  return NULL;
}

td_encode_result td_encode_rows(const td_encoding *e, const float *w, uint32_t n_rows,
                                uint32_t cols, uint8_t *codes, uint8_t *scales) {
  td_encode_result result = {.finite = true};
  size_t row_bytes = td_encoded_row_bytes(e, cols), groups = td_encoded_groups(e, cols);
  for (size_t i = 0; i < (size_t)n_rows * cols; i++)
    result.norm += (double)w[i] * w[i];
  result.finite = isfinite(result.norm);
  for (uint32_t r = 0; r < n_rows && result.finite; r += e->block_rows) {
    uint32_t rows = n_rows - r < e->block_rows ? n_rows - r : e->block_rows;
    for (size_t g = 0; g < groups; g++) {
      size_t c = g * e->block_cols;
      uint32_t n = cols - c < e->block_cols ? (uint32_t)(cols - c) : e->block_cols;
      size_t item = c / e->codes_per_item * e->data.item_bytes;
      uint8_t *scale = scales + (r / e->block_rows * groups + g) * e->scale.item_bytes;
      result.error += e->encode(w + (size_t)r * cols + c, cols, rows, n,
                                codes + r * row_bytes + item, row_bytes, scale);
    }
  }
  return result;
}
