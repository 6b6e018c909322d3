// src/runtime/rig.c - reads descriptions of machines.
#include "runtime/rig.h"

#include <limits.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "base/fs.h"
#include "base/json_parse.h"
#include "base/numa.h"
#include "options/closest.h"

enum { MAX_BYTES = 1 << 20, MAX_DEPTH = 4, MAX_GPUS = 8 };
#define GIB     ((double)(1 << 30))
#define MAX_GIB 1e9

// A positive number of a member.
typedef struct {
  const char *key;
  size_t offset; // of a double
} rate;

static const rate host_rates[] = {{"read_gbps", offsetof(td_rig, read_gbps)},
                                  {"gflops", offsetof(td_rig, gflops)},
                                  {"layer_us", offsetof(td_rig, layer_us)}};
static const rate gpu_rates[] = {{"link_gbps", offsetof(td_gpu_card, link_gbps)},
                                 {"tflops", offsetof(td_gpu_card, tflops)},
                                 {"read_gbps", offsetof(td_gpu_card, read_gbps)},
                                 {"layer_us", offsetof(td_gpu_card, layer_us)}};

static td_status read_positive(const cJSON *object, const char *key, double *out, td_err *err) {
  *out = 0;
  td_status st = td_json_get_double(object, key, out, err);
  if (st != TD_OK || (*out > 0 && *out < 1e12)) return st;
  return td_fail(err, TD_EINVAL, "%s must be a number above 0", key);
}

// memory_gib and the rates of a machine or a card.
static td_status read_part(const cJSON *object, const rate *rates, size_t n, void *part,
                           uint64_t *memory_bytes, bool *is_assumed, td_err *err) {
  double gib;
  *is_assumed = false;
  td_status st = td_json_get_bool(object, "assumed", is_assumed, err);
  if (st == TD_OK) st = read_positive(object, "memory_gib", &gib, err);
  if (st == TD_OK && !(gib < MAX_GIB))
    st = td_fail(err, TD_EINVAL, "memory_gib must be below %g", MAX_GIB);
  if (st != TD_OK) return st;
  *memory_bytes = (uint64_t)(gib * GIB);
  for (size_t i = 0; i < n && st == TD_OK; i++)
    st = read_positive(object, rates[i].key, (double *)(void *)((char *)part + rates[i].offset),
                       err);
  return st;
}

static td_status read_name(const cJSON *object, char *out, size_t size, td_err *err) {
  const char *text = NULL;
  td_status st = td_json_get_str(object, "name", &text, err);
  if (st == TD_OK && text) snprintf(out, size, "%s", text);
  return st;
}

// A rate that a card need not have.
static td_status read_fast(td_fast_rate *out, const cJSON *object, const char *rate_key,
                           const char *assumed_key, td_err *err) {
  if (!td_json_get(object, rate_key)) return TD_OK;
  td_status st = td_json_get_bool(object, assumed_key, &out->is_assumed, err);
  return st == TD_OK ? read_positive(object, rate_key, &out->tflops, err) : st;
}

static td_status read_card(td_gpu_card *out, const cJSON *object, td_err *err) {
  td_status st = read_name(object, out->name, sizeof out->name, err);
  if (st == TD_OK)
    st = read_part(object, gpu_rates, TD_COUNT(gpu_rates), out, &out->memory_bytes,
                   &out->is_assumed, err);
  const td_fast_rate none = {.is_assumed = out->is_assumed};
  out->f16 = none;
  for (int i = 0; i < TD_N_ACTIVATIONS; i++)
    out->a8[i] = none;
  if (st == TD_OK)
    st = read_fast(&out->a8[TD_ACTIVATIONS_FP8], object, "fp8_tflops", "fp8_assumed", err);
  if (st == TD_OK)
    st = read_fast(&out->a8[TD_ACTIVATIONS_INT8], object, "int8_tops", "int8_assumed", err);
  if (st == TD_OK) st = read_fast(&out->f16, object, "f16_tflops", "f16_assumed", err);
  return st;
}

static td_status read_rig(td_rig *r, const cJSON *root, td_err *err) {
  int64_t cores = 0, nodes = 1, gpus = 0;
  td_status st = read_name(root, r->name, sizeof r->name, err);
  if (st == TD_OK)
    st = read_part(root, host_rates, TD_COUNT(host_rates), r, &r->memory_bytes, &r->is_assumed,
                   err);
  if (st == TD_OK) st = td_json_get_int(root, "cores", 1, 1 << 16, &cores, err);
  if (st == TD_OK) st = td_json_get_int(root, "nodes", 1, TD_MAX_NODES, &nodes, err);
  if (st == TD_OK && nodes > 1) st = read_positive(root, "remote_gbps", &r->remote_gbps, err);
  if (st == TD_OK && td_json_get(root, "drive_gbps"))
    st = read_positive(root, "drive_gbps", &r->drive_gbps, err);
  const cJSON *gpu = td_json_get(root, "gpu");
  gpus = gpu != NULL;
  if (st == TD_OK) st = td_json_get_int(root, "gpus", 0, MAX_GPUS, &gpus, err);
  if (st != TD_OK) return st;
  if (gpus && !gpu) return td_fail(err, TD_EINVAL, "gpus without gpu, which describes one");
  r->n_cores = (uint32_t)(cores ? cores : 1);
  r->n_nodes = (uint32_t)nodes;
  r->n_gpus = (uint32_t)gpus;
  if (!gpus) return TD_OK;
  st = read_card(&r->gpu, gpu, err);
  return st == TD_OK ? TD_OK : td_err_prefix(err, "gpu");
}

