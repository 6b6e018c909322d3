// src/api/dialects/response_store.c - responses of OpenAI's Responses by their ids, in memory.
#include "api/dialects/response_store.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "api/dialects/responses_impl.h"
#include "base/query.h"

#define MAX_STORED       1024
#define MAX_STORED_BYTES (64u << 20)

typedef struct stored {
  struct stored *next; // newer
  char id[64];
  uint64_t owner;
  td_buf parts[TD_N_STORED];
} stored;

struct td_response_store {
  pthread_mutex_t lock;
  stored *oldest, *newest;
  uint32_t n;
  size_t n_bytes;
};

td_response_store *td_response_store_open(void) {
  td_response_store *store = calloc(1, sizeof *store);
  if (store) pthread_mutex_init(&store->lock, NULL);
  return store;
}

static size_t size_of(const stored *s) {
  size_t n = sizeof *s;
  for (int i = 0; i < TD_N_STORED; i++)
    n += s->parts[i].len;
  return n;
}

static void free_stored(stored *s) {
  for (int i = 0; i < TD_N_STORED; i++)
    td_buf_free(&s->parts[i]);
  free(s);
}

// before: what is older; NULL: nothing is.
static void drop(td_response_store *store, stored *before) {
  stored **link = before ? &before->next : &store->oldest, *gone = *link;
  *link = gone->next;
  if (!gone->next) store->newest = before;
  store->n--;
  store->n_bytes -= size_of(gone);
  free_stored(gone);
}

void td_response_store_close(td_response_store *store) {
  if (!store) return;
  while (store->oldest)
    drop(store, NULL);
  pthread_mutex_destroy(&store->lock);
  free(store);
}

// *before: what is older than the response found. NULL: it is not there.
static stored *find(const td_response_store *store, uint64_t owner, const char *id,
                    stored **before) {
  *before = NULL;
  for (stored *s = store->oldest; s; *before = s, s = s->next)
    if (s->owner == owner && strcmp(s->id, id) == 0) return s;
  return NULL;
}

bool td_response_store_get(td_response_store *store, uint64_t owner, const char *id,
                           td_stored_part part, td_buf *out) {
  stored *before;
  pthread_mutex_lock(&store->lock);
  const stored *s = find(store, owner, id, &before);
  if (s) td_buf_add(out, td_buf_text(&s->parts[part]), s->parts[part].len);
  pthread_mutex_unlock(&store->lock);
  return s != NULL;
}

bool td_response_store_delete(td_response_store *store, uint64_t owner, const char *id) {
  stored *before;
  pthread_mutex_lock(&store->lock);
  const stored *s = find(store, owner, id, &before);
  if (s) drop(store, before);
  pthread_mutex_unlock(&store->lock);
  return s != NULL;
}

void td_response_store_put(td_response_store *store, uint64_t owner, const char *id,
                           const td_buf *const parts[TD_N_STORED]) {
  stored *s = calloc(1, sizeof *s);
  if (!s) return; // it will not be found
  bool failed = false;
  strncpy(s->id, id, sizeof s->id - 1);
  s->owner = owner;
  for (int i = 0; i < TD_N_STORED; i++) {
    td_buf_add(&s->parts[i], td_buf_text(parts[i]), parts[i]->len);
    failed |= parts[i]->failed || s->parts[i].failed;
  }
  if (failed) {
    free_stored(s);
    return;
  }
  pthread_mutex_lock(&store->lock);
  *(store->newest ? &store->newest->next : &store->oldest) = s;
  store->newest = s;
  store->n++;
  store->n_bytes += size_of(s);
  while (store->n > 1 && (store->n > MAX_STORED || store->n_bytes > MAX_STORED_BYTES))
    drop(store, NULL);
  pthread_mutex_unlock(&store->lock);
}

// ---- GET and DELETE -----------------------------------------------------------------------------

#define MAX_LISTED 100

static td_status fail_missing(td_api_error *error, const char *id) {
  return td_api_fail(error, 404, "id", "not_found",
                     "there is no response %.80s; responses are kept in memory, the last ones only",
                     id);
}

// A page of a list.
typedef struct {
  bool is_ascending;
  long limit;
  td_buf after; // "": from the begin
} page;

