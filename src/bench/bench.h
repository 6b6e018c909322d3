// src/bench/bench.h - entry points of the subcommands of `tandem bench`. Each prints its own errors
// and returns the exit status: 0, 1 on failure, 2 for invalid options, 130 when interrupted.
#pragma once

#include "options/options.h"

int td_cmd_bench(const td_options *options);
int td_cmd_bench_kernels(const td_options *options);
int td_cmd_bench_layer(const td_options *options);
int td_cmd_bench_comm(const td_options *options);
int td_cmd_bench_gpu(const td_options *options);
// doctor.c: `tandem doctor`. Returns 1 also when something is wrong.
int td_cmd_doctor(const td_options *options);
// load.c: the load test of any OpenAI-compatible server (--server URL), from the client's side.
int td_bench_server(const td_options *options);
