// src/hub/contents.c - which models the cache holds, and removing one.
#include <dirent.h>
#include <errno.h>
#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/str.h"
#include "hub/hub_impl.h"

#define FOLDER_PREFIX "models--"

// ---- list ---------------------------------------------------------------------------------------

// Adds the sizes of a model's blobs.
static void add_blobs(td_hub_model *m, const char *folder) {
  td_buf path = TD_BUF_INIT;
  td_buf_printf(&path, "%s/blobs", folder);
  DIR *stream = opendir(td_buf_text(&path));
  for (const struct dirent *d; stream && (d = readdir(stream));) {
    struct stat info;
    if (fstatat(dirfd(stream), d->d_name, &info, 0) != 0 || !S_ISREG(info.st_mode)) continue;
    m->n_bytes += (uint64_t)info.st_size;
    m->is_partial |= td_ends_with(d->d_name, ".incomplete");
  }
  if (stream) closedir(stream);
  td_buf_free(&path);
}

// Appends the quantizations of GGUF files in a snapshot, and in the folders in it.
static void add_quants(td_buf *out, const char *snapshot, bool is_top) {
  DIR *stream = opendir(snapshot);
  for (const struct dirent *d; stream && (d = readdir(stream));) {
    td_buf path = TD_BUF_INIT;
    struct stat info;
    td_buf_printf(&path, "%s/%s", snapshot, d->d_name);
    const bool is_there = d->d_name[0] != '.' && stat(td_buf_text(&path), &info) == 0;
    if (is_there && S_ISREG(info.st_mode)) td_hub_list_quant(out, td_buf_text(&path));
    if (is_there && S_ISDIR(info.st_mode) && is_top) add_quants(out, td_buf_text(&path), false);
    td_buf_free(&path);
  }
  if (stream) closedir(stream);
}

static td_status describe(const char *folder, const char *repo, td_hub_each *each, void *ctx) {
  td_buf quants = TD_BUF_INIT, path = TD_BUF_INIT;
  td_hub_model m = {.repo = repo};
  td_err ignored;
  char *whole = NULL;
  add_blobs(&m, folder);
  td_buf_printf(&path, "%s/snapshots", folder);
  DIR *stream = opendir(td_buf_text(&path));
  for (const struct dirent *d; stream && (d = readdir(stream));) {
    if (d->d_name[0] == '.') continue;
    td_buf_clear(&path);
    td_buf_printf(&path, "%s/snapshots/%s", folder, d->d_name);
    add_quants(&quants, td_buf_text(&path), true);
  }
  if (stream) closedir(stream);
  m.has_safetensors = td_hub_find_in(&whole, folder, NULL, &ignored) == TD_OK;
  m.quants = td_buf_text(&quants);
  td_status st = m.n_bytes ? each(ctx, &m) : TD_OK;
  free(whole);
  td_buf_free(&quants);
  td_buf_free(&path);
  return st;
}

td_status td_hub_list(td_hub_each *each, void *ctx, td_err *err) {
  td_buf cache = TD_BUF_INIT;
  struct dirent **found = NULL;
  td_status st = td_hub_cache(&cache, err);
  const int n = st == TD_OK ? scandir(td_buf_text(&cache), &found, NULL, alphasort) : 0;
  for (int i = 0; i < n; i++) {
    const char *name = found[i]->d_name;
    const size_t skip = strlen(FOLDER_PREFIX);
    const char *org_end = strncmp(name, FOLDER_PREFIX, skip) == 0 ? strstr(name + skip, "--")
                                                                  : NULL;
    td_buf folder = TD_BUF_INIT, repo = TD_BUF_INIT;
    td_buf_printf(&folder, "%s/%s", td_buf_text(&cache), name);
    if (org_end)
      td_buf_printf(&repo, "%.*s/%s", (int)(org_end - name - (ptrdiff_t)skip), name + skip,
                    org_end + 2);
    if (org_end && st == TD_OK) st = describe(td_buf_text(&folder), td_buf_text(&repo), each, ctx);
    td_buf_free(&folder);
    td_buf_free(&repo);
    free(found[i]);
  }
  free(found);
  td_buf_free(&cache);
  return st;
}

// ---- remove -------------------------------------------------------------------------------------

static uint64_t n_removed; // bytes, by one thread

static int remove_one(const char *path, const struct stat *info, int kind, struct FTW *at) {
  (void)at;
  if (kind == FTW_F) n_removed += (uint64_t)info->st_size;
  return remove(path);
}

// Removes the GGUF files of a quantization from a folder of links, and the blobs they lead to.
static int remove_quant(const char *quant, const char *folder, bool is_top) {
  int code = 0;
  DIR *stream = opendir(folder);
  for (const struct dirent *d; stream && (d = readdir(stream));) {
    td_buf path = TD_BUF_INIT;
    struct stat info;
    td_buf_printf(&path, "%s/%s", folder, d->d_name);
    const char *file = td_buf_text(&path);
    const bool is_there = d->d_name[0] != '.' && stat(file, &info) == 0;
    if (is_there && S_ISDIR(info.st_mode) && is_top) {
      code |= remove_quant(quant, file, false);
    } else if (is_there && S_ISREG(info.st_mode) && td_hub_quant_len(file, quant)) {
      char *blob = realpath(file, NULL);
      code |= unlink(file);
      if (blob && strcmp(blob, file) != 0) code |= unlink(blob);
      n_removed += (uint64_t)info.st_size;
      free(blob);
    }
    td_buf_free(&path);
  }
  if (stream) closedir(stream);
  return code;
}

td_status td_hub_remove(uint64_t *n_bytes, const char *repo, const char *quant, td_err *err) {
  td_buf folder = TD_BUF_INIT;
  int code = 0;
  n_removed = 0;
  td_status st = td_hub_folder(&folder, repo, err);
  const char *path = td_buf_text(&folder);
  if (st == TD_OK && access(path, F_OK) != 0)
    st = td_fail(err, TD_ENOENT, "%s is not in the hub's cache: there is no %s", repo, path);
  errno = 0;
  if (st == TD_OK && !quant) {
    code = nftw(path, remove_one, 16, FTW_DEPTH | FTW_PHYS);
  } else if (st == TD_OK) {
    td_buf snapshots = TD_BUF_INIT;
    td_buf_printf(&snapshots, "%s/snapshots", path);
    DIR *stream = opendir(td_buf_text(&snapshots));
    for (const struct dirent *d; stream && (d = readdir(stream));) {
      td_buf one = TD_BUF_INIT;
      td_buf_printf(&one, "%s/%s", td_buf_text(&snapshots), d->d_name);
      if (d->d_name[0] != '.') code |= remove_quant(quant, td_buf_text(&one), true);
      td_buf_free(&one);
    }
    if (stream) closedir(stream);
    td_buf_free(&snapshots);
    if (!code && !n_removed)
      st = td_fail(err, TD_ENOENT, "%s: there are no GGUF files of %s", path, quant);
  }
  if (st == TD_OK && code)
    st = td_fail(err, TD_EIO, "%s: cannot remove all of it: %s", path, strerror(errno));
  *n_bytes = n_removed;
  td_buf_free(&folder);
  return st;
}
