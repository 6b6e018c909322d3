// src/base/json_index.c - members of a JSON object by name.
#include "base/json_index.h"

#include <stdlib.h>
#include <string.h>

#define MAX_LINEAR 32

struct td_json_member {
  const cJSON *item;
  size_t nth;
};

static int by_name(const void *a, const void *b) {
  const struct td_json_member *x = a, *y = b;
  int order = strcmp(x->item->string, y->item->string);
  return order ? order : (x->nth > y->nth) - (x->nth < y->nth);
}

td_status td_json_index_open(td_json_index *index, const cJSON *object, td_err *err) {
  size_t n = 0;
  *index = (td_json_index){.object = object};
  if (!cJSON_IsObject(object)) return TD_OK;
  for (const cJSON *item = object->child; item; item = item->next)
    n++;
  if (n <= MAX_LINEAR) return TD_OK;
  index->members = malloc(n * sizeof *index->members);
  if (!index->members) return td_fail(err, TD_ENOMEM, "out of memory for %zu members", n);
  for (const cJSON *item = object->child; item; item = item->next, index->n++)
    index->members[index->n] = (struct td_json_member){item, index->n};
  qsort(index->members, n, sizeof *index->members, by_name);
  return TD_OK;
}

void td_json_index_close(td_json_index *index) {
  free(index->members);
  *index = (td_json_index){0};
}

const cJSON *td_json_index_find(const td_json_index *index, const char *key) {
  if (!index->members) return td_json_get(index->object, key);
  size_t low = 0, high = index->n; // the first that is not below the name
  while (low < high) {
    size_t mid = low + (high - low) / 2;
    if (strcmp(index->members[mid].item->string, key) < 0) {
      low = mid + 1;
    } else {
      high = mid;
    }
  }
  if (low == index->n || strcmp(index->members[low].item->string, key) != 0) return NULL;
  const cJSON *item = index->members[low].item;
  return cJSON_IsNull(item) ? NULL : item;
}
