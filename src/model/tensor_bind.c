// src/model/tensor_bind.c - binds a checkpoint's tensors to the fields of the model.
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/bf16.h"
#include "base/f16.h"
#include "base/grow.h"
#include "base/log.h"
#include "base/str.h"
#include "gguf/files.h"
#include "model/bind_impl.h"
#include "model/families/family.h"

// Tensors of published checkpoints that the forward pass does not need.
static const char *const ignored_suffixes[] = {
    ".rotary_emb.inv_freq", ".k_scale", ".v_scale", ".k_cache.scale", ".v_cache.scale",
    ".input_scale", ".activation_scale", "_activation_scale", ".input_global_scale", "_input_scale",
    "_input_global_scale", ".weight_format",
    "rope_freqs.weight", // of GGUF: config.json has it
    // td_ngram_hash
    ".ple_embedding.layer_multipliers", ".ple_embedding.ngram_heads_vocab_sizes",
    ".ple_embedding.ngram_heads_offsets"};

static td_status fail_missing(const td_tensor_binder *b, const char *name) {
  return td_fail(b->err, TD_EFORMAT,
                 "%s: tensor %s is missing: the checkpoint is incomplete, or config.json describes "
                 "another model",
                 td_store_listing(b->store), name);
}

const td_tensor *td_binder_peek(const td_tensor_binder *b, const char *name) {
  ptrdiff_t idx = td_store_find(b->store, name);
  return idx < 0 ? NULL : td_store_tensor(b->store, (size_t)idx);
}

td_status td_binder_find(td_tensor_binder *b, const char *name, const td_tensor **out) {
  ptrdiff_t idx = td_store_find(b->store, name);
  if (idx < 0) return fail_missing(b, name);
  b->used[idx] = true;
  *out = td_store_tensor(b->store, (size_t)idx);
  return TD_OK;
}

td_status td_binder_check_shape(const td_tensor_binder *b, const td_tensor *t, uint64_t rows,
                                uint64_t cols) {
  uint64_t want[2] = {rows, cols};
  uint32_t n_dims = cols ? 2 : 1;
  if (t->n_dims == n_dims && memcmp(t->shape, want, n_dims * sizeof *want) == 0) return TD_OK;
  char have[192];
  size_t len = 0;
  have[0] = '\0';
  for (uint32_t i = 0; i < t->n_dims; i++) {
    len += (size_t)snprintf(have + len, sizeof have - len, "%s%llu", i ? ", " : "",
                            (unsigned long long)t->shape[i]);
  }
  char asked[64];
  snprintf(asked, sizeof asked, cols ? "[%llu, %llu]" : "[%llu]", (unsigned long long)rows,
           (unsigned long long)cols);
  return td_tensor_fail(b->err, TD_EFORMAT, t, "has shape [%s], but config.json asks for %s", have,
                        asked);
}

td_status td_binder_dtype(const td_tensor_binder *b, const td_tensor *t, unsigned allowed,
                          td_dtype *out) {
  const bool is_known = td_dtype_find(t->dtype, out);
  if (is_known && allowed >> *out & 1) return TD_OK;
  if (allowed >> TD_F8E8M0 & 1 && strcmp(t->dtype, "U8") == 0) { // exponents as plain bytes
    *out = TD_F8E8M0;
    return TD_OK;
  }
  char names[192] = "";
  size_t len = 0;
  for (int i = 0; i < TD_N_DTYPES && len < sizeof names; i++) {
    if (!(allowed >> i & 1)) continue;
    len += (size_t)snprintf(names + len, sizeof names - len, "%s%s", len ? ", " : "",
                            i == TD_F8E8M0 ? "F8_E8M0, U8" : td_dtype_name((td_dtype)i));
  }
  return td_tensor_fail(b->err, TD_EUNSUPPORTED, t, "dtype %s is not supported here; supported: %s",
                        t->dtype, names);
}

void *td_binder_block(td_tensor_binder *b, size_t n_bytes) {
  td_bound_tensors *out = b->out;
  if (!TD_GROW(out->blocks, out->n_blocks, out->cap_blocks, 16)) return NULL;
  void *block = malloc(n_bytes);
  if (block) out->blocks[out->n_blocks++] = block;
  return block;
}

static td_status no_memory(const td_tensor_binder *b, const td_tensor *t) {
  return td_tensor_fail(b->err, TD_ENOMEM, t, "out of memory");
}

td_status td_binder_place(td_tensor_binder *b, const td_tensor *t, size_t align, const void **out) {
  *out = t->data;
  if ((uintptr_t)t->data % align == 0) return TD_OK;
  void *copy = td_binder_block(b, t->n_bytes);
  if (!copy) return no_memory(b, t);
  memcpy(copy, t->data, t->n_bytes);
  *out = copy;
  return TD_OK;
}

static float f32_of(const td_tensor *t, td_dtype dtype, size_t idx) {
  if (dtype == TD_F8E8M0) return t->data[idx] == 255 ? NAN : ldexpf(1, t->data[idx] - 127);
  uint16_t half;
  memcpy(&half, t->data + 2 * idx, sizeof half);
  return dtype == TD_F16 ? td_f16_value(half) : td_bf16_value(half);
}

