// src/device/cuda/absent.c - operators that only the CPU has. Kinds of attention that use them have
// has_gpu false (engine/attn/kind.c), so that a model of theirs is refused before.
#include "device/cuda/cuda.h"

#define ABSENT(name, args_type)                                                                    \
  td_status td_cuda_op_##name(td_cuda_stream *stream, const args_type *a, td_err *err) {           \
    (void)stream, (void)a;                                                                         \
    return td_fail(err, TD_EUNSUPPORTED, "%s: there is no GPU kernel", #name);                     \
  }

ABSENT(select_blocks, td_select_blocks_args)
