// include/tandem/formats.h - the formats that weights and KV pages are stored in, one list each.
// Dispatch, checks, benches, options and tests are made from these lists.
#pragma once

#include <stdbool.h>

#include "tandem/types.h"

// What a td_weight may be: dtype, family of the CPU kernels that read it (kernels.h), and
// the dtypes its scales may have. Other matrices have no kernel and are refused.
#define TD_WEIGHT_KINDS(X)                                                                         \
  X(F32, linear_f32, 0)                                                                            \
  X(BF16, linear_bf16, 0)                                                                          \
  X(F16, linear_f16, 0)                                                                            \
  X(F8E4M3, linear_f8e4m3, 1u << TD_F32)                                                           \
  X(I8, linear_i8, 1u << TD_F32)                                                                   \
  X(I4, linear_i4, 1u << TD_F32 | 1u << TD_F16 | 1u << TD_BF16)                                    \
  X(F4E2M1, linear_f4e2m1, 1u << TD_F8E8M0 | 1u << TD_F8E4M3)                                      \
  TD_BLOCK_ROWS(TD_WEIGHT_ROW, X)
#define TD_WEIGHT_ROW(X, ID, name, cols, bytes) X(ID, linear_##name, 0)

typedef struct {
  td_dtype dtype;
  const char *family;
  unsigned scale_dtypes; // bit mask; 0: no scales
} td_weight_kind;

// NULL: no kernel reads such a matrix.
const td_weight_kind *td_weight_kind_of(td_dtype dtype);

// The formats of published checkpoints, which the benches measure: name (dtype, then the elements
// of a scale), dtype, dtype of scales, rows and columns of a scale's block (0: no scales),
// whether it has zero points, and what it is, as kernels/README.md has it.
enum { TD_FORMAT_WHOLE_ROW = UINT32_MAX }; // columns: one scale a row
#define TD_FORMATS(X)                                                                              \
  X("f32", F32, F32, 0, 0, false, "32-bit floats")                                                 \
  X("bf16", BF16, F32, 0, 0, false, "BF16, as most models are published")                          \
  X("f16", F16, F32, 0, 0, false, "FP16")                                                          \
  X("fp8-b128", F8E4M3, F32, 128, 128, false, "FP8 in blocks of 128x128, DeepSeek's")              \
  X("fp8-channel", F8E4M3, F32, 1, TD_FORMAT_WHOLE_ROW, false, "FP8, a scale a row")               \
  X("int8-channel", I8, F32, 1, TD_FORMAT_WHOLE_ROW, false, "INT8, a scale a row")                 \
  X("int4-g128", I4, BF16, 1, 128, false, "INT4 in groups of 128, compressed-tensors")             \
  X("int4-g32", I4, BF16, 1, 32, false, "INT4 in groups of 32, compressed-tensors")                \
  X("int4-g128-zp", I4, F16, 1, 128, true,                                                         \
    "INT4 in groups of 128 with zero points, as of GPTQ and AWQ")                                  \
  X("mxfp4", F4E2M1, F8E8M0, 1, 32, false, "FP4 in groups of 32 with powers of two")               \
  X("nvfp4", F4E2M1, F8E4M3, 1, 16, false, "FP4 in groups of 16 with FP8 scales")                  \
  X("q8_0", Q8_0, F32, 0, 0, false, "GGUF: 8 bits in blocks of 32")                                \
  X("q4_k", Q4_K, F32, 0, 0, false, "GGUF: 4 bits in blocks of 256 with 6-bit scales and offsets") \
  X("q6_k", Q6_K, F32, 0, 0, false, "GGUF: 6 bits in blocks of 256 with 8-bit scales")             \
  X("q5_k", Q5_K, F32, 0, 0, false, "GGUF: 5 bits in blocks of 256 with 6-bit scales and offsets") \
  X("q4_0", Q4_0, F32, 0, 0, false, "GGUF: 4 bits in blocks of 32")                                \
  X("q4_1", Q4_1, F32, 0, 0, false, "GGUF: 4 bits in blocks of 32 with offsets")                   \
  X("q5_0", Q5_0, F32, 0, 0, false, "GGUF: 5 bits in blocks of 32")                                \
  X("q5_1", Q5_1, F32, 0, 0, false, "GGUF: 5 bits in blocks of 32 with offsets")                   \
  X("q2_k", Q2_K, F32, 0, 0, false, "GGUF: 2 bits in blocks of 256 with 4-bit scales and offsets") \
  X("q3_k", Q3_K, F32, 0, 0, false, "GGUF: 3 bits in blocks of 256 with 6-bit scales")             \
  X("iq4_nl", IQ4_NL, F32, 0, 0, false, "GGUF: 4-bit places in a table, in blocks of 32")          \
  X("iq4_xs", IQ4_XS, F32, 0, 0, false,                                                            \
    "GGUF: 4-bit places in a table, in blocks of 256 with 6-bit scales")                           \
  X("gguf-mxfp4", MXFP4, F32, 0, 0, false, "GGUF: FP4 in blocks of 32 with a power of two each")   \
  X("tq2_0", TQ2_0, F32, 0, 0, false, "GGUF: -1, 0, 1 in 2 bits, in blocks of 256")                \
  X("tq1_0", TQ1_0, F32, 0, 0, false, "GGUF: -1, 0, 1, five in a byte, in blocks of 256")          \
  X("iq2_xxs", IQ2_XXS, F32, 0, 0, false,                                                          \
    "GGUF: 2-bit grid of 256 with signs, 4-bit scales per 32")                                     \
  X("iq2_xs", IQ2_XS, F32, 0, 0, false, "GGUF: 2-bit grid of 512 with signs, 4-bit scales per 16") \
  X("iq2_s", IQ2_S, F32, 0, 0, false, "GGUF: 2-bit grid of 1024 with signs, 4-bit scales per 16")  \
  X("iq3_xxs", IQ3_XXS, F32, 0, 0, false,                                                          \
    "GGUF: 3-bit grid of 256 with signs, 4-bit scales per 32")                                     \
  X("iq3_s", IQ3_S, F32, 0, 0, false, "GGUF: 3-bit grid of 512 with signs, 4-bit scales per 32")   \
  X("iq1_s", IQ1_S, F32, 0, 0, false, "GGUF: grid of 2048 with offsets, 3-bit scales per 32")      \
  X("iq1_m", IQ1_M, F32, 0, 0, false, "GGUF: grid of 2048 with offsets, 3-bit scales per 16")

typedef struct {
  const char *name;
  td_dtype dtype, scale_dtype;
  uint32_t scale_rows, scale_cols;
  bool zero;
  const char *what;
} td_format;

const td_format *td_formats(size_t *n);
const td_format *td_format_named(const char *name); // NULL: there is none

// The formats that `tandem quantize` makes (model/quantize/encode.c).
#define TD_ENCODINGS(X) X("int4-g128") X("int4-g32") X("fp8") X("mxfp4")

// Precisions of KV pages: dtype and name in options. On a GPU F32 means the activations' dtype.
#define TD_KV_DTYPES(X)                                                                            \
  X(F32, "f32")                                                                                    \
  X(F16, "f16")                                                                                    \
  X(F8E4M3, "fp8")
