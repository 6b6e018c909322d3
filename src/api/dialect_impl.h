// src/api/dialect_impl.h - shared by the dialects.
#ifndef TD_API_DIALECT_IMPL_H
#define TD_API_DIALECT_IMPL_H

#include "api/dialect.h"
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
// The random part of the response's id.
const char *td_dialect_id(const td_dialect_state *s);
// Writes the members of from, but for those named, which end with NULL.
void td_dialect_pass(td_json_writer *w, const cJSON *from, const char *const *but);
// Appends the text of content: a string, or the text of its parts joined with line feeds. Parts of
// other kinds are an error, which names them by where.
td_status td_dialect_text(td_buf *out, const cJSON *content, const char *where,
                          td_api_error *error);
// The stop string that ended the answer; NULL: none.
const char *td_dialect_stop_string(const td_answer *answer);

// The store's messages of a response, appended to out. False: it is not there.
bool td_response_store_get(td_response_store *store, const char *id, td_buf *out);
// Keeps messages under id; drops the oldest when there are many.
void td_response_store_put(td_response_store *store, const char *id, const td_buf *messages);

#endif
