// src/engine/experts/expert_stream.c - streaming of experts to a device that has no room for them,
// for prefill. Experts pass through the device's memory group by group, layer by layer; it computes
// one group while the next is copied. All experts are copied once per step, however many tokens it
// has, so streaming is faster than offload from some number of tokens on (the break-even), which
// the caller gives: the two round differently, so no time measured here may choose between them.
//
// Copies fill a ring of slots on their own stream, as far ahead as slots are free, also during
// attention. The order of copies depends on the model alone.
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/units.h"
#include "engine/engine_impl.h"
#include "engine/experts/expert_drive.h"
#include "engine/experts/expert_feed.h"
#include "engine/experts/expert_slots.h"
#include "engine/experts/ranks.h"

enum {
  MATRIX_PARTS = TD_SLOT_MATRIX_PARTS,
  EXPERT_PARTS = TD_SLOT_EXPERT_PARTS,
  MIN_SLOTS = 2, // one computing, one filling
  // A group of experts is more kernels the more tokens the step has, and a stream holds about a
  // thousand: so many tokens times groups are queued before a caller that must not wait.
  MAX_TOKENS_QUEUED = 384 << 10,
  // Copies that another engine's copies may have to wait for: about 0.1 ms each, or more where the
  // copy stream would hold more of them than MAX_PIECES.
  PIECE_BYTES = 4 << 20,
  MAX_PIECES = TD_STREAM_DEPTH / 2,
};

typedef enum { LAYER_UNKNOWN, LAYER_TAKEN, LAYER_LEFT } layer_state;

// A layer's experts in groups; a group shares a slot.
typedef struct {
  layer_state state;
  bool is_registered;          // no copy waits for registration any more, see td_dev_is_pinning
  uint32_t first_slot;         // slot of the first group; the others follow, modulo n_slots
  td_weight *gate, *up, *down; // [n_experts] with addresses in their slots; one allocation
  td_slot_copy *copies;        // copies of all groups, in order
  uint32_t *first_copy;        // [n_groups + 1] index of each group's first copy
} streamed_layer;

typedef struct {
  uint32_t slot;
  uint64_t n_bytes, queued_ns; // when
} queued_group;

struct td_expert_stream {
  td_stream *stream;    // for the copies
  td_expert_feed *feed; // experts come from the drive; NULL: they are in memory
  uint32_t n_fed;       // experts that it reads at once
  uint32_t group;       // experts per slot; 0: a slot cannot hold one
  uint32_t n_groups;    // groups per layer
  uint32_t n_slots;
  size_t slot_bytes;
  td_event **filled, **freed; // [n_slots] each; one allocation
  char *ring;                 // device memory
  float *sum;                 // device memory: [max_step_tokens][dim]
  streamed_layer *layers;     // [n_layers]
  td_slot packing;            // scratch for packing one group
  uint32_t break_even_tokens; // prompt tokens from which a step streams
  // Groups that were not seen computed, oldest first: n_queued of [n_slots], from first_queued on,
  // modulo n_slots. The first n_copied of them were seen copied.
  queued_group *queue;
  uint32_t n_queued, first_queued, n_copied;
  td_stream_progress progress;
  uint64_t copied_ns; // when the last group was seen copied
  size_t piece_bytes; // of the largest copy that is queued next; SIZE_MAX: of any size
};

// ---- where each matrix goes ---------------------------------------------------------------------

// Bytes that the largest one takes in a slot, or of its scales and zero points alone.
static size_t largest_expert(const td_engine *e, bool only_scales) {
  td_slot_part parts[EXPERT_PARTS];
  size_t most = 0;
  for (uint32_t i = 0; i < e->config->n_layers; i++) {
    if (!td_engine_is_offloaded(e, i)) continue;
    for (uint32_t k = 0; k < e->config->n_experts; k++) {
      size_t n = 0;
      td_slot_list_expert(parts, td_model_layer(e->model, i), k);
      for (uint32_t p = 0; p < EXPERT_PARTS; p++)
        if (!only_scales || p % MATRIX_PARTS)
          n += parts[p].n_bytes + (only_scales ? 0 : TD_SLOT_ALIGN);
      if (n > most) most = n;
    }
  }
  return most;
}

