// src/cli/inspect.h - describes a checkpoint and the memory it needs, without running it.
#ifndef TD_CLI_INSPECT_H
#define TD_CLI_INSPECT_H

#include <stdbool.h>
#include <stdio.h>

#include "base/status.h"

// Opens the checkpoint in dir, which validates everything but the values of weights, and writes a
// description to out: text, or one JSON object. tensors adds a list of all tensors.
td_status td_inspect_model(const char *dir, bool tensors, bool json, FILE *out, td_err *err);

#endif
