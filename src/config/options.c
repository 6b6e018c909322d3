// src/config/options.c - the option table and what reads it.
#include "config/options.h"

#include <errno.h>
#include <float.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/fs.h"
#include "config/json.h"

typedef enum { OPT_STR, OPT_INT, OPT_REAL, OPT_FLAG, OPT_INTS, OPT_NAMES } opt_kind;

typedef struct {
  const char *name; // long name, without dashes; also the key in the configuration file
  char letter;      // short name or 0
  opt_kind kind;
  uint32_t commands; // bits of td_command
  size_t offset;     // of the field in td_options
  double min, max;   // OPT_INT, OPT_REAL and each of OPT_INTS
  const char *fallback;
  const char *metavar, *help;
} option;

#define ON(id) (1u << TD_CMD_##id)
enum {
  ALL = (1u << TD_N_COMMANDS) - 1,
  EVAL = ON(EVAL_LOGITS) | ON(EVAL_PERPLEXITY) | ON(EVAL_CHAT),
  COMPUTE = ON(RUN) | ON(SERVE) | ON(BENCH) | EVAL | ON(INSPECT_ROUTING),
  SAMPLE = ON(RUN),
  PARTS = ON(BENCH_KERNELS) | ON(BENCH_LAYER),
};
#define AT(field) offsetof(td_options, field)
#define NO_RANGE  0, 0

