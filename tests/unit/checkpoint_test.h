// tests/unit/checkpoint_test.h - checkpoints of support/checkpoint.h that open, or are refused.
#pragma once

#include "support/checkpoint.h"
#include "unit/testing.h"

static inline td_model *open_ok(checkpoint *ck) {
  td_model *m;
  td_err err;
  ck_write(ck);
  if (ck_open(ck, &m, &err) != TD_OK) fail_msg("%s", err.msg);
  return m;
}

// Opens what was written, which must fail with a message that holds all of the words.
static inline void refused(const checkpoint *ck, td_status status, const char *const *words) {
  td_model *m;
  td_err err;
  td_status st = ck_open(ck, &m, &err);
  if (st == TD_OK) fail_msg("opened, though it should say: %s", words[0]);
  assert_null(m);
  for (; *words; words++) {
    if (!strstr(err.msg, *words)) fail_msg("no \"%s\" in: %s", *words, err.msg);
  }
  assert_int_equal(st, status);
  // Matrices that were converted are in no file.
  if (!strstr(err.msg, ck->dir) && !strstr(err.msg, "weights in memory"))
    fail_msg("no folder in: %s", err.msg);
  assert_int_equal(ck_open(ck, &m, NULL), status);
}

#define REFUSED(ck, status, ...)         refused(ck, status, (const char *const[]){__VA_ARGS__, NULL})
#define WRITTEN_REFUSED(ck, status, ...) (ck_write(ck), REFUSED(ck, status, __VA_ARGS__))
