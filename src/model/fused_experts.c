// src/model/fused_experts.c - binds experts that are stored as one tensor for a whole layer. Each
// expert's matrix is a part of the tensor; nothing is copied. In BF16, F16 or F32:
//   gate_up_proj [n_experts][2 * expert_dim][dim], an expert's gate rows before its up rows
//   down_proj    [n_experts][dim][expert_dim]
// In FP8 with F32 or BF16 scales, NAME_scale_inv: one for each expert's part of the tensor
// ([n_experts], [n_experts][1][1]), one for gate and one for up ([n_experts][2][1]), or one a block
// ([n_experts][row blocks][column blocks]).
// In FP4, two codes a byte along the columns, with a scale for 16 (FP8) or 32 (an exponent) of
// them:
//   NAME, NAME_weight_scale and NAME_weight_scale_2, a factor          (ModelOpt)
//   NAME_packed, NAME_scale and NAME_global_scale, a divisor           (compressed-tensors)
// The last one is for all experts, or for each, or for gate and up of each; with exponents: none.
// With biases (gpt-oss) gate and up rows alternate and are one matrix, and what is stored
// transposed was put in order while loading (model/convert.h). In gpt-oss' own MXFP4, where gate
// and up rows alternate and are one matrix:
//   gate_up_proj_blocks, down_proj_blocks [n_experts][rows][cols / 32][16], and _scales
//   [n_experts][rows][cols / 32]
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "gguf/files.h"
#include "model/bind_impl.h"
#include "model/convert.h"

// Where a matrix is in each expert's part of the tensor.
typedef struct {
  const char *name;           // of the tensor
  uint32_t n_rows, first_row; // of an expert in the tensor; the matrix's first of them
} fused_part;

static fused_part part_of(const td_tensor_binder *b, const td_tensor_spec *spec) {
  const uint32_t rows = td_dim_value(b->config, spec->rows);
  if (spec->rows == TD_DIM_EXPERT_PAIRS) return (fused_part){"gate_up_proj", rows, 0};
  if (spec->offset == offsetof(td_layer, down)) return (fused_part){"down_proj", rows, 0};
  const bool is_up = spec->offset == offsetof(td_layer, up);
  return (fused_part){"gate_up_proj", 2 * rows, is_up ? rows : 0};
}

// shape has n_dims entries.
static td_status check_shape(const td_tensor_binder *b, const td_tensor *t, const uint64_t *shape,
                             uint32_t n_dims) {
  if (t->n_dims == n_dims && memcmp(t->shape, shape, n_dims * sizeof *shape) == 0) return TD_OK;
  const bool is_turned = n_dims == 3 && t->n_dims == 3 && t->shape[0] == shape[0] &&
                         t->shape[1] == shape[2] && t->shape[2] == shape[1];
  if (is_turned) // loading turns it (model/convert.h), so this is tandem quantize
    return td_tensor_fail(b->err, TD_EUNSUPPORTED, t,
                          "holds transposed experts, which are served but not quantized: "
                          "give a checkpoint with a matrix for each expert");
  char want[96];
  size_t len = 0;
  for (uint32_t i = 0; i < n_dims; i++) {
    len += (size_t)snprintf(want + len, sizeof want - len, "%s%llu", i ? ", " : "",
                            (unsigned long long)shape[i]);
  }
  return td_tensor_fail(b->err, TD_EFORMAT, t,
                        "its shape is not the [%s] that config.json asks for", want);
}

enum { MX_GROUP = 32, MX_BYTES = MX_GROUP / 2 };

// Finds the blocks or the scales of an MXFP4 tensor, which have no alignment.
static td_status find_mxfp4(td_tensor_binder *b, const char *name, const char *suffix,
                            const uint64_t *shape, uint32_t n_dims, const uint8_t **data) {
  char whole[TD_MAX_TENSOR_NAME + 16];
  snprintf(whole, sizeof whole, "%s%s", name, suffix);
  const td_tensor *t;
  td_status st = td_binder_find(b, whole, &t);
  if (st != TD_OK) return st;
  if (strcmp(t->dtype, "U8") != 0) {
    return td_tensor_fail(b->err, TD_EUNSUPPORTED, t,
                          "dtype %s is not supported here; "
                          "supported: U8",
                          t->dtype);
  }
  *data = t->data;
  return check_shape(b, t, shape, n_dims);
}

