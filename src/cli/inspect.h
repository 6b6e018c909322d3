// src/cli/inspect.h - describes a checkpoint and the memory it needs, without running it.
#pragma once

#include <stdbool.h>
#include <stdio.h>

#include "base/status.h"
#include "tandem/types.h"

typedef struct {
  bool tensors, json; // with a list of all tensors; one JSON object instead of text
  td_dtype kv_dtype;  // of --kv-dtype
} td_inspect_opts;

// Opens the checkpoint in dir, which validates everything but the values of weights, and writes a
// description to out.
td_status td_inspect_model(const char *dir, const td_inspect_opts *opts, FILE *out, td_err *err);
