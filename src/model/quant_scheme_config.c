// src/model/quant_scheme_config.c - reads quantization_config, one function per method. gptq, awq
// and auto-round are in quant_words.c, ModelOpt in quant_modelopt.c, Quark in quant_quark.c.
#include <string.h>

#include "model/quant_scheme_impl.h"

#define MAX_BLOCK 65536

td_status td_quant_str(const td_config_reader *r, const cJSON *object, const char *key,
                       const char **out) {
  return td_json_get(object, key) ? td_config_str(r, object, key, out) : TD_OK;
}

td_status td_quant_bool(const td_config_reader *r, const cJSON *object, const char *key,
                        bool *out) {
  return td_json_get(object, key) ? td_config_bool(r, object, key, out) : TD_OK;
}

td_status td_quant_uint(const td_config_reader *r, const cJSON *object, const char *key,
                        uint32_t max, uint32_t *out) {
  return td_json_get(object, key) ? td_config_uint(r, object, key, 1, max, out) : TD_OK;
}

td_status td_quant_group_size(const td_config_reader *r, const cJSON *object, uint32_t *out) {
  const cJSON *value = td_json_get(object, "group_size");
  *out = 0;
  if (cJSON_IsNumber(value) && value->valuedouble == -1) return TD_OK;
  return td_quant_uint(r, object, "group_size", MAX_BLOCK, out);
}

td_status td_quant_unsupported(const td_config_reader *r, const char *key, const char *value,
                               const char *supported) {
  return td_config_fail(r, TD_EUNSUPPORTED, "%s \"%.40s\" is not supported; supported is %s", key,
                        value, supported);
}

// [rows, columns]
static td_status read_block(const td_config_reader *r, const cJSON *block, const char *key,
                            td_quant_scheme *s) {
  uint32_t size[2];
  if (!cJSON_IsArray(block) || cJSON_GetArraySize(block) != 2)
    return td_config_fail(r, TD_EFORMAT, "%s must be an array of two integers", key);
  for (int i = 0; i < 2; i++) {
    int64_t value;
    if (!td_json_whole(cJSON_GetArrayItem(block, i), 1, MAX_BLOCK, &value)) {
      return td_config_fail(r, TD_EFORMAT, "%s must hold integers between 1 and %d", key,
                            MAX_BLOCK);
    }
    size[i] = (uint32_t)value;
  }
  s->scale_rows = size[0];
  s->scale_cols = size[1];
  return TD_OK;
}

// Adds the only scheme of a method, which applies to every module that has the tensors.
static td_status add_for_all(td_quant *quant, const td_config_reader *r,
                             const td_quant_scheme *scheme) {
  return td_quant_add_scheme(quant, r, "Linear", scheme);
}

// Routed experts in FP4 beside FP8, as DeepSeek-V4 has them.
static td_status read_expert_dtype(td_quant *quant, const td_config_reader *r,
                                   const cJSON *config) {
  const cJSON *const places[] = {config, r->root};
  const char *dtype = "fp8";
  for (size_t i = 0; i < TD_COUNT(places); i++) {
    const td_status st = td_quant_str(r, places[i], "expert_dtype", &dtype);
    if (st != TD_OK) return st;
  }
  if (strcmp(dtype, "fp8") == 0) return TD_OK;
  if (strcmp(dtype, "fp4") != 0)
    return td_quant_unsupported(r, "expert_dtype", dtype, "fp4 or fp8");
  return td_quant_add_scheme(quant, r, "re:.*\\.experts\\.[0-9]+\\..*",
                             &(td_quant_scheme){TD_QUANT_MXFP4, 1, 32, true, 0});
}