static uint32_t group_at(const td_engine *e, uint32_t first) {
  const uint32_t left = e->config->n_experts - first;
  return left < e->streaming->group ? left : e->streaming->group;
}

// Packs the group that begins with expert first; returns the bytes of its slot.
static size_t pack_group(td_engine *e, const td_layer *layer, uint32_t first) {
  td_slot *slot = &e->streaming->packing;
  const uint32_t n = group_at(e, first);
  for (uint32_t i = 0; i < n; i++)
    td_slot_list_expert(slot->parts + i * EXPERT_PARTS, layer, first + i);
  slot->n_parts = n * EXPERT_PARTS;
  return e->opts.arena ? td_slot_pack_apart(slot) : td_slot_pack(slot);
}

static td_status alloc_layer(td_engine *e, streamed_layer *out, td_err *err) {
  const size_t n = e->config->n_experts;
  out->gate = malloc(3 * n * sizeof *out->gate);
  out->copies = malloc(n * EXPERT_PARTS * sizeof *out->copies);
  out->first_copy = malloc((e->streaming->n_groups + 1) * sizeof *out->first_copy);
  if (out->gate && out->copies && out->first_copy) return TD_OK;
  return td_fail(err, TD_ENOMEM, "out of memory: places of streamed experts");
}

static td_status place_layer(td_engine *e, const td_layer *layer, streamed_layer *out,
                             td_err *err) {
  const td_expert_stream *s = e->streaming;
  const td_slot *slot = &s->packing;
  td_status st = alloc_layer(e, out, err);
  if (st != TD_OK) return st;
  out->up = out->gate + e->config->n_experts;
  out->down = out->up + e->config->n_experts;
  uint32_t n_copies = 0;
  for (uint32_t g = 0; g < s->n_groups; g++) {
    const uint32_t first = g * s->group;
    const char *base = s->ring + (out->first_slot + g) % s->n_slots * s->slot_bytes;
    pack_group(e, layer, first);
    for (uint32_t i = 0; i < slot->n_parts / EXPERT_PARTS; i++) {
      const td_slot_part *parts = slot->parts + i * EXPERT_PARTS;
      const uint32_t k = first + i;
      out->gate[k] = td_slot_placed(&layer->gate[k], parts, base);
      if (layer->up) out->up[k] = td_slot_placed(&layer->up[k], parts + MATRIX_PARTS, base);
      out->down[k] = td_slot_placed(&layer->down[k], parts + 2 * MATRIX_PARTS, base);
    }
    out->first_copy[g] = n_copies;
    memcpy(out->copies + n_copies, slot->copies, slot->n_copies * sizeof *slot->copies);
    n_copies += slot->n_copies;
  }
  out->first_copy[s->n_groups] = n_copies;
  return TD_OK;
}

static td_status place_layers(td_engine *e, td_err *err) {
  td_expert_stream *s = e->streaming;
  uint32_t n_groups = 0;
  td_status st = TD_OK;
  for (uint32_t i = 0; i < e->config->n_layers && st == TD_OK; i++) {
    if (!td_engine_is_offloaded(e, i)) continue;
    s->layers[i].first_slot = n_groups % s->n_slots;
    n_groups += s->n_groups;
    st = place_layer(e, td_model_layer(e->model, i), &s->layers[i], err);
  }
  return st;
}

// Bytes of the largest slot with streaming->group experts in each.
static size_t largest_slot(td_engine *e) {
  size_t most = 0;
  for (uint32_t i = 0; i < e->config->n_layers; i++) {
    if (!td_engine_is_offloaded(e, i)) continue;
    for (uint32_t first = 0; first < e->config->n_experts; first += e->streaming->group) {
      const size_t n = pack_group(e, td_model_layer(e->model, i), first);
      if (n > most) most = n;
    }
  }
  return most;
}

