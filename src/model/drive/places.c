// src/model/drive/places.c - finds experts' data in the shards, by the addresses that the model
// has.
#include "model/drive/places.h"

#include <stdlib.h>
#include <string.h>

#include "model/checkpoint/store.h"
#include "model/convert.h"
#include "model/convert_matrix.h"

// ---- codes by columns ---------------------------------------------------------------------------

// A tensor that is turned into rows when it is loaded.
typedef struct {
  const uint8_t *data, *from; // in the model, and in the store
  const td_tensor *t;
} turned;

typedef struct {
  turned *at; // [n], by data
  size_t n;
} all_turned;

static int by_data(const void *a, const void *b) {
  const turned *x = a, *y = b;
  return (x->data > y->data) - (x->data < y->data);
}

// Of resident weights, too, where they have been turned in place or, if left out, are not there.
static td_status find_turned(all_turned *out, const td_model *model, td_err *err) {
  const td_conversion *c = td_model_conversion(model);
  td_conversion *own = NULL;
  td_status st = TD_OK;
  if (!c) {
    st = td_conversion_open(&own, td_model_store(model), td_model_quant(model), err);
    c = own;
  }
  turned one;
  while (st == TD_OK && (one.t = td_conversion_turned(c, out->n, &one.from))) {
    one.data = one.t->data;
    if (!out->n) out->at = calloc(td_store_n_tensors(td_model_store(model)), sizeof *out->at);
    if (out->at)
      out->at[out->n++] = one;
    else
      st = td_fail(err, TD_ENOMEM, "out of memory: places of experts");
  }
  td_conversion_close(own);
  if (out->n) qsort(out->at, out->n, sizeof *out->at, by_data);
  return st;
}

bool td_expert_part_turn(const td_expert_part *p, void *data) {
  uint32_t *rows = malloc(p->n_bytes);
  if (!rows) return false;
  if (p->is_awq)
    td_awq_to_rows(rows, data, p->n_rows, p->n_cols);
  else
    td_transpose(rows, data, p->n_rows, p->n_cols / 8, sizeof *rows);
  memcpy(data, rows, p->n_bytes);
  free(rows);
  return true;
}

// ---- places -------------------------------------------------------------------------------------

static bool holds(const td_shard_info *shard, const td_weight *w) {
  const uint8_t *data = w->data;
  return data >= shard->bytes && data + td_weight_data_bytes(w) <= shard->bytes + shard->n_bytes;
}

// The shard with the matrix, which is often the one of the matrix before.
static bool find_shard(const td_store *store, const td_weight *w, uint32_t *shard) {
  const size_t n = td_store_n_shards(store);
  td_shard_info info = td_store_shard(store, *shard);
  if (holds(&info, w)) return true;
  for (uint32_t i = 0; i < n; i++) {
    info = td_store_shard(store, i);
    *shard = i;
    if (holds(&info, w)) return true;
  }
  *shard = 0;
  return false;
}

static td_status place(td_expert_places *p, const td_store *store, const all_turned *all,
                       const td_layer *layer, uint32_t layer_idx, uint32_t expert, uint32_t *shard,
                       td_err *err) {
  const td_weight *matrices[TD_EXPERT_PARTS] = {
      &layer->gate[expert], layer->up ? &layer->up[expert] : NULL, &layer->down[expert]};
  td_expert_part *parts = (td_expert_part *)td_expert_parts(p, layer_idx, expert);
  uint64_t at = 0;
  for (int i = 0; i < TD_EXPERT_PARTS; i++) {
    if (!matrices[i] || !matrices[i]->rows) continue;
    td_weight w = *matrices[i];
    const turned key = {.data = w.data};
    const turned *found = all->n ? bsearch(&key, all->at, all->n, sizeof key, by_data) : NULL;
    if (found && td_weight_data_bytes(&w) != found->t->n_bytes) found = NULL;
    if (found) w.data = found->from;
    if (!find_shard(store, &w, shard)) {
      return td_fail(err, TD_EUNSUPPORTED,
                     "the experts of layer %u are laid out anew when they are loaded (%s), so they "
                     "cannot be read from the drive one by one; those of a checkpoint that tandem "
                     "quantize makes of the model's BF16 or FP8 weights can, as can FP8, MXFP4, "
                     "NVFP4, and INT4 of compressed-tensors, AWQ and GPTQ without desc_act",
                     layer_idx, td_dtype_name(w.dtype));
    }
    parts[i] = (td_expert_part){
        .shard = *shard,
        .offset = (uint64_t)((const uint8_t *)w.data - td_store_shard(store, *shard).bytes),
        .n_bytes = td_weight_data_bytes(&w)};
    if (found) {
      parts[i].n_rows = w.rows;
      parts[i].n_cols = w.cols;
      parts[i].is_awq = found->t->shape[0] == w.cols;
      p->has_turned = true;
    }
    parts[i].at = at + parts[i].offset % TD_DRIVE_ALIGN;
    at += td_expert_part_span(&parts[i]);
    p->n_bytes += parts[i].n_bytes;
  }
  if (at > p->slot_bytes) p->slot_bytes = at;
  return TD_OK;
}

td_status td_expert_places_open(td_expert_places *out, const td_model *model, td_err *err) {
  const td_model_config *c = td_model_config_of(model);
  const td_store *store = td_model_store(model);
  uint32_t shard = 0;
  *out = (td_expert_places){.n_layers = c->n_layers + (td_model_mtp(model) != NULL),
                            .n_experts = c->n_experts};
  out->parts = calloc((size_t)out->n_layers * c->n_experts * TD_EXPERT_PARTS + 1,
                      sizeof *out->parts);
  td_status st = out->parts ? TD_OK : td_fail(err, TD_ENOMEM, "out of memory: places of experts");
  all_turned all = {.n = 0};
  if (st == TD_OK) st = find_turned(&all, model, err);
  for (uint32_t i = 0; i < out->n_layers && st == TD_OK; i++) {
    const td_layer *layer = td_model_layer(model, i);
    for (uint32_t e = 0; layer->is_moe && e < c->n_experts && st == TD_OK; e++)
      st = place(out, store, &all, layer, i, e, &shard, err);
  }
  free(all.at);
  if (st == TD_OK && !out->n_bytes)
    st = td_fail(err, TD_EUNSUPPORTED, "the model has no routed experts to read from the drive");
  if (st != TD_OK) td_expert_places_close(out);
  return st;
}

void td_expert_places_close(td_expert_places *places) {
  free(places->parts);
  *places = (td_expert_places){0};
}
