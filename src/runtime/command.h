// src/runtime/command.h - what the subcommands share: from options to a session, texts and errors.
#ifndef TD_RUNTIME_COMMAND_H
#define TD_RUNTIME_COMMAND_H

#include "base/token_ids.h"
#include "options/options.h"
#include "runtime/session.h"

// Prints err and returns 1, or 2 for TD_EINVAL.
int td_cmd_fail(const td_err *err);
// The tokens of the text that --file names (- is standard input), as a plain prompt.
td_status td_cmd_read_ids(const td_options *options, td_token_ids *out, td_err *err);
// The context that texts longer than it are cut by: --ctx-size, else 2,048 tokens or what the model
// allows.
td_status td_cmd_window(const td_options *options, uint32_t *out, td_err *err);
// Fills err when --model is missing.
td_status td_cmd_need_model(const td_options *options, td_err *err);

// The session that --model, --threads, --ctx-size, --prefill-chunk, --kv-dtype, --activations and
// --weights ask for.
td_status td_cmd_session_opts(const td_options *options, td_session_opts *out, td_err *err);

#endif
