// src/hub/listing.c - the hub's description of a repository: its commit and files.
#include <ctype.h>
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
  for (size_t i = 0; i < n; i++) {
    if (fnmatch(patterns[i], path, 0) == 0) return true;
  }
  return false;
}

// Without patterns: configuration, tokenizer and weights, each of them once.
static bool is_wanted(const char *path, const td_hub_opts *opts) {
  static const char *const read[] = {"*.safetensors", "*.json",   "*.jinja",  "*.model",
                                     "*.txt",         "LICENSE*", "README.md"};
  static const char *const twice[] = {"original/*", "consolidated*", "onnx/*", "openvino/*"};
  if (opts->n_include) {
    return matches(path, (const char *const *)opts->include, opts->n_include);
  }
  return matches(path, read, TD_COUNT(read)) && !matches(path, twice, TD_COUNT(twice));
}

static td_status set_file(td_hub_file *out, const cJSON *json, const char *path, td_err *err) {
  const cJSON *lfs = td_json_get(json, "lfs"), *size = td_json_get(json, "size");
  const cJSON *hash = lfs ? td_json_get(lfs, "sha256") : td_json_get(json, "blobId");
  if (lfs && !hash) hash = td_json_get(lfs, "oid");
  if (lfs && td_json_get(lfs, "size")) size = td_json_get(lfs, "size");
  const size_t n_hash = lfs ? 64 : 40;
  if (!is_safe(path)) return td_fail(err, TD_EFORMAT, "%.200s: not a path inside a model", path);
  if (!cJSON_IsNumber(size) || size->valuedouble < 0 || size->valuedouble > 1e15 ||
      !cJSON_IsString(hash) || !is_hash(hash->valuestring, n_hash)) {
    return td_fail(err, TD_EFORMAT, "%.200s: the hub's list gives it no size or no hash", path);
  }
  out->path = strdup(path);
  if (!out->path) return td_fail(err, TD_ENOMEM, "out of memory");
  memcpy(out->hash, hash->valuestring, n_hash + 1);
  out->is_sha256 = lfs != NULL;
  out->n_bytes = (uint64_t)size->valuedouble;
  return TD_OK;
}

static td_status set_files(td_hub_listing *out, const cJSON *list, const td_hub_opts *opts,
                           td_err *err) {
  out->files = calloc((size_t)cJSON_GetArraySize(list) + 1, sizeof *out->files);
  if (!out->files) return td_fail(err, TD_ENOMEM, "out of memory");
  for (const cJSON *item = list->child; item; item = item->next) {
    const cJSON *path = td_json_get(item, "rfilename");
    if (!cJSON_IsString(path)) return td_fail(err, TD_EFORMAT, "a file has no name");
    if (!is_wanted(path->valuestring, opts)) continue;
    td_status st = set_file(&out->files[out->n], item, path->valuestring, err);
    if (st != TD_OK) return st;
    out->n++;
  }
  return out->n ? TD_OK
                : td_fail(err, TD_ENOENT, "%s: none of its %d files is wanted%s", opts->repo,
                          cJSON_GetArraySize(list),
                          opts->n_include ? ": see --include" : ": it has no safetensors");
}

td_status td_hub_listing_parse(td_hub_listing *out, const char *json, size_t len,
                               const td_hub_opts *opts, td_err *err) {
  cJSON *root;
  *out = (td_hub_listing){0};
  td_status st = td_json_parse(&root, json, len, TD_JSON_MAX_DEPTH, err);
  if (st != TD_OK) return td_err_prefix(err, "%s: the hub's list of files", opts->repo);
  const cJSON *sha = td_json_get(root, "sha"), *list = td_json_get(root, "siblings");
  if (!cJSON_IsString(sha) || !is_hash(sha->valuestring, 40) || !cJSON_IsArray(list)) {
    st = td_fail(err, TD_EFORMAT, "%s: the hub's answer is no list of files", opts->repo);
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
