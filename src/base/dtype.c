#include "tandem/types.h"

// As safetensors spells them.
const char *td_dtype_name(td_dtype dtype) {
  switch (dtype) {
  case TD_F32: return "F32";
  case TD_F16: return "F16";
  case TD_BF16: return "BF16";
  case TD_F8E4M3: return "F8_E4M3";
  case TD_I32: return "I32";
  }
  return "unknown";
}
