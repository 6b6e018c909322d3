// src/cli/inspect.h - describes a checkpoint and the memory it needs, without running it.
#ifndef TD_CLI_INSPECT_H
#define TD_CLI_INSPECT_H

#include <stdbool.h>
#include <stdio.h>

#include "base/buf.h"
#include "base/json_write.h"
#include "base/status.h"
#include "model/model.h"

typedef struct {
  bool tensors, json;           // with a list of all tensors; one JSON object instead of text
  double link_gbps, gpu_tflops; // of GPUs, for predictions; 0: those of inspect_gpu.c
} td_inspect_opts;

// Opens the checkpoint in dir, which validates everything but the values of weights, and writes a
// description to out.
td_status td_inspect_model(const char *dir, const td_inspect_opts *opts, FILE *out, td_err *err);

// inspect_gpu.c: prefill on GPUs of several sizes. For models with experts.
void td_inspect_add_gpus(td_buf *out, const td_model *model, const td_inspect_opts *opts);
void td_inspect_add_json_gpus(td_json_writer *w, const td_model *model,
                              const td_inspect_opts *opts);

#endif
