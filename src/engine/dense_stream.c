// src/engine/dense_stream.c - streaming of dense weights, for an engine whose device has little
// room beside them.
// Every step copies them layer by layer into a slot for attention's and one for the MLP's. They
// share a stream with the copies of streamed experts, in the order of use: a layer's attention, its
// MLP, its experts. A slot is filled again as soon as the layer has no more use for it, except that
// the experts of the same layer come first.
#include <stdlib.h>

#include "engine/dense_slots.h"
#include "engine/engine_impl.h"
#include "engine/experts/expert_slots.h"

struct td_dense_stream {
  td_stream *stream;     // for the copies
  td_stream *own_stream; // the same, if no expert streams; else NULL
  char *ring;            // device memory
  size_t ring_bytes;
  size_t slot_at[TD_N_DENSE_PARTS];
  td_event *filled[TD_N_DENSE_PARTS], *freed[TD_N_DENSE_PARTS];
  td_layer *layers;      // [n_layers]: the model's, with addresses in the slots
  td_slot_copy *copies;  // of all layers and parts, in order
  uint32_t *first_copy;  // [n_layers * TD_N_DENSE_PARTS + 1]
  uint64_t *layer_bytes; // [n_layers], copied for the layer
  // The step in progress: the next layer to copy, and whether the slot's layer is in use.
  uint32_t next[TD_N_DENSE_PARTS];
  bool is_used[TD_N_DENSE_PARTS];
  uint64_t copied_bytes;
};

// ---- open and close -----------------------------------------------------------------------------

// Gives the layer's matrices of the part their addresses; the copies that bring them there follow
// the n_copies so far.
static uint32_t place_part(td_dense_stream *s, uint32_t layer_idx, td_dense_part part,
                           uint32_t n_copies) {
  td_weight *matrices[TD_DENSE_MAX_MATRICES];
  td_slot_part parts[TD_DENSE_MAX_PARTS], *order[TD_DENSE_MAX_PARTS];
  const uint32_t n = td_dense_matrices(&s->layers[layer_idx], part, matrices);
  td_slot slot = {.parts = parts,
                  .order = order,
                  .copies = s->copies + n_copies,
                  .n_parts = td_dense_list(parts, matrices, n)};
  td_slot_pack(&slot);
  for (uint32_t i = 0; i < n; i++)
    *matrices[i] = td_slot_placed(matrices[i], parts + i * TD_SLOT_MATRIX_PARTS,
                                  s->ring + s->slot_at[part]);
  for (uint32_t i = 0; i < slot.n_copies; i++)
    s->layer_bytes[layer_idx] += slot.copies[i].n_bytes;
  return n_copies + slot.n_copies;
}

static void place_layers(td_engine *e) {
  td_dense_stream *s = e->dense;
  const uint32_t n_layers = e->config->n_layers;
  uint32_t n_copies = 0, at = 0;
  for (uint32_t i = 0; i < n_layers; i++) {
    s->layers[i] = *td_model_layer(e->model, i);
    for (int part = 0; part < TD_N_DENSE_PARTS; part++) {
      s->first_copy[at++] = n_copies;
      if (i + e->opts.n_streamed_dense < n_layers) continue;
      n_copies = place_part(s, i, (td_dense_part)part, n_copies);
    }
  }
  s->first_copy[at] = n_copies;
}

static td_status open_ring(td_engine *e, td_err *err) {
  td_dense_stream *s = e->dense;
  const uint32_t n_layers = e->config->n_layers;
  td_dense_size *sizes = malloc(n_layers * sizeof *sizes);
  if (!sizes) return td_fail(err, TD_ENOMEM, "out of memory: places of dense weights");
  for (uint32_t i = 0; i < n_layers; i++)
    sizes[i] = td_dense_size_of(td_model_layer(e->model, i));
  for (int part = 1; part < TD_N_DENSE_PARTS; part++)
    s->slot_at[part] = s->slot_at[part - 1] + td_dense_slot_bytes(sizes, n_layers,
                                                                  e->opts.n_streamed_dense,
                                                                  (td_dense_part)(part - 1));
  s->ring_bytes = td_dense_ring_bytes(sizes, n_layers, e->opts.n_streamed_dense);
  free(sizes);
  return td_dev_alloc(e->dev, (void **)&s->ring, s->ring_bytes, err);
}

static td_status open_queue(td_engine *e, td_err *err) {
  td_dense_stream *s = e->dense;
  s->stream = td_expert_stream_queue(e);
  td_status st = s->stream ? TD_OK : td_stream_open(&s->own_stream, e->dev, err);
  if (!s->stream) s->stream = s->own_stream;
  for (int part = 0; part < TD_N_DENSE_PARTS; part++) {
    if (st == TD_OK) st = td_event_open(&s->filled[part], e->dev, err);
    if (st == TD_OK) st = td_event_open(&s->freed[part], e->dev, err);
  }
  return st;
}