static td_status open_packing(td_engine *e, td_err *err) {
  td_slot *slot = &e->streaming->packing;
  const size_t n = (size_t)e->config->n_experts * EXPERT_PARTS;
  slot->parts = malloc(n * sizeof *slot->parts);
  slot->order = malloc(n * sizeof *slot->order);
  slot->copies = malloc(n * sizeof *slot->copies);
  slot->memory = td_model_memory(e->model, &slot->memory_bytes);
  if (slot->parts && slot->order && slot->copies) return TD_OK;
  return td_fail(err, TD_ENOMEM, "out of memory: places of streamed experts");
}

// Chooses the experts per slot so that the ring has several slots. group becomes 0 where there is
// no room.
static void choose_slots(td_engine *e) {
  td_expert_stream *s = e->streaming;
  const size_t ring_bytes = e->opts.stream_bytes, expert = largest_expert(e, false);
  s->group = td_slot_experts(ring_bytes, expert, e->config->n_experts);
  for (; s->group; s->group--) {
    s->slot_bytes = largest_slot(e);
    s->n_slots = (uint32_t)(ring_bytes / s->slot_bytes);
    if (s->n_slots >= MIN_SLOTS) break;
  }
  if (!s->group) {
    td_warn("%s: no prefill streams experts: %.0f MiB of its memory are left for them, and two of "
            "them take %.0f MiB; a smaller --ctx-size or --prefill-chunk leaves more",
            td_dev_name(e->dev), td_mib(ring_bytes), 2 * td_mib(expert));
    return;
  }
  s->n_groups = (e->config->n_experts + s->group - 1) / s->group;
  td_debug("%s: a ring of %u slots of %u experts, %s", td_dev_name(e->dev), s->n_slots, s->group,
           td_size((double)s->n_slots * (double)s->slot_bytes).text);
}

// ---- streaming a layer --------------------------------------------------------------------------

// Whether the device takes all of the layer's experts in their stored format. Cached, because for
// some formats the check scans all scales.
static bool is_taken(td_engine *e, uint32_t layer_idx) {
  streamed_layer *l = &e->streaming->layers[layer_idx];
  const td_layer *layer = td_model_layer(e->model, layer_idx);
  if (l->state == LAYER_UNKNOWN) {
    bool all = l->gate != NULL;
    for (uint32_t i = 0; all && i < e->config->n_experts; i++) {
      all = td_dev_supports_device_weights(e->dev, &layer->gate[i]) &&
            (!layer->up || td_dev_supports_device_weights(e->dev, &layer->up[i])) &&
            td_dev_supports_device_weights(e->dev, &layer->down[i]);
    }
    l->state = all ? LAYER_TAKEN : LAYER_LEFT;
  }
  return l->state == LAYER_TAKEN;
}

// Whether copies of the layer's first n_groups groups are at full speed. Requests registration of
// the rest.
static bool is_registered(td_engine *e, uint32_t layer_idx, uint32_t n_groups) {
  const streamed_layer *l = &e->streaming->layers[layer_idx];
  bool pending = false;
  if (e->opts.arena) return true; // nothing is copied from where the model has them
  for (uint32_t i = 0; i < l->first_copy[n_groups]; i++)
    pending |= td_dev_is_pinning(e->dev, l->copies[i].from, l->copies[i].n_bytes);
  return !pending;
}

static queued_group *queued_at(const td_expert_stream *s, uint32_t i) {
  return &s->queue[(s->first_queued + i) % s->n_slots];
}

// The oldest group that was not seen copied is.
static void note_copied(td_expert_stream *s) {
  const queued_group *g = queued_at(s, s->n_copied++);
  const uint64_t now = td_clock_ns();
  s->progress.copied_bytes += g->n_bytes;
  s->progress.copying_ns += now - (g->queued_ns > s->copied_ns ? g->queued_ns : s->copied_ns);
  s->copied_ns = now;
}

