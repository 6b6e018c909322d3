// src/model/convert.h - matrices in formats that have no kernel, brought into one that has while a
// checkpoint is loaded: words of 8-bit codes, words of 4 bits with one scale for all, and columns
// in an order of their own (GPTQ's desc_act, actorder of compressed-tensors).
//   I8     exact: the order is plain and every zero point the middle one
//   F16, BF16, F32: the scales' own dtype, in which each product of code and scale is rounded once,
//          as the publishers' own code does
// The results are tensors of one more shard, in memory: <module>.weight, and of GPTQ
// <module>.weight_scale.
#ifndef TD_MODEL_CONVERT_H
#define TD_MODEL_CONVERT_H

#include <stdatomic.h>

#include "model/checkpoint/shard_writer.h"
#include "model/checkpoint/store.h"
#include "model/quant_scheme.h"

typedef struct td_conversion td_conversion;

// Finds what must be converted; both are borrowed until close. Errors name file and tensor. On
// success the caller owns *out, which may be empty.
td_status td_conversion_open(td_conversion **out, const td_store *store, const td_quant *quant,
                             td_err *err);
void td_conversion_close(td_conversion *conversion);

// Bytes of the shard; 0: there is nothing to convert.
uint64_t td_conversion_bytes(const td_conversion *conversion);
// The idx-th tensor of codes, needed no more once it is converted; NULL behind the last.
const td_tensor *td_conversion_source(const td_conversion *conversion, size_t idx);
// The idx-th tensor that is made, with its offset in the shard; NULL behind the last.
const td_shard_entry *td_conversion_result(const td_conversion *conversion, size_t idx);
// Writes its header to memory of that many zeroed bytes, 64-byte aligned.
void td_conversion_write_header(const td_conversion *conversion, void *memory);
typedef struct {
  // Where a tensor's data lie by now; NULL: where the store has them.
  const uint8_t *(*moved)(void *ctx, const td_tensor *t);
  void *ctx;
  const atomic_bool *canceled; // stops; may be NULL
} td_conversion_opts;

// Converts into the same memory, with all CPUs; opts may be NULL. Logs what became of how many
// matrices. TD_ENOMEM, TD_ECANCELED.
td_status td_conversion_run(const td_conversion *conversion, void *memory,
                            const td_conversion_opts *opts, td_err *err);

#endif
