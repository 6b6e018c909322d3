// src/model/quant_impl.h - what quant.c (matching) and quant_config.c (reading) share.
#ifndef TD_MODEL_QUANT_IMPL_H
#define TD_MODEL_QUANT_IMPL_H

#include "model/config.h"
#include "model/quant.h"

#define TD_QUANT_MAX_SCHEMES 16
#define TD_QUANT_IGNORE      UINT32_MAX

struct td_quant {
  td_quant_scheme schemes[TD_QUANT_MAX_SCHEMES];
  uint32_t n_schemes;
  struct td_quant_pattern *patterns;
  size_t n_patterns, cap_patterns;
};

// Modules whose name matches text get scheme, or none with TD_QUANT_IGNORE. text is a name,
// "Linear" (every module), or "re:" and a regular expression that must match from the name's
// beginning.
td_status td_quant_add_pattern(td_quant *quant, const td_config_reader *r, const char *text,
                               uint32_t scheme_idx);

// Reads quantization_config into quant, which is zeroed.
td_status td_quant_read(td_quant *quant, const td_config_reader *r, const cJSON *config);

#endif
