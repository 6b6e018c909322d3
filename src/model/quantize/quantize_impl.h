// src/model/quantize/quantize_impl.h - declarations shared by the files of td_quantize: plan
// (action for each tensor), shard (makes one shard), files (everything but shards).
#pragma once

#include "model/checkpoint/shard_writer.h"
#include "model/quantize/quantize.h"
#include "model/tensor_bind.h"

typedef enum {
  TD_QUANTIZE_DROP, // scales of a decoded matrix
  TD_QUANTIZE_COPY, // byte for byte
  TD_QUANTIZE_BF16, // decode FP8 that is not encoded again
  TD_QUANTIZE_ENCODE,
} td_quantize_action;

// Action for one tensor, or for one expert's matrix in a tensor that holds the matrices of all
// experts.
typedef struct {
  const td_tensor *t;
  size_t tensor;    // t's index in the store
  char *own_name;   // owned; NULL: t's
  const char *name; // own_name, or t's
  td_quantize_action action;
  const td_encoding *encoding; // ENCODE
  td_weight w;                 // BF16, ENCODE: the matrix with its scales
  size_t entry; // index in its shard of the tensor or the codes; scales and shape follow the codes
} td_quantize_item;

typedef struct {
  char *name;              // owned; file name
  const char *source;      // path of the source shard
  size_t begin, end;       // range of items
  td_shard_entry *entries; // owned
  size_t n_entries;
  td_buf header;
  uint64_t n_bytes; // size of the file
} td_quantize_shard;

typedef struct {
  const td_quantize_opts *opts;
  td_quantize_report *report;
  td_err *err;
  td_model_config config; // of the source
  td_store *store;
  td_quant *quant;
  td_bound_tensors binding; // owns the scales
  td_quantize_item *items;  // in the order of store's tensors
  size_t n_items, cap_items;
  td_quantize_shard *shards;
  size_t n_shards;
} td_quantizer;

// Fills items and shards. TD_EINVAL: nothing to encode. TD_EUNSUPPORTED: weights are neither floats
// nor FP8.
td_status td_quantize_plan(td_quantizer *q);
void td_quantize_plan_free(td_quantizer *q);

// Makes shard idx, or keeps the one of an earlier run, and adds its tensors to the report.
td_status td_quantize_shard_make(td_quantizer *q, size_t idx);

// Copies the other files, writes config.json, the report and the index, and removes files that were
// only needed for resuming.
td_status td_quantize_finish(td_quantizer *q);

// Adds a tensor to the report. TD_ENOMEM.
td_status td_quantize_note(td_quantizer *q, const char *name, size_t len, uint64_t rows,
                           uint64_t cols, double error);
// dir/file, to be freed by the caller; NULL: out of memory.
char *td_quantize_path(const char *dir, const char *file);
td_status td_quantize_no_memory(const td_quantizer *q);

#define TD_QUANTIZE_INDEX  "model.safetensors.index.json"
#define TD_QUANTIZE_SINGLE "model.safetensors"
#define TD_QUANTIZE_DONE   ".done" // marks a finished shard until all are finished
