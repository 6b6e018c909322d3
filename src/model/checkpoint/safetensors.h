// src/model/checkpoint/safetensors.h - reads the header of one safetensors file.
// The file: u64 little-endian header length, a JSON object {name: {dtype, shape, data_offsets}},
// then the data, which the tensors must tile without holes or overlaps.
#ifndef TD_MODEL_CHECKPOINT_SAFETENSORS_H
#define TD_MODEL_CHECKPOINT_SAFETENSORS_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

#define TD_SAFETENSORS_MAX_DIMS   8
#define TD_SAFETENSORS_MAX_HEADER 100000000u // bytes; the limit of the safetensors library

typedef struct {
  const char *name;  // owned by the td_safetensors
  const char *file;  // the file_name given to parse, borrowed
  const char *dtype; // static, as the format spells it: "BF16", "F8_E4M3", ...
  const uint8_t *data;
  uint64_t n_bytes;
  uint64_t shape[TD_SAFETENSORS_MAX_DIMS];
  uint32_t n_dims;
} td_tensor;

typedef struct {
  td_tensor *tensors; // owned, in order of their data
  size_t n_tensors;
  char *names; // owned
} td_safetensors;

// Reads the whole file's bytes, which out's tensors borrow; file_name is borrowed too and begins
// every message. TD_EFORMAT: not a well-formed file; TD_EUNSUPPORTED: a dtype the format does not
// know or too many dimensions; TD_ELIMIT: header too large; TD_ENOMEM. On error *out is zeroed.
td_status td_safetensors_parse(td_safetensors *out, const void *bytes, size_t n_bytes,
                               const char *file_name, td_err *err);
void td_safetensors_free(td_safetensors *st);

#endif