td_status td_binder_place_f32(td_tensor_binder *b, const td_tensor *t, const void **out) {
  td_dtype dtype;
  td_status st = td_binder_dtype(
      b, t, 1u << TD_F32 | 1u << TD_F16 | 1u << TD_BF16 | 1u << TD_F8E8M0, &dtype);
  if (st != TD_OK) return st;
  if (dtype == TD_F32) return td_binder_place(b, t, sizeof(float), out);
  size_t n = t->n_bytes / td_dtype_bytes(dtype);
  float *values = td_binder_block(b, n * sizeof *values);
  if (!values) return no_memory(b, t);
  for (size_t i = 0; i < n; i++)
    values[i] = f32_of(t, dtype, i);
  *out = values;
  return TD_OK;
}

static td_status bind_vec(td_tensor_binder *b, const td_tensor *t, uint32_t n, td_vec *v) {
  *v = (td_vec){.n = n};
  td_status st = td_binder_dtype(b, t, 1u << TD_F32 | 1u << TD_F16 | 1u << TD_BF16, &v->dtype);
  if (st == TD_OK) st = td_binder_check_shape(b, t, n, 0);
  if (st != TD_OK) return st;
  if (v->dtype == TD_BF16) return td_binder_place(b, t, sizeof(uint16_t), &v->data);
  v->dtype = TD_F32;
  return td_binder_place_f32(b, t, &v->data);
}

// A norm whose weights are stored without the 1 that is added to each, or without the factor.
static td_status bind_changed_norm(td_tensor_binder *b, const td_tensor *t, uint32_t n, float more,
                                   float factor, td_vec *v) {
  const void *stored = NULL;
  td_status st = td_binder_check_shape(b, t, n, 0);
  if (st == TD_OK) st = td_binder_place_f32(b, t, &stored);
  if (st != TD_OK) return st;
  float *values = td_binder_block(b, n * sizeof *values);
  if (!values) return no_memory(b, t);
  for (uint32_t i = 0; i < n; i++)
    values[i] = (more + ((const float *)stored)[i]) * factor;
  *v = (td_vec){.data = values, .dtype = TD_F32, .n = n};
  return TD_OK;
}

// A convolution's filter [channels][1][taps], transposed to rows of `stride` elements at `to`.
static td_status copy_conv(td_tensor_binder *b, const td_tensor *t, uint32_t channels,
                           uint32_t taps, uint32_t stride, float *to) {
  const uint64_t shape[] = {channels, 1, taps};
  const bool is_flat = td_gguf_is(t->file) && t->n_dims == 2 && t->shape[0] == channels &&
                       t->shape[1] == taps;
  if (!is_flat && (t->n_dims != 3 || memcmp(t->shape, shape, sizeof shape) != 0)) {
    return td_tensor_fail(b->err, TD_EFORMAT, t,
                          "its shape is not the [%u, 1, %u] that config.json asks for", channels,
                          taps);
  }
  const void *stored = NULL;
  td_status st = td_binder_place_f32(b, t, &stored);
  for (size_t i = 0; st == TD_OK && i < (size_t)channels * taps; i++)
    to[i % taps * stride + i / taps] = ((const float *)stored)[i];
  return st;
}

// The filter t or, if it is that of queries alone, with those of keys and values side by side.
static td_status bind_conv(td_tensor_binder *b, const td_tensor *t, uint32_t channels,
                           uint32_t taps, const float **out) {
  static const char queries[] = "q_conv1d", letters[] = "qkv";
  char name[TD_MAX_TENSOR_NAME];
  float *values = td_binder_block(b, (size_t)channels * taps * sizeof *values);
  if (!values) return no_memory(b, t);
  *out = values;
  const uint32_t n_filters = strstr(t->name, queries) ? 3 : 1;
  const uint32_t n = channels / n_filters;
  td_status st = copy_conv(b, t, n, taps, channels, values);
  for (uint32_t i = 1; i < n_filters && st == TD_OK; i++) {
    snprintf(name, sizeof name, "%s", t->name);
    *strstr(name, queries) = letters[i];
    const td_tensor *other = NULL;
    st = td_binder_find(b, name, &other);
    if (st == TD_OK) st = copy_conv(b, other, n, taps, channels, values + (size_t)i * n);
  }
  return st;
}

