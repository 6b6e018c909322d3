// tests/unit/device_test.h - what the tests of the CPU device's operators share.
#pragma once

#include "device/device.h"
#include "unit/ref.h"

typedef struct {
  td_dev *dev;
  td_stream *stream;
  uint64_t rng;
} device_fixture;

static inline void device_open(device_fixture *f, unsigned n_threads) {
  td_err err;
  f->rng = 1;
  assert_int_equal(
      td_dev_open(&f->dev, &(td_dev_opts){.kind = "cpu", .n_threads = n_threads}, &err), TD_OK);
  assert_int_equal(td_stream_open(&f->stream, f->dev, &err), TD_OK);
}

static inline void device_close(device_fixture *f) {
  td_stream_close(f->stream);
  td_dev_close(f->dev);
}

static inline void device_sync(device_fixture *f) {
  td_err err;
  if (td_stream_sync(f->stream, &err) != TD_OK) fail_msg("%s", err.msg);
}

static inline void device_assert_close(const float *got, const double *want, size_t n,
                                       double tolerance) {
  double distance = ref_distance(got, want, n);
  if (!(distance <= tolerance)) fail_msg("distance %g above %g", distance, tolerance);
}

static const unsigned teams[] = {1, 3};
#define FOR_TEAMS(f)                                                                               \
  for (size_t team_ = 0; team_ < TD_COUNT(teams); team_++)                                         \
    for (int once_ = (device_open(&(f), teams[team_]), 1); once_; device_close(&(f)), once_ = 0)

// The stream has failed with a sentence that holds part.
static inline void device_expect_failure(device_fixture *f, const char *part) {
  td_err err;
  assert_int_equal(td_stream_sync(f->stream, &err), TD_EINVAL);
  if (!strstr(err.msg, part)) fail_msg("'%s' does not speak of '%s'", err.msg, part);
}

// The same with a new stream, which starts clean.
static inline void device_reopen_stream(device_fixture *f) {
  td_err err;
  td_stream_close(f->stream);
  assert_int_equal(td_stream_open(&f->stream, f->dev, &err), TD_OK);
  device_sync(f);
}
