// src/model/weight_formats.c - binds a matrix in each supported storage format: which tensors it
// consists of, their dtypes and shapes, and the resulting td_weight. Nothing is converted except
// per-block and per-row scales, which are few and become F32.
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "gguf/files.h"
#include "model/bind_impl.h"
#include "model/convert.h"
#include "model/convert_bnb.h"

#define BIT(dtype) (1u << (dtype))
#define PLAIN      (BIT(TD_F32) | BIT(TD_F16) | BIT(TD_BF16))
#define BLOCKS     ((unsigned)TD_BLOCK_BITS)

// Indexed by td_quant_format.
typedef struct {
  const char *data, *scale, *zero; // tensor names after the module's
  const char *stored;              // dtype of data in the file
  td_dtype dtype;
  unsigned scale_dtypes; // bit mask; 0: converted to F32
} storage;

static const storage storages[] = {
    [TD_QUANT_FP8] = {"weight", "weight_scale_inv", NULL, "F8_E4M3", TD_F8E4M3, 0},
    [TD_QUANT_FLOAT] = {"weight", "weight_scale", NULL, "F8_E4M3", TD_F8E4M3, 0},
    [TD_QUANT_INT] = {"weight", "weight_scale", NULL, "I8", TD_I8, 0},
    [TD_QUANT_PACKED] = {"weight_packed", "weight_scale", "weight_zero_point", "I32", TD_I4, PLAIN},
    [TD_QUANT_BNB8] = {"weight", "SCB", NULL, "I8", TD_I8, 0},
    // Formats without a kernel are converted at load time (model/convert.h); otherwise rejected.
    [TD_QUANT_PACKED8] = {"weight_packed", "weight_scale", "weight_zero_point", "I32", TD_I8, 0},
    [TD_QUANT_GPTQ8] = {"qweight", "scales", "qzeros", "I32", TD_I8, 0},
    [TD_QUANT_NVFP4] = {"weight_packed", "weight_scale", NULL, "U8", TD_F4E2M1, BIT(TD_F8E4M3)},
    [TD_QUANT_MODELOPT] = {"weight", "weight_scale", NULL, "U8", TD_F4E2M1, BIT(TD_F8E4M3)},
    [TD_QUANT_MXFP4_CT] = {"weight_packed", "weight_scale", NULL, "U8", TD_F4E2M1, BIT(TD_F8E8M0)},
    [TD_QUANT_MXFP4] = {"weight", "weight_scale", NULL, "U8", TD_F4E2M1, BIT(TD_F8E8M0)},
    [TD_QUANT_GPTQ] = {"qweight", "scales", "qzeros", "I32", TD_I4, PLAIN},
    [TD_QUANT_AWQ] = {"qweight", "scales", "qzeros", "I32", TD_I4, PLAIN},
};

typedef struct {
  td_tensor_binder *b;
  const char *module;
  const td_quant_scheme *scheme;
  const storage *storage;
  td_weight *w;
} binding;

static td_status name_of(const td_tensor_binder *b, char out[TD_MAX_TENSOR_NAME],
                         const char *module, const char *part) {
  int n = snprintf(out, TD_MAX_TENSOR_NAME, "%s.%s", module, part);
  if (n < TD_MAX_TENSOR_NAME) return TD_OK;
  return td_fail(b->err, TD_EUNSUPPORTED, "tensor %s: its name is too long", out);
}

static td_status find_part(const binding *g, const char *part, const td_tensor **out) {
  char name[TD_MAX_TENSOR_NAME];
  td_status st = name_of(g->b, name, g->module, part);
  return st == TD_OK ? td_binder_find(g->b, name, out) : st;
}

static const td_tensor *peek_part(const td_tensor_binder *b, const char *module, const char *part) {
  char name[TD_MAX_TENSOR_NAME];
  return name_of(b, name, module, part) == TD_OK ? td_binder_peek(b, name) : NULL;
}

// Whether words and scales are stored by columns. They are turned into rows where they lie
// (model/convert.h).
static bool is_by_columns(const binding *g) {
  return g->scheme->format == TD_QUANT_GPTQ || g->scheme->format == TD_QUANT_AWQ;
}

// Checks the stored shape of the codes.
static td_status check_data_shape(const binding *g, const td_tensor *t) {
  const td_weight *w = g->w;
  uint32_t rows = w->rows, cols = w->cols;
  if (is_by_columns(g)) {
    const bool is_awq = g->scheme->format == TD_QUANT_AWQ;
    return td_binder_check_shape(g->b, t, is_awq ? cols : cols / 8, is_awq ? rows / 8 : rows);
  }
  uint64_t stored_bytes = w->dtype == TD_I4 ? 4 : 1;
  return td_binder_check_shape(g->b, t, rows, td_weight_row_bytes(w) / stored_bytes);
}