// Experts of each token id, I32 or I64.
static td_status bind_table(td_tensor_binder *b, const td_tensor *t, const int32_t **out) {
  td_status st = td_binder_check_shape(b, t, b->config->n_vocab, b->config->top_k);
  if (st != TD_OK) return st;
  const size_t n = (size_t)b->config->n_vocab * b->config->top_k;
  const bool is_long = strcmp(t->dtype, "I64") == 0;
  if (!is_long && strcmp(t->dtype, "I32") != 0)
    return td_tensor_fail(b->err, TD_EUNSUPPORTED, t, "dtype %s; supported: I32, I64", t->dtype);
  int32_t *ids = td_binder_block(b, n * sizeof *ids);
  if (!ids) return no_memory(b, t);
  for (size_t i = 0; i < n; i++) {
    int64_t id = 0;
    int32_t word = 0;
    memcpy(is_long ? (void *)&id : (void *)&word, t->data + i * (is_long ? 8 : 4), is_long ? 8 : 4);
    if (!is_long) id = word;
    if (id < 0 || id >= b->config->n_experts) {
      return td_tensor_fail(b->err, TD_EFORMAT, t, "%lld is not one of %u experts", (long long)id,
                            b->config->n_experts);
    }
    ids[i] = (int32_t)id;
  }
  *out = ids;
  return TD_OK;
}

static bool is_matrix(td_place_kind kind) {
  return kind == TD_SPEC_WEIGHT || kind == TD_SPEC_ROUTER || kind == TD_SPEC_LATENT ||
         kind == TD_SPEC_PLAIN || kind == TD_SPEC_EXPERT;
}

// Whether t holds n values along one dimension, beside others of 1 (A_log of Kimi-Linear).
static bool is_row(const td_tensor *t, uint64_t n) {
  uint32_t n_long = 0;
  for (uint32_t i = 0; i < t->n_dims; i++) {
    if (t->shape[i] != 1 && t->shape[i] != n) return false;
    n_long += t->shape[i] == n;
  }
  return n_long == 1 || (n == 1 && t->n_dims);
}

// A convolution over patches that do not overlap, as a matrix.
static td_status bind_patch(td_tensor_binder *b, const td_tensor *t, uint32_t rows, uint32_t cols,
                            td_weight *w) {
  *w = (td_weight){.rows = rows, .cols = cols};
  uint64_t n = 1;
  for (uint32_t i = 1; i < t->n_dims; i++)
    n *= t->shape[i];
  td_status st = t->n_dims && t->shape[0] == rows && n == cols
                     ? td_binder_dtype(b, t, 1u << TD_F32 | 1u << TD_BF16, &w->dtype)
                     : td_binder_check_shape(b, t, rows, cols);
  return st == TD_OK ? td_binder_place(b, t, td_dtype_bytes(w->dtype), &w->data) : st;
}

// Binds the tensors of one spec to its field.
static td_status bind_place(td_tensor_binder *b, const td_tensor_spec *p, const char *name,
                            void *field) {
  uint32_t rows = td_dim_value(b->config, p->rows), cols = td_dim_value(b->config, p->cols);
  if (is_matrix(p->kind)) {
    char module[TD_MAX_TENSOR_NAME];
    bool found = false;
    const td_status joined = td_bind_gguf_gates(b, p, name, field, &found);
    if (found) return joined;
    snprintf(module, sizeof module, "%.*s", (int)(strlen(name) - strlen(".weight")), name);
    return td_bind_weight(b, module, p->kind == TD_SPEC_PLAIN, rows, cols, field);
  }
  const td_tensor *t = NULL;
  td_status st = td_binder_find(b, name, &t);
  if (st != TD_OK) return st;
  if (p->kind == TD_SPEC_VEC) return bind_vec(b, t, rows, field);
  if (p->kind == TD_SPEC_NORM1) { // GGUF stores it with the 1
    return td_gguf_is(t->file) ? bind_vec(b, t, rows, field)
                               : bind_changed_norm(b, t, rows, 1, 1, field);
  }
  if (p->kind == TD_SPEC_NORM_BY_DIM)
    return bind_changed_norm(b, t, rows, 0, 1 / sqrtf((float)rows), field);
  if (p->kind == TD_SPEC_CONV) return bind_conv(b, t, rows, cols, field);
  if (p->kind == TD_SPEC_PATCH) return bind_patch(b, t, rows, cols, field);
  if (p->kind == TD_SPEC_SCORES) {
    td_weight *w = field;
    *w = (td_weight){.dtype = TD_F32, .rows = rows, .cols = cols};
    st = td_binder_check_shape(b, t, rows, cols);
    return st == TD_OK ? td_binder_place_f32(b, t, &w->data) : st;
  }
  if (p->kind == TD_SPEC_TABLE) return bind_table(b, t, field);
  if (p->cols != TD_DIM_ONE || !is_row(t, rows))
    st = td_binder_check_shape(b, t, rows, p->cols == TD_DIM_ONE ? 0 : cols);
  if (st == TD_OK && p->offset == offsetof(td_layer, delta_decay) && td_gguf_is(t->file))
    return td_bind_gguf_decay(b, t, field);
  return st == TD_OK ? td_binder_place_f32(b, t, field) : st;
}

enum { MAX_IN_LAYER = 200 }; // bytes of a tensor's name behind that of its layer

