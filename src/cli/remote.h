// src/cli/remote.h - requests to the server that --server names.
#pragma once

#include "base/buf.h"
#include "base/status.h"
#include "options/options.h"

// As td_fetch: appends the answer's body. max_ms 0: waits as long as it takes.
td_status td_cli_fetch(td_buf *out, const td_options *options, const char *path, const td_buf *json,
                       uint64_t max_ms, td_err *err);

// The server's URL.
const char *td_cli_server(const td_options *options);
// cache.c: prints the models in the hub's cache. Returns the exit status.
int td_cli_list_cache(const td_options *options);