td_status td_dense_stream_open(td_engine *e, td_err *err) {
  if (!e->opts.n_streamed_dense) return TD_OK;
  const uint32_t n = e->config->n_layers;
  TD_CHECK(e->opts.n_streamed_dense <= n && !e->opts.n_peers);
  td_dense_stream *s = e->dense = calloc(1, sizeof *s);
  if (!s) return td_fail(err, TD_ENOMEM, "out of memory");
  s->layers = malloc(n * sizeof *s->layers);
  s->copies = malloc((size_t)n * TD_N_DENSE_PARTS * TD_DENSE_MAX_PARTS * sizeof *s->copies);
  s->first_copy = malloc(((size_t)n * TD_N_DENSE_PARTS + 1) * sizeof *s->first_copy);
  s->layer_bytes = calloc(n, sizeof *s->layer_bytes);
  if (!s->layers || !s->copies || !s->first_copy || !s->layer_bytes)
    return td_fail(err, TD_ENOMEM, "out of memory: places of dense weights");
  td_status st = open_ring(e, err);
  if (st == TD_OK) st = open_queue(e, err);
  if (st == TD_OK) place_layers(e);
  return st;
}

void td_dense_stream_close(td_engine *e) {
  td_dense_stream *s = e->dense;
  if (!s) return;
  td_stream_close(s->own_stream);
  for (int part = 0; part < TD_N_DENSE_PARTS; part++) {
    td_event_close(s->filled[part]);
    td_event_close(s->freed[part]);
  }
  td_dev_free(e->dev, s->ring);
  free(s->layers);
  free(s->copies);
  free(s->first_copy);
  free(s->layer_bytes);
  free(s);
}

// ---- steps --------------------------------------------------------------------------------------

const td_layer *td_engine_layer(const td_engine *e, uint32_t layer_idx) {
  return e->dense ? &e->dense->layers[layer_idx] : td_model_layer(e->model, layer_idx);
}

bool td_engine_is_in_slot(const td_engine *e, const td_weight *w) {
  const td_dense_stream *s = e->dense;
  const char *data = w->data;
  return s && data >= s->ring && data < s->ring + s->ring_bytes;
}

const uint64_t *td_dense_stream_layer_bytes(const td_engine *e) {
  return e->dense ? e->dense->layer_bytes : NULL;
}

uint64_t td_dense_stream_copied_bytes(const td_engine *e) {
  return e->dense ? e->dense->copied_bytes : 0;
}

void td_dense_stream_begin_step(td_engine *e) {
  for (int part = 0; e->dense && part < TD_N_DENSE_PARTS; part++) {
    e->dense->next[part] = 0;
    e->dense->is_used[part] = false;
  }
}

// Copies the layer's part to its slot when nothing queued so far uses the slot.
static void fetch(td_engine *e, uint32_t layer_idx, td_dense_part part) {
  td_dense_stream *s = e->dense;
  TD_CHECK(!s->is_used[part]);
  s->next[part] = layer_idx + 1;
  const uint32_t *first = &s->first_copy[layer_idx * TD_N_DENSE_PARTS + part];
  if (first[0] == first[1]) return;
  td_stream_wait(s->stream, s->freed[part]);
  for (const td_slot_copy *c = s->copies + first[0]; c < s->copies + first[1]; c++) {
    td_op_copy(s->stream, s->ring + s->slot_at[part] + c->to, c->from, c->n_bytes);
    s->copied_bytes += c->n_bytes;
  }
  td_event_record(s->filled[part], s->stream);
}

void td_dense_stream_use(td_engine *e, uint32_t layer_idx, td_dense_part part) {
  td_dense_stream *s = e->dense;
  if (!s || !e->step.plan.streams_dense[layer_idx]) return;
  if (s->next[part] <= layer_idx) fetch(e, layer_idx, part);
  td_stream_wait(e->stream, s->filled[part]);
  s->is_used[part] = true;
}

void td_dense_stream_leave(td_engine *e, td_dense_part part) {
  td_dense_stream *s = e->dense;
  if (!s || !s->is_used[part]) return;
  td_event_record(s->freed[part], e->stream);
  s->is_used[part] = false;
}

void td_dense_stream_fetch_ahead(td_engine *e, uint32_t layer_idx) {
  td_dense_stream *s = e->dense;
  const uint32_t next = layer_idx + 1;
  if (!s || next == e->config->n_layers || !e->step.plan.streams_dense[next]) return;
  for (int part = 0; part < TD_N_DENSE_PARTS; part++)
    if (s->next[part] <= next) fetch(e, next, (td_dense_part)part);
}

td_status td_dense_stream_sync(td_engine *e, td_err *err) {
  return e->dense ? td_stream_sync(e->dense->stream, err) : TD_OK;
}
