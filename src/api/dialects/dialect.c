// src/api/dialects/dialect.c - what the dialects share.
#include <string.h>

#include "api/dialects/dialect_impl.h"
#include "base/str.h"

void td_dialect_state_free(td_dialect_state *state) {
  td_buf_free(&state->reasoning);
  td_buf_free(&state->content);
  td_buf_free(&state->items);
  td_buf_free(&state->echo);
  td_buf_free(&state->origins);
  td_buf_free(&state->messages);
  td_buf_free(&state->input);
  cJSON_Delete(state->own_tools);
  td_buf_free(&state->idle);
  td_buf_free(&state->fields);
  td_buf_free(&state->prompt);
}

const td_dialect *td_dialect_of_path(const char *path, bool is_anthropic) {
  static const struct {
    const char *begin;
    const td_dialect *dialect;
  } all[] = {{"/v1/messages", &td_dialect_messages},
             {"/v1/responses", &td_dialect_responses},
             {"/v1/chat/", NULL},
             {"/v1/completions", NULL},
             {"/api/", &td_dialect_ollama_chat},
             {"/completion", &td_dialect_completion},
             {"/infill", &td_dialect_infill},
             {"/embedding", &td_dialect_completion},
             {"/rerank", &td_dialect_completion},
             {"/props", &td_dialect_completion},
             {"/slots", &td_dialect_completion}};
  for (size_t i = 0; i < TD_COUNT(all); i++)
    if (strncmp(path, all[i].begin, strlen(all[i].begin)) == 0) return all[i].dialect;
  return is_anthropic ? &td_dialect_messages : NULL;
}

td_status td_dialect_translate(const td_dialect *dialect, td_dialect_state *state, const char *body,
                               size_t len, td_buf *out, td_api_error *error) {
  cJSON *root = NULL;
  td_status st = td_api_parse_root(&root, body, len, error);
  if (st == TD_OK) st = dialect->translate(out, root, state, error);
  if (st == TD_OK && (out->failed || state->origins.failed))
    st = td_api_fail(error, 503, NULL, NULL, "out of memory");
  cJSON_Delete(root);
  return st;
}

td_status td_dialect_peek(const td_dialect *dialect, td_dialect_load *out, const char *body,
                          size_t len, td_api_error *error) {
  cJSON *root = NULL;
  td_status st = td_api_parse_root(&root, body, len, error);
  if (st == TD_OK) st = dialect->peek(out, root, error);
  cJSON_Delete(root);
  return st;
}

// ---- names -------------------------------------------------------------------------------------

// A line each: the member of the body, a blank, the request's.
void td_dialect_note(td_dialect_state *s, const char *member, const char *from) {
  td_buf_printf(&s->origins, "%s %s\n", member, from);
}

td_api_path td_dialect_next_message(const td_dialect_state *s) {
  return td_api_item("messages", s->n_messages);
}

td_api_content td_dialect_begin_content(td_dialect_state *s, bool may_show) {
  return (td_api_content){
      .sees = s->sees && may_show, .origins = &s->origins, .message = td_dialect_next_message(s)};
}

void td_dialect_begin_message(td_json_writer *w, td_dialect_state *s, const char *role,
                              const char *from) {
  td_dialect_note(s, td_dialect_next_message(s).text, from);
  s->n_messages++;
  td_jw_add(w, "{'role': %s", role);
}

void td_dialect_move(td_json_writer *w, td_dialect_state *s, const cJSON *root, const char *where,
                     const char *key, const char *as) {
  const cJSON *object = where[0] ? td_json_get(root, where) : root;
  const cJSON *item = td_json_get(object, key);
  if (!item || td_json_get(root, as)) return;
  td_dialect_note(s, as, td_api_member(where, key).text);
  td_api_write_json(w, as, item);
}

void td_dialect_name(const td_dialect_state *s, td_api_error *error) {
  size_t longest = 0;
  char path[2 * TD_API_PARAM_BYTES];
  for (const char *line = td_buf_text(&s->origins), *end; *line; line = end + 1) {
    const size_t n = strcspn(line, " ");
    end = strchr(line, '\n');
    // The member itself, or what holds it.
    const bool is_within = strncmp(error->param, line, n) == 0 && strchr(".[", error->param[n]);
    if (!is_within || n <= longest) continue;
    const char *from = line + n + 1;
    longest = n;
    snprintf(path, sizeof path, "%.*s%s", (int)(end - from), from, error->param + n);
  }
  if (longest) td_api_error_rename(error, path);
}

td_status td_dialect_check_types(const cJSON *root, const td_member_type *members, size_t n,
                                 td_api_error *error) {
  for (size_t i = 0; i < n; i++) {
    const cJSON *item = td_json_get(root, members[i].key);
    if (item && !(item->type & members[i].types))
      return td_api_wrong(error, members[i].key, "must be %s", members[i].kind);
  }
  return TD_OK;
}

// ---- parts -------------------------------------------------------------------------------------

td_json_writer td_dialect_begin_event(td_buf *out, const char *type) {
  td_buf_printf(out, "event: %s\ndata: ", type);
  td_json_writer w = TD_JSON_WRITER(out);
  td_jw_add(&w, "{'type': %s", type);
  return w;
}

void td_dialect_end_event(td_json_writer *w) {
  td_jw_end_object(w);
  td_buf_str(w->out, "\n\n");
}

const char *td_dialect_id(const td_dialect_state *s) {
  const char *dash = strchr(s->head->id, '-');
  return dash ? dash + 1 : s->head->id;
}

void td_dialect_pass(td_json_writer *w, const cJSON *from, const char *but) {
  for (const cJSON *item = from->child; item; item = item->next) {
    if (cJSON_IsNull(item) || td_is_word(but, item->string)) continue;
    td_api_write_json(w, item->string, item);
  }
}

void td_dialect_write_result(td_json_writer *w, td_dialect_state *s, const cJSON *block,
                             const char *id_key, const char *where, td_api_content *said) {
  const cJSON *id = td_json_get(block, id_key);
  const td_api_path chat = td_dialect_next_message(s);
  td_dialect_begin_message(w, s, "tool", where);
  if (id) {
    td_dialect_note(s, td_api_member(chat.text, "tool_call_id").text,
                    td_api_member(where, id_key).text);
    td_api_write_json(w, "tool_call_id", id);
  }
  td_api_write_content(w, said);
  td_jw_end_object(w);
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
    // A line feed between two texts belongs to neither.
    const bool is_apart = s->content.len && s->block != TD_BLOCK_TEXT &&
                          delta->content.data[0] == '\n';
    if (is_apart) td_buf_char(&s->content, '\n');
    open_block(out, s, TD_BLOCK_TEXT, 0, writer);
    td_buf_add(&s->content, delta->content.data + is_apart, delta->content.len - is_apart);
    writer->text(out, s, delta->content.data + is_apart, delta->content.len - is_apart);
  }
  for (uint32_t i = delta->first_call; i < delta->last_call; i++) {
    const td_tool_call *call = &s->parts->calls[i];
    open_block(out, s, TD_BLOCK_CALL, i, writer);
    if (call->arguments.len > call->n_sent)
      writer->text(out, s, call->arguments.data + call->n_sent, call->arguments.len - call->n_sent);
  }
}
