// src/api/dialect.c - what the dialects share, and the store of conversations.
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "api/api_impl.h"
#include "api/dialect_impl.h"

#define MAX_STORED       1024
#define MAX_STORED_BYTES (64u << 20)

void td_dialect_state_free(td_dialect_state *state) {
  td_buf_free(&state->reasoning);
  td_buf_free(&state->content);
  td_buf_free(&state->items);
  td_buf_free(&state->echo);
  td_buf_free(&state->messages);
}

td_status td_dialect_translate(const td_dialect *dialect, td_dialect_state *state, const char *body,
                               size_t len, td_buf *out, td_api_error *error) {
  cJSON *root = NULL;
  td_status st = td_api_parse_root(&root, body, len, error);
  if (st == TD_OK) st = dialect->translate(out, root, state, error);
  if (st == TD_OK && out->failed) st = td_api_fail(error, 503, NULL, NULL, "out of memory");
  cJSON_Delete(root);
  return st;
}

void td_dialect_event(td_buf *out, const char *name, td_buf *json) {
  td_buf_printf(out, "event: %s\ndata: ", name);
  td_buf_add(out, td_buf_text(json), json->len);
  td_buf_str(out, "\n\n");
  out->failed |= json->failed;
  td_buf_clear(json);
}

const char *td_dialect_id(const td_dialect_state *s) {
  const char *dash = strchr(s->head->id, '-');
  return dash ? dash + 1 : s->head->id;
}

void td_dialect_pass(td_json_writer *w, const cJSON *from, const char *const *but) {
  for (const cJSON *item = from->child; item; item = item->next) {
    bool is_passed = !cJSON_IsNull(item);
    for (size_t i = 0; but[i] && is_passed; i++)
      is_passed = strcmp(item->string, but[i]) != 0;
    if (is_passed) td_api_write_json(w, item->string, item);
  }
}

td_status td_dialect_text(td_buf *out, const cJSON *content, const char *where,
                          td_api_error *error) {
  if (cJSON_IsString(content)) {
    td_buf_str(out, content->valuestring);
    return TD_OK;
  }
  if (!cJSON_IsArray(content)) {
    return td_api_bad(error, where, "%s must be a string or an array of parts", where);
  }
  bool is_first = true;
  for (const cJSON *part = content->child; part; part = part->next) {
    const cJSON *text = td_json_get(part, "text"), *type = td_json_get(part, "type");
    if (!cJSON_IsString(text)) text = td_json_get(part, "refusal");
    if (!cJSON_IsString(text)) {
      return td_api_bad(error, where, "%s: a part of type %.64s is not supported, only text", where,
                        cJSON_IsString(type) ? type->valuestring : "?");
    }
    if (!is_first) td_buf_char(out, '\n');
    td_buf_str(out, text->valuestring);
    is_first = false;
  }
  return TD_OK;
}

const char *td_dialect_stop_string(const td_answer *answer) {
  if (!answer->stopped) return NULL;
  const char *rest = td_buf_text(&answer->text) + answer->n_sure;
  for (unsigned i = 0; i < answer->stops->n; i++) {
    const td_stop_string *stop = &answer->stops->strings[i];
    if (strncmp(rest, stop->text, stop->len) == 0) return stop->text;
  }
  return NULL;
}

// ---- blocks ------------------------------------------------------------------------------------

void td_dialect_close_block(td_buf *out, td_dialect_state *s, const td_block_writer *writer) {
  if (s->block == TD_BLOCK_NONE) return;
  writer->close(out, s);
  s->block = TD_BLOCK_NONE;
}

static void open_block(td_buf *out, td_dialect_state *s, td_block_kind kind, uint32_t call,
                       const td_block_writer *writer) {
  if (s->block == kind && (kind != TD_BLOCK_CALL || s->call == call)) return;
  td_dialect_close_block(out, s, writer);
  s->block = kind;
  s->call = call;
  s->block_begin = kind == TD_BLOCK_REASONING ? s->reasoning.len : s->content.len;
  writer->open(out, s);
  s->n_blocks++;
}

void td_dialect_blocks(td_buf *out, td_dialect_state *s, const td_delta *delta,
                       const td_block_writer *writer) {
  if (delta->reasoning.len) {
    open_block(out, s, TD_BLOCK_REASONING, 0, writer);
    td_buf_add(&s->reasoning, delta->reasoning.data, delta->reasoning.len);
    writer->text(out, s, delta->reasoning.data, delta->reasoning.len);
  }
  if (delta->content.len) {
    open_block(out, s, TD_BLOCK_TEXT, 0, writer);
    td_buf_add(&s->content, delta->content.data, delta->content.len);
    writer->text(out, s, delta->content.data, delta->content.len);
  }
  for (uint32_t i = delta->first_call; i < delta->last_call; i++) {
    const td_tool_call *call = &s->parts->calls[i];
    open_block(out, s, TD_BLOCK_CALL, i, writer);
    if (call->arguments.len > call->n_told) {
      writer->text(out, s, call->arguments.data + call->n_told, call->arguments.len - call->n_told);
    }
  }
}

// ---- the store ---------------------------------------------------------------------------------

typedef struct stored {
  struct stored *next; // newer
  char id[64];
  td_buf messages;
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

static void drop_oldest(td_response_store *store) {
  stored *gone = store->oldest;
  store->oldest = gone->next;
  if (!store->oldest) store->newest = NULL;
  store->n--;
  store->n_bytes -= gone->messages.len;
  td_buf_free(&gone->messages);
  free(gone);
}

void td_response_store_close(td_response_store *store) {
  if (!store) return;
  while (store->oldest)
    drop_oldest(store);
  pthread_mutex_destroy(&store->lock);
  free(store);
}

bool td_response_store_get(td_response_store *store, const char *id, td_buf *out) {
  bool found = false;
  pthread_mutex_lock(&store->lock);
  for (const stored *s = store->oldest; s && !found; s = s->next) {
    if (strcmp(s->id, id) != 0) continue;
    td_buf_add(out, td_buf_text(&s->messages), s->messages.len);
    found = true;
  }
  pthread_mutex_unlock(&store->lock);
  return found;
}

void td_response_store_put(td_response_store *store, const char *id, const td_buf *messages) {
  stored *s = calloc(1, sizeof *s);
  if (!s) return; // it will not be found
  strncpy(s->id, id, sizeof s->id - 1);
  td_buf_add(&s->messages, td_buf_text(messages), messages->len);
  pthread_mutex_lock(&store->lock);
  *(store->newest ? &store->newest->next : &store->oldest) = s;
  store->newest = s;
  store->n++;
  store->n_bytes += s->messages.len;
  while (store->n > 1 && (store->n > MAX_STORED || store->n_bytes > MAX_STORED_BYTES))
    drop_oldest(store);
  pthread_mutex_unlock(&store->lock);
}
