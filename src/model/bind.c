#include "model/bind.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_NAME 256

// Tensors that published checkpoints carry and no forward pass here needs.
static const char *const ignored_suffixes[] = {".rotary_emb.inv_freq", ".k_scale", ".v_scale",
                                               ".input_scale"};

typedef struct {
  td_binding *out;
  td_model_config *config;
  const td_store *store;
  td_err *err;
  bool *used; // of each tensor of store
} binder;

static td_status fail_missing(const binder *b, const char *name) {
  // transformers holds experts fused in memory and could be made to write them so.
  const char *experts = strstr(name, ".experts.");
  if (experts) {
    char fused[MAX_NAME];
    snprintf(fused, sizeof fused, "%.*s.experts.gate_up_proj", (int)(experts - name), name);
    ptrdiff_t idx = td_store_find(b->store, fused);
    if (idx >= 0) {
      const td_tensor *t = td_store_tensor(b->store, (size_t)idx);
      return td_fail(b->err, TD_EUNSUPPORTED,
                     "%s: tensor %s: experts fused into one tensor are not supported; save them "
                     "one by one, as the model's publisher does",
                     t->file, t->name);
    }
  }
  return td_fail(b->err, TD_EFORMAT,
                 "%s: tensor %s is missing: the checkpoint is incomplete, or its config.json "
                 "describes another model",
                 td_store_listing(b->store), name);
}

static td_status find_tensor(binder *b, const char *name, const td_tensor **out) {
  ptrdiff_t idx = td_store_find(b->store, name);
  if (idx < 0) return fail_missing(b, name);
  b->used[idx] = true;
  *out = td_store_tensor(b->store, (size_t)idx);
  return TD_OK;
}

static td_status check_shape(const binder *b, const td_tensor *t, uint32_t rows, uint32_t cols,
                             bool is_vec) {
  if (is_vec && t->n_dims == 1 && t->shape[0] == rows) return TD_OK;
  if (!is_vec && t->n_dims == 2 && t->shape[0] == rows && t->shape[1] == cols) return TD_OK;
  char have[192], want[32];
  size_t len = 0;
  have[0] = '\0';
  for (uint32_t i = 0; i < t->n_dims; i++) {
    len += (size_t)snprintf(have + len, sizeof have - len, "%s%llu", i ? ", " : "",
                            (unsigned long long)t->shape[i]);
  }
  snprintf(want, sizeof want, is_vec ? "[%u]" : "[%u, %u]", rows, cols);
  return td_fail(b->err, TD_EFORMAT, "%s: tensor %s: has shape [%s], but config.json asks for %s",
                 t->file, t->name, have, want);
}

static td_status read_dtype(const binder *b, const td_tensor *t, bool allow_fp8, td_dtype *out) {
  if (strcmp(t->dtype, "BF16") == 0) {
    *out = TD_BF16;
  } else if (strcmp(t->dtype, "F32") == 0) {
    *out = TD_F32;
  } else if (allow_fp8 && strcmp(t->dtype, "F8_E4M3") == 0) {
    *out = TD_F8E4M3;
  } else {
    return td_fail(b->err, TD_EUNSUPPORTED,
                   "%s: tensor %s: dtype %s is not supported here; supported are BF16%s F32",
                   t->file, t->name, t->dtype, allow_fp8 ? ", F8_E4M3 and" : " and");
  }
  return TD_OK;
}

// n_bytes that live as long as the binding; NULL when out of memory.
static void *new_block(binder *b, size_t n_bytes) {
  td_binding *out = b->out;
  if (out->n_blocks == out->cap_blocks) {
    size_t cap = out->cap_blocks ? 2 * out->cap_blocks : 16;
    void **blocks = realloc(out->blocks, cap * sizeof *blocks);
    if (!blocks) return NULL;
    out->blocks = blocks;
    out->cap_blocks = cap;
  }
  void *block = malloc(n_bytes);
  if (block) out->blocks[out->n_blocks++] = block;
  return block;
}

static td_status no_memory(const binder *b, const td_tensor *t) {
  return td_fail(b->err, TD_ENOMEM, "%s: tensor %s: out of memory", t->file, t->name);
}

// The tensor's data where the file has them, or an aligned copy where that does not suit.
static td_status place_data(binder *b, const td_tensor *t, size_t align, const void **out) {
  *out = t->data;
  if ((uintptr_t)t->data % align == 0) return TD_OK;
  void *copy = new_block(b, t->n_bytes);
  if (!copy) return no_memory(b, t);
  memcpy(copy, t->data, t->n_bytes);
  *out = copy;
  return TD_OK;
}

