// src/app/command.h - one function a subcommand. Each prints its own errors and returns the
// program's exit status: 0, 1 on failure, 2 on bad options, 130 when interrupted.
#ifndef TD_APP_COMMAND_H
#define TD_APP_COMMAND_H

#include "app/session.h"
#include "base/ids.h"
#include "config/options.h"

int td_cmd_run(const td_options *options);
int td_cmd_serve(const td_options *options);
int td_cmd_bench(const td_options *options);
int td_cmd_bench_kernels(const td_options *options);
int td_cmd_bench_layer(const td_options *options);
int td_cmd_eval_logits(const td_options *options);
int td_cmd_eval_perplexity(const td_options *options);
int td_cmd_eval_chat(const td_options *options);
int td_cmd_quantize(const td_options *options);
int td_cmd_inspect(const td_options *options);
int td_cmd_inspect_tokens(const td_options *options);
int td_cmd_inspect_template(const td_options *options);
int td_cmd_inspect_routing(const td_options *options);

// Prints err and returns 1, or 2 for TD_EINVAL.
int td_cmd_fail(const td_err *err);
// The tokens of the text that --file names (- is standard input), as a plain prompt.
td_status td_cmd_read_ids(const td_options *options, td_ids *out, td_err *err);
// The context that texts longer than it are cut by: --ctx-size, else 2,048 tokens or what the model
// allows.
td_status td_cmd_window(const td_options *options, uint32_t *out, td_err *err);
// Fills err when --model is missing.
td_status td_cmd_need_model(const td_options *options, td_err *err);

// The session that --model, --threads, --ctx-size, --prefill-chunk, --kv-dtype, --activations and
// --weights ask for.
td_status td_cmd_session_opts(const td_options *options, td_session_opts *out, td_err *err);

#endif
