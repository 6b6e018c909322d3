// src/base/json_index.h - members of a JSON object by name, where many are looked up.
#pragma once

#include "base/json_parse.h"

// Members in the order of their names, so that no choice of names makes a search long.
typedef struct {
  const cJSON *object;
  struct td_json_member *members; // NULL: few enough to go through
  size_t n;
} td_json_index;

// Borrows object, whose members may not change until the index is closed. What is no object, NULL
// included, has no members. On error *index is closed.
td_status td_json_index_open(td_json_index *index, const cJSON *object, td_err *err);
void td_json_index_close(td_json_index *index);
// What td_json_get gives: the first member of the name, NULL when it is absent or null.
const cJSON *td_json_index_find(const td_json_index *index, const char *key);
