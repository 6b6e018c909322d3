// src/worker/front_link.c - polling the channel together with the front's life.
#include "worker/front_link.h"

#include <errno.h>
#include <poll.h>
#include <string.h>

// Waits for fd, also_fd (-1: none) or the front's death.
static td_status wait(td_front_link *front_link, int fd, int also_fd, int timeout_ms, td_err *err) {
  struct pollfd fds[3] = {{.fd = front_link->life_fd, .events = POLLIN},
                          {.fd = fd, .events = POLLIN},
                          {.fd = also_fd, .events = POLLIN}};
  if (poll(fds, TD_COUNT(fds), timeout_ms) < 0 && errno != EINTR)
    return td_fail(err, TD_EIO, "poll: %s", strerror(errno));
  if (fds[0].revents) return td_fail(err, TD_ECANCELED, "the front process is gone");
  return TD_OK;
}

td_status td_front_link_send(td_front_link *front_link, const td_wire_msg *msg, td_err *err) {
  td_ring_writer *tx = &front_link->channel.tx;
  td_status st;
  while ((st = td_ring_push(tx, msg)) == TD_EAGAIN) {
    if (!td_ring_writer_arm(tx)) continue;
    st = wait(front_link, tx->end.wake.space_fd, -1, -1, err);
    td_ring_writer_disarm(tx);
    if (st != TD_OK) return st;
  }
  if (st != TD_OK) td_fail(err, st, "the ring to the front is corrupt");
  return st;
}

td_status td_front_link_wait(td_front_link *front_link, int also_fd, int timeout_ms, td_err *err) {
  td_ring_reader *rx = &front_link->channel.rx;
  if (!td_ring_reader_arm(rx)) return TD_OK;
  td_status st = wait(front_link, rx->end.wake.data_fd, also_fd, timeout_ms, err);
  td_ring_reader_disarm(rx);
  return st;
}

td_status td_front_link_check_alive(td_front_link *front_link, td_err *err) {
  return wait(front_link, -1, -1, 0, err);
}
