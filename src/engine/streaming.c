// src/engine/streaming.c - experts of long prompts, on a device that has no room for them: they
// pass through its memory, group by group, layer by layer, and it computes each group while the
// next is on its way. Every byte crosses once a step, however many tokens there are, so this is the
// quicker way from some number of tokens on; below that, experts are computed where they lie.
//
// A ring of slots is filled in an order that depends on nothing but the model, by a stream of its
// own, as far ahead as slots are free: also while the device is busy with attention.
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/log.h"
#include "engine/engine_impl.h"

enum {
  N_SLOTS = 3,        // one is computed, one filled, one waits
  PART_ALIGN = 256,   // see td_dev_takes_on_device
  TRIAL_TOKENS = 256, // of a prompt, on the other device
  LEAST_TOKENS = 32,
};

typedef enum { LAYER_UNKNOWN, LAYER_TAKEN, LAYER_LEFT } layer_state;

// The experts of a layer.
typedef struct {
  layer_state state;
  bool is_registered;          // or never will be: see td_dev_is_pinning
  uint32_t first_slot;         // of the first group; the others follow, round and round
  uint32_t group;              // experts a slot holds; 0: not one
  td_weight *gate, *up, *down; // [n_experts], as they are in their slots; one array
} streamed_layer;

struct td_engine_streaming {
  td_stream *stream; // of copies
  td_event *filled[N_SLOTS], *freed[N_SLOTS];
  char *ring; // device memory
  size_t slot_bytes;
  float *sum;             // device memory: [max_step_tokens][dim]
  streamed_layer *layers; // [n_layers]
  uint32_t least_tokens;  // of prompts, in a step that streams
};

// ---- where a matrix goes ------------------------------------------------------------------------

static size_t align_up(size_t n) {
  return (n + PART_ALIGN - 1) / PART_ALIGN * PART_ALIGN;
}

static size_t slot_bytes_of(const td_weight *w) {
  return align_up(td_weight_data_bytes(w)) + align_up(td_weight_scale_bytes(w)) +
         align_up(td_weight_zero_bytes(w));
}

// The matrix as it is in device memory, from *at on, which then is behind it.
static td_weight placed(const td_weight *w, char **at) {
  td_weight out = *w;
  out.data = *at;
  *at += align_up(td_weight_data_bytes(w));
  if (w->scale) out.scale = *at;
  *at += align_up(td_weight_scale_bytes(w));
  if (w->zero) out.zero = (const uint32_t *)*at;
  *at += align_up(td_weight_zero_bytes(w));
  return out;
}

static size_t expert_bytes(const td_layer *layer, uint32_t e) {
  return slot_bytes_of(&layer->gate[e]) + slot_bytes_of(&layer->up[e]) +
         slot_bytes_of(&layer->down[e]);
}

static size_t largest_expert(const td_layer *layer, uint32_t n_experts) {
  size_t most = 0;
  for (uint32_t e = 0; e < n_experts; e++) {
    size_t n = expert_bytes(layer, e);
    if (n > most) most = n;
  }
  return most;
}

static td_status place_layer(td_engine *e, const td_layer *layer, streamed_layer *out,
                             uint32_t *n_groups, td_err *err) {
  const td_engine_streaming *s = e->streaming;
  const uint32_t n = e->config->n_experts;
  const size_t stride = largest_expert(layer, n), fitting = s->slot_bytes / stride;
  out->group = fitting < n ? (uint32_t)fitting : n;
  out->first_slot = *n_groups % N_SLOTS;
  if (out->group == 0) return TD_OK;
  out->gate = malloc(3 * (size_t)n * sizeof *out->gate);
  if (!out->gate) return td_fail(err, TD_ENOMEM, "out of memory: places of streamed experts");
  out->up = out->gate + n;
  out->down = out->up + n;
  for (uint32_t i = 0; i < n; i++) {
    uint32_t slot = (out->first_slot + i / out->group) % N_SLOTS;
    char *at = s->ring + slot * s->slot_bytes + i % out->group * stride;
    out->gate[i] = placed(&layer->gate[i], &at);
    out->up[i] = placed(&layer->up[i], &at);
    out->down[i] = placed(&layer->down[i], &at);
  }
  *n_groups += (n + out->group - 1) / out->group;
  return TD_OK;
}

