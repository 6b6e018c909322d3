// src/bench/formats.h - every way a checkpoint stores a matrix, and matrices made up in it.
#ifndef TD_BENCH_FORMATS_H
#define TD_BENCH_FORMATS_H

#include <stdbool.h>
#include <stddef.h>

#include "base/status.h"
#include "tandem/types.h"

typedef struct {
  const char *name;   // "fp8-b128": dtype, then what one scale covers
  const char *family; // of kernels
  td_dtype dtype, scale_dtype;
  td_layout layout;
  uint32_t scale_rows, scale_cols; // 0: no scales; ALL_COLS: the whole row
  bool zero;
} td_bench_format;

enum { TD_BENCH_ALL_COLS = UINT32_MAX };
// More tokens than an answer's steps are likely to bring are taken for a prompt's.
enum { TD_BENCH_ANSWERS = 16 };

const td_bench_format *td_bench_formats(size_t *n);
// Of the kernels that these activations have for it, of a prompt or of answers.
const char *td_bench_family(const td_bench_format *format, td_activations activations, bool prompt);
// Whether a comma-separated list of names has the format's; NULL has all.
bool td_bench_format_chosen(const td_bench_format *format, const char *list);
// TD_EINVAL where a name of the list is no format's.
td_status td_bench_check_formats(const char *list, td_err *err);

// Where matrices lie, behind the begin of a line of memory: files fill their headers up to 8 bytes
// only, and hardly a published tensor begins with a line.
enum { TD_BENCH_OFF_LINE = 16 };

// Describes a matrix in memory (16-byte aligned) and returns the bytes it takes there, a multiple
// of 64. With memory NULL only the bytes mean something.
size_t td_bench_weight(td_weight *out, const td_bench_format *format, uint32_t rows, uint32_t cols,
                       void *memory);
// Fills a matrix with finite codes of ordinary size: speed depends on neither, but subnormal
// numbers and NaN would be a special case. memory as given to td_bench_weight.
void td_bench_fill(const td_weight *weight, void *memory, uint32_t seed);

#endif