// The oldest group is computed, or nobody will ask.
static void drop_oldest(td_expert_stream *s) {
  if (!s->n_copied) note_copied(s);
  s->first_queued = (s->first_queued + 1) % s->n_slots;
  s->n_queued--;
  s->n_copied--;
}

static void poll(td_expert_stream *s) {
  while (s->n_copied < s->n_queued && td_event_is_done(s->filled[queued_at(s, s->n_copied)->slot]))
    note_copied(s);
  while (s->n_copied && td_event_is_done(s->freed[queued_at(s, 0)->slot]))
    drop_oldest(s);
}

// ---- experts from the drive ---------------------------------------------------------------------

// Experts from `first` on, to the end of their group at most: as many as the feed reads at once.
static td_expert_range range_from(const td_engine *e, uint32_t layer_idx, uint32_t first) {
  const td_expert_stream *s = e->streaming;
  const uint32_t group = first / s->group * s->group, left = group + group_at(e, group) - first;
  return (td_expert_range){
      .layer_idx = layer_idx, .first = first, .n = left < s->n_fed ? left : s->n_fed};
}

// The range that streams behind this one in the step. False: none does.
static bool find_next(const td_engine *e, td_expert_range *out, const td_expert_range *at) {
  uint32_t layer_idx = at->layer_idx, first = at->first + at->n;
  if (first == e->config->n_experts) {
    first = 0;
    do
      layer_idx++;
    while (layer_idx < e->config->n_layers && e->step.plan.way[layer_idx] != TD_LAYER_STREAMED);
  }
  if (layer_idx < e->config->n_layers) *out = range_from(e, layer_idx, first);
  return layer_idx < e->config->n_layers;
}

// Whether the next group to queue, or what is read at once of it, has been read.
static bool has_landed(td_engine *e) {
  const td_engine_cursor *at = &e->step.cursor;
  td_expert_range range, next;
  if (!e->streaming->feed || at->group == at->n_groups) return true;
  range = range_from(e, at->layer_idx - 1, at->group * e->streaming->group);
  return td_expert_feed_poll(e->streaming->feed, &range,
                             find_next(e, &next, &range) ? &next : NULL);
}

// ---- queueing groups ----------------------------------------------------------------------------

static size_t piece_bytes(const td_engine *e, uint64_t ahead_bytes) {
  const size_t usual = e->opts.stream_piece_bytes ? e->opts.stream_piece_bytes : PIECE_BYTES;
  return ahead_bytes / MAX_PIECES > usual ? ahead_bytes / MAX_PIECES : usual;
}

bool td_engine_may_queue_group(td_engine *e, uint64_t ahead_bytes) {
  td_expert_stream *s = e->streaming;
  s->piece_bytes = SIZE_MAX;
  if (ahead_bytes == UINT64_MAX) return true;
  s->piece_bytes = piece_bytes(e, ahead_bytes);
  poll(s);
  const uint32_t fitting = MAX_TOKENS_QUEUED / e->step.n_tokens;
  const uint32_t most = fitting < MIN_SLOTS ? MIN_SLOTS : fitting;
  if (!ahead_bytes || s->n_queued == s->n_slots || s->n_queued >= most || !has_landed(e))
    return false;
  return s->n_copied == s->n_queued ||
         s->progress.queued_bytes - s->progress.copied_bytes < ahead_bytes;
}

void td_expert_stream_wait(td_engine *e) {
  const td_expert_stream *s = e->streaming;
  if (s->n_copied < s->n_queued)
    td_event_sync(s->filled[queued_at(s, s->n_copied)->slot]);
  else if (s->n_queued)
    td_event_sync(s->freed[queued_at(s, 0)->slot]);
  else if (s->feed)
    td_expert_feed_wait(s->feed);
}

static void copy_in_pieces(td_expert_stream *s, char *to, const char *from, size_t n_bytes) {
  for (size_t at = 0, n; at < n_bytes; at += n) {
    n = n_bytes - at < s->piece_bytes ? n_bytes - at : s->piece_bytes;
    td_op_copy(s->stream, to + at, from + at, n);
  }
}