static td_status place_layers(td_engine *e, td_err *err) {
  td_engine_streaming *s = e->streaming;
  s->layers = calloc(e->config->n_layers, sizeof *s->layers);
  if (!s->layers) return td_fail(err, TD_ENOMEM, "out of memory: places of streamed experts");
  uint32_t n_groups = 0;
  td_status st = TD_OK;
  for (uint32_t i = 0; i < e->config->n_layers && st == TD_OK; i++) {
    if (!td_engine_is_aside(e, i)) continue;
    st = place_layer(e, td_model_layer(e->model, i), &s->layers[i], &n_groups, err);
  }
  return st;
}

// ---- passing through ----------------------------------------------------------------------------

// Whether the device takes all of the layer's experts as they are. Looked at once: of some formats
// that means reading all scales.
static bool is_taken(td_engine *e, uint32_t layer_idx) {
  streamed_layer *l = &e->streaming->layers[layer_idx];
  const td_layer *layer = td_model_layer(e->model, layer_idx);
  if (l->state == LAYER_UNKNOWN) {
    bool all = l->group > 0;
    for (uint32_t i = 0; all && i < e->config->n_experts; i++) {
      all = td_dev_takes_on_device(e->dev, &layer->gate[i]) &&
            td_dev_takes_on_device(e->dev, &layer->up[i]) &&
            td_dev_takes_on_device(e->dev, &layer->down[i]);
    }
    l->state = all ? LAYER_TAKEN : LAYER_LEFT;
  }
  return l->state == LAYER_TAKEN;
}

static bool is_pinning(td_engine *e, const td_weight *w) {
  return td_dev_is_pinning(e->dev, w->data, td_weight_data_bytes(w)) |
         td_dev_is_pinning(e->dev, w->scale, td_weight_scale_bytes(w)) |
         td_dev_is_pinning(e->dev, w->zero, td_weight_zero_bytes(w));
}

// Whether the first n experts of the layer are copied as fast as ever; all are asked for.
static bool is_registered(td_engine *e, uint32_t layer_idx, uint32_t n) {
  const td_layer *layer = td_model_layer(e->model, layer_idx);
  bool pending = false;
  for (uint32_t i = 0; i < n; i++) {
    pending |= is_pinning(e, &layer->gate[i]);
    pending |= is_pinning(e, &layer->up[i]);
    pending |= is_pinning(e, &layer->down[i]);
  }
  return !pending;
}

static void copy_matrix(td_stream *stream, const td_weight *to, const td_weight *from) {
  const size_t n_scale = td_weight_scale_bytes(from), n_zero = td_weight_zero_bytes(from);
  td_op_copy(stream, (void *)to->data, from->data, td_weight_data_bytes(from));
  if (n_scale) td_op_copy(stream, (void *)to->scale, from->scale, n_scale);
  if (n_zero) td_op_copy(stream, (void *)to->zero, from->zero, n_zero);
}

// The slot that the group of experts from first on is in, once it is free, and they are.
static uint32_t fill_slot(td_engine *e, uint32_t layer_idx, uint32_t first, uint32_t n) {
  td_engine_streaming *s = e->streaming;
  const streamed_layer *l = &s->layers[layer_idx];
  const td_layer *layer = td_model_layer(e->model, layer_idx);
  const uint32_t slot = (l->first_slot + first / l->group) % N_SLOTS;
  td_stream_wait(s->stream, s->freed[slot]);
  for (uint32_t i = first; i < first + n; i++) {
    copy_matrix(s->stream, &l->gate[i], &layer->gate[i]);
    copy_matrix(s->stream, &l->up[i], &layer->up[i]);
    copy_matrix(s->stream, &l->down[i], &layer->down[i]);
  }
  td_event_record(s->filled[slot], s->stream);
  return slot;
}

