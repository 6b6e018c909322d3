// src/model/quantize/quantize_plan.c - decides the action for each tensor and its shard.
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/grow.h"
#include "base/str.h"
#include "model/families/family.h"
#include "model/quantize/quantize_impl.h"

// Adds an item for tensor idx. name: see td_quantize_item.own_name; taken. NULL: out of memory.
static td_quantize_item *add_item(td_quantizer *q, size_t idx, char *name) {
  if (!TD_GROW(q->items, q->n_items, q->cap_items, 256)) {
    free(name);
    return NULL;
  }
  const td_tensor *t = td_store_tensor(q->store, idx);
  td_quantize_item *item = &q->items[q->n_items++];
  *item = (td_quantize_item){
      .t = t, .tensor = idx, .own_name = name, .name = name ? name : t->name};
  return item;
}

static bool is_matrix(const td_tensor *t) {
  return t->n_dims == 2 && td_ends_with(t->name, ".weight") && t->shape[0] && t->shape[1];
}

// The encoding of a matrix; NULL: keep it. INT8 is used for the output matrix, which every token
// reads entirely, and for matrices that the requested encoding does not support.
static const td_encoding *encoding_for(const td_quantizer *q, const char *name, uint64_t rows,
                                       uint64_t cols) {
  const td_encoding *e = q->opts->encoding;
  const char *rest;
  char head[TD_MAX_TENSOR_NAME];
  uint32_t layer_idx;
  td_tensor_name(&q->config, "lm_head.weight", head);
  if (strcmp(name, head) == 0) return &td_encoding_int8;
  if (!td_tensor_layer(&q->config, name, &layer_idx, &rest)) return NULL;
  bool fits = !e->whole_blocks || cols % e->block_cols == 0;
  if (td_ends_with(name, ".gate_up_proj.weight")) fits &= rows / 2 % e->block_rows == 0;
  for (size_t i = 0; i < q->config.family->n_layer; i++) {
    const td_tensor_spec *p = &q->config.family->layer[i];
    const bool is_latent = p->kind == TD_SPEC_LATENT;
    if (!is_latent && p->kind != TD_SPEC_WEIGHT && p->kind != TD_SPEC_EXPERT) continue;
    const char *const names[] = {p->name, p->alias[0], p->alias[1]};
    bool is_own = false;
    for (size_t k = 0; k < TD_COUNT(names) && names[k]; k++) {
      const size_t n = strlen(name), len = strlen(names[k]);
      is_own |= n > len && name[n - len - 1] == '.' && td_ends_with(name, names[k]);
    }
    if (!is_own) continue;
    return fits && !(is_latent && td_encoded_bits(e) < 8) ? e : &td_encoding_int8;
  }
  return NULL;
}

// Whether t holds one matrix of each expert of a layer, or two.
static bool is_fused(const td_quantizer *q, const td_tensor *t) {
  const char *rest;
  uint32_t layer_idx;
  return t->n_dims == 3 && td_tensor_layer(&q->config, t->name, &layer_idx, &rest) &&
         layer_idx < q->config.n_layers && strstr(rest, "experts.") &&
         (td_ends_with(t->name, ".gate_up_proj") || td_ends_with(t->name, ".down_proj"));
}

// Adds the experts' matrices for the field of spec, each under the name that it has by itself.
static td_status plan_experts(td_quantizer *q, size_t idx, const td_tensor_spec *spec,
                              td_weight *experts, bool *used) {
  const char *name = td_store_tensor(q->store, idx)->name;
  char prefix[TD_MAX_TENSOR_NAME];
  snprintf(prefix, sizeof prefix, "%.*s", (int)(strrchr(name, '.') + 1 - name), name);
  td_status st = td_bind_fused(&q->binding, &q->config, q->quant, q->store, spec, prefix, used,
                               experts, q->err);
  for (uint32_t e = 0; e < q->config.n_experts && st == TD_OK; e++) {
    char *own;
    if (asprintf(&own, "%s%u.%s", prefix, e, spec->name) < 0) own = NULL;
    td_quantize_item *item = own ? add_item(q, idx, own) : NULL;
    if (!item) return td_quantize_no_memory(q);
    item->w = experts[e];
    item->encoding = encoding_for(q, own, item->w.rows, item->w.cols);
    item->action = TD_QUANTIZE_ENCODE;
  }
  return st;
}

