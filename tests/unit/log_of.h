// tests/unit/log_of.h - what a call says in the log.
#pragma once

#include <stdio.h>
#include <unistd.h>

#include "unit/testing.h"

static inline void log_of(char *out, size_t n_bytes, void (*call)(void *ctx), void *ctx) {
  FILE *said = tmpfile();
  assert_non_null(said);
  const int kept = dup(STDERR_FILENO);
  dup2(fileno(said), STDERR_FILENO);
  call(ctx);
  dup2(kept, STDERR_FILENO);
  close(kept);
  rewind(said);
  out[fread(out, 1, n_bytes - 1, said)] = '\0';
  fclose(said);
}
