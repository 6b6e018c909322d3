// src/api/dialect.h - other protocols in front of chat: OpenAI's Responses, Anthropic's Messages,
// Ollama's chat and generate. A request is translated to the body of /v1/chat/completions; what is
// generated is written in the protocol's own form, complete or as the bytes of a stream.
#ifndef TD_API_DIALECT_H
#define TD_API_DIALECT_H

#include <cjson/cJSON.h>

#include "api/error.h"
#include "api/response.h"

typedef enum { TD_BLOCK_NONE, TD_BLOCK_REASONING, TD_BLOCK_TEXT, TD_BLOCK_CALL } td_block_kind;

// Conversations by response id, for previous_response_id. Any thread.
typedef struct td_response_store td_response_store;

// One answer while it is written.
typedef struct {
  const td_api_head *head;       // borrowed
  const td_output_parser *parts; // borrowed: holds the calls
  td_buf reasoning, content;     // streaming: all that was sent
  td_block_kind block;           // that is open
  uint32_t n_blocks;             // begun so far
  uint32_t call;                 // the open block's call
  size_t block_begin;            // where the open block's text begins in reasoning or content
  uint64_t sequence;             // events sent
  td_buf items;                  // Responses: finished output items, comma-separated
  td_buf echo;     // Responses: members of the request that the response repeats, as JSON
  td_buf messages; // Responses: the conversation so far, comma-separated chat messages
  bool is_stored;  // Responses: to be found by previous_response_id
  td_response_store *store;
} td_dialect_state;

// The end of an answer.
typedef struct {
  const char *finish_reason; // as in chat
  const td_answer *answer;
  const td_api_usage *usage;
  const td_api_timings *timings;
} td_dialect_end;

typedef struct {
  // Appends a chat body. state may be NULL where only the prompt matters.
  td_status (*translate)(td_buf *out, const cJSON *root, td_dialect_state *state,
                         td_api_error *error);
  void (*begin)(td_buf *out, td_dialect_state *state, const td_api_usage *usage);
  void (*delta)(td_buf *out, td_dialect_state *state, const td_delta *delta);
  void (*end)(td_buf *out, td_dialect_state *state, const td_dialect_end *end);
  void (*whole)(td_buf *out, td_dialect_state *state, const td_delta *message,
                const td_dialect_end *end);
  // An error: before the response begins, or in a stream.
  void (*error)(td_buf *out, const td_api_error *error, bool in_stream);
  const char *stream_type;  // content type of a stream; NULL: server-sent events
  const char *model_suffix; // that a model's name may have beyond its own; NULL: none
} td_dialect;

extern const td_dialect td_dialect_responses, td_dialect_messages, td_dialect_ollama_chat,
    td_dialect_ollama_generate;

// Translates a body and writes the chat body to out. Error: a td_api_error as of td_api_parse_chat.
td_status td_dialect_translate(const td_dialect *dialect, td_dialect_state *state, const char *body,
                               size_t len, td_buf *out, td_api_error *error);
void td_dialect_state_free(td_dialect_state *state);

// NULL: out of memory.
td_response_store *td_response_store_open(void);
void td_response_store_close(td_response_store *store);

#endif
