// src/front/turns.c - a list of turns, most recently used first, under a lock.
#include "front/turns.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

typedef struct kept kept;
struct kept {
  kept *next;
  td_digest key;
  int32_t *ids; // owned
  size_t n_ids;
  int32_t end;
  char *reasoning; // owned
};

struct td_turns {
  pthread_mutex_t lock;
  kept *first; // most recently used
  size_t n_bytes, max_bytes;
};

td_status td_turns_open(td_turns **out, size_t max_bytes, td_err *err) {
  *out = calloc(1, sizeof **out);
  if (!*out) return td_fail(err, TD_ENOMEM, "out of memory");
  TD_CHECK(pthread_mutex_init(&(*out)->lock, NULL) == 0);
  (*out)->max_bytes = max_bytes;
  return TD_OK;
}

static void free_turn(kept *k) {
  if (!k) return;
  free(k->ids);
  free(k->reasoning);
  free(k);
}

void td_turns_close(td_turns *turns) {
  if (!turns) return;
  for (kept *k = turns->first, *next; k; k = next) {
    next = k->next;
    free_turn(k);
  }
  pthread_mutex_destroy(&turns->lock);
  free(turns);
}

static size_t bytes_of(const kept *k) {
  return sizeof *k + k->n_ids * sizeof *k->ids + strlen(k->reasoning) + 1;
}

// Takes the turn out of the list; NULL: there is none.
static kept *take(td_turns *turns, const td_digest *key) {
  for (kept **link = &turns->first; *link; link = &(*link)->next) {
    kept *k = *link;
    if (memcmp(&k->key, key, sizeof *key) != 0) continue;
    *link = k->next;
    turns->n_bytes -= bytes_of(k);
    return k;
  }
  return NULL;
}

static void put_first(td_turns *turns, kept *k) {
  k->next = turns->first;
  turns->first = k;
  turns->n_bytes += bytes_of(k);
}

// Forgets turns from the end of the list until the rest fits.
static void make_room(td_turns *turns) {
  size_t n_bytes = 0;
  kept **link = &turns->first;
  while (*link && n_bytes + bytes_of(*link) <= turns->max_bytes) {
    n_bytes += bytes_of(*link);
    link = &(*link)->next;
  }
  for (kept *k = *link, *next; k; k = next) {
    next = k->next;
    free_turn(k);
  }
  *link = NULL;
  turns->n_bytes = n_bytes;
}

void td_turns_keep(td_turns *turns, const td_turn *turn) {
  kept *k = calloc(1, sizeof *k);
  if (!k) return;
  *k = (kept){.key = turn->key, .n_ids = turn->n_ids, .end = turn->end};
  k->ids = malloc(turn->n_ids * sizeof *k->ids + 1);
  k->reasoning = strdup(turn->reasoning);
  if (!k->ids || !k->reasoning) {
    free_turn(k);
    return;
  }
  if (turn->n_ids) memcpy(k->ids, turn->ids, turn->n_ids * sizeof *k->ids);
  pthread_mutex_lock(&turns->lock);
  free_turn(take(turns, &turn->key));
  put_first(turns, k);
  make_room(turns);
  pthread_mutex_unlock(&turns->lock);
}

bool td_turns_find(td_turns *turns, const td_digest *key, td_token_ids *ids, int32_t *end,
                   char **reasoning) {
  td_err ignored;
  bool found = false;
  pthread_mutex_lock(&turns->lock);
  kept *k = take(turns, key);
  if (k) {
    put_first(turns, k);
    *end = k->end;
    *reasoning = strdup(k->reasoning);
    found = *reasoning && td_token_ids_add(ids, k->ids, k->n_ids, &ignored) == TD_OK;
    if (!found) free(*reasoning);
  }
  pthread_mutex_unlock(&turns->lock);
  return found;
}