static const option table[] = {
    {"help", 'h', OPT_FLAG, ALL, AT(help), NO_RANGE, NULL, NULL, "show the command's options"},
    {"config", 0, OPT_STR, ALL, AT(config), NO_RANGE, NULL, "FILE",
     "JSON object of options, by their long names; the command line wins"},
    {"log", 0, OPT_STR, ALL, AT(log), NO_RANGE, "text", "FORMAT",
     "text, or json: one object a line on stderr with ts, level, msg, pid and role"},
    {"log-level", 0, OPT_STR, ALL, AT(log_level), NO_RANGE, "info", "LEVEL",
     "error, warning, info or debug"},
    {"trace", 0, OPT_STR, ON(RUN) | ON(SERVE), AT(trace), NO_RANGE, NULL, "FILE",
     "record steps, operators and messages of all processes, for chrome://tracing or Perfetto"},
    {"model", 'm', OPT_STR, ALL, AT(model), NO_RANGE, NULL, "DIR",
     "checkpoint directory as the hubs publish it"},
    {"threads", 't', OPT_INT, COMPUTE | ON(QUANTIZE), AT(threads), 0, 4096, "0", "N",
     "compute threads; 0: one for each CPU"},
    {"device", 0, OPT_STR, COMPUTE, AT(device), NO_RANGE, "cpu", "DEVICE",
     "cpu, cuda (the first GPU), or auto: a GPU if there is one"},
    {"experts", 0, OPT_STR, COMPUTE, AT(experts), NO_RANGE, "auto", "DEVICE",
     "beside a GPU, what computes the routed experts: cpu, from its own memory; gpu, which must "
     "hold them; auto: the GPU as many layers' as fit, the CPU the others'"},
    {"ctx-size", 'c', OPT_INT, COMPUTE, AT(ctx_size), 0, 1 << 24, "0", "TOKENS",
     "longest context; 0: what the model allows, within memory"},
    {"kv-dtype", 0, OPT_STR, COMPUTE, AT(kv_dtype), NO_RANGE, "f32", "DTYPE",
     "KV cache in f32 (BF16 on a GPU, which computes in it), or in f16: half the memory, keys and "
     "values rounded to 11 bits"},
    {"activations", 0, OPT_STR, COMPUTE | PARTS, AT(activations), NO_RANGE, "auto", "DTYPE",
     "what they are rounded to at the CPU's multiplications: auto: FP16, BF16 or, at 4-bit "
     "weights, 16 bits, whichever is fast on it; f32: nothing; int8: a prompt's to 8 bits at 4-bit "
     "weights, answers are a little worse"},
    {"weights", 0, OPT_STR, COMPUTE, AT(weights), NO_RANGE, "auto", "WHERE",
     "mmap: mapped from the files; resident: read once into shared memory, in 2 MB pages where "
     "there are any; auto: resident where that fits and brings such pages"},
    {"prefill-chunk", 0, OPT_INT, COMPUTE, AT(prefill_chunk), 0, 1 << 16, "0", "TOKENS",
     "prompt tokens computed in one step; 0: 512 to 2048, by experts and attention, up to 32768 "
     "where experts stream to a GPU; beside answers serve computes fewer"},

    {"prompt", 'p', OPT_STR, ON(RUN), AT(prompt), NO_RANGE, NULL, "TEXT", "what to answer"},
    {"file", 'f', OPT_STR, ON(RUN) | ON(EVAL_PERPLEXITY) | ON(INSPECT_ROUTING), AT(file), NO_RANGE,
     NULL, "FILE", "read the text from a file; - is standard input"},
    {"system", 0, OPT_STR, ON(RUN), AT(system), NO_RANGE, NULL, "TEXT", "system message"},
    {"token-ids", 0, OPT_INTS, ON(RUN) | ON(EVAL_LOGITS), AT(token_ids), 0, INT32_MAX, NULL, "IDS",
     "token ids instead of text, as 1,2,3 or @FILE"},
    {"raw", 0, OPT_FLAG, ON(RUN), AT(raw), NO_RANGE, NULL, NULL,
     "continue the text as it is, without the chat template"},
    {"n-predict", 'n', OPT_INT, ON(RUN) | ON(EVAL_CHAT), AT(n_predict), 1, 1 << 24, "1024",
     "TOKENS", "most tokens of an answer"},
    {"ignore-eos", 0, OPT_FLAG, ON(RUN), AT(ignore_eos), NO_RANGE, NULL, NULL,
     "go on behind an end-of-sequence token"},

    {"temperature", 0, OPT_REAL, SAMPLE, AT(temperature), 0, 100, "1", "T",
     "0 is greedy; default: the model's own"},
    {"top-k", 0, OPT_INT, SAMPLE, AT(top_k), 0, INT32_MAX, "0", "K",
     "draw from the K most likely tokens; 0: all; default: the model's own"},
    {"top-p", 0, OPT_REAL, SAMPLE, AT(top_p), 0, 1, "1", "P",
     "draw from the fewest tokens that hold P of the probability; default: the model's own"},
    {"min-p", 0, OPT_REAL, SAMPLE, AT(min_p), 0, 1, "0", "P",
     "drop tokens less likely than P times the most likely one"},
    {"repetition-penalty", 0, OPT_REAL, SAMPLE, AT(repetition_penalty), 0.01, 100, "1", "R",
     "divide (or multiply, below 0) the logits of tokens seen before"},
    {"presence-penalty", 0, OPT_REAL, SAMPLE, AT(presence_penalty), -2, 2, "0", "X",
     "subtract from the logits of tokens in the answer"},
    {"frequency-penalty", 0, OPT_REAL, SAMPLE, AT(frequency_penalty), -2, 2, "0", "X",
     "subtract for each time a token is in the answer"},
    {"seed", 's', OPT_INT, SAMPLE | ON(BENCH), AT(seed), -9007199254740992.0, 9007199254740992.0,
     "0", "N", "the same seed gives the same text; run and bench --server draw afresh without one"},

    {"host", 0, OPT_STR, ON(SERVE), AT(host), NO_RANGE, "127.0.0.1", "ADDRESS",
     "IPv4 or IPv6 address, or unix:PATH"},
    {"port", 0, OPT_INT, ON(SERVE), AT(port), 0, 65535, "8080", "PORT", "0: any free one"},
    {"api-key", 0, OPT_STR, ON(SERVE) | ON(BENCH), AT(api_key), NO_RANGE, NULL, "KEY",
     "the bearer token that serve asks for and bench --server sends"},
    {"api-keys", 0, OPT_STR, ON(SERVE), AT(api_keys), NO_RANGE, NULL, "FILE",
     "a line for each bearer token that serve accepts, behind it its share of the machine if not "
     "1"},
    {"served-model-name", 0, OPT_NAMES, ON(SERVE), AT(model_names), NO_RANGE, NULL, "NAME",
     "what the API calls the model, one name or several: A,B or A B; default: the repository's "
     "name "
     "in a hub's cache, else the directory's"},
    {"model-name", 0, OPT_NAMES, ON(SERVE), AT(model_names), NO_RANGE, NULL, "NAME", "the same"},
    {"max-batch", 0, OPT_INT, ON(SERVE), AT(max_batch), 1, 1024, "16", "N",
     "requests answered together"},
    {"kv-tokens", 0, OPT_INT, ON(SERVE), AT(kv_tokens), 0, 1 << 30, "0", "TOKENS",
     "what the KV pool holds, of all requests together; 0: --max-batch whole contexts, within half "
     "of "
     "the memory; when answers outgrow it, the last that came waits"},
    {"workers", 0, OPT_STR, ON(SERVE), AT(workers), NO_RANGE, "auto", "HOW",
     "split: one process reads prompts, another writes answers; one: a single process does both; "
     "auto: split with 2 threads or more, on the CPU"},
    {"prefill-threads", 0, OPT_INT, ON(SERVE), AT(prefill_threads), 0, 4096, "0", "N",
     "with --workers split: threads that read a prompt while answers are written; 0: half"},
    {"kv-dir", 0, OPT_STR, ON(SERVE), AT(kv_dir), NO_RANGE, NULL, "DIR",
     "keep prompts that memory has no room for, or at the end, in this directory, to be read "
     "instead "
     "of computed when they come again; for one process"},
    {"kv-dir-size", 0, OPT_REAL, ON(SERVE), AT(kv_dir_gib), 0.0001, 1 << 20, "8", "GIB",
     "most that --kv-dir holds; what was used least recently is removed"},
    {"drain-timeout", 0, OPT_INT, ON(SERVE), AT(drain_timeout_s), 0, 86400, "30", "SECONDS",
     "how long running requests may go on after SIGTERM, and then prompts be written to --kv-dir"},
    {"stuck-after", 0, OPT_INT, ON(SERVE), AT(stuck_after_s), 1, 86400, "30", "SECONDS",
     "a worker that computes nothing for so long makes /health answer 503; after twice that it is "
     "started again"},

    {"prompt-tokens", 'p', OPT_INTS, ON(BENCH), AT(bench_prompt), 0, 1 << 24, "512", "N,N",
     "prompt lengths to measure prefill with"},
    {"gen-tokens", 'n', OPT_INTS, ON(BENCH), AT(bench_gen), 0, 1 << 24, "64", "N,N",
     "tokens to decode"},
    {"depth", 'd', OPT_INTS, ON(BENCH), AT(bench_depth), 0, 1 << 24, "0", "N,N",
     "tokens in the cache before a measurement begins"},
    {"batch", 'b', OPT_INTS, ON(BENCH), AT(bench_batch), 1, 1024, "1", "N,N",
     "sequences decoded together"},
    {"repeat", 'r', OPT_INT, ON(BENCH) | PARTS, AT(repeat), 1, 1000, "5", "N",
     "measurements, after one warm-up"},
    {"format", 'f', OPT_STR, PARTS, AT(bench_format), NO_RANGE, NULL, "NAME,NAME",
     "how weights are stored: f32, bf16, f16, fp8-b128, fp8-channel, int8-channel, int4-g128, "
     "int4-g32, gptq-g128, awq-g128, mxfp4, nvfp4; default: all, for a layer fp8-b128,bf16"},
    {"batch", 'b', OPT_INTS, PARTS, AT(bench_batches), 1, 4096, "1,8,512", "N,N",
     "tokens computed together; more than 16 are taken for a prompt's"},
    {"threads", 't', OPT_INTS, PARTS, AT(bench_threads), 0, 4096, "1,0", "N,N",
     "compute threads; 0: one for each CPU"},
    {"matrices", 0, OPT_INT, PARTS, AT(n_matrices), 1, 4096, "64", "N",
     "different matrices, or experts of the layer; few stay in the caches and flatter"},
    {"server", 0, OPT_STR, ON(BENCH), AT(server), NO_RANGE, NULL, "URL",
     "measure an OpenAI-compatible server instead, http://HOST:PORT"},
    {"load", 0, OPT_STR, ON(BENCH), AT(load_shape), NO_RANGE, "concurrency", "SHAPE",
     "with --server: concurrency (fixed), poisson, gamma or constant arrivals; interference: "
     "prompts "
     "arrive while one answer is written"},
    {"requests", 0, OPT_INT, ON(BENCH), AT(n_requests), 1, 1000000, "32", "N",
     "with --server: requests in all"},
    {"concurrency", 0, OPT_INT, ON(BENCH), AT(concurrency), 1, 4096, "4", "N",
     "with --server: requests open at once"},
    {"rate", 0, OPT_REAL, ON(BENCH), AT(rate), 0.001, 100000, "1", "PER_SECOND",
     "with --server: arrivals a second"},
    {"slo-ttft", 0, OPT_REAL, ON(BENCH), AT(slo_ttft_ms), 0, 1e9, "0", "MS",
     "with --server: goodput counts requests whose TTFT is at most this; 0: no limit"},
    {"slo-itl", 0, OPT_REAL, ON(BENCH), AT(slo_itl_ms), 0, 1e9, "0", "MS",
     "with --server: and whose mean inter-token latency is at most this; 0: no limit"},

    {"out", 'o', OPT_STR, ON(EVAL_LOGITS), AT(out), NO_RANGE, NULL, "FILE",
     "where to write float32 [n_tokens][n_vocab], .npy"},
    {"to", 0, OPT_STR, ON(QUANTIZE), AT(to), NO_RANGE, NULL, "FORMAT",
     "int4-g128, int4-g32 (INT4 in groups of 128 or 32), fp8 (128x128 blocks) or mxfp4"},
    {"out", 'o', OPT_STR, ON(QUANTIZE), AT(out), NO_RANGE, NULL, "DIR",
     "directory of the new checkpoint; shards that are finished there are kept"},
    {"chunk-tokens", 0, OPT_INT, ON(EVAL_LOGITS), AT(chunk_tokens), 1, 1 << 24, "512", "TOKENS",
     "tokens computed in one step"},
    {"suite", 0, OPT_STR, ON(EVAL_CHAT), AT(suite), NO_RANGE, NULL, "FILE",
     "questions and expected answers, one JSON object a line"},
    {"tensors", 0, OPT_FLAG, ON(INSPECT), AT(tensors), NO_RANGE, NULL, NULL, "list every tensor"},
    {"decode", 0, OPT_FLAG, ON(INSPECT_TOKENS), AT(decode), NO_RANGE, NULL, NULL,
     "a JSON array of ids on stdin to text"},
    {"template", 0, OPT_STR, ON(INSPECT_TEMPLATE), AT(template_file), NO_RANGE, NULL, "FILE",
     "a template file instead of a model's"},
    {"input", 0, OPT_STR, ON(INSPECT_TEMPLATE), AT(input), NO_RANGE, NULL, "FILE",
     "JSON object with messages, tools, add_generation_prompt and other variables"},
    {"json", 0, OPT_FLAG,
     ON(RUN) | ON(BENCH) | PARTS | ON(INSPECT) | ON(INSPECT_ROUTING) | ON(EVAL_PERPLEXITY) |
         ON(EVAL_CHAT) | ON(QUANTIZE),
     AT(json), NO_RANGE, NULL, NULL, "machine-readable output on stdout"},
};
_Static_assert(sizeof table / sizeof table[0] <= 128, "td_options.given is too small");

