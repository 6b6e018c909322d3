// src/model/convert_bnb.c - dequantizes matrices that bitsandbytes stored in 4 bits.
#include "model/convert_bnb.h"

#include <stdio.h>
#include <string.h>

#include "base/json_parse.h"
#include "model/convert_matrix.h"

enum { MAX_NAME = 512 };

static const char *const endings[] = {
    "", TD_BNB_FACTORS, ".quant_map", ".nested_absmax", ".nested_quant_map",
};
static const char *const states[] = {
    ".quant_state.bitsandbytes__nf4",
    ".quant_state.bitsandbytes__fp4",
};

static const td_tensor *find(const td_store *store, const char *weight, const char *ending) {
  char name[MAX_NAME];
  if (snprintf(name, sizeof name, "%s%s", weight, ending) >= (int)sizeof name) return NULL;
  const ptrdiff_t idx = td_store_find(store, name);
  return idx < 0 ? NULL : td_store_tensor(store, (size_t)idx);
}

void td_bnb_each(const td_store *store, const char *weight,
                 void (*use)(void *ctx, const char *name), void *ctx) {
  const td_tensor *t;
  for (size_t i = 0; i < TD_COUNT(endings); i++)
    if ((t = find(store, weight, endings[i]))) use(ctx, t->name);
  for (size_t i = 0; i < TD_COUNT(states); i++)
    if ((t = find(store, weight, states[i]))) use(ctx, t->name);
}

static uint64_t ceil_div(uint64_t n, uint64_t by) {
  return (n + by - 1) / by;
}

// The state is a JSON text in bytes.
static td_status read_state(td_bnb_matrix *m, const td_tensor *t, td_err *err) {
  cJSON *root;
  td_status st = td_json_parse(&root, (const char *)t->data, t->n_bytes, 4, err);
  if (st != TD_OK) return st;
  int64_t block = 0, block2 = 0;
  double mean = 0;
  const char *dtype = "";
  st = td_json_get_int(root, "blocksize", 1, UINT32_MAX, &block, err);
  if (st == TD_OK) st = td_json_get_int(root, "nested_blocksize", 1, UINT32_MAX, &block2, err);
  if (st == TD_OK) st = td_json_get_double(root, "nested_offset", &mean, err);
  if (st == TD_OK) st = td_json_get_str(root, "dtype", &dtype, err);
  const cJSON *shape = td_json_get(root, "shape");
  const bool is_matrix = cJSON_IsArray(shape) && cJSON_GetArraySize(shape) == 2;
  int64_t rows = 0, cols = 0;
  const bool is_sized = is_matrix && td_json_whole(shape->child, 1, UINT32_MAX, &rows) &&
                        td_json_whole(shape->child->next, 1, UINT32_MAX, &cols);
  const bool is_f16 = strcmp(dtype, "float16") == 0, is_bf16 = strcmp(dtype, "bfloat16") == 0;
  if (st == TD_OK && !(is_sized && block && (is_f16 || is_bf16 || strcmp(dtype, "float32") == 0)))
    st = td_fail(err, TD_EFORMAT, "shape, blocksize or dtype is missing or wrong");
  if (st == TD_OK) {
    m->rows = (uint32_t)rows;
    m->cols = (uint32_t)cols;
    m->block = (uint32_t)block;
    m->block2 = (uint32_t)block2;
    m->mean = (float)mean;
    m->dtype = is_f16 ? TD_F16 : is_bf16 ? TD_BF16 : TD_F32;
  }
  cJSON_Delete(root);
  return st;
}

// bytes: of all elements. dtype NULL: any.
static td_status check(const td_tensor *t, const char *dtype, uint64_t bytes, td_err *err) {
  if (t->n_bytes == bytes && (!dtype || strcmp(t->dtype, dtype) == 0)) return TD_OK;
  return td_tensor_fail(err, TD_EFORMAT, t,
                        "its dtype %s or its size does not fit the state of the matrix", t->dtype);
}

td_status td_bnb_open(td_bnb_matrix *out, const td_store *store, const char *weight, td_err *err) {
  *out = (td_bnb_matrix){0};
  const td_tensor *state = find(store, weight, states[0]);
  if (!state) state = find(store, weight, states[1]);
  for (size_t i = 0; i < TD_BNB_N_PARTS; i++)
    out->parts[i] = find(store, weight, endings[i]);
  const td_tensor *const *parts = out->parts;
  if (!parts[TD_BNB_CODES] || !parts[TD_BNB_ABSMAX] || !parts[TD_BNB_TABLE] || !state) {
    return td_fail(err, TD_EFORMAT,
                   "%s: tensor %s.%s is missing: the checkpoint is incomplete, or it was saved "
                   "before it was quantized",
                   td_store_listing(store), weight,
                   !state ? "quant_state.bitsandbytes__nf4" : "absmax or .quant_map");
  }
  td_status st = read_state(out, state, err);
  if (st != TD_OK) {
    td_err_prefix(err, "%s: tensor %s", state->file, state->name);
    return err->code = TD_EFORMAT;
  }
  const uint64_t n = (uint64_t)out->rows * out->cols, blocks = ceil_div(n, out->block);
  const bool is_nested = parts[TD_BNB_ABSMAX2] && parts[TD_BNB_TABLE2] && out->block2;
  st = check(parts[TD_BNB_CODES], NULL, ceil_div(n, 2), err);
  if (st == TD_OK) st = check(parts[TD_BNB_TABLE], "F32", 16 * sizeof(float), err);
  if (!is_nested) {
    out->parts[TD_BNB_ABSMAX2] = out->parts[TD_BNB_TABLE2] = NULL;
    return st == TD_OK ? check(parts[TD_BNB_ABSMAX], "F32", blocks * sizeof(float), err) : st;
  }
  const uint64_t blocks2 = ceil_div(blocks, out->block2);
  if (st == TD_OK) st = check(parts[TD_BNB_ABSMAX], "U8", blocks, err);
  if (st == TD_OK) st = check(parts[TD_BNB_ABSMAX2], "F32", blocks2 * sizeof(float), err);
  return st == TD_OK ? check(parts[TD_BNB_TABLE2], "F32", 256 * sizeof(float), err) : st;
}

static float f32_at(const void *data, uint64_t idx) {
  float value;
  memcpy(&value, (const char *)data + idx * sizeof value, sizeof value);
  return value;
}

static float factor_of(const td_bnb_matrix *m, const void *const *data, uint64_t block) {
  if (!m->parts[TD_BNB_ABSMAX2]) return f32_at(data[TD_BNB_ABSMAX], block);
  const uint8_t code = ((const uint8_t *)data[TD_BNB_ABSMAX])[block];
  const float scaled = f32_at(data[TD_BNB_TABLE2], code) *
                       f32_at(data[TD_BNB_ABSMAX2], block / m->block2);
  return scaled + m->mean;
}

void td_bnb_values(const td_bnb_matrix *m, const void *const data[TD_BNB_N_PARTS], void *out) {
  const uint8_t *codes = data[TD_BNB_CODES];
  const uint64_t n = (uint64_t)m->rows * m->cols;
  for (uint64_t begin = 0; begin < n; begin += m->block) {
    const float factor = factor_of(m, data, begin / m->block);
    for (uint64_t i = begin; i < n && i < begin + m->block; i++) {
      const unsigned code = i % 2 ? codes[i / 2] & 15u : codes[i / 2] >> 4;
      const float value = f32_at(data[TD_BNB_TABLE], code) * factor;
      td_put_value(m->dtype, out, i, value);
    }
  }
}
