// src/options/table.c - the option table: name, commands, range, default and help of every option.
#include <string.h>

#include "options/options_impl.h"
#include "tandem/formats.h"

#define ON(id) (1u << TD_CMD_##id)
enum {
  ALL = (1u << TD_N_COMMANDS) - 1,
  EVAL = ON(EVAL_LOGITS) | ON(EVAL_PERPLEXITY) | ON(EVAL_CHAT),
  COMPUTE = ON(RUN) | ON(SERVE) | ON(BENCH) | EVAL | ON(INSPECT_ROUTING) | ON(VERIFY),
  MICROBENCH = ON(BENCH_KERNELS) | ON(BENCH_LAYER),
  JSON = ON(RUN) | ON(BENCH) | MICROBENCH | ON(BENCH_COMM) | ON(INSPECT) | ON(INSPECT_ROUTING) |
         ON(EVAL_PERPLEXITY) | ON(EVAL_CHAT) | ON(QUANTIZE) | ON(LIST) | ON(PS) | ON(RECOMMEND) |
         ON(PLAN),
  REMOTE = ON(LIST) | ON(PS) | ON(TOP) | ON(STOP),
};
#define AT(field)    offsetof(td_options, field)
#define NO_RANGE     0, 0, NULL
#define RANGE(a, b)  a, b, NULL
#define ONE_OF(list) 0, 0, list

// Names in the order of each enum.
static const char *const logs[] = {"text", "json", NULL};
static const char *const log_levels[] = {"error", "warning", "info", "debug", NULL};
static const char *const expert_devices[] = {"auto", "cpu", "gpu", NULL};
static const char *const kv_dtypes[] = {
#define X(id, name) name,
    TD_KV_DTYPES(X)
#undef X
        NULL};
static const char *const encodings[] = {
#define X(name) name,
    TD_ENCODINGS(X)
#undef X
        NULL};
static const char *const formats[] = {
#define X(name, ...) name,
    TD_FORMATS(X)
#undef X
        NULL};
static const char *const activations[] = {"f32", "auto", "int8", "fp8", NULL};
static const char *const weights[] = {"mmap", "resident", "auto", "stream", NULL};
static const char *const efforts[] = {"none", "minimal", "low", "medium",
                                      "high", "xhigh",   "max", NULL};
static const char *const auto_on_off[] = {"auto", "on", "off", NULL};
static const char *const comm_ways[] = {"auto", "host", "nccl", NULL};
static const char *const drafts[] = {"auto", "off", "1", "2", "3", "4", "5", "6", "7", "8", NULL};
static const char *const gpu_paths[] = {"operators", "copies", "register",     "signals", "stream",
                                        "decode",    "cache",  "interference", NULL};
static const char *const loads[] = {"concurrency", "poisson",      "gamma",
                                    "constant",    "interference", NULL};

const char *const td_option_group_titles[N_GROUPS] = {
    [GROUP_GENERAL] = "General",
    [GROUP_MODEL] = "Model and placement",
    [GROUP_PROMPT] = "Prompt and output",
    [GROUP_SAMPLING] = "Sampling",
    [GROUP_NETWORK] = "Network and keys",
    [GROUP_SERVING] = "Scheduling",
    [GROUP_KV] = "KV cache",
    [GROUP_BENCH] = "Benchmark",
    [GROUP_LOAD] = "Load on a server",
    [GROUP_FILES] = "Files",
};

const char *const td_options_first[] = {
    "model",     "server",      "prompt",   "file",   "system",       "port",   "host",
    "api-key",   "ctx-size",    "thinking", "effort", "n-predict",    "device", "weights",
    "max-batch", "temperature", "machine",  "format", "expert-cache", NULL};

