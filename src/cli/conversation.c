// src/cli/conversation.c - the messages of a chat.
#include "cli/conversation.h"

#include <stdlib.h>
#include <string.h>

#include "base/grow.h"
#include "base/json_parse.h"

#define MAX_FILE_BYTES (1u << 28)

void td_conversation_free(td_conversation *c) {
  td_conversation_cut(c, 0);
  td_buf_free(&c->system);
  free(c->messages);
  *c = (td_conversation){0};
}

td_message *td_conversation_add(td_conversation *c, td_role role) {
  if (!TD_GROW(c->messages, c->n, c->cap, 16)) return NULL;
  td_message *m = &c->messages[c->n++];
  *m = (td_message){.role = role};
  return m;
}

void td_conversation_cut(td_conversation *c, size_t n) {
  while (c->n > n) {
    td_message *last = &c->messages[--c->n];
    td_buf_free(&last->content);
    td_buf_free(&last->reasoning);
  }
  if (c->first > c->n) c->first = c->n;
}

bool td_conversation_slide(td_conversation *c) {
  for (size_t i = c->first + 1; i < c->n; i++) {
    if (c->messages[i].role != TD_ROLE_USER) continue;
    c->first = i;
    return true;
  }
  return false;
}

static void write_message(td_json_writer *w, const char *role, const td_buf *content,
                          const td_buf *reasoning) {
  td_jw_begin_object(w, NULL);
  td_jw_str(w, "role", role);
  td_jw_str_len(w, "content", td_buf_text(content), content->len);
  if (reasoning && reasoning->len)
    td_jw_str_len(w, "reasoning_content", td_buf_text(reasoning), reasoning->len);
  td_jw_end_object(w);
}

void td_conversation_write(const td_conversation *c, td_json_writer *w, bool all) {
  td_jw_begin_array(w, "messages");
  if (c->system.len) write_message(w, "system", &c->system, NULL);
  for (size_t i = all ? 0 : c->first; i < c->n; i++) {
    const td_message *m = &c->messages[i];
    write_message(w, m->role == TD_ROLE_USER ? "user" : "assistant", &m->content, &m->reasoning);
  }
  td_jw_end_array(w);
}

// ---- files ----------------------------------------------------------------------------------

static td_status read_text(td_buf *out, const cJSON *message, const char *key, td_err *err) {
  const char *text = "";
  td_status st = td_json_get_str(message, key, &text, err);
  if (st == TD_OK) td_buf_str(out, text);
  return st == TD_OK ? td_buf_status(out, err) : st;
}

static td_status read_message(td_conversation *c, const cJSON *message, td_err *err) {
  const char *role = "";
  td_status st = td_json_get_str(message, "role", &role, err);
  if (st != TD_OK) return st;
  if (!strcmp(role, "system")) return read_text(&c->system, message, "content", err);
  if (strcmp(role, "user") != 0 && strcmp(role, "assistant") != 0)
    return td_fail(err, TD_EFORMAT, "its role is not system, user or assistant");
  td_message *m = td_conversation_add(c, role[0] == 'u' ? TD_ROLE_USER : TD_ROLE_ASSISTANT);
  if (!m) return td_fail(err, TD_ENOMEM, "out of memory");
  st = read_text(&m->content, message, "content", err);
  if (st == TD_OK) st = read_text(&m->reasoning, message, "reasoning_content", err);
  if (st == TD_OK && !m->reasoning.len) st = read_text(&m->reasoning, message, "reasoning", err);
  return st;
}

td_status td_conversation_read(td_conversation *c, const char *path, td_err *err) {
  cJSON *root = NULL;
  td_status st = td_json_parse_file(&root, path, MAX_FILE_BYTES, err);
  if (st != TD_OK) return st;
  const cJSON *messages = td_json_get(cJSON_IsArray(root) ? root->child : root, "messages");
  td_conversation read = {0};
  int n = 0;
  if (!cJSON_IsArray(messages))
    st = td_fail(err, TD_EFORMAT, "%s: holds no list of messages", path);
  for (const cJSON *m = messages ? messages->child : NULL; st == TD_OK && m; m = m->next, n++) {
    st = read_message(&read, m, err);
    if (st != TD_OK) td_err_prefix(err, "%s: message %d", path, n);
  }
  cJSON_Delete(root);
  td_conversation *gone = st == TD_OK ? c : &read;
  td_conversation_free(gone);
  if (st == TD_OK) *c = read;
  return st;
}
