// src/shm/channel.h - what the front and one worker share: two rings, the worker's thread limit and
// its pulse, in one segment with four eventfds. The front creates it and passes the descriptors to
// the worker, which attaches.
#pragma once

#include "base/status.h"
#include "shm/ring.h"
#include "shm/segment.h"

enum {
  TD_CHANNEL_SEGMENT,
  TD_CHANNEL_DOWN_DATA, // front to worker
  TD_CHANNEL_DOWN_SPACE,
  TD_CHANNEL_UP_DATA, // worker to front
  TD_CHANNEL_UP_SPACE,
  TD_CHANNEL_N_FDS
};

typedef struct {
  td_segment segment;
  int fds[TD_CHANNEL_N_FDS]; // owned, except that fds[TD_CHANNEL_SEGMENT] equals segment.fd
  td_ring_writer tx;         // sends
  td_ring_reader rx;         // receives
  // Number of threads the worker may use; 0: all. Written by the front; the worker reads it before
  // each parallel section, also within a step. Relaxed: it orders nothing else.
  _Atomic uint32_t *lease;
  // Advances while the worker computes, also within a step, so that the front can tell a long step
  // from a hang. Relaxed.
  _Atomic uint32_t *pulse;
} td_channel;

// The front's side; capacity in records per direction. On error *out is closed.
td_status td_channel_create(td_channel *out, uint32_t capacity, td_err *err);
// The worker's side, from inherited descriptors, which *out owns in every case.
td_status td_channel_attach(td_channel *out, const int fds[TD_CHANNEL_N_FDS], td_err *err);
void td_channel_close(td_channel *channel); // closing a closed one is legal
