// src/bench/delta.h - the recurrence of a gated delta net, as a part of `tandem bench kernels`.
#pragma once

#include "bench/report.h"

// Measures every version that this machine supports at the shape of Qwen3-Next (32 heads of 128 x
// 128), for each of options->bench_batches as the number of tokens of one sequence, and with each
// number of threads. Calls rotate through the states of 36 layers.
td_status td_bench_delta(td_bench_report *report, const td_format *format, td_err *err);
