// src/engine/experts/expert_feed.c - which ranges are read, copied and released.
#include "engine/experts/expert_feed.h"

#include <stdlib.h>

enum {
  N_RANGES = 4,      // being read or copied
  PART = 8,          // of an arena's slots, all ranges: what it leaves to prompts
  MOST = 64,         // experts of a range
  SCALES = 64 << 20, // bytes of pinned memory for all ranges' scales
};

typedef struct {
  td_expert_range range;
  td_taken_expert *taken; // [range.n]
  td_event *copied;
  char *scales; // [max * scale_bytes], pinned; NULL: there are none
} held_range;

struct td_expert_feed {
  td_expert_arena *arena;
  td_dev *dev;
  held_range held[N_RANGES];
  uint32_t first, n_copying, n_reading; // from first on, modulo N_RANGES
  uint32_t n_events;                    // of the arena, when it was looked at
  bool lacks_slots;                     // then
};

td_status td_expert_feed_open(td_expert_feed **out, uint32_t *max, size_t scale_bytes,
                              td_expert_arena *arena, td_dev *dev, td_err *err) {
  td_expert_feed *f = *out = calloc(1, sizeof *f);
  if (!f) return td_fail(err, TD_ENOMEM, "out of memory: experts that stream");
  *max = td_expert_arena_stats_of(arena).n_slots / (PART * N_RANGES);
  if (*max > MOST) *max = MOST;
  if (*max * scale_bytes > SCALES / N_RANGES) *max = (uint32_t)(SCALES / N_RANGES / scale_bytes);
  if (!*max) *max = 1;
  f->arena = arena;
  f->dev = dev;
  td_status st = TD_OK;
  for (uint32_t i = 0; i < N_RANGES && st == TD_OK; i++) {
    f->held[i].taken = calloc(*max, sizeof *f->held[i].taken);
    if (!f->held[i].taken) return td_fail(err, TD_ENOMEM, "out of memory: experts that stream");
    st = td_event_open(&f->held[i].copied, dev, err);
    if (st == TD_OK && scale_bytes)
      st = td_dev_alloc_host(dev, (void **)&f->held[i].scales, *max * scale_bytes, err);
  }
  return st;
}

void td_expert_feed_close(td_expert_feed *f) {
  if (!f) return;
  td_expert_feed_clear(f);
  for (uint32_t i = 0; i < N_RANGES; i++) {
    td_event_close(f->held[i].copied);
    free(f->held[i].taken);
    td_dev_free_host(f->dev, f->held[i].scales);
  }
  free(f);
}

static held_range *held_at(td_expert_feed *f, uint32_t i) {
  return &f->held[(f->first + i) % N_RANGES];
}

static void drop_oldest(td_expert_feed *f) {
  const held_range *h = held_at(f, 0);
  td_expert_arena_release(f->arena, h->taken, h->range.n);
  f->first = (f->first + 1) % N_RANGES;
}

void td_expert_feed_clear(td_expert_feed *f) {
  for (; f->n_copying + f->n_reading; f->n_copying ? f->n_copying-- : f->n_reading--)
    drop_oldest(f);
}

// The ith range being read, which becomes `range`; NULL: as many as can be held are being copied.
static held_range *reading_at(td_expert_feed *f, uint32_t i, const td_expert_range *range) {
  if (i == f->n_reading) {
    if (f->n_copying + f->n_reading == N_RANGES) return NULL;
    held_range *h = held_at(f, f->n_copying + f->n_reading++);
    h->range = *range;
    for (uint32_t k = 0; k < range->n; k++)
      h->taken[k] = (td_taken_expert){.expert = range->first + k, .slot = -1};
    td_expert_arena_take(f->arena, range->layer_idx, h->taken, range->n, true);
  }
  held_range *h = held_at(f, f->n_copying + i);
  TD_CHECK(h->range.layer_idx == range->layer_idx && h->range.first == range->first);
  return h;
}

// Whether all of the range's experts have slots.
static bool has_slots(td_expert_feed *f, held_range *h) {
  for (uint32_t k = 0; k < h->range.n; k++)
    if (h->taken[k].slot < 0 &&
        !td_expert_arena_take(f->arena, h->range.layer_idx, &h->taken[k], 1, true))
      return false;
  return true;
}

bool td_expert_feed_poll(td_expert_feed *f, const td_expert_range *range,
                         const td_expert_range *next) {
  f->n_events = td_expert_arena_events(f->arena);
  for (; f->n_copying && td_event_is_done(held_at(f, 0)->copied); f->n_copying--)
    drop_oldest(f);
  held_range *h = reading_at(f, 0, range);
  f->lacks_slots = !h || !has_slots(f, h);
  if (f->lacks_slots) return false;
  held_range *ahead = next ? reading_at(f, 1, next) : NULL;
  if (ahead) has_slots(f, ahead);
  for (uint32_t k = 0; k < h->range.n; k++)
    if (td_expert_arena_state(f->arena, h->taken[k].slot) == TD_SLOT_LOADING) return false;
  return true;
}

const td_taken_expert *td_expert_feed_await(td_expert_feed *f, const td_expert_range *range,
                                            const td_expert_range *next) {
  while (!td_expert_feed_poll(f, range, next)) {
    td_dev_show_progress(f->dev);
    td_expert_feed_wait(f);
  }
  return held_at(f, f->n_copying)->taken;
}

char *td_expert_feed_scales(td_expert_feed *f) {
  return held_at(f, f->n_copying)->scales;
}

void td_expert_feed_copied(td_expert_feed *f, td_stream *stream) {
  td_event_record(held_at(f, f->n_copying)->copied, stream);
  f->n_copying++;
  f->n_reading--;
}

void td_expert_feed_wait(td_expert_feed *f) {
  if (f->lacks_slots && f->n_copying)
    td_event_sync(held_at(f, 0)->copied);
  else
    td_expert_arena_wait(f->arena, f->n_events);
}
