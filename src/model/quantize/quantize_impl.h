// src/model/quantize/quantize_impl.h - what the files of td_quantize share: plan (what becomes of
// each tensor), shard (making one), files (what stands beside the shards).
#ifndef TD_MODEL_QUANTIZE_QUANTIZE_IMPL_H
#define TD_MODEL_QUANTIZE_QUANTIZE_IMPL_H

#include "base/thread_pool.h"
#include "model/checkpoint/shard_writer.h"
#include "model/quantize/quantize.h"
#include "model/tensor_bind.h"

typedef enum {
  TD_QUANTIZE_DROP,   // scales of what is decoded
  TD_QUANTIZE_COPY,   // byte for byte
  TD_QUANTIZE_BF16,   // FP8 that is not encoded: decoded
  TD_QUANTIZE_ENCODE, //
} td_quantize_action;

// What becomes of one tensor.
typedef struct {
  const td_tensor *t;
  td_quantize_action action;
  const td_encoding *encoding; // ENCODE
  td_weight w;                 // BF16, ENCODE: the tensor with its scales
  size_t entry; // of its shard: the tensor, or the codes, which the scales and the shape follow
} td_quantize_item;

typedef struct {
  char *name;              // owned; the file's
  const char *source;      // path of the shard it is made from
  size_t begin, end;       // items
  td_shard_entry *entries; // owned
  size_t n_entries;
  td_buf header;
  uint64_t n_bytes; // of the file
} td_quantize_shard;

typedef struct {
  const td_quantize_opts *opts;
  td_quantize_report *report;
  td_err *err;
  const td_family *family;
  td_store *store;
  td_quant *quant;
  td_bound_tensors binding; // holds the scales
  td_pool *pool;
  td_quantize_item *items; // one a tensor of store
  size_t n_items;
  td_quantize_shard *shards;
  size_t n_shards;
} td_quantizer;

// Fills items and shards. TD_EINVAL: there is nothing to encode; TD_EUNSUPPORTED: weights that are
// neither floats nor FP8.
td_status td_quantize_plan(td_quantizer *q);
void td_quantize_plan_free(td_quantizer *q);

// Makes shard idx, or keeps what an earlier run made, and adds its tensors to the report.
td_status td_quantize_shard_make(td_quantizer *q, size_t idx);

// Copies the other files, writes config.json and the report, then the index, and removes what was
// only for resuming.
td_status td_quantize_finish(td_quantizer *q);

// Adds to the report. TD_ENOMEM.
td_status td_quantize_note(td_quantizer *q, const char *name, size_t len, uint64_t rows,
                           uint64_t cols, double error);
// dir/file, to be freed; NULL when out of memory.
char *td_quantize_path(const char *dir, const char *file);
td_status td_quantize_no_memory(const td_quantizer *q);

#define TD_QUANTIZE_INDEX  "model.safetensors.index.json"
#define TD_QUANTIZE_SINGLE "model.safetensors"
#define TD_QUANTIZE_DONE   ".done" // beside a finished shard, until all are

#endif
