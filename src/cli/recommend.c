// src/cli/recommend.c - `tandem recommend`: models of the hub that a machine can run, and how fast.
#include <ctype.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#include "base/json_write.h"
#include "base/units.h"
#include "bench/this_rig.h"
#include "cli/cli.h"
#include "cli/find_model.h"
#include "cli/plan.h"
#include "model/outline.h"
#include "options/closest.h"
#include "runtime/command.h"

// By total parameters, the most first: as published, and GGUF files of 4 bits by others.
static const struct {
  const char *repo, *shape, *label, *format; // of configs/shapes; as people and td_formats name it
  const char *gguf;                          // NULL: no smaller than what is published
} models[] = {
    {"moonshotai/Kimi-K2-Instruct-0905", "Kimi-K2", "FP8", "fp8-b128",
     "unsloth/Kimi-K2-Instruct-0905-GGUF"},
    {"deepseek-ai/DeepSeek-V3.1", "DeepSeek-V3", "FP8", "fp8-b128", "unsloth/DeepSeek-V3.1-GGUF"},
    {"Qwen/Qwen3-Coder-480B-A35B-Instruct-FP8", "Qwen3-Coder-480B-A35B", "FP8", "fp8-b128",
     "unsloth/Qwen3-Coder-480B-A35B-Instruct-GGUF"},
    {"zai-org/GLM-4.7-FP8", "GLM-4.7", "FP8", "fp8-b128", "unsloth/GLM-4.7-GGUF"},
    {"deepseek-ai/DeepSeek-V4-Flash", "DeepSeek-V4-Flash", "FP4", "mxfp4", NULL},
    {"Qwen/Qwen3-235B-A22B-Instruct-2507-FP8", "Qwen3-235B-A22B", "FP8", "fp8-b128",
     "unsloth/Qwen3-235B-A22B-Instruct-2507-GGUF"},
    {"MiniMaxAI/MiniMax-M2", "MiniMax-M2", "FP8", "fp8-b128", "unsloth/MiniMax-M2-GGUF"},
    {"openai/gpt-oss-120b", "gpt-oss-120b", "MXFP4", "mxfp4", NULL},
    {"zai-org/GLM-4.5-Air-FP8", "GLM-4.5-Air", "FP8", "fp8-b128", "unsloth/GLM-4.5-Air-GGUF"},
    {"Qwen/Qwen3-Next-80B-A3B-Instruct-FP8", "Qwen3-Next-80B-A3B", "FP8", "fp8-b128",
     "unsloth/Qwen3-Next-80B-A3B-Instruct-GGUF"},
    {"moonshotai/Kimi-Linear-48B-A3B-Instruct", "Kimi-Linear-48B-A3B", "BF16", "bf16", NULL},
    {"Qwen/Qwen3.5-35B-A3B", "Qwen3.5-35B-A3B", "BF16", "bf16", "unsloth/Qwen3.5-35B-A3B-GGUF"},
    {"Qwen/Qwen3-30B-A3B-FP8", "Qwen3-30B-A3B", "FP8", "fp8-b128", "unsloth/Qwen3-30B-A3B-GGUF"},
    {"zai-org/GLM-4.7-Flash", "GLM-4.7-Flash", "BF16", "bf16", "unsloth/GLM-4.7-Flash-GGUF"},
    {"openai/gpt-oss-20b", "gpt-oss-20b", "MXFP4", "mxfp4", NULL},
    {"moonshotai/Moonlight-16B-A3B-Instruct", "Moonlight-16B-A3B", "BF16", "bf16", NULL},
};

// ---- short names --------------------------------------------------------------------------------

// The length of a name without the ends that say how the checkpoint was published.
static size_t stem_len(const char *name) {
  static const char *const ends[] = {"-FP8", "-Instruct"};
  size_t len = strlen(name);
  for (size_t i = 0; i < TD_COUNT(ends); i++) {
    const size_t n = strlen(ends[i]);
    if (len > n && !strncmp(name + len - n, ends[i], n)) len -= n;
  }
  return len;
}

static bool is_named(const char *repo, const char *name, size_t len) {
  const char *own = strchr(repo, '/') + 1;
  return (len == strlen(own) || len == stem_len(own)) && !strncasecmp(own, name, len);
}

