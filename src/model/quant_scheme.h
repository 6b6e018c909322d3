// src/model/quant_scheme.h - quantization_config of config.json: which modules are quantized, and
// how their tensors are stored. Methods: fp8 (DeepSeek's blocks), compressed-tensors, modelopt,
// mxfp4, mxfp8, gptq, awq, auto-round, quark,
// bitsandbytes (8 bits; matrices of 4 bits say themselves what they are: model/convert_bnb.h).
// Settings for activations are ignored.
#pragma once

#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"

// Tensors that store a module's weight: <dtype> <name after the module's> [shape].
typedef enum {
  TD_QUANT_FP8,      // F8_E4M3 weight, weight_scale_inv (or scale) per block
  TD_QUANT_FLOAT,    // F8_E4M3 weight, weight_scale
  TD_QUANT_INT,      // I8 weight, weight_scale
  TD_QUANT_BNB8,     // I8 weight, F32 SCB [rows]: 127 times the scale
  TD_QUANT_PACKED,   // I32 weight_packed [rows][cols/8], weight_scale, weight_zero_point
  TD_QUANT_PACKED8,  // same with 8 bits, [rows][cols/4]; has no kernel (model/convert.h)
  TD_QUANT_NVFP4,    // U8 weight_packed [rows][cols/2], F8_E4M3 weight_scale, weight_global_scale
                     // (a divisor)
  TD_QUANT_MODELOPT, // U8 weight [rows][cols/2], F8_E4M3 weight_scale, weight_scale_2 (a factor)
  TD_QUANT_MXFP4_CT, // U8 weight_packed [rows][cols/2], U8 weight_scale
  TD_QUANT_MXFP4,    // U8 weight [rows][cols/2], U8 weight_scale (or scale)
  TD_QUANT_GPTQ,     // I32 qweight [cols/8][rows], scales, qzeros, g_idx
  TD_QUANT_GPTQ8,    // same with 8 bits, [cols/4][rows]; has no kernel
  TD_QUANT_AWQ,      // I32 qweight [cols][rows/8], scales, qzeros
} td_quant_format;

typedef struct {
  td_quant_format format;
  uint32_t scale_rows, scale_cols; // elements per scale; 0: the whole dimension
  bool symmetric;                  // no zero points (AWQ files may still contain some)
  uint32_t zero_add;               // to be added to each stored word of zero points
} td_quant_scheme;

typedef struct td_quant td_quant;

// Reads the root of config.json; quantization_config may be absent. file prefixes every message.
// TD_EFORMAT, TD_EUNSUPPORTED, TD_ENOMEM. On success the caller owns *out; on error it is NULL.
td_status td_quant_open(td_quant **out, const cJSON *root, const char *file, td_err *err);
// Like td_quant_open, for dir/config.json, or for ModelOpt's dir/hf_quant_config.json if
// config.json has no quantization_config.
td_status td_quant_open_dir(td_quant **out, const char *dir, td_err *err);
void td_quant_close(td_quant *quant);

// The scheme of a module ("model.layers.0.mlp.up_proj"), borrowed. NULL: not quantized.
const td_quant_scheme *td_quant_find(const td_quant *quant, const char *module);
