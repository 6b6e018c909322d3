// src/runtime/command.h - shared by the subcommands: from options to a session, input texts and
// errors.
#pragma once

#include "base/token_ids.h"
#include "options/options.h"
#include "runtime/session.h"

// Prints err and returns 1, or 2 for TD_EINVAL.
int td_cmd_fail(const td_err *err);
// Tokenizes the text of --file (- is standard input) as a plain prompt.
td_status td_cmd_read_ids(const td_options *options, td_token_ids *out, td_err *err);
// Window length by which longer texts are split: --ctx-size, else 2,048 tokens or the model's
// maximum if that is less.
td_status td_cmd_window(const td_options *options, uint32_t *out, td_err *err);
// TD_EINVAL: --model is missing.
td_status td_cmd_need_model(const td_options *options, td_err *err);

// The dtype that --kv-dtype names.
td_dtype td_cmd_kv_dtype(const td_options *options);
// Session options from --model, --device, --threads, --ctx-size, --prefill-chunk, --kv-dtype,
// --weights, --activations and --expert-device. Checks them against each other and the model's
// config.json.
td_status td_cmd_session_opts(const td_options *options, td_session_opts *out, td_err *err);