td_status td_rig_parse(td_rig *out, const char *json, size_t len, const char *name, td_err *err) {
  cJSON *root;
  *out = (td_rig){0};
  snprintf(out->name, sizeof out->name, "%s", name);
  td_status st = td_json_parse(&root, json, len, MAX_DEPTH, err);
  if (st == TD_OK) st = read_rig(out, root, err);
  cJSON_Delete(root);
  return st == TD_OK ? TD_OK : td_err_prefix(err, "machine %s", name);
}

td_rig td_rig_node(const td_rig *rig) {
  td_rig node = *rig;
  node.n_nodes = 1;
  node.remote_gbps = 0;
  node.memory_bytes /= rig->n_nodes;
  node.n_cores = rig->n_cores > rig->n_nodes ? rig->n_cores / rig->n_nodes : 1;
  node.read_gbps /= rig->n_nodes;
  node.gflops /= rig->n_nodes;
  return node;
}

// NULL: none has the name, which ends at len.
static const td_rig_file *find(const td_rig_file *files, const char *name, size_t len) {
  for (const td_rig_file *f = files; f->name; f++)
    if (strlen(f->name) == len && !strncmp(f->name, name, len)) return f;
  return NULL;
}

static td_status unknown(const char *what, size_t len, const char *name, const char *is_none_of,
                         const td_rig_file *files, td_err *err) {
  td_buf known = TD_BUF_INIT;
  td_closest closest = {.word = name, .len = len};
  for (const td_rig_file *f = files; f->name; f++) {
    td_buf_printf(&known, "%s%s", f == files ? "" : ", ", f->name);
    td_closest_try(&closest, f->name);
  }
  const char *best = closest.best;
  td_status st = td_fail(err, TD_EINVAL, "--machine: %.*s is %s%s%s%s: %s%s", (int)len, name,
                         is_none_of, best ? "; did you mean " : "", best ? best : "",
                         best ? "? There are" : "", what, td_buf_text(&known));
  td_buf_free(&known);
  return st;
}

td_status td_rig_use_cards(td_rig *r, const char *cards, td_err *err) {
  if (!cards) return TD_OK;
  const size_t len = strcspn(cards + 1, "+");
  const td_rig_file *f = find(td_card_files, cards + 1, len);
  if (!f) return unknown("", len, cards + 1, "no known card", td_card_files, err);
  cJSON *root;
  r->gpu = (td_gpu_card){.name = ""};
  r->n_gpus = 0;
  td_status st = td_json_parse(&root, f->json, f->len, MAX_DEPTH, err);
  if (st == TD_OK) st = read_card(&r->gpu, root, err);
  cJSON_Delete(root);
  if (st != TD_OK) return td_err_prefix(err, "card %s", f->name);
  for (const char *at = cards; *at == '+'; at += 1 + len) {
    if (strcspn(at + 1, "+") != len || strncmp(at + 1, f->name, len) || r->n_gpus == MAX_GPUS)
      return td_fail(err, TD_EINVAL, "--machine: %s: give up to %d cards that are all alike", cards,
                     MAX_GPUS);
    r->n_gpus++;
  }
  const size_t n = strlen(r->name);
  snprintf(r->name + n, sizeof r->name - n, ", %u x %s", r->n_gpus, r->gpu.name);
  return TD_OK;
}

static td_status read_rig_file(td_rig *out, const char *path, td_err *err) {
  td_buf text = TD_BUF_INIT;
  td_status st = td_file_read(&text, path, MAX_BYTES, err);
  if (st == TD_OK) st = td_rig_parse(out, td_buf_text(&text), text.len, path, err);
  td_buf_free(&text);
  return st;
}

td_status td_rig_read(td_rig *out, const char *name, td_err *err) {
  const size_t len = strcspn(name, "+");
  const char *cards = name[len] ? name + len : NULL;
  const td_rig_file *f = find(td_rig_files, name, len);
  if (f) {
    const td_status st = td_rig_parse(out, f->json, f->len, f->name, err);
    return st == TD_OK ? td_rig_use_cards(out, cards, err) : st;
  }
  td_status st = read_rig_file(out, name, err); // whose path may have a +
  char path[PATH_MAX];
  if (st == TD_ENOENT && cards && len < sizeof path) {
    snprintf(path, sizeof path, "%.*s", (int)len, name);
    st = read_rig_file(out, path, err);
    if (st == TD_OK) return td_rig_use_cards(out, cards, err);
  }
  if (st != TD_ENOENT) return st;
  return unknown("this, ", len, name, "neither a file nor a known machine", td_rig_files, err);
}