// Copies n parts to the slot at base. taken: the experts whose parts they are, with their matrices
// in the arena; NULL: copies know where all is.
static uint64_t copy_parts(td_engine *e, char *base, const td_slot_copy *copies, uint32_t n,
                           uint32_t layer_idx, const td_taken_expert *taken) {
  uint64_t n_bytes = 0;
  char *scales = taken ? td_expert_feed_scales(e->streaming->feed) : NULL;
  for (uint32_t i = 0; i < n; i++) {
    const td_slot_copy *c = &copies[i];
    const uint32_t part = i % EXPERT_PARTS;
    const void *from = c->from;
    if (taken && part % MATRIX_PARTS == 0) {
      from = td_expert_arena_data(e->opts.arena, layer_idx, &taken[i / EXPERT_PARTS],
                                  (int)part / MATRIX_PARTS);
    } else if (taken && c->n_bytes) {
      from = memcpy(scales, c->from, c->n_bytes);
      scales += c->n_bytes;
    }
    copy_in_pieces(e->streaming, base + c->to, from, c->n_bytes);
    n_bytes += c->n_bytes;
  }
  return n_bytes;
}

// The group's experts are copied as they are read.
static uint64_t copy_from_drive(td_engine *e, char *base, const td_slot_copy *copies,
                                uint32_t layer_idx, uint32_t group) {
  td_expert_stream *s = e->streaming;
  const uint32_t first = group * s->group, end = first + group_at(e, first);
  uint64_t n_bytes = 0;
  for (uint32_t at = first; at < end;) {
    const td_expert_range range = range_from(e, layer_idx, at);
    td_expert_range next;
    const td_taken_expert *taken = td_expert_feed_await(s->feed, &range,
                                                        find_next(e, &next, &range) ? &next : NULL);
    td_expert_drive_fail_missing(e, taken, range.n);
    n_bytes += copy_parts(e, base, copies + (at - first) * EXPERT_PARTS, range.n * EXPERT_PARTS,
                          layer_idx, taken);
    td_expert_feed_copied(s->feed, s->stream);
    at += range.n;
  }
  return n_bytes;
}

// Waits for the group's slot to be free, copies the group there and returns the slot's index.
static uint32_t fill_slot(td_engine *e, uint32_t layer_idx, uint32_t group) {
  td_expert_stream *s = e->streaming;
  const streamed_layer *l = &s->layers[layer_idx];
  const uint32_t slot = (l->first_slot + group) % s->n_slots;
  char *base = s->ring + slot * s->slot_bytes;
  const td_slot_copy *copies = l->copies + l->first_copy[group];
  td_stream_wait(s->stream, s->freed[slot]);
  const uint64_t n_bytes = s->feed ? copy_from_drive(e, base, copies, layer_idx, group)
                                   : copy_parts(e, base, copies,
                                                l->first_copy[group + 1] - l->first_copy[group],
                                                layer_idx, NULL);
  td_event_record(s->filled[slot], s->stream);
  if (s->n_queued == s->n_slots) drop_oldest(s);
  *queued_at(s, s->n_queued++) = (queued_group){slot, n_bytes, td_clock_ns()};
  s->progress.queued_bytes += n_bytes;
  if (e->is_confined) s->progress.confined_bytes += n_bytes;
  return slot;
}

bool td_engine_can_stream(td_engine *e, uint32_t layer_idx) {
  if (!is_taken(e, layer_idx)) return false;
  // Copies are slower until then. That the other device computed the layer meanwhile would make its
  // rounding a matter of time.
  streamed_layer *l = &e->streaming->layers[layer_idx];
  if (!l->is_registered) l->is_registered = is_registered(e, layer_idx, e->streaming->n_groups);
  return true;
}

uint32_t td_engine_stream_tokens(const td_engine *e) {
  const bool does = e->streaming && e->streaming->break_even_tokens <= e->opts.max_step_tokens;
  return does ? e->streaming->break_even_tokens : 0;
}

