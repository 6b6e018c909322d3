// src/worker/front_link.h - the worker's end of the channel: blocking send and receive, and
// detection of a dead front process.
#pragma once

#include "base/status.h"
#include "shm/channel.h"

typedef struct {
  td_channel channel;
  int life_fd; // hangs up when the front has died
} td_front_link;

// Sends a record; blocks while the ring is full. TD_ECANCELED: the front has died.
td_status td_front_link_send(td_front_link *front_link, const td_wire_msg *msg, td_err *err);
// Sleeps until a record arrives, also_fd can be read (-1: none) or timeout_ms have passed.
// TD_ECANCELED: the front has died.
td_status td_front_link_wait(td_front_link *front_link, int also_fd, int timeout_ms, td_err *err);
// TD_ECANCELED: the front has died. Does not block.
td_status td_front_link_check_alive(td_front_link *front_link, td_err *err);
