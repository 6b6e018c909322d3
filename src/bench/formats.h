// src/bench/formats.h - synthetic matrices in every format of tandem/formats.h.
#pragma once

#include <stdbool.h>
#include <stddef.h>

#include "tandem/formats.h"

// Batches of more tokens than this are benchmarked with prefill kernels, smaller ones as decode.
enum { TD_BENCH_ANSWERS = 16 };

// Kernel family used for this format with the given activations, for prefill (prompt) or decode.
const char *td_bench_family(const td_format *format, td_activations activations, bool prompt);
// Whether the comma-separated list contains the format's name; NULL contains all.
bool td_bench_format_chosen(const td_format *format, const char *list);

// Offset of matrices from a cache line: safetensors headers are padded to 8 bytes only, so
// published tensors rarely start on a cache line.
enum { TD_BENCH_OFF_LINE = 16 };

// Describes a matrix in memory (16-byte aligned) and returns the bytes it occupies, a multiple of
// 64. With memory NULL only the returned size is meaningful.
size_t td_bench_weight(td_weight *out, const td_format *format, uint32_t rows, uint32_t cols,
                       void *memory);
// Fills a matrix with finite values of ordinary magnitude: speed does not depend on values, except
// for subnormals and NaN. memory as given to td_bench_weight.
void td_bench_fill(const td_weight *weight, void *memory, uint32_t seed);
