// src/hub/quantization.c - quantizations: which GGUF files of a repository are one, and where they
// are in a snapshot.
#include <ctype.h>
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <unistd.h>

#include "gguf/files.h"
#include "hub/hub_impl.h"

td_status td_hub_split(const char *model, char **repo, char **quant, td_err *err) {
  const char *colon = strchr(model, ':');
  *repo = colon ? strndup(model, (size_t)(colon - model)) : strdup(model);
  *quant = colon ? strdup(colon + 1) : NULL;
  if (*repo && (!colon || *quant)) return TD_OK;
  free(*repo);
  free(*quant);
  return td_fail(err, TD_ENOMEM, "out of memory");
}

// Whether text[0..n) is the quantization, or ends with it behind a character that is no part of it.
static bool names_quant(const char *text, size_t n, const char *quant) {
  const size_t n_quant = strlen(quant);
  if (n < n_quant || strncasecmp(text + n - n_quant, quant, n_quant) != 0) return false;
  return n == n_quant || !isalnum((unsigned char)text[n - n_quant - 1]);
}

size_t td_hub_quant_len(const char *path, const char *quant) {
  if (!td_gguf_is(path) || strcasestr(path, "mmproj")) return 0;
  char *name = td_gguf_model_name(path);
  const size_t n = name ? strlen(name) : 0;
  bool is_one = n && names_quant(name, n, quant);
  free(name);
  // Or the folder alone names it.
  const char *file = strrchr(path, '/'), *folder = file;
  while (folder && folder > path && folder[-1] != '/')
    folder--;
  if (n && folder && !is_one) is_one = names_quant(folder, (size_t)(file - folder), quant);
  return is_one ? n : 0;
}

void td_hub_list_quant(td_buf *out, const char *path) {
  if (!td_gguf_is(path) || !td_gguf_is_first(path) || strcasestr(path, "mmproj")) return;
  char *name = td_gguf_model_name(path);
  const char *quant = name;
  for (const char *c = name; c && *c; c++)
    if (*c == '-' || *c == '.') quant = c + 1;
  const bool is_new = quant && *quant && !strstr(td_buf_text(out), quant);
  if (is_new) td_buf_printf(out, "%s%s", out->len ? ", " : "", quant);
  free(name);
}

// The best of a folder's files: of several that end so, the one with the shortest name.
typedef struct {
  const char *quant;
  char *path; // owned
  size_t len;
} choice;

static void look_at(choice *best, const char *folder, const char *name) {
  char *path;
  if (!td_gguf_is_first(name) || asprintf(&path, "%s/%s", folder, name) < 0) return;
  const size_t len = td_hub_quant_len(path, best->quant);
  if (!len || (best->path && len >= best->len)) {
    free(path);
    return;
  }
  free(best->path);
  best->path = path;
  best->len = len;
}

// Files of the snapshot, and of the folders in it.
static void look_into(choice *best, const char *folder, bool is_top) {
  DIR *stream = opendir(folder);
  for (const struct dirent *d; stream && (d = readdir(stream));) {
    struct stat info;
    char *path;
    if (d->d_name[0] == '.' || asprintf(&path, "%s/%s", folder, d->d_name) < 0) continue;
    const bool is_there = stat(path, &info) == 0;
    if (is_there && S_ISREG(info.st_mode) && td_gguf_is(d->d_name))
      look_at(best, folder, d->d_name);
    if (is_there && S_ISDIR(info.st_mode) && is_top) look_into(best, path, false);
    free(path);
  }
  if (stream) closedir(stream);
}

char *td_hub_find_quant(const char *snapshot, const char *quant) {
  choice best = {.quant = quant};
  look_into(&best, snapshot, true);
  const uint32_t n = best.path ? td_gguf_n_parts(best.path) : 0;
  bool is_whole = n > 0;
  for (uint32_t i = 0; i < n && is_whole; i++) {
    char *part = td_gguf_part_path(best.path, i, n);
    is_whole = part && access(part, R_OK) == 0;
    free(part);
  }
  if (is_whole) return best.path;
  free(best.path);
  return NULL;
}