static td_status plan_fused(td_quantizer *q, size_t idx, bool *used) {
  const bool is_down = td_ends_with(td_store_tensor(q->store, idx)->name, ".down_proj");
  td_weight *experts = calloc(q->config.n_experts, sizeof *experts);
  td_status st = experts ? TD_OK : td_quantize_no_memory(q);
  for (size_t i = 0; i < q->config.family->n_layer && st == TD_OK; i++) {
    const td_tensor_spec *spec = &q->config.family->layer[i];
    const bool is_of_down = spec->offset == offsetof(td_layer, down);
    if (spec->kind == TD_SPEC_EXPERT && is_down == is_of_down)
      st = plan_experts(q, idx, spec, experts, used);
  }
  free(experts);
  return st;
}

static td_status plan_tensor(td_quantizer *q, size_t idx, bool *used) {
  const td_tensor *t = td_store_tensor(q->store, idx);
  if (is_fused(q, t)) return plan_fused(q, idx, used);
  td_quantize_item *item = add_item(q, idx, NULL);
  if (!item) return td_quantize_no_memory(q);
  item->action = TD_QUANTIZE_COPY;
  if (!is_matrix(t)) return TD_OK;
  bool is_fp8 = strcmp(t->dtype, "F8_E4M3") == 0;
  item->encoding = encoding_for(q, t->name, t->shape[0], t->shape[1]);
  if (!is_fp8 && !item->encoding) return TD_OK;
  td_status st = td_bind_matrix(&q->binding, q->quant, q->store, t, used, &item->w, q->err);
  if (st != TD_OK) return st;
  item->action = item->encoding ? TD_QUANTIZE_ENCODE : TD_QUANTIZE_BF16;
  if (is_fp8 && item->encoding && strcmp(item->encoding->data.dtype, t->dtype) == 0) {
    return td_tensor_fail(q->err, TD_EINVAL, t,
                          "is FP8 already: use the checkpoint as it is, or make it smaller");
  }
  return TD_OK;
}

static td_status plan_items(td_quantizer *q) {
  const size_t n_tensors = td_store_n_tensors(q->store);
  bool *used = calloc(n_tensors + 1, sizeof *used);
  td_status st = used ? TD_OK : td_quantize_no_memory(q);
  size_t n_encoded = 0;
  for (size_t i = 0; i < n_tensors && st == TD_OK; i++)
    st = plan_tensor(q, i, used);
  for (size_t i = 0; i < q->n_items; i++)
    n_encoded += q->items[i].encoding == q->opts->encoding;
  // A used tensor that is not a matrix to process is a scale. A tensor that was used but would be
  // copied is a scale of some matrix.
  for (size_t i = 0; i < q->n_items && st == TD_OK; i++) {
    td_quantize_item *item = &q->items[i];
    if (used[item->tensor] && item->action == TD_QUANTIZE_COPY) item->action = TD_QUANTIZE_DROP;
  }
  free(used);
  if (st == TD_OK && n_encoded == 0) {
    st = td_fail(q->err, TD_EINVAL, "%s: has no linear layer that could be made %s", q->opts->in,
                 q->opts->encoding->name);
  }
  return st;
}

// Adds an entry to the shard. Its name is the module's and part, or the item's if part is NULL.
static td_shard_entry *add_entry(td_quantize_shard *s, const char *name, const char *part,
                                 const char *dtype, uint64_t n_bytes) {
  td_shard_entry *e = &s->entries[s->n_entries];
  int module = (int)(strlen(name) - strlen(".weight"));
  *e = (td_shard_entry){.dtype = dtype, .n_dims = 2, .n_bytes = n_bytes};
  bool named = part ? asprintf(&e->name, "%.*s.%s", module, name, part) >= 0
                    : (e->name = strdup(name)) != NULL;
  if (!named) {
    e->name = NULL;
    return NULL;
  }
  s->n_entries++;
  return e;
}

static bool add_plain(td_quantize_shard *s, const td_tensor *t, bool is_bf16) {
  uint64_t n_bytes = is_bf16 ? t->shape[0] * t->shape[1] * 2 : t->n_bytes;
  td_shard_entry *e = add_entry(s, t->name, NULL, is_bf16 ? "BF16" : t->dtype, n_bytes);
  if (!e) return false;
  e->n_dims = t->n_dims;
  memcpy(e->shape, t->shape, sizeof e->shape);
  return true;
}

