#include "worker/front_link.h"

#include <errno.h>
#include <poll.h>
#include <string.h>

// Waits for fd (-1: only for the front's end).
static td_status wait(td_outlet *outlet, int fd, int timeout_ms, td_err *err) {
  struct pollfd fds[2] = {{.fd = outlet->life_fd, .events = POLLIN}, {.fd = fd, .events = POLLIN}};
  if (poll(fds, 2, timeout_ms) < 0 && errno != EINTR) {
    return td_fail(err, TD_EIO, "poll: %s", strerror(errno));
  }
  if (fds[0].revents) return td_fail(err, TD_ECANCELED, "the front process is gone");
  return TD_OK;
}

td_status td_outlet_post(td_outlet *outlet, const td_wire_msg *msg, td_err *err) {
  td_ring_writer *tx = &outlet->channel.tx;
  td_status st;
  while ((st = td_ring_push(tx, msg)) == TD_EAGAIN) {
    if (!td_ring_writer_arm(tx)) continue;
    st = wait(outlet, tx->end.wake.space_fd, -1, err);
    td_ring_writer_disarm(tx);
    if (st != TD_OK) return st;
  }
  if (st != TD_OK) td_fail(err, st, "the ring to the front is corrupt");
  return st;
}

td_status td_outlet_sleep(td_outlet *outlet, int timeout_ms, td_err *err) {
  td_ring_reader *rx = &outlet->channel.rx;
  if (!td_ring_reader_arm(rx)) return TD_OK;
  td_status st = wait(outlet, rx->end.wake.data_fd, timeout_ms, err);
  td_ring_reader_disarm(rx);
  return st;
}

td_status td_outlet_check(td_outlet *outlet, td_err *err) {
  return wait(outlet, -1, 0, err);
}