static const char *const command_names[] = {
#define X(id, name, summary) name,
    TD_COMMANDS(X)
#undef X
};
static const char *const command_summaries[] = {
#define X(id, name, summary) summary,
    TD_COMMANDS(X)
#undef X
};

const char *td_command_name(td_command command) {
  return command < TD_N_COMMANDS ? command_names[command] : "";
}

// ---- values ---------------------------------------------------------------------------------

static td_status out_of_range(const option *o, const char *text, td_err *err) {
  if (o->kind == OPT_REAL) {
    return td_fail(err, TD_EINVAL, "--%s %s: give a number from %g to %g", o->name, text, o->min,
                   o->max);
  }
  return td_fail(err, TD_EINVAL, "--%s %s: give a whole number from %.0f to %.0f", o->name, text,
                 o->min, o->max);
}

static td_status set_str(char **field, const char *text, td_err *err) {
  char *copy = strdup(text);
  if (!copy) return td_fail(err, TD_ENOMEM, "out of memory");
  free(*field);
  *field = copy;
  return TD_OK;
}

static td_status set_int(const option *o, int64_t *field, const char *text, td_err *err) {
  char *end;
  errno = 0;
  long long value = strtoll(text, &end, 10);
  if (end == text || *end || errno || (double)value < o->min || (double)value > o->max) {
    return out_of_range(o, text, err);
  }
  *field = value;
  return TD_OK;
}

