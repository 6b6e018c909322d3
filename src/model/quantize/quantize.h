// src/model/quantize/quantize.h - converts a BF16 or FP8 checkpoint to smaller weights.
// Linear layers are encoded; embeddings, norms and routers are kept. These become INT8 with one
// scale per row: the output matrix; with 4-bit encodings also the two small matrices of MLA's
// latent keys and values; and matrices that do not consist of whole groups. Shards are made one at
// a time, each under a temporary name until it is complete. A later run with the same arguments
// keeps finished shards. The index is written last, so a checkpoint that can be opened is complete.
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "model/quantize/encode.h"

typedef struct {
  const char *in, *out; // directories; out is created
  const td_encoding *encoding;
  unsigned n_threads; // 0: one per CPU
  // Called before each shard is made, and for each one kept from an earlier run; may be NULL.
  void (*progress)(void *ctx, const char *shard, size_t idx, size_t n_shards, bool kept);
  void *ctx;
} td_quantize_opts;

typedef struct {
  char *name; // owned; module name
  uint64_t rows, cols;
  double error; // RMS of the error / RMS of the weights
} td_quantized;

typedef struct {
  td_quantized *tensors; // owned, in shard order
  size_t n_tensors, cap_tensors;
  uint64_t bytes_in, bytes_out; // total over all tensors
} td_quantize_report;

// Errors name file and tensor, and leave finished shards in place. The caller frees report, also
// after an error. The report is also written to out/quantize_report.json.
td_status td_quantize(const td_quantize_opts *opts, td_quantize_report *report, td_err *err);
void td_quantize_report_free(td_quantize_report *report);