static td_status bind_mxfp4(td_tensor_binder *b, const char *name, uint32_t rows, uint32_t cols,
                            td_weight *experts) {
  const uint32_t n = b->config->n_experts;
  if (cols % MX_GROUP) {
    return td_fail(b->err, TD_EUNSUPPORTED,
                   "%s: tensor %s_blocks: %u columns, not a multiple of %d",
                   td_store_listing(b->store), name, cols, MX_GROUP);
  }
  const uint64_t shape[] = {n, rows, cols / MX_GROUP, MX_BYTES};
  const uint8_t *codes = NULL, *scales = NULL;
  td_status st = find_mxfp4(b, name, "_blocks", shape, 4, &codes);
  if (st == TD_OK) st = find_mxfp4(b, name, "_scales", shape, 3, &scales);
  for (uint32_t e = 0; e < n && st == TD_OK; e++) {
    td_weight *w = &experts[e];
    *w = (td_weight){.dtype = TD_F4E2M1,
                     .scale_dtype = TD_F8E8M0,
                     .rows = rows,
                     .cols = cols,
                     .scale_rows = 1,
                     .scale_cols = MX_GROUP,
                     .global_scale = 1};
    w->data = codes + e * td_weight_data_bytes(w);
    w->scale = scales;
    w->scale = scales + e * td_weight_scale_bytes(w);
  }
  return st;
}

static uint64_t n_blocks(uint64_t n, uint32_t block) {
  return (n + block - 1) / block;
}

// The blocks of FP8 experts [n][part.n_rows][cols], as they follow from the number of scales; 0
// rows: they do not fit.
static void find_blocks(const td_tensor_binder *b, const fused_part *part, uint32_t cols,
                        uint64_t n_scales, td_weight *w) {
  const uint64_t n = b->config->n_experts;
  w->scale_rows = part->n_rows;
  w->scale_cols = cols;
  if (n_scales == n) return;
  if (n_scales == 2 * n && w->rows * 2 == part->n_rows) {
    w->scale_rows = w->rows;
    return;
  }
  const td_quant_scheme *s = b->quant ? td_quant_find(b->quant, part->name) : NULL;
  w->scale_rows = s && s->scale_rows ? s->scale_rows : 128;
  w->scale_cols = s && s->scale_cols ? s->scale_cols : 128;
  const uint64_t blocks = n_blocks(part->n_rows, w->scale_rows) * n_blocks(cols, w->scale_cols);
  if (n_scales != n * blocks || w->rows % w->scale_rows) w->scale_rows = 0;
}

static td_status bind_fp8(td_tensor_binder *b, const td_tensor *t, const fused_part *part,
                          td_weight *experts) {
  char name[TD_MAX_TENSOR_NAME + 16];
  snprintf(name, sizeof name, "%s_scale_inv", t->name);
  const td_tensor *scales = NULL;
  const void *values = NULL;
  td_status st = td_binder_find(b, name, &scales);
  if (st != TD_OK) return st;
  const uint64_t n_scales = td_tensor_elements(scales);
  td_weight w = experts[0];
  find_blocks(b, part, w.cols, n_scales, &w);
  if (!w.scale_rows) {
    return td_fail(b->err, TD_EFORMAT,
                   "%s: tensor %s: %llu scales do not fit %u experts of [%u, %u] in blocks of the "
                   "quantization_config in config.json",
                   scales->file, name, (unsigned long long)n_scales, b->config->n_experts,
                   part->n_rows, w.cols);
  }
  st = td_binder_place_f32(b, scales, &values);
  const uint64_t columns = n_blocks(w.cols, w.scale_cols);
  const uint64_t rows = n_blocks(part->n_rows, w.scale_rows);
  for (uint32_t e = 0; e < b->config->n_experts && st == TD_OK; e++) {
    td_weight *to = &experts[e];
    const uint64_t row = e * rows + part->first_row / w.scale_rows;
    to->scale_rows = w.scale_rows < w.rows ? w.scale_rows : w.rows;
    to->scale_cols = w.scale_cols;
    to->scale = (const float *)values + row * columns;
  }
  return st;
}