static td_status set_real(const option *o, double *field, const char *text, td_err *err) {
  char *end;
  double value = strtod(text, &end);
  if (end == text || *end || !(value >= o->min && value <= o->max)) {
    return out_of_range(o, text, err);
  }
  *field = value;
  return TD_OK;
}

static td_status parse_ints(const option *o, td_int_list *list, const char *text, td_err *err) {
  size_t n = 1;
  for (const char *p = text; *p; p++)
    n += *p == ',';
  int32_t *values = malloc(n * sizeof *values);
  if (!values) return td_fail(err, TD_ENOMEM, "out of memory");
  const char *p = text;
  for (size_t i = 0; i < n; i++) {
    char *end;
    errno = 0;
    long long value = strtoll(p, &end, 10);
    char stop = *end == '\n' && !end[1] ? '\0' : *end;
    if (end == p || errno || (double)value < o->min || (double)value > o->max ||
        stop != (i + 1 < n ? ',' : '\0')) {
      free(values);
      return td_fail(err, TD_EINVAL,
                     "--%s: entry %zu of \"%.40s\" is not a whole number from %.0f to %.0f",
                     o->name, i + 1, text, o->min, o->max);
    }
    values[i] = (int32_t)value;
    p = end + 1;
  }
  free(list->values);
  *list = (td_int_list){.values = values, .n = (uint32_t)n};
  return TD_OK;
}