static td_status check_fits(const binding *g, const td_tensor *t) {
  const td_weight *w = g->w;
  if (strcmp(t->dtype, g->storage->stored) != 0 &&
      !(w->dtype == TD_F4E2M1 && strcmp(t->dtype, "I8") == 0)) {
    return td_tensor_fail(g->b->err, TD_EFORMAT, t,
                          "has dtype %s, but quantization_config in config.json asks for "
                          "%s",
                          t->dtype, g->storage->stored);
  }
  uint32_t rows = is_by_columns(g) ? 8 : 1, cols = w->dtype == TD_F4E2M1 ? 2 : rows;
  if (w->rows % rows || w->cols % cols) {
    return td_tensor_fail(g->b->err, TD_EUNSUPPORTED, t,
                          "a [%u, %u] matrix does not fill whole words of codes", w->rows, w->cols);
  }
  return check_data_shape(g, t);
}

// Accepts [rows][groups] or [groups][rows]. A single column or element may also have fewer
// dimensions.
static td_status check_scale_shape(const binding *g, const td_tensor *t) {
  const td_weight *w = g->w;
  uint64_t rows = ((uint64_t)w->rows + w->scale_rows - 1) / w->scale_rows;
  uint64_t groups = td_weight_groups(w);
  if (is_by_columns(g)) return td_binder_check_shape(g->b, t, groups, rows);
  if (t->n_dims == 0 && rows == 1 && groups == 1) return TD_OK;
  return td_binder_check_shape(g->b, t, rows, t->n_dims == 1 && groups == 1 ? 0 : groups);
}

// A row's code of 127 has the row's largest magnitude.
static td_status bind_row_maxima(const binding *g, const td_tensor *t) {
  const void *maxima;
  td_status st = td_binder_place_f32(g->b, t, &maxima);
  float *scales = st == TD_OK ? td_binder_block(g->b, g->w->rows * sizeof *scales) : NULL;
  if (!scales)
    return st != TD_OK ? st : td_fail(g->b->err, TD_ENOMEM, "%s: out of memory", t->file);
  for (uint32_t r = 0; r < g->w->rows; r++)
    scales[r] = ((const float *)maxima)[r] / 127;
  g->w->scale = scales;
  return TD_OK;
}

static td_status bind_scale(const binding *g) {
  td_weight *w = g->w;
  const td_tensor *t;
  const char *name = g->storage->scale;
  const bool is_fp8 = g->scheme->format == TD_QUANT_FP8;
  // vLLM's spelling, of checkpoints with one scale a matrix (Hy3)
  if (is_fp8 && !peek_part(g->b, g->module, name)) {
    if (peek_part(g->b, g->module, "weight_scale")) name = "weight_scale";
  }
  // DeepSeek-V4's
  if (!peek_part(g->b, g->module, name) && peek_part(g->b, g->module, "scale")) name = "scale";
  td_status st = find_part(g, name, &t);
  if (st != TD_OK) return st;
  const bool is_one = is_fp8 && td_tensor_elements(t) == 1;
  w->scale_rows = g->scheme->scale_rows && !is_one ? g->scheme->scale_rows : w->rows;
  w->scale_cols = g->scheme->scale_cols && !is_one ? g->scheme->scale_cols : w->cols;
  st = check_scale_shape(g, t);
  if (st != TD_OK) return st;
  if (g->scheme->format == TD_QUANT_BNB8) return bind_row_maxima(g, t);
  if (!g->storage->scale_dtypes) return td_binder_place_f32(g->b, t, &w->scale);
  st = td_binder_dtype(g->b, t, g->storage->scale_dtypes, &w->scale_dtype);
  return st == TD_OK ? td_binder_place(g->b, t, td_dtype_bytes(w->scale_dtype), &w->scale) : st;
}

static td_status bind_zero(const binding *g) {
  td_weight *w = g->w;
  const td_tensor *t;
  td_status st = find_part(g, g->storage->zero, &t);
  td_dtype dtype;
  if (st == TD_OK) st = td_binder_dtype(g->b, t, BIT(TD_I32), &dtype);
  if (st != TD_OK) return st;
  uint64_t words = ((uint64_t)w->rows + 7) / 8, groups = td_weight_groups(w);
  bool rows_first = !is_by_columns(g);
  st = td_binder_check_shape(g->b, t, rows_first ? words : groups, rows_first ? groups : words);
  const void *zero;
  if (st == TD_OK) st = td_binder_place(g->b, t, sizeof(uint32_t), &zero);
  if (st == TD_OK) w->zero = zero;
  return st;
}