static td_status read_fp8(td_quant *quant, const td_config_reader *r, const cJSON *config) {
  const char *fmt = "e4m3";
  td_status st = td_config_str(r, config, "fmt", &fmt);
  if (st == TD_OK) st = read_expert_dtype(quant, r, config);
  if (st != TD_OK) return st;
  if (strcmp(fmt, "e4m3") != 0 && strcmp(fmt, "float8_e4m3fn") != 0)
    return td_quant_unsupported(r, "FP8 format fmt", fmt, "e4m3, which is float8_e4m3fn");
  const cJSON *block = cJSON_GetObjectItemCaseSensitive(config, "weight_block_size");
  // transformers' default if the key is absent; matrices with a single scale have that for the
  // whole (weight_formats.c).
  td_quant_scheme s = {TD_QUANT_FP8, 128, 128, true, 0};
  if (cJSON_IsNull(block)) s.scale_rows = s.scale_cols = 0;
  if (block && !cJSON_IsNull(block)) st = read_block(r, block, "weight_block_size", &s);
  return st == TD_OK ? add_for_all(quant, r, &s) : st;
}

enum { TENSOR = 1, CHANNEL = 2, GROUP = 4, BLOCK = 8 };

// Storage formats of compressed-tensors. group: the only group size supported, 0: any.
static const struct {
  const char *name, *type;
  uint32_t bits, group;
  unsigned strategies;
  td_quant_format format;
  bool asymmetric; // zero points are allowed
} ct_formats[] = {
    {"pack-quantized", "int", 4, 0, CHANNEL | GROUP, TD_QUANT_PACKED, true},
    {"pack-quantized", "int", 4, 0, TENSOR, TD_QUANT_PACKED, false},
    {"pack-quantized", "int", 8, 0, CHANNEL | GROUP, TD_QUANT_PACKED8, true},
    {"pack-quantized", "int", 8, 0, TENSOR, TD_QUANT_PACKED8, false},
    {"int-quantized", "int", 8, 0, TENSOR | CHANNEL | GROUP, TD_QUANT_INT, false},
    {"int-quantized", "int", 4, 0, TENSOR | CHANNEL | GROUP, TD_QUANT_INT, false},
    {"float-quantized", "float", 8, 0, TENSOR | CHANNEL | GROUP | BLOCK, TD_QUANT_FLOAT, false},
    {"naive-quantized", "int", 8, 0, TENSOR | CHANNEL | GROUP, TD_QUANT_INT, false},
    {"naive-quantized", "int", 4, 0, TENSOR | CHANNEL | GROUP, TD_QUANT_INT, false},
    {"naive-quantized", "float", 8, 0, TENSOR | CHANNEL | GROUP | BLOCK, TD_QUANT_FLOAT, false},
    {"nvfp4-pack-quantized", "float", 4, 16, GROUP, TD_QUANT_NVFP4, false},
    {"mxfp4-pack-quantized", "float", 4, 32, GROUP, TD_QUANT_MXFP4_CT, false},
    {"mxfp8-quantized", "float", 8, 32, GROUP, TD_QUANT_FLOAT, false}, // scales are exponents
                                                                       // (E8M0)
};

// The "weights" object of one of config_groups.
typedef struct {
  const char *type, *strategy, *actorder;
  uint32_t bits, group_size;
  bool symmetric, dynamic;
} ct_weights;

static td_status read_ct_weights(const td_config_reader *r, const cJSON *weights, ct_weights *w) {
  *w = (ct_weights){.type = "int", .bits = 8, .symmetric = true};
  td_status st = td_quant_str(r, weights, "type", &w->type);
  if (st == TD_OK) st = td_quant_uint(r, weights, "num_bits", 32, &w->bits);
  if (st == TD_OK) st = td_quant_bool(r, weights, "symmetric", &w->symmetric);
  if (st == TD_OK) st = td_quant_bool(r, weights, "dynamic", &w->dynamic);
  if (st == TD_OK) st = td_quant_group_size(r, weights, &w->group_size);
  if (st != TD_OK) return st;
  bool has_group = td_json_get(weights, "group_size") != NULL;
  w->strategy = w->group_size ? "group" : has_group ? "channel" : "tensor";
  st = td_quant_str(r, weights, "strategy", &w->strategy);
  const cJSON *order = td_json_get(weights, "actorder");
  w->actorder = cJSON_IsTrue(order) ? "group" : "weight";
  if (st == TD_OK && order && !cJSON_IsBool(order))
    st = td_quant_str(r, weights, "actorder", &w->actorder);
  if (st != TD_OK) return st;
  if (w->dynamic) return td_quant_unsupported(r, "dynamic", "true", "weights quantized ahead");
  return TD_OK;
}