// As place_data, but always F32.
static td_status place_f32(binder *b, const td_tensor *t, const float **out) {
  td_dtype dtype;
  td_status st = read_dtype(b, t, false, &dtype);
  if (st != TD_OK) return st;
  if (dtype == TD_F32) return place_data(b, t, sizeof(float), (const void **)out);
  size_t n = t->n_bytes / 2;
  float *values = new_block(b, n * sizeof *values);
  if (!values) return no_memory(b, t);
  for (size_t i = 0; i < n; i++) {
    uint32_t bits = (uint32_t)t->data[2 * i] << 16 | (uint32_t)t->data[2 * i + 1] << 24;
    memcpy(&values[i], &bits, sizeof bits);
  }
  *out = values;
  return TD_OK;
}

// The scales of an FP8 matrix: <name>_scale_inv, one for each block.
static td_status bind_scale(binder *b, const td_tensor *t, td_weight *w) {
  const td_model_config *c = b->config;
  if (!c->fp8_block_rows) {
    return td_fail(b->err, TD_EFORMAT,
                   "%s: tensor %s: is FP8, but config.json has no quantization_config that gives "
                   "its blocks",
                   t->file, t->name);
  }
  w->scale_rows = c->fp8_block_rows;
  w->scale_cols = c->fp8_block_cols;
  char name[MAX_NAME];
  snprintf(name, sizeof name, "%s_scale_inv", t->name);
  const td_tensor *scale;
  td_status st = find_tensor(b, name, &scale);
  if (st != TD_OK) return st;
  st = check_shape(b, scale, (w->rows + w->scale_rows - 1) / w->scale_rows,
                   (w->cols + w->scale_cols - 1) / w->scale_cols, false);
  return st == TD_OK ? place_f32(b, scale, &w->scale) : st;
}

static td_status bind_weight(binder *b, const td_tensor *t, bool allow_fp8, uint32_t rows,
                             uint32_t cols, td_weight *w) {
  *w = (td_weight){.rows = rows, .cols = cols};
  td_status st = read_dtype(b, t, allow_fp8, &w->dtype);
  if (st == TD_OK) st = check_shape(b, t, rows, cols, false);
  if (st == TD_OK) st = place_data(b, t, td_dtype_bytes(w->dtype), &w->data);
  if (st == TD_OK && w->dtype == TD_F8E4M3) st = bind_scale(b, t, w);
  return st;
}

static td_status bind_vec(binder *b, const td_tensor *t, uint32_t n, td_vec *v) {
  *v = (td_vec){.n = n};
  td_status st = read_dtype(b, t, false, &v->dtype);
  if (st == TD_OK) st = check_shape(b, t, n, 1, true);
  if (st == TD_OK) st = place_data(b, t, td_dtype_bytes(v->dtype), &v->data);
  return st;
}

// Binds one tensor to the field its place says.
static td_status bind_place(binder *b, const td_place *p, const char *name, void *field) {
  const td_tensor *t;
  td_status st = find_tensor(b, name, &t);
  if (st != TD_OK) return st;
  uint32_t rows = td_dim_value(b->config, p->rows), cols = td_dim_value(b->config, p->cols);
  switch (p->kind) {
  case TD_PLACE_VEC: return bind_vec(b, t, rows, field);
  case TD_PLACE_PLAIN: return bind_weight(b, t, false, rows, cols, field);
  case TD_PLACE_WEIGHT:
  case TD_PLACE_EXPERT: return bind_weight(b, t, true, rows, cols, field);
  case TD_PLACE_F32: break;
  }
  st = check_shape(b, t, rows, cols, true);
  return st == TD_OK ? place_f32(b, t, field) : st;
}

static td_status bind_experts(binder *b, const td_place *p, uint32_t layer_idx, void *field) {
  uint32_t n = b->config->n_experts;
  td_weight *experts = new_block(b, n * sizeof *experts);
  if (!experts) {
    return td_fail(b->err, TD_ENOMEM, "%s: out of memory", td_store_listing(b->store));
  }
  *(td_weight **)field = experts;
  for (uint32_t e = 0; e < n; e++) {
    char name[MAX_NAME];
    snprintf(name, sizeof name, "model.layers.%u.mlp.experts.%u.%s", layer_idx, e, p->name);
    td_status st = bind_place(b, p, name, &experts[e]);
    if (st != TD_OK) return st;
  }
  return TD_OK;
}

