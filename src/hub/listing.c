// src/hub/listing.c - the hub's description of a repository: its commit and files.
#include <fnmatch.h>
#include <stdlib.h>
#include <string.h>

#include "base/json_parse.h"
#include "hub/hub_impl.h"

static bool is_hash(const char *text, size_t len) {
  return strlen(text) == len && strspn(text, "0123456789abcdef") == len;
}

// A relative path that stays in its folder.
static bool is_safe(const char *path) {
  if (!path[0] || path[0] == '/' || strchr(path, '\\')) return false;
  for (const char *at = path; at;) {
    const size_t n = strcspn(at, "/");
    if (!n || (n <= 2 && strncmp(at, "..", n) == 0)) return false;
    at = at[n] ? at + n + 1 : NULL;
  }
  return true;
}

static bool matches(const char *path, const char *const *patterns, size_t n) {
  for (size_t i = 0; i < n; i++)
    if (fnmatch(patterns[i], path, 0) == 0) return true;
  return false;
}

// Without patterns: configuration, tokenizer and weights, each of them once. Of a quantization the
// files with the shortest name (n_name) that ends so.
static bool is_wanted(const char *path, const td_hub_opts *opts, size_t n_name) {
  if (opts->quant) return n_name && td_hub_quant_len(path, opts->quant) == n_name;
  static const char *const read[] = {"*.safetensors", "*.json",   "*.jinja",   "*.model",
                                     "*.txt",         "LICENSE*", "README.md", "encoding/*.py"};
  static const char *const twice[] = {"original/*", "consolidated*", "onnx/*", "openvino/*"};
  if (opts->n_include) return matches(path, (const char *const *)opts->include, opts->n_include);
  return matches(path, read, TD_COUNT(read)) && !matches(path, twice, TD_COUNT(twice));
}

static td_status set_file(td_hub_file *out, const cJSON *json, const char *path, td_err *err) {
  const cJSON *lfs = td_json_get(json, "lfs"), *size = td_json_get(json, "size");
  const cJSON *hash = lfs ? td_json_get(lfs, "sha256") : td_json_get(json, "blobId");
  if (lfs && !hash) hash = td_json_get(lfs, "oid");
  if (lfs && td_json_get(lfs, "size")) size = td_json_get(lfs, "size");
  const size_t n_hash = lfs ? 64 : 40;
  if (!is_safe(path)) return td_fail(err, TD_EFORMAT, "%.200s: not a path inside a model", path);
  int64_t n_bytes;
  if (!td_json_whole(size, 0, (int64_t)1e15, &n_bytes) || !cJSON_IsString(hash) ||
      !is_hash(hash->valuestring, n_hash))
    return td_fail(err, TD_EFORMAT, "%.200s: the hub's list gives it no size or no hash", path);
  out->path = strdup(path);
  if (!out->path) return td_fail(err, TD_ENOMEM, "out of memory");
  memcpy(out->hash, hash->valuestring, n_hash + 1);
  out->is_sha256 = lfs != NULL;
  out->n_bytes = (uint64_t)n_bytes;
  return TD_OK;
}

static int by_hash(const void *a, const void *b) {
  const td_hub_file *x = *(td_hub_file *const *)a, *y = *(td_hub_file *const *)b;
  const int order = strcmp(x->hash, y->hash);
  return order ? order : (x > y) - (x < y);
}

static td_status mark_twins(td_hub_listing *l, td_err *err) {
  td_hub_file **sorted = malloc(l->n * sizeof *sorted);
  if (!sorted) return td_fail(err, TD_ENOMEM, "out of memory");
  for (uint32_t i = 0; i < l->n; i++)
    sorted[i] = &l->files[i];
  qsort(sorted, l->n, sizeof *sorted, by_hash);
  td_status st = TD_OK;
  for (uint32_t i = 1; i < l->n && st == TD_OK; i++) {
    const td_hub_file *before = sorted[i - 1];
    sorted[i]->is_twin = strcmp(before->hash, sorted[i]->hash) == 0;
    if (sorted[i]->is_twin && before->n_bytes != sorted[i]->n_bytes) {
      st = td_fail(err, TD_EFORMAT, "%.200s and %.200s: the hub lists two sizes for one hash",
                   before->path, sorted[i]->path);
    }
  }
  free(sorted);
  return st;
}

