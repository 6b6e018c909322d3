// src/model/checkpoint/safetensors.h - reads the header of one safetensors file.
// The file: u64 little-endian header length, a JSON object {name: {dtype, shape, data_offsets}},
// then the data, which the tensors must tile without holes or overlaps.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

#define TD_SAFETENSORS_MAX_DIMS   8
#define TD_SAFETENSORS_MAX_HEADER 100000000u // bytes; the limit of the safetensors library

typedef struct {
  const char *name;  // owned by the td_safetensors
  const char *file;  // file_name as passed to td_safetensors_parse; borrowed
  const char *dtype; // static; spelled as in the file: "BF16", "F8_E4M3", ...
  const uint8_t *data;
  uint64_t n_bytes;
  uint64_t shape[TD_SAFETENSORS_MAX_DIMS];
  uint32_t n_dims;
} td_tensor;

// An error of the tensor, whose file and name are put in front.
td_status td_tensor_fail(td_err *err, td_status code, const td_tensor *t, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));

// Of a tensor that was parsed, so that the product does not overflow.
static inline uint64_t td_tensor_elements(const td_tensor *t) {
  uint64_t n = 1;
  for (uint32_t i = 0; i < t->n_dims; i++)
    n *= t->shape[i];
  return n;
}

typedef struct {
  td_tensor *tensors; // owned, sorted by data offset
  size_t n_tensors;
  char *names; // owned
} td_safetensors;

// Parses a complete file in memory. out's tensors borrow bytes and file_name; file_name prefixes
// every message. TD_EFORMAT: malformed. TD_EUNSUPPORTED: unknown dtype, or too many dimensions.
// TD_ELIMIT: header too large. TD_ENOMEM. On error *out is zeroed.
td_status td_safetensors_parse(td_safetensors *out, const void *bytes, size_t n_bytes,
                               const char *file_name, td_err *err);
void td_safetensors_free(td_safetensors *st);