char *td_cli_full_name(const char *name) {
  const size_t len = strcspn(name, ":");
  for (size_t i = 0; i < TD_COUNT(models) && access(name, F_OK) != 0; i++) {
    if (!is_named(models[i].repo, name, len)) continue;
    td_buf full = TD_BUF_INIT;
    td_buf_printf(&full, "%s%s", models[i].repo, name + len);
    char *copy = full.failed ? NULL : strdup(td_buf_text(&full));
    td_buf_free(&full);
    return copy;
  }
  return NULL;
}

void td_cli_short_names(td_buf *out) {
  for (size_t i = 0; i < TD_COUNT(models); i++) {
    const char *own = strchr(models[i].repo, '/') + 1;
    if (i) td_buf_char(out, ' ');
    for (size_t k = 0; k < stem_len(own); k++)
      td_buf_char(out, (char)tolower((unsigned char)own[k]));
  }
}

td_status td_cli_check_name(const char *name, td_err *err) {
  char stems[TD_COUNT(models)][64];
  td_closest closest = {.word = name, .len = strcspn(name, ":")};
  if (strchr(name, '/') || access(name, F_OK) == 0) return TD_OK;
  for (size_t i = 0; i < TD_COUNT(models); i++) {
    const char *own = strchr(models[i].repo, '/') + 1;
    snprintf(stems[i], sizeof stems[i], "%.*s", (int)stem_len(own), own);
    td_closest_try(&closest, stems[i]);
  }
  if (!closest.best) return TD_OK;
  return td_fail(err, TD_EINVAL, "%s: neither a file nor a known model; did you mean %s%s?", name,
                 closest.best, name + closest.len);
}

// ---- what fits ----------------------------------------------------------------------------------

enum { PROMPT = 8192 };
#define DRIVE_GBPS      3.0  // where nothing is known of it: of a PCIe 3.0 drive, as any has
#define LEAST_IN_MEMORY 0.06 // of the experts, for one to be recommended from a drive

typedef struct {
  char model[96]; // with the quantization behind a colon
  const char *label;
  td_model_stats stats;
  td_plan_summary plan;
} row;

static td_status plan(row *out, size_t i, bool is_gguf, const td_rig *rig, td_err *err) {
  static int32_t prompt = PROMPT, batch = 1;
  const char *format = is_gguf ? "q4_k" : models[i].format;
  td_plan_opts opts = td_plan_usual;
  opts.prompts = (td_int_list){&prompt, 1};
  opts.batches = (td_int_list){&batch, 1};
  opts.ctx_size = PROMPT;
  opts.depth = 1024;
  td_model *model;
  td_status st = td_model_outline(&model, td_shape_find(models[i].shape), td_format_named(format),
                                  err);
  if (st != TD_OK) return st;
  *out = (row){.label = is_gguf ? "Q4_K_M" : models[i].label,
               .stats = td_model_stats_of(model),
               .plan = td_plan_summary_of(model, rig, &opts)};
  snprintf(out->model, sizeof out->model, "%s%s", is_gguf ? models[i].gguf : models[i].repo,
           is_gguf ? ":Q4_K_M" : "");
  td_model_close(model);
  return TD_OK;
}

// As published if memory holds it, else in 4 bits, from a drive if need be. Returns whether it
// runs.
static bool choose(row *out, size_t i, const td_rig *rig, td_status *st, td_err *err) {
  row small;
  *st = plan(out, i, false, rig, err);
  if (*st == TD_OK && out->plan.from_drive && models[i].gguf) {
    *st = plan(&small, i, true, rig, err);
    *out = small;
  }
  return *st == TD_OK && (!out->plan.from_drive || out->plan.share >= LEAST_IN_MEMORY);
}

static void write_row(td_json_writer *w, const row *r) {
  td_jw_add(w,
            "{'model': %s, 'format': %s, 'parameters': %lu, 'active_parameters': %lu, "
            "'weights_gib': %g, 'gpu_gib': %g, 'from_drive': %i, 'tokens_per_s': %g",
            r->model, r->label, r->stats.params, r->stats.active_params, td_gib(r->stats.bytes),
            td_gib(r->stats.bytes - r->stats.expert_bytes), r->plan.from_drive,
            r->plan.tokens_per_s);
  td_jw_add(w, "'prompt_tokens': %d, 'prompt_s': %g}", PROMPT, r->plan.prompt_s);
}

