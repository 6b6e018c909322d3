// src/options/options.h - all options of all commands, defined in one table (table.c), from which
// the command line, the JSON configuration file, --help and the reference page configs/README.md
// are derived.
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/buf.h"
#include "base/status.h"

// The list of commands with their names and summaries; each command has a bit in option masks.
#define TD_COMMANDS(X)                                                                             \
  X(RUN, "run", "generate from one prompt, or chat on a terminal")                                 \
  X(SERVE, "serve", "serve the OpenAI API over HTTP")                                              \
  X(BENCH, "bench", "measure this machine on a model, or any server by URL")                       \
  X(BENCH_KERNELS, "bench kernels", "every matrix kernel beside the machine's limits")             \
  X(BENCH_LAYER, "bench layer", "one layer of experts beside the machine's limits")                \
  X(BENCH_COMM, "bench comm", "collectives between devices")                                       \
  X(BENCH_GPU, "bench gpu", "a GPU's operators, copies and steps beside its limits")               \
  X(EVAL_LOGITS, "eval logits", "write the logits of given tokens to a .npy file")                 \
  X(EVAL_PERPLEXITY, "eval perplexity", "perplexity of a text")                                    \
  X(EVAL_CHAT, "eval chat", "score a suite of questions")                                          \
  X(VERIFY, "verify", "compute a receipt of an answer again, and compare every bit")               \
  X(QUANTIZE, "quantize", "make a checkpoint of smaller weights")                                  \
  X(PULL, "pull", "download a model from a hub")                                                   \
  X(PLAN, "plan", "predict a model's speed on a machine, and what limits it")                      \
  X(RECOMMEND, "recommend", "models of the hub that a machine can run, and how fast")              \
  X(DOCTOR, "doctor", "whether this machine is right, and what slows it down")                     \
  X(LIST, "list", "the models in the hub's cache, or of a running server")                         \
  X(RM, "rm", "remove a model from the hub's cache")                                               \
  X(PS, "ps", "the models that a running server has loaded")                                       \
  X(TOP, "top", "what a running server does, every two seconds")                                   \
  X(STOP, "stop", "have a running server unload a model")                                          \
  X(INSPECT, "inspect", "what a checkpoint holds and needs")                                       \
  X(INSPECT_TOKENS, "inspect tokens", "text on stdin to a JSON array of token ids, or back")       \
  X(INSPECT_TEMPLATE, "inspect template", "render a chat template")                                \
  X(INSPECT_ROUTING, "inspect routing", "how a text's tokens spread over the experts")

typedef enum {
#define X(id, name, summary) TD_CMD_##id,
  TD_COMMANDS(X)
#undef X
      TD_N_COMMANDS
} td_command;

const char *td_command_name(td_command command);
const char *td_command_summary(td_command command);

// Values of enum options, in the order of their names in table.c.
enum { TD_MAX_BATCH = 1024, TD_MAX_CHUNK = 60 << 10 }; // --max-batch, --prefill-chunk
typedef enum { TD_LOG_TEXT, TD_LOG_JSON } td_log_format;
typedef enum { TD_AUTO, TD_ON, TD_OFF } td_auto_on_off;
typedef enum {
  TD_LOAD_CONCURRENCY,
  TD_LOAD_POISSON,
  TD_LOAD_GAMMA,
  TD_LOAD_CONSTANT,
  TD_LOAD_INTERFERENCE
} td_load_shape;
typedef enum {
  TD_GPU_OPERATORS,
  TD_GPU_COPIES,
  TD_GPU_REGISTER,
  TD_GPU_SIGNALS,
  TD_GPU_STREAM,
  TD_GPU_DECODE,
  TD_GPU_CACHE,
  TD_GPU_INTERFERENCE
} td_gpu_path;

const char *td_load_name(td_load_shape load);
// A value of --comm: "auto", "host" or "nccl".
const char *td_comm_way_name(int way);

// One of a list of names, and GiB behind "=" if they were given; 0: not.
typedef struct {
  int value;
  double gib;
} td_sized_enum;

// A comma-separated list of integers; owned by the options.
typedef struct {
  int32_t *values;
  uint32_t n;
} td_int_list;

// A list of strings, which are owned by the options as is the list.
typedef struct {
  char **values;
  uint32_t n;
} td_str_list;

