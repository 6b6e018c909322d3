// src/api/dialects/response_store.c - responses of OpenAI's Responses by their ids, in memory.
#include "api/dialects/response_store.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

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
