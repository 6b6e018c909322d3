// src/api/turn.c - digests of what was said.
#include "api/turn.h"

#include <string.h>

#include "api/api_impl.h"
#include "api/delta.h"
#include "base/str.h"

void td_api_said_begin(td_sha256 *sha, const char *content, size_t len) {
  while (len && td_is_space(content[0]))
    content++, len--;
  while (len && td_is_space(content[len - 1]))
    len--;
  td_sha256_begin(sha);
  td_sha256_add(sha, content, len);
}

void td_api_said_call(td_sha256 *sha, const char *name, const char *arguments) {
  cJSON *json;
  td_err ignored;
  td_buf text = TD_BUF_INIT;
  if (td_json_parse(&json, arguments, strlen(arguments), TD_JSON_MAX_DEPTH, &ignored) == TD_OK) {
    td_json_writer w = TD_JSON_WRITER(&text);
    td_api_write_json(&w, NULL, json);
    cJSON_Delete(json);
  } else {
    td_buf_str(&text, arguments);
  }
  td_sha256_add(sha, "", 1);
  td_sha256_add(sha, name, strlen(name) + 1);
  td_sha256_add(sha, td_buf_text(&text), text.len);
  td_buf_free(&text);
}

td_status td_api_said_by(const td_output_parser *how, const char *text, size_t len, td_text_end end,
                         td_digest *said, td_buf *reasoning, td_err *err) {
  td_output_parser parts = {.begins_in_reasoning = how->begins_in_reasoning,
                            .parse_tool_calls = how->parse_tool_calls,
                            .one_call = how->one_call,
                            .is_harmony = how->is_harmony,
                            .params = how->params};
  td_delta message = {0};
  td_sha256 sha;
  td_status st = td_delta_parse(&message, &parts, text, len, end, err);
  td_api_said_begin(&sha, td_buf_text(&message.content), message.content.len);
  for (uint32_t i = 0; i < parts.n_calls; i++)
    td_api_said_call(&sha, parts.calls[i].name, td_buf_text(&parts.calls[i].arguments));
  td_sha256_end(&sha, said);
  td_output_parser_free(&parts);
  td_buf_free(reasoning);
  *reasoning = message.reasoning;
  message.reasoning = (td_buf)TD_BUF_INIT;
  td_delta_free(&message);
  return st;
}

// Begins with what is not a message.
static void begin_places(td_sha256 *sha, const td_api_request *r) {
  td_digest rest;
  td_sha256_begin(sha);
  td_sha256_add(sha, td_buf_text(&r->vars) + r->vars_rest, r->vars.len - r->vars_rest);
  td_sha256_end(sha, &rest);
  td_sha256_begin(sha);
  td_sha256_add(sha, &r->owner, sizeof r->owner);
  td_sha256_add(sha, &rest, sizeof rest);
}

void td_api_turn_place(const td_api_request *r, td_digest *place) {
  td_sha256 sha;
  begin_places(&sha, r);
  td_sha256_add(&sha, td_buf_text(&r->vars), r->n_marks ? r->marks[r->n_marks - 1].end : 0);
  td_sha256_end(&sha, place);
}

void td_api_turn_places(const td_api_request *r, td_digest *places) {
  td_sha256 sha, so_far;
  const char *vars = td_buf_text(&r->vars);
  size_t begin = 0;
  begin_places(&so_far, r);
  for (uint32_t i = 0; i <= r->n_marks; i++) {
    const size_t end = i ? r->marks[i - 1].end : 0;
    td_sha256_add(&so_far, vars + begin, end - begin);
    begin = end;
    sha = so_far;
    td_sha256_end(&sha, &places[i]);
  }
}

void td_api_turn_key(const td_digest *place, const td_digest *said, td_digest *key) {
  td_sha256 sha;
  td_sha256_begin(&sha);
  td_sha256_add(&sha, place, sizeof *place);
  td_sha256_add(&sha, said, sizeof *said);
  td_sha256_end(&sha, key);
}
