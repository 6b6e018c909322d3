#include "app/api_keys.h"

#include <ctype.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "base/fs.h"

#define MAX_FILE_BYTES (1u << 20)
#define MAX_WEIGHT     1000

static td_status add(td_api_keys *keys, const char *key, uint32_t weight, td_err *err) {
  td_api_key *grown = realloc(keys->keys, (keys->n + (size_t)1) * sizeof *grown);
  if (!grown) return td_fail(err, TD_ENOMEM, "out of memory for %u API keys", keys->n + 1);
  keys->keys = grown;
  keys->keys[keys->n++] = (td_api_key){.key = key, .weight = weight};
  return TD_OK;
}

// Cuts the next word off *text; NULL: there is none.
static char *next_word(char **text) {
  char *word = *text + strspn(*text, " \t\r");
  if (!*word) return NULL;
  char *end = word + strcspn(word, " \t\r");
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
  if (next_word(&line)) {
    return td_fail(err, TD_EINVAL, "%s:%u: give a key and a weight, no more", path, number);
  }
  return add(keys, key, (uint32_t)value, err);
}

static td_status read_file(td_api_keys *keys, const char *path, td_err *err) {
  td_status st = td_file_read(&keys->text, path, MAX_FILE_BYTES, err);
  if (st == TD_OK) {
    td_buf_char(&keys->text, '\0');
    st = td_buf_status(&keys->text, err);
  }
  if (st != TD_OK) return st;
  uint32_t n_before = keys->n;
  char *line = keys->text.data;
  for (unsigned number = 1; st == TD_OK && line; number++) {
    char *end = strchr(line, '\n');
    if (end) *end = '\0';
    st = read_line(keys, line, path, number, err);
    line = end ? end + 1 : NULL;
  }
  if (st == TD_OK && keys->n == n_before) {
    return td_fail(err, TD_EINVAL, "%s: there is no key in it", path);
  }
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
  for (size_t i = 0; i < n_given; i++) {
    difference |= (unsigned char)(given[i] ^ key[n_key ? i % n_key : 0]);
  }
  return difference == 0;
}

// FNV-1a. Two tokens with one hash share their turn, no more.
static uint64_t hash_of(const char *text) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (; *text; text++)
    hash = (hash ^ (unsigned char)*text) * 0x100000001b3u;
  return hash;
}

bool td_api_keys_check(const td_api_keys *keys, const char *authorization, td_api_caller *out) {
  bool has_token = authorization && strncasecmp(authorization, "Bearer ", 7) == 0;
  const char *given = has_token ? authorization + 7 + strspn(authorization + 7, " ") : "";
  *out = (td_api_caller){.tenant = hash_of(given), .weight = 1};
  bool is_known = !keys->n;
  for (uint32_t i = 0; i < keys->n; i++) {
    if (!same_key(given, keys->keys[i].key)) continue;
    is_known = has_token;
    *out = (td_api_caller){.tenant = i, .weight = keys->keys[i].weight};
  }
  return is_known;
}
