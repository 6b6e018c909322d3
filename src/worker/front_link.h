// src/worker/front_link.h - the worker's end of the channel: waiting without losing, and noticing
// that the front is gone.
#ifndef TD_WORKER_FRONT_LINK_H
#define TD_WORKER_FRONT_LINK_H

#include <stdint.h>

#include "base/status.h"
#include "shm/channel.h"

typedef struct {
  td_channel channel;
  int life_fd; // hangs up when the front is gone
} td_front_link;

// Sends a record; waits while the ring is full. TD_ECANCELED: the front is gone.
td_status td_front_link_send(td_front_link *front_link, const td_wire_msg *msg, td_err *err);
// Sleeps until the front has sent something or timeout_ms have passed. TD_ECANCELED: it is gone.
td_status td_front_link_wait(td_front_link *front_link, int timeout_ms, td_err *err);
// TD_ECANCELED when the front is gone; does not wait.
td_status td_front_link_check_alive(td_front_link *front_link, td_err *err);

#endif
