// src/engine/experts/expert_feed.h - experts from the drive for a device's ring: ranges of them are
// read to the arena in the order in which they stream, one range ahead, and stay pinned there until
// they are copied. Internal to engine/.
#pragma once

#include "engine/engine_impl.h"

typedef struct td_expert_feed td_expert_feed;

// Experts [first, first + n) of a layer.
typedef struct {
  uint32_t layer_idx, first, n;
} td_expert_range;

// *max: the most experts of a range. scale_bytes: of an expert's scales and zero points, at most.
// On error, close it too.
td_status td_expert_feed_open(td_expert_feed **out, uint32_t *max, size_t scale_bytes,
                              td_expert_arena *arena, td_dev *dev, td_err *err);
void td_expert_feed_close(td_expert_feed *feed);

// Begins to read what is missing of range, and then of next, which may be NULL. Returns whether
// range has landed: each of its experts is there or cannot be read.
bool td_expert_feed_poll(td_expert_feed *feed, const td_expert_range *range,
                         const td_expert_range *next);
// Waits until range has landed, and shows dev's progress. Its experts, in order.
const td_taken_expert *td_expert_feed_await(td_expert_feed *feed, const td_expert_range *range,
                                            const td_expert_range *next);
// Pinned memory for the scales and zero points of the range that was awaited last, from which they
// are copied: they stay in memory that is not pinned, whose copies would hold the caller.
char *td_expert_feed_scales(td_expert_feed *feed);
// All copies of the range that was awaited last are queued on stream.
void td_expert_feed_copied(td_expert_feed *feed, td_stream *stream);
// Waits a short time at most for what td_expert_feed_poll saw missing.
void td_expert_feed_wait(td_expert_feed *feed);
// Pins end. Nothing is being copied.
void td_expert_feed_clear(td_expert_feed *feed);
