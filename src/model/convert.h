// src/model/convert.h - converts matrices whose format has no kernel, while a checkpoint is loaded:
// 8-bit codes in words, 4-bit codes in words with a single scale, and reordered columns (GPTQ's
// desc_act, actorder of compressed-tensors). The result dtype is:
//   I8     if columns are in order and all zero points are the midpoint; exact
//   F16, BF16, F32: otherwise the scales' dtype; each product of code and scale is rounded once, as
//          in the publishers' own code
// Experts that are stored transposed (gpt-oss in BF16, Qwen3-VL) are transposed, in their own
// dtype. The two parts of MLA's kv_b_proj in GGUF are joined (convert_matrix.h). Codes, scales and
// zero points that GPTQ and AWQ store by columns are turned into rows, of the same size and
// exactly: no tensor is added, these have other contents. 4-bit codes of bitsandbytes become values
// of the dtype that they were made of (convert_bnb.h). Results are tensors of an additional shard
// in memory: <module>.weight, and for GPTQ converted to I8 also <module>.weight_scale; for a
// transposed tensor its name and TD_TRANSPOSED, and for bitsandbytes' <module>.weight that and
// TD_DEQUANTIZED.
#pragma once

#include <stdatomic.h>

#include "model/checkpoint/shard_writer.h"
#include "model/checkpoint/store.h"
#include "model/quant_scheme.h"

#define TD_TRANSPOSED  ".transposed"
#define TD_DEQUANTIZED ".dequantized"
// What GGUF's parts of kv_b_proj are called (gguf/names.c).
#define TD_K_B "k_b_proj.weight"
#define TD_V_B "v_b_proj.weight"

typedef struct td_conversion td_conversion;

// Finds all modules that need conversion. store and quant are borrowed until close. Errors name
// file and tensor. On success the caller owns *out, which may be empty.
td_status td_conversion_open(td_conversion **out, const td_store *store, const td_quant *quant,
                             td_err *err);
void td_conversion_close(td_conversion *conversion);

// Size of the result shard in bytes; 0: there is none.
uint64_t td_conversion_bytes(const td_conversion *conversion);
// Bytes of memory in which the results lie apart from the store: the shard, then what is turned
// into rows; 0: nothing to convert.
uint64_t td_conversion_memory_bytes(const td_conversion *conversion);
// Points the tensors of store that are turned into rows to their places in this memory.
void td_conversion_place(const td_conversion *conversion, td_store *store, const void *memory);
// The idx-th tensor of codes, unused after conversion; NULL if idx is past the end.
const td_tensor *td_conversion_source(const td_conversion *conversion, size_t idx);
// The idx-th tensor that is turned into rows, whose data in the store were at *from; NULL if idx is
// past the end.
const td_tensor *td_conversion_turned(const td_conversion *conversion, size_t idx,
                                      const uint8_t **from);
// Writes the shard's header to zeroed, 64-byte aligned memory of td_conversion_bytes.
void td_conversion_write_header(const td_conversion *conversion, void *memory);
typedef struct {
  // Current address of a tensor's data, which may be written: what is turned into rows stays there,
  // unless the address is NULL. NULL: the store's, and memory is td_conversion_memory_bytes long.
  const uint8_t *(*moved)(void *ctx, const td_tensor *t);
  void *ctx;
  const atomic_bool *canceled; // set to abort; may be NULL
} td_conversion_opts;

// Converts into the same memory using all CPUs; opts may be NULL. Logs how many matrices became
// which dtype. TD_ENOMEM, TD_ECANCELED.
td_status td_conversion_run(const td_conversion *conversion, void *memory,
                            const td_conversion_opts *opts, td_err *err);