static size_t shortest_quant(const cJSON *list, const char *quant) {
  size_t best = 0;
  for (const cJSON *item = list->child; quant && item; item = item->next) {
    const char *path = cJSON_GetStringValue(td_json_get(item, "rfilename"));
    const size_t len = path ? td_hub_quant_len(path, quant) : 0;
    if (len && (!best || len < best)) best = len;
  }
  return best;
}

static bool has_weights(const td_hub_listing *l) {
  for (uint32_t i = 0; i < l->n; i++)
    if (fnmatch("*.safetensors", l->files[i].path, 0) == 0) return true;
  return false;
}

static td_status fail_unwanted(const cJSON *list, const td_hub_opts *opts, td_err *err) {
  td_buf quants = TD_BUF_INIT;
  for (const cJSON *item = list->child; item && quants.len < 200; item = item->next) {
    const char *path = cJSON_GetStringValue(td_json_get(item, "rfilename"));
    if (path) td_hub_list_quant(&quants, path);
  }
  const int n = cJSON_GetArraySize(list);
  if (opts->n_include) {
    td_fail(err, TD_ENOENT, "%s: --include matches none of its %d files", opts->repo, n);
  } else if (opts->quant && quants.len) {
    td_fail(err, TD_ENOENT, "%s: it has no GGUF files of quantization %s, but of %s", opts->repo,
            opts->quant, td_buf_text(&quants));
  } else if (quants.len) {
    td_fail(err, TD_ENOENT,
            "%s: it has no safetensors, but GGUF files of %s: give one quantization, as %s:%.*s",
            opts->repo, td_buf_text(&quants), opts->repo, (int)strcspn(td_buf_text(&quants), ","),
            td_buf_text(&quants));
  } else {
    td_fail(err, TD_ENOENT, "%s: it has no safetensors and no GGUF files", opts->repo);
  }
  td_buf_free(&quants);
  return TD_ENOENT;
}

static td_status set_files(td_hub_listing *out, const cJSON *list, const td_hub_opts *opts,
                           td_err *err) {
  out->files = calloc((size_t)cJSON_GetArraySize(list) + 1, sizeof *out->files);
  if (!out->files) return td_fail(err, TD_ENOMEM, "out of memory");
  const size_t n_name = shortest_quant(list, opts->quant);
  for (const cJSON *item = list->child; item; item = item->next) {
    const cJSON *path = td_json_get(item, "rfilename");
    if (!cJSON_IsString(path)) return td_fail(err, TD_EFORMAT, "a file has no name");
    if (!is_wanted(path->valuestring, opts, n_name)) continue;
    td_status st = set_file(&out->files[out->n], item, path->valuestring, err);
    if (st != TD_OK) return st;
    out->n++;
  }
  const bool is_model = opts->quant || opts->n_include || has_weights(out);
  return out->n && is_model ? mark_twins(out, err) : fail_unwanted(list, opts, err);
}

td_status td_hub_listing_parse(td_hub_listing *out, const char *json, size_t len,
                               const td_hub_opts *opts, td_err *err) {
  cJSON *root;
  *out = (td_hub_listing){0};
  td_status st = td_json_parse(&root, json, len, TD_JSON_MAX_DEPTH, err);
  if (st != TD_OK) return td_err_prefix(err, "%s: the hub's list of files", opts->repo);
  const cJSON *sha = td_json_get(root, "sha"), *list = td_json_get(root, "siblings");
  if (!cJSON_IsString(sha) || !is_hash(sha->valuestring, 40) || !cJSON_IsArray(list)) {
    st = td_fail(err, TD_EFORMAT, "%s: the hub's response is not a list of files", opts->repo);
  } else {
    memcpy(out->commit, sha->valuestring, 41);
    st = set_files(out, list, opts, err);
  }
  cJSON_Delete(root);
  if (st != TD_OK) td_hub_listing_free(out);
  return st;
}

void td_hub_listing_free(td_hub_listing *listing) {
  for (uint32_t i = 0; i < listing->n; i++)
    free(listing->files[i].path);
  free(listing->files);
  *listing = (td_hub_listing){0};
}
