// src/front/model_files.c - goes through a model's folder.
#include "front/model_files.h"

#include <dirent.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/fs.h"
#include "gguf/files.h"

#define MAX_CONFIG_BYTES (1u << 24)

static bool ends_with(const char *name, const char *end) {
  const size_t n = strlen(name), n_end = strlen(end);
  return n > n_end && strcmp(name + n - n_end, end) == 0;
}

static int is_file(const struct dirent *entry) {
  static const char *const ends[] = {".safetensors", ".json", ".jinja", ".model"};
  for (size_t i = 0; i < TD_COUNT(ends); i++)
    if (ends_with(entry->d_name, ends[i])) return 1;
  return 0;
}

static void add_file(td_model_files *out, td_sha256 *sha, const char *dir, const char *name) {
  struct stat info;
  td_err ignored;
  td_buf path = TD_BUF_INIT, text = TD_BUF_INIT;
  td_buf_printf(&path, "%s/%s", dir, name);
  if (stat(td_buf_text(&path), &info) == 0 && S_ISREG(info.st_mode)) {
    const uint64_t n_bytes = (uint64_t)info.st_size;
    out->n_bytes += n_bytes;
    if (info.st_mtim.tv_sec > out->modified_s) out->modified_s = info.st_mtim.tv_sec;
    if (ends_with(name, ".safetensors") || td_gguf_is(name)) {
      td_sha256_add(sha, name, strlen(name) + 1);
      td_sha256_add(sha, &n_bytes, sizeof n_bytes);
    }
    if (strcmp(name, "config.json") == 0 &&
        td_file_read(&text, td_buf_text(&path), MAX_CONFIG_BYTES, &ignored) == TD_OK)
      td_sha256_add(sha, td_buf_text(&text), text.len);
  }
  td_buf_free(&path);
  td_buf_free(&text);
}

// The parts of a GGUF model, and the configuration that is in them.
static void add_gguf(td_model_files *out, td_sha256 *sha, const char *model) {
  const uint32_t n = td_gguf_n_parts(model);
  td_buf text = TD_BUF_INIT;
  td_err ignored;
  for (uint32_t i = 0; i < n; i++) {
    char *path = td_gguf_part_path(model, i, n), *slash = path ? strrchr(path, '/') : NULL;
    if (slash) *slash = '\0';
    if (path) add_file(out, sha, slash ? path : ".", slash ? slash + 1 : path);
    free(path);
  }
  if (td_checkpoint_read(&text, model, "config.json", MAX_CONFIG_BYTES, &ignored) == TD_OK)
    td_sha256_add(sha, td_buf_text(&text), text.len);
  td_buf_free(&text);
}

void td_model_files_read(td_model_files *out, const char *dir) {
  struct dirent **entries;
  td_sha256 sha;
  *out = (td_model_files){0};
  td_sha256_begin(&sha);
  if (td_gguf_is(dir)) add_gguf(out, &sha, dir);
  const int n = td_gguf_is(dir) ? -1 : scandir(dir, &entries, is_file, alphasort);
  for (int i = 0; i < n; i++) {
    add_file(out, &sha, dir, entries[i]->d_name);
    free(entries[i]);
  }
  if (n >= 0) free(entries);
  td_sha256_end(&sha, &out->digest);
}
