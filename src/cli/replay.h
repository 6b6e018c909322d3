// src/cli/replay.h - how many experts memory would have held, had it been smaller than the model:
// the use of experts is recorded and played back against ways to choose what makes room.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

// Of memory for a number of experts: AGED is what --weights stream does (model/drive/arena.h),
// without what other requests use meanwhile; OPTIMUM gives up what is used last of all (Belady).
#define TD_REPLAYS(X)                                                                              \
  X(AGED, "aged", "LFU with uses that age, as --weights stream")                                   \
  X(LRU, "lru", "LRU")                                                                             \
  X(LFU, "lfu", "LFU")                                                                             \
  X(OPTIMUM, "optimum", "optimum (Belady)")

typedef enum {
#define X(id, key, name) TD_REPLAY_##id,
  TD_REPLAYS(X)
#undef X
      TD_N_REPLAYS
} td_replay;

// Of the n uses [n] of keys below n_keys, in order, those that find the key among n_slots. n and
// n_keys below 2^32. TD_ENOMEM.
td_status td_replay_hits(uint64_t *out, td_replay how, const uint32_t *uses, size_t n,
                         uint32_t n_keys, uint32_t n_slots, td_err *err);
