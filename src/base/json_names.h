// src/base/json_names.h - the strings of a JSON array as a set, such as a schema's `required`.
#pragma once

#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stddef.h>

typedef struct {
  const char **names; // [n], sorted; the array's own
  size_t n;
} td_json_names;

// list may be NULL, or no array: it has none then; what is no string is left out. False: out of
// memory.
bool td_json_names_open(td_json_names *out, const cJSON *list);
void td_json_names_close(td_json_names *names);
bool td_json_names_has(const td_json_names *names, const char *name);
