// src/text/json_replace.h - replaces members of JSON objects. cJSON's own function leaves an object
// with a nameless member when memory runs out.
#pragma once

#include <cjson/cJSON.h>
#include <stdbool.h>
#include <string.h>

// Puts value (NULL: out of memory) in the place of an object's member, which must be there. Takes
// value, also on error. False: out of memory.
static inline bool td_json_replace(cJSON *object, const char *key, cJSON *value) {
  cJSON *old = cJSON_GetObjectItemCaseSensitive(object, key);
  char *name = value && old ? cJSON_malloc(strlen(key) + 1) : NULL;
  if (!name) {
    cJSON_Delete(value);
    return false;
  }
  memcpy(name, key, strlen(key) + 1);
  if (!(value->type & cJSON_StringIsConst)) cJSON_free(value->string); // a copied member's
  value->type &= ~cJSON_StringIsConst;
  value->string = name;
  return cJSON_ReplaceItemViaPointer(object, old, value);
}
