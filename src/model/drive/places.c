// src/model/drive/places.c - finds experts' data in the shards, by the addresses that the model
// has.
#include "model/drive/places.h"

#include <stdlib.h>

#include "model/checkpoint/store.h"

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

static td_status place(td_expert_places *p, const td_store *store, const td_layer *layer,
                       uint32_t layer_idx, uint32_t expert, uint32_t *shard, td_err *err) {
  const td_weight *matrices[TD_EXPERT_PARTS] = {
      &layer->gate[expert], layer->up ? &layer->up[expert] : NULL, &layer->down[expert]};
  td_expert_part *parts = (td_expert_part *)td_expert_parts(p, layer_idx, expert);
  uint64_t at = 0;
  for (int i = 0; i < TD_EXPERT_PARTS; i++) {
    const td_weight *w = matrices[i];
    if (!w || !w->rows) continue;
    if (!find_shard(store, w, shard)) {
      return td_fail(err, TD_EUNSUPPORTED,
                     "the experts of layer %u are laid out anew when they are loaded (%s), so they "
                     "cannot be read from the drive one by one; those of a checkpoint that tandem "
                     "quantize makes of the model's BF16 or FP8 weights can, as can FP8, MXFP4, "
                     "NVFP4 and INT4 of compressed-tensors",
                     layer_idx, td_dtype_name(w->dtype));
    }
    parts[i] = (td_expert_part){
        .shard = *shard,
        .offset = (uint64_t)((const uint8_t *)w->data - td_store_shard(store, *shard).bytes),
        .n_bytes = td_weight_data_bytes(w)};
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
  for (uint32_t i = 0; i < out->n_layers && st == TD_OK; i++) {
    const td_layer *layer = td_model_layer(model, i);
    for (uint32_t e = 0; layer->is_moe && e < c->n_experts && st == TD_OK; e++)
      st = place(out, store, layer, i, e, &shard, err);
  }
  if (st == TD_OK && !out->n_bytes)
    st = td_fail(err, TD_EUNSUPPORTED, "the model has no routed experts to read from the drive");
  if (st != TD_OK) td_expert_places_close(out);
  return st;
}

void td_expert_places_close(td_expert_places *places) {
  free(places->parts);
  *places = (td_expert_places){0};
}
