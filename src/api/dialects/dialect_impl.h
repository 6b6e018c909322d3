// src/api/dialects/dialect_impl.h - shared by the dialects.
#pragma once

#include "api/dialects/dialect.h"
#include "base/json_parse.h"
#include "base/json_write.h"

// Appends one server-sent event whose data is the JSON in json, and empties json.
void td_dialect_event(td_buf *out, const char *name, td_buf *json);

// How a protocol writes the blocks of an answer.
typedef struct {
  void (*open)(td_buf *out, td_dialect_state *s);
  void (*text)(td_buf *out, td_dialect_state *s, const char *text, size_t len);
  void (*close)(td_buf *out, td_dialect_state *s);
} td_block_writer;
// Writes a delta as blocks: each begins where the kind of text changes, or with a call.
void td_dialect_blocks(td_buf *out, td_dialect_state *s, const td_delta *delta,
                       const td_block_writer *writer);
void td_dialect_close_block(td_buf *out, td_dialect_state *s, const td_block_writer *writer);

// The call that is open.
static inline const td_tool_call *td_dialect_call(const td_dialect_state *s) {
  return &s->parts->calls[s->call];
}
// Writes a member "prompt" of token ids.
void td_dialect_write_prompt(td_json_writer *w, const td_token_ids *ids);
// The random part of the response's id.
const char *td_dialect_id(const td_dialect_state *s);
// Writes the members of `from` except those in `but`, words that blanks separate.
void td_dialect_pass(td_json_writer *w, const cJSON *from, const char *but);
// Writes chat's message of what the call `id` returned, and frees text.
void td_dialect_write_result(td_json_writer *w, const cJSON *id, td_buf *text);
// The stop string that ended the answer; NULL: none.
const char *td_dialect_stop_string(const td_answer *answer);