// "1,2,3", or "@FILE" with the same inside.
static td_status set_ints(const option *o, td_int_list *field, const char *text, td_err *err) {
  if (text[0] != '@') return parse_ints(o, field, text, err);
  td_buf file = TD_BUF_INIT;
  td_status st = td_file_read(&file, text + 1, 1 << 28, err);
  if (st == TD_OK) st = parse_ints(o, field, td_buf_text(&file), err);
  td_buf_free(&file);
  return st;
}

// "a,b" behind the names that are there.
static td_status add_names(const option *o, td_str_list *list, const char *text, td_err *err) {
  while (*text) {
    size_t len = strcspn(text, ",");
    char **grown = realloc(list->values, (list->n + (size_t)1) * sizeof *grown);
    if (!grown) return td_fail(err, TD_ENOMEM, "out of memory");
    list->values = grown;
    if (len && !(list->values[list->n++] = strndup(text, len))) {
      list->n--;
      return td_fail(err, TD_ENOMEM, "out of memory");
    }
    text += len + (text[len] == ',');
  }
  return list->n ? TD_OK : td_fail(err, TD_EINVAL, "--%s: give a name", o->name);
}

static void free_names(td_str_list *list) {
  for (uint32_t i = 0; i < list->n; i++)
    free(list->values[i]);
  free(list->values);
  *list = (td_str_list){0};
}

static td_status set_flag(const option *o, bool *field, const char *text, td_err *err) {
  if (strcmp(text, "true") && strcmp(text, "false")) {
    return td_fail(err, TD_EINVAL, "--%s %s: give true or false", o->name, text);
  }
  *field = text[0] == 't';
  return TD_OK;
}

