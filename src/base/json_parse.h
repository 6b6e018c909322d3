// src/base/json_parse.h - strict JSON: checked here first, then parsed by cJSON.
// Files including this may use cJSON's types; see the vendor fences in scripts/check_includes.py.
#ifndef TD_BASE_JSON_PARSE_H
#define TD_BASE_JSON_PARSE_H

#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/buf.h"
#include "base/status.h"

#define TD_JSON_MAX_DEPTH 64

// Checks that bytes[len] are exactly one RFC 8259 value and nothing behind it but white space:
// valid UTF-8, nesting of at most max_depth, every number finite as a double and at most 63 bytes
// long, no \u0000 and no lone surrogates. TD_EFORMAT with the byte offset and the reason otherwise.
td_status td_json_check(const char *bytes, size_t len, int max_depth, td_err *err);

// td_json_check, then cJSON_Parse. The caller owns *out (cJSON_Delete). bytes need no NUL. A number
// that valuedouble does not tell from others ("1.0", "1e2", "-0", over 15 digits) keeps its text in
// valuestring, which is NULL for the rest.
td_status td_json_parse(cJSON **out, const char *bytes, size_t len, int max_depth, td_err *err);

// Overwrites each \u0000 and each lone surrogate of the strings in bytes[len] with \ufffd, which is
// as long. Anything may stand there, JSON or not. Returns whether there was one.
bool td_json_replace_escapes(char *bytes, size_t len);

// The same of at most max_values values, each of which takes 80 bytes however short it was written.
// TD_ELIMIT: there are more, found before any is made.
td_status td_json_parse_at_most(cJSON **out, const char *bytes, size_t len, int max_depth,
                                size_t max_values, td_err *err);

// Reads and parses a file of at most max_bytes; messages begin with the path.
td_status td_json_parse_file(cJSON **out, const char *path, size_t max_bytes, td_err *err);
// The same of a model's file (td_file_read_regular).
td_status td_json_parse_regular(cJSON **out, const char *path, size_t max_bytes, td_err *err);

// Members, where a JSON null counts as absent. Duplicate keys: the first wins.
const cJSON *td_json_get(const cJSON *object, const char *key); // NULL when absent or null
// Each leaves *out alone when the member is absent; TD_EINVAL naming the key on a wrong type.
td_status td_json_get_bool(const cJSON *object, const char *key, bool *out, td_err *err);
td_status td_json_get_double(const cJSON *object, const char *key, double *out, td_err *err);
// Whole numbers only, exact up to 2^53. TD_EINVAL outside [min, max].
td_status td_json_get_int(const cJSON *object, const char *key, int64_t min, int64_t max,
                          int64_t *out, td_err *err);
// *out borrows from object.
td_status td_json_get_str(const cJSON *object, const char *key, const char **out, td_err *err);

#endif
