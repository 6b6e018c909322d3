// src/cli/inspect.h - what a checkpoint is and what it needs, without running it.
#ifndef TD_CLI_INSPECT_H
#define TD_CLI_INSPECT_H

#include <stdbool.h>
#include <stdio.h>

#include "base/status.h"

// Opens the checkpoint in dir, which checks all of it but the values of its weights, and writes a
// description to out: text, or one JSON object. tensors adds the list of every tensor.
td_status td_inspect_model(const char *dir, bool tensors, bool json, FILE *out, td_err *err);

#endif