static uint32_t group_at(const td_engine *e, const streamed_layer *l, uint32_t first) {
  uint32_t left = e->config->n_experts - first;
  return left < l->group ? left : l->group;
}

bool td_engine_streams(td_engine *e, const td_engine_part *p, uint32_t layer_idx) {
  if (!e->streaming) return false;
  if (p->groups[GROUP_PREFILL].view.n_tokens < e->streaming->least_tokens) return false;
  if (!is_taken(e, layer_idx)) return false;
  streamed_layer *l = &e->streaming->layers[layer_idx];
  if (!l->is_registered) l->is_registered = is_registered(e, layer_idx, e->config->n_experts);
  return l->is_registered;
}

uint32_t td_engine_stream_tokens(const td_engine *e) {
  const bool does = e->streaming && e->streaming->least_tokens <= e->opts.max_step_tokens;
  return does ? e->streaming->least_tokens : 0;
}

void td_engine_stream_experts(td_engine *e, const td_engine_part *p, uint32_t layer_idx,
                              const td_moe_args *routed) {
  td_engine_streaming *s = e->streaming;
  const streamed_layer *l = &s->layers[layer_idx];
  td_moe_args args = *routed;
  args.out = s->sum;
  args.out_f32 = args.are_on_device = true;
  args.n_routed = args.n_experts;
  for (uint32_t first = 0; first < e->config->n_experts; first += l->group) {
    args.first_expert = first;
    args.n_experts = group_at(e, l, first);
    args.gate = l->gate + first;
    args.up = l->up + first;
    args.down = l->down + first;
    args.accumulate = first > 0;
    const uint32_t slot = fill_slot(e, layer_idx, first, args.n_experts);
    td_stream_wait(e->stream, s->filled[slot]);
    td_op_moe(e->stream, &args);
    td_event_record(s->freed[slot], e->stream);
  }
  td_op_add_f32(e->stream, p->delta, s->sum, (size_t)p->n_tokens * e->config->dim);
}

td_status td_engine_sync_streaming(td_engine *e, td_err *err) {
  return e->streaming ? td_stream_sync(e->streaming->stream, err) : TD_OK;
}

// ---- from how many tokens on --------------------------------------------------------------------

// Seconds for a layer's experts to be copied, as its first group tells.
static double copy_time(td_engine *e, uint32_t layer_idx, td_err *err, td_status *st) {
  td_engine_streaming *s = e->streaming;
  const streamed_layer *l = &s->layers[layer_idx];
  const uint32_t n = group_at(e, l, 0);
  const double begin = td_clock_s();
  fill_slot(e, layer_idx, 0, n);
  *st = td_stream_sync(s->stream, err);
  return (td_clock_s() - begin) * e->config->n_experts / n;
}

// Seconds for n tokens of a prompt, spread over all experts, on the other device.
static double aside_time(td_engine *e, uint32_t layer_idx, uint32_t n, td_err *err, td_status *st) {
  const double begin = td_clock_s();
  const td_moe_args args = td_engine_trial_aside(e, layer_idx, n);
  td_op_moe(e->side.stream, &args);
  *st = td_stream_sync(e->side.stream, err);
  return td_clock_s() - begin;
}

static void wait_registered(td_engine *e, uint32_t layer_idx, uint32_t n) {
  const td_layer *layer = td_model_layer(e->model, layer_idx);
  for (uint32_t i = 0; i < n && !is_registered(e, layer_idx, n); i++) {
    const td_weight *matrices[] = {&layer->gate[i], &layer->up[i], &layer->down[i]};
    for (size_t k = 0; k < TD_COUNT(matrices); k++) {
      td_dev_wait_pinned(e->dev, matrices[k]->data, td_weight_data_bytes(matrices[k]));
      td_dev_wait_pinned(e->dev, matrices[k]->scale, td_weight_scale_bytes(matrices[k]));
      td_dev_wait_pinned(e->dev, matrices[k]->zero, td_weight_zero_bytes(matrices[k]));
    }
  }
}