static unsigned strategy_bit(const char *name) {
  static const struct {
    const char *name;
    unsigned bit;
  } strategies[] = {{"tensor", TENSOR},
                    {"channel", CHANNEL},
                    {"group", GROUP},
                    {"tensor_group", GROUP},
                    {"block", BLOCK}};
  for (size_t i = 0; i < TD_COUNT(strategies); i++)
    if (strcmp(strategies[i].name, name) == 0) return strategies[i].bit;
  return 0;
}

static td_status set_ct_blocks(const td_config_reader *r, const cJSON *weights, const ct_weights *w,
                               td_quant_scheme *s) {
  switch (strategy_bit(w->strategy)) {
  case BLOCK: return read_block(r, td_json_get(weights, "block_structure"), "block_structure", s);
  case CHANNEL: s->scale_rows = 1; break;
  case GROUP:
    s->scale_rows = 1;
    s->scale_cols = w->group_size;
    if (w->group_size >= 8 && w->group_size % 8 == 0) break;
    return td_config_fail(r, TD_EUNSUPPORTED,
                          "group_size %u is not supported; supported are multiples of 8",
                          w->group_size);
  }
  return TD_OK;
}

static td_status make_ct_scheme(const td_config_reader *r, const char *format, const cJSON *weights,
                                td_quant_scheme *s) {
  ct_weights w;
  td_status st = read_ct_weights(r, weights, &w);
  if (st != TD_OK) return st;
  bool known = false;
  for (size_t i = 0; i < TD_COUNT(ct_formats); i++) {
    if (strcmp(format, ct_formats[i].name) != 0) continue;
    known = true;
    if (strcmp(w.type, ct_formats[i].type) != 0 || w.bits != ct_formats[i].bits ||
        !(strategy_bit(w.strategy) & ct_formats[i].strategies) ||
        (ct_formats[i].group && w.group_size != ct_formats[i].group) ||
        (!w.symmetric && !ct_formats[i].asymmetric))
      continue;
    *s = (td_quant_scheme){.format = ct_formats[i].format, .symmetric = w.symmetric};
    bool reordered = strcmp(w.actorder, "group") == 0 || strcmp(w.actorder, "dynamic") == 0;
    if (reordered && strcmp(format, "pack-quantized") != 0)
      return td_quant_unsupported(r, "actorder", w.actorder, "\"weight\", or none");
    return set_ct_blocks(r, weights, &w, s);
  }
  if (!known) {
    return td_quant_unsupported(
        r, "format", format,
        "pack-quantized, int-quantized, float-quantized, nvfp4-pack-quantized, "
        "mxfp4-pack-quantized and mxfp8-quantized");
  }
  return td_config_fail(
      r, TD_EUNSUPPORTED,
      "weights of %u-bit %.10s, strategy %.20s, group_size %u, %s are not supported "
      "in format %s",
      w.bits, w.type, w.strategy, w.group_size, w.symmetric ? "symmetric" : "not symmetric",
      format);
}

// Adds each entry of an array of names and regular expressions.
static td_status read_patterns(td_quant *quant, const td_config_reader *r, const cJSON *object,
                               const char *key, uint32_t scheme_idx) {
  const cJSON *list = td_json_get(object, key);
  if (list && !cJSON_IsArray(list))
    return td_config_fail(r, TD_EFORMAT, "%s must be an array of strings", key);
  for (const cJSON *item = list ? list->child : NULL; item; item = item->next) {
    if (!cJSON_IsString(item))
      return td_config_fail(r, TD_EFORMAT, "%s must be an array of strings", key);
    td_status st = td_quant_add_pattern(quant, r, item->valuestring, scheme_idx);
    if (st != TD_OK) return st;
  }
  return TD_OK;
}