bool td_engine_streams_all(td_engine *e) {
  if (!td_engine_stream_tokens(e)) return false;
  for (uint32_t i = 0; i < e->config->n_layers; i++)
    if (td_engine_is_offloaded(e, i) && !td_engine_can_stream(e, i)) return false;
  return true;
}

td_stream_progress td_engine_stream_progress(const td_engine *e) {
  td_stream_progress progress = {.queued_bytes = 0};
  if (e->streaming) progress = e->streaming->progress;
  progress.dense_bytes = td_dense_stream_copied_bytes(e);
  return progress;
}

// Experts [*first, *end) of the group that this engine computes: all, or its share as a rank.
static void own_experts(const td_engine *e, uint32_t group, uint32_t *first, uint32_t *end) {
  *first = group * e->streaming->group;
  *end = *first + group_at(e, *first);
  if (!td_rank_is_active(e)) return;
  const td_rank *r = e->rank;
  if (*first < r->first_expert) *first = r->first_expert;
  if (*end > r->first_expert + r->n_experts) *end = r->first_expert + r->n_experts;
}

void td_engine_stream_range(const td_engine *e, uint32_t *group, uint32_t *n_groups) {
  *group = 0;
  *n_groups = e->streaming->n_groups;
  if (!td_rank_is_active(e)) return;
  const td_rank *r = e->rank;
  *group = r->first_expert / e->streaming->group;
  *n_groups = r->n_experts ? (r->first_expert + r->n_experts - 1) / e->streaming->group + 1 : 0;
}

void td_engine_stream_group(td_engine *e, const td_microbatch *p, uint32_t layer_idx, uint32_t g,
                            const td_moe_args *routed) {
  td_expert_stream *s = e->streaming;
  const streamed_layer *l = &s->layers[layer_idx];
  uint32_t first, end, first_group, n_groups;
  own_experts(e, g, &first, &end);
  td_engine_stream_range(e, &first_group, &n_groups);
  td_moe_args args = *routed;
  args.out = s->sum;
  args.out_f32 = args.weights_on_device = true;
  args.n_routed = args.n_experts;
  args.first_expert = first;
  args.n_experts = end - first;
  args.gate = l->gate + first;
  args.up = routed->pairs ? NULL : l->up + first;
  args.down = l->down + first;
  args.accumulate = args.same_ids = g > first_group;
  const uint32_t slot = fill_slot(e, layer_idx, g);
  td_stream_wait(e->stream, s->filled[slot]);
  if (td_rank_is_active(e))
    td_engine_moe_ranks_group(e, layer_idx, &args, g == first_group, g + 1 == n_groups);
  else
    td_op_moe(e->stream, &args);
  td_event_record(s->freed[slot], e->stream);
  if (g + 1 < n_groups || td_rank_is_active(e)) return;
  td_op_add_f32(e->stream, p->delta, s->sum, (size_t)p->n_tokens * e->config->dim);
}

td_stream *td_expert_stream_queue(const td_engine *e) {
  return e->streaming ? e->streaming->stream : NULL;
}

td_status td_expert_stream_sync(td_engine *e, td_err *err) {
  const bool has_ring = e->streaming && e->streaming->stream;
  if (!has_ring) return TD_OK;
  td_status st = td_stream_sync(e->streaming->stream, err);
  while (e->streaming->n_queued)
    drop_oldest(e->streaming);
  if (e->streaming->feed) td_expert_feed_clear(e->streaming->feed);
  return st;
}

// ---- from how many tokens on --------------------------------------------------------------------

