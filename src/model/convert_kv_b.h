// src/model/convert_kv_b.h - makes MLA's kv_b_proj from the two tensors that GGUF stores instead:
//   k_b [heads][latent][nope], each head's part transposed
//   v_b [heads][v][latent]
// to [heads][nope, then v][latent].
#pragma once

#include <stdbool.h>

#include "tandem/types.h"

typedef struct {
  const void *k, *v;
  td_dtype k_dtype, v_dtype; // any that has a kernel without scales
  td_dtype dtype;            // of the result: TD_F32, TD_F16 or TD_BF16
  uint32_t heads, latent, nope, v_dim;
} td_kv_b_parts;

// The dtype that holds every value of both: their own F16 or BF16, otherwise F32, since scale times
// code of a block has up to 19 bits.
td_dtype td_kv_b_dtype(td_dtype k, td_dtype v);
// False: out of memory.
bool td_kv_b_join(const td_kv_b_parts *parts, void *out);