// Those that fit into memory, or only with a drive. Returns their number.
static size_t print_rows(bool from_drive, const row *rows, size_t n_rows, const td_rig *rig) {
  size_t n = 0;
  for (size_t i = 0; i < n_rows; i++) {
    const row *r = &rows[i];
    if (r->plan.from_drive != from_drive) continue;
    if (from_drive && !n)
      printf("\nLarger than memory; experts come from a drive of %.1f GB/s:\n", rig->drive_gbps);
    printf("%-50s %-6s %4.0f GiB %5.1f GiB %5.1f B %8.1f %8.0f\n", r->model, r->label,
           td_gib(r->stats.bytes), td_gib(r->stats.bytes - r->stats.expert_bytes),
           (double)r->stats.active_params / 1e9, r->plan.tokens_per_s, PROMPT / r->plan.prompt_s);
    n++;
  }
  return n;
}

static void print_table(const row *rows, size_t n, const td_rig *rig) {
  printf("%s: %.0f GiB, read at %.0f GB/s", rig->name, td_gib(rig->memory_bytes), rig->read_gbps);
  for (uint32_t i = 0; i < rig->n_gpus; i++)
    printf(", %s", rig->gpu.name);
  printf("\n\n%-50s %-6s %8s %9s %7s %8s %8s\n", "model", "format", "weights", "on a GPU", "active",
         "decode", "prompt");
  if (print_rows(false, rows, n, rig) + print_rows(true, rows, n, rig)) {
    puts("\nThe largest first. Tokens/s of one request, and of a prompt of 8192 tokens, as tandem\n"
         "plan predicts them; 4 bits where memory does not hold what was published. A GPU that\n"
         "holds what is \"on a GPU\" makes prompts much faster: --machine this+rtx-4090. Next:\n"
         "tandem serve -m MODEL");
  } else {
    puts("none: smaller checkpoints of your own can be made with tandem quantize");
  }
}

static void print_json(const row *rows, size_t n, const td_rig *rig, td_buf *out) {
  td_json_writer w = TD_JSON_WRITER(out);
  td_jw_add(&w, "{'machine': %s, 'memory_gib': %g, 'read_gbps': %g, 'drive_gbps': %g, 'models': [",
            rig->name, td_gib(rig->memory_bytes), rig->read_gbps, rig->drive_gbps);
  for (size_t i = 0; i < n; i++)
    write_row(&w, &rows[i]);
  td_jw_add(&w, "]}");
}

// The machine, measured with a small model where it is this one.
static td_status open_rig(td_rig *out, const td_options *o, td_err *err) {
  td_model *model;
  td_status st = td_model_outline(&model, td_shape_find("Qwen3-30B-A3B"),
                                  td_format_named("fp8-b128"), err);
  if (st != TD_OK) return st;
  st = td_rig_open(out, o->machine, model, (unsigned)o->threads, err);
  if (st == TD_OK && out->drive_gbps <= 0) out->drive_gbps = DRIVE_GBPS;
  td_model_close(model);
  return st;
}

int td_cmd_recommend(const td_options *o) {
  td_err err;
  td_rig rig;
  row rows[TD_COUNT(models)];
  size_t n = 0;
  td_status st = open_rig(&rig, o, &err);
  for (size_t i = 0; i < TD_COUNT(models) && st == TD_OK; i++)
    n += choose(&rows[n], i, &rig, &st, &err);
  if (st != TD_OK) return td_cmd_fail(&err);
  if (!o->json) {
    print_table(rows, n, &rig);
    return 0;
  }
  td_buf text = TD_BUF_INIT;
  print_json(rows, n, &rig, &text);
  st = td_buf_status(&text, &err);
  if (st == TD_OK) puts(td_buf_text(&text));
  td_buf_free(&text);
  return st == TD_OK ? 0 : td_cmd_fail(&err);
}