static td_status set_value(const option *o, td_options *options, const char *text, td_err *err) {
  void *field = (char *)options + o->offset;
  switch (o->kind) {
  case OPT_STR: return set_str(field, text, err);
  case OPT_INT: return set_int(o, field, text, err);
  case OPT_REAL: return set_real(o, field, text, err);
  case OPT_FLAG: return set_flag(o, field, text, err);
  case OPT_INTS: return set_ints(o, field, text, err);
  case OPT_NAMES: return add_names(o, field, text, err);
  }
  return TD_EINTERNAL;
}

static bool is_given(const td_options *options, size_t idx) {
  return options->given[idx / 64] >> (idx % 64) & 1;
}

static void mark_given(td_options *options, size_t idx) {
  options->given[idx / 64] |= (uint64_t)1 << (idx % 64);
}

bool td_options_given(const td_options *options, const char *name) {
  for (size_t i = 0; i < TD_COUNT(table); i++) {
    if (!strcmp(table[i].name, name) && is_given(options, i)) return true;
  }
  return false;
}

// ---- command line ---------------------------------------------------------------------------

// The option with this long name (or letter, when name is NULL) that the command takes; -1: none.
static int find_option(td_command command, const char *name, size_t len, char letter) {
  for (size_t i = 0; i < TD_COUNT(table); i++) {
    const option *o = &table[i];
    if (command < TD_N_COMMANDS && !(o->commands >> command & 1)) continue;
    bool same = name ? strlen(o->name) == len && !strncmp(o->name, name, len)
                     : o->letter && o->letter == letter;
    if (same) return (int)i;
  }
  return -1;
}

// Longest command whose words begin argv; returns the number of words.
static int match_command(int argc, char **argv, td_command *command) {
  int best = 0;
  for (int c = 0; c < TD_N_COMMANDS; c++) {
    const char *space = strchr(command_names[c], ' ');
    size_t first = space ? (size_t)(space - command_names[c]) : strlen(command_names[c]);
    int words = space ? 2 : 1;
    if (argc - 1 < words || strlen(argv[1]) != first || strncmp(argv[1], command_names[c], first) ||
        (space && strcmp(argv[2], space + 1))) {
      continue;
    }
    if (words > best) {
      best = words;
      *command = (td_command)c;
    }
  }
  return best;
}

// "eval" is not a command, but the first word of some, which the error tells.
static td_status unknown_command(const char *word, td_err *err) {
  char list[256] = "";
  size_t len = strlen(word), at = 0;
  for (int c = 0; c < TD_N_COMMANDS; c++) {
    const char *name = command_names[c];
    if (strncmp(name, word, len) || name[len] != ' ' || at >= sizeof list) continue;
    at += (size_t)snprintf(list + at, sizeof list - at, "%s`tandem %s`", at ? ", " : "", name);
  }
  if (at) return td_fail(err, TD_EINVAL, "%s: needs a second word: %s", word, list);
  return td_fail(err, TD_EINVAL, "%s: not a command; `tandem --help` lists them", word);
}

static td_status unknown_option(const td_options *options, const char *arg, td_err *err) {
  return td_fail(err, TD_EINVAL, "%s: not an option of %s; `tandem %s --help` lists them", arg,
                 td_command_name(options->command), td_command_name(options->command));
}

// Reads argv[*i] and what belongs to it; *i moves to the last word used.
static td_status parse_arg(td_options *options, int argc, char **argv, int *i, td_err *err) {
  const char *arg = argv[*i];
  if (arg[0] != '-' || !arg[1]) {
    return td_fail(err, TD_EINVAL, "%s: unexpected word behind `tandem %s`; options begin with --",
                   arg, td_command_name(options->command));
  }
  bool is_long = arg[1] == '-';
  const char *name = is_long ? arg + 2 : NULL;
  const char *equals = is_long ? strchr(name, '=') : NULL;
  size_t len = !is_long ? 0 : equals ? (size_t)(equals - name) : strlen(name);
  int idx = !is_long && arg[2] ? -1 : find_option(options->command, name, len, arg[1]);
  if (idx < 0 && is_long && !equals && !strncmp(name, "no-", 3)) {
    idx = find_option(options->command, name + 3, len - 3, 0);
    if (idx >= 0 && table[idx].kind == OPT_FLAG) {
      mark_given(options, (size_t)idx);
      return set_value(&table[idx], options, "false", err);
    }
    idx = -1;
  }
  if (idx < 0) return unknown_option(options, arg, err);
  const char *value = equals ? equals + 1 : "true";
  if (!equals && table[idx].kind != OPT_FLAG) {
    if (*i + 1 >= argc) {
      return td_fail(err, TD_EINVAL, "%s: needs a value (%s)", arg, table[idx].metavar);
    }
    value = argv[++*i];
  }
  mark_given(options, (size_t)idx);
  td_status st = set_value(&table[idx], options, value, err);
  while (st == TD_OK && table[idx].kind == OPT_NAMES && *i + 1 < argc && argv[*i + 1][0] != '-') {
    st = set_value(&table[idx], options, argv[++*i], err);
  }
  return st;
}

