#include <string.h>

#include "model/config.h"

// weight_block_size: [rows, columns]; transformers' default where the key is absent.
static td_status read_block(const td_config_reader *r, const cJSON *quant) {
  const cJSON *block = cJSON_GetObjectItemCaseSensitive(quant, "weight_block_size");
  uint32_t size[2] = {128, 128};
  if (cJSON_IsNull(block)) {
    return td_fail(r->err, TD_EUNSUPPORTED,
                   "%s: FP8 without weight_block_size (one scale a matrix) is not supported; FP8 "
                   "with blocks is",
                   r->file);
  }
  if (block) {
    if (!cJSON_IsArray(block) || cJSON_GetArraySize(block) != 2) {
      return td_fail(r->err, TD_EFORMAT, "%s: weight_block_size must be an array of two integers",
                     r->file);
    }
    for (int i = 0; i < 2; i++) {
      double value = cJSON_GetNumberValue(cJSON_GetArrayItem(block, i));
      if (!(value >= 1 && value <= 65536 && value == (uint32_t)value)) {
        return td_fail(r->err, TD_EFORMAT,
                       "%s: weight_block_size must hold integers between 1 and 65536", r->file);
      }
      size[i] = (uint32_t)value;
    }
  }
  r->out->fp8_block_rows = size[0];
  r->out->fp8_block_cols = size[1];
  return TD_OK;
}

td_status td_config_read_quant(const td_config_reader *r) {
  const cJSON *quant = td_json_get(r->root, "quantization_config");
  if (!quant) return TD_OK;
  if (!cJSON_IsObject(quant)) {
    return td_fail(r->err, TD_EFORMAT, "%s: quantization_config must be an object", r->file);
  }
  const char *method = "none given", *format = "e4m3";
  td_status st = td_config_str(r, quant, "quant_method", &method);
  if (st == TD_OK) st = td_config_str(r, quant, "fmt", &format);
  if (st != TD_OK) return st;
  if (strcmp(method, "fp8") != 0) {
    return td_fail(r->err, TD_EUNSUPPORTED,
                   "%s: quant_method \"%.40s\" is not supported; supported is fp8 in blocks, or "
                   "weights that are not quantized",
                   r->file, method);
  }
  if (strcmp(format, "e4m3") != 0) {
    return td_fail(r->err, TD_EUNSUPPORTED,
                   "%s: FP8 format fmt \"%.40s\" is not supported; supported is e4m3", r->file,
                   format);
  }
  return read_block(r, quant);
}
