// src/bench/load.h - load on any OpenAI-compatible server, measured as its clients see it.
#ifndef TD_BENCH_LOAD_H
#define TD_BENCH_LOAD_H

#include "options/options.h"

// `tandem bench --server URL`; returns the program's exit status.
int td_bench_server(const td_options *options);

#endif
