// src/base/dtype.c - names of dtypes.
#include "tandem/types.h"

// Spelled as in safetensors. 4-bit dtypes, which safetensors stores as words or bytes, follow the
// same pattern.
const char *td_dtype_name(td_dtype dtype) {
  switch (dtype) {
  case TD_F32: return "F32";
  case TD_F16: return "F16";
  case TD_BF16: return "BF16";
  case TD_F8E4M3: return "F8_E4M3";
  case TD_I32: return "I32";
  case TD_I8: return "I8";
  case TD_I4: return "I4";
  case TD_F4E2M1: return "F4_E2M1";
  case TD_F8E8M0: return "F8_E8M0";
  case TD_N_DTYPES: break;
  }
  return "unknown";
}