// A worker's engine says so in the log.
static void choose_least(td_engine *e) {
  td_expert_stream *s = e->streaming;
  s->break_even_tokens = e->opts.break_even_tokens ? e->opts.break_even_tokens : 1;
  uint32_t i = 0;
  while (i < e->config->n_layers && !is_taken(e, i))
    i++;
  if (i == e->config->n_layers) {
    td_info("%s: no prefill streams experts: their format would have to be repacked",
            td_dev_name(e->dev));
    s->break_even_tokens = UINT32_MAX;
  } else if (!e->opts.is_confinable) {
    return;
  } else if (s->break_even_tokens <= e->opts.max_step_tokens) {
    td_info("%s: streaming experts for prefill steps of %u tokens or more (--stream-from)",
            td_dev_name(e->dev), s->break_even_tokens);
  } else {
    td_info("%s: experts would stream for prefill steps of %u tokens or more (--stream-from); "
            "steps have at most %u (--prefill-chunk), so %s computes them",
            td_dev_name(e->dev), s->break_even_tokens, e->opts.max_step_tokens,
            td_dev_name(e->offload.dev));
  }
}

// ---- open and close -----------------------------------------------------------------------------

static td_status open_ring(td_engine *e, td_err *err) {
  td_expert_stream *s = e->streaming;
  size_t sum_bytes = (size_t)e->opts.max_step_tokens * e->config->dim * sizeof *s->sum;
  td_status st = td_stream_open(&s->stream, e->dev, err);
  for (uint32_t i = 0; i < s->n_slots && st == TD_OK; i++) {
    st = td_event_open(&s->filled[i], e->dev, err);
    if (st == TD_OK) st = td_event_open(&s->freed[i], e->dev, err);
  }
  if (st == TD_OK) st = td_dev_alloc(e->dev, (void **)&s->ring, s->n_slots * s->slot_bytes, err);
  if (st == TD_OK) st = td_dev_alloc(e->dev, (void **)&s->sum, sum_bytes, err);
  return st;
}

static td_status open_slots(td_engine *e, td_err *err) {
  td_expert_stream *s = e->streaming;
  td_status st = open_packing(e, err);
  if (st != TD_OK) return st;
  choose_slots(e);
  s->break_even_tokens = UINT32_MAX;
  s->piece_bytes = SIZE_MAX;
  if (!s->group) return TD_OK;
  s->layers = calloc(e->config->n_layers, sizeof *s->layers);
  s->filled = calloc(2 * (size_t)s->n_slots, sizeof(td_event *));
  if (!s->layers || !s->filled) return td_fail(err, TD_ENOMEM, "out of memory");
  s->freed = s->filled + s->n_slots;
  s->queue = malloc(s->n_slots * sizeof *s->queue);
  if (!s->queue) return td_fail(err, TD_ENOMEM, "out of memory");
  st = open_ring(e, err);
  if (st == TD_OK && e->opts.arena)
    st = td_expert_feed_open(&s->feed, &s->n_fed, largest_expert(e, true), e->opts.arena, e->dev,
                             err);
  if (st == TD_OK) st = place_layers(e, err);
  if (st == TD_OK) choose_least(e);
  return st;
}

td_status td_expert_stream_open(td_engine *e, td_err *err) {
  if (!e->opts.stream_bytes || !e->offload.dev) return TD_OK;
  td_expert_stream *s = e->streaming = calloc(1, sizeof *s);
  if (!s) return td_fail(err, TD_ENOMEM, "out of memory");
  td_status st = open_slots(e, err);
  free(s->packing.parts);
  free(s->packing.order);
  free(s->packing.copies);
  s->packing = (td_slot){.parts = NULL};
  return st;
}

void td_expert_stream_close(td_engine *e) {
  td_expert_stream *s = e->streaming;
  if (!s) return;
  td_stream_close(s->stream);
  td_expert_feed_close(s->feed);
  for (uint32_t i = 0; s->freed && i < 2 * s->n_slots; i++)
    td_event_close(s->filled[i]);
  td_dev_free(e->dev, s->ring);
  td_dev_free(e->dev, s->sum);
  for (uint32_t i = 0; s->layers && i < e->config->n_layers; i++) {
    free(s->layers[i].gate);
    free(s->layers[i].copies);
    free(s->layers[i].first_copy);
  }
  free(s->layers);
  free(s->filled);
  free(s->queue);
  free(s);
}