// ---- configuration file ---------------------------------------------------------------------

static td_status ints_of_array(const cJSON *array, td_buf *text) {
  const cJSON *item;
  cJSON_ArrayForEach(item, array) {
    if (!cJSON_IsNumber(item)) return TD_EINVAL;
    td_buf_printf(text, "%s%.17g", text->len ? "," : "", item->valuedouble);
  }
  return TD_OK;
}

static td_status names_of_array(const cJSON *array, td_buf *text) {
  const cJSON *item;
  cJSON_ArrayForEach(item, array) {
    if (!cJSON_IsString(item)) return TD_EINVAL;
    td_buf_printf(text, "%s%s", text->len ? "," : "", item->valuestring);
  }
  return TD_OK;
}

static td_status set_from_json(const option *o, td_options *options, const cJSON *item,
                               td_err *err) {
  td_buf text = TD_BUF_INIT;
  bool fits = true;
  if (cJSON_IsString(item)) {
    fits = o->kind == OPT_STR || o->kind == OPT_INTS || o->kind == OPT_NAMES;
    td_buf_str(&text, item->valuestring);
  } else if (cJSON_IsNumber(item)) {
    fits = o->kind == OPT_INT || o->kind == OPT_REAL || o->kind == OPT_INTS;
    td_buf_printf(&text, "%.17g", item->valuedouble);
  } else if (cJSON_IsBool(item)) {
    fits = o->kind == OPT_FLAG;
    td_buf_str(&text, cJSON_IsTrue(item) ? "true" : "false");
  } else if (o->kind == OPT_NAMES) {
    fits = cJSON_IsArray(item) && names_of_array(item, &text) == TD_OK;
  } else {
    fits = cJSON_IsArray(item) && o->kind == OPT_INTS && ints_of_array(item, &text) == TD_OK;
  }
  td_status st = fits ? td_buf_status(&text, err)
                      : td_fail(err, TD_EINVAL, "\"%s\": the value has the wrong type", o->name);
  if (st == TD_OK) st = set_value(o, options, td_buf_text(&text), err);
  td_buf_free(&text);
  return st;
}

static td_status parse_config_file(td_options *options, td_err *err) {
  cJSON *root = NULL;
  td_status st = td_json_parse_file(&root, options->config, 1 << 20, err);
  if (st != TD_OK) return st;
  if (!cJSON_IsObject(root)) {
    st = td_fail(err, TD_EINVAL, "%s: not a JSON object", options->config);
  }
  for (const cJSON *item = root->child; st == TD_OK && item; item = item->next) {
    // A file may serve several commands: options of other commands are let pass.
    if (find_option(TD_N_COMMANDS, item->string, strlen(item->string), 0) < 0) {
      st = td_fail(err, TD_EINVAL, "%s: \"%s\" is not an option", options->config, item->string);
      break;
    }
    int idx = find_option(options->command, item->string, strlen(item->string), 0);
    if (idx < 0 || is_given(options, (size_t)idx)) continue;
    st = set_from_json(&table[idx], options, item, err);
    if (st != TD_OK) td_err_prefix(err, "%s", options->config);
    mark_given(options, (size_t)idx);
  }
  cJSON_Delete(root);
  return st;
}