// Binds the factor of the whole matrix: weight_scale_2, or 1 / weight_global_scale.
static td_status bind_global_scale(const binding *g) {
  td_weight *w = g->w;
  w->global_scale = 1;
  bool divisor = g->scheme->format == TD_QUANT_NVFP4;
  if (!divisor && g->scheme->format != TD_QUANT_MODELOPT) return TD_OK;
  const td_tensor *t;
  td_status st = find_part(g, divisor ? "weight_global_scale" : "weight_scale_2", &t);
  td_dtype dtype;
  if (st == TD_OK) st = td_binder_dtype(g->b, t, BIT(TD_F32), &dtype);
  if (st == TD_OK && t->n_dims) st = td_binder_check_shape(g->b, t, 1, 0);
  if (st != TD_OK) return st;
  float value;
  memcpy(&value, t->data, sizeof value);
  w->global_scale = divisor ? 1 / value : value;
  if (isfinite(w->global_scale) && value > 0) return TD_OK;
  return td_tensor_fail(g->b->err, TD_EFORMAT, t, "invalid scale %g", value);
}

static uint64_t int_at(const td_tensor *t, size_t idx) {
  uint64_t value = 0;
  size_t bytes = strcmp(t->dtype, "I64") == 0 ? 8 : 4;
  memcpy(&value, t->data + idx * bytes, bytes);
  return value;
}

// Checks weight_shape, which pack-quantized stores next to its words.
static td_status check_stated_shape(const binding *g) {
  const td_tensor *t = peek_part(g->b, g->module, "weight_shape");
  if (!t) return TD_OK;
  td_status st = find_part(g, "weight_shape", &t);
  if (st == TD_OK) st = td_binder_check_shape(g->b, t, 2, 0);
  if (st != TD_OK) return st;
  bool whole = strcmp(t->dtype, "I64") == 0 || strcmp(t->dtype, "I32") == 0;
  if (whole && int_at(t, 0) == g->w->rows && int_at(t, 1) == g->w->cols) return TD_OK;
  return td_tensor_fail(g->b->err, TD_EFORMAT, t,
                        "does not say [%u, %u], which config.json asks for", g->w->rows,
                        g->w->cols);
}

// Checks that g_idx, the group of each column, is the plain order.
static td_status check_column_order(const binding *g) {
  const td_tensor *t = peek_part(g->b, g->module, "g_idx");
  if (!t) return TD_OK;
  td_status st = find_part(g, "g_idx", &t);
  td_dtype dtype;
  if (st == TD_OK) st = td_binder_dtype(g->b, t, BIT(TD_I32), &dtype);
  if (st == TD_OK) st = td_binder_check_shape(g->b, t, g->w->cols, 0);
  for (uint32_t k = 0; k < g->w->cols && st == TD_OK; k++) {
    if (int_at(t, k) == k / g->w->scale_cols) continue;
    st = td_tensor_fail(g->b->err, TD_EUNSUPPORTED, t,
                        "its columns are in the order of their activation (desc_act), "
                        "which is not supported");
  }
  return st;
}

static bool has_zeros(const binding *g) {
  if (!g->storage->zero) return false;
  if (!g->scheme->symmetric) return true;
  return g->scheme->format == TD_QUANT_AWQ && peek_part(g->b, g->module, g->storage->zero);
}

static td_status bind_stored(const binding *g, const td_tensor *t) {
  td_weight *w = g->w;
  w->dtype = g->storage->dtype;
  td_status st = check_fits(g, t);
  size_t align = w->dtype == TD_I4 ? sizeof(uint32_t) : 1;
  if (st == TD_OK) st = td_binder_place(g->b, t, align, &w->data);
  if (st == TD_OK) st = bind_scale(g);
  if (st == TD_OK && has_zeros(g)) st = bind_zero(g);
  if (st == TD_OK && w->dtype == TD_F4E2M1) st = bind_global_scale(g);
  if (st == TD_OK && g->scheme->format == TD_QUANT_PACKED) st = check_stated_shape(g);
  if (st == TD_OK && g->scheme->format == TD_QUANT_GPTQ) st = check_column_order(g);
  return st;
}

// Marks the source tensors of a matrix as used.
static void use_sources(const binding *g) {
  const char *const parts[] = {g->storage->data, g->storage->scale, g->storage->zero,
                               "g_idx",          "weight_g_idx",    "weight_shape"};
  for (size_t i = 0; i < TD_COUNT(parts); i++) {
    const td_tensor *t = parts[i] ? peek_part(g->b, g->module, parts[i]) : NULL;
    if (t) td_binder_find(g->b, t->name, &t);
  }
}

static td_status bind_plain(td_tensor_binder *b, const char *name, td_weight *w);