// The parts of FP4 experts by tool, after the tensor's name.
static const struct {
  const char *codes, *scales, *factor;
  bool is_divisor;
} fp4_tools[] = {{"", "_weight_scale", "_weight_scale_2", false},
                 {"_packed", "_scale", "_global_scale", true}};

// A part of a tensor, put in order if that was needed; NULL: there is none. It is marked as used.
static const td_tensor *take(td_tensor_binder *b, const char *name, const char *suffix) {
  char whole[TD_MAX_TENSOR_NAME + 64];
  const td_tensor *t = NULL, *ordered = NULL;
  snprintf(whole, sizeof whole, "%s%s", name, suffix);
  if (td_binder_peek(b, whole)) td_binder_find(b, whole, &t);
  snprintf(whole, sizeof whole, "%s%s" TD_TRANSPOSED, name, suffix);
  if (td_binder_peek(b, whole)) td_binder_find(b, whole, &ordered);
  return ordered ? ordered : t;
}

static td_status missing(const td_tensor_binder *b, const char *name, const char *suffix) {
  return td_fail(b->err, TD_EFORMAT, "%s: tensor %s%s is missing: the checkpoint is incomplete",
                 td_store_listing(b->store), name, suffix);
}

// Sets the factor of each expert.
static td_status bind_factors(td_tensor_binder *b, const td_tensor *t, bool is_divisor,
                              const fused_part *part, td_weight *experts) {
  const uint64_t n = td_tensor_elements(t), n_experts = b->config->n_experts;
  const bool in_halves = n == 2 * n_experts && experts[0].rows * 2 == part->n_rows;
  const void *values = NULL;
  td_status st = td_binder_place_f32(b, t, &values);
  if (st == TD_OK && n != 1 && n != n_experts && !in_halves) {
    st = td_tensor_fail(b->err, TD_EFORMAT, t, "%llu factors do not fit %llu experts",
                        (unsigned long long)n, (unsigned long long)n_experts);
  }
  for (uint64_t e = 0; e < n_experts && st == TD_OK; e++) {
    const uint64_t at = n == 1 ? 0 : in_halves ? 2 * e + (part->first_row > 0) : e;
    const float value = ((const float *)values)[at];
    experts[e].global_scale = is_divisor ? 1 / value : value;
    if (!(value > 0) || !isfinite(experts[e].global_scale))
      st = td_tensor_fail(b->err, TD_EFORMAT, t, "invalid scale %g", value);
  }
  return st;
}

// codes: [n_experts][part.n_rows][cols / 2].
static td_status bind_fp4(td_tensor_binder *b, const char *name, size_t tool,
                          const td_tensor *codes, const fused_part *part, td_weight *experts) {
  const uint32_t n = b->config->n_experts, cols = experts[0].cols;
  const td_tensor *scales = take(b, name, fp4_tools[tool].scales);
  if (!scales) return missing(b, name, fp4_tools[tool].scales);
  const uint64_t codes_shape[] = {n, part->n_rows, cols / 2};
  td_weight w = {.dtype = TD_F4E2M1, .rows = experts[0].rows, .cols = cols, .scale_rows = 1};
  td_status st = check_shape(b, codes, codes_shape, 3);
  if (st == TD_OK)
    st = td_binder_dtype(b, scales, 1u << TD_F8E4M3 | 1u << TD_F8E8M0, &w.scale_dtype);
  if (st != TD_OK) return st;
  w.scale_cols = w.scale_dtype == TD_F8E4M3 ? 16 : 32;
  const uint64_t scales_shape[] = {n, part->n_rows, cols / w.scale_cols};
  if (cols % w.scale_cols) {
    return td_tensor_fail(b->err, TD_EUNSUPPORTED, codes, "%u columns, not a multiple of %u", cols,
                          w.scale_cols);
  }
  st = check_shape(b, scales, scales_shape, 3);
  for (uint32_t e = 0; e < n && st == TD_OK; e++) {
    const size_t row = (size_t)e * part->n_rows + part->first_row;
    experts[e] = w;
    experts[e].global_scale = 1;
    experts[e].data = codes->data + row * (cols / 2);
    experts[e].scale = scales->data + row * (cols / w.scale_cols);
  }
  if (st != TD_OK || w.scale_dtype == TD_F8E8M0) return st;
  const td_tensor *factor = take(b, name, fp4_tools[tool].factor);
  if (!factor) return missing(b, name, fp4_tools[tool].factor);
  return bind_factors(b, factor, fp4_tools[tool].is_divisor, part, experts);
}