static bool add_encoded(td_quantize_shard *s, const td_quantize_item *item) {
  const td_encoding *e = item->encoding;
  uint32_t rows = item->w.rows, cols = item->w.cols;
  size_t row_bytes = td_encoded_row_bytes(e, cols), groups = td_encoded_groups(e, cols);
  uint64_t strips = ((uint64_t)rows + e->block_rows - 1) / e->block_rows;
  td_shard_entry *codes = add_entry(s, item->name, e->data.name, e->data.dtype, rows * row_bytes);
  if (!codes) return false;
  codes->shape[0] = rows;
  codes->shape[1] = row_bytes / e->data.item_bytes;
  td_shard_entry *scales = add_entry(s, item->name, e->scale.name, e->scale.dtype,
                                     strips * groups * e->scale.item_bytes);
  if (!scales) return false;
  scales->shape[0] = strips;
  scales->shape[1] = groups;
  if (!e->states_shape) return true;
  td_shard_entry *shape = add_entry(s, item->name, "weight_shape", "I64", 2 * sizeof(int64_t));
  if (!shape) return false;
  shape->n_dims = 1;
  shape->shape[0] = 2;
  return true;
}

static td_status plan_shard(td_quantizer *q, td_quantize_shard *s) {
  s->entries = calloc(3 * (s->end - s->begin) + 1, sizeof *s->entries);
  if (!s->name || !s->entries) return td_quantize_no_memory(q);
  for (size_t i = s->begin; i < s->end; i++) {
    td_quantize_item *item = &q->items[i];
    item->entry = s->n_entries;
    bool ok = true;
    if (item->action == TD_QUANTIZE_ENCODE) ok = add_encoded(s, item);
    if (item->action == TD_QUANTIZE_BF16) ok = add_plain(s, item->t, true);
    if (item->action == TD_QUANTIZE_COPY) ok = add_plain(s, item->t, false);
    if (!ok) return td_quantize_no_memory(q);
    const bool is_first = i == s->begin || item->t != q->items[i - 1].t;
    if (is_first) q->report->bytes_in += item->t->n_bytes;
  }
  td_status st = td_shard_layout(s->entries, s->n_entries, &s->header, q->err);
  s->n_bytes = s->header.len;
  for (size_t i = 0; i < s->n_entries; i++) {
    s->n_bytes += s->entries[i].n_bytes;
    q->report->bytes_out += s->entries[i].n_bytes;
  }
  return st;
}

// One output shard per source shard, with the same name. A single source file gets a numbered name,
// because a file called model.safetensors would count as a complete checkpoint.
static td_status plan_shards(td_quantizer *q) {
  q->shards = calloc(q->n_items + 1, sizeof *q->shards);
  if (!q->shards) return td_quantize_no_memory(q);
  td_status st = TD_OK;
  for (size_t i = 0; i < q->n_items && st == TD_OK;) {
    td_quantize_shard *s = &q->shards[q->n_shards++];
    s->source = q->items[i].t->file;
    s->begin = i;
    while (i < q->n_items && strcmp(q->items[i].t->file, s->source) == 0)
      i++;
    s->end = i;
    const char *name = strrchr(s->source, '/') + 1;
    if (strcmp(name, TD_QUANTIZE_SINGLE) == 0) name = "model-00001-of-00001.safetensors";
    s->name = strdup(name);
    st = plan_shard(q, s);
  }
  return st;
}

static int by_name(const void *a, const void *b) {
  return strcmp(((const td_quantize_shard *)a)->name, ((const td_quantize_shard *)b)->name);
}

td_status td_quantize_plan(td_quantizer *q) {
  td_status st = plan_items(q);
  if (st == TD_OK) st = plan_shards(q);
  if (st == TD_OK) qsort(q->shards, q->n_shards, sizeof *q->shards, by_name);
  return st;
}

void td_quantize_plan_free(td_quantizer *q) {
  for (size_t i = 0; i < q->n_shards; i++) {
    td_quantize_shard *s = &q->shards[i];
    for (size_t k = 0; k < s->n_entries; k++)
      free(s->entries[k].name);
    free(s->entries);
    free(s->name);
    td_buf_free(&s->header);
  }
  free(q->shards);
  for (size_t i = 0; i < q->n_items; i++)
    free(q->items[i].own_name);
  free(q->items);
}