// The whole name of a layer's tensor. Of a prediction layer under a name of its own names have no
// body; nor, where other layers' have none, the word for a layer.
static void name_in_layer(const td_model_config *c, uint32_t layer_idx, const char *name,
                          char out[TD_MAX_TENSOR_NAME]) {
  char own[TD_MAX_TENSOR_NAME];
  if (layer_idx == c->n_layers && c->family->mtp) {
    snprintf(out, TD_MAX_TENSOR_NAME, "%s%s0.%s", c->family->mtp,
             c->family->is_bare ? "" : "layers.", name);
    return;
  }
  static const char attn[] = "self_attn.", output[] = "o_proj.";
  const char *first = "";
  if (c->has_bailing_names && strncmp(name, attn, sizeof attn - 1) == 0) {
    name += sizeof attn - 1;
    const bool is_output = strncmp(name, output, sizeof output - 1) == 0;
    first = is_output ? "attention.dense." : "attention.";
    if (is_output) name += sizeof output - 1;
  }
  snprintf(own, sizeof own, "model.layers.%u.%s%s", layer_idx, first, name);
  td_tensor_name(c, own, out);
}

// Whether the checkpoint has this tensor of layer layer_idx, a matrix in any format.
static bool is_stored(const td_tensor_binder *b, uint32_t layer_idx, const char *name) {
  static const char *const parts[] = {"weight", "weight_packed", "qweight"};
  char own[MAX_IN_LAYER], whole[TD_MAX_TENSOR_NAME];
  const size_t n = strlen(name) - (td_ends_with(name, ".weight") ? strlen("weight") : 0);
  for (size_t i = 0; i < TD_COUNT(parts); i++) {
    snprintf(own, sizeof own, "%.*s%s", (int)n, name, n == strlen(name) ? "" : parts[i]);
    name_in_layer(b->config, layer_idx, own, whole);
    if (td_binder_peek(b, whole)) return true;
  }
  return false;
}

// The prefix of a layer's experts: the family's own, or "mlp.experts." where they are called so.
static void find_prefix(const td_tensor_binder *b, const td_tensor_spec *p, uint32_t layer_idx,
                        const char **name, char prefix[TD_MAX_TENSOR_NAME]) {
  static const char *const wholes[] = {"gate_up_proj", "gate_up_proj_blocks",
                                       "gate_up_proj_packed"};
  const char *const own = b->config->family->experts;
  const char *const places[] = {own ? own : "mlp.experts", "mlp.experts"};
  const char *const names[] = {p->name, p->alias[0]};
  char at[MAX_IN_LAYER];
  for (size_t i = 0; i < TD_COUNT(places); i++) {
    snprintf(at, sizeof at, "%s.", places[i]);
    name_in_layer(b->config, layer_idx, at, prefix);
    bool found = false;
    for (size_t k = 0; k < TD_COUNT(wholes) && !found; k++) {
      snprintf(at, sizeof at, "%s.%s", places[i], wholes[k]);
      found = is_stored(b, layer_idx, at);
    }
    for (size_t k = 0; k < TD_COUNT(names) && names[k] && !found; k++) {
      snprintf(at, sizeof at, "%s.0.%s", places[i], names[k]);
      found = is_stored(b, layer_idx, at);
      if (found) *name = names[k];
    }
    if (found) return;
  }
  // What is missing is called by the name that the family has.
  snprintf(at, sizeof at, "%s.", places[0]);
  name_in_layer(b->config, layer_idx, at, prefix);
}

static td_status bind_experts(td_tensor_binder *b, const td_tensor_spec *p, uint32_t layer_idx,
                              void *field) {
  uint32_t n = b->config->n_experts;
  td_weight *experts = td_binder_block(b, n * sizeof *experts);
  if (!experts) return td_fail(b->err, TD_ENOMEM, "%s: out of memory", td_store_listing(b->store));
  *(td_weight **)field = experts;
  const char *own = p->name;
  char name[TD_MAX_TENSOR_NAME], prefix[TD_MAX_TENSOR_NAME];
  find_prefix(b, p, layer_idx, &own, prefix);
  bool fused;
  td_status st = td_bind_fused_experts(b, p, prefix, experts, &fused);
  for (uint32_t e = 0; e < n && st == TD_OK && !fused; e++) {
    int len = snprintf(name, sizeof name, "%s%u.%s", prefix, e, own);
    TD_CHECK(len < (int)sizeof name);
    st = bind_place(b, p, name, &experts[e]);
  }
  return st;
}

static td_status bind_expert_biases(td_tensor_binder *b, const td_tensor_spec *p,
                                    uint32_t layer_idx, const float **field) {
  const char *const names[] = {p->name, p->alias[0]};
  const uint32_t rows = td_dim_value(b->config, p->rows), n = b->config->n_experts;
  float *to = td_binder_block(b, (size_t)n * rows * (names[1] ? 2 : 1) * sizeof *to);
  if (!to) return td_fail(b->err, TD_ENOMEM, "%s: out of memory", td_store_listing(b->store));
  *field = to;
  td_status st = TD_OK;
  for (uint32_t i = 0; i < (names[1] ? 2 * n : n) && st == TD_OK; i++, to += rows) {
    char own[MAX_IN_LAYER], name[TD_MAX_TENSOR_NAME];
    const td_tensor *t = NULL;
    const void *values = NULL;
    snprintf(own, sizeof own, "mlp.experts.%u.%s", i % n, names[i / n]);
    name_in_layer(b->config, layer_idx, own, name);
    st = td_binder_find(b, name, &t);
    if (st == TD_OK) st = td_binder_check_shape(b, t, rows, 0);
    if (st == TD_OK) st = td_binder_place_f32(b, t, &values);
    if (st == TD_OK) memcpy(to, values, rows * sizeof *to);
  }
  return st;
}

