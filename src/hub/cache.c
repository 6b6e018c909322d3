// src/hub/cache.c - the folders of the cache: where they are, what they hold, links into them.
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/env.h"
#include "base/fs.h"
#include "base/json_parse.h"
#include "hub/hub_impl.h"

#define MAX_INDEX_BYTES (1u << 28)
#define MAX_TOKEN_BYTES 4096

// Appends the folder of the hub's programs.
static td_status add_home(td_buf *out, td_err *err) {
  const char *home = td_env("HF_HOME"), *cache = td_env("XDG_CACHE_HOME");
  const char *user = td_env("HOME");
  if (home)
    td_buf_str(out, home);
  else if (cache)
    td_buf_printf(out, "%s/huggingface", cache);
  else if (user)
    td_buf_printf(out, "%s/.cache/huggingface", user);
  else
    return td_fail(err, TD_EINVAL, "no folder for downloads: set HF_HOME or HOME");
  return TD_OK;
}

bool td_hub_is_name(const char *model) {
  const char *slash = strchr(model, '/'), *colon = strchr(model, ':');
  static const char letters[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.";
  if (!slash || slash == model || !slash[1] || (slash[1 + strspn(slash + 1, letters)] && !colon))
    return false;
  if (colon && (colon <= slash + 1 || slash + 1 + strspn(slash + 1, letters) != colon ||
                !colon[1] || colon[1 + strspn(colon + 1, letters)]))
    return false;
  if (model[0] == '.' || slash[1] == '.' || strspn(model, letters) != (size_t)(slash - model))
    return false;
  return access(model, F_OK) != 0;
}

td_status td_hub_cache(td_buf *out, td_err *err) {
  const char *cache = td_env("HF_HUB_CACHE");
  if (cache) {
    td_buf_str(out, cache);
  } else {
    td_status st = add_home(out, err);
    if (st != TD_OK) return st;
    td_buf_str(out, "/hub");
  }
  return td_buf_status(out, err);
}

td_status td_hub_folder(td_buf *out, const char *repo, td_err *err) {
  const char *slash = strchr(repo, '/');
  td_status st = td_hub_cache(out, err);
  if (st != TD_OK) return st;
  td_buf_printf(out, "/models--%.*s--%s", (int)(slash - repo), repo, slash + 1);
  return td_buf_status(out, err);
}

char *td_hub_token(void) {
  const char *token = td_env("HF_TOKEN"), *path = td_env("HF_TOKEN_PATH");
  td_buf file = TD_BUF_INIT, text = TD_BUF_INIT;
  td_err ignored;
  if (token) {
    td_buf_str(&text, token);
  } else if (path) {
    td_file_read_regular(&text, path, MAX_TOKEN_BYTES, &ignored);
  } else if (add_home(&file, &ignored) == TD_OK) {
    td_buf_str(&file, "/token");
    td_file_read_regular(&text, td_buf_text(&file), MAX_TOKEN_BYTES, &ignored);
  }
  const char *begin = td_buf_text(&text);
  begin += strspn(begin, " \t\r\n");
  const size_t len = strcspn(begin, " \t\r\n");
  char *out = len ? strndup(begin, len) : NULL;
  td_buf_free(&file);
  td_buf_free(&text);
  return out;
}

td_status td_hub_make_folder(const char *path, td_err *err) {
  char *copy = strdup(path);
  if (!copy) return td_fail(err, TD_ENOMEM, "out of memory");
  td_status st = TD_OK;
  for (char *at = copy + 1; st == TD_OK; at++) {
    if (*at && *at != '/') continue;
    const char was = *at;
    *at = '\0';
    if (mkdir(copy, 0777) != 0 && errno != EEXIST)
      st = td_fail(err, TD_EIO, "%s: cannot make the folder: %s", copy, strerror(errno));
    *at = was;
    if (!was) break;
  }
  free(copy);
  return st;
}

// ---- snapshots ----------------------------------------------------------------------------------

// Whether every file that the list of shards names is there. Without a list: any.
static bool has_shards(const char *snapshot) {
  td_buf path = TD_BUF_INIT;
  cJSON *index;
  td_err ignored;
  td_buf_printf(&path, "%s/model.safetensors.index.json", snapshot);
  bool is_whole = true;
  if (td_json_parse_file(&index, td_buf_text(&path), MAX_INDEX_BYTES, &ignored) == TD_OK) {
    const cJSON *map = td_json_get(index, "weight_map");
    const char *last = "";
    for (const cJSON *e = map ? map->child : NULL; e && is_whole; e = e->next) {
      if (!cJSON_IsString(e) || strcmp(e->valuestring, last) == 0) continue;
      last = e->valuestring;
      td_buf_clear(&path);
      td_buf_printf(&path, "%s/%s", snapshot, last);
      is_whole = access(td_buf_text(&path), R_OK) == 0;
    }
    cJSON_Delete(index);
  } else {
    td_buf_clear(&path);
    td_buf_printf(&path, "%s/model.safetensors", snapshot);
    is_whole = access(td_buf_text(&path), R_OK) == 0;
  }
  td_buf_free(&path);
  return is_whole;
}

static bool has_file(const char *folder, const char *name) {
  td_buf path = TD_BUF_INIT;
  td_buf_printf(&path, "%s/%s", folder, name);
  const bool found = access(td_buf_text(&path), R_OK) == 0;
  td_buf_free(&path);
  return found;
}

// The snapshot of a revision in a model's folder of the cache, or a quantization's file in it;
// NULL: it is absent or incomplete.
static char *find_snapshot(const char *folder, const char *quant, const char *revision) {
  td_buf path = TD_BUF_INIT, commit = TD_BUF_INIT;
  td_err ignored;
  const char *wanted = revision ? revision : "main";
  td_buf_printf(&path, "%s/refs/%s", folder, wanted);
  if (td_file_read_regular(&commit, td_buf_text(&path), 128, &ignored) == TD_OK)
    wanted = td_buf_text(&commit);
  const int n = (int)strcspn(wanted, " \r\n");
  td_buf_clear(&path);
  td_buf_printf(&path, "%s/snapshots/%.*s", folder, n, wanted);
  const char *snapshot = td_buf_text(&path);
  const bool is_whole = !quant && has_file(snapshot, "config.json") && has_shards(snapshot);
  char *out = quant ? td_hub_find_quant(snapshot, quant) : is_whole ? strdup(snapshot) : NULL;
  td_buf_free(&path);
  td_buf_free(&commit);
  return out;
}

td_status td_hub_find(char **out, const char *repo, const char *quant, const char *revision,
                      td_err *err) {
  td_buf folder = TD_BUF_INIT;
  *out = NULL;
  td_status st = td_hub_folder(&folder, repo, err);
  if (st == TD_OK) *out = find_snapshot(td_buf_text(&folder), quant, revision);
  if (st == TD_OK && !*out) {
    st = td_fail(err, TD_ENOENT, "%s%s%s is not in %s, or incomplete: run `tandem pull %s%s%s`",
                 repo, quant ? ":" : "", quant ? quant : "", td_buf_text(&folder), repo,
                 quant ? ":" : "", quant ? quant : "");
  }
  td_buf_free(&folder);
  return st;
}

bool td_hub_is_folder(const char *model) {
  return !has_file(model, "config.json") && has_file(model, "snapshots");
}

td_status td_hub_find_in(char **out, const char *folder, const char *revision, td_err *err) {
  *out = find_snapshot(folder, NULL, revision);
  if (*out) return TD_OK;
  return td_fail(err, TD_ENOENT,
                 "%s: revision %s is absent or incomplete: give one with --revision, or the "
                 "folder of a snapshot",
                 folder, revision ? revision : "main");
}

td_status td_hub_link(const char *folder, const char *commit, const td_hub_file *file,
                      td_err *err) {
  td_buf link = TD_BUF_INIT, target = TD_BUF_INIT;
  td_buf_printf(&link, "%s/snapshots/%s/%s", folder, commit, file->path);
  const char *text = td_buf_text(&link);
  td_status st = td_buf_status(&link, err);
  if (st == TD_OK) {
    char *slash = strrchr(link.data, '/');
    *slash = '\0';
    st = td_hub_make_folder(text, err);
    *slash = '/';
  }
  td_buf_str(&target, "../../");
  for (const char *at = file->path; (at = strchr(at, '/')); at++)
    td_buf_str(&target, "../");
  td_buf_printf(&target, "blobs/%s", file->hash);
  if (st == TD_OK) {
    (void)unlink(text); // of an earlier download
    if (symlink(td_buf_text(&target), text) != 0)
      st = td_fail(err, TD_EIO, "%s: cannot make the link: %s", text, strerror(errno));
  }
  td_buf_free(&link);
  td_buf_free(&target);
  return st;
}

td_status td_hub_write_ref(const char *folder, const char *revision, const char *commit,
                           td_err *err) {
  if (strcmp(revision, commit) == 0) return TD_OK;
  td_buf path = TD_BUF_INIT;
  td_buf_printf(&path, "%s/refs/%s", folder, revision);
  td_status st = td_buf_status(&path, err);
  if (st == TD_OK) {
    char *slash = strrchr(path.data, '/');
    *slash = '\0';
    st = td_hub_make_folder(path.data, err);
    *slash = '/';
  }
  if (st == TD_OK) st = td_file_write(path.data, commit, strlen(commit), err);
  td_buf_free(&path);
  return st;
}
