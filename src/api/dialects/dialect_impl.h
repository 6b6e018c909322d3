// src/api/dialects/dialect_impl.h - shared by the dialects.
#pragma once

#include "api/api_impl.h"
#include "api/dialects/dialect.h"

// Notes that a member of the translated body stands for the request's member `from`, both as paths:
// "messages[2].tool_calls[0]", "messages[1].content[3]". It counts for their members, too. What is
// not noted has the same path in both.
void td_dialect_note(td_dialect_state *s, const char *member, const char *from);
// Begins chat's next message, which stands for the member `from`, with its role.
void td_dialect_begin_message(td_json_writer *w, td_dialect_state *s, const char *role,
                              const char *from);
// The path of chat's next message.
td_api_path td_dialect_next_message(const td_dialect_state *s);
// What it will say; may_show: images are shown to the model if that sees.
td_api_content td_dialect_begin_content(td_dialect_state *s, bool may_show);
// Writes the member `key` of object, whose path is where ("": it is the request), as the body's
// member `as`, unless it is absent or the request has that member itself.
void td_dialect_move(td_json_writer *w, td_dialect_state *s, const cJSON *root, const char *where,
                     const char *key, const char *as);

// What the type of a member has to be.
typedef struct {
  const char *key, *kind; // "an array"
  int types;              // of cJSON
} td_member_type;
td_status td_dialect_check_types(const cJSON *root, const td_member_type *members, size_t n,
                                 td_api_error *error);

// Begins a server-sent event whose data is an object with its name as type; ends object and event.
td_json_writer td_dialect_begin_event(td_buf *out, const char *type);
void td_dialect_end_event(td_json_writer *w);

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
// Writes chat's message of what a call returned, and frees said. block: the request's member that
// says so, at the path where, which names the call by id_key.
void td_dialect_write_result(td_json_writer *w, td_dialect_state *s, const cJSON *block,
                             const char *id_key, const char *where, td_api_content *said);
// The stop string that ended the answer; NULL: none.
const char *td_dialect_stop_string(const td_answer *answer);
