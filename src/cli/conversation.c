// src/cli/conversation.c - the messages of a chat.
#include "cli/conversation.h"

#include <stdlib.h>

static void free_message(td_message *m) {
  td_buf_free(&m->content);
  td_buf_free(&m->reasoning);
}

void td_conversation_free(td_conversation *c) {
  td_conversation_cut(c, 0);
  td_buf_free(&c->system);
  free(c->messages);
  *c = (td_conversation){0};
}

td_message *td_conversation_add(td_conversation *c, td_role role) {
  if (c->n == c->cap) {
    size_t cap = c->cap ? 2 * c->cap : 16;
    td_message *more = realloc(c->messages, cap * sizeof *more);
    if (!more) return NULL;
    c->messages = more;
    c->cap = cap;
  }
  td_message *m = &c->messages[c->n++];
  *m = (td_message){.role = role};
  return m;
}

void td_conversation_cut(td_conversation *c, size_t n) {
  while (c->n > n)
    free_message(&c->messages[--c->n]);
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
  if (reasoning && reasoning->len) {
    td_jw_str_len(w, "reasoning_content", td_buf_text(reasoning), reasoning->len);
  }
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
