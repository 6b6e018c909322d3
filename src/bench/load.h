// src/bench/load.h - load test of any OpenAI-compatible server, measured from the client's side.
#pragma once

#include "options/options.h"

// `tandem bench --server URL`; returns the exit status.
int td_bench_server(const td_options *options);
