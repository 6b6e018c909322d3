// src/gguf/files.c - parts of a model, and the files made from its metadata.
#include "gguf/files.h"

#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/str.h"
#include "gguf/tokenizer.h"

#define ENDING ".gguf"
enum { PART_LEN = sizeof "-00001-of-00002" - 1 };

static bool begins_as_one(const char *path) {
  char magic[4];
  const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  const bool is_one = fd >= 0 && read(fd, magic, sizeof magic) == sizeof magic &&
                      memcmp(magic, "GGUF", sizeof magic) == 0;
  if (fd >= 0) close(fd);
  return is_one;
}

bool td_gguf_is(const char *model) {
  if (td_ends_with(model, ENDING)) return strlen(model) > strlen(ENDING);
  return !td_ends_with(model, ".safetensors") && begins_as_one(model);
}

static size_t stem_len(const char *path) {
  return strlen(path) - (td_ends_with(path, ENDING) ? strlen(ENDING) : 0);
}

// Whether a file's name ends as a part's does: -IIIII-of-NNNNN.gguf.
static bool is_part(const char *path, uint32_t *nth, uint32_t *n) {
  const size_t len = stem_len(path);
  unsigned idx, n_parts;
  int used = 0;
  if (len < PART_LEN || !path[len]) return false;
  if (sscanf(path + len - PART_LEN, "-%5u-of-%5u%n", &idx, &n_parts, &used) != 2) return false;
  *nth = idx;
  *n = n_parts;
  return used == PART_LEN;
}

char *td_gguf_model_name(const char *path) {
  const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;
  uint32_t nth, n;
  const size_t len = stem_len(name);
  return strndup(name, is_part(name, &nth, &n) && len > PART_LEN ? len - PART_LEN : len);
}

char *td_gguf_part_path(const char *path, uint32_t idx, uint32_t n) {
  char *out;
  if (n <= 1) return strdup(path);
  const int len = (int)(stem_len(path) - PART_LEN);
  return asprintf(&out, "%.*s-%05u-of-%05u" ENDING, len, path, idx + 1, n) < 0 ? NULL : out;
}

uint32_t td_gguf_n_parts(const char *path) {
  uint32_t nth, n;
  return is_part(path, &nth, &n) && n > 1 ? n : 1;
}

bool td_gguf_is_first(const char *path) {
  uint32_t nth, n;
  return !is_part(path, &nth, &n) || nth == 1;
}

td_status td_gguf_check_part(const td_gguf *g, td_err *err) {
  uint32_t nth = 1, n = 1;
  double count = 1, no = 0;
  if (!is_part(g->file, &nth, &n)) nth = n = 1;
  const td_gguf_value *v = td_gguf_find(g, "split.count");
  if (v && !(td_gguf_number(v, 0, &count) && (count == n || (n == 1 && count == 0)))) {
    return td_fail(err, TD_EFORMAT,
                   "%s: it is one of %g parts, which are found by their names: call them "
                   "NAME-00001-of-00002.gguf and so on, as published",
                   g->file, count);
  }
  v = td_gguf_find(g, "split.no");
  if (!v || (td_gguf_number(v, 0, &no) && no + 1 == nth)) return TD_OK;
  return td_fail(err, TD_EFORMAT, "%s: it is part %g of %u: name it so, or download it again",
                 g->file, no + 1, n);
}

// Whether both state the value, and not the same.
static bool differ(const td_gguf *a, const td_gguf *b, const char *key) {
  const td_gguf_value *v = td_gguf_find(a, key), *w = td_gguf_find(b, key);
  double x, y;
  td_gguf_str s, t;
  if (td_gguf_number(v, 0, &x) && td_gguf_number(w, 0, &y)) return x != y;
  if (td_gguf_text(v, &s) && td_gguf_text(w, &t))
    return s.len != t.len || memcmp(s.data, t.data, s.len) != 0;
  return false;
}

// Whether all parts are of one model, as far as they say.
static td_status check_set(const td_gguf_files *f, td_err *err) {
  static const char *const shared[] = {"general.architecture", "general.name",
                                       "split.tensors.count"};
  const td_gguf *first = &f->parts[0];
  size_t n = 0;
  for (uint32_t i = 0; i < f->n; i++) {
    n += f->parts[i].n_tensors;
    for (size_t k = 0; k < TD_COUNT(shared); k++) {
      if (!differ(first, &f->parts[i], shared[k])) continue;
      return td_fail(err, TD_EFORMAT,
                     "%s: a part of another model than %s, by its %s: download both again",
                     f->paths[i], f->paths[0], shared[k]);
    }
  }
  double stated = (double)n;
  td_gguf_number(td_gguf_find(first, "split.tensors.count"), 0, &stated);
  if (stated == (double)n) return TD_OK;
  return td_fail(err, TD_EFORMAT,
                 "%s: the model has %g tensors, and its parts %zu: one of them is of another "
                 "model, download all again",
                 f->paths[0], stated, n);
}

static td_status open_part(td_gguf_files *f, uint32_t idx, const char *path, td_err *err) {
  td_status st = td_file_map_open(&f->maps[idx], path, err);
  if (st == TD_ENOENT && idx) {
    return td_fail(err, st, "%s: no such file: the model has %u parts, download all of them", path,
                   f->n);
  }
  if (st == TD_OK)
    st = td_gguf_parse(&f->parts[idx], f->maps[idx].data, f->maps[idx].n_bytes, path, err);
  return st == TD_OK ? td_gguf_check_part(&f->parts[idx], err) : st;
}

