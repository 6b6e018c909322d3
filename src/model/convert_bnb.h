// src/model/convert_bnb.h - dequantizes matrices that bitsandbytes stored: a code of 4 bits an
// element, the higher half of a byte first, that indexes a table (NF4, FP4), times the largest
// magnitude of a block; these factors may be stored in 8 bits the same way, less their mean.
#pragma once

#include "model/checkpoint/store.h"
#include "tandem/types.h"

#define TD_BNB_FACTORS ".absmax"

// Tensors named <matrix>.weight and these endings.
enum { TD_BNB_CODES, TD_BNB_ABSMAX, TD_BNB_TABLE, TD_BNB_ABSMAX2, TD_BNB_TABLE2, TD_BNB_N_PARTS };

typedef struct {
  // U8 [rows * cols / 2] codes; F32 [blocks], or U8 with table and factors of its own; F32 [16];
  // F32 [blocks of blocks]; F32 [256]. The last two are NULL where factors are F32.
  const td_tensor *parts[TD_BNB_N_PARTS];
  uint32_t rows, cols, block, block2; // elements a factor, factors a factor of factors
  float mean;                         // of the factors
  td_dtype dtype;                     // of the values: TD_F32, TD_F16 or TD_BF16
} td_bnb_matrix;

// Reads the matrix whose codes are in the tensor <matrix>.weight. TD_EFORMAT, TD_EUNSUPPORTED.
td_status td_bnb_open(td_bnb_matrix *out, const td_store *store, const char *weight, td_err *err);
// Calls use with the name of each tensor that belongs to <matrix>.weight and is there.
void td_bnb_each(const td_store *store, const char *weight,
                 void (*use)(void *ctx, const char *name), void *ctx);
// Writes the values, rounded once, to out [rows][cols] of dtype. data: where each part is now.
void td_bnb_values(const td_bnb_matrix *m, const void *const data[TD_BNB_N_PARTS], void *out);
