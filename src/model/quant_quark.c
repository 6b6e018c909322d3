// src/model/quant_quark.c - reads the settings that AMD's Quark writes: one for all modules,
// "layer_quant_config" for some of them by name, with asterisks, and "exclude".
#include <string.h>

#include "base/buf.h"
#include "model/quant_scheme_impl.h"

static td_status read_scheme(const td_config_reader *r, const cJSON *config, td_quant_scheme *out) {
  const cJSON *weight = td_json_get(config, "weight");
  const char *dtype = "none given", *by = "per_tensor", *scales = "";
  if (!cJSON_IsObject(weight)) return td_config_bad(r, "weight must be an object (quark)");
  uint32_t group = 0;
  td_status st = td_quant_str(r, weight, "dtype", &dtype);
  if (st == TD_OK) st = td_quant_str(r, weight, "qscheme", &by);
  if (st == TD_OK) st = td_quant_str(r, weight, "scale_format", &scales);
  if (st == TD_OK) st = td_quant_group_size(r, weight, &group);
  if (st != TD_OK) return st;
  const bool is_row = strcmp(by, "per_channel") == 0;
  if (strcmp(dtype, "fp4") == 0 && strcmp(by, "per_group") == 0 && group == 32 &&
      strcmp(scales, "e8m0") == 0) {
    *out = (td_quant_scheme){TD_QUANT_MXFP4, 1, 32, true, 0};
    return TD_OK;
  }
  if (strcmp(dtype, "fp8_e4m3") == 0 && (is_row || strcmp(by, "per_tensor") == 0)) {
    *out = (td_quant_scheme){TD_QUANT_FLOAT, is_row, 0, true, 0};
    return TD_OK;
  }
  return td_config_fail(
      r, TD_EUNSUPPORTED,
      "weights of dtype %.20s, qscheme %.20s, group_size %u, scale_format %.20s "
      "are not supported with quark; supported are fp4 in groups of 32 with e8m0, and "
      "fp8_e4m3 per tensor or channel",
      dtype, by, group, scales);
}

// Adds a name whose asterisks stand for any text, as an expression.
static td_status add_name(td_quant *quant, const td_config_reader *r, const char *name,
                          const td_quant_scheme *scheme) {
  td_buf text = TD_BUF_INIT;
  const bool is_expression = strncmp(name, "re:", 3) == 0;
  td_buf_str(&text, is_expression ? name : "re:");
  for (const char *at = is_expression ? "" : name; *at; at++)
    td_buf_printf(&text, *at == '*' ? ".*" : strchr(".+?()[]{}^$|\\", *at) ? "\\%c" : "%c", *at);
  if (!is_expression) td_buf_str(&text, "$");
  td_status st = td_buf_status(&text, r->err);
  if (st == TD_OK) {
    st = scheme ? td_quant_add_scheme(quant, r, td_buf_text(&text), scheme)
                : td_quant_add_pattern(quant, r, td_buf_text(&text), TD_QUANT_IGNORE);
  }
  td_buf_free(&text);
  return st;
}

td_status td_quant_read_quark(td_quant *quant, const td_config_reader *r, const cJSON *config) {
  td_quant_scheme scheme;
  const cJSON *global = td_json_get(config, "global_quant_config");
  td_status st = global ? read_scheme(r, global, &scheme)
                        : td_config_bad(r, "global_quant_config is missing (quark)");
  if (st == TD_OK) st = td_quant_add_scheme(quant, r, "Linear", &scheme);
  const cJSON *layers = td_json_get(config, "layer_quant_config");
  for (const cJSON *at = layers ? layers->child : NULL; at && st == TD_OK; at = at->next) {
    st = read_scheme(r, at, &scheme);
    if (st == TD_OK) st = add_name(quant, r, at->string ? at->string : "", &scheme);
  }
  const cJSON *kept = td_json_get(config, "exclude");
  for (const cJSON *at = kept ? kept->child : NULL; at && st == TD_OK; at = at->next) {
    st = cJSON_IsString(at) ? add_name(quant, r, at->valuestring, NULL)
                            : td_config_bad(r, "exclude must be an array of strings");
  }
  return st;
}
