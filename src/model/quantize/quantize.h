// src/model/quantize/quantize.h - a checkpoint in BF16 or FP8 made into one of smaller weights.
// The linear layers are encoded; embeddings, norms and routers stay. The output matrix becomes
// INT8, a scale a row, and so do, with 4-bit encodings, the two small matrices of latent keys and
// values, and what does not fill whole groups. Shards are made one after the other, each under a
// temporary name until it is whole, and kept by a later run with the same arguments; the index is
// written last, so what can be opened is complete.
#ifndef TD_MODEL_QUANTIZE_QUANTIZE_H
#define TD_MODEL_QUANTIZE_QUANTIZE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "model/quantize/encode.h"

typedef struct {
  const char *in, *out; // directories; out is made
  const td_encoding *encoding;
  unsigned n_threads; // 0: one for each CPU
  // Called before each shard is made, and for each that an earlier run made; may be NULL.
  void (*progress)(void *ctx, const char *shard, size_t idx, size_t n_shards, bool kept);
  void *ctx;
} td_quantize_opts;

typedef struct {
  char *name; // owned; the module's
  uint64_t rows, cols;
  double error; // RMS of what was lost over RMS of the weights
} td_quantized;

typedef struct {
  td_quantized *tensors; // owned, in the order of the shards
  size_t n_tensors;
  uint64_t bytes_in, bytes_out; // of all tensors
} td_quantize_report;

// Errors name file and tensor, and leave finished shards in place. report must be freed also after
// an error. The same report is written to out/quantize_report.json.
td_status td_quantize(const td_quantize_opts *opts, td_quantize_report *report, td_err *err);
void td_quantize_report_free(td_quantize_report *report);

#endif