// Whether what is stored of a hash, if anything is, is what follows from config.json.
static td_status check_hash(const td_tensor_binder *b, const char *name, const int64_t *want,
                            uint32_t n) {
  const td_tensor *t = td_binder_peek(b, name);
  if (!t || (strcmp(t->dtype, "I64") == 0 && t->n_bytes == n * sizeof *want &&
             memcmp(t->data, want, t->n_bytes) == 0))
    return TD_OK;
  return td_tensor_fail(b->err, TD_EUNSUPPORTED, t,
                        "is not what follows from config.json's seed, vocab_size and "
                        "ngram_vocab_size_base");
}

static td_status fill_hash(const td_tensor_binder *b, uint32_t layer_idx, td_ngram_hash *h,
                           uint64_t *n_rows) {
  const td_model_config *c = b->config;
  uint32_t nth = 0;
  int64_t stored[TD_MAX_NGRAM_HEADS];
  char name[TD_MAX_TENSOR_NAME];
  for (uint32_t i = 0; i < layer_idx; i++)
    nth += td_layers_have(c->ngram_layers, i);
  *h = (td_ngram_hash){.size = c->ngram_size, .n_heads = c->ngram_heads, .end = c->ngram_end};
  *n_rows = td_ngram_hash_fill(h, nth, c->ngram_seed, c->ngram_base, c->n_vocab);
  for (uint32_t i = 0; i < h->size; i++)
    stored[i] = (int64_t)h->factor[i];
  name_in_layer(c, layer_idx, "ple.ple_embedding.layer_multipliers", name);
  td_status st = check_hash(b, name, stored, h->size);
  for (uint32_t i = 0; i < td_ngram_rows(h); i++)
    stored[i] = h->rows[i];
  name_in_layer(c, layer_idx, "ple.ple_embedding.ngram_heads_vocab_sizes", name);
  return st == TD_OK ? check_hash(b, name, stored, td_ngram_rows(h)) : st;
}

// Shard i of a table of n-grams, or with i < 0 the whole table, and its module's name; NULL: none.
static const td_tensor *find_shard(const td_tensor_binder *b, const td_tensor_spec *p,
                                   uint32_t layer_idx, int i, char module[TD_MAX_TENSOR_NAME]) {
  char own[MAX_IN_LAYER], name[TD_MAX_TENSOR_NAME + sizeof ".weight"];
  snprintf(own, sizeof own, i < 0 ? "%sweight" : "%sshard_%d.weight", p->name, i);
  name_in_layer(b->config, layer_idx, own, name);
  snprintf(module, TD_MAX_TENSOR_NAME, "%.*s", (int)(strlen(name) - strlen(".weight")), name);
  return td_binder_peek(b, name);
}

// All shards but the last have as many rows as the first.
static td_status check_shard(const td_tensor_binder *b, const td_tensor *t, uint32_t cols,
                             uint64_t n_first, bool is_last) {
  const bool is_long = is_last ? t->shape[0] <= n_first : t->shape[0] == n_first;
  if (t->n_dims == 2 && t->shape[1] == cols && is_long && n_first <= INT32_MAX) return TD_OK;
  return td_tensor_fail(b->err, TD_EFORMAT, t,
                        "is not a shard, as long as the others, of rows of %u elements", cols);
}

// A table of n-grams, which stays where its file is mapped.
static td_status bind_ngrams(td_tensor_binder *b, const td_tensor_spec *p, uint32_t layer_idx,
                             td_ngram_table *table) {
  char module[TD_MAX_TENSOR_NAME];
  uint64_t n_rows, n_have = 0;
  td_status st = fill_hash(b, layer_idx, &table->hash, &n_rows);
  if (st != TD_OK) return st;
  const uint32_t cols = b->config->ngram_dim / td_ngram_rows(&table->hash);
  const bool is_whole = find_shard(b, p, layer_idx, -1, module);
  uint32_t n = is_whole;
  while (!is_whole && find_shard(b, p, layer_idx, (int)n, module))
    n++;
  if (!n) return fail_missing(b, module);
  td_weight *shards = td_binder_block(b, n * sizeof *shards);
  if (!shards) return td_fail(b->err, TD_ENOMEM, "%s: out of memory", td_store_listing(b->store));
  for (uint32_t i = 0; i < n && st == TD_OK; i++) {
    const td_tensor *t = find_shard(b, p, layer_idx, is_whole ? -1 : (int)i, module);
    st = check_shard(b, t, cols, i ? shards[0].rows : t->shape[0], i + 1 == n);
    if (st == TD_OK) st = td_bind_weight(b, module, true, (uint32_t)t->shape[0], cols, &shards[i]);
    n_have += t->shape[0];
  }
  if (st == TD_OK && n_have < n_rows) {
    st = td_fail(b->err, TD_EFORMAT,
                 "%s: tensor %s.weight: the last of %llu rows, but config.json asks for %llu",
                 td_store_listing(b->store), module, (unsigned long long)n_have,
                 (unsigned long long)n_rows);
  }
  table->shards = shards;
  table->n_shards = n;
  return st;
}

