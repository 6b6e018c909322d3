// src/cli/find_model.h - from --model NAME or ORG/NAME to a folder.
#pragma once

#include "base/buf.h"
#include "base/status.h"
#include "options/options.h"

// If --model is the name of a model of the hub, replaces it by the model's folder in the cache,
// after downloading what is missing.
td_status td_cli_find_model(td_options *options, td_err *err);
// run_server.c: whether a server at the default address has the model that `tandem run` is to run,
// and no option says how to run it here.
bool td_cli_is_served(const td_options *options);

// recommend.c: ORG/NAME[:QUANT] of NAME[:QUANT], a model that `tandem recommend` knows. Upper and
// lower case are alike, and "-Instruct" and "-FP8" may be left out. The caller frees it; NULL:
// there is none, or a file has that name.
char *td_cli_full_name(const char *name);
// Appends the short names of these models, in lower case, with blanks between.
void td_cli_short_names(td_buf *out);
// An error if the name is no file and nearly that of such a model.
td_status td_cli_check_name(const char *name, td_err *err);