td_status td_gguf_files_open(td_gguf_files *out, const char *path, td_err *err) {
  td_gguf_files f = {.n = td_gguf_n_parts(path)};
  td_status st = TD_OK;
  *out = (td_gguf_files){0};
  f.parts = calloc(f.n, sizeof *f.parts);
  f.maps = calloc(f.n, sizeof *f.maps);
  f.paths = calloc(f.n, sizeof *f.paths);
  if (!f.parts || !f.maps || !f.paths) st = td_fail(err, TD_ENOMEM, "%s: out of memory", path);
  for (uint32_t i = 0; i < f.n && st == TD_OK; i++) {
    f.paths[i] = td_gguf_part_path(path, i, f.n);
    st = f.paths[i] ? open_part(&f, i, f.paths[i], err)
                    : td_fail(err, TD_ENOMEM, "%s: out of memory", path);
  }
  if (st == TD_OK) st = check_set(&f, err);
  if (st == TD_OK)
    *out = f;
  else
    td_gguf_files_close(&f);
  return st;
}

void td_gguf_files_close(td_gguf_files *f) {
  for (uint32_t i = 0; i < f->n; i++) {
    if (f->parts) td_gguf_free(&f->parts[i]);
    if (f->maps) td_file_map_close(&f->maps[i]);
    if (f->paths) free(f->paths[i]);
  }
  free(f->parts);
  free(f->maps);
  free(f->paths);
  *f = (td_gguf_files){0};
}

// ---- files of a checkpoint ----------------------------------------------------------------------

static bool is_made(const char *name) {
  return td_is_word("config.json tokenizer.json tokenizer_config.json", name);
}

static td_status make(td_buf *out, const char *model, const char *name, td_err *err) {
  td_gguf_files f;
  if (!is_made(name)) return td_fail(err, TD_ENOENT, "%s/%s: no such file", model, name);
  td_status st = td_gguf_files_open(&f, model, err);
  if (st != TD_OK) return st;
  if (strcmp(name, "config.json") == 0)
    st = td_gguf_config(out, f.parts, f.n, err);
  else if (strcmp(name, "tokenizer.json") == 0)
    st = td_gguf_tokenizer(out, &f.parts[0], err);
  else
    st = td_gguf_tokenizer_config(out, &f.parts[0], err);
  td_gguf_files_close(&f);
  return st;
}

td_status td_checkpoint_read(td_buf *out, const char *model, const char *name, size_t max_bytes,
                             td_err *err) {
  if (td_gguf_is(model)) return make(out, model, name, err);
  char *path;
  if (asprintf(&path, "%s/%s", model, name) < 0) path = NULL;
  td_status st = path ? td_file_read_regular(out, path, max_bytes, err)
                      : td_fail(err, TD_ENOMEM, "out of memory");
  free(path);
  return st;
}

td_status td_checkpoint_json(cJSON **out, const char *model, const char *name, size_t max_bytes,
                             td_err *err) {
  td_buf text = TD_BUF_INIT;
  *out = NULL;
  td_status st = td_checkpoint_read(&text, model, name, max_bytes, err);
  if (st == TD_OK) {
    st = td_json_parse(out, td_buf_text(&text), text.len, TD_JSON_MAX_DEPTH, err);
    if (st != TD_OK) td_err_prefix(err, "%s/%s", model, name);
  }
  td_buf_free(&text);
  return st;
}

void td_checkpoint_name_error(const char *model, td_err *err) {
  td_gguf_files f;
  const td_gguf_arch *arch;
  td_err ignored;
  if (!err || !td_gguf_is(model) || td_gguf_files_open(&f, model, &ignored) != TD_OK) return;
  if (td_gguf_arch_of(&f.parts[0], &arch, &ignored) == TD_OK)
    td_gguf_name_error(arch, f.parts, f.n, err);
  td_gguf_files_close(&f);
}

bool td_checkpoint_has(const char *model, const char *name) {
  if (td_gguf_is(model)) return is_made(name);
  char path[PATH_MAX]; // a longer one names no file
  const int len = snprintf(path, sizeof path, "%s/%s", model, name);
  return len > 0 && (size_t)len < sizeof path && td_file_exists(path);
}

// Not of another part of it, nor of its vision alone.
static bool is_model_file(const char *name) {
  return td_gguf_is_first(name) && !strcasestr(name, "mmproj");
}

td_status td_gguf_in(char **out, const char *folder, td_err *err) {
  *out = NULL;
  td_status st = TD_OK;
  DIR *stream = td_checkpoint_has(folder, "config.json") ? NULL : opendir(folder);
  for (const struct dirent *d; stream && st == TD_OK && (d = readdir(stream));) {
    const char *name = d->d_name;
    if (name[0] == '.' || !td_ends_with(name, ENDING) || !is_model_file(name)) continue;
    if (*out) {
      st = td_fail(err, TD_EINVAL, "%s: several models are in it, as %s and %s: name one", folder,
                   strrchr(*out, '/') + 1, name);
    } else if (asprintf(out, "%s/%s", folder, name) < 0) {
      *out = NULL;
      st = td_fail(err, TD_ENOMEM, "out of memory");
    }
  }
  if (stream) closedir(stream);
  if (st == TD_OK) return TD_OK;
  free(*out);
  *out = NULL;
  return st;
}

bool td_checkpoint_is(const char *folder, const char *name) {
  char path[PATH_MAX], *file;
  td_err ignored;
  const int len = snprintf(path, sizeof path, "%s/%s", folder, name);
  if (name[0] == '.' || len <= 0 || (size_t)len >= sizeof path) return false;
  if (td_gguf_is(path)) return is_model_file(name);
  if (td_checkpoint_has(path, "config.json")) return true;
  td_gguf_in(&file, path, &ignored);
  free(file);
  return file != NULL;
}
