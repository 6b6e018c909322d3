// src/cli/cli.h - entry points of the subcommands. Each prints its own errors and returns the exit
// status: 0, 1 on failure, 2 for invalid options, 130 when interrupted.
#pragma once

#include "options/options.h"

int td_cmd_run(const td_options *options);
int td_cmd_eval_logits(const td_options *options);
int td_cmd_eval_perplexity(const td_options *options);
int td_cmd_eval_chat(const td_options *options);
int td_cmd_verify(const td_options *options); // 1 also for an answer that differs
int td_cmd_quantize(const td_options *options);
int td_cmd_pull(const td_options *options);
int td_cmd_plan(const td_options *options);
int td_cmd_recommend(const td_options *options);
int td_cmd_list(const td_options *options);
int td_cmd_rm(const td_options *options);
int td_cmd_ps(const td_options *options);
int td_cmd_top(const td_options *options);
int td_cmd_stop(const td_options *options);
int td_cmd_inspect(const td_options *options);
int td_cmd_inspect_tokens(const td_options *options);
int td_cmd_inspect_template(const td_options *options);
int td_cmd_inspect_routing(const td_options *options);