static td_status read_ct_group(td_quant *quant, const td_config_reader *r, const char *format,
                               const cJSON *group) {
  if (!cJSON_IsObject(group))
    return td_config_fail(r, TD_EFORMAT, "config_groups: %.40s must be an object", group->string);
  const cJSON *weights = td_json_get(group, "weights");
  if (!weights) return TD_OK; // only activations are quantized
  if (!cJSON_IsObject(weights)) return td_config_bad(r, "weights must be an object");
  if (quant->n_schemes == TD_QUANT_MAX_SCHEMES) {
    return td_config_fail(r, TD_EUNSUPPORTED, "more than %d config_groups are not supported",
                          TD_QUANT_MAX_SCHEMES);
  }
  td_status st = td_quant_str(r, group, "format", &format);
  if (st == TD_OK) st = make_ct_scheme(r, format, weights, &quant->schemes[quant->n_schemes]);
  return st == TD_OK ? read_patterns(quant, r, group, "targets", quant->n_schemes++) : st;
}

static td_status read_compressed_tensors(td_quant *quant, const td_config_reader *r,
                                         const cJSON *config) {
  const char *format = "dense", *sparsity = "dense";
  td_status st = td_quant_str(r, config, "format", &format);
  const cJSON *sparse = td_json_get(config, "sparsity_config");
  if (st == TD_OK && cJSON_IsObject(sparse)) st = td_quant_str(r, sparse, "format", &sparsity);
  if (st != TD_OK) return st;
  if (strcmp(sparsity, "dense") != 0)
    return td_quant_unsupported(r, "sparsity_config format", sparsity, "dense");
  const cJSON *groups = td_json_get(config, "config_groups");
  if (groups && !cJSON_IsObject(groups)) return td_config_bad(r, "config_groups must be an object");
  for (const cJSON *group = groups ? groups->child : NULL; group && st == TD_OK;
       group = group->next)
    st = read_ct_group(quant, r, format, group);
  return st == TD_OK ? read_patterns(quant, r, config, "ignore", TD_QUANT_IGNORE) : st;
}

static td_status read_mxfp4(td_quant *quant, const td_config_reader *r, const cJSON *config) {
  (void)config;
  return add_for_all(quant, r, &(td_quant_scheme){TD_QUANT_MXFP4, 1, 32, true, 0});
}

// FP8 with one exponent per 32 elements, configured with the keys of DeepSeek's blocks.
static td_status read_mxfp8(td_quant *quant, const td_config_reader *r, const cJSON *config) {
  (void)config;
  return add_for_all(quant, r, &(td_quant_scheme){TD_QUANT_FP8, 1, 32, true, 0});
}

static td_status read_bitsandbytes(td_quant *quant, const td_config_reader *r,
                                   const cJSON *config) {
  (void)config;
  return add_for_all(quant, r, &(td_quant_scheme){TD_QUANT_BNB8, 1, 0, true, 0});
}

td_status td_quant_read(td_quant *quant, const td_config_reader *r, const cJSON *config) {
  static const struct {
    const char *method;
    td_status (*read)(td_quant *quant, const td_config_reader *r, const cJSON *config);
  } methods[] = {
      {"fp8", read_fp8},
      {"compressed-tensors", read_compressed_tensors},
      {"gptq", td_quant_read_gptq},
      {"awq", td_quant_read_awq},
      {"auto-round", td_quant_read_auto_round},
      {"intel/auto-round", td_quant_read_auto_round},
      {"mxfp4", read_mxfp4},
      {"mxfp8", read_mxfp8},
      {"modelopt", td_quant_read_modelopt},
      {"quark", td_quant_read_quark},
      {"bitsandbytes", read_bitsandbytes},
  };
  if (!cJSON_IsObject(config)) return td_config_bad(r, "quantization_config must be an object");
  const char *method = "none given";
  td_status st = td_config_str(r, config, "quant_method", &method);
  if (st != TD_OK) return st;
  for (size_t i = 0; i < TD_COUNT(methods); i++)
    if (strcmp(method, methods[i].method) == 0) return methods[i].read(quant, r, config);
  return td_quant_unsupported(
      r, "quant_method", method,
      "fp8, compressed-tensors, gptq, awq, auto-round, mxfp4, mxfp8, modelopt, quark and "
      "bitsandbytes");
}

td_status td_config_read_quant(const td_config_reader *r) {
  td_quant *quant;
  td_status st = td_quant_open(&quant, r->root, r->file, r->err);
  td_quant_close(quant);
  return st;
}
