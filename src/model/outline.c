// src/model/outline.c - fills a model's layers with matrices that have no data.
#include "model/outline.h"

#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "model/config.h"
#include "model/families/family.h"
#include "options/closest.h"

enum { MAX_DEPTH = 8 };

static const uint32_t nowhere; // stands for data

const td_shape_file *td_shape_find(const char *name) {
  const char *slash = strrchr(name, '/');
  if (slash) name = slash + 1;
  for (const td_shape_file *f = td_shape_files; f->name; f++)
    if (!strcasecmp(f->name, name)) return f;
  return NULL;
}

const char *td_shape_closest(const char *name) {
  td_closest closest = {.word = name, .len = strlen(name)};
  for (const td_shape_file *f = td_shape_files; f->name; f++)
    td_closest_try(&closest, f->name);
  return closest.best;
}

// What matrices are in: routed experts, the others, and those that every file keeps as they were.
typedef struct {
  const td_format *experts, *others, *plain;
} formats;

static td_weight matrix(const td_model_config *c, const td_tensor_spec *p, const formats *of) {
  const bool is_plain = p->kind == TD_SPEC_ROUTER || p->kind == TD_SPEC_SCORES ||
                        p->kind == TD_SPEC_PLAIN;
  const td_format *f = is_plain ? of->plain : p->kind == TD_SPEC_EXPERT ? of->experts : of->others;
  td_weight w = {.data = &nowhere,
                 .dtype = f->dtype,
                 .scale_dtype = f->scale_dtype,
                 .rows = td_dim_value(c, p->rows),
                 .cols = td_dim_value(c, p->cols),
                 .scale_rows = f->scale_rows,
                 .global_scale = 1};
  w.scale_cols = f->scale_cols == TD_FORMAT_WHOLE_ROW ? w.cols : f->scale_cols;
  if (f->scale_cols) w.scale = &nowhere;
  if (f->zero) w.zero = &nowhere;
  return w;
}

// Layers share the experts of a place.
static td_weight *experts_of(td_weight *experts, const td_model_config *c, const td_tensor_spec *p,
                             const formats *format) {
  for (uint32_t i = 0; i < c->n_experts; i++)
    experts[i] = matrix(c, p, format);
  return experts;
}

static void fill_layer(td_layer *layer, uint32_t idx, const td_model_config *c,
                       const formats *format, td_weight *experts) {
  const uint64_t met = td_layer_conditions(c, idx);
  layer->is_moe = td_model_is_moe(c, idx);
  layer->has_window = td_model_window(c, idx) > 0;
  layer->kind = td_model_attn(c, idx);
  for (size_t i = 0; i < c->family->n_layer; i++) {
    const td_tensor_spec *p = &c->family->layer[i];
    void *field = (char *)layer + p->offset;
    if (p->conditions & ~met) continue;
    switch (p->kind) {
    case TD_SPEC_WEIGHT:
    case TD_SPEC_ROUTER:
    case TD_SPEC_SCORES:
    case TD_SPEC_LATENT:
    case TD_SPEC_PATCH:
    case TD_SPEC_PLAIN: *(td_weight *)field = matrix(c, p, format); break;
    case TD_SPEC_EXPERT:
      *(td_weight **)field = experts_of(experts + i * c->n_experts, c, p, format);
      break;
    case TD_SPEC_VEC:
    case TD_SPEC_NORM_BY_DIM:
    case TD_SPEC_NORM1: *(td_vec *)field = (td_vec){.data = &nowhere, .dtype = TD_BF16}; break;
    case TD_SPEC_NGRAMS: break;
    case TD_SPEC_EXPERT_BIAS:
    case TD_SPEC_F32:
    case TD_SPEC_TABLE:
    case TD_SPEC_CONV: *(const void **)field = &nowhere; break;
    }
  }
}

// Whether the model is published with a layer of multi-token prediction, which only its tensors
// say.
static bool has_mtp(const cJSON *root) {
  const cJSON *text = cJSON_GetObjectItemCaseSensitive(root, "text_config");
  const cJSON *n = cJSON_GetObjectItemCaseSensitive(text ? text : root, "num_nextn_predict_layers");
  return cJSON_IsNumber(n) && n->valueint > 0;
}

static td_status fill(td_model **out, td_model_config *c, const char *name, const formats *format,
                      bool with_mtp, td_err *err) {
  td_model_parts parts = {.name = name};
  td_mtp mtp = {.is_normed = false};
  const uint32_t n_layers = c->n_layers + with_mtp;
  td_layer *layers = calloc(n_layers, sizeof *layers);
  td_weight *experts = parts.owned = calloc(c->family->n_layer * c->n_experts + 1, sizeof *experts);
  td_status st = TD_ENOMEM;
  if (layers && experts) {
    if (with_mtp) td_layers_add(c->moe_layers, c->n_layers);
    for (uint32_t i = 0; i < n_layers; i++)
      fill_layer(&layers[i], i, c, format, experts);
    parts.layers = layers;
    if (with_mtp) {
      for (size_t i = 0; i < td_n_mtp_places; i++)
        if (td_mtp_places[i].kind == TD_SPEC_WEIGHT)
          *(td_weight *)(void *)((char *)&mtp +
                                 td_mtp_places[i].offset) = matrix(c, &td_mtp_places[i], format);
    }
    parts.mtp = with_mtp ? &mtp : NULL;
    const formats all_plain = {format->plain, format->plain, format->plain};
    parts.embed = matrix(c, &td_end_places[0], &all_plain);
    parts.lm_head = parts.embed;
    parts.final_norm = (td_vec){.data = &nowhere, .dtype = TD_BF16};
    st = td_model_assemble(out, c, &parts, err);
  } else {
    td_fail(err, TD_ENOMEM, "out of memory: the outline of %s", name);
  }
  if (st != TD_OK) free(experts);
  free(layers);
  return st;
}

// With experts in 4-bit floats.
static const td_format *format_of_others(const cJSON *root, const td_format *plain) {
  const cJSON *quant = cJSON_GetObjectItemCaseSensitive(root, "quantization_config");
  const cJSON *method = cJSON_GetObjectItemCaseSensitive(quant, "quant_method");
  const bool is_fp8 = cJSON_IsString(method) && strcmp(method->valuestring, "fp8") == 0;
  return is_fp8 ? td_format_named("fp8-b128") : plain;
}

td_status td_model_outline(td_model **out, const td_shape_file *shape, const td_format *format,
                           td_err *err) {
  static const td_format bf16 = {.dtype = TD_BF16};
  cJSON *root = NULL;
  td_model_config config;
  *out = NULL;
  td_status st = td_json_parse(&root, shape->json, shape->len, MAX_DEPTH, err);
  if (st == TD_OK) st = td_config_parse(&config, root, NULL, shape->name, err);
  const formats of = {format, format->dtype == TD_F4E2M1 ? format_of_others(root, &bf16) : format,
                      &bf16};
  if (st == TD_OK) st = fill(out, &config, shape->name, &of, has_mtp(root), err);
  cJSON_Delete(root);
  return st;
}
