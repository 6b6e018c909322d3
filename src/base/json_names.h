// src/base/json_names.h - the names in a JSON array as a set, such as a schema's `required`.
// Sorted, so that no choice of names makes a search long.
#pragma once

#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stddef.h>

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
