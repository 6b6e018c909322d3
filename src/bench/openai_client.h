// src/bench/openai_client.h - the client side of the OpenAI protocol, as needed by a load
// generator.
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/buf.h"
#include "base/status.h"

// Appends the body of a streaming chat request: one user message, greedy sampling, max_tokens
// tokens, usage reported with every token and at the end. Also sets ignore_eos, which servers
// without that member ignore. extra: an object whose members follow; NULL: none.
void td_client_body(td_buf *out, const char *model, const char *prompt, uint32_t max_tokens,
                    const char *extra);
// TD_EINVAL: extra is no JSON object.
td_status td_client_check_extra(const char *extra, td_err *err);

// Contents of one streamed event.
typedef struct {
  bool has_text;    // has non-empty content or reasoning
  bool is_error;    // an error object; see message
  int64_t n_prompt; // from usage; -1 if absent
  int64_t n_output; // from usage; -1 if absent
  bool is_so_far;   // n_output counts the tokens so far; more may follow
  char message[160];
} td_client_event;

// Parses the JSON of one event. TD_EFORMAT if it is invalid.
td_status td_client_parse_event(td_client_event *out, const char *json, size_t len, td_err *err);

// Appends the id of the first model in a response to GET /v1/models. TD_EFORMAT if there is none.
td_status td_client_parse_models(td_buf *out, const char *json, size_t len, td_err *err);

typedef struct {
  const char *server;  // http://HOST:PORT
  const char *api_key; // NULL: none
  const char *path;    // as /v1/models
  const td_buf *json;  // POST this; NULL: GET
  uint64_t max_ms;     // after which it is given up; 0: never
} td_fetch_args;

// Appends the body of a response with status 200. TD_EIO: there is none; for another status err has
// the message of its body. Blocks.
td_status td_fetch(td_buf *out, const td_fetch_args *args, td_err *err);