static td_status read_page(page *out, const char *query, td_api_error *error) {
  td_buf order = TD_BUF_INIT, limit = TD_BUF_INIT;
  td_query_get(&order, query, "order");
  out->is_ascending = strcmp(td_buf_text(&order), "asc") == 0;
  td_query_get(&limit, query, "limit");
  out->limit = limit.len ? strtol(td_buf_text(&limit), NULL, 10) : 20;
  td_query_get(&out->after, query, "after");
  td_buf_free(&order);
  td_buf_free(&limit);
  if (out->limit >= 1 && out->limit <= MAX_LISTED) return TD_OK;
  return td_api_wrong(error, "limit", "must be between 1 and %d", MAX_LISTED);
}

static void write_list(td_buf *out, const cJSON *items, const page *p) {
  td_json_writer w = TD_JSON_WRITER(out);
  const cJSON *first = NULL, *last = NULL, *end = items->child ? items->child->prev : NULL;
  const cJSON *item = p->is_ascending ? items->child : end;
  bool is_there = !p->after.len;
  long n = 0;
  td_jw_add(&w, "{'object': 'list', 'data': [");
  while (item && n < p->limit) {
    const cJSON *id = td_json_get(item, "id");
    if (is_there) {
      td_api_write_json(&w, NULL, item);
      if (!first) first = id;
      last = id;
      n++;
    }
    is_there |= td_json_is(item, "id", td_buf_text(&p->after));
    item = p->is_ascending ? item->next : item == items->child ? NULL : item->prev;
  }
  td_jw_end_array(&w);
  td_api_write_json(&w, "first_id", first);
  td_api_write_json(&w, "last_id", last);
  td_jw_add(&w, "'has_more': %i}", item != NULL);
}

// The items of a stored response's request, each with an id; the caller deletes them. NULL: the
// owner has no such response.
static cJSON *read_input(td_response_store *store, uint64_t owner, const char *id) {
  td_buf json = TD_BUF_INIT;
  cJSON *items = NULL;
  td_err ignored;
  td_buf_char(&json, '[');
  const bool is_there = td_response_store_get(store, owner, id, TD_STORED_INPUT, &json);
  td_buf_char(&json, ']');
  if (is_there && !json.failed)
    td_json_parse(&items, json.data, json.len, TD_JSON_MAX_DEPTH, &ignored);
  td_buf_free(&json);
  unsigned i = 0;
  for (cJSON *item = items ? items->child : NULL; item; item = item->next, i++) {
    char own[96];
    if (cJSON_IsString(td_json_get(item, "id")) || !cJSON_IsObject(item)) continue;
    snprintf(own, sizeof own, "in_%s_%u", id + strcspn(id, "_") + (strchr(id, '_') != NULL), i);
    cJSON_AddStringToObject(item, "id", own); // without memory it has none
  }
  return items;
}

static td_status get_input(td_buf *out, td_response_store *store, uint64_t owner, const char *id,
                           const char *query, td_api_error *error) {
  page p = {.after = TD_BUF_INIT};
  td_status st = read_page(&p, query, error);
  cJSON *items = st == TD_OK ? read_input(store, owner, id) : NULL;
  if (items) write_list(out, items, &p);
  if (st == TD_OK && !items) st = fail_missing(error, id);
  cJSON_Delete(items);
  td_buf_free(&p.after);
  return st;
}

td_status td_responses_get(td_buf *out, td_response_store *store, uint64_t owner, const char *path,
                           const char *query, td_api_error *error) {
  static const char of_items[] = "/input_items";
  char id[64];
  const size_t n = strcspn(path, "/");
  const char *rest = path + n;
  snprintf(id, sizeof id, "%.*s", n < sizeof id ? (int)n : 0, path);
  if (strcmp(rest, of_items) == 0) return get_input(out, store, owner, id, query, error);
  const bool is_there = !rest[0] &&
                        td_response_store_get(store, owner, id, TD_STORED_RESPONSE, out);
  return is_there ? TD_OK : fail_missing(error, path);
}

td_status td_responses_delete(td_buf *out, td_response_store *store, uint64_t owner, const char *id,
                              td_api_error *error) {
  if (!td_response_store_delete(store, owner, id)) return fail_missing(error, id);
  td_json_writer w = TD_JSON_WRITER(out);
  td_jw_add(&w, "{'id': %s, 'object': 'response', 'deleted': true}", id);
  return TD_OK;
}
