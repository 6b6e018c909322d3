// src/base/json_names.c - a sorted list of strings.
#include "base/json_names.h"

#include <stdlib.h>
#include <string.h>

static int by_text(const void *a, const void *b) {
  return strcmp(*(const char *const *)a, *(const char *const *)b);
}

bool td_json_names_open(td_json_names *out, const cJSON *list, td_json_name_of *name_of) {
  const cJSON *first = cJSON_IsArray(list) ? list->child : NULL;
  size_t n = 0;
  for (const cJSON *item = first; item; item = item->next)
    n++;
  *out = (td_json_names){.names = malloc((n + 1) * sizeof *out->names)};
  if (!out->names) return false;
  for (const cJSON *item = first; item; item = item->next) {
    const char *name = name_of ? name_of(item) : cJSON_IsString(item) ? item->valuestring : NULL;
    if (name) out->names[out->n++] = name;
  }
  qsort(out->names, out->n, sizeof *out->names, by_text);
  return true;
}

void td_json_names_close(td_json_names *names) {
  free(names->names);
  *names = (td_json_names){0};
}

bool td_json_names_has(const td_json_names *names, const char *name) {
  return names->n && bsearch(&name, names->names, names->n, sizeof *names->names, by_text);
}