const td_option td_option_table[] = {
    {GROUP_GENERAL, "help", 'h', OPT_FLAG, ALL, AT(help), NO_RANGE, NULL, NULL, "show this help"},
    {GROUP_GENERAL, "config", 0, OPT_STR, ALL, AT(config), NO_RANGE, NULL, "FILE",
     "JSON object of options by their long names; the command line wins"},
    {GROUP_GENERAL, "log", 0, OPT_ENUM, ALL, AT(log), ONE_OF(logs), "text", "FORMAT",
     "log format on stderr; json: an object a line with ts, level, msg, pid and role"},
    {GROUP_GENERAL, "log-level", 0, OPT_ENUM, ALL, AT(log_level), ONE_OF(log_levels), "info",
     "LEVEL", "how much to log"},
    {GROUP_GENERAL, "trace", 0, OPT_STR, ON(RUN) | ON(SERVE), AT(trace), NO_RANGE, NULL, "FILE",
     "record steps, operators and messages of all processes, for Perfetto or chrome://tracing"},
    {GROUP_GENERAL, "json", 0, OPT_FLAG, JSON, AT(json), NO_RANGE, NULL, NULL,
     "machine-readable output on stdout"},

    {GROUP_MODEL, "model", 'm', OPT_STR, ALL, AT(model), NO_RANGE, NULL, "DIR",
     "checkpoint directory as published, a GGUF file, or ORG/NAME: from the hub's cache, "
     "downloaded if it is not there; ORG/NAME:Q4_K_M: that quantization's GGUF files; ORG/ may be "
     "left out for the models of `tandem recommend`, as qwen3-30b-a3b; a path or a name may also "
     "stand without --model"},
    {GROUP_MODEL, "revision", 0, OPT_STR, ALL, AT(revision), NO_RANGE, NULL, "REVISION",
     "branch, tag or commit of a model of the hub; main if not given"},
    {GROUP_MODEL, "include", 0, OPT_NAMES, ON(PULL), AT(include), NO_RANGE, NULL, "GLOB,GLOB",
     "download the files whose paths match; default: the files that tandem reads"},
    {GROUP_MODEL, "models", 0, OPT_STR, ON(SERVE) | ON(RUN), AT(models), NO_RANGE, NULL, "DIR",
     "instead of --model: serve every checkpoint and GGUF file in this directory under its name, "
     "loaded when a request asks for it; run begins with the first, and /model changes it"},
    {GROUP_MODEL, "max-models", 0, OPT_INT, ON(SERVE), AT(max_models), RANGE(1, 64), "1", "N",
     "with --models: how many are loaded at once; the least recently used is unloaded"},
    {GROUP_MODEL, "sleep-after", 0, OPT_REAL, ON(SERVE), AT(sleep_after_s), RANGE(0, 1e8), "0",
     "SECONDS",
     "unload a model that has had no request for so long; the next request loads it again; 0: "
     "never"},
    {GROUP_MODEL, "threads", 't', OPT_INT,
     COMPUTE | ON(QUANTIZE) | ON(PLAN) | ON(RECOMMEND) | ON(BENCH_GPU) | ON(DOCTOR), AT(threads),
     RANGE(0, 4096), "0", "N", "compute threads; 0: one per CPU, but one less beside a GPU"},
    {GROUP_MODEL, "device", 0, OPT_STR, COMPUTE | ON(BENCH_COMM) | ON(BENCH_GPU), AT(device),
     NO_RANGE, "auto", "DEVICE", "auto: a GPU if one can be used, else the CPU; cuda: a GPU; cpu"},
    {GROUP_MODEL, "devices", 0, OPT_STR, COMPUTE, AT(devices), NO_RANGE, "0", "N,N",
     "GPUs by index: one, or several for long prompts (--expert-parallel); with --device cpu as "
     "many CPU devices, which share the threads"},
    {GROUP_MODEL, "expert-parallel", 0, OPT_ENUM, COMPUTE, AT(expert_parallel), ONE_OF(auto_on_off),
     "auto", "WHEN",
     "with several --devices and one worker: while nothing is decoded, each computes a share of a "
     "prompt's tokens and experts; the first two GPUs also decode, with experts in their memory. "
     "auto: prompts for which experts stream, of 64 tokens or more, and "
     "decode where that is expected to be faster; on: always; off: the first device only"},
    {GROUP_MODEL, "expert-device", 0, OPT_ENUM, COMPUTE, AT(experts), ONE_OF(expert_devices),
     "auto", "DEVICE",
     "where routed experts run: gpu (all must fit), cpu, or auto (as many layers as fit on the "
     "GPU, the rest on the CPU)"},
    {GROUP_MODEL, "stream-from", 0, OPT_INT, COMPUTE, AT(stream_from), RANGE(0, 1 << 24), "0",
     "TOKENS",
     "prompt tokens of a prefill step from which experts that the CPU would compute are copied to "
     "the GPU instead; the two round differently. 0: from the model, its format and the number of "
     "threads"},
    {GROUP_MODEL, "expert-cache", 0, OPT_STR, COMPUTE | ON(PLAN), AT(expert_cache), NO_RANGE, "off",
     "GIB",
     "GPU memory for a cache of the CPU's experts that decode used last; auto: the memory left, "
     "instead of whole layers if less than half of them fit. With a cache, rounding, and "
     "so the text of a repeated request, depends on what it holds"},
    {GROUP_MODEL, "weights", 0, OPT_SIZED, COMPUTE, AT(weights), ONE_OF(weights), "auto", "WHERE",
     "mmap: map the files; resident: read them once into shared memory, in 2 MB pages where "
     "possible; stream: only routed experts stay in the files, and are read from the drive when "
     "they are used, the most used ones kept in GIB of memory (stream=GIB; default: what is left); "
     "auto: resident if it fits and 2 MB pages are available, or if there are several NUMA nodes "
     "(the weights are spread over them), or if experts stream to a GPU; stream if the files are "
     "larger than memory"},
    {GROUP_MODEL, "mirror", 0, OPT_STR, COMPUTE, AT(mirror), NO_RANGE, NULL, "DIR",
     "with --weights stream: a folder with the same files on another drive; each expert is read "
     "from "
     "both, from the faster one more, and from one alone where the other fails"},
    {GROUP_MODEL, "activations", 0, OPT_ENUM, COMPUTE | MICROBENCH | ON(PLAN), AT(activations),
     ONE_OF(activations), "auto", "DTYPE",
     "activation precision in matmuls. On the CPU: f32 (exact, unless --expert-parallel has "
     "prompts "
     "computed by several devices, which round differently), auto (the fastest of FP16, BF16 and "
     "INT16 on this CPU), int8 (8-bit for prefill with 4-bit weights and GGUF's; slightly lower "
     "quality). On a GPU: BF16, or fp8 or int8 (prefill with weights of that format also rounds "
     "activations to it; fp8: GPUs from compute capability 8.9 on; slightly lower quality)"},
    {GROUP_MODEL, "ctx-size", 'c', OPT_INT, COMPUTE | ON(PLAN), AT(ctx_size), RANGE(0, 1 << 24),
     "0", "TOKENS",
     "longest context; 0: the model's, within memory, and for plan what its prompts and depth "
     "need"},
    {GROUP_MODEL, "kv-dtype", 0, OPT_ENUM, COMPUTE | ON(PLAN) | ON(INSPECT), AT(kv_dtype),
     ONE_OF(kv_dtypes), "f32", "DTYPE",
     "KV cache precision: f32 (on a GPU BF16); f16, half of f32's memory and 11 bits; fp8, half of "
     "f16's or a little more and 4 bits with a scale per 128 values, for attention without an "
     "indexer"},
    {GROUP_MODEL, "prefill-chunk", 0, OPT_INT, COMPUTE, AT(prefill_chunk), RANGE(0, TD_MAX_CHUNK),
     "0", "TOKENS",
     "prompt tokens per prefill step; 0: 512 to 2048 by model, up to 8192 on a GPU and 32768 where "
     "experts stream to it; fewer beside running requests"},

    {GROUP_PROMPT, "prompt", 'p', OPT_STR, ON(RUN), AT(prompt), NO_RANGE, NULL, "TEXT",
     "the prompt; without it, chat"},
    {GROUP_PROMPT, "file", 'f', OPT_STR, ON(RUN) | ON(EVAL_PERPLEXITY) | ON(INSPECT_ROUTING),
     AT(file), NO_RANGE, NULL, "FILE",
     "read the text from a file; - is standard input; run: --prompt follows it"},
    {GROUP_PROMPT, "image", 0, OPT_NAMES, ON(RUN), AT(images), NO_RANGE, NULL, "FILE,FILE",
     "PNG, JPEG or WebP files that the prompt, or the first message, shows to the model"},
    {GROUP_PROMPT, "system", 0, OPT_STR, ON(RUN), AT(system), NO_RANGE, NULL, "TEXT",
     "system message"},
    {GROUP_PROMPT, "thinking", 0, OPT_ENUM, ON(RUN), AT(thinking), ONE_OF(auto_on_off), "auto",
     "WHETHER",
     "reasoning before the answer, if the chat template supports it; auto: the template's default"},
    {GROUP_PROMPT, "effort", 0, OPT_CHOICE, ON(RUN), AT(effort), ONE_OF(efforts), NULL, "LEVEL",
     "how much reasoning, if the chat template supports it: the nearest of its levels; none: off"},
    {GROUP_PROMPT, "token-ids", 0, OPT_INTS, ON(RUN) | ON(EVAL_LOGITS), AT(token_ids),
     RANGE(0, INT32_MAX), NULL, "IDS", "token ids instead of text, as 1,2,3 or @FILE"},
    {GROUP_PROMPT, "raw", 0, OPT_FLAG, ON(RUN), AT(raw), NO_RANGE, NULL, NULL,
     "continue the text as it is, without the chat template"},
    {GROUP_PROMPT, "n-predict", 'n', OPT_INT, ON(RUN) | ON(EVAL_CHAT), AT(n_predict),
     RANGE(1, 1 << 24), "1024", "TOKENS", "maximum number of tokens to generate"},
    {GROUP_PROMPT, "ignore-eos", 0, OPT_FLAG, ON(RUN), AT(ignore_eos), NO_RANGE, NULL, NULL,
     "keep generating after an end-of-sequence token"},

    {GROUP_SAMPLING, "temperature", 0, OPT_REAL, ON(RUN), AT(temperature), RANGE(0, 100), "1", "T",
     "0: greedy; default: the model's own"},
    {GROUP_SAMPLING, "top-k", 0, OPT_INT, ON(RUN), AT(top_k), RANGE(0, INT32_MAX), "0", "K",
     "sample from the K most likely tokens; 0: all; default: the model's own"},
    {GROUP_SAMPLING, "top-p", 0, OPT_REAL, ON(RUN), AT(top_p), RANGE(0, 1), "1", "P",
     "sample from the fewest tokens with total probability P; default: the model's own"},
    {GROUP_SAMPLING, "min-p", 0, OPT_REAL, ON(RUN), AT(min_p), RANGE(0, 1), "0", "P",
     "drop tokens less likely than P times the most likely one"},
    {GROUP_SAMPLING, "repetition-penalty", 0, OPT_REAL, ON(RUN), AT(repetition_penalty),
     RANGE(0.01, 100), "1", "R", "divide (or multiply, below 0) the logits of tokens seen before"},
    {GROUP_SAMPLING, "presence-penalty", 0, OPT_REAL, ON(RUN), AT(presence_penalty), RANGE(-2, 2),
     "0", "X", "subtract X from the logits of tokens generated before"},
    {GROUP_SAMPLING, "frequency-penalty", 0, OPT_REAL, ON(RUN), AT(frequency_penalty), RANGE(-2, 2),
     "0", "X", "subtract X for each time a token was generated"},
    {GROUP_SAMPLING, "seed", 's', OPT_INT, ON(RUN) | ON(BENCH), AT(seed),
     RANGE(-9007199254740992.0, 9007199254740992.0), "0", "N",
     "seed of the sampler and of bench --server's prompts; default: random"},

    {GROUP_NETWORK, "host", 0, OPT_STR, ON(SERVE), AT(host), NO_RANGE, "127.0.0.1", "ADDRESS",
     "IPv4 or IPv6 address, or unix:PATH"},
    {GROUP_NETWORK, "port", 0, OPT_INT, ON(SERVE) | ON(DOCTOR), AT(port), RANGE(0, 65535), "8080",
     "PORT", "0: any free port"},
    {GROUP_NETWORK, "api-key", 0, OPT_STR, ON(SERVE) | ON(BENCH) | ON(RUN) | REMOTE, AT(api_key),
     NO_RANGE, NULL, "KEY",
     "bearer token that serve requires, and that is sent to --server; default: TANDEM_API_KEY of "
     "the environment"},
    {GROUP_NETWORK, "api-key-file", 0, OPT_STR, ON(SERVE) | ON(BENCH) | ON(RUN) | REMOTE,
     AT(api_key_file), NO_RANGE, NULL, "FILE",
     "file that holds the key of --api-key, so that it appears on no command line"},
    {GROUP_NETWORK, "api-keys", 0, OPT_STR, ON(SERVE), AT(api_keys), NO_RANGE, NULL, "FILE",
     "file of accepted API keys, one per line, optionally followed by a weight (default 1); see "
     "--cache-per-key for what one key can learn of another"},
    {GROUP_NETWORK, "cors", 0, OPT_STR, ON(SERVE), AT(cors), NO_RANGE, NULL, "ORIGIN",
     "origin whose pages may use the API in a browser, such as https://chat.example; *: any; "
     "default: none"},
    {GROUP_NETWORK, "served-model-name", 0, OPT_NAMES, ON(SERVE), AT(model_names), NO_RANGE, NULL,
     "NAME",
     "model name in the API, or several: A,B or A B; default: the repository's name in a hub's "
     "cache, else the directory's"},

    {GROUP_SERVING, "max-batch", 0, OPT_INT, ON(SERVE), AT(max_batch), RANGE(1, TD_MAX_BATCH), "16",
     "N", "requests decoded together"},
    {GROUP_SERVING, "disaggregate", 0, OPT_ENUM, ON(SERVE), AT(disaggregate), ONE_OF(auto_on_off),
     "auto", "WHEN",
     "prefill and decode in two processes; with GPUs, on the first and the second of --devices. "
     "auto: "
     "on the CPU with 2 threads or more, on two GPUs if they do not hold all experts"},
    {GROUP_SERVING, "prefill-threads", 0, OPT_INT, ON(SERVE), AT(prefill_threads), RANGE(0, 4096),
     "0", "N",
     "with --disaggregate on: threads that prefill gets beside decode; 0: half, with GPUs an "
     "eighth"},
    {GROUP_SERVING, "decode-slowdown", 0, OPT_INT, ON(SERVE), AT(decode_slowdown), RANGE(0, 1000),
     "15", "PERCENT",
     "with experts streaming to a GPU: how much longer decode steps may take beside a long prompt; "
     "the prompt gets a quarter of the bus at least"},
    {GROUP_SERVING, "draft", 0, OPT_ENUM, ON(SERVE), AT(draft), ONE_OF(drafts), "auto", "N",
     "tokens to draft ahead per request and step, from what followed the same words before or by "
     "the model's prediction layer; the text stays the same. auto: as many as pay, by the share of "
     "right ones and the time of steps"},
    {GROUP_SERVING, "drain-timeout", 0, OPT_INT, ON(SERVE), AT(drain_timeout_s), RANGE(0, 86400),
     "30", "SECONDS",
     "how long running requests may continue after SIGTERM, and then the writing of KV pages to "
     "--kv-dir"},
    {GROUP_SERVING, "worker-timeout", 0, OPT_INT, ON(SERVE), AT(stuck_after_s), RANGE(1, 86400),
     "30", "SECONDS",
     "seconds without progress before a worker is reported unhealthy; it is restarted after twice "
     "as long"},

    {GROUP_KV, "kv-cache-tokens", 0, OPT_INT, ON(SERVE), AT(kv_tokens), RANGE(0, 1 << 30), "0",
     "TOKENS",
     "KV cache size, shared by all requests; 0: --max-batch full contexts, at most half of free "
     "memory. When it is exhausted the newest request is preempted"},
    {GROUP_KV, "cache-output", 0, OPT_FLAG, ON(SERVE), AT(cache_output), NO_RANGE, NULL, NULL,
     "also reuse the KV pages of generated tokens: the next turn of a conversation prefills only "
     "what is new. Decode rounds differently from prefill, so a result may differ by rounding "
     "from the result of a server that has not seen the conversation"},
    {GROUP_KV, "cache-per-key", 0, OPT_FLAG, ON(SERVE), AT(cache_per_key), NO_RANGE, NULL, NULL,
     "keep the KV pages of prompts apart for each API key (without keys, for each client address), "
     "as cache_salt of a request does for its own. Otherwise cached_tokens and the time to the "
     "first token tell one key what another has asked"},
    {GROUP_KV, "kv-dir", 0, OPT_STR, ON(SERVE), AT(kv_dir), NO_RANGE, NULL, "DIR",
     "keep evicted KV pages in this directory and reload them instead of computing them again; one "
     "process at a time"},
    {GROUP_KV, "kv-dir-size", 0, OPT_REAL, ON(SERVE), AT(kv_dir_gib), RANGE(0.0001, 1 << 20), "8",
     "GIB", "limit of --kv-dir; the least recently used pages are removed"},
    {GROUP_KV, "kv-events", 0, OPT_STR, ON(SERVE), AT(kv_events), NO_RANGE, NULL, "ENDPOINT",
     "tell routers over ZeroMQ which KV pages are stored and removed, as vLLM does: tcp://*:5557 "
     "and ipc://PATH are bound to, tcp://HOST:PORT is connected to; needs libzmq"},
    {GROUP_KV, "kv-events-replay", 0, OPT_STR, ON(SERVE), AT(kv_events_replay), NO_RANGE, NULL,
     "ENDPOINT",
     "with --kv-events: send the last 4096 batches again to who asks for those from a number on, "
     "as tcp://*:5558"},
    {GROUP_KV, "kv-events-topic", 0, OPT_STR, ON(SERVE), AT(kv_events_topic), NO_RANGE, NULL,
     "TOPIC", "with --kv-events: the messages' topic; none by default. llm-d: kv@POD@MODEL"},

    {GROUP_BENCH, "prompt-tokens", 'p', OPT_INTS, ON(BENCH), AT(bench_prompt), RANGE(0, 1 << 24),
     "512", "N,N", "prompt lengths to prefill"},
    {GROUP_BENCH, "plan", 0, OPT_FLAG, ON(BENCH), AT(with_plan), NO_RANGE, NULL, NULL,
     "what `tandem plan` predicts for --machine, beside what is measured"},
    {GROUP_BENCH, "machine", 0, OPT_STR, ON(PLAN) | ON(BENCH) | ON(RECOMMEND), AT(machine),
     NO_RANGE, "this", "MACHINE",
     "this: this machine's CPU, measured; or a file as in configs/machines, or the name of one "
     "there: desktop-64gb, epyc-9355x2, h100, xeon-8488cx2; with cards of configs/cards: "
     "this+rtx-4090, epyc-9355x2+rtx-5090+rtx-5090"},
    {GROUP_BENCH, "format", 'f', OPT_CHOICE, ON(PLAN), AT(plan_format), ONE_OF(formats), "fp8-b128",
     "NAME", "format of the weights if --model is a published model's name, as Qwen3-30B-A3B"},
    {GROUP_BENCH, "prompt-tokens", 'p', OPT_INTS, ON(PLAN), AT(bench_prompt), RANGE(1, 1 << 24),
     "2048,8192,32768", "N,N", "prompt lengths"},
    {GROUP_BENCH, "batch", 'b', OPT_INTS, ON(PLAN), AT(bench_batch), RANGE(1, 1024), "1", "N,N",
     "sequences decoded together; a GPU has keys and values for so many, as with --max-batch"},
    {GROUP_BENCH, "depth", 'd', OPT_INT, ON(PLAN), AT(plan_depth), RANGE(0, 1 << 24), "1024", "N",
     "context of each sequence: tokens before the first decoded one"},
    {GROUP_BENCH, "what-if", 0, OPT_FLAG, ON(PLAN), AT(what_if), NO_RANGE, NULL, NULL,
     "also with more memory, another card, a second drive or socket and the like, fastest first"},
    {GROUP_BENCH, "hits", 0, OPT_REAL, ON(PLAN), AT(hit_rate), RANGE(-1, 1), "-1", "SHARE",
     "share of the chosen experts that --expert-cache holds; -1: the share of all experts that "
     "fit"},
    {GROUP_BENCH, "acceptance", 0, OPT_REAL, ON(PLAN), AT(acceptance), RANGE(0, 1), "0.7", "SHARE",
     "share of drafted tokens that are right"},
    {GROUP_BENCH, "gen-tokens", 'n', OPT_INTS, ON(BENCH), AT(bench_gen), RANGE(0, 1 << 24), "64",
     "N,N", "tokens to decode"},
    {GROUP_BENCH, "depth", 'd', OPT_INTS, ON(BENCH), AT(bench_depth), RANGE(0, 1 << 24), "0", "N,N",
     "tokens in the KV cache before a measurement"},
    {GROUP_BENCH, "batch", 'b', OPT_INTS, ON(BENCH), AT(bench_batch), RANGE(1, 1024), "1", "N,N",
     "sequences decoded together"},
    {GROUP_BENCH, "repeat", 'r', OPT_INT, ON(BENCH) | MICROBENCH | ON(BENCH_COMM), AT(repeat),
     RANGE(1, 1000), "5", "N", "measurements after one warm-up"},
    {GROUP_BENCH, "format", 'f', OPT_SUBSET, MICROBENCH, AT(bench_format), ONE_OF(formats), NULL,
     "NAME,NAME", "weight formats; default: all, for a layer fp8-b128,bf16"},
    {GROUP_BENCH, "batch", 'b', OPT_INTS, MICROBENCH, AT(bench_batches), RANGE(1, 4096), "1,8,512",
     "N,N", "tokens computed together; more than 16 run as prefill"},
    {GROUP_BENCH, "threads", 't', OPT_INTS, MICROBENCH, AT(bench_threads), RANGE(0, 4096), "1,0",
     "N,N", "compute threads; 0: one per CPU"},
    {GROUP_BENCH, "ranks", 0, OPT_INTS, ON(BENCH_COMM), AT(bench_ranks), RANGE(1, 8), "2", "N,N",
     "devices that exchange data: CPU devices, or the first GPUs"},
    {GROUP_BENCH, "bytes", 0, OPT_INTS, ON(BENCH_COMM), AT(bench_bytes), RANGE(4096, 1 << 30),
     "16384,1048576,16777216", "N,N", "bytes of all ranks together, in BF16"},
    {GROUP_BENCH, "comm", 0, OPT_ENUM, ON(BENCH_COMM), AT(comm_backend), ONE_OF(comm_ways), "auto",
     "WAY", "host: through host memory; nccl: by NCCL, between GPUs; auto: nccl where possible"},
    {GROUP_BENCH, "path", 0, OPT_ENUM, ON(BENCH_GPU), AT(gpu_path), ONE_OF(gpu_paths), "operators",
     "NAME",
     "operators: each alone; copies, register, signals: between host and GPU; stream, decode, "
     "cache, "
     "interference: steps of a model of DeepSeek-V3's shape with experts on the CPU, with --device "
     "cpu on two CPU devices"},
    {GROUP_BENCH, "only", 0, OPT_STR, ON(BENCH_GPU), AT(only), NO_RANGE, NULL, "TEXT",
     "operators whose \"operator model format\" contains TEXT; several, in order, with commas "
     "between"},
    {GROUP_BENCH, "list", 0, OPT_FLAG, ON(BENCH_GPU), AT(list), NO_RANGE, NULL, NULL,
     "list the operators' cases without measuring; needs no GPU"},
    {GROUP_BENCH, "layers", 0, OPT_INT, ON(BENCH_GPU), AT(bench_layers), RANGE(0, 1024), "0", "N",
     "layers of the model; 0: 61"},
    {GROUP_BENCH, "without-cublas", 0, OPT_FLAG, ON(BENCH_GPU), AT(without_cublas), NO_RANGE, NULL,
     NULL, "without cuBLAS, measure with tandem's own kernels"},
    {GROUP_BENCH, "shrink", 0, OPT_INT, ON(BENCH_GPU), AT(shrink), RANGE(1, 1 << 16), "1", "N",
     "divide dimensions by N and run each case once, to try the benchmark out"},
    {GROUP_BENCH, "n-weights", 0, OPT_INT, MICROBENCH, AT(n_matrices), RANGE(1, 4096), "64", "N",
     "distinct weight matrices (or experts) to rotate through; too few fit in cache and overstate "
     "bandwidth"},
    {GROUP_BENCH, "nodes", 0, OPT_FLAG, ON(BENCH_LAYER), AT(bench_nodes), NO_RANGE, NULL, NULL,
     "with several NUMA nodes: bytes that each node's threads read of its own memory and of "
     "others', by where pages really are, and the time of the first node alone"},

    {GROUP_NETWORK, "server", 0, OPT_STR, REMOTE, AT(server), NO_RANGE, NULL, "URL",
     "the running server; default: http://127.0.0.1:8080"},
    {GROUP_NETWORK, "server", 0, OPT_STR, ON(RUN), AT(server), NO_RANGE, NULL, "URL",
     "have this server answer; default: http://127.0.0.1:8080 if one answers there, has the model, "
     "and no option says how to run it here"},
    {GROUP_LOAD, "server", 0, OPT_STR, ON(BENCH), AT(server), NO_RANGE, NULL, "URL",
     "measure an OpenAI-compatible server instead, http://HOST:PORT"},
    {GROUP_LOAD, "load", 0, OPT_ENUM, ON(BENCH), AT(load_shape), ONE_OF(loads), "concurrency",
     "SHAPE",
     "arrivals: a fixed concurrency, Poisson, gamma or constant gaps; interference: prompts arrive "
     "while one long request decodes"},
    {GROUP_LOAD, "requests", 0, OPT_INT, ON(BENCH), AT(n_requests), RANGE(1, 1000000), "32", "N",
     "requests in all"},
    {GROUP_LOAD, "concurrency", 0, OPT_INT, ON(BENCH), AT(concurrency), RANGE(1, 4096), "4", "N",
     "requests open at once"},
    {GROUP_LOAD, "rate", 0, OPT_REAL, ON(BENCH), AT(rate), RANGE(0.001, 100000), "1", "PER_SECOND",
     "arrivals per second"},
    {GROUP_LOAD, "extra-body", 0, OPT_STR, ON(BENCH), AT(extra_body), NO_RANGE, NULL, "JSON",
     "JSON object whose members are added to every request, such as a response_format"},
    {GROUP_LOAD, "slo-ttft", 0, OPT_REAL, ON(BENCH), AT(slo_ttft_ms), RANGE(0, 1e9), "0", "MS",
     "goodput counts requests with at most this TTFT; 0: no limit"},
    {GROUP_LOAD, "slo-tpot", 0, OPT_REAL, ON(BENCH), AT(slo_tpot_ms), RANGE(0, 1e9), "0", "MS",
     "and at most this TPOT, the mean time per token after the first; 0: no limit"},

    {GROUP_FILES, "receipts", 0, OPT_FLAG, ON(SERVE), AT(receipts), NO_RANGE, NULL, NULL,
     "hash the weights when they are loaded, so that requests may ask for a receipt (receipt: "
     "true)"},
    {GROUP_FILES, "receipt", 0, OPT_STR, ON(RUN) | ON(VERIFY), AT(receipt), NO_RANGE, NULL, "FILE",
     "run: write a receipt of the answer there, with which `tandem verify` computes it again; not "
     "with --server"},
    {GROUP_FILES, "out", 'o', OPT_STR, ON(EVAL_LOGITS), AT(out), NO_RANGE, NULL, "FILE",
     "where to write float32 [n_tokens][n_vocab], .npy"},
    {GROUP_FILES, "to", 0, OPT_CHOICE, ON(QUANTIZE), AT(to), ONE_OF(encodings), NULL, "FORMAT",
     "INT4 in groups of 128 or 32, FP8 in blocks of 128x128, or MXFP4"},
    {GROUP_FILES, "out", 'o', OPT_STR, ON(QUANTIZE), AT(out), NO_RANGE, NULL, "DIR",
     "directory of the new checkpoint; finished shards there are kept"},
    {GROUP_FILES, "chunk-tokens", 0, OPT_INT, ON(EVAL_LOGITS), AT(chunk_tokens), RANGE(1, 1 << 24),
     "512", "TOKENS", "tokens computed in one step"},
    {GROUP_FILES, "suite", 0, OPT_STR, ON(EVAL_CHAT), AT(suite), NO_RANGE, NULL, "FILE",
     "questions and expected answers, one JSON object a line"},
    {GROUP_FILES, "tensors", 0, OPT_FLAG, ON(INSPECT), AT(tensors), NO_RANGE, NULL, NULL,
     "list every tensor"},
    {GROUP_FILES, "decode", 0, OPT_FLAG, ON(INSPECT_TOKENS), AT(decode), NO_RANGE, NULL, NULL,
     "turn a JSON array of ids on stdin into text"},
    {GROUP_FILES, "template", 0, OPT_STR, ON(INSPECT_TEMPLATE), AT(template_file), NO_RANGE, NULL,
     "FILE", "a template file instead of the model's"},
    {GROUP_FILES, "input", 0, OPT_STR, ON(INSPECT_TEMPLATE), AT(input), NO_RANGE, NULL, "FILE",
     "JSON object with messages, tools, add_generation_prompt and other variables"},
};
const size_t td_n_options = sizeof td_option_table / sizeof td_option_table[0];
_Static_assert(sizeof td_option_table / sizeof td_option_table[0] <= 128,
               "td_options.given is too small");

static const td_option_alias aliases[] = {
    {"experts", "expert-device", {NULL}},
    {"model-name", "served-model-name", {NULL}},
    {"workers", "disaggregate", {"split", "on", "one", "off"}},
    {"stuck-after", "worker-timeout", {NULL}},
    {"kv-tokens", "kv-cache-tokens", {NULL}},
    {"slo-itl", "slo-tpot", {NULL}},
    {"matrices", "n-weights", {NULL}},
};

const td_option_alias *td_option_alias_find(const char *name, size_t len) {
  for (size_t i = 0; i < TD_COUNT(aliases); i++)
    if (strlen(aliases[i].name) == len && !strncmp(aliases[i].name, name, len)) return &aliases[i];
  return NULL;
}

const char *td_option_alias_value(const char *name, size_t len, const char *text) {
  const td_option_alias *alias = td_option_alias_find(name, len);
  for (size_t i = 0; alias && i + 1 < TD_COUNT(alias->values) && alias->values[i]; i += 2)
    if (!strcmp(alias->values[i], text)) return alias->values[i + 1];
  return text;
}

const char *td_comm_way_name(int way) {
  return comm_ways[way];
}

const char *td_load_name(td_load_shape load) {
  return loads[load];
}