// What the layer's tensor is called, of its names.
static const char *stored_name(const td_tensor_binder *b, const td_tensor_spec *p,
                               uint32_t layer_idx) {
  for (size_t i = 0; i < TD_COUNT(p->alias) && p->alias[i]; i++)
    if (is_stored(b, layer_idx, p->alias[i])) return p->alias[i];
  return p->name;
}

// Binds gate or up of an MLP, of which both are one matrix.
static td_status bind_half(td_tensor_binder *b, const td_tensor_spec *p, const char *name,
                           td_weight *w) {
  const uint32_t rows = td_dim_value(b->config, p->rows), cols = td_dim_value(b->config, p->cols);
  const uint32_t first = p->offset == offsetof(td_layer, mlp_up) ? rows : 0;
  char module[TD_MAX_TENSOR_NAME];
  snprintf(module, sizeof module, "%.*s", (int)(strlen(name) - strlen(".weight")), name);
  td_status st = td_bind_weight(b, module, false, 2 * rows, cols, w);
  if (st != TD_OK) return st;
  const size_t groups = td_weight_groups(w);
  const bool is_one = w->scale_rows == 2 * rows; // scale for both
  if (is_one) w->scale_rows = rows;
  if ((w->scale && rows % w->scale_rows) || (w->zero && rows % 8)) {
    return td_fail(b->err, TD_EUNSUPPORTED,
                   "%s: tensor %s: %u rows of gate are no whole number of its blocks",
                   td_store_listing(b->store), name, rows);
  }
  w->rows = rows;
  w->data = (const char *)w->data + first * td_weight_row_bytes(w);
  if (w->scale && !is_one)
    w->scale = (const char *)w->scale +
               first / w->scale_rows * groups * td_dtype_bytes(w->scale_dtype);
  if (w->zero) w->zero += first / 8 * groups;
  return st;
}

static td_status bind_layer(td_tensor_binder *b, uint32_t layer_idx) {
  td_layer *layer = &b->out->layers[layer_idx];
  layer->is_moe = td_model_is_moe(b->config, layer_idx);
  layer->has_window = td_model_window(b->config, layer_idx) > 0;
  layer->kind = td_model_attn(b->config, layer_idx);
  const td_family *family = b->config->family;
  uint64_t met = td_layer_conditions(b->config, layer_idx);
  for (size_t i = 0; i < family->n_layer; i++) {
    const td_tensor_spec *p = &family->layer[i];
    if (p->conditions & ~met) continue;
    void *field = (char *)layer + p->offset;
    td_status st;
    if (p->kind == TD_SPEC_EXPERT) {
      st = bind_experts(b, p, layer_idx, field);
    } else if (p->kind == TD_SPEC_EXPERT_BIAS) {
      st = bind_expert_biases(b, p, layer_idx, field);
    } else if (p->kind == TD_SPEC_NGRAMS) {
      st = bind_ngrams(b, p, layer_idx, field);
    } else {
      char name[TD_MAX_TENSOR_NAME];
      name_in_layer(b->config, layer_idx, stored_name(b, p, layer_idx), name);
      st = td_ends_with(name, ".gate_up_proj.weight") ? bind_half(b, p, name, field)
                                                      : bind_place(b, p, name, field);
    }
    if (st != TD_OK) return st;
  }
  return TD_OK;
}

// Whether a layer has experts, by what is stored.
static bool has_router(const td_tensor_binder *b, uint32_t layer_idx) {
  const td_family *family = b->config->family;
  for (size_t i = 0; i < family->n_layer; i++) {
    const td_tensor_spec *p = &family->layer[i];
    if (p->offset == offsetof(td_layer, router) &&
        is_stored(b, layer_idx, stored_name(b, p, layer_idx)))
      return true;
  }
  return false;
}

// What is around the layer: with its names where it follows the last layer, else beside it.
static td_status bind_around_mtp(td_tensor_binder *b) {
  const td_model_config *c = b->config;
  const bool is_apart = c->family->has_mtp_apart, has_streams = c->n_streams > 0;
  const td_tensor_spec *places = is_apart      ? td_mtp_apart_places
                                 : has_streams ? td_mtp_stream_places
                                               : td_mtp_places;
  const size_t n = is_apart      ? td_n_mtp_apart_places
                   : has_streams ? td_n_mtp_stream_places
                                 : td_n_mtp_places;
  td_status st = TD_OK;
  for (size_t k = 0; k < n && st == TD_OK; k++) {
    const td_tensor_spec *p = &places[k];
    char name[TD_MAX_TENSOR_NAME];
    if (is_apart)
      snprintf(name, sizeof name, "%s%s", c->family->mtp, p->name);
    else
      name_in_layer(c, c->n_layers, stored_name(b, p, c->n_layers), name);
    st = bind_place(b, p, name, (char *)&b->out->mtp + p->offset);
  }
  return st;
}