// t was converted from a format without a kernel: now plain, or I8 with one scale per block.
static td_status bind_converted(binding *g, const td_tensor *t) {
  use_sources(g);
  if (strcmp(t->dtype, "I8") != 0) return bind_plain(g->b, t->name, g->w);
  td_quant_scheme scheme = *g->scheme;
  scheme.format = TD_QUANT_INT;
  binding as_int = *g;
  as_int.scheme = &scheme;
  as_int.storage = &storages[TD_QUANT_INT];
  td_status st = find_part(&as_int, "weight", &t);
  if (st != TD_OK) return st;
  g->w->dtype = TD_I8;
  st = check_fits(&as_int, t);
  if (st == TD_OK) st = td_binder_place(g->b, t, 1, &g->w->data);
  return st == TD_OK ? bind_scale(&as_int) : st;
}

// Whether the matrix is one tensor: plain values, or GGUF's blocks.
static bool is_plain(const td_tensor *t) {
  td_dtype dtype;
  return td_dtype_find(t->dtype, &dtype) && (PLAIN | BLOCKS) >> dtype & 1;
}

static td_status bind_plain(td_tensor_binder *b, const char *name, td_weight *w) {
  const td_tensor *t;
  td_status st = td_binder_find(b, name, &t);
  if (st == TD_OK)
    st = td_binder_dtype(b, t, td_gguf_is(t->file) ? PLAIN | BLOCKS : PLAIN, &w->dtype);
  if (st == TD_OK) st = td_binder_check_shape(b, t, w->rows, w->cols);
  const bool is_block = td_dtype_block(w->dtype).cols > 0;
  return st == TD_OK ? td_binder_place(b, t, is_block ? 1 : td_dtype_bytes(w->dtype), &w->data)
                     : st;
}

// Binds kv_b_proj, joined of GGUF's two parts.
static td_status bind_joined(td_tensor_binder *b, const char *name, td_weight *w) {
  static const char *const parts[] = {TD_K_B, TD_V_B};
  const int n = (int)(strlen(name) - strlen("kv_b_proj.weight"));
  for (size_t i = 0; i < TD_COUNT(parts); i++) {
    char part[TD_MAX_TENSOR_NAME];
    const td_tensor *t;
    snprintf(part, sizeof part, "%.*s%s", n > 0 ? n : 0, name, parts[i]);
    if (td_binder_peek(b, part)) td_binder_find(b, part, &t);
  }
  return bind_plain(b, name, w);
}

// Rejects t, which is quantized although no scheme covers it.
static td_status refuse_unexplained(const td_tensor_binder *b, const td_tensor *t) {
  if (strcmp(t->dtype, "F8_E4M3") == 0 || strcmp(t->dtype, "I32") == 0) {
    return td_tensor_fail(b->err, TD_EFORMAT, t,
                          "is %s, but config.json has no quantization_config that says how "
                          "it is quantized",
                          t->dtype);
  }
  td_dtype dtype;
  return td_binder_dtype(b, t, td_gguf_is(t->file) ? PLAIN | BLOCKS : PLAIN, &dtype);
}

static void use(void *ctx, const char *name) {
  const td_tensor *t;
  td_binder_find(ctx, name, &t);
}

td_status td_bind_weight(td_tensor_binder *b, const char *module, bool plain, uint32_t rows,
                         uint32_t cols, td_weight *w) {
  *w = (td_weight){.rows = rows, .cols = cols};
  char name[TD_MAX_TENSOR_NAME];
  td_status st = name_of(b, name, module, "weight");
  if (st != TD_OK) return st;
  const td_tensor *t = peek_part(b, module, "weight" TD_DEQUANTIZED);
  if (t) {
    td_bnb_each(b->store, name, use, b);
    return bind_plain(b, t->name, w);
  }
  t = td_binder_peek(b, name);
  bool converted = t && td_store_is_converted(b->store, t);
  if (!converted && (plain || (t && is_plain(t)))) return bind_plain(b, name, w);
  const td_quant_scheme *scheme = td_quant_find(b->quant, module);
  if (!scheme && converted) return bind_joined(b, name, w);
  if (!scheme) {
    if (!t) t = peek_part(b, module, "weight_packed");
    if (!t) t = peek_part(b, module, "qweight");
    return t ? refuse_unexplained(b, t) : td_binder_find(b, name, &t);
  }
  binding g = {
      .b = b,
      .module = module,
      .scheme = scheme,
      .storage = &storages[scheme->format],
      .w = w,
  };
  if (converted) return bind_converted(&g, t);
  st = find_part(&g, g.storage->data, &t);
  return st == TD_OK ? bind_stored(&g, t) : st;
}
