// src/model/quant_scheme_impl.h - declarations shared by quant_scheme.c (matching) and
// quant_scheme_config.c (reading).
#pragma once

#include "model/config.h"
#include "model/quant_scheme.h"

#define TD_QUANT_MAX_SCHEMES 16
#define TD_QUANT_IGNORE      UINT32_MAX

struct td_quant {
  td_quant_scheme schemes[TD_QUANT_MAX_SCHEMES];
  uint32_t n_schemes;
  struct td_quant_pattern *patterns;
  size_t n_patterns, cap_patterns;
};

// Assigns scheme to modules whose name matches text, or excludes them if its format is
// TD_QUANT_IGNORE. text is a name, "Linear" (every module), or "re:" and a regular expression that
// must match from the start of the name.
td_status td_quant_add_pattern(td_quant *quant, const td_config_reader *r, const char *text,
                               uint32_t scheme_idx);

// Assigns a copy of scheme to modules whose name matches text.
td_status td_quant_add_scheme(td_quant *quant, const td_config_reader *r, const char *text,
                              const td_quant_scheme *scheme);

// Reads quantization_config into a zeroed quant.
td_status td_quant_read(td_quant *quant, const td_config_reader *r, const cJSON *config);

// Methods implemented in quant_words.c, quant_quark.c and quant_modelopt.c.
td_status td_quant_read_gptq(td_quant *quant, const td_config_reader *r, const cJSON *config);
td_status td_quant_read_awq(td_quant *quant, const td_config_reader *r, const cJSON *config);
td_status td_quant_read_auto_round(td_quant *quant, const td_config_reader *r, const cJSON *config);
td_status td_quant_read_quark(td_quant *quant, const td_config_reader *r, const cJSON *config);
td_status td_quant_read_modelopt(td_quant *quant, const td_config_reader *r, const cJSON *config);

// Read values for which null means absent.
td_status td_quant_str(const td_config_reader *r, const cJSON *object, const char *key,
                       const char **out);
td_status td_quant_bool(const td_config_reader *r, const cJSON *object, const char *key, bool *out);
// Range: 1 to max.
td_status td_quant_uint(const td_config_reader *r, const cJSON *object, const char *key,
                        uint32_t max, uint32_t *out);
// -1, null and absence mean one group for the row; *out is 0 then.
td_status td_quant_group_size(const td_config_reader *r, const cJSON *object, uint32_t *out);
td_status td_quant_unsupported(const td_config_reader *r, const char *key, const char *value,
                               const char *supported);
