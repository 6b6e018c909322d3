// src/front/api_keys.c - reading API keys and checking an Authorization header against them.
#include "front/api_keys.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>

#include "base/env.h"
#include "base/fs.h"
#include "base/log.h"

#define MAX_FILE_BYTES (1u << 20)
#define MAX_WEIGHT     1000

static td_status add(td_api_keys *keys, const char *key, uint32_t weight, td_err *err) {
  td_api_key *grown = realloc(keys->keys, (keys->n + (size_t)1) * sizeof *grown);
  if (!grown) return td_fail(err, TD_ENOMEM, "out of memory for %u API keys", keys->n + 1);
  keys->keys = grown;
  keys->keys[keys->n++] = (td_api_key){.key = key, .weight = weight};
  return TD_OK;
}

// Cuts the next word off *text; NULL if there is none.
static char *next_word(char **text) {
  char *word = *text + strspn(*text, " \t\r\n");
  if (!*word) return NULL;
  char *end = word + strcspn(word, " \t\r\n");
  *text = *end ? end + 1 : end;
  *end = '\0';
  return word;
}

static td_status read_line(td_api_keys *keys, char *line, const char *path, unsigned number,
                           td_err *err) {
  line[strcspn(line, "#")] = '\0';
  char *key = next_word(&line), *weight = key ? next_word(&line) : NULL, *end;
  if (!key) return TD_OK;
  long value = weight ? strtol(weight, &end, 10) : 1;
  if (weight && (*end || !isdigit((unsigned char)*weight) || value < 1 || value > MAX_WEIGHT)) {
    return td_fail(err, TD_EINVAL, "%s:%u: the weight of a key is a number from 1 to %d", path,
                   number, MAX_WEIGHT);
  }
  if (next_word(&line))
    return td_fail(err, TD_EINVAL, "%s:%u: give a key and a weight, no more", path, number);
  return add(keys, key, (uint32_t)value, err);
}

static void warn_if_readable(const char *path) {
  struct stat info;
  if (stat(path, &info) != 0 || !S_ISREG(info.st_mode) || !(info.st_mode & 077)) return;
  td_warn("%s holds API keys, and other users may read or write it: chmod 600", path);
}

static td_status read_file(td_api_keys *keys, const char *path, td_err *err) {
  td_status st = td_file_read(&keys->text, path, MAX_FILE_BYTES, err);
  if (st == TD_OK) {
    td_buf_char(&keys->text, '\0');
    st = td_buf_status(&keys->text, err);
  }
  if (st != TD_OK) return st;
  warn_if_readable(path);
  uint32_t n_before = keys->n;
  char *line = keys->text.data;
  for (unsigned number = 1; st == TD_OK && line; number++) {
    char *end = strchr(line, '\n');
    if (end) *end = '\0';
    st = read_line(keys, line, path, number, err);
    line = end ? end + 1 : NULL;
  }
  if (st == TD_OK && keys->n == n_before) return td_fail(err, TD_EINVAL, "%s: holds no key", path);
  return st;
}

td_status td_api_keys_read(td_api_keys *out, const char *one, const char *path, td_err *err) {
  *out = (td_api_keys){.text = TD_BUF_INIT};
  td_status st = one ? add(out, one, 1, err) : TD_OK;
  return st == TD_OK && path ? read_file(out, path, err) : st;
}

void td_api_keys_free(td_api_keys *keys) {
  td_buf_free(&keys->text);
  free(keys->keys);
  *keys = (td_api_keys){.text = TD_BUF_INIT};
}

static bool same_key(const char *given, const char *key) {
  size_t n_given = strlen(given), n_key = strlen(key);
  unsigned char difference = n_given != n_key;
  for (size_t i = 0; i < n_given; i++)
    difference |= (unsigned char)(given[i] ^ key[n_key ? i % n_key : 0]);
  return difference == 0;
}

bool td_api_keys_check(const td_api_keys *keys, const char *authorization, uint64_t peer,
                       td_api_caller *out) {
  bool has_token = authorization && strncasecmp(authorization, "Bearer ", 7) == 0;
  const char *given = has_token ? authorization + 7 + strspn(authorization + 7, " ") : "";
  // Without keys the token is not verified and could differ in every request, so the tenant is the
  // peer address.
  *out = (td_api_caller){.tenant = peer, .weight = 1};
  bool is_known = !keys->n;
  for (uint32_t i = 0; i < keys->n; i++) {
    if (!same_key(given, keys->keys[i].key)) continue;
    is_known = has_token;
    *out = (td_api_caller){.tenant = i, .weight = keys->keys[i].weight};
  }
  return is_known;
}

// ---- sources of --api-key -----------------------------------------------------------------------

static void hide(int argc, char **argv) {
  static const char name[] = "--api-key";
  for (int i = 1; i < argc; i++) {
    if (strncmp(argv[i], name, sizeof name - 1) != 0) continue;
    char *value = argv[i] + sizeof name - 1;
    if (*value == '=') {
      memset(value + 1, 'x', strlen(value + 1));
    } else if (!*value && i + 1 < argc) {
      memset(argv[i + 1], 'x', strlen(argv[i + 1]));
      i++;
    }
  }
}

static td_status read_key(char **out, const char *path, td_err *err) {
  td_buf text = TD_BUF_INIT;
  td_status st = td_file_read(&text, path, MAX_FILE_BYTES, err);
  if (st == TD_OK) {
    warn_if_readable(path);
    char *line = text.data;
    *out = line ? next_word(&line) : NULL;
    if (*out) *out = strdup(*out);
    if (!*out) st = td_fail(err, TD_EINVAL, "--api-key-file %s: holds no key", path);
  }
  td_buf_free(&text);
  return st;
}

td_status td_api_key_find(td_options *o, int argc, char **argv, td_err *err) {
  hide(argc, argv);
  char *given = (char *)td_env("TANDEM_API_KEY"); // overwritten below
  td_status st = TD_OK;
  if (!o->api_key && o->api_key_file) {
    st = read_key(&o->api_key, o->api_key_file, err);
  } else if (!o->api_key && given) {
    o->api_key = strdup(given);
    if (!o->api_key) st = td_fail(err, TD_ENOMEM, "out of memory");
  }
  if (given) memset(given, 'x', strlen(given)); // visible in /proc
  unsetenv("TANDEM_API_KEY");                   // so that workers do not inherit it
  return st;
}
