// src/model/quant_modelopt.c - reads the settings that NVIDIA's ModelOpt writes, either as
// quantization_config or in hf_quant_config.json under "quantization".
#include <string.h>

#include "model/quant_scheme_impl.h"

static const struct {
  const char *algo;
  td_quant_scheme scheme;
} algos[] = {
    {"NVFP4", {TD_QUANT_MODELOPT, 1, 16, true, 0}},
    {"W4A16_NVFP4", {TD_QUANT_MODELOPT, 1, 16, true, 0}}, // differs in activations alone
    {"FP8", {TD_QUANT_FLOAT, 0, 0, true, 0}},
    {"FP8_PB_WO", {TD_QUANT_FP8, 128, 128, true, 0}},
    {"FP8_PER_CHANNEL_PER_TOKEN", {TD_QUANT_FLOAT, 1, 0, true, 0}},
    {"MXFP8", {TD_QUANT_FLOAT, 1, 32, true, 0}},
};

static td_status add_algo(td_quant *quant, const td_config_reader *r, const cJSON *object,
                          const char *modules) {
  const char *algo = "none given";
  td_status st = td_quant_str(r, object, "quant_algo", &algo);
  if (st != TD_OK) return st;
  for (size_t i = 0; i < TD_COUNT(algos); i++)
    if (strcmp(algo, algos[i].algo) == 0)
      return td_quant_add_scheme(quant, r, modules, &algos[i].scheme);
  return td_quant_unsupported(r, "quant_algo", algo,
                              "NVFP4, W4A16_NVFP4, FP8, FP8_PB_WO, FP8_PER_CHANNEL_PER_TOKEN, "
                              "MXFP8 and MIXED_PRECISION");
}

// "quantized_layers": {module: {"quant_algo": ...}}; a module may be one that holds others, such as
// the experts of a layer.
static td_status add_layers(td_quant *quant, const td_config_reader *r, const cJSON *layers) {
  if (!cJSON_IsObject(layers)) return td_config_bad(r, "quantized_layers must be an object");
  td_status st = TD_OK;
  for (const cJSON *layer = layers->child; layer && st == TD_OK; layer = layer->next)
    st = add_algo(quant, r, layer, layer->string);
  return st;
}

td_status td_quant_read_modelopt(td_quant *quant, const td_config_reader *r, const cJSON *config) {
  const cJSON *inner = td_json_get(config, "quantization");
  if (inner) config = inner;
  if (!cJSON_IsObject(config)) return td_config_bad(r, "quantization must be an object");
  const char *algo = "";
  td_status st = td_quant_str(r, config, "quant_algo", &algo);
  if (st != TD_OK) return st;
  if (strcmp(algo, "MIXED_PRECISION") == 0)
    return add_layers(quant, r, td_json_get(config, "quantized_layers"));
  return add_algo(quant, r, config, "Linear");
}
