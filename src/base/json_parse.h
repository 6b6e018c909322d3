// src/base/json_parse.h - strict JSON: validated here, then parsed by cJSON.
// Files that include this may use cJSON's types; see the vendor fences in
// scripts/check_includes.py.
#pragma once

#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/buf.h"
#include "base/status.h"

#define TD_JSON_MAX_DEPTH 64

// Checks that bytes[0..len) are exactly one RFC 8259 value, followed by nothing but white space:
// valid UTF-8, at most max_depth levels, every number finite as a double and at most 63 bytes long,
// no \u0000, no lone surrogates. Otherwise TD_EFORMAT with byte offset and reason.
td_status td_json_check(const char *bytes, size_t len, int max_depth, td_err *err);

// td_json_check, then cJSON_Parse. The caller owns *out (cJSON_Delete). bytes need no NUL. A number
// that valuedouble does not represent uniquely ("1.0", "1e2", "-0", over 15 digits) keeps its text
// in valuestring, which is NULL for other numbers.
td_status td_json_parse(cJSON **out, const char *bytes, size_t len, int max_depth, td_err *err);

// Replaces each \u0000 and each lone surrogate in bytes[0..len) by \ufffd, which has the same
// length. The text need not be valid JSON. Returns whether anything was replaced.
bool td_json_replace_escapes(char *bytes, size_t len);

// Like td_json_parse, with a limit on the number of values, each of which takes 80 bytes of memory.
// TD_ELIMIT: there are more than max_values; detected before any is allocated.
td_status td_json_parse_at_most(cJSON **out, const char *bytes, size_t len, int max_depth,
                                size_t max_values, td_err *err);

// Reads and parses a file of at most max_bytes; messages begin with the path.
td_status td_json_parse_file(cJSON **out, const char *path, size_t max_bytes, td_err *err);
// Like td_json_parse_file, for a model's file (td_file_read_regular).
td_status td_json_parse_regular(cJSON **out, const char *path, size_t max_bytes, td_err *err);

// Access to members. JSON null counts as absent; the first of duplicate keys is used.
const cJSON *td_json_get(const cJSON *object, const char *key); // NULL when absent or null
const char *td_json_text(const cJSON *object, const char *key); // NULL when no string
// Whether the member is that text.
bool td_json_is(const cJSON *object, const char *key, const char *text);
// If the member is absent, *out is unchanged. Wrong type: TD_EINVAL, naming the key.
td_status td_json_get_bool(const cJSON *object, const char *key, bool *out, td_err *err);
td_status td_json_get_double(const cJSON *object, const char *key, double *out, td_err *err);
// Whether item, which may be NULL, is a whole number of [min, max], as all of int64 may be; *out is
// set only then.
bool td_json_whole(const cJSON *item, int64_t min, int64_t max, int64_t *out);
// Integers only. TD_EINVAL if outside [min, max].
td_status td_json_get_int(const cJSON *object, const char *key, int64_t min, int64_t max,
                          int64_t *out, td_err *err);
// *out borrows from object.
td_status td_json_get_str(const cJSON *object, const char *key, const char **out, td_err *err);

// The names in a JSON array as a set, such as a schema's `required`. Sorted, so that no choice of
// names makes a search long.
typedef struct {
  const char **names; // [n], sorted; the array's own
  size_t n;
} td_json_names;

// name_of: an item's name, NULL: none; NULL: items are names themselves. list may be NULL, or no
// array: it has none then. False: out of memory.
typedef const char *td_json_name_of(const cJSON *item);
bool td_json_names_open(td_json_names *out, const cJSON *list, td_json_name_of *name_of);
void td_json_names_close(td_json_names *names);
bool td_json_names_has(const td_json_names *names, const char *name);