// Both are done twice: at first, weights may come from the disk.
static td_status measure(td_engine *e, uint32_t layer_idx, td_err *err) {
  td_engine_streaming *s = e->streaming;
  uint32_t n = e->side.most_tokens < TRIAL_TOKENS ? e->side.most_tokens : TRIAL_TOKENS;
  double copying = 0, aside = 0, bytes = 0;
  wait_registered(e, layer_idx, group_at(e, &s->layers[layer_idx], 0));
  td_status st = TD_OK;
  for (int i = 0; i < 2 && st == TD_OK; i++) {
    copying = copy_time(e, layer_idx, err, &st);
    if (st == TD_OK) aside = aside_time(e, layer_idx, n, err, &st);
  }
  if (st != TD_OK) return st;
  s->least_tokens = LEAST_TOKENS;
  while (s->least_tokens <= e->opts.max_step_tokens && s->least_tokens * aside < n * copying)
    s->least_tokens += s->least_tokens / 4;
  const td_layer *layer = td_model_layer(e->model, layer_idx);
  for (uint32_t i = 0; i < e->config->n_experts; i++)
    bytes += (double)expert_bytes(layer, i);
  n = e->opts.max_step_tokens;
  const bool pays = s->least_tokens <= n;
  td_info("%s: experts come at %.1f GB/s, which %s %u tokens of prompts in a step",
          td_dev_name(e->dev), bytes / copying * 1e-9, pays ? "pays from" : "does not pay with",
          pays ? s->least_tokens : n);
  return TD_OK;
}

static td_status choose_least(td_engine *e, td_err *err) {
  e->streaming->least_tokens = e->opts.stream_tokens;
  if (e->opts.stream_tokens) return TD_OK;
  for (uint32_t i = 0; i < e->config->n_layers; i++) {
    if (is_taken(e, i)) return measure(e, i, err);
  }
  e->streaming->least_tokens = UINT32_MAX;
  return TD_OK;
}

// ---- open and close -----------------------------------------------------------------------------

td_status td_engine_open_streaming(td_engine *e, td_err *err) {
  if (!e->opts.stream_bytes || !e->side.dev) return TD_OK;
  td_engine_streaming *s = e->streaming = calloc(1, sizeof *s);
  if (!s) return td_fail(err, TD_ENOMEM, "out of memory");
  s->slot_bytes = e->opts.stream_bytes / N_SLOTS / PART_ALIGN * PART_ALIGN;
  size_t sum_bytes = (size_t)e->opts.max_step_tokens * e->config->dim * sizeof *s->sum;
  td_status st = td_stream_open(&s->stream, e->dev, err);
  for (int i = 0; i < N_SLOTS && st == TD_OK; i++) {
    st = td_event_open(&s->filled[i], e->dev, err);
    if (st == TD_OK) st = td_event_open(&s->freed[i], e->dev, err);
  }
  if (st == TD_OK) st = td_dev_alloc(e->dev, (void **)&s->ring, N_SLOTS * s->slot_bytes, err);
  if (st == TD_OK) st = td_dev_alloc(e->dev, (void **)&s->sum, sum_bytes, err);
  if (st == TD_OK) st = place_layers(e, err);
  if (st == TD_OK) st = choose_least(e, err);
  return st;
}

void td_engine_close_streaming(td_engine *e) {
  td_engine_streaming *s = e->streaming;
  if (!s) return;
  td_stream_close(s->stream);
  for (int i = 0; i < N_SLOTS; i++) {
    td_event_close(s->filled[i]);
    td_event_close(s->freed[i]);
  }
  td_dev_free(e->dev, s->ring);
  td_dev_free(e->dev, s->sum);
  for (uint32_t i = 0; s->layers && i < e->config->n_layers; i++)
    free(s->layers[i].gate);
  free(s->layers);
  free(s);
}
