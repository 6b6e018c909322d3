// src/api/dialects/dialect.h - other protocols in front of chat: OpenAI's Responses, Anthropic's
// Messages, Ollama's chat and generate, llama-server's completion and infill. A request is
// translated to the body of /v1/chat/completions or /v1/completions; what is generated is written
// in the protocol's own form, complete or as the bytes of a stream.
#pragma once

#include <cjson/cJSON.h>

#include "api/dialects/response_store.h"
#include "api/error.h"
#include "api/response.h"
#include "text/chat.h"

typedef enum { TD_BLOCK_NONE, TD_BLOCK_REASONING, TD_BLOCK_TEXT, TD_BLOCK_CALL } td_block_kind;

typedef struct td_dialect td_dialect;

// One answer while it is written.
typedef struct {
  const td_dialect *dialect;     // that writes it
  const td_api_head *head;       // borrowed
  const td_output_parser *parts; // borrowed: holds the calls
  td_buf reasoning, content;     // streaming: all that was sent
  td_block_kind block;           // that is open
  uint32_t n_blocks;             // begun so far
  uint32_t call;                 // the open block's call
  size_t block_begin;            // where the open block's text begins in reasoning or content
  uint64_t sequence;             // events sent
  td_buf items;                  // Responses: finished output items, comma-separated
  td_buf echo;      // Responses: members of the request that the response repeats, as JSON
  td_buf messages;  // Responses: the conversation so far, comma-separated chat messages
  bool is_stored;   // Responses: to be found by previous_response_id
  cJSON *own_tools; // Responses: td_responses_write_tools
  td_buf input;     // Responses: the request's items, comma-separated
  td_response_store *store;
  uint64_t owner; // of what is stored
  td_buf idle;    // the stream's keep-alive
  // Set before a request is translated.
  const td_chat *chat; // borrowed: the model's; NULL: without tokens for filling in
  bool is_count;       // only the prompt matters
  bool sees;           // images are shown to the model
  uint32_t n_ctx;
  // What the request was translated to, and asks for.
  unsigned n_messages;     // of the body
  td_buf origins;          // td_dialect_note
  bool is_text;            // the body is one of /v1/completions
  bool returns_tokens;     // llama-server: ids beside the text
  uint32_t n_probs;        // llama-server: candidates beside the text
  uint64_t max_predict_ns; // llama-server: the answer ends so long after its first token, once it
                           // has a whole line; 0: no limit
  td_buf fields;           // llama-server: response_fields, as JSON; empty: all
  td_buf prompt;           // llama-server: the prompt's text, which the response repeats
  // What is written next: a piece of the answer.
  const td_answer *answer;
  td_answer_piece piece;
  uint64_t n_prompt; // tokens
} td_dialect_state;

// The end of an answer.
typedef struct {
  const char *finish_reason; // as in chat
  const td_answer *answer;
  const td_api_usage *usage;
  const td_api_timings *timings;
} td_dialect_end;

// What a request says of the model's place in memory.
typedef struct {
  bool is_empty; // it has no prompt: the model is only loaded or unloaded
  bool has_keep;
  int64_t keep_ms; // time for which the model stays in memory without requests; -1: for ever
} td_dialect_load;

struct td_dialect {
  // Appends the body that the request stands for. What it is refused for later is named by
  // td_dialect_name.
  td_status (*translate)(td_buf *out, const cJSON *root, td_dialect_state *state,
                         td_api_error *error);
  void (*begin)(td_buf *out, td_dialect_state *state, const td_api_usage *usage);
  void (*delta)(td_buf *out, td_dialect_state *state, const td_delta *delta);
  void (*end)(td_buf *out, td_dialect_state *state, const td_dialect_end *end);
  void (*whole)(td_buf *out, td_dialect_state *state, const td_delta *message,
                const td_dialect_end *end);
  // An error: before the response begins, or in a stream.
  void (*error)(td_buf *out, const td_api_error *error, bool in_stream);
  const char *stream_type; // content type of a stream; NULL: server-sent events
  // A stream's keep-alive, appended to out. NULL: a comment.
  void (*idle)(td_buf *out, const td_dialect_state *state);
  // Reads what the request says of loading, before the model is loaded. NULL: nothing.
  td_status (*peek)(td_dialect_load *out, const cJSON *root, td_api_error *error);
  // Appends the response to a request that is_empty. how: load or unload.
  void (*loaded)(td_buf *out, const td_dialect_state *state, const char *how);
  bool has_logprobs;        // the request may ask for log-probabilities
  const char *model_suffix; // that a model's name may have beyond its own; NULL: none
};

// The dialect whose form errors of a path have, also where it has no endpoint. is_anthropic: the
// request says so itself, in the header anthropic-version. NULL: OpenAI's.
const td_dialect *td_dialect_of_path(const char *path, bool is_anthropic);

extern const td_dialect td_dialect_responses, td_dialect_messages, td_dialect_ollama_chat,
    td_dialect_ollama_generate, td_dialect_completion, td_dialect_infill;

// Translates a body and writes the body that it stands for to out. Error: a td_api_error as of
// td_api_parse_chat.
td_status td_dialect_translate(const td_dialect *dialect, td_dialect_state *state, const char *body,
                               size_t len, td_buf *out, td_api_error *error);
// Makes an error about the translated body one about the request: it names the member that the
// client sent.
void td_dialect_name(const td_dialect_state *state, td_api_error *error);
// Reads what a body says of loading (peek).
td_status td_dialect_peek(const td_dialect *dialect, td_dialect_load *out, const char *body,
                          size_t len, td_api_error *error);
void td_dialect_state_free(td_dialect_state *state);
