// src/bench/bench.h - one function a subcommand of `tandem bench`. Each prints its own errors and
// returns the exit status: 0, 1 on failure, 2 on bad options, 130 when interrupted.
#ifndef TD_BENCH_BENCH_H
#define TD_BENCH_BENCH_H

#include "options/options.h"

int td_cmd_bench(const td_options *options);
int td_cmd_bench_kernels(const td_options *options);
int td_cmd_bench_layer(const td_options *options);

#endif
