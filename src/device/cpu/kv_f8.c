// src/device/cpu/kv_f8.c - E4M3 of keys and values, and back.
#include "device/cpu/pages.h"

#include <string.h>

#include "base/bf16.h"
#include "base/e4m3.h"
#include "tandem/kernels.h"

typedef struct {
  uint32_t n_codes, n_blocks;
  uint8_t *codes;
  uint16_t *bf16;
  float *scales;
} row_places;

static row_places places_of(const td_kv_rows *rows, uint32_t page_tokens, void *page, size_t row) {
  row_places at = {.n_codes = td_kv_f8_codes(rows), .n_blocks = td_kv_f8_blocks(rows)};
  char *scales = (char *)page + td_kv_f8_scales_at(rows, page_tokens);
  at.codes = (uint8_t *)page + row * td_kv_f8_row_bytes(rows);
  at.bf16 = (uint16_t *)(void *)(at.codes + at.n_codes);
  at.scales = (float *)(void *)scales + row * at.n_blocks;
  return at;
}

// 2^(exponent - 127).
static float power_of_two(uint32_t exponent) {
  const uint32_t bits = exponent << 23;
  float f;
  memcpy(&f, &bits, sizeof f);
  return f;
}

// TD_E4M3_MAX is 1.75 * 2^8.
static uint32_t scale_exponent(const float *in, uint32_t n) {
  float most = 0x1p-100f;
  for (uint32_t i = 0; i < n; i++)
    most = fabsf(in[i]) > most ? fabsf(in[i]) : most;
  uint32_t bits;
  memcpy(&bits, &most, sizeof bits);
  return (bits >> 23) - 8 + ((bits & 0x7fffff) > 0x600000);
}

void td_kv_f8_put(const td_kv_rows *rows, uint32_t page_tokens, void *page, size_t row,
                  const float *in) {
  const row_places to = places_of(rows, page_tokens, page, row);
  for (uint32_t b = 0; b < to.n_blocks; b++) {
    const uint32_t begin = b * TD_KV_F8_BLOCK, left = to.n_codes - begin;
    const uint32_t n = left < TD_KV_F8_BLOCK ? left : TD_KV_F8_BLOCK;
    const uint32_t exponent = scale_exponent(in + begin, n);
    const float inverse = power_of_two(254 - exponent);
    for (uint32_t i = begin; i < begin + n; i++)
      to.codes[i] = td_e4m3_code(td_e4m3_round(in[i] * inverse));
    to.scales[b] = power_of_two(exponent);
  }
  td_bf16_of_n(to.bf16, in + to.n_codes, rows->n_bf16);
}

void td_kv_f8_get(const td_kv_rows *rows, uint32_t page_tokens, const void *page, size_t row,
                  float *out) {
  const row_places from = places_of(rows, page_tokens, (void *)(uintptr_t)page, row);
  const td_weight codes = {.data = from.codes,
                           .scale = from.scales,
                           .dtype = TD_F8E4M3,
                           .scale_dtype = TD_F32,
                           .rows = 1,
                           .cols = from.n_codes,
                           .scale_rows = 1,
                           .scale_cols = TD_KV_F8_BLOCK};
  td_kernels()->decode_row(&(td_decode_row_args){.w = &codes, .out = out});
  td_bf16_values(out + from.n_codes, from.bf16, rows->n_bf16);
}