td_status td_options_parse(td_options *out, int argc, char **argv, td_err *err) {
  *out = (td_options){.command = TD_N_COMMANDS};
  td_status st = TD_OK;
  for (size_t i = 0; i < TD_COUNT(table) && st == TD_OK; i++) {
    if (table[i].fallback) st = set_value(&table[i], out, table[i].fallback, err);
  }
  if (st != TD_OK) return st;
  int words = match_command(argc, argv, &out->command);
  if (!words) {
    if (argc < 2 || !strcmp(argv[1], "--help") || !strcmp(argv[1], "-h") ||
        !strcmp(argv[1], "help")) {
      out->help = true;
      return TD_OK;
    }
    return unknown_command(argv[1], err);
  }
  for (int i = 1 + words; i < argc && !out->help; i++) {
    td_err others; // the first is told, the rest may still say how
    td_status one = parse_arg(out, argc, argv, &i, st == TD_OK ? err : &others);
    if (st == TD_OK) st = one;
  }
  if (st == TD_OK && out->config && !out->help) st = parse_config_file(out, err);
  return st;
}

void td_options_free(td_options *options) {
  for (size_t i = 0; i < TD_COUNT(table); i++) {
    void *field = (char *)options + table[i].offset;
    if (table[i].kind == OPT_STR) { // a field may be that of two commands' options
      free(*(char **)field);
      *(char **)field = NULL;
    }
    if (table[i].kind == OPT_INTS) free(((td_int_list *)field)->values);
    if (table[i].kind == OPT_NAMES) free_names(field);
  }
  *options = (td_options){.command = TD_N_COMMANDS};
}

// ---- help -----------------------------------------------------------------------------------

static void help_line(td_buf *out, const option *o) {
  size_t start = out->len;
  td_buf_printf(out, "  ");
  if (o->letter) td_buf_printf(out, "-%c, ", o->letter);
  td_buf_printf(out, "--%s", o->name);
  if (o->metavar) td_buf_printf(out, " %s", o->metavar);
  size_t width = out->len - start;
  td_buf_printf(out, "%*s%s", width < 30 ? (int)(30 - width) : 2, "", o->help);
  if (o->fallback) td_buf_printf(out, " (%s)", o->fallback);
  td_buf_char(out, '\n');
}

void td_options_help(td_buf *out, td_command command) {
  if (command >= TD_N_COMMANDS) {
    td_buf_str(out, "tandem: Mixture-of-Experts language models on a machine you own\n\n"
                    "usage: tandem COMMAND --model DIR [options]\n\n");
    for (int c = 0; c < TD_N_COMMANDS; c++) {
      td_buf_printf(out, "  %-18s %s\n", command_names[c], command_summaries[c]);
    }
    td_buf_str(out, "\n`tandem COMMAND --help` lists a command's options.\n");
    return;
  }
  td_buf_printf(out, "tandem %s: %s\n\noptions (default):\n", command_names[command],
                command_summaries[command]);
  for (size_t i = 0; i < TD_COUNT(table); i++) {
    if (table[i].commands >> command & 1) help_line(out, &table[i]);
  }
}

void td_options_reference(td_buf *out) {
  td_buf_str(out, "# Options\n\nMade from the option table by `tandem help --markdown`. Every "
                  "option is also a key of the JSON\nfile that `--config` names, without the "
                  "dashes in front; the command line wins.\n");
  for (int c = 0; c < TD_N_COMMANDS; c++) {
    td_buf_printf(out, "\n## tandem %s\n\n%s\n\n| option | default | |\n| --- | --- | --- |\n",
                  command_names[c], command_summaries[c]);
    for (size_t i = 0; i < TD_COUNT(table); i++) {
      const option *o = &table[i];
      if (!(o->commands >> c & 1)) continue;
      td_buf_char(out, '|');
      if (o->letter) td_buf_printf(out, " `-%c`", o->letter);
      td_buf_printf(out, " `--%s%s%s` | %s | %s |\n", o->name, o->metavar ? " " : "",
                    o->metavar ? o->metavar : "", o->fallback ? o->fallback : "", o->help);
    }
  }
}
