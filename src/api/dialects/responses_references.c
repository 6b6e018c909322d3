// src/api/dialects/responses_references.c - items of stored responses, by reference.
#include <stdlib.h>
#include <string.h>

#include "api/dialects/responses_impl.h"

#define MAX_REFERENCES 1024 // a request
#define MAX_BYTES      (32u << 20)

struct td_referenced {
  td_referenced *next;
  char id[64];
  cJSON *root; // owned
};

void td_references_free(td_references *references) {
  for (td_referenced *r = references->responses, *next; r; r = next) {
    next = r->next;
    cJSON_Delete(r->root);
    free(r);
  }
  *references = (td_references){0};
}

td_status td_responses_count(td_references *references, size_t n_bytes, const char *where,
                             td_api_error *error) {
  references->n_bytes += n_bytes;
  if (references->n_bytes <= MAX_BYTES) return TD_OK;
  return td_api_wrong(error, where,
                      ": the stored responses that are referred to, and their items, have more "
                      "than %u MiB: refer to fewer",
                      MAX_BYTES >> 20);
}

static td_status parse(td_references *references, const char *id, const td_buf *json,
                       const char *where, td_api_error *error) {
  td_err err;
  td_referenced *r = json->failed ? NULL : calloc(1, sizeof *r);
  if (!r) return td_api_fail(error, 503, NULL, NULL, "out of memory");
  td_status st = td_json_parse(&r->root, td_buf_text(json), json->len, TD_JSON_MAX_DEPTH, &err);
  if (st != TD_OK) {
    free(r);
    return td_api_fail_err(error, where, &err);
  }
  snprintf(r->id, sizeof r->id, "%s", id);
  r->next = references->responses;
  references->responses = r;
  return TD_OK;
}

// *root NULL: there is no such response.
static td_status find_response(td_references *references, const td_dialect_state *state,
                               const char *id, const char *where, const cJSON **root,
                               td_api_error *error) {
  const td_referenced *r = references->responses;
  while (r && strcmp(r->id, id) != 0)
    r = r->next;
  *root = r ? r->root : NULL;
  td_buf json = TD_BUF_INIT;
  if (r || !state->store ||
      !td_response_store_get(state->store, state->owner, id, TD_STORED_RESPONSE, &json))
    return TD_OK;
  td_status st = td_responses_count(references, json.len, where, error);
  if (st == TD_OK) st = parse(references, id, &json, where, error);
  if (st == TD_OK) *root = references->responses->root;
  td_buf_free(&json);
  return st;
}

static const cJSON *item_of(const cJSON *items, const char *id) {
  for (const cJSON *item = items ? items->child : NULL; item; item = item->next)
    if (td_json_is(item, "id", id)) return item;
  return NULL;
}

// The item's id is PREFIX_RESPONSE_INDEX.
td_status td_responses_refer(td_references *references, const td_dialect_state *state,
                             const cJSON *id, const char *where, const cJSON **item,
                             td_api_error *error) {
  const char *text = cJSON_IsString(id) ? id->valuestring : "";
  const char *begin = strchr(text, '_'), *end = strrchr(text, '_');
  const cJSON *root = NULL;
  char response[64] = "";
  if (begin && end > begin)
    snprintf(response, sizeof response, "resp_%.*s", (int)(end - begin - 1), begin + 1);
  td_status st = TD_OK;
  if (++references->n <= MAX_REFERENCES)
    st = find_response(references, state, response, where, &root, error);
  if (st != TD_OK) return st;
  *item = root ? item_of(td_json_get(root, "output"), text) : NULL;
  if (*item) return TD_OK;
  return td_api_fail(error, 404, where, "not_found",
                     "%s: there is no item %.64s; responses are kept in memory, the last ones "
                     "only: send the item itself",
                     where, text);
}