static td_status bind_values(td_tensor_binder *b, const td_tensor *t, const fused_part *part,
                             td_weight *experts) {
  const uint32_t cols = experts[0].cols;
  const unsigned plain = 1u << TD_F32 | 1u << TD_F16 | 1u << TD_BF16;
  const unsigned allowed = plain | (td_gguf_is(t->file) ? TD_BLOCK_BITS : 1u << TD_F8E4M3);
  td_dtype dtype;
  td_status st = td_binder_dtype(b, t, allowed, &dtype);
  const uint64_t shape[] = {b->config->n_experts, part->n_rows, cols};
  if (st == TD_OK) st = check_shape(b, t, shape, 3);
  const void *data = NULL;
  if (st == TD_OK)
    st = td_binder_place(b, t, plain >> dtype & 1 ? td_dtype_bytes(dtype) : 1, &data);
  for (uint32_t e = 0; e < b->config->n_experts && st == TD_OK; e++) {
    experts[e].dtype = dtype;
    const size_t row = (size_t)e * part->n_rows + part->first_row;
    experts[e].data = (const char *)data + row * td_weight_row_bytes(&experts[e]);
  }
  return st == TD_OK && dtype == TD_F8E4M3 ? bind_fp8(b, t, part, experts) : st;
}

td_status td_bind_fused_experts(td_tensor_binder *b, const td_tensor_spec *spec, const char *prefix,
                                td_weight *experts, bool *found) {
  const fused_part part = part_of(b, spec);
  const uint32_t rows = td_dim_value(b->config, spec->rows);
  const uint32_t cols = td_dim_value(b->config, spec->cols);
  const bool has_pairs = b->config->swiglu_limit > 0 && !b->config->swiglu_plain &&
                         !b->config->has_split_experts;
  char name[TD_MAX_TENSOR_NAME];
  const int len = snprintf(name, sizeof name, "%s%s", prefix, part.name);
  TD_CHECK(len < (int)sizeof name);
  for (uint32_t e = 0; e < b->config->n_experts; e++)
    experts[e] = (td_weight){.rows = rows, .cols = cols};
  *found = true;
  for (size_t i = 0; i < TD_COUNT(fp4_tools); i++) {
    const td_tensor *t = take(b, name, fp4_tools[i].codes);
    if (!t || t->n_dims != 3) continue;
    if (has_pairs && !td_store_is_converted(b->store, t) && strcmp(t->dtype, "U8") != 0) {
      return td_tensor_fail(b->err, TD_EUNSUPPORTED, t,
                            "experts of %s in %s are read beside biases that fit, and not by "
                            "tandem quantize",
                            b->config->arch_name, t->dtype);
    }
    return i || strcmp(t->dtype, "U8") == 0 ? bind_fp4(b, name, i, t, &part, experts)
                                            : bind_values(b, t, &part, experts);
  }
  if (has_pairs) return bind_mxfp4(b, name, rows, cols, experts);
  *found = false;
  return TD_OK;
}

td_status td_bind_fused(td_bound_tensors *binding, td_model_config *config, const td_quant *quant,
                        const td_store *store, const td_tensor_spec *spec, const char *prefix,
                        bool *used, td_weight *experts, td_err *err) {
  td_err local;
  bool found = false;
  td_tensor_binder b = {.out = binding, .config = config, .store = store, .used = used};
  b.quant = quant;
  b.err = err ? err : &local;
  const td_status st = td_bind_fused_experts(&b, spec, prefix, experts, &found);
  TD_CHECK(st != TD_OK || found);
  return st;
}
