// src/app/bench_server.h - load on any OpenAI-compatible server, measured as its clients see it.
#ifndef TD_APP_BENCH_SERVER_H
#define TD_APP_BENCH_SERVER_H

#include "config/options.h"

// `tandem bench --server URL`; returns the program's exit status.
int td_bench_server(const td_options *options);

#endif
