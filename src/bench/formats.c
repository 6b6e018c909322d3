// src/bench/formats.c - synthetic matrices in every format.
#include "bench/formats.h"

#include <string.h>

const char *td_bench_family(const td_format *format, td_activations activations, bool prompt) {
  bool is_q4 = td_dtype_bits(format->dtype) == 4;
  bool is_int8 = is_q4 && prompt && activations == TD_ACTIVATIONS_INT8;
  return is_int8 ? "linear_w4a8" : td_weight_kind_of(format->dtype)->family;
}

static bool list_has(const char *list, const char *name) {
  size_t len = strlen(name);
  for (const char *at = list; at; at = strchr(at, ',')) {
    if (*at == ',') at++;
    if (strcspn(at, ",") == len && !strncmp(at, name, len)) return true;
  }
  return false;
}

bool td_bench_format_chosen(const td_format *format, const char *list) {
  return !list || list_has(list, format->name);
}

static size_t round_up(size_t n) {
  return (n + 63) & ~(size_t)63;
}

size_t td_bench_weight(td_weight *out, const td_format *format, uint32_t rows, uint32_t cols,
                       void *memory) {
  static const uint32_t nowhere; // placeholder for scales and zero points whose address is not
                                 // known yet
  bool whole = format->scale_cols == TD_FORMAT_WHOLE_ROW;
  *out = (td_weight){.dtype = format->dtype,
                     .scale_dtype = format->scale_dtype,
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
  case TD_MXFP4: return random; // its scales are bytes: see fill_block_scales
  default:
    // Blocks of GGUF are of even length, with F16 scales at even places: any two bytes can be one.
    return td_dtype_block(dtype).cols ? word_of(TD_F16, random) : random;
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
  // Gives the blocks of MXFP4 ordinary scales: E8M0, 2^-6, in the first of 17 bytes.
  if (weight->dtype == TD_MXFP4)
    for (size_t i = 0; i < bytes; i += 17)
      to[i] = 121;
  const char *base = weight->data;
  if (weight->scale) fill_scales(weight, to + ((const char *)weight->scale - base));
  if (weight->zero)
    memset(to + ((const char *)weight->zero - base), 0x88, td_weight_zero_bytes(weight));
}
