// src/shm/channel.c - layout of the channel's segment: two words, then two rings.
#include "shm/channel.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

enum { LINE_BYTES = 64, WORDS_BYTES = 2 * LINE_BYTES }; // one cache line per word

// The rings follow the words, each in half of the remaining bytes.
static td_status attach_rings(td_channel *channel, bool is_front, td_err *err) {
  if (channel->segment.n_bytes < WORDS_BYTES) return td_fail(err, TD_EFORMAT, "no channel");
  size_t half = (channel->segment.n_bytes - WORDS_BYTES) / 2 / 64 * 64;
  channel->lease = channel->segment.base;
  channel->pulse = (void *)((char *)channel->segment.base + LINE_BYTES);
  char *down = (char *)channel->segment.base + WORDS_BYTES, *up = down + half;
  td_ring_wake down_wake = {channel->fds[TD_CHANNEL_DOWN_DATA],
                            channel->fds[TD_CHANNEL_DOWN_SPACE]};
  td_ring_wake up_wake = {channel->fds[TD_CHANNEL_UP_DATA], channel->fds[TD_CHANNEL_UP_SPACE]};
  td_status st = is_front ? td_ring_writer_attach(&channel->tx, down, half, down_wake, err)
                          : td_ring_writer_attach(&channel->tx, up, half, up_wake, err);
  if (st != TD_OK) return st;
  return is_front ? td_ring_reader_attach(&channel->rx, up, half, up_wake, err)
                  : td_ring_reader_attach(&channel->rx, down, half, down_wake, err);
}

static void clear(td_channel *channel) {
  *channel = (td_channel){.segment = TD_SEGMENT_CLOSED};
  for (int i = 0; i < TD_CHANNEL_N_FDS; i++)
    channel->fds[i] = -1;
}

static td_status create(td_channel *out, uint32_t capacity, td_err *err) {
  size_t half = td_ring_bytes(capacity);
  td_status st = td_segment_create(&out->segment, "tandem-rings", WORDS_BYTES + 2 * half, err);
  if (st != TD_OK) return st;
  out->fds[TD_CHANNEL_SEGMENT] = out->segment.fd;
  for (int i = TD_CHANNEL_DOWN_DATA; i < TD_CHANNEL_N_FDS; i++) {
    out->fds[i] = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (out->fds[i] < 0)
      return td_fail(err, TD_EIO, "cannot create an eventfd: %s", strerror(errno));
  }
  char *rings = (char *)out->segment.base + WORDS_BYTES;
  td_ring_format(rings, capacity);
  td_ring_format(rings + half, capacity);
  return attach_rings(out, true, err);
}

td_status td_channel_create(td_channel *out, uint32_t capacity, td_err *err) {
  clear(out);
  td_status st = create(out, capacity, err);
  if (st != TD_OK) td_channel_close(out);
  return st;
}

static td_status adopt(td_channel *out, td_err *err) {
  for (int i = 0; i < TD_CHANNEL_N_FDS; i++)
    if (fcntl(out->fds[i], F_SETFD, FD_CLOEXEC) != 0)
      return td_fail(err, TD_EINVAL, "descriptor %d is not open: %s", out->fds[i], strerror(errno));
  td_status st = td_segment_attach(&out->segment, out->fds[TD_CHANNEL_SEGMENT], err);
  return st == TD_OK ? attach_rings(out, false, err) : st;
}

td_status td_channel_attach(td_channel *out, const int fds[TD_CHANNEL_N_FDS], td_err *err) {
  clear(out);
  memcpy(out->fds, fds, sizeof out->fds);
  td_status st = adopt(out, err);
  if (st != TD_OK) td_channel_close(out);
  return st;
}

void td_channel_close(td_channel *channel) {
  if (channel->segment.fd >= 0) channel->fds[TD_CHANNEL_SEGMENT] = -1; // closed with the segment
  td_segment_close(&channel->segment);
  for (int i = 0; i < TD_CHANNEL_N_FDS; i++)
    if (channel->fds[i] >= 0) close(channel->fds[i]);
  clear(channel);
}