// Binds the first layer of multi-token prediction, which has its own norms. Embedding and head, if
// they are stored again with it, are the model's own.
static td_status bind_mtp(td_tensor_binder *b) {
  td_model_config *c = b->config;
  const uint32_t i = c->n_layers;
  if (has_router(b, i)) td_layers_add(c->moe_layers, i);
  b->out->mtp.is_normed = c->family->has_mtp_apart || is_stored(b, i, TD_MTP_OWN_NORM);
  td_status st = bind_layer(b, i);
  if (st == TD_OK) st = bind_around_mtp(b);
  b->out->has_mtp = st == TD_OK;
  return st;
}

static bool may_have_mtp(const td_tensor_binder *b) {
  const td_model_config *c = b->config;
  char name[TD_MAX_TENSOR_NAME];
  if (c->n_layers == TD_MAX_LAYERS) return false;
  if (c->n_streams) return c->n_mtp_layers && is_stored(b, c->n_layers, "e_proj.weight");
  if (!c->family->mtp) return c->n_mtp_layers && is_stored(b, c->n_layers, "eh_proj.weight");
  snprintf(name, sizeof name, "%sfc.weight", c->family->mtp);
  return c->family->has_mtp_apart && td_binder_peek(b, name);
}

// A checkpoint whose prediction layer is incomplete, or in a format that is not read, is served
// without it.
static void try_mtp(td_tensor_binder *b) {
  td_err *const err = b->err;
  td_err why;
  if (!may_have_mtp(b)) return;
  b->err = &why;
  if (bind_mtp(b) != TD_OK) td_debug("no multi-token prediction: %s", why.msg);
  b->err = err;
}

// Tensors of a tower whose names begin with `prefix`, to fields of object.
static td_status bind_tower_part(td_tensor_binder *b, const td_tensor_spec *places, size_t n,
                                 const char *prefix, void *object) {
  td_status st = TD_OK;
  const uint64_t met = td_vision_conditions(b->config);
  for (size_t i = 0; i < n && st == TD_OK; i++) {
    char name[TD_MAX_TENSOR_NAME];
    snprintf(name, sizeof name, "%s%s", prefix, places[i].name);
    if (places[i].conditions & ~met) continue;
    st = bind_place(b, &places[i], name, (char *)object + places[i].offset);
  }
  return st;
}

static td_status bind_tower(td_tensor_binder *b, const char *prefix) {
  const td_vision_config *v = &b->config->vision;
  td_vision_weights *w = &b->out->vision;
  w->layers = td_binder_block(b, v->n_layers * sizeof *w->layers);
  if (!w->layers)
    return td_fail(b->err, TD_ENOMEM, "%s: out of memory", td_store_listing(b->store));
  memset(w->layers, 0, v->n_layers * sizeof *w->layers);
  td_status st = bind_tower_part(b, v->tower->whole, v->tower->n_whole, prefix, w);
  for (uint32_t i = 0; i < v->n_layers + v->n_deep && st == TD_OK; i++) {
    char part[TD_MAX_TENSOR_NAME];
    const size_t n = (size_t)snprintf(part, sizeof part, "%s", prefix);
    const bool is_layer = i < v->n_layers;
    snprintf(part + n, sizeof part - n, is_layer ? v->tower->layers : v->tower->deep_mergers,
             is_layer ? i : i - v->n_layers);
    st = is_layer ? bind_tower_part(b, v->tower->layer, v->tower->n_layer, part, &w->layers[i])
                  : bind_tower_part(b, v->tower->merger, v->tower->n_merger, part,
                                    &w->deep[i - v->n_layers]);
  }
  return st;
}

// A checkpoint whose tower is missing, or in a format that is not read, is served without it.
static void try_tower(td_tensor_binder *b) {
  td_vision_config *v = &b->config->vision;
  td_err *const err = b->err;
  td_err why;
  if (!v->n_layers) return;
  const char *prefix = b->config->wrapper->others[0];
  b->err = &why;
  const td_status st = bind_tower(b, prefix);
  b->err = err;
  if (st == TD_OK) return;
  td_debug("images are not supported: %s", why.msg);
  *v = (td_vision_config){.n_layers = 0};
  b->out->vision = (td_vision_weights){.layers = NULL};
  for (size_t i = 0; i < td_store_n_tensors(b->store); i++)
    if (strncmp(td_store_tensor(b->store, i)->name, prefix, strlen(prefix)) == 0)
      b->used[i] = false;
}

