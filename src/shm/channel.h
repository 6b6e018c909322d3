// src/shm/channel.h - the two rings between the front process and one worker, the lease of cores
// and the worker's pulse: one segment, four eventfds. The front makes it and hands the descriptors
// down; the worker attaches to them.
#ifndef TD_SHM_CHANNEL_H
#define TD_SHM_CHANNEL_H

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
  int fds[TD_CHANNEL_N_FDS]; // owned; the segment's is a copy of segment.fd's number
  td_ring_writer tx;         // what this process says
  td_ring_reader rx;         // what it hears
  // How many threads the worker may compute with; 0: all. The front writes it, the worker looks at
  // it before every piece of parallel work, in the middle of a step, too. Relaxed: it says nothing
  // else.
  _Atomic uint32_t *lease;
  // Grows while the worker computes, in the middle of a step, too: by this the front tells a long
  // step from a hang. Relaxed.
  _Atomic uint32_t *pulse;
} td_channel;

// The front's side: capacity records each way. On error *out is closed.
td_status td_channel_create(td_channel *out, uint32_t capacity, td_err *err);
// The worker's side, over inherited descriptors, owned by *out in every case.
td_status td_channel_attach(td_channel *out, const int fds[TD_CHANNEL_N_FDS], td_err *err);
void td_channel_close(td_channel *channel); // closing a closed one is legal

#endif