static td_status bind_layer(binder *b, uint32_t layer_idx) {
  td_layer *layer = &b->out->layers[layer_idx];
  layer->is_moe = td_model_is_moe(b->config, layer_idx);
  unsigned met = td_layer_conditions(b->config, layer_idx);
  for (size_t i = 0; i < td_n_layer_places; i++) {
    const td_place *p = &td_layer_places[i];
    if (p->conditions & ~met) continue;
    void *field = (char *)layer + p->offset;
    td_status st;
    if (p->kind == TD_PLACE_EXPERT) {
      st = bind_experts(b, p, layer_idx, field);
    } else {
      char name[MAX_NAME];
      snprintf(name, sizeof name, "model.layers.%u.%s", layer_idx, p->name);
      st = bind_place(b, p, name, field);
    }
    if (st != TD_OK) return st;
  }
  return TD_OK;
}

static td_status bind_ends(binder *b) {
  // As in transformers, embeddings said to be tied are not when the checkpoint has both matrices.
  if (td_store_find(b->store, "lm_head.weight") >= 0) b->config->tie_embeddings = false;
  unsigned met = td_end_conditions(b->config);
  for (size_t i = 0; i < td_n_end_places; i++) {
    const td_place *p = &td_end_places[i];
    if (p->conditions & ~met) continue;
    td_status st = bind_place(b, p, p->name, (char *)&b->out->ends + p->offset);
    if (st != TD_OK) return st;
  }
  return TD_OK;
}

static bool ends_with(const char *text, const char *suffix) {
  size_t n = strlen(text), m = strlen(suffix);
  return n >= m && strcmp(text + n - m, suffix) == 0;
}

// Whether name is of one of the multi-token prediction layers; then *layer_idx is which.
static bool is_mtp(const td_model_config *c, const char *name, uint32_t *layer_idx) {
  int len = 0;
  return sscanf(name, "model.layers.%9u.%n", layer_idx, &len) == 1 && len > 0 &&
         *layer_idx >= c->n_layers && *layer_idx - c->n_layers < c->n_mtp_layers;
}

// Refuses tensors that no place wanted and that are not known to be needless.
static td_status check_rest(binder *b) {
  uint32_t n_mtp = 0;
  for (size_t i = 0; i < td_store_n_tensors(b->store); i++) {
    if (b->used[i]) continue;
    const td_tensor *t = td_store_tensor(b->store, i);
    uint32_t layer_idx;
    bool known = false;
    if (is_mtp(b->config, t->name, &layer_idx)) {
      known = true;
      uint32_t n = layer_idx - b->config->n_layers + 1;
      if (n > n_mtp) n_mtp = n;
    }
    for (size_t k = 0; k < TD_COUNT(ignored_suffixes); k++)
      known |= ends_with(t->name, ignored_suffixes[k]);
    if (!known) {
      return td_fail(b->err, TD_EFORMAT,
                     "%s: tensor %s: is not part of a %s model as config.json describes it: shards "
                     "and config.json do not belong together, or it is a variant that is not "
                     "supported",
                     t->file, t->name, b->config->arch_name);
    }
  }
  b->config->n_mtp_layers = n_mtp;
  return TD_OK;
}

td_status td_bind(td_binding *out, td_model_config *config, const td_store *store, td_err *err) {
  *out = (td_binding){0};
  binder b = {.out = out, .config = config, .store = store, .err = err};
  b.used = calloc(td_store_n_tensors(store) + 1, sizeof *b.used);
  out->layers = calloc(config->n_layers, sizeof *out->layers);
  td_status st = TD_OK;
  if (!b.used || !out->layers) {
    st = td_fail(err, TD_ENOMEM, "%s: out of memory", td_store_listing(store));
  }
  if (st == TD_OK) st = bind_ends(&b);
  for (uint32_t i = 0; i < config->n_layers && st == TD_OK; i++)
    st = bind_layer(&b, i);
  if (st == TD_OK) st = check_rest(&b);
  free(b.used);
  return st;
}

void td_binding_free(td_binding *binding) {
  for (size_t i = 0; i < binding->n_blocks; i++)
    free(binding->blocks[i]);
  free(binding->blocks);
  free(binding->layers);
  *binding = (td_binding){0};
}