static td_status bind_ends(td_tensor_binder *b) {
  // As in transformers, tie_word_embeddings is ignored if the checkpoint has both matrices.
  char name[TD_MAX_TENSOR_NAME];
  td_tensor_name(b->config, "lm_head.weight", name);
  if (td_store_find(b->store, name) >= 0) b->config->tie_embeddings = false;
  uint64_t met = td_end_conditions(b->config);
  for (size_t i = 0; i < td_n_end_places; i++) {
    td_tensor_spec p = td_end_places[i];
    if (p.conditions & ~met) continue;
    if (p.kind == TD_SPEC_VEC && b->config->family->has_norm1) p.kind = TD_SPEC_NORM1;
    td_tensor_name(b->config, p.name, name);
    if (p.alias[0] && td_binder_peek(b, p.alias[0])) snprintf(name, sizeof name, "%s", p.alias[0]);
    td_status st = bind_place(b, &p, name, (char *)&b->out->ends + p.offset);
    if (st != TD_OK) return st;
  }
  return TD_OK;
}

// Whether name belongs to a multi-token prediction layer; if so *layer_idx is its index.
static bool is_mtp(const td_model_config *c, const char *name, uint32_t *layer_idx) {
  const char *rest, *prefix = c->family->mtp;
  if (prefix && strncmp(name, prefix, strlen(prefix)) == 0) {
    *layer_idx = 0;
    sscanf(name + strlen(prefix), c->family->is_bare ? "%9u." : "layers.%9u.", layer_idx);
    *layer_idx += c->n_layers;
    return true;
  }
  return td_tensor_layer(c, name, layer_idx, &rest) && *layer_idx >= c->n_layers &&
         *layer_idx - c->n_layers < c->n_mtp_layers;
}

// Whether name belongs to a part of the checkpoint that is not used, such as vision.
static bool is_other_part(const td_model_config *c, const char *name) {
  for (const char *const *other = c->wrapper ? c->wrapper->others : NULL; other && *other; other++)
    if (strncmp(name, *other, strlen(*other)) == 0) return true;
  return false;
}

// Rejects unused tensors unless they are known to be unnecessary.
static td_status check_rest(td_tensor_binder *b) {
  uint32_t n_mtp = b->out->has_mtp;
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
    if (is_other_part(b->config, t->name)) {
      known = true;
      b->config->n_other_tensors++;
      b->config->other_bytes += t->n_bytes;
    }
    for (size_t k = 0; k < TD_COUNT(ignored_suffixes); k++)
      known |= td_ends_with(t->name, ignored_suffixes[k]);
    if (!known) {
      return td_tensor_fail(
          b->err, TD_EFORMAT, t,
          "is not part of a %s model as config.json describes it: shards "
          "and config.json do not belong together, or it is a variant that is not "
          "supported",
          b->config->arch_name);
    }
  }
  b->config->n_mtp_layers = n_mtp;
  return TD_OK;
}

td_status td_bind(td_bound_tensors *out, td_model_config *config, const td_quant *quant,
                  const td_store *store, td_err *err) {
  *out = (td_bound_tensors){0};
  td_tensor_binder b = {.out = out, .config = config, .store = store, .quant = quant, .err = err};
  b.used = calloc(td_store_n_tensors(store) + 1, sizeof *b.used);
  out->layers = calloc((size_t)config->n_layers + 1, sizeof *out->layers);
  td_status st = TD_OK;
  if (!b.used || !out->layers)
    st = td_fail(err, TD_ENOMEM, "%s: out of memory", td_store_listing(store));
  td_settle_names(config, store);
  if (st == TD_OK) st = bind_ends(&b);
  for (uint32_t i = 0; i < config->n_layers && st == TD_OK; i++)
    st = bind_layer(&b, i);
  if (st == TD_OK) try_mtp(&b);
  if (st == TD_OK) try_tower(&b);
  if (st == TD_OK) st = check_rest(&b);
  free(b.used);
  return st;
}

td_status td_bind_matrix(td_bound_tensors *binding, const td_quant *quant, const td_store *store,
                         const td_tensor *t, bool *used, td_weight *w, td_err *err) {
  td_err local;
  td_tensor_binder b = {.out = binding, .store = store, .quant = quant, .used = used};
  b.err = err ? err : &local;
  size_t len = strlen(t->name) - strlen(".weight");
  TD_CHECK(td_ends_with(t->name, ".weight") && t->n_dims == 2);
  if (len >= TD_MAX_TENSOR_NAME || t->shape[0] > UINT32_MAX || t->shape[1] > UINT32_MAX)
    return td_tensor_fail(err, TD_EUNSUPPORTED, t, "too large");
  char module[TD_MAX_TENSOR_NAME];
  snprintf(module, sizeof module, "%.*s", (int)len, t->name);
  return td_bind_weight(&b, module, false, (uint32_t)t->shape[0], (uint32_t)t->shape[1], w);
}

void td_binding_free(td_bound_tensors *binding) {
  for (size_t i = 0; i < binding->n_blocks; i++)
    free(binding->blocks[i]);
  free(binding->blocks);
  free(binding->layers);
  *binding = (td_bound_tensors){0};
}
