// src/cli/recommend.c - `tandem recommend`: models of the hub that this machine can hold.
#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#include "base/json_write.h"
#include "base/mem_info.h"
#include "base/units.h"
#include "bench/mem_bandwidth.h"
#include "cli/cli.h"
#include "cli/find_model.h"
#include "options/closest.h"
#include "runtime/command.h"
#include "runtime/predict.h"

// By total parameters, the most first; a test compares the sizes with `tandem plan`.
static const struct {
  const char *repo, *format;
  double total_b, active_b; // parameters, in billions
  double weights_gib;
  double gpu_gib; // of the weights: all but the routed experts
} models[] = {
    {"moonshotai/Kimi-K2-Instruct-0905", "FP8", 1026, 32, 958, 13.3},
    {"deepseek-ai/DeepSeek-V3.1", "FP8", 671, 37, 627, 17.8},
    {"Qwen/Qwen3-Coder-480B-A35B-Instruct-FP8", "FP8", 480, 35, 449, 13.0},
    {"zai-org/GLM-4.7-FP8", "FP8", 353, 33, 330, 17.2},
    {"Qwen/Qwen3-235B-A22B-Instruct-2507-FP8", "FP8", 235, 22, 220, 8.7},
    {"MiniMaxAI/MiniMax-M2", "FP8", 229, 10, 214, 4.9},
    {"openai/gpt-oss-120b", "MXFP4", 117, 5.2, 61, 4.1},
    {"zai-org/GLM-4.5-Air-FP8", "FP8", 107, 13, 101, 7.9},
    {"Qwen/Qwen3-Next-80B-A3B-Instruct-FP8", "FP8", 80, 3.9, 75, 2.8},
    {"moonshotai/Kimi-Linear-48B-A3B-Instruct", "BF16", 49, 3.1, 91, 3.7},
    {"Qwen/Qwen3.5-35B-A3B", "BF16", 35, 3.5, 65, 4.6},
    {"Qwen/Qwen3-30B-A3B-FP8", "FP8", 31, 3.0, 29, 2.0},
    {"zai-org/GLM-4.7-Flash", "BF16", 30, 3.6, 56, 4.0},
    {"openai/gpt-oss-20b", "MXFP4", 21, 3.6, 13, 3.4},
    {"moonshotai/Moonlight-16B-A3B-Instruct", "BF16", 16, 2.6, 30, 2.9},
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

#define DRIVE_GBPS 3.0 // of a PCIe 3.0 drive, as any has

// With what else a server needs, README's rule: 10 % and the KV cache.
static double needed_gib(double weights_gib) {
  return 1.1 * weights_gib + 1;
}

// Whether it runs with experts from a drive: memory holds the rest, and some of them.
static bool fits_with_drive(size_t i, double memory_gib) {
  return needed_gib(models[i].gpu_gib) + models[i].weights_gib / 16 <= memory_gib;
}

// Tokens a second at most: every active parameter is read from memory once a token, and experts
// that are not there from a drive.
static double fastest(size_t i, double memory_gib, double gbps) {
  const double gb = 1.073741824, dense = models[i].gpu_gib;
  const double active = models[i].active_b * models[i].weights_gib / models[i].total_b;
  if (needed_gib(models[i].weights_gib) <= memory_gib) return gbps / (active * gb);
  const double experts = models[i].weights_gib - dense;
  // Keys and activations take about a quarter of what the rest of the weights leaves.
  const double missing = 1 - td_drive_hit_rate(0.75 * (memory_gib - dense) / experts);
  const double routed = active > 1.25 * dense ? active - dense : active / 5;
  return 1 / (((active - routed) / gbps + fmax(routed / gbps, routed * missing / DRIVE_GBPS)) * gb);
}

static td_status measure(double *gbps, td_err *err) {
  td_read_speed speed = {0};
  td_status st = td_read_speed_open(&speed, 0, err);
  if (st == TD_OK) *gbps = td_read_speed_gbps(&speed);
  td_read_speed_close(&speed);
  return st;
}

static void write_row(td_json_writer *w, size_t i, double memory_gib, double gbps) {
  td_jw_begin_object(w, NULL);
  td_jw_str(w, "model", models[i].repo);
  td_jw_str(w, "format", models[i].format);
  td_jw_double(w, "parameters", models[i].total_b * 1e9);
  td_jw_double(w, "active_parameters", models[i].active_b * 1e9);
  td_jw_double(w, "weights_gib", models[i].weights_gib);
  td_jw_double(w, "gpu_gib", models[i].gpu_gib);
  td_jw_bool(w, "from_drive", needed_gib(models[i].weights_gib) > memory_gib);
  td_jw_double(w, "tokens_per_s_at_most", fastest(i, memory_gib, gbps));
  td_jw_end_object(w);
}

// Those that fit into memory, or only with a drive. Returns their number.
static size_t print_rows(bool from_drive, double memory_gib, double gbps) {
  size_t n = 0;
  for (size_t i = 0; i < TD_COUNT(models); i++) {
    const bool fits = needed_gib(models[i].weights_gib) <= memory_gib;
    if (from_drive ? fits || !fits_with_drive(i, memory_gib) : !fits) continue;
    if (from_drive && !n)
      printf(
          "\nLarger than memory; experts come from the drive, here one of %.0f GB/s (assumed):\n",
          DRIVE_GBPS);
    printf("%-40s  %-6s %4.0f GiB  %4.1f GiB  %6.1f B  %.1f tokens/s\n", models[i].repo,
           models[i].format, models[i].weights_gib, models[i].gpu_gib, models[i].active_b,
           fastest(i, memory_gib, gbps));
    n++;
  }
  return n;
}

static void print_table(double memory_gib, double gbps) {
  printf("memory: %.0f GiB, read at %.0f GB/s\n\n", memory_gib, gbps);
  printf("%-40s  %-6s %8s  %8s  %8s  %s\n", "model", "format", "weights", "on a GPU", "active",
         "at most");
  if (print_rows(false, memory_gib, gbps) + print_rows(true, memory_gib, gbps)) {
    puts("\nThe largest first. Speeds are for one request decoded from this machine's memory;\n"
         "a GPU that holds what is \"on a GPU\" makes prompts much faster. Next: tandem serve -m "
         "MODEL");
  } else {
    printf("none: the smallest, openai/gpt-oss-20b, needs %.0f GiB; smaller checkpoints of your "
           "own\ncan be made with tandem quantize\n",
           needed_gib(13));
  }
}

int td_cmd_recommend(const td_options *o) {
  td_err err;
  double gbps = 0;
  const double memory_gib = td_gib(td_memory_limit_bytes());
  if (measure(&gbps, &err) != TD_OK) return td_cmd_fail(&err);
  if (!o->json) {
    print_table(memory_gib, gbps);
    return 0;
  }
  td_buf text = TD_BUF_INIT;
  td_json_writer w = TD_JSON_WRITER(&text);
  td_jw_begin_object(&w, NULL);
  td_jw_double(&w, "memory_gib", memory_gib);
  td_jw_double(&w, "read_gbps", gbps);
  td_jw_begin_array(&w, "models");
  for (size_t i = 0; i < TD_COUNT(models); i++)
    if (needed_gib(models[i].weights_gib) <= memory_gib || fits_with_drive(i, memory_gib))
      write_row(&w, i, memory_gib, gbps);
  td_jw_end_array(&w);
  td_jw_end_object(&w);
  td_status st = td_buf_status(&text, &err);
  if (st == TD_OK) puts(td_buf_text(&text));
  td_buf_free(&text);
  return st == TD_OK ? 0 : td_cmd_fail(&err);
}
