// src/bench/formats.c - the list of formats, and synthetic matrices in them.
#include "bench/formats.h"

#include <string.h>

static const td_bench_format formats[] = {
    {"f32", "linear_f32", TD_F32, TD_F32, TD_LAYOUT_ROWS, 0, 0, false},
    {"bf16", "linear_bf16", TD_BF16, TD_F32, TD_LAYOUT_ROWS, 0, 0, false},
    {"f16", "linear_f16", TD_F16, TD_F32, TD_LAYOUT_ROWS, 0, 0, false},
    {"fp8-b128", "linear_f8e4m3", TD_F8E4M3, TD_F32, TD_LAYOUT_ROWS, 128, 128, false},
    {"fp8-channel", "linear_f8e4m3", TD_F8E4M3, TD_F32, TD_LAYOUT_ROWS, 1, TD_BENCH_ALL_COLS,
     false},
    {"int8-channel", "linear_i8", TD_I8, TD_F32, TD_LAYOUT_ROWS, 1, TD_BENCH_ALL_COLS, false},
    {"int4-g128", "linear_i4", TD_I4, TD_BF16, TD_LAYOUT_ROWS, 1, 128, false},
    {"int4-g32", "linear_i4", TD_I4, TD_BF16, TD_LAYOUT_ROWS, 1, 32, false},
    {"gptq-g128", "linear_i4_gptq", TD_I4, TD_F16, TD_LAYOUT_GPTQ, 1, 128, true},
    {"awq-g128", "linear_i4_awq", TD_I4, TD_F16, TD_LAYOUT_AWQ, 1, 128, true},
    {"mxfp4", "linear_f4e2m1", TD_F4E2M1, TD_F8E8M0, TD_LAYOUT_ROWS, 1, 32, false},
    {"nvfp4", "linear_f4e2m1", TD_F4E2M1, TD_F8E4M3, TD_LAYOUT_ROWS, 1, 16, false},
};

const td_bench_format *td_bench_formats(size_t *n) {
  *n = sizeof formats / sizeof formats[0];
  return formats;
}

const char *td_bench_family(const td_bench_format *format, td_activations activations,
                            bool prompt) {
  bool is_q4 = format->layout == TD_LAYOUT_ROWS && td_dtype_bits(format->dtype) == 4;
  bool is_int8 = is_q4 && prompt && activations == TD_ACTIVATIONS_INT8;
  return is_int8 ? "linear_w4a8" : format->family;
}

static bool list_has(const char *list, const char *name) {
  size_t len = strlen(name);
  for (const char *at = list; at; at = strchr(at, ',')) {
    if (*at == ',') at++;
    if (strcspn(at, ",") == len && !strncmp(at, name, len)) return true;
  }
  return false;
}

bool td_bench_format_chosen(const td_bench_format *format, const char *list) {
  return !list || list_has(list, format->name);
}

td_status td_bench_check_formats(const char *list, td_err *err) {
  for (const char *at = list; at && *at;) {
    size_t len = strcspn(at, ","), i = 0, n = sizeof formats / sizeof formats[0];
    while (i < n && (strlen(formats[i].name) != len || strncmp(formats[i].name, at, len)))
      i++;
    if (i == n) {
      return td_fail(err, TD_EINVAL,
                     "--format %.*s: use f32, bf16, f16, fp8-b128, fp8-channel, int8-channel, "
                     "int4-g128, int4-g32, gptq-g128, awq-g128, mxfp4 or nvfp4",
                     (int)len, at);
    }
    at += len + (at[len] == ',');
  }
  return TD_OK;
}

static size_t round_up(size_t n) {
  return (n + 63) & ~(size_t)63;
}

size_t td_bench_weight(td_weight *out, const td_bench_format *format, uint32_t rows, uint32_t cols,
                       void *memory) {
  static const uint32_t nowhere; // placeholder for scales and zero points whose address is not
                                 // known yet
  bool whole = format->scale_cols == TD_BENCH_ALL_COLS;
  *out = (td_weight){.dtype = format->dtype,
                     .scale_dtype = format->scale_dtype,
                     .layout = format->layout,
                     .rows = rows,
                     .cols = cols,
                     .scale_rows = format->scale_rows,
                     .scale_cols = whole ? cols : format->scale_cols,
                     .global_scale = 1};
  if (format->scale_cols) out->scale = &nowhere;
  if (format->zero) out->zero = &nowhere;
  size_t data = round_up(td_weight_data_bytes(out)), scale = round_up(td_weight_scale_bytes(out));
  size_t zero = round_up(td_weight_zero_bytes(out));
  char *base = memory;
  out->data = base;
  out->scale = base && out->scale ? base + data : NULL;
  out->zero = base && out->zero ? (const uint32_t *)(const void *)(base + data + scale) : NULL;
  return data + scale + zero;
}

// A 32-bit word of codes of the dtype, made from random bits.
static uint32_t word_of(td_dtype dtype, uint32_t random) {
  switch (dtype) {
  case TD_F32: return 0x3c000000u | (random & 0x807fffffu);    // +-[2^-7, 2^-6)
  case TD_BF16: return 0x3c003c00u | (random & 0x807f807fu);   //
  case TD_F16: return 0x20002000u | (random & 0x83ff83ffu);    //
  case TD_F8E4M3: return 0x30303030u | (random & 0x8f8f8f8fu); // +-[0.5, 2); also for scales
  default: return random;
  }
}

// Doubles the first n bytes of memory until total bytes are filled.
static void repeat_bytes(char *memory, size_t n, size_t total) {
  for (; n < total; n *= 2)
    memcpy(memory + n, memory, n < total - n ? n : total - n);
}

static void fill_scales(const td_weight *weight, char *to) {
  static const uint32_t f32 = 0x3c800000u; // all scales are 2^-6
  static const uint16_t bf16 = 0x3c80, f16 = 0x2400;
  static const uint8_t e8m0 = 121, e4m3 = 0x08;
  const void *value = weight->scale_dtype == TD_BF16     ? (const void *)&bf16
                      : weight->scale_dtype == TD_F16    ? (const void *)&f16
                      : weight->scale_dtype == TD_F8E8M0 ? (const void *)&e8m0
                      : weight->scale_dtype == TD_F8E4M3 ? (const void *)&e4m3
                                                         : (const void *)&f32;
  size_t bytes = td_dtype_bytes(weight->scale_dtype);
  memcpy(to, value, bytes);
  repeat_bytes(to, bytes, td_weight_scale_bytes(weight));
}

void td_bench_fill(const td_weight *weight, void *memory, uint32_t seed) {
  enum { PATTERN_WORDS = 1 << 14 };
  char *to = memory;
  size_t bytes = td_weight_data_bytes(weight);
  size_t n = bytes / 4 < PATTERN_WORDS ? bytes / 4 : PATTERN_WORDS;
  uint64_t state = seed;
  for (size_t i = 0; i < n; i++) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    uint32_t word = word_of(weight->dtype, (uint32_t)(state >> 32));
    memcpy(to + 4 * i, &word, 4);
  }
  repeat_bytes(to, 4 * n, bytes);
  const char *base = weight->data;
  if (weight->scale) fill_scales(weight, to + ((const char *)weight->scale - base));
  if (weight->zero) {
    memset(to + ((const char *)weight->zero - base), 0x88, td_weight_zero_bytes(weight));
  }
}