// Strings are owned by the options; NULL if not given and without a default.
typedef struct {
  td_command command;
  uint64_t given[2]; // bit i: the user gave option i of the table
  // every command
  char *config, *trace;
  int log, log_level; // td_log_format; td_log_level
  bool help;
  // model and machine
  char *model, *device, *devices, *expert_cache, *mirror;
  int expert_parallel;      // td_auto_on_off
  int experts, activations; // td_expert_place, td_activations
  td_sized_enum weights;    // td_weights_mode
  int kv_dtype;             // index in TD_KV_DTYPES
  int draft;                // 0: auto, 1: off, 1 + n: n tokens
  int64_t threads, ctx_size, prefill_chunk, stream_from;
  // prompt and output
  char *prompt, *file, *system, *effort;
  int thinking; // td_auto_on_off
  td_int_list token_ids;
  bool raw, json, ignore_eos;
  int64_t n_predict;
  // sampling
  double temperature, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty;
  int64_t top_k, seed;
  // serve
  char *host, *api_key, *api_key_file, *api_keys, *cors, *kv_dir, *models;
  char *kv_events, *kv_events_replay, *kv_events_topic;
  bool cache_output, cache_per_key;
  // pull
  char *revision;
  td_str_list include, images;
  td_str_list model_names;
  int disaggregate; // td_auto_on_off
  int64_t port, max_batch, kv_tokens, drain_timeout_s, stuck_after_s, prefill_threads;
  int64_t decode_slowdown; // percent
  int64_t max_models;
  double kv_dir_gib, sleep_after_s;
  // bench
  td_int_list bench_prompt, bench_gen, bench_depth, bench_batch;
  int64_t repeat;
  char *server, *extra_body;
  int load_shape; // td_load_shape
  int64_t n_requests, concurrency;
  double rate, slo_ttft_ms, slo_tpot_ms;
  // bench kernels, bench layer
  td_int_list bench_batches, bench_threads;
  char *bench_format;
  int64_t n_matrices;
  bool bench_nodes; // bench layer
  // bench comm
  td_int_list bench_ranks, bench_bytes;
  int comm_backend; // td_comm_way_name
  // bench gpu
  int gpu_path; // td_gpu_path
  char *only;
  bool list, without_cublas;
  int64_t bench_layers, shrink;
  // quantize
  char *to;
  // eval, inspect and quantize
  bool receipts;
  char *receipt, *out, *suite, *template_file, *input;
  int64_t chunk_tokens;
  bool tensors, decode;
  // plan
  char *machine, *plan_format;
  bool with_plan;
  int64_t plan_depth;
  double hit_rate, acceptance;
  bool what_if;
} td_options;

// Parses argv[1..argc): the command's words, then its options ("--name value", "--name=value", "-x
// value", "--flag", "--no-flag"), then the file of --config; the command line takes precedence.
// Errors name the option and its range. With --help, as "help COMMAND" or without a command, help
// is set and the rest is not checked. Call td_options_free in every case.
td_status td_options_parse(td_options *out, int argc, char **argv, td_err *err);
void td_options_free(td_options *options);

// Whether the user gave the option (long name), on the command line or in the file.
bool td_options_given(const td_options *options, const char *name);
// Whether the user said how and where the model runs, and not only which.
bool td_options_place_model(const td_options *options);

// The value of a number or enum option, or of a text option, by its long name. The option must
// exist.
int64_t td_options_number(const td_options *options, const char *name);
const char *td_options_text(const td_options *options, const char *name);

// Sets an option of options->command by its long name, as if the user had given it; value NULL:
// back to its default, and not given. TD_EINVAL names the option and its valid values.
td_status td_options_set(td_options *options, const char *name, const char *value, td_err *err);
// Appends the value of a number, enum or text option of options->command, as td_options_set reads
// it; nothing for a text that is not given.
void td_options_show(td_buf *out, const td_options *options, const char *name);

// Appends the help of a command, or of the program if command is TD_N_COMMANDS.
void td_options_help(td_buf *out, td_command command);
// Appends the reference page in Markdown.
void td_options_reference(td_buf *out);
// Appends the man page, in roff.
void td_options_man(td_buf *out);
// Appends the script by which a shell completes tandem's arguments: bash, zsh or fish; models:
// names offered where a model is, with blanks between. False: of another shell.
bool td_options_completion(td_buf *out, const char *shell, const char *models);
